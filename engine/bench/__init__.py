"""``python -m engine bench``: how fast prefill and decode are, beside transformers on the same machine."""
