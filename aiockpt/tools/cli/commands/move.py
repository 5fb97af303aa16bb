"""Commands that bring a step to another place, or into another form: ``cp`` and ``convert``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.common import Json, Step, app, chosen_steps, finish, open_checkpointer, step_number


@app.command("cp")
def copy_steps(
    source: Annotated[str, typer.Argument(help="Where the checkpoints are: a folder, or a URL.", show_default=False)],
    target: Annotated[str, typer.Argument(help="Where they go: a folder, or a URL.", show_default=False)],
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Copy every step.")] = False,
    as_json: Json = False,
) -> None:
    """Copy a step to another place, every block compared on the way. Interrupted, it goes on where it was."""
    from aiockpt.tools.cli.results import show_copied

    steps = reversed(chosen_steps(source, step, every, valid=True))
    copied = []
    with open_checkpointer(source) as ckpt:
        for number in steps:
            seen = finish(ckpt.describe(number))
            with show.bytes_progress(f"step {number}", seen.info.bytes, as_json) as tick:
                copied.append(finish(ckpt.copy(number, target, on_copied=tick)))
            if not as_json:
                show_copied(copied[-1], len(seen.left_out))
    show.json_or(as_json, copied, lambda: None)


@app.command("convert")
def convert(
    source: Annotated[
        str,
        typer.Argument(
            help="Steps, a Hugging Face folder, a .safetensors file, a DCP folder, or a file of torch.save.",
            show_default=False,
        ),
    ],
    target: Annotated[
        str, typer.Argument(help="The folder, or the place of the checkpoints, to write.", show_default=False)
    ],
    step: Annotated[
        int | None,
        typer.Option(
            help="Which step to convert, the newest when left out; the number it gets, 0 when left out.",
            parser=step_number,
            metavar="STEP",
            show_default=False,
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(
            help="The part of the state that is the weights: the one module, or model, when left out.",
            metavar="NAME",
            show_default=False,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Round floating point to this dtype, such as bfloat16.", metavar="DTYPE", show_default=False),
    ] = None,
    max_shard_size: Annotated[str, typer.Option(help="Of a file of the folder.", metavar="SIZE")] = "5GB",
    tie: Annotated[
        list[str] | None,
        typer.Option(
            help="A name that shares the memory of a tensor in the files.", metavar="NEW=OLD", show_default=False
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            help="A regular expression for names of weights, and what takes its place.",
            metavar="OLD=NEW",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace weights, or a step, that are there.")] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Link the files of the step instead of writing its weights a second time.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would be written.")] = False,
    to: Annotated[
        str, typer.Option("--to", help="What a step becomes: hf, a Hugging Face folder, or dcp, a folder of DCP.")
    ] = "hf",
    trust_pickle: Annotated[
        bool,
        typer.Option("--trust-pickle", help="Unpickle objects of a torch file, which runs code of whoever wrote it."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn the weights of a step, verified, into a Hugging Face folder; or what others wrote into a step."""
    from aiockpt.convert import from_hugging_face, to_hugging_face
    from aiockpt.convert.foreign import save_as_step
    from aiockpt.tools.cli.convert import (
        carry_out,
        carry_out_foreign,
        kind_of_source,
        parse_rules,
        parse_size,
        parse_ties,
        show_converted,
        write_as_dcp,
    )

    kind = kind_of_source(source)
    if kind == "foreign":
        if prefix or dtype or tie or rename:
            raise UsageError(
                "--prefix, --dtype, --tie and --rename are for weights; the whole state becomes a step here"
            )
        save = partial(save_as_step, place=target, step=step or 0, replace=force)
        done = carry_out_foreign(source, save, dry_run, trust_pickle, as_json)
        show.json_or(as_json, done, lambda: show_converted(done, source))
        return
    outward = kind == "steps"
    if link and (not outward or to != "hf"):
        raise UsageError("--link is for a step that becomes a Hugging Face folder")
    if to not in ("hf", "dcp") or (to == "dcp" and (not outward or prefix or dtype or rename or dry_run)):
        raise UsageError(
            f"--to {to}: a step becomes hf, or dcp with all of its state (no --prefix, --dtype, --rename, --dry-run)"
        )
    if to == "dcp":
        written = write_as_dcp(source, target, step, force, as_json)
        show.json_or(as_json, written, lambda: show.say(f"[green]✓[/] step {written['step']} as DCP's in {target}"))
        return
    if outward and tie:
        raise UsageError("--tie is for weights that become a step: a step knows which names share memory")
    rules = parse_rules(rename or [])
    with open_checkpointer(source if outward else target) as ckpt:
        if outward:
            start = partial(to_hugging_face, ckpt, target, prefix=prefix, max_shard_bytes=parse_size(max_shard_size))
            start = partial(start, step=step, dtype=dtype, replace=force, link=link, rename=rules)
            done = carry_out(start, dry_run, as_json)
        else:
            start = partial(from_hugging_face, ckpt, source, prefix=prefix or "model", ties=parse_ties(tie or []))
            start = partial(start, step=step or 0, dtype=dtype, replace=force, rename=rules)
            done = carry_out(start, dry_run, as_json)
    show.json_or(as_json, done, lambda: show_converted(done, None if outward else source))
