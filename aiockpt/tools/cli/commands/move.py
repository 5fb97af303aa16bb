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
    check_some_left,
    chosen_steps,
    finish,
    flag,
    hold_steps,
    open_checkpointer,
    option,
    parse_size,
    reading,
    step_number,
)

TORCH_FILES = (".pt", ".pth", ".bin", ".ckpt")


@app.command("cp")
def copy_steps(
    source: Root,
    target: Annotated[str, argument("Where to copy to: a folder or a URL.")],
    step: Step = None,
    every: Annotated[bool, flag("Copy every step.", "--all", "-a")] = False,
    as_json: Json = False,
) -> None:
    """Copy a step to another place, verifying every block. An interrupted copy is resumed.

    A running job keeps all steps until they are copied; those that it has deleted before are named and left out.
    """
    from aiockpt.tools.cli.results import show_copied
    from aiockpt.tools.cli.survey import open_place

    copied = []
    open_place(source)
    # Listed with all imports done: what a running job deletes between the listing and the holds is not copied.
    with open_checkpointer(source) as ckpt:
        steps = sorted(hold_steps(ckpt, chosen_steps(source, step, every, valid=True)).items())
        for number, hold in steps:
            with reading(number, hold, every):
                seen = finish(ckpt.describe(number))
                with show.bytes_progress(f"step {number}", seen.info.bytes, as_json) as tick:
                    copied.append(finish(ckpt.copy(number, target, on_copied=tick)))
                if not as_json:
                    show_copied(copied[-1], len(seen.left_out))
    check_some_left(source, steps, copied)
    show.json_or(as_json, copied, lambda: None)


@app.command("convert")
def convert(
    source: Annotated[
        str, argument("Steps, a Hugging Face folder, a .safetensors file, a DCP folder, or a file of torch.save.")
    ],
    target: Annotated[str, argument("The folder or .pt file to write, or the run to write a step into.")],
    step: Annotated[
        str | None, option("The step to convert (default: the newest), or to write (default: 0).", "STEP")
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
    to: Annotated[
        str | None,
        option(
            "Write a step's weights (hf), or all of it (dcp, or one file of torch.save). Default: by TARGET's name."
        ),
    ] = None,
    trust_pickle: Annotated[
        bool,
        flag("Unpickle objects of a torch file. This can run code from the file: use only on files you trust."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert a step to Hugging Face weights, DCP or a .pt file, or a checkpoint of another library to a step."""
    from aiockpt.convert.conversions import from_hugging_face, to_hugging_face
    from aiockpt.convert.foreign import open_checkpoint, save_as_step
    from aiockpt.tools.cli.convert import (
        carry_out,
        kind_of_source,
        parse_pairs,
        show_converted,
        show_whole,
        write_whole,
    )

    kind = kind_of_source(source)
    if kind == "foreign":
        if prefix or dtype or tie or rename:
            raise UsageError(
                "--prefix, --dtype, --tie and --rename are for weights; here the whole state becomes a step"
            )
        found = open_checkpoint(source, trust_pickle=trust_pickle)
        to_write = _step_to_convert(source, step, False) or 0
        done = carry_out(partial(save_as_step, found, target, step=to_write, replace=force), dry_run, as_json)
        show.json_or(as_json, done, lambda: show_converted(done, source))
        return
    outward = kind == "steps"
    if to is None:
        to = "torch" if outward and target.endswith(TORCH_FILES) else "hf"
    if link and (not outward or to != "hf"):
        raise UsageError("--link is for a step that becomes a Hugging Face folder")
    if to not in ("hf", "dcp", "torch") or (to != "hf" and (not outward or prefix or dtype or rename or dry_run)):
        raise UsageError(
            f"--to {to}: a step becomes hf, or dcp or torch with all of its state "
            "(no --prefix, --dtype, --rename, --dry-run)"
        )
    number = _step_to_convert(source, step, outward)
    if to != "hf":
        whole = write_whole(source, target, to, number, force, as_json)
        show.json_or(as_json, whole, lambda: show_whole(whole))
        return
    if outward and tie:
        raise UsageError("--tie is for weights that become a step: a step knows which names share memory")
    rules = parse_pairs(
        "--rename", rename or [], "OLD=NEW, a regular expression and its replacement", may_be_empty=True
    )
    with open_checkpointer(source if outward else target) as ckpt:
        if outward:
            start = partial(to_hugging_face, ckpt, target, prefix=prefix, max_shard_bytes=parse_size(max_shard_size))
            start = partial(start, step=number, dtype=dtype, replace=force, link=link, rename=rules)
        else:
            ties = dict(parse_pairs("--tie", tie or [], "NEW_NAME=NAME_IN_THE_FILES"))
            start = partial(from_hugging_face, ckpt, source, prefix=prefix or "model", ties=ties)
            start = partial(start, step=number or 0, dtype=dtype, replace=force, rename=rules)
        done = carry_out(lambda **how: finish(start(**how)), dry_run, as_json)
    show.json_or(as_json, done, lambda: show_converted(done, None if outward else source))


def _step_to_convert(source: str, step: str | None, outward: bool) -> int | None:
    if step is not None and step.startswith("best:") and outward:
        return chosen_steps(source, step, False)[0]
    return None if step is None else step_number(step)
