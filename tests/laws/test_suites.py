"""Every registered technique is held to its guarantee.

The suites can judge techniques of every shape, and see their defects.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

import pytest

from tests.laws import hosted, published
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, TargetProbs
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams
from tinyspec.decoding.verify import Verdict, match_tree, sample_inverse_cdf, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws import rewriting_laws, suites
from tinyspec.laws.contracts import TRUTHFUL, contracts_of_technique
from tinyspec.laws.evidence import Evidence, LawViolated
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exact.models import likeliest_token
from tinyspec.laws.museum.rows import Mutant
from tinyspec.laws.museum.verification import WIDE_AND_DEEP
from tinyspec.laws.parts import Siblings
from tinyspec.laws.prove import Profile, prove_technique
from tinyspec.laws.stage import Stage
from tinyspec.laws.suites import (
    GREEDY,
    KNOB_COST,
    ROUND_LAWS,
    SAME_TOKENS,
    race_law,
    technique_cases,
)
from tinyspec.lm.forward import Plan
from tinyspec.lm.session import Session
from tinyspec.technique import Card, Guarantee, Knob, Request, find_technique, load_techniques
from tinyspec.tree import ROOT, TokenTree


@pytest.mark.parametrize("name", load_techniques())
def test_every_registered_technique_is_proved(name: str) -> None:
    card = find_technique(name)
    proved = {evidence.law: evidence for evidence in prove_technique(card)}
    if card.kind == "analysis":
        assert not proved
    elif card.kind == "refine":
        own = set(proved) - set(rewriting_laws.REFINE_LAWS)
        assert own
        assert len(proved) == len(own) + len(rewriting_laws.REFINE_LAWS)
    elif card.kind in ("streams", "policy"):
        assert proved and all(evidence.cases for evidence in proved.values())
    elif card.guarantee is Guarantee.APPROX:
        assert proved["its own oracle"].cases
    else:
        assert {GREEDY} <= set(proved)
        if card.guarantee is not Guarantee.GREEDY:
            law = SAME_TOKENS if card.coupled else JOINT
            assert proved[law].cases >= (9 if card.hidden or card.coupled else 30)
            assert proved[law].branches >= 50
        assert (KNOB_COST in proved) == (card.lossy is not None)


# ---------------------------------------------------------------------- what they host

HOSTED = {
    "with replacement": hosted.siblings(True),
    "without replacement": hosted.siblings(False),
    "two models": hosted.card(hosted.two_models, drafts=2),
    "cascade": hosted.cascade(True),
    "exit draft": hosted.own_draft(Plan(last=1)),
    "skipping draft": hosted.own_draft(Plan(skip=frozenset({2, 3}))),
    "heads": hosted.card(hosted.feels, hidden=True),
    "early exit": hosted.EARLY,
    "coupling": hosted.racing(0),
    "contrast": hosted.card(hosted.contrast, drafts=1, keeps="the expert less the amateur"),
    "store": hosted.card(hosted.store, persistent=True),
    "greedy": hosted.card(hosted.store, Guarantee.GREEDY),
}


@pytest.mark.parametrize("name", HOSTED)
def test_the_suites_host_techniques_of_every_shape(name: str) -> None:
    """This is a sample of the cases. A registered technique runs them all, as does one that keeps
    another target's distribution.
    """
    assert any(find_technique(known).keeps for known in load_techniques())
    assert (
        sum(
            evidence.cases
            for evidence in prove_technique(HOSTED[name], Profile("sample", (1, 2), 9))
        )
        >= 16
    )


def test_an_analysis_has_no_law_and_is_not_built() -> None:
    assert prove_technique(hosted.card(hosted.planner, kind="analysis")) == []


def test_a_technique_that_keeps_no_distribution_must_bring_an_oracle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for card in (
        hosted.card(hosted.fill_in, kind="refine"),
        hosted.card(hosted.fill_in, Guarantee.APPROX),
    ):
        with pytest.raises(TinyspecError, match="oracle"):
            prove_technique(card)
        with monkeypatch.context() as patch:
            patch.setitem(suites.ORACLES, card.name, lambda card: Evidence("brute force", 3))
            known = list(rewriting_laws.REFINE_LAWS) if card.kind == "refine" else []
            assert [evidence.law for evidence in prove_technique(card)] == [*known, "brute force"]


def test_an_oracle_of_its_own_excuses_nobody_from_its_suite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    card = find_technique("autoregressive")
    whole = len(technique_cases(card))
    monkeypatch.setitem(suites.ORACLES, card.name, lambda card: Evidence("brute force", 3))
    assert len(technique_cases(card)) == whole + 1


# ---------------------------------------------------------------------- what they see


def broken(card: Card, build: Callable[..., Decoder]) -> Card:
    return replace(card, build=build, knobs=(), lossy=None)


class Reuses(BaseDrafter):
    """Noise drawn in the first round serves all rounds."""

    noise: Any = None

    def __init__(self, request: Request):
        self.vocabulary = request.target.model.config.vocab_size  # type: ignore[attr-defined]

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        if not max_draft_depth:
            return TokenTree()
        if self.noise is None:
            self.noise = rng.draw([0.25] * 4) / 4
        q = [[0.5, 0.5], [0.25, 0.25, 0.5], [0.25] * 4, [0.25] * 4 + [0.0]][self.vocabulary - 2]
        return TokenTree.chain([sample_inverse_cdf(q, self.noise)], [q])


def no_bonus_from_the_right_row(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    verdict = verify_tree(tree, p, rng)
    return (
        verdict
        if not verdict.accepted
        else Verdict(verdict.accepted, rng.draw(p[ROOT]), verdict.rejected)
    )


class Late(Decoder):
    """Declares its tokens' distributions one position late."""

    def step(self, rng: RandomSource) -> Any:
        round = super().step(rng)
        return round._replace(output_probs=(*round.output_probs[1:], *round.output_probs[:1]))


