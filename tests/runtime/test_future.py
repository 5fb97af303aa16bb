"""Waiting never owns the work, and every stage settles once."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable

import anyio
import pytest
import trio

from aiockpt.errors import BlockingCallError, SaveCancelledError
from aiockpt.runtime.future import Future, LoadFuture, SaveFuture, SaveResult, Stage

RESULT = SaveResult(step=3, id="step-00000003", generation=1, bytes=10, seconds=0.1)


def _later(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def _stage(save: SaveFuture) -> str:
    return save.stage  # behind a function: type checkers take a property for constant


def _waited(load: LoadFuture[int]) -> bool:
    return load.waited_for


def _told(save: SaveFuture) -> bool:
    return save.delivered


def test_the_stages_settle_in_order() -> None:
    save = SaveFuture(3)
    assert _stage(save) == "started"
    save._snapshotted._resolve(None)
    assert (_stage(save), save.snapshotted().done(), save.written().done()) == ("snapshotted", True, False)
    save._written._resolve(None)
    assert _stage(save) == "written"
    save._resolve(RESULT)
    assert (_stage(save), save.result(), save.committed().result()) == ("committed", RESULT, RESULT)
    assert "committed" in repr(SaveFuture(1).committed()) or "started" in repr(SaveFuture(1))


def test_a_failure_fails_every_stage_that_was_not_reached() -> None:
    save = SaveFuture(3)
    save._snapshotted._resolve(None)
    assert not _told(save)
    save._fail(OSError("disk"))
    save.snapshotted().result()
    with pytest.raises(OSError, match="disk"):
        save.written().result()
    assert _told(save)
    assert isinstance(save.exception(), OSError)
    assert (save.stage, save.done(), save.cancelled()) == ("failed", True, False)


def test_a_stage_settles_only_once() -> None:
    stage: Stage[int] = Stage("x")
    stage._resolve(1)
    stage._fail(OSError())
    stage._resolve(2)
    assert stage.result() == 1


class SettledMeanwhile(concurrent.futures.Future[int]):
    """Another thread settles it when somebody is about to."""

    def set_result(self, result: int) -> None:
        super().set_result(7)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_result(7)
        super().set_exception(exception)


@pytest.mark.parametrize("settle", [lambda stage: stage._resolve(1), lambda stage: stage._fail(OSError())])
def test_of_two_threads_that_settle_a_stage_at_once_the_later_one_changes_nothing(
    settle: Callable[[Stage[int]], object],
) -> None:
    """The thread that copies says that it is done while the loop says that the save has failed."""
    stage: Stage[int] = Stage("x")
    stage._inner = SettledMeanwhile()
    settle(stage)
    assert stage.result() == 7


def test_result_waits_for_another_thread_and_times_out_by_name() -> None:
    save = SaveFuture(7)
    with pytest.raises(TimeoutError, match=r"save of step 7.*the work goes on"):
        save.result(0.01)
    thread = _later(lambda: save._resolve(RESULT))
    assert save.result(10) == RESULT
    thread.join()


async def test_it_can_be_awaited_on_asyncio() -> None:
    save = SaveFuture(3)
    thread = _later(lambda: save._resolve(RESULT))
    assert await save == RESULT
    assert await save == RESULT
    thread.join()


def test_it_can_be_awaited_on_trio() -> None:
    save = SaveFuture(3)

    async def main() -> SaveResult:
        thread = _later(lambda: save._resolve(RESULT))
        result = await save
        thread.join()
        return result

    assert trio.run(main) == RESULT


async def test_a_cancelled_wait_leaves_the_work_running() -> None:
    save = SaveFuture(3)
    cancelled: list[bool] = []
    save._cancel = lambda: cancelled.append(True)

    async def wait() -> None:
        await save

    waiter = asyncio.ensure_future(wait())
    await anyio.lowlevel.checkpoint()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not save.done()
    assert not cancelled
    save._resolve(RESULT)
    assert await save == RESULT


def test_a_loop_that_is_gone_is_not_woken() -> None:
    save = SaveFuture(3)

    async def wait_briefly() -> None:
        with anyio.move_on_after(0.01):
            await save

    asyncio.run(wait_briefly())
    trio.run(wait_briefly)
    save._resolve(RESULT)


async def test_a_blocking_wait_on_a_thread_with_a_loop_is_refused_until_it_is_done() -> None:
    save = SaveFuture(3)
    with pytest.raises(BlockingCallError, match=r"waiting for the save of step 3 would block .*: await the future$"):
        save.result()
    save._resolve(RESULT)
    assert save.result() == RESULT


def test_only_cancel_cancels() -> None:
    save = SaveFuture(3)
    asked: list[bool] = []
    save._cancel = lambda: asked.append(True)
    assert save.cancel()
    save._fail(SaveCancelledError("x"))
    assert save.cancelled()
    assert not save.cancel()
    assert asked == [True]


def test_callbacks_get_the_future() -> None:
    future: Future[int] = Future("x")
    seen: list[object] = []
    future.add_done_callback(seen.append)
    future._resolve(1)
    future.add_done_callback(seen.append)
    assert seen == [future, future]


def test_objects_are_filled_once_by_the_first_waiter_on_its_thread() -> None:
    load: LoadFuture[int] = LoadFuture("x")
    threads: list[str] = []
    load._finish = lambda: threads.append(threading.current_thread().name)
    load._resolve(5)
    assert not _waited(load)
    waiters = [threading.Thread(target=load.result, name=f"waiter-{n}") for n in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert _waited(load)
    assert len(threads) == 1
    assert threads[0].startswith("waiter-")


def test_an_error_while_filling_objects_is_raised_again_by_the_next_waiter() -> None:
    load: LoadFuture[int] = LoadFuture("x")

    def fail() -> None:
        raise ValueError("bad state")

    load._finish = fail
    load._resolve(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad state"):
            load.result()
