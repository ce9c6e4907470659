"""Likelihoods: yes or no, ignored labels, outputs that are probabilities already, and what is refused."""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers.settled import settled
from torch import nn

import batchbayes as bb
from batchbayes import metrics
from batchbayes.likelihoods import require_likelihood
from batchbayes.predictive import summarised


def made(draws, likelihood):
    summary = likelihood.summary()
    summary.add(draws)
    return summary.finish(draws)


# Yes or no


@pytest.mark.parametrize("shape", [(6,), (6, 1), (6, 3), (6, 1, 2, 4), (6, 2, 2, 4)])
def test_yes_or_no_equals_a_naive_loop(shape):
    logits = 3 * torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = made(logits, bb.bernoulli(temperature=2.0))
    p = (logits / 2).sigmoid()
    mean = p.mean(0)

    def entropy(p):
        return -(p * p.log() + (1 - p) * (1 - p).log())

    targets = torch.arange(math.prod(shape)).view(shape) % 2
    torch.testing.assert_close(seen.probs, mean)
    torch.testing.assert_close(seen.entropy, entropy(mean))
    torch.testing.assert_close(seen.expected_entropy, entropy(p).mean(0))
    torch.testing.assert_close(seen.epistemic_variance, p.var(0, correction=0))
    expected = torch.where(targets == 1, mean, 1 - mean).log()
    for given in (targets, targets.bool(), targets.float(), targets.to(torch.uint8), targets.numpy()):
        torch.testing.assert_close(seen.log_prob(given), expected)
    if len(shape) > 1 and shape[1] == 1:
        torch.testing.assert_close(seen.log_prob(targets[:, 0]), expected[:, 0])


def test_certain_answers_have_finite_log_probabilities():
    seen = made(torch.tensor([[[600.0], [-600.0]]]), bb.bernoulli())
    assert seen.log_prob(torch.tensor([0.0, 1.0])).tolist() == [-600.0, -600.0]


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (torch.tensor([0, 2]), "targets of 0 and 1; got 1 others"),
        (torch.tensor([0.0, 0.5]), "targets of 0 and 1"),
        (torch.tensor([0.0, math.nan]), "NaN"),
        (torch.zeros(1, 2), r"targets of shape \(2, 1\)"),
        (torch.zeros(3), r"targets of shape \(2, 1\)"),
    ],
)
def test_targets_that_are_neither_yes_nor_no(targets, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        made(torch.randn(2, 2, 1), bb.bernoulli()).log_prob(targets)


def test_yes_or_no_through_predict_and_tuning():
    torch.manual_seed(0)
    x = torch.randn(64, 4)
    network = settled(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), x)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=8)
    exact = bb.predict(posterior, x, bb.bernoulli(), num_samples=8)
    with torch.no_grad():
        draws = torch.stack([posterior.draw(0, s)(x) for s in range(8)])
    torch.testing.assert_close(exact.probs, draws.sigmoid().mean(0))
    chunked = bb.predict(posterior, x, bb.bernoulli(), num_samples=8, chunk_size=5)
    torch.testing.assert_close(chunked.mutual_information, exact.mutual_information, atol=1e-6, rtol=1e-4)
    tuned = bb.tune_batch_size(posterior, [(x, (x[:, 0] > 0).float())], bb.bernoulli(), num_samples=8)
    assert math.isfinite(tuned.value)


# One column, the wrong axis


@pytest.mark.parametrize("shape", [(2, 5, 1), (2, 5, 1, 3, 3)])
def test_one_class_is_no_classification(shape):
    with pytest.raises(bb.BatchbayesError, match=r"two classes or more.*use bb.bernoulli\(\)"):
        made(torch.randn(shape), bb.categorical())


@pytest.mark.parametrize("axis", [0, -2, -3, 2, 7])
def test_classes_are_not_along_the_examples(axis):
    with pytest.raises(bb.BatchbayesError, match=f"classes along axis {axis}"):
        made(torch.randn(2, 5, 3), bb.categorical(class_axis=axis))
    with pytest.raises(bb.BatchbayesError, match="even number of outputs"):
        made(torch.randn(2, 4, 2), bb.heteroscedastic_gaussian(axis))


@pytest.mark.parametrize("shape", [(3, 32, 48, 5), (3, 48, 32, 5), (3, 32, 32, 5), (3, 8, 9, 10, 4), (3, 7, 5)])
def test_outputs_that_may_have_classes_last_are_refused_until_it_is_said(shape):
    outputs = torch.randn(2, *shape)
    with pytest.raises(bb.BatchbayesError, match=r"class_axis= for outputs.*class_axis=-1"):
        made(outputs, bb.categorical())
    for axis in (-1, 1):
        expected = outputs.movedim(axis + 1 if axis > 0 else axis, -1).softmax(-1).mean(0)
        torch.testing.assert_close(made(outputs, bb.categorical(class_axis=axis)).probs, expected)


