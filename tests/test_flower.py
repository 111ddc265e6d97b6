"""The Flower carrier on a grid in memory: the simulator's numbers, faults, refusals, resync, checkpoints."""

from __future__ import annotations

import dataclasses
import math
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from feddd import FedAvg, FedCS, FedDD, Oort
from feddd.errors import InputError, RunError
from feddd.experiments.methods import construct
from feddd.experiments.running import build_world
from feddd.flower import FedDDStrategy, FixedLinks, Link, MeasuredLinks, RoundFacts, feddd_mod
from feddd.flower.checkpoint import load_checkpoint, save_checkpoint
from feddd.flower.records import (
    ORDER,
    PAYLOAD,
    REPORT,
    Order,
    RecordError,
    Report,
    chunk_bytes,
    read_payload,
    read_record,
    write_payload,
    write_record,
)
from feddd.flower.store import ClientStore
from feddd.simulation.simulator import Simulation, World
from feddd.strategies.server_optimizers import FedAvgM, WithServerOptimizer
from feddd.testbed.apps import build_model, links_of
from feddd.wire.documents import chain_text, down_text, read_chain, read_down, vocabulary
from feddd.wire.down import Moves
from feddd.wire.download_format import HELD_NUMBER, TOLD_COVERAGE, held_reference
from feddd.wire.exchange import chain
from feddd.wire.quantised import Bits
from feddd.wire.select import MASK, OWN, Select
from feddd.wire.stage import At, Stage, Update
from flower_apps import client_app
from flower_grid import MemoryGrid
from worlds import experiment

METHODS = {
    "feddd": FedDD(broadcast_every=3),
    "random": FedDD(selector="random", broadcast_every=0),
    "fedavg": FedAvg(participation=0.5),
    "fedcs": FedCS(),
    "oort": Oort(),
    "feddd in 4 bits": FedDD(broadcast_every=2, value_bits=4),
    "feddd in 2 bits with error feedback": FedDD(broadcast_every=2, value_bits=2, error_feedback="all"),
    "some stay out": FedDD(broadcast_every=4, leave_out=0.4, max_absence=2),
    "some stay out, in 4 bits": FedDD(broadcast_every=4, value_bits=4, leave_out=0.4, max_absence=2),
    "some in 8 bits": FedAvg(participation=0.5, value_bits=8),
    "oort in 2 bits": Oort(value_bits=2),
}
OTHERS = {
    **{name: construct(name, {}) for name in ("heterofl", "fjord", "fedrolex", "federated-dropout", "topk", "fedprox")},
    "stc": construct("stc", {"share": 0.05, "download_share": 0.05, "participation": 0.7}),
    "eden": construct("eden", {"bits": 2}),
    "server momentum": WithServerOptimizer(FedDD(), FedAvgM(momentum=0.5)),
}
"""On models of one width; the last digit decides more where numbers are rounded or the greatest are chosen."""


def small_world(**changes: Any) -> World:
    training = {"trainer": "reference", "batch_size": 16, "learning_rate": 0.05}
    return build_world(experiment(fleet={"clients": 6}, training=training, data={"train_limit": 240}, **changes))


def grid_of(world: World, store: Path, **options: Any) -> MemoryGrid:
    app = client_app(world, store, **options)
    return MemoryGrid({1000 + n: (app, {"partition-id": n, "sub-model": _width(world, n)}) for n in range(6)})


def _width(world: World, client: int) -> int:
    from feddd.world import models

    return client % models.widths(world.model)


def strategy_of(world: World, method: Any, facts: list[RoundFacts], **options: Any) -> FedDDStrategy:
    from feddd.world import models

    modules = [build_model(world, width) for width in range(models.widths(world.model))]
    return FedDDStrategy(
        method,
        modules,
        seed=world.seed,
        links=links_of(world),
        deadline_seconds=options.pop("deadline_seconds", 30.0),
        poll_seconds=0.01,
        on_round=options.pop("on_round", facts.append),
        **options,
    )


def initial(world: World) -> ArrayRecord:
    return ArrayRecord(dict(build_model(world).state_dict()))


