"""Laws of a whole request: what is reported adds up, and only its seed decides its text.

Each law exists twice: for the parts of a decoder (`Parts`, which mutants replace) and for the
decoder of a registered technique on small models (`Stage`). What must come out is worked out from
the rounds, from the text, or from a second run.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from math import isclose
from time import perf_counter
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
from tinyspec.laws.evidence import Evidence, accuse
from tinyspec.laws.exact.models import run_dense, small_network
from tinyspec.laws.loop_laws import (
    SMALL_TABLES,
    WIDE,
    WIDER,
    ConstantDrafter,
    Table,
    format_table,
    table_model,
)
from tinyspec.laws.parts import Parts
from tinyspec.laws.row_laws import normalised
from tinyspec.laws.session_laws import FAMILIES, SESSION_TOLERANCE, family_model, greedy_text
from tinyspec.laws.stage import Stage
from tinyspec.lm.gate import run_together
from tinyspec.technique import Card, Guarantee, Request

REPORT_SEEDS = range(4)
REPORT_TABLES: list[tuple[Table, Table]] = [
    *(pair for pair in SMALL_TABLES if len(pair[0]) == 1),
    (WIDE, WIDER),
]


def begin_request(
    parts: Parts,
    p: Table,
    q: Table,
    gamma: int,
    most: int | None,
    seed: int = 0,
    eos: Sequence[int] = (),
) -> tuple[Decoder, Any]:
    """Return a decoder of target p that drafts chains from q, and its randomness."""
    drafter = (
        parts.drafter(table_model(q).session(), gamma, frozenset())
        if gamma
        else ConstantDrafter(())
    )
    stop = parts.stop(eos=frozenset(eos), max_new_tokens=most)
    decoder = parts.decoder(table_model(p).session(), drafter, parts.walk, stop=stop)
    decoder.extend((0,))
    return decoder, parts.seeded(seed)


def run_to_end(decoder: Decoder, rng: Any) -> list[Round]:
    """Return all rounds of a request."""
    rounds = []
    while not decoder.finished:
        rounds.append(decoder.step(rng))
    return rounds


# ------------------------------------------------------------------ what is reported


def trace_identities_of_parts(parts: Parts) -> Evidence:
    """Check that the reported counts add up, also for no tokens.

    emitted = accepted + rounds that added a token of their own, and tau * calls = emitted.
    """
    name, seen = "trace identities", 0
    for most, eos, (p, q), gamma, seed in product(
        range(4), ((), (0,)), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS
    ):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed, eos)
        stats, seen = parts.statistics(), seen + 1
        rounds = run_to_end(decoder, rng)
        for one in rounds:
            stats.count(one)
        own = sum(one.verdict.next is not None for one in rounds)
        accepted = sum(len(one.verdict.accepted) for one in rounds)
        n, calls, drafted = (
            len(decoder.new),
            len(rounds),
            sum(len(one.tree.tokens) for one in rounds),
        )
        expected = {
            "emitted": accepted + own,
            "accepted": accepted,
            "drafted": drafted,
            "target_calls": calls,
            "tokens_per_call": n / calls if calls else 0.0,
            "acceptance": accepted / drafted if drafted else 0.0,
        }
        got = {figure: value for figure, value in stats.as_dict().items() if figure in expected}
        if got != expected or accepted + own != n:
            case = {
                "p": format_table(p),
                "q": format_table(q),
                "gamma": gamma,
                "max_new_tokens": most,
                "eos": eos,
                "seed": seed,
            }
            accuse(
                name, expected, got, **case, new=decoder.new, rounds=[one.tokens for one in rounds]
            )
    return Evidence(name, seen)


def origins_name_what_happened(parts: Parts) -> Evidence:
    """Check the origin of each token: accepted, recovered, bonus or plain."""
    name, seen = "origins name what happened", 0
    for most, (p, q), gamma, seed in product(range(1, 5), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed)
        for one in run_to_end(decoder, rng):
            seen, path = seen + 1, one.verdict.accepted
            last = (
                "plain"
                if not one.tree.tokens
                else "bonus"
                if len(path) == len(one.tree.tokens)
                else "recovered"
            )
            expected = ("accepted",) * len(path) + ((last,) if one.verdict.next is not None else ())
            got = parts.origins(one)
            if got != expected:
                accuse(
                    name,
                    expected,
                    got,
                    draft=one.tree.tokens,
                    accepted=one.tree.tokens_on(path),
                    emitted=one.tokens,
                )
    return Evidence(name, seen)


def round_laws_are_the_targets(parts: Parts) -> Evidence:
    """Check that `Round.output_probs` holds the target's row of each token.

    An outer level of a cascade divides by it.
    """
    name, seen = "round laws are the targets", 0
    for most, (p, q), gamma, seed in product(range(1, 4), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed)
        text = [0]
        for one in run_to_end(decoder, rng):
            seen += 1
            expected = [
                normalised(p[token % len(p)]) for token in (*text, *one.tokens)[len(text) - 1 : -1]
            ]
            text += one.tokens
            if [list(row) for row in one.output_probs] != expected:
                accuse(
                    name,
                    expected,
                    list(one.output_probs),
                    p=format_table(p),
                    q=format_table(q),
                    gamma=gamma,
                    tokens=one.tokens,
                )
    return Evidence(name, seen)


def logprobs_are_the_targets(parts: Parts) -> Evidence:
    """Check that a token's log-probability is log p(token | text) of the target, before warpers."""
    name, seen = "logprobs are the targets", 0
    for most, family, seed in product((1, 2, 6), FAMILIES, REPORT_SEEDS):
        target = family_model(family)
        drafter = parts.drafter(family_model(family, seed=1).session(), 2, frozenset())
        stop, sampling = StoppingCriteria(max_new_tokens=most), SamplingParams(temperature=0.5)
        decoder = parts.decoder(target.session(), drafter, parts.walk, sampling=sampling, stop=stop)
        decoder.extend((1,))
        got = [x for one in run_to_end(decoder, parts.seeded(seed)) for x in parts.logprobs(one)]
        rows, seen = run_dense(target, [1, *decoder.new]).logits, seen + 1
        expected = [
            rows[at, token] - np.log(np.exp(rows[at]).sum()) for at, token in enumerate(decoder.new)
        ]
        if len(got) != len(expected) or any(
            abs(a - b) > SESSION_TOLERANCE for a, b in zip(got, expected, strict=True)
        ):
            accuse(name, expected, got, model=family, temperature=0.5, new=decoder.new, seed=seed)
    return Evidence(name, seen)


