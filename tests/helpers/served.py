"""A service on a port of this machine."""

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def served(path: Path, **options: Any) -> Iterator[str]:
    """Serve an ONNX file in a thread, and give the address to ask. The options are those of `build_server`."""
    with serving(path, **options) as (_, address):
        yield f"{address}/predict"


@contextmanager
def serving(path: Path, **options: Any) -> Iterator[Any]:
    """Serve an ONNX file in a thread, and give the service and its address."""
    from batchbayes_serve.service import build_server

    server, address = build_server(path, **({"port": 0, "threads": 1, "drain": 0.0} | options))
    thread = threading.Thread(target=server.answer)
    thread.start()
    try:
        yield server.service, address
    finally:
        server.should_exit = True
        thread.join()


def answer(address: str, body: str | bytes, **headers: str) -> tuple[int, dict]:
    """Return status and content of the answer to a request."""
    content = body.encode() if isinstance(body, str) else body
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"} | headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
