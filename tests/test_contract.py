"""The laws that every posterior obeys. They run for every method, on a network with branches and several sites, or on
the networks that the method names itself (see `ON` in helpers/cases.py)."""

import copy
import pickle
import threading
from dataclasses import replace
from functools import cache

import pytest
import torch
from helpers.cases import CASES, CONTRACT, POSTERIORS
from helpers.other_process import OtherProcess
from helpers.references import left_alone

import batchbayes as bb
from batchbayes.methods import table

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(params=CONTRACT, ids=" on ".join)
def pair(request):
    return request.param


@pytest.fixture
def fit(pair):
    return POSTERIORS[pair[0]]


@pytest.fixture
def case(pair):
    return CASES[pair[1]]


@pytest.fixture
def x(case):
    return case.batches(1, size=5, seed=4)[0]


@pytest.fixture(scope="session")
def other_process():
    process = OtherProcess()
    yield process
    process.end()


@pytest.fixture
def posterior(pair):
    return fitted(*pair)


@cache
def fitted(method, network):
    """Posteriors never change, so one of each is enough for all laws."""
    case = CASES[network]
    return POSTERIORS[method](case.network(), case.batches(12))


def test_draws_depend_on_seed_and_index_only(posterior, x):
    """Law 1: same seed, same function; another seed, another one; draw s is the same for every S and all chunks."""

    def draws(count, seed, chunk_size=None):
        options = {"num_samples": count, "seed": seed, "keep_draws": True, "chunk_size": chunk_size}
        return bb.predict(posterior, x, bb.categorical(), **options).draws

    few, many = draws(3, seed=0), draws(6, seed=0)
    assert torch.equal(few[:3], many[:3])
    assert torch.equal(many, draws(6, seed=0))
    torch.testing.assert_close(many, draws(6, seed=0, chunk_size=2), **TOLERANCE)
    assert torch.equal(many, draws(6, seed=1)) == posterior.is_point
    with torch.no_grad():
        assert torch.equal(posterior.draw(0, 0)(x), posterior.draw(0, 1)(x)) == posterior.is_point
    assert len(many) == (1 if posterior.is_point else 6)


def test_neighbours_do_not_matter(posterior, x):
    """Law 2: f(x)[:k] == f(x[:k])."""
    function = posterior.draw(seed=0, index=1)
    with torch.no_grad():
        torch.testing.assert_close(function(x)[:2], function(x[:2]), **TOLERANCE)
        torch.testing.assert_close(function(x)[-1:], function(x[-1:]), **TOLERANCE)


@pytest.mark.parametrize("training", [True, False])
def test_network_is_left_alone(fit, case, x, training):
    """Law 3: fitting and predicting leave the user's model bit-identical, in either mode."""
    network = case.network().train(training)
    with left_alone(network):
        bb.predict(fit(network, case.batches(4)), x, bb.categorical(), num_samples=3)


def test_survives_a_file(posterior, x, tmp_path):
    """Law 4: saved and loaded, it predicts bit-identically, and the file is not a pickle."""
    path = tmp_path / "posterior.safetensors"
    bb.save(posterior, path)
    loaded = bb.load(path, posterior.network.module)
    assert type(loaded) is type(posterior)
    assert repr(loaded) == repr(posterior)
    for index in range(4):
        with torch.no_grad():
            assert torch.equal(loaded.draw(7, index)(x), posterior.draw(7, index)(x))
    assert b"pickle" not in path.read_bytes()[:200]
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("pair", list({pair[0]: pair for pair in reversed(CONTRACT)}.values()), ids=" on ".join)
def test_survives_a_new_process(posterior, pair, x, tmp_path, other_process):
    """Laws 4 and 9, in a process that shares nothing but the files and the code."""
    bb.save(posterior, tmp_path / "posterior.safetensors")
    (tmp_path / "posterior.pickle").write_bytes(pickle.dumps(posterior))
    found = bb.predict(posterior, x, bb.categorical(), num_samples=64, seed=3, engine="auto")
    wanted = [found.engine, found.probs.numpy().tobytes().hex()]
    assert other_process.answer(pair[1], tmp_path / "posterior.safetensors") == wanted
    assert other_process.answer(pair[1], tmp_path / "posterior.pickle") == wanted


COPIES = {
    "copied": copy.copy,
    "copied with all it holds": copy.deepcopy,
    "pickled": lambda posterior: pickle.loads(pickle.dumps(posterior)),
    "replaced": replace,
}


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
@pytest.mark.parametrize("way", COPIES)
def test_a_copy_is_the_same_posterior(posterior, x, way):
    """Law 9: same draws, same engine, same figures."""
    assert_same(posterior, COPIES[way](posterior), x)


