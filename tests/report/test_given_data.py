"""What users give to `bb.assess`: data, labels and options that are odd, unclear or wrong."""

import numpy as np
import pytest
import torch
from helpers import assess_cases
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import batchbayes as bb
from batchbayes import cli

pytestmark = pytest.mark.filterwarnings(
    "ignore:WARNING. most test examples",
    "ignore:The tuned batch size",
    "ignore:.*lacks classes",
)  # what a report says; tests of these warnings ask for them

network = assess_cases.trained_network
FEW = {"batch_size": 16, "draws": 12, "method": "none", "no_figures": True}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drws": 3}, "an option of assess.*did you mean draws"),
        ({"likelihood": bb.categorical}, "bb.categorical"),
        ({"likelihood": bb.heteroscedastic_gaussian()}, "bb.gaussian"),
        ({"method": "magic"}, "a method, one of"),
        ({"batch_size": None, "method": "mcbn"}, "batch_size="),
        ({"views": ["flip"]}, "views as a text"),
    ],
)
def test_bad_options_say_what_to_do(options, message):
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.assess(network(), assess_cases.blobs(300, 0)[0], assess_cases.blobs(240, 1), **{**FEW, **options})


def test_an_option_that_is_none_has_its_default():
    data, nothing = (assess_cases.blobs(300, 0)[0], assess_cases.blobs(120, 1)), ("views", "seed", "engine", "center")
    found = bb.assess(network(), *data, **FEW, **dict.fromkeys(nothing))
    assert found.metrics == bb.assess(network(), *data, **FEW).metrics


def unclear():
    x, y = assess_cases.blobs(240, 1)
    steps = nn.Sequential(nn.Linear(2, 3), nn.Unflatten(1, (3, 1)), nn.Upsample(3))
    yes = (y > 0).float()
    return {
        "yes or no as floats": (assess_cases.one_logit(), (x, yes), r"y\.long\(\)"),
        "the same as a column": (assess_cases.one_logit(), (x, yes[:, None]), r"y\.long\(\)"),
        "several labels as floats": (network(), (x, torch.stack([yes, 1 - yes, yes], 1)), "one output at a time"),
        "one-hot": (network(), (x, torch.nn.functional.one_hot(y, 3)), r"pass y\.argmax\(1\)"),
        "several labels": (network(), (x, torch.stack([y, y, y], 1)), "one output at a time"),
        "labels as floats": (network(), (x, y.float()), r"write classes as whole numbers \(y\.long\(\)\)"),
        "labels in a column": (network(), (x, y[:, None]), r"y\[:, 0\]"),
        "as many steps as classes": (steps, (x, y[:, None].expand(-1, 3)), r"class_axis=-1"),
        "one test example": (network(), (x[:1], y[:1]), "a random third"),
    }


@pytest.mark.parametrize("kind", unclear())
def test_data_without_a_clear_meaning_is_refused(kind):
    model, data, message = unclear()[kind]
    with pytest.raises(bb.BatchbayesError, match=message):
        bb.assess(model, data[0], data, **FEW)


class Words(nn.Module):
    """A network for sentences of seven words, which are whole numbers."""

    def __init__(self):
        super().__init__()
        self.embed, self.norm, self.last = nn.Embedding(20, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, words):
        return self.last(self.norm(self.embed(words).mean(1)).relu())


