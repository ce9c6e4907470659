import math

import pytest
import torch
from scipy import optimize

from batchbayes import BatchbayesError
from batchbayes.calibrate import (
    agreement_temperature,
    conformal_intervals,
    conformal_sets,
    tune_precision,
    tune_temperature,
)
from batchbayes.export.program import summary_of
from batchbayes.likelihoods import Categorical, bernoulli, categorical, gaussian, heteroscedastic_gaussian
from batchbayes.metrics import best_constant_precision, mixture_crps
from batchbayes.report.compare import values as compare
from batchbayes.report.compare.contenders import Seen
from batchbayes.report.compare.rows import _value_columns, rounded


def made(draws, likelihood):
    summary = likelihood.summary()
    summary.add(draws)
    return summary.finish(draws)


@pytest.mark.parametrize("objective", ["log_likelihood", "crps"])
def test_one_draw_has_the_best_constant_precision(objective):
    random = torch.Generator().manual_seed(0)
    mean, target = torch.randn(1, 200, 1, generator=random), torch.randn(200, generator=random)
    found = tune_precision(made(mean, gaussian(1.0)), target, objective)
    assert found == pytest.approx(best_constant_precision(mean[0, :, 0], target, objective), rel=1e-4)


@pytest.mark.parametrize("objective", ["log_likelihood", "crps"])
def test_the_precision_of_a_mixture_is_that_of_a_brute_force_search(objective):
    random = torch.Generator().manual_seed(1)
    draws = torch.randn(6, 80, 1, generator=random, dtype=torch.float64)
    target = draws.mean(0) + 0.3 * torch.randn(80, 1, generator=random, dtype=torch.float64)

    def cost(log_precision):
        if objective == "crps":
            return float(mixture_crps(draws, math.exp(log_precision), target).mean())
        normal = gaussian(math.exp(log_precision))(draws)
        return -float(normal.log_prob(target).logsumexp(0).mean())

    best = optimize.minimize_scalar(cost, bounds=(-5, 10), method="bounded", options={"xatol": 1e-7}).fun
    found = tune_precision(made(draws, gaussian(1.0)), target, objective)
    assert cost(math.log(found)) <= best + 1e-7


def test_an_error_of_zero_has_no_precision():
    with pytest.raises(BatchbayesError, match="not all zero"):
        tune_precision(made(torch.zeros(1, 5, 1), gaussian(1.0)), torch.zeros(5))


@pytest.mark.parametrize("num_draws", [1, 5])
def test_the_temperature_is_that_of_a_brute_force_search(num_draws):
    random = torch.Generator().manual_seed(2)
    logits = 6 * torch.randn(num_draws, 300, 4, generator=random, dtype=torch.float64)
    labels = (logits.mean(0) / 3).softmax(-1).multinomial(1, generator=random)[:, 0]

    def cost(log_temperature):
        return -float(made(logits, categorical(temperature=math.exp(log_temperature))).log_prob(labels).mean())

    best = optimize.minimize_scalar(cost, bounds=(-3, 3), method="bounded", options={"xatol": 1e-7}).fun
    found = tune_temperature(made(logits, categorical()), labels)
    assert cost(math.log(found)) <= best + 1e-7
    assert found > 1.5  # the logits were made three times too large


def test_a_network_that_is_never_wrong_or_says_nothing_has_a_temperature_at_an_end():
    sure = made(30 * torch.eye(3)[None], categorical())
    assert tune_temperature(sure, torch.arange(3)) == pytest.approx(1 / 20)
    assert tune_temperature(sure, torch.tensor([1, 2, 0])) == pytest.approx(20)


def test_a_temperature_is_applied_along_any_class_axis():
    outputs = torch.randn(3, 5, 7, 4)  # (S, N, places, K)
    hot = made(outputs, Categorical(class_axis=-1, temperature=2.0))
    torch.testing.assert_close(hot.log_probs.exp(), (outputs / 2).softmax(-1).mean(0))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("inf"), float("nan")])
def test_a_temperature_must_be_positive(temperature):
    with pytest.raises(BatchbayesError, match="positive, finite temperature"):
        categorical(temperature=temperature)


