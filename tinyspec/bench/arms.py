"""An arm: whoever is asked for the tokens of a job and is timed. Here are ours; `peers.py` and
`llamacpp.py` have the others.

Two spans are timed for every request. `prefill` lasts until the prompt but for its last token has
been read, `decode` from there until the last token is known. A peer that cannot be asked to stop
reading there ends its prefill with its first tokens, and these are then not counted as made in
`decode`. Tokens are counted from the ids that came back, by one counter for all arms.
"""

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from tinyspec import models
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.stores import prepare_arm
from tinyspec.bench.tasks import Job
from tinyspec.decoding.trace import Statistics, token_origins
from tinyspec.generation import start_generation
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft
from tinyspec.technique import find_technique

Clock = Callable[[], float]


class ArmOutput(NamedTuple):
    """What an arm did for one job. Seconds, ids, and counts; a count is None where the arm cannot
    tell.

    calls        rounds: forwards of the target after the prefill
    draft_calls  forwards of a draft model
    nodes        tokens that were proposed, and verified in those calls
    accepted     proposed tokens that were kept
    silent       rounds that kept no token of their own behind the accepted ones (the stop cut it
                 off)
    truncated    tokens that were decided and cut off by the stop
    row_layers   (row, layer) evaluations of the target
    early        ids that were known when `prefill` ended: `decode` is the time of the others
    stopped      rounds in which a guess was refused and none beside it was accepted
    state        bytes of what the drafter keeps of texts (tries, automata), as they say themselves;
                 None: nothing says so
    held         tokens of the texts that it keeps
    """

    prefill: float
    decode: float
    ids: tuple[int, ...]
    calls: int
    draft_calls: int = 0
    nodes: int | None = None
    accepted: int | None = None
    silent: int | None = None
    truncated: int | None = None
    row_layers: float | None = None
    early: int = 0
    stopped: int | None = None
    state: int | None = None
    held: int | None = None


class Arm(Protocol):
    """One contestant. `run` may be called any number of times, and owes nothing to earlier
    calls.
    """

    @property
    def label(self) -> str: ...

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """`job.tokens` new ids for the job; `seed` matters where the temperature is above 0."""
        ...

    def close(self) -> None:
        """Let go of what was loaded."""


class TechniqueArm:
    """One of our techniques on our model."""

    def __init__(self, spec: ArmSpec, model: Model, settings: BenchSettings, draft: Draft = None):
        self.label, self.draft = spec.label, draft
        self.base, self.persistent = model, find_technique(spec.name).persistent
        self.model, self.round, self.held = without_eos(model), -1, 0
        self.options: dict[str, Any] = {
            "method": spec.name,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            **prepare_arm(spec, model).knobs,
            **dict(spec.knobs),
        }

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """The bare loop: no text is made of the ids, and no log-probabilities.

        What a persistent technique remembers it may use for other requests of the same round
        (`seed`); a new round begins with nothing, for it asks the same again.
        """
        if self.persistent and seed != self.round:
            self.model, self.round, self.held = without_eos(self.base), seed, 0
        wait = make_synchronizer(self.model.device)
        begun = clock()
        running = start_generation(
            self.model,
            list(job.ids),
            draft=self.draft,
            max_new_tokens=job.tokens,
            seed=seed,
            **self.options,
        )
        decoder, rng, stats = running.decoder, running.rng, Statistics()
        wait()
        read = clock()
        silent = truncated = stopped = 0
        for round in decoder.run(rng):
            stats.count(round)
            silent += len(round.tokens) == len(round.verdict.accepted)
            truncated += round.truncated
            stopped += "recovered" in token_origins(round)
        wait()
        done = clock()
        ids, state = tuple(decoder.new), kept_bytes(decoder.drafter)
        self.held = len(decoder.context) + (self.held if self.persistent else 0)
        decoder.end()
        return ArmOutput(
            read - begun, done - read, ids, stats.target_calls, stats.draft_calls, stats.drafted, stats.accepted,
            silent, truncated, stats.row_layers, 0, stopped, state, None if state is None else self.held,
        )  # fmt: skip

    def close(self) -> None:
        return None


