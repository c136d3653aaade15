"""Run a technique of ours as an arm: a program that writes the tokens of a job and is timed.

`peers.py` and `llamacpp.py` have the arms that run other programs.

Two spans are timed for every request. `prefill` ends when the prompt without its last token has
been read. `decode` lasts from there until the last token is known. A peer that cannot stop there
ends its prefill with its first tokens. These tokens are not counted as made in `decode`. Tokens
are counted from the ids that came back, by one counter for all arms.
"""

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import torch

from tinyspec import models
from tinyspec.bench.plan import PLAIN, ArmSpec, BenchSettings
from tinyspec.bench.stores import prepare_arm
from tinyspec.bench.tasks import Job, choose_items, list_jobs
from tinyspec.decoding.decode import Drafter
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, decode, token_origins
from tinyspec.generation import start_generation
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.pairing import Draft, make_draft
from tinyspec.technique import Request, find_technique

Clock = Callable[[], float]


class ArmOutput(NamedTuple):
    """The outcome of one job: seconds, ids, and counts. A count is None if the arm cannot tell it.

    calls        rounds: forward passes of the target after the prefill
    draft_calls  forward passes of a draft model
    nodes        draft tokens that were verified in those passes
    accepted     draft tokens that were accepted
    silent       rounds without a recovered or bonus token, because the stop cut it off
    truncated    tokens that were decided and cut off by the stop
    row_layers   (position, layer) evaluations of the target
    early        ids that were known when `prefill` ended: `decode` is the time of the others
    stopped      rounds in which a draft token was rejected and no sibling was accepted
    state        bytes of what the drafter keeps of texts (tries, automata), as these report them;
                 None: none of them reports its size
    held         tokens of the texts that it keeps
    first        seconds until the first new token was known, from the start of `prefill`
    drafting     seconds of `decode` in which the drafter proposed or observed; None on a device,
                 whose work goes on after the call
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
    first: float | None = None
    drafting: float | None = None


class Arm(Protocol):
    """A program that is timed. `run` may be called any number of times; its calls are independent.

    label  its name in tables and files
    knobs  the value of every knob that it runs with
    """

    @property
    def label(self) -> str: ...

    @property
    def knobs(self) -> Mapping[str, Any]: ...

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """Write `job.tokens` new ids. `seed` matters only if the temperature is above 0."""
        ...

    def close(self) -> None:
        """Free what was loaded."""


class TechniqueArm:
    """One of our techniques on our model.

    label  its name in tables and files, if that is not its name and knobs
    knobs  what the newest request ran with; empty before the first
    """

    def __init__(
        self,
        spec: ArmSpec,
        model: Model,
        settings: BenchSettings,
        draft: Draft = None,
        label: str = "",
    ):
        card = find_technique(spec.name)
        self.label, self.draft = label or spec.label, None if card.has_own_draft else draft
        self.base, self.persistent = model, card.persistent
        self.model, self.round, self.held = disable_eos(model), -1, 0
        self.knobs: Mapping[str, Any] = {}
        self.options: dict[str, Any] = {
            "method": spec.name,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            **prepare_arm(spec, model, self.draft, settings).knobs,
            **dict(spec.knobs),
        }

    def run(self, job: Job, seed: int, clock: Clock) -> ArmOutput:
        """Decode without making text or log-probabilities.

        A persistent technique remembers the requests of its round (`seed`). A new round asks the
        same again, so the technique begins it with nothing.
        """
        if self.persistent and seed != self.round:
            self.model, self.round, self.held = disable_eos(self.base), seed, 0
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
        first = None
        with time_drafter(decoder.drafter, clock) as spans:
            for round in decoder.run(rng):
                if first is None:
                    wait()
                    first = clock() - begun
                stats.count(round)
                silent += len(round.tokens) == len(round.verdict.accepted)
                truncated += round.truncated
                stopped += "recovered" in token_origins(round)
        wait()
        done = clock()
        ids, state = tuple(decoder.new), count_drafter_bytes(decoder.drafter)
        self.held = len(decoder.context) + (self.held if self.persistent else 0)
        decoder.end()
        self.knobs = running.knobs
        return ArmOutput(
            prefill=read - begun,
            decode=done - read,
            ids=ids,
            calls=stats.target_calls,
            draft_calls=stats.draft_calls,
            nodes=stats.drafted,
            accepted=stats.accepted,
            silent=silent,
            truncated=truncated,
            row_layers=stats.row_layers,
            stopped=stopped,
            state=state,
            held=None if state is None else self.held,
            first=first,
            drafting=sum(spans) if self.model.device.type == "cpu" else None,
        )

    def close(self) -> None:
        return None


def decode_to_length(
    model: Model,
    ids: Sequence[int],
    tokens: int,
    method: str = PLAIN,
    references: Sequence[Sequence[int]] = (),
    **knobs: Any,
) -> tuple[list[int], Statistics]:
    """Decode greedily. Returns exactly `tokens` new ids, and what was counted."""
    forward_log: list[ForwardRecord] = []
    request = Request(
        model.session(forward_log),
        sampling=SamplingParams(temperature=0.0),
        stop=StoppingCriteria(max_new_tokens=tokens),
        references=references,
        positions=model.config.max_positions,
        forward_log=forward_log,
    )
    return decode(find_technique(method).make(request, **knobs), ids, Seeded(0))


@contextmanager
def time_drafter(drafter: Drafter, clock: Clock) -> Iterator[list[float]]:
    """Time a drafter: yield a list that gets the seconds of each `propose` and `observe`."""
    spans, names = list[float](), ("propose", "observe")

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any) -> Any:
            begun = clock()
            made = call(*given)
            spans.append(clock() - begun)
            return made

        return run

    for name in names:
        setattr(drafter, name, timed(getattr(drafter, name)))
    try:
        yield spans
    finally:
        for name in names:
            delattr(drafter, name)


def count_drafter_bytes(drafter: Any) -> int | None:
    """Return the bytes of all structures of a drafter that report `bytes`; None if none does."""
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


def disable_eos(model: Model) -> Model:
    """Return the same model without end-of-text tokens: every answer has the length asked for."""
    # Packing empties the old weights, so it happens once, before the model is copied.
    twin = copy.copy(model.pack_weights())
    twin.config = replace(model.config, eos=())
    return twin


def make_synchronizer(device: torch.device) -> Callable[[], None]:
    """Return what to call before a clock is read: it waits until a CUDA device has finished."""
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def check_token_balance(made: ArmOutput, job: Job, label: str) -> None:
    """Raise RuntimeError unless the counts of a job add up.

    Every arm writes as many tokens as were asked for. Each is an accepted draft token or the
    recovered or bonus token of its round:

        tokens = accepted + rounds - silent        after the cut

    A benchmark that breaks this counts a bonus token twice or not at all, or tokens that were cut
    off. Its tau would be wrong.
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
            f"{label}: the books of {job.key} do not balance: {tokens} tokens, but "
            f"{made.accepted} accepted + {made.calls} rounds - {made.silent} without a token of "
            "their own"
        )


