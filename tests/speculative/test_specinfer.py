"""SpecInfer: merged trees of several models, and multi-step speculative sampling.

Boosted drafts, which complement each other, are tested too.
"""

import json
import lzma
import signal
from fractions import Fraction as F
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lm.small import LLAMA, model
from tests.speculative.printed import compare_on_siblings
from tests.table import Table, exact_distribution
from tests.zoo import TEXT, failed, run, tiny_zoo
from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.rational import Exact, distributions
from tinyspec.laws.theorems import NodeRows
from tinyspec.lm.config import Config
from tinyspec.lm.model import Model
from tinyspec.speculative.treedraft import TreeDrafter, branching_parents
from tinyspec.speculative.verification.specinfer import (
    SpecInferDrafter,
    answers_match,
    append_greedy_answers,
    merge_trees,
    multi_step_sampling,
    verify_tree_multi_step,
)
from tinyspec.technique import Request, find_technique
from tinyspec.training import technique_parts
from tinyspec.training.schedule import TrainSettings
from tinyspec.training.technique_parts import boost_drafts
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("specinfer")


def make_decoder(
    p: int = 1,
    qs: tuple[int, ...] = (2, 3),
    sampling: SamplingParams | None = None,
    stop: StoppingCriteria | None = None,
    **knobs: Any,
) -> Decoder:
    drafts = [Table(q, zeros=False) for q in qs]
    return CARD.make(
        Request(Table(p), drafts, sampling or SamplingParams(), stop or StoppingCriteria()), **knobs
    )


def one_token(p: Exact, qs: tuple[Exact, ...]) -> tuple[dict[int, F], F, F]:
    """Return, for one proposal of each model: the distribution of the token, how often a proposal
    is accepted, and how often y ~ p is among them.
    """
    emitted, passed, found = dict[int, F](), F(0), F(0)

    def play(rng: Exhaustive) -> tuple[bool, int, bool]:
        tokens = [rng.draw(list(q)) for q in qs]
        n = len(tokens)
        tree = TokenTree(tokens, (ROOT,) * n, [list(q) for q in qs], (False,) * n)
        verdict = verify_tree_multi_step(tree, NodeRows(dict.fromkeys(range(ROOT, n), p)), rng)  # type: ignore[arg-type]
        token = tokens[verdict.accepted[0]] if verdict.accepted else verdict.next
        assert token is not None
        return bool(verdict.accepted), token, rng.draw(list(p)) in tokens

    for (accepted, token, among), mass in Exhaustive.walk(play):
        emitted[token] = emitted.get(token, F(0)) + mass
        passed += mass * accepted
        found += mass * among
    return emitted, passed, found


def of_two_models(q: Exact, k: int, rng: Any) -> tuple[list[int], list[Exact]]:
    """k proposals, of two models in turn."""
    dists = [q, q[::-1], q][:k]
    return [rng.draw(row) for row in dists], dists


@pytest.mark.slow
def test_printed_algorithm_is_what_runs() -> None:
    """`multi_step_sampling` has the outcomes of `verify_tree_multi_step` below one node."""
    assert compare_on_siblings(multi_step_sampling, verify_tree_multi_step, of_two_models) > 1000


THIRDS = [*distributions(3, 1), *distributions(3, 2), *distributions(3, 3)]


def test_trap_colliding_proposals_of_different_models_are_tested_one_by_one() -> None:
    """Theorem 4.2: the token has the distribution p. Theorem 4.3: a proposal is accepted no less
    often than y ~ p is among them.
    """
    strict = 0
    for p, q, other in product(THIRDS[1::3], THIRDS[::2], THIRDS[3::3]):
        emitted, passed, found = one_token(p, (q, other))
        assert emitted == {token: x for token, x in enumerate(p) if x}
        assert passed >= found
        strict += passed > found
    assert strict > 0


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.5)], ids=str)
def test_the_joint_distribution_under_two_models_and_one(sampling: SamplingParams) -> None:
    plain = exact_distribution(
        lambda: Decoder(Table(1), BaseDrafter(), verify_tree, sampling=sampling), 2
    )
    for qs, expansion in (((2, 3), "1"), ((2,), "1x2")):
        assert (
            exact_distribution(
                lambda qs=qs, expansion=expansion: make_decoder(
                    1, qs, sampling, expansion=expansion
                ),
                2,
            )
            == plain
        )  # type: ignore[misc]


