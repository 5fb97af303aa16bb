"""Blocks of code on pages, run as a reader would run them."""

import ast
import asyncio
import shlex
from typing import Any

from typer.testing import CliRunner

from aiockpt.tools.cli.main import app
from tests.docs.pages import ROOT, blocks

_ASYNC = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def run_block(block: str, scope: dict[str, Any], name: str = "a page") -> None:
    """Run a block as a notebook does: with ``await`` and ``async with`` where it has them."""
    running = eval(compile(block, name, "exec", flags=_ASYNC), scope)
    if running is not None:
        asyncio.run(running)


def run_page(page: str, scope: dict[str, Any]) -> None:
    """Run the Python blocks of a page below docs/, one after the other, in one scope."""
    for block in blocks((ROOT / "docs" / page).read_text(), "python"):
        run_block(block, scope, page)


def command_lines(block: str) -> list[list[str]]:
    """Return the words of each command of a shell block, comments left out."""
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]


def run_command(words: list[str], expected_status: int = 0) -> str:
    """Run a command ``aiockpt …`` in this process, and return what it prints."""
    assert words[0] == "aiockpt"
    outcome = CliRunner().invoke(app, words[1:], catch_exceptions=False)
    assert outcome.exit_code == expected_status, outcome.output
    return outcome.output