@pytest.mark.parametrize("shape", [(3, 5, 32, 48), (3, 21, 48, 32), (3, 5, 4, 6), (3, 4, 8, 9, 10)])
def test_outputs_with_classes_first_need_no_word(shape):
    assert made(torch.randn(2, *shape), bb.categorical()).probs.shape == (3, *shape[2:], shape[1])


# Outputs that are probabilities already


@pytest.mark.parametrize("shape", [(3, 1, 2), (3, 7, 10), (3, 4, 5, 6, 6)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_second_softmax_is_refused(shape, dtype):
    probs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).softmax(2).to(dtype)
    with pytest.raises(bb.BatchbayesError, match=r"logits.*sum to one.*categorical\(probabilities=True\)"):
        made(probs, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="sum to one"):
        bb.categorical().fitting(probs, torch.zeros(probs[0, :, 0].shape).long())
    seen = made(probs, bb.categorical(probabilities=True))
    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == torch.float16 else {}
    own = torch.promote_types(dtype, torch.float32)  # sums of half-precision numbers are too rough
    torch.testing.assert_close(seen.probs, probs.to(own).mean(0).movedim(1, -1), **tolerance)
    as_logits = made(probs, bb.categorical(probabilities=False)).probs
    torch.testing.assert_close(as_logits, probs.double().softmax(2).mean(0).movedim(1, -1).to(own), **tolerance)


def test_a_second_sigmoid_is_refused():
    probs = torch.randn(3, 20, 1).sigmoid()
    with pytest.raises(bb.BatchbayesError, match=r"20 outputs, all between 0 and 1.*bernoulli\(probabilities=True\)"):
        made(probs, bb.bernoulli())
    torch.testing.assert_close(made(probs, bb.bernoulli(probabilities=True)).probs, probs.mean(0))
    torch.testing.assert_close(made(probs, bb.bernoulli(probabilities=False)).probs, probs.sigmoid().mean(0))


@pytest.mark.parametrize("size", [1, 8])
def test_a_second_sigmoid_is_refused_in_small_batches_too(size):
    posterior, outputs = bb.deterministic(nn.Sigmoid()), torch.randn(40, 1)
    with pytest.raises(bb.BatchbayesError, match=r"16 outputs, all between 0 and 1"):
        bb.predict(posterior, list(outputs.split(size)), bb.bernoulli())
    seen = bb.predict(posterior, list(outputs.split(size)), bb.bernoulli(probabilities=True))
    torch.testing.assert_close(seen.probs, outputs.sigmoid())


def test_a_logit_between_0_and_1_is_no_probability_because_all_draws_agree():
    posterior = bb.with_views(bb.deterministic(nn.Identity()), bb.TableJitter(0.01, (1.0,)))
    seen = bb.predict(posterior, torch.tensor([[0.5]]), bb.bernoulli(), num_samples=64)
    assert float(seen.probs) == pytest.approx(0.622, abs=0.01)


def test_zeros_and_ones_are_probabilities_too():
    hard = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    torch.testing.assert_close(made(hard, bb.categorical(probabilities=True)).probs, hard[0])
    torch.testing.assert_close(made(hard, bb.bernoulli(probabilities=True)).probs, hard[0])


@pytest.mark.parametrize("likelihood", [bb.categorical(probabilities=True), bb.bernoulli(probabilities=True)])
def test_logits_are_no_probabilities(likelihood):
    with pytest.raises(bb.BatchbayesError, match="between 0 and 1"):
        made(3 * torch.randn(2, 50, 3), likelihood)


def test_logits_are_hardly_ever_taken_for_probabilities():
    """A few logits between 0 and 1, positive logits, and rows that sum to one all pass as what they are."""
    random = torch.Generator().manual_seed(0)
    for _ in range(500):
        made(torch.randn(1, 1, 2, generator=random).abs(), bb.categorical())
        made(torch.rand(1, 3, 1, generator=random), bb.bernoulli())
    rows = torch.randn(1, 8, 3, generator=random)
    for logits in (rows - rows.mean(-1, keepdim=True) + 1 / 3, torch.zeros(1, 8, 3)):
        torch.testing.assert_close(made(logits, bb.categorical()).probs, logits[0].softmax(-1))


def test_probabilities_are_drawn_exactly():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3), nn.Softmax(-1))
    x = torch.randn(64, 4)
    posterior = bb.mcbn(network, x, batch_size=32, num_samples=8)
    for engine in ("sample", "linear"):
        with pytest.raises(bb.BatchbayesError, match="sum to one"):
            bb.predict(posterior, x, bb.categorical(), engine=engine)
    exact, auto = (
        bb.predict(posterior, x, bb.categorical(probabilities=True), num_samples=8, engine=engine)
        for engine in ("sample", "auto")
    )
    assert torch.equal(exact.probs, auto.probs)
    with pytest.raises(bb.BatchbayesError, match="leave the range from 0 to 1"):
        bb.predict(posterior, x, bb.categorical(probabilities=True), engine="linear")


