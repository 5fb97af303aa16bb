"""Any state, any way to load it, through the public API: what comes back agrees with the model of the guide.

A case draws a state, saves it (eager, lazy or on the device; now and then with a writer process, or a second time after
changes), makes a fresh one of the same structure, and loads in a way that it draws, too. What must hold is in
`tests.simulated.state_model`: bits and types, the program's own objects, ties, `missing`, `unexpected`, `differences`.
"""

import collections
import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import aiockpt
from aiockpt.adapters.tensors import has_memory_of_its_own
from aiockpt.options import Snapshot
from tests.campaigns.campaign import Campaign, Outcomes
from tests.simulated.state_model import at, facts_of, first_difference, identities, layout_of, ties_of
from tests.simulated.states import MAPPINGS, SEQUENCES, Blueprint, build, draw_blueprint

IO = aiockpt.IO(pool_bytes=1 << 20, slab_bytes=16384, block_bytes=4096, read_bytes=16384)
WAIT_S = 250
SNAPSHOTS: list[Snapshot] = ["eager", "eager", "lazy", "device"]
_names = itertools.count()


class Saved:
    """A state that was saved as *step*, and what it was at that moment."""

    def __init__(self, ckpt: aiockpt.Checkpointer, blueprint: Blueprint, seed: int, dice: random.Random) -> None:
        self.blueprint, self.seed = blueprint, seed
        self.ckpt = ckpt
        self.state = build(blueprint, seed)
        snapshot = dice.choice(SNAPSHOTS)
        if dice.random() < 0.2:  # a second save of the same objects, with other values: a warm walk
            ckpt.save(0, self.state, snapshot=snapshot).result(WAIT_S)
            change(self.state, random.Random(seed))
        self.facts, self.ties = facts_of(self.state), ties_of(self.state)
        ckpt.save(1, self.state, snapshot=snapshot).result(WAIT_S)
        assert facts_of(self.state) == self.facts, "the save changed the state"

    def fresh(self) -> dict[str, Any]:
        """Return what a program that has just been started holds."""
        made: dict[str, Any] = build(self.blueprint, self.seed + 1)
        return made

    def check(self, found: Any, wanted: Any = None) -> None:
        """Raise unless *found* is what was saved, or *wanted*."""
        difference = first_difference(self.state if wanted is None else wanted, found)
        assert difference is None, difference


def change(state: dict[str, Any], dice: random.Random) -> None:
    """Change a state as a training step does: tensors in place, values anew, here and there a key more or less."""
    for path, one in list(identities(state)):
        if isinstance(one, torch.Tensor):
            if one.is_contiguous() and one.dim() and one.stride(-1) == 1 and one.dtype != torch.bool:
                one.view(torch.uint8).bitwise_xor_(1)
        elif isinstance(one, torch.nn.Module):
            with torch.no_grad():
                for parameter in one.parameters():
                    parameter.add_(1)
        elif type(one) is dict and path and dice.random() < 0.5:
            one["added"] = dice.random()
        elif type(one) is list and dice.random() < 0.5 and not _has_object(one):
            one.append(dice.random())


