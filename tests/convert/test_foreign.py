"""Checkpoints that others wrote, bit by bit, as steps and in live objects; a bad one does no harm."""

import os
import pickle
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import aiockpt
from aiockpt.convert.foreign import Foreign, load, open_checkpoint, save_as_step, write_dcp, write_torch
from aiockpt.errors import CorruptionError, StateMismatchError, StepExistsError, UsageError
from aiockpt.runtime.world import OsFiles
from tests.cli.small_checkpoints import flip
from tests.convert.same_states import assert_same

dcp: Any = import_module("torch.distributed.checkpoint")

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8),
    *(torch.uint8, torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn),
]


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 + seed)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def write(kind: str, folder: Path, state: dict[str, Any]) -> Path:
    """Write *state* as others do, and return where."""
    if kind == "dcp":
        dcp.save(state, checkpoint_id=folder / "dcp")
        return folder / "dcp"
    torch.save(state, folder / "state.pt", _use_new_zipfile_serialization=kind == "zip")
    return folder / "state.pt"


@st.composite
def states(draw: st.DrawFn, dtypes: list[torch.dtype]) -> dict[str, Any]:
    """Nested dicts and lists of tensors of any dtype and layout, and values."""
    keys = st.text("ab.0_", min_size=1, max_size=4)
    values: st.SearchStrategy[Any] = (
        st.none() | st.integers(-9, 9) | st.text(max_size=3) | st.booleans() | tensors(dtypes)
    )
    nested = st.recursive(
        values,
        lambda inner: st.dictionaries(keys, inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=3),
        max_leaves=8,
    )
    found: dict[str, Any] = draw(st.dictionaries(keys, nested, min_size=1, max_size=4))
    return found


@st.composite
def tensors(draw: st.DrawFn, dtypes: list[torch.dtype]) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(dtypes))
    count = torch.Size(shape).numel() * dtype.itemsize
    bits = torch.tensor(draw(st.lists(st.integers(0, 1), min_size=count, max_size=count)), dtype=torch.uint8)
    tensor = bits.view(dtype).view(shape)
    order = draw(st.permutations(range(len(shape))))
    return tensor.permute(order)


