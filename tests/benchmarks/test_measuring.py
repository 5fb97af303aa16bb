"""Parts of the measuring that decide what is cold, equal, lost, or met."""

from pathlib import Path

import pytest
import torch

from benchmarks import columns, floors, pages, report, state, targets
from benchmarks.contenders import Pending
from benchmarks.machine import Machine
from benchmarks.measure.saving import SAVING_STEPS, slow_down

MIB = 1 << 20
MACHINE = Machine("cpu", 2, 1 << 30, "6.0", "ext4", True, "3.11", "2.13", "2026-01-01")


def report_of(results: dict[str, dict[str, dict[str, list[float]]]]) -> report.Report:
    summarised = {
        scenario: {name: report.summarise(samples, 1000) for name, samples in per.items()}
        for scenario, per in results.items()
    }
    return report.Report(MACHINE, 1000, 1, 1, summarised, {}, [])


@pytest.mark.parametrize("size_bytes", [1 * MIB, 16 * MIB, 64 * MIB])
def test_a_state_has_the_size_asked_for_and_hundreds_of_tensors(size_bytes: int) -> None:
    built = state.build(size_bytes)
    assert state.size_bytes(built) == pytest.approx(size_bytes, rel=0.02)
    assert len(list(state.leaves(built))) > 240


def test_two_builds_are_equal_and_a_stamp_changes_every_tensor() -> None:
    first, second = state.build(MIB), state.build(MIB)
    before = state.digests(first)
    assert before == state.digests(second)
    state.stamp(first, 7)
    after = state.digests(first)
    assert all(before[name] != after[name] for name in before)


def test_one_changed_byte_changes_the_digest_of_its_tensor_only() -> None:
    built = state.build(MIB)
    before = state.digests(built)
    built["master"]["layers.3.mlp.up.weight"].view(-1).view(torch.uint8)[-1] ^= 1
    after = state.digests(built)
    assert {name for name in before if before[name] != after[name]} == {"master/layers.3.mlp.up.weight"}


def test_dropped_pages_are_gone_and_warmed_pages_are_there() -> None:
    folder = Path(__file__).resolve().parents[2] / ".bench"  # the disk of the checkout: a memory file system keeps all
    folder.mkdir(exist_ok=True)
    file = folder / "pages-probe"
    try:
        file.write_bytes(b"x" * 4 * MIB)
        assert pages.residency(file) == 1.0
        assert pages.drop(file) <= 0.01
        assert pages.warm(file) >= 0.99
    finally:
        file.unlink()


def test_the_copies_of_the_floor_hold_the_whole_state() -> None:
    built = state.build(MIB)
    one, two = (floors.aligned_buffer(state.size_bytes(built)) for _ in range(2))
    floors.copy_by_memmove(built, one)
    floors.copy_by_torch(built, two)
    size = state.size_bytes(built)
    assert one[:size] == two[:size]
    first = next(state.leaves(built))[1]
    assert one[: first.nbytes] == bytes(first.view(-1).view(torch.uint8).tolist())


def test_a_raw_write_reads_back_equal_both_ways(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    source = floors.aligned_buffer(3 * MIB + 5)
    direct, warm = floors.aligned_buffer(len(source)), floors.aligned_buffer(len(source))
    with ThreadPoolExecutor(2) as pool:
        floors.write_direct(pool, tmp_path / "raw", source)
        floors.read_direct(pool, tmp_path / "raw", direct)
        floors.read_warm(pool, tmp_path / "raw", warm, MIB)
        tensors = {str(size): torch.zeros(size, dtype=torch.uint8) for size in (MIB // 2, 7, 2 * MIB, MIB // 2 - 2)}
        floors.read_hashed(pool, tmp_path / "raw", floors.cut_runs(tensors, MIB), MIB)
    assert direct[:] == source[:] == warm[:]
    read = b"".join(bytes(tensor.numpy()) for tensor in tensors.values())
    assert read == source[: len(read)]


def test_time_lost_counts_the_call_and_slower_steps() -> None:
    clock = 0.0

    def step() -> None:
        nonlocal clock
        clock += 0.001 if not saving else 0.003

    saving = False

    def save() -> Pending:
        nonlocal clock, saving
        clock += 0.5
        saving = True
        return Pending(lambda: True, lambda: None)

    seen = slow_down(step, save, clock=lambda: clock)
    assert seen["lost_s"] == pytest.approx(0.5 + 0.002 * SAVING_STEPS)
    assert seen["quiet_p50_s"] == pytest.approx(0.001)
    assert seen["saving_p99_s"] == pytest.approx(0.003)


def test_a_target_is_judged_by_medians_in_the_direction_it_names() -> None:
    loads = {"floor: warm preadv": {"preadv_1_mib_s": [2.0], "preadv_8_mib_s": [1.0, 1.0, 9.0]}}
    seen = report_of({"load": {**loads, "aiockpt": {"warm_s": [1.4, 1.4, 7.0]}, "dcp-save": {"warm_s": [6.0]}}})
    floor, rival = (target for target in targets.MAIN if target.question == "load, warm")
    ratio = floor.ratios(seen)
    assert ratio is not None
    assert ratio[0] == pytest.approx(1.4)
    assert [floor.verdict(one) for one in (1.5, 1.51)] == ["met", "**missed**"]
    ratio = rival.ratios(seen)
    assert ratio is not None
    assert ratio[0] == pytest.approx(6.0 / 1.4)
    assert [rival.verdict(one) for one in (5.0, 4.99)] == ["met", "**missed**"]


def test_a_client_is_compared_with_the_best_that_is_neither_ours_nor_a_floor() -> None:
    rows = {"aiockpt": [3.0], "aiockpt, retrying": [1.0], "b": [4.0, 4.0], "c": [5.0], "floor: d": [2.0]}
    seen = report_of({"clients": {name: {"put_s": values} for name, values in rows.items()}})
    best = targets.find(seen, "clients/*/put_s")
    assert best is not None
    assert best.median == 4.0


def test_a_ratio_of_medians_has_an_interval_and_none_beside_what_lost_nothing() -> None:
    raw = [0.1, 0.2, 0.3]
    assert columns.ratio_interval([0.2, 0.4, 0.6], raw).startswith("2.0 × (")
    assert columns.ratio_interval(raw, [-0.1, -0.1, 0.1]).startswith("– (")
