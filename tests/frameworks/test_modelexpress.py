"""Versions in a real S3, followed by ModelExpress's own receiver, with all of its checks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from modelexpress_rl.inference.receiver import (  # type: ignore[import-not-found,unused-ignore]
    ObjectStorageGeneratorConfig,
    _LocalCheckpoint,
    _S3Version,
)
from modelexpress_rl.object_storage import ObjectStorageType  # type: ignore[import-not-found,unused-ignore]
from modelexpress_rl.s3 import S3Client  # type: ignore[import-not-found,unused-ignore]
from modelexpress_rl.train import WeightPayloadFormat  # type: ignore[import-not-found,unused-ignore]

import aiockpt
from aiockpt.convert.folder_layout import INDEX_NAME
from tests.publish.policy import Weights, are_of, damage_all, publish, received, state_of
from tests.servers.s3_fixtures import aws_environment, s3_url, seaweed
from tests.servers.seaweed import Seaweed
from tests.small_run import small_checkpointer

__all__ = ["aws_environment", "s3_url", "seaweed"]
LAST = 199
LEAPS = (7, 60, 61, 140, LAST)
"""The versions that are asked for, one after the other: chains of many deltas, and of one."""


@pytest.fixture
def url(s3_url: str, seaweed: Seaweed, aws_environment: pytest.MonkeyPatch) -> str:
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    return s3_url


def weights_in(folder: Path) -> Weights:
    from safetensors.torch import load_file

    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


class Following:
    """ModelExpress's receiver, which begins with the version 0 in *seed*."""

    def __init__(self, seaweed: Seaweed, url: str, seed: Path, cache: Path) -> None:
        self.url = url
        self.client = S3Client(endpoint_url=seaweed.endpoint_url, region_name="us-east-1")
        config = ObjectStorageGeneratorConfig(ObjectStorageType.S3, f"{0:06d}", str(seed), str(cache))
        self.local = _LocalCheckpoint(model_name="policy", config=config, s3=self.client)
        self.local.initialize()

    def chain(self, first: int, last: int) -> list[_S3Version]:
        """Return the versions that lead to *last*, from *first* or from the last full one, as its server tells them."""
        chain: list[_S3Version] = []
        for number in range(first, last + 1):
            uri = f"{self.url}/weight_v{number:06d}/{INDEX_NAME}"
            base = json.loads(self.client.get(uri))["metadata"].get("base_version")
            kind = WeightPayloadFormat.FULL_HF_CHECKPOINT if base is None else WeightPayloadFormat.XOR_DELTA
            if base is None:
                chain.clear()
            chain.append(_S3Version(f"{number:06d}", base, kind, uri))
        return chain

    def weights(self, first: int, last: int) -> Weights:
        """Install *last*, and return what it made of it."""
        prepared = self.local.prepare_chain(tuple(self.chain(first, last)))
        assert prepared.target_version == f"{last:06d}"
        with self.local.installation_context(prepared, activate=True):
            return weights_in(Path(prepared.path))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fold", ["beside", "chain"])
def test_modelexpress_makes_the_same_weights_of_two_hundred_versions(
    url: str, seaweed: Seaweed, tmp_path: Path, fold: str
) -> None:
    options = aiockpt.Publish(url, fold=fold)  # type: ignore[arg-type]
    publish(tmp_path / "run", url, 0)
    assert received(url, tmp_path / "seed") == [(0, 0)]
    with small_checkpointer(tmp_path / "run", retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(1, LAST + 1):
            ckpt.save(step, state_of(step)).result()
            done = ckpt.publish(step, options).result()
            assert done.kind == ("full" if fold == "chain" and step % 20 == 0 else "delta")
    reader = Following(seaweed, url, tmp_path / "seed", tmp_path / "cache")
    before = 0
    for leap in LEAPS:
        assert are_of(reader.weights(before + 1, leap), leap), f"version {leap} came out with other weights"
        before = leap
    assert received(url, tmp_path / "got") == [(LAST, LAST)]
    reader.client.close()


def test_modelexpress_refuses_a_version_whose_bytes_are_damaged(url: str, seaweed: Seaweed, tmp_path: Path) -> None:
    """The checks above are its own: here one of them fails."""
    publish(tmp_path / "run", url, 0)
    assert received(url, tmp_path / "seed") == [(0, 0)]
    publish(tmp_path / "run", url, 1)
    damage_all(tmp_path / "seed")
    reader = Following(seaweed, url, tmp_path / "seed", tmp_path / "cache")
    with pytest.raises(Exception, match=r"(?i)checksum|adler"):
        reader.weights(1, 1)
    reader.client.close()
