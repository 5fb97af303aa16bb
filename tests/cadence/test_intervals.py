"""The rules of intervals, whatever was measured."""

import math

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aiockpt.policies.cadence.intervals import BAND, Interval, IntervalLimits, Measured, choose, optimal_interval_s

seconds = st.floats(0, 1e7, allow_nan=False)
some_seconds = st.floats(1e-6, 1e7)
measurements = st.builds(
    Measured,
    saves=st.just(1),
    blocked_s=seconds,
    lost_s=seconds,
    write_s=seconds,
    step_s=st.one_of(st.just(0.0), st.floats(1e-6, 1e4)),
)
limits = st.builds(
    IntervalLimits,
    max_overhead=st.floats(1e-4, 2),
    mttf_s=st.none() | st.floats(1e-3, 1e9),
    in_flight=st.integers(1, 8),
)


def lasting_share(interval_s: float, cost_s: float, mttf_s: float) -> float:
    """The share of time that becomes lasting work, but for what the interval does not change: the docstring's model."""
    return interval_s / math.expm1((interval_s + cost_s) / mttf_s)


@given(st.floats(1e-4, 1e4), st.floats(1e-6, 3), st.floats(0.5, 2))
def test_no_other_interval_gets_noticeably_more_work_done(mttf_s: float, cost: float, other: float) -> None:
    chosen_s = optimal_interval_s(cost * mttf_s, mttf_s)
    chosen = lasting_share(chosen_s, cost * mttf_s, mttf_s)
    # Of what is hardly any work, where a save costs as much as a failure, 1 %.
    near = 1e-4 if cost <= 0.5 else 0.01
    assert chosen >= lasting_share(chosen_s * other, cost * mttf_s, mttf_s) * (1 - near)


def test_where_failures_are_rare_it_is_young_s_interval_and_that_of_saxena_et_al() -> None:
    cost_s, mttf_s = 2.0, 1e6
    best_s = optimal_interval_s(cost_s, mttf_s)
    assert best_s == pytest.approx(math.sqrt(2 * cost_s * mttf_s), rel=2e-3)
    from_save_to_save_s = cost_s + math.sqrt(2 * mttf_s * cost_s + cost_s**2)
    assert best_s + cost_s == pytest.approx(from_save_to_save_s, rel=1e-3)


def test_free_saves_are_made_always_and_hopeless_ones_once_in_a_mean_time_to_failure() -> None:
    assert optimal_interval_s(0.0, 100.0) == 0.0
    assert optimal_interval_s(1e9, 100.0) == pytest.approx(100.0 * 8 / 9)


@given(measurements, limits)
def test_no_rule_is_broken(measured: Measured, limit: IntervalLimits) -> None:
    assume(measured.step_s)
    chosen = choose(measured, limit)
    assert chosen.steps >= 1
    assert chosen.seconds == pytest.approx(chosen.steps * measured.step_s)
    enough = 1 - 1e-9
    assert chosen.seconds * limit.max_overhead >= measured.cost_s * enough
    assert chosen.seconds >= measured.write_s * enough


@given(measurements, limits, st.sampled_from(["blocked_s", "lost_s", "write_s", "mttf_s"]), some_seconds)
def test_the_interval_never_falls_when_a_cost_or_the_time_to_failure_rises(
    measured: Measured, limit: IntervalLimits, name: str, more: float
) -> None:
    before = choose(measured, limit)
    if name == "mttf_s":
        assume(limit.mttf_s is not None)
        limit = msgspec.structs.replace(limit, mttf_s=(limit.mttf_s or 0) + more)
    else:
        measured = msgspec.structs.replace(measured, **{name: getattr(measured, name) + more})
    assert choose(measured, limit).steps >= before.steps


@given(measurements, limits)
def test_the_rule_that_is_named_is_the_one_that_binds(measured: Measured, limit: IntervalLimits) -> None:
    chosen = choose(measured, limit)
    step_s = max(measured.step_s, 1e-9)
    bounds_s = {
        "overhead": measured.cost_s / limit.max_overhead,
        "write": measured.write_s,
        "failures": 0.0 if limit.mttf_s is None else optimal_interval_s(measured.cost_s, limit.mttf_s),
    }
    if chosen.rule == "step":
        assert chosen.steps == 1
        assert max(bounds_s.values()) <= 1.5 * step_s
    else:
        assert bounds_s[chosen.rule] == max(bounds_s.values())


@given(measurements, limits, st.lists(st.floats(0.92, 1.08), min_size=1, max_size=20))
def test_noise_never_moves_it_to_and_fro(measured: Measured, limit: IntervalLimits, noise: list[float]) -> None:
    """Raised once it may be, by the noise of the next measurement; then it stays."""
    chosen, seen = choose(measured, limit), []
    for factor in noise:
        noisy = msgspec.structs.replace(
            measured, blocked_s=measured.blocked_s * factor, lost_s=measured.lost_s * factor,
            write_s=measured.write_s * factor,
        )  # fmt: skip
        chosen = choose(noisy, limit, chosen)
        seen.append(chosen.steps)
    assert seen == sorted(seen)
    assert len(set(seen)) <= 2


@given(measurements, limits, st.integers(1, 1 << 41))
def test_hysteresis_keeps_no_interval_that_a_rule_forbids_or_that_is_far_too_long(
    measured: Measured, limit: IntervalLimits, steps: int
) -> None:
    assume(measured.step_s)
    current = Interval("overhead", steps, steps * measured.step_s)
    kept, fresh = choose(measured, limit, current), choose(measured, limit)
    assert kept.seconds * limit.max_overhead >= measured.cost_s * (1 - 1e-9)
    assert kept.seconds >= measured.write_s * (1 - 1e-9)
    assert kept.steps <= fresh.steps * BAND + 1
