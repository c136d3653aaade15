"""SynST: predict the chunks of a translation from left to right, then all its words at once.

Paper: Akoury, Krishna, Iyyer, ACL 2019, arXiv 1906.02780. What is said of their training was read
in the authors' code (github.com/dojoteef/synst, commit a184268).

Idea. Words that are written at once do not know which translation the others belong to. SynST
first settles how the sentence is built. A small *parse decoder* predicts its syntactic chunks,
from left to right: "a noun phrase of 3 tokens, a verb phrase of 1, a prepositional phrase of 4".
These are few steps. Then the decoder writes all words in one pass. It reads each chunk and, after
it, a mask for each token of the chunk, and every position sees all. The sizes of the chunks add up
to the length of the translation, so no other part has to predict it.

    p(y | x)   = product over c of p(c_i | c_<i, x)  *  product over t of p(y_t | c, x)
    inputs     = c_1 MASK .. MASK  c_2 MASK .. MASK  ...          size(c_i) masks after c_i
    L          = - log p(c | x) - sum over t of log p(y_t | c, x)
    passes     = chunks + 2                                       their end, and the words

Training. Chunks come from the tree of the target (chunks.py). For each sentence of a batch, k, the
most tokens of a chunk, is drawn from 1 to 6; so the model meets fine and coarse chunks, and in use
it writes what it finds likeliest. (This is an option of the authors' code; its default is 6.) The
targets are the teacher's (distillation). The words' labels are smoothed if the recipe says so, the
chunks' are not.

Guarantee: APPROX: no setting gives the teacher's distribution. The code that runs is compared with
a second version in plain lists (laws/traps/synst.py).
Pitfall: groups of a fixed size under the name of chunks; sizes without labels; a word decoder that
does not read the chunks; scores with the chunks of the reference, which no translator knows.
Ablation: groups of a fixed size in the place of chunks. Then the orders of two dialects are mixed
(a test).
Tests: tests/nonautoregressive/test_synst.py (`translate_by_chunks` against the code that runs; beam
search over chunks against all of them; the loss; chunks; the ablation on dialects whose trees are
known).
Ours: **the trees are made by a chunker of function words, not by a parser**, because no German
parser comes with our packages; the layers begin as the teacher's; a chunk longer than `longest` is
cut; the first chunk is never the end, sizes that pass the limit of a translation are impossible,
and so are special tokens as words; beam search compares the mean log-probability of chunks.
Left out: predicting the chunks once more in the last pass, as the authors' decoder does: ours only
reads them. Their length penalty. Words of several beams: the words of the best chunks alone are
written.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from tinyspec.decoding.beam import BeamSearch
from tinyspec.decoding.refine import Canvas, blank_canvas
from tinyspec.decoding.rng import RandomSource
from tinyspec.errors import TinyspecError
from tinyspec.lm.config import Seq2SeqConfig
from tinyspec.lm.seq2seq import EncoderOutput, Lockstep, Seq2Seq
from tinyspec.lm.tokenizer import Tokenizer
from tinyspec.nonautoregressive.chunks import LABELS, Chunk, GermanChunker, Tree, cut_tree
from tinyspec.nonautoregressive.nat import forbid_special_tokens
from tinyspec.nonautoregressive.refine_many import translate_sources
from tinyspec.technique import (
    Guarantee,
    Knob,
    RefineRequest,
    TrainedTranslator,
    TranslatorTraining,
    check_ranges,
    technique,
)
from tinyspec.translation import limit_lengths

PARSER = "parser"  # name of the parse decoder
CHUNKS = "chunks"  # the table of chunk ids; a name without a dot is trained as an embedding
END = 0  # id of the end of the chunks; the others follow, and the last row of the table begins them
WORD, PADDING = -1, -2  # in a layout, beside chunk ids
REMEDY = "train a model from models/multi30k-synst/recipe.toml (tinyspec train mt)"

Parse = Callable[[Sequence[int]], Tree]


def translate_by_chunks(
    predict_chunk: Callable[[list[int]], int],
    predict_words: Callable[[list[int]], list[int]],
    size: Callable[[int], int],
) -> list[int]:
    """Return a translation (section 3).

    predict_chunk  the chunks so far -> the likeliest next one, END after the last
    predict_words  a layout: every chunk, and WORD for each of its tokens -> the likeliest words
    size           tokens of a chunk

    `SynstRefiner` keeps keys and values of earlier chunks. A test compares the two.

    >>> chunks = iter([12, 11, END])
    >>> translate_by_chunks(lambda so_far: next(chunks), lambda layout: layout, lambda c: c - 10)
    [12, -1, -1, 11, -1]
    """
    chunks = list[int]()
    while (chunk := predict_chunk(chunks)) != END:
        chunks.append(chunk)
    return predict_words([part for one in chunks for part in (one, *[WORD] * size(one))])


# ------------------------------ chunk ids


@dataclass(frozen=True)
class SynstSettings:
    """Section [translator] of a recipe.

    k          most tokens of a chunk of several words
    random_k   whether k is drawn from 1 to `k` for each sentence
    longest    tokens of the longest chunk that has an id
    """

    k: int = 6
    random_k: bool = True
    longest: int = 12

    def __post_init__(self) -> None:
        check_ranges(self, {"k": 256, "longest": 256})
        if self.k > self.longest:
            raise TinyspecError(
                f"k is {self.k}, longest is {self.longest}: set longest to at least {self.k}"
            )
        if not isinstance(self.random_k, bool):
            raise TinyspecError(f"random_k is {self.random_k}: it must be true or false")


def encode_chunks(chunks: Sequence[Chunk], longest: int) -> list[int]:
    """Return the ids of chunks; one of more than `longest` tokens is cut.

    >>> encode_chunks([("S", 2), ("CL", 5)], 3)
    [2, 6, 5]
    """
    ids = list[int]()
    for label, size in chunks:
        first = 1 + LABELS.index(label) * longest
        whole, rest = divmod(size, longest)
        ids += [first + longest - 1] * whole + ([first + rest - 1] if rest else [])
    return ids


def chunk_size(chunk: int, longest: int) -> int:
    """Return the number of tokens of a chunk id; the end has none."""
    return (chunk - 1) % longest + 1 if chunk != END else 0


def lay_out(rows: Sequence[Sequence[int]], longest: int) -> Tensor:
    """Return what the decoder reads, [B, L]: each chunk id, and WORD for each of its tokens.

    Rows are filled up with PADDING.
    """
    parts = [
        [part for chunk in row for part in (chunk, *[WORD] * chunk_size(chunk, longest))]
        for row in rows
    ]
    room = max(map(len, parts), default=0)
    return torch.tensor([[*row, *[PADDING] * (room - len(row))] for row in parts], dtype=torch.long)


# ------------------------------ training (section 3.2, 4)


def word_states(
    model: Seq2Seq, layout: Tensor, memory: EncoderOutput, dropout: float = 0.0
) -> Tensor:
    """Return the states [B, L, d] of one decoder pass over a layout; every position sees all."""
    mask = model.embed_words(torch.tensor(model.config.mask, device=layout.device))
    chunks = model.embed_words(layout.clamp(min=END), model.weights[CHUNKS])
    inputs = torch.where((layout >= END)[..., None], chunks, mask)
    return model.decode(model.place(inputs), memory, None, dropout, layout != PADDING)


def synst_loss(
    model: Seq2Seq,
    batch: tuple[Tensor, ...],
    chunks: Sequence[Sequence[int]],
    longest: int,
    dropout: float = 0.0,
    smoothing: float = 0.0,
) -> Tensor:
    """Return - log p(c|x) - sum over t of log p(y_t|c, x), per target token.

    batch   sources [B, S] and targets [B, T], padded at the end
    chunks  ids of each target's chunks, whose sizes add up to its tokens
    """
    (source, target), device = batch, batch[0].device
    table, pad = model.weights[CHUNKS], model.config.pad
    memory = model.encode(source, dropout)
    # 1. Chunks: each is predicted from those before it, and the end from all.
    room = max(map(len, chunks)) + 1
    labels = torch.tensor([[*row, END, *[-1] * (room - 1 - len(row))] for row in chunks])
    labels = labels.to(device)
    read = F.pad(labels[:, :-1], (1, 0), value=len(table) - 1).clamp(min=END)
    causal = torch.ones(room, room, dtype=torch.bool, device=device).tril()
    inputs = model.place(model.embed_words(read, table))
    states = model.decode(inputs, memory, causal, dropout, stack=PARSER)
    is_chunk = labels >= END
    logits = model.logits(states[is_chunk], table)
    structure = F.cross_entropy(logits, labels[is_chunk], reduction="sum")
    # 2. Words: all at once, given the chunks.
    layout = lay_out(chunks, longest).to(device)
    states = word_states(model, layout, memory, dropout)[layout == WORD]
    is_word = target != pad
    words = F.cross_entropy(
        model.logits(states), target[is_word], reduction="sum", label_smoothing=smoothing
    )
    return (structure + words) / is_word.sum()


@lru_cache(maxsize=4)
def german_chunker(tokenizer: Tokenizer) -> GermanChunker:
    """Return the chunker of a tokenizer, which remembers its words."""
    return GermanChunker(tokenizer)


def cut_targets(
    target: Tensor,
    pad: int,
    parse: Parse,
    settings: SynstSettings,
    generator: torch.Generator | None = None,
) -> list[list[int]]:
    """Return the chunk ids of each target [B, T].

    generator  draws k of each sentence, where the settings say so; None: k is the settings'
    """
    most = [settings.k] * len(target)
    if settings.random_k and generator is not None:
        drawn = torch.randint(
            1, settings.k + 1, (len(target),), generator=generator, device=generator.device
        )
        most = drawn.tolist()
    rows = [row[row != pad].tolist() for row in target]
    return [
        encode_chunks(cut_tree(parse(row), k), settings.longest)
        for row, k in zip(rows, most, strict=True)
    ]


def synst_batch_loss(
    training: TranslatorTraining, batch: tuple[Tensor, ...], generator: torch.Generator
) -> Tensor:
    """Return `synst_loss` of a batch of the trainer, whose targets are German."""
    model, settings = training.model, training.settings
    parse = german_chunker(model.tokenizer).parse
    chunks = cut_targets(batch[1], model.config.pad, parse, settings, generator)
    options = training.dropout, training.smoothing
    return synst_loss(model, batch, chunks, settings.longest, *options)


def judge_words_of_right_chunks(
    model: Seq2Seq,
    settings: SynstSettings,
    source: Tensor,
    target: Tensor,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Return the share of each target's words that are right if its chunks are given."""
    parse, pad = german_chunker(model.tokenizer).parse, model.config.pad
    chunks = cut_targets(target, pad, parse, settings)
    layout = lay_out(chunks, settings.longest).to(source.device)
    states = word_states(model, layout, model.encode(source))[layout == WORD]
    is_word = target != pad
    right = torch.zeros(target.shape, device=source.device)
    right[is_word] = (model.logits(states).argmax(dim=-1) == target[is_word]).float()
    return {"words_given_chunks": right.sum(dim=1) / is_word.sum(dim=1)}


