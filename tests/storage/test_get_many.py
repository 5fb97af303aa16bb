"""Many small objects, read alike in one hop and one by one; those that are gone are told from those that fail."""

import errno
from pathlib import Path
from typing import Any

import anyio
import pytest

from aiockpt.backends.local import LocalBackend
from aiockpt.backends.memory import MemoryBackend
from aiockpt.errors import StorageError, UsageError
from aiockpt.storage.backend import Backend
from aiockpt.storage.transfer import READS, get_many

MANY = 3 * READS + 1


@pytest.fixture(params=["one hop", "one by one"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    return LocalBackend(tmp_path) if request.param == "one hop" else MemoryBackend()


def test_each_comes_in_its_place_cut_and_what_is_gone_is_none(place: Any) -> None:
    keys = [f"monitor/{number}" for number in range(MANY)]

    async def read() -> tuple[bytes | None, ...]:
        for number, key in enumerate(keys):
            await place.put(key, f"said by {number:04}".encode())
        await place.delete(keys[5:7])
        return await get_many(place, keys, 12)

    found = anyio.run(read)
    assert found[5] is found[6] is None
    assert [data for data in found if data] == [
        f"said by {number:04}".encode() for number in (*range(5), *range(7, MANY))
    ]
    assert anyio.run(get_many, place, keys[:1], 4) == (b"said",)
    assert anyio.run(get_many, place, [], 4) == ()


@pytest.mark.parametrize("kind", [LocalBackend, MemoryBackend])
def test_what_cannot_be_read_and_what_is_no_key_raise(
    kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> Any:
        raise StorageError("a bad sector")

    def fail_on_a_thread(*_: Any) -> Any:
        raise OSError(errno.EIO, "a bad sector")

    place = kind(tmp_path) if kind is LocalBackend else kind()
    anyio.run(place.put, "x", b"data")
    monkeypatch.setattr(*((kind, "_read_whole", fail_on_a_thread) if kind is LocalBackend else (kind, "get", fail)))
    with pytest.raises(StorageError, match="a bad sector"):
        anyio.run(get_many, place, ["x"], 4)
    monkeypatch.undo()
    with pytest.raises(UsageError, match="storage key"):
        anyio.run(get_many, place, ["../x"], 4)
