"""The messages of the product that contain code, read from its source."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import msgspec

import aiockpt

PRODUCT = Path(aiockpt.__file__).parent
_CODE = re.compile(r"`[^`]+`|\b(?:aiockpt|ckpt)\.\w+\(|\b[A-Z]\w+\([\w…]|\b[a-z_]{3,}=[…\[\"'{\dA-Z]")
_TELLS = re.compile(r"\w*Error|refuse\w*|warn\w*|mismatch")
_INSERTED = re.compile(r"…|%[sdg]|%\.\d[fg]")
_SHORT = 8
"""Characters of a text between two inserted ones that say nothing of where it comes from."""


class Message(msgspec.Struct, frozen=True):
    """A text of the source, with … for what is put in, and where it stands."""

    where: str
    text: str

    def is_told_in(self, said: str) -> bool:
        """Return whether *said* contains a longer part of this text."""
        parts = (" ".join(part.split()) for part in _INSERTED.split(self.text))
        return any(len(part) >= _SHORT and part in said for part in parts)


def _text(node: ast.AST) -> str:
    """Return the constant text of an expression; … stands for what is put in."""
    match node:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=values):
            return "".join(_text(value) if isinstance(value, ast.Constant) else "…" for value in values)
        case ast.BinOp(left=left, right=right):
            return (_text(left) or "…") + (_text(right) or "…")
        case ast.IfExp(body=body, orelse=orelse):
            return f"{_text(body)} … {_text(orelse)}"
    return ""


def sources() -> list[Path]:
    """Return the files of the product, its backends among them."""
    return sorted([*PRODUCT.rglob("*.py"), *(PRODUCT / "backends").resolve().rglob("*.py")])


@cache
def messages() -> tuple[Message, ...]:
    """Return each message of the product that contains code, those of the suites for backends left out."""
    return tuple(one for path in sources() if "testing" not in path.parts for one in _messages_of(path))


def _messages_of(path: Path) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            text = " … ".join(filter(None, map(_text, [*node.args, *(each.value for each in node.keywords)])))
            if _TELLS.fullmatch(name) and _CODE.search(text):
                yield Message(f"{path.name}:{node.lineno}", text)
