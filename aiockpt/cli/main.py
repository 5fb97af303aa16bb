"""The command ``aiockpt``: one function a command, each with ``--json`` for programs and colour for people."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from aiockpt.checkpointer import Checkpointer
from aiockpt.cli import show
from aiockpt.cli.diff import diff_steps
from aiockpt.cli.doctor import examine
from aiockpt.cli.progress import bytes_progress
from aiockpt.errors import CheckpointError, CorruptionError, StorageError, UsageError
from aiockpt.options import Best, Retention

app = typer.Typer(
    name="aiockpt",
    help="Look into, check and tidy checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Root = Annotated[str, typer.Argument(help="Where the checkpoints are: a folder, or a URL.", show_default=False)]
Step = Annotated[int | None, typer.Argument(help="The step; the newest valid one when left out.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs.")]


def _open(root: str) -> Checkpointer:
    if "://" not in root and not Path(root).is_dir():
        raise UsageError(f"{root}: no such folder")
    return Checkpointer(root)


@app.command("ls")
def list_steps(root: Root, as_json: Json = False) -> None:
    """List the committed steps, the newest first."""
    with _open(root) as ckpt:
        steps = ckpt.steps().result()
    show.json_or(as_json, steps, lambda: show.steps(root, steps))


@app.command("inspect")
def inspect(
    root: Root,
    step: Step = None,
    as_json: Json = False,
    depth: Annotated[int, typer.Option(help="Levels of the tree to show; 0 shows every tensor.")] = 0,
) -> None:
    """Show what a step holds: tensors with sizes, shapes, dtypes and files; values; without reading data."""
    with _open(root) as ckpt:
        seen = ckpt.describe(step).result()
    show.json_or(as_json, seen, lambda: show.description(seen, depth))


@app.command("verify")
def verify(
    root: Root,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="Verify every step.")] = False,
    as_json: Json = False,
) -> None:
    """Read every block of a step and compare it. Exit status 0: all is as it was saved; 1: it is not."""
    results = []
    with _open(root) as ckpt:
        steps = [info.step for info in ckpt.steps().result()] if every else [step]
        for number in steps:
            try:
                total = ckpt.describe(number).result().info.bytes
                with bytes_progress(
                    f"verifying {number if number is not None else 'the newest'}", total, as_json
                ) as tick:
                    verified = ckpt.verify(number, on_read=tick).result()
                results.append(show.Check(verified.step, True, verified.bytes, verified.seconds))
            except CorruptionError as error:
                results.append(show.Check(-1 if number is None else number, False, 0, 0.0, str(error)))
    show.json_or(as_json, results, lambda: show.checks(results))
    if not all(result.valid for result in results):
        raise typer.Exit(1)


@app.command("diff")
def diff(
    root: Root,
    one: Annotated[int, typer.Argument(help="A step.")],
    two: Annotated[int, typer.Argument(help="Another step.")],
    as_json: Json = False,
) -> None:
    """Compare two steps: which tensors changed, and by how much. Exit status 1: they differ."""
    with _open(root) as ckpt:
        changes = diff_steps(ckpt, one, two, quiet=as_json)
    show.json_or(as_json, changes, lambda: show.changes(one, two, changes))
    if any(change.kind != "same" for change in changes):
        raise typer.Exit(1)


@app.command("prune")
def prune(
    root: Root,
    last: Annotated[int | None, typer.Option(help="Keep the newest N steps.")] = None,
    every: Annotated[int | None, typer.Option(help="Keep every step divisible by N.")] = None,
    best: Annotated[str | None, typer.Option(help="Keep the best step by this metric.")] = None,
    mode: Annotated[str, typer.Option(help="min or max: which values of --best are good.")] = "min",
    grace_hours: Annotated[float, typer.Option(help="Age at which an uncommitted attempt is garbage.")] = 24.0,
    delete: Annotated[bool, typer.Option("--yes", help="Really delete; without it only show.")] = False,
    as_json: Json = False,
) -> None:
    """Delete the steps that no rule keeps, and the garbage of dead saves. Shows what it would do unless --yes."""
    if mode not in ("min", "max"):
        raise UsageError(f"--mode {mode}: give min or max")
    rule = Best(best, mode="min" if mode == "min" else "max") if best else None
    rules = Retention(last=last, every=every, best=rule, grace_s=grace_hours * 3600)
    if last is None and (every or best):
        raise UsageError("--every and --best keep steps besides --last N: give that too")
    with _open(root) as ckpt:
        pruned = ckpt.prune(rules, dry_run=not delete).result()
    show.json_or(as_json, pruned, lambda: show.pruned(pruned, delete))


@app.command("commit")
def commit(root: Root, as_json: Json = False) -> None:
    """Finish the commits that dead jobs could not: every attempt whose votes are complete is rolled forward."""
    with _open(root) as ckpt:
        finished = ckpt.finish_commits().result()
    show.json_or(as_json, finished, lambda: show.finished(finished))


@app.command("doctor")
def doctor(
    root: Root,
    size_mib: Annotated[int, typer.Option("--size", help="MiB to write and read for the speed test.")] = 512,
    as_json: Json = False,
) -> None:
    """Say what this place can do: O_DIRECT, link, exclusive create, flush latency, free space, raw speed."""
    found = examine(root, size_mib << 20)
    show.json_or(as_json, found, lambda: show.diagnosis(found))
    if found.problems:
        raise typer.Exit(3)


@app.command("demo")
def demo(
    folder: Annotated[
        Path | None, typer.Option("--dir", help="Where to save; a temporary folder when left out.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 120,
    every: Annotated[int, typer.Option(help="Save every N steps.")] = 5,
    keep: Annotated[int, typer.Option(help="Keep the last N checkpoints.")] = 3,
    asynchronous: Annotated[bool, typer.Option("--async", help="Use the async trainer.")] = False,
    plain: Annotated[bool, typer.Option(help="No live display.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT with checkpoints, kill it in the middle of a save, resume, and show what it cost."""
    from aiockpt.examples.demo import DemoOptions, run_demo

    options = DemoOptions(
        steps=steps, every=every, keep=keep, dir=folder, asynchronous=asynchronous, plain=plain, json=as_json
    )
    raise typer.Exit(run_demo(options))


@contextmanager
def _told_plainly() -> Iterator[None]:
    """Turn our errors into one clear message and an exit code; bugs keep their traceback."""
    try:
        yield
    except UsageError as error:
        _fail(error, 2)
    except StorageError as error:
        _fail(error, 3)
    except CheckpointError as error:
        _fail(error, 1)
    except OSError as error:
        _fail(error, 3)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: Exception, status: int) -> None:
    show.problem(str(error))
    sys.exit(status)


def main() -> None:
    """Run the command line."""
    with _told_plainly():
        app()


if __name__ == "__main__":
    main()
