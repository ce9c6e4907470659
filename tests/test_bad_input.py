"""Bad input: its own message each, and a network that is left as it was."""

from itertools import count

import pytest
import torch
from helpers.cases import NETWORKS
from helpers.references import left_alone
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes.engines.sample import sampled_blocks
from batchbayes.network.inputs import require_finite

X = torch.linspace(-1, 1, 64 * 4).view(64, 4).sin()


@pytest.fixture
def network():
    return NETWORKS["BatchNorm1d (N, C)"].network()


def with_nan(network):
    with torch.no_grad():
        network[4].weight[0, 0] = float("nan")
    return network


@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        ([X[:1]] * 3, {}, "a batch of one has no batch statistics"),
        (X, {"batch_size": 1}, "a batch of one has no batch statistics"),
        (X, {}, "expected batch_size= beside a tensor"),
        (X, {"batch_size": 65}, "expected at least 65 training examples, one batch; got 64"),
        ([X[:8]], {"batch_size": 16}, "expected at least 16 training examples, one batch; got 8"),
        (
            DataLoader(TensorDataset(X), batch_size=100),
            {},
            "expected at least 100 training examples, one batch; got 64",
        ),
        ([], {}, "expected at least one training batch; got an empty iterable"),
        (iter(()), {}, "expected at least one training batch; got an empty iterable"),
        ([X[:8], X[8:16] / 0], {}, "finite numbers in the inputs"),
        (X.clone().fill_(float("nan")), {"batch_size": 8}, "64 \\* 4|256 of 256 that are NaN"),
        ([X[:8]] * 4, {}, "zero spread at every site over 4 mini-batches of 8"),
        ([{"image": X[:8]}], {}, "got a dict with keys \\['image'\\].*say where the inputs are"),
        ([{"image": X[:8]}], {"inputs": "picture"}, "inputs at 'picture'; got a dict with keys \\['image'\\]"),
        (3, {}, "expected a tensor or an iterable of batches; got a int"),
        ([X[:8], X[8:16]], {"num_samples": 1.5}, "num_samples as a whole number"),
        ([X[:8], X[8:16]], {"num_samples": "many"}, "num_samples as a whole number"),
        ([X[:8], X[8:16]], {"seed": 1.5}, "seed as a whole number"),
        ([X[:8], X[8:16]], {"seed": None}, "seed as a whole number"),
        (X, {"batch_size": 8.0}, "batch_size as a whole number"),
        (X, {"batch_size": "8"}, "batch_size as a whole number"),
        ([X[:8], X[8:16]], {"sites": 1.5}, "sites= as a number"),
        ([X[:8].to(torch.complex64)] * 2, {}, "real numbers in the inputs; got torch.complex64"),
        ([X[:8, :3], X[8:16, :3]], {}, r"inputs of shape \(8, 3\) of float32, and RuntimeError: mat1 and mat2"),
        ([X[:8].double(), X[8:16].double()], {}, r"\(8, 4\) of float64.*convert the inputs to float32, the dtype"),
        ([((X[:8], X[:8]), X[:8])] * 2, {}, "takes fewer inputs, say which, as in inputs=lambda"),
        ([{"x": X[:8]}] * 2, {"inputs": lambda batch: batch}, r"let forward\(\) take these inputs by name"),
        ([X[:8].to(torch.uint8)] * 2, {}, "of uint8.*check shape and dtype"),
        ([X[:8], X[8:16]], {"num_samples": 0}, "num_samples as a whole number of at least 1"),
        ([X[:8], X[8:16]], {"center": "middle"}, "center="),
        ([X[:8], X[8:16]], {"sites": "layer9.*"}, "choose among 1, 5"),
        ([X[:8], X[8:16]], {"sites": 0}, "choose among 1, 5"),
        ([X[:8], X[8:16]], {"output": "logits"}, "a single Tensor|drop output="),
    ],
)
def test_each_has_its_message(network, batches, options, message):
    with left_alone(network), pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(bb.mcbn(network, batches, **options), X, bb.categorical())


def test_another_default_device_is_named(network):
    """A stand-in for torch.set_default_device("cuda"), under which torch itself would fail in many places."""
    posterior = bb.deterministic(network)
    for call in (lambda: bb.mcbn(network, X, batch_size=8), lambda: bb.predict(posterior, X, bb.categorical())):
        with torch.device("meta"), pytest.raises(bb.BatchbayesError, match=r"CPU as the default device.*got meta"):
            call()


@pytest.mark.parametrize(
    ("layer", "found"),
    [(nn.LayerNorm(4), ", but 1 LayerNorm"), (nn.Identity(), ", but 1 Identity"), (nn.ReLU(), "")],
)
def test_no_batch_norm(layer, found):
    message = rf"got Sequential with none among its 3 modules{found}. Do this.*layer norm.*fused"
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.mcbn(nn.Sequential(nn.Linear(4, 4), layer), X, batch_size=8)


