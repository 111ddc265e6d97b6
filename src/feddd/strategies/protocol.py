"""What a method is: `plan` decides a round, `absorb` digests it. Frozen facts in between, nothing else.

A strategy never sees a data set, a clock, a message or a process; who carries and who trains is the engine's
business. So the same object drives the simulator and a deployment.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.latency import transfer_seconds
from feddd.core.units import Units
from feddd.strategies.clients import ClientTable
from feddd.wire.blocks import check_chain
from feddd.wire.difference import Difference
from feddd.wire.difference import Feedback as ErrorFeedback
from feddd.wire.down import Down, Moves, Reference, Values
from feddd.wire.exchange import EVERYTHING, Chain, chain
from feddd.wire.format import VALUE_BYTES, droppable_bytes, fixed_bytes
from feddd.wire.local import Rule, Vectors
from feddd.wire.quantise import BITS, FLOAT_BITS
from feddd.wire.quantised import Bits
from feddd.wire.stage import Stage

Floats = NDArray[np.float64]
Feedback = Literal["none", "rounded", "all"]
FEEDBACKS: tuple[Feedback, ...] = get_args(Feedback)
"""What was rounded away, or also what a full download replaced before it was sent."""
ALL_VALUES = Values()


@dataclass(frozen=True)
class Fleet:
    """What the server knows about its clients before a round; arrays are [clients].

    droppable_bits: U_n, the values a mask can leave out    fixed_bits: header, mask and values always sent
    layer_bits: U_n by layer    model_bits: U, the droppable part of the global model
    buffers: tensors of the global model that travel but are not trained, such as running statistics
    """

    uplink_bits_per_s: Floats
    downlink_bits_per_s: Floats
    compute_seconds: Floats
    droppable_bits: Floats
    fixed_bits: Floats
    layer_bits: Mapping[str, Floats]
    model_bits: float
    buffers: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.uplink_bits_per_s)

    @property
    def seconds_per_bit(self) -> Floats:
        """1/r_up + 1/r_down."""
        return 1.0 / self.uplink_bits_per_s + 1.0 / self.downlink_bits_per_s

    @property
    def transfer_seconds(self) -> Floats:
        """t_down + t_up of the full local model."""
        bits = self.droppable_bits + self.fixed_bits
        return transfer_seconds(bits, self.uplink_bits_per_s) + transfer_seconds(bits, self.downlink_bits_per_s)

    @property
    def full_seconds(self) -> Floats:
        """t_down + t_cmp + t_up of the full local model."""
        return self.transfer_seconds + self.compute_seconds

    def in_bits(self, bits: int) -> Fleet:
        """The same fleet when values travel in so many bits; the scales, 32 bits for every unit, are left out."""
        share = bits / FLOAT_BITS
        if share == 1:
            return self
        return dataclasses.replace(
            self,
            droppable_bits=share * self.droppable_bits,
            layer_bits={name: share * size for name, size in self.layer_bits.items()},
            model_bits=share * self.model_bits,
        )

    @property
    def heterogeneous(self) -> bool:
        """Return whether local models differ in size."""
        return bool((self.droppable_bits != self.droppable_bits[0]).any())


def make_fleet(
    uplink_bits_per_s: Floats,
    downlink_bits_per_s: Floats,
    compute_seconds: Floats,
    tables: Sequence[Units],
    global_table: Units,
) -> Fleet:
    """Return links, devices and model sizes as a strategy sees them; tables: each client's layer table."""
    layers = [{layer.name: 8.0 * VALUE_BYTES * layer.elements for layer in table.layers} for table in tables]
    return Fleet(
        uplink_bits_per_s=uplink_bits_per_s,
        downlink_bits_per_s=downlink_bits_per_s,
        compute_seconds=compute_seconds,
        droppable_bits=np.array([8.0 * droppable_bytes(table) for table in tables]),
        fixed_bits=np.array([8.0 * fixed_bytes(table) for table in tables]),
        layer_bits={layer.name: np.array([sizes[layer.name] for sizes in layers]) for layer in global_table.layers},
        model_bits=8.0 * droppable_bytes(global_table),
        buffers=frozenset(slot.name for slot in global_table.slots if slot.buffer),
    )


