"""Streams to S3 and back: without a file, and in no more memory than the pool. In its own process."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import report
from tests.servers.seaweed import Seaweed

MIB = 1 << 20
LIMIT_S = 240
SLACK_BYTES = 12 * MIB
"""For what does not grow with the state: connections, tasks, and pages that the allocator keeps."""


@pytest.fixture
def seen(seaweed: Seaweed, s3_url: str, aws_environment: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, float]:
    """A state of 16 pools, saved and loaded, as the benchmark does it with 4 GiB and 256 MiB."""
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    aws_environment.setenv("TMPDIR", str(tmp_path))
    command = [sys.executable, "-m", "benchmarks", "run", "streaming", "--size", "256MiB", "--set", "pool=16MiB"]
    command += [
        "--smoke",
        "--set",
        f"url={s3_url}",
        "--work",
        str(tmp_path / "work"),
        "--out",
        str(tmp_path / "out.json"),
    ]
    subprocess.run(command, check=True, timeout=LIMIT_S)
    row = report.read(tmp_path / "out.json").results["streaming"]["aiockpt"]
    return {name: metric.median for name, metric in row.items()}


def test_a_state_of_many_pools_is_saved_and_loaded_in_the_memory_of_one_and_without_a_file(
    seen: dict[str, float],
) -> None:
    assert seen["files_written_count"] == 0
    assert seen["first_part_s"] < seen["snapshot_s"], "nothing was uploaded while the snapshot was being taken"
    assert seen["snapshot_s"] <= seen["committed_s"]
    assert seen["state_bytes"] > 15 * seen["pool_bytes"]
    for peak in ("save_peak_bytes", "load_peak_bytes"):
        assert seen[peak] <= seen["pool_bytes"] * 1.05 + SLACK_BYTES, peak
