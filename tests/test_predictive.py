"""What predictives can do beside their moments: intervals, arrays, tables, and extreme quantiles."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

import batchbayes as bb


def made(draws, likelihood):
    summary = likelihood.summary()
    summary.add(draws)
    return summary.finish(draws)


DRAWS = 2 * torch.randn(9, 5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("probability", [1e-300, 1e-17, 1e-9, 0.5, 1 - 1e-12])
def test_extreme_quantiles(probability):
    one = made(torch.full((1, 1, 1), 3.0, dtype=torch.float64), bb.gaussian(4.0))
    assert float(one.quantile(probability)) == pytest.approx(stats.norm.ppf(probability, 3.0, 0.5), rel=1e-12)


def test_the_interval_of_a_regression_holds_its_share():
    seen = made(DRAWS, bb.gaussian(4.0))
    lower, upper = seen.interval(0.8)
    torch.testing.assert_close(seen.cdf(lower), torch.full_like(lower, 0.1))
    torch.testing.assert_close(seen.cdf(upper), torch.full_like(upper, 0.9))


@pytest.mark.parametrize("likelihood", [bb.categorical(temperature=2.0), bb.bernoulli(temperature=2.0)])
def test_the_interval_of_a_probability_is_that_of_its_draws(likelihood):
    seen = made(DRAWS, likelihood)
    probs = ((DRAWS / 2).softmax(-1) if isinstance(seen, bb.CategoricalPredictive) else (DRAWS / 2).sigmoid()).numpy()
    lower, upper = seen.interval(0.7)
    np.testing.assert_allclose(lower.numpy(), np.quantile(probs, 0.15, axis=0))
    np.testing.assert_allclose(upper.numpy(), np.quantile(probs, 0.85, axis=0))
    one = made(DRAWS[:1], likelihood)
    assert torch.equal(*one.interval(0.7))


@pytest.mark.parametrize("likelihood", [bb.categorical(), bb.bernoulli(), bb.gaussian(1.0)])
@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1, float("nan"), "0.9", None, 90])
def test_a_level_is_a_share(likelihood, level):
    with pytest.raises(bb.BatchbayesError, match="a level between 0 and 1"):
        made(DRAWS, likelihood).interval(level)


def test_arrays_by_name():
    classes = made(DRAWS, bb.categorical())
    arrays = classes.to_numpy()
    np.testing.assert_array_equal(arrays["probs"], classes.probs.numpy())
    np.testing.assert_array_equal(arrays["predicted_class"], classes.probs.argmax(-1).numpy())
    assert {"confidence", "entropy", "mutual_information"} < set(arrays)
    values = made(DRAWS.bfloat16(), bb.gaussian(4.0)).to_numpy()
    assert values["mean"].dtype == np.float32
    np.testing.assert_allclose(values["noise_std"], 0.5)
    yes = made(DRAWS, bb.bernoulli())
    np.testing.assert_array_equal(yes.to_numpy()["probs"], yes.probs.numpy())


@pytest.fixture
def pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=dict))


@pytest.mark.usefixtures("pandas")
def test_a_table_has_one_row_for_each_example():
    table = made(DRAWS, bb.gaussian(4.0)).to_pandas()
    assert [name for name in table if name.startswith("mean")] == ["mean_0", "mean_1", "mean_2"]
    assert all(column.shape == (5,) for column in table.values())
    assert list(made(DRAWS[..., :1], bb.gaussian(4.0)).to_pandas()) == ["mean", "std", "epistemic_std", "noise_std"]
    assert list(made(DRAWS[..., 0], bb.bernoulli()).to_pandas()) == ["probs", "entropy", "mutual_information"]
    assert "probs_2" in made(DRAWS, bb.categorical()).to_pandas()
    with pytest.raises(bb.BatchbayesError, match="to_numpy"):
        made(torch.randn(2, 4, 3, 2, 2), bb.categorical()).to_pandas()


def test_a_table_without_pandas(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(bb.BatchbayesError, match="pip install pandas"):
        made(DRAWS, bb.gaussian(4.0)).to_pandas()


def test_targets_may_be_arrays():
    y = torch.randn(5, 3, dtype=torch.float64)
    seen = made(DRAWS, bb.gaussian(4.0))
    assert torch.equal(seen.log_prob(y.numpy()), seen.log_prob(y))
    assert torch.equal(seen.cdf(y.numpy()), seen.cdf(y))
    assert torch.equal(seen.log_prob(y.tolist()), seen.log_prob(y))
    assert torch.equal(seen.cdf(y.tolist()), seen.cdf(y))
    with pytest.raises(bb.BatchbayesError, match="NaN"):
        seen.log_prob(y * float("nan"))
    with pytest.raises(bb.BatchbayesError, match="targets as a tensor"):
        seen.log_prob("truth")


def test_the_entropy_of_a_certain_class_is_zero_without_a_sign():
    found = bb.predict(bb.deterministic(torch.nn.Identity()), torch.tensor([[1e5, 0.0]]), bb.categorical())
    assert f"{found.entropy.item():.2f}" == "0.00"


def test_one_draw_is_named_in_the_singular():
    assert repr(made(torch.zeros(1, 2, 1), bb.gaussian(1.0))).endswith("1 draw)")
    assert repr(made(torch.zeros(3, 2, 1), bb.bernoulli())).endswith("3 draws)")
