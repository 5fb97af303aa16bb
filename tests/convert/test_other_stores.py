"""Folders of weights in HDFS, in Azure and in shared memory, on real servers: out of one place, into the next."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("hdfs_native", reason="hdfs-native is not installed: pip install 'aiockpt[hdfs]'")
pytest.importorskip("obstore", reason="the extra aiockpt[cloud] is not installed")

from aiockpt.backends.cloud import CloudBackend
from aiockpt.errors import ObjectExistsError
from tests.convert.small_models import all_same, export, load_folder, take_in
from tests.servers.azurite.azurite import INSTALL_DEADLINE_S, CannotRunError, run_azurite
from tests.servers.hdfs.fixture import hdfs

__all__ = ["hdfs"]

pytestmark = pytest.mark.timeout(INSTALL_DEADLINE_S + 60)
CONTAINER = "tests"
Open = Callable[[str], Any]
"""Returns the place of that name."""


@pytest.fixture(params=["hdfs", "azure", "shm"])
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Open]:
    name = uuid.uuid4().hex
    with ExitStack() as stack:
        if request.param == "hdfs":
            server = request.getfixturevalue("hdfs")
            yield lambda part: f"{server.url}/{name}/{part}?webhdfs={server.webhdfs_url}"
        elif request.param == "shm":
            monkeypatch.setattr("aiockpt.backends.shm.SHARED_MEMORY", str(tmp_path))
            yield lambda part: f"shm://{name}-{part}"
        else:
            start_azurite(stack, monkeypatch)
            yield lambda part: CloudBackend(f"az://{CONTAINER}/{name}/{part}", client_options={"allow_http": True})


def start_azurite(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start it, with a container, until *stack* is closed; the environment names it."""
    try:
        azurite = stack.enter_context(run_azurite())
    except CannotRunError as error:
        pytest.skip(str(error))
    azurite.create_container(CONTAINER)
    for variable, value in azurite.environment().items():
        monkeypatch.setenv(variable, value)


def test_weights_go_out_and_come_back(place: Open, root: Path, tmp_path: Path) -> None:
    export(root, tmp_path / "out", max_shard_bytes=10_000)
    done = export(root, place("out"), max_shard_bytes=10_000)
    assert len(done.files) == 3
    with pytest.raises(ObjectExistsError, match="already"):
        export(root, place("out"))
    take_in(place("back"), place("out"), step=2)
    export(place("back"), tmp_path / "again", max_shard_bytes=10_000)
    assert all_same(load_folder(tmp_path / "again"), load_folder(tmp_path / "out"))
    assert export(root, place("out"), replace=True).files == ("model.safetensors",)
    take_in(place("back"), place("out"), step=3)
