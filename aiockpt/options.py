"""Option structs (frozen), each field with its unit, default and the reason for the default.

The readers of environment variables are here too (`launched_world_size`, `announced_end_s`).
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, NoReturn, ParamSpec, TypeVar, get_args

import msgspec

from aiockpt.errors import UsageError, kind_in_words
from aiockpt.format.document import BLOCK_BYTES
from aiockpt.redaction import redact
from aiockpt.units import parse_seconds

# Checks of options: an error names a misspelt keyword with the one that may be meant, and a wrong value with its option
# and what is allowed.


P = ParamSpec("P")
R = TypeVar("R")


def refuse_value(call: str, name: str, value: object, advice: str) -> NoReturn:
    """Raise UsageError for a wrong *value* of an option; *advice* is what to pass instead.

    A value that is neither a number, a string nor options is not printed: it may be a model.

    Args:
        call: the one with the option *name*: ``"IO"``, or ``"Tier('/local'"`` with what identifies it; may be empty.
    """
    plain = value is None or isinstance(value, bool | int | float | str | msgspec.Struct)
    given = f"{name}={repr(value) if plain else kind_in_words(value)}"
    if call:
        given = f"{call}{', ' if '(' in call else '('}{given})"
    raise UsageError(f"{given}: give {advice}")


def check_count(call: str, name: str, value: object, *, least: int = 1, optional: bool = False) -> None:
    """Raise UsageError unless *value* is an int of at least *least*; with *optional*, or None."""
    # Not isinstance: True would count as 1.
    if (optional and value is None) or (type(value) is int and value >= least):
        return
    refuse_value(call, name, value, f"an int of at least {least}" + (", or None" if optional else ""))


def check_amount(call: str, name: str, value: object, unit: str, *, optional: bool = False) -> None:
    """Raise UsageError unless *value* is a number above 0; with *optional*, or None."""
    if optional and value is None:
        return
    # `not >` in place of `<=`: NaN is neither.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        refuse_value(call, name, value, f"more than 0{unit}" + (", or None" if optional else ""))


def check_keywords(what: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise UsageError when a keyword of the call *what* is not one of the *known* ones; suggest a close one."""
    known = [name for name in known if name != "self"]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, 1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"{what}({name}=…): there is no such option.{hint} There are {', '.join(known)}")


def keywords_checked(init: Callable[P, R]) -> Callable[P, R]:
    """Make an ``__init__`` with many keywords raise for a misspelt one, as `check_keywords` does."""
    what, known = init.__qualname__.partition(".")[0], inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        check_keywords(what, kwargs, known)
        return init(*args, **kwargs)

    return checked


class KeywordsChecked(msgspec.StructMeta):
    """The metaclass of structs whose constructors do the same (msgspec has no ``__init__`` that could be wrapped)."""

    if not TYPE_CHECKING:  # type checkers know the fields; this signature would hide them

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  of a metaclass
            check_keywords(cls.__name__, kwargs, cls.__struct_fields__)
            return super().__call__(*args, **kwargs)


MIB = 1 << 20
GIB = 1 << 30

SHARED_BLOCK_BYTES = MIB

OnExists = Literal["new_generation", "skip", "raise"]
"""A step that is committed already: save it again as a new generation (the default), leave it, or raise."""

Verify = Literal["read", "full", "none"]
"""Check the blocks that are read (default), every block of the checkpoint first, or nothing (benchmarks only)."""

Snapshot = Literal["eager", "lazy", "device"]
"""When tensors are copied: before ``save`` returns (default); in the background, until an optimizer steps; or at once into a
second copy on the device, where it has room, and from there to the host in the background."""

Debug = Literal["digest"]
"""Compare digests of the state at the call with those at the end of the copy: a change meanwhile fails the save."""

Screen = Literal["finite"]
"""What a save is checked for while it is written: numbers that are NaN or infinite."""

Replicas = Literal["check", "first"]
"""Values of a tensor on several ranks must be equal, or the save fails (default); or one rank's are saved unchecked."""

WhenFull = Literal["wait", "skip", "eager"]
"""``max_in_flight`` saves are running, or no slab is free for a lazy one: wait (default; a lazy save does so in the
background, and holds the optimizers meanwhile), skip this save, or wait and copy in the call."""

