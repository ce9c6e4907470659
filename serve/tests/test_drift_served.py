"""Drift in a file and in the service: the same numbers as in Python, and an alarm while requests come in."""

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request

import numpy as np
import onnxruntime
import pytest
import torch
from helpers.drift_cases import blobs
from helpers.served import answer, serving
from torch import nn

import batchbayes as bb
from batchbayes._common.files import read_json
from batchbayes.errors import BatchbayesError


@pytest.fixture(scope="module")
def exported(classifier, tmp_path_factory):
    """A file with drift, and the drift beside it."""
    network, drift = classifier
    folder = tmp_path_factory.mktemp("drift")
    bb.export(bb.deterministic(network), folder / "network.onnx", blobs(40, 7)[0], bb.categorical(), drift=drift)
    bb.save(drift, folder / "drift.safetensors")
    return folder


def adapted_center(drift, window, inputs):
    posterior = drift.adapted(window)
    return posterior.function(posterior.center)(inputs)


def from_file(folder, inputs):
    session = onnxruntime.InferenceSession(folder / "network.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {"input": inputs.numpy()})
    return dict(zip((each.name for each in session.get_outputs()), found, strict=True))


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("move", [0.0, 2.0])
def test_a_file_says_what_drift_says(classifier, exported, count, move):
    _, drift = classifier
    window = blobs(count, 11)[0] + move
    found, report = from_file(exported, window), drift.report(window)
    _, sample, _ = drift.seen(window, None)
    tolerance = np.full(sample.rows.shape[1], 2e-5)
    tolerance[-2] = 1e-3  # the logarithm of a distance that is a small difference of large float32 numbers
    assert (np.abs(found["drift_statistics"] - sample.rows.numpy()) <= tolerance).all()
    assert found["drift_class"].tolist() == sample.classes.tolist()
    expected = adapted_center(drift, window, window).softmax(1)
    np.testing.assert_allclose(found["adapted_probs"], expected, rtol=0, atol=1e-5)
    logits = torch.tensor(found["adapted_logits"]).double()
    for answers, wanted in ((logits.argmax(1), report.expected_accuracy), (sample.classes, report.network_accuracy)):
        assert drift.confidence.estimate(logits, answers).value == pytest.approx(wanted.value, abs=1e-5)


@pytest.mark.parametrize("outputs", [1, 2])
def test_a_file_without_classes_takes_any_number_of_inputs(outputs, tmp_path):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, outputs)).eval()
    drift = bb.drift(network, blobs(300, 0)[0])
    path = tmp_path / "network.onnx"
    bb.export(bb.deterministic(network), path, blobs(8, 1)[0], bb.gaussian(4.0), drift=drift)
    for count in (1, 20):
        window = blobs(count, 2)[0]
        found, rows = from_file(tmp_path, window), drift.seen(window, None)[1].rows
        np.testing.assert_allclose(found["drift_statistics"][:, :-2], rows[:, :-2], rtol=1e-4, atol=1e-4)
        expected = adapted_center(drift, window, window)
        np.testing.assert_allclose(found["adapted_mean"], expected.detach(), rtol=1e-4, atol=1e-4)


def told_by(address):
    with urllib.request.urlopen(address, timeout=20) as found:
        return found.read().decode()


def settled(service):
    """Wait until the monitor has seen everything."""
    service._thread.submit(int).result()


def test_a_drift_that_comes_in_raises_the_alarm_of_a_monitor_in_python(classifier, exported):
    _, drift = classifier
    monitor = drift.monitor()
    (exported / "drift.watched.safetensors").unlink(missing_ok=True)
    with serving(exported / "network.onnx", drift=exported / "drift.safetensors") as (service, address):

        def ask(inputs, **more):
            status, found = answer(f"{address}/predict", json.dumps({"inputs": inputs.tolist(), **more}))
            assert status == 200
            settled(service)
            return found

        for part in blobs(200, 20)[0].split(40):
            assert ask(part)["alarm"] is monitor.update(part).alarm is False
        assert ask(part[:2], adapt=True)["adapted_to"] == 0
        monitor.update(part[:2])
        assert "No change is seen" in told_by(f"{address}/")
        for part in (0.5 * blobs(120, 21)[0] + 2.0).split(20):
            ask(part)
            monitor.update(part)
        watch, own = service.watcher.monitor.watch, monitor.watch
        assert watch.alarm
        assert watch.alarms == own.alarms
        assert watch.evidence == pytest.approx(own.evidence, abs=0.05)
        assert torch.equal(service.watcher.monitor.window, monitor.window)
        new = 0.5 * blobs(5, 22)[0] + 2.0
        monitor.update(new)
        found = ask(new, adapt=True)
        window = torch.cat([monitor.window, new])
        assert found["adapted_to"] == len(window)
        expected = adapted_center(drift, window, new).softmax(1)
        np.testing.assert_allclose(found["adapted_probs"], expected, rtol=0, atol=1e-5)
        service._thread.submit(service.watcher._look).result()
        report = drift.report(monitor.window)
        told = {name: service.metrics.accuracy.labels(name)._value.get() for name in ("adapted", "as it is")}
        assert told["adapted"] == pytest.approx(report.expected_accuracy.value, abs=1e-5)
        assert told["as it is"] == pytest.approx(report.network_accuracy.value, abs=1e-5)
        assert service.metrics.total("drift_p_value", of="inputs") == pytest.approx(report.p_value)
        assert service.metrics.total("drift_alarm") == 1
        shown = told_by(f"{address}/")
        assert "The data has changed" in shown
        assert "<polyline" in shown


