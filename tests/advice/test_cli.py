"""The advice of the command line, carried out where it is given."""

from typing import Any

import pytest

from tests.advice.carry_out import Entry, carry_out, names_of

TABLE = [
    Entry("command('aiockpt inspect run best:kappa')", r"as in (best:kappa:max)",
          "command('aiockpt inspect run best:acc:max # {}')"),
    Entry("command('aiockpt inspect run 9')", r"no committed step 9; it has (\d+)", "command('aiockpt inspect run {}')"),
    Entry("command('aiockpt inspect .')", r"`(aiockpt ls)` there", "command('{} .')"),
    Entry("command('aiockpt prune run --every 2')", r"give (--last) N", "command('aiockpt prune run --every 2 {} 1')"),
    Entry("[(folder / 'pub' / 'weight_v000000').mkdir(parents=True), command('aiockpt prune pub --last 1')]",
          r"by (Publish\(keep=)N", "aiockpt.{}1, dest='pub')"),
    Entry("command('aiockpt rm run 1')", r"give (--yes)", "command('aiockpt rm run 1 {}')"),
    Entry("command('aiockpt convert run out --prefix modell')", r"did you mean (--prefix model)",
          "command('aiockpt convert run out {}')"),
    Entry("command('aiockpt convert run run --to torch')", r"name it, as (\S+)",
          "command('aiockpt convert run {} --to torch')"),
    Entry("command('aiockpt plan')", r"give (--parameters 7B)", "command('aiockpt plan {}')"),
    Entry("command('aiockpt bench run --sizes x')", r"write (4KiB), 16MiB",
          "command('aiockpt plan --parameters 1M --bandwidth {}')"),
]  # fmt: skip


@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)
