"""The Flower carrier in trouble, on a grid in memory: mute nodes, rounds below their quorum, reasons, progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import Strategy
from torch import nn

from feddd import FedDD
from feddd.errors import RunError
from feddd.flower import FedDDStrategy, FixedLinks, Link, RoundFacts, feddd_mod, introductions
from feddd.flower.records import ORDER, Order, read_record
from flower_grid import MemoryGrid

Trouble = Callable[[str, int], None]
"""Called by the train function with the client's name and the round; may raise."""


def app_of(store: Path, trouble: Trouble = lambda name, number: None, **options: Any) -> ClientApp:
    app = ClientApp(mods=[feddd_mod(lambda: nn.Linear(4, 3), store=store, **options)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        trouble(str(context.node_config["client-id"]), int(message.content["config"]["server-round"]))
        after = {name: t * 0.9 + 0.1 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 5})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        trouble(str(context.node_config["client-id"]), -1)
        return Message(RecordDict({"metrics": MetricRecord({"top1": 0.5, "num-examples": 5})}), reply_to=message)

    return app


def grid_of(app: Any, clients: int = 3) -> MemoryGrid:
    return MemoryGrid({10 + n: (app, {"client-id": str(n)}) for n in range(clients)})


def run(grid: MemoryGrid, rounds: int, **options: Any) -> tuple[list[RoundFacts], dict[str, torch.Tensor]]:
    facts: list[RoundFacts] = []
    evaluate_fn = options.pop("evaluate_fn", None)
    method = options.pop("method", FedDD(broadcast_every=0))
    model = nn.Linear(4, 3)
    with torch.no_grad():
        model.weight.copy_(torch.arange(12.0).reshape(3, 4) / 12)
        model.bias.zero_()
    links = FixedLinks({str(n): Link(compute_seconds=0.0) for n in range(3)})
    options = {"deadline_seconds": 30.0, "poll_seconds": 0.01, "on_round": facts.append, "links": links} | options
    strategy = FedDDStrategy(method, model, **options)
    result = strategy.start(grid, ArrayRecord(dict(model.state_dict())), rounds, evaluate_fn=evaluate_fn)
    return facts, result.arrays.to_torch_state_dict()


def said(caplog: pytest.LogCaptureFixture, level: str) -> list[str]:
    """What was said with Flower's logger."""
    return [one.getMessage() for one in caplog.records if (one.name, one.levelname) == ("flwr", level)]


# Mute nodes


class Counting(MemoryGrid):
    """Counts who was asked who it is."""

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            order = read_record(message.content, ORDER, Order)
            if order and order.what == "hello":
                asked = self.__dict__.setdefault("asked", {})
                asked[message.metadata.dst_node_id] = asked.get(message.metadata.dst_node_id, 0) + 1
        return super().push_messages(messages)


def test_a_mute_node_holds_up_no_round_and_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "LEAST_GRACE_SECONDS", 0.5)
    grid = Counting(grid_of(app_of(tmp_path)).nodes, silent={12})
    begun = time.monotonic()
    facts, _ = run(grid, 4, deadline_seconds=5.0)
    passed = time.monotonic() - begun
    assert passed < 4.0  # waiting for it in every round would take four deadlines
    assert sum(fact.seconds for fact in facts) == pytest.approx(passed, abs=0.5)
    assert facts[0].seconds > 0.5  # the first round waits for a while, and says so
    assert [[upload.status for upload in fact.uploads] for fact in facts] == [["ok", "ok"]] * 4
    assert all(fact.failures == {"node 12": "it does not say who it is"} for fact in facts[1:])
    assert grid.__dict__["asked"] == {10: 1, 11: 1, 12: 1}


