"""A stress test measures what it says, finds what is wrong, and leaves nothing behind."""

import errno
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import ObjectExistsError, StorageError, UsageError
from aiockpt.runtime.world import World
from aiockpt.storage.backend import Listing, Space
from aiockpt.storage.open import open_backend
from aiockpt.storage.retry import Retrying, RetryPolicy
from aiockpt.storage.transfer import walk
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.tools.stress.measure import measure
from aiockpt.tools.stress.plan import MANIFEST_BYTES, RECEIPT_BYTES, StressPlan
from aiockpt.tools.stress.report import StressReport
from tests.servers.seaweed import Seaweed
from tests.stress.conftest import changed, left_in, names_in

SMALL = {
    *(("put", RECEIPT_BYTES), ("get", RECEIPT_BYTES), ("put", MANIFEST_BYTES), ("get", MANIFEST_BYTES)),
    *((verb, RECEIPT_BYTES) for verb in ("put_new", "delete", "stat", "list")),
}


async def test_every_operation_is_measured_at_every_size_and_concurrency(
    memory: MemoryBackend, plan: StressPlan
) -> None:
    begun: list[str] = []
    report = await measure(memory, plan, watch=begun.append)
    files = {(verb, size) for verb in ("create", "write", "finish", "open", "read") for size in plan.sizes}
    measured = {(point.operation, point.size_bytes, point.concurrency) for point in report.points}
    assert measured == {(*what, concurrency) for what in files | SMALL for concurrency in plan.concurrency}
    assert len(begun) == plan.point_count
    assert [check.passed for check in report.checks] == [True] * 4
    assert report.problems == []
    assert {skipped.what for skipped in report.skipped} == {"soak"}


async def test_the_figures_of_a_point_fit_each_other(memory: MemoryBackend, plan: StressPlan) -> None:
    for point in (await measure(memory, plan)).points:
        assert point.requests > 0
        assert point.requests_per_s == pytest.approx(point.requests / point.wall_s)
        assert point.p50_ms is not None
        assert point.p95_ms is not None
        assert point.p99_ms is not None
        assert point.max_ms is not None
        assert 0 <= point.p50_ms <= point.p95_ms <= point.p99_ms <= point.max_ms
        if point.operation in ("write", "read"):
            assert point.bytes >= point.size_bytes
            assert point.mb_per_s == pytest.approx(point.bytes / point.wall_s / 1e6)
        if point.operation == "put":
            assert point.bytes == point.requests * point.size_bytes


async def test_nothing_is_left_of_a_run_on_a_disk_not_even_a_folder(tmp_path: Path, plan: StressPlan) -> None:
    said: list[str] = []
    report = await measure(LocalBackend(tmp_path), plan, say=said.append)
    assert left_in(tmp_path) == []
    assert [report.prefix in line for line in said] == [True, False, True]
    assert said[1].startswith(f"{plan.point_count} points of {plan.seconds:g} s: some 1 s")


@pytest.mark.parametrize("at", ["write", "read", "get 4.0 KiB", "soak"])
async def test_nothing_is_left_of_a_run_that_is_cancelled(tmp_path: Path, plan: StressPlan, at: str) -> None:
    backend = LocalBackend(tmp_path)
    met: list[str] = []
    with anyio.CancelScope() as scope:

        def cancel(what: str) -> None:
            if what.startswith(at):
                met.append(what)
                scope.cancel()

        await measure(backend, msgspec.structs.replace(plan, soak_s=5.0), watch=cancel)
    assert len(met) == 1
    assert left_in(tmp_path) == []


FAILING = {
    "upload.write": "write",
    "upload.finish": "finish",
    "create": "create",
    "open": "open",
    "reader.read": "read",
}
"""Verb of the backend → operation of the report. Each alone: after a write that fails there may be nothing to read."""


@pytest.mark.parametrize("verb", FAILING)
async def test_nothing_is_left_of_a_run_in_which_calls_fail(tmp_path: Path, plan: StressPlan, verb: str) -> None:
    faults = [Fault(do="fail", verb=one, at=2, times=2, error=errno.EAGAIN) for one in (verb, "put_new", "stat")]
    report = await measure(FaultyBackend(LocalBackend(tmp_path), faults), plan)
    assert left_in(tmp_path) == []
    assert FAILING[verb] in {point.operation for point in report.points if point.errors}
    assert all(set(point.errors) <= {"transient"} for point in report.points)


async def test_a_place_where_nothing_may_be_deleted_is_refused_before_anything_large_is_written(
    memory: MemoryBackend, plan: StressPlan
) -> None:
    faulty = FaultyBackend(memory, [Fault(do="fail", verb="delete", times=None, error=errno.EACCES)])
    with pytest.raises(StorageError, match=r"cannot be deleted.*right to delete.*is left: aiockpt-bench-\w+/may-be"):
        await measure(faulty, plan)
    assert faulty.call_count == 3  # space, put, delete


