"""The plain way and the async way in a notebook: in cells, interrupted, run again, and after a restart of the kernel."""

from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks
from tests.notebooks import Notebook, notebook

__all__ = ["notebook"]
pytestmark = pytest.mark.timeout(400)

BEGIN = """
import asyncio
import os
os.chdir({folder!r})
import torch
import aiockpt
from aiockpt.storage.open import open_backend
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.docs.test_code_blocks import make_scope
from tests.gates import Gate
globals().update(make_scope())
"""


@pytest.fixture(autouse=True)
def _begin(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(BEGIN.format(folder=str(tmp_path)))


@pytest.mark.parametrize("page", ["README.md", "docs/guide/notebooks.md"])
def test_a_page_runs_cell_by_cell(page: str, notebook: Notebook) -> None:
    for block in blocks((ROOT / page).read_text(), "python"):
        notebook.run(block)


def test_each_blocking_form_works_in_a_cell(notebook: Notebook) -> None:
    notebook.run("""
with aiockpt.Checkpointer("run") as ckpt:
    assert ckpt.resume(state) == 0
    ckpt.save(1, state).result()
    ckpt.wait()
    ckpt.barrier()
    with ckpt.mutating(), ckpt.hold(1) as held:
        assert held.step == 1
    assert list(ckpt.watch("eval", follow=False))
""")
    notebook.run("""
ckpt = aiockpt.Checkpointer("run")  # and await in the same cell
assert await ckpt.aresume(state) == ckpt.resume(state) == 2
ckpt.close()
""")


def test_a_coroutine_of_a_cell_is_refused_both_ways(notebook: Notebook) -> None:
    notebook.run("ckpt = aiockpt.Checkpointer('run')\nasync def plain(): return ckpt.resume(state)")
    error = notebook.fail("await plain()")
    assert error.startswith("BlockingCallError: resume() would block")
    assert "`await ckpt.aresume(state)`" in error
    assert "`await asyncio.to_thread(function)`" in error
    notebook.run("""
async def other(): return await ckpt.aresume(state), await asyncio.to_thread(lambda: ckpt.resume(state))
assert await other() == (0, 0)
ckpt.close()
""")


def test_an_eager_save_of_a_cell_is_copied_in_the_call(notebook: Notebook) -> None:
    notebook.run("""
large = {"x": torch.ones(6 << 20)}
with aiockpt.Checkpointer("run") as ckpt:
    save = ckpt.save(1, large)
    assert save.snapshotted().done()
    large["x"].zero_()
    ckpt.load(large, save.result().step).result()
assert large["x"].all()
""")


def test_an_interrupted_wait_loses_nothing(notebook: Notebook) -> None:
    notebook.run("""
gate = Gate(open_backend("run"))
ckpt = aiockpt.Checkpointer(gate)
""")
    for wait in ("save.result()", "ckpt.wait()"):
        step = 1 if wait == "save.result()" else 2
        cell = f"gate._open.clear()\nsave = ckpt.save({step}, state)\ninterrupt_when_waiting()\n{wait}"
        assert notebook.fail(cell).startswith("KeyboardInterrupt")
        notebook.run(f"gate.open_up()\nassert save.result().step == ckpt.latest().result() == {step}")


def test_an_interrupted_resume_is_run_again(notebook: Notebook) -> None:
    notebook.run("""
with aiockpt.Checkpointer("run") as ckpt:
    ckpt.save(1, state)
gate = Gate(open_backend("run"), "get")
ckpt = aiockpt.Checkpointer(gate)
""")
    assert notebook.fail("interrupt_when_waiting()\nckpt.resume(state)").startswith("KeyboardInterrupt")
    assert "load again before you use it" in notebook.fail("gate.open_up()\nckpt.save(2, state)")
    notebook.run("gate._open.clear()")
    assert notebook.fail("interrupt_when_waiting()\nckpt.resume(state)").startswith("KeyboardInterrupt")
    notebook.run("gate.open_up()\nassert ckpt.resume(state) == 2\nckpt.close()")


def test_an_interrupted_cell_resumes_from_all_that_it_began(notebook: Notebook) -> None:
    notebook.run("gate = Gate(open_backend('run'))")
    cell = """
ckpt = aiockpt.Checkpointer(gate, every=1)
for step in range(ckpt.resume(state), 4):
    save = ckpt.step(step, state)
"""
    interrupted = notebook.fail(cell + "    interrupt_when_waiting()\n    save.result()")
    assert interrupted.startswith("KeyboardInterrupt")
    notebook.run("import threading\nthreading.Timer(0.5, gate.open_up).start()")
    notebook.run(cell + "ckpt.wait()\nassert save.step == 3")
    notebook.run("""
found = ckpt.steps().result()
assert [(one.step, one.generation, one.parent is None) for one in found] == [
    (3, 1, False), (2, 1, False), (1, 1, False), (0, 1, True),
], found
assert await aiockpt.Checkpointer(gate).aresume(state) == 4
""")


def test_an_interrupted_block_gives_up_and_is_run_again(notebook: Notebook) -> None:
    notebook.run("""
with aiockpt.Checkpointer("run") as ckpt:
    ckpt.save(1, state)
hanging = FaultyBackend(open_backend("run"), [Fault(do="hang", verb="create")])
""")
    cell = "with aiockpt.Checkpointer({}) as ckpt:\n    start = ckpt.resume(state)\n    {}ckpt.save(start, state)"
    assert notebook.fail(cell.format("hanging", "interrupt_when_waiting(); ")).startswith("KeyboardInterrupt")
    notebook.run(cell.format("'run'", "") + "\nassert start == 2")


def test_a_run_goes_on_after_a_restart_of_the_kernel(notebook: Notebook, tmp_path: Path) -> None:
    cell = "ckpt = aiockpt.Checkpointer('run', worker='process')\nstart = ckpt.resume(state)\n"
    notebook.run(cell + "assert start == 0\nckpt.save(7, state).snapshotted().result()")
    notebook.restart()
    notebook.run(BEGIN.format(folder=str(tmp_path)))
    notebook.run(cell + "assert start == 8, start\nckpt.close()")
