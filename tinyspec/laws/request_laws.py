"""Laws of a whole request: what is reported adds up, and only its seed decides its text.

Each law judges the parts of a decoder (`Parts`, which mutants replace). What must come out is
worked out from the rounds, from the text, or from a second run.
"""

import random
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.checking.uniforms import Noise
from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import run_dense
from tinyspec.laws.loop_laws import (
    SMALL_TABLES,
    WIDE,
    WIDER,
    ConstantDrafter,
    Table,
    format_table,
    table_model,
    table_reference,
)
from tinyspec.laws.parts import Parts
from tinyspec.laws.row_laws import normalize_weights
from tinyspec.laws.session_laws import FAMILIES, SESSION_TOLERANCE, family_model, greedy_text

IDENTITIES = "trace identities"
ORIGINS = "origins name what happened"
OUTPUT_PROBS = "round distributions are the targets"
LOGPROBS = "logprobs are the targets"
SAME_SEED = "same seed same output"
NO_GLOBAL_RANDOMNESS = "global randomness is untouched"
NO_TRACE = "a request leaves no trace"
INDEPENDENT = "concurrent requests are independent"
ALL_CALLS = "every call is in a round"

REPORT_SEEDS = range(4)
REPORT_TABLES: list[tuple[Table, Table]] = [
    *(pair for pair in SMALL_TABLES if len(pair[0]) == 1),
    (WIDE, WIDER),
]


def begin_request(
    parts: Parts, p: Table, q: Table, gamma: int, most: int | None, seed: int = 0, eos: Any = ()
) -> tuple[Decoder, Any]:
    """Return a decoder of target p that drafts chains from q, and its randomness."""
    if gamma:
        drafter = parts.drafter(table_model(q).session(), gamma, frozenset())
    else:
        drafter = ConstantDrafter(())
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


def format_case(p: Table, q: Table, gamma: int, **more: Any) -> dict[str, Any]:
    """Return a case for a counterexample."""
    return {"p": format_table(p), "q": format_table(q), "gamma": gamma, **more}


# ------------------------------------------------------------------ what is reported


@collect_evidence(IDENTITIES)
def trace_identities_of_parts(parts: Parts) -> Iterator[int]:
    """Check that the reported counts add up, also for no tokens.

    emitted = accepted + rounds that added a token of their own, and tau * calls = emitted.
    """
    for most, eos, (p, q), gamma, seed in product(
        range(4), ((), (0,)), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS
    ):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed, eos)
        stats = parts.statistics()
        rounds = run_to_end(decoder, rng)
        for one in rounds:
            stats.count(one)
        own = sum(one.verdict.next is not None for one in rounds)
        accepted = sum(len(one.verdict.accepted) for one in rounds)
        drafted = sum(len(one.tree.tokens) for one in rounds)
        n, calls = len(decoder.new), len(rounds)
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
            case = format_case(p, q, gamma, max_new_tokens=most, eos=eos, seed=seed)
            emitted = [one.tokens for one in rounds]
            accuse(IDENTITIES, expected, got, **case, new=decoder.new, rounds=emitted)
        yield 0


@collect_evidence(ORIGINS)
def origins_name_what_happened(parts: Parts) -> Iterator[int]:
    """Check the origin of each token: accepted, recovered, bonus or plain."""
    for most, (p, q), gamma, seed in product(range(1, 5), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed)
        for one in run_to_end(decoder, rng):
            draft, path = one.tree.tokens, one.verdict.accepted
            added = "bonus" if len(path) == len(draft) else "recovered"
            last = added if draft else "plain"
            expected = ("accepted",) * len(path) + (last,) * (one.verdict.next is not None)
            case = {"accepted": one.tree.tokens_on(path), "emitted": one.tokens}
            expect_equal(ORIGINS, expected, parts.origins(one), draft=draft, **case)
            yield 0


