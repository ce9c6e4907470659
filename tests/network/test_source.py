import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, Sampler, TensorDataset

from batchbayes import BatchbayesError, BatchbayesWarning
from batchbayes.network.inputs import Inputs, pick_inputs
from batchbayes.network.source import Source

X = torch.arange(24.0).view(12, 2)


def first(stream, count):
    return list(itertools.islice(stream, count))


def input_stream(data, picker=None):
    return Source(data, picker).inputs()


def chunks(data, size, picker=None, **options):
    return Source(data, picker).chunks(size, **options)


def mini_batches(data, batch_size, picker=None, seed=0):
    stream = Source(data, picker).mini_batches(batch_size, seed)
    return stream.batch_size, stream


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
        (X, 0, r"inputs at 0; got a tensor of shape \(12, 2\).*leave it out"),
        ((X,), 10**30, "inputs at 1000"),
        ((X,), 1.5, "inputs at 1.5"),
        ((X,), lambda batch: batch["x"], "a function inputs= that takes a batch.*TypeError"),
        (np.array(["a"]), None, "the inputs as a tensor or an array of numbers; got a ndarray of <U1"),
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
    assert len(list(input_stream([large, torch.ones(2, 2, dtype=torch.long), large]))) == 3


def test_something_else_is_an_error():
    with pytest.raises(BatchbayesError, match="a tensor or an iterable of batches; got a int"):
        input_stream(3)


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


def test_a_loader_that_can_be_read_only_once_ends():
    class Stream(IterableDataset):
        rows = iter(torch.randn(50, 2))

        def __iter__(self):
            return self.rows

    size, stream = mini_batches(DataLoader(Stream(), 8), None)
    assert (size, len(list(stream))) == (8, 6)


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
        (list(X.split(6)), 13, "at least 13 training examples, one batch; got 12"),
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


# Arrays, pairs and data sets


def test_arrays_are_tensors():
    array = X.numpy()
    assert torch.equal(next(input_stream(array)), X)
    assert [batch.shape for batch in input_stream([array[:5], (array[5:], array[5:, 0])])] == [(5, 2), (7, 2)]
    a, b = (first(mini_batches(data, 5, seed=3)[1], 4) for data in (array, X))
    assert torch.equal(torch.stack(a), torch.stack(b))


@pytest.mark.parametrize(
    "targets", [torch.ones(12), torch.ones(12).long(), torch.ones(12, 2).long(), torch.ones(12, 1), torch.ones(12, 3)]
)
@pytest.mark.parametrize("container", [tuple, list])
def test_a_pair_is_inputs_and_targets_and_not_two_batches(targets, container):
    data = container([X, targets])
    assert [batch is X for batch in input_stream(data)] == [True]
    pair, plain = (first(mini_batches(each, 5, seed=3)[1], 4) for each in (data, X))
    assert torch.equal(torch.stack(pair), torch.stack(plain))
    with pytest.raises(BatchbayesError, match="batch_size="):
        mini_batches(data, None)


def test_two_tensors_that_may_be_either_are_refused():
    for data in ((X, X), (X[..., None], torch.ones(12, 2, 3)), X.split(6)):
        with pytest.raises(BatchbayesError, match=r"meaning is clear.*pass \[\(x, y\)\].*or a list"):
            list(input_stream(data))
    assert len(list(input_stream([X, X]))) == 2
    assert len(list(input_stream((X[:5], X[5:])))) == 2  # of two lengths, so no pair
    assert len(list(input_stream([(X, X)]))) == 1


def test_a_dict_is_one_batch():
    assert next(input_stream({"image": X, "label": torch.ones(12)}, "image")) is X


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"x": X[index], "y": index**2}


