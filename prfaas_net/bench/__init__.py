"""Measurements beside a reference taken in the same minute. Each part that moves bytes is a process of its own."""
