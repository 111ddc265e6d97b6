"""Who owns which samples: the paper's ways of splitting a training set over clients, as pure functions of a generator.

All kinds come down to one array, the owner of each sample ([M], −1 for a sample nobody gets).
"""

import math

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError, nearest

KINDS = ("iid", "noniid-a", "noniid-b", "imbalanced", "dirichlet", "quantity")
CLASSES_PER_CLIENT = 3
RARE_LABELS = (0, 1, 2)
RARE_SHARE = 0.4

_NOBODY = -1
# Few clients seldom own every class by chance (10 clients with one of 10 classes each: 1 draw in 2,756), and such a
# draw costs microseconds. Dealing out the samples costs milliseconds, and if it fails often it will go on failing.
_OWNERSHIP_TRIES = 100_000
_DEAL_TRIES = 100

Indices = NDArray[np.int64]
Generator = np.random.Generator


def partition(
    labels: Indices,
    clients: int,
    kind: str,
    rng: Generator,
    *,
    classes: int | None,
    classes_per_client: int | None = None,
    alpha: float = 0.5,
) -> list[Indices]:
    """Split samples over clients; the result holds each client's sample indices, sorted. Nobody is left empty.

    iid          a random permutation, split evenly
    noniid-a     each client owns 2 … `classes` classes, how many and which drawn uniformly; a class's samples are
                 split evenly over its owners
    noniid-b     the same with `classes_per_client` classes each (default 3)
    imbalanced   labels 0, 1, 2 keep 0.4 × the samples of the others (their mean); then as noniid-b
    dirichlet    each class is spread over the clients in shares drawn from Dirichlet(`alpha`)
    quantity     a random permutation, split in shares drawn from Dirichlet(`alpha`)

    labels: [M], 0 … classes − 1; where there are no classes (None) only the first and the last kind are possible
    """
    if kind not in KINDS:
        raise InputError(f"unknown partition {kind!r}; {nearest(kind.lower(), KINDS)}")
    if kind == "quantity":
        _check_clients(clients, len(labels))
        return _samples_of_each(_split_unevenly(len(labels), clients, alpha, rng), clients)
    if classes is None:
        if kind != "iid":
            raise InputError(
                f'partition {kind!r} goes by classes, and the targets are none; take "iid", "quantity" or "natural"'
            )
        _check_clients(clients, len(labels))
        return _samples_of_each(_split_evenly(len(labels), clients, rng), clients)
    _check_labels(labels, classes)
    by_class = [np.flatnonzero(labels == label) for label in range(classes)]
    if kind == "imbalanced":
        by_class = _thin_rare_labels(by_class, rng)
    _check_clients(clients, sum(len(samples) for samples in by_class))
    if kind == "iid":
        owner = _split_evenly(len(labels), clients, rng)
    elif kind == "dirichlet":
        owner = _spread(by_class, len(labels), clients, alpha, rng)
    else:
        fixed = None if kind == "noniid-a" else _classes_each(classes_per_client, classes)
        owner = _deal_classes(by_class, len(labels), clients, fixed, rng)
    return _samples_of_each(owner, clients)


def label_counts(labels: Indices, parts: list[Indices], classes: int) -> Indices:
    """Return how many samples of each class each client has: [clients, classes]."""
    client = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    label = labels[np.concatenate(parts)] if parts else np.empty(0, np.int64)
    return np.bincount(client * classes + label, minlength=len(parts) * classes).reshape(len(parts), classes)


def subsample(labels: Indices, limit: int, rng: Generator) -> Indices:
    """Sorted indices of `limit` samples drawn without replacement; all of them if there are no more than that."""
    if limit < 1:
        raise InputError(f"train_limit is {limit}, but must be at least 1")
    if limit >= len(labels):
        return np.arange(len(labels))
    return np.sort(rng.choice(len(labels), size=limit, replace=False))


def _check_labels(labels: Indices, classes: int) -> None:
    if len(labels) and not (labels.min() >= 0 and labels.max() < classes):
        raise InputError(
            f"labels range from {labels.min()} to {labels.max()}, but {classes} classes allow 0 to {classes - 1}"
        )


def _check_clients(clients: int, samples: int) -> None:
    if clients < 1:
        raise InputError(f"clients is {clients}, but must be at least 1")
    if clients > samples:
        raise InputError(f"{clients} clients cannot share {samples} samples: at most one client per sample")


def _classes_each(classes_per_client: int | None, classes: int) -> int:
    each = CLASSES_PER_CLIENT if classes_per_client is None else classes_per_client
    if not 1 <= each <= classes:
        raise InputError(f"classes_per_client is {each}, but must be between 1 and {classes}, the number of classes")
    return each


def _thin_rare_labels(by_class: list[Indices], rng: Generator) -> list[Indices]:
    common = [len(samples) for label, samples in enumerate(by_class) if label not in RARE_LABELS]
    if not common:
        raise InputError(
            f"partition 'imbalanced' makes labels 0, 1 and 2 rare and needs more than {len(by_class)} classes"
        )
    keep = round(RARE_SHARE * sum(common) / len(common))
    return [
        rng.permutation(samples)[:keep] if label in RARE_LABELS else samples for label, samples in enumerate(by_class)
    ]


