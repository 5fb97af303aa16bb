"""Does all that torch.distributed.checkpoint does work on our storage as it does on its own?"""

from __future__ import annotations

import ast
import io
import socket
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import aiockpt
from aiockpt.integrations.dcp import AiockptReader, AiockptWriter
from aiockpt.testing.integration_suite import IntegrationSuite
from tests.docs.running import run_page
from tests.frameworks import dcp_script
from tests.frameworks.proving import TORCHRUN, output_of
from tests.notebooks import Notebook, notebook
from tests.ranks.forked import outcomes_of

dcp: Any = import_module("torch.distributed.checkpoint")

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage:UserWarning"),
]
__all__ = ["notebook"]
RANKS = Path(__file__).with_name("dcp_ranks.py")
CHECKS = [
    name.id
    for node in ast.parse(RANKS.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CHECKS" and isinstance(node.value, ast.List)
    for name in node.value.elts
    if isinstance(name, ast.Name)
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    return outcomes_of("tests.frameworks.dcp_ranks", 4, tmp_path_factory.mktemp("ranks"), 110)


@pytest.mark.parametrize("name", CHECKS)
def test_on_four_ranks(name: str, outcomes: list[dict[str, str]]) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(name) == "", f"rank {rank}:\n{outcome.get(name, 'never got there')}"


class TestContract(IntegrationSuite):
    ATTACHES = False
    FALLS_BACK = False
    DAMAGE_ERROR = dcp.CheckpointException
    PROGRAM = (sys.executable, "-m", "tests.frameworks.dcp_script")
    PROGRAM_ON_RANKS = (*TORCHRUN, "2", "-m", "tests.frameworks.dcp_script")

    def train(self, place: Path, until: int, *, step: int | None = None, other: Path | None = None) -> int:
        with dcp_script.alone():
            return dcp_script.go_on(dcp_script.make_model(), str(place), until, 1, step)


class Counter:
    """What DCP calls Stateful."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "more": torch.tensor([self.count])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert int(state["more"]) == state["count"]
        self.count = state["count"]


class Own:
    """A class that only a pickle can hold."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Own) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)


def everything() -> dict[str, Any]:
    return {
        "weights": {"a.b": torch.randn(3, 4), "c": torch.arange(6, dtype=torch.int8).view(2, 3).t()},
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "half": torch.randn(5).to(torch.bfloat16),
        "nested": {"list": [1, torch.ones(2), {"x": None, "y": (1, 2.5)}], "deep": [[torch.zeros(1)], []]},
        "values": {"int": 3, "float": float("inf"), "text": "a", "flag": True, "bytes": b"\0" * 70_000, "dict": {}},
        "stateful": Counter(7),
    }


def zeroed(value: Any) -> Any:
    """Return the same state with other values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: zeroed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [zeroed(item) for item in value]
    return Counter(0) if isinstance(value, Counter) else None


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: leaf for key, item in items for name, leaf in flat(item, f"{path}/{key}").items()} or {
            path: value
        }
    return {path: value.count if isinstance(value, Counter) else value}


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = flat(found), flat(expected)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert type(ours[name]) is type(value), name
        if isinstance(value, torch.Tensor):
            assert ours[name].dtype == value.dtype, name
            assert torch.equal(ours[name], value), name
        else:
            assert ours[name] == value, name


def test_a_state_comes_back_as_from_plain_dcp(tmp_path: Path) -> None:
    state = everything()
    dcp.save(state, checkpoint_id=tmp_path / "plain")
    dcp.save(state, checkpoint_id=tmp_path / "ours", storage_writer=AiockptWriter())
    theirs, ours = zeroed(state), zeroed(state)
    dcp.load(theirs, checkpoint_id=tmp_path / "plain")
    dcp.load(ours, checkpoint_id=tmp_path / "ours", storage_reader=AiockptReader())
    assert_same(ours, theirs)
    assert_same(ours, state)


def test_the_state_is_filled_in_place(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=AiockptWriter(tmp_path))
    target = torch.zeros(3)
    dcp.load({"x": target}, storage_reader=AiockptReader(tmp_path))
    assert torch.equal(target, torch.ones(3))


def test_a_none_takes_the_place_of_what_is_here(tmp_path: Path) -> None:
    dcp.save({"x": None, "y": [None, 1]}, storage_writer=AiockptWriter(tmp_path))
    found = {"x": 5, "y": [6, 7]}
    dcp.load(found, storage_reader=AiockptReader(tmp_path))
    assert found == {"x": None, "y": [None, 1]}


def test_an_asynchronous_save(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.ones(3), "n": 1}
    saving: Any = dcp.async_save(state, storage_writer=AiockptWriter(tmp_path), no_dist=True)
    state["x"].zero_()
    saving.result()
    dcp.load(state, storage_reader=AiockptReader(tmp_path))
    assert state["x"].tolist() == [1, 1, 1]


def save_and_load(folder: str) -> None:
    """Save in both ways, and load."""
    state: dict[str, Any] = {"x": torch.ones(3)}
    dcp.save(state, storage_writer=AiockptWriter(folder, step=1))
    dcp.async_save(state, storage_writer=AiockptWriter(folder, step=2)).result()
    state["x"].zero_()
    dcp.load(state, storage_reader=AiockptReader(folder))
    assert state["x"].tolist() == [1, 1, 1]
    with aiockpt.Checkpointer(folder) as ckpt:
        assert ckpt.latest().result() == 2


def test_it_works_in_the_cell_of_a_notebook(notebook: Notebook, tmp_path: Path) -> None:
    notebook.run(f"from tests.frameworks.test_dcp import save_and_load\nsave_and_load({str(tmp_path)!r})")


async def test_it_works_in_a_function_that_a_coroutine_calls(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(3)}, storage_writer=AiockptWriter(tmp_path))
    dcp.load({"x": torch.zeros(3)}, storage_reader=AiockptReader(tmp_path))


IN_A_PROCESS = """
import sys
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from aiockpt.integrations.dcp import AiockptReader, AiockptWriter

if __name__ == "__main__":
    dist.init_process_group("gloo")
    state = {"x": torch.ones(3)}
    saving = dcp.async_save(
        state, storage_writer=AiockptWriter(sys.argv[1]), async_checkpointer_type=AsyncCheckpointerType.PROCESS
    )
    state["x"].zero_()
    saving.result()
    dcp.load(state, storage_reader=AiockptReader(sys.argv[1]))
    print(state["x"].tolist())
    dist.destroy_process_group()
"""


def test_a_process_of_dcps_own_writes(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(IN_A_PROCESS)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    command = [sys.executable, "-W", "ignore", str(tmp_path / "job.py"), str(tmp_path / "run")]
    assert "[1.0, 1.0, 1.0]" in output_of(*command, more=place).splitlines()


def test_a_part_of_it_is_loaded(tmp_path: Path) -> None:
    dcp.save({"a": torch.ones(2), "b": {"c": torch.ones(2), "d": 4}}, storage_writer=AiockptWriter(tmp_path))
    found = {"b": {"d": 0}}
    dcp.load(found, storage_reader=AiockptReader(tmp_path))
    assert found == {"b": {"d": 4}}
    extra = {"a": torch.zeros(2), "new": torch.zeros(2)}
    dcp.load(extra, storage_reader=AiockptReader(tmp_path), planner=DefaultLoadPlanner(allow_partial_load=True))
    assert extra["a"].tolist() == [1, 1]
    with pytest.raises(dcp.CheckpointException, match="Missing key in checkpoint state_dict: new"):
        dcp.load(extra, storage_reader=AiockptReader(tmp_path))


def test_what_a_model_does_not_know_is_rebuilt_from_the_metadata(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

    state = {"model": {"w": torch.randn(2, 2)}, "list": [torch.ones(1), 3]}
    dcp.save(state, storage_writer=AiockptWriter(tmp_path))
    found: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()  # type: ignore[no-untyped-call]
    _load_state_dict(found, AiockptReader(tmp_path), planner=planner, no_dist=True)
    assert_same(found, state)


class Halved(DefaultSavePlanner):
    """A planner that saves another dtype than there is."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.float16
        return plan

    def resolve_data(self, write_item: Any) -> Any:
        data = super().resolve_data(write_item)
        return data.half() if isinstance(data, torch.Tensor) else data


class Renaming(DefaultLoadPlanner):
    """A planner that loads under other names than were saved."""

    def set_up_planner(self, state_dict: Any, metadata: Any = None, is_coordinator: bool = False) -> None:
        self.outer = state_dict
        super().set_up_planner({f"old_{key}": value for key, value in state_dict.items()}, metadata, is_coordinator)

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        self.outer[read_item.dest_index.fqn.removeprefix("old_")] = torch.load(value, weights_only=False)


def test_planners_may_convert_and_rename(tmp_path: Path) -> None:
    dcp.save({"old_x": torch.full((3,), 1 / 3), "old_n": 5}, storage_writer=AiockptWriter(tmp_path), planner=Halved())
    found: dict[str, Any] = {"x": torch.zeros(3), "n": 0}
    dcp.load(found, storage_reader=AiockptReader(tmp_path), planner=Renaming())
    assert torch.equal(found["x"], torch.full((3,), 1 / 3).half().float())
    assert found["n"] == 5


def test_items_that_are_not_flattened_keep_their_names(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "c": {"d": 1}}
    dcp.save(state, storage_writer=AiockptWriter(tmp_path), planner=DefaultSavePlanner(flatten_state_dict=False))
    found = {"a.b": torch.zeros(2), "c": None}
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    dcp.load(found, storage_reader=AiockptReader(tmp_path), planner=planner)
    assert_same(found, state)


def test_what_only_a_pickle_can_hold_is_loaded_from_whom_one_trusts(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1), "own": Own("a")}, storage_writer=AiockptWriter(tmp_path))
    found = {"x": torch.zeros(1), "own": None}
    with pytest.raises(dcp.CheckpointException, match=r"own is no plain value and was saved as a pickle"):
        dcp.load(found, storage_reader=AiockptReader(tmp_path))
    dcp.load({"x": found["x"]}, storage_reader=AiockptReader(tmp_path))
    dcp.load(found, storage_reader=AiockptReader(tmp_path, trust_pickle=True))
    assert found["own"] == Own("a")