def kept_bytes(drafter: Any) -> int | None:
    """Bytes of all structures below a drafter that say how large they are (`bytes`); None where
    none does.
    """
    found, seen, todo = list[int](), set[int](), [drafter]
    while todo:
        thing = todo.pop()
        if id(thing) in seen or isinstance(thing, (Model, torch.Tensor)):
            continue
        seen.add(id(thing))
        size = (
            getattr(thing, "bytes", None) if type(thing).__module__.startswith("tinyspec") else None
        )
        if isinstance(size, int):
            found.append(size)
        elif type(thing).__module__.startswith(("tinyspec.decoding", "tinyspec.speculative")):
            todo += vars(thing).values() if hasattr(thing, "__dict__") else ()
    return sum(found) if found else None


def without_eos(model: Model) -> Model:
    """The same model, for which no token ends a text: an answer is as long as it was asked to
    be.
    """
    twin = copy.copy(
        model.pack()
    )  # packing empties the old weights: once, and before there are two of it
    twin.config = replace(model.config, eos=())
    return twin


def make_synchronizer(device: torch.device) -> Callable[[], None]:
    """What to call before a clock is read: a CUDA device works on after the call that set it to
    work.
    """
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def check_token_balance(made: ArmOutput, job: Job, label: str) -> None:
    """Refuse books that do not add up: every arm made what was asked, and every token is accepted
    or a round's own.

    tokens = accepted + rounds - silent, after the cut. A benchmark that breaks this counts a bonus
    twice, or not at all, or tokens that were cut off, and its tau is worth nothing.
    """
    tokens = len(made.ids)
    if tokens != job.tokens:
        raise RuntimeError(
            f"{label} made {tokens} tokens for {job.key}, not the {job.tokens} that all arms make"
        )
    if made.accepted is None or made.silent is None:
        return
    if tokens != made.accepted + made.calls - made.silent:
        raise RuntimeError(
            f"{label}: the books of {job.key} do not balance: {tokens} tokens, but {made.accepted} accepted + "
            f"{made.calls} rounds - {made.silent} without a token of their own"
        )


def collect_garbage() -> None:
    """Collect garbage now, so that it is not collected inside somebody's time."""
    gc.collect()


def load_arm_models(
    settings: BenchSettings, any_method: bool = False
) -> tuple[Model, list[Model] | None]:
    """The model, and its draft models where an arm needs one and there is one; with `any_method`,
    wherever there is one.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    cards = [find_technique(arm.name) for arm in settings.arms if not arm.peer]
    wanted = any_method or any(card.drafts or card.optional_draft for card in cards)
    model = models.load(settings.model, device=settings.device, dtype=settings.dtype)
    names = draft_names(settings, model)
    if not wanted or not names:
        return model, None
    return model, [
        models.load(name, device=settings.device, dtype=settings.dtype) for name in names
    ]


def draft_names(settings: BenchSettings, model: Model) -> list[str]:
    """The draft models of a run: those given, else what the model's card names, else a draft of the
    zoo made for it.
    """
    if settings.draft is not None:
        return [name for name in settings.draft.split(",") if name]
    named = model.config.extra.get("draft") or models.find_drafts_of(settings.model)[:1]
    return [named] if isinstance(named, str) else list(named)


def own_arms(settings: BenchSettings, model: Model, draft: Draft) -> list[Arm]:
    """Our arms, plain decoding first; a knob that is wrong is said now."""
    specs = [spec for spec in settings.arms if not spec.peer]
    for spec in specs:
        find_technique(spec.name).settings(dict(spec.knobs))
    return [TechniqueArm(spec, model, settings, draft) for spec in specs]


def make_reference(
    model: Model, known: Mapping[str, Sequence[int]], keep: Callable[[str, list[int]], None]
) -> Any:
    """Plain greedy decoding's answer to a job: from `known`, else made now and handed to `keep`."""
    plain = TechniqueArm(ArmSpec(PLAIN), model, BenchSettings())

    def answer(job: Job) -> Sequence[int]:
        if job.key not in known:
            keep(job.key, list(plain.run(job, 0, time.perf_counter).ids))
        return known[job.key]

    return answer
