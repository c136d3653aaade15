"""NAT: fertilities give the length, one pass writes the words, and the teacher chooses.

Its losses and gradients are tested too.
"""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from tinyspec.decoding.refine import Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.nonautoregressive_laws import (
    fertility_probs,
    fixed_fertilities,
    random_student,
    random_teacher,
    teacher_score,
)
from tinyspec.lm.seq2seq import Seq2Seq, Seq2SeqConfig
from tinyspec.nonautoregressive import nat
from tinyspec.nonautoregressive.nat import copy_by_fertility, copy_uniformly, make_decodable
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import RefineRequest, find_technique
from tinyspec.training.aligner import align_words, count_fertilities
from tinyspec.training.bitext import pad_sequences
from tinyspec.training.dialects import Dialects
from tinyspec.training.distilled import BeamSettings, write_translations
from tinyspec.training.translation_tasks import teacher_forcing_loss

SOURCES = [(4,), (6, 5), (4, 7, 5), (7, 7, 4, 6), (5, 4, 6, 7, 5)]
SEEDS = range(4)


def run(
    model: Seq2Seq, judge: Seq2Seq | None, source: tuple[int, ...], seed: int = 0, **knobs: Any
) -> Refinement:
    request = RefineRequest(model, judge)
    made = refine(
        request.model,
        source,
        find_technique("nat").refiner(request, **knobs),
        Seeded(seed),
        request.forward_log,
    )
    assert len(list(made)) == 1
    return made


def memory_of(model: Seq2Seq, source: tuple[int, ...]) -> Any:
    return model.encode(torch.tensor([source]))


# ------------------------------------------------------------------ decoding


