"""What the generator of the site would not tell, or only to who has it: the menu, and the reference."""

import re

import aiockpt
from aiockpt import errors, events
from tests.docs.pages import ROOT, pages, section

REFERENCE = re.compile(r"^::: aiockpt\.(\S+)$", re.MULTILINE)


def test_the_menu_has_every_page_once() -> None:
    menu = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1].split("\n\n")[0]
    listed = re.findall(r"- (?:[\w ]+: )?(\S+\.md)$", menu, re.MULTILINE)
    assert sorted(listed) == sorted(str(page.relative_to(ROOT / "docs")) for page in pages()[1:])


def test_the_reference_has_every_public_name() -> None:
    listed = set(REFERENCE.findall((ROOT / "docs" / "reference.md").read_text()))
    assert {"errors", "events"} <= listed
    whole = {name for module in (errors, events) for name in vars(module)}
    assert set(aiockpt.__all__) - listed - whole == set()


def test_the_map_has_every_folder_of_the_package() -> None:
    rows = section(ROOT / "docs" / "architecture.md", "The map")
    folders = {path.parent.name for path in (ROOT / "aiockpt").glob("*/__init__.py")}
    assert folders
    assert {folder for folder in folders if f"`{folder}/`" not in rows} == set()


def test_what_make_builds_is_ignored_by_git() -> None:
    ignored = (ROOT / ".gitignore").read_text().splitlines()
    assert {"/site/", "/.cache/"} <= set(ignored)
