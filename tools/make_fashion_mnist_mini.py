"""Make the bundled data set `fashion-mnist-mini` from the real Fashion-MNIST.

    python tools/make_fashion_mnist_mini.py [DATA_DIR]

Takes the first 1,000 training and 200 test images of every class, in the order of the original files, and writes them
as xz-compressed IDX files into the package. Prints the SHA-256 of every file before compression: these are the
constants of `feddd.world.datasets`. The same input gives the same bytes: xz files carry no time stamp.
"""

import hashlib
import lzma
import struct
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feddd.world import datasets

OUT = Path(datasets.__file__).parent / "data"


def first_of_each_class(labels: NDArray[np.int64], classes: int, per_class: int) -> NDArray[np.int64]:
    """Indices of the first `per_class` samples of every class, in the original order."""
    return np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(classes)]))


def write(name: str, header: bytes, values: NDArray[np.uint8]) -> None:
    """Compress one IDX file into the package and print its digest and size."""
    content = header + values.tobytes()
    packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
    (OUT / f"{name}.xz").write_bytes(packed)
    print(f'"{name}": "{hashlib.sha256(content).hexdigest()}",  # {len(packed)} bytes packed')


def main() -> None:
    """Read the real data set (its checksums are verified) and write the subset."""
    real = datasets.load_images("fashion-mnist", Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    mini = datasets.SPECS["fashion-mnist-mini"]
    OUT.mkdir(exist_ok=True)
    parts = [("train", real.train_images, real.train_labels, mini.train)]
    parts += [("t10k", real.test_images, real.test_labels, mini.test)]
    for part, images, labels, count in parts:
        chosen = first_of_each_class(labels, real.classes, count // real.classes)
        images_header = struct.pack(">4I", 0x803, count, *mini.image_shape[1:])
        write(f"{part}-images-idx3-ubyte", images_header, images[chosen])
        write(f"{part}-labels-idx1-ubyte", struct.pack(">2I", 0x801, count), labels[chosen].astype(np.uint8))


if __name__ == "__main__":
    main()
