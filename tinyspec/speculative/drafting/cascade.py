"""Cascade speculative drafting (CS Drafting): let smaller models draft for the draft model.

Paper: Chen et al., NeurIPS 2024, arXiv 2312.11462. Nothing is trained.

Idea. Two cascades. *Vertical*: a draft model does not generate token by token; it reviews what the
next smaller model drafted, and so on down to max-gram, which copies what followed the longest match
of the newest tokens in the text, or takes the most likely token of a bigram table. *Horizontal*:
the first draft tokens of a round are the most likely to be accepted, so the largest draft model
makes those and ever smaller ones the rest. A matrix of quotas K says both.

    K[1][i] = tokens that draft model i contributes to the target's draft
    K[i+1][j] = tokens that draft model j contributes when smaller models draft for model i, j > i

Lenience l: between draft models a token x is accepted with probability min(1, l p(x) / q(x)). A
token that passed a lenient review can no longer declare its distribution: it is a point mass, and
q(x) is 1. At temperature 0 a reviewer accepts its likeliest token, and any x with l p(x) > q(x), p
before the temperature. Towards the target l is 1. The authors run l = 2, 3 and 5; the default is 1.
(`speculative_decoding` has the scale the other way round: there l < 1 is lenient.)

Guarantee: EXACT. Each token declares the distribution it was committed under by the level that
finalized it. A copied token, and one that passed a lenient review, is a point mass.
Pitfall: declaring the distribution of the model that first proposed a token, not of its reviewer;
two levels with a constant gamma are no cascade. The released code decodes greedily only.
Tests: tests/speculative/test_cascade.py (`draft_cascade` against the code that runs, tokens and
forward passes of every level; each cascade alone, both and none; the longest match). `tinyspec laws
cascade` enumerates four levels.
Left out: the bigram table of Wikipedia. Here `sample` tokens of the smallest draft model's own
sampling run are counted (`tinyspec train ngrams` keeps a long run). The default K is that of the
released code's README, which says that the paper writes it as running sums. Ours: a level stops at
its quota. In the released code a review may exceed it, and max-gram always proposes 10 tokens.
Max-gram copies the latest match, of at most `longest` tokens; the released code the first one, and
it searches the draft too. In a lenient review the released code divides by the lower model's
probability; q(x) = 1 accepts less.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tinyspec._core import NgramIndex
from tinyspec.decoding.decode import BaseDrafter, Decoder, Round, TargetProbs, Verifier
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict, exclude_token, residual, verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.speculative.ngram import KatzModel, read_own_texts
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, Probs, TokenTree

RELEASED_QUOTAS = {1: "13,10/10", 2: "5,14,10/1,10/10"}
"""K for so many draft models: what the authors run beside LLaMA-7B and beside FLAN-T5-XXL."""

Quotas = tuple[tuple[int, ...], ...]


def draft_cascade(
    text: list[int],
    models: Sequence[Callable[[list[int], list[int]], list[int]]],
    max_gram: Callable[[list[int], int], list[int]],
    quotas: Quotas,
    room: int,
) -> list[int]:
    """Return the tokens that `models` and max-gram draft together, greedily (algorithm 1).

    models    from the largest to the smallest; each maps (text, draft) to its greedy tokens after
              the text and after each draft token, [len(draft) + 1], in one forward pass
    max_gram  maps (text, n) to at most n copied tokens
    quotas    K, for these models: row 0 says how many tokens each of them contributes
    room      most tokens to draft

    The decoder runs `CascadeDrafter`, which also samples. A test compares tokens and passes.
    """
    draft: list[int] = []
    for i, quota in enumerate(quotas[0]):  # the horizontal cascade
        end = min(len(draft) + quota, room)
        if i == len(models):
            draft += max_gram(text + draft, end - len(draft))
            break
        while len(draft) < end:  # the vertical cascade: model i reviews what is drafted for it
            inner = draft_cascade(
                text + draft, models[i + 1 :], max_gram, quotas[i + 1 :], end - len(draft) - 1
            )
            own = models[i](text + draft, inner)
            n = next((n for n, token in enumerate(inner) if token != own[n]), len(inner))
            draft += own[: n + 1]  # the accepted tokens, and the model's own next one
    return draft


def parse_quotas(quotas: str, drafts: int) -> Quotas:
    """Return K by rows, right of the diagonal: a column for each draft model and one for max-gram.

    >>> parse_quotas("5,14,10/1,10/10", 2)
    ((5, 14, 10), (1, 10), (10,))
    """
    if quotas == "auto" and drafts not in RELEASED_QUOTAS:
        raise TinyspecError(
            f"there are no quotas for {drafts} draft models in the released code: give quotas, as "
            f"{RELEASED_QUOTAS[2]} for 2"
        )
    rows = [
        row.split(",")
        for row in (RELEASED_QUOTAS[drafts] if quotas == "auto" else str(quotas)).split("/")
    ]
    if [len(row) for row in rows] != list(range(drafts + 1, 0, -1)) or not all(
        word.strip().isdecimal() for row in rows for word in row
    ):
        raise TinyspecError(
            f"the quotas {quotas!r} do not fit {drafts} draft model(s) and max-gram: give "
            f"{drafts + 1} rows, each a number shorter, as {RELEASED_QUOTAS[min(drafts, 2)]} for "
            f"{min(drafts, 2)}"
        )
    if not any(int(word) for word in rows[0]):
        raise TinyspecError(
            f"the quotas {quotas!r} draft nothing: the first row needs a number above 0"
        )
    return tuple(tuple(int(word) for word in row) for row in rows)


class MaxGramDrafter(BaseDrafter):
    """The lowest level: copy what followed the longest match, else ask the bigram table."""

    def __init__(self, longest: int, table: KatzModel | None):
        self.longest, self.table, self.index = longest, table, NgramIndex(longest)

    def write(
        self, text: Sequence[int], n: int, sampling: SamplingParams, rng: RandomSource
    ) -> tuple[list[int], list[Probs | None]]:
        """Return n tokens to continue the text, as point masses; fewer if nothing is known.

        They come with their distributions, which are all None.
        """
        line = list(text[-self.longest :])
        start = len(line)
        while len(line) - start < n:
            copied = self.index.lookup(line[-self.longest :], n + start - len(line), self.longest)
            token = self.table.most_likely(line) if self.table and not copied else None
            if not copied and token is None:
                break
            line += copied if token is None else [token]
        return line[start:], [None] * (len(line) - start)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.index.append(0, tokens)

    def observe(self, round: Round) -> None:
        self.index.append(0, round.tokens)

    def rewind(self, length: int) -> None:
        self.index.rewind(0, min(length, self.index.length(0)))

    def end(self) -> None:
        self.index.rewind(0, 0)


class CascadeDrafter(BaseDrafter):
    """Draft for one reviewer: each level below it contributes its quota, the largest first.

    ends      tokens that nothing follows
    notifies  whether it tells its levels what happens to the text. Other reviewers share them, so
              only the target's drafter does; the others catch up when they are to write
    """

    def __init__(
        self,
        below: Sequence[NestedDrafter | MaxGramDrafter],
        quotas: Sequence[int],
        ends: frozenset[int],
        notifies: bool = False,
    ):
        self.below, self.quotas, self.ends = below, quotas, ends
        self.listeners: Sequence[NestedDrafter | MaxGramDrafter] = below if notifies else ()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        text, dists, last = list(context), list[Probs | None](), len(context) + max_draft_depth
        for number, (level, quota) in enumerate(zip(self.below, self.quotas, strict=True)):
            n = min(quota, last - len(text))
            if n < 1:
                continue
            tokens, rows = level.write(text, n, sampling, rng.split("level", number))
            ended = [at for at, token in enumerate(tokens, 1) if token in self.ends]
            n_kept = ended[0] if ended else len(tokens)
            text += tokens[:n_kept]
            dists += rows[:n_kept]
            if ended:
                break
        return TokenTree.chain(text[len(context) :], dists)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        for level in self.listeners:
            level.extend(tokens, scores)

    def observe(self, round: Round) -> None:
        for level in self.listeners:
            level.observe(round)

    def rewind(self, length: int) -> None:
        for level in self.listeners:
            level.rewind(length)

    def end(self) -> None:
        for level in self.listeners:
            level.end()


def lenient_review(lenience: float) -> Verifier:
    """Return the verifier of a review between draft models, with this lenience l.

    A token is accepted with probability min(1, l p(x) / q(x)); q(x) is 1 for a point mass, and all
    tokens of a lenient cascade are point masses. At temperature 0 the reviewer accepts its
    likeliest token, and any token with l p(x) > q(x), where p is its distribution at temperature 1.
    The verifier raises TinyspecError if the draft branches.
    """

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        at, path = ROOT, list[int]()
        for node in tree.chain_nodes("a lenient review"):
            token, q = tree.tokens[node], tree.draft_probs[node]
            row, written = p[at], 1 if q is None else q[token]
            if p.sampling.temperature == 0:
                soft = p.probs_under(at, replace(p.sampling, temperature=1.0))
                passed = bool(row[token] > 0 or lenience * soft[token] > written)
            else:
                passed = rng.accept(lenience * row[token] / written)
            if not passed:
                rest = (
                    exclude_token(row, token)
                    if q is None
                    else residual(row, [x / lenience for x in q])
                )
                return Verdict(tuple(path), rng.draw(rest), (node,))
            path.append(node)
            at = node
        return Verdict(tuple(path), rng.draw(p[at]))

    return judge


def count_bigrams(draft: Any, tokens: int) -> KatzModel:
    """Return the bigram table of a draft model, counted once and kept while the model lives."""
    model = draft.model
    return per_model_state(
        draft,
        ("bigrams", tokens),
        lambda: KatzModel(read_own_texts(model, tokens), 2, model.config.vocab_size),
    )


@technique(
    title="Cascade speculative drafting",
    summary="small drafters draft for larger ones",
    paper="Chen et al. 2023, arXiv 2312.11462",
    reported="up to 1.81x over speculative decoding (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    several=True,
    knobs=(
        Knob(
            "quotas",
            "auto",
            "draft tokens of each level, one row for each reviewer, as 5,14,10/1,10/10 for two "
            "draft models (the last number of a row is max-gram's); auto: the released code's",
            small=("2,0,1/1,0/1", "1,1,1/1,1/1", "3,0,0/2,0/1"),
        ),
        Knob(
            "lenience",
            1.0,
            "l between draft levels: a token is accepted with min(1, l p / q); 1 is exact",
            low=1.0,
            high=100.0,
            small=(1.0, 2.0),
        ),
        Knob(
            "vertical",
            True,
            "whether a level's draft is drafted by the levels below it",
            choices=(True, False),
        ),
        Knob(
            "horizontal",
            True,
            "whether smaller levels write the end of a draft",
            choices=(True, False),
        ),
        Knob("longest", 10, "longest match that max-gram looks for, in tokens", low=1, high=64),
        Knob(
            "sample",
            2048,
            "tokens of the smallest draft model's own sampling run, for the bigram table; 0: none; "
            "more than 8192 need `tinyspec train ngrams` first",
            low=0,
            high=1 << 20,
            small=(6, 0),
        ),
    ),
)
def cascade(
    request: Request,
    *,
    quotas: str,
    lenience: float,
    vertical: bool,
    horizontal: bool,
    longest: int,
    sample: int,
) -> Decoder:
    """Return a decoder that drafts with all draft models, from the largest, and max-gram."""
    target: Any = request.target
    drafts: list[Any] = list(request.drafts)
    sizes = {model.model.config.vocab_size for model in (target, *drafts)}
    if len(sizes) > 1:
        raise TinyspecError(
            f"the levels of a cascade have vocabularies of {sorted(sizes)} tokens: use one "
            "tokenizer"
        )
    k = parse_quotas(quotas, len(drafts))
    if not horizontal:  # the first level makes the whole draft
        k = tuple((sum(row), *(0 for _ in row[1:])) for row in k)
    ends, table = request.stop.eos, count_bigrams(drafts[-1], sample) if sample else None
    below: list[NestedDrafter | MaxGramDrafter] = [MaxGramDrafter(longest, table)]
    reach: Sequence[int | None] = request.draft_max_lengths or [None] * len(drafts)
    for model, positions, row in zip(
        reversed(drafts), reversed(reach), reversed(k[1:]), strict=True
    ):
        drafter = CascadeDrafter(list(below), row, ends) if vertical else BaseDrafter()
        is_exact = lenience == 1
        verifier = verify_tree if is_exact else lenient_review(lenience)
        inner = Decoder(
            model,
            drafter,
            verifier,
            sampling=request.sampling,
            stop=StoppingCriteria(eos=ends),
            forward_log=request.forward_log,
        )
        below.insert(0, NestedDrafter(inner, positions=positions, is_exact=is_exact))
    return request.decoder(CascadeDrafter(below, k[0], ends, notifies=True), verify_tree)
