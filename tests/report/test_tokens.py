"""Assessments of tokens, and of networks with several inputs, as Hugging Face has them."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import batchbayes as bb

CLASSES, STEPS, IGNORED = 3, 12, -100
INPUTS = ("input_ids", "attention_mask")
FEW = {"draws": 4, "no_figures": True}


class Encoder(nn.Module):
    """Logits of each token, or of the sequence."""

    def __init__(self, *, pooled):
        super().__init__()
        self.pooled = pooled
        self.embed, self.norm, self.drop = nn.Embedding(30, 16), nn.LayerNorm(16), nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.drop(self.norm(self.embed(input_ids)))
        if self.pooled:
            mask = attention_mask[..., None].to(hidden)
            hidden = (hidden * mask).sum(1) / mask.sum(1)
        return {"logits": self.last(hidden)}


def examples(count, seed, *, pooled):
    stream = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 30, (count, STEPS), generator=stream)
    mask = (torch.arange(STEPS) < torch.randint(4, STEPS + 1, (count, 1), generator=stream)).long()
    noise = torch.rand(ids.shape, generator=stream) < 0.2
    labels = torch.where(noise, torch.randint(0, CLASSES, ids.shape, generator=stream), ids % CLASSES)
    labels = labels[:, 0] if pooled else labels.where(mask > 0, IGNORED)
    return [dict(zip((*INPUTS, "labels"), row, strict=True)) for row in zip(ids, mask, labels, strict=True)]


def loaders(*, pooled):
    return [DataLoader(examples(count, seed, pooled=pooled), 20) for seed, count in enumerate((100, 80, 60))]


def trained(loader, *, pooled):
    torch.manual_seed(0)
    network = Encoder(pooled=pooled)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for batch in list(loader) * 8:
        optimizer.zero_grad()
        logits = network(batch["input_ids"], batch["attention_mask"])["logits"]
        nn.functional.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), ignore_index=IGNORED).backward()
        optimizer.step()
    return network.eval()


@torch.no_grad()
def naive(network, loader):
    """Return accuracy and loss by a loop over all labels that count."""
    right, losses = [], []
    for batch in loader:
        logits = network(batch["input_ids"], batch["attention_mask"])["logits"].double()
        for row, label in zip(logits.flatten(0, -2), batch["labels"].flatten(), strict=True):
            if label != IGNORED:
                right.append(float(row.argmax() == label))
                losses.append(float(row.logsumexp(0) - row[label]))
    return sum(right) / len(right), sum(losses) / len(losses)


@pytest.mark.parametrize("pooled", [False, True], ids=["tokens", "sequences"])
def test_assess_equals_a_loop_over_labels_that_count(pooled, tmp_path):
    train, test, calibration = loaders(pooled=pooled)
    network = trained(train, pooled=pooled)
    before = copy.deepcopy(network.state_dict())
    likelihood = bb.categorical() if pooled else bb.categorical(class_axis=-1, ignore_index=IGNORED)
    found = bb.assess(network, train, test, calibration=calibration, inputs=INPUTS, targets="labels", output="logits",
                      likelihood=likelihood, out=tmp_path / "report", draws=4)  # fmt: skip
    accuracy, loss = naive(network, test)
    own = found.metrics["deterministic"]
    assert own["accuracy"] == pytest.approx(accuracy)
    assert own["nll"] == pytest.approx(loss, rel=1e-5)
    assert found.novelty is not None
    assert all(torch.equal(value, before[name]) for name, value in network.state_dict().items())
    page = (tmp_path / "report" / "report.html").read_text()
    text = " ".join([*found.verdict.values(), *found.terms.values()])
    assert ("token" in text) is not pooled
    assert "pixel" not in text
    assert "pixel" not in page.split("<script")[0].split("</style>")[-1]
    batch = next(iter(test))
    shape = (20, CLASSES) if pooled else (20, STEPS, CLASSES)
    plain = bb.predict(found.posterior, batch["input_ids"], likelihood) if not pooled else None
    several = bb.predict(found.posterior, [batch], likelihood, inputs=INPUTS)
    assert several.probs.shape == shape
    assert plain is None or torch.equal(plain.probs, several.probs)


def test_labels_tell_where_the_classes_are():
    train, test, _ = loaders(pooled=False)
    calibration = list(test)[:1]
    network = trained(train, pooled=False)
    where = {"inputs": "input_ids", "targets": "labels", "calibration": calibration, "ignore_label": IGNORED, **FEW}
    last = bb.assess(network, train, test, output="logits", **where)
    first = bb.assess(network, train, test, output=lambda found: found["logits"].movedim(-1, 1), **where)
    assert last.metrics["deterministic"]["nll"] == pytest.approx(first.metrics["deterministic"]["nll"], rel=1e-6)


def test_what_cannot_be_assessed_is_told_in_words():
    train, test, _ = loaders(pooled=False)
    network = trained(train, pooled=False)
    where = {"inputs": "input_ids", "targets": "labels", "output": "logits", **FEW}
    with pytest.raises(bb.BatchbayesError, match="ignore_label="):
        bb.assess(network, train, test, **where)
    square = nn.Sequential(nn.Embedding(30, STEPS), nn.Dropout(0.1))
    with pytest.raises(bb.BatchbayesError, match=r"as many classes as steps.*class_axis=-1"):
        bb.assess(square, train, test, ignore_label=IGNORED, **(where | {"output": None}))
    uneven = [{key: value[:, : STEPS - row] if value.ndim > 1 else value for key, value in batch.items()}
              for row, batch in enumerate(test)]  # fmt: skip
    with pytest.raises(bb.BatchbayesError, match="pad sequences to one length"):
        bb.assess(network, train, uneven, **(where | {"inputs": INPUTS}), ignore_label=IGNORED)
