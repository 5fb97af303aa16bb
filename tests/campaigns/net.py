"""The net under a rebuilding: mutants drawn once by a fixed seed, that must die before and after.

    python -m tests.campaigns.net draw --count 300 --seed 27
    python -m tests.campaigns.net run --tree PATH --map PATH --processes 2
    python -m tests.campaigns.net again

`draw` writes the list, `run` tries each that has no verdict on a copy of `--tree` (the commit that they were drawn from) and
writes the list after each, so that a run that was cut off goes on. `again` looks for each that died in the tree of today,
in whatever file its function is now, and tries it: first by the test that killed it, then by all that run its line, where
there is a map. A function or a statement that changed is listed as *needs a hand*.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import msgspec

from tests.campaigns import covering
from tests.campaigns.mutants import MODULES, Mutants
from tests.campaigns.source_mutations import Mutation, mutations

LIST = Path(__file__).with_name("net.json")
ANYWHERE = ("aiockpt/**/*.py", "backends/*.py")
"""Where `again` looks for the functions."""


class Entry(msgspec.Struct, kw_only=True):
    """A mutant of the list; the fields that `Mutation` has, too, mean the same.

    Attributes:
        text: the line.
        verdict: "killed", "survived", or "" where it was not tried yet.
        killers: the test that failed, or those that did not end; node ids.
        tried: how many tests ran its line, and how many of them were tried.
    """

    file: str
    function: str
    kind: str
    new: str
    statement: str
    ordinals: tuple[int, int]
    line: int
    text: str
    verdict: str = ""
    killers: list[str] = []
    tried: tuple[int, int] = (0, 0)

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
    """Return the node id of *test* where its file lies now: base names of test files are unique."""
    file, colons, rest = test.partition("::")
    found = [root / file] if (root / file).exists() else list(root.glob(f"tests/**/{Path(file).name}"))
    return f"{found[0].relative_to(root).as_posix()}{colons}{rest}" if found else ""


def run(net: Net, path: Path, tree: Path, tests: covering.Covered, processes: int) -> None:
    """Try each mutant without a verdict on copies of *tree*, and write the list after each."""
    places: SimpleQueue[Mutants] = SimpleQueue()
    for _ in range(processes):
        places.put(Mutants(tree, MODULES, tests))
    shared = places.get()
    sources = sources_of(tree, MODULES)
    known = {(m.file, *entry_of(m, sources[m.file]).identity): m for m in shared.all}
    places.put(shared)
    lock = Lock()

    def one(number: int, entry: Entry) -> None:
        mutants, began_s = places.get(), time.monotonic()
        try:
            mutant = known[entry.file, *entry.identity]
            running, some = mutants.tests_of(mutant)
            killers = mutants.killers(mutant, some)
            with lock:
                entry.verdict = "killed" if killers else "survived"
                entry.killers, entry.tried = killers[:20], (len(running), len(some))
                net.write(path)
            _say(f"{number} {entry.verdict} {entry.file}:{entry.line} {time.monotonic() - began_s:.0f} s {killers[:1]}")
        except Exception as error:  # noqa: BLE001  the others go on, and this one is tried by the next run
            _say(f"{number} NOT TRIED {entry.file}:{entry.line} {error!r}")
        finally:
            places.put(mutants)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(lambda pair: one(*pair), [(n, e) for n, e in enumerate(net.drawn) if not e.verdict]))


def again(net: Net, tree: Path, tests: covering.Covered, skip: int = 0) -> Counter[str]:
    """Try each mutant that died on a copy of *tree* as it is now; return how many die, live and need a hand."""
    mutants, sources = Mutants(tree, ANYWHERE, tests), sources_of(tree, ANYWHERE)
    among = [(entry_of(mutant, sources[mutant.file]), mutant) for mutant in mutants.all]
    outcomes: Counter[str] = Counter()
    for number, entry in enumerate(net.drawn):
        if entry.verdict != "killed" or number < skip:
            continue
        found = find(entry, among)
        if isinstance(found, str):
            verdict = "needs a hand"
            detail = f"{found}: {entry.function}: {entry.text}"
        else:
            killers = [test for test in (today(test, tree) for test in entry.killers) if test]
            try:
                dies = (killers and mutants.killers(found, killers)) or mutants.killers(
                    found, mutants.tests_of(found)[1]
                )
                verdict = "dies" if dies else "LIVES"
                detail = "" if dies else found.diff(sources[found.file])
            except RuntimeError as error:  # its tests do not run on the tree as it is
                verdict, detail = "needs a hand", str(error)
        outcomes[verdict] += 1
        _say(f"{number} {verdict} {entry.file}:{entry.line} {detail}")
    return outcomes


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 when a mutant lives now that died before, or needs a hand."""
    parser = argparse.ArgumentParser(prog="python -m tests.campaigns.net")
    parser.add_argument("command", choices=("draw", "run", "again"))
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=27)
    parser.add_argument("--tree", type=Path, default=covering.ROOT, help="the checkout that is copied")
    parser.add_argument("--map", type=Path, help="which tests run a line; .bench/covering.json of the tree")
    parser.add_argument("--list", type=Path, default=LIST)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--skip", type=int, default=0, help="again: go on at this number of the list")
    options = parser.parse_args(arguments)
    if options.command == "draw":
        net = draw(sources_of(options.tree, MODULES), options.count, options.seed)
        net.write(options.list)
        _say(f"{len(net.drawn)} of {net.points - sum(net.not_worth.values())} worth killing, {net.points} in all")
        return 0
    net = msgspec.json.decode(options.list.read_bytes(), type=Net)
    path = options.map or options.tree / ".bench" / "covering.json"
    if options.command == "run":
        run(net, options.list, options.tree, covering.load_map(path), options.processes)
        _say(str(Counter(entry.verdict or "not tried" for entry in net.drawn)))
        return 0
    tests = covering.load_map(path) if path.exists() else covering.Covered({}, {})
    outcomes = again(net, options.tree, tests, options.skip)
    _say(str(dict(outcomes)))
    return int(outcomes.total() > outcomes["dies"])


if __name__ == "__main__":
    sys.exit(main())
