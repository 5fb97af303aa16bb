"""The command ``aiockpt``: one function a command, each with ``--json`` for programs and colour for people.

What a command needs is imported when it runs: ``--help`` and a mistyped command answer at once.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import anyio
import typer

from aiockpt.cli import show
from aiockpt.errors import CheckpointError, StepNotFoundError, StorageAccessError, StorageError, UsageError
from aiockpt.format.names import parse_step

if TYPE_CHECKING:
    from aiockpt.checkpointer import Checkpointer
    from aiockpt.cli.diff import Change
    from aiockpt.cli.outcomes import Check
    from aiockpt.storage.backend import Backend

DAMAGED, WRONG_CALL, STORAGE_FAILED = 1, 2, 3

app = typer.Typer(
    name="aiockpt",
    help="Look into checkpoints, check them, tidy them.",
    epilog="Exit status: 0 all right · 1 damaged, or different · 2 the call was wrong · 3 the storage failed",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _tell_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        show.say(f"aiockpt {version('aiockpt')}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_tell_version)
]


@app.callback()
def common(version: Version = False) -> None:
    """Look into checkpoints, check them, tidy them."""


def _step_number(text: str | int) -> int:
    """Return the step that *text* names: its number, or the name of its folder."""
    number = parse_step(str(text))
    if number is None and str(text).isdecimal():
        number = int(text)
    if number is None:
        raise typer.BadParameter(f"{text!r} is no step: give its number, such as 1000, or its folder, step-00001000")
    return number


Root = Annotated[str, typer.Argument(help="Where the checkpoints are: a folder, or a URL.", show_default=False)]
Step = Annotated[
    int | None,
    typer.Argument(
        help="A step: 1000, or step-00001000; the newest when left out.", parser=_step_number, metavar="step"
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]
Everything = Annotated[bool, typer.Option("--all", "-a", help="Fold and cut nothing.")]


@app.command("ls")
def list_steps(root: Root, as_json: Json = False) -> None:
    """List the steps, the newest first, and what descends from what; damaged and unfinished ones too."""
    from aiockpt.cli.listing import show_survey
    from aiockpt.cli.place import open_place, roots_below
    from aiockpt.cli.survey import survey

    backend = open_place(root)
    found = anyio.run(survey, backend)
    show.json_or(as_json, found, lambda: show_survey(root, found, () if found.steps else roots_below(backend)))


@app.command("inspect")
def inspect(
    root: Root,
    step: Step = None,
    depth: Annotated[int | None, typer.Option(min=1, help="Levels of the tree to show.", show_default=False)] = None,
    rank: Annotated[int, typer.Option(min=0, help="Whose values to show, where each rank has its own.")] = 0,
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Show what a step holds: tensors with dtypes, shapes, sizes and files; values; without reading data."""
    from aiockpt.cli.contents import show_description
    from aiockpt.cli.place import open_place
    from aiockpt.cli.survey import find_committed, find_valid

    backend = open_place(root)
    entry = anyio.run(find_valid, backend) if step is None else anyio.run(find_committed, backend, step)
    with _open(root) as ckpt:
        seen = ckpt.describe(entry.step).result()
    if seen.per_rank and str(rank) not in seen.per_rank:
        raise UsageError(
            f"--rank {rank}: step {seen.info.step} was saved by {show.count(seen.info.world_size, 'rank')}, from 0"
        )
    show.json_or(as_json, seen, lambda: show_description(root, seen, str(rank), depth, everything))


@app.command("verify")
def verify(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Verify every step.")] = False,
    as_json: Json = False,
) -> None:
    """Read every block of a step and compare it. Exit status 0: all is as it was saved; 1: it is not."""
    from aiockpt.cli.outcomes import show_check
    from aiockpt.cli.place import open_place
    from aiockpt.cli.survey import find_committed, survey

    if every and step is not None:
        raise UsageError("give a step, or --all, not both")
    backend = open_place(root)
    steps: list[int] = []
    if every:
        steps = [listed.step for listed in anyio.run(survey, backend).steps]
    if not every or not steps:
        steps = [anyio.run(find_committed, backend, step).step]
    results = []
    with _open(root) as ckpt:
        for number in steps:
            results.append(_verify_one(ckpt, number, as_json))
            if not as_json:
                show_check(results[-1])
    show.json_or(as_json, results, lambda: None)
    if not all(result.valid for result in results):
        raise typer.Exit(DAMAGED)


