"""The experiment, and its statistical tests against exact enumeration, closed forms and scipy."""

import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from batchbayes_papers.mcbn import normality
from batchbayes_papers.mcbn.normality_tests import (
    compare_with_gaussians,
    layer_inputs,
    limit_gaussians,
    without_replacement,
)
from helpers.experiments import run_experiment
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.distributions import Normal

import batchbayes as bb
from batchbayes.models import MLP

SMOKE = normality.PRESETS["smoke"]


@pytest.fixture(scope="module")
def results() -> dict[str, Any]:
    return run_experiment(normality, SMOKE)


def statistics_of_batches(values: torch.Tensor, size: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Means and biased standard deviations of independent batches of one unit, (count, 1) each."""
    batches = values[torch.randint(len(values), (count, size))]
    return batches.mean(1)[:, None], batches.std(1, correction=0)[:, None]


def test_a_gaussian_unit_passes_and_an_exponential_one_at_small_batches_does_not() -> None:
    torch.manual_seed(0)
    for values, size, passes in (
        (torch.randn(100_000, dtype=torch.float64), 256, True),
        (torch.distributions.Exponential(torch.tensor(1.0, dtype=torch.float64)).sample((100_000,)), 4, False),
    ):
        claims = limit_gaussians(values[:, None], size)
        means, stds = statistics_of_batches(values, size, 1000)
        for observed, claim in ((means, claims["mean"]), (stds, claims["std"])):
            tests = compare_with_gaussians(observed, claim, 1.0)
            assert [float(p) >= 0.01 for p in (tests["fitted"], tests["limit"], tests["finite"])] == [passes] * 3


def test_the_limit_has_the_variance_of_the_formula() -> None:
    """Fourth moments differ: an exponential has mu_4 = 9, so Var(sigma_B) = (9 - 1) / (4 M)."""
    values = -torch.log1p(-(torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000)
    claims = limit_gaussians(values[:, None], 50)
    assert float(claims["mean"].loc) == pytest.approx(1, rel=1e-3)
    assert float(claims["mean"].variance) == pytest.approx(1 / 50, rel=1e-3)
    assert float(claims["std"].loc) == pytest.approx(1, rel=1e-3)
    assert float(claims["std"].variance) == pytest.approx(8 / 200, rel=1e-2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=7, unique=True), st.data())
def test_batches_without_replacement_vary_by_the_exact_factor(values: list[int], data: st.DataObject) -> None:
    """All batches of M of N rows: their means vary by sigma^2 / M (N - M) / (N - 1)."""
    size = data.draw(st.integers(1, len(values) - 1))
    means = [sum(batch) / size for batch in itertools.combinations(values, size)]
    expected = np.var(values) / size * without_replacement(len(values), size)
    assert np.var(means) == pytest.approx(expected, rel=1e-9)


def test_p_values_and_ratios_are_those_of_scipy() -> None:
    torch.manual_seed(1)
    observed = torch.randn(150, 3, dtype=torch.float64) * torch.tensor([1.0, 2.0, 0.5]) + 4
    claim = Normal(torch.full((3,), 4.0, dtype=torch.float64), torch.tensor([1.2, 1.9, 0.6], dtype=torch.float64))
    tests = compare_with_gaussians(observed, claim, 0.81)
    for unit in range(3):
        column, std = observed[:, unit].numpy(), float(claim.scale[unit])
        for p_value, scale in ((tests["limit"], std), (tests["finite"], 0.9 * std)):
            expected = stats.ks_1samp(column, stats.norm(4, scale).cdf).pvalue
            assert float(p_value[unit]) == pytest.approx(expected, abs=0.03 / 150)
        assert float(tests["ratio"][unit]) == pytest.approx(column.var(ddof=1) / std**2)


def test_units_that_never_vary_are_left_out() -> None:
    observed = torch.randn(100, 3, dtype=torch.float64)
    observed[:, 1] = 0.25
    claim = Normal(torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64))
    tests = compare_with_gaussians(observed, claim, 1.0)
    assert {len(values) for values in (tests["fitted"], tests["limit"], tests["finite"], tests["ratio"])} == {2}
    assert tests["fitted"].isfinite().all()


def test_layer_inputs_are_those_of_one_batch_of_all_rows() -> None:
    network, x = MLP(3, [5, 4], 1), torch.randn(50, 3)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    first, second = layer_inputs(network, x)
    one, two = (block.get_submodule("linear") for block in network.hidden)
    torch.testing.assert_close(first, one(x).double())
    normalised = torch.relu((one(x) - one(x).mean(0)) / (one(x).var(0, correction=0) + 1e-5).sqrt())
    torch.testing.assert_close(second, two(normalised).double(), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())


def test_normalisation_fixes_most_of_the_means_of_the_next_layer() -> None:
    r"""The variance of ReLU(z) in a batch is the part that the batch's own mean and deviation of z do not explain.

    For Gaussian z this is $1/2 - 1/2\pi - 1/4 - 1/4\pi = 0.0112$ of $1/2 - 1/2\pi = 0.3408$, or 3.3 %. The central
    limit theorem predicts 100 %. With 800 batches the standard error of the ratio is 5 %.
    """
    network, x = (
        MLP(1, [1, 1], 1).double(),
        torch.randn(20_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)),
    )
    for block in network.hidden:
        nn.init.ones_(block.get_submodule("linear").weight)  # type: ignore[arg-type]
    posterior = bb.mcbn(network, x, batch_size=100, num_samples=800)
    means = (posterior.center + posterior.deviations)[:, 2:3]
    tests = compare_with_gaussians(means, limit_gaussians(layer_inputs(network, x)[1], 100)["mean"], 1.0)
    total = 1 / 2 - 1 / (2 * math.pi)
    assert float(tests["ratio"]) == pytest.approx((total - 1 / 4 - 1 / (4 * math.pi)) / total, rel=0.2)
    assert float(tests["limit"]) < 1e-6


def test_smoke_finds_what_theory_says(results: dict[str, Any]) -> None:
    found = normality.findings_of(SMOKE, results)
    assert len(found) == 2 * 2 * 2 * 2
    assert all(len(each.ratio) == 50 for each in found)
    by_kind = {(each.layer, each.statistic, each.batch_size, each.epochs): each for each in found}
    for epochs in SMOKE.epochs:
        first, small = by_kind[1, "mean", 64, epochs], by_kind[1, "mean", 8, epochs]
        assert normality.median_ratio([first]) == pytest.approx(first.shrinkage, rel=0.2)
        assert (first.shrinkage, small.shrinkage) == (pytest.approx(176 / 239), pytest.approx(232 / 239))
        assert (normality.share_passed([first], "finite") or 0) > 0.7
        assert (normality.median_ratio([by_kind[2, "mean", 64, epochs]]) or 1) < 0.2
        assert normality.share_passed([by_kind[2, "mean", 64, epochs]], "limit") == 0


def test_work_is_deterministic(results: dict[str, Any]) -> None:
    unit = normality.units(SMOKE)[1]
    assert json.loads(json.dumps(normality.work(SMOKE, unit, {}))) == results[unit.name]


def test_shares_and_ratios_are_over_the_units_of_all_seeds() -> None:
    def finding(p_values: tuple[float, ...], ratio: tuple[float, ...]) -> normality.Finding:
        return normality.Finding(1, 32, 1, 1, "mean", p_values, (), (), ratio, 0.9)

    two = [finding((0.04, 0.05, 0.9, 0.5), (1.0, 2.0)), finding((0.01,), (9.0,))]
    assert normality.share_passed(two, "fitted") == 0.6
    assert normality.share_passed(two, "limit") is None
    assert normality.median_ratio(two) == 2.0


def test_tables_of_unfinished_runs_have_empty_cells(results: dict[str, Any]) -> None:
    done = {"seed 1, M = 64": results["seed 1, M = 64"]}
    fitted, limit, finite, ratio = normality.tables(SMOKE, done)
    for table in (fitted, limit, finite):
        assert [row[:3] for row in table.rows[:3]] == [(1, "mean", 8), (1, "mean", 64), (1, "std", 8)]
        assert [row[3] is None for row in table.rows] == [True, False] * 4
    assert ratio.rows[0] == (1, "mean", 8, None, None, None)
    assert ratio.rows[1][3] == pytest.approx(176 / 239)
    whole = normality.tables(SMOKE, results)[0]
    assert whole.rows[1][4] == normality.share_passed(
        [each for each in normality.findings_of(SMOKE, done) if each.epochs == 10][:1], "fitted"
    )


def test_figures_show_single_units_and_all_of_them(results: dict[str, Any]) -> None:
    made = normality.figures(SMOKE, results)
    assert set(made) == {
        "distributions-of-all-units",
        "distributions-of-single-units",
        "single-units-over-epochs",
        "single-units-over-batch-sizes",
    }
    assert [panel.get_ylabel() for panel in made["single-units-over-epochs"].axes[::4]] == ["epoch 1", "epoch 10"]
    assert [panel.get_ylabel() for panel in made["single-units-over-batch-sizes"].axes[::4]] == ["M = 8", "M = 64"]
    below = made["distributions-of-all-units"].axes[6]
    assert made["distributions-of-all-units"].axes[2].get_title() == "layer 2: batch mean"
    line = next(line for line in below.get_lines() if line.get_label() == "variance: median over units")
    own = [each for each in normality.findings_of(SMOKE, results) if (each.layer, each.statistic) == (2, "mean")]
    expected = [
        np.mean([normality.median_ratio([each]) for each in own if each.batch_size == size])
        for size in SMOKE.batch_sizes
    ]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), expected)


def test_a_shown_unit_has_its_gaussians(results: dict[str, Any]) -> None:
    found = normality.findings_of(SMOKE, results)[0]
    shown = normality.marginal_of(found)
    assert len(shown.observed) == SMOKE.num_batches
    assert shown.p_values["fitted Gaussian"] == pytest.approx(found.fitted[0], abs=1e-3)
    variance = float(shown.observed.var() / shown.claims["CLT (paper)"].variance)
    assert variance == pytest.approx(found.ratio[0], rel=1e-3)
