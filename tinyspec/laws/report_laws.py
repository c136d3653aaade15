"""Laws for what is reported of a request, and for what a request leaves behind.

Each takes a `Parts` and raises `LawViolated` with the first case that breaks it. Everything is
counted anew from the rounds and the text.
"""

import random
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.decode import Decoder, Round
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.laws.accused import Evidence, accuse
from tinyspec.laws.cache_laws import FAMILIES, SESSION_TOLERANCE, family_model, greedy_text
from tinyspec.laws.dense import run_dense
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
    """A chain drafted from q for the target p, begun, and its chance."""
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
    """All rounds of a request."""
    rounds = []
    while not decoder.finished:
        rounds.append(decoder.step(rng))
    return rounds


# ------------------------------------------------------------------ what is reported


def trace_identities_of_parts(parts: Parts) -> Evidence:
    """emitted = accepted + rounds that added a token of their own; tau * calls = emitted; all
    defined for no tokens.
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
    """One origin a token: accepted from the draft, recovered after a refusal, a bonus behind a
    whole draft, or plain.
    """
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
    """`Round.laws` holds, for each token of the round, the target's row it is distributed under: an
    outer level of a cascade divides by it."""
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
    """The log-probability reported for a token is log p(token | text) of the target, before the
    warpers.
    """
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
    """A request depends on its seed alone: not on what ran before it, nor on a request that runs
    between its rounds.
    """
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
    """The generators of random, numpy and torch are where they were: a user's own draws do not
    change.
    """
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
    """After `end()` the same session takes the next prompt as if it were new."""
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
