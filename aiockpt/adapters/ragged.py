"""Which elements has a DTensor that RaggedShard of veScale has cut? A range of it, flattened.

``RaggedShard(dims, local_units)`` gives rank *i* of an axis ``local_units[i] / sum(local_units)`` of the elements, in the
order in which they lie in memory. The placement is known by its ``local_units``: veScale is not imported.

Guarantee: what does not add up is refused; nothing is guessed.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

from aiockpt.adapters.local_shards import FlatRange
from aiockpt.state.tree import Path, refuse

if TYPE_CHECKING:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec


def ragged_range(spec: DTensorSpec, path: Path) -> FlatRange | None:
    """Return what this rank has of a tensor that is cut raggedly; None where it is cut in other ways.

    Raises:
        UnsupportedStateError: another placement cuts it, too; or its elements do not divide into the units.
    """
    ragged = [axis for axis, placement in enumerate(spec.placements) if hasattr(placement, "local_units")]
    if not ragged:
        return None
    from torch.distributed.tensor import Replicate

    axis, shape = ragged[0], tuple(spec.shape)
    placement: Any = spec.placements[axis]
    others = [one for number, one in enumerate(spec.placements) if number != axis and not isinstance(one, Replicate)]
    if others or hasattr(placement, "split_factor"):
        refuse(
            path,
            f"a DTensor placed as {spec.placements}: a ragged cut is read beside Replicate() alone; redistribute the others",
        )
    units, count = tuple(placement.local_units), prod(shape)
    if len(units) != spec.device_mesh.size(axis) or min(units) < 0 or not sum(units) or count % sum(units):
        refuse(
            path,
            f"a DTensor of {count} elements placed as {placement!r} over {spec.device_mesh.size(axis)} ranks: they do not "
            "divide into its units",
        )
    coordinate = spec.device_mesh.get_coordinate()
    if coordinate is None:
        return FlatRange(shape, 0, 0)
    unit, index = count // sum(units), coordinate[axis]
    start = sum(units[:index]) * unit
    return FlatRange(shape, start, start + units[index] * unit)
