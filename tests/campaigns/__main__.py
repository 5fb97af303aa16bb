"""`python -m tests.campaigns KIND --count N`: ask one question of docs/durability.md as often as there is time for.

The exit status is 0 when nothing was found, 1 when something was, 2 for a wrong call. ``--seed S`` repeats one case. The
report of ``--json`` is written after each case, and SIGTERM has it told before all ends.
"""

import argparse
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

import msgspec

from aiockpt.runtime.progress import write_whole
from tests.campaigns import (
    bit_flips,
    cancellations,
    decoders,
    epoch_ends,
    even_ranks,
    failing_calls,
    faults,
    histories,
    hostile_manifests,
    late_training,
    mutants,
    object_store,
    peer_memory,
    peer_schedules,
    power_cuts,
    preemptions,
    publishing,
    reads,
    restarts,
    rewinds,
    sigkill,
    sigkill_ranks,
    stalls,
    states,
    stragglers,
)
from tests.campaigns.campaign import Campaign, Case, Outcomes, Report, run

CAMPAIGNS = {
    campaign.name: campaign
    for module in (
        power_cuts, sigkill, sigkill_ranks, preemptions, late_training, even_ranks, epoch_ends, stragglers, faults,
        stalls, bit_flips, hostile_manifests, failing_calls, cancellations, object_store, reads, peer_memory,
        peer_schedules, publishing, restarts, rewinds, histories, states, mutants, decoders,
    )
    for campaign in vars(module).values()
    if isinstance(campaign, Campaign)
}  # fmt: skip
CASE_DEADLINE_S = 120.0
"""A case that takes longer hangs, and that is a finding."""
OWN_DEADLINES = (decoders.GUIDED, mutants.CAMPAIGN, faults.CAMPAIGN, stalls.CAMPAIGN)
"""These watch what they run by themselves: libFuzzer each input, the mutants each test, faults and stalls each launcher."""
TOLD_EVERY_S = 5.0


class _Progress:
    """Tells how far a campaign is, on standard error, and writes its report to *path*."""

    def __init__(self, count: int, path: Path | None) -> None:
        self._count, self._path = count, path
        self._told_s = time.monotonic()
        self._findings = 0
        self._report: Report | None = None

    def __call__(self, report: Report) -> None:
        self._report = report
        if self._path is not None:
            write_whole(self._path, json.dumps(msgspec.to_builtins(report), indent=2).encode() + b"\n")
        for finding in report.findings[self._findings :]:
            _say(f"FOUND with seed {finding.seed}:\n{finding.problem}")
            _say(f"again: python -m tests.campaigns {report.name} --seed {finding.seed}")
        self._findings = len(report.findings)
        if time.monotonic() - self._told_s >= TOLD_EVERY_S:
            self._told_s = time.monotonic()
            _say(f"{_sum(report)} of {self._count:,}, seed {report.last_seed}")

    def sum_up(self) -> None:
        """Tell all outcomes so far."""
        if (report := self._report) is None:
            return
        for outcome, times in report.outcomes.items():
            _say(f"{times:>12,}  {outcome}")
        _say(f"{_sum(report)}, seeds {report.first_seed}–{report.last_seed}: {len(report.findings)} findings")

    def end_on_sigterm(self) -> None:
        """Tell it also where the campaign is stopped; what cases fork has the signal's default."""

        def end(number: int, _frame: FrameType | None) -> None:
            _say("stopped")
            self.sum_up()
            sys.exit(128 + number)

        signal.signal(signal.SIGTERM, end)
        os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _sum(report: Report) -> str:
    rate = report.count / max(report.seconds, 1e-9)
    return f"{report.count:,} {report.counts} in {report.seconds:,.0f} s ({rate:,.0f}/s)"


def _limited(campaign: Campaign) -> Campaign:
    """Return *campaign* with a deadline for each case, kept by an alarm."""

    def expire(_number: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"the case still runs after {CASE_DEADLINE_S:g} s")

    def prepare() -> Case:
        case = campaign.prepare()
        signal.signal(signal.SIGALRM, expire)

        def limited(seed: int) -> Outcomes:
            signal.setitimer(signal.ITIMER_REAL, CASE_DEADLINE_S)
            try:
                return case(seed)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)

        return limited

    return campaign if campaign in OWN_DEADLINES else msgspec.structs.replace(campaign, prepare=prepare)


def main() -> int:
    """Run the campaign that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("kind", choices=CAMPAIGNS, metavar="KIND", help=" | ".join(CAMPAIGNS))
    parser.add_argument(
        "--count", type=int, help="how many things to look at; the small end that the tests run by default"
    )
    parser.add_argument("--first-seed", type=int, default=0, help="the seed of the first case")
    parser.add_argument("--seed", type=int, help="only the case of this seed")
    parser.add_argument("--json", type=Path, help="write the report there too")
    given = parser.parse_args()
    logging.getLogger("aiockpt").setLevel(logging.CRITICAL)  # of thousands of injected faults each is logged
    campaign = CAMPAIGNS[given.kind]
    count = campaign.smoke_count if given.count is None else given.count
    if given.seed is not None:
        given.first_seed, count = given.seed, 1
    progress = _Progress(count, given.json)
    progress.end_on_sigterm()
    report = run(_limited(campaign), count, first_seed=given.first_seed, tell=progress)
    progress.sum_up()
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
