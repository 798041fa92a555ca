"""What ``prfaas up`` shows: the fleet coming up, the documents going through, the table, and a line to try."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from prfaas_net.localfleet.client import Answer, GatewayClient
from prfaas_net.localfleet.demo import DemoRow, make_row, print_table, print_texts, report, write_report
from prfaas_net.localfleet.fleet import FleetPlan, LocalFleet
from prfaas_net.nodes.engine_api import Sampling, TextTokenizer

__all__ = ["Generator", "Model", "Show"]

# For show, not for proof: greedy text of a small model repeats itself.
SHOWN = {"temperature": 0.6, "top_p": 0.95, "seed": 7, "max_tokens": 60}


class Generator(Protocol):
    """An engine that can run a prompt to its end in this process."""

    def generate(self, token_ids: Sequence[int], sampling: Sampling) -> list[int]: ...


@dataclass(frozen=True)
class Model:
    """The model once more, in this process, for comparison."""

    load: Callable[[], Generator]
    tokenizer: TextTokenizer


class Show:
    """One run of ``prfaas up``.

    Args:
        documents: texts by name.
        output: the file for the table as JSON.
    """

    def __init__(
        self,
        plan: FleetPlan,
        documents: Mapping[str, str],
        model: Model,
        console: Console,
        *,
        max_tokens: int,
        output: Path,
    ) -> None:
        self._plan = plan
        self._documents = documents
        self._model = model
        self._console = console
        self._max_tokens = max_tokens
        self._output = output

    async def run(self, *, stay: bool) -> int:
        """Returns the exit code: 0, or 1 if an output differs from the single-process run."""
        self._console.print("[bold]prfaas-net[/]: two clusters, a link between them, one gateway")
        with self._progress() as progress:
            progress.add_task("starting the processes", total=None)
            fleet = await LocalFleet(self._plan).__aenter__()
        try:
            return await self._with_fleet(fleet, stay=stay)
        finally:
            await fleet.stop()

    async def _with_fleet(self, fleet: LocalFleet, *, stay: bool) -> int:
        for name, process in fleet.processes.items():
            self._console.print(f"  {name:<20} pid {process.pid}", highlight=False)
        working = asyncio.create_task(self._show(fleet, stay=stay))
        failing = asyncio.create_task(fleet.failed())
        try:
            await asyncio.wait({working, failing}, return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise failing.result().ended_error()
            return working.result()
        finally:
            for task in (working, failing):
                task.cancel()
            await asyncio.gather(working, failing, return_exceptions=True)

    async def _show(self, fleet: LocalFleet, *, stay: bool) -> int:
        async with GatewayClient(fleet.url, api_key=fleet.api_key) as client:
            await client.wait_healthy(within_s=30.0)
            name, limit = await client.model()
            prompts = {title: self._fit(text, title, limit) for title, text in self._documents.items()}
            answers = [await self._send(client, name, title, ids) for title, ids in prompts.items()]
            rows = await self._compare(prompts, answers)
            print_table(self._console, rows)
            write_report(self._output, report(rows, len(fleet.processes)))
            self._console.print(f"written to {self._output}", highlight=False)
            await self._sample(client, name)
        identical = all(row.identical for row in rows)
        if stay:
            self._print_invitation(fleet, name)
            await asyncio.Event().wait()
        return 0 if identical else 1

    # -- steps --------------------------------------------------------------------------------------------------

    def _fit(self, text: str, title: str, limit: int) -> list[int]:
        """A document's tokens, cut where the model's length ends."""
        token_ids = self._model.tokenizer.encode(text)
        room = limit - self._max_tokens
        if len(token_ids) > room:
            self._console.print(f"  the {title} document has {len(token_ids):,} tokens; cut to {room:,} for this model")
        return token_ids[:room]

    async def _send(self, client: GatewayClient, model: str, title: str, token_ids: list[int]) -> Answer:
        """One document, greedily, with a bar over its prompt tokens while it is prefilled."""
        whole = len(token_ids) == len(self._model.tokenizer.encode(self._documents[title]))
        prompt: str | list[int] = self._documents[title] if whole else token_ids
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": self._max_tokens}
        with self._progress() as progress:
            task = progress.add_task(f"{title} document", total=None)

            def on_progress(record: dict[str, Any]) -> None:
                where = record.get("prefilled_in")
                if where:
                    progress.update(
                        task,
                        description=f"{title} document: prefill in {where}",
                        total=record["prompt_tokens"],
                        completed=record.get("prefilled_tokens", 0),
                    )

            answer = await client.complete(body, on_progress)
            progress.update(task, description=f"{title} document: done", total=1, completed=1)
        return answer

    async def _compare(self, prompts: Mapping[str, list[int]], answers: Sequence[Answer]) -> list[DemoRow]:
        rows = []
        with self._progress() as progress:
            task = progress.add_task("the same in a single process", total=None)
            engine = await asyncio.to_thread(self._model.load)
            for (title, token_ids), answer in zip(prompts.items(), answers, strict=True):
                progress.update(task, description=f"the same in a single process: {title} document")
                reference = await asyncio.to_thread(engine.generate, token_ids, Sampling(max_tokens=self._max_tokens))
                rows.append(make_row(title, answer, reference))
        return rows

    async def _sample(self, client: GatewayClient, model: str) -> None:
        """The short document again, at a temperature, for people to read."""
        texts = []
        for prompt in (self._documents["short"], "hacker (n.)\n\n", "The early days of the Internet"):
            answer = await client.complete({"model": model, "prompt": prompt, **SHOWN})
            texts.append((prompt.strip().splitlines()[-1], answer.text))
        self._console.print("\nThe model writes (temperature 0.6, seed 7):")
        print_texts(self._console, texts)

    def _print_invitation(self, fleet: LocalFleet, model: str) -> None:
        key = f"-H 'Authorization: Bearer {fleet.api_key}' " if fleet.api_key else ""
        self._console.print("\n[bold]Serving.[/] Try:\n")
        self._console.print(
            f"curl -sN {fleet.url}/v1/chat/completions {key}-H 'Content-Type: application/json' -d "
            f"'{{\"model\": \"{model}\", \"stream\": true, \"temperature\": 0.6, \"max_tokens\": 60, "
            f"\"messages\": [{{\"role\": \"user\", \"content\": \"What is a hacker?\"}}]}}'",
            highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
        self._console.print("\nCtrl-C ends all of it.")

    def _progress(self) -> Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        return Progress(*columns, console=self._console, transient=True)
