"""What a file computes, before it is a file: the numbers of `predict`, for every posterior that can be exported."""

import pytest
import torch
from helpers.cases import CASES, CONTRACT, CROP_AND_FLIP, POSTERIORS, SHIFT_AND_SCALE, moved
from torch import nn

import batchbayes as bb
from batchbayes.calibrate import conformal_intervals
from batchbayes.export.detectors import Detector
from batchbayes.export.program import build_program

REFUSED = {"mcbn, query in its batch", "jitter"}
"""Methods whose draws are functions of their own. All others predict the same."""


def outputs(program, inputs):
    with torch.no_grad():
        return program(inputs)


def assert_same(found, predictive, names, tolerance=2e-6):
    for name, attribute in names.items():
        expected = getattr(predictive, attribute)
        torch.testing.assert_close(
            found[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


CLASSES = {name: name for name in ("probs", "entropy", "mutual_information")}
VALUES = {"pred_mean": "mean", "pred_std": "std"}


@pytest.mark.parametrize(("method", "name"), CONTRACT)
def test_a_program_predicts_as_predict_does_or_is_refused(method, name):
    case = CASES[name]
    network, batches = case.network(), case.batches(6)
    posterior, inputs = POSTERIORS[method](network, batches), torch.cat(case.batches(2, seed=5))
    options = {"num_samples": 7, "seed": 3}
    if method in REFUSED:
        with pytest.raises(bb.BatchbayesError, match="a function of its own"):
            build_program(posterior, inputs[:3], bb.categorical(), **options)
        return
    program = build_program(posterior, inputs[:3], bb.categorical(temperature=1.7), **options)
    predictive = bb.predict(posterior, inputs, bb.categorical(temperature=1.7), **options)
    assert_same(outputs(program, inputs), predictive, CLASSES)
    assert_same(
        outputs(program, inputs[:1]), bb.predict(posterior, inputs[:1], predictive.likelihood, **options), CLASSES
    )


@pytest.mark.parametrize("kind", ["classes", "values"])
def test_the_row_that_sets_the_threshold_is_not_flagged(kind):
    network, inputs = regression(3 if kind == "classes" else 1), torch.randn(40, 3)
    likelihood = bb.categorical() if kind == "classes" else bb.gaussian(precision=2.0)
    posterior = bb.mcbn(network, torch.randn(64, 3), batch_size=8, num_samples=8)
    seen = bb.predict(posterior, inputs, likelihood, num_samples=8)
    uncertainty = seen.entropy if kind == "classes" else seen.epistemic_variance.sqrt()[:, 0]
    for row, threshold in enumerate(uncertainty.tolist()):
        program = build_program(posterior, inputs[:3], likelihood, num_samples=8, threshold=threshold)
        found = outputs(program, inputs)["flag"]
        assert not found[row]
        assert found.sum() == (uncertainty > threshold).sum()


def test_an_ensemble_has_a_draw_for_each_member():
    network, inputs = regression(3), torch.randn(9, 3)
    samples = bb.weight_samples(network, moved(network, 3))
    program = build_program(samples, inputs, bb.categorical())
    assert program.draws.passes == 3
    assert_same(outputs(program, inputs), bb.predict(samples, inputs, bb.categorical()), CLASSES)


def regression(outputs=1):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, outputs)).eval()


@pytest.mark.parametrize(
    "likelihood",
    [bb.gaussian(4.0), bb.gaussian([4.0, 0.5]), bb.heteroscedastic_gaussian()],
    ids=["one precision", "two precisions", "heteroscedastic"],
)
def test_real_targets(likelihood):
    posterior, inputs = bb.mcbn(regression(2), torch.randn(64, 3), batch_size=8, num_samples=6), torch.randn(9, 3)
    predictive = bb.predict(posterior, inputs, likelihood, num_samples=6)
    program = build_program(posterior, inputs, likelihood, num_samples=6)
    assert_same(outputs(program, inputs), predictive, VALUES)


