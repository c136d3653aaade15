"""Mask-Predict masks in decoding exactly the words that the paper says.

In training any number of words is hidden.
"""

from itertools import pairwise
from typing import Any

import pytest
import torch

from tinyspec.decoding.refine import Pass, Refinement, blank_canvas, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.nonautoregressive_laws import (
    chooses_best_length,
    follows_mask_predict,
    hides_uniformly,
    random_fillers,
)
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.mask_predict import (
    MaskPredictRefiner,
    TranslationPairs,
    count_masked,
    hide_tokens,
    length_logprobs,
    mask_and_predict,
    masked_lm_loss,
    select_lengths,
)
from tinyspec.technique import Guarantee, RefineRequest, Request, find_technique


def run(
    source: tuple[int, ...] = (4, 7, 5), iterations: int = 4, lengths: int = 3
) -> tuple[Refinement, list[Pass]]:
    model = next(random_fillers())
    request = RefineRequest(model, forward_log=[])
    running = refine(
        request.model,
        source,
        find_technique("mask_predict").refiner(request, iterations=iterations, lengths=lengths),
        Seeded(0),
        request.forward_log,
    )
    return running, list(running)


@pytest.mark.parametrize(("iterations", "lengths"), [(1, 2), (3, 3), (4, 5), (9, 2)])
def test_printed_algorithm_is_what_runs(iterations: int, lengths: int) -> None:
    """Words and kept probabilities after every pass, of each length by itself."""
    model = next(random_fillers())
    mask, special = model.config.mask, (0, 1, 2, model.config.mask)
    for source in ((4,), (6, 5), (4, 7, 5)):
        memory = model.encode(torch.tensor([source]))

        def predict(words: list[int], memory: Any = memory) -> tuple[list[int], list[float]]:
            logits = model.logits(model.decode(model.embed(torch.tensor([words])), memory))[0]
            logits[:, special] = -torch.inf
            best = logits.log_softmax(dim=-1).max(dim=-1)
            return best.indices.tolist(), best.values.tolist()

        canvas = run(source, iterations, lengths)[1][-1].after
        for row, slots in enumerate(canvas.mask):
            words, scores = mask_and_predict(predict, int(slots.sum()), iterations, mask)
            assert canvas.text(row) == words
            assert canvas.scores[row][slots].tolist() == pytest.approx(scores, abs=1e-9)


# ---------------------------------------------------------------------- the traps


def test_any_number_of_words_is_hidden_and_other_ones_each_time() -> None:
    assert hides_uniformly(hide_tokens).cases > 0


# ---------------------------------------------------------------------- the rule


def test_every_pass_is_that_of_an_oracle_without_padding_or_batches() -> None:
    assert follows_mask_predict(find_technique("mask_predict").refiner).cases > 100


def test_the_best_mean_of_the_likeliest_lengths_is_chosen_with_one_encoder_pass() -> None:
    assert chooses_best_length(find_technique("mask_predict").refiner).cases > 10


@pytest.mark.parametrize("n", range(1, 14))
def test_the_schedule_masks_what_the_paper_says_and_strictly_less_each_pass(n: int) -> None:
    for passes in range(1, n + 1):
        counts = [int(count_masked(torch.tensor(n), t, passes)) for t in range(passes)]
        assert counts == [
            n * (passes - t) // passes for t in range(passes)
        ]  # never the floor's 0 while T <= N
        assert counts[0] == n and all(a > b for a, b in pairwise(counts))
    assert [int(count_masked(torch.tensor(n), t, n)) for t in range(n)] == list(
        range(n, 0, -1)
    )  # T = N: one more each pass


def test_of_more_passes_than_words_each_masks_one_at_least() -> None:
    assert [int(count_masked(torch.tensor(2), t, 5)) for t in range(5)] == [2, 1, 1, 1, 1]


def test_words_that_are_not_masked_keep_their_word_and_their_stale_probability() -> None:
    _, passes = run(iterations=5)
    moved = 0
    for step in passes[1:]:
        kept = ~step.after.extra & step.after.mask
        assert (step.after.tokens == step.before.tokens)[kept].all()
        assert (step.after.scores == step.before.scores)[kept].all()
        moved += int((step.after.scores != step.before.scores)[step.after.extra].sum())
    assert moved > 0


