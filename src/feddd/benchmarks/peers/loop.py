"""A good loop without a framework: one process, torch's threads, an MLP's forward and backward pass written out.

python loop.py FOLDER: one round of FedAvg for every line on stdin; the folder is `write_work`'s.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


def train(
    weights: list[Tensor], biases: list[Tensor], images: Tensor, labels: Tensor, order: Tensor, batch: int, rate: float
) -> None:
    """One epoch in place, in the given order."""
    for start in range(0, len(labels), batch):
        chosen = order[start : start + batch]
        activations = [images.index_select(0, chosen)]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            activations.append(torch.addmm(bias, activations[-1], weight.t()).relu_())
        logits = torch.addmm(biases[-1], activations[-1], weights[-1].t())
        gradient = logits.softmax(1)
        target = labels.index_select(0, chosen).unsqueeze(1)
        gradient.scatter_add_(1, target, torch.full_like(target, -1, dtype=torch.float32))
        gradient /= len(chosen)
        for layer in range(len(weights) - 1, -1, -1):
            here = activations[layer]
            below = gradient.mm(weights[layer]) if layer else None
            weights[layer].addmm_(gradient.t(), here, alpha=-rate)
            biases[layer].add_(gradient.sum(0), alpha=-rate)
            if below is not None:
                gradient = below.mul_(here.sign())


@torch.no_grad()
def main() -> None:
    """Serve rounds."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    images = torch.from_numpy(np.load(folder / "images.npy"))
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    weights = [torch.from_numpy(np.load(folder / f"weight{n}.npy")) for n in range(spec["layers"])]
    biases = [torch.from_numpy(np.load(folder / f"bias{n}.npy")) for n in range(spec["layers"])]
    rng = np.random.default_rng(0)
    sys.stdout.write(json.dumps({"ready": True, "name": "loop", "version": torch.__version__}) + "\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        begun = time.perf_counter()
        sums = [torch.zeros_like(tensor) for tensor in (*weights, *biases)]
        for client in range(spec["clients"]):
            own = slice(client * spec["samples"], (client + 1) * spec["samples"])
            local = [tensor.clone() for tensor in (*weights, *biases)]
            mine, its = local[: len(weights)], local[len(weights) :]
            order = torch.from_numpy(rng.permutation(spec["samples"]))
            train(mine, its, images[own], labels[own], order, spec["batch_size"], spec["learning_rate"])
            torch._foreach_add_(sums, local)
        for tensor, total in zip((*weights, *biases), sums, strict=True):
            tensor.copy_(total / spec["clients"])
        seconds = time.perf_counter() - begun
        hidden = images[:2000]
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            hidden = torch.addmm(bias, hidden, weight.t())
            hidden = hidden.relu() if number < len(weights) - 1 else hidden
        loss = float(functional.cross_entropy(hidden, labels[:2000]))
        sys.stdout.write(json.dumps({"seconds": seconds, "loss": loss}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
