"""What a node says of itself."""

from __future__ import annotations

from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.engine_api import Engine
from prfaas_net.nodes.messages import NodeInfo
from prfaas_net.transport import Identity

__all__ = ["describe_node"]


def describe_node(config: NodeConfig, identity: Identity, engine: Engine) -> NodeInfo:
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
    )
