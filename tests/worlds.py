"""Small worlds for tests: real images, few clients, quick rounds."""

from __future__ import annotations

from typing import Any

from feddd.experiments.config import Experiment, parse_experiment


def experiment(**changes: Any) -> Experiment:
    """Twelve clients on 600 images of fashion-mnist-mini; sections given as dicts are merged into the defaults."""
    document: dict[str, Any] = {
        "name": "test",
        "rounds": 4,
        "targets": [0.2, 0.9],
        "data": {"dataset": "fashion-mnist-mini", "partition": "noniid-b", "train_limit": 600},
        "fleet": {"clients": 12},
        "training": {"batch_size": 16, "learning_rate": 0.05},
    }
    for key, value in changes.items():
        document[key] = document[key] | value if isinstance(document.get(key), dict) else value
    return parse_experiment(document)
