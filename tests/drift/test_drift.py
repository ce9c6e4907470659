"""Drift as users meet it: laws, valid p-values, adapting, accuracy without labels, files, and bad input."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from helpers.cases import NETWORKS
from helpers.drift_cases import blobs
from helpers.references import left_alone, training_forward
from torch import nn

import batchbayes as bb

TRACKING = [name for name, case in NETWORKS.items() if case.tracks]
pytestmark = pytest.mark.filterwarnings("ignore:windows are compared with training examples")


def fitted(name="BatchNorm2d", count=240, **options):
    case = NETWORKS[name]
    network = case.network()
    return case, network, bb.drift(network, case.batches(count // 8), **options)


def accuracy(posterior, x, y):
    return float((posterior.function(posterior.center)(x).argmax(1) == y).double().mean())


@pytest.mark.parametrize("name", TRACKING)
def test_a_change_is_seen_on_every_kind_of_network(name):
    case, _, drift = fitted(name, 400)
    ordinary, changed = case.batches(4, seed=5), [batch * 3 + 4 for batch in case.batches(4, seed=6)]
    assert drift.report(ordinary).p_value > 0.01
    report = drift.report(changed)
    assert report.kind.startswith("inputs")
    assert report.p_value < 0.01
    assert set(report.sites) == {place.name for place in drift.sight.places}
    assert "have changed" in str(report)


@pytest.mark.parametrize("size", [1, 10, 100])
def test_ordinary_windows_are_called_changed_as_often_as_the_level_says(classifier, size):
    """Within four standard errors, which count 400 windows and 1,500 calibration examples."""
    _, drift = classifier
    x, _ = blobs(400 * size, 7)
    p_values = torch.tensor([_p_value(drift, window) for window in x.split(size)])
    for level in (0.05, 0.2):
        error = (level * (1 - level) * (1 / 400 + size / 1500 / 4)) ** 0.5
        assert (p_values <= level).double().mean() == pytest.approx(level, abs=4 * error)


def _p_value(drift, window):
    _, sample, _ = drift.seen(window, None)
    return drift.ordinary.evidence(sample, [place.size for place in drift.sight.places], windows=199).p_value


def test_another_mix_of_classes_is_told_apart_from_changed_inputs(classifier):
    _, drift = classifier
    mixes = [blobs(64, seed, (0.85, 0.05, 0.05, 0.05))[0] for seed in range(60)]
    kinds = [drift.report(x).kind for x in mixes]
    assert kinds.count("classes") >= 50
    assert drift.report(blobs(64, 90)[0] + 1.5).kind.startswith("inputs")


def test_adapting_repairs_a_shift_and_leaves_ordinary_data_alone(classifier):
    network, drift = classifier
    x, y = blobs(128, 11)
    drifted = 0.5 * x + 2.0
    before = float((network(drifted).argmax(1) == y).double().mean())
    assert accuracy(drift.adapt(drifted), drifted, y) > before + 0.1
    unchanged = [seed for seed in range(30, 50) if drift.adapt(blobs(64, seed)[0]).is_point]
    assert len(unchanged) >= 15  # at 5 % one of twenty is adapted
    x, _ = blobs(64, unchanged[0])
    posterior = drift.adapt(x)
    torch.testing.assert_close(posterior.function(posterior.center)(x), network(x), rtol=1e-4, atol=1e-4)


def test_a_window_of_few_classes_does_not_mislead_even_without_the_test(classifier):
    """Statistics of the batch itself would take the class for a drift."""
    network, drift = classifier
    x, y = blobs(64, 19, (0.94, 0.02, 0.02, 0.02))
    own = float((network(x).argmax(1) == y).double().mean())
    by_batch = float((training_forward(network, x).argmax(1) == y).double().mean())
    assert by_batch < own - 0.2
    assert accuracy(drift.adapt(x, gate=False), x, y) > own - 0.05


def test_the_trust_is_that_of_james_and_stein_site_after_site(classifier):
    """A naive version in float64, for one class mix: each layer is run by hand."""
    from batchbayes.drift.adapt import adapted_pass

    network, drift = classifier
    x = 0.5 * blobs(48, 3)[0] + 1.0
    moments, n, h, at = drift.moments, 48, x.double(), 0
    found = adapted_pass(drift.sight, moments, x, moments.shares, 1.0, 0.0)
    expected = (moments.shares @ moments.means).double()
    for layer in network:
        h = h.to(torch.float64)
        if not isinstance(layer, nn.BatchNorm1d):
            h = (
                nn.functional.linear(h, layer.weight.double(), layer.bias.double())
                if hasattr(layer, "weight")
                else layer(h)
            )
            continue
        width, std = layer.num_features, (layer.running_var + layer.eps).double().sqrt()
        first, second = expected[at : at + width], expected[at + width : at + 2 * width]
        noise = moments.within.double()[at : at + 2 * width] / n
        z = (h - layer.running_mean.double()) / std
        shift = z.mean(0) - first
        usual = second - first**2
        growth = (z.var(0, correction=0) / usual).log() / 2
        trust = [
            max(0.0, 1 - float(v.mean() / (d**2).mean()))
            for v, d in ((noise[:width], shift), (noise[width:] / (4 * usual**2), growth))
        ]
        torch.testing.assert_close(
            found.trust[at // (2 * 32)].double(), torch.tensor(trust).double(), rtol=1e-4, atol=1e-4
        )
        z = (z - trust[0] * shift) / (trust[1] * growth).exp()
        h = z * layer.weight.double() + layer.bias.double()
        at += 2 * width
    torch.testing.assert_close(found.logits, h, rtol=1e-3, atol=1e-3)


def test_an_adapted_posterior_is_one_like_any_other(classifier, tmp_path):
    network, drift = classifier
    x = blobs(64, 13)[0] + 1.5
    posterior = drift.adapt(x)
    assert not posterior.is_point
    sampled = bb.predict(posterior, x, bb.categorical(), num_samples=256, seed=1)
    linear = bb.predict(posterior, x, bb.categorical(), num_samples=256, engine="linear", seed=1)
    torch.testing.assert_close(sampled.probs, linear.probs, atol=0.1, rtol=0)
    assert sampled.mutual_information.mean() > 0
    bb.save(posterior, tmp_path / "adapted")
    again = bb.load(tmp_path / "adapted", network)
    assert torch.equal(again.draw(3, 5)(x), posterior.draw(3, 5)(x))


def test_what_a_window_leaves_unknown_falls_with_its_size(classifier):
    """Given the window, the variance at the first site is 2.25 lambda / (n + 8) times that of one example."""
    from batchbayes.drift.adapt import adapt_to
    from batchbayes.network.source import spread_evenly

    _, drift = classifier
    for n in (16, 256):
        x = blobs(n, 14)[0] + 1.5
        adapted, posterior = adapt_to(drift.sight, drift.moments, x), drift.adapt(x, gate=False)
        width, std, rows = 32, drift.sight.units[1, :32], drift.moments.rows[spread_evenly(64, 16)]
        assert len(posterior.deviations) == len(rows) == 16
        expected = adapted.trust[0, 0].sqrt() * std * rows[:, :width] * 1.5 / (n + 8) ** 0.5
        torch.testing.assert_close(posterior.deviations[:, :width], expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(drift.moments.rows.square().mean(0).sum(), drift.moments.within.sum(), rtol=0.1, atol=0)


def test_later_sites_of_a_draw_are_measured_after_earlier_ones_have_moved(classifier):
    """The second site of a draw sees what the first one makes of the window, by hand."""
    network, drift = classifier
    x = blobs(24, 5)[0] + 1.0
    posterior = drift.adapt(x, gate=False)
    omega = posterior.center + posterior.deviations[3]
    means, log_stds = omega[:32], omega[32:64]
    first, norm = network[0](x), network[1]
    h = (first - means) / log_stds.exp() * norm.weight + norm.bias
    seen = network[3](h.relu())  # the inputs of the second site
    moved = posterior.draw(0, 0)  # any draw has both sites in place
    assert moved(x).isfinite().all()
    far, near = ((seen.mean(0) - statistics).norm() for statistics in (drift.sight.units[0, 32:], omega[64:96]))
    assert near < far


def test_a_window_of_one_example(classifier):
    _, drift = classifier
    x = blobs(1, 15)[0]
    assert "little can be seen" in str(drift.report(x))
    assert drift.adapt(x + 9, gate=False).function(drift.adapt(x + 9, gate=False).center)(x).isfinite().all()


def test_accuracy_without_labels(classifier):
    network, drift = classifier
    for change in (lambda x: x, lambda x: x + 1.0, lambda x: 0.6 * x + 1):
        x, y = blobs(512, 16)
        report = drift.report(change(x))
        adapted = drift.adapt(change(x), gate=False)
        truth = accuracy(adapted, change(x), y)
        assert report.expected_accuracy.low <= truth <= report.expected_accuracy.high
        own = float((network(change(x)).argmax(1) == y).double().mean())
        assert report.network_accuracy.value == pytest.approx(own, abs=0.12)


def test_the_temperature_makes_a_window_as_sure_as_it_is_expected_to_be_right(classifier):
    from batchbayes.drift.adapt import adapt_to

    _, drift = classifier
    x, y = blobs(512, 26)
    drifted = x + 1.5 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0))
    report, logits = drift.report(drifted), adapt_to(drift.sight, drift.moments, drifted).logits
    scaled = logits / report.temperature
    assert float(scaled.softmax(1).amax(1).mean()) == pytest.approx(report.expected_accuracy.value, abs=1e-4)
    plain, calibrated = (float(nn.functional.cross_entropy(each, y)) for each in (logits, scaled))
    assert calibrated < plain
    assert drift.confidence.expected.max() > drift.confidence.expected.min() + 0.1  # some drifts are strong


def test_moments_of_a_window_are_those_of_float64():
    from batchbayes.drift.adapt import _window_moments

    h, std = 3 * torch.randn(6, 5, 7, 9) + 20, torch.linspace(0.5, 2, 5)
    for part in (h, h[..., 0, 0]):
        over = [d for d in range(part.ndim) if d != 1]
        variance, mean = torch.var_mean(part.double() / std.view(-1, *[1] * (part.ndim - 2)), over, correction=0)
        found = _window_moments(part, std)
        torch.testing.assert_close(found, (mean.float(), variance.float()), rtol=1e-3, atol=1e-4)


def test_two_logits_are_two_classes_if_labels_say_so(classifier):
    network, _ = classifier
    two = nn.Sequential(*network, nn.Linear(4, 2, bias=False))
    with torch.no_grad():
        two[-1].weight.copy_(torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]]))
    x, y = blobs(1000, 31)
    drift = bb.drift(two, blobs(1000, 30)[0], calibration=[(x, (y >= 2).long())])
    window, labels = blobs(400, 32)
    report = drift.report(window)
    right = float((two(window).argmax(1) == (labels >= 2)).double().mean())
    assert report.network_accuracy.low <= right <= report.network_accuracy.high
    assert drift.sets(window).shape == (400, 2)
    assert drift.report(blobs(200, 33, (0.45, 0.45, 0.05, 0.05))[0]).kind == "classes"
    unlabelled = bb.drift(two, blobs(1000, 30)[0], calibration=x)
    assert unlabelled.report(window).expected_accuracy is None


def test_one_logit_is_told_in_words(classifier):
    network, _ = classifier
    one = nn.Sequential(*network, nn.Linear(4, 1))
    x, y = blobs(200, 31)
    with pytest.warns(bb.BatchbayesWarning, match="the network has one output"):
        drift = bb.drift(one, x, calibration=[(x, (y >= 2).long())])
    assert drift.report(x).network_accuracy is None


def test_sets_hold_the_truth_also_after_a_drift(classifier):
    _, drift = classifier
    for change in (0.0, 1.0):
        x, y = blobs(512, 17)
        sets = drift.sets(x + change, 0.9)
        assert sets.gather(1, y[:, None]).double().mean() > 0.85
        assert sets.any(1).all()


def test_words_name_what_changed_in_images_and_tables():
    case, _, drift = fitted("BatchNorm2d", 400)
    x = torch.cat(case.batches(8, seed=5))
    assert drift.report(x + 3).changes[0].what == "brightness"
    assert {change.what for change in drift.report(x * 0.2).changes} >= {"contrast"}
    case, _, drift = fitted("BatchNorm1d (N, C)", 400)
    x = torch.cat(case.batches(8, seed=5))
    x[:, 2] += 5
    assert "column 2" in drift.report(x).changes[0].what


def test_the_network_is_left_alone():
    case = NETWORKS["BatchNorm2d"]
    network = case.network().train()
    network[1].register_forward_hook(print)
    with left_alone(network):
        drift = bb.drift(network, case.batches(10))
        drift.report(case.batches(1)[0])
        drift.adapt(case.batches(1)[0] + 3, gate=False)


def test_threads_get_the_same_answers():
    case, _, drift = fitted()
    windows = [batch + i for i, batch in enumerate(case.batches(6, seed=4))]
    expected, found = [drift.report(x) for x in windows], {}

    def work(i):
        found[i] = drift.report(windows[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(windows))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i].p_value for i in range(6)] == [each.p_value for each in expected]
    assert all(torch.equal(found[i].trust, each.trust) for i, each in enumerate(expected))


def test_saved_and_loaded_in_a_new_process(tmp_path):
    case, network, drift = fitted()
    x = case.batches(1, seed=2)[0] + 2
    bb.save(drift, tmp_path / "drift")
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch, batchbayes as bb; from pathlib import Path; sys.path.insert(0, 'tests'); "
        "from helpers.cases import NETWORKS; folder = Path(sys.argv[1]); "
        "drift = bb.load(folder / 'drift', NETWORKS['BatchNorm2d'].network()); x = torch.load(folder / 'x.pt'); "
        "report = drift.report(x); torch.save([drift.adapt(x, gate=False).center, report.trust], folder / 'y.pt'); "
        "print(report)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    report = drift.report(x)
    assert done.stdout.strip() == str(report)
    center, trust = torch.load(tmp_path / "y.pt")
    assert torch.equal(center, drift.adapt(x, gate=False).center)
    assert torch.equal(trust, report.trust)
    assert repr(bb.load(tmp_path / "drift", network)) == repr(drift)


def test_labels_of_calibration_data_are_saved_as_what_they_taught(classifier, tmp_path):
    network, drift = classifier
    bb.save(drift, tmp_path / "drift")
    x = blobs(64, 18)[0] + 1
    assert bb.load(tmp_path / "drift", network).report(x).expected_accuracy == drift.report(x).expected_accuracy


def test_a_file_is_refused_by_another_network(tmp_path):
    bb.save(fitted()[2], tmp_path / "drift")
    other = NETWORKS["BatchNorm2d"].network()
    with torch.no_grad():
        other[0].weight.mul_(2.0)
    with pytest.raises(bb.BatchbayesError, match="got other weights"):
        bb.load(tmp_path / "drift", other)


def test_the_same_seed_gives_the_same_answers():
    case, network, drift = fitted(seed=3)
    x = case.batches(1, seed=2)[0] + 0.5
    again = bb.drift(network, case.batches(30), seed=3).report(x)
    assert (again.p_value, again.class_p_value) == (drift.report(x).p_value, drift.report(x).class_p_value)


def test_an_iterator_is_read_once():
    case, network, drift = fitted(calibration=NETWORKS["BatchNorm2d"].batches(20, seed=9))
    once = bb.drift(network, iter(case.batches(30)), calibration=case.batches(20, seed=9))
    x = case.batches(1, seed=2)[0]
    assert once.report(x).p_value == drift.report(x).p_value
    bb.drift(network, iter(case.batches(30)))


def test_a_classifier_without_calibration_data_is_warned_of():
    case = NETWORKS["BatchNorm2d"]
    with pytest.warns(bb.BatchbayesWarning, match="compared with training examples"):
        bb.drift(case.network(), case.batches(15))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.drift(case.network(), case.batches(15), calibration=case.batches(10, seed=9))


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda d, x: d.report(x[:0]), "at least one example"),
        (lambda d, x: d.report(x * float("nan")), "finite numbers"),
        (lambda d, x: d.adapt("words"), "got a "),
        (lambda d, x: d.report(x[:, :1]), "inputs that"),
        (lambda d, x: d.sets(x), "labelled calibration data"),
        (lambda d, x: d.monitor(false_alarms=2.0), "between 0 and 1"),
        (lambda d, x: d.monitor(memory=0), "memory"),
        (lambda d, x: bb.drift(d.network.module, x[:10]), "at least 40"),
        (lambda d, x: bb.drift(d.network.module, x.repeat(6, 1, 1, 1), calibration=x[:10]), "at least 40"),
        (lambda d, x: bb.drift(nn.Linear(2, 2), torch.randn(50, 2)), "batch normalisation"),
    ],
)
def test_bad_input_is_refused_in_words(call, match):
    case, _, drift = fitted()
    with pytest.raises(bb.BatchbayesError, match=match):
        call(drift, case.batches(1)[0])


def test_labels_that_are_no_classes_are_refused(classifier):
    network, _ = classifier
    x, y = blobs(200, 1)
    with pytest.raises(bb.BatchbayesError, match="labels of calibration data from 0 to 3"):
        bb.drift(network, x, calibration=[(x, y + 1)])
    with pytest.raises(bb.BatchbayesError, match="a coverage between 0 and 1"):
        bb.drift(network, x, calibration=[(x, y)]).sets(x, 1.5)


@pytest.mark.parametrize("labels", [lambda y: y.tolist(), lambda y: nn.functional.one_hot(y, 4), lambda y: y[:50]])
def test_labels_that_are_no_class_numbers_are_told(classifier, labels):
    network, _ = classifier
    x, y = blobs(200, 40)
    with pytest.warns(bb.BatchbayesWarning, match="the labels of calibration= are no class numbers"):
        assert bb.drift(network, blobs(300, 41)[0], calibration=[(x, labels(y))]).confidence is None
