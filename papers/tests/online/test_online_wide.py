"""Wide fixed features, and the layers on them, against direct inversion, and in parts against all data at once."""

import math

import pytest
import torch
from batchbayes_papers.online import (
    ConjugateRegression,
    OnlineLastLayer,
    PatchFeatures,
    RandomFeatures,
    learn_parts,
    patch_features,
    random_features,
)
from batchbayes_papers.online.conjugate import RATE, SHAPE, VARIANCE, negative_log_evidence
from batchbayes_papers.online.experiment import SAME_FEATURES, TUNED_WIDE, WIDE, units
from batchbayes_papers.online.image_features import _clusters
from batchbayes_papers.online.setup import OnlineConfig, Task
from batchbayes_papers.online.wide import fine_tuned_wide, joint_on_first_features, online_wide
from torch.distributions import StudentT

import batchbayes as bb

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(60, 3, dtype=torch.float64, generator=RANDOM)
Y = (X[:, :1] * 2).sin() + X[:, 1:2] + 0.1 * torch.randn(60, 1, dtype=torch.float64, generator=RANDOM)
PARTS = [(X[start : start + 12], Y[start : start + 12]) for start in range(0, 60, 12)]
FEATURES = random_features(*PARTS[0], num_directions=15)


def parts_of_features(most=5):
    for number, (inputs, targets) in enumerate(PARTS):
        if number == most:
            raise KeyboardInterrupt
        yield FEATURES(inputs), targets


def scaled(state, inputs):
    return FEATURES(inputs) * state.variances.sqrt().repeat_interleave(torch.tensor(state.groups))


def test_five_parts_are_equal_to_one_and_to_a_gaussian_process():
    state = learn_parts(ConjugateRegression.start(FEATURES.groups), parts_of_features())
    joint = ConjugateRegression.start(FEATURES.groups).update((FEATURES(X), Y[:, 0]))
    found, other = state.predictive(FEATURES(X[:7])), joint.predictive(FEATURES(X[:7]))
    torch.testing.assert_close((found.mean, found.stddev), (other.mean, other.stddev), rtol=1e-8, atol=1e-8)
    known, new = scaled(state, X), scaled(state, X[:7])
    inverse = torch.linalg.inv(torch.eye(60) + known @ known.T)
    shape, rate = SHAPE + 30, RATE + 0.5 * float(Y[:, 0] @ inverse @ Y[:, 0])
    doubt = 1 + (new * new).sum(1) - torch.einsum("nm,mk,nk->n", new @ known.T, inverse, new @ known.T)
    direct = StudentT(2 * shape, (new @ known.T @ inverse @ Y)[:, 0], (rate / shape * doubt).sqrt())
    torch.testing.assert_close(state.log_prob(FEATURES(X[:7]), Y[:7])[:, 0], direct.log_prob(Y[:7, 0]))
    assert state.noise_std == pytest.approx((rate / (shape + 1)) ** 0.5)


def test_evidence_and_its_maximum():
    """The evidence is the density of a multivariate t distribution, and no other variances have more of it."""
    state = ConjugateRegression.start(FEATURES.groups).update((FEATURES(X), Y))

    def density(columns):
        spread = RATE / SHAPE * (torch.eye(60) + columns @ columns.T)
        quadratic = float(Y[:, 0] @ torch.linalg.solve(spread, Y[:, 0]))
        return -0.5 * torch.logdet(spread) - (SHAPE + 30) * math.log1p(quadratic / (2 * SHAPE))

    narrow, wide = scaled(state, X), 2 * scaled(state, X)
    difference = negative_log_evidence(wide, Y[:, 0]) - negative_log_evidence(narrow, Y[:, 0])
    torch.testing.assert_close(difference, density(narrow) - density(wide))

    assert torch.autograd.gradcheck(negative_log_evidence, (narrow[:9].requires_grad_(), Y[:9, 0]))

    def penalised(variances):
        columns = FEATURES(X) * variances.sqrt().repeat_interleave(torch.tensor(state.groups))
        return negative_log_evidence(columns, Y[:, 0]) + 0.5 * (variances.log() + VARIANCE / variances).sum()

    best = penalised(state.variances)
    for group in range(3):
        for factor in (0.8, 1.25):
            changed = state.variances.clone()
            changed[group] *= factor
            assert penalised(changed) > best


