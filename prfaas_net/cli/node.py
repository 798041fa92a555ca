"""``prfaas prefill``, ``prfaas decode`` and ``prfaas pd``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from prfaas_net.cli.configured import Check, NodeName, read_node, show_node
from prfaas_net.cli.daemon import Stoppable, run_daemon
from prfaas_net.cli.models import load_engine
from prfaas_net.errors import ConfigError
from prfaas_net.logs import secrets_of, set_up_logs
from prfaas_net.nodes.config import NodeConfig
from prfaas_net.nodes.decode import DecodeNode
from prfaas_net.nodes.pd import PdNode
from prfaas_net.nodes.prefill import PrefillNode

__all__ = ["decode", "pd", "prefill"]

Config = Annotated[
    Path | None, typer.Option("--config", "-c", help="TOML file, of this node or of a fleet; flags go over it.")
]
Model = Annotated[Path | None, typer.Option("--model", help="Hugging Face directory; default: the demo model.")]
NodeId = Annotated[str | None, typer.Option("--node-id", help="Name of this node, unique in the fleet.")]
Cluster = Annotated[str | None, typer.Option("--cluster", help="Cluster that this node belongs to.")]
Listen = Annotated[str | None, typer.Option("--listen", help="Control address, HOST:PORT; port 0 picks one.")]
KvListen = Annotated[str | None, typer.Option("--kv-listen", help="Address that takes KVCache, HOST:PORT.")]
Advertise = Annotated[
    list[str] | None,
    typer.Option("--advertise", help="CLUSTER=HOST:PORT: what senders of that cluster dial instead. Repeatable."),
]
Arena = Annotated[str | None, typer.Option("--arena", help="Host memory for KVCache, such as 4GiB.")]
KvDtype = Annotated[str | None, typer.Option("--kv-dtype", help="How KVCache is kept: float32 or bfloat16.")]
Connections = Annotated[int | None, typer.Option("--connections", help="Data connections of a link.")]
Profile = Annotated[Path | None, typer.Option("--profile", help="How fast this node is: see python -m engine profile.")]
Budget = Annotated[str | None, typer.Option("--budget", help="Egress budget of a link, such as 10Gbps.")]


def _load(command: str, config: Path | None, node: str | None, flags: dict[str, Any], *, check: bool) -> NodeConfig:
    settings, fleet = read_node(command, config, node, flags)
    if settings.convertible and command != "pd":
        raise ConfigError(f"prfaas {command} only does that", found="convertible = true", do="start it with prfaas pd")
    if check:
        show_node(settings, fleet, config)
    set_up_logs(settings.log, {"service": f"prfaas-{command}", "node": settings.node_id}, secrets_of(settings))
    return settings


def _rereading(
    command: str, config: Path | None, node: str | None, flags: dict[str, Any]
) -> Callable[[], NodeConfig] | None:
    """How the configuration is read anew, where it came from a file."""
    return None if config is None else lambda: read_node(command, config, node, flags)[0]


def prefill(
    config: Config = None,
    node: NodeName = None,
    check: Check = False,
    model: Model = None,
    node_id: NodeId = None,
    cluster: Cluster = None,
    listen: Listen = None,
    arena: Arena = None,
    kv_dtype: KvDtype = None,
    profile: Profile = None,
    connections: Connections = None,
    budget: Budget = None,
) -> None:
    """Run a prefill node: prompts in, KVCache out over the KV stream."""
    flags = {
        "model": str(model) if model else None, "node_id": node_id, "cluster": cluster, "listen": listen,
        "kv_dtype": kv_dtype, "profile": str(profile) if profile else None,
        "kv": {"arena": arena, "connections": connections, "budget": budget},
    }  # fmt: skip
    settings = _load("prefill", config, node, {"role": "prefill", **flags}, check=check)
    engine = load_engine(
        settings.model,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        kv_dtype=settings.kv_dtype,
        pace_tokens_per_s=settings.prefill_pace,
    )

    async def start() -> tuple[Stoppable, dict[str, Any]]:
        server = PrefillNode(settings, engine)
        server.ground.reread = _rereading("prefill", config, node, {"role": "prefill", **flags})
        await server.start()
        return server, {"node": settings.node_id, "address": server.control.address}

    run_daemon(start)


def decode(
    config: Config = None,
    node: NodeName = None,
    check: Check = False,
    model: Model = None,
    node_id: NodeId = None,
    cluster: Cluster = None,
    listen: Listen = None,
    kv_listen: KvListen = None,
    advertise: Advertise = None,
    arena: Arena = None,
    kv_dtype: KvDtype = None,
    profile: Profile = None,
) -> None:
    """Run a decode node: KVCache in, tokens out."""
    names = dict(entry.partition("=")[::2] for entry in advertise or [])
    flags = {
        "model": str(model) if model else None, "node_id": node_id, "cluster": cluster, "listen": listen,
        "kv_dtype": kv_dtype, "profile": str(profile) if profile else None,
        "kv": {"arena": arena, "listen": kv_listen, "advertise": names or None},
    }  # fmt: skip
    settings = _load("decode", config, node, {"role": "decode", **flags}, check=check)
    engine = load_engine(settings.model, prefill_chunk_tokens=settings.prefill_chunk_tokens, kv_dtype=settings.kv_dtype)

    async def start() -> tuple[Stoppable, dict[str, Any]]:
        server = DecodeNode(settings, engine)
        server.ground.reread = _rereading("decode", config, node, {"role": "decode", **flags})
        await server.start()
        kv_address = server.listener.address
        return server, {"node": settings.node_id, "address": server.control.address, "kv_address": kv_address}

    run_daemon(start)


def pd(
    config: Config = None,
    node: NodeName = None,
    check: Check = False,
    role: Annotated[str | None, typer.Option("--role", help="What it does at first: prefill or decode.")] = None,
    model: Model = None,
    node_id: NodeId = None,
    cluster: Cluster = None,
    listen: Listen = None,
    kv_listen: KvListen = None,
    advertise: Advertise = None,
    arena: Arena = None,
    kv_dtype: KvDtype = None,
    profile: Profile = None,
    connections: Connections = None,
    budget: Budget = None,
) -> None:
    """Run a node that prefills or decodes, and changes from one to the other while it serves."""
    names = dict(entry.partition("=")[::2] for entry in advertise or [])
    flags = {
        "role": role, "convertible": True, "model": str(model) if model else None, "node_id": node_id,
        "cluster": cluster, "listen": listen, "kv_dtype": kv_dtype, "profile": str(profile) if profile else None,
        "kv": {
            "arena": arena, "listen": kv_listen, "advertise": names or None, "connections": connections,
            "budget": budget,
        },
    }  # fmt: skip
    settings = _load("pd", config, node, flags, check=check)
    engine = load_engine(
        settings.model,
        prefill_chunk_tokens=settings.prefill_chunk_tokens,
        kv_dtype=settings.kv_dtype,
        pace_tokens_per_s=settings.prefill_pace,
    )

    async def start() -> tuple[Stoppable, dict[str, Any]]:
        server = PdNode(settings, engine)
        server.ground.reread = _rereading("pd", config, node, flags)
        await server.start()
        kv_address = server.decode.listener.address
        return server, {"node": settings.node_id, "address": server.control.address, "kv_address": kv_address}

    run_daemon(start)
