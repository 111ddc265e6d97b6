"""Every example of docs/extending.md runs as it stands, and charges the bytes that it writes."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import feddd

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
EXAMPLES = re.findall(r"```python\n# (\w+)\.py\n(.*?)```\n\n```toml\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
BLOCKS = len(re.findall(r"^```python", PAGE.read_text(encoding="utf-8"), re.M))
TINY = """
name = "tiny"
rounds = 2
data = { dataset = "fashion-mnist-mini", train_limit = 120 }
fleet = { clients = 4 }
"""


@pytest.fixture
def path_as_it_was() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before


def test_every_block_of_code_is_an_example_of_less_than_forty_lines() -> None:
    assert len(EXAMPLES) == BLOCKS == 7
    for name, code, _ in EXAMPLES:
        lines = [line for line in code.splitlines() if line.strip() and not line.startswith(("from", "import"))]
        assert len(lines) < 40, name


@pytest.mark.usefixtures("path_as_it_was")
@pytest.mark.parametrize(("name", "code", "strategy"), EXAMPLES, ids=[name for name, _, _ in EXAMPLES])
def test_an_example_runs_and_its_bytes_are_those_that_are_charged(
    name: str, code: str, strategy: str, tmp_path: Path
) -> None:
    (tmp_path / f"{name}.py").write_text(code, encoding="utf-8")
    (tmp_path / "experiment.toml").write_text(TINY + strategy, encoding="utf-8")
    plain, written = (
        feddd.run(tmp_path / "experiment.toml", tmp_path / f"wire-{wire}", workers=1, wire=wire)
        for wire in (False, True)
    )
    for table in ("rounds", "clients"):
        assert plain.tables[table].equals(written.tables[table])
    assert plain.tables["rounds"].num_rows == 2
    again = feddd.load_experiment(tmp_path / "wire-True" / "config.toml")
    assert again == feddd.load_experiment(tmp_path / "wire-False" / "config.toml")
