"""Depth-adaptive transformer: four predictors, oracles with a price, and what they train."""

import math
from dataclasses import replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tinyspec
from tests.early_exit import decoders
from tests.lm.small import GPT2, LLAMA, PROMPT
from tests.lm.small import model as network
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import UNCHANGED, SamplingParams
from tinyspec.early_exit import depth_adaptive
from tinyspec.early_exit.depth_adaptive import (
    LEAD,
    DepthAdaptiveSettings,
    GreatestProbabilityRule,
    KnownTokens,
    choose_best_exits,
    geometric_log_probs,
    initialize_predictors,
    measure_translator_predictors,
    parse_thresholds,
    predict_exit,
    predictor_loss,
    predictor_shapes,
    read_batch,
    read_translations,
    smooth_scores,
    translator_predictors_batch_loss,
    translator_weights,
)
from tinyspec.early_exit.exits import ExitPoint
from tinyspec.errors import TinyspecError
from tinyspec.laws.exact.models import add_random_head
from tinyspec.laws.traps import Trap
from tinyspec.laws.traps import depth_adaptive as traps
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.heads import add_head, freeze_target, head_weights
from tinyspec.lm.model import Model
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.technique import (
    Guarantee,
    TrainingBatch,
    TranslatorTraining,
    find_technique,
)

CARD = find_technique("depth_adaptive")
make_decoder = partial(decoders.make_decoder, CARD)
PREDICTORS = ("geometric", "multinomial", "sequence", "confidence")
M = add_random_head(network(LLAMA), CARD, 1)
L, D = LLAMA.n_layers, LLAMA.d_model


def count_layers(decoder: Decoder, prompt: list[int]) -> list[int]:
    """Return after how many layers each token of the text was read."""
    decoder.extend(prompt)
    found = list[int]()
    while not decoder.finished:
        found += decoder.step(Seeded(decoder.rounds)).scores.layers
    return found


@pytest.mark.parametrize("trap", traps.TRAPS, ids=lambda trap: trap.law)
def test_trap_the_technique_passes_it(trap: Trap) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the predictors


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("config", [LLAMA, GPT2], ids=["llama", "gpt2"])
def test_printed_algorithm_is_what_runs(config: Any, predictor: str) -> None:
    """Layers and row of every new token, against its states in the masked stream."""
    seen = set[int]()
    for seed in range(4):
        model = add_random_head(network(config, seed), CARD, seed)
        blocks, threshold = model.torch_blocks(), 0.4
        weights = {name: w.numpy() for name, w in head_weights(model, "depth_adaptive").items()}
        top = blocks.hidden_states(torch.tensor([PROMPT[:-1]]), (L,))[0, 0]
        source = top.mean(0).detach().numpy()

        def read(state: Any, blocks: Any = blocks) -> Any:
            return UNCHANGED.probs(blocks.compute_logits(torch.tensor(state)).detach().numpy())

        decoder = make_decoder(model, SamplingParams(), predictor=predictor, threshold=threshold)
        decoder.extend(PROMPT)
        depths = [L] * (len(PROMPT) - 1)
        while not decoder.finished:
            text = torch.tensor([list(decoder.context)])
            stream = blocks.layer_states(text, depths=torch.tensor([[*depths, L]]))
            states = [x[0, -1].detach().numpy() for x in stream]
            expected = predict_exit(predictor, source, states, read, weights, threshold)
            scores = decoder.step(Seeded(seed).split("round", decoder.rounds)).scores
            assert scores.layers[0] == expected
            row = blocks.compute_logits(torch.tensor(states[expected - 1])).detach()
            np.testing.assert_allclose(np.asarray(scores.logits[0]), row, atol=1e-10)
            depths.append(expected)
        seen |= set(depths[len(PROMPT) - 1 :])
    assert len(seen) > 1


