"""The end of a run: the last step is saved, no failure is lost, no wait is silent, and a second Ctrl-C is obeyed."""

import gc
import logging
import os
import pty
import signal
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.gates import Gate
from tests.run_python import run_python
from tests.small_run import SMALL, Run, steps
from tests.warm.popen import cold

LIMITS = aiockpt.Limits(io=SMALL)


# ---------------------------------------------------------------------- the last step


def train(run: Run, ckpt: aiockpt.Checkpointer, steps: int = 5) -> None:
    for step in range(steps):
        ckpt.step(step, run.state, metrics={"loss": run.train()})


def _raise(run: Run, ckpt: aiockpt.Checkpointer) -> None:
    raise KeyError("the program's own")


AFTER: dict[str, tuple[Callable[[Run, aiockpt.Checkpointer], object], list[int]]] = {
    "nothing": (lambda run, ckpt: None, [4, 3, 0]),
    "a wait": (lambda run, ckpt: ckpt.wait(), [4, 3, 0]),
    "a save of it": (lambda run, ckpt: ckpt.save(4, run.state), [4, 3, 0]),
    "a step of the optimizer": (lambda run, ckpt: run.train(), [3, 0]),
    "an error": (_raise, [3, 0]),
}


@pytest.mark.parametrize("after", AFTER)
def test_the_last_step_is_saved_at_a_clean_end(after: str, tmp_path: Path) -> None:
    run, (work, expected) = Run(1), AFTER[after]
    try:
        with aiockpt.Checkpointer(tmp_path, limits=LIMITS, every=3) as ckpt:
            train(run, ckpt)
            work(run, ckpt)
    except KeyError:
        assert after == "an error"
    assert steps(tmp_path) == expected
    other = Run(2)
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
        found = ckpt.load(other.state).result()
        assert found is not None
        assert ckpt.steps().result()[0].generation == 1
    assert (other.digest() == run.digest()) == (expected[0] == 4)


def test_a_last_step_that_changed_since_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(1)
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS, every=3) as ckpt:
        train(run, ckpt)
        run.train()
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line.startswith("step 4, the last one, is not saved: the state has changed since step(4)")


def test_swapped_weights_are_not_saved_as_last_step(tmp_path: Path) -> None:
    run = Run(1)
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS, every=3) as ckpt:
        train(run, ckpt)
        for parameter in run.state["model"].parameters():
            parameter.data.mul_(0.5)
    assert steps(tmp_path) == [3, 0]


def test_a_last_step_with_too_many_values_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(1)
    run.state["losses"] = [0.5] * 9999
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS, every=3) as ckpt:
        train(run, ckpt)
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line.startswith("step 4, the last one, is not saved: its state has more than 4,000 plain values")


def test_the_last_step_is_not_saved_where_an_option_says_so(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS, every=3, save_last=False) as ckpt:
        train(Run(1), ckpt)
    assert steps(tmp_path) == [3, 0]


def test_the_last_step_is_saved_by_close_and_by_async_blocks(tmp_path: Path) -> None:
    async def trainer() -> None:
        async with aiockpt.Checkpointer(tmp_path / "async", limits=LIMITS, every=3) as ckpt:
            train(Run(1), ckpt)

    anyio.run(trainer)
    assert steps(tmp_path / "async") == [4, 3, 0]
    ckpt = aiockpt.Checkpointer(tmp_path / "closed", limits=LIMITS, every=3)
    train(Run(1), ckpt)
    ckpt.close()
    assert steps(tmp_path / "closed") == [4, 3, 0]


