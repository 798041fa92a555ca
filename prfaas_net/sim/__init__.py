"""Discrete-event simulation: the same scheduler classes on a virtual clock, deterministic by seed."""
