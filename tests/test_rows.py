"""Rows in, rows out: what is returned for N inputs has N rows in their order, and long data is read to its end."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import batchbayes as bb

pytestmark = pytest.mark.filterwarnings(
    "ignore:windows are compared with", "ignore:novelty:", "ignore:the labels of calibration"
)


class Stream(IterableDataset):
    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


FORMS = {
    "list": lambda x: list(x.split(50)),
    "pairs": lambda x: [(part, part[:, 0].double()) for part in x.split(50)],
    "data set": TensorDataset,
    "loader": lambda x: DataLoader(TensorDataset(x), 50),
    "loader of a stream": lambda x: DataLoader(Stream(x), 50),
    "generator": lambda x: iter(x.split(50)),
}
RANDOM = torch.Generator().manual_seed(0)


def blobs(count: int) -> tuple[Tensor, Tensor]:
    """Four classes, in their order."""
    labels = torch.arange(4).repeat_interleave(count // 4)
    return torch.randn(len(labels), 4, generator=RANDOM) + 4 * torch.eye(4)[labels], labels


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    x, y = blobs(2000)
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for rows in torch.randint(2000, (150, 100), generator=RANDOM):
        optimiser.zero_grad()
        nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
        optimiser.step()
    return network.eval()


@pytest.fixture(scope="module")
def drift(network):
    x, y = blobs(4000)
    return bb.drift(network, blobs(4000)[0], calibration=[(x, y)])


@pytest.fixture(scope="module")
def detector(network):
    return bb.novelty(network, blobs(2000)[0], calibration=blobs(1000)[0])


X, Y = blobs(5000)


@pytest.mark.parametrize("form", FORMS)
def test_all_rows_come_back_in_their_order(network, drift, detector, form):
    posterior = bb.mcbn(network, X, batch_size=100, num_samples=4)
    for function in (
        lambda data: bb.predict(posterior, data, bb.categorical(), num_samples=2).probs,
        lambda data: detector.report(data, whole=False).p_value,
        lambda data: detector.score(data),
        lambda data: drift.sets(data, 0.9),
    ):
        found, expected = function(FORMS[form](X)), function(X)
        assert len(found) == 5000
        torch.testing.assert_close(found, expected)


def test_sets_of_many_rows_hold_the_truth(drift):
    sets = drift.sets(X, 0.9)
    assert sets.shape == (5000, 4)
    assert float(sets[torch.arange(5000), Y].double().mean()) > 0.88
    torch.testing.assert_close(drift.sets(X[:1024], 0.9), drift.sets(list(X[:1024].split(100)), 0.9))


@pytest.mark.parametrize("form", FORMS)
def test_a_window_is_read_to_its_end(drift, form):
    """Ordinary rows first, and many others after them."""
    window = torch.cat([X[torch.randperm(5000, generator=RANDOM)[:1100]], X[::2] + 3])
    found, expected = drift.report(FORMS[form](window)), drift.report(window)
    assert found.kind == expected.kind == "inputs"
    assert (found.p_value, found.num_examples) == (expected.p_value, expected.num_examples)
    assert found.sites == expected.sites
    adapted, usual = drift.adapt(FORMS[form](window)), drift.adapt(window)
    assert torch.equal(adapted.center, usual.center)


@pytest.mark.parametrize("form", FORMS)
def test_a_fit_reads_all_of_its_data(network, form):
    """The data is in the order of classes."""
    drifts = [bb.drift(network, data, calibration=held) for data, held in ((X, X), (FORMS[form](X), FORMS[form](X)))]
    assert torch.equal(*(each.moments.means for each in drifts))
    assert torch.equal(*(each.ordinary.rows for each in drifts))
    detectors = [bb.novelty(network, data, calibration=X, num_examples=1000) for data in (X, FORMS[form](X))]
    for part in ("ordinary_parts", "calibration_scores"):
        torch.testing.assert_close(*(getattr(each, part) for each in detectors))
    statistics = [bb.clt_bn(network, data, batch_size=50) for data in (X, FORMS[form](X))]
    torch.testing.assert_close(*(each.deviations for each in statistics))


def test_calibration_in_the_order_of_classes_is_read_to_its_end(network):
    x, y = blobs(6000)
    window = X[torch.randperm(5000, generator=RANDOM)[:200]]
    forms = DataLoader(TensorDataset(x, y), 100), [(x, y)]
    loaded, whole = (bb.drift(network, X, calibration=data).report(window) for data in forms)
    assert loaded.network_accuracy == whole.network_accuracy is not None
    assert (loaded.p_value, loaded.class_p_value) == (whole.p_value, whole.class_p_value)


def test_figures_do_not_depend_on_the_default_dtype(network):
    def figures() -> list[Tensor]:
        x = X[torch.randperm(5000, generator=torch.Generator().manual_seed(1))]
        fitted = bb.drift(network, x[:200], calibration=[(x[200:400], Y[200:400])])
        watched = bb.novelty(network, x[:200], calibration=x[200:400])
        dropped = bb.mc_dropout(nn.Sequential(network, nn.Dropout(0.5)))
        report = fitted.report(x[400:500] + 1)
        return [
            torch.tensor([report.p_value, report.class_p_value], dtype=torch.float64),
            fitted.sets(x[400:500] + 1),
            watched.p_value(x[400:500] + 1),
            bb.predict(dropped, x[:50], bb.categorical(), num_samples=3).probs,
        ]

    usual = figures()
    torch.set_default_dtype(torch.float64)
    try:
        assert all(map(torch.equal, figures(), usual))
    finally:
        torch.set_default_dtype(torch.float32)
