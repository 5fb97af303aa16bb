"""The reader of a step's weights for inference programs: in place, for any sharding of the save.

It has the names and calls of ``safetensors.safe_open``, and a read-ahead iterator that inference engines accept:
``model.load_weights(weights.items())``. Every block is verified, and memory holds only the read-ahead.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from aiockpt.adapters.tensors import torch_dtype
from aiockpt.convert.choice import Chosen, choose_weights
from aiockpt.convert.folder_layout import Weight, split_by_bytes
from aiockpt.engine.alone import Destination
from aiockpt.engine.find import Found, find_manifest
from aiockpt.engine.load import fill_tensors, read_found
from aiockpt.errors import StateMismatchError
from aiockpt.format.names import list_names
from aiockpt.futures import Future
from aiockpt.runtime.limits import run_blocking
from aiockpt.session.checkpointer import Checkpointer
from aiockpt.state.geometry import Box
from aiockpt.state.shards import TensorShard

logger = logging.getLogger("aiockpt")

AHEAD_BYTES = 256 << 20


class Weights:
    """The weights of one save of a step, by their names in the module. Any thread, one at a time.

    Attributes:
        step: of the checkpoint.
        ties: other names of a weight's memory → its name.
        left_out: names of weights that are not here, because the step was saved without them.
    """

    def __init__(self, checkpointer: Checkpointer, found: Found, chosen: Chosen) -> None:
        manifest = found.manifest
        self._checkpointer = checkpointer
        self._found = found
        self._weights = {weight.name: weight for weight in chosen.weights}
        self.step = manifest.step
        self.ties = dict(chosen.ties)
        self.left_out = chosen.left_out

    def keys(self) -> list[str]:
        """Return the names, in the order of the model; tied weights appear once."""
        return list(self._weights)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __contains__(self, name: object) -> bool:
        return name in self._weights or name in self.ties

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a weight, on the host, in its stored dtype. Blocks."""
        return self._read(self._weight(name), None)

    __getitem__ = get_tensor

    def get_slice(self, name: str) -> WeightSlice:
        """Return a weight whose rows are read on access: ``get_slice(name)[:10]``."""
        weight = self._weight(name)
        return WeightSlice(weight, partial(self._read, weight))

    def items(self, *, ahead_bytes: int = AHEAD_BYTES) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each name with its weight, in the order of the model; the next ones are read meanwhile.

        Args:
            ahead_bytes: how much is read ahead; one weight may be larger.
        """
        # Two batches are held at a time, one that is yielded and one that is read: each gets half of the limit.
        batches = deque(split_by_bytes(self._weights.values(), lambda weight: weight.nbytes, max(ahead_bytes // 2, 1)))
        pending: deque[tuple[dict[str, torch.Tensor], Future[None]]] = deque()
        while batches or pending:
            while batches and len(pending) < 2:
                pending.append(self._start(batches.popleft()))
            tensors, future = pending.popleft()
            future.result()
            for name in list(tensors):
                # Popped, so that the memory of a tensor is free as soon as the caller drops it.
                yield name, tensors.pop(name)

    def _start(self, weights: list[Weight]) -> tuple[dict[str, torch.Tensor], Future[None]]:
        """Begin to read some weights into new memory."""
        tensors = {weight.name: torch.empty(weight.shape, dtype=torch_dtype(weight.dtype)) for weight in weights}
        wanted = [
            TensorShard(weight.stored, weight.dtype, weight.shape, (Box.whole(weight.shape),), tensors[weight.name])
            for weight in weights
        ]
        place, manifest = self._found.place, self._found.manifest

        async def read(_: Destination) -> None:
            async with place.reading(manifest.id):
                await fill_tensors(place, manifest, wanted)

        return tensors, self._checkpointer.run_on_destination(f"reading of {weights[0].name} and more", read)

    def _read(self, weight: Weight, rows: slice | None) -> torch.Tensor:
        # From this save, also when the step is saved anew.
        async def read(_: Destination) -> torch.Tensor:
            return await read_found(self._found, weight.stored, rows)

        return self._checkpointer.run_on_destination(f"read of {weight.name}", read).result()

    def _weight(self, name: str) -> Weight:
        weight = self._weights.get(self.ties.get(name, name))
        if weight is None:
            problem = "left out when the step was saved" if name in self.left_out else "in no part of its weights"
            raise StateMismatchError(self._found.manifest.id, [f"{name}: {problem}"], "keys() lists what there is.")
        return weight


class WeightSlice:
    """A weight whose parts are read on access; it has the methods of a slice of ``safetensors``."""

    def __init__(self, weight: Weight, read: Callable[[slice | None], torch.Tensor]) -> None:
        self._weight = weight
        self._read = read

    def get_shape(self) -> list[int]:
        return list(self._weight.shape)

    def get_dtype(self) -> str:
        """Return the code of its dtype, as safetensors has it: ``BF16``."""
        return self._weight.dtype

    def __getitem__(self, key: Any) -> torch.Tensor:
        first, *others = key if isinstance(key, tuple) else (key,)
        by_rows = isinstance(first, slice) and first.step in (None, 1) and len(self._weight.shape) > 0
        rows = slice(first.start, first.stop) if by_rows else None
        return self._read(rows)[(slice(None) if by_rows else first, *others)]


def open_weights(checkpointer: Checkpointer, step: int | None = None, *, prefix: str | None = None) -> Weights:
    """Return the weights of a step (the newest valid one for None), to be read where they lie. Blocks.

    Args:
        prefix: the part of the state that is the weights, ``"model"``; None finds the one module.

    Raises:
        StepNotFoundError, NoValidCheckpointError: there is no such step.
        UsageError: the prefix does not fit the step.
    """

    async def choose(steps: Destination) -> tuple[Found, Chosen]:
        found = await find_manifest(steps, step)
        return found, await run_blocking(steps.engine.state_work, choose_weights, found.manifest, prefix, None)

    found, chosen = checkpointer.run_on_destination("read the weights", choose).result()
    if chosen.left_out:
        names = list_names(chosen.left_out)
        logger.warning("%s is opened without %s: left out when the step was saved", found.manifest.id, names)
    return Weights(checkpointer, found, chosen)
