"""Every block of the README runs as it stands: one after the other, under torchrun, against a real object store."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
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

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


ASYNC = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def run_block(block: str, scope: dict[str, Any]) -> None:
    """Run a block as a notebook does: with ``await`` and ``async with`` where it has them."""
    running = eval(compile(block, "README.md", "exec", flags=ASYNC), scope)
    if running is not None:
        asyncio.run(running)


def test_the_code_runs_as_it_stands_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", section("The code") + section("A checkpoint every step"), re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, Any] = {}
    for block in blocks:
        run_block(block, scope)
    kept = {run: sorted(int(step.name[5:]) for step in Path(f"runs/{run}").glob("step-*")) for run in (7, 8, 9)}
    assert kept == {7: [30, 40, 50], 8: [*range(30), 31], 9: [17, 18, 19]}
    again: dict[str, Any] = {}
    run_block(blocks[0], again)
    assert again["step"] == 60, "it went on at 51, with the nine batches that were left"
    assert again["loader"].epoch == 3


@pytest.mark.timeout(180)
def test_the_program_of_many_ranks_runs_as_it_stands(tmp_path: Path) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", section("Many ranks"), re.DOTALL)
    (tmp_path / "train.py").write_text(block)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "train.py"]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(step.name for step in (tmp_path / "runs/10").glob("step-*"))[-1] == "step-00000030"


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
    text = (ROOT / "pyproject.toml").read_text()
    extras = text.split("[project.optional-dependencies]")[1].split("[dependency-groups]")[0]
    assert named == set(re.findall(r"^(\w+) =", extras, re.MULTILINE)) - {"testing"}
