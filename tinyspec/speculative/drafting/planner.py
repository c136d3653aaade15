"""Decoding Speculative Decoding: choose a draft model and a draft length from two measurements.

Paper: Yan, Agarwal, Venkataraman 2024, arXiv 2402.01528. Nothing is trained.

Idea. Over many pairs of models, how well a draft model predicts language says little about how much
it speeds up the target. Its latency decides, and that grows with depth more than with width. Two
measurements of a candidate suffice: the seconds of one of its steps, and its TAR (token acceptance
rate), a mean *number* of tokens. Here TAR(n) counts the draft tokens accepted in a round of n; the
token that the target adds to every round is not in it.

    throughput(n) = (TAR(n) + 1) / (n d + t(n))
    gain(n)       = throughput(n) t(0)
    a gain of s needs TAR(n) >= s (n d + t(n)) / t(0) - 1

    d: seconds of a draft step        t(n): seconds of a target pass over n draft tokens

One profile at the longest n gives TAR at every n: TAR(n) is the sum over i <= n of the share of
rounds in which at least i draft tokens were accepted. The forecast is held against measured
decoding (`measure_throughput`). The command is `tinyspec bench plan-draft`.

Guarantee: none, it decodes nothing. What it recommends is `speculative_decoding`, which is exact.
Pitfall: printing the formula without measuring; counting the added token in TAR and once more.
Tests: tests/speculative/test_planner.py and the traps of laws/traps/planner.py (`recommend_drafts`
names the fastest pair on a clock that forward passes move; a forecast is within its sampling error
of the throughput measured there).
Left out: training a wide and shallow draft, as the paper does (`tinyspec train lm --distill` makes
such drafts).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.technique import Clock, Guarantee, Request, technique
from tinyspec.tree import TokenTree

NewRequests = Callable[[], Iterable[tuple[Request, Sequence[int]]]]
"""Makes new requests with their prompts, the same ones each time it is called."""


# ------------------------------ the model


class DraftProfile(NamedTuple):
    """What was measured of a candidate.

    step   seconds of the draft model for one token
    reach  [longest] share of rounds in which at least 1, 2, ... draft tokens were accepted
    """

    name: str
    step: float
    reach: Sequence[float]

    def tar(self, n: int) -> float:
        """Return the mean number of accepted tokens in rounds of n draft tokens.

        >>> DraftProfile("a", 1.0, (0.5, 0.25)).tar(2)
        0.75
        """
        return float(sum(self.reach[:n]))


class Recommendation(NamedTuple):
    """A candidate at its best draft length n. `draft` None and n 0: plain decoding.

    rate     forecast tokens per second
    gain     speed-up over plain decoding
    missing  accepted tokens per round that it lacks to be as fast as the recommended candidate;
             None: it cannot be, at any n
    """

    draft: str | None
    n: int
    tar: float
    rate: float
    gain: float
    missing: float | None


def tokens_per_second(tar: float, n: int, step: float, verify: float) -> float:
    """Return the throughput; `tar` does not count the token that the target adds.

    >>> tokens_per_second(tar=2.0, n=4, step=0.01, verify=0.06)
    30.0
    """
    return (tar + 1) / (n * step + verify)


def needed_tar(gain: float, n: int, step: float, verify: float, plain: float) -> float:
    """Return the TAR at which rounds of n tokens are `gain` times as fast as plain decoding.

    step    seconds of a draft step
    verify  seconds of a target pass over n draft tokens
    plain   seconds of a target pass over none

    >>> round(needed_tar(2.0, n=4, step=0.01, verify=0.06, plain=0.05), 6)
    3.0
    """
    return gain * (n * step + verify) / plain - 1


def recommend_drafts(
    verify: Sequence[float], drafts: Sequence[DraftProfile]
) -> list[Recommendation]:
    """Return every candidate and plain decoding, each at its best length, the fastest first.

    verify  [longest + 1] seconds of a target pass over n draft tokens; n = 0 is a plain step
    """
    if not verify or min(verify) <= 0:
        raise TinyspecError(
            "the planner needs the measured seconds of a target call over 0, 1, ... draft tokens"
        )
    plain = verify[0]
    choices = [Recommendation(None, 0, 0.0, 1 / plain, 1.0, None)]
    spans = [range(1, min(len(draft.reach), len(verify) - 1) + 1) for draft in drafts]
    for draft, span in zip(drafts, spans, strict=True):
        if not span:
            raise TinyspecError(
                f"{draft.name}: no draft length was measured both for this draft and for the "
                "target: measure both for at least 1 draft token"
            )
        rate, n = max((tokens_per_second(draft.tar(n), n, draft.step, verify[n]), -n) for n in span)
        choices.append(Recommendation(draft.name, -n, draft.tar(-n), rate, rate * plain, None))
    best = max(choices, key=lambda choice: choice.rate)
    for at, (draft, span) in enumerate(zip(drafts, spans, strict=True), start=1):
        wanted = {n: needed_tar(best.gain, n, draft.step, verify[n], plain) for n in span}
        # No more than n draft tokens are ever accepted.
        lacks = [max(0.0, tar - draft.tar(n)) for n, tar in wanted.items() if tar <= n]
        missing = 0.0 if choices[at] is best else min(lacks, default=None)
        choices[at] = choices[at]._replace(missing=missing)
    return sorted(choices, key=lambda choice: (-choice.rate, choice.n))


# ------------------------------ the measurements


class TimedDrafter(ModelDrafter):
    """A draft model that measures the seconds it takes and counts the tokens it makes."""

    def __init__(self, request: Request, n: int, clock: Clock):
        super().__init__(request.drafts[0], n, request.stop.eos, request.draft_max_length)
        self.clock, self.seconds, self.tokens = clock, 0.0, 0

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        started = self.clock()
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.seconds += self.clock() - started
        self.tokens += len(tree.tokens)
        return tree


class KnownTextDrafter(BaseDrafter):
    """Propose 0, 1, ... `longest` tokens of a known text in turn, to time passes of each size."""

    def __init__(self, text: Sequence[int], longest: int):
        self.text, self.longest, self.n = text, longest, 0

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        self.n = 0 if self.n >= self.longest else self.n + 1
        return TokenTree.chain(self.text[len(context) :][: min(self.n, max_draft_depth)])


def profile_draft(
    name: str, requests: NewRequests, longest: int, clock: Clock, seed: int = 0
) -> DraftProfile:
    """Measure a draft model in rounds of `longest` tokens: its step time and its acceptance."""
    seconds, tokens, rounds, passed = 0.0, 0, 0, [0] * longest
    for number, (request, prompt) in enumerate(requests()):
        drafter = TimedDrafter(request, longest, clock)
        decoder = start_decoder(request.decoder(drafter, verify_tree), prompt)
        rng = Seeded(seed + number)
        while not decoder.finished:
            whole = decoder.max_draft_depth >= longest and not drafter.left_behind
            round = decoder.step(rng)
            rounds += whole
            for at in range(len(round.verdict.accepted) if whole else 0):
                passed[at] += 1
        seconds, tokens = seconds + drafter.seconds, tokens + drafter.tokens
        decoder.end()
    if not rounds:
        raise TinyspecError(
            f"{name}: no text had room for {longest} draft tokens; take longer texts or a lower "
            "longest"
        )
    return DraftProfile(name, seconds / tokens, tuple(count / rounds for count in passed))


def profile_target(requests: NewRequests, longest: int, clock: Clock, seed: int = 0) -> list[float]:
    """Return the median seconds of a round over n = 0, 1, ... draft tokens, [longest + 1].

    A round is forward pass, verification and commit; drafting is not in it.
    """
    seconds: list[list[float]] = [[] for _ in range(longest + 1)]
    texts: list[list[int]] = []
    # The first pass decodes plainly, so that the texts are known; the second drafts from them.
    for known in (False, True):
        for number, (request, prompt) in enumerate(requests()):
            drafter = KnownTextDrafter(texts[number], longest) if known else BaseDrafter()
            decoder = start_decoder(request.decoder(drafter, verify_tree), prompt)
            rng = Seeded(seed + number)
            while not decoder.finished:
                started = clock()
                round = decoder.step(rng)
                seconds[len(round.tree.tokens)].append(clock() - started)
            texts.append(list(decoder.context))
            decoder.end()
    if unseen := [n for n, found in enumerate(seconds) if not found]:
        raise TinyspecError(
            f"no text was long enough for a call over {unseen[0]} draft tokens: take longer texts"
        )
    return [median(found) for found in seconds]


def plan_drafts(
    requests: Mapping[str, NewRequests], longest: int, clock: Clock, seed: int = 0
) -> tuple[list[float], list[DraftProfile], list[Recommendation]]:
    """Measure the target and every candidate, and recommend.

    requests  by the candidate's name: requests on the target with that draft model
    """
    if not requests:
        raise TinyspecError("the planner has no candidate: name at least one draft model")
    verify = profile_target(next(iter(requests.values())), longest, clock, seed)
    profiles = [
        profile_draft(name, new_requests, longest, clock, seed)
        for name, new_requests in requests.items()
    ]
    return verify, profiles, recommend_drafts(verify, profiles)


def measure_throughput(
    requests: NewRequests, n: int, clock: Clock, seed: int = 0
) -> tuple[float, float]:
    """Measure decoding with n draft tokens per round (0: plain decoding), the prompt aside.

    Returns the tokens per second and the accepted tokens per round.
    """
    seconds, tokens, accepted, rounds = 0.0, 0, 0, 0
    for number, (request, prompt) in enumerate(requests()):
        drafter = TimedDrafter(request, n, clock) if n else BaseDrafter()
        decoder = start_decoder(request.decoder(drafter, verify_tree), prompt)
        rng = Seeded(seed + number)
        started = clock()
        for round in decoder.run(rng):
            accepted += len(round.verdict.accepted)
            rounds += 1
        seconds, tokens = seconds + clock() - started, tokens + len(decoder.new)
        decoder.end()
    if not tokens:
        raise TinyspecError("nothing was decoded: ask for at least one token")
    return tokens / seconds, accepted / rounds


def start_decoder(decoder: Decoder, prompt: Sequence[int]) -> Decoder:
    """Let a decoder read its prompt, and return it."""
    decoder.extend(prompt)
    return decoder


# ------------------------------ the card


@technique(
    title="Decoding Speculative Decoding",
    summary="predicts the speed-up from measured costs",
    paper="Yan et al. 2024, arXiv 2402.01528",
    family="drafting",
    guarantee=Guarantee.NONE,
    kind="analysis",
)
def planner(request: Request) -> Decoder:
    """Raise TinyspecError: an analysis has nothing to decode with."""
    raise TinyspecError(
        "planner decodes nothing: it recommends a draft and a length for --method "
        "speculative_decoding; run: tinyspec bench plan-draft"
    )