def with_predictors(**weights: Any) -> Model:
    """Return the small model with predictors of zeros, but for these."""
    begun = initialize_predictors(freeze_target(network(LLAMA)), DepthAdaptiveSettings(), 0)
    for name, w in weights.items():
        begun[name.replace("_", ".")] = torch.as_tensor(w, dtype=torch.float64)
    return add_head(network(LLAMA), "depth_adaptive", begun)


def test_a_multinomial_exit_asks_the_first_layer_and_its_own() -> None:
    """Each is one pass of one token; a third one runs what is left, or makes keys."""
    for exit in (1, 2, 3):
        bias = [0.0, 0.0, 0.0]
        bias[exit - 1] = 9.0
        decoder = make_decoder(with_predictors(multinomial_bias=bias), predictor="multinomial")
        decoder.extend(PROMPT)
        decoder.step(Seeded(0))
        calls = decoder.step(Seeded(1)).calls
        ran = [call.row_layers for call in calls if call.row_layers]
        assert sum(ran) == exit
        assert ran == [[1], [1, 1], [1, 2]][exit - 1]


def test_a_text_has_one_exit_and_its_source_decides_it() -> None:
    weight = torch.zeros(L, D)
    weight[1, 0], weight[0, 0] = 50.0, -50.0
    model = with_predictors(sequence_weight=weight)
    exits = set[int]()
    for prompt in ([3, 1, 4], [5, 9, 2, 6], [1, 1, 1, 1], [7, 8, 3, 2, 2], [12, 11, 10]):
        found = set(count_layers(make_decoder(model, predictor="sequence"), prompt))
        states = model.torch_blocks().hidden_states(torch.tensor([prompt[:-1]]), (L,))
        expected = 2 if float(states[0, 0, :, 0].mean()) > 0 else 1
        assert found == {expected}
        exits |= found
    assert exits == {1, 2}
    bias = with_predictors(sequence_weight=weight, sequence_bias=[0.0, 0.0, 1.0])
    assert set(count_layers(make_decoder(bias, predictor="sequence"), [3])) == {3}


def test_a_text_has_one_exit_however_its_prompt_was_read() -> None:
    """In one piece, in two, and over the rest of another prompt, which is forgotten."""
    weight = torch.zeros(L, D)
    weight[1, 0], weight[0, 0] = 50.0, -50.0
    model, found = with_predictors(sequence_weight=weight), set[tuple[int, ...]]()
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        prompt = torch.randint(12, (7,), generator=generator).tolist()
        whole, parts, again = (make_decoder(model, predictor="sequence") for _ in range(3))
        whole.extend(prompt)
        parts.extend(prompt[:4])
        parts.extend(prompt[4:])
        again.extend([*prompt[:4], *(12, 11, 12, 10, 12, 12, 11, 12)])
        again.step(Seeded(0))
        again.rewind(4)
        again.extend(prompt[4:])
        exits = {decoder.step(Seeded(0)).scores.layers[0] for decoder in (whole, parts, again)}
        assert len(exits) == 1
        found.add(tuple(exits))
    assert found == {(1,), (2,)}


def test_a_text_that_is_cut_in_its_prompt_chooses_its_exit_again() -> None:
    """The exit is that of the shorter prompt: what was cut off does not count."""
    weight = torch.zeros(L, D)
    weight[1, 0], weight[0, 0] = 50.0, -50.0
    model, exits = with_predictors(sequence_weight=weight), set[int]()
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        prompt = torch.randint(12, (8,), generator=generator).tolist()
        cut, fresh = (make_decoder(model, predictor="sequence") for _ in range(2))
        cut.extend(prompt)
        cut.step(Seeded(0))
        cut.rewind(3)
        fresh.extend(prompt[:3])
        layers = [decoder.step(Seeded(0)).scores.layers[0] for decoder in (cut, fresh)]
        assert layers[0] == layers[1]
        exits.add(layers[1])
    assert exits == {1, 2}


