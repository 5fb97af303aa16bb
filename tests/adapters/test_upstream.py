"""The private parts of other libraries that the package uses are still what it was written for.

Ruff's SLF001 forbids private names of others; ``pyproject.toml`` lists the modules that need some. Here each of these names
is pinned: by a digest of the source that gives it its meaning, or by what it does where it has no source in Python.
"""

import ast
import hashlib
import inspect
import re
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
from torch import nn
from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
from torch.distributed import distributed_c10d
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.launcher import api as launcher_api
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

ROOT = Path(__file__).parents[2]
TREE = {"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"}
MODULE_HOOKS = {
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
}
OPTIMIZER_HOOKS = {
    "_optimizer_state_dict_pre_hooks",
    "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks",
    "_optimizer_load_state_dict_post_hooks",
}
SOURCES: list[tuple[Callable[..., Any], str, set[str]]] = [
    # the function, the digests of its source (torch 2.13, 2.14 where it differs), and the names whose meaning it shows
    (nn.Module.__init__, "eac5af286a7d471f", TREE | MODULE_HOOKS),
    (nn.Module._save_to_state_dict, "8ed57d3b17ba0959", {"_save_to_state_dict"}),
    (nn.Module.state_dict, "57d07dd24ce52c60", {"_version"}),
    (nn.Module.load_state_dict, "128f811f0474fa6c", set()),  # `_metadata` of both is read out of `vars()`
    (nn.Module._load_from_state_dict, "90792cb10f4fa1ff f475d1c8e70b0a90", {"_version"}),
    (Optimizer.state_dict, "32626b5dd54af43b", OPTIMIZER_HOOKS),
    (Optimizer.load_state_dict, "7f8aa58e98c52731 8778b39f7e726b94", OPTIMIZER_HOOKS),
    (DTensor.__tensor_flatten__, "b049a1957a0173a1", {"_local_tensor", "_spec"}),
    (
        FlatParamHandle._init_flat_param_and_metadata,
        "3915f2fcb15b82dc",
        {"_params", "_shapes", "_strides", "_contiguities"},
    ),
    (FlatParamHandle.flatten_tensors, "3cb6e823d7bde0f2", {"_param_extensions"}),
    (FlatParamHandle._get_shard_metadata, "09bbceff964373eb", {"_shard_param_infos"}),
    (FlatParamHandle._use_sharded_views, "d85522069fc6dfd7", {"_use_orig_params", "_handle"}),
    (FlatParamHandle.is_sharded, "3dd699fb40f6431e", set()),
    (distributed_c10d._get_default_store, "4f987107c62d0352", {"_get_default_store"}),
    # What `aiockpt run` overrides of torch's agent, and what it relies on there.
    (launcher_api.launch_agent, "01534e5e0ad77098", set()),
    (LocalElasticAgent.__init__, "dffaa0de4d27f02c", set()),
    (LocalElasticAgent._shutdown, "615c6a545ee67bcf", set()),
    (LocalElasticAgent._start_workers, "3a15b68937f57e63", {"_start_workers"}),
    (LocalElasticAgent._monitor_workers, "4ba1c04fe76bba95", {"_monitor_workers"}),
    (SimpleElasticAgent._invoke_run, "376e457facabbfbc", set()),
    (SimpleElasticAgent._exit_barrier, "a61566b289e57086", set()),
    (SimpleElasticAgent._restart_workers, "7de319cd35c6f36e", {"_restart_workers"}),
    (SimpleElasticAgent._rendezvous, "f0c843d67c04a7fc", {"_rendezvous"}),
    (
        DynamicRendezvousHandler.next_rendezvous,
        "14cdaa5baee7f77b",
        {"_shared_tcp_store_server", "_bootstrap_store_info"},
    ),
    (StaticTCPRendezvous.next_rendezvous, "e56c888f2484c378", {"_store"}),
    (_LearnableFakeQuantize.__init__, "bf1f53db579d8f07", {"_LearnableFakeQuantize"}),
]
BY_WHAT_THEY_DO = {
    "_make_wrapper_subclass",
    *("_indices", "_values", "_coalesced_", "_empty_affine_quantized", "_empty_per_channel_affine_quantized"),
    *("_C", "_cdata", "_getframe", "_register_atexit", "_adjust_thread_count", "_threads", "_rmdir"),
    *("_daemonic", "_threads_queues", "_get_running_loop", "_shutdown"),
}


