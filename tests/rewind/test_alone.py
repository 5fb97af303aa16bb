"""A process by itself that goes back from a bad step: what it loads, saves, skips, and tells."""

import asyncio
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader  # type: ignore[import-untyped]  # it has no types

import aiockpt
from aiockpt.errors import BadStepError
from aiockpt.events import Rewound
from aiockpt.monitor import TraceFile
from aiockpt.monitor.findings import find_problems
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.save_points import save_points
from aiockpt.monitor.spans import spans
from aiockpt.monitor.summary import summarize
from aiockpt.runtime.world import World
from aiockpt.session.rewind.alarm import LossWindow
from tests.adapters.loaders import Numbers, no_vital
from tests.simulated.twin_accelerator import TwinAccelerator
from tests.small_run import small_checkpointer
from tests.watch import Lines, Watch

LENGTH, BATCH = 40, 2
NAN = math.nan
Open = Callable[..., aiockpt.Checkpointer]


class Run:
    """A model that trains numbers, one batch a step, and records the first number of each batch."""

    def __init__(self, source: Any = None, **options: Any) -> None:
        self.loader: aiockpt.Loader[Any] = aiockpt.Loader(sharded() if source is None else source, **options)
        self.weight = torch.zeros(3)
        self.rates = {"lr": 1.0}
        self.trained: list[int] = []
        self.state = {"loader": self.loader, "weight": self.weight, "rates": self.rates, "trained": self.trained}

    def train(self, batch: torch.Tensor) -> None:
        self.weight.add_(batch.float().mean() * self.rates["lr"])
        self.trained.append(int(batch[0]))


def sharded(workers: int = 0) -> DataLoader[int]:
    sampler = aiockpt.ShardedSampler(LENGTH, BATCH, shuffle=False)
    return DataLoader(Numbers(LENGTH), batch_sampler=sampler, num_workers=workers)


def go(ckpt: aiockpt.Checkpointer, run: Run, loss: Callable[[int], Any], *, epochs: int = 1) -> int:
    """Train; *loss* is given the first number of a batch. Return the step after the last one."""
    step = ckpt.resume(run.state)
    while run.loader.epoch < epochs:
        for batch in run.loader:
            run.train(batch)
            step = ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
    return step


def bad_at(*numbers: int, value: float = NAN, times: int = 10**9) -> Callable[[int], float]:
    """Return a loss that is bad where a batch begins with one of *numbers*, so often."""
    met = dict.fromkeys(numbers, times)

    def loss(first: int) -> float:
        if met.get(first, 0) <= 0:
            return 1.0 + first / 1000
        met[first] -= 1
        return value

    return loss


def evens(*without: int) -> list[int]:
    return [number for number in range(0, LENGTH, BATCH) if number not in without]


@pytest.mark.parametrize("value", [NAN, math.inf, 1e6], ids=["nan", "infinite", "spike"])
def test_the_batch_of_a_bad_step_is_left_out_of_what_the_run_becomes(tmp_path: Path, value: float) -> None:
    run, watch = Run(), Watch()
    rewind = aiockpt.Rewind(window=16)
    with small_checkpointer(tmp_path, every=1, rewind=rewind, observers=[watch]) as ckpt:
        assert go(ckpt, run, bad_at(20, value=value), epochs=2) == 2 * len(evens()) - 2
        newest = ckpt.steps().result()[0]
    assert run.trained == 2 * evens(20)
    assert run.weight[0] == sum(number + 0.5 for number in run.trained)
    assert newest.metrics["skipped_batches"] == 2
    told = watch.of(Rewound)
    assert [(one.step, one.bad_step, one.skipped) for one in told] == [(9, 10, 1), (28, 29, 1)]


@pytest.mark.parametrize(("skip", "expected"), [("bad", evens(20)), ("all", evens(16, 18, 20)), (None, evens())])
def test_what_is_skipped_follows_the_policy(tmp_path: Path, skip: Any, expected: list[int]) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=7, rewind=aiockpt.Rewind(skip=skip)) as ckpt:
        go(ckpt, run, bad_at(20, times=1))
    assert run.trained == expected


