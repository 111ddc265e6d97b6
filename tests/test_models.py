"""The paper's networks: parameter counts, shapes, seeds, import paths, and errors that say what is right."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from feddd.core.units import units
from feddd.errors import InputError
from feddd.world.models import MODELS, build, import_object, widths
from feddd.world.objectives import Objective, check_fit

GREY, COLOUR = (1, 28, 28), (3, 32, 32)
LABELS = torch.tensor([3, 7])
COUNTS = [
    ("mlp", GREY, 0, 85_614),
    ("cnn1", GREY, 0, 21_840),
    ("cnn2", COLOUR, 0, 587_194),
    *(
        ("heterogeneous-a", COLOUR, width, count)
        for width, count in enumerate((3_973_194, 2_203_466, 2_191_206, 2_153_446, 1_710_950))
    ),
    *(
        ("heterogeneous-b", COLOUR, width, count)
        for width, count in enumerate((3_973_194, 1_587_786, 1_578_826, 1_458_090, 609_962))
    ),
]
# 785 · first + (first + 1) · 64 + 650: the sizes of the sub-models relate to each other as those of the models above.
MLP_COUNTS = [
    *(("mlp-a", width, 849 * first + 714) for width, first in enumerate((250, 138, 137, 135, 107))),
    *(("mlp-b", width, 849 * first + 714) for width, first in enumerate((250, 100, 99, 92, 38))),
]


def shapes(name: str, shape: tuple[int, int, int], width: int = 0) -> dict[str, tuple[int, ...]]:
    with torch.device("meta"):
        model = build(name, shape, 10, width)
    return {key: tuple(tensor.shape) for key, tensor in model.state_dict().items() if key.endswith("weight")}


@pytest.mark.parametrize(("name", "shape", "width", "count"), COUNTS)
def test_parameter_counts_are_the_papers(name: str, shape: tuple[int, int, int], width: int, count: int) -> None:
    with torch.device("meta"):
        model = build(name, shape, 10, width)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert units(model).elements == count


@pytest.mark.parametrize(("name", "width", "count"), MLP_COUNTS)
def test_mlps_of_five_widths_have_the_ratios_of_the_heterogeneous_models(name: str, width: int, count: int) -> None:
    model = build(name, GREY, 10, width)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    counts = {(papers, number): parameters for papers, _, number, parameters in COUNTS}
    papers = f"heterogeneous-{name[-1]}"
    whole = next(parameters for other, number, parameters in MLP_COUNTS if (other, number) == (name, 0))
    assert count / whole == pytest.approx(counts[papers, width] / counts[papers, 0], abs=0.005)


@pytest.mark.parametrize(("name", "shape"), [("mlp", GREY), ("cnn1", GREY), ("cnn2", COLOUR), ("cnn2", GREY)])
def test_a_batch_becomes_one_logit_per_class(name: str, shape: tuple[int, int, int]) -> None:
    with torch.no_grad():
        logits = build(name, shape, 7)(torch.zeros(3, *shape))
    assert logits.shape == (3, 7)


def test_logits_are_not_softmaxed() -> None:
    with torch.no_grad():
        logits = build("mlp", GREY, 10)(torch.rand(4, *GREY, generator=torch.Generator().manual_seed(0)))
    assert not torch.allclose(logits.exp().sum(1), torch.ones(4))
    assert (logits < 0).any()


def test_softmax_of_the_tables_is_a_last_layer_that_changes_no_parameter() -> None:
    plain, literal = (build(name, GREY, 10, seed=3) for name in ("mlp/2", "mlp/2+softmax"))
    images = torch.rand(4, *GREY, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(literal(images), plain(images).softmax(1))
    assert plain.state_dict().keys() == literal.state_dict().keys()
    assert widths("mlp-b+softmax") == 5


@pytest.mark.parametrize("name", ["heterogeneous-a", "heterogeneous-b"])
@pytest.mark.parametrize("width", range(5))
def test_every_sub_model_takes_a_colour_image(name: str, width: int) -> None:
    with torch.no_grad():
        logits = build(name, COLOUR, 10, width)(torch.zeros(2, *COLOUR))
    assert logits.shape == (2, 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [("heterogeneous-a", COLOUR), ("heterogeneous-b", COLOUR), ("mlp-a", GREY), ("mlp-b", GREY)],
)
def test_every_sub_model_is_nested_in_the_global_one(name: str, shape: tuple[int, int, int]) -> None:
    wide = shapes(name, shape)
    for width in range(1, widths(name)):
        narrow = shapes(name, shape, width)
        assert narrow.keys() == wide.keys()
        assert all(a <= b for key in wide for a, b in zip(narrow[key], wide[key], strict=True))


def test_the_first_linear_layer_takes_the_last_convolutions_channels() -> None:
    assert shapes("heterogeneous-b", COLOUR, 1)["fc1.weight"] == (100, 256)
    assert shapes("heterogeneous-a", COLOUR, 2)["fc1.weight"] == (80, 512)
    assert shapes("cnn2", COLOUR)["fc1.weight"] == (500, 1024)


def test_convolutions_have_padding_one_except_in_cnn1() -> None:
    paddings = {
        name: {layer.padding for layer in build(name, COLOUR, 10).modules() if isinstance(layer, nn.Conv2d)}
        for name in ("cnn1", "cnn2")
    }
    assert paddings == {"cnn1": {(0, 0)}, "cnn2": {(1, 1)}}
    assert shapes("cnn1", GREY)["conv1.weight"] == (10, 1, 5, 5)


def test_widths_count_sub_models() -> None:
    assert [widths(name) for name in MODELS] == [1, 1, 1, 5, 5, 5, 5, 1, 1]
    assert widths("torch.nn:Identity") == 1


def test_initial_weights_follow_from_the_seed_alone() -> None:
    first, again, other = (build("mlp", GREY, 10, seed=seed).state_dict()["fc1.weight"] for seed in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_an_unknown_name_is_refused_with_the_nearest_known_one() -> None:
    with pytest.raises(InputError, match="unknown model 'cnn3'; did you mean 'cnn"):
        build("cnn3", GREY, 10)
    with pytest.raises(InputError, match="unknown model 'resnet50'; known are mlp, cnn1"):
        build("resnet50", GREY, 10)


def test_images_too_small_for_the_convolutions_are_refused() -> None:
    with pytest.raises(InputError, match=r"images of shape \(1, 28, 28\) are too small for 5 convolutions"):
        build("heterogeneous-a", GREY, 10)


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module in the current folder."""
    (tmp_path / "my_own_nets.py").write_text(
        "from torch import nn\n"
        "def small(): return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))\n"
        "def nothing(): return 42\n"
        "def sized(units): return nn.Linear(units, 10)\n"
        "number = 7\n"
    )
    (tmp_path / "my_broken_nets.py").write_text("def small(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))  # the library adds the current folder
    monkeypatch.delitem(sys.modules, "my_own_nets", raising=False)
    return "my_own_nets"


def test_an_import_path_builds_a_users_own_network_from_the_seed(own_module: str) -> None:
    first, again, other = (build(f"{own_module}:small", GREY, 10, seed=seed).state_dict() for seed in (1, 1, 2))
    assert first["1.weight"].shape == (10, 784)
    assert torch.equal(first["1.weight"], again["1.weight"])
    assert not torch.equal(first["1.weight"], other["1.weight"])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("my_own_nets:large", "cannot import 'my_own_nets:large'"),
        ("my_absent_nets:small", "cannot import 'my_absent_nets:small'"),
        (":small", "cannot import ':small'"),
        (".relative:small", "cannot import '.relative:small'"),
        ("my_broken_nets:small", "cannot import 'my_broken_nets:small'"),
        ("my_own_nets:", "cannot import 'my_own_nets:'"),
        ("my_own_nets:number", "'my_own_nets:number' is not a function"),
        ("my_own_nets:nothing", "returned a int, not a torch.nn.Module"),
        ("my_own_nets:sized", "must be callable without arguments: missing a required argument: 'units'"),
    ],
)
@pytest.mark.usefixtures("own_module")
def test_an_import_path_that_gives_no_network_is_refused(path: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(path, GREY, 10)


def test_an_import_path_names_a_callable() -> None:
    assert import_object("torch.nn:Linear") is nn.Linear


def test_a_fitting_model_passes_and_keeps_its_mode() -> None:
    model = build("mlp", GREY, 10).train()
    check_fit(model, torch.zeros(2, *GREY), LABELS, Objective(), 10, "mlp")
    assert model.training


def test_outputs_of_the_wrong_size_are_refused() -> None:
    with pytest.raises(
        InputError, match=r"model 'mine' gives outputs of shape \(7,\) per sample; the labels need \(10,\)"
    ):
        check_fit(build("mlp", GREY, 7), torch.zeros(2, *GREY), LABELS, Objective(), 10, "mine")
    with pytest.raises(InputError, match=r"gives outputs of shape tuple per sample"):
        check_fit(nn.LSTM(28, 10), torch.zeros(2, 28, 28), LABELS, Objective(), 10, "mine")


def test_inputs_that_do_not_fit_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match=r"model 'mine' cannot take inputs of shape \(3, 32, 32\)") as caught:
        check_fit(build("mlp", GREY, 10), torch.zeros(2, *COLOUR), LABELS, Objective(), 10, "mine")
    assert "\n" not in str(caught.value)


def test_pooling_and_relu_may_change_places() -> None:
    images = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype(np.float32))
    pool = torch.nn.functional.max_pool2d
    assert torch.equal(pool(images.relu(), 2), pool(images, 2).relu())


def test_a_narrowed_network_has_every_hidden_width_divided() -> None:
    full, narrow = shapes("cnn2", COLOUR), shapes("cnn2/4", COLOUR)
    assert [narrow[f"conv{n}.weight"][0] for n in (1, 2, 3)] == [4, 8, 16]
    assert [narrow[f"fc{n}.weight"][0] for n in (1, 2, 3)] == [125, 25, 10]
    assert full["fc3.weight"][0] == 10
    assert widths("heterogeneous-a/4") == 5
    assert shapes("mlp/1000", GREY)["fc1.weight"][0] == 1


@pytest.mark.parametrize("name", ["mlp/0", "mlp/x", "mlp/", "mlp/-2", "mlp/2/2", "resnet/2", "mlp+relu"])
def test_names_that_are_no_narrowed_network_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="unknown model"):
        build(name, GREY, 10)
