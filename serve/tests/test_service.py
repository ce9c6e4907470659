"""The service: answers, refusals with their reasons, batches, metrics, page, logs and a stop that cuts nobody off."""

import hashlib
import html
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from batchbayes_serve.model import OnnxFile, RequestError
from batchbayes_serve.service import Limits
from helpers.served import answer, served, serving
from prometheus_client.parser import text_string_to_metric_families
from torch import nn

import batchbayes as bb
from batchbayes import cli


class Tokens(nn.Module):
    """A network whose inputs are whole numbers, and whose logits are too large for some of them."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        with torch.no_grad():
            self.embedding.weight[4] = torch.finfo(torch.float32).max

    def forward(self, tokens):
        return self.embedding(tokens).sum(1)


COLUMNS = [
    {"name": "length (mm)", "dtype": "real", "low": -3.0, "high": 3.0, "unit": "mm"},
    {"name": "count", "dtype": "integer", "low": -3.0, "high": 3.0, "unit": ""},
]
CLASSES = ["small", "<b>large"]
LIMITS = Limits(num_bytes=20_000, rows=50, seconds=2.0)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    path = tmp_path_factory.mktemp("service") / "tokens.onnx"
    bb.export(bb.deterministic(Tokens()), path, torch.zeros(4, 2).long(), bb.categorical())
    with served(path, limits=LIMITS) as found:
        yield found


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """A file that knows its columns and classes, and its network."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("service") / "table.onnx"
    notes = {"columns": json.dumps(COLUMNS), "classes": json.dumps(CLASSES)}
    network = nn.Linear(2, 2)
    bb.export(bb.deterministic(network), path, torch.randn(4, 2), bb.categorical(), notes=notes)
    return path, network


@pytest.fixture(scope="module")
def by_name(table):
    with serving(table[0], limits=LIMITS) as (service, address):
        yield service, address, table[1]


def rows(*records):
    return json.dumps({"inputs": [dict(zip(("length (mm)", "count"), each, strict=True)) for each in records]})


def fetched(address):
    with urllib.request.urlopen(address, timeout=10) as found:
        return found, found.read().decode()


def test_inputs_that_are_whole_numbers_are_answered(tokens):
    status, found = answer(tokens, '{"inputs": [[0, 1], [2, 3]]}')
    assert status == 200
    assert len(found["probs"]) == 2


def test_records_are_taken_by_name(by_name):
    _, address, network = by_name
    body = '{"inputs": [{"count": 2, "length (mm)": -1.5}, {"length (mm)": 0, "count": 9}]}'
    status, found = answer(f"{address}/predict", body)
    assert status == 200
    expected = network(torch.tensor([[-1.5, 2.0], [0.0, 9.0]])).softmax(1)
    torch.testing.assert_close(torch.tensor(found["probs"]), expected.detach(), rtol=1e-5, atol=1e-6)
    assert found["prediction"] == [CLASSES[k] for k in expected.argmax(1)]
    assert found["outside"] == [[], ["count"]]


