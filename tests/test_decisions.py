"""Decisions against scipy, brute force, and the promise that they make."""

import statistics
from itertools import combinations, product

import pytest
import torch
from batchbayes_papers.samples import acquisition
from scipy.stats import beta
from torch import nn

import batchbayes as bb
from batchbayes.decisions import (
    binomial_bound,
    choose_to_label,
    matches,
    peaks,
    rejection_threshold,
)


@pytest.mark.parametrize(("errors", "count", "delta"), [(0, 10, 0.05), (3, 50, 0.01), (49, 50, 0.1), (5, 2000, 0.001)])
def test_the_bound_is_that_of_clopper_and_pearson(errors, count, delta):
    assert binomial_bound(errors, count, delta) == pytest.approx(beta.ppf(1 - delta, errors + 1, count - errors))


def test_the_promised_risk_is_kept():
    """Errors with a probability that grows with the score: over 60 held-out sets the promise fails in at most 5 %."""
    torch.manual_seed(0)
    broken, given = 0, 0
    for _ in range(60):
        score = torch.rand(2000)
        threshold = rejection_threshold(score, torch.rand(2000) < 0.3 * score**2, risk=0.05, confidence=0.95)
        if threshold is not None:
            given += 1
            broken += 0.1 * threshold**2 > 0.05  # the mean of 0.3 s^2 below the threshold
    assert given > 50
    assert broken / 60 <= 0.05


def test_the_promise_holds_for_all_examples_that_are_equal_to_the_threshold():
    uncertainty, wrong = torch.zeros(100), torch.zeros(100, dtype=torch.bool)
    wrong[uncertainty.argsort()[50:]] = True  # half of the examples, those that come last among equals
    assert rejection_threshold(uncertainty, wrong, risk=0.2) is None
    assert rejection_threshold(uncertainty, wrong, risk=0.7) == 0


def test_a_joint_choice_from_a_large_pool_needs_little_memory(monkeypatch):
    torch.manual_seed(0)
    predictive = bb.predict(
        bb.ensemble([nn.Linear(2, 4) for _ in range(5)]), torch.randn(60, 2), bb.categorical(), keep_draws=True
    )
    whole = choose_to_label(predictive, 4, jointly=True)
    monkeypatch.setattr(acquisition, "MOST_NUMBERS", 100)
    assert choose_to_label(predictive, 4, jointly=True).tolist() == whole.tolist()
    with pytest.raises(bb.BatchbayesError, match="predictions of classes; got a GaussianPredictive"):
        choose_to_label(bb.predict(bb.deterministic(nn.Linear(2, 1)), torch.randn(9, 2), bb.gaussian(1.0)), 2)


def test_no_threshold_keeps_an_impossible_promise():
    assert rejection_threshold(torch.rand(50), torch.ones(50, dtype=torch.bool), risk=0.01) is None
    sure = torch.linspace(0, 1, 2000)
    assert rejection_threshold(sure, torch.zeros(2000, dtype=torch.bool), risk=0.01) == pytest.approx(1.0, abs=0.01)


def predictive(draws):
    summary = bb.categorical().summary()
    summary.add(draws)
    return summary.finish(draws)


DRAWS = 2 * torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(0))


def joint_information(chosen):
    """Mutual information of the labels of some examples and the draw, over all combinations of labels."""
    probs = DRAWS.double().softmax(-1)
    total, given = 0.0, 0.0
    for labels in product(range(3), repeat=len(chosen)):
        each = torch.stack([probs[:, i, y] for i, y in zip(chosen, labels, strict=True)]).prod(0)
        total -= float(each.mean() * each.mean().log())
        given -= float((each * each.log()).mean())
    return total - given


def test_choices_are_the_best_by_brute_force():
    found = predictive(DRAWS)
    scores = [joint_information([i]) for i in range(7)]
    torch.testing.assert_close(found.mutual_information, torch.tensor(scores).float(), rtol=1e-4, atol=1e-5)
    single = choose_to_label(found, 3)
    assert single.tolist() == torch.tensor(scores).argsort(descending=True)[:3].tolist()
    joint = choose_to_label(found, 3, jointly=True).tolist()
    assert joint[0] == single[0]
    for size in (2, 3):  # greedy: each step is the best that can be added
        options = [[*joint[: size - 1], other] for other in range(7) if other not in joint[: size - 1]]
        assert max(options, key=joint_information) == joint[:size]
    best = max(combinations(range(7), 3), key=joint_information)
    assert joint_information(joint) >= (1 - 1 / 2.72) * joint_information(best)  # submodular
    assert choose_to_label(found, 2, by="entropy").tolist() == found.entropy.argsort(descending=True)[:2].tolist()


