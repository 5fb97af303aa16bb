"""Places that refuse, left at once, and places that are only slow, busy or unsteady, waited for."""

from collections.abc import Callable, Iterator
from itertools import count, repeat
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError, StorageThrottledError
from aiockpt.pipeline import lineage
from aiockpt.places.tiers import tiers
from aiockpt.storage.retry import Retrying
from aiockpt.storage.retry_calls import QueryTimeout
from tests.simulated.simulation import simulated_world
from tests.simulated.virtual_time import run_virtually
from tests.small_run import small_checkpointer

REFUSED = StorageError("connection refused", retryable=True)


class Answering(MemoryBackend):
    """Answers each listing as *answers* has it: raises an error, waits for seconds, or with None lists what is there."""

    def __init__(self, answers: Iterator[StorageError | float | None]) -> None:
        super().__init__()
        self._answers = answers

    async def list(self, prefix: str) -> Any:
        answer = next(self._answers)
        if isinstance(answer, StorageError):
            raise answer
        await anyio.sleep(answer or 0)
        return await super().list(prefix)


def ask(
    answers: Iterator[StorageError | float | None], limit_s: float | None, *, calls: int = 1
) -> tuple[float, bool, QueryTimeout]:
    """List a place so often, waiting for it with patience; return the seconds, whether it answered, and the patience."""
    world = simulated_world()
    backend = Retrying(Answering(answers), world=world)

    async def main() -> tuple[float, bool, QueryTimeout]:
        patience, begun_s = QueryTimeout(), anyio.current_time()
        if limit_s is not None:
            patience.limit(limit_s)
        answered = False
        with patience.waiting():
            for _ in range(calls):
                await backend.list("")
            answered = True
        return anyio.current_time() - begun_s, answered, patience

    return run_virtually(main, world.clock)


def test_a_place_that_refuses_every_call_is_left_after_some_seconds() -> None:
    seconds, answered, patience = ask(repeat(REFUSED), 10)
    assert not answered
    assert 3 <= seconds < 6
    assert patience.reason() == "it fails again and again: connection refused"


def test_a_place_that_starts_again_is_waited_for() -> None:
    seconds, answered, _ = ask(iter([*[REFUSED] * 6, None]), 10)
    assert answered
    assert 0.7 < seconds < 3


def test_a_silent_place_is_waited_for_as_long_as_was_said() -> None:
    seconds, answered, patience = ask(repeat(1000.0), 10)
    assert not answered
    assert seconds == pytest.approx(10, abs=0.01)
    assert patience.reason() == "no answer within 10 s"


def test_a_place_that_fails_now_and_then_is_not_left() -> None:
    unsteady: Callable[[int], StorageError | None] = lambda call: None if call % 4 == 3 else REFUSED  # noqa: E731
    _, answered, patience = ask(map(unsteady, count()), 100, calls=50)
    assert answered
    assert patience.refused is None
    assert patience.reason() is None


def test_a_place_that_asks_for_patience_is_awaited() -> None:
    busy = StorageThrottledError("slow down")
    seconds, answered, _ = ask(iter([*[busy] * 6, None]), 100)
    assert answered
    assert seconds > 1


def test_a_place_that_has_to_answer_is_tried_on() -> None:
    _, answered, _ = ask(iter([*[REFUSED] * 8, None]), None)
    assert answered


def test_nothing_waits_for_a_tier_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module, name in ((tiers, "LIST_PATIENCE_S"), (lineage, "PATIENCE_S")):
        monkeypatch.setattr(module, name, 1000)  # this test has 60 s
    state = {"x": torch.zeros(5000)}
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result()
    far = Retrying(Answering(repeat(REFUSED)))
    with small_checkpointer([tmp_path, aiockpt.Tier(far, deadline=0.1)]) as ckpt:
        assert ckpt.load(state).result() is not None
        assert ckpt.save(2, state).result().durable
    said = [record.getMessage() for record in caplog.records if "again and again" in record.getMessage()]
    assert len(said) >= 2
    assert all(line.startswith(far.url) for line in said)
