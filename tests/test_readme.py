"""Is what the README says about storage true? Its own code runs here, against a real object store."""

from __future__ import annotations

import asyncio
import re
import textwrap
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.cli.main import app
from tests.servers.s3_fixtures import aws_environment, s3_url, seaweed
from tests.servers.seaweed import Seaweed

__all__ = ["aws_environment", "s3_url", "seaweed"]

README = (Path(__file__).resolve().parents[1] / "README.md").read_text()


def section(title: str) -> str:
    """Return a section of the README."""
    return README.split(f"\n## {title}\n")[1].split("\n## ")[0]


def code(kind: str) -> str:
    """Return the one block of that kind in the section about storage."""
    (found,) = re.findall(rf"```{kind}\n(.*?)```", section("Where checkpoints go"), re.DOTALL)
    return str(found)


@pytest.fixture
def places(tmp_path: Path, s3_url: str, seaweed: Seaweed, aws_environment: pytest.MonkeyPatch) -> dict[str, str]:
    """Return real places for those that the README names."""
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    return {
        "shm://run-7": f"shm://readme-{uuid.uuid4().hex}",
        "/local/run-7": str(tmp_path / "local"),
        "/models/mine": str(tmp_path / "mine"),
        "s3://bucket/": f"{s3_url}/",
    }


def at(places: dict[str, str], text: str) -> str:
    for named, real in places.items():
        text = text.replace(named, real)
    return text


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(30, 30)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


def test_the_tiers_of_the_readme_are_real(places: dict[str, str]) -> None:
    scope: dict[str, Any] = {"aiockpt": aiockpt, "state": make_state(5)}
    body = textwrap.indent(at(places, code("python")), "    ")
    exec(f"async def run():\n{body}", scope)
    try:
        asyncio.run(scope["run"]())
        for place in (places["shm://run-7"], places["/local/run-7"], places["s3://bucket/"] + "run-7"):
            with aiockpt.Checkpointer(place) as ckpt:
                assert ckpt.latest().result(30) == 1000, place
    finally:
        with aiockpt.Checkpointer(places["shm://run-7"]) as ckpt:
            ckpt.delete(1000).result(30)


def test_the_commands_of_the_readme_are_real(places: dict[str, str]) -> None:
    with aiockpt.Checkpointer(places["s3://bucket/"] + "run-7") as ckpt:
        ckpt.save(1000, make_state(3)).result(30)
    lines = [line.partition("  #")[0] for line in at(places, code("sh")).splitlines()]
    assert len(lines) == 3
    for line in lines:
        outcome = CliRunner().invoke(app, line.split()[1:], catch_exceptions=False)
        assert outcome.exit_code == 0, outcome.output
    state = make_state(0)
    with aiockpt.Checkpointer(places["s3://bucket/"] + "run-8") as ckpt:
        ckpt.load({"model": state["model"].to(torch.bfloat16)}).result(30)
    assert state["model"].weight.eq(3).all()
    with aiockpt.Checkpointer(places["/local/run-7"]) as ckpt:
        assert ckpt.latest().result(30) == 1000


def test_the_extras_of_the_readme_are_those_of_the_package() -> None:
    named = set(re.findall(r"aiockpt\[(\w+)\]", section("Where checkpoints go")))
    text = (Path(__file__).resolve().parents[1] / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]")[1].split("[dependency-groups]")[0]
    assert named == set(re.findall(r"^(\w+) =", extras, re.MULTILINE)) - {"testing"}
