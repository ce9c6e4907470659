"""Every law for every posterior: on a network with branches and several sites, or on those that it names itself."""

import pytest
import torch
from helpers import contract
from helpers.cases import CASES, CONTRACT, NOISELESS, POSTERIORS

import batchbayes as bb


@pytest.fixture(params=CONTRACT, ids=" on ".join)
def pair(request):
    return request.param


@pytest.fixture
def method(pair):
    return pair[0]


@pytest.fixture
def case(pair):
    return CASES[pair[1]]


@pytest.fixture
def x(case):
    return case.batches(1, size=5, seed=4)[0]


@pytest.fixture
def posterior(method, case):
    return POSTERIORS[method](case.network(), case.batches(12))


def test_draws_depend_on_seed_and_index_only(posterior, method, x):
    contract.check_draws_depend_on_seed_and_index_only(posterior, x, method not in NOISELESS)


def test_neighbours_do_not_matter(posterior, x):
    contract.check_neighbours_do_not_matter(posterior, x)


def test_network_is_left_alone(method, case, x):
    contract.check_network_left_alone(POSTERIORS[method], case.network(), case.batches(4), x)


def test_survives_a_file(posterior, case, x, tmp_path):
    contract.check_survives_a_file(posterior, posterior.network.module, x, tmp_path)


@pytest.mark.parametrize("pair", list({pair[0]: pair for pair in reversed(CONTRACT)}.values()), ids=" on ".join)
def test_survives_a_new_process(posterior, pair, x, tmp_path):
    contract.check_survives_a_new_process(posterior, pair[1], x, tmp_path)


def test_uncertainty_adds_up(posterior, method, x):
    contract.check_uncertainty_adds_up(posterior, x, method not in NOISELESS)


def test_it_is_a_posterior(posterior):
    assert isinstance(posterior, bb.Posterior)


def test_zero_noise_gives_the_deterministic_network():
    """Law 5: the spread of center="running" shrinks to the network itself as the batch size grows."""
    case = CASES["BatchNorm2d"]
    network, x = case.network(), case.batches(1, size=5, seed=4)[0]
    posterior = bb.mcbn(network, case.batches(12), center="running").at_batch_size(1e14)
    with torch.no_grad():
        torch.testing.assert_close(posterior.draw(0, 0)(x), network(x), rtol=1e-5, atol=1e-5)