def collect_garbage() -> None:
    """Collect garbage now, so that it is not collected while an arm is timed."""
    gc.collect()


def load_arm_models(
    settings: BenchSettings, any_method: bool = False
) -> tuple[Model, list[Model] | None]:
    """Return the model, and its draft models if an arm needs them.

    any_method  load the draft models whether an arm needs them or not
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    cards = [find_technique(arm.name) for arm in settings.arms if not arm.is_peer]
    wanted = any_method or any(card.drafts or card.optional_draft for card in cards)
    model = models.load(settings.model, device=settings.device, dtype=settings.load_dtype)
    names = list_draft_names(settings, model)
    if not wanted or not names:
        return model, None
    return model, [
        make_draft(model, name)
        or models.load(name, device=settings.device, dtype=settings.load_dtype)
        for name in names
    ]


def list_draft_names(settings: BenchSettings, model: Model) -> list[str]:
    """Return the draft models of a run.

    They are those given, else those that the model's card names, else one of the zoo made for it.
    """
    if settings.draft is not None:
        return [name for name in settings.draft.split(",") if name]
    named = model.config.extra.get("draft") or models.find_drafts_of(settings.model)[:1]
    return [named] if isinstance(named, str) else list(named)


def make_technique_arms(settings: BenchSettings, model: Model, draft: Draft) -> list[Arm]:
    """Return our arms, plain decoding first. A wrong knob is reported now."""
    specs = [spec for spec in settings.arms if not spec.is_peer]
    for spec in specs:
        find_technique(spec.name).settings(spec.card_knobs)
    return [TechniqueArm(spec, model, settings, draft) for spec in specs]


def make_plain_decoder(model: Model, known: dict[str, list[int]]) -> Callable[[Job], list[int]]:
    """Return a function that answers jobs by plain greedy decoding.

    known  the answers so far; a new one is added
    """
    plain = TechniqueArm(ArmSpec(PLAIN), model, BenchSettings())

    def answer(job: Job) -> list[int]:
        if job.key not in known:
            known[job.key] = list(plain.run(job, 0, time.perf_counter).ids)
        return known[job.key]

    return answer


def ask_openings(model: Model, settings: BenchSettings, answers: dict[str, list[int]]) -> list[Job]:
    """Return the openings of the valid books as jobs.

    answers  gets plain greedy decoding's answer to each
    """
    answer = make_plain_decoder(model, answers)
    jobs = list_jobs(model, choose_items(("books",), settings.prompts), settings.tokens, answer)
    for job in jobs:
        answer(job)
    return jobs