Worker = Literal["thread", "process"]
"""The writer: a thread of this process (default), or a process of its own, which can outlive this one."""

OnError = Literal["raise", "warn"] | Callable[[Any], object]
"""Reaction to a failed background save: raise at the next call (default), warn, or call this with its future."""

Mode = Literal["min", "max"]
"""Whether the least or the greatest value of a metric is the best."""

_LOW = frozenset(["loss", "nll", "perplexity", "ppl", "error", "err", "mse", "rmse", "mae", "wer", "cer", "fid"])
_HIGH = frozenset([
    "acc", "accuracy", "auc", "auroc", "f1", "map", "iou", "miou", "dice", "precision", "recall", "bleu",
    "rouge", "psnr", "ssim", "reward", "return", "score",
])  # fmt: skip
"""Words of metrics whose direction is beyond doubt."""


def check_choice(name: str, value: object, words: object, call: str = "") -> None:
    """Raise UsageError when *value*, of an option of *call*, is not one of the *words* of a Literal."""
    if not isinstance(value, str) or value not in get_args(words):
        refuse_value(call, name, value, f"one of {', '.join(map(repr, get_args(words)))}")


def _check_reaction(call: str, value: object, reactions: object) -> None:
    """Raise UsageError when *value*, the ``on_error`` of *call*, is neither callable nor one of the words of a union."""
    words = get_args(get_args(reactions)[0])
    if not callable(value) and (not isinstance(value, str) or value not in words):
        refuse_value(call, "on_error", value, f"{', '.join(map(repr, words))} or a callable")


def mode_by_name(metric: str) -> Mode:
    """Return whether low or high values of *metric* are good, where its name says so."""
    words = [word for word in re.findall("f1|[a-z]+", metric.lower()) if word in _LOW | _HIGH]
    if not words:
        name = repr(metric)
        raise UsageError(
            f"Best({name}): whether low or high values are good does not follow from this name: write "
            f"aiockpt.Best({name}, mode='min') or aiockpt.Best({name}, mode='max')"
        )
    return "min" if words[-1] in _LOW else "max"


class Best(msgspec.Struct, frozen=True, metaclass=KeywordsChecked):
    """The *count* steps with the best *metric*, as passed to ``save(…, metrics={metric: value})``.

    Steps without it, and those where it is not finite, do not count; of equal ones the oldest is the best.

    Attributes:
        mode: whether the lowest (``"min"``) or the highest (``"max"``) is the best; None goes by the last word of the name
            that tells it, such as loss, error, accuracy or reward.
    """

    metric: str
    count: int = 1
    mode: Mode | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            refuse_value(
                "Best", "metric", self.metric, "the name of a metric, as save(…, metrics={name: value}) has it"
            )
        check_count("Best", "count", self.count)
        if self.mode is None:
            msgspec.structs.force_setattr(self, "mode", mode_by_name(self.metric))
        check_choice("mode", self.mode, Mode, "Best")


