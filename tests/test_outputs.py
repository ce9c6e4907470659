"""Several outputs of one network under one set of draws, and functions that pick outputs, in files."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import batchbayes as bb

X = torch.randn(200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Answer(NamedTuple):
    boxes: Tensor
    classes: Tensor


@dataclass
class AnswerClass:
    boxes: Tensor
    classes: Tensor


class TwoHeads(nn.Module):
    """Returns boxes (N, 2, 2) and logits (N, 3), in any form."""

    def __init__(self, form=dict):
        super().__init__()
        self.form = form
        self.body = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8, momentum=1.0), nn.Dropout(0.2), nn.ReLU())
        self.boxes, self.classes = nn.Linear(8, 4), nn.Linear(8, 3)
        self.double()(X)  # its running statistics are real
        self.body[1].momentum = 0.1
        self.eval()

    def forward(self, x):
        hidden = self.body(x)
        boxes, classes = self.boxes(hidden).view(-1, 2, 2), self.classes(hidden)
        return (boxes, classes) if self.form is tuple else self.form(boxes=boxes, classes=classes)


def only_classes(outputs):
    return outputs["classes"]


def summed(outputs):
    return outputs[0].exp().sum((1, 2))


FITS = {
    "mcbn": lambda m, output: bb.mcbn(m, X, batch_size=16, num_samples=8, output=output),
    "mc_dropout": lambda m, output: bb.mc_dropout(m, output=output),
    "deterministic": lambda m, output: bb.deterministic(m, output=output),
    "weight_samples": lambda m, output: bb.weight_samples(m, [TwoHeads().state_dict() for _ in "abc"], output=output),
    "noise inside": lambda m, output: FITS["weight_samples"](m, output).with_noise(lambda n: FITS["mcbn"](n, output)),
    "ensemble": lambda m, output: bb.ensemble([FITS["mcbn"](each, output) for each in (m, TwoHeads(m.form))]),
}  # fmt: skip


@pytest.mark.parametrize("method", FITS)
def test_parts_are_those_of_the_same_draws(method):
    posterior = FITS[method](TwoHeads(), "classes")
    wanted = {"boxes": bb.gaussian(2.0), "classes": bb.categorical(temperature=2.0)}
    found = bb.predict(posterior, X[:7], wanted, num_samples=5, seed=3, keep_draws=True)
    assert list(found) == ["boxes", "classes"]
    both = [posterior.with_output(lambda out: torch.cat([out["boxes"].flatten(1), out["classes"]], 1)).draw(3, s)(X[:7])
            for s in range(found["boxes"].num_samples)]  # fmt: skip
    for s, drawn in enumerate(both):  # a naive loop
        torch.testing.assert_close(found["boxes"].draws[s], drawn[:, :4].view(-1, 2, 2))
        torch.testing.assert_close(found["classes"].draws[s], drawn[:, 4:])
    probs = torch.stack([(drawn[:, 4:] / 2).softmax(1) for drawn in both]).mean(0)
    torch.testing.assert_close(found["classes"].probs, probs)
    alone = bb.predict(posterior, X[:7], wanted["classes"], num_samples=5, seed=3)
    torch.testing.assert_close(found["classes"].mutual_information, alone.mutual_information)


@pytest.mark.parametrize(
    ("form", "picks"),
    [
        (Answer, {"boxes": "boxes", "classes": "classes"}),
        (AnswerClass, {"boxes": "boxes", "classes": "classes"}),
        (tuple, {0: 0, 1: 1}),
        (tuple, {"sum": summed, "last": 1}),
    ],
)
def test_picks_by_name_position_and_function(form, picks):
    posterior = bb.mcbn(TwoHeads(form), X, batch_size=16, num_samples=4, output=next(iter(picks.values())))
    first, second = picks
    own = {name: likelihood if name == pick else (pick, likelihood) for (name, pick), likelihood
           in zip(picks.items(), [bb.gaussian(1.0), bb.categorical()], strict=True)}  # fmt: skip
    found = bb.predict(posterior, X[:5], own)
    plain = bb.predict(posterior, X[:5], bb.gaussian(1.0))
    torch.testing.assert_close(found[first].mean, plain.mean)
    assert found[second].probs.shape == (5, 3)


def test_streams_and_chunks_give_the_same():
    posterior = bb.mcbn(TwoHeads(), X, batch_size=16, num_samples=4, output="boxes")
    wanted = {"boxes": bb.gaussian(1.0), "classes": bb.categorical()}
    whole = bb.predict(posterior, X[:20], wanted)
    parts = list(bb.predict_stream(posterior, [X[:8], X[8:20]], wanted, chunk_size=3))
    found = torch.cat([part.predictives["classes"].probs for part in parts])
    torch.testing.assert_close(found, whole["classes"].probs)
    torch.testing.assert_close(torch.cat([p.predictives["boxes"].mean for p in parts]), whole["boxes"].mean)


def test_refusals_say_what_to_do():
    network = TwoHeads()
    posterior = bb.mcbn(network, X, batch_size=16, num_samples=4, output="classes")
    both = {"boxes": bb.gaussian(1.0), "classes": bb.categorical()}
    with pytest.raises(bb.BatchbayesError, match=r"network output named 'depth'.*keys \['boxes', 'classes'\]"):
        bb.predict(posterior, X[:5], {"depth": bb.gaussian(1.0)})
    with pytest.raises(bb.BatchbayesError, match="one output for the linear engine"):
        bb.predict(posterior, X[:5], both, engine="linear")
    with pytest.raises(bb.BatchbayesError, match="not called"):
        bb.predict(posterior, X[:5], {"classes": bb.categorical})
    with pytest.raises(bb.BatchbayesError, match="a likelihood for each output"):
        bb.predict(posterior, X[:5], {})
    with pytest.raises(bb.BatchbayesError, match="one row for each example"):
        bb.predict(
            posterior, X[:5], {"boxes": (lambda out: out["boxes"][:2], bb.gaussian(1.0)), "classes": bb.categorical()}
        )
    views = bb.with_views(posterior, lambda inputs, generator: inputs)
    with pytest.raises(bb.BatchbayesError, match="ViewsPosterior, which belongs to one of them"):
        bb.predict(views, X[:5], both)


def test_a_function_is_saved_by_reference(tmp_path):
    network = TwoHeads()
    posterior = bb.mcbn(network, X, batch_size=16, num_samples=4, output=only_classes, inputs=torch.clone)
    bb.save(posterior, tmp_path / "p")
    with pytest.raises(bb.BatchbayesError, match=r"output=only_classes.*import_functions=True if you trust"):
        bb.load(tmp_path / "p", network)
    expected = bb.predict(posterior, X[:5], bb.categorical()).probs
    for how in ({"import_functions": True}, {"output": only_classes}):
        found = bb.load(tmp_path / "p", network, **how)
        assert torch.equal(bb.predict(found, X[:5], bb.categorical()).probs, expected)
    assert bb.load(tmp_path / "p", network, import_functions=True).network.output is only_classes


def test_a_function_that_cannot_be_imported_is_refused(tmp_path):
    network = TwoHeads()
    bb.save(bb.mcbn(network, X, batch_size=16, output=lambda out: out["classes"]), tmp_path / "p")
    with pytest.raises(bb.BatchbayesError, match=r"<lambda>, which no other program can import.*pass it again"):
        bb.load(tmp_path / "p", network, import_functions=True)


def test_a_function_that_is_gone_is_refused(tmp_path, monkeypatch):
    network = TwoHeads()
    bb.save(bb.mcbn(network, X, batch_size=16, output=only_classes), tmp_path / "p")
    monkeypatch.delitem(globals(), "only_classes")
    with pytest.raises(bb.BatchbayesError, match=r"AttributeError.*pass it again"):
        bb.load(tmp_path / "p", network, import_functions=True)
