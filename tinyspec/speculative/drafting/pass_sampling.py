"""PaSS: look-ahead embeddings after the newest token make the target its own draft model.

Paper: Monea, Joulin, Grave 2023, arXiv 2311.13581; we found no public code. The embeddings are
trained; the target is not.

Idea. A transformer computes many positions in the time of one. So n look-ahead embeddings are put
after the newest token. Each sees the text and the ones before it. The row of look-ahead j is
trained to predict the token j + 2 places after the newest token's position, without the tokens
between. Rounds alternate:

    first   newest, LA_0 .. LA_(n-1)     the newest token's row gives one token, exactly;
                                         the rows of the look-aheads are kept
    then    newest, x_0 .. x_(n-1)       x_j is sampled from the row of LA_j, and verified

So two passes give two tokens, and the draft tokens that are accepted. Only n vectors of d numbers
are trained, by cross-entropy on texts that the target wrote, at random positions.

Guarantee: EXACT. Draft tokens declare the distribution of their look-ahead's row under the user's
sampling settings.
Pitfall: look-aheads that stay in the cache; a row that is read one look-ahead late. Law F2
(laws/feature_laws.py) detects the latter; the output stays right.
Tests: tests/speculative/test_pass_sampling.py (the loss of a look-ahead is that of its own token;
the target's own rows do not change to the bit; rounds take turns; look-aheads end with the
context).
Ours, because we could not read the paper's: the look-aheads begin near the mean embedding.
Left out: look-aheads after every draft token, which `bita` has; the paper's training on ordinary
text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tinyspec.decoding.decode import BaseDrafter, Decoder, Round
from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams, kernels_of
from tinyspec.decoding.verify import verify_tree
from tinyspec.lm.config import Config
from tinyspec.lm.forward import Scores
from tinyspec.lm.heads import FrozenTarget, head_weights
from tinyspec.speculative.probing import (
    ProbeSettings,
    init_probe_embeddings,
    predict_by_probes,
    probe_loss,
    sample_chain,
)
from tinyspec.technique import (
    Guarantee,
    HeadWeights,
    Knob,
    Request,
    Trained,
    TrainingBatch,
    technique,
)
from tinyspec.tree import TokenTree

AHEAD = "ahead.weight"

# ------------------------------------------------------------------ what is trained


@dataclass(frozen=True)
class PassSettings(ProbeSettings):
    """The section [head] of a recipe.

    tokens  look-ahead embeddings, and tokens of a draft
    """

    METHOD = "PaSS"
    tokens: int = 4


def ahead_shapes(config: Config, settings: PassSettings) -> dict[str, tuple[int, ...]]:
    """Return the shape of the embeddings."""
    return {AHEAD: (settings.tokens, config.d_model)}


def initialize_ahead(target: FrozenTarget, settings: PassSettings, seed: int) -> dict[str, Tensor]:
    """Return look-aheads that begin as the mean embedding, each a little different."""
    return {AHEAD: init_probe_embeddings(target, settings.tokens, seed)}


def count_ahead(weights: HeadWeights) -> int:
    """Return how many look-aheads there are."""
    return len(weights[AHEAD])


def predict_ahead(
    weights: HeadWeights, target: FrozenTarget, ids: Tensor, states: Tensor, depth: int
) -> Tensor:
    """Return the logits [B, T, V] of a look-ahead after every position of a text."""
    return predict_by_probes(target, ids, weights[AHEAD], depth)


def pass_loss(weights: HeadWeights, target: FrozenTarget, batch: TrainingBatch) -> Tensor:
    """Return the mean cross-entropy of all look-aheads after random positions."""
    return probe_loss(target, batch, weights[AHEAD])


# ------------------------------------------------------------------ the draft


class PassDrafter(BaseDrafter):
    """Rounds alternate: one runs the look-aheads, the next drafts from their rows.

    n            look-aheads, and tokens of a draft
    first_probe  id of the first look-ahead
    positions    tokens that the target's context holds
    """

    def __init__(self, n: int, first_probe: int, positions: int):
        self.n, self.first_probe, self.positions = n, first_probe, positions
        self.logits: Sequence[Any] = ()  # rows of the look-aheads of the last round

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.logits = ()

    def propose(
        self,
        context: Sequence[int],
        max_draft_depth: int,
        sampling: SamplingParams,
        rng: RandomSource,
    ) -> TokenTree:
        rows, self.logits = self.logits, ()
        if len(rows) == 0:
            fits = min(self.n, self.positions - len(context)) if max_draft_depth > 0 else 0
            ids = range(self.first_probe, self.first_probe + fits)
            return TokenTree(tuple(ids), tuple(range(-1, fits - 1)), (None,) * fits, (True,) * fits)
        tokens, draft_probs = sample_chain(rows[:max_draft_depth], context, sampling, rng)
        return TokenTree.chain(tokens, draft_probs)

    def observe(self, round: Round) -> None:
        probes = [node for node, is_probe in enumerate(round.tree.probe) if is_probe]
        if probes:
            rows = kernels_of(round.scores.logits).as_rows(round.scores.logits)
            self.logits = [rows[node + 1] for node in probes]

    def rewind(self, length: int) -> None:
        self.logits = ()

    def end(self) -> None:
        self.logits = ()


@technique(
    title="PaSS: parallel speculative sampling",
    summary="look-ahead embeddings draft",
    paper="Monea et al. 2023, arXiv 2311.13581",
    reported="up to 1.3x (survey)",
    family="drafting",
    guarantee=Guarantee.EXACT,
    hidden=True,
    trained=Trained(
        PassSettings,
        lambda config, settings: (),
        ahead_shapes,
        initialize_ahead,
        count_ahead,
        predict_ahead,
        pass_loss,
        small=PassSettings(tokens=2),
    ),
    knobs=(Knob("tokens", 16, "look-aheads that are used, at most", low=1, high=16, small=(2, 1)),),
)
def pass_sampling(request: Request, *, tokens: int) -> Decoder:
    """Return a decoder that drafts with the target's look-ahead embeddings."""
    target: Any = request.target
    ahead = head_weights(target.model, "pass_sampling")[AHEAD][:tokens]
    target.set_probe_embeddings(ahead.to(target.model.device, target.model.state_dtype))
    config = target.model.config
    positions = request.positions or config.max_positions
    return request.decoder(PassDrafter(len(ahead), config.vocab_size, positions), verify_tree)
