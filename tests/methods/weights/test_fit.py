"""Training by the ELBO: the objective, its schedule, interruptions, and data that is refused."""

import pytest
import torch
import torch.nn.functional as F
from helpers.noisy_cases import data, network
from torch import nn

import batchbayes as bb
from batchbayes.training.batches import shuffled
from batchbayes.training.loop import TrainingConfig


@pytest.mark.parametrize(("schedule", "expected"), [((2, 0), [0, 0, 1, 1, 1]), ((2, 4), [0, 0, 0, 0.5, 1])])
def test_the_kl_has_no_weight_before_its_first_epoch(schedule, expected):
    assert [bb.Schedule(*schedule).kl_weight(epoch) for epoch in range(5)] == expected


class KilledError(Exception):
    """Stands for the end of a process."""


def test_an_interrupted_training_continues_with_the_same_bits(tmp_path):
    def fit(**options):
        random, schedule = bb.noisy(network(), bb.SparseVD()), bb.Schedule(1, 3, decay_from=2)
        options = {"num_examples": 48, "schedule": schedule, **options}
        return bb.fit_noisy(random, data(), bb.categorical(), TrainingConfig(4, 4, 1e-2), **options), random

    def kill(step):
        if step.number == 30:
            raise KilledError

    path = tmp_path / "training.safetensors"
    losses, whole = fit()
    with pytest.raises(KilledError):
        fit(checkpoint=path, after_step=kill)
    again, continued = fit(checkpoint=path)
    assert again == losses
    assert all(torch.equal(continued.state_dict()[name], tensor) for name, tensor in whole.state_dict().items())


def test_the_objective_is_the_negative_elbo():
    from batchbayes.methods.weights.variational import negative_elbo

    random = bb.noisy(network(), bb.MeanField(initial_std=1e-6)).eval()
    (x, y), own = data()[0], network().eval()
    random.module.eval()
    random.kl_weight.fill_(0.5)
    expected = 0.5 * random.divergence() + 100 / 4 * F.cross_entropy(own(x), y, reduction="sum")
    torch.testing.assert_close(negative_elbo(bb.categorical(), 100)(random, (x, y)), expected)


def test_a_diverging_training_says_what_to_do():
    random = bb.noisy(network(), bb.MeanField())
    with pytest.raises(bb.BatchbayesError, match=r"the training has diverged.*lower the learning rate"):
        bb.fit_noisy(random, data(), bb.categorical(), TrainingConfig(50, 4, 1e30), num_examples=48)


WRONG_LABELS = {
    "too large": (torch.tensor([0, 1, 2, 0]), "labels from 0 to 1.*got 0 to 2"),
    "below zero": (torch.tensor([0, 1, -1, 0]), "labels from 0 to 1.*got -1 to 1"),
    "what torch ignores": (torch.tensor([0, 1, -100, 0]), "labels from 0 to 1.*got -100 to 1"),
    "NaN as a number": (torch.tensor([0, 1, -(2**63), 0]), "labels from 0 to 1"),
    "real": (torch.tensor([0.0, 1.0, 1.0, 0.0]), "integer labels.*float32"),
    "one-hot": (torch.eye(2, dtype=torch.long)[[0, 1, 1, 0]], r"shape \(4,\).*\(4, 2\)"),
    "too few": (torch.tensor([0, 1, 1]), r"shape \(4,\).*\(3,\)"),
}


@pytest.mark.parametrize("labels", WRONG_LABELS)
@pytest.mark.parametrize("place", [0, 2])
def test_wrong_labels_of_any_batch_are_refused_in_words(labels, place):
    wrong, message = WRONG_LABELS[labels]
    batches = data(3)
    batches[place] = (batches[place][0], wrong)
    with pytest.raises(bb.BatchbayesError, match=f"(?s){message}"):
        bb.variational(network(), batches, epochs=1)


@pytest.mark.parametrize("place", [0, 2])
def test_targets_that_are_nan_are_refused_in_words(place):
    batches = [(x, y.float()) for x, y in data(3)]
    batches[place][1][1] = torch.nan
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 1))
    with pytest.raises(bb.BatchbayesError, match=r"(?s)NaN"):
        bb.variational(model, batches, likelihood=bb.gaussian(1.0), epochs=1)


