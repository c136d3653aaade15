"""generate and stream: from a prompt to tokens, by any technique."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch

from tinyspec import models
from tinyspec.arguments import (
    Prompt,
    check_batch,
    check_budget,
    check_names,
    check_prompt,
    check_sampling,
    check_texts,
    is_batch,
    wrong_argument,
)
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.streams import DecodingBatch, GrowingText, StreamDecoder, decode_many
from tinyspec.decoding.trace import Statistics, Trace, compute_logprobs, compute_logprobs_on_device
from tinyspec.errors import TinyspecError, unwrap_rows
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.scheduler import RequestCancelled, Scheduler
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.notebook import render_generation
from tinyspec.pairing import Draft, Head, advised_knobs, attach_head, drafts_for, find_head_card
from tinyspec.technique import Card, Request, StreamRequest, find_technique

MAX_LIVE = 64  # rows of a batch that run at once: each has a thread, and a cache of its own

ModelName: TypeAlias = Model | str | Path
"""A loaded model, or the name or path of one; a name is loaded once and kept."""


@dataclass(repr=False)
class Generation:
    """The result for a prompt.

    `print` shows the text and a line of figures, a notebook also the colours of its tokens.

    text           the new text, up to a stop string, without special tokens
    tokens         the new ids; an end-of-text id or the token that completed a stop is the last
    logprobs       log p of each under the target's own distribution, before the sampling settings
    finish_reason  eos, stop, length, context or interrupted
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    stats: Statistics
    trace: Trace
    tokenizer: Tokenizer | None = field(default=None, compare=False, kw_only=True)

    def figures(self) -> str:
        """Return tokens, target calls, acceptance and time on one line."""
        return self.stats.describe(self.finish_reason)

    def __str__(self) -> str:
        return f"{self.text}\n{self.figures()}"

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"<{type(self).__name__} {text!r}: {self.figures()}>"

    def _repr_html_(self) -> str:
        return render_generation(self.text, self.trace, self.tokenizer, self.figures())


class GenerationRun:
    """A request that runs: iterate it for its rounds, then ask for the result.

    However it ends - by itself, by an exception, or because nobody asks for the rest - the target
    and the drafter are told, so that a drafter with a memory keeps of the request what it means to
    keep and nothing else.

    knobs  the value of every knob of the method: given, advised by the draft's card, or default
    """

    open = False

    def __init__(
        self,
        decoder: Decoder,
        model: Model,
        prompt: list[int],
        seed: int,
        knobs: Mapping[str, Any],
    ):
        self.decoder, self.model, self.rng, self.knobs = decoder, model, Seeded(seed), knobs
        self.stats, self.trace = Statistics(), Trace(list(prompt))
        self._logprobs: list[float] = []
        self._far: list[
            torch.Tensor
        ] = []  # log-probabilities that still lie on a device: read when they are asked for
        self.started, self.open = time.perf_counter(), True
        try:
            decoder.extend(prompt)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Round]:
        try:
            for round in self.decoder.run(self.rng):
                self.stats.count(round)
                self.trace.add(round)
                if round.scores.logits.device.type == "cpu":
                    self._logprobs += compute_logprobs(round)
                else:
                    self._far.append(compute_logprobs_on_device(round))
                yield round
        finally:  # also where the iterator is dropped half-way
            self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # one that was dropped before its first round
            self.close()

    @property
    def logprobs(self) -> list[float]:
        """Return log p of every token so far."""
        if self._far:
            self._logprobs += torch.cat(self._far).tolist()
            self._far = []
        return self._logprobs

    def close(self, reason: str | None = None) -> None:
        """End the request, with this reason where it is cut from outside.

        Its result can still be asked for.
        """
        if reason and not self.decoder.finished:
            self.decoder.finished = reason
        if self.open:
            self.open = False
            self.stats.seconds = time.perf_counter() - self.started
            self.decoder.end()

    @property
    def text(self) -> str:
        """Return the new text so far."""
        if isinstance(self.decoder, StreamDecoder):
            return self.decoder.text
        return self.decoder.stop.trim(_decode(self.model, self.decoder.new))

    def result(self) -> Generation:
        """Return the result, or what there is of it."""
        new = self.decoder.new
        reason = self.decoder.finished or "interrupted"
        tokenizer = self.model.tokenizer if self.model.has_tokenizer else None
        return Generation(
            self.text, new, self.logprobs, reason, self.stats, self.trace, tokenizer=tokenizer
        )


