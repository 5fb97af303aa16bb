"""The net under a rebuilding: mutants drawn once by a fixed seed, that must die before and after.

    python -m tests.campaigns.net draw --count 300 --seed 27
    python -m tests.campaigns.net before --tree PATH
    python -m tests.campaigns.net after

`draw` writes the list. `before` tries each on a copy of `--tree`, the commit before the rebuilding, and `after` on a copy
of the tree of today, in whatever file its function is now: first by the tests that killed it, then by those that run its
line, where there is a map (`.bench/covering.json` of the tree). Both try what has no verdict yet and write the list after
each, so that a run that was cut off goes on; `--again` tries all that died. Where a function or a statement changed, the
list says by hand what the mutant is now, or that its code is gone; what it does not say is told as *not found*.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from tests.campaigns import covering
from tests.campaigns.covering import functions
from tests.campaigns.mutants import MODULES, Mutants
from tests.campaigns.source_mutations import Mutation, mutations

LIST = Path(__file__).with_name("net.json")
ANYWHERE = ("aiockpt/**/*.py", "backends/*.py")
"""Where the functions are looked for."""


class Verdict(msgspec.Struct, omit_defaults=True):
    """What became of a mutant in one tree.

    Attributes:
        outcome: "dies", "lives", "gone" where its code is, "not found", or "" where it was not tried.
        killers: the test that failed, or those that did not end; node ids.
        tried: how many tests ran its line, and how many of them were tried.
    """

    outcome: str = ""
    killers: list[str] = []
    tried: tuple[int, int] = (0, 0)


class Place(msgspec.Struct):
    """Where a mutant is now, found by hand: its file, and by what to replace each text, which is there once."""

    file: str
    edits: list[tuple[str, str]]

    def mutant(self, entry: Entry, source: str) -> Mutation | str:
        """Return the mutant in *source*, or why it is not there."""
        after = source
        for text, new in self.edits:
            if after.count(text) != 1:
                return f"{text!r} is {after.count(text)} times in {self.file}"
            after = after.replace(text, new)
        lines = zip(source.splitlines(), after.splitlines(), strict=False)
        line = next(number for number, (one, other) in enumerate(lines, 1) if one != other)
        name, begins = next((name, begins) for name, _, begins, ends in functions(source) if begins <= line <= ends)
        return Mutation(
            file=self.file,
            function=name,
            lines=(line - begins,),
            line=line,
            kind=entry.kind,
            key="",
            span=(0, len(source.encode())),
            new=after.encode(),
            not_worth="",
            statement="",
            ordinals=(0, 0),
        )


class Entry(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A mutant of the list; the fields that `Mutation` has, too, mean the same.

    Attributes:
        text: the line.
        before, after: what became of it in the tree before the rebuilding, and after.
        now: where it is after it, when no function and statement is the same; "" as a file: nowhere, the code is gone.
        why: the reason, where it lives or is gone.
    """

    file: str
    function: str
    kind: str
    new: str
    statement: str
    ordinals: tuple[int, int]
    line: int
    text: str
    before: Verdict = msgspec.field(default_factory=Verdict)
    after: Verdict = msgspec.field(default_factory=Verdict)
    now: Place | None = None
    why: str = ""

    @property
    def identity(self) -> tuple[object, ...]:
        """What is the same of a mutant wherever its function lies."""
        return self.function, self.kind, self.new, self.statement, tuple(self.ordinals)


class Net(msgspec.Struct):
    """The list: its seed, how many mutants there were, those of them that no test need notice by reason, those drawn."""

    seed: int
    points: int
    not_worth: dict[str, int]
    drawn: list[Entry]

    def write(self, path: Path) -> None:
        """Write it with a mutant a line, in one step."""
        head, _, _ = msgspec.json.encode(Net(self.seed, self.points, self.not_worth, [])).decode().rpartition("]")
        lines = ",\n".join(msgspec.json.encode(entry).decode() for entry in self.drawn)
        new = path.with_suffix(".new")
        new.write_text(f"{head}\n{lines}\n]}}\n")
        new.replace(path)


def entry_of(mutant: Mutation, source: str) -> Entry:
    """Return what the list says of *mutant*, which is not tried yet."""
    return Entry(
        file=mutant.file,
        function=mutant.function,
        kind=mutant.kind,
        new=mutant.new.decode().strip(),
        statement=mutant.statement,
        ordinals=mutant.ordinals,
        line=mutant.line,
        text=source.splitlines()[mutant.line - 1].strip(),
    )


def sources_of(root: Path, modules: Iterable[str]) -> dict[str, str]:
    """Return the text of each file of *modules*, by its path from *root*."""
    return {path.relative_to(root).as_posix(): path.read_text() for glob in modules for path in sorted(root.glob(glob))}


