"""The choice of a method: honest on small data, simple where the data cannot tell, within the budget."""

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from helpers import assess_cases
from torch import nn

import batchbayes as bb
from batchbayes.engines.linear import Drawn
from batchbayes.methods.candidates import Candidate, cross_fitted_gain
from batchbayes.methods.table import METHODS
from batchbayes.metrics import mean_score
from batchbayes.models import MLP
from batchbayes.report.compare import tuning
from batchbayes.report.compare.choice import judge_all, recommend
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.groups import Trust
from batchbayes.report.options import Settings
from batchbayes.report.read.views import named_views

pytestmark = pytest.mark.filterwarnings(
    "ignore:WARNING. most test examples",
    "ignore:The tuned batch size",
    "ignore:.*lacks classes",
)  # what a report says; tests of these warnings ask for them


def contender(name, mean, noise, *, rank=0, passes=1.0, count=400):
    """A contender whose losses differ from those of others by a mean and by noise of their own."""
    random = torch.Generator().manual_seed(sum(map(ord, name)))
    common = torch.rand(count, generator=torch.Generator().manual_seed(0))
    losses = common + mean + noise * torch.randn(count, generator=random)
    return Contender(named(name, bb.deterministic(nn.Identity()), rank), 1, {}, losses.double(), passes=passes)


def named(name, posterior, rank=0, **more):
    """A candidate of a method of this name."""
    return Candidate(replace(METHODS["mcbn"], name=name, label=name), posterior, rank=rank, **more)


def test_the_best_is_recommended_if_it_is_clearly_better():
    picked = recommend([contender("network", 0.5, 0.1), contender("views", 0.3, 0.1, rank=1, passes=16)])
    assert (picked.recommended.name, picked.best.name, picked.beyond) == ("views", "views", None)


def test_the_simpler_is_recommended_within_noise():
    picked = recommend(
        [contender("complex", 0.299, 0.1, rank=2), contender("simple", 0.3, 0.1, rank=1), contender("n", 0.5, 0.1)]
    )
    assert (picked.recommended.name, picked.best.name) == ("simple", "complex")


@pytest.mark.parametrize(("errors", "enough"), [(0.9, False), (1.1, True)])
def test_a_temperature_needs_less_evidence_because_it_costs_nothing(errors, enough):
    noise = torch.linspace(-1, 1, 101).double()
    better = noise - errors * float(noise.std(correction=0)) / 10  # better by `errors` standard errors
    plain, other = (
        replace(contender(name, 0, 0, rank=rank), calibration_losses=0 * noise) for rank, name in enumerate("po")
    )
    scaled = replace(plain, calibration_losses=better, has_temperature=True)
    assert (recommend([plain, scaled]).recommended is scaled) == enough
    assert recommend([plain, replace(other, calibration_losses=better)]).recommended is plain
    lowest = replace(other, calibration_losses=better - 1e-3)  # the simpler one is as good, and the temperature is free
    assert (recommend([plain, scaled, lowest]).recommended is scaled) == enough


@pytest.mark.parametrize(
    ("trust", "temperature", "preferred"),
    [
        (Trust.TOO_SURE, 2.0, True),
        (Trust.TOO_SURE, 0.5, False),
        (Trust.TOO_UNSURE, 0.5, True),
        (Trust.HONEST, 2.0, False),
    ],
)
def test_a_temperature_that_points_the_right_way_is_preferred(trust, temperature, preferred):
    """It is better by half a standard error, and the calibration data calls the network too sure or too unsure."""
    noise = torch.linspace(-1, 1, 101).double()
    plain = replace(contender("p", 0, 0), calibration_losses=0 * noise, trust=trust)
    better = noise - 0.5 * float(noise.std(correction=0)) / 10
    scaled = replace(plain, calibration_losses=better, has_temperature=True, tuned={"temperature": temperature})
    assert (recommend([plain, scaled]).recommended is scaled) == preferred
    worse = replace(scaled, calibration_losses=-better)
    assert recommend([plain, worse]).recommended is plain


def test_the_budget_is_kept_and_what_it_costs_is_told():
    trials = [
        contender("network", 0.5, 0.1),
        contender("few", 0.4, 0.1, rank=1, passes=4),
        contender("many", 0.3, 0.1, passes=16),
    ]
    assert recommend(trials).recommended.name == "many"
    for budget, name, beyond in ((16, "many", None), (15, "few", "many"), (3, "network", "many")):
        picked = recommend(trials, budget)
        assert picked.recommended.name == name
        assert (picked.beyond and picked.beyond.name) == beyond


