"""A rank is killed in the middle of its file of a version, or rank 0 is; the ranks are processes."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.publish import step_weights, version_files
from tests.gates import Around
from tests.publish.policy import received, state_of
from tests.ranks.forked import run_forked
from tests.small_run import SMALL, small_checkpointer
from tests.watch import Lines

RANKS = 3
KILLED = (1, 0)
"""Who is killed, in each case."""
WAIT_S = 250


def run_rank(number: int, world_size: int, folder: Path) -> None:
    """Be one rank of one case: it saves two steps, and in the second version one is killed."""
    torch.set_num_threads(1)
    step_weights.SHARE_BYTES = version_files.WINDOW_BYTES = 4096
    case, rank = divmod(number, RANKS)
    place = folder / str(case)
    dying: list[int] = []
    store: Any = torch.distributed.FileStore(str(folder / f"store-{case}"), RANKS)  # type: ignore[attr-defined]

    async def die(verb: str, key: str) -> None:
        if verb == "upload.write" and dying:
            os.kill(os.getpid(), signal.SIGKILL)

    wants = aiockpt.Publish(Around(LocalBackend(str(place / "pub")), after=die), every=1000)
    with Lines() as lines:
        ckpt = aiockpt.Checkpointer(
            place / "run", ranks=aiockpt.Ranks(rank, RANKS, store), limits=aiockpt.Limits(io=SMALL), publish=wants
        )
        for step in (1, 2):
            ckpt.save(step, state_of(step)).result(WAIT_S)
            if rank == KILLED[case] and step == 2:
                dying.append(step)
            if rank == 0:
                done = ckpt.publish(step, wants).result(WAIT_S)
                assert (done.version, done.kind) == (step - 1, "full" if step == 1 else "delta")
                store.set(f"published {step}", b"")
            elif step == 1 or KILLED[case]:
                store.get(f"published {step}")
    if rank == 0:
        assert any("rank 1 is gone: its process" in line for line in lines.said), lines.said
    os._exit(0)  # a rank that is gone fails the rest of the job, which is tested elsewhere


@pytest.mark.timeout(WAIT_S + 40)
def test_a_rank_that_is_killed_while_it_writes_is_in_the_way_of_no_version(tmp_path: Path) -> None:
    codes = run_forked("tests.publish.test_killed_share", RANKS * len(KILLED), tmp_path, WAIT_S)
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(tmp_path.glob("*.log")))
    assert codes == [0, -signal.SIGKILL, 0, -signal.SIGKILL, 0, 0], logs
    for case, killed in enumerate(KILLED):
        pub = tmp_path / str(case) / "pub"
        hidden = list(pub.glob(".aiockpt-*"))
        assert bool(hidden) == (killed == 0)  # what rank 0 leaves the next job removes
        with small_checkpointer(tmp_path / str(case) / "run", publish=aiockpt.Publish(pub)) as ckpt:
            assert ckpt.resume(state_of(0)) == 3
            ckpt.save(3, state_of(3)).result()
        assert received(pub, tmp_path / f"got-{case}")[-1][1] == 3
        names = sorted(path.name for path in pub.iterdir() if path.name != "receivers")
        assert names == [f"weight_v{number:06d}" for number in range(len(names))]