def test_a_batch_norm_without_epsilon():
    with pytest.raises(bb.BatchbayesError, match="eps above zero; got eps=0 in 0"):
        bb.mcbn(nn.Sequential(nn.BatchNorm1d(4, eps=0)), X, batch_size=8)


class PythonNorm(nn.BatchNorm1d):
    def forward(self, x):
        return (x - self.running_mean) / (self.running_var + self.eps).sqrt()


def test_a_batch_norm_in_python_that_reads_its_running_statistics():
    with pytest.raises(bb.BatchbayesError, match=r"reads running_mean in Python.*sites="):
        bb.mcbn(nn.Sequential(PythonNorm(4)), X, batch_size=8)


def test_wrong_inputs_at_prediction(network):
    posterior = bb.mcbn(network, X, batch_size=8)
    for bad in (X[:, :3], X.double(), X.long(), X[None]):
        with left_alone(network), pytest.raises(bb.BatchbayesError, match="inputs that Sequential runs on"):
            bb.predict(posterior, bad, bb.categorical())


def test_one_image_without_an_axis_of_examples():
    network = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3)).eval()
    images = torch.randn(40, 1, 4, 4)
    posterior = bb.mcbn(network, images, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match=r"inputs\[None\] for one example"):
        bb.predict(posterior, images[0], bb.categorical())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 2.0}, "num_samples as a whole number"),
        ({"num_samples": True}, "num_samples as a whole number"),
        ({"chunk_size": 0}, "chunk_size as a whole number of at least 1"),
        ({"chunk_size": 2.5}, "chunk_size as a whole number"),
        ({"seed": "a"}, "seed as a whole number"),
    ],
)
def test_options_of_the_wrong_type(network, options, message):
    posterior = bb.mcbn(network, X, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(posterior, X, bb.categorical(), **options)


def test_a_network_is_no_posterior(network):
    with pytest.raises(bb.BatchbayesError, match=r"a posterior.*got a Sequential. Do this: fit first.*deterministic"):
        bb.predict(network, X, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="got a Tensor"):
        bb.predict(X, network, bb.categorical())


def test_a_likelihood_that_is_none(network):
    posterior = bb.mcbn(network, X, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match=r"call it, as in bb.categorical\(\)"):
        bb.predict(posterior, X, bb.categorical)
    for bad in (bb.categorical(), [], None):
        with pytest.raises(bb.BatchbayesError, match="a list of likelihoods"):
            next(bb.predict_stream(posterior, X, bad))


def test_integer_outputs():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x).round().long()

    with pytest.raises(bb.BatchbayesError, match=r"real numbers as outputs of the network; got torch.int64"):
        bb.predict(bb.deterministic(Counting()), X, bb.categorical())


def test_nan_in_the_weights(network):
    with pytest.raises(bb.BatchbayesError, match=r"the weights \(4.weight\)"):
        bb.mcbn(with_nan(network), X, batch_size=8)


def test_nan_in_the_weights_after_fitting(network):
    posterior = bb.mcbn(network, X, batch_size=8)
    with_nan(network)
    changed = pytest.warns(bb.BatchbayesWarning, match="have changed since the fit")
    with changed, pytest.raises(bb.BatchbayesError, match="the network's output in draw 0"):
        bb.predict(posterior, X, bb.categorical())


def test_nan_in_the_test_inputs(network):
    posterior = bb.mcbn(network, X, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match="finite numbers in the inputs"):
        bb.predict(posterior, X / 0, bb.categorical())


def test_not_a_network():
    with pytest.raises(bb.BatchbayesError, match=r"expected a torch.nn.Module; got function"):
        bb.mcbn(lambda x: x, X, batch_size=8)  # type: ignore[arg-type]


def test_no_running_statistics():
    network = NETWORKS["track_running_stats=False"].network()
    with pytest.raises(bb.BatchbayesError, match='center="batches"'):
        bb.mcbn(network, X, batch_size=8, center="running")
    with pytest.raises(bb.BatchbayesError, match="use population"):
        bb.deterministic(network)
    with pytest.raises(bb.BatchbayesError, match="outside sites="):
        bb.mcbn(network, X, batch_size=8, sites=1)


def test_population_from_a_generator(network):
    with pytest.raises(bb.BatchbayesError, match="read several times; got a generator"):
        bb.population(network, iter([X]))


def test_outputs_that_differ_between_draws(network):
    calls = count()  # outside the network, whose attributes are put back after each call

    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(x)[:, : 2 + next(calls) % 2]

    with pytest.warns(bb.BatchbayesWarning, match="have never been trained"):
        posterior = bb.mcbn(Changing(), X, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match="gives the same answer twice"):
        bb.predict(posterior, X, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match=r"from every draw; got \(64, [23]\) from draw 1"):
        list(sampled_blocks(posterior, [X], 4, 0))


