"""Which backend this machine can have, and why."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prfaas_net.bench import namespaces
from prfaas_net.bench.namespaces import command, make_space, owned, remove_space
from prfaas_net.errors import ConfigError
from tools.netlab.backends.base import Backend
from tools.netlab.backends.netem import KernelNetem
from tools.netlab.backends.tun import TunLink
from tools.netlab.backends.uml import UmlNetem
from tools.netlab.backends.uml_wire import UML
from tools.netlab.names import PREFIX

__all__ = ["BACKENDS", "VARIABLE", "Choice", "available", "choose", "why_not"]

# Overrides the choice.
VARIABLE = "NETLAB"
BACKENDS: dict[str, Callable[[], Backend]] = {"netem": KernelNetem, "uml": UmlNetem, "tun": TunLink}
MODULES = Path("/usr/lib/uml/modules")
SETUP = "run tools/netlab/setup.sh"


@dataclass(frozen=True)
class Choice:
    """A backend and the reason for it, to be said aloud."""

    name: str
    reason: str

    def line(self) -> str:
        """For people."""
        return f"netlab: backend {self.name} ({self.reason})"


def why_not() -> str | None:
    """Why there can be no laboratory here, or None."""
    reason = namespaces.why_not(tun=False)
    if reason is not None:
        return reason.replace("emulated paths need", "netlab needs")
    return None if shutil.which("tc") else f"netlab needs the tc command ({SETUP})"


@functools.cache
def _netem_missing() -> str | None:
    space = f"{owned(PREFIX)}probe"
    make_space(space, {})
    try:
        command("tc", "-n", space, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms")
    except ConfigError as error:
        return f"kernel {platform.release()} has no sch_netem: {error.found}"
    finally:
        remove_space(space)
    return None


def _uml_missing() -> str | None:
    if shutil.which(UML) is None:
        return f"no {UML} ({SETUP})"
    if not list(MODULES.glob("*/kernel/net/sched/sch_netem.ko")):
        return f"{UML} has no modules under {MODULES} ({SETUP})"
    return None if shutil.which("insmod") else f"no insmod ({SETUP})"


def available() -> dict[str, str | None]:
    """By backend: None if it can be had, or why not."""
    reason = why_not()
    if reason is not None:
        return dict.fromkeys(BACKENDS, reason)
    no_tun = namespaces.why_not()
    return {"netem": _netem_missing(), "uml": no_tun or _uml_missing(), "tun": no_tun}


def choose(wanted: str | None = None) -> Choice:
    """The wanted backend, or the truest that can be had: netem, then uml, then tun.

    Args:
        wanted: a name, or None or "auto"; without it the environment variable ``NETLAB`` counts.

    Raises:
        ConfigError: there is no such backend, or it cannot be had here.
    """
    wanted = wanted or os.environ.get(VARIABLE) or "auto"
    can = available()
    if wanted != "auto":
        if wanted not in can:
            raise ConfigError("no such backend", expected=f"auto or one of {', '.join(can)}", found=repr(wanted))
        if can[wanted] is not None:
            raise ConfigError(f"backend {wanted} cannot be had here", found=can[wanted])
        return Choice(wanted, "as asked")
    for name, missing in can.items():
        if missing is None:
            before = [reason for reason in can.values() if reason]
            return Choice(name, "; ".join(before) or "the running kernel's own sch_netem")
    raise ConfigError("no laboratory here", found="; ".join(filter(None, can.values())))
