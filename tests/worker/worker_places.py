"""A place that waits, or fails, where a file beside it says so: for backends in processes that a test cannot reach into.

``tried:///path`` is the folder ``/path``. Before it makes a data file, puts, creates or lists, it leaves ``at-VERB`` in
``/path.orders``, waits while ``hold-VERB`` is there, and fails with the errno that ``fail-VERB`` holds; where such a file
names a part of keys, too, only for keys that have it.
"""

import os
from pathlib import Path
from typing import Any

import anyio

from aiockpt.backends.local import LocalBackend
from aiockpt.errors import from_os_error
from aiockpt.runtime.world import World
from aiockpt.testing.faults import FaultyBackend

SCHEME = "tried"


class TriedBackend(FaultyBackend):
    """A folder that does as it is told."""

    def __init__(self, url: str, *, world: World | None = None) -> None:
        path = url.removeprefix(f"{SCHEME}://")
        super().__init__(LocalBackend(path, world=world))
        self._orders = Path(f"{path}.orders")

    async def create(self, key: str, size: int) -> Any:
        await self._watch_failures("create", key)
        return await super().create(key, size)

    async def put(self, key: str, data: bytes) -> None:
        await self._watch_failures("put", key)
        await super().put(key, data)

    async def put_new(self, key: str, data: bytes) -> None:
        await self._watch_failures("put_new", key)
        await super().put_new(key, data)

    async def put_unflushed(self, key: str, data: bytes, *, new: bool) -> None:
        await self._watch_failures("put_new" if new else "put", key)
        await super().put_unflushed(key, data, new=new)

    async def list(self, prefix: str) -> Any:
        await self._watch_failures("list", prefix)
        return await super().list(prefix)

    async def _watch_failures(self, verb: str, key: str) -> None:
        if not self._orders.is_dir():
            return
        (self._orders / f"at-{verb}").touch()
        while self._order("hold", verb, key) is not None:  # noqa: ASYNC110  a test makes it go
            await anyio.sleep(0.01)
        number = self._order("fail", verb, key)
        if number is not None:
            raise from_os_error(OSError(number, os.strerror(number)), verb, key)

    def _order(self, what: str, verb: str, key: str) -> int | None:
        """Return the number in an order that is for *key*; None where there is none."""
        try:
            number, _, part = (self._orders / f"{what}-{verb}").read_text().partition(" ")
        except FileNotFoundError:
            return None
        return int(number) if part in key else None


class Orders:
    """The test's hand on such a place."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.url = f"{SCHEME}://{path}"
        self._folder = Path(f"{path}.orders")
        self._folder.mkdir()

    def hold(self, verb: str, part: str = "") -> None:
        """Have calls of *verb* wait whose key has that *part*."""
        self._write(f"hold-{verb}", f"0 {part}")

    def let_go(self, verb: str) -> None:
        """Let them go."""
        (self._folder / f"hold-{verb}").unlink()

    def _write(self, name: str, text: str) -> None:
        """Write whole or not at all: somebody looks all the time."""
        (self._folder / f"new-{name}").write_text(text)
        (self._folder / f"new-{name}").rename(self._folder / name)

    def fail(self, verb: str, number: int | None, part: str = "") -> None:
        """Have them fail with an errno, or no longer."""
        if number is None:
            (self._folder / f"fail-{verb}").unlink()
        else:
            self._write(f"fail-{verb}", f"{number} {part}")

    def has_reached(self, verb: str) -> bool:
        """Say whether somebody has made such a call since this was asked last."""
        try:
            (self._folder / f"at-{verb}").unlink()  # looks and forgets in one, or a call between the two would be lost
        except FileNotFoundError:
            return False
        return True


def register(folder: Path) -> None:
    """Make *folder*, put in the module path, one that registers the scheme as an installed package would."""
    info = folder / "tried_places-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tried-places\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[aiockpt.backends]\n{SCHEME} = tests.worker.worker_places:TriedBackend\n")
