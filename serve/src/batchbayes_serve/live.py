"""What is known about a running service: Prometheus metrics, the monitor of drift, and a page that shows both."""

import html
import json
import logging
import math
import string
import time
from collections import deque
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector

from batchbayes_serve import __version__
from batchbayes_serve.model import ADAPTED, LOGITS, STATISTICS, Found, OnnxFile
from batchbayes_serve.refusal import BatchbayesError

if TYPE_CHECKING:
    from batchbayes.drift.accuracy import Estimate
    from batchbayes.drift.monitor import Monitor

LOG = logging.getLogger("batchbayes_serve")
AFRESH = 64
"""Examples after which the latest window is looked at again."""
KEPT_SECONDS = 3.0
"""How often it is written where the monitor stands."""
POINTS = 400
"""Of a curve. If there are more, every other one is left out, so that a curve of any length has its whole past."""
PAGE = Path(__file__).parent / "page.html"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
P_VALUES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0)


class Metrics:
    """What Prometheus asks for."""

    def __init__(self, file: OnnxFile) -> None:
        own: dict[str, Any] = {"registry": CollectorRegistry(), "namespace": "batchbayes"}
        self.registry, self.latest = own["registry"], deque(maxlen=512)
        self.requests = Counter("requests", "Requests by path and status", ["path", "status"], **own)
        self.seconds = Histogram("request_seconds", "Time to answer /predict", buckets=SECONDS, **own)
        self.batches = Histogram("batch_rows", "Rows in one call of the file", buckets=ROWS, **own)
        self.flags = Counter("flagged_rows", "Rows with a flag", **own)
        self.novelty = Histogram("novelty_p_value", "p-values of novelty", buckets=P_VALUES, **own)
        self.outside = Counter("outside_range", "Values outside the training table", ["column"], **own)
        self.evidence = Gauge("drift_evidence_log10", "log10 of the capital of the monitor", **own)
        self.alarm = Gauge("drift_alarm", "1 if the data has changed and has not come back", **own)
        self.watched = Gauge("drift_examples", "Examples that the monitor has seen", **own)
        self.skipped = Counter("drift_skipped", "Examples that came too fast for the monitor", **own)
        self.p_value = Gauge("drift_p_value", "That the latest window is as usual", ["of"], **own)
        self.accuracy = Gauge("expected_accuracy", "Without labels, on the latest window", ["network"], **own)
        Info("file", "The file that is served", **own).info({"sha256": file.digest, "version": __version__})
        ProcessCollector(registry=self.registry)

    def count(self, found: Found) -> None:
        """Note the outputs of one call."""
        self.batches.observe(len(next(iter(found.values()))))
        if "flag" in found:
            self.flags.inc(int(found["flag"].sum()))
        for value in found.get("novelty", np.empty(0)).tolist():
            self.novelty.observe(value)

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Note one request."""
        self.requests.labels(path, str(status)).inc()
        if path == "/predict":
            self.seconds.observe(seconds)
            self.latest.append(seconds)

    def total(self, name: str, **labels: str) -> float:
        """Return the value of a metric; of all its labels that have these values."""
        samples = (sample for metric in self.registry.collect() for sample in metric.samples)
        return sum(s.value for s in samples if s.name == f"batchbayes_{name}" and labels.items() <= s.labels.items())


class Look(NamedTuple):
    """What the latest window says."""

    p_value: float
    class_p_value: float
    sites: list[str]
    """Names of the layers, that with most evidence first."""
    accuracies: dict[str, "Estimate"]
    """Of the adapted network and of the network as it is; empty without labelled calibration data."""


class Watcher:
    """Runs a monitor of drift over rows that were predicted. The file has computed their statistics already.

    Where the monitor stands is kept in a file beside the drift, every few seconds and at each alarm. A service that
    starts again goes on from there.
    """

    def __init__(self, file: OnnxFile, path: Path, metrics: Metrics, false_alarms: float = 0.01) -> None:
        """`path` is a drift or a monitor that `bb.save` wrote. A monitor goes on where it was saved."""
        self._file, self._metrics = file, metrics
        self.monitor = read_monitor(path, false_alarms)
        if file.notes.get("drift") != self.monitor.drift.digest:
            got = "a file of another drift" if "drift" in file.notes else "a file without drift"
            fix = "export it again: bb.export(..., drift=drift), and save the same drift"
            raise BatchbayesError(f"an .onnx file that was exported with {path}", got, fix)
        self._kept, self._kept_at = path.with_name(f"{path.stem}.watched.safetensors"), 0.0
        self._go_on()
        self.curve: list[tuple[int, float]] = []
        self.look: Look | None = None
        self._next_look = self.monitor.num_examples + AFRESH

    def _go_on(self) -> None:
        """Go on where a service before this one was, if it watched by the same drift."""
        from batchbayes._common.files import UNREADABLE, TensorFile, read_json
        from batchbayes.drift.monitor import Monitor

        if not self._kept.is_file():
            return
        try:
            kept, own = read_json(self._kept, "watched"), TensorFile(self._kept)
            header, tensors = self.monitor.state()
            same = {"drift": self.monitor.drift.digest, "false_alarms": self.monitor.false_alarms}
            if not own.is_intact() or {name: kept.get(name) for name in same} != same:
                raise ValueError("a watch by another drift, with another --false-alarms, or a damaged file")
            restored = {**tensors, **{name: own[name] for name in own}}
            header = header | {"monitor": kept["monitor"], "output": None}
            self.monitor = Monitor.restore(header, restored, self.monitor.network.module)
        except (*UNREADABLE, TypeError, RuntimeError) as error:
            LOG.warning("the watch starts afresh", extra={"told": {"why": f"{self._kept.name}: {error}"[:300]}})
        else:
            told = {"examples": self.monitor.num_examples, "alarm": self.monitor.alarm}
            LOG.info("the watch goes on", extra={"told": told})

    def keep(self) -> None:
        """Write where the monitor stands, whole or not at all."""
        from batchbayes._common.files import write_tensors

        header, tensors = self.monitor.state()
        own = {name: tensor for name, tensor in tensors.items() if name.startswith(("monitor.", "block."))}
        kept = {"drift": self.monitor.drift.digest, "false_alarms": self.monitor.false_alarms}
        write_tensors(self._kept, own, {"watched": json.dumps(kept | {"monitor": header["monitor"]})})
        self._kept_at = time.monotonic()

    def see(self, values: np.ndarray, found: Found) -> None:
        """Bet on new rows, and look at the latest window from time to time."""
        was_alarm = self.monitor.alarm
        watch = self.monitor.see(*_sample(values, found))
        if watch.alarm != was_alarm:
            LOG.warning("drift" if watch.alarm else "the drift is gone", extra={"told": watch._asdict()})
        self.curve.append((watch.num_examples, max(0.0, watch.evidence)))
        if len(self.curve) > POINTS:
            self.curve[:-1] = self.curve[:-1:2]
        self._metrics.evidence.set(self.curve[-1][1])
        self._metrics.alarm.set(watch.alarm)
        self._metrics.watched.set(watch.num_examples)
        if watch.num_examples >= self._next_look:
            self._next_look = watch.num_examples + AFRESH
            self._look()
        if watch.alarm != was_alarm or time.monotonic() > self._kept_at + KEPT_SECONDS:
            self.keep()

    def _look(self) -> None:
        """Test the latest window, and say how accurate the network is on it."""
        drift, values = self.monitor.drift, self.monitor.window.numpy()
        found = self._file.run(values, [*STATISTICS, *([LOGITS] if drift.confidence else [])])
        _, sample = _sample(values, found)
        p_value, class_p_value, sites = drift.ordinary.evidence(sample, drift.widths)
        ordered = [drift.sight.places[k].name for k in sites.argsort(descending=True).tolist()]
        estimates = {}
        if drift.confidence:
            logits = _tensor(found[LOGITS]).double()
            answers = {"adapted": logits.argmax(1), "as it is": sample.classes}
            estimates = {whose: drift.confidence.estimate(logits, each) for whose, each in answers.items()}
        self.look = Look(p_value, class_p_value, ordered, estimates)
        for what, value in (("inputs", p_value), ("classes", class_p_value)):
            self._metrics.p_value.labels(what).set(value)
        for name, estimate in estimates.items():
            self._metrics.accuracy.labels(name).set(estimate.value)

    def adapted(self, values: np.ndarray) -> tuple[Found, int]:
        """Return predictions that are adapted to these rows and the latest ones before them, and the number of both.

        Without an alarm there is nothing to adapt to, and the number is zero.
        """
        if not self.monitor.alarm:
            return {}, 0
        return adapted(self._file, values, self.monitor.window.numpy())


def adapted(file: OnnxFile, values: np.ndarray, window: np.ndarray) -> tuple[Found, int]:
    """Return predictions that are adapted to rows and a window, and the number of both."""
    together = np.concatenate([window.astype(values.dtype).reshape(-1, *values.shape[1:]), values])
    found = file.run(together, [name for name in ADAPTED if name in file.outputs])
    return {name: each[len(window) :] for name, each in found.items()}, len(together)


def _sample(values: np.ndarray, found: Found) -> tuple[Any, Any]:
    """Return inputs and their statistics as a monitor takes them."""
    from batchbayes.novelty.windows import Sample

    return _tensor(values), Sample(*(_tensor(found[name]) for name in STATISTICS))


def _tensor(values: np.ndarray) -> Any:
    import torch

    return torch.tensor(values)


def read_monitor(path: Path, false_alarms: float) -> "Monitor":
    """Read a drift or a monitor without its network, of which nothing but the batch-norm layers is needed."""
    if find_spec("batchbayes") is None:
        raise BatchbayesError("batchbayes, to watch for drift", "no batchbayes", "pip install batchbayes-serve[drift]")
    import torch

    from batchbayes.drift.detector import Drift
    from batchbayes.drift.monitor import Monitor
    from batchbayes.saving import read_file

    torch.set_num_threads(1)
    header, tensors = read_file(path)
    if header["kind"] not in ("drift", "monitor"):
        fix = "pass what bb.save(drift, path) wrote"
        raise BatchbayesError(f"a drift or a monitor at {path}", f"a file of kind {header['kind']}", fix)
    network = torch.nn.Module()
    for name, channels, epsilon in header["layout"]:
        *parents, last = name.split(".")
        place = network
        for parent in parents:
            if not hasattr(place, parent):
                place.add_module(parent, torch.nn.Module())
            place = place.get_submodule(parent)
        place.add_module(last, torch.nn.BatchNorm1d(channels, epsilon))
    header["output"] = None
    if header["kind"] == "monitor":
        return Monitor.restore(header, tensors, network)
    return Drift.restore(header, tensors, network).monitor(false_alarms=false_alarms)


def page(file: OnnxFile, name: str, metrics: Metrics, watcher: Watcher | None) -> str:
    """Return the live page. It has no script: a browser asks for it again every two seconds."""
    asked, good = (metrics.total("requests_total", path="/predict", **only) for only in ({}, {"status": "200"}))
    facts = {
        "requests, of which answered": f"{asked:,.0f}, {good:,.0f}",
        "rows, of which flagged": f"{metrics.total('batch_rows_sum'):,.0f}, {metrics.total('flagged_rows_total'):,.0f}",
    }
    if metrics.latest:
        median, most = np.percentile(list(metrics.latest), [50, 95]) * 1000
        facts["time to answer: median, 95 %"] = f"{median:.0f} ms, {most:.0f} ms"
    shown = {"name": name, "version": __version__, "digest": file.digest[:16], "kind": "soft", "level": "2.0"}
    shown |= {"state": "Start with --drift FILE to watch for drift.", "first": "", "last": "no", "curve": ""}
    told = {}
    if watcher:
        shown |= _curve(watcher)
        told = _told(watcher)
    escaped = {key: html.escape(value) for key, value in shown.items()}
    return string.Template(PAGE.read_text()).substitute(escaped, requests=_rows(facts), drift=_rows(told))


def _rows(facts: Mapping[str, str]) -> str:
    return "".join(f"<tr><th>{html.escape(a)}</th><td>{html.escape(b)}</td></tr>" for a, b in facts.items())


def _told(watcher: Watcher) -> dict[str, str]:
    """Return what the monitor and the latest window say."""
    watch, look = watcher.monitor.watch, watcher.look
    facts = {"examples": f"{watch.num_examples:,}", "evidence (log10)": f"{max(0.0, watch.evidence):.2f}"}
    if watch.alarms:
        facts["alarms after examples"] = ", ".join(f"{at:,}" for at in watch.alarms[-5:])
    if look:
        for name, estimate in look.accuracies.items():
            facts[f"expected accuracy, network {name}"] = str(estimate)
        facts["latest window: p-value of inputs, of classes"] = f"{look.p_value:.3f}, {look.class_p_value:.3f}"
        facts["layers where most is seen"] = ", ".join(look.sites[:3])
    return facts


def _curve(watcher: Watcher) -> dict[str, str]:
    """Return the state in words, and the evidence over the number of examples. It is cut at 2.5 levels of an alarm."""
    level, points, alarms = -math.log10(watcher.monitor.false_alarms), list(watcher.curve), watcher.monitor.watch.alarms
    first, last = (points[0][0], points[-1][0]) if points else (0, 0)
    places = (
        f"{40 + 550 * (at - first) / max(1, last - first):.1f},{190 - 72 * min(2.5, value / level):.1f}"
        for at, value in points
    )
    found = {"level": f"{level:.1f}", "first": f"{first:,}", "last": f"{last:,}", "curve": " ".join(places)}
    if watcher.monitor.alarm:
        return found | {"kind": "bad", "state": f"The data has changed: alarm after {alarms[-1]:,} examples."}
    return found | {"kind": "good", "state": "No change is seen."}
