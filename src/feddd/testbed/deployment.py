"""A SuperLink and its SuperNodes as processes: started, watched, and ended whatever happens."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from feddd.errors import RunError
from feddd.testbed.certificates import Certificates, make_certificates
from feddd.testbed.reaper import Reaper

START_SECONDS = 60.0
CONNECTION = "testbed"
OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}

Wrap = Callable[[int, Sequence[str]], list[str]]
"""How the command of a node (−1: the SuperLink) is started, e.g. inside a network namespace."""


@dataclass
class Deployment:
    """A SuperLink on `address` and nodes with these node configs; use it in a `with`.

    secure: TLS and registered keys; without, anybody who reaches the port takes part
    database: what the SuperLink knows survives it; in memory it does not, but has no locks to wait for
    reaper: ends what this process cannot, because it was killed itself
    """

    folder: Path
    node_configs: Sequence[Mapping[str, str | int | float]]
    address: str = "127.0.0.1"
    secure: bool = True
    wrap: Wrap = lambda _, command: list(command)
    port: int = 0
    certificates: Certificates | None = None
    database: bool = True
    reaper: Reaper | None = None
    _processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __enter__(self) -> Deployment:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.port = self.port or free_port()
            if self.secure and self.certificates is None:
                self.certificates = make_certificates(
                    self.folder / "certificates", [self.address, "127.0.0.1"], len(self.node_configs)
                )
            self._write_connection()
            self.start_superlink()
            if self.secure:
                for key in self._certificates().node_keys:
                    self.flwr("supernode", "register", str(key.with_suffix(".pub")), CONNECTION)
            for number in range(len(self.node_configs)):
                self.start_node(number)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def environment(self) -> dict[str, str]:
        """No telemetry, no installer, a private home, one thread per client."""
        own = {"FLWR_HOME": str(self.folder / "flwr"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        bin_folder = str(Path(sys.executable).parent)
        return {**os.environ, **OFFLINE, **own, "PATH": f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"}

    def start_superlink(self) -> None:
        """Start it, and wait until it listens."""
        where = ["--host", self.address, "--port", str(self.port)]
        where += ["--database", str(self.folder / "superlink.db")] if self.database else []
        command = [_tool("flower-superlink"), *where, "--disable-runtime-dependency-installation"]
        if self.secure:
            files = self._certificates()
            command += ["--ssl-ca-certfile", str(files.ca), "--ssl-certfile", str(files.server_certificate)]
            command += ["--ssl-keyfile", str(files.server_key), "--enable-supernode-auth"]
        else:
            command.append("--insecure")
        self._start("superlink", self.wrap(-1, command))
        self._wait_for_port()

    def start_node(self, number: int, *, key: Path | None = None, name: str = "") -> None:
        """Start a SuperNode; `key` in place of its own, `name` in place of node-NUMBER."""
        pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in self.node_configs[number].items())
        command = [_tool("flower-supernode"), "--superlink", f"{self.address}:{self.port}", "--node-config", pairs]
        command += ["--host", "127.0.0.1", "--port", str(free_port())]
        if self.secure:
            files = self._certificates()
            command += ["--root-certificates", str(files.ca)]
            command += ["--auth-supernode-private-key", str(key or files.node_keys[number])]
        else:
            command.append("--insecure")
        self._start(name or f"node-{number}", self.wrap(number, command))

    def kill(self, name: str) -> None:
        """End a process and its children at once, as a power cut would."""
        self._end(name, signal.SIGKILL)

    def exit_code(self, name: str) -> int | None:
        """None while it runs."""
        return self._processes[name].poll()

    def flwr(self, *arguments: str, timeout: float = 120.0) -> str:
        """Return a command of Flower's own command line; its output."""
        done = subprocess.run(
            self.wrap(-1, [_tool("flwr"), *arguments]),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=self.folder,
        )
        if done.returncode != 0:
            words = " ".join((done.stdout + done.stderr).split())[-400:]
            raise RunError(f"flwr {' '.join(arguments[:2])} failed: {words}")
        return done.stdout

    def run_app(self, app: Path, run_config: Mapping[str, str | int | float]) -> int:
        """Start a run; its id."""
        pairs = " ".join(f"{name}={json.dumps(value)}" for name, value in run_config.items())
        answer = json.loads(self.flwr("run", str(app), CONNECTION, "--run-config", pairs, "--format", "json"))
        if not answer.get("success"):
            raise RunError(f"flwr run failed: {answer.get('error-message', answer)}")
        return int(answer["run-id"])

    def status(self, run: int) -> str:
        """Return what Flower says of a run: "running", "finished:completed", …"""
        answer = json.loads(self.flwr("list", CONNECTION, "--run-id", str(run), "--format", "json"))
        return str(answer["runs"][0]["status"])

    def run_log(self, run: int) -> str:
        """Return what the run's server app has said."""
        return self.flwr("log", str(run), CONNECTION, "--show")

    def log(self, name: str) -> str:
        """Return what a process has said so far."""
        path = self.folder / f"{name}.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    def close(self) -> None:
        """End everything that was started, nodes first."""
        for name in sorted(self._processes, key=lambda name: name == "superlink"):
            self._end(name, signal.SIGTERM)

    def _end(self, name: str, how: signal.Signals) -> None:
        process = self._processes.pop(name)
        _end(process, how)
        if self.reaper:
            self.reaper.forget("group", process.pid)

    def _certificates(self) -> Certificates:
        if self.certificates is None:
            raise RunError("the deployment has no certificates")
        return self.certificates

    def _write_connection(self) -> None:
        """Where the command line finds the SuperLink."""
        home = self.folder / "flwr"
        home.mkdir(parents=True, exist_ok=True)
        security = f'root-certificates = "{self._certificates().ca}"' if self.secure else "insecure = true"
        address = f'address = "{self.address}:{self.port}"'
        lines = ["[superlink]", f'default = "{CONNECTION}"', "", f"[superlink.{CONNECTION}]", address, security, ""]
        (home / "config.toml").write_text("\n".join(lines), encoding="utf-8")

    def _start(self, name: str, command: Sequence[str]) -> None:
        if name in self._processes:
            raise RunError(f"{name} is running already")
        with (self.folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self.environment, start_new_session=True
            )
        if self.reaper:
            self.reaper.watch("group", self._processes[name].pid)

    def _wait_for_port(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < START_SECONDS:
            code = self.exit_code("superlink")
            if code is not None:
                raise RunError(f"the SuperLink ended with code {code}: {_last_line(self.log('superlink'))}")
            probe = f"import socket; socket.create_connection(({self.address!r}, {self.port}), 1.0)"
            command = self.wrap(-1, [sys.executable, "-c", probe])
            if subprocess.run(command, capture_output=True, check=False).returncode == 0:
                return
            time.sleep(0.2)
        raise RunError(f"the SuperLink does not listen after {START_SECONDS:.0f} s")


def free_port() -> int:
    """Return a port that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _tool(name: str) -> str:
    """Return a command of the environment that this Python belongs to."""
    return str(Path(sys.executable).parent / name)


def _end(process: subprocess.Popen[Any], how: signal.Signals) -> None:
    """Signal the whole session of a process we started, and wait; kill what does not go."""
    for each, seconds in ((how, 10.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, each)
        except ProcessLookupError:
            break
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            continue
        break
    process.wait(10)


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
