"""Draft & Verify: the model drafts for itself, leaving out the sublayers that it can do without.

Zhang et al., ACL 2024, arXiv 2309.08168. A model of L layers is 2L sublayers, an attention and a
feed-forward part each. A bit each says which are skipped while drafting (they are the identity
there); the draft is a view of the target's own session, so it has the same weights, reads the
target's keys and values, and what both run alike, below the first skipped sublayer, is run once.
What makes it Draft & Verify: the bits are found by Bayesian optimisation of the *measured time per
token* (`SkipSetSearch`; the command is `tinyspec bench skip`), and drafting ends behind the first token
that the draft held for less likely than a threshold, which adapts so that a wanted share of the
drafted tokens passes. Nothing is trained.

The authors' sampling code drafts greedily and still divides by the softmax; that is biased above
temperature 0. Here the draft samples, and declares the law it samples from. Where no search was
run, every third layer is skipped whole, from the third on, and the last layer is run: a beginning,
and no result of the paper. Models of fewer than four layers skip nothing then.

Guarantee: EXACT. The token that ends a draft stays in it, so that no token's presence depends on
its own draw. Tested in tests/speculative/test_self_speculative.py: the joint law, both kinds of
sublayer, the shared cache, an empty skip set (all is accepted), the threshold's rule, the search
against random sets of the same number.
Left out: nothing. The threshold starts at 0.8, the cap is 8 and the averages are those of the
authors' code.
"""

import json
import re
import warnings
from collections.abc import Iterable
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
"""Sublayers that are left out, as `Plan` numbers them: 2l is the attention of layer l, 2l + 1 its
feed-forward part.
"""


# ---------------------------------------------------------------------- which sublayers (section 3.2)


def parse_skip_set(skip: Any, n_layers: int) -> SkipSet:
    """The knob as sublayers: None or "none", "default", "a3+m3+a5-7" (attention, feed-forward), or
    a search's .json.

    >>> sorted(parse_skip_set("a1-2+m2", 4)), sorted(parse_skip_set("default", 9)), parse_skip_set(None, 4)
    ([2, 4, 5], [4, 5, 10, 11], frozenset())
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
        skip = _searched(Path(skip), n_layers)
    words = re.findall(r"[^,+\s]+", skip) if isinstance(skip, str) else list(skip)
    chosen = frozenset(sublayer for word in words for sublayer in _read(word, n_layers))
    if len(chosen) == 2 * n_layers:
        raise TinyspecError(
            f"this skips all {2 * n_layers} sublayers, and nothing is left to draft with: leave some out"
        )
    return chosen


def _read(word: Any, n_layers: int) -> Iterable[int]:
    """One word of a list, such as a3 or m2-5; or a sublayer's number."""
    if isinstance(word, int):
        word = f"{'am'[word % 2]}{word // 2}"
    found = re.fullmatch(r"([am])(\d+)(?:-(\d+))?", str(word))
    if not found:
        raise TinyspecError(
            f"skip: '{word}' is no sublayer; write a3 (attention of layer 3), m3, a3-5, or a .json file"
        )
    first, last = int(found[2]), int(found[3] or found[2])
    if not first <= last < n_layers:
        raise TinyspecError(f"skip: {word} is out of range: the layers are 0 to {n_layers - 1}")
    return range(2 * first + "am".index(found[1]), 2 * last + 2, 2)


