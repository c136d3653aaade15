"""SAT: groups from left to right, the words of a group at once, and the teacher at K = 1."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nonautoregressive.test_nat import fit
from tinyspec.bench.experiments.dialects import (
    SAT,
    SAT_KD,
    DialectSettings,
    DialectTrial,
    translate_greedily,
)
from tinyspec.decoding.beam import beam_search
from tinyspec.decoding.refine import Pass, Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.rewriting_laws import random_reader
from tinyspec.laws.traps.sat import group_writer, most_words, write_groups
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Lockstep, Seq2Seq
from tinyspec.nonautoregressive import sat as module
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.nonautoregressive.sat import (
    SatBeamRefiner,
    SatRefiner,
    SatSettings,
    fits_groups,
    group_mask,
    sat_batch_loss,
    sat_loss,
    shift_by_group,
    translate_batch_in_groups,
    translate_in_groups,
)
from tinyspec.technique import Guarantee, RefineRequest, TranslatorTraining, find_technique
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.recipe import read_translation_recipe
from tinyspec.training.translation_tasks import teacher_forcing_loss
from tinyspec.translation import translate

SOURCES = [(4,), (6, 5), (4, 7, 5), (8, 7, 4, 6), (5, 4, 6, 7, 5)]
RECIPE = Path(__file__).parents[2] / "models/multi30k-sat/recipe.toml"


def run(model: Seq2Seq, source: Any, **knobs: Any) -> tuple[Refinement, list[Pass]]:
    request = RefineRequest(model, forward_log=[])
    refiner = find_technique("sat").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    return running, list(running)


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_printed_algorithm_is_what_runs(k: int) -> None:
    ends = 0
    for seed, source in product(range(5), SOURCES):
        model = group_writer(seed, k)
        memory, c = model.encode(torch.tensor([source])), model.config

        def predict(inputs: list[int], model: Seq2Seq = model, memory: Any = memory) -> list[int]:
            mask = group_mask(len(inputs), k)
            states = model.decode(model.embed(torch.tensor([inputs])), memory, mask)
            return model.logits(states)[0].argmax(dim=-1).tolist()

        limit = most_words(model, source, k)
        expected = translate_in_groups(predict, k, c.bos, c.eos, limit)
        running, passes = run(model, source)
        assert running.tokens == expected
        assert len(passes) == -(-min(len(expected) + 1, limit) // k)
        ends += len(expected) < limit
    assert ends  # some texts end by their own end, and not by the limit


@pytest.mark.parametrize("k", range(1, 10))
def test_cached_groups_are_the_dense_pass(k: int) -> None:
    """For every K up to beyond the target: position t sees all before the end of its group."""
    model, room = group_writer(1, k), -(-7 // k) * k
    memory = model.encode(pad_sequences(SOURCES[:3]))
    inputs = torch.randint(4, 9, (3, room), generator=torch.Generator().manual_seed(k))
    dense = model.logits(model.decode(model.embed(inputs), memory, group_mask(room, k)))
    rows = Lockstep(model, memory, room)
    cached = torch.cat([rows.append(inputs[:, at : at + k]) for at in range(0, room, k)], dim=1)
    torch.testing.assert_close(cached, dense, rtol=0, atol=1e-11)


def test_one_word_per_group_is_the_teachers_mask_inputs_and_loss() -> None:
    model, causal = group_writer(0, 1), torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(group_mask(6, 1), causal)
    source, target = torch.tensor([[4, 5, 0], [6, 7, 8]]), torch.tensor([[5, 6, 7], [8, 0, 0]])
    inputs, labels = shift_by_group(model.config, target, 1)
    assert inputs.tolist() == [[1, 5, 6, 7], [1, 8, 0, 0]]
    assert labels.tolist() == [[5, 6, 7, 2], [8, 2, 0, 0]]
    for dropout, smoothing in ((0.0, 0.0), (0.0, 0.1), (0.3, 0.1)):
        training = TranslatorTraining(model, None, SatSettings(1), dropout, smoothing, 1.0)
        torch.manual_seed(0)
        ours = sat_batch_loss(training, (source, target), torch.Generator())
        torch.manual_seed(0)
        assert torch.equal(ours, teacher_forcing_loss(model, source, target, dropout, smoothing))


def test_inputs_are_shifted_by_a_group_and_filled_up() -> None:
    config = group_writer(0, 2).config
    inputs, labels = shift_by_group(config, torch.tensor([[5, 6, 7, 8], [4, 0, 0, 0]]), 2)
    assert inputs.tolist() == [[1, 1, 5, 6, 7, 8], [1, 1, 4, 0, 0, 0]]
    assert labels.tolist() == [[5, 6, 7, 8, 2, 0], [4, 2, 0, 0, 0, 0]]


def causal_mask(length: int, k: int, device: object = None) -> torch.Tensor:
    """Return the ablation of `group_mask`: no position sees a later one, in no group."""
    return torch.ones(length, length, dtype=torch.bool).tril()


def test_the_relaxed_mask_lets_a_position_see_the_later_inputs_of_its_group() -> None:
    """The last input of the second group is changed. It is a word of the first group: known."""
    for k, seed in product((2, 3, 4), range(3)):
        model, n = group_writer(seed, k), 2 * k
        memory = model.encode(torch.tensor([SOURCES[2]]))
        inputs = torch.tensor([[1] * k + [5] * k, [1] * k + [5] * (k - 1) + [6]])
        for mask, is_relaxed in ((group_mask, True), (causal_mask, False)):
            states = model.decode(model.embed(inputs), memory.select_rows([0, 0]), mask(n, k))
            one, other = model.logits(states)
            assert torch.equal(one[:k], other[:k])  # the first group
            assert [torch.allclose(one[t], other[t]) for t in range(k, n - 1)] == [
                not is_relaxed
            ] * (k - 1)
            assert not torch.allclose(one[-1], other[-1])


@pytest.mark.slow
def test_the_relaxed_mask_learns_a_word_that_the_causal_mask_hides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The paper's idea, and its ablation. Three random words of four; the third repeats the second.

    Groups of two: the third word begins the second group, and the second word is the last input of
    this group. Right third words of 100: 100, and 28 with the causal mask. Chance is 25.
    """
    words = torch.randint(4, 8, (500, 3), generator=torch.Generator().manual_seed(0))
    words[:, 2] = words[:, 1]
    held, train = words[:200], [((4,), text) for text in words[200:].tolist()]
    right = {}
    for mask in (group_mask, causal_mask):
        monkeypatch.setattr(module, "group_mask", mask)
        config = Seq2SeqConfig(8, 32, 4, 64, 1, 1, 12)
        model = Seq2Seq.create(config, torch.Generator().manual_seed(1))
        fit(lambda model, batch, _: sat_loss(model, batch, 2), model, train, 80, 1e-2)
        inputs, labels = shift_by_group(config, held, 2)
        memory = model.encode(torch.full((len(held), 1), 4))
        logits = model.logits(model.decode(model.embed(inputs), memory, mask(inputs.shape[1], 2)))
        right[mask] = float((logits.argmax(dim=-1) == labels)[:, 2].float().mean())
    print(list(right.values()))
    assert right[group_mask] >= 0.7 and right[causal_mask] <= 0.4


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_batch_of_sources_is_translated_as_each_alone(k: int) -> None:
    """Texts of other lengths, which end in other groups, stand beside a text."""
    for seed in range(4):
        model = group_writer(seed, k)
        alone = [run(model, source)[0].tokens for source in SOURCES]
        padded, rngs = pad_sequences(SOURCES), [Seeded(0) for _ in SOURCES]
        assert translate_sources(model, padded, SatRefiner(model, k), rngs) == alone
        assert translate_batch_in_groups(model, SatSettings(k), padded) == alone


