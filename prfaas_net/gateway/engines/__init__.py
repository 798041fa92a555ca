"""What the gateway says to nodes: our own, and vLLM and SGLang servers."""