# ------------------------------------------------------------------ what is left behind


def same_seed_of_parts(parts: Parts) -> Evidence:
    """Check that a request depends on its seed alone, not on requests before or beside it."""
    name, seen = "same seed same output", 0
    for (p, q), gamma, seed in product(REPORT_TABLES, (0, 2), REPORT_SEEDS):
        alone, rng = begin_request(parts, p, q, gamma, 6, seed)
        run_to_end(alone, rng)
        again, rng = begin_request(parts, p, q, gamma, 6, seed)
        other, between = begin_request(parts, p, q, gamma, None, seed + 1)
        while not again.finished:
            again.step(rng)
            other.step(between)
        seen += 1
        if again.new != alone.new:
            case = {"p": format_table(p), "q": format_table(q), "gamma": gamma, "seed": seed}
            accuse(name, alone.new, again.new, **case, between="another request's rounds")
    return Evidence(name, seen)


def global_randomness_of_parts(parts: Parts) -> Evidence:
    """Check that the generators of random, numpy and torch do not move."""
    name, seen = "global randomness is untouched", 0
    for gamma in (0, 1, 2):
        decoder, rng = begin_request(parts, WIDE, WIDER, gamma, 4)
        before, seen = global_generators(), seen + 1
        run_to_end(decoder, rng)
        moved = [
            library for library, state in global_generators().items() if state != before[library]
        ]
        if moved:
            accuse(
                name,
                "no generator moved",
                f"moved: {', '.join(moved)}",
                p=format_table(WIDE),
                q=format_table(WIDER),
                gamma=gamma,
            )
    return Evidence(name, seen)


