"""Make the arms of `tinyspec bench exits`, and run one of them on one text.

The arms come from the registry: a technique of the chapter has rows by its card. Its lossy knob is
swept. A knob with several ways to choose from (`Knob.choices`) gives each way rows of its own.

A model writes a passage of a book on, or translates a sentence. Both are texts that a model
continues from left to right, and both run in the same loop:

    forced  the text goes on as its author wrote it: what does the exit say at each token?
    free    the model goes on by itself at temperature 0
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tinyspec import data, models
from tinyspec.bench.arms import disable_eos
from tinyspec.bench.chapters import list_decoders
from tinyspec.bench.plan import PLAIN, ArmSpec, read_arms
from tinyspec.decoding.decode import Round
from tinyspec.early_exit.ee_llm import count_pipeline_steps
from tinyspec.early_exit.ppd import count_layer_steps
from tinyspec.errors import TinyspecError
from tinyspec.generation import GenerationRun, start_generation
from tinyspec.lm.config import Config
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import Card, Guarantee, find_technique, is_tuned_for
from tinyspec.training import corpus
from tinyspec.training.bleu import ORDER, count_ngrams
from tinyspec.translation import ExtendingRun, start_translation
from tinyspec.tree import TokenTree

CHAPTER = "early_exit"
FIXED, FULL = "fixed", "full"
RATIOS = (1.25, 1.5, 2.0, 3.0)  # values of a lossy knob that is no share, such as a speed-up


class ExitArm(NamedTuple):
    """A technique at one setting.

    label  its name in tables and files: that of its family, and the value that is swept
    """

    label: str
    method: str
    knobs: dict[str, Any]

    @property
    def is_lossless(self) -> bool:
        """Return whether it writes the full model's text."""
        promise = find_technique(self.method).promise(**self.knobs)
        return promise in (Guarantee.EXACT, Guarantee.GREEDY)


def list_families(methods: Sequence[str]) -> list[ArmSpec]:
    """Return the families of rows: those asked for, or every technique in each of its ways.

    >>> [spec.label for spec in list_families([])][:3]
    ['calm', 'calm:measure=saturation', 'calm:measure=classifier']
    """
    if methods:
        return read_arms(methods)
    found = list[ArmSpec]()
    for method in list_decoders(CHAPTER):
        card = find_technique(method)
        found.append(ArmSpec(method))
        swept = card.lossy[0] if card.lossy else ""
        for knob in card.knobs:
            if isinstance(knob.default, str) and knob.name != swept:
                others = (choice for choice in knob.choices if choice != knob.default)
                found += [ArmSpec(method, ((knob.name, choice),)) for choice in others]
    return found


def list_swept_values(card: Card, thresholds: Sequence[float]) -> list[Any]:
    """Return the values of a card's lossy knob that have rows: it is a share, a ratio or a choice.

    >>> list_swept_values(find_technique("free"), (0.3, 0.9))
    [0.3, 0.9]
    >>> list_swept_values(find_technique("skip_decode"), (0.3, 0.9))
    [1.25, 1.5, 2.0, 3.0]
    """
    assert card.lossy is not None
    knob = next(knob for knob in card.knobs if knob.name == card.lossy[0])
    if knob.choices or isinstance(knob.default, (bool, str)):
        values: Sequence[Any] = knob.choices or (True, False)
    else:
        ratios = [value for value in RATIOS if _can_take(knob, value)] or [knob.default]
        values = thresholds if knob.high == 1 else ratios
    return [value for value in values if value != card.lossy[1]]


def _can_take(knob: Any, value: float) -> bool:
    try:
        return bool(knob.check(value) == value)
    except TinyspecError:
        return False


