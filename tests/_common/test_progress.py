import pickle
import sys
import threading
from types import SimpleNamespace

import pytest
from helpers.terminal import error_stream, lines

from batchbayes import BatchbayesError
from batchbayes._common import progress as module
from batchbayes._common.progress import Progress, hidden_progress, progress


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


def test_a_log_has_lines_if_they_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch, terminal=False)
    times = iter([0.0, 0.0, 5.0, 25.0, 50.0])
    monkeypatch.setattr(module.time, "time", lambda: next(times))
    with Progress("parts", 8, lines=True) as shown:
        shown.advance(0)
        shown.advance(1)
        shown.about = "3 workers"
        shown.advance(1)
        with hidden_progress():
            shown.advance(1)
            shown.say("hidden")
            shown.say("not hidden", always=True)
    assert stream.getvalue().splitlines() == [
        "parts: 0 of 8 done",
        "parts, 3 workers: 2 of 8 done, 0:01:15 left",
        "not hidden",
    ]


def test_a_bar_shows_what_else_there_is_to_say(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = error_stream(monkeypatch)
    with Progress("parts", 4) as shown:
        shown.advance(2)
        shown.about = "1 worker"
        shown.bar.mininterval = 0
        shown.advance(1)
    assert any(line.startswith("parts, 1 worker:") for line in lines(stream))


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
                    assert shown.bar.n == 50
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
        monkeypatch.setattr(shown.bar, "display", interrupted)
        with pytest.raises(KeyboardInterrupt):
            shown.bar.refresh()
        monkeypatch.delattr(shown.bar, "display")
        other = threading.Thread(target=lambda: Progress("other", 4).advance(), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()


def test_our_error_survives_the_way_out_of_another_process() -> None:
    error = pickle.loads(pickle.dumps(BatchbayesError(expected="a", got="b", fix="c")))
    assert (error.expected, error.got, error.fix, str(error)) == ("a", "b", "c", "expected a; got b. Do this: c.")