class SampleStreams:
    """Draw as `NatRefiner` does: sample k of a source of `words` words has a stream of its own."""

    def __init__(self, seed: int, words: int):
        self.words, self.drawn, self.start = words, 0, Seeded(seed).split("start", 0)

    def choice(self, n: int, p: list[float]) -> int:
        if self.drawn % self.words == 0:
            self.stream = self.start.split("fertilities", self.drawn // self.words)
        self.drawn += 1
        return self.stream.draw(p)


@pytest.mark.parametrize("samples", [1, 2, 3, 6])
def test_printed_algorithm_is_what_runs(samples: int) -> None:
    silent = 0
    for source, seed in product(SOURCES, SEEDS):
        model, judge = random_student(seed), random_teacher(seed)
        probs = fertility_probs(model, source)
        silent += sum(fixed_fertilities(probs, "argmax")) == 0
        expected = nat.decode_noisy_parallel(
            source,
            probs,
            lambda copies, m=model, x=source: nat_words(m, x, copies),
            lambda text, m=judge, x=source: teacher_score(m, x, text),
            samples,
            SampleStreams(seed, len(source)),
        )
        assert run(model, judge, source, seed, samples=samples).tokens == expected
    assert silent  # a source whose likeliest fertilities are all 0 is among them


def nat_words(model: Seq2Seq, source: tuple[int, ...], copies: list[int]) -> list[int]:
    read, slots = torch.tensor([copies]), torch.ones(1, len(copies), dtype=torch.bool)
    states = nat.decode_parallel(model, read, slots, memory_of(model, source))
    logits = nat.forbid_special_tokens(model, model.logits(states))
    return logits[0].argmax(dim=-1).tolist()


@pytest.mark.parametrize("source", SOURCES)
def test_the_length_is_the_sum_of_the_fertilities_and_words_with_none_vanish(
    source: tuple[int, ...],
) -> None:
    for seed in SEEDS:
        refiner = find_technique("nat").refiner(
            RefineRequest(random_student(seed), random_teacher(seed)), samples=6
        )
        canvas = refiner.start(source, memory_of(random_student(seed), source), Seeded(0))
        for candidate, f in enumerate(canvas.extra.tolist()):
            assert canvas.text(candidate) == [
                word for word, n in zip(source, f, strict=True) for _ in range(n)
            ]
            assert len(canvas.text(candidate)) == sum(f) >= 1


def test_fertilities_of_one_are_the_uniform_copy_of_equal_length() -> None:
    lengths = torch.tensor([3, 1, 5])
    ones = (torch.arange(5)[None] < lengths[:, None]).long()
    for one, other in zip(copy_by_fertility(ones), copy_uniformly(lengths, lengths), strict=True):
        assert torch.equal(one, other)


def test_the_uniform_copy_takes_the_nearest_place() -> None:
    for source, target in product(range(1, 8), repeat=2):
        places, slots = copy_uniformly(torch.tensor([source, 7]), torch.tensor([target, 9]))
        exact = [0.0 if target == 1 else i * (source - 1) / (target - 1) for i in range(target)]
        assert slots[0].tolist() == [i < target for i in range(9)]
        assert all(
            abs(j - x) <= 0.5 for j, x in zip(places[0, :target].tolist(), exact, strict=True)
        )


def test_candidates_are_argmax_average_then_samples() -> None:
    model, source = random_student(1), (6, 5, 4)
    probs = fertility_probs(model, source)
    refiner = nat.NatRefiner(model, None, "argmax", 4000, 1.0)
    drawn = refiner.propose_fertilities(
        model.fertility_logits(memory_of(model, source))[0], Seeded(0)
    )
    assert drawn[0].tolist() == fixed_fertilities(probs, "argmax") and drawn[
        1
    ].tolist() == fixed_fertilities(probs, "average")
    for word, row in enumerate(probs):
        shares = torch.bincount(drawn[2:, word], minlength=3) / 3998
        assert torch.allclose(shares.double(), torch.tensor(row, dtype=torch.float64), atol=0.035)


@pytest.mark.parametrize("source", SOURCES[1:])
def test_more_samples_contain_the_fewer_so_that_the_teachers_score_never_falls(
    source: tuple[int, ...],
) -> None:
    rose = 0
    for seed in SEEDS:
        scores = []
        for samples in (1, 2, 3, 6, 12):
            made = run(random_student(seed), random_teacher(seed), source, samples=samples)
            scores.append(teacher_score(random_teacher(seed), source, made.tokens))
        assert all(
            later >= earlier - 1e-9
            for earlier, later in zip(scores, scores[1:], strict=False)  # noqa: RUF007
        )
        rose += scores[-1] > scores[0]
    assert rose


def test_one_sample_is_the_decode_of_the_named_fertilities_whatever_the_seed() -> None:
    for which, source, seed in product(("argmax", "average"), SOURCES, (0, 9)):
        model = random_student(2)
        made = run(model, None, source, seed, samples=1, fertility=which)
        assert nat.translate_batch(model, torch.tensor([source]), which) == [made.tokens]


def test_a_batch_of_sentences_is_written_as_each_by_itself() -> None:
    model = random_student(0)
    assert nat.translate_batch(model, pad_sequences(SOURCES)) == [
        run(model, None, source, samples=1).tokens for source in SOURCES
    ]


def test_a_translation_depends_on_the_source_and_its_fertilities_alone() -> None:
    """The same fertilities, whatever seed they came from and whichever candidates stand beside
    them.
    """
    model, judge, source = random_student(3), random_teacher(3), (4, 7, 5)
    texts: dict[tuple[int, ...], list[int]] = {}
    for seed, samples in product(range(6), (3, 8)):
        canvas = run(model, judge, source, seed, samples=samples, temperature=4.0).canvas
        assert canvas is not None
        for candidate, f in enumerate(canvas.extra.tolist()):
            assert texts.setdefault(tuple(f), canvas.text(candidate)) == canvas.text(candidate)
    assert len(texts) > 5


def test_the_encoder_and_the_decoder_run_once_and_the_teacher_once_where_there_is_a_choice() -> (
    None
):
    for samples, expected in ((1, {"student/encoder": 1, "student": 1}), (9, None)):
        request = RefineRequest(random_student(0), random_teacher(0))
        refiner = find_technique("nat").refiner(request, samples=samples)
        list(refine(request.model, (5, 6), refiner, Seeded(0), request.forward_log))
        counts = {
            name: [call.model for call in request.forward_log].count(name)
            for name in {c.model for c in request.forward_log}
        }
        assert counts == (
            expected or {"student/encoder": 1, "student": 1, "teacher/encoder": 1, "teacher": 1}
        )


def test_fertilities_gone_astray_are_cut_and_none_at_all_becomes_one() -> None:
    fertile = torch.tensor([[0.2, 0.9, 0.4]]).expand(4, 3)
    asked = torch.tensor([[2, 2, 1], [1, 9, 1], [0, 0, 0], [7, 0, 0]])
    assert make_decodable(asked, fertile, 5).tolist() == [
        [2, 2, 1],
        [1, 0, 0],
        [0, 1, 0],
        [0, 1, 0],
    ]


def test_a_source_at_the_limit_of_the_positions_gets_no_more_than_fit() -> None:
    for seed in SEEDS:
        model = random_student(seed, fertilities=6, positions=6)
        made = run(model, random_teacher(seed, positions=6), (4, 5, 6, 7, 4, 5), samples=8)
        assert 1 <= len(made.tokens) <= 5


def test_special_tokens_are_never_written() -> None:
    for seed in range(8):
        assert (
            min(run(random_student(seed), random_teacher(seed), (4, 5, 6, 7), samples=4).tokens)
            >= 4
        )


# ------------------------------------------------------------------ training

SOURCE = torch.tensor([[4, 6, 5], [7, 5, 0]])
TARGET = torch.tensor([[5, 5, 6], [4, 4, 0]])
COUNTS = torch.tensor([[2, 0, 1], [0, 2, 0]])


def test_the_loss_is_that_of_fertilities_and_words_per_word() -> None:
    model, total = random_student(0), 0.0
    for x, y, f in (
        (SOURCE[0], TARGET[0], COUNTS[0]),
        (SOURCE[1, :2], TARGET[1, :2], COUNTS[1, :2]),
    ):
        memory = model.encode(x[None])
        counts = model.fertility_logits(memory)[0].log_softmax(dim=-1)
        read = torch.repeat_interleave(x, f)[None]
        others = torch.tensor([[i != j for j in range(len(y))] for i in range(len(y))])
        spoken = model.logits(model.decode(model.embed(read), memory, others))[0].log_softmax(
            dim=-1
        )
        total -= float(counts[range(len(x)), f].sum() + spoken[range(len(y)), y].sum())
    assert float(nat.nat_loss(model, (SOURCE, TARGET, COUNTS))) == pytest.approx(total / 5)
    wider = torch.cat((TARGET, torch.zeros_like(TARGET)), dim=1)  # a piece of a wider batch
    assert float(nat.nat_loss(model, (SOURCE, wider, COUNTS))) == pytest.approx(total / 5)


def test_reverse_kl_asks_the_teacher_about_the_students_own_words() -> None:
    model, judge = random_student(0), random_teacher(0)
    got = nat.reverse_kl(model, judge, SOURCE, COUNTS, model.encode(SOURCE), judge.encode(SOURCE))
    for row, (x, f) in enumerate(((SOURCE[0], COUNTS[0]), (SOURCE[1, :2], COUNTS[1, :2]))):
        memory, cross_kv, total, written = (
            model.encode(x[None]),
            judge.encode(x[None]),
            0.0,
            [judge.config.bos],
        )
        read = torch.repeat_interleave(x, f)[None]
        slots = torch.ones_like(read, dtype=torch.bool)
        student_probs = model.logits(nat.decode_parallel(model, read, slots, memory))[0].softmax(
            dim=-1
        )
        for q in student_probs:
            causal = torch.ones(len(written), len(written), dtype=torch.bool).tril()
            states = judge.decode(judge.embed(torch.tensor([written])), cross_kv, causal)
            p = judge.logits(states)[0, -1].softmax(dim=-1)
            total += float((q * (q.log() - p.log())).sum())
            written.append(4 + int(q[4:].argmax()))
        assert float(got[row]) == pytest.approx(total)


def test_the_gradient_of_fine_tuning_is_that_of_the_expectation_over_all_fertilities() -> None:
    """Walked, not sampled: 3 classes, 2 words. The baseline, a constant, changes no mean."""
    for seed in range(3):
        model, judge = random_student(seed), random_teacher(seed)
        source = torch.tensor([[4, 6]])
        weights = [
            w.requires_grad_()
            for name, w in model.weights.items()
            if "decoder" not in name and name != "embed"
        ]
        memory, cross_kv = model.encode(source), judge.encode(source)
        logits = model.fertility_logits(memory)
        probs = logits.softmax(dim=-1)
        costs, exact = {}, torch.zeros((), dtype=torch.float64)
        for f in product(range(3), repeat=2):
            kept = nat.clip_fertilities(model, source, torch.tensor([f]), probs.detach())
            costs[f] = nat.reverse_kl(model, judge, source, kept, memory, cross_kv).detach()
            exact = exact + probs[0, 0, f[0]] * probs[0, 1, f[1]] * costs[f][0]
        mean = tuple(nat.average_fertilities(probs.detach())[0].tolist())
        want = torch.autograd.grad(exact, weights, retain_graph=True, materialize_grads=True)
        got = [torch.zeros_like(w) for w in weights]
        for f, cost in costs.items():
            scalar = nat.reinforce_surrogate(
                logits, memory.mask, torch.tensor([f]), cost - costs[mean]
            )
            slopes = torch.autograd.grad(scalar, weights, retain_graph=True, materialize_grads=True)
            probability = float(probs[0, 0, f[0]].detach() * probs[0, 1, f[1]].detach())
            got = [total + probability * slope for total, slope in zip(got, slopes, strict=True)]
        assert any(float(w.abs().max()) > 1e-3 for w in want)
        for one, other in zip(want, got, strict=True):
            assert torch.allclose(one, other, atol=1e-10)


def test_fine_tuning_adds_up_its_three_terms_and_leaves_the_teacher_alone() -> None:
    model, judge, share = random_student(0), random_teacher(0), 0.25
    for weight in (*model.parameters(), *judge.parameters()):
        weight.requires_grad_()
    value = nat.finetune_loss(
        model, judge, (SOURCE, TARGET, COUNTS), torch.Generator().manual_seed(3)
    )
    value.backward()
    assert all(weight.grad is None for weight in judge.parameters())
    assert float(model.weights["fertility.weight"].grad.abs().max()) > 0  # type: ignore[union-attr]
    with torch.no_grad():
        memory, cross_kv = model.encode(SOURCE), judge.encode(SOURCE)
        logits = model.fertility_logits(memory)
        probs = logits.softmax(dim=-1)
        generator = torch.Generator().manual_seed(3)
        drawn = torch.multinomial(probs.flatten(0, 1), 1, generator=generator).view(2, 3)
        cost, baseline, given = (
            nat.reverse_kl(
                model,
                judge,
                SOURCE,
                nat.clip_fertilities(model, SOURCE, f, probs),
                memory,
                cross_kv,
            )
            for f in (drawn, nat.average_fertilities(probs), COUNTS)
        )
        chosen = (
            probs.log().gather(-1, drawn[..., None])[..., 0].masked_fill(SOURCE == 0, 0).sum(dim=1)
        )
        latent = ((cost - baseline) * chosen).sum()
        expected = share * (latent + given.sum()) / 5 + (1 - share) * nat.nat_loss(
            model, (SOURCE, TARGET, COUNTS)
        )
    assert float(value.detach()) == pytest.approx(float(expected))


def fit(loss: Any, model: Seq2Seq, data: list[Any], steps: int, rate: float = 3e-3) -> Seq2Seq:
    """Adam with a warm-up and a linear end, on batches of 64."""
    weights = [weight.requires_grad_() for weight in model.parameters()]
    adam = torch.optim.Adam(weights, lr=rate, betas=(0.9, 0.98))
    slope = torch.optim.lr_scheduler.LambdaLR(
        adam, lambda step: min((step + 1) / 40, 1 - step / (steps + 1))
    )
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = [data[i] for i in torch.randint(len(data), (64,), generator=generator).tolist()]
        loss(
            model, tuple(pad_sequences(side) for side in zip(*rows, strict=True)), generator
        ).backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        adam.step()
        adam.zero_grad()
        slope.step()
    for weight in weights:
        weight.requires_grad_(False)
    return model


def aligned(pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any, Any]]:
    """Sources, targets, and the fertilities that the aligner finds: by model 1, as no word stands
    twice.
    """
    links = align_words([x for x, _ in pairs], [y for _, y in pairs], model2_rounds=0).links
    return [
        (x, y, count_fertilities(link, len(x), 3))
        for (x, y), link in zip(pairs, links, strict=True)
    ]