def global_generators() -> dict[str, str]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "random": str(random.getstate()),
        "numpy": str([np.asarray(part).tolist() for part in legacy]),
        "torch": str(torch.get_rng_state().tolist()),
    }


def a_request_leaves_no_trace(parts: Parts) -> Evidence:
    """Check that after `end()` a session takes the next prompt as if it were new."""
    name, seen = "a request leaves no trace", 0
    for family, first in product(FAMILIES, ((1,), (1, 2, 3))):
        judge, seen = family_model(family), seen + 1
        session = parts.session(judge)
        new: list[int] = []
        for prompt in (first, (4, 5)):
            decoder = parts.decoder(
                session,
                ConstantDrafter((2, 2)),
                parts.walk,
                sampling=SamplingParams(temperature=0.0),
                stop=StoppingCriteria(max_new_tokens=3),
            )
            decoder.extend(prompt)
            for at in range(3):
                if not decoder.finished:
                    decoder.step(parts.seeded(at))
            new = decoder.new
            decoder.end()
        expected = greedy_text(judge, (4, 5), 3)
        if new != expected:
            accuse(name, expected, new, model=family, first_prompt=first, second_prompt=(4, 5))
    return Evidence(name, seen)


REPORT_LAWS = {
    "trace identities": trace_identities_of_parts,
    "origins name what happened": origins_name_what_happened,
    "round laws are the targets": round_laws_are_the_targets,
    "logprobs are the targets": logprobs_are_the_targets,
    "same seed same output": same_seed_of_parts,
    "global randomness is untouched": global_randomness_of_parts,
    "a request leaves no trace": a_request_leaves_no_trace,
}


TRACE_IDENTITIES = "trace identities"
CALLS_IN_ROUNDS = "every call is in a round"
SAME_SEED = "same seed same output"
TWO_REQUESTS = "two requests are the two alone"
GLOBAL_RANDOMNESS = "global randomness is untouched"
BATCH_ROW_ALONE = "a batch row is the row alone"
STOP_OF_REQUEST = "stop"

REQUEST_TOLERANCE = 1e-10
REQUEST_LETTERS = "abcdefgh"


def request_stages(card: Card, seeds: Sequence[int] = range(4), tokens: int = 8) -> Iterator[Stage]:
    """Yield small models under a technique, with right and other drafts, and ends of text."""
    sampling = SamplingParams(0.0) if card.guarantee is Guarantee.GREEDY else SamplingParams()
    base = Stage(
        card, deep=card.hidden, vocabulary=4 if card.hidden else 3, sampling=sampling, prompt=(0, 1)
    )
    for seed, draft, eos in product(seeds, ("another", "right"), ((), (2,))):
        stop = StoppingCriteria(eos=frozenset(eos), max_new_tokens=tokens + seed)
        yield replace(base, seed=seed, draft=draft, stop=stop)


def begin_on_stage(stage: Stage, prompt: Sequence[int] = ()) -> Decoder:
    """Return a new request that has read its prompt."""
    decoder = stage.decoder()
    decoder.extend(prompt or stage.prompt)
    return decoder


def finish_request(decoder: Decoder, seed: int = 0) -> list[Round]:
    """Return all rounds of a request."""
    rounds, rng = list[Round](), Seeded(seed)
    while not decoder.finished:
        rounds.append(decoder.step(rng))
    return rounds


def visible_rounds(rounds: Sequence[Round]) -> list[Any]:
    """Return what can be seen of rounds: drafts, verdicts, tokens."""
    return [
        (tuple(one.tree.tokens), one.verdict.accepted, one.verdict.next, one.tokens)
        for one in rounds
    ]


def is_decoder(card: Card) -> bool:
    """Return whether the technique extends a text: planners and rewriters do not."""
    return card.kind == "decoder"


# ---------------------------------------------------------------------- what is reported


