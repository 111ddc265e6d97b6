"""A folder of images as a data set: train/CLASS/… and test/CLASS/…, all images of one size."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddd.errors import InputError
from feddd.world.datasets import ImageDataset

SUFFIXES = (".png", ".jpg", ".jpeg")


def read_images(folder: Path) -> ImageDataset:
    """Read all images: grey if all of them are, else in three colours; standardised by the training images.

    Classes are the names of the folders, in alphabetical order.
    """
    found = {part: _files(folder, part) for part in ("train", "test")}
    classes = list(found["train"])
    unknown = next((name for name in found["test"] if name not in classes), None)
    if unknown is not None:
        raise InputError(f"test/{unknown} is a class that train/ does not have")
    pictures = {
        part: [(_open(path), classes.index(name)) for name, paths in own.items() for path in paths]
        for part, own in found.items()
    }
    colour = any(image.ndim == 3 for own in pictures.values() for image, _ in own)
    paths = [path for own in found.values() for several in own.values() for path in several]
    images = [_in_mode(image, colour=colour) for own in pictures.values() for image, _ in own]
    for path, image in zip(paths, images, strict=True):
        if image.shape != images[0].shape:
            one, other = (f"{each.shape[2]} × {each.shape[1]}" for each in (image, images[0]))
            raise InputError(f"{path.relative_to(folder)} has {one} pixels, {paths[0].relative_to(folder)} {other}")
    count = len(pictures["train"])
    train, test = np.stack(images[:count]), np.stack(images[count:])
    labels = [np.array([label for _, label in pictures[part]], dtype=np.int64) for part in ("train", "test")]
    mean, deviation = _statistics(train)
    return ImageDataset(
        *(train, labels[0], test, labels[1]), classes=classes, name=folder.name, mean=mean, deviation=deviation
    )


def image_files(folder: Path) -> list[Path]:
    """Return all images that `read_images` reads, in order."""
    both = [_files(folder, part) for part in ("train", "test")]
    return [path for own in both for several in own.values() for path in several]


def _files(folder: Path, part: str) -> dict[str, list[Path]]:
    """Return the images of each class."""
    if not (folder / part).is_dir():
        raise InputError(f"it has no folder {part}/; images lie in train/CLASS/ and test/CLASS/")
    found = {}
    for own in sorted(path for path in (folder / part).iterdir() if path.is_dir()):
        paths = sorted(path for path in own.iterdir() if path.suffix.lower() in SUFFIXES)
        if paths:
            found[own.name] = paths
    if not found:
        raise InputError(f"{part}/ has no folder with images ({', '.join(SUFFIXES)})")
    return found


def _open(path: Path) -> NDArray[np.uint8]:
    """Return an image, [height, width] or [height, width, 3]."""
    from PIL import Image

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path) as image:
                grey = image.mode in ("1", "L", "I", "I;16")
                return np.asarray(image.convert("L" if grey else "RGB"), dtype=np.uint8)
    except (
        OSError,
        ValueError,
        SyntaxError,
        MemoryError,
        Image.DecompressionBombError,
        Image.DecompressionBombWarning,
    ) as error:
        raise InputError(f"{path.parent.name}/{path.name} is not an image that can be read: {error}") from error


def _in_mode(image: NDArray[np.uint8], *, colour: bool) -> NDArray[np.uint8]:
    """Return [channels, height, width]."""
    if not colour:
        return image[None]
    return np.ascontiguousarray((image if image.ndim == 3 else np.repeat(image[:, :, None], 3, 2)).transpose(2, 0, 1))


def _statistics(images: NDArray[np.uint8]) -> tuple[Any, Any]:
    """Return mean and deviation per channel, of pixels between 0 and 1."""
    count = np.array([np.bincount(images[:, channel].ravel(), minlength=256) for channel in range(images.shape[1])])
    values = np.arange(256) / 255.0
    mean = (count * values).sum(1) / count.sum(1)
    deviation = np.sqrt((count * (values - mean[:, None]) ** 2).sum(1) / count.sum(1))
    return tuple(mean.tolist()), tuple(np.where(deviation > 0, deviation, 1.0).tolist())
