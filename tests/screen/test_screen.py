"""``screen="finite"``: NaN and inf are found in what is written, told, and retention keeps the newest step without."""

import logging
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.errors import ManifestError
from aiockpt.events import NotFiniteFound
from aiockpt.format.dtypes import from_torch_name
from aiockpt.format.finite import may_be_not_finite
from aiockpt.format.manifest import Manifest, decode_manifest
from aiockpt.format.validate import check_manifest
from aiockpt.monitor import TraceFile
from aiockpt.monitor.findings import find_problems
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.save_points import save_points
from aiockpt.monitor.spans import spans
from aiockpt.monitor.summary import summarize
from aiockpt.tools.cli.main import app
from tests.ranks.crew import Crew
from tests.watch import Watch

NAN, INF = float("nan"), float("inf")
SMALL = aiockpt.IO(slab_bytes=8192, block_bytes=4096, read_bytes=8192, file_bytes=40_000)
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.bool,
    torch.uint8,
]


def manifest_of(root: Path, step: int, generation: int = 1) -> Manifest:
    return decode_manifest((root / f"step-{step:08d}" / f"MANIFEST-{generation}.json").read_bytes())


def found(manifest: Manifest) -> dict[str, int]:
    """Return what all files of a manifest say was found."""
    total: dict[str, int] = {}
    for file in manifest.files:
        assert file.not_finite is not msgspec.UNSET
        for name, count in file.not_finite.items():
            total[name] = total.get(name, 0) + count
    return total


def save(root: Any, step: int, state: dict[str, Any], **options: Any) -> None:
    with aiockpt.Checkpointer(root, limits=aiockpt.Limits(io=SMALL), screen="finite", **options) as ckpt:
        ckpt.save(step, state).result()


@pytest.mark.parametrize("seed", range(30))
def test_all_of_them_are_counted_wherever_they_lie(tmp_path: Path, seed: int) -> None:
    """Tensors of all types and sizes, so that files, slabs and blocks begin and end anywhere in them."""
    dice = torch.Generator().manual_seed(seed)

    def draw(most: int) -> int:
        return int(torch.randint(most, (), generator=dice))

    state: dict[str, torch.Tensor] = {}
    for number in range(8):
        dtype = DTYPES[draw(len(DTYPES))]
        values = torch.randn(1 + draw(9000), generator=dice, dtype=torch.float64).clamp(-5, 5)
        for _ in range(draw(4)):
            values[draw(len(values))] = (NAN, INF, -INF)[draw(3)]
        if not dtype.is_floating_point and not dtype.is_complex:
            values = values.nan_to_num(0, 1, 1)
        state[f"t{number}"] = values.to(dtype)
    save(tmp_path, 1, state)
    manifest = manifest_of(tmp_path, 1)
    wanted = {}
    for name, tensor in state.items():
        if may_be_not_finite(from_torch_name(str(tensor.dtype), tensor.dtype.itemsize)):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            wanted[name] = int((~torch.isfinite(real.to(torch.float64))).sum())
    assert found(manifest) == {name: count for name, count in wanted.items() if count}
    assert manifest.finite is not any(wanted.values())


def test_nobody_looks_who_was_not_asked_to(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"w": torch.tensor([NAN])}).result()
        assert [step.finite for step in ckpt.steps().result()] == [None]
    assert manifest_of(tmp_path, 1).finite is msgspec.UNSET
    with pytest.raises(aiockpt.UsageError, match=r"screen='nan'.*'finite'"):
        aiockpt.Checkpointer(tmp_path, screen="nan")  # type: ignore[arg-type]


def test_a_description_says_how_many_are_in_which_tensor(tmp_path: Path) -> None:
    save(tmp_path, 1, {"w": torch.tensor([NAN, 1, INF]), "long": torch.full((30_000,), NAN), "well": torch.ones(3)})
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        assert ckpt.describe(1).result().not_finite == {"w": 2, "long": 30_000}
    shown = CliRunner().invoke(app, ["inspect", str(tmp_path)], terminal_width=200).output
    assert "NaN or infinite  numbers in" in shown
    assert "w (2)" in shown
    assert "long (30,000)" in shown


