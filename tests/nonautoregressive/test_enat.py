"""ENAT: the decoder reads what a phrase table says, or embeddings that a game has moved."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.rewriting_laws import align_in_order, random_reader
from tinyspec.laws.traps.enat import (
    SOURCE,
    SOURCES,
    TABLE,
    TARGET,
    TRAPS,
    rough_reader,
    translate_phrases,
)
from tinyspec.laws.traps.parallel import small_translator
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive.enat import (
    DOWN,
    MAP,
    PHRASES,
    UP,
    UP_BIAS,
    EnatRefiner,
    EnatSettings,
    add_enat_weights,
    adversarial_loss,
    count_table,
    discriminator_logits,
    enat_loss,
    format_phrases,
    initialize_as_copies,
    look_up_phrases,
    phrase_table,
    read_table,
    symmetrize_links,
    translate_rough_words,
)
from tinyspec.nonautoregressive.parallel import ParallelRefiner, parallel_loss
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import Guarantee, RefineRequest, find_technique
from tinyspec.training.aligner import align_words
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.recipe import read_translation_recipe

RECIPE = Path(__file__).parents[2] / "models/multi30k-enat/recipe.toml"
KINDS = ("table", "mapping")


def run(model: Seq2Seq, teacher: Seq2Seq | None, source: Any, **knobs: Any) -> Refinement:
    request = RefineRequest(model, teacher, [])
    refiner = find_technique("enat").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    assert len(list(running)) == 1
    return running


def test_printed_algorithm_is_what_runs() -> None:
    """`look_up_phrases` says what the first canvas holds, stretched to every length."""
    for source in product(range(4, 9), repeat=4):
        z = look_up_phrases(source, TABLE, 3)
        assert z == translate_phrases(source, TABLE)
    for seed, source in product(range(3), SOURCES):
        model = rough_reader(seed, "table")
        z = look_up_phrases(source, TABLE, 3)
        refiner = EnatRefiner(model, EnatSettings(), None, 8)
        with torch.inference_mode():
            canvas = refiner.start(source, model.encode(torch.tensor([source])), Seeded(0))
        rows = {int(mask.sum()): canvas.text(row) for row, mask in enumerate(canvas.mask)}
        if len(z) in rows:
            assert rows[len(z)] == z


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


# ---------------------------------------------------------------------- the table


def test_a_segmentation_covers_the_source() -> None:
    """With a table that marks its phrases, what is read is the source, phrase by phrase."""
    for source in product((4, 5, 6), repeat=5):
        for known in ({(4, 5)}, {(4, 5, 6), (5, 6), (4,)}, set[tuple[int, ...]]()):
            table = {phrase: (*phrase, 0) for phrase in known}
            z = look_up_phrases(source, table, 3)
            assert [x for x in z if x] == list(source)


def test_alignments_are_joined_as_in_the_literature() -> None:
    """Both agree on the first and last words; the word between them is linked by one alone."""
    assert symmetrize_links([0, 0, 2], [0, 2, 2]) == {(0, 0), (2, 2), (0, 1), (1, 2)}
    assert symmetrize_links([0, 0, 0], [0]) == {(0, 0), (0, 1), (0, 2)}
    assert symmetrize_links([1], [0, 0]) == {(1, 0), (0, 0)}
    assert symmetrize_links([0, 3], [0, 0, 0, 0]) == {(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)}
    for seed in range(200):
        random = torch.Generator().manual_seed(seed)
        s, t = (int(torch.randint(1, 6, (), generator=random)) for _ in range(2))
        forward = torch.randint(s, (t,), generator=random).tolist()
        backward = torch.randint(t, (s,), generator=random).tolist()
        one, other = {(i, j) for j, i in enumerate(forward)}, set(enumerate(backward))
        links = symmetrize_links(forward, backward)
        assert one & other <= links <= one | other
        for i, j in (one | other) - links:  # nothing more would grow
            is_covered = any(a == i for a, _ in links) and any(b == j for _, b in links)
            assert is_covered or not any(abs(a - i) <= 1 and abs(b - j) <= 1 for a, b in links)


def test_the_table_of_a_known_language_is_its_lexicon() -> None:
    """Phrases of two words are in the order in which the language writes them."""
    task = Dialects(("lex",), modes=1, words=8, shortest=2, longest=4)
    pairs = [(pair.source, pair.target) for pair in task.sample_pairs(400, 1)]

    def align(sources: Any, targets: Any) -> list[list[int]]:
        return [link.tolist() for link in align_words(sources, targets, model2_rounds=0).links]

    table = read_table(count_table(EnatSettings(phrase=2), pairs, align)[PHRASES], 99)
    for phrase, translation in table.items():
        assert translation == task.translate(phrase, 0).target
    assert {phrase for phrase in table if len(phrase) == 1} == {(word,) for word in range(4, 12)}
    assert 40 < len(table) <= 8 + 56
    longest = max(len(phrase) for phrase in table)
    assert longest == 2


def test_phrases_that_were_seen_seldom_are_left_out() -> None:
    pairs = [((4, 5), (7, 8))] * 2 + [((5, 6), (8, 9))] * 3
    made = count_table(EnatSettings(), pairs, align_in_order)
    assert made == {PHRASES: "4=7;5=8;5 6=8 9;6=9"}
    assert count_table(EnatSettings("mapping"), pairs, lambda *sides: pytest.fail("no")) == {}


def test_a_table_is_read_as_it_was_written() -> None:
    assert read_table(format_phrases(TABLE), 9) == TABLE
    assert read_table(format_phrases({}), 9) == {}
    model = rough_reader(0, "table")
    for damaged in (" ", "4=7;5", "4=", "=7", "4=9", "4=-1", "4=x", 7, None):
        model.config = replace(model.config, extra={**model.config.extra, PHRASES: damaged})
        with pytest.raises(TinyspecError, match=r"models/multi30k-enat/recipe") as error:
            find_technique("enat").refiner(RefineRequest(model))
        assert "\n" not in str(error.value)


# ---------------------------------------------------------------------- the mapping


def fresh_mapper(seed: int) -> Seq2Seq:
    """Return a random model whose W is the identity, as a training begins."""
    model = rough_reader(seed, "mapping")
    initialize_as_copies(model.weights)
    return model


def test_an_identity_without_further_losses_is_parallel() -> None:
    """Every bit of the loss, of its gradient and of the scores of what is written."""
    settings = EnatSettings("mapping", alignment=0, adversary=0)
    for seed, dropout in product(range(3), (0.0, 0.1)):
        made, written = list[tuple[torch.Tensor, torch.Tensor]](), list[Any]()
        for method in ("enat", "parallel"):
            model = fresh_mapper(seed)
            weight = model.weights["embed"].clone().requires_grad_()
            model = Seq2Seq(model.config, {**model.weights, "embed": weight})
            torch.manual_seed(1)
            if method == "enat":
                loss = enat_loss(model, (SOURCE, TARGET), settings, dropout, 0.1)
            else:
                loss = parallel_loss(model, (SOURCE, TARGET), dropout, 0.1)
            made.append((loss, torch.autograd.grad(loss, weight)[0]))
            own = EnatRefiner(model, settings, None, 3), ParallelRefiner(model, None, 3)
            running = refine(model, (4, 7, 5), own[method == "parallel"], Seeded(0), [])
            list(running)
            written.append((running.tokens, running.scores))
        assert torch.equal(made[0][0], made[1][0]) and written[0] == written[1]
        assert torch.allclose(made[0][1], made[1][1], atol=1e-12)  # it comes by another path


def test_the_discriminator_learns_and_then_the_mapping_fools_it() -> None:
    """At first nearly all words are told apart; after the game about as many as by tossing a coin.

    Two languages of 30 words each: their embeddings differ by a shift, which W can learn to undo.
    """
    generator = torch.Generator().manual_seed(0)
    config = Seq2SeqConfig(64, 8, 2, 12, 1, 1, 12, lengths=9)
    config = add_enat_weights(config, EnatSettings("mapping"))
    model = Seq2Seq.create(config, generator)
    initialize_as_copies(model.weights)
    with torch.no_grad():
        model.embedding[4:34, 0] += 1.0
    source = torch.randint(4, 34, (64, 5), generator=generator)
    target = torch.randint(34, 64, (64, 5), generator=generator)

    def told_apart() -> float:
        with torch.no_grad():
            moved = model.embedding[4:34] @ model.weights[MAP].T
            right = (discriminator_logits(model, model.embedding[34:]) > 0).sum()
            return float(right + (discriminator_logits(model, moved) < 0).sum()) / 60

    def play(names: tuple[str, ...], adversary: float, steps: int) -> None:
        weights = [model.weights[name].requires_grad_() for name in names]
        adam = torch.optim.Adam(weights, lr=1e-2)
        for _ in range(steps):
            adam.zero_grad()
            adversarial_loss(model, source, target, adversary).backward()
            adam.step()
        for weight in weights:
            weight.requires_grad_(False)

    play((UP, UP_BIAS, DOWN), 0.0, 100)
    first = told_apart()
    play((MAP, UP, UP_BIAS, DOWN), 1.0, 300)
    print(first, told_apart())
    assert first > 0.9 and told_apart() < 0.75


def test_every_weight_of_the_game_has_a_gradient_and_the_embedding_has_none() -> None:
    model = rough_reader(0, "mapping")
    names = (MAP, UP, UP_BIAS, DOWN, "embed")
    weights = {name: w.clone().requires_grad_(name in names) for name, w in model.weights.items()}
    model = Seq2Seq(model.config, weights)
    slopes = torch.autograd.grad(
        adversarial_loss(model, SOURCE, TARGET, 1.0),
        [weights[name] for name in names],
        allow_unused=True,
    )
    assert all(slope is not None and bool(slope.any()) for slope in slopes[:-1])
    assert slopes[-1] is None


@pytest.mark.parametrize("kind", KINDS)
def test_padding_does_not_change_the_loss(kind: str) -> None:
    model, settings = rough_reader(0, kind), EnatSettings(kind)
    wider = F.pad(SOURCE, (0, 2)), F.pad(TARGET, (0, 3))
    losses = [enat_loss(model, pairs, settings) for pairs in ((SOURCE, TARGET), wider)]
    assert float(losses[0]) == pytest.approx(float(losses[1]), abs=1e-9)


# ---------------------------------------------------------------------- decoding


@pytest.mark.parametrize("kind", KINDS)
def test_a_batch_of_sources_is_translated_as_each_alone(kind: str) -> None:
    judge, padded, settings = (
        random_reader(50, False, 48),
        pad_sequences(SOURCES),
        EnatSettings(kind),
    )
    for seed, (teacher, lengths) in product(range(3), ((None, 1), (judge, 4), (None, 4))):
        model = rough_reader(seed, kind)
        together = translate_sources(model, padded, EnatRefiner(model, settings, teacher, lengths))
        who = "self" if teacher is None else "teacher"
        assert together == [
            run(model, teacher, source, lengths=lengths, judge=who).tokens for source in SOURCES
        ]
        if lengths == 1:
            assert translate_rough_words(model, settings, padded) == together


@pytest.mark.parametrize("kind", KINDS)
def test_one_encoder_pass_and_one_decoder_pass_and_the_teacher_if_it_chooses(kind: str) -> None:
    judge = random_reader(50, False, 48)
    made = run(rough_reader(0, kind), judge, SOURCES[2], lengths=4)
    names = [call.model for call in made.forward_log]
    assert names == ["reader/encoder", "reader", "teacher/encoder", "teacher"]
    assert len(run(rough_reader(0, kind), judge, SOURCES[2]).forward_log) == 2


def test_a_source_longer_than_the_table_knows_is_copied_where_it_is_unknown() -> None:
    assert look_up_phrases([8, 8, 4, 4, 6, 5], {(4, 6, 5): (7,)}, 3) == [8, 8, 4, 7]
    assert look_up_phrases([4], {}, 1) == [4]
    assert phrase_table(rough_reader(0, "table")) == TABLE


# ---------------------------------------------------------------------- on dialects


@pytest.mark.slow
def test_a_phrase_table_is_ahead_of_copies_after_as_many_steps() -> None:
    """The paper's idea, and its ablation: the same model, which reads the source in its place.

    One language of 40 words, 40 steps from random weights. Right translations of 100: 47 with the
    table, 1 with copies; with mapped embeddings 1 too, so the game has nothing to show here.
    """
    task = Dialects(("lex",), modes=1, words=40, shortest=3, longest=6)
    train = task.sample_pairs(2000, 1)
    held = [p.source for p in task.sample_pairs(200, 2, {p.source for p in train})]
    pairs = [(p.source, p.target) for p in train]

    def align(sources: Any, targets: Any) -> list[list[int]]:
        return [link.tolist() for link in align_words(sources, targets, model2_rounds=0).links]

    valid = dict[str, float]()
    for name, settings in (
        ("copies", EnatSettings("mapping", alignment=0, adversary=0)),
        ("table", EnatSettings()),
        ("mapping", EnatSettings("mapping")),
    ):
        config = Seq2SeqConfig(task.vocab_size, 32, 4, 64, 1, 1, 24, lengths=13)
        counted = count_table(settings, pairs, align)
        config = replace(add_enat_weights(config, settings), extra=counted)
        model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
        initialize_as_copies(model.weights)
        fit(lambda m, batch, _, s=settings: enat_loss(m, batch, s), model, pairs, 40)
        outputs = translate_rough_words(model, settings, pad_sequences(held))
        valid[name] = task.measure_quality(held, outputs).valid
    print(valid)
    assert valid["table"] > valid["copies"] + 0.25


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card, model = find_technique("enat"), rough_reader(0, "table")
    with pytest.raises(TinyspecError, match="4 lengths need a teacher to choose among them"):
        card.refiner(RefineRequest(model), lengths=4)
    with pytest.raises(TinyspecError, match=r"has neither a phrase table nor .*multi30k-enat"):
        card.refiner(RefineRequest(small_translator(0)))
    silent = Seq2Seq.create(replace(model.config, lengths=0), torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match=r"has no LENGTH token.*multi30k-enat/recipe"):
        card.refiner(RefineRequest(silent))
    for settings, message in (
        ({"decoder_input": "copy"}, "decoder_input is 'copy': it must be table or mapping"),
        ({"phrase": 0}, "phrase is 0: it must be a whole number of at least 1"),
        ({"phrase": True}, "phrase is True"),
        ({"alignment": -1}, "alignment is -1: it must be a number of at least 0"),
        ({"adversary": float("inf")}, "adversary is inf: it must be a number of at least 0"),
    ):
        with pytest.raises(TinyspecError, match=message):
            EnatSettings(**settings)  # type: ignore[arg-type]


def test_the_card_and_the_recipe() -> None:
    card = find_technique("enat")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, True)
    plan = read_translation_recipe(RECIPE)
    assert plan.settings_of_translator() == EnatSettings()
    assert plan.start == "../multi30k-parallel" and not plan.config(4800).heads
    mapped = read_translation_recipe(RECIPE, {"translator.decoder_input": '"mapping"'})
    assert list(mapped.config(4800).heads) == [MAP, UP, UP_BIAS, DOWN]
    assert mapped.config(4800).parameters() < 4.5e6
    with pytest.raises(TinyspecError, match=r"recipe.toml: phrase is 0: it must be a whole"):
        read_translation_recipe(RECIPE, {"translator.phrase": "0"})