class Unmoved(Session):
    """The accepted path takes its slots, and its keys and values stay where they were."""

    def _assign_slots(self, nodes: list[Any], first: int) -> None:
        self.cache.move_slots = lambda *args: None  # type: ignore[method-assign]
        super()._assign_slots(nodes, first)


def unmoved(request: Request) -> Decoder:
    """Two drafts side by side, on a session that does not gather what was accepted; a table is as
    it should be.
    """
    if isinstance(request.target, Session):
        request.target.__class__ = Unmoved
    return request.decoder(Siblings(request.drafts[0], 2, True), verify_tree)


SPECULATIVE = find_technique("speculative_decoding")


def draft_of(request: Request) -> ModelDrafter:
    return ModelDrafter(request.drafts[0], 2, request.stop.eos, request.draft_max_length)


BROKEN: dict[str, tuple[Card, str]] = {
    "noise used again": (
        broken(
            find_technique("autoregressive"),
            lambda request: request.decoder(Reuses(request), verify_tree),
        ),
        JOINT,
    ),
    "bonus from the wrong row": (
        broken(SPECULATIVE, lambda request: request.decoder(draft_of(request),
        no_bonus_from_the_right_row)),
        JOINT,
    ),
    "the end of text is not the end": (
        broken(
            find_technique("autoregressive"),
            lambda request: Decoder(
                request.target, BaseDrafter(), verify_tree, sampling=request.sampling
            ),
        ),
        JOINT,
    ),
    "the smallest's law is declared": (hosted.cascade(False), JOINT),
    "judged by the exit's rows": (hosted.own_draft(Plan(last=1), exact=False), JOINT),
    "races numbered by the round": (hosted.racing(3), SAME_TOKENS),
    "an exit that is not neutral": (replace(hosted.EARLY, lossy=("layers", 2)), JOINT),
    "a knob that makes it dearer": (
        replace(hosted.EARLY, build=lambda request, layers: hosted.early(request,
        layers=3 if layers == 3 else 4 - layers)),
        KNOB_COST,
    ),
    "keys left where they were": (hosted.card(unmoved, drafts=1), JOINT),
    "laws told one row late": (
        broken(SPECULATIVE, lambda request: Late(request.target, draft_of(request), verify_tree,
        sampling=request.sampling,
                                                 stop=request.stop, positions=request.positions)),
        ROUND_LAWS,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_the_suites_accuse_broken_techniques(name: str) -> None:
    card, law = BROKEN[name]
    with pytest.raises(LawViolated) as caught:
        prove_technique(card)
    assert caught.value.counterexample.law == law
    assert name != "keys left where they were" or "transformer" in str(caught.value.__notes__)


SHARED_WALK = [
    name
    for name, known in load_techniques().items()
    if known.kind == "decoder" and known.guarantee in (Guarantee.EXACT, Guarantee.LOSSY)
    if known.build.__module__.startswith("tinyspec.speculative.") and not known.coupled
    if Stage(known).decoder().verifier is verify_tree
]
"""Techniques of chapter 1 whose verifier is the shared walk down a tree."""


@pytest.mark.parametrize("mutant", WIDE_AND_DEEP[:4], ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("name", SHARED_WALK)
def test_a_wrong_shared_walk_is_accused_for_every_technique_that_uses_it(
    name: str, mutant: Mutant
) -> None:
    """Its verifier's own cases show it: no small draft has three siblings or a chain of three."""
    with mutant.applied(), pytest.raises(LawViolated) as caught:
        prove_technique(find_technique(name))
    assert "its verifier" in str(caught.value.__notes__)


def test_most_techniques_of_chapter_1_use_the_shared_walk() -> None:
    assert len(SHARED_WALK) >= 13


def test_a_greedy_promise_is_judged_at_temperature_0() -> None:
    def build(request: Request) -> Decoder:
        return request.decoder(BaseDrafter(), lambda tree, p, rng: Verdict((), len(p.context) % 3))

    with pytest.raises(LawViolated) as caught:
        prove_technique(hosted.card(build, Guarantee.GREEDY))
    assert caught.value.counterexample.law == GREEDY


def test_a_counterexample_is_small_and_speaks_of_p_and_q() -> None:
    with pytest.raises(LawViolated) as caught:
        prove_technique(
            broken(
                SPECULATIVE,
                lambda request: request.decoder(draft_of(request), no_bonus_from_the_right_row),
            )
        )
    counterexample = caught.value.counterexample
    assert len(counterexample.case["text"]) == 2
    assert (
        len(counterexample.case["p along the text"])
        == len(counterexample.case["q along the text"])
        == 2
    )
    assert len(counterexample.case["p along the text"][0]) == 2  # V
    assert json.dumps(counterexample.as_dict())


def test_a_verifier_of_its_own_is_tried_on_longer_chains_than_it_is_given() -> None:
    """The draft has two tokens; the verifier is wrong about a third."""
    verifier = published.walk(accepts=lambda ratio, place, depth: 1 if depth == 3 else ratio)

    def build(request: Request) -> Decoder:
        return request.decoder(draft_of(request), verifier)

    with pytest.raises(LawViolated) as caught:
        prove_technique(broken(SPECULATIVE, build))
    assert {"p", "q", "tree", "draft"} <= caught.value.counterexample.case.keys()
    assert "its verifier alone, if it is its own" in str(caught.value.__notes__)


def test_the_race_law_sees_a_race_that_is_none() -> None:
    class First:
        def __init__(self, uniforms: list[float]):
            self.uniforms = uniforms

        def exponential_race(self, row: Any, position: int) -> int:
            return int(self.uniforms[1] < self.uniforms[0])  # as if both were as likely

    with pytest.raises(LawViolated):
        race_law(First)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what one case alone sees


class DeepDrafter(ModelDrafter):
    """Drafts as many tokens as ever, however much room there is."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        return super().propose(context, self.gamma, sampling, rng)


class ChoosyDrafter(ModelDrafter):
    """After five rounds its drafts end before an unlikely token."""

    seen = 0

    def observe(self, round: Round) -> None:
        super().observe(round)
        self.seen += 1

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        if self.seen < 5 or all(q is None for q in tree.draft_probs):
            return tree
        known = zip(tree.tokens, tree.draft_probs, strict=True)
        likely = [*takewhile(lambda pair: pair[1][pair[0]] * len(pair[1]) >= 1, known)]
        return TokenTree.chain([token for token, _ in likely], [q for _, q in likely])


class OldProbs(TargetProbs):
    """Applies the penalty to a text of its own."""

    def __init__(self, p: TargetProbs, history: Callable[[Sequence[int]], Sequence[int]]):
        super().__init__(p.scores, p.sampling, p.context, p.tree)
        self.history = history

    def _history(self, node: int, sampling: SamplingParams) -> Sequence[int]:
        return self.history([*self.context, *self.tree.tokens_on(self.tree.path(node))])


class RawRows(Decoder):
    """Declares the rows before the sampling settings."""

    def step(self, rng: RandomSource) -> Round:
        context = tuple(self.context)
        round = super().step(rng)
        probs = TargetProbs(round.scores, UNCHANGED, context, round.tree)
        nodes = (ROOT, *round.verdict.accepted)[: len(round.tokens)]
        return round._replace(output_probs=[probs[node] for node in nodes])


class ForgetfulSiblings(Siblings):
    """Declares of the third sibling what the second was drawn from."""

    def propose(
        self, context: Sequence[int], max_draft_depth: int, sampling: SamplingParams, rng: Any
    ) -> TokenTree:
        tree = super().propose(context, max_draft_depth, sampling, rng)
        late = [tree.draft_probs[min(node, 1)] for node in range(len(tree.tokens))]
        return TokenTree(tree.tokens, tree.parents, tuple(late), tree.probe)


def verify_likeliest(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    """Take the argmax of the logits, without the penalty."""
    return match_tree(tree, lambda node, depth: likeliest_token(list(p.logits_at(node))))


def verify_in_a_byte(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    verdict = verify_tree(tree, p, rng)
    return verdict if verdict.next is None else verdict._replace(next=verdict.next % 256)


def verify_two_filters(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    sampling = p.sampling if p.sampling.top_k is None else replace(p.sampling, min_p=None)
    return verify_tree(tree, TargetProbs(p.scores, sampling, p.context, p.tree), rng)


def verify_a_window(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
    return verify_tree(tree, OldProbs(p, lambda text: text[-8:]), rng)


def with_verifier(verifier: Any) -> Card:
    return broken(SPECULATIVE, lambda request: request.decoder(draft_of(request), verifier))


def with_drafter(kind: type[ModelDrafter], more: int = 0) -> Card:
    def build(request: Request) -> Decoder:
        most = request.draft_max_length
        room = None if most is None else most + more
        drafter = kind(request.drafts[0], 2, request.stop.eos, room)
        return request.decoder(drafter, verify_tree)

    return broken(SPECULATIVE, build)


def cold_without_penalty(request: Request) -> Decoder:
    is_cold = request.sampling.temperature == 0
    return request.decoder(draft_of(request), verify_likeliest if is_cold else verify_tree)


def seen_for_good(request: Request) -> Decoder:
    """The penalty counts tokens that were taken back."""
    seen = dict[int, None]()

    def verify(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        seen.update(dict.fromkeys(p.context))
        return verify_tree(tree, OldProbs(p, lambda text: [*seen, *text]), rng)

    return request.decoder(draft_of(request), verify)


def raw_rows(request: Request) -> Decoder:
    return RawRows(
        request.target,
        draft_of(request),
        verify_tree,
        sampling=request.sampling,
        stop=request.stop,
        positions=request.positions,
    )


def one_end_of_two(request: Request) -> Decoder:
    stop = replace(request.stop, eos=frozenset(sorted(request.stop.eos)[:1]))
    return replace(request, stop=stop).decoder(BaseDrafter(), verify_tree)


def switched(request: Request, fast: bool) -> Decoder:
    return request.decoder(draft_of(request), no_bonus_from_the_right_row if fast else verify_tree)


GREEDY_CARD = replace(with_verifier(verify_likeliest), guarantee=Guarantee.GREEDY)
SWITCH = replace(SPECULATIVE, build=switched, lossy=None, knobs=(Knob("fast", False, "a switch"),))
COLD = "temperature 0.0, repetition_penalty 3.0, in floats"
SEEN_BY: dict[str, tuple[Card, str]] = {
    "greedy, without the penalty": (broken(SPECULATIVE, cold_without_penalty), COLD),
    "a greedy promise without the penalty": (GREEDY_CARD, COLD),
    "the other value of a switch": (SWITCH, "fast True"),
    "rows before the settings": (broken(SPECULATIVE, raw_rows), "rows that a cascade reads"),
    "choosy after five rounds": (with_drafter(ChoosyDrafter), "after twelve rounds"),
    "a penalty on the last tokens": (with_verifier(verify_a_window), "a long prompt"),
    "a penalty on what was taken back": (
        broken(SPECULATIVE, seen_for_good),
        "taken back and corrected, with a penalty",
    ),
    "no room for the draft in the target": (with_drafter(DeepDrafter), "the context's limit"),
    "no room for the draft in its model": (
        with_drafter(ModelDrafter, more=1),
        "a draft with a context of 3",
    ),
    "ids of eight bits": (with_verifier(verify_in_a_byte), "V = 300, one token"),
    "two filters of three": (with_verifier(verify_two_filters), "V = 4, three filters at once"),
    "one of two ends": (broken(find_technique("autoregressive"), one_end_of_two), "whole requests"),
}


@pytest.mark.parametrize("name", SEEN_BY)
def test_a_mistake_that_few_cases_can_show_is_seen_by_its_case(name: str) -> None:
    card, title = SEEN_BY[name]
    asked = [case for case in technique_cases(card) if case.title == title]
    assert asked
    with pytest.raises((LawViolated, TinyspecError)):
        print([case.run() for case in asked])


def test_the_contracts_meet_a_third_sibling() -> None:
    def build(request: Request, *, k: int) -> Decoder:
        return request.decoder(ForgetfulSiblings(request.drafts[0], k, False), verify_tree)

    wrong = hosted.card(build, drafts=1, knobs=[Knob("k", 4, "tokens side by side", low=1)])
    with pytest.raises(LawViolated) as caught:
        contracts_of_technique(wrong)
    assert caught.value.counterexample.law == TRUTHFUL
    assert contracts_of_technique(hosted.siblings(False))
