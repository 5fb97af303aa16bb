"""The command ``python -m benchmarks``: ``list`` the scenarios, ``run`` some, print the ``table`` of the results."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import columns, report, runner, table
from benchmarks.scenarios import MAIN, SCENARIOS, Scenario
from benchmarks.visit import Turn, perform

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
FOLDER = runner.CHECKOUT / "benchmarks"
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def size(text: str) -> int:
    """Return the bytes that *text* means, for example ``2GiB``."""
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB|)", text)
    if not match:
        raise typer.BadParameter(f"{text!r} is no size: write it as 256MiB or 2GiB")
    return int(match[1]) * _UNITS[match[2]]


def chosen(names: list[str], sets: list[str], contenders: list[str]) -> dict[str, dict[str, Any]]:
    """Return scenario → its settings from *sets*, in the types of the table.

    Raises:
        typer.BadParameter: an unknown scenario, contender or setting.
    """
    for name in names:
        if name not in SCENARIOS:
            raise typer.BadParameter(f"{name!r} is none of: {', '.join(SCENARIOS)}")
    some = [SCENARIOS[name] for name in names]
    known = {name for scenario in some for name in (*scenario.contenders, *scenario.floors)}
    if unknown := set(contenders) - known:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: none of: {', '.join(sorted(known))}")
    found: dict[str, dict[str, Any]] = {name: {} for name in names}
    for given in sets:
        setting, equals, text = given.partition("=")
        having = [scenario for scenario in some if setting in scenario.settings]
        if not having or not equals:
            known = {setting for scenario in some for setting in scenario.settings}
            raise typer.BadParameter(f"{given!r}: give NAME=VALUE; the names are {', '.join(sorted(known)) or 'none'}")
        for scenario in having:
            found[scenario.name][setting] = _parse(scenario, setting, text)
    return found


def _parse(scenario: Scenario, setting: str, text: str) -> Any:
    default = scenario.settings[setting]
    try:
        if isinstance(default, tuple):
            kind: Any = type(default[0]) if default else str
            return tuple(kind(part) for part in text.split(","))
        return size(text) if isinstance(default, int) else type(default)(text)
    except ValueError as error:
        raise typer.BadParameter(f"{setting}={text}: {error}") from None


def show(text: str) -> None:
    """Print Markdown: rendered on a terminal, as plain text elsewhere."""
    if sys.stdout.isatty():
        Console().print(Markdown(text))
    else:
        print(text)


@app.command("list")
def list_scenarios() -> None:
    """List the scenarios, their contenders and requirements."""
    rows = ["| scenario | question | contenders | floors | size | needs |", "| --- | --- | --- | --- | --- | --- |"]
    for one in SCENARIOS.values():
        floors = [*one.floors, *(name for name in one.contenders if name.startswith(("floor", "raw")))]
        names = [name for name in one.contenders if name not in floors]
        shown = columns.size(one.size_bytes) if one.size_bytes else "–"
        needs = ", ".join(filter(None, [one.needs, *(f"--set {name}=" for name in one.settings)]))
        rows.append(f"| {one.name} | {one.question} | {' · '.join(names)} | {' · '.join(floors)} | {shown} | {needs} |")
    show("\n".join(rows))


@app.command()
def run(
    scenarios: Annotated[list[str] | None, typer.Argument(help="What to ask (default: the main comparison).")] = None,
    size_bytes: Annotated[
        int | None, typer.Option("--size", parser=size, metavar="SIZE", help="Of the state, for example 256MiB.")
    ] = None,
    repeat: Annotated[int | None, typer.Option(min=1, help="Rounds; in each, everyone runs once.")] = None,
    repetitions: Annotated[int | None, typer.Option(min=1, help="Timed, in one visit.")] = None,
    contender: Annotated[list[str] | None, typer.Option(help="Only this one, and the floors; again for more.")] = None,
    sets: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Of the scenario's own settings.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The JSON file to write.")] = None,
    work: Annotated[Path, typer.Option(help="Where to save to; the disk that is meant.")] = runner.CHECKOUT / ".bench",
    smoke: Annotated[bool, typer.Option("--smoke", help="Small and once: shows that it runs, no figures.")] = False,
) -> None:
    """Measure, print the tables, and write the samples to a JSON file."""
    names = scenarios or list(MAIN)
    settings = chosen(names, sets or [], contender or [])
    some = [SCENARIOS[name] for name in names]
    sizes = {one.size_bytes for one in some}
    if size_bytes is None and len(sizes) > 1 and not smoke:
        raise typer.BadParameter("these are measured at different sizes: give one with --size, or run them one by one")
    plan = runner.Plan(
        scenarios=tuple(names),
        size_bytes=size_bytes if size_bytes is not None or smoke else sizes.pop(),
        rounds=repeat or (1 if smoke else max(one.rounds for one in some)),
        repetitions=repetitions or (1 if smoke else max(one.repetitions for one in some)),
        only=tuple(contender or ()),
        settings=settings,
        work=work,
        smoke=smoke,
    )
    result = runner.run(plan, lambda so_far: report.write(so_far, out) if out else None)
    show(table.render(result))
    for failure in result.failures:
        print(f"failed: {failure}", file=sys.stderr)
    if result.failures or not result.results:
        raise typer.Exit(1 if result.failures else 2)


@app.command("table")
def write_table(
    results: Annotated[
        list[Path] | None, typer.Argument(help="Print the tables of these (default: write all).")
    ] = None,
) -> None:
    """Write the tables of all results into README.md, or print those of some files."""
    if results:
        show("\n".join(table.render(report.read(path)) for path in results))
    else:
        table.write(FOLDER / "README.md", FOLDER / "results")


@app.command(hidden=True)
def visit(order: Path, answer: Path) -> None:
    """Carry out one visit in this process, for `benchmarks.runner`."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # servers are ended on the way out
    turns = msgspec.json.decode(order.read_bytes(), type=list[Turn])
    answer.write_bytes(msgspec.json.encode(perform(turns)))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
