"""In which order, and how isolated? A run is rounds of visits, one fresh subprocess each.

Guarantees:

- Contenders and floors take turns within every round, so that a slow minute of the machine hits all of them.
- Before a visit dirty pages are written, earlier files are gone, and free memory is held by the guest (`pages.Occupier`).
- A visit that fails, or outlives its deadline, is reported and killed with its children; the others go on.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import msgspec

from benchmarks import floors, machine, pages, report
from benchmarks.floor_scenarios import FLOORS
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn, Visit, participants

VISIT_DEADLINE_S = 900.0
SAMPLING_S = 0.02
KEEP_FREE_BYTES = 2 << 30


class Plan(msgspec.Struct, frozen=True):
    """What to run.

    Attributes:
        together: few visits that do everything: quick, shows that all work, and its figures are worth nothing.
    """

    size_bytes: int
    rounds: int
    repetitions: int
    scenarios: tuple[str, ...]
    only: tuple[str, ...]
    work: Path
    together: bool = False


class Tally:
    """What the visits brought so far."""

    def __init__(self) -> None:
        self.samples: dict[str, dict[str, Samples]] = {}
        self.unavailable: dict[str, str] = {}
        self.failures: list[str] = []

    def add(self, outcome: Outcome) -> None:
        """Count *outcome* in."""
        self.unavailable.update(outcome.unavailable)
        for turn, samples in outcome.samples:
            kept = self.samples.setdefault(turn.scenario, {}).setdefault(turn.participant, {})
            for metric, values in samples.items():
                kept.setdefault(metric, []).extend(values)


def run(plan: Plan) -> report.Report:
    """Carry out *plan* and return its report. What was made below ``plan.work`` is removed again."""
    plan.work.mkdir(parents=True, exist_ok=True)
    tally = Tally()
    visits = [visit for number in range(plan.rounds) for visit in _round(plan, number)]
    if plan.together:
        _take_turns(visits, None, tally, at_once=2)
    else:
        with closing(pages.Occupier(plan.work / "occupying-free-memory", KEEP_FREE_BYTES)) as occupier:
            _take_turns(visits, occupier, tally, at_once=1)
    return report.Report(
        machine=machine.facts(plan.work, floors.supports_direct_io(plan.work)),
        state_bytes=plan.size_bytes,
        rounds=plan.rounds,
        repetitions=plan.repetitions,
        results={
            scenario: {name: report.summarise(samples, plan.size_bytes) for name, samples in per.items()}
            for scenario, per in tally.samples.items()
        },
        unavailable=tally.unavailable,
        failures=tally.failures,
    )


def _take_turns(visits: list[Visit], occupier: pages.Occupier | None, tally: Tally, at_once: int) -> None:
    """Carry out *visits*, *at_once* at the same time (more than one spoils every figure), and count them in."""
    with ThreadPoolExecutor(at_once) as pool:
        for number, outcome in enumerate(pool.map(lambda visit: _attempt(occupier, visit), visits), start=1):
            if isinstance(outcome, str):
                tally.failures.append(outcome)
            else:
                tally.add(outcome)
            print(f"[{number}/{len(visits)}] {_name(visits[number - 1])}", file=sys.stderr, flush=True)


def _round(plan: Plan, number: int) -> list[Visit]:
    """Return the visits of one round: scenario by scenario, everyone in turn, each in a process of its own."""
    turns = [
        Turn(scenario, name)
        for scenario in plan.scenarios
        for name in participants(scenario)
        if not plan.only or name in plan.only or name in FLOORS
    ]
    groups: list[tuple[Turn, ...]] = [(turn,) for turn in turns]
    if plan.together:
        families = dict.fromkeys(_family(turn) for turn in turns)
        groups = [tuple(turn for turn in turns if _family(turn) == family) for family in families]
    return [
        Visit(group, plan.size_bytes, str(plan.work / f"round-{number}-visit-{index}"), plan.repetitions)
        for index, group in enumerate(groups)
    ]


def _family(turn: Turn) -> str:
    return "dcp" if turn.participant.startswith("dcp") else "others"


def _name(visit: Visit) -> str:
    return ", ".join(f"{turn.participant} ({turn.scenario})" for turn in visit.turns)


def _attempt(occupier: pages.Occupier | None, visit: Visit) -> Outcome | str:
    """Carry out *visit* in a subprocess; return its outcome, or a sentence about its failure."""
    folder = Path(visit.folder)
    folder.mkdir(parents=True)
    os.sync()
    if occupier:
        occupier.fill()
    try:
        return _in_subprocess(visit, folder)
    except (subprocess.SubprocessError, OSError, msgspec.MsgspecError) as error:
        return f"{_name(visit)}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _in_subprocess(visit: Visit, folder: Path) -> Outcome:
    order, answer, log = folder / "visit.json", folder / "outcome.json", folder / "log.txt"
    order.write_bytes(msgspec.json.encode(visit))
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",
    }
    command = [sys.executable, "-m", "benchmarks", "visit", str(order), str(answer)]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        measures_memory = any(turn.scenario == "memory" for turn in visit.turns)
        peak = _PeakSampler(child.pid) if measures_memory else None
        try:
            code = child.wait(VISIT_DEADLINE_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            peak_bytes = peak.stop() if peak else 0
    if code:
        raise subprocess.SubprocessError(f"exit status {code}: {_last_line(log)}")
    outcome = msgspec.json.decode(answer.read_bytes(), type=Outcome)
    return _with_peak(outcome, peak_bytes)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:500] if lines else "it said nothing"


class _PeakSampler:
    """Samples the memory of a process tree from outside, so that the measured process loses nothing to it."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._peak_bytes = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._stopped.wait(SAMPLING_S):
            self._peak_bytes = max(self._peak_bytes, machine.memory_bytes(self._pid))

    def stop(self) -> int:
        """Stop and return the peak."""
        self._stopped.set()
        self._thread.join()
        return self._peak_bytes


def _with_peak(outcome: Outcome, peak_bytes: int) -> Outcome:
    """Return *outcome* with the peak of the process tree beyond what it took before its first save."""
    for turn, samples in outcome.samples:
        if turn.scenario == "memory":
            samples["beyond_bytes"] = [peak_bytes - samples["before_bytes"][0]]
    return outcome