@pytest.mark.parametrize(
    ("name", "model"),
    [(name, model) for name in METHODS for model in ("mlp", "heterogeneous-b/16")] + [(name, "mlp") for name in OTHERS],
)
def test_a_grid_gives_the_simulators_masks_sizes_and_model(name: str, model: str, tmp_path: Path) -> None:
    method: Any = (METHODS | OTHERS)[name]
    changes = {"model": {"name": model}}
    if model != "mlp":
        changes["data"] = {"dataset": "synthetic-colour", "train_limit": 120}  # type: ignore[dict-item]
    world = build_world(
        experiment(
            fleet={"clients": 6},
            training={"trainer": "reference", "batch_size": 16, "learning_rate": 0.05},
            **({"data": {"train_limit": 240}} | changes),
        )
    )
    # A last digit may decide which way a number is rounded, and that which unit is sent.
    coded = getattr(method, "value_bits", 32) < 32 or name in ("topk", "stc", "eden")
    with Simulation(world, workers=1) as simulation:
        records = list(simulation.run(method, 5))
    facts: list[RoundFacts] = []
    result = strategy_of(world, method, facts).start(grid_of(world, tmp_path), initial(world), 5)
    for record, fact in zip(records, facts, strict=True):
        simulated = sorted(record.clients, key=lambda row: row.upload.client)
        assert [upload.client for upload in fact.uploads] == [row.upload.client for row in simulated]
        for row, upload in zip(simulated, fact.uploads, strict=True):
            assert upload.status == "ok"
            assert coded or upload.mask == row.upload.mask
            # Where the greatest numbers lie decides how many bytes their places take.
            near = 0.01 if name in ("topk", "stc") else 0.0
            assert upload.upload_bytes == pytest.approx(row.upload.upload_bytes, rel=near, abs=0)
            assert upload.download_bytes == pytest.approx(row.upload.download_bytes, rel=near, abs=0)
            # The simulator adds up in blocks, so the last digit of a mean may differ.
            assert upload.train_loss == pytest.approx(row.upload.train_loss, rel=1e-2 if coded else 1e-6)
    off = {"rtol": 0.0, "atol": 5e-3} if coded else {"rtol": 1e-5, "atol": 1e-6}
    for key, tensor in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, records[-1].state.model[key], **off)


def test_flowers_own_loop_works_too(tmp_path: Path) -> None:
    from flwr.serverapp.strategy import Strategy

    world = small_world()
    plain, ours = (strategy_of(world, METHODS["feddd"], []) for _ in range(2))
    theirs = Strategy.start(plain, grid_of(world, tmp_path / "a"), initial(world), 3)
    expected = ours.start(grid_of(world, tmp_path / "b"), initial(world), 3)
    for name, tensor in expected.arrays.to_torch_state_dict().items():
        assert torch.equal(tensor, theirs.arrays.to_torch_state_dict()[name])


# Faults


def test_a_node_that_does_not_answer_is_late_and_gets_the_full_model_when_it_is_back(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedDD(broadcast_every=0), facts, deadline_seconds=3.0)

    def at(number: int, _: ArrayRecord) -> None:
        grid.silent = {1002} if number == 1 else set()

    strategy.start(grid, initial(world), 4, evaluate_fn=at)  # type: ignore[arg-type]
    statuses = [{upload.client: upload.status for upload in fact.uploads} for fact in facts]
    assert [status[2] for status in statuses] == ["ok", "late", "ok", "ok"]
    full = facts[0].uploads[2].download_bytes
    assert [fact.uploads[2].download_bytes == full for fact in facts] == [True, True, True, False]


def test_a_lost_node_is_recorded_with_its_reason_and_the_round_goes_on(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedDD(), facts)

    def at(number: int, _: ArrayRecord) -> None:
        grid.lost = {1: {1004}, 2: {1000}}.get(number, set())

    strategy.start(grid, initial(world), 3, evaluate_fn=at)  # type: ignore[arg-type]
    assert [len(fact.uploads) for fact in facts] == [6, 6, 6]
    assert facts[1].uploads[4].status.startswith("lost: the node is gone")
    assert facts[2].uploads[0].status.startswith("lost: the node is gone")
    assert sum(upload.status == "ok" for upload in facts[-1].uploads) == 5


def test_too_few_answers_stop_the_run_with_an_explanation(tmp_path: Path) -> None:
    world = small_world()
    grid = grid_of(world, tmp_path)
    strategy = strategy_of(world, FedDD(), [], deadline_seconds=0.3, quorum=4)

    def at(number: int, _: ArrayRecord) -> None:
        grid.silent = {1000, 1001, 1002} if number == 1 else set()

    with pytest.raises(RunError, match=r"only 3 of 6 clients counted in round 2, and 4 are needed.*client 1: late"):
        strategy.start(grid, initial(world), 2, evaluate_fn=at)  # type: ignore[arg-type]


def test_a_rule_that_no_train_function_can_be_told_is_refused_in_one_line(tmp_path: Path) -> None:
    world = small_world()
    strategy = strategy_of(world, construct("scaffold", {}), [])
    with pytest.raises(InputError, match="is for simulations"):
        strategy.start(grid_of(world, tmp_path), initial(world), 1)


def test_a_train_function_that_does_not_confirm_a_rule_does_not_count(tmp_path: Path) -> None:
    world, facts = small_world(), list[RoundFacts]()
    grid = grid_of(world, tmp_path)
    _, config = grid.nodes[1000]
    grid.nodes = {**grid.nodes, 1000: (client_app(world, tmp_path, deaf=True), config)}
    strategy_of(world, construct("fedprox", {"mu": 0.5}), facts).start(grid, initial(world), 1)
    assert [upload.status == "ok" for upload in facts[0].uploads] == [False] + [True] * 5
    assert "proximal-mu = 0.5" in facts[0].uploads[0].status