@pytest.mark.parametrize("level", [0.8, 0.95])
def test_conformal_intervals_hold_what_they_promise_for_a_wrong_model(level):
    """Over 300 splits the mean coverage is level up to 1/(n+1), within four standard errors; the std is off by 3."""
    random, held = torch.Generator().manual_seed(3), []
    for _ in range(300):
        target = torch.randn(200, generator=random) * 3
        seen = made(torch.zeros(1, 100, 1), gaussian(1.0))
        lower, upper = conformal_intervals(seen, target[:100], level)(seen)
        held.append(float(((lower[:, 0] <= target[100:]) & (target[100:] <= upper[:, 0])).double().mean()))
    held = torch.tensor(held)
    error = float(held.std()) / len(held) ** 0.5
    assert level - 4 * error <= float(held.mean()) <= level + 1 / 101 + 4 * error


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conformal_intervals_hold_targets_that_are_just_as_far_away_as_a_held_out_one(dtype):
    """Counts and other rounded targets have such ties. Rounding of the ends must not leave them out."""
    random = torch.Generator().manual_seed(5)
    for _ in range(200):
        middle, precision = (torch.rand(2, generator=random) * 10 + 0.1).tolist()
        seen = made(torch.full((1, 40, 1), middle), gaussian(precision))
        targets = torch.randint(0, 100, (40, 1), generator=random).to(dtype) / 10
        lower, upper = conformal_intervals(seen, targets, 0.8)(seen)
        assert float(((lower <= targets) & (targets <= upper)).double().mean()) >= 0.8
        assert lower.dtype == upper.dtype == torch.float32


def test_reports_and_exported_files_hold_such_targets_too():
    random = torch.Generator().manual_seed(5)
    for _ in range(200):
        middle, precision = (torch.rand(2, generator=random) * 10 + 0.1).tolist()
        seen = made(torch.full((1, 40, 1), middle), gaussian(precision))
        targets = torch.randint(0, 100, (40, 1), generator=random) / 10
        intervals = compare.interval_fit(seen, targets, "auto", 0)
        assert compare.value_metrics(Seen(seen, seen, None, intervals), targets, targets)["conformal_coverage"] >= 0.9
        rows = _value_columns(seen, {"intervals": intervals.to_json(), "threshold": [0.0], "task": "regression"})
        ends = zip(rows["lower"], rounded(targets[:, 0]), rows["upper"], strict=True)
        assert sum(lower <= target <= upper for lower, target, upper in ends) >= 36
        summary = summary_of(gaussian(precision), intervals)
        found = summary.finish([seen.mean, torch.zeros(40, 1), torch.full((40, 1), 1 / precision)], 1)[0]
        assert ((found["lower"] <= targets) & (targets <= found["upper"])).sum() >= 36


def test_conformal_sets_hold_what_they_promise_for_a_wrong_model():
    random, held = torch.Generator().manual_seed(4), []
    for _ in range(300):
        logits = torch.randn(200, 5, generator=random)
        labels = logits.softmax(-1).multinomial(1, generator=random)[:, 0]
        first, second = (made(5 * part[None], categorical()) for part in logits.split(100))  # far too sure
        sets = conformal_sets(first, labels[:100], 0.9)(second)
        held.append(float(sets.gather(-1, labels[100:, None]).double().mean()))
    held = torch.tensor(held)
    error = float(held.std()) / len(held) ** 0.5
    assert 0.9 - 4 * error <= float(held.mean()) <= 0.9 + 1 / 101 + 4 * error


@pytest.mark.parametrize("method", ["aps", "raps"])
def test_adaptive_sets_hold_the_truth_and_are_never_empty(method):
    """On many draws of held-out examples; by a loop over classes for one of them."""
    random, shares = torch.Generator().manual_seed(0), []
    for _ in range(40):
        logits = 2 * torch.randn(600, 8, generator=random)
        labels = torch.multinomial(logits.softmax(1), 1, generator=random)[:, 0]
        first, second = (classes_of(part * 1.5) for part in (logits[:300], logits[300:]))  # too sure of itself
        sets = conformal_sets(first, labels[:300], 0.9, method=method)
        inside = sets(second)
        assert inside.any(1).all()
        shares.append(inside.gather(1, labels[300:, None]).double().mean())
    assert abs(float(torch.stack(shares).mean()) - 0.9) < 4 * (0.09 / 300 * 2 / 40) ** 0.5
    for probs, own in zip(second.probs[:20], inside[:20], strict=True):
        ranked = sorted(range(8), key=lambda k: -probs[k])
        for rank, k in enumerate(ranked):
            score = float(probs[ranked[:rank]].sum() + probs[k] / 2) + (
                0.01 * max(0, rank - 4) if method == "raps" else 0
            )
            assert bool(own[k]) == (rank == 0 or score <= sets.threshold)


