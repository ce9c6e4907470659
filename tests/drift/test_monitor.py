"""The monitor of a stream: false alarms, detection, return, files, and constant memory."""

import copy
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers.drift_cases import blobs
from torch import nn

import batchbayes as bb
from batchbayes.novelty.windows import Sample


def test_unchanged_streams_raise_no_more_alarms_than_the_level(classifier):
    """60 streams of 600 examples at 20 %, of any mix of classes, each with its own calibration data."""
    _, drift = classifier
    alarms = 0
    for seed in range(60):
        mix = (0.25,) * 4 if seed % 2 else (0.7, 0.1, 0.1, 0.1)
        _, ordinary, _ = drift.seen(blobs(400, 1000 + seed)[0], None)
        monitor = drift.monitor(false_alarms=0.2)
        monitor.calibrate(ordinary, drift.ordinary.group_of[ordinary.classes])
        monitor.bet(drift.seen(blobs(600, 2000 + seed, mix)[0], None)[1])
        alarms += bool(monitor.alarms)
    assert alarms <= 12 + 3 * math.sqrt(60 * 0.2 * 0.8)


def test_capital_is_the_naive_sum_over_bettors_that_start_later(classifier):
    """Each bettor starts at its own example with its own share, and multiplies; the rest is held back."""
    _, drift = classifier
    monitor = drift.monitor()
    bets, capital = [], []
    for sample in _each(drift.seen(blobs(30, 5)[0] + 0.4, None)[1]):
        before = monitor._capital.copy()
        monitor.bet(sample)
        age = monitor._age - 1
        entering = 1 / math.log2(age + 2) - 1 / math.log2(age + 3)
        bets.append(monitor._capital / (before + entering))
        shares = [1 / math.log2(t + 2) - 1 / math.log2(t + 3) for t in range(age + 1)]
        capital.append(sum(share * np.prod(bets[t:], axis=0) for t, share in enumerate(shares)))
        np.testing.assert_allclose(monitor._capital, capital[-1], rtol=1e-9)
    total = max(float(each.mean()) + 1 / math.log2(t + 3) for t, each in enumerate(capital))
    assert monitor.watch.evidence == pytest.approx(math.log10(total))


def _each(sample):
    return [Sample(*(part[i : i + 1] for part in sample)) for i in range(len(sample.classes))]


def test_a_drift_is_found_repaired_and_its_end_is_noticed(classifier):
    network, drift = classifier
    monitor = drift.monitor(false_alarms=0.01)
    for part in blobs(600, 20)[0].split(20):
        assert not monitor.update(part).alarm
    assert monitor.posterior().is_point
    x, y = blobs(200, 21)
    drifted = 0.5 * x + 2.0
    for part in drifted.split(20):
        watch = monitor.update(part)
    assert watch.alarm
    assert 600 < watch.alarms[0] <= 700
    posterior = monitor.posterior()
    before = float((network(drifted).argmax(1) == y).double().mean())
    assert float((posterior.function(posterior.center)(drifted).argmax(1) == y).double().mean()) > before + 0.1
    for part in blobs(300, 22)[0].split(20):
        watch = monitor.update(part)
    assert not watch.alarm
    assert monitor.posterior().is_point


def test_an_answer_does_not_depend_on_how_the_stream_is_cut(classifier):
    _, drift = classifier
    x = blobs(96, 23)[0] + 0.2
    found = []
    for size in (1, 7, 96):
        monitor = drift.monitor()
        for part in x.split(size):
            watch = monitor.update(part)
        found.append(watch.evidence)
    assert found == pytest.approx([found[0]] * 3)


def test_saved_and_resumed_with_the_same_bits(classifier, tmp_path):
    network, drift = classifier
    stream = torch.cat([blobs(200, 24)[0], blobs(400, 25)[0] + 1.5]).split(20)
    whole, first = drift.monitor(), drift.monitor()
    for part in stream:
        whole.update(part)
    for number, part in enumerate(stream):
        first.update(part)
        if number in (4, 14):  # before and during an alarm
            bb.save(first, tmp_path / "monitor")
            first = bb.load(tmp_path / "monitor", network)
    assert first.watch == whole.watch
    assert torch.equal(first.posterior().center, whole.posterior().center)
    assert repr(first) == repr(whole)


def test_a_killed_process_is_resumed_with_the_same_bits(classifier, tmp_path):
    """The process saves after every second update, and is killed after an update that was not saved."""
    network, drift = classifier
    stream = torch.cat([blobs(100, 24)[0], blobs(100, 25)[0] + 1.5]).split(20)
    bb.save(drift.monitor(), tmp_path / "monitor")
    torch.save((network, stream), tmp_path / "given.pt")
    script = (
        "import os, sys, torch, batchbayes as bb; from pathlib import Path; folder = Path(sys.argv[1])\n"
        "network, stream = torch.load(folder / 'given.pt', weights_only=False)\n"
        "monitor = bb.load(folder / 'monitor', network)\n"
        "for number, part in enumerate(stream[:7]):\n"
        "    monitor.update(part)\n"
        "    number % 2 and bb.save(monitor, folder / 'monitor')\n"
        "os._exit(9)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert done.returncode == 9  # at once: nothing is written or closed
    resumed, whole = bb.load(tmp_path / "monitor", network), drift.monitor()
    assert resumed.num_examples == 120
    for part in stream[6:]:
        resumed.update(part)
    for part in stream:
        whole.update(part)
    assert resumed.watch == whole.watch
    assert all(torch.equal(a, b) for a, b in zip(*(m.state()[1].values() for m in (resumed, whole)), strict=True))


def test_memory_does_not_grow_and_is_balanced(classifier):
    _, drift = classifier
    monitor = drift.monitor(memory=32)
    for seed in range(10):
        monitor.update(blobs(50, seed, (0.91, 0.03, 0.03, 0.03))[0])
        assert len(monitor._inputs) <= 32
    assert monitor._classes.bincount(minlength=4).min() >= 3
    tensors = monitor.state()[1]
    sizes = {name: tensor.numel() for name, tensor in tensors.items()}
    for seed in range(10):
        monitor.update(blobs(50, 50 + seed)[0])
    assert {name: tensor.numel() for name, tensor in monitor.state()[1].items()} == sizes


def test_a_monitor_that_is_copied_goes_on_as_its_original(classifier):
    _, drift = classifier
    monitor = drift.monitor()
    monitor.update(blobs(60, 30)[0])
    for twin in (copy.deepcopy(monitor), pickle.loads(pickle.dumps(monitor))):
        assert twin.watch == monitor.watch
        assert twin.update(blobs(30, 31)[0]) == copy.deepcopy(monitor).update(blobs(30, 31)[0])


def test_inputs_of_another_shape_are_refused_before_they_count():
    torch.manual_seed(0)
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    network = nn.Sequential(*layers)
    monitor = bb.drift(network.eval(), torch.randn(200, 1, 8, 8), calibration=torch.randn(200, 1, 8, 8)).monitor()
    monitor.update(torch.randn(20, 1, 8, 8))
    with pytest.raises(bb.BatchbayesError, match=r"with \(1, 8, 8\), as before; got \(1, 9, 9\)"):
        monitor.update(torch.randn(20, 1, 9, 9))
    assert monitor.watch.num_examples == 20
    sizes = [torch.randn(60, 1, 8, 8), torch.randn(60, 1, 9, 9)]
    with pytest.raises(bb.BatchbayesError, match=r"inputs of one shape .* \(1, 8, 8\) and \(1, 9, 9\)"):
        bb.drift(network, sizes)
