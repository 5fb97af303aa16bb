"""One entry of the tables of advice, and how it is carried out."""

import ast
import asyncio
import inspect
import logging
import re
import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

from tests.advice.messages import Message, messages


class Entry(NamedTuple):
    """What is called wrongly, what the message says (its advice is the first group), and how that is run."""

    wrong: str
    says: str
    line: str
    """``{}`` stands for the advice. Both may wait: `wrong` and `line` are run in an event loop where they have ``await``."""

    @property
    def tried(self) -> set[Message]:
        """The messages of the source that this entry provokes, by their text: what is put in may be anything."""
        loose = re.sub(r"\\[wdS][+*]?|(\\.)|\[[^]]*\][+*]?|\.[*+]\??", lambda found: found[1] or ".*", self.says)
        says = re.compile(loose)
        return {one for one in messages() if says.search(one.text)}


def names_of(table: Iterable[Entry]) -> list[str]:
    """Return a short name for each entry."""
    return [entry.says[:30] for entry in table]


def carry_out(entry: Entry, names: dict[str, Any]) -> None:
    """Provoke the message, take the advice out of it, and follow that; fail where either cannot be done."""
    said = _provoke(entry.wrong, names)
    advised = re.search(entry.says, said)
    assert advised, f"says no more: {said}"
    claimed = {one for one in entry.tried if not one.is_told_in(said)}
    assert not claimed, f"another message: {said}"
    _execute(entry.line.replace("{}", advised[1]), names)


def _provoke(code: str, names: dict[str, Any]) -> str:
    """Run *code*, and return what it raised, warned of or logged."""
    told = _Told()
    logger = logging.getLogger("aiockpt")
    logger.addHandler(told)
    raised: BaseException | None = None
    warned: list[warnings.WarningMessage] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warned = caught
            warnings.simplefilter("always")
            _execute(code, names)
    except Exception as error:  # noqa: BLE001  whatever the table's line provokes
        raised = error
    finally:
        logger.removeHandler(told)
    said = [*told.lines, *(str(one.message) for one in warned), *([] if raised is None else [str(raised)])]
    assert said, "nothing was said"
    return " ".join("\n".join(said).split())


def _execute(code: str, names: dict[str, Any]) -> None:
    compiled = compile(code, "<advice>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    waiting = eval(compiled, names)
    if inspect.iscoroutine(waiting):
        asyncio.run(waiting)


class _Told(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
