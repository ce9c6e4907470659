"""ONNX files in onnxruntime against `predict`, to 1e-5."""

import numpy as np
import pytest
import torch
from batchbayes_papers.models.pretrained import cifar_resnet, espnet_camvid
from helpers.cases import CASES, CROP_AND_FLIP, SHIFT_AND_SCALE, moved
from torch import nn

import batchbayes as bb
from batchbayes.calibrate import ConformalIntervals
from batchbayes.errors import BatchbayesError

onnx = pytest.importorskip("onnx", reason="needs the extra export")
pytest.importorskip("onnxscript", reason="needs the extra export")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs the extra export")


def run(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert [each.name for each in session.get_inputs()] == ["input"]
    found = session.run(None, {"input": inputs.numpy()})
    return dict(zip((each.name for each in session.get_outputs()), found, strict=True))


def assert_parity(path, posterior, inputs, likelihood, **options):
    """Compare a file with `predict` for several numbers of inputs, none of which it was made with."""
    for part in (inputs, inputs[:1], inputs[:4]):
        found, predictive = run(path, part), bb.predict(posterior, part, likelihood, **options)
        for name in ("probs", "entropy", "mutual_information"):
            np.testing.assert_allclose(found[name], getattr(predictive, name), rtol=0, atol=1e-5)


def images_posterior(kind):
    case = CASES["BatchNorm2d"]
    mcbn = bb.mcbn(case.network(), case.batches(6))
    views = {
        "crop and flip, averaged": lambda: bb.with_views(mcbn, CROP_AND_FLIP, average=2),
        "shift and scale": lambda: bb.with_views(mcbn, SHIFT_AND_SCALE),
        "flip": lambda: bb.with_views(bb.deterministic(case.network()), bb.RandomFlip()),
        "dropout": lambda: bb.mc_dropout(CASES["Dropout2d"].network()),
    }
    return views[kind]()


@pytest.mark.parametrize("kind", ["crop and flip, averaged", "flip", "shift and scale", "dropout"])
def test_images(kind, tmp_path):
    posterior, inputs = images_posterior(kind), torch.cat(CASES["BatchNorm2d"].batches(2, seed=5))
    made = bb.export(posterior, tmp_path / "a.onnx", inputs[:3], bb.categorical(temperature=1.7), num_samples=5, seed=2)
    assert made.difference < 1e-5
    assert made.opset is not None
    assert_parity(made.path, posterior, inputs, bb.categorical(temperature=1.7), num_samples=5, seed=2)


def small(*last):
    torch.manual_seed(0)
    first = nn.Sequential(
        nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.SELU(), nn.AlphaDropout(0.2)
    )
    return nn.Sequential(*first, nn.Linear(8, 4), *last).eval()


def on_one_network(kind):
    """Return a posterior whose draws are of several kinds, or of several weights, in one network."""
    network, train = small(), torch.randn(64, 3)
    mcbn = bb.mcbn(network, train, batch_size=8, num_samples=6)
    if kind == "ensemble":
        return bb.ensemble(
            [mcbn, bb.deterministic(network), bb.mc_dropout(network), bb.stochastic_bn(network, train, batch_size=8)]
        )
    if kind == "ensemble with views":
        return bb.with_views(
            bb.ensemble([mcbn, bb.mc_dropout(network)]), bb.TableJitter(0.1, (1.0, 1.0, 2.0)), average=2
        )
    members = bb.weight_samples(network, moved(network, 3))
    noise = {
        "mcbn": lambda member: bb.mcbn(member, train, batch_size=8, num_samples=6),
        "dropout": bb.mc_dropout,
        "last layer": lambda member: bb.last_layer_laplace(member, train, bb.categorical(), prior_precision=4.0),
        "views": lambda member: bb.with_views(bb.mc_dropout(member), bb.TableJitter(0.1, (1.0, 1.0, 2.0)), average=2),
    }
    return members.with_noise(noise[kind])


@pytest.mark.filterwarnings("ignore:the batch-norm layers")
@pytest.mark.parametrize("kind", ["ensemble", "ensemble with views", "mcbn", "dropout", "last layer", "views"])
def test_ensembles_on_one_network_and_noise_inside_members(kind, tmp_path):
    posterior, inputs = on_one_network(kind), torch.randn(16, 3)
    made = bb.export(posterior, tmp_path / "a.onnx", inputs[:3], bb.categorical(), num_samples=8, seed=1)
    assert made.difference < 1e-5
    assert_parity(made.path, posterior, inputs, bb.categorical(), num_samples=8, seed=1)


VIEWS = {
    "signals": (bb.Compose(bb.SignalShift(2, fill=0.5), bb.SignalCrop(0.6)), (3, 12)),
    "colours last": (bb.Compose(bb.RandomCrop(2, (0.1, 0.2, 0.3), "NHWC"), bb.RandomFlip("NHWC")), (8, 8, 3)),
    "pictures without colours": (bb.Compose(bb.RandomShiftScale(0.1, 0.2, fill=0.5), bb.RandomFlip()), (8, 8)),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_views_of_all_kinds_of_inputs(kind, tmp_path):
    (transform, shape), network = VIEWS[kind], nn.Sequential(nn.Flatten(), nn.LazyLinear(4))
    network(torch.randn(2, *shape))
    posterior, inputs = bb.with_views(bb.deterministic(network), transform), torch.randn(16, *shape)
    made = bb.export(posterior, tmp_path / "a.onnx", inputs[:3], bb.categorical(), num_samples=6)
    assert_parity(made.path, posterior, inputs, bb.categorical(), num_samples=6)


def test_a_table_with_everything_inside(tmp_path):
    """Standardisation, interval, novelty and flag, on inputs as they come."""
    raw = torch.randn(300, 4) * torch.tensor([1.0, 100.0, 0.01, 5.0]) + 7
    middle, spread = raw.mean(0), raw.std(0)

    class Standard(nn.Module):
        def forward(self, x):
            return (x - middle) / spread

    network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1)).train()
    for _ in range(50):
        network(Standard()(raw))
    posterior = bb.mcbn(network.eval(), Standard()(raw), batch_size=16, num_samples=32)
    detector = bb.novelty(network, Standard()(raw))
    made = bb.export(
        posterior, tmp_path / "a.onnx", raw[:5], bb.gaussian(4.0), num_samples=32, threshold=0.1,
        conformal=ConformalIntervals(0.9, 1.8), novelty=detector, novelty_level=0.02, prepare=Standard(),
    )  # fmt: skip
    assert made.outputs == ("pred_mean", "pred_std", "epistemic_std", "lower", "upper", "novelty", "flag")
    new = torch.randn(40, 4) * spread * torch.linspace(0.5, 4, 40)[:, None] + middle
    found = run(made.path, new)
    predictive = bb.predict(posterior, Standard()(new), bb.gaussian(4.0), num_samples=32)
    spread_of_draws = predictive.epistemic_variance.sqrt()
    np.testing.assert_allclose(found["pred_mean"], predictive.mean, atol=1e-5)
    np.testing.assert_allclose(found["upper"], predictive.mean + 1.8 * predictive.std, atol=1e-5)
    np.testing.assert_allclose(found["lower"], predictive.mean - 1.8 * predictive.std, atol=1e-5)
    p_value = detector.p_value(Standard()(new), whole=False)
    np.testing.assert_allclose(found["novelty"], p_value, atol=1e-5)
    expected = (spread_of_draws[:, 0] > 0.1) | (p_value <= 0.02)
    assert found["flag"].tolist() == expected.tolist()
    assert 0 < expected.sum() < 40