WITH_NAMES = {
    "no JSON": ("inputs", 400, "JSON"),
    "nothing": ("", 400, "JSON"),
    "cut": ('{"inputs": [', 400, "JSON"),
    "no text": (b"\xff\xfe\x00", 400, "JSON"),
    "without end": ("[" * 15_000, 400, "levels"),
    "950 levels": ('{"inputs": ' + "[" * 950 + "]" * 950 + "}", 400, "levels"),
    "a name for each row and more": (rows((1, 1))[:-2] + ', "x": "y"' * 700 + "}]}", 413, "quotation marks"),
    "NaN": ('{"inputs": [{"count": NaN, "length (mm)": 1}]}', 400, "NaN is no JSON"),
    "infinity": ('{"inputs": [{"count": -Infinity, "length (mm)": 1}]}', 400, "-Infinity is no JSON"),
    "a name twice": ('{"inputs": [{"count": 1, "count": 2, "length (mm)": 1}]}', 400, '"count" stands twice'),
    "a list": ("[[1, 2]]", 422, 'an object with a list of "inputs"'),
    "another key": ('{"input": [[0, 1]]}', 422, 'a list of "inputs"'),
    "a key too much": ('{"inputs": [], "model": 1}', 422, 'got also "model"'),
    "no rows": ('{"inputs": []}', 422, "at least one row"),
    "too many rows": (rows(*[(1, 1)] * 51), 413, "at most 50 rows"),
    "too long": (rows((1, 1)) + " " * 30_000, 413, "at most 20000 bytes"),
    "far too long": (b" " * 100_000, 413, "at most 20000 bytes"),
    "positions": ('{"inputs": [[2, -1.5]]}', 422, "positions can be mixed up"),
    "a name that is missing": ('{"inputs": [{"count": 2}]}', 422, "missing length (mm)"),
    "another name": ('{"inputs": [{"count": 2, "length": -1.5}]}', 422, "did you mean length (mm)?"),
    "a name too much": ('{"inputs": [{"count": 2, "length (mm)": -1.5, "age": 3}]}', 422, 'unknown column "age"'),
    "capitals": ('{"inputs": [{"Count": 2, "length (mm)": 1}]}', 422, 'unknown column "Count" (did you mean count?)'),
    "a text": ('{"inputs": [{"count": "2", "length (mm)": 1}]}', 422, 'a number for count, got "2"'),
    "yes": ('{"inputs": [{"count": true, "length (mm)": 1}]}', 422, "a number for count, got true"),
    "null": ('{"inputs": [{"count": null, "length (mm)": 1}]}', 422, "a number for count, got null"),
    "the second row": (rows((1, 1), (1, "x")), 422, "row 1"),
    "too large": ('{"inputs": [{"count": 1e400, "length (mm)": 1}]}', 422, "row 0: expected a finite float32"),
    "too large for float32": ('{"inputs": [{"count": 1e39, "length (mm)": 1}]}', 422, "number for count"),
    "too many digits": (rows((10**400, 1)), 422, "too large"),
    "adapting without drift": ('{"inputs": [{}], "adapt": true}', 422, "without drift="),
    "adapting, perhaps": ('{"inputs": [{}], "adapt": 1}', 422, 'true or false for "adapt"'),
}
WITHOUT_NAMES = {
    "100 levels": ('{"inputs": ' + "[" * 100 + "]" * 100 + "}", 400, "levels"),
    "500 levels": ('{"inputs": ' + "[" * 500 + "1" + "]" * 500 + "}", 400, "levels"),
    "another shape": ('{"inputs": [[0, 1, 2]]}', 422, "of shape (N, 2)"),
    "one row alone": ('{"inputs": [0, 1]}', 422, "of shape (N, 2)"),
    "rows of two lengths": ('{"inputs": [[0, 1], [2]]}', 422, "not all of one shape"),
    "text": ('{"inputs": [["a", "b"]]}', 422, "got text"),
    "yes among numbers": ('{"inputs": [[1, true]]}', 422, "got true or false"),
    "a fraction": ('{"inputs": [[0.5, 1]]}', 422, "whole numbers"),
    "a record": ('{"inputs": [{"a": 1}]}', 422, "got an object"),
    "a token that there is not": ('{"inputs": [[0, 77]]}', 422, "cannot take these inputs"),
    "an answer that is no number": ('{"inputs": [[0, 1], [4, 4]]}', 422, "row 1: the network's probs is no finite"),
}


@pytest.mark.parametrize(("body", "status", "words"), WITH_NAMES.values(), ids=WITH_NAMES)
def test_bad_requests_get_their_status_and_a_sentence(by_name, body, status, words):
    found, told = answer(f"{by_name[1]}/predict", body)
    assert found == status
    assert words in told["error"]
    assert len(told["error"]) <= 600


