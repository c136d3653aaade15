"""The parent's end of a child process: started with nothing but limits, asked in lines, and killed
with all it started.

No security boundary: a submission that means harm belongs in a container. What is held here is what
accidents do.
"""

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError

CHILD = Path(__file__).with_name("child.py")
CHUNK = 1 << 16


class Limits(NamedTuple):
    """What a submission may use.

    call     seconds for one answer
    task     seconds of answering in all, for one task
    hanging  seconds that a whole run waits for answers that do not come; after that, `least` for
             each
    memory   bytes of addresses
    output   bytes printed for one task
    answer   bytes of one answer
    """

    call: float = 4.0
    task: float = 60.0
    hanging: float = 12.0
    least: float = 1.0
    memory: int = 1 << 30
    output: int = 1 << 20
    answer: int = 16 << 20


class Gone(TinyspecError):
    """The child was killed, or ended; the sentence's verb says why."""


class Hung(Gone):
    """No answer came in time."""


class Child:
    """One process that holds one submission. Use as a context manager: at its end everything it
    started is killed.
    """

    def __init__(self, limits: Limits):
        self.limits = limits
        self.waited = 0.0  # seconds
        self.printed = 0  # bytes
        self._size = 0  # of the answer that is coming
        to_child, self._send = os.pipe()
        self._receive, from_child = os.pipe()
        processor = int(limits.task) + 2
        command = [sys.executable, "-P", "-s", "-S", "-B", str(CHILD)]
        try:
            self._process = subprocess.Popen(
                [*command, *map(str, (to_child, from_child, limits.memory, processor))],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                pass_fds=(to_child, from_child),
                env={"PYTHONHASHSEED": "0", "LC_ALL": "C.UTF-8", "PATH": os.defpath},
                start_new_session=True,
            )
        finally:
            os.close(to_child)
            os.close(from_child)
        assert self._process.stdout is not None
        self._output = self._process.stdout.fileno()
        self._waiting = selectors.DefaultSelector()
        for descriptor in (self._send, self._receive, self._output):
            os.set_blocking(descriptor, False)
        for descriptor in (self._receive, self._output):
            self._waiting.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and its group, and close the pipes."""
        if self._send < 0:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._waiting.close()
        assert self._process.stdout is not None
        self._process.stdout.close()
        os.close(self._send)
        os.close(self._receive)
        self._send = -1

    def ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        """Send a message and wait for its answer. Gone, and the child is dead, where none comes."""
        if self._send < 0:
            raise Gone("was stopped before")
        began, self._size = time.monotonic(), 0
        try:
            seconds = self.limits.call if seconds is None else seconds
            answer = self._talk((json.dumps(message) + "\n").encode(), began + seconds, seconds)
            self._drain()
            data = json.loads(answer)
            if not isinstance(data, dict):
                raise ValueError
        except ValueError:
            self.close()
            raise Gone("writes into the grader's pipe") from None
        except Gone:
            self.close()
            raise
        finally:
            self.waited += time.monotonic() - began
        if self.waited > self.limits.task:
            self.close()
            raise Gone(f"is too slow: it took more than {self.limits.task:g} s in all")
        return data

    def _talk(self, message: bytes, until: float, seconds: float) -> bytes:
        """The line that answers a line."""
        answer = bytearray()
        try:
            message = self._write(message)
            if message:
                self._waiting.register(self._send, selectors.EVENT_WRITE)
            while b"\n" not in answer[-CHUNK:]:
                left = until - time.monotonic()
                ready = self._waiting.select(max(left, 0))
                if not ready and left <= 0:
                    raise Hung(f"does not come back: it was stopped after {seconds:g} s")
                for key, _ in ready:
                    if key.fd == self._output:
                        self._drain()
                    elif key.fd == self._receive:
                        answer += self._read()
                    elif not (message := self._write(message)):
                        self._waiting.unregister(self._send)
        finally:
            with suppress(KeyError):
                self._waiting.unregister(self._send)
        return bytes(answer)

    def _read(self) -> bytes:
        got = os.read(self._receive, CHUNK)
        if not got:
            self._drain()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            raise Gone(ended(self._process.poll()))
        self._size += len(got)
        if self._size > self.limits.answer:
            raise Gone(f"sends more than {self.limits.answer >> 20} MB of results")
        return got

    def _write(self, message: bytes) -> bytes:
        """What of it is left to be written."""
        try:
            return message[os.write(self._send, message) :]
        except BlockingIOError:
            return message
        except BrokenPipeError:
            return b""  # the end is read from the other pipe

    def _drain(self) -> None:
        """Read what was printed, and forget it."""
        with suppress(BlockingIOError):
            while got := os.read(self._output, CHUNK):
                self.printed += len(got)
                if self.printed > self.limits.output:
                    raise Gone(f"prints more than {self.limits.output >> 10} KB")
            with suppress(KeyError):  # it closed its output
                self._waiting.unregister(self._output)


def ended(status: int | None) -> str:
    """How a process came to its end, said of the function that brought it about."""
    if status is None:
        return "closes the grader's pipe"
    if status >= 0:
        return f"ends the process (exit status {status})"
    if status == -signal.SIGXCPU:
        return "uses more processor time than it may"
    if status == -signal.SIGKILL:
        return "was killed, perhaps for its memory"
    return f"crashes Python (signal {-status})"
