"""The advice of loads, of `resume` and of reads, carried out where it is given."""

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import aiockpt
from aiockpt.runtime.world import World
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.engine.test_discovery import Skipping


class Mean:
    """An object with a state of its own."""

    def state_dict(self) -> dict[str, float]:
        return {"mean": 1.0}

    def load_state_dict(self, state: dict[str, float]) -> None:
        assert state == {"mean": 1.0}


class SetsRates:
    """A scheduler of no class of torch's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.rate = optimizer, 0.1

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, float]:
        return {"rate": self.rate}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.rate = state["rate"]


def scheduled(make: Callable[[torch.optim.Optimizer], Any], groups: int = 1) -> dict[str, Any]:
    """Return a state of a model, its optimizer, whose parameters are in one group or two, and their schedule."""
    model = torch.nn.Linear(2, 1)
    owned: Any = list(model.parameters()) if groups == 1 else [{"params": [one]} for one in model.parameters()]
    optimizer = torch.optim.SGD(owned, lr=0.1)
    return {"model": model, "optimizer": optimizer, "schedule": make(optimizer)}


def halves(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def drops(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 3)


def run_two_jobs(place: str, other_place: str) -> None:
    """Save in turns, as two jobs that know nothing of each other, on clocks that skip the pauses between looks."""
    tensor = {"tensor": torch.ones(2)}
    one, other = (aiockpt.Checkpointer(at, world=World(clock=Skipping())) for at in (place, other_place))
    with one, other:
        for job in (one, other):
            job.load(tensor).result()
        for step, job in (
            (10, one),
            (11, other),
            (21, other),
            (20, one),
            (31, other),
            (30, one),
            (41, other),
            (40, one),
        ):
            job.save(step, tensor).result()
            job.wait()


def write_others() -> None:
    """Write a checkpoint of torch.distributed to the folder ``old``, and files of ``torch.save``: one with a class in it."""
    model = torch.nn.Linear(2, 1)
    dcp: Any = import_module("torch.distributed.checkpoint")
    dcp.save({"model": model.state_dict()}, checkpoint_id="old", no_dist=True)
    torch.save({"model": model.state_dict()}, "ckpt.pt")
    torch.save({"model": model.state_dict(), "mean": Mean()}, "unsafe.pt")
    folder = Path("weights")
    folder.mkdir()
    save_file(model.state_dict(), folder / "model.safetensors")


ONE = "state = {'model': state['model']}\n"
IN = "with aiockpt.Checkpointer('new') as new: "
RESUMED = "with aiockpt.Checkpointer('shared') as c: c.resume({'tensor': torch.ones(2)})"
TABLE = [
    Entry("run_two_jobs('shared', 'shared')", r"another job saves to \S+, too: .* or give it (a place of its own)",
          "run_two_jobs('shared', 'own')  # {}"),
    Entry("run_two_jobs('shared', 'shared')\n" + RESUMED, r"if the other is meant, name it: (load\(state, \d+\))",
          "state = {'tensor': torch.ones(2)}\nwith aiockpt.Checkpointer('shared') as c: c.{}.result()"),
    Entry("ckpt.load(state, 9).result()", r"it has: (\d+)", "ckpt.load(state, {}).result()"),
    Entry("ckpt.read(1, 'epoch').result()", r"Load it: (values = .*)", "{}"),
    Entry("ckpt.read(1, 'model.weigth').result()", r"Did you mean ([\w.]+)", "ckpt.read(1, '{}').result()"),
    Entry("ckpt.read(1, 'model').result()", r"\((model\.\w+)", "ckpt.read(1, '{}').result()"),
    Entry("ckpt.read(1, 'model.weight', rows=3).result()", r"rows=\d+: give a slice, such as (slice\(.*?\))",
          "ckpt.read(1, 'model.weight', rows={}).result()"),
    Entry("ckpt.read(1, 'model.weight', rows=slice('a')).result()", r"of integers, such as (slice\(.*?\))",
          "ckpt.read(1, 'model.weight', rows={}).result()"),
    Entry("ckpt.load(state, 1, map={'a': 'b'}, rename=[('a', 'b')])", r"as rules of (rename=)",
          "ckpt.load(state, 1, {}[('a', 'b')]).result()"),
    Entry("ckpt.load(state, 1, best='acc')", r"load\(step=\d+, (best=\S+)\): give one of them",
          "ckpt.load(state, {}).result()"),
    Entry("ckpt.load(state, best='accuracy').result()", r"there are: (\w+)", "ckpt.load(state, best='{}').result()"),
    Entry("ckpt.best('kappa')", r"or (aiockpt\.Best\(.*\))", "{}"),
    Entry("ckpt.resume(state, step=1)", r"in this run: (load\(state, step\))", "step = 1\nckpt.{}.result()"),
    Entry("ckpt.load(state, 'best')", r"(load\(state, best=)'loss'\)", "ckpt.{}'acc').result()"),
    Entry("ckpt.read(1, 'model.weight', rows=slice(0, 2, 2)).result()", r"(give a slice) without a step",
          "ckpt.read(1, 'model.weight', rows=slice(0, 1)).result()  # {}"),
    Entry("bool(ckpt.latest())", r"write `(\.result\(\))`", "ckpt.latest(){}"),
    Entry(IN + "new.resume(state, required=True)", r"leave (required=True) out",
          IN + "assert new.resume(state) == 0  # {}"),
    Entry(IN + "new.resume(state, fork='no_run')", r"(leave fork=… out) to begin anew",
          IN + "assert new.resume(state) == 0  # {}"),
    Entry("in_coroutine(lambda: ckpt.resume(state))", r"write `(await ckpt\.aresume\(state\))`", "{}"),
    Entry("in_coroutine(lambda: ckpt.resume(state))",
          r"run the function that calls it in a thread, `(await [\w.]+)\(function\)`",
          "function = lambda: ckpt.resume(state)\n{}(function)"),
    Entry("thing = {'thing': Mean()}\nckpt.save(3, thing).result()\nckpt.load(thing, 3, only=['thing.mean']).result()",
          r"only=\S+ is a part of '?(\S+?)'?, which loads as a whole",
          "ckpt.load({'thing': Mean()}, 3, only=['{}']).result()"),
    Entry("ckpt.save(3, scheduled(SetsRates)).result()\nckpt.load(scheduled(SetsRates, 2), 3).result()",
          r"is not known; (strict=\S+ False\})", "ckpt.load(scheduled(SetsRates, 2), 3, {}).result()"),
    Entry("ckpt.save(3, scheduled(halves)).result()\nckpt.load(scheduled(drops, 2), 3).result()",
          r"cannot go on with the new ones: .*; or (strict=\S+ False\})",
          "ckpt.load(scheduled(drops, 2), 3, {}).result()"),
    Entry(ONE + "write_others()\n" + IN + "new.load(state, 1, fork='dcp://old').result()",
          r"leave out the (step) \(\d+\)", ONE + IN + "new.resume(state, fork='dcp://old')  # {}"),
    Entry(ONE + "write_others()\n" + IN + "new.load(state, fork='dcp://old', optimizer_state='by_parameter').result()",
          r"make one of it first: (aiockpt convert \S+) RUN",
          "command('{} made')\n" + IN + "new.resume(state, fork='made', optimizer_state='by_parameter')"),
    Entry("write_others()\nnew = aiockpt.Checkpointer('dcp://old')",
          r"distributed.checkpoint is no place for steps. Begin a run from it by (resume\(state, fork=\S+\)), or",
          ONE + IN + "new.{}"),
    Entry("write_others()\nnew = aiockpt.Checkpointer(f'hf://{folder}/weights')",
          r"folder of weights is no place for steps. Begin a run from it by (resume\(state, fork=\S+\)), or",
          ONE + IN + "new.{}"),
    Entry("write_others()\nnew = aiockpt.Checkpointer(f'hf://{folder}/weights')",
          r"a folder of weights is no place.*make a step of it: (aiockpt convert \S+) RUN", "command('{} made')"),
    Entry("write_others()\nwith aiockpt.Checkpointer('old') as old: old.resume(state)",
          r"begins from it by (resume\(state, fork=\S+\));", ONE + IN + "new.{}"),
    Entry("write_others()\nwith aiockpt.Checkpointer('ckpt.pt') as old: old.resume(state)",
          r"From a file of torch.save\(\) `(aiockpt convert \S+ RUN --step) N`",
          "command('{} 1'.replace('RUN', 'made'))"),
    Entry("write_others()\nfork = f'hf://{folder}/weights'\ntwo = {'model': state['model'], 'head': torch.nn.Linear(2, 1)}\n"
          + IN + "new.load(two, fork=fork).result()", r"name it: load\(state, (only=\[\"model\"\]), fork=",
          IN + "new.load(two, {}, fork=fork).result()"),
    Entry("write_others()\ncommand('aiockpt convert unsafe.pt made --step 1')",
          r"give trust_pickle=True \((--trust-pickle)\)", "command('aiockpt convert unsafe.pt made --step 1 {}')"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)


MISFITS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another name": lambda state: {"net": state["model"], "epoch": 1},
    "one more": lambda state: {**state, "ema": torch.nn.Linear(2, 1)},
    "another shape": lambda state: {**state, "model": torch.nn.Linear(3, 1)},
    "another kind": lambda state: {**state, "epoch": "three"},
    "an optimizer": lambda state: {**state, "opt": torch.optim.SGD(state["model"].parameters(), lr=0.1)},
}


@pytest.mark.parametrize("misfit", MISFITS)
@pytest.mark.parametrize("door", ["load", "resume"])
def test_advised_keywords_are_those_of_the_call(names: dict[str, Any], door: str, misfit: str) -> None:
    call = names["ckpt"].resume if door == "resume" else names["ckpt"].load
    state = MISFITS[misfit](names["state"])
    with pytest.raises(aiockpt.CheckpointError) as raised:
        _ = call(state) if door == "resume" else call(state).result()
    advised = set(re.findall(r"\b([a-z_]+)=[\w\[{(\"'…]", str(raised.value)))
    assert advised <= inspect.signature(call).parameters.keys()
