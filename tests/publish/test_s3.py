"""Versions in S3: received by ours, and by ModelExpress's own receiver where that is installed."""

import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.publish.policy import Weights, are_of, publish, received

READER = Path(__file__).with_name("modelexpress_reader.py")


@pytest.fixture
def url(s3_url: str, moto: str, aws_environment: pytest.MonkeyPatch) -> str:
    aws_environment.setenv("AWS_ENDPOINT_URL", moto)
    return s3_url


def test_versions_are_published_to_a_bucket_and_received_from_it(url: str, tmp_path: Path) -> None:
    done = publish(tmp_path / "run", url, *range(4), full_every=2, keep=0)
    assert [one.kind for one in done] == ["full", "delta", "delta", "delta"]
    assert received(url, tmp_path / "got") == [(3, 3)]
    publish(tmp_path / "run", url, 4, 5)
    assert received(url, tmp_path / "got") == [(5, 5)]


@pytest.mark.parametrize(
    ("fold", "last"),
    [
        ("beside", 9),
        ("chain", 9),
        pytest.param("beside", 199, marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_modelexpress_makes_the_same_weights_of_them(url: str, moto: str, tmp_path: Path, fold: str, last: int) -> None:
    python = os.environ.get("MODELEXPRESS_PYTHON")
    if python is None:
        pytest.skip("ModelExpress: set MODELEXPRESS_PYTHON to an interpreter with modelexpress==0.7.0")
    publish(tmp_path / "run", url, 0)
    assert received(url, tmp_path / "seed") == [(0, 0)]
    publish(tmp_path / "run", url, *range(1, last + 1), full_every=4 if last < 20 else 20, fold=fold)
    out = tmp_path / "out"
    out.mkdir()
    command = [python, str(READER), moto, url, str(tmp_path / "seed"), str(out), "0", str(last)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=280 if last < 20 else 1500, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    versions = sorted(path for path in out.iterdir() if path.name != "cache")
    assert versions[-1].name == f"{last:06d}"
    for path in versions:
        weights: Weights = {}
        for file in path.glob("*.safetensors"):
            weights |= load_file(file)
        assert are_of(weights, int(path.name))
