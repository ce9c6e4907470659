"""The scikit-learn estimators: what scikit-learn asks of an estimator, and what they promise beyond that."""

import json
import pickle
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from batchbayes_tables.forest import TREES, grow
from batchbayes_tables.regressor import _gain_of_averages
from batchbayes_tables.targets import SLACK, atoms_quantiles, atoms_scores
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.ensemble import ExtraTreesRegressor
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from batchbayes._common.checks import install_command
from batchbayes._common.files import write_tensors
from batchbayes._common.rng import stream_seed
from batchbayes.errors import BatchbayesError
from batchbayes.plots import table_figure
from batchbayes.sklearn import UncertainClassifier, UncertainOutputs, UncertainRegressor, pipeline

SMALL = {"hidden_widths": (16,), "num_steps": 120, "num_seeds": 1, "num_folds": 2, "weight_decays": (1e-3,),
         "num_draws": 2}  # fmt: skip
QUICK = {**SMALL, "num_folds": 3, "num_steps": 150, "num_draws": 4, "hidden_widths": (32,), "random_state": 0}
SKIPPED = {
    "check_array_api_input",  # only with SCIPY_ARRAY_API=1
    "check_sample_weights_pandas_series",  # these three only with pandas
    "check_regressor_data_not_an_array",
    "check_classifier_data_not_an_array",
}
EXPECTED_TO_FAIL = {
    f"check_sample_weight_equivalence_on_{kind}_data": "copies of a row stay in one fold; equal rows do not"
    for kind in ("dense", "sparse")
}
SIDES = (np.less, np.less_equal)
BOTH = pytest.mark.parametrize("kind", [UncertainRegressor, UncertainClassifier])


def more_waves(seed):
    random = np.random.default_rng(seed)
    x = random.uniform(-2, 2, (400, 2))
    return x, 10 + 3 * (np.sin(2 * x[:, 0]) + 0.3 * (0.2 + np.abs(x[:, 1])) * random.standard_normal(400))


@pytest.fixture(scope="module")
def waves():
    return more_waves(0)


def fitted(kind, x, y, **options):
    y = np.where(y > 10, "high", "low") if kind is UncertainClassifier else y
    return kind(**{**QUICK, **options}).fit(x, y)


@BOTH
@pytest.mark.parametrize("options", [SMALL, pytest.param({}, marks=pytest.mark.slow)], ids=["small", "default"])
def test_all_checks_of_scikit_learn(kind, options):
    results = check_estimator(kind(**options), on_fail=None, on_skip=None, expected_failed_checks=EXPECTED_TO_FAIL)
    bad = {
        each["check_name"]: str(each["exception"])
        for each in results
        if each["status"] not in ("passed", "skipped", "xfail")
    }
    assert not bad
    assert {each["check_name"] for each in results if each["status"] == "skipped"} <= SKIPPED
    assert Counter(each["status"] for each in results)["passed"] >= 55


def test_intervals_hold_their_level_on_new_rows():
    """Means over 8 samples: the standard error is about 1 %."""
    random, covered = np.random.default_rng(1), []
    for seed in range(8):
        x = random.uniform(-2, 2, (700, 2))
        y = np.sin(2 * x[:, 0]) + 0.3 * (0.2 + np.abs(x[:, 1])) * random.standard_normal(700)
        lower, upper = (
            UncertainRegressor(**{**QUICK, "num_seeds": 2, "random_state": seed})
            .fit(x[:200], y[:200])
            .predict_interval(x[200:])
        )
        covered.append(((lower <= y[200:]) & (y[200:] <= upper)).mean())
    assert np.mean(covered) == pytest.approx(0.905, abs=0.025)


@pytest.mark.parametrize("shared", [0.0, 0.5, 2.0])
def test_errors_of_new_rows_are_those_of_the_average_of_all_networks(shared):
    """Errors are a part that all networks share, and one of each: the spread of their average is known."""
    random = np.random.default_rng(0)
    errors = shared * random.standard_normal(100_000) + random.standard_normal((4, 100_000))
    wanted = ((shared**2 + 1 / 20) / (shared**2 + 1 / 4)) ** 0.5
    found = _gain_of_averages(torch.from_numpy(errors), 20)
    assert found == pytest.approx(wanted, rel=0.05 if shared == 0 else 0.015)  # 3 standard errors


def test_data_noise_and_model_noise_by_a_plain_loop_over_seeds_and_folds(waves):
    model = fitted(UncertainRegressor, *waves, num_seeds=2, target_transform="none")
    inputs = model._inputs(waves[0])
    means = model.networks_.draws(inputs)[..., 0].numpy()  # (6, 4, N)
    straight = model.linear_(inputs)[..., 0].numpy()
    means = (1 - model.mix_) * means + model.mix_ * straight[:, None]
    variances = [np.concatenate([means[fold], means[3 + fold]]).var(0) for fold in range(3)]
    model.share_ = 0.0  # networks alone
    _, std, data, noise = model.predict(waves[0], return_std=True, return_parts=True)
    np.testing.assert_allclose(std**2, data**2 + noise**2)
    errors = model.held_out_errors_
    scale = model.targets_.unit * np.sqrt((errors**2).mean())
    factor = np.exp(2 * float(model.spread_.coefficients[-1]))
    np.testing.assert_allclose(noise, scale * np.sqrt(factor * np.mean(variances, 0)), rtol=1e-6)