def files_with_private_names() -> Iterator[Path]:
    """Yield the files of the package for which the rule is off; those of frameworks are pinned in tests/frameworks."""
    ignores = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["ruff"]["lint"]["per-file-ignores"]
    for pattern, rules in ignores.items():
        if "SLF" in rules and pattern.startswith(("aiockpt", "backends")) and "integrations" not in pattern:
            head, _, rest = pattern.partition("{")
            names, _, tail = rest.partition("}")
            yield from (ROOT / f"{head}{name}{tail}" for name in names.split(","))


def private_names(path: Path) -> set[str]:
    """Return the private names of others that a file reaches for, and of its own class."""
    accesses = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute))
    return {
        node.attr
        for node in accesses
        if re.match(r"_[^_]", node.attr) and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    }


@pytest.mark.parametrize(
    ("source", "expected"), [row[:2] for row in SOURCES], ids=lambda row: getattr(row, "__qualname__", "")
)
def test_the_source_that_an_adapter_relies_on_is_unchanged(source: Callable[..., Any], expected: str) -> None:
    digest = hashlib.sha256(inspect.getsource(source).encode()).hexdigest()[:16]
    assert digest in expected.split(), (
        "read it again, see that what uses its private names still fits, then pin it anew"
    )


def test_each_private_name_of_others_that_is_used_is_pinned() -> None:
    used = {name for path in files_with_private_names() for name in private_names(path)}
    pinned = BY_WHAT_THEY_DO | {name for _, _, names in SOURCES for name in names}
    assert used == pinned


def test_a_sparse_tensor_gives_its_parts_unsummed() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 0]]), torch.tensor([1.0, 2.0]), (3,), check_invariants=True)
    assert not sparse.is_coalesced()
    assert sparse._indices().tolist() == [[0, 0]]
    assert sparse._values().tolist() == [1.0, 2.0]
    assert sparse._coalesced_(True).is_coalesced()


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_empty_quantised_tensors_have_the_scales_that_they_were_given() -> None:
    make: Any = torch  # its stubs do not have them
    whole = make._empty_affine_quantized((2, 3), scale=0.5, zero_point=3, dtype=torch.qint8)
    assert (whole.q_scale(), whole.q_zero_point(), tuple(whole.shape)) == (0.5, 3, (2, 3))
    scales, points = torch.tensor([0.5, 0.25], dtype=torch.float64), torch.tensor([1, 2])
    each = make._empty_per_channel_affine_quantized(
        (2, 3), scales=scales, zero_points=points, axis=0, dtype=torch.qint8
    )
    assert (each.q_per_channel_scales().tolist(), each.q_per_channel_zero_points().tolist()) == ([0.5, 0.25], [1, 2])


def test_a_class_has_no_say_under_the_guard() -> None:
    class Talkative(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError("asked")

    tensor = torch.zeros(1).as_subclass(Talkative)
    with pytest.raises(AssertionError, match="asked"):
        tensor.shape  # noqa: B018  it is read
    with torch._C.DisableTorchFunctionSubclass():
        assert tensor.shape == (1,)


def test_python_has_the_frames_and_the_hook_that_are_asked_for() -> None:
    assert sys._getframe(0).f_code.co_name == "test_python_has_the_frames_and_the_hook_that_are_asked_for"
    source = inspect.getsource(threading)
    assert "for atexit_call in reversed(_threading_atexits):" in source, "exit hooks run before threads are joined"
    assert callable(threading._register_atexit)  # type: ignore[attr-defined]


def test_fsspec_lacks_a_blocking_rmdir_where_it_has_another() -> None:
    from fsspec.asyn import AsyncFileSystem, async_methods  # type: ignore[import-untyped]

    assert "_rmdir" not in async_methods, "it wraps it by itself now: fsspec.py need not"
    assert AsyncFileSystem.rmdir is fsspec.AbstractFileSystem.rmdir


def test_a_detached_tensor_shares_its_storage_and_another_one_does_not() -> None:
    one, other = torch.empty(0), torch.empty(0)
    assert one.detach().untyped_storage()._cdata == one.untyped_storage()._cdata != other.untyped_storage()._cdata
