"""An interrupted training continues with the same bits."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.training_cases import DATA, EPOCHS, OPTIMISERS, STEPS_IN_EPOCH, Case, build, schedule_and_noise
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import mse_loss

from batchbayes import BatchbayesError
from batchbayes._common.machine import single_threaded
from batchbayes.training.loop import TrainingConfig, supervised, train

TESTS = Path(__file__).resolve().parents[1]
STEPS = EPOCHS * STEPS_IN_EPOCH


class Interrupted(Exception):  # noqa: N818
    pass


def interrupted(case: Case, steps: int, checkpoint: Path) -> int:
    """Train, and stop after some steps, when the next objective has drawn its random numbers. Return the steps done."""
    objective, done = case.objective, itertools.count()

    def raising(network, batch):
        value = objective(network, batch)
        if next(done) == steps:
            raise Interrupted
        return value

    case.objective = raising
    with pytest.raises(Interrupted):
        case.train(checkpoint)
    return steps


def tensors(network: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*network.named_parameters(), *network.named_buffers()])


def with_layouts(case: Case) -> dict[tuple[int, str], tuple[torch.dtype, tuple[int, ...]]]:
    """Return a dictionary that the training fills with the precision and the strides of the optimiser's state."""
    after_step, found = case.after_step, {}

    def noting(step):
        after_step(step)
        for number, state in enumerate(step.optimiser.state.values()):
            for name, value in state.items():
                if isinstance(value, torch.Tensor):
                    found[number, name] = (value.dtype, value.stride())

    case.after_step = noting
    return found


def assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    assert tensors(ours).keys() == tensors(theirs).keys()
    for name, tensor in tensors(ours).items():
        assert tensor.dtype == tensors(theirs)[name].dtype, name
        assert torch.equal(tensor, tensors(theirs)[name]), name


@pytest.mark.parametrize(("optimiser", "data"), [("adam", "loader"), ("sgd", "shuffled")])
def test_a_killed_process_continues_with_the_same_bits(optimiser: str, data: str, tmp_path: Path) -> None:
    """The final files hold network, optimiser and random state, and are compared byte by byte."""
    file, whole = tmp_path / "killed.safetensors", tmp_path / "whole.safetensors"
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "helpers.training_cases", optimiser, data]
    environment = os.environ | {"PYTHONPATH": path}
    first_steps = []
    for last in (2, 14, None):
        with subprocess.Popen([*command, str(file)], env=environment, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            steps = []
            for line in process.stdout:
                steps.append(int(line))
                if steps[-1] == last:
                    process.kill()
                    break
        assert process.returncode == (-9 if last else 0)
        first_steps.append(steps[0])
    assert first_steps == [1, 1, 13]
    with single_threaded():
        build(optimiser, data).train(whole)
    assert file.read_bytes() == whole.read_bytes()
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.suffix != ".partial") == [file.name, whole.name]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@pytest.mark.parametrize("data", DATA)
def test_the_result_is_that_of_an_uninterrupted_training(optimiser: str, data: str, tmp_path: Path) -> None:
    file, whole = tmp_path / "interrupted.safetensors", tmp_path / "whole.safetensors"
    plain, kept, case, last = (*(build(optimiser, data) for _ in range(3)), build(optimiser, data, start=2))
    layouts = [with_layouts(plain), with_layouts(last)]
    losses = plain.train()
    assert kept.train(whole) == losses
    assert_same(kept.network, plain.network)
    interrupted(case, 6, file)
    interrupted(build(optimiser, data, start=1), 9, file)
    assert last.train(file) == losses
    assert file.read_bytes() == whole.read_bytes()
    assert_same(last.network, plain.network)
    assert layouts[0] == layouts[1]


@given(st.lists(st.integers(0, STEPS - 1), max_size=4))
@settings(max_examples=15, deadline=None)
def test_any_interruptions_come_to_the_same(tmp_path_factory: pytest.TempPathFactory, lengths: list[int]) -> None:
    folder = tmp_path_factory.mktemp("interrupted")
    finished = 0
    for length in lengths:
        if finished + length // STEPS_IN_EPOCH < EPOCHS:
            interrupted(build("adam", "loader"), length, folder / "file")
            finished += length // STEPS_IN_EPOCH
    (case, whole) = (build("adam", "loader") for _ in range(2))
    assert case.train(folder / "file") == whole.train(folder / "whole")
    assert (folder / "file").read_bytes() == (folder / "whole").read_bytes()


def test_a_finished_training_is_read_and_not_repeated(tmp_path: Path) -> None:
    case, again = build("sgd", "list"), build("sgd", "list", start=1)
    losses = case.train(tmp_path / "file")
    again.objective = again.after_step = None  # type: ignore[assignment]
    assert again.train(tmp_path / "file") == losses
    assert_same(again.network, case.network)
    assert not again.network.training


def test_an_early_stop_is_remembered(tmp_path: Path) -> None:
    def until_six(step):
        schedule_and_noise(step)
        return step.number == 6

    case, again = build("sgd", "list"), build("sgd", "list", start=1)
    case.after_step = again.after_step = until_six
    losses = case.train(tmp_path / "file")
    assert len(losses) == 2
    assert again.train(tmp_path / "file") == losses
    assert_same(again.network, case.network)