def _split_evenly(samples: int, clients: int, rng: Generator) -> Indices:
    owner = np.empty(samples, np.int64)
    owner[rng.permutation(samples)] = np.arange(samples) % clients
    return owner


def _split_unevenly(samples: int, clients: int, alpha: float, rng: Generator) -> Indices:
    """Give everybody one sample, and the others in the drawn shares."""
    _check_alpha(alpha)
    ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * (samples - clients)).astype(np.int64)
    ends[-1] = samples - clients
    owner = np.empty(samples, np.int64)
    owner[rng.permutation(samples)] = np.repeat(np.arange(clients), 1 + np.diff(ends, prepend=0))
    return owner


def _check_alpha(alpha: float) -> None:
    if not (math.isfinite(alpha) and alpha > 0):
        raise InputError(f"alpha is {alpha}, but must be a finite number above 0")


def _spread(by_class: list[Indices], samples: int, clients: int, alpha: float, rng: Generator) -> Indices:
    _check_alpha(alpha)
    owner = np.full(samples, _NOBODY)
    for _ in range(_DEAL_TRIES):
        for of_class in by_class:
            # Cutting at the rounded running sum hands out every sample exactly once.
            ends = np.rint(np.cumsum(rng.dirichlet(np.full(clients, alpha))) * len(of_class)).astype(np.int64)
            ends[-1] = len(of_class)
            owner[rng.permutation(of_class)] = np.repeat(np.arange(clients), np.diff(ends, prepend=0))
        if not _someone_is_empty(owner, clients):
            return owner
    raise InputError(
        f"partition 'dirichlet' left a client empty in each of {_DEAL_TRIES} draws of {clients} clients over {samples} "
        f"samples with alpha {alpha}: take fewer clients or a larger alpha"
    )


def _deal_classes(by_class: list[Indices], samples: int, clients: int, fixed: int | None, rng: Generator) -> Indices:
    present = np.array([len(of_class) > 0 for of_class in by_class])
    for _ in range(_DEAL_TRIES):
        owner = _deal(by_class, samples, _draw_ownership(present, clients, fixed, rng), rng)
        if not _someone_is_empty(owner, clients):
            return owner
    raise InputError(
        f"a client was left empty in each of {_DEAL_TRIES} draws of classes for {clients} clients over {samples} "
        "samples: take fewer clients or more samples"
    )


def _draw_ownership(present: NDArray[np.bool_], clients: int, fixed: int | None, rng: Generator) -> NDArray[np.bool_]:
    """Which client owns which class, [clients, classes]; drawn again until every class with samples has an owner."""
    classes = len(present)
    if fixed is None and classes < 2:
        raise InputError("partition 'noniid-a' gives every client 2 classes or more, but there is only one")
    if fixed is not None and clients * fixed < present.sum():
        raise InputError(
            f"{clients} clients with {fixed} classes each cannot own all {present.sum()} classes: "
            f"take at least {math.ceil(present.sum() / fixed)} clients or more classes_per_client"
        )
    for _ in range(_OWNERSHIP_TRIES):
        many = rng.integers(2, classes, size=(clients, 1), endpoint=True) if fixed is None else fixed
        # The rank of independent uniform numbers is a uniform permutation: the first so many classes of it are owned.
        owns: NDArray[np.bool_] = rng.random((clients, classes)).argsort(axis=1).argsort(axis=1) < many
        if owns[:, present].any(axis=0).all():
            return owns
    raise InputError(
        f"a class was left without an owner in each of {_OWNERSHIP_TRIES} draws for {clients} clients: "
        "take more clients or more classes_per_client"
    )


def _deal(by_class: list[Indices], samples: int, owns: NDArray[np.bool_], rng: Generator) -> Indices:
    owner = np.full(samples, _NOBODY)
    dealt = np.zeros(len(owns), np.int64)
    for label, of_class in enumerate(by_class):
        owners = np.flatnonzero(owns[:, label])
        if len(of_class) == 0:
            continue
        # What an even split leaves over goes to those with the least so far, so that as few as possible stay empty.
        owners = owners[np.argsort(dealt[owners], kind="stable")]
        share, rest = divmod(len(of_class), len(owners))
        sizes = share + (np.arange(len(owners)) < rest)
        owner[rng.permutation(of_class)] = np.repeat(owners, sizes)
        dealt[owners] += sizes
    return owner


def _someone_is_empty(owner: Indices, clients: int) -> bool:
    return bool((np.bincount(owner[owner != _NOBODY], minlength=clients) == 0).any())


def _samples_of_each(owner: Indices, clients: int) -> list[Indices]:
    owned = np.flatnonzero(owner != _NOBODY)
    # A stable sort by owner keeps the indices of each client in order.
    grouped = owned[np.argsort(owner[owned], kind="stable")]
    ends = np.cumsum(np.bincount(owner[owned], minlength=clients))
    return np.split(grouped, ends[:-1])