def test_intervals_hold_the_values_whose_scores_are_small_enough():
    """With ties between atoms, and values that are atoms."""
    random = np.random.default_rng(0)
    atoms, weights = random.integers(0, 12, (300, 9)).astype(float), random.dirichlet(np.ones(9))
    values = random.integers(-1, 14, 300).astype(float)
    scores = atoms_scores(atoms, weights, values)
    for i in range(20):
        up_to = sum(weights[k] for k in range(9) if atoms[i, k] <= values[i])
        below = sum(weights[k] for k in range(9) if atoms[i, k] < values[i])
        assert scores[i] == pytest.approx(max(0.5 - up_to, below - 0.5))
    for reach in np.unique(scores[scores < 0.499])[::10]:
        lower, upper = atoms_quantiles(atoms, weights, np.array([0.5 - reach, 0.5 + reach + SLACK])).T
        assert ((lower <= values) & (values <= upper) == (scores <= reach + SLACK)).all()


def test_intervals_are_quantiles_of_networks_and_trees(waves):
    model = fitted(UncertainRegressor, *waves, num_seeds=2)
    model.share_, model.scores_of_seeds_ = 0.25, np.empty((0, 400))
    model.forest_ = model.forest_ or grow(torch.zeros(6, 2), torch.zeros(6), torch.arange(6)[None] % 3, 0)[0]
    seen, reach = model._seen(waves[0]), np.sort(model.held_out_scores_)[int(np.ceil(401 * 0.8)) - 1]
    lower, upper = model.predict_interval(waves[0], 0.8)
    for i in range(0, 400, 40):
        own, trees = model.targets_.back(seen.middle[i] + seen.spread[i] * model.held_out_errors_), seen.trees[i]
        trees = model.targets_.back(trees)
        for end, level in ((lower[i], 0.5 - reach), (upper[i], 0.5 + reach)):
            below, up_to = (0.75 * np.mean(side(own, end)) + 0.25 * np.mean(side(trees, end)) for side in SIDES)
            assert below - 0.02 < level < up_to + 0.02  # the distribution is a few hundred atoms


def test_reach_is_that_of_all_trees_by_the_trees_of_single_seeds(waves):
    """A quantile of scores that falls as 1 / (number of trees) is told exactly, and never becomes larger."""
    model = fitted(UncertainRegressor, *waves, num_seeds=2)  # three folds: six parts of the forest for a new row
    ranks = np.linspace(0, 0.3, 400)
    model.held_out_scores_ = ranks + 0.1 / 2
    model.scores_of_seeds_ = np.stack([ranks + 0.1, ranks + 0.1])
    place = int(np.ceil(401 * 0.8)) - 1
    assert model._quantile(0.8, slice(None), "") == pytest.approx(ranks[place] + 0.1 / 6)
    model.scores_of_seeds_ = model.scores_of_seeds_ - 0.2
    assert model._quantile(0.8, slice(None), "") == pytest.approx(ranks[place] + 0.1 / 2)


def test_scores_of_seeds_have_the_trees_of_one_seed():
    x = np.random.default_rng(0).uniform(0, 1, (200, 2))
    tiles = ((8 * x).astype(int) * [1, 8]).sum(1) * 7 % 11 + 0.5
    model = UncertainRegressor(**{**QUICK, "num_seeds": 2}).fit(np.repeat(x, 2, 0), np.repeat(tiles, 2))
    assert model.share_ > 0.3
    assert model.scores_of_seeds_.shape == (2, 400)
    few, all_trees = np.quantile(model.scores_of_seeds_, 0.9), np.quantile(model.held_out_scores_, 0.9)
    assert few > all_trees  # with fewer trees more targets are far out


def test_a_low_level_of_whole_targets_has_no_reversed_interval():
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, (300, 1))
    y = np.where(random.uniform(0, 1, 300) < 0.2 + 0.3 * x[:, 0], random.integers(1, 9, 300), 0)
    model = UncertainRegressor(**QUICK).fit(x, y)
    assert np.quantile(model.held_out_scores_, 0.05) < -0.1  # zero alone holds far more than 5 %
    lower, upper = model.predict_interval(x, 0.05)
    assert (lower <= upper).all()
    assert (lower == model.predict_quantiles(x, 0.5)[:, 0]).all()


def noisy_column(count, random):
    """Noise that grows from 0.05 to 0.55 along the third column."""
    x = random.uniform(0, 1, (count, 5))
    return x, np.sin(4 * x[:, 0]) + x[:, 1] + (0.05 + 0.5 * x[:, 2]) * random.standard_normal(count)