def list_exit_arms(spec: ArmSpec, thresholds: Sequence[float]) -> list[ExitArm]:
    """Return the arms of a family. A wrong knob is reported now.

    >>> [arm.label for arm in list_exit_arms(ArmSpec("ee_llm", (("cap", 2),)), (0.5, 0.9))]
    ['ee_llm:cap=2 0.5', 'ee_llm:cap=2 0.9']
    """
    card, knobs = find_technique(spec.name), dict(spec.knobs)
    card.settings(knobs)
    if card.lossy is None or card.lossy[0] in knobs:
        return [ExitArm(spec.label, card.name, knobs)]
    found = list[ExitArm]()
    for value in list_swept_values(card, thresholds):
        text = f"{value:g}" if isinstance(value, float) else str(value)
        arm = ExitArm(f"{spec.label} {text}", card.name, {**knobs, card.lossy[0]: value})
        card.settings(arm.knobs)
        found.append(arm)
    return found


def list_fixed_arms(depth: int) -> list[ExitArm]:
    """Return plain decoding, and one exit for all tokens at each layer below the top."""
    found = [ExitArm(FULL, PLAIN, {})]
    for layer in range(1, depth):  # every token reaches threshold 0, at the first exit allowed
        knobs = {"threshold": 0.0, "decay": "constant", "min_exit": layer}
        found.append(ExitArm(f"{FIXED} {layer}", "calm", knobs))
    return found


def name_family(label: str) -> str:
    """Return the family of an arm by its label.

    >>> name_family("calm:measure=saturation 0.5"), name_family("fixed 3"), name_family("layerskip")
    ('calm:measure=saturation', 'fixed', 'layerskip')
    """
    return label.partition(" ")[0]


# ---------------------------------------------------------------------- what is run


class Passage(NamedTuple):
    """A piece of a book: a prompt, and what comes after it."""

    prompt: list[int]
    rest: list[int]


class ExitText(NamedTuple):
    """A text that arms go on.

    model      what continues it: of a translator, its decoder that has read the source
    source     of a translation; empty: it is none
    reference  the text of `rest`, for BLEU; empty: none is computed
    """

    model: Model
    prompt: list[int]
    rest: list[int]
    source: list[int]
    reference: str


class ExitSubject(Protocol):
    """What arms run on: a language model on passages, or a translator on sentences."""

    @property
    def model(self) -> Model | Seq2Seq:
        """Return the model."""

    @property
    def depth(self) -> int:
        """Return the number of layers that a token runs."""

    @property
    def costs(self) -> "WeightCosts":
        """Return what the parts of the model cost."""

    def renew(self) -> "ExitSubject":
        """Return the same without what persistent techniques have learnt."""

    def start(self, text: ExitText, arm: ExitArm) -> GenerationRun:
        """Return a request of an arm at temperature 0, which has read the prompt."""

    def spell(self, ids: Sequence[int]) -> str:
        """Return token ids as a text."""


class LanguageSubject:
    """A language model that ends nowhere: each text has the length that is asked for."""

    def __init__(self, model: Model):
        self.model = disable_eos(model)
        self.depth, self.costs = model.config.n_layers, price_weights(model.config)

    def renew(self) -> "LanguageSubject":
        return LanguageSubject(self.model)

    def start(self, text: ExitText, arm: ExitArm) -> GenerationRun:
        return start_generation(
            self.model, text.prompt, method=arm.method, max_new_tokens=len(text.rest), **arm.knobs
        )

    def spell(self, ids: Sequence[int]) -> str:
        return self.model.tokenizer.decode(ids)

    def draw_texts(
        self, texts: Sequence[str], n: int, prompt: int, tokens: int, seed: int
    ) -> list[ExitText]:
        """Return passages of these texts."""
        drawn = draw_passages(self.model, texts, n, prompt, tokens, seed)
        return [ExitText(self.model, *passage, [], "") for passage in drawn]


