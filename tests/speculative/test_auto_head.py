"""auto with a trained head: exact, its states only when it drafts, and a head that pays or not."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tinyspec
from tests.zoo import failed, run, tiny_zoo
from tinyspec.cli.base import assign_heads
from tinyspec.decoding.decode import Round
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict
from tinyspec.errors import TinyspecError
from tinyspec.laws import feature_laws, suites
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import auto as traps
from tinyspec.laws.traps import blockwise as blockwise_traps
from tinyspec.laws.traps.auto import Watch
from tinyspec.lm.borrowed import embedding_checksum
from tinyspec.lm.forward import ForwardRecord
from tinyspec.lm.heads import HeadFile, head_settings, head_weights, write_head
from tinyspec.lm.model import Model
from tinyspec.speculative import auto
from tinyspec.speculative.goodput import (
    HEAD,
    PLAIN,
    Candidate,
    Choice,
    Goodput,
    HeadFigures,
    LearntCosts,
)
from tinyspec.technique import Request, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("auto")
GREEDY = SamplingParams(temperature=0.0)
METHODS = ("medusa", "blockwise", "eagle", "eagle2", "eagle3", "hydra", "redrafter")


def test_trap_a_resting_head_misses_nothing() -> None:
    assert traps.a_resting_head_misses_nothing(CARD.make).cases == 9


# ---------------------------------------------------------------------- exact


@pytest.mark.parametrize(("method", "rounds"), [*((one, 1) for one in METHODS), ("medusa", 8)])
@pytest.mark.slow
def test_the_feature_laws_hold_for_a_head_in_auto(
    method: str, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """F1 and F2, where the head drafts in half of the rounds and nothing in the others."""
    monkeypatch.setattr(auto, "HEAD_ROUNDS", rounds)
    head = find_technique(method)

    def make(request: Request) -> Any:
        choose = lambda ways, rng: ways - 1 if rng.accept(0.5) else 0  # noqa: E731
        decoder = CARD.make(replace(request, head=method, choose=choose), remember=False)
        decoder.drafter.texts.should_skip_round = lambda most: True
        return decoder

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), head, seed)

    assert feature_laws.draft_is_function_of_text(make, network).branches > 100
    forward = partial(feature_laws.trained_forward, head)
    assert feature_laws.draft_is_training_forward(make, forward, network).branches > 100


def headed_cases() -> list[Any]:
    """Return the law's cases for auto with random Medusa heads, under every policy."""
    medusa = find_technique("medusa")

    def build(request: Request, **knobs: Any) -> Any:
        return auto.auto(replace(request, head="medusa"), **knobs)

    card = replace(
        CARD, hidden=True, trained=medusa.trained, head_of="medusa", build=build,
        optional_draft=False,
    )  # fmt: skip
    slow = ("top_k 2", "stop sequences", "gamma 2", "remember False")
    return [
        case
        for case in suites.technique_cases(card)
        if case.law not in (feature_laws.DRAFT_OF_TEXT, feature_laws.DRAFT_OF_TRAINING)
        and case.title not in slow
        and "verifier" not in case.title
    ]


