"""Client apps for tests of the Flower carrier: the simulator's world, trained by the reference loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddd.core.streams import stream
from feddd.flower import FixedLinks, Link, feddd_mod
from feddd.simulation.shard import single_thread
from feddd.simulation.simulator import World
from feddd.simulation.training import Local, Samples, train
from feddd.world import models, partitions


def build_model(world: World, width: int = 0) -> torch.nn.Module:
    return models.build(world.model, world.dataset.image_shape, world.dataset.classes, width, seed=world.seed)


def client_app(
    world: World, store: Path, changed: Callable[[dict[str, torch.Tensor]], None] | None = None
) -> ClientApp:
    """Node config "partition-id" says which client it is; `changed` may spoil what was trained."""
    counts = partitions.label_counts(world.dataset.train_labels, list(world.parts), world.dataset.classes)

    def label_counts(context: Context) -> list[int]:
        return [int(count) for count in counts[int(context.node_config["partition-id"])]]

    makers = [lambda width=width: build_model(world, width) for width in range(models.widths(world.model))]
    app = ClientApp(mods=[feddd_mod(makers, store=store, label_counts=label_counts)])

    @app.train()
    def train_locally(message: Message, context: Context) -> Message:
        client = int(context.node_config["partition-id"])
        number = int(message.content["config"]["server-round"])
        model = build_model(world, client % models.widths(world.model))
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        part = world.parts[client]
        data = world.dataset
        scale, shift = (torch.from_numpy(each)[:, None, None] for each in (data.scale, data.shift))
        images, labels = (torch.from_numpy(each[part]) for each in (data.train_images, data.train_labels))
        samples = Samples(images, labels, scale, shift)
        local = Local(0, len(part), stream(world.seed, "batches", number, client))
        with single_thread():
            losses = train(model, samples, local, world.training).double()
        after = dict(model.state_dict())
        if changed:
            changed(after)
        metrics = {
            "train_loss": float(losses.mean()),
            "num-examples": len(part),
            "oort-statistic": float(losses.square().mean().sqrt()),
        }
        content = RecordDict({"arrays": ArrayRecord(after), "metrics": MetricRecord(metrics)})
        return Message(content, reply_to=message)

    return app


def links_of(world: World) -> FixedLinks:
    """What the simulator knows about its fleet."""
    devices = world.devices
    return FixedLinks(
        {
            str(n): Link(
                float(devices.uplink_bits_per_s[n]),
                float(devices.downlink_bits_per_s[n]),
                float(devices.compute_seconds[n]),
            )
            for n in range(len(world.parts))
        }
    )
