"""Input from strangers: every reader of `tools/fuzz_targets.py` gives a value or one of its own errors, in its bounds.

What a fuzzer once found stays here as a case.
"""

from __future__ import annotations

import base64
import math
import random
import sys
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import feddd
from feddd.errors import InputError
from feddd.experiments.config import parse_experiment
from feddd.experiments.loading import load_experiment
from feddd.experiments.results import SCHEMAS, load_results
from feddd.experiments.views import partition_matrix
from feddd.files import MOST_BYTES, parse_json, parse_toml, read_text
from feddd.flower.api import RecordDict
from feddd.flower.checks import Limits, read_introduction
from feddd.flower.records import REPORT, Report, write_record
from feddd.world import datasets
from feddd.world.fleets import read_csv

sys.path.append(str(Path(__file__).parents[1] / "tools"))
from fuzz import Tally, inputs
from fuzz_targets import Target, targets

NAMES = list(targets(Path()))
any_input = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=NAMES)
def target(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Target]:
    for name in ("mnist", "cifar10"):
        monkeypatch.setitem(datasets.SPECS, name, datasets.SPECS[name])  # put back after the small ones
    monkeypatch.chdir(tmp_path)
    return targets(tmp_path)[request.param]()


def test_good_inputs_are_accepted(target: Target) -> None:
    for data in target.seeds[:10]:
        target.read(data)


@any_input
@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused_or_read(target: Target, data: bytes) -> None:
    tally = Tally("test", target)
    tally.feed(data)
    assert tally.findings == {}


@settings(any_input, max_examples=3)
@given(seed=st.integers(0, 2**32))
def test_changed_inputs_are_refused_or_read(target: Target, seed: int) -> None:
    tally = Tally("test", target)
    for data in inputs(target, len(target.seeds) + 20, random.Random(seed)):
        tally.feed(data)
    assert tally.findings == {}


def test_the_fuzzer_would_tell_of_a_wrong_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tally = Tally("test", Target((b"x",), lambda data: 1 / data[0], (ValueError,)))
    for data in (b"\1", b"\0", b"\0"):
        tally.feed(data)
    assert (tally.tried, tally.accepted, len(tally.findings)) == (3, 1, 1)
    assert next(iter(tally.findings)).startswith("ZeroDivisionError")


# Cases: what was found once, by name.

# A column that says nothing about its nulls and yet counts them: asked for its numbers, pyarrow ends the process.
ABORTS = zlib.decompress(
    base64.b85decode(
        "c-q}m%}T>S5T2wpuHvBzyCjf94jL5ePYa4jFOzC(@u#MsMQ<^Nwh*;8)%Y+zgpc3@c=YJe2k-$rxSMTg1wjP8IE0zm{buHyFM%9lqd>FNqO*HE"
        "zzjgHq<}Pa5Gl|Z%JP)Z9M!01>Lf*UlGZYq|KfIfn!5>007OwTQ~#66*joc#i~M$Q;ZY4}c8(wYuoGPN#X;4_LhmdHWj-Ex7u_(3fDywqN;a5$"
        "z#3>dBkiFoBkW0G&x*Zclb>y7<b`6Y3Vk^qN(-7{1L5E(k=$p5=U%m6l)qp~)sAqzW$cH{Z*j5LEF(5y?^!TReF__mdUI2L3H?!B5w_SuZZ1mO"
        "MU2sDVFj^;<pe^<LEINf8L^gJ3?oX&*$`PB(^2J?7@d@~lgpD~ePTPp`Nc}#uik}zTy_Wbh)2S0x!?3xggdKNI;YK8)Z^!VzJ%k7eXE>>qq2EB"
        "?RIO4-WrZdN1>Z{97JC8_~u;d-52k{i3g>_`H6vUb-mv8P0(NRyWJ(P*Sm_X+n^V9t}d<O`ts^>!6=yk@`1?=z#;#id;kGfpNI"
    )
)

