"""Intervals hold for small and large predictions alike; what is assessed is what is saved and predicted."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from helpers import assess_cases
from safetensors.torch import save_file
from torch import nn

import batchbayes as bb
from batchbayes import cli
from batchbayes.engines.linear import BACKWARD_COST
from batchbayes.export.program import Finish, ValueSummary
from batchbayes.report.compare.groups import By, groups_by, in_groups, worst_group
from batchbayes.report.compare.intervals import LEVEL, Intervals, Kind, Reach, fifths_of, fit_intervals, fit_reach
from batchbayes.report.compare.rows import _limits

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*not linear enough", "ignore:The tuned batch size", "ignore:.*whole batch"
)


def uneven(count, seed, power=1.0):
    """Predictions, and targets whose noise grows with them."""
    random = torch.Generator().manual_seed(seed)
    mean = 4 * torch.rand(count, generator=random, dtype=torch.float64)
    noise = (0.05 + 0.4 * mean) ** power
    return mean, mean + noise * torch.randn(count, generator=random, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Kind.SPREAD, Kind.GROUPS, Kind.QUANTILES])
def test_each_remedy_holds_in_every_fifth(kind):
    """The plain one does not. The worst of five shares, each with a standard error of 3 %, is 86.4 % on average."""
    worst = {Kind.PLAIN: [], kind: []}
    for seed in range(20):
        (mean, targets), (new, truth) = uneven(600, seed), uneven(2000, seed + 100)
        for each, found in worst.items():
            lower, upper = fit_reach(each, mean, torch.ones(600).double(), targets, 0).ends(
                new, torch.ones(2000).double()
            )
            found.append(min(group.held for group in fifths_of(new, (lower <= truth) & (truth <= upper))))
    assert np.mean(worst[kind]) > 0.84
    assert np.mean(worst[Kind.PLAIN]) < 0.8


def test_plain_intervals_are_kept_where_nothing_is_gained():
    kinds = [_auto(*uneven(400, seed, power=0.0)).kind for seed in range(20)]
    assert kinds.count(Kind.PLAIN) >= 17
    assert all(_auto(*uneven(400, seed)).kind is not Kind.PLAIN for seed in range(20))
    assert _auto(*uneven(80, 0)).kind is Kind.PLAIN  # too few to tell
    mean, targets = uneven(200, 0)
    few = torch.where(mean < 3.7, 0.0, mean)  # most are equal, so that groups are small
    one = torch.ones(200, 1).double()
    ends = fit_intervals(few[:, None], one, targets[:, None], kind="groups").ends(few[:, None], one)
    assert bool(torch.stack(ends).isfinite().all())


def _auto(mean, targets):
    one = torch.ones(len(mean), 1).double()
    return fit_intervals(mean[:, None], one, targets[:, None]).outputs[0]


@pytest.mark.parametrize("kind", [Kind.SPREAD, Kind.QUANTILES])
def test_the_reach_does_not_follow_the_last_digits_of_a_prediction(kind):
    """Predictions that hardly differ, as of a network that has learnt little: ends move little."""
    mean, targets = uneven(300, 0)
    mean, one = 20 + 1e-4 * mean, torch.ones(300).double()
    reach = fit_reach(kind, mean, one, targets, 0)
    for before, after in zip(reach.ends(mean, one), reach.ends(mean + 1e-6, one), strict=True):
        assert float((after - before).abs().max()) < 1e-4
    assert reach.below[0] != reach.below[-1]
    for side in zip(*reach.ramps, strict=True):
        assert list(side) == sorted(side)


def test_a_row_at_the_threshold_has_the_same_flag_in_python_and_in_a_file():
    """The threshold is the uncertainty of a row, and others may lie above it by less than a file can know."""
    spread = torch.tensor([[0.5], [0.5 * (1 + 5e-6)], [0.5 * (1 + 5e-5)]])
    finish = Finish(ValueSummary(bb.gaussian(1.0), None), 1, 0.5, 0.01, keep=False)
    in_file = finish(spread, [torch.zeros(3, 1), spread.square(), torch.ones(3, 1)])["flag"].tolist()
    notes = {"threshold": [0.5], "task": "regression"}
    in_python = (spread.double() > _limits(notes)).any(1).tolist()
    assert in_file == in_python == [False, False, True]


def test_the_reach_is_an_interpolation_in_both_directions():
    at, std = torch.linspace(-1, 5, 50, dtype=torch.float64), torch.linspace(1, 2, 50, dtype=torch.float64)
    lines = Reach(Kind.QUANTILES, ((0.0, 1.0), (1.0, 3.0)), (1.0, 2.0, 0.5), (3.0, 1.0, 1.0))
    lower, upper = lines.ends(at, std)
    for end, sign, values in ((lower, -1, lines.below), (upper, 1, lines.above)):
        naive = at.numpy() + sign * std.numpy() * np.interp(at.numpy(), [0, 1, 3], values)
        np.testing.assert_allclose(end.numpy(), naive, rtol=1e-12, atol=1e-12)
    steps = Reach(Kind.GROUPS, ((1.0, 1.0), (3.0, 3.0)), (1.0, 2.0, 4.0), (1.0, 2.0, 4.0))
    _, upper = steps.ends(at, std)
    naive = at + std * torch.tensor([1.0 if x <= 1 else 2.0 if x <= 3 else 4.0 for x in at.tolist()]).double()
    torch.testing.assert_close(upper, naive)
    both = Intervals((lines, steps))
    again = Intervals.from_notes({"intervals": json.loads(json.dumps(both.to_json()))})
    assert again == both
    joint = again.ends(torch.stack([at, at], 1), torch.stack([std, std], 1))
    torch.testing.assert_close(joint[0][:, 0], lower)
    torch.testing.assert_close(joint[1][:, 1], upper)


def test_the_worst_group_is_found_in_a_column_with_its_standard_error():
    held = torch.rand(3000, generator=torch.Generator().manual_seed(0)) < LEVEL
    column = torch.arange(3000.0)
    held[(column >= 2400) & (column % 4 == 0)] = False
    worst = worst_group(groups_by(By.COLUMN, column, torch.full((3000,), LEVEL), held, name="age"))
    assert (worst.name, worst.low, worst.high, worst.count) == ("age", 2400.0, 2999.0, 600)
    assert worst.held == pytest.approx(float(held[2400:].double().mean()))
    assert worst.error == pytest.approx((0.09 / 600) ** 0.5, rel=1e-5)
    assert worst_group(groups_by(By.COLUMN, column.flip(0), torch.full((3000,), LEVEL), column >= 0)) is None
    assert len(in_groups(torch.ones(30))[1]) == 0


@cache
def uneven_network():
    """A network that has learnt targets whose noise grows with them, and data for it."""

    def data(count, seed):
        random = torch.Generator().manual_seed(seed)
        x = 4 * torch.rand(count, 2, generator=random)
        height = x[:, 0] + 0.3 * x[:, 1]
        return x, height + (0.05 + 0.35 * height) * torch.randn(count, generator=random)

    torch.manual_seed(0)
    network, (x, y) = assess_cases.regressor(), data(1000, 0)
    optimiser = torch.optim.Adam(network.parameters(), 0.01)
    for _ in range(12):
        for rows in torch.randperm(1000).split(50):
            optimiser.zero_grad()
            nn.functional.mse_loss(network(x[rows])[:, 0], y[rows]).backward()
            optimiser.step()
    return network.eval(), x, data


def test_the_report_sees_uneven_noise_and_recommends_what_helps():
    network, x, data = uneven_network()
    options = {"batch_size": 50, "method": "none", "no_figures": True}
    plain, found = (bb.assess(network, x, data(3000, 1), intervals=kind, **options) for kind in ("plain", "auto"))
    question = "Can its intervals be believed?"
    assert plain.verdict[question].startswith("On average, but not everywhere.")
    assert "They are too narrow where" in plain.verdict[question]
    assert "too narrow for some" in plain.verdict["headline"]
    assert "But do not rely on its intervals" in plain.verdict["What to do next"]
    assert found.verdict[question].startswith("Yes.")
    assert "in the worst fifth of the predictions" in found.verdict[question]
    assert plain.recommended.metrics["worst_fifth"] < 0.84 < found.recommended.metrics["worst_fifth"]
    assert found.recommended.metrics["conformal_width"] < plain.recommended.metrics["conformal_width"]


TASKS = {
    "classification": (assess_cases.blobs, "classifier"),
    "binary": (assess_cases.halves, "one_logit"),
    "pictures": (assess_cases.pictures, "picture_classifier"),
    "regression": (assess_cases.wave, "regressor"),
    "two outputs": (assess_cases.two_waves, "two_outputs"),
    "uneven": (None, "regressor"),
}
PARITY = [
    *((task, name, "sample") for task in ("classification", "binary", "pictures")
      for name in ("deterministic", "temperature scaling", "MCBN + temperature", "MCBN tuned")),
    *((task, name, "sample") for task in ("regression", "two outputs", "uneven")
      for name in ("deterministic", "MCBN tuned")),
    *((task, "MCBN", "linear") for task in TASKS),
    ("classification", "16 views", "sample"), ("regression", "MCBN with 16 views", "sample"),
    ("classification", "MCBN with 16 views + temperature", "linear"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:the scores of the linear engine")
@pytest.mark.parametrize(("task", "name", "engine"), PARITY, ids=[f"{a}: {b}, {c}" for a, b, c in PARITY])
def test_what_is_recommended_is_what_predicts(task, name, engine, tmp_path):
    """The table, `found.predict` and `batchbayes predict` on 1,000 new rows, for the passes that were said."""
    (data, build), views = TASKS[task], "jitter:0.05" if "views" in name else "none"
    if task == "uneven":
        network, _, data = uneven_network()
    else:
        network = getattr(assess_cases, build)().eval()
        network.load_state_dict(assess_cases.trained(task))
    given = {"batch_size": 16, "draws": 12, "views": views, "engine": engine, "no_figures": True}
    found = bb.assess(network, data(300, 0)[0], data(600, 1), recommend=name, **given)
    found.save(tmp_path / "out")
    x, y = data(1000, 7)
    np.savez(tmp_path / "new.npz", X=x.numpy())
    save_file(network.state_dict(), tmp_path / "weights.safetensors")
    command = [
        "predict",
        "--model",
        f"helpers.assess_cases:{build}",
        "--weights",
        str(tmp_path / "weights.safetensors"),
    ]
    command += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", str(tmp_path / "new.npz")]
    assert cli.main([*command, "--out", str(tmp_path / "new.csv"), "--quiet"]) == 0
    rows = assess_cases.rows_in(tmp_path / "new.csv")
    seen, passes = counted(network, lambda: found.predict(x))
    for key, values, scale in told(found, seen, y):
        written = torch.tensor([float(row[key]) for row in rows], dtype=torch.float64)
        assert float((written - values.double()).abs().max()) <= 1e-5 * scale, key
    uncertain = flags(found, seen) | (found.novelty.p_value(x) <= found.notes["novelty_level"])
    assert [row["flag"] for row in rows] == [str(int(each)) for each in uncertain]
    assert passes == pytest.approx(found.recommended.passes, rel=0.25)
    table = bb.metrics.evaluate(found.predict(data(600, 1)[0][found.rows["row"]]), truth(found, data, task))
    assert table["nll"] == pytest.approx(found.recommended.metrics["nll"], abs=1e-4)


def truth(found, data, task):
    targets = data(600, 1)[1][found.rows["row"]]
    return targets[:, None] if task in ("regression", "uneven") else targets


def told(found, seen, y):
    """What both say: the column, the values, and the spread that a difference is compared with."""
    if found.case.task != "regression":
        yield (
            "confidence",
            seen.probs.amax(-1) if seen.probs.ndim > 1 else torch.maximum(seen.probs, 1 - seen.probs),
            1.0,
        )
        yield "entropy", seen.entropy, 1.0
        return
    ends = found.intervals.ends(seen.mean, seen.std)
    for name, values in (("mean", seen.mean), ("std", seen.std), ("lower", ends[0]), ("upper", ends[1])):
        for i in range(values.shape[1]):
            yield name + (f"_{i + 1}" if i else ""), values[:, i], float(y.reshape(len(y), -1)[:, i].std())


def flags(found, seen):
    limit = _limits(found.notes)
    if found.case.task != "regression":
        return seen.entropy.double() > limit
    return (seen.epistemic_variance.sqrt().double() > limit).any(1)


def counted(network, work):
    """Return the result, and the passes for each of 1,000 rows. The second call makes no checks of the engine."""
    work()
    rows = []

    def see(_, __, output):
        rows.append(len(output))
        if output.requires_grad:
            output.register_hook(lambda slope: rows.append(BACKWARD_COST * len(slope)))

    handle = network.register_forward_hook(see)
    found = work()
    handle.remove()
    return found, sum(rows) / 1000


def test_ends_do_not_cross():
    """Quantiles of errors may cross where few errors are known. Such an interval is a point, and not upside down."""
    middle, spread = torch.tensor([0.0, 5.0]), torch.tensor([1.0, 2.0])
    reach = Reach(Kind.QUANTILES, ((1.0, 2.0),), (-1.0, 1.0), (0.5, 1.0))
    lower, upper = Intervals((reach,)).ends(middle, spread)
    assert lower.tolist() == pytest.approx([0.75, 3.0], rel=1e-5)
    assert upper.tolist() == pytest.approx([0.75, 7.0], rel=1e-5)
    assert bool((lower <= upper).all())
