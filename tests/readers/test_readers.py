"""Steps for readers: handed once to each, and kept while read, whatever is killed, deleted or saved meanwhile."""

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from typer.testing import CliRunner

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.places.readers import hold as hold_module
from aiockpt.places.readers.step_watch import StepWatch, WatchedStep
from aiockpt.storage.forwarding import BackendCall
from aiockpt.testing.faults import Fault, FaultSchedule, FaultyBackend
from aiockpt.tools.cli.main import app
from tests.run_python import run_python
from tests.small_run import small_checkpointer
from tests.watch import Lines, until

STATE: dict[str, Any] = {"weight": torch.arange(100.0), "value": 1}


def save(root: Path, *steps: int, keep: int | None = None) -> None:
    rules = None if keep is None else aiockpt.Retention(last=keep)
    with small_checkpointer(root, retention=rules) as ckpt:
        for step in steps:
            ckpt.save(step, STATE).result()


def handed(root: Path, name: str = "eval", **options: Any) -> list[int]:
    with small_checkpointer(root) as ckpt:
        return [step.step for step in ckpt.watch(name, follow=False, **options)]


def leases(root: Path) -> list[Path]:
    return sorted(root.glob("step-*/lease-*"))


def prune(root: Path, keep: int = 1) -> tuple[list[int], dict[str, str]]:
    with small_checkpointer(root) as ckpt:
        pruned = ckpt.prune(aiockpt.Retention(last=keep)).result()
    return [step.step for step in pruned.steps], dict(pruned.left)


# ---------------------------------------------------------------------- hold


def test_no_retention_deletes_a_step_that_is_held_and_it_says_who_holds_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    with small_checkpointer(tmp_path) as ckpt:
        with ckpt.hold(1) as held:
            assert (held.step, held.id, held.folder) == (1, "step-00000001", tmp_path / "step-00000001")
            assert held.url == f"file://{tmp_path}"
            gone, left = prune(tmp_path)
            assert gone == [2]
            assert left == {"step-00000001": left["step-00000001"]}
            assert f"held by process {os.getpid()} on " in left["step-00000001"]
            assert [step.step for step in ckpt.prune(aiockpt.Retention(last=1)).result().steps] == []
        assert leases(tmp_path) == []
    assert prune(tmp_path)[0] == [1]


def test_the_newest_is_held_where_none_is_named_and_what_is_not_there_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    with small_checkpointer(tmp_path) as ckpt:
        with ckpt.hold() as held:
            assert held.step == 2
        with pytest.raises(aiockpt.StepNotFoundError), ckpt.hold(7):
            pass
        hold = ckpt.hold(1)
        with hold, pytest.raises(aiockpt.UsageError, match="ask for another one"), hold:
            pass
        with hold:
            assert len(leases(tmp_path)) == 1
    with small_checkpointer(tmp_path / "empty") as ckpt, pytest.raises(aiockpt.StepNotFoundError):
        ckpt.hold().__enter__()


async def test_in_an_event_loop_it_is_async_with(tmp_path: Path) -> None:
    async with small_checkpointer(tmp_path) as ckpt:
        await ckpt.save(1, STATE)
        async with ckpt.hold(1) as held:
            assert held.step == 1
            assert len(leases(tmp_path)) == 1
        assert leases(tmp_path) == []
        with pytest.raises(aiockpt.BlockingCallError, match="async with"):
            ckpt.hold(1).__enter__()


def test_closing_the_checkpointer_lets_go(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with small_checkpointer(tmp_path) as ckpt:
        hold = ckpt.hold(1)
        hold.__enter__()
    assert leases(tmp_path) == []
    hold.release()


def test_a_hold_is_renewed_before_its_lease_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hold_module, "RENEW_S", 0.01)
    save(tmp_path, 1, 2)
    with small_checkpointer(tmp_path) as ckpt, ckpt.hold(1):
        (lease,) = leases(tmp_path)
        long_ago = time.time() - 7 * 3600
        os.utime(lease, (long_ago, long_ago))
        until(lambda: lease.stat().st_mtime > long_ago + 3600, "it is as good as new")
        assert prune(tmp_path)[0] == []


