"""A plain loop as PyTorch's tutorials have it: one process, torch's threads, `torch.optim.SGD`, client after client.

python torch_loop.py FOLDER: one round of FedAvg for every line on stdin, with a network of feddd's by name.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional

from feddd.world.models import build


def main() -> None:
    """Serve rounds."""
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    images = torch.from_numpy(np.load(folder / "images.npy")).view(-1, *spec["image_shape"])
    labels = torch.from_numpy(np.load(folder / "labels.npy"))
    model = build(spec["model"], spec["image_shape"], 10)
    optimiser = torch.optim.SGD(model.parameters(), lr=spec["learning_rate"])
    rng = np.random.default_rng(0)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sys.stdout.write(json.dumps({"ready": True, "name": "torch_loop", "version": torch.__version__}) + "\n")
    sys.stdout.flush()
    for _ in sys.stdin:
        begun = time.perf_counter()
        sums = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
        for client in range(spec["clients"]):
            model.load_state_dict(state)
            order = torch.from_numpy(rng.permutation(spec["samples"])) + client * spec["samples"]
            for chosen in order.split(spec["batch_size"]):
                loss = functional.cross_entropy(model(images[chosen]), labels[chosen])
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
            for name, tensor in model.state_dict().items():
                sums[name] += tensor
        state = {name: total / spec["clients"] for name, total in sums.items()}
        seconds = time.perf_counter() - begun
        sys.stdout.write(json.dumps({"seconds": seconds, "loss": float(loss.detach())}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
