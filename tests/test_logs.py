"""Logs: one event a line, with the request that it is about, and never a secret."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator

import pytest

from prfaas_net.gateway.config import GatewayConfig
from prfaas_net.logs import LogSection, about, secrets_of, set_up_logs
from prfaas_net.nodes.config import NodeConfig

SECRET = "a-key-that-nobody-may-see"
log = logging.getLogger("prfaas_net.some.room")


class Heard:
    """What a process with this configuration would have written."""

    def __init__(self, **settings: object) -> None:
        self._text = io.StringIO()
        self.handler = set_up_logs(LogSection.model_validate(settings), {"node": "n0"}, [SECRET, "short"], self._text)

    @property
    def lines(self) -> list[str]:
        return self._text.getvalue().splitlines()

    @property
    def events(self) -> list[dict[str, str]]:
        return [json.loads(line) for line in self.lines]


@pytest.fixture(autouse=True)
def _quiet_again() -> Iterator[None]:
    """Logging belongs to the process: put back what a test has set."""
    names = ("", "prfaas_net", "engine", "prfaas_net.some.room", "aiohttp")
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = list(logging.getLogger().handlers)
    yield
    logging.getLogger().handlers[:] = handlers
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def test_a_line_of_json_says_who_what_when_and_about_which_request() -> None:
    """Names of the process and of the request are fields of their own."""
    heard = Heard(format="json")
    with about(request_id="r1"), about(trace_id="t1"):
        log.info("%d tokens", 7)
    log.warning("alone")
    first, second = heard.events
    assert first.pop("ts").endswith("Z")
    assert first == {
        "level": "info", "logger": "prfaas_net.some.room", "message": "7 tokens", "node": "n0", "request_id": "r1",
        "trace_id": "t1",
    }  # fmt: skip
    assert second["level"] == "warning" and "request_id" not in second


async def test_tasks_and_threads_that_a_request_starts_are_about_it_too() -> None:
    """Also after the block that started them has ended, and beside requests of other tasks."""
    heard = Heard(format="json")
    go_on = asyncio.Event()

    async def work(name: str) -> None:
        await go_on.wait()
        await asyncio.to_thread(log.info, name)

    with about(request_id="r1"):
        one = asyncio.create_task(work("r1"))
    with about(request_id="r2"):
        two = asyncio.create_task(work("r2"))
    go_on.set()
    await asyncio.gather(one, two)
    assert {event["message"]: event["request_id"] for event in heard.events} == {"r1": "r1", "r2": "r2"}


def test_an_event_is_one_line_whatever_it_quotes() -> None:
    """Nobody can write a line of the log, or colour a terminal, with a header or a prompt."""
    for form in ("text", "json"):
        heard = Heard(format=form)
        log.info("found %s", "x\nERROR forged\x1b[31m\r")
        assert len(heard.lines) == 1
        assert "\x1b" not in heard.lines[0] and "\r" not in heard.lines[0]


def test_a_traceback_is_told_in_either_form() -> None:
    """In JSON as a field."""
    heard = Heard(format="json")
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("a bug")
    assert "ValueError: boom" in heard.events[0]["exception"]
    heard = Heard()
    try:
        raise ValueError("boom")
    except ValueError:
        log.exception("a bug")
    assert heard.lines[-1] == "ValueError: boom" and "ERROR" in heard.lines[0]


def test_levels_are_settings() -> None:
    """Of all of ours, and of single rooms; libraries are heard from warnings on."""
    heard = Heard(level="warning", levels={"prfaas_net.some.room": "debug", "aiohttp": "error"})
    log.debug("heard")
    logging.getLogger("prfaas_net.another").info("not heard")
    logging.getLogger("aiohttp").warning("not heard")
    logging.getLogger("somebody").info("not heard")
    logging.getLogger("somebody").warning("heard")
    assert len(heard.lines) == 2 and all(line.endswith(": heard") for line in heard.lines)
    assert "DEBUG" in heard.lines[0]


def test_settings_may_change_while_we_run() -> None:
    """The last ones count, and nothing is written twice."""
    first, second = Heard(), Heard(level="error")
    log.warning("not heard")
    log.error("heard")
    assert not first.lines and len(second.lines) == 1


def test_no_secret_is_written_whatever_a_message_contains() -> None:
    """Not in messages, names or tracebacks."""
    for form in ("text", "json"):
        heard = Heard(format=form)
        with about(request_id=f"id-{SECRET}"):
            try:
                raise ValueError(SECRET)
            except ValueError:
                log.exception("the key %s is wrong", SECRET)
        assert not [line for line in heard.lines if SECRET in line]
        assert any("[secret]" in line for line in heard.lines)


def test_every_secret_of_a_configuration_is_known() -> None:
    """At any depth."""
    node = NodeConfig.model_validate({"role": "decode", "node_key": "n" * 16, "kv": {"shared_key": "k" * 16}})
    assert set(secrets_of(node)) == {"n" * 16, "k" * 16}
    gateway = GatewayConfig.model_validate(
        {"model": "m", "nodes": [{"url": "http://h:1"}], "node_key": "n" * 16, "api_keys": ["plain-key-1"]}
    )
    assert {"n" * 16} <= set(secrets_of(gateway))
