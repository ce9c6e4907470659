"""An exported file, what requests must look like, and the batches that requests are put together to.

Nothing here needs torch.
"""

import asyncio
import difflib
import hashlib
import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime  # pyright: ignore[reportMissingImports]

from batchbayes_serve.refusal import BatchbayesError

DTYPES = {"tensor(float)": "f4", "tensor(double)": "f8", "tensor(float16)": "f2", "tensor(int64)": "i8"}
"""The types of numbers that a file may take, as numpy calls them."""
TABLES = ("columns", "targets", "classes")
"""Notes of a file that are JSON."""
STATISTICS = ("drift_statistics", "drift_class")
LOGITS = "adapted_logits"
ADAPTED = ("adapted_probs", "adapted_mean")
"""Outputs that depend on all rows of a call, as these logits do. Other outputs depend on their own row alone."""
SHOWN = 10
"""Names in a sentence."""
SPARE = 1000
"""Quotation marks that a request may have beyond those of its names: they are reported one by one."""
LONGEST, NEAR = 100, 1000
"""Characters of an unknown name, and names that it is compared with."""
MOST_LEVELS, TOO_DEEP = 64, "expected JSON with few levels, got lists within lists without end"
"""Numpy has arrays of as many axes."""

Found = dict[str, np.ndarray]