def good(step: int) -> dict[str, Any]:
    return {"w": torch.full((3,), float(step))}


BAD = {"w": torch.tensor([1.0, NAN, INF])}


def steps(root: Any) -> list[tuple[int, bool | None]]:
    with aiockpt.Checkpointer(root) as ckpt:
        return [(one.step, one.finite) for one in ckpt.steps().result()]


def test_the_newest_finite_step_outlives_any_number_that_are_not(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, screen="finite", retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(3):
            ckpt.save(step, good(step)).result()
        for step in range(3, 12):
            ckpt.save(step, BAD).result()
        ckpt.wait()
    assert steps(tmp_path) == [(11, False), (2, True), (1, True)]


def test_they_are_not_the_best_and_multiples_stay(tmp_path: Path) -> None:
    rules = aiockpt.Retention(last=1, every=10, best=aiockpt.Best("loss"))
    with aiockpt.Checkpointer(tmp_path, screen="finite", retention=rules) as ckpt:
        for step, state, loss in ((1, good(1), 0.5), (2, good(2), 0.7), (10, BAD, 0.1), (11, BAD, 0.0), (12, BAD, 0.2)):
            ckpt.save(step, state, metrics={"loss": loss}).result()
        ckpt.wait()
        pruned = ckpt.prune(rules, dry_run=True).result()
    assert steps(tmp_path) == [(12, False), (10, False), (2, True), (1, True)]
    assert {step.step: step.reason for step in pruned.kept} == {
        12: "the newest, though it has numbers that are NaN or infinite",
        10: "a multiple of 10",
        2: "the newest finite",
        1: "among the best 1 by loss",
    }


def test_where_none_is_finite_the_rules_count_as_ever(tmp_path: Path) -> None:
    """A mask that is a buffer, with −inf in it."""
    with aiockpt.Checkpointer(tmp_path, screen="finite", retention=aiockpt.Retention(last=3)) as ckpt:
        for step in range(6):
            ckpt.save(step, {"mask": torch.tensor([0.0, -INF])}).result()
        ckpt.wait()
    assert steps(tmp_path) == [(5, False), (4, False), (3, False)]


def trained(bad: bool) -> dict[str, Any]:
    model = torch.nn.Linear(50, 20)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 50)).sum().backward()
    optimizer.step()
    if bad:
        optimizer.state[model.weight]["exp_avg"][3, 4] = INF
    return {"model": model, "optimizer": optimizer}


def test_the_newest_finite_step_stays_in_full(tmp_path: Path) -> None:
    rules = aiockpt.Retention(last=3, optimizer=1)
    with aiockpt.Checkpointer(tmp_path, screen="finite", retention=rules) as ckpt:
        for step, bad in enumerate((False, False, True, True)):
            ckpt.save(step, trained(bad)).result()
        ckpt.wait()
        told = {one.step: (one.finite, one.weights_only) for one in ckpt.steps().result()}
    assert told == {3: (False, False), 1: (True, False), 0: (True, True)}


def test_weights_are_judged_by_what_they_are(tmp_path: Path) -> None:
    """The optimizer's state has an infinite number; a tier of weights has none."""
    state = trained(bad=True)
    near, far = tmp_path / "near", tmp_path / "far"
    places = [aiockpt.Tier(near), aiockpt.Tier(far, content="weights")]
    with aiockpt.Checkpointer(places, screen="finite", limits=aiockpt.Limits(io=SMALL)) as ckpt:
        ckpt.save(1, state).result()
        ckpt.save(2, state).result()
    assert steps(near) == [(2, False), (1, False)]
    assert steps(far) == [(2, True), (1, True)]
    with torch.no_grad():
        state["model"].weight[0, 0] = NAN
    save(places, 3, state)
    assert found(manifest_of(far, 3)) == {"model.weight": 1}


