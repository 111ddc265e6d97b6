"""What a budget would cost a fleet: rates, round time and bytes before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from feddd.core.allocation import Allocation, allocate, check_budget
from feddd.errors import InputError
from feddd.world import fleets

MLP_BITS = 85_614 * 32
CURVE_POINTS = 9


def plan_fleet(
    path: Path, *, budget: float, max_dropout: float, penalty: float, model_bits: float | None = None
) -> dict[str, Any]:
    """Return the allocation for a fleet file, per client and in all, and the curve over feasible budgets.

    Facts that the file does not have are taken as equal for all: one sample, full label coverage, loss 1.
    """
    if model_bits is not None and not (np.isfinite(model_bits) and model_bits > 0):
        raise InputError(f"--model-bits must be positive and finite, not {model_bits}")
    fleet = fleets.read_csv(path)
    names, columns, count = fleet.clients, fleet.columns, len(fleet.clients)
    if model_bits is not None and "model_bits" in columns:
        raise InputError(f"--model-bits and the column model_bits of {path} cannot both be given")
    bits = columns.get("model_bits", np.full(count, model_bits or MLP_BITS))
    samples = columns.get("samples", np.ones(count))
    contribution = samples / samples.sum() * columns.get("label_coverage", np.ones(count)) * bits / bits.max()
    contribution = contribution * columns.get("loss", np.ones(count))
    per_bit = 1.0 / columns["uplink_bits_per_s"] + 1.0 / columns["downlink_bits_per_s"]
    compute = columns["compute_seconds"]
    full_seconds = float((compute + bits * per_bit).max())

    def solve(wanted: float) -> Allocation:
        return allocate(
            bits,
            per_bit,
            compute,
            contribution,
            budget=wanted,
            max_dropout=max_dropout,
            penalty=penalty * full_seconds,
        )

    try:
        check_budget(budget, max_dropout)
        chosen = solve(budget)
    except ValueError as error:
        raise InputError(f"{path}: {error}") from error
    curve = [solve(point) for point in np.linspace(1.0 - max_dropout, 1.0, CURVE_POINTS)]
    return {
        "budget": budget,
        "max_dropout": max_dropout,
        "penalty": penalty,
        "clients_count": count,
        "full_round_seconds": full_seconds,
        "round_seconds": chosen.round_seconds,
        "upload_bytes": float((bits * (1 - chosen.dropout)).sum() / 8),
        "full_upload_bytes": float(bits.sum() / 8),
        "clients": [_client(*row) for row in zip(names, chosen.dropout, bits, per_bit, compute, strict=True)],
        "curve": [_point(point, bits) for point in curve],
    }


def _client(name: str, dropout: float, bits: float, per_bit: float, compute: float) -> dict[str, Any]:
    return {
        "client": name,
        "dropout": float(dropout),
        "upload_bytes": float(bits * (1 - dropout) / 8),
        "seconds": float(compute + bits * (1 - dropout) * per_bit),
    }


def _point(allocation: Allocation, bits: NDArray[np.float64]) -> dict[str, float]:
    kept = float((bits * (1 - allocation.dropout)).sum())
    return {
        "budget": kept / float(bits.sum()),
        "round_seconds": allocation.round_seconds,
        "upload_bytes": kept / 8,
        "mean_dropout": float(allocation.dropout.mean()),
    }
