"""The receiver: a folder of this host that follows the versions in a place, handed out one version at a time.

Guarantees:

- A version is handed out when every tensor of the folder is verified. The folder does not change before the loop comes
  back for the next one; what follows is downloaded meanwhile, on a thread of its own.
- Only the newest version is handed out: those in between are passed over.
- Killed anywhere, the next receiver of the folder goes on from what is there.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import AsyncGenerator, Generator
from contextlib import suppress
from pathlib import Path
from typing import Self

from aiockpt.errors import BlockingCallError, UsageError
from aiockpt.format.document import digest128
from aiockpt.futures import Future
from aiockpt.options import check_amount
from aiockpt.publish.frames import load_zstd
from aiockpt.publish.local_copy import LocalCopy
from aiockpt.publish.received_version import ReceivedVersion as ReceivedVersion
from aiockpt.publish.reception import Reception
from aiockpt.redaction import redact
from aiockpt.runtime.loop import LoopThread, made_for_the_loop, refuse_in_event_loop, run_in_thread
from aiockpt.runtime.promise import Promise
from aiockpt.runtime.world import World
from aiockpt.session.checkpointer import Place
from aiockpt.storage.address import parse_address
from aiockpt.storage.backend import Backend, local_path
from aiockpt.storage.open import open_backend

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class VersionReceiver:
    """Keeps a folder at the newest version; made by `receive`. Iterate it once, with ``for`` or ``async for``.

    It ends with the loop. After an error in the loop's body, with the program; at once as ``with`` or ``async with``.
    """

    def __init__(self, reception: Reception, copy: LocalCopy, opened: Backend | None) -> None:
        self._reception = reception
        self._copy = copy
        self._opened = opened
        self._loop: LoopThread | None = None

    def __iter__(self) -> Generator[ReceivedVersion]:
        refuse_in_event_loop("a plain `for`", "write `async for`")
        self._begin()
        try:
            while (version := self._next().result()) is not None:
                yield version
        finally:
            with suppress(BlockingCallError):  # on a thread that must not wait; the interpreter's exit ends it
                self.close()

    async def __aiter__(self) -> AsyncGenerator[ReceivedVersion]:
        self._begin()
        try:
            while (version := await self._next()) is not None:
                yield version
        finally:
            await self.aclose()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _begin(self) -> None:
        if self._loop is not None:
            raise UsageError("this receiver was used already: call receive() again")
        self._copy.open()
        self._loop = LoopThread("aiockpt-receive", self.close)
        self._running = self._loop.submit(self._reception.run)

    def _next(self) -> Future[ReceivedVersion | None]:
        assert self._loop is not None
        promise: Promise[ReceivedVersion | None] = Promise("next version")
        promise.run(self._loop, self._reception.next)
        return Future(promise)

    def close(self) -> None:
        """End; the folder stays as it is. Idempotent; on no thread that runs an event loop."""
        loop = self._loop
        if loop is None or not loop.usable:
            return
        self._running.cancel()
        try:
            loop.submit(self._end).result()
        finally:
            loop.close(cancel=True)
            self._copy.close()

    async def aclose(self) -> None:
        """`close`, in an event loop."""
        await run_in_thread("end of a receiver", self.close)

    async def _end(self) -> None:
        await self._reception.end()
        if self._opened is not None:
            await self._opened.close()

    def __repr__(self) -> str:
        return f"<VersionReceiver {self._reception}>"


def _path_of(folder: str | os.PathLike[str], what: str) -> Path:
    address = parse_address(folder)
    if address.scheme != "file":
        raise UsageError(f"{what} {redact(address.text)}: name a folder of this machine, such as /dev/shm/policy")
    return Path(os.path.abspath(address.text))


def _default_name(path: Path) -> str:
    whole = f"{socket.gethostname()}{path}"
    text = re.sub(r"[^A-Za-z0-9._-]", "-", whole).lstrip("._-") or "receiver"
    return text if len(text) <= 64 else f"{text[:55]}-{digest128(whole.encode())[-8:]}"


def receive(
    url: Place,
    folder: str | os.PathLike[str],
    *,
    name: str | None = None,
    every_s: float = 1.0,
    follow: bool = True,
    base: str | os.PathLike[str] | None = None,
) -> VersionReceiver:
    """Keep *folder* at the newest version that was published at *url*: ``async for version in receive(url, folder): …``.

    Each turn of the loop has the newest version in ``version.folder``, a Hugging Face folder with every tensor verified,
    which does not change before the loop comes back. ``for`` outside an event loop. One process of a host receives into a
    folder (best below ``/dev/shm``); any number may read it.

    Args:
        url: a folder, a URL or a backend, as in `aiockpt.Publish`.
        folder: of this machine; new, empty, or that of an earlier receiver.
        name: of this receiver, by which the publisher knows who still needs what; by default of host and folder.
        every_s: seconds between two looks for a new version.
        follow: wait for versions to come; False ends when there is no newer one.
        base: a Hugging Face folder of this machine. While *folder* has no version, every tensor of it whose bytes are those
            of a version is copied, whatever its name, and not downloaded. It may be of any other model, or absent, and
            stays as it is. Once *folder* has a version it is not read.

    Raises:
        UsageError: zstd is not installed (``pip install 'aiockpt[publish]'``), or an argument cannot be used; while it is
            iterated, another process keeps the folder.
        CorruptionError, StorageError: without *follow*; else they are logged, and tried again.
    """
    path = _path_of(folder, "receive() into")
    name = _default_name(path) if name is None else name
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} names no receiver: use letters, digits, '.', '_' and '-', as in rollout-3")
    check_amount("receive", "every_s", every_s, " seconds")
    load_zstd()
    backend, copy = open_backend(url, world=(world := World())), LocalCopy(path)
    if (place := local_path(backend.url)) is not None and place.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"{path} holds the versions themselves, at {place}: name another folder to receive into")
    base = None if base is None else _path_of(base, "receive() with base")
    with made_for_the_loop():
        reception = Reception(backend, copy, name, world, every_s=every_s, follow=follow, base=base)
    return VersionReceiver(reception, copy, None if backend is url else backend)
