"""Weights go out and come in bit by bit, whatever their shapes, dtypes, ties and shards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from safetensors.torch import save_model as save_by_safetensors

import aiockpt
from aiockpt.adapters.rename import Rules
from aiockpt.convert import from_hugging_face, open_weights, to_hugging_face
from aiockpt.errors import StateMismatchError, UnsupportedStateError, UsageError
from aiockpt.format.dtypes import CODES, is_native, torch_name
from tests.convert.small_models import (
    DEADLINE_S,
    Tied,
    all_same,
    export,
    load_folder,
    load_model,
    metadata,
    same_bits,
    save_model,
    save_state,
    take_in,
)
from tests.example_counts import examples
from tests.ranks.crew import Crew
from tests.small_run import small_checkpointer

NATIVE = sorted(torch_name(code) for code in CODES if is_native(code))


def test_a_folder_holds_each_weight_once_and_notes_what_is_tied(tmp_path: Path) -> None:
    model = save_model(tmp_path / "run", 7)
    done = export(tmp_path / "run", tmp_path / "out")
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    assert all_same(load_folder(tmp_path / "out"), expected)
    assert metadata(tmp_path / "out" / "model.safetensors") == {"format": "pt", "head.weight": "embed.weight"}
    assert (done.step, done.prefix, done.files) == (7, "model", ("model.safetensors",))
    assert done.ties == {"head.weight": "embed.weight"}
    assert done.bytes == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_model_comes_back_bit_by_bit_and_tied(tmp_path: Path, root: Path) -> None:
    export(root, tmp_path / "out", max_shard_bytes=10_000)
    take_in(tmp_path / "back", tmp_path / "out", step=3)
    other = Tied(seed=9)
    with small_checkpointer(tmp_path / "back") as ckpt:
        loaded = ckpt.load({"model": other}).result(DEADLINE_S)
        assert ckpt.verify(3).result(DEADLINE_S).generation == 1
        assert ckpt.describe(3).result(DEADLINE_S).alias == {"model.head.weight": "model.embed.weight"}
    assert loaded is not None
    assert loaded.step == 3
    assert all_same(other.state_dict(), Tied(seed=1).state_dict())
    assert other.head.weight is other.embed.weight


def test_shards_have_an_index_that_names_every_tensor(tmp_path: Path, root: Path) -> None:
    done = export(root, tmp_path / "out", max_shard_bytes=10_000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(done.files) > 1
    assert set(index["weight_map"].values()) == set(done.files)
    tensors = load_folder(tmp_path / "out")
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    for path in (tmp_path / "out").glob("*.safetensors"):
        assert len(load_file(path)) == 1 or sum(tensor.nbytes for tensor in load_file(path).values()) <= 10_000


def test_what_safetensors_wrote_comes_in_with_its_ties(tmp_path: Path) -> None:
    model = Tied(seed=4)
    (tmp_path / "in").mkdir()
    save_by_safetensors(model, str(tmp_path / "in" / "model.safetensors"))
    take_in(tmp_path / "run", tmp_path / "in" / "model.safetensors", step=0)
    assert all_same(load_model(tmp_path / "run").state_dict(), model.state_dict())


def test_a_tie_that_no_file_notes_can_be_said(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    tensors = {name: tensor for name, tensor in Tied(seed=4).state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    take_in(tmp_path / "run", tmp_path / "in", ties={"head.weight": "embed.weight"})
    assert all_same(load_model(tmp_path / "run").state_dict(), Tied(seed=4).state_dict())
    with pytest.raises(UsageError, match="no tensor 'embed'"):
        take_in(tmp_path / "other", tmp_path / "in", ties={"head.weight": "embed"})
    with pytest.raises(UsageError, match="elements of its own"):
        take_in(tmp_path / "other", tmp_path / "in", ties={"scale": "embed.weight"})


def elements(shape: list[int], dtype: str, seed: int) -> torch.Tensor:
    """Return random bytes, read as *dtype*; bool has two of them."""
    kind: torch.dtype = getattr(torch, dtype)
    count = int(torch.Size(shape).numel()) * kind.itemsize
    made = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2 if kind == torch.bool else 256, (count,), dtype=torch.uint8, generator=made)
    return data.view(kind).view(shape)


@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tensors=st.lists(
        st.tuples(st.sampled_from(NATIVE), st.lists(st.integers(0, 40), max_size=3)), min_size=1, max_size=8
    ),
    max_shard_bytes=st.sampled_from([1, 1000, 50_000, 10**9]),
    seed=st.integers(0, 2**31),
)
def test_any_dtypes_and_shapes_survive_the_way_out_and_back(
    tmp_path_factory: pytest.TempPathFactory, tensors: list[tuple[str, list[int]]], max_shard_bytes: int, seed: int
) -> None:
    place = tmp_path_factory.mktemp("drawn")
    held = {f"t{index}": elements(shape, dtype, seed + index) for index, (dtype, shape) in enumerate(tensors)}
    save_state(place / "run", {"weights": held})
    export(place / "run", place / "out", prefix="weights.", max_shard_bytes=max_shard_bytes)
    assert all_same(load_folder(place / "out"), held)
    take_in(place / "back", place / "out", prefix="again")
    with small_checkpointer(place / "back") as ckpt:
        for name, tensor in held.items():
            assert same_bits(ckpt.read(0, f"again.{name}").result(DEADLINE_S), tensor)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_floating_point_is_rounded_as_torch_rounds_it_and_the_rest_stays(
    tmp_path: Path, root: Path, dtype: str
) -> None:
    kind = getattr(torch, dtype)
    done = export(root, tmp_path / "out", dtype=dtype)
    for name, tensor in load_folder(tmp_path / "out").items():
        held = Tied(seed=1).state_dict()[name]
        assert same_bits(tensor, held.to(kind) if held.is_floating_point() else held), name
    assert done.dtypes["I64"] == 1
    take_in(tmp_path / "back", tmp_path / "out", dtype="float32")
    with small_checkpointer(tmp_path / "back") as ckpt:
        found = ckpt.read(0, "model.embed.weight").result(DEADLINE_S)
    assert same_bits(found, Tied(seed=1).embed.weight.to(kind).to(torch.float32))


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz]


class Quantized(torch.nn.Module):
    """Weights of eight bits, each with a scale that is a scalar, and scalars of other dtypes."""

    def __init__(self) -> None:
        super().__init__()
        for dtype in EIGHT_BITS:
            name = str(dtype).removeprefix("torch.")
            weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).to(dtype)
            self.register_parameter(name, torch.nn.Parameter(weight, requires_grad=False))
            self.register_buffer(f"{name}_zero", torch.tensor(1.5).to(dtype))
            self.register_buffer(f"{name}_scale", torch.tensor(0.1))
        for dtype in (torch.bfloat16, torch.int64, torch.bool):
            self.register_buffer(f"one_{dtype}".replace(".", "_"), torch.tensor(1, dtype=dtype))


@pytest.mark.parametrize("options", [{}, {"link": True}, {"dtype": "bfloat16"}], ids=["written", "linked", "rounded"])
def test_weights_of_eight_bits_and_scalars_keep_their_dtypes_and_shapes(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    model = Quantized()
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": model}).result(DEADLINE_S)
        to_hugging_face(ckpt, tmp_path / "out", prefix="model", **options).result(DEADLINE_S)
    found = load_folder(tmp_path / "out")
    for name, tensor in model.state_dict().items():
        rounded = options.get("dtype") and tensor.dtype == torch.float32
        assert found[name].shape == tensor.shape, name
        assert same_bits(found[name], tensor.bfloat16() if rounded else tensor), name
    take_in(tmp_path / "back", tmp_path / "out")
    with aiockpt.Checkpointer(tmp_path / "back") as ckpt:
        assert all(same_bits(ckpt.read(0, f"model.{name}").result(DEADLINE_S), found[name]) for name in found)


@pytest.mark.parametrize("way", ["out", "in"])
def test_a_number_that_would_become_infinite_is_refused_by_name(tmp_path: Path, way: str) -> None:
    weights = {"fine": torch.tensor([float("inf"), 1.0]), "big": torch.full((9, 9), 70_000.0)}
    (tmp_path / "in").mkdir()
    save_state(tmp_path / "run", {"w": weights})
    save_file(weights, tmp_path / "in" / "model.safetensors")
    ways: dict[str, Callable[[], object]] = {
        "out": lambda: export(tmp_path / "run", tmp_path / "out", prefix="w", dtype="float16"),
        "in": lambda: take_in(tmp_path / "back", tmp_path / "in", dtype="float16"),
    }
    with pytest.raises(UsageError, match=r"^big has elements that float16 cannot hold"):
        ways[way]()
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "back").rglob("*.safetensors"))


def test_what_several_ranks_saved_comes_out_whole(tmp_path: Path) -> None:
    state = {"w": {f"m{index}": torch.nn.Parameter(torch.randn(700, 33) + index) for index in range(4)}}
    with Crew(
        3, tmp_path / "run", io=aiockpt.IO(pool_bytes=1 << 20, slab_bytes=8192, block_bytes=4096, read_bytes=8192)
    ) as crew:
        crew.on_all(lambda rank, ckpt: ckpt.save(1, state).result(DEADLINE_S))
    files = {path.name[:6] for path in (tmp_path / "run").glob("step-*/a-*/d/*")}
    assert len(files) == 3
    export(tmp_path / "run", tmp_path / "out", prefix="w", max_shard_bytes=150_000)
    assert all_same(load_folder(tmp_path / "out"), state["w"])


def test_one_shard_of_an_unfinished_download_is_not_the_model(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(2)}, tmp_path / "model-00001-of-00003.safetensors")
    with pytest.raises(
        UsageError, match=r"one of 3 shards, and no model\.safetensors\.index\.json: fetch the whole folder"
    ):
        take_in(tmp_path / "run", tmp_path)
    (tmp_path / "model-00001-of-00003.safetensors").rename(tmp_path / "model-00001-of-00001.safetensors")
    take_in(tmp_path / "run", tmp_path)


@pytest.mark.parametrize("key", [0, 7])
def test_weights_below_a_number_load_into_a_dict_and_for_0_into_a_list(tmp_path: Path, key: int) -> None:
    save_file({"weight": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    with small_checkpointer(tmp_path / "run") as ckpt:
        from_hugging_face(ckpt, tmp_path, prefix=f"models[{key}]").result(DEADLINE_S)
        for make in (lambda net: {key: net}, lambda net: [net]) if key == 0 else (lambda net: {key: net},):
            net = torch.nn.Linear(2, 1, bias=False)
            ckpt.load({"models": make(net)}).result(DEADLINE_S)
            assert torch.equal(net.weight, torch.ones(1, 2))


def test_the_one_module_is_found_and_of_several_one_must_be_said(tmp_path: Path) -> None:
    state: dict[str, Any] = {"nets": {"generator": Tied(1), "critic": Tied(2)}, "note": torch.ones(3)}
    with small_checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, state).result(DEADLINE_S)
        ckpt.save(2, {"nets": {"critic": Tied(2)}}).result(DEADLINE_S)
        ckpt.save(3, {"w": torch.ones(3)}).result(DEADLINE_S)
        ckpt.save(5, {"model": Tied(1), "nets": [Tied(1), Tied(2)]}).result(DEADLINE_S)
        ckpt.save(4, {"optimizer": {"m": torch.ones(3)}, "model": {"w": torch.ones(3)}}).result(DEADLINE_S)
    with pytest.raises(UsageError, match=r"2 modules \(nets.generator, nets.critic\).*--prefix nets.generator"):
        export(tmp_path / "run", tmp_path / "out", step=1)
    with pytest.raises(UsageError, match=r"3 modules \(model, nets\[0\], nets\[1\]\)"):
        export(tmp_path / "run", tmp_path / "out", step=5)
    assert export(tmp_path / "run", tmp_path / "listed", step=5, prefix="nets[1]").prefix == "nets[1]"
    with pytest.raises(UsageError, match=r"did you mean --prefix nets\.critic"):
        export(tmp_path / "run", tmp_path / "out", step=1, prefix="nets.crtic")
    with pytest.raises(UsageError, match=r"did you mean --prefix nets\.critic\.embed or"):
        export(tmp_path / "run", tmp_path / "out", step=2, prefix="nets.critic.embed.weight")
    with pytest.raises(UsageError, match=r"no module, and its tensors \(w\) lie in no part.*save them below a key"):
        export(tmp_path / "run", tmp_path / "out", step=3)
    with pytest.raises(UsageError, match=r"no module.*--prefix model \(.*prefix='model'\).*are optimizer, model$"):
        export(tmp_path / "run", tmp_path / "out", step=4)
    assert export(tmp_path / "run", tmp_path / "one", step=1, prefix="nets.critic").prefix == "nets.critic"
    assert export(tmp_path / "run", tmp_path / "two", step=2).prefix == "nets.critic"
    assert all_same(load_folder(tmp_path / "one"), load_folder(tmp_path / "two"))


def test_memory_that_is_stored_under_a_name_elsewhere_comes_out_under_its_own(tmp_path: Path) -> None:
    shared = torch.randn(30, 3)
    save_state(tmp_path / "run", {"ema": {"x": shared}, "w": {"a": shared, "b": shared, "c": shared + 1}})
    done = export(tmp_path / "run", tmp_path / "out", prefix="w")
    assert all_same(load_folder(tmp_path / "out"), {"a": shared, "c": shared + 1})
    assert done.ties == {"b": "a"}


def test_names_that_collide_and_dtypes_that_nobody_reads_are_refused(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"w": {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}}).result(DEADLINE_S)
        ckpt.save(2, {"w": {"x": torch.ones(2, dtype=torch.complex128)}}).result(DEADLINE_S)
        ckpt.save(3, {"w": {"x": torch.ones(2), "y": (tied := torch.ones(2)), "format": tied}}).result(DEADLINE_S)
    with pytest.raises(UsageError, match=r"w\.a\\\.b and w\.a\.b would both be named 'a\.b'"):
        export(tmp_path / "run", tmp_path / "out", step=1, prefix="w")
    with pytest.raises(UnsupportedStateError, match=r"w\.x: .*C128"):
        export(tmp_path / "run", tmp_path / "out", step=2, prefix="w")
    with pytest.raises(UsageError, match="'format' shares memory"):
        export(tmp_path / "run", tmp_path / "out", step=3, prefix="w")
    with pytest.raises(UsageError, match="weights can be rounded to"):
        export(tmp_path / "run", tmp_path / "out", step=3, prefix="w", dtype="int8")
    assert not (tmp_path / "out").exists()


class Extra(torch.nn.Linear):
    """A layer whose own state holds tensors, long bytes and many numbers."""

    def get_extra_state(self) -> dict[str, Any]:
        return {"bytes": b"x" * 100_000, "numbers": list(range(2000)), "tensor": torch.ones(2)}


def test_parts_of_values_are_no_weights_whatever_their_names(tmp_path: Path) -> None:
    model, plain = Extra(2, 2), {"lora@rank8": torch.ones(2), "long": b"x" * 100_000, "seen": list(range(2000))}
    with aiockpt.Checkpointer(tmp_path / "run") as ckpt:
        ckpt.save(1, {"model": model, "plain": plain}).result(DEADLINE_S)
        assert set(open_weights(ckpt)) == {"weight", "bias"}
    export(tmp_path / "run", tmp_path / "plain", prefix="plain")
    assert load_folder(tmp_path / "plain").keys() == {"lora@rank8"}
    export(tmp_path / "run", tmp_path / "model")
    assert load_folder(tmp_path / "model").keys() == {"weight", "bias"}


@pytest.mark.parametrize("value", [torch.eye(3).to_sparse(), aiockpt.per_rank(torch.ones(2))])
def test_a_tensor_that_is_no_plain_one_is_refused_by_name_and_not_lost(value: Any, tmp_path: Path) -> None:
    save_state(tmp_path / "run", {"w": {"x": torch.ones(2), "odd": value}})
    with pytest.raises(UnsupportedStateError, match=r"w\.odd.*: a part of a composite tensor.* or of one rank"):
        export(tmp_path / "run", tmp_path / "out", prefix="w")
    assert not (tmp_path / "out").exists()


def test_the_keys_of_a_saved_state_dict_are_the_names(tmp_path: Path) -> None:
    model = Tied(1)
    save_state(tmp_path / "run", {"model": model.state_dict()})
    export(tmp_path / "run", tmp_path / "out", prefix="model")
    assert load_folder(tmp_path / "out").keys() == model.state_dict().keys() - {"head.weight"}


def test_a_state_without_the_tied_name_is_told_so_on_load(tmp_path: Path) -> None:
    """Why ``ties`` is there: files that others wrote often lack the name, and a strict load says which."""
    (tmp_path / "in").mkdir()
    tensors = {name: tensor for name, tensor in Tied(seed=4).state_dict().items() if name != "head.weight"}
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    take_in(tmp_path / "run", tmp_path / "in")
    with (
        aiockpt.Checkpointer(tmp_path / "run") as ckpt,
        pytest.raises(StateMismatchError, match=r"model\.head\.weight"),
    ):
        ckpt.load({"model": Tied(seed=9)}).result(DEADLINE_S)


def test_names_change_on_the_way_out_and_back(root: Path, tmp_path: Path) -> None:
    out = [("^embed", "wte"), (r"^(norm|head)\.", r"top.\1.")]
    done = export(root, tmp_path / "out", rename=out)
    assert done.ties == {"top.head.weight": "wte.weight"}
    found = load_folder(tmp_path / "out")
    expected = Tied(seed=1).state_dict()
    assert all_same(found, {Rules(out)(name): expected[name] for name in expected if name != "head.weight"})
    back = take_in(tmp_path / "back", tmp_path / "out", rename=[("^wte", "embed"), (r"^top\.", "")])
    assert back.ties == {"model.head.weight": "model.embed.weight"}
    assert all_same(load_model(tmp_path / "back").state_dict(), expected)


def test_rules_that_make_one_name_of_two_are_refused_both_ways(root: Path, tmp_path: Path) -> None:
    one_name = [(r".*\.(weight|bias)$", "x")]
    with pytest.raises(UsageError, match="would both be named 'x': give a longer prefix, or other rules"):
        export(root, tmp_path / "out", rename=one_name)
    export(root, tmp_path / "out")
    with pytest.raises(UsageError, match="would both be named 'x'"):
        take_in(tmp_path / "back", tmp_path / "out", rename=one_name)
    with pytest.raises(UsageError, match=r"would both be named 'embed\.weight'"):  # what is tied, too
        take_in(tmp_path / "back", tmp_path / "out", rename=[("^head", "embed")])
