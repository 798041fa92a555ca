"""Checks of the vLLM connector that need what a test machine has not."""