def shape(task: Dialects, width: int, layers: int) -> Seq2SeqConfig:
    return Seq2SeqConfig(
        task.vocab_size, width, 4, 2 * width, layers, layers, 24, positional=True, fertilities=4
    )


def test_an_aligners_fertilities_are_learnt_to_more_than_95_in_100() -> None:
    """Words that give nothing, one or two tokens, in an order turned by one; nothing but pairs is
    shown.
    """
    task = Dialects(("ord", "fert"), modes=2, words=12, shortest=3, longest=5)

    def pairs(count: int, seed: int) -> list[tuple[Any, Any, Any]]:
        made = []
        for pair in task.sample_pairs(count, seed):
            turned = task.translate(pair.source, 1)
            silent = {i for i, word in enumerate(pair.source) if word % 4 == 0}
            kept = [
                t for t, i in zip(turned.target, turned.alignment, strict=True) if i not in silent
            ]
            counts = [0 if i in silent else f for i, f in enumerate(turned.fertilities)]
            made += [(pair.source, kept, counts)] * bool(kept)
        return made

    train, held = pairs(1500, 1), pairs(200, 2)
    data = aligned([(x, y) for x, y, _ in train])
    right = [
        f == g
        for (_, _, known), (_, _, found) in zip(train, data, strict=True)
        for f, g in zip(known, found, strict=True)
    ]
    assert sum(right) > 0.95 * len(right)
    model = fit(
        nat.nat_loss,
        Seq2Seq.create(shape(task, 32, 1), torch.Generator().manual_seed(0)),
        data,
        70,
        5e-3,
    )
    sources = pad_sequences([x for x, _, _ in held])
    predicted = model.fertility_logits(model.encode(sources)).argmax(dim=-1)
    there = sources != 0
    assert float((predicted == pad_sequences([f for _, _, f in held]))[there].float().mean()) > 0.95


