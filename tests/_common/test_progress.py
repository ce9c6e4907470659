"""The line about units of work. The bar is tested where it is used."""

import io
import os
import pickle
import sys

import pytest

from batchbayes import BatchbayesError
from batchbayes._common.progress import UnitProgress, hidden_progress, seconds_left
from batchbayes.reproduce.workers import ThisProcess


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


EFFORTS = {"a": 1.0, "b": 1.0, "c": 2.0}


def test_a_terminal_has_one_line_that_is_wiped_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((40, 20)))
    with UnitProgress(EFFORTS, 1) as shown:
        shown.show({}, {"a": 0.0})
        shown.show({"a": 10.0}, {"a much longer name than there is room for": 4.0})
        shown.finished("a", {"a": 10.0}, {})
    lines = sys.stderr.getvalue().split("\r\x1b[K")  # type: ignore[attr-defined]
    assert lines == ["", "[....................]  0/3  ...  a", "[#######.............]  1/3  30 s left ", ""]


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
