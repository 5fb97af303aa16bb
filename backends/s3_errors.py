"""The conversion of errors of S3 and of botocore's credential providers to ours.

Guarantees:

- Every error that leaves `storage_errors` is a `StorageError` that names the key, the bucket, the endpoint and the next
  action; ``retryable`` is whether the same call may succeed a moment later. Cancellation, and errors that are already
  ours, pass unchanged.
- Every error of a credential provider, when the client is made or when a key is renewed later, becomes one `StorageError`
  that names the provider and the next action (`guard_providers`). That of a busy service (429 or 5xx of a metadata service
  or of STS, no answer) is retryable, like that of a busy store; missing or refused credentials are not.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, NamedTuple

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    ProxyConnectionError,
    ReadTimeoutError,
    SSLError,
)
from botocore.parsers import ResponseParserError

from aiockpt.errors import (
    CheckpointError,
    ObjectExistsError,
    ObjectNotFoundError,
    StorageAccessError,
    StorageError,
    StorageFullError,
    StorageThrottledError,
    StorageTimeoutError,
    StorageTransferError,
    archived,
)
from aiockpt.redaction import redact, redact_error

_EXPIRED = {"ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"}
_NO_BUCKET = {"NoSuchBucket"}
_THROTTLED = {"SlowDown", "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "RequestLimitExceeded"}
_THROTTLED |= {"TooManyRequests", "TooManyRequestsException", "RequestThrottled", "ServiceUnavailable", "503", "429"}
_TIMED_OUT = {"RequestTimeout", "RequestTimeoutException"}
_DAMAGED = {"BadDigest", "InvalidDigest", "IncompleteBody", "XAmzContentSHA256Mismatch", "XAmzContentChecksumMismatch"}
_OTHER_REGION = {"AuthorizationHeaderMalformed", "IllegalLocationConstraintException"}
_CLOCK = {"RequestTimeTooSkewed"}
_VIRTUAL = {"SecondLevelDomainForbidden", "PathStyleDomainForbidden", "InvalidPathAccess", "VirtualHostDomainRequired"}
_BUSY_STATUS = {429, 503, 509, 529}
# What no second try changes. The other answers above 500 are those of a gateway or a CDN whose store did not answer it.
_FINAL_STATUS = {501, 505, 507, 508, 510, 511}
_ACCESS_STATUS = {401, 403}
_UNKNOWN_STATUS = {400, 404, 405, 411, 415, 501}
_ELSEWHERE = {301, 302, 303, 307, 308}


class _Meaning(NamedTuple):
    """The error of ours for some codes of an answer, or errors of the client, and the next action."""

    of: Any
    kind: type[StorageError]
    advice: str = ""
    retryable: bool | None = None

    def error(self, message: str, key: str) -> StorageError:
        return self.kind(f"{message}. {self.advice}" if self.advice else message, key=key, retryable=self.retryable)


_ANSWERS = (
    _Meaning({"NoSuchKey", "NotFound", "404"}, ObjectNotFoundError),
    _Meaning(_NO_BUCKET, StorageError, "Create the bucket, or check its name and AWS_ENDPOINT_URL."),
    _Meaning({"PreconditionFailed", "412"}, ObjectExistsError),
    _Meaning({"ConditionalRequestConflict", "OperationAborted"}, StorageError, retryable=True),
    _Meaning(_THROTTLED, StorageThrottledError),
    _Meaning(_TIMED_OUT, StorageTimeoutError),
    _Meaning(_DAMAGED, StorageTransferError),
    _Meaning(
        {"QuotaExceeded", "InsufficientStorage", "XMinioStorageFull", "XMinioAdminBucketQuotaExceeded", "507"},
        StorageFullError,
        "Free space or raise the quota.",
    ),
    _Meaning(
        _EXPIRED,
        StorageAccessError,
        "The credentials expired; they are read again for the next call: renew them if they stay old.",
        retryable=True,
    ),
    _Meaning(
        {"InvalidAccessKeyId", "SignatureDoesNotMatch"},
        StorageAccessError,
        "Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE: they are not this store's.",
    ),
    _Meaning(_CLOCK, StorageAccessError, "Set this machine's clock: S3 requires the right time."),
    _Meaning(_OTHER_REGION, StorageError, "The bucket is in another region: set AWS_REGION, or region=… ."),
    _Meaning(
        _VIRTUAL,
        StorageError,
        "The store wants the bucket in the host's name: set addressing_style = virtual below s3 = in the AWS configuration,"
        " or pass addressing='virtual'.",
    ),
    _Meaning(
        {"NoSuchUpload"},
        StorageError,
        "The multipart upload was aborted, by a lifecycle rule or a clean-up: save again.",
    ),
    _Meaning({"NotImplemented", "501"}, StorageError, "The store does not support a requested feature of S3."),
)
# The first match counts.
_FAILURES = (
    _Meaning(
        (NoCredentialsError, PartialCredentialsError),
        StorageAccessError,
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or what else the AWS tools read.",
    ),
    _Meaning(ProfileNotFound, StorageAccessError, "Check AWS_PROFILE and the AWS configuration files."),
    _Meaning((ConnectTimeoutError, ReadTimeoutError, TimeoutError), StorageTimeoutError),
    _Meaning((aiohttp.ClientPayloadError, FlexibleChecksumError), StorageTransferError),
    _Meaning(
        (SSLError, aiohttp.ClientSSLError),
        StorageError,
        "Check the certificate (AWS_CA_BUNDLE) and https or http.",
    ),
    _Meaning(
        (EndpointConnectionError, ProxyConnectionError, aiohttp.ClientConnectorError),
        StorageError,
        "Check that the store is up and AWS_ENDPOINT_URL is right.",
        retryable=True,
    ),
)


def says_expired(error: BaseException | None) -> bool:
    """Return whether *error* means that the credentials have expired."""
    return _code(error) in _EXPIRED


def says_little(error: ClientError) -> bool:
    """Return whether *error* refuses without a reason, as the answer to a HEAD must: it has a status and no code."""
    return _code(error) in ("400", "401", "403")


def says_no_upload(error: BaseException | None) -> bool:
    """Return whether *error* means that the multipart upload does not exist: it may have been finished."""
    return _code(error) == "NoSuchUpload"


def says_denied(error: BaseException | None) -> bool:
    """Return whether *error* means that a policy does not allow this call with these credentials."""
    return _code(error) in ("AccessDenied", "403")


def says_empty(error: ClientError) -> bool:
    """Return whether *error* means that the requested range begins where the object ends."""
    return _code(error) in ("InvalidRange", "416")


def says_damaged(error: ClientError) -> bool:
    """Return whether *error* means that the bytes received do not match their checksum."""
    return _code(error) in _DAMAGED


def says_unknown(error: ClientError) -> bool:
    """Return whether *error* may mean that the store does not know the call, or one of its headers.

    Stores have no common code for it: NotImplemented, InvalidArgument, InvalidRequest, MalformedXML, and
    SignatureDoesNotMatch from stores that leave unknown headers out of the signature.
    """
    known = _EXPIRED | _TIMED_OUT | _NO_BUCKET | _OTHER_REGION | _CLOCK | (_DAMAGED - {"InvalidDigest"})
    return _code(error) == "SignatureDoesNotMatch" or (_status(error) in _UNKNOWN_STATUS and _code(error) not in known)


def _code(error: BaseException | None) -> str:
    """Return the store's code for *error*, "" where it is no answer of a store, or has none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def _status(error: ClientError) -> int:
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


