"""How long a round takes: beside plain loops and other frameworks, beside a busy neighbour, FedDD beside FedAvg."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from feddd.benchmarks.measuring import (
    Figure,
    Settings,
    make_world,
    own_script,
    program,
    ratio,
    simulated,
    take_turns,
    write_work,
)
from feddd.simulation.simulator import Simulation, World
from feddd.strategies.fedavg import FedAvg
from feddd.strategies.feddd import FedDD

PEERS = {"flower": 10.0, "pfl": 6.0, "jax": 2.8, "fedlab": None}
"""Frameworks that can be pointed to, and how many times faster a round of ours is to be."""


PHASES = {
    "worker_download": "download and merge",
    "worker_training": "local training",
    "worker_selection": "selection, and what is kept",
    "worker_sums": "sums",
    "plan": "the server's plan",
    "train": "waiting for the workers",
    "absorb": "the server's average",
}
"""Phases of a round as a run's timings have them, in words."""


def engine(settings: Settings) -> Iterator[Figure]:
    """FedAvg, 100 clients × 600 MNIST images, MLP: our engine, a hand-written loop, and the frameworks pointed to."""
    world = make_world(settings, "mnist", "mlp", 100, 600)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        write_work(world, _weights(world), folder)
        steps = {"feddd": stack.enter_context(simulated(world, FedAvg()))}
        steps["loop"] = stack.enter_context(program(sys.executable, own_script("loop"), str(folder)))
        for name, python in (settings.peers or {}).items():
            steps[name] = stack.enter_context(program(python, own_script(_script(name)), str(folder)))
        seconds = take_turns(steps, settings.rounds)
    ours = statistics.median(seconds["feddd"])
    yield Figure("engine", "FedAvg round, MLP, 100 × 600 MNIST", ours, "s")
    asked: dict[str, float | None] = {"loop": 2.2, **PEERS}
    titles = {"loop": "a hand-written two-thread loop", "jax": "a jitted JAX vmap", "flower": "Flower's simulation"}
    for name in steps:
        if name != "feddd":
            detail = f"{statistics.median(seconds[name]):.3g} s"
            times = ratio(seconds[name], seconds["feddd"])
            yield Figure("engine", f"faster than {titles.get(name, name)}", times, "×", asked[name], detail=detail)