class TranslatorSubject:
    """A translator that writes from left to right."""

    def __init__(self, model: Seq2Seq):
        self.model, self.depth = model, model.config.decoder_layers
        self.costs = price_weights(model.decoder.config, reads_source=True)

    def renew(self) -> "TranslatorSubject":
        model = self.model
        return TranslatorSubject(Seq2Seq(model.config, model.weights, model.tokenizer, model.name))

    def start(self, text: ExitText, arm: ExitArm) -> GenerationRun:
        started = start_translation(self.model, text.source, method=arm.method, **arm.knobs)
        assert isinstance(started, ExtendingRun)
        return started.running

    def spell(self, ids: Sequence[int]) -> str:
        end = self.model.config.eos
        return self.model.tokenizer.decode([token for token in ids if token != end])

    def draw_texts(self, pairs: Sequence[tuple[str, str]], n: int) -> list[ExitText]:
        """Return the first sentences that fit. A reference ends as a translation does."""
        encode, config, found = self.model.tokenizer.encode, self.model.config, list[ExitText]()
        for english, german in pairs:
            source, target = encode(english), encode(german)
            if source and max(len(source), len(target) + 2) <= config.max_positions:
                given = self.model.condition_on(source)
                rest = [*target, config.eos]
                found.append(ExitText(given, [config.bos], rest, source, german))
            if len(found) == n:
                break
        if not found:
            raise TinyspecError(f"no sentence fits into {self.model.name}")
        return found


def load_exit_subject(name: str, dtype: str | None) -> LanguageSubject | TranslatorSubject:
    """Load a model by name. One that is not trained yet is an error that names its recipe."""
    if models.is_translator(models.find_model(name)):
        return TranslatorSubject(models.load_translator(name, dtype=dtype))
    return LanguageSubject(models.load(name, dtype=dtype))


def read_classics() -> list[str]:
    """Return the valid books."""
    return [corpus.clean_book(book.text) for book in data.read_books("valid")]


def draw_passages(
    model: Model, texts: Sequence[str], n: int, prompt: int, tokens: int, seed: int
) -> list[Passage]:
    """Draw n passages independently. Each place of the texts is as likely as any other."""
    if prompt + tokens > model.config.max_positions:
        raise TinyspecError(
            f"{prompt} tokens of a passage and {tokens} new ones do not fit into the context of "
            f"{model.name} ({model.config.max_positions}): fewer --tokens or --prompt-tokens"
        )
    ids = [model.tokenizer.encode(text) for text in texts]
    room = [max(len(text) - prompt - tokens + 1, 0) for text in ids]
    if not sum(room):
        raise TinyspecError(
            f"no text has {prompt + tokens} tokens: give longer ones, or fewer --tokens"
        )
    random, found = np.random.default_rng(seed), list[Passage]()
    for place in random.integers(sum(room), size=n).tolist():
        which = 0
        while place >= room[which]:
            place, which = place - room[which], which + 1
        end = place + prompt
        found.append(Passage(ids[which][place:end], ids[which][end : end + tokens]))
    return found


# ---------------------------------------------------------------------- what it costs


class WeightCosts(NamedTuple):
    """Multiplications of weights for one token.

    layer  of a layer; of a translator's, with the attention to the source
    fill   of the keys and values of a layer alone
    head   of the output matrix
    """

    layer: int
    fill: int
    head: int
    depth: int

    def relative_work(self, layers: float, fills: float, heads: float) -> float:
        """Return the multiplications of so many parts, over those of the full model for a token."""
        made = layers * self.layer + fills * self.fill + heads * self.head
        return made / (self.depth * self.layer + self.head)


def price_weights(config: Config, reads_source: bool = False) -> WeightCosts:
    """Return what the parts of a model cost. A source's keys and values are made once and free."""
    shapes = config.shapes()
    layer = sum(math.prod(shapes[f"0.{part}.weight"]) for part in ("qkv", "out", "up", "down"))
    source = 2 * config.d_model**2 if reads_source else 0  # its queries, and its output
    head = (len(config.head_ids) or config.vocab_size) * config.d_model
    return WeightCosts(layer + source, 2 * config.kv_dim * config.d_model, head, config.n_layers)


class CountedWork(NamedTuple):
    """What was run after the prompt.

    layers      (position, layer) evaluations; a drafter's own attention layer counts as half a one
    fills       keys and values made for layers that were left out
    heads       products with the vocabulary matrix
    in_a_row    layers that run one after the other: the positions of a pass run beside each other
    """

    layers: float
    fills: int
    heads: int
    in_a_row: float