def _verify_one(ckpt: Checkpointer, step: int, quiet: bool) -> Check:
    from aiockpt.cli.outcomes import Check
    from aiockpt.cli.progress import bytes_progress, finish
    from aiockpt.errors import CorruptionError

    try:
        total = finish(ckpt.describe(step)).info.bytes
        with bytes_progress(f"verifying step {step}", total, quiet) as tick:
            done = finish(ckpt.verify(step, on_read=tick))
    except CorruptionError as error:
        return Check(step, False, problem=str(error))
    return Check(step, True, done.generation, done.bytes, done.seconds)


@app.command("diff")
def diff(
    root: Root,
    one: Annotated[int, typer.Argument(help="A step, as it was.", parser=_step_number, metavar="before")],
    two: Annotated[int, typer.Argument(help="Another step, as it is.", parser=_step_number, metavar="after")],
    everything: Everything = False,
    as_json: Json = False,
) -> None:
    """Compare two steps: which tensors and values changed, and by how much. Exit status 1: they differ."""
    from aiockpt.cli.outcomes import show_changes
    from aiockpt.cli.place import open_place

    changes = anyio.run(_diff, open_place(root), one, two, as_json)
    show.json_or(as_json, changes, lambda: show_changes(root, one, two, changes, everything))
    if any(change.kind != "same" for change in changes):
        raise typer.Exit(DAMAGED)


async def _diff(backend: Backend, one: int, two: int, quiet: bool) -> list[Change]:
    from aiockpt.cli.diff import diff_steps, tensor_bytes
    from aiockpt.cli.progress import bytes_progress
    from aiockpt.cli.reading import open_step
    from aiockpt.cli.survey import find_committed

    entries = [await find_committed(backend, step) for step in (one, two)]
    async with open_step(backend, entries[0]) as before, open_step(backend, entries[1]) as after:
        total = sum(tensor_bytes(entry) for entry in before.manifest.tensors.values())
        with bytes_progress(f"comparing {one} and {two}", total, quiet) as tick:
            return await diff_steps(before, after, tick)


