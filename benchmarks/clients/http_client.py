"""The floor: the standard library's http.client in threads, on presigned URLs, without checks of the data."""

from __future__ import annotations

import re
import threading
from http.client import HTTPConnection, HTTPSConnection
from typing import Any, Literal
from urllib.parse import urlsplit

import botocore.session
from botocore.config import Config

from benchmarks.clients import Threaded

_WINDOW_BYTES = 1 << 20
_STARTED = re.compile(rb"<UploadId>([^<]+)</UploadId>")


class HttpClient(Threaded):
    """A connection for each thread, and one request after the other on it."""

    def connect(self) -> None:
        style: Literal["path", "auto"] = "path" if self.place.endpoint_url else "auto"
        self._signer: Any = botocore.session.get_session().create_client(
            "s3",
            endpoint_url=self.place.endpoint_url,
            config=Config(signature_version="s3v4", s3={"addressing_style": style}),
        )
        self._own = threading.local()

    def _sign(self, verb: str, key: str, **more: object) -> str:
        parameters = {"Bucket": self.place.bucket, "Key": self.place.path(key), **more}
        url: str = self._signer.generate_presigned_url(verb, Params=parameters)
        return url

    def do_put(self, key: str, data: bytes) -> None:
        view = memoryview(data)
        answer, _ = self._ask("POST", self._sign("create_multipart_upload", key))
        found = _STARTED.search(answer)
        assert found is not None, answer
        upload = found[1].decode()
        starts = range(0, len(data), self.place.part_bytes)
        urls = [self._sign("upload_part", key, UploadId=upload, PartNumber=n + 1) for n in range(len(starts))]

        def send(number: int) -> str:
            start = starts[number]
            return self._ask("PUT", urls[number], view[start : start + self.place.part_bytes])[1]

        tags = list(self.threads.map(send, range(len(starts))))
        parts = "".join(
            f"<Part><PartNumber>{n + 1}</PartNumber><ETag>{tag}</ETag></Part>" for n, tag in enumerate(tags)
        )
        body = f"<CompleteMultipartUpload>{parts}</CompleteMultipartUpload>".encode()
        self._ask("POST", self._sign("complete_multipart_upload", key, UploadId=upload), body)

    def do_get(self, key: str, into: memoryview) -> None:
        url = self._sign("get_object", key)

        def fetch(start: int) -> None:
            view = into[start : start + self.place.part_bytes]
            self._ask("GET", url, headers={"Range": f"bytes={start}-{start + len(view) - 1}"}, into=view)

        list(self.threads.map(fetch, range(0, len(into), self.place.part_bytes)))

    def do_put_small(self, key: str, data: bytes) -> None:
        self._ask("PUT", self._sign("put_object", key), data)

    def do_get_small(self, key: str) -> bytes:
        return self._ask("GET", self._sign("get_object", key))[0]

    def _ask(
        self,
        method: str,
        url: str,
        body: bytes | memoryview = b"",
        headers: dict[str, str] | None = None,
        into: memoryview | None = None,
    ) -> tuple[bytes, str]:
        """Make a request; return the body of its answer, empty when it went into *into*, and its ETag."""
        parts = urlsplit(url)
        connection = self._connection(parts.scheme, parts.netloc)
        connection.putrequest(method, f"{parts.path}?{parts.query}", skip_accept_encoding=True)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            connection.putheader(name, value)
        connection.endheaders()
        for start in range(0, len(body), _WINDOW_BYTES):
            connection.sock.sendall(memoryview(body)[start : start + _WINDOW_BYTES])
        with connection.getresponse() as answer:
            if answer.status >= 300:
                raise OSError(f"{method} {parts.path}: {answer.status} {answer.read()[:300]!r}")
            if into is None:
                return answer.read(), answer.headers.get("ETag", "")
            filled = 0
            while filled < len(into) and (count := answer.readinto(into[filled:])):
                filled += count
            return b"", ""

    def _connection(self, scheme: str, host: str) -> HTTPConnection:
        if not hasattr(self._own, "connection"):
            self._own.connection = (HTTPSConnection if scheme == "https" else HTTPConnection)(host)
        connection: HTTPConnection = self._own.connection
        return connection
