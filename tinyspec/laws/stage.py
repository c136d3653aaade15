"""The small models on which a technique is judged, with adversaries as drafts, and the reference.

A stage builds the same decoder again and again. Everything is rational or, on a transformer,
float64; everything is made from a seed, so a case is its name and its number.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache, partial
from typing import Any
from weakref import WeakKeyDictionary

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.evidence import accuse
from tinyspec.laws.exact.joint import (
    JOINT,
    JointDistribution,
    Reference,
    Tokens,
    exact_distribution,
    first_differing_text,
)
from tinyspec.laws.exact.models import add_random_head, likeliest_token, small_network
from tinyspec.laws.exact.tables import TableModel
from tinyspec.technique import Card, Knob, Request
from tinyspec.tree import TokenTree

DRAFTS = ("another", "right", "wrong", "stubborn")
"""Who stands in for a draft model: another table, the target itself, one that always proposes what
the target holds for least likely, one that always proposes the last token of the vocabulary (the
end of text, where there is one)."""

CONTEXT = 64  # tokens that a table holds unless the stage says otherwise


@dataclass(frozen=True)
class Stage:
    """A technique on small models.

    knobs       beside these, every whole-number knob is made small
    vocabulary  V
    seed        which target and drafts
    floats      rows are float64 logits instead of Fractions
    deep        a transformer of three layers instead of tables
    draft       who drafts: one of DRAFTS
    positions   tokens that the target's context holds; draft_positions: that each draft's holds
    before      what the decoder has been through when the prompt comes
    """

    card: Card
    knobs: dict[str, Any] = field(default_factory=dict)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: StoppingCriteria = field(default_factory=StoppingCriteria)
    prompt: Tokens = (0,)
    vocabulary: int = 3
    seed: int = 0
    floats: bool = False
    deep: bool = False
    draft: str = "another"
    positions: int | None = None
    draft_positions: int | None = None
    largest: int = 2
    before: "Callable[[Stage, Decoder], Tokens | None] | None" = None

    @cached_property
    def target(self) -> Any:
        """Return the model whose distribution must be kept."""
        if self.deep or self.card.cyclic or self.card.trained is not None:  # no table will do
            network = small_network(self.seed, self.vocabulary)
            return add_random_head(network, self.card, self.seed)
        zeros = (self.seed // 100 + self.seed) % 2 == 0
        seed, room = 2 * self.seed + 1, self.positions or CONTEXT
        return TableModel(seed, self.vocabulary, zeros=zeros, floats=self.floats, positions=room)

    @cached_property
    def drafts(self) -> list[Any]:
        """Return the draft models; each further one differs."""
        return [self._draft(number) for number in range(self.card.hosted)]

    @cached_property
    def references(self) -> list[list[int]]:
        """Return texts to copy from: the target's greedy text, a wrong one, or a random one."""
        if not self.card.copies:
            return []
        if self.draft in ("right", "wrong"):
            pick = likeliest_token if self.draft == "right" else _least_likely
            text = list(self.prompt)
            for _ in range(6):
                text.append(pick(_conditional(self.target, tuple(text))))
            return [text]
        if self.draft == "stubborn":
            return [[*range(self.vocabulary), *[self.vocabulary - 1] * 4]]
        rng = random.Random(self.seed)
        return [[rng.randrange(self.vocabulary) for _ in range(7)] for _ in range(2)]

    def row(self, context: Tokens) -> Any:
        """Return the target's conditionals by a pass of their own: [V] Fractions or logits."""
        if self.card.has_own_target:  # the technique's own target, asked for one text at a time
            known = _own_logits.setdefault(self.target, {})
            if (key := (*self._who, context)) not in known:
                own = self.new_decoder().target
                own.extend(context)
                known[key] = own.score(TokenTree()).logits[0]
            return known[key]
        return _conditional(self.target, context)

    @cached_property
    def _who(self) -> tuple[Any, ...]:
        """Return all that the technique's own target is made of, beside the model."""
        models = self.seed, self.vocabulary, self.floats, self.deep, self.draft
        rules = self.sampling, self.stop, self.positions
        return self.card.build, repr(self.settings), *models, *rules

    @property
    def settings(self) -> dict[str, Any]:
        """Return every knob: as given, else neutral, else small."""
        small = {knob.name: small_knob(knob, self.largest) for knob in self.card.knobs}
        neutral = {} if self.card.lossy is None else dict([self.card.lossy])
        return small | neutral | self.knobs

    def new_decoder(self) -> Decoder:
        """Return a new decoder without a past."""
        forward_log: list[Any] = []
        request = Request(
            target=self.target.session(forward_log),
            drafts=[model.session(forward_log) for model in self.drafts],
            sampling=self.sampling,
            stop=self.stop,
            references=self.references,
            positions=self.positions,
            draft_max_lengths=[]
            if self.draft_positions is None
            else [self.draft_positions] * self.card.hosted,
            forward_log=forward_log,
            choose=choose_every_way,
        )
        return self.card.make(request, **self.settings)

    def decoder(self) -> Decoder:
        """Return a new decoder, after its past if the stage has one."""
        decoder = self.new_decoder()
        if self.before is not None:
            self.before(self, decoder)
        return decoder

    def reference(self) -> Reference:
        """Return the plain decoding that the technique must equal."""
        return Reference(self.row, self.sampling, self.stop, self.positions)

    def distribution(self, tokens: int, rounds: int | None = None) -> JointDistribution:
        """Return the exact distribution of what comes after the prompt."""
        # The weights of an online draft are state.
        models = () if self.card.persistent else (self.target, *self.drafts)
        return exact_distribution(
            self.decoder, tokens, self.prompt, rounds=rounds, outside=lambda decoder: models
        )

    def judge(
        self,
        expected: JointDistribution,
        got: JointDistribution,
        prompt: Tokens,
        within: float,
        name: str = JOINT,
    ) -> None:
        """Raise LawViolated unless the distributions agree.

        Shows the shortest text that differs, and p and q along it.
        """
        text = first_differing_text(expected, got, within)
        if text is None:
            return
        contexts = [(*prompt, *text[:i]) for i in range(len(text))]
        case: dict[str, Any] = {**self.describe(), "prompt": prompt, "text": text}
        case["p along the text"] = [self.reference().next(context) for context in contexts]
        for number, model in enumerate(self.drafts):
            which = f"q of draft {number}" if len(self.drafts) > 1 else "q"
            draft = Reference(partial(_conditional, model), self.sampling)
            case[f"{which} along the text"] = [draft.next(context) for context in contexts]
        accuse(name, expected.get(text, 0), got.get(text, 0), **case)

    def describe(self) -> dict[str, Any]:
        """Return the case in words."""
        case: dict[str, Any] = {
            "method": self.card.name,
            "knobs": self.settings,
            "sampling": format_sampling(self.sampling),
        }
        if self.card.copies:
            case["references"] = self.references
        if self.stop != StoppingCriteria():
            case["stop"] = {k: v for k, v in vars(self.stop).items() if v}
        return case

    def _draft(self, number: int) -> Any:
        if self.draft == "right":
            return self.target
        seed, v = 2 * self.seed + 2 + 1000 * number, self.vocabulary
        if self.draft == "another" and self.deep:
            return small_network(seed, v)
        if self.draft == "another":
            room = self.draft_positions or CONTEXT
            return TableModel(seed, v, floats=self.floats, name="draft", positions=room)
        is_wrong = self.draft == "wrong"
        target = (self if self.deep else replace(self, floats=False)).target

        # It holds no stage: a draft is state where its technique may train it.
        def rows(context: Tokens) -> list[int]:
            held = _least_likely(_conditional(target, context)) if is_wrong else v - 1
            return [int(token == held) for token in range(v)]

        return TableModel(vocabulary=v, rows=rows, floats=self.floats or self.deep, name=self.draft)


