"""Time of one round of federated averaging in FedLab: its standalone pipeline with `SGDSerialClientTrainer`.

Run by an interpreter that has FedLab: `python fedlab.py FOLDER`. The folder holds the work (`spec.json`, `images.npy`,
`labels.npy`, `weight0.npy`, `bias0.npy`, …); every line on stdin asks for one round, answered by one JSON line.
The data of a client come from a plain shuffling `DataLoader`, as in FedLab's own data sets.
"""

import json
import os
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which has the name of the framework

import fedlab
import numpy as np
import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.contrib.dataset.basic_dataset import FedDataset
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Clients(FedDataset):
    """The samples of all clients, client after client."""

    def __init__(self, images: Tensor, labels: Tensor, clients: int) -> None:
        super().__init__()
        self.num = clients
        shards = zip(images.chunk(clients), labels.chunk(clients), strict=True)
        self.datasets = [TensorDataset(*shard) for shard in shards]

    def get_dataset(self, id: int, type: str = "train") -> TensorDataset:
        """Return the samples of one client."""
        return self.datasets[id]

    def get_dataloader(self, id: int, batch_size: int, type: str = "train") -> DataLoader:
        """Return its batches in a new random order."""
        return DataLoader(self.get_dataset(id, type), batch_size=batch_size, shuffle=True)


class Pipeline(StandalonePipeline):
    """FedLab's loop over the rounds, which evaluates nothing."""

    def evaluate(self) -> None:
        """Evaluation is not part of the round."""


def build(folder: Path, layers: int) -> nn.Sequential:
    """Return the network with its initial weights."""
    modules: list[nn.Module] = []
    for i in range(layers):
        weight, bias = (torch.from_numpy(np.load(folder / f"{kind}{i}.npy")) for kind in ("weight", "bias"))
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        modules += [linear, nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def main() -> None:
    """Answer every line on stdin with one round."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers goes to the caller

    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    images, labels = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("images", "labels"))

    network = build(folder, spec["layers"])
    trainer = SGDSerialClientTrainer(network, spec["clients"])
    trainer.setup_dataset(Clients(images, labels, spec["clients"]))
    trainer.setup_optim(epochs=1, batch_size=spec["batch_size"], lr=spec["learning_rate"])
    handler = SyncServerHandler(network, global_round=0, sample_ratio=1.0)
    pipeline = Pipeline(handler, trainer)
    answers.write(json.dumps({"ready": True, "name": "fedlab", "version": fedlab.__version__}) + "\n")

    for _ in sys.stdin:
        handler.global_round += 1  # the pipeline runs until it has done this many
        start = time.perf_counter()
        pipeline.main()
        seconds = time.perf_counter() - start
        with torch.no_grad():
            loss = nn.functional.cross_entropy(handler.model(images[:2000]), labels[:2000]).item()
        answers.write(json.dumps({"seconds": seconds, "loss": loss}) + "\n")


if __name__ == "__main__":
    main()