def test_an_end_inside_a_group_cuts_it_and_so_does_the_limit() -> None:
    cut = limited = 0
    for seed, source, k in product(range(6), SOURCES, (3, 4)):
        model = group_writer(seed, k, 10)
        text, _, passes = write_groups(model, source, k)
        running, steps = run(model, source)
        assert (running.tokens, len(steps)) == (text, passes)
        cut += (len(text) + 1) % k != 0 and len(text) < most_words(model, source, k)
        limited += len(text) == most_words(model, source, k)
        assert steps[-1].after.tokens.shape[1] == passes * k <= 10
    assert cut and limited


@pytest.mark.parametrize("beam", [1, 2])
def test_a_translation_tells_why_it_ended(beam: int) -> None:
    reasons = set()
    for seed, source in product(range(5), SOURCES):
        model = group_writer(seed, 2, 8)
        done = translate(model, source, method="sat", beam=beam)
        assert not isinstance(done, list)
        is_full = len(done.tokens) == 7  # of eight positions, the end takes one
        assert done.finish_reason == ("length" if is_full else "eos")
        reasons.add(done.finish_reason)
    assert len(reasons) == 2


def test_a_pass_as_plain_data_tells_the_new_words() -> None:
    running, passes = run(group_writer(3, 3), SOURCES[2])
    for number, step in enumerate(passes):
        words = len(step.after.text(0))
        assert step.as_record().changed == [list(range(3 * number, words))]
    assert running.tokens == passes[-1].as_record().tokens[0]


def test_a_canvas_can_be_rewritten_again() -> None:
    """The keys and values of a group belong to the canvas that it was written on."""
    model = group_writer(2, 2)
    refiner, memory = SatRefiner(model, 2), model.encode(torch.tensor([SOURCES[3]]))
    first = refiner.rewrite(refiner.start(SOURCES[3], memory, Seeded(0)), memory, 0, Seeded(0))
    for _ in range(2):
        second = refiner.rewrite(first, memory, 1, Seeded(0))
        assert second.extra.rows.length == 4 and first.extra.rows.length == 2
        assert second.text(0)[:4] == run(model, SOURCES[3])[0].tokens[:4]