# Ignored labels


def test_ignored_labels_do_not_count():
    draws = torch.randn(3, 4, 5, 2, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(16).view(4, 2, 2) % 5
    labels[1:3] = 255
    likelihood = bb.categorical(ignore_index=255)
    seen, plain = made(draws, likelihood), made(draws, bb.categorical())
    kept = labels != 255
    expected = plain.log_prob(labels.where(kept, 0))[kept]
    assert torch.equal(seen.log_prob(labels), expected)
    targets = likelihood.fitting(draws, labels)
    each = likelihood(draws).log_prob(targets)
    assert (each[:, ~kept] == 0).all()
    torch.testing.assert_close(each[:, kept], bb.categorical()(draws).log_prob(labels.where(kept, 0))[:, kept])
    with pytest.raises(bb.BatchbayesError, match="labels from 0 to 4"):
        plain.log_prob(labels)
    with pytest.raises(bb.BatchbayesError, match="labels that count; got only 255"):
        likelihood.fitting(draws, torch.full((4, 2, 2), 255))


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
def test_ignored_labels_do_not_tune_the_batch_size():
    torch.manual_seed(0)
    x, y = torch.randn(60, 4), torch.arange(60) % 3
    network = settled(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), x)
    posterior = bb.mcbn(network, x, batch_size=8, num_samples=8)
    marked = torch.cat([y, torch.full((60,), -100)])
    both = bb.tune_batch_size(posterior, [(x.repeat(2, 1), marked)], bb.categorical(ignore_index=-100), num_samples=8)
    alone = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), num_samples=8)
    assert both.value == pytest.approx(alone.value, rel=1e-5)
    assert both.batch_size == pytest.approx(alone.batch_size, rel=1e-3)


# What is not a likelihood


@pytest.mark.parametrize("name", ["categorical", "bernoulli", "gaussian", "heteroscedastic_gaussian"])
def test_a_likelihood_that_was_not_called(name):
    with pytest.raises(
        bb.BatchbayesError, match=rf"function {name}, not called. Do this: call it, as in bb.{name}\(\)"
    ):
        require_likelihood(getattr(bb, name))


@pytest.mark.parametrize("bad", [None, "categorical", nn.CrossEntropyLoss(), type(bb.categorical())])
def test_other_objects_are_no_likelihoods(bad):
    with pytest.raises(bb.BatchbayesError, match="a likelihood"):
        require_likelihood(bad)


@pytest.mark.parametrize(
    "make",
    [
        lambda: bb.categorical(class_axis="last"),
        lambda: bb.categorical(class_axis=1.5),
        lambda: bb.categorical(temperature="hot"),
        lambda: bb.categorical(ignore_index="void"),
        lambda: bb.categorical(probabilities="yes"),
        lambda: bb.bernoulli(temperature=None),
        lambda: bb.gaussian(None),
        lambda: bb.gaussian("1"),
        lambda: bb.gaussian([]),
        lambda: bb.gaussian([1.0, 0.0]),
        lambda: bb.gaussian([[1.0]]),
        lambda: bb.gaussian(True),
        lambda: bb.heteroscedastic_gaussian("1"),
    ],
)
def test_options_of_the_wrong_type(make):
    with pytest.raises(bb.BatchbayesError, match="expected"):
        make()


def test_a_precision_for_each_output():
    draws = torch.randn(4, 6, 2, dtype=torch.float64)
    both = made(draws, bb.gaussian((4.0, 0.25)))
    for k, precision in enumerate((4.0, 0.25)):
        one = made(draws[..., k : k + 1], bb.gaussian(np.float64(precision)))
        y = torch.randn(6, 2, dtype=torch.float64)
        torch.testing.assert_close(both.variance[:, k], one.variance[:, 0])
        torch.testing.assert_close(both.log_prob(y)[:, k], one.log_prob(y[:, k]))
        torch.testing.assert_close(both.quantile(0.9)[:, k], one.quantile(0.9)[:, 0])
    with pytest.raises(bb.BatchbayesError, match="2 outputs for each example"):
        made(torch.randn(4, 6, 3), bb.gaussian((4.0, 0.25)))