@dataclass(frozen=True)
class Halved(Stage):
    """A stage of a stranger: numbers are halved on their way, and the server doubles them."""

    def encode(self, update: Update, states: list[Any], at: At, each: Any) -> tuple[Update, list[Any]]:
        return replace(update, values={name: own / 2 for name, own in update.values.items()}), states

    def decode(self, update: Update, at: At) -> Update:
        return replace(update, values={name: own * 2 for name, own in update.values.items()})


@dataclass(frozen=True)
class HalvedAvg(FedAvg):
    def plan(self, state: Any, fleet: Any, rng: Any) -> Any:
        plan = super().plan(state, fleet, rng)
        return replace(plan, tasks=tuple(replace(task, up=chain(Halved())) for task in plan.tasks))


def test_a_stage_of_a_stranger_runs_where_clients_know_it_and_is_refused_by_name_elsewhere(tmp_path: Path) -> None:
    world, facts = small_world(), list[RoundFacts]()
    grid = grid_of(world, tmp_path)
    with pytest.raises(RunError, match="stage 'Halved' is not known here"):
        strategy_of(world, HalvedAvg(), []).start(grid, initial(world), 1)
    knowing = {node: (client_app(world, tmp_path, stages=[Halved]), config) for node, (_, config) in grid.nodes.items()}
    grid.nodes = knowing
    result = strategy_of(world, HalvedAvg(), facts).start(grid, initial(world), 2)
    plain = strategy_of(world, FedAvg(), []).start(grid_of(world, tmp_path / "plain"), initial(world), 2)
    expected = plain.arrays.to_torch_state_dict()
    for name, tensor in result.arrays.to_torch_state_dict().items():
        torch.testing.assert_close(tensor, expected[name])


def test_a_client_that_lost_its_disk_gets_the_full_model_in_the_same_round(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedDD(broadcast_every=0), facts)

    def at(number: int, _: ArrayRecord) -> None:
        if number == 2:
            ClientStore(tmp_path, "3").path.unlink()

    strategy.start(grid, initial(world), 3, evaluate_fn=at)  # type: ignore[arg-type]
    assert all(upload.status == "ok" for fact in facts for upload in fact.uploads)
    sparse, full = facts[1].uploads[3].download_bytes, facts[0].uploads[3].download_bytes
    assert facts[2].uploads[3].download_bytes > full  # the sparse one it could not use, and the full one
    assert facts[2].uploads[2].download_bytes < full
    assert sparse == full  # round 2 downloads what round 1 uploaded, which was everything


def test_in_a_few_bits_a_client_that_lost_its_disk_gets_the_reference_again(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedDD(broadcast_every=3, value_bits=4), facts)

    def at(number: int, _: ArrayRecord) -> None:
        if number in (2, 3):  # before a sparse download, and before a broadcast
            ClientStore(tmp_path, str(number)).path.unlink()
        grid.silent = {1005} if number == 3 else set()

    strategy._server._deadline_seconds = strategy._deadline_seconds = 5.0
    strategy.start(grid, initial(world), 6, evaluate_fn=at)  # type: ignore[arg-type]
    statuses = [[upload.status for upload in fact.uploads] for fact in facts]
    assert statuses == [["ok"] * 6] * 3 + [["ok"] * 5 + ["late"]] + [["ok"] * 6] * 2
    down = [[upload.download_bytes for upload in fact.uploads] for fact in facts]
    whole, coded = down[0][0], down[3][0]
    assert whole > 7 * coded
    assert down[2][2] > whole + down[1][2]  # what it could not use, the reference, and what it had sent
    assert down[3][3] == whole + coded  # a broadcast that it could not use, then the reference as it is now
    assert down[4][5] == 2 * coded  # the broadcast that it missed, and the full model as a difference
    table = strategy._server._tables[0]
    state = ClientStore(tmp_path, "5").load(strategy._server._token, table)
    reference, kept = held_reference(state, table), strategy._server.expect_state().reference
    assert reference
    assert kept
    assert int(state[HELD_NUMBER]) == kept.number
    assert all(torch.equal(t, kept.model[name]) for name, t in reference.items())


