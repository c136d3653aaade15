"""`check`: right samplers of every dialect pass, published mistakes are refuted by a small case."""

import random
import re
import subprocess
import sys
from collections.abc import Callable
from fractions import Fraction as F
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws import published
from tests.laws.published import (
    DEEP_DRAFTERS,
    DEEP_TREES,
    DEEP_VERIFIERS,
    RIGHT,
    WRONG_DECODING,
    WRONG_DRAFTERS,
    WRONG_VERIFIERS,
)
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.verify import Verdict, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import check
from tinyspec.laws.checking.cases import random_round_cases
from tinyspec.laws.evidence import CheckResult, Counterexample
from tinyspec.tree import ROOT


def accused(**function: Any) -> Counterexample:
    found = check(**function).counterexample
    assert found is not None, "nothing was found"
    return found


def prove(*given: Any, **options: Any) -> CheckResult:
    """Return what `check` says of the fixed cases, and of a few random ones."""
    return check(*given, random_cases=5, calls=0, **options)


# ---------------------------------------------------------------------- what is right passes


EXACTLY = (published.textbook, published.by_hand, published.no_bonus, published.plain)


@pytest.mark.parametrize("verifier", RIGHT)
def test_a_right_verifier_is_never_accused(verifier: Callable[..., Any]) -> None:
    at = RIGHT.index(verifier)
    result = prove(verifier, seed=at, corners=at % 2 == 0)
    assert result.evidence[0].cases > 100
    assert result.evidence[0].branches > 4 * 100
    assert "joint distribution: kept in" in str(result)
    assert (result.evidence[0].notes[0] == "exactly") == (verifier in EXACTLY)
    if verifier is published.with_epsilon:
        assert "ends in ValueError: probabilities contain NaN" in result.evidence[0].notes[-1]


def test_a_loop_that_rejects_is_followed_until_it_does_not_matter() -> None:
    """It has so many outcomes that the time ends before the fixed cases do. So nothing is wrong,
    and nothing is proved.
    """
    result = check(published.rejections, seconds=2)
    assert result.counterexample is None
    assert result.evidence[0].cases >= 2
    assert "in floating point" in str(result)


def test_a_right_decoding_function_passes() -> None:
    assert prove(generate=published.decoding()).evidence[0].cases > 100


def test_right_drafters_pass_and_none_may_propose_anything() -> None:
    result = prove(drafter=published.draft_tokens())
    assert result.evidence[0].notes == ["exactly", "V 2-8, gamma 1-4, 0-3 tokens of context"]
    for mistake in WRONG_DRAFTERS.values():

        def points(*given: Any, mistake: Any = mistake) -> Any:
            tokens, laws = mistake(*given)
            return tokens, [None] * len(laws)

        assert prove(
            drafter=lambda q, context, gamma, rng, points=points: points(q, context, gamma, rng)
        )


def test_the_tolerance_decides_about_a_small_bias() -> None:
    assert not check(published.with_epsilon, tolerance=1e-12)


def test_a_token_that_float32_sums_let_out_of_range_too_rarely_is_noted() -> None:
    def off(p: Any, q: Any, draft: list[int], rng: Any) -> Any:
        sums = np.cumsum(np.asarray(p[0], np.float64)) * (1 - 3e-8)
        return [int(np.searchsorted(sums, rng.random(), side="right"))]

    assert "a run of probability 2e-09 returns [4]" in str(prove(off))
    assert not check(off, tolerance=1e-9)


# ---------------------------------------------------------------------- what is wrong is refuted


@pytest.mark.parametrize("name", WRONG_VERIFIERS)
def test_a_published_mistake_is_found_in_a_small_case(name: str) -> None:
    found = accused(verifier=WRONG_VERIFIERS[name])
    p, q = found.case["p"], found.case["q"]
    assert len(p[0]) == 2
    assert len(q) <= 2
    assert sum(max(x.denominator for x in row) for row in (*p, *q)) <= 8
    assert found.expected != found.got
    assert {"p", "q", "draft"} <= found.case.keys()


