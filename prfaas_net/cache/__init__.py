"""What is kept of prompts that were run: one block pool, the hybrid prefix cache, the manager of the whole fleet."""