def draw(sources: dict[str, str], count: int, seed: int) -> Net:
    """Draw *count* mutants that are worth killing, each with the same chance."""
    every = [mutant for file, source in sources.items() for mutant in mutations(file, source)]
    worth = [mutant for mutant in every if not mutant.not_worth]
    worth.sort(key=lambda mutant: hashlib.blake2b(f"{seed} {mutant.key}".encode(), digest_size=8).digest())
    reasons = Counter(mutant.not_worth for mutant in every if mutant.not_worth)
    drawn = [entry_of(mutant, sources[mutant.file]) for mutant in worth[:count]]
    return Net(seed, len(every), dict(reasons.most_common()), drawn)


def find(entry: Entry, among: Sequence[tuple[Entry, Mutation]]) -> Mutation | str:
    """Return the mutant *entry* of today, or why it needs a hand; of several, the one in the file of the same name."""
    same = [(now, mutant) for now, mutant in among if now.identity == entry.identity]
    named = [pair for pair in same if Path(pair[0].file).name == Path(entry.file).name]
    exact = [pair for pair in same if pair[0].file == entry.file]
    for found in (exact, named, same):
        if len(found) == 1:
            return found[0][1]
    if same:
        return f"ambiguous: in {', '.join(sorted({now.file for now, _ in same}))}"
    files = sorted({now.file for now, _ in among if now.function == entry.function})
    return f"the statement is not in {', '.join(files)}" if files else "no such function"


def today(test: str, root: Path) -> str:
    """Return the node id of *test*, with all of its cases, where its file lies now; "" where it is gone, or renamed.

    Base names of test files are unique.
    """
    file, _, rest = test.partition("::")
    name = rest.partition("[")[0]
    found = [root / file] if (root / file).exists() else list(root.glob(f"tests/**/{Path(file).name}"))
    is_there = found and f"def {name.rpartition('::')[2]}(" in found[0].read_text()
    return f"{found[0].relative_to(root).as_posix()}::{name}" if is_there else ""


def attempt(
    net: Net, path: Path, tree: Path, tests: covering.Covered, when: str, *, again: bool = False
) -> Counter[str]:
    """Try mutants on a copy of *tree*, write the list after each, and return the counts of outcomes.

    Args:
        when: "before" or "after".
        again: try those that died, too.
    """
    mutants, sources = Mutants(tree, ANYWHERE, tests), sources_of(tree, ANYWHERE)
    among = [(entry_of(mutant, sources[mutant.file]), mutant) for mutant in mutants.all]
    for number, entry in enumerate(net.drawn):
        verdict: Verdict = getattr(entry, when)
        if verdict.outcome and not (again and verdict.outcome == "dies"):
            continue
        found: Mutation | str = find(entry, among)
        if when == "after" and entry.now is not None:
            found = entry.now.mutant(entry, sources.get(entry.now.file, "")) if entry.now.file else "gone"
        if isinstance(found, str):
            verdict.outcome, detail = ("gone" if found == "gone" else "not found"), f"{found}: {entry.text}"
        else:
            first = [test for one in (*verdict.killers, *entry.before.killers) if (test := today(one, tree))]
            _try(mutants, found, verdict, first)
            detail = verdict.killers[0] if verdict.killers else found.diff(sources[found.file])
        net.write(path)
        _say(f"{number} {verdict.outcome} {entry.file}:{entry.line} {detail}")
    return Counter(getattr(entry, when).outcome for entry in net.drawn)


def _try(mutants: Mutants, found: Mutation, verdict: Verdict, first: list[str]) -> None:
    running, some = mutants.tests_of(found)
    killers = (first and mutants.killers(found, first)) or mutants.killers(found, some)
    verdict.outcome, verdict.killers = ("dies" if killers else "lives"), killers[:20]
    verdict.tried = (len(running), len(some))


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a mutant lives after that died before, or is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.net")
    parser.add_argument("command", choices=("draw", "before", "after"))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--tree", type=Path, default=covering.ROOT, help="the checkout that is copied")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--again", action="store_true", help="also those that died")
    options = parser.parse_args(arguments)
    if options.command == "draw":
        net = draw(sources_of(options.tree, MODULES), options.count, options.seed)
        net.write(options.list)
        _say(f"{len(net.drawn)} of {net.points - sum(net.not_worth.values())} worth killing, {net.points} in all")
        return 0
    net = msgspec.json.decode(options.list.read_bytes(), type=Net)
    path = options.tree / ".bench" / "covering.json"
    tests = covering.load_map(path) if path.exists() else covering.Covered({}, {})
    _say(str(dict(attempt(net, options.list, options.tree, tests, options.command, again=options.again))))
    pairs = Counter((entry.before.outcome, entry.after.outcome) for entry in net.drawn)
    return int(bool(pairs["dies", "lives"] + pairs["dies", "not found"]))


if __name__ == "__main__":
    sys.exit(main())
