"""The ``CheckpointEngine`` of an engine that saves with aiockpt: a commit returns when it is durable, not before.

What DeepSpeed writes besides, such as the file of ``save_16bit_model``, goes where it went before.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import aiockpt

_protocol: Any = import_module("deepspeed.runtime.checkpoint_engine.checkpoint_engine")


class DurableCommits(_protocol.CheckpointEngine):  # type: ignore[misc]  # Any, where DeepSpeed is not installed
    """Answers for the saves of ``engine.save_checkpoint``; calls that are about files go to the engine before it."""

    def __init__(self, before: Any) -> None:
        super().__init__()
        self.name = "aiockpt"
        self.before = before
        self._saves: dict[str, aiockpt.SaveFuture] = {}
        self._newest: tuple[Any, aiockpt.SaveFuture] | None = None

    def expect(self, save_dir: str, tag: str, save_latest: bool, future: aiockpt.SaveFuture) -> None:
        """Register the save of a tag."""
        self._saves = {name: one for name, one in self._saves.items() if not one.done()} | {tag: future}
        self._newest = (_protocol.CheckpointCommitInfo(tag, save_dir, save_latest), future)

    def get_commit_info(self) -> Any:
        """Return the request of the newest save once it is durable on all ranks; None until then, and if it failed."""
        if self._newest is None or self._newest[1].stage != "committed":
            return None
        return self._newest[0]

    def commit(self, info: Any) -> bool:
        """Wait until the save of a tag is durable; raise what went wrong."""
        future = self._saves.get(info.tag)
        if future is None:
            return bool(self.before.commit(info))
        future.result()
        return True

    def cleanup(self) -> None:
        """Wait for all saves."""
        for future in self._saves.values():
            future.result()
        self.before.cleanup()

    def create(self, info: Any) -> None:
        self.before.create(info)

    def save(self, state_dict: Any, path: str) -> Any:
        return self.before.save(state_dict=state_dict, path=path)

    def load(self, path: str, map_location: Any = None) -> Any:
        return self.before.load(path, map_location=map_location)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        self.before.makedirs(path, exist_ok=exist_ok)

    def is_data_parallel_writer(self, dp_rank: int) -> bool:
        return bool(self.before.is_data_parallel_writer(dp_rank))

    def is_decoupled(self) -> bool:
        """Return False: DeepSpeed's steps would wait for the commit of a decoupled one."""
        return False

    def preserves_storage_sharing(self) -> bool:
        return bool(self.before.preserves_storage_sharing())
