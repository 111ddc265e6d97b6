"""What local training needs besides the data: rules that travel with a task, by value.

A rule changes how a client trains. The simulator's trainers carry it out; in a deployment it travels in the `config`
of the message, the user's train function carries it out, and confirms it by reporting the same numbers as metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from feddd.core.units import Params, Units
from feddd.wire.chosen import everything, some
from feddd.wire.exchange import chain, through_bytes
from feddd.wire.stage import ClientState, Update

Memory = Mapping[str, Tensor]
"""What a rule remembers from one step of training to the next: tensors by name, [clients, …]."""
Vectors = Mapping[str, Params]
"""Tensors of a model's names and shapes, by the name of the whole: what may travel beside the model."""


@dataclass(frozen=True)
class LocalRound:
    """A stack of clients that is about to train, or has trained: all that a rule may look at.

    before: W, a stack    states: what each of the clients keeps    vectors: as the server sent them, without a stack
    steps: how many steps of SGD each takes, [clients]    each: the rule's own numbers of each client, [clients]
    """

    table: Units
    before: Params
    states: Sequence[ClientState]
    vectors: Vectors
    steps: Tensor
    learning_rate: float
    each: Mapping[str, Tensor] = field(default_factory=dict)

    def only(self, fine: NDArray[np.bool_]) -> LocalRound:
        """Return some of the clients; `each` is worked out for every rule anew."""
        states = [state for state, ok in zip(self.states, fine, strict=True) if ok]
        steps = self.steps[torch.from_numpy(fine)]
        return dataclasses.replace(self, before=some(self.before, fine), states=states, steps=steps)


class Rule:
    """One thing that is different in training. Subclasses are frozen dataclasses and override what they need.

    `each` names the fields in which clients of one stack may differ. `lasting`: clients keep something for it.
    `vectors` names what travels beside the model: the server's goes down, the client's answer goes up, in float32.
    """

    each: ClassVar[tuple[str, ...]] = ()
    lasting: ClassVar[bool] = False
    vectors: ClassVar[tuple[str, ...]] = ()

    @property
    def kind(self) -> tuple[Any, ...]:
        """Return what clients must have in common to train as one stack."""
        settings = {name: value for name, value in vars(self).items() if name not in self.each}
        return type(self), *settings.items()

    @property
    def config(self) -> dict[str, float]:
        """Return what a train function is told in a deployment, and has to confirm."""
        raise NotImplementedError(f"{type(self).__name__} is for simulations: it says nothing to a train function")

    @property
    def steps(self) -> bool:
        """Return whether the rule changes the steps of training."""
        return type(self).step is not Rule.step

    def excludes(self, others: Sequence[Rule]) -> str:
        """Return what of the other rules of a task makes no sense beside this one; "" if all do."""
        twice = any(type(other) is type(self) for other in others)
        return f"another {type(self).__name__}" if twice else ""

    def start(self, at: LocalRound) -> Memory:
        """Return what the steps need to know."""
        return {}

    def step(self, gradients: Params, params: Params, memory: Memory) -> tuple[Params, Memory]:
        """Return the gradients that SGD follows instead of these, and what is remembered; stacks.

        gradients: of all that is learnt; their memory is used again, so copy what you keep
        params: the weights before the step
        """
        return gradients, memory

    def finish(self, at: LocalRound, after: Params) -> tuple[list[ClientState], Vectors]:
        """Return what the clients keep, and the vectors that they send, stacks; after: Ŵ, a stack."""
        return list(at.states), {}

    def absorb(self, vectors: Vectors, means: Vectors, share: float) -> Vectors:
        """Return the server's vectors after a round; means: over the clients that counted, a share of all."""
        return means


@dataclass(frozen=True)
class Scaler(Rule):
    """Divide the outputs of hidden layers by a client's width while it trains, as the full model will not be."""

    width: float = 1.0

    each: ClassVar[tuple[str, ...]] = ("width",)

    @property
    def config(self) -> dict[str, float]:
        """Return the width."""
        return {"hidden-scaler": self.width}


@dataclass(frozen=True)
class Stepping:
    """A rule at work on a stack of clients, with what it remembers."""

    rule: Rule
    memory: Memory

    def only(self, places: slice) -> Stepping:
        """Return the rule at work on some of the clients."""
        return Stepping(self.rule, {name: tensor[places] for name, tensor in self.memory.items()})


def start_rules(local: Sequence[Sequence[Rule]], at: LocalRound) -> tuple[Stepping, ...]:
    """Start all rules that change the steps of training; local: each client's rules, of one kind."""
    return tuple(
        Stepping(rules[0], rules[0].start(_with_numbers(rules, at)))
        for rules in zip(*local, strict=True)
        if rules[0].steps
    )


def change_gradients(
    rules: Sequence[Stepping], gradients: Params, params: Params
) -> tuple[Params, tuple[Stepping, ...]]:
    """Send the gradients of a step through all rules, in their order; stacks."""
    after = []
    for one in rules:
        gradients, memory = one.rule.step(gradients, params, one.memory)
        after.append(Stepping(one.rule, memory))
    return gradients, tuple(after)


def finish_rules(
    local: Sequence[Sequence[Rule]], at: LocalRound, after: Params
) -> tuple[list[ClientState], dict[str, Params]]:
    """Return what clients keep after training, and the vectors that they send beside their models; stacks."""
    sent: dict[str, Params] = {}
    for rules in zip(*local, strict=True):
        states, vectors = rules[0].finish(_with_numbers(rules, at), after)
        at = dataclasses.replace(at, states=states)
        sent |= vectors
    return list(at.states), sent


def absorb_vectors(local: Sequence[Rule], vectors: Vectors, means: Vectors, share: float) -> dict[str, Params]:
    """Return the server's vectors after a round; means: over the clients that counted, a share of all."""
    found = dict(vectors)
    for rule in local:
        own = {name: means[name] for name in rule.vectors if name in means}
        found |= rule.absorb(vectors, own, share) if own else {}
    return found


def vector_bytes(local: Sequence[Rule], table: Units) -> int:
    """Return what the vectors beside a model take, in one direction: each is a whole payload of its own."""
    count = sum(len(rule.vectors) for rule in local)
    if not count:
        return 0
    size = chain().planned_bytes(table)
    assert size is not None
    return count * size


def vector_through_bytes(stack: Params, table: Units) -> dict[str, Tensor]:
    """Return what the server reads of the clients' vectors, with every payload really written."""
    clients = len(stack[table.slots[0].name])
    return dict(through_bytes([chain()] * clients, Update(stack, everything(table, clients)), table).values)


def _with_numbers(rules: Sequence[Rule], at: LocalRound) -> LocalRound:
    """Return the training as one rule of every client sees it: with its numbers."""
    each = {name: torch.tensor([float(getattr(rule, name)) for rule in rules]) for name in rules[0].each}
    return dataclasses.replace(at, each=each)
