"""The server and the client app of an experiment: the simulator's world, method and training, carried by Flower."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from feddd.core.granularity import Granularity
from feddd.core.streams import stream
from feddd.core.units import units
from feddd.experiments.config import Experiment
from feddd.experiments.loading import load_experiment
from feddd.experiments.running import build_world, label_counts_of
from feddd.flower import FedDDStrategy, FixedLinks, Link, RoundFacts, feddd_mod
from feddd.flower.api import ArrayRecord, ClientApp, Context, Grid, Message, MetricRecord, RecordDict, ServerApp
from feddd.simulation.evaluation import evaluate
from feddd.simulation.optimizers import training_rules
from feddd.simulation.samples import make_samples
from feddd.simulation.shard import single_thread
from feddd.simulation.simulator import World
from feddd.simulation.training import Local, train
from feddd.strategies.fedprox import Proximal
from feddd.strategies.protocol import Upload
from feddd.wire.local import LocalRound, Rule, Scaler, start_rules
from feddd.world import models

server = ServerApp()


@lru_cache(maxsize=1)
def _world(path: str, data_dir: str) -> tuple[Experiment, World]:
    experiment = load_experiment(Path(path))
    return experiment, build_world(experiment, Path(data_dir) if data_dir else None, prove=False)


def _of(context: Context) -> tuple[Experiment, World]:
    config = context.run_config
    for folder in filter(None, str(config["import-folders"]).split(os.pathsep)):
        models.import_from(Path(folder))
    return _world(str(config["experiment"]), str(config["data-dir"]))


def build_model(world: World, width: int = 0) -> torch.nn.Module:
    """Return the network of the experiment, or one of its sub-models, as the simulator starts it."""
    return world.build_model(width)


def _granularity(world: World) -> Granularity | None:
    return None if world.units is None else models.import_object(world.units)


@server.main()
def main(grid: Grid, context: Context) -> None:
    """One strategy of the experiment; every round leaves a line in the out folder's rounds.jsonl."""
    config = context.run_config
    experiment, world = _of(context)
    section = next(one for one in experiment.strategy if one.label == config["strategy"])
    modules = [build_model(world, width) for width in range(models.widths(world.model))]
    out = Path(str(config["out"]))
    evaluations: dict[int, dict[str, Any]] = {}

    def test(number: int, arrays: ArrayRecord) -> MetricRecord | None:
        if number == 0:
            return None
        evaluations[number] = _evaluate(world, modules[0], arrays)
        return MetricRecord({"metric": evaluations[number]["metric"], "loss": evaluations[number]["loss"]})

    def note(facts: RoundFacts) -> None:
        with (out / "rounds.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(_line(facts, evaluations[facts.round])) + "\n")

    strategy = FedDDStrategy(
        section.build(),
        modules,
        seed=world.seed,
        deadline_seconds=float(config["deadline-seconds"]),
        min_clients=len(world.parts),
        links=links_of(world) if config["fixed-links"] else None,
        checkpoint=out / "server.safetensors",
        on_round=note,
        units=_granularity(world),
    )
    arrays = ArrayRecord(dict(modules[0].state_dict()))
    strategy.start(grid, arrays, int(config["rounds"]), evaluate_fn=test)


def links_of(world: World) -> FixedLinks:
    """Return what the simulator knows about its fleet."""
    devices = world.devices
    rows = zip(devices.uplink_bits_per_s, devices.downlink_bits_per_s, devices.compute_seconds, strict=True)
    return FixedLinks(
        {str(n): Link(float(up), float(down), float(compute)) for n, (up, down, compute) in enumerate(rows)}
    )


def _evaluate(world: World, module: torch.nn.Module, arrays: ArrayRecord) -> dict[str, Any]:
    count = len(world.dataset.test_targets)
    _, samples = make_samples(world.dataset, np.arange(0), world.objective, test=count)
    state = dict(arrays.to_torch_state_dict())
    with single_thread():
        found = evaluate(
            *(module, state, samples.between(0, count), samples.targets, world.classes),
            objective=world.objective,
        )
    accuracies = found.class_accuracy.tolist()
    return {"metric": found.metric, "accuracy": found.accuracy, "loss": found.loss, "classes": accuracies}


def _line(facts: RoundFacts, evaluation: dict[str, Any]) -> dict[str, Any]:
    """Return a round as JSON; what is not known is null."""
    return {
        "round": facts.round,
        "seconds": facts.seconds,
        "clock_seconds": facts.clock_seconds,
        "evaluation": evaluation,
        "clients": [_client(upload, facts) for upload in facts.uploads],
    }


def _client(upload: Upload, facts: RoundFacts) -> dict[str, Any]:
    known = upload.status == "ok"
    return {
        "client": int(facts.members[upload.client].name),
        "status": upload.status,
        "dropout": facts.dropout[upload.client],
        "kept_share": upload.kept_share if known else None,
        "train_loss": upload.train_loss if known else None,
        "samples": upload.samples if known else None,
        "upload_bytes": upload.upload_bytes,
        "download_bytes": upload.download_bytes,
        "mask": upload.mask.hex(),
        "turnaround_seconds": facts.turnaround[upload.client],
        "compute_seconds": facts.compute.get(upload.client),
    }


def _label_counts(context: Context) -> list[int]:
    found = label_counts_of(_of(context)[1])
    counts: list[int] = found[int(context.node_config["partition-id"])].tolist()
    return counts


def _mod(message: Message, context: Context, call_next: Callable[[Message, Context], Message]) -> Message:
    """feddd_mod for the model of the run's experiment."""
    _, world = _of(context)
    makers = [lambda width=width: build_model(world, width) for width in range(models.widths(world.model))]
    counts = _label_counts if world.label_counts() is not None else None
    return feddd_mod(makers, label_counts=counts, units=_granularity(world))(message, context, call_next)


client = ClientApp(mods=[_mod])


@client.train()
def train_fn(message: Message, context: Context) -> Message:
    """Full model in, full model out."""
    _, world = _of(context)
    state = message.content.array_records["arrays"].to_torch_state_dict()
    number = int(str(message.content.config_records["config"]["server-round"]))
    rules = message.content.config_records["config"]
    after, metrics = train_client(world, int(context.node_config["partition-id"]), number, state, rules)
    content = RecordDict({"arrays": ArrayRecord(after), "metrics": MetricRecord(metrics)})
    return Message(content, reply_to=message)


def train_client(
    world: World, client: int, number: int, state: Mapping[str, Tensor], config: Mapping[str, Any]
) -> tuple[dict[str, Tensor], dict[str, int | float | list[int] | list[float]]]:
    """Return the reference loop on one client's samples, with the simulator's batches of this round; model and metrics.

    config: may ask for a scaler of hidden layers or a proximal term, which the metrics confirm
    """
    (rules, confirmed), training = rules_of(config), world.training.in_round(number)
    model = build_model(world, client % models.widths(world.model))
    model.load_state_dict(state)
    part = world.parts[client]
    samples, _ = make_samples(world.dataset, part, world.objective)
    local = Local(0, len(part), stream(world.seed, "batches", number, client), rules)
    before = {name: tensor.detach().clone()[None] for name, tensor in model.named_parameters()}
    at = LocalRound(units(model), before, [{}], {}, torch.zeros(1), training.learning_rate)
    with single_thread():
        stepping = start_rules([rules + training_rules(training)], at)
        losses = train(model, samples, local, training, rules=stepping).double()
    return dict(model.state_dict()), {
        "train_loss": float(losses.mean()),
        "num-examples": len(part),
        "oort-statistic": float(losses.square().mean().sqrt()),
        **confirmed,
    }


def rules_of(config: Mapping[str, Any]) -> tuple[tuple[Rule, ...], dict[str, float]]:
    """Return the rules that a message's config asks for, and what confirms them."""
    known: dict[str, Callable[[float], Rule]] = {"hidden-scaler": Scaler, "proximal-mu": Proximal}
    asked = {key: float(config[key]) for key in known if key in config}
    return tuple(known[key](value) for key, value in asked.items()), asked
