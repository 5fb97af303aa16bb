"""The checks of what is odd but legal: strange dtypes, meshes, ties and holes, there and back through the whole engine."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import aiockpt
from aiockpt.adapters.native import StateWalker
from tests.ranks.adapters_checks import Even, Net, fsdp2, train
from tests.ranks.adapters_worker import check
from tests.ranks.engine_checks import DEADLINES, shared_folder

State = dict[str, Any]
DTYPES = (torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.bool, torch.int8, torch.float64, torch.uint16)


def local_bytes(state: State) -> dict[Any, bytes]:
    """Return the bytes that this rank holds of every tensor, by name and place."""
    return {
        (shard.name, shard.boxes): shard.data.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for shard in StateWalker(rank=dist.get_rank()).walk(state).tensors
    }


def there_and_back(make: Callable[[int], State]) -> State:
    """Save one state and load it into another; return the second, whose bytes are those of the first."""
    return from_to(make, make)


def from_to(source: Callable[[int], State], target: Callable[[int], State]) -> State:
    """Save a state of one kind and load it into one of another kind; where they are of one kind, compare all bytes."""
    root = shared_folder()
    one, other = source(1), target(2)
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(deadlines=DEADLINES)) as ckpt:
        ckpt.save(1, one).result()
        ckpt.load(other).result()
    if source is target:
        found, expected = local_bytes(other), local_bytes(one)
        assert found.keys() == expected.keys()
        assert [key[0] for key in expected if found[key] != expected[key]] == []
    return other


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return random elements of any dtype; every rank makes the same."""
    size = torch.empty(shape, dtype=dtype).nbytes
    limit = 2 if dtype is torch.bool else 120
    raw = torch.randint(0, limit, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return raw.view(dtype).view(shape)


def spread(full: torch.Tensor, mesh: DeviceMesh, placements: list[Any]) -> DTensor:
    """Return a DTensor of a full tensor that all ranks have, also for dtypes that no collective sends."""
    as_bytes = full.view(torch.uint8).view(*full.shape, full.element_size())
    local: Any = distribute_tensor(as_bytes, mesh, placements, src_data_rank=None).to_local()
    part = local.contiguous().view(-1).view(full.dtype).view(local.shape[:-1] if local.numel() else 0)
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


@check(4)
def every_dtype_and_mesh_comes_back_bit_by_bit() -> None:
    meshes = [DeviceMesh("cpu", [[3, 1], [2, 0]]), init_device_mesh("cpu", (4,)), DeviceMesh("cpu", [2, 0])]
    places: list[list[Any]] = [[Shard(1), Shard(0)], [Shard(0)], [Shard(0)]]

    def make(seed: int) -> State:
        return {
            f"{place}-{str(dtype)[6:]}": spread(values((5, 3), dtype, seed), mesh, placements)
            for dtype in DTYPES
            for place, (mesh, placements) in enumerate(zip(meshes, places, strict=True))
        }

    there_and_back(make)


@check(4)
def a_mesh_of_another_order_and_part_of_the_ranks_loads_into_all_in_order() -> None:
    full, zero = values((7, 3), torch.float32, 1), torch.zeros(7, 3)
    strange = DeviceMesh("cpu", [3, 0, 1])

    def source(_: int) -> State:
        return {"x": spread(full, strange, [Shard(0)])}

    def target(_: int) -> State:
        return {"x": distribute_tensor(zero.clone(), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)])}

    assert torch.equal(from_to(source, target)["x"].full_tensor(), full)

    def back(_: int) -> State:
        return {"x": distribute_tensor(full.clone(), init_device_mesh("cpu", (2, 2)), [Shard(1), Shard(0)])}

    def subset(_: int) -> State:
        return {"x": spread(zero.clone(), strange, [Shard(0)])}

    found = from_to(back, subset)["x"].to_local()
    place = strange.get_coordinate()
    assert torch.equal(found, full.chunk(3)[place[0]]) if place else found.numel() == 0


