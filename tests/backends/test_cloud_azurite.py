"""Azure's own server keeps the contract, with files of many parts too. Skipped, with the reason, where it cannot be had."""

import asyncio
import itertools
import random
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

pytest.importorskip("obstore", reason="the extra aiockpt[cloud] is not installed")

import aiockpt
from aiockpt.backends.cloud import CloudBackend
from aiockpt.errors import ObjectNotFoundError
from aiockpt.storage.backend import Backend
from aiockpt.testing.backend_suite import BackendSuite, download, patterned
from aiockpt.testing.faults import FaultyBackend
from aiockpt.testing.recording import RecordingBackend
from tests.fails import fails
from tests.servers.azurite.azurite import INSTALL_DEADLINE_S, Azurite, CannotRunError, run_azurite
from tests.small_run import Run

pytestmark = pytest.mark.timeout(INSTALL_DEADLINE_S + 60)  # the first test may have to install it

MIB = 1 << 20
CONTAINER = "tests"
_prefixes = itertools.count()


@pytest.fixture(scope="module")
def azurite() -> Iterator[Azurite]:
    with ExitStack() as stack:
        try:
            server = stack.enter_context(run_azurite())
        except CannotRunError as error:
            pytest.skip(str(error))
        server.create_container(CONTAINER)
        yield server


@pytest.fixture
def azure(azurite: Azurite, monkeypatch: pytest.MonkeyPatch) -> CloudBackend:
    """Return a backend as a user opens it: by URL, with everything else in the environment."""
    for name, value in azurite.environment().items():
        monkeypatch.setenv(name, value)
    return CloudBackend(f"az://{CONTAINER}/run {next(_prefixes)}/ü", client_options={"allow_http": True})


class TestAzurite(BackendSuite):
    @pytest.fixture
    def backend(self, azure: CloudBackend) -> Backend:
        return azure


class TestAzuriteWrapped(BackendSuite):
    @pytest.fixture
    def backend(self, azure: CloudBackend) -> Backend:
        return RecordingBackend(FaultyBackend(azure))


async def test_a_file_of_many_parts_in_any_order_is_whole_on_azure(azure: CloudBackend) -> None:
    data = patterned(40 * MIB + 12_345)
    upload = await azure.create("d/file", data.nbytes)
    starts = list(range(0, data.nbytes, 8 * MIB))
    random.Random(3).shuffle(starts)
    await asyncio.gather(*(upload.write(start, [data[start : start + 8 * MIB]]) for start in starts))
    assert (await azure.stat("d/file")).size < 100  # the claim: data are not seen in part
    await upload.finish()
    reader = await azure.open("d/file")
    assert await download(reader) == data
    await reader.close()


async def test_a_file_aborted_between_parts_is_gone_from_azure(azure: CloudBackend) -> None:
    data = patterned(48 * MIB)
    upload = await azure.create("d/file", data.nbytes)
    await upload.write(0, [data[: 40 * MIB]])
    await upload.abort()
    assert (await azure.list("d")).objects == ()
    await fails(azure.stat("d/file"), ObjectNotFoundError)


async def test_more_keys_than_a_batch_holds_are_deleted_absent_ones_among_them(azure: CloudBackend) -> None:
    keys = [f"many/{index:03}" for index in range(300)]
    await asyncio.gather(*(azure.put(key, b"x") for key in keys[::2]))
    assert len((await azure.list("many")).objects) == 150
    await azure.delete(keys)
    assert (await azure.list("many")).objects == ()


def test_a_run_is_saved_to_azure_and_loaded_from_there(azure: CloudBackend) -> None:
    run = Run()
    run.train()
    with aiockpt.Checkpointer(azure) as ckpt:
        ckpt.save(1, run.state).result()
        run.train()
        ckpt.save(2, run.state).result()
    again = Run(seed=1)
    with aiockpt.Checkpointer(azure) as ckpt:
        loaded = ckpt.load(again.state).result()
    assert loaded is not None
    assert loaded.step == 2
    for ours, theirs in zip(run.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