def test_a_service_that_was_killed_goes_on_with_its_watch(exported, tmp_path):
    shutil.copy(exported / "drift.safetensors", tmp_path / "d.safetensors")
    command = [sys.executable, "-m", "batchbayes", "serve", str(exported / "network.onnx"), "--port", "0"]
    command += ["--drift", str(tmp_path / "d.safetensors"), "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}

    def started():
        with (tmp_path / "log").open("w") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
        with process.stdout as told:
            return process, told.readline().strip()

    def ask(address, inputs):
        return answer(f"{address}/predict", json.dumps({"inputs": inputs.tolist()}))[1]

    process, address = started()
    for part in (0.5 * blobs(120, 21)[0] + 2.0).split(20):
        ask(address, part)
    kept = tmp_path / "d.watched.safetensors"
    for _ in range(300):  # the monitor looks at rows after they were answered
        if kept.exists() and read_json(kept, "watched")["monitor"]["alarm"]:
            break
        ask(address, 0.5 * blobs(2, 22)[0] + 2.0)
        time.sleep(0.1)
    process.kill()
    process.wait()
    process, address = started()
    assert ask(address, 0.5 * blobs(2, 23)[0] + 2.0)["alarm"]
    process.terminate()
    assert process.wait(timeout=30) == 0
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    (told,) = [line for line in lines if line["event"] == "the watch goes on"]
    assert told["alarm"]
    assert told["examples"] >= 20
    kept.write_bytes(kept.read_bytes()[:-7])  # damaged: it starts afresh, and says so
    process, address = started()
    assert not ask(address, blobs(2, 24)[0])["alarm"]
    process.terminate()
    process.wait(timeout=30)
    assert "the watch starts afresh" in (tmp_path / "log").read_text()


def test_a_drift_that_is_not_that_of_the_file_is_refused(exported, tmp_path):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).eval()
    other = bb.drift(network, blobs(200, 3)[0])
    bb.save(other, tmp_path / "other.safetensors")
    bb.save(bb.deterministic(network), tmp_path / "posterior.safetensors")
    for name, said in (("other", "another drift"), ("posterior", "of kind")):
        with (
            pytest.raises(BatchbayesError, match=said),
            serving(exported / "network.onnx", drift=tmp_path / f"{name}.safetensors"),
        ):
            raise AssertionError
    with pytest.raises(BatchbayesError, match="other weights"):
        bb.export(
            bb.deterministic(nn.Linear(4, 2)), tmp_path / "n.onnx", torch.zeros(4, 4), bb.categorical(), drift=other
        )
    with pytest.raises(BatchbayesError, match=r"what .* returned"):
        bb.export(bb.deterministic(network), tmp_path / "n.onnx", torch.zeros(4, 4), bb.categorical(), drift=network)


class Pictures(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(256, outputs)

    def forward(self, x):
        return self.head(self.body(x))


@pytest.mark.slow
@pytest.mark.parametrize("likelihood", [bb.categorical(temperature=1.7), bb.gaussian(4.0)], ids=["classes", "values"])
@pytest.mark.parametrize("ending", ["onnx", "pt2"])
def test_images_with_draws_novelty_and_drift(likelihood, ending, tmp_path):
    torch.manual_seed(0)
    x = torch.randn(300, 1, 8, 8)
    network = Pictures(5 if likelihood.shift_invariant else 1).eval()
    drift, novelty = bb.drift(network, x[:200], calibration=x[200:]), bb.novelty(network, x[:200])
    posterior = bb.mcbn(network, x, batch_size=16, num_samples=4)
    path, window = tmp_path / f"network.{ending}", 0.5 * x[:20] + 1
    bb.export(
        posterior, path, x[:8], likelihood, num_samples=4, novelty=novelty, novelty_level=0.05, drift=drift
    )  # fmt: skip
    if ending == "onnx":
        found = from_file(tmp_path, window)
    else:
        found = {name: values.numpy() for name, values in torch.export.load(path).module()(window).items()}
    outputs = adapted_center(drift, window, window)
    if likelihood.shift_invariant:
        np.testing.assert_allclose(found["adapted_probs"], (outputs / 1.7).softmax(1).detach(), rtol=0, atol=1e-5)
    else:
        np.testing.assert_allclose(found["adapted_mean"], outputs.detach(), rtol=1e-5, atol=1e-5)
    rows = drift.seen(window, None)[1].rows
    np.testing.assert_allclose(found["drift_statistics"][:, :-2], rows[:, :-2], rtol=1e-4, atol=1e-4)