def test_labels_of_other_kinds_and_temperatures_train_the_same():
    """Whichever way the log-probability is computed, after the first batch."""

    def trained(labels, **options):
        batches = [(x, labels(y)) for x, y in data(4)]
        return bb.variational(network(), batches, likelihood=bb.categorical(**options), epochs=1).means()["4.weight"]

    assert torch.equal(trained(torch.Tensor.int), trained(torch.Tensor.long))
    assert torch.equal(trained(torch.Tensor.bool, temperature=2.0), trained(torch.Tensor.long, temperature=2.0))
    assert torch.equal(trained(torch.Tensor.long, ignore_index=7), trained(torch.Tensor.long))


def test_outputs_that_are_probabilities_are_refused():
    with pytest.raises(bb.BatchbayesError, match="look like probabilities"):
        bb.variational(nn.Sequential(network(), nn.Softmax(1)), data(), epochs=1)


def test_a_pair_of_inputs_and_targets_is_read_in_shuffled_batches():
    (x, y), *_ = data()
    ways = ((x, y), shuffled(x, y, 2, seed=0), [(x, y)])
    pair, batches, whole = (bb.variational(network(), each, epochs=2, batch_size=2).means() for each in ways)
    assert all(torch.equal(pair[name], batches[name]) for name in batches)
    assert not any(torch.equal(pair[name], whole[name]) for name in whole)


def test_the_number_of_examples_must_be_known():
    with pytest.raises(bb.BatchbayesError, match="num_examples="):
        bb.variational(network(), iter(data()))


def test_batches_without_targets_are_refused():
    with pytest.raises(bb.BatchbayesError, match=r"labelled batches \(x, y\)"):
        bb.variational(network(), [data()[0][0]])


def test_a_resumed_training_of_a_segmentation_has_the_same_bits(tmp_path):
    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, 16, 16), torch.randint(0, 21, (4, 16, 16))) for _ in range(3)]

    def fit(**options):
        torch.manual_seed(0)
        random = bb.noisy(nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 21, 1)), bb.MeanField())
        losses = bb.fit_noisy(random, batches, bb.categorical(), TrainingConfig(3, 4), num_examples=12, **options)
        return losses, random.state_dict()

    def kill(step):
        if step.number == 4:
            raise KilledError

    losses, whole = fit()
    with pytest.raises(KilledError):
        fit(checkpoint=tmp_path / "training.safetensors", after_step=kill)
    again, continued = fit(checkpoint=tmp_path / "training.safetensors")
    assert again == losses
    assert all(torch.equal(continued[name], tensor) for name, tensor in whole.items())


@pytest.mark.parametrize("num_examples", [0, -48, 2.5, "48", float("nan")])
def test_a_wrong_number_of_examples_is_refused(num_examples):
    with pytest.raises(bb.BatchbayesError, match="num_examples as a whole number of at least 1"):
        bb.variational(network(), data(), epochs=1, num_examples=num_examples)


def test_empty_batches_and_weight_decay_are_refused():
    (x, y), *_ = data()
    with pytest.raises(bb.BatchbayesError, match="an empty batch"):
        bb.variational(network(), [(x, y), (x[:0], y[:0])], epochs=1)
    config = TrainingConfig(1, 4, weight_decay=1e-4)
    with pytest.raises(bb.BatchbayesError, match="leave weight_decay out"):
        bb.fit_noisy(bb.noisy(network(), bb.MeanField()), data(), bb.categorical(), config, num_examples=48)


@pytest.mark.parametrize(
    "options", [{"temperature": -1}, {"temperature": "1"}, {"kl_from": float("nan")}, {"kl_full": None}]
)
def test_odd_schedules_are_refused(options):
    (name,) = options
    with pytest.raises(bb.BatchbayesError, match=f"got {name}="):
        bb.Schedule(**options)
    assert bb.Schedule(kl_from=float("inf")).kl_weight(100) == 0