def test_joint_choices_do_not_repeat_an_example():
    copies = torch.cat([DRAWS[:, :1].expand(-1, 4, -1), 0.5 * DRAWS[:, 1:3]], 1)  # four copies, then two others
    found = predictive(copies)
    assert set(choose_to_label(found, 3, jointly=True).tolist()) & {4, 5}
    many = choose_to_label(predictive(DRAWS.repeat(1, 8, 1)), 12, jointly=True)
    assert len(set(many.tolist())) == 12
    random = choose_to_label(found, 6, by="random", seed=1)
    assert sorted(random.tolist()) == list(range(6))
    assert not torch.equal(random, choose_to_label(found, 6, by="random", seed=2))


def test_a_network_with_one_logit_is_decided_on_as_one_with_two():
    torch.manual_seed(0)
    x, networks = 3 * torch.randn(40, 2), [nn.Linear(2, 1) for _ in range(4)]
    one = bb.predict(bb.ensemble(networks), x, bb.bernoulli(), keep_draws=True)
    pairs = [nn.Sequential(each, nn.ZeroPad1d((1, 0))) for each in networks]  # the other logit is zero
    two = bb.predict(bb.ensemble(pairs), x, bb.categorical(), keep_draws=True)
    for options in ({}, {"by": "entropy"}, {"jointly": True}):
        assert torch.equal(choose_to_label(one, 5, **options), choose_to_label(two, 5, **options))
    wrong = two.entropy > 0.5
    found = [rejection_threshold(p.entropy, wrong.view_as(p.entropy), risk=0.3) for p in (one, two)]
    assert found[0] == pytest.approx(found[1])


BAD = {
    "maps": (lambda: rejection_threshold(torch.rand(3, 2), torch.rand(3, 2) > 0, risk=0.1), "one number for each"),
    "too many": (lambda: choose_to_label(predictive(DRAWS), 8), "between 1 and 7 examples"),
    "name": (lambda: choose_to_label(predictive(DRAWS), 2, by="variance"), 'by="mutual_information"'),
    "jointly": (lambda: choose_to_label(predictive(DRAWS), 2, by="entropy", jointly=True), "jointly= with the first"),
    "risk": (lambda: rejection_threshold(torch.rand(3), torch.rand(3) > 0.5, risk=2.0), "risk between 0 and 1"),
    "bool": (lambda: rejection_threshold(torch.rand(3), torch.rand(3), risk=0.1), "wrong as torch.bool"),
    "shape": (lambda: rejection_threshold(torch.rand(3), torch.rand(4) > 0, risk=0.1), "wrong in the shape of"),
    "no peak": (lambda: peaks(torch.full((2, 1, 4, 4), torch.nan)), "numbers in heatmaps; got 32 NaN"),
    "no embeddings": (lambda: matches(torch.full((2, 1, 3), torch.nan), torch.ones(2, 2, 3)), "numbers in queries"),
    "empty gallery": (lambda: matches(torch.ones(2, 1, 3), torch.ones(2, 0, 3)), "of the same draws"),
    "other width": (lambda: matches(torch.ones(2, 1, 3), torch.ones(2, 2, 4)), "of the same draws"),
    "empty": (lambda: rejection_threshold(torch.rand(0), torch.rand(0) > 0, risk=0.1), "at least one example"),
}


@pytest.mark.parametrize(("decide", "words"), BAD.values(), ids=BAD)
def test_bad_input_is_refused(decide, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        decide()


def test_matches_equal_a_loop():
    stream = torch.Generator().manual_seed(0)
    queries, gallery = (torch.randn(6, count, 4, generator=stream).double() for count in (3, 5))
    found = matches(queries, gallery)
    for n in range(3):
        alike = torch.tensor([[float(torch.cosine_similarity(queries[s, n], gallery[s, g], 0)) for g in range(5)]
                              for s in range(6)]).double()  # fmt: skip
        torch.testing.assert_close(found.mean[n], alike.mean(0), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(found.std[n], alike.std(0, correction=0), rtol=1e-5, atol=1e-7)
        assert found.share_nearest[n].tolist() == [float((alike.argmax(1) == g).double().mean()) for g in range(5)]
    with pytest.raises(bb.BatchbayesError, match="of the same draws"):
        matches(queries, gallery[:2])


def test_peaks_scatter_as_in_a_loop():
    maps = torch.rand(4, 2, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    mean, std = peaks(maps)
    places = [divmod(int(maps[s, 1, 2].argmax()), 7) for s in range(4)]
    xs, ys = [x for _, x in places], [y for y, _ in places]
    assert mean[1, 2].tolist() == pytest.approx([statistics.mean(xs), statistics.mean(ys)])
    assert std[1, 2].tolist() == pytest.approx([statistics.pstdev(xs), statistics.pstdev(ys)])
