"""Observations of each script. No statement about a contender is made by hand; it is run, and its notes are read."""

from __future__ import annotations

import difflib
import io
import random
import shutil
import statistics
import time
import tokenize
from pathlib import Path
from typing import Any

from benchmarks.same_job.contenders import Contender
from benchmarks.same_job.launch import DEADLINE_S, WATCH_S, Job, Size, interpreter, marks, run, watch

SCRIPTS = Path(__file__).parent / "scripts"
Notes = list[dict[str, Any]]


def code_lines(source: str) -> list[str]:
    """Return the lines of a script that are code: no blanks, no comments, no docstrings; without indentation."""
    kept: dict[int, str] = {}
    lines = source.splitlines()
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    begins = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped and not (begins and token.type == tokenize.STRING):
            kept |= {number: lines[number - 1].strip() for number in range(token.start[0], token.end[0] + 1)}
        begins = token.type in skipped
    return [kept[number] for number in sorted(kept)]


def count_lines(contender: Contender) -> int:
    """Return the number of code lines that a diff adds to the baseline of a script."""
    before, after = (
        code_lines((SCRIPTS / f"{name}.py").read_text()) for name in (contender.baseline, contender.script)
    )
    return sum(line.startswith("+ ") for line in difflib.ndiff(before, after))


def saved_at(contender: Contender, size: Size) -> list[int]:
    """Return the steps after which the script saves, without the first, which allocates memory."""
    return list(range(size.every + contender.offset, size.steps, size.every))


def measure(contender: Contender, work: Path, size: Size, baseline_s: float) -> dict[str, list[float]]:
    """Return pauses, times to durable and time lost of one run, in seconds."""
    job = Job(interpreter(contender), contender.script, work / "timed", size, digests=False)
    try:
        durable = watch(job, contender)
    finally:
        job.kill()
    notes = {note["step"]: note for note in job.notes()}
    gaps = {
        step: notes[step + 1]["start_s"] - note["end_s"] + notes[step + 1]["waited_s"]
        for step, note in notes.items()
        if step + 1 in notes
    }
    saves = saved_at(contender, size)
    quiet = statistics.median(gap for step, gap in gaps.items() if step not in saves and step)
    ends = durable[-len(saves) :]
    lasted = max(notes[size.steps - 1]["end_s"], ends[-1]) - notes[0]["start_s"]
    shutil.rmtree(job.folder)
    return {
        "pause_s": [gaps[step] - quiet for step in saves if step in gaps],
        "durable_s": [end - notes[step]["end_s"] for step, end in zip(saves, ends, strict=True)],
        "lost_s": [(lasted - baseline_s) / len(durable)],
    }


def measure_baseline(contender: Contender, work: Path, size: Size) -> float:
    """Return the seconds that the script without checkpoints trains."""
    job = Job(interpreter(contender), contender.baseline, work / "baseline", size, digests=False)
    failure = job.wait()
    if failure:
        raise RuntimeError(f"{contender.baseline}: {failure}")
    notes = job.notes()
    return float(notes[-1]["end_s"] - notes[0]["start_s"])


def straight(contender: Contender, work: Path, size: Size) -> Notes:
    """Run the script without failures; its checkpoints stay in ``straight``."""
    notes, failure, _ = run(interpreter(contender), contender.script, work / "straight", size)
    if failure or len(notes) != size.steps:
        raise RuntimeError(f"{contender.name}: {failure}")
    return notes


def compare(notes: Notes, truth: Notes, failure: str) -> dict[str, Any]:
    """Return of a restarted run: its first step, and whether it began and ended in the states of *truth*."""
    if failure or not notes:
        return {"failed": failure or "no step was trained"}
    first, last = notes[0], notes[-1]
    expected = truth[first["step"] - 1]["after"] if first["step"] else truth[0]["before"]
    return {
        "from": first["step"] - 1,
        "state": first["before"] == expected,
        "end": last["after"] == truth[last["step"]]["after"] if last["step"] < len(truth) else None,
    }


def kill_in_save(contender: Contender, work: Path, size: Size, truth: Notes, delay_s: float) -> dict[str, Any]:
    """Kill all ranks *delay_s* after the third save began, start the script again, and compare the run with *truth*."""
    folder = work / "killed"
    job = Job(interpreter(contender), contender.script, folder, size)
    step = saved_at(contender, size)[1]
    until = time.monotonic() + DEADLINE_S
    try:
        while not (notes := job.notes()) or notes[-1]["step"] < step:
            if not job.runs() or time.monotonic() > until:
                raise RuntimeError(f"{contender.name}: {job.error()}")
            time.sleep(WATCH_S)
        time.sleep(max(0.0, notes[-1]["end_s"] + delay_s - time.monotonic()))
    finally:
        job.kill()
    whole = len(marks(folder, contender))
    again, failure, _ = run(interpreter(contender), contender.script, folder, size)
    shutil.rmtree(folder)
    return {"step": step, "delay_s": delay_s, "whole": whole, **compare(again, truth, failure)}


def flip(contender: Contender, work: Path, size: Size, truth: Notes, chance: random.Random) -> dict[str, Any]:
    """Flip one bit of the newest checkpoint's files, start the script again for one step, and compare its state."""
    folder = work / "flipped"
    shutil.copytree(work / "straight", folder, symlinks=True)
    newest = max(marks(folder, contender), key=lambda mark: mark.stat().st_mtime_ns).relative_to(folder).parts[0]
    files = [path for path in sorted((folder / newest).rglob("*")) if path.is_file()]
    path = chance.choices(files, [file.stat().st_size for file in files])[0]
    at = chance.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ (1 << chance.randrange(8))]))
    notes, failure, log = run(interpreter(contender), contender.script, folder, size)
    shutil.rmtree(folder)
    told = any(name in log for name in (path.name, newest))
    return {"file": str(path.relative_to(folder)), "at": at, "told": told, **compare(notes, truth, failure)}


def restart_on(ranks: int, contender: Contender, work: Path, size: Size, truth: Notes) -> dict[str, Any]:
    """Start the script again on another number of ranks, and compare its initial state."""
    folder = work / f"on-{ranks}"
    shutil.copytree(work / "straight", folder, symlinks=True)
    notes, failure, _ = run(interpreter(contender), contender.script, folder, size, ranks)
    shutil.rmtree(folder)
    return {"ranks": ranks, **compare(notes, truth, failure)}