@pytest.mark.parametrize(("body", "status", "words"), WITHOUT_NAMES.values(), ids=WITHOUT_NAMES)
def test_bad_rows_get_their_status_and_a_sentence(tokens, body, status, words):
    found, told = answer(tokens, body)
    assert found == status
    assert words in told["error"]


def exchanged(address, method, path, body=None, **headers):
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
    connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
    found = connection.getresponse()
    content = found.read()
    connection.close()
    return found, content


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "words"),
    [
        ("GET", "/predict", {}, 405, "takes no GET, but POST"),
        ("DELETE", "/metrics", {}, 405, "takes no DELETE"),
        ("GET", "/../etc/passwd", {}, 404, "nothing at /../etc/passwd"),
        ("POST", "/predict", {"Content_Type": "text/csv"}, 415, "application/json"),
        ("POST", "/predict", {}, 415, "got none"),
        ("POST", "/predict", {"Content_Type": "application/json", "Content_Encoding": "gzip"}, 415, "not compressed"),
    ],
)
def test_other_requests_get_their_status_and_a_sentence(by_name, method, path, headers, status, words):
    found, content = exchanged(by_name[1], method, path, "a,b" if method == "POST" else None, **headers)
    assert found.status == status
    assert words in json.loads(content)["error"]


def test_a_body_in_pieces_may_not_be_too_long_either(by_name):
    pieces = (b" " * 10_000 for _ in range(4))
    found, content = exchanged(by_name[1], "POST", "/predict", pieces, Content_Type="application/json")
    assert found.status == 413
    assert "at most 20000 bytes" in json.loads(content)["error"]


def test_requests_that_come_together_are_one_batch_with_the_answers_of_single_calls(by_name):
    service, address, _ = by_name
    random = np.random.default_rng(0)
    asked = [rows(*random.normal(size=(1 + k % 5, 2)).tolist()) for k in range(60)]
    alone = [answer(f"{address}/predict", body)[1] for body in asked]
    sizes, run = [], service.file.run
    service.file.run = lambda values, names: (time.sleep(0.02), sizes.append(len(values)), run(values, names))[2]
    try:
        with ThreadPoolExecutor(30) as pool:
            together = list(pool.map(lambda body: answer(f"{address}/predict", body)[1], asked))
    finally:
        service.file.run = run
    assert sum(sizes) == sum(1 + k % 5 for k in range(60))
    assert max(sizes) > 5
    assert max(sizes) <= 50
    for one, other in zip(alone, together, strict=True):
        np.testing.assert_allclose(other["probs"], one["probs"], rtol=0, atol=1e-6)
        assert other | {"probs": 0, "entropy": 0} == one | {"probs": 0, "entropy": 0}


def test_a_bad_request_does_no_harm_to_its_neighbours(tokens):
    bodies = ['{"inputs": [[0, 77]]}' if k % 4 == 0 else '{"inputs": [[0, 1]]}' for k in range(40)]
    with ThreadPoolExecutor(20) as pool:
        found = [status for status, _ in pool.map(lambda body: answer(tokens, body), bodies)]
    assert found == [422 if k % 4 == 0 else 200 for k in range(40)]


def test_slow_clients_are_told_and_hold_nobody_up(by_name):
    _, address, _ = by_name
    place = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
    head = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
    slow = [socket.create_connection(place, timeout=10) for _ in range(40)]
    for each in slow:
        each.sendall(head)
    status, _ = answer(f"{address}/predict", rows((1, 1)))
    assert status == 200
    first = b"".join(iter(lambda: slow[0].recv(4096), b""))
    assert b" 408 " in first
    assert b"did not arrive within 2 seconds" in first
    for each in slow:
        each.close()


@pytest.mark.parametrize("sent", [b"", b"POST /predict HTTP/1.1\r\nHost: he"])
def test_half_of_the_headers_is_not_waited_for(by_name, sent):
    place = ("127.0.0.1", int(by_name[1].rsplit(":", 1)[1]))
    with socket.create_connection(place, timeout=10) as slow:
        slow.sendall(sent)
        began = time.monotonic()
        assert slow.recv(4096) == b""  # closed
        assert 1 < time.monotonic() - began < 9


