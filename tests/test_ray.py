"""Shards on a Ray cluster: the same bits as on local processes, also when an actor is lost."""

import os

import pytest
import torch

from feddd import FedAvg, FedDD
from feddd.errors import InputError
from feddd.experiments.running import build_world
from feddd.experiments.running import run as run_experiment
from feddd.simulation.simulator import Simulation
from feddd.simulation.workers import WorkerFailed
from test_simulation import facts
from worlds import experiment

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::ResourceWarning")]


@pytest.fixture(scope="module")
def cluster():
    """A Ray of its own, two cores, for all tests of the file."""
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module")
def world():
    return build_world(experiment())


def test_ray_gives_the_same_bits_as_local_processes(cluster, world):
    with Simulation(world, workers=1) as local:
        expected = list(local.run(FedDD(broadcast_every=3), 4))
    with Simulation(world, workers=2, engine="ray") as simulation:
        found = list(simulation.run(FedDD(broadcast_every=3), 4))
    assert [facts(record) for record in found] == [facts(record) for record in expected]
    for name, tensor in expected[-1].state.model.items():
        assert torch.equal(found[-1].state.model[name], tensor)


def test_a_killed_actor_is_rebuilt_and_the_numbers_stay_the_same(cluster, world, caplog):
    with Simulation(world, workers=1) as local:
        expected = [facts(record) for record in local.run(FedDD(broadcast_every=4), 6)]
    with Simulation(world, workers=2, engine="ray") as simulation:
        run = simulation.run(FedDD(broadcast_every=4), 6)
        found = [facts(next(run)) for _ in range(3)]
        cluster.kill(simulation._engine._workers[1]._actor)
        found += [facts(record) for record in run]
    assert found == expected
    assert "a Ray actor was lost" in caplog.text


def test_an_actor_that_raises_says_what_and_where(cluster, world):
    with Simulation(world, workers=1, engine="ray") as simulation:
        worker = simulation._engine._workers[0]
        worker.begin("train", "no such arguments")
        with pytest.raises(WorkerFailed, match="TypeError"):
            worker.finish()
        assert next(simulation.run(FedAvg(), 1)).round == 1


def test_more_workers_than_cores_are_refused_at_once(cluster, world):
    with pytest.raises(InputError, match="3 workers need a core each; the Ray cluster has 2"):
        Simulation(world, workers=3, engine="ray")


def test_a_whole_run_on_ray_leaves_the_tables_of_a_local_one(cluster, tmp_path):
    chosen = experiment(rounds=2, fleet={"clients": 4})
    local = run_experiment(chosen, tmp_path / "local", workers=1)
    remote = run_experiment(chosen, tmp_path / "ray", workers=2, engine="ray")
    for name in ("rounds", "clients", "classes", "partition"):
        assert remote.tables[name].equals(local.tables[name])
    assert cluster.is_initialized()
