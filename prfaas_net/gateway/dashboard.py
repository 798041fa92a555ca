"""The dashboard page at the gateway's ``/``: one file that ships along, and asks ``/v1/fleet`` for all it shows."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from aiohttp import web

__all__ = ["Dashboard"]


class Dashboard:
    """Holds the page, and the headers that let nothing but the page itself run."""

    def __init__(self) -> None:
        page = resources.files("prfaas_net.gateway").joinpath("static/dashboard.html").read_text(encoding="utf-8")
        script = page.partition("<script>")[2].partition("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        self._page = page.encode()
        self._headers = {
            "Content-Security-Policy": (
                f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
                "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
            ),
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            # The page comes with the program: a newer program brings another one.
            "Cache-Control": "no-cache",
        }

    async def handle(self, request: web.Request) -> web.Response:
        """``GET /``: no key is asked for; the page has none of the fleet's data in it."""
        return web.Response(body=self._page, content_type="text/html", charset="utf-8", headers=self._headers)
