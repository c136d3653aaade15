"""Speculative contrastive decoding: the contrasted distribution, its amateur, and its edges."""

from fractions import Fraction as F
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from tests.lm.small import LLAMA
from tests.lm.small import model as network
from tests.table import Table, exact_distribution
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.rational import distribution_pairs, overlap_mass
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import speculative_contrastive as traps
from tinyspec.speculative.integrated.speculative_contrastive import (
    JointTarget,
    contrast_weights,
    make_contrast,
)
from tinyspec.technique import Request, find_technique

CARD = find_technique("speculative_contrastive")
GREEDY = SamplingParams(temperature=0.0)


def make_decoder(
    expert: int = 1,
    amateur: int = 2,
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    request = Request(
        Table(expert),
        [Table(amateur)],
        sampling=sampling or SamplingParams(),
        stop=stop or StoppingCriteria(),
    )
    return CARD.make(request, **{"beta": 1.0, **knobs})


def finish(decoder: Decoder, prompt: list[int]) -> Decoder:
    decoder.extend(prompt)
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return decoder


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


def test_trap_plain_speculative_decoding_is_not_contrastive() -> None:
    def speculative(request: Request, gamma: int, **knobs: float) -> Decoder:
        return request.decoder(ModelDrafter(request.drafts[0], gamma), verify_tree)

    with pytest.raises(AssertionError, match="contrast"):
        traps.joint_distribution_of_the_contrast(speculative)


def test_without_contrast_and_plausibility_it_is_speculative_decoding_of_the_expert() -> None:
    plain = exact_distribution(lambda: Decoder(Table(1), BaseDrafter(), verify_tree), 3)
    assert exact_distribution(lambda: make_decoder(beta=0.0, plausibility=0.0, gamma=2), 3) == plain


def test_the_draft_changes_nothing_against_plain_contrastive_decoding() -> None:
    knobs = {"beta": 1.0, "plausibility": 0.2}
    assert exact_distribution(lambda: make_decoder(gamma=2, **knobs), 3) == exact_distribution(
        lambda: make_decoder(gamma=0, **knobs), 3
    )


def test_theorem_acceptance_is_one_minus_total_variation() -> None:
    seen = 0
    for p, q in distribution_pairs((2, 3), 5):
        expected = traps.contrast_probs(p, q, 1, F("0.25"))

        def passed(source: Exhaustive, p: Any = p, q: Any = q) -> bool:
            tables = [
                type("Fixed", (Table,), {"row": lambda self, text, row=row: row})(0, len(row))
                for row in (p, q)
            ]
            decoder = CARD.make(
                Request(tables[0], tables[1:]), gamma=1, beta=1.0, plausibility=0.25
            )
            decoder.extend((0,))
            return bool(decoder.step(source).verdict.accepted)

        rate = sum(x for path, x in Exhaustive.walk(passed) if path)
        assert rate == overlap_mass(expected, q)
        seen += 1
    assert seen > 100


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("plausibility", [0.0, 0.3, 1.0])
def test_logits_give_the_formulas_distribution(beta: float, plausibility: float) -> None:
    """Models' logits are only fixed up to a shift each; impossible tokens are -inf."""
    rng = np.random.default_rng(1)
    for shift in (0.0, 7.0):
        e, a = rng.normal(size=(2, 9))
        e[3] = a[4] = a[3] = -np.inf
        p_e, p_a = (np.exp(row) / np.exp(row).sum() for row in (e, a))
        kept = (p_e >= plausibility * p_e.max()) & (p_e > 0)
        if beta and (kept & (p_a == 0)).any():
            kept &= p_a == 0
            weights = np.where(kept, p_e ** (1 + beta), 0)
        else:
            with np.errstate(divide="ignore", invalid="ignore"):
                weights = np.where(kept, p_e ** (1 + beta) / (p_a**beta), 0)
        assert contrast_weights(list(p_e), list(p_a), beta, plausibility) == pytest.approx(weights)
        contrasted = make_contrast(beta, plausibility)([e + shift, torch.from_numpy(a)], (), ())
        assert torch.softmax(contrasted, -1).numpy() == pytest.approx(
            weights / weights.sum(), abs=1e-12
        )


def test_tokens_that_the_amateur_cannot_say_come_before_all_others() -> None:
    make = make_contrast(1.0, 0.25)
    assert make([[F(1, 2), F(1, 4), F(1, 4)], [F(1, 2), F(1, 2), F(0)]], (), ()) == [0, 0, F(1, 16)]
    assert make([[F(3, 4), F(1, 4), F(0)], [F(0), F(0), F(1)]], (), ()) == [F(9, 16), F(1, 16), 0]


@pytest.mark.parametrize("sampling", [GREEDY, SamplingParams(0.8, top_p=0.9)], ids=str)
def test_on_transformers_blocks_write_what_single_tokens_write_at_temperature_0(
    sampling: SamplingParams,
) -> None:
    tokens = []
    for gamma in (0, 1, 4):
        request = Request(
            network(LLAMA, seed=1).session(),
            [network(LLAMA, seed=2).session()],
            sampling,
            StoppingCriteria(max_new_tokens=20),
        )
        tokens.append(finish(CARD.make(request, gamma=gamma), [1, 2, 3]).new)
    assert all(len(text) == 20 for text in tokens)
    assert sampling != GREEDY or tokens[0] == tokens[1] == tokens[2]


def test_one_expert_pass_a_round_and_a_bonus_after_a_whole_draft() -> None:
    request = Request(
        Table(1), [Table(1)], sampling=GREEDY, stop=StoppingCriteria(max_new_tokens=10)
    )
    decoder = CARD.make(
        request, gamma=4, beta=0.0, plausibility=0.0
    )  # the amateur is the expert, nothing is contrasted
    assert finish(decoder, [0]).rounds == 2
    assert request.target.calls == 2  # type: ignore[attr-defined]


@pytest.mark.parametrize("wanted", [0, 1])
def test_budgets_of_no_and_one_token_need_no_draft(wanted: int) -> None:
    decoder = finish(make_decoder(stop=StoppingCriteria(max_new_tokens=wanted)), [0])
    assert len(decoder.new) == wanted and decoder.rounds == wanted


def test_an_end_of_text_inside_a_block_ends_it() -> None:
    stop = StoppingCriteria(eos=frozenset({0, 1, 2}), max_new_tokens=9)
    assert len(finish(make_decoder(stop=stop), [0]).new) == 1


def test_the_shorter_context_of_the_two_ends_the_text() -> None:
    request = Request(Table(1), [Table(2)], positions=30, draft_max_lengths=[6])
    decoder = finish(CARD.make(request, beta=1.0), [0, 1])
    assert (len(decoder.context), decoder.finished) == (6, "context")


def test_a_decoder_taken_back_tells_both_models() -> None:
    decoder = make_decoder(stop=StoppingCriteria(max_new_tokens=5))
    finish(decoder, [0, 1])
    decoder.rewind(2)
    assert [len(member) for member in decoder.target.members] == [2, 2]  # type: ignore[attr-defined]
    assert decoder.target.text == [0, 1]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "knobs", [{"gamma": -1}, {"beta": -0.1}, {"plausibility": 1.1}, {"alpha": 0.1}]
)
def test_knobs_out_of_range_raise_a_named_error(knobs: dict[str, float]) -> None:
    with pytest.raises(TinyspecError, match=next(iter(knobs))):
        make_decoder(**knobs)


