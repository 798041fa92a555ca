"""What a node says of itself."""

from __future__ import annotations

from prfaas_net.kv import CacheLayout, KvKind
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Engine
from prfaas_net.nodes.messages import KvSizeModel, NodeInfo, ProfileModel
from prfaas_net.transport import Identity

__all__ = ["describe_node"]


def describe_node(
    config: NodeConfig, identity: Identity, engine: Engine, profile: ProfileModel | None = None
) -> NodeInfo:
    """The answer to ``GET /v1/node``."""
    return NodeInfo(
        node_id=config.node_id,
        boot_id=identity.boot_id,
        cluster=config.cluster,
        role=config.role,
        model=engine.model_name,
        layout=engine.layout.fingerprint,
        max_model_tokens=engine.max_model_tokens,
        vocab_size=engine.vocab_size,
        prefill_chunk_tokens=engine.prefill_chunk_tokens,
        block_tokens=config.cache.block_tokens if config.cache.enabled else 0,
        groups=tuple(sorted({layer.kind for layer in engine.layout.layers})),
        kv_size=_kv_size(engine.layout),
        profile=profile,
        takes_prefixes=config.takes_prefixes,
    )


def _kv_size(layout: CacheLayout) -> KvSizeModel:
    per_row = dict.fromkeys(KvKind, 0)
    for layer in layout.layers:
        per_row[layer.kind] += sum(tensor.row_bytes for tensor in layer.tensors)
    return KvSizeModel(
        constant_bytes=per_row[KvKind.LINEAR],
        bytes_per_token=per_row[KvKind.FULL],
        window_bytes_per_token=per_row[KvKind.WINDOW],
        window_tokens=max((layer.window_tokens for layer in layout.layers), default=0),
    )