def test_the_greatest_probability_is_found_without_a_loop_over_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(depth_adaptive, "UNCHANGED", SimpleNamespace(probs=decoders.row_of_one_op))
    rule = GreatestProbabilityRule([0.6, 0.4])
    row = [0.25, 0.5, 0.25]
    assert [rule.should_exit(ExitPoint(n, 0, row, ())) for n in (1, 2)] == [False, True]


def test_by_default_a_token_leaves_where_a_stop_is_likelier_than_not() -> None:
    """The geometric predictor, whose threshold is one half."""
    for bias, expected in ((0.01, 1), (-0.01, L)):
        assert set(count_layers(make_decoder(with_predictors(geometric_bias=[bias])), PROMPT)) == {
            expected
        }


def test_thresholds_of_the_confidence_are_those_of_each_exit() -> None:
    decoder = make_decoder(M, predictor="confidence", thresholds="1.0,0.0")
    assert set(count_layers(decoder, PROMPT)) == {2}
    assert parse_thresholds(" 0.5 ", 0.9, 1, "m") == [0.5]
    assert set(count_layers(make_decoder(M, predictor="confidence", threshold=1.0), PROMPT)) == {L}


@pytest.mark.parametrize("predictor", PREDICTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_no_threshold_is_plain_greedy_decoding(predictor: str, dtype: torch.dtype) -> None:
    """Also of a model without predictors."""
    model = network(LLAMA, dtype=dtype)
    plain = tinyspec.generate(model, PROMPT, max_new_tokens=9).tokens
    decoder = make_decoder(model, predictor=predictor, threshold=math.inf)
    assert set(count_layers(decoder, PROMPT)) == {L}
    assert list(decoder.new) == list(plain)


def test_a_rewound_text_is_written_again() -> None:
    for predictor in PREDICTORS:
        straight = make_decoder(M, predictor=predictor, threshold=0.4)
        straight.extend(PROMPT)
        expected = [straight.step(Seeded(0)).tokens[0] for _ in range(6)]
        straight.rewind(len(PROMPT) + 2)
        straight.finished = None
        again = [straight.step(Seeded(0)).tokens[0] for _ in range(4)]
        assert again == expected[2:]


# ---------------------------------------------------------------------- the oracles


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=9))
def test_geometric_exits_sum_to_one(logits: list[float]) -> None:
    q = geometric_log_probs(torch.tensor(logits, dtype=torch.float64)).exp()
    assert q.shape == (len(logits) + 1,) and float(q.sum()) == pytest.approx(1)


def test_without_a_price_the_best_layer_is_chosen_and_with_a_high_one_the_first() -> None:
    scores = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    assert torch.equal(choose_best_exits(scores, 0.0), scores.argmax(-1))
    assert not choose_best_exits(scores, 99.0).any()
    prices = (0.0, 0.1, 0.3, 1.0, 3.0)
    depths = [choose_best_exits(scores, price).float() for price in prices]
    for lower, higher in pairwise(depths):
        assert (higher <= lower).all()


def test_smoothing_ends_at_the_score_itself_and_at_the_mean_of_the_text() -> None:
    scores = torch.randn(2, 5, 3, generator=torch.Generator().manual_seed(0))
    known = torch.tensor([[False, True, True, True, False], [True] * 5])
    scores = scores * known[..., None]
    assert torch.equal(smooth_scores(scores, known, 0.0), scores)
    narrow = smooth_scores(scores, known, 1e-3)
    assert torch.allclose(narrow[known], scores[known], atol=1e-6)
    wide = smooth_scores(scores, known, 1e9)
    for row in range(2):
        mean = scores[row, known[row]].mean(0)
        assert torch.allclose(wide[row], mean.expand(5, 3), atol=1e-6)


def test_a_wide_kernel_makes_every_token_follow_its_text() -> None:
    model, _, batch = traps.training_case(1)
    settings = DepthAdaptiveSettings(penalty=0.1, width=1e9)
    found = read_batch(freeze_target(model)._replace(settings=settings), batch)
    assert torch.equal(found.best, found.best_text[found.text_of])


