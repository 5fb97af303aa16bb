"""Task groups that end together and raise one plain error.

anyio's task group wraps every failure in an exception group. Callers of aiockpt never need ``except*``: here the first
error that is not a cancellation is raised alone, with its own traceback.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio
from anyio.abc import TaskGroup


@asynccontextmanager
async def open_tasks() -> AsyncIterator[TaskGroup]:
    """Open a task group; when it fails, raise its first error instead of the group."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        raise first_error(group) from None


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the first leaf of *group*, looking into groups inside it."""
    for error in group.exceptions:
        return first_error(error) if isinstance(error, BaseExceptionGroup) else error
    raise AssertionError("an exception group is never empty")
