"""Who the clients are: their ids, which stay, and the nodes they are at, which may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddd.core.units import Units
from feddd.flower.links import Links
from feddd.strategies.protocol import Fleet, ServerState, known_or_mean, make_fleet


@dataclass(frozen=True)
class Member:
    """A client by its place in the server's arrays."""

    name: str
    sub_model: int


@dataclass(frozen=True)
class Registry:
    """Clients in the order in which they came; nodes: who is at which node now."""

    members: tuple[Member, ...] = ()
    nodes: Mapping[int, int] = dataclasses.field(default_factory=dict)

    def admit(self, node: int, member: Member) -> Registry:
        """The client is at this node now; one that was somewhere else has moved."""
        names = [known.name for known in self.members]
        if member.name in names:
            place = names.index(member.name)
            members = (*self.members[:place], member, *self.members[place + 1 :])
        else:
            place, members = len(names), (*self.members, member)
        nodes = {other: at for other, at in self.nodes.items() if at != place} | {node: place}
        return Registry(members, nodes)

    def present(self, online: Sequence[int]) -> dict[int, int]:
        """Client → node, of those that are online, in the order of clients."""
        found = {self.nodes[node]: node for node in online if node in self.nodes}
        return dict(sorted(found.items()))


def fleet_of(members: Sequence[Member], tables: Sequence[Units], links: Links) -> Fleet:
    """What a strategy is told about these clients. tables: the layer tables of the sub-models, the global one first."""
    known = [links[member.name] for member in members]
    compute = np.array([link.compute_seconds for link in known])
    return make_fleet(
        np.array([link.uplink_bits_per_s for link in known]),
        np.array([link.downlink_bits_per_s for link in known]),
        known_or_mean(compute) if not np.isnan(compute).all() else np.zeros(len(known)),
        [tables[member.sub_model] for member in members],
        tables[0],
    )


def grown(state: ServerState, clients: int) -> ServerState:
    """The state with room for clients that came late; nothing is known of them."""
    more = clients - len(state.masks)
    if more <= 0:
        return state
    unknown = np.full(more, np.nan)
    remembered = {name: np.append(array, _nothing(array, more)) for name, array in state.client_memory.items()}
    reference = state.reference
    if reference is not None:
        reference = dataclasses.replace(reference, held=np.append(reference.held, np.full(more, -1)))
    return dataclasses.replace(
        state,
        masks=(*state.masks, *[None] * more),
        losses=np.append(state.losses, unknown),
        oort_statistics=np.append(state.oort_statistics, unknown),
        samples=np.append(state.samples, unknown),
        label_coverage=np.append(state.label_coverage, unknown),
        kept_shares=np.append(state.kept_shares, unknown),
        last_round=np.append(state.last_round, np.zeros(more, dtype=np.int64)),
        client_memory=remembered,
        reference=reference,
    )


def _nothing(array: NDArray[Any], count: int) -> NDArray[Any]:
    """Return what a strategy remembers of clients that it has never met: NaN, zero, False."""
    return np.full(count, np.nan if array.dtype.kind == "f" else 0, dtype=array.dtype)


def part_of(state: ServerState, clients: Sequence[int]) -> ServerState:
    """The state as a strategy sees it when only these clients are there."""
    places = np.array(clients, dtype=np.int64)
    return dataclasses.replace(
        state,
        masks=tuple(state.masks[place] for place in clients),
        losses=state.losses[places],
        oort_statistics=state.oort_statistics[places],
        samples=state.samples[places],
        label_coverage=state.label_coverage[places],
        kept_shares=state.kept_shares[places],
        last_round=state.last_round[places],
        client_memory={name: array[places] for name, array in state.client_memory.items()},
    )