def test_conformal_intervals_and_the_flag_are_those_of_python():
    posterior, inputs = bb.mcbn(regression(), torch.randn(64, 3), batch_size=8, num_samples=6), torch.randn(40, 3)
    predictive = bb.predict(posterior, inputs, bb.gaussian(9.0), num_samples=6)
    conformal = conformal_intervals(predictive, torch.randn(40), level=0.8)
    threshold = float(predictive.epistemic_variance.sqrt().median())
    options = {"num_samples": 6, "conformal": conformal, "threshold": threshold}
    found = outputs(build_program(posterior, inputs, bb.gaussian(9.0), **options), inputs)
    for name, expected in zip(("lower", "upper"), conformal(predictive), strict=True):
        torch.testing.assert_close(found[name], expected)
    assert found["flag"].tolist() == (predictive.epistemic_variance.sqrt()[:, 0] > threshold).tolist()
    assert 0 < found["flag"].sum() < 40


def test_the_flag_counts_every_target():
    posterior, inputs = bb.mcbn(regression(2), torch.randn(64, 3), batch_size=8, num_samples=6), torch.randn(40, 3)
    spread = bb.predict(posterior, inputs, bb.gaussian(9.0), num_samples=6).epistemic_variance.sqrt()
    threshold = float(spread[:, 1].quantile(0.7)) + 1e-4
    program = build_program(posterior, inputs, bb.gaussian(9.0), num_samples=6, threshold=threshold)
    assert outputs(program, inputs)["flag"].tolist() == (spread > threshold).any(1).tolist()
    assert (spread[:, 0] > threshold).tolist() != (spread > threshold).any(1).tolist()


@pytest.mark.parametrize("shape", [(5,), (5, 1), (5, 3)], ids=str)
def test_yes_or_no(shape):
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = regression(shape[-1] if len(shape) > 1 else 1)

        def forward(self, x):
            return self.body(x).reshape(-1, *shape[1:])

    posterior = bb.mcbn(Head().eval(), torch.randn(64, 3), batch_size=8, num_samples=6)
    inputs = torch.randn(9, 3)
    predictive = bb.predict(posterior, inputs, bb.bernoulli(1.4), num_samples=6)
    assert_same(
        outputs(build_program(posterior, inputs, bb.bernoulli(1.4), num_samples=6), inputs), predictive, CLASSES
    )


@pytest.mark.parametrize("transform", [CROP_AND_FLIP, SHIFT_AND_SCALE], ids=["crop and flip", "shift and scale"])
@pytest.mark.parametrize("average", [1, 2])
def test_maps_are_moved_back_from_their_views(transform, average):
    network = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 3, 1)).eval()
    posterior = bb.with_views(bb.mcbn(network, torch.randn(32, 2, 8, 9), batch_size=4), transform, average=average)
    inputs = torch.randn(5, 2, 8, 9)
    predictive = bb.predict(posterior, inputs, bb.categorical(), num_samples=6)
    threshold = float(predictive.entropy.flatten(1).mean(1).median())
    program = build_program(posterior, inputs, bb.categorical(), num_samples=6, threshold=threshold)
    found = outputs(program, inputs)
    assert_same(found, predictive, CLASSES)
    assert found["flag"].tolist() == (predictive.entropy.flatten(1).mean(1) > threshold).tolist()


@pytest.mark.parametrize(
    ("name", "logits"), [("BatchNorm2d", None), ("BatchNorm1d (N, C)", None), ("BatchNorm1d (N, C)", False)]
)
def test_the_detector_gives_the_p_values_of_python(name, logits):
    case = CASES[name]
    network, inputs = (
        case.network(),
        torch.cat(case.batches(10, seed=5)) * torch.linspace(0.5, 3, 80).reshape(80, *[1] * len(case.shape)),
    )
    train, calibration = (torch.cat(case.batches(20, seed=seed)) for seed in (0, 1))
    detector = bb.novelty(network, train, calibration=calibration, logits=logits)
    with torch.no_grad():
        found = Detector(detector, detector.sight.network)(inputs)
    expected = detector.p_value(inputs, whole=False)
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert expected.unique().numel() > 15
    program = build_program(bb.deterministic(network), inputs, bb.categorical(), novelty=detector, novelty_level=0.05)
    whole = outputs(program, inputs)
    assert torch.equal(whole["novelty"], found)
    assert whole["flag"].tolist() == (expected <= 0.05).tolist()