@pytest.mark.slow
def test_distillation_fine_tuning_and_the_teachers_choice_each_help_with_two_dialects() -> None:
    """Lexicon and fertilities are a dialect's. One pass on raw pairs mixes dialects. Right
    translations, of 100: teacher 99; raw 8, fine-tuned 20, with 30 samples 88; distilled 89, with
    30 samples 99. Fifty seconds of one core.
    """
    task = Dialects(("lex", "fert"), modes=2, words=12, shortest=3, longest=5)
    train = task.sample_pairs(4000, 1)
    sources, held = (
        [p.source for p in train],
        [p.source for p in task.sample_pairs(100, 2, {p.source for p in train})],
    )
    config = shape(task, 48, 2)
    judge = Seq2Seq.create(
        replace(config, positional=False, fertilities=0), torch.Generator().manual_seed(1)
    )
    judge.name = "teacher"
    fit(
        lambda model, batch, _: teacher_forcing_loss(model, *batch),
        judge,
        [(p.source, p.target) for p in train],
        250,
    )
    distilled = write_translations(judge, sources, BeamSettings(beam=1))

    def share(model: Seq2Seq, samples: int) -> float:
        refiner = find_technique("nat").refiner(RefineRequest(model, judge), samples=samples)
        outputs = translate_sources(model, pad_sequences(held), refiner, [Seeded(0) for _ in held])
        return task.measure_quality(held, outputs).valid

    assert (
        task.measure_quality(held, write_translations(judge, held, BeamSettings(beam=1))).valid
        > 0.95
    )
    shares = {}
    for name, targets in (("raw", [p.target for p in train]), ("distilled", distilled)):
        pairs = [(x, y) for x, y in zip(sources, targets, strict=True) if 0 < len(y) <= 3 * len(x)]
        data = aligned(pairs)
        model = fit(
            nat.nat_loss, Seq2Seq.create(config, torch.Generator().manual_seed(2)), data, 250
        )
        shares |= {(name, samples): share(model, samples) for samples in (1, 30)}
        if name == "raw":
            fine = fit(
                lambda model, *batch: nat.finetune_loss(model, judge, *batch), model, data, 60, 1e-3
            )
            shares["fine", 1] = share(fine, 1)
    print(shares)
    assert shares["raw", 1] < 0.5
    assert shares["fine", 1] > shares["raw", 1] + 0.05
    assert shares["raw", 30] > shares["raw", 1] + 0.3
    assert shares["distilled", 1] > shares["raw", 1] + 0.3
    assert shares["distilled", 30] >= shares["distilled", 1] > 0.8