def test_coverage_holds_by_fifths_of_a_noisy_column():
    """Each fifth has 2,400 rows of six samples: the standard error is about 1 % between samples."""
    random, inside = np.random.default_rng(3), []
    for seed in range(6):
        x, y = noisy_column(2400, random)
        model = UncertainRegressor(random_state=seed, num_steps=300, num_seeds=2).fit(x[:400], y[:400])
        lower, upper = model.predict_interval(x[400:])
        inside.append(((lower <= y[400:]) & (y[400:] <= upper))[np.argsort(x[400:, 2])].reshape(5, -1).mean(1))
    assert (np.mean(inside, 0) > 0.84).all()
    assert (np.mean(inside, 0) < 0.97).all()


def test_counts_stay_whole_and_positive_and_quantiles_are_in_order():
    random = np.random.default_rng(0)
    x = random.uniform(0, 1, (400, 3))
    y = random.poisson(np.exp(2.5 * x[:, 0]))
    model = UncertainRegressor(**QUICK, target_transform="sqrt").fit(x, y)
    assert model.targets_.is_whole
    lower, upper = model.predict_interval(x)
    assert (lower >= 0).all()
    assert (lower == np.round(lower)).all()
    assert (upper == np.round(upper)).all()
    quantiles = model.predict_quantiles(x, (0.05, 0.5, 0.95))
    assert (np.diff(quantiles, axis=1) >= 0).all()
    assert (quantiles >= 0).all()
    assert (quantiles == np.round(quantiles)).all()
    assert model.predict(x).mean() == pytest.approx(y.mean(), rel=0.1)
    assert (model.sample(x, 5, random_state=0) == np.round(model.sample(x, 5, random_state=0))).all()
    with pytest.raises(BatchbayesError, match="targets of zero or more"):
        UncertainRegressor(**QUICK, target_transform="log").fit(x, y - 1)


def test_a_transform_is_chosen_where_it_helps():
    random = np.random.default_rng(0)
    x, noise = random.uniform(0, 1, (300, 3)), random.standard_normal(300)
    skewed, plain = np.exp(3 * x[:, 0] + 0.5 * noise), 10 + 3 * x[:, 0] + 0.5 * noise
    model = UncertainRegressor(**QUICK).fit(x, skewed)
    assert model.targets_.name == "log"
    assert (model.predict_interval(x)[0] > 0).all()
    assert UncertainRegressor(**QUICK).fit(x, plain).targets_.name == "none"


def test_outliers_leave_the_other_predictions_sharp():
    """With 3 % outliers the middle two tenths of the PIT should hold 20 % of the rows."""
    random = np.random.default_rng(0)
    x = random.uniform(-2, 2, (2400, 3))
    y = np.sin(2 * x[:, 0]) + 0.5 * x[:, 1] + 0.1 * random.standard_normal(2400)
    y += np.where(random.random(2400) < 0.03, 5 * random.standard_normal(2400), 0)
    model = UncertainRegressor(random_state=0, num_seeds=2, num_steps=300).fit(x[:400], y[:400])
    assert model.networks_.candidate.tail > 0
    middle = model.predict_quantiles(x[400:], (0.4, 0.6))
    assert 0.15 < ((middle[:, 0] < y[400:]) & (y[400:] < middle[:, 1])).mean() < 0.3


def test_groups_have_intervals_of_their_own(waves):
    x, y = waves
    groups = np.where(x[:, 0] > 0, "right", "left")
    model = UncertainRegressor(**QUICK).fit(x, y, groups=groups)
    ends = np.stack(model.predict_interval(x, 0.8, groups=groups), 1)
    for name in ("left", "right"):
        own = model.held_out_scores_[model.groups_ == name]
        assert 100 < len(own) < 300
        reach = np.sort(own)[int(np.ceil((len(own) + 1) * 0.8)) - 1]
        wanted = model.predict_quantiles(x, (0.5 - reach, 0.5 + reach + SLACK))
        np.testing.assert_allclose(ends[groups == name], wanted[groups == name])
    with pytest.raises(BatchbayesError, match=r"in group middle.*pass a group that fit had"):
        model.predict_interval(x[:1], groups=["middle"])
    with pytest.raises(BatchbayesError, match="a fit without groups"):
        fitted(UncertainRegressor, x, y).predict_interval(x, groups=groups)


def test_sets_of_classes_hold_the_truth():
    """On 2,000 new rows: the standard error is about 2 %, mostly by the 400 rows of training."""
    random = np.random.default_rng(0)
    x = random.standard_normal((2400, 2))
    y = np.array(["a", "b", "c"])[(x[:, 0] + random.standard_normal(2400) > 0) + (x[:, 1] > 1.2).astype(int)]
    model = UncertainClassifier(**QUICK).fit(x[:400], y[:400])
    truth = y[400:, None] == model.classes_
    for by_class in (False, True):
        sets = model.predict_set(x[400:], 0.9, by_class)
        assert sets.any(1).all()
        assert 1 < sets.sum(1).mean() < 2.5
        assert sets[truth].mean() == pytest.approx(0.91, abs=0.05)
        if by_class:
            assert min(sets[truth[:, k], k].mean() for k in range(3)) > 0.8
    assert model.predict_set(x[400:], 0.99).sum() > sets.sum()