def test_an_ensemble_sees_the_output_of_its_members():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = regression(3)

        def forward(self, x):
            return {"other": x, "logits": self.body(x)}

    network, inputs = Two().eval(), torch.randn(9, 3)
    mcbn = bb.mcbn(network, torch.randn(64, 3), batch_size=8, output="logits")
    posterior = bb.ensemble([mcbn, bb.deterministic(network, output="logits")])
    program = build_program(posterior, inputs, bb.categorical(), num_samples=6)
    assert_same(outputs(program, inputs), bb.predict(posterior, inputs, bb.categorical(), num_samples=6), CLASSES)


def test_a_bank_has_one_row_for_each_pass_and_the_weights_once():
    posterior = bb.with_views(
        bb.mcbn(CASES["BatchNorm2d"].network(), CASES["BatchNorm2d"].batches(4)), bb.RandomFlip(), average=3
    )
    step = build_program(posterior, torch.randn(3, 2, 8, 8), bb.categorical(), num_samples=5).draws.step
    assert {len(rows) for rows in step.bank.rows} == {15}
    names = {name.removeprefix("network.") for name, _ in step.named_parameters()}
    assert names == {name for name, _ in posterior.network.module.named_parameters()}


def test_what_cannot_be_exported_says_why():
    network, inputs = regression(), torch.randn(5, 3)
    posterior = bb.mcbn(network, torch.randn(64, 3), batch_size=8)
    own = bb.with_views(posterior, lambda x, _: x)
    with pytest.raises(bb.BatchbayesError, match="ready transforms"):
        build_program(own, inputs, bb.gaussian(1.0))
    with pytest.raises(bb.BatchbayesError, match="drop conformal="):
        build_program(posterior, inputs, bb.bernoulli(), conformal=bb.calibrate.ConformalIntervals(0.9, 2.0))
    with pytest.raises(bb.BatchbayesError, match="one of our own likelihoods"):
        build_program(posterior, inputs, type("Mine", (), {"summary": lambda self: None})())
    classes = regression(3)
    laplace = bb.last_layer_laplace(classes, inputs, bb.categorical(), prior_precision=1.0)
    unlike = bb.ensemble([laplace, bb.deterministic(classes)])
    with pytest.raises(bb.BatchbayesError, match="differ in their views or in the layer that is random"):
        build_program(unlike, inputs, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="draws of several networks"):
        build_program(bb.ensemble([classes, regression(3)]), inputs, bb.categorical())
    query = bb.mcbn(network, torch.randn(64, 3), batch_size=8, include_query=True)
    with pytest.raises(bb.BatchbayesError, match="a function of its own"):
        build_program(query, inputs, bb.gaussian(1.0))
    with pytest.raises(bb.BatchbayesError, match="a posterior of one network"):
        build_program(type("Other", (), {"is_point": False})(), inputs, bb.gaussian(1.0))


@pytest.mark.parametrize("kind", ["plain", "tied", "computed from other parameters"])
def test_a_last_layer_may_share_its_weights(kind):
    network, inputs = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), torch.randn(5, 3)
    if kind == "tied":
        network[2].weight = network[0].weight
    elif kind != "plain":
        network[2] = nn.utils.parametrizations.weight_norm(network[2])
    laplace = bb.last_layer_laplace(network, inputs, bb.categorical(), prior_precision=1.0)
    for posterior in (laplace, bb.with_views(laplace, bb.TableJitter(0.1, (1.0, 1.0, 1.0)))):
        expected = bb.predict(posterior, inputs, bb.categorical(), num_samples=5)
        found = outputs(build_program(posterior, inputs, bb.categorical(), num_samples=5), inputs)
        assert_same(found, expected, CLASSES)
