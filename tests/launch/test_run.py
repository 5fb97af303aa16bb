"""Trainings in real processes that die and hang under ``aiockpt run``."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from aiockpt.launch import torchrun
from aiockpt.launch.restart_policy import STOPPED
from aiockpt.runtime.progress import FOLDER as VARIABLE
from tests.cli.small_checkpoints import Command
from tests.docs.pages import ROOT, blocks
from tests.launch.launched import TIMEOUT_S, TRAINER, Launched, environment, finish, run, start, start_nodes
from tests.run_python import run_python
from tests.watch import until

STOPPED_S = 20.0
"""Longer than torch's agents take for a node to be dead: three times five seconds."""
PLAIN = """
import os, pathlib, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
rank, starts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if rank == 1 and starts < 3:
    os.kill(os.getpid(), 9)
pathlib.Path(f"done-{rank}").write_text(f"{starts} {sys.argv[1:]}")
dist.destroy_process_group()
"""


def test_a_killed_trainer_goes_on_with_no_step_lost(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "kill:1:6:1", "--max-restarts", "2", WAIT="1")
    assert done.status == 0, done.output
    first, second = done.launch.attempts
    assert first.failure is not None
    assert (first.failure.kind, first.failure.rank, first.failure.step) == ("signal SIGKILL", 1, 5)
    assert (first.lost_steps, second.first_step, second.last_step) == (0, 6, 11)
    assert done.starts() == [0, 6]
    assert 0 < done.launch.ettr < 1
    assert "attempt 1 trains from step 6" in done.output
    assert "0 steps lost" in done.output
    told = (tmp_path / "figures-0").read_text()
    assert told.startswith("RestartFigures(restarts={'signal SIGKILL': 1}, notice_s="), told


def test_a_rank_that_holds_the_interpreter_is_named_and_restarted(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "gil:1:6:1", "--max-restarts", "2", "--hang-s", "20", WAIT="1")
    assert done.status == 0, done.output
    stall = next(one for one in done.launch.stalls if one.behind)  # a busy machine may have more
    assert stall.behind == (1,)
    assert "trainer.py" in stall.places["1"]
    assert "in lock_twice" in done.evidence("rank-00001.stacks")
    assert "in main" in done.evidence("rank-00000.stacks")
    assert [attempt.first_step for attempt in done.launch.attempts] == [0, 6]
    assert done.launch.attempts[0].failure is not None
    assert done.launch.attempts[0].failure.kind == "hang"


@pytest.mark.parametrize("place", ["device", "gil"])
def test_a_rank_that_stands_beside_a_dead_one_is_not_given_the_time_to_save(tmp_path: Path, place: str) -> None:
    """Told to end, it would save in its next call, which never comes; torch's agent waits half a minute for it."""
    done = run(tmp_path, 2, f"kill:1:6:1,{place}:0:6:1", "--max-restarts", "2", WAIT="1", PREEMPT="1")
    assert done.status == 0, done.output
    first, second = done.launch.attempts
    assert "rank 0 stands still, and has nothing to save" in done.output
    assert "closing signal SIGKILL" not in done.output  # what torch's agent tells when it kills
    assert first.failure is not None
    assert (first.failure.kind, first.failure.rank, second.first_step) == ("signal SIGKILL", 1, 6)


def test_a_long_evaluation_is_told_and_left_alone(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "evaluation:0:6:1", "--max-restarts", "2", "--hang-s", "6", EVALUATION_S="12")
    assert done.status == 0, done.output
    assert len(done.launch.attempts) == 1
    assert {stall.ended for stall in done.launch.stalls} == {"it went on by itself"}
    assert "its training thread moves" in done.output


def test_the_same_failure_three_times_stops_with_the_reason(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "crash:0:3:0", "--max-restarts", "9", WAIT="1")
    assert done.status == STOPPED, done.output
    assert len(done.launch.attempts) == 3
    assert "the same failure 3 times" in done.launch.outcome
    assert "ArithmeticError at trainer.py:" in done.launch.outcome
    assert "STOPPED" in done.output


def test_restarts_that_commit_nothing_stop_with_the_reason(tmp_path: Path) -> None:
    done = run(tmp_path, 1, "kill:0:3:0", "--max-restarts", "9", EVERY="100", DRIFT="1")
    assert done.status == STOPPED, done.output
    assert [attempt.commits for attempt in done.launch.attempts] == [1, 0, 0]  # step 0 is a multiple of 100
    assert "no save was committed in the last 2 restarts" in done.launch.outcome


def test_a_script_without_aiockpt_is_restarted_over_a_fresh_store(tmp_path: Path) -> None:
    """Under torchrun the second gloo start over one store fails or hangs: it finds the addresses of the dead there."""
    (tmp_path / "plain.py").write_text(PLAIN)
    own = ["--standalone", "--nproc-per-node", 2, "--max-restarts", 3]
    done = finish(tmp_path, start(tmp_path, [*own, tmp_path / "plain.py", "--hang-s", "x"]))
    assert done.status == 0, done.output
    assert (tmp_path / "done-0").read_text() == "3 ['--hang-s', 'x']"
    assert [attempt.failure is None for attempt in done.launch.attempts] == [False, False, False, True]
    assert VARIABLE not in done.output


