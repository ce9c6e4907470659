"""The parts of novelty against naive versions in float64: statistics, Mahalanobis distance, ranks, p-values."""

import math

import pytest
import torch
from helpers.cases import NETWORKS
from hypothesis import given, settings
from hypothesis import strategies as st

from batchbayes.network.function import as_network
from batchbayes.novelty import scores as gaussian_module
from batchbayes.novelty.scores import PRIOR_COUNT, SHRINKAGE, conformal_p_value, fit_gaussian, surprise
from batchbayes.novelty.statistics import FLOOR, watch


def naive_statistics(h, layer):
    """The statistics of one example and site, (C, positions) in float64, in plain loops."""
    z, seconds, variances = [], [], []
    for channel in range(len(h)):
        values = [(float(v) - float(layer.running_mean[channel])) for v in h[channel].flatten()]
        std = math.sqrt(float(layer.running_var[channel]) + layer.eps)
        values = [v / std for v in values]
        mean = sum(values) / len(values)
        z.append(mean)
        seconds.append(math.log(sum(v * v for v in values) / len(values) + FLOOR))
        variances.append(math.log(sum((v - mean) ** 2 for v in values) / len(values) + FLOOR))
    return z + seconds + variances


def test_statistics_are_those_of_each_example_and_channel():
    case = NETWORKS["BatchNorm2d"]
    x = case.batches(1, size=5)[0]
    sight = watch(as_network(case.network()), x[:1], None)
    seen, watched = {}, case.network()
    for name, module in watched.named_modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.register_forward_pre_hook(lambda m, args, name=name: seen.update({name: (m, args[0].double())}))
    with torch.no_grad():
        watched(x)
    statistics, logits = sight(x)
    for i in range(len(x)):
        expected = [v for place in sight.places for v in naive_statistics(seen[place.name][1][i], seen[place.name][0])]
        torch.testing.assert_close(statistics[i].double(), torch.tensor(expected).double(), rtol=1e-4, atol=1e-4)
    assert logits.shape == (5, 3)


def test_the_variance_of_values_far_from_zero_is_not_lost_to_rounding():
    layer = torch.nn.BatchNorm1d(1)
    layer.running_mean[:], layer.running_var[:] = 1e5, 100.0  # a pressure in pascal
    x = 1e5 + 10 * torch.randn(4, 1, 50, generator=torch.Generator().manual_seed(0))
    statistics, _ = watch(as_network(torch.nn.Sequential(layer)), x[:1], None)(x)
    expected = torch.tensor([naive_statistics(row, layer) for row in x.double()])
    torch.testing.assert_close(statistics, expected, rtol=1e-4, atol=1e-4)


def test_a_site_without_positions_has_one_statistic_for_each_channel():
    network = NETWORKS["BatchNorm1d (N, C)"].network()
    x = NETWORKS["BatchNorm1d (N, C)"].batches(1)[0]
    sight = watch(as_network(network), x[:1], None)
    layer = network[1]
    with torch.no_grad():
        expected = (network[0](x) - layer.running_mean) / (layer.running_var + layer.eps).sqrt()
    torch.testing.assert_close(sight(x)[0][:, :8], expected)
    assert sight.size == 8 + 6


def naive_distances(train, classes, num_classes, x, predicted):
    """Mahalanobis distance and class evidence with a dense float64 covariance and loops over examples and classes."""
    train, x = train.double(), x.double()
    mean, std = train.mean(0), train.std(0)
    z = (train - mean) / std
    centres = [z[classes == k].sum(0) / (int((classes == k).sum()) + PRIOR_COUNT) for k in range(num_classes)]
    inside = torch.stack([row - centres[int(k)] for row, k in zip(z, classes, strict=True)])
    size = z.shape[1]
    covariance = (1 - SHRINKAGE) * inside.T @ inside / len(z) + SHRINKAGE * torch.eye(size).double()
    precision = covariance.inverse()
    distances, evidence = [], []
    for row, k in zip((x - mean) / std, predicted, strict=True):
        away = row - centres[int(k)]
        distances.append(sum(float(away[i] * precision[i, j] * away[j]) for i in range(size) for j in range(size)))
        ratios = [0.5 * float(row @ precision @ row - (row - c) @ precision @ (row - c)) for c in centres]
        evidence.append(-math.log(sum(math.exp(r) for r in ratios)))
    return torch.tensor(distances).double(), torch.tensor(evidence).double()