def test_a_narrow_client_that_lost_its_disk_is_told_the_coverage_again(tmp_path: Path) -> None:
    sizes = [nn.Sequential(nn.Flatten(), nn.Linear(784, width), nn.Linear(width, 10)) for width in (8, 4)]
    app = ClientApp(mods=[feddd_mod([lambda: sizes[0], lambda: sizes[1]], store=tmp_path)])
    told: list[tuple[int, str]] = []

    @app.train()
    def train_it(message: Message, context: Context) -> Message:
        after = {name: tensor + 0.1 for name, tensor in message.content["arrays"].to_torch_state_dict().items()}
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 10})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    class Listener(Meddler):
        def __call__(self, message: Message, context: Context) -> Message:
            order = read_record(message.content, ORDER, Order)
            if order and order.coverage:
                told.append((order.round, str(context.node_config["client-id"])))
            return self._app(message, context)

    grid = MemoryGrid({n: (Listener(app, None, -1), {"client-id": str(n), "sub-model": n % 2}) for n in range(4)})  # type: ignore[misc]

    def at(number: int, _: ArrayRecord) -> None:
        if number == 3:
            ClientStore(tmp_path, "1").path.unlink()

    facts: list[RoundFacts] = []
    links = FixedLinks({str(n): Link(compute_seconds=0.0) for n in range(4)})
    method = FedDD(broadcast_every=3, rates="uniform")
    strategy = FedDDStrategy(method, sizes, poll_seconds=0.01, links=links, on_round=facts.append)
    strategy.start(grid, ArrayRecord(dict(sizes[0].state_dict())), 5, evaluate_fn=at)  # type: ignore[arg-type]
    assert all(upload.status == "ok" for fact in facts for upload in fact.uploads)
    assert sorted(told) == [(2, "0"), (2, "1"), (2, "2"), (2, "3"), (4, "1")]


def test_a_client_that_moves_to_another_node_keeps_its_place_and_state(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedDD(broadcast_every=0), facts)

    def at(number: int, _: ArrayRecord) -> None:
        if number == 2:
            nodes = dict(grid.nodes)
            nodes[2000] = nodes.pop(1005)
            grid.nodes = nodes

    strategy.start(grid, initial(world), 6, evaluate_fn=at)  # type: ignore[arg-type]
    assert [member.name for member in facts[-1].members] == [str(n) for n in range(6)]
    back = next(fact.round for fact in facts[2:] if len(fact.uploads) == 6)
    assert 4 <= back < 6  # round 3 does not wait for it
    assert all(upload.status == "ok" for fact in facts for upload in fact.uploads)
    full = facts[0].uploads[5].download_bytes
    assert facts[back - 1].uploads[5].download_bytes == full
    assert facts[-1].uploads[5].download_bytes < full


def test_a_client_that_joins_late_is_told_everything_and_counts(tmp_path: Path) -> None:
    world = small_world()
    grid, facts = grid_of(world, tmp_path), []
    grid.offline = {1003}
    strategy = strategy_of(world, FedDD(), facts, min_clients=5)

    def at(number: int, _: ArrayRecord) -> None:
        grid.offline = set() if number == 2 else grid.offline

    strategy.start(grid, initial(world), 6, evaluate_fn=at)  # type: ignore[arg-type]
    assert [len(fact.uploads) for fact in facts[:3]] == [5, 5, 5]  # round 3 does not wait for its introduction
    joined = next(fact for fact in facts if len(fact.uploads) == 6)
    assert all(upload.status == "ok" for fact in facts for upload in fact.uploads)
    late = joined.members.index(dataclasses.replace(joined.members[0], name="3"))
    assert joined.uploads[late].download_bytes == facts[0].uploads[0].download_bytes


# Refusals


def spoil(kind: str) -> Any:
    def changed(after: dict[str, torch.Tensor]) -> None:
        if kind == "nan":
            after["fc1.weight"][0, 0] = math.nan

    return changed


class Meddler:
    """A client app whose answers are changed on their way: what a hostile or broken client may send."""

    def __init__(self, app: ClientApp, change: Any, client: int) -> None:
        self._app, self._change, self._client = app, change, client

    def __call__(self, message: Message, context: Context) -> Message:
        order = read_record(message.content, ORDER, Order)
        reply = self._app(message, context)
        if order and order.what == "train" and order.round >= 2 and context.node_config["partition-id"] == self._client:
            self._change(reply.content)
        return reply


def _report(**changes: Any) -> Any:
    def change(content: RecordDict) -> None:
        found = read_record(content, REPORT, Report)
        assert found
        write_record(content, REPORT, dataclasses.replace(found, **changes))

    return change


def _payload(edit: Any) -> Any:
    def change(content: RecordDict) -> None:
        write_payload(content, edit(read_payload(content, 10**9)), 10**6)

    return change