def test_data_sets_are_read_in_order_for_prediction_and_shuffled_for_training():
    assert torch.equal(torch.cat(list(input_stream(TensorDataset(X, torch.ones(12))))), X)
    assert torch.equal(torch.cat(list(input_stream(Squares(), "x"))), X)
    size, stream = mini_batches(Squares(), 4, picker="x", seed=1)
    batches = first(stream, 6)
    assert size == 4
    assert sorted(torch.cat(batches[:3])[:, 0].tolist()) == X[:, 0].tolist()
    assert not torch.equal(torch.cat(batches[:3]), X)
    assert not torch.equal(torch.cat(batches[:3]), torch.cat(batches[3:]))
    again = first(mini_batches(Squares(), 4, picker="x", seed=1)[1], 6)
    assert torch.equal(torch.cat(again), torch.cat(batches))
    with pytest.raises(BatchbayesError, match="at least 13 training examples"):
        mini_batches(Squares(), 13, picker="x")
    with pytest.raises(BatchbayesError, match="batch_size="):
        mini_batches(Squares(), None, picker="x")


class Reversed(Sampler):
    def __iter__(self):
        return iter(range(11, -1, -1))


@pytest.mark.parametrize(
    ("options", "warns"),
    [
        ({}, False),
        ({"shuffle": True}, True),
        ({"sampler": RandomSampler(range(12))}, True),
        ({"sampler": Reversed()}, True),
        ({"sampler": range(12)}, False),
        ({"sampler": [1, 0]}, True),
        ({"batch_size": None}, False),
        ({"batch_size": None, "shuffle": True}, True),
        ({"batch_size": 1, "batch_sampler": BatchSampler(Reversed(), 4, False)}, True),
        ({"batch_size": 1, "batch_sampler": [[0, 1], [2, 3]]}, True),
        ({"batch_size": 1, "batch_sampler": [[*range(5)], [*range(5, 12)]]}, False),
    ],
)
def test_loaders_in_another_order_are_told(options, warns):
    loader = DataLoader(TensorDataset(X), **options)
    if warns:
        with pytest.warns(BatchbayesWarning, match="another order than the data set"):
            Source(loader).warn_if_shuffled()
    else:
        Source(loader).warn_if_shuffled()


# Several inputs


FEATURES = torch.arange(12.0)


@pytest.mark.parametrize(
    ("batch", "picker", "args", "named"),
    [
        (((X, FEATURES), 0), None, [X, FEATURES], {}),
        (({"x": X, "age": FEATURES}, 0), None, [], {"x": X, "age": FEATURES}),
        ({"x": X, "age": FEATURES, "y": 0}, ("age", "x"), [FEATURES, X], {}),
        ((X, FEATURES, 0), (0, 1), [X, FEATURES], {}),
        ((X, FEATURES), lambda batch: {"image": batch[0], "age": batch[1].numpy()}, [], {"image": X, "age": FEATURES}),
        ((X, FEATURES), lambda batch: list(batch), [X, FEATURES], {}),
    ],
)
def test_several_inputs_are_picked(batch, picker, args, named):
    found = pick_inputs(batch, picker)
    assert isinstance(found, Inputs)
    assert len(found) == 12
    assert [torch.equal(a, b) for a, b in zip(found.args, args, strict=True)] == [True] * len(args)
    assert {n: torch.equal(t, named[n]) for n, t in found.named.items()} == dict.fromkeys(named, True)


def test_several_inputs_are_cut_joined_and_shuffled_together():
    data = [((X[:5], FEATURES[:5]), 0), ((X[5:], FEATURES[5:]), 0)]
    _, stream = mini_batches(data, 4)
    parts = list(stream)
    assert torch.equal(torch.cat([part.args[0] for part in parts]), X)
    assert torch.equal(torch.cat([part.args[1] for part in parts]), FEATURES)
    assert [len(part) for part in chunks(data, 2)] == [2, 2, 1, 2, 2, 2, 1]
    for batch in first(mini_batches((X, FEATURES), 5, picker=(0, 1), seed=2)[1], 3):
        assert torch.equal(batch.args[0][:, 0] / 2, batch.args[1])


def test_several_inputs_that_do_not_fit():
    with pytest.raises(BatchbayesError, match="one row for each example"):
        Inputs([X, FEATURES[:3]])
    with pytest.raises(BatchbayesError, match="one input tensor here"):
        torch.stack([Inputs([X, FEATURES])])
    with pytest.raises(BatchbayesError, match="1 of 12 that are NaN"):
        list(input_stream([((X, FEATURES.clone().index_fill_(0, torch.tensor(3), torch.nan)), 0)]))