@dataclass(frozen=True)
class Task:
    """One client's part in a round: what it is to send back, what it is sent, and how it trains.

    up: the stages of its upload    down: what it is sent    coverage: CR(k) travels with the download
    local: what training needs besides the data, see `wire.local`
    """

    client: int
    up: Chain = EVERYTHING
    down: Down = ALL_VALUES
    local: tuple[Rule, ...] = ()
    coverage: bool = False

    @property
    def dropout(self) -> float:
        """Return D_n, the share of the model that is not sent."""
        return self.up.dropout

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to go through a round as one stack."""
        return self.up.kind, self.down.kind, tuple(rule.kind for rule in self.local)

    @property
    def vectors(self) -> tuple[str, ...]:
        """Return the names of what travels beside the model, both ways."""
        return tuple(name for rule in self.local for name in rule.vectors)

    @property
    def starts_afresh(self) -> bool:
        """Return whether what the client kept from earlier rounds no longer matters."""
        return self.down.mask is None and not self.up.lasting and not any(rule.lasting for rule in self.local)


@dataclass(frozen=True)
class Plan:
    """A round: who takes part, and how.

    broadcast: everybody in the plan is sent all of its model
    """

    round: int
    tasks: tuple[Task, ...]
    broadcast: bool = False

    @property
    def splits_units(self) -> bool:
        """Return whether somebody sends some numbers of a unit without the others: masks are then not all of it."""
        return any(task.up.splits_units for task in self.tasks)


@dataclass(frozen=True)
class Upload:
    """What is known of a client after a round: its report, and what its payload was.

    status: "ok", or why the upload does not count    mask: packed, as on the wire
    oort_statistic: √(mean of squared sample losses)    label_coverage: Σ_c min(C·dis_n^c, 1)
    """

    client: int
    status: str = "ok"
    mask: bytes = b""
    kept_share: float = 0.0
    train_loss: float = float("nan")
    oort_statistic: float = float("nan")
    samples: int = 0
    label_coverage: float = float("nan")
    upload_bytes: int = 0
    download_bytes: int = 0


@dataclass(frozen=True)
class ServerState:
    """All that a server remembers between rounds.

    round: rounds digested so far    clients: what it knows of each of them, with the columns of the properties below
    memory: what one method needs besides; numbers, strings, arrays, tensors, and lists and dicts of them can be saved
    reference: what differences are taken to, None where values travel as they are    mask_error: of the last round,
    NaN if nobody can measure it    vectors: what travels beside the model, none before the first round that has it;
    whoever drives the rounds keeps these three
    """

    round: int
    model: Mapping[str, Tensor]
    clients: ClientTable
    memory: object = None
    reference: Reference | None = None
    mask_error: float = math.nan
    vectors: Vectors = field(default_factory=dict)

    def knowing(self, **facts: object) -> ServerState:
        """Return the state with other facts about all of its clients."""
        everybody = range(len(self.clients))
        return dataclasses.replace(self, clients=self.clients.record(everybody, **facts))

    @property
    def masks(self) -> tuple[bytes | None, ...]:
        """Return the mask of each client's last counted upload; None if it holds nothing that the server knows."""
        return tuple(self.clients["masks"])

    @property
    def losses(self) -> Floats:
        """Return the training loss that each client reported last, NaN if it never did, as in the others below."""
        return self.clients["losses"]

    @property
    def oort_statistics(self) -> Floats:
        """Return √(mean of squared sample losses) of each client's last report."""
        return self.clients["oort_statistics"]

    @property
    def samples(self) -> Floats:
        """Return how many samples each client has."""
        return self.clients["samples"]

    @property
    def label_coverage(self) -> Floats:
        """Return Σ_c min(C·dis_n^c, 1) of each client."""
        return self.clients["label_coverage"]

    @property
    def kept_shares(self) -> Floats:
        """Return the share of its model that each client's last upload held."""
        return self.clients["kept_shares"]

    @property
    def last_round(self) -> NDArray[np.int64]:
        """Return when each client last took part, 0 for never."""
        return self.clients["last_round"]

    @property
    def client_memory(self) -> dict[str, NDArray[Any]]:
        """Return what one method remembers of each client, arrays [clients] by name; see `digest`."""
        return self.clients.own


def check_plan(plan: Plan, clients: int, table: Units) -> None:
    """Refuse a plan that asks somebody for things that exclude each other, before anything is sent."""
    asked = [task.client for task in plan.tasks]
    if len(set(asked)) < len(asked) or not all(0 <= client < clients for client in asked):
        raise ValueError(f"a plan must name each of its clients once, by numbers from 0 to {clients - 1}")
    for task in plan.tasks:
        wrong = _contradiction(task, plan)
        if wrong:
            raise ValueError(f"the plan asks client {task.client} for {wrong}")
    if any(task.down.sub_model is not None for task in plan.tasks):
        check_chain(table)


def _contradiction(task: Task, plan: Plan) -> str:
    """Return what in a task excludes something else; "" if nothing does."""
    if task.down.shared != plan.tasks[0].down.shared:
        return "something else than the others are sent: moves of one reference go to all, or to nobody"
    if task.up.needs_base and not task.down.known:
        return "a difference, but the server does not know all that the client begins with"
    if task.up.sub_model != task.down.sub_model:
        return "another sub-model than the one that it is sent"
    if task.vectors and (task.up != EVERYTHING or task.down != ALL_VALUES):
        return f"{task.vectors[0]!r} beside its model, but the model does not travel whole and in float32 both ways"
    for place, rule in enumerate(task.local):
        excluded = rule.excludes(task.local[:place] + task.local[place + 1 :])
        if excluded:
            return f"{type(rule).__name__} beside {excluded}"
    return ""