def test_trainers_that_failed_are_told_without_the_frames_of_the_launcher(
    monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    def fail(_: Sequence[str]) -> int:
        raise ChildFailedError("train.py", {0: ProcessFailure(0, 7, 1, "<N/A>")})

    monkeypatch.setattr("faulthandler.enable", lambda **_: None)  # it needs a real standard error
    monkeypatch.setattr(torchrun, "launch", fail)
    done = aiockpt_command("run", "train.py")
    assert done.status == 1
    assert "train.py FAILED" in done.err
    assert "Traceback" not in done.err


def test_the_block_of_the_guide_starts_a_watched_agent(tmp_path: Path) -> None:
    (block,) = blocks((ROOT / "docs" / "guide" / "launcher.md").read_text(), "python")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    assert "trains" in run_python("-c", block, cwd=tmp_path, env=environment(PATH=path)).stdout


@pytest.mark.parametrize(
    ("statuses", "status", "requeued"),
    [
        ("0 0 0 0", 0, False),
        ("0 0 5 0", 0, False),
        ("4 4 4 5", 4, False),
        ("4 1 4 4", 4, False),
        ("0 0 0 1", 0, True),
        ("5 5 5 5", 0, True),
        ("75 75 75 75", 0, True),
        ("134 1 1 1", 0, True),
    ],
)
def test_the_script_of_the_guide_requeues_what_failed(
    tmp_path: Path, statuses: str, status: int, requeued: bool
) -> None:
    page = (ROOT / "docs" / "guide" / "launcher.md").read_text()
    (script,) = [block for block in blocks(page, "text") if "#SBATCH" in block]
    (tmp_path / "job").write_text(script)
    programs = {
        "scontrol": '[ "$1" = requeue ] && touch requeued || echo node-0',
        "srun": f'shift; for each in {statuses}; do n=$((n + 1)); SLURMD_NODENAME=node-$n EACH=$each "$@"; done; exit 9',
        "aiockpt": 'exit "$EACH"',
    }
    for name, lines in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    job = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-3]"}
    done = subprocess.run(["bash", "job"], cwd=tmp_path, env={**os.environ, **job}, capture_output=True, text=True)
    assert (done.returncode, (tmp_path / "requeued").exists()) == (status, requeued), done.stderr
    assert done.stderr.count("stayed away") == statuses.split().count("5")


def run_two_nodes(folder: Path, faults: str, *more: object) -> list[Launched]:
    """Run the trainer on two nodes of one rank each to the end."""
    nodes = start_nodes(folder, [{"WAIT": "1"}] * 2, "--nnodes", 2, *more, TRAINER, folder / "place", 12, faults)
    return [finish(folder / str(number), node) for number, node in enumerate(nodes)]


def test_two_nodes_restart_together_when_one_of_them_dies_or_hangs(tmp_path: Path) -> None:
    done = run_two_nodes(tmp_path, "kill:1:4:1,loader:0:8:2", "--max-restarts", 4, "--hang-s", 20)
    assert [each.status for each in done] == [0, 0], done[0].output + done[1].output
    for each in done:
        assert [attempt.first_step for attempt in each.launch.attempts] == [0, 4, 8], each.output
    kinds = {attempt.failure.kind for each in done for attempt in each.launch.attempts if attempt.failure}
    assert {"signal SIGKILL", "hang"} <= kinds


@pytest.mark.parametrize("restarts", [1, 0])
def test_a_node_that_has_ended_begins_again_with_one_that_fails_then(tmp_path: Path, restarts: int) -> None:
    """torch's launchers wait for each other, for longer than the test does."""
    done = run_two_nodes(tmp_path, "end:1:11:1", "--max-restarts", restarts)
    assert sorted(each.status for each in done) == [0, 1 - restarts], done[0].output + done[1].output
    assert {each.launch.outcome for each in done} == ({"ended"} if restarts else {"ended", "failed"})
    assert {len(each.launch.attempts) for each in done} == {1 + restarts}


def start_two(folder: Path, *options: object) -> list["subprocess.Popen[str]"]:
    """Start a job of two nodes that trains until it is ended; return when it does."""
    own = ["--nnodes", 2, *options, TRAINER, folder / "place", 100_000, "none"]
    nodes = start_nodes(folder, [{"EVERY": "5"}] * 2, *own)
    logs = [folder / f"log-{rank}" for rank in range(2)]
    until(lambda: all(log.exists() and "step 2 " in log.read_text() for log in logs), "a step on both nodes")
    return nodes


def test_a_node_ends_with_the_reason_when_the_launcher_that_has_the_store_is_killed(tmp_path: Path) -> None:
    first, second = start_two(tmp_path)
    first.kill()
    done = finish(tmp_path / "1", second)
    first.communicate(timeout=TIMEOUT_S)  # its trainer ends, too, and then its output
    assert done.status == 1, done.output
    assert (
        "the nodes have lost each other, and the trainers here are ended. The store of --rdzv-endpoint" in done.output
    )


def test_a_job_survives_a_launcher_that_is_stopped_for_a_while(tmp_path: Path) -> None:
    """No save that needs the store, which it has, goes on meanwhile."""
    first, second = start_two(tmp_path)
    step = len((tmp_path / "log-1").read_text().splitlines())
    first.send_signal(signal.SIGSTOP)
    time.sleep(STOPPED_S)
    first.send_signal(signal.SIGCONT)
    until(lambda: len((tmp_path / "log-1").read_text().splitlines()) > step + 20, "twenty steps more")
    first.terminate()
    done = [finish(tmp_path / str(number), node) for number, node in enumerate((first, second))]
    assert all(len(each.launch.attempts) == 1 for each in done), done[0].output + done[1].output


def test_too_few_nodes_are_told(tmp_path: Path) -> None:
    own = ["--nnodes", "2:3", "--rdzv-conf", "join_timeout=5", TRAINER, tmp_path / "place", 4, "none"]
    done = finish(tmp_path / "0", start_nodes(tmp_path, [{}], *own)[0])
    assert done.status == 1
    assert "Fewer than --nnodes 2:3 came in time" in done.output
