"""The measured figures of the house beside their ceilings, and the table of ceilings that lowers with them."""

import tempfile
import tomllib
from pathlib import Path

import msgspec

from tests.house.source import APART, CORE, ROOT, Source
from tests.journey import ACTS, watch

TABLE = Path(__file__).with_name("ceilings.toml")
HEAD = """\
# Ceilings of the house; `make house` shows them beside what is measured, and the tests hold them.
# A ceiling goes down with the work (`make house ARGS=--lower`), and up only in a commit whose body says what the lines buy.
# `aim` is where the figure is to stand; a figure without one is only held.
"""

WINGS = {
    "the face and the engine": (".", "engine", "session"),
    "the adapters and data": ("adapters", "data"),
    "worker, lazy and runtime": ("worker", "lazy", "runtime"),
    "format, planning and state": ("format", "planning", "state"),
    "places and policies": (
        *("places", "places/readers", "places/tiers", "policies", "policies/cadence"),
        *("session/preemption", "sizing"),
    ),
    "the tools": ("convert", "monitor", "prove", "tools", "tools/cli", "tools/examples", "tools/stress"),
}
"""Folders whose lines have one aim together."""
ROOM = 1.02
"""What the body lines of a path may be beyond what was measured: a busy machine takes some more turns."""


class Ceiling(msgspec.Struct, frozen=True, omit_defaults=True):
    """The most that a figure may be, and what it is to become; for what shall be more, both are negative."""

    most: float
    aim: float | None = None


def read_ceilings() -> dict[str, Ceiling]:
    """Return the ceilings of the table, by the name of the figure."""
    return msgspec.convert(tomllib.loads(TABLE.read_text()), dict[str, Ceiling])


def write_ceilings(ceilings: dict[str, Ceiling]) -> None:
    """Write the table anew."""
    lines = [
        f'"{name}" = {{ most = {one.most:.10g}' + (f", aim = {one.aim:g}" if one.aim is not None else "") + " }"
        for name, one in ceilings.items()
    ]
    TABLE.write_text(HEAD + "\n" + "\n".join(lines) + "\n")


def measure_source(root: Path = ROOT) -> dict[str, float]:
    """Return the figures of the text: lines and files by folder, imports, words."""
    source = Source(root)
    folders = source.folders()
    figures: dict[str, float] = {}
    for folder, files in sorted(folders.items()):
        figures[f"lines of {folder}"] = sum(source.texts[name].count("\n") for name in files)
        figures[f"files of {folder}"] = len(files)
    apart = sum(figures[f"lines of {folder}"] for folder in APART)
    core = sum(figures[f"lines of {folder}"] for folder in (*CORE, "."))
    core += source.lines("backends/local")
    figures |= {
        f"lines of {wing}": sum(figures.get(f"lines of {folder}", 0) for folder in parts)
        for wing, parts in WINGS.items()
    }
    figures |= {
        "lines of the core": core,
        "lines of the product": source.lines("aiockpt/", "backends/") - apart,
        "lines of the tests": sum(path.read_text().count("\n") for path in root.glob("tests/**/*.py")),
        "files in circles of imports": sum(map(len, source.circles)),
        "circles of imports": len(source.circles),
        "files with one user in their folder": len(source.single_users),
        "modules that open with a question": len(source.questions()),
        "persons per 1,000 words of docstrings": round(source.persons_per_1000_words(), 2),
        "names for what persons do": len(source.persons_in_names()),
        "minus per cent of lines that are comments": -round(100 * source.comment_fraction(), 2),
    }
    return figures


def lowered(ceiling: Ceiling, name: str, figure: float) -> Ceiling:
    """Return the ceiling of a figure that was measured; never a higher one."""
    most = round(figure * ROOM) if name.startswith("body lines") else figure
    return Ceiling(min(ceiling.most, most), ceiling.aim)


def measure_path() -> dict[str, float]:
    """Return the figures of a warm save and a warm load of one process."""
    figures: dict[str, float] = {}
    for name, act in ACTS.items():
        with tempfile.TemporaryDirectory() as folder:
            passed = watch(folder, act)
        figures[f"files that a {name} passes"] = len(passed.functions)
        figures[f"body lines that a {name} passes"] = passed.body_lines
        if way := passed.way_to_pwrite:
            figures["calls from save to pwrite"] = len(way)
    return figures
