"""`bb.export` itself: .pt2 files, what it refuses, and that it leaves the network alone."""

import importlib.util
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes.export import export as module


def posterior():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    return bb.mcbn(network, torch.randn(64, 3), batch_size=8, num_samples=4)


def test_a_torch_file_predicts_in_a_process_without_batchbayes(tmp_path):
    fitted, inputs = posterior(), torch.randn(7, 3)
    detector = bb.novelty(fitted.network.module, torch.randn(80, 3), calibration=torch.randn(60, 3))
    with left_alone(fitted.network.module):
        made = bb.export(
            fitted, tmp_path / "a.pt2", inputs[:2], bb.categorical(), num_samples=3, threshold=0.5, novelty=detector,
            novelty_level=0.1,
        )  # fmt: skip
    assert made.opset is None
    assert made.num_bytes == made.path.stat().st_size
    torch.save(inputs, tmp_path / "x.pt")
    script = (
        "import sys, torch; sys.modules['batchbayes'] = None; found = torch.export.load('a.pt2').module()"
        "(torch.load('x.pt')); torch.save([found['probs'], found['novelty'], found['flag']], 'y.pt')"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], cwd=tmp_path, check=True)
    probs, p_value, flag = torch.load(tmp_path / "y.pt")
    predictive = bb.predict(fitted, inputs, bb.categorical(), num_samples=3)
    torch.testing.assert_close(probs, predictive.probs)
    torch.testing.assert_close(p_value, detector.report(inputs).p_value.float())
    assert flag.tolist() == ((predictive.entropy > 0.5) | (p_value <= 0.1)).tolist()


def test_bad_arguments_say_what_to_do(tmp_path, monkeypatch):
    fitted, inputs = posterior(), torch.randn(4, 3)
    with pytest.raises(bb.BatchbayesError, match=r"\.onnx or \.pt2"):
        bb.export(fitted, tmp_path / "a.h5", inputs, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="a folder that exists"):
        bb.export(fitted, tmp_path / "none" / "a.pt2", inputs, bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="example inputs as one tensor"):
        bb.export(fitted, tmp_path / "a.pt2", (inputs, inputs), bb.categorical())
    with pytest.raises(bb.BatchbayesError, match="a likelihood"):
        bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical)
    with pytest.raises(bb.BatchbayesError, match="num_samples"):
        bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), num_samples=0)
    with pytest.raises(bb.BatchbayesError, match=r"inputs that .* runs on"):
        bb.export(fitted, tmp_path / "a.pt2", inputs.double(), bb.categorical())
    for threshold in (float("nan"), "0.5"):
        with pytest.raises(bb.BatchbayesError, match="a threshold of uncertainty"):
            bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), threshold=threshold)
    with pytest.raises(bb.BatchbayesError, match=r"a detector of bb\.novelty; got a BatchNormPosterior"):
        bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), novelty=fitted)
    for level in (1.5, 0.01, "0.1"):  # with 60 calibration examples no p-value is as small as 0.01
        detector = bb.novelty(fitted.network.module, torch.randn(80, 3), calibration=torch.randn(60, 3))
        with pytest.raises(bb.BatchbayesError, match=r"a level from 0\.016"):
            bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), novelty=detector, novelty_level=level)
    other = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)).eval()
    detector = bb.novelty(other, torch.randn(80, 3), calibration=torch.randn(60, 3))
    with pytest.raises(bb.BatchbayesError, match="other weights"):
        bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), novelty=detector, novelty_level=0.1)
    with pytest.raises(bb.BatchbayesError, match=r"a torch\.nn\.Module"):
        bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), prepare=lambda x: 2 * x)
    monkeypatch.setattr(
        module, "find_spec", lambda name: None if name == "onnxscript" else importlib.util.find_spec(name)
    )
    with pytest.raises(bb.BatchbayesError, match=r"batchbayes\[export\]"):
        bb.export(fitted, tmp_path / "a.onnx", inputs, bb.categorical())
    assert list(tmp_path.iterdir()) == []


class Conditional(nn.Linear):
    def forward(self, inputs):
        return super().forward(inputs) if inputs.sum() > 0 else super().forward(-inputs)


class InNumpy(nn.Linear):
    def forward(self, inputs):
        return super().forward(torch.from_numpy(np.tanh(inputs.numpy())))


class OneByOne(nn.Linear):
    def forward(self, inputs):
        return torch.stack([super(OneByOne, self).forward(inputs[row]) for row in range(len(inputs))])


@pytest.mark.parametrize(
    ("kind", "suffix"), [(Conditional, ".pt2"), (InNumpy, ".pt2"), (InNumpy, ".onnx"), (OneByOne, ".onnx")]
)
def test_networks_that_cannot_be_written_down_are_refused_in_words(kind, suffix, tmp_path):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    with pytest.raises(bb.BatchbayesError, match=r"torch\.export can write down"):
        bb.export(bb.deterministic(kind(3, 3)), tmp_path / f"a{suffix}", torch.rand(4, 3), bb.categorical())
    assert list(tmp_path.iterdir()) == []


def test_a_preparation_in_training_mode_is_left_alone(tmp_path):
    """A batch norm as standardisation: the file takes its running statistics, and its user keeps them."""
    prepare = nn.BatchNorm1d(3, affine=False).train()
    prepare(torch.randn(50, 3) + 2)
    before = {name: value.clone() for name, value in prepare.state_dict().items()}
    fitted, inputs = posterior(), torch.randn(8, 3)
    bb.export(fitted, tmp_path / "a.pt2", inputs, bb.categorical(), num_samples=2, prepare=prepare)
    assert prepare.training
    torch.testing.assert_close(prepare.state_dict(), before, rtol=0, atol=0)
    probs = torch.export.load(tmp_path / "a.pt2").module()(inputs)["probs"]
    expected = bb.predict(fitted, prepare.eval()(inputs), bb.categorical(), num_samples=2).probs
    torch.testing.assert_close(probs, expected)


def test_a_file_that_would_predict_something_else_is_not_written(tmp_path, monkeypatch):
    class Wrong(module.Program):
        def forward(self, inputs):
            return {name: values + 0.01 for name, values in super().forward(inputs).items()}

    monkeypatch.setattr(sys.modules["batchbayes.export.program"], "Program", Wrong)
    with pytest.raises(bb.BatchbayesError, match=r"a difference of 0\.01 in probs"):
        bb.export(posterior(), tmp_path / "a.pt2", torch.randn(4, 3), bb.categorical(), num_samples=2)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_has_sums_of_more_digits(tmp_path):
    pytest.importorskip("onnx")
    inputs = torch.randn(64, 3).bfloat16()
    network = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).bfloat16()
    fitted = bb.mcbn(network, inputs, batch_size=8, num_samples=8)
    warmer = bb.categorical(temperature=1.7)
    found = bb.export(fitted, tmp_path / "a.pt2", inputs[:8], warmer, num_samples=8)
    assert found.difference < 1e-6
    draws = torch.stack([fitted.draw(0, number)(inputs[:8]) for number in range(8)]).double()
    exact = (draws / 1.7).softmax(-1).mean(0).float()
    torch.testing.assert_close(bb.predict(fitted, inputs[:8], warmer, num_samples=8).probs, exact)
    with pytest.raises(bb.BatchbayesError, match=r"float16, float32 or float64 for an \.onnx file; got bfloat16"):
        bb.export(fitted, tmp_path / "a.onnx", inputs[:8], warmer)