def test_saved_again_it_is_the_newer_one(tmp_path: Path) -> None:
    for number in range(3):
        dcp.save({"x": torch.tensor([number])}, storage_writer=AiockptWriter(tmp_path))
    dcp.load(found := {"x": torch.tensor([9])}, storage_reader=AiockptReader(tmp_path))
    assert found["x"].item() == 2


def test_steps_of_one_place(tmp_path: Path) -> None:
    writer = AiockptWriter(tmp_path, retention=aiockpt.Retention(last=2))
    for number in range(4):
        writer.step = number
        dcp.save({"x": torch.tensor([number])}, storage_writer=writer)
    writer.close()
    dcp.load(found := {"x": torch.tensor([9])}, storage_reader=AiockptReader(tmp_path, step=2))
    assert found["x"].item() == 2
    with pytest.raises(dcp.CheckpointException, match="step 0"):
        dcp.load(found, storage_reader=AiockptReader(tmp_path, step=0))


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    dcp.save({"x": torch.ones(1000)}, storage_writer=AiockptWriter(tmp_path))
    (file,) = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    with pytest.raises(dcp.CheckpointException, match=r"block 0"):
        dcp.load({"x": torch.zeros(1000)}, storage_reader=AiockptReader(tmp_path))


def test_a_place_without_a_checkpoint_is_told(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match="holds no checkpoint"):
        dcp.load({"x": torch.zeros(1)}, storage_reader=AiockptReader(tmp_path))
    with pytest.raises(dcp.CheckpointException, match="give a place"):
        dcp.save({"x": torch.zeros(1)}, storage_writer=AiockptWriter())
    with pytest.raises(dcp.CheckpointException, match="give a place"):
        dcp.load({"x": torch.zeros(1)}, storage_reader=AiockptReader())


