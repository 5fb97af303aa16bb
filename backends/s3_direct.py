"""Requests for single objects, signed and sent without botocore, which takes four times the processor time for each.

A manifest, a receipt and a lease are small objects, and most of what one costs is botocore: it resolves the endpoint, emits
a dozen events and walks the headers five times, anew for each request. Credentials, the connection pool, TLS, timeouts and
the meaning of answers stay botocore's and aiobotocore's.

Guarantees:

- The first request of a client goes through botocore. Its address, region and signature method are used for the requests
  made here; where it is not signed as usual (SigV4 by a key, the payload unsigned), or goes through a proxy, all requests
  go through botocore.
- An answer of AWS that redirects the client is left to botocore, which can find a bucket's region.
- Answers are those of botocore's client: its names, its errors.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from aiohttp import ClientResponse
from botocore.exceptions import ClientError
from botocore.parsers import create_parser
from yarl import URL

_METHODS = {"PutObject": "PUT", "GetObject": "GET", "HeadObject": "HEAD"}
_HEADERS = {
    "Range": "range",
    "IfMatch": "if-match",
    "IfNoneMatch": "if-none-match",
    "ChecksumCRC32": "x-amz-checksum-crc32",
    "ChecksumCRC64NVME": "x-amz-checksum-crc64nvme",
}
# Without them aiohttp adds its own, and asks for gzip, which this session does not unpack.
_ALWAYS = {"user-agent": "aiockpt", "accept-encoding": "identity"}
_META = "x-amz-meta-"
_UNSIGNED = "UNSIGNED-PAYLOAD"
_SCOPE = re.compile(r"AWS4-HMAC-SHA256 Credential=[^,]*/\d{8}/([\w-]+)/s3/aws4_request, ")
# The statuses by which a store redirects the request, or requires a signature for another region.
_ELSEWHERE = {301, 302, 307, 308, 400}


class Route(NamedTuple):
    """The common part of all requests for objects of the bucket: the URL up to the key, and the region."""

    base: str
    host: str
    path: str
    region: str


class ObjectRequests:
    """The requests for objects of one bucket, beside *client* of aiobotocore.

    Args:
        http: the connections of *client* (`aiockpt.backends.s3_client.StoreSession`).
        session: has the credentials for signing.
        follows: whether *client* may find the bucket in another region.
    """

    def __init__(self, client: Any, http: Any, session: Any, *, follows: bool) -> None:
        self._client = client
        self._http = http
        self._session = session
        self._follows = follows
        self._route: Route | None = None
        self._sent: list[Any] = []
        self._parser: Any = create_parser("rest-xml")
        for name in _METHODS:
            client.meta.events.register_last(f"before-send.s3.{name}", self._note)

    async def put(self, bucket: str, path: str, body: Any, params: Mapping[str, Any]) -> None:
        if await self._send("PutObject", path, params, body) is None:
            await self._client.put_object(Bucket=bucket, Key=path, Body=body, **params)
            self._learn(path)

    async def get(self, bucket: str, path: str, params: Mapping[str, Any]) -> bytes:
        if (answer := await self._send("GetObject", path, params)) is not None:
            return answer[1]
        found = await self._client.get_object(Bucket=bucket, Key=path, **params)
        self._learn(path)
        async with found["Body"] as body:
            return bytes(await body.read())

    async def head(self, bucket: str, path: str) -> dict[str, Any]:
        if (answer := await self._send("HeadObject", path, {})) is None:
            found = dict(await self._client.head_object(Bucket=bucket, Key=path))
            self._learn(path)
            return found
        headers = answer[0].headers
        return {
            "ContentLength": int(headers["content-length"]),
            "ETag": headers.get("etag", ""),
            "LastModified": parsedate_to_datetime(headers["last-modified"]),
            "Metadata": {key[len(_META) :]: headers[key] for key in map(str.lower, headers) if key.startswith(_META)},
        }

    async def _send(
        self, name: str, path: str, params: Mapping[str, Any], body: Any = None
    ) -> tuple[ClientResponse, bytes] | None:
        """Return the answer and its body; None where botocore must make the request.

        Raises:
            ClientError: the store refuses.
            aiohttp.ClientError, OSError: there is no answer.
        """
        if (route := self._route) is None or (credentials := await self._session.get_credentials()) is None:
            return None
        headers = {_HEADERS[key]: value for key, value in params.items() if key != "Metadata"}
        headers |= {_META + key: value for key, value in params.get("Metadata", {}).items()}
        quoted = quote(path, safe="/~")
        sign(_METHODS[name], route, quoted, headers, await credentials.get_frozen_credentials(), datetime.now(UTC))
        headers |= _ALWAYS
        if body is not None:
            headers["content-length"] = str(len(body))
        # Not quoted anew by yarl: the signature is over this very spelling.
        url = URL(route.base + quoted, encoded=True)
        http = await self._http.direct()
        async with await http.request(_METHODS[name], url, headers=headers, data=body) as answer:
            content = await answer.read()
        status = answer.status
        # S3 can report an error inside a 200, which botocore turns into a 500.
        if name == "PutObject" and status == 200 and b"<Error" in content:
            status = 500
        if status < 300:
            return answer, content
        if self._follows and status in _ELSEWHERE:
            return None
        lower = {key.lower(): value for key, value in answer.headers.items()}  # as botocore has them
        raise ClientError(self._parser.parse({"status_code": status, "headers": lower, "body": content}, None), name)

    def _note(self, request: Any, **_: object) -> None:
        """Store the address and the headers of botocore's requests, until `_learn` has read those of a path."""
        self._sent = [*self._sent[-31:], (request.url, request.headers)]

    def _learn(self, path: str) -> None:
        """Read the route from botocore's request for *path*, once."""
        quoted = quote(path, safe="/~")
        for url, fields in reversed(self._sent):  # the last: one before it may have been for another region
            if not url.endswith("/" + quoted):
                continue
            headers = {name.lower(): _text(value) for name, value in fields.items()}
            scope = _SCOPE.match(headers.get("authorization", ""))
            plain = headers.get("x-amz-content-sha256") == _UNSIGNED and "x-amz-s3session-token" not in headers
            if scope is not None and plain and not self._http.has_proxy:
                base = url.removesuffix(quoted)
                self._route = Route(base, _host(base), urlsplit(base).path, scope[1])
            for name in _METHODS:
                self._client.meta.events.unregister(f"before-send.s3.{name}", self._note)
            self._sent = []
            return


