"""A bucket: its address, the settings of its client, and the client's life.

Guarantees:

- Endpoint, region, credentials and addressing are found as by the AWS tools (arguments first, then environment,
  profile and configuration files). Nothing is read and no connection is made before the first call.
- One client, made on first use on the running loop. It is closed by ``close``, or when that loop ends, even if nothing
  refers to the bucket any more.
- An endpoint with a user or a password in it is refused before anything is sent, and neither is shown.
- The client never retries (`aiockpt.storage.retry` does), signs no payload, and adds no checksum of its own.
- Credentials that the store reports as expired are read anew for the next call.
- Answers come from the requested host: no redirect is followed (`StoreSession`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Literal
from urllib.parse import urlsplit
from xml.etree import ElementTree

import anyio
import msgspec
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.exceptions import ClientError
from botocore.loaders import Loader, create_loader

from aiockpt.backends.s3_direct import ObjectRequests
from aiockpt.backends.s3_errors import guard_providers, says_empty, says_expired, says_little, storage_errors
from aiockpt.errors import StorageTimeoutError, UsageError
from aiockpt.redaction import hide, redact_error
from aiockpt.runtime.limits import Limiter, note_progress, run_blocking
from aiockpt.storage.address import hide_secrets
from aiockpt.storage.backend import check_key

# aiobotocore makes the class of its clients at run time.
S3Client = Any

Addressing = Literal["auto", "path", "virtual"]
_CONNECTIONS = 64
# Part of the time without a byte by which a call may be cancelled later.
_SLACK = 1 / 32
_SERVICE_FILES = (("s3", "service-2"), ("s3", "endpoint-rule-set-1"))
_SHARED_FILES = ("endpoints", "partitions", "sdk-default-configuration")
# The generators that close the open clients. One that was collected with its bucket would leave connections open: a loop
# that ends closes only generators that still exist.
_held: dict[object, tuple[asyncio.AbstractEventLoop, AsyncGenerator[S3Client, None]]] = {}


class StoreSession(AIOHTTPSession):  # type: ignore[misc,unused-ignore]
    """A session without redirects: answers come from the requested host.

    aiohttp follows a 307 to any host by itself, with the body, and the client would accept the answer of that host. A
    store never needs that: where a bucket lies in another region AWS states it in its answer, and the client signs anew
    for the endpoint that it knows itself.

    Attributes:
        has_proxy: whether requests go through a proxy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.has_proxy = bool(options.get("proxies"))

    async def send(self, request: Any) -> Any:
        """Send a request; a list that is no XML, a page for people, gets no body: botocore would make an error 500 of it.

        A part of a list, which a network may leave of one, stays such an error.
        """
        answer: Any = await super().send(request)
        if answer.status_code == 200 and "list-type=2" in request.url and not _may_be_list(await answer.content):
            answer._content = b""  # noqa: SLF001  not public; a test of such answers keeps it there
        return answer

    async def direct(self) -> _Direct:
        """Return aiohttp's session, with the pool, the TLS and the timeouts of this one, for requests without a proxy."""
        return await self._get_session(None)

    async def _get_session(self, proxy_url: str | None) -> _Direct:
        return _Direct(await super()._get_session(proxy_url))  # type: ignore[misc,unused-ignore]


def _may_be_list(body: bytes) -> bool:
    """Return whether *body* is XML, or a part of a list."""
    if b"ListBucketResult" not in body:
        try:
            ElementTree.fromstring(body)
        except ElementTree.ParseError:
            return False
    return True


class _Direct:
    """aiohttp's session, with redirects passed to the caller, as errors."""

    def __init__(self, session: Any) -> None:
        self._session = session

    async def request(self, method: str, url: Any, **options: Any) -> Any:
        return await self._session.request(method, url, allow_redirects=False, **options)


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings to reach a store; None leaves the choice to the environment and the AWS configuration files.

    Attributes:
        connect_timeout_s: for a connection to be made.
        stall_s: without a byte in either direction before a call is cancelled.
    """

    endpoint_url: str | None = None
    region: str | None = None
    profile: str | None = None
    addressing: Addressing | None = None
    connect_timeout_s: float = 10.0
    stall_s: float = 60.0

    def config(self) -> AioConfig:
        """Return the client's configuration."""
        addressing = {"addressing_style": self.addressing} if self.addressing else {}
        return AioConfig(
            connect_timeout=self.connect_timeout_s,
            read_timeout=self.stall_s,
            max_pool_connections=_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            s3={"payload_signing_enabled": False, **addressing},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            user_agent="aiockpt",  # else it is built anew for each call, a fifth of its cost
            http_session_cls=StoreSession,
            parameter_validation=False,  # ours are valid, and it costs more than signing
        )


