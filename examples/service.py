"""A small web service around an exported file. It needs onnxruntime and numpy, but neither torch nor batchbayes.

    batchbayes export --posterior report/posterior.safetensors ... --out network.onnx
    python examples/service.py network.onnx --port 8000
    curl -d '{"inputs": [{"cement": 540, "water": 162, "age": 28}]}' http://127.0.0.1:8000/predict

The answer has a row for each input: {"pred_mean": [[79.2]], "pred_std": [[4.1]], "flag": [false], ...}. A file that
knows the columns of its table takes records by name, because positions can be mixed up. "outside" then names the
columns of each record whose value is outside the range of the training table. A file without names takes lists of
numbers. Requests that are not understood get status 400 and say why. GET /health says what the file holds: names,
ranges and units of columns and targets, and the classes.
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]

DTYPES = {"tensor(float)": "f4", "tensor(double)": "f8", "tensor(float16)": "f2", "tensor(int64)": "i8"}
"""The types of numbers that a file may take, as numpy calls them."""
TABLES = ("columns", "targets", "classes")
"""Notes of a file that are JSON."""
MOST_BYTES = 2**24
"""A larger request is refused."""


class Model:
    """An exported file in memory. Any number of threads may call it at once."""

    def __init__(self, path: Path, threads: int = 1) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads  # requests run side by side, so each of them needs only one
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        taken = self._session.get_inputs()[0]
        self._shape, self._dtype = taken.shape[1:], DTYPES[taken.type]
        self._outputs = [output.name for output in self._session.get_outputs()]
        self._notes = dict(self._session.get_modelmeta().custom_metadata_map)
        self._notes |= {name: json.loads(self._notes[name]) for name in TABLES if name in self._notes}
        self._columns: list[dict[str, Any]] = self._notes.get("columns", [])

    def about(self) -> dict[str, Any]:
        """Say what the file takes and returns, and what it was made from."""
        return {"input": ["N", *self._shape], "outputs": self._outputs, **self._notes}

    def predict(self, inputs: Any) -> dict[str, Any]:
        """Return what the file says about inputs, as lists."""
        rows = [self._by_name(record) for record in inputs] if self._columns else inputs
        with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
            values = np.asarray(rows, dtype=self._dtype)
        if list(values.shape[1:]) != self._shape or not len(values) or not np.isfinite(values).all():
            raise ValueError(f"expected finite inputs of shape (N, {str(self._shape)[1:-1]}), got {values.shape}")
        found = self._session.run(None, {"input": values})
        answer = {name: each.tolist() for name, each in zip(self._outputs, map(np.asarray, found), strict=True)}
        if self._columns:
            answer["outside"] = [self._outside(row) for row in rows]
        if "classes" in self._notes and np.ndim(answer["probs"]) == 2:
            answer["prediction"] = [self._notes["classes"][k] for k in np.argmax(answer["probs"], 1)]
        return answer

    def _by_name(self, record: Any) -> list[float]:
        """Return the numbers of a record in the order of the training table."""
        names = [column["name"] for column in self._columns]
        if not isinstance(record, dict) or set(record) != set(names):
            raise ValueError(f"expected records with the names {', '.join(names)}, got {record!r}"[:500])
        if wrong := [name for name in names if type(record[name]) not in (int, float)]:
            raise ValueError(f"expected a number for {wrong[0]}, got {record[wrong[0]]!r}"[:500])
        return [record[name] for name in names]

    def _outside(self, row: list[float]) -> list[str]:
        """Return the columns whose value the training table did not reach."""
        each = zip(self._columns, row, strict=True)
        return [column["name"] for column, value in each if not column["low"] <= value <= column["high"]]


def handler(model: Model) -> type[BaseHTTPRequestHandler]:
    """Return the class that answers requests with a model."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # a connection may carry several requests
        timeout = 60
        disable_nagle_algorithm, wbufsize = True, 2**16  # head and body of an answer go out together, at once

        def do_GET(self) -> None:
            self._answer(200, model.about())

        def do_POST(self) -> None:
            try:
                length = int(self.headers.get("Content-Length", ""))
                if not 0 < length <= MOST_BYTES:
                    raise ValueError(f"expected a request of at most {MOST_BYTES} bytes, got {length}")
                self._answer(200, model.predict(json.loads(self.rfile.read(length))["inputs"]))
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
                self._answer(400, {"error": f"{type(error).__name__}: {error}"})

        def _answer(self, status: int, content: dict[str, Any]) -> None:
            body = json.dumps(content, allow_nan=False).encode()  # NaN is no JSON: such an answer becomes an error
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200:
                self.close_connection = True  # what is left of a bad request must not be read as the next one
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing for each request."""

    return Handler


def serve(path: Path, port: int) -> ThreadingHTTPServer:
    """Return a server that listens on this machine alone. Port 0 takes any that is free."""
    ThreadingHTTPServer.request_queue_size = 128
    return ThreadingHTTPServer(("127.0.0.1", port), handler(Model(path)))


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve an exported file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    server = serve(options.file, options.port)
    print(f"http://127.0.0.1:{server.server_address[1]}/predict", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
