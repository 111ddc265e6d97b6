"""Time of one round of federated averaging in Flower: its simulation engine on Ray, the Message API and `FedAvg`.

Run by an interpreter that has Flower with its simulation: `python flower.py FOLDER`. The folder holds the work
(`spec.json`, `images.npy`, `labels.npy`, `weight0.npy`, `bias0.npy`, …); every line on stdin asks for one round,
answered by one JSON line. There is one actor per core; a round lasts from the start of `configure_train` to the end of
`aggregate_train`. Before "ready" a query to every client starts the actors and makes them map the data.
"""

import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")
os.environ.update(FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION="1")

import flwr
import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn

client_app = ClientApp()


@cache
def load(folder: str) -> tuple[Tensor, Tensor]:
    """Return images and labels of all clients, mapped once per process."""
    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to them
    images, labels = (np.load(Path(folder, f"{name}.npy"), mmap_mode="r") for name in ("images", "labels"))
    return torch.from_numpy(images), torch.from_numpy(labels)


def build(state: dict[str, Tensor]) -> nn.Sequential:
    """Return the network with these weights and biases."""
    modules: list[nn.Module] = []
    for weight in list(state.values())[::2]:
        modules += [nn.Linear(weight.shape[1], weight.shape[0]), nn.ReLU()]
    network = nn.Sequential(*modules[:-1])
    network.load_state_dict(state)
    return network


@client_app.query()
def prepare(message: Message, context: Context) -> Message:
    """Load the data, and what PyTorch loads with the first optimizer of a process."""
    load(message.content["config"]["folder"])
    torch.optim.SGD([torch.zeros(1)])
    return Message(RecordDict(), reply_to=message)


@client_app.train()
def train(message: Message, context: Context) -> Message:
    """Run one epoch of SGD of one client."""
    torch.set_num_threads(1)
    config = message.content["config"]
    images, labels = load(config["folder"])
    network = build(message.content["arrays"].to_torch_state_dict())
    optimizer = torch.optim.SGD(network.parameters(), lr=config["learning_rate"])
    order = context.node_config["partition-id"] * config["samples"] + torch.randperm(config["samples"])
    for batch in order.split(config["batch_size"]):
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(images[batch]), labels[batch]).backward()
        optimizer.step()
    metrics = MetricRecord({"num-examples": config["samples"]})
    return Message(RecordDict({"arrays": ArrayRecord(network.state_dict()), "metrics": metrics}), reply_to=message)


class TimedFedAvg(FedAvg):
    """`FedAvg` that takes the time of a round and accepts no missing client."""

    start_time = seconds = 0.0

    def configure_train(self, *arguments: Any, **options: Any) -> Iterable[Message]:
        """Start the clock, then go on as ever."""
        self.start_time = time.perf_counter()
        return super().configure_train(*arguments, **options)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Aggregate as ever, then stop the clock."""
        replies = list(replies)
        result = super().aggregate_train(server_round, replies)
        self.seconds = time.perf_counter() - self.start_time
        if len(replies) < self.min_train_nodes or any(reply.has_error() for reply in replies):
            raise RuntimeError("not every client answered; Flower's log on stderr says why")
        return result


def main() -> None:
    """Answer every line on stdin with one round."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # nothing but answers goes to the caller
    logging.getLogger("flwr").setLevel(logging.WARNING)

    folder = Path(sys.argv[1]).resolve()
    spec = json.loads((folder / "spec.json").read_text())
    config = {"folder": str(folder)} | {key: spec[key] for key in ("samples", "batch_size", "learning_rate")}
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        names = [(i, kind) for i in range(spec["layers"]) for kind in ("weight", "bias")]
        state = {f"{2 * i}.{kind}": torch.from_numpy(np.load(folder / f"{kind}{i}.npy")) for i, kind in names}
        arrays = ArrayRecord(state)
        images, labels = (tensor[:2000] for tensor in load(str(folder)))
        while len(nodes := list(grid.get_node_ids())) < spec["clients"]:
            time.sleep(0.1)
        content = RecordDict({"config": ConfigRecord(config)})
        grid.send_and_receive([Message(content, node, MessageType.QUERY) for node in nodes], timeout=600)
        strategy = TimedFedAvg(fraction_evaluate=0.0, min_train_nodes=spec["clients"])
        answers.write(json.dumps({"ready": True, "name": "flower", "version": flwr.__version__}) + "\n")
        for _ in sys.stdin:
            arrays = strategy.start(grid, arrays, 1, timeout=600, train_config=ConfigRecord(config)).arrays
            network = build(arrays.to_torch_state_dict())
            loss = nn.functional.cross_entropy(network(images), labels).item()
            answers.write(json.dumps({"seconds": strategy.seconds, "loss": loss}) + "\n")

    with tempfile.TemporaryDirectory() as home:
        os.environ["FLWR_HOME"] = home
        run_simulation(server_app, client_app, spec["clients"], backend_config={"client_resources": {"num_cpus": 1}})


if __name__ == "__main__":
    import flower  # by this name, not as `__main__`, or the actors would get a new cache with every message

    flower.main()
