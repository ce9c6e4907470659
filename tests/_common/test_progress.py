import io
import os
import pickle
import pty
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from batchbayes import BatchbayesError
from batchbayes._common import progress as module
from batchbayes._common.machine import ThisProcess
from batchbayes._common.progress import Progress, UnitProgress, hidden_progress, progress, seconds_left

EFFORTS = {"a": 1.0, "b": 1.0, "c": 2.0}


class Stream(io.StringIO):
    encoding = "utf-8"

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def error_stream(monkeypatch: pytest.MonkeyPatch, terminal: bool = True) -> Stream:
    """A stream of 40 columns in place of standard error, and no patience. Pytest would undo it in a fixture."""
    stream = Stream(terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 20)))
    monkeypatch.setattr(module, "PATIENCE_SECONDS", -1.0)
    return stream


def lines(stream: Stream) -> list[str]:
    """What was on the line, one entry for each time that it was drawn."""
    return [line.rstrip() for line in stream.getvalue().split("\r")]


def test_a_bar_shows_the_share_and_is_wiped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch)
    with Progress("{x} 10 %", 4) as shown:
        shown.advance(2)
    assert "{x} 10 %:  50 %|██████████          |" in lines(stream)[-3]
    assert lines(stream)[-2:] == ["", ""]


def test_without_a_total_the_bar_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch)
    assert list(progress("abc", "reading")) == list("abc")
    assert lines(stream)[-3:] == ["reading: 1 done in 00:00", "", ""]  # at most ten times a second


@pytest.mark.parametrize("reason", ["hidden", "short", "no terminal"])
def test_nothing_is_shown(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch, terminal=reason != "no terminal")
    if reason == "short":
        monkeypatch.setattr(module, "PATIENCE_SECONDS", 60.0)
    with hidden_progress(reason == "hidden"), Progress("fit", 4) as shown:
        shown.advance(2)
    assert stream.getvalue() == ""


@pytest.mark.parametrize(("shell", "seen"), [(SimpleNamespace(kernel=1), True), (SimpleNamespace(), False), (None, 0)])
def test_a_notebook_shows_bars_though_it_is_no_terminal(
    shell: object, seen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = error_stream(monkeypatch, terminal=False)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    with Progress("fit", 4) as shown:
        shown.advance(2)
    assert ("fit:  50 %" in stream.getvalue()) == seen


def test_no_standard_error_is_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_SECONDS", -1.0)
    monkeypatch.setattr(sys, "stderr", None)
    assert list(progress("abc", "reading")) == list("abc")


def test_threads_have_bars_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    error_stream(monkeypatch)
    from tqdm.std import tqdm

    before, failures, barrier = threading.active_count(), [], threading.Barrier(8)

    def work(number: int) -> None:
        try:
            barrier.wait()
            for _ in range(20):
                with Progress(f"thread {number}", 50) as shown:
                    for _ in range(50):
                        shown.advance()
                    assert shown._bar.n == 50
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert len(tqdm._instances) == 0
    assert threading.active_count() == before  # no thread of tqdm's


def test_an_interrupted_drawing_does_not_block_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    error_stream(monkeypatch)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with Progress("fit", 4) as shown:
        shown.advance()
        monkeypatch.setattr(shown._bar, "display", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shown._bar.refresh()
        monkeypatch.delattr(shown._bar, "display")
        other = threading.Thread(target=lambda: Progress("other", 4).advance(), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()


SCRIPT = """
import sys, threading, batchbayes._common.progress as module
from batchbayes._common.progress import UnitProgress, progress
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


def test_our_error_survives_the_way_out_of_another_process() -> None:
    error = pickle.loads(pickle.dumps(BatchbayesError(expected="a", got="b", fix="c")))
    assert (error.expected, error.got, error.fix, str(error)) == ("a", "b", "c", "expected a; got b. Do this: c.")


def test_an_interruption_is_not_kept_in_a_future() -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    with ThisProcess() as workers:
        assert isinstance(workers.submit(lambda: 1 / 0).exception(), ZeroDivisionError)
        with pytest.raises(KeyboardInterrupt):
            workers.submit(interrupted)
