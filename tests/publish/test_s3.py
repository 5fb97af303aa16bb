"""Versions in S3."""

from pathlib import Path

import pytest

from aiockpt.publish import step_weights
from aiockpt.storage.open import open_backend
from aiockpt.testing.recording import RecordingBackend
from tests.publish.policy import publish, received
from tests.publish.test_shares import are_shared_out, job


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


def test_ranks_share_out_the_files_of_a_version_in_a_bucket(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_weights, "SHARE_BYTES", 4096)
    dests = [RecordingBackend(open_backend(url)) for _ in range(3)]
    with job(tmp_path / "run", dests, {"full_every": 2, "keep": 0}) as ranks:
        assert [one.kind for one in ranks.publish(*range(3))] == ["full", "delta", "delta"]
    assert are_shared_out(dests, 4)
    assert received(url, tmp_path / "got") == [(2, 2)]
