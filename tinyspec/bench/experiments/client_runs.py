"""Run the server as a process of its own, and its clients as threads of this one.

`bench clients` measures them. A soak keeps many clients busy and compares what they get.
"""

import http.client
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from tinyspec.bench.harness import show_progress_bar
from tinyspec.errors import TinyspecError

T = TypeVar("T")
SOAK_CLIENTS, SOAK_JOBS, SOAK_TOKENS = 64, 64, (4, 48)
SOAK_MARKS = (10, 50, 100)  # percent of the time, at which the server's memory is read
PATIENCE = 600.0  # seconds that a client waits for a reply
STOP_SECONDS = 10.0  # until a server that was told to stop is told again


class ClientJob(NamedTuple):
    """A prompt as ids, and how many tokens may follow."""

    ids: list[int]
    tokens: int


class Completion(NamedTuple):
    """A text that came back, and its number of tokens."""

    text: str
    tokens: int


class ServerProcess(NamedTuple):
    """A server, the file that it writes its messages into, and (host, port)."""

    process: subprocess.Popen[bytes]
    log: Path
    address: tuple[str, int] = ("", 0)

    def connect(self) -> http.client.HTTPConnection:
        """Return a connection, which opens with its next request."""
        return http.client.HTTPConnection(*self.address, timeout=PATIENCE)

    def find_address(self) -> tuple[str, int] | None:
        """Return where the server says that it listens; None if it says nothing yet."""
        text = self.log.read_text("utf-8", errors="replace")
        found = re.search(r" at http://([\d.]+):(\d+) ", text)
        return (found[1], int(found[2])) if found else None

    def check_alive(self) -> None:
        """Raise TinyspecError, with the server's own last line, if it has ended."""
        if (code := self.process.poll()) is not None:
            lines = self.log.read_text("utf-8", errors="replace").strip().splitlines()
            last, own = (lines or ["it said nothing"])[-1], "tinyspec: "
            how = "" if last.startswith(own) else f"the server ended with code {code}: "
            raise TinyspecError(how + last.removeprefix(own))


@contextmanager
def run_server(options: Sequence[str]) -> Iterator[ServerProcess]:
    """Run `tinyspec serve` until the block ends, however it ends.

    Raises TinyspecError with the server's own last line if it does not start.
    """
    command = [sys.executable, "-m", "tinyspec", "serve", "--port", "0", *options]
    own = {name: value for name, value in os.environ.items() if name != "TINYSPEC_API_KEY"}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=out, env=own
            )
        try:
            server = ServerProcess(process, log)
            while (address := server.find_address()) is None:
                server.check_alive()
                time.sleep(0.05)
            yield server._replace(address=address)
        finally:
            try:
                for _ in range(2):  # the second signal cuts texts that still run
                    process.terminate()
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(STOP_SECONDS)
            finally:
                process.kill()
                process.wait()


def post_job(connection: http.client.HTTPConnection, job: ClientJob) -> Completion:
    """Return the server's text. Raises TinyspecError for an error, and where none comes."""
    body = json.dumps({"prompt": job.ids, "max_tokens": job.tokens, "temperature": 0})
    try:
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        found = json.loads(reply.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        connection.close()  # the next request opens it again
        what = str(error) or type(error).__name__
        raise TinyspecError(f"the server gave no reply ({what})") from error
    if reply.status != 200:
        raise TinyspecError(f"the server answered {reply.status}: {found['error']['message']}")
    return Completion(found["choices"][0]["text"], found["usage"]["completion_tokens"])


def run_clients(
    n: int, work: Callable[[int], T], watch: Callable[[], None] = lambda: None
) -> list[T]:
    """Run client 0, 1, ... in threads, and `watch` in this one. Return what the clients return.

    If anything fails, nobody waits for clients: they fail when their server ends.
    """
    pool = ThreadPoolExecutor(n)
    try:
        clients = [pool.submit(work, client) for client in range(n)]
        watch()
        return [client.result() for client in clients]
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def ask_server(server: ServerProcess, clients: int, jobs: Sequence[ClientJob]) -> list[Completion]:
    """Let clients post the jobs, each the next one as soon as it has a reply."""
    waiting, texts = iter(enumerate(jobs)), dict[int, Completion]()

    def work(client: int) -> None:
        with closing(server.connect()) as connection:
            for at, job in waiting:
                texts[at] = post_job(connection, job)

    run_clients(clients, work)
    return [texts[at] for at in range(len(jobs))]


# ---------------------------------------------------------------------- the soak


def draw_soak_jobs(prompts: Sequence[list[int]]) -> list[ClientJob]:
    """Return 64 jobs of many lengths, always the same ones of the same prompts."""
    dice, jobs = random.Random(0), list[ClientJob]()
    for ids in dice.choices(prompts, k=SOAK_JOBS):
        jobs.append(ClientJob(ids[: dice.randint(1, len(ids))], dice.randint(*SOAK_TOKENS)))
    return jobs


def soak_server(
    server: ServerProcess,
    decode: Callable[[ClientJob], Completion],
    prompts: Sequence[list[int]],
    seconds: float,
    quiet: bool,
) -> dict[str, Any]:
    """Keep 64 clients busy for some seconds, and compare each text with its prompt's text alone.

    decode  writes the text of a job alone
    Returns counts of requests, errors and unequal texts, and the server's memory in bytes at some
    percent of the time.
    """
    jobs, done = draw_soak_jobs(prompts), threading.Event()
    expected, memory = list[Completion](), dict[str, int | None]()

    def work(client: int) -> tuple[int, int, list[str]]:
        """Return requests, unequal texts, and errors."""
        dice, requests, unequal, errors = random.Random(client), 0, 0, list[str]()
        with closing(server.connect()) as connection:
            while not done.is_set():
                requests, at = requests + 1, dice.randrange(len(jobs))
                try:
                    unequal += post_job(connection, jobs[at]) != expected[at]
                except TinyspecError as error:
                    errors.append(str(error))
                    done.wait(1)
        return requests, unequal, errors

    def watch() -> None:
        for percent in range(1, 101):
            done.wait(max(0.0, begun + seconds * percent / 100 - time.monotonic()))
            server.check_alive()
            if percent in SOAK_MARKS:
                memory[str(percent)] = read_process_memory(server.process.pid)
            tick()
        done.set()

    with show_progress_bar(f"soak: {SOAK_CLIENTS} clients", len(jobs) + 100, quiet) as tick:
        for job in jobs:
            expected.append(decode(job))
            tick()
        begun = time.monotonic()
        try:
            found = run_clients(SOAK_CLIENTS, work, watch)
        finally:
            done.set()
    errors = [error for one in found for error in one[2]]
    return {
        "clients": SOAK_CLIENTS,
        "seconds": time.monotonic() - begun,
        "requests": sum(one[0] for one in found),
        "errors": len(errors),
        "first_error": errors[0] if errors else None,
        "unequal": sum(one[1] for one in found),
        "memory": memory,
    }


def read_process_memory(pid: int) -> int | None:
    """Return the memory that a process holds, in bytes; None where the system does not say it."""
    status = Path(f"/proc/{pid}/status")
    text = status.read_text("utf-8") if status.exists() else ""
    found = re.search(r"VmRSS:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
