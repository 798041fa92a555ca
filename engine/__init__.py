"""Hybrid-attention language models on NumPy or CuPy: checkpoints, layers, prefill, decode, tokenizer.

An engine reads an ordinary Hugging Face directory and keeps a sequence's state in a buffer that its caller
owns, so that the state can be sent while it is being computed and decoded where it lands.
"""

from engine.engine import Engine, PrefillResult
from engine.tokenizer import TextStream, Tokenizer

__all__ = ["Engine", "PrefillResult", "TextStream", "Tokenizer"]