def test_masks_fall_on_the_lowest_probabilities_and_never_on_padding() -> None:
    _, passes = run(iterations=4, lengths=5)
    for step in passes:
        assert not (step.after.extra & ~step.after.mask).any()
        for row, slots in enumerate(step.after.mask):
            scores, again = step.before.scores[row][slots], step.after.extra[row][slots]
            if not bool(again.all()):
                assert scores[again].max() <= scores[~again].min()


def test_lengths_beside_it_change_nothing_of_a_candidate() -> None:
    alone, beside = run(lengths=1)[1], run(lengths=6)[1]
    assert not bool(beside[0].after.mask.all())  # there is padding
    for one, many in zip(alone, beside, strict=True):
        assert one.after.text(0) == many.after.text(0)
        torch.testing.assert_close(
            one.after.scores[0], many.after.scores[0][many.after.mask[0]], atol=1e-12, rtol=0
        )


def test_one_pass_is_plain_parallel_decoding() -> None:
    running, passes = run(iterations=1, lengths=1)
    assert len(passes) == 1
    model, canvas = next(random_fillers()), passes[0].after
    memory = model.encode(torch.tensor([[4, 7, 5]]))
    pages = blank_canvas([int(canvas.mask.sum())], model.config.mask)
    rows = model.logits(model.decode(model.embed(pages.tokens), memory))[0, :, 4:]
    assert running.tokens == (rows.argmax(dim=-1) + 4).tolist()


def test_passes_are_counted_one_of_the_encoder_and_t_of_the_decoder() -> None:
    running, _ = run(iterations=4, lengths=3)
    names = [call.model for call in running.forward_log]
    assert names == ["filler/encoder", *["filler"] * 4]


def test_many_sources_in_one_batch_are_each_as_alone() -> None:
    """Rows of a canvas may be of different sources: what the bench does."""
    model, sources = next(random_fillers()), ((4, 7, 5), (6,), (5, 4))
    padded = torch.tensor([[4, 7, 5], [6, 0, 0], [5, 4, 0]])
    refiner = MaskPredictRefiner(model, 3, 1)
    alone = [run(source, 3, 1)[0].tokens for source in sources]
    memory = model.encode(padded)
    canvas = blank_canvas([len(text) for text in alone], model.config.mask)
    for t in range(3):
        canvas = refiner.rewrite(canvas, memory, t, Seeded(0))
    assert [canvas.text(row) for row in range(3)] == alone


# ---------------------------------------------------------------------- training


def tiny(lengths: int = 8) -> Seq2Seq:
    config = Seq2SeqConfig(
        8, 8, 2, 8, encoder_layers=1, decoder_layers=1, max_positions=12, lengths=lengths
    )
    return Seq2Seq.create(config, torch.Generator().manual_seed(0), torch.float64)


def test_the_loss_is_the_cross_entropy_of_the_hidden_words_and_of_the_length() -> None:
    model = tiny()
    source, target = (
        torch.tensor([[4, 5, 0], [6, 7, 4]]),
        torch.tensor([[5, 4, 6, 7], [7, 5, 0, 0]]),
    )
    got = float(
        masked_lm_loss(
            model, TranslationPairs(source, target), torch.Generator().manual_seed(3), smoothing=0.1
        )
    )
    hidden = hide_tokens(target != 0, torch.Generator().manual_seed(3))
    total = 0.0
    for row in range(2):
        n = int((target[row] != 0).sum())
        memory = model.encode(source[row : row + 1, : 2 + row])
        read = torch.where(hidden[row], 3, target[row])[None, :n]
        logprobs = model.logits(model.decode(model.embed(read), memory))[0].log_softmax(dim=-1)
        for i in range(n):
            if hidden[row, i]:
                total -= 0.9 * float(logprobs[i, target[row, i]]) + 0.1 * float(logprobs[i].mean())
        total -= float(model.length_logits(memory)[0].log_softmax(dim=-1)[n])
    assert got == pytest.approx(total / int(hidden.sum()), abs=1e-9)


