"""Make ``tests/engine/fixtures``: what transformers computes with the checkpoints of the tests.

    python -m tools.make_references [--out DIR] [FAMILY ...]

Needs torch and transformers, which nothing else here does. It writes a checkpoint with the very generator
that the tests use, runs it in float32 with eager attention, and records for a few prompts the last logits
and the greedy tokens, for one also the whole cache. Of several candidate prompts it keeps the one
whose greedy tokens are varied and the clearest, so that they prove something and do not hang on rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.engine.checkpoints import RECIPES, SPECIAL_TOKENS, VOCAB_SIZE, write_checkpoint

PROMPT_TOKENS = (5, 70, 193)  # less than a block, more than a chunk, several chunks of the delta rule
N_GREEDY = 16
N_CANDIDATES = 12


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.make_references", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, default=Path("tests/engine/fixtures"), metavar="DIR")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=", ".join(RECIPES))
    arguments = parser.parse_args(argv)
    unknown = set(arguments.families) - set(RECIPES)
    if unknown:
        parser.error(f"no such family: {', '.join(sorted(unknown))}; expected {', '.join(RECIPES)}")
    try:
        import torch
        import transformers
    except ImportError as error:
        print(f"error: {error}; install torch and transformers 5.24 or later to make references", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for family in arguments.families or RECIPES:
        directory: Path = arguments.out / family
        prompts = _write_reference(family, directory, torch, transformers)
        margin = min(prompt["min_margin"] for prompt in prompts.values())
        distinct = min(len(set(prompt["greedy"])) for prompt in prompts.values())
        print(f"{directory}: smallest margin {margin:.3f}, at least {distinct} distinct tokens a prompt")
    return 0


def _write_reference(family: str, directory: Path, torch: Any, transformers: Any) -> dict[str, Any]:
    """Write the oracle of one family; return its prompts."""
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint = write_checkpoint(Path(scratch), family)
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    draw = np.random.default_rng(3)
    prompts: dict[str, Any] = {}
    for n_tokens in PROMPT_TOKENS:
        candidates = [
            _run(model, draw.integers(len(SPECIAL_TOKENS), VOCAB_SIZE, n_tokens).tolist(), torch)
            for _ in range(N_CANDIDATES)
        ]
        prompts[f"p{n_tokens}"] = max(candidates, key=_merit)
    (directory / "oracle").mkdir(parents=True, exist_ok=True)
    body = {"model": family, "transformers": transformers.__version__, "torch": torch.__version__, "prompts": prompts}
    (directory / "oracle.json").write_text(json.dumps(body) + "\n")
    # The shortest says enough, but for a window: that must have moved on.
    windowed = RECIPES[family]().config.get("sliding_window") is not None
    chosen = f"p{PROMPT_TOKENS[1 if windowed else 0]}"
    cache = _cache_tensors(model, prompts[chosen]["input_ids"], torch)
    save_file(cache, directory / "oracle" / f"prefill_cache_{chosen}.safetensors")
    return prompts


def _merit(prompt: dict[str, Any]) -> tuple[bool, float]:
    """Varied answers before monotonous ones, then the clearer ones."""
    return len(set(prompt["greedy"])) >= N_GREEDY // 2, prompt["min_margin"]


def _cache_tensors(model: Any, input_ids: list[int], torch: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor of the cache after a prompt, by layer and transformers' own names."""
    tensors = {}
    with torch.no_grad():
        cache = model(input_ids=torch.tensor([input_ids]), use_cache=True).past_key_values
    for index, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            if torch.is_tensor(getattr(layer, name, None)) and getattr(layer, name).numel():
                tensors[f"layers.{index}.{name}"] = getattr(layer, name)
        for name in ("conv_states", "recurrent_states"):
            for key, tensor in (getattr(layer, name, None) or {}).items():
                tensors[f"layers.{index}.{name}.{key}"] = tensor
    for index, tensor in enumerate(getattr(cache, "linear_cache", [])):  # MiniMax keeps its own
        if torch.is_tensor(tensor):
            tensors[f"layers.{index}.linear_cache"] = tensor
    return {name: np.ascontiguousarray(tensor.numpy()) for name, tensor in tensors.items()}


def _run(model: Any, input_ids: list[int], torch: Any) -> dict[str, Any]:
    """One prompt: prefill, then cached greedy decoding."""
    tokens: list[int] = []
    margins: list[float] = []
    with torch.no_grad():
        out = model(input_ids=torch.tensor([input_ids]), use_cache=True)
        cache = out.past_key_values
        first = logits = out.logits[0, -1]
        for step in range(N_GREEDY):
            best = logits.topk(2).values
            margins.append(float(best[0] - best[1]))
            tokens.append(int(logits.argmax()))
            position = torch.tensor([[len(input_ids) + step]])
            out = model(input_ids=torch.tensor([tokens[-1:]]), cache=cache, position_ids=position, use_cache=True)
            logits = out.logits[0, -1]
    return {
        "input_ids": input_ids,
        "last_logits": [round(float(x), 6) for x in first],
        "greedy": tokens,
        "min_margin": round(min(margins), 5),
    }


if __name__ == "__main__":
    sys.exit(main())
