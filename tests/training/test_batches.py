import pytest
import torch
from torch.utils.data import DataLoader, Subset, SubsetRandomSampler, TensorDataset

from batchbayes import BatchbayesError
from batchbayes.network.source import selected
from batchbayes.report.read.examples import Examples
from batchbayes.training.batches import known_size, shuffled, shuffled_batches, training_batches, training_size


def test_an_epoch_is_a_shuffled_pass_without_the_left_over_batch() -> None:
    epochs = [torch.cat(list(shuffled_batches(50, 16, seed=0, epoch=epoch))) for epoch in range(2)]
    for rows in epochs:
        assert len(rows) == 48
        assert len(rows.unique()) == 48
    assert not torch.equal(*epochs)


def test_fewer_examples_than_a_batch_are_one_batch() -> None:
    assert [len(rows) for rows in shuffled_batches(10, 16, seed=0, epoch=0)] == [10]
    assert [len(rows) for rows in shuffled_batches(16, 16, seed=0, epoch=0)] == [16]


@pytest.mark.parametrize(("count", "size"), [(50, 16), (10, 16), (16, 16), (5, 1)])
def test_inputs_and_targets_stay_together(count: int, size: int) -> None:
    batches = shuffled(torch.arange(count), -torch.arange(count), size, seed=4)
    for epoch in range(2):
        pairs = list(batches(epoch))
        rows = list(shuffled_batches(count, size, seed=4, epoch=epoch))
        assert len(pairs) == len(batches) == len(rows)  # type: ignore[arg-type]
        for (inputs, targets), chosen in zip(pairs, rows, strict=True):
            assert torch.equal(inputs, chosen)
            assert torch.equal(targets, -chosen)


def test_the_number_of_examples_is_that_of_the_examples_that_are_read() -> None:
    whole = TensorDataset(torch.zeros(65, 2), torch.zeros(65))
    part = Subset(whole, range(20))
    few = DataLoader(whole, 5, sampler=SubsetRandomSampler(range(20)))
    assert [known_size(data) for data in (part, few, DataLoader(part, 8))] == [20, 20, 20]
    assert [known_size(data) for data in (whole, whole.tensors, shuffled(*whole.tensors, 16, 0))] == [65, 65, 65]
    assert known_size([whole.tensors, (torch.zeros(20, 2), torch.zeros(20))]) == 85
    assert selected(few, 10) is few  # the other examples may be those of a validation set
    assert len(selected(DataLoader(whole, 5), 10).dataset) == 10  # type: ignore[arg-type]
    assert Examples("few", few).size == training_size(few) == 20
    assert known_size(_Images()) is None


def test_a_last_batch_of_one_example_of_a_data_set_is_left_out() -> None:
    sizes = {count: [len(x) for x, _ in training_batches(_pairs(count), 16, 0)] for count in (1, 33, 34)}
    assert sizes == {1: [1], 33: [16, 16], 34: [16, 16, 2]}


class _Images:
    """Batches with a size that is not their number."""

    size = 224

    def __iter__(self):
        return iter([(torch.zeros(5, 2), torch.zeros(5))])


def _pairs(count: int) -> TensorDataset:
    return TensorDataset(torch.zeros(count, 2), torch.zeros(count))


def test_bad_data_is_refused() -> None:
    x, y = torch.randn(50, 3), torch.randn(50, 1)
    with pytest.raises(BatchbayesError, match="50 inputs and 49 targets"):
        shuffled(x, y[1:], 16, seed=0)
    with pytest.raises(BatchbayesError, match="the training targets"):
        shuffled(x, torch.where(y == y.max(), torch.nan, y), 16, seed=0)
    with pytest.raises(BatchbayesError, match="at least one; got 0 inputs"):
        shuffled(x[:0], y[:0], 16, seed=0)
    with pytest.raises(BatchbayesError, match="batch_size as a whole number of at least 1; got batch_size=0"):
        shuffled(x, y, 0, seed=0)
