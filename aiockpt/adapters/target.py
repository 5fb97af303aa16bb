"""How does a checkpoint get back into live objects? Match leaf by leaf, fill tensors in place, then apply the rest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec
import numpy as np

from aiockpt.adapters.index import Index
from aiockpt.adapters.intake import Intake, LoadTarget
from aiockpt.adapters.kinds import kind_of, reads_data
from aiockpt.adapters.leaves import read_plain_leaf
from aiockpt.adapters.loader import Loader
from aiockpt.adapters.module import load_module
from aiockpt.adapters.optimizer_target import load_optimizer, read_node
from aiockpt.adapters.rename import Rename
from aiockpt.adapters.rng import RNG, PerRank, derive_state
from aiockpt.adapters.stored import Stored
from aiockpt.adapters.tensors import may_spread
from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.names import join_name
from aiockpt.state.codecs import DEFAULT_CODECS, CodecRegistry
from aiockpt.state.scalars import field
from aiockpt.state.tree import Decoder, Path, damaged


def open_target(
    state: Mapping[str, Any],
    stored: Stored,
    *,
    only: Sequence[str] | None = None,
    strict: bool = True,
    rename: Rename | None = None,
    codecs: CodecRegistry | None = None,
    judge_unexpected: bool = True,
) -> LoadTarget:
    """Match a state with a checkpoint; nothing of the state changes.

    Args:
        state: as for saving.
        stored: what the checkpoint offers.
        only: top-level keys, or prefixes of names in the state, at a boundary between parts; None is all.
        strict: raise for every difference but top-level keys that only the checkpoint has; False loads what fits.
        rename: from a name in the state to its name in the checkpoint; a mapping renames by its longest prefix.
        codecs: the user's classes; None takes those of `aiockpt.register_codec`.
        judge_unexpected: False when other ranks may hold what this state does not: names that only the checkpoint has
            are no difference then; `LoadTarget.unexpected_claimed` has those that would be one.

    Raises:
        StateMismatchError: they do not fit, and strict; all differences are named.
        UnsupportedStateError: the state has a leaf that cannot be filled, whatever the checkpoint holds.
        ManifestError: the checkpoint's tree of values is damaged.
        UsageError: ``only`` names nothing, or a codec is not registered.
    """
    intake = Intake(
        stored,
        only=only,
        strict=strict,
        rename=rename,
        codecs=codecs or DEFAULT_CODECS,
        judge_unexpected=judge_unexpected,
    )
    _load_container(state, (), Index(state), intake)
    return intake.finish()


def _load_container(mapping: Mapping[str, Any], path: Path, index: Index, intake: Intake) -> None:
    for key, value in mapping.items():
        place = (*path, key)
        match kind_of(value):
            case "module":
                load_module(value, place, index.slice_of, intake)
            case "optimizer":
                load_optimizer(value, place, index, intake)
            case "tensor":
                intake.want(place, value)
            case "container":
                intake.claim(place)
                _load_container(value, place, index, intake)
            case "loader":
                _load_loader(value, place, intake)
            case "per_rank":
                _load_own(value, place, intake)
            case "stateful":
                _load_stateful(value, place, intake)
            case "value":
                _load_value(mapping, key, place, intake)


def _load_stateful(value: Any, path: Path, intake: Intake) -> None:
    node = _find_object(path, "stateful", "it has its own load_state_dict()", intake)
    if node is None:
        return
    template = value.state_dict() if may_spread() else None
    state = intake.value(path, node.get("value"), template, fresh=True)
    intake.later(lambda: value.load_state_dict(state()))


def _find_object(path: Path, kind: str, why_whole: str, intake: Intake) -> dict[str, Any] | None:
    """Return the node of an object of *kind* that is to be loaded; None, and a note, where there is none."""
    if not intake.selects_whole(path, why_whole):
        return None
    node = intake.find_tagged(path, kind)
    if node is None:
        intake.miss(path)
    return node


def _load_own(value: Any, path: Path, intake: Intake) -> None:
    """Load what belongs to this rank: an object, or the value that `per_rank` wraps."""
    if not intake.selects_whole(path, "it belongs to one rank"):
        return
    holder = value.value if isinstance(value, PerRank) else value
    if reads_data(holder) and intake.world_changed:
        intake.miss(
            path, f"{intake.world_changed}; wrap it in aiockpt.Loader(...), so that no sample is lost or repeated"
        )
        return
    found = intake.find_own(path)
    if found is None and isinstance(holder, RNG) and _derive_random(holder, path, intake):
        return
    if found is None:
        intake.miss(path, _why_none(path, intake))
        return
    if kind_of(holder) in ("stateful", "per_rank"):
        state = intake.value(path, found.node)
        intake.later(lambda: holder.load_state_dict(state()), last=isinstance(holder, RNG))
    elif (misfit := intake.misfit(path, holder, found.node)) is not None:
        intake.mismatch(path, misfit)
    else:
        own = intake.value(path, found.node, holder)
        intake.later(lambda: setattr(value, "value", own()))


def _why_none(path: Path, intake: Intake) -> str | None:
    """Say why the checkpoint has nothing for this rank at *path* and what can be done; None where it has for no rank."""
    if intake.find(path) is None:
        return None
    if intake.find_tagged(path, "per_rank") is None:
        return "one value for all ranks in the checkpoint; load it without aiockpt.per_rank(...)"
    changed = f" ({intake.world_changed})" if intake.world_changed else ""
    return f"this rank has none in the checkpoint{changed}; strict=False keeps what is here, only= leaves it out"


def _derive_random(rng: RNG, path: Path, intake: Intake) -> bool:
    """Give a rank that the checkpoint does not know random numbers of its own; return whether there is what from."""
    found = intake.find_of_another(path)
    if found is None:
        return False
    state = intake.value(path, found.node)
    intake.later(lambda: rng.load_state_dict(derive_state(state(), intake.rank, intake.step)), last=True)
    return True


def _load_loader(loader: Loader[Any], path: Path, intake: Intake) -> None:
    node = _find_object(path, "loader", "a loader goes on as a whole", intake)
    if node is None:
        return
    try:
        form, size, readers, shared = (
            node["form"],
            field(node, "size", int),
            field(node, "readers", dict),
            node["shared"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise damaged(path, f"is not the state of a loader ({error!r})") from error
    if (misfit := loader.misfit(form, size, readers)) is not None:
        intake.mismatch(path, misfit)
        return
    needed = [str(rank) for rank in loader.needed_ranks(size)]
    value = intake.value(path, {"shared": shared, "owns": [readers[rank] for rank in needed]})
    intake.pass_over(path)

    def resume() -> None:
        saved = value()
        loader.resume(saved["shared"], saved["owns"])

    intake.later(resume)


def _load_value(mapping: Mapping[str, Any], key: str, path: Path, intake: Intake) -> None:
    if not intake.selects_whole(path, "it is one plain value"):
        return
    found = intake.find(path)
    if found is None:
        intake.miss(path)
    elif not isinstance(mapping, MutableMapping):
        raise UsageError(f"{'.'.join(map(str, path))}: {kind_in_words(mapping)} cannot be filled; give a dict")
    elif (misfit := intake.misfit(path, mapping[key], found.node)) is not None:
        intake.mismatch(path, misfit)
    else:
        value = intake.value(path, found.node, mapping[key])
        intake.later(lambda: _set(mapping, key, value))


def _set(mapping: MutableMapping[str, Any], key: str, value: Callable[[], Any]) -> None:
    """Set one plain value of the user's dict; the user's own dict, list or array is filled, since others may hold it."""
    here, new = mapping[key], value()
    if type(here) is dict and type(new) is dict:
        here.clear()
        here.update(new)
    elif type(here) is list and type(new) is list:
        here[:] = new
    elif not (isinstance(here, np.ndarray) and isinstance(new, np.ndarray) and _same_array(here, new)):
        mapping[key] = new


def _same_array(here: np.ndarray[Any, Any], new: np.ndarray[Any, Any]) -> bool:
    """Return whether the new array is the old one, filled."""
    return here.__array_interface__ == new.__array_interface__


class TensorRef(msgspec.Struct, frozen=True):
    """Where a tensor was, for those who only look: its name in the checkpoint."""

    name: str


def read_tree(stored: Stored) -> Any:
    """Return the values of a whole checkpoint without objects to fill: nested dicts, with `TensorRef` for tensors.

    Modules become their extra values, optimizers their groups and values, other objects what their ``state_dict()`` was;
    what a codec wrote becomes `Opaque`.

    Raises:
        ManifestError: the tree is damaged.
    """
    decoder = Decoder(None, _Onlooker(stored))
    return decoder.decode(stored.values, ())


class _Onlooker:
    """Reads what objects and frameworks wrote without making tensors."""

    def __init__(self, stored: Stored) -> None:
        self._own = stored.per_rank if isinstance(stored.per_rank, Mapping) else {}

    def decode(self, kind: str, node: Mapping[str, Any], path: Path, decoder: Decoder) -> Any:
        match kind:
            case "tensor" | "numpy.ndarray" | "stored":
                return TensorRef(field(node, "name", str))
            case "per_rank":
                return decoder.decode(self._own.get(join_name(path)), path)
            case "stateful":
                return decoder.decode(node["value"], path)
            case "loader":
                return decoder.decode({"shared": node["shared"], "readers": node["readers"]}, path)
            case "module":
                return decoder.decode(node.get("values", {}), path)
            case "optimizer":
                return _read_optimizer(node, path, decoder)
        return read_plain_leaf(kind, node, path, decoder)


def _read_optimizer(node: Mapping[str, Any], path: Path, decoder: Decoder) -> dict[str, Any]:
    saved = read_node(node, path)
    groups = [
        {**{key: decoder.decode(value, path) for key, value in values.items()}, "params": members}
        for values, members in zip(saved.groups, saved.members, strict=True)
    ]
    state = {
        owner: {key: decoder.decode(value, path) for key, value in values.items()}
        for owner, values in saved.values.items()
    }
    return {"groups": groups, "state": state}