def test_random_numbers_are_those_of_a_run_that_never_met_the_batch(tmp_path: Path) -> None:
    drawn: list[list[float]] = []
    for bad, place in ((20, "met"), (-1, "never")):
        run, loss = Run(), bad_at(bad)
        run.state |= {"rng": aiockpt.RNG(), "drawn": (numbers := [])}
        torch.manual_seed(7)
        with small_checkpointer(tmp_path / place, every=3, rewind=aiockpt.Rewind()) as ckpt:
            step = ckpt.resume(run.state)
            for batch in run.loader:
                if place == "met" or int(batch[0]) != 20:
                    numbers.append(float(torch.rand(())))
                    step = ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
        drawn.append(numbers)
    assert len(drawn[0]) == len(evens()) - 1
    assert drawn[0] == drawn[1]


def test_a_second_rewind_to_the_same_step_forgets_no_skip(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=7, rewind=aiockpt.Rewind()) as ckpt:
        go(ckpt, run, bad_at(20, 24))
    assert run.trained == evens(20, 24)


def test_a_bad_batch_behind_a_bad_batch_is_left_out_too(tmp_path: Path) -> None:
    """It has the number of the step before it, and that one's place is not taken for its own."""
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        go(ckpt, run, bad_at(20, 22))
    assert run.trained == evens(20, 22)


def test_a_step_that_was_saved_with_bad_numbers_is_no_way_back(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(3)}
    with small_checkpointer(tmp_path, every=1, screen="finite") as ckpt:
        for step in range(3):
            state["weight"].fill_(NAN if step == 2 else step)
            ckpt.step(step, state)
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind(skip=None)) as ckpt:
        assert ckpt.load(state, 2).result().step == 2  # type: ignore[union-attr]
        assert ckpt.advance(3, state, metrics={"loss": NAN}) == 2
        assert state["weight"].tolist() == [1, 1, 1]


def test_a_way_back_to_before_an_earlier_rewind_forgets_no_skip(tmp_path: Path) -> None:
    run, loss, asked = Run(), bad_at(20, times=1), False
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        step = ckpt.resume(run.state)
        for batch in run.loader:
            run.train(batch)
            if step == 15 and not asked:
                ckpt.rewind("it has been worse for long", step=4)  # step 3 knows nothing of the first rewind
                asked = True
            step = ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
    assert run.trained == evens(8, 20)


def test_a_start_after_the_rewind_knows_what_is_skipped(tmp_path: Path) -> None:
    run, loss = Run(), bad_at(20, times=1)
    ckpt = small_checkpointer(tmp_path, every=7, rewind=aiockpt.Rewind(), save_last=False)
    step = ckpt.resume(run.state)
    for batch in run.loader:
        run.train(batch)
        before, step = step, ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
        if step <= before:
            break
    ckpt.close()
    anew = Run()
    with small_checkpointer(tmp_path, every=7, rewind=aiockpt.Rewind()) as ckpt:
        go(ckpt, anew, loss)  # it is bad no more, and yet not trained
    assert anew.trained == evens(20)


def test_the_callback_lowers_the_rate_and_a_later_start_has_it(tmp_path: Path) -> None:
    run, told = Run(), []

    def lower(rewound: Rewound) -> None:
        told.append(rewound)
        run.rates["lr"] *= 0.5

    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind(on_rewind=lower)) as ckpt:
        go(ckpt, run, bad_at(20))
    assert [(one.step, one.bad_step, one.reason, one.skipped) for one in told] == [(9, 10, "loss is nan", 1)]
    anew = Run()
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.load(anew.state, 9).result()
    assert anew.rates["lr"] == 0.5


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: Run(ahead_count=3), id="read ahead"),
        pytest.param(lambda: Run(sharded(workers=2)), id="workers"),
        pytest.param(lambda: Run(StatefulDataLoader(Numbers(LENGTH), batch_size=BATCH)), id="stateful", marks=no_vital),
    ],
)
def test_other_sources_go_back_in_a_loop_that_is_in_progress(tmp_path: Path, make: Callable[[], Run]) -> None:
    run = make()
    with small_checkpointer(tmp_path, every=3, rewind=aiockpt.Rewind()) as ckpt:
        go(ckpt, run, bad_at(18, 38))
    assert run.trained == evens(18, 38)


