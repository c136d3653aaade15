"""What `generate` of assignment A1 is held to: the whole loop, on two sessions with caches, on
every outcome of its chance.

The joint law must be that of plain decoding, which `laws.exact` calculates from the target's rows.
A cache that is left dirty can hide from it: a draft that reads refused tokens is only a worse
draft. So the sessions remember what was asked of them, and three more laws read that: what stood in
the caches, whether each token comes from a call, and how often the target was called.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.grade.a1_laws import Function, close
from tinyspec.grade.a1_round import Text, alike
from tinyspec.grade.a1_stage import STOPS, Run, Situation, endings, every, situations
from tinyspec.grade.task import Cases
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.cases import shrink_case
from tinyspec.laws.exact import Reference

JOINT = "joint distribution: over all rounds, the text has the distribution of plain decoding"
CACHES = (
    "at every forward pass the cache holds what was accepted: nothing rejected, nothing read twice"
)
READ = "tokens come from forward passes: the target reads all but the last, the draft what its tokens follow; n = 0 needs none"
CALLS = "one forward pass of the target a round, and rounds as long as the rule allows"


def stops(generate: Function, cases: Cases) -> Evidence:
    """A target that knows what follows is obeyed: up to n tokens, up to the end token, whatever the
    draft says.
    """
    evidence = Evidence(STOPS)
    for given in smallest_endings(cases):
        evidence.cases += 1
        expected: Text = ()
        while len(expected) < given.case.tokens and (not expected or expected[-1] != given.eos):
            row = given.law("p", (*given.prompt, *expected))
            expected = (*expected, row.index(1))
        for outcome in every(generate, given, evidence):
            if outcome.new != expected:
                accuse(STOPS, list(expected), list(outcome.new), **given.shown())
    return evidence


def smallest_endings(cases: Cases) -> list[Situation]:
    """The endings, the smallest first."""
    return sorted(
        endings(cases), key=lambda given: given.case.tokens + given.case.gamma + len(given.prompt)
    )


def smallest(given: Situation, broken: Callable[[Situation], bool]) -> Situation:
    """The smallest situation that a broken one leads to."""
    return replace(
        given, case=shrink_case(given.case, lambda case: broken(replace(given, case=case)))
    )


def plain(given: Situation) -> dict[Text, Any]:
    """The law of plain decoding."""
    stop = StoppingCriteria(eos=frozenset(() if given.eos is None else (given.eos,)))
    temperature, top_k, top_p = given.knobs
    warp = SamplingParams(float(temperature), top_k, top_p)
    return dict(Reference(partial(given.row, "p"), warp, stop).law(given.case.tokens, given.prompt))


def joint(generate: Function, cases: Cases) -> Evidence:
    """The probability of every text is that of plain decoding under the same knobs, exactly."""
    evidence = Evidence(JOINT)

    def law(given: Situation) -> dict[Text, Any]:
        texts: dict[Text, Any] = {}
        for outcome, mass in every(generate, given, evidence).items():
            texts[outcome.new] = texts.get(outcome.new, 0) + mass
        return texts

    def broken(given: Situation) -> bool:
        return not alike(plain(given), law(given))

    for given in situations(cases):
        evidence.cases += 1
        if broken(given):
            found = smallest(given, broken)
            accuse(JOINT, plain(found), law(found), **found.shown())
    return evidence


def shared(one: Text, other: Text) -> int:
    """How many tokens two texts have in common, from the first on."""
    return next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )


def misread(prompt: Text, outcome: Run) -> tuple[dict[str, Any], Any, Any] | None:
    """The first call whose cache holds something else than it should: (which, expected, got).

    The target has to have read what was kept of its last block. The draft has to have read what the
    target is about to judge.
    """
    text: Text = (*prompt, *outcome.new)
    after: Text = ()
    for before, tokens in outcome.target:
        ought = after[: shared(after, text)]
        if before != ought:
            return (
                called("target", text, tokens, "its cache before the forward pass"),
                list(ought),
                list(before),
            )
        after = (*before, *tokens)
    judged, after = [(*before, *tokens) for before, tokens in outcome.target], ()
    for before, tokens in outcome.draft:
        read = (*before, *tokens)
        while judged and judged[0][: len(read)] != read:
            judged.pop(0)
        if not judged:
            asked = called("draft", text, tokens, "what it has read after the forward pass")
            return asked, "a beginning of a text that the target reads later", list(read)
        ought = after[: shared(after, judged[0])]
        if before != ought:
            return (
                called("draft", text, tokens, "its cache before the forward pass"),
                list(ought),
                list(before),
            )
        after = read
    return None


def called(model: str, text: Text, tokens: Text, compared: str) -> dict[str, Any]:
    """The call of a model in the words of the hand-out."""
    return {
        "text in the end": list(text),
        "call": f"{model}.score({list(tokens)})",
        "compared": compared,
    }


def caches(generate: Function, cases: Cases) -> Evidence:
    """In every outcome, at every call: the cache holds what was kept. Only cases count in which the
    draft was called.
    """
    evidence = Evidence(CACHES)
    for given in situations(cases):
        outcomes = every(generate, given, evidence)
        evidence.cases += any(outcome.draft for outcome in outcomes)
        for outcome in outcomes:
            wrong = misread(given.prompt, outcome)
            if wrong is not None:
                which, expected, got = wrong
                accuse(CACHES, expected, got, **given.shown(), **which)
    return evidence


def unread(given: Situation, outcome: Run) -> tuple[str, Any, Any] | None:
    """What was said without the call that it needs: (what is compared, expected, got).

    A target that read the text but its last token was asked for the law of every token. What it
    reads beyond the text that is known by then was drafted, behind tokens that the draft has read.
    """
    text: Text = (*given.prompt, *outcome.new)
    target, draft = (
        [(*before, *tokens) for before, tokens in asked]
        for asked in (outcome.target, outcome.draft)
    )
    if given.case.tokens == 0:
        asked = [
            *(f"target.score({list(read)})" for read in target),
            *(f"draft.score({list(read)})" for read in draft),
        ]
        return ("the forward passes", "none", asked) if asked else None
    if not any(shared(read, text) >= len(text) - 1 for read in target):
        longest = max(target, key=lambda read: shared(read, text), default=())
        return "what the target has read of the text in the end", list(text[:-1]), list(longest)
    known = len(given.prompt)
    for read in target:
        if len(read) > known + given.case.gamma:
            what = (
                f"how many tokens after {list(read[:known])} the target reads in one forward pass"
            )
            return what, f"at most {given.case.gamma}", len(read) - known
        if len(read) > known and not any(shared(each, read) >= len(read) - 1 for each in draft):
            longest = max(draft, key=lambda each: shared(each, read), default=())
            return (
                f"what the draft has read before it drafts {read[-1]}",
                list(read[:-1]),
                list(longest),
            )
        known = shared(read, text) + 1
    return None


def calls(generate: Function, cases: Cases) -> Evidence:
    """In every outcome: no token that nobody was asked for, and no call where nothing is wanted.

    Only cases count in which the draft was called.
    """
    evidence = Evidence(READ)
    for given in (*smallest_endings(cases), *situations(cases)):
        outcomes = every(generate, given, evidence)
        evidence.cases += any(outcome.draft for outcome in outcomes)
        for outcome in outcomes:
            wrong = unread(given, outcome)
            if wrong is not None:
                compared, expected, got = wrong
                text = [*given.prompt, *outcome.new]
                accuse(
                    READ,
                    expected,
                    got,
                    **given.shown(),
                    **{"text in the end": text, "compared": compared},
                )
    return evidence


def needed(given: Situation) -> Any:
    """How often the rule calls the target, on average: where both laws agree, with mass min(p, q),
    the round goes on.
    """

    def ended(new: Text) -> bool:
        return len(new) >= given.case.tokens or (bool(new) and new[-1] == given.eos)

    def begin(new: Text) -> Any:
        return (
            0
            if ended(new)
            else 1 + within(new, min(given.case.gamma, given.case.tokens - len(new) - 1))
        )

    def within(new: Text, left: int) -> Any:
        p, q = (given.law(name, (*given.prompt, *new)) for name in "pq")
        average: Any = 0
        for token, (a, b) in enumerate(zip(p, q, strict=True)):
            longer = (*new, token)
            agreed = min(a, b) if left else 0
            average += agreed * (within(longer, left - 1) if agreed and not ended(longer) else 0)
            average += (a - agreed) * begin(longer) if a > agreed else 0
        return average

    return begin(())


def frugal(generate: Function, cases: Cases) -> Evidence:
    """On average over all outcomes the target is called as often as the rule needs, no oftener and
    no less often.
    """
    evidence = Evidence(CALLS)
    for given in situations(cases):
        evidence.cases += 1
        got = sum(
            mass * len(outcome.target) for outcome, mass in every(generate, given, evidence).items()
        )
        expected = needed(given)
        if not close(expected, got):
            compared = "forward passes of the target, on average"
            accuse(CALLS, expected, got, **given.shown(), compared=compared)
    return evidence
