"""Run the requests of a server on one scheduler, and hand what they yield to asyncio.

Each text is a job of the `Scheduler`: its loop is that of `start_generation`, in a thread of its
own, and all of them share forward passes. The threads put what they yield into an `EventInbox`,
from which the event loop takes it. Nothing else crosses between the two.

A text that is cancelled ends at its next forward pass. So does one whose client has gone.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

from tinyspec.decoding.streams import GrowingText
from tinyspec.decoding.trace import Origin
from tinyspec.errors import TinyspecError, suggest_nearest
from tinyspec.generation import (
    Generation,
    check_options,
    generate,
    prompt_ids,
    start_generation,
)
from tinyspec.lm.model import Model
from tinyspec.lm.policies import Policy
from tinyspec.lm.scheduler import Event, RequestCancelled, Scheduler, SharedPass, Ticket
from tinyspec.pairing import attach_head, find_head_card
from tinyspec.serve.api import (
    ApiError,
    Asked,
    Piece,
    ReplyWriter,
    explain,
    full_queue,
    unavailable,
)
from tinyspec.technique import Card, find_technique, load_techniques

METHOD = "suffix_decoding"  # of requests that name none: it needs no draft model
COPYING = "llma"  # of those that bring a prediction, if the server's method cannot copy from it
FIRST_BATCH = ("Once upon a time there was", "The first thing to know is", "He said that")
MAX_LIVE = 16  # texts that run at once: more rows in a pass cost almost as much as more passes
MAX_QUEUED = 64  # texts that wait for a place; one more is answered with 429
DRAIN_SECONDS = 30.0  # that running requests have to finish when the server stops
POLL_SECONDS = 0.05  # between two looks at whether they have

# ---------------------------------------------------------------------- metrics

METRICS = {
    "requests_total": ("counter", "Texts that have ended, by how."),
    "rejected_total": ("counter", "Requests that were answered with an error, by status."),
    "prompt_tokens_total": ("counter", "Tokens of the prompts of texts that have begun."),
    "tokens_total": ("counter", "Tokens that were generated."),
    "drafts_total": ("counter", "Rounds that verified a draft."),
    "draft_tokens_total": ("counter", "Draft tokens that were verified."),
    "accepted_tokens_total": ("counter", "Draft tokens that were accepted."),
    "accepted_at_position_total": ("counter", "The same, by position in the draft, from 1."),
    "passes_total": ("counter", "Forward passes that requests share, of all models."),
    "rows_total": ("counter", "Rows of these passes: positions that were computed."),
    "live": ("gauge", "Texts that run."),
    "queued": ("gauge", "Texts that wait for a place."),
}
LABELLED = ("rejected_total", "accepted_at_position_total")  # no line before they count
OUTCOMES = ("finished", "cancelled", "failed")


class Metrics:
    """Counters of a server. Threads may count at the same time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(
            {f'requests_total{{outcome="{o}"}}': 0 for o in OUTCOMES}
        )

    def add(self, label: str = "", **counts: int) -> None:
        """Add to counters of `METRICS`, by name.

        label  such as outcome="finished"
        """
        with self._lock:
            for name, n in counts.items():
                self._counts[f"{name}{{{label}}}" if label else name] += n

    def write_text(self, gauges: Mapping[str, int]) -> str:
        """Return all metrics in the text format of Prometheus."""
        lines = list[str]()
        with self._lock:
            counts = {**self._counts, **gauges}
        for name, (kind, help) in METRICS.items():
            lines += [f"# HELP tinyspec_{name} {help}", f"# TYPE tinyspec_{name} {kind}"]
            found = sorted(one for one in counts if one.partition("{")[0] == name)
            lines += [f"tinyspec_{one} {counts[one]}" for one in found]
            if not found and name not in LABELLED:
                lines.append(f"tinyspec_{name} 0")
        return "\n".join(lines) + "\n"


class PassCounter(deque[SharedPass]):
    """A pass log that counts passes and rows, and keeps none of them."""

    def __init__(self, metrics: Metrics):
        super().__init__(maxlen=0)
        self.metrics = metrics

    def append(self, entry: SharedPass, /) -> None:
        self.metrics.add(passes_total=1, rows_total=sum(entry.rows))


# ---------------------------------------------------------------------- the bridge


@dataclass(frozen=True)
class Started:
    """Yielded by a text when its prompt was read: nothing is wrong with its arguments."""


