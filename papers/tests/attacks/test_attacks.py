"""Attacks against gradients by hand."""

import pytest
import torch
from batchbayes_papers.attacks import experiment
from batchbayes_papers.attacks.attacks import attack_steps, fast_gradient_sign, input_gradient, projected_gradient
from helpers.cases import CASES, moved
from helpers.references import left_alone
from torch import nn

import batchbayes as bb

CASE = CASES["BatchNorm2d"]


@pytest.fixture
def x():
    return CASE.batches(1, size=6, seed=5)[0]


LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("kind", ["deterministic", "ensemble", "mcbn", "views"])
def test_the_gradient_is_that_of_the_mean_prediction(kind, x):
    network, batches = CASE.network(), CASE.batches(6)
    posterior = {
        "deterministic": lambda: bb.deterministic(network),
        "ensemble": lambda: bb.weight_samples(network, moved(network, 4)),
        "mcbn": lambda: bb.mcbn(network, batches),
        "views": lambda: bb.with_views(bb.mcbn(network, batches), bb.RandomFlip()),
    }[kind]()
    count = 1 if kind == "deterministic" else 4
    leaf = x.clone().requires_grad_()
    mean = torch.stack([posterior.draw(3, index)(leaf).softmax(-1) for index in range(count)]).mean(0)
    expected = torch.autograd.grad(-mean.gather(1, LABELS[:, None]).log().sum(), leaf)[0]
    with left_alone(network):
        found = input_gradient(posterior, x, LABELS, bb.categorical(), num_samples=4, seed=3)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_draws():
    class Seen(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            self.largest = max(self.largest, found.numel() if isinstance(found, torch.Tensor) else 0)
            return found

    network, x = nn.Linear(50, 3), torch.randn(40, 50)
    with Seen() as seen:
        input_gradient(
            bb.weight_samples(network, moved(network, 8)), x, torch.zeros(40).long(), bb.categorical(), num_samples=8
        )
    assert seen.largest == x.numel()


def test_inputs_and_labels_that_cannot_be_attacked_are_refused(x):
    posterior, options = bb.deterministic(CASE.network()), {"likelihood": bb.categorical(), "epsilon": 0.1}
    arrays = fast_gradient_sign(posterior, x.numpy(), LABELS.tolist(), **options)
    assert torch.equal(arrays, fast_gradient_sign(posterior, x, LABELS, **options))
    with pytest.raises(bb.BatchbayesError, match="real inputs"):
        fast_gradient_sign(posterior, x.to(torch.uint8), LABELS, **options)
    with pytest.raises(bb.BatchbayesError, match="labels from 0 to 2; got -5 to -3"):
        fast_gradient_sign(posterior, x, LABELS - 5, **options)
    with pytest.raises(bb.BatchbayesError, match="epsilon above 0"):
        projected_gradient(posterior, x, LABELS, bb.categorical(), epsilon="0.1")
    with pytest.raises(bb.BatchbayesError, match="one label for each input"):
        fast_gradient_sign(bb.deterministic(nn.Conv2d(2, 3, 1)), x, LABELS[:, None, None].expand(6, 8, 8), **options)


def test_steps_stay_within_epsilon_and_bounds_and_lower_the_probability(x):
    posterior = bb.mcbn(CASE.network(), CASE.batches(6))
    options = {"epsilon": 0.2, "bounds": (-1.0, 1.0)}
    inside = x.clamp(-1, 1)

    def probability(inputs):
        return bb.predict(posterior, inputs, bb.categorical(), num_samples=6).log_prob(LABELS).mean()

    single = fast_gradient_sign(posterior, inside, LABELS, bb.categorical(), **options)
    several = projected_gradient(posterior, inside, LABELS, bb.categorical(), steps=5, **options)
    for attacked in (single, several):
        assert (attacked - inside).abs().max() <= 0.2 + 1e-6
        assert attacked.abs().max() <= 1
        assert probability(attacked) < probability(inside)
    assert probability(several) < probability(single) + 0.05


def test_one_step_is_the_sign_of_the_gradient_and_steps_go_on():
    network = nn.Linear(3, 2)
    x, labels = torch.zeros(2, 3), torch.tensor([0, 1])
    direction = (network.weight[1] - network.weight[0]).sign()
    found = fast_gradient_sign(bb.deterministic(network), x, labels, bb.categorical(), epsilon=0.5)
    torch.testing.assert_close(found, 0.5 * torch.stack([direction, -direction]))
    path = attack_steps(bb.deterministic(network), x, labels, bb.categorical(), epsilon=0.5, step=0.2)
    assert [round(float(next(path).abs().max()), 4) for _ in range(4)] == [0.2, 0.4, 0.5, 0.5]
    options = {"epsilon": 9.0, "step": 0.2, "along": "gradient"}
    moved = next(attack_steps(bb.deterministic(network), x, labels, bb.categorical(), **options))
    other = network.bias.softmax(0)[1 - labels, None]  # the gradient of -log p is that of the weights times 1 - p
    torch.testing.assert_close(moved, 0.2 * other * (network.weight[1 - labels] - network.weight[labels]))
    with pytest.raises(bb.BatchbayesError, match="sign, gradient; got 'l2'"):
        next(attack_steps(bb.deterministic(network), x, labels, bb.categorical(), **options | {"along": "l2"}))


BAD = {
    "epsilon": ({"epsilon": 0.0}, "epsilon above 0"),
    "inputs beyond the bounds": ({"epsilon": 0.1, "bounds": (0.0, 0.01)}, r"inputs within the bounds \(0.0, 0.01\)"),
    "bounds": ({"epsilon": 0.1, "bounds": (1.0, 0.0)}, "low below high"),
}


@pytest.mark.parametrize(("options", "words"), BAD.values(), ids=BAD)
def test_bad_options_are_refused(options, words, x):
    with pytest.raises(bb.BatchbayesError, match=words):
        fast_gradient_sign(bb.deterministic(CASE.network()), x, LABELS, bb.categorical(), **options)


def test_bad_labels_steps_and_networks_are_refused(x):
    posterior = bb.deterministic(CASE.network())
    with pytest.raises(bb.BatchbayesError, match="labels"):
        fast_gradient_sign(posterior, x, LABELS[:3], bb.categorical(), epsilon=0.1)
    with pytest.raises(bb.BatchbayesError, match=r"use bb\.deterministic"):
        fast_gradient_sign(CASE.network(), x, LABELS, bb.categorical(), epsilon=0.1)
    with pytest.raises(bb.BatchbayesError, match="steps as a whole number"):
        projected_gradient(posterior, x, LABELS, bb.categorical(), epsilon=0.1, steps=0)
    with pytest.raises(bb.BatchbayesError, match="steps as a whole number"):
        projected_gradient(posterior, x, LABELS, bb.categorical(), epsilon=0.1, steps=0, step=0.05)
    with pytest.raises(bb.BatchbayesError, match="num_samples as a whole number"):
        fast_gradient_sign(posterior, x, LABELS, bb.categorical(), epsilon=0.1, num_samples=0)

    class Closed(nn.Linear):
        def forward(self, inputs):
            return super().forward(inputs).detach()

    with pytest.raises(bb.BatchbayesError, match="pass gradients to their inputs"):
        fast_gradient_sign(
            bb.deterministic(Closed(3, 2)), torch.zeros(1, 3), torch.tensor([1]), bb.categorical(), epsilon=0.1
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_gradients_are_taken_whatever_the_caller_has_set(mode, x):
    posterior = bb.deterministic(CASE.network())
    expected = input_gradient(posterior, x, LABELS, bb.categorical())
    with mode():
        assert torch.equal(input_gradient(posterior, x.clone(), LABELS.clone(), bb.categorical()), expected)


def test_a_share_of_no_attacked_image_is_an_empty_cell():
    config = experiment.PRESETS["smoke"]
    scores = {"accuracy": 0.0, "detection_by_entropy": 0.5, "detection_by_information": 0.5}
    along = {"success": [float("nan")] * len(config.updates), **scores}
    unit = experiment.units(config)[0]
    results = {unit.name: dict.fromkeys(experiment.UPDATES, along)}
    for table in experiment.tables(config, results):
        assert table.rows[0][1 : 1 + len(config.updates)] == ("",) * len(config.updates)
