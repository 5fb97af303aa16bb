"""A small policy whose weights change a little in each step, by a rule: what any step's weights are is known."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import aiockpt
from aiockpt.convert.folder_layout import INDEX_NAME
from tests.small_run import small_checkpointer

Weights = dict[str, torch.Tensor]


def weights_of(step: int) -> Weights:
    """Return the weights of a step: those of step 0, with a few elements raised for each step since."""
    generator = torch.Generator().manual_seed(7)
    weights = {
        "embed.weight": torch.randn(64, 96, generator=generator),
        "layers.0.weight": torch.randn(96, 96, generator=generator),
        "layers.0.bias": torch.randn(96, generator=generator),
        "head.weight": torch.randn(10, 96, generator=generator),
        "frozen.weight": torch.randn(33, 5, generator=generator),
        "empty": torch.zeros(0, 3),
    }
    weights = {name: tensor.bfloat16() for name, tensor in weights.items()}
    for number in range(1, step + 1):
        weights["embed.weight"][number % 64, number % 96] += 1
        weights["layers.0.weight"].view(-1)[number::61] *= -1
        weights["layers.0.bias"][number % 96] += 2
        weights["head.weight"][number % 10] += 1
    return weights


class Policy(torch.nn.Module):
    """A module that has the weights of a step."""

    def __init__(self, step: int = 0) -> None:
        super().__init__()
        for name, tensor in weights_of(step).items():
            *path, leaf = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(leaf, torch.nn.Parameter(tensor, requires_grad=False))


def state_of(step: int) -> dict[str, Any]:
    """Return what a run saves at a step."""
    return {"model": Policy(step), "lr": 0.1}


def saved(root: Any, *steps: int) -> None:
    """Save some steps."""
    with small_checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step)).result()


def publish(root: Any, dest: Any, *steps: int, **options: Any) -> list[aiockpt.Published]:
    """Save and publish some steps."""
    full = options.pop("full", False)
    done = []
    with small_checkpointer(root) as ckpt:
        for step in steps:
            ckpt.save(step, state_of(step)).result()
            done.append(ckpt.publish(step, aiockpt.Publish(dest, **options), full=full).result())
    return done


def in_folder(folder: Path) -> Weights:
    """Return the weights of a Hugging Face folder, which must be whole."""
    assert (folder / INDEX_NAME).exists(), "the folder is no whole"
    found: Weights = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


def are_of(weights: Weights, step: int) -> bool:
    """Return whether weights are those of a step, bit by bit."""
    wanted = weights_of(step)
    return weights.keys() == wanted.keys() and all(torch.equal(weights[name], wanted[name]) for name in wanted)


def damage_all(folder: Path) -> None:
    """Change all bytes of the folder's weights; the headers stay."""
    (path,) = folder.glob("*.safetensors")
    data = path.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    path.write_bytes(data[:start] + bytes(byte ^ 255 for byte in data[start:]))


def received(url: Any, folder: Path, **options: Any) -> list[tuple[int, int]]:
    """Receive what there is; return (version, step) of each version, whose weights were compared."""
    seen = []
    for version in aiockpt.receive(url, folder, follow=False, **options):
        assert are_of(in_folder(version.folder), version.step), f"{version} has other weights"
        seen.append((version.version, version.step))
    return seen
