"""The laws that every posterior obeys, written once."""

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import batchbayes as bb
from helpers.references import left_alone

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def check_draws_depend_on_seed_and_index_only(posterior: bb.Posterior, x: Tensor, stochastic: bool) -> None:
    """Law 1: same seed, same function; another seed, another one; draw s is the same whatever S and the chunks."""

    def draws(count: int, seed: int, chunk_size: int | None = None) -> Tensor:
        return bb.predict(
            posterior, x, bb.categorical(), num_samples=count, seed=seed, keep_draws=True, chunk_size=chunk_size
        ).draws

    few, many = draws(3, seed=0), draws(6, seed=0)
    assert torch.equal(few, many[:3])
    assert torch.equal(many, draws(6, seed=0))
    torch.testing.assert_close(many, draws(6, seed=0, chunk_size=2), **TOLERANCE)
    assert torch.equal(many, draws(6, seed=1)) != stochastic
    assert torch.equal(many[0], many[1]) != stochastic


def check_neighbours_do_not_matter(posterior: bb.Posterior, x: Tensor) -> None:
    """Law 2: f(x)[:k] == f(x[:k])."""
    function = posterior.draw(seed=0, index=1)
    with torch.no_grad():
        torch.testing.assert_close(function(x)[:2], function(x[:2]), **TOLERANCE)
        torch.testing.assert_close(function(x)[-1:], function(x[-1:]), **TOLERANCE)


def check_network_left_alone(fit, network: nn.Module, batches: list[Tensor], x: Tensor) -> None:
    """Law 3: fitting and predicting leave the user's model bit-identical, in either mode."""
    for mode in (True, False):
        network.train(mode)
        with left_alone(network):
            bb.predict(fit(network, batches), x, bb.categorical(), num_samples=3)


def check_survives_a_file(posterior: bb.Posterior, network: nn.Module, x: Tensor, folder: Path) -> None:
    """Law 4: saved and loaded, it predicts bit-identically; the file is not a pickle."""
    path = folder / "posterior.safetensors"
    bb.save(posterior, path)
    loaded = bb.load(path, network)
    assert repr(loaded) == repr(posterior) or type(loaded) is type(posterior)
    for index in range(4):
        with torch.no_grad():
            assert torch.equal(loaded.draw(7, index)(x), posterior.draw(7, index)(x))
    assert b"pickle" not in path.read_bytes()[:200]
    assert [p.name for p in folder.iterdir()] == [path.name]


def check_survives_a_new_process(posterior: bb.Posterior, case_name: str, x: Tensor, folder: Path) -> None:
    """Law 4, in a process that shares nothing but the files and the code."""
    bb.save(posterior, folder / "posterior.safetensors")
    probs = bb.predict(posterior, x, bb.categorical(), num_samples=8, seed=3).probs
    script = f"""
import sys, torch
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
torch.set_num_threads(1)
import batchbayes as bb
from helpers import cases
case = cases.CASES[{case_name!r}]
posterior = bb.load({str(folder / "posterior.safetensors")!r}, case.network())
x = case.batches(1, size=5, seed=4)[0]
print(bb.predict(posterior, x, bb.categorical(), num_samples=8, seed=3).probs.numpy().tobytes().hex())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == probs.numpy().tobytes().hex()


def check_uncertainty_adds_up(posterior: bb.Posterior, x: Tensor, stochastic: bool) -> None:
    """Law 5: mutual information >= 0, and zero without noise; total variance = mean variance + variance of means."""
    classes = bb.predict(posterior, x, bb.categorical(), num_samples=8)
    assert (classes.mutual_information >= 0).all()
    assert (classes.mutual_information.max() > 1e-6) == stochastic
    torch.testing.assert_close(classes.probs.sum(-1), torch.ones(len(x), dtype=x.dtype))

    values = bb.predict(posterior, x, bb.gaussian(precision=4.0), num_samples=8)
    torch.testing.assert_close(values.variance, values.draws.var(0, correction=0) + 0.25, **TOLERANCE)
    torch.testing.assert_close(values.mean, values.draws.mean(0), **TOLERANCE)
    assert (values.epistemic_variance.max() > 1e-6) == stochastic
