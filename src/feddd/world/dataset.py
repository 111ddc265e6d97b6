"""A data set of any kind: inputs and targets for training and for testing, checked when it is made.

Inputs are arrays of any shape, or several by name for a model that takes them as ``model(**inputs)``. A model gets
floats as float32, bytes (uint8) as float32 between 0 and 1, other whole numbers as int64, booleans as they are.
"""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError

Array = NDArray[Any]
Inputs = Array | dict[str, Array]
Shape = tuple[int, ...] | dict[str, tuple[int, ...]]
"""Of one sample; by name where there are several inputs."""

NOT_COUNTED = -100
"""A target in a sequence that no loss counts: padding; PyTorch's own number for it."""
MOST_CLASSES = 1_000_000
_CHUNK_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class Dataset:
    """What clients train on and what the global model is tested on; arrays or tensors, the first axis is the samples.

    inputs: one array, or several in a dict: model(**inputs)    targets: classes (whole numbers from 0, or their names),
    numbers, or sequences of them
    clients: whose each training sample is, for partition = "natural"    classes: their names, or how many there are
    """

    train_inputs: Any
    train_targets: Any
    test_inputs: Any
    test_targets: Any
    clients: Any = None
    classes: Any = None

    def __post_init__(self) -> None:
        train, test = (_inputs(getattr(self, f"{part}_inputs"), f"{part}_inputs") for part in ("train", "test"))
        _check_alike(train, test)
        names = _class_names(self.classes)
        targets = [_array(getattr(self, name), name) for name in ("train_targets", "test_targets")]
        if targets[0].dtype.kind in "UO" and all(each.ndim == 1 for each in targets):
            names, targets = _named_targets(names, *targets)
        targets = [_targets(each, name) for each, name in zip(targets, ("train_targets", "test_targets"), strict=True)]
        if targets[0].dtype != targets[1].dtype or targets[0].shape[1:] != targets[1].shape[1:]:
            raise InputError(f"test_targets are {_describe(targets[1])}, but train_targets {_describe(targets[0])}")
        for part, inputs, target in (("train", train, targets[0]), ("test", test, targets[1])):
            _check_lengths(part, inputs, target)
        self._set(train_inputs=train, test_inputs=test, train_targets=targets[0], test_targets=targets[1])
        self._set(classes=names, clients=None if self.clients is None else _owners(self.clients, len(targets[0])))

    def _set(self, **values: Any) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def input_shape(self) -> Shape:
        """Return the shape of one sample's input, or of each by name."""
        shape: Shape = over(self.train_inputs, lambda array: array.shape[1:])
        return shape

    @functools.cached_property
    def class_count(self) -> int | None:
        """Return how many classes (or tokens) there are: as given, else one more than the largest whole number."""
        if self.classes is not None:
            return self.classes if isinstance(self.classes, int) else len(self.classes)
        if self.train_targets.dtype.kind != "i":
            return None
        return 1 + max(int(each.max(initial=-1)) for each in (self.train_targets, self.test_targets))

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the classes; empty where they are plain numbers."""
        return self.classes if isinstance(self.classes, tuple) else ()

    @property
    def scaling(self) -> tuple[Array, Array] | None:
        """Return what bytes are multiplied with and what is added then, per channel; None for what bytes always get."""
        return None

    def tested_on(self, chosen: NDArray[np.int64]) -> Self:
        """Return the data set with some of its training samples in the place of its test samples."""
        other = copy.copy(self)
        other._set(
            test_inputs=over(self.train_inputs, lambda array: array[chosen]), test_targets=self.train_targets[chosen]
        )
        return other

    def with_targets(self, train: Array, test: Array) -> Self:
        """Return the data set with its targets written in another way."""
        other = copy.copy(self)
        other.__dict__.pop("class_count", None)
        other._set(train_targets=train, test_targets=test)
        return other

    def digest(self) -> str:
        """Return a SHA-256 of all samples, their owners and the names of classes."""
        found = hashlib.sha256()
        for name, array in self.arrays():
            found.update(f"{name} {array.dtype.str} {array.shape} ".encode())
            for chunk in chunks(array):
                found.update(np.ascontiguousarray(chunk).tobytes())
        found.update(repr((self.classes, None if self.clients is None else self.clients.tolist())).encode())
        return found.hexdigest()

    def arrays(self) -> Iterator[tuple[str, Array]]:
        """Go through all arrays by name: inputs and targets of training, then of testing."""
        for part in ("train", "test"):
            inputs = getattr(self, f"{part}_inputs")
            for name, array in inputs.items() if isinstance(inputs, dict) else [("", inputs)]:
                yield f"{part}_inputs" + (f".{name}" if name else ""), array
            yield f"{part}_targets", getattr(self, f"{part}_targets")


def over(inputs: Inputs, function: Callable[[Array], Any]) -> Any:
    """Apply a function to the array, or to each of several by name."""
    if isinstance(inputs, dict):
        return {name: function(array) for name, array in inputs.items()}
    return function(inputs)


def chunks(array: Array) -> Iterator[Array]:
    """Cut an array along its samples: one that is mapped from a file is read in pieces."""
    rows = max(1, _CHUNK_BYTES // max(1, int(np.prod(array.shape[1:])) * array.dtype.itemsize))
    for start in range(0, len(array), rows):
        yield array[start : start + rows]


def _array(given: Any, name: str) -> Array:
    """Take an array or a tensor; a copy only where there is no other way."""
    if hasattr(given, "detach"):  # a tensor; torch itself is slow to import, and reading a data set does not need it
        given = given.detach().cpu()
        return (given.float() if str(given.dtype) == "torch.bfloat16" else given).numpy()  # type: ignore[no-any-return]
    if not isinstance(given, np.ndarray) and not hasattr(given, "__array__"):
        raise InputError(f"{name} is a {type(given).__name__}, not an array or a tensor")
    found = np.asarray(given)
    if found.ndim == 0:
        raise InputError(f"{name} is a single value; its first axis must be the samples")
    return found if not isinstance(given, np.memmap) else given


def _inputs(given: Any, name: str) -> Inputs:
    if not isinstance(given, Mapping):
        return _plain(_array(given, name), name)
    if not given:
        raise InputError(f"{name} is an empty dict")
    for key in given:
        if not isinstance(key, str) or not key.isidentifier():
            raise InputError(f"{name} has the key {key!r}; keys are the names of the model's arguments")
    return {key: _plain(_array(value, f"{name}[{key!r}]"), f"{name}[{key!r}]") for key, value in given.items()}


def _plain(array: Array, name: str) -> Array:
    """Return an array of a type that is stored as it is; anything else is refused."""
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind not in "fiub":
        raise InputError(f"{name} holds {array.dtype}; inputs are numbers, bytes or booleans")
    _check_finite(array, name)
    if kind == "f":
        return array if array.dtype == np.float32 else _converted(array, np.float32, name)
    if kind == "u" and size > 1:
        return _converted(array, np.int32 if size == 2 else np.int64, name)
    return array if array.dtype.isnative else _converted(array, array.dtype.newbyteorder("="), name)


def _converted(array: Array, kind: Any, name: str) -> Array:
    with np.errstate(over="ignore"):
        found = array.astype(kind)
    if found.dtype.kind == "f" and array.dtype.itemsize > found.dtype.itemsize:
        _check_finite(found, f"{name} (as {found.dtype})")
    return found


def _check_finite(array: Array, name: str) -> None:
    if array.dtype.kind != "f":
        return
    seen = 0
    for chunk in chunks(array):
        fine = np.isfinite(chunk)
        if not fine.all():
            place = seen + int(np.argwhere(~fine)[0][0])
            raise InputError(f"{name} holds {chunk[~fine][0]} in sample {place}; all numbers must be finite")
        seen += len(chunk)


def _targets(array: Array, name: str) -> Array:
    kind = array.dtype.kind
    if kind not in "fiub":
        raise InputError(f"{name} holds {array.dtype}; targets are classes, numbers, or sequences of them")
    _check_finite(array, name)
    if kind == "f":
        return array if array.dtype == np.float32 else _converted(array, np.float32, name)
    return array.astype(np.int64, copy=False)


def _named_targets(names: Any, train: Array, test: Array) -> tuple[tuple[str, ...], list[Array]]:
    """Return the names of classes, and targets that were names as numbers."""
    words = [np.array([_word(value, "a target") for value in each.tolist()], dtype=str) for each in (train, test)]
    known = names if isinstance(names, tuple) else tuple(np.unique(words[0]).tolist())
    numbers = {word: number for number, word in enumerate(known)}
    for each, part in zip(words, ("train", "test"), strict=True):
        unknown = next((word for word in each.tolist() if word not in numbers), None)
        if unknown is not None:
            where = "classes" if isinstance(names, tuple) else "the training samples"
            raise InputError(f"{part}_targets has the class {unknown!r}, which is not among {where}")
    return known, [np.array([numbers[word] for word in each.tolist()], dtype=np.int64) for each in words]


def _word(value: Any, what: str) -> str:
    if value is None or (isinstance(value, float) and np.isnan(value)):
        raise InputError(f"{what} is missing")
    return str(value)


def _class_names(given: Any) -> Any:
    """Return the names as a tuple, or their number, or None."""
    if given is None:
        return None
    if isinstance(given, int | np.integer) and not isinstance(given, bool):
        if not 1 <= given <= MOST_CLASSES:
            raise InputError(f"classes is {given}, but must be at least 1")
        return int(given)
    if isinstance(given, str) or not isinstance(given, Sequence | np.ndarray):
        raise InputError(f"classes is a {type(given).__name__}, not a list of names or their number")
    names = tuple(str(name) for name in given)
    if not names:
        raise InputError("classes is empty")
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise InputError(f"classes names {twice!r} twice")
    return names


def _owners(given: Any, samples: int) -> Array:
    """Return the owner of each training sample, as names or whole numbers."""
    if isinstance(given, str) or not (isinstance(given, Sequence) or hasattr(given, "__array__")):
        raise InputError(f"clients is a {type(given).__name__}, not the owner of each training sample")
    found = _array(given, "clients") if hasattr(given, "detach") else np.asarray(given)
    if found.ndim != 1 or len(found) != samples:
        raise InputError(f"clients has the shape {found.shape}; {samples} training samples need ({samples},)")
    if found.dtype.kind in "iu":
        return found.astype(np.int64)
    if found.dtype.kind not in "UO":
        raise InputError(f"clients holds {found.dtype}; owners are names or whole numbers")
    return np.array([_word(owner, "an owner in clients") for owner in found.tolist()], dtype=str)


def _check_alike(train: Inputs, test: Inputs) -> None:
    ones, others = ({"": each} if not isinstance(each, dict) else each for each in (train, test))
    if ones.keys() != others.keys():
        raise InputError(f"test_inputs are {_keys(test)}, but train_inputs {_keys(train)}")
    for name, one in ones.items():
        other, which = others[name], f"[{name!r}]" if name else ""
        if one.dtype != other.dtype or one.shape[1:] != other.shape[1:]:
            raise InputError(f"test_inputs{which} are {_describe(other)}, but train_inputs{which} {_describe(one)}")


def _keys(inputs: Inputs) -> str:
    return f"a dict of {', '.join(inputs)}" if isinstance(inputs, dict) else "one array"


def _describe(array: Array) -> str:
    return f"{array.dtype} of shape {array.shape[1:]} per sample"


def _check_lengths(part: str, inputs: Inputs, targets: Array) -> None:
    if not len(targets):
        raise InputError(f"{part}_targets is empty")
    for name, array in inputs.items() if isinstance(inputs, dict) else [("", inputs)]:
        if len(array) != len(targets):
            which = f"[{name!r}]" if name else ""
            raise InputError(f"{part}_inputs{which} has {len(array)} samples, but {part}_targets {len(targets)}")