def test_classes_without_mistakes_are_not_certain():
    x = np.r_[np.linspace(-3, -2, 50), np.linspace(2, 3, 50)][:, None]
    model = UncertainClassifier(**QUICK).fit(x, x[:, 0] > 0)
    probs = model.predict_proba(x)
    np.testing.assert_allclose(probs.sum(1), 1)
    assert probs.min() >= 0.5 / 101
    assert probs.max() > 0.95


def test_class_weights_are_weights_of_rows(waves):
    x, y = waves[0], np.where(waves[1] > 12, "high", "low")
    weighted = UncertainClassifier(**QUICK, class_weight={"high": 3, "low": 1}).fit(x, y)
    by_rows = UncertainClassifier(**QUICK).fit(x, y, sample_weight=np.where(y == "high", 3, 1))
    assert (weighted.predict_proba(x) == by_rows.predict_proba(x)).all()
    balanced = UncertainClassifier(**QUICK, class_weight="balanced").fit(x, y)
    plain = UncertainClassifier(**QUICK).fit(x, y)
    assert balanced.predict_proba(x)[:, 0].mean() > plain.predict_proba(x)[:, 0].mean() + 0.05


@BOTH
def test_estimators_draw_themselves(kind, waves):
    x, y = waves
    labels = np.where(y > 10, "high", "low") if kind is UncertainClassifier else y
    figure = fitted(kind, x, y).plot(x, labels)
    assert len(figure.axes) == (2 if kind is UncertainClassifier else 3)


def test_a_frame_of_few_rows_has_intervals_of_a_level_that_they_can_hold():
    pytest.importorskip("pandas")
    x = np.linspace(0, 1, 8)[:, None]
    model = UncertainRegressor(**QUICK).fit(x, x[:, 0])
    with pytest.raises(BatchbayesError, match="lower the level"):
        model.predict_frame(x)
    assert list(model.predict_frame(x, level=0.5)) == ["prediction", "std", "lower", "upper"]


def test_bars_of_a_classifier_stand_where_its_answers_are(waves):
    x, y = waves
    labels = np.where(y > 10, "high", "low")
    model = fitted(UncertainClassifier, x, y)
    confidence = model.predict_proba(x).max(1)
    for bar in model.plot(x, labels).axes[1].patches:
        middle, share = bar.get_x() + bar.get_width() / 2, bar.get_height()
        assert share == pytest.approx(((confidence > middle - 0.05) & (confidence <= middle + 0.05)).mean())


def test_an_outlier_does_not_flatten_the_panel():
    lower, upper, targets = np.full(300, -1.0), np.full(300, 1.0), np.zeros(300)
    targets[0] = 1000.0
    panel = table_figure(lower, upper, targets, np.full(300, 0.5)).axes[0]
    assert panel.get_ylim()[1] < 2
    assert [text.get_text() for text in panel.get_legend().get_texts()] == ["inside", "farther outside"]


def test_a_figure_of_a_table_counts_what_is_inside():
    lower, upper = np.zeros(10), np.arange(1.0, 11.0)
    targets = np.where(np.arange(10) < 2, 20.0, 0.5)  # the two narrowest intervals miss
    first, second, third = table_figure(lower, upper, targets, np.full(10, 0.95), level=0.8).axes
    assert first.get_title() == "80% inside, 80% wanted"
    assert [bar.get_height() for bar in second.patches] == [0, 1, 1, 1, 1]
    assert [bar.get_height() for bar in third.patches] == pytest.approx([0] * 9 + [1])


@BOTH
def test_fractional_weights_do_not_depend_on_the_order_of_rows(kind, waves):
    x, y = waves[0][:90], waves[1][:90]
    labels = np.where(y > 10, "high", "low") if kind is UncertainClassifier else y
    weights, order = np.linspace(0.1, 1, 90), np.random.default_rng(0).permutation(90)
    one = kind(**QUICK).fit(x, labels, sample_weight=weights)
    other = kind(**QUICK).fit(x[order], labels[order], sample_weight=weights[order])
    assert (one.predict(x) == other.predict(x)).all()
    assert (one.sample(x, 4, random_state=0) == other.sample(x, 4, random_state=0)).all()


@BOTH
def test_damaged_and_old_files_are_refused(kind, waves, tmp_path):
    path = tmp_path / "model.safetensors"
    fitted(kind, *waves).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    with pytest.raises(BatchbayesError, match="checksum"):
        kind.load(path)
    write_tensors(path, {}, {"batchbayes": json.dumps({"format": 1, "estimator": kind.__name__})})
    with pytest.raises(BatchbayesError, match=r"0\.2\.0.*fit and save again"):
        kind.load(path)
    old = kind()
    with pytest.raises(BatchbayesError, match=r"fit again, or use batchbayes 0\.2\.0"):
        old.__setstate__({"networks_": None})


