"""Random number generators in the state: torch (CPU and CUDA), `random`, numpy. They resume exactly where they were.

This module also defines the values of one rank alone: an `RNG`, and any value that `per_rank` wraps.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from aiockpt.errors import UsageError

T = TypeVar("T")


class PerRank(Generic[T]):
    """A value that differs between ranks; ``load`` sets ``value``, or fills it where it has ``load_state_dict()``."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"per_rank({self.value!r})"


def per_rank(value: T) -> PerRank[T]:
    """Mark a value of the state as this rank's own; all other values are global, and ranks must agree on them."""
    return PerRank(value)


class RNG:
    """The random number generators of this process: torch on the CPU and all CUDA devices, `random`, numpy's global one.

    It holds no state itself: ``state_dict()`` reads the generators and ``load_state_dict()`` sets them. The program's own
    generators (``torch.Generator``, ``numpy.random.Generator``) are not covered: put their state into the state to save.

    Each rank has its own streams. When the number of ranks changes, a rank that the checkpoint has continues its stream, bit
    by bit. A new rank gets new streams, derived (`derive_state`) from its number, the step, and the state of one saved rank:
    its number modulo the number of saved ranks. So no new rank repeats the numbers of another, and the same resume always
    draws the same numbers. Streams of ranks that no longer exist are not used.
    """

    aiockpt_per_rank = True

    def __repr__(self) -> str:
        return "RNG()"

    def state_dict(self) -> dict[str, Any]:
        """Return the state of every generator, as bytes and numbers.

        CUDA is read only if it is initialised: before that no number was drawn from it, and reading would initialise it.
        """
        started = torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        return {
            "torch": torch.get_rng_state().numpy().tobytes(),
            "cuda": [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()] if started else [],
            "python": _read_python(),
            "numpy": _read_numpy(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set every generator of this process that is in *state*; devices that this process lacks are skipped.

        Raises:
            UsageError: *state* was not returned by `state_dict`, or is from an incompatible version.
        """
        try:
            devices = state["cuda"][: torch.cuda.device_count()] if state["cuda"] else []
            torch.set_rng_state(_to_tensor(state["torch"]))
            for device, data in enumerate(devices):
                _write_cuda(device, data)
            _write_python(state["python"])
            _write_numpy(state["numpy"])
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"the state of the random generators cannot be set: {error}") from error


def derive_state(state: Mapping[str, Any], rank: int, step: int) -> dict[str, Any]:
    """Return a new state of every generator for a rank that a checkpoint does not have.

    The seeds are digests of all arguments: equal arguments give equal streams, and any difference gives another one.

    Args:
        state: what `RNG.state_dict` returned on a rank that saved.
        rank: the new rank.
        step: of the checkpoint.

    Raises:
        UsageError: *state* was not returned by `RNG.state_dict`.
    """

    def seed(generator: str, index: int = 0, size_bytes: int = 8) -> int:
        text = f"{generator} {index} rank {rank} step {step}".encode()
        return int.from_bytes(hashlib.blake2b(content + text, digest_size=size_bytes).digest(), "little")

    try:
        content = hashlib.blake2b(repr(_sorted(state)).encode()).digest()
        words = [
            seed("numpy", size_bytes=32) >> shift & 0xFFFFFFFF for shift in range(0, 256, 32)
        ]  # as numpy takes them
        return {
            "torch": torch.Generator().manual_seed(seed("torch")).get_state().numpy().tobytes(),
            "cuda": [seed("cuda", device) for device in range(len(state["cuda"]))],
            "python": _read_python(random.Random(seed("python", size_bytes=32))),
            "numpy": _read_numpy(np.random.RandomState(words)),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"no stream of random numbers can be derived from the state of another rank: {error}"
        ) from error


def _sorted(value: Any) -> Any:
    """Return dicts as sorted lists of pairs, so that equal states have equal text."""
    if isinstance(value, Mapping):
        return [(key, _sorted(value[key])) for key in sorted(value)]
    return value


def _write_cuda(device: int, state: bytes | int) -> None:
    """Set a device's generator to a saved state (bytes), or to the seed of a derived stream (int)."""
    if isinstance(state, bytes):
        torch.cuda.set_rng_state(_to_tensor(state), device)
    else:
        with torch.cuda.device(device):
            torch.cuda.manual_seed(state)


def _to_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _read_python(generator: random.Random | None = None) -> dict[str, Any]:
    version, words, gauss = random.getstate() if generator is None else generator.getstate()
    return {"version": version, "words": array("I", words).tobytes(), "gauss": gauss}


def _write_python(state: dict[str, Any]) -> None:
    words = array("I")
    words.frombytes(state["words"])
    random.setstate((state["version"], tuple(words), state["gauss"]))


def _read_numpy(generator: np.random.RandomState | None = None) -> dict[str, Any]:
    read = np.random.get_state if generator is None else generator.get_state
    state: dict[str, Any] = dict(read(legacy=False))
    return {**state, "state": {key: _pack(value) for key, value in state["state"].items()}}


def _write_numpy(state: dict[str, Any]) -> None:
    np.random.set_state({**state, "state": {key: _unpack(value) for key, value in state["state"].items()}})


def _pack(value: Any) -> Any:
    return value.astype("<u4").tobytes() if isinstance(value, np.ndarray) and value.dtype == np.uint32 else value


def _unpack(value: Any) -> Any:
    return np.frombuffer(value, "<u4").astype(np.uint32) if isinstance(value, bytes) else value
