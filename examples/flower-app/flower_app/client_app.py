"""The client: the train function is what it was with FedAvg; only `mods` is new."""

from __future__ import annotations

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from feddd.flower import feddd_mod
from flower_app.task import Net, load_data, train


def label_counts(context: Context) -> list[int]:
    """How many samples of each class this client has; it stays here, one number made from it is sent."""
    _, labels = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    return [int(count) for count in torch.bincount(labels, minlength=10)]


app = ClientApp(mods=[feddd_mod(Net, label_counts=label_counts)])


@app.train()
def train_fn(message: Message, context: Context) -> Message:
    """Full model in, full model out, a loss and a sample count."""
    model = Net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    images, labels = load_data(int(context.node_config["partition-id"]), int(context.node_config["num-partitions"]))
    loss = train(model, images, labels, float(message.content["config"]["learning-rate"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(labels)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)
