"""A program as one ONNX model: the step becomes the body of a Loop, and every tensor is held once.

Torch exports each part by itself. Here the parts are joined. Weights and bank are initialisers of the outer graph. The
body of the Loop takes row i of each bank, and finds the weights in the graph around it.
"""

import hashlib
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from batchbayes.export.program import Loop, Program, words_for_exporter

INPUT, BATCH = "input", "batch"


def _onnx() -> Any:
    """Return the package onnx, which is imported when it is first needed."""
    return import_module("onnx")


def build_model(program: Program, example: Tensor) -> Any:
    """Return an `onnx.ModelProto` that computes what the program computes, for any number of inputs."""
    graph = _Graph()
    taken = graph.at_least_one(example)
    x = [taken]
    if program.prepare is not None:
        x = graph.add("prepare", _exported(program.prepare, (example,), [True]), x)
    with torch.no_grad():
        ready = program.ready(example)
        p_value = () if program.beside.detector is None else (program.beside.detector(ready),)
        state = program.draws(ready)
        wanted = program.finish(example, state, *p_value)
    if isinstance(program.draws, Loop):
        found = _looped(graph, program.draws, ready, x)
    else:
        found = graph.add("draws", _exported(program.draws, (ready,), [True]), x)
    if program.beside.detector is not None:
        found += graph.add("detector", _exported(program.beside.detector, (ready,), [True]), x)
    is_batch = [True, [True] * len(state), *[True] * len(p_value)]
    finish = _exported(program.finish, (example, state, *p_value), is_batch)
    said = graph.add("finish", finish, [taken, *found])
    if program.beside.drift is not None:
        said += graph.add("drift", _exported(program.beside.drift, (ready,), [True]), x)
        with torch.no_grad():
            wanted |= program.beside.drift(ready)
    return graph.model(said, wanted, example)


def with_notes(model: Any, notes: Mapping[str, str]) -> Any:
    """Return a model with texts that it carries along."""
    _onnx().helper.set_model_props(model, dict(notes))
    return model


def plain_model(program: Program, example: Tensor) -> bytes:
    """Return the network alone as the content of an ONNX file, to compare the time of a file with."""
    ready = program.ready(example)
    return _exported(program.beside.network, (ready,), [True]).SerializeToString()


def _looped(graph: "_Graph", loop: Loop, ready: Tensor, x: list[str]) -> list[str]:
    """Append a Loop over all draws. Return the names of the last sums."""
    rows = [bank[0] for bank in loop.step.bank.rows]
    with torch.no_grad():
        state = loop.step(ready, torch.tensor(0), rows, loop.state)
    shapes = [True, False, [False] * len(rows), [True] * len(state)]
    step = _exported(loop.step, (ready, torch.tensor(0), rows, state), shapes)
    return graph.loop(step, x[0], loop.step.bank.rows, state, loop.passes)[loop.step.num_partial :]


def _exported(module: nn.Module, args: tuple[Any, ...], is_batch: list[Any]) -> Any:
    """Return a part as an `onnx.ModelProto`. `is_batch` says which arguments have one row for each input."""
    batch = torch.export.Dim(BATCH)

    def spec(each: Any) -> Any:
        return [spec(part) for part in each] if isinstance(each, list) else {0: batch} if each else None

    with torch.no_grad(), words_for_exporter(), _quiet():
        program = torch.onnx.export(
            module.eval(), args, dynamo=True, dynamic_shapes=tuple(map(spec, is_batch)), verbose=False
        )
    assert program is not None
    return program.model_proto


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torch's exporter says about packages that are not installed, and about its own old functions."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript")]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


