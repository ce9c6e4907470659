"""Online learning against posteriors of all data at once that are known exactly."""

import pytest
import torch
import torch.nn.functional as F
from batchbayes_papers.online import (
    ElasticWeights,
    OnlineLastLayer,
    OnlineMeanField,
    StructuredLaplace,
    gaussian_kl,
    learn_parts,
)
from torch import nn

import batchbayes as bb
from batchbayes.training.loop import TrainingConfig

TAU = 4.0
RANDOM = torch.Generator().manual_seed(0)
X = torch.cat([torch.linalg.qr(torch.randn(12, 3, generator=RANDOM).double())[0] * 12**0.5 for _ in range(5)])
Y = (X @ torch.tensor([1.0, -2.0, 0.5]).double() + 0.5 * torch.randn(60, generator=RANDOM))[:, None]
PARTS = [(X[start : start + 12], Y[start : start + 12]) for start in range(0, 60, 12)]


def test_the_last_layer_of_a_regression_is_exact():
    likelihood = bb.gaussian(precision=TAU)
    state = learn_parts(OnlineLastLayer.start(1, 3, likelihood, prior_precision=2.0), PARTS)
    precision = TAU * X.T @ X + 2 * torch.eye(3)
    torch.testing.assert_close(state.precision, precision)
    torch.testing.assert_close(state.mean[0], torch.linalg.solve(precision, TAU * X.T @ Y)[:, 0])
    mean, covariance = state.outputs(X[:4])
    torch.testing.assert_close(covariance[:, 0, 0], torch.einsum("np,pq,nq->n", X[:4], precision.inverse(), X[:4]))
    exact = torch.distributions.Normal(mean, (covariance[:, 0] + 1 / TAU).sqrt()).log_prob(Y[:4])
    torch.testing.assert_close(state.log_prob(X[:4], Y[:4], 4000), exact, rtol=0.1, atol=0.05)


def test_the_last_layer_of_a_classification_is_the_mode_and_its_curvature():
    labels = (X[:, 0] > X[:, 1]).long() + (X[:, 2] > 1)
    state = OnlineLastLayer.start(3, 3, bb.categorical(), prior_precision=0.5).update((X, labels))

    def loss(weights):
        return F.cross_entropy(X @ weights.view(3, 3).T, labels, reduction="sum") + 0.25 * weights.square().sum()

    flat = state.mean.flatten().requires_grad_()
    assert torch.autograd.grad(loss(flat), flat)[0].abs().max() < 1e-6
    torch.testing.assert_close(
        state.precision, torch.autograd.functional.hessian(loss, flat.detach()), rtol=1e-5, atol=1e-8
    )
    parts = [(X[start::5], labels[start::5]) for start in range(5)]
    online = learn_parts(OnlineLastLayer.start(3, 3, bb.categorical(), prior_precision=0.5), parts)
    joint, found = (s.log_prob(X, labels).mean() for s in (state, online))
    assert abs(found - joint) < 0.05 * abs(joint)


def linear():
    torch.manual_seed(0)
    return nn.Linear(3, 1, bias=False).double()


def test_mean_field_in_parts_is_exact_where_weights_are_independent():
    """The columns are orthogonal in each part, so all posteriors factorise."""
    config = TrainingConfig(epochs=300, batch_size=12, learning_rate=0.05)
    state = OnlineMeanField.start(linear(), bb.gaussian(precision=TAU), prior_std=0.7)
    state = learn_parts(state, PARTS, config)
    precision = TAU * 60 + 1 / 0.7**2
    exact = TAU * X.T @ Y / precision
    assert state.num_parts == 5
    assert (state.mean["weight"][0] - exact[:, 0]).abs().max() < 0.5 * precision**-0.5
    assert ((state.std["weight"] * precision**0.5 - 1).abs() < 0.15).all()


