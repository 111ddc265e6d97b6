"""Links and devices: drawn from ranges with a seed, or read from a CSV file."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feddd.core import latency
from feddd.core.streams import stream
from feddd.errors import InputError
from feddd.files import read_text

Floats = NDArray[np.float64]
Range = float | tuple[float, float]

REQUIRED = ("client", "uplink_bits_per_s", "downlink_bits_per_s", "compute_seconds")
OPTIONAL = ("model_bits", "samples", "label_coverage", "loss")
_TINY, _HUGE = 1e-30, 1e30  # beyond these no product of three of them is a number any more
_POSITIVE = ("uplink_bits_per_s", "downlink_bits_per_s", "model_bits", "samples")


@dataclass(frozen=True)
class Devices:
    """Each client's links and the seconds it computes in a round, [clients]."""

    uplink_bits_per_s: Floats
    downlink_bits_per_s: Floats
    compute_seconds: Floats


def draw(
    seed: int,
    processed_samples: Floats,
    *,
    cpu_hz: Range,
    cycles_per_sample: Range,
    uplink_bits_per_s: Range | None = None,
    downlink_bits_per_s: Range | None = None,
    shannon: Mapping[str, Range] | None = None,
) -> Devices:
    """Draw every quantity uniformly per client from its own stream, so that changing one range moves nothing else.

    processed_samples: epochs × samples of each client    shannon: bandwidth_hz, power_w, gain, noise_w instead of rates
    """
    clients = len(processed_samples)

    def drawn(name: str, wanted: Range) -> Floats:
        low, high = wanted if isinstance(wanted, tuple) else (wanted, wanted)
        return stream(seed, "fleet", name).uniform(low, high, clients)

    if shannon is None:
        if uplink_bits_per_s is None or downlink_bits_per_s is None:
            raise ValueError("a fleet needs link rates or the quantities of Shannon's formula")
        uplink = drawn("uplink_bits_per_s", uplink_bits_per_s)
        downlink = drawn("downlink_bits_per_s", downlink_bits_per_s)
    else:
        gain, noise = drawn("gain", shannon["gain"]), drawn("noise_w", shannon["noise_w"])
        up, down = (
            latency.shannon_bits_per_s(
                drawn(f"{way}_bandwidth_hz", shannon["bandwidth_hz"]),
                drawn(f"{way}_power_w", shannon["power_w"]),
                gain,
                noise,
            )
            for way in ("uplink", "downlink")
        )
        uplink, downlink = up, down
    compute = latency.compute_seconds(
        drawn("cycles_per_sample", cycles_per_sample), processed_samples, drawn("cpu_hz", cpu_hz)
    )
    return Devices(uplink, downlink, compute)


@dataclass(frozen=True)
class FleetFile:
    """A fleet file, checked: the clients' names and the numeric columns by name."""

    clients: tuple[str, ...]
    columns: Mapping[str, Floats]


def read_csv(path: Path) -> FleetFile:
    """Read a fleet file; the first row that is wrong is named."""
    try:
        # Spreadsheets put a byte order mark before the first column's name; "utf-8-sig" takes it away.
        reader = csv.reader(io.StringIO(read_text(path, "utf-8-sig"), newline=""))
        lines = [(reader.line_num, row) for row in reader if row]
    except FileNotFoundError:
        raise InputError(f"there is no fleet file {path}") from None
    except (OSError, ValueError, csv.Error) as error:
        raise InputError(f"cannot read the fleet file {path}: {error}") from error
    if not lines:
        raise InputError(f"{path} is empty; it needs the columns {', '.join(REQUIRED)}")
    header = [name.strip() for name in lines[0][1]]
    _check_header(path, header)
    if len(lines) == 1:
        raise InputError(f"{path} has a header but no clients")
    columns: dict[str, list[float]] = {name: [] for name in header if name != "client"}
    seen: dict[str, None] = {}
    for number, row in lines[1:]:
        values = _check_row(f"{path}, row {number}", header, row)
        client = row[header.index("client")].strip()
        if client in seen:
            raise InputError(f"{path}, row {number}: client {client!r} appears twice")
        seen[client] = None
        for name, value in values.items():
            columns[name].append(value)
    return FleetFile(tuple(seen), {name: np.array(values) for name, values in columns.items()})


def _check_header(path: Path, header: Sequence[str]) -> None:
    missing = [name for name in REQUIRED if name not in header]
    if missing:
        raise InputError(f"{path} lacks the column {missing[0]!r}; it needs {', '.join(REQUIRED)}")
    unknown = [name for name in header if name not in (*REQUIRED, *OPTIONAL)]
    if unknown:
        raise InputError(f"{path} has an unknown column {unknown[0]!r}; besides the needed ones: {', '.join(OPTIONAL)}")
    if len(set(header)) < len(header):
        raise InputError(f"{path} names a column twice")


def _check_row(where: str, header: Sequence[str], row: Sequence[str]) -> dict[str, float]:
    if len(row) != len(header):
        raise InputError(f"{where}: {len(row)} fields instead of {len(header)}")
    values = {}
    for name, text in zip(header, row, strict=True):
        if name == "client":
            if not text.strip():
                raise InputError(f"{where}: the client has no name")
            continue
        try:
            value = float(text)
        except ValueError:
            raise InputError(f"{where}: {name} is {text.strip()!r}, not a number") from None
        least_ok = value > 0 if name in _POSITIVE else value >= 0
        if not math.isfinite(value) or not least_ok:
            wanted = "positive" if name in _POSITIVE else "at least 0"
            raise InputError(f"{where}: {name} is {text.strip()}; it must be finite and {wanted}")
        if value and not _TINY <= value <= _HUGE:
            raise InputError(f"{where}: {name} is {text.strip()}; it must lie between {_TINY:g} and {_HUGE:g}")
        values[name] = value
    return values
