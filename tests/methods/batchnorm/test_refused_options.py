"""Options that would be dropped are refused, and bad ones are refused before any data is read."""

import pytest
import torch
from helpers.cases import vectors

import batchbayes as bb

X = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("options", [{"center": "running"}, {"dropout": True}])
def test_options_that_a_query_in_its_batch_would_drop_are_refused(options):
    with pytest.raises(bb.BatchbayesError, match='center="batches" and no dropout with include_query=True'):
        bb.mcbn(vectors(), X, batch_size=8, include_query=True, **options)
    bb.mcbn(vectors(), X, batch_size=8, num_samples=2, **options)  # without the query they mean something


@pytest.mark.parametrize("method", [bb.mcbn, bb.stochastic_bn, bb.correlated_bn, bb.clt_bn])
def test_a_wrong_center_is_refused_before_data_is_read(method):
    def batches():
        pytest.fail("a batch was read")
        yield X

    with pytest.raises(bb.BatchbayesError, match='center="batches" or "running"'):
        method(vectors(), batches(), batch_size=8, center="middle")


@pytest.mark.parametrize("number", ["4", None, 2.0, 1])
def test_a_spread_needs_two_mini_batches(number):
    with pytest.raises(bb.BatchbayesError, match="num_samples as a whole number of at least 2"):
        bb.stochastic_bn(vectors(), X, batch_size=8, num_samples=number)


@pytest.mark.parametrize("size", ["many", None, [8, "many"], 1, float("nan")])
def test_a_batch_size_is_a_number(size):
    posterior = bb.mcbn(vectors(), X, batch_size=8, num_samples=2)
    with pytest.raises(bb.BatchbayesError, match="a finite batch size above 1"):
        posterior.at_batch_size(size)
