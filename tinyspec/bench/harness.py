"""Measure and save: interleave the arms of a run, take ratios of medians, and keep raw samples.

Machines are shared and noisy. Two arms that are timed one after the other meet different loads;
two that take turns meet the same. A result file contains the samples that its figures come from,
and a test recomputes them.
"""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median, mode
from typing import Any, TypeVar

import torch
from rich.console import Console
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.files import write_whole
from tinyspec.lm.checkpoint import hash_weights
from tinyspec.progress import progress_bar
from tinyspec.technique import json_number

T = TypeVar("T")
Arms = Mapping[str, Callable[[], Any]]


def time_interleaved(
    arms: Arms, rounds: int, *, warm: int = 1, tick: Callable[[], None] | None = None
) -> dict[str, list[float]]:
    """Return the seconds of each arm, `rounds` times. Arms take turns; every round reverses them.

    warm  runs of each arm before, which are not timed
    """
    names = list(arms)
    for _ in range(warm):
        for name in names:
            arms[name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            begin = time.perf_counter()
            arms[name]()
            samples[name].append(time.perf_counter() - begin)
            if tick:
                tick()
    return samples


def ratio_of_medians(samples: Mapping[str, Sequence[float]], slow: str, fast: str) -> float:
    """Return how many times as fast as `slow` `fast` is: the ratio of the medians.

    >>> ratio_of_medians({"a": [2.0, 9.0, 2.0], "b": [1.0, 1.0, 5.0]}, "a", "b")
    2.0
    """
    return median(samples[slow]) / median(samples[fast])


def find_quartiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the quartiles that are printed beside a median.

    >>> find_quartiles([1.0, 2.0, 3.0, 4.0, 5.0])
    (2.0, 4.0)
    """
    ordered = sorted(samples)
    last = len(ordered) - 1
    return ordered[round(last * 0.25)], ordered[round(last * 0.75)]


def describe_machine() -> dict[str, Any]:
    """Return what the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    for line in text.splitlines():
        if line.startswith("model name"):
            cpu = line.partition(":")[2].strip()
            break
    units = [
        name
        for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
        if f" {name} " in text.replace("\n", " ")
    ]
    return {
        "cpu": cpu,
        "units": units,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.system(),
    }


def describe_machines(results: dict[str, dict[str, Any]]) -> str:
    """Return where and when results were measured. Those that differ from most are named.

    >>> here = {"cpu": "Z", "units": [], "cores": 2, "threads": 2, "torch": "2"}
    >>> a = {"machine": here, "date": "5"}
    >>> describe_machines({"a": a, "b": {"machine": {**here, "threads": 1}, "date": "7"}, "c": a})
    '2 cores of Z, torch 2, 2 threads (b: 1), 5 to 7'
    >>> describe_machines({"a": a, "b": {"machine": {**here, "units": ["x"]}, "date": "5"}, "c": a})
    '2 cores of Z, torch 2 (b: 2 cores of Z with x, torch 2), 2 threads, 5'
    """
    each = {name: result["machine"] for name, result in results.items()}
    places = {
        name: f"{m['cores']} cores of {m['cpu']}{describe_units(m)}, torch {m['torch']}"
        for name, m in each.items()
    }
    dates = sorted({result["date"] for result in results.values()})
    threads = {name: m["threads"] for name, m in each.items()}
    span = " to ".join(dict.fromkeys((dates[0], dates[-1])))
    return ", ".join(
        [_describe_majority(places), _describe_majority(threads, unit=" threads"), span]
    )


def describe_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the entries in which two mappings differ, in words."""
    return ", ".join(
        f"{name} {a.get(name)}, now {b.get(name)}"
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    )


def describe_units(machine: Mapping[str, Any]) -> str:
    """Return " with avx2, ..." for the vector units of a machine."""
    return " with " + ", ".join(machine["units"]) if machine["units"] else ""


def _describe_majority(of: dict[str, Any], unit: str = "") -> str:
    """Return the value that most have, and in brackets those that have another."""
    most, others = mode(of.values()), dict[Any, list[str]]()
    for name, value in of.items():
        if value != most:
            others.setdefault(value, []).append(name)
    aside = "; ".join(f"{', '.join(names)}: {value}" for value, names in others.items())
    return f"{most}{unit}" + (f" ({aside})" if aside else "")


def name_dtype(dtype: torch.dtype) -> str:
    """Return the name of a dtype without "torch."."""
    return str(dtype).removeprefix("torch.")


def find_commit() -> str | None:
    """Return the commit of the source tree, with + if it was changed; None outside a checkout."""
    try:
        here = Path(__file__).parent
        known = ["git", "ls-files", "--error-unmatch", __file__]  # else it is another project's
        subprocess.run(known, cwd=here, capture_output=True, check=True)
        head = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True
        ).stdout
        dirty = subprocess.run(
            ["git", "status", "--porcelain", "-uno"], cwd=here, capture_output=True, text=True
        )
        return head.strip()[:12] + ("+" if dirty.stdout.strip() else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def stamp_result(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result together with its command, commit, date and machine."""
    command = f"tinyspec {shlex.join(sys.argv[1:])}"
    stamp = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "command": command,
        "commit": find_commit(),
        "date": stamp,
        "machine": describe_machine(),
        **figures,
    }


