"""EAGLE: what its layer reads, its tree, its siblings, its loss, and the head's folder."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.lm.small import GPT2
from tests.zoo import Zoo, failed, run, tiny_zoo
from tinyspec.cli.base import assign_heads
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.features import rank_tokens
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.exact.models import add_random_head, small_network
from tinyspec.laws.traps import eagle as traps
from tinyspec.lm.config import Config
from tinyspec.lm.heads import RANKS, HeadSettings, freeze_target, head_weights, read_head
from tinyspec.lm.model import Model
from tinyspec.speculative.drafting import eagle
from tinyspec.technique import Request, TrainingBatch, find_technique
from tinyspec.tree import ROOT, TokenTree

CARD = find_technique("eagle")
assert CARD.trained is not None
TRAINED = CARD.trained
GREEDY, SAMPLED = SamplingParams(0.0), SamplingParams(0.8)


def test_trap_a_fitted_head_drafts_the_whole_text() -> None:
    """Five tokens at every place of a cycle that the newest token alone does not tell."""
    assert traps.fitted_head_drafts_the_text(CARD.make).branches == 2 * 17 * 5


def test_trap_a_draft_token_is_what_the_training_forward_says() -> None:
    assert traps.drafts_follow_training(CARD.make).branches > 600


def test_trap_a_draft_depends_on_the_text_alone() -> None:
    assert traps.drafts_depend_on_the_text_alone(CARD.make).branches > 400


def test_trap_siblings_are_drawn_as_declared() -> None:
    assert traps.siblings_are_drawn_as_declared(CARD).branches > 50


@pytest.mark.slow
def test_a_target_with_learned_positions_has_pair_i_at_position_i() -> None:
    """Laws F1 and F2 on a GPT-2: its positions are added in the target, and rotated in the head."""

    def network(seed: int, vocabulary: int) -> Model:
        config = replace(GPT2, vocab_size=vocabulary)
        target = Model.random(config, seed, torch.float64, scale=0.6)
        return add_random_head(target, CARD, seed)

    make, forward = partial(CARD.make, nodes=4), partial(feature_laws.trained_forward, CARD)
    assert feature_laws.draft_is_function_of_text(make, network).branches > 150
    assert feature_laws.draft_is_training_forward(make, forward, network).branches > 150


# ---------------------------------------------------------------------- the draft


def begin(
    text: list[int], sampling: SamplingParams, model: Model | None = None, **knobs: Any
) -> Decoder:
    model = traps.random_target(2, 8) if model is None else model
    log: list[Any] = []
    request = Request(model.session(log), sampling=sampling, forward_log=log)
    decoder = CARD.make(request, **knobs)
    decoder.extend(text)
    return decoder


def propose(decoder: Decoder, depth: int = 4) -> TokenTree:
    return decoder.drafter.propose(decoder.context, depth, decoder.sampling, Seeded(0))


def test_a_text_of_one_token_has_no_draft() -> None:
    assert propose(begin([1], GREEDY)) == TokenTree()


def test_all_nodes_of_a_depth_run_in_one_pass() -> None:
    """The prompt's pairs but the newest run before the first round, and a round's true pairs with
    the next one. Leaves do not run.
    """
    decoder = begin([1, 2, 3, 4, 5], GREEDY, nodes=12)
    prompt = [call for call in decoder.forward_log if call.model == "eagle"]
    assert [(call.rows, call.head_rows, call.prefill) for call in prompt] == [(3, 0, True)]
    new = 1
    for _ in range(4):
        round = decoder.step(Seeded(decoder.rounds))
        inner = {up for up in round.tree.parents if up != ROOT}
        depths = [len(round.tree.path(node)) for node in sorted(inner)]
        expected = [(new, 1), *((depths.count(d), depths.count(d)) for d in sorted(set(depths)))]
        assert [(call.rows, call.head_rows) for call in round.draft_calls] == expected
        assert {call.model for call in round.draft_calls} == {"eagle"}
        new = len(round.tokens)


def test_the_draft_is_no_deeper_than_allowed() -> None:
    for depth in (1, 2, 3):
        tree = propose(begin([1, 2], GREEDY, nodes=40), depth)
        assert max(tree.depths()) == depth


def test_siblings_above_temperature_0_declare_what_they_were_sampled_from() -> None:
    """The first one the head's distribution, and each further one what the earlier ones left."""
    decoder = begin([1, 2, 3], SAMPLED, nodes=6)
    tree = propose(decoder)
    model = decoder.drafter.model  # type: ignore[attr-defined]
    for parent in {*tree.parents}:
        path = tree.tokens_on(tree.path(parent))
        row = feature_laws.trained_forward(CARD, model, decoder.context, path)
        assert row is not None
        q = SAMPLED.probs(row.numpy())
        for node, up in enumerate(tree.parents):
            if up == parent:
                assert tree.draft_probs[node] == pytest.approx(q / q.sum())
                q = q.copy()
                q[tree.tokens[node]] = 0