class Retention(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """What to keep. A step is kept when any rule names it; the newest committed and newest verified always are.

    Steps in which `Checkpointer`'s ``screen`` found numbers that are not finite count for neither *last*, *best* nor
    *optimizer* while there are others, so that the newest finite one stays, and in full.

    Attributes:
        last: keep the newest *last* steps of the current lineage; None keeps all.
        every: keep each step divisible by *every*; None adds no step.
        best: keep the best steps by a metric; None adds no step.
        newer_than: keep each step that is younger (``"7d"``, ``"36h"``, seconds) by the dates and the clock of the storage,
            or of unknown age. Without *last*, only the newest step is kept besides. None adds no step.
        optimizer: of the steps that are kept, the newest *optimizer* are kept in full, and so is the newest verified one;
            the others keep their weights alone, and cannot be resumed from. None keeps all of them in full.
        grace_s: seconds, by the storage's clock, before an uncommitted attempt counts as garbage. A day, so
            that a slow save of another job never counts as a dead one.
    """

    last: int | None = None
    every: int | None = None
    best: Best | None = None
    newer_than: float | str | None = None
    optimizer: int | None = None
    grace_s: float = 24 * 3600.0

    def __post_init__(self) -> None:
        for name in ("last", "every", "optimizer"):
            check_count("Retention", name, getattr(self, name), optional=True)
        best: object = self.best
        if not isinstance(best, Best | None):
            metric = best if isinstance(best, str) else "loss"
            refuse_value("Retention", "best", best, f"aiockpt.Best({metric!r}), or None")
        if self.newer_than is not None and not parse_seconds(self.newer_than):
            refuse_value("Retention", "newer_than", self.newer_than, "a time such as '7d' or '36h', seconds, or None")
        if self.grace_s != 0:
            check_amount("Retention", "grace_s", self.grace_s, " seconds, or 0")


Content = Literal["full", "weights"]
"""What a tier holds of a step: all of it, or what its modules hold."""

TierError = Literal["warn", "raise"] | Callable[[BaseException], object]
"""Reaction to a step that did not reach a tier: log (default), raise at the next call, or call this with the error."""


class Tier(msgspec.Struct, frozen=True, metaclass=KeywordsChecked):
    """One of several places for checkpoints; give them in order, the nearest first: ``[Tier("shm://"), Tier("/local"), …]``.

    A save is written to the first tier, and from there copied to the others in the background, never from the GPU again.
    It is *committed* in the first durable tier that accepts all of it.

    Attributes:
        url: a path, a URL, or a backend.
        every: accepts the steps that are multiples of it; None accepts each.
        keep: the number of newest steps to keep there, or rules; None keeps all, but in a memory tier before a
            durable one only the newest, and in ``peer://`` two.
        deadline: seconds for which the copy of a step to this tier is retried before the tier abandons the step.
        bandwidth: bytes/s of one process into this tier, when it is not the one that a save waits for. None: no limit. The
            default costs a training step less than 3 % (benchmarks/README.md).
        on_error: what to do when the tier has abandoned a step.
        content: ``"full"``, or ``"weights"``: the parameters, buffers and extra values of the state's modules, as a
            checkpoint of their own that loads into a bare ``{"model": model}``. It is made from a nearer tier that has the
            step in full, counts as no commit, and cannot be resumed from.
        copies: of ``peer://``, the memory of the job's hosts: how many other hosts hold a copy of each file.
        apart: of ``peer://``: what a host must not share with one that holds its copies: ``"host"``, the name of an
            environment variable that names the host's rack or block, or a function that returns that name.
        network: of ``peer://``: the address of this host, or the network interface, that other hosts reach it by; None for
            the one by which this host reaches the store of the ranks.
    """

    url: Any
    every: int | None = None
    keep: int | Retention | None = None
    deadline: float = 3600.0
    bandwidth: float | None = 200e6
    on_error: TierError = "warn"
    content: Content = "full"
    copies: int = 1
    apart: str | Callable[[], str] = "host"
    network: str | None = None

    def __repr__(self) -> str:
        given = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return redact(f"Tier({', '.join(f'{name}={value!r}' for name, value in given)})")

    def __post_init__(self) -> None:
        tier = f"Tier({self.url!r}"
        check_count(tier, "every", self.every, optional=True)
        if not isinstance(self.keep, Retention):
            check_count(tier, "keep", self.keep, optional=True)
        check_amount(tier, "deadline", self.deadline, " seconds")
        check_amount(tier, "bandwidth", self.bandwidth, " bytes/s", optional=True)
        check_choice("content", self.content, Content, tier)
        check_count(tier, "copies", self.copies, least=0)
        _check_reaction(tier, self.on_error, TierError)

    @property
    def retention(self) -> Retention | None:
        """What is kept there, as rules."""
        return Retention(last=self.keep) if isinstance(self.keep, int) else self.keep

    @property
    def full(self) -> bool:
        """Whether a run can be resumed from it."""
        return self.content == "full"

    def takes(self, step: int) -> bool:
        """Return whether the tier accepts *step*."""
        return self.every is None or step % self.every == 0


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Check that each tier can get the steps that it accepts from a nearer one.

    Raises:
        UsageError: a tier of weights accepts steps that no nearer tier has in full.
    """
    for number, tier in enumerate(tiers):
        nearer = [other for other in tiers[:number] if other.full]
        if not tier.full and not any((tier.every or 1) % (other.every or 1) == 0 for other in nearer):
            every = "" if tier.every is None else f", every={tier.every}"
            raise UsageError(
                f"Tier({tier.url!r}, content='weights'{every}): its steps are made from a nearer tier that has all of "
                "them in full, and there is none; put one before it"
            )


class IO(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """Sizes and speeds of transfers. The defaults are measured (benchmarks/README.md); few runs need others.

    Attributes:
        pool_bytes: the staging pool. None uses the size of the state, at most a quarter of the spare memory: with a pool
            as large as the state the pause is one copy. A smaller one works; the pause then includes writing.
        slab_bytes: bytes of one slab, and of one write; a multiple of *block_bytes*. 16 MiB hides a thread hop.
        block_bytes: bytes under one checksum, a power of two of at least 4 KiB; reads are of whole blocks. None uses
            8 MiB for a process that saves alone, and 1 MiB for one of several: other ranks will read other parts.
        file_bytes: size at which a data file ends and the next begins. One file a rank is fastest; 4 GiB suits every tool.
        read_bytes: bytes of one read; a multiple of *block_bytes*.
        verify: which blocks are checked while loading.
        bandwidth: bytes/s of a save into the place that it waits for. None: no limit. For a disk or
            a network that training needs too.
        nice: the niceness of a writer process (``worker="process"``), for the processor and the disk, from 0 to 19 as
            in ``nice(1)``. 0, because a save should end soon.
    """

    pool_bytes: int | None = None
    slab_bytes: int = 16 * MIB
    block_bytes: int | None = None
    file_bytes: int = 4 * GIB
    read_bytes: int = 16 * MIB
    verify: Verify = "read"
    bandwidth: float | None = None
    nice: int = 0

    def __post_init__(self) -> None:
        check_amount("IO", "bandwidth", self.bandwidth, " bytes/s", optional=True)
        for name in ("pool_bytes", "block_bytes"):
            check_count("IO", name, getattr(self, name), optional=True)
        for name in ("slab_bytes", "file_bytes", "read_bytes"):
            check_count("IO", name, getattr(self, name))
        check_choice("verify", self.verify, Verify, "IO")
        block = BLOCK_BYTES if self.block_bytes is None else self.block_bytes
        if block < 4096 or block & (block - 1):
            raise UsageError(f"IO(block_bytes={block}): give a power of two of at least 4096")
        for name in ("slab_bytes", "read_bytes"):
            value = getattr(self, name)
            if value < block or value % block:
                raise UsageError(f"IO({name}={value}): give a multiple of block_bytes ({block})")
        if self.pool_bytes is not None and self.pool_bytes < self.slab_bytes:
            raise UsageError(f"IO(pool_bytes={self.pool_bytes}): give at least one slab ({self.slab_bytes})")
        if type(self.nice) is not int or not 0 <= self.nice <= 19:
            refuse_value("IO", "nice", self.nice, "an int of 0 to 19")


MOST_DEADLINE_S = 100 * 365 * 86400.0
"""What a longer deadline, such as inf, becomes: threads cannot wait for that (`threading.TIMEOUT_MAX`)."""


class Deadlines(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """Seconds before a wait times out, and its error names what it waited for. No deadline stops a transfer that progresses.

    Attributes:
        slab_s: for a free slab while a snapshot is taken. Long, because the disk is slow then, not the engine.
        commit_s: for the receipts of all ranks and the manifest; and for one call of a file system to return, with the
            time for its bytes at 4 MiB/s.
        ranks_s: for the other ranks, while all plan the first save of a structure or agree on what to load.
        takeover_s: after voting, for rank 0 to commit; then any rank that finds all votes commits in its place.
        close_s: for everything in flight, when the checkpointer is closed or the interpreter exits.
    """

    slab_s: float = 600.0
    commit_s: float = 600.0
    ranks_s: float = 600.0
    takeover_s: float = 30.0
    close_s: float = 1800.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            check_amount("Deadlines", name, getattr(self, name), " seconds")
            msgspec.structs.force_setattr(self, name, min(getattr(self, name), MOST_DEADLINE_S))


class Lazy(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """What a lazy save copies in the call, and what it compares: ``Checkpointer(…, lazy=Lazy(mutable=["model.gate"]))``.

    Attributes:
        mutable: names of tensors, or their prefixes, that are copied in the call although an optimizer owns them.
            What no optimizer owns (buffers, bare tensors, an EMA, frozen parameters) is copied there anyway.
        immutable: the same for tensors that may stay in place although no optimizer owns them: frozen weights.
        debug: ``"digest"`` compares the state before and after each snapshot, eager ones too, and fails a save whose state
            has changed.
    """

    mutable: Sequence[str] = ()
    immutable: Sequence[str] = ()
    debug: Debug | None = None

    def __post_init__(self) -> None:
        for name in ("mutable", "immutable"):
            value = getattr(self, name)
            if isinstance(value, str):
                refuse_value("Lazy", name, value, f"a list of names, [{value!r}]")
            if not isinstance(value, Sequence):
                refuse_value("Lazy", name, value, "a list of names, such as ['model.buffer']")
        if self.debug is not None:
            check_choice("debug", self.debug, Debug, "Lazy")


class Limits(msgspec.Struct, frozen=True, kw_only=True, metaclass=KeywordsChecked):
    """How many saves run at once, the sizes of their pieces, and the deadlines of waits.

    Attributes:
        io: pool, block and slab sizes, speeds, verification.
        deadlines: when a wait times out.
        max_in_flight: saves that may run at once.
        when_full: ``"wait"`` for the oldest when that many run, or ``"skip"`` the new one (its future raises). A lazy save
            waits in the background, and holds the optimizers meanwhile; ``"eager"`` makes it wait in the call.
    """

    io: IO = IO()
    deadlines: Deadlines = Deadlines()
    max_in_flight: int = 2
    when_full: WhenFull = "wait"

    def __post_init__(self) -> None:
        for name, kind in (("io", IO), ("deadlines", Deadlines)):
            if not isinstance(getattr(self, name), kind):
                refuse_value("Limits", name, getattr(self, name), f"an aiockpt.{kind.__name__}(…)")
        check_count("Limits", "max_in_flight", self.max_in_flight)
        check_choice("when_full", self.when_full, WhenFull, "Limits")


class Options(Limits, frozen=True, kw_only=True):
    """All choices of one checkpointer, its limits among them, checked; `aiockpt.Checkpointer` documents them."""

    snapshot: Snapshot = "eager"
    lazy: Lazy = Lazy()
    screen: Screen | None = None
    replicas: Replicas = "check"
    retention: Retention | None = None
    every: int | None = None
    on_exists: OnExists = "new_generation"
    on_error: OnError = "raise"
    save_last: bool = True
    worker: Worker = "thread"
    config: object = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rules: object = self.retention
        if not isinstance(rules, Retention | None):
            refuse_value(
                "", "retention", rules, f"an aiockpt.Retention({f'last={rules}' if type(rules) is int else '…'})"
            )
        if self.every is not None and (type(self.every) is not int or self.every < 1):
            refuse_value(
                "", "every", self.every, "an int of at least 1, a Cadence, or None to decide each save yourself"
            )
        check_choice("snapshot", self.snapshot, Snapshot)
        check_choice("on_exists", self.on_exists, OnExists)
        check_choice("worker", self.worker, Worker)
        check_choice("replicas", self.replicas, Replicas)
        if self.screen is not None:
            check_choice("screen", self.screen, Screen)
        _check_reaction("", self.on_error, OnError)
        if self.io.nice and self.worker == "thread":
            raise UsageError(f"IO(nice={self.io.nice}) is for a writer process: give worker='process' as well")


def launched_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Return the world size a launcher announced in ``WORLD_SIZE``; 1 when none did."""
    try:
        return max(1, int(environment.get("WORLD_SIZE", "1")))
    except ValueError:
        raise UsageError(f"WORLD_SIZE={environment['WORLD_SIZE']!r} is not a number") from None


def announced_end_s(environment: Mapping[str, str] = os.environ) -> float | None:
    """Return when the allocation of this job ends, in seconds since 1970, where Slurm announced it."""
    try:
        return float(environment["SLURM_JOB_END_TIME"])
    except (KeyError, ValueError):
        return None
