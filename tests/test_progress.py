"""Lines of progress where there is no terminal: few, on stderr, with the time left."""

from __future__ import annotations

import re

import pytest

from feddd.cli_progress import ProgressLines, clock_time


class Clock:
    """A clock that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def told(seconds_a_round: float, rounds: int, begun: int, capsys: pytest.CaptureFixture[str]) -> list[str]:
    clock = Clock()
    lines = ProgressLines(clock=clock)
    for number in range(begun + 1, rounds + 1):
        clock.now += seconds_a_round
        lines.tell((number - 1) / rounds, number / rounds, f"round {number} of {rounds}")
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


def test_a_line_comes_after_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    lines = told(1.0, 100, 0, capsys)
    assert lines[0] == "feddd: round 10 of 100, elapsed 0:10, about 1:30 left"
    assert [re.findall(r"round (\d+)", line)[0] for line in lines] == [str(n) for n in range(10, 101, 10)]


def test_lines_are_at_most_half_a_minute_apart_and_at_least_five_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert len(told(40.0, 100, 0, capsys)) == 100
    assert len(told(0.125, 100, 0, capsys)) == 2
    assert told(0.1, 40, 0, capsys) == []


def test_what_was_done_before_does_not_count_for_the_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert told(10.0, 10, 8, capsys)[0] == "feddd: round 9 of 10, elapsed 0:10, about 0:10 left"


def test_times_are_as_on_a_clock() -> None:
    assert [clock_time(seconds) for seconds in (0, 27.4, 3599.6, 3723)] == ["0:00", "0:27", "1:00:00", "1:02:03"]
