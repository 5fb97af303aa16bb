"""Failures of a request on its way to an object store and back: their kinds, and the sources that produce them.

A client queries its `Troubles` once for each request. `DrawnTroubles` draws at random with a seed, so a run is
repeated by its seed; `PlannedTroubles` causes chosen failures at chosen requests.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, Protocol, get_args

import msgspec

RequestVerb = Literal[
    "PUT", "PUT-NEW", "GET", "HEAD", "LIST", "LIST-UPLOADS", "DELETE", "START", "PART", "COMPLETE", "ABORT"
]
Trouble = Literal[
    "internal_error",
    "internal_error_after_effect",
    "slow_down",
    "too_many_requests",
    "expired",
    "denied",
    "reset",
    "answer_lost",
    "timeout",
    "timeout_after_effect",
    "hang",
    "partial_body",
    "wrong_body",
    "other_writer",
    "resent",
    "error_body",
    "error_body_after_effect",
    "no_such_upload",
    "crash",
    "crash_after_effect",
]
"""Kinds of failure; "…_after_effect" affects the response only.

- internal_error 500, slow_down 503, too_many_requests 429, expired, denied 403; other_writer 409: another client is writing
  that key; error_body: 200, and the error in the body; no_such_upload 404: the store has dropped the upload.
- reset: the connection breaks, in the middle of a body; answer_lost: it breaks after the effect; resent: it does, and the
  HTTP library sends the request again, so that a conditional one fails on its own effect (412).
- timeout: no answer for as long as the client waits; hang: none, ever.
- partial_body: fewer bytes than announced; wrong_body: a flipped bit. crash: of the client.
"""

EVERYWHERE: frozenset[RequestVerb] = frozenset(
    {"PUT", "PUT-NEW", "GET", "HEAD", "LIST", "LIST-UPLOADS", "DELETE", "START", "PART", "COMPLETE", "ABORT"}
)
_ONLY: Mapping[Trouble, frozenset[RequestVerb]] = {
    "partial_body": frozenset({"GET"}),
    "wrong_body": frozenset({"GET", "PUT", "PUT-NEW", "PART"}),
    "other_writer": frozenset({"PUT-NEW", "COMPLETE"}),
    "resent": frozenset({"PUT", "PUT-NEW", "GET", "HEAD", "DELETE"}),  # what aiohttp repeats by itself: no POST
    "error_body": frozenset({"COMPLETE"}),
    "error_body_after_effect": frozenset({"COMPLETE"}),
    "no_such_upload": frozenset({"PART", "COMPLETE"}),
}
LASTING: frozenset[Trouble] = frozenset({"denied", "hang", "no_such_upload"})
"""Failures after which the request never succeeds, for any client."""
CRASHES: frozenset[Trouble] = frozenset({"crash", "crash_after_effect"})
TRANSIENT: frozenset[Trouble] = frozenset(get_args(Trouble)) - LASTING - CRASHES
"""Failures after which the same request may succeed."""


def applies_to(trouble: Trouble, verb: RequestVerb) -> bool:
    """Return whether *trouble* can happen to a request of *verb*."""
    return verb in _ONLY.get(trouble, EVERYWHERE)


class Request(msgspec.Struct, frozen=True):
    """A request: its verb, its key, and its number among those of its client, from 1."""

    verb: RequestVerb
    key: str
    number: int


class Troubles(Protocol):
    """Decides what happens to requests."""

    def next_trouble(self, request: Request) -> Trouble | None:
        """Return the trouble of *request*, None for none. Called once for each request, in order."""
        ...


class NoTroubles:
    """Troubles that never happen."""

    def next_trouble(self, request: Request) -> None:
        del request


class DrawnTroubles:
    """Troubles drawn at random: to *fraction* of the requests, one of *kinds* that can happen to such a request.

    Attributes:
        met: what has happened so far.
    """

    def __init__(self, seed: int, *, fraction: float, kinds: Collection[Trouble] = TRANSIENT) -> None:
        self._dice = random.Random(seed)
        self._fraction = fraction
        self._kinds: list[Trouble] = sorted(kinds)  # a set has no order to draw from
        self.met: list[tuple[Trouble, Request]] = []

    def next_trouble(self, request: Request) -> Trouble | None:
        if self._dice.random() >= self._fraction:
            return None
        fitting: list[Trouble] = [kind for kind in self._kinds if applies_to(kind, request.verb)]
        if not fitting:
            return None
        trouble = self._dice.choice(fitting)
        self.met.append((trouble, request))
        return trouble


class Planned(msgspec.Struct, frozen=True, kw_only=True):
    """*trouble* comes to *times* requests of *verb* for keys like *match*, from number *at* of them on, from 1."""

    trouble: Trouble
    verb: str = "*"
    match: str = "*"
    at: int = 1
    times: int = 1


class PlannedTroubles:
    """The troubles of *plan*, and no others.

    Attributes:
        met: what has happened so far.
    """

    def __init__(self, plan: Sequence[Planned]) -> None:
        self._plan = plan
        self._counts = [0] * len(plan)
        self.met: list[tuple[Trouble, Request]] = []

    def next_trouble(self, request: Request) -> Trouble | None:
        due: Trouble | None = None
        for index, planned in enumerate(self._plan):
            if not (fnmatchcase(request.verb, planned.verb) and fnmatchcase(request.key, planned.match)):
                continue
            self._counts[index] += 1
            if due is None and planned.at <= self._counts[index] < planned.at + planned.times:
                due = planned.trouble
        if due is not None:
            self.met.append((due, request))
        return due