def small(dtype: torch.dtype = torch.float32, width: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, width), nn.Linear(width, 1)).to(dtype)


def train_small(network: nn.Module, file: Path, after_step=None, **options) -> None:
    dtype = next(network.parameters()).dtype
    batches = [(torch.ones(4, 2, dtype=dtype), torch.ones(4, 1, dtype=dtype))]
    config = TrainingConfig(**({"epochs": 2, "batch_size": 4} | options))
    train(network, batches, supervised(mse_loss), config, after_step=after_step, checkpoint=file)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"seed": 1}, "seed: 0 in the file, 1 now"),
        ({"epochs": 3}, "epochs: 2 in the file, 3 now"),
        ({"batch_size": 5}, "batch_size: 4 in the file, 5 now"),
        ({"learning_rate": 0.1}, r"learning_rate: 0\.001 in the file, 0\.1 now"),
        ({"optimiser": "sgd"}, "optimiser: Adam in the file, SGD now"),
        (
            {"optimiser": lambda groups, lr: torch.optim.Adam(groups, lr, eps=0.1)},
            r"eps in group 0: 1e-08 in the file, 0\.1 now",
        ),
    ],
)
def test_a_file_of_another_configuration_is_refused(options: dict, words: str, tmp_path: Path) -> None:
    train_small(small(), tmp_path / "file")
    before = (tmp_path / "file").read_bytes()
    with pytest.raises(BatchbayesError, match=words):
        train_small(small(), tmp_path / "file", **options)
    assert (tmp_path / "file").read_bytes() == before


def test_a_file_of_another_network_is_refused(tmp_path: Path) -> None:
    train_small(small(), tmp_path / "file")
    frozen = small()
    frozen[0].bias.requires_grad_(False)  # type: ignore[index]
    cases = {
        r"parameter 0.weight: torch.float32 \(3, 2\) in the file, torch.float64 \(3, 2\) now; .* and 1 more": small(
            torch.float64
        ),
        r"parameter 0.weight: .* \(3, 2\) in the file, .* \(5, 2\) now": small(width=5),
        "parameter 2.weight: absent in the file, torch.float32": small().append(nn.BatchNorm1d(1)),  # type: ignore[operator]
        "params in group 1: 2 in the file, 1 now": frozen,
        "network: Sequential in the file, Other now": type("Other", (nn.Sequential,), {})(*small()),  # type: ignore[misc]
    }
    for words, network in cases.items():
        with pytest.raises(BatchbayesError, match=words):
            train_small(network, tmp_path / "file")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_precisions_are_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    def network():
        made = small(dtype)
        made.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        made.register_buffer("count", torch.zeros((), dtype=torch.int64))
        return made

    def count(step):
        step.network.count += 2**53 + 1  # a float would round this
        step.network.seen[1] = True

    first, second = network(), network()
    train_small(first, tmp_path / "file", count)
    train_small(second, tmp_path / "file", count)
    assert_same(second, first)
    assert int(second.count) == 2 * (2**53 + 1)
    assert second.seen.tolist() == [False, True, False]


def test_something_else_at_the_path_is_refused_and_kept(tmp_path: Path) -> None:
    train_small(small(), tmp_path / "whole")
    contents = {"text": b"mine", "empty": b"", "half": (tmp_path / "whole").read_bytes()[:-20]}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    save_file({"x": torch.ones(2)}, tmp_path / "other", {"batchbayes": "{}"})
    contents["other"] = (tmp_path / "other").read_bytes()
    for name, content in contents.items():
        with pytest.raises(BatchbayesError, match=f"a checkpoint of a training at .*{name}"):
            train_small(small(), tmp_path / name)
        assert (tmp_path / name).read_bytes() == content
    (tmp_path / "folder").mkdir()
    with pytest.raises(BatchbayesError, match=r"a checkpoint of a training at .*folder"):
        train_small(small(), tmp_path / "folder")


def test_a_file_of_a_later_format_is_refused(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "file", {"training": '{"format": 2}'})
    with pytest.raises(BatchbayesError, match="checkpoint format 1; got format 2"):
        train_small(small(), tmp_path / "file")


def test_what_a_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BatchbayesError, match="a folder for the checkpoint"):
        train_small(small(), tmp_path / "absent" / "file")

    class WithExtraState(nn.Linear):
        def get_extra_state(self):
            return {"anything": 1}

    with pytest.raises(BatchbayesError, match="_extra_state"):
        train_small(nn.Sequential(WithExtraState(2, 1)), tmp_path / "file")

    class OddOptimiser(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]]["odd"] = {1, 2}

    with pytest.raises(BatchbayesError, match=r"an optimiser that keeps tensors, numbers and text.* got a set"):
        train_small(small(), tmp_path / "file", optimiser=OddOptimiser)
    with pytest.raises(BatchbayesError, match="the same parameters and buffers before and after"):
        train_small(small(), tmp_path / "file", lambda step: step.network.register_buffer("new", torch.ones(1)))
    assert not (tmp_path / "file").exists()
