import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from batchbayes import BatchbayesError
from batchbayes.batches import chunks, input_stream, mini_batches, pick_inputs

X = torch.arange(24.0).view(12, 2)


def first(stream, count):
    return list(itertools.islice(stream, count))


# Pickers


@pytest.mark.parametrize(
    ("batch", "picker"),
    [
        (X, None),
        ((X, torch.ones(12)), None),
        ([X], None),
        ({"image": X, "label": torch.ones(12)}, "image"),
        ((torch.ones(12), X), 1),
        (SimpleNamespace(x=X), lambda batch: batch.x),
    ],
)
def test_inputs_are_found_in_a_batch(batch, picker):
    assert pick_inputs(batch, picker) is X


@pytest.mark.parametrize(
    ("batch", "picker", "message"),
    [
        ({"a": X, "b": X}, "c", r"inputs at 'c'; got a dict with keys \['a', 'b'\]"),
        ((X,), 1, "inputs at 1; got a tuple"),
        (SimpleNamespace(), 0, "inputs at 0; got a SimpleNamespace"),
        ({"a": X}, None, r"got a dict with keys \['a'\]. Do this: say where the inputs are"),
        ([], None, "got a list"),
        (X.numpy(), None, "got a ndarray. Do this: convert it with torch.from_numpy"),
        (torch.tensor(1.0), None, r"got a tensor of shape \(\)"),
        ((X,), lambda batch: "text", "got a tuple"),
    ],
)
def test_a_batch_without_inputs_says_what_it_has(batch, picker, message):
    with pytest.raises(BatchbayesError, match=message):
        pick_inputs(batch, picker)


# Streams


def test_a_tensor_is_one_batch_and_an_iterable_several():
    assert [batch is X for batch in input_stream(X)] == [True]
    assert [len(batch) for batch in input_stream([X[:5], (X[5:], None)])] == [5, 7]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_number_that_is_not_finite_stops_the_stream_at_its_batch(bad):
    stream = input_stream([X, X.clone().index_put_((torch.tensor(3), torch.tensor(1)), torch.tensor(bad))])
    assert next(stream) is X
    with pytest.raises(BatchbayesError, match="1 of 24 that are NaN or infinite"):
        next(stream)


def test_integers_and_large_numbers_pass():
    large = torch.full((2, 2), 3e38)  # their sum is infinite
    assert len(list(input_stream([large, torch.ones(2, dtype=torch.long)]))) == 2


def test_something_else_is_an_error():
    with pytest.raises(BatchbayesError, match="a tensor or an iterable of batches; got a int"):
        input_stream(3)  # type: ignore[arg-type]


# Mini-batches


def test_a_tensor_gives_endless_shuffled_batches_by_the_seed():
    size, stream = mini_batches(X, 5, seed=1)
    batches = first(stream, 50)
    assert size == 5
    for batch in batches:
        rows = (batch[:, 0] / 2).tolist()
        assert len(set(rows)) == 5  # without replacement
    counts = torch.cat(batches)[:, 0].div(2).long().bincount(minlength=12)
    assert counts.min() > 5  # 250 examples over 12 rows: 20.8 each, with a standard deviation of 3.5
    again, other = (torch.stack(first(mini_batches(X, 5, seed=seed)[1], 50)) for seed in (1, 2))
    assert torch.equal(again, torch.stack(batches))
    assert not torch.equal(other, torch.stack(batches))


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [1] * 12, [12], [5, 7], [2, 9, 1]])
@pytest.mark.parametrize("batch_size", [2, 5, 12])
def test_batches_are_cut_and_joined_in_order(sizes, batch_size):
    size, stream = mini_batches(X.split(sizes), batch_size)
    batches = list(stream)
    assert size == batch_size
    assert [len(batch) for batch in batches] == [batch_size] * (12 // batch_size)  # the rest is dropped
    assert torch.equal(torch.cat(batches), X[: 12 // batch_size * batch_size])


def test_a_generator_is_read_once_and_only_as_far_as_needed():
    read = []

    def source():
        for part in X.split(4):
            read.append(len(part))
            yield part

    _, stream = mini_batches(source(), 4)
    next(stream)
    assert read == [4]
    assert len(list(stream)) == 2


def test_a_loader_is_read_again_and_again():
    loader = DataLoader(TensorDataset(X, torch.ones(12)), batch_size=5)
    size, stream = mini_batches(loader, None)
    assert size == 5
    found = first(stream, 5)
    assert [batch[0, 0].item() for batch in found] == [0, 10, 0, 10, 0]  # two batches a pass


def test_the_batch_size_is_that_of_the_first_batch_unless_given():
    assert mini_batches([X[:5], X[5:]], None)[0] == 5
    assert mini_batches([X[:5], X[5:]], 3)[0] == 3


@pytest.mark.parametrize(
    ("data", "batch_size", "message"),
    [
        (X, None, "batch_size="),
        (X, 1, "batch of one"),
        (X, 13, "at least 13 training examples, one batch; got 12"),
        (X.split(6), 13, "at least 13 training examples, one batch; got 12"),
        ([X[:1], X[1:2]], None, "batch of one"),
        ([], None, "at least one training batch; got an empty iterable"),
        (torch.full((4, 2), torch.nan), 2, "8 of 8 that are NaN or infinite"),
    ],
)
def test_data_without_a_batch_is_an_error(data, batch_size, message):
    with pytest.raises(BatchbayesError, match=message):
        next(mini_batches(data, batch_size)[1])


# Chunks


@pytest.mark.parametrize(
    ("size", "numbers", "lengths"), [(5, 1, [5, 5, 2]), (None, 8, [4, 4, 4]), (None, 1, [1] * 12), (None, 2**21, [12])]
)
def test_chunks_have_a_size_or_about_so_many_numbers(size, numbers, lengths):
    found = list(chunks(X, size, numbers=numbers))
    assert [len(chunk) for chunk in found] == lengths
    assert torch.equal(torch.cat(found), X)


def test_chunks_do_not_join_batches():
    assert [len(chunk) for chunk in chunks([(X[:5], 0), (X[5:], 0)], 3)] == [3, 2, 3, 3, 1]
    assert [len(chunk) for chunk in chunks(np.split(X, [4]), 3, lambda batch: torch.as_tensor(batch))] == [
        3,
        1,
        3,
        3,
        2,
    ]
    assert [len(chunk) for chunk in chunks(X[:0], 3)] == [0]
