"""The check of all ranks together: an all-reduce of all, and exchanges of all pairs. A script, started as the trainers are.

``python -m aiockpt.launch.joint_check FOLDER`` in each rank. Each node's report, in its FOLDER, gets the figures of its
ranks (the slowest counts), and what is more than `FACTOR` times slower than the median of the nodes. A rank that others have
left ends with `PEER_FAILED`: what is wrong there is not known here.
"""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from itertools import islice
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from aiockpt.launch.node_check import PEER_FAILED, REPEATS, find_slower, read_report, write_report

ALL_BYTES, PAIR_BYTES = 16 << 20, 4 << 20
# The first is new in torch 2.8. All that other ranks cause is a RuntimeError, too.
OF_DEVICES = getattr(torch, "AcceleratorError", torch.OutOfMemoryError), torch.OutOfMemoryError
DEADLINE_S = 120.0
MOST_ROUNDS = 15
"""Rounds of pairs, in each of which every rank has another partner."""


def find_partners(rank: int, world_size: int) -> Iterator[int | None]:
    """Yield the partner of *rank* in each round; each two meet once. None: it has a round off.

    It is the schedule of a tournament: one place stays, the others move around it.
    """
    places = world_size + world_size % 2
    for number in range(places - 1):
        circle = [0, *((place + number) % (places - 1) + 1 for place in range(places - 1))]
        partner = circle[places - 1 - circle.index(rank)]
        yield partner if partner < world_size else None


def find_slow_nodes(by_node: Mapping[str, Mapping[str, float]]) -> dict[str, list[str]]:
    """Return, for each node, what is slower than the median of all nodes; with two nodes, the slower one is slow."""
    names = {name for figures in by_node.values() for name in figures}
    values = {name: [figures[name] for figures in by_node.values() if name in figures] for name in names}
    usual = {name: max(some) if len(some) == 2 else median(some) for name, some in values.items()}
    return {node: find_slower(figures, usual, "its peers") for node, figures in by_node.items()}


def check_ranks(folder: Path) -> None:
    """Measure with all other ranks; the first rank of each node writes what was found."""
    cuda = torch.cuda.is_available()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if cuda else "cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=DEADLINE_S))
    host, node, first = socket.gethostname(), os.environ["GROUP_RANK"], os.environ["LOCAL_RANK"] == "0"
    own = dict(read_report(folder, host).figures) if first else {}
    own["all-reduce"] = _reduce_all(device)
    if dist.get_world_size() > 1:
        own["pairs"] = _exchange(device)
    gathered: list[tuple[str, dict[str, float]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (node, own))
    by_node: dict[str, dict[str, float]] = defaultdict(dict)
    for where, figures in filter(None, gathered):
        for name, figure in figures.items():
            by_node[where][name] = min(figure, by_node[where].get(name, figure))
    if first:
        report = read_report(folder, host)
        report.figures = by_node[node]
        report.problems += find_slower(by_node[node], report.reference, "its last check")
        report.problems += find_slow_nodes(by_node)[node]
        write_report(folder, report)
    dist.barrier()
    dist.destroy_process_group()


def _reduce_all(device: torch.device) -> float:
    world_size = dist.get_world_size()
    data = torch.empty(ALL_BYTES // 4, device=device)

    def reduce() -> None:
        dist.all_reduce(data.fill_(1))

    taken_s = _time(reduce, device)
    if not bool((data == world_size).all()):
        raise ValueError("an all-reduce has a wrong sum")
    return ALL_BYTES / taken_s


def _exchange(device: torch.device) -> float:
    """Return the median bytes a second to and from the partners of this rank."""
    sent, received = (torch.full((PAIR_BYTES // 4,), float(one), device=device) for one in (1, 0))
    speeds = []
    for partner in islice(find_partners(dist.get_rank(), dist.get_world_size()), MOST_ROUNDS):
        dist.barrier()
        if partner is None:
            continue

        def exchange(partner: int = partner) -> None:
            both = [dist.P2POp(dist.isend, sent, partner), dist.P2POp(dist.irecv, received, partner)]
            for each in dist.batch_isend_irecv(both):
                each.wait()

        received.zero_()
        speeds.append(PAIR_BYTES / _time(exchange, device))
        if not bool((received == 1).all()):
            raise ValueError(f"what rank {partner} has sent came changed")
    return median(speeds)


def _time(work: Callable[[], object], device: torch.device) -> float:
    taken_s = []
    for _ in range(REPEATS):
        began_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)


if __name__ == "__main__":
    try:
        check_ranks(Path(sys.argv[1]))
    except RuntimeError as error:
        if isinstance(error, OF_DEVICES):
            raise
        traceback.print_exc()
        sys.exit(PEER_FAILED)
