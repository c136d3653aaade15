"""Decoding Speculative Decoding: which draft model, and how many tokens of it? A planner that
measures before it advises.

Yan, Agarwal and Venkataraman 2024, arXiv 2402.01528: over many pairs of models, how well a draft
models language says little of how much it speeds the target up; its latency decides, and that grows
with depth more than with width. Two measurements of a candidate suffice: the seconds of one of its
steps, and its TAR, the token acceptance rate, a mean *number* of tokens. Here TAR(n) counts the
drafted tokens that are accepted in a round of n; the token that the target adds to every round is
not in it. With t(n) the seconds of a target call over n drafted tokens and the newest, d the
draft's seconds a step:

    throughput = (TAR(n) + 1) / (n d + t(n)),        gain = throughput t(0)
    a gain of s needs TAR(n) >= s (n d + t(n)) / t(0) - 1

What makes it that technique and not a formula: the figures come from running the candidates
(`plan`, on any clock), one profile at the longest n gives TAR at every n (TAR(n) = sum of the
shares of rounds in which at least 1, 2, ... n tokens passed), and the forecast is held against
measured decoding (`measure_throughput`).

Guarantee: none, it decodes nothing; what it recommends is `speculative_decoding`, which is exact.
Tested in tests/speculative/test_planner.py and by its traps: costs are measured, the recommended
pair is the fastest on a clock that calls move, and a forecast lies within its sampling error of the
throughput measured there. User's command: `tinyspec bench plan-draft`.
Left out: the paper's training of a wide and shallow draft (`tinyspec train lm --distill` makes such
drafts).
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
"""Fresh requests with their prompts, the same ones each time it is called."""


# ---------------------------------------------------------------------- the model


class DraftProfile(NamedTuple):
    """What was measured of a candidate.

    step   seconds of the draft for one token
    reach  [longest] share of rounds in which at least 1, 2, ... drafted tokens passed
    """

    name: str
    step: float
    reach: Sequence[float]

    def tar(self, n: int) -> float:
        """Mean number of accepted tokens in rounds of n drafted ones.

        >>> DraftProfile("a", 1.0, (0.5, 0.25)).tar(2)
        0.75
        """
        return float(sum(self.reach[:n]))


class Recommendation(NamedTuple):
    """A candidate at its best length. `draft` None and n 0: plain decoding.

    rate     forecast tokens a second
    gain     over plain decoding
    missing  accepted tokens a round that it would need on top to be as fast as the recommended one;
             None: no n makes it so
    """

    draft: str | None
    n: int
    tar: float
    rate: float
    gain: float
    missing: float | None


def tokens_per_second(tar: float, n: int, step: float, verify: float) -> float:
    """Tokens a second; `tar` does not count the token that the target adds.

    >>> tokens_per_second(tar=2.0, n=4, step=0.01, verify=0.06)
    30.0
    """
    return (tar + 1) / (n * step + verify)


def needed_tar(gain: float, n: int, step: float, verify: float, plain: float) -> float:
    """The TAR at which rounds of n gain so much over plain steps of `plain` seconds.

    >>> round(needed_tar(2.0, n=4, step=0.01, verify=0.06, plain=0.05), 6)
    3.0
    """
    return gain * (n * step + verify) / plain - 1


def recommend_drafts(
    verify: Sequence[float], drafts: Sequence[DraftProfile]
) -> list[Recommendation]:
    """Every candidate and plain decoding, each at its best length, the fastest first.

    verify  [longest + 1] seconds of a target call over n drafted tokens, n = 0 being a plain step
    """
    if not verify or min(verify) <= 0:
        raise TinyspecError(
            "the planner needs the measured seconds of a target call over 0, 1, ... drafted tokens"
        )
    plain = verify[0]
    made = [Recommendation(None, 0, 0.0, 1 / plain, 1.0, None)]
    spans = [range(1, min(len(draft.reach), len(verify) - 1) + 1) for draft in drafts]
    for draft, span in zip(drafts, spans, strict=True):
        if not span:
            raise TinyspecError(
                f"{draft.name}: no draft length was measured both of it and of the target"
            )
        rate, n = max((tokens_per_second(draft.tar(n), n, draft.step, verify[n]), -n) for n in span)
        made.append(Recommendation(draft.name, -n, draft.tar(-n), rate, rate * plain, None))
    best = max(made, key=lambda advice: advice.rate)
    for at, (draft, span) in enumerate(zip(drafts, spans, strict=True), start=1):
        wanted = {n: needed_tar(best.gain, n, draft.step, verify[n], plain) for n in span}
        lacks = [
            max(0.0, tar - draft.tar(n)) for n, tar in wanted.items() if tar <= n
        ]  # no more than n are ever accepted
        made[at] = made[at]._replace(missing=0.0 if made[at] is best else min(lacks, default=None))
    return sorted(made, key=lambda advice: (-advice.rate, advice.n))


# ---------------------------------------------------------------------- the measurements


class TimedDrafter(ModelDrafter):
    """A draft model that is timed: seconds it drafted, tokens it made."""

    def __init__(self, request: Request, n: int, clock: Clock):
        super().__init__(
            request.drafts[0],
            n,
            request.stop.eos,
            request.draft_max_lengths[0] if request.draft_max_lengths else None,
        )
        self.clock, self.seconds, self.made = clock, 0.0, 0

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        begun = self.clock()
        tree = super().propose(context, max_draft_depth, sampling, rng)
        self.seconds += self.clock() - begun
        self.made += len(tree.tokens)
        return tree


class KnownTextDrafter(BaseDrafter):
    """Proposes a text that is known, `n` tokens of it, n = 0, 1, ... longest in turn: what a target
    call costs by its size.
    """

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
    name: str, asked: NewRequests, longest: int, clock: Clock, seed: int = 0
) -> DraftProfile:
    """Let the draft guess `longest` tokens a round: its seconds a step, and how far its guesses
    reach.
    """
    seconds, made, rounds, passed = 0.0, 0, 0, [0] * longest
    for number, (request, prompt) in enumerate(asked()):
        drafter = TimedDrafter(request, longest, clock)
        decoder, rng = (
            start_decoder(request.decoder(drafter, verify_tree), prompt),
            Seeded(seed + number),
        )
        while not decoder.finished:
            whole = decoder.max_draft_depth >= longest and not drafter.left_behind
            round = decoder.step(rng)
            rounds += whole
            for at in range(len(round.verdict.accepted) if whole else 0):
                passed[at] += 1
        seconds, made = seconds + drafter.seconds, made + drafter.made
        decoder.end()
    if not rounds:
        raise TinyspecError(
            f"{name}: no text had room for {longest} drafted tokens; take longer texts or a lower longest"
        )
    return DraftProfile(name, seconds / made, tuple(count / rounds for count in passed))


def profile_target(asked: NewRequests, longest: int, clock: Clock, seed: int = 0) -> list[float]:
    """[longest + 1] median seconds of a round without drafting, over n = 0, 1, ... drafted tokens:
    call, verdict, commit.
    """
    seconds: list[list[float]] = [[] for _ in range(longest + 1)]
    texts: list[list[int]] = []
    for known in (False, True):  # first plainly, to know the texts; then with drafts from them
        for number, (request, prompt) in enumerate(asked()):
            drafter = KnownTextDrafter(texts[number], longest) if known else BaseDrafter()
            decoder, rng = (
                start_decoder(request.decoder(drafter, verify_tree), prompt),
                Seeded(seed + number),
            )
            while not decoder.finished:
                started = clock()
                round = decoder.step(rng)
                seconds[len(round.tree.tokens)].append(clock() - started)
            texts.append(list(decoder.context))
            decoder.end()
    if unseen := [n for n, found in enumerate(seconds) if not found]:
        raise TinyspecError(
            f"no text was long enough for a call over {unseen[0]} drafted tokens: take longer texts"
        )
    return [median(found) for found in seconds]


def plan(
    asked: Mapping[str, NewRequests], longest: int, clock: Clock, seed: int = 0
) -> tuple[list[float], list[DraftProfile], list[Recommendation]]:
    """Measure the target and every candidate, and recommend.

    asked  by the candidate's name: requests on the target with that draft
    """
    if not asked:
        raise TinyspecError("the planner has no candidate: name at least one draft model")
    verify = profile_target(next(iter(asked.values())), longest, clock, seed)
    profiles = [
        profile_draft(name, requests, longest, clock, seed) for name, requests in asked.items()
    ]
    return verify, profiles, recommend_drafts(verify, profiles)


def measure_throughput(
    asked: NewRequests, n: int, clock: Clock, seed: int = 0
) -> tuple[float, float]:
    """Tokens a second of decoding with n drafted tokens a round (0: plain), behind the prompt; and
    tokens accepted a round.
    """
    seconds, tokens, accepted, rounds = 0.0, 0, 0, 0
    for number, (request, prompt) in enumerate(asked()):
        drafter = TimedDrafter(request, n, clock) if n else BaseDrafter()
        decoder, rng = (
            start_decoder(request.decoder(drafter, verify_tree), prompt),
            Seeded(seed + number),
        )
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
    """A decoder that has read its prompt."""
    decoder.extend(prompt)
    return decoder


@technique(
    title="Decoding Speculative Decoding",
    summary="predicts the speed-up from measured costs",
    paper="Yan et al. 2024, arXiv 2402.01528",
    family="drafting",
    guarantee=Guarantee.NONE,
    kind="analysis",
)
def planner(request: Request) -> Decoder:
    """An analysis: there is nothing to decode with."""
    raise TinyspecError(
        "planner decodes nothing: it recommends a draft and a length for --method speculative_decoding; "
        "run: tinyspec bench plan-draft"
    )
