"""Time of one round of federated averaging in pfl: `SimulatedBackend`, `FederatedAveraging` and `PyTorchModel`.

Run by an interpreter that has pfl: `python pfl.py FOLDER`. The folder holds the work (`spec.json`, `images.npy`,
`labels.npy`, `weight0.npy`, `bias0.npy`, …); every line on stdin asks for one round, answered by one JSON line.
pfl keeps a user's samples in their order, so a new random order is drawn where it asks for the data of a user.
The backend is driven round by round, because `FederatedAveraging.run` evaluates every user in its first round.
"""

import importlib.metadata
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this file, which has the name of the framework

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.common_types import Population
from pfl.context import CentralContext
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import MinimizeReuseUserSampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn


class Network(nn.Sequential):
    """A network with the two functions pfl asks for."""

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """Return what training minimises."""
        return nn.functional.cross_entropy(self(images), labels)

    @torch.no_grad()
    def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
        """Return what evaluation reports; never asked for here."""
        return {"loss": Weighted(self.loss(images, labels).item() * len(labels), len(labels))}


def build(folder: Path, layers: int) -> Network:
    """Return the network with its initial weights."""
    modules: list[nn.Module] = []
    for i in range(layers):
        weight, bias = (torch.from_numpy(np.load(folder / f"{kind}{i}.npy")) for kind in ("weight", "bias"))
        linear = nn.Linear(weight.shape[1], weight.shape[0])
        linear.load_state_dict({"weight": weight, "bias": bias})
        modules += [linear, nn.ReLU()]
    return Network(*modules[:-1])


def main() -> None:
    """Answer every line on stdin with one round."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers goes to the caller

    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    clients, samples = spec["clients"], spec["samples"]
    images, labels = (torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("images", "labels"))

    def user(client: int) -> PyTorchTensorDataset:
        """Return the samples of one client in a new random order."""
        order = client * samples + torch.randperm(samples)
        return PyTorchTensorDataset((images[order], labels[order]), user_id=str(client))

    network = build(folder, spec["layers"])
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    users = FederatedDataset(user, MinimizeReuseUserSampler(list(range(clients))))
    backend = SimulatedBackend(training_data=users, val_data=users)
    algorithm = FederatedAveraging()
    training = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=spec["learning_rate"], local_batch_size=spec["batch_size"]
    )
    rounds = NNAlgorithmParams(
        central_num_iterations=1, evaluation_frequency=1, train_cohort_size=clients, val_cohort_size=None
    )
    version = importlib.metadata.version("pfl")
    answers.write(json.dumps({"ready": True, "name": "pfl", "version": version}) + "\n")

    for number, _ in enumerate(sys.stdin):
        start = time.perf_counter()
        context = CentralContext(
            current_central_iteration=number,
            do_evaluation=False,
            cohort_size=clients,
            population=Population.TRAIN,
            algorithm_params=rounds,
            model_train_params=training,
            seed=number,
        )
        statistics, metrics = backend.gather_results(model, algorithm, central_context=context)
        model, _ = algorithm.process_aggregated_statistics(context, metrics, model, statistics)
        seconds = time.perf_counter() - start
        with torch.no_grad():
            loss = network.loss(images[:2000], labels[:2000]).item()
        answers.write(json.dumps({"seconds": seconds, "loss": loss}) + "\n")


if __name__ == "__main__":
    main()