class RequestError(Exception):
    """A request that is not answered, with the status of HTTP and a sentence that says why."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence[:600]


class OnnxFile:
    """An exported file in memory. Any number of threads may call it at once."""

    def __init__(self, path: Path, threads: int = 0) -> None:
        """`threads` is for one call; 0 is onnxruntime's own choice."""
        options, content = onnxruntime.SessionOptions(), path.read_bytes()
        options.intra_op_num_threads = threads
        try:
            self._session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
            (taken,) = self._session.get_inputs()
            self._name, self.shape, self.dtype = taken.name, taken.shape[1:], DTYPES[taken.type]
            self.notes: dict[str, Any] = dict(self._session.get_modelmeta().custom_metadata_map)
            self.notes |= {name: json.loads(self.notes[name]) for name in TABLES if name in self.notes}
            _require_notes(self.notes)
        except Exception as error:  # errors of onnxruntime have no class in common
            got = f"{path}: {type(error).__name__}: {error}".splitlines()[0][:300]
            raise BatchbayesError("an .onnx file that bb.export wrote", got, "export it again") from error
        self.digest = hashlib.sha256(content).hexdigest()
        self.outputs = [output.name for output in self._session.get_outputs()]
        self.answers = [name for name in self.outputs if name not in (*STATISTICS, LOGITS, *ADAPTED)]
        self._columns: list[dict[str, Any]] = self.notes.get("columns", [])
        self._names = {column["name"]: None for column in self._columns}  # in order, and quick to look up
        self._path_only = onnxruntime.RunOptions()
        self._path_only.only_execute_path_to_fetches = True  # most calls need no adapted prediction

    def run(self, values: np.ndarray, names: Sequence[str]) -> Found:
        """Return some outputs for inputs (N, ...), by name."""
        found = self._session.run(list(names), {self._name: values}, self._path_only)
        return dict(zip(names, map(np.asarray, found), strict=True))

    def read(self, body: bytes, most_rows: int) -> tuple[np.ndarray, bool]:
        """Return the inputs of a request, and whether to adapt, or refuse it with the reason."""
        most_marks = SPARE + 2 * most_rows * (1 + len(self._columns))
        if (marks := body.count(b'"')) > most_marks:  # cheap to know, while reading them would hold up others
            raise RequestError(413, f"expected at most {most_marks} quotation marks in a request, got {marks}")
        try:
            return self._read(_json(body), most_rows)
        except RecursionError as error:
            raise RequestError(400, TOO_DEEP) from error

    def _read(self, content: Any, most_rows: int) -> tuple[np.ndarray, bool]:
        if not isinstance(content, dict) or not isinstance(content.get("inputs"), list):
            raise RequestError(422, f'expected an object with a list of "inputs", got {_short(content)}')
        if unknown := set(content) - {"inputs", "adapt"}:
            raise RequestError(
                422, f'expected the keys "inputs" and "adapt", got also {", ".join(map(_short, unknown))}'
            )
        rows, adapt = content["inputs"], content.get("adapt", False)
        if type(adapt) is not bool:
            raise RequestError(422, f'expected true or false for "adapt", got {_short(adapt)}')
        if adapt and not set(ADAPTED) & set(self.outputs):
            raise RequestError(422, "this file cannot adapt: it was exported without drift=")
        if not rows:
            raise RequestError(422, "expected at least one row of inputs, got none")
        if len(rows) > most_rows:
            raise RequestError(413, f"expected at most {most_rows} rows in a request, got {len(rows)}: send several")
        kinds = _kinds(rows)
        if self._columns:
            rows = [self._by_name(number, record) for number, record in enumerate(rows)]
            kinds = set()
        return self._array(rows, kinds), adapt

    def _by_name(self, number: int, record: Any) -> list[float]:
        """Return the numbers of a record in the order of the training table."""
        names = self._names
        if not isinstance(record, dict):
            why = "by column name, because positions can be mixed up"
            raise RequestError(422, f"row {number}: expected a record {why} ({_listed(names)}), got {_short(record)}")
        missing = [name for name in names if name not in record]
        if unknown := next((name for name in record if name not in names), None):
            near = difflib.get_close_matches(unknown[:LONGEST], (missing or list(names))[:NEAR], n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise RequestError(422, f"row {number}: unknown column {_short(unknown)}{hint}; expected {_listed(names)}")
        if missing:
            raise RequestError(422, f"row {number}: missing {_listed(missing)}; expected {_listed(names)}")
        for name in names:
            if type(record[name]) not in (int, float):
                raise RequestError(422, f"row {number}: expected a number for {name}, got {_short(record[name])}")
        return [record[name] for name in names]

    def _array(self, rows: list[Any], kinds: set[type]) -> np.ndarray:
        """Return rows of these kinds as numbers of the file's type. Nothing is rounded or read from text in silence."""
        wanted = f"finite numbers of shape (N, {str(self.shape)[1:-1]})"
        if odd := kinds - {int, float}:
            names = {str: "text", bool: "true or false", dict: "an object", type(None): "null"}
            raise RequestError(422, f"expected {wanted}, got {names[min(odd, key=str)]} among them")
        if self.dtype == "i8" and float in (kinds or _kinds(rows)):
            raise RequestError(422, "expected whole numbers, got one with a fraction")
        try:
            with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
                values = np.asarray(rows, dtype=self.dtype)
        except OverflowError as error:
            raise RequestError(422, f"expected {wanted}, got one that is too large") from error
        except ValueError as error:
            raise RequestError(422, f"expected {wanted}, got rows that are not all of one shape") from error
        if list(values.shape[1:]) != self.shape:
            raise RequestError(422, f"expected {wanted}, got shape {values.shape}")
        if not (fine := np.isfinite(values)).all():
            row, *place = np.argwhere(~fine)[0].tolist()
            where = self._columns[place[0]]["name"] if self._columns else f"place {place}"
            raise RequestError(422, f"row {row}: expected a finite {values.dtype} number for {where}, got a larger one")
        return values

    def said(self, values: np.ndarray, found: Found) -> dict[str, Any]:
        """Return what the file says about inputs as JSON values, with names of classes and of columns out of range."""
        for name, each in found.items():
            if each.dtype.kind == "f" and not (fine := np.isfinite(each)).all():
                row = int(np.argwhere(~fine)[0][0])
                raise RequestError(422, f"row {row}: the network's {name} is no finite number for these inputs")
        answer = {name: each.tolist() for name, each in found.items()}
        if self._columns:
            answer["outside"] = [self._outside(row) for row in values.tolist()]
        if "classes" in self.notes and "probs" in found and found["probs"].ndim <= 2:
            probs = found["probs"]
            best = probs.argmax(1) if probs.ndim == 2 else probs > 0.5
            answer["prediction"] = [self.notes["classes"][int(k)] for k in best]
        return answer

    def _outside(self, row: list[float]) -> list[str]:
        """Return the columns whose value the training table did not reach."""
        each = zip(self._columns, row, strict=True)
        return [column["name"] for column, value in each if not column["low"] <= value <= column["high"]]


def _json(body: bytes) -> Any:
    """Read strict JSON: no NaN, and no name twice."""

    def number(name: str) -> Any:
        raise RequestError(400, f"{name} is no JSON, and no number that a network could take: leave such rows out")

    def record(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise RequestError(400, f"the name {_short(twice)} stands twice in one record")
        return found

    try:
        return json.loads(body, parse_constant=number, object_pairs_hook=record)
    except ValueError as error:
        raise RequestError(400, f"expected JSON, got something else: {error}") from error


def _require_notes(notes: dict[str, Any]) -> None:
    """Refuse notes that answers could not be made with."""
    columns, classes = notes.get("columns", []), notes.get("classes", [])
    are_columns = isinstance(columns, list) and all(
        isinstance(column, dict)
        and isinstance(column.get("name"), str)
        and all(type(column.get(end)) in (int, float) for end in ("low", "high"))
        for column in columns
    )
    if not are_columns or len({column["name"] for column in columns}) < len(columns):
        raise ValueError("notes whose columns have no name, low and high of their own")
    if not isinstance(classes, list) or not all(isinstance(name, str) for name in classes):
        raise ValueError("notes whose classes are no list of names")


def _kinds(values: list[Any], level: int = 1) -> set[type]:
    """Return the types of what lists within lists hold.

    >>> sorted(kind.__name__ for kind in _kinds([[1, 2.0], [True]]))
    ['bool', 'float', 'int']
    """
    if level > MOST_LEVELS:
        raise RequestError(400, TOO_DEEP)
    kinds = set(map(type, values))
    inner = (_kinds(each, level + 1) for each in values if type(each) is list) if list in kinds else ()
    return (kinds - {list}).union(*inner)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _listed(names: Collection[str]) -> str:
    rest = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(islice(names, SHOWN)) + rest


class Batcher:
    """Puts rows that wait into one call of the file. Nobody waits for others: a batch is what came during the last.

    A row's answer does not depend on the others of its batch, but for the last digits of float32.
    """

    def __init__(self, run: Callable[[np.ndarray], Found], most_rows: int, most_waiting: int) -> None:
        self._run, self._most_rows, self._most_waiting = run, most_rows, most_waiting
        self._waiting: deque[tuple[np.ndarray, asyncio.Future[Found]]] = deque()
        self._wake, self._thread = asyncio.Event(), ThreadPoolExecutor(1, "predict")

    @property
    def num_waiting(self) -> int:
        """Rows that no call has taken yet."""
        return sum(len(values) for values, _ in self._waiting)

    async def ask(self, values: np.ndarray) -> Found:
        """Return the outputs for rows, as soon as a batch has been computed that they are in."""
        if self.num_waiting + len(values) > self._most_waiting:
            raise RequestError(503, "too many rows are waiting: try again later")
        answer: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self._waiting.append((values, answer))
        self._wake.set()
        return await answer

    async def work(self) -> None:
        """Answer without end."""
        while True:
            await self._wake.wait()
            if not (group := self._next()):
                self._wake.clear()
                continue
            inputs = [values for values, _ in group]
            answers = await asyncio.get_running_loop().run_in_executor(self._thread, self._answers, inputs)
            for (_, future), answer in zip(group, answers, strict=True):
                if not future.done():
                    future.set_exception(answer) if isinstance(answer, Exception) else future.set_result(answer)

    def _next(self) -> list[tuple[np.ndarray, asyncio.Future[Found]]]:
        group, count = [], 0
        while self._waiting and (not group or count + len(self._waiting[0][0]) <= self._most_rows):
            values, answer = self._waiting.popleft()
            if not answer.done():  # its client has not gone, and there is time
                group.append((values, answer))
                count += len(values)
        return group

    def _answers(self, inputs: list[np.ndarray]) -> list[Found | Exception]:
        """Run one batch. If it fails, each request by itself, so that a bad one does no harm to its neighbours."""
        try:
            found = self._run(np.concatenate(inputs))
        except Exception as error:
            if len(inputs) > 1:
                return [answer for each in inputs for answer in self._answers([each])]
            return [RequestError(422, f"the network cannot take these inputs: {error}".splitlines()[0])]
        ends = np.cumsum([len(each) for each in inputs])[:-1]
        parts = {name: np.split(values, ends) for name, values in found.items()}
        return [{name: parts[name][k] for name in parts} for k in range(len(inputs))]
