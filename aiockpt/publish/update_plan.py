"""The plan of an update: for each tensor of a folder, which bytes make it that of a version.

Guarantees:

- Pure. What a tensor is now is known by its digest alone, so that a folder whose receiver was killed anywhere is planned
  like any other: a tensor that is new already is left, one that is an older version's gets the deltas since, and a torn
  one is made anew, from a base that is on this host or from a full version.
- The cheaper way is taken, along the chain or from a full version, by the bytes that must be read.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

import msgspec

from aiockpt.errors import CorruptionError
from aiockpt.publish.form import VersionIndex, newest_full


class TensorPlan(msgspec.Struct, frozen=True):
    """How a tensor becomes that of the target.

    Attributes:
        full: all of it is read from there first.
        base: digest of the tensor of the base that is copied first.
        deltas: are applied then, in order.
    """

    full: VersionIndex | None
    base: str | None
    deltas: tuple[VersionIndex, ...]


class UpdatePlan(msgspec.Struct, frozen=True):
    """The tensors that change.

    Attributes:
        deltas: the versions whose files are needed, the oldest first.
        least: the lowest number of a version that is read.
    """

    target: VersionIndex
    tensors: dict[str, TensorPlan]
    deltas: tuple[VersionIndex, ...]
    least: int


class _Known(msgspec.Struct, frozen=True):
    """A tensor is here as the version *number* had it; *base* is its digest where it is in the base alone."""

    number: int
    base: str | None


def plan_update(
    now: Mapping[str, str],
    chain: Sequence[VersionIndex],
    folds: Sequence[VersionIndex],
    url: str,
    base: Container[str] = (),
) -> UpdatePlan:
    """Return the plan for tensors that have the digests *now*.

    Args:
        now: name → digest; a tensor that is torn, or not there, has none.
        chain: the target, and the versions before it, the newest first; only the last one may be a full version.
        folds: full versions of some of them.
        base: digests of tensors that can be copied, whatever their names.

    Raises:
        CorruptionError: a tensor must be made anew, and there is no full version to make it from.
    """
    target = chain[0]
    deltas = [index for index in chain if not index.is_full]
    start = target.number - len(deltas)
    full = newest_full([*folds, *(index for index in chain if index.is_full)], target.number)
    if full is not None and full.number < start:
        full = None
    found = {name: _find(name, now.get(name), base, target, deltas) for name in target.notes.tensors}
    behind = [known.number for known in found.values() if known is not None]
    skipped = [index for index in deltas if full is not None and index.number <= full.number]
    needed = [index for index in skipped if behind and index.number > min(behind)]
    if full is not None and sum(index.file_bytes for index in needed) > full.notes.weight_bytes:
        found = {name: None if known is None or known.number < full.number else known for name, known in found.items()}
    plans: dict[str, TensorPlan] = {}
    for name, known in found.items():
        if known == _Known(target.number, None):
            continue
        if known is None and full is None:
            raise CorruptionError(
                f"{url}: no full version is left from which {name} of version {target.number} can be made: publish "
                "a full one"
            )
        since = known.number if known is not None else full.number if full is not None else 0
        steps = tuple(one for one in reversed(deltas) if one.number > since and name in one.weight_map)
        plans[name] = TensorPlan(full, None, steps) if known is None else TensorPlan(None, known.base, steps)
    used = {index.number: index for plan in plans.values() for index in plan.deltas}
    fulls = [plan.full.number for plan in plans.values() if plan.full is not None]
    return UpdatePlan(
        target, plans, tuple(used[number] for number in sorted(used)), min([*used, *fulls], default=target.number)
    )


def _find(
    name: str, digest: str | None, base: Container[str], target: VersionIndex, deltas: Sequence[VersionIndex]
) -> _Known | None:
    """Return the newest version of which a tensor is here, in the folder if possible; None where it is here of none."""
    was = [(target.number, target.notes.tensors[name][1])]
    was += [(index.number - 1, index.notes.tensors[name][0]) for index in deltas if name in index.notes.tensors]
    for number, one in was:
        if one == digest:
            return _Known(number, None)
    return next((_Known(number, one) for number, one in was if one in base), None)