# ------------------------------ decoding (section 3)


class ChunkState(NamedTuple):
    """What is known beside the canvas.

    rows     keys and values of the live sequences of chunks
    search   the sequences of chunks; its limits count words
    written  whether the words stand on the canvas
    """

    rows: Lockstep
    search: BeamSearch
    written: bool = False


class SynstRefiner:
    """Add a chunk in each pass, then write all words in one. `extra` of its canvas is a ChunkState.

    The canvas has `beam` candidates of each source, the best first, and a mask for each token of
    their chunks. The last pass writes the words of the best.
    """

    def __init__(self, model: Seq2Seq, longest: int, beam: int = 1):
        self.model, self.longest, self.beam = model, longest, beam
        sizes = [chunk_size(chunk, longest) for chunk in range(len(model.weights[CHUNKS]) - 1)]
        self.sizes = torch.tensor(sizes, device=model.device)

    def start(self, source: Sequence[int], memory: EncoderOutput, rng: RandomSource) -> Canvas:
        """Return a canvas without slots."""
        empty = torch.zeros(self.beam, 0, dtype=torch.long, device=self.model.device)
        return Canvas(empty, empty.bool(), empty.to(self.model.dtype))

    def begin_search(self, memory: EncoderOutput) -> ChunkState:
        """Return the state before the first chunk.

        memory  a row for each source
        """
        most = limit_lengths(memory, self.model.config.max_positions // 2)
        rows = Lockstep(self.model, memory, max(most) + 1, PARSER, self.model.weights[CHUNKS])
        return ChunkState(rows, BeamSearch.begin(END, most, self.beam))

    def rewrite(
        self, canvas: Canvas, memory: EncoderOutput, iteration: int, rng: RandomSource
    ) -> Canvas:
        """Add the next chunks, or write the words if all chunks are there."""
        memory = memory.select_rows(range(0, len(memory.mask), self.beam))
        state: ChunkState = self.begin_search(memory) if iteration == 0 else canvas.extra
        if not state.search.live:
            return self.write_words(canvas, state, memory)
        rows, search = copy(state.rows), state.search
        begin = len(self.sizes)
        newest = [one.text[-1] if one.text else begin for one in search.live]
        logits = rows.step(torch.tensor(newest))[:, :begin]
        left = [search.limits[one.source] - self.count_words(one.text) for one in search.live]
        too_long = self.sizes > torch.tensor(left, device=self.sizes.device)[:, None]
        logits = logits.masked_fill(too_long, -torch.inf)
        if iteration == 0:
            logits[:, END] = -torch.inf  # a translation has at least one word
        search, continued, _ = search.advance(logits)
        if search.live:
            rows.select(continued)
        counts = [self.count_words(one.text) for one in search.list_candidates()]
        room = max(1, canvas.tokens.shape[1])
        blank = blank_canvas(counts, self.model.config.mask, self.model.device, room)
        return blank._replace(extra=state._replace(rows=rows, search=search))

    def count_words(self, chunks: Sequence[int]) -> int:
        """Return the number of tokens of these chunks."""
        return sum(chunk_size(chunk, self.longest) for chunk in chunks)

    def lay_out_best(self, search: BeamSearch) -> Tensor:
        """Return the layout [B, L] of the best chunks of every source."""
        best = search.list_candidates()[:: self.beam]
        return lay_out([one.text for one in best], self.longest).to(self.model.device)

    def write_words(self, canvas: Canvas, state: ChunkState, memory: EncoderOutput) -> Canvas:
        """Write the words of the best chunks of every source."""
        layout = self.lay_out_best(state.search)
        states = word_states(self.model, layout, memory)[layout == WORD]
        logits = forbid_special_tokens(self.model, self.model.logits(states))
        best, words = logits.log_softmax(dim=-1).max(dim=-1)
        counts = [n for row in layout for n in (int((row == WORD).sum()), *[0] * (self.beam - 1))]
        room = max(1, canvas.tokens.shape[1])
        blank = blank_canvas(counts, self.model.config.pad, self.model.device, room)
        tokens, mask, scores = blank.tokens, blank.mask, blank.scores.to(best.dtype)
        tokens[mask], scores[mask] = words, best
        return Canvas(tokens, mask, scores, state._replace(written=True))

    def finished(self, canvas: Canvas, iteration: int) -> bool:
        return iteration > 0 and bool(canvas.extra.written)

    def choose(self, canvas: Canvas, source: Sequence[int], memory: EncoderOutput) -> int:
        return 0

    def count_rows(self, before: Canvas, after: Canvas) -> int:
        """Return how many positions the pass between two canvases reads."""
        if not after.extra.written:
            fresh = before.extra is None
            return len(before.tokens) // self.beam if fresh else len(before.extra.search.live)
        return self.lay_out_best(after.extra.search).numel()


# ------------------------------ the card


def chunk_heads(config: Seq2SeqConfig, settings: SynstSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of the table of chunk ids."""
    return {CHUNKS: (2 + len(LABELS) * settings.longest, config.d_model)}


def fits_layout(config: Seq2SeqConfig, settings: SynstSettings, source: int, target: int) -> bool:
    """Return whether a target fits into the positions beside a chunk for each of its tokens."""
    return 0 < target <= config.max_positions // 2


def translate_likeliest_chunks(
    model: Seq2Seq, settings: SynstSettings, sources: Tensor
) -> list[list[int]]:
    """Return translations of padded sources [B, S]."""
    return translate_sources(model, sources, SynstRefiner(model, settings.longest))


@technique(
    title="SynST: syntactically supervised translation",
    summary="predicts chunks, then all words at once",
    paper="Akoury et al. 2019, arXiv 1906.02780",
    family="nonautoregressive",
    guarantee=Guarantee.APPROX,
    kind="refine",
    translator=TrainedTranslator(
        synst_batch_loss,
        translate_likeliest_chunks,
        "It predicts syntactic chunks from left to right, then all words at once (`synst`). Its "
        "chunks have at most {settings.k} tokens or one word, and come from a chunker of German "
        "function words, not from a parser.",
        shape={"stacks": {PARSER: 1}, "positional": False},
        settings=SynstSettings,
        fits=fits_layout,
        figures=judge_words_of_right_chunks,
        equip=lambda config, settings: replace(config, heads=chunk_heads(config, settings)),
    ),
    knobs=(Knob("beam", 1, "sequences of chunks that are kept at once", low=1, high=512),),
)
def synst(request: RefineRequest, *, beam: int) -> SynstRefiner:
    """Return a refiner that adds a chunk in each pass, then writes all words in one."""
    model = request.model
    c, longest = model.config, model.config.extra.get("longest")
    ids = c.heads.get(CHUNKS, (0,))[0]
    if PARSER not in c.stacks or type(longest) is not int or ids != 2 + len(LABELS) * longest:
        lacks = "parse decoder" if PARSER not in c.stacks else "table of chunks"
        raise TinyspecError(f"{model.name} has no {lacks} (config.json): {REMEDY}")
    if c.positional:
        raise TinyspecError(
            f"{model.name} attends by position over a whole target, so it cannot predict chunks "
            f"from left to right: {REMEDY}"
        )
    return SynstRefiner(model, longest, beam)
