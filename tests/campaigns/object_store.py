"""Troubles of requests to an object store: a step is committed once and loaded right, and nothing hangs.

A case saves a step over a committed one, or two jobs save it at once, or the newest step is loaded, through `Retrying`,
while troubles drawn at random meet the requests (docs/durability.md#the-faults, row 9): those that pass, those that last,
and crashes of the client. Time is simulated and leaps. Afterwards another client, whose requests meet nothing, looks at
what is there.
"""

import json
import random
from collections import Counter
from collections.abc import Callable

import anyio
import msgspec

from aiockpt import SaveFuture
from aiockpt.errors import CheckpointError, CommitConflictError, ObjectExistsError
from aiockpt.storage.retry import Retrying, RetryPolicy
from tests.campaigns.campaign import Campaign, Outcomes
from tests.campaigns.drawn_state import DrawnShape, load_drawn
from tests.inline_process import Process
from tests.simulated.object_troubles import (
    CRASHES,
    LASTING,
    TRANSIENT,
    DrawnTroubles,
    Planned,
    PlannedTroubles,
    Request,
    Trouble,
    Troubles,
    applies_to,
)
from tests.simulated.objects_client import ClientCrashedError, ObjectsBackend
from tests.simulated.simulated_objects import ObjectStore
from tests.simulated.simulation import SimulatedClock, SimulatedWorld, simulated_world
from tests.simulated.virtual_time import run_virtually

POLICY = RetryPolicy(attempts=30, deadline_s=900.0, slowest_bytes_per_s=1 << 20)
"""So many attempts that troubles which pass never win: what fails then is a finding."""
PASSING = TRANSIENT - {"expired"}
"""Credentials that expire twice within one call are not refreshed, so these are drawn apart."""
REQUESTS = 40
"""About as many as a save makes."""
ROUND_S = 1.0
"""What a deadline may be missed by: the last attempt's own request."""


class Job(msgspec.Struct, frozen=True):
    """A job, and what lies below it."""

    process: Process
    retrying: Retrying


class Outcome(msgspec.Struct, frozen=True):
    """How an operation of a job ended: with a value (a save: committed as *generation*), an error, or in a crash."""

    value: float | None = None
    generation: int = 0
    error: BaseException | None = None
    crashed: bool = False


class OnTop:
    """Troubles that pass, and on top of them a worse one at a request drawn at random."""

    def __init__(self, passing: DrawnTroubles, worse: Trouble, at: int) -> None:
        self._passing = passing
        self._worse = PlannedTroubles([Planned(trouble=worse, at=at)])

    def next_trouble(self, request: Request) -> Trouble | None:
        worse = self._worse.next_trouble(request)
        return self._passing.next_trouble(request) if worse is None or not applies_to(worse, request.verb) else worse

    @property
    def met(self) -> list[tuple[Trouble, Request]]:
        return self._passing.met + self._worse.met


def start_job(store: ObjectStore, clock: SimulatedClock, seed: int, troubles: Troubles | None = None) -> Job:
    """Return a job that begins now; requests of one with troubles take a while, so that those of several mix."""
    drawn = simulated_world(seed)
    world = SimulatedWorld(drawn.files, clock, drawn.token)
    dice = random.Random(seed)
    latency_s: Callable[[], float] = (lambda: dice.random() / 10) if troubles else (lambda: 0.0)
    retrying = Retrying(ObjectsBackend(store, troubles, latency_s=latency_s), POLICY, world=world)
    return Job(Process(retrying, world), retrying)


async def save(job: Job, step: int, shape: DrawnShape, value: float) -> Outcome:
    try:
        future: SaveFuture = await job.process.save(step, shape.state(value))
    except ClientCrashedError:
        return Outcome(crashed=True)
    failure = future.exception()
    if isinstance(failure, ClientCrashedError):
        return Outcome(crashed=True)
    assert failure is None or isinstance(failure, CheckpointError), repr(failure)
    return Outcome(error=failure) if failure else Outcome(value, future.result().generation)


def check_ended_in_time(job: Job) -> None:
    limit_s = POLICY.limit_s(1 << 20) + ROUND_S
    assert job.retrying.statistics().longest_call_s <= limit_s, "a call outlived its deadline"


def check_nothing_leaked(job: Job) -> None:
    assert job.process.used_slabs == 0, "slabs are still in use"


def manifests(store: ObjectStore, step: int) -> list[str]:
    return [key for key in store.objects if key.startswith(f"step-{step:08d}/MANIFEST-")]


def newest(store: ObjectStore, clock: SimulatedClock, shape: DrawnShape, step: int | None = None) -> float | None:
    """Return what a process finds whose requests meet nothing."""
    return run_virtually(lambda: load_drawn(start_job(store, clock, 99).process, shape, step), clock)


