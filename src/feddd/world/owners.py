"""Who owns which samples where that is given: by the data's own clients, or by a function of the user's."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError, nearest
from feddd.world.models import import_object

Indices = NDArray[np.int64]


def natural(
    owners: NDArray[np.generic] | None, clients: int | None, wanted: Sequence[str] | None, rng: np.random.Generator
) -> tuple[list[Indices], tuple[str, ...]]:
    """Return every owner's samples and every owner's name.

    owners: of each sample    clients: so many are drawn; None for all    wanted: these, by name and in this order
    """
    if owners is None:
        raise InputError(
            'partition "natural" needs the owner of each sample: a column client, or clients of the Dataset'
        )
    found, number = np.unique(owners, return_inverse=True)
    names = [str(name) for name in found.tolist()]
    order = np.argsort(number, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(number, minlength=len(names)))[:-1])
    if wanted is not None:
        places = {name: place for place, name in enumerate(names)}
        unknown = next((name for name in wanted if name not in places), None)
        if unknown is not None:
            raise InputError(
                f"the fleet's client {unknown!r} owns no samples; {nearest(unknown, names, 'no owner is like it')}"
            )
        chosen = [places[name] for name in wanted]
    elif clients is None or clients == len(names):
        chosen = list(range(len(names)))
    elif clients > len(names):
        raise InputError(
            f'fleet.clients is {clients}, but partition "natural" has {len(names)} owners; leave it out for all'
        )
    else:
        chosen = np.sort(rng.choice(len(names), clients, replace=False)).tolist()
    return [parts[place] for place in chosen], tuple(names[place] for place in chosen)


def own_split(path: str, targets: NDArray[np.generic], clients: int, rng: np.random.Generator) -> list[Indices]:
    """Return what a user's function(targets, clients, rng) makes: lists of sample numbers, or the owner of each.

    In an array of owners a number below 0 is a sample that nobody gets.
    """
    function = import_object(path)
    try:
        found = function(targets, clients, rng)
    except InputError:
        raise
    except Exception as error:  # whatever a user's function raises is one line
        raise InputError(f"partition {path!r}: {' '.join(f'{type(error).__name__}: {error}'.split())}") from error
    where = f"partition {path!r} returned"
    if isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "iu":
        if len(found) != len(targets):
            raise InputError(f"{where} the owners of {len(found)} samples; there are {len(targets)}")
        if found.max(initial=-1) >= clients:
            raise InputError(f"{where} the owner {found.max()}; {clients} clients are 0 to {clients - 1}")
        parts = [np.flatnonzero(found == client) for client in range(clients)]
    elif isinstance(found, list | tuple):
        parts = [_part(each, where, len(targets)) for each in found]
    else:
        raise InputError(f"{where} a {type(found).__name__}, not lists of sample numbers or the owner of each sample")
    if len(parts) != clients:
        raise InputError(f"{where} {len(parts)} parts for {clients} clients")
    empty = next((client for client, part in enumerate(parts) if not len(part)), None)
    if empty is not None:
        raise InputError(f"{where} nothing for client {empty}")
    everything = np.concatenate(parts)
    if len(np.unique(everything)) < len(everything):
        raise InputError(f"{where} a sample twice: a sample belongs to one client")
    return parts


def _part(given: object, where: str, samples: int) -> Indices:
    part = np.asarray(given)
    if part.ndim != 1 or (part.dtype.kind not in "iu" and len(part)):
        raise InputError(f"{where} a part of {part.dtype} and shape {part.shape}, not sample numbers")
    if len(part) and not (part.min() >= 0 and part.max() < samples):
        raise InputError(
            f"{where} the sample {part.max() if part.max() >= samples else part.min()}; there are {samples}"
        )
    return np.sort(part.astype(np.int64))
