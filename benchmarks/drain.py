"""A server that discards uploads and sends zeros: it shows the speed of an S3 client without the limits of a store.

It implements the part of S3 that a client needs for put, get, head and multipart uploads, and that a checkpoint needs for
its commit: it keeps small objects, and lists every folder as empty. Of large objects it keeps names and sizes. It checks no
signature and uses little processor time, so that the client is measured.

    with draining() as (endpoint_url, pid): …

It is a separate process: ``python -m benchmarks.drain`` prints its endpoint and serves until killed; over TLS when it is
given a certificate and its key (`authority` makes them).
"""

from __future__ import annotations

import re
import socket
import socketserver
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

_WINDOW_BYTES = 4 << 20
_SMALL_BYTES = 1 << 16
_ZEROS = memoryview(bytes(_WINDOW_BYTES))
_STARTED = b"<InitiateMultipartUploadResult><UploadId>drain</UploadId></InitiateMultipartUploadResult>"
_COMPLETED = b"<CompleteMultipartUploadResult><ETag>&quot;0&quot;</ETag></CompleteMultipartUploadResult>"
_EMPTY = b"<ListBucketResult><KeyCount>0</KeyCount><IsTruncated>false</IsTruncated></ListBucketResult>"
_TAKEN = b"<Error><Code>PreconditionFailed</Code></Error>"
_ABSENT = b"<Error><Code>NoSuchKey</Code></Error>"


class Drain(socketserver.ThreadingTCPServer):
    """The server: sizes of objects, contents of small ones, and parts of unfinished uploads, by path."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.tls: ssl.SSLContext | None = None
        self.sizes: dict[str, int] = {}
        self.small: dict[str, bytes] = {}
        self.parts: dict[str, dict[str, int]] = {}

    def get_request(self) -> tuple[socket.socket, object]:
        """Accept a connection; its own thread begins TLS."""
        connection, address = super().get_request()
        if self.tls is not None:
            connection = self.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        return connection, address


class Connection(socketserver.StreamRequestHandler):
    """One client's connection: requests until it closes."""

    server: Drain  # pyright: ignore[reportIncompatibleVariableOverride]
    rbufsize = 1 << 16
    disable_nagle_algorithm = True

    def handle(self) -> None:
        """Answer requests until the client closes the connection."""
        sink = memoryview(bytearray(_WINDOW_BYTES))
        try:
            while line := self.rfile.readline():
                method, target, _ = line.decode("latin-1").split(" ", 2)
                headers = self._headers()
                body = self._take(headers, sink)
                self._answer(method, target, headers, body)
        except (ConnectionError, ssl.SSLError):
            return

    def _headers(self) -> dict[str, str]:
        found = {}
        while line := self.rfile.readline().decode("latin-1").strip():
            name, _, value = line.partition(":")
            found[name.lower()] = value.strip()
        return found

    def _take(self, headers: Mapping[str, str], sink: memoryview) -> bytes | None:
        """Read the body of a request; return it where it is small and arrives in one piece."""
        size = int(headers.get("content-length", 0))
        if headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if headers.get("transfer-encoding", "") == "chunked":
            while count := int(self.rfile.readline().split(b";")[0], 16):
                self._drain(count, sink)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
        elif size <= _SMALL_BYTES and "x-amz-decoded-content-length" not in headers:
            return self.rfile.read(size)
        else:
            self._drain(size, sink)
        return None

    def _drain(self, size: int, sink: memoryview) -> None:
        left = size - len(self.rfile.read(min(size, len(self.rfile.peek()))))  # type: ignore[attr-defined]
        while left:
            count = self.connection.recv_into(sink[: min(left, len(sink))])
            if not count:
                raise ConnectionResetError
            left -= count

    def _answer(self, method: str, target: str, headers: Mapping[str, str], body: bytes | None) -> None:
        path, query = unquote(urlsplit(target).path), parse_qs(urlsplit(target).query, keep_blank_values=True)
        size = int(headers.get("x-amz-decoded-content-length", headers.get("content-length", 0)))
        if method == "PUT" and "partNumber" in query:
            self.server.parts.setdefault(path, {})[query["partNumber"][0]] = size
            self._send(200)
        elif method == "PUT":
            taken = "if-none-match" in headers and path in self.server.sizes
            self.server.sizes.setdefault(path, size)
            if body is not None:
                self.server.small.setdefault(path, body)
            self._send(412, _TAKEN) if taken else self._send(200)
        elif method == "POST" and "uploads" in query:
            self._send(200, _STARTED)
        elif method == "POST" and "uploadId" in query:
            self.server.sizes[path] = sum(self.server.parts.pop(path, {}).values())
            self._send(200, _COMPLETED)
        elif method == "DELETE":
            self.server.sizes.pop(path, None)
            self.server.small.pop(path, None)
            self._send(204)
        elif method == "GET" and "list-type" in query:
            self._send(200, _EMPTY)
        elif path not in self.server.sizes:
            self._send(404, _ABSENT if method == "GET" else b"")
        else:
            self._send_object(method, path, headers.get("range", ""))

    def _send(self, status: int, body: bytes = b"", more: str = "", size: int | None = None) -> None:
        length = len(body) if size is None else size
        head = f'HTTP/1.1 {status} Answer\r\nContent-Length: {length}\r\nETag: "0"\r\n{more}\r\n'
        self.wfile.write(head.encode("latin-1") + body)

    def _send_object(self, method: str, path: str, wanted: str) -> None:
        """Send the kept bytes, or zeros; the range *wanted*, or all."""
        size, kept = self.server.sizes[path], self.server.small.get(path)
        start, end, status, said = 0, size - 1, 200, "Last-Modified: Thu, 01 Jan 1970 00:00:00 GMT\r\n"
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", wanted):
            start, end = int(asked[1]), min(int(asked[2] or end), end)
            status, said = 206, f"Content-Range: bytes {start}-{end}/{size}\r\n{said}"
        left = end - start + 1
        if method == "GET" and kept is not None:
            self._send(status, kept[start : end + 1], said)
            return
        self._send(status, more=said, size=left)
        while left and method == "GET":
            count = min(left, _WINDOW_BYTES)
            self.connection.sendall(_ZEROS[:count])
            left -= count