def test_a_text_without_an_answer_does_not_count() -> None:
    model, weights, batch = traps.training_case(0)
    target = freeze_target(model)._replace(settings=DepthAdaptiveSettings())
    nothing = batch._replace(is_answer=torch.zeros_like(batch.is_answer))
    assert float(predictor_loss(weights, target, nothing)) == 0
    parts = [torch.cat(pair) for pair in zip(batch[:2], nothing[:2], strict=True)]
    both = TrainingBatch(*parts, *[torch.empty(0)] * 3)
    expected = float(predictor_loss(weights, target, batch))
    assert float(predictor_loss(weights, target, both)) == pytest.approx(expected)


def test_the_question_of_a_chat_is_source_also_if_the_target_wrote_it() -> None:
    """Text 0 has a question, a forced closing, and an answer from token 6 on."""
    model, _, batch = traps.training_case(1)
    batch = batch._replace(is_answer=torch.zeros_like(batch.is_answer))
    batch.is_answer[0, 1:3], batch.is_answer[0, 5:] = True, True
    batch.is_answer[1, 2:] = True
    target = freeze_target(model)._replace(settings=DepthAdaptiveSettings())
    found = read_batch(target, batch).source
    states = model.torch_blocks().hidden_states(batch.ids[:, :-1], (model.config.n_layers,))
    for row, length in ((0, 5), (1, 2)):
        assert torch.allclose(found[row], states[row, 0, :length].mean(0))


def test_figures_count_layers_and_agreement() -> None:
    """Predictors of zeros: the first exit is the likeliest, and no chance is above one half."""
    model, _, batch = traps.training_case(2)
    settings = DepthAdaptiveSettings(penalty=0.1)
    target = freeze_target(model)._replace(settings=settings)
    assert CARD.trained is not None and CARD.trained.figures is not None
    found = CARD.trained.figures(initialize_predictors(target, settings, 0), target, batch)
    n = int(batch.is_answer[:, :-1].sum())
    logits = [model.torch_blocks().compute_logits(x) for x in
              model.torch_blocks().layer_states(batch.ids[:, :-1])]  # fmt: skip
    words = [x.argmax(-1)[batch.is_answer[:, :-1]] for x in logits]
    first = int((words[0] == words[-1]).sum())
    assert found["multinomial_layers"].tolist() == [n, n]
    assert found["sequence_agreement"].tolist() == [first, n]
    assert found["geometric_layers"].tolist() == [3 * n, n]
    assert found["geometric_agreement"].tolist() == [n, n]


# ---------------------------------------------------------------------- what they learn


def easy_and_hard_tokens(seed: int) -> KnownTokens:
    """Return tokens whose exits are right from the first layer on, or only from the third.

    A state has the token's hardness, the layer and what the exit says.
    """
    generator = torch.Generator().manual_seed(seed)
    texts, length, words = 40, 10, 4
    targets = torch.randint(words, (texts, length), generator=generator)
    is_hard = torch.rand(texts, length, generator=generator) < 0.4
    states = []
    for layer in range(4):
        is_wrong = is_hard & (layer < 2)
        says = torch.nn.functional.one_hot((targets + is_wrong) % words, words)
        x = torch.cat((is_hard[..., None] * 2.0 - 1, torch.full((texts, length, 1), layer)), dim=-1)
        x = torch.cat((x, 4.0 * says), dim=-1)
        states.append(x + 0.1 * torch.randn(x.shape, generator=generator))
    settings = DepthAdaptiveSettings(penalty=0.1, width=0.0)
    known = torch.ones(texts, length, dtype=torch.bool)
    return KnownTokens(states[0].mean(1), states, lambda x: x[:, 2:], targets, known, settings)


