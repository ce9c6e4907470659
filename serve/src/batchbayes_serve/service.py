"""The service: endpoints, limits, logs, and a stop that cuts nobody off. `batchbayes serve` starts it."""

import argparse
import asyncio
import ctypes
import json
import logging
import math
import socket
import struct
import sys
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from batchbayes_serve import __version__
from batchbayes_serve.live import LOG, Metrics, Watcher, adapted, page
from batchbayes_serve.model import STATISTICS, Batcher, Found, OnnxFile, RequestError
from batchbayes_serve.refusal import BatchbayesError

FORGOTTEN = 4
"""Bodies up to this number of times too long are read to their end and forgotten, so that the client hears why."""
CLIENT_LEFT = 499
"""Status in logs and metrics of a client that went away."""
BEHIND = 64
"""Batches that may wait for the monitor. It leaves out further ones, whatever is in them."""
OWN_FILES = 100
"""Files that the process itself may need, beside connections."""
SHORT = 2**15
"""Bytes of a body that is read in a millisecond."""
LAST = 2.0
"""Seconds after the last connection has been taken, in which requests may come on connections that are open."""
HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'", "Cache-Control": "no-store"}
HEADERS["X-Content-Type-Options"] = "nosniff"


@dataclass(frozen=True)
class Limits:
    """What a client may ask for."""

    num_bytes: int = 2**24
    rows: int = 4096
    seconds: float = 30.0
    """For a request to arrive, and again for its answer."""
    connections: int = 1000
    """Open at once. If there are more, the one that has waited longest without a request is closed."""

    def __post_init__(self) -> None:
        if not 0 < self.seconds < math.inf:
            raise BatchbayesError("a timeout above 0 seconds", f"{self.seconds}", "choose another --timeout")
        if min(self.num_bytes, self.rows, self.connections) < 1:
            raise BatchbayesError("limits of 1 or more", f"{self}", "choose larger limits")

    @property
    def waiting(self) -> int:
        """Rows that may wait, of all clients together."""
        return 16 * self.rows


