"""The order and the isolation of a run: rounds of visits, one fresh subprocess each.

Guarantees:

- Contenders and floors take turns within every round, so that a slow minute of the machine hits all of them.
- Before a visit dirty pages are written, earlier files are gone, and free memory is held by the guest (`pages.Occupier`).
- A visit that fails or exceeds its deadline is reported, and ended with its children; the others continue.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import floors, machine, pages, report
from benchmarks.report import Samples
from benchmarks.scenarios import SCENARIOS, Scenario
from benchmarks.visit import Outcome, Turn

CHECKOUT = Path(__file__).resolve().parents[1]
SAMPLING_S, SMOKE_SAMPLING_S = 0.02, 1.0
"""Seconds between two memory samples of a visit; a smoke visit, whose peak is meaningless, is sampled rarely."""
KEEP_FREE_BYTES = 2 << 30
END_S = 20.0
"""Seconds for a visit to end after SIGTERM: it ends its servers first."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """The plan of a run.

    Attributes:
        size_bytes: of the state; None: each scenario's own size for a smoke run.
        only: these contenders, and the floors; all when empty.
        settings: scenario → name → value, instead of the scenario's own.
        smoke: few visits that do everything: a quick check that all work; its figures are meaningless.
    """

    scenarios: tuple[str, ...]
    size_bytes: int | None
    rounds: int
    repetitions: int
    work: Path
    only: tuple[str, ...] = ()
    settings: dict[str, dict[str, Any]] = {}
    smoke: bool = False


class Tally:
    """The results of the visits so far."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, Samples]] = {}
        self.unavailable: dict[str, str] = {}
        self.failures: list[str] = []
        self.notes: dict[str, list[str]] = {}

    def add(self, outcome: Outcome) -> None:
        """Add *outcome*."""
        self.unavailable.update(outcome.unavailable)
        for scenario, row, samples in outcome.samples:
            kept = self.samples.setdefault(scenario, {}).setdefault(row, {})
            for metric, values in samples.items():
                kept.setdefault(metric, []).extend(values)
        for scenario, notes in outcome.notes.items():
            self.notes[scenario] = list(dict.fromkeys([*self.notes.get(scenario, []), *notes]))


def run(plan: Plan, keep: Callable[[report.Report], object] = lambda _: None) -> report.Report:
    """Carry out *plan* and return its report. Files made below ``plan.work`` are removed.

    Args:
        keep: called with the report so far after each visit, so that an interrupted run is not lost.
    """
    plan.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="run-", dir=plan.work) as own:  # apart from all other runs
        return _run(msgspec.structs.replace(plan, work=Path(own)), keep)


def _run(plan: Plan, keep: Callable[[report.Report], object]) -> report.Report:
    tally = Tally()
    visits = [visit for number in range(plan.rounds) for visit in _round(plan, number)]
    simulated = all(SCENARIOS[name].simulated for name in plan.scenarios)
    facts = None if simulated else machine.facts(plan.work, floors.supports_direct_io(plan.work))
    if plan.smoke or simulated:
        _take_turns(visits, None, tally, at_once=2 if plan.smoke else 1, keep=lambda: keep(_report(plan, facts, tally)))
    else:
        with closing(pages.Occupier(plan.work / "occupying-free-memory", KEEP_FREE_BYTES)) as occupier:
            _take_turns(visits, occupier, tally, at_once=1, keep=lambda: keep(_report(plan, facts, tally)))
    return _report(plan, facts, tally)


def _report(plan: Plan, facts: machine.Machine | None, tally: Tally) -> report.Report:
    return report.Report(
        machine=facts,
        state_bytes=plan.size_bytes or max(SCENARIOS[name].smoke_bytes for name in plan.scenarios),
        rounds=plan.rounds,
        repetitions=plan.repetitions,
        results={
            scenario: {row: report.summarise(samples, _size(plan, scenario)) for row, samples in per.items()}
            for scenario, per in tally.samples.items()
        },
        unavailable=tally.unavailable,
        failures=tally.failures,
        settings={name: found for name in plan.scenarios if (found := _settings(plan, SCENARIOS[name]))},
        notes=tally.notes,
    )


def _take_turns(
    visits: list[list[Turn]], occupier: pages.Occupier | None, tally: Tally, at_once: int, keep: Callable[[], object]
) -> None:
    """Carry out *visits*, *at_once* at the same time (more than one spoils every figure), and add their outcomes."""
    with ThreadPoolExecutor(at_once) as pool:
        for number, outcome in enumerate(pool.map(lambda visit: _attempt(occupier, visit), visits), start=1):
            if isinstance(outcome, str):
                tally.failures.append(outcome)
            else:
                tally.add(outcome)
            print(f"[{number}/{len(visits)}] {_name(visits[number - 1])}", file=sys.stderr, flush=True)
            keep()