@pytest.mark.parametrize("knobs", [{"draw": "top_k"}, {}])
def test_point_masses_are_the_most_likely_tokens(knobs: dict[str, str]) -> None:
    """At temperature 0, and above it with draw=top_k."""
    sampling = SAMPLED if knobs else GREEDY
    tree = propose(begin([1, 2, 3], sampling, nodes=9, **knobs))
    assert list(tree.draft_probs) == [None] * 9
    best = feature_laws.trained_forward(CARD, traps.random_target(2, 8), [1, 2, 3], [])
    assert best is not None
    first = [t for t, up in zip(tree.tokens, tree.parents, strict=True) if up == ROOT]
    assert first == best.argsort(descending=True)[: len(first)].tolist()


def test_a_head_that_was_never_right_drafts_nothing() -> None:
    """All its measured ranks are 0: no node of a tree would be worth its cost."""
    model = traps.random_target(2, 8)
    head_weights(model, "eagle")[RANKS].zero_()
    for sampling in (GREEDY, SAMPLED):
        assert propose(begin([1, 2, 3], sampling, model)).tokens == []


def test_tokens_after_a_penalty_are_ranked_with_the_nodes_own_history() -> None:
    sampling, moved, text = SamplingParams(0.0, repetition_penalty=4.0), 0, [1, 2]
    model = traps.random_target(2, 8)
    tree = propose(begin(text, sampling, model, nodes=30))
    for parent in {*tree.parents}:
        path = list(tree.tokens_on(tree.path(parent)))
        row = feature_laws.trained_forward(CARD, model, text, path)
        assert row is not None
        children = [t for t, up in zip(tree.tokens, tree.parents, strict=True) if up == parent]
        ranked = rank_tokens(sampling, row.numpy(), [*text, *path], len(children))
        assert children == ranked
        moved += ranked != rank_tokens(sampling, row.numpy(), text, len(children))
    assert moved > 0  # the path itself changes the order


def test_nothing_follows_the_end_of_a_text() -> None:
    request = Request(traps.random_target(2, 4).session(), sampling=GREEDY)
    request.stop = replace(request.stop, eos=frozenset(range(4)))
    decoder = CARD.make(request, nodes=12)
    decoder.extend([0, 1])
    assert set(propose(decoder).parents) == {ROOT}


@pytest.mark.slow
def test_a_head_proposes_only_tokens_of_its_vocabulary() -> None:
    """Its rows are not ids: the vocabulary leaves out token 1."""
    card = replace(CARD, trained=TRAINED._replace(small=HeadSettings(draft_vocab=3)))

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card, seed)

    for sampling in (GREEDY, SAMPLED):
        tree = propose(begin([1, 2], sampling, network(5, 4), nodes=16))  # up to 4 siblings
        assert tree.tokens and 1 not in tree.tokens
    forward = partial(feature_laws.trained_forward, card)
    make = partial(CARD.make, nodes=3)
    assert feature_laws.draft_is_training_forward(make, forward, network).branches > 150


# ---------------------------------------------------------------------- training


