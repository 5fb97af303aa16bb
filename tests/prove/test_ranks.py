"""Proofs under torchrun: each rank's parts, and a resume on another number of ranks."""

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from aiockpt.prove.compare import Findings, compare_reshaped
from aiockpt.prove.records import AnyRecord, Begun, Labelled, LoadDone, Stepped, View
from aiockpt.prove.starts import Start
from tests.prove.test_command import left_behind, prove

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


def script(ranks: int) -> list[str]:
    return [*TORCHRUN, f"--nproc-per-node={ranks}", "-m", "tests.prove.ranks_script"]


def certificate(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "c.json").read_text())
    return found


@pytest.mark.timeout(400)
def test_two_ranks_of_which_one_kills_itself_in_a_save_go_on_bit_by_bit(tmp_path: Path) -> None:
    done = prove(tmp_path, "--kills", "1", "--seed", "2", "--json", "c.json", "--", *script(2))
    assert done.returncode == 0, done.stdout + done.stderr
    found = certificate(tmp_path)
    assert {start["world_size"] for start in found["starts"]} == {2}
    rows = {row["row"]: row for row in found["rows"]}
    assert (
        rows["optimizer exp_avg"]["outcome"]
        == rows["loader"]["outcome"]
        == rows["training: data"]["outcome"]
        == "equal"
    )
    assert not left_behind(tmp_path)


@pytest.mark.timeout(400)
def test_a_resume_on_one_rank_has_the_same_tensors_and_samples_and_close_losses(tmp_path: Path) -> None:
    resume = shlex.join(script(1))
    done = prove(tmp_path, "--kills", "1", "--resume-with", resume, "--json", "c.json", "--", *script(2))
    assert done.returncode == 0, done.stdout + done.stderr
    found = certificate(tmp_path)
    assert [start["world_size"] for start in found["starts"]] == [2, 2, 1, 1]
    rows = {row["row"]: row["outcome"] for row in found["rows"]}
    assert rows["model"] == rows["optimizer exp_avg"] == rows["training: data"] == "equal"
    assert rows["training: loss"] == "close"
    assert "equal in all that is loaded, and close in its losses" in found["reason"]


def start(name: str, world_size: int, samples: list[list[int]], losses: list[float], load: View | None) -> Start:
    """Return a start of which each rank was given *samples* [step][rank], with the *losses* of the steps."""
    ranks: dict[int, list[AnyRecord]] = {}
    for rank in range(world_size):
        view = View(
            {"w": "x", "epoch": "3"}, {"w": "tensor", "epoch": "value"}, {"w": ("F32 (2,)", [(f"b{rank}", "01")])}
        )
        told: list[AnyRecord] = [Begun(rank=rank, world_size=world_size, urls=[])]
        if load is not None:
            told.append(LoadDone(label=0, step=0, fits=True, withheld=False, state=load))
        else:
            told.append(Labelled(step=0, saved=True, state=view, metrics={}))
        for number, (of_ranks, loss) in enumerate(zip(samples, losses, strict=True)):
            told.append(stepped(number, f"{of_ranks[rank]:016x}", 4 // world_size, loss))
        ranks[rank] = told
    return Start(name, ranks, 1.0)


def stepped(label: int, samples: str, rows: int, loss: float) -> Stepped:
    return Stepped(
        label=label, count=1, optimizer="SGD", settings={}, slots={}, weights={}, gradients={}, names={}, inputs=["i"],
        samples=samples, rows=rows, random=[], losses=[repr(loss)],
    )  # fmt: skip


def whole(digest: str) -> View:
    return View({"w": "y", "epoch": "3"}, {"w": "tensor", "epoch": "value"}, {"w": ("F32 (2,)", [("all", digest)])})


WHOLE, OTHER = whole("02"), whole("03")
"""What one rank has of what two saved: their parts together, and something else."""
STRAIGHT = start("straight", 2, [[1, 2], [3, 4]], [1.0, 0.5], load=None)


def compare(resumed: Start) -> dict[str, int]:
    """Return how often each row differs."""
    findings = Findings()
    compare_reshaped(STRAIGHT, resumed, [STRAIGHT], findings, None, to_the_end=True)
    return {name: row.differing for name, row in findings.rows.items()}


def test_on_other_ranks_samples_may_be_dealt_anew_and_losses_are_close() -> None:
    one = start("resumed", 1, [[3], [7]], [1.0, 0.5000001], load=WHOLE)
    assert compare(one) == {"w": 0, "epoch": 0, "training: data": 0, "training: loss": 0}


def test_on_other_ranks_other_samples_and_other_losses_are_found() -> None:
    one = start("resumed", 1, [[3], [8]], [1.0, 0.6], load=WHOLE)
    assert compare(one) == {"w": 0, "epoch": 0, "training: data": 1, "training: loss": 1}


def test_on_other_ranks_a_tensor_that_is_not_the_same_as_a_whole_is_found_and_a_step_less() -> None:
    one = start("resumed", 1, [[3]], [1.0], load=OTHER)
    assert compare(one) == {"w": 1, "epoch": 0, "training: data": 0, "training: loss": 0, "steps": 1}