TEXTS = {
    "nested arrays": ("a = " + "[" * 5000, "nested deeper"),
    "nested arrays, closed": (f"a = {'[' * 100}{']' * 100}", "nested deeper"),
    "nested tables": ("a" + ".a" * 100 + " = 1", "nested deeper"),
    "an integer of 5000 digits": ("seed = " + "9" * 5000, "not valid TOML"),
    "an integer of 20000 bits": ("seed = 0x" + "f" * 5000, "20000 bits"),
    "a strategy that is a number": ("strategy = 5", "strategy"),
    "a strategy that is a table": ("[strategy]\nname = 'feddd'", "strategy"),
    "strategies that are numbers": ("strategy = [5]", "a strategy needs a name"),
    "a file name with a zero byte": ('[fleet]\nfile = "a\\u0000b"', ""),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_an_experiment_of_a_stranger(kind: str, tmp_path: Path) -> None:
    text, message = TEXTS[kind]
    (tmp_path / "a.toml").write_text(text, encoding="utf-8")
    if not message:
        read = load_experiment(tmp_path / "a.toml")
        assert read.fleet.file is not None
        with pytest.raises(InputError, match="cannot read the fleet file"):
            read_csv(Path(read.fleet.file))
        return
    with pytest.raises(InputError, match=message) as caught:
        load_experiment(tmp_path / "a.toml")
    assert len(str(caught.value)) < 1000
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("override", ["strategy.a.b=1", "strategy=1", "strategy.a=1", f"seed={'9' * 5000}"])
def test_an_override_of_what_is_no_strategy(override: str, tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("strategy = 5", encoding="utf-8")
    with pytest.raises(InputError):
        load_experiment(tmp_path / "a.toml", [override])


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[]", "1", "", '{"a": 1' + "0" * 400 + "}"])
def test_json_that_is_no_plain_object(text: str) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_numbers_and_nesting_up_to_the_bounds_are_read() -> None:
    assert parse_toml(f"a = {2**63 - 1}")["a"] == 2**63 - 1
    assert parse_json(f'{{"a": {-(2**63)}}}')["a"] == -(2**63)
    assert parse_toml(f"a = {'[' * 49}{']' * 49}")


def test_a_file_without_end_is_not_read_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("feddd.files.MOST_BYTES", 2**20)
    assert MOST_BYTES > 2**20
    with pytest.raises(ValueError, match="longer than 1 MiB"):
        read_text(Path("/dev/zero"))
    with pytest.raises(InputError, match="longer than 1 MiB"):
        read_csv(Path("/dev/zero"))
    with pytest.raises(InputError, match="longer than 1 MiB"):
        load_experiment("/dev/zero")


@pytest.mark.parametrize("number", ["1e-320", "1e31", "1e308"])
def test_a_fleets_numbers_stay_where_their_products_are_numbers(number: str, tmp_path: Path) -> None:
    head = "client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds\n"
    (tmp_path / "fleet.csv").write_text(f"{head}a,{number},1,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="must lie between 1e-30 and 1e\\+30"):
        read_csv(tmp_path / "fleet.csv")


# Labels name files.


@pytest.mark.parametrize(
    "label",
    [
        "",
        ".",
        "..",
        "a/b",
        "../a",
        "a\\b",
        "a\0b",
        "a\nb",
        "\x1b[2J",
        "\x9b2J",
        "a\u2028b",
        "\ud800",
        "x" * 81,
        "𝄞" * 51,
    ],
)
def test_a_label_that_cannot_name_a_file_is_refused(label: str) -> None:
    with pytest.raises(InputError, match="it names files"):
        parse_experiment({"strategy": [{"name": "feddd", "label": label}]})


@pytest.mark.parametrize("label", ["<script>", "x" * 80, "𝄞" * 50, "ä ö", "...", "-rf", "~", "$(id)", "a:b*?"])
def test_a_label_that_is_allowed_does_name_a_file(label: str, tmp_path: Path) -> None:
    read = parse_experiment({"strategy": [{"name": "feddd", "label": label}]})
    path = tmp_path / f"model-{read.strategy[0].label}.safetensors"
    from feddd.files import write_atomically

    write_atomically(path, b"x")
    assert [found.name for found in tmp_path.iterdir()] == [path.name]


# A run's folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.toml").write_text(load_experiment("quickstart").to_toml(), encoding="utf-8")
    load_results(tmp_path)
    return tmp_path


def write(folder: Path, name: str, columns: dict[str, Any], schema: Any = None) -> None:
    pq.write_table(pa.table(columns, schema=schema or SCHEMAS[name]), folder / f"{name}.parquet")


def test_a_table_over_which_pyarrow_would_end_the_process(folder: Path) -> None:
    (folder / "partition.parquet").write_bytes(ABORTS)
    with pytest.raises(InputError, match="damaged file"):
        load_results(folder)


CONFIGS = {
    "no strategies": ('name = "a"\nseed = 1\nrounds = 1\ntargets = []\nstrategy = []', "strategy"),
    "no targets": ('strategy = [{name = "a", label = "a"}]\nname = "a"\nseed = 1\nrounds = 1', "targets"),
    "rounds that are words": (
        'strategy = [{name = "a", label = "a"}]\nname = "a"\nseed = 1\nrounds = "x"\ntargets = []',
        "rounds",
    ),
    "a label twice": (
        'name = "a"\nseed = 1\nrounds = 1\ntargets = []\n'
        'strategy = [{name = "a", label = "a"}, {name = "b", label = "a"}]',
        "same label",
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_runs_config_must_hold_what_a_page_needs(kind: str, folder: Path) -> None:
    text, message = CONFIGS[kind]
    (folder / "config.toml").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=message):
        load_results(folder)


PARTITION = {"client": [0], "label": [1], "samples": [2]}
TABLES: dict[str, tuple[dict[str, Any], str]] = {
    "a column is missing": ({"client": [0], "label": [1]}, "samples is missing"),
    "a column of words": (PARTITION | {"label": ["x"]}, "label is string"),
    "a column of lists": (PARTITION | {"label": [[1]]}, "label is list"),
    "a row without a name": (PARTITION | {"client": pa.array([None], pa.int64())}, "client is null"),
    "a number beyond all measure": (PARTITION | {"samples": [2**63 - 1]}, "larger than"),
}


@pytest.mark.parametrize("kind", TABLES)
def test_a_table_of_other_columns_is_refused(kind: str, folder: Path) -> None:
    columns, message = TABLES[kind]
    pq.write_table(pa.table(columns), folder / "partition.parquet")
    with pytest.raises(InputError, match=message):
        load_results(folder)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300])
def test_a_number_that_is_none_is_refused(value: float, folder: Path) -> None:
    row = {"strategy": ["a"], "seed": [0], "round": [1], "label": [0], "accuracy": [value]}
    write(folder, "classes", row)
    with pytest.raises(InputError, match="accuracy is not finite"):
        load_results(folder)


def test_any_loss_that_float32_can_hold_is_read(folder: Path) -> None:
    largest = float(np.finfo(np.float32).max)
    row = {"strategy": ["a"], "seed": [0], "round": [1], "label": [0], "accuracy": [largest]}
    write(folder, "classes", row)
    assert load_results(folder).tables["classes"]["accuracy"].to_pylist() == [largest]


def peak_bytes(folder: Path) -> int:
    before = pa.default_memory_pool().max_memory()
    tracemalloc.start()
    try:
        with pytest.raises(InputError):
            load_results(folder)
        return tracemalloc.get_traced_memory()[1] + pa.default_memory_pool().max_memory() - before
    finally:
        tracemalloc.stop()


def test_a_small_file_cannot_unpack_to_a_huge_table(folder: Path) -> None:
    rows = 4_000_000
    same = pa.array(np.zeros(rows, np.int64))
    write(folder, "partition", {"client": same, "label": same, "samples": same})
    del same
    assert (folder / "partition.parquet").stat().st_size < 100_000
    assert peak_bytes(folder) < 48 * 2**20  # the table would have 96 MB


def test_a_long_text_is_not_multiplied(folder: Path) -> None:
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(50_000, np.int32)), pa.array(["x" * 100_000]))
    numbers = pa.array(np.arange(50_000))
    columns = {
        "strategy": long,
        "seed": numbers,
        "round": numbers,
        "phase": long,
        "wall_seconds": numbers.cast("double"),
    }
    pq.write_table(pa.table(columns), folder / "timings.parquet")
    assert peak_bytes(folder) < 200 * 2**20  # the column would have 5 GB