def test_the_smallest_case_in_the_words_of_the_task() -> None:
    found = accused(verifier=WRONG_VERIFIERS["always accept"])
    assert str(found) == (
        "broken: joint distribution\n  p = [[0, 1], [0, 1]]\n  q = [[1, 0]]\n  draft = [0]\n"
        "  compared = the distribution of the first token\nexpected [0, 1]\ngot      [1, 0]"
    )
    assert found.as_dict()["expected"] == ["0", "1"]


def test_one_uniform_for_two_positions_is_a_matter_of_two_tokens() -> None:
    found = accused(verifier=WRONG_VERIFIERS["one uniform for all positions"])
    assert found.case["draft"] in ([1, 1], [0, 0])
    assert sorted(found.expected.values()) == [F(1, 4)] * 4
    assert sorted(found.got.values()) == [0, F(1, 4), F(1, 4), F(1, 2)]


@pytest.mark.parametrize("name", ["<= for <", "searchsorted from the left"])
def test_a_uniform_of_exactly_zero_must_not_bring_out_what_p_forbids(name: str) -> None:
    found = accused(verifier=WRONG_VERIFIERS[name])
    assert found.law == "impossible token"
    assert "exactly 0.0" in found.case["uniforms"]
    forbidden = [row.index(0) for row in found.case["p"] if 0 in row]
    assert any(token in forbidden for token in found.got)
    if name == "<= for <":
        assert "u < p / q" in found.case["hint"]
        assert "corners=False" in found.case["hint"]
        assert prove(WRONG_VERIFIERS[name], corners=False)


@pytest.mark.parametrize("name", WRONG_DECODING)
def test_mistakes_of_a_whole_decoding_function(name: str) -> None:
    found = accused(generate=WRONG_DECODING[name])
    assert found.case["n"] == 2
    assert found.law == (
        "tokens asked for" if name == "one token too few" else "joint distribution"
    )


def test_a_decoding_function_that_returns_a_token_too_many_is_accused() -> None:
    right = published.decoding()

    def untrimmed(p: Any, q: Any, gamma: int, n: int, rng: Any) -> list[int]:
        return right(p, q, gamma, n + 1, rng)

    found = accused(generate=untrimmed)
    assert found.law == "tokens asked for"
    assert found.expected == "2 token ids below 2"
    assert len(found.got) == found.case["n"] + 1 == 3


@pytest.mark.parametrize("name", WRONG_DRAFTERS)
def test_mistakes_of_a_drafter(name: str) -> None:
    found = accused(drafter=WRONG_DRAFTERS[name])
    assert found.law == ("presence" if "only if" in name else "truthful drafter")
    assert found.got != found.case["declared"]


def test_a_drafter_with_a_model_of_its_own() -> None:
    def q(context: list[int]) -> list[F]:
        return [F(1, 3), F(2, 3)] if sum(context) % 2 else [F(1, 4), F(3, 4)]

    def draft(context: list[int], rng: Any) -> Any:
        return [rng.choice(2, p=q(context))], [q(context)]

    def stale(context: list[int], source: Any) -> Any:
        return [source.draw(q(context))], [q(context[:-1])]

    assert prove(drafter=draft).evidence[0].cases == 15
    assert accused(drafter=stale).case["context"] == [1]


