"""Figures of the source text: lines by folder, imports between files, and words of docstrings."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
CORE = (
    *("adapters", "data", "engine", "format", "lazy", "pipeline", "places/tiers", "planning", "policies", "ranks"),
    *("runtime", "session", "state", "storage"),
)
"""What a save and a load of one process, of ranks and of tiers need, beside the modules of the top, the probe of a call
and the local backend."""
GROUPS = ("places", "policies", "session", "tools")
"""Folders whose own folders are counted by themselves."""
APART = ("integrations", "testing")
"""Folders of the package that the product's lines do not count."""
PERSONS = re.compile(r"\b([Ww]ho|[Ww]hom|[Ww]hoever|[Nn]obody|[Ss]omebody|none)\b")

VERBS = {
    "tell",
    "told",
    "telling",
    "hear",
    "heard",
    "look",
    "meet",
    "met",
    "forget",
    "gave",
    "give",
    "given",
    "hurry",
    "hasten",
}
"""What parts of the program do not do: they emit, receive, list, match, release, return and expedite."""


class Source:
    """The Python files below *root* that ship, by their path: ``aiockpt/…`` and ``backends/…``."""

    def __init__(self, root: Path = ROOT) -> None:
        paths = [path for path in [*root.glob("aiockpt/**/*.py"), *root.glob("backends/*.py")] if not path.is_symlink()]
        found = sorted({path.relative_to(root).as_posix() for path in paths})
        self.texts = {name: (root / name).read_text() for name in found if not name.startswith("aiockpt/backends/")}
        self.trees = {name: ast.parse(text) for name, text in self.texts.items()}

    def lines(self, *parts: str) -> int:
        """Return the lines of all files whose path begins with one of *parts*."""
        return sum(text.count("\n") for name, text in self.texts.items() if name.startswith(parts))

    def folders(self) -> dict[str, list[str]]:
        """Return the files of each folder; those at the top are under ``.``."""
        found: dict[str, list[str]] = {}
        for name in self.texts:
            parts = name.split("/")
            inner = parts[1 : 3 if parts[1] in GROUPS else 2] if len(parts) > 2 else ["."]
            folder = "backends" if parts[0] == "backends" else "/".join(inner[: len(parts) - 2] or ["."])
            found.setdefault(folder, []).append(name)
        return found

    @cached_property
    def imports(self) -> Mapping[str, set[str]]:
        """The files that each file imports anywhere, in functions and for types alone too."""
        found = {name: set(self._imported(tree)) - {name} for name, tree in self.trees.items()}
        found["aiockpt/__init__.py"] = set()  # it imports a public name when that is first used
        return found

    def _imported(self, tree: ast.AST) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                # a package of ours may be named for a module in it
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            yield from filter(None, map(self._file_of, modules))

    def _file_of(self, module: str) -> str | None:
        parts = module.split(".")
        if parts[:2] == ["aiockpt", "backends"]:
            parts = parts[1:]
        if parts[0] not in ("aiockpt", "backends"):
            return None
        for end in (len(parts), len(parts) - 1):
            stem = "/".join(parts[:end])
            if f"{stem}.py" in self.texts:
                return f"{stem}.py"
            if f"{stem}/__init__.py" in self.texts:
                return f"{stem}/__init__.py"
        return None

    @cached_property
    def circles(self) -> list[list[str]]:
        """The groups of files that import each other, directly or over others."""
        return sorted(group for group in _components(self.imports) if len(group) > 1)

    @cached_property
    def single_users(self) -> list[str]:
        """The files that one file alone imports, which lies in the same folder."""
        users: dict[str, set[str]] = {}
        for name, imported in self.imports.items():
            for other in imported:
                users.setdefault(other, set()).add(name)
        alone = {name: next(iter(of)) for name, of in users.items() if len(of) == 1 and self.is_product(name)}
        return sorted(name for name, user in alone.items() if Path(name).parent == Path(user).parent)

    def is_product(self, name: str) -> bool:
        """Say whether a file counts among the product's modules."""
        return not name.startswith(tuple(f"aiockpt/{part}/" for part in APART)) and not name.endswith("__init__.py")

    @cached_property
    def docstrings(self) -> list[str]:
        """The docstrings of modules, classes and functions."""
        nodes = (node for tree in self.trees.values() for node in ast.walk(tree))
        with_one = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        return [text for node in nodes if isinstance(node, with_one) and (text := ast.get_docstring(node))]

    def questions(self) -> list[str]:
        """Return the modules whose docstring has a question in its first sentence."""
        return [name for name, tree in self.trees.items() if opens_with_question(tree)]

    def persons_per_1000_words(self) -> float:
        """Return how often docstrings speak of parts of the program as of persons."""
        words = sum(len(text.split()) for text in self.docstrings)
        return 1000 * sum(len(PERSONS.findall(text)) for text in self.docstrings) / words

    def persons_in_names(self) -> list[str]:
        """Return the functions, classes, arguments and attributes that are named for what persons do."""
        return sorted({name for tree in self.trees.values() for name in _names(tree) if VERBS & set(name.split("_"))})

    def comment_fraction(self) -> float:
        """Return the share of all lines that are comments of their own."""
        lines = [line.strip() for text in self.texts.values() for line in text.splitlines()]
        return sum(line.startswith("# ") and not line.startswith("# ---") for line in lines) / len(lines)


def opens_with_question(module: ast.Module) -> bool:
    """Return whether the docstring of a module has a question in its first sentence."""
    return re.match(r"[^.]*\?", ast.get_docstring(module) or "") is not None


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _components(graph: Mapping[str, set[str]]) -> Iterator[list[str]]:
    """Yield the strongly connected components of *graph* (Tarjan 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            at = stack.index(node)
            found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in index:
            visit(node)
    yield from found
