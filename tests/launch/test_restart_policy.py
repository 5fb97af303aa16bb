"""What follows a failure."""

from aiockpt.launch.restart_policy import RestartPolicy, TrainerFailure


def failure(
    step: int, *, kind: str = "ValueError", where: str = "train.py:3", commits: int = 1, told: bool = True
) -> TrainerFailure:
    return TrainerFailure(kind=kind, where=where, rank=0, step=step, commits=commits, told=told)


def test_the_same_failure_at_the_same_step_stops_the_third_time() -> None:
    decider = RestartPolicy()
    assert not decider.decide(failure(7)).reason
    assert not decider.decide(failure(8)).reason
    assert not decider.decide(failure(7)).reason
    assert "ValueError at train.py:3 in step 7" in decider.decide(failure(7)).reason


def test_two_restarts_that_commit_nothing_stop() -> None:
    decider = RestartPolicy()
    decisions = [decider.decide(failure(step, commits=commits)) for step, commits in ((1, 0), (2, 0), (9, 3), (10, 0))]
    assert not any(decision.reason for decision in decisions)
    assert "no save was committed" in decider.decide(failure(11, commits=0)).reason


def test_a_script_that_tells_nothing_is_restarted_always() -> None:
    decider = RestartPolicy()
    silent = failure(-1, kind="exit status 1", where="", commits=0, told=False)
    assert not any(decider.decide(silent).reason for _ in range(50))


def test_signals_before_the_first_step_are_not_the_program_s() -> None:
    decider = RestartPolicy()
    early = failure(-1, kind="signal SIGKILL", where="", commits=1)
    assert not any(decider.decide(early).reason for _ in range(5))


def test_a_run_that_was_told_to_end_is_not_restarted() -> None:
    decision = RestartPolicy().decide(failure(7, kind="exit status 75", where=""))
    assert decision.status == 75
    assert "told to end" in decision.reason


def test_restarts_wait_longer_from_time_to_time_until_one_commits() -> None:
    decider = RestartPolicy()
    silent = [failure(step, told=False, commits=0) for step in range(8)]
    assert [decider.decide(one).pause_s for one in silent] == [0, 1, 2, 4, 8, 16, 30, 30]
    assert decider.decide(failure(100, commits=4)).pause_s == 0