def test_a_step_keeps_no_graph_of_its_metrics() -> None:
    held: list[Any] = []

    class Held(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            ctx.big = torch.zeros(3)
            held.append(weakref.ref(ctx.big))
            return value.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    with aiockpt.Checkpointer("memory://metrics-graph", limits=LIMITS, every=9) as ckpt:
        weight = torch.nn.Parameter(torch.ones(()))
        ckpt.step(1, {"weight": weight}, metrics={"loss": Held.apply(weight)})  # type: ignore[no-untyped-call]
        gc.collect()
        assert held[0]() is None


# ---------------------------------------------------------------------- loads that were not waited for


def test_a_load_that_is_dropped_warns_and_the_end_raises(tmp_path: Path) -> None:
    run = Run(1)
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
        ckpt.save(1, run.state)

    def trainer(error: Exception | None) -> None:
        with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
            with pytest.warns(RuntimeWarning, match="the load of the newest step was never waited for"):
                ckpt.load(Run(2).state)
            if error is not None:
                raise error

    with pytest.raises(aiockpt.UsageError, match="never waited for"):
        trainer(None)
    with pytest.raises(KeyError) as caught:
        trainer(KeyError("its own"))
    assert "never waited for" in caught.value.__notes__[0]


def test_a_load_that_was_cancelled_is_no_forgotten_one(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
        ckpt.save(1, Run(1).state).result()
        ckpt.load(Run(2).state).cancel()


def test_a_future_is_neither_true_nor_false(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
        for future in (ckpt.latest(), ckpt.save(1, Run(1).state), ckpt.save(2, Run(1).state).written()):
            with pytest.raises(aiockpt.UsageError, match=r"write `\.result\(\)`"):
                bool(future)


# ---------------------------------------------------------------------- exit status


FULL = """
import atexit, sys, multiprocessing
import torch
import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.testing.faults import Fault, FaultyBackend

def checkpointer(place, **options):
    full = Fault(do="fail", error=28, verb="upload.write", times=None)
    return aiockpt.Checkpointer(FaultyBackend(LocalBackend(place), [full]), **options)

def main(place):
    ckpt = checkpointer(place)
    return ckpt.save(1, {"w": torch.zeros(3)})
"""

ENDS = {
    "never closed": ("atexit.register(print, 'others too'); main(sys.argv[1])", 1),
    "sys.exit()": ("main(sys.argv[1]); atexit.register(print, 'others too'); sys.exit()", 1),
    "its own error": ("atexit.register(print, 'others too'); main(sys.argv[1]); raise KeyError", 1),
    "dropped": (
        "import gc, time; atexit.register(print, 'others too'); future = main(sys.argv[1])\n"
        "while not future.done(): time.sleep(0.01)\n"
        "del future; [(gc.collect(), time.sleep(0.01)) for _ in range(30)]",
        1,
    ),
    "told by its future": (
        "atexit.register(print, 'others too'); checkpointer(sys.argv[1]).save(1, {'w': torch.zeros(3)}).exception()",
        0,
    ),
    "warned of": (
        "atexit.register(print, 'others too'); ckpt = checkpointer(sys.argv[1], on_error='warn')\n"
        "ckpt.save(1, {'w': torch.zeros(3)})",
        0,
    ),
    "a child by fork": (
        "child = multiprocessing.get_context('fork').Process(target=main, args=sys.argv[1:])\n"
        "child.start(); child.join(); print('others too'); sys.exit(child.exitcode)",
        1,
    ),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_failure_that_nobody_was_told_is_the_exit_status(end: str, tmp_path: Path) -> None:
    lines, status = ENDS[end]
    with cold():  # the status is set by the C library, which a warm program does not end by
        run = run_python("-c", f"{FULL}\n{lines}", tmp_path, status=status)
    assert run.stdout == "others too\n", run.stderr
    told = "BackgroundSaveError: an earlier save failed" if status else "RuntimeWarning: the save of step 1 failed"
    assert run.stderr.count(told) == (end != "told by its future")


def test_a_failure_is_warned_of_once_and_raised_by_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    full = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="fail", error=28, verb="upload.write", times=None)])
    with (
        pytest.warns(RuntimeWarning, match="save of step 1") as warned,
        aiockpt.Checkpointer(full, limits=LIMITS, on_error="warn") as ckpt,
    ):
        ckpt.save(1, Run(1).state)
    assert len(warned) == 1
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


# ---------------------------------------------------------------------- slow ends


SLOW = """
import sys, torch, aiockpt
limits = aiockpt.Limits(io=aiockpt.IO(bandwidth=1 << 20))  # 64 MiB: a minute
with aiockpt.Checkpointer(sys.argv[1], limits=limits) as ckpt:
    ckpt.save(1, {"weight": torch.zeros(16 << 20)})
"""


def test_a_slow_end_is_shown_and_ctrl_c_gives_it_up(tmp_path: Path) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-c", SLOW, str(tmp_path)])
    shown, pressed = b"", False
    while True:
        try:
            shown += os.read(terminal, 4096)
        except OSError:  # the program has ended
            break
        if b"MiB left to write; Ctrl-C now gives it up" in shown and not pressed:
            pressed = True
            os.write(terminal, b"\x03")
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    assert pressed, shown
    assert os.WTERMSIG(status) == signal.SIGINT, shown
    assert b"waiting for the save of step 1 to file://" in shown
    assert steps(tmp_path) == [], "it was over before it could be committed"


def test_a_slow_end_without_a_terminal_is_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gate = Gate(LocalBackend(str(tmp_path)), "put_new", "*")
    ckpt = aiockpt.Checkpointer(gate, limits=LIMITS)
    ckpt.save(1, Run(1).state)
    opens = logging.Handler(logging.WARNING)
    opens.emit = lambda record: gate.open_up()  # type: ignore[method-assign]
    logging.getLogger("aiockpt").addHandler(opens)
    ckpt.close()
    logging.getLogger("aiockpt").removeHandler(opens)
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line.startswith(f"waiting for the save of step 1 to file://{tmp_path}: ")
    assert line.endswith("; Ctrl-C now gives it up")


# ---------------------------------------------------------------------- the first line


RESUMES = """
import sys, torch, aiockpt
place, configure = sys.argv[1:]
exec(configure)
with aiockpt.Checkpointer(place) as ckpt:
    step = ckpt.resume({"w": torch.zeros(3)})
    ckpt.save(step, {"w": torch.zeros(3)}).result()
"""


def test_a_resume_is_one_line_where_logging_is_not_configured(tmp_path: Path) -> None:
    def lines(configure: str) -> list[str]:
        return run_python("-c", RESUMES, tmp_path, configure).stderr.splitlines()

    assert lines("") == [f"aiockpt: nothing in file://{tmp_path}: begins at step 0"]
    (line,) = lines("")
    assert line.startswith(f"aiockpt: resumed step 0 of file://{tmp_path}, saved ")
    assert line.endswith(" ago")
    assert lines("import logging; logging.basicConfig()") == []
    assert lines("import logging; logging.getLogger('aiockpt').setLevel('ERROR')") == []


def test_a_resume_that_is_required_begins_nothing_anew(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS) as ckpt:
        with pytest.raises(aiockpt.StepNotFoundError, match="holds no checkpoint"):
            ckpt.resume(Run(1).state, required=True)
        ckpt.save(3, Run(1).state).result()
        assert ckpt.resume(Run(1).state, required=True) == 4


# ---------------------------------------------------------------------- a metric that no step has


def test_steps_are_kept_while_none_has_the_metric(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules = aiockpt.Retention(last=1, best=aiockpt.Best("acc", mode="max"))
    with aiockpt.Checkpointer(tmp_path, limits=LIMITS, retention=rules) as ckpt:
        for step, accuracy in enumerate((0.5, 0.9, 0.7)):
            ckpt.save(step, Run(1).state, metrics={"accuracy": accuracy}).result()
        ckpt.wait()
        assert [info.step for info in ckpt.steps().result()] == [2, 1, 0]
        ckpt.save(3, Run(1).state, metrics={"acc": 0.8}).result()
        ckpt.save(4, Run(1).state).result()
        ckpt.wait()
        assert [info.step for info in ckpt.steps().result()] == [4, 3]
    (line,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert line.startswith("step 0 is saved without the metric of Retention(best=Best('acc')): it has 'accuracy'")