def trace_identities(
    card: Card,
    statistics: Callable[[], Statistics] = Statistics,
    origins: Callable[[Round], Sequence[str]] = trace.token_origins,
) -> Evidence:
    """Check that the reported counts add up, round by round and in sum.

    emitted = accepted + rounds with a `next` - truncated; tau * calls = emitted; the trace tells
    every token once.
    """
    started, seen = perf_counter(), 0
    for stage in request_stages(card) if is_decoder(card) else ():
        decoder, verdicts = begin_on_stage(stage), list[Verdict]()
        verifier = decoder.verifier

        def listening(
            tree: Any, p: Any, rng: Any, verifier: Any = verifier, verdicts: Any = verdicts
        ) -> Verdict:
            verdicts.append(verifier(tree, p, rng))
            return verdicts[-1]  # type: ignore[no-any-return]

        decoder.verifier = listening
        stats, log = statistics(), Trace(list(stage.prompt))
        for one in (rounds := finish_request(decoder)):
            stats.count(one)
            log.add(one)
        case = {**stage.describe(), "rounds": [one.tokens for one in rounds]}
        for number, (one, verdict) in enumerate(zip(rounds, verdicts, strict=True)):
            seen += 1
            allowed = len(verdict.accepted) + (verdict.next is not None)
            last = number + 1 == len(rounds)
            _expect_equal(
                TRACE_IDENTITIES,
                allowed - one.truncated,
                len(one.tokens),
                **case,
                round=number,
                of="tokens of a round",
            )
            if one.truncated and not last:
                accuse(
                    TRACE_IDENTITIES,
                    "nothing is cut off before the last round",
                    one.truncated,
                    **case,
                    round=number,
                )
            kinds = list(origins(one))
            expected = {
                "accepted": len(one.verdict.accepted),
                "other": int(one.verdict.next is not None),
            }
            told = {
                "accepted": kinds.count("accepted"),
                "other": sum(kind != "accepted" for kind in kinds),
            }
            _expect_equal(TRACE_IDENTITIES, expected, told, **case, round=number, of="origins")
        accepted, own = (
            sum(counts)
            for counts in zip(
                *((len(v.accepted), v.next is not None) for v in verdicts), strict=True
            )
        )
        cut = sum(one.truncated for one in rounds)
        _expect_equal(
            TRACE_IDENTITIES, accepted + own - cut, len(decoder.new), **case, of="tokens in all"
        )
        _expect_equal(TRACE_IDENTITIES, len(decoder.new), stats.emitted, **case, of="emitted")
        _expect_equal(TRACE_IDENTITIES, len(rounds), stats.target_calls, **case, of="target calls")
        kept = sum(len(one.verdict.accepted) for one in rounds)
        _expect_equal(
            TRACE_IDENTITIES,
            (kept, True),
            (stats.accepted, stats.acceptance <= 1),
            **case,
            of="accepted, at most all",
        )
        if not isclose(stats.tokens_per_call * stats.target_calls, len(decoder.new), rel_tol=1e-12):
            accuse(
                TRACE_IDENTITIES,
                len(decoder.new),
                stats.tokens_per_call * stats.target_calls,
                **case,
                of="tau * calls",
            )
        _expect_equal(
            TRACE_IDENTITIES,
            decoder.new,
            [token for one in log.rounds for token in one.emitted],
            **case,
            of="trace",
        )
        _expect_equal(
            TRACE_IDENTITIES, log, Trace.from_json(log.to_json()), **case, of="trace as JSON"
        )
    return Evidence(TRACE_IDENTITIES, seen, seconds=perf_counter() - started)


def every_call_is_in_a_round(card: Card) -> Evidence:
    """Check that every forward pass is prefill or reported by a round, so that no cost is
    hidden."""
    started, seen = perf_counter(), 0
    for stage in request_stages(card) if is_decoder(card) else ():
        decoder = begin_on_stage(stage)
        prefill = len(decoder.forward_log)
        rounds, seen = finish_request(decoder), seen + 1
        told = [call for one in rounds for call in (*one.draft_calls, *one.calls)]
        case = {**stage.describe(), "rounds": [one.tokens for one in rounds]}
        _expect_equal(
            CALLS_IN_ROUNDS, len(decoder.forward_log) - prefill, len(told), **case, of="calls"
        )
        _expect_equal(
            CALLS_IN_ROUNDS, decoder.forward_log[prefill:], told, **case, of="calls, in order"
        )
    return Evidence(CALLS_IN_ROUNDS, seen, seconds=perf_counter() - started)


# ---------------------------------------------------------------------- who else is there