def start_generation(
    model: ModelName,
    prompt: Prompt,
    *,
    method: str = "autoregressive",
    draft: Draft = None,
    head: Head = None,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | Sequence[int]] | None = (),
    chat: bool = False,
    references: str | Sequence[str | Sequence[int]] = (),
    scheduler: Scheduler | None = None,
    **knobs: Any,
) -> GenerationRun:
    """Prepare a request. Raise TinyspecError for whatever is wrong with its arguments."""
    card, sampling, texts, stops = check_options(
        method=method,
        head=head,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=stop,
        chat=chat,
        references=references,
        **knobs,
    )
    prompt = check_prompt(prompt)
    model = load_model(model)
    head_card = find_head_card(card, head)
    drafts, model = drafts_for(model, card, draft), attach_head(model, head_card, head)
    knobs = card.settings({**advised_knobs(card, drafts), **knobs})
    ids = prompt_ids(model, prompt, chat)
    if not ids:
        raise TinyspecError("the prompt is empty: give at least one token")
    if len(ids) > model.config.max_positions:
        raise TinyspecError(
            f"the prompt has {len(ids)} tokens, the context of {model.name} "
            f"{model.config.max_positions}: shorten it"
        )
    forward_log: list[ForwardRecord] = []
    if card.kind == "streams":
        stopping = stopping_criteria(model, stops, max_new_tokens)
        asked = StreamRequest(model, prompt, chat, sampling, stopping, forward_log)
        streams = cast(Decoder, card.stream_decoder(asked, **knobs))  # it has a decoder's methods
        return GenerationRun(streams, model, ids, seed, knobs)
    request = Request(
        target=model.session(forward_log, scheduler),
        drafts=[d.session(forward_log, scheduler) for d in drafts],
        sampling=sampling,
        stop=stopping_criteria(model, stops, max_new_tokens),
        references=[
            model.tokenizer.encode(text) if isinstance(text, str) else text for text in texts
        ],
        positions=model.config.max_positions,
        draft_max_lengths=[d.config.max_positions for d in drafts],
        forward_log=forward_log,
        # In a batch the time of a pass is the others', too.
        clock=None if scheduler else time.perf_counter,
        batch_clock=time.perf_counter if scheduler else None,
        head="" if head_card is card else head_card.name,
        scheduler=scheduler,
    )
    return GenerationRun(card.make(request, **knobs), model, ids, seed, knobs)


def check_options(
    *,
    method: str = "autoregressive",
    draft: Draft = None,
    head: Head = None,
    max_new_tokens: int | None = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | Sequence[int]] | None = (),
    chat: bool = False,
    references: str | Sequence[str | Sequence[int]] = (),
    **knobs: Any,
) -> tuple[Card, SamplingParams, list[str | list[int]], list[str | list[int]]]:
    """Return the card, the sampling settings, the references and the stops that options name.

    Raises TinyspecError for whatever is wrong with them, whatever the model and the prompt are.
    """
    card = find_technique(method)
    check_names(card, knobs, start_generation.__kwdefaults__ or (), temperature)
    card.settings(knobs)
    check_budget(max_new_tokens, seed)
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    texts = check_texts("references", references, "['a text to copy from']")
    stops = check_texts("stop", stop, "['\\n', [198]]")
    if not isinstance(chat, bool):
        raise wrong_argument("chat", chat, "True or False")
    if card.fills_masks:
        raise TinyspecError(
            f"{card.name} drafts translations: use `tinyspec translate --method {card.name}`, or "
            "tinyspec.translate(model, source, method=...)"
        )
    if head is not None and card.trained is None and not card.optional_head:
        raise TinyspecError(
            f"{card.name} uses no trained head: leave head out, or use a method that does, such "
            "as medusa"
        )
    if texts and not card.copies:
        raise TinyspecError(
            f"{card.name} copies from no references: use a method that does, such as llma"
        )
    return card, SamplingParams(temperature, top_k, top_p, min_p, repetition_penalty), texts, stops


def load_model(model: ModelName) -> Model:
    """Return the model that was given, or the one of this name or path, loaded once and kept."""
    if isinstance(model, Model):
        return model
    if isinstance(model, Seq2Seq):
        raise TinyspecError(
            f"{model.name} is an encoder-decoder, which translates: use tinyspec.translate"
        )
    if isinstance(model, (str, Path)):
        return models.load_once(model)
    raise wrong_argument("model", model, "a name, a path, or what tinyspec.load returned")


