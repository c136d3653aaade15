"""`check`: right samplers of every dialect pass, published mistakes are refuted by a small case within seconds."""

import random
import subprocess
import sys
import traceback
from collections.abc import Callable
from fractions import Fraction as F
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws import published
from tests.laws.published import RIGHT, WRONG_DECODING, WRONG_DRAFTERS, WRONG_VERIFIERS
from tinyspec.decoding.chance import Chance
from tinyspec.decoding.exhaustive import Exhaustive
from tinyspec.decoding.verify import Verdict, residual, walk
from tinyspec.errors import TinyspecError
from tinyspec.laws import Accused, check
from tinyspec.laws.cases import Case, Model, of_a_round, shrink
from tinyspec.laws.dice import Dice
from tinyspec.laws.dice_torch import torch_everywhere
from tinyspec.laws.uniform import NotEnumerable, Span, Uniform
from tinyspec.tree import ROOT


def accused(**function: Any) -> Accused:
    took, found = published.seconds(**function)
    assert found is not None, "nothing was found"
    assert took < 10
    return found


# ---------------------------------------------------------------------- what is right passes


EXACTLY = (published.textbook, published.by_hand, published.no_bonus, published.plain)


@pytest.mark.parametrize("verifier", RIGHT)
def test_a_right_verifier_is_never_accused(verifier: Callable[..., Any]) -> None:
    proof = check(verifier, seed=RIGHT.index(verifier))
    assert proof[0].cases > 100
    assert proof[0].branches > 4 * 100
    assert "joint law: kept in" in str(proof)
    assert (proof[0].notes[0] == "exactly") == (verifier in EXACTLY)
    if verifier is published.with_epsilon:
        assert proof[0].notes[1] == "a run of probability 1e-10 ends in ValueError: probabilities contain NaN"


def test_a_loop_that_rejects_is_followed_until_it_does_not_matter() -> None:
    proof = check(published.rejections, seconds=2)
    assert proof[0].cases >= 2
    assert "in floating point" in str(proof)


def test_a_right_decoding_function_passes() -> None:
    assert check(generate=published.decoding())[0].cases > 100


def test_right_drafters_pass_and_none_may_propose_anything() -> None:
    assert check(drafter=published.draft_tokens())[0].notes == ["exactly"]
    for mistake in WRONG_DRAFTERS.values():

        def points(*given: Any, mistake: Any = mistake) -> Any:
            tokens, laws = mistake(*given)
            return tokens, [None] * len(laws)

        check(drafter=lambda q, context, gamma, rng, points=points: points(q, context, gamma, rng))


def test_the_tolerance_decides_about_a_small_bias() -> None:
    with pytest.raises(Accused):
        check(published.with_epsilon, tolerance=1e-12)


def test_a_token_that_float32_sums_let_out_of_range_too_rarely_is_noted() -> None:
    def off(p: Any, q: Any, draft: list[int], rng: Any) -> Any:
        sums = np.cumsum(np.asarray(p[0], np.float64)) * (1 - 3e-8)
        return [int(np.searchsorted(sums, rng.random(), side="right"))]

    assert "e-08 returns [" in str(check(off))
    with pytest.raises(Accused):
        check(off, tolerance=1e-9)


# ---------------------------------------------------------------------- what is wrong is refuted


@pytest.mark.parametrize("name", WRONG_VERIFIERS)
def test_a_published_mistake_is_found_in_a_small_case(name: str) -> None:
    found = accused(verifier=WRONG_VERIFIERS[name]).counterexample
    p, q = found.case["p"], found.case["q"]
    assert len(p[0]) == 2
    assert len(q) <= 2
    assert sum(max(x.denominator for x in row) for row in (*p, *q)) <= 8
    assert found.expected != found.got
    assert {"p", "q", "draft"} <= found.case.keys()


def test_the_smallest_case_in_the_words_of_the_task() -> None:
    found = accused(verifier=WRONG_VERIFIERS["always accept"])
    assert str(found) == (
        "broken: joint law\n  p = [[0, 1], [0, 1]]\n  q = [[1, 0]]\n  draft = [0]\n"
        "  compared = the law of the first token\nexpected [0, 1]\ngot      [1, 0]"
    )
    assert found.counterexample.as_dict()["expected"] == ["0", "1"]