def test_inputs_get_the_type_that_the_network_needs(tmp_path):
    random = torch.Generator().manual_seed(0)
    words = torch.randint(0, 20, (90, 7), generator=random)
    labels = torch.randint(0, 2, (90,), generator=random)
    found = bb.assess(Words().eval(), words, (words, labels), **FEW)
    assert found.case.reading.input_dtype == "int64"
    (x, y), plain = assess_cases.blobs(240, 1), assess_cases.blobs(240, 0)[0]
    expected = bb.assess(network(), plain, (x, y), **FEW)
    assert expected.case.reading.input_dtype is None
    wide = bb.assess(network(), plain.double().numpy(), (x.double().numpy(), y.numpy()), **FEW)
    assert wide.rows == expected.rows
    exact = bb.assess(network().double(), plain, (x, y), **(FEW | {"method": "mcbn"}))
    assert exact.case.reading.input_dtype == "float64"
    exact.save(tmp_path / "out")
    np.savez(tmp_path / "new.npz", X=x.numpy())
    save_file(network().double().state_dict(), tmp_path / "weights.safetensors")
    given = ["--model", "helpers.assess_cases:double_classifier", "--weights", str(tmp_path / "weights.safetensors")]
    given += ["--posterior", str(tmp_path / "out" / "posterior.safetensors"), "--input", str(tmp_path / "new.npz")]
    assert cli.main(["predict", *given, "--out", str(tmp_path / "new.csv"), "--quiet"]) == 0
    new = assess_cases.rows_in(tmp_path / "new.csv")
    assert [new[row]["confidence"] for row in exact.rows["row"]] == [str(c) for c in exact.rows["confidence"]]


def test_zeros_and_ones_are_values_if_the_user_says_so():
    x, y = assess_cases.halves(240, 1)
    found = bb.assess(assess_cases.one_logit(), x, (x, y.float()), task="regression", **FEW)
    assert found.case.task == "regression"


def test_one_logit_is_two_classes():
    model = assess_cases.one_logit()
    model.load_state_dict(assess_cases.trained("binary"))
    x, y = assess_cases.halves(240, 1)
    found = bb.assess(model, x, (x, y), **FEW)
    kept = found.rows["row"]
    with torch.no_grad():
        loss = nn.functional.binary_cross_entropy_with_logits(model.eval()(x)[kept, 0], y[kept].float())
    assert found.case.task == "classification"
    assert found.metrics["deterministic"]["nll"] == pytest.approx(float(loss), abs=1e-6)
    assert bb.assess(model, x, (x, y), likelihood=bb.bernoulli(), **FEW).metrics == found.metrics


def test_outputs_that_are_probabilities_are_taken_so():
    model = nn.Sequential(network(), nn.Softmax(1))
    data = assess_cases.blobs(240, 1)
    with pytest.warns(bb.BatchbayesWarning, match="are probabilities"):
        found = bb.assess(model, assess_cases.blobs(300, 0)[0], data, **FEW)
    plain = bb.assess(network(), assess_cases.blobs(300, 0)[0], data, **FEW)
    assert found.metrics["deterministic"]["nll"] == pytest.approx(plain.metrics["deterministic"]["nll"], abs=1e-5)


@pytest.mark.parametrize("values", [(-1, 1), (1, 2)])
def test_two_whole_numbers_that_are_no_classes_are_not_taken_as_values(values):
    """With one output they were assessed as a regression."""
    one = assess_cases.one_logit().eval()
    one.load_state_dict(assess_cases.trained("binary"))
    x, y = assess_cases.halves(60, 1)
    with pytest.raises(bb.BatchbayesError, match="which may be two classes, or values"):
        bb.assess(one, assess_cases.blobs(300, 0)[0], (x, torch.tensor(values)[y]), **FEW)


def test_calibration_data_that_is_the_test_data_is_told():
    x, y = assess_cases.blobs(120, 1)
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are calibration examples too"):
        bb.assess(
            network(), assess_cases.blobs(300, 0)[0], (x, y), calibration=TensorDataset(x.flip(0), y.flip(0)), **FEW
        )