def _flip_mask(data: bytes) -> bytes:
    # The mask begins after the 16 bytes of the header: one unit more of the first layer, and its values.
    mask = bytearray(data)
    free = next(bit for bit in range(100) if not mask[16 + bit // 8] >> bit % 8 & 1)
    mask[16 + free // 8] |= 1 << free % 8
    return bytes(mask) + bytes(4 * 785)


def _nan(data: bytes) -> bytes:
    return data[:-4] + np.float32(np.nan).tobytes()


def _no_payload(content: RecordDict) -> None:
    del content[PAYLOAD]


def _no_report(content: RecordDict) -> None:
    del content[REPORT]


def _other_protocol(content: RecordDict) -> None:
    content[REPORT]["protocol"] = 99


HOSTILE = {
    "garbage": (_payload(lambda data: b"garbage" * 50), "magic"),
    "empty": (_payload(lambda data: b""), "too few"),
    "cut off": (_payload(lambda data: data[:-8]), "announces"),
    "too much": (_payload(lambda data: data + bytes(10**6)), "more than"),
    "not a number": (_payload(_nan), "not finite"),
    "more units than asked": (_payload(_flip_mask), "were asked for"),
    "another model": (_payload(lambda data: data[:8] + bytes(8) + data[16:]), "another layer table"),
    "no payload": (_no_payload, "no feddd.payload"),
    "no report": (_no_report, "no feddd report"),
    "other protocol": (_other_protocol, "protocol 99"),
    "no samples": (_report(samples=0), "samples"),
    "too many samples": (_report(samples=10**12), "samples"),
    "infinite loss": (_report(train_loss=math.inf), "loss"),
    "absurd loss": (_report(train_loss=1e9), "loss"),
    "absurd statistic": (_report(oort_statistic=-math.inf), "statistic"),
    "negative loss": (_report(train_loss=-1.0), "loss"),
    "negative statistic": (_report(oort_statistic=-1.0), "statistic"),
    "negative time": (_report(compute_seconds=-1.0), "computing"),
    "an old answer": (_report(held="before"), "another round"),
    "huge": (_payload(lambda data: data[:-4] + np.float32(1e30).tobytes()), "beyond"),
    "somebody else": (_report(client="0"), "says it is from"),
    "wrong type": (_report(samples="many"), "must be a int"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_bad_answers_are_refused_recorded_and_do_not_stop_the_round(kind: str, tmp_path: Path) -> None:
    change, reason = HOSTILE[kind]
    world = small_world()
    app = Meddler(client_app(world, tmp_path), change, 2)
    grid = MemoryGrid({1000 + n: (app, {"partition-id": n}) for n in range(6)})  # type: ignore[misc]
    facts: list[RoundFacts] = []
    result = strategy_of(world, FedDD(), facts).start(grid, initial(world), 3)
    statuses = [upload.status for upload in facts[1].uploads]
    assert statuses[2].startswith("refused: ")
    assert reason in statuses[2]
    assert [status for n, status in enumerate(statuses) if n != 2] == ["ok"] * 5
    assert all(tensor.isfinite().all() for tensor in result.arrays.to_torch_state_dict().values())
    # What was refused is as if it had never been sent: the client starts from the full model again.
    assert facts[2].uploads[2].download_bytes == facts[0].uploads[2].download_bytes


def honest_app(folder: Path, *sizes: int) -> ClientApp:
    app = ClientApp(mods=[feddd_mod([lambda size=size: nn.Linear(4, size) for size in sizes], store=folder)])

    @app.train()
    def train(message: Message, context: Context) -> Message:
        after = {name: t + 0.1 for name, t in message.content["arrays"].to_torch_state_dict().items()}
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 5})
        return Message(RecordDict({"arrays": ArrayRecord(after), "metrics": metrics}), reply_to=message)

    return app


def test_a_client_that_always_asks_for_everything_gets_it_once_in_a_round(tmp_path: Path) -> None:
    asked: list[int] = []

    def greedy(message: Message, context: Context) -> Message:
        order = read_record(message.content, ORDER, Order)
        assert order
        asked.append(order.round)
        content = RecordDict()
        write_record(content, REPORT, Report("greedy", "ok" if order.what == "hello" else "resync"))
        return Message(content, reply_to=message)

    honest = honest_app(tmp_path, 3)
    grid = MemoryGrid({1: (honest, {"client-id": "a"}), 2: (greedy, {})})  # type: ignore[dict-item]
    facts: list[RoundFacts] = []
    model = nn.Linear(4, 3)
    strategy = FedDDStrategy(FedDD(), model, poll_seconds=0.01, deadline_seconds=30.0, on_round=facts.append)
    strategy.start(grid, ArrayRecord(dict(model.state_dict())), 2)
    assert asked == [0, 1, 1, 2, 2]  # hello, then the download and one more, round by round
    assert facts[1].uploads[1].status == "refused: the client lost its state"
    assert facts[1].uploads[0].status == "ok"


def test_a_client_that_comes_back_with_another_sub_model_does_not_keep_its_mask(tmp_path: Path) -> None:
    sizes = [nn.Linear(4, 40), nn.Linear(4, 3)]
    app = honest_app(tmp_path, 40, 3)
    held: dict[str, str] = {}

    def shifty(message: Message, context: Context) -> Message:
        """Says that it still holds what it held when it had the other model."""
        order = read_record(message.content, ORDER, Order)
        assert order
        reply = app(message, context)
        held["version"] = order.version or held.get("version", "")
        found = read_record(reply.content, REPORT, Report)
        if order.what == "hello" and found:
            write_record(reply.content, REPORT, dataclasses.replace(found, held=held["version"]))
        return reply

    grid = MemoryGrid({1: (app, {"client-id": "a"}), 2: (shifty, {"client-id": "b"})})  # type: ignore[dict-item]
    facts: list[RoundFacts] = []
    strategy = FedDDStrategy(FedDD(broadcast_every=0), sizes, poll_seconds=0.01, on_round=facts.append)

    def at(number: int, _: ArrayRecord) -> None:
        if number == 2:
            grid.nodes = {1: grid.nodes[1], 3: (shifty, {"client-id": "b", "sub-model": 1})}  # type: ignore[dict-item]

    strategy.start(grid, ArrayRecord(dict(sizes[0].state_dict())), 6, evaluate_fn=at)  # type: ignore[arg-type]
    assert [upload.status for upload in facts[-1].uploads] == ["ok", "ok"]


def test_a_checkpoint_whose_clients_do_not_fit_the_models_is_refused(tmp_path: Path) -> None:
    model, file = nn.Linear(4, 3), tmp_path / "server.safetensors"
    arrays = ArrayRecord(dict(model.state_dict()))
    grid = MemoryGrid({1: (honest_app(tmp_path, 3), {"client-id": "a"})})
    FedDDStrategy(FedDD(), model, poll_seconds=0.01, min_clients=1, checkpoint=file).start(grid, arrays, 1)
    good = load_checkpoint(file, dict(model.state_dict()))
    other = good.state.knowing(masks=[bytes(8)])
    for wrong in (
        dataclasses.replace(good, members=(dataclasses.replace(good.members[0], sub_model=1),)),
        dataclasses.replace(good, state=other),
    ):
        save_checkpoint(file, wrong)
        with pytest.raises(InputError, match="does not fit the models"):
            FedDDStrategy(FedDD(), model, poll_seconds=0.01, min_clients=1, checkpoint=file).start(grid, arrays, 2)


def test_a_client_whose_training_diverges_says_so(tmp_path: Path) -> None:
    world = small_world()
    app, bad = client_app(world, tmp_path), client_app(world, tmp_path, spoil("nan"))
    grid = MemoryGrid({1000 + n: (bad if n == 1 else app, {"partition-id": n}) for n in range(6)})
    facts: list[RoundFacts] = []
    strategy_of(world, FedDD(), facts).start(grid, initial(world), 2)
    assert [upload.status for upload in facts[1].uploads] == ["ok", "diverged", *["ok"] * 4]


def test_a_node_without_the_mod_is_left_out(tmp_path: Path) -> None:
    world = small_world()
    grid = grid_of(world, tmp_path)
    plain = ClientApp()

    @plain.train()
    def answer(message: Message, _: Context) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"num-examples": 1})}), reply_to=message)

    grid.nodes = {**grid.nodes, 5000: (plain, {"partition-id": 9})}
    facts: list[RoundFacts] = []
    strategy_of(world, FedDD(), facts).start(grid, initial(world), 2)
    assert [len(fact.uploads) for fact in facts] == [6, 6]