def test_trained_predictors_beat_random_exits_of_the_same_depths() -> None:
    """On other tokens than they were trained on. Random exits agree as often as their layers do."""
    seen, held_out = easy_and_hard_tokens(0), easy_and_hard_tokens(1)
    assert set(held_out.best.tolist()) == {0, 2}
    config = replace(LLAMA, n_layers=4, d_model=6)
    shapes = predictor_shapes(config, DepthAdaptiveSettings())
    weights = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
    optimizer = torch.optim.Adam(weights.values(), lr=0.1)
    for _ in range(100):
        seen.loss(weights).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    counts = {name: float(n / by) for name, (n, by) in held_out.count_exits(weights).items()}
    agrees = (held_out.words == held_out.words[:, -1:]).float().mean(0)
    for name in ("multinomial", "geometric"):
        assert counts[f"{name}_layers"] == pytest.approx(counts["best_layers"], abs=0.1)
        # Exits of both kinds: so many tokens leave after three layers that the mean depth is that.
        deep = (counts[f"{name}_layers"] - 1) / 2
        by_chance = float((1 - deep) * agrees[0] + deep * agrees[2])
        assert counts[f"{name}_agreement"] > by_chance + 0.15, name
    assert counts["best_agreement"] == 1


# ---------------------------------------------------------------------- a translator

CONFIG = Seq2SeqConfig(
    20, d_model=8, n_heads=2, d_ff=12, encoder_layers=1, decoder_layers=3, max_positions=32,
    pad=0, bos=1, eos=2, mask=3,
)  # fmt: skip


def make_translator(seed: int = 0) -> Seq2Seq:
    assert CARD.translator is not None
    settings = DepthAdaptiveSettings(penalty=0.1)
    config = CARD.translator.equip(
        replace(CONFIG, extra={"trained_for": "depth_adaptive"}), settings
    )
    model = Seq2Seq.create(config, torch.Generator().manual_seed(seed), torch.float64)
    generator = torch.Generator().manual_seed(seed)
    for name, w in model.weights.items():
        if name.startswith(LEAD):
            w.copy_(2 * torch.randn(w.shape, generator=generator, dtype=torch.float64))
    return model


def test_a_translators_sequence_reads_its_encoder() -> None:
    exits = set[int]()
    for seed in range(6):
        model = make_translator(seed)
        for source in ([5, 6, 7], [8, 9], [10, 11, 12, 13], [4]):
            conditioned = model.condition_on(source)
            decoder = make_decoder(conditioned, predictor="sequence")
            found = set(count_layers(decoder, [1]))
            states = model.encode(torch.tensor([source])).states[0].mean(0)
            w = translator_weights(model)
            scores = w["sequence.weight"] @ states + w["sequence.bias"]
            assert found == {1 + int(scores.argmax())}
            exits |= found
    assert len(exits) > 1


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_translator_decodes_with_its_predictors(predictor: str) -> None:
    """At inf it is plain; else each exit is the predictor's on the decoder's masked stream."""
    model, source = make_translator(3), [5, 6, 7]
    plain = tinyspec.translate(model, source, method="autoregressive").tokens
    at_inf = tinyspec.translate(model, source, method="depth_adaptive", threshold=math.inf)
    assert list(at_inf.tokens) == list(plain)
    own = tinyspec.translate(model, source, method="depth_adaptive", predictor=predictor)
    assert len(own.tokens) > 0
    conditioned = model.condition_on(source)
    decoder = make_decoder(conditioned, predictor=predictor, threshold=0.4)
    decoder.extend([1])
    weights = {name: w.numpy() for name, w in translator_weights(model).items()}
    memory = model.encode(torch.tensor([source]))
    mean = memory.states[0].mean(0).numpy()

    def read(state: Any) -> Any:
        return UNCHANGED.probs(model.decoder.compute_logits(torch.tensor(state)).numpy())

    depths = list[int]()
    while not decoder.finished:
        ids = torch.tensor([list(decoder.context)])
        causal = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        stream = model.layer_states(
            model.embed(ids), memory, causal, depths=torch.tensor([[*depths, 3]])
        )
        states = [x[0, -1].numpy() for x in stream]
        depths.append(predict_exit(predictor, mean, states, read, weights, 0.4))
        assert decoder.step(Seeded(0)).scores.layers[0] == depths[-1]


