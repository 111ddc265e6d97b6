"""What a client keeps between rounds, on its disk: atomic, versioned, and readable by nothing but this.

Flower's own state is lost when a SuperNode restarts. A state belongs to the version that the server named when it
asked for the upload; a client that holds another version, or none, says so and is sent the full model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from feddd.wire.format import pack_mask, unpack_mask
from feddd.core.units import Units
from feddd.files import write_atomically
from feddd.flower.references import Held
from feddd.strategies.client import Kept

FORMAT = "2"
MOST_DIGITS = 9


class ClientStore:
    """One client's file; the name is a digest of the client's id, which may be any text."""

    def __init__(self, folder: Path, client: str) -> None:
        self.path = folder / f"client-{hashlib.sha256(client.encode()).hexdigest()[:16]}.safetensors"

    def version(self) -> str:
        """The version of the state on disk; "" if there is none, or none that can be read."""
        return self._metadata().get("version", "")

    def save(
        self,
        version: str,
        kept: Kept,
        units: Units,
        coverage: dict[str, torch.Tensor] | None,
        reference: Held | None = None,
    ) -> None:
        """Replace the state; a crash leaves the old one or the new one, never half of either."""
        tensors = {"values": kept.values.contiguous()}
        if reference:
            tensors["reference"] = units.take(reference.model, units.full_mask())
        tensors |= {f"coverage.{name}": share.contiguous() for name, share in (coverage or {}).items()}
        metadata = {
            "format": FORMAT,
            "version": version,
            "mask": pack_mask(kept.mask, units).hex(),
            "units": units.digest.hex(),
            "reference": str(reference.number) if reference else "",
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, save(tensors, metadata))

    def load(self, version: str, units: Units) -> Kept | None:
        """The state of this version; None if the disk does not hold it."""
        metadata = self._metadata()
        if metadata.get("version") != version or metadata.get("units") != units.digest.hex():
            return None
        values = self._tensors().get("values")
        try:
            mask = unpack_mask(bytes.fromhex(metadata["mask"]), units)
        except (ValueError, KeyError):
            return None
        if values is None or values.dtype != torch.float32 or not bool(values.isfinite().all()):
            return None
        # After a full upload nothing is left to keep.
        expected = units.droppable_elements - units.kept_elements(mask) + len(units.fixed)
        # Behind it, with error feedback, is the residual.
        return Kept(mask, values) if values.shape in ((expected,), (expected + units.droppable_elements,)) else None

    def reference(self, run: str, units: Units) -> Held | None:
        """The reference of this run; None if it is not on disk."""
        metadata, flat = self._metadata(), self._tensors().get("reference")
        number = metadata.get("reference", "")
        if metadata.get("version", "").partition(".")[0] != run or metadata.get("units") != units.digest.hex():
            return None
        if flat is None or not number.isdecimal() or len(number) > MOST_DIGITS:
            return None
        if flat.dtype != torch.float32 or flat.shape != (units.elements,) or not bool(flat.isfinite().all()):
            return None
        model = {slot.name: torch.zeros(slot.shape) for slot in units.slots}
        units.put(model, units.full_mask(), flat)
        return Held(model, int(number))

    def coverage(self, run: str, units: Units) -> dict[str, torch.Tensor] | None:
        """CR(k), which the server tells once in a run; None if it has not been told, or is not on disk."""
        metadata = self._metadata()
        if metadata.get("version", "").partition(".")[0] != run or metadata.get("units") != units.digest.hex():
            return None
        told = {
            name.removeprefix("coverage."): t for name, t in self._tensors().items() if name.startswith("coverage.")
        }
        fits = told.keys() == {layer.name for layer in units.layers} and all(
            told[layer.name].dtype == torch.float64
            and told[layer.name].shape == (layer.units,)
            and bool(((told[layer.name] > 0) & (told[layer.name] <= 1)).all())
            for layer in units.layers
        )
        return told if told and fits else None

    def _tensors(self) -> dict[str, torch.Tensor]:
        try:
            with safe_open(self.path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}

    def _metadata(self) -> dict[str, str]:
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
        except (OSError, SafetensorError):
            return {}
        return metadata if metadata.get("format") == FORMAT else {}