def test_a_missing_package_is_told_in_words():
    code = (
        "import sys; sys.modules['sklearn'] = None\n"
        "try:\n    import batchbayes.sklearn\nexcept ModuleNotFoundError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert install_command(package="batchbayes-tables") in done.stdout


def test_std_covers_the_noise_and_more_of_it_where_there_is_more(waves):
    model = fitted(UncertainRegressor, *waves, num_steps=600)
    x, y = more_waves(1)
    mean, std = model.predict(x, return_std=True)
    assert np.sqrt(((mean - y) ** 2).mean()) < 1.6
    assert np.sqrt((std**2).mean()) == pytest.approx(np.sqrt(((mean - y) ** 2).mean()), rel=0.2)
    narrow, wide = (np.diff(model.predict_interval(x, level), axis=0) for level in (0.5, 0.95))
    assert (wide > narrow).all()
    with pytest.raises(BatchbayesError, match="num_samples"):
        model.sample(x, -1)
    samples = model.sample(x, 500, random_state=0)
    assert samples.shape == (400, 500)
    np.testing.assert_allclose(samples.mean(1), mean, atol=5 * std.max() / 500**0.5)
    np.testing.assert_allclose(samples.std(1), std, rtol=0.25)


def test_probabilities_are_calibrated_and_samples_follow_them():
    x, y = load_breast_cancer(return_X_y=True)
    model = UncertainClassifier(**{**QUICK, "num_steps": 300}).fit(x[::2], y[::2])
    probs = model.predict_proba(x[1::2])
    assert model.score(x[1::2], y[1::2]) > 0.93
    assert log_loss(y[1::2], probs) < 0.2
    samples = model.sample(x[1::2], 400, random_state=0)
    np.testing.assert_allclose((samples == 1).mean(1), probs[:, 1], atol=0.12)  # 5 standard errors


@BOTH
def test_novelty_tells_strange_rows(kind, waves):
    x, y = waves
    model = fitted(kind, x, y)
    assert (model.novelty(x + 40) < 0.02).all()
    assert 0.2 < model.novelty(x).mean() < 0.8
    with pytest.raises(BatchbayesError, match="at least 40 training rows"):
        fitted(kind, x[:60], y[:60]).novelty(x)


@BOTH
def test_files_bring_back_the_same_predictions(kind, waves, tmp_path):
    x, y = waves
    model = fitted(kind, x, y)
    model.save(tmp_path / "model.safetensors")
    back, pickled = kind.load(tmp_path / "model.safetensors"), pickle.loads(pickle.dumps(model))
    x = x + 0.01  # the rank of a training row among training rows is a tie, which rounding may break
    for other in (back, pickled):
        assert (other.predict(x) == model.predict(x)).all()
        assert (other.novelty(x) == model.novelty(x)).all()
        assert (other.sample(x, 3, random_state=1) == model.sample(x, 3, random_state=1)).all()
    if kind is UncertainRegressor:
        assert (back.predict_interval(x, 0.8)[0] == model.predict_interval(x, 0.8)[0]).all()
    (tmp_path / "bad.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(BatchbayesError, match="fit and save again"):
        kind.load(tmp_path / "bad.safetensors")
    other = UncertainClassifier if kind is UncertainRegressor else UncertainRegressor
    with pytest.raises(BatchbayesError, match="check the path and the class"):
        other.load(tmp_path / "model.safetensors")


@BOTH
def test_seeds_order_and_weights(kind, waves):
    x, y = waves[0][:120], waves[1][:120]
    model = fitted(kind, x, y)
    prediction = (lambda m: m.predict_proba(x)) if kind is UncertainClassifier else (lambda m: m.predict(x))
    assert (prediction(fitted(kind, x[::-1], y[::-1])) == prediction(model)).all()
    assert (prediction(fitted(kind, x, y, random_state=1)) != prediction(model)).any()
    labels = np.where(y > 10, "high", "low") if kind is UncertainClassifier else y
    weights = np.arange(120) % 3
    left = kind(**QUICK).fit(x[weights > 0], labels[weights > 0], sample_weight=weights[weights > 0])
    assert (prediction(kind(**QUICK).fit(x, labels, sample_weight=weights)) == prediction(left)).all()
    kind(**QUICK).fit(x, labels, sample_weight=np.linspace(0, 1, 120))
    with pytest.raises(BatchbayesError, match="sample weights of zero or more"):
        kind(**QUICK).fit(x, labels, sample_weight=-weights)
    with pytest.raises(BatchbayesError, match="at least 5 rows with a weight above zero; got 1"):
        kind(**QUICK).fit(x, labels, sample_weight=np.arange(120) == 7)
    with pytest.raises(BatchbayesError, match="repetitions of rows"):
        kind(**QUICK).fit(x, labels, sample_weight=np.full(120, 1e9))


def test_networks_have_seen_no_copy_of_the_rows_that_they_calibrate():
    """With a weight of 2 each, half of the copies would be known by heart, and intervals would hold 77 % of 90."""
    inside = []
    for seed in range(3):
        x, y = more_waves(seed)
        model = UncertainRegressor(**{**QUICK, "num_steps": 600}).fit(x[:100], y[:100], sample_weight=np.full(100, 2.0))
        lower, upper = model.predict_interval(x[100:], 0.9)
        inside.append(((lower <= y[100:]) & (y[100:] <= upper)).mean())
        np.testing.assert_array_equal(*model.held_out_scores_.reshape(100, 2).T)  # of a row and its copy
    assert np.mean(inside) > 0.9 - 3 * (0.09 / 300) ** 0.5 - 3 * (0.09 / 300) ** 0.5  # of training and of new rows


def test_pipeline_search_and_cross_validation():
    x, y = load_diabetes(return_X_y=True)
    pipeline = make_pipeline(StandardScaler(), PolynomialFeatures(1), UncertainRegressor(**QUICK))
    assert cross_val_score(pipeline, x, y, cv=3).mean() > 0.3
    search = GridSearchCV(UncertainRegressor(**QUICK), {"hidden_widths": [(8,), (16, 16)]}, cv=2).fit(x, y)
    assert search.best_params_["hidden_widths"] in [(8,), (16, 16)]
    _, std = search.best_estimator_.predict(x, return_std=True)
    assert (std > 0).all()
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()


def test_a_frame_brings_its_names(waves):
    pandas = pytest.importorskip("pandas", reason="needs pandas")
    x, y = waves
    frame = pandas.DataFrame(x, columns=["left", "right"])
    model = fitted(UncertainRegressor, frame, pandas.Series(y))
    assert model.feature_names_in_.tolist() == ["left", "right"]
    assert (model.predict(frame) == fitted(UncertainRegressor, x, y).predict(x)).all()
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame[["right", "left"]])
    new = frame.set_index(pandas.Index([f"row {i}" for i in range(len(frame))]))
    table = model.predict_frame(new)
    assert table.columns.tolist() == ["prediction", "std", "lower", "upper", "novelty"]
    assert (table.index == new.index).all()
    assert (table["upper"] == model.predict_interval(frame)[1]).all()
    assert len(fitted(UncertainRegressor, x, y).predict_frame(x.tolist())) == len(x)  # lists have a method `index`
    table = fitted(UncertainClassifier, frame, y).predict_frame(new)
    assert table.columns.tolist() == ["prediction", "P(high)", "P(low)", "novelty"]
    np.testing.assert_allclose(table["P(high)"] + table["P(low)"], 1)


def test_mapie_wraps_both_estimators(waves):
    pytest.importorskip("mapie", reason="needs mapie: run `make users`")
    from mapie.classification import SplitConformalClassifier
    from mapie.regression import CrossConformalRegressor, SplitConformalRegressor

    x, y = waves
    split = SplitConformalRegressor(UncertainRegressor(**QUICK), confidence_level=0.9, prefit=False)
    ends = split.fit(x[:150], y[:150]).conformalize(x[150:270], y[150:270]).predict_interval(x[270:])[1][:, :, 0]
    assert ((ends[:, 0] <= y[270:]) & (y[270:] <= ends[:, 1])).mean() == pytest.approx(0.9, abs=0.12)  # 4 std. errors
    cross = CrossConformalRegressor(UncertainRegressor(**QUICK), confidence_level=0.9, cv=2)
    assert cross.fit_conformalize(x[:200], y[:200]).predict_interval(x[200:])[1].shape == (200, 2, 1)
    labels = (y > 10).astype(int)
    sets = SplitConformalClassifier(UncertainClassifier(**QUICK), confidence_level=0.9, prefit=False)
    found = sets.fit(x[:150], labels[:150]).conformalize(x[150:270], labels[150:270]).predict_set(x[270:])[1][:, :, 0]
    assert found[np.arange(130), labels[270:]].mean() == pytest.approx(0.9, abs=0.12)


def test_tiny_units_are_no_constants(waves):
    x, y = waves
    ordinary, tiny = fitted(UncertainRegressor, x, y), fitted(UncertainRegressor, x * 1e-20, y * 1e-20)
    np.testing.assert_allclose(tiny.predict(x[:5] * 1e-20) * 1e20, ordinary.predict(x[:5]), rtol=1e-3)


def test_classes_that_are_dates_are_saved(waves, tmp_path):
    x, y = waves
    days = np.where(y > 10, np.datetime64("2024-05-31"), np.datetime64("2025-01-01"))
    model = UncertainClassifier(**QUICK).fit(x, days)
    model.save(tmp_path / "model.safetensors")
    assert (UncertainClassifier.load(tmp_path / "model.safetensors").predict(x) == model.predict(x)).all()


def test_parameters_of_numpy_are_saved(waves, tmp_path):
    model = fitted(UncertainRegressor, *waves, num_draws=np.int64(3), weight_decays=np.array([1e-3]))
    model.save(tmp_path / "model.safetensors")
    again = UncertainRegressor.load(tmp_path / "model.safetensors")
    assert (again.num_draws, again.weight_decays) == (3, (1e-3,))


def test_numbers_that_are_too_large_are_refused(waves):
    x, y = waves
    with pytest.raises(BatchbayesError, match="too far away"):
        fitted(UncertainRegressor, x, y).predict(x[:2] * 1e300)
    with pytest.raises(BatchbayesError, match="squares are finite"):
        fitted(UncertainRegressor, x, y * 1e200)


def test_bad_parameters_say_what_to_do(waves):
    x, y = waves
    wrong = {"num_folds": 1, "num_steps": 0, "batch_size": 1.5, "weight_decays": (), "hidden_widths": 64,
             "learning_rate": "0.1"}  # fmt: skip
    for name, value in wrong.items():
        with pytest.raises(BatchbayesError, match="Do this"):
            UncertainRegressor(**{**QUICK, name: value}).fit(x, y)
    with pytest.raises(BatchbayesError, match="a level"):
        fitted(UncertainRegressor, x, y).predict_interval(x, 1.5)
    with pytest.raises(BatchbayesError, match="lower the level"):
        fitted(UncertainRegressor, x[:20], y[:20]).predict_interval(x, 0.99)
    with pytest.raises(BatchbayesError, match="two classes or more"):
        UncertainClassifier(**QUICK).fit(x, np.zeros(len(x)))


def test_settings_of_torch_do_not_matter_and_are_left_alone(waves):
    x, y = waves
    before = torch.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        found = UncertainRegressor(**QUICK).fit(x, y)
    finally:
        torch.set_default_dtype(torch.float32)
    assert found.detector_ is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert found.predict(x).shape == y.shape


def test_without_scikit_learn_an_error_says_what_to_install():
    code = "import sys; sys.modules['sklearn'] = None; import batchbayes.sklearn"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1].endswith(
        f"got no sklearn. Do this: {install_command(package='batchbayes-tables')}."
    )