def test_a_network_that_ends_in_softmax_is_drawn_exactly():
    """Where probabilities are taken as linear they leave 0 to 1. A new module around a network freezes nothing."""
    whole = nn.Sequential(network(), nn.Softmax(-1))
    (x, _), data = assess_cases.blobs(300, 0), assess_cases.blobs(240, 1)
    with pytest.warns(bb.BatchbayesWarning, match="are probabilities, it seems") as warned:
        found = bb.assess(whole, x, data, batch_size=16, draws=12)
    assert not [each for each in warned if "frozen" in str(each.message)]
    plain = bb.assess(network(), x, data, batch_size=16, draws=12, engine="sample")
    for name, metrics in plain.metrics.items():
        if "tuned" not in name:  # tuning takes the outputs as linear
            assert found.metrics[name]["nll"] == pytest.approx(metrics["nll"], abs=1e-3)
    posterior = bb.mcbn(whole, x, batch_size=16, num_samples=4)
    with pytest.raises(bb.BatchbayesError, match="for outputs that are probabilities"):
        bb.predict(posterior, x, bb.categorical(probabilities=True), engine="linear")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_networks_of_few_digits(dtype):
    """Their probabilities, rounded to so few digits, did not sum to one."""
    x, data = assess_cases.blobs(300, 0)[0], assess_cases.blobs(120, 1)
    small, full = (bb.assess(each, x, data, **FEW) for each in (network().to(dtype), network()))
    assert small.metrics["deterministic"]["nll"] == pytest.approx(full.metrics["deterministic"]["nll"], rel=1e-2)
    assert torch.equal(small.predict(data[0]).probs, small.predict(data[0].to(dtype)).probs)
    assert small.predict(data[0]).probs.dtype == torch.float32
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are calibration examples too"):
        bb.assess(network().to(dtype), x, data, calibration=data, **FEW)


def test_labels_as_text_and_several_outputs_are_refused_in_words():
    (x, _), (data, labels) = assess_cases.blobs(60, 0), assess_cases.blobs(60, 1)
    with pytest.raises(bb.BatchbayesError, match="number classes from 0"):
        bb.assess(network(), x, (data.numpy(), np.array(["a", "b", "c"])[labels]), **FEW)
    with pytest.raises(bb.BatchbayesError, match="test as arrays of numbers; got a list"):
        bb.assess(network(), x, (data, labels.tolist()), **FEW)

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = network()

        def forward(self, x):
            return {"logits": self.inner(x), "features": x}

    with pytest.raises(bb.BatchbayesError, match="let the model return the logits alone"):
        bb.assess(Several(), x, (data, labels), **FEW)


@pytest.mark.parametrize("kind", ["tensor", "loader", "data set"])
def test_training_data_as_test_data_is_told(kind):
    x, y = assess_cases.blobs(120, 1)
    given = TensorDataset(x, y)
    train = {"tensor": x, "loader": DataLoader(given, 16, shuffle=True), "data set": given}[kind]
    with pytest.warns(bb.BatchbayesWarning, match="most test examples are training examples too"):
        bb.assess(network(), train, (x[:60].double(), y[:60]), **FEW)


def test_options_are_checked_and_truth_values_are_labels():
    (x, _), (data, yes) = assess_cases.blobs(60, 0), assess_cases.halves(60, 1)
    wrong = {"draws": 0, "budget": 0, "task": "regresion", "seed": 0.5}
    for name, value in wrong.items():
        with pytest.raises(bb.BatchbayesError, match=f"expected {name}"):
            bb.assess(network(), x, (data, yes), **{**FEW, name: value})
    one = assess_cases.one_logit().eval()
    found, same = (bb.assess(one, x, (data, y), **FEW, unit=3) for y in (yes.bool(), yes))
    assert found.metrics == same.metrics
    assert torch.equal(found.predict(data.int()).probs, found.predict(data.int().float()).probs)


def test_a_segmentation_that_guesses_is_told():
    images, _ = assess_cases.scenes(24, 1)
    labels = torch.randint(0, 3, (24, *images.shape[2:]), generator=torch.Generator().manual_seed(0))
    found = bb.assess(network("segmentation"), assess_cases.scenes(32, 0)[0], (images, labels), **FEW, views="none")
    assert found.verdict["headline"].startswith("It is no better than guessing: of 100 pixels")


def test_a_network_is_asked_for_in_words():
    (x, _), data = assess_cases.blobs(60, 0), assess_cases.blobs(60, 1)
    for model in ("network", [], [network(), "other"]):
        with pytest.raises(bb.BatchbayesError, match=r"expected a torch\.nn\.Module"):
            bb.assess(model, x, data, **FEW)
    with pytest.raises(bb.BatchbayesError, match="expected a posterior"):
        bb.export(network(), "network.onnx", x, bb.categorical())