@app.command("prune")
def prune(
    root: Root,
    last: Annotated[int | None, typer.Option(min=1, help="Keep the newest N steps.", show_default=False)] = None,
    every: Annotated[
        int | None, typer.Option(min=1, help="Besides, keep every step divisible by N.", show_default=False)
    ] = None,
    best: Annotated[str | None, typer.Option(help="Besides, keep the best by this metric.", show_default=False)] = None,
    best_count: Annotated[int, typer.Option(min=1, help="How many of the best to keep.")] = 1,
    mode: Annotated[Literal["min", "max"], typer.Option(help="Which values of --best are good.")] = "min",
    grace_hours: Annotated[float, typer.Option(min=0, help="Age at which an uncommitted attempt is garbage.")] = 24.0,
    delete: Annotated[bool, typer.Option("--yes", "-y", help="Really delete; without it only show.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the steps that no rule keeps, and what dead saves left. Only shows what it would do, unless --yes."""
    from aiockpt.cli.outcomes import show_pruned
    from aiockpt.cli.place import open_place
    from aiockpt.cli.survey import check_metric, measure, survey
    from aiockpt.options import Best, Retention

    if last is None and (every or best):
        raise UsageError("--every and --best keep steps besides the newest: give --last N too")
    backend = open_place(root)
    listed = anyio.run(survey, backend).steps
    if best:
        check_metric(best, listed)
    rule = Best(best, count=best_count, mode=mode) if best else None
    rules = Retention(last=last, every=every, best=rule, grace_s=grace_hours * 3600)
    with _open(root) as ckpt:
        found = ckpt.prune(rules, dry_run=True).result()
        folders = [f"{garbage.step_id}/a-{garbage.attempt}" for garbage in found.garbage]
        sizes = {step.id: step.bytes for step in listed} | anyio.run(measure, backend, folders)
        if delete:
            found = ckpt.prune(rules).result()
    show.json_or(as_json, found, lambda: show_pruned(found, sizes, delete, ruled=last is not None))


@app.command("cp")
def copy_steps(
    source: Annotated[str, typer.Argument(help="Where the checkpoints are: a folder, or a URL.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Where they go: a folder, or a URL.", show_default=False)],
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Copy every step.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a step to another place, every block compared on the way. Interrupted, it goes on where it was."""
    from aiockpt.cli.copying import show_copied
    from aiockpt.cli.place import open_place
    from aiockpt.cli.progress import bytes_progress, finish
    from aiockpt.cli.survey import find_committed, find_valid, survey

    if every and step is not None:
        raise UsageError("give a step, or --all, not both")
    backend = open_place(source)
    if every:
        steps = [listed.step for listed in reversed(anyio.run(survey, backend).steps)]
    elif step is None:
        steps = [anyio.run(find_valid, backend).step]
    else:
        steps = [anyio.run(find_committed, backend, step).step]
    copied = []
    with _open(source) as ckpt:
        for number in steps:
            with bytes_progress(f"step {number}", finish(ckpt.describe(number)).info.bytes, as_json) as tick:
                copied.append(finish(ckpt.copy(number, target, on_copied=tick)))
            if not as_json:
                show_copied(copied[-1])
    show.json_or(as_json, copied, lambda: None)


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Checkpoints, or a Hugging Face folder or .safetensors file; a path or a URL.", show_default=False
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="The folder, or the place of the checkpoints, to write.", show_default=False)
    ],
    step: Annotated[
        int | None,
        typer.Option(
            help="Which step to convert, the newest when left out; the number it gets, 0 when left out.",
            parser=_step_number,
            metavar="step",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="The part of the state that is the weights: the one module, or model, when left out.",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Round floating point to this dtype, such as bfloat16.", show_default=False)
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file of the folder.")] = "5GB",
    tie: Annotated[
        list[str] | None,
        typer.Option(help="A name that shares the memory of a tensor in the files: NEW=OLD.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace weights, or a step, that are there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be written.")] = False,
    as_json: Json = False,
) -> None:
    """Turn the weights of a step, verified, into a Hugging Face folder; or such a folder into a step."""
    from aiockpt.cli.convert import carry_out, is_step_source, parse_size, parse_ties, show_converted
    from aiockpt.convert import from_hugging_face, to_hugging_face

    outward = is_step_source(source)
    if outward and tie:
        raise UsageError("--tie is for weights that become a step: a step knows which names share memory")
    with _open(source if outward else target) as ckpt:
        if outward:
            start = partial(to_hugging_face, ckpt, target, prefix=prefix, max_shard_bytes=parse_size(max_shard_size))
            done = carry_out(partial(start, step=step, dtype=dtype, replace=force), dry_run, as_json)
        else:
            start = partial(from_hugging_face, ckpt, source, prefix=prefix or "model", ties=parse_ties(tie or []))
            done = carry_out(partial(start, step=step or 0, dtype=dtype, replace=force), dry_run, as_json)
    show.json_or(as_json, done, lambda: show_converted(done))


@app.command("commit")
def commit(root: Root, as_json: Json = False) -> None:
    """Finish the commits that dead jobs could not: every attempt whose receipts are complete is rolled forward."""
    from aiockpt.cli.outcomes import show_finished
    from aiockpt.cli.place import open_place
    from aiockpt.cli.survey import survey

    backend = open_place(root)
    with _open(root) as ckpt:
        finished = ckpt.finish_commits().result()
    left = anyio.run(survey, backend).unfinished
    show.json_or(as_json, {"finished": finished, "unfinished": left}, lambda: show_finished(root, finished, left))


@app.command("doctor")
def doctor(
    root: Root,
    size_mib: Annotated[int, typer.Option("--size", min=8, help="MiB of each file of the speed test.")] = 512,
    as_json: Json = False,
) -> None:
    """Say what this file system can do: O_DIRECT, links, flush latency, free space, raw write and read speed."""
    from aiockpt.cli.doctor import REPEATS, examine
    from aiockpt.cli.outcomes import show_diagnosis
    from aiockpt.cli.place import local_folder
    from aiockpt.cli.progress import bytes_progress

    folder = local_folder(root)
    space = shutil.disk_usage(folder)
    if not space.total:
        raise UsageError(f"{folder}: a file system that has no size; checkpoints cannot be kept there")
    free_mib = space.free >> 20
    if size_mib >= free_mib:
        raise UsageError(f"--size {size_mib}: {folder} has {free_mib} MiB free; give less")
    try:
        with bytes_progress("writing and reading", 2 * REPEATS * (size_mib << 20), as_json) as tick:
            found = examine(folder, size_mib << 20, tick)
    except PermissionError as error:
        advice = "give this user the right, or name another folder"
        raise StorageAccessError(
            f"{folder}: what a commit needs cannot be tried ({error.strerror}); {advice}"
        ) from error
    show.json_or(as_json, found, lambda: show_diagnosis(found))
    if found.problems:
        raise typer.Exit(STORAGE_FAILED)


@app.command("bench")
def bench(
    url: Annotated[str, typer.Argument(help="The place: a folder, or a URL.", show_default=False)],
    sizes: Annotated[str, typer.Option(help="Of data files, the smallest first.")] = "16MiB,256MiB",
    concurrency: Annotated[str, typer.Option(help="Requests under way at once, a point for each.")] = "1,2,4,8,16",
    seconds: Annotated[float, typer.Option(help="Of each point.")] = 2.0,
    most: Annotated[str, typer.Option("--bytes", help="To move in each point, and to lie there, at most.")] = "1GiB",
    soak: Annotated[float, typer.Option(help="Seconds of a mixed workload with faults; 0: none.")] = 0.0,
    faults: Annotated[float, typer.Option(help="Fraction of the soak's calls that fail on purpose.")] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the bytes, and of the soak's dice.")] = 0,
    json_to: Annotated[
        str | None, typer.Option("--json", help="Write the report to a file; - prints it.", show_default=False)
    ] = None,
    plot_to: Annotated[
        Path | None, typer.Option("--plot", help="Draw throughput and p99 into a .png or .svg.", show_default=False)
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show every point.")] = False,
) -> None:
    """Stress a place before a run is trusted to it: throughput, latency, errors; every byte read is compared.

    It works in a folder of its own that is removed at the end, also after control-C. Exit status 1: something is wrong.
    """
    from aiockpt.cli.bench import parse_bytes, parse_count, parse_list, run_bench
    from aiockpt.stress.plan import Plan

    plan = Plan(
        sizes=parse_list("--sizes", sizes, parse_bytes),
        concurrency=parse_list("--concurrency", concurrency, parse_count),
        seconds=seconds,
        most_bytes=parse_bytes("--bytes", most),
        soak_s=soak,
        faults=faults,
        seed=seed,
    )
    raise typer.Exit(run_bench(url, plan, json_to, plot_to, everything))


@app.command("demo")
def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where to save; a temporary folder when left out.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Training steps.  [default: 120; 60 with --elastic]", show_default=False)
    ] = None,
    every: Annotated[int, typer.Option(help="Save every N steps.")] = 5,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Copy beside training, not in the call; not with --elastic.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(help="Keep the last N checkpoints.  [default: 3; all with --elastic]", show_default=False),
    ] = None,
    asynchronous: Annotated[bool, typer.Option("--async", help="Use the async trainer; not with --elastic.")] = False,
    elastic: Annotated[bool, typer.Option("--elastic", help="Resume on other ranks: 2, 2, 1 and 4 processes.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No live display.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT with checkpoints, kill it in the middle of a save, resume, and show what it cost."""
    if elastic:
        from aiockpt.examples.elastic import run_elastic

        if asynchronous or lazy or keep is not None:
            refused = "--async" if asynchronous else "--lazy" if lazy else "--keep"
            raise UsageError(f"--elastic has no {refused}: its trainer is train_elastic.py")
        raise typer.Exit(run_elastic(steps=60 if steps is None else steps, every=every, folder=folder, as_json=as_json))
    from aiockpt.examples.demo import DemoOptions, run_demo

    options = DemoOptions(
        steps=120 if steps is None else steps,
        every=every,
        lazy=lazy,
        keep=3 if keep is None else keep,
        dir=folder,
        asynchronous=asynchronous,
        plain=plain,
        json=as_json,
    )
    raise typer.Exit(run_demo(options))


def _open(root: str) -> Checkpointer:
    from aiockpt.checkpointer import Checkpointer

    return Checkpointer(root)


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn our errors into one clear message and an exit code; bugs keep their traceback."""
    try:
        yield
    except (UsageError, StepNotFoundError) as error:
        _fail(error, WRONG_CALL)
    except StorageError as error:
        _fail(error, STORAGE_FAILED)
    except CheckpointError as error:
        _fail(error, DAMAGED)
    except OSError as error:
        _fail(error, STORAGE_FAILED)


def _fail(error: Exception, status: int) -> None:
    show.problem(str(error))
    sys.exit(status)


def main() -> None:
    """Run the command line."""
    with _told_plainly():
        app()


if __name__ == "__main__":
    main()