def split_url(url: str) -> tuple[str, str]:
    """Return the bucket and the prefix, without slashes around it, that ``s3://bucket/prefix`` means.

    Raises:
        UsageError: it names no bucket, or the prefix is no key.
    """
    scheme, _, rest = url.partition("://")
    bucket, _, prefix = rest.partition("/")
    if scheme.lower() != "s3" or not bucket:
        raise UsageError(f"{url!r} names no bucket: write s3://bucket/prefix")
    if any(mark in bucket for mark in "@:?# "):
        raise UsageError(
            f"{hide(url)!r} names no valid bucket. Credentials and endpoint are not part of the URL: set"
            " AWS_ENDPOINT_URL, AWS_PROFILE, … as for the AWS tools"
        )
    prefix = prefix.strip("/")
    return bucket, check_key(prefix, portable=False) if prefix else ""


class Bucket:
    """One bucket below one prefix, and its client.

    Attributes:
        name, prefix: the bucket, and the prefix of all our keys in it ("" or without a slash at the end).
        batches: how the store accepts DeleteObjects: "plain", "with MD5", or not at all, "none".
    """

    def __init__(self, name: str, prefix: str, settings: Settings) -> None:
        self.name = name
        self.prefix = prefix
        self.batches: Literal["plain", "with MD5", "none"] = "plain"
        self._settings = settings
        hide_secrets(self.name)
        check_endpoint(name, settings.endpoint_url)
        self._loading = Limiter("s3 client", 1)
        self._opening = anyio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._clients: list[object] = []
        self._client: S3Client | None = None
        self._requests: ObjectRequests | None = None
        self._expired = False
        self._silent: dict[str, tuple[float, float]] = {}

    @property
    def where(self) -> str:
        """The bucket and its endpoint, for messages."""
        endpoint = self._client.meta.endpoint_url if self._client is not None else self._settings.endpoint_url
        return f"s3://{self.name} at {urlsplit(endpoint).netloc if endpoint else 'the AWS endpoint'}"

    def path(self, key: str) -> str:
        """Return the bucket's name for *key*; for "" it is that of the root folder."""
        return f"{self.prefix}/{key}" if self.prefix and key else self.prefix or key

    def address(self, key: str) -> dict[str, Any]:
        """Return the parameters of a call that name its object."""
        return {"Bucket": self.name, "Key": self.path(key)}

    def key(self, path: str) -> str:
        """Return our name for *path*, which begins with the prefix."""
        return path[len(self.prefix) + 1 :] if self.prefix else path

    def errors(self, doing: str, key: str) -> AbstractContextManager[None]:
        """Convert errors in the block to ours; see `s3_errors`."""
        return storage_errors(doing, key, self.where, self._notice)

    @contextmanager
    def sending(self, doing: str, key: str) -> Iterator[Callable[[], None]]:
        """Cancel the block after a stall; yield the function that notes progress. Otherwise the same as `errors`.

        The client's read timeout does not detect a store that accepts no more bytes.
        """
        stall_s, now_s = self._settings.stall_s, asyncio.get_running_loop().time
        early_s = now_s() + stall_s * _SLACK
        with anyio.CancelScope(deadline=early_s + stall_s) as scope:

            def moved() -> None:
                nonlocal early_s
                if now_s() > early_s:  # a new deadline costs more than sending a small object
                    early_s = now_s() + stall_s * _SLACK
                    scope.deadline = early_s + stall_s
                note_progress()

            with self.errors(doing, key):
                yield moved
        if scope.cancelled_caught:
            raise StorageTimeoutError(
                f"{doing} {key!r} in {self.where}: nothing moved for {self._settings.stall_s:g} s", key=key
            )

    async def client(self) -> S3Client:
        """Return the client of the running loop, made now if there is none.

        Raises:
            UsageError: the client belongs to another loop that still runs, or the endpoint is no URL.
        """
        if self._client is None or self._expired or self._loop is not asyncio.get_running_loop():
            async with self._opening:
                with self.errors("opening", ""):
                    await self._open()
        assert self._client is not None
        return self._client

    async def requests(self) -> ObjectRequests:
        """Return the maker of requests for single objects; raises as `client`."""
        await self.client()
        assert self._requests is not None
        return self._requests

    async def head(self, doing: str, key: str) -> dict[str, Any]:
        """Return the store's description of an object; *doing* is for messages.

        The answer to a HEAD has no body with the reason of a refusal, and expired credentials look like wrong ones: after
        a refusal a GET of one byte is sent, and its answer counts.
        """
        requests = await self.requests()
        with self.errors(doing, key):
            try:
                return await requests.head(self.name, self.path(key))
            except ClientError as error:
                if not says_little(error):
                    raise
                return await self._stat_by_get(await self.client(), key, error)

    async def _stat_by_get(self, client: S3Client, key: str, unsaid: ClientError) -> dict[str, Any]:
        try:
            answer = dict(await client.get_object(**self.address(key), Range="bytes=0-0"))
        except ClientError as error:
            raise (unsaid if says_empty(error) else error) from None
        answer["Body"].close()
        size = answer.get("ContentRange", "").rpartition("/")[2]
        return {**answer, "ContentLength": int(size) if size.isdecimal() else answer["ContentLength"]}

    async def close(self) -> None:
        """Close the connections. The next call makes new ones."""
        clients, self._clients = self._clients, []
        self._client = None
        for number in clients:
            if number in _held:
                await _held[number][1].aclose()

    def _add_md5(self, params: dict[str, Any], **_: object) -> None:
        """State the MD5 of a list of deletes in place of its CRC32, where the store requires that."""
        if self.batches == "with MD5":
            params["context"].pop("checksum", None)
            digest = hashlib.md5(params["body"], usedforsecurity=False).digest()
            params["headers"]["Content-MD5"] = base64.b64encode(digest).decode()

    def _notice(self, error: Exception) -> None:
        self._expired = self._expired or says_expired(error)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._client is not None and self._loop is not None and not self._loop.is_closed():
                raise UsageError(f"{self.where} is in use on another event loop; open a backend for each")
            self._loop, self._client, self._clients = loop, None, []
        if self._client is None or self._expired:
            session = AioSession(profile=self._settings.profile)
            session.register_component("data_loader", await run_blocking(self._loading, _load_descriptions))
            guard_providers(session, f"s3://{self.name}", self._silent)
            for number in [number for number, (held_on, _) in _held.items() if held_on.is_closed()]:
                del _held[number]
            number = object()
            _held[number] = loop, self._hold(session, number)
            self._client = await self._open_client(_held[number][1])  # calls under way keep the one they have
            self._requests = self._make_requests(self._client, session)
            self._clients.append(number)
            self._expired = False

    def _make_requests(self, client: S3Client, session: AioSession) -> ObjectRequests:
        http = client._endpoint.http_session  # noqa: SLF001  not public; a test keeps it there
        return ObjectRequests(client, http, session, follows=_is_aws(client.meta.endpoint_url))

    async def _open_client(self, client: AsyncGenerator[S3Client, None]) -> S3Client:
        try:
            return await anext(client)
        except UsageError:
            raise
        except ValueError as error:
            raise UsageError(
                f"s3://{self.name}: {error}; check AWS_ENDPOINT_URL or endpoint_url=…: http://host:port"
            ) from redact_error(error)

    async def _hold(self, session: AioSession, number: object) -> AsyncGenerator[S3Client, None]:
        """Yield a client that is closed with this generator: by us, or by the loop at its end."""
        try:
            async with session.create_client(
                "s3",
                endpoint_url=self._settings.endpoint_url,
                region_name=self._settings.region,
                config=self._settings.config(),
            ) as client:
                check_endpoint(self.name, client.meta.endpoint_url)
                client.meta.events.register_last("before-call.s3", _send_at_once)
                client.meta.events.register_last("before-call.s3.DeleteObjects", self._add_md5)
                if not _is_aws(client.meta.endpoint_url):
                    client.meta.events.register_last("before-call.s3", _stay_here)
                yield client
        finally:
            _held.pop(number, None)


