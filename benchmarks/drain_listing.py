"""The server of `benchmarks.drain`, for a whole checkpoint: it keeps small objects, and says that every folder is empty.

A copy that begins anew asks what is there, writes, and looks at sizes one by one where no listing tells them; so that is
enough to commit one. What an upload in doubt reads back is small.

    with draining() as (endpoint_url, pid): …

``python -m benchmarks.drain_listing`` prints its endpoint and serves until killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

from benchmarks.drain import Connection, Drain

_SMALL_BYTES = 1 << 16
_EMPTY = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


class ListingConnection(Connection):
    """One client's connection."""

    _kept: ClassVar[dict[str, bytes]] = {}
    _body: bytes | None = None

    def _drain(self, size: int, headers: Mapping[str, str], sink: memoryview) -> None:
        plain = "expect" not in headers and "transfer-encoding" not in headers
        self._body = self.rfile.read(size) if plain and size <= _SMALL_BYTES else None
        if self._body is None:
            super()._drain(size, headers, sink)

    def _answer(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        if method == "GET" and "list-type=2" in target:
            self._send(200, _EMPTY)
        elif method == "GET" and target in self._kept:
            self._send(200, self._kept[target].decode("latin-1"))
        else:
            if method == "PUT" and self._body is not None:
                self._kept.setdefault(target, self._body)
            super()._answer(method, target, headers)


@contextmanager
def draining() -> Iterator[tuple[str, int]]:
    """Run the server for the length of the block; yield its endpoint and its process."""
    with subprocess.Popen([sys.executable, "-m", __name__], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


def main() -> None:
    """Serve, and say where."""
    with Drain() as server:
        server.RequestHandlerClass = ListingConnection
        print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
