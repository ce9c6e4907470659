"""Novelty on networks with norms of every kind or none, and of whole batches."""

import importlib
import math
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import batchbayes as bb
from batchbayes.export.detectors import Detector
from batchbayes.network.function import as_network
from batchbayes.novelty.detector import FEWEST_OF_CLASS, FINE, _fitted
from batchbayes.novelty.scores import generalised_entropy, surprise
from batchbayes.novelty.statistics import FLOOR, LEAST_STD, layer_means, watch_any

pytestmark = pytest.mark.filterwarnings(
    "ignore:the p-values are calibrated on training examples", "ignore:novelty. the .* inputs together are unlike"
)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of images, as timm and ConvNeXt have it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class OwnRMSNorm(nn.Module):
    """A norm that is no module of torch, as in language models."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def images(norm: nn.Module | None) -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3, padding=1), *([norm] if norm else []), nn.ReLU(), nn.Conv2d(4, 6, 3)]
    return nn.Sequential(*layers, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def tokens(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), norm, nn.GELU(), nn.Linear(8, 8), nn.Flatten(), nn.Linear(40, 3))


IMAGE, SEQUENCE = (2, 8, 8), (5, 3)
CASES = {
    "GroupNorm": (lambda: images(nn.GroupNorm(2, 4)), IMAGE, {"1": 1, "7": 1}),
    "InstanceNorm": (lambda: images(nn.InstanceNorm2d(4)), IMAGE, {"1": 1, "7": 1}),
    "LayerNorm2d": (lambda: images(LayerNorm2d(4)), IMAGE, {"1": 1, "7": 1}),
    "LayerNorm of maps": (lambda: images(nn.LayerNorm([4, 8, 8])), IMAGE, {"1": 1, "7": 1}),
    "LayerNorm": (lambda: tokens(nn.LayerNorm(8)), SEQUENCE, {"1": 2, "5": 1}),
    "RMSNorm": (lambda: tokens(nn.RMSNorm(8)), SEQUENCE, {"1": 2, "5": 1}),
    "own RMSNorm": (lambda: tokens(OwnRMSNorm(8)), SEQUENCE, {"1": 2, "5": 1}),
    "none": (lambda: images(None), IMAGE, {"0": 1, "2": 1, "6": 1}),
    "none, table": (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), (4,), {"0": 1, "2": 1}),
}
"""Networks, the shape of an input, and the layers that are watched with the axis of their channels. The last one is the
last linear layer of a classifier."""
MIXED = ("LayerNorm2d", "LayerNorm of maps", "LayerNorm", "RMSNorm", "own RMSNorm")
"""Here statistics are those along principal directions of the channels."""


def built(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    torch.manual_seed(0)
    build, shape, _ = CASES[name]
    return build().eval(), shape


def inputs(count: int, shape: tuple[int, ...], seed: int = 1) -> Tensor:
    return torch.randn(count, *shape, generator=torch.Generator().manual_seed(seed))


def naive_statistics(h: Tensor, axis: int, unit: Tensor) -> list[float]:
    """The statistics of one example, in plain loops over its channels, in float64."""
    channels = h.double().movedim(axis - 1, 0).reshape(h.shape[axis - 1], -1)
    means, seconds, variances = [], [], []
    for values, mean, std in zip(channels, *unit.double(), strict=True):
        scaled = [(float(value) - float(mean)) / float(std) for value in values]
        z = sum(scaled) / len(scaled)
        means.append(z)
        seconds.append(math.log(sum(v * v for v in scaled) / len(scaled) + FLOOR))
        variances.append(math.log(sum((v - z) ** 2 for v in scaled) / len(scaled) + FLOOR))
    return means + seconds + variances if h.ndim > 1 else means


def rotated(h: Tensor, axis: int, directions: Tensor) -> Tensor:
    """Project the channels of each position on each direction, in plain loops over channels."""
    channels = h.double().movedim(axis, 0)
    each = [sum(float(w) * channel for w, channel in zip(row, channels, strict=True)) for row in directions.T]
    return torch.stack(each).movedim(0, axis)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", MIXED)
def test_principal_directions_leave_channels_uncorrelated(name):
    network, shape = built(name)
    seen: list[Tensor] = []
    network[1].register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().double()))
    sight = watch_any(as_network(network), inputs(50, shape), None)
    values = sight.along_channels(sight.places[0], seen[0]).movedim(1, 0).flatten(1)
    covariance = torch.cov(values)
    torch.testing.assert_close(covariance, covariance.diag().diag(), rtol=0, atol=1e-5)
    spread = seen[0].movedim(sight.places[0].axis, 0).flatten(1).var(1)
    assert float(covariance.trace()) == pytest.approx(float(spread.sum()), rel=1e-5)
    assert float(covariance.diag().max() / covariance.diag().min()) > 2 * float(spread.max() / spread.min())


def test_what_no_single_channel_shows_is_found_at_a_layer_norm():
    """Channels that are nearly copies of each other, and inputs in which each is as usual, but they are not."""
    network = nn.Sequential(nn.LayerNorm(2), nn.Flatten(), nn.Linear(40, 3)).eval()

    def pairs(count: int, seed: int) -> Tensor:
        first = inputs(count, (20, 1), seed)
        return torch.cat([first, first + 0.01 * inputs(count, (20, 1), seed + 1)], 2)

    detector = bb.novelty(network, pairs(400, 1), calibration=pairs(200, 3))
    apart = torch.cat([pairs(50, 5)[..., :1], pairs(50, 6)[..., :1]], 2)
    assert detector.p_value(apart).max() < 0.02


@pytest.mark.parametrize("name", CASES)
def test_statistics_equal_a_naive_version_at_the_layers_that_are_named(name):
    network, shape = built(name)
    reference, x = inputs(50, shape), inputs(4, shape, 2)
    sight = watch_any(as_network(network), reference, None)
    assert {place.name: place.axis for place in sight.places} == CASES[name][2]
    assert list(sight.directions) == (["1"] if name in MIXED else [])
    assert sight.last == (None if name == "none, table" else sight.places[-1].name)
    seen: dict[str, list[Tensor]] = {place.name: [] for place in sight.places}
    for place in sight.places:
        network.get_submodule(place.name).register_forward_pre_hook(
            lambda _, args, place=place: seen[place.name].append(args[0].detach())
        )
    with torch.no_grad():
        network(reference), network(x)
    found, start = sight(x)[0], 0
    for place, unit in zip(sight.places, sight.units.split([p.channels for p in sight.places], 1), strict=True):
        ordinary, h = seen[place.name][:2]  # the hooks run in our pass as well
        if place.name in sight.directions:
            ordinary, h = (rotated(each, place.axis, sight.directions[place.name]) for each in (ordinary, h))
        values = ordinary.double().movedim(place.axis, 0).flatten(1)
        torch.testing.assert_close(unit.double()[0], values.mean(1), rtol=1e-4, atol=1e-5)
        std = values.var(1, correction=0).sqrt()
        if place.name in sight.directions:
            std = std.clamp_min(LEAST_STD * std.max())  # the channels of a linear layer fill no more than its inputs
        torch.testing.assert_close(unit.double()[1], std, rtol=1e-4, atol=1e-5)
        expected = torch.tensor([naive_statistics(row, place.axis, unit) for row in h])
        torch.testing.assert_close(found[:, start : start + place.size], expected, rtol=1e-3, atol=1e-3)
        start += place.size
    assert start == found.shape[1] == sight.size


@pytest.mark.parametrize("name", CASES)
def test_strange_inputs_are_found_and_files_and_threads_agree(name, tmp_path):
    network, shape = built(name)
    detector = bb.novelty(network, inputs(400, shape), calibration=inputs(200, shape, 2))
    ordinary, strange = inputs(200, shape, 3), inputs(20, shape, 4) * 6 + 9
    assert detector.p_value(strange).max() <= 0.02
    assert float(detector.flag(ordinary, 0.1).double().mean()) == pytest.approx(0.1, abs=0.1)
    bb.save(detector, tmp_path / "novelty")
    again = bb.load(tmp_path / "novelty", network)
    first, second = detector.report(strange), again.report(strange)
    assert torch.equal(first.score, second.score)
    assert first.batch == second.batch
    assert repr(again) == repr(detector)
    scores: list[Tensor] = []
    threads = [threading.Thread(target=lambda: scores.append(detector.score(ordinary, whole=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(score, detector.score(ordinary, whole=False)) for score in scores)
    exported = Detector(detector, detector.sight.network)(ordinary)
    torch.testing.assert_close(exported.double(), detector.p_value(ordinary), rtol=0, atol=0.02)


def test_a_file_is_refused_by_a_network_with_other_layers(tmp_path):
    network, shape = built("GroupNorm")
    bb.save(bb.novelty(network, inputs(100, shape)), tmp_path / "novelty")
    other = nn.Sequential(*network[:2], nn.ReLU(), nn.GroupNorm(2, 4), *network[3:])
    with pytest.raises(bb.BatchbayesError, match=r"an unknown layer 3 of class GroupNorm"):
        bb.load(tmp_path / "novelty", other)


def test_layers_that_are_gone_are_refused_in_words():
    network, shape = built("LayerNorm")
    detector = bb.novelty(network, inputs(100, shape))
    network[1] = nn.Identity()
    with pytest.raises(bb.BatchbayesError, match="the norm layers that the detector was fitted to; got none at 1"):
        detector.score(inputs(3, shape))


@pytest.mark.parametrize("size", [1, 7, 64])
def test_units_do_not_need_a_large_first_batch(size):
    network, shape = built("none, table")
    data = inputs(128, shape)
    whole, parts = (bb.novelty(network, each) for each in (data, list(data.split(size))))
    torch.testing.assert_close(whole.sight.units, parts.sight.units, rtol=1e-4, atol=1e-5)


def test_generalised_entropy_and_means_of_layers_by_definition():
    logits = inputs(3, (130,)).double() * 3
    for row, found in zip(logits, generalised_entropy(logits), strict=True):
        p = sorted((math.exp(float(v)) / sum(math.exp(float(w)) for w in row) for v in row), reverse=True)
        terms = sorted(((q * (1 - q)) ** 0.1 for q in p), reverse=True)
        assert float(found) == pytest.approx(sum(terms[:100]))
    network, shape = built("none")
    sight = watch_any(as_network(network), inputs(50, shape), None)
    z, start, expected = inputs(2, (sight.size,)), 0, []
    for place in sight.places:
        for _ in range(place.size // place.channels):
            part = z[:, start : start + place.channels]
            expected.append(part.mean(1))
            start += place.channels
        if not place.positions:
            expected.append((part.square().mean(1) + FLOOR).log())
    torch.testing.assert_close(layer_means(sight.places, z), torch.stack(expected, 1))


def test_the_parts_of_last_features_and_their_sum_by_definition():
    network, shape = built("GroupNorm")
    with torch.no_grad():
        network[7].bias -= network(inputs(400, shape)).mean(0)  # so that it predicts every class
    detector = bb.novelty(network, inputs(400, shape), calibration=inputs(100, shape, 2))
    statistics, logits = detector.sight(inputs(6, shape, 3))
    unit = detector.sight.units[:, -6:].double()
    parts, features = detector.parts(statistics, logits)[0], statistics[:, -6:].double()
    with torch.no_grad():
        torch.testing.assert_close(features * unit[1] + unit[0], network[:7](inputs(6, shape, 3)).double())

    def covariance(gaussian) -> Tensor:
        narrow = gaussian.directions.double() @ gaussian.directions.double().T
        return torch.linalg.inv(torch.eye(6).double() / gaussian.rest - narrow)

    def log_density(z: Tensor, centre: Tensor, spread: Tensor) -> float:
        return float(torch.distributions.MultivariateNormal(centre, spread).log_prob(z))

    assert logits.argmax(1).unique().numel() > 1
    within, common = detector.features.within, detector.features.common
    for row, f, logit in zip(parts, features, logits, strict=True):
        z, spread = within.standardise(f).double(), covariance(within)
        of_class = [log_density(z, centre, spread) for centre in within.centres.double()]
        around = log_density(z, torch.zeros(6).double(), spread)
        assert float(row[2]) == pytest.approx(-math.log(sum(math.exp(each - around) for each in of_class)), abs=1e-3)
        own = -2 * (
            of_class[int(logit.argmax())] - log_density(within.centres[0].double(), within.centres[0].double(), spread)
        )
        y, wide = common.standardise(f).double(), covariance(common)
        usual = y @ torch.linalg.inv(wide) @ y
        assert float(row[3]) == pytest.approx(own - float(usual), abs=1e-3)
    surprises = torch.tensor([[0.1, 1.0, 3.0], [40.0, 2.0, 2.0]]).double()
    expected = [math.log(1 + math.exp(0.1 - 1)) + 2.0, math.log(1 + math.exp(39.0)) + 2.0]
    torch.testing.assert_close(detector.sum_of(surprises), torch.tensor(expected).double())
    torch.testing.assert_close(detector.sum_of(surprises[:, :1]), surprises[:, 0])


def test_files_of_before_last_features_keep_their_score(tmp_path):
    """Their header has no word about last features, directions or everyday distances."""
    network, shape = built("GroupNorm")
    sight = watch_any(as_network(network), inputs(64, shape), None)
    statistics, logits = sight(inputs(300, shape))
    old = replace(sight, places=sight.places[:-1], units=sight.units[:, :-6], last=None)
    detector, _ = _fitted(old, statistics[:200, :-6], logits[:200], True)
    parts, sites, _ = detector.parts(statistics[200:, :-6], logits[200:])
    detector = replace(detector, ordinary_parts=parts, ordinary_sites=sites, everyday=None)
    detector = replace(detector, calibration_scores=detector.sum_of(surprise(parts, parts)))
    header, tensors = detector.state()
    for word in ("last", "directions", "everyday"):
        header.pop(word, None)
    again = bb.Novelty.restore(header, tensors, network)
    x = inputs(20, shape, 3)
    assert torch.equal(again.score(x), detector.score(x))
    found = surprise(parts, detector.parts(*old(x))[0])
    torch.testing.assert_close(again.score(x), found[:, 0] + 0.5 * (found[:, 1] + found[:, 2]))


def test_classes_and_statistics_that_the_reference_cannot_support():
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(2, 60, 3), nn.GroupNorm(4, 60), nn.ReLU(), nn.Conv2d(60, 60, 1), nn.GroupNorm(4, 60)
    )
    network = nn.Sequential(*network, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(60, 30)).eval()
    few, many = (bb.novelty(network, inputs(count, IMAGE), calibration=inputs(60, IMAGE, 2)) for count in (80, 600))
    assert few.sight.size > FINE * 60
    assert few.coarse is not None
    assert many.coarse is None
    assert 450 >= FEWEST_OF_CLASS * 30 > 60
    assert (few.ordinary_parts.shape[1], many.ordinary_parts.shape[1]) == (2, 4)
    assert (len(few.gaussian.centres), len(many.gaussian.centres)) == (1, 30)
    x = inputs(5, IMAGE, 3)
    statistics, logits = few.sight(x)
    parts = few.parts(statistics, logits)[0]
    y = few.coarse.standardise(layer_means(few.sight.places, few.gaussian.standardise(statistics))).double()
    covariance = (
        torch.eye(y.shape[1]).double() / few.coarse.rest
        - few.coarse.directions.double() @ few.coarse.directions.double().T
    )
    torch.testing.assert_close(parts[:, 0], ((y @ covariance) * y).sum(1), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(parts[:, 1], generalised_entropy(logits))
    assert "in means" in repr(few)
    assert few.p_value(x * 8).max() < 0.05


def test_a_reference_that_is_too_small_is_told():
    layers = [layer for _ in range(12) for layer in (nn.Conv2d(8, 8, 1), nn.GroupNorm(1, 8))]
    network = nn.Sequential(nn.Conv2d(2, 8, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)).eval()
    with pytest.warns(
        bb.BatchbayesWarning, match=r"30 examples are few .* 12 layers .* at least 144 training examples"
    ):
        bb.novelty(network, inputs(40, IMAGE), calibration=inputs(40, IMAGE, 2))


@pytest.mark.filterwarnings("error:novelty")
def test_a_batch_that_was_prepared_in_another_way_is_told_in_words():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=None), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
    network = nn.Sequential(*network, nn.Flatten(), nn.Linear(8, 3))
    colours = torch.tensor([0.2, 0.0, -0.2]).view(3, 1, 1)

    def photographs(count: int, seed: int) -> Tensor:
        own = inputs(count, (3, 1, 1), seed)
        return 0.5 * own + colours + 0.5 * inputs(count, (3, 10, 10), seed + 1000)

    network(photographs(400, 1))
    network.eval()
    detector = bb.novelty(network, photographs(600, 2), calibration=photographs(300, 3))
    told = [detector.report(photographs(32, seed)).batch for seed in range(10, 30)]
    assert all("look like ordinary ones" in str(batch) for batch in told)
    assert detector.report(photographs(15, 5)).batch is None
    assert detector.report(photographs(32, 5), whole=False).batch is None
    for strange, word in ((0.5 * photographs(32, 6) + 0.5, "contrast|spread"), (photographs(32, 7).flip(1), "channel")):
        with pytest.warns(bb.BatchbayesWarning, match=f"32 inputs together are unlike .* ({word}).* order of channels"):
            report = detector.report(strange)
        assert report.batch is not None
        assert report.batch.is_unusual


def test_p_values_of_ordinary_batches_are_not_too_small():
    """Over 40 fits, each with one new batch, at most 5 % + four standard errors have a p-value of 5 % or less."""
    network, _ = built("none, table")
    small = []
    for seed in range(40):
        detector = bb.novelty(network, inputs(120, (4,), 3 * seed), calibration=inputs(100, (4,), 3 * seed + 1))
        small.append(detector.report(inputs(20, (4,), 3 * seed + 2)).batch.p_value <= 0.05)
    assert sum(small) / 40 <= 0.05 + 4 * (0.05 * 0.95 / 40) ** 0.5


def test_the_postprocessor_for_openood(monkeypatch):
    """Beside a stand-in for OpenOOD's base class, with batches as its loaders have them."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))
    NoveltyPostprocessor = importlib.import_module("examples.openood_postprocessor").NoveltyPostprocessor  # noqa: N806

    network, shape = built("GroupNorm")
    loaders = {"train": [{"data": x, "label": 0} for x in inputs(200, shape).split(50)]}
    loaders["val"] = [{"data": inputs(100, shape, 2), "label": 0}]
    postprocessor, x = NoveltyPostprocessor(None), torch.cat([inputs(20, shape, 3), inputs(20, shape, 4) * 6 + 9])
    with pytest.raises(bb.BatchbayesError, match="setup"):
        postprocessor.postprocess(network, x)
    postprocessor.setup(network, loaders, None)
    classes, confidence = postprocessor.postprocess(network, x)
    assert torch.equal(classes, network(x).argmax(1))
    assert confidence[:20].min() > confidence[20:].max()
    assert postprocessor.detector is not None
    assert len(postprocessor.detector.calibration_scores) == 100
