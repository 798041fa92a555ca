"""What a user would pick instead, each in a process pair of its own. Optional; never a dependency.

These modules need nothing but NumPy and the peer's own package, so that another interpreter can run them.
"""
