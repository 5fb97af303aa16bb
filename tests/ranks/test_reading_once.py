"""Ranks that want the same blocks read each once and send it to each other: whole, or not at all, and nobody waits in vain.

The ranks are threads; their connections are real (`tests.ranks.peer_crew`).
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.errors import CorruptionError, RankFailedError, RankTimeoutError
from aiockpt.futures import LoadResult
from aiockpt.pipeline.fetch import LIKELY_HEADER_BYTES
from aiockpt.planning.exchange import FileSpan
from aiockpt.ranks.read_once import Terms, Wants
from aiockpt.runtime.peer_link import TcpNetwork
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend, flip_bit
from tests.ranks.crew import SMALL, Crew
from tests.ranks.peer_crew import crew_with_groups, use
from tests.ranks.test_load import one_rank_sees

ROWS, COLUMNS, TENSORS = 1400, 129, 6
NBYTES = ROWS * COLUMNS * 4 * TENSORS


def state_at(value: float) -> dict[str, Any]:
    """Return a state in which every element is another number."""
    names = (f"w{index}" for index in range(TENSORS))
    return {name: torch.arange(ROWS * COLUMNS).view(ROWS, COLUMNS) * 1.0 + value + ord(name[1]) for name in names}


def empty() -> dict[str, Any]:
    return {f"w{index}": torch.zeros(ROWS, COLUMNS) for index in range(TENSORS)}


def holds(state: dict[str, Any], value: float) -> bool:
    return all(torch.equal(state[name], tensor) for name, tensor in state_at(value).items())


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Return a place with the steps 1 and 2, in blocks of 4 KiB."""
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL)) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state_at(step)).result()
    return tmp_path


def load_all(crew: Crew, states: list[dict[str, Any]], step: int | None = None) -> list[LoadResult]:
    results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], step).result())
    return [result for result in results if result is not None]


@pytest.mark.parametrize("world_size", [2, 4])
def test_replicas_read_each_block_once_between_them(root: Path, world_size: int) -> None:
    states = [empty() for _ in range(world_size)]
    with crew_with_groups(world_size, root) as crew:
        for step in (2, 1, 2):
            results = load_all(crew, states, step)
            assert all(holds(state, step) for state in states)
            assert NBYTES <= sum(result.read_bytes for result in results) <= NBYTES + 4 * 4096
            assert all(result.received_bytes + result.read_bytes >= NBYTES for result in results)
            reads = [result.read_bytes for result in results]
            assert max(reads) - min(reads) <= (1 << 20) + 4096


def test_each_group_reads_for_itself(root: Path) -> None:
    states = [empty() for _ in range(4)]
    with crew_with_groups(4, root, [[0, 2], [3, 1]]) as crew:
        results = load_all(crew, states)
    assert all(holds(state, 2) for state in states)
    assert 2 * NBYTES <= sum(result.read_bytes for result in results) <= 2 * NBYTES + 8 * 4096


def test_some_ranks_may_have_a_group_and_others_none(root: Path) -> None:
    states = [empty() for _ in range(3)]
    with crew_with_groups(3, root, [[1, 2]]) as crew:
        results = load_all(crew, states)
    assert all(holds(state, 2) for state in states)
    assert [result.received_bytes > 0 for result in results] == [False, True, True]


def test_what_one_rank_wants_is_sent_to_nobody(root: Path) -> None:
    wants = [["w0", "w1"], ["w1", "w2"], ["w1", "w0"]]
    states = [{name: torch.zeros(ROWS, COLUMNS) for name in names} for names in wants]
    with crew_with_groups(3, root) as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], only=wants[rank]).result())
    for names, state in zip(wants, states, strict=True):
        assert all(torch.equal(state[name], state_at(2)[name]) for name in names)
    read = sum(result.read_bytes for result in results if result)
    assert read <= 3 * NBYTES // TENSORS + 12 * 4096