@check(4)
def dtensors_without_axes_without_elements_and_with_turned_strides_come_back() -> None:
    mesh = init_device_mesh("cpu", (2, 2))

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        turned = distribute_tensor(torch.randn(6, 8), mesh, [Shard(0), Shard(1)]).t()
        return {
            "scalar": distribute_tensor(torch.randn(()), mesh, [Replicate(), Replicate()]),
            "empty": distribute_tensor(torch.randn(0, 4), mesh, [Shard(0), Replicate()]),
            "one": distribute_tensor(torch.randn(1), mesh, [Shard(0), Shard(0)]),
            "turned": turned,
        }

    there_and_back(make)


@check(4)
def tied_weights_of_a_tensor_parallel_module_stay_tied() -> None:
    mesh = init_device_mesh("cpu", (4,))

    def make(seed: int) -> State:
        torch.manual_seed(seed)
        model = nn.ModuleDict({"embed": nn.Linear(6, 10, bias=False), "head": nn.Linear(6, 10, bias=False)})
        parallelize_module(model, mesh, {"embed": ColwiseParallel()})
        model["head"].weight = model["embed"].weight
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for parameter in model.parameters():
            parameter.grad = parameter.detach() * 2
        optimizer.step()
        return {"model": model, "optimizer": optimizer}

    model = there_and_back(make)["model"]
    assert model["head"].weight is model["embed"].weight


@check(4)
def buffers_and_state_that_only_some_ranks_have_come_back_there() -> None:
    def make(seed: int) -> State:
        torch.manual_seed(seed)
        model = Even()
        if dist.get_rank() % 2:
            model.register_buffer(f"seen{dist.get_rank()}", torch.randn(3))
        optimizer = torch.optim.Adam(model.parameters())
        if seed == 1:
            model.up.weight.grad = torch.ones_like(model.up.weight)
            optimizer.step()
        return {"model": model, "optimizer": optimizer}

    other = there_and_back(make)
    assert [tuple(parameter.shape) for parameter in other["optimizer"].state] == [(8, 6)]


@check(2)
def compiled_modules_have_the_names_of_the_bare_ones_wherever_they_are_wrapped() -> None:
    def compiled(net: nn.Module) -> nn.Module:
        found: Any = torch.compile(net, backend="eager")
        return found  # type: ignore[no-any-return]

    def in_place(net: nn.Module) -> nn.Module:
        net.compile(backend="eager")
        return fsdp2(net)

    def of_blocks(net: nn.Module) -> nn.Module:
        for name, child in net.named_children():
            setattr(net, name, compiled(child))
        return fsdp2(net)

    makes: list[Callable[[nn.Module], nn.Module]] = [
        lambda net: compiled(fsdp2(net)),
        in_place,
        of_blocks,
        lambda net: compiled(DistributedDataParallel(net)),
        lambda net: DistributedDataParallel(compiled(net)),
        lambda net: net,
    ]

    def job_of(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[int], State]:
        def make(seed: int) -> State:
            torch.manual_seed(seed)
            model = wrap(Net())
            optimizer = torch.optim.AdamW(model.parameters(), fused=True)
            train(model, optimizer)
            return {"model": model, "optimizer": optimizer}

        return make

    jobs = list(map(job_of, makes))
    for source, target in zip(jobs, [*jobs[1:], jobs[0]], strict=True):
        there_and_back(source)
        from_to(source, target)


@check(4)
def optimizers_of_every_kind_come_back_under_fsdp2() -> None:
    kinds: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
        lambda parameters: torch.optim.Adam(parameters, lr=0.1, amsgrad=True),
        lambda parameters: torch.optim.Adagrad(parameters, lr=0.1),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, centered=True, momentum=0.5),
        lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
        lambda parameters: torch.optim.SGD(
            [
                {"params": list(parameters)[:3], "lr": torch.tensor(0.1)},
                {"params": [], "lr": 0.2},
            ],
            lr=0.3,
        ),
    ]
    for kind in kinds:

        def make(seed: int, kind: Any = kind) -> State:
            torch.manual_seed(seed)
            model = Net()
            for block in model.children():
                fully_shard(block)
            fully_shard(model)
            optimizer = kind([parameter for parameter in model.parameters() if parameter.requires_grad])
            if seed == 1:
                train(model, optimizer)
            return {"model": model, "optimizer": optimizer}

        there_and_back(make)