@pytest.mark.parametrize("case", headed_cases(), ids=lambda case: f"{case.law}: {case.title}")
@pytest.mark.slow
def test_the_laws_hold_under_every_policy_with_a_head(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(auto, "HEAD_NODES", 2)  # of the policies, so that all can be walked
    monkeypatch.setattr(auto, "HEAD_ROUNDS", 1)
    assert case.run().cases >= 1


# ---------------------------------------------------------------------- states on demand


class LayersAsked:
    """A target that notes which layers' states each of its passes was asked for."""

    def __init__(self, session: Any):
        self.session, self.asked = session, list[tuple[int, ...]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)

    def score(self, tree: Any, hidden_layers: Sequence[int] = ()) -> Any:
        self.asked.append(tuple(hidden_layers))
        return self.session.score(tree, hidden_layers)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Any:
        self.asked.append(tuple(hidden_layers))
        return self.session.extend(tokens, hidden_layers)


def begin(model: Model, choose: Any, head: str = "medusa", tokens: int = 40) -> tuple[Any, Any]:
    log = list[ForwardRecord]()
    target: Any = LayersAsked(model.session(log))
    stop = StoppingCriteria(max_new_tokens=tokens)
    request = Request(target, (), GREEDY, stop, forward_log=log, choose=choose, head=head)
    decoder = CARD.make(request, remember=False)
    decoder.extend((0, 1, 2))
    return decoder, target


def headed_network(method: str = "medusa") -> Model:
    return add_random_head(small_network(1), find_technique(method), 1)


def test_a_head_that_rests_asks_for_nothing() -> None:
    decoder, target = begin(headed_network(), lambda ways, rng: 0)
    for number in range(20):
        decoder.step(Seeded(number))
    asked = [bool(layers) for layers in target.asked]
    assert asked == [True] * (1 + auto.HEAD_ROUNDS) + [False] * (20 - auto.HEAD_ROUNDS)


def test_what_a_head_missed_is_run_in_one_pass() -> None:
    turn = iter([0] * 15 + [1] * 3 + [0] * 99)
    at_end = lambda ways, rng: ways - 1 if next(turn) else 0  # noqa: E731
    decoder, target = begin(headed_network(), at_end)
    rounds = [decoder.step(Seeded(number)) for number in range(18)]
    again = [len(round.draft_calls) for round in rounds]
    assert again == [0] * 15 + [1, 0, 0]
    missed = sum(len(round.tokens) for round in rounds[auto.HEAD_ROUNDS : 15])
    assert rounds[15].draft_calls[0].rows == missed
    assert [bool(layers) for layers in target.asked[-3:]] == [True] * 3


def test_without_a_head_nothing_is_asked_for_and_nothing_changes() -> None:
    plain, headed = small_network(1), headed_network()
    texts = []
    for model in (plain, headed):  # a head that the target has, but that was not given
        decoder, target = begin(model, None, head="")
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        assert not any(target.asked) and decoder.drafter.head is None
        texts.append(([*decoder.context], decoder.forward_log))
    assert texts[0] == texts[1]


# ---------------------------------------------------------------------- whether it pays


class TimedSession(LayersAsked):
    """A target on a clock: a pass takes 1, and a tenth more for each further row."""

    def __init__(self, session: Any, watch: Watch):
        super().__init__(session)
        self.watch = watch

    def score(self, tree: Any, hidden_layers: Sequence[int] = ()) -> Any:
        self.watch.now += 1 + 0.1 * len(tree.tokens)
        return super().score(tree, hidden_layers)


def time_head(model: Model, seconds: float, tokens: int) -> tuple[float, Any]:
    """Return how long a text took with a block layer whose draft takes so long, and its decoder."""
    watch = Watch()
    target: Any = TimedSession(model.session(), watch)
    stop = StoppingCriteria(max_new_tokens=tokens)
    request = Request(target, (), GREEDY, stop, clock=watch, head="blockwise")
    decoder: Any = CARD.make(request, remember=False)
    decoder.drafter.texts.should_skip_round = lambda most: True
    drafter = decoder.drafter.head.drafter
    propose = drafter.propose

    def take_time(*how: Any) -> Any:
        watch.now += seconds
        return propose(*how)

    drafter.propose = take_time
    decoder.extend((0, 1))
    while not decoder.finished:
        decoder.step(Seeded(decoder.rounds))
    return watch.now, decoder


def test_a_head_that_is_right_is_used_from_the_beginning() -> None:
    seconds, decoder = time_head(blockwise_traps.planted_target(1), 0.1, 20)
    assert decoder.new == blockwise_traps.write_greedy_text(decoder.target.model, 22)[2:]
    assert seconds < 0.65 * 20  # two of three tokens are guessed, and two rounds are plain
    assert decoder.drafter.option.source == HEAD


def test_a_head_that_is_wrong_or_dear_is_left_alone() -> None:
    wrong = add_random_head(small_network(3, 8), find_technique("blockwise"), 3)
    for model, price in ((wrong, 0.1), (blockwise_traps.planted_target(1), 3.0)):
        seconds, decoder = time_head(model, price, 44)
        assert decoder.drafter.option == PLAIN and not decoder.drafter.hidden_layers
        assert seconds < 1.12 * 44


def test_what_was_missed_is_in_the_price_of_a_head() -> None:
    curve = LearntCosts(8)
    for size in (*[0] * 4, 1, 2, 4, 8):
        curve.record_round(size, 1.0 + 0.1 * size)
    assert curve.pass_seconds(0) == 0
    assert curve.pass_seconds(3) == pytest.approx(1.2)
    assert curve.pass_seconds(18) == pytest.approx(2 * 1.8)  # twice the widest that was measured
    policy = Goodput(curve, Watch())
    for missed, best in ((0, Choice(HEAD, 1)), (18, PLAIN)):  # 1.3 tokens in 1.2, then 1.2 + 3.6/16
        assert policy.choose([Candidate(HEAD, [0.3], missed)]) == best


def test_a_trial_of_a_head_pays_at_once_for_what_was_missed() -> None:
    curve = LearntCosts(8)
    for size in (*[0] * 4, 1, 2, 4, 8):
        curve.record_round(size, 1.0 + 0.1 * size)
    for missed, best in ((0, Choice(HEAD, 1)), (18, PLAIN)):  # a loss of 0.23, and of 3.83
        curve.rounds, curve.credit = 64, 1.0
        assert Goodput(curve, Watch()).choose([Candidate(HEAD, [0.0], missed)]) == best


@pytest.mark.parametrize("truncated", [0, 1])
def test_a_round_that_a_stop_cut_says_nothing_of_a_head(truncated: int) -> None:
    """Its verdict lacks nodes that the target may have accepted."""
    no_scores: Any = None
    tree = TokenTree.point_masses([3, 4], [ROOT, 0])
    round = Round(tree, no_scores, Verdict((), 5), (5,), (), truncated=truncated)
    policy = Goodput(LearntCosts(8), Watch())
    before = list(policy.curve.head.chances)
    policy.learn(Choice(HEAD, 2), round)
    assert (policy.curve.head.chances == before) == bool(truncated)


def test_the_time_of_a_draft_is_without_that_of_what_was_missed() -> None:
    class SlowExtend(TimedSession):
        def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Any:
            self.watch.now += 5.0
            return super().extend(tokens, hidden_layers)

    watch, turn = Watch(), iter([0] * 15 + [1])
    target: Any = SlowExtend(headed_network().session(), watch)
    at_end = lambda ways, rng: ways - 1 if next(turn) else 0  # noqa: E731
    stop = StoppingCriteria(max_new_tokens=40)
    request = Request(target, (), GREEDY, stop, clock=watch, choose=at_end, head="medusa")
    decoder: Any = CARD.make(request, remember=False)
    decoder.extend((0, 1, 2))
    for number in range(16):
        decoder.step(Seeded(number))
    assert decoder.drafter.option.source == HEAD and watch.now > 20  # two calls of extend
    assert decoder.drafter.policy.curve.head.seconds == 0


def test_the_chance_of_a_node_follows_what_was_accepted() -> None:
    """An average by hand; the tree has two nodes and never a third."""
    figures, by_hand = HeadFigures(3), [0.5, 0.375, 0.28125]
    assert figures.chances == pytest.approx(by_hand)
    decoder, _ = begin(headed_network("blockwise"), lambda ways, rng: ways - 1, "blockwise")
    outcomes = list[int]()
    while not decoder.finished:
        round = decoder.step(Seeded(decoder.rounds))
        outcomes.append(len(round.verdict.accepted))
        figures.learn(round, 3)
        for node in range(3):
            by_hand[node] += 0.2 * ((node < outcomes[-1]) - by_hand[node])
    assert figures.chances == pytest.approx(by_hand)
    assert len(set(outcomes)) > 1 and figures.chances[2] < 0.01


# ---------------------------------------------------------------------- for a user


@pytest.fixture
def big(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    return tiny_zoo(tmp_path).other  # its card names no draft model


def save_random_head(big: str, method: str, out: Path) -> str:
    target = tinyspec.load(big)
    headed = add_random_head(target, find_technique(method), 0)
    check = embedding_checksum(target.weights["embed"])
    settings = head_settings(headed, method)
    own = {"model_type": method}
    weights = {name: w.float() for name, w in head_weights(headed, method).items()}
    write_head(out, HeadFile(method, "big", check, settings, own, weights))
    return str(out)


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_the_command_drafts_by_a_head_and_writes_plain_decodings_text(
    method: str, big: str, tmp_path: Path
) -> None:
    head = save_random_head(big, method, tmp_path / "head")
    for more in ([], ["--temperature", "0.9", "--seed", "4"]):
        told = ["generate", "--model", big, "the cat sat", "-n", "40", *more]
        used = run(*told, "--method", "auto", "--head", head, "--stats")
        assert used.exit_code == 0, used.output
        assert used.stdout == run(*told).stdout


def test_a_batch_with_a_head_gives_each_row_its_own_text(big: str, tmp_path: Path) -> None:
    head = save_random_head(big, "medusa", tmp_path / "head")
    model, prompts = tinyspec.load(big), ["the cat", "the dog sat"]
    together: Any = tinyspec.generate(model, prompts, method="auto", head=head, max_new_tokens=20)
    for prompt, row in zip(prompts, together, strict=True):
        assert row.tokens == tinyspec.generate(model, prompt, max_new_tokens=20).tokens  # type: ignore


def test_a_head_goes_to_its_own_method_and_to_auto(big: str, tmp_path: Path) -> None:
    heads = [save_random_head(big, name, tmp_path / name) for name in ("medusa", "eagle")]
    knobs: list[dict[str, Any]] = [{}, {}, {}, {}]
    assign_heads(heads, ["medusa", "llma", "auto", "eagle2"], knobs)
    assert knobs == [{"head": heads[0]}, {}, {"head": heads[0]}, {"head": heads[1]}]


def test_heads_that_auto_cannot_use_are_named_in_one_line(big: str, tmp_path: Path) -> None:
    big = tiny_zoo(tmp_path / "deeper").big  # kangaroo leaves after one of its two layers
    model = tinyspec.load(big)
    for method in ("kangaroo", "bita"):
        head = save_random_head(big, method, tmp_path / method)
        with pytest.raises(TinyspecError) as error:
            tinyspec.generate(model, "the cat", method="auto", head=head)
        assert f"use --method {method} for a head of {method}" in str(error.value)
        assert "\n" not in str(error.value)
    for wrong, says in ((7, "head is 7"), (str(tmp_path / "nowhere"), "no such head")):
        with pytest.raises(TinyspecError, match=says):
            tinyspec.generate(model, "the cat", method="auto", head=wrong)
    said = failed(run("generate", "--model", big, "--method", "llma", "--head", head, "a"))
    assert "a head for bita, not for llma" in said


def test_the_benchmark_gives_an_arm_its_head(big: str, tmp_path: Path) -> None:
    arm, out = f"medusa:head={save_random_head(big, 'medusa', tmp_path / 'own')}", tmp_path / "r"
    told = ("bench", "--model", big, "--tasks", "edits:1", "--tokens", "8", "--rounds", "1")
    told += ("--quiet", "--no-curve", "--no-memory", "--out", str(out))
    ran = run(*told, "--methods", arm, "--markdown", str(tmp_path / "page.md"))
    assert ran.exit_code == 0, ran.output
    assert json.loads(out.read_text())["figures"]["overall"][arm]["nodes_per_token"] > 0
    assert "llma uses no trained head" in failed(run(*told, "--methods", "llma:head=any"))


def test_the_card_says_that_a_head_may_be_given() -> None:
    assert CARD.optional_head and CARD.as_dict()["optional_head"]
    assert "--head FOLDER" in run("methods", "auto").stdout


def test_states_of_another_dtype_do_not_matter(big: str, tmp_path: Path) -> None:
    head = save_random_head(big, "medusa", tmp_path / "head")
    for dtype in (torch.float32, torch.bfloat16):
        model = tinyspec.load(big, dtype=dtype)
        plain: Any = tinyspec.generate(model, "the cat sat", max_new_tokens=30)
        used: Any = tinyspec.generate(
            model, "the cat sat", method="auto", head=head, max_new_tokens=30
        )
        assert used.tokens == plain.tokens
