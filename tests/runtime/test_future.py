"""Waiting never owns the work, and every stage settles once."""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable

import anyio
import pytest
import trio

from aiockpt.errors import BlockingCallError, SaveCancelledError
from aiockpt.futures import Future, LoadFuture, SaveFuture, SaveResult
from aiockpt.runtime.promise import LoadPromise, Promise, SavePromise

RESULT = SaveResult(step=3, id="step-00000003", generation=1, bytes=10, seconds=0.1)


def _later(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def _stage(save: SaveFuture) -> str:
    return save.stage  # behind a function: type checkers take a property for constant


def _waited(load: LoadPromise[int]) -> bool:
    return load.waited_for


def begin_save(step: int) -> tuple[SavePromise, SaveFuture]:
    promise = SavePromise(step)
    return promise, SaveFuture(promise)


def begin_load() -> tuple[LoadPromise[int], LoadFuture[int]]:
    promise: LoadPromise[int] = LoadPromise("x")
    return promise, LoadFuture(promise)


def _told(save: SaveFuture) -> bool:
    return save.delivered


def test_the_stages_settle_in_order() -> None:
    promise, save = begin_save(3)
    assert _stage(save) == "started"
    promise.snapshotted.resolve(None)
    assert (_stage(save), save.snapshotted().done(), save.written().done()) == ("snapshotted", True, False)
    promise.written.resolve(None)
    assert _stage(save) == "written"
    promise.resolve(RESULT)
    assert (_stage(save), save.result(), save.committed().result()) == ("committed", RESULT, RESULT)
    assert "committed" in repr(save)
    assert "started" in repr(begin_save(1)[1])


def test_a_failure_fails_every_stage_that_was_not_reached() -> None:
    promise, save = begin_save(3)
    promise.snapshotted.resolve(None)
    assert not _told(save)
    promise.fail(OSError("disk"))
    save.snapshotted().result()
    with pytest.raises(OSError, match="disk"):
        save.written().result()
    assert _told(save)
    assert isinstance(save.exception(), OSError)
    assert (save.stage, save.done(), save.cancelled()) == ("failed", True, False)


def test_a_stage_settles_only_once() -> None:
    promise: Promise[int] = Promise("x")
    promise.resolve(1)
    promise.fail(OSError())
    promise.resolve(2)
    assert Future(promise).result() == 1


class SettledMeanwhile(concurrent.futures.Future[int]):
    """Another thread settles it when somebody is about to."""

    def set_result(self, result: int) -> None:
        super().set_result(7)
        super().set_result(result)

    def set_exception(self, exception: BaseException | None) -> None:
        super().set_result(7)
        super().set_exception(exception)


@pytest.mark.parametrize("settle", [lambda promise: promise.resolve(1), lambda promise: promise.fail(OSError())])
def test_of_two_threads_that_settle_a_stage_at_once_the_later_one_changes_nothing(
    settle: Callable[[Promise[int]], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that copies says that it is done while the loop says that the save has failed."""
    monkeypatch.setattr(concurrent.futures, "Future", SettledMeanwhile)
    promise: Promise[int] = Promise("x")
    settle(promise)
    assert Future(promise).result() == 7


def test_result_waits_for_another_thread_and_times_out_by_name() -> None:
    promise, save = begin_save(7)
    with pytest.raises(TimeoutError, match=r"save of step 7.*the work goes on"):
        save.result(0.01)
    thread = _later(lambda: promise.resolve(RESULT))
    assert save.result() == RESULT
    thread.join()


async def test_it_can_be_awaited_on_asyncio() -> None:
    promise, save = begin_save(3)
    thread = _later(lambda: promise.resolve(RESULT))
    assert await save == RESULT
    assert await save == RESULT
    thread.join()


def test_it_can_be_awaited_on_trio() -> None:
    promise, save = begin_save(3)

    async def main() -> SaveResult:
        thread = _later(lambda: promise.resolve(RESULT))
        result = await save
        thread.join()
        return result

    assert trio.run(main) == RESULT


async def test_a_cancelled_wait_leaves_the_work_running() -> None:
    promise, save = begin_save(3)
    cancelled: list[bool] = []
    promise.cancel_work = lambda: cancelled.append(True)

    async def wait() -> None:
        await save

    waiter = asyncio.ensure_future(wait())
    await anyio.lowlevel.checkpoint()
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not save.done()
    assert not cancelled
    promise.resolve(RESULT)
    assert await save == RESULT


def test_a_loop_that_is_gone_is_not_woken() -> None:
    promise, save = begin_save(3)

    async def wait_briefly() -> None:
        with anyio.move_on_after(0.01):
            await save

    asyncio.run(wait_briefly())
    trio.run(wait_briefly)
    promise.resolve(RESULT)


async def test_a_blocking_wait_on_a_thread_with_a_loop_is_refused_until_it_is_done() -> None:
    promise, save = begin_save(3)
    with pytest.raises(
        BlockingCallError,
        match=r"waiting for the save of step 3 would block .*: await the future; or .*asyncio.to_thread",
    ):
        save.result()
    promise.resolve(RESULT)
    assert save.result() == RESULT


def test_only_cancel_cancels() -> None:
    promise, save = begin_save(3)
    asked: list[bool] = []
    promise.cancel_work = lambda: asked.append(True)
    assert save.cancel()
    promise.fail(SaveCancelledError("x"))
    assert save.cancelled()
    assert not save.cancel()
    assert asked == [True]


def test_callbacks_get_the_future() -> None:
    promise: Promise[int] = Promise("x")
    future = Future(promise)
    seen: list[object] = []
    future.add_done_callback(seen.append)
    promise.resolve(1)
    future.add_done_callback(seen.append)
    assert seen == [future, future]


def test_objects_are_filled_once_by_the_first_waiter_on_its_thread() -> None:
    promise, load = begin_load()
    threads: list[str] = []
    promise.on_finish = lambda: threads.append(threading.current_thread().name)
    promise.resolve(5)
    assert not _waited(promise)
    waiters = [threading.Thread(target=load.result, name=f"waiter-{n}") for n in range(4)]
    for waiter in waiters:
        waiter.start()
    for waiter in waiters:
        waiter.join()
    assert _waited(promise)
    assert len(threads) == 1
    assert threads[0].startswith("waiter-")


def test_an_error_while_filling_objects_is_raised_again_by_the_next_waiter() -> None:
    promise, load = begin_load()

    def fail() -> None:
        raise ValueError("bad state")

    promise.on_finish = fail
    promise.resolve(5)
    for _ in range(2):
        with pytest.raises(ValueError, match="bad state"):
            load.result()
