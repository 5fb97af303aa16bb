"""Versions in S3."""

from pathlib import Path

import pytest

from tests.publish.policy import publish, received


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
