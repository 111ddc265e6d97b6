import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from feddd.core.streams import stream
from feddd.core.units import units
from feddd.simulation.evaluation import Evaluation, evaluate
from feddd.simulation.stacked import is_chain
from feddd.simulation.trainers import choose_trainer, make_trainer
from feddd.simulation.training import Local, Samples, Training, batches
from feddd.world.models import build


@pytest.fixture
def client():
    rng = np.random.default_rng(3)
    images = torch.from_numpy(rng.random((45, 1, 28, 28), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, 45))
    model = build("mlp", (1, 28, 28), 10, seed=7)
    return model, {name: tensor.clone() for name, tensor in model.state_dict().items()}, images, labels


def by_optimiser(model, before, images, labels, training, rng):
    """Plain torch: an optimiser, a backward pass, the same batches."""
    model.load_state_dict(before)
    optimiser = torch.optim.SGD(model.parameters(), lr=training.learning_rate)
    losses = []
    rng.integers(2**63)
    for index in batches(len(labels), training, rng):
        each = functional.cross_entropy(model(images[index]), labels[index], reduction="none")
        optimiser.zero_grad()
        each.mean().backward()
        optimiser.step()
        losses.extend(each.tolist())
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, np.array(losses)


@pytest.mark.parametrize("trainer", ["reference", "channels_last", "stacked"])
@pytest.mark.parametrize("name", ["mlp", "mlp+softmax", "cnn1", "cnn1+softmax", "cnn2"])
def test_trainers_agree_with_torch_optim(name, trainer):
    shape = (3, 32, 32) if name == "cnn2" else (1, 28, 28)
    # In the deeper network float32 rounding decides some pools and ReLUs the other way.
    dtype = torch.float64 if name == "cnn2" else torch.float32
    model = build(name, shape, 10, seed=7).to(dtype)
    rng = np.random.default_rng(3)
    training = Training(epochs=2, batch_size=16, learning_rate=0.05)
    # Different sizes: some clients have fewer batches, all have a short last one.
    counts = (45, 7, 70, 33)
    images = torch.from_numpy(rng.random((sum(counts), *shape), dtype=np.float32)).to(dtype)
    labels = torch.from_numpy(rng.integers(0, 10, sum(counts)))
    initial = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    before = {key: torch.stack([tensor + 0.01 * n for n in range(len(counts))]) for key, tensor in initial.items()}
    clients, expected, first = [], [], 0
    for place, count in enumerate(counts):
        own = slice(first, first + count)
        start = {key: stack[place] for key, stack in before.items()}
        expected.append(by_optimiser(model, start, images[own], labels[own], training, stream(0, place)))
        clients.append(Local(first, count, stream(0, place)))
        first += count
    given = {key: stack.clone() for key, stack in before.items()}
    tolerance = 1e-8 if name == "cnn2" else 2e-6
    if trainer == "stacked":
        model = model.float()  # it takes no other models, but its sums work in whatever precision the stack has
    trained = make_trainer(model, units(model), trainer).train(before, Samples(images, labels), clients, training)
    assert all(torch.equal(before[key], given[key]) for key in given)
    for place, (after, losses) in enumerate(expected):
        for key, tensor in after.items():
            torch.testing.assert_close(trained.after[key][place], tensor, rtol=1e-4, atol=tolerance)
        assert trained.mean_loss[place] == pytest.approx(losses.mean(), rel=1e-5)
        assert trained.oort_statistic[place] == pytest.approx(np.sqrt((losses**2).mean()), rel=1e-5)


def alone(model, before, images, labels, rng, training, trainer="reference"):
    """One client as a stack of one."""
    stack = {name: tensor.unsqueeze(0) for name, tensor in before.items()}
    chosen = make_trainer(model, units(model), trainer)
    return chosen.train(stack, Samples(images, labels), [Local(0, len(labels), rng)], training)


def test_a_stack_gives_each_client_the_same_bits_in_whatever_stack_of_its_size_it_is(client):
    model, before, images, labels = client
    training = Training(batch_size=16)
    stack = {name: tensor.expand(3, *tensor.shape) for name, tensor in before.items()}
    stacked = make_trainer(model, units(model), "stacked").train

    def trained(numbers):
        return stacked(stack, Samples(images, labels), [Local(0, 45, stream(0, n)) for n in numbers], training)

    first, again = trained((1, 2, 3)).after["fc1.weight"], trained((3, 1, 2)).after["fc1.weight"]
    assert torch.equal(first[0], again[1])
    assert torch.equal(first[2], again[0])
    assert not torch.equal(first[0], first[1])


