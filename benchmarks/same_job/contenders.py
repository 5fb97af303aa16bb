"""The contenders: the script of each, its environment, and the mark of a complete checkpoint in its folder."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One way to checkpoint the job.

    Attributes:
        script: its name below ``scripts``.
        baseline: the script that it is compared with, line by line and second by second.
        environment: name of its requirements file; empty: the interpreter that runs the benchmark.
        mark: a pattern, in the folder of the checkpoints, of the file that appears last in each.
        offset: it saves after step ``EVERY × n + offset``, counted from 0.
        note: for readers.
    """

    name: str
    script: str
    mark: str
    baseline: str = "plain"
    environment: str = ""
    offset: int = 0
    note: str = ""


CONTENDERS = (
    Contender("aiockpt", "with_aiockpt", "step-*/MANIFEST-*.json"),
    Contender("DCP `async_save`", "with_dcp", "step-*/.metadata"),
    Contender(
        "torch_checkpointing",
        "with_torch_checkpointing",
        "step_*",
        environment="torch_checkpointing",
        note="0.1.1; its resharders need CUDA, and its direct writes fail on ext4: without both",
    ),
    Contender(
        "torchsnapshot",
        "with_torchsnapshot",
        "step-*/.snapshot_metadata",
        environment="torchsnapshot",
        note="0.1.0, with the torch of the others; it knows no DTensor, so each save gathers the whole state",
    ),
    Contender(
        "Lightning",
        "with_lightning",
        "*.ckpt/meta.pt",
        baseline="plain_lightning",
        environment="lightning",
        offset=-1,
        note="2.6.6, its lines and times beside the same job in Lightning without checkpoints; what is sharded it saves "
        "synchronously",
    ),
)