def check_endpoint(bucket: str, endpoint_url: str | None) -> None:
    """Raise UsageError where an endpoint has a user or a password in it: S3 does not use one to sign requests."""
    if endpoint_url and "@" in endpoint_url:
        raise UsageError(
            f"s3://{bucket}: the endpoint {hide(endpoint_url)!r} has a user in it, which S3 does not use. Remove it from"
            " AWS_ENDPOINT_URL or endpoint_url=…, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


@cache
def _load_descriptions() -> Loader:
    """Read and parse botocore's description of S3, once in a process: 0.3 s that must not block the event loop."""
    loader = create_loader()
    for name in _SHARED_FILES:
        loader.load_data(name)
    for service, name in _SERVICE_FILES:
        loader.load_service_model(service, name)
    return loader


def _send_at_once(params: dict[str, Any], **_: object) -> None:
    """Remove the wait for ``100 Continue`` that botocore adds to a body with ``read``: a round trip for each part."""
    params["headers"].pop("Expect", None)


def _is_aws(endpoint_url: str) -> bool:
    return (urlsplit(endpoint_url).hostname or "").endswith((".amazonaws.com", ".amazonaws.com.cn"))


def _stay_here(params: dict[str, Any], **_: object) -> None:
    """Keep botocore from searching other regions: a store that is not AWS has none, and would be queried without end."""
    params["context"].setdefault("s3_redirect", {})["redirected"] = True
