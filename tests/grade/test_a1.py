"""A1: the reference keeps every law, and each plausible mistake breaks the law meant for it."""

import doctest
import math
import random
import shutil
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.grade.tiny import ASSIGNMENTS_FOLDER, load_reference
from tinyspec.grade import a1_loop, a1_position, a1_round, grading, props_a1, report, starter
from tinyspec.grade.assignments import A1 as ASSIGNMENT
from tinyspec.grade.task import Cases, Task
from tinyspec.laws.checking.cases import SmallModel
from tinyspec.laws.evidence import Evidence, LawViolated

FOLDER = ASSIGNMENTS_FOLDER / "A1"
TASKS = {task.name: task for task in ASSIGNMENT.tasks}
ZERO, PUBLIC = Fraction(0), Cases()


reference = load_reference("A1")
warp, acceptance, residual, verify = (
    reference.warp,
    reference.acceptance,
    reference.residual,
    reference.verify,
)


def judge_laws(task: Task, function: Callable[..., Any], cases: Cases = PUBLIC) -> list[Evidence]:
    return [law(function, cases) for law in task.laws]


@cache
def judge_reference(name: str) -> tuple[Evidence, ...]:
    """Return what the laws of a task saw of the reference."""
    return tuple(judge_laws(TASKS[name], getattr(reference, name)))


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.slow
def test_the_reference_keeps_every_law(name: str) -> None:
    for evidence in judge_reference(name):
        assert evidence.cases > 10, evidence.law


@pytest.mark.parametrize("name", TASKS)
def test_the_reference_keeps_every_law_in_other_cases(name: str) -> None:
    cases = Cases(seed=1) if name == "generate" else Cases(seed=1, times=2)
    other = judge_laws(TASKS[name], getattr(reference, name), cases)
    assert all(
        many.cases >= few.cases for many, few in zip(other, judge_reference(name), strict=True)
    )


def test_points() -> None:
    assert sum(task.points for task in ASSIGNMENT.tasks) == 100


def test_the_examples_of_the_docstrings() -> None:
    for module in (reference, props_a1):
        result = doctest.testmod(module)
        assert result.attempted > 2 and not result.failed


# ---------------------------------------------------------------------- plausible mistakes: warp


def normalise(row: Any) -> list[Fraction]:
    return [x / sum(row) for x in row]


def rank_tokens(row: Any) -> list[int]:
    return sorted(range(len(row)), key=lambda token: (-row[token], token))


