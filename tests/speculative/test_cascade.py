"""Cascade speculative drafting: how often each level runs, the four ablations, and max-gram.

Bad input is an error.
"""

from typing import Any

import pytest

from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.tables import TableModel
from tinyspec.laws.museum import find_toy
from tinyspec.laws.traps.cascade import (
    called_as_k_says,
    copies_the_longest_gram,
    predict_calls,
)
from tinyspec.speculative.drafting.cascade import (
    MaxGramDrafter,
    cascade,
    draft_cascade,
    parse_quotas,
)
from tinyspec.technique import Request, find_technique

CARD = find_technique("cascade")


def make_decoder(
    quotas: str,
    *seeds: int,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: object,
) -> Decoder:
    target, *drafts = [Table(seed, 3, zeros=False) for seed in seeds]
    request = Request(target, drafts, sampling or SamplingParams(), stop or StoppingCriteria())
    return CARD.make(request, quotas=quotas, sample=knobs.pop("sample", 0), **knobs)


def plain(seed: int, sampling: SamplingParams | None = None) -> Decoder:
    return Decoder(
        Table(seed, 3, zeros=False),
        BaseDrafter(),
        verify_tree,
        sampling=sampling or SamplingParams(),
    )


def finish(d: Decoder, prompt: tuple[int, ...] = (0, 1)) -> Decoder:
    d.extend(prompt)
    rng = Seeded(0)
    while not d.finished:
        d.step(rng)
    return d


@pytest.mark.parametrize(
    ("quotas", "seeds"),
    [("3,2/1", (1, 2)), ("5,0/2", (1, 2)), ("3,2,1/2,1/1", (1, 2, 3)), ("2,0,2/3,0/2", (5, 6, 7))],
)
def test_printed_algorithm_is_what_runs(quotas: str, seeds: tuple[int, ...]) -> None:
    """The same draft, and as many forward passes of every level."""
    for prompt in ([0, 1], [2, 0, 1, 2, 0], [1, 1, 0, 1, 2, 1, 1]):
        d = make_decoder(quotas, *seeds, sampling=SamplingParams(0.0))
        d.extend(prompt)
        passes = [0] * (len(seeds) - 1)

        def level(number: int) -> Any:
            table = Table(seeds[number + 1], 3, zeros=False)

            def greedy(text: list[int], draft: list[int]) -> list[int]:
                passes[number] += 1  # noqa: B023
                rows = [table.row([*text, *draft[:n]]) for n in range(len(draft) + 1)]
                return [row.index(max(row)) for row in rows]

            return greedy

        def copy(text: list[int], n: int) -> list[int]:
            return d.drafter.below[-1].write(text, n, SamplingParams(), Seeded(0))[0]  # noqa: B023

        levels = [level(number) for number in range(len(passes))]
        drafted = draft_cascade(prompt, levels, copy, parse_quotas(quotas, len(passes)), 99)
        assert list(d.drafter.propose(prompt, 99, d.sampling, Seeded(0)).tokens) == drafted
        assert [level.decoder.target.calls for level in d.drafter.below[:-1]] == passes


def test_trap_every_level_runs_as_often_as_k_says() -> None:
    """A two-level draft with a constant gamma, however long, is not it."""
    assert called_as_k_says(CARD.make).cases > 0
    with pytest.raises(AssertionError):
        find_toy("cascade", "two levels with a constant gamma").check()


def test_what_k_predicts_by_hand() -> None:
    assert predict_calls("3,2/1") == [
        1,
        2,
    ]  # three tokens: one drafted and one added, then the third alone
    assert predict_calls("13,10/10") == [1, 2]


@pytest.mark.parametrize("vertical", [True, False])
@pytest.mark.parametrize("horizontal", [True, False])
def test_four_ablations_keep_the_distribution(vertical: bool, horizontal: bool) -> None:
    knobs = {"vertical": vertical, "horizontal": horizontal}
    assert exact_distribution(
        lambda: make_decoder("1,1/1", 1, 2, **knobs), 2
    ) == exact_distribution(lambda: plain(1), 2)


