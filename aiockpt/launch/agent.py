"""torch's elastic agent of one node, with eyes: it restarts its trainers when they hang, and stops where that is of no use.

Private parts of torch that are relied on are pinned in tests/adapters/test_upstream.py. Guarantees:

- All that torchrun does is done by torch: rendezvous, starts, signals, logs, the end. Without a progress record of the
  trainers it behaves as torchrun.
- Each start has a fresh store. torch's agent hosts one for all starts of a rendezvous, though its clients believe that it is
  new each time, so that the process groups of a restart read the addresses of dead ranks there.
- A hang is decided with all nodes: each says in the rendezvous's store whether all of its ranks stand.
- A node whose trainers have ended well begins again with one that fails after that. torch's agent waits for the end of the
  other, which waits for it to meet again, until both time out.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.launcher import api as launcher_api

from aiockpt.launch.node_watch import NodeWatch, say
from aiockpt.launch.restart_policy import TrainerFailure

KILL_S = 10.0
"""For a hung process to go after SIGKILL."""
RUNNING, STANDING, ENDED = b"0", b"1", b"2"
"""What a node tells the others of its trainers; one whose trainers have ended holds up no decision about a hang."""
MakeWatch = Callable[[str], NodeWatch]
# Its methods are wrapped by a decorator of torch without types.
_Untyped: Any = LocalElasticAgent


class WatchedAgent(_Untyped):  # type: ignore[misc]
    """`LocalElasticAgent` with a `NodeWatch`.

    Args:
        make_watch: given the id of the run.
        settings: of torch's agent.

    Attributes:
        stopped: why no other start was of use; empty where it has not stopped. Then *status* is for the shell.
    """

    def __init__(self, *, make_watch: MakeWatch, **settings: Any) -> None:
        super().__init__(**settings)
        self.watch = make_watch(self._rdzv_handler.get_run_id())
        self.stopped, self.status = "", 0
        self._pause_s = self._ended_s = 0.0
        self._failed = False

    def run(self, role: str = "default") -> Any:
        """Run the trainers to the end, as torch's agent does."""
        outcome = "interrupted"
        try:
            result: Any = super().run(role)
            outcome = "failed" if result is not None and result.is_failed() else "ended"
            return result
        finally:
            self._post_end()
            self.watch.end(f"stopped: {self.stopped}" if self.stopped else outcome)

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        handler: Any = self._rdzv_handler
        renew_store(handler)
        super()._rendezvous(worker_group)
        count = worker_group.group_world_size or 0
        if isinstance(handler, DynamicRendezvousHandler) and count < handler.settings.min_nodes:
            raise RendezvousStateError(f"{count} of {handler.settings.min_nodes} nodes are left")

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        ranks = [worker.global_rank for worker in worker_group.workers]
        self._agree(RUNNING)
        self._in_exit_barrier = False
        self.watch.begin_attempt(
            ranks, worker_group.workers[0].world_size, lambda hung: self._agree(STANDING if hung else RUNNING)
        )
        started: dict[int, Any] = super()._start_workers(worker_group)
        pids = {worker.global_rank: started[worker.local_rank] for worker in worker_group.workers}
        self._pcontext.close = partial(self._close, self._pcontext.close, pids)
        return started

    def _close(
        self, close: Callable[[Any, int], None], pids: Mapping[int, int], death_sig: Any = None, timeout: int = 30
    ) -> None:
        """End the trainers that run; torch kills what is left. Without a signal it does so because one has failed."""
        if death_sig != signal.SIGKILL:
            self.watch.end_trainers(pids, death_sig or signal.SIGTERM, timeout, failed=death_sig is None)
        close(signal.SIGKILL, timeout)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            statuses = {rank: failure.exitcode for rank, failure in result.failures.items()}
            self._decide(self.watch.describe_exits(statuses))
        elif result.state == WorkerState.HEALTHY and (hang := self.watch.poll()) is not None:
            result = self._end_hung(worker_group, hang)
            self._decide(hang)
        elif result.state == WorkerState.SUCCEEDED and not self._may_leave():
            # While they are healthy, torch's agent restarts trainers for a node that waits.
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _may_leave(self) -> bool:
        """Return whether the trainers of all nodes have ended, as those here have, or nobody waits for them any more."""
        if not self._in_exit_barrier:
            self._in_exit_barrier, self._ended_s = True, time.monotonic()
        return self._post_end() or time.monotonic() > self._ended_s + self._exit_barrier_timeout

    def _exit_barrier(self) -> None:
        """Leave: `_may_leave` has waited."""

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if not self._failed:
            self.watch.leave()
        self._failed = False
        self._stop_workers(worker_group)
        pause_s, self._pause_s = self._pause_s, 0.0
        time.sleep(pause_s)
        super()._restart_workers(worker_group)

    def _decide(self, failure: TrainerFailure) -> None:
        """Have torch's agent go on as the watch says."""
        decision = self.watch.fail(failure)
        self._failed, self._pause_s = True, decision.pause_s
        if decision.reason:
            self.stopped, self.status = decision.reason, decision.status
            self._remaining_restarts = 0

    def _end_hung(self, worker_group: WorkerGroup, hang: TrainerFailure) -> RunResult:
        """Kill the trainers, whose handlers in Python would never run; return what torch's agent is to see."""
        local_ranks = {worker.global_rank: worker.local_rank for worker in worker_group.workers}
        pid = next(worker.id for worker in worker_group.workers if worker.global_rank == hang.rank)
        self._shutdown(signal.SIGKILL, int(KILL_S))
        failure = ProcessFailure(local_ranks[hang.rank], pid, -signal.SIGKILL, "")
        failure.message = f"{hang}; the launcher ended it, see {self.watch.folder}"
        return RunResult(state=WorkerState.FAILED, failures={hang.rank: failure})

    def _post_end(self) -> bool:
        """Post that the trainers here have ended; return whether all have, or the store is gone with its node."""
        try:
            return self._agree(ENDED)
        except RuntimeError:
            return True

    def _agree(self, state: bytes) -> bool:
        """Post how the trainers here are; return whether those of all nodes stand, or have ended, as these do."""
        group: Any = self._worker_group
        if group.store is None or group.group_world_size == 1:
            return state != RUNNING
        keys = [f"aiockpt/trainers/{node}" for node in range(group.group_world_size)]
        group.store.set(keys[group.group_rank], state)
        return state != RUNNING and group.store.check(keys) and all(group.store.get(key) >= state for key in keys)