def make_batch(seed: int = 0, n: int = 8) -> tuple[dict[str, Tensor], Any, TrainingBatch]:
    """Return a head, its target, and a batch of two texts whose first half was not written."""
    model = small_network(seed, 5)
    target = freeze_target(model)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, (2, n), generator=generator)
    is_answer = torch.zeros(2, n, dtype=torch.bool)
    is_answer[:, n // 2 : -1] = True
    states = model.torch_blocks().hidden_states(ids, (3,))
    nothing = torch.empty(0)
    weights = TRAINED.initialize(target, HeadSettings(), 0)
    return weights, target, TrainingBatch(ids, is_answer, states, nothing, nothing)


@torch.no_grad()
def test_the_loss_is_that_of_the_paper() -> None:
    """SmoothL1 of the next state, and a tenth of the cross-entropy of the target's distribution,
    where the target wrote the token after that state.
    """
    weights, target, batch = make_batch()
    guessed = eagle.predict_states(weights, target, batch.ids, batch.states[:, 0], 0)
    of_states, of_tokens = [], []
    for b in range(2):
        for t in range(3, 6):  # the state t + 1 is one of those that the target wrote from
            true, got = batch.states[b, 0, t + 1], guessed[b, t]
            gap = (true - got).abs()
            of_states.append(torch.where(gap < 1, gap**2 / 2, gap - 0.5).mean())
            p, q = ((target.head @ h).softmax(-1) for h in (true, got))
            of_tokens.append(-(p * q.log()).sum())
    expected = sum(of_states) / 6 + 0.1 * sum(of_tokens) / 6
    assert TRAINED.loss(weights, target, batch).item() == pytest.approx(expected.item(), rel=1e-5)  # type: ignore[union-attr]


def test_noise_is_added_to_what_the_layer_reads_in_training_alone(monkeypatch: Any) -> None:
    """Uniform, 0.2 wide for 512 tokens, and wider for shorter texts."""
    weights, target, batch = make_batch(n=64)
    read, real = list[Tensor](), eagle.predict_states

    def watch(weights: Any, target: Any, ids: Any, states: Tensor, depth: int) -> Tensor:
        read.append(states - batch.states[:, 0])
        return real(weights, target, ids, states, depth)

    monkeypatch.setattr(eagle, "predict_states", watch)
    torch.manual_seed(0)
    first = TRAINED.loss(weights, target, batch)
    noise, width = read.pop(), 0.2 * 512 / 64
    assert width * 0.49 < noise.abs().max() < width / 2
    assert noise.std().item() == pytest.approx(width / 12**0.5, rel=0.1)
    assert TRAINED.loss(weights, target, batch) != first
    torch.manual_seed(0)
    assert TRAINED.loss(weights, target, batch) == first
    with torch.no_grad():
        TRAINED.loss(weights, target, batch)
    assert not read[-1].any()


def test_a_head_begins_with_random_matrices_of_its_seed() -> None:
    _, target, _ = make_batch()
    one, same, other = (TRAINED.initialize(target, HeadSettings(), seed) for seed in (0, 0, 1))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
    assert one["fc.weight"].abs().max() <= 16**-0.5
    assert torch.equal(one["layers.0.post_attention_layernorm.weight"], torch.ones(8).double())


def test_the_file_has_the_names_and_shapes_that_vllm_reads() -> None:
    """LlamaForCausalLM of vLLM's llama_eagle.py: one layer without input norm, and fc."""
    shapes = TRAINED.shapes(Config(99, 8, 3, 2, 1, 4, 12, 64), HeadSettings())
    assert shapes == {
        "fc.weight": (8, 16),
        "layers.0.self_attn.q_proj.weight": (8, 8),
        "layers.0.self_attn.k_proj.weight": (4, 8),
        "layers.0.self_attn.v_proj.weight": (4, 8),
        "layers.0.self_attn.o_proj.weight": (8, 8),
        "layers.0.mlp.gate_proj.weight": (12, 8),
        "layers.0.mlp.up_proj.weight": (12, 8),
        "layers.0.mlp.down_proj.weight": (8, 12),
        "layers.0.post_attention_layernorm.weight": (8,),
    }


# ---------------------------------------------------------------------- the command

SMALL = {
    "texts.texts": 8, "texts.tokens": 24, "texts.prompt": 8, "texts.question": 6, "texts.batch": 4,
    "train.steps": 20, "train.lr": 1e-2, "train.warmup": 2, "batch": 4,
    "train.valid_every": 10, "train.log_every": 5,
}  # fmt: skip
SETTINGS = [word for name, value in SMALL.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Zoo:
    monkeypatch.setenv("TINYSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("TINYSPEC_DATA", str(tmp_path / "nowhere"))
    return tiny_zoo(tmp_path)


def train(zoo: Zoo, out: Path, method: str = "eagle") -> Any:
    args = ["--for", zoo.big, "--method", method, "--out", str(out), "--quiet"]
    return run("train", "head", *args, *SETTINGS)


def test_one_trained_head_serves_eagle_and_eagle2(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "head"
    done = train(zoo, out)
    assert done.exit_code == 0, done.output
    head = read_head(out)
    assert (head.method, head.weights[RANKS].shape) == ("eagle", (5, 10))
    plain = run("generate", "--model", zoo.big, "the cat", "-n", "20")
    for method in ("eagle", "eagle2"):
        used = run("generate", "--model", zoo.big, "--method", method, "--head", str(out),
                   "the cat", "-n", "20")  # fmt: skip
        assert used.exit_code == 0, used.output
        assert used.stdout == plain.stdout


def test_eagle2_trains_nothing_of_its_own(zoo: Zoo, tmp_path: Path) -> None:
    said = failed(train(zoo, tmp_path / "head", "eagle2"))
    assert "eagle2 uses the heads of eagle: train one with method eagle" in said


def test_a_missing_head_is_named_as_eagles(zoo: Zoo) -> None:
    said = failed(run("generate", "--model", zoo.big, "--method", "eagle2", "the cat"))
    assert "no head for eagle:" in said and "--method eagle " in said


def test_a_head_is_given_to_every_method_that_uses_it(zoo: Zoo, tmp_path: Path) -> None:
    out = tmp_path / "head"
    assert train(zoo, out).exit_code == 0
    knobs: list[dict[str, Any]] = [{}, {}, {}]
    assign_heads([str(out)], ["eagle2", "llma", "eagle"], knobs)
    assert knobs == [{"head": str(out)}, {}, {"head": str(out)}]


def test_nothing_of_a_request_is_left_after_its_end() -> None:
    decoder = begin([1, 2, 3], GREEDY)
    decoder.step(Seeded(0))
    decoder.end()
    drafter: Any = decoder.drafter
    assert (len(drafter.stack), drafter.following, drafter.states) == (0, [], [])


def test_requests_of_a_model_share_the_heads_matrices() -> None:
    model = traps.random_target(1, 4)
    one, two = (begin([0, 1], GREEDY, model).drafter for _ in range(2))
    assert one.head is two.head  # type: ignore[attr-defined]
    assert one.stack is not two.stack  # type: ignore[attr-defined]
    assert set(head_weights(model, "eagle")) == {
        *TRAINED.shapes(model.config, HeadSettings()), RANKS
    }  # fmt: skip