@pytest.mark.parametrize("kind", ["dcp", "zip", "legacy"])
def test_any_state_comes_back(kind: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    @settings(max_examples=25)
    @given(states(DTYPES if kind != "legacy" else DTYPES[:11]))
    def check(state: dict[str, Any]) -> None:
        if kind == "dcp" and ambiguous(state):
            return
        path = write(kind, tmp_path_factory.mktemp("run"), state)
        assert_same(open_checkpoint(path).state, state)

    check()


def ambiguous(state: dict[str, Any]) -> bool:
    """Return whether DCP itself would mix two items up: it joins keys with dots."""
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    try:
        flat, _ = flatten_state_dict(state)
    except ValueError:
        return True
    return any(name == other or name.startswith(f"{other}.") for name in flat for other in flat if name is not other)


@pytest.mark.parametrize("kind", ["dcp", "zip", "legacy"])
def test_live_objects_and_steps_get_what_was_saved(kind: str, tmp_path: Path) -> None:
    model, optimizer = trained(0)
    if kind == "dcp":
        of_model, of_optimizer = get_state_dict(model, optimizer)
    else:
        of_model, of_optimizer = model.state_dict(), optimizer.state_dict()
    path = write(kind, tmp_path, {"model": of_model, "optimizer": of_optimizer, "step": 7})
    done = save_as_step(open_checkpoint(path), tmp_path / "steps", step=7)
    assert (done.step, done.tensor_count) == (7, len([*model.state_dict()]) + 3 * len([*model.parameters()]))
    for way in ("directly", "through a step"):
        found, found_optimizer = trained(1)
        state = {"model": found, "optimizer": found_optimizer, "step": 0}
        if way == "directly":
            assert load(f"dcp://{path}" if kind == "dcp" else path, state) == ()
        else:
            with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
                ckpt.load(state).result()
        assert state["step"] == 7
        assert_same(found.state_dict(), model.state_dict())
        assert_same(found_optimizer.state_dict(), optimizer.state_dict())


def test_a_file_of_lightnings_form_fills_a_module_and_an_optimizer_of_other_keys(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    weights = nn.ModuleDict({"net": model}).state_dict()
    kept = {"state_dict": weights, "optimizer_states": [optimizer.state_dict()], "epoch": 3}
    torch.save(kept, tmp_path / "last.ckpt")
    found, found_optimizer = trained(1)
    load(
        open_checkpoint(tmp_path / "last.ckpt"),
        {"model": nn.ModuleDict({"net": found}), "optimizer": found_optimizer},
        map={"model": "state_dict", "optimizer": "optimizer_states[0]"},
    )
    assert_same(found.state_dict(), model.state_dict())
    assert_same(found_optimizer.state_dict(), optimizer.state_dict())


def test_what_does_not_fit_is_named_and_overwrites_nothing(tmp_path: Path) -> None:
    path = write("zip", tmp_path, {"model": {"weight": torch.ones(2, 2)}})
    model = nn.Linear(2, 2)
    before = model.weight.clone()
    with pytest.raises(StateMismatchError, match=r"model\.bias"):
        load(open_checkpoint(path), {"model": model})
    assert torch.equal(model.weight, before)
    assert any("model.bias" in problem for problem in load(open_checkpoint(path), {"model": model}, strict=False))
    assert torch.equal(model.weight, torch.ones(2, 2))


def test_a_step_that_is_there_is_replaced_when_asked(tmp_path: Path) -> None:
    found = open_checkpoint(write("zip", tmp_path, {"x": torch.ones(2)}))
    save_as_step(found, tmp_path / "steps")
    with pytest.raises(StepExistsError, match="--force"):
        save_as_step(found, tmp_path / "steps")
    with pytest.raises(StepExistsError, match="--force"):
        save_as_step(found, tmp_path / "steps", dry_run=True)
    save_as_step(found, tmp_path / "steps", replace=True)
    assert save_as_step(found, tmp_path / "steps", step=1, dry_run=True).dry_run
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        assert [(info.step, info.generation) for info in ckpt.steps().result()] == [(0, 2)]


class Harm:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("harm",)


@pytest.mark.parametrize("kind", ["zip", "legacy", "metadata", "item", "tensor"])
def test_no_file_runs_code(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if kind in ("zip", "legacy"):
        path = write(kind, tmp_path, {"x": Harm()})
    else:
        path = write("dcp", tmp_path, {"x": Harm() if kind == "item" else torch.ones(300)})
        if kind == "metadata":
            (path / ".metadata").write_bytes(pickle.dumps(Harm()))
        elif kind == "tensor":
            (file,) = path.glob("*.distcp")
            file.write_bytes(file.read_bytes().replace(b"torch._utils", b"os\nsystem\nX1"))
    with pytest.raises((UsageError, CorruptionError)):
        open_checkpoint(path)
    assert not (tmp_path / "harm").exists()


def test_whom_one_trusts_may_give_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = write("zip", tmp_path, {"x": Harm()})
    with pytest.raises(UsageError, match=r"holds objects \(posix\.mkdir\).*--trust-pickle"):
        open_checkpoint(path)
    open_checkpoint(path, trust_pickle=True)
    assert (tmp_path / "harm").exists()


@pytest.mark.parametrize("part", ["metadata", "data"])
def test_a_damaged_folder_of_dcp_is_told_or_harmless(part: str, tmp_path: Path) -> None:
    """Whatever byte is another, reading raises ours alone; a pickle has no checksum, so that values may be others."""
    state = {"x": torch.arange(40.0).view(10, 4), "n": [1, {"y": torch.ones(2)}]}
    path = write("dcp", tmp_path, state)
    (file,) = path.glob("*.distcp")
    broken = path / ".metadata" if part == "metadata" else file
    whole = broken.read_bytes()
    for at in range(0, len(whole), 1 if part == "metadata" else 7):
        broken.write_bytes(whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :])
        opened(path)
    for size in range(0, len(whole), 97):
        broken.write_bytes(whole[:size])
        with pytest.raises((CorruptionError, UsageError)):
            open_checkpoint(path)
    broken.unlink()
    with pytest.raises((CorruptionError, UsageError)):
        open_checkpoint(path)


def opened(path: Path) -> Foreign | None:
    try:
        return open_checkpoint(path)
    except (CorruptionError, UsageError):
        return None


def test_a_path_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    path = write("dcp", tmp_path, {"x": torch.ones(2)})
    (tmp_path / "dcp" / "__0_0.distcp").rename(tmp_path / "__0_0.distcp")
    data = (path / ".metadata").read_bytes()
    old, new = b"\x8c\x0c__0_0.distcp", b"\x8c\x0f../__0_0.distcp"
    assert old in data
    (path / ".metadata").write_bytes(data.replace(old, new))
    with pytest.raises(CorruptionError):
        open_checkpoint(path)


def test_what_is_none_of_them_is_told(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    with pytest.raises(UsageError, match=r"neither a DCP checkpoint, nor .*, nor a file of torch\.save"):
        open_checkpoint(tmp_path / "text")
    with pytest.raises(UsageError, match="there is nothing"):
        open_checkpoint(tmp_path / "nothing")


def test_memory_stays_within_the_pool(tmp_path: Path) -> None:
    size = 192 << 20
    torch.save({"big": torch.zeros(size, dtype=torch.uint8)}, tmp_path / "big.pt")

    def anonymous() -> int:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found is not None
        return int(found[1]) << 10

    before, seen = anonymous(), [0]
    save_as_step(
        open_checkpoint(tmp_path / "big.pt"),
        tmp_path / "steps",
        io=aiockpt.IO(pool_bytes=32 << 20),
        on_written=lambda _: seen.append(anonymous()),
    )
    assert max(seen) - before < 96 << 20


def test_plain_dcp_loads_what_a_step_became(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    ema = torch.rand(3).to(torch.bfloat16)
    state = {"model": model, "optimizer": optimizer, "step": 7, "more": [1, {"ema": ema}], "rng": aiockpt.RNG()}
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(7, state).result()
        assert write_dcp(ckpt, tmp_path / "dcp") > 0
        with pytest.raises(UsageError, match="--force"):
            write_dcp(ckpt, tmp_path / "dcp")
        write_dcp(ckpt, tmp_path / "dcp", step=7, replace=True)
    found, found_optimizer = trained(1)
    of_model, of_optimizer = get_state_dict(found, found_optimizer)
    target = {"model": of_model, "optimizer": of_optimizer, "step": 0, "more": [0, {"ema": torch.zeros_like(ema)}]}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    expected_model, expected_optimizer = get_state_dict(model, optimizer)
    expected = {"model": expected_model, "optimizer": expected_optimizer, "step": 7, "more": [1, {"ema": ema}]}
    assert_same(target, expected)
    assert_same(open_checkpoint(tmp_path / "dcp").state, expected)


def test_a_folder_of_dcp_is_replaced_only_when_the_new_one_is_whole(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.full((20_000,), float(step))}).result()
        write_dcp(ckpt, tmp_path / "dcp", step=1)
        before = sorted(path.name for path in (tmp_path / "dcp").iterdir())
        (data,) = tmp_path.glob("steps/step-00000002/a-*/d/*.safetensors")
        flip(data, 70_000)
        with pytest.raises(CorruptionError):
            write_dcp(ckpt, tmp_path / "dcp", step=2, replace=True)
        assert sorted(path.name for path in (tmp_path / "dcp").iterdir()) == before
        assert torch.equal(open_checkpoint(tmp_path / "dcp").state["x"], torch.full((20_000,), 1.0))
        flip(data, 70_000)
        write_dcp(ckpt, tmp_path / "dcp", step=2, replace=True)
    assert len(list((tmp_path / "dcp").iterdir())) == 2
    assert torch.equal(open_checkpoint(tmp_path / "dcp").state["x"], torch.full((20_000,), 2.0))


def test_a_folder_of_dcp_is_flushed_data_first_and_then_named_before_the_old_data_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str, int]] = []
    flush, replace, unlink = os.fsync, os.replace, os.unlink

    def flushed(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(tmp_path / "dcp"):
            calls.append(("flush", path.name, path.stat().st_size if path.is_file() else 0))
        flush(descriptor)

    def replaced(source: Any, target: Any) -> None:
        calls.append(("rename", Path(target).name, 0))
        replace(source, target)

    def unlinked(path: Any, **options: Any) -> None:
        calls.append(("unlink", Path(path).name, 0))
        unlink(path, **options)

    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(1, {"x": torch.ones(3), "y": 7}).result()
        write_dcp(ckpt, tmp_path / "dcp")
        monkeypatch.setattr(os, "fsync", flushed)
        monkeypatch.setattr(OsFiles, "fsync", staticmethod(flushed))
        monkeypatch.setattr(os, "replace", replaced)
        monkeypatch.setattr(os, "unlink", unlinked)
        write_dcp(ckpt, tmp_path / "dcp", replace=True)
        monkeypatch.undo()
    size = {path.name: path.stat().st_size for path in (tmp_path / "dcp").iterdir()}
    assert calls == [
        ("flush", "__0_1.distcp", size["__0_1.distcp"]),
        ("flush", ".metadata.tmp", size[".metadata"]),
        ("rename", ".metadata", 0),
        ("flush", "dcp", 0),
        ("unlink", "__0_0.distcp", 0),
    ]


def test_a_step_that_is_saved_anew_meanwhile_does_not_mix_in_a_folder_of_dcp(tmp_path: Path) -> None:
    def state(value: float) -> dict[str, torch.Tensor]:
        return {name: torch.full((3,), value) for name in ("x", "y")}

    with aiockpt.Checkpointer(tmp_path / "steps", on_exists="new_generation") as ckpt:
        ckpt.save(1, state(1.0)).result()
        write_dcp(ckpt, tmp_path / "dcp", on_written=lambda _: ckpt.save(1, state(2.0)).result())
    assert_same(open_checkpoint(tmp_path / "dcp").state, state(1.0))


def test_tensors_in_lists_and_two_modules_of_one_optimizer_are_in_a_folder_of_dcp(tmp_path: Path) -> None:
    nets = {"gen": nn.Linear(2, 1), "disc": nn.Linear(2, 1)}
    optimizer = torch.optim.Adam([{"params": net.parameters()} for net in nets.values()])
    for number, net in enumerate(nets.values(), 1):
        for parameter in net.parameters():
            parameter.grad = torch.full_like(parameter, number)
    optimizer.step()
    some = {"list": [torch.ones(2), {"t": torch.zeros(2)}, 3], "tuple": (torch.ones(1), 2)}
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(1, {**nets, "optimizer": optimizer, "some": some}).result()
        write_dcp(ckpt, tmp_path / "dcp")
    found = open_checkpoint(tmp_path / "dcp").state
    assert torch.equal(found["some"]["list"][0], torch.ones(2))
    assert torch.equal(found["some"]["list"][1]["t"], torch.zeros(2))
    assert torch.equal(found["some"]["tuple"][0], torch.ones(1))
    moments = {name: entry["exp_avg"] for name, entry in found["optimizer"]["state"].items()}
    assert moments.keys() == {f"{net}.{name}" for net in nets for name in ("weight", "bias")}
    assert torch.equal(moments["disc.weight"], optimizer.state[nets["disc"].weight]["exp_avg"])
    assert torch.equal(moments["gen.bias"], optimizer.state[nets["gen"].bias]["exp_avg"])


def test_extra_state_with_tensors_and_keys_with_dots_go_to_dcp_and_names_that_become_one_are_refused(
    tmp_path: Path,
) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, Any]:
            return {"seen": torch.arange(3)}

    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(1, {"my.model": Extra(2, 1)}).result()
        write_dcp(ckpt, tmp_path / "dcp")
        found = open_checkpoint(tmp_path / "dcp").state["my.model"]
        assert found.keys() == {"weight", "bias", "_extra_state"}
        assert torch.equal(found["_extra_state"]["seen"], torch.arange(3))
        ckpt.save(2, {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}}).result()
        with pytest.raises(UsageError, match=r"two names of the state are one in DCP.* a\.b.*: rename one"):
            write_dcp(ckpt, tmp_path / "other")
        assert not (tmp_path / "other").exists()