def test_an_iterator_of_the_programs_own_goes_on_too(tmp_path: Path) -> None:
    run, loss = Run(), bad_at(20)

    def forever() -> Iterator[Any]:
        while True:
            yield from run.loader

    batches = forever()
    with small_checkpointer(tmp_path, every=4, rewind=aiockpt.Rewind()) as ckpt:
        step = ckpt.resume(run.state)
        while step < 30:
            batch = next(batches)
            run.train(batch)
            step = ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
    assert run.trained == (2 * evens(20))[:30]


def test_an_async_loop_waits_for_it(tmp_path: Path) -> None:
    async def train() -> None:
        step = await ckpt.aresume(run.state)
        for batch in run.loader:
            run.train(batch)
            step = await ckpt.aadvance(step, run.state, metrics={"loss": loss(int(batch[0]))})
        await ckpt.aclose()

    run, loss = Run(), bad_at(20)
    ckpt = small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind())
    asyncio.run(train())
    assert run.trained == evens(20)


def test_the_program_asks_and_names_the_first_bad_step(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        step = ckpt.resume(run.state)
        for batch in run.loader:
            run.train(batch)
            if step == 10 and 16 in run.trained:
                ckpt.rewind("the evaluation has become worse", step=8)
            step = ckpt.advance(step, run.state)
        ckpt.wait()
        steps = [info.step for info in ckpt.steps().result()]
    assert run.trained == evens(16)
    assert steps == list(reversed(range(len(evens()) - 1)))


def test_what_was_saved_by_hand_is_not_what_a_start_takes(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, rewind=aiockpt.Rewind(most=0)) as ckpt:
        for step, batch in enumerate(run.loader):
            run.train(batch)
            ckpt.save(step, run.state).result()
            if step < 5:
                ckpt.advance(step, run.state, metrics={"loss": 1.0})
            else:
                with pytest.raises(aiockpt.RewindExhaustedError):
                    ckpt.advance(step, run.state, metrics={"loss": NAN})
                break
        assert ckpt.latest().result() == 4


def test_numbers_that_are_not_finite_are_never_committed(tmp_path: Path) -> None:
    run, poisoned = Run(), []
    with small_checkpointer(tmp_path, every=1, screen="finite", rewind=aiockpt.Rewind()) as ckpt:
        step = ckpt.resume(run.state)
        for batch in run.loader:
            run.train(batch)
            if int(batch[0]) == 20:
                run.weight[1] = NAN
                poisoned.append(step)
            step = ckpt.advance(step, run.state)
        ckpt.wait()
        infos = ckpt.steps().result()
    assert run.trained == evens(20)
    assert len(poisoned) == 1
    assert all(info.finite for info in infos)


def test_a_writer_process_refuses_them_too(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(1000)}
    with small_checkpointer(
        tmp_path, every=1, screen="finite", worker="process", rewind=aiockpt.Rewind(skip=None)
    ) as ckpt:
        step, poisoned = ckpt.resume(state), False
        while step < 12:
            state["weight"].fill_(step)
            if step == 5 and not poisoned:
                state["weight"][7], poisoned = NAN, True
            step = ckpt.advance(step, state)
            ckpt.wait()
        infos = ckpt.steps().result()
    assert [(info.step, info.finite) for info in infos] == [(step, True) for step in reversed(range(12))]


def test_too_many_rewinds_leave_the_good_step(tmp_path: Path) -> None:
    run = Run()
    rewind = aiockpt.Rewind(most=2, within=100, skip=None)
    with (
        pytest.raises(aiockpt.RewindExhaustedError, match="3 rewinds within 100 steps") as raised,
        small_checkpointer(tmp_path, every=1, rewind=rewind) as ckpt,
    ):
        go(ckpt, run, bad_at(20))
    assert (raised.value.step, raised.value.reason) == (10, "loss is nan")
    anew = Run()
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.resume(anew.state) == 10
    assert anew.trained == evens()[:10] == run.trained


def test_without_a_good_step_the_error_says_so_and_nothing_is_saved(tmp_path: Path) -> None:
    run = Run()
    with (
        pytest.raises(aiockpt.RewindExhaustedError, match="no good step before it is saved"),
        small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt,
    ):
        go(ckpt, run, bad_at(0))
    with small_checkpointer(tmp_path) as ckpt:
        assert ckpt.steps().result() == ()


def test_a_good_step_that_is_damaged_is_passed_by(tmp_path: Path) -> None:
    run, loss = Run(), bad_at(20)
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:

        def damage_and_judge(first: int) -> float:
            if first == 20 and 8 in run.trained and not (tmp_path / "done").exists():
                ckpt.wait()
                (data, *_) = sorted((tmp_path / "step-00000009").rglob("*.safetensors"))
                data.write_bytes(data.read_bytes()[:-8] + b"damaged!")
                (tmp_path / "done").touch()
            return loss(first)

        go(ckpt, run, damage_and_judge)
    assert run.trained == evens(20)


def test_a_damaged_step_before_the_bad_one_is_not_deleted(tmp_path: Path) -> None:
    """Another tier, or a person, may repair it."""
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind(most=0)) as ckpt:
        for step in range(4):
            ckpt.advance(step, run.state, metrics={"loss": 1.0})
        ckpt.wait()
        (data, *_) = sorted((tmp_path / "step-00000003").rglob("*.safetensors"))
        data.write_bytes(data.read_bytes()[:-8] + b"damaged!")
        with pytest.raises(aiockpt.RewindExhaustedError, match="The state is that of step 2"):
            ckpt.advance(4, run.state, metrics={"loss": NAN})
        assert [info.step for info in ckpt.steps().result()] == [3, 2, 1, 0]


