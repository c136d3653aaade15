"""generate and stream: from a prompt to tokens, by any technique."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from tinyspec.decoding.chance import Seeded
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.sampling import Warp
from tinyspec.decoding.stop import Stop
from tinyspec.decoding.trace import Statistics, Trace
from tinyspec.errors import TinyspecError
from tinyspec.lm.feed import Call
from tinyspec.lm.gate import Gate, run_together
from tinyspec.lm.transformer import Model
from tinyspec.pairing import Draft, advised, drafts_for
from tinyspec.technique import Request, find

Prompt: TypeAlias = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass
class Generation:
    """What came of a prompt.

    text           the new text, up to a stop string, without special tokens
    tokens         the new ids; an end-of-text id or the token that completed a stop is the last
    logprobs       log p of each under the target's own law, before the warpers
    finish_reason  eos, stop, length, context or interrupted
    """

    text: str
    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    stats: Statistics
    trace: Trace = field(repr=False)


class Running:
    """One request under way: iterate it for its rounds, then ask for the result.

    However it ends - by itself, by an exception, or because nobody asks for the rest - the target and the drafter are told, so
    that a drafter with a memory keeps of the request what it means to keep and nothing else.
    """

    open = False

    def __init__(self, decoder: Decoder, model: Model, prompt: list[int], seed: int):
        self.decoder, self.model, self.chance = decoder, model, Seeded(seed)
        self.stats, self.trace = Statistics(), Trace(list(prompt))
        self._logprobs: list[float] = []
        self._far: list[torch.Tensor] = []  # log-probabilities that still lie on a device: read when they are asked for
        self.started, self.open = time.perf_counter(), True
        try:
            decoder.extend(prompt)
        except BaseException:
            self.close()
            raise

    def __iter__(self) -> Iterator[Round]:
        try:
            while not self.decoder.finished:
                round = self.decoder.step(self.chance)
                self.stats.count(round)
                self.trace.add(round)
                if round.scores.logits.device.type == "cpu":
                    self._logprobs += _logprobs(round)
                else:
                    self._far.append(_logprobs_there(round))
                yield round
        finally:  # also where the iterator is dropped half-way
            self.close()

    def __del__(self) -> None:
        with suppress(Exception):  # one that was dropped before its first round
            self.close()

    @property
    def logprobs(self) -> list[float]:
        """log p of every token so far."""
        if self._far:
            self._logprobs += torch.cat(self._far).tolist()
            self._far = []
        return self._logprobs

    def close(self, reason: str | None = None) -> None:
        """The request is over, with this reason where it was cut from outside. What was made can still be asked for."""
        if reason and not self.decoder.finished:
            self.decoder.finished = reason
        if self.open:
            self.open = False
            self.stats.seconds = time.perf_counter() - self.started
            self.decoder.end()

    @property
    def text(self) -> str:
        """The new text so far."""
        return self.decoder.stop.trim(_decode(self.model, self.decoder.new))

    def result(self) -> Generation:
        """The whole, or what there is of it."""
        new = self.decoder.new
        reason = self.decoder.finished or "interrupted"
        return Generation(self.text, new, self.logprobs, reason, self.stats, self.trace)


def start(
    model: Model,
    prompt: Prompt,
    *,
    method: str = "autoregressive",
    draft: Draft = None,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    stop: str | Sequence[str | Sequence[int]] = (),
    chat: bool = False,
    references: Sequence[str | Sequence[int]] = (),
    gate: Gate | None = None,
    **knobs: Any,
) -> Running:
    """Prepare a request: everything that can be wrong with its arguments is said here."""
    if not isinstance(model, Model):
        raise TinyspecError(f"{getattr(model, 'name', model)} is an encoder-decoder, which translates: use translate")
    card = find(method)
    card.settings(knobs)
    warp = Warp(temperature, top_k, top_p, min_p, repetition_penalty)
    drafts = drafts_for(model, card, draft)
    knobs = {**advised(card, drafts), **knobs}
    ids = prompt_ids(model, prompt, chat)
    if not ids:
        raise TinyspecError("the prompt is empty: give at least one token")
    if len(ids) > model.config.max_positions:
        raise TinyspecError(
            f"the prompt has {len(ids)} tokens, the context of {model.name} {model.config.max_positions}: shorten it"
        )
    if references and not card.copies:
        raise TinyspecError(f"{card.name} copies from no references: use a method that does, such as llma")
    ledger: list[Call] = []
    request = Request(
        target=model.session(ledger, gate),
        drafts=[d.session(ledger, gate) for d in drafts],
        warp=warp,
        stop=stopping(model, stop, max_new_tokens),
        references=[model.tokenizer.encode(r) if isinstance(r, str) else list(r) for r in references],
        positions=model.config.max_positions,
        reach=[d.config.max_positions for d in drafts],
        ledger=ledger,
        clock=None if gate else time.perf_counter,  # in a batch a call's time is the others' too
    )
    return Running(card.make(request, **knobs), model, ids, seed)


def generate(model: Model, prompt: Prompt | Sequence[Prompt], **options: Any) -> Generation | list[Generation]:
    """Extend a prompt. See `tinyspec.generate` for the options.

    A list of prompts runs as one ragged batch: row i uses seed + i and equals the row run alone with that seed; on a CPU in
    float32 and bfloat16 to the bit, for no row of the compiled transformer depends on what is computed beside it.
    """
    if not _is_batch(prompt):
        return _finish(start(model, prompt, **options))  # type: ignore[arg-type]
    seed = options.pop("seed", 0)
    rows: Sequence[Any] = prompt
    drafts = drafts_for(model, find(options.get("method", "autoregressive")), options.get("draft"))
    options["draft"] = drafts or None  # loaded once, so that all rows share it and batch

    def job(row: int) -> Any:
        return lambda gate: _finish(start(model, rows[row], seed=seed + row, gate=gate, **options))

    return run_together([job(row) for row in range(len(rows))])


@dataclass
class Growing:
    """A request's text in pieces that may be shown: never half a character, nothing that may become a stop string."""

    running: Running
    text: str = ""
    shown: int = 0

    def __iter__(self) -> Iterator[str]:
        stop, pieces = self.running.decoder.stop, self.running.model.tokenizer.stream()
        for round in self.running:
            self.text = stop.trim(self.text + pieces.push(list(round.tokens)))
            finished = self.running.decoder.finished
            yield self._upto(len(self.text) - (0 if finished else stop.withheld(self.text)))
        self.text = stop.trim(self.text + pieces.flush())
        yield self.rest()

    def rest(self) -> str:
        """What was held back (when it was interrupted)."""
        return self._upto(len(self.text))

    def _upto(self, end: int) -> str:
        piece, self.shown = self.text[self.shown : end], max(self.shown, end)
        return piece


