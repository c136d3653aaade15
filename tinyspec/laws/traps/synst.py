"""SynST (Akoury et al. 2019): chunks of a tree from left to right, then all words in one pass.

The oracle runs each pass by itself, and enumerates all sequences of chunks where there are few.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from random import Random

import torch
from torch import Tensor

from tinyspec.laws.evidence import accuse, collect_evidence, expect_equal
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.nonautoregressive_laws import Build, run_refinement
from tinyspec.laws.plain_lists import (
    Vector,
    find_likeliest_word,
    run_plain_pass,
    score_all_texts,
    search_by_rule,
    word_vector,
)
from tinyspec.laws.plain_lists import word_logits as all_word_logits
from tinyspec.laws.rewriting_laws import numbers_differ, reader_of
from tinyspec.laws.traps import Trap, refine_card
from tinyspec.lm.seq2seq import Seq2Seq
from tinyspec.nonautoregressive import chunks, synst
from tinyspec.nonautoregressive.chunks import LABELS, Chunk, Tree
from tinyspec.nonautoregressive.synst import SynstRefiner
from tinyspec.technique import RefineRequest, find_technique

CHUNKED = "chunks come from left to right, then all words in one pass (Akoury et al. 2019)"
SEARCHED = "a wide beam finds the likeliest of all sequences of chunks (Akoury et al. 2019)"
LEARNT = "a chunk is learnt from those before it, a word from all chunks (Akoury et al. 2019)"
CUT = "a chunk is the largest constituent of at most k tokens, or a word (Akoury et al. 2019)"
NAMED = "a chunk's label and size are told apart (Akoury et al. 2019)"

SOURCES = ((4,), (6, 5), (4, 7, 5), (8, 4, 6, 5, 7))
TOLERANCE = 1e-6  # of a loss, which is summed in float32
WIDE = 300  # a beam that holds all sequences of chunks of two tokens
LOUD = 3  # factor of the chunk table: random models like one chunk as well as another


def chunk_writer(seed: int, longest: int, positions: int = 16) -> Seq2Seq:
    """Return a random model with a parse decoder, whose chunks have at most `longest` tokens."""
    settings = {"k": longest, "longest": longest}
    model = reader_of(find_technique("synst").translator, seed, positions, **settings)
    model.weights["chunks"] *= LOUD
    model.weights["chunks"][0] *= LOUD  # the end, which one id of many else seldom is
    return model


def chunk_vector(model: Seq2Seq, chunk: int) -> Vector:
    """Return the embedding of a chunk id, times sqrt(d)."""
    scale = math.sqrt(model.config.d_model)
    return [x * scale for x in model.weights["chunks"][chunk].tolist()]


def size_of(chunk: int, longest: int) -> int:
    """Return the tokens of a chunk: ids count all sizes of a label, then those of the next."""
    sizes = [0, *(size for _ in LABELS for size in range(1, longest + 1))]
    return sizes[chunk]


def limit_words(model: Seq2Seq, source: Sequence[int]) -> int:
    """Return the limit of a translation: 1.5 |x| + 11 words, and half of the positions."""
    return min(math.floor(1.5 * len(source)) + 11, model.config.max_positions // 2)


def score_next_chunks(
    model: Seq2Seq, source: tuple[int, ...], longest: int, before: tuple[int, ...]
) -> list[float]:
    """Return log p of every chunk after those before it; 0 is their end."""
    table = model.weights["chunks"].tolist()
    inputs = [chunk_vector(model, chunk) for chunk in (len(table) - 1, *before)]
    state = run_plain_pass(model, source, inputs, lambda t, s: s <= t, "parser")[-1]
    left = limit_words(model, source) - sum(size_of(chunk, longest) for chunk in before)
    row = [
        sum(x * y for x, y in zip(state, vector, strict=True))
        if (chunk == 0 and before) or 0 < size_of(chunk, longest) <= left
        else -math.inf
        for chunk, vector in enumerate(table[:-1])
    ]
    scores: list[float] = torch.tensor(row, dtype=torch.float64).log_softmax(dim=-1).tolist()
    return scores


def write_given_chunks(
    model: Seq2Seq, source: tuple[int, ...], longest: int, given: Sequence[int]
) -> tuple[list[int], list[float], int]:
    """Return words, their log-probabilities, and how many positions the pass reads."""
    inputs, is_word = list[Vector](), list[bool]()
    for chunk in given:
        size = size_of(chunk, longest)
        masks = [word_vector(model, model.config.mask)] * size
        inputs += [chunk_vector(model, chunk), *masks]
        is_word += [False, *[True] * size]
    states = run_plain_pass(model, source, inputs, lambda t, s: True)
    best = [
        find_likeliest_word(model, state)
        for state, word in zip(states, is_word, strict=True)
        if word
    ]
    return [word for word, _ in best], [score for _, score in best], len(inputs)


@collect_evidence(CHUNKED)
def chunks_then_words(build: Build) -> Iterator[int]:
    """Check words, log-probabilities, passes and their positions, where the chunks are greedy."""
    counts = set[int]()
    for seed, source, longest, positions in product(range(4), SOURCES, (1, 3, 5), (16, 60)):
        model = chunk_writer(seed, longest, positions)
        request = RefineRequest(model, forward_log=[])
        run = run_refinement(build, request, source)
        given = list[int]()
        while True:
            row = score_next_chunks(model, source, longest, tuple(given))
            if (chunk := row.index(max(row))) == 0:
                break
            given.append(chunk)
        words, scores, read = write_given_chunks(model, source, longest, given)
        case = {"source": source, "chunks": given, "longest": longest, "reader": seed}
        expect_equal(CHUNKED, words, run.tokens, **case)
        if numbers_differ(scores, run.scores):
            accuse(CHUNKED, scores, run.scores, **case)
        rows = [call.rows for call in request.forward_log if call.model == model.name]
        expect_equal(CHUNKED, [*[1] * (len(given) + 1), read], rows, **case, counted="positions")
        counts.add(len(given))
        yield 0
    if len(counts) < 3:
        accuse(CHUNKED, "translations of several numbers of chunks", counts)


SEARCHES = ((1, 4, WIDE), (2, 4, WIDE), (3, 12, 2), (3, 12, 3))  # longest, positions, beam


@collect_evidence(SEARCHED)
def searches_over_chunks(build: Build) -> Iterator[int]:
    """Check the words that stand in the chunks that are found, by the mean with their end.

    A beam that holds all sequences finds the likeliest; a narrow one, what the rule finds.
    """
    for seed, source, (longest, positions, beam) in product(range(4), SOURCES[:2], SEARCHES):
        model = chunk_writer(seed, longest, positions)
        after = cache(partial(score_next_chunks, model, source, longest))
        limit = limit_words(model, source)
        if beam == WIDE:
            means = score_all_texts(after, 0, limit)
            given = max(means, key=means.__getitem__)
        else:
            given = search_by_rule(after, 0, limit, beam)
        words, scores, _ = write_given_chunks(model, source, longest, given)
        run = run_refinement(build, RefineRequest(model), source, beam=beam)
        case = {"source": source, "longest": longest, "chunks": given, "beam": beam, "reader": seed}
        expect_equal(SEARCHED, words, run.tokens, **case)
        if numbers_differ(scores, run.scores):
            accuse(SEARCHED, scores, run.scores, **case)
        yield 0


BATCH = ((4, 6, 5, 7), (7, 5)), ((5, 8, 6), (4, 4, 7, 5, 8))


@collect_evidence(LEARNT)
def loss_of_chunks_and_words(loss: Callable[..., Tensor]) -> Iterator[int]:
    """Check the loss of a padded batch against each pair alone."""
    longest, given = 3, ([7, 2], [1, 8, 2])
    for seed, pairs in product(range(4), ([0], [1], [0, 1], [1, 0])):
        model, total, count = chunk_writer(seed, longest), 0.0, 0
        for number in pairs:
            source, target, cut = BATCH[0][number], BATCH[1][number], given[number]
            table = model.weights["chunks"]
            inputs = [chunk_vector(model, chunk) for chunk in (len(table) - 1, *cut)]
            states = run_plain_pass(model, source, inputs, lambda t, s: s <= t, "parser")
            for state, chunk in zip(states, (*cut, 0), strict=True):
                row = table @ torch.tensor(state, dtype=torch.float64)
                total -= float(row.log_softmax(dim=-1)[chunk])
            inputs, places = [], list[int]()
            for chunk in cut:
                size = size_of(chunk, longest)
                places += range(len(inputs) + 1, len(inputs) + 1 + size)
                mask = word_vector(model, model.config.mask)
                inputs += [chunk_vector(model, chunk), *[mask] * size]
            states = run_plain_pass(model, source, inputs, lambda t, s: True)
            for place, word in zip(places, target, strict=True):
                row = torch.tensor(all_word_logits(model, states[place]), dtype=torch.float64)
                total -= float(row.log_softmax(dim=-1)[word])
            count += len(target)
        sides = (
            torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(side[number]) for number in pairs], batch_first=True
            )
            for side in BATCH
        )
        got = float(loss(model, tuple(sides), [given[number] for number in pairs], longest))
        if abs(got - total / count) > TOLERANCE:
            accuse(LEARNT, total / count, got, reader=seed, pairs=pairs)
        yield 0


def random_constituent(random: Random, depth: int = 4) -> Tree:
    """Return a tree whose words have one to three tokens."""
    if depth == 0 or random.random() < 0.3:
        return Tree(random.choice(LABELS), random.randint(1, 3))
    children = [random_constituent(random, depth - 1) for _ in range(random.randint(1, 4))]
    return Tree(random.choice(LABELS), sum(child.leaves for child in children), tuple(children))


def count_words(tree: Tree) -> int:
    """Return the number of words of a tree."""
    return sum(map(count_words, tree.children)) if tree.children else 1


def largest_that_fit(tree: Tree, k: int, is_inside: bool = False) -> list[Chunk]:
    """Return the constituents that fit and stand in none that fits. All of them are looked at."""
    fits = tree.leaves <= k or count_words(tree) == 1
    inner = [c for child in tree.children for c in largest_that_fit(child, k, is_inside or fits)]
    return [(tree.label, tree.leaves), *inner] if fits and not is_inside else inner


@collect_evidence(CUT)
def largest_constituents_are_chunks(cut: Callable[[Tree, int], list[Chunk]]) -> Iterator[int]:
    """Check random trees for every k, and what follows: sizes, words, the root, the number."""
    random = Random(0)
    for _ in range(200):
        tree = random_constituent(random)
        found = [cut(tree, k) for k in range(1, tree.leaves + 2)]
        for k, got in enumerate(found, 1):
            expect_equal(CUT, largest_that_fit(tree, k), got, tree=tree, k=k)
            expect_equal(CUT, tree.leaves, sum(size for _, size in got), tree=tree, k=k)
        expect_equal(CUT, [(tree.label, tree.leaves)], found[-1], tree=tree, k=tree.leaves + 1)
        expect_equal(CUT, count_words(tree), len(found[0]), tree=tree, k=1)
        numbers = [len(got) for got in found]
        expect_equal(CUT, sorted(numbers, reverse=True), numbers, tree=tree, counted="chunks")
        yield 0


@collect_evidence(NAMED)
def chunks_have_ids(encode: Callable[[Sequence[Chunk], int], list[int]]) -> Iterator[int]:
    """Check that every label and size has an id of its own, with this size; longer ones are cut."""
    for longest in (1, 2, 5):
        named = {
            (label, size): encode([(label, size)], longest)
            for label, size in product(LABELS, range(1, longest + 1))
        }
        ids = sorted(chunk for one in named.values() for chunk in one)
        expect_equal(NAMED, list(range(1, len(LABELS) * longest + 1)), ids, longest=longest)
        for (_, size), one in named.items():
            got = [synst.chunk_size(chunk, longest) for chunk in one]
            expect_equal(NAMED, [size], got, longest=longest)
        for label, extra in product(LABELS, range(3 * longest)):
            got = encode([(label, extra), ("S", 1)], longest)
            whole, rest = named[label, longest], named.get((label, extra % longest), [])
            expected = whole * (extra // longest) + rest + named["S", 1]
            expect_equal(NAMED, expected, got, longest=longest, size=extra)
        yield 0


TRAPS = [
    Trap(CHUNKED, chunks_then_words, refine_card("synst")),
    Trap(SEARCHED, searches_over_chunks, refine_card("synst")),
    Trap(LEARNT, loss_of_chunks_and_words, lambda: synst.synst_loss),
    Trap(CUT, largest_constituents_are_chunks, lambda: chunks.cut_tree),
    Trap(NAMED, chunks_have_ids, lambda: synst.encode_chunks),
]

_synst = partial(Toy, technique="synst")
READS = "chunks = model.embed_words(layout.clamp(min=END), model.weights[CHUNKS])"

TOYS = [
    _synst(
        "groups of a fixed size",
        "return [chunk for child in tree.children for chunk in cut_tree(child, k)]",
        """whole, rest = divmod(tree.leaves, k)
