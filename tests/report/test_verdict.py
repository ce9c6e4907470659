"""The words of the first screen: they are right, they know the sampling error, and they keep their units."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import batchbayes as bb
from batchbayes import BatchbayesError
from batchbayes._common.rng import generator
from batchbayes.methods.candidates import Candidate
from batchbayes.methods.table import METHODS
from batchbayes.report.compare.choice import Choice
from batchbayes.report.compare.contenders import Contender
from batchbayes.report.compare.groups import Trust, everything, of_classes, worst_group
from batchbayes.report.compare.intervals import Kind
from batchbayes.report.compare.pixels import PixelSums
from batchbayes.report.compare.task import flag_threshold, scores_for_limit
from batchbayes.report.read.examples import Examples
from batchbayes.report.words.classes import (
    Answers,
    cheaper,
    class_groups,
    class_verdict,
    example_of,
    guess_sentence,
    told_group,
)
from batchbayes.report.words.shared import honest_words, marked_sentence, strange_sentence
from batchbayes.report.words.values import Values, names_and_units, value_gains, value_verdict

IMAGES = SimpleNamespace(ood=None, test=Examples("test", [torch.zeros(1, 1, 2, 2)]))
"""What a verdict needs of a case: images have no columns."""


def contender(name, added, passes, **metrics):
    """A contender whose loss on calibration data is that of others plus a number."""
    kinds = {"network": "deterministic", "scaled": "deterministic", "MCBN": "mcbn", "tuned": "mcbn"}
    noisy = {"variant": "M = 12.8", "tuned": name == "tuned", "rank": 1} if kinds[name] == "mcbn" else {"rank": 0}
    posterior = bb.deterministic(torch.nn.Identity())
    return Contender(
        Candidate(METHODS[kinds[name]], posterior, **noisy),
        1,
        {},
        torch.full((9,), 0.5 + added),
        has_temperature=name == "scaled",
        passes=passes,
        metrics=metrics,
    )


def choice_of(chosen):
    return Choice(chosen, chosen, None)


NETWORK = choice_of(contender("network", 0.0, 1.0, nll=0.1))


def told(rows, contenders, choice, case=IMAGES):
    """What the words need of an assessment."""
    return SimpleNamespace(rows=rows, contenders=contenders, choice=choice, recommended=choice.recommended, case=case)


def answers(count, seed, *, said=lambda p: p):
    """Answers that are right with probability p, and what the network says about p."""
    random = generator(seed, "answers")
    truth = 0.5 + 0.5 * torch.rand(count, generator=random, dtype=torch.float64)
    return said(truth), torch.rand(count, generator=random, dtype=torch.float64) < truth


def surest_lie(p):
    """The surest answers say more than they know, and the others less, so that the mean is right."""
    return torch.where(p > 0.8, 0.9 + 0.5 * (p - 0.8), p - 0.03)


def test_an_honest_network_is_hardly_ever_called_too_sure():
    found = [of_classes(*answers(151, seed)) for seed in range(400)]
    assert [each.trust for each in found].count(
        Trust.HONEST
    ) >= 0.93 * 400  # two standard errors: 95.4 %, less two standard errors of 400 trials


def test_one_that_is_too_sure_is_found():
    found = [of_classes(*answers(151, seed, said=lambda p: 1 - (1 - p) / 4)) for seed in range(50)]
    assert [honest_words(each) for each in found] == ["too sure of itself"] * 50
    assert of_classes(torch.full((20,), 0.95, dtype=torch.float64), torch.ones(20) > 0).trust is Trust.HONEST


def test_one_that_is_too_sure_only_where_it_is_surest_is_found():
    confidence, right = answers(2000, 0, said=surest_lie)
    assert abs(float((confidence - right.double()).mean())) < 0.02
    assert honest_words(of_classes(confidence, right)) == "too sure of itself where it is at least 90 % sure"


def class_rows(confidence, right, flags):
    return {
        "source": ["test"] * len(right),
        "target": ["yes" if i % 2 else "no" for i in range(len(right))],
        "prediction": ["yes" if bool(i % 2) == bool(each) else "no" for i, each in enumerate(right)],
        "confidence": confidence.tolist(),
        "flag": flags,
    }


def test_the_recommended_method_decides_the_words_and_the_network_alone_is_named():
    confidence, right = answers(2000, 0)
    accuracy = float(right.double().mean())
    own = SimpleNamespace(metrics={"accuracy": accuracy - 0.1, "mean_confidence": 0.95})
    chosen = choice_of(contender("tuned", 0.0, 1.0, nll=0.1))
    rows = class_rows(confidence, right, [int(c < 0.6) for c in confidence])
    verdict = class_verdict(told(rows, [own], chosen)).sentences
    assert (
        verdict["headline"]
        == f"Of 100 answers like these {100 * accuracy:.0f} are right, and its percentages can be believed."
    )
    assert (
        "The network alone is too sure of itself: it says 95 % on average."
        in verdict["Can its percentages be believed?"]
    )
    assert (
        f"with it {100 * accuracy:.0f} of 100 answers are right instead of {100 * accuracy - 10:.0f}"
        in verdict["What to do next"]
    )
    assert "M =" not in " ".join(verdict.values())


@pytest.mark.parametrize(
    ("name", "advice"),
    [("network", "take its percentages to be lower than"), ("MCBN", "it is still too sure of itself: take its")],
)
def test_headline_and_advice_are_one_thought(name, advice):
    confidence, right = answers(2000, 0, said=lambda p: 1 - (1 - p) / 4)
    accuracy = float(right.double().mean())
    own = contender("network", 0.5, 1.0, accuracy=accuracy, mean_confidence=0.94, nll=0.4)
    chosen = choice_of(own if name == "network" else contender(name, 0.0, 1.0, accuracy=accuracy, nll=0.3))
    rows = class_rows(confidence, right, [0] * len(right))
    verdict = class_verdict(told(rows, [own], chosen)).sentences
    assert "but it is too sure of itself" in verdict["headline"]
    assert f"But {advice}" in verdict["What to do next"]


def test_groups_in_which_percentages_are_too_high_are_named():
    """They are right on average: too low for one class and for half of a column, and too high for the others."""
    confidence, right = answers(4000, 1)
    rows, first = class_rows(confidence, right, [0] * 4000), torch.arange(4000) % 2 == 0
    column = first.double()
    says = torch.tensor([each == "yes" for each in rows["prediction"]])
    for groups, some in ((("class", "yes"), says), (("column", "age"), first)):
        said = (confidence + torch.where(some, 0.1, -0.1)).clamp(0, 1)
        worst = worst_group(class_groups(rows, said, right, {"age": column}))
        assert (worst.by.value, worst.name) == groups
        naive = said[some].mean() - right[some].double().mean()
        assert worst.gap == pytest.approx(float(naive))
        assert worst.error == pytest.approx(float((said[some] * (1 - said[some])).sum().sqrt() / some.sum()))
        assert ("where it says “yes”" if worst.name == "yes" else "where age is 1.00") in told_group(worst)
    honest = [worst_group(class_groups(rows, *answers(4000, seed), {"age": column})) for seed in range(2, 42)]
    assert sum(each is not None for each in honest) <= 5  # 5 % of all, plus three standard errors


@pytest.mark.parametrize(
    ("nll", "accuracy", "passes", "said"),
    [(0.960, 0.65, 8.0, True), (0.960, 0.65, 1.0, False), (0.90, 0.65, 8.0, False), (0.960, 0.67, 8.0, False)],
)
def test_what_is_almost_as_good_and_takes_no_time_is_named(nll, accuracy, passes, said):
    own = contender("network", 0.5, 1.0, nll=1.5, accuracy=0.65)
    scaled = contender("scaled", 0.0, 1.0, nll=0.967, accuracy=0.65)
    dear = contender("MCBN", -0.1, passes, nll=nll, accuracy=accuracy)
    sentence = cheaper(told({}, [own, scaled, dear], choice_of(dear)))
    assert ("“temperature scaling” is almost as good" in sentence) == said == bool(sentence)


def test_marks_that_find_no_errors_are_called_useless():
    wrong = torch.arange(100) % 10 == 0
    assert "hardly tells wrong answers" in marked_sentence(torch.arange(100) < 20, wrong)
    helpful = marked_sentence(torch.arange(100) % 5 == 0, wrong)
    assert helpful == (
        "predictions.csv marks 20 of 100 answers (flag = 1). Of 100 errors all are among them. Of 100 answers that are "
        "not marked, all are right."
    )
    assert "no error" in marked_sentence(wrong, wrong & False)
    assert "1 error on" in marked_sentence(wrong, torch.arange(100) == 3)


def test_few_examples_do_not_make_percentages_believable():
    confidence, right = torch.tensor([0.9, 0.8]), torch.tensor([True, True])
    own = SimpleNamespace(metrics={"accuracy": 1.0, "mean_confidence": 0.85, "nll": 0.2})
    verdict = class_verdict(told(class_rows(confidence, right, [0, 1]), [own], NETWORK))
    assert not verdict.is_usable
    verdict = verdict.sentences
    assert verdict["headline"] == "2 test examples are too few to say how good it is."
    assert verdict["What to do next"] == "Assess again with at least 100 test examples."
    assert verdict["How good is it?"] == "Right answers: 2 of 2."
    assert len(verdict) == 3  # nothing else can be said
    confidence, right = answers(30, 0)
    own = SimpleNamespace(metrics={"accuracy": 0.75, "mean_confidence": 0.75, "nll": 0.2})
    verdict = class_verdict(told(class_rows(confidence, right, [0] * 30), [own], NETWORK)).sentences
    assert "too few test examples to know whether its percentages" in verdict["headline"]
    assert verdict["Can its percentages be believed?"].startswith("Not known: the test examples are too few.")
    assert "calibration data would" not in verdict["What to do next"]


@pytest.mark.parametrize(
    ("before", "after", "gain"),
    [
        (0.4, 0.2, "with it the true classes are 82 % probable on average instead of 67 %, for 64 times"),
        (0.2, 0.1999, "with it the true classes are 82 % probable on average, a little more, for"),
        (0.2, 0.3, "do not fit the test data better"),
    ],
)
def test_a_gain_is_told_in_plain_words(before, after, gain):
    confidence, right = answers(2000, 0)
    accuracy = float(right.double().mean())
    own = contender("network", 0.5, 1.0, accuracy=accuracy, mean_confidence=0.75, nll=before)
    best = contender("MCBN", -0.1, 64.0, accuracy=accuracy, nll=after)
    chosen = choice_of(best)
    rows = class_rows(confidence, right, [0] * len(right))
    assert gain in class_verdict(told(rows, [own, best], chosen)).sentences["What to do next"]


def test_a_gain_in_values_is_told_in_plain_words():
    best = contender("MCBN", -0.1, 64.0, rmse=0.9, conformal_width=2.0, nll=1.0)

    def gains(added=0.0, **metrics):
        return value_gains(told({}, [contender("network", added, 1.0, **metrics)], choice_of(best)))

    assert gains(rmse=1.0, conformal_width=2.5, nll=1.1) == [
        "typical errors are 10 % smaller", "the intervals are 20 % narrower"
    ]  # fmt: skip
    assert gains(rmse=0.9, nll=1.1) == ["the intervals fit each prediction better"]
    assert "do not fit the test data better" in gains(rmse=0.8, nll=0.9)[0]


def test_a_method_that_was_asked_for_is_not_said_to_fit_best():
    network = contender("network", 0.0, 1.0, rmse=0.8, nll=0.9, accuracy=0.9, mean_confidence=0.9)
    worse = contender("MCBN", 0.1, 64.0, rmse=0.9, nll=1.0, accuracy=0.9)
    choice = Choice(worse, network, None, asked=True)
    words = "the predictions fit neither the calibration data nor the test data better"
    assert value_gains(told({}, [network], choice)) == [words]
    confidence, right = answers(2000, 0)
    rows = class_rows(confidence, right, [0] * len(right))
    assert words in class_verdict(told(rows, [network, worse], choice)).sentences["What to do next"]


def counted(accuracy, classes, error, noun="answer"):
    every = everything(accuracy, accuracy, error)
    return Answers(noun, "test example", 100, 100, accuracy, error, every, every, None, Counter(classes), error)


def test_guessing_is_called_guessing():
    classes = {"a": 60, "b": 40}
    assert "“a” were the answer to all inputs" in guess_sentence(counted(0.58, classes, 0.05), 0.7)
    assert not guess_sentence(counted(0.58, classes, 0.05), 0.4)  # its percentages say something
    assert not guess_sentence(counted(0.90, classes, 0.05), 0.7)
    said = guess_sentence(counted(0.75, {"sky": 75, "road": 25}, 0.01, "pixel"), 0.6)
    assert said.endswith("of 100 pixels 75 are right, and 75 would be if “sky” were the answer to all pixels.")


def test_an_example_of_what_a_percentage_means():
    confidence = torch.tensor([0.95] * 50 + [0.6] * 50)
    right = torch.arange(100) < 49
    honest = everything(0.8, 0.8, 0.01)
    assert example_of(confidence, right, honest) == (
        " Of 100 answers that it is at least 90 % sure of, 98 are right. These are 50 of 100 answers."
    )
    assert example_of(torch.full((100,), 0.95), right, honest).endswith("49 are right. These are all answers.")


def test_percentages_that_are_too_high_in_a_group_can_be_believed_on_average_only():
    number = torch.arange(2000)
    marked = number >= 1800
    right = torch.where(marked, number % 2 == 0, number % 6 > 0)  # 50 % of those that are marked, 83 % of the others
    own = contender("network", 0.0, 1.0, accuracy=0.8, mean_confidence=0.8, nll=0.4)
    rows = class_rows(torch.full((2000,), 0.8), right, marked.int().tolist())
    verdict = class_verdict(told(rows, [own], choice_of(own))).sentences
    assert "can be believed on average" in verdict["headline"]
    assert verdict["Can its percentages be believed?"].startswith("On average, but not everywhere.")
    assert "too sure of itself among answers that are marked" in verdict["Can its percentages be believed?"]


def test_strange_inputs_that_are_missed_are_named():
    rows = {"source": ["test"] * 10 + ["ood"] * 10, "flag": [1] + [0] * 9 + [1] * 10}
    assert strange_sentence(rows, "SVHN") == "Of 100 inputs of SVHN all are marked, and of 100 test inputs 10."
    assert "not noticed" in strange_sentence(rows | {"flag": [1] + [0] * 9 + [1] + [0] * 9}, "SVHN")


def value_words(targets, errors, width, names, *, flags, kind=Kind.PLAIN, columns=None):
    rows = {"source": ["test"] * len(targets), "flag": flags, "novelty": [0.5] * len(targets)}
    outputs = []
    for (name, unit), truth, error in zip(names, targets.T, errors.T, strict=True):
        ends = truth + error - width, truth + error + width
        outputs.append(Values(name, unit, truth, error, *ends, (truth >= ends[0]) & (truth <= ends[1]), kind))
    chosen = replace(NETWORK.recommended, calibration_losses=torch.zeros(300))
    return value_verdict(told(rows, [chosen], choice_of(chosen)), outputs, columns or {}).sentences


def values(outputs, *, scale=1.0, width=1.645, marked=0, kind=Kind.PLAIN):
    targets = 10 * torch.randn(500, outputs, generator=generator(0, "targets"))
    errors = scale * torch.randn(500, outputs, generator=generator(0, "errors"))
    names = names_and_units("load (kN)", None, 1) if outputs == 1 else names_and_units("load", ("kN", "mm"), outputs)
    return value_words(targets, errors, width, names, flags=[1] * marked + [0] * (500 - marked), kind=kind)


def test_values_keep_their_unit_in_every_sentence():
    verdict = values(1)
    assert verdict["headline"].startswith("90 % of true values fall within ±1.79 kN")
    for heading in ("headline", "How good is it?", "Can its intervals be believed?"):
        assert " kN" in verdict[heading]
    assert verdict["Can its intervals be believed?"].startswith(
        "Yes, as far as 500 examples can tell. All predictions have the same interval, ±1.6"
    )


def test_several_outputs_have_sentences_of_their_own():
    verdict = values(2)
    for text in (verdict["headline"], verdict["How good is it?"], verdict["Can its intervals be believed?"]):
        assert all(part in text for part in ("load 1", "load 2", " kN", " mm"))


def test_marks_are_told_of_every_output():
    words = values(2, marked=50)["When to look twice"]
    assert words.count("(load 1)") == words.count("(load 2)") == words.count(" mm") == 2
    assert "(load" not in values(1, marked=50)["When to look twice"]


def test_intervals_of_many_widths_are_not_called_equally_certain():
    assert values(1)["When to look twice"].startswith("It is equally certain about all inputs, so")
    words = values(1, kind=Kind.SPREAD)["When to look twice"]
    assert words.startswith("Its certainty depends on the size of the prediction alone, so")


def test_intervals_that_miss_and_guesses_are_called_so():
    assert values(1, width=1.0)["Can its intervals be believed?"].startswith("No, they are too narrow.")
    assert values(1, width=4.0)["Can its intervals be believed?"].startswith("Yes, but they are too wide.")
    guess = values(1, scale=30.0)
    assert guess["headline"].startswith("It is no better than guessing")
    assert guess["What to do next"].startswith("Do not use it yet")


def test_a_guess_is_one_thought():
    """Errors of a thousand with intervals that hold are no reason to say "Yes"."""
    assert values(1, scale=30.0, width=49.0)["Can its intervals be believed?"].startswith("They tell only how little")
    right = torch.rand(2000, generator=generator(0, "guess")) < 0.5
    own = contender("network", 0.0, 1.0, accuracy=0.5, mean_confidence=0.5, nll=0.7)
    rows = class_rows(torch.full((2000,), 0.5), right, [0] * 2000)
    verdict = class_verdict(told(rows, [own], choice_of(own))).sentences
    assert verdict["headline"].startswith("It is no better than guessing")
    assert "Yes" not in " ".join(verdict.values())
    assert "When to look twice" not in verdict


def test_noise_that_depends_on_one_column_is_named_with_what_helps():
    random = generator(0, "column")
    targets, age = 10 * torch.randn(2000, 1, generator=random), torch.rand(2000, generator=random)
    errors = (0.4 + 1.2 * (age > 0.8)[:, None]) * torch.randn(2000, 1, generator=random)
    width, names = float(errors.abs().quantile(0.9)), names_and_units("load", None, 1)
    words = value_words(targets, errors, width, names, flags=[0] * 2000, columns={"age": age})
    said = words["Can its intervals be believed?"]
    assert "They are too narrow where age is " in said
    assert "Mondrian" in said
    assert "groups=" in said


def test_a_class_of_pixels_that_is_too_sure_is_named():
    """Class 1 says 90 % and is right in half of the pixels. Images are counted: pixels of one are all alike."""
    sums, random = PixelSums(2, None), generator(0, "pixels")
    for image in range(60):
        log_probs = torch.tensor([[0.9, 0.1], [0.1, 0.9]]).log()[torch.randint(0, 2, (1, 8, 8), generator=random)]
        best = log_probs.argmax(-1)
        right = torch.where(best == 1, torch.tensor(image % 2 == 0), torch.rand(1, 8, 8, generator=random) < 0.9)
        nothing = torch.zeros(1, 8, 8)
        cells = {"log_probs": log_probs, "entropy": nothing, "mutual_information": nothing}
        sums.add(SimpleNamespace(num_samples=1, drawn=None, **cells), torch.where(right, best, 1 - best))
    sky, road = sums.class_groups(["sky", "road"])
    assert abs(sky.gap) < 0.02
    assert (road.said, road.held) == (pytest.approx(0.9), pytest.approx(0.5, abs=0.02))
    assert road.error == pytest.approx(0.5 / 60**0.5, rel=0.1)
    assert sky.error < road.error / 5
    assert "where it says “road”" in told_group(worst_group([sky, road]))


def test_units_come_from_the_name_or_the_option():
    assert names_and_units("time [s]", None, 1) == [("time", "s")]
    assert names_and_units("time", ("s",), 2) == [("time 1", "s"), ("time 2", "s")]
    with pytest.raises(BatchbayesError, match="one unit, or 3"):
        names_and_units("time", ("s", "m"), 3)


@pytest.mark.parametrize(("held", "tested", "most"), [(8, 10, 0.0), (2, 100, 0.1), (13, 26, 0.16)])
def test_few_calibration_examples_do_not_mark_half_of_the_others(held, tested, most):
    """With the calibration examples alone the limit was a matter of luck."""
    alone, shares = [], []
    for seed in range(300):
        scores = torch.rand(held + tested, generator=torch.Generator().manual_seed(seed)).double()
        limit = flag_threshold(scores_for_limit(scores[:held], scores[held:]))
        shares.append(float((scores[held:] > limit).double().mean()))
        alone.append(float((scores[held:] > flag_threshold(scores[:held])).double().mean()))
    assert max(shares) <= most < 0.4 < max(alone)


def test_test_examples_set_no_limit_where_there_is_enough_calibration_data():
    scores = torch.rand(40, generator=torch.Generator().manual_seed(0)).double()
    assert scores_for_limit(scores, scores + 1) is scores