def count_work(forward_log: Sequence[ForwardRecord]) -> CountedWork:
    """Return what a forward log holds after the prompt.

    >>> count_work([ForwardRecord("m", 1, 2.0, 1), ForwardRecord("m", 3, 12.0, 1)])
    CountedWork(layers=14.0, fills=0, heads=2, in_a_row=6.0)
    """
    calls = [call for call in forward_log if not call.prefill]
    return CountedWork(
        sum(call.row_layers for call in calls),
        sum(call.fills for call in calls),
        sum(call.head_rows for call in calls),
        sum(call.row_layers / call.rows for call in calls if call.rows),
    )


def _count_ee_llm(rounds: Sequence[Round], arm: ExitArm, depth: int, stages: int) -> float | None:
    if find_technique(arm.method).settings(arm.knobs)["inference"] != "pipeline" or not rounds:
        return None
    exits = [int(round.scores.layers[0]) for round in rounds]
    return float(count_pipeline_steps(exits, depth, min(stages, depth))[-1])


def _count_ppd(rounds: Sequence[Round], arm: ExitArm, depth: int, stages: int) -> float:
    return sum(count_layer_steps(round.calls) for round in rounds)


CLOCKS: Mapping[str, Callable[[Sequence[Round], ExitArm, int, int], float | None]] = {
    "ee_llm": _count_ee_llm,
    "ppd": _count_ppd,
}
"""Layer-steps of a whole text on several processors, of techniques that need them. A simulation."""


# ---------------------------------------------------------------------- one arm on one text


class ExitSample(NamedTuple):
    """One text, one way, under one setting.

    right     forced: tokens of the exit that are the full model's; free: tokens that are those of
              the full model's text
    bits      forced: of the text under the exits' distributions; free: of the text under the full
              model
    layers, fills, heads, in_a_row  as `CountedWork` has them
    clock     layer-steps on several processors; None: the arm needs none
    seconds   free: after the prompt; plain: plain decoding's on the same text, right before
    longest   free: tokens of the longer text, of this one and the full model's
    counts    free: of BLEU, if there is a reference: matches, totals, words of the reference
    """

    way: str
    passage: int
    tokens: int
    right: int
    bits: float
    layers: float
    fills: int
    heads: int
    in_a_row: float | None = None
    clock: float | None = None
    seconds: float | None = None
    plain: float | None = None
    longest: int | None = None
    counts: Sequence[int] = ()

    def as_row(self) -> list[Any]:
        """Return the sample as a file has it: the counts one by one."""
        return [*self[:-1], *self.counts]

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "ExitSample":
        """Return the sample of a row of a file; an older one has fewer figures."""
        first = len(cls._fields) - 1
        known = dict(zip(cls._fields[:first], row, strict=False))
        return cls(**known, counts=list(row[first:]))


COLUMNS = [
    *ExitSample._fields[:-1],
    *(f"{what}_{n}" for what in ("hits", "all") for n in range(1, ORDER + 1)),
    "wanted",
]


class FullModelOutput(NamedTuple):
    """The full model on a text: its prediction of each token, the bits, and its own text."""

    words: list[int]
    bits: float
    text: list[int]


def run_full_model(subject: ExitSubject, text: ExitText) -> FullModelOutput:
    """Return what the full model predicts and writes."""
    rows = text.model.logits([*text.prompt, *text.rest])[len(text.prompt) - 1 : -1].double()
    bits = sum(_count_bits(row, token) for row, token in zip(rows, text.rest, strict=True))
    own, *_ = _write(subject, text, ExitArm(FULL, PLAIN, {}), 1)
    return FullModelOutput(rows.argmax(-1).tolist(), bits, own)


def _count_bits(row: Any, token: int) -> float:
    return float(row.logsumexp(0) - row[token]) / math.log(2)


