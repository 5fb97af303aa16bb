"""Publication beside a training: the bytes of a version by the learning rate, and the time that it takes from the training.

*deltas*: a decoder with float32 weights is trained by AdamW on text of a Markov chain, warmed up first, so that moments are
settled. From the same state it goes on at each of five learning rates, and each step is saved and published in bfloat16.
*By hand* is one `zstd.compress` at level 1 of each tensor's XOR: the frames alone, without a header that names them.

*publishing_steps*: one process trains, and saves every step, in blocks that take turns: without publication, with
`publish=`, and beside a process that follows. A block is timed to the end of its last step; what is published later, while
nothing trains, costs the training nothing.
"""

from __future__ import annotations

import copy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import aiockpt
from aiockpt.publish.frames import load_zstd
from benchmarks.measure.every import Training
from benchmarks.report import Samples
from benchmarks.visit import Outcome, Turn

RATES = ("1e-6", "3e-6", "1e-5", "3e-5", "2e-4")
WARM_RATE = 3e-4
LENGTH = 64
SUCCESSORS = 20
"""Words that may follow a word; which ones come is Zipf's law, as in text."""


class Decoder(nn.Module):
    """A small language model: embeddings that are tied, and blocks of attention and a network of two layers."""

    def __init__(self, words: int, width: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, width // 32, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True, bias=False
            )
            for _ in range(layers)
        )
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(text.shape[1])
        hidden = self.embed(text)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return functional.linear(hidden, self.embed.weight)


