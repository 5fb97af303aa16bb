"""Arbitrary bytes: the decoders raise nothing but our own errors, in bounded time and memory.

A case is a run of inputs for one decoder: found by coverage with atheris (libFuzzer) where it is installed, in a child of
its own, because it ends its process; made by mutation else. Both start from the same valid documents.
"""

import importlib.util
import os
import random
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.campaigns.campaign import Campaign, Case, Outcomes, noted
from tests.campaigns.decoder_targets import TARGETS, Target
from tests.campaigns.mutations import change_bytes, change_document

MUTATED_RUNS = 200
GUIDED_RUNS = 20_000
MAX_SECONDS, MAX_BYTES = 20.0, 64 << 20
GUIDED_DEADLINE_S = 1800
FOUND_IN = Path(tempfile.gettempdir()) / "aiockpt-findings"
"""Where libFuzzer leaves the input that broke a decoder."""


def mutate(target: Target, seed: int) -> Outcomes:
    """Give a decoder mutations of what it knows."""
    dice = random.Random(seed)
    outcomes: Outcomes = Counter()
    for _ in range(MUTATED_RUNS):
        start = dice.choice(target.corpus)
        data = (
            change_document(start, dice)
            if start.startswith(b"{") and dice.random() < 0.5
            else change_bytes(start, dice)
        )
        with noted(lambda data=data: f"{target.name} of {data[:4000]!r}"):  # type: ignore[misc]
            outcomes[f"{target.name}: {_decode_within_limits(target, data)}"] += 1
    return outcomes


def _decode_within_limits(target: Target, data: bytes) -> str:
    tracemalloc.reset_peak()
    began_s = time.process_time()
    accepted = target.decode(data)
    assert time.process_time() - began_s < MAX_SECONDS, f"took more than {MAX_SECONDS:.0f} s"
    assert tracemalloc.get_traced_memory()[1] < MAX_BYTES, "took more than 64 MiB"
    return "accepted" if accepted else "refused"


def explore(target: Target, seed: int) -> Outcomes:
    """Let atheris look for inputs of a decoder that reach code which no other did."""
    FOUND_IN.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="aiockpt-corpus-") as corpus:
        for number, data in enumerate(target.corpus):
            Path(corpus, str(number)).write_bytes(data)
        command = [
            sys.executable,
            "-m",
            "tests.campaigns.guided",
            target.name,
            f"-runs={GUIDED_RUNS}",
            f"-seed={seed + 1}",
        ]
        command += ["-timeout=5", "-rss_limit_mb=2048", "-max_len=8192", f"-artifact_prefix={FOUND_IN}/", corpus]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=GUIDED_DEADLINE_S, check=False, env=os.environ
        )
    assert done.returncode == 0, f"{target.name}: {(done.stdout + done.stderr)[-4000:]}"
    return Counter({f"{target.name}: explored": GUIDED_RUNS})


def prepare_mutated() -> Case:
    tracemalloc.start()
    return _case(mutate)


def prepare_guided() -> Case:
    if importlib.util.find_spec("atheris") is None:
        raise SystemExit(
            "this campaign needs atheris: pip install atheris (its wheels are for Linux, CPython 3.11 to 3.13)"
        )
    return _case(explore)


def _case(look: Callable[[Target, int], Outcomes]) -> Case:
    targets = list(TARGETS.values())
    return lambda seed: look(targets[seed % len(targets)], seed)


MUTATED = Campaign(name="decoders", counts="inputs", prepare=prepare_mutated, smoke_count=2000)
GUIDED = Campaign(name="guided-decoders", counts="inputs", prepare=prepare_guided, smoke_count=0, apart=True)