@contextmanager
def storage_errors(doing: str, key: str, where: str, noticed: Callable[[Exception], object]) -> Iterator[None]:
    """Convert errors in the block to ours, raised ``from`` the client's own; call *noticed* first.

    Args:
        doing: a verb form, as in "reading".
        key: relative to the backend's root; "" is the root.
        where: the bucket and the endpoint, for messages.
    """
    doing = f"{doing} {key!r} in {where}" if key else f"{doing} {where}"
    try:
        yield
    except ClientError as error:
        noticed(error)
        raise _from_answer(error, doing, where, key) from redact_error(error)
    except (BotoCoreError, aiohttp.ClientError, OSError) as error:
        if isinstance(error, StorageError):
            raise
        noticed(error)
        raise _from_client(error, doing, key) from redact_error(error)


def _from_answer(error: ClientError, doing: str, where: str, key: str) -> StorageError:
    """Return ours for an answer of the store."""
    code, status = _code(error), _status(error)
    said = error.response.get("Error", {}).get("Message", "")
    message = f"{doing}: {code}" + (f": {said}" if said and said != code else "") + f" (HTTP {status})"
    if code == "InvalidObjectState":
        return archived(message, key)
    for meaning in _ANSWERS:
        if code in meaning.of:
            return meaning.error(message, key)
    if status in _ELSEWHERE:
        headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
        return StorageError(
            f"{message}. It redirects to {redact(headers.get('location', 'another place'))}, which is not followed: only"
            " answers of the named store are accepted. Set AWS_REGION to the bucket's region, or AWS_ENDPOINT_URL to the"
            " address of the store.",
            key=key,
        )
    if status == 404 and not code.startswith("NoSuch"):
        return ObjectNotFoundError(message, key=key)
    if status in _ACCESS_STATUS:
        return StorageAccessError(f"{message}. Check that these credentials may read, write and list {where}.", key=key)
    if status in _BUSY_STATUS:
        return StorageThrottledError(message, key=key)
    return StorageError(message, key=key, retryable=status == 408 or (status >= 500 and status not in _FINAL_STATUS))


def _from_client(error: Exception, doing: str, key: str) -> StorageError:
    """Return ours for a failure of the client: there was no answer, or an invalid one."""
    message = f"{doing}: {error or type(error).__name__}"
    for meaning in _FAILURES:
        if isinstance(error, meaning.of):
            return meaning.error(message, key)
    if isinstance(getattr(error, "kwargs", {}).get("error", error), FileNotFoundError | PermissionError):
        return StorageAccessError(
            f"{message}. Check AWS_CA_BUNDLE and the files that the AWS configuration names.", key=key
        )
    again = (ConnectionClosedError, HTTPClientError, ResponseParserError, aiohttp.ClientError, ConnectionError)
    return StorageError(message, key=key, retryable=isinstance(error, again))


