"""The report and the pictures, made from small synthetic run folders."""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

from feddd.errors import InputError
from feddd.experiments.figures import accuracy_figure, draw_figures, straggler_figure, write_figures
from feddd.experiments.report import sentences, write_report
from feddd.experiments.results import SCHEMAS, Results, load_results, summarise
from feddd.experiments.views import Line, curve, human_bytes, human_seconds, lines, reach, thin

FEDDD: dict[str, Any] = {"name": "feddd", "label": "feddd", "budget": 0.6, "max_dropout": 0.8}
FEDAVG: dict[str, Any] = {"name": "fedavg", "label": "fedavg", "participation": 1.0}
FEDCS: dict[str, Any] = {"name": "fedcs", "label": "fedcs", "budget": 0.6}

# Per strategy: seconds of a round, bytes up and down in a round, and the accuracy it approaches.
COSTS = {"feddd": (100.0, 600, 900, 0.92), "fedavg": (400.0, 1000, 1000, 0.91), "fedcs": (200.0, 600, 600, 0.84)}


def make_run(
    folder: Path,
    *,
    strategies: Sequence[Mapping[str, Any]] = (FEDDD, FEDAVG, FEDCS),
    seed: int = 0,
    rounds: int = 12,
    clients: int = 6,
    done: Mapping[str, int] | None = None,
    lost: bool = False,
    **config: Any,
) -> Results:
    """Write a run's folder and read it back; `done` holds the rounds per label of a run that is not finished."""
    folder.mkdir(parents=True)
    resolved = {
        "name": "synthetic",
        "seed": seed,
        "rounds": rounds,
        "targets": [0.5, 0.8, 0.88, 0.99],
        "data": {"dataset": "fashion-mnist-mini", "partition": "noniid-b"},
        "fleet": {"clients": clients},
        "model": {"name": "mlp"},
        "training": {"epochs": 1, "batch_size": 32, "learning_rate": 0.01},
        "strategy": [dict(strategy) for strategy in strategies],
        **config,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(resolved), encoding="utf-8")
    (folder / "environment.json").write_text(json.dumps({"python": "3.11", "commit": "0" * 40}), encoding="utf-8")
    tables: dict[str, list[dict[str, Any]]] = {name: [] for name in SCHEMAS}
    for strategy in strategies:
        last = rounds if done is None else done.get(strategy["label"], 0)
        for number in range(1, last + 1):
            _add_round(tables, strategy, seed, number, clients=clients, lost=lost)
        if last == rounds:
            tables["classes"] += [
                {"strategy": strategy["label"], "seed": seed, "round": last, "label": label, "accuracy": 1 - label / 20}
                for label in range(10)
            ]
    tables["partition"] = [
        {"client": client, "label": (client + step) % 10, "samples": 40 + 10 * step + client}
        for client in range(clients)
        for step in range(3)
    ]
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMAS[name]), folder / f"{name}.parquet")
    results = load_results(folder)
    if done is None:
        (folder / "summary.json").write_text(json.dumps(summarise(results)), encoding="utf-8")
    return load_results(folder)


def _add_round(
    tables: dict[str, list[dict[str, Any]]],
    strategy: Mapping[str, Any],
    seed: int,
    number: int,
    *,
    clients: int,
    lost: bool,
) -> None:
    seconds, upload, download, limit = COSTS[strategy["name"]]
    seconds *= 1 + seed / 10
    drops = strategy["name"] == "feddd" and number > 1
    common = {"strategy": strategy["label"], "seed": seed, "round": number}
    tables["rounds"].append(
        common
        | {
            "round_seconds": seconds,
            "clock_seconds": seconds * number,
            # Every third round goes without a test: what is not known is null.
            "test_accuracy": None if number % 3 == 2 else limit * (1 - 0.5**number) - seed / 100,
            "upload_bytes": upload,
            "download_bytes": download,
            "participants": clients,
            "mean_dropout": 0.4 if drops else 0.0,
        }
    )
    for client in range(clients):
        speed = (client + 1) / clients
        tables["clients"].append(
            common
            | {
                "client": client,
                "status": "lost" if lost and client == 0 else "ok",
                "dropout": 0.8 * ((client + number) % clients) / clients if drops else 0.0,
                "samples": 100,
                "upload_bytes": upload // clients,
                "download_bytes": download // clients,
                "download_seconds": None if lost and client == 0 else 0.2 * seconds * speed,
                "compute_seconds": 0.1 * seconds * speed,
                "upload_seconds": 0.7 * seconds * speed,
            }
        )


