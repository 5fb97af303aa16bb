"""A soak survives what retries can repair, and finds what they cannot."""

from collections.abc import Sequence

import msgspec
import pytest

from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import ObjectNotFoundError
from aiockpt.storage.backend import Backend, Listing, Stat
from aiockpt.testing.faults import Fault, FaultyBackend
from aiockpt.tools.stress.measure import measure
from aiockpt.tools.stress.plan import StressPlan
from aiockpt.tools.stress.report import Soak, StressReport
from aiockpt.tools.stress.soak import DrawnFaults
from tests.stress.conftest import changed

SOAK_S = 1.0


@pytest.fixture
def soak_plan() -> StressPlan:
    return StressPlan(
        sizes=(5000,), concurrency=(4,), seconds=0.01, most_bytes=8 << 20, soak_s=SOAK_S, faults=0.2, seed=7
    )


async def soaked(backend: Backend, plan: StressPlan) -> tuple[StressReport, Soak]:
    report = await measure(backend, plan)
    assert report.soak is not None
    return report, report.soak


async def test_every_fault_that_can_be_mended_is(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    report, found = await soaked(memory, soak_plan)
    assert report.problems == []
    assert found.wrong == []
    assert found.errors == {}
    assert found.retried == found.recovered > 0
    assert found.attempts > found.calls
    assert found.reread > 0
    assert found.bytes_read >= 5000 * found.files > 0
    met = {what.partition(" ")[0] for what in found.injected}
    assert met == {"fail", "lose_answer", "flip"}


async def test_without_faults_nothing_is_retried(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    _, found = await soaked(memory, msgspec.structs.replace(soak_plan, faults=0.0))
    assert found.injected == {}
    assert found.retried == found.reread == 0


@pytest.mark.parametrize("verb", ["upload.write", "put", "put_new"])
async def test_damage_in_the_storage_is_found(memory: MemoryBackend, soak_plan: StressPlan, verb: str) -> None:
    damaging = FaultyBackend(memory, [Fault(do="flip", verb=verb, match="*/soak/*", times=None, bit=999)])
    report, found = await soaked(damaging, soak_plan)
    assert any("not what was written" in problem for problem in found.wrong)
    assert len(report.problems) >= len(found.wrong)


async def test_an_object_that_vanished_is_found(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    async def put(key: str, data: bytes) -> None:
        if "/soak/" not in key:
            await memory.put(key, data)

    _, found = await soaked(changed(memory, put=put), soak_plan)
    assert any("is missing" in problem for problem in found.wrong)


async def test_a_create_that_replaces_is_found(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    _, found = await soaked(changed(memory, put_new=memory.put), soak_plan)
    assert any("was created twice" in problem for problem in found.wrong)


async def test_a_list_that_lacks_an_object_is_found(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    async def list_some(prefix: str) -> Listing:
        found = await memory.list(prefix)
        return Listing(found.objects[1:], found.folders) if prefix.endswith("/objects") else found

    report = await measure_unclean(changed(memory, list=list_some), soak_plan)
    assert any("a list lacks 1 of" in problem for problem in report.wrong)


async def measure_unclean(backend: Backend, plan: StressPlan) -> Soak:
    """Measure a place whose lists lie, so that the clean-up is deceived too; keep what the soak found."""
    return (await soaked(backend, plan))[1]


async def test_a_deleted_file_that_is_found_is_found(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    async def stat(key: str) -> Stat:
        try:
            return await memory.stat(key)
        except ObjectNotFoundError:
            if "/soak/" not in key:
                raise
            return Stat(key, 0, 0)

    _, found = await soaked(changed(memory, stat=stat), soak_plan)
    assert any("was deleted and is there" in problem for problem in found.wrong)


async def test_calls_that_no_retry_mends_are_problems_by_class(memory: MemoryBackend, soak_plan: StressPlan) -> None:
    full = FaultyBackend(memory, [Fault(do="fail", verb="create", match="*/soak/*", times=None, error=28)])
    report, found = await soaked(full, soak_plan)
    assert set(found.errors) == {"full"}
    assert any("calls failed after all retries" in problem and "full" in problem for problem in report.problems)


def test_the_dice_of_one_seed_fall_the_same_way_again() -> None:
    def thrown(seed: int) -> Sequence[str]:
        faults = DrawnFaults(seed, 0.3)
        return [repr(faults.due(verb, "k")) for verb in ("get", "put", "reader.read", "close") * 50]

    assert thrown(1) == thrown(1)
    assert thrown(1) != thrown(2)


def test_no_fault_comes_to_a_call_that_cannot_be_mended() -> None:
    faults = DrawnFaults(3, 0.9)
    for verb in ("close", "reader.close", "space", "create", "upload.write", "upload.finish"):
        for _ in range(200):
            faults.due(verb, "k")
    assert set(faults.injected) == {"fail create", "fail upload.write", "fail upload.finish"}
