"""Client apps for tests of the Flower carrier: the simulator's world, trained by the reference loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddd.core.granularity import Granularity
from feddd.experiments.running import label_counts_of
from feddd.flower import feddd_mod
from feddd.simulation.simulator import World
from feddd.testbed.apps import build_model, train_client
from feddd.world import models


def client_app(
    world: World,
    store: Path,
    changed: Callable[[dict[str, torch.Tensor]], None] | None = None,
    *,
    deaf: bool = False,
    stages: Sequence[Callable[..., Any]] = (),
    units: Granularity | None = None,
) -> ClientApp:
    """Node config "partition-id" says which client it is; `changed` may spoil what was trained.

    deaf: the train function does not care what the server tells it    stages, units: of its own that it knows
    """
    counts = label_counts_of(world)

    def label_counts(context: Context) -> list[int]:
        return counts[int(context.node_config["partition-id"])].tolist()

    makers = [lambda width=width: build_model(world, width) for width in range(models.widths(world.model))]
    app = ClientApp(mods=[feddd_mod(makers, store=store, label_counts=label_counts, stages=stages, units=units)])

    @app.train()
    def train_locally(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        number = int(message.content["config"]["server-round"])
        rules = {} if deaf else message.content["config"]
        after, metrics = train_client(world, client, number, message.content["arrays"].to_torch_state_dict(), rules)
        if changed:
            changed(after)
        content = RecordDict({"arrays": ArrayRecord(after), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app
