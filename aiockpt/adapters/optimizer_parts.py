"""What has a rank of an optimizer's state beside a parameter that is spread over ranks? Told by shapes, never guessed.

- A DTensor is spread as its placements say.
- A plain tensor of the shape of the rank's part is that part of the state, if under its key *every* parameter has one of
  the shape of its part (what has that shape by chance would else be cut into pieces).
- One of the shape of the whole parameter is a replica.
- One without axes (a step count), and what is no tensor, is saved by ranks that hold elements of the parameter: on the
  others no step ever reaches it.
- Anything else (a preconditioner) must be the same on all ranks: its digest goes into the vote of each, so that a save in
  which they differ fails and names it. What is each rank's own is put into ``aiockpt.per_rank``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from aiockpt.adapters.composites import has_own_bytes
from aiockpt.adapters.dtensors import as_dtensor, is_dtensor, local_of, placements_of
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.tensors import bytes_of, is_spread
from aiockpt.format.checksum import digest128
from aiockpt.state.tree import Path

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

Form = Literal["like", "part", "whole", "own"]
"""How a state tensor lies beside its parameter: spread as it says itself (or beside one that is not spread), a plain part,
a plain replica, or something of its own that all ranks have alike."""


class Owner(msgspec.Struct, frozen=True, eq=False):
    """A parameter, and what slice of a flat one it is; None when it is whole, or a DTensor."""

    parameter: torch.Tensor
    flat: FlatRange | None

    @property
    def is_spread(self) -> bool:
        """Whether other ranks may have other elements of it."""
        return self.flat is not None or is_dtensor(self.parameter)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter."""
        return self.flat.shape if self.flat is not None else tuple(self.parameter.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Of the part that this rank has."""
        return tuple((local_of(self.parameter) if is_dtensor(self.parameter) else self.parameter).shape)

    @property
    def is_elsewhere(self) -> bool:
        """Whether all its elements are on other ranks."""
        return self.is_spread and 0 in self.local_shape and 0 not in self.shape


class Placed(msgspec.Struct, frozen=True, eq=False):
    """What to save of a state tensor.

    Attributes:
        source: the state tensor.
        tensor: itself, or a DTensor in its memory.
        flat: which slice of what it is; None when it is none.
        form: see above.
        placements: how a DTensor is spread, where that is not like its parameter (`placements_of`).
    """

    source: torch.Tensor
    tensor: torch.Tensor
    flat: FlatRange | None
    form: Form
    placements: tuple[str, ...] = ()


class StateParts:
    """The state tensors of one optimizer."""

    def __init__(self, owners: Mapping[Path, Owner], states: Iterable[tuple[Path, Mapping[Any, Any]]]) -> None:
        self._owners = owners
        self._cut: set[Any] = set()
        uncut: set[Any] = set()
        if any(owner.is_spread for owner in owners.values()):
            for path, state in states:
                for key, value in state.items():
                    if has_own_bytes(value):
                        is_part = not is_spread(value) and tuple(value.shape) == owners[path].local_shape
                        (self._cut if is_part else uncut).add(key)
            self._cut -= uncut

    def place(self, path: Path, key: Any, value: torch.Tensor) -> Placed | None:
        """Return what to save of the state *value* of the parameter at *path*; None where other ranks save it."""
        owner = self._owners[path]
        if is_dtensor(value):
            return Placed(value, value, None, "like", _placements(value, owner.parameter))
        if not owner.is_spread or is_spread(value):
            return Placed(value, value, None, "like")
        if value.dim() and key in self._cut:
            if owner.flat is not None:
                return Placed(value, value, owner.flat, "like")
            return Placed(value, as_dtensor(value.detach(), owner.parameter), None, "part")
        if owner.is_elsewhere:
            return None
        if not value.dim():
            return Placed(value, value, None, "like")
        return Placed(value, value, None, "whole" if tuple(value.shape) == owner.shape else "own")

    def saves_values(self, path: Path) -> bool:
        """Return whether this rank saves what is no tensor in the state of the parameter at *path*."""
        return not self._owners[path].is_elsewhere

    def must_agree(self, path: Path) -> bool:
        """Return whether tensors inside such values must be the same on all ranks."""
        return self._owners[path].is_spread


def _placements(value: DTensor, parameter: torch.Tensor) -> tuple[str, ...]:
    """Return how a DTensor is spread; nothing where it is spread as its parameter is."""
    alike = is_dtensor(parameter) and value.shape == parameter.shape and value.placements == parameter.placements
    return () if alike else placements_of(value)


def form_of(owner: Owner, live: object, saved: Form, shape: tuple[int, ...]) -> Form:
    """Return how a state tensor is to lie beside its parameter here: as the one that is there, else as it was saved.

    Args:
        shape: of the tensor in the checkpoint.
    """
    if not owner.is_spread:
        return "like"
    part: Form = "part" if owner.flat is None else "like"
    if not isinstance(live, torch.Tensor):
        return part if saved == "part" else saved
    if is_spread(live) or not live.dim():
        return "like"
    is_part = tuple(live.shape) == owner.local_shape and shape == owner.shape
    return part if is_part and not (saved == "whole" and tuple(live.shape) == shape) else "whole"


def digest_of(tensor: torch.Tensor) -> str:
    """Return the digest of the elements of a plain tensor, row-major."""
    flat = bytes_of(tensor).cpu().contiguous().reshape(-1).view(torch.uint8)
    return digest128(flat.numpy().data)
