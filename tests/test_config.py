import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from feddd import FedAvg, FedCS, FedDD, Oort, load_experiment
from feddd.errors import InputError
from feddd.experiments.config import Experiment, parse_experiment


def test_the_defaults_are_those_of_the_design():
    experiment = Experiment()
    assert (experiment.seed, experiment.rounds, experiment.evaluate_every) == (0, 100, 1)
    assert experiment.targets == (0.8, 0.85, 0.88, 0.9)
    assert (experiment.data.dataset, experiment.data.partition) == ("mnist", "noniid-b")
    assert experiment.fleet.clients == 100
    assert experiment.fleet.uplink_bits_per_s == (1e4, 5e4)
    assert experiment.fleet.downlink_bits_per_s == (4e4, 2e5)
    assert experiment.fleet.cpu_hz == (1e9, 1e10)
    assert experiment.fleet.cycles_per_sample == (1e6, 1e7)
    assert experiment.model.name == "mlp"
    training = experiment.training
    assert (training.epochs, training.batch_size, training.learning_rate) == (1, 32, 0.01)
    built = [strategy.build() for strategy in experiment.strategy]
    assert built == [FedDD(), FedAvg(), FedCS(), Oort()]
    assert [strategy.label for strategy in experiment.strategy] == ["feddd", "fedavg", "fedcs", "oort"]
    assert built[0] == FedDD(0.6, 0.8, 0.1, 5, "importance", (), "differential", ())
    assert (built[2].budget, built[3].budget) == (0.6, 0.6)


@given(
    seed=st.integers(0, 2**40),
    budget=st.floats(0.2, 1.0),
    rates=st.sampled_from(["differential", "uniform"]),
    label=st.text(st.characters(exclude_categories=["C"], exclude_characters="/\\"), min_size=1, max_size=20),
    uplink=st.one_of(st.floats(1, 1e9), st.tuples(st.floats(1, 10), st.floats(10, 1e9)).map(list)),
)
def test_any_experiment_equals_its_toml_after_a_round_trip(seed, budget, rates, label, uplink):
    if label in (".", ".."):
        label = "dots"
    document = {
        "seed": seed,
        "fleet": {"uplink_bits_per_s": uplink},
        "strategy": [{"name": "feddd", "label": label, "budget": budget, "rates": rates}, {"name": "fedavg"}]
        if label != "fedavg"
        else [{"name": "fedavg"}],
    }
    experiment = parse_experiment(document)
    assert parse_experiment(tomllib.loads(experiment.to_toml())) == experiment


def test_an_experiment_cannot_be_changed():
    with pytest.raises(Exception, match="frozen"):
        Experiment().rounds = 3


WRONG = [
    ("data.partion=iid", "unknown key data.partion; did you mean 'partition'?"),
    ("data.partition=noniid_b", "data.partition: unknown partition 'noniid_b'; did you mean 'noniid-b'?"),
    ("data.dataset=mnst", "did you mean 'mnist'?"),
    ("model.name=mpl", "did you mean 'mlp'?"),
    ("strategy.feddd.budgt=0.5", "strategy.feddd: unknown key budgt; did you mean 'budget'?"),
    ("strategy.feddd.budget=0.1", "infeasible: with max_dropout 0.8 it must lie between 0.2 and 1"),
    ("strategy.feddd.budget=nan", "budget nan is infeasible"),
    ("strategy.feddd.selector=magnitud", "did you mean 'magnitude'?"),
    ("strategy.feddd.penalty=hello", "penalty: should be a valid number"),
    ("strategy.feddd.penalty=-1", "penalty must be finite and at least 0"),
    ("strategy.feddd.broadcast_every=-1", "broadcast_every must be at least 0"),
    ("strategy.feddd.max_dropout=1.2", "max_dropout must lie between 0 and 1"),
    ("strategy.fedd.budget=0.5", "no strategy is labelled 'fedd'; did you mean 'feddd'?"),
    ("strategy.feddd.name=fedprx", "unknown strategy 'fedprx'"),
    ("strategy.feddd.label=fedavg", "two strategies are labelled 'fedavg'"),
    ("strategy.feddd.label='a/b'", "without slashes"),
    ("strategy.fedavg.participation=0", "participation must lie above 0"),
    ("strategy.fedcs.mode=deadline", "needs a positive deadline_seconds"),
    ("strategy.fedcs.deadline_seconds=5", 'deadline_seconds belongs to mode "deadline"'),
    ("strategy.oort.budget=2", "budget must lie above 0"),
    ("fleet.uplink_bits_per_s=0", "fleet.uplink_bits_per_s: should be greater than 0, not 0"),
    ("fleet.downlink_bits_per_s=[1, inf]", "should be a finite number"),
    ("fleet.uplink_bits_per_s=[5, nan]", "should be a finite number"),
    ("fleet.cpu_hz=[5, 1]", "a range goes from low to high"),
    ("fleet.clients=0", "fleet.clients: should be greater than or equal to 1"),
    ("fleet.gain=1", "Shannon links need bandwidth_hz, power_w, gain, noise_w"),
    ("training.learning_rate=0", "should be greater than 0"),
    ("training.epochs=1.5", "should be a valid integer"),
    ("rounds=many", "rounds: should be a valid integer, not 'many'"),
    ("seed=-1", "seed: should be greater than or equal to 0"),
    ("targets=[2]", "an accuracy lies above 0 and is at most 1, not 2"),
    ("name='../elsewhere'", "it names a folder"),
    ("data.alpha=1", "alpha belongs to partition dirichlet"),
    ("data.classes_per_client=0", "should be greater than or equal to 1"),
    ("foo.bar=1", "unknown key foo; known are name, seed"),
    ("rounds", "--set takes key=value"),
    ("rounds=]", "neither a TOML value nor a bare word"),
    ("rounds.deep.key=1", "has no keys below it"),
]