def test_a_mute_node_is_asked_again_and_joins_when_it_speaks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(introductions, "LEAST_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(introductions, "MOST_GRACE_SECONDS", 1.0)
    grid = Counting(grid_of(app_of(tmp_path)).nodes, silent={12})

    def at(number: int, _: ArrayRecord) -> None:
        if number == 2:
            time.sleep(1.2)  # longer than its message lives
        if number == 4:
            grid.silent = set()
            time.sleep(0.2)

    facts, _ = run(grid, 7, deadline_seconds=1.0, evaluate_fn=at)
    assert [len(fact.uploads) for fact in facts[:4]] == [2] * 4
    assert len(facts[-1].uploads) == 3
    assert facts[-1].failures == {}
    assert grid.__dict__["asked"][12] == 2


def test_the_first_round_waits_for_introductions_and_not_only_for_nodes(tmp_path: Path) -> None:
    grid = grid_of(app_of(tmp_path))
    grid.silent = {12}
    with pytest.raises(RunError, match=r"2 clients with feddd_mod are there, 3 are needed; node 12: it does not say"):
        run(grid, 1, deadline_seconds=0.2, min_clients=3)


# The quorum


def test_a_round_below_its_quorum_is_asked_again_and_those_who_had_answered_get_everything(tmp_path: Path) -> None:
    failed: list[int] = []

    def trouble(name: str, number: int) -> None:
        if name == "1" and number == 3 and len(failed) < 2:
            failed.append(number)
            raise OSError("the disk is full")

    facts, _ = run(grid_of(app_of(tmp_path / "a", trouble)), 5, quorum=3)
    calm, _ = run(grid_of(app_of(tmp_path / "b")), 5, quorum=3)
    assert [fact.attempts for fact in facts] == [1, 1, 3, 1, 1]
    assert [fact.round for fact in facts] == [1, 2, 3, 4, 5]
    assert "the disk is full" in facts[2].failures["client 1"]
    assert facts[2].repeated_bytes > 0
    assert [[upload.status for upload in fact.uploads] for fact in facts] == [["ok"] * 3] * 5
    # Who had answered already no longer holds what a sparse download builds on, and got everything.
    assert facts[2].uploads[0].download_bytes > calm[2].uploads[0].download_bytes
    assert calm[2].repeated_bytes == 0
    assert facts[1].uploads == calm[1].uploads


@pytest.mark.parametrize("again", [1, 4])
@pytest.mark.parametrize("bits", [32, 4])
def test_a_repeated_broadcast_ends_with_the_same_bits(bits: int, again: int, tmp_path: Path) -> None:
    failed: list[int] = []

    def trouble(name: str, number: int) -> None:
        if name == "1" and number == again and not failed:
            failed.append(number)
            raise OSError("the disk is full")

    method = FedDD(broadcast_every=3, value_bits=bits)
    facts, model = run(grid_of(app_of(tmp_path / "a", trouble)), 6, quorum=3, method=method)
    _, expected = run(grid_of(app_of(tmp_path / "b")), 6, quorum=3, method=method)
    assert [fact.round for fact in facts if fact.attempts == 2] == [again]
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.items())


@pytest.mark.parametrize("loop", ["ours", "Flower's"])
def test_a_run_in_which_every_client_raises_fails_with_the_reasons(loop: str, tmp_path: Path) -> None:
    def trouble(name: str, number: int) -> None:
        raise OSError(f"disk {name} is full")

    grid, model = grid_of(app_of(tmp_path, trouble)), nn.Linear(4, 3)
    strategy = FedDDStrategy(FedDD(), model, poll_seconds=0.01, deadline_seconds=0.3)
    start = strategy.start if loop == "ours" else lambda *given: Strategy.start(strategy, *given)
    with pytest.raises(RunError, match="only 0 of 3 clients counted in round 1, and 1 are needed") as caught:
        start(grid, ArrayRecord(dict(model.state_dict())), 2)
    for name in "012":
        assert f"client {name}: lost: OSError: disk {name} is full" in str(caught.value)