class Strategy(Protocol):
    """A method. Both calls are pure: the same arguments give the same result."""

    def plan(self, state: ServerState, fleet: Fleet, rng: np.random.Generator) -> Plan:
        """Return the coming round; rng is the round's own generator."""
        ...

    def absorb(
        self, state: ServerState, fleet: Fleet, plan: Plan, uploads: Sequence[Upload], model: Mapping[str, Tensor]
    ) -> ServerState:
        """Return the state after a round; model: the masked average of the uploads that count."""
        ...


def start(model: Mapping[str, Tensor], clients: int) -> ServerState:
    """Return the state before round 1."""
    return ServerState(0, model, ClientTable.unknown(clients))


def digest(
    state: ServerState,
    plan: Plan,
    uploads: Sequence[Upload],
    model: Mapping[str, Tensor],
    memory: object = None,
    client_memory: Mapping[str, NDArray[Any]] | None = None,
) -> ServerState:
    """Remember what every method remembers of a round: the model, the reports and the masks of those that counted.

    A client whose upload did not count no longer shares a mask with the server: it gets the full model next.
    memory, client_memory: what the method itself wants to find again, in all and for each client
    """
    good = [upload for upload in uploads if upload.status == "ok"]
    told = [upload for upload in good if not math.isnan(upload.label_coverage)]  # a deployment tells it once
    clients = state.clients.with_own(client_memory or {})
    clients = clients.record([upload.client for upload in uploads], last_round=plan.round, masks=None)
    clients = clients.record(
        [upload.client for upload in good],
        masks=[upload.mask for upload in good],
        kept_shares=[upload.kept_share for upload in good],
        losses=[upload.train_loss for upload in good],
        oort_statistics=[upload.oort_statistic for upload in good],
        samples=[upload.samples for upload in good],
    )
    coverage = [upload.label_coverage for upload in told]
    clients = clients.record([upload.client for upload in told], label_coverage=coverage)
    return dataclasses.replace(state, round=plan.round, model=model, clients=clients, memory=memory)


def download_shares(state: ServerState, everything: NDArray[np.bool_]) -> Floats:
    """Return the share of each client's model that its next download holds: `everything`, or what it sent last."""
    unknown = np.isnan(state.kept_shares) | (state.clients["masks"] == None)  # noqa: E711
    return np.where(everything | unknown, 1.0, state.kept_shares)


def known_or_mean(values: Floats) -> Floats:
    """Fill what is not known yet with the mean of what is; with ones if nothing is."""
    known = ~np.isnan(values)
    return np.where(known, values, values[known].mean() if known.any() else 1.0)


def fill_budget(order: Sequence[int] | NDArray[np.int64], bits: Floats, allowance: float) -> list[int]:
    """Take clients in this order while their models fit the allowance, skipping one that does not fit."""
    taken, used = [], 0.0
    for client in order:
        if used + bits[client] <= allowance * (1 + 1e-12):
            taken.append(int(client))
            used += float(bits[client])
    return taken


def check_share(name: str, share: float) -> None:
    """Refuse a share that is none, or more than all; name: the option's."""
    if not 0.0 < share <= 1.0:
        raise ValueError(f"{name} must lie above 0 and at most at 1, not {share}")


def draw_clients(clients: int, share: float, rng: np.random.Generator) -> list[int]:
    """Return a share of the clients, halves up and at least one, at random without replacement."""
    count = max(1, math.floor(share * clients + 0.5))
    return list(range(clients)) if count == clients else rng.choice(clients, count, replace=False).tolist()


def full_model_plan(
    state: ServerState, clients: Sequence[int], bits: int = FLOAT_BITS, *, feedback: Feedback = "none"
) -> Plan:
    """Return a round of full models both ways for the chosen clients."""
    up, down = chain(*value_stages(bits, feedback)), download(None, bits, broadcast=True)
    return Plan(state.round + 1, tuple(Task(client, up, down) for client in sorted(clients)), broadcast=True)


def value_stages(bits: int, feedback: Feedback, *between: Stage) -> tuple[Stage, ...]:
    """Return the stages of an upload in so many bits a value, with others between the differences and the rounding."""
    if bits == FLOAT_BITS:
        return between
    if feedback == "none":
        return Difference(), *between, Bits(bits)
    # What is rounded at random is more than error feedback can bear: it would feed back growing errors.
    return Difference(), ErrorFeedback(replaced=feedback == "all"), *between, Bits(bits, "nearest")


def download(mask: bytes | None, bits: int, *, broadcast: bool) -> Down:
    """Return what a client is sent in so many bits a value: all of its model, or the units of a mask."""
    return Values(mask) if bits == FLOAT_BITS else Moves(mask, chain(Bits(bits)), broadcast)


def check_bits(bits: int, feedback: Feedback) -> None:
    """Refuse a number of bits that no payload has, and error feedback where nothing is rounded away."""
    if bits not in (FLOAT_BITS, *BITS):
        raise ValueError(f"value_bits must be 32, 8, 4 or 2, not {bits}")
    if feedback not in FEEDBACKS:
        raise ValueError(f"error_feedback must be one of {', '.join(FEEDBACKS)}, not {feedback!r}")
    if feedback != "none" and bits == FLOAT_BITS:
        raise ValueError("error_feedback needs value_bits below 32: in float32 nothing is rounded away")
