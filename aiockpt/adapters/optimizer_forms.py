"""Forms of optimizer state in checkpoints, and one normal form, `SavedOptimizer`, for all of them.

Programs save an optimizer itself, or the dict that they got from it:

- *by names*: what `aiockpt.adapters.optimizer` writes of an ``Optimizer``; names as in the whole state.
- *by numbers*: ``optimizer.state_dict()``; numbers count the parameters of all groups.
- *by names in the module*: torch's ``get_optimizer_state_dict(model, optimizer)`` (also in ``get_state_dict``), and
- the same *flat*: with ``flatten_optimizer_state_dict=True``.

`read_form` makes a `SavedOptimizer` of any of them, and of such a dict in the state; `pair_up` matches its parameters with
others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from torch.optim import Optimizer

from aiockpt.adapters.kinds import HOW_TO_STEP, NAMES, default_keys, innermost
from aiockpt.adapters.plain_values import same_content
from aiockpt.adapters.stored import is_tensor_node, members_of
from aiockpt.format.names import dotted, join_name, name_within
from aiockpt.format.optimizers import OptimizerNode, OptimizerRow
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node, Path, damaged

Id = str | int
"""What a form calls a parameter."""


class SavedOptimizer(msgspec.Struct, frozen=True):
    """The content of a checkpoint for one optimizer.

    Attributes:
        path: where it is in the checkpoint.
        groups: the values of each group.
        members: the parameters of each group.
        state: of each parameter, by key; tensors as the tree of values writes them.
        is_dict: whether a program saved what it got from its optimizer, and not the optimizer.
        flat: whether that is the flat form.
        class_name, keys: which class saved it, and what its groups have by default; None where unknown.
        rest: state that belongs to no parameter, or None.
        rows: how the tensors of each parameter lay beside it, where it was spread over ranks.
        met: the parameters of it that are matched in the state.
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
    met: set[Id] = msgspec.field(default_factory=set)

    @property
    def by_numbers(self) -> bool:
        """Whether parameters have numbers, and no names."""
        return _has_numbers(self.members)

    def group_of(self) -> dict[Id, int]:
        """Return the number of each parameter's group."""
        return {one: number for number, some in enumerate(self.members) for one in some}

    def value_names(self, ids: Iterable[Id]) -> Iterator[Path]:
        """Yield where in a saved dict the values of the groups and of the parameters *ids* are; nothing for an optimizer."""
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
    """Return what a node at *path* of the checkpoint holds in any of the forms; None where it has another form.

    Raises:
        ManifestError: it is of an optimizer, and not as one is written.
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
    """Return what the node of an ``Optimizer`` holds.

    Args:
        path: where it is in the checkpoint, since its tensors have names and no nodes.

    Raises:
        ManifestError: it was not written for an optimizer.
    """
    try:
        wire = msgspec.convert(node, OptimizerNode)
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
    )


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
    """Return what the node of a dict holds, by its keys; None for another node, or keys that are no text or integers.

    A dict of the state, which may be of a subclass, is its own node here.
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
        if node.get(TAG) in ("tensor", "numpy.ndarray", "stored") and type(node.get("name")) is str:
            yield node["name"]
        for item in node.values():
            yield from tensor_names(item)


def _has_numbers(members: Iterable[Iterable[Id]]) -> bool:
    return any(type(one) is int for some in members for one in some)


