"""Entry point of ``prfaas``: the commands, and the one place where errors become one line and an exit code."""

from __future__ import annotations

import sys
from typing import Any

import typer

from prfaas_net import __version__
from prfaas_net.cli import bench, doctor, gateway, key, node, plan, probe, relay, sim, top, up
from prfaas_net.errors import PrfaasError

__all__ = ["app", "command", "run"]

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130

app = typer.Typer(
    name="prfaas",
    help="Cross-datacenter prefill/decode disaggregation over Ethernet.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("up")(up.up)
app.command("prefill")(node.prefill)
app.command("decode")(node.decode)
app.command("pd")(node.pd)
app.command("gateway")(gateway.gateway)
app.command("relay")(relay.relay)
app.command("top")(top.top)
app.command("doctor")(doctor.doctor)
app.command("probe")(probe.command)
app.add_typer(bench.app, name="bench")
app.add_typer(sim.app, name="sim")
app.add_typer(key.app, name="key")
app.command("plan")(plan.plan)


@app.command("version")
def version() -> None:
    """Print the version."""
    typer.echo(f"prfaas-net {__version__}")


def command() -> Any:
    """All of it, with a variable of the environment for every flag: ``PRFAAS_GATEWAY_LISTEN`` is ``--listen`` of
    ``prfaas gateway``."""
    made = typer.main.get_command(app)
    _name_variables(made, "PRFAAS")
    return made


def _name_variables(group: Any, prefix: str) -> None:
    for name, below in group.commands.items():
        here = f"{prefix}_{name}".upper()
        if hasattr(below, "commands"):
            _name_variables(below, here)
        for parameter in below.params:
            if parameter.param_type_name == "option" and parameter.envvar is None:
                flag = max(parameter.opts, key=len)
                parameter.envvar = f"{here}_{flag.lstrip('-').upper()}".replace("-", "_")


def run() -> None:
    """Run a command; never a traceback for what a user can cause."""
    try:
        command()(prog_name="prfaas")
    except PrfaasError as error:
        typer.secho(f"prfaas: {error.line()}", fg="red", err=True)
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