class _Graph:
    """The graph of a file while it is put together."""

    def __init__(self) -> None:
        self._nodes: list[Any] = []
        self._tensors: dict[str, Any] = {}
        """Initialisers by the digest of their content, so that each is held once."""
        self._opset = 0

    def at_least_one(self, example: Tensor) -> str:
        """Append a row of zeros if there are no inputs, because runtimes fail there. Return the name of the rows.

        Outputs are cut to the number of inputs again.
        """
        node, one = _onnx().helper.make_node, self._tensor("one", torch.tensor([1]))
        zero, rest = self._tensor("zero_row", example.new_zeros(())), torch.tensor(example.shape[1:])
        self._nodes += [
            node("Shape", [INPUT], ["num_inputs"], start=0, end=1),
            node("Sub", [one, "num_inputs"], ["num_missing"]),
            node("Max", ["num_missing", self._tensor("none", torch.tensor([0]))], ["num_added"]),
            node("Concat", ["num_added", self._tensor("row", rest)], ["shape_added"], axis=0),
            node("Expand", [zero, "shape_added"], ["added"]),
            node("Concat", [INPUT, "added"], ["rows"], axis=0),
        ]
        return "rows"

    def add(self, name: str, part: Any, inputs: Sequence[str]) -> list[str]:
        """Append a part, which gets these values as its inputs. Return the names of its outputs."""
        nodes, outputs = self._renamed(name, part, inputs)
        self._nodes += nodes
        return outputs

    def loop(self, step: Any, x: str, bank: Sequence[Tensor], sums: Sequence[Tensor], count: int) -> list[str]:
        """Append a Loop over the rows of the bank, with a step as its body. Return the names of the last sums.

        `sums` are some sums. Those that the Loop starts from are zeros of the same shape, for the number of inputs.
        """
        onnx = _onnx()
        helper = onnx.helper
        row_names = [f"step/row_{k}" for k in range(len(bank))]
        states = [f"step/state_{k}" for k in range(len(sums))]
        inner, outputs = self._renamed("step", step, [x, "step/number", *row_names, *states])
        rows = [
            helper.make_node("Gather", [self._tensor(f"bank_{k}", values), "step/number"], [row_names[k]], axis=0)
            for k, values in enumerate(bank)
        ]
        kinds = [part.type.tensor_type.elem_type for part in step.graph.input[-len(sums) :]]
        declared = [
            helper.make_tensor_value_info("step/number", onnx.TensorProto.INT64, []),
            helper.make_tensor_value_info("step/go", onnx.TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(state, kind, None) for state, kind in zip(states, kinds, strict=True)),
        ]
        returned = [
            helper.make_tensor_value_info("step/on", onnx.TensorProto.BOOL, []),
            *(helper.make_tensor_value_info(output, kind, None) for output, kind in zip(outputs, kinds, strict=True)),
        ]
        on = helper.make_node("Identity", ["step/go"], ["step/on"])
        body = helper.make_graph([*rows, *inner, on], "draw", declared, returned)
        self._nodes.append(helper.make_node("Shape", [x], ["count"], start=0, end=1))
        for k, values in enumerate(sums):
            zero, axes = self._tensor("zero", values.new_zeros(())), torch.tensor(values.shape[1:], dtype=torch.int64)
            shape = ["count", self._tensor(f"axes_{k}", axes)]
            self._nodes.append(helper.make_node("Concat", shape, [f"shape_{k}"], axis=0))
            self._nodes.append(helper.make_node("Expand", [zero, f"shape_{k}"], [f"start_{k}"]))
        trips = [self._tensor("num_passes", torch.tensor(count)), self._tensor("go", torch.tensor(True))]
        starts, ends = ([f"{kind}_{k}" for k in range(len(sums))] for kind in ("start", "sum"))
        self._nodes.append(helper.make_node("Loop", [*trips, *starts], ends, body=body))
        return ends

    def model(self, found: Sequence[str], wanted: Mapping[str, Tensor], example: Tensor) -> Any:
        """Return the model, whose outputs have the names, types and shapes of those that are wanted."""
        helper = _onnx().helper
        first = self._tensor("none", torch.tensor([0]))
        self._nodes += [
            helper.make_node("Slice", [value, first, "num_inputs"], [name])
            for value, name in zip(found, wanted, strict=True)
        ]
        graph = helper.make_graph(
            self._nodes,
            "batchbayes",
            [_declared(INPUT, example)],
            [_declared(name, values) for name, values in wanted.items()],
            list(self._tensors.values()),
        )
        opset = [helper.make_opsetid("", self._opset)]
        model = helper.make_model(graph, opset_imports=opset, producer_name="batchbayes")
        model.ir_version = helper.find_min_ir_version_for(opset)
        _onnx().checker.check_model(model)
        return model

    def _renamed(self, prefix: str, part: Any, inputs: Sequence[str]) -> tuple[list[Any], list[str]]:
        """Return the nodes of a part under names of their own, and the names of its outputs."""
        graph = part.graph
        assert not part.functions, "torch's exporter writes no functions"
        self._opset = next(each.version for each in part.opset_import if each.domain in ("", "ai.onnx"))
        names = dict(zip((each.name for each in graph.input), inputs, strict=True))
        names |= {each.name: self._keep(f"{prefix}/{each.name}", each) for each in graph.initializer}
        nodes = [_moved(node, prefix, names) for node in graph.node]
        return nodes, [names.get(each.name, f"{prefix}/{each.name}") for each in graph.output]

    def _tensor(self, name: str, values: Tensor) -> str:
        return self._keep(name, _onnx().numpy_helper.from_array(values.detach().contiguous().numpy(), name))

    def _keep(self, name: str, tensor: Any) -> str:
        """Keep an initialiser, unless there is an equal one. Return its name."""
        content = _onnx().numpy_helper.to_array(tensor)
        digest = hashlib.sha256(f"{content.dtype} {content.shape} ".encode() + content.tobytes()).hexdigest()
        if digest not in self._tensors:
            self._tensors[digest] = _onnx().numpy_helper.from_array(content, name)
        return self._tensors[digest].name


def _moved(node: Any, prefix: str, names: Mapping[str, str]) -> Any:
    """Return a node whose values have new names, also inside its own graphs, without what torch notes about it."""

    def renamed(name: str) -> str:
        return names.get(name, f"{prefix}/{name}") if name else ""

    moved = _onnx().NodeProto()
    moved.CopyFrom(node)
    moved.name, moved.doc_string = f"{prefix}/{node.name}", ""
    del moved.metadata_props[:]
    for field in (moved.input, moved.output):
        changed = [renamed(name) for name in field]
        del field[:]
        field.extend(changed)
    for attribute in moved.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            inner = [_moved(each, prefix, names) for each in graph.node]
            del graph.node[:], graph.value_info[:]
            graph.node.extend(inner)
            for each in (*graph.input, *graph.output, *graph.initializer):
                each.name = renamed(each.name)
    return moved


def _declared(name: str, values: Tensor) -> Any:
    """Return the type of an input or output. Its first axis may have any length."""
    helper = _onnx().helper
    kind = helper.np_dtype_to_tensor_dtype(values.numpy().dtype)
    return helper.make_tensor_value_info(name, kind, [BATCH, *values.shape[1:]])