def test_strided_parts_and_twice_wanted_tensors_are_received_too(root: Path) -> None:
    columns = [torch.zeros(ROWS, 2 * COLUMNS)[:, ::2] for _ in range(2)]
    states = [
        {"w0": column, "w1": torch.zeros(ROWS, COLUMNS), "again": torch.zeros(ROWS, COLUMNS)} for column in columns
    ]
    with crew_with_groups(2, root) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.load(states[rank], map={"again": "w1"}, strict=False).result())
    for state in states:
        assert torch.equal(state["w0"], state_at(2)["w0"])
        assert torch.equal(state["w1"], state_at(2)["w1"])
        assert torch.equal(state["again"], state_at(2)["w1"])


def damage(root: Path, step: int) -> None:
    """Flip a bit in the middle of a step's tensors, for all ranks to find."""
    data = next(root.glob(f"step-{step:08d}/a-*/d/*.safetensors"))
    content = bytearray(data.read_bytes())
    flip_bit(memoryview(content), 4 * len(content))
    data.write_bytes(content)


def test_a_damaged_block_sends_all_to_the_next_step(root: Path) -> None:
    damage(root, 2)
    states = [empty() for _ in range(3)]
    with crew_with_groups(3, root) as crew:
        results = load_all(crew, states)
        assert [result.step for result in results] == [1, 1, 1]
        assert all("is not what was saved" in result.skipped[0][1] for result in results)
        assert all(result.received_bytes > 0 for result in results)
        assert all(holds(state, 1) for state in states)
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty(), 2).result())
        assert all(isinstance(error, CorruptionError) and "is not what was saved" in str(error) for error in errors)
        assert all(result.received_bytes > 0 for result in load_all(crew, states, 1))


@pytest.mark.parametrize("blind", [0, 1, 2])
def test_a_step_that_one_rank_cannot_believe_is_left_by_all(root: Path, blind: int) -> None:
    states = [empty() for _ in range(3)]
    flip = Fault(do="flip", verb="reader.read", match="step-00000002/*", bit=80_000, times=None)
    with crew_with_groups(3, one_rank_sees(root, blind, flip)) as crew:
        results = load_all(crew, states)
        assert [result.step for result in results] == [1, 1, 1]
        (reason,) = {result.skipped[0][1] for result in results}  # all ranks are told the same, by rank 0
        assert not blind or f"rank {blind}: " in reason
        assert all(holds(state, 1) for state in states)


def test_a_rank_that_cannot_read_stops_all(root: Path) -> None:
    states = [empty() for _ in range(3)]
    broken = Fault(do="fail", verb="open", match="step-00000002/*", error=24, times=None)
    with crew_with_groups(3, one_rank_sees(root, 1, broken)) as crew:
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty()).result())
        assert isinstance(errors[1], aiockpt.StorageError)
        assert all(isinstance(error, RankFailedError) and error.ranks == (1,) for error in (errors[0], errors[2]))
        assert all(result.received_bytes > 0 for result in load_all(crew, states, 1))


def test_what_one_rank_cannot_read_nobody_reads_instead(root: Path) -> None:
    backends = [LocalBackend(root, world=World()) for _ in range(3)]
    broken = Fault(do="fail", verb="reader.read", match="step-00000002/*", error=24, times=None)

    def backend(rank: int) -> Any:
        return FaultyBackend(backends[rank], [broken]) if rank == 1 else backends[rank]

    with crew_with_groups(3, backend) as crew:
        assert all(crew.errors(lambda rank, ckpt: ckpt.load(empty()).result()))
    for inner in (backends[0], backends[2]):
        statistics = inner.statistics()
        assert statistics.cached_read_bytes + statistics.direct_read_bytes <= (2 << 20) + 3 * LIKELY_HEADER_BYTES


def test_headers_are_compared_though_tensors_come_in_parcels(root: Path) -> None:
    data = next(root.glob("step-00000002/a-*/d/*.safetensors"))
    content = bytearray(data.read_bytes())
    last = 7 + int.from_bytes(content[:8], "little")
    assert content[last] == ord(" ")
    content[last] = ord("\n")  # means the same to a JSON decoder
    data.write_bytes(content)
    with crew_with_groups(3, root) as crew:
        assert [result.step for result in load_all(crew, [empty() for _ in range(3)])] == [1, 1, 1]


