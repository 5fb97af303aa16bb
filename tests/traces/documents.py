"""Where the traces lie: one JSON document a scenario, a line of the trace a line of the file."""

import json
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "recorded"


def write(name: str, lines: Sequence[str]) -> None:
    """Record the trace of a scenario."""
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(list(lines), indent=0, ensure_ascii=False) + "\n")


def read(name: str) -> list[str]:
    """Return the trace of a scenario as it was recorded."""
    lines: list[str] = json.loads((FOLDER / f"{name}.json").read_text())
    return lines