def classes_of(logits):
    summary = categorical().summary()
    summary.add(logits[None])
    return summary.finish(logits[None])


def test_conformal_sets_of_yes_or_no_are_those_of_two_classes():
    random = torch.Generator().manual_seed(6)
    logits, labels = torch.randn(3, 40, 1, generator=random), torch.arange(40) % 3 // 2
    one, two = made(logits, bernoulli()), made(torch.cat([torch.zeros_like(logits), logits], -1), categorical())
    sets = conformal_sets(one, labels, 0.8)
    assert sets.threshold == pytest.approx(conformal_sets(two, labels, 0.8).threshold)
    assert torch.equal(sets(one)[:, 0], sets(two))
    assert sets(one)[:, 0].gather(1, labels[:, None]).double().mean() >= 0.8


def test_too_little_calibration_data_gives_everything():
    seen = made(torch.zeros(1, 3, 2), categorical())
    assert conformal_sets(seen, torch.tensor([0, 1, 0]), 0.9)(seen).all()
    wide = made(torch.zeros(1, 3, 1), gaussian(1.0))
    assert conformal_intervals(wide, torch.ones(3), 0.9).width == float("inf")


@pytest.mark.parametrize("tune", [tune_precision, conformal_intervals])
def test_targets_are_never_reshaped(tune):
    """Targets (D, N) have as many numbers as outputs (N, D), in another order."""
    seen = made(torch.randn(3, 6, 2), gaussian(1.0))
    for targets in (torch.randn(2, 6), torch.randn(12), torch.randn(6)):
        with pytest.raises(BatchbayesError, match=r"targets of shape \(6, 2\)"):
            tune(seen, targets)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_targets_must_be_finite(bad):
    seen, targets = made(torch.randn(3, 6, 1), gaussian(1.0)), torch.tensor([0.0, 1.0, 2.0, bad, 0.5, 0.1])
    for tune in (tune_precision, conformal_intervals):
        with pytest.raises(BatchbayesError, match="NaN"):
            tune(seen, targets)


def test_nothing_to_calibrate_on():
    values, classes = made(torch.zeros(2, 0, 1), gaussian(1.0)), made(torch.zeros(2, 0, 3), categorical())
    for call in (lambda: tune_precision(values, torch.zeros(0)), lambda: conformal_intervals(values, torch.zeros(0)),
                 lambda: conformal_sets(classes, torch.zeros(0).long()),
                 lambda: tune_temperature(classes, torch.zeros(0).long())):  # fmt: skip
        with pytest.raises(BatchbayesError, match="at least one example"):
            call()


@pytest.mark.parametrize("level", [0, -0.1, 1.0005, 1.1, 90, float("nan"), "0.9", True])
def test_a_level_is_a_share(level):
    with pytest.raises(BatchbayesError, match="level between 0 and 1"):
        conformal_intervals(made(torch.zeros(1, 3, 1), gaussian(1.0)), torch.ones(3), level)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
