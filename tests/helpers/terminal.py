"""A terminal of 40 columns in place of standard error."""

import io
import os
import sys

import pytest

from batchbayes._common import progress as module


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
