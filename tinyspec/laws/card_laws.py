"""Laws that every technique keeps in whole requests, beside its guarantee.

What is reported adds up, only its seed decides a text, and a stop cuts it where it is complete.
Each law judges the decoder of a card on small models (`Stage`). `tinyspec.laws.request_laws` asks
the same of the parts of a decoder. State that outlives a request is kept only where there is a
clock. Without one, as here, each request stands alone.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from math import isclose
from typing import Any

import numpy as np
import torch

from tinyspec import _core
from tinyspec.decoding import trace
from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics, Trace
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.request_laws import expect_no_generator_moves, run_to_end
from tinyspec.laws.stage import Stage
from tinyspec.lm.policies import AlignedPolicy, FirstComePolicy, LockstepPolicy, Policy
from tinyspec.lm.scheduler import Scheduler, run_together
from tinyspec.speculative.integrated.sarathi import SarathiPolicy
from tinyspec.technique import Card, Guarantee, Request

TRACE_IDENTITIES = "trace identities"
CALLS_IN_ROUNDS = "every call is in a round"
SAME_SEED = "same seed same output"
TWO_REQUESTS = "two requests are the two alone"
GLOBAL_RANDOMNESS = "global randomness is untouched"
BATCH_ROW_ALONE = "a batch row is the row alone"
POLICIES: tuple[Callable[[], Policy], ...] = (
    LockstepPolicy,
    lambda: FirstComePolicy(budget=4, chunk=2),
    lambda: AlignedPolicy(patience=1),
    lambda: SarathiPolicy(budget=3, least=1),
)
STOP_OF_REQUEST = "stop"

REQUEST_TOLERANCE = 1e-10
REQUEST_LETTERS = "abcdefgh"


def request_stages(card: Card, seeds: Sequence[int] = range(4), tokens: int = 8) -> Iterator[Stage]:
    """Yield small models under a technique, with right and other drafts, and ends of text."""
    sampling = SamplingParams(0.0) if card.guarantee is Guarantee.GREEDY else SamplingParams()
    base = small_stage(card, sampling)
    for seed, draft, eos in product(seeds, ("another", "right"), ((), (2,))):
        stop = StoppingCriteria(eos=frozenset(eos), max_new_tokens=tokens + seed)
        yield replace(base, seed=seed, draft=draft, stop=stop)


def small_stage(card: Card, sampling: SamplingParams) -> Stage:
    """Return a stage with few tokens: a transformer where the technique reads hidden states."""
    vocabulary = 4 if card.hidden else 3
    return Stage(card, deep=card.hidden, vocabulary=vocabulary, sampling=sampling, prompt=(0, 1))


def begin_on_stage(stage: Stage, prompt: Sequence[int] = ()) -> Decoder:
    """Return a new request that has read its prompt."""
    decoder = stage.decoder()
    decoder.extend(prompt or stage.prompt)
    return decoder


def finish_request(decoder: Decoder, seed: int = 0) -> list[Round]:
    """Return all rounds of a request."""
    return run_to_end(decoder, Seeded(seed))


def visible_rounds(rounds: Sequence[Round]) -> list[Any]:
    """Return what can be seen of rounds: drafts, verdicts, tokens."""
    return [
        (tuple(one.tree.tokens), one.verdict.accepted, one.verdict.next, one.tokens)
        for one in rounds
    ]


def decode_on_stage(stage: Stage, prompt: Sequence[int] = (), seed: int = 0) -> list[Any]:
    """Return what can be seen of a whole request."""
    return visible_rounds(finish_request(begin_on_stage(stage, prompt), seed))


# ---------------------------------------------------------------------- what is reported


@collect_evidence(TRACE_IDENTITIES)
def trace_identities(
    card: Card,
    statistics: Callable[[], Statistics] = Statistics,
    origins: Callable[[Round], Sequence[str]] = trace.token_origins,
) -> Iterator[int]:
    """Check that the reported counts add up, round by round and in sum.

    emitted = accepted + rounds with a `next` - truncated; tau * calls = emitted; the trace holds
    every token once.
    """
    for stage in request_stages(card):
        decoder, verdicts = begin_on_stage(stage), list[Verdict]()
        verifier = decoder.verifier

        def record_verdict(
            tree: Any, p: Any, rng: Any, verifier: Any = verifier, verdicts: Any = verdicts
        ) -> Verdict:
            verdicts.append(verifier(tree, p, rng))
            return verdicts[-1]  # type: ignore[no-any-return]

        decoder.verifier = record_verdict
        stats, log = statistics(), Trace(list(stage.prompt))
        for one in (rounds := finish_request(decoder)):
            stats.count(one)
            log.add(one)
        case = {**stage.describe(), "rounds": [one.tokens for one in rounds]}
        expect: Callable[..., None] = partial(expect_equal, TRACE_IDENTITIES, **case)
        for number, (one, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
            allowed = len(verdict.accepted) + (verdict.next is not None)
            got = len(one.tokens)
            expect(allowed - one.truncated, got, round=number, of="tokens of a round")
            if number + 1 < len(rounds):
                expect(0, one.truncated, round=number, of="tokens cut off before the last round")
            kinds = list(origins(one))
            expected = {
                "accepted": len(one.verdict.accepted),
                "other": int(one.verdict.next is not None),
            }
            accepted = kinds.count("accepted")
            counts = {"accepted": accepted, "other": len(kinds) - accepted}
            expect(expected, counts, round=number, of="origins")
            yield 0
        accepted = sum(len(verdict.accepted) for verdict in verdicts)
        own = sum(verdict.next is not None for verdict in verdicts)
        cut = sum(one.truncated for one in rounds)
        n, calls = len(decoder.new), stats.target_calls
        expect(accepted + own - cut, n, of="tokens in all")
        expect(n, stats.emitted, of="emitted")
        expect(len(rounds), calls, of="target calls")
        accepted = sum(len(one.verdict.accepted) for one in rounds)
        expect(
            (accepted, True), (stats.accepted, stats.acceptance <= 1), of="accepted, at most all"
        )
        if not isclose(stats.tokens_per_call * calls, n, rel_tol=1e-12):
            accuse(TRACE_IDENTITIES, n, stats.tokens_per_call * calls, **case, of="tau * calls")
        expect(decoder.new, [token for one in log.rounds for token in one.emitted], of="trace")
        expect(log, Trace.from_json(log.to_json()), of="trace as JSON")


@collect_evidence(CALLS_IN_ROUNDS)
def every_call_is_in_a_round(card: Card) -> Iterator[int]:
    """Check that every forward pass is prefill or reported by a round, so that no cost is
    hidden."""
    for stage in request_stages(card):
        decoder = begin_on_stage(stage)
        prefill = len(decoder.forward_log)
        rounds = finish_request(decoder)
        reported = [call for one in rounds for call in (*one.draft_calls, *one.calls)]
        case = {**stage.describe(), "rounds": [one.tokens for one in rounds]}
        ran = decoder.forward_log[prefill:]
        expect_equal(CALLS_IN_ROUNDS, len(ran), len(reported), **case, of="calls")
        expect_equal(CALLS_IN_ROUNDS, ran, reported, **case, of="calls, in order")
        yield 0


# ---------------------------------------------------------------------- who else is there


@collect_evidence(SAME_SEED)
def same_seed_same_output(card: Card) -> Iterator[int]:
    """Check that only its seed decides a request's text.

    Requests before it and draws from global generators change nothing.
    """
    for stage in request_stages(card):
        alone = decode_on_stage(stage, seed=5)
        for number, prompt in enumerate(((1,), (1, 0, 1))):
            finish_request(begin_on_stage(stage, prompt), number)
        draw_globally()
        again = decode_on_stage(stage, seed=5)
        expect_equal(SAME_SEED, alone, again, **stage.describe(), before="two other requests")
        yield 0


@collect_evidence(TWO_REQUESTS)
def two_requests_are_the_two_alone(card: Card) -> Iterator[int]:
    """Check that two requests that take turns give what each gives alone."""
    for stage in request_stages(card):
        prompts = (stage.prompt, (1, 0, 1))
        alone = [decode_on_stage(stage, prompt, at) for at, prompt in enumerate(prompts)]
        both = [begin_on_stage(stage, prompt) for prompt in prompts]
        sources, rounds = [Seeded(at) for at in range(2)], [list[Round](), list[Round]()]
        while not all(decoder.finished for decoder in both):
            for at, decoder in enumerate(both):
                if not decoder.finished:
                    rounds[at].append(decoder.step(sources[at]))
        got = [visible_rounds(one) for one in rounds]
        expect_equal(TWO_REQUESTS, alone, got, **stage.describe(), prompts=prompts)
        yield 0


@collect_evidence(GLOBAL_RANDOMNESS)
def global_randomness_is_untouched(card: Card) -> Iterator[int]:
    """Check that the generators of random, numpy and torch do not move."""
    for stage in request_stages(card):
        run = partial(finish_request, begin_on_stage(stage))
        expect_no_generator_moves(run, **stage.describe())
        yield 0


@collect_evidence(BATCH_ROW_ALONE)
def a_batch_row_is_the_row_alone(
    card: Card, together: Callable[..., list[Any]] = run_together
) -> Iterator[int]:
    """Check that ragged requests in one batch give what each gives alone, under every policy.

    Their logits differ by rounding only in float64; where the compiled transformer computes
    (float32 and bfloat16 on a CPU), by no bit. Of a technique whose drafts depend on the batch, the
    texts at temperature 0 are compared; of one that times it, all, since nothing has a clock here.
    """
    prompts = [(0, 1), (2,), (1, 3, 0, 2, 1), (3, 3)]
    greedy = card.guarantee is Guarantee.GREEDY or (card.of_batch and not card.timed)
    sampling = SamplingParams(0.0) if greedy else SamplingParams(0.8, top_p=0.9)
    narrow = [] if _core.compute is None else [torch.float32, torch.bfloat16]
    policies = cycle(POLICIES)
    for seed, dtype in product(range(2), [torch.float64, *narrow]):
        policy = next(policies)()
        stage = Stage(card, deep=True, vocabulary=4, seed=seed, sampling=sampling)
        models = [small_network(number, 4).to(dtype=dtype) for number in (seed, seed + 2)]
        models[0] = add_random_head(models[0], card, seed)

        def row(
            number: int, scheduler: Any, stage: Stage = stage, models: Any = models
        ) -> list[Round]:
            forward_log: list[Any] = []
            request = Request(
                target=models[0].session(forward_log, scheduler),
                drafts=[models[1].session(forward_log, scheduler) for _ in range(card.hosted)],
                sampling=stage.sampling,
                stop=StoppingCriteria(max_new_tokens=4 + 2 * number),
                references=stage.references,
                forward_log=forward_log,
                scheduler=scheduler,
            )
            decoder = card.make(request, **stage.settings)
            decoder.extend(prompts[number])
            return finish_request(decoder, number)

        alone = [row(number, None) for number in range(len(prompts))]
        batch = together(
            [
                lambda scheduler, number=number: row(number, scheduler)
                for number in range(len(prompts))
            ],
            Scheduler(policy),
        )
        for number, (one, other) in enumerate(zip(alone, batch, strict=True)):
            case = {**stage.describe(), "prompts": prompts, "row": number, "dtype": str(dtype)}
            case["policy"] = type(policy).__name__
            if card.of_batch and not card.timed:  # the others decide about drafts: texts are equal
                texts = [[token for each in got for token in each.tokens] for got in (one, other)]
                expect_equal(BATCH_ROW_ALONE, *texts, **case)
                yield 0
                continue
            expect_equal(BATCH_ROW_ALONE, visible_rounds(one), visible_rounds(other), **case)
            for at, (mine, its) in enumerate(zip(one, other, strict=True)):
                logits = [torch.as_tensor(each.scores.logits) for each in (mine, its)]
                gap = float(abs(logits[0] - logits[1]).max())
                if gap > (REQUEST_TOLERANCE if dtype == torch.float64 else 0):
                    accuse(BATCH_ROW_ALONE, "the same logits", f"{gap} apart", **case, round=at)
            yield 0


# ---------------------------------------------------------------------- where it ends


@collect_evidence(STOP_OF_REQUEST)
def stop_of_request(card: Card, tokens: int = 6) -> Iterator[int]:
    """Check that a stop cuts the text at the first place where it is complete.

    Stops are end tokens (none, one, several), sequences and strings, wherever in a block they fall.
    """
    base = small_stage(card, SamplingParams(0.0))
    for seed, draft in product(range(4), ("another", "right")):
        stage = replace(base, seed=seed, draft=draft, stop=StoppingCriteria(max_new_tokens=tokens))
        free = begin_on_stage(stage)
        finish_request(free)
        for rule in stop_rules(free.new, base.vocabulary):
            expected = end_by_rule(free.new, rule)
            stop = StoppingCriteria(**rule, max_new_tokens=tokens, decode=spell)
            decoder = begin_on_stage(replace(stage, stop=stop))
            rounds = finish_request(decoder)
            case = {**stage.describe(), "stop": rule, "text without a stop": free.new}
            drafts = [tuple(one.tree.tokens) for one in rounds]
            got = (decoder.new, decoder.finished)
            expect_equal(STOP_OF_REQUEST, expected, got, **case, drafts=drafts)
            yield 0


def spell(ids: Sequence[int]) -> str:
    """Return the text of these tokens, one letter for each."""
    return "".join(REQUEST_LETTERS[token] for token in ids)


def stop_rules(text: Sequence[int], vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield stops that this text meets at every position, and some that it does not."""
    for token in range(vocabulary):
        yield {"eos": frozenset({token})}
        yield {"eos": frozenset({token, vocabulary - 1, vocabulary + 5})}
    pieces = {tuple(text[at : at + n]) for n in (1, 2, 3) for at in range(len(text) - n + 1)}
    for piece in sorted(pieces):
        yield {"sequences": (piece,)}
        yield {"strings": (spell(piece),)}
        yield {"eos": frozenset({piece[-1]}), "sequences": (piece, (vocabulary + 5,))}
    yield {"sequences": ((vocabulary + 5,),), "strings": ("z",)}


def end_by_rule(text: Sequence[int], rule: dict[str, Any]) -> tuple[list[int], str]:
    """Return where this text ends and why, token by token, by the definition."""
    for n in range(1, len(text) + 1):
        new = list(text[:n])
        if new[-1] in rule.get("eos", ()):
            return new, "eos"
        if any(tuple(new[-len(s) :]) == s for s in rule.get("sequences", ())) or any(
            s in spell(new) for s in rule.get("strings", ())
        ):
            return new, "stop"
    return list(text), "length"


def draw_globally() -> None:
    random.random()
    np.random.random()  # noqa: NPY002
    torch.rand(3)


REQUEST_LAWS: dict[str, Callable[[Card], Evidence]] = {
    TRACE_IDENTITIES: trace_identities,
    CALLS_IN_ROUNDS: every_call_is_in_a_round,
    SAME_SEED: same_seed_same_output,
    TWO_REQUESTS: two_requests_are_the_two_alone,
    GLOBAL_RANDOMNESS: global_randomness_is_untouched,
    BATCH_ROW_ALONE: a_batch_row_is_the_row_alone,
    STOP_OF_REQUEST: stop_of_request,
}
"""By name: what every registered technique is held to beside its guarantee."""
