"""What all tests share: `--no-skips`, and the promise that the library leaves the global generators alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import hypothesis
import numpy as np
import pytest
import rich.style  # noqa: F401 - draws from `random` when it is first imported: not inside a test, please
import torch

import feddd

LIBRARY = str(Path(feddd.__file__).parent)

# A busy machine must not fail a test; what an example costs is no property of the code.
hypothesis.settings.register_profile("feddd", deadline=None)
hypothesis.settings.load_profile("feddd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-skips", action="store_true", help="count a skipped test as a failure")


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


class TorchWatch:
    """A profiler that compares torch's generator at every step from a test into the library and back.

    The weights of a module that a test builds come from that generator too, so the test as a whole may move it.
    """

    def __init__(self) -> None:
        self.touched: list[str] = []
        self._outermost: FrameType | None = None
        self._before = torch.random.get_rng_state()

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            if self._outermost is None and frame.f_code.co_filename.startswith(LIBRARY):
                self._outermost, self._before = frame, torch.random.get_rng_state()
        elif event == "return" and frame is self._outermost:
            self._outermost = None
            if not torch.equal(self._before, torch.random.get_rng_state()):
                self.touched.append(f"{frame.f_code.co_filename}: {frame.f_code.co_qualname}")


@pytest.fixture(autouse=True)
def library_leaves_the_global_generators_alone(request: pytest.FixtureRequest) -> Iterator[None]:
    # Hypothesis seeds these two itself and puts them back in its own time.
    ours = not hypothesis.is_hypothesis_test(request.function)
    before = _python_and_numpy() if ours else None
    watch = TorchWatch()
    sys.setprofile(watch)
    try:
        yield
    finally:
        sys.setprofile(None)
    assert watch.touched == [], "these library calls moved torch's global generator"
    assert not ours or _python_and_numpy() == before, "the global generator of random or numpy was moved"


def _python_and_numpy() -> tuple[object, ...]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - this is the generator that nobody may move
    return random.getstate(), kind, keys.tobytes(), *rest
