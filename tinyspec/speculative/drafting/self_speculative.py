"""Draft & Verify, self-speculative decoding: the target drafts for itself with sublayers skipped.

Paper: Zhang et al., ACL 2024, arXiv 2309.08168. Nothing is trained.

Idea. A model of L layers has 2L sublayers, an attention and a feed-forward part each. One bit for
each says whether it is skipped while drafting (it is the identity then). So the draft model needs
no weights of its own. It is a view of the target's session: it reads the target's keys and values,
and what both compute alike, below the first skipped sublayer, is computed once. The bits are found
by Bayesian optimization of the *measured time per token* (`SkipSetSearch`, `tinyspec bench skip`).

Drafting ends after the first token that the draft found less likely than a threshold. The threshold
adapts, so that a wanted share of the draft tokens is accepted:

    rate      <- beta_1 rate + (1 - beta_1) accepted / drafted
    proposal   = threshold + epsilon   if rate < wanted
                 threshold             if the round drafted gamma tokens
                 threshold - epsilon   else
    threshold <- beta_2 threshold + (1 - beta_2) proposal

Guarantee: EXACT. The token that ends a draft stays in it, so that no token's presence depends on
its own draw.
Pitfall: the authors' sampling code drafts greedily and still divides by the softmax, which is
biased above temperature 0. Here the draft samples, and declares the distribution it samples from.
Tests: tests/speculative/test_self_speculative.py (`draft_until_unsure` against the code that runs,
outcome by outcome; `update_threshold` is the code that runs; the joint distribution; both kinds of
sublayer; the shared cache; an empty skip set accepts all; the search against as many random sets).
Left out: the paper's 1,000 evaluations of the search. `tinyspec bench skip --evaluations 1000` runs
them; our committed search has 100, and the set it found is slower than the default on fresh prompts
(tutorials/results). The first threshold (0.8), gamma (8), the weights and epsilon are those of the
authors' greedy code; their sampling code starts at 0.5. Without a search every third layer is
skipped, from the third on but not the last: that is no result of the paper. Models of fewer than
four layers then skip nothing.
"""

import json
import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tinyspec.decoding.decode import Decoder, Round, TargetProbs
from tinyspec.decoding.modeldraft import SharedSessionDrafter
from tinyspec.decoding.sampling import UNCHANGED
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan
from tinyspec.technique import Guarantee, Knob, Request, technique

SkipSet: TypeAlias = frozenset[int]
"""Skipped sublayers: 2l is the attention of layer l, 2l + 1 its feed-forward part."""

BETA_1 = 0.5  # weight of the past in the running acceptance rate (the authors' code)
BETA_2 = 0.9  # weight of the past in the threshold
EPSILON = 0.01  # step of the threshold in a round, before it is averaged


def draft_until_unsure(
    q: Callable[[list[int]], Any], text: list[int], threshold: float, gamma: int, rng: Any
) -> list[int]:
    """Return the draft: at most gamma tokens, the last one possibly unlikely (section 3.4).

    q  a function from a text to the distribution [V] of the target with sublayers skipped

    `SelfSpeculativeDrafter` does the same. A test compares the two on every outcome.
    """
    draft: list[int] = []
    while len(draft) < gamma:
        row = q(text + draft)
        draft.append(rng.choice(len(row), p=row))
        if row[draft[-1]] < threshold:
            break  # after the token, which stays in the draft
    return draft


def update_threshold(
    threshold: float, rate: float, accepted: int, drafted: int, wanted: float, gamma: int
) -> tuple[float, float]:
    """Return the threshold and the running acceptance rate after a round.

    >>> tuple(round(x, 4) for x in update_threshold(0.8, 0.0, 1, 4, wanted=0.9, gamma=8))
    (0.801, 0.125)
    """
    rate = BETA_1 * rate + (1 - BETA_1) * accepted / drafted
    step = EPSILON if rate < wanted else 0.0 if drafted == gamma else -EPSILON
    return threshold + (1 - BETA_2) * step, rate


# ------------------------------ which sublayers (section 3.2)