def networks(settings: Settings) -> Iterator[Figure]:
    """CNN1 on Fashion-MNIST and CNN2 on CIFAR-10, 100 clients, beside a plain loop with torch's optimiser."""
    for dataset, model, samples, asked in (("fashion-mnist", "cnn1", 600, 3.5), ("cifar10", "cnn2", 500, 1.8)):
        world = make_world(settings, dataset, model, 100, samples)
        # The loop trains a tenth of the clients in its turns: its speed does not depend on how many there are.
        some = make_world(settings, dataset, model, 10, samples)
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            write_work(some, _weights(some), folder)
            steps = {
                "feddd": stack.enter_context(simulated(world, FedAvg())),
                "loop": stack.enter_context(program(sys.executable, own_script("torch_loop"), str(folder))),
            }
            seconds = take_turns(steps, max(3, settings.rounds // 2))
        ours, theirs = (statistics.median(seconds[name]) for name in ("feddd", "loop"))
        times = 10.0 * ratio(seconds["loop"], seconds["feddd"])
        detail = f"{100 * samples / ours / 1e3:.3g}k against {10 * samples / theirs / 1e3:.3g}k samples/s"
        yield Figure("networks", f"{model}, faster than a plain two-thread loop", times, "×", asked, detail=detail)


def busy(settings: Settings) -> Iterator[Figure]:
    """Return the same round while another process keeps one core busy."""
    world = make_world(settings, "mnist", "mlp", 100, 600)
    with simulated(world, FedAvg()) as step, _neighbour() as (wake, rest):

        def disturbed() -> float:
            wake()
            try:
                return step()
            finally:
                rest()

        seconds = take_turns({"quiet": step, "busy": disturbed}, settings.rounds)
    times = ratio(seconds["busy"], seconds["quiet"])
    yield Figure("busy", "a round beside a process that keeps one core busy", times, "×", 2.5, "at most")


def overhead(settings: Settings) -> Iterator[Figure]:
    """Return a FedDD round, as published and in 4 bits, over a FedAvg round on the same engine."""
    for model, dataset, clients, samples in (
        ("mlp", "mnist", 100, 600),
        ("cnn1", "fashion-mnist", 100, 600),
        ("cnn2", "cifar10", 24, 500),
    ):
        world = make_world(settings, dataset, model, clients, samples)
        rounds = 3 * settings.rounds if model == "mlp" else settings.rounds
        with (
            simulated(world, FedAvg()) as fedavg,
            simulated(world, FedDD()) as feddd,
            simulated(world, FedDD(value_bits=4)) as in_bits,
        ):
            seconds = take_turns({"FedAvg": fedavg, "FedDD": feddd, "FedDD in 4 bits": in_bits}, rounds)
        for name, asked in (("FedDD", 1.10), ("FedDD in 4 bits", 1.20)):
            detail = " / ".join(f"{statistics.median(seconds[each]):.3g}" for each in (name, "FedAvg")) + " s"
            times = ratio(seconds[name], seconds["FedAvg"])
            yield Figure("overhead", f"{name}: its round over FedAvg's, {model}", times, "×", asked, "at most", detail)


def profile(settings: Settings) -> Iterator[Figure]:
    """Return where the time of a round of the MLP goes: the workers' by client, the server's by round; medians."""
    world = make_world(settings, "mnist", "mlp", 100, 600)
    names, rounds = ("FedAvg", "FedDD"), settings.rounds + 3
    with Simulation(world) as one, Simulation(world) as other:
        runs = [one.run(FedAvg(), rounds, evaluate_every=rounds), other.run(FedDD(), rounds, evaluate_every=rounds)]
        # They take turns. The first two rounds start everything and drop nothing, the last one evaluates.
        turns = [[next(run).wall_seconds for run in runs] for _ in range(rounds)][2:-1]
    for place, name in enumerate(names):
        for phase, words in PHASES.items():
            spent = 1e3 * statistics.median(turn[place][phase] for turn in turns)
            by_client = phase.startswith("worker_")
            what = f"{name}, {words}, {'a client' if by_client else 'a round'}"
            yield Figure("profile", what, spent / len(world.parts) if by_client else spent, "ms")


def workers(settings: Settings) -> Iterator[Figure]:
    """Measure two workers beside one."""
    world = make_world(settings, "mnist", "mlp", 100, 600)
    with simulated(world, FedDD(), workers=1) as one, simulated(world, FedDD(), workers=2) as two:
        seconds = take_turns({"one": one, "two": two}, settings.rounds)
    yield Figure("workers", "two workers, faster than one", ratio(seconds["one"], seconds["two"]), "×", 1.6)


def ray(settings: Settings) -> Iterator[Figure]:
    """Measure two Ray actors on this machine beside two local processes."""
    world = make_world(settings, "mnist", "mlp", 100, 600)
    with simulated(world, FedDD(), workers=2) as local, simulated(world, FedDD(), workers=2, engine="ray") as actors:
        seconds = take_turns({"local": local, "ray": actors}, settings.rounds)
    detail = " / ".join(f"{statistics.median(seconds[name]):.3g}" for name in ("ray", "local")) + " s"
    times = ratio(seconds["ray"], seconds["local"])
    yield Figure("ray", "a round on two Ray actors over two local processes", times, "×", 1.3, "at most", detail)


def _weights(world: World) -> dict[str, NDArray[np.float32]]:
    module = world.build_model()
    return {name: tensor.numpy() for name, tensor in module.state_dict().items()}


def _script(name: str) -> str:
    return "jax_vmap" if name == "jax" else name


@contextmanager
def _neighbour() -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    """Return a process that computes for ever, stopped until it is woken."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield lambda: os.kill(process.pid, signal.SIGCONT), lambda: os.kill(process.pid, signal.SIGSTOP)
    finally:
        process.kill()
        process.wait()
