"""Six ranks that believe they are many: groups of four and two gather, die and fail, and the step is whole."""

import errno
from pathlib import Path
from typing import Any

import pytest

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.pipeline import receipts
from aiockpt.planning import groups
from aiockpt.ranks.gathering import takes_over, vote_keys
from aiockpt.runtime.world import World
from aiockpt.testing.faults import Fault, FaultyBackend
from tests.ranks.crew import QUICK, Crew, coordinator_of
from tests.ranks.test_save import equal, failing_on, loaded, replicated

RANKS = 6


@pytest.fixture(autouse=True)
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "GATHER_ABOVE", 2)
    monkeypatch.setattr(groups, "MIN_GROUP", 2)
    monkeypatch.setattr(receipts, "PATIENCE_S", 60)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which something is not gathered."""
    monkeypatch.setattr(receipts, "PATIENCE_S", 0.5)


def save(crew: Crew, step: int) -> None:
    crew.on_all(lambda rank, ckpt: ckpt.save(step, replicated(step)).result())


def gathered(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("step-*/a-*/g/*"))


def test_groups_gather_and_the_step_is_whole(tmp_path: Path) -> None:
    with Crew(RANKS, tmp_path) as crew:
        save(crew, 1)
        save(crew, 2)
    assert gathered(tmp_path) == ["r00000-r00003.jsonl"] * 2 + ["r00004-r00005.jsonl"] * 2
    for step in (1, 2):
        assert equal(loaded(tmp_path, replicated(step), step), replicated(step))


@pytest.mark.usefixtures("impatient")
def test_groups_that_cannot_gather_cost_no_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def backend(rank: int) -> Any:
        fault = Fault(do="fail", verb="put_new", match="*/g/*", error=errno.EIO, times=100)
        return FaultyBackend(LocalBackend(str(tmp_path), world=World()), [fault])

    with Crew(RANKS, backend) as crew:
        save(crew, 1)
    assert gathered(tmp_path) == []
    assert "are not gathered" in caplog.text
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_another_group_commits_for_a_dead_rank_0(tmp_path: Path) -> None:
    hang = Fault(do="hang", verb="put_new", match="*DECISION*", times=None)
    quick = aiockpt.Deadlines(ranks_s=20, commit_s=3, takeover_s=0.3, close_s=60)
    with Crew(RANKS, failing_on(0, tmp_path, hang), deadlines=quick, on_error=lambda future: None) as crew:
        outcomes = crew.start(lambda rank, ckpt: ckpt.save(1, replicated(1)).result())
        assert [outcome.result().generation for outcome in outcomes[1:]] == [1] * (RANKS - 1)
    assert equal(loaded(tmp_path, replicated(1)), replicated(1))


def test_one_rank_of_a_group_takes_over() -> None:
    assert [takes_over(rank, RANKS) for rank in range(RANKS)] == [True, False, False, False, True, False]
    assert takes_over(1, 2)


def test_no_note_about_votes_is_left_behind(tmp_path: Path) -> None:
    with Crew(RANKS, tmp_path, deadlines=QUICK) as crew:
        store: Any = coordinator_of(crew.checkpointers[0]).board._store
        for step in range(1, 9):
            save(crew, step)
        assert store.num_keys() < 60
    assert vote_keys("votes", RANKS) == ["votes", "votes/all", "votes/0", "votes/4"]
    assert vote_keys("votes", 2) == ["votes"]
