"""Blockwise decoding (Stern et al. 2018): the residual, one pass a step, and three relaxations."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Exhaustive, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.laws import feature_laws
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence, expect_equal
from tinyspec.laws.exact.models import NETWORK_TOLERANCE, add_random_head, small_network
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.rewriting_laws import dense_logits, random_translator
from tinyspec.laws.traps import Build, Trap, begin_decoder, card, run_all_rounds
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.lm.config import Config, Seq2SeqConfig
from tinyspec.lm.heads import RANKED, RANKS, add_head, freeze_target
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.speculative.drafting import blockwise
from tinyspec.speculative.drafting.blockwise import (
    BlockLayer,
    BlockwiseDrafter,
    BlockwiseSettings,
    initialize_block,
    predict_by_block,
    relaxed_verifier,
)
from tinyspec.technique import find_technique

PLANTED = medusa_traps.PLANTED
PLACED = feature_laws.DRAFT_OF_TRAINING
RESIDUAL = "an untrained predictor says what the target's own head says"
COUNTED = "m tokens take m / k + 1 passes if every guess is right"
RELAXED = "a rule accepts what it allows, and else as the exact rule does"
TRANSLATED = "a translation's drafts and passes are those of a dense pass over it"
TAUGHT = "of a batch of translations one predictor is trained, each as often"
RULES = "top", "distance", "block"
DRAWS = 4  # random predictors of a step: both of two are among them
TRANSLATOR = Seq2SeqConfig(9, 8, 2, 8, 1, 1, 24, block=2)
SOURCES = ((4, 7, 5), (8,), (6, 6, 5, 4))
PAIR = (4, 7, 5), (6, 8, 4, 4, 5)  # a source and its translation, for the loss
LOSS_DRAWS = 60  # of the loss: each of three predictors is drawn about 20 times
LEAST_DRAWS = 8  # times that each is drawn, of the 20 or 30 that are expected


@collect_evidence(RESIDUAL)
def untrained_layer_repeats_the_head(build: Build) -> Iterator[int]:
    """Check that the layer begins as nothing: every guess is the token that the state predicts."""
    settings = BlockwiseSettings(heads=3)
    for seed in range(6):
        model = small_network(seed)
        weights = initialize_block(freeze_target(model), settings, seed)
        begun = add_head(model, "blockwise", {**weights, RANKS: torch.zeros(3, RANKED)})
        for text in ((0, 1), (2, 0, 3), (1, 1, 2, 0)):
            decoder = begin_decoder(build, [begun], text)
            tree = decoder.drafter.propose(decoder.context, 3, decoder.sampling, Seeded(0))
            own = int(model.logits(text[:-1])[-1].argmax())
            expect_equal(RESIDUAL, (own,) * 3, tuple(tree.tokens), text=text)
            yield 1


def write_greedy_text(model: Model, n: int) -> list[int]:
    """Return a text of n tokens that the model goes on with, the likeliest token each time."""
    text = [0, 1]
    while len(text) < n:
        text.append(int(model.logits(text)[-1].argmax()))
    return text


def planted_target(seed: int) -> Model:
    """Return a network whose block layer is fitted to the text that it writes after 0, 1."""
    config = Config(
        vocab_size=6, d_model=32, n_layers=3, n_heads=2, n_kv_heads=1, head_dim=16, d_ff=48,
        max_positions=64,
    )  # fmt: skip
    model = Model.random(config, seed, torch.float64, scale=0.5)
    text = write_greedy_text(model, 26)
    return feature_laws.fit_head(find_technique("blockwise"), model, text, draws=DRAWS)


@collect_evidence(COUNTED)
def right_guesses_save_passes(build: Build) -> Iterator[int]:
    """Check the paper's count where every guess is right, without the prompt's own pass."""
    for seed in (1, 2):
        model = planted_target(seed)
        for k in (3, 2, 1):
            decoder = begin_decoder(build, [model], (0, 1), max_new_tokens=18, k=k)
            rounds = run_all_rounds(decoder)
            expect_equal(COUNTED, write_greedy_text(model, 20)[2:], decoder.new, network=seed)
            passes = sum(len(round.calls) for round in rounds)
            if passes > 18 // k + 1:
                accuse(COUNTED, f"at most {18 // k + 1}", passes, network=seed, k=k)
            yield len(rounds)


def output_round(begin: Callable[[], Decoder], rng: Exhaustive) -> tuple[int, ...]:
    """Return what a new decoder outputs in its first round."""
    return begin().step(rng).tokens


def distribution_of_a_relaxed_round(
    model: Model, sampling: SamplingParams, text: Sequence[int], draft: Sequence[int], rule: str,
    slack: int,
) -> dict[tuple[int, ...], float]:  # fmt: skip
    """Return the probability of each output of a round after a text, by the rule's definition."""
    joint, reached = defaultdict[tuple[int, ...], float](float), 1.0
    for place, x in enumerate(draft):
        before = tuple(draft[:place])
        logits = model.logits([*text, *before])[-1].numpy()
        p, ranked = sampling.probs(logits), sorted(range(len(logits)), key=lambda x: -logits[x])
        allowed = {
            "top": x in ranked[: slack + 1],
            "distance": abs(x - ranked[0]) <= slack,
            "block": place < slack,
        }[rule]
        accept = 1.0 if allowed else p[x]
        for y in range(len(p)):
            if y != x and accept < 1:
                joint[(*before, y)] += reached * (1 - accept) * p[y] / (1 - p[x])
        reached *= accept
    for y, probability in enumerate(sampling.probs(model.logits([*text, *draft])[-1].numpy())):
        joint[(*draft, y)] += reached * probability
    return joint


