"""Nothing blocks the event loop: no file-system call, checksum or lock runs on the thread that drives it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from blockbuster import blockbuster_ctx

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.format.document import hash_block
from aiockpt.runtime.loop import runs_event_loop
from aiockpt.runtime.world import Files, OsFiles, World
from tests.small_run import Run, small_checkpointer


class OffLoopFiles:
    """The operating system's files, which refuse to be called on a thread that runs an event loop."""

    def __init__(self) -> None:
        self.calls = 0
        self.on_loop: list[str] = []

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        real = getattr(OsFiles, verb)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if runs_event_loop():
                self.on_loop.append(verb)
            return real(*args, **kwargs)

        return call


def test_files_are_touched_on_worker_threads_only(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    files = OffLoopFiles()
    hashed_on_loop: list[bool] = []

    def watched_hash(data: memoryview) -> bytes:
        hashed_on_loop.append(runs_event_loop())
        return hash_block(data)

    monkeypatch.setattr("aiockpt.pipeline.upload.hash_block", watched_hash)
    backend = LocalBackend(tmp_path / "run", world=World(files=cast(Files, files)))
    with blockbuster_ctx("aiockpt"), small_checkpointer(backend, retention=aiockpt.Retention(last=1)) as ckpt:
        for step in range(3):
            run.train()
            ckpt.save(step, run.state).result()
        ckpt.load(run.state).result()
        ckpt.verify().result()
        ckpt.describe().result()
        ckpt.read(None, "model.0.weight").result()
        ckpt.prune().result()
    assert files.on_loop == []
    assert files.calls > 100
    assert hashed_on_loop
    assert not any(hashed_on_loop)
