"""Claims on units: which process has claimed a unit, and whether its claim still holds.

A claim holds until its lease ends. The process that owns the claim extends the lease while it lives. Another process
may take the unit over as soon as the lease has ended or the owner has certainly ended.
"""

import json
import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

LEASE_SECONDS = 60.0
"""How long a claim holds if it is not extended. This matters for owners whose end cannot be seen from here."""
LONGEST_LEASE_SECONDS = 2 * LEASE_SECONDS
"""No valid lease ends later than this from now."""


@dataclass(frozen=True)
class ProcessIdentity:
    """What distinguishes one process from all others, also from earlier ones with the same number."""

    host: str
    """The machine, its boot and its namespace of process numbers: two containers may share a host name."""
    pid: int
    started: str | None
    """When the process started, since process numbers are reused; None if the system does not tell."""

    def to_text(self) -> str:
        """Return the identity as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "ProcessIdentity":
        """Read an identity from JSON.

        Raises:
            ValueError: the text is something else.

        >>> ProcessIdentity.from_text(this_process().to_text()) == this_process()
        True
        """
        match json.loads(text):
            case {"host": str(host), "pid": int(pid), "started": str() | None as started} if 0 < pid < 2**31:
                return cls(host, pid, started)
        raise ValueError(f"not a process: {text!r}")


def this_process() -> ProcessIdentity:
    """Return the identity of the current process."""
    return ProcessIdentity(_host(), os.getpid(), _start_time(os.getpid()))


def lease_holds(expires: float) -> bool:
    """Return whether a lease that ends at the time `expires` is still valid.

    A lease that ends much later than a new one would is not valid: it was written while the clock was wrong, and to
    wait for its end could take days. The limit is twice the usual time, since a clock may be corrected a little.

    >>> [lease_holds(time.time() + seconds) for seconds in (-1, 30, 86400)]
    [False, True, False]
    """
    return 0 < expires - time.time() <= LONGEST_LEASE_SECONDS


def has_ended(process: ProcessIdentity) -> bool:
    """Return whether a process has certainly ended. The processes of another host are taken as alive.

    >>> has_ended(this_process())
    False
    """
    if process.host != _host() or os.name != "posix":  # on other systems os.kill(pid, 0) is not a harmless question
        return False
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # the process exists and belongs to another user
    return process.started is not None and _start_time(process.pid) != process.started


def _host() -> str:
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return " ".join([socket.gethostname(), _read("/proc/sys/kernel/random/boot_id"), namespace])


def _start_time(pid: int) -> str | None:
    """Return the start time of a process in clock ticks after boot. A zombie does no work and counts as ended."""
    after_name = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return after_name[19] if len(after_name) > 19 and after_name[0] not in "ZX" else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
