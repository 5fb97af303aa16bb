"""Loading of composite tensors: filled part by part in place where they are composed as the saved ones, else made anew.

A subclass must be of the saved class with the same facts (the size of its blocks, its dtype …); then its parts are filled
in place. The scales of a quantised tensor and the indices of a sparse one are part of the value, and change.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import torch

from aiockpt.adapters.composites import (
    FACTS,
    SHOWN_FACTS,
    SPREAD,
    SUBCLASS,
    CompositeNode,
    Parts,
    box_key,
    class_to_make,
    decompose,
    in_words,
    is_composite_node,
    make,
    read_written,
    replace_content,
    write_facts,
)
from aiockpt.adapters.local_shards import FlatRange
from aiockpt.adapters.matcher import Matcher
from aiockpt.adapters.stored import is_tensor_node
from aiockpt.adapters.tensor_kinds import tensor_kind
from aiockpt.adapters.tensors import dtype_code, lies_at_address
from aiockpt.adapters.value_requests import Thunk
from aiockpt.errors import StateMismatchError
from aiockpt.format.names import join_name
from aiockpt.state.codecs import class_name
from aiockpt.state.tree import TAG, Node, Path, damaged


def ask_composite(path: Path, live: Any, node: Node, matcher: Matcher) -> Thunk | None:
    """Request the parts of the composite tensor of *node*; return a function that, in a step, returns *live*, filled.

    Args:
        live: the present value at *path*; where it is not a tensor, a new one is made.

    Returns:
        None where it does not fit, which is noted.
    """
    if not isinstance(live, torch.Tensor):
        return matcher.values.request(path, node)
    kind = tensor_kind(live)
    if not kind.in_parts or kind.is_spread is not (node[TAG] == SPREAD):
        matcher.mismatch(path, f"{_here(live)} in the state, {_there(node)} in the checkpoint")
        return None
    if kind.is_spread:
        return _ask_spread(path, live, node, matcher)
    return _ask_one(path, live, read_written(node, path), matcher)


def ask_value(path: Path, live: Any, node: Node, matcher: Matcher, like: torch.Tensor) -> Thunk:
    """Request a plain value, or a composite tensor among plain values; return a function that returns it in a step.

    Args:
        like: the tensor that the value is state of: a new tensor that is spread over ranks is spread like it.
    """
    if is_composite_node(node) and isinstance(live, torch.Tensor):
        return ask_composite(path, live, node, matcher) or (lambda: live)
    if is_composite_node(node) and node[TAG] == SPREAD and tensor_kind(like).mesh is not None:
        return _ask_new_spread(path, like, node, matcher) or (lambda: live)
    # As it was saved, type included: the present type may not be the final one (LBFGS's step size).
    return matcher.values.fresh(path, node, live)


def load_tensor(
    path: Path,
    live: torch.Tensor,
    node: Node,
    matcher: Matcher,
    flat: FlatRange | None = None,
    *,
    stored: str | None = None,
) -> None:
    """Fill a tensor with a name of its own, ordinary or composite, from the checkpoint.

    Args:
        node: the stored value there, or ``UNSET``; an ordinary tensor is looked up by its name.
        flat, stored: as for `Matcher.want`.
    """
    if node is not msgspec.UNSET and not is_tensor_node(node):
        _load_composite(path, live, node, matcher)
        matcher.skip(stored or matcher.stored_name(path))
    elif not tensor_kind(live).in_parts:
        matcher.want(path, live, flat, stored=stored)
    elif matcher.stored.facts(stored or matcher.stored_name(path)) is not None:
        matcher.mismatch(path, f"{in_words(live)} in the state, an ordinary tensor in the checkpoint")
    elif not matcher.stays(path, live, stored=stored):
        matcher.miss(path)


def _load_composite(path: Path, live: torch.Tensor, node: Node, matcher: Matcher) -> None:
    if not matcher.selects(path):
        return
    if is_composite_node(node):
        filled = ask_composite(path, live, node, matcher)
    elif type(node) is dict and node.get(TAG) == "codec":
        filled = _ask_codec(path, live, node, matcher)
    else:
        filled = None
        matcher.mismatch(path, f"{_here(live)} in the state, another value in the checkpoint")
    if filled is not None:
        matcher.later(filled)


def _ask_codec(path: Path, live: torch.Tensor, node: Node, matcher: Matcher) -> Thunk:
    value = matcher.values.fresh(path, node)

    def replace() -> None:
        made = value()
        if not isinstance(made, torch.Tensor) or not replace_content(live, made):
            raise StateMismatchError(
                matcher.stored.where,
                [f"{join_name(path)}: what the codec {node['name']!r} made cannot take the place of {in_words(live)}"],
                "The state is partly overwritten: build it anew.",
            )

    return replace


def _here(live: torch.Tensor) -> str:
    return in_words(live) if tensor_kind(live).in_parts else f"an ordinary tensor ({live.dtype})"


def _there(node: Mapping[str, Any]) -> str:
    if node[TAG] == SPREAD:
        return "one in parts of several ranks"
    return f"one of {node.get('class')} ({node.get('kind')}, {node.get('dtype')})"


def _find_part(path: Path, like: Any, node: Mapping[str, Any], matcher: Matcher) -> str | None:
    """Return the key of the stored part with this rank's elements of *like*; None, which is noted, without one."""
    # The parts of other ranks are not used here, and are no difference.
    matcher.pass_over(path)
    key, parts = box_key(tensor_kind(like).boxes(like, path)), node.get("parts")
    if type(parts) is not dict or not all(map(is_composite_node, parts.values())):
        raise damaged(path, "is not a tensor in parts that was ever saved")
    if key in parts and tuple(node.get("shape", ())) == tuple(like.shape):
        return key
    matcher.problem(
        join_name(path),
        f"elements {key} of shape {tuple(like.shape)} on this rank, but the checkpoint has the parts "
        f"{', '.join(sorted(parts)) or 'of no rank'}: a composite tensor cannot be resharded; load it with the "
        "sharding that it was saved with",
    )
    return None


