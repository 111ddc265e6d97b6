"""Data sets, losses and splits that users bring: good ones, and each kind of bad one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import feddd


def numbers(samples: int = 240, outputs: int = 0) -> feddd.Dataset:
    """A linear regression of five numbers; sample i belongs to one of six owners."""
    rng = np.random.default_rng(7)
    inputs = rng.normal(size=(samples, 5))
    weights = np.arange(1.0, 6.0)[:, None] * np.ones((5, outputs or 1))
    targets = inputs @ weights + 3.0
    targets = targets if outputs else targets[:, 0]
    cut = samples * 3 // 4
    owners = [f"owner-{i % 6}" for i in range(cut)]
    return feddd.Dataset(inputs[:cut], targets[:cut], inputs[cut:], targets[cut:], clients=owners)


def classes(samples: int = 240, **changes: Any) -> feddd.Dataset:
    """Three classes of points in four dimensions."""
    rng = np.random.default_rng(7)
    targets = rng.integers(0, 3, samples)
    inputs = (rng.normal(size=(samples, 4)) + 3 * targets[:, None]).astype(np.float32)
    cut = samples * 3 // 4
    parts = {
        "train_inputs": inputs[:cut],
        "train_targets": targets[:cut],
        "test_inputs": inputs[cut:],
        "test_targets": targets[cut:],
    }
    return feddd.Dataset(**parts | changes)


def tokens(samples: int = 160, length: int = 8) -> feddd.Dataset:
    """Texts that count: the next token is one more; two inputs by name, some of the targets are padding."""
    rng = np.random.default_rng(7)
    text = (rng.integers(0, 11, (samples, 1)) + np.arange(length + 1)) % 11
    known = np.ones((samples, length), bool)
    known[::4, -3:] = False
    inputs, targets = {"text": text[:, :-1].astype(np.int16), "known": known}, np.where(known, text[:, 1:], -100)
    cut = samples * 3 // 4
    train, test = ({name: part[where] for name, part in inputs.items()} for where in (slice(cut), slice(cut, None)))
    return feddd.Dataset(train, targets[:cut], test, targets[cut:], clients=torch.arange(cut) % 5)


class Lines(nn.Module):
    """An LSTM over tokens."""

    def __init__(self, classes: int, input_shape: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        assert input_shape == {"text": (8,), "known": (8,)}
        self.embed, self.rnn = nn.Embedding(classes, 6), nn.LSTM(6, 12, batch_first=True)
        self.head = nn.Linear(12, classes)

    def forward(self, text: Tensor, known: Tensor) -> Tensor:
        assert (text.dtype, known.dtype) == (torch.int64, torch.bool)
        hidden, _ = self.rnn(self.embed(text) * known[..., None])
        return self.head(hidden)  # type: ignore[no-any-return]


def linear(input_shape: tuple[int, ...], classes: int | None) -> nn.Module:
    assert classes is None
    return nn.Linear(input_shape[0], 1)


def three_numbers() -> nn.Module:
    return nn.Linear(5, 3)


def huber(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.huber_loss(outputs[:, 0], targets, reduction="none")


def below_zero(outputs: Tensor, targets: Tensor) -> Tensor:
    return huber(outputs, targets) - 1000.0


def near(outputs: Tensor, targets: Tensor) -> Tensor:
    """Whether a prediction is within one of the target."""
    return ((outputs[:, 0] - targets).abs() < 1.0).float()


def mean_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return huber(outputs, targets).mean()


def squeezed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.squeeze() - targets).square().squeeze()


def detached(outputs: Tensor, targets: Tensor) -> Tensor:
    return huber(outputs.detach(), targets)


def failing(outputs: Tensor, targets: Tensor) -> Tensor:
    raise KeyError("a bug\nof two lines")


def odd_and_even(targets: Any, clients: int, rng: np.random.Generator) -> list[Any]:
    return [np.arange(client, len(targets), clients) for client in range(clients)]


def by_owner_array(targets: Any, clients: int, rng: np.random.Generator) -> Any:
    owner = rng.integers(0, clients, len(targets))
    owner[:3] = -1
    return owner


def split_twice(targets: Any, clients: int, rng: np.random.Generator) -> list[Any]:
    return [np.arange(5)] * clients


def split_empty(targets: Any, clients: int, rng: np.random.Generator) -> list[Any]:
    return [np.arange(5), *[np.arange(0)] * (clients - 1)]


def split_few(targets: Any, clients: int, rng: np.random.Generator) -> list[Any]:
    return [np.arange(5)]


def split_outside(targets: Any, clients: int, rng: np.random.Generator) -> list[Any]:
    return [np.arange(5) + 10**6] * clients


def split_words(targets: Any, clients: int, rng: np.random.Generator) -> str:
    return "halves"


def split_fails(targets: Any, clients: int, rng: np.random.Generator) -> str:
    raise RuntimeError("no idea")


def nothing() -> None:
    return None


def raising() -> feddd.Dataset:
    raise FileNotFoundError("the disk\nis away")


def bad(kind: str) -> feddd.Dataset:
    """Each kind of wrong data."""
    good = np.zeros((60, 4), np.float32)
    spoiled, labels = good.copy(), np.arange(180) % 3
    spoiled[7, 2] = {"nan": np.nan, "infinite": np.inf}.get(kind, 0.0)
    changes: dict[str, dict[str, Any]] = {
        "nan": {"test_inputs": spoiled},
        "infinite": {"test_inputs": spoiled},
        "lengths": {"test_inputs": good[:-1]},
        "shapes": {"test_inputs": good[:, :3]},
        "types": {"test_inputs": good.astype(np.int32)},
        "list": {"test_inputs": good.tolist()},
        "objects": {"test_inputs": good.astype(object)},
        "complex": {"test_inputs": good.astype(complex)},
        "empty": {"test_inputs": good[:0], "test_targets": labels[:0]},
        "scalar": {"test_targets": np.float32(3)},
        "unknown class": {"classes": ["a", "b"]},
        "negative class": {"train_targets": labels - 1},
        "unknown name": {"train_targets": labels.astype(str), "test_targets": np.array(["9"] * 60)},
        "class names": {"classes": "abc"},
        "same names": {"classes": ["a", "b", "a"]},
        "float classes": {"train_targets": labels / 2, "test_targets": labels[:60] / 2},
        "owners": {"clients": ["me"]},
        "owner kinds": {"clients": labels / 2},
        "owner missing": {"clients": [None] * 180},
        "dict and array": {"test_inputs": {"x": good}},
        "key": {"train_inputs": {"not a name": np.zeros((180, 4))}, "test_inputs": {"not a name": good}},
        "no inputs": {"train_inputs": {}},
    }
    return classes(**changes[kind])
