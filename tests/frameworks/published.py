"""The training loops of published scripts, rebuilt small: how each of them counts, saves and resumes.

    python tests/frameworks/published.py [COUNT] [--out FILE]

resumes each in each of its variants, COUNT of them, with aiockpt and by accelerate alone, and compares both with a run that
was never stopped. A certificate is a variant in which aiockpt's run is not worse than accelerate's own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import random
import shutil
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import accelerate  # type: ignore[import-not-found,unused-ignore]  # pyright: ignore[reportMissingImports]
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from aiockpt.integrations.huggingface import attach

EPOCHS, SAMPLES, BATCH, OTHER_BATCH = 3, 28, 4, 7


class Variant(NamedTuple):
    """One way to run, to kill and to resume a script.

    Attributes:
        killed: after that many batches.
        accumulate: batches of an optimizer step.
    """

    script: str
    killed: int
    accumulate: int = 1
    seedable: bool = False
    workers: int = 0
    other_size: bool = False


class Killed(BaseException):
    """The end of a run at a batch."""


class Rows(Dataset[Any]):
    """Rows that say which one they are."""

    def __init__(self) -> None:
        self.rows = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index]


class Job:
    """What a script prepares, and what it has trained."""

    def __init__(self, folder: Path, variant: Variant, *, ours: bool, size: int, stop: int | None = None) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerate.state.GradientState._reset_state()
        accelerate.utils.set_seed(3)
        self.folder, self.variant, self.stop = folder, variant, stop
        self.accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=1 if variant.script == "checkpointing" else variant.accumulate,
            project_dir=str(folder),
            dataloader_config=accelerate.DataLoaderConfiguration(use_seedable_sampler=variant.seedable),
        )
        model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        data = DataLoader(Rows(), size, shuffle=True, num_workers=variant.workers)
        self.model, self.optimizer, self.scheduler, self.loader = self.accelerator.prepare(
            model, optimizer, scheduler, data
        )
        self.eval_loader = self.accelerator.prepare(DataLoader(Rows(), 14))
        self.trained: list[list[int]] = []
        self.saved: dict[str, int] = {}
        if ours:
            attach(self.accelerator)

    def step(self, batch: Any) -> None:
        """Train one batch; one optimizer step where it is due."""
        with self.accelerator.accumulate(self.model):
            self.backward(batch)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def backward(self, batch: Any) -> None:
        """Compute the gradients of a batch."""
        indices, rows = batch
        self.trained.append(indices.tolist())
        self.accelerator.backward(self.model(rows).square().mean())

    def save(self, name: str) -> None:
        """Save, where the run has a stop."""
        if self.stop is not None:
            self.accelerator.save_state(str(self.folder / name))
            self.saved[name] = len(self.trained)

    def load(self, name: str | None) -> int:
        """Load what is to be resumed from, if anything; return the number in its name."""
        if name is None:
            return 0
        self.accelerator.load_state(str(self.folder / name))
        return int("".join(filter(str.isdigit, name)))

    def may_die(self) -> None:
        """Be killed, if it is time: by a signal where the environment has PUBLISHED_SIGKILL."""
        if len(self.trained) == self.stop:
            if os.environ.get("PUBLISHED_SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            raise Killed

    def evaluate(self) -> None:
        """Evaluate at the end of an epoch, as scripts do."""
        self.model.eval()
        for _, rows in self.eval_loader:
            with torch.no_grad():
                self.model(rows)
        self.model.train()


# ------------------------------------------------------------------ the scripts


def by_epochs(skip: Callable[[Job, int], Any], *, evaluates: bool) -> Callable[[Job, str | None], None]:
    """Return the loop of accelerate's complete_nlp_example: epochs from the step, and *skip* for the first of them."""

    def train(job: Job, resume: str | None) -> None:
        overall = job.load(resume)
        start, passed = divmod(overall, len(job.loader))
        for epoch in range(start, EPOCHS):
            for batch in skip(job, passed) if resume is not None and epoch == start else job.loader:
                job.step(batch)
                overall += 1
                job.save(f"step_{overall}")
                job.may_die()
            if evaluates:
                job.evaluate()

    return train


def skip_by_function(job: Job, count: int) -> Any:
    """Skip by the function of accelerate in place of the method."""
    return accelerate.skip_first_batches(job.loader, count) if count else job.loader