def test_one_uniform_for_two_positions_is_a_matter_of_two_tokens() -> None:
    found = accused(verifier=WRONG_VERIFIERS["one uniform for all positions"]).counterexample
    assert found.case["draft"] in ([1, 1], [0, 0])
    assert sorted(found.expected.values()) == [F(1, 4)] * 4
    assert sorted(found.got.values()) == [0, F(1, 4), F(1, 4), F(1, 2)]


@pytest.mark.parametrize("name", ["<= for <", "searchsorted from the left"])
def test_a_uniform_of_exactly_zero_must_not_bring_out_what_p_forbids(name: str) -> None:
    found = accused(verifier=WRONG_VERIFIERS[name]).counterexample
    assert found.law == "impossible token"
    assert "exactly 0.0" in found.case["uniforms"]
    forbidden = [row.index(0) for row in found.case["p"] if 0 in row]
    assert any(token in forbidden for token in found.got)
    if name == "<= for <":
        check(WRONG_VERIFIERS[name], corners=False)


@pytest.mark.parametrize("name", WRONG_DECODING)
def test_mistakes_of_a_whole_decoding_function(name: str) -> None:
    found = accused(generate=WRONG_DECODING[name]).counterexample
    assert found.case["n"] == 2
    assert found.law == ("tokens asked for" if name == "one token too few" else "joint law")


@pytest.mark.parametrize("name", WRONG_DRAFTERS)
def test_mistakes_of_a_drafter(name: str) -> None:
    found = accused(drafter=WRONG_DRAFTERS[name]).counterexample
    assert found.law == ("presence" if "only if" in name else "truthful drafter")
    assert found.got != found.case["declared"]


def test_a_drafter_with_a_model_of_its_own() -> None:
    def q(context: list[int]) -> list[F]:
        return [F(1, 3), F(2, 3)] if sum(context) % 2 else [F(1, 4), F(3, 4)]

    def draft(context: list[int], rng: Any) -> Any:
        return [rng.choice(2, p=q(context))], [q(context)]

    def stale(context: list[int], chance: Any) -> Any:
        return [chance.draw(q(context))], [q(context[:-1])]

    assert check(drafter=draft)[0].cases == 7
    assert accused(drafter=stale).counterexample.case["context"] == [1]


# ---------------------------------------------------------------------- the house's own form


def greedy_siblings(tree: Any, p: Any, chance: Chance) -> Verdict:
    """Forgets that a refused sibling changed the law."""
    row, alive = p[ROOT], [node for node, parent in enumerate(tree.parents) if parent == ROOT]
    for node in alive:
        if chance.accept(row[tree.tokens[node]] / tree.laws[node][tree.tokens[node]]):
            return Verdict((node,), chance.draw(p[node]))
    return Verdict((), chance.draw(residual(row, tree.laws[alive[-1]])))


def test_the_librarys_walk_is_proved_on_every_kind_of_tree() -> None:
    proof = check(walk)
    assert len(proof) == 4
    assert all(evidence.notes[-1] == "exactly" for evidence in proof)


def test_a_verifier_that_is_right_on_chains_is_refuted_on_siblings() -> None:
    check(greedy_siblings, trees=("chain",))
    with pytest.raises(Accused) as found:
        check(greedy_siblings, trees=("siblings",))
    assert "two siblings" in found.value.counterexample.case["tree"]
    with pytest.raises(TinyspecError, match="no trees of the kind"):
        check(walk, trees=("forest",))


def test_a_path_that_is_none_is_refused() -> None:
    def last(tree: Any, p: Any, chance: Chance) -> Verdict:
        return Verdict((len(tree.tokens) - 1,), 0)

    found = accused(verifier=last).counterexample
    assert "path" in str(found.expected) or found.law == "joint law"


# ---------------------------------------------------------------------- no verdict where there is none


def own_generator(p: Any, q: Any, draft: list[int], rng: Any) -> Any:
    return published.textbook([list(map(float, row)) for row in p], q, draft, OWN)


OWN = np.random.default_rng(3)

