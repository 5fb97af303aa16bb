"""Forms of optimizer state in checkpoints, and `SavedOptimizer`, the normal form for all of them.

Programs save an optimizer itself, or a dict that it returned:

- *by names*: an ``Optimizer``, as `aiockpt.adapters.optimizer` writes it; names as in the whole state.
- *by numbers*: ``optimizer.state_dict()``; numbers count the parameters of all groups.
- *by names in the module*: torch's ``get_optimizer_state_dict(model, optimizer)`` (also in ``get_state_dict``), and
- the same *flat*: with ``flatten_optimizer_state_dict=True``.

`read_form` converts any of them, and such a dict in the state, to a `SavedOptimizer`; `pair_up` matches its parameters
with others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice
from typing import Any, Literal

import msgspec
from torch.optim import Optimizer

from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES, default_keys, innermost
from aiockpt.adapters.plain_values import same_content
from aiockpt.adapters.stored import members_of, show_value
from aiockpt.format.document import described
from aiockpt.format.names import dotted, join_name, name_within
from aiockpt.format.optimizers import OptimizerNode, OptimizerRow
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node, Path, damaged

logger = logging.getLogger("aiockpt")

_SCHEDULE_KEYS = {"last_epoch", "_last_lr"}
"""Keys of the dict that the ``state_dict()`` of a learning rate scheduler returns."""
Id = str | int
"""The identifier of a parameter in a form: a number or a name."""


class SavedOptimizer(msgspec.Struct, frozen=True):
    """The content of a checkpoint for one optimizer.

    Attributes:
        path: its place in the checkpoint.
        groups: the values of each group.
        members: the parameters of each group.
        state: the state of each parameter, by key; tensors as nodes of the tree of values.
        is_dict: whether a program saved a dict from its optimizer, and not the optimizer itself.
        flat: whether the dict has the flat form.
        class_name, keys: the class that was saved, and the default keys of its groups; None where unknown.
        rest: state that belongs to no parameter, or None.
        rows: the relation of the state tensors to each parameter that was spread over ranks.
        names: of the parameters of each group, in a dict that knows them by numbers and has torch's ``param_names``.
        met: the parameters of it that are matched in the state, and None for the rest.
    """

    path: Path
    groups: list[dict[str, Node]]
    members: list[list[Id]]
    state: dict[Id, dict[Id, Node]]
    is_dict: bool
    flat: bool = False
    class_name: str | None = None
    keys: frozenset[str] | None = None
    rest: Node = None
    rows: Mapping[Id, OptimizerRow] = {}
    names: list[list[str]] = []
    met: set[Id | None] = msgspec.field(default_factory=set)

    @property
    def by_numbers(self) -> bool:
        """Whether parameters have numbers, and no names."""
        return _has_numbers(self.members)

    def group_of(self) -> dict[Id, int]:
        """Return the number of each parameter's group."""
        return {one: number for number, some in enumerate(self.members) for one in some}

    def value_names(self, ids: Iterable[Id]) -> Iterator[Path]:
        """Yield the places in a saved dict of the values of the groups and the parameters *ids*; else nothing."""
        if self.is_dict and not self.flat:
            yield ("param_groups",)
            yield from (("state", one) for one in ids)
            if not self.state:
                yield ("state",)
        elif self.is_dict:
            for (one,), group in zip(self.members, self.groups, strict=True):
                yield from ((f"param_groups.{one}.{key}",) for key in group)
            yield from ((f"state.{one}.{key}",) for one in ids for key in self.state.get(one, ()))


def read_form(node: Node, path: Path) -> SavedOptimizer | None:
    """Return the optimizer in a node at *path* of the checkpoint, in any of the forms; None for any other node.

    Raises:
        ManifestError: it is the node of an optimizer, and malformed.
    """
    kind = node.get(TAG) if type(node) is dict else None
    if kind == "optimizer":
        return read_node(node, path)
    if kind == "stateful":
        return read_form(node.get("value"), path)
    items = pairs_of(node)
    if items is None:
        return None
    return _read_dict(items, path) if items.keys() == {"state", "param_groups"} else _read_flat(items, path)