def test_the_lease_of_a_holder_that_was_killed_counts_for_six_hours(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    script = (
        "import sys, time, aiockpt\n"
        "with aiockpt.Checkpointer(sys.argv[1]) as ckpt, ckpt.hold(1):\n"
        "    print('held', flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script, tmp_path], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        child.kill()
    assert prune(tmp_path)[0] == []
    (lease,) = leases(tmp_path)
    for age_s, gone in ((5.9 * 3600, []), (6.1 * 3600, [1])):
        os.utime(lease, (time.time() - age_s, time.time() - age_s))
        assert prune(tmp_path)[0] == gone


class NoLeases(LocalBackend):
    async def put(self, key: str, data: bytes, *, flushed: bool = True) -> None:
        if "/lease-" in key:
            raise aiockpt.StorageError("read-only", key=key)
        await super().put(key, data, flushed=flushed)


def test_where_no_lease_can_be_written_nothing_is_said_to_be_held(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        small_checkpointer(NoLeases(tmp_path)) as ckpt,
        pytest.raises(aiockpt.StorageError, match="read-only"),
        ckpt.hold(1),
    ):
        pass


class DeletedMeanwhile(LocalBackend):
    """A place whose step goes at the moment when its lease is written."""

    async def put(self, key: str, data: bytes, *, flushed: bool = True) -> None:
        await super().put(key, data, flushed=flushed)
        if "/lease-" in key:
            for manifest in (self.path / "step-00000001").glob("MANIFEST-*"):
                manifest.unlink()

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.path = root


def test_a_step_that_is_deleted_at_that_moment_is_not_held(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with (
        small_checkpointer(DeletedMeanwhile(tmp_path)) as ckpt,
        pytest.raises(aiockpt.StepNotFoundError, match="deleted at this moment"),
        ckpt.hold(1),
    ):
        pass


def test_a_load_that_is_cancelled_while_its_lease_is_written_leaves_none(tmp_path: Path) -> None:
    save(tmp_path, 1)
    written = threading.Event()

    class Late(LocalBackend):
        async def put(self, key: str, data: bytes, *, flushed: bool = True) -> None:
            await super().put(key, data, flushed=flushed)
            if "/lease-" in key:
                written.set()
                await anyio.sleep_forever()  # the answer never comes

    with small_checkpointer(Late(tmp_path)) as ckpt:
        load = ckpt.load(STATE)
        assert written.wait(250)
        assert load.cancel()
        until(load.done, "the end of the load")
    assert leases(tmp_path) == []


# ---------------------------------------------------------------------- watch


def test_each_reader_is_handed_each_step_once_the_oldest_first(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert handed(tmp_path) == [1, 2, 3]
    assert handed(tmp_path) == []
    assert handed(tmp_path, "upload") == [1, 2, 3]
    save(tmp_path, 4)
    assert handed(tmp_path) == [4]
    assert [step.step for step in steps_of(tmp_path)] == [4, 3, 2, 1], "its notes are no steps"


def steps_of(root: Path) -> Any:
    with small_checkpointer(root) as ckpt:
        return ckpt.steps().result()


def test_a_step_in_which_the_reader_fails_comes_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    with small_checkpointer(tmp_path) as ckpt:
        with pytest.raises(ZeroDivisionError):
            _ = [1 // (2 - step.step) for step in ckpt.watch("eval", follow=False)]
        for step in ckpt.watch("eval", follow=False):
            assert step.step == 2
            break
    assert handed(tmp_path) == [2, 3]


def test_a_reader_that_is_killed_is_handed_the_same_step_again(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    script = (
        "import os, signal, sys, aiockpt\n"
        "with aiockpt.Checkpointer(sys.argv[1]) as ckpt:\n"
        "    for step in ckpt.watch('eval'):\n"
        "        if step.step == 2:\n"
        "            os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    run_python("-c", script, tmp_path, status=-signal.SIGKILL)
    assert handed(tmp_path) == [2, 3]


def test_it_is_held_while_it_is_handed_out(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    with small_checkpointer(tmp_path) as ckpt:
        for step in ckpt.watch("eval", follow=False):
            if step.step == 1:
                gone, left = prune(tmp_path)
                assert gone == [2]
                assert "held by reader eval" in left[step.id]
                assert [path.parent for path in leases(tmp_path)] == [step.folder]
            else:
                assert step.step == 3, "what was deleted before its turn is not handed out"
    assert leases(tmp_path) == []


def test_what_is_saved_again_comes_again_and_what_is_thinned_does_not(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    with small_checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, state).result()
        assert [step.step for step in ckpt.watch("eval", follow=False)] == [1, 2]
        thinned = ckpt.prune(aiockpt.Retention(last=2, optimizer=1)).result().thinned
        assert [step.id for step in thinned] == ["step-00000001"]
        assert [step.step for step in ckpt.watch("eval", follow=False)] == []
    with small_checkpointer(tmp_path) as ckpt:
        ckpt.save(2, state).result()
        assert [step.step for step in ckpt.watch("eval", follow=False)] == [2]


class Away(FaultyBackend):
    """A place of which what begins with *away* cannot be read or listed for now."""

    away: str | None = None

    async def forward(self, call: BackendCall) -> Any:
        if self.away is not None and call.verb in ("get", "list") and call.key.startswith(self.away):
            raise aiockpt.StorageError("no answer", key=call.key)
        return await super().forward(call)


@pytest.mark.parametrize("away", ["step-00000001/MANIFEST", "step-00000001"])
def test_a_step_that_cannot_be_read_for_a_moment_does_not_come_again(tmp_path: Path, away: str) -> None:
    save(tmp_path, 1, 2)
    place = Away(LocalBackend(tmp_path))
    with small_checkpointer(place) as ckpt:
        watch = ckpt.watch("eval", follow=False)
        assert [step.step for step in watch] == [1, 2]
        for place.away in (away, None):
            assert list(watch) == []


def test_steps_of_a_tier_that_is_away_for_a_moment_do_not_come_again(tmp_path: Path) -> None:
    far = Away(LocalBackend(tmp_path / "far"))
    tiers = [aiockpt.Tier(tmp_path / "near", keep=aiockpt.Retention(last=1)), aiockpt.Tier(far)]
    with small_checkpointer(tiers) as ckpt:
        for step in (1, 2, 3):
            ckpt.save(step, STATE).committed(far).result()
        ckpt.wait()
        watch = ckpt.watch("eval", follow=False)
        assert [step.step for step in watch] == [1, 2, 3]
        for far.away in ("", None):
            assert list(watch) == []


def test_only_the_newest_is_handed_out_where_that_is_wanted(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    assert handed(tmp_path, newest=True) == [3]
    assert handed(tmp_path) == [], "the older ones are passed over for good"
    save(tmp_path, 4, 5)
    assert handed(tmp_path, newest=True) == [5]


def test_one_that_is_given_back_comes_after_the_others_and_not_at_once(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    order = []
    with small_checkpointer(tmp_path) as ckpt:
        for step in ckpt.watch("eval", every_s=0.5):
            order.append(step.step)
            if len(order) == 1:
                step.again()
            if len(order) == 3:
                break
    assert order == [1, 2, 1]
    with small_checkpointer(tmp_path) as ckpt:
        watch = ckpt.watch("other", every_s=1000, follow=False)
        for step in watch:
            step.again()
        assert list(watch) == [], "not before it is time"
    assert handed(tmp_path, "other") == [1, 2], "it was never done with"


async def test_it_waits_for_steps_to_come_in_an_event_loop(tmp_path: Path) -> None:
    seen: list[WatchedStep] = []

    async def read() -> None:
        async with small_checkpointer(tmp_path) as ckpt:
            async for step in ckpt.watch("eval", every_s=0.01):
                seen.append(step)
                if step.step == 3:
                    break

    with anyio.fail_after(250):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(read)
            async with small_checkpointer(tmp_path) as ckpt:
                for step in (1, 2, 3):
                    await ckpt.save(step, STATE)
    assert [step.step for step in seen] == [1, 2, 3]
    assert "step-00000001" in repr(seen[0])


def test_closing_the_checkpointer_elsewhere_ends_the_wait(tmp_path: Path) -> None:
    ckpt = small_checkpointer(tmp_path)
    ended: list[BaseException] = []

    def read() -> None:
        try:
            for _ in ckpt.watch("eval", every_s=0.01):
                pass
        except aiockpt.CheckpointError as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    ckpt.close()
    thread.join(250)
    assert [type(error) for error in ended] == [aiockpt.ClosedError]


def test_a_step_that_cannot_be_held_now_holds_up_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, 1, 2)
    manifest = tmp_path / "step-00000001" / "MANIFEST-1.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-20])  # its head is sound still
    with small_checkpointer(tmp_path) as ckpt:
        watch = iter(ckpt.watch("eval", follow=False))
        assert next(watch).step == 2
        with pytest.raises(aiockpt.CheckpointError, match="does not end with its digest"):
            next(watch)
    assert "step 1 is not handed to eval now" in caplog.text
    manifest.write_bytes(whole)
    assert handed(tmp_path) == [1]


def test_who_follows_waits_out_an_outage_and_notes_what_was_done_in_it(tmp_path: Path) -> None:
    save(tmp_path, 1, 2, 3)
    backend = FaultyBackend(LocalBackend(str(tmp_path)))
    down = FaultSchedule([Fault(do="fail", times=None)], FaultyBackend.ACTIONS)
    with Lines(logging.WARNING) as lines, small_checkpointer(backend) as ckpt:
        steps = iter(ckpt.watch("eval", every_s=0.01))
        assert [next(steps).step, next(steps).step] == [1, 2]
        up, backend.schedule = backend.schedule, down
        threading.Timer(1.0, setattr, (backend, "schedule", up)).start()
        assert next(steps).step == 3
        steps.close()  # type: ignore[attr-defined]
    assert len(down.fired) > 2  # the note of step 2, then looks
    assert sum(line.startswith("eval waits") for line in lines.said) == 1, lines.said
    assert handed(tmp_path) == [3]


def test_an_outage_at_first_is_told(tmp_path: Path) -> None:
    save(tmp_path, 1)
    backend = FaultyBackend(LocalBackend(str(tmp_path)), [Fault(do="fail", verb="list", times=None)])
    with small_checkpointer(backend) as ckpt, pytest.raises(aiockpt.StorageError):
        next(iter(ckpt.watch("eval")))


def test_notes_that_say_nothing_are_told_with_what_to_do(tmp_path: Path) -> None:
    save(tmp_path, 1)
    assert handed(tmp_path) == [1]
    (tmp_path / "readers" / "eval.json").write_text("{")
    with pytest.raises(aiockpt.CorruptionError, match=r"readers/eval\.json .* remove it"):
        handed(tmp_path)


def test_notes_do_not_grow_with_the_run_and_lie_in_the_durable_tier(tmp_path: Path) -> None:
    with small_checkpointer(tmp_path, retention=aiockpt.Retention(last=2)) as ckpt:
        for step in range(6):
            ckpt.save(step, STATE).result()
            ckpt.wait()
            assert [new.step for new in ckpt.watch("eval", follow=False)] == [step]
    assert (tmp_path / "readers" / "eval.json").read_text().count('","') == 1
    tiers = [aiockpt.Tier("memory://readers"), aiockpt.Tier(tmp_path / "far")]
    with small_checkpointer(tiers) as ckpt:
        ckpt.save(1, STATE).result()
        assert [step.url for step in ckpt.watch("eval", follow=False)] == ["memory://readers"]
    assert (tmp_path / "far" / "readers" / "eval.json").exists()


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "x" * 65, 7])
def test_a_name_that_cannot_be_meant_is_refused(tmp_path: Path, name: Any) -> None:
    with small_checkpointer(tmp_path) as ckpt:
        with pytest.raises(aiockpt.UsageError, match="name the reader"):
            ckpt.watch(name)
        with pytest.raises(aiockpt.UsageError, match="every_s"):
            ckpt.watch("eval", every_s=0)
        assert isinstance(ckpt.watch("eval"), StepWatch)


# ---------------------------------------------------------------------- the command


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["watch", *arguments])


def test_the_command_runs_another_for_each_step(tmp_path: Path) -> None:
    save(tmp_path / "run", 1, 2)
    told = tmp_path / "told"
    command = f'echo "$AIOCKPT_STEP $AIOCKPT_URL $AIOCKPT_FOLDER" >> {told}'
    done = run(str(tmp_path / "run"), "--once", "--exec", command)
    assert done.exit_code == 0, done.output
    assert "step 1 done" in done.output
    place = tmp_path / "run"
    assert told.read_text().splitlines() == [f"{n} file://{place} {place}/step-0000000{n}" for n in (1, 2)]
    assert run(str(place), "--once", "--exec", "false").exit_code == 0, "there is nothing new"


def test_a_folder_that_is_not_there_is_waited_for_unless_it_is_looked_at_once(tmp_path: Path) -> None:
    once = run(str(tmp_path / "run"), "--once", "--exec", "true")
    assert isinstance(once.exception, aiockpt.UsageError)
    assert "no such folder" in str(once.exception)
    command = [
        sys.executable,
        "-m",
        "aiockpt.tools.cli.main",
        "watch",
        str(tmp_path / "run"),
        "--exec",
        "kill $PPID",
        "--every",
        "0.1",
    ]
    environment = os.environ | {"COLUMNS": "300"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as following:
        assert following.stdout is not None
        told = following.stdout.readline()
        made = (tmp_path / "run").exists()
        save(tmp_path / "run", 1)
        assert following.wait(250) == 128 + signal.SIGTERM
    assert "waiting for the first step" in told
    assert not made


def test_a_command_that_fails_is_run_again_with_that_step(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    done = run(str(tmp_path), "--once", "--name", "upload", "--exec", 'test "$AIOCKPT_STEP" = 2')
    assert done.exit_code == 1
    assert "step 1: the command ended with 1" in done.output
    assert handed(tmp_path, "upload") == [1]


def test_a_step_that_nothing_can_hold_is_no_empty_run(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = FaultyBackend(LocalBackend(tmp_path), [Fault(do="fail", verb="put", match="*/lease-*", times=None)])
    with small_checkpointer(place) as ckpt:
        with pytest.raises(aiockpt.StorageError, match="lease-"):
            list(ckpt.watch("eval", follow=False))
        place.schedule = FaultSchedule([], place.ACTIONS)
        assert [step.step for step in ckpt.watch("eval", follow=False)] == [1]
