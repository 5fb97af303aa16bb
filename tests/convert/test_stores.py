"""Conversions from and to a real object store, and what they need of memory."""

import asyncio
from pathlib import Path

import pytest

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.convert.folder_layout import INDEX_NAME
from aiockpt.errors import CorruptionError, ObjectExistsError, UsageError
from aiockpt.storage.open import open_backend
from tests.convert.small_models import DEADLINE_S, Tied, all_same, export, load_folder, save_model, take_in
from tests.run_python import run_python
from tests.servers.seaweed import Seaweed
from tests.small_run import small_checkpointer


@pytest.fixture
def url(s3_url: str, seaweed: Seaweed, aws_environment: pytest.MonkeyPatch) -> str:
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    return s3_url


def test_a_bucket_to_a_bucket_and_back_is_what_a_folder_would_be(url: str, tmp_path: Path) -> None:
    save_model(f"{url}/run", 7)
    done = export(f"{url}/run", f"{url}/out", max_shard_bytes=10_000)
    assert done.url == f"{url}/out"
    export(f"{url}/run", tmp_path / "out", max_shard_bytes=10_000)
    take_in(f"{url}/back", f"{url}/out", step=2)
    export(f"{url}/back", tmp_path / "again", max_shard_bytes=10_000)
    assert all_same(load_folder(tmp_path / "again"), load_folder(tmp_path / "out"))
    with pytest.raises(ObjectExistsError, match="already"):
        export(f"{url}/run", f"{url}/out")
    assert export(f"{url}/run", f"{url}/out", replace=True).files == ("model.safetensors",)
    take_in(f"{url}/back", f"{url}/out/model.safetensors", step=3)


def test_an_index_in_a_bucket_that_names_a_missing_file(url: str, tmp_path: Path) -> None:
    asyncio.run(put(f"{url}/in", INDEX_NAME, b'{"weight_map": {"a": "model-00001-of-00002.safetensors"}}'))
    with pytest.raises(CorruptionError, match=r"00001-of-00002\.safetensors is missing"):
        take_in(tmp_path / "run", f"{url}/in")


def test_a_run_begins_from_weights_in_a_bucket_and_what_is_not_there_is_said(url: str) -> None:
    was = save_model(f"{url}/run", 7)
    export(f"{url}/run", f"{url}/out", max_shard_bytes=10_000)
    model = Tied(2)
    with small_checkpointer(f"{url}/begun") as ckpt:
        with pytest.raises(UsageError, match=r"nothing-here has neither model\.safetensors nor"):
            ckpt.resume({"model": model}, fork=f"hf://{url}/nothing-here")
        assert ckpt.resume({"model": model}, fork=f"hf://{url}/out") == 0
        assert all_same(model.state_dict(), was.state_dict())
        ckpt.save(0, {"model": model}).result(DEADLINE_S)
        assert ckpt.steps().result()[0].forked_from == (f"hf://{url}/out", "", "")


async def put(url: str, key: str, data: bytes) -> None:
    place = open_backend(url)
    await place.put(key, data)
    await place.close()


SAVE = """
import sys, torch, aiockpt
with aiockpt.Checkpointer(sys.argv[1] + "/run", limits=aiockpt.Limits(io=aiockpt.IO(pool_bytes=64 << 20))) as ckpt:
    ckpt.save(1, {"w": {str(number): torch.full((1 << 26,), float(number)) for number in range(4)}})
"""
CONVERT = """
import resource, sys, aiockpt
from aiockpt.convert import to_hugging_face, from_hugging_face

def peak_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

folder, way = sys.argv[1:]
with aiockpt.Checkpointer(f"{folder}/{'run' if way == 'out' else 'back'}") as ckpt:
    before = peak_mib()
    if way == "out":
        to_hugging_face(ckpt, folder + "/out", prefix="w").result()
    else:
        from_hugging_face(ckpt, folder + "/out", dtype="bfloat16").result()
    print(peak_mib() - before)
"""


def test_where_weights_came_from_is_kept_without_its_secrets(root: Path, tmp_path: Path) -> None:
    class Secret(MemoryBackend):
        @property
        def url(self) -> str:
            return "sftp://me:secret@host/models/mine?token=secret"

    place = Secret(f"secret-{tmp_path}")
    export(root, place)
    take_in(tmp_path / "back", place)
    with aiockpt.Checkpointer(tmp_path / "back") as ckpt:
        assert ckpt.describe(0).result().user == {"converted_from": "sftp://host/models/mine"}


def test_memory_does_not_grow_with_the_weights(tmp_path: Path) -> None:
    """1 GiB of weights passes through windows, with the reads and casts under way."""
    run_python("-c", SAVE, tmp_path)
    for way in ("out", "in"):
        assert int(run_python("-c", CONVERT, tmp_path, way).stdout) < 512, way