def test_a_client_of_an_unknown_sub_model_is_left_out(tmp_path: Path) -> None:
    world = small_world()
    app = ClientApp(mods=[feddd_mod([lambda: build_model(world)] * 4, store=tmp_path)])

    @app.train()
    def never(message: Message, _: Context) -> Message:
        raise AssertionError

    grid = grid_of(world, tmp_path)
    grid.nodes = {**grid.nodes, 5000: (app, {"partition-id": 3, "sub-model": 2})}
    facts: list[RoundFacts] = []
    strategy_of(world, FedDD(), facts).start(grid, initial(world), 1)
    assert len(facts[0].uploads) == 6


# Checkpoints


@pytest.mark.parametrize("name", ["feddd", "oort"])
def test_a_killed_server_goes_on_where_it_was(name: str, tmp_path: Path) -> None:
    world = small_world()
    facts: list[RoundFacts] = []
    whole = strategy_of(world, METHODS[name], facts).start(grid_of(world, tmp_path / "a"), initial(world), 5)
    file = tmp_path / "server.safetensors"
    grid = grid_of(world, tmp_path / "b")
    strategy_of(world, METHODS[name], [], checkpoint=file).start(grid, initial(world), 3)
    again: list[RoundFacts] = []
    resumed = strategy_of(world, METHODS[name], again, checkpoint=file).start(grid, initial(world), 5)
    assert [fact.round for fact in again] == [4, 5]
    for mine, theirs in zip(again, facts[3:], strict=True):
        assert [upload.mask for upload in mine.uploads] == [upload.mask for upload in theirs.uploads]
        assert [upload.download_bytes for upload in mine.uploads] == [u.download_bytes for u in theirs.uploads]
    for key, tensor in whole.arrays.to_torch_state_dict().items():
        assert torch.equal(tensor, resumed.arrays.to_torch_state_dict()[key])