NO_VERDICT = {
    "gives other results": own_generator,
    "rng.gumbel cannot be enumerated": lambda p, q, d, rng: [np.argmax(np.log(p[0]) + rng.gumbel(size=2))],
    "continuous noise": lambda p, q, d: [int(torch.empty(2).exponential_(1).argmax())],
    "asks for the value": lambda p, q, d, rng: [int(float(rng.random()) < 0.5)],
    "compared with each other": lambda p, q, d, rng: [int(rng.random() < rng.random())],
    "returns a list of token ids": lambda p, q, d, rng: (1, [2]),
    "failed at p = ": lambda p, q, d, rng: [p[0].no_such_method()],
    "not done": lambda p, q, d, rng: [0 for _ in iter(rng.random, None)],
}


@pytest.mark.parametrize("message", NO_VERDICT)
def test_where_nothing_can_be_said_it_says_why(message: str) -> None:
    with pytest.raises(TinyspecError, match=message):
        check(NO_VERDICT[message])
    with pytest.raises(TinyspecError, match="nothing to check"):
        check()


def test_a_mistake_that_ends_in_an_error_is_shown_with_its_case() -> None:
    def unnormalised(p: Any, q: Any, draft: list[int], rng: Any) -> list[int]:
        return [rng.choice(len(p[0]), p=[max(a - b, 0) for a, b in zip(p[0], q[0], strict=True)])]

    with pytest.raises(TinyspecError, match=r"failed at p = .*q = .*do not sum to 1"):
        check(unnormalised)


def test_an_empty_round_and_ids_out_of_range_are_accused() -> None:
    for tokens in ([], [7], [0, 0, 0, 0, 0]):
        found = accused(verifier=lambda p, q, d, rng, tokens=tokens: tokens).counterexample
        assert found.law == "tokens of a round"
        assert found.got == tokens


def global_states() -> Any:
    return np.random.get_state()[1].tolist(), random.getstate(), torch.get_rng_state().tolist()  # noqa: NPY002


def test_no_global_state_moves_and_every_generator_is_put_back() -> None:
    functions = (
        np.random.random,
        np.random.default_rng,
        random.random,
        torch.rand,
        torch.multinomial,
        torch.Tensor.multinomial,
    )
    states = global_states()
    check(published.global_generators)
    check(published.in_torch, seconds=1)
    with pytest.raises(Accused):
        check(WRONG_VERIFIERS["always accept"])
    now = (
        np.random.random,
        np.random.default_rng,
        random.random,
        torch.rand,
        torch.multinomial,
        torch.Tensor.multinomial,
    )
    assert now == functions
    assert states == global_states()


def test_the_traceback_of_an_accusation_is_the_readers_call() -> None:
    try:
        check(WRONG_VERIFIERS["always accept"])
    except Accused as found:
        frames = traceback.extract_tb(found.__traceback__)
    assert len(frames) == 2
    assert frames[0].name == "test_the_traceback_of_an_accusation_is_the_readers_call"


def test_importing_the_laws_is_cheap() -> None:
    loaded = "import tinyspec.laws, sys; print(any(name in sys.modules for name in ('torch', 'numpy', 'hypothesis')))"
    assert (
        subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True).stdout == "False\n"
    )


# ---------------------------------------------------------------------- uniforms that are not drawn

LAW = st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(any).map(lambda w: [F(x, sum(w)) for x in w])


def outcomes(function: Callable[[Dice], Any]) -> dict[Any, Any]:
    return Exhaustive.law(lambda chance: function(Dice(chance)))


INVERSIONS = {
    "searchsorted": lambda row, rng: int(np.searchsorted(np.cumsum(row), rng.random(), side="right")),
    "argmax": lambda row, rng: int(np.argmax(np.cumsum(row) > rng.random())),
    "loop": lambda row, rng: loop(row, rng.random()),
    "scaled": lambda row, rng: loop([3 * x for x in row], 3 * rng.random()),
    "shifted": lambda row, rng: loop(row, rng.uniform(1, 2) - 1),
    "from above": lambda row, rng: loop(row, 1 - rng.random()),
    "choice": lambda row, rng: rng.choice(len(row), p=row),
    "choices": lambda row, rng: rng.choices(range(len(row)), weights=row)[0],
    "multinomial": lambda row, rng: int(np.argmax(rng.multinomial(1, row))),
    "binomial": lambda row, rng: next(t for t, x in enumerate(row) if rng.binomial(1, x / sum(row[t:]))),
}