def test_the_loss_does_not_depend_on_visible_words_predictions() -> None:
    """Gradients reach the head only at hidden words: with one hidden word, one position's logits
    count.
    """
    model = tiny()
    model.forward_log = []
    target = torch.tensor([[5, 4, 6]])
    masked_lm_loss(
        model, TranslationPairs(torch.tensor([[4, 5]]), target), torch.Generator().manual_seed(1)
    )
    assert model.forward_log[-1].head_rows == int(
        hide_tokens(target != 0, torch.Generator().manual_seed(1)).sum()
    )


def test_targets_too_long_for_the_length_token_raise_an_error() -> None:
    with pytest.raises(TinyspecError, match="tells 1 to 3"):
        masked_lm_loss(
            tiny(4),
            TranslationPairs(torch.tensor([[4]]), torch.tensor([[5, 5, 5, 5]])),
            torch.Generator(),
        )
    with pytest.raises(TinyspecError, match="targets of 0 to 2 tokens"):
        masked_lm_loss(
            tiny(),
            TranslationPairs(torch.tensor([[4], [5]]), torch.tensor([[5, 5], [0, 0]])),
            torch.Generator(),
        )


def test_pairs_whose_length_cannot_be_told_are_left_out_of_a_training() -> None:
    trained = find_technique("mask_predict").translator
    assert trained is not None
    fits = [trained.fits(tiny(4).config, None, 2, n) for n in range(6)]
    assert fits == [False, True, True, True, False, False]


# ---------------------------------------------------------------------- bad input, and the card


def test_no_passes_raise_an_error() -> None:
    with pytest.raises(TinyspecError, match="iterations is 0: it must be from 1 to 1024"):
        run(iterations=0)
    with pytest.raises(TinyspecError, match="lengths is 0: it must be from 1 to 1024"):
        run(lengths=0)


def test_a_model_without_a_length_token_raises_an_error() -> None:
    config = Seq2SeqConfig(8, 8, 2, 8, encoder_layers=1, decoder_layers=1, max_positions=12)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match="has no LENGTH token"):
        find_technique("mask_predict").refiner(RefineRequest(model))


def test_lengths_stay_within_the_positions() -> None:
    model = [*random_fillers()][-1]  # five positions, lengths up to seven
    request = RefineRequest(model)
    running = refine(
        request.model,
        (4, 5),
        find_technique("mask_predict").refiner(request, lengths=99),
        Seeded(0),
    )
    assert max(len(text) for text in [*running][-1].as_record().tokens) == 5


def test_the_card_says_what_it_is() -> None:
    card = find_technique("mask_predict")
    assert (card.kind, card.guarantee) == ("refine", Guarantee.APPROX)
    assert {knob.name: knob.default for knob in card.knobs} == {"iterations": 10, "lengths": 5}
    with pytest.raises(TinyspecError, match="tinyspec translate"):
        card.make(Request(target=None))  # type: ignore[arg-type]


def test_the_length_token_tells_no_empty_translation() -> None:
    config = Seq2SeqConfig(8, 8, 2, 8, encoder_layers=1, decoder_layers=1, lengths=6)
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
    probs = length_logprobs(model, model.encode(torch.tensor([[4, 5], [6, 0]]))).exp()
    assert probs[:, 0].tolist() == [0, 0]
    assert probs.sum(dim=1).tolist() == pytest.approx([1, 1], abs=1e-6)


def test_the_beam_holds_the_likeliest_first_and_the_shorter_of_equals() -> None:
    logprobs = torch.tensor([[0.0, 0.3, 0.4, 0.3], [0.0, 0.25, 0.25, 0.5]]).log()
    assert select_lengths(logprobs, 2) == [[2, 1], [3, 1]]
    assert select_lengths(logprobs, 99) == [[2, 1, 3], [3, 1, 2]]  # length 0 is none


def test_wider_beams_contain_the_narrower() -> None:
    logprobs = torch.rand(5, 20, generator=torch.Generator().manual_seed(1)).log()
    for narrow, wide in zip(select_lengths(logprobs, 3), select_lengths(logprobs, 8), strict=True):
        assert wide[:3] == narrow


def test_impossible_lengths_raise_an_error() -> None:
    with pytest.raises(TinyspecError, match="at least 1"):
        select_lengths(torch.zeros(1, 3), 0)
    with pytest.raises(TinyspecError, match="train it anew"):
        select_lengths(torch.full((1, 3), -torch.inf), 1)
