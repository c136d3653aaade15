"""Keep the samples of a run in a file. Whole turns are added, and none twice.

A turn is one job in one round, done by every arm. Only whole turns are written. So the arms of a
turn ran under the same load of the machine, and an interrupted run repeats the turn it was in.
Each sample has one key (task, prompt, turn of the conversation, arm, round). A second sample with
the same key is an error.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec.bench.harness import describe_difference, save_result
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError

VERSION = 1  # of the file
OLDER = 17, 20, 22  # columns of older files


class Sample(NamedTuple):
    """One request of one arm. Seconds and counts are those of `arms.ArmOutput`.

    tokens  counted from the ids
    timed   how many of them were made in `decode` seconds
    same    how many ids at the front equal plain greedy decoding's; None above temperature 0
    stopped, state, held, first, drafting  as in `arms.ArmOutput`; older files lack some of them
    read  tokens that were read in `prefill` seconds; older files do not have it
    """

    task: str
    prompt: str
    turn: int
    arm: str
    round: int
    prefill: float
    decode: float
    tokens: int
    timed: int
    calls: int
    draft_calls: int
    nodes: int | None
    accepted: int | None
    silent: int | None
    truncated: int | None
    row_layers: float | None
    same: int | None
    stopped: int | None = None
    state: int | None = None
    held: int | None = None
    read: int | None = None
    first: float | None = None
    drafting: float | None = None

    @property
    def job(self) -> str:
        """Return the key of its job."""
        return f"{self.task}/{self.prompt}/{self.turn}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.job, self.arm, self.round


class SampleBook:
    """All samples of a run, and what they depend on. Without `path` nothing is written."""

    def __init__(
        self,
        settings: BenchSettings,
        path: Path | None = None,
        stamp: Mapping[str, Any] | None = None,
    ):
        self.settings, self.path = settings, path
        # Command, commit, date and machine of every session that added samples.
        self.stamps: list[dict[str, Any]] = [dict(stamp or {})]
        self.samples: list[Sample] = []
        self.references: dict[str, list[int]] = {}
        # Per job: ids of its prompt, ids left out at the front, tokens to write, check sum.
        self.prompts: dict[str, list[int]] = {}
        self.skipped: list[str] = []
        self.rest: dict[str, Any] = {}  # what is measured once: curve, ceilings, memory
        self._keys: set[tuple[str, str, int]] = set()

    def add_turn(self, turn: Sequence[Sample]) -> None:
        """Add the samples of one turn, all or none. Raises ValueError if one is there already."""
        keys = [sample.key for sample in turn]
        if twice := sorted(k for k in keys if k in self._keys or keys.count(k) > 1):
            raise ValueError(f"counted twice: {twice[0]}")
        self._keys.update(keys)
        self.samples.extend(turn)

    def has_turn(self, job: Job, round: int, arms: Sequence[str]) -> bool:
        """Return whether this turn was done."""
        return all((job.key, arm, round) in self._keys for arm in arms)

    def check_prompts(self, jobs: Sequence[Job]) -> None:
        """Record the prompts. Raises TinyspecError if the file has another prompt of that name."""
        for job in jobs:
            asked = [
                len(job.ids),
                job.cropped,
                job.tokens,
                zlib.crc32(json.dumps(job.ids).encode()),
            ]
            if self.prompts.setdefault(job.key, asked) != asked:
                raise TinyspecError(
                    f"{self.path}: {job.key} is another prompt now (other data, model or "
                    "tokenizer): start anew"
                )

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the file. The newest stamp comes first."""
        return {
            **self.stamps[-1],
            "version": VERSION,
            "sittings": self.stamps,
            "settings": self.settings.as_dict(),
            "skipped": self.skipped,
            **self.rest,
            "prompts": self.prompts,
            "references": self.references,
            **self.list_samples(),
        }

    def list_samples(self) -> dict[str, list[Any]]:
        """Return the samples as a result has them, with the names of their columns."""
        rows = [list(sample) for sample in self.samples]
        return {"columns": list(Sample._fields), "samples": rows}

    def note_knobs(self, knobs: Mapping[str, Mapping[str, Any]]) -> None:
        """Record the knobs that each arm runs with.

        Raises TinyspecError if an arm would go on with other values than its samples have, or if
        the file has samples and does not tell their knobs.
        """
        if self.samples and "knobs" not in self.rest:
            raise TinyspecError(
                f"{self.path}: it does not tell the knobs that its samples were taken with, and "
                "defaults have changed since: start anew"
            )
        noted = self.rest.setdefault("knobs", {})
        for arm, now in knobs.items():
            then = noted.setdefault(arm, dict(now))
            if then != now:
                raise TinyspecError(
                    f"{self.path}: {arm} ran with other knobs ({describe_difference(then, now)}): "
                    "start anew"
                )

    def save(self) -> None:
        """Write the file, whole or not at all."""
        save_result(self.path, self.as_dict())

    @classmethod
    def open(cls, path: Path, stamp: Callable[[BenchSettings], Mapping[str, Any]]) -> "SampleBook":
        """Return the book of a file, to add samples to it.

        stamp  makes the new stamp from the settings found, which include the number of threads
        Raises TinyspecError if the file is not ours, is damaged, or is from another machine.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TinyspecError(f"{path}: not a result file ({error})") from error
        if not isinstance(found, dict) or found.get("version") != VERSION or "samples" not in found:
            raise TinyspecError(
                f"{path}: not a result file of `tinyspec bench`, or one of another version"
            )
        if found["columns"] not in [list(Sample._fields[:n]) for n in (None, *OLDER)]:
            raise TinyspecError(
                f"{path}: its samples have other columns: it is of another version; start anew"
            )
        book = cls(BenchSettings.from_dict(found["settings"]), path)
        now = stamp(book.settings)
        if found["machine"] != now["machine"]:
            difference = describe_difference(found["machine"], now["machine"])
            raise TinyspecError(f"{path} was begun on another machine ({difference})")
        book.stamps = [*found["sittings"], dict(now)]
        book.references, book.prompts = found["references"], found["prompts"]
        book.skipped = found["skipped"]
        try:
            book.add_turn([Sample(*row) for row in found["samples"]])
        except (TypeError, ValueError) as error:
            raise TinyspecError(f"{path}: damaged ({error}); start anew") from error
        known = {*cls(book.settings, None, found["sittings"][-1]).as_dict()}
        book.rest = {name: value for name, value in found.items() if name not in known}
        return book
