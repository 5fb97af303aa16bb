"""Every command on sound, damaged, unfinished, empty and missing checkpoints: what it says, and its exit status."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import anyio
import msgspec
import pytest
import torch
from rich.progress import Progress

import aiockpt
from aiockpt.backends.local import LocalBackend
from aiockpt.format.manifest import decode_manifest, decode_receipt, encode_manifest, encode_receipt
from aiockpt.futures import Future
from aiockpt.pipeline.discover import StepEntry
from aiockpt.runtime.promise import Promise
from aiockpt.tools.cli.commands.common import finish
from aiockpt.tools.cli.main import main
from aiockpt.tools.cli.show import SpeedColumn
from aiockpt.tools.cli.survey import find_unfinished
from tests.cli.small_checkpoints import Command, data_file, flip, manifest, save, snapshot_of, uncommit

ATTEMPT = "a-00112233aabb"


def begin_attempt(root: Path, step: int) -> None:
    """Leave what a save leaves that died before its vote."""
    folder = root / f"step-{step:08d}" / ATTEMPT / "d"
    folder.mkdir(parents=True)
    (folder / "r00000-0000.safetensors").write_bytes(bytes(5000))


def raising(error: BaseException) -> Callable[..., None]:
    """Return a function that takes anything and raises *error*."""

    def refuse(*_: object) -> None:
        raise error

    return refuse


# ---------------------------------------------------------------------- ls


def test_ls_lists_the_newest_first_with_metrics_and_state(aiockpt_command: Command, made: Path) -> None:
    outcome = aiockpt_command("ls", made)
    assert outcome.status == 0
    title, _, *rows = outcome.out.splitlines()
    assert "3 steps" in title
    assert [row.split()[:2] for row in rows] == [["●", "300"], ["●", "200"], ["●", "100"]]
    assert [row.split()[-1] for row in rows] == ["committed", "verified", "committed"]
    assert "0.0033333" in rows[0]


def test_ls_draws_the_branches(aiockpt_command: Command, root: Path) -> None:
    save(root, [250], load=200)
    outcome = aiockpt_command("ls", root)
    assert "2 branches" in outcome.out
    assert [row.partition("  ")[0].split()[0] for row in outcome.out.splitlines()[2:6]] == ["●", "│", "●─╯", "●"]


def test_ls_explains_its_marks_where_there_is_more_than_one(aiockpt_command: Command, root: Path) -> None:
    assert "its ancestors" not in aiockpt_command("ls", root).out
    begin_attempt(root, 400)
    explained = aiockpt_command("ls", root).out.splitlines()[-1]
    assert explained == "● the newest step and its ancestors · ◐ not committed"
    save(root, [250], load=200)
    assert "○ another branch · ◐ not committed" in aiockpt_command("ls", root).out


def test_ls_does_not_speak_of_ranks_where_it_knows_of_none(aiockpt_command: Command, root: Path) -> None:
    uncommit(root, 300)
    begin_attempt(root, 400)
    said = aiockpt_command("ls", root).out
    assert "nothing of it was written completely; it is running, or died" in said
    assert "all of it was written; finish it" in said
    for out in (said, aiockpt_command("inspect", root).out, aiockpt_command("commit", root).out):
        assert "rank" not in out.replace(str(root), "")
        assert "receipt" not in out


def test_ls_shows_a_run_that_was_resumed_and_pruned_as_one_line(aiockpt_command: Command, root: Path) -> None:
    save(root, [400, 500], load=300)
    shutil.rmtree(root / "step-00000300")
    outcome = aiockpt_command("ls", root)
    assert "branches" not in outcome.out
    assert "gone" not in outcome.out
    assert "deleted" not in outcome.out
    assert [row.split()[0] for row in outcome.out.splitlines()[2:]] == ["●"] * 4


def test_ls_tells_where_a_step_went_on_from_when_nothing_leads_there(aiockpt_command: Command, root: Path) -> None:
    save(root, [400], load=100)
    shutil.rmtree(root / "step-00000100")
    outcome = aiockpt_command("ls", root)
    assert "2 branches" in outcome.out
    assert "committed, went on from step-00000100, deleted or saved anew since" in outcome.out


def test_ls_tells_what_is_damaged_and_what_is_unfinished(aiockpt_command: Command, root: Path) -> None:
    flip(manifest(root, 200), -100)
    uncommit(root, 300)
    begin_attempt(root, 400)
    outcome = aiockpt_command("ls", root)
    assert outcome.status == 0
    assert "✗ step 200: step-00000200/MANIFEST-1.json is damaged" in outcome.out
    assert "◐ step 400: an attempt without a manifest (a-00112233aabb" in outcome.out
    assert f"finish it with aiockpt commit {root}" in outcome.out
    seen = aiockpt_command("ls", root, "--json").json()
    assert [step["step"] for step in seen["steps"]] == [200, 100]
    assert [(it["step"], it["can_be_committed"]) for it in seen["unfinished"]] == [(400, False), (300, True)]


def test_ls_tells_when_readers_fall_back_to_an_older_generation(aiockpt_command: Command, root: Path) -> None:
    newest = root / "step-00000300" / "MANIFEST-2.json"
    newest.write_bytes(manifest(root, 300).read_bytes())  # says generation 1
    outcome = aiockpt_command("ls", root)
    assert "generation 2 is damaged; readers take generation 1" in outcome.out


def test_ls_marks_the_steps_that_keep_their_weights_alone(aiockpt_command: Command, tmp_path: Path) -> None:
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(step, {"model": torch.nn.Linear(3, 2), "more": torch.ones(5)}).result(30)
        ckpt.prune(aiockpt.Retention(optimizer=1)).result(30)
    newest, older = aiockpt_command("ls", tmp_path, "--json").json()["steps"]
    assert (newest["weights_only"], older["weights_only"]) == (False, True)
    marked = [line for line in aiockpt_command("ls", tmp_path).out.splitlines() if "weights only" in line]
    assert len(marked) == 1
    assert " 1 " in marked[0]


def test_ls_names_the_ranks_whose_receipts_are_missing(aiockpt_command: Command, root: Path) -> None:
    receipt = next((root / "step-00000300").glob("a-*/r/*"))
    voted = decode_receipt(receipt.read_bytes(), "receipt")
    receipt.write_bytes(encode_receipt(msgspec.structs.replace(voted, world_size=3)))
    uncommit(root, 300)
    assert "no receipt of rank 1, 2;" in aiockpt_command("ls", root).out


def test_ls_tells_of_an_attempt_that_lost_against_another(aiockpt_command: Command, root: Path) -> None:
    winner = msgspec.structs.replace(decode_manifest(manifest(root, 300).read_bytes()), attempt="ffffffffffff")
    manifest(root, 300).write_bytes(encode_manifest(winner))
    assert "another attempt was committed in its place" in aiockpt_command("ls", root).out


def test_ls_promises_no_commit_to_an_attempt_that_a_later_generation_has_overtaken(
    aiockpt_command: Command, root: Path
) -> None:
    won = decode_manifest(manifest(root, 300).read_bytes())
    winner = msgspec.structs.replace(won, attempt="ffffffffffff", generation=2)
    uncommit(root, 300)
    (root / "step-00000300" / "MANIFEST-2.json").write_bytes(encode_manifest(winner))
    seen = aiockpt_command("ls", root, "--json").json()
    assert [one["can_be_committed"] for one in seen["unfinished"]] == [False]
    assert "nothing to finish" in aiockpt_command("commit", root).out


def test_ls_tells_how_a_step_is_mended_whose_manifest_is_torn(aiockpt_command: Command, root: Path) -> None:
    torn = manifest(root, 300)
    torn.write_bytes(torn.read_bytes()[:100])
    assert "move the damaged one away" in aiockpt_command("ls", root).out
    torn.unlink()
    assert aiockpt_command("commit", root).status == 0
    assert aiockpt_command("verify", root, 300).status == 0


def test_a_manifest_that_is_deleted_while_it_is_looked_at_names_no_attempt(root: Path) -> None:
    entry = StepEntry("step-00000300", 300, (2,), frozenset(), ("00112233aabb",))
    (found,) = anyio.run(find_unfinished, LocalBackend(root), entry)
    assert found.missing_ranks is None


@pytest.mark.parametrize("command", ["ls", "inspect", "diff"])
def test_looking_changes_nothing_and_finishes_nobodys_commit(
    aiockpt_command: Command, root: Path, command: str
) -> None:
    uncommit(root, 300)
    begin_attempt(root, 400)
    before = snapshot_of(root)
    aiockpt_command(command, root, *([100, 200] if command == "diff" else []))
    assert snapshot_of(root) == before


@pytest.mark.parametrize("command", ["ls", "inspect", "verify", "prune", "commit", "doctor"])
def test_a_missing_folder_is_refused_and_not_made(aiockpt_command: Command, tmp_path: Path, command: str) -> None:
    outcome = aiockpt_command(command, tmp_path / "missing")
    assert (outcome.status, outcome.out) == (2, "")
    assert "no such folder" in outcome.err
    assert not (tmp_path / "missing").exists()


@pytest.mark.parametrize(
    ("place", "advice"),
    [
        ("memory://x", "give a folder"),
        ("s3:/bucket", "write s3://"),
        ("nothing://x", "no backend"),
    ],
)
def test_a_place_that_cannot_be_looked_at_is_refused(aiockpt_command: Command, place: str, advice: str) -> None:
    outcome = aiockpt_command("ls", place)
    assert outcome.status == 2
    assert advice in outcome.err


def test_a_step_given_as_the_root_is_pointed_out(aiockpt_command: Command, made: Path) -> None:
    outcome = aiockpt_command("inspect", made / "step-00000200")
    assert outcome.status == 2
    assert f"{made} 200" in outcome.err


def test_a_folder_of_runs_is_not_taken_for_an_empty_one(aiockpt_command: Command, root: Path) -> None:
    (root.parent / "notes").mkdir()
    outcome = aiockpt_command("ls", root.parent)
    assert "holds no checkpoint yet" in outcome.out
    assert f"{root} holds steps" in outcome.out
    assert "notes" not in outcome.out


@pytest.mark.parametrize("step", ["200", "step-00000200"])
def test_a_step_may_be_named_by_its_folder(aiockpt_command: Command, made: Path, step: str) -> None:
    assert "step-00000200" in aiockpt_command("inspect", made, step).out
    assert aiockpt_command("diff", made, step, 200).status == 0


@pytest.mark.parametrize("step", ["newest", "2.5", "step-200"])
def test_what_is_no_step_is_told_with_what_would_be(aiockpt_command: Command, made: Path, step: str) -> None:
    outcome = aiockpt_command("verify", made, step)
    assert outcome.status == 2
    assert "is no step" in outcome.err
    assert "step-00001000" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("prune", "x", "--keep", "1"), "No such option: --keep (Possible options: --last)"),
        (("prune", "x", "--dryrun"), "(Possible options: --dry-run)"),
        (("prune", "x", "--dry_run"), "(Possible options: --dry-run)"),
        (("prune", "x", "--delete"), "(Possible options: --yes)"),
        (("ls", "x", "--jsn"), "(Possible options: --json)"),
        (("bench", "x", "--output", "f"), "(Possible options: --report)"),
        (("--versoin",), "(Possible options: --version)"),
        (("verify", "x", "--step", "3"), "No such option: --step; give STEP by its place, without an option"),
    ],
)
def test_an_option_that_is_not_there_is_answered_with_the_one_that_was_meant(
    aiockpt_command: Command, arguments: tuple[str, ...], says: str
) -> None:
    outcome = aiockpt_command(*arguments)
    assert outcome.status == 2
    assert says in " ".join(outcome.err.replace("│", " ").split())


def test_an_option_like_no_other_is_answered_with_none(aiockpt_command: Command) -> None:
    assert "Possible" not in aiockpt_command("ls", "x", "--zzz").err


@pytest.mark.parametrize(
    "command", ["ls", "inspect", "verify", "diff", "cp", "convert", "prune", "gc", "rm", "commit", "bench"]
)
def test_help_writes_flags_and_arguments_as_people_know_them(aiockpt_command: Command, command: str) -> None:
    shown = aiockpt_command(command, "--help").out
    assert "bool" not in shown
    usage = next(line for line in shown.splitlines() if "Usage:" in line)
    assert not {"{", "}"} & set(usage)
    arguments = usage.partition("[OPTIONS]")[2].split()
    assert arguments
    assert arguments == [name.upper() for name in arguments]


def test_help_of_diff_says_in_which_forms_a_step_is_given(aiockpt_command: Command) -> None:
    assert "step-00001000" in aiockpt_command("diff", "--help").out


def test_help_may_be_asked_for_in_short(aiockpt_command: Command) -> None:
    assert aiockpt_command("ls", "-h").status == 0


def test_a_file_url_means_its_folder(aiockpt_command: Command, root: Path) -> None:
    spaced = root.rename(root.with_name("a run"))
    assert aiockpt_command("ls", f"file://{str(spaced).replace(' ', '%20')}").status == 0


def test_an_empty_folder_holds_no_checkpoint(aiockpt_command: Command, tmp_path: Path) -> None:
    assert aiockpt_command("ls", tmp_path).status == 0
    for command in (["inspect"], ["verify"], ["verify", "--all"]):
        outcome = aiockpt_command(command[0], tmp_path, *command[1:])
        assert outcome.status == 2
        assert "holds no checkpoint yet" in outcome.err


# ---------------------------------------------------------------------- inspect


def test_inspect_shows_tensors_in_natural_order_files_and_values(aiockpt_command: Command, made: Path) -> None:
    outcome = aiockpt_command("inspect", made)
    assert outcome.status == 0
    assert "step-00000300" in outcome.out
    lines = outcome.out.splitlines()
    names = [line.partition("─ ")[2].split()[0] for line in lines if "─ " in line]
    assert names == ["also", "fixed", "layers", "2", "bias", "weight", "10", "bias", "weight", "tied"]
    assert any("= tied" in line for line in lines)
    assert any("F32" in line and "40×30" in line and "4.7 KiB" in line for line in lines)
    assert any("d/r00000-0000.safetensors" in line for line in lines)
    for text in ("'a run'", "(1, [2, None])", "own.seed", "git"):
        assert text in outcome.out


def test_inspect_folds_deeper_levels_when_asked(aiockpt_command: Command, made: Path) -> None:
    outcome = aiockpt_command("inspect", made, "--depth", 1)
    assert "4 tensors" in outcome.out
    assert "weight" not in outcome.out
    assert "--depth N" in outcome.out


def test_inspect_folds_by_itself_what_would_fill_many_screens(aiockpt_command: Command, tmp_path: Path) -> None:
    layers = {str(i): {str(j): torch.ones(1) for j in range(10)} for i in range(30)}
    state = {"layers": layers, "many": {str(i): i for i in range(200)}}
    with aiockpt.Checkpointer(tmp_path) as ckpt:
        ckpt.save(1, state).result(30)
    folded = aiockpt_command("inspect", tmp_path)
    assert len(folded.out.splitlines()) < 110
    assert "--all shows everything" in folded.out
    assert len(aiockpt_command("inspect", tmp_path, "--all").out.splitlines()) > 530


def test_inspect_gives_json_to_programs(aiockpt_command: Command, made: Path) -> None:
    seen = aiockpt_command("inspect", made, 200, "--json").json()
    assert seen["info"]["step"] == 200
    (fixed,) = [tensor for tensor in seen["tensors"] if tensor["name"] == "fixed"]
    assert (fixed["dtype"], fixed["shape"], fixed["bytes"]) == ("I64", [6], 48)


def test_without_a_step_the_one_is_inspected_that_a_load_takes(aiockpt_command: Command, root: Path) -> None:
    """The newest generation is bad behind its head; the one before it stands at its own place in the order."""
    before = root.parent / "before"
    shutil.copytree(root / "step-00000100", before)
    save(root, [100])
    shutil.copytree(before, root / "step-00000100", dirs_exist_ok=True)
    newer = root / "step-00000100" / "MANIFEST-2.json"
    flip(newer, newer.stat().st_size - 50)
    with aiockpt.Checkpointer(root) as ckpt:
        assert ckpt.latest().result(30) == 300
    assert aiockpt_command("inspect", root, "--json").json()["info"]["step"] == 300


def test_inspect_passes_over_a_damaged_step_unless_asked_for_it(aiockpt_command: Command, root: Path) -> None:
    flip(manifest(root, 300), -100)
    assert "step-00000200" in aiockpt_command("inspect", root).out
    assert aiockpt_command("inspect", root, 300).status == 1
    for step in (100, 200):
        flip(manifest(root, step), -100)
    assert aiockpt_command("inspect", root).status == 1


@pytest.mark.parametrize("arguments", [("inspect", 7), ("verify", 7), ("diff", 100, 7), ("inspect", 100, "--rank", 4)])
def test_what_is_not_there_is_a_wrong_call_and_the_message_says_what_is(
    aiockpt_command: Command, made: Path, arguments: tuple[object, ...]
) -> None:
    command, *rest = arguments
    outcome = aiockpt_command(command, made, *rest)
    assert outcome.status == 2
    assert "300, 200, 100" in outcome.err or "saved by 1 rank" in outcome.err


# ---------------------------------------------------------------------- verify


def test_verify_says_with_its_status_whether_all_is_as_it_was_saved(aiockpt_command: Command, root: Path) -> None:
    outcome = aiockpt_command("verify", root)
    assert (outcome.status, outcome.out[:10]) == (0, "✓ step 300")
    assert (root / "step-00000300" / "VERIFIED-1.json").exists()
    flip(data_file(root, 300), -1)
    outcome = aiockpt_command("verify", root)
    assert outcome.status == 1
    assert "r00000-0000.safetensors" in outcome.out


def test_verify_does_not_pass_over_a_damaged_manifest(aiockpt_command: Command, root: Path) -> None:
    flip(manifest(root, 300), -100)
    outcome = aiockpt_command("verify", root)
    assert outcome.status == 1
    assert "✗ step 300" in outcome.out


def test_verify_all_goes_on_after_a_damaged_step(aiockpt_command: Command, root: Path) -> None:
    flip(data_file(root, 200), -1)
    outcome = aiockpt_command("verify", root, "--all", "--json")
    assert outcome.status == 1
    assert [(it["step"], it["valid"]) for it in outcome.json()] == [(300, True), (200, False), (100, True)]


def test_verify_takes_one_step_or_all(aiockpt_command: Command, made: Path) -> None:
    assert aiockpt_command("verify", made, 100, "--all").status == 2


# ---------------------------------------------------------------------- diff


def test_diff_says_with_its_status_whether_two_steps_differ(aiockpt_command: Command, made: Path) -> None:
    assert aiockpt_command("diff", made, 100, 100).status == 0
    outcome = aiockpt_command("diff", made, 100, 300)
    assert outcome.status == 1
    assert "10.0 → 30.0" in outcome.out
    rows = [line.split() for line in outcome.out.splitlines()]
    assert ["tied", "100.0%", "200", "200", "2"] in rows
    assert rows.index(next(row for row in rows if row[:1] == ["layers.2.weight"])) < rows.index(
        next(row for row in rows if row[:1] == ["layers.10.weight"])
    )


def test_diff_gives_json_to_programs(aiockpt_command: Command, made: Path) -> None:
    outcome = aiockpt_command("diff", made, 100, 300, "--json")
    changes = {it["name"]: it for it in outcome.json()}
    assert changes["fixed"]["kind"] == "same"
    assert changes["tied"]["difference"]["largest"] == 200.0


# ---------------------------------------------------------------------- prune, commit


def test_prune_only_shows_until_it_is_told_to_delete(aiockpt_command: Command, root: Path) -> None:
    shown = aiockpt_command("prune", root, "--last", 1)
    assert shown.status == 0
    assert "would delete" in shown.out
    assert "add --yes" in shown.out.lower()
    assert (root / "step-00000100").exists()
    deleted = aiockpt_command("prune", root, "--last", 1, "--yes")
    assert "deleted" in deleted.out
    assert sorted(path.name for path in root.glob("step-*")) == ["step-00000200", "step-00000300"]  # 200 is verified
    assert "kept: 2 steps (300, 200)" in deleted.out


def test_prune_takes_a_dry_run_as_other_commands_do(aiockpt_command: Command, root: Path) -> None:
    plain = aiockpt_command("prune", root, "--last", 1)
    assert aiockpt_command("prune", root, "--last", 1, "--dry-run") == plain
    refused = aiockpt_command("prune", root, "--last", 1, "--yes", "-n")
    assert refused.status == 2
    assert "--dry-run only shows" in refused.err
    assert len(list(root.glob("step-*"))) == 3


def test_prune_that_cannot_delete_what_it_should_does_not_end_well(aiockpt_command: Command, root: Path) -> None:
    (record,) = root.glob("step-00000100/a-*/DECISION.json")
    (root / "step-00000100" / "MANIFEST-1.json").unlink()
    record.write_text("{}")
    next(root.glob("step-00000100/a-*/r/r00000.json")).unlink()
    shown = aiockpt_command("prune", root, "--last", 3, "--grace-hours", 0)
    assert shown.status == 0
    done = aiockpt_command("prune", root, "--last", 3, "--grace-hours", 0, "--yes")
    assert done.status == 3
    assert "DECISION.json" in done.out.replace("\n", "")


def test_prune_says_of_each_step_that_stays_why(aiockpt_command: Command, root: Path) -> None:
    save(root, [400, 500], load=200)
    shown = aiockpt_command("prune", root, "--last", 2, "--every", 100, "--best", "loss").out
    why = {row.split()[2]: " ".join(row.split()[5:]) for row in shown.splitlines() if " step " in row}
    assert why == {
        "500": "the newest, a multiple of 100, among the best 1 by loss",
        "400": "among the last 2, a multiple of 100",
        "300": "on a branch that was left, or before a step that is gone",
        "200": "a multiple of 100, the newest verified",
        "100": "a multiple of 100",
    }
    kept = aiockpt_command("prune", root, "--last", 1, "--json").json()["kept"]
    assert [step["step"] for step in kept] == [500, 300, 200]


def test_prune_leaves_what_cannot_be_read_or_was_found_damaged_and_says_so(
    aiockpt_command: Command, root: Path
) -> None:
    flip(data_file(root, 200), -1)
    assert aiockpt_command("verify", root, 200).status == 1
    flip(manifest(root, 100), -100)
    shown = aiockpt_command("prune", root, "--last", 1, "--best", "loss").out
    assert "found damaged, which is for you to look at" in shown
    assert "its manifest cannot be read" in shown


def test_prune_without_a_rule_says_how_to_give_one(aiockpt_command: Command, made: Path) -> None:
    assert "no rule was given, so every step stays: --last N" in aiockpt_command("prune", made).out
    assert "no rule was given" not in aiockpt_command("prune", made, "--last", 3).out


def test_prune_shows_the_sizes_that_ls_shows(aiockpt_command: Command, made: Path) -> None:
    (listed,) = {" ".join(row.split()[4:6]) for row in aiockpt_command("ls", made).out.splitlines()[2:]}
    shown = aiockpt_command("prune", made, "--last", 1).out
    assert shown.count(listed) == 3 + 1  # each step, and what --yes frees


def test_prune_cuts_a_long_list_of_what_stays(
    aiockpt_command: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aiockpt.tools.cli.results.KEPT_SHOWN", 2)
    shown = aiockpt_command("prune", made).out
    assert "step 100" not in shown
    assert "stays: 3 steps (300, 200, 100) · 1 of them not shown above" in shown


def test_prune_keeps_the_best(aiockpt_command: Command, root: Path) -> None:
    best = aiockpt_command("prune", root, "--last", 1, "--best", "loss", "--mode", "max", "--json")
    assert best.json()["steps"] == []
    plain = aiockpt_command("prune", root, "--last", 1, "--json")
    assert [it["step"] for it in plain.json()["steps"]] == [100]


def test_prune_removes_what_a_dead_save_left_when_it_is_old_enough(aiockpt_command: Command, root: Path) -> None:
    begin_attempt(root, 400)
    assert "nothing to delete" in aiockpt_command("prune", root, "--yes").out
    outcome = aiockpt_command("prune", root, "--grace-hours", 0, "--yes")
    assert f"step-00000400/{ATTEMPT}" in outcome.out
    assert "4.9 KiB" in outcome.out
    assert not (root / "step-00000400").exists()


@pytest.mark.parametrize("arguments", [("--every", 2), ("--last", 0), ("--best", "loss"), ("--mode", "middle")])
def test_prune_refuses_rules_that_make_no_sense(
    aiockpt_command: Command, made: Path, arguments: tuple[object, ...]
) -> None:
    assert aiockpt_command("prune", made, *arguments).status == 2


def test_commit_finishes_what_has_all_its_receipts_and_tells_of_the_rest(aiockpt_command: Command, root: Path) -> None:
    uncommit(root, 300)
    begin_attempt(root, 400)
    outcome = aiockpt_command("commit", root)
    assert outcome.status == 0
    assert "✓ step 300: committed as generation 1\n" in outcome.out
    assert "◐ step 400" in outcome.out
    assert aiockpt_command("verify", root, 300).status == 0
    assert "nothing to finish" in aiockpt_command("commit", root).out


# ---------------------------------------------------------------------- doctor


def test_doctor_tells_what_the_place_can_do_and_leaves_nothing_behind(aiockpt_command: Command, tmp_path: Path) -> None:
    found = aiockpt_command("doctor", tmp_path, "--size", 8, "--json").json()
    assert found["link"]
    assert found["exclusive_create"]
    assert min(found["write_bytes_per_s"], found["read_bytes_per_s"], found["file_flush_ms"]) > 0
    assert list(tmp_path.iterdir()) == []
    last = aiockpt_command("doctor", tmp_path, "--size", 8).out.splitlines()[-1]
    assert last.startswith("✓ safe for checkpoints")
    assert "of rival commits exactly one wins" in last


def test_doctor_does_not_call_memory_safe_without_a_condition(aiockpt_command: Command) -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir():
        pytest.skip("this machine has no /dev/shm")
    assert "✓ safe for checkpoints while the machine is up:" in aiockpt_command("doctor", folder, "--size", 8).out


def test_doctor_says_how_to_make_the_folder_that_a_run_would_make_by_itself(
    aiockpt_command: Command, tmp_path: Path
) -> None:
    assert f"make it (mkdir -p '{tmp_path}/a run'), or" in aiockpt_command("doctor", tmp_path / "a run").err
    assert "mkdir" not in aiockpt_command("ls", tmp_path / "a run").err
    (tmp_path / "file").touch()
    outcome = aiockpt_command("doctor", tmp_path / "file")
    assert "a file; give a folder" in outcome.err


def test_doctor_leaves_nothing_behind_when_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    monkeypatch.setattr(os, "posix_fallocate", raising(KeyboardInterrupt()))
    assert aiockpt_command("doctor", tmp_path, "--size", 8).status == 130
    assert list(tmp_path.iterdir()) == []


def test_doctor_finds_out_what_does_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aiockpt_command: Command
) -> None:
    monkeypatch.setattr(os, "link", raising(PermissionError()))
    outcome = aiockpt_command("doctor", tmp_path, "--size", 8)
    assert outcome.status == 0
    assert "no hard links" in outcome.out
    monkeypatch.setattr(os, "O_EXCL", 0)
    outcome = aiockpt_command("doctor", tmp_path, "--size", 8)
    assert outcome.status == 3
    assert "two writers could both commit here" in outcome.out


def test_doctor_says_what_it_may_not_do(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "mkdir", raising(PermissionError(13, "Permission denied")))
    outcome = aiockpt_command("doctor", tmp_path, "--size", 8)
    assert outcome.status == 3
    assert f"{tmp_path}: what a commit needs cannot be tried (Permission denied)" in outcome.err


def test_doctor_does_not_take_a_file_system_without_a_size_for_a_full_one(aiockpt_command: Command) -> None:
    outcome = aiockpt_command("doctor", "/proc")
    assert outcome.status == 2
    assert "no size" in outcome.err


def test_doctor_asks_for_no_more_than_there_is(aiockpt_command: Command, tmp_path: Path) -> None:
    outcome = aiockpt_command("doctor", tmp_path, "--size", 1 << 40)
    assert outcome.status == 2
    assert "MiB free" in outcome.err


# ---------------------------------------------------------------------- the whole


def test_storage_that_fails_has_a_status_of_its_own(
    aiockpt_command: Command, made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = staticmethod(raising(PermissionError(13, "Permission denied")))
    monkeypatch.setattr("aiockpt.runtime.world.OsFiles.listdir", refusing)
    outcome = aiockpt_command("ls", made)
    assert outcome.status == 3
    assert outcome.err.startswith("error: ")


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, made: Path) -> None:
    monkeypatch.setattr("aiockpt.tools.cli.given_root.open_backend", raising(ZeroDivisionError()))
    monkeypatch.setattr("sys.argv", ["aiockpt", "ls", str(made)])
    with pytest.raises(ZeroDivisionError):
        main()


def test_an_interrupted_wait_cancels_the_work() -> None:
    class Interrupted(Future[None]):
        def result(self, timeout: float | None = None) -> None:
            raise KeyboardInterrupt

    cancelled: list[bool] = []
    promise: Promise[None] = Promise("verify")
    promise.cancel_work = lambda: cancelled.append(True)
    future = Interrupted(promise)
    with pytest.raises(KeyboardInterrupt):
        finish(future)
    assert cancelled == [True]


def test_a_reader_that_has_seen_enough_is_not_told_of_damage(made: Path) -> None:
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "ls", str(made)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        running.stdout.close()
        assert running.wait(60) == 141


@pytest.mark.parametrize(("columns", "widest"), [("60", 60), (None, 200)])
def test_a_pipe_is_as_wide_as_columns_says(root: Path, columns: str | None, widest: int) -> None:
    begin_attempt(root, 400)
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    done = subprocess.run(
        [sys.executable, "-m", "aiockpt.tools.cli.main", "ls", str(root)],
        env=environment | ({"COLUMNS": columns} if columns else {}),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    longest = max(len(line) for line in done.stdout.splitlines() if str(root) not in line)
    assert widest / 2 < longest <= widest


def test_one_unit_is_used_for_every_speed(aiockpt_command: Command, root: Path, tmp_path: Path) -> None:
    printed = (
        aiockpt_command("verify", root).out,
        aiockpt_command("cp", root, tmp_path / "copy").out,
        aiockpt_command("doctor", tmp_path, "--size", 8).out,
    )
    for out in printed:
        assert "iB/s" in out
        assert "MB/s" not in out
    bar = Progress()
    bar.add_task("", total=10)
    (task,) = bar.tasks
    task.finished_speed = 3 << 20
    assert str(SpeedColumn().render(task)) == "3.0 MiB/s"


def test_help_does_not_import_torch() -> None:
    package = str(Path(aiockpt.__file__).parent)
    program = (
        "import sys, types\n"
        "package = types.ModuleType('aiockpt'); package.__path__ = [sys.argv.pop(1)]\n"
        "sys.modules['aiockpt'] = package\n"  # what aiockpt/__init__.py imports is not this command's to decide
        "from aiockpt.tools.cli.main import main\n"
        "try: main()\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)\n"
    )
    for arguments in (["--help"], ["ls", package]):
        done = subprocess.run(
            [sys.executable, "-c", program, package, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "False\n")


def test_a_metric_that_no_step_has_is_refused_before_anything_is_deleted(aiockpt_command: Command, root: Path) -> None:
    outcome = aiockpt_command("prune", root, "--last", 1, "--best", "accuracy", "--yes")
    assert outcome.status == 2
    assert "no step has the metric 'accuracy'; the metrics there are: loss" in outcome.err
    assert len(list(root.glob("step-*"))) == 3


@pytest.mark.parametrize("option", [["--async"], ["--lazy"], ["--keep", "2"]])
def test_the_elastic_demo_refuses_what_it_would_ignore(aiockpt_command: Command, option: list[str]) -> None:
    outcome = aiockpt_command("demo", "--elastic", *option)
    assert outcome.status == 2
    assert f"--elastic has no {option[0]}" in outcome.err


def test_the_version_is_told(aiockpt_command: Command) -> None:
    assert aiockpt_command("--version").out.startswith("aiockpt 0.")


def test_every_command_refuses_a_place_that_is_a_slip(
    aiockpt_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    calls = [
        [name]
        for name in ("ls", "inspect", "verify", "diff", "doctor", "bench", "report", "prune", "gc", "commit", "top")
    ]
    calls = [[*call, "s3:b/run"] + (["1", "2"] if call == ["diff"] else []) for call in calls]
    calls += [["rm", "s3:b/run", "1"], ["cp", "s3:b/run", "there"], ["convert", "s3:b/run", "there"]]
    calls += [["watch", "s3:b/run", "--exec", "true"], ["plan", "s3:b/run"]]
    for call in calls:
        refused = aiockpt_command(*call)
        assert (refused.status, "write s3://b/run" in refused.err.replace("\n", " ")) == (2, True), (call, refused)
    assert list(tmp_path.iterdir()) == []