def test_the_cheapest_is_recommended_of_what_is_alike():
    """Many views are better by a thousandth in every example: certain, and worth nothing."""
    few, many = contender("views", 0.301, 0.0, rank=1, passes=4), contender("views", 0.3, 0.0, rank=1, passes=16)
    network = contender("network", 0.5, 0.1)
    assert recommend([network, many, few]).recommended is few
    dear = replace(few, calibration_losses=many.calibration_losses + 0.02)
    assert recommend([network, many, dear]).recommended is many
    simple, cheap = contender("simple", 0.3, 0.1, rank=1, passes=64), contender("cheap", 0.299, 0.1, rank=2, passes=2)
    assert recommend([network, simple, cheap]).recommended is cheap


@dataclass(frozen=True)
class Stub:
    """What `judge_all` needs of a case."""

    settings: Settings
    calibration: object


def tries(losses, *, settings=None, count=400):
    """Try methods whose losses by the linear engine and by exact draws are given: name -> (linear, exact)."""
    network = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    noisy = bb.mcbn(network.train(), torch.randn(40, 2), batch_size=8, num_samples=4)
    candidates = [named("network", bb.deterministic(network), sizes=(1,))]
    candidates += [named(name, noisy, rank, sizes=(64,)) for rank, name in enumerate(list(losses)[1:-1], start=1)]
    candidates += [named("views", noisy, 9, sizes=(4,), views=4, settings={"views": "flips"})]
    asked = []

    def judge(case, candidate):
        name = candidate.method.name
        linear, exact = losses[name]
        is_linear = case.settings.engine != "sample" and linear is not None
        some = 64 if case.calibration == "some" else count
        found = contender(name, linear if is_linear else exact, 0.1, count=count)
        asked.append((name, is_linear, some))
        found = replace(found, candidate=candidate, drawn=Drawn.LINEAR if is_linear else Drawn.EXACT)
        return [replace(found, calibration_losses=found.calibration_losses[:: count // some][:some])]

    case = Stub(settings or Settings(), SimpleNamespace(some=lambda rows: "some"))
    found = judge_all(case, candidates, judge, 64, price=lambda *_: 1.0)
    assert [each.candidate.method.name for each in found] == list(losses)
    return found, asked


@pytest.mark.parametrize(
    ("wild", "engines"),
    [
        ((), {"network": Drawn.EXACT, "calm": Drawn.LINEAR, "rough": Drawn.LINEAR, "views": Drawn.EXACT}),
        (("rough",), dict.fromkeys(("network", "calm", "rough", "views"), Drawn.EXACT)),
        (("calm", "rough"), dict.fromkeys(("network", "calm", "rough", "views"), Drawn.EXACT)),
    ],
)
def test_methods_are_compared_with_one_engine(wild, engines):
    """Where the linear engine does not hold for one method, exact draws of the others are compared with it."""
    noisy = {name: (None if name in wild else 0.5, 0.5) for name in ("calm", "rough")}
    found, _ = tries({"network": (None, 0.3), **noisy, "views": (None, 0.5)})
    assert {each.candidate.method.name: each.drawn for each in found} == engines


@pytest.mark.parametrize(
    ("exact", "winner", "engine"),
    [(0.5, "network", Drawn.LINEAR), (0.41, "network", Drawn.LINEAR), (0.2, "calm", Drawn.EXACT)],
)
def test_an_error_of_the_linear_engine_does_not_decide(exact, winner, engine):
    """It says that a method is worse than the network. A few exact draws tell where this is wrong."""
    losses = {"network": (None, 0.4), "calm": (0.5, exact), "views": (None, 0.5)}
    found, asked = tries(losses)
    assert recommend(found).recommended.name == winner
    assert found[1].drawn is engine
    assert ("calm", False, 64) in asked
    assert (("calm", False, 400) in asked) == (engine is Drawn.EXACT), "exact draws of all examples only if they decide"


def test_the_linear_engine_that_was_asked_for_stays_and_exact_draws_decide():
    losses = {"network": (None, 0.4), "calm": (0.5, 0.2), "views": (None, 0.5)}
    with pytest.warns(bb.BatchbayesWarning, match="exact draws of the calibration data decided"):
        found, _ = tries(losses, settings=Settings(engine="linear"))
    assert recommend(found).recommended.name == "calm"
    assert found[1].drawn is Drawn.LINEAR


def overfitted(seed):
    """A classifier that has learnt 96 points by heart, so that methods differ."""
    x, y = assess_cases.blobs(96, seed + 100)
    torch.manual_seed(seed)
    network = MLP(2, [16, 16], 3)
    optimiser = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(40):
        for rows in torch.randperm(96).split(16):
            optimiser.zero_grad()
            nn.functional.cross_entropy(network(x[rows]), y[rows]).backward()
            optimiser.step()
    return network.eval(), x


@pytest.mark.filterwarnings("ignore:the scores of the linear engine", "ignore:the network is not linear")
@pytest.mark.parametrize(
    ("case", "count", "seed"),
    [(None, 600, 1), (2, 1200, 2), *(pytest.param(seed, 240, seed, marks=pytest.mark.slow) for seed in (0, 1))],
)
def test_the_verdict_does_not_depend_on_the_engine(case, count, seed):
    """The first two cases differed when the linear engine was trusted as soon as it looked linear."""
    if case is None:
        network, x, draws = assess_cases.classifier().eval(), assess_cases.blob_training(), 32
        network.load_state_dict(assess_cases.trained("classification"))
    else:
        (network, x), draws = overfitted(case), 24
    batch_size = None if case is None else 16
    test = assess_cases.blobs(count, seed)
    found = {
        engine: bb.assess(network, x, test, batch_size=batch_size, draws=draws, engine=engine, no_figures=True)
        for engine in ("auto", "sample", "linear")
    }
    assert len({each.recommended.name for each in found.values()}) == 1
    for each in found.values():  # what the table says is what predictions.csv says
        told = each.predict(test[0][each.rows["row"]]).log_prob(test[1][each.rows["row"]])
        assert float(-told.mean()) == pytest.approx(each.recommended.metrics["nll"], abs=1e-4)


def noise_only(count, settings, seed):
    """Scores of examples at several settings that are all equally good in truth."""
    return torch.randn(settings, count, generator=torch.Generator().manual_seed(seed)).double()


def test_a_tuned_setting_is_not_judged_by_the_examples_that_chose_it():
    """In truth all settings score 0. In sample the best looks better; corrected for the gain it does not."""
    naive, honest = [], []
    for seed in range(300):
        scores = noise_only(40, 10, seed)
        best = scores.mean(1).argmax()
        naive.append(float(scores[best].mean()))
        honest.append(float((scores[best] - cross_fitted_gain(scores, 5, seed)).mean()))
    naive, honest = torch.tensor(naive), torch.tensor(honest)
    assert float(naive.mean()) > 0.2
    assert float(honest.mean()) < 2 * float(honest.std()) / len(honest) ** 0.5


def test_a_temperature_is_not_judged_by_the_examples_that_chose_it():
    """On calibrated logits the temperature 1 is best in truth, so no tuned one can be better in the mean."""
    naive, honest = [], []
    grid = tuning.temperature_grid(0.25, 16, 17)
    for seed in range(200):
        random = torch.Generator().manual_seed(seed)
        logits = 2 * torch.randn(25, 4, generator=random).double()
        labels = torch.multinomial(logits.softmax(-1), 1, generator=random)[:, 0]
        losses = torch.stack([nn.functional.cross_entropy(logits / t, labels, reduction="none") for t in grid])
        curve, own = tuning.TemperatureCurve(grid, losses), nn.functional.cross_entropy(logits, labels)
        rows = torch.arange(25)
        naive.append(float(curve.at(curve.best(rows), rows).mean() - own))
        honest.append(float(curve.cross_fitted(seed).mean() - own))
    naive, honest = torch.tensor(naive), torch.tensor(honest)
    assert float(naive.mean()) < -2 * float(naive.std()) / len(naive) ** 0.5
    assert float(honest.mean()) > -2 * float(honest.std()) / len(honest) ** 0.5


def test_the_curve_of_temperatures_agrees_with_a_search():
    random = torch.Generator().manual_seed(1)
    logits = 6 * torch.randn(500, 5, generator=random).double()
    labels = torch.multinomial((logits / 3).softmax(-1), 1, generator=random)[:, 0]
    grid = tuning.temperature_grid(0.25, 16, 17)
    losses = torch.stack([nn.functional.cross_entropy(logits / t, labels, reduction="none") for t in grid])
    curve, rows = tuning.TemperatureCurve(grid, losses), torch.arange(500)
    summary = bb.categorical().summary()
    summary.add(logits[None])
    exact = bb.calibrate.tune_temperature(summary.finish(logits[None]), labels)
    assert curve.best(rows) == pytest.approx(exact, rel=0.02)
    truth = nn.functional.cross_entropy(logits / exact, labels)
    assert mean_score(curve.at(exact, rows)) == pytest.approx(float(truth), abs=1e-3)


def test_cross_fitting_is_a_naive_loop():
    values = torch.randn(13, generator=torch.Generator().manual_seed(0)).double()
    found = tuning.cross_fitted(13, lambda rows: values[rows].mean(), lambda m, rows: values[rows] - m, seed=4)
    from batchbayes._common.rng import fold_numbers

    fold = fold_numbers(13, tuning.FOLDS, 4)
    naive = [float(values[i] - values[fold != fold[i]].mean()) for i in range(13)]
    torch.testing.assert_close(found, torch.tensor(naive).double())


@pytest.mark.parametrize(
    ("text", "shape", "task", "expected"),
    [
        ("auto", (4, 1, 32, 32), "classification", "Compose(RandomCrop(padding=4, fill=(-2.0,)), RandomFlip())"),
        ("auto", (4, 3, 32, 32), "segmentation", "RandomFlip()"),
        ("auto", (4, 7), "regression", "None"),
        ("auto", (4, 16, 9), "classification", "None"),
        ("none", (4, 3, 32, 32), "classification", "None"),
        ("crop:2:0.5", (4, 3, 32, 32), "classification", "RandomCrop(padding=2, fill=0.5)"),
        ("flip, shift:0.1", (4, 1, 9, 9), "classification",
         "Compose(RandomFlip(), RandomShiftScale(shift=0.1, scale=0.0, fill=(-2.0,)))"),
        ("jitter:0.1", (4, 2), "regression", "TableJitter(amount=0.1, std=(0.0, 1.0))"),
    ],
)  # fmt: skip
def test_views_by_name(text, shape, task, expected):
    inputs = torch.full(shape, -2.0)
    if len(shape) == 2:
        inputs[:, 1] = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    assert repr(named_views(text, inputs, task)) == expected


@pytest.mark.parametrize("text", ["crop:inf", "crop:nan", "crop:four"])
def test_views_with_an_odd_number_are_refused(text):
    with pytest.raises(bb.BatchbayesError, match="a number after crop:; got"):
        named_views(text, torch.zeros(4, 3, 32, 32), "classification")


def test_the_tuned_batch_size_is_charged_for_its_tuning():
    """The scores of examples at each batch size are those of the linear family, and their mean is the curve."""
    random = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)).eval()
    x, y = torch.randn(60, 2, generator=random), torch.randint(0, 3, (60,), generator=random)
    posterior = bb.mcbn(network, x, batch_size=20, num_samples=16)
    with pytest.warns(bb.BatchbayesWarning, match="not linear enough"):  # batches of a third of the data
        tuned = bb.tune_batch_size(posterior, [(x, y)], bb.categorical(), num_samples=16)
    torch.testing.assert_close(tuned.curve.examples.mean(1), tuned.curve.values, atol=1e-5, rtol=1e-5)
    gain = cross_fitted_gain(tuned.curve.examples, 5, 0)
    assert gain.shape == (60,)
    assert math.isfinite(float(gain.sum()))


@pytest.mark.filterwarnings("ignore:.*not linear enough", "ignore:the scores of the linear engine")
def test_what_the_linear_engine_cannot_draw_is_drawn_exactly():
    data = assess_cases.blobs(300, 0)[0], assess_cases.blobs(120, 1)
    options = {"batch_size": 16, "draws": 12, "views": "jitter:0.05", "engine": "linear", "no_figures": True}
    found = bb.assess(assess_cases.trained_network(), *data, **options)
    engines = {contender.name: contender.engine for contender in found.contenders}
    assert engines["16 views"] == "sample"
    assert engines["MCBN, M = 16"].startswith("linear")


def test_a_segmentation_by_the_linear_engine_has_views():
    data = assess_cases.scene_training(), assess_cases.scene_test()
    options = {"ignore_label": 255, "draws": 4, "views": "flip", "engine": "linear", "no_figures": True}
    found = bb.assess(assess_cases.trained_network("segmentation"), *data, **options)
    assert any("views" in contender.name for contender in found.contenders)


def test_a_long_comparison_says_how_long_and_what_it_does(monkeypatch, capfd):
    data = assess_cases.blobs(300, 0)[0], assess_cases.blobs(120, 1)
    options = {"batch_size": 16, "draws": 12, "engine": "sample", "no_figures": True}
    bb.assess(assess_cases.trained_network(), *data, **options)
    assert "passes" not in capfd.readouterr().err  # it takes a second
    monkeypatch.setattr("batchbayes.report.compare.price.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("batchbayes.report.compare.choice.LINE_SECONDS", -1.0)
    bb.assess(assess_cases.trained_network(), *data, **options)
    told = capfd.readouterr().err
    assert "3 candidates are compared by up to 3,000 forward passes of single examples" in told  # (1 + 12 + 12) * 120
    assert "which takes up to about 1 minute. --budget N" in told
    assert "comparing methods, passes of each example, deterministic: 1 of 25 done" in told
