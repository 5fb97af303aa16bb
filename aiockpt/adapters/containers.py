"""What does a dict, list or tuple that is loaded part by part need besides its parts?

- A plain value that only the state has is removed, and told; one that only the checkpoint has is added. So the plain part
  of it is afterwards what was saved, as it is for a dict of plain values. (Where other ranks may have it, none is added.)
- Tensors and objects are asked for by name: they are never removed, and never made.
- The items of a tuple cannot be set: where one is another afterwards, another tuple takes its place.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from aiockpt.adapters.kinds import kind_of
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.plain_values import DICTS, name_of_node, removed
from aiockpt.adapters.stored import members_of, metadata_in
from aiockpt.format.names import join_name
from aiockpt.state.tree import Path, set_metadata

Value = Callable[[], Any]


def set_part(container: Any, key: Any, value: Value) -> None:
    """Set one part of a container, unless what is there was filled."""
    new = value()
    if container[key] is not new:
        container[key] = new


def set_tuple(container: Any, key: Any, items: list[Any]) -> None:
    """Put another tuple in the place of one, where an item is another one now."""
    if any(item is not new for item, new in zip(container[key], items, strict=True)):
        container[key] = tuple(items)


def keys_only_here(container: Mapping[Any, Any], path: Path, matcher: Matcher) -> list[Any]:
    """Return the keys of the plain values that the checkpoint's dict at *path* does not have."""
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return []
    plain = (key for key, value in container.items() if kind_of(value) == "value")
    return [key for key in plain if matcher.find((*path, key)) is None and not matcher.stays((*path, key))]


def settle_dict(container: MutableMapping[Any, Any], gone: list[Any], path: Path, matcher: Matcher) -> None:
    """Make the plain part of the dict at *path* what was saved, once its parts are asked for.

    Args:
        gone: `keys_only_here`.
    """
    found = matcher.find(path)
    if found is None or name_of_node(found.node) not in DICTS or not matcher.selects(path):
        return
    if (problem := matcher.hold(container, found.node, path)) is not None:
        matcher.problem(join_name(path), problem)
        return
    if gone:
        matcher.tell(removed(path, gone))
        matcher.later(lambda: [container.pop(key, None) for key in gone])
    if type(container) is OrderedDict and (told := metadata_in(found.node)) is not None:
        metadata = matcher.value((*path, "_metadata"), told)
        matcher.later(lambda: set_metadata(container, metadata()))
    order = list(members_of(found.node))
    matcher.complete(path, found.node, set(container), lambda key, value: container.__setitem__(key, value()))
    matcher.later(lambda: _put_in_order(container, order), last=True)


def _put_in_order(container: MutableMapping[Any, Any], order: list[Any]) -> None:
    if list(container) != order and set(container) == set(order):
        entries = {key: container[key] for key in order}
        container.clear()
        container.update(entries)