@collect_evidence(OUTPUT_PROBS)
def output_probs_are_the_targets(parts: Parts) -> Iterator[int]:
    """Check that `Round.output_probs` holds the target's distribution of each token.

    An outer level of a cascade divides by it.
    """
    for most, (p, q), gamma, seed in product(range(1, 4), REPORT_TABLES, (0, 1, 2), REPORT_SEEDS):
        decoder, rng = begin_request(parts, p, q, gamma, most, seed)
        newest = 0
        for one in run_to_end(decoder, rng):
            before = (newest, *one.tokens)[:-1]
            newest = (newest, *one.tokens)[-1]
            expected = [normalize_weights(p[token % len(p)]) for token in before]
            if [list(row) for row in one.output_probs] != expected:
                case = format_case(p, q, gamma, tokens=one.tokens)
                accuse(OUTPUT_PROBS, expected, list(one.output_probs), **case)
            yield 0


@collect_evidence(LOGPROBS)
def logprobs_are_the_targets(parts: Parts) -> Iterator[int]:
    """Check that a token's log-probability is log p(token | text) of the target, before warpers."""
    for most, family, seed in product((1, 2, 6), FAMILIES, REPORT_SEEDS):
        target = family_model(family)
        drafter = parts.drafter(family_model(family, seed=1).session(), 2, frozenset())
        stop, sampling = StoppingCriteria(max_new_tokens=most), SamplingParams(temperature=0.5)
        decoder = parts.decoder(target.session(), drafter, parts.walk, sampling=sampling, stop=stop)
        decoder.extend((1,))
        got = [x for one in run_to_end(decoder, parts.seeded(seed)) for x in parts.logprobs(one)]
        logits = run_dense(target, [1, *decoder.new]).logits
        expected = [
            row[token] - np.log(np.exp(row).sum())
            for row, token in zip(logits, decoder.new, strict=False)
        ]
        if len(got) != len(expected) or any(
            abs(a - b) > SESSION_TOLERANCE for a, b in zip(got, expected, strict=True)
        ):
            case = {"model": family, "temperature": 0.5, "new": decoder.new, "seed": seed}
            accuse(LOGPROBS, expected, got, **case)
        yield 0


@collect_evidence(ALL_CALLS)
def every_call_is_reported(parts: Parts) -> Iterator[int]:
    """Check that every forward pass after the prompt is reported by a round: no cost is hidden."""
    for most, (p, q), gamma, seed in product(range(1, 4), REPORT_TABLES, (1, 2), REPORT_SEEDS):
        forward_log: list[Any] = []
        drafter = parts.drafter(table_model(q).session(forward_log), gamma, frozenset())
        decoder = parts.decoder(
            table_model(p).session(forward_log),
            drafter,
            parts.walk,
            stop=parts.stop(max_new_tokens=most),
            forward_log=forward_log,
        )
        decoder.extend((0,))
        before = len(forward_log)
        rounds = run_to_end(decoder, parts.seeded(seed))
        reported = [call for one in rounds for call in (*one.draft_calls, *one.calls)]
        case = format_case(p, q, gamma, max_new_tokens=most, seed=seed)
        expect_equal(ALL_CALLS, forward_log[before:], reported, **case)
        yield 0


# ------------------------------------------------------------------ what stays of a request


@collect_evidence(INDEPENDENT)
def requests_are_independent(parts: Parts) -> Iterator[int]:
    """Check that the texts of two requests that take turns are independent of each other.

    Their joint distribution is the product of the target's with itself. Each text alone may be
    distributed as it should be, and yet be drawn with the other's noise, or from its drafts.
    """
    pairs = [pair for pair in SMALL_TABLES if len(pair[0][0]) == 2]
    for (p, q), gamma in product(pairs, (0, 1)):

        def run(rng: Exhaustive, p: Table = p, q: Table = q, gamma: int = gamma) -> Any:
            noise, target, draft = Noise(rng), table_model(p), table_model(q)
            both = list[Decoder]()
            for _ in range(2):
                drafter: Any = ConstantDrafter(())
                if gamma:
                    drafter = parts.drafter(draft.session(), gamma, frozenset())
                both.append(parts.decoder(target.session(), drafter, parts.walk))
                both[-1].extend((0,))
            sources = [noise.split("request", number) for number in range(2)]
            while any(len(decoder.new) < 2 for decoder in both):
                for decoder, source in zip(both, sources, strict=True):
                    if len(decoder.new) < 2:
                        decoder.step(source)
            return tuple(tuple(decoder.new[:2]) for decoder in both)

        walked, got = 0, dict[Any, Any]()
        for texts, mass in Exhaustive.walk(run):
            walked, got[texts] = walked + 1, got.get(texts, 0) + mass
        alone = table_reference(p).distribution(2)
        expected = {(a, b): alone[a] * alone[b] for a, b in product(alone, repeat=2)}
        case = format_case(p, q, gamma, compared="the texts of two tokens of both requests")
        expect_equal(INDEPENDENT, dict(sorted(expected.items())), dict(sorted(got.items())), **case)
        yield walked