def stream(model: Model, prompt: Prompt, **options: Any) -> Iterator[str]:
    """The new text as it grows, in pieces that never end in half a character or inside what may become a stop string."""
    return (piece for piece in Growing(start(model, prompt, **options)) if piece)


def prompt_ids(model: Model, prompt: Prompt, chat: bool = False) -> list[int]:
    """Token ids of a prompt: text (with BOS where the config says so), ids as they are, chat messages by the template."""
    if isinstance(prompt, str):
        if chat:
            return model.tokenizer.chat([{"role": "user", "content": prompt}])
        bos = [model.config.bos] if model.config.add_bos and model.config.bos is not None else []
        return bos + model.tokenizer.encode(prompt)
    if prompt and isinstance(prompt[0], dict):
        return model.tokenizer.chat(list(prompt))  # type: ignore[arg-type]
    return [int(token) for token in prompt]  # type: ignore[arg-type]


def stopping(model: Model, stop: str | Sequence[str | Sequence[int]], max_new_tokens: int | None) -> Stop:
    """The stop rules of a request: the model's end-of-text ids, stop strings, stop sequences of ids, the budget."""
    stops = [stop] if isinstance(stop, str) else list(stop)
    strings = tuple(s for s in stops if isinstance(s, str))
    sequences = tuple(tuple(s) for s in stops if not isinstance(s, str))
    decode = (lambda ids: model.tokenizer.decode(list(ids))) if strings else None
    return Stop(frozenset(model.config.eos), strings, sequences, max_new_tokens, decode)


def _is_batch(prompt: Any) -> bool:
    return not isinstance(prompt, str) and len(prompt) > 0 and (isinstance(prompt[0], (str, list, tuple)))


def _finish(running: Running) -> Generation:
    """Run to the end. Ctrl-C keeps the text so far."""
    try:
        for _ in running:
            pass
    except KeyboardInterrupt:
        running.close("interrupted")
    return running.result()


def _decode(model: Model, ids: list[int]) -> str:
    return model.tokenizer.decode(ids) if model.has_tokenizer else ""


def _logprobs(round: Round) -> list[float]:
    """log p of each token of a round, from the target's raw rows."""
    if round.scores.logits.device.type != "cpu":
        return [float(x) for x in _logprobs_there(round).tolist()]
    rows = [0, *(node + 1 for node in round.verdict.path)][: len(round.tokens)]
    values, logprobs = round.scores.logits.numpy(), list[float]()
    room = np.empty_like(values[0])  # one for all: fresh pages cost as much as the sums
    for row, token in zip(rows, round.tokens, strict=True):
        logits = values[row]
        most = logits.max()
        np.exp(np.subtract(logits, most, out=room), out=room)
        logprobs.append(float(logits[token] - most) - math.log(float(room.sum(dtype=np.float64))))
    return logprobs


def _logprobs_there(round: Round) -> torch.Tensor:
    """`_logprobs` where the logits lie on a device, without waiting for it."""
    rows = [0, *(node + 1 for node in round.verdict.path)][: len(round.tokens)]
    logits = round.scores.logits[rows].double()
    return logits[torch.arange(len(rows)), torch.tensor(round.tokens, device=logits.device)] - logits.logsumexp(dim=-1)
