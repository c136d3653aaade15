"""SynST: chunks from left to right, all words in one pass, and what the chunks are good for."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.nonautoregressive.test_nat import fit
from tinyspec.decoding.refine import Pass, Refinement, refine
from tinyspec.decoding.rng import Seeded
from tinyspec.errors import TinyspecError
from tinyspec.laws.traps.synst import (
    SOURCES,
    TRAPS,
    chunk_writer,
    limit_words,
    score_next_chunks,
    size_of,
    write_given_chunks,
)
from tinyspec.lm import blocks, seq2seq
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.nonautoregressive.chunks import Chunk, GermanChunker, Tree, cut_tree, join_trees
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.nonautoregressive.synst import (
    PARSER,
    WORD,
    SynstRefiner,
    SynstSettings,
    chunk_heads,
    cut_targets,
    encode_chunks,
    fits_layout,
    lay_out,
    synst_batch_loss,
    synst_loss,
    translate_by_chunks,
    translate_likeliest_chunks,
    word_states,
)
from tinyspec.technique import Guarantee, RefineRequest, TranslatorTraining, find_technique
from tinyspec.training.bitext import pad_sequences, train_joint_tokenizer
from tinyspec.training.dialects import DialectPair, Dialects
from tinyspec.training.recipe import read_translation_recipe

DEFAULTS = SynstSettings()
RECIPE = Path(__file__).parents[2] / "models/multi30k-synst/recipe.toml"


def run(model: Seq2Seq, source: Any, **knobs: Any) -> tuple[Refinement, list[Pass]]:
    request = RefineRequest(model, forward_log=[])
    refiner = find_technique("synst").refiner(request, **knobs)
    running = refine(request.model, source, refiner, Seeded(0), request.forward_log)
    passes = list(running)
    for step in passes:
        read = [call.rows for call in step.calls if call.model == model.name]
        assert read == [refiner.count_rows(step.before, step.after)]
    return running, passes


@pytest.mark.parametrize("longest", [1, 2, 4])
def test_printed_algorithm_is_what_runs(longest: int) -> None:
    lengths = set()
    for seed, source in product(range(5), SOURCES):
        model = chunk_writer(seed, longest)

        def predict_chunk(chunks: list[int], model: Any = model, source: Any = source) -> int:
            row = score_next_chunks(model, source, longest, tuple(chunks))
            return row.index(max(row))

        def predict_words(layout: list[int], model: Any = model, source: Any = source) -> list[int]:
            given = [part for part in layout if part != WORD]
            return write_given_chunks(model, source, longest, given)[0]

        expected = translate_by_chunks(predict_chunk, predict_words, lambda c: size_of(c, longest))
        running, passes = run(model, source)
        assert running.tokens == expected
        lengths.add(len(passes))
    assert len(lengths) > 2


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.law)
def test_it_passes_its_traps(trap: Any) -> None:
    assert trap.check(trap.real()).cases > 0


def test_a_canvas_shows_a_mask_for_each_token_of_the_chunks() -> None:
    model = chunk_writer(1, 3, 40)
    running, passes = run(model, (4, 7, 5))
    mask = model.config.mask
    counts = [int(step.after.mask.sum()) for step in passes]
    assert counts[-3:] == [len(running.tokens)] * 3 and counts == sorted(counts)  # end, and words
    for step in passes[:-1]:
        assert set(step.after.text(0)) == {mask}
    assert mask not in running.tokens
    assert [call.model for call in running.forward_log] == ["reader/encoder"] + ["reader"] * len(
        passes
    )


@pytest.mark.parametrize("beam", [1, 3])
def test_a_batch_of_sources_is_translated_as_each_alone(beam: int) -> None:
    """Other sources have more chunks, and wait for nobody's words but their own."""
    passes = set[int]()
    for seed in range(4):
        model = chunk_writer(seed, 3, 40)
        alone = [run(model, source, beam=beam) for source in SOURCES]
        passes |= {len(steps) for _, steps in alone}
        padded, refiner = pad_sequences(SOURCES), SynstRefiner(model, 3, beam)
        assert translate_sources(model, padded, refiner) == [one.tokens for one, _ in alone]
        if beam == 1:
            settings = SynstSettings(3, longest=3)
            assert translate_likeliest_chunks(model, settings, padded) == [
                one.tokens for one, _ in alone
            ]
    assert len(passes) > 2


def test_a_canvas_can_be_rewritten_again() -> None:
    """The keys and values of a chunk belong to the canvas that it was added to."""
    model, rng = chunk_writer(0, 2, 40), Seeded(0)
    refiner, memory = SynstRefiner(model, 2, 2), model.encode(torch.tensor([SOURCES[3]]))
    first = refiner.rewrite(refiner.start(SOURCES[3], memory, rng), memory, 0, rng)
    second, again = (refiner.rewrite(first, memory, 1, rng) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(second[:3], again[:3], strict=True))
    assert first.extra.rows.length == 1 and second.extra.rows.length == 2


