"""Every single change of a module that a mistake could have made.

A change replaces one span of the source text, so that all other lines, and the comments, stay as they are. Only bodies of
functions are changed: what a module does when it is imported, annotations, defaults and decorators are not.
"""

import ast
import copy
import difflib
import re
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise

import msgspec

from tests.campaigns.covering import functions
from tests.campaigns.not_worth import Change, Place, Span, why_not_worth

COMPARISONS: dict[type[ast.cmpop], tuple[bytes, tuple[bytes, ...]]] = {
    ast.Lt: (b"<", (b"<=", b">=")),
    ast.LtE: (b"<=", (b"<", b">")),
    ast.Gt: (b">", (b">=", b"<=")),
    ast.GtE: (b">=", (b">", b"<")),
    ast.Eq: (b"==", (b"!=",)),
    ast.NotEq: (b"!=", (b"==",)),
    ast.Is: (b"is", (b"is not",)),
    ast.IsNot: (b"is not", (b"is",)),
    ast.In: (b"in", (b"not in",)),
    ast.NotIn: (b"not in", (b"in",)),
}
CONSTANTS = {"True": b"False", "False": b"True", "0": b"1", "1": b"0"}


class Mutation(msgspec.Struct, frozen=True, kw_only=True):
    """One change.

    Attributes:
        file: whose source it changes, from the root.
        function: the qualified name of the outermost function that it is in.
        lines: the lines of the changed statement (of a compound one, its head), from the function's first.
        line: where it is in the file, from 1.
        kind: of which kind it is.
        key: what names it, as long as its function stays as it is.
        span: the bytes that it replaces.
        new: by what.
        not_worth: why no test need notice, or "".
        statement: its statement (of a compound one, the head), as `ast.unparse` writes it.
        ordinals: which of the equal statements of the function, and which change of its kind in it, each from 0.
    """

    file: str
    function: str
    lines: tuple[int, ...]
    line: int
    kind: str
    key: str
    span: Span
    new: bytes
    not_worth: str
    statement: str
    ordinals: tuple[int, int]

    def apply(self, source: str) -> str:
        """Return the changed source."""
        data = source.encode()
        return (data[: self.span[0]] + self.new + data[self.span[1] :]).decode()

    def diff(self, source: str) -> str:
        """Return the change as a unified diff."""
        before, after = source.splitlines(), self.apply(source).splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.file, self.file, lineterm="", n=2))


class _Text:
    """A source and where its nodes are in it, in bytes."""

    def __init__(self, source: str) -> None:
        self.data = source.encode()
        self._starts = [0]
        for line in self.data.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))

    def span(self, node: ast.AST) -> Span:
        return self._at(node, ""), self._at(node, "end_")

    def _at(self, node: ast.AST, end: str) -> int:
        line: int = getattr(node, f"{end}lineno")
        column: int = getattr(node, f"{end}col_offset")
        return self._starts[line - 1] + column

    def of(self, node: ast.AST) -> bytes:
        first, last = self.span(node)
        return self.data[first:last]


