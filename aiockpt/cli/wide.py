"""How does a table of many numbers fit into a narrow terminal? In parts, one below the other, each with the row's name.

No number is ever cut, and a column that is empty in every row is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.text import Text

from aiockpt.cli.show import columns, out

GAP = 2
FOLDED_WIDTH = 16
"""What is reserved for the column that may be broken, where it would be wider."""

Cells = Mapping[str, Sequence[str]]


def print_wide(groups: Sequence[Sequence[str]], rows: Sequence[Sequence[str]], *, folds: str) -> None:
    """Print a table of numbers, with an empty line above each of its parts.

    Args:
        groups: headings; those of the first group name the rows and are in every part, those of another stay together.
        rows: of cells with markup, one for each heading.
        folds: the heading of the column of words, which may be broken.
    """
    headings = [heading for group in groups for heading in group]
    cells = dict(zip(headings, zip(*rows, strict=True), strict=True))
    names, *rest = ([heading for heading in group if any(cells[heading])] for group in groups)
    numbers = [heading for group in rest for heading in group]
    together = _width(cells, [*names, *numbers], folds) <= out.width
    parts = [numbers] if together else [part for group in rest for part in _split(cells, names, group, folds)]
    for part in parts:
        shown = [*names, *part]
        table = columns(*shown, right=tuple(heading for heading in shown[1:] if heading != folds), folds=folds)
        for row in zip(*(cells[heading] for heading in shown), strict=True):
            table.add_row(*row)
        out.print()
        out.print(table)


def _split(cells: Cells, names: Sequence[str], group: Sequence[str], folds: str) -> Iterator[list[str]]:
    """Yield the headings of *group* in as few parts as fit beside *names*."""
    part: list[str] = []
    for heading in group:
        if part and _width(cells, [*names, *part, heading], folds) > out.width:
            yield part
            part = []
        part.append(heading)
    if part:
        yield part


def _width(cells: Cells, headings: Sequence[str], folds: str) -> int:
    """Return how many columns of a terminal the table takes."""
    widths = [max(Text.from_markup(text).cell_len for text in (heading, *cells[heading])) for heading in headings]
    kept = [min(width, FOLDED_WIDTH) if name == folds else width for name, width in zip(headings, widths, strict=True)]
    return sum(kept) + GAP * (len(kept) - 1)
