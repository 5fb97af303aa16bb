"""Retention, the choice of steps to keep: a pure decision from what the manifests say; `pipeline.collect` carries it out.

Guarantees:

- The newest committed step and the newest verified one are kept, whatever the rules say (docs/durability.md#the-contract),
  and so is the newest one in which nothing was found that is NaN or infinite.
- "Newest" and ``last`` follow the lineage of the current run (docs/decisions.md#lineage); a branch that was left is kept.
- Where steps are kept by a metric that none of them has, all are kept.
- No clock is read: ages are arguments, and a step of unknown age is young. A longer ``newer_than`` never keeps fewer steps.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from aiockpt.options import Best, Retention
from aiockpt.units import duration, parse_seconds

_NOT_FINITE = "has numbers that are NaN or infinite"


class StepFacts(msgspec.Struct, frozen=True):
    """One committed step, as retention sees it.

    Attributes:
        sequence: the logical clock of its manifest.
        run: which checkpointer wrote it.
        parent: the step its run had loaded, or None.
        damaged: whether a verification, or a load, found it damaged.
        generation: which of its generations counts.
        ancestors: run and sequence of the save of *parent* that was loaded, then of what that came from, as far as known.
        finite: False where it is known to have numbers that are NaN or infinite.
        age_s: seconds since it was saved; None where that is not known.
    """

    id: str
    step: int
    sequence: int
    run: str
    parent: str | None
    verified: bool
    metrics: Mapping[str, float | None]
    damaged: bool = False
    generation: int = 1
    ancestors: tuple[tuple[str, int], ...] = ()
    finite: bool = True
    age_s: float | None = None


class Doomed(msgspec.Struct, frozen=True):
    """A step that no rule keeps, with the rules in words."""

    id: str
    step: int
    reason: str


class Kept(msgspec.Struct, frozen=True):
    """A step that stays, and why."""

    id: str
    step: int
    reason: str


def lineage(facts: Sequence[StepFacts]) -> list[StepFacts]:
    """Return the steps that the newest one descends from, itself included, the newest first."""
    clock_of = {fact.id: (fact.run, fact.sequence) for fact in facts}
    newest = max(facts, key=_age, default=None)
    before = [] if newest is None else [(newest.run, newest.sequence)]
    chain: list[StepFacts] = []
    seen: set[str] = set()
    while before:
        run, sequence = before.pop(0)
        mates = [fact for fact in facts if fact.run == run and fact.sequence <= sequence and run not in seen]
        seen.add(run)
        chain += sorted(mates, key=_age, reverse=True)
        if mates:  # all of them come from the same save; of a run without steps only its descendants know that
            known = clock_of.get(mates[0].parent or "")
            before = list(mates[0].ancestors) or ([known] if known else [])
    return chain


def _age(fact: StepFacts) -> tuple[int, int]:
    return (fact.sequence, fact.step)


def plan_retention(facts: Sequence[StepFacts], rules: Retention, protected: Collection[str] = ()) -> list[Doomed]:
    """Return the steps to delete, the oldest first.

    Args:
        facts: every committed step.
        rules: what to keep.
        protected: ids that are kept besides: being read, being saved.
    """
    kept = {step.id for step in explain_kept(facts, rules, protected)}
    line = lineage(facts)
    reason = f"not among the last {rules.last}" if rules.last else "not the newest"
    if rules.every:
        reason += f", not a multiple of {rules.every}"
    if rules.best:
        reason += f", not among the best {rules.best.count} by {rules.best.metric}"
    if rules.newer_than:
        reason += f", not newer than {_shown(rules.newer_than)}"
    return [
        Doomed(fact.id, fact.step, reason if fact.finite else f"{reason}, for it {_NOT_FINITE}")
        for fact in reversed(line)
        if fact.id not in kept
    ]


def explain_kept(facts: Sequence[StepFacts], rules: Retention, protected: Collection[str] = ()) -> list[Kept]:
    """Return the steps that stay, the newest first, each with everything that keeps it. Arguments as `plan_retention`.

    A step that is known to be damaged counts for no rule, and is left for people to inspect: it must not be kept in place
    of one that can be loaded.
    """
    kept = []
    on_line = {fact.id for fact in lineage(facts)}
    line = [fact for fact in lineage(facts) if not fact.damaged]
    why_on_line = _reasons(line, rules)
    for fact in sorted(facts, key=_age, reverse=True):
        if fact.id not in on_line:
            why = ["on a branch that was left, or before a step that is gone"]
        elif fact.damaged:
            why = ["found damaged, which is for you to look at"]
        else:
            why = why_on_line[fact.id]
        why += ["being read or saved"] if fact.id in protected else []
        if why:
            kept.append(Kept(fact.id, fact.step, ", ".join(why)))
    return kept


def may_be_thinned(
    facts: Sequence[StepFacts], rules: Retention, protected: Collection[str], kept: Collection[str]
) -> list[StepFacts]:
    """Return the steps of the current lineage that are *kept* and may have to be thinned, the newest first.

    Which of them are whole is not known here: the newest `Retention.optimizer` that are, and the newest verified of those,
    stay so (`aiockpt.engine.maintenance`). One that is being read or saved is left for later, and so is a damaged one, or
    one with numbers that are not finite: it must not be kept whole in place of one that a run can resume from.
    """
    if rules.optimizer is None:
        return []
    line = _that_count([fact for fact in lineage(facts) if not fact.damaged])
    return [fact for fact in line if fact.id in kept and fact.id not in protected]


def _that_count(line: Sequence[StepFacts]) -> Sequence[StepFacts]:
    """Return the steps of *line* that are finite; all of them where no step is: then it is normal for this state."""
    return [fact for fact in line if fact.finite] or line


def _reasons(line: Sequence[StepFacts], rules: Retention) -> dict[str, list[str]]:
    """Return for each step of the current lineage what keeps it; nothing for one that is to go."""
    if rules.last is None and rules.newer_than is None:
        return {fact.id: ["no rule deletes it"] for fact in line}
    why: dict[str, list[str]] = {fact.id: [] for fact in line}
    counting = _that_count(line)
    if line and line[0] not in counting[:1]:
        why[line[0].id].append(f"the newest, though it {_NOT_FINITE}")
    for fact in counting[: rules.last or 1]:
        newest = "the newest" if counting[0] is line[0] else "the newest finite"
        why[fact.id].append(newest if fact is counting[0] else f"among the last {rules.last}")
    for fact in line:
        if rules.every and fact.step % rules.every == 0:
            why[fact.id].append(f"a multiple of {rules.every}")
        if rules.newer_than and (fact.age_s is None or fact.age_s < parse_seconds(rules.newer_than)):
            why[fact.id].append("of unknown age" if fact.age_s is None else f"newer than {_shown(rules.newer_than)}")
    if rules.best:
        best = _rank(counting, rules.best)[: rules.best.count]
        for step_id in best:
            why[step_id].append(f"among the best {rules.best.count} by {rules.best.metric}")
        if not best:  # its name may be misspelt, and the best step may be any of them
            for fact in line:
                why[fact.id].append(f"no step has the metric {rules.best.metric}")
    newest_verified = next((fact.id for fact in line if fact.verified), None)
    if newest_verified is not None:
        why[newest_verified].append("the newest verified")
    return why


def _shown(age: float | str) -> str:
    return age if isinstance(age, str) else duration(age)


def choose_best(facts: Sequence[StepFacts], rule: Best) -> StepFacts | None:
    """Return the step of the current lineage that `Retention.best` would keep first; None where no step has the metric."""
    line = _that_count([fact for fact in lineage(facts) if not fact.damaged])
    ranked = _rank(line, rule)
    return next((fact for fact in line if fact.id in ranked[:1]), None)


def _rank(line: Sequence[StepFacts], rule: Best) -> list[str]:
    """Return the ids of the steps that have the metric, the best first, of equal ones the oldest."""
    sign = 1 if rule.mode == "min" else -1
    measured = [(sign * value, fact.id) for fact in line if (value := fact.metrics.get(rule.metric)) is not None]
    return [step_id for _, step_id in sorted(measured)]