@pytest.mark.slow
def test_two_words_at_once_need_distilled_sentences_where_dialects_mix(tmp_path: Path) -> None:
    """The two words of the first group do not know of each other's dialect."""
    given = DialectSettings(
        ("lex",), modes=3, words=6, shortest=3, longest=4, pairs=4000, tests=100, steps=300,
        width=48,
    )  # fmt: skip
    trial = DialectTrial("lex", given, tmp_path)
    teacher, plain = trial.run_autoregressive()
    taught = translate_greedily(teacher, trial.sources)
    found = {
        "teacher": plain,
        **trial.run_groups(SAT, trial.targets),
        **trial.run_groups(SAT_KD, taught),
    }
    valid = {name: sum(int(mark) & 1 for mark in row["verdicts"]) for name, row in found.items()}
    print(valid)
    assert min(valid["teacher"], valid[SAT_KD]) >= 90 and valid[SAT] <= 70
    assert found[SAT_KD]["passes"] < 0.7 * found["teacher"]["passes"]


@pytest.mark.parametrize("beam", [2, 4])
def test_a_beam_of_one_word_groups_is_the_teachers(beam: int) -> None:
    """K = 1: the same texts as `beam_search`, which the teacher translates with."""
    for seed, source in product(range(5), SOURCES):
        model = group_writer(seed, 1)
        memory, c = model.encode(torch.tensor([source])), model.config
        limit = most_words(model, source, 1)
        rows = Lockstep(model, memory, limit + 1)
        (expected,) = beam_search(rows, c.bos, c.eos, [limit], beam)
        assert run(model, source, beam=beam)[0].tokens == expected


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_a_beam_of_one_is_greedy(k: int) -> None:
    for seed, source in product(range(6), SOURCES):
        model = group_writer(seed, k)
        refiner = SatBeamRefiner(model, k, 1)
        found = translate_sources(model, torch.tensor([source]), refiner)[0]
        greedy = run(model, source)[0].tokens
        assert found[: len(greedy)] == greedy[: len(found)]
        assert found == greedy or len(greedy) == most_words(model, source, k)


def test_a_beam_finds_texts_of_a_batch_as_alone_and_better_ones_than_greedy() -> None:
    better = 0
    for seed, k in product(range(4), (2, 3)):
        model = group_writer(seed, k)
        alone = [run(model, source, beam=3)[0] for source in SOURCES]
        refiner = SatBeamRefiner(model, k, 3)
        together = translate_sources(model, pad_sequences(SOURCES), refiner)
        assert together == [one.tokens for one in alone]
        better += sum(
            one.tokens != run(model, source)[0].tokens
            for one, source in zip(alone, SOURCES, strict=True)
        )
    assert better > 10


def test_the_canvas_of_a_beam_can_be_rewritten_again() -> None:
    model, rng = group_writer(2, 2), Seeded(0)
    refiner, memory = SatBeamRefiner(model, 2, 3), model.encode(torch.tensor([SOURCES[3]]))
    first = refiner.rewrite(refiner.start(SOURCES[3], memory, rng), memory, 0, rng)
    second, again = (refiner.rewrite(first, memory, 1, rng) for _ in range(2))
    assert [torch.equal(*pair) for pair in zip(second[:3], again[:3], strict=True)] == [True] * 3
    assert first.extra.rows.length == 2 and second.extra.rows.length == 4


def test_groups_must_fit_into_the_positions() -> None:
    config = group_writer(0, 3, 10).config
    fits = [n for n in range(12) if fits_groups(config, SatSettings(3), 5, n)]
    assert fits == list(range(9))  # nine positions in groups of three, one of them for the end


def test_bad_input_is_named() -> None:
    card = find_technique("sat")
    for extra in ({}, {"k": 0}, {"k": 12}, {"k": "2"}, {"k": True}):
        config = Seq2SeqConfig(9, 8, 2, 12, 1, 2, 12, extra=extra)
        model = Seq2Seq.create(config, torch.Generator().manual_seed(0))
        with pytest.raises(TinyspecError, match=r"was not trained to write groups.*multi30k-sat/"):
            card.refiner(RefineRequest(model))
    reader = random_reader(0)
    reader = Seq2Seq(reader.config, reader.weights)
    reader.config.extra["k"] = 2
    try:
        with pytest.raises(TinyspecError, match="attends by position"):
            card.refiner(RefineRequest(reader))
    finally:
        del reader.config.extra["k"]
    with pytest.raises(TinyspecError, match="beam is 0: it must be from 1 to 128"):
        card.refiner(RefineRequest(group_writer(0, 2)), beam=0)
    for k in (0, -1, 2.5, True, "2"):
        with pytest.raises(TinyspecError, match=r"k is .*whole number"):
            SatSettings(k)  # type: ignore[arg-type]


def test_the_card_and_the_recipe() -> None:
    card = find_technique("sat")
    assert (card.kind, card.guarantee) == ("refine", Guarantee.APPROX)
    assert {knob.name: knob.default for knob in card.knobs} == {"beam": 1}
    plan = read_translation_recipe(RECIPE)
    assert plan.config(4800).extra["k"] == 4
    assert plan.config(4800).parameters() < 4.5e6
