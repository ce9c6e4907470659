import subprocess
import sys
from pathlib import Path

import pytest
from batchbayes_papers import demo

import batchbayes
from batchbayes import BatchbayesError, cli
from batchbayes._common.checks import install_command


def test_demo_gets_the_folder_and_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Path, int]] = []
    monkeypatch.setattr(demo, "demo_command", lambda parsed: calls.append((parsed.out, parsed.seed)))
    assert cli.main(["demo"]) == 0
    assert cli.main(["demo", "--out", "elsewhere", "--seed", "7"]) == 0
    assert calls == [(Path("demo"), 0), (Path("elsewhere"), 7)]


def failing(error: BaseException):
    def run(parsed: object) -> None:
        raise error

    return run


def test_bad_input_is_one_line_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "demo_command", failing(BatchbayesError(expected="a", got="b", fix="c")))
    assert cli.main(["demo"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "batchbayes demo: expected a; got b. Do this: c.\n"
    assert printed.out == ""


def test_debug_shows_where_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "demo_command", failing(BatchbayesError(expected="a", got="b", fix="c")))
    with pytest.raises(BatchbayesError):
        cli.main(["demo", "--debug"])


def test_other_errors_are_bugs_and_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "demo_command", failing(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["demo"])


def test_interruption_ends_with_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "demo_command", failing(KeyboardInterrupt()))
    assert cli.main(["demo"]) == 130
    assert capsys.readouterr().err == "batchbayes demo: interrupted\n"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"batchbayes {batchbayes.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["demo", "--seed", "x"]])
def test_misuse_ends_with_2_and_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: batchbayes")


PRINTING = """
import sys, types
from batchbayes import cli
demo = types.ModuleType("batchbayes_papers.demo")  # the real one would import torch
sys.modules[demo.__name__] = demo
demo.demo_command = lambda parsed: [print("7.5 ± 0.5, \u22121 \u4e00", file={stream}) for _ in range({lines})]
sys.exit(cli.main({arguments}))
"""


@pytest.mark.parametrize("stream", ["sys.stdout", "sys.stderr"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_reader_that_leaves_is_no_error(stream: str, lines: int) -> None:
    script = PRINTING.format(stream=stream, lines=lines, arguments=["demo"])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        closed, other = (process.stdout, process.stderr)[:: 1 if stream == "sys.stdout" else -1]
        closed.close()
        assert other.read() == b""
        assert process.wait() == 141


def test_help_may_be_cut_off_too() -> None:
    script = PRINTING.format(stream="None", lines=0, arguments=["reproduce", "--help"])
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""


def test_a_pipe_of_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "demo_command", failing(BrokenPipeError()))
    with pytest.raises(BrokenPipeError):
        cli.main(["demo"])


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", "7.5 +- 0.5, -1 ?"), ("latin-1", "7.5 ± 0.5, -1 ?")])
def test_letters_that_the_output_has_not_are_replaced(encoding: str, printed: str) -> None:
    script = PRINTING.format(stream="sys.stdout", lines=1, arguments=["demo"])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, env={"PYTHONIOENCODING": encoding}, check=True
    )
    assert done.stdout.decode(encoding) == f"{printed}\n"


@pytest.mark.parametrize(
    "words",
    [
        ["reproduce", "--all", "--preset", "smoke"],
        ["table", "mcbn-uci"],
        ["table", "-h"],
        ["demo"],
        ["serve", "a.onnx"],
    ],
)
def test_a_command_whose_package_is_missing_says_how_to_install_it(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "entry_points", lambda group: [])
    assert cli.main(words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"the command `{words[0]}`" in line
    package = "batchbayes-serve" if words[0] == "serve" else "batchbayes-papers"
    assert f"Do this: {install_command(package=package)}." in line
