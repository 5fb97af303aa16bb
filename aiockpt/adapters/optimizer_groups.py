"""The fit of an optimizer here and one of a checkpoint, and what its groups become.

- What a group says belongs to its parameters. A group takes what the groups of its parameters agree on in the checkpoint,
  however many there were; what they do not agree on is a difference that names two of them. A group without parameters, or
  with none that the checkpoint has, keeps its own.
- How a step is computed (``foreach``, ``fused``, ``capturable``, ``differentiable``) is a property of the job: the running
  optimizer keeps its own.
- Another class fits when its groups have the same values by default (Adam, AdamW); else it would fail in its next step,
  for want of what it never saved. Of a wrapper counts the class inside. DeepSpeed's FusedAdam and DeepSpeedCPUAdam compute
  what torch's do: they fit unless a group says what the other class has no word for (``amsgrad=True``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import msgspec
from torch.optim import Optimizer

from aiockpt.adapters.optimizer_forms import Id, SavedOptimizer
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node

HOW_TO_STEP = ("foreach", "fused", "capturable", "differentiable")
_ADAM = frozenset({"lr", "betas", "eps", "weight_decay"})
_UNSAID = {"bias_correction": True, "amsgrad": False, "maximize": False}
"""What only some classes of Adam have in their groups, and what the others compute."""


def default_keys(optimizer: Optimizer) -> list[str]:
    """Return what each group of *optimizer* has by default, sorted, but for how a step is computed."""
    defaults = getattr(optimizer, "defaults", None)
    if not isinstance(defaults, Mapping):
        return []
    return sorted(key for key in defaults if type(key) is str and key not in HOW_TO_STEP)


def innermost(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that *optimizer* hands all calls on to, as wrappers of accelerate and Lightning do; or itself."""
    inner = [one for one in vars(optimizer).values() if isinstance(one, Optimizer)]
    if len(inner) != 1 or inner[0].state is not optimizer.state or inner[0].param_groups is not optimizer.param_groups:
        return optimizer
    return innermost(inner[0])


def class_misfit(optimizer: Optimizer, saved: SavedOptimizer) -> str | None:
    """Return in words why *optimizer* cannot go on with what another class *saved*, or None."""
    cls = type(innermost(optimizer))
    if saved.class_name is not None and saved.class_name in map(class_name, cls.__mro__):
        return None
    present = {key for group in optimizer.param_groups for key in group}
    own = set(default_keys(optimizer))
    return keys_misfit(cls.__qualname__, own, own | present, state_keys(optimizer.state.values()), saved)


def keys_misfit(
    name: str, own: AbstractSet[str], present: AbstractSet[str], own_state: AbstractSet[str], saved: SavedOptimizer
) -> str | None:
    """Return in words why an optimizer cannot go on with what another one *saved*, by what they keep; or None.

    Args:
        name: of the optimizer here.
        own: what its groups have by default.
        present: what they have now, which a scheduler may have added to.
        own_state: the keys of all state that it has now.
    """
    theirs, their_state = saved.keys, state_keys(saved.state.values())
    lacks_by_default = theirs is None or own is present
    if theirs is None:
        theirs = frozenset(key for group in saved.groups for key in group)
    own, theirs = own - {*HOW_TO_STEP}, theirs - {*HOW_TO_STEP}
    is_adam = _is_adam(own) and _is_adam(theirs) and _computes_the_same(saved.groups, _UNSAID.keys() - present)
    unsaid = {*_UNSAID, "decoupled_weight_decay"} if is_adam else set()
    # Where nobody says what is there by default, a scheduler may have added values, or a newer torch: both must lack some.
    differ = (
        bool(theirs - present - unsaid and own - theirs - unsaid) if lacks_by_default else bool((own ^ theirs) - unsaid)
    )
    # State comes with the first steps and with options: only what each has kept and the other has not tells.
    if not differ and not (saved.class_name is not None and own_state - their_state and their_state - own_state):
        return None
    there = "an optimizer of another class" if saved.class_name is None else saved.class_name.rpartition(".")[2]
    return f"{name} in the state ({_words(own, own_state)}), {there} in the checkpoint ({_words(theirs, their_state)})"


def _is_adam(keys: AbstractSet[str]) -> bool:
    return keys >= _ADAM and ("bias_correction" in keys or {"amsgrad", "maximize"} <= keys)


def _computes_the_same(groups: Iterable[Mapping[str, Node]], lacking: AbstractSet[str]) -> bool:
    return all(group.get(key, _UNSAID[key]) == _UNSAID[key] for group in groups for key in lacking)


def state_keys(entries: Iterable[Any]) -> set[str]:
    """Return the keys of the state of all parameters."""
    return {str(key) for entry in entries if isinstance(entry, Mapping) for key in entry}


def _words(keys: Iterable[str], state: Iterable[str]) -> str:
    return f"groups: {', '.join(sorted(keys)) or 'nothing'}; state: {', '.join(sorted(state)) or 'nothing yet'}"


def agreed_values(
    saved: SavedOptimizer, ids: Iterable[Id], same_tensor: Callable[[str], str]
) -> tuple[dict[str, Node], list[str]]:
    """Return what the groups of some parameters agree on in the checkpoint, and in words what they do not.

    Args:
        ids: the parameters of a group here that the checkpoint has.
        same_tensor: returns what tells a tensor of the checkpoint, whatever its name.
    """
    group_of = saved.group_of()
    speakers: dict[int, Id] = {}
    for one in ids:
        speakers.setdefault(group_of[one], one)
    said: dict[str, tuple[Node, Id]] = {}
    refused: dict[str, str] = {}
    for number, speaker in speakers.items():
        for key, node in saved.groups[number].items():
            if key in HOW_TO_STEP:
                continue
            known, first = said.setdefault(key, (node, speaker))
            if known is not node and _plain(known, same_tensor) != _plain(node, same_tensor):
                refused.setdefault(
                    key,
                    f"{key} is {_show(known)} for {first} and {_show(node)} for {speaker} in the checkpoint; "
                    "give them groups of their own",
                )
    return {key: node for key, (node, _) in said.items() if key not in refused}, list(refused.values())


def groups_without_parameters(saved: SavedOptimizer) -> Iterator[dict[str, Node]]:
    """Yield the values of each group that has no parameters, in order: those of one here are found by its place among them.

    Nothing is trained with them; but a scheduler goes on from them, and a trainer that makes a group for each kind of
    parameter leaves one empty where everything of that kind is frozen.
    """
    for values, members in zip(saved.groups, saved.members, strict=True):
        if not members:
            yield {key: node for key, node in values.items() if key not in HOW_TO_STEP}


def _plain(node: Node, same_tensor: Callable[[str], str]) -> bytes:
    """Return what is equal for equal nodes."""

    def settle(inner: Node) -> Node:
        if type(inner) is list:
            return [settle(item) for item in inner]
        if type(inner) is not dict:
            return inner
        if inner.get(TAG) == "tensor" and type(inner.get("name")) is str:
            return {**inner, "name": same_tensor(inner["name"])}
        return {key: settle(item) for key, item in inner.items()}

    return msgspec.json.encode(settle(node), order="sorted")


def _show(node: Node) -> str:
    return "a tensor" if is_tensor_node(node) else f"{node!r:.40}"