class Garbling(TcpNetwork):
    """A network that damages a byte of whatever comes."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1")

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        views = list(parts)
        answer = await super().ask(address, question, views)
        for view in views:
            view[len(view) // 2] ^= 1
        return answer


def test_what_is_damaged_on_its_way_is_read_from_storage(root: Path) -> None:
    states = [empty() for _ in range(3)]
    with crew_with_groups(3, root) as crew:
        use(crew, range(3), 1, Garbling)
        results = load_all(crew, states)
    assert all(holds(state, 2) for state in states)
    assert sum(result.read_bytes for result in results) > NBYTES + 8 * 4096


class BreaksAfter(TcpNetwork):
    """A network that is lost after some questions."""

    def __init__(self, questions: int) -> None:
        super().__init__("127.0.0.1")
        self._left = questions

    async def ask(self, address: str, question: bytes, parts: Iterable[memoryview] = ()) -> bytes:
        self._left -= 1
        if self._left < 0:
            await self.close()
        return await super().ask(address, question, parts)


def test_what_a_lost_rank_was_to_send_is_read_and_the_next_load_connects_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    large = {"w": torch.arange(3 << 20).float()}
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL)) as checkpointer:
        checkpointer.save(1, large).result()
    states = [{"w": torch.zeros(3 << 20)} for _ in range(3)]
    networks = iter([BreaksAfter(2), TcpNetwork("127.0.0.1")])
    with crew_with_groups(3, tmp_path) as crew:
        use(crew, range(3), 1, lambda: next(networks))
        results = load_all(crew, states)
        assert all(torch.equal(state["w"], large["w"]) for state in states)
        # When rank 1 is lost, it may have received nothing, or have sent all.
        assert all(results[rank].received_bytes for rank in (0, 2))
        assert sum(result.received_bytes for result in results) < 3 * (8 << 20)
        assert "the load_group lost rank 1 (" in caplog.text
        again = load_all(crew, states)
        assert all(result.received_bytes >= 8 << 20 for result in again)


def test_a_load_cancelled_in_the_middle_ends_on_all_at_once(root: Path) -> None:
    hang = Fault(do="hang", verb="reader.read", times=None)

    def backend(rank: int) -> Any:
        inner = LocalBackend(str(root), world=World())
        return FaultyBackend(inner, [hang]) if rank == 1 else inner

    def load(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        future = ckpt.load(empty())
        time.sleep(0.5)
        if rank == 1:
            future.cancel()
        future.result()

    with crew_with_groups(3, backend) as crew:
        begun = time.monotonic()
        errors = crew.errors(load)
        assert time.monotonic() - begun < 200  # the deadlines of ranks are ten minutes
        assert all(isinstance(errors[rank], RankFailedError) for rank in (0, 2)), errors


def test_a_rank_without_its_group_is_named(root: Path) -> None:
    quick = aiockpt.Deadlines(ranks_s=3, close_s=30)
    with Crew(3, root, deadlines=quick) as crew:
        for rank in range(2):
            use(crew, range(3), rank)
        errors = crew.errors(lambda rank, ckpt: ckpt.load(empty()).result())
    assert isinstance(errors[0], RankTimeoutError)
    assert errors[0].ranks == (2,)
    assert all("rank 2" in str(error) for error in errors)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_fails_before_the_exchange_keeps_nobody_waiting(root: Path, failing: int) -> None:
    flip = Fault(do="flip", verb="reader.read", match="step-00000002/*", bit=80_000, times=None)
    io = msgspec.structs.replace(SMALL, verify="full")
    states = [empty() for _ in range(3)]
    with crew_with_groups(3, one_rank_sees(root, failing, flip), io=io) as crew:
        results = load_all(crew, states)
        assert [result.step for result in results] == [1, 1, 1]
        assert all(result.received_bytes > 0 for result in results)


def test_the_terms_of_an_exchange_follow_from_what_all_ranks_say() -> None:
    some, other = (FileSpan(0, 0, 4096),), (FileSpan(0, 4096, 8192),)
    assert Terms.of([(0, Wants(some)), (4, Wants(other, "there")), (8, Wants(some))]) == Terms(
        (some, other), (0, 1, 0), ("", "there", "")
    )
    assert Terms.of([(0, Wants(some)), (4, Wants(failure="disk"))]) == Terms(failed_rank=4)
