"""What `predict` reads: the order and the kinds of data."""

import pytest
import torch
from helpers.cases import NETWORKS
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import batchbayes as bb


@pytest.fixture(scope="module")
def posterior():
    case = NETWORKS["BatchNorm1d (N, C)"]
    return bb.mcbn(case.network(torch.float64), case.batches(9, dtype=torch.float64), num_samples=9)


@pytest.fixture(scope="module")
def x():
    return torch.randn(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", ["tensor", "list", "pairs", "dicts", "loader", "loader without targets", "function"])
def test_data_of_every_kind(posterior, x, kind):
    y = torch.zeros(11)
    data, inputs = {
        "tensor": (x, None),
        "list": ([x[:4], x[4:]], None),
        "pairs": ([(x[:4], y[:4]), (x[4:], y[4:])], None),
        "dicts": ([{"label": y[:4], "image": x[:4]}, {"label": y[4:], "image": x[4:]}], "image"),
        "loader": (DataLoader(TensorDataset(x, y), batch_size=3), None),
        "loader without targets": (DataLoader(x, batch_size=3), None),  # type: ignore[arg-type]
        "function": ([(y[:4], [x[:4]]), (y[4:], [x[4:]])], lambda batch: batch[1][0]),
    }[kind]
    expected = bb.predict(posterior, x, bb.categorical(), num_samples=3).probs
    torch.testing.assert_close(
        bb.predict(posterior, data, bb.categorical(), num_samples=3, inputs=inputs).probs, expected
    )


def test_a_loader_that_shuffles_is_told(posterior, x):
    data = TensorDataset(x, torch.zeros(11))
    with pytest.warns(bb.BatchbayesWarning, match=r"RandomSampler.*another order"):
        bb.predict(posterior, DataLoader(data, batch_size=4, shuffle=True), bb.categorical(), num_samples=2)
    bb.predict(posterior, DataLoader(data, batch_size=4), bb.categorical(), num_samples=2)
    list(bb.predict_stream(posterior, DataLoader(data, 4, shuffle=True), [bb.categorical()], num_samples=2))


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_a_loader_that_leaves_examples_out_is_told(posterior, x):
    loader = DataLoader(TensorDataset(x, torch.zeros(11)), batch_size=4, drop_last=True)
    with pytest.warns(bb.BatchbayesWarning, match=r"drop_last=True, so the last 3 of 11 examples get no prediction"):
        assert len(bb.predict(posterior, loader, bb.categorical(), num_samples=2).probs) == 8
    with pytest.warns(bb.BatchbayesWarning, match=r"drop_last=True, so the last examples get no prediction"):
        bb.predict(posterior, DataLoader(Stream(x), 4, drop_last=True), bb.categorical(), num_samples=2)
    whole = DataLoader(TensorDataset(x[:8]), batch_size=4, drop_last=True)  # nothing is left out
    assert len(bb.predict(posterior, whole, bb.categorical(), num_samples=2).probs) == 8


@pytest.mark.parametrize("kind", ["array", "pair", "list pair", "TensorDataset", "Dataset", "arrays"])
def test_arrays_pairs_and_data_sets(posterior, x, kind):
    y = torch.zeros(11, dtype=torch.long)
    data = {
        "array": x.numpy(),
        "pair": (x, y),
        "list pair": [x.numpy(), y.numpy()],
        "TensorDataset": TensorDataset(x, y),
        "Dataset": [(row, 0) for row in x],
        "arrays": [(x[:4].numpy(), y[:4].numpy()), (x[4:].numpy(), y[4:])],
    }[kind]
    if kind == "Dataset":
        data = ListOf(data)
    expected = bb.predict(posterior, x, bb.categorical(), num_samples=3).probs
    torch.testing.assert_close(bb.predict(posterior, data, bb.categorical(), num_samples=3).probs, expected)
    pieces = bb.predict_stream(posterior, data, [bb.categorical()], num_samples=3, chunk_size=4)
    torch.testing.assert_close(torch.cat([piece.predictives[0].probs for piece in pieces]), expected)


class ListOf(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda x: x[0, 0], "a batch that is a tensor"),
        (lambda x: x.to_sparse(), "the inputs as a plain tensor"),
        (lambda x: x.to("meta"), "the inputs as a plain tensor"),
        (lambda x: torch.nested.nested_tensor([x[:2], x[:3]]), "the inputs as a plain tensor; got a nested one"),
    ],
)
def test_tensors_of_an_unusual_kind_are_refused_in_words(make, message):
    posterior = bb.deterministic(torch.nn.Linear(4, 3))
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.predict(posterior, make(torch.randn(6, 4)), bb.categorical())


def test_the_global_generator_is_left_as_it_was(posterior, x):
    """A DataLoader without a generator of its own draws a number for each pass."""
    before = torch.get_rng_state()
    bb.predict(posterior, TensorDataset(x), bb.categorical(), num_samples=2)
    assert torch.equal(torch.get_rng_state(), before)


def test_outputs_of_different_sizes_come_batch_by_batch():
    network = nn.Conv2d(1, 3, 1)
    batches = [torch.zeros(2, 1, 4, 4), torch.zeros(2, 1, 3, 5)]
    with pytest.raises(bb.BatchbayesError, match=r"shapes \(N, 4, 4\) and \(N, 3, 5\).*use predict_stream"):
        bb.predict(bb.deterministic(network), batches, bb.categorical(class_axis=1))
    with pytest.raises(bb.BatchbayesError, match=r"shapes \(N\) and \(N, 3\)"):
        bb.predict(bb.deterministic(nn.Identity()), iter([torch.zeros(2), torch.zeros(2, 3)]), bb.gaussian(1.0))
    found = bb.predict_stream(bb.deterministic(network), batches, [bb.categorical(class_axis=1)])
    assert [tuple(each.predictives[0].probs.shape) for each in found] == [(2, 4, 4, 3), (2, 3, 5, 3)]