def test_trees_are_those_of_scikit_learn_and_leave_out_their_fold():
    random = np.random.default_rng(0)
    x, y = torch.from_numpy(random.standard_normal((60, 3))).float(), torch.from_numpy(random.standard_normal(60))
    folds = torch.arange(60)[None] % 2
    forest, held_out = grow(x, y, folds, seed=0)
    wanted = []
    for number, fold in enumerate((0, 1)):
        used = folds[0] != fold
        model = ExtraTreesRegressor(TREES, random_state=stream_seed(0, "trees", number) % 2**32).fit(x[used], y[used])
        wanted += [tree.predict(x.numpy()) for tree in model.estimators_]
    np.testing.assert_allclose(forest(x).T, wanted)
    np.testing.assert_allclose(held_out[0::2], forest(x)[0::2, :TREES])
    np.testing.assert_allclose(held_out[1::2], forest(x)[1::2, TREES:])


def test_trees_count_where_targets_jump_and_not_where_they_are_smooth():
    x = np.random.default_rng(0).uniform(0, 1, (200, 2))
    tiles = ((8 * x).astype(int) * [1, 8]).sum(1) * 7 % 11 + 0.5
    jumps = UncertainRegressor(**QUICK).fit(np.repeat(x, 2, 0), np.repeat(tiles, 2))
    smooth = UncertainRegressor(**{**QUICK, "num_steps": 600}).fit(x, x @ [1.0, 2.0])
    assert jumps.share_ >= 0.5
    assert jumps.forest_ is not None
    assert smooth.share_ <= 0.1
    mean, std = jumps.predict(x, return_std=True)
    samples = jumps.sample(x, 400, random_state=0)
    np.testing.assert_allclose(samples.mean(1), mean, atol=6 * std.max() / 20)
    assert np.corrcoef(samples.std(1), std)[0, 1] > 0.9