def test_the_way_back_is_loaded_as_the_resume_was(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=1) as ckpt:
        ckpt.step(0, {**run.state, "before": run.weight})
    run.state["now"] = run.weight.clone()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        assert ckpt.resume(run.state, map={"now": "before"}) == 1
        assert ckpt.advance(1, run.state, metrics={"loss": NAN}) == 1


def test_steps_of_an_abandoned_branch_are_no_way_back(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=1) as ckpt:
        go(ckpt, run, bad_at())
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        ckpt.load(run.state, 4).result()  # and not 5 to 19
        step, loss = 5, bad_at(16)
        for batch in run.loader:
            run.train(batch)
            if step < 8:
                step += 1  # not saved
            else:
                step = ckpt.advance(step, run.state, metrics={"loss": loss(int(batch[0]))})
            if run.trained == evens()[:5]:
                break
    assert run.trained == evens()[:5]


def test_the_report_says_that_the_run_was_set_back(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind(), observers=[TraceFile()]) as ckpt:
        go(ckpt, run, bad_at(20))
    told = read_run(tmp_path)
    summary = summarize(told, spans(told))
    (found,) = [
        one for one in find_problems(told, summary, save_points(told), summary.ended_s) if "set back" in one.what
    ]
    assert found.what == "The run was set back once to step 9: step 10 was bad, loss is nan."


def test_a_metric_on_a_device_is_looked_at_when_it_is_there(tmp_path: Path) -> None:
    twin = TwinAccelerator("early")
    losses = [torch.ones(()) for _ in range(4)]
    twin.place(losses)
    twin.compute(lambda: [loss.fill_(NAN) for loss in losses[1:3]])
    state = {"weight": torch.zeros(3)}
    world = World(accelerator=twin)
    with small_checkpointer(tmp_path, every=10, rewind=aiockpt.Rewind(skip=None), world=world) as ckpt:
        assert ckpt.advance(0, state, metrics={"loss": 1.0}) == 1
        assert [ckpt.advance(step, state, metrics={"loss": losses[step]}) for step in (1, 2)] == [2, 3]
        assert twin.host_wait_count == 0
        twin.finish()
        assert ckpt.advance(3, state, metrics={"loss": losses[3]}) == 1
        # What was seen of the steps behind the bad one is forgotten.
        assert ckpt.advance(1, state, metrics={"loss": 1.0}) == 2