async def test_a_place_that_keeps_what_is_deleted_is_refused(memory: MemoryBackend, plan: StressPlan) -> None:
    async def delete(keys: Sequence[str]) -> None:
        del keys

    with pytest.raises(StorageError, match="was deleted and is still there"):
        await measure(changed(memory, delete=delete), plan)


async def test_what_could_not_be_removed_at_the_end_is_an_error_that_names_the_folder(
    memory: MemoryBackend, plan: StressPlan
) -> None:
    faults = [Fault(do="fail", verb="delete", match="*/listed/*", times=None)]
    with pytest.raises(
        StorageError,
        match=r"memory://aiockpt-bench-\w+ could not be emptied: delete .* … .*100 objects are left, such as .*by hand",
    ):
        await measure(FaultyBackend(memory, faults), plan)


@pytest.mark.parametrize(
    ("verb", "operation", "told"),
    [
        ("reader.read", "read", "differs from what was written"),
        ("upload.write", "read", "differs from what was written"),
        ("get", "get", "are not what was put"),
        ("put", "get", "are not what was put"),
    ],
)
async def test_a_flipped_bit_is_found(
    memory: MemoryBackend, plan: StressPlan, verb: str, operation: str, told: str
) -> None:
    folder = "*/files/*" if "." in verb else "*/objects/*"
    faults = [Fault(do="flip", verb=verb, match=folder, at=1, bit=8 * 4000)]
    report = await measure(FaultyBackend(memory, faults), plan)
    wrong = [point.operation for point in report.points if point.wrong]
    assert wrong == [operation]
    assert len(report.problems) >= 1
    assert told in report.problems[0]


async def test_blocks_in_the_place_of_others_are_found(memory: MemoryBackend, plan: StressPlan) -> None:
    first = plan.sizes[-1] - plan.sizes[-1] % 4096

    async def create(key: str, size: int) -> Any:
        upload = await memory.create(key, size)

        async def write(offset: int, runs: Sequence[memoryview], seen: object = None) -> None:
            shifted = [bytes(runs[0][4096:]) + bytes(runs[0][:4096])] if size >= first else runs
            await upload.write(offset, [memoryview(run) for run in shifted])

        return changed(upload, write=write)

    report = await measure(changed(memory, create=create), plan)
    assert {point.size_bytes for point in report.points if point.wrong} == {plan.sizes[-1]}


async def test_creates_that_do_not_exclude_each_other_are_found(memory: MemoryBackend, plan: StressPlan) -> None:
    report = await measure(changed(memory, put_new=memory.put), plan)
    assert [check.name for check in report.checks if not check.passed] == ["one of rival creates wins"]
    assert "two jobs could commit" in report.problems[0]


async def test_a_winner_whose_bytes_are_not_there_is_found(memory: MemoryBackend, plan: StressPlan) -> None:
    taken: set[str] = set()

    async def put_new(key: str, data: bytes) -> None:
        await memory.put(key, data)
        if key in taken:
            raise ObjectExistsError(key, key=key)
        taken.add(key)

    report = await measure(changed(memory, put_new=put_new), plan)
    assert any("does not hold the bytes" in problem for problem in report.problems)


async def test_a_list_that_lags_behind_is_found(memory: MemoryBackend, plan: StressPlan) -> None:
    async def list_late(prefix: str) -> Listing:
        found = await memory.list(prefix)
        return Listing(found.objects[:-1], found.folders) if "seen" in prefix else found

    report = await measure(changed(memory, list=list_late), plan)
    assert [check.name for check in report.checks if not check.passed] == ["what was written is seen at once"]


async def test_an_object_seen_in_part_while_it_is_replaced_is_found(memory: MemoryBackend, plan: StressPlan) -> None:
    async def put_in_halves(key: str, data: bytes) -> None:
        if key.endswith("replaced"):
            await memory.put(key, data[:100])
            await anyio.lowlevel.checkpoint()
            await anyio.lowlevel.checkpoint()
        await memory.put(key, data)

    report = await measure(changed(memory, put=put_in_halves), plan)
    assert [check.name for check in report.checks if not check.passed] == ["what was replaced is seen whole"]


class Ticking:
    """A clock that only goes on when it is looked at, so that a point has as many requests on any machine."""

    def __init__(self) -> None:
        self._ns = 0

    def monotonic_ns(self) -> int:
        """Return a tenth of a millisecond more than at the last look."""
        self._ns += 100_000
        return self._ns

    time_ns = monotonic_ns