@collect_evidence(RELAXED)
def rules_accept_what_they_allow(build: Build) -> Iterator[int]:
    """Check the distribution of a round's output under each rule, greedy and sampled."""
    blockwise = find_technique("blockwise")
    for number, (rule, slack) in enumerate(product(RULES, (1, 2))):
        for sampling in (SamplingParams(0.0), SamplingParams(), SamplingParams(0.7, top_k=3)):
            for text in ((0, 1), (2, 0, 3)):
                model = add_random_head(small_network(number, 6), blockwise, number)
                knobs: dict[str, Any] = {"rule": rule, "slack": slack, "k": 3}
                begin = partial(begin_decoder, build, [model], text, sampling, **knobs)
                draft = begin().drafter.propose(list(text), 2, sampling, Seeded(0)).tokens
                expected = distribution_of_a_relaxed_round(
                    model, sampling, text, draft, rule, slack
                )
                got = defaultdict[tuple[int, ...], float](float)
                for tokens, probability in Exhaustive.walk(partial(output_round, begin)):
                    got[tokens] += float(probability)
                for tokens in expected.keys() | got.keys():
                    if abs(expected[tokens] - got[tokens]) > NETWORK_TOLERANCE:
                        case = {**knobs, "text": text, "draft": tuple(draft), "output": tokens}
                        accuse(RELAXED, expected[tokens], got[tokens], **case)
                yield len(got)


# ------------------------------------------------------------------ on an encoder-decoder


def random_block_translator(seed: int) -> Seq2Seq:
    """Return a random translator with a random block layer for two guesses.

    The layer says what the model's own head says, or nearly so, or (every third seed) anything.
    """
    model = random_translator(TRANSLATOR, seed, 6, "translator", embed=1)
    generator, scale = torch.Generator().manual_seed(seed), (0.1, 0.3, 2.0)[seed % 3]
    weights = dict(model.weights)
    for name in ("out.weight", "out.bias", "hidden.bias"):
        old = weights[f"block.{name}"]
        drawn = torch.randn(old.shape, generator=generator, dtype=torch.float64).to(old.dtype)
        weights[f"block.{name}"] = scale * drawn
    return Seq2Seq(TRANSLATOR, weights, name=model.name)


def translate_by_dense_passes(model: Seq2Seq, source: Sequence[int], tokens: int) -> list[int]:
    """Return the first tokens of the greedy translation, by a dense pass for each."""
    text = [model.config.bos]
    while len(text) <= tokens and text[-1] != model.config.eos:
        text.append(int(dense_logits(model, source, text)[-1].argmax()))
    return text[1:]