def record_knobs(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the knobs of a technique as a result has them.

    Infinity becomes a word. Of a file only the name is kept, because the folders of one machine
    mean nothing on another.

    >>> record_knobs({"gamma": 4, "threshold": float("inf")})
    {'gamma': 4, 'threshold': 'inf'}
    """
    return {
        name: Path(value).name
        if isinstance(value, str) and Path(value).is_file()
        else json_number(value)
        for name, value in knobs.items()
    }


def save_result(path: Path | None, result: Mapping[str, Any]) -> None:
    """Write a result file, whole or not at all. Without a path, nothing is written."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, dump_json(result).encode())


def identify_inputs(
    weights: Iterable[Mapping[str, Tensor]], texts: Iterable[Sequence[int]]
) -> list[str]:
    """Return a hash of each model's weights, and one of all texts.

    They stand among the settings of a result. A model or a text may change and keep its name; then
    --resume stops, and does not mix the samples of both.
    """
    ids = json.dumps([list(text) for text in texts]).encode()
    return [*map(hash_weights, weights), hashlib.blake2b(ids, digest_size=8).hexdigest()]


def read_unfinished(
    out: Path | None,
    resume: bool,
    command: str,
    settings: Mapping[str, Any],
    read: Callable[[dict[str, Any]], T],
    empty: T,
    is_timed: bool = True,
) -> T:
    """Return what `read` takes from the file that an interrupted run left.

    settings  what the file's own must equal: its "settings", or else its entries of these names
    empty     what is returned if nothing is resumed, or there is no file yet
    is_timed  whether figures depend on the machine; then it must be the same
    Raises TinyspecError if --out is missing, the file is another command's, settings differ, or it
    was begun on another machine.
    """
    if not resume:
        return empty
    if out is None:
        raise TinyspecError("--resume goes on with the file of --out: name it")
    if not out.exists():
        return empty
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
        known = dict(found.get("settings", found))
        kept = read(found)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise TinyspecError(
            f"{out} is no result of `tinyspec bench {command}` ({type(error).__name__}): "
            "name another"
        ) from error
    for key, value in settings.items():
        if known.get(key) != value:
            raise TinyspecError(
                f"{out} was made with {key} {known.get(key)}, not {value}: "
                "name another --out, or leave --resume"
            )
    machine = describe_machine()
    if is_timed and found.get("machine", machine) != machine:
        difference = describe_difference(found["machine"], machine)
        raise TinyspecError(
            f"{out} was begun on another machine ({difference}): name another --out, or leave "
            "--resume"
        )
    return kept


def dump_json(result: Mapping[str, Any]) -> str:
    """Return JSON with one line for each sample and each flat list, so that `git diff` shows it.

    >>> print(dump_json({"a": 1, "rows": [[1, 2], [3, 4]]}))
    {
     "a": 1,
     "rows": [
      [1, 2],
      [3, 4]
     ]
    }
    <BLANKLINE>
    """
    return _dump_value(result, 0) + "\n"


def _dump_value(value: Any, depth: int) -> str:
    flat = isinstance(value, (list, tuple)) and not any(
        isinstance(entry, (list, tuple, dict)) for entry in value
    )
    if not isinstance(value, (list, tuple, Mapping)) or flat or not value:
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        opening, closing = "{}"
        inside = [
            f"{json.dumps(str(name), ensure_ascii=False)}: {_dump_value(entry, depth + 1)}"
            for name, entry in value.items()
        ]
    else:
        opening, closing = "[]"
        inside = [_dump_value(entry, depth + 1) for entry in value]
    lead = "\n" + " " * (depth + 1)
    return opening + lead + f",{lead}".join(inside) + lead[:-1] + closing


@contextmanager
def show_progress_bar(title: str, total: int, quiet: bool = False) -> Iterator[Callable[[], None]]:
    """Show a bar with the time left on stderr. Yields the function that moves it on by one."""
    bar = progress_bar(None if quiet else Console(stderr=True))
    with bar:
        task = bar.add_task(title, total=total)
        yield lambda: bar.advance(task)