def parse_skip_set(skip: Any, n_layers: int) -> SkipSet:
    """Return the sublayers that the knob `skip` names.

    skip  None, "none", "default", "a3+m3+a5-7" (a: attention, m: feed-forward), or a search's .json

    >>> sorted(parse_skip_set("a1-2+m2", 4)), sorted(parse_skip_set("default", 9))
    ([2, 4, 5], [4, 5, 10, 11])
    >>> parse_skip_set(None, 4)
    frozenset()
    """
    if skip is None or skip in ("", "none"):
        return frozenset()
    if skip == "default":
        return frozenset(
            sublayer
            for layer in range(2, n_layers - 1, 3)
            for sublayer in (2 * layer, 2 * layer + 1)
        )
    if isinstance(skip, (str, Path)) and str(skip).endswith(".json"):
        skip = _read_search_result(Path(skip), n_layers)
    words = re.findall(r"[^,+\s]+", skip) if isinstance(skip, str) else list(skip)
    chosen = frozenset(sublayer for word in words for sublayer in _parse_sublayers(word, n_layers))
    if len(chosen) == 2 * n_layers:
        raise TinyspecError(
            f"skip names all {2 * n_layers} sublayers, and nothing is left to draft with: name "
            "fewer"
        )
    return chosen


def _parse_sublayers(word: Any, n_layers: int) -> Iterable[int]:
    """Return the sublayers of one word, such as a3 or m2-5, or of a sublayer's number."""
    if isinstance(word, int):
        word = f"{'am'[word % 2]}{word // 2}"
    found = re.fullmatch(r"([am])(\d+)(?:-(\d+))?", str(word))
    if not found:
        raise TinyspecError(
            f"skip: '{word}' is no sublayer; write a3 (attention of layer 3), m3, a3-5, or a .json "
            "file"
        )
    first, last = int(found[2]), int(found[3] or found[2])
    if not first <= last < n_layers:
        raise TinyspecError(f"skip: {word} is out of range: the layers are 0 to {n_layers - 1}")
    return range(2 * first + "am".index(found[1]), 2 * last + 2, 2)