def test_checkpoints_of_other_models_and_broken_ones_are_refused(tmp_path: Path) -> None:
    world = small_world()
    file = tmp_path / "server.safetensors"
    strategy_of(world, FedDD(), [], checkpoint=file).start(grid_of(world, tmp_path), initial(world), 1)
    with pytest.raises(InputError, match="another model"):
        load_checkpoint(file, {"fc1.weight": torch.zeros(2)})
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match="not a checkpoint"):
        load_checkpoint(file, dict(build_model(world).state_dict()))


# The client's half


def test_the_train_function_sees_full_models_and_its_config(tmp_path: Path) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    app = ClientApp(mods=[feddd_mod(lambda: nn.Linear(4, 3), store=tmp_path, loss_key="l", samples_key="n")])

    @app.train()
    def train_it(message: Message, _: Context) -> Message:
        assert message.content["config"]["rate"] == 0.5
        state = message.content["arrays"].to_torch_state_dict()
        seen.append(state)
        after = ArrayRecord({name: tensor + 1 for name, tensor in state.items()})
        metrics = MetricRecord({"l": 0.5, "n": 7, "extra": 3.0})
        return Message(RecordDict({"arrays": after, "metrics": metrics}), reply_to=message)

    from flwr.app import ConfigRecord

    grid = MemoryGrid({7: (app, {}), 8: (app, {})})
    model = nn.Linear(4, 3)
    strategy = FedDDStrategy(FedDD(budget=0.5), model, poll_seconds=0.01)
    arrays = ArrayRecord(dict(model.state_dict()))
    result = strategy.start(grid, arrays, 2, train_config=ConfigRecord({"rate": 0.5}))
    assert {name: tuple(t.shape) for name, t in seen[0].items()} == {"weight": (3, 4), "bias": (3,)}
    assert torch.equal(result.arrays.to_torch_state_dict()["bias"] > model.bias, torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"metrics": MetricRecord({"train_loss": 1.0, "num-examples": 1})}, "arrays_key"),
        ({"arrays": ArrayRecord({"weight": torch.zeros(3, 4)})}, "must return the whole model"),
        ({"arrays": ArrayRecord(dict(nn.Linear(4, 3).state_dict()))}, "must report 'train_loss'"),
    ],
)
def test_a_train_function_that_does_not_fit_is_told_what_is_missing(
    content: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    app = ClientApp(mods=[feddd_mod(lambda: nn.Linear(4, 3), store=tmp_path)])

    @app.train()
    def train_it(message: Message, _: Context) -> Message:
        return Message(RecordDict(dict(content)), reply_to=message)

    strategy = FedDDStrategy(FedDD(), nn.Linear(4, 3), poll_seconds=0.01, deadline_seconds=0.1, min_clients=1)
    with pytest.raises(RunError, match=f"only 0 of 1 clients counted.*client 7: lost: .*{reason}"):
        strategy.start(MemoryGrid({7: (app, {})}), ArrayRecord(dict(nn.Linear(4, 3).state_dict())), 1)


def test_evaluation_at_the_clients_is_off_unless_asked_for_and_charged(tmp_path: Path) -> None:
    app = ClientApp(mods=[feddd_mod(lambda: nn.Linear(4, 3), store=tmp_path)])

    @app.train()
    def train_it(message: Message, _: Context) -> Message:
        metrics = MetricRecord({"train_loss": 1.0, "num-examples": 2})
        return Message(RecordDict({"arrays": message.content["arrays"], "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate_it(message: Message, context: Context) -> Message:
        assert message.content["arrays"].to_torch_state_dict()["bias"].shape == (3,)
        weight = 1 if context.node_id == 7 else 3
        metrics = MetricRecord({"accuracy": 0.1 * context.node_id, "num-examples": weight})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    for asked in (False, True):
        facts: list[RoundFacts] = []
        grid = MemoryGrid({7: (app, {"client-id": "a"}), 8: (app, {"client-id": "b"})})
        model = nn.Linear(4, 3)
        strategy = FedDDStrategy(FedDD(), model, poll_seconds=0.01, evaluate_clients=asked, on_round=facts.append)
        result = strategy.start(grid, ArrayRecord(dict(model.state_dict())), 1)
        assert (facts[0].evaluation_bytes > 0) == asked
        if asked:
            assert result.evaluate_metrics_clientapp[1]["accuracy"] == pytest.approx((0.7 + 3 * 0.8) / 4)
            assert facts[0].evaluation_bytes == 2 * (16 + 4 + 4 * 15)
        else:
            assert result.evaluate_metrics_clientapp == {}


def test_a_store_holds_one_version_and_survives_a_half_written_file(tmp_path: Path) -> None:
    from feddd.core.units import units

    table = units(nn.Linear(4, 3))
    store = ClientStore(tmp_path, "../odd / name")
    assert store.path.parent == tmp_path
    assert store.version() == ""
    state = {
        MASK: torch.tensor([True, False, True]),
        OWN: torch.arange(5.0),
        TOLD_COVERAGE: torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64),
        "something-else": torch.arange(3),
    }
    store.save("v.1", state, table)
    assert store.version() == "v.1"
    loaded = store.load("v", table)
    assert loaded.keys() == state.keys()
    assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.items())
    assert store.load("w", table) == {}
    assert store.load("v", units(nn.Linear(5, 3))) == {}
    for wrong in (
        {MASK: torch.tensor([True, False])},
        {OWN: torch.arange(4.0)},
        {OWN: torch.tensor([1.0, 2.0, float("nan"), 4.0, 5.0])},
        {TOLD_COVERAGE: torch.tensor([1.0, 0.0, 0.25], dtype=torch.float64)},
    ):
        store.save("v.1", state | wrong, table)
        assert store.load("v", table) == {}
    store.save("v.1", state, table)
    store.path.write_bytes(store.path.read_bytes()[:40])
    assert store.version() == ""
    assert store.load("v", table) == {}


# What travels


def test_payloads_are_cut_into_small_arrays_and_put_together_again() -> None:
    chunk = chunk_bytes(1e5)
    assert 8 * chunk / 1e5 == pytest.approx(5.0, rel=0.01)
    assert chunk_bytes(1.0) == 4 * 1024
    assert chunk_bytes(1e9) == 256 * 1024
    data = np.random.default_rng(0).bytes(3 * chunk + 17)
    content = RecordDict()
    write_payload(content, data, chunk)
    sizes = [len(array.data) for array in content[PAYLOAD].values()]
    assert sizes == [chunk] * 3 + [17]
    assert read_payload(content, len(data)) == data
    with pytest.raises(RecordError, match="more than"):
        read_payload(content, len(data) - 1)


def test_an_upload_that_is_still_arriving_holds_up_neither_the_others_nor_the_deadline(tmp_path: Path) -> None:
    world, arrived = small_world(), threading.Event()
    grid, facts = grid_of(world, tmp_path), []
    strategy = strategy_of(world, FedAvg(), facts, deadline_seconds=3.0)

    def at(number: int, _: ArrayRecord) -> None:
        grid.uploading = {1000: arrived} if number == 1 else {}

    try:
        strategy.start(grid, initial(world), 3, evaluate_fn=at)  # type: ignore[arg-type]
    finally:
        arrived.set()
    assert [[upload.status for upload in fact.uploads] for fact in facts] == [
        ["ok"] * 6,
        ["late"] + ["ok"] * 5,
        ["ok"] * 6,
    ]


def test_orders_and_reports_survive_their_records() -> None:
    up, down = chain(Select(0.25, "delta", ("fc3",)), Bits(4)), Moves(b"1234", chain(Bits(4)), broadcast=True)
    order = Order("train", 3, "a", "b", chain_text(up), down_text(down), 7, 2, True, False, 4096)
    content = RecordDict()
    write_record(content, ORDER, order)
    found = read_record(content, ORDER, Order)
    assert found == order
    assert read_chain(found.up, vocabulary()) == up
    assert read_down(found.down, b"1234", vocabulary()) == down
    assert read_record(content, REPORT, Report) is None


# Links


def test_overhead_is_not_mistaken_for_a_slow_link() -> None:
    links = MeasuredLinks()
    links.introduce("a", 1e4, 4e4)
    for _ in range(5):
        links.idle(6.0)
    bits = 1e6
    for _ in range(30):
        links.observe("a", turnaround_seconds=6.0 + 3.0 + 125.0, compute_seconds=3.0, bits=bits)
    assert links["a"].seconds_per_bit == pytest.approx(125.0 / bits, rel=1e-6)
    assert links["a"].downlink_bits_per_s == pytest.approx(4 * links["a"].uplink_bits_per_s)
    assert links["a"].compute_seconds == pytest.approx(3.0)


def test_a_link_follows_what_rounds_show_and_a_quick_one_only_gets_a_bound() -> None:
    links = MeasuredLinks(default=Link(1e3, 4e3))
    links.introduce("a", 0.0, 0.0)
    links.idle(2.0)
    before = links["a"].seconds_per_bit
    links.observe("a", turnaround_seconds=3.0, compute_seconds=1.0, bits=1e6)
    assert links["a"].seconds_per_bit == pytest.approx(2.0 / 1e6)
    assert links["a"].seconds_per_bit < before
    links.observe("a", turnaround_seconds=3.0, compute_seconds=1.0, bits=1e5)  # says nothing against 2e-6
    assert links["a"].seconds_per_bit == pytest.approx(2.0 / 1e6)
