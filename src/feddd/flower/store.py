"""What a client keeps between rounds, on its disk: tensors by name, atomic, versioned, and read by nothing but this.

Flower's own state is lost when a SuperNode restarts. A state belongs to the version that the server named when it
asked for the upload; a client that holds another version, or none, says so and is sent the full model.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from feddd.core.units import Units
from feddd.files import write_atomically
from feddd.wire.download_format import is_sound
from feddd.wire.stage import ClientState

FORMAT = "3"


class ClientStore:
    """One client's file; the name is a digest of the client's id, which may be any text."""

    def __init__(self, folder: Path, client: str) -> None:
        self.path = folder / f"client-{hashlib.sha256(client.encode()).hexdigest()[:16]}.safetensors"

    def version(self) -> str:
        """Return the version of the state on disk; "" if there is none, or none that can be read."""
        return self._metadata().get("version", "")

    def save(self, version: str, state: ClientState, units: Units) -> None:
        """Replace the state; a crash leaves the old one or the new one, never half of either."""
        tensors = {name: tensor.clone().contiguous() for name, tensor in state.items()}
        metadata = {"format": FORMAT, "version": version, "units": units.digest.hex()}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, save(tensors, metadata))

    def load(self, run: str, units: Units) -> ClientState:
        """Return the state of this run; nothing if the disk does not hold it, or something else in its place."""
        metadata = self._metadata()
        if run_of(metadata.get("version", "")) != run or metadata.get("units") != units.digest.hex():
            return {}
        try:
            with safe_open(self.path, framework="pt") as file:
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, SafetensorError):
            return {}
        return state if is_sound(state, units) else {}

    def _metadata(self) -> dict[str, str]:
        try:
            with safe_open(self.path, framework="pt") as file:
                metadata = dict(file.metadata() or {})
        except (OSError, SafetensorError):
            return {}
        return metadata if metadata.get("format") == FORMAT else {}


def run_of(version: str) -> str:
    """Return the run that a version belongs to."""
    return version.partition(".")[0]
