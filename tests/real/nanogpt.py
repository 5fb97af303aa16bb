"""A script of nanoGPT's shape: globals, a config dict, iterations, batches drawn by torch.randint, a checkpoint dict.

Ported to aiockpt in the two ways that a user would: the checkpoint dict as it is (state dicts), or the objects themselves.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name that everybody uses

import aiockpt
from aiockpt.tools.examples.gpt import GPT, GPTSize

SIZE = GPTSize(layers=1, width=16, heads=2, context=8, batch=4, dropout=0.1)


def get_batch(data: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ix = torch.randint(len(data) - SIZE.context, (SIZE.batch,))
    x = torch.stack([data[i : i + SIZE.context] for i in ix.tolist()])
    y = torch.stack([data[i + 1 : i + 1 + SIZE.context] for i in ix.tolist()])
    return x, y


@torch.no_grad()
def estimate_loss(model: GPT, splits: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    model.eval()
    for split, data in splits.items():
        losses = torch.zeros(2)
        for k in range(2):
            x, y = get_batch(data)
            losses[k] = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        out[split] = losses.mean()
    model.train()
    return out


def get_lr(it: int, learning_rate: float) -> float:
    return learning_rate * min(1.0, (it + 1) / 4)


def main(form: str = "dict", *, rng: bool = True, fetched: bool = True) -> None:
    """Train to the end, from the newest checkpoint.

    Args:
        form: "dict" saves what nanoGPT gives to torch.save; "objects" the model and the optimizer themselves.
        rng: keep the random generators, too. nanoGPT does not.
        fetched: keep the batch that is fetched for the next iteration, too. nanoGPT does not.
    """
    learning_rate, max_iters, eval_interval = 1e-2, 12, 3
    config: dict[str, Any] = {
        "learning_rate": learning_rate, "max_iters": max_iters, "dataset": "letters", "compile": False, "betas": (0.9, 0.95),
        "wandb_run_name": None,
    }  # fmt: skip
    torch.manual_seed(1337)
    letters = torch.randint(256, (400,), generator=torch.Generator().manual_seed(5))
    splits = {"train": letters[:300], "val": letters[300:]}
    iter_num, best_val_loss = 0, 1e9
    model = GPT(SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95))
    model_args = {"n_layer": SIZE.layers, "n_embd": SIZE.width, "block_size": SIZE.context, "bias": False}

    def checkpoint() -> dict[str, Any]:
        objects: dict[str, Any] = {"model": model, "optimizer": optimizer}
        found = objects if form == "objects" else {name: held.state_dict() for name, held in objects.items()}
        found |= {"model_args": model_args, "iter_num": iter_num, "best_val_loss": best_val_loss, "config": config}
        found |= {"rng": aiockpt.RNG()} if rng else {}
        return found | ({"fetched": [x, y]} if fetched else {})

    with aiockpt.Checkpointer("out") as ckpt:
        x, y = get_batch(splits["train"])  # fetch the very first batch
        resumed = checkpoint()
        if ckpt.load(resumed).result() is not None:
            if form == "dict":
                model.load_state_dict(resumed["model"])
                optimizer.load_state_dict(resumed["optimizer"])
            iter_num, best_val_loss = resumed["iter_num"], resumed["best_val_loss"]
            x, y = resumed["fetched"] if fetched else get_batch(splits["train"])
        while iter_num <= max_iters:
            for group in optimizer.param_groups:
                group["lr"] = get_lr(iter_num, learning_rate)
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            x, y = get_batch(splits["train"])  # prefetch the next one
            loss.backward()  # type: ignore[no-untyped-call]  # so it is in torch
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            iter_num += 1
            if iter_num % eval_interval == 0:
                losses = estimate_loss(model, splits)
                best_val_loss = losses["val"] if losses["val"] < best_val_loss else best_val_loss  # type: ignore[assignment]
                ckpt.save(iter_num, checkpoint())


if __name__ == "__main__":
    main()
