"""Laws of a trained drafter: which states it reads, and at which positions.

A wrong draft is still lossless. So no law of the output sees a head that reads the state of the
wrong position, or an entry of a cache that should be gone: drafts only get worse. Two laws compare
the drafts themselves.

    F1  the draft is a function of the text      a decoder with any past proposes what a new decoder
                                                 proposes after the same text
    F2  the draft is what the training forward   the proposed distributions are those that the
        says                                     training forward gives on the whole text at once

F1 needs nothing but a builder of the decoder. F2 also needs the forward pass that the loss uses, as
a `TrainingForward`; it is never the code that drafts. The pasts come from `walk_texts`: draft
tokens are accepted and rejected at random, and texts are cut, rewound and corrected.

Both laws take any drafter that reads hidden states or probes. The number of probes may depend on
the node that they stand after: F1 compares where a decoder without a past has as many. Left out:
drafters that learn between requests (osd: its draft is no function of the text), point masses other
than the likeliest tokens of a node, and models that read no states of another one (specdec, speed
and cllm have tests of their own).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tinyspec.decoding.decode import Decoder, Round, TargetProbs
from tinyspec.decoding.rng import RandomSource, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import Verdict
from tinyspec.laws.contracts import MakeDecoder
from tinyspec.laws.evidence import Evidence, accuse, collect_evidence
from tinyspec.laws.exact.models import Array, add_random_head, small_network
from tinyspec.lm.heads import (
    RANKED,
    RANKS,
    TOKEN_MAP,
    add_head,
    freeze_target,
    head_settings,
    head_weights,
)
from tinyspec.lm.model import Model
from tinyspec.lm.ops import scatter_logits
from tinyspec.technique import Card, Request, TrainingBatch, tuned_settings
from tinyspec.tree import ROOT, TokenTree

DRAFT_OF_TEXT = "the draft is a function of the text"
DRAFT_OF_TRAINING = "the draft is what the training forward says"

FEATURE_TOLERANCE = 1e-9  # of a probability: both sides are float64, and sum in another order
WALK_SEEDS = range(12)  # each makes another network, prompt and past
WALK_TEMPERATURES = (0.0, 0.8)  # point masses, and declared distributions
WALK_VOCABULARY = 4
WALK_ROUNDS = 8  # of one decoder, after its prompt
ACCEPT_SHARE = 0.7  # chance to accept one more draft token: whole drafts and none are both frequent
END_SHARE = 0.25  # chance that a round ends on an accepted token
REWIND_SHARE = 0.3  # chance of a rewind after a round; half of them are followed by a correction
NO_TOKEN = "no draft token"

TrainingForward = Callable[[Model, Sequence[int], Sequence[int]], Any]
"""(target, text, drafted) -> logits [V] that the next draft token is chosen by.

drafted  the draft tokens between the text and that token