def _searched(path: Path, n_layers: int) -> str:
    """The skip set that a search has written."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        skip, searched = str(result["skip"]), result["n_layers"]
    except FileNotFoundError:
        raise TinyspecError(
            f"{path}: no such file; `tinyspec bench skip --out {path}` makes one"
        ) from None
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise TinyspecError(
            f"{path} is no result of `tinyspec bench skip` ({type(error).__name__})"
        ) from error
    if searched != n_layers:
        raise TinyspecError(
            f"{path} was searched on {searched} layers, this model has {n_layers}: search anew"
        )
    return "" if skip == "none" else skip


def format_skip_set(skip: Iterable[int]) -> str:
    """A skip set as the knob takes it, also between a benchmark's commas.

    >>> format_skip_set({2, 4, 5}), format_skip_set(())
    ('a1+a2+m2', 'none')
    """
    return "+".join(f"{'am'[sublayer % 2]}{sublayer // 2}" for sublayer in sorted(skip)) or "none"


class SkipSetSearch:
    """Bayesian optimisation of 2L bits, each relaxed to [0, 1] and set above one half: ask
    `suggest`, measure, `tell`.

    By the library that the authors used, bayesian-optimization: a Gaussian process (noise 1e-2)
    over the sets measured so far, the next one where its upper confidence bound is greatest. A
    suggestion depends on the seed and on what was told alone, so an interrupted search goes on as
    it would have gone.
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

    def tell(self, skip: SkipSet, speed: float) -> None:
        """A set was measured: tokens per second, on any scale. One that is measured again counts by
        its mean.
        """
        self.told.setdefault(skip, []).append(speed)

    def suggest(self) -> SkipSet:
        """The next set: one that was not told, as long as there are any, and never all
        sublayers.
        """
        if len(self.told) >= 2**self.n - 1:
            return self.best
        random = np.random.default_rng((self.seed, len(self.told)))
        names = [f"x{bit:04}" for bit in range(self.n)]
        bound = self.library.acquisition.UpperConfidenceBound()
        bound.suggest = partial(
            bound.suggest, n_random=1000, n_smart=1
        )  # its greatest value need not be met to a digit
        seed = int(random.integers(1 << 31))
        optimizer = self.library.BayesianOptimization(
            None, dict.fromkeys(names, (0.0, 1.0)), bound, random_state=seed, verbose=0
        )
        optimizer.set_gp_params(alpha=1e-2, n_restarts_optimizer=0)
        for skip, speeds in self.told.items():
            optimizer.register(
                [float(bit in skip) for bit in range(self.n)], sum(speeds) / len(speeds)
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of length scales at their bounds
            point = optimizer.suggest()
        chosen = frozenset(bit for bit, name in enumerate(names) if point[name] > 0.5)
        while chosen in self.told or len(chosen) == self.n:
            chosen ^= {int(random.integers(self.n))}
        return chosen

    @property
    def best(self) -> SkipSet:
        """The fastest set so far."""
        return max(self.told, key=lambda skip: sum(self.told[skip]) / len(self.told[skip]))


# ---------------------------------------------------------------------- drafting and its exit (sections 3.1, 3.4)

RATE, SLOW, STEP = 0.5, 0.9, 0.01  # beta_1, beta_2, epsilon


class DraftExit(NamedTuple):
    """When drafting ends: behind the first token whose probability under the draft is below the
    threshold.

    threshold  starts at 0.8
    passed     running share of drafted tokens that the target accepted (the paper's AR)
    """

    threshold: float
    passed: float = 0.0

    def after(self, accepted: int, drafted: int, wanted: float, gamma: int) -> "DraftExit":
        """The exit after a round: stricter where too little passed, looser where enough did and the
        cap was not hit.
        """
        if not drafted:
            return self
        passed = RATE * self.passed + (1 - RATE) * accepted / drafted
        step = STEP if passed < wanted else 0.0 if drafted == gamma else -STEP
        return DraftExit(self.threshold + (1 - SLOW) * step, passed)


class SelfSpeculativeDrafter(SharedSessionDrafter):
    """The target itself without some sublayers. What it learnt of its exit is of the request, not
    of a place in the text.
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

    def should_stop(self, laws: TargetProbs, tip: int, token: int) -> bool:
        unsure = laws.probs_under(tip, UNCHANGED)[token] < self.exit.threshold
        return bool(unsure) or super().should_stop(laws, tip, token)

    def observe(self, round: Round) -> None:
        self.exit = self.exit.after(
            len(round.verdict.accepted), len(round.tree.tokens), self.wanted, self.gamma
        )

    def end(self) -> None:
        self.exit = self.first


@technique(
    title="Draft & Verify: self-speculative decoding",
    summary="the target drafts with layers skipped",
    paper="Zhang et al. 2023, arXiv 2309.08168",
    family="drafting",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob(
            "skip",
            "default",
            "sublayers left out: a3+m5-7, none, default, or a search's .json",
            small=("a1+m1", "m0", None),
        ),
        Knob("gamma", 8, "most tokens drafted in a round", low=1),
        Knob(
            "threshold",
            0.8,
            "drafting ends behind a token less likely than this",
            low=0.0,
            high=1.0,
            small=(0.5, 0.0),
        ),
        Knob(
            "wanted",
            0.9,
            "share of drafted tokens that is to pass: the threshold adapts to it",
            low=0.0,
            high=1.0,
        ),
    ),
)
def self_speculative(
    request: Request, *, skip: Any, gamma: int, threshold: float, wanted: float
) -> Decoder:
    """The target drafts for itself with sublayers skipped, and verifies with all of them."""
    session: Any = request.target
    chosen = parse_skip_set(skip, session.model.config.n_layers)
    return request.decoder(
        SelfSpeculativeDrafter(session, chosen, gamma, request.stop.eos, threshold, wanted),
        verify_tree,
    )