def test_rational_distributions_have_a_contrast_at_whole_beta_only() -> None:
    with pytest.raises(TinyspecError, match="use a whole number"):
        finish(make_decoder(beta=0.5, stop=StoppingCriteria(max_new_tokens=1)), [0])


# ----------------------------------------------------------------- the joint target, for other uses


def test_models_of_two_vocabularies_raise_a_one_line_error() -> None:
    joint = JointTarget([Table(1, 3), Table(2, 4)], lambda rows, text, path: rows[0])
    joint.extend((0,))
    with pytest.raises(TinyspecError, match=r"\[3, 4\] tokens"):
        joint.score(make_decoder().drafter.propose([0], 0, GREEDY, Seeded(0)))


def test_a_cascade_with_deferral_is_a_joint_target() -> None:
    """The small model's distribution where it is sure, else the large one's. Drafted or decoded
    plainly, the output has the same distribution.
    """

    def deferring(rows: Any, text: Any, path: Any) -> Any:
        large, small = rows
        return small if max(small) >= F(1, 2) else large

    def decoder(gamma: int) -> Decoder:
        small = Table(2)
        return Decoder(
            JointTarget([Table(1), small], deferring), ModelDrafter(Table(2), gamma), verify_tree
        )

    assert exact_distribution(lambda: decoder(2), 3) == exact_distribution(lambda: decoder(0), 3)


def test_a_grammar_is_a_joint_target_of_one() -> None:
    """No token twice in succession; the mask reads the text and the path below it."""

    def mask(rows: Any, text: Any, path: Any) -> Any:
        last = (*text, *path)[-1]
        return [F(0) if x == last else weight for x, weight in enumerate(rows[0])]

    drafted = exact_distribution(
        lambda: Decoder(
            JointTarget([Table(1, zeros=False)], mask), ModelDrafter(Table(2), 2), verify_tree
        ),
        3,
    )
    plain = exact_distribution(
        lambda: Decoder(JointTarget([Table(1, zeros=False)], mask), BaseDrafter(), verify_tree), 3
    )
    assert drafted == plain
    assert all(a != b for text in plain for a, b in zip((0, *text), text, strict=False))


def test_every_combination_of_members_speaks_of_its_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    for exact in product((True, False), repeat=2):
        members = [type("Member", (), {"cache_exact": yes})() for yes in exact]
        assert JointTarget(members, lambda rows, text, path: rows[0]).cache_exact == all(exact)