def test_a_matrix_of_many_names_is_thinned_not_filled(folder: Path) -> None:
    numbers = np.arange(20_000)
    write(folder, "partition", {"client": numbers, "label": numbers, "samples": numbers})
    matrix = partition_matrix(load_results(folder))
    assert matrix is not None
    assert matrix.values.shape == (2000, 2000)  # 4 · 10⁸ cells otherwise
    assert matrix.values[0, 0] == 0
    assert matrix.values[-1, -1] == 19_999


# What clients say of themselves


def introduction(**changes: Any) -> RecordDict:
    content = RecordDict()
    write_record(content, REPORT, Report(**({"client": "7"} | changes)))
    return content


INTRODUCTIONS = {
    "coverage below 0": ({"label_coverage": -1.0}, "label coverage"),
    "coverage without end": ({"label_coverage": math.inf}, "label coverage"),
    "a link that never ends": ({"uplink_bits_per_s": 5e-324, "downlink_bits_per_s": 1.0}, "bit/s"),
    "a link of no number": ({"uplink_bits_per_s": math.nan}, "bit/s"),
    "a link below 0": ({"downlink_bits_per_s": -1.0}, "bit/s"),
    "a sub-model below 0": ({"sub_model": -1}, "sub-model"),
    "a sub-model too many": ({"sub_model": 2}, "sub-model"),
    "no name": ({"client": ""}, "client id"),
    "a long name": ({"client": "x" * 201}, "client id"),
    "a name that writes its own line in the log": ({"client": "7\nclient 8 is refused"}, "client id"),
    "a name that talks to the terminal": ({"client": "\x1b[2J"}, "client id"),
}