def test_several_outputs_have_a_covariance(waves):
    """Two outputs share a part of their noise: its correlation is 0.8, with a standard error of 0.02."""
    x, random = waves[0], np.random.default_rng(5)
    noise = random.multivariate_normal([0, 0, 0], [[1, 0.8, 0], [0.8, 1, 0], [0, 0, 1]], 400)
    y = np.stack([np.sin(x[:, 0]), x[:, 1], x[:, 0]], 1) + noise
    model = UncertainOutputs(UncertainRegressor(**QUICK)).fit(x, y)
    assert model.correlation_[0, 1] == pytest.approx(0.8, abs=0.08)
    assert model.correlation_[0, 2] == pytest.approx(0, abs=0.15)
    mean, std = model.predict(x, return_std=True)
    covariance = model.predict_covariance(x)
    np.testing.assert_allclose(np.sqrt(np.diagonal(covariance, axis1=1, axis2=2)), std)
    assert (np.linalg.eigvalsh(covariance) > 0).all()
    samples = model.sample(x[:20], 4000, random_state=0) - mean[:20, None]
    assert np.corrcoef(samples.reshape(-1, 3).T)[0, 1] == pytest.approx(0.8, abs=0.1)
    lower, upper = model.predict_interval(x, 0.8)
    assert ((lower <= y) & (y <= upper)).mean() == pytest.approx(0.82, abs=0.06)
    quantiles = model.predict_quantiles(x, (0.2, 0.7))
    assert quantiles.shape == (400, 2, 3)
    np.testing.assert_array_equal(quantiles[:, 1, 2], model.estimators_[2].predict_quantiles(x, 0.7)[:, 0])


