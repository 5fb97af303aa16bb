"""Citations in comments, docstrings and pages: every citation of a page or a section leads somewhere."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, anchors, pages, problem_of, prose

CODE = ("aiockpt", "backends", "benchmarks", "tests")
CITATION = re.compile(r"(?<![\w/.-])(?:docs|benchmarks|tests)/[\w./-]*?\w\.md(?:#[\w-]+)?")
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
NOT_HERE = re.compile(
    r"\b(?:" + "|".join(["FORMAT", "RELIABILITY", "DECISIONS", "INTEROP", "DESIGN", "MEASURED", "PEERS"]) + r")\b"
)
"""Names of papers that are in nobody's clone; format.md, decisions.md and durability.md are."""
MINE = {"test_citations.py"}


def sources() -> Iterator[Path]:
    """Yield every file of ours that may cite: code, its READMEs, and the files at the root."""
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".pyi") and path.name not in MINE and not path.is_symlink():
                yield path
    yield from (ROOT / name for name in ("Makefile", "pyproject.toml", "constraints.txt", "CHANGELOG.md", "README.md"))


def test_every_citation_in_the_code_leads_to_a_section() -> None:
    found = [(path, target) for path in sources() for target in CITATION.findall(path.read_text())]
    assert len(found) > 50, "the pattern sees the citations"
    problems = {
        f"{path.relative_to(ROOT)}: {problem}" for path, target in found if (problem := problem_of(target, path, ROOT))
    }
    assert not problems


def test_nothing_cites_papers_that_are_not_in_the_repository() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in sources()
        for line in path.read_text().splitlines()
        if NOT_HERE.search(line)
    ]
    assert found == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    targets = [target for target in LINK.findall(prose(page)) if "://" not in target]
    problems = [problem for target in targets if (problem := problem_of(target, page, page.parent))]
    assert not problems


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_that_a_page_names_is_there(page: Path) -> None:
    named = re.findall(r"`((?:tests|benchmarks|aiockpt|docs)/[\w./-]+)`", prose(page))
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_a_citation_of_what_is_not_there_is_found() -> None:
    assert CITATION.findall("see docs/format.md#gone, and (docs/nothing.md).") == [
        "docs/format.md#gone",
        "docs/nothing.md",
    ]
    page = ROOT / "docs" / "format.md"
    assert "the-head" in anchors(page)
    assert problem_of("docs/format.md#the-head", page, ROOT) is None
    assert "no section" in str(problem_of("docs/format.md#gone", page, ROOT))
    assert "there is no" in str(problem_of("docs/nothing.md", page, ROOT))