def test_merged_trees_are_the_trees_below_one_root_and_equal_nodes_stay_two() -> None:
    tree = merge_trees(
        [TokenTree((5, 6, 7), (ROOT, ROOT, 1), (None,) * 3, (False,) * 3), TokenTree.chain([6, 7])]
    )
    assert (tree.tokens, tree.parents) == ((5, 6, 7, 6, 7), (ROOT, ROOT, 1, ROOT, 3))


def test_the_target_runs_fewer_positions_than_the_chains_have_tokens() -> None:
    forward_log: list[Any] = []
    target, drafts = model(seed=1), [model(seed=2).session() for _ in range(2)]
    session = target.session(forward_log)
    drafter = SpecInferDrafter(
        [TreeDrafter(draft, branching_parents((2, 2, 1))) for draft in drafts]
    )
    decoder = Decoder(
        session,
        drafter,
        verify_tree_multi_step,
        forward_log=forward_log,
        sampling=SamplingParams(temperature=0.0),
    )
    decoder.extend([3, 1, 4])
    round = decoder.step(Seeded(0))
    (call,) = round.calls
    assert (
        len(round.tree.tokens) == 20 and call.rows == 11
    )  # both drafts are one model: each path is there twice


def test_accepted_token_opens_the_children_of_every_model_that_proposed_it() -> None:
    sure = [F(0), F(1), F(0)]
    tree = merge_trees(
        [
            TokenTree.chain([1, 0], [sure, [F(1), F(0), F(0)]]),
            TokenTree.chain([1, 2], [sure, [F(0), F(0), F(1)]]),
        ]
    )
    p = NodeRows(
        {ROOT: tuple(sure), 0: (F(0), F(0), F(1)), 2: (F(0), F(0), F(1)), 3: (F(1), F(0), F(0))}
    )
    paths = {
        verdict.accepted
        for verdict, _ in Exhaustive.walk(lambda rng: verify_tree_multi_step(tree, p, rng))
    }  # type: ignore[arg-type]
    assert paths == {(0, 3), (2, 3)}


def test_each_model_may_have_a_tree_of_its_own_and_the_last_serves_the_others() -> None:
    d = make_decoder(qs=(2, 3, 4), expansion="2+1x1")
    d.extend((0,))
    tree = d.drafter.propose([0], 9, SamplingParams(), Seeded(0))
    assert tree.parents == (ROOT, ROOT, ROOT, 2, ROOT, 4)


@pytest.mark.parametrize("wanted", [0, 1, 2, 9])
def test_a_text_has_the_length_that_was_asked_for(wanted: int) -> None:
    d = make_decoder(stop=StoppingCriteria(max_new_tokens=wanted), expansion="1x2")
    d.extend((0,))
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert len(d.new) == wanted


@pytest.mark.parametrize("expansion", ["1x1+", "+", "0", "a"])
def test_an_expansion_that_is_none_raises_a_one_line_error(expansion: str) -> None:
    with pytest.raises(TinyspecError, match="children"):
        make_decoder(expansion=expansion)


def test_a_tree_that_no_draft_would_grow_raises_an_error() -> None:
    with pytest.raises(
        TinyspecError, match="2 trees for 1 draft model: give one for each, or more drafts"
    ):
        make_decoder(qs=(2,), expansion="2+1x1")
    assert make_decoder(qs=(2, 3), expansion="2+1x1")


# ---------------------------------------------------------------------- boosting

SMALL = Config(
    vocab_size=13,
    d_model=8,
    n_layers=1,
    n_heads=1,
    n_kv_heads=1,
    head_dim=8,
    d_ff=8,
    max_positions=16,
)
SETTINGS = TrainSettings(steps=40, lr=2e-2, warmup=5, weight_decay=0.0, log_every=40)


def test_what_is_left_of_the_prompts_goes_to_the_next_draft_and_together_they_cover_more(
    tmp_path: Path,
) -> None:
    target = model(LLAMA, seed=3, dtype=torch.float32)
    prompts = torch.randint(13, (40, 3), generator=torch.Generator().manual_seed(1))
    drafts = [Model.random(SMALL, seed=seed) for seed in (1, 2)]
    found = boost_drafts(
        target, drafts, prompts, SETTINGS, tmp_path / "boosted", length=2, batch=16
    )
    alike = [
        boost_drafts(
            target, [draft], prompts, SETTINGS, tmp_path / f"alone {i}", length=2, batch=16
        )
        for i, draft in enumerate(drafts)
    ]
    texts = append_greedy_answers(target, prompts, 2)
    either = (
        torch.stack([answers_match(one.drafts[0], texts, 2) for one in alike])
        .any(dim=0)
        .float()
        .mean()
    )
    assert found.together[0] == found.own[0] == alike[0].own[0]
    assert found.together[1] > found.together[0]
    assert found.together[1] > float(
        either
    )  # more than two seeds of one model, each tuned on everything
    assert torch.equal(
        drafts[0].weights["embed"], Model.random(SMALL, seed=1).weights["embed"]
    )  # what was given stays


