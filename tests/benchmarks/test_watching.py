"""The benchmark of what watching costs runs, and counts what it says."""

from __future__ import annotations

from pathlib import Path

from benchmarks import watching


def test_a_small_run_has_every_figure_of_every_size(tmp_path: Path) -> None:
    found = watching.run([8, 40], 3, tmp_path)
    assert [row.tensors for row in found.rows] == [8, 40]
    names = {"call_watched_s": 3, "call_s": 3, "note_s": 3, "hook_s": 3, "hook_again_s": 3}
    for row in found.rows:
        assert {name: len(metric.samples) for name, metric in row.metrics.items()} == names
        assert all(metric.min > 0 for metric in row.metrics.values())
    assert len(watching.render(found).splitlines()) == 4