return [(tree.label, k)] * whole + [(tree.label, rest)] * bool(rest)""",
        chunks.cut_tree,
        law=CUT,
    ),
    _synst(
        "a phrase of one long word is taken apart",
        "if tree.leaves <= k or not only.children:",
        "if tree.leaves <= k or not tree.children:",
        chunks.cut_tree,
        law=CUT,
    ),
    _synst(
        "sizes without labels",
        "first = 1 + LABELS.index(label) * longest",
        "first = 1",
        synst.encode_chunks,
        law=NAMED,
    ),
    _synst(
        "words that do not read the chunks",
        READS,
        "chunks = mask.expand(*layout.shape, -1)",
        synst.word_states,
        law=CHUNKED,
    ),
    _synst(
        "words from left to right in the last pass",
        "return model.decode(model.place(inputs), memory, None, dropout, layout != PADDING)",
        """causal = torch.ones(2 * layout.shape[1:], dtype=torch.bool).tril()
return model.decode(model.place(inputs), memory, causal, dropout, layout != PADDING)""",
        synst.word_states,
        law=CHUNKED,
    ),
    _synst(
        "all chunks from the first one's state",
        "newest = [one.text[-1] if one.text else begin for one in search.live]",
        "newest = [begin for one in search.live]",
        SynstRefiner.rewrite,
        law=CHUNKED,
    ),
    _synst(
        "the shortest sequence of chunks, not the likeliest",
        "best = search.list_candidates()[:: self.beam]",
        """best = [
    min(search.candidates_of(n), key=lambda one: len(one.text)) for n in range(len(search.limits))
]""",
        SynstRefiner.lay_out_best,
        law=SEARCHED,
    ),
    _synst(
        "the chunks are given and never learnt",
        "return (structure + words) / is_word.sum()",
        "return words / is_word.sum()",
        synst.synst_loss,
        law=LEARNT,
    ),
    _synst(
        "a chunk is learnt from itself",
        "read = F.pad(labels[:, :-1], (1, 0), value=len(table) - 1).clamp(min=END)",
        "read = labels.clamp(min=END)",
        synst.synst_loss,
        law=LEARNT,
    ),
]