def same_seed_same_output(card: Card) -> Evidence:
    """Check that only its seed decides a request's text.

    Requests before it and draws from global generators change nothing.
    """
    started, seen = perf_counter(), 0
    for stage in request_stages(card) if is_decoder(card) else ():
        alone, seen = visible_rounds(finish_request(begin_on_stage(stage), 5)), seen + 1
        for number, prompt in enumerate(((1,), (1, 0, 1))):
            finish_request(begin_on_stage(stage, prompt), number)
        _draw_globally()
        _expect_equal(
            SAME_SEED,
            alone,
            visible_rounds(finish_request(begin_on_stage(stage), 5)),
            **stage.describe(),
            before="two other requests",
        )
    return Evidence(SAME_SEED, seen, seconds=perf_counter() - started)


def two_requests_are_the_two_alone(card: Card) -> Evidence:
    """Check that two requests that take turns give what each gives alone."""
    started, seen = perf_counter(), 0
    for stage in request_stages(card) if is_decoder(card) else ():
        prompts = (stage.prompt, (1, 0, 1))
        alone, seen = (
            [
                visible_rounds(finish_request(begin_on_stage(stage, prompt), at))
                for at, prompt in enumerate(prompts)
            ],
            seen + 1,
        )
        both = [begin_on_stage(stage, prompt) for prompt in prompts]
        chances, rounds = [Seeded(at) for at in range(2)], [list[Round](), list[Round]()]
        while not all(decoder.finished for decoder in both):
            for at, decoder in enumerate(both):
                if not decoder.finished:
                    rounds[at].append(decoder.step(chances[at]))
        _expect_equal(
            TWO_REQUESTS,
            alone,
            [visible_rounds(one) for one in rounds],
            **stage.describe(),
            prompts=prompts,
        )
    return Evidence(TWO_REQUESTS, seen, seconds=perf_counter() - started)


def global_randomness_is_untouched(card: Card) -> Evidence:
    """Check that the generators of random, numpy and torch do not move."""
    started, seen = perf_counter(), 0
    for stage in request_stages(card) if is_decoder(card) else ():
        decoder, before, seen = begin_on_stage(stage), global_generators(), seen + 1
        finish_request(decoder)
        moved = [
            library for library, state in global_generators().items() if state != before[library]
        ]
        if moved:
            accuse(
                GLOBAL_RANDOMNESS,
                "no generator moved",
                f"moved: {', '.join(moved)}",
                **stage.describe(),
            )
    return Evidence(GLOBAL_RANDOMNESS, seen, seconds=perf_counter() - started)


def a_batch_row_is_the_row_alone(
    card: Card, together: Callable[..., list[Any]] = run_together
) -> Evidence:
    """Check that ragged requests in one batch give what each gives alone.

    Their logits differ by rounding only in float64; where the compiled transformer computes
    (float32 and bfloat16 on a CPU), by no bit.
    """
    started, seen = perf_counter(), 0
    prompts = [(0, 1), (2,), (1, 3, 0, 2, 1), (3, 3)]
    sampling = (
        SamplingParams(0.0)
        if card.guarantee is Guarantee.GREEDY
        else SamplingParams(0.8, top_p=0.9)
    )
    narrow = [] if _core.compute is None else [torch.float32, torch.bfloat16]
    for seed, dtype in product(range(2), [torch.float64, *narrow]) if is_decoder(card) else ():
        stage = Stage(card, deep=True, vocabulary=4, seed=seed, sampling=sampling)
        models = [small_network(number, 4).to(dtype=dtype) for number in (seed, seed + 2)]

        def row(number: int, gate: Any, stage: Stage = stage, models: Any = models) -> list[Round]:
            forward_log: list[Any] = []
            request = Request(
                target=models[0].session(forward_log, gate),
                drafts=[models[1].session(forward_log, gate) for _ in range(card.hosted)],
                sampling=stage.sampling,
                stop=StoppingCriteria(max_new_tokens=4 + 2 * number),
                references=stage.references,
                forward_log=forward_log,
            )
            decoder = card.make(request, **stage.settings)
            decoder.extend(prompts[number])
            return finish_request(decoder, number)

        alone = [row(number, None) for number in range(len(prompts))]
        batch = together(
            [lambda gate, number=number: row(number, gate) for number in range(len(prompts))]
        )
        for number, (one, other) in enumerate(zip(alone, batch, strict=True)):
            seen += 1
            case = {**stage.describe(), "prompts": prompts, "row": number, "dtype": str(dtype)}
            _expect_equal(BATCH_ROW_ALONE, visible_rounds(one), visible_rounds(other), **case)
            for at, (mine, its) in enumerate(zip(one, other, strict=True)):
                gap = float(
                    abs(
                        torch.as_tensor(mine.scores.logits) - torch.as_tensor(its.scores.logits)
                    ).max()
                )
                if gap > (REQUEST_TOLERANCE if dtype == torch.float64 else 0):
                    accuse(BATCH_ROW_ALONE, "the same logits", f"{gap} apart", **case, round=at)
    return Evidence(BATCH_ROW_ALONE, seen, seconds=perf_counter() - started)


