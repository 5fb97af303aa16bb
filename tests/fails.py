"""A call that must fail, and how."""

from collections.abc import Awaitable

import pytest

from aiockpt.errors import StorageError


async def fails(
    call: Awaitable[object],
    kind: type[Exception] = StorageError,
    match: str | None = None,
    *,
    retryable: bool | None = None,
) -> StorageError:
    """Await *call* and return its error: of *kind*, with a message that matches, *retryable* or not where that is given."""
    with pytest.raises(kind, match=match) as caught:
        await call
    assert retryable is None or getattr(caught.value, "retryable", None) is retryable
    return caught.value  # type: ignore[return-value]