@pytest.mark.parametrize("count", [300, 8])
def test_distances_equal_dense_mahalanobis(count):
    torch.manual_seed(0)
    mixing = torch.randn(9, 9)
    train, x = torch.randn(count, 9) @ mixing + 3, torch.randn(6, 9) @ mixing * 2
    classes, predicted = torch.arange(count) % 3, torch.tensor([0, 1, 2, 2, 1, 0])
    model = fit_gaussian(train, classes, 3)
    found = model.distances(model.standardise(x), predicted)
    for ours, expected in zip(found, naive_distances(train, classes, 3, x, predicted), strict=True):
        torch.testing.assert_close(ours, expected, rtol=2e-3, atol=2e-3)


def test_a_limit_on_directions_keeps_the_trace(monkeypatch):
    monkeypatch.setattr(gaussian_module, "DIRECTIONS", 4)
    torch.manual_seed(0)
    train = torch.randn(2000, 12) @ torch.randn(12, 12)
    classes = torch.zeros(2000, dtype=torch.long)
    model = fit_gaussian(train, classes, 1)
    assert model.directions.shape == (12, 4)
    z = model.standardise(train)
    values = torch.linalg.eigvalsh((z.T @ z).double() / 2000)
    assert model.rest == pytest.approx((1 - SHRINKAGE) * float(values[:-4].mean()) + SHRINKAGE, rel=1e-2)
    full = (
        sum(float(v / ((1 - SHRINKAGE) * v + SHRINKAGE)) for v in values[-4:]) + float(values[:-4].sum()) / model.rest
    )
    assert float(model.distances(z, classes)[0].mean()) == pytest.approx(full, rel=1e-2)


def test_a_class_without_examples_and_constant_statistics_do_no_harm():
    torch.manual_seed(0)
    train = torch.randn(100, 5)
    train[:, 2] = 7.0
    model = fit_gaussian(train, torch.zeros(100, dtype=torch.long), 3)
    found = model.distances(model.standardise(train), torch.full((100,), 2))
    assert all(part.isfinite().all() for part in found)
    assert model.std[2] == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_statistics_that_overflow_are_far_away(value):
    model = fit_gaussian(torch.randn(100, 5), torch.zeros(100, dtype=torch.long), 1)
    x = torch.zeros(2, 5)
    x[1, 3] = value
    distance = model.distances(model.standardise(x), torch.zeros(2, dtype=torch.long))[0]
    assert distance.isfinite().all()
    assert distance[1] > 1e4 * distance[0].clamp_min(1)


@settings(max_examples=50, deadline=None)
@given(
    ordinary=st.lists(st.integers(-5, 5), min_size=1, max_size=30),
    scores=st.lists(st.integers(-6, 6), min_size=1, max_size=10),
)
def test_p_values_by_definition(ordinary, scores):
    found = conformal_p_value(torch.tensor(ordinary).double(), torch.tensor(scores).double())
    expected = [(1 + sum(o >= s for o in ordinary)) / (len(ordinary) + 1) for s in scores]
    assert found.tolist() == pytest.approx(expected)


@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.integers(-3, 3), min_size=2, max_size=25))
def test_p_values_are_valid_for_every_exchangeable_sample(values):
    """Each value in turn is the new one: at most a share a of them has a p-value of a or less, ties or not."""
    pool = torch.tensor(values).double()
    found = [float(conformal_p_value(torch.cat([pool[:i], pool[i + 1 :]]), pool[i : i + 1])) for i in range(len(pool))]
    for level in [k / len(pool) for k in range(1, len(pool) + 1)]:
        assert sum(p <= level + 1e-12 for p in found) <= level * len(pool) + 1e-9


@settings(max_examples=50, deadline=None)
@given(
    ordinary=st.lists(st.floats(-100, 100), min_size=20, max_size=60),
    scores=st.lists(st.floats(-200, 1000), min_size=2, max_size=20),
)
def test_surprise_never_falls_as_scores_rise(ordinary, scores):
    found = surprise(torch.tensor(ordinary), torch.tensor(sorted(scores)))
    assert found.isfinite().all()
    assert (found.diff() >= -1e-9).all()


def test_surprise_does_not_depend_on_the_default_precision():
    ordinary, scores = torch.arange(99.0), torch.linspace(0, 200, 50)
    expected = surprise(ordinary, scores)
    torch.set_default_dtype(torch.float16)
    try:
        assert torch.equal(surprise(ordinary, scores), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_surprise_below_the_tail_is_the_log_of_the_rank():
    ordinary = torch.randn(200).double()
    scores = ordinary[ordinary.argsort()[:150]]
    expected = -conformal_p_value(ordinary, scores).log()
    torch.testing.assert_close(surprise(ordinary, scores), expected)
