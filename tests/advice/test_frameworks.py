"""The advice of the switches for frameworks, carried out where it is given, or by the tests that need the framework."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from aiockpt.integrations.dcp import AiockptReader, AiockptWriter
from tests.advice.carry_out import Entry, carry_out, names_of
from tests.advice.messages import messages

__all__ = ["AiockptReader", "AiockptWriter"]  # for lines
dcp: Any = import_module("torch.distributed.checkpoint")


class Odd:
    """An object that only pickle saves."""


@contextmanager
def as_an_error() -> Iterator[None]:
    """Raise what DCP raises, which is no Exception, as one."""
    try:
        yield
    except CheckpointException as error:
        raise RuntimeError(str(error)) from error


@as_an_error()
def write(writer: Any = None, **options: Any) -> None:
    """Save a tensor and an object that is no plain value with `dcp.save`."""
    state = {"tensor": torch.ones(2), "odd": Odd()}
    dcp.save(state, storage_writer=writer, no_dist=True, **options)


@as_an_error()
def read(reader: Any = None, names: tuple[str, ...] = ("tensor",), **options: Any) -> None:
    """Load what `write` saves."""
    state: dict[str, Any] = {"tensor": torch.zeros(2), "odd": Odd()}
    dcp.load({name: state[name] for name in names}, storage_reader=reader, no_dist=True, **options)
    assert torch.equal(state["tensor"], torch.ones(2))


IN_FRAMEWORKS = {
    "load_checkpoint(custom_load_fn": "deepspeed: the engine's methods",
    "load_checkpoint(…, load_opt": "deepspeed: a step of it",
    "attach(): name a place": "accelerate: an Accelerator",
    "load_state(): a hook of save": "accelerate: hooks of an Accelerator",
    "rank …: …… is not in": "transformers: two nodes",
    "no base is known for this model": "peft: a model",
    "%s: the order of a %s": "accelerate: its loaders",
    "attach(): the trials of a search": "transformers: a search",
    "attach(safetensors=True)": "peft: a model",
    "step %d has no %s (save_only_model": "transformers: a resume",
    "…: a fit of this process": "lightning: two fits",
    "a … must be notified of each batch": "lightning: its loops",
    "this Trainer is": "lightning: both packages",
    "storage_options: give options": "lightning: its CheckpointIO",
    "%s: all that this fit would": "lightning: a fit",
    "the checkpoint … Load with strict": "megatron: its bridge",
    "a parameter of shape": "megatron: sharded state dicts",
    "another framework has saved": "megatron: its optimizer",
}
"""Beginnings of messages that only the environments of `tests/frameworks` provoke, and what they need from there."""

PLACED = "write(AiockptWriter('dcp'))\n"
TABLE = [
    Entry("write(AiockptWriter())", r"give a place: (AiockptWriter\()\"/runs/7\"\), or", "write({}'dcp'))"),
    Entry("write(AiockptWriter())", r"or dcp\.save\(…, (checkpoint_id=)\S+\)", "write(AiockptWriter(), {}'dcp')"),
    Entry(PLACED + "read(AiockptReader())",
          r"give a place: AiockptReader\(\"/runs/7\"\), or dcp.load\(…, (checkpoint_id=)",
          "read(AiockptReader(), {}'dcp')"),
    Entry(PLACED + "read(AiockptReader('dcp'), ('tensor', 'odd'))", r"give AiockptReader\((trust_pickle=True)\)",
          "read(AiockptReader('dcp', {}), ('tensor', 'odd'))"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")  # by DCP, in one process
@pytest.mark.parametrize("entry", TABLE, ids=names_of(TABLE))
def test_the_line_runs(names: dict[str, Any], entry: Entry) -> None:
    carry_out(entry, names)


def test_what_needs_a_framework_is_a_message_still() -> None:
    assert all(any(one.text.startswith(begin) for one in messages()) for begin in IN_FRAMEWORKS)