def authority(folder: Path) -> tuple[Path, Path, Path]:
    """Make an authority of our own and a certificate for 127.0.0.1; return the authority's, the certificate, its key.

    Raises:
        OSError, subprocess.CalledProcessError: ``openssl`` is not installed or fails.
    """
    ca, ca_key, server, key, request = (folder / name for name in ("ca.pem", "ca.key", "s.pem", "s.key", "s.csr"))
    name = folder / "name.ext"
    name.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    signing = ["-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", name, "-days", "30"]
    for command in (
        ["req", "-x509", *curve, "-keyout", ca_key, "-out", ca, "-days", "30", "-subj", "/CN=benchmark authority"],
        ["req", *curve, "-keyout", key, "-out", request, "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", request, *signing, "-out", server],
    ):
        subprocess.run(["openssl", *map(str, command)], check=True, capture_output=True, timeout=60)
    return ca, server, key


@contextmanager
def draining(certificate: Path | None = None, key: Path | None = None) -> Iterator[tuple[str, int]]:
    """Run the server for the length of the block, over TLS with a *certificate*; yield its endpoint and its process."""
    command = [sys.executable, "-m", "benchmarks.drain", *(map(str, (certificate, key)) if certificate else ())]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.kill()


def main() -> None:
    """Serve, and print the endpoint."""
    with Drain() as server:
        scheme = "http"
        if len(sys.argv) == 3:
            scheme, server.tls = "https", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.tls.load_cert_chain(sys.argv[1], sys.argv[2])
        print(f"{scheme}://127.0.0.1:{server.server_address[1]}", flush=True)
        server.serve_forever()


if __name__ == "__main__":
    main()