class Service:
    """An application (ASGI) around one file."""

    def __init__(self, file: OnnxFile, name: str, limits: Limits, drift: Path | None, false_alarms: float) -> None:
        self.file, self.name, self.limits = file, name, limits
        self.metrics, self.is_stopping = Metrics(file), False
        self.watcher = None if drift is None else Watcher(file, drift, self.metrics, false_alarms)
        self._outputs = [*file.answers, *(STATISTICS if self.watcher else ())]
        self._thread, self._places = ThreadPoolExecutor(1, "drift"), threading.Semaphore(BEHIND)
        self._reader = ThreadPoolExecutor(1, "read")
        file.run(np.zeros([1, *file.shape], file.dtype), self._outputs)  # the first call is slow
        gets = {"/": self.page, "/health": self.health, "/ready": self.ready, "/version": self.version}
        gets["/metrics"] = self.prometheus
        routes = [Route(path, answer, methods=["GET"]) for path, answer in gets.items()]
        self._paths = {*gets, "/predict"}
        self._app = Starlette(
            routes=[*routes, Route("/predict", self.predict, methods=["POST"])],
            exception_handlers={HTTPException: _no_such, RequestError: _refused, Exception: _failed},
            lifespan=self._running,
        )

    @asynccontextmanager
    async def _running(self, _: Starlette) -> AsyncIterator[None]:
        self.batcher = Batcher(self._run, self.limits.rows, self.limits.waiting)
        self._worker = asyncio.create_task(self.batcher.work())
        yield
        self._worker.cancel()
        if self.watcher:
            await asyncio.get_running_loop().run_in_executor(self._thread, self.watcher.keep)

    def _run(self, values: np.ndarray) -> Found:
        """Run one batch. The monitor looks at it in a thread of its own, and nobody waits for that."""
        found = self.file.run(values, self._outputs)
        self.metrics.count(found)
        if self.watcher and self._places.acquire(blocking=False):
            self._thread.submit(self._watch, values, found)
        elif self.watcher:
            self.metrics.skipped.inc(len(values))
        return {name: found[name] for name in self.file.answers}

    def _watch(self, values: np.ndarray, found: Found) -> None:
        try:
            assert self.watcher
            self.watcher.see(values, found)
        except Exception:
            LOG.exception("the monitor failed")
        finally:
            self._places.release()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request; count it, and write it to the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.perf_counter(), CLIENT_LEFT

        async def noted(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                headers.update(HEADERS | {"Batchbayes-File": self.file.digest[:16]})
                if self.is_stopping or status in (408, 413):
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except ClientDisconnect:
            status = CLIENT_LEFT
        finally:
            seconds, path = time.perf_counter() - start, scope["path"]
            self.metrics.answered(path if path in self._paths else "other", status, seconds)
            told = {"method": scope["method"], "path": path[:200], "status": status, "ms": round(1000 * seconds, 2)}
            told |= {"client": (scope.get("client") or [None])[0], **scope.get("told", {})}
            LOG.info("request", extra={"told": told})

    async def predict(self, request: Request) -> Response:
        """Answer rows of inputs. Long texts are read and written in threads, so that others do not wait."""
        body, seconds = await self._body(request), self.limits.seconds
        try:
            async with asyncio.timeout(seconds):
                values, adapt = await self._read(body)
                request.scope["told"] = {"rows": len(values)}
                answer = await self._answer(values, adapt)
        except TimeoutError as error:
            raise RequestError(503, f"no answer within {seconds:g} seconds: try again later") from error
        return _as_json(await asyncio.to_thread(partial(json.dumps, answer, allow_nan=False)))

    async def _read(self, body: bytes) -> tuple[np.ndarray, bool]:
        """Read a short body at once. Long ones wait for each other: together they would hold up all others."""
        if len(body) <= SHORT:
            return self.file.read(body, self.limits.rows)
        return await asyncio.get_running_loop().run_in_executor(self._reader, self.file.read, body, self.limits.rows)

    async def _answer(self, values: np.ndarray, adapt: bool) -> dict[str, Any]:
        found, more = await self.batcher.ask(values), {}
        if adapt:  # in the thread of the monitor, which has the latest rows
            run = self.watcher.adapted if self.watcher else partial(adapted, self.file, window=values[:0])
            new, count = await asyncio.get_running_loop().run_in_executor(self._thread, run, values)
            found, more = found | new, {"adapted_to": count}
        answer = self.file.said(values, found) | more
        for column in (name for row in answer.get("outside", ()) for name in row):
            self.metrics.outside.labels(column).inc()
        if self.watcher:
            answer["alarm"] = self.watcher.monitor.alarm
        return answer

    async def _body(self, request: Request) -> bytes:
        """Return the body, if it is JSON, not too long, and here in time."""
        kind = request.headers.get("content-type", "none").split(";")[0].strip().lower()
        if kind != "application/json" or request.headers.get("content-encoding", "identity") != "identity":
            # Without this header any web page could post here from the browser of somebody who may.
            raise RequestError(415, f"expected Content-Type: application/json that is not compressed, got {kind}")
        parts, count, most = [], 0, self.limits.num_bytes
        long = RequestError(413, f"expected at most {most} bytes, got more: send fewer rows in a request")
        if int(request.headers.get("content-length", 0)) > FORGOTTEN * most:
            raise long
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    count += len(part)
                    if count > FORGOTTEN * most:
                        break
                    if count <= most:
                        parts.append(part)
        except TimeoutError as error:
            raise RequestError(408, f"the request did not arrive within {self.limits.seconds:g} seconds") from error
        if count > most:
            raise long
        return b"".join(parts)

    async def health(self, _: Request) -> Response:
        """Say whether requests are worked on."""
        fine = not self._worker.done()
        return _as_json(json.dumps({"status": "ok" if fine else "the worker has ended"}), 200 if fine else 503)

    async def ready(self, _: Request) -> Response:
        """Say whether new requests should be sent here."""
        full = self.batcher.num_waiting > self.limits.waiting // 2
        state = "stopping" if self.is_stopping else "busy" if full else "ready"
        return _as_json(json.dumps({"status": state}), 200 if state == "ready" else 503)

    async def version(self, _: Request) -> Response:
        """Say which file and which program answer, and what the numbers mean."""
        about = {"input": ["N", *self.file.shape], "outputs": self.file.outputs, **self.file.notes}
        told = {"file": self.name, "sha256": self.file.digest, "batchbayes": __version__, "about": about}
        return _as_json(json.dumps(told))

    async def prometheus(self, _: Request) -> Response:
        """Say what Prometheus asks for."""
        return Response(generate_latest(self.metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def page(self, _: Request) -> Response:
        """Show how it goes."""
        shown = page(self.file, self.name, self.metrics, self.watcher)
        return Response(shown, media_type="text/html")


def _as_json(text: str, status: int = 200, headers: Any = None) -> Response:
    return Response(text, status, media_type="application/json", headers=headers)


def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    later = {"Retry-After": "1"} if error.status == 503 else None
    return _as_json(json.dumps({"error": error.sentence}), error.status, later)


def _no_such(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = "there is nothing at {}: POST /predict, or GET /, /health, /ready, /version or /metrics"
    if error.status_code == 405:
        said = f"{{}} takes no {request.method}, but {(error.headers or {}).get('Allow', 'GET')}"
    return _as_json(json.dumps({"error": said.format(request.url.path[:200])}), error.status_code, error.headers)


def _failed(_: Request, error: Exception) -> Response:
    return _as_json(json.dumps({"error": "the service failed, and its log says why"}), 500)


class _Connection(H11Protocol):
    """A connection that must send the headers of a request in time, and answers without delay."""

    limits, waiting = Limits(), {}  # of the service; open connections without a request, the oldest first
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Make room for a new connection. Small packets are sent at once, without Nagle's delay of 40 ms."""
        super().connection_made(transport)
        with suppress(OSError):
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.limits.connections:
            (next(iter(self.waiting), None) or self).transport.abort()
        self._expect_headers()

    def data_received(self, data: bytes) -> None:
        """Take what has come, and wait for the rest of the headers."""
        super().data_received(data)
        self._expect_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._has_request()

    def _expect_headers(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._has_request()
        elif self._timer is None and not self.transport.is_closing():
            self.waiting[self] = None
            self._timer = self.loop.call_later(self.limits.seconds, self.transport.close)

    def _has_request(self) -> None:
        self.waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()
            self._timer = None

    def on_response_complete(self) -> None:
        """Wait for the next request. Uvicorn closes a connection that keeps silent."""
        super().on_response_complete()
        if not self.transport.is_closing():
            self.waiting[self] = None


class Server(uvicorn.Server):
    """A server that first says that it stops, then takes no more connections, and answers all it has taken."""

    def __init__(self, service: Service, listening: socket.socket, drain: float) -> None:
        seconds = int(2 * service.limits.seconds) + 1
        super().__init__(
            uvicorn.Config(
                service, access_log=False, log_config=None, lifespan="on", timeout_keep_alive=75,
                timeout_graceful_shutdown=seconds, server_header=False,
                http=type("Connection", (_Connection,), {"limits": _reachable(service.limits), "waiting": {}}),
            )
        )  # fmt: skip
        self.service, self._listening, self._drain = service, listening, drain

    def answer(self) -> None:
        """Answer until somebody stops it."""
        self.run(sockets=[self._listening])

    async def shutdown(self, sockets: Any = None) -> None:
        """Stop. Answers now close their connections, so that no client asks on one that is about to be closed."""
        LOG.info("stopping", extra={"told": {"drain_seconds": self._drain}})
        self.service.is_stopping = True
        await asyncio.sleep(self._drain)
        _let_nobody_in(self._listening)
        await asyncio.sleep(0.1)  # those who were connecting are taken
        for server in self.servers:
            server.close()
        until = time.monotonic() + LAST
        while self.server_state.connections and time.monotonic() < until:
            await asyncio.sleep(0.02)
        await super().shutdown(sockets)
        self._captured_signals.clear()  # it has done what SIGTERM asks for, and ends with 0
        LOG.info("stopped")


def _reachable(limits: Limits) -> Limits:
    """Return limits for which this process may have open files enough."""
    if sys.platform == "win32":
        return limits
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * limits.connections + OWN_FILES  # others may be taken before one is closed
    if soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return replace(limits, connections=max(1, min(limits.connections, (soft - OWN_FILES) // 2)))


def _let_nobody_in(listening: socket.socket) -> None:
    """Ignore new connections. A socket that is closed at once would reset those that nobody has taken yet.

    Linux has a filter for packets: load the flags of TCP; if SYN is among them, drop the packet, else keep it.
    """
    if sys.platform == "linux":
        steps = [(0x30, 0, 0, 13), (0x45, 0, 1, 2), (0x06, 0, 0, 0), (0x06, 0, 0, 2**32 - 1)]
        program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
        with suppress(OSError):
            listening.setsockopt(socket.SOL_SOCKET, 26, struct.pack("HP", len(steps), ctypes.addressof(program)))


class JsonLines(logging.Formatter):
    """A line of JSON for each event."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03}Z"}
        line |= {"level": record.levelname.lower(), "event": record.getMessage(), **getattr(record, "told", {})}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def build_server(
    path: Path, *, host: str = "127.0.0.1", port: int = 8000, drift: Path | None = None, false_alarms: float = 0.01,
    limits: Limits | None = None, threads: int = 0, drain: float = 1.0,
) -> tuple[Server, str]:  # fmt: skip
    """Return a server for a file that listens already, and its address. Port 0 takes any that is free."""
    for fine, expected, got in (
        (0 <= port < 2**16, "a port from 0 to 65535", f"--port {port}"),
        (bool(host.strip()), "an address to listen on, such as 127.0.0.1", f"--host {host!r}"),
        (threads >= 0, "a number of threads, or 0", f"--threads {threads}"),
        (0 <= drain < math.inf, "seconds to drain, 0 or more", f"--drain {drain}"),
        (0 < false_alarms < 1, "a chance of false alarms between 0 and 1", f"--false-alarms {false_alarms}"),
    ):
        if not fine:
            raise BatchbayesError(expected, got, "choose another value")
    service = Service(OnnxFile(path, threads), path.name, limits or Limits(), drift, false_alarms)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise BatchbayesError("an address that is free", f"{host}:{port}: {error}", "choose another --port") from error
    shown = f"[{host}]" if ":" in host else host
    return Server(service, listening, drain), f"http://{shown}:{listening.getsockname()[1]}"


def serve_command(parsed: argparse.Namespace) -> None:
    """Serve a file until SIGTERM or Ctrl-C."""
    limits = Limits(parsed.max_bytes, parsed.max_rows, parsed.timeout)
    names = ("host", "port", "drift", "false_alarms", "threads", "drain")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("uvicorn", LOG.name):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.WARNING if name == "uvicorn" or parsed.quiet else logging.INFO)
    server, address = build_server(parsed.file, limits=limits, **{name: getattr(parsed, name) for name in names})
    print(address, flush=True)
    server.answer()