def test_a_restricted_torch_load_opens_what_a_step_became(tmp_path: Path) -> None:
    model, optimizer = trained(0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    plain = {
        "lr": np.float32(0.5),
        "many": set(range(9000)),
        "t": (1, torch.ones(2, dtype=torch.bfloat16)),
        "none": None,
    }
    odd = {"path": Path("/data"), "rng": aiockpt.RNG()}
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "plain": {**plain, **odd}}
    state["tied"] = dict(model.named_parameters())["0.weight"]
    file = tmp_path / "new" / "step.pt"
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(7, state).result()
        assert write_torch(ckpt, file) == ("plain.rng", "plain.path")
        with pytest.raises(UsageError, match="--force"):
            write_torch(ckpt, file)
        with pytest.raises(UsageError, match=r"one file of torch\.save"):
            write_torch(ckpt, tmp_path)
        write_torch(ckpt, file, step=7, replace=True)
    found = torch.load(file, weights_only=True)
    assert_same(found["plain"], {**plain, "lr": 0.5, "rng": None})
    assert found["tied"].data_ptr() == found["model"]["0.weight"].data_ptr()
    other, other_optimizer = trained(1)
    other_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(other_optimizer, 10)
    for live, name in ((other, "model"), (other_optimizer, "optimizer"), (other_schedule, "schedule")):
        live.load_state_dict(found[name])
    assert_same(other.state_dict(), model.state_dict())
    assert_same(other_optimizer.state_dict(), optimizer.state_dict())
    assert other_schedule.state_dict() == schedule.state_dict()
    assert [path.name for path in file.parent.iterdir()] == ["step.pt"]