def renew_store(handler: object) -> None:
    """Have the next rendezvous of *handler* make a new store for the trainers.

    Of static rendezvous with several nodes it keeps the old one: only their agents' common port could tell of a new one.
    """
    if isinstance(handler, DynamicRendezvousHandler):
        handler._shared_tcp_store_server = handler._bootstrap_store_info = None
    elif isinstance(handler, StaticTCPRendezvous) and handler.world_size == 1:
        handler._store = None


@contextmanager
def watched(folder: Path | str = "aiockpt-run", *, hang_s: float | None = None) -> Iterator[list[WatchedAgent]]:
    """Have what torch's ``elastic_launch`` starts in the block run under a `WatchedAgent`; yield the agents that it makes.

    For programs that call it themselves: ``with watched(): elastic_launch(config, "train.py")()``.

    Args:
        folder: for evidence and history, in a folder for each run id.
        hang_s: seconds that a trainer may stand at one place; None: by the median step.
    """
    agents: list[WatchedAgent] = []

    def make_watch(run_id: str) -> NodeWatch:
        return NodeWatch(Path(folder) / run_id.replace("/", "-"), run_id, hang_s=hang_s, report=say)

    def make_agent(**settings: Any) -> WatchedAgent:
        agents.append(WatchedAgent(make_watch=make_watch, **settings))
        return agents[-1]

    with mock.patch.object(launcher_api, "LocalElasticAgent", partial(make_agent)):
        yield agents
