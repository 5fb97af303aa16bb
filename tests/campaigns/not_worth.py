"""Which changes of the source no test need notice: by rules that look at where a change is, never at which tests there are.

What a rule holds for is counted with its reason, and not tried.
"""

import ast
import re
from collections.abc import Callable, Iterable

Span = tuple[int, int]
Change = tuple[str, Span, bytes]
"""What kind of change, which bytes of the source, and what replaces them."""
Place = tuple[ast.AST, ...]
"""A node, after all nodes that it is in."""

_SHOWN = {"__repr__", "__str__", "statistics"}
_TIME = re.compile(r"(_s|_ns|seconds|timeout|deadline|delay)$")
_WAITS = {"sleep", "move_on_after", "fail_after"}
_ADVICE = {"posix_fadvise", "madvise", "checkpoint", "setpriority", "setswitchinterval"}
_BOUNDARIES = {b"<", b"<=", b">", b">="}


def _name(node: ast.AST) -> str:
    """Return the last part of what *node* calls, names or defines."""
    match node:
        case ast.Call(func=inner) | ast.Await(value=inner) | ast.Expr(value=inner):
            return _name(inner)
        case (
            ast.Attribute(attr=name) | ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name)
        ):
            return name
    return node.arg or "" if isinstance(node, ast.keyword) else ""


def _names(nodes: Iterable[ast.AST]) -> set[str]:
    return {_name(part) for node in nodes for part in ast.walk(node)}


def _shown(place: Place, _: Change) -> bool:
    """Tell whether it only changes what is shown: counters, representations, fields of events; that one is told is more."""
    told = any(isinstance(node, ast.Call) and _name(node) == "emit" for node in place[:-1])
    counted = any(isinstance(node, ast.Expr) and _name(node).startswith("_count_") for node in place)
    return counted or any(_name(node) in _SHOWN for node in place) or (told and not isinstance(place[-1], ast.Expr))


def _log(place: Place, _: Change) -> bool:
    calls = [node.value if isinstance(node, ast.Expr) else node for node in place]
    functions = [node.func for node in calls if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Attribute) and _name(called.value) == "logger" for called in functions)


def _message(place: Place, change: Change) -> bool:
    """Tell whether it is in the text of an error: that it is raised, and its fields, are no text."""
    raised = next((number for number, node in enumerate(place) if isinstance(node, ast.Raise)), None)
    if raised is None or raised + 1 == len(place):
        return False
    return change[0] != "argument dropped" and not any(isinstance(node, ast.keyword) for node in place[raised:])


def _time(place: Place, change: Change) -> bool:
    """Tell whether it is how long something waits, or the very moment at which it stops: no test may measure time."""
    kind, _, new = change
    if kind == "comparison":
        assert isinstance(place[-1], ast.Compare)
        reversed_too = {ast.Lt: b">=", ast.LtE: b">", ast.Gt: b"<=", ast.GtE: b"<"}.get(type(place[-1].ops[0]))
        edge = new.strip() in _BOUNDARIES and new.strip() != reversed_too
        return edge and any(_TIME.search(name) for name in _names([place[-1].left, *place[-1].comparators]))
    if kind == "constant":
        assigned = [target for node in place if isinstance(node, ast.Assign) for target in node.targets]
        holders = [node for node in place if isinstance(node, ast.keyword | ast.Call)]
        return any(_TIME.search(_name(node)) or _name(node) in _WAITS for node in [*assigned, *holders])
    return False


def _cache(place: Place, _: Change) -> bool:
    """Tell whether it is how much a cache of equal answers may hold."""
    return isinstance(place[-1], ast.Compare) and any(name.startswith("_MEMO") for name in _names([place[-1]]))


def _own_check(place: Place, change: Change) -> bool:
    """Tell whether it is in an `assert`, or the `strict=` of a `zip`: they fail only where the code is wrong already."""
    if any(isinstance(node, ast.Assert) for node in place):
        return True
    called = (
        place[-1] if change[0] == "argument dropped" else place[-3] if isinstance(place[-2:][0], ast.keyword) else None
    )
    return isinstance(called, ast.Call) and _name(called) == "zip"


def _advice(place: Place, change: Change) -> bool:
    return change[0].endswith("removed") and _name(place[-1]) in _ADVICE


def _label(place: Place, change: Change) -> bool:
    """Tell whether it is the name of a task or a thread."""
    return change[0] == "argument dropped" and _name(place[-1]) in {"start_soon", "start"}


def _nothing_follows(place: Place, change: Change) -> bool:
    """Tell whether it takes away a `return` of nothing, or a `continue`, where the block ends anyway."""
    match place[-1]:
        case ast.Return(value=None | ast.Constant(value=None)):
            ends: tuple[type[ast.AST], ...] = (ast.FunctionDef, ast.AsyncFunctionDef)
        case ast.Continue():
            ends = (ast.For, ast.AsyncFor, ast.While)
        case _:
            return False
    for outer, inner in zip(reversed(place[:-1]), reversed(place), strict=False):
        blocks = [getattr(outer, part, None) for part in ("body", "orelse", "cases")]
        if not any(block and block[-1] is inner for block in blocks):
            return False
        if isinstance(outer, ends):
            return inner is outer.body[-1]  # type: ignore[attr-defined]
        if not isinstance(outer, ast.If | ast.With | ast.AsyncWith | ast.Match | ast.match_case):
            return False
    return False


RULES: dict[str, Callable[[Place, Change], bool]] = {
    "shown to people: __repr__, statistics(), fields of events": _shown,
    "log text": _log,
    "the text of an error": _message,
    "a time": _time,
    "the size of a cache": _cache,
    "a check of what cannot be": _own_check,
    "advice to the kernel or the event loop": _advice,
    "the name of a task": _label,
    "equal: the block ends there anyway": _nothing_follows,
}


def why_not_worth(place: Place, change: Change) -> str:
    """Return why the change at *place* need not be noticed, or ""."""
    return next((reason for reason, holds in RULES.items() if holds(place, change)), "")
