"""The server of `benchmarks.drain`, for a whole checkpoint: it also says that every folder is empty.

A copy that begins anew asks what is there, writes, and looks at sizes one by one where no listing tells them; so that is
enough to commit one. ``python -m benchmarks.drain_listing`` prints its endpoint and serves until killed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from benchmarks.drain import Connection, Drain

_EMPTY = "<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"


class ListingConnection(Connection):
    """One client's connection."""

    def _answer(self, method: str, target: str, headers: Mapping[str, str]) -> None:
        if method == "GET" and "list-type=2" in target:
            self._send(200, _EMPTY)
        else:
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