def generate(
    model: ModelName, prompt: Prompt | Sequence[Prompt], **options: Any
) -> Generation | list[Generation]:
    """Extend a prompt. See `tinyspec.generate` for the options.

    A list of prompts runs as one ragged batch: row i uses seed + i and equals the row run alone
    with that seed; on a CPU in float32 and bfloat16 to the bit, for no row of the compiled
    transformer depends on what is computed beside it. Methods that decide the length of drafts for
    the whole batch (`bass`, `synergy`, `smartspec`, `tetris`) promise this at temperature 0. At
    most 64 rows run at once: when one ends, the next one begins.

    A row that fails ends itself alone. Raises BatchError when all rows have ended: its message
    names the first that failed (`prompt[2]: ...`), its `results` has what the others wrote.
    """
    if not is_batch(prompt):
        return _finish(start_generation(model, prompt, **options))  # type: ignore[arg-type]
    rows, model, seed = check_batch(prompt), load_model(model), options.pop("seed", 0)
    # What is wrong in every row names no row. Texts may be iterables that can be read once.
    card, _, texts, stops = check_options(seed=seed, **options)
    options |= {"references": texts, "stop": stops}
    drafts = drafts_for(model, card, options.get("draft"))
    options["draft"] = drafts or None  # loaded once, so that all rows share it and batch

    errors: dict[int, Exception] = {}

    def run_row(row: int, batch: DecodingBatch[Generation]) -> Iterator[Generation]:
        try:
            running = start_generation(
                model, rows[row], seed=seed + row, scheduler=batch.scheduler, **options
            )
            yield _finish(running)
        except RequestCancelled:  # the whole batch was
            raise
        except Exception as error:
            errors[row] = error

    jobs = [partial(run_row, row) for row in range(len(rows))]
    results = dict(decode_many(jobs, max_live=MAX_LIVE))
    return unwrap_rows("prompt", [results.get(row) for row in range(len(rows))], errors)


class TextStreamer:
    """The text of a request in pieces that may be shown.

    A piece never ends in half a character, or inside what may become a stop string.
    """

    def __init__(self, running: GenerationRun):
        self.running = running
        decoder, tokenizer = running.decoder, running.model.tokenizer
        self._growing = GrowingText(decoder.stop, tokenizer.stream())

    def __iter__(self) -> Iterator[str]:
        decoder, growing = self.running.decoder, self._growing
        for round in self.running:
            if isinstance(decoder, StreamDecoder):  # its streams hold back what may not be shown
                growing.text = decoder.text
                yield growing.rest()
            else:
                yield growing.push(round.tokens, bool(decoder.finished))
        if isinstance(decoder, StreamDecoder):  # only each stream ends at a stop, not the answer
            growing.text = decoder.text
            yield growing.rest()
        else:
            yield growing.flush()

    def rest(self) -> str:
        """Return the text that was held back."""
        return self._growing.rest()


def stream(model: ModelName, prompt: Prompt, **options: Any) -> Iterator[str]:
    """Yield the new text as it grows.

    A piece never ends in half a character, or inside what may become a stop string.
    """
    return (piece for piece in TextStreamer(start_generation(model, prompt, **options)) if piece)


def prompt_ids(model: Model, prompt: Prompt, chat: bool = False) -> list[int]:
    """Return the token ids of a prompt.

    A text begins with BOS where the model's config says so; chat messages follow the template; ids
    stay as they are.
    """
    if isinstance(prompt, str):
        if chat:
            return model.tokenizer.chat([{"role": "user", "content": prompt}])
        bos = [model.config.bos] if model.config.add_bos and model.config.bos is not None else []
        return bos + model.tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], Mapping):
        return model.tokenizer.chat(list(prompt))  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def stopping_criteria(
    model: Model, stop: str | Sequence[str | Sequence[int]], max_new_tokens: int | None
) -> StoppingCriteria:
    """Return the stop rules of a request: the model's end-of-text ids, `stop`, and the budget."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    strings = tuple(s for s in stops if isinstance(s, str))
    sequences = tuple(tuple(s) for s in stops if not isinstance(s, str))
    eos = frozenset(model.config.eos)
    if not strings:
        return StoppingCriteria(eos, (), sequences, max_new_tokens)
    tokenizer = model.tokenizer
    silent = tokenizer.special_ids.union(range(tokenizer.vocab_size, model.config.vocab_size))
    return StoppingCriteria(eos, strings, sequences, max_new_tokens, tokenizer.decode, silent)


def _finish(running: GenerationRun) -> Generation:
    """Run to the end. Ctrl-C keeps the text so far."""
    try:
        for _ in running:
            pass
    except KeyboardInterrupt:
        running.close("interrupted")
    return running.result()


def _decode(model: Model, ids: list[int]) -> str:
    return model.tokenizer.decode(ids) if model.has_tokenizer else ""
