"""The pages of the documentation: their headings, links and blocks of code, read without the generator."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    """Return the README and all pages below docs/."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def prose(page: Path) -> str:
    """Return a page without its blocks of code."""
    return FENCE.sub("", page.read_text())


def anchors(page: Path) -> set[str]:
    """Return the anchors that the generator, and a forge, give to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


def blocks(text: str, kind: str) -> list[str]:
    """Return the blocks of code of one kind (``python``) in a text, in their order."""
    return [match["code"] for match in FENCE.finditer(text) if match["kind"] == kind]


def section(page: Path, title: str) -> str:
    """Return a section of a page, with the sections below it."""
    text = page.read_text()
    found = re.search(rf"^(?P<level>#+) {re.escape(title)}\n", text, re.MULTILINE)
    assert found, f"{page.name} has no section {title!r}"
    rest = text[found.end() :]
    end = re.search(
        rf"^#{{1,{len(found['level'])}}} ", FENCE.sub(lambda match: "." * len(match[0]), rest), re.MULTILINE
    )
    return rest[: end.start()] if end else rest


def problem_of(target: str, page: Path, base: Path) -> str | None:
    """Say why *target*, a path with an anchor or without, leads nowhere; None when it leads somewhere.

    Args:
        page: what an anchor alone is on.
        base: what a relative path begins at.
    """
    path, _, anchor = target.partition("#")
    aim = base / path if path else page
    if not aim.exists():
        return f"{target}: there is no {path}"
    if anchor and anchor not in anchors(aim):
        return f"{target}: {aim.name} has no section of that name"
    return None
