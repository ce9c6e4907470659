"""Networks with several inputs and outputs of every kind, and what is said when a pass fails."""

import copy
import pickle
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch
from helpers.references import left_alone
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes.network.function import as_network
from batchbayes.network.inputs import Inputs

IMAGES = torch.randn(64, 2, 4, 4, generator=torch.Generator().manual_seed(0))
AGES = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
LABELS = torch.arange(64) % 3


class TwoInputs(nn.Module):
    """An image and a vector, given by position or by name."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4)
        self.linear, self.second, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(8, 3)

    def forward(self, image: Tensor, age: Tensor) -> Tensor:
        return self.head(torch.cat([self.norm(self.conv(image)).mean((2, 3)), self.second(self.linear(age))], 1))


class OneInput(nn.Module):
    """The same network for one tensor that holds both inputs."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, both: Tensor) -> Tensor:
        return self.inner(both[:, :32].unflatten(1, (2, 4, 4)), both[:, 32:])


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = TwoInputs()
    with torch.no_grad():
        for rows in torch.randperm(64).split(8):
            network(IMAGES[rows], AGES[rows])
    return network.eval()


FORMS = {
    "tuple in a batch": (lambda r: ((IMAGES[r], AGES[r]), LABELS[r]), None),
    "dict in a batch": (lambda r: ({"age": AGES[r], "image": IMAGES[r]}, LABELS[r]), None),
    "keys": (lambda r: {"y": LABELS[r], "age": AGES[r], "image": IMAGES[r]}, ("image", "age")),
    "positions": (lambda r: (IMAGES[r], AGES[r], LABELS[r]), (0, 1)),
    "function to tuple": (lambda r: (LABELS[r], IMAGES[r], AGES[r]), lambda batch: batch[1:]),
    "function to dict": (lambda r: (IMAGES[r], AGES[r]), lambda batch: {"age": batch[1], "image": batch[0]}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", [bb.mcbn, bb.stochastic_bn, bb.population, bb.clt_bn])
def test_several_inputs_equal_one_joined_input(network, form, method):
    batch, inputs = FORMS[form]
    rows = list(torch.arange(64).split(8))
    options = {"batch_size": 8} if method is bb.clt_bn else {}
    joined = torch.cat([IMAGES.flatten(1), AGES], 1)
    single = method(OneInput(network), [joined[r] for r in rows], **options)
    with left_alone(network):
        several = method(network, [batch(r) for r in rows], inputs=inputs, **options)
        assert torch.equal(several.center, single.center)
        assert torch.equal(several.deviations, single.deviations)
        for engine in ("sample", "auto"):
            options = {"num_samples": 6, "engine": engine, "chunk_size": 5}
            found = bb.predict(several, [batch(r) for r in rows], bb.categorical(), inputs=inputs, **options)
            expected = bb.predict(single, [joined[r] for r in rows], bb.categorical(), **options)
            torch.testing.assert_close(found.probs, expected.probs)
            assert found.engine == expected.engine


def test_several_inputs_with_the_linear_engine_tuning_dropout_and_loaders(network):
    loader = DataLoader(TensorDataset(IMAGES, AGES, LABELS), batch_size=16)
    posterior = bb.mcbn(network, loader, inputs=(0, 1), num_samples=8)
    exact, linear = (
        bb.predict(posterior, loader, bb.categorical(), inputs=(0, 1), num_samples=8, engine=engine).probs
        for engine in ("sample", "linear")
    )
    assert (exact - linear).abs().max() < 0.05
    tuned = bb.tune_batch_size(posterior, loader, bb.categorical(), inputs=(0, 1), num_samples=8)
    joined = bb.tune_batch_size(posterior, [((IMAGES, AGES), LABELS)], bb.categorical(), num_samples=8)
    assert tuned.batch_size == pytest.approx(joined.batch_size)
    dropped = bb.mc_dropout(nn.Sequential(OrderedDict(body=Named(network), drop=nn.Dropout(0.5))))
    assert bb.predict(dropped, {"x": IMAGES}, bb.categorical(), inputs=("x",), num_samples=3).probs.shape == (64, 3)


class Named(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x, AGES[: len(x)] * 0)


def test_the_query_inside_its_batch_needs_one_input(network):
    loader = DataLoader(TensorDataset(IMAGES, AGES, LABELS), batch_size=16)
    with pytest.raises(bb.BatchbayesError, match="one input tensor here"):
        bb.mcbn(network, loader, inputs=(0, 1), include_query=True)


# Outputs


@dataclass
class Answer:
    logits: Tensor
    loss: float = 0.0


class Answering(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x):
        return Answer(self.norm(x))


@pytest.mark.parametrize("output", ["logits", lambda answer: answer.logits])
def test_outputs_with_attributes(output):
    posterior = bb.mcbn(Answering(), AGES, batch_size=8, output=output)
    assert bb.predict(posterior, AGES, bb.categorical(), num_samples=2).probs.shape == (64, 3)


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "one output tensor; got a Answer with logits, loss"),
        ("probs", "named 'probs'; got a Answer with logits, loss"),
        ("loss", "a tensor as output 'loss'; got a single float"),
        (0, "named 0; got a Answer"),
        (lambda answer: answer.loss, "got a single float"),
        (lambda answer: answer.nothing, "a function output= that returns a tensor.*AttributeError"),
    ],
)
def test_outputs_that_are_no_tensor(output, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.mcbn(Answering(), AGES, batch_size=8, output=output)


# Passes that fail, and passes that run late


def test_an_error_of_the_network_is_passed_on_in_words(network):
    with left_alone(network), pytest.raises(bb.BatchbayesError, match="inputs that TwoInputs runs on") as caught:
        as_network(network)(Inputs([IMAGES]))
    assert isinstance(caught.value.__cause__, TypeError)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        hidden = checkpoint(lambda h: self.norm(self.linear(h)).tanh(), x, use_reentrant=False)
        return self.head(hidden)


@pytest.mark.parametrize("training", [True, False])
def test_a_network_with_checkpoints_is_left_alone(training):
    """A backward pass runs parts of the network again. They see the statistics of the pass inside `running`."""
    torch.manual_seed(0)
    network = Checkpointed().train(training)
    x = AGES[:8].clone().requires_grad_()
    statistics = {"norm.running_mean": torch.full((4,), 0.5), "norm.running_var": torch.full((4,), 2.0)}

    def gradient(module):
        with as_network(module).running(x, tensors=statistics) as outputs:
            return torch.autograd.grad(outputs.square().sum(), x)[0]

    plain = nn.Sequential(network.linear, network.norm, nn.Tanh(), network.head)
    expected = {key.replace("norm", "1"): value for key, value in statistics.items()}
    with left_alone(network):
        found = gradient(network)
        with as_network(plain).running(x, tensors=expected) as outputs:
            torch.testing.assert_close(found, torch.autograd.grad(outputs.square().sum(), x)[0])
        late = as_network(network)(x)
        torch.autograd.grad(late.sum(), x)  # outside of the block: other statistics, but the user's stay


def test_inputs_that_a_network_changes_in_place_stay_as_they_are():
    class Doubling(nn.Sequential):
        def forward(self, x):
            return super().forward(x.mul_(2))

    network = Doubling(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).eval()
    x = AGES.clone()
    batches = list(x.split(16))
    posterior = bb.mcbn(network, batches)
    drawn = bb.predict(posterior, x, bb.categorical(), num_samples=2, keep_draws=True).draws
    assert torch.equal(x, AGES)
    expected = torch.stack([posterior.draw(0, s)(AGES) for s in range(2)])
    torch.testing.assert_close(drawn, expected)


def test_a_network_of_one_dict_is_told_to_take_its_inputs_by_name():
    class Dict(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, batch):
            return self.norm(batch["age"])

    with pytest.raises(bb.BatchbayesError, match=r"let forward\(\) take these inputs by name"):
        bb.mcbn(Dict(), {"age": AGES, "label": LABELS}, batch_size=8, inputs=lambda batch: batch)


def first_of(batch):
    return batch["x"]


def test_a_copy_knows_where_inputs_are():
    """Functions of a module stay in copies and pickles; a lambda stays in copies, and cannot be pickled."""
    batches = [{"x": torch.randn(20, 2)} for _ in range(4)]
    layers = nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)
    for picker in (first_of, lambda batch: batch["x"]):
        posterior = bb.mcbn(nn.Sequential(*layers).eval(), batches, inputs=picker)
        expected = bb.predict(posterior, batches, bb.categorical(), num_samples=2).probs
        twins = [copy.deepcopy(posterior), *([pickle.loads(pickle.dumps(posterior))] if picker is first_of else [])]
        for twin in twins:
            assert torch.equal(bb.predict(twin, batches, bb.categorical(), num_samples=2).probs, expected)
    assert pickle.loads(pickle.dumps(posterior)).network.inputs is None