_own_logits: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Rows of techniques' own targets on a model: cases ask for the same again and again."""


@lru_cache(maxsize=4096)
def _conditional(model: Any, context: Tokens) -> Any:
    """Return a model's row by a pass of its own."""
    return (
        model.row(context) if isinstance(model, TableModel) else model.logits(context)[-1].numpy()
    )


def _least_likely(row: Sequence[Any]) -> int:
    """Return the least likely token; among equals the highest id."""
    return min(range(len(row)), key=lambda token: (row[token], -token))


def small_knob(knob: Knob, largest: int) -> Any:
    """Return a value at which every outcome can be walked.

    That is what the knob names, else no whole number above `largest`.
    """
    if knob.small:
        return knob.small[0]
    if isinstance(knob.default, bool) or not isinstance(knob.default, int) or knob.choices:
        return knob.default
    return max(min(knob.default, largest), int(knob.low if knob.low is not None else 0))


def choose_every_way(ways: int, source: Any) -> int:
    """Choose for a technique that plans, in every possible way, so that a law walks them all."""
    return int(source.draw([Fraction(1, ways)] * ways))


def format_sampling(sampling: SamplingParams) -> str:
    """Return the settings that differ from plain sampling.

    >>> format_sampling(SamplingParams(0.5, top_k=2)), format_sampling(SamplingParams())
    ('temperature 0.5, top_k 2', 'temperature 1')
    """
    plain = SamplingParams()
    changed = [
        f"{name} {value}" for name, value in vars(sampling).items() if value != getattr(plain, name)
    ]
    return ", ".join(changed) or "temperature 1"


# ---------------------------------------------------------------------- what came before


def after_a_request(stage: Stage, decoder: Decoder) -> None:
    """Decode and close another text, of which only what a technique learns may stay."""
    _run_rounds(decoder, (1, 0), stage.seed, 2)
    decoder.end()
    decoder.rewind(0)


def after_rewind(stage: Stage, decoder: Decoder) -> None:
    """Decode two rounds, rewind to the prompt, and correct the text by one token from outside."""
    _run_rounds(decoder, stage.prompt, stage.seed, 2)
    decoder.rewind(len(stage.prompt))
    decoder.extend((1,))


def after_many_rounds(stage: Stage, decoder: Decoder) -> None:
    """Decode twelve rounds, and go on."""
    _run_rounds(decoder, stage.prompt, stage.seed, 12)
    decoder.begin(decoder.context)


def after_stop(stage: Stage, decoder: Decoder) -> None:
    """Decode until the text is complete, then give it one token more."""
    _run_rounds(decoder, stage.prompt, stage.seed, 99)
    decoder.extend((1,))


def _run_rounds(decoder: Decoder, prompt: Tokens, seed: int, rounds: int) -> None:
    decoder.extend(prompt)
    source = Seeded(seed)
    for number in range(rounds):
        if not decoder.finished:
            decoder.step(source.split("past", number))
