"""FedDD with plain loops, to be read beside Algorithm 1 of the paper: ``python examples/feddd_by_hand.py``.

Selection, aggregation, allocation and payload sizes are written out here. From feddd come only the world (data, split,
initial weights) and its random streams, so that a test can hold every number against the library's.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import linprog
from torch import Tensor
from torch.nn import functional

from feddd.core.streams import stream
from feddd.world import datasets, models, partitions

SEED, CLIENTS, CLASSES, LAYERS = 0, 10, 10, ("fc1", "fc2", "fc3")
EPOCHS, BATCH_SIZE, LEARNING_RATE = 1, 32, 0.05
BUDGET, MAX_DROPOUT, PENALTY = 0.6, 0.8, 0.1  # A_server, D_max, δ relative to the full model's round time
DATA = datasets.load_images("fashion-mnist-mini")
PARTS = partitions.partition(DATA.train_labels[:2500], CLIENTS, "noniid-a", stream(SEED, "partition"), classes=CLASSES)
UPLINK_BITS_PER_S = stream(SEED, "uplink").uniform(1e4, 5e4, CLIENTS)
DOWNLINK_BITS_PER_S = stream(SEED, "downlink").uniform(4e4, 2e5, CLIENTS)
COMPUTE_SECONDS = stream(SEED, "compute").uniform(0.1, 10.0, CLIENTS)
Model = list[Tensor]  # a matrix per layer; row k is unit k: the weights of a neuron, then its bias
Mask = list[list[bool]]  # a row per layer: is unit k sent?


@dataclass(frozen=True)
class Record:
    """What one round did; lists have an entry per client."""

    model: Model
    accuracy: float
    clock_seconds: float
    rates: list[float]
    masks: list[Mask]
    upload_bytes: list[int]
    download_bytes: list[int]


def run(rounds: int, broadcast_every: int = 5) -> list[Record]:
    """Algorithm 1; a round is charged for the download that was sent after the round before."""
    images, tests = (torch.tensor(DATA.inputs(x)).flatten(1) for x in (DATA.train_images, DATA.test_images))
    labels, answers = torch.tensor(DATA.train_labels), torch.tensor(DATA.test_labels)
    samples = [len(part) for part in PARTS]
    shares = [[float((labels[part] == c).double().mean()) for c in range(CLASSES)] for part in PARTS]
    coverage = [sum(min(CLASSES * share, 1.0) for share in own) for own in shares]
    state = models.build("mlp", DATA.train_images.shape[1:], CLASSES, seed=SEED).state_dict()
    model = [torch.cat([state[f"{layer}.weight"], state[f"{layer}.bias"][:, None]], 1) for layer in LAYERS]  # W⁰
    everything = [[True] * len(layer) for layer in model]
    local, rates, downloads = [model] * CLIENTS, [0.0] * CLIENTS, [everything] * CLIENTS  # W_n = W⁰, D_n = 0
    clock_seconds, records = 0.0, []
    for t in range(1, rounds + 1):
        trained, losses, masks = [], [], []
        for n, part in enumerate(PARTS):  # steps 1 to 3: train, select, upload
            after, loss = train(local[n], images[part], labels[part], stream(SEED, "batches", t, n))
            trained.append(after)
            losses.append(loss)
            masks.append(select(local[n], after, rates[n]))
        model = aggregate(model, trained, masks, samples)  # step 4
        upload_bytes, download_bytes = ([payload_bytes(model, mask) for mask in way] for way in (masks, downloads))
        down = 8.0 * np.array(download_bytes) / DOWNLINK_BITS_PER_S
        up = 8.0 * np.array(upload_bytes) / UPLINK_BITS_PER_S
        clock_seconds += float((down + COMPUTE_SECONDS + up).max())
        accuracy = float((logits(model, tests).argmax(1) == answers).float().mean())
        records.append(Record(model, accuracy, clock_seconds, rates, masks, upload_bytes, download_bytes))
        re = [m / sum(samples) * c * loss for m, c, loss in zip(samples, coverage, losses, strict=True)]  # U_n = U
        rates = allocate(re, model, payload_bytes(model, everything))  # step 5
        downloads = masks if t % broadcast_every != 0 else [everything] * CLIENTS  # step 6
        local = [merge(model, own, mask) for own, mask in zip(trained, downloads, strict=True)]  # step 7
    return records


def logits(model: Model, pixels: Tensor) -> Tensor:
    """The network: linear layers with ReLU between."""
    for layer in model[:-1]:
        pixels = functional.linear(pixels, layer[:, :-1], layer[:, -1]).relu()
    return functional.linear(pixels, model[-1][:, :-1], model[-1][:, -1])


def train(before: Model, images: Tensor, labels: Tensor, rng: np.random.Generator) -> tuple[Model, float]:
    """Ŵ and the mean loss over all samples processed."""
    model, losses = [layer.clone().requires_grad_() for layer in before], []
    rng.integers(2**63)  # the library draws a seed for stochastic layers here; the MLP has none
    orders = [torch.tensor(rng.permutation(len(labels))) for _ in range(EPOCHS)]
    for batch in (batch for order in orders for batch in torch.split(order, BATCH_SIZE)):
        loss = functional.cross_entropy(logits(model, images[batch]), labels[batch], reduction="none")
        for layer, gradient in zip(model, torch.autograd.grad(loss.mean(), model), strict=True):
            layer.data -= LEARNING_RATE * gradient
        losses.append(loss.detach())
    return [layer.detach() for layer in model], float(torch.cat(losses).double().mean())


def select(before: Model, after: Model, rate: float) -> Mask:
    """Algorithm 2: in every layer the N_l (1 − D) units with the largest ‖ΔW ⊙ Ŵ ⊘ W‖."""
    mask = []
    for old, new in zip(before, after, strict=True):
        w, trained, units = old.double(), new.double(), len(old)
        floor = 1e-3 * float(w.square().mean().sqrt())  # |W| is not taken smaller than this
        importance = [float(((trained[k] - w[k]) * trained[k] / w[k].abs().clamp(floor)).norm()) for k in range(units)]
        best_first = sorted(range(units), key=importance.__getitem__, reverse=True)
        kept = best_first[: max(1, math.floor(units * (1 - rate) + 0.5))]
        mask.append([k in kept for k in range(units)])
    return mask


def payload_bytes(model: Model, mask: Mask) -> int:
    """16 bytes of header, a bit per unit in words of four bytes, and four bytes per value sent."""
    values = sum(sum(kept) * layer.shape[1] for layer, kept in zip(model, mask, strict=True))
    return 16 + 4 * math.ceil(sum(len(kept) for kept in mask) / 32) + 4 * values


def aggregate(previous: Model, trained: list[Model], masks: list[Mask], samples: list[int]) -> Model:
    """Eq. 4: each unit over the clients that sent it; what nobody sent stays."""
    model = [layer.clone() for layer in previous]
    for i, layer in enumerate(model):
        for k in range(len(layer)):
            senders = [n for n in range(CLIENTS) if masks[n][i][k]]
            if senders:
                total = torch.stack([samples[n] * trained[n][i][k].double() for n in senders]).sum(0)
                layer[k] = total / sum(samples[n] for n in senders)
    return model


def allocate(contribution: list[float], model: Model, full_bytes: int) -> list[float]:
    """Eqs. 14 and 15; the unknowns are D_1 … D_N and T, and U_n is the same for everybody."""
    per_bit = 1 / UPLINK_BITS_PER_S + 1 / DOWNLINK_BITS_PER_S
    droppable_seconds = 32 * sum(layer.numel() for layer in model) * per_bit
    full_seconds = COMPUTE_SECONDS + 8 * full_bytes * per_bit
    objective = [*(PENALTY * full_seconds.max() * re for re in contribution), 1.0]  # δ Σ re_n D_n + T
    in_time = np.column_stack([np.diag(-droppable_seconds), -np.ones(CLIENTS)])  # full − droppable · D_n ≤ T
    dropped, share = [[1.0] * CLIENTS + [0.0]], [(1 - BUDGET) * CLIENTS]  # Σ U_n (1 − D_n) = A Σ U_n
    bounds = [(0.0, MAX_DROPOUT)] * CLIENTS + [(None, None)]
    solution = linprog(objective, in_time, -full_seconds, dropped, share, bounds)
    return [float(rate) for rate in solution.x[:-1]]


def merge(model: Model, own: Model, mask: Mask) -> Model:
    """Eqs. 5 and 6: the global values where the mask is true, its own trained values elsewhere."""
    return [torch.where(torch.tensor(kept)[:, None], w, mine) for kept, w, mine in zip(mask, model, own, strict=True)]


if __name__ == "__main__":
    torch.set_num_threads(1)  # the matrices are small
    for number, record in enumerate(run(rounds=12), 1):
        megabytes = sum(record.upload_bytes + record.download_bytes) / 1e6
        print(f"round {number:2}: {record.accuracy:6.1%}  {record.clock_seconds:7.1f} s  {megabytes:5.2f} MB")