def test_batches_that_cannot_be_joined():
    for other in (X[:3, :1], X[:3].double(), X[0]):
        with pytest.raises(BatchbayesError, match="batches of one shape and dtype"):
            list(mini_batches([X[:3], other, X[:3]], 4)[1])


class Stream(IterableDataset):
    """Examples in an order, of a length that it does not tell."""

    def __init__(self, x):
        self.x = x

    def __iter__(self):
        return iter(self.x)


FORMS = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy(),
    "pair": lambda x: (x, torch.arange(len(x))),
    "data set": lambda x: TensorDataset(x),
    "list": lambda x: list(x.split(7)),
    "list of pairs": lambda x: [(part, part[:, 0]) for part in x.split(7)],
    "loader": lambda x: DataLoader(TensorDataset(x), 7),
    "loader of batches": lambda x: DataLoader(list(x.split(7)), batch_size=None),
    "loader of a stream": lambda x: DataLoader(Stream(x), 7),
    "loader of indices": lambda x: DataLoader(TensorDataset(x), batch_sampler=torch.arange(len(x)).split(7)),
    "stream": Stream,
    "generator": lambda x: iter(x.split(7)),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "count"), [(40, 4), (40, 39), (40, 40), (40, 90), (1, 4), (3000, 700)])
def test_an_even_choice_is_the_same_in_all_forms(form, length, count):
    x = torch.arange(float(length))[:, None]
    found = torch.cat([inputs for inputs, _ in Source(FORMS[form](x)).evenly(count)]).flatten()
    assert found.tolist() == torch.linspace(0, length - 1, min(length, count), dtype=torch.float64).round().tolist()


def test_labels_stay_with_their_inputs():
    x = torch.arange(3000.0)[:, None]
    for data in ([(part, -part[:, 0]) for part in x.split(7)], ((part, -part[:, 0]) for part in x.split(7))):
        for inputs, labels in Source(data).evenly(100, lambda batch, _: batch[1]):
            assert torch.equal(inputs[:, 0], -labels)


def test_a_long_stream_is_read_to_its_end_in_little_memory(monkeypatch):
    monkeypatch.setattr("batchbayes.network.source.ROOM", 0)
    for length in (50, 199, 200, 201, 5000):
        stream = (torch.full((1, 1), float(row)) for row in range(length))
        found = torch.cat([inputs for inputs, _ in Source(stream).evenly(50)]).flatten()
        even = torch.linspace(0, length - 1, 50)
        assert len(found) == 50
        assert (found - even).abs().max() <= length / 50
    monkeypatch.setattr("batchbayes.network.source.MOST_READ", 1000)
    found = torch.cat([i for i, _ in Source(torch.full((1, 1), float(n)) for n in itertools.count()).evenly(50)])
    assert 900 <= float(found.max()) <= 1000


def test_of_a_loader_that_shuffles_the_first_examples_are_taken():
    x = torch.arange(40.0)[:, None]
    loader = DataLoader(TensorDataset(x), 7, shuffle=True, generator=torch.Generator().manual_seed(3))
    found = torch.cat([inputs for inputs, _ in Source(loader).evenly(10)]).flatten()
    assert len(found.unique()) == 10
    assert found.tolist() != sorted(found.tolist())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_seed_gives_the_same_rows_with_any_number_of_workers(workers):
    def rows(number):
        torch.manual_seed(5)
        loader = DataLoader(TensorDataset(X), 4, shuffle=True, num_workers=number)
        return torch.cat(first(Source(loader).mini_batches(None), 8))

    assert torch.equal(rows(workers), rows(0))


def test_full_batches_of_different_shapes_need_no_joining():
    """Sentences or images of one size each, as a loader with buckets gives them."""
    given = [torch.zeros(4, 5), torch.zeros(4, 3), torch.zeros(4, 5)]
    _, stream = mini_batches(given, 4)
    assert [tuple(batch.shape) for batch in stream] == [(4, 5), (4, 3), (4, 5)]