def test_tokens_with_masks() -> None:
    """Logits of tokens (N, T, K) with padding: only what counts is scored, wherever the classes are."""
    stream = torch.Generator().manual_seed(0)
    draws, labels = torch.randn(5, 4, 6, 3, generator=stream).double(), torch.randint(0, 3, (4, 6), generator=stream)
    counted = torch.arange(6) < torch.tensor([[6], [2], [4], [1]])
    padded = labels.where(counted, -100)
    for likelihood, outputs in (
        (bb.categorical(class_axis=-1, ignore_index=-100), draws),
        (bb.categorical(class_axis=1, ignore_index=-100), draws.movedim(-1, 2)),
    ):
        predictive = summarised(likelihood.summary(), outputs)
        rows = predictive.select(padded != -100)
        places = [(n, t) for n in range(4) for t in range(6) if counted[n, t]]  # a naive loop
        expected = sum(draws[:, n, t].softmax(-1).mean(0)[labels[n, t]].log() for n, t in places)
        torch.testing.assert_close(predictive.log_prob(padded).sum(), expected)
        torch.testing.assert_close(rows.log_prob(labels[counted]).sum(), expected)
        assert torch.equal(rows.draws, draws[:, counted])
        assert torch.equal(rows.mutual_information, predictive.mutual_information[counted])
        right = metrics.accuracy(predictive.probs, padded, ignore_index=-100)
        assert right == metrics.accuracy(rows.probs, labels[counted])
        low, _ = rows.interval(0.5)
        assert low.shape == (13, 3)
    with pytest.raises(bb.BatchbayesError, match="a mask of bool"):
        predictive.select(counted.long())
    zeros, noisy = torch.zeros(13, 3).double(), bb.gaussian(2.0)
    rows = summarised(noisy.summary(), draws).select(counted)
    torch.testing.assert_close(rows.log_prob(zeros), summarised(noisy.summary(), draws[:, counted]).log_prob(zeros))


def test_ctc_equals_a_loop_over_paths() -> None:
    stream = torch.Generator().manual_seed(1)
    draws = torch.randn(3, 2, 4, 3, generator=stream).double()
    predictive = summarised(bb.categorical(class_axis=-1).summary(), draws)
    targets, frames, lengths = torch.tensor([[1, 2], [2, 0]]), [4, 3], [2, 1]
    found = predictive.ctc_log_prob(targets, frames, lengths)
    for n in range(2):
        total = 0.0
        for path in itertools.product(range(3), repeat=frames[n]):
            spelt = [label for label, _ in itertools.groupby(path) if label]
            if spelt == targets[n, : lengths[n]].tolist():
                total += sum(float(torch.stack([draws[s, n, t].softmax(-1)[k] for t, k in enumerate(path)]).prod())
                             for s in range(3)) / 3  # fmt: skip
        assert math.isclose(float(found[n]), math.log(total), rel_tol=1e-9)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"targets": [[1, 7], [2, 0]]}, "labels from 0 to 2; got 1 to 7"),
        ({"targets": [[1, -1], [2, 0]]}, "labels from 0 to 2; got -1 to 2"),
        ({"targets": [[1.7, 2.0], [2.0, 0.0]]}, "integer labels"),
        ({"targets": [[1, 0], [2, 0]]}, "a blank that no label is"),
        ({"targets": [1, 2]}, "3 labels; got shape"),
        ({"input_lengths": [3.9, 3.0]}, r"input_lengths \(2,\) from 0 to 4"),
        ({"input_lengths": [5, 3]}, r"input_lengths \(2,\) from 0 to 4"),
        ({"target_lengths": [3, 1]}, r"target_lengths \(2,\) from 0 to 2"),
        ({"blank": 9}, "a blank that no label is, from 0 to 2; got blank=9"),
    ],
)
def test_ctc_refuses_what_torch_would_read_outside_of_memory(options, words) -> None:
    predictive = summarised(bb.categorical(class_axis=-1).summary(), torch.zeros(3, 2, 4, 3).double())
    given = {"targets": [[1, 2], [2, 0]], "input_lengths": [4, 3], "target_lengths": [2, 1], **options}
    with pytest.raises(bb.BatchbayesError, match=words):
        predictive.ctc_log_prob(**given)
    one_row = predictive.ctc_log_prob([1, 2, 2], [4, 3], [2, 1])
    assert torch.equal(one_row, predictive.ctc_log_prob([[1, 2], [2, 0]], [4, 3], [2, 1]))
