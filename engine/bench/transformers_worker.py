"""The other side of the benchmark: transformers on torch CPU, in a process (and perhaps a Python) of its own.

Run by path, with nothing of this package importable: it reads a command a line and answers with a line. The
first argument is the number of threads.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    import torch
    import transformers

    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(int(sys.argv[1]))
    answer: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    model: Any = None
    print(json.dumps(answer), flush=True)
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "load":
                model = transformers.AutoModelForCausalLM.from_pretrained(command["directory"], dtype=torch.float32)
                model.eval()
                answer = {}
            else:
                with torch.inference_mode():
                    run = _prefill if command["do"] == "prefill" else _decode
                    answer = {"seconds": run(torch, model, command)}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(answer), flush=True)


def _prefill(torch: Any, model: Any, command: dict[str, Any]) -> float:
    ids = torch.arange(command["tokens"])[None] % 4000 + 5
    started = time.perf_counter()
    model(input_ids=ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - started


def _decode(torch: Any, model: Any, command: dict[str, Any]) -> float:
    batch, context = command["batch"], command["context"]
    ids = (torch.arange(batch * context) % 4000 + 5).reshape(batch, context)
    out = model(input_ids=ids, use_cache=True, logits_to_keep=1)
    cache, token = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)
    started = 0.0
    for step in range(command["steps"] + 1):
        if step == 1:  # the first one warms up
            started = time.perf_counter()
        position = torch.full((batch, 1), context + step)
        # The cache has two names in the versions that are about.
        out = model(
            input_ids=token, position_ids=position, use_cache=True, logits_to_keep=1, **{command["cache"]: cache}
        )
        token = out.logits[:, -1].argmax(-1, keepdim=True)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
