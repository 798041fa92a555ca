"""Check paged memory on a CUDA device against the same in host memory, and measure it.

    python -m tools.vllm.device_pages_check [--mib MIB]

Needs torch and a device, not vLLM. Chunks of every form are copied out of pages that the model's stream has just
written, and into others, and compared byte for byte with what :class:`~prfaas_net.connectors.pages.HostPages` does.
Exit status 0 if all agree, 1 if not, 2 if there is no device.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from prfaas_net.connectors.agreement import Form, agree
from prfaas_net.connectors.device_pages import DevicePages
from prfaas_net.connectors.layout import EngineLayout, GroupLayout, PageLayout, PagePart, StateKind
from prfaas_net.connectors.pages import HostPages
from prfaas_net.connectors.plan import PagePlan, sections_of

N_BLOCKS, WITHIN_S = 64, 30.0


def main(argv: Sequence[str] | None = None, *, device: str = "cuda") -> int:
    """Run a command line; return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.vllm.device_pages_check", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--mib", type=int, default=64, help="how much to copy for the measurement")
    arguments = parser.parse_args(argv)
    if device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here", file=sys.stderr)
        return 2
    agreed = [_agrees(layout_of(16), layout_of(tokens), device) for tokens in (16, 32, 8)]
    _measure(device, arguments.mib)
    return 0 if all(agreed) else 1


def layout_of(tokens: int) -> EngineLayout:
    """Rows of heads, latents, and a state; blocks of so many tokens."""
    rows = PagePart("rows", 0, 2, 16, 2, 32, 64, 2)
    latent = PagePart("latent", 0, 1, 24, 4, tokens * 96, 96, 4)
    pages = (
        PageLayout(tokens * 64, "bfloat16", "rows", (rows,)),
        PageLayout(tokens * 96, "float32", "latent", (latent,)),
        PageLayout(1000, "float32", "state"),
    )
    groups = (
        GroupLayout(StateKind.FULL, tokens, 0, 2, (("a", 0),)),
        GroupLayout(StateKind.FULL, tokens, 0, 0, (("b", 1),)),
        GroupLayout(StateKind.STATE, tokens, 0, 0, (("c", 2),)),
    )
    return EngineLayout("check", "check", "w", 1, 0, pages, groups)


def _agrees(theirs: EngineLayout, ours: EngineLayout, device: str) -> bool:
    stop = 90
    tables = {
        layout: [[1 + 3 * n % N_BLOCKS for n in range(-(-stop // layout.groups[0].block_tokens))]] * 2 + [[5]]
        for layout in (theirs, ours)
    }
    generator = np.random.default_rng(1)
    source = {
        name: generator.integers(0, 255, (N_BLOCKS, page.n_bytes), dtype=np.uint8)
        for name, (_, _, page) in theirs.by_layer.items()
    }
    wanted = {name: np.zeros((N_BLOCKS, page.n_bytes), np.uint8) for name, (_, _, page) in ours.by_layer.items()}
    on_device = {name: torch.zeros(pages.shape, dtype=torch.uint8, device=device) for name, pages in source.items()}
    landed = {name: torch.zeros(pages.shape, dtype=torch.uint8, device=device) for name, pages in wanted.items()}
    hosts = HostPages(theirs, source), HostPages(ours, wanted)
    devices = (
        DevicePages(theirs, on_device, chunk_bytes=1 << 20), DevicePages(ours, landed, chunk_bytes=1 << 20)
    )  # fmt: skip
    for name, pages in source.items():  # on the model's stream, right before it is read on the other
        on_device[name].copy_(torch.from_numpy(pages), non_blocking=True)
    shares = agree(ours, theirs).shares[0]
    plan = PagePlan(stop, sections_of(ours, shares, tables[ours], 0, stop), 48, 1 << 20)
    good = True
    for chunk in plan.chunks:
        section, index = plan.sections[chunk.section], theirs.by_layer[chunk.layer][0]
        copies = [memoryview(bytearray(chunk.n_bytes)) for _ in range(2)]
        copied = threading.Event()
        hosts[0].gather(chunk, section, tables[theirs][index], copies[0], lambda: None)
        devices[0].gather(chunk, section, tables[theirs][index], copies[1], copied.set)
        good = good and copied.wait(WITHIN_S) and copies[0] == copies[1]
        hosts[1].scatter(chunk, section, tables[ours][index], copies[0], (0, 0))
        devices[1].scatter(chunk, section, tables[ours][index], copies[1], (0, 0))
    same = all(np.array_equal(landed[name].cpu().numpy(), pages) for name, pages in wanted.items())
    forms = sorted({section.form.value for section in plan.sections})
    print(f"blocks of {theirs.groups[0].block_tokens} to {ours.groups[0].block_tokens}, {forms}: {good and same}")
    return good and same


def _measure(device: str, mib: int) -> None:
    layout = layout_of(1024)
    layout = replace(layout, groups=layout.groups[:1])
    pages = {"a": torch.zeros((N_BLOCKS, layout.pages[0].n_bytes), dtype=torch.uint8, device=device)}
    memory = DevicePages(layout, pages, chunk_bytes=1 << 20)
    sections = sections_of(layout, agree(layout, layout).shares[0], [list(range(1, 17))], 0, 16 * 1024)
    plan = PagePlan(16 * 1024, sections, 16 * 1024, 1 << 20)
    assert plan.sections[0].form is Form.PAGES
    chunk, out = plan.chunks[0], memoryview(bytearray(plan.chunks[0].n_bytes))
    count = max(1, (mib << 20) // chunk.n_bytes)
    left = threading.Semaphore(0)
    begun = time.perf_counter()
    for _ in range(count):
        memory.gather(chunk, plan.sections[0], list(range(1, 17)), out, lambda: left.release())
    for _ in range(count):
        left.acquire(timeout=WITHIN_S)
    seconds = time.perf_counter() - begun
    print(f"out of the device: {count * chunk.n_bytes / seconds / 1e9:.2f} GB/s in chunks of {chunk.n_bytes} bytes")


if __name__ == "__main__":
    sys.exit(main())
