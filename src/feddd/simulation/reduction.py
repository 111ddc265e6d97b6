"""Adding in one fixed order whoever adds: a binary tree over the blocks of clients.

Floating-point sums depend on their order. Every block is a leaf of the same tree; a worker merges the subtrees that it
owns whole and sends only those, and the coordinator merges the rest. So the bits do not depend on the number of
workers, and a worker sends a few models, not one for every block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from feddd.core.aggregation import Sums, add_sums

T = TypeVar("T")
Node = tuple[int, int]
"""(level, index): the leaves index · 2^level up to (index + 1) · 2^level; leaves have level 0."""


@dataclass(frozen=True)
class Partial:
    """Partial sums of some blocks: of what was sent, and of everything (for the mask error; None if all was sent).

    vectors: of what clients sent beside their models, by name
    """

    sent: Sums
    full: Sums | None
    vectors: Mapping[str, Sums] = field(default_factory=dict)


def reduce_tree(nodes: Mapping[Node, T], leaves: int, merge: Callable[[T, T], T]) -> dict[Node, T]:
    """Merge siblings upwards as far as both are here; what remains are the roots of whole subtrees."""
    remaining = dict(nodes)
    level = 0
    while (1 << level) < leaves:
        for index in sorted(i for at, i in remaining if at == level and i % 2 == 0):
            left, right, parent = (level, index), (level, index + 1), (level + 1, index // 2)
            if (index + 1) << level >= leaves:  # the tree ends here: nothing will ever come from the right
                remaining[parent] = remaining.pop(left)
            elif right in remaining:
                remaining[parent] = merge(remaining.pop(left), remaining.pop(right))
        level += 1
    return remaining


def merge_partials(left: Partial, right: Partial) -> Partial:
    """Return two neighbouring subtrees as one; the left one's arrays are used up."""
    full = None
    if left.full or right.full:
        # A block in which nobody dropped anything has sent all it has.
        everything = left.full or replace(left.sent, numerator=left.sent.numerator.copy())
        full = add_sums(everything, right.full or right.sent)
    vectors = {**left.vectors, **right.vectors}
    for name in left.vectors.keys() & right.vectors.keys():
        vectors[name] = add_sums(left.vectors[name], right.vectors[name])
    return Partial(add_sums(left.sent, right.sent), full, vectors)
