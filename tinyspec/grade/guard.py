"""What a submission may not do: noticed by Python's audit hooks, and held to by the limits of the
operating system.

Runs in the child: standard library alone. No security boundary: whoever wants to get around it can.
"""

import _thread
import builtins
import fractions
import os
import random
import sys
from typing import Any, NoReturn

REFUSED = {
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "os.system": "starts a process",
    "os.exec": "starts a process",
    "os.spawn": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
    "pty.spawn": "starts a process",
    "os.kill": "sends a signal",
    "os.killpg": "sends a signal",
    "signal.pthread_kill": "sends a signal",
    "resource.setrlimit": "changes its limits",
    "resource.prlimit": "changes its limits",
    "ctypes.dlopen": "uses ctypes",
    "socket.__new__": "uses the network",
    "os.mkdir": "writes a file",
    "os.rename": "writes a file",
    "os.remove": "writes a file",
    "os.rmdir": "writes a file",
    "os.link": "writes a file",
    "os.symlink": "writes a file",
    "os.truncate": "writes a file",
    "os.chmod": "writes a file",
}
NOT_ALLOWED = "which the grader does not allow"
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND

HERE = os.path.dirname(os.path.realpath(__file__))
READABLE = [os.path.dirname(os.path.realpath(os.__file__)), os.path.realpath("/dev")]

trusting = [False]  # while the grader's own files are read
offences: list[str] = []
kept: list[tuple[Any, dict[str, Any]]] = []


def offend(what: str) -> NoReturn:
    offences.append(what)
    raise PermissionError(f"the grader allows no function that {what}")


def watch(event: str, args: tuple[Any, ...], refused: dict[str, str] = REFUSED) -> None:
    """The audit hook: what a function of plain data has no business with."""
    if event in refused:
        offend(refused[event])
    if event != "open" or len(args) < 3 or isinstance(args[0], int) or args[0] == os.devnull:
        return
    if isinstance(args[2], int) and args[2] & WRITING:
        offend("writes a file")
    if kept and not trusting[0] and not readable(os.fsdecode(args[0])):
        offend("reads a file that is not its own")


def readable(path: str) -> bool:
    """Whether a file is Python's, the submission's, or one of those that define props."""
    path = os.path.realpath(path)
    if os.path.dirname(path) == HERE:
        return os.path.basename(path).startswith(("props", "codec", "guard", "child", "problems"))
    return any(path == root or path.startswith(root + os.sep) for root in READABLE)


def no_dice(*args: Any, **named: Any) -> NoReturn:
    """Stands in for every function of the module random."""
    raise PermissionError("draw through chance alone: the module random is closed")


def no_thread(*args: Any, **named: Any) -> NoReturn:
    """Stands in for what starts a thread."""
    offend("starts a thread")


def limit(memory: int, seconds: int) -> None:
    """What the operating system holds this process to; where it knows no such limit, the parent's
    clock remains.
    """
    try:
        import resource
    except ImportError:
        return
    for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
        try:
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (most, most))
        except (AttributeError, ValueError, OSError):
            continue


def begin(memory: int, seconds: int) -> None:
    """From here on: so many bytes of memory, so many seconds of processor time, and nothing that is
    refused.
    """
    limit(memory, seconds)
    for name in random.__all__:
        if name.islower():
            setattr(random, name, no_dice)
    for name in (
        "start_new_thread",
        "start_new",
        "start_joinable_thread",
    ):  # no audit event tells of them everywhere
        setattr(_thread, name, no_thread)
    sys.addaudithook(watch)


def keep(folder: str) -> None:
    """Remember what a submission may not change, and where it lives: elsewhere it reads nothing
    from now on.
    """
    READABLE.append(os.path.realpath(folder))
    kept[:] = [(place, dict(vars(place))) for place in (builtins, fractions, fractions.Fraction)]


def offence() -> str | None:
    """What was done that is not allowed since this was asked last, even where nothing was raised in
    the end.
    """
    done = offences[0] if offences else None
    offences.clear()
    for place, before in kept:
        now = dict(vars(place))
        changed = sorted(name for name in {*before, *now} if before.get(name) is not now.get(name))
        if changed:
            done = f"changes {place.__name__}.{changed[0]}"
    return f"{done}, {NOT_ALLOWED}" if done else None