class LanguageTraining:
    """Training of a decoder of *size_bytes* of float32 weights."""

    def __init__(self, size_bytes: int, batch: int) -> None:
        torch.manual_seed(0)
        width = 512 if size_bytes >= 64 << 20 else 64
        words = 16 * width
        layers = max(1, (size_bytes // 4 - words * width) // (12 * width * width))
        self.model = Decoder(words, width, layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=WARM_RATE)
        self._batch, self._words = batch, words
        odds = 1 / torch.arange(1, words + 1)
        self._next = torch.multinomial(odds, words * SUCCESSORS, replacement=True).view(words, SUCCESSORS)
        self._odds = 1 / torch.arange(1, SUCCESSORS + 1)

    def step(self) -> None:
        """Train one step on new text."""
        words = torch.randint(self._words, (self._batch,))
        text = [words]
        for _ in range(LENGTH):
            words = self._next[words, torch.multinomial(self._odds, self._batch, replacement=True)]
            text.append(words)
        batch = torch.stack(text, 1)
        scores = self.model(batch[:, :-1])
        self.optimizer.zero_grad()
        loss: Any = functional.cross_entropy(scores.flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def set_rate(self, rate: float) -> None:
        """Train at another learning rate from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate


def deltas(turn: Turn, outcome: Outcome) -> None:
    """Measure the bytes of versions at each learning rate, and those of the same work by hand."""
    training = LanguageTraining(turn.size_bytes, turn.settings["batch"])
    for _ in range(turn.settings["warm_steps"]):
        training.step()
    folder = Path(turn.folder)
    state = {"model": training.model, "optimizer": training.optimizer}
    options = aiockpt.Publish(folder / "pub", dtype="bfloat16", prefix="model")
    warm = copy.deepcopy((training.model.state_dict(), training.optimizer.state_dict()))
    with aiockpt.Checkpointer(folder / "run", retention=aiockpt.Retention(last=2)) as ckpt:
        step = 0
        for rate in turn.contenders:
            training.model.load_state_dict(warm[0])
            training.optimizer.load_state_dict(copy.deepcopy(warm[1]))  # which keeps the tensors that it is given
            training.set_rate(float(rate))
            names = ("changed_fraction", "delta_fraction", "delta_bytes", "frame_bytes", "hand_bytes")
            samples: Samples = {name: [] for name in names}
            before: dict[str, torch.Tensor] = {}
            for _ in range(turn.repetitions + 1):
                training.step()
                step += 1
                ckpt.save(step, state).result()
                done = ckpt.publish(step, options, full=not before).result()
                after = {name: _rounded(weight) for name, weight in training.model.named_parameters()}
                if before:
                    _compare(done, before, after, samples)
                before = after
            hand = zip(samples["frame_bytes"], samples["hand_bytes"], strict=True)
            samples["by_hand_ratio"] = [ours / theirs for ours, theirs in hand]
            outcome.add(turn, rate, samples)


def _rounded(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().bfloat16().view(torch.int16)


def _compare(
    done: aiockpt.Published, before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], samples: Samples
) -> None:
    """Add the figures of a version, whose weights are *after*, beside those of the same difference by hand."""
    assert done.kind == "delta"
    folder = Path(done.url.removeprefix("file://"))
    zstd = load_zstd()
    differing = {name: after[name] != old for name, old in before.items()}
    xors = {
        name: np.bitwise_xor(before[name].numpy(), after[name].numpy()) for name, one in differing.items() if one.any()
    }
    headers = sum(8 + int.from_bytes((folder / name).read_bytes()[:8], "little") for name in done.files)
    samples["changed_fraction"].append(
        sum(int(one.sum()) for one in differing.values()) / sum(one.numel() for one in differing.values())
    )
    samples["delta_bytes"].append(float(done.file_bytes))
    samples["delta_fraction"].append(done.file_bytes / done.weight_bytes)
    samples["frame_bytes"].append(float(done.file_bytes - headers))
    samples["hand_bytes"].append(float(sum(len(zstd.compress(xor.tobytes(), 1)) for xor in xors.values())))


# ---------------------------------------------------------------------- the time


@contextmanager
def _follower(run: Path, pub: Path) -> Iterator[Callable[[signal.Signals], None]]:
    """Follow *run* by `aiockpt publish`, at the lowest priority, from its first version on; yield what sends it a signal."""
    command = [sys.executable, "-m", "aiockpt.tools.cli.main", "publish", str(run), str(pub), "--follow"]
    options = ["--dtype", "bfloat16", "--prefix", "model", "--keep", "0"]
    with subprocess.Popen(["nice", "-n", "19", *command, *options], stdout=subprocess.DEVNULL) as process:
        try:
            while not _count(pub):
                assert process.poll() is None, "the process that publishes has ended"
                time.sleep(0.1)
            yield process.send_signal
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()


def _count(pub: Path) -> int:
    """Return how many versions *pub* has had."""
    return 1 + max((int(index.parent.name[-6:]) for index in pub.glob("weight_v*/*.index.json")), default=-1)


def publishing_steps(turn: Turn, outcome: Outcome) -> None:
    """Measure blocks of steps that are saved, and of steps that are published, too, in turn.

    *published* is by `publish=`, in the same process; *followed* by another one at the lowest priority.
    """
    training = Training(turn.size_bytes, turn.settings["batch"])
    folder, step = Path(turn.folder), 0
    samples: dict[str, Samples] = {name: {"block_s": []} for name in turn.contenders}
    for name in samples.keys() - {"saved"}:
        samples[name] |= {"published_count": [], "lost_s": []}
    with aiockpt.Checkpointer(folder / "followed/run") as ckpt:
        ckpt.save(step, training.state)
    with _follower(folder / "followed/run", folder / "followed/pub") as send:
        for turns in range(turn.repetitions + 1):  # the first is not counted
            saved_s = 0.0
            for name in turn.contenders:
                send(signal.SIGCONT if name == "followed" else signal.SIGSTOP)
                run, pub = folder / name / "run", folder / name / "pub"
                options = aiockpt.Publish(pub, dtype="bfloat16", prefix="model", keep=0)
                publish = options if name == "published" else None
                with aiockpt.Checkpointer(run, retention=aiockpt.Retention(last=2), publish=publish) as ckpt:
                    before, begun_s = _count(pub), time.perf_counter()
                    for _ in range(turn.settings["steps"]):
                        step += 1
                        training.step()
                        ckpt.save(step, training.state)
                    block_s, count = time.perf_counter() - begun_s, _count(pub) - before
                saved_s = saved_s or block_s
                if turns:
                    samples[name]["block_s"].append(block_s)
                if turns and name != "saved":
                    samples[name]["published_count"].append(float(count))
                    samples[name]["lost_s"].append((block_s - saved_s) / max(1, count))
    for name, found in samples.items():
        outcome.add(turn, name, found)