def loop(row: Any, u: Any) -> int:
    reached = 0
    for token, x in enumerate(row):
        reached += x
        if u < reached:
            return token
    raise AssertionError("u lies in [0, 1)")


@pytest.mark.parametrize("way", INVERSIONS)
@given(LAW)
@settings(max_examples=20)
def test_every_way_to_draw_from_a_row_has_its_law(way: str, row: list[F]) -> None:
    law = outcomes(lambda rng: INVERSIONS[way](row, rng))
    assert law == {token: x for token, x in enumerate(row) if x}


@given(st.lists(st.fractions(0, 1, max_denominator=5), min_size=1, max_size=4))
@settings(max_examples=40)
def test_one_uniform_answers_consistently(cuts: list[F]) -> None:
    """Its answers are those of one point: monotone in the cut, each with the right probability."""
    law = outcomes(lambda rng: (lambda u: tuple(u < cut for cut in cuts))(rng.random()))
    assert sum(law.values()) == 1
    for place, cut in enumerate(cuts):
        assert sum(mass for answers, mass in law.items() if answers[place]) == cut
    for answers in law:
        assert all(answers[i] <= answers[j] for i, a in enumerate(cuts) for j, b in enumerate(cuts) if a <= b)


def test_uniforms_as_integers_logarithms_and_arrays() -> None:
    third = F(1, 3)
    assert outcomes(lambda rng: int(3 * rng.random())) == {0: third, 1: third, 2: third}
    assert outcomes(lambda rng: rng.integers(1, 4)) == {1: third, 2: third, 3: third}
    law = outcomes(lambda rng: bool(np.log(rng.random()) < np.log(0.25)))
    assert law[True] == pytest.approx(0.25)
    law = outcomes(lambda rng: tuple((rng.random((2,)) < np.array([0.5, 0.25])).tolist()))
    assert law == pytest.approx(
        {(True, True): 1 / 8, (True, False): 3 / 8, (False, True): 1 / 8, (False, False): 3 / 8}
    )
    assert outcomes(lambda rng: tuple(rng.choice(3, 2, replace=False, p=[third] * 3).tolist())) == {
        (a, b): F(1, 6) for a in range(3) for b in range(3) if a != b
    }


def test_the_same_seed_gives_the_same_noise_and_another_one_does_not() -> None:
    def seeded(first: Any, second: Any) -> Callable[[Dice], Any]:
        return lambda rng: tuple(bool(rng.generator(seed).random() < F(1, 2)) for seed in (first, second))

    assert outcomes(seeded(0, 0)) == {(True, True): F(1, 2), (False, False): F(1, 2)}
    assert len(outcomes(seeded(0, 1))) == len(outcomes(seeded(None, None))) == 4


def test_a_pinned_uniform_is_zero_and_may_meet_its_boundary() -> None:
    def ask(chance: Exhaustive) -> Any:
        u = Uniform(Span(chance, pinned=True))
        return u < 0, u <= 0, u > 0, u >= 0, u == 0, 1 - u <= 1, u + 1 < 1, int(5 * u)

    assert Exhaustive.law(ask) == {(False, True, False, True, True, True, False, 0): 1}


def test_nan_is_neither_above_nor_below() -> None:
    assert outcomes(lambda rng: (lambda u: (u < np.nan, u > np.nan, u <= np.nan, u >= np.nan))(rng.random())) == {
        (False,) * 4: 1
    }


@pytest.mark.parametrize("use", [float, lambda u: u + u, lambda u: [0, 1][u], lambda u: u and 1, round])
def test_the_value_of_a_uniform_is_not_to_be_had(use: Callable[[Any], Any]) -> None:
    with pytest.raises(NotEnumerable):
        outcomes(lambda rng: use(rng.random()))


