"""A small sharded training script (FSDP2) of which all ranks together take 8 samples a step, on any number of ranks.

torchrun --nproc-per-node 2 -m tests.prove.ranks_script
"""

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import aiockpt

SAMPLES, BATCH, EVERY, STEPS = 64, 8, 3, 14


def train(folder: str = "run") -> None:
    """Train to the end, from the newest checkpoint below *folder*."""
    size = distributed.get_world_size()
    torch.manual_seed(1)
    features = torch.randn(SAMPLES, 6)
    data = TensorDataset(features, features.sum(1, keepdim=True))
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    for module in (model[0], model[2], model):
        fully_shard(module)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loader = aiockpt.Loader(
        DataLoader(data, batch_sampler=aiockpt.ShardedSampler(SAMPLES, BATCH // size, drop_last=True))
    )
    state = {"model": model, "optimizer": optimizer, "loader": loader, "rng": aiockpt.RNG(), "epoch": 0}
    with aiockpt.Checkpointer(folder, every=EVERY) as ckpt:
        step = ckpt.resume(state)
        while step < STEPS:
            for inputs, targets in loader:
                loss = nn.functional.mse_loss(model(inputs), targets)
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
                optimizer.step()
                if step < STEPS:
                    ckpt.step(step, state)
                step += 1


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    train()
    distributed.destroy_process_group()