@pytest.mark.filterwarnings("ignore:the network is not linear enough")
def test_a_loaded_posterior_is_the_same_and_saving_it_runs_no_network(posterior, x, tmp_path):
    """Law 9, through a file."""
    network, passes = posterior.network.module, []
    handles = [m.register_forward_pre_hook(lambda *_: passes.append(None)) for m in network.modules()]
    bb.save(posterior, tmp_path / "posterior.safetensors")
    for handle in handles:
        handle.remove()
    assert not passes
    assert_same(posterior, bb.load(tmp_path / "posterior.safetensors", network), x)


def assert_same(posterior, other, x):
    assert type(other) is type(posterior)
    with torch.no_grad():
        assert torch.equal(other.draw(5, 2)(x), posterior.draw(5, 2)(x))
    for engine in ("auto", "linear") if posterior.linear else ("auto",):
        found, wanted = (bb.predict(p, x, bb.categorical(), num_samples=64, engine=engine) for p in (other, posterior))
        assert found.engine == wanted.engine
        assert torch.equal(found.probs, wanted.probs)
        assert torch.equal(found.mutual_information, wanted.mutual_information)


def test_uncertainty_adds_up(posterior, x):
    """Law 5: mutual information >= 0, and zero without noise; total variance = mean variance + variance of means."""
    classes = bb.predict(posterior, x, bb.categorical(), num_samples=8)
    assert (classes.mutual_information >= 0).all()
    assert (classes.mutual_information.max() > 1e-6) != posterior.is_point
    torch.testing.assert_close(classes.probs.sum(-1), torch.ones(len(x), dtype=x.dtype))

    values = bb.predict(posterior, x, bb.gaussian(precision=4.0), num_samples=8)
    torch.testing.assert_close(values.variance, values.draws.var(0, correction=0) + 0.25, **TOLERANCE)
    torch.testing.assert_close(values.mean, values.draws.mean(0), **TOLERANCE)
    assert (values.epistemic_variance.max() > 1e-6) != posterior.is_point


@pytest.mark.parametrize("pair", list({pair[0]: pair for pair in reversed(CONTRACT)}.values()), ids=" on ".join)
def test_threads_do_not_disturb_each_other(fit, case, x, tmp_path):
    """Law 7: threads that fit, predict, save and call the network at once get the bits of one after the other."""
    network, batches = case.network(), case.batches(12)
    posterior = fit(network, batches)

    def work(name):
        fitted = fit(network, batches)
        bb.save(fitted, tmp_path / f"{name}.safetensors")
        with torch.no_grad():
            own = network(x)
        return [
            own,
            *(bb.predict(p, x, bb.categorical(), num_samples=4, engine="auto").probs for p in (posterior, fitted)),
        ]

    alone, found = work("alone"), {}
    threads = [threading.Thread(target=lambda n=n: found.update({n: [work(n) for _ in range(2)]})) for n in range(4)]
    with left_alone(network):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(found) == [0, 1, 2, 3]
    for tensors in (tensors for each in found.values() for tensors in each):
        assert all(torch.equal(a, b) for a, b in zip(tensors, alone, strict=True))
    header, tensors = bb.load(tmp_path / "alone.safetensors", network).state()
    for n in range(4):
        other, found = bb.load(tmp_path / f"{n}.safetensors", network).state()
        assert other == header
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())


def test_it_prints_as_one_short_line(posterior, x):
    for printed in (repr(posterior), repr(bb.predict(posterior, x, bb.categorical(), num_samples=2))):
        assert "\n" not in printed
        assert len(printed) < 160
        assert "tensor(" not in printed


def test_its_class_is_in_the_table(posterior):
    assert isinstance(posterior, bb.Posterior)
    assert table.posterior_class(posterior.kind) is type(posterior)


def test_every_method_has_a_case():
    """Each method of this package has a case in the contract. Methods that other tests register may be there too."""
    cases = {name.split(",")[0].replace(" ", "_").lower() for name in POSTERIORS}
    own = {name for name, method in table.METHODS.items() if isinstance(method.fit, str)}
    assert own <= cases <= set(table.METHODS)


def test_zero_noise_gives_the_deterministic_network():
    """Law 5: the spread of center="running" shrinks to the network itself as the batch size grows."""
    case = CASES["BatchNorm2d"]
    network, x = case.network(), case.batches(1, size=5, seed=4)[0]
    posterior = bb.mcbn(network, case.batches(12), center="running").at_batch_size(1e14)
    with torch.no_grad():
        torch.testing.assert_close(posterior.draw(0, 0)(x), network(x), rtol=1e-5, atol=1e-5)