def test_the_mean_loss_counts_samples_not_batches(client):
    model, before, images, labels = client
    # 45 samples in batches of 32 and 13: with no learning the mean over samples is the loss of the model itself.
    training = Training(batch_size=32, learning_rate=1e-30)
    trained = alone(model, before, images, labels, stream(0, "x"), training)
    model.load_state_dict(before)
    whole = functional.cross_entropy(model(images), labels).detach()
    assert trained.mean_loss[0] == pytest.approx(float(whole), rel=1e-6)


def test_every_epoch_sees_every_sample_once_in_a_new_order():
    training = Training(epochs=3, batch_size=4)
    seen = list(batches(10, training, stream(0, "x")))
    assert [len(batch) for batch in seen] == [4, 4, 2] * 3
    epochs = [np.concatenate(seen[3 * epoch : 3 * epoch + 3]) for epoch in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert not np.array_equal(epochs[0], epochs[1])


def test_stochastic_layers_follow_the_clients_generator_and_leave_torchs_alone():
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 32), nn.Dropout(0.5), nn.Linear(32, 10))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    images, labels = torch.rand(20, 1, 28, 28), torch.arange(20) % 10
    state = torch.random.get_rng_state()
    runs = []
    for address in (1, 1, 2):
        runs.append(alone(model, before, images, labels, stream(0, address), Training(learning_rate=0.1)).after)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in before)
    assert not torch.equal(runs[0]["1.weight"], runs[2]["1.weight"])


def test_divergence_is_noticed_in_loss_and_in_weights(client):
    wild = alone(*client, stream(0, "x"), Training(epochs=5, learning_rate=1e30))
    assert not wild.finite()[0]
    fine = alone(*client, stream(0, "x"), Training())
    assert fine.finite()[0]
    fine.after["fc1.weight"][0, 0, 0] = 3e38  # finite, though its square is not
    assert fine.finite()[0]
    fine.after["fc1.weight"][0, 0, 0] = torch.inf
    assert not fine.finite()[0]
    assert alone(*client, stream(0, "x"), Training()).only(np.array([False])).mean_loss.shape == (0,)


def test_which_trainer_a_model_gets_follows_from_its_layers():
    assert choose_trainer(build("mlp", (1, 28, 28), 10)).name == "stacked"
    assert choose_trainer(build("cnn1", (1, 28, 28), 10)).name == "stacked"
    assert choose_trainer(build("cnn2", (3, 32, 32), 10)).name == "stacked"
    sizes = {
        name: make_trainer(model, units(model), "stacked").clients
        for name, model in (("mlp", build("mlp", (1, 28, 28), 10)), ("cnn2", build("cnn2", (3, 32, 32), 10)))
    }
    assert sizes == {"mlp": 12, "cnn2": 1}
    batch_norm = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    assert choose_trainer(batch_norm).name == "channels_last"
    assert choose_trainer(nn.Sequential(nn.Flatten(), nn.Linear(4, 2), nn.Dropout())).name == "reference"
    assert not is_chain(nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)))
    assert not is_chain(nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False)))
    assert not is_chain(nn.Linear(4, 3))
    with pytest.raises(ValueError, match="does not fit"):
        make_trainer(nn.Linear(4, 3), units(nn.Linear(4, 3)), "stacked")


def test_evaluations_add_up_to_the_whole_and_know_their_classes(client):
    model, before, images, labels = client
    whole = evaluate(model, before, images, labels, 10)
    parts = evaluate(model, before, images[:20], labels[:20], 10) + evaluate(
        model, before, images[20:], labels[20:], 10
    )
    assert parts.accuracy == whole.accuracy
    assert parts.loss == pytest.approx(whole.loss)
    some = Evaluation(1.0, 6, 1.0, 6.0, np.array([1, 0, 0]), np.array([2, 4, 0]))
    assert some.accuracy == pytest.approx(1 / 6)
    np.testing.assert_array_equal(some.class_accuracy, [0.5, 0.0, np.nan])