def perceptron(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def test_structured_laplace_of_a_linear_network_is_exact():
    config = TrainingConfig(epochs=200, batch_size=12, learning_rate=0.1)
    state = learn_parts(StructuredLaplace.start(linear(), bb.gaussian(TAU), prior_std=0.5), PARTS, config)
    exact = learn_parts(OnlineLastLayer.start(1, 3, bb.gaussian(TAU), prior_precision=4.0), PARTS)
    torch.testing.assert_close(state.last.precision, exact.precision)
    torch.testing.assert_close(state.last.mean, exact.mean, rtol=1e-4, atol=1e-4)


def test_curvature_of_a_hidden_layer_is_that_of_all_pairs_of_weights():
    """For one example the product of the two factors is exact."""
    config = TrainingConfig(epochs=3, batch_size=1, learning_rate=0.1)
    state = StructuredLaplace.start(perceptron(3), bb.categorical()).update((X[:1], torch.tensor([2])), config)
    rest = F.pad(X[:1], (0, 1), value=1.0)

    def outputs(weights):
        hidden = F.pad((rest @ weights.view(4, 4).T).tanh(), (0, 1), value=1.0)
        return (hidden @ last.T)[0]

    last, weights = state._present()["2"], state.hidden["0"].flatten()
    jacobian, probs = torch.func.jacrev(outputs)(weights), outputs(weights).softmax(0)
    found = torch.kron(state.of_outputs["0"], state.of_inputs["0"])
    torch.testing.assert_close(found, jacobian.T @ (probs.diag() - probs.outer(probs)) @ jacobian)


def test_structured_laplace_stays_near_the_former_parts_by_their_curvature():
    config = TrainingConfig(epochs=40, batch_size=12, learning_rate=0.03)
    state = learn_parts(StructuredLaplace.start(perceptron(), bb.gaussian(TAU), prior_std=0.5), PARTS[:2], config)
    away = {
        name: tensor + 0.1 * torch.randn(tensor.shape, generator=RANDOM) for name, tensor in state._present().items()
    }
    hidden, last = (away[name] - state._present()[name] for name in ("0", "2"))
    precision = torch.kron(state.of_outputs["0"], state.of_inputs["0"]) / 24 + 4 * torch.eye(16)
    expected = hidden.flatten() @ precision @ hidden.flatten() + last.flatten() @ state.last.precision @ last.flatten()
    torch.testing.assert_close(state._squared_distance(away), expected)
    assert state.num_examples == 24


def test_elastic_weights_in_parts_are_exact_where_weights_are_independent():
    config = TrainingConfig(epochs=200, batch_size=12, learning_rate=0.1)
    state = learn_parts(ElasticWeights.start(linear(), bb.gaussian(TAU), prior_std=0.5), PARTS, config)
    precision = TAU * X.T @ X + 4 * torch.eye(3)
    torch.testing.assert_close(state.precision["weight"][0], precision.diagonal())
    exact = torch.linalg.solve(precision, TAU * X.T @ Y)[:, 0]
    torch.testing.assert_close(state.mean["weight"][0], exact, rtol=1e-4, atol=1e-4)
    normal = torch.distributions.Normal(X[:4] @ exact[:, None], TAU**-0.5)
    torch.testing.assert_close(state.log_prob(X[:4], Y[:4]), normal.log_prob(Y[:4]), rtol=1e-3, atol=1e-3)


def test_springs_have_the_diagonal_of_the_fisher_matrix():
    config = TrainingConfig(epochs=2, batch_size=4, learning_rate=0.1)
    network, labels = perceptron(3), torch.tensor([2, 0, 1, 1])
    state = ElasticWeights.start(network, bb.categorical(), prior_std=0.5).update((X[:4], labels), config)
    network.load_state_dict(state.mean)
    for name, parameter in network.named_parameters():
        expected = torch.full_like(parameter, 4.0)
        for one in X[:4]:
            probs = network(one).softmax(0).detach()
            for label in range(3):  # the expected square of the gradient over labels that the network draws
                loss = F.cross_entropy(network(one), torch.tensor(label))
                expected = expected + probs[label] * torch.autograd.grad(loss, parameter)[0].square()
        torch.testing.assert_close(state.precision[name], expected.detach())


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.output = nn.Linear(3, 3), nn.Linear(3, 1)

    def forward(self, inputs):
        return self.output(self.layer(self.layer(inputs)))


@pytest.mark.parametrize(
    ("build", "words"),
    [(lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)), "linear layers, each in one layer"),
     (lambda: shared_weights(), "each in one layer"), (Twice, "runs once"),
     (lambda: nn.Sequential(nn.Linear(3, 1), nn.ReLU()), "the last one")],
)  # fmt: skip
def test_networks_that_structured_laplace_does_not_fit_are_refused(build, words):
    config = TrainingConfig(epochs=1, batch_size=12)
    with pytest.raises(bb.BatchbayesError, match=words):
        StructuredLaplace.start(build(), bb.gaussian(TAU)).update((X.float(), Y.float()), config)


