"""What the guides say of tiers and copies, against a real object store, and what they say is to be installed."""

import re
import tomllib
import uuid
from pathlib import Path
from typing import Any

import pytest
import torch

import aiockpt
from tests.docs.pages import ROOT, blocks, pages, section
from tests.docs.running import command_lines, run_block, run_command
from tests.servers.seaweed import Seaweed

GUIDE = ROOT / "docs" / "guide"


@pytest.fixture
def places(tmp_path: Path, s3_url: str, seaweed: Seaweed, aws_environment: pytest.MonkeyPatch) -> dict[str, str]:
    """Return real places for those that the guides name."""
    aws_environment.setenv("AWS_ENDPOINT_URL", seaweed.endpoint_url)
    return {
        "shm://run-7": f"shm://guide-{uuid.uuid4().hex}",
        "/nvme/run-7": str(tmp_path / "nvme"),
        "/local/run-7": str(tmp_path / "local"),
        "/models/mine": str(tmp_path / "mine"),
        "s3://bucket/": f"{s3_url}/",
        "s3://public/run-7": f"{s3_url}/public",
    }


def at(places: dict[str, str], text: str) -> str:
    for named, real in places.items():
        text = text.replace(named, real)
    return text


def make_state(value: float) -> dict[str, Any]:
    model = torch.nn.Linear(30, 30)
    torch.nn.init.constant_(model.weight, value)
    return {"model": model}


def test_the_tiers_of_the_guide_are_real(places: dict[str, str]) -> None:
    scope: dict[str, Any] = {"state": make_state(5)}
    found = blocks((GUIDE / "tiers.md").read_text(), "python")
    assert len(found) == 2
    try:
        for block in found:
            run_block(at(places, block), scope)
        bucket = places["s3://bucket/"] + "run-7"
        for place in (places["shm://run-7"], places["/nvme/run-7"], bucket, places["s3://public/run-7"]):
            with aiockpt.Checkpointer(place) as ckpt:
                assert ckpt.latest().result() == 1000, place
    finally:
        with aiockpt.Checkpointer(places["shm://run-7"]) as ckpt:
            ckpt.delete(1000).result()


def test_the_memory_of_hosts_in_the_guide_is_real(places: dict[str, str]) -> None:
    scope: dict[str, Any] = {"state": make_state(5)}
    _, made, saving = blocks((GUIDE / "recovery.md").read_text(), "python")
    url = f"peer://{uuid.uuid4().hex}"
    real = {**places, "peer://run-7": url}
    try:
        run_block(at(real, made), scope)
        run_block(at(real, saving), scope)
        scope["ckpt"].close()
        with aiockpt.Checkpointer(url) as ckpt:
            assert ckpt.latest().result() == 1000
        with aiockpt.Checkpointer(places["s3://bucket/"] + "run-7") as ckpt:
            assert ckpt.latest().result() == 1000
    finally:
        run_command(["aiockpt", "rm", url, "--all", "--yes"])


def test_the_loop_that_recovers_is_real(tmp_path: Path) -> None:
    loop, *_ = blocks((GUIDE / "recovery.md").read_text(), "python")
    url = f"peer://{uuid.uuid4().hex}"
    loader = aiockpt.Loader(aiockpt.ShardedSampler(8, 4, rank=0, size=1))
    state = {"model": make_state(5)["model"], "loader": loader}
    scope: dict[str, Any] = {"state": state, "loader": loader, "epochs": 2, "train": lambda batch: 0.5}
    try:
        run_block(at({"peer://run-7": url, "s3://bucket/run-7": str(tmp_path)}, loop), scope)
        assert scope["step"] == 4
        with aiockpt.Checkpointer(url) as ckpt:
            assert ckpt.latest().result() == 3
        with aiockpt.Checkpointer(tmp_path) as ckpt:
            assert ckpt.latest().result() is not None
    finally:
        run_command(["aiockpt", "rm", url, "--all", "--yes"])


def test_the_copies_of_the_guide_are_real(places: dict[str, str]) -> None:
    with aiockpt.Checkpointer(places["s3://bucket/"] + "run-7") as ckpt:
        ckpt.save(1000, make_state(3)).result()
    (block,) = blocks(section(GUIDE / "storage.md", "Copies between places"), "sh")
    lines = command_lines(at(places, block))
    assert len(lines) == 3
    for words in lines:
        run_command(words)
    state = make_state(0)
    with aiockpt.Checkpointer(places["s3://bucket/"] + "run-8") as ckpt:
        ckpt.load({"model": state["model"].to(torch.bfloat16)}).result()
    assert state["model"].weight.eq(3).all()
    with aiockpt.Checkpointer(places["/local/run-7"]) as ckpt:
        assert ckpt.latest().result() == 1000


def test_the_extras_that_the_pages_name_are_those_of_the_package() -> None:
    named = {extra for page in pages() for extra in re.findall(r"aiockpt\[(\w+)\]", page.read_text())}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert named == project["optional-dependencies"].keys() - {"testing"}
