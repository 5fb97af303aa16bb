"""Asynchronous reinforcement learning: a trainer, and rollout workers that follow its weights. Kill any of them.

    python -m aiockpt.tools.examples.rl_async train /data/run-7
    python -m aiockpt.tools.examples.rl_async rollout /data/run-7 /dev/shm/policy-1     (any number, on any host)

A toy policy learns which of four actions is right in each of sixteen situations. The trainer saves every step, and each
commit is published; workers receive the newest version while they play, and leave batches of what they saw in a folder. A
batch that was played with weights of more than `MOST_STALE` steps ago is not trained. Each process goes on after a kill: the
trainer from its newest checkpoint, a worker from the folder of its weights.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import Any

import msgspec
import torch

import aiockpt

log = logging.getLogger(__name__)

SITUATIONS, ACTIONS = 16, 4
BATCH = 256
MOST_STALE = 4
PENDING = 6
"""Batches that wait to be trained; workers pause while there are more."""


class Batch(msgspec.Struct, frozen=True):
    """What was played with the weights of *step*; *chances* are those of the actions at that time."""

    step: int
    situations: list[int]
    actions: list[int]
    chances: list[float]
    rewards: list[float]


def make_policy() -> torch.nn.Module:
    """Return a policy that knows nothing."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Embedding(SITUATIONS, 32), torch.nn.Tanh(), torch.nn.Linear(32, ACTIONS))


# ---------------------------------------------------------------------- the rollout worker


async def rollout(run: Path, folder: Path) -> None:
    """Play with the newest weights until the trainer has ended."""
    policy = make_policy()
    played_with: list[int] = []  # the step of the weights; empty before the first
    async with asyncio.TaskGroup() as tasks:
        playing = tasks.create_task(play_on(run, folder.name, policy, played_with))
        receiving = tasks.create_task(follow(run, folder, policy, played_with))
        await playing
        receiving.cancel()


async def follow(run: Path, folder: Path, policy: torch.nn.Module, played_with: list[int]) -> None:
    """Keep the policy at the newest version."""
    async with aiockpt.receive(str(run / "policy"), folder, name=folder.name, every_s=0.05) as versions:
        async for version in versions:
            policy.load_state_dict(load_folder(version.folder))
            played_with[:] = [version.step]


def load_folder(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a Hugging Face folder; an engine has its own loader."""
    from safetensors.torch import load_file

    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


async def play_on(run: Path, name: str, policy: torch.nn.Module, played_with: list[int]) -> None:
    """Leave batches for the trainer, each under its name as a whole, until it has ended."""
    rollouts = run / "rollouts"
    rollouts.mkdir(parents=True, exist_ok=True)
    while not (run / "ended").exists():
        if not played_with or len(list(rollouts.glob("*.json"))) >= PENDING:
            await asyncio.sleep(0.01)
            continue
        hidden = rollouts / f".{name}"
        hidden.write_bytes(msgspec.json.encode(play(policy, played_with[0])))
        hidden.rename(rollouts / f"{os.urandom(6).hex()}.json")
        await asyncio.sleep(0)


@torch.no_grad()
def play(policy: torch.nn.Module, step: int) -> Batch:
    """Play a batch; the right action is the situation's number, modulo four."""
    situations = torch.randint(0, SITUATIONS, (BATCH,))
    chances = policy(situations).softmax(-1)
    actions = torch.multinomial(chances, 1)
    rewards = (actions[:, 0] == situations % ACTIONS).float()
    chosen = chances.gather(1, actions)[:, 0]
    return Batch(step, situations.tolist(), actions[:, 0].tolist(), chosen.tolist(), rewards.tolist())


# ---------------------------------------------------------------------- the trainer


async def train(run: Path, steps: int = 60) -> None:
    """Train what workers have played, from the newest checkpoint on."""
    policy = make_policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    state = {"policy": policy, "optimizer": optimizer, "rng": aiockpt.RNG()}
    publish = aiockpt.Publish(str(run / "policy"), keep=4)
    keep = aiockpt.Retention(last=2)
    async with aiockpt.Checkpointer(run / "steps", publish=publish, retention=keep) as ckpt:
        step = await ckpt.aresume(state)
        if step == 0:
            await ckpt.save(0, state)  # the first version: workers play with it
            step = 1
        for number in range(step, steps):
            batch = await next_batch(run / "rollouts", number)
            reward = improve(policy, optimizer, batch)
            await ckpt.save(number, state)
            log.info("step %d: reward %.3f, played with step %d", number, reward, batch.step)
    (run / "ended").touch()


async def next_batch(rollouts: Path, step: int) -> Batch:
    """Wait for a batch that is not too stale."""
    while True:
        if (batch := take_batch(rollouts, step)) is not None:
            return batch
        await asyncio.sleep(0.01)


def take_batch(rollouts: Path, step: int) -> Batch | None:
    """Return a batch, each once; those that are too stale, or of steps that were lost, are dropped."""
    for path in sorted(rollouts.glob("*.json")):
        batch = msgspec.json.decode(path.read_bytes(), type=Batch)
        path.unlink()
        if 0 < step - batch.step <= MOST_STALE:
            return batch
    return None


def improve(policy: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> float:
    """Do one step of policy gradient, weighted for the age of the batch; return its mean reward."""
    situations, actions = torch.tensor(batch.situations), torch.tensor(batch.actions)
    rewards = torch.tensor(batch.rewards)
    chances = policy(situations).softmax(-1).gather(1, actions[:, None])[:, 0]
    ratio = (chances / torch.tensor(batch.chances)).clamp(max=2.0)
    loss = -(ratio * (rewards - rewards.mean())).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


def main(arguments: list[str]) -> None:
    """Be the process that the arguments name."""
    logging.basicConfig(level=logging.INFO)
    work: Any = rollout(*map(Path, arguments[1:3])) if arguments[0] == "rollout" else train(Path(arguments[1]))
    asyncio.run(work)


if __name__ == "__main__":
    main(sys.argv[1:])