None: after this text nothing can be proposed, because no state is known yet. It is the forward pass
that the loss uses, on all tokens at once: no session, no tree, no cache.
"""


MakeNetwork = Callable[[int, int], Model]
"""(seed, size of the vocabulary) -> a small float64 target, with the head that is judged."""


class Proposal(NamedTuple):
    """A draft of a decoder that has a past.

    model         the target
    sampling      the settings of the request
    seed, number  of the random numbers, and of the round that keys them
    text          the committed tokens
    past          what the decoder has been through, in words
    tree          the draft
    after_probes  how many probes the last round scored after the token before the newest one; 0
                  after any other event
    """

    model: Model
    sampling: SamplingParams
    seed: int
    number: int
    text: tuple[int, ...]
    past: tuple[str, ...]
    tree: TokenTree
    after_probes: int

    @property
    def case(self) -> dict[str, Any]:
        """Return the text, how it came about, and the draft, for a counterexample."""
        nodes = [node for node, is_probe in enumerate(self.tree.probe) if not is_probe]
        return {
            "target": self.model.name,
            "temperature": self.sampling.temperature,
            "past": "; ".join(self.past),
            "text": self.text,
            "draft": [self.tree.tokens_on(self.tree.path(node)) for node in nodes],
        }


class DraftDifference(NamedTuple):
    """The first place where a draft is wrong: the case, what it must be there, and what it is."""

    case: dict[str, Any]
    expected: Any
    got: Any


NOT_COMPARED = DraftDifference({}, None, None)
"""Of a draft that has no other one to be compared with."""


# ------------------------------------------------------------------ decoders with a past


def choose_verdict(
    choice: random.Random, tree: TokenTree, p: TargetProbs, rng: RandomSource
) -> Verdict:
    """Return a random verdict, so that every path is accepted on some text.

    It accepts a random path. Then it ends the round there, or adds a token that was not proposed
    (any token if all were).
    """
    accepted, children = list[int](), _find_children(tree, ROOT)
    while children and choice.random() < ACCEPT_SHARE:
        accepted.append(choice.choice(children))
        children = _find_children(tree, accepted[-1])
    if accepted and choice.random() < END_SHARE:
        return Verdict(tuple(accepted), None)
    vocabulary, proposed = range(WALK_VOCABULARY), {tree.tokens[child] for child in children}
    others = [token for token in vocabulary if token not in proposed]
    return Verdict(tuple(accepted), choice.choice(others or vocabulary), tuple(children))


def walk_texts(
    make: MakeDecoder, model: Model, sampling: SamplingParams, seed: int
) -> Iterator[Proposal]:
    """Yield every draft of one decoder through a long life.

    It serves another request first (every second seed), then a prompt of one to three tokens. Its
    rounds accept, reject, end on an accepted token, or are cut by the end of a text inside the
    draft; the text goes on all the same. Between rounds it is rewound, and perhaps corrected by one
    token or two: only the second shows a row that outlives a rewind.
    """
    choice, rng, past = random.Random(f"{seed} {sampling.temperature}"), Seeded(seed), list[str]()
    decoder, after_probes = new_decoder(make, model, sampling), 0
    decoder.verifier = partial(choose_verdict, choice)

    def propose() -> Proposal:
        nonlocal after_probes
        text, number, history = tuple(decoder.context), decoder.rounds, tuple(past)
        round = decoder.step(rng)
        decoder.finished = None  # a stop may have cut the round: the text goes on from there
        proposal = Proposal(model, sampling, seed, number, text, history, round.tree, after_probes)
        after_probes = count_probes(round)
        past.append(_describe_round(round))
        return proposal

    def extend(what: str, n: int) -> None:
        nonlocal after_probes
        tokens = choice.choices(range(WALK_VOCABULARY), k=n)
        decoder.extend(tokens)
        after_probes = 0
        past.append(f"{what} {tokens}")

    if seed % 2:
        extend("another request with the prompt", 2)
        yield propose()
        yield propose()
        decoder.end()
        decoder.rewind(0)
    extend("prompt", 1 + seed % 3)
    for _ in range(WALK_ROUNDS):
        yield propose()
        if choice.random() < REWIND_SHARE:
            length = choice.choice([1, 1, *range(1, len(decoder.context) + 1)])
            decoder.rewind(length)
            after_probes = 0
            past.append(f"rewound to {length} tokens")
            if choice.random() < 0.5:
                extend("corrected by", choice.randint(1, 2))


def new_decoder(make: MakeDecoder, model: Model, sampling: SamplingParams) -> Decoder:
    """Return a decoder without a past. The last id of the vocabulary ends a text."""
    stop = StoppingCriteria(eos=frozenset({WALK_VOCABULARY - 1}))
    positions = model.config.max_positions
    return make(Request(model.session(), sampling=sampling, stop=stop, positions=positions))


def count_probes(round: Round) -> int:
    """Return how many probes of a round stand after the token that the newest one follows."""
    after = {(ROOT, *round.verdict.accepted)[len(round.tokens) - 1]}
    probes = 0
    for node, (parent, is_probe) in enumerate(
        zip(round.tree.parents, round.tree.probe, strict=True)
    ):
        if is_probe and parent in after:
            after.add(node)
            probes += 1
    return probes


def draft_without_past(make: MakeDecoder, proposal: Proposal) -> TokenTree | None:
    """Return what a new decoder proposes after the same text, with the same random numbers.

    A drafter of probes knows their rows only after a round that scored them. Where the decoder with
    a past has just had such a round, the new one gets its newest token by a round too. None: this
    round has another number of probes after the token before.
    """
    text, number = list(proposal.text), proposal.number
    decoder = new_decoder(make, proposal.model, proposal.sampling)
    if proposal.after_probes:
        newest = text.pop()
        decoder.extend(text)
        decoder.verifier = lambda tree, p, rng: Verdict((), newest)
        round = decoder.step(Seeded(0))
        decoder.finished = None
        if count_probes(round) != proposal.after_probes:
            return None
    else:
        decoder.extend(text)
    return decoder.drafter.propose(
        decoder.context,
        decoder.max_draft_depth,
        decoder.sampling,
        Seeded(proposal.seed).split("draft", number),
    )


# ------------------------------------------------------------------ the laws


@collect_evidence(DRAFT_OF_TEXT)
def draft_is_function_of_text(
    make: MakeDecoder, network: MakeNetwork = small_network
) -> Iterator[int]:
    """Check F1: after any past, the draft is the one that a decoder without a past proposes.

    Tokens, shape and probes must be equal, and declared distributions up to rounding. Raises
    LawViolated with the shortest text that shows a difference.

    make     request -> Decoder, as a card's `make`
    network  (seed, vocabulary) -> target
    """

    def compare(proposal: Proposal) -> DraftDifference | None:
        expected = draft_without_past(make, proposal)
        return NOT_COMPARED if expected is None else _compare_drafts(proposal, expected)

    yield from _judge_walks(DRAFT_OF_TEXT, make, network, compare)


@collect_evidence(DRAFT_OF_TRAINING)
def draft_is_training_forward(
    make: MakeDecoder, forward: TrainingForward, network: MakeNetwork = small_network
) -> Iterator[int]:
    """Check F2: after any past, each draft token is chosen by the training forward's logits.

    A declared distribution must be their softmax at the request's temperature; siblings drawn
    without replacement lack the tokens of earlier siblings. Point masses under one node must be its
    likeliest tokens, in order. Raises LawViolated with the shortest text that shows a difference.

    make     request -> Decoder, as a card's `make`
    forward  (target, text, drafted) -> logits [V], with the weights that `make` gives the drafter
    network  (seed, vocabulary) -> target
    """

    def compare(proposal: Proposal) -> DraftDifference | None:
        return _compare_with_forward(proposal, partial(forward, proposal.model, proposal.text))

    yield from _judge_walks(DRAFT_OF_TRAINING, make, network, compare)


def trained_forward(
    card: Card, model: Model, text: Sequence[int], drafted: Sequence[int]
) -> Tensor | None:
    """Return what the training forward of a card says on a whole text: a `TrainingForward`."""
    ids, at = torch.tensor([[*text, *drafted]]), len(text) - 2
    if at < 0:
        return None
    if card.tuned is not None and card.tuned.predict is not None:
        made = tuned_settings(model, card.name, card.tuned.settings)
        return card.tuned.predict(model.torch_blocks(), made, ids, len(drafted))[0, at]
    if card.trained is None or card.trained.predict is None:
        return None
    weights, blocks = head_weights(model, card.head_method), model.torch_blocks()
    target = freeze_target(model, weights.get(TOKEN_MAP))
    settings = card.trained.settings(**head_settings(model, card.head_method))
    states = blocks.hidden_states(ids, card.trained.layers(model.config, settings))
    logits = card.trained.predict(weights, target, ids, states, len(drafted))[0, at]
    return scatter_logits(logits, target.token_map, model.config.vocab_size)


def check_random_heads(card: Card, make: MakeDecoder) -> Evidence:
    """Check F2 for a card that trains something, on random weights.

    make  request -> Decoder, as the card's `make`
    """

    def network(seed: int, vocabulary: int) -> Model:
        return add_random_head(small_network(seed, vocabulary), card, seed)

    return draft_is_training_forward(make, partial(trained_forward, card), network)


def fit_head(
    card: Card, model: Model, text: Sequence[int], steps: int = 80, draws: int = 1
) -> Model:
    """Return the model with a head that its own loss has fitted to one text of the model.

    The head begins as `initialize` says, and every token counts as written by the target. All
    ranks but the first have chance 0 in the head's table, so its draft is a chain.

    draws  how often a step computes the loss; more than once where the loss is random
    """
    trained = card.trained
    assert trained is not None
    target = freeze_target(model)._replace(settings=trained.small)
    layers = trained.layers(model.config, trained.small)
    ids = torch.tensor([text])
    written = torch.ones_like(ids, dtype=torch.bool)
    states = model.torch_blocks().hidden_states(ids, layers)
    top = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)[..., None]
    batch = TrainingBatch(ids, written, states, top, torch.ones_like(top, dtype=states.dtype))
    begun = trained.initialize(target, trained.small, 0)
    weights = {name: w.clone().requires_grad_() for name, w in begun.items()}
    optimizer: Any = torch.optim.LBFGS(
        weights.values(), max_iter=steps, line_search_fn="strong_wolfe"
    )

    def closure() -> Any:
        torch.manual_seed(0)
        optimizer.zero_grad()
        loss = torch.stack([trained.loss(weights, target, batch) for _ in range(draws)]).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)
    ranks = torch.zeros(trained.depths(weights), RANKED)
    ranks[:, 0] = 1
    return add_head(model, card.head_method, {**weights, RANKS: ranks}, vars(trained.small))


def _judge_walks(
    law: str,
    make: MakeDecoder,
    network: MakeNetwork,
    compare: Callable[[Proposal], DraftDifference | None],
) -> Iterator[int]:
    """Yield the number of draft tokens of each right draft; accuse the shortest wrong text."""
    wrong, drafted = list[DraftDifference](), 0
    for seed in WALK_SEEDS:
        for temperature in WALK_TEMPERATURES:
            model, sampling = network(seed, WALK_VOCABULARY), SamplingParams(temperature)
            for proposal in walk_texts(make, model, sampling, seed):
                difference = compare(proposal)
                if difference is NOT_COMPARED:
                    continue
                if difference is not None:
                    wrong.append(difference)
                    break
                nodes = len(proposal.tree.tokens) - sum(proposal.tree.probe)
                drafted += nodes
                yield nodes
    if wrong:
        first = min(wrong, key=lambda one: (len(one.case["text"]), len(one.case["past"])))
        accuse(law, first.expected, first.got, **first.case)
    if not drafted:
        accuse(law, "a draft token after some text", NO_TOKEN, walks=len(WALK_SEEDS))


def _compare_drafts(proposal: Proposal, expected: TokenTree) -> DraftDifference | None:
    """Return the first node where the draft differs from the expected one, or None."""
    got, shown = proposal.tree, proposal.case
    for node in range(max(len(expected.tokens), len(got.tokens))):
        pair = _describe_node(expected, node), _describe_node(got, node)
        if pair[0] is None or pair[1] is None or pair[0].keys() != pair[1].keys():
            return DraftDifference(shown, *(one or NO_TOKEN for one in pair))
        q, declared = expected.draft_probs[node], got.draft_probs[node]
        if (q is None) != (declared is None):
            return DraftDifference(shown, *pair)
        if q is not None and not (gap := _gap(q, declared)) <= FEATURE_TOLERANCE:
            return DraftDifference(shown | {"largest difference": gap}, *pair)
    return None


def _compare_with_forward(
    proposal: Proposal, forward: Callable[[Sequence[int]], Any]
) -> DraftDifference | None:
    """Return the first draft token that the logits of `forward` do not explain, or None."""
    tree = proposal.tree
    for node, parent in enumerate(tree.parents):
        if tree.probe[node]:
            continue
        siblings = [s for s in _find_children(tree, parent) if s < node]
        drafted, declared = tree.tokens_on(tree.path(parent)), tree.draft_probs[node]
        got, found = _describe_node(tree, node), forward(drafted)
        if found is None:
            return DraftDifference(proposal.case, NO_TOKEN, got)
        logits = np.asarray(found, dtype=np.float64)
        if declared is None:
            rank = sum(tree.draft_probs[s] is None for s in siblings)
            token = int(np.argsort(-logits, kind="stable")[rank])
            if token != tree.tokens[node]:
                return DraftDifference(proposal.case, {(*drafted, token): "point mass"}, got)
            continue
        q = _softmax(logits, proposal.sampling.temperature)
        q[[tree.tokens[s] for s in siblings if not declared[tree.tokens[s]]]] = 0
        q /= q.sum()
        if not (gap := _gap(q, declared)) <= FEATURE_TOLERANCE:
            case = proposal.case | {"largest difference": gap}
            return DraftDifference(case, {(*drafted, tree.tokens[node]): q.tolist()}, got)
    return None


def _softmax(logits: Array, temperature: float) -> Array:
    """Return the distribution [V] of logits; at temperature 0 all of it is on the greatest."""
    if temperature == 0:
        weights: Array = (np.arange(len(logits)) == logits.argmax()).astype(np.float64)
    else:
        weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def _gap(one: Any, other: Any) -> float:
    """Return the largest difference of two distributions; NaN if one has a NaN."""
    return float(np.abs(np.asarray(one) - np.asarray(other)).max())


def _find_children(tree: TokenTree, node: int) -> list[int]:
    """Return the draft tokens directly below a node, in draw order; no probes."""
    return [i for i, up in enumerate(tree.parents) if up == node and not tree.probe[i]]


def _describe_node(tree: TokenTree, node: int) -> dict[Any, Any] | None:
    """Return the path to a node with what it declares; None: the draft has no such node."""
    if node >= len(tree.tokens):
        return None
    path, q = tree.tokens_on(tree.path(node)), tree.draft_probs[node]
    if tree.probe[node]:
        return {(*path, "probe"): None}
    return {path: "point mass" if q is None else np.asarray(q).tolist()}


def _describe_round(round: Round) -> str:
    """Return what a round committed, in words."""
    accepted, following = list(round.tree.tokens_on(round.verdict.accepted)), round.verdict.next
    ending = "ended there" if following is None else f"then {following}"
    ending = "cut by a stop" if round.truncated else ending
    return f"accepted {accepted or 'nothing'}, {ending}"
