"""Try damaged inputs in worker processes.

An input that hangs or kills its worker is counted, and the others are still tried.
"""

import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

DEADLINE = 90.0  # seconds for one input: twenty times what the slowest takes on a quiet machine
MEMORY = 6 << 30  # bytes of address space, beyond what a worker has at its start
PER_PROCESS = 1500  # inputs; then a fresh one, so that what a library keeps does not pile up

Input = tuple[str, int]
"""A class of inputs, and the seed that draws one of it."""


class Outcome(NamedTuple):
    """What became of an input: accepted, refused, traceback, hang or signal; and more about it."""

    kind: str
    seed: int
    end: str
    detail: str = ""


def serve(folder: str, pipe: Connection) -> None:
    """Try the inputs that come through the pipe, until it is closed."""
    os.environ.update(HF_HUB_OFFLINE="1", RUST_BACKTRACE="0", PYTHONWARNINGS="ignore")
    with open(os.devnull, "wb") as nothing:  # what libraries print of what they are given
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    import warnings

    import torch

    from tests.fuzz.inputs import open_world, try_input

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    world = open_world(Path(folder))
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            kind, seed = pipe.recv()
            os.chdir(world.scratch)
            pipe.send(try_input(world, kind, seed))


class Worker:
    """A process, the input that it tries, and when it began."""

    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(
            target=serve, args=(str(folder), theirs), daemon=True
        )
        self.process.start()
        theirs.close()
        self.input: Input | None = None
        self.begun, self.tried, self.ready = time.monotonic(), 0, False

    def give(self, given: Input) -> None:
        """Send an input."""
        self.input, self.begun = given, time.monotonic()
        self.tried += 1
        self.pipe.send(given)

    def stop(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.join()
        self.pipe.close()


def try_inputs(inputs: Sequence[Input], workers: int = 1) -> Iterator[Outcome]:
    """Yield what became of each input, in the order in which they end."""
    from tests.fuzz.inputs import build_world

    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    build_world(folder)
    waiting = [*reversed(inputs)]
    running = [Worker(folder) for _ in range(workers)]
    try:
        while waiting or any(worker.input for worker in running):
            for at, worker in enumerate(running):
                if (
                    worker.ready
                    and worker.input is None
                    and worker.tried >= PER_PROCESS
                    and waiting
                ):
                    worker.stop()
                    running[at] = worker = Worker(folder)
                if worker.ready and worker.input is None and waiting:
                    worker.give(waiting.pop())
            heard = wait([worker.pipe for worker in running], timeout=1)
            for at, worker in enumerate(running):
                if worker.pipe in heard:
                    try:
                        outcome = worker.pipe.recv()
                    except (EOFError, ConnectionResetError):
                        worker.process.join()
                        if worker.input is None:
                            raise RuntimeError(
                                "a worker does not start: run one input by hand"
                            ) from None
                        code = worker.process.exitcode or 0
                        end = "signal" if code < 0 else "traceback"
                        yield Outcome(*worker.input, end, f"the process ended with code {code}")
                        running[at] = Worker(folder)
                        continue
                    if not worker.ready:
                        worker.ready = True
                    elif worker.input is not None:
                        done, worker.input = worker.input, None
                        yield Outcome(*done, *outcome)
                elif worker.input and time.monotonic() - worker.begun > DEADLINE:
                    worker.stop()
                    yield Outcome(*worker.input, "hang", f"no answer in {DEADLINE:g} s")
                    running[at] = Worker(folder)
    finally:
        for worker in running:
            worker.stop()
        shutil.rmtree(folder, ignore_errors=True)


ENDS = ("refused", "accepted", "traceback", "hang", "signal")


def describe_outcomes(outcomes: Sequence[Outcome]) -> str:
    """Return in plain words what was covered: a line a class, and the sums."""
    counts = Counter((outcome.kind, outcome.end) for outcome in outcomes)
    kinds = list(dict.fromkeys(outcome.kind for outcome in outcomes))
    width = max(map(len, kinds), default=0)
    lines = [
        f"{'class of inputs':{width}}  inputs  refused in one line  accepted  "
        "tracebacks  hangs  signals"
    ]
    for kind in [*sorted(kinds), "all"]:
        n = [
            sum(
                count
                for (of, end), count in counts.items()
                if end == wanted and kind in (of, "all")
            )
            for wanted in ENDS
        ]
        lines.append(
            f"{kind:{width}}  {sum(n):6}  {n[0]:19}  {n[1]:8}  {n[2]:10}  {n[3]:5}  {n[4]:7}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str]) -> int:
    """Run fresh inputs of every class: `python -m tests.fuzz [INPUTS [SEED [CLASS]]]`."""
    from tests.fuzz.inputs import CLASSES

    n = int(arguments[0]) if arguments else 10_000
    seed = int(arguments[1]) if len(arguments) > 1 and arguments[1] else int(time.time())
    kinds = [kind for kind in CLASSES if len(arguments) < 3 or arguments[2] in kind]
    print(f"{n} damaged inputs, seed {seed}; the same again: make fuzz SEED={seed}", flush=True)
    inputs = [(kinds[i % len(kinds)], seed + i // len(kinds)) for i in range(n)]
    outcomes = list[Outcome]()
    for outcome in try_inputs(inputs, workers=min(2, os.cpu_count() or 1)):
        outcomes.append(outcome)
        if outcome.end not in ("refused", "accepted"):
            print(
                f"\n{outcome.end}: {outcome.kind}, seed {outcome.seed}\n{outcome.detail}",
                flush=True,
            )
        if len(outcomes) % 1000 == 0:
            print(f"{len(outcomes)} tried", file=sys.stderr, flush=True)
    print(f"\n{describe_outcomes(outcomes)}")
    bad = [outcome for outcome in outcomes if outcome.end not in ("refused", "accepted")]
    print(
        "every input was refused in one line or accepted"
        if not bad
        else f"{len(bad)} inputs broke it"
    )
    return bool(bad)