@pytest.mark.parametrize(("override", "expected"), WRONG)
def test_wrong_input_is_one_line_that_says_what_would_be_right(override, expected):
    with pytest.raises(InputError) as caught:
        load_experiment("quickstart", ["rounds=7", override])
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_overrides_take_toml_values_and_bare_words():
    experiment = load_experiment(
        "quickstart",
        [
            "training.epochs=3",
            "data.partition=iid",
            "fleet.cpu_hz=[1e9, 2e9]",
            "strategy.feddd.always_send=['fc3']",
            "strategy.oort.mode=budget",
            "strategy.feddd.label=two.words",
            "strategy.two.words.budget=0.5",
        ],
        {"seed": 5},
    )
    assert experiment.training.epochs == 3
    assert experiment.data.partition == "iid"
    assert experiment.fleet.cpu_hz == (1e9, 2e9)
    assert experiment.seed == 5
    first = experiment.strategy[0]
    assert first.label == "two.words"
    assert first.build() == FedDD(budget=0.5, always_send=("fc3",))
    assert experiment.strategy[-1].build() == Oort(mode="budget")


def test_shannon_links_and_a_fleet_file_replace_the_default_rates():
    shannon = ["fleet.bandwidth_hz=1e4", "fleet.power_w=0.1", "fleet.gain=[1e-9, 1e-8]", "fleet.noise_w=1e-10"]
    fleet = load_experiment("quickstart", shannon).fleet
    assert fleet.uplink_bits_per_s is None
    assert fleet.gain == (1e-9, 1e-8)
    with pytest.raises(InputError, match="cannot both be given"):
        load_experiment("quickstart", [*shannon, "fleet.uplink_bits_per_s=5"])
    with pytest.raises(InputError, match="the file has the links"):
        load_experiment("quickstart", ["fleet.file=fleet.csv", "fleet.cpu_hz=5"])


def test_files_that_cannot_be_read_are_named(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(InputError, match=r"broken\.toml is not valid TOML: .*line 1"):
        load_experiment(broken)
    with pytest.raises(InputError, match="no preset or file 'quickstat'; did you mean 'quickstart'"):
        load_experiment("quickstat")
    with pytest.raises(InputError, match="cannot read"):
        load_experiment(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(InputError, match="cannot read"):
        load_experiment(tmp_path / "latin.toml")


def test_a_byte_order_mark_before_the_first_key_is_no_part_of_it(tmp_path):
    (tmp_path / "marked.toml").write_bytes(b"\xef\xbb\xbfrounds = 3\n")
    assert load_experiment(tmp_path / "marked.toml").rounds == 3


def test_an_error_names_the_set_that_brought_it_about_and_else_the_file(tmp_path):
    with pytest.raises(InputError, match=r"^--set data\.alpha=1: .*alpha belongs"):
        load_experiment("quickstart", ["rounds=3", "data.alpha=1", "seed=4"])
    with pytest.raises(InputError, match=r"^--set rounds=\]: "):
        load_experiment("quickstart", ["rounds=]"])
    (tmp_path / "wrong.toml").write_text("rounds = 0")
    with pytest.raises(InputError, match=r"^.*wrong\.toml: rounds: "):
        load_experiment(tmp_path / "wrong.toml", ["seed=4"])


def test_a_file_is_named_after_itself_and_finds_its_fleet_beside_it(tmp_path):
    (tmp_path / "mine.toml").write_text('[fleet]\nfile = "fleet.csv"\n')
    experiment = load_experiment(tmp_path / "mine.toml")
    assert experiment.name == "mine"
    assert experiment.fleet.file == str(tmp_path / "fleet.csv")


def test_a_strategy_of_ones_own_comes_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "my_strategies.py").write_text(
        "from feddd import FedAvg\ndef half(share):\n    return FedAvg(participation=share)\n"
    )
    monkeypatch.chdir(tmp_path)
    document = {"strategy": [{"name": "my_strategies:half", "share": 0.5}]}
    assert parse_experiment(document).strategy[0].build() == FedAvg(participation=0.5)
    with pytest.raises(InputError, match="cannot import 'my_strategies:nothing'"):
        parse_experiment({"strategy": [{"name": "my_strategies:nothing"}]}).strategy[0].build()


def test_a_literal_softmax_is_asked_for_and_never_written_where_it_is_not() -> None:
    plain, literal = (load_experiment("mnist-noniid-b", changes) for changes in ([], ["model.output=softmax"]))
    assert "output" not in tomllib.loads(plain.to_toml())["model"]
    assert (plain.model.network, literal.model.network) == ("mlp", "mlp+softmax")
    assert parse_experiment(tomllib.loads(literal.to_toml())) == literal


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "mlp+softmax"}, "model.name: unknown model 'mlp\\+softmax'"),
        ({"name": "own.nets:small", "output": "softmax"}, "output belongs to the networks that come with the package"),
        ({"output": "logits"}, "model.output"),
    ],
)
def test_an_output_that_means_nothing_is_refused(change: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_experiment({"model": change})
