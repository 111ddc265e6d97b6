"""The paper's first two observations: a label's share of the data against its accuracy, training loss against width."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray

from feddd.core.streams import stream
from feddd.experiments.config import Experiment
from feddd.experiments.results import Results
from feddd.experiments.running import build_world
from feddd.simulation.evaluation import evaluate
from feddd.simulation.shard import single_thread
from feddd.simulation.training import Local, Samples, Training, train
from feddd.world.datasets import ImageDataset

SHARES = (0.0, 0.01, 0.02, 0.04, 0.07, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)


@dataclass(frozen=True)
class LabelShare:
    """Accuracy on the test images of one label by a model trained where that label had this share of the samples."""

    label: int
    share: float
    accuracy: float


def label_share(
    experiment: Experiment, labels: Sequence[int], samples: int, epochs: int, data_dir: Path | None = None
) -> list[LabelShare]:
    """Train the experiment's model once per label and share, on so many samples at one place, and test that label."""
    world = build_world(experiment, data_dir)
    data = world.dataset
    assert isinstance(data, ImageDataset)
    settings = Training(epochs, world.training.batch_size, world.training.learning_rate)
    found = []
    for label in labels:
        of_label = data.test_labels == label
        images, truth = (torch.from_numpy(each[of_label]) for each in (data.inputs(data.test_images), data.test_labels))
        for share in SHARES:
            rng = stream(experiment.seed, "label-share", label, round(1000 * share))
            model = world.build_model()
            chosen = _mixture(data, label, share, samples, rng)
            with single_thread():
                train(model, _samples(data, chosen), Local(0, len(chosen), rng), settings)
                accuracy = evaluate(model, model.state_dict(), images, truth, data.classes).metric
            found.append(LabelShare(label, share, accuracy))
    return found


def _mixture(data: ImageDataset, label: int, share: float, samples: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return indices of so many training samples: this share of the label, the rest spread evenly over the others."""
    wanted = np.full(data.classes, (1.0 - share) * samples / (data.classes - 1))
    wanted[label] = share * samples
    parts = []
    for number, count in enumerate(np.round(wanted).astype(int)):
        places = np.flatnonzero(data.train_labels == number)
        parts.append(rng.choice(places, min(count, len(places)), replace=False))
    return np.concatenate(parts)


def _samples(data: ImageDataset, chosen: NDArray[np.int64]) -> Samples:
    inputs = torch.from_numpy(data.inputs(data.train_images[chosen]))
    return Samples(inputs, torch.from_numpy(data.train_labels[chosen]))


def loss_by_width(run: Results, label: str, widths: int) -> list[list[float]]:
    """Return the mean training loss per sub-model and round, [widths][rounds]; clients take the widths in turn."""
    losses: dict[tuple[int, int], list[float]] = {}
    for row in run.rows("clients", strategy=label, status="ok"):
        losses.setdefault((row["client"] % widths, row["round"]), []).append(row["train_loss"])
    rounds = sorted({number for _, number in losses})
    return [[fmean(losses[width, number]) for number in rounds] for width in range(widths)]
