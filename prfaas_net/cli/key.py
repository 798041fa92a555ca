"""``prfaas key``."""

from __future__ import annotations

import sys
from typing import Annotated

import orjson
import typer

from prfaas_net.gateway.keys import KeyHash, new_key

__all__ = ["app"]

app = typer.Typer(help="Keys of clients, and the token with which nodes join.", no_args_is_help=True)


@app.callback()
def _key() -> None:
    """Keys of clients, and the token with which nodes join."""


@app.command("new")
def new(
    name: Annotated[str, typer.Option("--name", help="Who will hold it: shown in logs and records.")] = "client",
    admin: Annotated[bool, typer.Option("--admin", help="It may also reload the gateway's configuration.")] = False,
    join: Annotated[bool, typer.Option("--join", help="A token for nodes instead, to join the fleet with.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Make a key. It is shown once; what goes into the configuration is its hash."""
    key = new_key()
    key_hash = str(KeyHash.of(key))
    if as_json:
        sys.stdout.write(orjson.dumps({"name": name, "key": key, "hash": key_hash, "admin": admin}).decode() + "\n")
        return
    table = "[gateway.join]" if join else "[[gateway.api_keys]]"
    rows = [f'token_hash = "{key_hash}"'] if join else [f'name = "{name}"', f'hash = "{key_hash}"']
    rows += ["admin = true"] if admin and not join else []
    holder = "nodes: [join] token, or PRFAAS_PREFILL__JOIN__TOKEN" if join else "clients: Authorization: Bearer KEY"
    typer.echo(f"# For {holder}. It is not kept anywhere:\n{key}\n")
    typer.echo("# For the fleet's file (without 'gateway.' in a file of the gateway alone):")
    typer.echo("\n".join([table, *rows]))
