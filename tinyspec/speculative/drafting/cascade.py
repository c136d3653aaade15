"""Cascade speculative drafting: drafts are drafted themselves, down to a model that only counts.

Chen et al., NeurIPS 2024, arXiv 2312.11462 (CS Drafting). Two cascades. *Vertical*: a draft model
does not generate token by token, it reviews what the next smaller model drafted, and so on down to
max-gram, which copies what followed the longest match of the newest tokens in the text, else the
likeliest word by a bigram table: no network at all. *Horizontal*: the first guesses of a round are
the likeliest to be kept, so the largest draft makes those, and ever smaller ones the rest. A matrix
of quotas K says both: row 1 is how many tokens each level contributes to the target's draft; what
level i contributes it makes by recursion, under the rows and columns below i. Nothing is trained.

Lenience l between the draft levels: a reviewer also lets pass what it holds for at least 1/l as
likely as who wrote it. Towards the target it is 1.

Guarantee: EXACT. Each token declares the law it was committed under by the level that finalised it;
a copied token, and a token that passed a lenient review, is a point mass. (The released code
decodes greedily.) Tested in tests/speculative/test_cascade.py: calls of every level are those that
K predicts where all agree; each cascade alone, both and none; the longest match. The law of four
levels is enumerated by `tinyspec laws cascade`.
Left out: the bigram table of Wikipedia. Here the smallest draft model says `sample` tokens once,
and these are counted.
"""

from collections.abc import Sequence
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
from tinyspec.speculative.nested import Nested
from tinyspec.speculative.ngram import Katz, sampled
from tinyspec.technique import Guarantee, Knob, Request, per_model_state, technique
from tinyspec.tree import ROOT, Probs, TokenTree

PAPER_QUOTAS = {1: "13,10/10", 2: "5,14,10/1,10/10"}
"""K for so many draft models: what the authors run beside LLaMA-7B and beside FLAN-T5-XXL."""

Quotas = tuple[tuple[int, ...], ...]


def parse_quotas(quotas: str, drafts: int) -> Quotas:
    """K by rows: the part right of the diagonal, one column for each draft model and one for
    max-gram.

    >>> parse_quotas("5,14,10/1,10/10", 2)
    ((5, 14, 10), (1, 10), (10,))
    """
    if quotas == "auto" and drafts not in PAPER_QUOTAS:
        raise TinyspecError(
            f"there are no quotas for {drafts} draft models in the paper: give quotas, as {PAPER_QUOTAS[2]} for 2"
        )
    rows = [
        row.split(",")
        for row in (PAPER_QUOTAS[drafts] if quotas == "auto" else str(quotas)).split("/")
    ]
    if [len(row) for row in rows] != list(range(drafts + 1, 0, -1)) or not all(
        word.strip().isdecimal() for row in rows for word in row
    ):
        raise TinyspecError(
            f"the quotas {quotas!r} do not fit {drafts} draft model(s) and max-gram: give {drafts + 1} rows, each a number "
            f"shorter, as {PAPER_QUOTAS[min(drafts, 2)]} for {min(drafts, 2)}"
        )
    if not any(int(word) for word in rows[0]):
        raise TinyspecError(
            f"the quotas {quotas!r} draft nothing: the first row needs a number above 0"
        )
    return tuple(tuple(int(word) for word in row) for row in rows)


class MaxGramDrafter(BaseDrafter):
    """The lowest level: what followed the longest match of the newest tokens, else the bigram
    table's word.
    """

    def __init__(self, longest: int, table: Katz | None):
        self.longest, self.table, self.index = longest, table, NgramIndex(longest)

    def write(
        self, text: Sequence[int], n: int, sampling: SamplingParams, rng: RandomSource
    ) -> tuple[list[int], list[Probs | None]]:
        """n tokens that go on with this text, as point masses; fewer where nothing is known of the
        newest one.
        """
        line = list(text[-self.longest :])
        begun = len(line)
        while len(line) - begun < n:
            copied = self.index.lookup(line[-self.longest :], n + begun - len(line), self.longest)
            guess = self.table.likeliest(line) if self.table and not copied else None
            if not copied and guess is None:
                break
            line += copied if guess is None else [guess]
        return line[begun:], [None] * (len(line) - begun)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.index.append(0, tokens)

    def observe(self, round: Round) -> None:
        self.index.append(0, round.tokens)

    def rewind(self, length: int) -> None:
        self.index.rewind(0, min(length, self.index.length(0)))

    def end(self) -> None:
        self.index.rewind(0, 0)


