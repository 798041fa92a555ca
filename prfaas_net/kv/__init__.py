"""The vocabulary of what is moved: a model's cache layout, its place in memory, manifests and chunks."""

from prfaas_net.kv.chunks import MAX_CHUNK_BYTES, ChunkTable, checksum, transfer_digest
from prfaas_net.kv.layout import CacheLayout, KvKind, LayerLayout, TensorSpec
from prfaas_net.kv.manifest import KvChunk, Manifest
from prfaas_net.kv.regions import Region, RegionMap

__all__ = [
    "MAX_CHUNK_BYTES",
    "CacheLayout",
    "ChunkTable",
    "KvChunk",
    "KvKind",
    "LayerLayout",
    "Manifest",
    "Region",
    "RegionMap",
    "TensorSpec",
    "checksum",
    "transfer_digest",
]
