"""`torch.distributed.checkpoint`, the incumbent: by its defaults, and at the best that was found on a CPU."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any, ClassVar

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save, save

from benchmarks import pages
from benchmarks.contenders import DEADLINE_S, Base, Pending
from benchmarks.state import State


class _Dcp(Base):
    """`torch.distributed.checkpoint`; its files are flushed by itself, its folders by us."""

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        timeout = datetime.timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timeout)

    def load(self, step: int, state: State) -> None:
        load(state, checkpoint_id=self.location(step))

    def location(self, step: int) -> Path:
        return self.folder / f"step-{step}"

    def close(self) -> None:
        dist.destroy_process_group()

    def _blocking(self, step: int) -> Pending:
        return Pending(lambda: True, lambda: pages.sync_folders(self.location(step)))

    def _background(self, step: int, future: Any) -> Pending:
        def wait() -> None:
            future.result(DEADLINE_S)
            pages.sync_folders(self.location(step))

        return Pending(future.done, wait)


class Save(_Dcp):
    """``dcp.save``, defaults."""

    def save(self, step: int, state: State) -> Pending:
        save(state, checkpoint_id=self.location(step))
        return self._blocking(step)


class SaveWithThreads(_Dcp):
    """``dcp.save`` at its best here: four writer threads."""

    def save(self, step: int, state: State) -> Pending:
        save(state, storage_writer=FileSystemWriter(self.location(step), thread_count=4))
        return self._blocking(step)


class AsyncThread(_Dcp):
    """``dcp.async_save``, defaults: it copies into new memory, a thread writes."""

    def save(self, step: int, state: State) -> Pending:
        return self._background(step, async_save(state, checkpoint_id=self.location(step)))


class AsyncProcess(_Dcp):
    """``dcp.async_save`` with the process executor, all else by default."""

    def save(self, step: int, state: State) -> Pending:
        future = async_save(
            state, checkpoint_id=self.location(step), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        )
        return self._background(step, future)


class _KeptStager(_Dcp):
    """`dcp.async_save` at its best: a stager that is kept, so that its memory is warm from the second save on."""

    options: ClassVar[dict[str, bool]]

    def open(self, folder: Path, state: State) -> None:
        super().open(folder, state)
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False, **self.options)
        )

    def close(self) -> None:
        self._stager.close()
        super().close()


class AsyncThreadKeptStager(_KeptStager):
    """Thread executor, stager kept, copy on the calling thread."""

    options: ClassVar = {"use_shared_memory": False, "use_async_staging": False}

    def save(self, step: int, state: State) -> Pending:
        future = async_save(state, checkpoint_id=self.location(step), async_stager=self._stager)
        return self._background(step, future)


class AsyncProcessKeptStager(_KeptStager):
    """Process executor, stager kept in shared memory, copy on a thread; the state may change when that is done."""

    options: ClassVar = {"use_shared_memory": True, "use_async_staging": True}

    def save(self, step: int, state: State) -> Pending:
        response: Any = async_save(
            state,
            checkpoint_id=self.location(step),
            async_stager=self._stager,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        response.staging_completion.result(DEADLINE_S)
        return self._background(step, response.upload_completion)