def test_a_translation_keeps_to_the_limit_and_has_a_word() -> None:
    full = 0
    for seed, source, positions in product(range(6), SOURCES, (8, 13)):
        model = chunk_writer(seed, 5, positions)
        model.weights["chunks"][0] *= 5 * (seed % 2)  # the end: liked, or never
        running, _ = run(model, source[:positions])
        most = limit_words(model, source)
        assert 1 <= len(running.tokens) <= most == positions // 2
        full += len(running.tokens) == most
    assert full


# ---------------------------------------------------------------------- chunks


@pytest.fixture(scope="module")
def german(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    texts = [
        "Ein kleiner Hund rennt durch das hohe Gras.",
        "Zwei Männer stehen am Herd und bereiten Essen zu, während ein Kind schläft.",
        "Der Mann mit dem T-Shirt ist groß.",
    ]
    return train_joint_tokenizer(3 * texts, 600, tmp_path_factory.mktemp("german"))


def name_chunks(tokenizer: Tokenizer, text: str, k: int) -> list[str]:
    """Return the chunks of a text with their words, as 'NP Ein Hund'."""
    ids, named = tokenizer.encode(text), list[str]()
    for label, size in cut_tree(GermanChunker(tokenizer).parse(ids), k):
        named.append(f"{label} {tokenizer.decode(ids[:size])}")
        ids = ids[size:]
    assert not ids
    return named


def count_most(tokenizer: Tokenizer, *phrases: str) -> int:
    return max(len(tokenizer.encode(phrase)) for phrase in phrases)


def test_function_words_open_phrases(german: Tokenizer) -> None:
    """k is the length of the longest phrase, which a clause exceeds."""
    phrases = ("Ein kleiner Hund", "rennt", "durch das hohe Gras")
    k = count_most(german, *phrases)
    assert name_chunks(german, "Ein kleiner Hund rennt durch das hohe Gras.", k) == [
        "NP Ein kleiner Hund",
        "VP rennt",
        "PP durch das hohe Gras",
        "PU .",
    ]
    parts = ("Der Mann", "mit dem T-Shirt", "ist groß")
    k = count_most(german, *parts)
    assert name_chunks(german, "Der Mann mit dem T-Shirt ist groß.", k) == [
        "NP Der Mann",
        "PP mit dem T-Shirt",
        "VP ist groß",
        "PU .",
    ]


def test_conjunctions_and_marks_divide_clauses(german: Tokenizer) -> None:
    text = "Zwei Männer stehen am Herd und bereiten Essen zu, während ein Kind schläft."
    clauses = ("Zwei Männer stehen am Herd", "und bereiten Essen zu,", "während ein Kind schläft.")
    k = count_most(german, *clauses)
    found = name_chunks(german, text, k)
    assert found == [f"CL {clause}" for clause in clauses]


def test_chunks_of_one_token_are_words(german: Tokenizer) -> None:
    """A phrase of one word, as that of the full stop, is a constituent above it."""
    named = name_chunks(german, "Der Mann ist groß.", 1)
    assert named == ["DET Der", "NOUN Mann", "AUX ist", "WORD groß", "PU ."]


def test_a_preposition_leads_what_follows_up_to_its_noun(german: Tokenizer) -> None:
    """A mark ends a clause, with or without a conjunction after it."""
    ids = german.encode(
        "Auf dem Platz der Stadt sitzt neben ihm ein Hund, er schläft bei ihm tief."
    )
    clauses, at = list[list[str]](), 0
    for clause in GermanChunker(german).parse(ids).children:
        clauses.append([])
        for phrase in clause.children:
            text = german.decode(ids[at : at + phrase.leaves])
            clauses[-1].append(f"{phrase.label} {text.strip()}")
            at += phrase.leaves
    assert clauses == [
        ["PP Auf dem Platz", "NP der Stadt", "VP sitzt", "PP neben ihm", "NP ein Hund", "PU ,"],
        ["NP er", "VP schläft", "PP bei ihm", "VP tief", "PU ."],
    ]


def test_any_ids_have_a_tree(german: Tokenizer) -> None:
    """Also ids that the tokenizer lacks, marks alone, and a continuation that opens a text."""
    chunker, generator = GermanChunker(german), torch.Generator().manual_seed(0)
    for _ in range(200):
        n = int(torch.randint(1, 12, (1,), generator=generator))
        ids = torch.randint(0, 650, (n,), generator=generator).tolist()
        tree = chunker.parse(ids)
        assert tree.leaves == n and sum(size for _, size in cut_tree(tree, 3)) == n


# ---------------------------------------------------------------------- training


def test_k_is_drawn_for_each_sentence() -> None:
    words = (Tree("DET", 1), Tree("NOUN", 1), Tree("WORD", 1))
    tree = join_trees("S", [join_trees("NP", words[:2]), words[2]])
    target = torch.full((300, 3), 5)
    settings, generator = SynstSettings(3, longest=3), torch.Generator().manual_seed(0)
    drawn = cut_targets(target, 0, lambda ids: tree, settings, generator)
    cuts = [encode_chunks(cut_tree(tree, k), 3) for k in (1, 2, 3)]
    assert all(80 < drawn.count(cut) < 120 for cut in cuts) and len(drawn) == 300
    for given, chosen in ((settings, None), (SynstSettings(3, False, 3), generator)):
        assert cut_targets(target[:2], 0, lambda ids: tree, given, chosen) == [cuts[2]] * 2


def test_what_a_recipe_says_reaches_the_loss(german: Tokenizer) -> None:
    config = Seq2SeqConfig(
        600, 16, 2, 24, 1, 1, 64, heads=chunk_heads(Seq2SeqConfig(600, 16, 2, 24, 1, 1), SynstSettings()),
        stacks={PARSER: 1},
    )  # fmt: skip
    model = Seq2Seq.create(config, torch.Generator().manual_seed(0), tokenizer=german)
    ids = german.encode("Ein kleiner Hund rennt durch das hohe Gras.")
    batch = pad_sequences([ids, ids[:5]]), pad_sequences([ids, ids[2:9]])

    def loss(settings: Any, dropout: float = 0.0, smoothing: float = 0.0, seed: int = 0) -> float:
        torch.manual_seed(0)
        training = TranslatorTraining(model, None, settings, dropout, smoothing, 1.0)
        return float(synst_batch_loss(training, batch, torch.Generator().manual_seed(seed)))

    fixed, fine = SynstSettings(6, False), SynstSettings(1, False)
    assert len({loss(fixed), loss(fine), loss(fixed, 0.5), loss(fixed, 0.0, 0.1)}) == 4
    assert len({loss(fixed, seed=seed) for seed in range(9)}) == 1
    assert len({loss(DEFAULTS, seed=seed) for seed in range(9)}) > 1
    model.embedding.zero_()  # all words are equally likely: smoothing their labels changes nothing
    assert loss(fixed, 0.0, 0.1) == pytest.approx(loss(fixed))


def test_dropout_reaches_the_encoder_the_chunks_and_the_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rates = list[float]()

    def record(x: torch.Tensor, p: float) -> torch.Tensor:
        rates.append(p)
        return x

    for module in (blocks, seq2seq):
        monkeypatch.setattr(module, "drop_out", record)
    batch = torch.tensor([[4, 6, 5]]), torch.tensor([[5, 8, 6]])
    synst_loss(chunk_writer(0, 3), batch, [[7, 2]], 3, 0.5)
    assert set(rates) == {0.5}


def test_every_weight_has_a_gradient() -> None:
    model = chunk_writer(0, 3)
    model = Seq2Seq(model.config, {name: w.clone() for name, w in model.weights.items()})
    for weight in model.parameters():
        weight.requires_grad_()
    batch = torch.tensor([[4, 6, 5], [7, 0, 0]]), torch.tensor([[5, 8, 6], [4, 4, 0]])
    synst_loss(model, batch, [[7, 2], [2]], 3).backward()
    without = [n for n, w in model.weights.items() if w.grad is None or not w.grad.abs().max()]
    assert without == []


def dialect_tree(pair: DialectPair) -> Tree:
    """Return the tree of a translation: phrases, and words whose class is their evenness."""
    words = [word - 4 for word in pair.source]
    phrases = [
        join_trees(
            "NP",
            [
                Tree("WORD" if words[pair.alignment[begin]] % 2 else "NOUN", end - begin)
                for begin, end in phrase
            ],
        )
        for phrase in pair.tree
    ]
    return join_trees("S", phrases)


def fixed_groups(pair: DialectPair) -> list[Chunk]:
    """Return the ablation: groups of two tokens, whose label says nothing."""
    whole, rest = divmod(len(pair.target), 2)
    return [("S", 2)] * whole + [("S", 1)] * rest


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ord", "lex"])
def test_chunks_settle_what_they_tell_of_a_dialect(kind: str) -> None:
    """The paper's idea, and its ablation. Raw data: no teacher has chosen.

    Chunks tell the order of a dialect, not its lexicon. Right translations of 100, of order,
    measured after 400 steps (here 300): 96, with groups of a fixed size 21; with chunks that are
    given 98, with groups 12.
    """
    task = Dialects((kind,), modes=2, words=12, shortest=4, longest=6)
    train, longest = task.sample_pairs(4000, 1), 4
    held = task.sample_pairs(100, 2, {pair.source for pair in train})
    sources = [pair.source for pair in held]
    settings = SynstSettings(2, longest=longest)
    config = Seq2SeqConfig(task.vocab_size, 48, 4, 96, 2, 2, 40, stacks={PARSER: 1})
    shares = {}

    def cut(pair: DialectPair, is_syntax: bool, k: int) -> list[int]:
        chunks = cut_tree(dialect_tree(pair), k) if is_syntax else fixed_groups(pair)
        return encode_chunks(chunks, longest)

    for is_syntax in (True, False):
        heads = chunk_heads(config, settings)
        made = replace(config, heads=heads)
        model = Seq2Seq.create(made, torch.Generator().manual_seed(0))

        def loss(model: Seq2Seq, batch: tuple[torch.Tensor, ...], _: Any) -> torch.Tensor:
            source, target, chunks = batch
            rows = [row[row != 0].tolist() for row in chunks]
            return synst_loss(model, (source, target), rows, longest)

        data = [
            (p.source, p.target, cut(p, is_syntax, 1 + number % 4 // 2))
            for number, p in enumerate(train)
        ]
        fit(loss, model, data, 300)
        outputs = translate_sources(model, pad_sequences(sources), SynstRefiner(model, longest))
        shares[is_syntax] = task.measure_quality(sources, outputs).valid
        given = [cut(pair, is_syntax, 1) for pair in held]
        shares[is_syntax, "given"] = share_given_chunks(model, held, given, longest)
    print(kind, shares)
    if kind == "lex":
        assert shares[True] < 0.4
    else:
        assert shares[True] > shares[False] + 0.3
        assert shares[True, "given"] > shares[False, "given"] + 0.3


def share_given_chunks(
    model: Seq2Seq, pairs: Sequence[DialectPair], chunks: Sequence[Sequence[int]], longest: int
) -> float:
    """Return how many targets are written word for word if their chunks are given."""
    right = 0
    for pair, row in zip(pairs, chunks, strict=True):
        layout = lay_out([row], longest)
        states = word_states(model, layout, model.encode(torch.tensor([pair.source])))
        words = model.logits(states[layout == WORD]).argmax(dim=-1).tolist()
        right += words == list(pair.target)
    return right / len(pairs)


# ---------------------------------------------------------------------- bad input, and the card


def test_bad_input_is_named() -> None:
    card, good = find_technique("synst"), chunk_writer(0, 2)
    with pytest.raises(TinyspecError, match="beam is 0: it must be from 1 to 512"):
        card.refiner(RefineRequest(good), beam=0)
    plain = Seq2Seq.create(Seq2SeqConfig(9, 8, 2, 12, 1, 1), torch.Generator().manual_seed(0))
    with pytest.raises(TinyspecError, match=r"has no parse decoder .*: train a model from models/"):
        card.refiner(RefineRequest(plain))
    for extra in ({}, {"longest": 3}, {"longest": "2"}, {"longest": True}):
        config = replace(good.config, extra=extra)
        with pytest.raises(TinyspecError, match="has no table of chunks"):
            card.refiner(RefineRequest(Seq2Seq(config, good.weights)))
    for settings, message in (
        ({"k": 0}, "k is 0: it must be a whole number from 1 to 256"),
        ({"k": 2.5}, "k is 2.5"),
        ({"longest": True}, "longest is True"),
        ({"k": 13}, "k is 13, longest is 12: set longest to at least 13"),
        ({"random_k": 1}, "random_k is 1: it must be true or false"),
    ):
        with pytest.raises(TinyspecError, match=message):
            SynstSettings(**settings)  # type: ignore[arg-type]
    with pytest.raises(TinyspecError, match="the source is empty"):
        run(good, ())


def test_the_card_and_the_recipe() -> None:
    card = find_technique("synst")
    assert (card.kind, card.guarantee, card.teacher) == ("refine", Guarantee.APPROX, False)
    assert {knob.name: knob.default for knob in card.knobs} == {"beam": 1}
    plan = read_translation_recipe(RECIPE)
    config = plan.config(4800)
    assert config.extra["longest"] == 12 and 2 * config.parameters() < 9e6
    assert [fits_layout(config, SynstSettings(), 5, n) for n in (0, 1, 100, 101)] == [
        False, True, True, False,
    ]  # fmt: skip
    with pytest.raises(TinyspecError, match=r"\[shape\] stacks is missing"):
        read_translation_recipe(RECIPE, {"shape.stacks": "{}"})
    with pytest.raises(TinyspecError, match="kk is not known"):
        read_translation_recipe(RECIPE, {"translator.kk": "3"})
