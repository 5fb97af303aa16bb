"""`torch.distributed.checkpoint`, the incumbent: with its defaults, and with the best settings found on a CPU."""

from __future__ import annotations

import datetime
import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks import pages
from benchmarks.contenders import DEADLINE_S, Contender, Pending
from benchmarks.state import State


class _Dcp(Contender):
    """DCP flushes its files, this class its folders. It joins the process group, or makes one of a single process."""

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._alone = not dist.is_initialized()
        if self._alone:
            timeout = datetime.timedelta(seconds=DEADLINE_S)
            dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)

    def load(self, step: int, state: State) -> None:
        load(state, checkpoint_id=self.location(step))

    def close(self) -> None:
        if self._alone:
            dist.destroy_process_group()


class Save(_Dcp):
    """``dcp.save``: with its defaults, or with a number of writer *threads*."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads

    def save(self, step: int, state: State) -> Pending:
        if self._threads is None:
            save(state, checkpoint_id=self.location(step))
        else:
            save(state, storage_writer=FileSystemWriter(self.location(step), thread_count=self._threads))
        return Pending(lambda: True, lambda: pages.sync_folders(self.location(step)))


class AsyncSave(_Dcp):
    """``dcp.async_save``: with its defaults it copies into new memory, and a thread writes.

    Args:
        process: with the process executor.
        keep_stager: the best setting here: the stager is kept, so that its memory is warm from the second save on. For a
            thread it copies on the calling thread; for a process into shared memory, on a separate thread.
    """

    def __init__(self, *, process: bool = False, keep_stager: bool = False) -> None:
        self._process = process
        self._keep_stager = keep_stager
        self._options: dict[str, Any] = {}
        if process:
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        if self._keep_stager:
            self._options["async_stager"] = DefaultStager(
                StagingOptions(
                    use_pinned_memory=False,
                    use_non_blocking_copy=False,
                    use_shared_memory=self._process,
                    use_async_staging=self._process,
                )
            )

    def save(self, step: int, state: State) -> Pending:
        future: Any = async_save(state, checkpoint_id=self.location(step), **self._options)
        if self._keep_stager and self._process:  # the state may change when the copy is done
            future.staging_completion.result(DEADLINE_S)
            future = future.upload_completion

        def wait() -> None:
            future.result(DEADLINE_S)
            pages.sync_folders(self.location(step))

        return Pending(future.done, wait)

    def close(self) -> None:
        if self._keep_stager:
            self._options["async_stager"].close()
        super().close()


class AsyncSaveEveryStep(AsyncSave):
    """``async_save`` of a model and an optimizer; it waits for the save before, whose folder is then removed."""

    _before: Pending | None = None
    _last: Path | None = None

    def save(self, step: int, state: State) -> Pending:
        if self._before is not None:
            self._before.wait()
        if self._last is not None:
            shutil.rmtree(self._last, ignore_errors=True)
        self._last = self.location(step)
        self._before = super().save(step, {name: part.state_dict() for name, part in state.items()})
        return self._before