def _has_object(value: Any) -> bool:
    """Say whether there is a module or the like in a list, at any depth: its items are asked for by their places then."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return hasattr(value, "state_dict") or any(map(_has_object, items))


# ------------------------------------------------------------------ ways to load


def same_structure(saved: Saved, dice: random.Random) -> None:
    """The state of a program that was started again: all of it comes back, in the objects that the program holds."""
    here = saved.fresh()
    before = [(path, one) for path, one in identities(here) if not _was_replaced_by_right(saved, here, path)]
    result = loaded(saved.ckpt.load(here, strict=dice.random() < 0.7).result(WAIT_S))
    saved.check(here)
    for path, one in before:
        assert at(here, path) is one, f"{path}: the object was replaced"
    assert ties_of(here) == saved.ties, "ties were made or lost"
    assert not result.missing, result.missing
    assert not result.unexpected, result.unexpected


def _was_replaced_by_right(saved: Saved, here: dict[str, Any], path: tuple[Any, ...]) -> bool:
    """Say whether a load may replace the object at *path* of the fresh state *here*: its item is of another kind there.

    Items of sequences are data: what was saved at that place may be of another kind, shape or dtype, or not be there,
    and a tensor whose elements share memory gets a plain one in its place.
    """
    stored: Any = saved.state
    for key in path:
        in_sequence = isinstance(stored, list | tuple | collections.deque)
        if in_sequence and key >= len(stored):
            return True
        stored, here = stored[key], here[key]
        if in_sequence and (_kind(stored) != _kind(here) or _shares_with_itself(here)):
            return True
    return isinstance(here, np.ndarray) and _kind(stored) != _kind(here)


def _shares_with_itself(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not has_memory_of_its_own(value)


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor | np.ndarray):
        return type(value), value.dtype, tuple(value.shape)
    return type(value)


def none_templates(saved: Saved, dice: random.Random) -> None:
    """Where the program holds None, whatever was saved is made, and its tensors lie in memory as they did."""
    here = saved.fresh()
    blueprint, made = saved.blueprint, set[str]()
    for key, item in zip(blueprint.keys, blueprint.items, strict=True):
        if not _has_objects(item) and dice.random() < 0.6:
            here[key] = None
            made.add(key)
    result = loaded(saved.ckpt.load(here).result(WAIT_S))
    saved.check(here)
    for path, one in identities(saved.state):
        if path and path[0] in made and isinstance(one, torch.Tensor) and not any(path in tie for tie in saved.ties):
            wanted, found = layout_of(one), layout_of(at(here, path))
            assert wanted in (None, found), f"{path}: axes lie in memory as {found}, not {wanted}"
    assert not result.missing, result.missing
    assert not result.unexpected, result.unexpected


def _has_objects(blueprint: Blueprint) -> bool:
    return blueprint.kind in ("module", "optimizer", "scheduler") or any(map(_has_objects, blueprint.items))


def holes(saved: Saved, dice: random.Random) -> None:
    """Top-level keys that the program has not got are unexpected, and no difference."""
    here = saved.fresh()
    gone = {key for key in here if dice.random() < 0.4 and not _needed(saved.blueprint, key)}
    for key in gone:
        del here[key]
    result = loaded(saved.ckpt.load(here).result(WAIT_S))
    saved.check(here, {key: one for key, one in saved.state.items() if key not in gone})
    assert not result.missing, result.missing
    tops = {aiockpt_top(name) for name in result.unexpected}
    assert tops <= {escaped(key) for key in gone}, (result.unexpected, gone)


def _needed(blueprint: Blueprint, key: str) -> bool:
    """Say whether the state without *key* would lack the module or tensor that another place refers to."""
    item = blueprint.items[blueprint.keys.index(key)]
    return _refers(item) or any(map(_refers, blueprint.items))


def _refers(blueprint: Blueprint) -> bool:
    return blueprint.kind in ("optimizer", "scheduler", "tied") or any(map(_refers, blueprint.items))


def escaped(key: str) -> str:
    return key.replace("\\", "\\\\").replace(".", "\\.")


def aiockpt_top(name: str) -> str:
    """Return the first part of a dotted name, escaped as it is."""
    out, skip = [], False
    for letter in name:
        if skip or letter == "\\":
            out.append(letter)
            skip = not skip
        elif letter == "." or letter == "[":
            break
        else:
            out.append(letter)
    return "".join(out)


def extras(saved: Saved, dice: random.Random) -> None:
    """Keys that only the program has are missing: refused, nothing changed; with strict=False they stay as they are."""
    here = saved.fresh()
    here["new"] = dice.choice([torch.arange(3.0), torch.nn.Linear(2, 2), 5, {"deep": [1, 2]}, [torch.ones(2)]])
    untouched, new = facts_of(here), facts_of(here["new"])
    refused = saved.ckpt.load(here).exception(WAIT_S)
    assert isinstance(refused, aiockpt.StateMismatchError), "a key that was never saved is no mismatch"
    assert "new" in str(refused), refused
    assert facts_of(here) == untouched, "a load that was refused changed something"
    result = loaded(saved.ckpt.load(here, strict=False).result(WAIT_S))
    assert facts_of(here.pop("new")) == new
    saved.check(here)
    assert result.missing, "nothing is missing"
    assert all(aiockpt_top(name) == "new" for name in result.missing), result.missing
    assert all(told.startswith("new") or "and removed" in told for told in result.differences), result.differences


def only_some(saved: Saved, dice: random.Random) -> None:
    """`only=` loads the keys that it names, and leaves all else as it was."""
    here = saved.fresh()
    if any(map(_refers, saved.blueprint.items)):
        return
    chosen = [key for key in here if dice.random() < 0.5] or list(here)[:1]
    other = {key: facts_of(one) for key, one in here.items() if key not in chosen}
    loaded(saved.ckpt.load(here, only=[escaped(key) for key in chosen]).result(WAIT_S))
    saved.check({key: here[key] for key in chosen}, {key: saved.state[key] for key in chosen})
    for key, facts in other.items():
        assert facts_of(here[key]) == facts, f"{key!r} was not asked for, and changed"


def renamed(saved: Saved, dice: random.Random) -> None:
    """`map=` fills a key of the program from what was saved under another one."""
    key = dice.choice(list(saved.state))
    here = {("other" if one == key else one): value for one, value in saved.fresh().items()}
    loaded(saved.ckpt.load(here, map={"other": escaped(key)}).result(WAIT_S))
    saved.check({(key if one == "other" else one): value for one, value in here.items()})


def mismatched(saved: Saved, dice: random.Random) -> None:
    """What does not fit by type is refused and nothing changes; with strict=False it stays, and all else is loaded."""
    here = saved.fresh()
    fitting = ("none", "numbers", "integers", "recent", "counter")
    names = [
        key
        for key, item in zip(saved.blueprint.keys, saved.blueprint.items, strict=True)
        if item.kind not in MAPPINGS and item.kind not in fitting and not _refers(item) and not _has_objects(item)
    ]
    if not names or any(map(_refers, saved.blueprint.items)):
        return
    key = dice.choice(names)
    item = saved.blueprint.items[saved.blueprint.keys.index(key)]
    other: Any = torch.full((2, 9), 5.0)  # a shape that no tensor of a blueprint has
    if item.kind in SEQUENCES or (item.kind == "tensor" and dice.random() < 0.5):
        other = "text"
    here[key] = other
    untouched = facts_of(here)
    refused = saved.ckpt.load(here).exception(WAIT_S)
    assert isinstance(refused, aiockpt.StateMismatchError), f"{key!r}: {other!r} was filled from {saved.state[key]!r}"
    assert escaped(key) in str(refused), refused
    assert facts_of(here) == untouched, "a load that was refused changed something"
    result = loaded(saved.ckpt.load(here, strict=False).result(WAIT_S))
    assert facts_of(here[key]) == facts_of(other), f"{key!r} changed"
    saved.check(here, {**saved.state, key: other})
    assert any(difference.startswith(escaped(key)) for difference in result.differences), result.differences


WAYS: list[Callable[[Saved, random.Random], None]] = [
    same_structure, same_structure, none_templates, holes, extras, only_some, renamed, mismatched,
]  # fmt: skip


def loaded(result: aiockpt.LoadResult | None) -> aiockpt.LoadResult:
    assert result is not None, "there is nothing to load"
    assert result.step == 1, result
    return result


def case(seed: int) -> Outcomes:
    """Look at one state, one way to load it."""
    dice = random.Random(seed)
    blueprint = draw_blueprint(dice)
    way = dice.choice(WAYS)
    worker = "process" if dice.random() < 0.002 else "thread"
    place = f"memory://states-{next(_names)}" if worker == "thread" else f"shm://states-{next(_names)}-{seed}"
    with aiockpt.Checkpointer(place, limits=aiockpt.Limits(io=IO), worker=worker) as ckpt:  # type: ignore[arg-type]
        try:
            way(Saved(ckpt, blueprint, seed, dice), dice)
        finally:
            for step in (0, 1):
                if worker == "process":
                    ckpt.delete(step)
    if seed % 500 == 0:
        gc.collect()
    return Counter({way.__name__.replace("_", " "): 1})


CAMPAIGN = Campaign(name="states", counts="states", prepare=lambda: case, smoke_count=80)