def sign(method: str, route: Route, quoted: str, headers: dict[str, str], credentials: Any, now: datetime) -> None:
    """Add the signature of a request for the key *quoted* to *headers* (AWS Signature Version 4)."""
    date = now.strftime("%Y%m%dT%H%M%SZ")
    headers |= {"x-amz-content-sha256": _UNSIGNED, "x-amz-date": date}
    if credentials.token:
        headers["x-amz-security-token"] = credentials.token
    signed_headers = {**headers, "host": route.host}  # the connection states it
    names = sorted(signed_headers)
    lines = "".join(f"{name}:{signed_headers[name].strip()}\n" for name in names)
    signed = ";".join(names)
    canonical = f"{method}\n{route.path}{quoted}\n\n{lines}\n{signed}\n{_UNSIGNED}"
    scope = f"{date[:8]}/{route.region}/s3/aws4_request"
    text = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    signature = hmac.digest(_signing_key(credentials.secret_key, scope), text.encode(), "sha256").hex()
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={signed}, Signature={signature}"
    )


@lru_cache(4)
def _signing_key(secret: str, scope: str) -> bytes:
    """Return the signing key for a secret and a scope, which has the day and the region."""
    key = f"AWS4{secret}".encode()
    for part in scope.split("/"):
        key = hmac.digest(key, part.encode(), "sha256")
    return key


def _host(url: str) -> str:
    """Return the Host header for *url*: without the port where that is the usual one."""
    place = urlsplit(url)
    host = f"[{place.hostname}]" if ":" in (place.hostname or "") else place.hostname or ""
    return host if place.port in (None, {"http": 80, "https": 443}.get(place.scheme)) else f"{host}:{place.port}"


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
