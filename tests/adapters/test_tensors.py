"""Tensors that are saved bit by bit, and those that are refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from aiockpt.adapters.native import StateWalker
from aiockpt.errors import StateMismatchError, UnsupportedStateError
from aiockpt.format.dtypes import CODES, torch_name

DTYPES = sorted({getattr(torch, torch_name(code)) for code in CODES if hasattr(torch, torch_name(code))}, key=str)


def random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Elements of every bit pattern, nans and denormals included; bools are 0 or 1."""
    generator = torch.Generator().manual_seed(1)
    size = torch.empty(shape, dtype=torch.uint8).numel() * torch.empty(0, dtype=dtype).element_size()
    bits = torch.randint(0, 2 if dtype == torch.bool else 256, (size,), dtype=torch.uint8, generator=generator)
    return bits.view(dtype).view(shape)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(5, 3), (), (0, 4), (1,)], ids=str)
def test_every_dtype_comes_back_bit_by_bit(save: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    saved = save({"t": random_bits(dtype, *shape)})
    found = {"t": random_bits(dtype, *shape)}
    found["t"].view(-1).view(torch.uint8)[:] = 0
    saved.load(found)
    assert saved.equals(found)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_saved_and_filled_through_strides(save: Any, dtype: torch.dtype) -> None:
    saved = save({"t": random_bits(dtype, 6, 4).t()})
    base = random_bits(dtype, 6, 4)
    base.view(torch.uint8)[:] = 0
    found = {"t": base.t()}
    saved.load(found)
    assert saved.equals(found)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[::2, 1::3],
        lambda t: t[2],
        lambda t: t[0, 0],
        lambda t: t[:0],
        lambda t: t.as_strided((3, 3), (1, 1)),
        lambda t: t[:1].expand(4, 9),
        lambda t: t.view(2, 3, 3, 3).to(memory_format=torch.channels_last),
    ],
)
def test_views_are_saved_by_their_elements(save: Any, view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = view(torch.arange(54.0).view(6, 9))
    saved = save({"t": source})
    found = {"t": torch.zeros(source.shape)}
    saved.load(found)
    assert torch.equal(found["t"], source)


@pytest.mark.parametrize("lazy", [lambda t: t.conj(), lambda t: t.conj().imag])
def test_a_lazy_conjugation_is_carried_out(save: Any, lazy: Callable[[torch.Tensor], torch.Tensor]) -> None:
    source = lazy(torch.randn(4, dtype=torch.complex64))
    assert source.is_conj() or source.is_neg()
    found = {"t": torch.zeros(4, dtype=source.dtype)}
    save({"t": source}).load(found)
    assert torch.equal(found["t"], source)


def test_a_lazily_conjugated_tensor_is_read_anew_on_every_walk() -> None:
    base = torch.ones(3, dtype=torch.complex64)
    walker, state = StateWalker(), {"t": base.conj()}
    walker.walk(state)
    base.mul_(2j)
    assert torch.equal(walker.walk(state).tensors[0].data, torch.full((3,), -2j))


def test_targets_are_filled_where_they_lie_whatever_their_strides(save: Any) -> None:
    saved = save({"t": torch.arange(6.0).view(2, 3)})
    base = torch.zeros(3, 4)
    saved.load({"t": base.t()[1:3]})
    assert torch.equal(base, torch.tensor([[0.0, 0, 3, 0], [0, 1, 4, 0], [0, 2, 5, 0]]))


def test_leaves_of_autograd_and_frozen_ones_are_filled(save: Any) -> None:
    saved = save({"a": torch.ones(2), "b": torch.ones(2)})
    found = {"a": nn.Parameter(torch.zeros(2)), "b": torch.zeros(2, requires_grad=True)}
    saved.load(found)
    assert all(torch.equal(t, torch.ones(2)) and t.requires_grad and t.is_leaf for t in found.values())


def test_the_data_to_save_are_the_memory_itself_outside_autograd() -> None:
    parameter = nn.Parameter(torch.ones(3))
    (shard,) = StateWalker().walk({"t": parameter}).tensors
    assert shard.data.data_ptr() == parameter.data_ptr()
    assert not shard.data.requires_grad


def wrapper() -> torch.Tensor:
    class Wrapped(torch.Tensor):
        @staticmethod
        def __new__(cls) -> Any:
            return torch.Tensor._make_wrapper_subclass(cls, (3,))

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
            raise NotImplementedError

    tensor: torch.Tensor = Wrapped()
    return tensor


def nested() -> torch.Tensor:
    tensor: torch.Tensor = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    return tensor


def transformed() -> torch.Tensor:
    """Return what torch.func made of a tensor while it took a gradient."""
    seen: list[torch.Tensor] = []

    def loss(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor)
        return tensor.sum()

    torch.func.grad(loss)(torch.ones(3))
    return seen[0]


def freed() -> torch.Tensor:
    tensor = torch.ones(3)
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: nn.LazyLinear(3).weight, "lazy"),
        (wrapper, "keeps its value elsewhere"),
        (freed, "storage was freed"),
        (nested, "a nested tensor"),
        (transformed, "inside a transform"),
        (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
        (lambda: torch.ones([1] * 33), "33 axes, and at most 32"),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("place", [lambda t: {"x": t}, lambda t: {"x": {"y": [t]}}])
def test_a_tensor_whose_bytes_lie_is_refused(
    make: Callable[[], torch.Tensor], reason: str, place: Callable[[torch.Tensor], dict[str, Any]]
) -> None:
    with pytest.raises(UnsupportedStateError, match=rf"^x(\.y\[0\])?: .*({reason})"):
        StateWalker().walk(place(make()))


def test_a_lazily_conjugated_target_is_refused(save: Any) -> None:
    with pytest.raises(StateMismatchError, match="t: it is lazily conjugated"):
        save({"t": torch.ones(2, dtype=torch.complex64)}).load({"t": torch.ones(2, dtype=torch.complex64).conj()})


def test_a_lazily_negated_buffer_is_refused_as_a_target(save: Any) -> None:
    model, found = nn.Linear(2, 1), nn.Linear(2, 1)
    model.register_buffer("b", torch.ones(2))
    found.register_buffer("b", torch.ones(2, dtype=torch.complex64).conj().imag)
    with pytest.raises(StateMismatchError, match=r"model.b: it is lazily conjugated or negated"):
        save({"model": model}).load({"model": found})


def test_one_lazily_negated_number_is_saved_with_its_sign(through: Any) -> None:
    source = torch.tensor([1 + 2j]).conj().imag
    assert source.is_neg()
    assert source.is_contiguous()
    (shard,) = StateWalker().walk({"t": source}).tensors
    assert not shard.data.is_neg(), "its bytes are its value"
    found = {"t": torch.zeros(1)}
    through({"t": source}, found)
    assert found["t"].item() == -2


@pytest.mark.parametrize("name", ["__metadata__", "x" * 2000])
def test_names_that_a_file_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedStateError, match="cannot name a tensor"):
        StateWalker().walk({name: torch.ones(1)})


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype="<f4").reshape(2, 3),
        np.arange(6, dtype=">i4"),
        np.arange(12.0).reshape(3, 4)[::-1, ::2],
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array(3.5),
        np.zeros((0, 2), dtype=np.uint64),
        np.array([1 + 2j], dtype=np.complex64),
        np.array([True, False]),
        np.array([1, 2], dtype=np.float16),
        np.array([1.5], dtype=np.longdouble),
        np.array(["a", "bcd"]),
        np.array([b"a", b"bcd"]),
        np.array(["2024-01-01", "NaT"], dtype="datetime64[s]"),
        np.arange(20_000).astype("U8"),
        np.broadcast_to(np.arange(3), (2, 3)),
    ],
    ids=lambda array: f"{array.dtype} {array.shape}",
)
@pytest.mark.parametrize("template", [None, "same"])
def test_arrays_come_back_equal_and_of_the_same_dtype(save: Any, array: Any, template: str | None) -> None:
    found: dict[str, Any] = {"a": None if template is None else np.zeros_like(array)}
    save({"a": array}).load(found)
    assert type(found["a"]) is np.ndarray
    assert found["a"].dtype == array.dtype
    np.testing.assert_array_equal(found["a"], array)