def words(path: Path) -> str:
    """The page's own text, without plotly.js, scripts and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", page)).split())


def data_of(path: Path) -> Any:
    """What the interactive pictures draw."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', path.read_text(encoding="utf-8"))
    assert found
    return json.loads(found[1])


def assert_drawn(results: Sequence[Results]) -> None:
    """Every picture can be laid out, texts and all (writing the files takes longer and has its own test)."""
    for figure in draw_figures(results).values():
        figure.draw_without_rendering()
        assert figure.axes


def line_of(results: Sequence[Results], label: str) -> Line:
    return next(line for line in lines(results) if line.label == label)


def test_report_is_one_file_that_asks_for_nothing_else(tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "run")], tmp_path / "out" / "report.html")
    assert [entry.name for entry in path.parent.iterdir()] == ["report.html"]
    page = path.read_text(encoding="utf-8")
    assert not re.findall(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=", page)
    assert "default-src 'none'" in page  # the browser itself holds the page to it
    assert page.count("plotly.js v") == 1
    assert "{{" not in words(path)


def test_report_of_the_same_tables_is_the_same_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first, second = (write_report([run], tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second


def test_sentence_says_the_ratios_that_follow_from_the_tables(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    # 0.92 (1 - 2^-t) >= 0.88 first holds at t = 5, tested at 6; 0.91 (1 - 2^-t) >= 0.88 at 5, tested at 6.
    time, amount = 6 * 100 / (6 * 400), 6 * 1500 / (6 * 2000)
    assert sentences([run]) == [
        f"feddd reached 88 % in {time:.2f} × fedavg's time, with {amount:.2f} × the bytes; fedcs never reached it. "
        "Final test accuracy: feddd 92.0 %, fedavg 91.0 %, fedcs 84.0 %."
    ]
    assert sentences([run])[0] in words(write_report([run], tmp_path / "report.html"))


def test_targets_agree_with_the_summary(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for label, strategy in summarise(run)["strategies"].items():
        for entry in strategy["time_to_accuracy"]:
            one = reach(line_of([run], label), entry["target"])
            assert one.seconds == ([] if entry["seconds"] is None else [entry["seconds"]])
            assert one.time_ratios == ([] if entry["ratio_to_fedavg"] is None else [entry["ratio_to_fedavg"]])


def test_target_reached_by_nobody_stays_never(tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "run", targets=[0.99])], tmp_path / "report.html")
    assert words(path).count("never") == 3
    assert "No target accuracy was reached by both fedavg and another strategy." in words(path)


def test_target_that_only_fedavg_misses_is_said(tmp_path: Path) -> None:
    assert sentences([make_run(tmp_path / "run", targets=[0.915])])[0].startswith(
        f"feddd reached 91.5 % in {human_seconds(900)}, fedavg never."
    )


def test_run_without_fedavg_has_times_and_no_ratios(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", strategies=[FEDDD, FEDCS])
    text = words(write_report([run], tmp_path / "report.html"))
    assert "There is no FedAvg" in text
    assert "× FedAvg" not in text
    assert human_seconds(600) in text
    assert_drawn([run])


def test_rounds_without_a_test_are_skipped(tmp_path: Path) -> None:
    path = write_report([make_run(tmp_path / "run", rounds=6)], tmp_path / "report.html")
    feddd = data_of(path)["curves"][0]
    assert feddd["rounds"] == [1, 3, 4, 6]
    # Bytes of the rounds without a test count all the same.
    assert feddd["bytes"] == pytest.approx([1.5 * number for number in (1, 3, 4, 6)])


def test_label_that_looks_like_a_script_is_text(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>{{plotly}}$x$"
    run = make_run(tmp_path / "run", strategies=[FEDDD | {"label": evil}, FEDAVG], name="<b>&name", lost=True)
    path = write_report([run], tmp_path / "report.html")
    page = path.read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "<b>&name" not in page
    assert page.count("<script") == page.count("</script>") == 3
    assert data_of(path)["curves"][0]["label"] == evil
    assert evil in words(path)
    assert_drawn([run])


def test_unfinished_run_shows_what_there_is_and_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done={"feddd": 12, "fedavg": 3})
    assert not run.summary
    text = words(write_report([run], tmp_path / "report.html"))
    assert "Unfinished." in text
    assert "fedavg 3 of 12 rounds, fedcs 0 of 12 rounds" in text
    assert "Test accuracy so far: feddd 92.0 %, fedavg 79.6 %." in text
    assert "not yet" in text
    assert_drawn([run])


def test_run_that_has_only_begun_still_gives_a_page_and_pictures(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", done={})
    for table in SCHEMAS:
        (tmp_path / "run" / f"{table}.parquet").unlink()
    run = load_results(run.path)
    assert "No model was tested yet." in words(write_report([run], tmp_path / "report.html"))
    assert_drawn([run])


def test_finished_run_is_not_called_unfinished(tmp_path: Path) -> None:
    assert "nfinished" not in words(write_report([make_run(tmp_path / "run")], tmp_path / "report.html"))


def test_seeds_are_shown_with_mean_and_range(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{seed}", seed=seed) for seed in (0, 1, 2)]
    found = curve(line_of(runs, "feddd"))
    alone = [curve(line_of([run], "feddd")) for run in runs]
    assert found.mean == pytest.approx([sum(values) / 3 for values in zip(*(one.mean for one in alone), strict=True)])
    assert found.low == pytest.approx(alone[2].mean)
    assert found.high == pytest.approx(alone[0].mean)
    assert found.seconds == pytest.approx(alone[1].seconds)
    path = write_report(runs, tmp_path / "report.html")
    assert [line["label"] for line in data_of(path)["curves"]] == ["feddd", "fedavg", "fedcs"]
    assert "seeds 0, 1, 2" in words(path)
    assert "90.0 % – 92.0 %" in words(path)


def test_seed_still_running_shortens_the_curve_to_the_rounds_all_have(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1, done={"feddd": 4})]
    assert curve(line_of(runs, "feddd")).rounds == [1, 3, 4]
    assert curve(line_of(runs, "fedavg")).rounds == curve(line_of(runs[:1], "fedavg")).rounds


def test_target_reached_by_some_seeds_says_how_many(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{seed}", seed=seed, targets=[0.895]) for seed in (0, 2)]
    one = reach(line_of(runs, "fedavg"), 0.895)
    assert (len(one.seconds), one.runs) == (1, 2)
    assert "1 of 2 runs" in words(write_report(runs, tmp_path / "report.html"))


def test_different_experiments_are_not_averaged(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", name="one"), make_run(tmp_path / "b", name="two", rounds=4)]
    assert [line.label for line in lines(runs)][::3] == ["feddd (one)", "feddd (two)"]
    assert all(len(line.runs) == 1 for line in lines(runs))
    assert [sentence[:5] for sentence in sentences(runs)] == ["one: ", "two: "]
    assert_drawn(runs)


def test_clients_that_did_not_count_are_counted_by_reason(tmp_path: Path) -> None:
    losing = write_report([make_run(tmp_path / "a", lost=True, rounds=7)], tmp_path / "a.html")
    assert "strategy reason times feddd lost 7 fedavg lost 7 fedcs lost 7" in words(losing)
    assert "did not count" not in words(write_report([make_run(tmp_path / "b")], tmp_path / "b.html"))


def test_slowest_client_that_counted_leads_the_round(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", clients=80, lost=True)
    shown = data_of(write_report([run], tmp_path / "report.html"))["stragglers"][0]["rounds"][-1]
    assert (shown["round"], shown["of"], len(shown["clients"])) == (12, 80, 40)
    assert shown["clients"][0] == 79
    assert shown["download"][0] + shown["compute"][0] + shown["upload"][0] == pytest.approx(100)
    assert (shown["clients"][-1], shown["status"][-1], shown["download"][-1]) == (0, "lost", 0)
    texts = [text.get_text().strip() for text in straggler_figure([run]).axes[0].texts]
    assert texts == [f"client 79: {human_seconds(100)}"]


def test_many_rounds_and_clients_are_thinned(tmp_path: Path) -> None:
    data = data_of(write_report([make_run(tmp_path / "run", rounds=250, clients=4)], tmp_path / "report.html"))
    rounds = [one["round"] for one in data["stragglers"][0]["rounds"]]
    assert (len(rounds), rounds[0], rounds[-1]) == (30, 1, 250)
    assert (len(data["dropout"][0]["x"]), len(data["dropout"][0]["y"])) == (200, 4)
    assert thin(range(5), 9) == [0, 1, 2, 3, 4]


def test_report_names_no_place_on_this_machine(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html").read_text(encoding="utf-8")
    assert str(tmp_path) not in page


@pytest.mark.parametrize("failing", [(os, "fsync"), (Path, "replace")])
def test_failing_write_leaves_the_old_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: tuple[object, str]
) -> None:
    run, path = make_run(tmp_path / "run"), tmp_path / "out" / "report.html"
    path.parent.mkdir()
    path.write_text("old", encoding="utf-8")

    def full(*_: object, **__: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(*failing, full)
    with pytest.raises(OSError, match="no space left"):
        write_report([run], path)
    monkeypatch.undo()
    assert path.read_text(encoding="utf-8") == "old"
    assert list(path.parent.iterdir()) == [path]


def test_report_of_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least one run"):
        write_report([], tmp_path / "report.html")


def test_every_picture_is_written_as_png_and_svg_without_a_date(tmp_path: Path) -> None:
    paths = write_figures([make_run(tmp_path / "run", rounds=3, clients=3)], tmp_path / "figures")
    assert sorted(path.stem for path in paths if path.suffix == ".svg") == [
        *("accuracy-bytes", "accuracy-rounds", "accuracy-time", "classes"),
        *("dropout", "partition", "straggler", "time-to-accuracy"),
    ]
    for path in paths:
        if path.suffix == ".svg":
            assert "<dc:date>" not in path.read_text(encoding="utf-8")
            assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_pictures_are_the_same_bytes_twice(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / f"run{seed}", seed=seed) for seed in (0, 1)]
    first, second = (write_figures(runs, tmp_path / name) for name in ("a", "b"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_accuracy_picture_draws_the_tables_values(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", rounds=4)
    drawn = accuracy_figure([run], "rounds").axes[0].lines[0]
    assert np.asarray(drawn.get_xdata()).tolist() == [1, 3, 4]
    assert np.asarray(drawn.get_ydata()).tolist() == pytest.approx([0.92 * (1 - 0.5**number) for number in (1, 3, 4)])


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (human_seconds(0), "0.00 s"),
        (human_seconds(119), "119 s"),
        (human_seconds(600), "10.0 min"),
        (human_seconds(9000), "2.50 h"),
        (human_seconds(864000), "10.0 d"),
        (human_bytes(999), "999 B"),
        (human_bytes(1_234_000_000), "1.23 GB"),
    ],
)
def test_numbers_are_shown_in_units_people_use(shown: str, expected: str) -> None:
    assert shown == expected


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--enable-logging=stderr"),
)
in_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on the PATH")


def browse(page: Path, fragment: str = "", script: str = "") -> tuple[str, list[str]]:
    """The page's DOM after its scripts, and a visitor's script, have run; and what was said on the console."""
    assert CHROMIUM
    visited = page.with_name("visited.html")
    text = page.read_text(encoding="utf-8")
    visited.write_text(text.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
    profile = f"--user-data-dir={page.with_name('profile')}"
    command = [CHROMIUM, *OPTIONS, profile, "--virtual-time-budget=5000", "--dump-dom", f"{visited.as_uri()}{fragment}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def drawn_text(dom: str, chart: str) -> list[str]:
    """The texts of one chart's drawing."""
    start = dom.index(f'id="{chart}"')
    end = dom.find("</section>", start)
    found = re.findall(r"<text\b[^>]*>(.*?)</text>", dom[start:end], flags=re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", text)) for text in found]


@pytest.mark.slow
@in_browser
def test_page_draws_its_pictures_in_a_browser_without_a_complaint(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>"
    runs = [
        make_run(tmp_path / str(seed), seed=seed, strategies=[FEDDD | {"label": evil}, FEDAVG], lost=True)
        for seed in (0, 1)
    ]
    dom, complaints = browse(write_report(runs, tmp_path / "report.html"))
    assert complaints == []
    curves = dom[dom.index('id="curves"') : dom.index('id="reached"')]
    assert len(re.findall(r'class="trace scatter', curves)) == 4  # a line and a band each
    assert {evil, "fedavg", "round", "test accuracy"} <= set(drawn_text(dom, "curves"))
    assert evil not in dom
    assert {"50 %", "99 %", "never", "time to target, FedAvg = 1"} <= set(drawn_text(dom, "reached"))
    assert "client" in drawn_text(dom, "dropout")
    assert {"▶ 5", "0 (lost)", "simulated time (min)"} <= set(drawn_text(dom, "straggler"))
    assert "label" in drawn_text(dom, "partition")
    assert "class" in drawn_text(dom, "classes")


RUNS = "document.body.dataset.ran = 1"
HOSTILE = {
    "a script": f"<script>{RUNS}</script>",
    "the end of a script": f"</script><script>{RUNS}</script>",
    "a picture that fails": f"<img src=x onerror='{RUNS}'>",
    "quotes": f'\'" onmouseover="{RUNS}" x=\'',
    "ends of lines": f"a\u2028{RUNS}\u2029\r\n{RUNS}",
    "an address": f'<a href="javascript:{RUNS}">x</a>',
    "an entity": f"&lt;img src=x onerror={RUNS}&gt;",
    "a place to fill": "{{plotly}} {{data}} \\1 \\g<0>",
    "a comment": "<!--<script>",
}


def hostile_run(folder: Path, text: str) -> Results:
    """A run of a stranger that has this text wherever a text may be."""
    run = make_run(
        folder / text.replace("/", "∕")[:80],
        strategies=[FEDDD | {"label": text}, FEDAVG],
        name=text,
        data={"dataset": text, "partition": text},
        model={"name": text},
        note={text: [text]},
    )
    environment = json.dumps({"python": text, text: [text]})
    (run.path / "environment.json").write_text(environment, encoding="utf-8")
    clients = run.tables["clients"].to_pylist()
    spoiled = [row | {"status": text} if row["client"] == 0 else row for row in clients]
    pq.write_table(pa.Table.from_pylist(spoiled, schema=SCHEMAS["clients"]), run.path / "clients.parquet")
    return load_results(run.path)


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_is_text_wherever_it_stands(kind: str, tmp_path: Path) -> None:
    text = HOSTILE[kind]
    page = write_report([hostile_run(tmp_path, text)], tmp_path / "report.html")
    assert " ".join(text.split()) in words(page)
    assert data_of(page)["curves"][0]["label"] == text
    plain = write_report([make_run(tmp_path / "plain")], tmp_path / "plain.html").read_text(encoding="utf-8")
    written = page.read_text(encoding="utf-8")
    for tag in ("<script", "</script", "<img", "<a ", "<!--"):
        assert written.count(tag) == plain.count(tag)


@pytest.mark.slow
@in_browser
@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_text_does_not_run_in_a_browser_and_is_shown(kind: str, tmp_path: Path) -> None:
    text = HOSTILE[kind]
    page = write_report([hostile_run(tmp_path, text)], tmp_path / "report.html")
    hover = "document.querySelectorAll('*').forEach(one => one.dispatchEvent(new Event('mouseover')))"
    dom, complaints = browse(page, script=hover)
    assert complaints == []
    assert not re.search(r"<body[^>]*data-ran", dom)
    # As much of it as a legend shows: spaces and ends of lines are the browser's to draw.
    shown = ["".join(found.split()) for found in drawn_text(dom, "curves")]
    assert "".join(text.split()) in shown


@pytest.mark.slow
@in_browser
def test_a_browser_would_tell_that_a_script_ran(tmp_path: Path) -> None:
    dom, _ = browse(write_report([make_run(tmp_path / "run")], tmp_path / "report.html"), script=RUNS)
    assert re.search(r"<body[^>]*data-ran", dom)


@pytest.mark.slow
@in_browser
def test_controls_and_address_change_what_is_drawn(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    choose = """
        const axis = document.querySelector("input[name=x][value=bytes]");
        axis.click();
        const strategy = document.getElementById("straggler-of");
        strategy.selectedIndex = 2;
        strategy.dispatchEvent(new Event("change"));
        document.body.dataset.address = location.hash;
    """
    dom, complaints = browse(page, "#x=time&round=3", choose)
    assert complaints == []
    assert "uploaded and downloaded (kB)" in drawn_text(dom, "curves")
    assert "Client 5 holds round 3: 3.33 min" in dom
    assert 'data-address="#x=bytes&amp;round=3&amp;straggler=fedcs"' in dom
    dom, _ = browse(page, "#x=time")
    assert "simulated time (min)" in drawn_text(dom, "curves")
    assert "Client 5 holds round 12: 100 s" in dom


@pytest.mark.slow
@in_browser
def test_browser_would_tell_of_an_error_and_of_a_request(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run", done={})], tmp_path / "report.html")
    _, quiet = browse(page)
    assert quiet == []
    _, complaints = browse(page, script="new Image().src = 'http://localhost:9/x.png'; nonsense();")
    assert any("nonsense is not defined" in line for line in complaints)
    assert any("Content Security Policy" in line for line in complaints)