def test_an_interrupted_boosting_ends_with_its_training_and_goes_on_as_if_nothing_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No draft is tuned on what a half-trained one left."""
    target = model(LLAMA, seed=3, dtype=torch.float32)
    prompts = torch.randint(13, (40, 3), generator=torch.Generator().manual_seed(1))

    def boost(folder: str) -> list[torch.Tensor]:
        drafts = [Model.random(SMALL, seed=seed) for seed in (1, 2)]
        found = boost_drafts(target, drafts, prompts, SETTINGS, tmp_path / folder, length=2)
        return [draft.weights["embed"] for draft in found.drafts]

    whole, draw, drawn = boost("whole"), torch.randint, []

    def interrupt(*args: Any, **options: Any) -> torch.Tensor:
        drawn.append(args)
        if len(drawn) == 15:
            signal.raise_signal(signal.SIGINT)
        return draw(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(technique_parts.torch, "randint", interrupt)
        with pytest.raises(KeyboardInterrupt):
            boost("cut")
    assert not (tmp_path / "cut" / "1").exists()
    assert all(map(torch.equal, whole, boost("cut")))


def test_the_answers_are_the_targets_greedy_text() -> None:
    target = model(LLAMA, seed=3)
    texts = append_greedy_answers(target, torch.tensor([[3, 1, 4]]), 4)
    d = Decoder(
        target.session(),
        BaseDrafter(),
        verify_tree,
        sampling=SamplingParams(temperature=0.0),
        stop=StoppingCriteria(max_new_tokens=4),
    )
    d.extend([3, 1, 4])
    while not d.finished:
        d.step(Seeded(d.rounds))
    assert texts[0, 3:].tolist() == d.new
    assert answers_match(target, texts, 4).tolist() == [True]


def test_boosting_without_drafts_or_beyond_the_context_raises_an_error(tmp_path: Path) -> None:
    target, small = model(LLAMA), Model.random(SMALL)
    with pytest.raises(TinyspecError, match="one draft model and one prompt"):
        boost_drafts(target, [], torch.zeros(1, 2, dtype=torch.long), SETTINGS, tmp_path)
    with pytest.raises(TinyspecError, match="context of 16"):
        boost_drafts(
            target, [small], torch.zeros(1, 12, dtype=torch.long), SETTINGS, tmp_path, length=5
        )


def test_boosted_drafts_from_the_command_line_draft_together(tmp_path: Path) -> None:
    zoo = tiny_zoo(tmp_path)
    book = json.dumps({"author": "A", "title": "T", "text": TEXT}) + "\n"
    (tmp_path / "data/text").mkdir(parents=True)
    (tmp_path / "data/text/classics.train.jsonl.xz").write_bytes(lzma.compress(book.encode()))
    small = ["--prompts", "8", "--prompt-tokens", "4", "--tokens", "2", "--steps", "3"]
    call = [
        "train",
        "boost",
        "--model",
        zoo.big,
        "--data",
        str(tmp_path / "data"),
        "--out",
        str(tmp_path / "out"),
    ]
    trained = run(*call, *small, "--draft", f"{zoo.small},{zoo.small}")
    assert trained.exit_code == 0, trained.output
    assert trained.output.count("together") == 2
    first = (tmp_path / "out/1/model.safetensors").read_bytes()
    again = run(*call, *small, "--draft", f"{zoo.small},{zoo.small}", "--lr", "0.1")
    assert again.exit_code == 0, again.output  # a training of its own, not the end of the old one
    assert (tmp_path / "out/1/model.safetensors").read_bytes() != first
    drafts = f"{tmp_path / 'out/1'},{tmp_path / 'out/2'}"
    result = run(
        "generate",
        "--model",
        zoo.big,
        "the cat",
        "-n",
        "9",
        "--method",
        "specinfer",
        "--draft",
        drafts,
    )
    assert result.output == run("generate", "--model", zoo.big, "the cat", "-n", "9").output
    assert "another vocabulary" in failed(run(*call, *small, "--draft", zoo.other))