class CascadeDrafter(BaseDrafter):
    """Drafts for one reviewer: each level below it contributes its quota, the largest first.

    ends     tokens that nothing comes after
    listens  whether it passes on what happens to the text: levels are shared by all reviewers above
             them, so only the target's drafter does; the others' texts follow when they are to
             write
    """

    def __init__(
        self,
        below: Sequence[Nested | MaxGramDrafter],
        quotas: Sequence[int],
        ends: frozenset[int],
        listens: bool = False,
    ):
        self.below, self.quotas, self.ends = below, quotas, ends
        self.told: Sequence[Nested | MaxGramDrafter] = below if listens else ()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        text, laws, last = list(context), list[Probs | None](), len(context) + max_draft_depth
        for number, (level, quota) in enumerate(zip(self.below, self.quotas, strict=True)):
            n = min(quota, last - len(text))
            if n < 1:
                continue
            tokens, rows = level.write(text, n, sampling, rng.split("level", number))
            kept = next(
                (at for at, token in enumerate(tokens, 1) if token in self.ends), len(tokens)
            )
            text += tokens[:kept]
            laws += rows[:kept]
            if kept and tokens[kept - 1] in self.ends:
                break
        return TokenTree.chain(text[len(context) :], laws)

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        for level in self.told:
            level.extend(tokens, scores)

    def observe(self, round: Round) -> None:
        for level in self.told:
            level.observe(round)

    def rewind(self, length: int) -> None:
        for level in self.told:
            level.rewind(length)

    def end(self) -> None:
        for level in self.told:
            level.end()


def lenient_review(lenience: float) -> Verifier:
    """A review inside the cascade: x passes also where the reviewer holds it for 1/l as likely as
    its writer did.

    At temperature 0 the reviewer's law before it is sharpened decides, and a writer's token counts
    as certain.
    """

    def judge(tree: TokenTree, p: TargetProbs, rng: RandomSource) -> Verdict:
        at = ROOT
        for node, (token, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
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
                return Verdict(tuple(range(node)), rng.draw(rest), (node,))
            at = node
        return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[at]))

    return judge


@technique(
    title="Cascade speculative drafting",
    summary="small drafters draft for larger ones",
    paper="Chen et al. 2023, arXiv 2312.11462",
    family="drafting",
    guarantee=Guarantee.EXACT,
    drafts=1,
    several=True,
    knobs=(
        Knob("quotas", "auto", "K by rows, from the largest draft down to max-gram; auto: the paper's",
             small=("2,0,1/1,0/1", "1,1,1/1,1/1", "3,0,0/2,0/1")),
        Knob("lenience", 1.0, "between draft levels: 1/l as likely as its writer says is enough", low=1.0, small=(1.0, 2.0)),
        Knob("vertical", True, "whether a level's draft is drafted by the levels below it", choices=(True, False)),
        Knob("horizontal", True, "whether smaller levels write the end of a draft", choices=(True, False)),
        Knob("longest", 10, "longest match that max-gram looks for, in tokens", low=1),
        Knob("sample", 2048, "tokens that the smallest draft model says for the bigram table", low=0, small=(6, 0)),
    ),
)  # fmt: skip
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
    """Draft models from the largest to the smallest, then max-gram."""
    target: Any = request.target
    drafts: list[Any] = list(request.drafts)
    sizes = {model.model.config.vocab_size for model in (target, *drafts)}
    if len(sizes) > 1:
        raise TinyspecError(
            f"the levels of a cascade have vocabularies of {sorted(sizes)} tokens: use one tokenizer"
        )
    k = parse_quotas(quotas, len(drafts))
    if not horizontal:  # the first level makes the whole draft
        k = tuple((sum(row), *(0 for _ in row[1:])) for row in k)
    ends, table = request.stop.eos, count_bigrams(drafts[-1], sample) if sample else None
    below: list[Nested | MaxGramDrafter] = [MaxGramDrafter(longest, table)]
    reach: Sequence[int | None] = request.draft_max_lengths or [None] * len(drafts)
    for model, positions, row in zip(
        reversed(drafts), reversed(reach), reversed(k[1:]), strict=True
    ):
        drafter = CascadeDrafter(list(below), row, ends) if vertical else BaseDrafter()
        verifier, truthful = (
            (verify_tree, True) if lenience == 1 else (lenient_review(lenience), False)
        )
        inner = Decoder(
            model,
            drafter,
            verifier,
            sampling=request.sampling,
            stop=StoppingCriteria(eos=ends),
            forward_log=request.forward_log,
        )
        below.insert(0, Nested(inner, positions=positions, truthful=truthful))
    return request.decoder(CascadeDrafter(below, k[0], ends, listens=True), verify_tree)


def count_bigrams(draft: Any, tokens: int) -> Katz:
    """The bigram table, counted once a model."""
    model = draft.model
    return per_model_state(
        draft, ("bigrams", tokens), lambda: Katz(sampled(model, tokens), 2, model.config.vocab_size)
    )
