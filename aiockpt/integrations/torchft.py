"""torchft (0.2): checkpoints of a job of replica groups, and transfer of state to a group that rejoins.

    checkpoint_transport=PlaceTransport("/dev/shm/heal")           # an argument of torchft's Manager
    ckpt = ReplicaCheckpointer(manager, "/shared/run-7", replica="0", loader=loader, every=100)
    ckpt.resume(state)
    ckpt.step(state)                                               # after each step of torchft's optimizer

All groups hold the same model, so one of them writes it: the first that participates in the step. Each group reads its own
samples, and writes the position of its own loader. The checkpoint contains torchft's counters, as torchft requires.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map, tree_map_with_path

import aiockpt

_transport: Any = import_module("torchft.checkpointing.transport")

MANAGER = "torchft"
"""The name of torchft's counters in a checkpoint."""
POLL_S = 0.02


class ReplicaCheckpointer(AbstractContextManager["ReplicaCheckpointer"]):
    """Saves and loads a job of replica groups; each process of each group creates one, after its process group.

    Use it in a ``with`` block, whose end waits until all saves are committed, and raises their errors.

    Args:
        manager: torchft's, of this process.
        place: the path or URL of the checkpoints, the same for all groups. Positions of loaders are saved beside it.
        replica: the name of this group, the same after each restart.
        loader: the loader of this group, an `aiockpt.Loader` or any object with ``state_dict()``; None saves no position.
        every: steps from one checkpoint to the next.
        options: of each `aiockpt.Checkpointer`, such as ``retention``.
    """

    def __init__(
        self, manager: Any, place: str, *, replica: str, loader: Any = None, every: int, **options: Any
    ) -> None:
        self._manager, self._loader, self._every = manager, loader, every
        self._position = f"loader of {replica}"
        self._shared = aiockpt.Checkpointer(place, **options)
        self._own = aiockpt.Checkpointer(f"{place.rstrip('/')}-replica-{replica}", **options)
        self._saved: int | None = None

    def resume(self, state: Mapping[str, Any]) -> int:
        """Load the newest checkpoint into *state* and the manager, and this group's position at that step into its loader.

        The group that wrote the model wrote its position with it, so that a job of one group finds both or neither. Another
        group without a position at that step uses its newest one before it, or begins its data anew. Returns the number of
        steps that are done; 0 without a checkpoint. Running groups send the progress that they made since, at the first
        step.
        """
        loaded = self._shared.load(self._with_manager(state)).result()
        if loaded is None:
            return 0
        self._saved = loaded.step
        described: Any = self._shared.describe(loaded.step).result()
        if self._loader is not None and self._position in {*described.values, *described.per_rank}:
            self._shared.load({self._position: self._loader}, loaded.step).result()
        elif self._loader is not None:
            steps = [info.step for info in self._own.steps().result() if info.step <= loaded.step]
            if steps:
                self._own.load({"loader": self._loader}, max(steps)).result()
        return int(self._manager.current_step())

    def step(self, state: Mapping[str, Any]) -> aiockpt.SaveFuture | None:
        """Save this group's part if the manager's step is one to be saved.

        Call it after each step of the optimizer, on every process. Returns the save of the model if this group writes it,
        else None.
        """
        step = int(self._manager.current_step())
        if step % self._every or step == self._saved:
            return None  # or one that torchft did not commit: the step number is then that of before
        self._saved = step
        if self._loader is not None:
            self._own.save(step, {"loader": self._loader})
        if self._manager.participating_rank() != 0:
            return None
        position = {} if self._loader is None else {self._position: self._loader}
        return self._shared.save(step, self._with_manager(state) | position)

    def _with_manager(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {**state, MANAGER: self._manager}

    def wait(self) -> None:
        """Block until every save in flight has ended; raise their errors."""
        self._own.wait()
        self._shared.wait()

    def close(self) -> None:
        """Wait until all saves are committed, release everything, and raise their errors."""
        self.__exit__(None, None, None)

    def __exit__(self, *error: Any) -> None:
        try:
            self._own.__exit__(*error)
        finally:
            self._shared.__exit__(*error)


class PlaceTransport(_transport.CheckpointTransport):  # type: ignore[misc]  # Any, where torchft is not installed
    """Transfers the state to a group that is behind through a place that both see; every block is verified when it is read.

    Pass one to each Manager. Processes of the same rank in their groups exchange their local state, so that shards are sent
    unchanged.

    Args:
        place: a folder that all hosts see, or a URL; on one host ``/dev/shm/…``.
        state_dict: the function that the Manager has. The tensors that it returns are filled in place; it is required for
            ``DTensor``, whose placement is not sent. With None, new tensors are made on the host.
    """

    def __init__(self, place: str, state_dict: Callable[[], Any] | None = None) -> None:
        # Unique to this process: a receiver waits for a step by its number, and must not find an earlier process's.
        self._url = f"{place.rstrip('/')}/{uuid.uuid4().hex}"
        self._state_dict = state_dict
        self._sent: aiockpt.Checkpointer | None = None

    def metadata(self) -> str:
        """Return the URL to which this process writes the state that it sends."""
        return self._url

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Save *state_dict* for groups that are behind; it may change when this returns."""
        if self._sent is None:
            keep = aiockpt.Retention(last=1)
            self._sent = aiockpt.Checkpointer(self._url, ranks=aiockpt.Ranks(), retention=keep)
        self._sent.save(step, {"state": tree_map(_local, state_dict)}).result(timeout.total_seconds())

    def disallow_checkpoint(self) -> None:
        """Return at once: the state that was sent is a copy."""

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Return the state of *step* as soon as it has been sent.

        Raises:
            TimeoutError: it did not arrive in time.
        """
        received: dict[str, Any] = {"state": None}
        until = time.monotonic() + timeout.total_seconds()
        with aiockpt.Checkpointer(metadata, ranks=aiockpt.Ranks()) as ckpt:
            while step not in [info.step for info in ckpt.steps().result()]:
                if time.monotonic() > until:
                    raise TimeoutError(f"timed out: no state of step {step} came from replica {src_rank} ({metadata})")
                time.sleep(POLL_S)
            ckpt.load(received, step).result(max(until - time.monotonic(), 1.0))
        return received["state"] if self._state_dict is None else _fill(self._state_dict(), received["state"])

    def shutdown(self, wait: bool = True) -> None:
        """Delete the state that was sent."""
        if self._sent is not None:
            for info in self._sent.steps().result():
                self._sent.delete(info.step).result()
            self._sent.close()
            self._sent = None


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _fill(here: Any, received: Any) -> Any:
    """Return *received* with the tensors of *here*, filled, where *here* has one at the same place."""
    mine: dict[Any, torch.Tensor] = {}
    tree_map_with_path(lambda path, value: mine.setdefault(path, value) if torch.is_tensor(value) else None, here)

    def fill(path: Any, value: Any) -> Any:
        if path not in mine:
            return value
        with torch.no_grad():
            _local(mine[path]).copy_(value)
        return mine[path]

    return tree_map_with_path(fill, received)
