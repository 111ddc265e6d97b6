"""A tiny app for deployments in trouble: node 2 says nothing, or its train function raises."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.typing import ClientAppCallable
from flwr.serverapp import Grid, ServerApp
from torch import nn

from feddd import FedDD
from feddd.flower import FedDDStrategy, RoundFacts, attempts, feddd_mod

server = ServerApp()


def net() -> nn.Module:
    return nn.Linear(4, 3)


def trouble(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
    if context.run_config["trouble"] == "mute" and context.node_config["partition-id"] == 2:
        time.sleep(600)
    return call_next(message, context)


client = ClientApp(mods=[trouble, feddd_mod(net)])


@client.train()
def train(message: Message, context: Context) -> Message:
    if context.run_config["trouble"] == "raise" and context.node_config["partition-id"] == 2:
        raise ValueError("the data of this client is gone")
    metrics = MetricRecord({"train_loss": 1.0, "num-examples": 5})
    return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)


@server.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    attempts.PATIENCE = float(config["patience"])

    def note(facts: RoundFacts) -> None:
        line = {"moment": time.monotonic(), "seconds": facts.seconds, "failures": dict(facts.failures)}
        line["statuses"] = [dataclasses.asdict(upload)["status"] for upload in facts.uploads]
        with (Path(str(config["out"])) / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    strategy = FedDDStrategy(
        FedDD(),
        net(),
        deadline_seconds=float(config["deadline-seconds"]),
        quorum=int(config["quorum"]),
        min_clients=int(config["min-clients"]),
        on_round=note,
    )
    strategy.start(grid, ArrayRecord(net().state_dict()), int(config["rounds"]))
