"""What the kernel knows of a link, and what follows from it. Pure: samples in, numbers and verdicts out."""
