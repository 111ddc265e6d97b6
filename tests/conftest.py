"""What all tests share: `--no-skips`, and the promise that the library leaves the global generators alone."""

from __future__ import annotations

import os
import random
from collections.abc import Generator, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest
import rich.style  # noqa: F401 - draws from `random` when it is first imported: not inside a test, please
import torch

# Tests run side by side: the threads of one would only wait for the cores that another one has.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that tests start

# A busy machine must not fail a test; what an example costs is no property of the code.
hypothesis.settings.register_profile("feddd", deadline=None)
hypothesis.settings.load_profile("feddd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="count a skipped test as a failure")


DEPLOYMENTS = ("test_deployment.py", "test_troubled_deployment.py", "test_flower_app.py")
"""They mostly wait, and two at once are late in their rounds: one worker has them all, beside those that compute."""
WHOLE = ("test_ray.py", "test_readme.py")
"""Their tests share what takes long to start."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deployments and slow tests first: at the end all workers have something to do."""
    items.sort(key=lambda item: (item.path.name not in DEPLOYMENTS, item.get_closest_marker("slow") is None))


def _unit(test: str) -> str:
    """What one worker does in a row: a test with all its parameters, which share simulations, or all of some files."""
    file = test.partition("::")[0].rpartition("/")[2]
    if file in DEPLOYMENTS:
        return "deployments"
    return file if file in WHOLE else test.partition("[")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class InUnits(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _unit(nodeid)

    config.option.loadscopereorder = False  # in the order above, not by the number of tests
    return InUnits(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    return _skip_is_failure(report, item.config)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    report = yield
    return _skip_is_failure(report, collector.config)


def _skip_is_failure(report: Any, config: pytest.Config) -> Any:
    expected_failure = hasattr(report, "wasxfail")
    if config.getoption("--no-skips") and report.skipped and not expected_failure:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"skipped, which --no-skips does not allow: {reason.removeprefix('Skipped: ')}"
    return report


@pytest.fixture(autouse=True)
def global_generators_of_python_and_numpy_stay_where_they_are(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _python_and_numpy()
    yield
    # Hypothesis seeds these two itself and puts them back in its own time.
    ours = not hypothesis.is_hypothesis_test(request.function)
    assert not ours or _python_and_numpy() == before, "the global generator of random or numpy was moved"


@pytest.fixture
def torchs_generator_stays_where_it_is() -> Iterator[None]:
    """For tests that let the library do everything; one that builds a module of its own moves the generator itself."""
    before = torch.random.get_rng_state()
    yield
    assert torch.equal(torch.random.get_rng_state(), before), "torch's global generator was moved"


def _python_and_numpy() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - this is the generator that nobody may move
    return random.getstate(), kind, keys.tobytes(), *rest