def test_novelty_of_a_classifier_with_layer_norm(tmp_path):
    """Principal directions of its channels and its last features are in the file."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Flatten(), nn.Linear(40, 3)
    )
    random = torch.Generator().manual_seed(1)
    train, calibration, new = (torch.randn(count, 5, 3, generator=random) for count in (300, 150, 60))
    detector = bb.novelty(network.eval(), train, calibration=calibration)
    assert list(detector.sight.directions) == ["3"]
    assert detector.ordinary_parts.shape[1] == 4
    made = bb.export(
        bb.deterministic(network), tmp_path / "a.onnx", new[:5], bb.categorical(), novelty=detector, novelty_level=0.05
    )
    new = new * torch.linspace(0.5, 3, 60).view(60, 1, 1)
    p_value = detector.p_value(new, whole=False)
    np.testing.assert_allclose(run(made.path, new)["novelty"], p_value, atol=1e-5)
    assert p_value.unique().numel() > 15


def test_the_file_holds_the_weights_once(tmp_path):
    network = nn.Sequential(nn.Linear(50, 400), nn.BatchNorm1d(400), nn.ReLU(), nn.Linear(400, 3)).eval()
    posterior = bb.mcbn(network, torch.randn(64, 50), batch_size=8, num_samples=6)
    made = bb.export(posterior, tmp_path / "a.onnx", torch.randn(3, 50), bb.categorical(), num_samples=6)
    assert made.bank_bytes == 6 * 2 * 400 * 4
    assert made.ratio < 1.1
    model = onnx.load(made.path)
    onnx.checker.check_model(model, full_check=True)
    sizes = [np.prod(each.dims) for each in model.graph.initializer]
    assert sizes.count(50 * 400) == sizes.count(400 * 3) == 1
    assert {each.key for each in model.metadata_props} >= {"batchbayes", "posterior", "likelihood", "draws", "seed"}


@pytest.mark.shared
def test_a_public_network(data_folder, tmp_path):
    from batchbayes_papers.data.cifar10 import load_cifar10, standardise

    network = cifar_resnet(20, data_folder / "weights/resnet20_cifar10_akamaster.safetensors")
    images = standardise(load_cifar10("test", data_folder, 64)[0])
    posterior = bb.mcbn(network, images, batch_size=32, num_samples=8, center="running")
    made = bb.export(posterior, tmp_path / "a.onnx", images[:3], bb.categorical(), num_samples=8)
    assert made.ratio < 1.1
    assert_parity(made.path, posterior, images[:7], bb.categorical(), num_samples=8)


@pytest.mark.slow
@pytest.mark.shared
def test_a_public_segmentation(data_folder, tmp_path):
    from batchbayes_papers.data import camvid

    network = espnet_camvid(data_folder / "weights/espnet_camvid_sacmehta.safetensors")
    images = camvid.standardise(camvid.load_camvid_frames("test", data_folder, 6)[0])[
        ..., 100:148, 100:164
    ].contiguous()
    posterior = bb.with_views(bb.mcbn(network, images, batch_size=3, num_samples=2, center="running"), bb.RandomFlip())
    made = bb.export(posterior, tmp_path / "b.onnx", images[:3], bb.categorical(), num_samples=2)
    assert made.ratio < 1.1
    assert_parity(made.path, posterior, images, bb.categorical(), num_samples=2)


def test_an_onnxscript_that_is_too_old_says_what_to_do(monkeypatch, tmp_path):
    def missing(*_, **__):
        raise ModuleNotFoundError("No module named 'onnxscript._framework_apis.torch_2_11'")

    monkeypatch.setattr(torch.onnx, "export", missing)
    with pytest.raises(BatchbayesError, match="pip install --upgrade onnxscript"):
        bb.export(bb.deterministic(nn.Linear(2, 3)), tmp_path / "a.onnx", torch.randn(4, 2), bb.categorical())