class Case:
    """A store that holds step 1, of value 1, and what a seed says of the rest."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.dice = random.Random(seed)
        self.shape = DrawnShape.draw(self.dice)
        self.clock = SimulatedClock()
        self.store = ObjectStore(self.clock, page_keys=self.dice.choice((1, 2, 1000)))
        first = run_virtually(lambda: save(start_job(self.store, self.clock, 98), 1, self.shape, 1.0), self.clock)
        assert first.error is None

    def passing(self, most: float = 0.4) -> DrawnTroubles:
        """Draw troubles that pass: of up to *most* of the requests."""
        fraction = most * (0.2 + 0.8 * self.dice.random())
        return DrawnTroubles(self.dice.randrange(1 << 30), fraction=fraction, kinds=PASSING)

    def worse(self) -> OnTop:
        """Draw troubles one of which does not pass."""
        kinds: list[Trouble] = [*sorted(LASTING | CRASHES), "expired"]
        return OnTop(self.passing(0.1), self.dice.choice(kinds), self.dice.randint(1, REQUESTS))

    def save(self, troubles: DrawnTroubles | OnTop) -> str:
        """Save value 2 as step 2."""
        job = start_job(self.store, self.clock, self.seed, troubles)
        outcome = run_virtually(lambda: save(job, 2, self.shape, 2.0), self.clock)
        check_ended_in_time(job)
        assert not isinstance(outcome.error, CommitConflictError | ObjectExistsError), (
            f"a conflict with nobody: {outcome.error!r}"
        )
        if isinstance(troubles, DrawnTroubles):
            assert outcome.error is None, f"troubles that pass made it fail: {outcome.error!r}"
        value = self.look(2, [outcome])
        if not outcome.crashed:
            check_nothing_leaked(job)
        self.go_on()
        if not troubles.met:
            return "no trouble"
        return f"{_told(outcome)}, {value:g} is there"

    def save_twice(self) -> str:
        """Let two jobs save step 2 at once, with values 2 and 3, while troubles that pass meet both."""
        jobs = [start_job(self.store, self.clock, self.seed + n, self.passing()) for n in (1, 2)]
        outcomes: dict[float, Outcome] = {}

        async def run(job: Job, value: float) -> None:
            outcomes[value] = await save(job, 2, self.shape, value)

        async def main() -> None:
            async with anyio.create_task_group() as tasks:
                for job, value in zip(jobs, (2.0, 3.0), strict=True):
                    tasks.start_soon(run, job, value)

        run_virtually(main, self.clock)
        for job in jobs:
            check_ended_in_time(job)
            check_nothing_leaked(job)
        self.look(2, list(outcomes.values()))
        won = [outcome for outcome in outcomes.values() if outcome.generation]
        for outcome in outcomes.values():
            assert outcome.error is None or isinstance(outcome.error, CommitConflictError), repr(outcome.error)
        assert won, "neither has won"
        self.go_on()
        return f"two at once: {len(won)} committed"

    def load(self, troubles: DrawnTroubles | OnTop) -> str:
        """Load the newest of two steps."""
        run_virtually(lambda: save(start_job(self.store, self.clock, 97), 2, self.shape, 2.0), self.clock)
        job = start_job(self.store, self.clock, self.seed, troubles)

        async def load() -> Outcome:
            try:
                return Outcome(await load_drawn(job.process, self.shape))
            except CheckpointError as error:
                return Outcome(error=error)
            except ClientCrashedError:
                return Outcome(crashed=True)

        outcome = run_virtually(load, self.clock)
        check_ended_in_time(job)
        if isinstance(troubles, DrawnTroubles):
            assert outcome.error is None, f"troubles that pass made it fail: {outcome.error!r}"
        if outcome.error is None and not outcome.crashed:
            damaged = [trouble for trouble, _ in troubles.met].count(
                "wrong_body"
            )  # twice: for all that a reader can know,
            found = (2.0, 1.0) if damaged > 1 else (2.0,)  # that step is damaged
            assert outcome.value in found, f"loaded {outcome.value}, and the newest is 2"
        assert newest(self.store, self.clock, self.shape) == 2.0
        return f"load: {_told(outcome)}" if troubles.met else "no trouble"

    def look(self, step: int, outcomes: list[Outcome]) -> float:
        """Check I1 to I4 with a client whose requests meet nothing; return the newest value."""
        acknowledged = {outcome.generation: outcome.value for outcome in outcomes if outcome.generation}
        assert len(acknowledged) == sum(bool(outcome.generation) for outcome in outcomes), "one generation, two winners"
        attempts = [json.loads(self.store.get(key).body)["attempt"] for key in manifests(self.store, step)]
        assert len(attempts) == len(set(attempts)) <= len(outcomes), f"committed twice: {attempts}"
        value = newest(self.store, self.clock, self.shape)
        assert value is not None
        if acknowledged:
            assert value == acknowledged[max(acknowledged)], f"{acknowledged} acknowledged, {value} is there"
        assert value in (1.0, 2.0, 3.0)
        assert newest(self.store, self.clock, self.shape, 1) == 1.0, "the earlier step was touched"
        return value

    def go_on(self) -> None:
        """Save and load step 3 in a new process: no human is needed (I5)."""
        outcome = run_virtually(lambda: save(start_job(self.store, self.clock, 96), 3, self.shape, 4.0), self.clock)
        assert outcome.error is None, repr(outcome.error)
        assert newest(self.store, self.clock, self.shape) == 4.0


def _told(outcome: Outcome) -> str:
    if outcome.crashed:
        return "crashed"
    return "done" if outcome.error is None else type(outcome.error).__name__


def case(seed: int) -> Outcomes:
    drawn = Case(seed)
    told = drawn.dice.choice(
        (
            lambda: drawn.save(drawn.passing()),
            lambda: drawn.save(drawn.worse()),
            drawn.save_twice,
            lambda: drawn.load(drawn.passing(0.1)),
            lambda: drawn.load(drawn.worse()),
        )
    )()
    return Counter({told: 1})


CAMPAIGN = Campaign(name="object-store", counts="saves and loads", prepare=lambda: case, smoke_count=40)
