"""The tools that judge a change: the same ones until their versions are raised here."""

import re
import tomllib
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def constraints() -> dict[str, str]:
    lines = (CHECKOUT / "constraints.txt").read_text().splitlines()
    pins = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {name: version for name, _, version in pins}


def test_every_tool_of_the_groups_is_pinned() -> None:
    project = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())
    groups = project["dependency-groups"]
    wanted = [*groups["dev"], *groups["docs"], *project["project"]["optional-dependencies"]["testing"]]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted} - {"aiockpt"}
    assert names - constraints().keys() == set()


def test_pins_are_plain_versions_that_every_index_has() -> None:
    assert all(re.fullmatch(r"[0-9]+(\.[0-9]+)*", version) for version in constraints().values()), constraints()