def test_a_damaged_step_becomes_no_file_of_torch(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(1, {"x": torch.ones(20_000)}).result()
        (data,) = tmp_path.glob("steps/step-00000001/a-*/d/*.safetensors")
        flip(data, 70_000)
        with pytest.raises(CorruptionError):
            write_torch(ckpt, tmp_path / "out" / "step.pt")
    assert not list((tmp_path / "out").iterdir())


def test_a_long_list_is_a_list_in_a_folder_of_dcp(tmp_path: Path) -> None:
    state = {"set": set(range(9000)), "pair": (tuple(range(9000)), 1), "bytes": bytes(300_000), "x": torch.ones(1)}
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        ckpt.save(1, state).result()
        write_dcp(ckpt, tmp_path / "dcp")
    assert_same(open_checkpoint(tmp_path / "dcp").state, state)


def test_a_conjugated_tensor_is_read_with_its_conjugation(tmp_path: Path) -> None:
    saved = {"conjugated": torch.randn(3, dtype=torch.complex64).conj()}
    saved["negated"] = torch.randn(3, dtype=torch.complex64).conj().imag
    for kind in ("dcp", "zip"):
        found = open_checkpoint(write(kind, tmp_path, saved), trust_pickle=True).state
        assert all(torch.equal(found[name], saved[name]) for name in saved), kind


def write_universal(folder: Path, frozen: dict[str, torch.Tensor], shape: torch.Size) -> None:
    """Write a checkpoint of one weight, and of a frozen parameter with the parts *frozen* by the names of ranks."""
    (folder / "zero" / "w").mkdir(parents=True)
    torch.save({"param": torch.ones(4)}, folder / "zero" / "w" / "fp32.pt")
    torch.save({"param_groups": [{"lr": 1.0}]}, folder / "zero" / "optimizer_state.pt")
    for rank, part in frozen.items():
        held = {
            "module": {},
            "param_shapes": [{"w": torch.Size([4])}],
            "frozen_param_shapes": {"frozen": shape},
            "frozen_param_fragments": {"frozen": part.clone()},
        }
        torch.save(held, folder / f"{rank}_model_states.pt")


def test_frozen_parameters_of_zero_3_are_joined_by_the_numbers_of_their_ranks(tmp_path: Path) -> None:
    whole = torch.arange(24.0).view(12, 2)
    parts = {f"zero_pp_rank_{rank}_mp_rank_00": part for rank, part in enumerate(whole)}
    write_universal(tmp_path, parts, whole.shape)
    assert torch.equal(open_checkpoint(tmp_path).state["model"]["frozen"], whole)


def test_frozen_parameters_of_zero_3_lose_the_padding_of_the_last_rank(tmp_path: Path) -> None:
    whole = torch.arange(10.0).view(5, 2)
    padded = torch.cat([whole.flatten(), torch.full((2,), 99.0)]).view(3, 4)
    parts = {f"zero_pp_rank_{rank}_mp_rank_00": part for rank, part in enumerate(padded)}
    write_universal(tmp_path, parts, whole.shape)
    assert torch.equal(open_checkpoint(tmp_path).state["model"]["frozen"], whole)


@pytest.mark.parametrize(
    ("param_shapes", "message"),
    [
        ([{"w": torch.Size([4]), "v": torch.Size([4])}], "has no weights of v"),
        ([{"w": torch.Size([4])}, {}], "has 1 groups of the optimizer, and parameters in 2"),
    ],
)
def test_a_universal_checkpoint_whose_files_contradict_each_other_is_refused(
    tmp_path: Path, param_shapes: list[dict[str, torch.Size]], message: str
) -> None:
    write_universal(tmp_path, {"mp_rank_00": torch.ones(2)}, torch.Size([2]))
    path = tmp_path / "mp_rank_00_model_states.pt"
    torch.save({**torch.load(path), "param_shapes": param_shapes}, path)
    with pytest.raises(CorruptionError, match=message):
        open_checkpoint(tmp_path)


def test_frozen_parameters_that_tensor_parallelism_divides_are_refused_and_others_kept(tmp_path: Path) -> None:
    part = torch.arange(4.0)
    write_universal(tmp_path / "same", {"mp_rank_00": part, "mp_rank_01": part}, part.shape)
    assert torch.equal(open_checkpoint(tmp_path / "same").state["model"]["frozen"], part)
    write_universal(tmp_path / "parts", {"mp_rank_00": part, "mp_rank_01": part + 1}, part.shape)
    with pytest.raises(UsageError, match="different parts of the frozen parameter frozen"):
        open_checkpoint(tmp_path / "parts")


def test_what_dcp_has_saved_through_us_goes_back_to_dcp(tmp_path: Path) -> None:
    from aiockpt.integrations.dcp import AiockptWriter

    state = {"model": {"a.b": torch.randn(3)}, "values": [1, {"x": (1, 2)}]}
    dcp.save(state, storage_writer=AiockptWriter(tmp_path / "steps"))
    with aiockpt.Checkpointer(tmp_path / "steps") as ckpt:
        write_dcp(ckpt, tmp_path / "dcp")
    target = {"model": {"a.b": torch.zeros(3)}, "values": [0, {"x": None}]}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    assert_same(target, state)


MAKES: dict[str, Any] = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=0.1),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "SGD with momentum": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
}