def _size(plan: Plan, scenario: str) -> int:
    return SCENARIOS[scenario].smoke_bytes if plan.size_bytes is None else plan.size_bytes


def _settings(plan: Plan, scenario: Scenario) -> dict[str, Any]:
    smoke = scenario.smoke if plan.smoke else {}
    return {**scenario.settings, **smoke, **plan.settings.get(scenario.name, {})}


def _round(plan: Plan, number: int) -> list[list[Turn]]:
    """Return the visits of one round: scenario by scenario, each contender in turn, in a process of its own."""
    turns = []
    for scenario in (SCENARIOS[name] for name in plan.scenarios):
        names = tuple(
            name
            for name in (*scenario.floors, *scenario.contenders)
            if not plan.only or name in plan.only or name.startswith("floor") or name in scenario.always
        )
        groups = [names] if scenario.paired else [(name,) for name in names]
        turns += [
            Turn(
                scenario=scenario.name,
                contenders=group,
                size_bytes=_size(plan, scenario.name),
                folder=str(plan.work / f"round-{number}-{scenario.name}-{index}"),
                repetitions=plan.repetitions,
                settings=_settings(plan, scenario),
                number=number,
                smoke=plan.smoke,
            )
            for index, group in enumerate(groups)
            if group
        ]
    if not plan.smoke:
        return [[turn] for turn in turns]
    families = dict.fromkeys(_family(turn) for turn in turns)
    return [[turn for turn in turns if _family(turn) == family] for family in families]


def _family(turn: Turn) -> str:
    return "dcp" if turn.contenders[0].startswith("dcp") else "others"


def _name(visit: list[Turn]) -> str:
    return ", ".join(f"{' + '.join(turn.contenders)} ({turn.scenario})" for turn in visit)


def _attempt(occupier: pages.Occupier | None, visit: list[Turn]) -> Outcome | str:
    """Carry out *visit* in a subprocess; return its outcome, or a sentence about its failure."""
    folders = [Path(turn.folder) for turn in visit]
    for folder in folders:
        folder.mkdir(parents=True)
    os.sync()
    if occupier:
        occupier.fill()
    try:
        return _in_subprocess(visit, folders[0])
    except (subprocess.SubprocessError, OSError, msgspec.MsgspecError) as error:
        return f"{_name(visit)}: {error}"
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def _in_subprocess(visit: list[Turn], folder: Path) -> Outcome:
    order, answer, log = (folder.parent / f"{folder.name}.{end}" for end in ("order", "answer", "log"))
    order.write_bytes(msgspec.json.encode(visit))
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(CHECKOUT)]).lstrip(os.pathsep),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, "-m", "benchmarks", "visit", str(order), str(answer)]
    try:
        with log.open("wb") as output:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        every_s = SAMPLING_S if len(visit) == 1 else SMOKE_SAMPLING_S
        peak = _PeakSampler(child.pid, every_s) if any(turn.scenario == "memory" for turn in visit) else None
        try:
            code = child.wait(sum(SCENARIOS[turn.scenario].deadline_s for turn in visit))
        finally:
            _end(child)
            peak_bytes = peak.stop() if peak else 0
        if code:
            raise subprocess.SubprocessError(f"exit status {code}: {_last_line(log)}")
        return _with_peak(msgspec.json.decode(answer.read_bytes(), type=Outcome), peak_bytes)
    finally:
        for path in (order, answer, log):
            path.unlink(missing_ok=True)


def _end(child: subprocess.Popen[bytes]) -> None:
    """End *child*, if it still runs, and the processes left in its session."""
    if child.poll() is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(END_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _last_line(log: Path) -> str:
    """Return the last line that names an error, or the last line at all."""
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\w(Error|Exception)\b.*: ", line)]
    return (errors or lines or ["it said nothing"])[-1][:500]


class _PeakSampler:
    """Samples the memory of a process tree from outside, so that sampling costs the measured process nothing."""

    def __init__(self, pid: int, every_s: float) -> None:
        self._pid = pid
        self._every_s = every_s
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(self._every_s):
            self._peak_bytes = max(self._peak_bytes, machine.memory_bytes(self._pid))

    def stop(self) -> int:
        """Stop and return the peak."""
        self._stopped.set()
        self._thread.join()
        return self._peak_bytes


def _with_peak(outcome: Outcome, peak_bytes: int) -> Outcome:
    """Return *outcome* with the peak of the process tree beyond its memory before its first save."""
    for scenario, _, samples in outcome.samples:
        if scenario == "memory":
            samples["beyond_bytes"] = [peak_bytes - samples["before_bytes"][0]]
    return outcome
