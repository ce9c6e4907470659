"""Progress of units, on a terminal and elsewhere; and the worker that is this process."""

import os
import pty
import subprocess
import sys

import pytest
from batchbayes_papers.runner.unit_progress import UnitProgress, seconds_left
from batchbayes_papers.runner.workers import ThisProcess
from helpers.terminal import error_stream, lines

from batchbayes.tools import hidden_progress

EFFORTS = {"a": 1.0, "b": 1.0, "c": 2.0}

SCRIPT = """
import sys, threading, batchbayes._common.progress as module
from batchbayes._common.progress import progress
from batchbayes_papers.runner.unit_progress import UnitProgress
module.PATIENCE_SECONDS = float(sys.argv[1])
list(progress(range(4), "fit", 4))
with UnitProgress({"a": 1, "b": 3}, 1) as shown:
    shown.say("begun")
    shown.show({"a": 10.0}, {"b": 0.0})
    shown.finished("a", {"a": 10.0}, {"b": 0.0})
print("tqdm" in sys.modules, "multiprocessing" in sys.modules, threading.active_count())
"""


def test_a_real_terminal() -> None:
    master, slave = pty.openpty()  # it says that it has no columns and no rows
    done = subprocess.Popen([sys.executable, "-c", SCRIPT, "-1"], stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    written = b""
    try:
        while piece := os.read(master, 4096):
            written += piece
    except OSError:  # Linux: the other end is closed
        pass
    os.close(master)
    assert done.communicate()[0].split() == [b"True", b"False", b"1"]
    shown = [line.rstrip() for line in written.decode().split("\r")]
    assert "fit:  25 %|█████               | 00:00 left" in shown
    assert "begun" in shown
    assert "██████████          | 1/2  30 s left  b" in shown
    assert shown[-1] == ""


def test_a_pipe_has_a_line_for_each_unit_and_never_imports_tqdm() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, "-1"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "1"]
    assert done.stderr == "begun\n1/2  a (10.0 s); 30 s left\n"


def test_units_have_one_line_that_is_cut_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch)
    with UnitProgress(EFFORTS, 1) as shown:
        shown.show({}, {"a": 0.0})
        shown.show({"a": 10.0}, {"a much longer name than there is room for": 4.0})
        shown.finished("a", {"a": 10.0}, {})
    bars = [line for line in lines(stream) if line]
    assert bars[1:] == ["                    | 0/3  a", "██████▋             | 1/3  30 s left  a"]


def test_elsewhere_a_line_is_printed_for_each_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with UnitProgress(EFFORTS, 2) as shown:
        shown.show({}, {"a": 0.0})
        shown.finished("a", {"a": 10.0}, {"c": 15.0})
        shown.finished("c", {"a": 10.0, "b": 1.0, "c": 20.0}, {})
        shown.say("a remark")
    assert capsys.readouterr().err == "1/3  a (10.0 s); 10 s left\n3/3  c (20.0 s)\na remark\n"
    with hidden_progress(), UnitProgress(EFFORTS, 2) as shown:
        shown.finished("a", {"a": 10.0}, {})
        shown.say("a remark")
    assert capsys.readouterr().err == ""


def test_the_time_left_goes_by_effort_and_workers() -> None:
    assert seconds_left(EFFORTS, {}, {"a": 1.0}, 1) is None
    assert seconds_left(EFFORTS, {"a": 10.0}, {}, 1) == 30.0
    assert seconds_left(EFFORTS, {"a": 10.0}, {}, 3) == 20.0  # the longest is not shared
    assert seconds_left(EFFORTS, {"a": 10.0}, {"b": 90.0}, 1) == 20.0  # nothing is left of what takes too long
    assert seconds_left(EFFORTS, {"a": 1.0, "b": 1.0, "c": 2.0}, {}, 1) == 0.0


def test_an_interruption_is_not_kept_in_a_future() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with ThisProcess() as workers:
        assert isinstance(workers.submit(lambda: 1 / 0).exception(), ZeroDivisionError)
        with pytest.raises(KeyboardInterrupt):
            workers.submit(interrupted)