def read_node(node: Mapping[str, Any], path: Path) -> SavedOptimizer:
    """Return the optimizer in the node of an ``Optimizer``.

    Args:
        path: its place in the checkpoint: its tensors have names, but no nodes.

    Raises:
        ManifestError: the node is malformed.
    """
    try:
        wire = msgspec.convert(node, described(OptimizerNode))
        rows = wire.rows()
    except (msgspec.ValidationError, IndexError) as error:
        raise damaged(path, f"is not an optimizer that was ever saved ({error})") from error
    state: dict[Id, dict[Id, Node]] = {}
    places = join_name((*path, "state"))
    for owner, row in rows.items():
        root = f"{places}{owner}" if owner.startswith("[") else f"{places}.{owner}"
        state[owner] = {key: {TAG: "tensor", "name": name_within(root, key)} for key in row.keys}
    for owner, key, value in wire.values:
        state.setdefault(owner, {})[key] = value
    return SavedOptimizer(
        path,
        [group.values for group in wire.groups],
        [list(group.params) for group in wire.groups],
        state,
        is_dict=False,
        class_name=None if wire.class_name is msgspec.UNSET else wire.class_name,
        keys=None if wire.keys is msgspec.UNSET else frozenset(wire.keys),
        rest=None if wire.rest is msgspec.UNSET else wire.rest,
        rows=dict[Id, OptimizerRow](rows.items()),
    )


def _read_dict(items: Mapping[Any, Node], path: Path) -> SavedOptimizer | None:
    """Read ``{"state": …, "param_groups": …}``, by numbers or names."""
    states, groups = pairs_of(items["state"]), items["param_groups"]
    if states is None or type(groups) is not list:
        return None
    values = [pairs_of(group) for group in groups]
    state = {owner: pairs_of(entry) for owner, entry in states.items()}
    members = [group.get("params") for group in values if group is not None]
    ids = [one for some in members if type(some) is list for one in some]
    if None in values or None in state.values() or not all(type(some) is list for some in members):
        return None
    if len(set(map(type, ids))) > 1 or not all(type(one) in (str, int) for one in ids):
        return None
    return SavedOptimizer(
        path,
        [{key: value for key, value in (group or {}).items() if key not in NAMES} for group in values],
        [list(some) for some in members if some is not None],
        {owner: entry for owner, entry in state.items() if entry is not None},
        is_dict=True,
        names=_names_of(values, ids),
    )


def _names_of(groups: Iterable[Mapping[Any, Node] | None], ids: Sequence[Id]) -> list[list[str]]:
    """Return the names of the parameters of each group, where each has one of its own; else nothing."""
    found = [(group or {}).get("param_names") for group in groups]
    if not all(type(some) is list for some in found):
        return []
    flat = [name for some in found for name in some or ()]
    is_whole = len(flat) == len(ids) == len(set(map(str, flat))) and all(type(name) is str for name in flat)
    return [list(some or ()) for some in found] if is_whole else []


def _read_flat(items: Mapping[Any, Node], path: Path) -> SavedOptimizer | None:
    """Read ``state.NAME.KEY`` and ``param_groups.NAME.KEY``: each parameter has a group of its own."""
    groups: dict[str, dict[str, Node]] = {}
    state: dict[Id, dict[Id, Node]] = {}
    for key, value in items.items():
        kind, _, rest = key.partition(".") if type(key) is str else ("", "", "")
        name, dot, last = rest.rpartition(".")
        if not dot or kind not in ("state", "param_groups"):
            return None
        if kind == "state":
            state.setdefault(name, {})[last] = value
        else:
            groups.setdefault(name, {})[last] = value
    if not groups:
        return None
    return SavedOptimizer(path, list(groups.values()), [[name] for name in groups], state, is_dict=True, flat=True)


def pairs_of(node: Node) -> dict[Any, Node] | None:
    """Return the items of the node of a dict; None for another node, or for keys other than text and integers.

    A dict of the state, which may be of a subclass, is accepted as its own node.
    """
    if not isinstance(node, dict):
        return None
    if TAG not in node:
        return node
    items = node.get("items")
    if node[TAG] not in ("dict", "OrderedDict", "defaultdict") or type(items) is not list:
        return None
    pairs = [pair for pair in items if type(pair) is list and len(pair) == 2 and type(pair[0]) in (str, int)]
    return dict(pairs) if len(pairs) == len(items) else None


def is_form(value: object) -> bool:
    """Return whether a value of the state is a dict in one of the forms."""
    if not isinstance(value, dict):
        return False
    if value.keys() == {"state", "param_groups"}:
        return isinstance(value["state"], dict) and isinstance(value["param_groups"], list)
    return bool(value) and all(type(key) is str and key.startswith(("state.", "param_groups.")) for key in value)


class OwnStateDicts(dict[str, Any]):
    """A state with ``state_dict()``s that its maker, an integration, applies to the objects: no user is told of them."""