# ---------------------------------------------------------------------- where it ends


def stop_of_request(card: Card, tokens: int = 6) -> Evidence:
    """Check that a stop cuts the text at the first place where it is complete.

    Stops are end tokens (none, one, several), sequences and strings, wherever in a block they fall.
    """
    started, seen = perf_counter(), 0
    base = Stage(
        card,
        deep=card.hidden,
        vocabulary=4 if card.hidden else 3,
        sampling=SamplingParams(0.0),
        prompt=(0, 1),
    )
    for seed, draft in product(range(4), ("another", "right")) if is_decoder(card) else ():
        stage = replace(base, seed=seed, draft=draft, stop=StoppingCriteria(max_new_tokens=tokens))
        free = begin_on_stage(stage)
        finish_request(free)
        for rule in _rules(free.new, base.vocabulary):
            expected, seen = _end_by_rule(free.new, rule), seen + 1
            decode = lambda ids: "".join(REQUEST_LETTERS[token] for token in ids)  # noqa: E731
            decoder = begin_on_stage(
                replace(stage, stop=StoppingCriteria(**rule, max_new_tokens=tokens, decode=decode))
            )
            rounds = finish_request(decoder)
            case = {**stage.describe(), "stop": rule, "text without a stop": free.new}
            drafts = [tuple(one.tree.tokens) for one in rounds]
            _expect_equal(
                STOP_OF_REQUEST, expected, (decoder.new, decoder.finished), **case, drafts=drafts
            )
    return Evidence(STOP_OF_REQUEST, seen, seconds=perf_counter() - started)


def _rules(text: Sequence[int], vocabulary: int) -> Iterator[dict[str, Any]]:
    """Yield stops that this text meets at every position, and some that it does not."""
    for token in range(vocabulary):
        yield {"eos": frozenset({token})}
        yield {"eos": frozenset({token, vocabulary - 1, vocabulary + 5})}
    pieces = {tuple(text[at : at + n]) for n in (1, 2, 3) for at in range(len(text) - n + 1)}
    for piece in sorted(pieces):
        yield {"sequences": (piece,)}
        yield {"strings": ("".join(REQUEST_LETTERS[token] for token in piece),)}
        yield {"eos": frozenset({piece[-1]}), "sequences": (piece, (vocabulary + 5,))}
    yield {"sequences": ((vocabulary + 5,),), "strings": ("z",)}


def _end_by_rule(text: Sequence[int], rule: dict[str, Any]) -> tuple[list[int], str]:
    """Return where this text ends and why, token by token, by the definition."""
    for n in range(1, len(text) + 1):
        new = list(text[:n])
        if new[-1] in rule.get("eos", ()):
            return new, "eos"
        spelled = "".join(REQUEST_LETTERS[token] for token in new)
        if any(tuple(new[-len(s) :]) == s for s in rule.get("sequences", ())) or any(
            s in spelled for s in rule.get("strings", ())
        ):
            return new, "stop"
    return list(text), "length"


def _expect_equal(law: str, expected: Any, got: Any, **case: Any) -> None:
    if expected != got:
        accuse(law, expected, got, **case)


def _draw_globally() -> None:
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
