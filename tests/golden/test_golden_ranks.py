"""What two ranks wrote stays readable: votes with tables, a gathered copy, generations, descent, marks, a damaged step."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.golden.forms_state import sharded
from tests.golden.ranks_state import DAMAGED, RANKS, SAID, TWICE, VOTES, WHOLE, ranks_state
from tests.ranks.crew import Crew
from tests.ranks.forked import run_forked
from tests.simulated.state_model import first_difference

RELEASES = sorted(path for path in (Path(__file__).parent / "ranks").glob("v*") if path.is_dir())
WORLD_S = 200
"""For two processes, on two busy cores."""


@pytest.fixture(params=RELEASES, ids=[path.name for path in RELEASES])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return a copy of the golden checkpoints of one release."""
    return Path(shutil.copytree(request.param, tmp_path / "run"))


Held = tuple[dict[str, Any], torch.Tensor]


def held(state: Held) -> dict[str, Any]:
    """Return what is to be compared of a state, with its batches."""
    return {**state[0], "rows": state[1], "own": state[0]["own"].value, "loader": list(state[0]["loader"])}


def blank(rank: int, size: int = RANKS) -> Held:
    state, rows = ranks_state(rank, 50, size=size)
    state["odd"].zero_()
    return {**state, "own": aiockpt.per_rank(None)}, rows


@pytest.mark.parametrize("step", [WHOLE, TWICE, VOTES])
def test_two_ranks_load_what_two_ranks_saved(place: Path, step: int) -> None:
    """That of votes alone is committed by the ranks that find them."""
    states = [blank(rank) for rank in range(RANKS)]
    asked = None if step == VOTES else step
    with Crew(RANKS, place / "crew") as crew:
        results = crew.on_all(lambda rank, ckpt: ckpt.load(states[rank][0], asked).result())
    assert [one.step for one in results if one is not None] == [step] * RANKS
    for rank, state in enumerate(states):
        wanted = held(ranks_state(rank, step))
        assert first_difference({**wanted, "loader": wanted["loader"][1:]}, held(state)) is None


def test_one_rank_loads_what_two_saved_and_tells_what_the_manifests_say(place: Path) -> None:
    state, rows = blank(0, 1)
    del state["own"]
    with aiockpt.Checkpointer(place / "crew", config={"lr": 0.25}) as ckpt:
        loaded = ckpt.load(state, WHOLE).result()
        assert loaded is not None
        described = ckpt.describe(TWICE).result()
        with pytest.raises(aiockpt.CorruptionError):
            ckpt.verify(DAMAGED).result()
        assert list(ckpt.watch("golden", follow=False)) == [], "its mark says that it has had the newest"
        assert list(ckpt.watch("another", follow=False))
    assert torch.equal(rows, ranks_state(0, WHOLE, size=1)[1])
    given = [sample for rank in range(RANKS) for sample in next(iter(sharded(rank, RANKS))).tolist()]
    assert sorted(given + [int(sample) for batch in state["loader"] for sample in batch]) == list(range(12))
    assert (described.info.metrics, described.user) == (SAID["metrics"], SAID["user"])
    assert "lr" in str(loaded.config_changes)


def test_the_golden_checkpoints_have_what_they_are_for(place: Path) -> None:
    """Else a reader that has forgotten one of these would not be noticed here."""
    place /= "crew"
    manifest = json.loads((place / f"step-{TWICE:08d}/MANIFEST-2.json").read_bytes())
    assert (manifest["parent"], len(manifest["ancestors"]), manifest["finite"]) == (f"step-{WHOLE:08d}", 1, False)
    assert {name: count for file in manifest["files"] for name, count in file["not_finite"].items()} == {"odd": 1}
    for votes in place.glob("step-*/a-*"):
        assert len(list((votes / "g").iterdir())) == 1
        assert all({"replicas", "buffers"} <= json.loads(one.read_bytes()).keys() for one in (votes / "r").iterdir())
    assert not list(place.glob(f"step-{VOTES:08d}/MANIFEST*"))
    assert list(place.glob(f"step-{DAMAGED:08d}/DAMAGED-1.json"))
    assert list(place.glob("readers/golden.json"))


@pytest.mark.timeout(WORLD_S + 40)
def test_optimizers_beside_sharded_parameters_load_on_as_many_ranks(place: Path) -> None:
    """With plain parts, replicas, state spread otherwise, flat slices, and what is each rank's own; and a composite."""
    codes = run_forked("tests.golden.spread_ranks", RANKS, place, WORLD_S)
    wrong = [(place / f"{rank}.json").read_text() for rank in range(RANKS) if codes == [0] * RANKS]
    assert wrong == ["[]"] * RANKS, [(place / f"{rank}.log").read_text()[-2000:] for rank in range(RANKS)]


def test_there_is_a_golden_checkpoint_of_two_ranks_of_this_release() -> None:
    assert f"v{aiockpt.__version__}" in [path.name for path in RELEASES]