class TwoOutputs(nn.Sequential):
    def forward(self, pixel_values):
        return {"logits": super().forward(pixel_values), "hidden": pixel_values}


def _dict_data(count, seed):
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=stream)
    return [{"pixel_values": row, "labels": label} for row, label in zip(x, (x[:, 0] > 0).long(), strict=True)]


class DataModule:
    """As a LightningDataModule has it."""

    def setup(self, stage):
        self.ready = True

    def train_dataloader(self):
        assert self.ready
        return DataLoader(_dict_data(128, 0), 32, shuffle=True)

    def val_dataloader(self):
        return DataLoader(_dict_data(80, 1), 20)

    def test_dataloader(self):
        return DataLoader(_dict_data(120, 2), 20)


def test_dict_loaders_and_data_modules(tmp_path):
    torch.manual_seed(0)
    network = TwoOutputs(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=1.0), nn.ReLU(), nn.Linear(8, 2))
    network(torch.randn(2000, 4))
    network.eval()[1].momentum = 0.1
    where = {"inputs": "pixel_values", "targets": "labels", "output": "logits", "draws": 4, "no_figures": True}
    module = DataModule()
    found = bb.assess(network, module, **where)
    loaders = module.train_dataloader(), module.test_dataloader()
    again = bb.assess(network, *loaders, calibration=module.val_dataloader(), **where)
    assert found.metrics == again.metrics
    plain = [(torch.stack([each["pixel_values"] for each in data]), torch.stack([each["labels"] for each in data]))
             for data in (_dict_data(128, 0), _dict_data(120, 2), _dict_data(80, 1))]  # fmt: skip
    alone = bb.tools.one_output(network, "logits")
    third = bb.assess(alone, DataLoader(TensorDataset(*plain[0]), 32, shuffle=True), plain[1], calibration=plain[2],
                      draws=4, no_figures=True)  # fmt: skip
    assert third.metrics == found.metrics
    bb.save(found.posterior, tmp_path / "p")
    assert torch.equal(*(bb.predict(p, plain[1][0], bb.categorical(), num_samples=2).probs
                         for p in (found.posterior, bb.load(tmp_path / "p", alone))))  # fmt: skip


def test_fits_read_data_modules():
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=1.0), nn.Linear(8, 2))
    network(torch.randn(2000, 4))
    module = DataModule()
    module.setup("fit")
    posterior = bb.mcbn(network.eval(), module, num_samples=4, inputs="pixel_values")
    assert posterior.batch_size == 32
    batches = [{"pixel_values": torch.randn(5, 4), "labels": torch.zeros(5)}]
    assert bb.predict(posterior, batches, bb.categorical()).probs.shape == (5, 2)  # the fit remembers where inputs are
    with pytest.raises(bb.BatchbayesError, match=r"predict_dataloader\(\).*datamodule\.test_dataloader\(\)"):
        bb.predict(posterior, module, bb.categorical())
    module.predict_dataloader = lambda: DataLoader(_dict_data(30, 3), 20)  # type: ignore[attr-defined]
    expected = bb.predict(posterior, module.predict_dataloader(), bb.categorical())
    assert torch.equal(bb.predict(posterior, module, bb.categorical()).probs, expected.probs)
    found = bb.drift(network, module, inputs="pixel_values")
    assert found.report(module).p_value == found.report(batches_of(module), inputs="pixel_values").p_value


def batches_of(module):
    return list(module.predict_dataloader())


@pytest.mark.parametrize("make", [bb.mc_dropout, bb.deterministic])
def test_methods_without_a_fit_remember_where_inputs_are(make, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Linear(8, 2)).eval()
    posterior, batches = make(network, inputs="pixel_values"), list(DataLoader(_dict_data(20, 3), 20))
    bb.save(posterior, tmp_path / "p")
    for each in (posterior, bb.load(tmp_path / "p", network)):
        found = bb.predict(each, batches, bb.categorical(), num_samples=3)
        expected = bb.predict(each, batches[0]["pixel_values"], bb.categorical(), num_samples=3)
        assert torch.equal(found.probs, expected.probs)