def test_a_killed_run_goes_on_with_the_same_numbers(tmp_path):
    path, start = tmp_path / "state.safetensors", ConjugateRegression.start(FEATURES.groups)
    whole = learn_parts(start, parts_of_features())
    with pytest.raises(KeyboardInterrupt):
        learn_parts(start, parts_of_features(3), checkpoint=path)
    assert start.restored(path).num_parts == 3
    again = learn_parts(start, parts_of_features(), checkpoint=path)
    assert torch.equal(again.of_features, whole.of_features)
    assert (again.num_parts, again.num_examples) == (5, 60)
    torch.testing.assert_close(again.variances, whole.variances, rtol=0, atol=0)
    with pytest.raises(bb.BatchbayesError, match="other names or shapes"):
        ConjugateRegression.start([2, 1]).restored(path)


def test_features_are_saved_and_have_the_promised_kernel(tmp_path):
    FEATURES.save(tmp_path / "waves")
    assert torch.equal(RandomFeatures.load(tmp_path / "waves")(X), FEATURES(X))
    with pytest.raises(bb.BatchbayesError, match="patch features at"):
        PatchFeatures.load(tmp_path / "waves")
    many = RandomFeatures(torch.zeros(3), torch.ones(3), torch.randn(40_000, 3, dtype=torch.float64, generator=RANDOM))
    waves = many(X[:4])[:, :80_000]
    kernel = (-0.5 * torch.cdist(X[:4], X[:4]).square()).exp()
    assert (waves @ waves.T - kernel).abs().max() < 5 * 40_000**-0.5


def test_a_column_that_does_not_matter_gets_a_long_scale():
    lengths = random_features(X, Y, num_directions=30).directions.abs().mean(0)
    assert lengths[2] < 0.5 * lengths[0]


def test_odd_parts_of_tables():
    constant = X.clone()
    constant[:, 1] = 7.0
    features = random_features(constant[:12], Y[:12], num_directions=5)
    state = ConjugateRegression.start(features.groups).update((features(constant[:1]), Y[:1]))  # one example
    assert state.predictive(features(constant)).stddev.isfinite().all()
    before = ConjugateRegression.start(features.groups).predictive(features(constant))
    assert before.mean.abs().max() == 0
    with pytest.raises(bb.BatchbayesError, match="training inputs"):
        random_features(X / 0, Y)
    with pytest.raises(bb.BatchbayesError, match="training targets"):
        state.update((features(X), Y / 0))
    with pytest.raises(bb.BatchbayesError, match=r"features of shape \(N, 14\)"):
        state.update((X, Y))
    with pytest.raises(bb.BatchbayesError, match="finite weights"):
        state.update((1e200 * features(X), Y))
    with pytest.raises(bb.BatchbayesError, match=r"targets of shape \(60, 1\)"):
        state.update((features(X), torch.cat([Y, Y], 1)))
    with pytest.raises(bb.BatchbayesError, match="as in the first part"):
        features(X[:, :2])
    with pytest.raises(bb.BatchbayesError, match="the inputs"):
        features(X / 0)


def images(count):
    """Bars that lie or stand, at any place, with a little noise."""
    labels = torch.arange(count) % 2
    places = torch.randint(1, 7, (count,), generator=RANDOM)
    found = 0.1 * torch.rand(count, 1, 8, 8, generator=RANDOM)
    for image, label, place in zip(found[:, 0], labels.tolist(), places.tolist(), strict=True):
        (image if label else image.T)[place] += 1
    return found, labels


def test_patches_tell_classes_apart_by_a_linear_layer(tmp_path):
    train, labels = images(80)
    features = patch_features(train[:40], 21, num_filters=16, size=3, grid=2)
    state = OnlineLastLayer.start(2, 21, bb.categorical(), num_draws=16)
    state = learn_parts(state, [(features(train[rows]), labels[rows]) for rows in torch.arange(80).chunk(2)])
    test, truth = images(40)
    assert (state.outputs(features(test))[0].argmax(1) == truth).double().mean() > 0.95
    assert features(train[:40])[:, :-1].square().sum(1).mean() == pytest.approx(25)
    torch.testing.assert_close(features(test)[:3], features(test[:3]))
    features.save(tmp_path / "patches")
    assert torch.equal(PatchFeatures.load(tmp_path / "patches")(test), features(test))


