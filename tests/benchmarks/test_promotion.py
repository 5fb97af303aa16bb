"""Does the measurement of promotion run, and does it count what it says?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from benchmarks import promotion
from tests.servers.seaweed import find_weed

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(300)
def test_a_smoke_run_copies_by_every_way_and_writes_a_table_and_a_report(tmp_path: Path) -> None:
    out = tmp_path / "promotion.json"
    command = [sys.executable, "-m", "benchmarks.promotion", "--smoke", "--work", str(tmp_path), "--out", str(out)]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(out.read_bytes(), type=promotion.Report)
    ways = ["none", "folder", "folder, no limit", "bucket", "bucket, no limit", "bucket, weights"]
    ways += ["SeaweedFS here"] if find_weed() else []
    assert [sample.way for sample in report.samples] == ways
    copied = {sample.way: sample.copied_bytes for sample in report.samples}
    assert copied["none"] == 0
    assert copied["folder"] > 8 << 20
    assert 0 < copied["bucket, weights"] < copied["bucket"] / 6
    assert all(f"| {way} | " in done.stdout for way in ways)
    assert list(tmp_path.iterdir()) == [out]


def test_steps_are_counted_for_as_long_as_asked() -> None:
    counted = promotion.run_steps(lambda: None, lambda seconds: seconds >= 0.01)
    assert 0.01 <= sum(counted.seconds) < 30
    assert counted.mean_s == pytest.approx(sum(counted.seconds) / len(counted.seconds))
