"""A notebook: cells that a kernel of its own runs one after the other, as Jupyter, Colab and VS Code run them."""

import asyncio
import tempfile
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest

PATIENCE_S = 200
INTERRUPT = """
import os, signal, sys, threading, time

def interrupt_when_waiting():
    "Interrupt the kernel, as its button does, when its cell waits for aiockpt."
    def waits():
        frame = sys._current_frames()[threading.main_thread().ident]
        names = []
        place = frame.f_lasti
        while frame is not None:
            names.append(frame.f_code.co_name)
            frame = frame.f_back
        return place if names[0] == "wait" and {"wait_anyway", "_is_idle_within"} & set(names) else None

    def look():
        # Twice at one place: a thread that only passes may be between a lock and the block that releases it.
        before = None
        while (now := waits()) is None or now != before:
            before = now
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=look, daemon=True).start()
"""


class Notebook:
    """A kernel, and the client that sends cells to it; made by the fixture `notebook`."""

    def __init__(self) -> None:
        # Here, because the other tests of a file run where these are not installed.
        self._format: Any = import_module("nbformat").v4
        self._sockets = tempfile.TemporaryDirectory(prefix="kernel-")  # else they lie in the current folder
        manager = import_module("jupyter_client.manager").AsyncKernelManager(
            transport="ipc", ip=f"{self._sockets.name}/ipc"
        )
        self._client: Any = import_module("nbclient").NotebookClient(
            self._format.new_notebook(), km=manager, timeout=PATIENCE_S, allow_errors=True
        )
        self._client.start_new_kernel()
        self._connect()

    def _connect(self) -> None:
        self._client.start_new_kernel_client()
        self.run(INTERRUPT)

    def run(self, code: str) -> str:
        """Run a cell, and return what it shows."""
        shown, error = self._run(code)
        assert not error, f"{error}\n{shown}"
        return shown

    def fail(self, code: str) -> str:
        """Run a cell that fails, and return the error: its class and its message."""
        shown, error = self._run(code)
        assert error, shown
        return error

    def _run(self, code: str) -> tuple[str, str]:
        cell = self._format.new_code_cell(code)
        self._client.nb.cells.append(cell)
        self._client.execute_cell(cell, len(self._client.nb.cells) - 1)
        outputs: list[Any] = cell.outputs
        errors = [f"{one.ename}: {one.evalue}" for one in outputs if one.output_type == "error"]
        shown = [one.get("text") or one.get("data", {}).get("text/plain", "") for one in outputs]
        return "".join(shown), "".join(errors)

    def restart(self) -> None:
        """Kill the kernel, and begin another one."""
        self._client.kc.stop_channels()
        asyncio.run(self._client.km.restart_kernel(now=True))
        self._connect()

    def close(self) -> None:
        """Kill the kernel."""
        self._client.kc.stop_channels()
        asyncio.run(self._client.km.shutdown_kernel(now=True))
        self._sockets.cleanup()


@pytest.fixture(scope="module")
def notebook() -> Iterator[Notebook]:
    pytest.importorskip("nbclient")
    made = Notebook()
    yield made
    made.close()
