"""Who takes part: which script, in which environment, and how its folder shows that a checkpoint is whole?"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Contender:
    """One way to checkpoint the job.

    Attributes:
        script: its name below ``scripts``.
        baseline: the script that it is compared with, line by line and second by second.
        environment: what its requirements file is called; empty: the interpreter that runs the benchmark.
        mark: a pattern, in the folder of the checkpoints, of what appears last of each.
        offset: it saves after step ``EVERY × n + offset``, counted from 0.
        note: what a reader must know.
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