def test_features_of_many_images_come_from_some_of_them(monkeypatch):
    train, _ = images(30)
    for name, value in {"MOST_PIXELS": 640, "MOST_IMAGES": 8, "CHUNK_PIXELS": 200}.items():
        monkeypatch.setattr(f"batchbayes_papers.online.image_features.{name}", value)
    features = patch_features(train, 21, num_filters=16, size=3, grid=2)
    assert features.num_features == 8  # eight images differ from their mean in seven directions
    assert features(train).shape == (30, 8)


def test_clusters_are_the_directions_that_points_have():
    points = torch.eye(4)[torch.arange(80) % 3] * (1 + torch.rand(80, 1, generator=RANDOM))
    points = points + 0.3 * torch.randn(80, 4, generator=RANDOM)
    found = _clusters(points, 3, torch.Generator().manual_seed(0))
    assert (found[:, :3].amax(0) > 0.97).all()


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [(lambda x: x[:, 0], {}, r"\(N, C, H, W\)"), (lambda x: x[:1], {}, "two images"), (lambda x: x / 0, {}, "finite"),
     (lambda x: x, {"size": 4}, "odd size"), (lambda x: x, {"grid": 9}, "fit the images"),
     (lambda x: x, {"size": -1}, "size as a whole number"), (lambda x: x, {"grid": 0}, "grid as a whole number"),
     (torch.zeros_like, {}, "not flat"), (lambda x: x, {"num_features": 1}, "at least 2")],
)  # fmt: skip
def test_bad_images_are_refused(change, options, words):
    with pytest.raises(bb.BatchbayesError, match=words):
        patch_features(change(images(10)[0]), num_filters=8, **options)


def test_the_variational_layer_has_the_highest_elbo():
    """No shift and no other width of the Gaussian gives more of the ELBO, as an integral on a grid has it."""
    x, labels = torch.tensor([[1.0], [2.0], [-1.5]]).double(), torch.tensor([1, 1, 0])
    state = OnlineLastLayer.start(1, 1, bb.bernoulli(), 0.5, num_draws=600).update((x, labels), steps=40)

    def elbo(mean, precision):
        grid = torch.linspace(-8, 8, 4001, dtype=torch.float64)
        weights = mean + grid * precision**-0.5
        mass = (-0.5 * grid.square()).softmax(0)
        signs = 2.0 * labels - 1
        fit = torch.nn.functional.logsigmoid(signs * (weights[:, None] * x[:, 0])).sum(1)
        return float(mass @ (fit - 0.25 * weights.square())) - 0.5 * math.log(precision)

    mean, precision = float(state.mean), float(state.precision)
    best = elbo(mean, precision)
    assert best > max(elbo(mean + 0.2, precision), elbo(mean - 0.2, precision))
    assert best > max(elbo(mean, precision * 1.3), elbo(mean, precision / 1.3))
    laplace = OnlineLastLayer.start(1, 1, bb.bernoulli(), 0.5).update((x, labels))
    assert elbo(float(laplace.mean), float(laplace.precision)) < best
    exact = OnlineLastLayer.start(1, 3, bb.gaussian(4.0)).update((X, Y))
    drawn = OnlineLastLayer.start(1, 3, bb.gaussian(4.0), num_draws=3).update((X, Y))
    torch.testing.assert_close((drawn.mean, drawn.precision), (exact.mean, exact.precision))


def test_the_experiment_on_images_and_without_one_class_in_a_part():
    inputs, labels = images(80)
    first = labels == 0
    parts = [(inputs[first].flatten(1), labels[first]), (inputs[~first].flatten(1), labels[~first])]
    test = images(40)
    task = Task(parts, (test[0].flatten(1), test[1]), 2, bb.categorical())
    config = OnlineConfig(steps=20, wide_images=11, filters=16)
    online, joint = online_wide(config, task, 0), joint_on_first_features(config, task, 0)
    assert len(online) == 2
    assert abs(online[-1] - joint[-1]) < 0.1
    assert fine_tuned_wide(config, task, 0)[-1] > online[-1]
    names = [unit.name for unit in units(OnlineConfig(("mnist", "boston"), (0,)))]
    assert f"mnist, seed 0, {SAME_FEATURES}" in names
    assert f"boston, seed 0, {SAME_FEATURES}" not in names
    assert all(f"boston, seed 0, {method}" in names for method in (WIDE, TUNED_WIDE))
