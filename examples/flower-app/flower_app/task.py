"""The task, as any PyTorch project has it: a network, data, a training loop. Nothing here knows of FedDD."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from feddd.world.synthetic import make


class Net(nn.Module):
    """A small convolutional network with batch normalisation."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(32)
        self.fc = nn.Linear(32 * 7 * 7, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of a batch of 28 × 28 images."""
        hidden = functional.max_pool2d(functional.relu(self.norm1(self.conv1(images))), 2)
        hidden = functional.max_pool2d(functional.relu(self.norm2(self.conv2(hidden))), 2)
        logits: Tensor = self.fc(hidden.flatten(1))
        return logits


def load_data(partition: int, partitions: int) -> tuple[Tensor, Tensor]:
    """Images and labels of one client; put your own here."""
    data = make("synthetic-grey")
    mine = slice(partition, None, partitions)
    return torch.from_numpy(data.inputs(data.train_images[mine])), torch.from_numpy(data.train_labels[mine].copy())


def load_test_data() -> tuple[Tensor, Tensor]:
    """What the server tests on."""
    data = make("synthetic-grey")
    return torch.from_numpy(data.inputs(data.test_images)), torch.from_numpy(data.test_labels.copy())


def train(model: nn.Module, images: Tensor, labels: Tensor, learning_rate: float) -> float:
    """One epoch of SGD; the mean loss over all samples."""
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    model.train()
    total = 0.0
    for index in torch.randperm(len(labels)).split(32):
        loss = functional.cross_entropy(model(images[index]), labels[index])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += float(loss.detach()) * len(index)
    return total / len(labels)


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of images that are classified rightly."""
    model.eval()
    return float((model(images).argmax(1) == labels).float().mean())