HALF = torch.tensor([0.5, 0.5], dtype=torch.float64)
ASKED_IN_TORCH: dict[str, Callable[[], Any]] = {
    "less": lambda: torch.rand(2) < HALF,
    "mirrored": lambda: HALF > torch.rand_like(HALF),  # noqa: SIM300
    "function": lambda: torch.lt(torch.rand(2), HALF),
    "mirrored function": lambda: torch.ge(HALF, torch.rand((2,))),
    "scaled": lambda: 2 * torch.rand(2) + 1 < 2 * torch.ones(2),
    "from above": lambda: (1 - torch.rand(2)) / 2 <= HALF / 2,
    "tensor minus": lambda: HALF - torch.rand(size=(2,)) > torch.zeros(2),
    "logarithms": lambda: torch.log(torch.rand(2)) < HALF.log(),
    "one by one": lambda: torch.tensor([bool(torch.rand(1)[0] < x) for x in HALF]),
    "items": lambda: torch.tensor([torch.rand(1, device="cpu").item() < x for x in HALF.tolist()]),
    "shapes": lambda: (torch.rand(1, 2).squeeze(0).to("cpu").view(2).unsqueeze(0) < HALF)[0],
    "searchsorted": lambda: torch.searchsorted(HALF.cumsum(0), torch.rand(2), right=True) == 0,
    "multinomial": lambda: torch.multinomial(HALF, 2, replacement=True) == 0,
    "method": lambda: HALF.expand(2, 2).multinomial(1).squeeze(1) == 0,
    "categorical": lambda: torch.distributions.Categorical(probs=HALF.expand(2, 2)).sample() == 0,
}


def in_torch(function: Callable[[], Any]) -> dict[Any, Any]:
    def run(chance: Exhaustive) -> Any:
        with torch_everywhere(Dice(chance)):
            return tuple(bool(x) for x in function())

    return Exhaustive.law(run)


@pytest.mark.parametrize("way", ASKED_IN_TORCH)
def test_every_way_to_ask_torch_for_two_fair_coins(way: str) -> None:
    assert in_torch(ASKED_IN_TORCH[way]) == pytest.approx({(a, b): 0.25 for a in (True, False) for b in (True, False)})


def test_torch_reseeded_gives_the_same_noise_and_what_cannot_be_asked_is_refused() -> None:
    def reseeded() -> Any:
        return [torch.manual_seed(0) or torch.rand(1) < 0.5 for _ in range(2)]

    assert in_torch(reseeded) == {(True, True): 0.5, (False, False): 0.5}
    refused: list[Callable[[], Any]] = [
        lambda: torch.randn(2),
        lambda: HALF.clone().exponential_(),
        lambda: torch.argmax(torch.rand(2)),
        lambda: float(torch.rand(1)),
        lambda: HALF / torch.rand(2) > 1,
        lambda: torch.rand(2) < torch.rand(2),
    ]
    for function in refused:
        with pytest.raises(NotEnumerable):
            in_torch(function)
    for row in ([0.0, 0.0], [float("nan"), 1.0], [-0.5, 1.5]):
        with pytest.raises(RuntimeError, match="probability tensor"):
            in_torch(lambda row=row: torch.multinomial(torch.tensor(row), 1))  # type: ignore[misc]


# ---------------------------------------------------------------------- cases


def test_cases_come_in_order_of_vocabulary_and_gamma_and_are_the_same_each_time() -> None:
    cases = list(of_a_round(0))
    assert cases == list(of_a_round(0))
    assert cases != list(of_a_round(1))
    kinds = list(dict.fromkeys((case.vocabulary, case.gamma) for case in cases))
    assert kinds == sorted(kinds)
    for case in cases:
        assert all(sum(law) == 1 for law in (*case.p.laws, *case.q.laws))


def test_shrinking_ends_at_the_smallest_broken_case() -> None:
    def law(*weights: int) -> tuple[F, ...]:
        return tuple(F(x, sum(weights)) for x in weights)

    case = Case(Model((law(3, 2), law(1, 4))), Model((law(2, 3),)), 1, 2)
    smallest = shrink(case, lambda c: c.q.laws[0][0] > 0 and c.p.laws[0][1] > 0)
    assert smallest.size == 3
    assert smallest.q.laws[0][0] > 0 and smallest.p.laws[0][1] > 0


def test_a_law_by_text_differs_where_the_texts_differ() -> None:
    rows = tuple((F(i, 9), F(9 - i, 9)) for i in range(7))
    model = Model(rows, "text")
    shown = model.shown(2)
    assert len(shown) == 7
    assert len({tuple(row) for row in shown.values()}) == 7
    assert sum(model.joint(3).values()) == 1