def test_a_drafter_that_drafts_a_token_too_many_is_accused() -> None:
    """A drafter with a model of its own is not told how many; it may draft nine."""

    def one_more(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
        return published.draft_tokens()(q, context, gamma + 1, rng)

    found = accused(drafter=one_more)
    assert found.law == "tokens asked for"
    assert found.expected == "at most gamma = 1 tokens"
    assert len(found.got) == 2
    assert prove(drafter=lambda context, rng: ([0] * 9, [None] * 9))


def verify_then(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a right verifier that then writes into an argument."""

    def verify(p: Any, q: Any, draft: list[int], rng: Any) -> list[int]:
        tokens = published.textbook(p, q, draft, rng)
        write(p, q, draft)
        return tokens

    return verify


def write_into_tensor(p: Any, q: Any, draft: list[int]) -> Any:
    tokens = published.in_torch(p, q, draft)
    q.zero_()
    return tokens


def draft_then(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a right drafter that then writes into an argument, or into a row."""

    def draft(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
        result = published.draft_tokens(declare=list)(q, context, gamma, rng)
        write(q, context)
        return result

    return draft


def write_into_target_row(p: Any, q: Any, gamma: int, n: int, rng: Any) -> list[int]:
    text: list[int] = published.decoding()(p, q, gamma, n, rng)[:n]
    p([])[0] = 2
    return text


WRITERS: dict[str, tuple[str, Callable[..., Any]]] = {
    "p": ("verifier", verify_then(lambda p, q, draft: p[-1].__setitem__(0, 2))),
    "p as an array": ("verifier", verify_then(lambda p, q, draft: p.__setitem__((0, 0), 2))),
    "q as a tensor": ("verifier", write_into_tensor),
    "draft": ("verifier", verify_then(lambda p, q, draft: draft.append(0))),
    "context": ("drafter", draft_then(lambda q, context: context.append(0))),
    "q([])": ("drafter", draft_then(lambda q, context: q([]).__setitem__(0, 2))),
    "p([])": ("generate", write_into_target_row),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_function_that_writes_into_what_it_is_given_is_accused(name: str) -> None:
    """What it returns is right, and would be wrong for a caller who uses the rows again."""
    form, function = WRITERS[name]
    found = accused(**{form: function})
    assert found.law == "arguments are left as they were"
    assert found.expected.startswith(f"{name.split()[0]} as it was given, not changed to [")


# --------------------------------------------------------------------- what small cases do not show


@pytest.mark.parametrize("name", [name for name in DEEP_VERIFIERS if "100,000" not in name])
def test_a_mistake_of_long_chains_many_tokens_or_rare_ones_is_found(name: str) -> None:
    assert accused(verifier=DEEP_VERIFIERS[name]).law == "joint distribution"


def test_a_mistake_of_floats_alone_says_so() -> None:
    found = accused(verifier=DEEP_VERIFIERS["right on Fractions, wrong on floats"])
    assert found.case["rows"] == "float64 (on Fractions it is right)"


def test_a_fault_that_begins_late_is_found_by_many_runs() -> None:
    late = published.late(ratio=published.accept_all, begins=100_000)
    assert accused(verifier=late, calls=110_000).law == "joint distribution"


def test_the_fewest_calls_are_made_and_no_random_case_without_being_asked() -> None:
    lines = str(check(published.textbook, random_cases=0, calls=30_000)).splitlines()
    assert "random cases" not in str(lines)
    late = int(lines[-1].rpartition(" ")[2])
    assert 30_000 <= late < 31_000


def test_time_that_runs_out_is_no_proof() -> None:
    result = check(published.slow_and_wrong, seconds=2)
    assert not result
    assert result.counterexample is None
    assert str(result).startswith("joint distribution: not proved, time ran out; nothing wrong in ")
    assert repr(result) == "<CheckResult not proved: joint distribution>"


@pytest.mark.parametrize("name", DEEP_TREES)
def test_a_mistake_of_wider_deeper_or_mixed_trees_is_found(name: str) -> None:
    verifier, law = DEEP_TREES[name]
    assert accused(verifier=verifier).law == law


def test_the_right_walk_beside_them_is_not_accused() -> None:
    assert prove(published.walk())


def test_a_mistake_of_the_fourth_round_is_found() -> None:
    assert accused(generate=published.wrong_from_round(4)).law == "joint distribution"
    assert prove(generate=published.wrong_from_round(99))


@pytest.mark.parametrize("name", DEEP_DRAFTERS)
def test_a_mistake_of_long_drafts_rare_tokens_contexts_or_state_is_found(name: str) -> None:
    drafter, law = DEEP_DRAFTERS[name]
    assert accused(drafter=drafter).law == law


def test_the_report_says_what_was_covered_and_what_not() -> None:
    lines = str(check(published.textbook, random_cases=40, calls=0)).splitlines()
    assert lines[0].endswith("(exactly; V 2-8, gamma 1-5)")
    assert lines[1] == "  the same on float64 rows: 690 cases"
    assert re.fullmatch(r"  then 40 random cases, \d+ outcomes \(V 2-8, gamma 1-6\)", lines[2])
    assert re.fullmatch(
        "  not covered: larger vocabularies and longer drafts; "
        r"a fault that begins after call \d+",
        lines[-1],
    )


def test_the_random_cases_of_a_seed_are_always_the_same() -> None:
    first, again, other = (list(islice(random_round_cases(seed), 9)) for seed in (1, 1, 2))
    assert first == again != other


# ---------------------------------------------------------------------- the house's own form


def greedy_siblings(tree: Any, p: Any, source: RandomSource) -> Verdict:
    """Forgets that a rejected sibling changed the distribution."""
    row, alive = p[ROOT], [node for node, parent in enumerate(tree.parents) if parent == ROOT]
    for node in alive:
        if source.accept(row[tree.tokens[node]] / tree.draft_probs[node][tree.tokens[node]]):
            return Verdict((node,), source.draw(p[node]))
    return Verdict((), source.draw(residual(row, tree.draft_probs[alive[-1]])))


def test_the_librarys_walk_is_proved_on_every_kind_of_tree() -> None:
    result = prove(verify_tree)
    assert result and len(result.evidence) == 5
    for found in result.evidence:
        exactness, coverage = found.notes[1:]
        assert exactness == "exactly"
        assert coverage.startswith("V 2-4, gamma 1-")
        assert coverage.endswith("7 sampling settings")


def test_a_verifier_that_is_right_on_chains_is_refuted_on_siblings() -> None:
    assert prove(greedy_siblings, trees=("chain",))
    found = accused(verifier=greedy_siblings, trees=("siblings",))
    assert "two siblings" in found.case["tree"]
    with pytest.raises(TinyspecError, match="no trees of the kind"):
        check(verify_tree, trees=("forest",))


def test_a_verifier_whose_path_is_none_is_accused() -> None:
    def last(tree: Any, p: Any, source: RandomSource) -> Verdict:
        return Verdict((len(tree.tokens) - 1,), 0)

    found = accused(verifier=last)
    assert "path" in str(found.expected) or found.law == "joint distribution"


# ------------------------------------------------------------------- no verdict where there is none


def own_generator(p: Any, q: Any, draft: list[int], rng: Any) -> Any:
    return published.textbook([list(map(float, row)) for row in p], q, draft, OWN)


OWN = np.random.default_rng(3)

NO_VERDICT = {
    "gives other results": own_generator,
    "rng.gumbel cannot be enumerated": lambda p, q, d, rng: [
        np.argmax(np.log(p[0]) + rng.gumbel(size=2))
    ],
    "continuous noise": lambda p, q, d: [int(torch.empty(2).exponential_(1).argmax())],
    "asks for the value": lambda p, q, d, rng: [int(float(rng.random()) < 0.5)],
    "compared with each other": lambda p, q, d, rng: [int(rng.random() < rng.random())],
    "returns a list of token ids": lambda p, q, d, rng: (1, [2]),
    "failed at p = ": lambda p, q, d, rng: [p[0].no_such_method()],
    "not done": lambda p, q, d, rng: [0 for _ in iter(rng.random, None)],
}


@pytest.mark.parametrize("message", NO_VERDICT)
def test_where_no_verdict_is_possible_it_says_why(message: str) -> None:
    with pytest.raises(TinyspecError, match=message):
        check(NO_VERDICT[message])
    with pytest.raises(TinyspecError, match="nothing to check"):
        check()


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ({"verifier": 3}, r"a verifier is a function, called as verify\(p_rows .* this is 3"),
        ({"verifier": lambda p, q: [0]}, r"q_rows \[gamma, V\].*; <lambda>\(p, q\) does not take"),
        ({"verifier": lambda p, q, d, rng, more: [0]}, r"called as verify\(p_rows"),
        ({"verifier": lambda tree: [0]}, r"called as verify\(tree, p, rng\) -> Verdict"),
        ({"drafter": lambda: [0]}, r"called as draft\(q, context, gamma, rng\)"),
        ({"drafter": "ngram"}, r"a drafter is a function, .*; this is 'ngram'"),
        ({"generate": lambda p, q: [0]}, r"called as generate\(p, q, gamma, n, rng\) -> tokens"),
    ],
)
def test_another_signature_is_an_error_of_one_line(function: Any, message: str) -> None:
    """`check(3)`: "a verifier is a function, called as verify(p_rows [gamma + 1, V], ...) ..."."""
    with pytest.raises(TinyspecError, match=message) as caught:
        check(**function)
    assert "\n" not in str(caught.value)


def test_a_mistake_that_ends_in_an_error_is_shown_with_its_case() -> None:
    def unnormalised(p: Any, q: Any, draft: list[int], rng: Any) -> list[int]:
        return [rng.choice(len(p[0]), p=[max(a - b, 0) for a, b in zip(p[0], q[0], strict=True)])]

    with pytest.raises(TinyspecError, match=r"failed at p = .*q = .*do not sum to 1"):
        check(unnormalised)


def test_an_empty_round_and_ids_out_of_range_are_accused() -> None:
    for tokens in ([], [7], [0, 0, 0, 0, 0]):
        found = accused(verifier=lambda p, q, d, rng, tokens=tokens: tokens)
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
    assert prove(published.global_generators)
    assert prove(published.in_torch)
    assert not check(WRONG_VERIFIERS["always accept"])
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


# --------------------------------------------------------------------- what is returned and printed


def test_check_prints_a_proof_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = prove(published.textbook)
    assert result
    assert result.counterexample is None
    assert capsys.readouterr().out == f"{result}\n"
    assert str(result).startswith("joint distribution: kept in 690 cases, ")
    assert repr(result) == "<CheckResult kept: joint distribution>"


def test_check_prints_a_counterexample_and_returns_it(capsys: pytest.CaptureFixture[str]) -> None:
    result = check(WRONG_VERIFIERS["always accept"])
    assert not result
    assert result.counterexample is not None
    assert capsys.readouterr().out == f"{result.counterexample}\n"
    assert repr(result) == "<CheckResult broken: joint distribution>"


def test_the_laws_kept_before_a_counterexample_are_named_too() -> None:
    wrong = WRONG_DRAFTERS["proposed only if token 0"]
    result = prove(published.textbook, drafter=wrong)
    assert not result
    assert str(result).startswith("joint distribution: kept in ")
    assert "\nbroken: presence\n" in str(result)


def test_a_notebook_shows_a_verdict_once(capsys: pytest.CaptureFixture[str]) -> None:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    shell.run_cell("from tinyspec.laws import check\ncheck(lambda p, q, draft, rng: draft)")
    assert capsys.readouterr().out.count("broken: ") == 1


def test_importing_the_laws_is_cheap() -> None:
    loaded = (
        "import tinyspec.laws, sys; print(any(name in sys.modules for name in ('torch', "
        "'numpy', 'hypothesis')))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
        ).stdout
        == "False\n"
    )
