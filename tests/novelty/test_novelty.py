"""Novelty as users meet it: laws, valid p-values, files, and bad input."""

import subprocess
import sys
import threading
import warnings

import pytest
import torch
from helpers.cases import NETWORKS
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes.export.detectors import Detector
from batchbayes.novelty.detector import EVERYDAY
from batchbayes.novelty.scores import surprise

TRACKING = [name for name, case in NETWORKS.items() if case.tracks]

ROUNDING = {"rtol": 1e-3, "atol": 1e-3}
"""Passes in float32 round differently with other neighbours, and distances subtract large numbers."""
TABLE, UNTRACKED = NETWORKS["affine=False"], NETWORKS["track_running_stats=False"]


pytestmark = pytest.mark.filterwarnings(
    "ignore:the p-values are calibrated on training examples", "ignore:novelty. the .* inputs together are unlike"
)


def fitted(name="BatchNorm2d", count=120, **options):
    case = NETWORKS[name]
    network = case.network()
    return case, network, bb.novelty(network, case.batches(count // 8), **options)


def assert_same(first, second):
    torch.testing.assert_close(first.score, second.score, **ROUNDING)
    torch.testing.assert_close(first.p_value, second.p_value, rtol=0, atol=0.05)
    assert first.site == second.site


@pytest.mark.parametrize("name", TRACKING)
def test_strange_inputs_have_small_p_values_on_every_kind_of_network(name):
    case, _, detector = fitted(name, 400)
    ordinary, strange = case.batches(25, seed=5), [batch * 6 + 9 for batch in case.batches(3, seed=6)]
    assert detector.p_value(strange).max() <= 0.02
    assert detector.p_value(ordinary).mean() == pytest.approx(0.5, abs=0.15)
    report = detector.report(strange)
    assert report.score.min() > detector.score(ordinary).median()
    assert set(report.site) <= {place.name for place in detector.sight.places}
    assert (report.site_p_value < 0.05).all()


@pytest.mark.parametrize("name", TRACKING)
def test_an_answer_depends_on_its_input_alone(name):
    case, _, detector = fitted(name)
    x = torch.cat(case.batches(3, seed=3))
    whole = detector.report(x)
    alone = [detector.report(x[i : i + 1]) for i in range(4)]
    torch.testing.assert_close(whole.score[:4], torch.cat([one.score for one in alone]), **ROUNDING)
    assert whole.site[:4] == tuple(one.site[0] for one in alone)
    assert_same(whole, detector.report([(part, 0) for part in x.split(5)]))
    assert_same(whole, detector.report(x, chunk_size=7))


def test_threads_get_the_same_answers():
    case, _, detector = fitted()
    inputs = case.batches(8, seed=4)
    expected = [detector.report(x) for x in inputs]
    found = {}

    def work(i):
        found[i] = detector.report(inputs[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(inputs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, one in enumerate(expected):
        assert torch.equal(found[i].score, one.score)
        assert found[i].site == one.site


def test_the_network_is_left_alone():
    case = NETWORKS["BatchNorm2d"]
    network = case.network().train()
    network[1].register_forward_hook(print)
    with left_alone(network):
        bb.novelty(network, case.batches(10)).report(case.batches(1)[0])


def test_the_same_seed_gives_the_same_detector():
    case, network, detector = fitted(seed=3)
    x = case.batches(1, seed=2)[0]
    assert torch.equal(detector.score(x), bb.novelty(network, case.batches(15), seed=3).score(x))
    assert not torch.equal(detector.score(x), bb.novelty(network, case.batches(15), seed=4).score(x))


def test_saved_and_loaded_in_a_new_process(tmp_path):
    case, network, detector = fitted()
    x = case.batches(1, seed=2)[0]
    bb.save(detector, tmp_path / "novelty.safetensors")
    again = bb.load(tmp_path / "novelty.safetensors", network)
    assert repr(again) == repr(detector)
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch, batchbayes as bb; from pathlib import Path; sys.path.insert(0, 'tests'); "
        "from helpers.cases import NETWORKS; folder = Path(sys.argv[1]); "
        "detector = bb.load(folder / 'novelty.safetensors', NETWORKS['BatchNorm2d'].network()); "
        "report = detector.report(torch.load(folder / 'x.pt')); "
        "torch.save([report.score, report.p_value, report.site_p_value], folder / 'y.pt'); print(*report.site)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=True)
    expected = detector.report(x)
    assert tuple(done.stdout.split()) == expected.site == again.report(x).site
    found = torch.load(tmp_path / "y.pt")
    assert all(map(torch.equal, found, [expected.score, expected.p_value, expected.site_p_value]))
    assert torch.equal(again.score(x), expected.score)


def test_a_file_is_refused_by_another_network(tmp_path):
    bb.save(fitted()[2], tmp_path / "novelty")
    with pytest.raises(bb.BatchbayesError, match="no layer"):
        bb.load(tmp_path / "novelty", NETWORKS["BatchNorm1d (N, C)"].network())
    other = NETWORKS["BatchNorm2d"].network()
    with torch.no_grad():
        other[0].weight.mul_(2.0)  # the running statistics stay
    with pytest.raises(bb.BatchbayesError, match="got other weights"):
        bb.load(tmp_path / "novelty", other)
    assert isinstance(bb.load(tmp_path / "novelty", other, other_weights=True), bb.Novelty)


def test_a_classifier_without_calibration_data_is_warned_of():
    case = NETWORKS["BatchNorm2d"]
    train, others = case.batches(15), case.batches(10, seed=9)
    with pytest.warns(bb.BatchbayesWarning, match=r"calibrated on training examples.* Pass data .* calibration="):
        bb.novelty(case.network(), train)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        bb.novelty(case.network(), train, calibration=others)
        bb.novelty(case.network(), train, logits=False)  # a regression is not so sure of its training data


@pytest.mark.parametrize("held_out", [False, True])
def test_the_share_of_ordinary_inputs_that_is_flagged(held_out):
    """Over many fits the mean of the flagged share equals floor((m + 1) a) / (m + 1), within four standard errors."""
    case = NETWORKS["BatchNorm1d (N, C)"]
    network = case.network()
    shares: dict[float, list[float]] = {0.05: [], 0.2: []}
    for seed in range(40):
        train, calibration, test = (torch.cat(case.batches(20, seed=3 * seed + i + 100)) for i in range(3))
        options = {"calibration": calibration} if held_out else {}
        detector = bb.novelty(network, train, seed=seed, **options)
        p_values = detector.p_value(test)
        count = len(detector.calibration_scores)
        for level, found in shares.items():
            found.append(float((p_values <= level).double().mean()))
    assert count == (160 if held_out else 40)
    for level, found in shares.items():
        expected = int((count + 1) * level + 1e-9) / (count + 1)
        values = torch.tensor(found).double()
        assert abs(values.mean() - expected) < 4 * values.std() / len(values) ** 0.5


def test_more_statistics_than_examples():
    case, _, detector = fitted("BatchNorm2d", 48)
    assert detector.sight.size > 24
    assert detector.p_value(case.batches(4, seed=8)).mean() > 0.2
    assert detector.p_value(case.batches(1, seed=8)[0] * 20).max() < 0.1


def test_dead_channels_are_no_problem():
    case = NETWORKS["BatchNorm2d"]
    network = case.network()
    with torch.no_grad():
        network[0].weight[1], network[0].bias[1] = 0, 0
        network[1].running_mean[1], network[1].running_var[1] = 0, 0
    detector = bb.novelty(network, case.batches(15))
    assert detector.score(case.batches(1, seed=2)[0]).isfinite().all()


def test_inputs_that_overflow_are_novel():
    case, _, detector = fitted()
    x = case.batches(1, seed=2)[0]
    x[0] = 1e30
    report = detector.report(x)
    assert report.score.isfinite().all()
    assert report.score.argmax() == 0
    assert report.p_value[0] == report.p_value.min()


def test_regression_and_maps_of_logits():
    torch.manual_seed(0)
    regression = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1)).eval()
    detector = bb.novelty(regression, torch.randn(200, 3))
    assert detector.ordinary_parts.shape == (50, 1)
    assert bb.novelty(regression, torch.randn(200, 3), logits=True).ordinary_parts.shape == (50, 2)
    maps = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 5, 1)).eval()
    x = torch.randn(64, 2, 8, 8)
    detector = bb.novelty(maps, x)
    assert detector.ordinary_parts.shape == (16, 2)
    with torch.no_grad():
        energy = -maps(x).logsumexp(1).mean((1, 2)).double()
    _, kept = detector.sight(x)
    torch.testing.assert_close(-kept[:, 0], energy, rtol=1e-5, atol=1e-5)
    assert detector.score(torch.randn(3, 2, 12, 12)).shape == (3,)


def test_log_probabilities_change_nothing_where_last_features_answer():
    case = NETWORKS["BatchNorm2d"]
    plain, x = case.network(), torch.cat(case.batches(20, seed=5))
    first, second = (bb.novelty(each, case.batches(50)) for each in (plain, nn.Sequential(plain, nn.LogSoftmax(1))))
    assert (first.sight.last, second.sight.last) == ("10", "0.10")
    assert torch.equal(first.score(x), second.score(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_have_no_energy_and_their_rounding_errors_do_not_count(dtype):
    """In a network without last features: its head is a convolution."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1), nn.AdaptiveAvgPool2d(1)
    )
    network = nn.Sequential(*network, nn.Flatten(), nn.LogSoftmax(1)).eval().to(dtype)
    batches, x = torch.randn(400, 3, 8, 8).to(dtype), torch.randn(160, 3, 8, 8).to(dtype)
    with pytest.warns(bb.BatchbayesWarning, match="log-probabilities, it seems.*does without it"):
        detector = bb.novelty(network, batches)
    assert detector.sight.last is None
    distance, _, evidence = surprise(detector.ordinary_parts, detector.parts(*detector.sight(x))[0]).T
    torch.testing.assert_close(detector.score(x), nn.functional.softplus(distance - EVERYDAY) + evidence / 2)
    exported = Detector(detector, detector.sight.network)(x)
    torch.testing.assert_close(exported.double(), detector.p_value(x), **ROUNDING)


def test_a_stream_without_end_is_read_up_to_some_number_of_examples(monkeypatch):
    monkeypatch.setattr("batchbayes.network.source.MOST_READ", 400)
    case = NETWORKS["BatchNorm2d"]
    read = []

    def endless():
        while True:
            read.append(1)
            yield case.batches(1)[0]

    detector = bb.novelty(case.network(), endless(), num_examples=100)
    assert len(detector.calibration_scores) == 25
    assert sum(len(case.batches(1)[0]) for _ in read) <= 450


@pytest.mark.parametrize(
    ("build", "batches", "options", "message"),
    [
        (nn.Tanh, torch.randn(100, 4), {}, "norm, linear or convolution layers"),
        (UNTRACKED.network, torch.randn(100, 4), {}, "running statistics in every"),
        (TABLE.network, torch.randn(30, 4), {}, "at least 40 training examples"),
        (TABLE.network, [], {}, "at least 40 training examples"),
        (TABLE.network, torch.full((100, 4), torch.nan), {}, "finite numbers in the inputs"),
        (
            TABLE.network,
            torch.randn(100, 4),
            {"calibration": torch.randn(5, 4)},
            "at least 40 calibration examples",
        ),
    ],
)  # fmt: skip
def test_bad_training_data_is_refused(build, batches, options, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.novelty(build(), batches, **options)


def test_too_few_calibration_examples_are_told_before_any_pass():
    case, passes = NETWORKS["BatchNorm2d"], []
    network = case.network()
    network.register_forward_hook(lambda *_: passes.append(1))
    for few in (case.batches(4), torch.cat(case.batches(4)), torch.utils.data.DataLoader(torch.randn(39, 2, 8, 8), 8)):
        with pytest.raises(bb.BatchbayesError, match="at least 40 calibration examples"):
            bb.novelty(network, case.batches(15), calibration=few)
    assert not passes
    assert "At least 40 examples are needed" in bb.novelty.__doc__


def test_a_flipped_bit_in_a_file_is_noticed(tmp_path):
    _, network, detector = fitted()
    path = tmp_path / "novelty.safetensors"
    bb.save(detector, path)
    content = bytearray(path.read_bytes())
    for place in range(len(content) - 1, len(content) // 3, -(len(content) // 9)):
        damaged = bytearray(content)
        damaged[place] ^= 1 << 6
        path.write_bytes(damaged)
        with pytest.raises(bb.BatchbayesError):
            bb.load(path, network)
    path.write_bytes(content)
    assert isinstance(bb.load(path, network), bb.Novelty)


def test_a_network_with_nan_weights_is_refused():
    case = NETWORKS["BatchNorm2d"]
    network = case.network()
    with torch.no_grad():
        network[0].weight[0] = torch.nan
    with pytest.raises(bb.BatchbayesError, match="finite numbers in the statistics"):
        bb.novelty(network, case.batches(10))


def test_bad_inputs_are_refused():
    case, _, detector = fitted()
    x = case.batches(1)[0]
    x[0, 0] = torch.nan
    with pytest.raises(bb.BatchbayesError, match="finite numbers in the inputs"):
        detector.score(x)
    with pytest.raises(bb.BatchbayesError, match="at least one example"):
        detector.score(x[:0])
    with pytest.raises(bb.BatchbayesError, match="channels"):
        detector.score(torch.randn(3, 7, 8, 8))
    for level in (0.0, 0.001, 1.5, "0.1"):
        with pytest.raises(bb.BatchbayesError, match="a level from"):
            detector.flag(case.batches(1)[0], level)
    assert detector.flag(case.batches(1)[0] * 50, 0.1).all()


def test_training_data_in_the_order_of_its_classes_is_read_from_all_of_it():
    """The first 60 examples are of one class. A detector that was fitted to them would flag the other class."""
    x = torch.cat([torch.randn(200, 4), torch.randn(200, 4) + 8])
    network = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 2))
    network(x)
    network.eval()
    dataset = torch.utils.data.TensorDataset(x, torch.arange(400) // 200)
    loader = torch.utils.data.DataLoader(dataset, 32)
    for data in (x, x.numpy(), (x, dataset.tensors[1]), dataset, loader):
        detector = bb.novelty(network, data, num_examples=60)
        assert detector.flag(x, 0.1).float().mean() < 0.4, type(data)
        assert len(detector.calibration_scores) == 15


def test_batch_norm_over_the_positions_of_all_inputs_is_refused():
    """Rows of such a layer belong to no single input, and there are more of them than inputs."""
    network = nn.Sequential(
        nn.Flatten(0, 1), nn.BatchNorm1d(4), nn.Unflatten(0, (-1, 5)), nn.Flatten(), nn.Linear(20, 1)
    )
    with pytest.raises(
        bb.BatchbayesError, match=r"each of 64 inputs at the batch-norm layer 1; got .* shape \(320, 4\)"
    ):
        bb.novelty(network, torch.randn(64, 5, 4))


class SameTensor(nn.Module):
    """A stand-in for a network whose outputs are always in the same tensor."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.held = body, torch.zeros(500, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[: len(x)].copy_(self.body(x))


def test_outputs_may_always_be_in_the_same_tensor():
    x = torch.randn(300, 4).double()
    body = nn.Sequential(nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3)).double()
    body(x)
    data = list(x.split(50))
    expected, found = (bb.novelty(network, data).score(x) for network in (body.eval(), SameTensor(body).eval()))
    torch.testing.assert_close(found, expected)
