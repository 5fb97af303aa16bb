"""The advice of saves and loads of many ranks, carried out where it is given."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import aiockpt
from aiockpt.backends.local import LocalBackend
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.gates import Gate
from tests.ranks.crew import Crew
from tests.watch import until

__all__ = ["Replicate"]  # for a line


def on_two(state: Callable[[int], Any], **options: Any) -> None:
    """Save the states of two ranks; raise what the first one raises."""
    with Crew(2, "ranks", on_error="warn", **options) as crew:
        for error in crew.errors(lambda rank, ckpt: ckpt.save(1, state(rank)).result()):
            if error is not None:
                raise error


def lack_vote(rank: int) -> None:
    """Save on three ranks, the vote of one of them late; raise what *rank* raises."""
    late = Gate(LocalBackend("ranks"), "put_new", "*/r/r00001.json")

    def save(rank: int, ckpt: aiockpt.Checkpointer) -> None:
        if rank == 1:
            ckpt.save(1, {"same": torch.ones(4)})
        else:
            try:
                ckpt.save(1, {"same": torch.ones(4)}).result()
            finally:
                ended[rank] = True
                until(lambda: len(ended) == 2, "the other one ends")
                late.open_up()

    ended: dict[int, bool] = {}
    with Crew(3, lambda rank: late if rank == 1 else LocalBackend("ranks"), on_error="warn") as crew:
        crew.hurry(commit_s=0.5, takeover_s=0.2)
        error = crew.errors(save)[rank]
        until(lambda: list(Path("ranks").glob("*/a-*/r/r00001.json")), "the vote that was late")
    if error is not None:
        raise error


def partial_sums() -> Any:
    return DTensor.from_local(torch.ones(4), init_device_mesh("cpu", (1,)), [Partial()])


def zero(**options: Any) -> dict[str, Any]:
    """Return a state whose optimizer shards its own over the ranks."""
    model = torch.nn.Linear(2, 1)
    kind: Any = import_module("torch.distributed.optim").ZeroRedundancyOptimizer
    return {"model": model, "optimizer": kind(model.parameters(), torch.optim.SGD, lr=0.1, **options)}


def alone(fixture: Callable[[str], Any]) -> None:
    """Make this process the only rank of a job."""
    fixture("process_group")


@pytest.fixture
def process_group() -> Any:
    distributed: Any = torch.distributed
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


HOSTS = "aiockpt.Checkpointer([aiockpt.Tier('peer://advice', %s)], ranks=aiockpt.Ranks(0, 2, torch.distributed.HashStore()))"
OTHER = "other = aiockpt.Checkpointer('b', ranks=aiockpt.Ranks(load_group=%s))"
TABLE = [
    Entry("aiockpt.Ranks(rank=1)", r"Ranks\(rank=\d+, world_size=(\d+)\): there is no such rank",
          "aiockpt.Ranks(rank={} - 1)"),
    Entry("aiockpt.Ranks(world_size=2)", r"Give (store=torch\.distributed\.TCPStore\()…\)",
          "aiockpt.Ranks(world_size=2, {}'127.0.0.1', 0, is_master=True))"),
    Entry("on_two(lambda rank: {'mine': torch.full((4,), rank)})",
          r"What belongs to each rank: (aiockpt\.per_rank\()…\);",
          "on_two(lambda rank: {'mine': {}torch.full((4,), rank))})"),
    Entry("on_two(lambda rank: {'mine': torch.full((4,), rank)})", r"are meant: Checkpointer\((replicas=\"first\")\)",
          "on_two(lambda rank: {'mine': torch.full((4,), rank)}, {})"),
    Entry("on_two(lambda rank: {'mine': torch.full((4,), rank)})",
          r"part of a larger tensor: a DTensor, or (aiockpt\.Shards\()…\)",
          "on_two(lambda rank: {'mine': {}(8,), [((4 * rank,), torch.full((4,), rank))])})"),
    Entry("on_two(lambda rank: {'seed': rank})", r"mark what belongs to one rank with (aiockpt\.per_rank\()\.\.\.\)",
          "on_two(lambda rank: {'seed': {}rank)})"),
    Entry("on_two(lambda rank: {'part': torch.ones(4 + rank)})",
          r"keep each rank's own with (aiockpt\.per_rank\()\.\.\.\)",
          "on_two(lambda rank: {'part': {}torch.ones(4 + rank))})"),
    Entry("lack_vote(0)", r"no receipt from .* Run `(aiockpt commit)` to finish the step once they did",
          "command('{} ranks')"),
    Entry("lack_vote(2)", r"Run `(aiockpt commit)` once all have voted", "command('{} ranks')"),
    Entry("alone(fixture)\nckpt.save(3, {'sum': partial_sums()})",
          r"reduce it first: (redistribute\(placements=\[Replicate\(\)) or",
          "ckpt.save(3, {'sum': partial_sums().{}])}).result()"),
    Entry("alone(fixture)\nckpt.save(3, zero(overlap_with_ddp=True))", r"make it with (overlap_with_ddp=False), or",
          "ckpt.save(3, zero({})).result()"),
    Entry("monkeypatch.setenv('WORLD_SIZE', '2')\nother = aiockpt.Checkpointer('b')", r"or pass (ranks=aiockpt\.Ranks\()…\)",
          "aiockpt.Checkpointer('b', {}0, 1)).close()"),
    Entry(HOSTS % "apart='NO_RACK'", r"rack or block on every rank, or give (apart=\"host\")", HOSTS % "{}" + ".close()"),
    Entry(HOSTS % "network='no0'", r"nor an interface of this host with one; it has (\w+)",
          HOSTS % "network='{}'" + ".close()"),
    Entry("aiockpt.Checkpointer([aiockpt.Tier('peer://advice')], worker='process')",
          r"(worker=)'process': \S+ is served by the trainer's process",
          "aiockpt.Checkpointer([aiockpt.Tier('peer://advice')], {}'thread').close()"),
    Entry("alone(fixture)\n" + OTHER % 3,
          r"process group with this rank in it: give one that (torch\.distributed\.new_group\(.*?\)) returns",
          OTHER % "{}" + "\nother.close()"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