def pair_up(members: Sequence[Sequence[Id]], saved: SavedOptimizer, *, flat: bool = False) -> dict[Id, Id]:
    """Return which parameter of *saved* each one here is; those that it does not have are left out.

    Where one side has numbers only, parameters are matched by their place if both sides have the same groups, else not.

    Args:
        members: the parameters of each group here: numbers, or names with a dot between their parts.
        flat: whether here each parameter has a group of its own, because it is the flat form.
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


# The fit of an optimizer here and one of a checkpoint, and what its groups become.
#
# - The values of a group belong to its parameters. A group gets what the groups of its parameters agree on in the
#   checkpoint, however many there were; what they do not agree on is a difference that names two of them. A group without
#   parameters, or without any that the checkpoint has, keeps its own.
# - How a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``) is a property of the job: the running
#   optimizer keeps its own.
# - Another class fits when its groups have the same values by default (Adam, AdamW); else it would fail in its next step,
#   because values are missing. Of a wrapper counts the class inside. DeepSpeed's FusedAdam and DeepSpeedCPUAdam compute
#   what torch's do: they fit unless a group has an option that the other class does not support (``amsgrad=True``).

_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_UNSAID = {"bias_correction": True, "amsgrad": False, "maximize": False}
"""What only some classes of Adam have in their groups, and what the others compute."""


def class_misfit(optimizer: Optimizer, saved: SavedOptimizer) -> str | None:
    """Return the reason why *optimizer* cannot continue with what another class *saved*, or None."""
    cls = type(innermost(optimizer))
    if saved.class_name is not None and saved.class_name in map(class_name, cls.__mro__):
        return None
    present = {key for group in optimizer.param_groups for key in group}
    own = set(default_keys(optimizer))
    return _keys_misfit(cls.__qualname__, own, own | present, _state_keys(optimizer.state.values()), saved)


def dict_misfit(here: SavedOptimizer, saved: SavedOptimizer) -> str | None:
    """Return the reason why the dict of an optimizer *here* cannot continue with what another class *saved*, or None."""
    own = {key for group in here.groups for key in group}
    return _keys_misfit("the dict of an optimizer", own, own, _state_keys(here.state.values()), saved)


def _keys_misfit(
    name: str, own: AbstractSet[str], present: AbstractSet[str], own_state: AbstractSet[str], saved: SavedOptimizer
) -> str | None:
    """Return the reason why an optimizer cannot continue with what another one *saved*, by what they keep; or None.

    Args:
        name: of the optimizer here.
        own: what its groups have by default; the same set as *present* where that is unknown.
        present: what they have now, which a scheduler may have added to.
        own_state: the keys of all state that it has now.
    """
    theirs, their_state = saved.keys, _state_keys(saved.state.values())
    lacks_by_default = theirs is None or own is present
    if theirs is None:
        theirs = frozenset(key for group in saved.groups for key in group)
    own, theirs = own - {*HOW_TO_STEP}, theirs - {*HOW_TO_STEP}
    is_adam = _is_adam(own) and _is_adam(theirs) and _computes_the_same(saved.groups, _UNSAID.keys() - present)
    unsaid = {*_UNSAID, "decoupled_weight_decay"} if is_adam else set()
    # Where the defaults are unknown, a scheduler may have added values, or a newer torch: both must lack some.
    differ = (
        bool(theirs - present - unsaid and own - theirs - unsaid) if lacks_by_default else bool((own ^ theirs) - unsaid)
    )
    # State comes with the first steps and with options: only what each has and the other lacks is evidence.
    if not differ and not (saved.class_name is not None and own_state - their_state and their_state - own_state):
        return None
    there = "an optimizer of another class" if saved.class_name is None else saved.class_name.rpartition(".")[2]
    return f"{name} in the state ({_words(own, own_state)}), {there} in the checkpoint ({_words(theirs, their_state)})"


def _is_adam(keys: AbstractSet[str]) -> bool:
    return keys >= _ADAM and ("bias_correction" in keys or {"amsgrad", "maximize"} <= keys)


def _computes_the_same(groups: Iterable[Mapping[str, Node]], lacking: AbstractSet[str]) -> bool:
    return all(group.get(key, _UNSAID[key]) == _UNSAID[key] for group in groups for key in lacking)


def _state_keys(entries: Iterable[Any]) -> set[str]:
    """Return the keys of the state of all parameters."""
    return {str(key) for entry in entries if isinstance(entry, Mapping) for key in entry}


def _words(keys: Iterable[str], state: Iterable[str]) -> str:
    return f"groups: {', '.join(sorted(keys)) or 'nothing'}; state: {', '.join(sorted(state)) or 'nothing yet'}"


def agreed_values(
    saved: SavedOptimizer, ids: Iterable[Id], same_tensor: Callable[[str], str]
) -> tuple[dict[str, Node], list[str]]:
    """Return what the groups of some parameters agree on in the checkpoint, and as text what they do not.

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
                    f"{key} is {_show(known)} for {first} and {_show(node)} for {speaker} in the checkpoint; "
                    "give them groups of their own",
                )
    return {key: node for key, (node, _) in said.items() if key not in refused}, list(refused.values())


def groups_without_parameters(saved: SavedOptimizer) -> Iterator[dict[str, Node]]:
    """Yield the values of each group that has no parameters, in order: those of one here are found by its place among them.

    Nothing is trained with them; but a scheduler continues from them, and a trainer that makes a group for each kind of
    parameter has an empty one where everything of that kind is frozen.
    """
    for values, members in zip(saved.groups, saved.members, strict=True):
        if not members:
            yield _of_the_optimizer(values)


def _of_the_optimizer(values: Mapping[str, Node]) -> dict[str, Node]:
    return {key: node for key, node in values.items() if key not in HOW_TO_STEP}


def _show(node: Node) -> str:
    return "a tensor" if is_tensor_node(node) else f"{node!r:.40}"
