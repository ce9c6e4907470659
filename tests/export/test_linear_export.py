"""The linear engine in a file: the same numbers as `predict(engine="linear")`."""

import pytest
import torch
from torch import nn

import batchbayes as bb

onnxruntime = pytest.importorskip("onnxruntime")
pytestmark = pytest.mark.filterwarnings("ignore:the network is not linear enough")


def mlp(outputs):
    return nn.Sequential(
        nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8), nn.BatchNorm1d(8), nn.Tanh(),
        nn.Linear(8, outputs),
    )  # fmt: skip


def pictures():
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1, stride=2), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 5),
    )  # fmt: skip


def maps():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4),
        nn.ReLU(), nn.Conv2d(4, 3, 1),
    )  # fmt: skip


CASES = {
    "classes": (lambda: mlp(4), (4,), bb.categorical(temperature=1.3), bb.mcbn),
    "yes or no": (lambda: mlp(1), (4,), bb.bernoulli(), bb.mcbn),
    "values": (lambda: mlp(2), (4,), bb.gaussian(4.0), bb.mcbn),
    "independent noise": (lambda: mlp(1), (4,), bb.gaussian(4.0), bb.stochastic_bn),
    "pictures": (pictures, (3, 12, 12), bb.categorical(), bb.mcbn),
    "maps": (maps, (3, 10, 12), bb.categorical(), bb.mcbn),
}


def run(path, inputs):
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": inputs.numpy()})
    return {each.name: torch.as_tensor(values) for each, values in zip(session.get_outputs(), found, strict=True)}


@pytest.mark.parametrize("case", CASES)
def test_the_file_predicts_as_the_linear_engine_does(case, tmp_path):
    build, shape, likelihood, fit = CASES[case]
    torch.manual_seed(0)
    network = build()
    x = torch.randn(300, *shape)
    network(x)
    network.eval()
    posterior = fit(network, x[:200], batch_size=2 if case == "maps" else 10, num_samples=16)
    path = tmp_path / "network.onnx"
    made = bb.export(posterior, path, x[:5], likelihood, num_samples=16, engine="linear")
    assert made.difference < 1e-5
    new = x[200:231]
    predict = {
        engine: bb.predict(posterior, new, likelihood, num_samples=16, engine=engine) for engine in ("linear", "sample")
    }
    found = run(path, new)
    assert not found.pop("flag").any()
    names = {"pred_mean": "mean", "pred_std": "std"}
    for name, values in found.items():
        told = {
            engine: each.epistemic_variance.sqrt() if name == "epistemic_std" else getattr(each, names.get(name, name))
            for engine, each in predict.items()
        }
        torch.testing.assert_close(values, told["linear"], atol=1e-5, rtol=1e-5)
        if name in ("epistemic_std", "mutual_information"):
            off = {engine: float((values - other).abs().max()) for engine, other in told.items()}
            assert off["sample"] > 20 * off["linear"]  # exact draws are something else