def test_several_outputs_have_intervals_of_groups(waves):
    x, y = waves
    groups = np.where(x[:, 0] > 0, "right", "left")
    model = UncertainOutputs(UncertainRegressor(**QUICK)).fit(x, np.stack([y, -y], 1), groups=groups)
    wanted = UncertainRegressor(**QUICK).fit(x, -y, groups=groups).predict_interval(x, 0.8, groups)
    np.testing.assert_array_equal(np.stack(model.predict_interval(x, 0.8, groups))[..., 1], wanted)


def test_targets_that_are_not_one_number_say_what_to_use(waves):
    x, y = waves
    with pytest.raises(ValueError, match=r"shape \(400, 2\).*UncertainOutputs"):
        UncertainRegressor(**QUICK).fit(x, np.stack([y, y], 1))
    with pytest.raises(BatchbayesError, match="days since a date"):
        UncertainRegressor(**QUICK).fit(x, np.datetime64("2024-01-01") + np.arange(400))


def test_pipelines_keep_what_the_last_step_can_do(waves):
    x, y = waves
    model = pipeline(StandardScaler(), UncertainRegressor(**QUICK)).fit(x, y)
    inputs = StandardScaler().fit_transform(x)
    alone = UncertainRegressor(**QUICK).fit(inputs, y)
    np.testing.assert_allclose(model.predict_interval(x, 0.8), alone.predict_interval(inputs, 0.8))
    np.testing.assert_allclose(model.predict_quantiles(x, levels=(0.3,)), alone.predict_quantiles(inputs, (0.3,)))
    assert not hasattr(model, "predict_set")
    assert clone(model).get_params()["uncertainregressor__num_steps"] == QUICK["num_steps"]
    assert (pickle.loads(pickle.dumps(model)).novelty(x) == model.novelty(x)).all()


def test_transformed_targets_work(waves):
    x, y = waves[0], np.exp(waves[1] / 5)
    model = TransformedTargetRegressor(UncertainRegressor(**QUICK), func=np.log, inverse_func=np.exp).fit(x, y)
    assert model.score(x, y) > 0.5
    lower, upper = np.exp(model.regressor_.predict_interval(x))
    assert ((lower <= y) & (y <= upper)).mean() > 0.85


@BOTH
def test_a_warm_start_goes_on_with_the_networks(kind, waves):
    x, y = waves
    model = fitted(kind, x[:300], y[:300], warm_start=True, num_steps=60)
    before, columns = model.networks_, model.columns_
    labels = np.where(y > 10, "high", "low") if kind is UncertainClassifier else y
    first = model.score(x, labels)
    model.fit(x, labels)
    assert model.columns_ is columns
    first_layer = f"{before.stack.layers[0].linear}.weight"
    new, old = (fit.stack.tensors[first_layer] for fit in (model.networks_, before))
    assert 0 < (new - old).norm() < 0.9 * old.norm()  # new networks would be about 1.4 times as far away
    assert model.score(x, labels) > first - 0.02
    codes = np.arange(400.0)
    some, every = (model._folds(codes[:n], model._inputs(x[:n]), codes[:n])[0] for n in (300, 400))
    assert torch.equal(some, every[:, :300])  # rows stay in their folds
    assert torch.bincount(every[0]).min() > 90
    with pytest.raises(BatchbayesError, match="more rows for warm_start"):
        kind(**QUICK, warm_start=True).fit(
            x[:5], labels[[0, 1, 2, 3, 4]] if kind is UncertainRegressor else list("ababa")
        )
    assert model.set_params(hidden_widths=(8,)).fit(x, labels).networks_.stack.hidden_widths == (8,)


def test_a_warm_start_keeps_its_classes(waves):
    x, labels = waves[0], np.digitize(waves[1], [8, 12])
    model = UncertainClassifier(**QUICK, warm_start=True).fit(x, labels)
    assert model.fit(x[labels > 0], labels[labels > 0]).classes_.tolist() == [0, 1, 2]
    assert model.predict_proba(x).shape == (400, 3)
    assert model.score(x[labels > 0], labels[labels > 0]) > 0.7
    with pytest.raises(BatchbayesError, match=r"classes of the fit before.*also \[3\].*warm_start=False"):
        model.fit(x, np.where(labels == 2, 3, labels))


@BOTH
def test_a_pickle_of_0_2_0_says_what_to_do(kind):
    path = Path(__file__).parent / "files" / f"{kind.__name__}.pickle"
    with pytest.raises(BatchbayesError, match=r"fit again, or use batchbayes 0\.2\.0"):
        pickle.loads(path.read_bytes())
