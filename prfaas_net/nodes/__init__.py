"""Prefill and decode nodes: daemons around an engine, on top of the KV stream."""
