"""What the tables of advice reach: every message with code in it is provoked by an entry, and names options that exist."""

import ast
import re
from importlib import import_module
from pathlib import Path

from tests.advice.messages import messages, sources
from tests.advice.test_frameworks import IN_FRAMEWORKS

TABLES = [
    import_module(f"tests.advice.{path.stem}").TABLE
    for path in Path(__file__).parent.glob("test_*.py")
    if path != Path(__file__)
]

UNTRIED = 8
"""Messages with a line of code that no entry of the tables provokes yet: it only falls."""

THEIRS = {
    "save_strategy", "save_on_each_node", "resume_from_checkpoint", "save_only_model", "project_dir", "checkpoint_id",
    "use_distributed_optimizer", "custom_load_fn", "keep_vars", "mesh_dim_names", "load_best_model_at_end", "multiplier",
    "in_order", "content", "unsafe_commit", "use_orig_params", "overlap_with_ddp", "part_bytes", "checksum", "endpoint_url",
    "ckpt_path", "load_optimizer_states",
}  # fmt: skip
"""Options of frameworks and of URLs, which messages name, too."""


def _parameters() -> set[str]:
    """Return the names of all parameters and fields of the product."""
    nodes = [node for path in sources() for node in ast.walk(ast.parse(path.read_text()))]
    fields = {node.target.id for node in nodes if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
    return fields | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_every_option_that_a_message_names_exists() -> None:
    known = _parameters() | THEIRS
    named = {
        (one.where, word)
        for one in messages()
        for word in re.findall(r"(?<![?&\w])([a-z_]{3,})=[…\[\"'{\dA-Z]", one.text)
    }
    assert not {(where, word) for where, word in named if word not in known}


def test_messages_without_an_entry_become_fewer() -> None:
    tried = {one for table in TABLES for entry in table for one in entry.tried}
    begins = tuple(IN_FRAMEWORKS)
    untried = {one for one in messages() if one not in tried and not one.text.startswith(begins)}
    assert len(untried) <= UNTRIED, "\n".join(sorted(f"{one.where}: {one.text}" for one in untried))