def test_on_translations_the_predictors_alone_are_trained() -> None:
    model = make_translator()
    for w in model.weights.values():
        w.requires_grad_()
    source, target = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[4, 5], [6, 0]])
    settings = DepthAdaptiveSettings(penalty=0.1, width=1.0)
    training = TranslatorTraining(model, model, settings, 0.3, 0.1, 0.0)
    loss = translator_predictors_batch_loss(training, (source, target), torch.Generator())
    loss.backward()  # type: ignore[no-untyped-call]
    moved = {name for name, w in model.weights.items() if w.grad is not None and w.grad.any()}
    assert moved == {name for name in model.weights if name.startswith(LEAD)}
    assert CARD.translator is not None
    assert CARD.translator.updates(settings) == LEAD


def test_translations_are_known_to_their_ends_and_padding_is_not() -> None:
    """A batch of two is what its sentences are alone."""
    model, settings = make_translator(), DepthAdaptiveSettings(penalty=0.1)
    source, target = torch.tensor([[5, 6, 7], [8, 9, 0]]), torch.tensor([[4, 5], [6, 0]])
    both = read_translations(model, settings, source, target)
    alone = [
        read_translations(model, settings, torch.tensor([[5, 6, 7]]), torch.tensor([[4, 5]])),
        read_translations(model, settings, torch.tensor([[8, 9]]), torch.tensor([[6]])),
    ]
    assert both.text_of.tolist() == [0, 0, 0, 1, 1]
    assert torch.equal(both.best, torch.cat([one.best for one in alone]))
    assert torch.equal(both.words, torch.cat([one.words for one in alone]))
    torch.testing.assert_close(both.source, torch.cat([one.source for one in alone]))
    found = measure_translator_predictors(model, settings, source, target, torch.Generator())
    assert all(figure.shape == (2,) for figure in found.values())
    layers = float((both.best + 1).double().mean())
    assert float(found["best_layers"][0]) == pytest.approx(layers)
    page = CARD.translator.page.format(  # type: ignore[union-attr]
        settings=settings, figures={name: float(x[0]) for name, x in found.items()}
    )
    assert "lambda 0.1, sigma 1" in page


# ---------------------------------------------------------------------- the card


def test_the_card_promises_and_rejects() -> None:
    assert CARD.promise(threshold=math.inf) is Guarantee.EXACT
    assert CARD.promise() is Guarantee.LOSSY
    make = partial(make_decoder, M, predictor="confidence")
    for wrong in ("0.5", "a,b", "0.1,-1", "nan,0.2", "0.1,0.2,0.3"):
        with pytest.raises(TinyspecError, match=r"^thresholds is .* must be 2 numbers"):
            make(thresholds=wrong)
    with pytest.raises(TinyspecError, match="thresholds is for predictor confidence"):
        make_decoder(M, thresholds="0.1,0.2")
    for predictor in PREDICTORS[:3]:
        with pytest.raises(TinyspecError, match=r"has no trained predictors: .* confidence$"):
            make_decoder(network(LLAMA), predictor=predictor)
    for values in ({"oracle": "best"}, {"draft_vocab": 9}, {"penalty": -1.0}, {"width": True}):
        with pytest.raises(TinyspecError, match=r"^\[head\] "):
            DepthAdaptiveSettings(**values)  # type: ignore[arg-type]
    with pytest.raises(TinyspecError, match="one layer"):
        predictor_shapes(replace(LLAMA, n_layers=1), DepthAdaptiveSettings())


def test_the_confidence_needs_no_head() -> None:
    """Through the front door, where a missing head is an error of other methods."""
    options: dict[str, Any] = {"method": "depth_adaptive", "max_new_tokens": 4}
    done = tinyspec.generate(network(LLAMA), PROMPT, predictor="confidence", **options)
    assert len(done.tokens) == 4
    with pytest.raises(TinyspecError, match="no trained predictors"):
        tinyspec.generate(network(LLAMA), PROMPT, **options)
