"""``prfaas up`` with its two clusters at the two ends of an impaired link, for a person to watch and to disturb.

The PrfaaS cluster is on side a, the PD cluster and the gateway on side b; this host reaches the gateway by a door of
its own. What the gateway asks of the other cluster crosses the impaired link, as its KVCache does.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence

from prfaas_net.config import load_config
from prfaas_net.errors import ConfigError, PrfaasError
from tools.netlab.link import Link
from tools.netlab.schedule import Event, Player, Step
from tools.netlab.settings import WAYS
from tools.netlab.traffic import Traffic

__all__ = ["HELP", "Console", "arguments", "watch"]

HELP = (
    "type to change the link: [ab|ba] rate 50Mbps, delay 40ms, loss 0.01, queue 256KiB ...; "
    "cross N (competing flows from a to b; cross 0 ends them); counters"
)


def arguments(link: Link, extra: Sequence[str]) -> list[str]:
    """The command line of ``prfaas up`` on this link."""
    return [
        sys.executable, "-m", "prfaas_net.cli", "up",
        "--prfaas-netns", link.a.space, "--prfaas-address", link.a.address,
        "--pd-netns", link.b.space, "--pd-address", link.b.address,
        "--host", link.door("b"), *extra,
    ]  # fmt: skip


# "prfaas up" is gone within 2 s of a signal.
_END_LIMIT_S = 5.0


class Console:
    """Obeys what a person types while the fleet runs.

    Args:
        say: where answers go.
    """

    def __init__(self, link: Link, say: Callable[[str], None]) -> None:
        self._link = link
        self._say = say
        self._rival: Traffic | None = None

    def listen(self) -> None:
        """Obey every line of stdin."""
        for line in sys.stdin:
            self.obey(line)

    def obey(self, line: str) -> None:
        """One line; a mistake is said, not raised."""
        words = line.split()
        if not words:
            return
        try:
            self._do(words)
        except PrfaasError as error:
            self._say(error.line())

    def _do(self, words: list[str]) -> None:
        if words == ["counters"]:
            for way, of in self._link.counters().items():
                self._say(f"{way}: {of}")
        elif words[0] == "cross" and len(words) == 2 and words[1].isdigit():
            self._compete(int(words[1]))
        else:
            named = words[0] in WAYS
            rest = words[named:]
            if not rest or len(rest) % 2:
                raise ConfigError("not understood", expected=HELP, found=" ".join(words))
            step = _step(words[0] if named else None, dict(zip(rest[::2], rest[1::2], strict=True)))
            self._link.set(step.way, **step.changes())
            self._say(step.line())

    def _compete(self, flows: int) -> None:
        if self._rival is not None:
            self._rival.stop()
            self._rival.close()
        self._rival = self._link.cross("ab", cc="cubic", flows=flows) if flows else None
        self._say(f"{flows} competing flows")


def _step(way: str | None, texts: dict[str, str]) -> Step:
    return load_config(Step, flags={"t": 0, "way": way, **texts})


def watch(link: Link, extra: Sequence[str], schedule: Sequence[Step], say: Callable[[str], None]) -> int:
    """Run ``prfaas up`` on the link until it ends, obeying stdin meanwhile; its exit code.

    Args:
        extra: arguments of ``prfaas up``.
        schedule: what happens to the link, counted from now.
    """

    def setter(step: Step) -> Callable[[], None]:
        def do() -> None:
            link.set(step.way, **step.changes())
            say(step.line())

        return do

    # In our process group: Ctrl-C reaches it as well, and it ends its own processes in order.
    with subprocess.Popen(arguments(link, extra), stdin=subprocess.DEVNULL) as process:
        try:
            with Player([Event(step.t, step.line(), setter(step)) for step in schedule]):
                console = Console(link, say)
                say(HELP)
                threading.Thread(target=console.listen, daemon=True).start()
                return process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
