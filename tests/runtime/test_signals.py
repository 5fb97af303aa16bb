"""Signals that end a command: they end its child, too, whenever they come."""

import os
import signal
import subprocess
import tempfile
from typing import Any

import pytest

from aiockpt.runtime import signals
from aiockpt.runtime.signals import ENDING, Interrupted, ended_by_signals, open_child

FOREVER = ["sleep", "1000000"]


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_ends_the_block_and_the_child_and_handlers_are_as_before(number: signal.Signals) -> None:
    before = [signal.getsignal(one) for one in ENDING]
    with tempfile.TemporaryFile() as log:
        with pytest.raises(Interrupted) as caught, ended_by_signals(), open_child(FOREVER, log, os.environ) as child:
            signal.raise_signal(number)
        assert caught.value.number == number
        assert child.returncode == -signal.SIGTERM
    assert [signal.getsignal(one) for one in ENDING] == before


def test_a_signal_that_comes_while_the_child_starts_waits_until_it_can_be_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start: Any = subprocess.Popen

    def interrupted_start(*args: Any, **settings: Any) -> subprocess.Popen[bytes]:
        started.append(start(*args, **settings))
        signal.raise_signal(signal.SIGTERM)
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", interrupted_start)
    with (
        tempfile.TemporaryFile() as log,
        pytest.raises(Interrupted),
        ended_by_signals(),
        open_child(FOREVER, log, os.environ),
    ):
        pytest.fail("the signal was lost")
    assert [child.returncode for child in started] == [-signal.SIGTERM]


def test_a_child_that_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "END_DEADLINE_S", 0)
    deaf = ["sh", "-c", "trap '' TERM; echo; exec sleep 1000000"]

    def interrupt(child: subprocess.Popen[bytes]) -> None:
        assert child.stdout is not None
        child.stdout.readline()  # from here on it does not listen
        raise ZeroDivisionError

    with tempfile.TemporaryFile() as log:
        with pytest.raises(ZeroDivisionError), open_child(deaf, log, os.environ) as child:
            interrupt(child)
        assert child.returncode == -signal.SIGKILL
