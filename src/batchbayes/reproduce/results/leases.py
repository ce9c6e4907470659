"""Who is working on something: a process that can be told from all others, and from those that are no more."""

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

LEASE_SECONDS = 60.0
"""How long a claim holds without being extended, for owners whose death cannot be seen."""


@dataclass(frozen=True)
class Owner:
    """A process."""

    host: str
    """The machine, its boot and the name space of process numbers: two containers may share a host name."""
    pid: int
    started: str | None
    """When the process began, since numbers are used again; None where the system does not say."""

    def text(self) -> str:
        """For a file."""
        return json.dumps(asdict(self))

    @classmethod
    def of(cls, text: str) -> "Owner":
        """From a file; a ValueError where that holds something else.

        >>> Owner.of(this_process().text()) == this_process()
        True
        """
        match json.loads(text):
            case {"host": str(host), "pid": int(pid), "started": str() | None as started} if 0 < pid < 2**31:
                return cls(host, pid, started)
        raise ValueError(f"not a process: {text!r}")


def this_process() -> Owner:
    """The process that asks."""
    return Owner(_host(), os.getpid(), _started(os.getpid()))


def is_dead(owner: Owner) -> bool:
    """Whether a process has certainly ended. One of another host may be alive, so far as we know.

    >>> is_dead(this_process())
    False
    """
    if owner.host != _host() or os.name != "posix":  # elsewhere os.kill does more than ask
        return False
    try:
        os.kill(owner.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # there is one, of another user
    return owner.started is not None and _started(owner.pid) != owner.started


def _host() -> str:
    return " ".join([socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), _link("/proc/self/ns/pid")])


def _started(pid: int) -> str | None:
    """Clock ticks after boot at which a process began; a zombie, which works on nothing, counts as ended."""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 and after_name[0] not in "ZX" else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""
