"""The story of a run from what its ranks reported: stages, restarts, losses, stragglers, as text and timeline."""

import json
import signal
from pathlib import Path

import anyio
import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.backends.memory import MemoryBackend
from aiockpt.events import Opened, SaveStarted, SnapshotTaken
from aiockpt.monitor import TraceFile
from aiockpt.monitor.read_run import read_run
from aiockpt.monitor.spans import BLOCKS, WHOLE, TimeSpan, spans, spans_of
from aiockpt.monitor.summary import Summary, summarize
from aiockpt.tools.cli.main import app
from tests.monitor.synthetic_run import SyntheticRun
from tests.run_python import run_python

SCRIPT = """
import os, signal, sys, time, torch, aiockpt
from aiockpt.monitor import TraceFile
state = {"x": torch.arange(100_000.0)}
with aiockpt.Checkpointer(sys.argv[1], every=2, save_last=False, observers=[TraceFile()]) as ckpt:
    for step in range(ckpt.resume(state), 10):
        ckpt.step(step, state)
        if step == int(sys.argv[2]):
            ckpt.wait()
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
"""


def summary_of(path: Path | str) -> Summary:
    told = read_run(path)
    return summarize(told, spans(told))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after step 5, and went on from step 4."""
    folder = tmp_path_factory.mktemp("run")
    for kill_after, status in (("5", -signal.SIGKILL), ("-1", 0)):
        run_python("-c", SCRIPT, folder, kill_after, status=status)
    return folder


@pytest.fixture(scope="module")
def found(run: Path) -> Summary:
    return summary_of(run)


def test_saves_are_counted_and_timed(found: Summary) -> None:
    assert (found.committed, found.failed, found.last_step, found.ranks, found.hosts) == (5, 0, 8, 1, 1)
    assert 0 < found.pauses_s[0] <= found.pauses_s[1] <= found.durable_s[1] < 100
    assert 0 < found.effective < 1


def test_a_restart_is_told_with_what_it_lost(found: Summary) -> None:
    (restart,) = found.restarts
    assert restart.resumed_from == 4
    assert restart.lost_s > 0
    assert restart.down_s > 0
    assert found.begun_s < restart.at_s < found.ended_s


def test_every_stage_of_a_save_and_a_load_has_figures(found: Summary) -> None:
    stages: dict[str, set[str]] = {"save": set(), "load": set()}
    for one in found.stages:
        stages[one.operation].add(one.stage)
        assert 0 <= one.median_s <= one.most_s
        assert one.bytes_per_s > 0 or one.stage not in ("write", "read", "snapshot", BLOCKS, WHOLE)
    of_a_save = {"walk", "plan", "begin", "snapshot", "pause", "write", "flush", "vote", "commit"}
    assert stages["save"] == {WHOLE, BLOCKS, *of_a_save}
    assert stages["load"] == {WHOLE, "find", "match", "plan", "read", "scatter"}


SLACK_S = 0.5
"""A thread that has read the clock may be held on a busy machine before it says so; the starts are seconds apart."""


def test_stages_lie_within_their_operation(run: Path) -> None:
    some = spans(read_run(run))
    for whole in (one for one in some if one.stage == WHOLE):
        parts = [
            one
            for one in some
            if (one.process, one.step, one.operation) == (whole.process, whole.step, whole.operation)
        ]
        assert len(parts) > 5
        for part in parts:
            assert part.begin_s >= whole.begin_s - SLACK_S
            assert part.begin_s + part.seconds <= whole.begin_s + whole.seconds + SLACK_S, part


def _of(one: TimeSpan) -> tuple[int, int, str]:
    return one.process, one.step, one.operation


def test_the_pause_of_a_lazy_save_begins_with_its_call(tmp_path: Path) -> None:
    states = {step: {"x": torch.full((1 << 22,), float(step))} for step in range(3)}
    with aiockpt.Checkpointer(tmp_path, snapshot="lazy", observers=[TraceFile()]) as ckpt:
        for step, state in states.items():
            ckpt.save(step, state).result()
    told = read_run(tmp_path)
    called_s = {event.step: log.wall_s(event.at_ns) - event.seconds for log, event in told.events_of(SaveStarted)}
    pauses = [span for span in spans(told) if span.stage == "pause"]
    assert [span.step for span in pauses] == list(states)
    assert all(span.begin_s == pytest.approx(called_s[span.step], abs=1e-6) for span in pauses)


@pytest.mark.parametrize(("pause_s", "copy_s"), [(2.0, 5.0), (5.0, 2.0)])
def test_where_a_trace_does_not_say_when_a_snapshot_began_the_longer_of_call_and_copy_says_it(
    pause_s: float, copy_s: float
) -> None:
    opened = Opened(at_ns=0, time_ns=0, pid=1, host="a", rank=0, world_size=1, urls=())
    taken = SnapshotTaken(at_ns=9 * 10**9, step=1, bytes=1, pause_s=pause_s, copy_s=copy_s)
    begun_s = {span.stage: span.begin_s for span in spans_of(opened, taken)}
    assert begun_s == {"snapshot": 9 - copy_s, "pause": 4.0}


def test_hashing_and_bytes_are_told_of_the_files(run: Path) -> None:
    some = spans(read_run(run))
    for stage in ("write", "read"):
        (first, *_) = [one for one in some if one.stage == stage]
        assert first.bytes > 400_000
        assert 0 < first.hash_s < 10
        assert first.key.endswith(".safetensors")


def test_the_command_prints_it_and_writes_a_timeline(run: Path, tmp_path: Path) -> None:
    chrome = tmp_path / "timeline.json"
    done = CliRunner().invoke(app, ["report", str(run), "--chrome", str(chrome)])
    assert done.exit_code == 0, done.output
    assert "5 committed, the last of step 8" in done.output
    assert "from step 4" in done.output
    for name in ("walk", "flush", "scatter"):
        assert name in done.output
    told = json.loads(chrome.read_text())["traceEvents"]
    drawn = [one for one in told if one["ph"] == "X"]
    assert len(drawn) == len(spans(read_run(run)))
    assert {one["name"] for one in drawn} >= {"save of step 8", "load of step 4", "write"}
    assert min(one["ts"] for one in drawn) == 0
    rows = {(one["pid"], one["tid"]) for one in told if one["name"] == "thread_name"}
    assert {(one["pid"], one["tid"]) for one in drawn} == rows


def test_programs_get_json(run: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(run), "--json"])
    assert json.loads(done.output)["restarts"][0]["resumed_from"] == 4


def test_a_failed_save_is_told_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    trace = TraceFile(tmp_path / "trace.jsonl")
    with (
        pytest.raises(aiockpt.BackgroundSaveError),
        aiockpt.Checkpointer(tmp_path / "file" / "run", observers=[trace]) as ckpt,
    ):
        ckpt.save(3, {"x": torch.ones(3)})
    told = read_run(tmp_path / "trace.jsonl")
    (failure,) = summary_of(tmp_path / "trace.jsonl").failures
    assert (failure.step, failure.ranks) == (3, 1)
    assert {(span.stage, span.failed) for span in spans(told)} >= {("begin", True), (WHOLE, True), ("walk", False)}
    done = CliRunner().invoke(app, ["report", str(tmp_path / "trace.jsonl"), "--text"])
    words = done.output.replace("\n", " ")
    assert words.index("No step has become durable") < words.index("Step 3 was not saved") < words.index("saves  ")
    assert "on rank 0" in words


def test_a_job_that_cannot_load_says_so_for_each_reason_once(tmp_path: Path) -> None:
    """As one that is begun anew again and again does."""
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, {"x": torch.zeros(10)}).result()
    for _ in range(3):
        with (
            aiockpt.Checkpointer(tmp_path, observers=[TraceFile()]) as ckpt,
            pytest.raises(aiockpt.StateMismatchError),
        ):
            ckpt.resume({"x": torch.zeros(11)})
    printed = CliRunner().invoke(app, ["report", "--text", str(tmp_path)]).output.splitlines()
    (told,) = (line for line in printed if line.startswith("bad"))
    why = "StateMismatchError: step-00000001 does not fit the state: x: shape (11,) in the state, (10,) in the checkpoint …"
    assert f"The load of the newest step failed, 3 times: {why}" in told
    assert "Nothing was loaded or saved since." in told
    with aiockpt.Checkpointer(tmp_path, observers=[TraceFile()]) as ckpt:
        ckpt.resume({"x": torch.zeros(10)})
    printed = CliRunner().invoke(app, ["report", "--text", str(tmp_path)]).output.splitlines()
    assert not [line for line in printed if line.startswith("bad")]
    assert [line for line in printed if line.startswith("warning") and "A later one did not." in line]


def test_half_a_line_and_unknown_events_are_counted(run: Path, tmp_path: Path) -> None:
    data = (run / "monitor" / "rank-00000.jsonl").read_bytes()
    (tmp_path / "t.jsonl").write_bytes(data + b'{"type":"OfTomorrow","at_ns":1}\n{"type":"Comm')
    assert read_run(tmp_path).unread == 2
    assert summary_of(tmp_path) == summary_of(run)


def test_without_a_trace_it_says_how_to_have_one(tmp_path: Path) -> None:
    with pytest.raises(aiockpt.UsageError, match=r"nowhere: there is no such file or folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(aiockpt.UsageError, match="TraceFile"):
        read_run(tmp_path)


# ---------------------------------------------------------------------- damage


def spoilt(folder: Path, name: str, data: bytes) -> Path:
    """Write a run of four ranks, one of whose traces is *data*."""
    SyntheticRun(saves=4, mesh={"dp": 4}).write(folder)
    (folder / name).write_bytes(data)
    return folder


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"type":"Committed","at_ns":-1,"step":1,"bytes":1,"seconds":1.0,"generation":1}',
        b'{"type":"Committed","at_ns":1,"step":1,"bytes":1,"seconds":1e300,"generation":1}',
        b'{"type":"Committed","at_ns":1,"step":1,"bytes":1,"seconds":-1.0,"generation":1}',
        b'{"type":"Opened","at_ns":1,"time_ns":9000000000000000000,"pid":1,"host":"h","rank":0,"world_size":1,"urls":[]}',
        b'{"type":"Opened","at_ns":1,"time_ns":1,"pid":1,"host":"h","rank":4,"world_size":4,"urls":[]}',
        b'{"type":"Opened","at_ns":1,"time_ns":1,"pid":1,"host":"h","rank":0,"world_size":9000000000,"urls":[]}',
    ],
)
def test_a_line_that_no_process_can_have_told_is_counted_and_changes_nothing(tmp_path: Path, line: bytes) -> None:
    whole = SyntheticRun(saves=4, mesh={"dp": 4})
    whole.write(tmp_path / "whole")
    trace = (tmp_path / "whole" / "rank-00002.jsonl").read_bytes()
    run = spoilt(tmp_path / "run", "rank-00002.jsonl", trace + line + b"\n")
    assert read_run(run).unread == 1
    assert summary_of(run) == summary_of(tmp_path / "whole")
    done = CliRunner().invoke(app, ["report", str(run), "--text"])
    assert done.exit_code == 0, done.output
    assert "1 line of the traces could not be read" in done.output


def test_text_and_json_say_what_is_wrong_as_the_page_does(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, observers=[TraceFile()], screen="finite") as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"x": torch.full((3,), float("nan"))}).result()
    shown, told = (CliRunner().invoke(app, ["report", str(tmp_path), asked]).output for asked in ("--text", "--json"))
    assert "were saved in x, in every step since step 1" in shown.replace("\n", " ")
    worst, *_ = json.loads(told)["problems"]
    assert (worst["level"], worst["step"]) == ("bad", 1)
    assert json.loads(told)["committed"] == 2


def test_of_a_run_that_saved_nothing_no_times_are_shown(tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path, observers=[TraceFile()]):
        pass
    shown = CliRunner().invoke(app, ["report", str(tmp_path), "--text"]).output
    assert "No save was made" in shown
    assert not {"pause", "durable", "median"} & set(shown.split())
    assert " 0 µs" not in shown


def test_lines_before_the_one_that_says_whose_they_are_are_counted(tmp_path: Path) -> None:
    SyntheticRun(saves=4, mesh={"dp": 4}).write(tmp_path)
    trace = tmp_path / "rank-00002.jsonl"
    _, _, rest = trace.read_bytes().partition(b"\n")
    trace.write_bytes(rest)
    told = read_run(tmp_path)
    assert told.unread == rest.count(b"\n")
    assert [one.opened.rank for one in told.processes] == [0, 1, 3]
    done = CliRunner().invoke(app, ["report", str(tmp_path), "--out", str(tmp_path / "page.html")])
    assert "There is no trace of rank 2" in done.output


def test_a_trace_that_cannot_be_read_is_named_beside_what_the_others_tell(tmp_path: Path) -> None:
    run = spoilt(tmp_path, "rank-00002.jsonl", b"")
    (run / "rank-00002.jsonl").unlink()
    (run / "rank-00002.jsonl").mkdir()  # permissions are nothing to the superuser
    assert [one.name for one in read_run(run).missing] == ["rank-00002.jsonl"]
    for asked in (["--text"], ["--out", str(tmp_path / "page.html")]):
        done = CliRunner().invoke(app, ["report", str(run), *asked])
        assert done.exit_code == 0, done.output
        assert "1 trace could not be read: rank-00002.jsonl. What these ranks told is missing here" in done.output
        assert "Is a directory" in done.output


@pytest.mark.parametrize("data", [b"", b"\x00\x01\n\n", b'{"type":"Comm'])
def test_where_nothing_can_be_read_the_command_says_so_and_why(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "trace.jsonl").write_bytes(data)
    done = run_python("-m", "aiockpt.tools.cli.main", "report", tmp_path, status=2)
    assert "nothing can be read from 1 trace here: no line says" in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


# ---------------------------------------------------------------------- addresses


def test_the_run_may_be_given_as_a_file_url(tmp_path: Path) -> None:
    run = tmp_path / "a run"
    SyntheticRun(saves=4, mesh={"dp": 4}).write(run / "monitor")
    for where in (f"file://{tmp_path}/a%20run", (run / "monitor" / "rank-00001.jsonl").as_uri()):
        assert summary_of(where).committed == 4
    done = CliRunner().invoke(app, ["report", run.as_uri(), "--text"])
    assert done.exit_code == 0, done.output


def test_traces_that_were_brought_to_another_storage_are_read_there(tmp_path: Path) -> None:
    SyntheticRun(saves=4, mesh={"dp": 4}).write(tmp_path)

    files = {file.name: file.read_bytes() for file in tmp_path.iterdir()} | {"rank-00004.jsonl": b""}

    async def bring() -> None:
        for name, data in files.items():
            await MemoryBackend("traced-run").put(f"monitor/{name}", data)
            await MemoryBackend("traces").put(name, data)

    anyio.run(bring)
    for where in ("memory://traced-run", "memory://traces"):
        assert summary_of(where) == summary_of(tmp_path)
    assert [one.opened.rank for one in read_run("memory://traces/rank-00003.jsonl").processes] == [3]
    with pytest.raises(aiockpt.UsageError, match="no trace of a run here"):
        read_run("memory://elsewhere")
