"""The code of the guide to publication, run as it stands but for the places."""

import textwrap
from pathlib import Path
from typing import Any

import anyio.to_thread
import pytest

import aiockpt
from tests.docs.pages import ROOT, blocks
from tests.publish.policy import are_of, in_folder, state_of


class Updated(Exception):  # noqa: N818  no error: the engine has what it wants
    """The engine was updated."""


class Engine:
    """An engine that loads a folder, and then has the program end."""

    def __init__(self) -> None:
        self.folder: Path | None = None

    async def update(self, folder: Path) -> None:
        assert are_of(in_folder(folder), 1)
        self.folder = folder
        raise Updated


def prepared(block: str, tmp_path: Path) -> str:
    places = {"s3://bucket/run-7": "run", "s3://bucket/policy": "pub", "/dev/shm/policy": "got"}
    for url, name in places.items():
        block = block.replace(f'"{url}"', repr(str(tmp_path / name)))
    return block


def python_of_guide() -> list[str]:
    return blocks((ROOT / "docs/guide/publish.md").read_text(), "python")


async def run(code: str, names: dict[str, Any]) -> None:
    exec("async def main():\n" + textwrap.indent(code, "    "), names)
    await names["main"]()


async def test_the_lines_of_the_guide_publish_and_receive(tmp_path: Path) -> None:
    (both, loop) = (prepared(block, tmp_path) for block in python_of_guide())
    trainer, receiver = both.split("\n\n", 1)
    trainer = trainer.replace("    ...", "    ckpt.save(1, state_of(1))")
    names: dict[str, Any] = {"aiockpt": aiockpt, "state_of": state_of, "engine": Engine()}
    await anyio.to_thread.run_sync(exec, trainer, names)
    with pytest.raises(Updated):
        await run(receiver, names)
    assert names["engine"].folder == tmp_path / "got"
    loop = loop.replace("got", "other")
    seen: list[Any] = []
    await run(loop.replace("        ...", "        seen.append(patch)") + "\n    break", names | {"seen": seen})
    assert {patch.name for patch in seen} == state_of(1)["model"].state_dict().keys()
