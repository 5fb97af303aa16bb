"""The names that the lines of the tables use."""

import asyncio
import io
import shlex
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.tools.cli.main import main


def in_coroutine(call: Callable[[], object]) -> None:
    """Run *call* in a coroutine, whose event loop it may not block."""

    async def run() -> None:
        call()

    asyncio.run(run())


class CommandFailedError(Exception):
    """What a command wrote to its standard error before it ended with another status than 0."""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Return a function that runs a line for a shell that begins with ``aiockpt``, and returns what it printed."""

    def run(line: str) -> str:
        assert line.startswith("aiockpt ")
        out, err = io.StringIO(), io.StringIO()
        monkeypatch.setattr("sys.argv", shlex.split(line, comments=True))
        with pytest.raises(SystemExit) as ended, redirect_stdout(out), redirect_stderr(err):
            main()
        if ended.value.code:
            raise CommandFailedError(err.getvalue())
        return out.getvalue()

    return run


@pytest.fixture
def names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, command: Callable[[str], str]
) -> Iterator[dict[str, Any]]:
    """Yield names for the lines: those of the table's module, a run with steps 1 and 2, and a state that fits them."""
    monkeypatch.chdir(tmp_path)  # a line may name a folder as a user would
    state = {"model": torch.nn.Linear(2, 1), "epoch": 3}
    with aiockpt.Checkpointer("run") as ckpt:
        for step in (1, 2):
            ckpt.save(step, state, metrics={"acc": step / 10}).result()
        yield {
            **vars(request.module), "ckpt": ckpt, "state": state, "folder": tmp_path, "torch": torch, "aiockpt": aiockpt,
            "monkeypatch": monkeypatch, "command": command, "asyncio": asyncio, "in_coroutine": in_coroutine,
            "fixture": request.getfixturevalue,
        }  # fmt: skip
