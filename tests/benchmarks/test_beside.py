"""The benchmark of what a lazy save takes from training runs, and compares every way with the raw writer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks import beside
from benchmarks import state as states

pytestmark = pytest.mark.timeout(120)
WAYS = ["none", "raw writer", "copying writer", "aiockpt lazy", "aiockpt lazy, process"]


def test_every_way_has_a_sample_of_every_round(tmp_path: Path) -> None:
    result = beside.run(4 << 20, 2, tmp_path)
    assert list(result.ways) == WAYS
    for samples in result.ways.values():
        assert len(samples) == 2
        assert all(0 < sample.p50_s <= sample.p99_s and sample.steps >= beside.AFTER for sample in samples)
    rows = beside.table(result).splitlines()
    assert [row.split("|")[1].strip() for row in rows[2:-2]] == WAYS


def test_the_copying_writer_writes_the_bytes_of_the_state(tmp_path: Path) -> None:
    state = states.build(40 << 20)
    beside.CopyingWriter(tmp_path, state).save().result(60)
    expected = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in states.leaves(state))
    assert (tmp_path / "copied").read_bytes()[: len(expected)] == expected


def test_what_a_save_lost_is_what_its_steps_took_longer_than_quiet_ones() -> None:
    raw = [0.1, 0.2, 0.3]
    assert beside._compared([0.2, 0.4, 0.6], raw).startswith("2.0 × (")
    assert beside._compared(raw, [-0.1, -0.1, 0.1]).startswith("– (")
