"""Describe a run of the harness: its arms, and every setting that a sample depends on.

An arm is written NAME or NAME:knob=value:knob=value. `autoregressive` is plain decoding. It takes
part in every run, and the others are measured against it. Two runs with equal settings may share
samples; --resume relies on that.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tinyspec.errors import TinyspecError, suggest_nearest

PLAIN = "autoregressive"
PEERS = ("transformers", "llama.cpp")
GROWING = ("rounds",)  # settings that a resumed run may enlarge: they add samples and change none


@dataclass(frozen=True)
class ArmSpec:
    """An arm by name, with its knobs in the order given.

    One name among them is no knob of a card: `head=FOLDER`, the trained head that it uses.
    """

    name: str
    knobs: tuple[tuple[str, Any], ...] = ()

    @property
    def card_knobs(self) -> dict[str, Any]:
        """Return the knobs without the head.

        >>> ArmSpec.parse("auto:k=8:head=smollm2-eagle").card_knobs
        {'k': 8}
        """
        return {name: value for name, value in self.knobs if name != "head"}

    @property
    def label(self) -> str:
        """Return its name in tables and files: the text that it is written as.

        >>> ArmSpec("llma", (("k", 8), ("own", False))).label
        'llma:k=8:own=false'
        """
        return ":".join(
            [self.name, *(f"{name}={format_knob(value)}" for name, value in self.knobs)]
        )

    @property
    def is_peer(self) -> bool:
        """Return whether it is another program."""
        return self.name in PEERS

    @classmethod
    def parse(cls, text: str) -> "ArmSpec":
        """Return the arm of a label. A value that reads as JSON is a number or a bool, else a text.

        >>> ArmSpec.parse("llma:k=8:own=false").knobs
        (('k', 8), ('own', False))
        """
        name, *pairs = text.strip().split(":")
        knobs = dict[str, Any]()
        for pair in pairs:
            knob, equals, value = pair.partition("=")
            if not (equals and knob and value):
                raise TinyspecError(
                    f"'{text.strip()}': '{pair}' is not knob=value; "
                    "write NAME:knob=value:knob=value"
                )
            if (knob := knob.strip().replace("-", "_")) in knobs:
                raise TinyspecError(f"'{text.strip()}': {knob} is given twice")
            knobs[knob] = _parse_value(value.strip())
        return cls(name, tuple(knobs.items()))


def _parse_value(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if value is None or isinstance(value, (bool, int, float)) else text


def format_knob(value: Any) -> str:
    """Return the value of a knob as an arm's name has it."""
    return value if isinstance(value, str) else json.dumps(value)


def read_arms(texts: Iterable[str]) -> list[ArmSpec]:
    """Return the arms of comma-separated lists, none twice.

    >>> [arm.label for arm in read_arms(["llma, speculative_decoding:gamma=2", "llma"])]
    ['llma', 'speculative_decoding:gamma=2']
    """
    parts = [part for text in texts for part in text.split(",") if part.strip()]
    return list(dict.fromkeys(ArmSpec.parse(part) for part in parts))


STORED = "stored"
"""The dtype of a run whose weights are as the model's file has them."""


@dataclass(frozen=True)
class BenchSettings:
    """Everything a sample depends on, beside the code and the machine.

    methods, peers  labels of arms
    tasks           as `tinyspec.bench.tasks.expand_tasks` gives them
    prompts         how many of each task, spread over it, where its entry gives no number
    tokens          new tokens of each answer; an end-of-text id ends nothing, so that all arms make
                    the same number
    until_eos       answers are as long as plain greedy decoding's up to its first end-of-text id,
                    `tokens` at most
    draft           the draft model, for arms that need one, or several as A,B; None: the one that
                    the model's card names
    dtype           of the weights; STORED: as the file has them, quantised or not
    threads         of this process, which every arm uses; None: torch's choice
    """

    model: str = "smollm2"
    draft: str | None = None
    dtype: str = "bfloat16"
    device: str = "cpu"
    threads: int | None = None
    methods: tuple[str, ...] = (PLAIN,)
    peers: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    prompts: int = 10
    tokens: int = 64
    until_eos: bool = False
    rounds: int = 3
    temperature: float = 0.0
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("prompts", 1), ("tokens", 1), ("rounds", 1)):
            if getattr(self, name) < low:
                raise TinyspecError(f"{name} is {getattr(self, name)}: it must be at least {low}")
        if unknown := next((a.name for a in read_arms(self.peers) if not a.is_peer), None):
            raise TinyspecError(f"there is no peer '{unknown}': {suggest_nearest(unknown, PEERS)}")

    @property
    def load_dtype(self) -> str | None:
        """Return the dtype that `models.load` is given."""
        return None if self.dtype == STORED else self.dtype

    @property
    def arms(self) -> list[ArmSpec]:
        """Return all arms, plain decoding first."""
        return list(
            dict.fromkeys([ArmSpec(PLAIN), *read_arms(self.methods), *read_arms(self.peers)])
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as a result file has them."""
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self).items()
        }

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> "BenchSettings":
        """Return the settings of a result file. Raises TinyspecError if their names differ."""
        names = {field.name for field in fields(cls)}
        if strange := sorted(names ^ set(given)):
            raise TinyspecError(
                f"the file's settings are of another version ({', '.join(strange)}): start anew"
            )
        values: dict[str, Any] = {
            name: tuple(v) if isinstance(v, list) else v for name, v in given.items()
        }
        return cls(**values)

    def enlarge(self, given: Mapping[str, Any]) -> "BenchSettings":
        """Return these settings with what the command line gave. Only more rounds are allowed.

        >>> BenchSettings(rounds=3).enlarge({"rounds": 5}).rounds
        5
        """
        wanted = replace(self, **given)
        for name, value in given.items():
            if name not in GROWING and value != getattr(self, name):
                raise TinyspecError(
                    f"--resume: the file's samples were taken with {name} "
                    f"{_format_setting(getattr(self, name))}, not {_format_setting(value)}; "
                    "leave it out, or start anew without --resume"
                )
        if wanted.rounds < self.rounds:
            raise TinyspecError(
                f"--resume: the file asks for {self.rounds} rounds; --rounds may only add to them"
            )
        return wanted


def _format_setting(value: Any) -> str:
    return (
        ",".join(map(str, value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else str(value)
    )