def not_normalised(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return [weight ** int(1 / (temperature or 1)) for weight in weights]


def no_row(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    warp(weights, temperature, top_k, top_p)


def numbers_as_text(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return [str(x) for x in warp(weights, temperature, top_k, top_p)]


def whole_weights(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """Weights need not be whole."""
    whole = [Fraction(int(x)) for x in weights]
    return warp(whole if any(whole) else weights, temperature, top_k, top_p)


def colder_is_warmer(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """w ** T in floats."""
    return normalise([float(weight) ** float(temperature) for weight in weights])


def all_greatest_at_zero(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    if temperature == 0:
        return normalise([Fraction(weight == max(weights)) for weight in weights])
    return warp(weights, temperature, top_k, top_p)


def last_greatest_at_zero(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    if temperature == 0:
        return warp(weights[::-1], temperature, top_k, top_p)[::-1]
    return warp(weights, temperature, top_k, top_p)


def temperature_off_at_zero(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return warp(weights, temperature or Fraction(1), top_k, top_p)


def ties_stay(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """B39: whoever weighs as much as the k-th stays."""
    if top_k is not None and temperature:
        least = sorted(weights, reverse=True)[min(top_k, len(weights)) - 1]
        weights = [x if x >= least else ZERO for x in weights]
    return warp(weights, temperature, None, top_p)


def one_too_few(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return warp(weights, temperature, top_k and max(1, top_k - 1), top_p)


def ties_from_behind(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    if top_k is None or not temperature:
        return warp(weights, temperature, top_k, top_p)
    return warp(weights[::-1], temperature, top_k, top_p)[::-1]


def crossing_one_left_out(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    row = warp(weights, temperature, top_k, None)
    if top_p is None:
        return row
    kept, reached = [], ZERO
    for token in rank_tokens(row):
        reached += row[token]
        if kept and reached > top_p:
            break
        kept.append(token)
    return normalise([x if token in kept else ZERO for token, x in enumerate(row)])


def more_than_it_takes(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """Goes on where top_p is reached exactly."""
    row = warp(weights, temperature, top_k, None)
    if top_p is None or not temperature:
        return row
    kept, reached = [], ZERO
    for token in rank_tokens(row):
        if reached > top_p:
            break
        kept.append(token)
        reached += row[token]
    return normalise([x if token in kept else ZERO for token, x in enumerate(row)])


def whoever_has_top_p(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """A threshold on each token."""
    row = warp(weights, temperature, top_k, None)
    if top_p is None:
        return row
    least = (1 - top_p) * max(row)
    return normalise([x if x >= least else ZERO for x in row])


def top_p_first(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    return warp(warp(weights, temperature, None, top_p), Fraction(bool(temperature)), top_k, None)


def temperature_last(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    if not temperature:
        return warp(weights, temperature, top_k, top_p)
    return warp(warp(weights, Fraction(1), top_k, top_p), temperature, None, None)


def share_of_all(weights: Any, temperature: Any, top_k: Any, top_p: Any) -> Any:
    """top_p of all tokens, not of those that top-k left."""
    row = warp(weights, temperature, top_k, None)
    if top_p is None or not temperature:
        return row
    every = warp(weights, temperature, None, None)
    kept, reached = [], ZERO
    for token in [x for x in rank_tokens(row) if row[x]]:
        if kept and reached >= top_p:
            break
        kept.append(token)
        reached += every[token]
    return normalise([x if token in kept else ZERO for token, x in enumerate(row)])


# ---------------------------------------------------------------------- acceptance, residual


def may_exceed_one(p: Any, q: Any, token: int) -> Any:
    return p[token] / q[token]


def yes_or_no(p: Any, q: Any, token: int) -> Any:
    return p[token] >= q[token]


def a_difference(p: Any, q: Any, token: int) -> Any:
    return p[token] - q[token]


def swapped(p: Any, q: Any, token: int) -> Any:
    return min(Fraction(1), q[token] / p[token]) if p[token] else Fraction(1)


def only_p(p: Any, q: Any, token: int) -> Any:
    return p[token]


def always(p: Any, q: Any, token: int) -> Any:
    return 1


def the_smaller_by_the_greater(p: Any, q: Any, token: int) -> Any:
    return min(p[token], q[token]) / max(p[token], q[token])


def a_little_more(p: Any, q: Any, token: int) -> Any:
    return min(Fraction(1), Fraction(21, 20) * p[token] / q[token])


def root(p: Any, q: Any, token: int) -> Any:
    return min(1.0, math.sqrt(p[token] / q[token]))


def left_unnormalised(p: Any, q: Any) -> Any:
    return [max(ZERO, a - b) for a, b in zip(p, q, strict=True)]


def negatives_stay(p: Any, q: Any) -> Any:
    return [a - b for a, b in zip(p, q, strict=True)]


def target_again(p: Any, q: Any) -> Any:
    return list(p)


def absolute(p: Any, q: Any) -> Any:
    return normalise([abs(a - b) for a, b in zip(p, q, strict=True)]) if p != q else list(p)


def softmaxed(p: Any, q: Any) -> Any:
    """B2."""
    powers = [math.exp(max(ZERO, a - b)) for a, b in zip(p, q, strict=True)]
    return [x / sum(powers) for x in powers]


def draft_beyond_target(p: Any, q: Any) -> Any:
    return residual(q, p)


def likeliest_left(p: Any, q: Any) -> Any:
    left = residual(p, q)
    return [Fraction(token == left.index(max(left))) for token in range(len(p))]


def evenly(p: Any, q: Any) -> Any:
    left = [a > b for a, b in zip(p, q, strict=True)]
    return [Fraction(x, sum(left)) for x in left] if any(left) else list(p)


def target_where_left(p: Any, q: Any) -> Any:
    return (
        normalise([a if a > b else ZERO for a, b in zip(p, q, strict=True)]) if p != q else list(p)
    )


def nothing_left(p: Any, q: Any) -> Any:
    return residual(p, q) if p != q else [ZERO] * len(p)


def even_where_equal(p: Any, q: Any) -> Any:
    return residual(p, q) if p != q else [Fraction(1, len(p))] * len(p)


def nan_where_equal(p: Any, q: Any) -> Any:
    """B9, in the floats of a tensor library."""
    return residual(p, q) if p != q else [math.nan] * len(p)


# ---------------------------------------------------------------------- verify


def rejecting(
    p_rows: Any,
    q_rows: Any,
    draft: Any,
    chance: Any,
    accept: Any = None,
    recover: Any = None,
    bonus: Any = None,
) -> Any:
    """Run the rule, with a part exchanged."""
    for place, token in enumerate(draft):
        p, q = p_rows[place], q_rows[place]
        ratio = accept(place) if accept else p[token] / q[token]
        if not chance.accept(ratio):
            return [*draft[:place], chance.draw(recover(place) if recover else residual(p, q))]
    return [*draft, chance.draw(bonus if bonus else p_rows[-1])]


def returns_the_rejected_too(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    tokens = verify(p_rows, q_rows, draft, chance)
    return tokens if len(tokens) > len(draft) else [*draft[: len(tokens)], tokens[-1]]


def two_more(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return [*verify(p_rows, q_rows, draft, chance), chance.draw(p_rows[-1])]


def nothing_recovered(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    tokens = verify(p_rows, q_rows, draft, chance)
    return tokens if len(tokens) > len(draft) else tokens[:-1]


def skips_rejected(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    """B1: acceptance over all positions, not the prefix."""
    kept = [t for t, p, q in zip(draft, p_rows, q_rows, strict=False) if chance.accept(p[t] / q[t])]
    return [*kept, chance.draw(p_rows[-1])]


def the_last_alone(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return verify(p_rows, q_rows, draft, chance)[-1]


def no_bonus(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    tokens = verify(p_rows, q_rows, draft, chance)
    return tokens if len(tokens) <= len(draft) or not draft else tokens[:-1]


def bonus_of_the_draft(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(p_rows, q_rows, draft, chance, bonus=q_rows[-1] if draft else None)


def bonus_a_row_early(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(p_rows, q_rows, draft, chance, bonus=p_rows[len(draft) - 1])


def keeps_all(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(p_rows, q_rows, draft, chance, accept=lambda place: 1)


def turned_round(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    def ratio(i: int) -> Any:
        x = draft[i]
        return q_rows[i][x] / p_rows[i][x] if p_rows[i][x] else 1

    return rejecting(p_rows, q_rows, draft, chance, accept=ratio)


def all_or_nothing(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    """The product of all ratios for the first token."""
    whole = math.prod(
        (p[x] / q[x] for p, q, x in zip(p_rows, q_rows, draft, strict=False)), start=Fraction(1)
    )
    return rejecting(p_rows, q_rows, draft, chance, accept=lambda i: whole if i == 0 else 1)


def point_masses(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    """Always safe, and never as long: p(x), and what p has besides x."""

    def besides(i: int) -> Any:
        return normalise([ZERO if x == draft[i] else a for x, a in enumerate(p_rows[i])])

    return rejecting(
        p_rows,
        q_rows,
        draft,
        chance,
        accept=lambda i: 1 if p_rows[i] == q_rows[i] else p_rows[i][draft[i]],
        recover=besides,
    )


def recovers_from_the_target(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(p_rows, q_rows, draft, chance, recover=lambda i: p_rows[i])


def recovers_from_the_next_row(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(p_rows, q_rows, draft, chance, recover=lambda i: p_rows[i + 1])


def recovers_a_residual_of_the_first(p_rows: Any, q_rows: Any, draft: Any, chance: Any) -> Any:
    return rejecting(
        p_rows, q_rows, draft, chance, recover=lambda i: residual(p_rows[0], q_rows[0])
    )


# ---------------------------------------------------------------------- generate


def looping(
    target: Any,
    draft: Any,
    prompt: Any,
    n: int,
    gamma: int,
    eos: Any,
    knobs: Any,
    chance: Any,
    room: Any = None,
    ended: Any = None,
    cut: Any = None,
    clean: Any = None,
    read: Any = None,
    draft_knobs: Any = None,
    declared_knobs: Any = None,
    check: Any = verify,
) -> list[int]:
    """Run the loop, with a part exchanged.

    room(left) tokens to draft; ended(new); cut(tokens of a round, new);
    clean(session, text, drafted); read(session, text)
    """
    text, ended = list(prompt), ended or (lambda new: len(new) >= n or (new and new[-1] == eos))
    read = read or (lambda session, text: text[len(session) :])
    while not ended(text[len(prompt) :]):
        drafted: list[int] = []
        q_rows: list[Any] = []
        left = n - (len(text) - len(prompt))
        for _ in range(room(left) if room else min(gamma, left - 1)):
            row = draft.score(read(draft, [*text, *drafted]))[-1]
            q_rows.append(
                warp(row, *(declared_knobs or knobs))
                if declared_knobs
                else warp(row, *(draft_knobs or knobs))
            )
            drafted.append(chance.draw(warp(row, *(draft_knobs or knobs))))
        rows = target.score([*read(target, text), *drafted])[-len(drafted) - 1 :]
        tokens = check([warp(row, *knobs) for row in rows], q_rows, drafted, chance)
        if cut:
            tokens = cut(tokens, text[len(prompt) :])
        elif eos in tokens:
            tokens = tokens[: tokens.index(eos) + 1]
        text += tokens
        for session in (target, draft):
            (clean or kept_only)(session, text, drafted)
    return text[len(prompt) :]


def kept_only(session: Any, text: Any, drafted: Any) -> None:
    session.rewind(min(len(session), len(text) - 1))


def newest(session: Any, text: Any) -> Any:
    """Everything in the first round, then the newest token alone."""
    return text[-1:] if len(session) else text


def with_parts(name: str, **parts: Any) -> Callable[..., Any]:
    """Return the loop with constant parts exchanged."""

    def exchanged(*args: Any) -> list[int]:
        return looping(*args, **parts)

    exchanged.__name__ = name
    return exchanged


def overshoots(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B30."""
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, room=lambda left: gamma)


def end_token_ignored(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return looping(target, draft, prompt, n, gamma, None, knobs, chance)


def end_seen_last_in_a_block_only(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B26."""
    return looping(
        target, draft, prompt, n, gamma, eos, knobs, chance, cut=lambda tokens, new: tokens
    )


def drafted_end_trusted(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B27: the text ends where the draft proposes the end."""
    seen: list[bool] = []

    def check(p: Any, q: Any, drafted: Any, chance: Any) -> Any:
        seen.append(eos in drafted)
        return verify(p, q, drafted, chance)

    ended = lambda new: len(new) >= n or (new and new[-1] == eos) or (seen and seen[-1])  # noqa: E731
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, check=check, ended=ended)


def end_not_said(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    new = looping(target, draft, prompt, n, gamma, eos, knobs, chance)
    return new[:-1] if new and new[-1] == eos else new


def prompt_and_all(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return [*prompt, *looping(target, draft, prompt, n, gamma, eos, knobs, chance)]


def ends_with_the_prompt(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return [] if prompt[-1] == eos else looping(target, draft, prompt, n, gamma, eos, knobs, chance)


def at_least_one(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return looping(target, draft, prompt, max(n, 1), gamma, eos, knobs, chance)


def never(session: Any, text: Any, drafted: Any) -> None:
    """No rollback at all."""


def from_the_start(session: Any, text: Any, drafted: Any) -> None:
    """B17: the whole cache is thrown away."""
    session.rewind(0)


def draft_not_rewound(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Only the target's cache is cleaned: the joint distribution is right all the same."""

    def clean(session: Any, text: Any, drafted: Any) -> None:
        if session is target:
            kept_only(session, text, drafted)

    def read(session: Any, text: Any) -> Any:
        return newest(session, text)

    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, clean=clean, read=read)


def draft_reads_newest(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """After a draft that is accepted whole, the draft model has not read its last token.

    This is the trap of the bonus token.
    """
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, read=newest)


def one_too_far(session: Any, text: Any, drafted: Any) -> None:
    session.rewind(min(len(session), max(0, len(text) - 2)))


def plain_decoding(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return looping(target, draft, prompt, n, 0, eos, knobs, chance)


def one_draft_fewer(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return looping(
        target,
        draft,
        prompt,
        n,
        gamma,
        eos,
        knobs,
        chance,
        room=lambda left: min(gamma - 1, left - 1),
    )


def call_for_the_newest(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """The recovered token is read by a forward pass of its own."""

    class Twice:
        def __len__(self) -> int:
            return len(target)

        def score(self, tokens: Any) -> Any:
            first = target.score(tokens[:1])
            return first + target.score(tokens[1:]) if tokens[1:] else first

        def rewind(self, length: int) -> None:
            target.rewind(length)

    return looping(Twice(), draft, prompt, n, gamma, eos, knobs, chance)


def draft_not_warped(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Right, and slow: drafts that the target's knobs forbid are rejected."""
    plain = (Fraction(1), None, None)
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, draft_knobs=plain)


def declared_raw(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B4: drawn from the warped distribution, judged by the raw one."""
    plain = (Fraction(1), None, None)
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance, declared_knobs=plain)


def target_not_warped(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B6."""
    plain = (Fraction(1), None, None)
    return looping(target, draft, prompt, n, gamma, eos, plain, chance, draft_knobs=knobs)


def greedy_drafts(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """B3: the favourite is drafted, and judged as if it had been drawn."""
    greedy = (ZERO, None, None)
    return looping(
        target,
        draft,
        prompt,
        n,
        gamma,
        eos,
        knobs,
        chance,
        draft_knobs=greedy,
        declared_knobs=knobs,
    )


def peek_weights(session: Any, text: Any) -> Any:
    """Return the weights after a text, without a forward pass."""
    return list(props_a1.find_row(**session.made_of, text=text))


class Peeked:
    """A session whose forward passes leave no trace."""

    def __init__(self, session: Any):
        self.session, self.read = session, list[int]()

    def __len__(self) -> int:
        return len(self.read)

    def score(self, tokens: Any) -> Any:
        self.read += tokens
        return [
            peek_weights(self.session, self.read[: at + 1])
            for at in range(len(self.read) - len(tokens), len(self.read))
        ]

    def rewind(self, length: int) -> None:
        del self.read[length:]


def nobody_called(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Plain decoding from distributions that no forward pass returned.

    The laws of the caches and the passes all hold where there is no pass.
    """
    return looping(Peeked(target), draft, prompt, n, 0, eos, knobs, chance)


def called_afterwards(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """The same, and one forward pass at the end."""
    new = nobody_called(target, draft, prompt, n, gamma, eos, knobs, chance)
    if new:
        target.score([*prompt, *new][:-1])
    return new


def draft_never_called(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    return looping(target, Peeked(draft), prompt, n, gamma, eos, knobs, chance)


def drafts_too_many(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Fewer forward passes than the rule needs, with longer drafts than were asked for."""
    return looping(target, draft, prompt, n, gamma + 1, eos, knobs, chance)


def called_for_nothing(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """The prompt is read before anybody looks whether something is wanted."""
    if not n:
        target.score(prompt)
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance)


def draft_called_for_nothing(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    if not n:
        draft.score(prompt)
    return looping(target, draft, prompt, n, gamma, eos, knobs, chance)


def drafts_what_the_target_says(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Every draft is accepted, because it is drawn from the target's distributions, which are
    looked up.

    The forward pass of the draft model is not used.
    """

    class Shown(Peeked):
        def score(self, tokens: Any) -> Any:
            draft.score(tokens)
            return super().score(tokens)

        def rewind(self, length: int) -> None:
            draft.rewind(length)
            super().rewind(length)

    return looping(target, Shown(target), prompt, n, gamma, eos, knobs, chance)


WRONG: list[tuple[str, Callable[..., Any], str]] = [
    *(("warp", f, a1_position.A_LAW) for f in (not_normalised, no_row, numbers_as_text)),
    *(
        ("warp", f, a1_position.TEMPERATURE)
        for f in (
            whole_weights,
            colder_is_warmer,
            all_greatest_at_zero,
            last_greatest_at_zero,
            temperature_off_at_zero,
        )
    ),
    *(("warp", f, a1_position.TOP_K) for f in (ties_stay, one_too_few, ties_from_behind)),
    *(
        ("warp", f, a1_position.TOP_P)
        for f in (crossing_one_left_out, more_than_it_takes, whoever_has_top_p)
    ),
    *(("warp", f, a1_position.ORDER) for f in (top_p_first, temperature_last, share_of_all)),
    *(
        ("acceptance", f, a1_position.PROBABILITY)
        for f in (may_exceed_one, yes_or_no, a_difference)
    ),
    *(("acceptance", f, a1_position.OVER) for f in (swapped, only_p, always, a_little_more, root)),
    ("acceptance", the_smaller_by_the_greater, a1_position.UNDER),
    *(("residual", f, a1_position.REST) for f in (left_unnormalised, negatives_stay)),
    *(
        ("residual", f, a1_position.BEYOND)
        for f in (target_again, absolute, softmaxed, draft_beyond_target)
    ),
    *(("residual", f, a1_position.WHOLE) for f in (likeliest_left, evenly, target_where_left)),
    *(
        ("residual", f, a1_position.EQUAL)
        for f in (nothing_left, even_where_equal, nan_where_equal)
    ),
    *(
        ("verify", f, a1_round.TOKENS)
        for f in (two_more, nothing_recovered, skips_rejected, the_last_alone)
    ),
    *(("verify", f, a1_round.BONUS) for f in (no_bonus, bonus_of_the_draft, bonus_a_row_early)),
    *(
        ("verify", f, a1_round.KEPT)
        for f in (keeps_all, returns_the_rejected_too, turned_round, all_or_nothing, point_masses)
    ),
    *(
        ("verify", f, a1_round.JOINT)
        for f in (
            recovers_from_the_target,
            recovers_from_the_next_row,
            recovers_a_residual_of_the_first,
        )
    ),
    *(
        ("generate", f, a1_loop.STOPS)
        for f in (
            overshoots,
            end_token_ignored,
            end_seen_last_in_a_block_only,
            drafted_end_trusted,
            end_not_said,
            prompt_and_all,
            ends_with_the_prompt,
            at_least_one,
        )
    ),
    *(
        ("generate", f, a1_loop.JOINT)
        for f in (
            with_parts("never_rewound", clean=never, read=newest),
            declared_raw,
            target_not_warped,
            greedy_drafts,
        )
    ),
    *(
        ("generate", f, a1_loop.CACHES)
        for f in (
            with_parts("thrown_away", clean=from_the_start),
            with_parts("rewound_too_far", clean=one_too_far),
            draft_not_rewound,
            draft_reads_newest,
        )
    ),
    *(
        ("generate", f, a1_loop.READ)
        for f in (
            nobody_called,
            called_afterwards,
            draft_never_called,
            drafts_too_many,
            called_for_nothing,
            draft_called_for_nothing,
        )
    ),
    *(
        ("generate", f, a1_loop.CALLS)
        for f in (
            plain_decoding,
            one_draft_fewer,
            call_for_the_newest,
            draft_not_warped,
            drafts_what_the_target_says,
        )
    ),
]


@pytest.mark.parametrize(
    ("task", "function", "law"), WRONG, ids=lambda value: getattr(value, "__name__", None)
)
@pytest.mark.slow
def test_a_mistake_breaks_the_law_meant_for_it(
    task: str, function: Callable[..., Any], law: str
) -> None:
    with pytest.raises(LawViolated) as accused:
        judge_laws(TASKS[task], function)
    assert accused.value.counterexample.law == law
    print(accused.value)


def test_every_law_breaks_on_something() -> None:
    meant = {law for _, _, law in WRONG}
    laws = {evidence.law for name in TASKS for evidence in judge_reference(name)}
    assert meant == laws == {law.sentence for task in ASSIGNMENT.tasks for law in task.laws}


def test_the_page_for_instructors_names_patterns_that_can_be_reached() -> None:
    page = (FOLDER.parents[1] / "instructors.md").read_text(encoding="utf-8")
    for function, name in (
        (recovers_from_the_target, "verify"),
        (bonus_a_row_early, "verify"),
        (evenly, "residual"),
        (nothing_left, "residual"),
    ):
        verdicts = grading.judge_task(TASKS[name], function).verdicts
        numbers = {
            status: ", ".join(
                str(at) for at, verdict in enumerate(verdicts, 1) if verdict.status == status
            )
            for status in ("holds", "broken")
        }
        assert f"| `{name}` | {numbers['holds']} | {numbers['broken']} |" in page


# ---------------------------------------------------------------------- a student's folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a new A1."""
    starter.write_folder(ASSIGNMENT, tmp_path / "A1")
    return tmp_path / "A1"


def test_the_starter_fails_every_task_and_leaks_nothing(folder: Path) -> None:
    text = (folder / "submission.py").read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "submission"}
    exec(compile(text, "submission.py", "exec"), names)
    for task in ASSIGNMENT.tasks:
        result = grading.judge_task(task, names[task.name])
        assert (
            result.score == 0
            and f"{task.title.split()[0]} {task.name}: write me" in result.sentence
        )
    solution = (FOLDER / "reference.py").read_text(encoding="utf-8")
    assert not starter.find_leaks(starter.solution_lines(solution), text)
    assert text.count("write me") == 5 and text.count(">>>") == solution.count(">>>")


@pytest.mark.slow
def test_the_reference_through_the_child_process(folder: Path) -> None:
    shutil.copy(FOLDER / "reference.py", folder / "submission.py")
    graded = grading.grade_folder(ASSIGNMENT, folder)
    assert graded.score == graded.max_score == 100, graded.problem


def test_a_half_solved_submission_is_shown_its_smallest_case(folder: Path) -> None:
    """As README and hand-out promise: points for what is right, and a case to calculate by hand for
    what is wrong.
    """
    text = (FOLDER / "reference.py").read_text(encoding="utf-8")
    wrong = text.replace("return [x / mass for x in left] if mass else list(p)", "return list(p)")
    wrong = wrong.replace(
        "text, end = list(prompt), len(prompt) + n",
        "raise NotImplementedError('A1.5 generate: write me')",
    )
    assert wrong != text
    (folder / "submission.py").write_text(wrong, encoding="utf-8")
    handout = (folder / "handout.md").read_text(encoding="utf-8")
    results = {
        task: grading.grade_folder(ASSIGNMENT.select([task]), folder).results[0]
        for task in ("acceptance", "residual", "generate")
    }
    assert [result.score for result in results.values()] == [10, 4, 0]
    assert "\n".join(report.describe_counterexample(results["residual"])) in handout
    assert "not written yet" in results["generate"].sentence


# ---------------------------------------------------------------------- what the hand-out says


def test_the_handouts_table_and_points() -> None:
    handout = (FOLDER / "handout.md").read_text(encoding="utf-8")
    for task in ASSIGNMENT.tasks:
        assert f"| {task.title} | `{task.name}` | {task.points} |" in handout
    p, q = ([Fraction(x, 8) for x in row] for row in ((4, 3, 1), (2, 2, 4)))
    kept = list(map(min, p, q))
    rows = {
        "$p$": p,
        "$q$": q,
        "acceptance": [acceptance(p, q, token) for token in range(3)],
        "drafted and accepted, $\\min(p, q)$": kept,
        "residual": residual(p, q),
    }
    for name, row in rows.items():
        assert f"| {name} | {' | '.join(map(str, row))} |" in handout
    rejected = 1 - sum(kept)
    assert f"alpha = {1 - rejected}$" in handout and f"rejected: {rejected}" in handout
    said = [
        f"{a} + {rejected} · {r} = {a + rejected * r}"
        for a, r in zip(kept, residual(p, q), strict=True)
        if r
    ]
    assert all(line in handout for line in said) and len(said) == 2
    weights = [Fraction(x) for x in (3, 1, 2)]
    assert warp(weights, Fraction(1), 2, Fraction(3, 5)) == [1, 0, 0]
    assert top_p_first(weights, Fraction(1), 2, Fraction(3, 5)) == [
        Fraction(3, 5),
        0,
        Fraction(2, 5),
    ]


def test_the_handouts_two_rounds() -> None:
    words = ["The", "cat", "sat", "ran", "away", "fast", "."]

    def says(**after: str) -> Any:
        return [[Fraction(after.get(a, ".") == b) for b in words] for a in words]

    target = props_a1.Session(says(The="cat", cat="ran", ran="away", away="fast"), "last")
    draft = props_a1.Session(says(The="cat", cat="sat", ran="away", away="fast"), "last")
    new = reference.generate(
        target, draft, [0], 5, 2, None, (Fraction(1), None, None), reference.Dice(0)
    )
    spelled = lambda tokens: " ".join(words[token] for token in tokens)  # noqa: E731
    assert spelled(new) == "cat ran away fast ."
    asked = [
        (spelled(before), spelled(tokens))
        for what, before, tokens in target.trace
        if what == "score"
    ]
    assert asked == [("", "The cat sat"), ("The cat", "ran away fast")]
    handout = (FOLDER / "handout.md").read_text(encoding="utf-8")
    assert all(f"target.score({tokens})" in handout for _, tokens in asked)
    caches = [spelled(session._cache) for session in (target, draft)]
    assert (
        caches == ["The cat ran away fast", "The cat ran away"]
        and f"{caches[0]}       {caches[1]}   " in handout
    )


# ---------------------------------------------------------------------- the session


def cut_late(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """Drafts gamma tokens in every round, and cuts what is too much."""

    def cut(tokens: Any, new: Any) -> Any:
        tokens = tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
        return tokens[: n - len(new)]

    return tuple(
        looping(
            target, draft, prompt, n, gamma, eos, knobs, chance, room=lambda left: gamma, cut=cut
        )
    )


def rewound_early(
    target: Any, draft: Any, prompt: Any, n: int, gamma: int, eos: Any, knobs: Any, chance: Any
) -> Any:
    """It rewinds before a round. The draft reads all that it drafted, up to the end token."""
    text = list(prompt)
    while len(text) < len(prompt) + n and (text[-1] != eos or len(text) == len(prompt)):
        for session in (target, draft):
            session.rewind(min(len(session), len(text) - 1))
        rows = draft.score(text[len(draft) :])
        drafted: list[int] = []
        q_rows: list[Any] = []
        while len(drafted) < min(gamma, len(prompt) + n - len(text) - 1) and eos not in drafted:
            q_rows.append(warp(rows[-1], *knobs))
            drafted.append(chance.draw(q_rows[-1]))
            rows = draft.score(drafted[-1:])
        rows = target.score(text[len(target) :] + drafted)
        tokens = verify(
            [warp(row, *knobs) for row in rows[-len(drafted) - 1 :]], q_rows, drafted, chance
        )
        text += tokens[: tokens.index(eos) + 1] if eos in tokens else tokens
    return text[len(prompt) :]


@pytest.mark.parametrize("function", [cut_late, rewound_early])
@pytest.mark.slow
def test_other_right_ways_are_right(function: Callable[..., Any]) -> None:
    judge_laws(TASKS["generate"], function)


def test_floats_may_be_calculated_with() -> None:
    judge_laws(TASKS["warp"], lambda *args: [float(x) for x in warp(*args)])
    judge_laws(TASKS["residual"], lambda p, q: [float(x) for x in residual(p, q)])
    judge_laws(
        TASKS["acceptance"],
        lambda p, q, token: float(p[token]) / float(q[token]) if p[token] < q[token] else 1.0,
    )


def test_a_session_returns_the_distributions_of_its_model() -> None:
    rng = random.Random(0)
    laws = tuple(tuple(map(Fraction, rng.sample(range(9), 3))) for _ in range(5))
    texts = [tuple(rng.choices(range(3), k=rng.randint(1, 6))) for _ in range(40)]
    for text in texts:
        session = props_a1.Session(laws, "text")
        assert session.score(list(text))[-1] == list(SmallModel(laws, "text").next_probs(text))
        assert props_a1.Session(laws).score(text)[-1] == list(SmallModel(laws).next_probs(text[1:]))


def test_a_session_shows_what_the_handout_names_and_nothing_else() -> None:
    session = props_a1.Session([[Fraction(1), Fraction(1)]])
    assert {name for name in dir(session) if name[0] != "_"} == {
        "score",
        "rewind",
        "trace",
        "note",
        "made_of",
    }


@pytest.mark.parametrize("row", [[False, True], [math.nan, math.nan]])
def test_what_is_no_number_breaks_the_law(row: Any) -> None:
    with pytest.raises(LawViolated) as accused:
        judge_laws(TASKS["residual"], lambda p, q: row)
    assert accused.value.counterexample.expected == "a list of 2 numbers (no bool, no nan)"


@pytest.mark.parametrize(
    ("misuse", "said"),
    [
        (lambda session: session.score([]), "at least one token"),
        (lambda session: session.score(None), "at least one token"),
        (lambda session: session.score([2]), "from 0 to 1"),
        (lambda session: session.score([True]), "from 0 to 1"),
        (lambda session: session.rewind(1), "the cache holds 0 tokens"),
        (lambda session: session.rewind(-1), "rewind\\(-1\\)"),
        (lambda session: [session.rewind(0) for _ in range(101)], "asked 100 things"),
        (lambda session: session.score([0] * 51), "room for 50"),
    ],
)
def test_misuse_of_a_session_is_an_error(misuse: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        misuse(props_a1.Session([[Fraction(1), Fraction(1)]]))