def warn_of_state_dicts(state: Mapping[str, Any], verb: Literal["save", "load"]) -> None:
    """Warn of dicts that ``state_dict()`` of an optimizer or scheduler returned: a load fills them, and no object."""
    for name, value in state.items() if isinstance(state, Mapping) and not isinstance(state, OwnStateDicts) else ():
        # A dict or a list of them is short; a history of losses is not.
        inner = islice(value.values() if isinstance(value, dict) else value if isinstance(value, list) else (), 8)
        if not any(is_form(one) or (isinstance(one, dict) and one.keys() >= _SCHEDULE_KEYS) for one in (value, *inner)):
            continue
        if verb == "save":
            logger.warning(
                '%s: a state_dict() is a copy of one moment; put the object itself into the state: {"%s": %s}. A dict that '
                "is made once keeps the numbers of that time, and a load fills the dict alone",
                *(name,) * 3,
            )
        else:
            logger.warning(
                '%s: the load has filled a state_dict(), and no object: call %s.load_state_dict(state["%s"]) now, or load '
                'into the object itself: {"%s": %s}',
                *(name,) * 5,
            )


def find_optimizers(node: Node, path: Path = ()) -> Iterator[SavedOptimizer]:
    """Yield each optimizer, in any form, of a tree of values.

    Raises:
        ManifestError: as `read_form`.
    """
    if path and (saved := read_form(node, path)) is not None:
        yield saved
        return
    for key, inner in members_of(node).items():
        yield from find_optimizers(inner, (*path, key))


def tensor_names(node: Node) -> Iterator[str]:
    """Yield the names of the tensors that a node refers to."""
    if type(node) is list:
        for item in node:
            yield from tensor_names(item)
    elif type(node) is dict:
        if node.get(TAG) in ("tensor", "numpy.ndarray", "stored", "numbers") and type(node.get("name")) is str:
            yield node["name"]
        for item in node.values():
            yield from tensor_names(item)


def _has_numbers(members: Iterable[Iterable[Id]]) -> bool:
    return any(type(one) is int for some in members for one in some)


def pair_up(members: Sequence[Sequence[Id]], saved: SavedOptimizer, *, flat: bool = False) -> dict[Id, Id]:
    """Return parameter here → parameter of *saved*; parameters that *saved* lacks are left out.

    Where one side has numbers only, parameters are matched by position, if both sides have groups of the same sizes.

    Args:
        members: the parameters of each group here: numbers, or names with a dot between their parts.
        flat: whether *members* are of the flat form, in which each parameter has a group of its own.
    """
    here = [one for some in members for one in some]
    there = [one for some in saved.members for one in some]
    if saved.by_numbers or _has_numbers(members):
        groups_differ = list(map(len, members)) != list(map(len, saved.members))
        if len(here) != len(there) or (groups_differ and not (flat or saved.flat)):
            return {}
        return dict(zip(here, there, strict=True))
    # A module's state_dict() has keys with dots where the module itself has paths: both are the same name. Names of one
    # side may begin at a module, and those of the other at the top of the state.
    ours = {str(one): one for one in here}
    theirs = {str(one) if saved.is_dict else dotted(str(one)): one for one in there}
    best: dict[Id, Id] = {one: theirs[name] for name, one in ours.items() if name in theirs}
    if len(best) == len(ours):
        return best
    depths = range(1, 1 + max((name.count(".") for name in (*ours, *theirs)), default=0))
    for cut_ours, cut_theirs in (cut for depth in depths for cut in ((depth, 0), (0, depth))):
        known = {_cut(name, cut_theirs): one for name, one in theirs.items()}
        trial = {one: known[cut] for name, one in ours.items() if (cut := _cut(name, cut_ours)) in known}
        if len(trial) > len(best) and len(set(trial.values())) == len(trial):
            best = trial
    return best


def _cut(name: str, depth: int) -> str:
    """Return a name without its first *depth* parts."""
    return name.split(".", depth)[-1] if name.count(".") >= depth else ""


# The fit of an optimizer here with one of a checkpoint, and the resulting values of its groups.
#
# - The values of a group belong to its parameters. A group gets the values on which the saved groups of its parameters
#   agree, however many there were; a value on which they disagree is a difference that names two parameters. A group
#   without parameters, or without any that the checkpoint has, keeps its own values.
# - How a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``) is a property of the job: the running
#   optimizer keeps its own.
# - Another class fits when its groups have the same values by default (Adam, AdamW); else it would fail in its next step,
#   because values are missing. For a wrapper, the inner class counts. DeepSpeed's FusedAdam and DeepSpeedCPUAdam compute
#   the same as torch's: they fit unless a group has an option that the other class does not support (``amsgrad=True``).

_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_UNSAID = {"bias_correction": True, "amsgrad": False, "maximize": False}
"""Keys that only some classes of Adam have in their groups, with the value that the other classes imply."""


def class_misfit(optimizer: Optimizer, saved: SavedOptimizer) -> str | None:
    """Return why *optimizer* cannot continue from the state *saved* by another class, or None."""
    cls = type(innermost(optimizer))
    if saved.class_name is not None and saved.class_name in map(class_name, cls.__mro__):
        return None
    present = {key for group in optimizer.param_groups for key in group}
    own = set(default_keys(optimizer))
    return _keys_misfit(cls.__qualname__, own, own | present, _state_keys(optimizer.state.values()), saved)