def test_a_tensor_that_is_made_of_others_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(dcp.CheckpointException, match=r"part\.sparse: a tensor that is made of others"):
        dcp.save({"part": {"sparse": torch.eye(3).to_sparse()}}, storage_writer=AiockptWriter(tmp_path))


def test_modules_load_what_was_saved_through_dcp(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        groups: Any = [{"params": [*model[0].parameters()]}, {"params": [*model[2].parameters()], "lr": 0.5}]
        optimizer = torch.optim.AdamW(groups)
        model(torch.randn(5, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = trained(0)
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer, "step": 5}, storage_writer=AiockptWriter(tmp_path))
    found, found_optimizer = trained(1)
    state = {"model": found, "optimizer": found_optimizer, "step": 0}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load(state).result()
    assert state["step"] == 5
    assert_same(dict(found.state_dict()), dict(model.state_dict()))
    assert_same(found_optimizer.state_dict(), optimizer.state_dict())


def test_dcp_loads_what_a_checkpointer_has_saved(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(3, {"model": model, "step": 3, "meta": {"seed": [1, 2]}}).result()
    found = {"model": {"weight": torch.zeros(4, 3), "bias": torch.zeros(4)}, "step": 0, "meta": {"seed": None}}
    dcp.load(found, storage_reader=AiockptReader(tmp_path))
    assert_same(found, {"model": dict(model.state_dict()), "step": 3, "meta": {"seed": [1, 2]}})


def test_the_page_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(3, 4)
    run_page("frameworks/dcp.md", {"model": model, "optimizer": torch.optim.AdamW(model.parameters())})
