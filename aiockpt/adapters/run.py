"""One walk's results: the nodes of the values, and the tensors that only appear while values are read.

Tensors of modules, optimizers and containers are kept by the plan (see `aiockpt.adapters.native`); those that an object's
``state_dict()`` returns, or that lie in lists and the like, are new each time and are gathered here.
"""

from __future__ import annotations

from typing import Any

import torch

from aiockpt.adapters.leaves import LeafWriter
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.tensors import Leaf, describe, is_spread, tensor_name
from aiockpt.errors import kind_in_words
from aiockpt.state.codecs import CodecRegistry
from aiockpt.state.tree import Encoder, Node, Path, refuse

Facts = tuple[str, tuple[int, ...]]
"""Dtype code and global shape of a tensor."""


class Stale(Exception):  # noqa: N818  not an error: the walk starts anew
    """The state is not made of the objects that the plan was made for."""


class Run:
    """One pass over the values of a state.

    Attributes:
        leaves: the tensors gathered so far.
        per_rank: the nodes of this rank's own values, by name.
        left_out: what was not saved, by name; see `ShardedState`.
    """

    def __init__(self, codecs: CodecRegistry, rank: int) -> None:
        self._rank = rank
        self._encoder = Encoder(codecs, LeafWriter(self.put))
        self._own_encoder = Encoder(codecs, LeafWriter(self._put_own))
        self.leaves: list[Leaf] = []
        self.per_rank: dict[str, Node] = {}
        self.left_out: dict[str, Facts | None] = {}

    @property
    def written(self) -> int:
        """How much was encoded, in characters and nodes."""
        return self._encoder.written + self._own_encoder.written

    def encode(self, value: Any, path: Path) -> Node:
        """Return the node of a global value."""
        return self._encoder.encode(value, path)

    def encode_own(self, value: Any, path: Path) -> Node:
        """Return the node of a value of this rank alone."""
        return self._own_encoder.encode(value, path)

    def put(self, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None, *, is_buffer: bool = False) -> str:
        """Gather a tensor and return its name; *flat* and *is_buffer* as for `describe`."""
        return self._gather(tensor_name(path), path, tensor, flat, is_buffer)

    def same(self, found: object, expected: object) -> None:
        """Check that the state still holds the object that was walked.

        Raises:
            Stale: it does not.
        """
        if found is not expected:
            raise Stale

    def _put_own(self, path: Path, tensor: torch.Tensor) -> str:
        if is_spread(tensor):
            refuse(
                path,
                f"{kind_in_words(tensor)} is spread over ranks, it cannot belong to one; save it outside per_rank()",
            )
        return self._gather(tensor_name(path, self._rank), path, tensor)

    def _gather(
        self, name: str, path: Path, tensor: torch.Tensor, flat: FlatRange | None = None, is_buffer: bool = False
    ) -> str:
        self.leaves.append(describe(name, tensor, path, flat, is_buffer=is_buffer))
        return name