async def test_an_operation_at_which_nothing_works_is_left_and_its_further_points_are_skipped(
    memory: MemoryBackend, plan: StressPlan
) -> None:
    def stat_listed(verb: str) -> list[Fault]:
        return [Fault(do="fail", verb=verb, match="*/listed*", times=None, error=errno.EAGAIN)]

    report = await measure(FaultyBackend(memory, stat_listed("stat")), plan, world=World(clock=Ticking()))
    stats = [point for point in report.points if point.operation == "stat"]
    assert [(point.concurrency, point.requests, point.errors) for point in stats] == [(1, 0, {"transient": 10})]
    assert any("stat 4.0 KiB × 1: stopped after 10 failures in a row" in problem for problem in report.problems)
    assert any(skipped.what == "stat 4.0 KiB at more than 1" for skipped in report.skipped)


async def test_a_verb_that_a_place_refuses_is_skipped_with_its_reason(memory: MemoryBackend, plan: StressPlan) -> None:
    async def put_new(key: str, data: bytes) -> None:
        raise UsageError("this store has no exclusive create")

    report = await measure(changed(memory, put_new=put_new), plan)
    assert any(
        skipped.what.startswith("put_new") and "no exclusive create" in skipped.why for skipped in report.skipped
    )
    assert not any(point.operation == "put_new" for point in report.points)


async def test_wrong_bytes_are_told_though_the_place_refuses_the_verb_later(
    memory: MemoryBackend, plan: StressPlan
) -> None:
    got: list[str] = []

    async def get(key: str, most: int) -> bytes | None:
        if "/objects/" not in key:
            return await memory.get(key, most)
        got.append(key)
        if len(got) > 1:
            raise UsageError("one get is enough")
        return b"x"

    report = await measure(changed(memory, get=get), plan)
    assert any("are not what was put" in problem for problem in report.problems)


async def test_retries_below_are_counted(memory: MemoryBackend, plan: StressPlan) -> None:
    faults = [Fault(do="fail", verb="stat", match="*/listed/*", times=3, error=errno.EAGAIN)]
    policy = RetryPolicy(first_wait_s=0.001, longest_wait_s=0.001)
    report = await measure(Retrying(FaultyBackend(memory, faults), policy), plan)
    assert [point.retries for point in report.points if point.operation == "stat"] == [3, 0]
    assert report.problems == []


async def test_a_plan_that_does_not_fit_is_refused(memory: MemoryBackend, plan: StressPlan) -> None:
    async def space() -> Space:
        return Space(plan.most_bytes, plan.most_bytes)

    with pytest.raises(UsageError, match=r"MiB free.*lower --bytes"):
        await measure(changed(memory, space=space), plan)
    assert await names_in(memory) == []


async def test_an_s3_is_measured_through_the_backend_that_its_url_opens(
    seaweed: Seaweed, s3_url: str, aws_environment: pytest.MonkeyPatch, plan: StressPlan
) -> None:
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    backend = open_backend(s3_url)
    try:
        report = await measure(backend, msgspec.structs.replace(plan, concurrency=(4,), soak_s=1.0))
        assert [stat.key async for stat in walk(backend, "")] == [".aiockpt"]  # what proves that keys are created once
    finally:
        await backend.close()
    assert report.problems == []
    assert report.backend.startswith("<Retrying <S3Backend")
    assert report.soak is not None
    assert report.soak.files > 0


async def test_the_report_can_be_read_back_from_its_json(memory: MemoryBackend, plan: StressPlan) -> None:
    report = await measure(memory, plan)
    assert msgspec.json.decode(msgspec.json.encode(report), type=StressReport) == report


Refused = Callable[[], StressPlan]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: StressPlan(sizes=()), "--sizes: give at least one"),
        (lambda: StressPlan(sizes=(0,)), "--sizes 0: give at least 1"),
        (lambda: StressPlan(sizes=(2, 1)), "lowest first"),
        (lambda: StressPlan(sizes=(1, 1)), "different"),
        (lambda: StressPlan(concurrency=(0,)), "--concurrency 0: give at least 1 and at most 256"),
        (lambda: StressPlan(concurrency=(1000,)), "at most 256"),
        (lambda: StressPlan(seconds=0), "--seconds 0"),
        (lambda: StressPlan(seconds=float("nan")), "--seconds nan"),
        (lambda: StressPlan(most_bytes=1), "--bytes 1"),
        (lambda: StressPlan(most_bytes=2 << 20), "--bytes allows 2097152 in one point"),
        (lambda: StressPlan(soak_s=-1), "--soak -1"),
        (lambda: StressPlan(faults=0.31), "--faults 0.31: give a fraction of the calls, from 0 to 0.3"),
    ],
)
def test_a_plan_that_cannot_be_carried_out_is_refused_by_its_option(make: Refused, says: str) -> None:
    with pytest.raises(UsageError, match=re.escape(says)):
        make()
