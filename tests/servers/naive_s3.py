"""An object store of a hundred lines that can be told to misbehave: S3's requests, on the event loop of the test.

It serves what obstore asks for. It checks conditions when told to, fails requests on demand, and counts them.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
_DATE = b"Last-Modified: Sat, 21 Nov 2026 11:33:22 GMT\r\n"


@dataclass(frozen=True)
class Request:
    """One request: *kind* is its method, and for requests about uploads and batches also what it asks for."""

    kind: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


@dataclass
class NaiveS3:
    """The store.

    Attributes:
        conditional: whether ``If-None-Match: *`` is obeyed.
        interfere: asked about each request; a status returned is answered instead. It may drop the answer after the
            effect by returning -1.
        open_for_parts: while it is not set, parts get no answer.
        seen: how often each kind of request came.
    """

    conditional: bool = True
    interfere: Callable[[Request], int | None] = field(default=lambda request: None)
    open_for_parts: asyncio.Event = field(default_factory=asyncio.Event)
    objects: dict[str, bytes] = field(default_factory=dict)
    connections: set[asyncio.StreamWriter] = field(default_factory=set)
    parts: dict[int, bytes] = field(default_factory=dict)
    seen: Counter[str] = field(default_factory=Counter)
    endpoint: str = ""

    def answer(self, request: Request) -> tuple[int, bytes]:
        """Carry *request* out; return the status and the body."""
        match request.kind:
            case "PUT":
                if self.conditional and "if-none-match" in request.headers and request.key in self.objects:
                    return 412, b"<Error><Code>PreconditionFailed</Code></Error>"
                self.objects[request.key] = request.body
            case "GET" | "HEAD":
                if request.key not in self.objects:
                    return 404, b""
                return 200, self.objects[request.key]
            case "delete batch":
                keys = re.findall(rb"<Key>(.*?)</Key>", request.body)
                for key in keys:
                    self.objects.pop(key.decode(), None)
                deleted = b"".join(b"<Deleted><Key>%b</Key></Deleted>" % key for key in keys)
                return 200, b"<DeleteResult>%b</DeleteResult>" % deleted
            case "begin upload":
                return 200, b"<InitiateMultipartUploadResult><UploadId>u</UploadId></InitiateMultipartUploadResult>"
            case "part":
                self.parts[int(request.query["partNumber"][0])] = request.body
            case "finish upload":
                self.objects[request.key] = b"".join(self.parts[number] for number in sorted(self.parts))
                return 200, b"<CompleteMultipartUploadResult><ETag>e</ETag></CompleteMultipartUploadResult>"
            case "abort upload":
                self.parts.clear()
        return 200, b""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer the requests of one connection."""
        self.connections.add(writer)
        try:
            while (request := await _read_request(reader)) is not None:
                self.seen[request.kind] += 1
                if request.kind == "part":
                    await self.open_for_parts.wait()
                forced = self.interfere(request)
                if forced is None or forced < 0:
                    status, body = self.answer(request)
                else:
                    status, body = forced, b""
                if forced is not None and forced < 0:
                    break
                head = b'HTTP/1.1 %d x\r\n%bETag: "e"\r\nContent-Length: %d\r\n\r\n' % (status, _DATE, len(body))
                writer.write(head + (b"" if request.kind == "HEAD" else body))
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client hung up
        finally:
            self.connections.remove(writer)
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Request | None:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, target, _ = lines[0].split(" ")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    url = urlsplit(target)
    query = parse_qs(url.query, keep_blank_values=True)
    key = unquote(url.path).removeprefix(f"/{BUCKET}").removeprefix("/")
    return Request(_kind(method, query), key, query, headers, body)


def _kind(method: str, query: dict[str, list[str]]) -> str:
    if method == "POST":
        return "delete batch" if "delete" in query else "begin upload" if "uploads" in query else "finish upload"
    if "uploadId" in query:
        return "part" if method == "PUT" else "abort upload"
    return method


@asynccontextmanager
async def run_naive_s3(*, conditional: bool = True) -> AsyncIterator[NaiveS3]:
    """Run a store on a free port of this host, on the running loop."""
    store = NaiveS3(conditional=conditional)
    store.open_for_parts.set()
    async with await asyncio.start_server(store.serve, "127.0.0.1", 0) as server:
        store.endpoint = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield store
        finally:
            store.open_for_parts.set()
            while store.connections:  # the client would keep them for its next request
                for connection in store.connections:
                    connection.close()
                await asyncio.sleep(0)