def test_labels_of_any_integer_type(dtype):
    logits, labels = torch.randn(2, 30, 3, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3
    seen = made(logits, categorical())
    assert tune_temperature(seen, labels.to(dtype)) == tune_temperature(seen, labels)
    assert tune_temperature(seen, labels.numpy()) == tune_temperature(seen, labels)
    assert conformal_sets(seen, labels.to(dtype)) == conformal_sets(seen, labels)


def test_each_output_gets_its_own_precision():
    random = torch.Generator().manual_seed(0)
    draws, scale = torch.randn(3, 300, 2, generator=random), torch.tensor([1.0, 10.0])
    targets = draws.mean(0) + scale * torch.randn(300, 2, generator=random)
    seen = made(draws, gaussian(1.0))
    found = tune_precision(seen, targets, per_output=True)
    alone = [tune_precision(made(draws[..., k], gaussian(1.0)), targets[:, k]) for k in range(2)]
    assert list(found) == pytest.approx(alone)
    again = made(draws, gaussian(found))
    torch.testing.assert_close(again.noise_variance[0], 1 / torch.tensor(found))
    assert (
        again.log_prob(targets).mean() > made(draws, gaussian(tune_precision(seen, targets))).log_prob(targets).mean()
    )


@pytest.mark.parametrize("per_output", [False, True])
def test_a_network_that_predicts_its_noise_has_no_precision_to_tune(per_output):
    seen = made(torch.randn(2, 5, 4), heteroscedastic_gaussian())
    with pytest.raises(BatchbayesError, match=r"of bb.gaussian\(...\), with one noise; got Heteroscedastic"):
        tune_precision(seen, torch.zeros(5, 2), per_output=per_output)


def test_the_temperature_of_yes_or_no():
    random = torch.Generator().manual_seed(2)
    logits = 6 * torch.randn(4, 300, generator=random, dtype=torch.float64)
    targets = (logits.mean(0) / 3).sigmoid().bernoulli(generator=random)
    two = torch.stack([torch.zeros_like(logits), logits], -1)
    found = tune_temperature(made(logits, bernoulli()), targets)
    assert found == pytest.approx(tune_temperature(made(two, categorical()), targets.long()))
    assert found > 1.5


def test_ignored_labels_do_not_tune():
    random = torch.Generator().manual_seed(2)
    logits, labels = torch.randn(3, 40, 4, generator=random), torch.randint(0, 4, (40,), generator=random)
    marked = torch.cat([labels, torch.full((40,), 255)])
    both = made(logits.repeat(1, 2, 1), categorical(ignore_index=255))
    alone = made(logits, categorical())
    assert tune_temperature(both, marked) == pytest.approx(tune_temperature(alone, labels))
    assert conformal_sets(both, marked) == conformal_sets(alone, labels)


def test_the_wrong_predictive_is_named():
    with pytest.raises(BatchbayesError, match=r"bb.gaussian\(1.0\)\) returns; got a CategoricalPredictive"):
        conformal_intervals(made(torch.zeros(1, 3, 2), categorical()), torch.ones(3))
    with pytest.raises(BatchbayesError, match="got a Tensor"):
        tune_temperature(torch.zeros(3, 2), torch.zeros(3).long())


@pytest.mark.parametrize("average", [1, 2, 3])
def test_confidence_is_the_agreement_of_pairs_of_draws(average):
    random = torch.Generator().manual_seed(2)
    draws = 4 * torch.randn(50, 3, generator=random) + 2 * torch.randn(6, 50, 3, generator=random)
    temperature = agreement_temperature(made(draws, categorical()), average=average)
    answers = draws.argmax(-1)
    pairs = [(answers[i] == answers[j]).double().mean() for i in range(6) for j in range(i)]
    probs = (draws.double().view(-1, average, 50, 3).mean(1) / temperature).softmax(-1).mean(0)
    assert float(probs.amax(-1).mean()) == pytest.approx(float(torch.stack(pairs).mean()), abs=1e-4)


def test_agreement_needs_pairs_of_draws():
    for count, average in ((1, 1), (4, 3)):
        with pytest.raises(BatchbayesError, match=f"a multiple of average={average}; got {count}"):
            agreement_temperature(made(torch.randn(count, 5, 3), categorical()), average=average)
    for average in (0, "all"):
        with pytest.raises(BatchbayesError, match="average as a whole number"):
            agreement_temperature(made(torch.randn(4, 5, 3), categorical()), average=average)


def test_agreement_reads_draws_as_the_likelihood_does():
    draws = 3 * torch.randn(6, 50, 3, generator=torch.Generator().manual_seed(2))
    expected = agreement_temperature(made(draws, categorical()))
    as_probabilities = made(draws.double().softmax(-1), categorical(temperature=2.0, probabilities=True))
    assert agreement_temperature(as_probabilities) == pytest.approx(expected, rel=1e-4)
    pixels = torch.stack([draws, draws], 2)  # (S, N, 2, K): classes last
    assert agreement_temperature(made(pixels, categorical(class_axis=-1))) == pytest.approx(expected, rel=1e-4)
