"""`bb.export` itself: .pt2 files, what it refuses, and that it leaves the network alone."""

import importlib.util
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.references import left_alone
from torch import nn

import batchbayes as bb
from batchbayes._common.checks import install_command
from batchbayes.export import export as module

pytestmark = pytest.mark.filterwarnings("ignore:the network is not linear enough")


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
    torch.testing.assert_close(p_value, detector.report(inputs, whole=False).p_value.float())
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
    with pytest.raises(bb.BatchbayesError, match=re.escape(install_command("export"))):
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


def run(path, inputs):
    """Run a file of either kind."""
    if path.suffix == ".pt2":
        return torch.export.load(path).module()(inputs)
    onnxruntime = pytest.importorskip("onnxruntime")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": inputs.numpy()})
    return {each.name: torch.as_tensor(values) for each, values in zip(session.get_outputs(), found, strict=True)}


class Hiding(nn.Module):
    """A network that returns numbers for inputs that are none, as some runtimes do at a ReLU."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(3, 3)

    def forward(self, inputs):
        return self.body(inputs.nan_to_num(0.0, 0.0, 0.0))


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
def test_inputs_that_are_no_numbers_are_flagged_and_no_inputs_are_no_error(suffix, tmp_path):
    if suffix == ".onnx":
        pytest.importorskip("onnxruntime")
    inputs = torch.randn(6, 3)
    inputs[1, 2], inputs[4, 0] = torch.nan, torch.inf
    for number, fitted in enumerate([posterior(), bb.deterministic(Hiding())]):
        path = tmp_path / f"{number}{suffix}"
        bb.export(fitted, path, torch.randn(4, 3), bb.categorical(), num_samples=3)
        assert run(path, inputs)["flag"].tolist() == [False, True, False, False, True, False]
        none = run(path, inputs[:0])
        assert {name: tuple(values.shape) for name, values in none.items()} == {
            "probs": (0, 3), "entropy": (0,), "mutual_information": (0,), "flag": (0,),
        }  # fmt: skip


@pytest.mark.parametrize("engine", ["sample", "linear"])
def test_a_network_that_changes_its_inputs_in_place_leaves_those_of_the_caller_alone(engine, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.ReLU(inplace=True), nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.Linear(6, 3)
    ).eval()
    fitted, inputs = bb.mcbn(network, torch.randn(64, 3), batch_size=8, num_samples=4), torch.randn(7, 3)
    before = inputs.clone()
    path = tmp_path / "a.pt2"
    bb.export(fitted, path, inputs, bb.gaussian(1.0), engine=engine)
    found = run(path, inputs)
    assert torch.equal(inputs, before)
    expected = bb.predict(fitted, inputs, bb.gaussian(1.0), engine=engine).mean
    torch.testing.assert_close(found["pred_mean"], expected, rtol=1e-5, atol=1e-6)


def test_what_onnxruntime_cannot_run_is_not_blamed_on_the_exporter(tmp_path):
    pytest.importorskip("onnxruntime")
    network = nn.Sequential(nn.Conv2d(2, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()).double().eval()
    with pytest.raises(bb.BatchbayesError, match=r"operations that onnxruntime has .*float64") as caught:
        bb.export(bb.deterministic(network), tmp_path / "a.onnx", torch.randn(4, 2, 8, 8).double(), bb.categorical())
    assert "torch.export" not in str(caught.value)
    bb.export(bb.deterministic(network), tmp_path / "a.pt2", torch.randn(4, 2, 8, 8).double(), bb.categorical())


@pytest.mark.parametrize("suffix", [".pt2", ".onnx"])
@pytest.mark.parametrize("engine", ["sample", "linear"])
def test_several_targets_have_their_covariance_and_joint_draws(engine, suffix, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)).eval()
    fitted, inputs = bb.mcbn(network, torch.randn(64, 3), batch_size=4, num_samples=6), torch.randn(9, 3)
    likelihood = bb.gaussian([4.0, 25.0])
    path = tmp_path / f"a{suffix}"
    bb.export(fitted, path, inputs[:4], likelihood, engine=engine, keep_draws=True)
    found, options = run(path, inputs), {"engine": engine, "keep_draws": True}
    expected = bb.predict(fitted, inputs, likelihood, **options)
    torch.testing.assert_close(found["draws"], expected.draws.transpose(0, 1), rtol=1e-5, atol=1e-6)
    by_hand = torch.stack([row.T.double().cov(correction=0) for row in found["draws"]])
    by_hand += torch.diag(torch.tensor([0.25, 0.04]))
    torch.testing.assert_close(found["covariance"].double(), by_hand, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["covariance"], expected.covariance, rtol=1e-5, atol=1e-6)
    assert (found["covariance"][:, 0, 1].abs() > 1e-3).any()


def test_draws_of_averaged_views_are_kept_too(tmp_path):
    fitted, inputs = bb.with_views(posterior(), bb.TableJitter(0.3, (1.0, 1.0, 1.0)), average=2), torch.randn(5, 3)
    path = tmp_path / "a.pt2"
    bb.export(fitted, path, inputs, bb.categorical(), num_samples=3, keep_draws=True)
    expected = bb.predict(fitted, inputs, bb.categorical(), num_samples=3, keep_draws=True).draws
    torch.testing.assert_close(run(path, inputs)["draws"], expected.transpose(0, 1), rtol=1e-5, atol=1e-6)


def test_targets_in_a_large_unit_are_compared_in_theirs():
    """A difference that is tiny beside 1 may be large beside the spread of the targets."""
    wanted = {"pred_mean": torch.tensor([[1e-5], [2e-5]]), "pred_std": torch.tensor([[1e-6], [1e-6]])}
    assert module._require_equal(wanted, wanted) == 0
    with pytest.raises(bb.BatchbayesError, match=r"a difference of 0\.5 in pred_mean"):
        module._require_equal(wanted | {"pred_mean": wanted["pred_mean"] + 5e-7}, wanted)


def test_what_is_missing_beside_a_posterior_is_told(tmp_path):
    with pytest.raises(bb.BatchbayesError, match="a likelihood"):
        bb.export(posterior(), tmp_path / "a.pt2", torch.randn(4, 3))


def test_the_price_of_all_draws_at_once_is_that_of_a_few_passes(tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 600), nn.BatchNorm1d(600), nn.ReLU(), nn.Linear(600, 1)).eval()
    x = torch.randn(256, 64)
    fitted = bb.mcbn(network, x, batch_size=16, num_samples=40)
    passes = {
        engine: bb.export(fitted, tmp_path / f"{engine}.pt2", x, bb.gaussian(1.0), engine=engine).passes
        for engine in ("sample", "linear")
    }
    assert passes["linear"] < passes["sample"] / 2
    assert passes["sample"] > 15
