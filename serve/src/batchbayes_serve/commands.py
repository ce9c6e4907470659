"""The command `batchbayes serve`, which batchbayes finds by an entry point, and the same as `batchbayes-serve`."""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

from batchbayes_serve.refusal import BatchbayesError

ABOUT = "serve an exported file over HTTP, with metrics, limits and a watch for drift"
TEXTS: dict[str, Any] = {
    "description": "Serve an ONNX file of `batchbayes export` or bb.export. POST /predict takes\n"
    '{"inputs": [{"column": number, ...}, ...]}, or lists of numbers if the file knows no columns.\n'
    "GET / is a live page; /health, /ready, /version and /metrics are for machines. Logs are JSON lines on stderr.",
    "epilog": "SIGTERM: /ready says no, then no connection is taken, and all that were taken are answered.",
    "formatter_class": argparse.RawDescriptionHelpFormatter,
}


def add_commands(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the command of this package to those of batchbayes."""
    command = commands.add_parser("serve", help=ABOUT, **TEXTS)
    _add_options(command)
    command.set_defaults(run="batchbayes_serve.service:serve_command", options=None)


def main() -> int:
    """Serve a file where the library may not be installed."""
    parser = argparse.ArgumentParser(prog="batchbayes-serve", **TEXTS)
    _add_options(parser)
    parsed = parser.parse_args()
    from batchbayes_serve.service import serve_command

    try:
        serve_command(parsed)
    except (BatchbayesError, OSError) as error:
        print(f"batchbayes-serve: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def whole(text: str) -> int:
    """Read a whole number. Python itself accepts more, such as 1_0 and digits of other scripts."""
    if not re.fullmatch("[+-]?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Read a whole number of at least 1."""
    if not re.fullmatch("[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def _add_options(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("file", type=Path, metavar="FILE.onnx")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1; 0.0.0.0 for all)")
    add("--port", type=whole, default=8000, help="port to listen on (8000); 0 for any that is free, which is printed")
    add(
        "--drift", type=Path, metavar="D.safetensors", help="a saved bb.drift or monitor; the file was exported with it"
    )
    add("--false-alarms", type=float, default=0.01, help="chance of ever raising a false alarm (0.01)")
    add("--max-bytes", type=positive, default=2**24, help="longest body of a request (16777216)")
    add("--max-rows", type=positive, default=4096, help="most rows in a request, and in one call of the file (4096)")
    add("--timeout", type=float, default=30.0, help="seconds for a request to arrive, and for its answer (30)")
    add("--drain", type=float, default=1.0, help="seconds between saying that it stops and stopping (1)")
    add("--threads", type=whole, default=0, help="threads of one call (0: onnxruntime chooses)")
    add("--quiet", action="store_true", help="no line in the log for each request")
