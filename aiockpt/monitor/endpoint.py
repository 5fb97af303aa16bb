"""The health endpoint of a rank: a small HTTP server with ``/health`` for supervisors, ``/metrics`` for Prometheus.

Opt-in and read-only; it listens on the loopback address unless another one is given. It runs on the engine's loop, so an
answer also shows that this loop is alive.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from aiockpt.errors import UsageError
from aiockpt.events import CANCELLED, Committed, Event, Loaded, LoadFailed, Opened, Operation, SaveFailed
from aiockpt.monitor.under_way import PendingWork, UnderWay, describe

if TYPE_CHECKING:
    from aiohttp import web
    from prometheus_client import CollectorRegistry


logger = logging.getLogger("aiockpt")


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/health``.

    Attributes:
        well: whether nothing is overdue, no save failed since the last commit, and no load since the last load or commit.
        problems: the reasons why not, in words.
        pending: unfinished saves and loads, the oldest first.
        durable_step, durable_s: the last step that is durable, and the seconds of work since: what a crash would lose.
    """

    well: bool
    problems: list[str]
    rank: int
    world_size: int
    host: str
    pending: list[PendingWork]
    durable_step: int | None
    durable_s: float | None


class Endpoint:
    """Serves ``/health`` and ``/metrics``; add one to each checkpointer's ``observers``.

    ``/health`` returns status 200, or 503 when something is overdue or the last save or load has failed; both with JSON
    (`Health`). ``/metrics`` returns what ``prometheus_client`` has counted (`aiockpt.monitor.Metrics`).

    Args:
        port: 0 chooses a free port, which *port* holds once the endpoint is open; each rank of a host needs its own.
        host: the address to listen on. The default is loopback, this machine alone; ``"0.0.0.0"`` is every address of it.
        overdue_s: a save or a load that takes longer is a problem.
        registry: of ``prometheus_client``; None is its default one.

    Raises:
        UsageError: aiohttp is not installed, or a value is out of range.
    """

    def __init__(
        self,
        port: int = 9464,
        *,
        host: str = "127.0.0.1",
        overdue_s: float = 300.0,
        registry: CollectorRegistry | None = None,
    ) -> None:
        try:
            import aiohttp  # noqa: F401  fails now, and not in the background
        except ImportError as error:
            raise UsageError("Endpoint() needs aiohttp: pip install aiohttp") from error
        if not (isinstance(port, int) and 0 <= port < 1 << 16):
            raise UsageError(f"Endpoint(port={port!r}): give a port, from 0 (any free one) to 65535")
        if not overdue_s > 0:
            raise UsageError(f"Endpoint(overdue_s={overdue_s!r}): give seconds, more than 0")
        self.port = port
        self._host = host
        self._overdue_s = overdue_s
        self._registry = registry
        self._opened: Opened | None = None
        self._failed: dict[Operation, str] = {}
        self._under_way = UnderWay()
        self._begun, self._ending = anyio.Event(), anyio.Event()

    def on_event(self, event: Event) -> None:
        self._under_way.receive(event)
        match event:
            case Opened():
                self._opened = event
                self._begun.set()
            case SaveFailed():
                self._failed["save"] = f"the save of step {event.step} failed: {event.error}"
            case LoadFailed() if event.error != CANCELLED:
                self._failed["load"] = f"the load of {event.which} failed: {event.error}"
            case Loaded():
                self._failed.pop("load", None)
            case Committed():
                self._failed.clear()

    async def run(self) -> None:
        """Serve until `aclose`.

        Raises:
            UsageError: the address cannot be bound; the port may be taken.
        """
        from aiohttp import web

        # `run` is started before the first event, without which `health` knows no rank.
        await self._begun.wait()
        application = web.Application()
        application.router.add_get("/health", self._answer_health)
        application.router.add_get("/metrics", self._answer_metrics)
        runner = web.AppRunner(application, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        try:
            try:
                await web.TCPSite(runner, self._host, self.port).start()
            except OSError as error:
                raise UsageError(
                    f"{error.strerror}. Each rank of a host needs a port of its own, Endpoint(9464 + local_rank); "
                    "Endpoint(0) chooses a free one"
                ) from error
            self.port = runner.addresses[0][1]
            logger.info("health and metrics of this rank: http://%s:%d", self._host, self.port)
            await self._ending.wait()
        finally:
            with anyio.CancelScope(shield=True):
                await runner.cleanup()

    async def aclose(self) -> None:
        """Stop `run`."""
        self._ending.set()
        self._begun.set()

    def health(self) -> Health:
        """Return the health of this rank. On the loop."""
        assert self._opened is not None, "Opened is the first event"
        now_ns = time.monotonic_ns()
        pending = self._under_way.pending(now_ns)
        problems = [f"overdue: {describe(work)}" for work in pending if work.for_s > self._overdue_s]
        problems += self._failed.values()
        durable_step, durable_s = self._under_way.durable(now_ns) or (None, None)
        return Health(
            well=not problems,
            problems=problems,
            rank=self._opened.rank,
            world_size=self._opened.world_size,
            host=self._opened.host,
            pending=pending,
            durable_step=durable_step,
            durable_s=durable_s,
        )

    async def _answer_health(self, _: Any) -> web.Response:
        from aiohttp import web

        found = self.health()
        status = 200 if found.well else 503
        return web.Response(body=msgspec.json.encode(found), status=status, content_type="application/json")

    async def _answer_metrics(self, _: Any) -> web.Response:
        from aiohttp import web

        try:
            import prometheus_client as prometheus
        except ImportError:
            return web.Response(text="prometheus_client is not installed: pip install prometheus-client", status=404)
        registry = prometheus.REGISTRY if self._registry is None else self._registry
        headers = {"Content-Type": prometheus.CONTENT_TYPE_LATEST}
        return web.Response(body=prometheus.generate_latest(registry), headers=headers)

    def __repr__(self) -> str:
        return f"<Endpoint http://{self._host}:{self.port}>"