def test_an_array_that_others_hold_is_filled_in_place(save: Any) -> None:
    held = np.zeros(3)
    found = {"a": held}
    save({"a": np.arange(3.0)}).load(found)
    assert found["a"] is held
    assert held.tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    "scalar",
    [np.float64(1.5), np.int8(-3), np.bool_(True), np.complex64(2j), np.str_("ab"), np.datetime64("2024-01-01"),
     np.float16(0.1), np.longdouble(1) / 3],
    ids=lambda scalar: str(type(scalar).__name__),
)  # fmt: skip
def test_numpy_scalars_come_back_as_what_they_were(save: Any, scalar: Any) -> None:
    found: dict[str, Any] = {"a": None}
    save({"a": scalar}).load(found)
    assert type(found["a"]) is type(scalar)
    assert found["a"] == scalar


@pytest.mark.parametrize("value", [np.array([object()]), np.zeros(2, dtype="i4,f8"), np.void(b"x"), np.str_("")])
def test_arrays_of_objects_and_records_are_refused_by_path(value: Any) -> None:
    with pytest.raises(UnsupportedStateError, match=r"^a\[0\]: "):
        StateWalker().walk({"a": [value]})


@pytest.mark.parametrize("value", [torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3])], ids=str)
def test_what_torch_calls_its_types_comes_back(save: Any, value: Any) -> None:
    found: dict[str, Any] = {"a": None}
    save({"a": value}).load(found)
    assert found["a"] == value
    assert type(found["a"]) is type(value)


def test_a_conjugate_is_no_tie_of_what_it_shares_memory_with() -> None:
    number = torch.tensor([1 + 2j])
    walked = StateWalker().walk({"a": number, "b": number.conj()})
    assert not walked.alias
    assert [shard.data.tolist() for shard in walked.tensors] == [[1 + 2j], [1 - 2j]]
