"""A network, or a store, that misbehaves as told: a proxy in front of a real S3.

It runs on the test's own event loop and passes requests on as they were signed. Of each fault it counts the requests
that match, so that "the second part" can be meant.
"""

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Literal

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

Action = Literal[
    "answer", "reset", "lose_answer", "twice", "truncate", "flip", "delay", "hang", "unconditional", "whole"
]
_NOT_PASSED_ON = {"connection", "keep-alive", "transfer-encoding", "content-length"}


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that goes wrong.

    Attributes:
        do: "answer" with *status* and *code* instead of the store; "reset" the connection before it is asked;
            "lose_answer": reset it after; "twice": send the request twice and give the second answer; "truncate" the
            answer's body; "flip" a bit of the request's body; "delay" the request by *delay_s*; "hang" without reading
            it; "unconditional": take the condition off; "whole": take the range off (both only before a store that
            checks no signature).
        method, match: which requests: their method, and a part of their path with query.
        has, lacks: only those with a header whose name begins so, or without.
        at: at which of these it comes, from 1. *times*: at how many in a row; None for all from then on.
        to: where an answer sends the client on to.
        status, code: of the answer; a status of 200 has the error in its body all the same.
        body: of the answer, in place of an error.
    """

    do: Action
    method: str = ""
    match: str = ""
    has: str = ""
    lacks: str = ""
    at: int = 1
    times: int | None = 1
    status: int = 503
    code: str = "SlowDown"
    delay_s: float = 0.0
    to: str = ""
    body: str | None = None

    def meets(self, request: web.Request) -> bool:
        """Return whether it is about *request*."""
        if self.method not in ("", request.method) or self.match not in request.raw_path:
            return False
        names = [name.lower() for name in request.headers]
        return (not self.has or any(name.startswith(self.has) for name in names)) and (
            not self.lacks or not any(name.startswith(self.lacks) for name in names)
        )


class Proxy:
    """A proxy to *upstream* that misbehaves as told.

    Attributes:
        endpoint_url: its own address.
        seen: "METHOD path?query" of every request, in order.
        met: those that a fault came to, since `misbehave`.
    """

    def __init__(self, upstream: str, session: aiohttp.ClientSession) -> None:
        self._upstream = upstream
        self._session = session
        self._counts: dict[int, int] = {}
        self._ending = asyncio.Event()
        self._faults: tuple[Fault, ...] = ()
        self.endpoint_url = ""
        self.seen: list[str] = []
        self.met: list[str] = []

    def misbehave(self, *faults: Fault) -> None:
        """Do *faults* from now on, and no others; with none, behave."""
        self._faults = faults
        self._counts.clear()
        self.met.clear()

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        self.seen.append(f"{request.method} {request.raw_path}")
        fault = self._due(request)
        if fault is not None:
            self.met.append(self.seen[-1])
        if fault is not None and fault.do == "hang":
            await self._ending.wait()
            return _reset(request)
        if fault is not None and fault.do == "delay":
            await asyncio.sleep(fault.delay_s)
        body = await request.read()
        if fault is not None and fault.do == "answer":
            said = fault.body
            if said is None:
                said = f"<Error><Code>{fault.code}</Code><Message>by the proxy</Message></Error>"
            headers = {"Location": fault.to + request.path.lstrip("/")} if fault.to else {}
            body = b"" if request.method == "HEAD" else said.encode()
            return web.Response(status=fault.status, headers=headers, body=body)
        if fault is not None and fault.do == "reset":
            return _reset(request)
        if fault is not None and fault.do == "flip" and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        do = fault.do if fault is not None else None
        if do == "twice":
            await self._pass_on(request, body, do)
        status, headers, answer = await self._pass_on(request, body, do)
        if do == "lose_answer":
            return _reset(request)
        return await _reply(request, status, headers, answer, len(answer) // 2 if do == "truncate" else len(answer))

    def end(self) -> None:
        """Let the requests go that hang."""
        self._ending.set()

    def _due(self, request: web.Request) -> Fault | None:
        due = None
        for number, fault in enumerate(self._faults):
            if fault.meets(request):
                self._counts[number] = self._counts.get(number, 0) + 1
                over = self._counts[number] - fault.at
                if due is None and over >= 0 and (fault.times is None or over < fault.times):
                    due = fault
        return due

    async def _pass_on(self, request: web.Request, body: bytes, do: Action | None) -> tuple[int, dict[str, str], bytes]:
        dropped = {"unconditional": {"if-none-match"}, "whole": {"range"}}.get(do or "", set()) | _NOT_PASSED_ON
        headers = {name: value for name, value in request.headers.items() if name.lower() not in dropped}
        url = URL(self._upstream + request.raw_path, encoded=True)
        async with self._session.request(request.method, url, headers=headers, data=io.BytesIO(body)) as response:
            kept = {name: value for name, value in response.headers.items() if name.lower() not in _NOT_PASSED_ON}
            if request.method == "HEAD":
                kept["Content-Length"] = response.headers.get("Content-Length", "0")
            return response.status, kept, await response.read()


async def _reply(
    request: web.Request, status: int, headers: dict[str, str], answer: bytes, sent_bytes: int
) -> web.StreamResponse:
    """Give *answer*, or only its first bytes and then the end of the connection."""
    response = web.StreamResponse(status=status, headers=headers)
    response.content_length = int(headers["Content-Length"]) if request.method == "HEAD" else len(answer)
    await response.prepare(request)
    await response.write(answer[:sent_bytes])
    if sent_bytes < len(answer):
        _reset(request)
    return response


def _reset(request: web.Request) -> web.StreamResponse:
    """End the connection in the middle of the request."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=500)


@asynccontextmanager
async def proxy_to(upstream: str) -> AsyncIterator[Proxy]:
    """Run a proxy for the length of the block."""
    async with aiohttp.ClientSession(skip_auto_headers={"Content-Type", "User-Agent", "Accept"}) as session:
        proxy = Proxy(upstream, session)
        application = web.Application(client_max_size=0)
        application.router.add_route("*", "/{path:.*}", proxy.handle)
        runner = web.AppRunner(application, shutdown_timeout=0, handler_cancellation=True, access_log=None)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            proxy.endpoint_url = f"http://127.0.0.1:{runner.addresses[0][1]}"
            yield proxy
        finally:
            proxy.end()
            await runner.cleanup()
