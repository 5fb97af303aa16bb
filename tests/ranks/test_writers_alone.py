"""Saves whose writers cannot ask the store: finished all the same, or all learn why not.

The ranks are threads, and the store lives. What is lost is the way to it of some writers, from their first question on.
"""

import errno
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch.distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.engine.context import Place
from aiockpt.format.names import failure_key
from aiockpt.ranks.storage_fallback import StorageFallback
from aiockpt.runtime.relay import Question, RelayedStore, Reply, ask
from aiockpt.worker.messages import Replied
from tests.ranks.crew import PATIENT, QUICK, Crew
from tests.ranks.test_save import equal, loaded, replicated
from tests.watch import until
from tests.worker.test_worker_killed import orders as orders
from tests.worker.test_worker_killed import process_of, steps_of
from tests.worker.worker_places import Orders

NONCE = "3f9c21d07b44"


def cut_off(crew: Crew, ranks: Iterable[int]) -> None:
    """Have the writers of *ranks* hear nothing of the store."""
    for rank in ranks:

        def reply(connection: Any, asked: Any) -> None:
            connection.send(Replied(asked.number, Reply(failure="the store is lost")))

        crew.checkpointers[rank]._destination._reply = reply  # type: ignore[attr-defined]


def save_on_all(crew: Crew, step: int) -> list[aiockpt.SaveResult]:
    return crew.on_all(lambda rank, ckpt: ckpt.save(step, replicated(step)).result())


@pytest.mark.parametrize("ranks", [(0,), (0, 1, 2)], ids=["rank 0", "all"])
def test_the_first_save_is_committed_and_all_ranks_know(ranks: tuple[int, ...], tmp_path: Path) -> None:
    quick = msgspec.structs.replace(QUICK, takeover_s=1.0)
    with Crew(3, tmp_path, worker="process", deadlines=quick) as crew:
        cut_off(crew, ranks)
        assert [result.generation for result in save_on_all(crew, 1)] == [1, 1, 1]
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_every_tier_that_works_gets_the_step_and_all_ranks_know(orders: Orders, tmp_path: Path) -> None:
    far, broken = tmp_path / "far", aiockpt.Tier(orders.url, deadline=0.2)
    orders.fail("create", errno.ENOSPC)
    with Crew(2, lambda rank: [tmp_path / "near", far, broken], worker="process") as crew:
        cut_off(crew, (0, 1))
        saves = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)))
        assert [save.committed(far).result().generation for save in saves] == [1, 1]
        assert isinstance(saves[0].committed(orders.url).exception(), aiockpt.StorageFullError)
    assert equal(loaded(far, replicated(1)), replicated(1))


def test_what_is_there_already_is_left_alone_on_all_ranks(tmp_path: Path) -> None:
    with Crew(2, tmp_path, worker="process", on_exists="skip") as crew:
        save_on_all(crew, 1)
        cut_off(crew, (0, 1))
        save_on_all(crew, 2)  # rank 0's vote says that it writes
        assert [result.existed for result in save_on_all(crew, 1)] == [True, True]
    assert equal(loaded(tmp_path, replicated(2)), replicated(2))


@pytest.mark.parametrize("broken", [0, 1])
def test_a_write_that_fails_is_found_by_others(broken: int, orders: Orders) -> None:
    with Crew(2, orders.url, worker="process", deadlines=PATIENT, on_error=lambda future: None) as crew:
        save_on_all(crew, 1)
        cut_off(crew, (0, 1))
        orders.fail("create", errno.ENOSPC, f"r{broken:05d}")
        errors = crew.errors(lambda rank, ckpt: ckpt.save(2, replicated(2)).result())
        assert isinstance(errors[broken], aiockpt.StorageFullError)
        assert isinstance(errors[1 - broken], aiockpt.RankFailedError)
        assert f"rank {broken} failed: StorageFullError" in str(errors[1 - broken])
    assert steps_of(orders) == [1]


def test_a_rank_that_fails_early_leaves_word(orders: Orders, tmp_path: Path) -> None:
    """Its question for the tier hangs until its trainer stops the save."""
    tiers = [orders.url, tmp_path / "far"]
    with Crew(2, lambda rank: tiers, worker="process", on_error=lambda future: None) as crew:
        cut_off(crew, (0, 1))
        orders.hold("list", "step-00000001")

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            future = ckpt.save(1, replicated(1))
            if rank == 1:
                until(lambda: orders.has_reached("put"), "rank 0's probe")
                future.cancel()
                until(lambda: list(orders.path.glob("step-00000001/a-*/r/r00001.fail.json")), "the record")
                orders.let_go("list")
            future.result()

        errors = crew.errors(save)
    assert isinstance(errors[0], aiockpt.RankFailedError)
    assert "rank 1 failed: SaveCancelledError" in str(errors[0])