def test_idle_connections_shut_nobody_out(table):
    with serving(table[0], limits=Limits(connections=20)) as (_, address):
        place = ("127.0.0.1", int(address.rsplit(":", 1)[1]))
        idle = [socket.create_connection(place, timeout=10) for _ in range(60)]
        assert answer(f"{address}/predict", rows((1, 1)))[0] == 200
        assert idle[0].recv(10) == b""  # the oldest made room
        for each in idle:
            each.close()


def test_an_answer_on_an_open_connection_does_not_wait_for_nagle(by_name):
    _, address, _ = by_name
    connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=10)
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        seconds.append(time.perf_counter() - began)
    connection.close()
    assert min(seconds) < 0.03  # it was never below 0.04


def test_reading_names_takes_time_that_grows_as_their_number(table):
    file = OnnxFile(table[0])
    names = ",".join(f'"{k}":1' for k in range(100_000))
    for body in (f'{{"inputs":[{{{names},{names}}}]}}', f'{{"inputs":[{{{names}}}]}}'):
        began = time.process_time()
        with pytest.raises(RequestError, match=r"stands twice|unknown column"):
            file.read(body.encode(), 10**6)
        assert time.process_time() - began < 5  # it was minutes


@pytest.mark.parametrize(
    "notes",
    [{"columns": '[{"name": "a"}]'}, {"columns": "3"}, {"classes": '"ab"'}, {"classes": "[1, 2]"}, {"columns": "["}],
)
def test_notes_that_no_answer_could_be_made_with_are_refused_at_the_start(table, tmp_path, notes):
    torch.manual_seed(0)
    path = tmp_path / "table.onnx"
    bb.export(bb.deterministic(nn.Linear(2, 2)), path, torch.randn(4, 2), bb.categorical(), notes=notes)
    with pytest.raises(bb.BatchbayesError, match=r"an \.onnx file that bb\.export wrote"):
        OnnxFile(path)


def test_a_client_that_leaves_is_counted(by_name):
    service, address, _ = by_name
    with socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) as leaving:
        head = b"POST /predict HTTP/1.1\r\nHost: here\r\nContent-Type: application/json\r\n"
        leaving.sendall(head + b"Content-Length: 99\r\n\r\n{")
    for _ in range(50):
        if service.metrics.total("requests_total", status="499"):
            break
        time.sleep(0.1)
    assert service.metrics.total("requests_total", status="499") >= 1


def test_time_and_waiting_rows_are_limited(table):
    with serving(table[0], limits=Limits(rows=2, seconds=0.5)) as (service, address):
        run, service.file.run = service.file.run, lambda values, names: time.sleep(1)
        with ThreadPoolExecutor(40) as pool:
            found = list(pool.map(lambda _: answer(f"{address}/predict", rows((1, 1))), range(40)))
            assert {status for status, _ in found} == {503}
            said = {told["error"] for _, told in found}
            assert said == {
                "no answer within 0.5 seconds: try again later",
                "too many rows are waiting: try again later",
            }
        service.file.run = run