@pytest.mark.parametrize("kind", INTRODUCTIONS)
def test_an_introduction_that_would_spoil_every_plan_is_refused(kind: str) -> None:
    changes, message = INTRODUCTIONS[kind]
    with pytest.raises(ValueError, match=message):
        read_introduction(introduction(**changes), 2, Limits())


def test_an_honest_introduction_is_believed() -> None:
    told = {"label_coverage": 3.5, "uplink_bits_per_s": 1e4, "downlink_bits_per_s": 4e4, "sub_model": 1}
    assert read_introduction(introduction(**told), 2, Limits()).label_coverage == 3.5
    assert math.isnan(read_introduction(introduction(client="Gerät 7"), 1, Limits()).label_coverage)


def test_a_coverage_of_signalling_nans_is_refused_without_a_word() -> None:
    from feddd.wire.format import decode_coverage, encode_coverage

    table = feddd.units({"l.w": torch.zeros(2)})
    data = encode_coverage({"l": torch.ones(2)}, table)
    with pytest.raises(feddd.PayloadError, match="above 0"):
        decode_coverage(data[:-4] + b"\1\0\xa0\x7f", table)


# What is shown: on a terminal, and in Markdown


@pytest.mark.parametrize("label", ["[bold]x", "[link=http:x]y", "[red"])
def test_a_label_that_looks_like_markup_is_text_on_a_terminal(label: str, capsys: pytest.CaptureFixture[str]) -> None:
    from feddd.experiments.results import Results, summarise
    from feddd.reporting import print_summary

    config = parse_experiment({"strategy": [{"name": "feddd", "label": label}]}).model_dump()
    empty = Results(Path(), config, {}, {}, {name: schema.empty_table() for name, schema in SCHEMAS.items()})
    print_summary(Results(empty.path, config, {}, summarise(empty), empty.tables))
    assert label in capsys.readouterr().out


@pytest.mark.parametrize("name", ["[/red]", "[bold]x[/bold]", "a\\[b]"])
def test_a_client_that_looks_like_markup_is_text_on_a_terminal(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    from feddd.reporting import print_plan

    client = {"client": name, "dropout": 0.1, "upload_bytes": 1.0, "seconds": 1.0}
    totals = dict.fromkeys(("round_seconds", "full_round_seconds", "upload_bytes", "full_upload_bytes"), 1.0)
    point = {"budget": 0.5, "round_seconds": 1.0, "upload_bytes": 1.0, "mean_dropout": 0.1}
    others = {"clients_count": 1, "budget": 0.5, "max_dropout": 0.8}
    print_plan(totals | others | {"clients": [client], "curve": [point]})
    assert name in capsys.readouterr().out


def test_a_reason_cannot_talk_to_the_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from feddd.cli import main

    (tmp_path / "a.toml").write_text('"\\u001b[2J\\u009b" = 1', encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["feddd", "presets", "show", str(tmp_path / "a.toml")])
    with pytest.raises(SystemExit) as caught:
        main()
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert "unknown key �[2J�" in said
    assert said.removesuffix("\n").isprintable()


def test_a_clients_name_that_cannot_be_printed_is_refused(tmp_path: Path) -> None:
    head = "client,uplink_bits_per_s,downlink_bits_per_s,compute_seconds\n"
    (tmp_path / "fleet.csv").write_text(f"{head}\x1b[2J,1,1,1\n", encoding="utf-8")
    with pytest.raises(InputError, match="cannot be printed"):
        read_csv(tmp_path / "fleet.csv")


def test_a_cell_of_a_markdown_table_stays_one_and_is_text() -> None:
    from feddd.paper.tables import as_markdown

    assert as_markdown([["a"], ["<script>|</script>\n| b"]]).splitlines()[-1] == "| &lt;script>\\|&lt;/script> \\| b |"
