"""The live page's web server: the page, a stream of what changes, and a run's attention page.

A stream (server-sent events) lasts as long as its page is open. The folder is looked at only while
one is. Every request needs the secret of the address and a Host of this machine.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route

from cli.web import HEADERS, check_request, page_headers
from tools.report.follow import Folder, changes
from training.report.page import page_text

LOOK_SECONDS = 1.0  # between two looks at the folder
SILENT_LOOKS = 15  # without news, before a comment keeps the connection open
# The attention page runs its own script, in an origin of its own: it cannot ask this server.
SANDBOX = (
    "sandbox allow-scripts; default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
)


def make_app(folder: Folder, secret: str) -> Starlette:
    """Return the application that follows `folder`. `app.state.server`: to see when it ends."""

    def check(request: Request) -> None:
        check_request(request, request.query_params.get("token", ""), secret)

    async def work(*call: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, *call)

    async def page(request: Request) -> Response:
        check(request)
        nonce, headers = page_headers()
        live = Path(__file__).with_name("live.js").read_text(encoding="utf-8")
        return HTMLResponse(page_text({"title": folder.name}, nonce, live), headers=headers)

    async def events(request: Request) -> Response:
        check(request)
        wanted = request.query_params.getlist("run")

        async def messages() -> AsyncIterator[str]:
            sent: dict[str, Any] = {}
            silent = 0
            ending = False
            while not ending:
                ending = getattr(getattr(app.state, "server", None), "should_exit", False)
                new = await work(folder.page, wanted)
                if found := changes(sent, new):
                    # One line: JSON escapes line ends.
                    yield f"data: {json.dumps(found, separators=(',', ':'))}\n\n"
                    sent, silent = new, 0
                elif silent >= SILENT_LOOKS:
                    yield ": still here\n\n"
                    silent = 0
                silent += 1
                if not ending:
                    await asyncio.sleep(LOOK_SECONDS)
            yield "event: end\ndata: {}\n\n"

        return StreamingResponse(messages(), media_type="text/event-stream", headers=HEADERS)

    async def attention(request: Request) -> Response:
        check(request)
        found = await work(folder.attention, request.query_params.get("run", ""))
        if found is None:
            raise HTTPException(404, "this run has no attention page")
        return HTMLResponse(found, headers={**HEADERS, "Content-Security-Policy": SANDBOX})

    routes = {"/": page, "/events": events, "/attention": attention}
    app = Starlette(routes=[Route(path, answer) for path, answer in routes.items()])
    return app
