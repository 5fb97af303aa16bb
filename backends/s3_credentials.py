"""The credential providers of botocore, with their failures as errors of ours.

Guarantees:

- Whatever a provider raises, when the client is made or when a key is renewed later, becomes one `StorageError` that names
  the provider and what to do.
- A service that is busy (429 or 5xx of a metadata service or of STS, no answer) is retryable, as a busy store is; what is
  missing or refused is not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from botocore.exceptions import ClientError, HTTPClientError

from aiockpt.errors import CheckpointError, StorageAccessError, StorageError
from aiockpt.redaction import redact_error

_BUSY = re.compile(r"non 200 response (?:429|5\d\d)\b|Received error when attempting|Credential refresh failed")
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


def guard_providers(session: Any, where: str) -> None:
    """Make the credential providers of an aiobotocore *session* fail with errors of ours; *where* is for messages."""
    for provider in session.get_component("credential_provider").providers:
        _guard(provider, where)


def _guard(provider: Any, where: str) -> None:
    load, busy = provider.load, _note_busy(provider)

    async def guarded() -> Any:
        busy.clear()
        with _errors(provider.METHOD, where):
            credentials = await load()
        if credentials is None and busy:
            raise StorageError(_words(provider.METHOD, where, f"it answers HTTP {busy[-1]}"), retryable=True)
        if credentials is not None:
            renew = credentials.get_frozen_credentials

            async def get_frozen_credentials() -> Any:
                with _errors(provider.METHOD, where):
                    return await renew()

            credentials.get_frozen_credentials = get_frozen_credentials
        return credentials

    provider.load = guarded


def _note_busy(provider: Any) -> list[int]:
    """Return a list that gets each status by which the metadata service of the instance reports that it is busy.

    botocore treats such an answer as "this is no instance". 401 means that the token before it was not issued.
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
def _errors(method: str, where: str) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # noqa: BLE001  files, commands, JSON, HTTP: each provider has its own
        message = _words(method, where, str(error) or type(error).__name__)
        kind = StorageError if _is_busy(error) else StorageAccessError
        raise kind(message, retryable=kind is StorageError) from redact_error(error)


def _is_busy(error: Exception) -> bool:
    if isinstance(error, ClientError):
        status = int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
        return status == 429 or status >= 500 or "Throttl" in error.response.get("Error", {}).get("Code", "")
    return isinstance(error, HTTPClientError | ConnectionError | TimeoutError) or (
        getattr(error, "kwargs", {}).get("provider") in ("container-role", "iam-role")
        and bool(_BUSY.search(str(error)))
    )


def _words(method: str, where: str, why: str) -> str:
    name, advice = _PROVIDERS.get(method, (f"the provider {method!r}", "Check the AWS configuration files."))
    return f"{where}: {name} gives no credentials: {why}. {advice}"
