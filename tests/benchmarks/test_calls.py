"""The benchmark of the call runs, and counts what it says."""

from __future__ import annotations

from pathlib import Path

from benchmarks import calls


def test_a_small_run_has_every_figure_of_every_size(tmp_path: Path) -> None:
    found = calls.run([8, 40], 3, tmp_path)
    assert [row.tensors for row in found.rows] == [8, 40]
    for row in found.rows:
        assert {name: len(metric.samples) for name, metric in row.metrics.items()} == {
            "first_call_s": 1,
            "call_s": 3,
            "walk_s": 3,
            "loop_s": 3,
        }
        assert all(metric.min > 0 for metric in row.metrics.values())
    assert len(calls.render(found).splitlines()) == 4


def test_a_state_has_as_many_tensors_as_it_says(tmp_path: Path) -> None:
    import aiockpt

    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, calls.Training(100).state).result(30)
        assert len(ckpt.describe(0).result(30).tensors) == 100
