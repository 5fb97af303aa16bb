"""The table of observations: a row for each question of a reader, a column for each way to checkpoint."""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

TIMED = (("pause, each save", "pause_s"), ("to durable", "durable_s"), ("training lost, each save", "lost_s"))
MARKED = re.compile(r"(<!-- same job: (\S+) -->\n).*?(<!-- end of same job -->)", re.DOTALL)


def render(report: dict[str, Any]) -> str:
    """Return a report in Markdown."""
    found = report["contenders"]
    timed = () if report["smoke"] else TIMED
    rows = [
        ("", list(found)),
        ("---", ["---"] * len(found)),
        ("lines of code for checkpoints", [str(one["lines"]) for one in found.values()]),
        *((name, [_seconds(one, metric) for one in found.values()]) for name, metric in timed),
        ("SIGKILL in the middle of a save", [_kills(one["kills"]) for one in found.values()]),
        ("one bit flipped in a saved file", [_flips(one["flips"], one["newest"]) for one in found.values()]),
        *(
            (f"saved on 2 ranks, restarted on {ranks}", [_world(one["worlds"], ranks) for one in found.values()])
            for ranks in (1, 3)
        ),
    ]
    lines = [f"| {' | '.join([name, *cells])} |" for name, cells in rows]
    notes = [f"- {name}: {one['note']}." for name, one in found.items() if one["note"]]
    notes += [f"- {name}: `{reason}`." for name, one in found.items() for reason in _reasons(one)]
    return "\n".join([_conditions(report), "", *lines, "", *notes])


def _conditions(report: dict[str, Any]) -> str:
    machine, size = report["machine"], report["size"]
    beside = (
        "" if report["load_before"] < 0.5 else f" **Measured beside other work** (load {report['load_before']:.1f})."
    )
    return (
        f"{machine['date']}: {machine['cpu']}, {machine['cores']} cores, {machine['filesystem']}, torch {machine['torch']}; "
        f"a state of {report['state_bytes'] / (1 << 20):.1f} MiB, {size['steps']} steps, a save every {size['every']}, "
        + (
            "a run that shows that it runs, without times."
            if report["smoke"]
            else f"{report['rounds']} rounds; median · minimum.{beside}"
        )
    )


def _seconds(one: dict[str, Any], metric: str) -> str:
    values = one["timed"].get(metric)
    return " · ".join(f"{value * 1e3:.0f} ms" for value in (statistics.median(values), min(values))) if values else "–"


def _tally(words: list[str]) -> str:
    return "; ".join(f"{count} of {len(words)} {word}" for word, count in Counter(words).most_common()) or "–"


def _kills(kills: list[dict[str, Any]]) -> str:
    def word(kill: dict[str, Any]) -> str:
        if "failed" in kill:
            return "do not start again"
        same = "the same run" if kill["state"] and kill["end"] else "**another run**"
        return f"go on from {'that save' if kill['from'] == kill['step'] else 'an earlier one'}, {same}"

    return _tally([word(kill) for kill in kills])


def _flips(flips: list[dict[str, Any]], newest: int) -> str:
    def word(one: dict[str, Any]) -> str:
        if "failed" in one:
            return "refused"
        if not one["state"]:
            return "**loaded silently**"
        if one["from"] == newest:
            return "not in the state"
        return f"the save before is taken, {'told' if one['told'] else '**untold**'}"

    return _tally([word(one) for one in flips])


def _world(worlds: list[dict[str, Any]], ranks: int) -> str:
    for one in worlds:
        if one["ranks"] == ranks:
            return "fails" if "failed" in one else "bit-equal" if one["state"] else "**another state**"
    return "–"


def _reasons(one: dict[str, Any]) -> list[str]:
    runs = {"killed": one["kills"], "flipped": one["flips"]} | {f"on {each['ranks']}": [each] for each in one["worlds"]}
    found = {f"{kind}: {run['failed'][:160]}" for kind, each in runs.items() for run in each if "failed" in run}
    return sorted(found)


def write(readme: Path, results: Path) -> None:
    """Put the tables of *results* between their markers in *readme*."""

    def table(match: re.Match[str]) -> str:
        return f"{match[1]}\n{render(json.loads((results / match[2]).read_text()))}\n\n{match[3]}"

    readme.write_text(MARKED.sub(table, readme.read_text()))