_NO_ANSWER = "Received error when attempting"
SILENT_S, FORGET_S = 5.0, 60.0
"""How long a metadata service may not answer at all, for instance while a pod starts, before it counts as dead."""
_BUSY_SERVICE = re.compile(rf"non 200 response (?:429|5\d\d)\b|{_NO_ANSWER}|Credential refresh failed")
_PROVIDERS = {
    "assume-role-with-web-identity": (
        "the web identity",
        "Check that AWS_WEB_IDENTITY_TOKEN_FILE is mounted, and that AWS_ROLE_ARN trusts it.",
    ),
    "custom-process": (
        "credential_process",
        "Run the command of the profile by hand: it has to print JSON with Version 1, AccessKeyId and SecretAccessKey.",
    ),
    "container-role": (
        "the metadata service of the container",
        "Check AWS_CONTAINER_CREDENTIALS_FULL_URI and AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE.",
    ),
    "iam-role": ("the metadata service of the instance", "Check that the instance has a role."),
    "assume-role": ("the role of the profile", "Check role_arn and source_profile in the AWS configuration files."),
    "sso": ("the single sign-on", "Run `aws sso login`."),
    "login": ("the login", "Run `aws login`."),
}


def guard_providers(session: Any, where: str, silent: dict[str, tuple[float, float]]) -> None:
    """Make the credential providers of an aiobotocore *session* fail with errors of ours.

    Args:
        where: for messages.
        silent: since when, and when last, the service of a provider did not answer; kept for the next session.
    """
    for provider in session.get_component("credential_provider").providers:
        _guard(provider, where, silent)


def _guard(provider: Any, where: str, silent: dict[str, tuple[float, float]]) -> None:
    load, busy = provider.load, _note_busy(provider)

    async def guarded() -> Any:
        busy.clear()
        with _provider_errors(provider.METHOD, where, silent):
            credentials = await load()
        if credentials is None and busy:
            raise StorageError(_words(provider.METHOD, where, f"it answers HTTP {busy[-1]}"), retryable=True)
        if credentials is not None:
            renew = credentials.get_frozen_credentials

            async def get_frozen_credentials() -> Any:
                with _provider_errors(provider.METHOD, where, silent):
                    return await renew()

            credentials.get_frozen_credentials = get_frozen_credentials
        return credentials

    provider.load = guarded


def _note_busy(provider: Any) -> list[int]:
    """Return a list that collects each status by which the metadata service of the instance reports that it is busy.

    botocore treats such an answer as "this is no instance". 401 means that the earlier request for a token failed.
    """
    busy: list[int] = []
    fetcher = getattr(provider, "_role_fetcher", None)
    judge = getattr(fetcher, "_is_non_ok_response", None)
    if fetcher is not None and judge is not None:

        async def noting(response: Any) -> bool:
            if response.status_code in (401, 429) or response.status_code >= 500:
                busy.append(response.status_code)
            return bool(await judge(response))

        fetcher._is_non_ok_response = noting  # noqa: SLF001  not public; a test keeps it in the library
    return busy


@contextmanager
def _provider_errors(method: str, where: str, silent: dict[str, tuple[float, float]]) -> Iterator[None]:
    """Convert a provider's errors in the block to ours; a service that does not answer is retryable for `SILENT_S`."""
    begun_s = monotonic()
    try:
        yield
        silent.pop(method, None)
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  files, commands, JSON, HTTP: each provider has its own
        said = str(error) or type(error).__name__
        if not isinstance(error, BotoCoreError | OSError):  # what Python says of nonsense begins with a quoted type
            said = f"{type(error).__name__}: {said}"
        since_s, last_s = silent.pop(method, (begun_s, begun_s))
        since_s = begun_s if begun_s - last_s > FORGET_S else since_s
        is_dead = _NO_ANSWER in said and monotonic() - since_s > SILENT_S
        if _NO_ANSWER in said:
            silent[method] = since_s, monotonic()
        kind = StorageError if _is_busy_service(error) and not is_dead else StorageAccessError
        raise kind(_words(method, where, said), retryable=kind is StorageError) from redact_error(error)


def _is_busy_service(error: Exception) -> bool:
    if isinstance(error, ClientError):
        return _status(error) == 429 or _status(error) >= 500 or "Throttl" in _code(error)
    return isinstance(error, HTTPClientError | ConnectionError | TimeoutError) or (
        getattr(error, "kwargs", {}).get("provider") in ("container-role", "iam-role")
        and bool(_BUSY_SERVICE.search(str(error)))
    )


def _words(method: str, where: str, why: str) -> str:
    name, advice = _PROVIDERS.get(method, (f"the provider {method!r}", "Check the AWS configuration files."))
    return f"{where}: {name} gives no credentials: {why}. {advice}"