# ------------------------------------------------------------------ bad input


def test_bad_input_is_named() -> None:
    model, judge = random_student(0), random_teacher(0)
    card = find_technique("nat")
    with pytest.raises(
        TinyspecError,
        match="10 samples need a teacher to choose among them: give one, or set samples",
    ):
        card.refiner(RefineRequest(model))
    with pytest.raises(
        TinyspecError,
        match="has no positional attention, so it is no NAT: use a model that was trained",
    ):
        card.refiner(
            RefineRequest(Seq2Seq(replace(model.config, positional=False), model.weights)),
            samples=1,
        )
    with pytest.raises(TinyspecError, match="has no fertility head, so it is no NAT"):
        card.refiner(RefineRequest(judge), samples=1)
    other = Seq2Seq.create(replace(judge.config, vocab_size=9), torch.Generator())
    with pytest.raises(TinyspecError, match="another vocabulary"):
        card.refiner(RefineRequest(model, other), samples=2)
    with pytest.raises(
        TinyspecError, match="does not write from left to right, so it judges nothing"
    ):
        card.refiner(RefineRequest(model, model), samples=2)
    with pytest.raises(TinyspecError, match="has 8 positions, fewer than student"):
        card.refiner(RefineRequest(model, random_teacher(0, positions=8)), samples=2)
    with pytest.raises(TinyspecError, match="samples is 0: it must be from 1 to 1024"):
        card.refiner(RefineRequest(model), samples=0)
    with pytest.raises(
        TinyspecError, match="fertility is 'mean': it must be one of argmax, average"
    ):
        card.refiner(RefineRequest(model), fertility="mean")
    with pytest.raises(
        TinyspecError, match="the source has 25 tokens, student has 24 positions: shorten it"
    ):
        run(model, None, (4,) * 25, samples=1)
    with pytest.raises(TinyspecError, match="the source is empty"):
        run(model, None, (), samples=1)
    with pytest.raises(TinyspecError, match="fertilities do not add up to the targets' lengths"):
        nat.nat_loss(model, (SOURCE, TARGET, COUNTS + 1))