def test_a_save_by_hand_waits_for_what_a_device_has_not_told_yet(tmp_path: Path) -> None:
    twin = TwinAccelerator("early")
    loss = torch.ones(())
    twin.place([loss])
    twin.compute(lambda: loss.fill_(NAN))
    state = {"weight": torch.zeros(3)}
    with small_checkpointer(
        tmp_path, every=10, rewind=aiockpt.Rewind(skip=None), world=World(accelerator=twin)
    ) as ckpt:
        assert ckpt.advance(0, state, metrics={"loss": 1.0}) == 1
        assert ckpt.advance(1, state, metrics={"loss": loss}) == 2
        with pytest.raises(BadStepError, match="step 2 is not saved: step 1 is bad"):
            ckpt.save(2, state).result()
        assert ckpt.advance(2, state, metrics={"loss": 1.0}) == 1


# ------------------------------------------------------------------ what is refused, and told


def test_a_loop_that_does_not_go_back_is_told(tmp_path: Path) -> None:
    run = Run()
    with small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt:
        for step, batch in enumerate(run.loader):
            run.train(batch)
            if step < 6:
                ckpt.advance(step, run.state, metrics={"loss": NAN if step == 5 else 1.0})
            else:
                with pytest.raises(aiockpt.UsageError, match=r"goes on with step 5: write `step = ckpt\.advance"):
                    ckpt.advance(step, run.state, metrics={"loss": 1.0})
                break


def test_advance_without_rewind_is_step(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(3)}
    with small_checkpointer(tmp_path, every=2) as ckpt:
        assert [ckpt.advance(step, state, metrics={"loss": NAN}) for step in range(4)] == [1, 2, 3, 4]
    with small_checkpointer(tmp_path, every=2) as ckpt:
        assert [info.step for info in ckpt.steps().result()] == [3, 2, 0]


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: {"data": StatefulDataLoader(Numbers(4))}, "data: a rewind does not set back the loop over a Stateful"),
        (lambda: {"a": {"loader": aiockpt.Loader(sharded(), count="trained")}}, "count='trained'"),
    ],
)
@no_vital
def test_loaders_with_which_it_would_go_wrong_are_refused(tmp_path: Path, make: Callable[[], Any], says: str) -> None:
    with (
        small_checkpointer(tmp_path, every=1, rewind=aiockpt.Rewind()) as ckpt,
        pytest.raises(aiockpt.UsageError, match=says),
    ):
        ckpt.advance(0, make(), metrics={"loss": 1.0})


def test_a_state_without_a_loader_and_metrics_of_other_names_are_told_once(tmp_path: Path) -> None:
    state = {"weight": torch.zeros(3)}
    with Lines(logging.WARNING) as lines, small_checkpointer(tmp_path, every=9, rewind=aiockpt.Rewind()) as ckpt:
        for step in range(3):
            ckpt.advance(step, state, metrics={"train/loss": NAN})
    assert [line.partition(":")[0] for line in lines.said] == [
        "Rewind(skip='bad')",
        "Rewind looks at the metrics 'loss', 'grad_norm', and advance() has 'train/loss'",
    ]


# ------------------------------------------------------------------ what is a spike


def test_a_spike_is_far_above_the_last_good_losses() -> None:
    window = LossWindow(6.0, 8)
    assert [window.judge(step, 1.0 + 0.1 * (step % 3)) for step in range(8)] == [None] * 8
    assert window.judge(8, 0.001) is None  # a drop
    assert window.judge(9, 1.5) is None
    assert "above" in (window.judge(10, 3.0) or "")
    assert "above" in (window.judge(11, 3.0) or "")  # the last one does not count


def test_nothing_is_a_spike_before_there_are_enough() -> None:
    window = LossWindow(6.0, 40)
    assert [window.judge(step, 10.0**step) for step in range(10)] == [None] * 10


@pytest.mark.parametrize("level", [0.0, 1.0, 700.0])
def test_noise_on_a_constant_loss_is_no_spike(level: float) -> None:
    window = LossWindow(6.0, 16)
    for step in range(200):
        assert window.judge(step, level * (1 + 1e-3 * (step % 7 == 0))) is None


def test_what_was_seen_after_the_good_step_is_forgotten() -> None:
    window = LossWindow(6.0, 8)
    for step in range(8):
        window.judge(step, 1.0)
    for step in range(8, 12):
        window.judge(step, 1.05)
    window.go_back(7)
    assert len(window._losses) == len(window._ordered) == 4