def test_outputs_with_another_number_of_rows():
    network = nn.Sequential(nn.BatchNorm1d(4), nn.Flatten(0))
    with pytest.raises(bb.BatchbayesError, match="one row for each example"):
        bb.mcbn(network, X, batch_size=8)


class Several(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.norm, self.kind = nn.BatchNorm1d(4), kind

    def forward(self, x):
        y = self.norm(x)
        return {"tuple": (y, y[:, :2]), "dict": {"logits": y, "features": x}, "list of none": [None, y]}[self.kind]


@pytest.mark.parametrize(("kind", "output"), [("tuple", 1), ("dict", "logits"), ("list of none", 1), ("tuple", -1)])
def test_outputs_are_picked_by_name(kind, output):
    posterior = bb.mcbn(Several(kind), X, batch_size=8, output=output)
    assert bb.predict(posterior, X, bb.categorical()).probs.shape[0] == 64


@pytest.mark.parametrize(
    ("kind", "output", "message"),
    [
        ("tuple", None, r"got a tuple of 2 \(Tensor, Tensor\).*name the output"),
        ("dict", None, r"keys \['features', 'logits'\].*name the output"),
        ("dict", "probs", r"named 'probs'; got a dict with keys"),
        ("tuple", 5, "named 5"),
        ("list of none", 0, "a tensor as output 0; got a single NoneType"),
    ],
)
def test_outputs_that_cannot_be_picked(kind, output, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.mcbn(Several(kind), X, batch_size=8, output=output)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupted_fit_leaves_the_network_as_it_was(network, error):
    def batches():
        yield X[:8]
        yield X[8:16]
        raise error

    network.train()
    with left_alone(network), pytest.raises(error):
        bb.mcbn(network, batches())


@pytest.mark.parametrize("fit", [bb.mcbn, bb.population])
def test_an_interrupt_inside_the_forward_pass_leaves_the_network_as_it_was(fit):
    class Interrupted(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.calls = nn.BatchNorm1d(4), []

        def forward(self, x):
            y = self.norm(x) if len(self.calls) % 2 else self.norm(x) + 0
            self.calls.append(0)
            if len(self.calls) > 3:
                raise KeyboardInterrupt
            return y

    network = Interrupted()
    network.calls += [0] * 3
    with left_alone(network), pytest.raises(KeyboardInterrupt):
        fit(network, [X[:8], X[8:16]])


def test_predicting_nothing(network):
    posterior = bb.mcbn(network, X, batch_size=8)
    with pytest.raises(bb.BatchbayesError, match="at least one example"):
        bb.predict(posterior, [], bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="num_samples as a whole number of at least 1"):
        bb.predict(posterior, X, bb.categorical(), num_samples=0)
    with pytest.raises(bb.BatchbayesError, match="engine="):
        bb.predict(posterior, X, bb.categorical(), engine="quantum")  # type: ignore[arg-type]


@given(
    numbers=st.lists(st.floats(width=32), max_size=6),
    dtype=st.sampled_from([torch.float16, torch.float32, torch.float64]),
)
def test_only_numbers_that_are_not_finite_are_refused(numbers, dtype):
    """Finite numbers pass also where their sum overflows."""
    values = torch.tensor(numbers, dtype=torch.float64).to(dtype)
    if values.isfinite().all():
        assert require_finite(values, "the inputs") is values
    else:
        with pytest.raises(bb.BatchbayesError, match="NaN or infinite"):
            require_finite(values, "the inputs")


def test_weights_without_numbers(network):
    with pytest.raises(bb.BatchbayesError, match="weights on the device meta, which have shapes alone"):
        bb.mcbn(network.to("meta"), X, batch_size=8)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_layers_of_a_scripted_network_cannot_be_seen(network):
    with pytest.raises(bb.BatchbayesError, match="pass the network in Python that was scripted"):
        bb.mcbn(torch.jit.script(network), X, batch_size=8)


@pytest.mark.parametrize("affine", [True, False])
def test_lazy_modules(affine):
    network = nn.Sequential(nn.Linear(4, 3), nn.LazyBatchNorm1d(affine=affine))
    with pytest.raises(bb.BatchbayesError, match="lazy modules that have never run: LazyBatchNorm1d"):
        bb.mcbn(network, X, batch_size=8)


def test_a_network_of_two_inputs_says_how_to_name_them():
    class Sum(nn.BatchNorm1d):
        def forward(self, first, second):
            return super().forward(first + second)

    with pytest.raises(bb.BatchbayesError, match=r"missing 1 required positional.*as in inputs=\(0, 1\)"):
        bb.predict(bb.deterministic(Sum(4)), [(X, X, X)], bb.categorical())


def test_classes_that_are_masked():
    mask = torch.tensor([0.0, 0.0, 0.0, -torch.inf])

    class Masked(nn.Module):
        def forward(self, inputs):
            return inputs + mask

    with pytest.raises(bb.BatchbayesError, match="put a number such as -1e9 where it masks by -inf"):
        bb.predict(bb.deterministic(Masked()), X, bb.categorical())