def test_divergence_and_draws_are_those_of_torch():
    mean, std, mean0, std0 = ({"w": torch.rand(4, 3) + 0.1, "b": torch.rand(2) + 0.1} for _ in range(4))
    expected = sum(
        torch.distributions.kl_divergence(
            torch.distributions.Normal(mean[n], std[n]), torch.distributions.Normal(mean0[n], std0[n])
        ).sum()
        for n in mean
    )
    torch.testing.assert_close(gaussian_kl(mean, std, mean0, std0), expected)
    state = OnlineMeanField.start(linear(), bb.gaussian(precision=TAU))
    drawn = state.posterior(2000).weights["weight"]
    assert ((drawn.mean(0) - state.mean["weight"]).abs() < 5 * 0.03 / 2000**0.5).all()
    assert ((drawn.std(0) / 0.03 - 1).abs() < 0.1).all()


@pytest.mark.parametrize("kind", ["mean field", "last layer", "structured Laplace"])
def test_a_killed_run_goes_on_with_the_same_numbers(kind, tmp_path):
    likelihood, path = bb.gaussian(precision=TAU), tmp_path / "state.safetensors"
    config = () if kind == "last layer" else (TrainingConfig(epochs=2, batch_size=12, learning_rate=0.02),)

    def start():
        if kind == "structured Laplace":
            return StructuredLaplace.start(perceptron(), likelihood)
        return OnlineMeanField.start(linear(), likelihood) if config else OnlineLastLayer.start(1, 3, likelihood)

    def tensors(state):
        return state._tensors() if kind == "structured Laplace" else {"mean": state.mean}

    def parts(most):
        for number, part in enumerate(PARTS):
            if number == most:
                raise KeyboardInterrupt
            yield part

    whole = learn_parts(start(), PARTS, *config)
    with pytest.raises(KeyboardInterrupt):
        learn_parts(start(), parts(3), *config, checkpoint=path)
    assert start().restored(path).num_parts == 3
    again = learn_parts(start(), PARTS, *config, checkpoint=path)
    torch.testing.assert_close(tensors(again), tensors(whole), rtol=0, atol=0)
    if kind == "mean field":
        assert torch.equal(again.std["weight"], whole.std["weight"])
    assert again.num_parts == 5
    with pytest.raises(bb.BatchbayesError, match=r"the 5 parts that .* and perhaps more; got 2 parts for a state"):
        learn_parts(start(), PARTS[:2], *config, checkpoint=path)
    half = learn_parts(learn_parts(start(), PARTS[:3], *config), PARTS[3:], *config)
    assert half.num_parts == 5
    torch.testing.assert_close(tensors(half), tensors(whole))


def test_a_part_that_diverges_is_refused():
    state = OnlineMeanField.start(nn.Linear(3, 1), bb.gaussian(precision=TAU))
    with pytest.raises(bb.BatchbayesError, match="a finite loss and finite weights; got NaN or infinity in part 1"):
        state.update((X.float(), 1e25 * Y.float()), TrainingConfig(epochs=1, batch_size=8))


@pytest.mark.parametrize(
    ("features", "words"),
    [(X[:, :2], r"features of shape \(N, 3\)"), (X / 0, "training inputs"), (1e200 * X, "finite weights"),
     (X[:0], "at least one")],
)  # fmt: skip
def test_bad_features_are_refused(features, words):
    state = OnlineLastLayer.start(1, 3, bb.gaussian(precision=TAU))
    with pytest.raises(bb.BatchbayesError, match=words):
        state.update((features, Y[: len(features)]))
    with pytest.raises(bb.BatchbayesError, match="num_samples as a whole number"):
        state.log_prob(X[:4], Y[:4], num_samples=0)
    with pytest.raises(bb.BatchbayesError, match="features"):
        state.outputs(X / 0)


