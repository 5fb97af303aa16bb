"""Commands that test a place and this machine: ``doctor``, ``bench`` and ``demo``; ``plan`` calculates."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    STORAGE_FAILED,
    Json,
    app,
    argument,
    chosen_steps,
    finish,
    flag,
    open_checkpointer,
    option,
    parse_size,
)

SIZES = "4KiB, 16MiB, 1GiB, or bytes"


@app.command("doctor")
def doctor(
    root: Annotated[str, argument("The folder to test.")],
    node: Annotated[
        bool, flag("Test this node instead: memory, disk in the folder, devices, loopback; its report stays there.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Test a file system: O_DIRECT, hard links, flush latency, free space, write and read speed; or this node."""
    from aiockpt.tools.cli.doctor import run_doctor
    from aiockpt.tools.cli.survey import local_folder

    if node:
        from aiockpt.tools.cli.launches import run_node_check

        raise typer.Exit(run_node_check(Path(root), as_json))
    if run_doctor(local_folder(root), as_json):
        raise typer.Exit(STORAGE_FAILED)


@app.command("bench")
def bench(
    url: Annotated[str, argument("The place: a folder or a URL.")],
    sizes: Annotated[str, option("Sizes of data files, smallest first.", "SIZE,…")] = "16MiB,256MiB",
    concurrency: Annotated[str, option("Numbers of concurrent requests, one point each.", "N,…")] = "1,2,4,8,16",
    seconds: Annotated[float, option("Duration of each point.", "S")] = 2.0,
    most: Annotated[str, option("Most bytes to move in one point, and to store at once.", "SIZE", "--bytes")] = "1GiB",
    soak: Annotated[float, option("Duration of a mixed workload with injected faults; 0: none.", "S")] = 0.0,
    faults: Annotated[float, option("Fraction of the soak's calls that fail on purpose.", "FRACTION")] = 0.05,
    seed: Annotated[int, option("Seed of the bytes and of the soak.", "N")] = 0,
    as_json: Json = False,
) -> None:
    """Stress-test a place: throughput, latency, errors; every byte read is compared.

    Works in a folder of its own that is removed at the end, also after control-C. Exit status 1: a check failed.
    """
    from aiockpt.tools.cli.bench import run_bench
    from aiockpt.tools.stress.plan import StressPlan

    plan = StressPlan(
        sizes=tuple(parse_size(each, "--sizes", SIZES) for each in sizes.split(",")),
        concurrency=tuple(_parse_number("--concurrency", each) for each in concurrency.split(",")),
        seconds=seconds,
        most_bytes=parse_size(most, "--bytes", SIZES),
        soak_s=soak,
        faults=faults,
        seed=seed,
    )
    raise typer.Exit(run_bench(url, plan, as_json))


def _parse_number(option: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise UsageError(f"{option}: {text!r} is no number: write 1,2,4,8,16")
    return int(text)


@app.command("demo")
def demo(
    folder: Annotated[
        Path | None, option("A new folder to save in, which is kept. Default: a temporary one here.", "FOLDER", "--dir")
    ] = None,
    steps: Annotated[int | None, option("Training steps (default 60; 120 with --recovery).", "N", min=1)] = None,
    every: Annotated[int, option("Save every N steps.", "N")] = 5,
    lazy: Annotated[bool, flag("Take lazy snapshots (copied beside training). Not with --elastic.", "--lazy")] = False,
    keep: Annotated[int | None, option("Keep the last N checkpoints (default 3). Not with --elastic.", "N")] = None,
    asynchronous: Annotated[bool, flag("Use the async trainer. Not with --elastic.", "--async")] = False,
    elastic: Annotated[bool, flag("Resume on other numbers of ranks: 2, 2, 1 and 4 processes.", "--elastic")] = False,
    recovery: Annotated[
        bool, flag("4 hosts of 2 ranks: a number, a disk, a process, a thread and a host fail.", "--recovery")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a small GPT with checkpoints, kill it in the middle of a save, resume it, and show the cost."""
    from aiockpt.tools.examples.demo import DemoOptions, run_demo
    from aiockpt.tools.examples.recovery import RecoveryOptions

    given = {"--async": asynchronous, "--lazy": lazy, "--keep": keep is not None, "--elastic": elastic}
    refused = next((name for name, is_given in given.items() if is_given), None)
    if recovery:
        if refused is not None:
            raise UsageError(f"--recovery has no {refused}: its trainer is train_recovering.py")
        raise typer.Exit(run_demo(RecoveryOptions(steps=steps or 120, dir=folder, json=as_json)))
    if elastic and refused != "--elastic":
        raise UsageError(f"--elastic has no {refused}: its trainer is train_elastic.py")
    options = DemoOptions(
        steps=steps or 60,
        every=every,
        lazy=lazy,
        keep=3 if keep is None else keep,
        dir=folder,
        asynchronous=asynchronous,
        elastic=elastic,
        json=as_json,
    )
    raise typer.Exit(run_demo(options))


@app.command("plan")
def plan(
    root: Annotated[str | None, argument("A similar run: the size of its newest step is used.")] = None,
    parameters: Annotated[str | None, option("Parameters of the model, such as 7B, 350M or 7e9.", "N")] = None,
    bytes_per_parameter: Annotated[
        float, option("14: bf16 weights, fp32 masters, two fp32 moments. 12: fp32 weights and moments.")
    ] = 14.0,
    ranks: Annotated[int, option("Number of ranks that hold the state.", min=1)] = 1,
    bandwidth: Annotated[str, option("Write bandwidth per second of all ranks together.")] = "1GiB",
    mtbf: Annotated[float, option("Mean hours between failures of the whole job.")] = 24.0,
    as_json: Json = False,
) -> None:
    """Estimate how long saves of a run will take, and how often to save."""
    from aiockpt.sizing.run_plan import plan_run

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
    """Return the number of *text*: 7B, 350M or 7e9."""
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper(), 1.0)
    try:
        return float(text if factor == 1.0 else text[:-1]) * factor
    except ValueError:
        raise UsageError(f"--parameters {text}: give a number, such as 7B, 350M or 7e9") from None