def dict_misfit(here: SavedOptimizer, saved: SavedOptimizer) -> str | None:
    """Return why the dict of an optimizer *here* cannot continue from the state *saved* by another class, or None."""
    own = {key for group in here.groups for key in group}
    return _keys_misfit("the dict of an optimizer", own, own, _state_keys(here.state.values()), saved)


def _keys_misfit(
    name: str, own: AbstractSet[str], present: AbstractSet[str], own_state: AbstractSet[str], saved: SavedOptimizer
) -> str | None:
    """Return why an optimizer cannot continue from another one that was *saved*, judged by their keys; or None.

    Args:
        name: of the optimizer here.
        own: the default keys of its groups; the same set as *present* where unknown.
        present: the keys that its groups have now; a scheduler may have added some.
        own_state: the keys of all state that it has now.
    """
    theirs, their_state = saved.keys, _state_keys(saved.state.values())
    lacks_by_default = theirs is None or own is present
    if theirs is None:
        theirs = frozenset(key for group in saved.groups for key in group)
    own, theirs = own - {*HOW_TO_STEP}, theirs - {*HOW_TO_STEP}
    is_adam = _is_adam(own) and _is_adam(theirs) and _computes_the_same(saved.groups, _UNSAID.keys() - present)
    unsaid = {*_UNSAID, "decoupled_weight_decay"} if is_adam else set()
    # Where the defaults are unknown, a scheduler or a newer torch may have added values: both sides must lack some.
    differ = (
        bool(theirs - present - unsaid and own - theirs - unsaid) if lacks_by_default else bool((own ^ theirs) - unsaid)
    )
    # State appears with the first steps and with options: only keys that each has and the other lacks are evidence.
    if not differ and not (saved.class_name is not None and own_state - their_state and their_state - own_state):
        return None
    there = "an optimizer of another class" if saved.class_name is None else saved.class_name.rpartition(".")[2]
    return f"{name} in the state ({_words(own, own_state)}), {there} in the checkpoint ({_words(theirs, their_state)})"


def _is_adam(keys: AbstractSet[str]) -> bool:
    return keys >= _ADAM and ("bias_correction" in keys or {"amsgrad", "maximize"} <= keys)


def _computes_the_same(groups: Iterable[Mapping[str, Node]], lacking: AbstractSet[str]) -> bool:
    return all(group.get(key, _UNSAID[key]) == _UNSAID[key] for group in groups for key in lacking)


def _state_keys(entries: Iterable[Any]) -> set[str]:
    return {str(key) for entry in entries if isinstance(entry, Mapping) for key in entry}


def _words(keys: Iterable[str], state: Iterable[str]) -> str:
    return f"groups: {', '.join(sorted(keys)) or 'nothing'}; state: {', '.join(sorted(state)) or 'nothing yet'}"


def agreed_values(
    saved: SavedOptimizer, ids: Iterable[Id], same_tensor: Callable[[str], str]
) -> tuple[dict[str, Node], list[str]]:
    """Return the values on which the saved groups of some parameters agree; as text, those on which they disagree.

    Args:
        ids: the parameters of a group here that the checkpoint has.
        same_tensor: returns what identifies a tensor of the checkpoint, whatever its name.
    """
    group_of = saved.group_of()
    speakers: dict[int, Id] = {}
    for one in ids:
        speakers.setdefault(group_of[one], one)
    said: dict[str, tuple[Node, Id]] = {}
    refused: dict[str, str] = {}
    for number, speaker in speakers.items():
        for key, node in _of_the_optimizer(saved.groups[number]).items():
            known, first = said.setdefault(key, (node, speaker))
            if known is not node and not same_content(known, node, same_tensor):
                refused.setdefault(
                    key,
                    f"{key} is {show_value(known)} for {first} and {show_value(node)} for {speaker} in the checkpoint; "
                    "give them groups of their own",
                )
    return {key: node for key, (node, _) in said.items() if key not in refused}, list(refused.values())


def groups_without_parameters(saved: SavedOptimizer) -> Iterator[dict[str, Node]]:
    """Yield the values of each group without parameters, in order: such groups are matched by their position.

    No parameter is trained with them, but a scheduler continues from them, and a trainer that makes a group for each kind
    of parameter has an empty one where all parameters of a kind are frozen.
    """
    for values, members in zip(saved.groups, saved.members, strict=True):
        if not members:
            yield _of_the_optimizer(values)


def _of_the_optimizer(values: Mapping[str, Node]) -> dict[str, Node]:
    return {key: node for key, node in values.items() if key not in HOW_TO_STEP}
