"""The samples of a run, as they are kept in its file: added whole turns at a time, and never twice.

A turn is one job in one round, done by every arm. Only whole turns are written, so the arms of a
turn always met the same mood of the machine, and a run that was interrupted repeats the turn it was
in. Each sample has one key (task, prompt, turn of the conversation, arm, round); a second one under
the same key is refused.
"""

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tinyspec.bench.harness import save_result
from tinyspec.bench.plan import BenchSettings
from tinyspec.bench.tasks import Job
from tinyspec.errors import TinyspecError

VERSION = 1  # of the file
OLDER = 17  # columns of files of before


class Sample(NamedTuple):
    """One request of one arm. Seconds and counts as `arms.ArmOutput` has them.

    tokens  counted from the ids
    timed   how many of them were made in `decode` seconds
    same    how many ids at the front are plain greedy decoding's; None at a temperature above 0
    stopped, state, held  as `arms.ArmOutput` has them; files of before do not have these columns
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

    @property
    def job(self) -> str:
        """The key of its job."""
        return f"{self.task}/{self.prompt}/{self.turn}"

    @property
    def key(self) -> tuple[str, str, int]:
        return self.job, self.arm, self.round


class SampleBook:
    """All samples of a run, with what they depend on; `path` None keeps them in memory alone."""

    def __init__(
        self,
        settings: BenchSettings,
        path: Path | None = None,
        stamp: Mapping[str, Any] | None = None,
    ):
        self.settings, self.path = settings, path
        self.stamps: list[dict[str, Any]] = [
            dict(stamp or {})
        ]  # command, commit, date, machine of every sitting
        self.samples: list[Sample] = []
        self.references: dict[str, list[int]] = {}
        self.prompts: dict[
            str, list[int]
        ] = {}  # job -> ids in its prompt, left out in front, wanted, and their check sum
        self.skipped: list[str] = []
        self.rest: dict[str, Any] = {}  # curve, ceilings, memory: whatever is measured once
        self._keys: set[tuple[str, str, int]] = set()

    def add(self, turn: Sequence[Sample]) -> None:
        """Enter the samples of one turn, all or none. ValueError for one that is there already."""
        keys = [sample.key for sample in turn]
        if len(set(keys)) < len(keys) or self._keys.intersection(keys):
            raise ValueError(
                f"counted twice: {sorted(k for k in keys if k in self._keys or keys.count(k) > 1)[0]}"
            )
        self._keys.update(keys)
        self.samples.extend(turn)

    def has(self, job: Job, round: int, arms: Sequence[str]) -> bool:
        """Whether this turn was done."""
        return all((job.key, arm, round) in self._keys for arm in arms)

    def expect(self, jobs: Sequence[Job]) -> None:
        """Note what is asked. TinyspecError where the file's samples answered another prompt of the
        same name.
        """
        for job in jobs:
            asked = [
                len(job.ids),
                job.cropped,
                job.tokens,
                zlib.crc32(json.dumps(job.ids).encode()),
            ]
            if self.prompts.setdefault(job.key, asked) != asked:
                raise TinyspecError(
                    f"{self.path}: {job.key} is another prompt now (other data, model or tokenizer): start anew"
                )

    def as_dict(self) -> dict[str, Any]:
        """What the file holds, the newest sitting's command, commit, date and machine first."""
        return {
            **self.stamps[-1],
            "version": VERSION,
            "sittings": self.stamps,
            "settings": self.settings.as_dict(),
            "skipped": self.skipped,
            **self.rest,
            "prompts": self.prompts,
            "references": self.references,
            "columns": list(Sample._fields),
            "samples": [list(sample) for sample in self.samples],
        }

    def save(self) -> None:
        """Write the file, whole or not at all."""
        if self.path is None:
            return
        save_result(self.path, self.as_dict())

    @classmethod
    def open(cls, path: Path, stamp: Callable[[BenchSettings], Mapping[str, Any]]) -> "SampleBook":
        """The book of a file, for another sitting, whose stamp may depend on the settings found
        (the number of threads).

        TinyspecError where the file is none of ours, is damaged, or was begun on another machine.
        """
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise TinyspecError(f"{path}: not a result file ({error})") from error
        if not isinstance(found, dict) or found.get("version") != VERSION or "samples" not in found:
            raise TinyspecError(
                f"{path}: not a result file of `tinyspec bench`, or one of another version"
            )
        if found["columns"] not in (list(Sample._fields), list(Sample._fields[:OLDER])):
            raise TinyspecError(
                f"{path}: its samples have other columns: it is of another version; start anew"
            )
        book = cls(BenchSettings.from_dict(found["settings"]), path)
        now = stamp(book.settings)
        if found["machine"] != now["machine"]:
            raise TinyspecError(
                f"{path} was begun on another machine ({_describe_difference(found['machine'], now['machine'])})"
            )
        book.stamps = [*found["sittings"], dict(now)]
        book.references, book.prompts, book.skipped = (
            found["references"],
            found["prompts"],
            found["skipped"],
        )
        try:
            book.add([Sample(*row) for row in found["samples"]])
        except (TypeError, ValueError) as error:
            raise TinyspecError(f"{path}: damaged ({error}); start anew") from error
        kept = {
            "version",
            "sittings",
            "settings",
            "skipped",
            "prompts",
            "references",
            "columns",
            "samples",
        }
        book.rest = {
            name: value
            for name, value in found.items()
            if name not in kept | set(found["sittings"][-1])
        }
        return book


def _describe_difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {a.get(name)}, now {b.get(name)}"
        for name in {**a, **b}
        if a.get(name) != b.get(name)
    )
