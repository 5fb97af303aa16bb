"""`Retention(newer_than=…)`: a step goes by its age, by the storage's dates and clock, and one of unknown age stays."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.options import Worker
from aiockpt.policies.retention import StepFacts, lineage, plan_retention
from aiockpt.storage.backend import Backend, Listing
from aiockpt.storage.forwarding import Forwarding
from tests.cli.small_checkpoints import DAY_S, make_older, save_aged
from tests.small_run import small_checkpointer


def state(value: float) -> dict[str, Any]:
    return {"model": torch.nn.Linear(3, 3), "x": torch.full((50,), float(value))}


def steps(root: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in root.glob("step-*"))


AGES = {1: 30.0, 2: 9.0, 3: 8.0, 4: 6.0, 5: 1.0}


@pytest.mark.parametrize("newer_than", ["7d", "168h", 7 * DAY_S])
def test_what_is_younger_stays_beside_what_other_rules_keep(tmp_path: Path, newer_than: float | str) -> None:
    save_aged(tmp_path, AGES)
    with small_checkpointer(tmp_path) as ckpt:
        pruned = ckpt.prune(aiockpt.Retention(newer_than=newer_than, last=1, every=3)).result()
    assert steps(tmp_path) == [3, 4, 5]
    assert [step.step for step in pruned.steps] == [1, 2]
    assert "not among the last 1, not a multiple of 3, not newer than" in pruned.steps[0].reason


def test_the_newest_and_the_newest_verified_stay_however_old_they_are(tmp_path: Path) -> None:
    save_aged(tmp_path, {1: 50, 2: 40, 3: 30})
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.verify(1).result()
        ckpt.prune(aiockpt.Retention(newer_than="7d")).result()
    assert steps(tmp_path) == [1, 3]


def test_a_torn_newest_step_saves_no_place(tmp_path: Path) -> None:
    save_aged(tmp_path, {1: 50, 2: 40, 3: 30})
    (data,) = (tmp_path / "step-00000003").glob("a-*/d/*")
    data.write_bytes(b"torn")
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.prune(aiockpt.Retention(newer_than="7d")).result()
    assert steps(tmp_path) == [2, 3]


def test_a_date_to_come_is_young(tmp_path: Path) -> None:
    save_aged(tmp_path, {1: -5, 2: 40, 3: 30})
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.prune(aiockpt.Retention(newer_than="7d")).result()
    assert steps(tmp_path) == [1, 3]


class Undated(Forwarding):
    """A store that shows no dates."""

    async def list(self, prefix: str) -> Listing:
        listing = await super().list(prefix)
        objects = tuple(type(stat)(stat.key, stat.size, 0) for stat in listing.objects)
        return Listing(objects, listing.folders, listing.others)


class Unwritable(Forwarding):
    """A store that takes no probe, so that its clock cannot be read."""

    async def put(self, key: str, data: bytes) -> None:
        if key.startswith(".clock-"):
            raise aiockpt.StorageError(f"putting {key!r}: not allowed", key=key)
        await super().put(key, data)


@pytest.mark.parametrize("wrap", [Undated, Unwritable])
def test_of_unknown_age_is_young(tmp_path: Path, wrap: type[Forwarding]) -> None:
    save_aged(tmp_path, AGES)
    backend: Backend = wrap(LocalBackend(str(tmp_path)))
    with small_checkpointer(backend) as ckpt:
        pruned = ckpt.prune(aiockpt.Retention(newer_than="7d")).result()
    assert not pruned.steps
    assert "of unknown age" in pruned.kept[-1].reason
    assert steps(tmp_path) == [1, 2, 3, 4, 5]


def test_a_thinned_step_is_as_old_as_its_save(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, state(step)).result()
        make_older(tmp_path / "step-00000001", 20)
        assert [one.step for one in ckpt.prune(aiockpt.Retention(optimizer=1)).result().thinned] == [2, 1]
        assert (tmp_path / "step-00000001" / "MANIFEST-2.json").exists()
        ckpt.prune(aiockpt.Retention(newer_than="7d")).result()
    assert steps(tmp_path) == [2, 3]


@pytest.mark.parametrize("worker", ["thread", "process"])
def test_it_is_applied_after_each_commit(tmp_path: Path, worker: Worker) -> None:
    save_aged(tmp_path, AGES)
    rules = aiockpt.Retention(newer_than="7d")
    with small_checkpointer(tmp_path, retention=rules, worker=worker) as ckpt:
        assert ckpt.load({"x": None}, strict=False).result() is not None
        ckpt.save(6, state(6)).result()
    assert steps(tmp_path) == [4, 5, 6]


def test_each_tier_goes_by_its_own_dates(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    tiers = [aiockpt.Tier(near), aiockpt.Tier(far, keep=aiockpt.Retention(newer_than="7d"))]
    with small_checkpointer(tiers) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state(step)).result()
    make_older(near / "step-00000001", 20)
    make_older(far / "step-00000002", 20)
    with small_checkpointer(tiers) as ckpt:
        assert ckpt.load({"x": None}, strict=False).result() is not None
        ckpt.save(3, state(3)).result()
    assert (steps(near), steps(far)) == ([1, 2, 3], [1, 3])


@pytest.mark.parametrize("wrong", ["7", "d", "7 parsecs", "-3d", 0, -1, float("nan"), True, "0d"])
def test_what_is_no_time_is_refused(wrong: Any) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"newer_than=.*'7d'"):
        aiockpt.Retention(newer_than=wrong)


AGED = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.integers(0, 9),
        st.sampled_from("ab"),
        st.none() | st.floats(0, 40 * DAY_S),
        st.booleans(),
        st.booleans(),
    ),
    max_size=12,
    unique_by=lambda row: row[0],
)


@given(AGED, st.none() | st.integers(1, 4), st.floats(1, 20 * DAY_S), st.floats(0, 20 * DAY_S))
def test_of_any_history_the_newest_and_the_young_stay(
    rows: list[tuple[int, int, str, float | None, bool, bool]], last: int | None, newer_s: float, more_s: float
) -> None:
    found = [
        StepFacts(f"s{step}", step, sequence, run, None, verified, {}, damaged, age_s=age_s)
        for step, sequence, run, age_s, verified, damaged in rows
    ]
    rules = aiockpt.Retention(last=last, newer_than=newer_s)
    gone = {step.id for step in plan_retention(found, rules)}
    whole = [fact for fact in lineage(found) if not fact.damaged]
    assert not gone.intersection(fact.id for fact in whole[: last or 1])
    for fact in found:
        if fact.id in gone:
            assert fact.age_s is not None
            assert fact.age_s >= newer_s
    longer = aiockpt.Retention(last=last, newer_than=newer_s + more_s)
    assert {step.id for step in plan_retention(found, longer)} <= gone
    if last is not None:
        assert gone <= {step.id for step in plan_retention(found, aiockpt.Retention(last=last))}
