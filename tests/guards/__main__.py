"""`python -m tests.guards NAME…|--all`: take guards away, one by one, and see the test fail that is to notice."""

import argparse
import sys

from tests.guards.guard import Guard, Trial, read_guards


def main() -> int:
    """Try the guards that the command line names; a part of a name is enough."""
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a guard's name, or a part of it")
    parser.add_argument("--all", action="store_true", help="every guard of the list")
    given = parser.parse_args()
    chosen = [guard for guard in read_guards() if given.all or any(name in guard.name for name in given.names)]
    if not chosen:
        parser.error("no guard has such a name; --all tries all of them")
    return max(
        try_guards([guard for guard in chosen if guard.framework == framework], Trial(framework))
        for framework in sorted({guard.framework for guard in chosen})
    )


def try_guards(guards: list[Guard], trial: Trial) -> int:
    """Try guards in one environment; return the exit status."""
    for test in sorted({guard.test for guard in guards}):
        if not trial.passes(test):
            sys.stderr.write(f"{test} fails as it is\n")
            return 2
    unnoticed = 0
    for guard in guards:
        noticed, said = trial.is_noticed(guard)
        unnoticed += not noticed
        sys.stderr.write(f"{'noticed' if noticed else 'NOT NOTICED'}: {guard.name} ({guard.file})\n")
        if not noticed:
            sys.stderr.write(said[-2000:])
    return 1 if unnoticed else 0


if __name__ == "__main__":
    sys.exit(main())
