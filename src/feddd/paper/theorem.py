"""Theorem 2 on a problem small enough to know everything: L, σ, both ε, and the gradient norms that it bounds.

Client n has F_n(W) = ½ tr((W − B_n) H (W − B_n)ᵀ): linear regression with the same inputs everywhere (H is their second
moment) and targets of its own. Then L is H's largest eigenvalue, ‖∇F_n(W) − ∇F(W)‖² = ‖(B_n − B̄)H‖² = σ_n² for every W,
and the minimum is at B̄. A unit is a row of W. Each round is one gradient step a client, as in the proof.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from feddd.core.aggregation import Aggregator
from feddd.core.convergence import Form, descent, gradient_bound
from feddd.core.selection import Selector, select
from feddd.core.streams import stream
from feddd.core.units import units

Array = NDArray[np.float64]
FORMS: tuple[Form, ...] = ("printed", "corrected")
DROPOUT = 0.4
STEP = 0.1
"""η · L"""


@dataclass(frozen=True)
class Problem:
    """inputs: H [d, d]    targets: B_n [clients, k, d]    start: W⁰ [k, d]"""

    inputs: Array
    targets: Array
    start: Array

    @property
    def smoothness(self) -> float:
        """L."""
        return float(np.linalg.eigvalsh(self.inputs)[-1])

    @property
    def variance(self) -> float:
        """(1/N) Σ σ_n², the same for every W."""
        apart = (self.targets - self.targets.mean(0)) @ self.inputs
        return float((apart**2).sum((1, 2)).mean())

    def gradients(self, models: Array) -> Array:
        """∇F_n at each client's own W, [clients, k, d]."""
        return (models - self.targets) @ self.inputs

    def gap(self, model: Array) -> float:
        """F(W) − F(W*)."""
        apart = model - self.targets.mean(0)
        return float(0.5 * np.einsum("kd,de,ke->", apart, self.inputs, apart))

    def squared_gradient(self, model: Array) -> float:
        """‖∇F(W)‖²."""
        return float((((model - self.targets.mean(0)) @ self.inputs) ** 2).sum())


def make_problem(spread: float, *, clients: int = 10, outputs: int = 20, inputs: int = 10, seed: int = 0) -> Problem:
    """spread: how far clients' targets lie apart, relative to the targets themselves; 0 is IID."""
    rng = stream(seed, "theorem")
    features = rng.normal(size=(40 * inputs, inputs))
    common = rng.normal(size=(outputs, inputs))
    own = rng.normal(size=(clients, outputs, inputs))
    return Problem(features.T @ features / len(features), common + spread * own, rng.normal(size=(outputs, inputs)))


@dataclass(frozen=True)
class Outcome:
    """A run beside its bounds.

    weight_error, gradient_error: the largest ε of a round, by Assumption 3 (on weights) and as the proof uses it
    bounds: by (ε, form), None where the theorem says nothing because the learning rate is too large for that ε
    """

    selector: Selector
    spread: float
    broadcast_every: int
    measured: float
    weight_error: float
    gradient_error: float
    bounds: dict[tuple[str, Form], float | None]


def check(selector: Selector, spread: float, broadcast_every: int, rounds: int) -> Outcome:
    """Run FedDD's rounds on a problem of this spread and work out every bound."""
    problem = make_problem(spread)
    learning_rate = STEP / problem.smoothness
    per_round = _rounds(problem, selector, broadcast_every, rounds, learning_rate)
    norms, weight_errors, gradient_errors = zip(*per_round, strict=True)
    errors = {"weights": max(weight_errors), "gradients": max(gradient_errors)}
    bounds = {
        (name, form): gradient_bound(
            initial_gap=problem.gap(problem.start),
            rounds=rounds,
            broadcast_every=broadcast_every,
            learning_rate=learning_rate,
            smoothness=problem.smoothness,
            epsilon=error,
            variance=problem.variance,
            form=form,
        )
        if descent(learning_rate, problem.smoothness, error, form) > 0
        else None
        for name, error in errors.items()
        for form in FORMS
    }
    measured = float(np.mean(norms))
    return Outcome(selector, spread, broadcast_every, measured, errors["weights"], errors["gradients"], bounds)


def _rounds(
    problem: Problem, selector: Selector, broadcast_every: int, rounds: int, learning_rate: float
) -> Iterator[tuple[float, float, float]]:
    """Per round: ‖∇F(W^t)‖², ε on weights, ε on gradients."""
    count = len(problem.targets)
    server = problem.start
    clients = np.repeat(server[None], count, axis=0)
    for number in range(1, rounds + 1):
        squared_gradient = problem.squared_gradient(server)
        trained = clients - learning_rate * problem.gradients(clients)
        rngs = [stream(0, "theorem", "mask", number, n) for n in range(count)]
        masks = np.stack([_mask(clients[n], trained[n], selector, rngs[n]) for n in range(count)])
        steps = learning_rate * problem.gradients(np.repeat(server[None], count, axis=0))
        gradient_error = _relative(_masked_mean(steps, masks, np.zeros_like(server)), steps.mean(0))
        new = _masked_mean(trained, masks, server)
        yield squared_gradient, _relative(new, trained.mean(0)), gradient_error
        server = new
        full = number % broadcast_every == 0
        clients = np.repeat(server[None], count, axis=0) if full else np.where(masks[:, :, None], server, trained)


def _mask(before: Array, after: Array, selector: Selector, rng: np.random.Generator) -> NDArray[np.bool_]:
    mask = select(_state(before), _state(after), DROPOUT, selector=selector, rng=rng)
    sent: NDArray[np.bool_] = mask["rows"].numpy()
    return sent


def _masked_mean(values: Array, masks: NDArray[np.bool_], previous: Array) -> Array:
    mean = Aggregator(_state(previous), units=units(_state(previous)))
    for value, mask in zip(values, masks, strict=True):
        mean.add(_state(value), {"rows": torch.from_numpy(mask)}, 1)
    found: Array = mean.result()["rows.weight"].numpy()
    return found


def _state(rows: Array) -> dict[str, torch.Tensor]:
    return {"rows.weight": torch.from_numpy(np.ascontiguousarray(rows))}


def _relative(masked: Array, full: Array) -> float:
    """‖masked mean − full mean‖² / ‖full mean‖²."""
    return float(((masked - full) ** 2).sum() / (full**2).sum())


def outcomes(rounds: int) -> list[Outcome]:
    """Return two selection rules, three spreads of the clients' targets, three broadcast periods."""
    rules: tuple[Selector, ...] = ("importance", "random")
    settings = [(rule, spread, every) for rule in rules for spread in (0.0, 0.1, 1.0) for every in (1, 5, 10)]
    return [check(*setting, rounds) for setting in settings]