def test_uploads_that_are_refused_or_diverged_are_not_part_of_the_quorum(tmp_path: Path) -> None:
    app = ClientApp(mods=[feddd_mod(lambda: nn.Linear(4, 3), store=tmp_path)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        loss = {"0": 1.0, "1": float("nan"), "2": -1.0}[str(context.node_config["client-id"])]
        metrics = MetricRecord({"train_loss": loss, "num-examples": 5})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    words = r"only 1 of 3 clients counted in round 1, and 2 are needed.*client 1: diverged; client 2: refused: a loss"
    with pytest.raises(RunError, match=words):
        run(grid_of(app), 1, quorum=2, deadline_seconds=0.3)


def test_a_quorum_of_more_than_are_asked_means_all_of_them(tmp_path: Path) -> None:
    facts, _ = run(grid_of(app_of(tmp_path)), 2, quorum=10)
    assert [fact.attempts for fact in facts] == [1, 1]


# Reasons


def test_a_network_in_place_of_what_makes_one_is_refused_when_the_mod_is_made() -> None:
    with pytest.raises(TypeError, match=r"not a Linear: feddd_mod\(Net\), not feddd_mod\(Net\(\)\)"):
        feddd_mod(nn.Linear(4, 3))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not a Linear"):
        feddd_mod([lambda: nn.Linear(4, 3), nn.Linear(4, 2)])  # type: ignore[list-item]


def _raising_counts(_: Context) -> list[int]:
    raise KeyError("labels.csv")


def _needs_arrays(message: Message, context: Context, call_next: Any) -> Message:
    message.content["arrays"]
    return call_next(message, context)


def _broken(kind: str, store: Path) -> tuple[Any, dict[str, Any]]:
    """An app whose mods keep it from introducing itself, and its node config."""
    mod = feddd_mod(lambda: nn.Linear(4, 3), store=store)
    mods, config = {
        "sub-model": ([mod], {"sub-model": 7}),
        "label_counts": ([feddd_mod(lambda: nn.Linear(4, 3), store=store, label_counts=_raising_counts)], {}),
        "model": ([feddd_mod(lambda: nn.Linear(4, -3), store=store)], {}),
        "not a network": ([feddd_mod(dict, store=store)], {}),  # type: ignore[arg-type]
        "no mod": ([], {}),
        "wrong order": ([_needs_arrays, mod], {}),
    }[kind]
    app = ClientApp(mods=mods)

    @app.train()
    def answer(message: Message, _: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    return app, config


BROKEN = {
    "sub-model": "answered with an error, ValueError: the node config's sub-model is 7, but feddd_mod has 1 models",
    "label_counts": "feddd_mod's label_counts raised KeyError: 'labels.csv'",
    "model": "feddd_mod's model raised RuntimeError",
    "not a network": "feddd_mod's model makes a dict, which is not a network",
    "no mod": "no feddd report: does the client app have feddd_mod, first of its mods?",
    "wrong order": "(code 2); is feddd_mod first of the app's mods?",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_why_a_node_is_left_out_reaches_the_log_the_facts_and_the_error(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, config = _broken(kind, tmp_path / "broken")
    grid = grid_of(app_of(tmp_path))
    grid.nodes = {**grid.nodes, 99: (app, {"client-id": "bad", **config})}
    facts, _ = run(grid, 2)
    assert all(BROKEN[kind] in fact.failures["node 99"] for fact in facts)
    warned = [
        record.getMessage() for record in caplog.records if record.name == "flwr" and record.levelname == "WARNING"
    ]
    assert len([words for words in warned if words.startswith("node 99 is left out: ")]) == 1
    assert BROKEN[kind] in warned[0]
    grid.nodes = {99: grid.nodes[99]}
    with pytest.raises(RunError, match="0 clients with feddd_mod are there, 1 are needed; node 99: ") as caught:
        run(grid, 1, min_clients=1, deadline_seconds=0.2)
    assert BROKEN[kind] in str(caught.value)


def test_why_a_client_does_not_count_reaches_the_log_and_the_facts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def trouble(name: str, number: int) -> None:
        if name == "1" and number != 1:
            raise OSError("training" if number > 0 else "testing")

    facts, _ = run(grid_of(app_of(tmp_path, trouble)), 2, evaluate_clients=True)
    assert facts[0].failures == {"client 1": "evaluation: lost: OSError: testing (code 2)"}
    assert facts[1].uploads[1].status == "lost: OSError: training (code 2)"
    assert "OSError" in facts[1].failures["client 1"]
    assert "client 1 does not count in round 2: lost: OSError: training" in caplog.text
    assert "client 1 does not count in the evaluation: lost: OSError: testing" in caplog.text


# Progress


def test_every_round_is_logged_where_flower_shows_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def trouble(name: str, number: int) -> None:
        if name == "2" and number == 2:
            raise OSError("no")

    with caplog.at_level("INFO", logger="flwr"):
        facts, _ = run(
            grid_of(app_of(tmp_path, trouble)),
            3,
            evaluate_clients=True,
            evaluate_fn=lambda number, _: MetricRecord({"accuracy": number / 8}),
        )
    lines = [
        record.getMessage() for record in caplog.records if record.name == "flwr" and "counted;" in record.getMessage()
    ]
    assert len(lines) == 3
    up = sum(upload.upload_bytes for upload in facts[1].uploads)
    down = sum(upload.download_bytes for upload in facts[1].uploads) + facts[1].evaluation_bytes
    rates = list(facts[1].dropout.values())
    assert lines[1].startswith(f"round 2 of 3: 2 of 3 clients counted; {up} B up, {down} B down; ")
    assert f"dropout {min(rates):.2f} least, {sum(rates) / 3:.2f} mean; " in lines[1]
    assert "train_loss 1, top1 0.5, accuracy 0.25; " in lines[1]
    assert " s; about " in lines[1]
    assert lines[2].endswith("; about 0.0 s left")