class EventInbox(SimpleQueue[Event]):
    """What texts yield: threads put it in, and one event loop takes it out.

    It is made in the event loop. What comes after the loop has ended is dropped.
    """

    def __init__(self, metrics: Metrics):
        self.metrics, self.loop = metrics, asyncio.get_running_loop()
        self.arrived: asyncio.Queue[Event] = asyncio.Queue()

    def put(self, item: Event, block: bool = True, timeout: float | None = None) -> None:
        """Put an event in, from any thread. It never blocks."""
        if item.is_end:
            error = item.ticket.error
            cancelled = isinstance(error, RequestCancelled)
            outcome = "cancelled" if cancelled else "finished" if error is None else "failed"
            self.metrics.add(f'outcome="{outcome}"', requests_total=1)
        with suppress(RuntimeError):  # the loop has ended
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, item)


def decode_text(
    model: Model,
    ids: list[int],
    options: Mapping[str, Any],
    metrics: Metrics,
    in_pieces: bool,
    scheduler: Scheduler,
) -> "Iterator[Started | Piece | Generation]":
    """Decode one text as a job of the scheduler. Yield its pieces, and in the end its result.

    in_pieces  of a text that nobody streams, only the result is yielded: each item wakes the
               event loop, which takes time from the forward passes
    """
    running = start_generation(model, ids, scheduler=scheduler, **options)
    metrics.add(prompt_tokens_total=len(ids))
    if in_pieces:
        yield Started()
    decoder = running.decoder
    growing = GrowingText(decoder.stop, model.tokenizer.stream())
    last: Origin = "plain"
    for _ in running:
        entry = running.trace.rounds[-1]
        drafted = len(entry.probe) - sum(entry.probe)
        metrics.add(
            tokens_total=len(entry.emitted),
            drafts_total=int(drafted > 0),
            draft_tokens_total=drafted,
            accepted_tokens_total=len(entry.path),
        )
        for position in range(1, len(entry.path) + 1):
            metrics.add(f'position="{position}"', accepted_at_position_total=1)
        if not in_pieces:
            continue
        parts = list[tuple[str, Origin]]()
        origins: tuple[Any, ...] = tuple(entry.origins)
        for n, (token, last) in enumerate(zip(entry.emitted, origins, strict=True), 1):
            is_finished = bool(decoder.finished) and n == len(entry.emitted)
            parts.append((growing.push([token], is_finished), last))
        logprobs = running.logprobs[len(running.logprobs) - len(entry.emitted) :]
        yield Piece(parts, tuple(entry.emitted), logprobs, origins)
    if in_pieces:
        yield Piece([(growing.flush(), last)], (), [], ())
    yield running.result()


class RunningTexts:
    """The texts of one request, from when they are submitted."""

    def __init__(self, tickets: Sequence[Ticket[Any]], inbox: EventInbox, scheduler: Scheduler):
        self.tickets, self.inbox, self.scheduler = tickets, inbox, scheduler
        self._index = {ticket.number: index for index, ticket in enumerate(tickets)}

    def cancel(self) -> None:
        """End all at their next forward pass."""
        self.scheduler.cancel(*self.tickets)

    async def read(self) -> AsyncIterator[tuple[int, Started | Piece | Generation]]:
        """Yield (index of the text, what it yielded) until all have ended.

        The first failure ends all, and is raised here.
        """
        left = len(self.tickets)
        while left:
            event = await self.inbox.arrived.get()
            if not event.is_end:
                yield self._index[event.ticket.number], event.item
            elif event.ticket.error is not None:
                self.cancel()
                raise event.ticket.error
            left -= event.is_end


# ---------------------------------------------------------------------- the engine