def checkpointing(job: Job, resume: str | None) -> None:
    """accelerate's by_feature/checkpointing: skips by hand, and accumulates gradients by itself."""
    start, skip = divmod(job.load(resume), len(job.loader))
    overall = start * len(job.loader)
    for epoch in range(start, EPOCHS):
        for step, batch in enumerate(job.loader):
            if resume is not None and epoch == start and step < skip:
                overall += 1
                continue
            job.backward(batch)
            if step % job.variant.accumulate == 0:
                job.optimizer.step()
                job.scheduler.step()
                job.optimizer.zero_grad()
            overall += 1
            if step % job.variant.accumulate == 0:
                job.save(f"step_{overall}")
            job.may_die()
        job.evaluate()


def diffusers(skips: bool, hooks: bool) -> Callable[[Job, str | None], None]:
    """Return a loop of diffusers: steps and epochs from the folder's name, and a number of steps that ends it."""

    def train(job: Job, resume: str | None) -> None:
        accelerator, accumulate = job.accelerator, job.variant.accumulate
        updates = -(-len(job.loader) // accumulate)
        if hooks:
            accelerator.register_save_state_pre_hook(lambda models, weights, folder: _write_adapter(weights, folder))
            accelerator.register_load_state_pre_hook(lambda models, folder: _read_adapter(models, folder))
        global_step = job.load(resume)
        first, resume_step = global_step // updates, global_step * accumulate % (updates * accumulate)
        for epoch in range(first, EPOCHS):
            for step, batch in enumerate(job.loader):
                if skips and resume is not None and epoch == first and step < resume_step:
                    continue
                job.step(batch)
                if accelerator.sync_gradients:
                    global_step += 1
                    job.save(f"checkpoint-{global_step}")
                job.may_die()
                if global_step >= EPOCHS * updates:
                    break

    return train


def _write_adapter(weights: list[Any], folder: str) -> None:
    torch.save(weights.pop(), Path(folder) / "adapter.pt")


def _read_adapter(models: list[Any], folder: str) -> None:
    models.pop().load_state_dict(torch.load(Path(folder) / "adapter.pt"))


def kohya(job: Job, resume: str | None) -> None:
    """kohya's count: steps in a file of a hook; all but one batch skipped by the method, and that one by hand."""
    accelerator, seen = job.accelerator, {"steps": 0}

    def write(models: list[Any], weights: list[Any], folder: str) -> None:
        (Path(folder) / "train_state.json").write_text(json.dumps(seen))

    def read(models: list[Any], folder: str) -> None:
        seen.update(json.loads((Path(folder) / "train_state.json").read_text()))

    accelerator.register_save_state_pre_hook(write)
    accelerator.register_load_state_pre_hook(read)
    job.load(resume)
    first, inner = divmod(seen["steps"], -(-len(job.loader) // job.variant.accumulate))
    initial = inner * job.variant.accumulate
    for _ in range(first, EPOCHS):
        skipping = None
        if initial > 0:
            skipping = accelerator.skip_first_batches(job.loader, initial - 1)
            initial = 1
        for batch in skipping or job.loader:
            if initial > 0:
                initial -= 1
                continue
            job.step(batch)
            if accelerator.sync_gradients:
                seen["steps"] += 1
                job.save(f"at-{seen['steps']:06}-state")
            job.may_die()


def by_iteration(job: Job, resume: str | None) -> None:
    """A loop that leaves it all to aiockpt; by accelerate alone it begins the epoch anew."""
    job.load(resume)
    for _ in range(0 if resume is None else job.loader.iteration, EPOCHS):
        for batch in job.loader:
            job.step(batch)
            job.save(f"n{len(job.saved)}")
            job.may_die()


SCRIPTS: dict[str, Callable[[Job, str | None], None]] = {
    "complete_nlp": by_epochs(lambda job, count: job.accelerator.skip_first_batches(job.loader, count), evaluates=True),
    "skipping_function": by_epochs(skip_by_function, evaluates=False),
    "checkpointing": checkpointing,
    "unconditional": diffusers(skips=True, hooks=False),
    "text_to_image": diffusers(skips=False, hooks=False),
    "lora": diffusers(skips=True, hooks=True),
    "kohya": kohya,
    "by_iteration": by_iteration,
}

# ------------------------------------------------------------------ what is compared


class Outcome(NamedTuple):
    """How a resumed run compares with the one that was never stopped.

    Attributes:
        equal: whether weights and batches are the same, bit by bit.
        lost: samples that were not trained as often: in all, or in the rest of the epoch where batches have another size.
        twice: samples that were trained more often.
    """

    equal: bool
    lost: int
    twice: int


def run(
    folder: Path, variant: Variant, *, ours: bool, stop: int | None, resume: str | None = None, size: int = BATCH
) -> Job:
    """Run a script until it ends or is killed."""
    job = Job(folder, variant, ours=ours, size=size, stop=stop)
    with suppress(Killed):
        SCRIPTS[variant.script](job, resume)
    job.accelerator.end_training()
    return job


def resumed(variant: Variant, straight: Job, *, ours: bool) -> Outcome:
    """Return what becomes of a run that is killed and resumed once."""
    folder = Path(tempfile.mkdtemp(prefix="published-"))
    try:
        first = run(folder, variant, ours=ours, stop=variant.killed)
        name = list(first.saved)[-1]
        size = OTHER_BATCH if variant.other_size else BATCH
        again = run(folder, variant, ours=ours, stop=None, resume=name, size=size)
    finally:
        shutil.rmtree(folder)
    before = first.trained[: first.saved[name]]
    if variant.other_size:
        return Outcome(False, *_rest(before, again.trained))
    trained = [*before, *again.trained]
    weights = zip(straight.model.state_dict().values(), again.model.state_dict().values(), strict=True)
    equal = trained == straight.trained and all(torch.equal(one, other) for one, other in weights)
    wanted, got = (Counter(itertools.chain.from_iterable(batches)) for batches in (straight.trained, trained))
    return Outcome(equal, (wanted - got).total(), (got - wanted).total())


def _rest(before: list[list[int]], after: list[list[int]]) -> tuple[int, int]:
    """Return how many samples the rest of an epoch lacks, and how many of it were trained before."""
    seen = list(itertools.chain.from_iterable(before))
    done = set(seen[len(seen) // SAMPLES * SAMPLES :])
    wanted = set(range(SAMPLES)) - done
    got: list[int] = []
    for batch in after:
        if len(got) < len(wanted):
            got += batch
    return len(wanted - set(got)), len(got) - len(wanted & set(got))


def certify(variant: Variant) -> dict[str, Any]:
    """Return the certificate of a variant, as plain values."""
    folder = Path(tempfile.mkdtemp(prefix="published-"))
    try:
        straight = run(folder, variant, ours=False, stop=None)
    finally:
        shutil.rmtree(folder)
    alone, ours = (resumed(variant, straight, ours=by) for by in (False, True))
    worse = ours.lost > alone.lost or ours.twice > alone.twice or (alone.equal and not ours.equal)
    return {**variant._asdict(), "aiockpt": ours._asdict(), "alone": alone._asdict(), "worse": worse}


def variants() -> Iterator[Variant]:
    """Yield every variant: killed at the first, a middle and the last batch of the second epoch."""
    count = -(-SAMPLES // BATCH)
    for other_size, workers, seedable, accumulate, killed, script in itertools.product(
        (False, True), (0, 2), (False, True), (1, 2), (count + 1, count + 4, 2 * count), SCRIPTS
    ):
        # A script that steps with the last batch of each epoch alone has nothing saved at the first one.
        yield Variant(script, max(killed, accumulate), accumulate, seedable, workers, other_size)


def main(arguments: list[str]) -> int:
    """Certify so many variants, and write what became of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", nargs="?", type=int, default=384)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    every = list(variants())
    some = random.Random(1).sample(every, min(chosen.count, len(every)))
    done = [certify(variant) for variant in some]
    worse = [one for one in done if one["worse"]]
    figures = {
        "format": "aiockpt certificates of published scripts 1",
        "command": ["python", "tests/frameworks/published.py", str(len(done))],
        "versions": {"accelerate": accelerate.__version__, "torch": torch.__version__},
        "certificates": len(done) - len(worse),
        "worse": len(worse),
        "equal_to_the_straight_run": sum(one["aiockpt"]["equal"] for one in done),
        "equal_to_the_straight_run_alone": sum(one["alone"]["equal"] for one in done),
        "samples_lost": {by: sum(one[by]["lost"] for one in done) for by in ("aiockpt", "alone")},
        "samples_twice": {by: sum(one[by]["twice"] for one in done) for by in ("aiockpt", "alone")},
    }
    if chosen.out is not None:
        lines = ",\n".join("  " + json.dumps(one) for one in done)
        chosen.out.write_text(f'{json.dumps(figures, indent=1)[:-2]},\n "variants": [\n{lines}\n ]\n}}\n')
    told = [json.dumps(figures, indent=1), *map(str, worse)]
    sys.stdout.write("\n".join(told) + "\n")
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
