"""Everything on real CUDA devices. Skipped, with the reason, where there are none."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiockpt
from aiockpt.engine.job import SaveGuard
from aiockpt.events import SnapshotTaken
from aiockpt.options import MIB, Snapshot
from aiockpt.pipeline.snapshot import CopyProgram
from aiockpt.runtime.cuda import Cuda
from aiockpt.runtime.slabs import SlabPool
from tests.pipeline.device_states import SLAB_BYTES, Writer, planned, read_back
from tests.watch import Watch

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
BUSY_CYCLES = 200_000_000
"""About 0.1 s of nothing, on the stream that is current."""
SMALL = aiockpt.IO(slab_bytes=MIB, block_bytes=MIB, read_bytes=MIB)


def keep_busy(cycles: int = BUSY_CYCLES) -> None:
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def net(device: str = "cuda:0") -> nn.Module:
    return nn.Sequential(nn.Linear(256, 2048), nn.BatchNorm1d(2048), nn.Linear(2048, 256)).to(device)


def on_host(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: held.cpu().clone() for name, held in module.state_dict().items()}


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name].cpu(), other[name].cpu())]


def loaded(place: Path, step: int) -> dict[str, torch.Tensor]:
    model = net("cpu")
    with aiockpt.Checkpointer(place) as ckpt:
        ckpt.load({"model": model}, step).result()
    return dict(model.state_dict())


def test_memory_of_ours_is_pinned_and_unpinned() -> None:
    lane = Cuda().stream(torch.device("cuda:0"))
    pool = SlabPool(MIB, 2 * MIB)
    pool.pin_with(lane)
    slab = pool.acquire(1)
    assert torch.frombuffer(slab.memory, dtype=torch.uint8).is_pinned()
    pool.release(slab)
    pool.close()
    assert not torch.frombuffer(slab.memory, dtype=torch.uint8).is_pinned()


def test_a_refused_registration_does_not_fail_the_next_kernel() -> None:
    lane = Cuda().stream(torch.device("cuda:0"))
    pool = SlabPool(MIB, MIB)
    pool.pin_with(lane)
    slab = pool.acquire(1)
    with pytest.raises(RuntimeError, match="cudaHostRegister"):
        lane.pin(slab.address, MIB)
    assert torch.ones(3, device="cuda:0").add_(1).sum().item() == 6
    pool.release(slab)
    pool.close()


def test_copies_into_pinned_slabs_return_before_they_are_done() -> None:
    cuda, device = Cuda(), torch.device("cuda:0")
    lane = cuda.stream(device)
    pool = SlabPool(64 * MIB, 64 * MIB)
    pool.pin_with(lane)
    slab = pool.acquire(1)
    source = torch.ones(64 * MIB, dtype=torch.uint8, device=device)
    torch.cuda.synchronize()
    keep_busy()
    lane.follow(cuda.now(device))
    host = torch.frombuffer(slab.memory, dtype=torch.uint8)
    mark = lane.enqueue(lambda: host.copy_(source, non_blocking=True))
    assert not mark.done()
    assert mark.wait(250)
    assert bool(host.eq(1).all())
    pool.release(slab)
    pool.close()


@pytest.mark.parametrize("pool_slabs", [1, 3, 400])
def test_a_snapshot_of_many_kinds_of_tensors_is_exact(pool_slabs: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(96, 130, device="cuda:0")
    state = {f"small{number}": torch.randn(number + 1, device="cuda:0") for number in range(300)}
    state |= {"turned": whole.t(), "striped": whole[:, ::3], "half": whole.bfloat16(), "host": torch.randn(5000)}
    state |= {
        "flags": whole > 0,
        "float8": whole.to(torch.float8_e4m3fn),
        "complex": torch.view_as_complex(whole.view(96, 65, 2)),
    }
    cuda, device = Cuda(), torch.device("cuda:0")
    walked, plan = planned(state)
    pool = SlabPool(SLAB_BYTES, pool_slabs * SLAB_BYTES)
    pool.pin_with(cuda.stream(device))
    program = CopyProgram(plan, walked.tensors, cuda)
    for _ in range(3):
        whole.mul_(2)
        expected = {name: tensor.cpu().contiguous() for name, tensor in state.items()}
        writer = Writer(plan, pool)
        program.run(
            pool, writer, wanted=lambda: True, timeout_s=30, after=[(device, cuda.now(device))], guard=SaveGuard()
        )
        found = read_back(walked, plan, writer.files)
        for name, tensor in expected.items():
            assert found[name].flatten().tolist() == tensor.flatten().tolist(), name
    pool.close()


@pytest.mark.parametrize("snapshot", ["eager", "lazy", "device"])
def test_every_save_is_the_state_at_its_call_with_a_busy_device(snapshot: Snapshot, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, watch = net(), Watch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    expected = {}
    with aiockpt.Checkpointer(tmp_path, snapshot=snapshot, limits=aiockpt.Limits(io=SMALL), observers=[watch]) as ckpt:
        for step in range(6):
            model(torch.randn(32, 256, device="cuda:0")).square().mean().backward()
            keep_busy()  # the step below is carried out long after the call
            optimizer.step()
            aside = {name: held.clone() for name, held in model.state_dict().items()}
            save = ckpt.save(step, {"model": model, "optimizer": optimizer})
            expected[step] = aside
            if snapshot == "device":
                save.written().result()
    for step, aside in expected.items():
        assert differing(loaded(tmp_path, step), aside) == []
    assert {taken.snapshot for taken in watch.of(SnapshotTaken)} == {snapshot}


def test_a_lazy_save_does_not_wait_for_the_device(tmp_path: Path) -> None:
    model = net()
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(0, {"model": model}).result()
        torch.cuda.synchronize()
        keep_busy(10 * BUSY_CYCLES)
        save = ckpt.save(1, {"model": model})
        assert not torch.cuda.current_stream().query()
        assert not save.snapshotted().done()
        save.result()
    assert differing(loaded(tmp_path, 1), dict(model.state_dict())) == []


def test_the_program_may_compute_in_a_stream_of_its_own(tmp_path: Path) -> None:
    model, stream = net(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    aside: dict[str, torch.Tensor] = {}
    with (
        aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt,
        torch.cuda.stream(stream),
    ):
        for step in range(4):
            model(torch.randn(32, 256, device="cuda:0")).square().mean().backward()
            keep_busy()
            optimizer.step()
            aside = {name: held.clone() for name, held in model.state_dict().items()}
            ckpt.save(step, {"model": model})
    assert differing(loaded(tmp_path, 3), aside) == []


def test_a_copy_on_the_device_is_freed(tmp_path: Path) -> None:
    big = torch.ones(64 * MIB, device="cuda:0")
    before = torch.cuda.memory_allocated()
    with aiockpt.Checkpointer(tmp_path, snapshot="device", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        for step in range(3):
            save = ckpt.save(step, {"big": big})
            assert torch.cuda.memory_allocated() > before + big.nbytes // 2
            save.result()
            assert torch.cuda.memory_allocated() < before + big.nbytes // 2


def test_a_save_on_another_thread_is_the_same(tmp_path: Path) -> None:
    model = net()
    with aiockpt.Checkpointer(tmp_path, limits=aiockpt.Limits(io=SMALL)) as ckpt:
        thread = threading.Thread(target=lambda: ckpt.save(1, {"model": model}).result())
        thread.start()
        thread.join()
    assert differing(loaded(tmp_path, 1), on_host(model)) == []


@two_devices
def test_a_state_on_two_devices_is_saved(tmp_path: Path) -> None:
    first, second = net("cuda:0"), net("cuda:1")
    state: dict[str, Any] = {"first": first, "second": second}
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(1, state).result()
    models = {"first": net("cpu"), "second": net("cpu")}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load(models, 1).result()
    assert differing(dict(models["first"].state_dict()), on_host(first)) == []
    assert differing(dict(models["second"].state_dict()), on_host(second)) == []


@two_devices
def test_saving_from_the_second_device_makes_no_context_on_the_first(tmp_path: Path) -> None:
    program = f"""
import torch, aiockpt
torch.cuda.set_device(1)
model = torch.nn.Linear(512, 512, device="cuda:1")
for snapshot in ("eager", "lazy", "device"):
    with aiockpt.Checkpointer({str(tmp_path)!r}, snapshot=snapshot) as ckpt:
        ckpt.warm_up({{"model": model}}).result()
        ckpt.save(1, {{"model": model}}).result()
assert torch._C._cuda_hasPrimaryContext(1)
assert not torch._C._cuda_hasPrimaryContext(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_benchmark_runs_here(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        "run",
        "device",
        "--size",
        "64MiB",
        "--repetitions",
        "1",
        "--work",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
