"""A real Chromium, driven through its own DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

__all__ = ["CHROMIUM", "Tab", "open_tab"]

CHROMIUM = shutil.which("chromium")
WITHIN_S = 30.0


class Tab:
    """One page."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._calls = 0
        self.problems: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """The result of one command; what the page complains of meanwhile goes to ``problems``."""
        self._calls += 1
        await self._socket.send_str(orjson.dumps({"id": self._calls, "method": method, "params": params}).decode())
        async with asyncio.timeout(WITHIN_S):
            while True:
                answer = orjson.loads(await self._socket.receive_str())
                if answer.get("method") == "Runtime.exceptionThrown":
                    self.problems.append(str(answer["params"]["exceptionDetails"])[:500])
                elif answer.get("method") == "Log.entryAdded" and answer["params"]["entry"]["source"] != "network":
                    self.problems.append(answer["params"]["entry"]["text"])
                if answer.get("id") == self._calls:
                    assert "error" not in answer, answer
                    return answer["result"]

    async def evaluate(self, expression: str) -> Any:
        result = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Wait until it is true in the page."""
        async with asyncio.timeout(WITHIN_S):
            while not await self.evaluate(f"Boolean(document.body && ({expression}))"):  # noqa: ASYNC110 - it happens in the page
                await asyncio.sleep(0.05)

    async def look(self, url: str, width: int, height: int, *, dark: bool = False) -> None:
        """Open a page in a window of this size."""
        phone = width < 600
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])
        await self.call("Page.navigate", url=url)

    async def screenshot(self) -> bytes:
        """The whole page as PNG, however long it is."""
        result = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(result["data"])


@asynccontextmanager
async def open_tab(profile: Path) -> AsyncIterator[Tab]:
    """A browser of its own, without a window; it is ended with the block."""
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-extensions", "--hide-scrollbars", "--remote-debugging-port=0",
        f"--user-data-dir={profile}", "about:blank",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as session:
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                page = next(target for target in await answer.json() if target["type"] == "page")
            async with session.ws_connect(page["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                tab = Tab(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(5):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(WITHIN_S):
        while True:
            lines = file.read_text().split() if file.exists() else []  # noqa: ASYNC240 - a line of a local file
            if len(lines) >= 2:
                return int(lines[0])
            await asyncio.sleep(0.05)
