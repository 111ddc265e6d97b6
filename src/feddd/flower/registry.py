"""Who the clients are: their ids, which stay, and the nodes they are at, which may change."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

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
        """Return the client is at this node now; one that was somewhere else has moved."""
        names = [known.name for known in self.members]
        if member.name in names:
            place = names.index(member.name)
            members = (*self.members[:place], member, *self.members[place + 1 :])
        else:
            place, members = len(names), (*self.members, member)
        nodes = {other: at for other, at in self.nodes.items() if at != place} | {node: place}
        return Registry(members, nodes)

    def present(self, online: Sequence[int]) -> dict[int, int]:
        """Return client → node, of those that are online, in the order of clients."""
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
    """Return the state with room for clients that came late; nothing is known of them."""
    reference = state.reference.grow(clients) if state.reference else None
    return dataclasses.replace(state, clients=state.clients.grow(clients), reference=reference)