def test_a_class_that_comes_late_is_learnt_and_the_others_are_kept():
    centres = 3 * torch.eye(3, dtype=torch.float64)
    labels = torch.arange(90) // 30
    x = centres[labels] + 0.5 * torch.randn(90, 3, dtype=torch.float64, generator=RANDOM)
    parts = [(x[:60], labels[:60]), (x[60:], labels[60:])]  # the last class is in no other part
    last = learn_parts(OnlineLastLayer.start(3, 3, bb.categorical()), parts)
    assert (last.outputs(x)[0].argmax(-1) == labels).double().mean() > 0.95
    field = OnlineMeanField.start(nn.Linear(3, 3).double(), bb.categorical())
    field = learn_parts(field, parts, TrainingConfig(epochs=60, batch_size=10, learning_rate=0.05))
    found = bb.predict(field.posterior(20), x, bb.categorical(), num_samples=20)
    assert (found.probs.argmax(-1) == labels).double().mean() > 0.95
    laplace = StructuredLaplace.start(perceptron(3), bb.categorical())
    laplace = learn_parts(laplace, parts, TrainingConfig(epochs=60, batch_size=10, learning_rate=0.05))
    assert (laplace.outputs(x)[0].argmax(-1) == labels).double().mean() > 0.95


def test_bad_parts_and_files_are_refused(tmp_path):
    config = TrainingConfig(epochs=1, batch_size=12)
    classes = OnlineMeanField.start(nn.Linear(3, 2).double(), bb.categorical())
    unseen = torch.full((60,), 2)
    with pytest.raises(bb.BatchbayesError, match="0 to 1"):
        classes.update((X, unseen), config)
    with pytest.raises(bb.BatchbayesError, match=r"labels of a part|0 to 1"):
        OnlineLastLayer.start(2, 3, bb.categorical()).update((X, unseen))
    with pytest.raises(bb.BatchbayesError, match="no weight decay"):
        classes.update((X, unseen), TrainingConfig(epochs=1, batch_size=12, weight_decay=0.1))
    with pytest.raises(bb.BatchbayesError, match="as many targets as inputs"):
        classes.update((X, unseen[:3]), config)
    with pytest.raises(bb.BatchbayesError, match="prior_std above 0"):
        OnlineMeanField.start(linear(), bb.gaussian(precision=1.0), prior_std=0.0)
    with pytest.raises(bb.BatchbayesError, match="finite weights"):
        OnlineMeanField.start(linear(), bb.gaussian(precision=TAU)).update(
            (X, 1e150 * Y), TrainingConfig(epochs=30, batch_size=12, learning_rate=1e150)
        )
    with pytest.raises(bb.BatchbayesError, match="no parameter needs a gradient"):
        OnlineMeanField.start(nn.Linear(3, 2).requires_grad_(False), bb.categorical())
    path = tmp_path / "state.safetensors"
    classes.save(path)
    with pytest.raises(bb.BatchbayesError, match="other names or shapes"):
        OnlineMeanField.start(linear(), bb.gaussian(precision=1.0)).restored(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(bb.BatchbayesError, match="a state of online learning"):
        classes.restored(path)


def shared_weights():
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.Tanh(), second)


@pytest.mark.parametrize(
    "build", [shared_weights, lambda: nn.Sequential(torch.compile(nn.Linear(3, 3), backend="eager"))]
)
def test_layers_that_share_a_parameter_or_are_compiled(build):
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
    config = TrainingConfig(epochs=1, batch_size=8, learning_rate=0.1)
    state = OnlineMeanField.start(build(), bb.gaussian(1.0)).update((x, x), config)
    samples = state.posterior(num_members=2)
    assert all(
        torch.equal(tensor[0], samples.weights["0.weight"][0]) for tensor in samples.weights.values() if tensor.ndim > 2
    )
    assert not torch.equal(samples.weights["0.weight"][0], samples.weights["0.weight"][1])


def test_bad_sizes_arrays_and_singular_layers_are_refused_in_words():
    with pytest.raises(bb.BatchbayesError, match="num_outputs as a whole number"):
        OnlineLastLayer.start("3", 4, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="as two tensors; got a ndarray"):
        OnlineLastLayer.start(1, 3, bb.gaussian(1.0)).update((X.numpy(), X[:, :1]))
    far = 1e3 * torch.tensor([[1.0, 1.0], [-1.0, 1.0]]).repeat(5, 1)
    with pytest.raises(bb.BatchbayesError, match="raise prior_precision"):
        OnlineLastLayer.start(2, 2, bb.categorical(), 1e-12).update((far, torch.tensor([0, 1]).repeat(5)))
