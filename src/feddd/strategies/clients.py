"""What a server knows of its clients: one table with a row for each client and a column for each fact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Column = NDArray[Any]
FACTS: Mapping[str, type] = {
    "masks": object,
    "losses": np.float64,
    "oort_statistics": np.float64,
    "samples": np.float64,
    "label_coverage": np.float64,
    "kept_shares": np.float64,
    "last_round": np.int64,
}
"""The columns that every method has, see `ServerState`; a method may have more of its own."""


@dataclass(frozen=True)
class ClientTable:
    """Facts by name, each an array [clients]; a fact that is not known is None, NaN, zero or False by its type."""

    columns: Mapping[str, Column]

    @classmethod
    def unknown(cls, clients: int) -> ClientTable:
        """Return the table of clients of whom nothing is known."""
        return cls({name: _unknown(np.dtype(kind), clients) for name, kind in FACTS.items()})

    def __len__(self) -> int:
        return len(self.columns["last_round"])

    def __getitem__(self, name: str) -> Column:
        return self.columns[name]

    @property
    def own(self) -> dict[str, Column]:
        """Return the columns that one method has added."""
        return {name: column for name, column in self.columns.items() if name not in FACTS}

    def take(self, clients: Sequence[int]) -> ClientTable:
        """Return the rows of these clients, in this order."""
        places = np.array(clients, dtype=np.int64)
        return ClientTable({name: column[places] for name, column in self.columns.items()})

    def grow(self, clients: int) -> ClientTable:
        """Return the table with rows for so many clients; nothing is known of the new ones."""
        more = max(0, clients - len(self))
        grown = {name: np.append(column, _unknown(column.dtype, more)) for name, column in self.columns.items()}
        return ClientTable(grown) if more else self

    def record(self, clients: Sequence[int], **facts: object) -> ClientTable:
        """Return the table after these clients' facts became known, each one value for all or one for each of them."""
        places, columns = np.array(clients, dtype=np.int64), dict(self.columns)
        for name, values in facts.items():
            columns[name] = columns[name].copy()
            columns[name][places] = np.array(values, dtype=columns[name].dtype)
        return ClientTable(columns)

    def with_own(self, own: Mapping[str, Column]) -> ClientTable:
        """Return the table with these columns of a method's own instead of those that it had."""
        for name, column in own.items():
            if name in FACTS:
                raise ValueError(f"client_memory {name!r} has the name of something that every server remembers")
            if not (isinstance(column, np.ndarray) and column.shape == (len(self),)):
                raise ValueError(f"client_memory {name!r} must be an array with a number for each of the clients")
        return ClientTable({name: self.columns[name] for name in FACTS} | dict(own))


def _unknown(kind: np.dtype[Any], count: int) -> Column:
    """Return a column about which nothing is known."""
    return np.full(count, {"f": np.nan, "O": None}.get(kind.kind, 0), dtype=kind)