def _read_search_result(path: Path, n_layers: int) -> str:
    """Return the skip set that a search has written."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        skip, searched = str(result["skip"]), result["n_layers"]
    except FileNotFoundError:
        raise TinyspecError(
            f"{path}: no such file; `tinyspec bench skip --out {path}` makes one"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TinyspecError(
            f"{path} is no result of `tinyspec bench skip` ({type(error).__name__}): write one "
            f"with `tinyspec bench skip --out {path}`"
        ) from error
    if searched != n_layers:
        raise TinyspecError(
            f"{path} was searched on {searched} layers, this model has {n_layers}: search anew"
        )
    return "" if skip == "none" else skip


def format_skip_set(skip: Iterable[int]) -> str:
    """Return a skip set as the knob takes it.

    >>> format_skip_set({2, 4, 5}), format_skip_set(())
    ('a1+a2+m2', 'none')
    """
    return "+".join(f"{'am'[sublayer % 2]}{sublayer // 2}" for sublayer in sorted(skip)) or "none"


class SkipSetSearch:
    """Bayesian optimization of 2L bits, each relaxed to [0, 1] and set if above one half.

    Call `suggest`, measure, call `tell`, and repeat. The library is the authors',
    bayesian-optimization: a Gaussian process (noise 1e-2) over the points measured so far suggests
    the point with the greatest upper confidence bound. It is told the speed at this point of
    [0, 1]^2L, as in the authors' code, and not at the corner that the point is rounded to. A
    suggestion depends only on the seed and on what was told, so an interrupted search continues as
    it would have.

    told    speeds of each set that was measured
    points  the point at which each set was suggested; a set that nobody suggested is a corner
    """

    def __init__(self, n_layers: int, seed: int = 0):
        try:
            import bayes_opt
        except ModuleNotFoundError:
            raise TinyspecError(
                "the search needs bayesian-optimization: pip install 'tinyspec[search]'"
            ) from None
        self.library: Any = bayes_opt
        self.n, self.seed = 2 * n_layers, seed
        self.told: dict[SkipSet, list[float]] = {}
        self.points: dict[SkipSet, list[float]] = {}

    def tell(self, skip: SkipSet, speed: float, point: Sequence[float] | None = None) -> None:
        """Enter a measurement of a set: tokens per second, on any scale.

        point  where the set was suggested, if that was before an interruption

        A set that is measured again counts by its mean.
        """
        self.told.setdefault(skip, []).append(speed)
        corner = [float(bit in skip) for bit in range(self.n)]
        self.points.setdefault(skip, corner if point is None else list(point))

    def suggest(self) -> SkipSet:
        """Return the next set: one not measured yet if there is any, and never all sublayers."""
        if len(self.told) >= 2**self.n - 1:
            return self.best
        random = np.random.default_rng((self.seed, len(self.told)))
        names = [f"x{bit:04}" for bit in range(self.n)]
        bound = self.library.acquisition.UpperConfidenceBound()
        # The maximum of the acquisition function need not be found to a digit.
        bound.suggest = partial(bound.suggest, n_random=1000, n_smart=1)
        seed = int(random.integers(1 << 31))
        optimizer = self.library.BayesianOptimization(
            None, dict.fromkeys(names, (0.0, 1.0)), bound, random_state=seed, verbose=0
        )
        optimizer.set_gp_params(alpha=1e-2, n_restarts_optimizer=0)
        for skip, speeds in self.told.items():
            optimizer.register(self.points[skip], sum(speeds) / len(speeds))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about length scales at their bounds
            found = optimizer.suggest()
        point = [float(found[name]) for name in names]
        chosen = frozenset(bit for bit in range(self.n) if point[bit] > 0.5)
        while chosen in self.told or len(chosen) == self.n:
            bit = int(random.integers(self.n))
            chosen ^= {bit}
            point[bit] = float(bit in chosen)
        self.points[chosen] = point
        return chosen

    @property
    def best(self) -> SkipSet:
        """Return the fastest set so far."""
        return max(self.told, key=lambda skip: sum(self.told[skip]) / len(self.told[skip]))


# ------------------------------ drafting and its exit (sections 3.1, 3.4)


class DraftExit(NamedTuple):
    """When drafting ends: after the first token less likely than the threshold.

    acceptance  running share of draft tokens that the target accepted (the paper's AR)
    """

    threshold: float
    acceptance: float = 0.0

    def update(self, accepted: int, drafted: int, wanted: float, gamma: int) -> "DraftExit":
        """Return the exit after a round; a round without a draft changes nothing."""
        if not drafted:
            return self
        return DraftExit(
            *update_threshold(self.threshold, self.acceptance, accepted, drafted, wanted, gamma)
        )


class SelfSpeculativeDrafter(SharedSessionDrafter):
    """Draft with the target itself, without some sublayers.

    The exit adapts over a request; a rewind does not undo that.
    """

    def __init__(
        self,
        session: Any,
        skip: SkipSet,
        gamma: int,
        ends: frozenset[int],
        threshold: float,
        wanted: float,
    ):
        super().__init__(session.view(Plan(skip=skip)), gamma, ends)
        self.first, self.wanted = DraftExit(threshold), wanted
        self.exit = self.first

    def should_stop(self, probs: TargetProbs, tip: int, token: int) -> bool:
        unsure = probs.probs_under(tip, UNCHANGED)[token] < self.exit.threshold
        return bool(unsure) or super().should_stop(probs, tip, token)

    def observe(self, round: Round) -> None:
        self.exit = self.exit.update(
            len(round.verdict.accepted), len(round.tree.tokens), self.wanted, self.gamma
        )

    def end(self) -> None:
        self.exit = self.first


# ------------------------------ the card


@technique(
    title="Draft & Verify: self-speculative decoding",
    summary="the target drafts with layers skipped",
    paper="Zhang et al. 2023, arXiv 2309.08168",
    reported="up to 1.99x, LLaMA-2 (abstract)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob(
            "skip",
            "default",
            "sublayers left out: a3+m5-7, none, default, or a search's .json",
            small=("a1+m1", "m0", None),
        ),
        Knob("gamma", 8, "most tokens drafted in a round", low=1, high=64),
        Knob(
            "threshold",
            0.8,
            "drafting ends after a token less likely than this",
            low=0.0,
            high=1.0,
            small=(0.5, 0.0),
        ),
        Knob(
            "wanted",
            0.9,
            "share of draft tokens that is to be accepted: the threshold adapts to it",
            low=0.0,
            high=1.0,
        ),
    ),
)
def self_speculative(
    request: Request, *, skip: Any, gamma: int, threshold: float, wanted: float
) -> Decoder:
    """Return a decoder whose target drafts with sublayers skipped and verifies with all."""
    session: Any = request.target
    chosen = parse_skip_set(skip, session.model.config.n_layers)
    return request.decoder(
        SelfSpeculativeDrafter(session, chosen, gamma, request.stop.eos, threshold, wanted),
        verify_tree,
    )