def test_each_ablation_changes_what_its_knob_says() -> None:
    def counts(**knobs: bool) -> tuple[int, int]:
        poem = TableModel(
            vocabulary=5, rows=lambda text: [int(x == len(text) % 5) for x in range(5)]
        )
        request = Request(
            poem.session(),
            [poem.session()],
            SamplingParams(0.0),
            StoppingCriteria(max_new_tokens=36),
        )
        d = finish(CARD.make(request, quotas="3,2/2", sample=0, **knobs), tuple(range(5)) * 2)
        return d.rounds, len(request.drafts[0].forward_log)  # type: ignore[attr-defined]

    both, tall, wide, none = (
        counts(vertical=v, horizontal=h) for v in (True, False) for h in (True, False)
    )
    assert (
        both[0] == wide[0] == tall[0] == none[0] == 6
    )  # six tokens a round: all agree, whoever writes
    assert both[1] < wide[1] and tall[1] < none[1]  # recursion saves passes of the draft
    assert both[1] < tall[1] and wide[1] < none[1]  # and by leaving the end of a draft to max-gram


@pytest.mark.parametrize(
    "sampling", [SamplingParams(0.0), SamplingParams(0.5), SamplingParams(top_k=2)], ids=str
)
def test_three_levels_and_max_gram_keep_the_joint_distribution(sampling: SamplingParams) -> None:
    got = exact_distribution(lambda: make_decoder("2,0,1/1,0/1", 1, 2, 3, sampling=sampling), 2)
    assert got == exact_distribution(lambda: plain(1, sampling), 2)


@pytest.mark.parametrize("lenience", [1.0, 2.0, 3.0])
def test_lenience_between_drafts_changes_no_distribution(lenience: float) -> None:
    got = exact_distribution(lambda: make_decoder("2,1/1", 1, 2, lenience=lenience), 2)
    for text, probability in exact_distribution(lambda: plain(1), 2).items():
        assert float(got[text]) == pytest.approx(float(probability), abs=1e-12)


def test_a_lenient_review_lets_more_pass() -> None:
    def calls(lenience: float) -> int:
        d = finish(
            make_decoder(
                "4,0/3",
                5,
                6,
                sampling=SamplingParams(0.0),
                stop=StoppingCriteria(max_new_tokens=40),
                lenience=lenience,
            )
        )
        return len(d.drafter.below[0].decoder.target.forward_log)

    assert calls(3.0) < calls(1.0)


def test_max_gram_copies_what_followed_the_longest_match() -> None:
    assert copies_the_longest_gram(lambda longest: MaxGramDrafter(longest, None)).cases == 200


def test_where_nothing_matches_the_bigram_table_answers_and_without_one_nobody_does() -> None:
    with_table, without = (
        finish(make_decoder("0,2/0", 1, 2, stop=StoppingCriteria(max_new_tokens=1), sample=n))
        for n in (40, 0)
    )
    table = with_table.drafter.below[-1].table
    with_table.rewind(0)
    write = with_table.drafter.below[-1].write
    assert write([2], 1, SamplingParams(), Seeded(0)) == ([table.most_likely([2])], [None])
    without.rewind(0)
    assert without.drafter.below[-1].write([2], 1, SamplingParams(), Seeded(0)) == ([], [])


def test_nothing_is_drafted_after_an_end_of_text() -> None:
    d = make_decoder(
        "3,3/2",
        1,
        1,
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9),
    )
    d.extend((0, 1, 0, 1))
    assert len(d.step(Seeded(0)).tree.tokens) == 1


@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_short_requests_end_where_they_should(wanted: int) -> None:
    assert (
        len(finish(make_decoder("3,2/2", 1, 2, stop=StoppingCriteria(max_new_tokens=wanted))).new)
        == wanted
    )


def test_a_draft_that_is_full_leaves_the_target_alone() -> None:
    request = Request(
        Table(1),
        [Table(2)],
        SamplingParams(),
        StoppingCriteria(max_new_tokens=12),
        draft_max_lengths=[6],
    )
    assert len(finish(CARD.make(request, quotas="3,0/1", sample=0)).new) == 12


@pytest.mark.parametrize(
    ("quotas", "drafts"),
    [("5,3", 1), ("5,3/1,1", 1), ("5,x/1", 1), ("5/1", 2), ("0,0/1", 1), ("auto", 3)],
)
def test_quotas_that_do_not_fit_raise_an_error_with_an_example(quotas: str, drafts: int) -> None:
    with pytest.raises(TinyspecError, match=r"13,10/10|5,14,10|above 0"):
        parse_quotas(quotas, drafts)


def test_models_of_different_vocabularies_raise_a_named_error() -> None:
    with pytest.raises(TinyspecError, match="vocabular"):
        cascade(
            Request(Table(1, 3), [Table(2, 4)]),
            quotas="1,1/1", lenience=1.0, vertical=True, horizontal=True, longest=4, sample=0,
        )  # fmt: skip