def test_what_is_thinned_is_judged_by_what_is_left(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, screen="finite", retention=aiockpt.Retention(last=2, optimizer=1)) as ckpt:
        for step in (1, 2):
            ckpt.save(step, trained(bad=True)).result()  # none is finite, so the rules count as ever
        ckpt.wait()
        told = [(one.step, one.weights_only, one.finite) for one in ckpt.steps().result()]
    assert told == [(2, False, False), (1, True, True)]


def test_a_copy_says_the_same(tmp_path: Path) -> None:
    save(tmp_path / "here", 1, BAD)
    with aiockpt.Checkpointer(tmp_path / "here") as ckpt:
        ckpt.copy(1, tmp_path / "there").result()
    assert steps(tmp_path / "there") == [(1, False)]
    assert found(manifest_of(tmp_path / "there", 1)) == {"w": 2}


def test_it_is_told_and_logged_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    watch = Watch()
    with aiockpt.Checkpointer(tmp_path, screen="finite", observers=[watch]) as ckpt:
        for step, state in enumerate((good(0), BAD, BAD, good(3))):
            ckpt.save(step, state).result()
    assert [(one.step, one.tensors) for one in watch.of(NotFiniteFound)] == [(1, {"w": 2}), (2, {"w": 2})]
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert told == [
        "step 1 is saved with numbers that are NaN or infinite: w (2)",
        "step 3 is saved, and all numbers are finite again",
    ]


def test_who_loads_one_is_warned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 7, BAD)
    caplog.clear()
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.load({"w": torch.zeros(3)}).result()
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "step 7 is loaded, and has numbers that are NaN or infinite in w" in told
    assert "aiockpt ls" in told


def test_a_writer_process_looks_as_well(tmp_path: Path) -> None:
    watch = Watch()
    with aiockpt.Checkpointer(tmp_path, screen="finite", worker="process", observers=[watch]) as ckpt:
        ckpt.save(1, BAD).result()
    assert found(manifest_of(tmp_path, 1)) == {"w": 2}
    assert [one.tensors for one in watch.of(NotFiniteFound)] == [{"w": 2}]


def test_each_rank_looks_at_what_it_writes(tmp_path: Path) -> None:
    watches = [Watch(), Watch()]
    with Crew(2, tmp_path, screen="finite") as crew:
        for rank, watch in enumerate(watches):
            crew.checkpointers[rank]._engine._observers.append(watch)

        def save_own(rank: int, ckpt: aiockpt.Checkpointer) -> None:
            own = aiockpt.per_rank(torch.tensor([1.0, NAN] if rank else [1.0, 2.0]))
            ckpt.save(1, {"own": own, "w": torch.ones(3)}).result()

        crew.on_all(save_own)
    manifest = manifest_of(tmp_path, 1)
    assert manifest.finite is False
    (name,) = found(manifest)
    assert "own" in name
    assert [len(watch.of(NotFiniteFound)) for watch in watches] == [0, 1]


def test_a_report_says_since_when(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with aiockpt.Checkpointer(run, screen="finite", observers=[TraceFile()]) as ckpt:
        for step in range(6):
            ckpt.save(step, BAD if step in (1, 4, 5) else good(step)).result()
    log = read_run(str(run))
    summary = summarize(log, spans(log))
    (told,) = [one for one in find_problems(log, summary, save_points(log), summary.ended_s) if "NaN" in one.what]
    assert (told.level, told.step) == ("bad", 4)
    assert told.what == "Numbers that are NaN or infinite were saved in w, in every step since step 4."
    assert told.advice == "Step 3 is the newest before that has none."


def test_a_manifest_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, BAD)
    manifest = manifest_of(tmp_path, 1)
    check_manifest(manifest, manifest.id, 1)
    lies = msgspec.structs.replace(manifest, finite=True)
    with pytest.raises(ManifestError, match="its files say otherwise"):
        check_manifest(lies, manifest.id, 1)
    (file,) = manifest.files
    unknown = msgspec.structs.replace(manifest, files=(msgspec.structs.replace(file, not_finite={"v": 1}),))
    with pytest.raises(ManifestError, match="'v', which it does not have"):
        check_manifest(unknown, manifest.id, 1)
