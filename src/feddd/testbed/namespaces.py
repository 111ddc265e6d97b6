"""A network of its own for a deployment: one namespace per client, each behind a link that is as slow as it should be.

The server's namespace holds a bridge; every client's namespace has one cable to it. Token buckets shape both ends: the
client's end is its uplink, the bridge's end its downlink. Nothing outside these namespaces is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from feddd.errors import InputError, RunError
from feddd.testbed.reaper import Reaper

SERVER_ADDRESS = "10.231.0.1"
MOST_CLIENTS = 200
QUEUE_MILLISECONDS = 400
LEAST_BURST_BYTES = 4000


@dataclass(frozen=True)
class Traffic:
    """Bytes that passed a client's end of its cable since it was made."""

    sent: int
    received: int


@dataclass
class Network:
    """Rates in bits per second, one pair (up, down) per client; use it in a `with`."""

    rates: Sequence[tuple[float, float]]
    name: str = field(default_factory=lambda: f"feddd-{os.getpid()}")
    reaper: Reaper | None = None

    def __enter__(self) -> Network:
        check_possible(len(self.rates))
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def namespace(self, client: int) -> str:
        """Return the namespace of a client; −1 is the server's."""
        return f"{self.name}-server" if client < 0 else f"{self.name}-{client}"

    def wrap(self, client: int, command: Sequence[str]) -> list[str]:
        """Return the command, inside that namespace."""
        return ["ip", "netns", "exec", self.namespace(client), *command]

    def traffic(self, client: int) -> Traffic:
        """Return what has passed so far."""
        answer = json.loads(_run("ip", "-n", self.namespace(client), "-s", "-j", "link", "show", "cable"))
        counters = answer[0]["stats64"]
        return Traffic(int(counters["tx"]["bytes"]), int(counters["rx"]["bytes"]))

    def close(self) -> None:
        """Remove the namespaces; cables and buckets go with them."""
        ours = [self.namespace(client) for client in range(-1, len(self.rates))]
        there = {line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()}
        for name in ours:
            if name in there:
                _run("ip", "netns", "del", name)
            if self.reaper:
                self.reaper.forget("namespace", name)

    def _build(self) -> None:
        server = self.namespace(-1)
        self._add(server)
        _run("ip", "-n", server, "link", "set", "lo", "up")
        _run("ip", "-n", server, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", server, "addr", "add", f"{SERVER_ADDRESS}/24", "dev", "bridge")
        _run("ip", "-n", server, "link", "set", "bridge", "up")
        for client, (uplink_bits_per_s, downlink_bits_per_s) in enumerate(self.rates):
            own, port = self.namespace(client), f"port{client}"
            self._add(own)
            cable = ["type", "veth", "peer", "name", "cable", "netns", own]
            _run("ip", "-n", server, "link", "add", port, *cable)
            _run("ip", "-n", server, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", own, "link", "set", "lo", "up")
            _run("ip", "-n", own, "addr", "add", f"10.231.0.{10 + client}/24", "dev", "cable")
            _run("ip", "-n", own, "link", "set", "cable", "up")
            _shape(own, "cable", uplink_bits_per_s)
            _shape(server, port, downlink_bits_per_s)

    def _add(self, namespace: str) -> None:
        if self.reaper:
            self.reaper.watch("namespace", namespace)
        _run("ip", "netns", "add", namespace)


def check_possible(clients: int) -> None:
    """Say what is missing for shaped links, if anything is."""
    if clients > MOST_CLIENTS:
        raise InputError(f"a testbed has at most {MOST_CLIENTS} clients, not {clients}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise InputError(f"shaped links need {' and '.join(missing)} (Debian's iproute2); --no-shaping does without")
    if os.geteuid() != 0:
        raise InputError("shaped links need root, for network namespaces; --no-shaping does without")


def _shape(namespace: str, device: str, bits_per_s: float) -> None:
    """A token bucket: a burst of a tenth of a second at most, so that a short message is not faster than the link."""
    burst = max(LEAST_BURST_BYTES, int(bits_per_s / 80))
    limit = ["rate", f"{round(bits_per_s)}bit", "burst", f"{burst}b", "latency", f"{QUEUE_MILLISECONDS}ms"]
    _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *limit)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RunError(f"{' '.join(command)}: {' '.join(done.stderr.split())}")
    return done.stdout
