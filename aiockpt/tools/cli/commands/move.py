"""Commands that copy a step to another place or convert it to another format: ``cp`` and ``convert``."""

from __future__ import annotations

from functools import partial
from typing import Annotated

from aiockpt.errors import UsageError
from aiockpt.tools.cli import show
from aiockpt.tools.cli.commands.app import (
    Json,
    Root,
    Step,
    app,
    argument,
    chosen_steps,
    finish,
    flag,
    open_checkpointer,
    option,
    parse_size,
    step_number,
)


@app.command("cp")
def copy_steps(
    source: Root,
    target: Annotated[str, argument("Where to copy to: a folder or a URL.")],
    step: Step = None,
    every: Annotated[bool, flag("Copy every step.", "--all", "-a")] = False,
    as_json: Json = False,
) -> None:
    """Copy a step to another place, verifying every block. An interrupted copy is resumed."""
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
        str, argument("Steps, a Hugging Face folder, a .safetensors file, a DCP folder, or a file of torch.save.")
    ],
    target: Annotated[str, argument("The folder to write, or the run to write a step into.")],
    step: Annotated[
        int | None,
        option("The step to convert (default: the newest), or to write (default: 0).", "STEP", parser=step_number),
    ] = None,
    prefix: Annotated[
        str | None, option("The part of the state that holds the weights. Default: the only module, or model.", "NAME")
    ] = None,
    dtype: Annotated[str | None, option("Round floating point to this dtype, such as bfloat16.", "DTYPE")] = None,
    max_shard_size: Annotated[str, option("Largest size of one weights file.", "SIZE")] = "5GB",
    tie: Annotated[
        list[str] | None, option("A name that shares the memory of a tensor in the files. Repeatable.", "NEW=OLD")
    ] = None,
    rename: Annotated[
        list[str] | None, option("Rename weights: a regular expression and its replacement. Repeatable.", "OLD=NEW")
    ] = None,
    force: Annotated[bool, flag("Replace existing weights, or an existing step.", "--force", "-f")] = False,
    link: Annotated[bool, flag("Hard-link the step's files instead of copying the weights.", "--link")] = False,
    dry_run: Annotated[bool, flag("Only show what would be written.", "--dry-run", "-n")] = False,
    to: Annotated[str, option("Format to write a step as: hf (Hugging Face) or dcp.", "KIND")] = "hf",
    trust_pickle: Annotated[
        bool,
        flag("Unpickle objects of a torch file. This can run code from the file: use only on files you trust."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a step to Hugging Face weights or DCP, or a checkpoint of another library to a step."""
    from aiockpt.convert import from_hugging_face, to_hugging_face
    from aiockpt.convert.foreign import open_checkpoint, save_as_step
    from aiockpt.tools.cli.convert import (
        carry_out,
        kind_of_source,
        parse_pairs,
        show_converted,
        write_as_dcp,
    )

    kind = kind_of_source(source)
    if kind == "foreign":
        if prefix or dtype or tie or rename:
            raise UsageError(
                "--prefix, --dtype, --tie and --rename are for weights; here the whole state becomes a step"
            )
        found = open_checkpoint(source, trust_pickle=trust_pickle)
        done = carry_out(partial(save_as_step, found, target, step=step or 0, replace=force), dry_run, as_json)
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
        show.json_or(
            as_json, written, lambda: show.say(f"{show.mark(True)} step {written['step']}: written to {target} as DCP")
        )
        return
    if outward and tie:
        raise UsageError("--tie is for weights that become a step: a step knows which names share memory")
    rules = parse_pairs(
        "--rename", rename or [], "OLD=NEW, a regular expression and its replacement", may_be_empty=True
    )
    with open_checkpointer(source if outward else target) as ckpt:
        if outward:
            start = partial(to_hugging_face, ckpt, target, prefix=prefix, max_shard_bytes=parse_size(max_shard_size))
            start = partial(start, step=step, dtype=dtype, replace=force, link=link, rename=rules)
        else:
            ties = dict(parse_pairs("--tie", tie or [], "NEW_NAME=NAME_IN_THE_FILES"))
            start = partial(from_hugging_face, ckpt, source, prefix=prefix or "model", ties=ties)
            start = partial(start, step=step or 0, dtype=dtype, replace=force, rename=rules)
        done = carry_out(lambda **how: finish(start(**how)), dry_run, as_json)
    show.json_or(as_json, done, lambda: show_converted(done, None if outward else source))
