"""Does the measurement of a device run, and does it say when there is none?"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from benchmarks import device


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so_and_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert device.main(["--size", "1MiB"]) == 2
    assert "needs an accelerator" in capsys.readouterr().err


def test_with_the_twin_it_runs_and_reports_every_kind_of_snapshot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "results" / "device.json"
    assert device.main(["--twin", "--repeat", "2", "--out", str(out)]) == 0
    report = msgspec.json.decode(out.read_bytes(), type=device.Report)
    assert len(report.samples) == 2
    assert {sample.taken for sample in report.samples} == {"device"}
    assert all(sample.beside_steps >= 1 for sample in report.samples)
    assert "twin" in capsys.readouterr().out
