from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from batchbayes import BatchbayesError
from batchbayes.report.read.examples import as_batch, from_tensors
from batchbayes.report.read.objects import from_object
from batchbayes.report.read.preprocess import Preprocessing, Standardise


def test_the_two_parts_of_a_split_are_the_whole_and_know_their_rows():
    x = torch.arange(500.0)[:, None]
    part, rest = from_tensors("x", x, x[:, 0]).split(0.3, seed=1)
    assert sorted(part.rows().tolist() + rest.rows().tolist()) == list(range(500))
    for some in (part, rest):
        assert torch.equal(some.rows().float(), some.targets())
        assert torch.equal(some.rows(), some.rows())
    assert 110 < len(part.rows()) < 190  # 150, with a standard deviation of 10
    assert not torch.equal(part.rows(), from_tensors("x", x, x[:, 0]).split(0.3, seed=2)[0].rows())


def test_a_loader_of_a_part_of_its_data_set_stays_in_that_part():
    """A subset sampler is how many people split a data set: what it leaves out belongs to another part."""
    dataset = TensorDataset(torch.arange(40.0)[:, None], torch.zeros(40))
    part = from_object("part", DataLoader(dataset, 4, sampler=range(10, 20)))
    whole = from_object("whole", DataLoader(dataset, 4))
    assert torch.cat([x for x, _ in part.evenly(5)]).flatten().tolist() == list(range(10, 20))
    assert torch.cat([x for x, _ in whole.evenly(4)]).flatten().tolist() == [0, 13, 26, 39]
    assert (len(part.rows()), len(whole.rows())) == (10, 40)


def test_taking_keeps_the_order_asked_for():
    x = torch.arange(300.0)[:, None]
    assert from_tensors("x", x).take([250, 3, 130])[:, 0].tolist() == [250, 3, 130]


class Photos(Dataset):
    """A data set in the style of torchvision."""

    samples = [(f"photos/{i}.jpg", i % 2) for i in range(5)]  # noqa: RUF012
    classes = ["cat", "dog"]  # noqa: RUF012

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        if index >= len(self):
            raise IndexError
        return torch.full((2,), float(index)), self.samples[index][1]


def with_attribute(**attributes):
    dataset = TensorDataset(torch.arange(3.0)[:, None])
    for name, value in attributes.items():
        setattr(dataset, name, value)
    return dataset


NAMES = tuple(f"photos/{i}.jpg" for i in range(5))


@pytest.mark.parametrize(
    ("made", "ids"),
    [
        (Photos(), NAMES),
        (DataLoader(Photos(), batch_size=2), NAMES),
        (Subset(Photos(), [3, 0]), (NAMES[3], NAMES[0])),
        (DataLoader(Subset(Subset(Photos(), [4, 3, 1]), [2, 0]), batch_size=2), (NAMES[1], NAMES[4])),
        (with_attribute(ids=np.array([7, 8, 9])), ("7", "8", "9")),
        (with_attribute(paths=[Path("a"), Path("b"), Path("c")]), ("a", "b", "c")),
        (with_attribute(ids=["too", "few"]), None),
        (with_attribute(ids=torch.zeros(3)), None),
        (with_attribute(ids=print, classes=10, name=len), None),
        (DataLoader(Photos(), sampler=[4, 3, 2, 1, 0]), None),
        (DataLoader(Photos(), batch_sampler=BatchSampler([4, 3], 2, False)), None),
        ([torch.zeros(2, 2)], None),
        (torch.zeros(2, 2), None),
    ],
)
def test_examples_have_the_ids_of_their_data_set(made, ids):
    examples = from_object("data", made)
    assert examples.ids() == ids
    assert examples.name == "data"


def test_ids_belong_to_the_examples():
    loader = DataLoader(Subset(Photos(), [4, 0, 2]), batch_size=2)
    examples = from_object("data", loader)
    inputs = torch.cat([inputs for inputs, _ in examples])
    assert [f"photos/{int(value)}.jpg" for value in inputs[:, 0]] == list(examples.ids())
    assert examples.class_names == ("cat", "dog")


@pytest.mark.parametrize("sampler", [SubsetRandomSampler(range(5)), WeightedRandomSampler([1.0] * 5, 5)])
def test_loaders_that_shuffle_are_refused(sampler):
    loader = DataLoader(Photos(), sampler=sampler)
    with pytest.raises(BatchbayesError, match="in the same order each time; got a loader that shuffles"):
        from_object("data", loader)
    assert from_object("data", loader, may_shuffle=True).ids() is None
    assert replace(from_object("data", Photos()), batches=loader).ids() is None


def test_arrays_are_taken_as_tensors():
    x, y = np.arange(6.0).reshape(3, 2), np.array([0, 1, 1])
    for made in ((x, y), [(x, y)], (x[::-1][::-1], y.astype(">i4"))):
        ((inputs, targets),) = from_object("data", made)
        assert (inputs.tolist(), targets.tolist()) == (x.tolist(), y.tolist())


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": torch.zeros(2)}, r"\(inputs, targets\) tensors; got a dict"),
        ((torch.zeros(2), {"y": 1}), r"got a tuple of Tensor, dict"),
        ((torch.tensor(1.0), torch.tensor(1.0)), r"got a tuple of Tensor, Tensor"),
        ([], "got a list"),
        (np.array(["a"]), "got a ndarray"),
        (torch.zeros(2, 2) * 1j, "real numbers in data; got complex"),
        ((torch.zeros(3, 2), torch.zeros(2)), "as many targets as inputs in data"),
        (torch.tensor([1.0, float("nan")]), "finite numbers in data; got 1 row"),
        ((torch.zeros(2, 1), torch.tensor([1.0, float("inf")])), "finite numbers in data; got 1 row"),
    ],
)
def test_batches_that_cannot_be_used_are_refused(batch, message):
    with pytest.raises(BatchbayesError, match=message):
        as_batch(batch, "data")


def test_examples_can_be_shown_as_they_were():
    prepared = Preprocessing(standardise=Standardise((1.0,), (2.0,)))
    examples = from_tensors("x", torch.ones(2, 1), preprocessing=prepared)
    assert examples.take([0]).tolist() == [[0]]
    assert examples.raw().take([0]).tolist() == [[1]]


def test_numbers_that_do_not_fit_into_64_bits_with_a_sign_are_refused():
    for large in (np.array([1, 2**63], np.uint64), torch.tensor([1, 2**63], dtype=torch.uint64)):
        with pytest.raises(BatchbayesError, match=r"below 2\^63"):
            as_batch((np.zeros((2, 1)), large), "given")
    assert as_batch((np.zeros((2, 1)), np.array([1, 2**62], np.uint64)), "given")[1].tolist() == [1, 2**62]
