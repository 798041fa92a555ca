"""vLLM's KV cache as pages: what its tensors and specs say, in the terms of :mod:`prfaas_net.connectors.layout`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import vllm
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec, MLAAttentionSpec, SlidingWindowSpec

from prfaas_net.connectors.layout import EngineLayout, GroupLayout, PageLayout, PagePart, StateKind
from prfaas_net.errors import ConfigError

__all__ = ["describe", "pages_of"]


def describe(
    vllm_config: Any, kv_cache_config: Any, kv_caches: Mapping[str, torch.Tensor], *, weights: str
) -> tuple[EngineLayout, dict[str, torch.Tensor]]:
    """One rank's layout, and each layer's pages as bytes of shape (blocks, page bytes).

    Raises:
        ConfigError: a layer's memory is of a kind that this connector does not know; names it.
    """
    parallel = vllm_config.parallel_config
    pages: list[PageLayout] = []
    memory: dict[str, torch.Tensor] = {}
    groups = []
    for group in kv_cache_config.transfer_groups:
        layers = []
        for name in group.layer_names:
            spec = _spec_of(group.kv_cache_spec, name)
            memory[name] = pages_of(name, kv_caches[name], kv_cache_config.num_blocks)
            page = _page(vllm_config, spec, kv_caches[name], memory[name].shape[1])
            if page not in pages:
                pages.append(page)
            layers.append((name, pages.index(page)))
        groups.append(_group(vllm_config, _spec_of(group.kv_cache_spec, group.layer_names[0]), tuple(layers)))
    layout = EngineLayout(
        engine=f"vllm {vllm.__version__}",
        model=str(vllm_config.model_config.served_model_name or vllm_config.model_config.model),
        weights=weights,
        tp_size=parallel.tensor_parallel_size,
        tp_rank=parallel.rank % parallel.tensor_parallel_size,
        pages=tuple(pages),
        groups=tuple(groups),
    )
    return layout, memory


def _spec_of(spec: Any, layer: str) -> Any:
    """A group's spec may hold one for each of its layers."""
    return spec.kv_cache_specs[layer] if hasattr(spec, "kv_cache_specs") else spec


def _group(vllm_config: Any, spec: Any, layers: tuple[tuple[str, int], ...]) -> GroupLayout:
    if isinstance(spec, MambaSpec):
        return GroupLayout(StateKind.STATE, spec.block_size, 0, 0, layers, spec.num_speculative_blocks)
    window = spec.sliding_window if isinstance(spec, SlidingWindowSpec) else 0
    kind = StateKind.WINDOW if window else StateKind.FULL
    if isinstance(spec, MLAAttentionSpec):
        return GroupLayout(kind, spec.block_size, window, 0, layers)
    tp_size = vllm_config.parallel_config.tensor_parallel_size
    heads = spec.num_kv_heads * tp_size
    if spec.num_kv_heads == 1:  # perhaps one head on several ranks
        heads = min(heads, vllm_config.model_config.get_total_num_kv_heads())
    return GroupLayout(kind, spec.block_size, window, heads, layers)


def pages_of(name: str, tensor: Any, n_blocks: int) -> torch.Tensor:
    """A layer's memory as bytes of shape (blocks, page bytes), without a copy.

    Raises:
        ConfigError: a block's bytes do not lie together.
    """
    if not isinstance(tensor, torch.Tensor) or tensor.shape[0] % n_blocks:
        raise ConfigError(
            f"the KV cache of {name} cannot be read", expected=f"one tensor of {n_blocks} blocks",
            found=f"{type(tensor).__name__} {tuple(getattr(tensor, 'shape', ()))}",
        )  # fmt: skip
    # The attention kernel's blocks may be smaller than the block table's: so many of them lie one after the other.
    ratio = tensor.shape[0] // n_blocks
    extents = sorted(zip(tensor.stride()[1:], tensor.shape[1:], strict=True))
    dense = 1
    for stride, size in extents:
        if size > 1 and stride != dense:
            raise ConfigError(
                f"a block of {name} does not lie together", expected="a layout whose blocks are dense",
                found=f"shape {tuple(tensor.shape)}, strides {tensor.stride()}",
                do="set VLLM_KV_CACHE_LAYOUT to another layout",
            )  # fmt: skip
        dense *= size
    item, block_stride = tensor.element_size(), tensor.stride()[0]
    if ratio > 1 and block_stride != dense:
        raise ConfigError(f"a block of {name} does not lie together", do="set --block-size to the kernel's")
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    shape, strides = (n_blocks, ratio * dense * item), (ratio * block_stride * item, 1)
    return torch.as_strided(raw, shape, strides, tensor.storage_offset() * item)


def _page(vllm_config: Any, spec: Any, tensor: torch.Tensor, n_bytes: int) -> PageLayout:
    if isinstance(spec, MambaSpec):
        kind = f"{spec.mamba_type}: {[list(shape) for shape in spec.shapes]}"
        return PageLayout(n_bytes, ", ".join(str(dtype) for dtype in spec.dtypes), kind)
    if not isinstance(spec, AttentionSpec):
        return PageLayout(n_bytes, str(tensor.dtype), type(spec).__name__)
    dtype = f"{spec.dtype}".removeprefix("torch.")
    mode = f" {spec.kv_quant_mode.name}" if int(spec.kv_quant_mode) else ""
    tag = _tag(vllm_config, spec, tensor)
    return PageLayout(n_bytes, dtype + mode, tag, _parts(spec, tensor, tag) if not mode else ())


def _tag(vllm_config: Any, spec: Any, tensor: torch.Tensor) -> str:
    if isinstance(spec, MLAAttentionSpec):
        return "latent"
    if tensor.device.type != "cpu":
        return "rows"
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache_dtype = vllm_config.cache_config.cache_dtype
    return f"cpu {_get_attn_isa(vllm_config.model_config.dtype, spec.block_size, spec.head_size, cache_dtype)}"


def _parts(spec: Any, tensor: torch.Tensor, tag: str) -> tuple[PagePart, ...]:
    """Where a token's row lies in a page; nothing if that is not known."""
    if tensor.dim() != 4 or tensor.shape[2] != spec.block_size or tensor.shape[1] != spec.num_kv_heads:
        return ()
    item = tensor.element_size()
    _, heads, tokens, width = tensor.shape
    _, head, token, dim = (stride * item for stride in tensor.stride())
    if tag in ("latent", "rows"):
        return (PagePart(tag, 0, heads, width, item, head, token, dim),)
    if tag not in ("cpu vec", "cpu vec16") or width != 2 * spec.head_size:
        return ()  # packed for matrix units
    # vLLM's CPU kernels keep, for each head, the keys of a block as (dim, tokens) and then its values as (tokens, dim).
    size = spec.head_size
    keys = PagePart("k", 0, heads, size, item, head, item, tokens * item)
    return keys, PagePart("v", tokens * size * item, heads, size, item, head, size * item, item)