def _statement_changes(text: _Text, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Continue() | ast.Break() | ast.Return():
            yield f"{type(node).__name__.lower()} → pass", text.span(node), b"pass"
        case ast.Raise():
            yield "raise removed", text.span(node), b"pass"
        case ast.Expr(value=ast.Call()):
            yield "call removed", text.span(node), b"pass"
        case ast.Expr(value=ast.Await()):
            yield "awaited call removed", text.span(node), b"pass"
        case ast.Try(finalbody=[first, *_]):
            yield "finally emptied", (text.span(first)[0], text.span(node.finalbody[-1])[1]), b"pass"


def _expression_changes(text: _Text, node: ast.AST) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            gap = (text.span(left)[1], text.span(right)[0])
            old, others = COMPARISONS[type(op)]
            for new in others:
                yield "comparison", gap, text.data[slice(*gap)].replace(old, new, 1)
        case ast.BoolOp(values=values):
            old, new = (rb"\band\b", b"or") if isinstance(node.op, ast.And) else (rb"\bor\b", b"and")
            spans = [text.span(value) for value in values]
            for (_, first), (last, _) in pairwise(spans):
                yield "and/or", (first, last), re.sub(old, new, text.data[first:last], count=1)
        case ast.UnaryOp(op=ast.Not()):
            first = text.span(node)[0]
            yield "not removed", (first, first + len(b"not ")), b""
        case ast.Constant(value=int()) if (old_text := text.of(node).decode()) in CONSTANTS:
            yield "constant", text.span(node), CONSTANTS[old_text]
        case ast.Call(func=ast.Name(id="max" | "min" as name)):
            yield "max/min", text.span(node.func), {"max": b"min", "min": b"max"}[name]
    if isinstance(node, ast.Call):
        for keyword in node.keywords:
            if keyword.arg is not None:
                yield "argument dropped", _with_comma(text, text.span(keyword)), b""


def _with_comma(text: _Text, span: Span) -> Span:
    """Return *span* with the comma that follows it, if one does."""
    comma = re.compile(rb"\s*,\s*").match(text.data, span[1])
    return (span[0], comma.end()) if comma else span


def _places(node: ast.AST, above: Place) -> Iterator[Place]:
    """Yield *node* and all that is in it, each with what it is in; neither annotations, defaults nor decorators."""
    place = (*above, node)
    yield place
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "returns", "args", "decorator_list"} and not isinstance(node, ast.Call):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _places(child, place)


def _changes(text: _Text, place: Place) -> Iterator[Change]:
    yield from _statement_changes(text, place[-1])
    yield from _expression_changes(text, place[-1])


def _head(place: Place) -> range:
    """Return the lines of the statement that *place* is in; of a compound one, those before its body."""
    statement = next(node for node in reversed(place) if isinstance(node, ast.stmt))
    body: list[ast.stmt] = getattr(statement, "body", [])
    last = body[0].lineno - 1 if body else statement.end_lineno or statement.lineno
    return range(statement.lineno, max(last, statement.lineno) + 1)


def _without_body(node: ast.stmt) -> str:
    """Return a statement as text; of a compound one what stands outside its blocks, and its `finally`."""
    head = copy.copy(node)
    for name in ("body", "orelse"):
        if isinstance(getattr(head, name, None), list):
            setattr(head, name, [ast.Pass()] if name == "body" else [])
    for name in ("handlers", "cases"):
        if inner := [copy.copy(one) for one in getattr(head, name, [])]:
            for one in inner:
                one.body = [ast.Pass()]
            setattr(head, name, inner)
    return ast.unparse(head)


def _statements(function: ast.AST) -> dict[ast.stmt, tuple[str, int]]:
    """Return the text of each statement in *function*, and how many equal ones come before it."""
    seen: Counter[str] = Counter()
    found: dict[ast.stmt, tuple[str, int]] = {}
    for node in ast.walk(function):
        if isinstance(node, ast.stmt):
            text = _without_body(node)
            found[node] = (text, seen[text])
            seen[text] += 1
    return found


def mutations(file: str, source: str) -> Iterator[Mutation]:
    """Yield every change of *source*, which is that of *file*."""
    text = _Text(source)
    for function, node, first_line, _ in functions(source):
        seen: dict[str, int] = {}
        statements = _statements(node)
        in_statement: Counter[tuple[ast.stmt, str, bytes]] = Counter()
        for place in _places(node, ()):
            for change in _changes(text, place):
                kind, (first, last), new = change
                what = f"{kind}: {text.data[first:last].decode()} → {new.decode()}"
                seen[what] = seen.get(what, 0) + 1
                statement = next(one for one in reversed(place) if isinstance(one, ast.stmt))
                of_its_kind = (statement, kind, new.strip())
                in_statement[of_its_kind] += 1
                yield Mutation(
                    file=file,
                    function=function,
                    lines=tuple(line - first_line for line in _head(place)),
                    line=text.data.count(b"\n", 0, first) + 1,
                    kind=kind,
                    key=f"{file}::{function}: {what} ({seen[what]})",
                    span=(first, last),
                    new=new,
                    not_worth=why_not_worth(place, change),
                    statement=statements[statement][0],
                    ordinals=(statements[statement][1], in_statement[of_its_kind] - 1),
                )