def _ask_new_spread(path: Path, like: Any, node: Mapping[str, Any], matcher: Matcher) -> Thunk | None:
    kind = tensor_kind(like)
    key = _find_part(path, like, node, matcher) if kind.boxes(like, path) else None
    if key is None or (mesh := kind.mesh) is None:
        return None
    local = matcher.values.request((*path, f"@{key}"), node["parts"][key])
    return lambda: mesh.wrap(local(), like)


def _ask_spread(path: Path, live: Any, node: Mapping[str, Any], matcher: Matcher) -> Thunk | None:
    kind = tensor_kind(live)
    if not kind.boxes(live, path):
        matcher.pass_over(path)
        return lambda: live
    key = _find_part(path, live, node, matcher)
    filled = key and ask_composite((*path, f"@{key}"), kind.local(live), node["parts"][key], matcher)
    if not filled:
        return None

    def fill() -> Any:
        filled()
        return live

    return fill


def _ask_one(path: Path, live: Any, written: CompositeNode, matcher: Matcher) -> Thunk | None:
    here = decompose(live)
    problem = _misfit(live, here, written, path, matcher)
    if problem is not None:
        matcher.mismatch(path, problem)
        return None
    matcher.rewrites(path)
    if here.kind == SUBCLASS and _fill_in_place(path, here, written, matcher):
        return lambda: live
    made = _ask_new(path, live, here, written, matcher)

    def replace() -> Any:
        if not replace_content(live, made()):
            raise StateMismatchError(
                matcher.stored.where,
                [f"{join_name(path)}: {in_words(live)} is referenced by other objects and cannot become the saved one"],
                "The state is partly overwritten: build it anew, without views or gradients of this tensor.",
            )
        return live

    return replace


def ask_new(path: Path, live: torch.Tensor, node: Node, matcher: Matcher) -> Thunk | None:
    """Request a new tensor on the CPU, of the class of *live*, which is not changed; None as in `ask_composite`."""
    kind = tensor_kind(live)
    if not kind.in_parts or kind.is_spread or node[TAG] == SPREAD:
        matcher.mismatch(path, f"{_here(live)} in the state, {_there(node)} in the checkpoint")
        return None
    written, here = read_written(node, path), decompose(live)
    problem = _misfit(live, here, written, path, matcher)
    if problem is not None:
        matcher.mismatch(path, problem)
        return None
    return _ask_new(path, torch.empty(0), here, written, matcher, type(live))


def _ask_new(
    path: Path, like: torch.Tensor, here: Parts, written: CompositeNode, matcher: Matcher, cls: type | None = None
) -> Thunk:
    cls = class_to_make(written, path, cls or type(like))
    tensors = {key: _ask_part((*path, key), node, like, matcher) for key, node in written.tensors.items()}
    facts: Thunk = (
        (lambda: here.facts) if written.shown is not None else matcher.values.request((*path, FACTS), written.facts)
    )
    return lambda: make(written, path, cls, {key: part() for key, part in tensors.items()}, facts())


def _misfit(live: torch.Tensor, here: Parts, written: CompositeNode, path: Path, matcher: Matcher) -> str | None:
    there = f"{written.cls} ({written.dtype}, shape {written.shape})"
    mine = f"{class_name(type(live))} ({live.dtype}, shape {tuple(live.shape)})"
    if (here.kind, tuple(live.shape), live.dtype) != (written.kind, written.shape, written.dtype):
        return f"{mine} in the state, {there} in the checkpoint"
    if here.kind != SUBCLASS:
        return None
    if here.cls != written.cls:
        return f"{mine} in the state, {there} in the checkpoint"
    known = write_facts(here, path, matcher.values.encoder())
    saved = {SHOWN_FACTS: written.shown} if written.shown is not None else {FACTS: written.facts}
    return None if known == saved else f"{mine} knows {here.facts!r}, and other things in the checkpoint: {saved}"


def _fill_in_place(path: Path, here: Parts, written: CompositeNode, matcher: Matcher) -> bool:
    """Request that the parts be filled in place, if all of them fit; return whether they do."""
    if here.tensors.keys() != written.tensors.keys():
        return False
    nested = {key for key, node in written.tensors.items() if is_composite_node(node)}
    for key, inner in here.tensors.items():
        if key in nested:
            if not tensor_kind(inner).in_parts:
                return False
            continue
        facts = matcher.stored.facts(written.tensors[key]["name"])
        if not lies_at_address(inner) or facts != (dtype_code(inner.dtype), tuple(inner.shape)):
            return False
    for key, inner in here.tensors.items():
        if key not in nested:
            matcher.want((*path, key), inner, stored=written.tensors[key]["name"])
        else:
            filled = ask_composite((*path, key), inner, written.tensors[key], matcher)
            if filled is not None:
                matcher.later(filled)
    return True


def _ask_part(path: Path, node: Node, like: torch.Tensor, matcher: Matcher) -> Thunk:
    if is_composite_node(node):
        return matcher.values.request(path, node)
    tensor = matcher.fill(path, node["name"], None, like.device)
    return lambda: tensor