@collect_evidence(SAME_SEED)
def same_seed_of_parts(parts: Parts) -> Iterator[int]:
    """Check that a request depends on its seed alone, not on requests before or beside it."""
    for (p, q), gamma, seed in product(REPORT_TABLES, (0, 2), REPORT_SEEDS):
        alone, rng = begin_request(parts, p, q, gamma, 6, seed)
        run_to_end(alone, rng)
        again, rng = begin_request(parts, p, q, gamma, 6, seed)
        other, between = begin_request(parts, p, q, gamma, None, seed + 1)
        while not again.finished:
            again.step(rng)
            other.step(between)
        case = format_case(p, q, gamma, seed=seed)
        expect_equal(SAME_SEED, alone.new, again.new, **case, between="another request's rounds")
        yield 0


@collect_evidence(NO_GLOBAL_RANDOMNESS)
def global_randomness_of_parts(parts: Parts) -> Iterator[int]:
    """Check that the generators of random, numpy and torch do not move."""
    for gamma in (0, 1, 2):
        decoder, rng = begin_request(parts, WIDE, WIDER, gamma, 4)
        case = format_case(WIDE, WIDER, gamma)
        expect_no_generator_moves(
            lambda d=decoder, r=rng: run_to_end(d, r),  # type: ignore[misc]
            **case,
        )
        yield 0


def expect_no_generator_moves(run: Callable[[], Any], **case: Any) -> None:
    """Raise LawViolated if a run moves a global generator."""
    before = global_generators()
    run()
    after = global_generators()
    moved = [library for library in before if after[library] != before[library]]
    if moved:
        got = f"moved: {', '.join(moved)}"
        accuse(NO_GLOBAL_RANDOMNESS, "no generator moved", got, **case)


def global_generators() -> dict[str, str]:
    legacy: Any = np.random.get_state()  # noqa: NPY002
    return {
        "random": str(random.getstate()),
        "numpy": str([np.asarray(part).tolist() for part in legacy]),
        "torch": str(torch.get_rng_state().tolist()),
    }


@collect_evidence(NO_TRACE)
def a_request_leaves_no_trace(parts: Parts) -> Iterator[int]:
    """Check that after `end()` a session takes the next prompt as if it were new."""
    sampling, stop = SamplingParams(temperature=0.0), StoppingCriteria(max_new_tokens=3)
    for family, first in product(FAMILIES, ((1,), (1, 2, 3))):
        model = family_model(family)
        session = parts.session(model)
        new: list[int] = []
        for prompt in (first, (4, 5)):
            drafter = ConstantDrafter((2, 2))
            decoder = parts.decoder(session, drafter, parts.walk, sampling=sampling, stop=stop)
            decoder.extend(prompt)
            for at in range(3):
                if not decoder.finished:
                    decoder.step(parts.seeded(at))
            new = decoder.new
            decoder.end()
        case = {"model": family, "first_prompt": first, "second_prompt": (4, 5)}
        expect_equal(NO_TRACE, greedy_text(model, (4, 5), 3), new, **case)
        yield 0


REPORT_LAWS = {
    IDENTITIES: trace_identities_of_parts,
    ORIGINS: origins_name_what_happened,
    OUTPUT_PROBS: output_probs_are_the_targets,
    LOGPROBS: logprobs_are_the_targets,
    ALL_CALLS: every_call_is_reported,
    INDEPENDENT: requests_are_independent,
    SAME_SEED: same_seed_of_parts,
    NO_GLOBAL_RANDOMNESS: global_randomness_of_parts,
    NO_TRACE: a_request_leaves_no_trace,
}