async def test_the_first_record_of_a_failure_says_most(tmp_path: Path) -> None:
    backend = LocalBackend(str(tmp_path))
    place = SimpleNamespace(backend=backend, engine=SimpleNamespace(rank=0, world_size=1))
    fallback = StorageFallback(cast(Place, place), 1, NONCE)
    assert await fallback.failure() is None
    told = [(0, "RankFailedError: rank 2 failed"), (2, "StorageFullError: no room")]
    for rank, failure in told:
        record = msgspec.json.encode({"rank": rank, "failure": failure})
        await backend.put(failure_key("step-00000001", NONCE, rank), record)
        assert failure in str(await fallback.failure())
    await backend.put(failure_key("step-00000001", NONCE, 2), b"{")  # cut short
    found = await fallback.failure()
    assert isinstance(found, aiockpt.RankFailedError)
    assert found.ranks == (2,)


# ------------------------------------------------------------------ a writer that died, once more


def test_a_decided_vote_of_a_dead_writer_stands(orders: Orders) -> None:
    with Crew(3, orders.url, worker="process", on_error=lambda future: None) as crew:
        save_on_all(crew, 1)
        orders.hold("put_new", "MANIFEST")

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> int:
            future = ckpt.save(2, replicated(2))
            if rank == 1:
                until(lambda: list(orders.path.glob("step-00000002/a-*/DECISION*")), "the decision")
                process_of(ckpt)._process.kill()
                future.exception()
                orders.let_go("put_new")
            return future.result().generation

        outcomes = crew.start(save)
    assert isinstance(outcomes[1].exception(), aiockpt.WriterLostError)
    assert [outcomes[rank].result() for rank in (0, 2)] == [1, 1]
    assert equal(loaded(orders.path, replicated(2)), replicated(2))


def test_what_a_writer_asks_is_answered_while_the_trainer_closes(orders: Orders, tmp_path: Path) -> None:
    tiers = [tmp_path / "near", orders.url]
    orders.hold("create")
    with Crew(2, lambda rank: tiers, worker="process") as crew:
        saves = crew.on_all(lambda rank, ckpt: ckpt.save(1, replicated(1)))
        for save in saves:
            save.result()
        until(lambda: orders.has_reached("create"), "the copy to the farther tier")
        closing = [threading.Thread(target=ckpt.close) for ckpt in crew.checkpointers]
        for thread in closing:
            thread.start()
        orders.let_go("create")
        assert [save.committed(orders.url).result().generation for save in saves] == [1, 1]
        for thread in closing:
            thread.join(250)
            assert not thread.is_alive()


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_a_first_save_without_rank_0_is_given_up(worker: Any, tmp_path: Path) -> None:
    with Crew(2, tmp_path, worker=worker, deadlines=PATIENT, on_error=lambda future: None) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.warm_up(replicated(0)).result())

        def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            ckpt.save(1, {"odd": object()} if rank == 0 else replicated(1)).result()

        errors = crew.errors(save)
    assert "odd" in str(errors[1])


# ------------------------------------------------------------------ the relay


class Relay:
    """A store behind a relay whose other end is here."""

    def __init__(self) -> None:
        self.real: Any = torch.distributed.HashStore()  # type: ignore[attr-defined]
        self.asked: list[tuple[int, Question]] = []
        self.silent = threading.Event()
        self.store = RelayedStore(self._ask)

    def _ask(self, number: int, question: Question) -> None:
        self.asked.append((number, question))
        if not self.silent.is_set():
            self.store.receive(number, ask(self.real, question))


def test_every_verb_of_a_store_is_relayed() -> None:
    relay = Relay()
    store = relay.store
    store.set("a", b"1")
    assert (store.get("a"), store.check(["a"]), store.check(["a", "b"])) == (b"1", True, False)
    assert [store.add("count", 2), store.add("count", 0)] == [2, 2]
    assert (store.delete_key("a"), store.delete_key("a"), store.check(["a"])) == (True, False, False)
    assert relay.real.check(["count"])


def test_what_the_store_raises_fails_one_call() -> None:
    relay = Relay()
    relay.real.set_timeout(torch.distributed.default_pg_timeout / 1e5)
    with pytest.raises(ConnectionError, match="Error"):
        relay.store.get("what is not there")
    relay.store.set("a", b"1")
    assert relay.store.get("a") == b"1"


def test_when_the_other_process_is_gone_all_hear_it() -> None:
    relay = Relay()
    relay.silent.set()
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            relay.store.get("a")
        except ConnectionError as error:
            raised.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    until(lambda: relay.asked, "the question")
    relay.store.fail_all()
    waiting.join(250)
    assert len(raised) == 1
    with pytest.raises(ConnectionError, match="is gone"):
        relay.store.get("a")
    assert len(relay.asked) == 1
