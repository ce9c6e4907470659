"""Generated bad and odd files and options through the command line: a right answer, or one line that says what to do.

Each case is made from a number, so that a failure names the number that repeats it. It is a call of `main` in this
process. A case knows which rows its files hold, and so what a right answer is: the predictions of the same rows from a
plain file. Files without a clear meaning must be refused. A few cases run always, all of them with `pytest -m slow`,
and some of these as processes of their own.
"""

import csv
import io
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from helpers.odd_commands.arrays import odd_arrays
from helpers.odd_commands.command import ANSWER, ANY, NONE, Base, Command, numbers, run
from helpers.odd_commands.images import odd_images
from helpers.odd_commands.options import odd_assessment, odd_network, odd_options, odd_place, odd_posterior
from helpers.odd_commands.plain import write_classes, write_images, write_regression
from helpers.odd_commands.tables import odd_table

CASES, FEW, ASSESSMENTS, PROCESSES = 1000, 110, 100, 12
KINDS = [odd_table, odd_arrays, odd_images, odd_table, odd_options, odd_place, odd_network, odd_posterior, odd_table,
         odd_arrays, odd_images]  # fmt: skip


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """Assess a table of values, a table of classes and a folder of images, and predict the rows of a plain file."""
    made = {}
    for kind, write in (("regression", write_regression), ("classification", write_classes), ("images", write_images)):
        folder = tmp_path_factory.mktemp(kind)
        inputs, plain, assess, predict = write(folder)
        code, _, errors = run(["assess", *assess, "--draws", "4", "--quiet", "--out", folder / "out"])
        assert code == 0, errors
        predict |= {"--posterior": folder / "out" / "posterior.safetensors"}
        base = Base(folder, predict, inputs, np.empty(0), assess)
        code, text, errors = run(Command("predict", predict | {"--input": plain}, None).words())
        assert code == 0, errors
        base.answers = numbers(text, ANSWER[kind])
        assert len(base.answers) == len(inputs)
        assert len(set(base.answers)) > 0.9 * len(inputs)  # a row that is mistaken for another one is seen
        made[kind] = base
    return made


def judge(command, code, printed, errors):
    """Return "refused" or "answered", or raise an error if the outcome is neither in words nor right."""
    assert "Traceback" not in errors, errors
    if code != 0:
        assert code == 2, (code, errors)
        line = errors.strip().splitlines()[-1]
        assert ("expected " in line and "Do this: " in line) or "error: " in line, errors
        return "refused"
    assert command.expected is not NONE, f"an answer from nonsense: {printed[:400]}"
    if command.name == "assess":
        found = json.loads((command.options["--out"] / "metrics.json").read_text())
        assert found["verdict"]["headline"]
        return "answered"
    text = Path(command.options["--out"]).read_text() if command.options.get("--out") else printed
    cells = [cell.lower() for row in csv.reader(io.StringIO(text)) for cell in row]
    assert not {"nan", "inf", "-inf"} & set(cells), text[:400]
    if command.expected is not ANY:
        np.testing.assert_allclose(numbers(text, command.answer), command.expected, rtol=1e-4, atol=1e-5)
    return "answered"


def outcome(number, bases, folder):
    command = KINDS[number % len(KINDS)](random.Random(number), bases, folder)
    return judge(command, *run(command.words()))


def count(numbers, bases, tmp_path):
    counts = Counter()
    for number in numbers:
        name = KINDS[number % len(KINDS)].__name__
        folder = tmp_path / str(number)
        folder.mkdir()
        try:
            counts[name, outcome(number, bases, folder)] += 1
        except BaseException as error:
            raise AssertionError(f"case {number} ({name})") from error
    return counts


def test_a_few_odd_commands(bases, tmp_path):
    counts = count(range(FEW), bases, tmp_path)
    assert {result for _, result in counts} == {"answered", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_many_odd_commands(bases, tmp_path, part):
    counts = count(range(part, CASES, 4), bases, tmp_path)
    for kind in ("odd_table", "odd_arrays", "odd_images"):  # neither refuses everything nor takes everything
        refused, answered = (counts[kind, result] for result in ("refused", "answered"))
        assert min(refused, answered) > 0.2 * (refused + answered), counts


@pytest.mark.slow
def test_odd_options_of_assess(bases, tmp_path):
    for number in range(ASSESSMENTS):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = odd_assessment(random.Random(number), bases, folder)
        try:
            judge(command, *run([*command.words(), "--no-figures"]))  # they take long
        except BaseException as error:
            raise AssertionError(f"case {number}: {command.words()}") from error


@pytest.mark.slow
def test_odd_commands_as_processes(bases, tmp_path):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for number in range(2000, 2000 + PROCESSES):
        folder = tmp_path / str(number)
        folder.mkdir()
        command = KINDS[number % len(KINDS)](random.Random(number), bases, folder)
        words = [
            sys.executable,
            "-c",
            "import sys; from batchbayes.cli import main; sys.exit(main())",
            *command.words(),
        ]
        done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=folder, timeout=120)
        judge(command, done.returncode, done.stdout, done.stderr)
