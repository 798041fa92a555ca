"""One file that describes a whole fleet, and what every daemon reads out of it."""