def test_metrics_are_read_by_the_client_library_of_prometheus(by_name):
    _, address, _ = by_name
    answer(f"{address}/predict", rows((9, 1), (1, 1)))
    found, text = fetched(f"{address}/metrics")
    assert found.headers["Content-Type"].startswith("text/plain")
    samples = {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert samples["batchbayes_requests_total", ("path", "/predict"), ("status", "200")] >= 1
    assert samples["batchbayes_outside_range_total", ("column", "length (mm)")] >= 1
    assert samples[("batchbayes_request_seconds_count",)] >= 1
    assert (
        samples[("batchbayes_request_seconds_bucket", ("le", "+Inf"))] == samples[("batchbayes_request_seconds_count",)]
    )
    assert samples[("batchbayes_flagged_rows_total",)] == 0
    assert samples[("batchbayes_drift_alarm",)] == 0
    assert ("batchbayes_drift_evidence_log10",) in samples
    assert ("batchbayes_novelty_p_value_count",) in samples
    assert [key for key in samples if key[0] == "batchbayes_file_info"]


def test_health_version_and_page(by_name, table):
    service, address, _ = by_name
    assert json.loads(fetched(f"{address}/health")[1]) == {"status": "ok"}
    assert json.loads(fetched(f"{address}/ready")[1]) == {"status": "ready"}
    told = json.loads(fetched(f"{address}/version")[1])
    assert told["sha256"] == hashlib.sha256(table[0].read_bytes()).hexdigest()
    assert told["batchbayes"] == bb.__version__
    assert told["about"]["columns"] == COLUMNS
    assert told["about"]["classes"] == CLASSES
    service.name = "<i>table.onnx"
    found, shown = fetched(f"{address}/")
    assert html.escape("<i>table.onnx") in shown
    assert "<i>" not in shown
    assert "default-src 'none'" in found.headers["Content-Security-Policy"]
    assert "//" not in shown.replace("<!doctype html>", "")  # nothing from elsewhere


@pytest.fixture
def process(table, tmp_path):
    """The command in a process of its own, without a network to wait for. Its log is a file: a pipe may be full."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-X", "importtime", "-m", "batchbayes", "serve", str(table[0]), "--port", "0"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [*command, "--drain", "0.5"], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ) as started,
    ):
        yield started
        started.kill()


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGTERM that a process could answer")
def test_a_stop_cuts_nobody_off_and_logs_are_json(process, tmp_path):
    address = process.stdout.readline().strip()
    found, stop = [], threading.Event()

    def ask():
        connection = http.client.HTTPConnection(address.removeprefix("http://"), timeout=20)
        while not stop.is_set():
            try:
                connection.request("POST", "/predict", rows((1, 1)), {"Content-Type": "application/json"})
            except ConnectionRefusedError:
                return connection.close()
            response = connection.getresponse()  # an error here is a client that was cut off
            response.read()
            found.append(response.status)
        return connection.close()

    with ThreadPoolExecutor(12) as pool:
        clients = [pool.submit(ask) for _ in range(12)]
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        stop.set()
    log = (tmp_path / "log").read_text()
    assert [client.exception() for client in clients] == [None] * 12
    assert set(found) == {200}
    assert len(found) > 12
    assert process.returncode == 0
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert lines[-1]["event"] == "stopped"
    assert {"time", "level", "event", "path", "status", "ms", "rows"} <= next(
        set(line) for line in lines if line["event"] == "request"
    )
    assert not [line for line in log.splitlines() if line.endswith("| torch")]  # it starts without it


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.onnx"], "nowhere.onnx"),
        ([__file__], "an .onnx file that bb.export wrote"),
        (["{table}", "--port", "99999"], "a port from 0 to 65535"),
        (["{table}", "--host", "192.0.2.1"], "an address that is free"),
        (["{table}", "--drift", "{table}"], "damaged"),
        (["{table}", "--host", ""], "an address to listen on"),
        (["{table}", "--timeout", "0"], "a timeout above 0 seconds"),
        (["{table}", "--timeout", "-1"], "a timeout above 0 seconds"),
        (["{table}", "--timeout", "nan"], "a timeout above 0 seconds"),
        (["{table}", "--threads", "-3"], "a number of threads, or 0"),
        (["{table}", "--drain", "nan"], "seconds to drain, 0 or more"),
        (["{table}", "--false-alarms", "2"], "a chance of false alarms between 0 and 1"),
    ],
)
def test_a_command_that_cannot_start_says_why(table, words, said, capsys):
    assert cli.main(["serve", *(word.format(table=table[0]) for word in words)]) == 2
    assert said in capsys.readouterr().err
