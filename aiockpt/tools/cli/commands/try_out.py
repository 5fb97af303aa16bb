"""Commands that try out a place and this machine: ``doctor``, ``bench`` and ``demo``; ``plan`` calculates."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

import typer

from aiockpt.errors import StorageAccessError, UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import STORAGE_FAILED, Json, Root, app, chosen_steps, finish, open_checkpointer


@app.command("doctor")
def doctor(
    root: Root,
    size_mib: Annotated[
        int, typer.Option("--size", min=8, help="MiB of each file of the speed test.", metavar="N")
    ] = 512,
    as_json: Json = False,
) -> None:
    """Say what this file system can do: O_DIRECT, links, flush latency, free space, raw write and read speed."""
    from aiockpt.tools.cli.doctor import REPEATS, examine
    from aiockpt.tools.cli.given_root import local_folder
    from aiockpt.tools.cli.results import show_diagnosis

    folder = local_folder(root)
    space = shutil.disk_usage(folder)
    if not space.total:
        raise UsageError(f"{folder}: a file system that has no size; checkpoints cannot be kept there")
    free_mib = space.free >> 20
    if size_mib >= free_mib:
        raise UsageError(f"--size {size_mib}: {folder} has {free_mib} MiB free; give less")
    try:
        with show.bytes_progress("writing and reading", 2 * REPEATS * (size_mib << 20), as_json) as tick:
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
    sizes: Annotated[str, typer.Option(help="Of data files, the smallest first.", metavar="SIZE,…")] = "16MiB,256MiB",
    concurrency: Annotated[
        str, typer.Option(help="Requests under way at once, a point for each.", metavar="N,…")
    ] = "1,2,4,8,16",
    seconds: Annotated[float, typer.Option(help="Of each point.", metavar="S")] = 2.0,
    most: Annotated[
        str, typer.Option("--bytes", help="To move in each point, and to lie there, at most.", metavar="SIZE")
    ] = "1GiB",
    soak: Annotated[float, typer.Option(help="Seconds of a mixed workload with faults; 0: none.", metavar="S")] = 0.0,
    faults: Annotated[
        float, typer.Option(help="Fraction of the soak's calls that fail on purpose.", metavar="FRACTION")
    ] = 0.05,
    seed: Annotated[int, typer.Option(help="Of the bytes, and of the soak's dice.", metavar="N")] = 0,
    report_to: Annotated[
        Path | None,
        typer.Option("--report", help="Write the report, as JSON, to a file.", metavar="FILE", show_default=False),
    ] = None,
    plot_to: Annotated[
        Path | None,
        typer.Option("--plot", help="Draw throughput and p99 into a .png or .svg.", metavar="FILE", show_default=False),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", "-a", help="Show every point.")] = False,
    as_json: Json = False,
) -> None:
    """Stress a place before a run is trusted to it: throughput, latency, errors; every byte read is compared.

    It works in a folder of its own that is removed at the end, also after control-C. Exit status 1: something is wrong.
    """
    from aiockpt.tools.cli.bench import Outputs, parse_bytes, parse_count, parse_list, run_bench
    from aiockpt.tools.stress.plan import StressPlan

    plan = StressPlan(
        sizes=parse_list("--sizes", sizes, parse_bytes),
        concurrency=parse_list("--concurrency", concurrency, parse_count),
        seconds=seconds,
        most_bytes=parse_bytes("--bytes", most),
        soak_s=soak,
        faults=faults,
        seed=seed,
    )
    raise typer.Exit(run_bench(url, plan, Outputs(report_to, plot_to, as_json, everything)))


@app.command("demo")
def demo(
    folder: Annotated[
        Path | None,
        typer.Option(
            "--dir",
            help="A new folder to save in, which stays; when left out one here, removed at the end.",
            metavar="FOLDER",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Training steps.", metavar="N")] = 60,
    every: Annotated[int, typer.Option(help="Save every N steps.", metavar="N")] = 5,
    lazy: Annotated[
        bool, typer.Option("--lazy", help="Copy beside training, not in the call; not with --elastic.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            help="Keep the last N checkpoints, 3 when left out; not with --elastic.", metavar="N", show_default=False
        ),
    ] = None,
    asynchronous: Annotated[bool, typer.Option("--async", help="Use the async trainer; not with --elastic.")] = False,
    elastic: Annotated[bool, typer.Option("--elastic", help="Resume on other ranks: 2, 2, 1 and 4 processes.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="No live display.")] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT with checkpoints, kill it in the middle of a save, resume, and show what it cost."""
    if elastic:
        from aiockpt.tools.examples.elastic import run_elastic

        if asynchronous or lazy or keep is not None:
            refused = "--async" if asynchronous else "--lazy" if lazy else "--keep"
            raise UsageError(f"--elastic has no {refused}: its trainer is train_elastic.py")
        raise typer.Exit(run_elastic(steps=steps, every=every, folder=folder, as_json=as_json, plain=plain))
    from aiockpt.tools.examples.demo import DemoOptions, run_demo

    options = DemoOptions(
        steps=steps,
        every=every,
        lazy=lazy,
        keep=3 if keep is None else keep,
        dir=folder,
        asynchronous=asynchronous,
        plain=plain,
        json=as_json,
    )
    raise typer.Exit(run_demo(options))


@app.command("plan")
def plan(
    root: Annotated[
        str | None, typer.Argument(help="A run like it: a step is as large as its newest one.", show_default=False)
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Of the model, such as 7B, 350M or 7e9.", metavar="N", show_default=False)
    ] = None,
    bytes_per_parameter: Annotated[
        float, typer.Option(help="14: bf16 weights, fp32 masters, two fp32 moments. 12: fp32 weights and moments.")
    ] = 14.0,
    ranks: Annotated[int, typer.Option(help="That hold the state.", min=1)] = 1,
    bandwidth: Annotated[str, typer.Option(help="Into the place, a second, of all ranks together.")] = "1GiB",
    mtbf: Annotated[float, typer.Option(help="Hours from failure to failure of the whole job.")] = 24.0,
    as_json: Json = False,
) -> None:
    """Say what saves of a run will take, and how often to save, before there is anything to measure."""
    from aiockpt.policies.cadence.run_plan import plan_run
    from aiockpt.tools.cli.convert import parse_size

    if (root is None) == (parameters is None):
        raise UsageError("plan: name a run like it, or give --parameters 7B")
    step_bytes = bytes_per_parameter * _parse_count(parameters or "0")
    if root is not None:
        (step,) = chosen_steps(root, None, False, valid=True)
        with open_checkpointer(root) as ckpt:
            info = finish(ckpt.describe(step)).info
        step_bytes, ranks = float(info.bytes), max(ranks, info.world_size)
    found = plan_run(step_bytes, ranks=ranks, bytes_per_s=parse_size(bandwidth), mtbf_s=mtbf * 3600.0)
    show.json_or(as_json, found, lambda: show.say(str(found)))


def _parse_count(text: str) -> float:
    """Return the number that people write as 7B, 350M or 7e9."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        return float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        raise UsageError(f"--parameters {text}: give a number, such as 7B, 350M or 7e9") from None
