"""The example service, on a port of this machine."""

import json
import runpy
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def served(path: Path) -> Iterator[str]:
    """Serve an ONNX file, and give the address to ask."""
    service = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "service.py"))
    server = service["serve"](path, 0)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/predict"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def answer(address: str, body: str) -> tuple[int, dict]:
    """Return status and content of the answer to a request."""
    try:
        with urllib.request.urlopen(urllib.request.Request(address, body.encode()), timeout=60) as found:
            return found.status, json.loads(found.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())