@dataclass
class ServingEngine:
    """A model with its draft models, and what it is served with.

    drafts      loaded draft models; None: the method's choice, as in `start_generation`
    method      of a request that names none; knobs: its knobs; head: its trained head
    max_live    texts that run at once
    max_queued  texts that wait for a place
    max_slots   positions of the cache that running texts may reserve together; None: no limit
    """

    model: Model
    drafts: Sequence[Model] | None = None
    method: str = METHOD
    knobs: Mapping[str, Any] = field(default_factory=dict)
    policy: Policy | None = None
    max_live: int = MAX_LIVE
    max_queued: int = MAX_QUEUED
    max_slots: int | None = None
    is_draining: bool = False

    def __post_init__(self) -> None:
        if not self.model.has_tokenizer:
            raise TinyspecError(f"{self.model.name} has no tokenizer: serve a model that has one")
        self.metrics, self.started = Metrics(), int(time.time())
        self.scheduler = Scheduler(
            self.policy, max_live=self.max_live, max_slots=self.max_slots, log_size=0
        )
        self.scheduler.pass_log = PassCounter(self.metrics)
        card = self._find_card(self.method)
        check_options(method=card.name, **self.knobs)
        head = self.knobs.get("head")
        attach_head(self.model, find_head_card(card, head), head)

    def run_first_batch(self) -> None:
        """Run a short batch, so that a method measures its models before any request waits.

        It keeps what it measures, for each pair of models (`find_profile`).
        """
        draft = self.drafts and list(self.drafts)
        options = {"method": self.method, "draft": draft, "max_new_tokens": 4, **self.knobs}
        generate(self.model, list(FIRST_BATCH), **options)

    @property
    def name(self) -> str:
        """Return the name under which the model is served."""
        return self.model.name

    def list_methods(self) -> list[str]:
        """Return the methods that a request may name.

        Left out are those that need repeated layers, if the model has none, and those that must
        measure while all requests wait. Whether one lacks a head, a draft model or a knob is known
        only when it is started.
        """
        own, repeats = find_technique(self.method).name, self.model.config.repeat > 1
        return [
            name
            for name, card in load_techniques().items()
            if _is_served(card)
            and (repeats or not card.cyclic)
            and (name == own or not _measures_models(card, {"table": "given"}))
        ]

    def _find_card(self, method: str) -> Card:
        """Return a method's card. Raises TinyspecError unless it can be served."""
        card = find_technique(method)
        if card.kind == "policy":
            raise TinyspecError(
                f"{method} is a policy, no method: give it as serve --policy {method}"
            )
        if not _is_served(card):
            raise TinyspecError(
                f"{method} does not extend one text, so it cannot share passes: "
                f"{suggest_nearest(method, self.list_methods())}"
            )
        return card

    def prepare(self, asked: Asked) -> tuple[list[list[int]], dict[str, Any]]:
        """Return the prompts as token ids, and the options of `start_generation`.

        It runs in a thread, but a text that is encoded still holds up all other clients, by
        Python's lock. So a text that cannot fit is refused before. Raises ApiError.
        """
        options = dict(asked.options)
        try:
            method = options.get("method") or self._choose_method(asked)
            options |= self._read_method(method, options.pop("knobs"), asked.draft)
            check_options(**options)
            self._check_sizes(asked)
            prompts = [prompt_ids(self.model, prompt) for prompt in asked.prompts]
            texts = options.get("references", ())
            options["references"] = [self.model.tokenizer.encode(text) for text in texts]
        except TinyspecError as error:
            raise explain(error) from error
        card = find_technique(options["method"])
        finds_own = asked.draft is None and card.has_own_draft
        options["draft"] = None if finds_own else self._find_drafts(asked.draft)
        for prompt in prompts:
            self._check_ids(prompt)
        return prompts, options

    def _choose_method(self, asked: Asked) -> str:
        """Return the method of a request that names none."""
        can_copy = find_technique(self.method).copies
        return COPYING if "references" in asked.options and not can_copy else self.method

    def _read_method(
        self, method: str, knobs: Mapping[str, Any], draft: str | None
    ) -> dict[str, Any]:
        """Return a method, its knobs and its head. Raises ApiError for what it does not have.

        A head is the operator's: a request names no file. So is what has to be measured while all
        requests wait: the server's own method, with its own knobs and draft.
        """
        try:
            card = self._find_card(method)
        except TinyspecError as error:
            param, code = "tinyspec.method", "unknown_method"
            raise ApiError(str(error), param=param, code=code) from error
        is_own = card.name == self._find_card(self.method).name
        own = dict(self.knobs) if is_own else {}
        head = own.pop("head", None)
        every = {**own, **knobs}
        try:
            settings = card.settings(every)  # only the method's knobs, so no other argument
        except TinyspecError as error:
            raise ApiError(str(error), param="tinyspec.knobs") from error
        has_own_draft = draft in (None, *(one.name for one in (self.drafts or ())[:1]))
        is_servers = is_own and has_own_draft and settings == card.settings(own)
        if _measures_models(card, settings) and not is_servers:
            remedy = (
                "leave its knobs and draft out"
                if is_own
                else f"serve the model with --method {card.name}"
            )
            if "table" in settings:
                remedy += ", or give its knob table"
            raise ApiError(
                f"{card.name} measures its models while all requests wait, which no request may "
                f"begin: {remedy}",
                param="tinyspec.method",
            )
        return {**every, "method": card.name, "head": head}

    def _find_drafts(self, name: str | None) -> list[Model] | None:
        """Return the draft models of a request, all or the one that it names."""
        if name is None:
            return list(self.drafts) if self.drafts else None
        found = [draft for draft in self.drafts or () if draft.name == name]
        if not found:
            names = ", ".join(draft.name for draft in self.drafts or ()) or "none"
            message = f"there is no draft model '{name}' here; this server has: {names}"
            raise ApiError(message, param="tinyspec.draft", code="model_not_found")
        return found

    def _check_sizes(self, asked: Asked) -> None:
        """Raise ApiError for a text that cannot fit into the context, whatever its tokens are."""
        texts = [("prediction", text) for text in asked.options.get("references", ())]
        if asked.is_chat:
            words = (word for message in asked.prompts[0] for word in message.values())
            texts.append(("messages", "".join(words)))
        else:
            texts += [("prompt", one) for one in asked.prompts if isinstance(one, str)]
        positions = self.model.config.max_positions
        most = positions * self.model.tokenizer.longest_token
        for field_name, text in texts:
            if (size := len(text.encode())) > most:
                raise ApiError(
                    f"{field_name} has {size} bytes, and the context of {self.name} holds at most "
                    f"{most}, in {positions} tokens: shorten it",
                    param=field_name,
                    code="context_length_exceeded",
                )

    def _check_ids(self, prompt: Sequence[int]) -> None:
        """Raise ApiError unless a prompt can be read and leaves room for a token."""
        config = self.model.config
        if not prompt:
            raise ApiError("the prompt is empty: give at least one token", param="prompt")
        if wrong := [token for token in prompt if not 0 <= token < config.vocab_size]:
            raise ApiError(
                f"token id {wrong[0]} is outside the vocabulary of {config.vocab_size}",
                param="prompt",
            )
        if len(prompt) >= config.max_positions:
            raise ApiError(
                f"the prompt has {len(prompt)} tokens, and the context of {self.name} holds "
                f"{config.max_positions}, the reply's among them: shorten it",
                param="prompt",
                code="context_length_exceeded",
            )

    def submit(
        self, prompts: Sequence[list[int]], options: Mapping[str, Any], in_pieces: bool = True
    ) -> RunningTexts:
        """Begin texts, in the event loop. Raises ApiError 429 if too many wait, 503 at the end.

        Text i has seed + i.
        """
        if self.is_draining:
            raise unavailable("the server stops: it takes no more requests")
        if len(prompts) > self.max_live + self.max_queued:
            raise ApiError(
                f"there are {len(prompts)} prompts, and the server holds {self.max_live} that run "
                f"and {self.max_queued} that wait: send fewer in a request",
                param="prompt",
            )
        inbox, tickets = EventInbox(self.metrics), list[Ticket[Any]]()
        limit, budget = self.model.config.max_positions, options["max_new_tokens"]
        with self.scheduler.together():
            busy = self.scheduler.live + self.scheduler.queued
            if busy + len(prompts) > self.max_live + self.max_queued:
                raise full_queue(self.scheduler.live, self.scheduler.queued)
            slots = [min(len(ids) + budget, limit) for ids in prompts]
            if self.max_slots is not None and max(slots) > self.max_slots:
                raise ApiError(
                    f"the request needs {max(slots)} positions of the cache, and all requests "
                    f"together have {self.max_slots}: shorten it",
                    code="context_length_exceeded",
                )
            for i, ids in enumerate(prompts):
                own = {**options, "seed": options["seed"] + i}
                job = partial(decode_text, self.model, ids, own, self.metrics, in_pieces)
                tickets.append(self.scheduler.submit(job, slots=slots[i], events=inbox))
        return RunningTexts(tickets, inbox, self.scheduler)

    def make_writer(
        self, asked: Asked, prompts: Sequence[list[int]], options: Mapping[str, Any]
    ) -> ReplyWriter:
        """Return what writes the reply to a request."""
        n_tokens = sum(len(prompt) for prompt in prompts)
        return ReplyWriter(asked, self.name, options["method"], self.model.tokenizer, n_tokens)

    def write_metrics(self) -> str:
        """Return the metrics as text."""
        gauges = {"live": self.scheduler.live, "queued": self.scheduler.queued}
        return self.metrics.write_text(gauges)

    # ------------------------------------------------------------------ the end

    async def drain(self, seconds: float = DRAIN_SECONDS) -> None:
        """Take no more requests, wait until those that run have finished, and cut what is left."""
        self.is_draining = True
        deadline = time.monotonic() + seconds
        while self.scheduler.live or self.scheduler.queued:
            if time.monotonic() >= deadline:
                break
            await asyncio.sleep(POLL_SECONDS)
        await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Cancel all texts, and take no more."""
        self.is_draining = True
        self.scheduler.close()


def _is_served(card: Card) -> bool:
    """Return whether requests may use a method: it extends one text, and needs no translator."""
    return card.kind == "decoder" and not card.fills_masks


def _measures_models(card: Card, settings: Mapping[str, Any]) -> bool:
    """Return whether a method calls `find_profile`, with these values of its knobs.

    Such a method decides with its batch, and has a knob for the longest draft that is measured. A
    table of lengths, if it has that knob too, takes the place of what is measured.
    """
    knobs = {knob.name for knob in card.knobs}
    has_table = "table" in knobs and settings["table"]
    return card.of_batch and "longest" in knobs and not has_table
