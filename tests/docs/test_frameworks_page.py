"""The table of tried frameworks says what their certificates and requirements say."""

import json
import re

from tests.docs.pages import ROOT, section

RESULTS = ROOT / "benchmarks" / "results" / "frameworks"
REQUIREMENTS = ROOT / "tests" / "frameworks" / "requirements"
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in section(ROOT / "docs" / "frameworks" / "index.md", "What was run").splitlines()
    if line.startswith("|")
][2:]


def kills(name: str) -> int:
    """Return how often the run of a certificate was killed before it came to its end."""
    certificate = json.loads((RESULTS / name).read_text())
    assert certificate["verdict"] == "certified"
    return sum(1 for start in certificate["starts"] if start["killed"] and start["name"] != "control")


def test_each_certificate_is_in_the_table_with_its_kills() -> None:
    named: list[str] = []
    for row in ROWS:
        files = re.findall(r"`([\w-]+\.json)`", row[4])
        named += files
        if files != ["matrix.json"]:
            assert [int(count) for count in re.findall(r"(\d+) times", row[3])] == [kills(name) for name in files]
    assert sorted(named) == sorted(path.name for path in RESULTS.iterdir())


def test_the_versions_of_the_table_are_those_of_the_requirements() -> None:
    pinned = "\n".join(path.read_text() for path in REQUIREMENTS.iterdir())
    versions = [version for row in ROWS[1:] for version in re.findall(r"\d+\.\d+\.\d+", row[1])]
    assert len(versions) > len(ROWS) - 2
    assert [version for version in versions if f"=={version}" not in pinned] == []


def test_no_certificate_names_a_folder_of_the_machine_that_made_it() -> None:
    for path in RESULTS.iterdir():
        found = json.loads(path.read_text())
        command = [] if path.name == "matrix.json" else [*found["command"], *(found["resume_command"] or [])]
        assert not [word for word in command if word.startswith("/")]