def with_its_own_state(make: Any, seed: int, *, part: bool) -> dict[str, Any]:
    """A module, an optimizer of two groups and a scheduler after one step; for *part* some parameters are frozen."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model[0].requires_grad_(not part)
    one, *others = model.parameters()
    optimizer = make([{"params": [one], "lr": 0.5}, {"params": others}])
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer, "step": torch.optim.lr_scheduler.MultiStepLR(optimizer, [0, 1])}


@pytest.mark.parametrize("make", MAKES)
@pytest.mark.parametrize("part", [False, True])
def test_an_optimizers_own_state_dict_comes_out_of_a_dcp_folder(make: str, part: bool, tmp_path: Path) -> None:
    """DCP makes texts of the numbers of parameters, and forgets the state of an optimizer that has none."""
    was = with_its_own_state(MAKES[make], 1, part=part)
    saved = {key: value.state_dict() for key, value in was.items()}
    dcp.save(saved, checkpoint_id=tmp_path / "old")
    found, url = open_checkpoint(tmp_path / "old"), f"dcp://{tmp_path}/old"
    assert found.state["optimizer"]["state"].keys() == saved["optimizer"]["state"].keys()
    save_as_step(found, tmp_path / "converted")
    for way in ("load", "fork", "converted"):
        now = with_its_own_state(MAKES[make], 2, part=part)
        if way == "load":
            assert load(url, now) == ()
        else:
            with aiockpt.Checkpointer(tmp_path / way) as ckpt:
                ckpt.load(now, fork=url if way == "fork" else None).result()
        assert_same({key: value.state_dict() for key, value in now.items()}, saved)
