"""The scikit-learn estimators: what scikit-learn asks of an estimator, and what they promise beyond that."""

import pickle
import subprocess
import sys
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_breast_cancer, load_diabetes
from sklearn.metrics import log_loss
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PolynomialFeatures, StandardScaler
from sklearn.utils.estimator_checks import check_estimator

from batchbayes.errors import BatchbayesError
from batchbayes.sklearn import UncertainClassifier, UncertainRegressor

SMALL = {"hidden_widths": (16,), "num_steps": 120, "num_seeds": 1, "num_folds": 2, "weight_decays": (1e-3,),
         "num_draws": 2}  # fmt: skip
QUICK = {**SMALL, "num_folds": 3, "num_steps": 150, "num_draws": 4, "hidden_widths": (32,), "random_state": 0}
SKIPPED = {
    "check_array_api_input",  # only with SCIPY_ARRAY_API=1
    "check_sample_weights_pandas_series",  # these three only with pandas
    "check_regressor_data_not_an_array",
    "check_classifier_data_not_an_array",
}
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
def test_all_checks_of_scikit_learn(kind):
    results = check_estimator(kind(**SMALL), on_fail=None, on_skip=None)
    bad = {
        each["check_name"]: str(each["exception"]) for each in results if each["status"] not in ("passed", "skipped")
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
def test_widths_are_those_of_the_average_of_all_networks(shared):
    """Errors are a part that all networks share, and one of each: the quantile of their average is known."""
    random, model = np.random.default_rng(0), UncertainRegressor()
    model.networks_ = SimpleNamespace(stack=range(20))
    model.held_out_errors_ = shared * random.standard_normal(100_000) + random.standard_normal((4, 100_000))
    for level, quantile in ((0.9, 1.6449), (0.5, 0.6745)):
        wanted = quantile * (shared**2 + 1 / 20) ** 0.5
        assert model._width(level) == pytest.approx(wanted, rel=0.05 if shared == 0 else 0.015)  # 3 standard errors


def test_the_spread_of_a_new_row_is_that_of_networks_that_left_out_one_fold(waves):
    model = fitted(UncertainRegressor, *waves, num_seeds=2)
    draws = model.networks_.draws(model._inputs(waves[0]))[..., 0].numpy().reshape(2, 3, 4, -1)
    variances = [draws[:, fold].reshape(8, -1).var(0) for fold in range(3)]
    wanted = np.sqrt(np.mean(variances, 0) + 1 / model.precision_)
    lower, upper = model.predict_interval(waves[0], 0.8)
    np.testing.assert_allclose(upper - lower, 2 * model._width(0.8) * wanted * model.target_std_, rtol=1e-6)
    np.testing.assert_allclose((upper + lower) / 2, model.predict(waves[0]), rtol=1e-6)


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
    repeated = kind(**QUICK).fit(np.repeat(x, weights, axis=0), np.repeat(labels, weights))
    assert (prediction(kind(**QUICK).fit(x, labels, sample_weight=weights)) == prediction(repeated)).all()
    kind(**QUICK).fit(x, labels, sample_weight=np.linspace(0, 1, 120))
    with pytest.raises(BatchbayesError, match="sample weights of zero or more"):
        kind(**QUICK).fit(x, labels, sample_weight=-weights)
    with pytest.raises(BatchbayesError, match="repetitions of rows"):
        kind(**QUICK).fit(x, labels, sample_weight=np.full(120, 1e9))


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
    assert done.stderr.splitlines()[-1].endswith("got no sklearn. Do this: pip install 'batchbayes[sklearn]'.")
