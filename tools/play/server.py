"""The playground's web server: one page, and a few JSON answers about its models.

Every request needs the secret of the address, in the header X-Token, and a Host of this machine
(else any web page could reach the server by a name that it points to 127.0.0.1). Model work runs in
one thread, one token at a time, so two answers take turns and a request that is dropped stops
computing before its next token.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from cli.options import ConfigError
from cli.web import HEADERS, check_request, page_headers
from model.config import SamplingConfig
from tools.play.session import Session
from training.report.page import fill_template

PAGE, TITLE = "play.html", "plainGPT playground"
MOST_BYTES = 1 << 20  # of a request
MOST_CHARACTERS = 100_000  # of a prompt
MOST_TOKENS = 2_000  # of one answer, and of ids sent back


def make_app(sessions: Sequence[Session], secret: str) -> Starlette:
    """The application for one or two models."""
    pool = ThreadPoolExecutor(1)

    async def work(call: Callable[..., Any], *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(pool, call, *args)

    async def page(request: Request) -> Response:
        check_request(request, request.query_params.get("token", ""), secret)
        nonce, headers = page_headers()
        text = fill_template(Path(__file__).with_name(PAGE), TITLE, None, NONCE=nonce)
        return HTMLResponse(text, headers=headers)

    async def about(request: Request) -> Response:
        _check(request, secret)
        return JSONResponse([session.about() for session in sessions], headers=HEADERS)

    async def generate(request: Request) -> Response:
        asked, session = await _asked(request, secret, sessions)
        settings, seed = _settings(asked), _whole(asked, "seed", 0, 2**53)
        ids, first = await work(session.ids_of, asked)
        events = session.generate(ids, first, settings, seed)

        async def lines() -> AsyncIterator[bytes]:
            # If the reader goes away, this generator is closed and no further token is computed.
            while (event := await work(next, events, None)) is not None:
                yield json.dumps(event).encode() + b"\n"

        return StreamingResponse(lines(), media_type="application/x-ndjson", headers=HEADERS)

    async def distribution(request: Request) -> Response:
        asked, session = await _asked(request, secret, sessions)
        ids, _ = await work(session.ids_of, asked)
        found = await work(session.distribution, ids, _settings(asked))
        return JSONResponse(found, headers=HEADERS)

    async def attention(request: Request) -> Response:
        asked, session = await _asked(request, secret, sessions)
        layer, head = (_whole(asked, name, 0, 10_000) for name in ("layer", "head"))
        ids, _ = await work(session.ids_of, asked)
        return JSONResponse(await work(session.attention, ids, layer, head), headers=HEADERS)

    async def lens(request: Request) -> Response:
        asked, session = await _asked(request, secret, sessions)
        ids, _ = await work(session.ids_of, asked)
        return JSONResponse(await work(session.lens, ids), headers=HEADERS)

    posts = {"generate": generate, "distribution": distribution, "attention": attention}
    routes = [Route("/", page), Route("/about", about)]
    posts["lens"] = lens
    routes += [Route(f"/{name}", answer, methods=["POST"]) for name, answer in posts.items()]
    wrong = (ValueError, ConfigError)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(wrong, _told))


async def _told(request: Request, error: Exception) -> Response:
    return Response(str(error), 400, HEADERS, "text/plain; charset=utf-8")


def _check(request: Request, secret: str) -> None:
    check_request(request, request.headers.get("x-token", ""), secret)


async def _asked(
    request: Request, secret: str, sessions: Sequence[Session]
) -> tuple[dict[str, Any], Session]:
    """The JSON object that was sent, and the model it is about. Raises ValueError if it is bad."""
    _check(request, secret)
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise HTTPException(413, f"a request may have {MOST_BYTES:,} bytes")
    try:
        asked = json.loads(body)
    except RecursionError as error:
        raise ValueError("the request is nested too deeply") from error
    if not isinstance(asked, dict):
        raise ValueError("the request must be a JSON object")
    text, ids = asked.get("text", ""), asked.get("ids", [])
    if not isinstance(text, str) or len(text) > MOST_CHARACTERS:
        raise ValueError(f"text: must be a text of at most {MOST_CHARACTERS:,} characters")
    if not isinstance(ids, list) or len(ids) > MOST_CHARACTERS:
        raise ValueError(f"ids: at most {MOST_CHARACTERS:,}")
    return asked, sessions[_whole(asked, "model", 0, len(sessions) - 1)]


def _whole(asked: dict[str, Any], name: str, low: int, high: int) -> int:
    value = asked.get(name, 0)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name}={value}: must be a whole number from {low} to {high}")
    return value


def _settings(asked: dict[str, Any]) -> SamplingConfig:
    """The sliders' values. Raises ValueError for one that is out of range."""
    given = {"max_new_tokens": asked.get("max_new_tokens", 100)}
    for name, kind in {"temperature": float, "top_k": int, "top_p": float, "min_p": float}.items():
        value = asked.get(name, getattr(SamplingConfig(), name))
        if type(value) is not kind and type(value) is not int:
            raise ValueError(f"{name}={value!r}: must be a number")
        given[name] = kind(value)
    if type(given["max_new_tokens"]) is not int or given["max_new_tokens"] > MOST_TOKENS:
        raise ValueError(f"max_new_tokens: must be a whole number up to {MOST_TOKENS:,}")
    settings = SamplingConfig(**given)
    if problems := settings.problems():
        raise ValueError("; ".join(problems))
    return settings
