"""How are several tiers asked the same thing, so that one that is stalled delays the answer of the others by little?

All at once. When one has answered with something, the rest have a while left, and one that refuses every call less
(`aiockpt.storage.query_timeout`); who has not answered by then has nothing to say, as one that fails, and both are logged.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence, Sized
from typing import TypeVar

from aiockpt.engine.place import Place
from aiockpt.errors import CheckpointError
from aiockpt.runtime.tasks import open_tasks
from aiockpt.storage.query_timeout import QueryTimeout

logger = logging.getLogger("aiockpt")

A = TypeVar("A", bound=Sized)


async def query_tiers(
    tiers: Sequence[Place], ask: Callable[[Place], Awaitable[A]], patience_s: float, errors: type[CheckpointError]
) -> tuple[list[tuple[Place, A]], CheckpointError | None]:
    """Return what each tier answers, the nearest first, and the first failure among them.

    Args:
        patience_s: seconds for the others once one has answered with something.
        errors: what counts as no answer; anything else is raised.
    """
    answers: dict[int, A] = {}
    failures: dict[int, CheckpointError] = {}

    waits = [QueryTimeout() for _ in tiers]

    async def ask_one(number: int) -> None:
        try:
            with waits[number].waiting():
                answers[number] = await ask(tiers[number])
        except errors as error:
            logger.warning("%s does not say what it has: %s", tiers[number].backend.url, error)
            failures[number] = error
        if answers.get(number):
            for wait in waits:
                wait.limit(patience_s)

    async with open_tasks() as tasks:
        for number in range(len(tiers)):
            tasks.start_soon(ask_one, number)
    for number, tier in enumerate(tiers):
        if number not in answers and number not in failures:
            logger.warning(
                "%s is not waited for, as another tier has answered: %s", tier.backend.url, waits[number].reason()
            )
    first = failures[min(failures)] if failures else None
    return [(tiers[number], answers[number]) for number in sorted(answers)], first