def predictor_rows(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> list[Tensor]:
    """Return the logits [n, V] of p_1, p_2 and p_3 after each token of a text, by the formula."""
    read = torch.tensor([list(text[1:])], dtype=torch.long)
    h = model.causal_states(torch.tensor([list(source)]), read)[0].detach()
    w = model.weights
    hidden = (h @ w["block.hidden.weight"].T + w["block.hidden.bias"]).clamp(min=0)
    parts = (hidden @ w["block.out.weight"].T + w["block.out.bias"]).view(len(h), 2, -1)
    states = [h, h + parts[:, 0], h + parts[:, 1]]
    return [(z @ w["embed"].T).detach() for z in states]


def guess_tokens(model: Seq2Seq, source: Sequence[int], text: Sequence[int]) -> list[int]:
    """Return the draft after a text that begins with bos: up to the end, if that is guessed."""
    if len(text) < 2:
        return []
    rows = predictor_rows(model, source, text[:-1])[1:]
    first, second = (int(of_predictor[-1].argmax()) for of_predictor in rows)
    return [first] if first == model.config.eos else [first, second]


@collect_evidence(TRANSLATED)
def translations_are_drafted_by_blocks(build: Build) -> Iterator[int]:
    """Check text, drafts and passes of greedy translations against dense passes."""
    ends = frozenset({TRANSLATOR.eos})
    for seed, source in product(range(18), SOURCES):
        model = random_block_translator(seed)
        given = model.condition_on(source)
        decoder = begin_decoder(build, [given], [TRANSLATOR.bos], max_new_tokens=12, eos=ends)
        drafts, rounds = list[list[int]](), list[Any]()
        while not decoder.finished:
            room = decoder.max_draft_depth
            drafts.append(guess_tokens(model, source, decoder.context)[:room])
            rounds.append(decoder.step(Seeded(0)))
        case = {"model": seed, "source": source}
        expected = translate_by_dense_passes(model, source, 12)
        expect_equal(TRANSLATED, expected, decoder.new, **case)
        expect_equal(TRANSLATED, drafts, [list(round.tree.tokens) for round in rounds], **case)
        yield len(rounds)
        if TRANSLATOR.pad in expected:
            continue  # no translation holds it
        is_whole = expected[-1] == TRANSLATOR.eos
        written = torch.tensor([expected[: -1 if is_whole else None]], dtype=torch.long)
        (blocks,) = blockwise.count_tokens_per_pass(model, torch.tensor([list(source)]), written)
        passes = [len(round.tokens) for round in rounds]
        if not is_whole:  # the last blocks were cut by the limit
            n = max(i for i in range(len(passes) + 1) if sum(passes[:i]) <= len(expected) - 3)
            passes, blocks = passes[:n], blocks[:n]
        expect_equal(TRANSLATED, passes, blocks, **case)


@collect_evidence(TAUGHT)
def predictors_are_trained_on_translations(loss: Any) -> Iterator[int]:
    """Check the loss of a translation against the formulas, and how often each one is drawn."""
    source, target = PAIR
    batch = torch.tensor([list(source)]), torch.tensor([list(target)])
    for seed, frozen in product(range(2), (False, True)):
        model = random_block_translator(seed)
        for weight in model.weights.values():
            weight.requires_grad_()
        rows, labels = predictor_rows(model, source, [1, *target]), [*target, TRANSLATOR.eos]
        expected = [
            float(-of_predictor.log_softmax(-1)[range(6 - i), labels[i:]].mean())
            for i, of_predictor in enumerate(rows)
        ]
        drawn, case = Counter[int](), {"model": seed, "frozen": frozen}
        for number in range(LOSS_DRAWS):
            got = float(loss(model, batch, torch.Generator().manual_seed(number), frozen).detach())
            near = [i for i, x in enumerate(expected) if math.isclose(got, x, rel_tol=1e-5)]
            if not near:
                accuse(TAUGHT, expected, got, **case)
            drawn[near[0]] += 1
        if (drawn[0] and frozen) or any(drawn[i] < LEAST_DRAWS for i in range(int(frozen), 3)):
            accuse(TAUGHT, f"each at least {LEAST_DRAWS} times", dict(drawn), **case)
        yield LOSS_DRAWS


def fitted_layer_drafts_the_text(build: Build) -> Evidence:
    """Check that a layer that its loss has fitted to a text drafts it, after every part of it."""
    return medusa_traps.fitted_heads_draft_the_text(build, "blockwise", draws=DRAWS)


def check_blockwise_drafts(build: Build) -> Evidence:
    """Check law F2 on random heads."""
    return feature_laws.check_random_heads(find_technique("blockwise"), build)


TRAPS = [
    Trap(PLANTED, fitted_layer_drafts_the_text, card("blockwise")),
    Trap(PLACED, check_blockwise_drafts, card("blockwise")),
    Trap(RESIDUAL, untrained_layer_repeats_the_head, card("blockwise")),
    Trap(COUNTED, right_guesses_save_passes, card("blockwise")),
    Trap(RELAXED, rules_accept_what_they_allow, card("blockwise")),
    Trap(TRANSLATED, translations_are_drafted_by_blocks, card("blockwise")),
    Trap(TAUGHT, predictors_are_trained_on_translations, lambda: blockwise.translation_loss),
]

_blockwise = partial(Toy, technique="blockwise")

TOYS = [
    _blockwise(
        "one predictor at every depth",
        "slice(depth * h.shape[-1], (depth + 1) * h.shape[-1])",
        "slice(h.shape[-1])",
        predict_by_block,
        law=PLANTED,
    ),
    _blockwise(
        "a layer that reads one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        BlockwiseDrafter.propose,
        law=PLACED,
    ),
    _blockwise(
        "a layer without the residual",
        "self.rows(h + parts[:n])",
        "self.rows(parts[:n])",
        BlockLayer.logits,
        law=RESIDUAL,
    ),
    _blockwise(
        "a pass to predict and another to verify",
        "if not self.states or n <= 0:",
        "if setattr(self, 'odd', not getattr(self, 'odd', False)) or self.odd or n <= 0:",
        BlockwiseDrafter.propose,
        law=COUNTED,
    ),
    _blockwise(
        "a rejected guess that may be drawn again",
        "rng.draw(exclude_token(p[at], token))",
        "rng.draw(p[at])",
        relaxed_verifier,
        law=RELAXED,
    ),
    _blockwise(
        "right guesses that are counted after a wrong one",
        "row.long().cumprod(dim=-1).sum(dim=-1)",
        "row.long().sum(dim=-1)",
        blockwise.count_tokens_per_pass,
        law=TRANSLATED,
    ),
    _blockwise(
        "a predictor that is trained on the token before its own",
        "(0, i), value=config.pad)[:, i:]",
        "(0, i), value=config.pad)[:, max(i - 1, 0) :][:, : target.shape[1] + 1]",
        blockwise.translation_labels,
        law=TAUGHT,
    ),
    _blockwise(
        "a frozen model's own predictor among those that are drawn",
        "int(frozen)",
        "0",
        blockwise.translation_loss,
        law=TAUGHT,
    ),
]
