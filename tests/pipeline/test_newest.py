"""What comes after the newest, for who wants more: each older generation at its own place, and nothing untold."""

import msgspec
import pytest

from aiockpt.errors import CorruptionError, NewerFormatError, StorageError
from aiockpt.format.manifest import Manifest, encode_manifest
from aiockpt.format.names import manifest_key
from aiockpt.pipeline.discover import StepAt, StepEntry, list_step, newest_first
from aiockpt.planning.weights import CONTENT
from aiockpt.planning.write_plan import WEIGHTS
from aiockpt.storage.backend import Backend
from tests.pipeline.generations import SECOND, STEP, made, refusing, saved_twice


class Reader:
    """Wants all that there is of step 1: the generations that it got, and what it was told to pass over."""

    def __init__(self) -> None:
        self.got: list[int] = []
        self.told: list[str] = []

    async def read(self, backend: Backend, listed: StepEntry | None = None) -> None:
        """Read all of *backend*, as *listed*, or as it is."""
        one = StepAt(backend, listed or await list_step(backend, STEP))
        async for _, manifest in newest_first([one], self._pass_over):
            self.got.append(manifest.generation)

    def _pass_over(self, one: StepAt, error: CorruptionError) -> None:
        self.told.append(str(error))


async def test_who_wants_more_gets_the_generation_below() -> None:
    reader = Reader()
    await reader.read(await saved_twice())
    assert (reader.got, reader.told) == ([2, 1], [])


async def test_a_generation_that_is_found_bad_below_the_newest_is_told() -> None:
    backend, reader = await saved_twice(), Reader()
    await backend.put(manifest_key(STEP, 1), b"nothing like it")
    await reader.read(backend)
    assert reader.got == [2]
    assert len(reader.told) == 1


async def test_a_bad_generation_above_the_newest_is_told_once() -> None:
    backend, reader = await saved_twice(), Reader()
    await backend.put(manifest_key(STEP, 2), b"nothing like it")
    await reader.read(backend)
    assert reader.got == [1]
    assert len(reader.told) == 1


async def test_a_generation_below_that_is_away_is_not_taken_for_absent() -> None:
    backend, reader = await saved_twice(), Reader()
    away = StorageError("the store is away", key=STEP)
    with pytest.raises(StorageError, match="is away"):
        await reader.read(refusing(backend, 1, away))
    assert (reader.got, reader.told) == ([2], [])


async def test_what_a_newer_program_has_written_since_the_look_is_no_damage() -> None:
    backend, reader = await saved_twice(), Reader()
    newer = NewerFormatError("install a newer one", key=STEP)
    with pytest.raises(NewerFormatError):
        await reader.read(refusing(backend, 2, newer, reads=1))
    assert (reader.got, reader.told) == ([], [])


async def test_below_the_weights_of_a_step_nothing_is_older() -> None:
    """A generation of weights alone is the same save, thinned: what it overtook has lost its data."""
    backend, reader = await saved_twice(), Reader()
    await backend.put(manifest_key(STEP, 2), encode_manifest(_thinned(made(2, SECOND))))
    await reader.read(backend)
    assert (reader.got, reader.told) == ([2], [])


def _thinned(manifest: Manifest) -> Manifest:
    return msgspec.structs.replace(manifest, state={**manifest.state, CONTENT: WEIGHTS})
