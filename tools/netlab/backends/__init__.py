"""What impairs packets: the running kernel, a User Mode Linux kernel, or our own link in user space."""