def run_both_ways(
    subject: ExitSubject,
    texts: Sequence[ExitText],
    whole: Sequence[FullModelOutput],
    arm: ExitArm,
    stages: int,
) -> Iterator[ExitSample]:
    """Run an arm on all texts, forced and free. Each way begins without what was learnt before.

    A lossless arm is not forced: what it writes is the full model's text, and costs the same on any
    text of the full model. A text that differs is an error.
    """
    forced, free = subject.renew(), subject.renew()
    for at, text in enumerate(texts):
        own = run_free(free, at, text, whole[at], arm, stages)
        if not arm.is_lossless:
            yield run_forced(forced, at, text, whole[at], arm)
        else:
            if own.right != own.longest:
                raise RuntimeError(f"{arm.label} is lossless and wrote another text (text {at})")
            n = len(text.rest)
            share = n / own.tokens
            yield own._replace(
                way="forced", tokens=n, right=n, bits=whole[at].bits, layers=own.layers * share,
                fills=round(own.fills * share), heads=round(own.heads * share),
                in_a_row=(own.in_a_row or 0) * share, clock=None, seconds=None, plain=None,
                longest=None, counts=(),
            )  # fmt: skip
        yield own


def run_forced(
    subject: ExitSubject, at: int, text: ExitText, whole: FullModelOutput, arm: ExitArm
) -> ExitSample:
    """Let an arm read the text token by token, each with what left early before it."""
    running = subject.start(text, arm)
    target, forward_log = running.decoder.target, running.decoder.forward_log
    begun, right, bits = len(forward_log), 0, 0.0
    try:
        for word, token in zip(whole.words, text.rest, strict=True):
            row = target.score(TokenTree()).logits[0].double()
            right, bits = right + (int(row.argmax()) == word), bits + _count_bits(row, token)
            target.commit((), token)
    finally:
        running.close()
    return ExitSample("forced", at, len(text.rest), right, bits, *count_work(forward_log[begun:]))


def run_free(
    subject: ExitSubject,
    at: int,
    text: ExitText,
    whole: FullModelOutput,
    arm: ExitArm,
    stages: int,
) -> ExitSample:
    """Let an arm write, and time it beside plain decoding of the same text."""
    plain = ExitArm(FULL, PLAIN, {})
    first, second = (plain, arm) if at % 2 else (arm, plain)  # who is first takes turns
    done = {made.label: _write(subject, text, made, stages) for made in (first, second)}
    own, work, clock, seconds = done[arm.label]
    rows = text.model.logits([*text.prompt, *own])[len(text.prompt) - 1 : -1].double()
    counts: list[int] = []
    if text.reference:
        found = count_ngrams([subject.spell(own)], [text.reference])
        counts = [*found.matches, *found.totals, found.reference_length]
    return ExitSample(
        "free",
        at,
        len(own),
        sum(a == b for a, b in zip(own, whole.text, strict=False)),
        sum(_count_bits(row, token) for row, token in zip(rows, own, strict=True)),
        *work,
        clock=clock,
        seconds=seconds,
        plain=done[FULL][3],
        longest=max(len(own), len(whole.text)),
        counts=counts,
    )


def _write(
    subject: ExitSubject, text: ExitText, arm: ExitArm, stages: int
) -> tuple[list[int], CountedWork, float | None, float]:
    """Return what an arm writes, what it ran, its simulated layer-steps, and its seconds."""
    running = subject.start(text, arm)
    decoder = running.decoder
    before, begun = len(decoder.forward_log), time.perf_counter()
    try:
        rounds = list(decoder.run(running.rng))
        seconds = time.perf_counter() - begun
    finally:
        running.close()
    clock = CLOCKS[arm.method](rounds, arm, subject.depth, stages) if arm.method in CLOCKS else None
    return decoder.new, count_work(decoder.forward_log[before:]), clock, seconds


def describe_fit(subject: ExitSubject, method: str) -> str:
    """Return what a method lacks that wants to be trained in the model itself; empty: nothing."""
    card, model = find_technique(method), subject.model
    if card.tuned is None or is_tuned_for(model, card.name):
        return ""
    return f"{model.name} was not tuned for {card.name}: its rows show the method alone"
