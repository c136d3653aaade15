"""LayerSkip: draft with a model's first layers, and verify with its remaining layers.

Paper: Elhoushi et al., ACL 2024, arXiv 2404.16710.

Idea. After layer E of L, the model's own final norm and head predict the next token. gamma tokens
are drafted in that way, each by E layers. Then layers E + 1 to L run once, over all gamma + 1
positions together, and the draft is verified. There is one cache: the keys and values of layers 1
to E that drafting computed are those of the whole model, so they are kept. The state of each
drafted position after layer E is kept too (the paper's exit query cache), and verification goes on
from there.

    gamma E                      layer evaluations to draft
    E + (L - E) (gamma + 1)      to verify: first the last draft token, which has not been run
    L (gamma + 1)                together: what plain decoding of gamma + 1 tokens takes

Training. Layer dropout that rises with depth, and losses at all exits through the one head, in a
rotational or gradual curriculum (training/exit_losses.py). A model that was not trained so is
decoded correctly, but its exits predict less well (`tinyspec bench layerskip`).

Guarantee: EXACT. The paper's algorithm is greedy; when sampling, the declared draft distribution is
verified by the ordinary acceptance rule.
Pitfall: verifying by a full pass from layer 1, which computes the first E layers twice; leaving
rejected tokens in the caches of the first layers.
Ablation: a model of which only the last layer was taught. In a test on made texts its share of
accepted draft tokens is at least 10 points lower. At exit 4 it is 14 % with exits-plain and 46 %
with exits-layerskip; losses at all exits without dropout reach 63 %, so no gain of the dropout is
shown (tutorials/results/layerskip.md).
Tests: tests/early_exit/test_layerskip.py (`draft_and_verify` against the code that runs, outcome by
outcome; the layer evaluations of every round; keys and values after each round; the draft against
the model cut off after layer E).
Left out: nothing of decoding. The paper finds E and gamma by a sweep and gives no defaults; its
code's example, 8 of 32 layers and 6 tokens, is the default here, as a quarter of the depth.
"""

from collections.abc import Callable
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import SharedSessionDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan
from tinyspec.technique import Guarantee, Knob, Request, technique


def draft_and_verify(
    early: Callable[[list[int]], Any],
    late: Callable[[list[Any]], list[Any]],
    read: Callable[[Any], Any],
    gamma: int,
    verify: Callable[..., list[int]],
    rng: Any,
) -> list[int]:
    """Return the tokens of one round (section 4.3).

    early   draft tokens after the text -> the newest position's state after layer E
    late    gamma + 1 states after layer E -> as many after layer L: all positions together
    read    state -> distribution [V]: final norm and head, the same for both
    verify  (p, q, draft, rng) -> tokens: `verify_chain` of speculative decoding
    rng     a numpy.random.Generator

    The decoder runs a view of the session that ends after layer E. A test compares the two on every
    outcome.
    """
    draft, q, states = list[int](), list[Any](), list[Any]()
    for _ in range(gamma):
        states.append(early(draft))
        q.append(read(states[-1]))
        draft.append(rng.choice(len(q[-1]), p=q[-1]))
    states.append(early(draft))  # the last draft token, which drafting has not run
    p = [read(state) for state in late(states)]  # goes on from the states that are known
    return verify(p, q, draft, rng)


def resolve_exit_layer(exit: int, depth: int, name: str = "the model") -> int:
    """Return the number of layers that draft; 0 is a quarter of the depth, rounded up.

    Raises TinyspecError if the model has no such exit.

    >>> resolve_exit_layer(0, 32), resolve_exit_layer(0, 10), resolve_exit_layer(4, 10)
    (8, 3, 4)
    """
    if exit > depth:
        raise TinyspecError(
            f"exit {exit} is out of range: {name} has {depth} layers; layerskip takes 1 to {depth}"
        )
    return exit or (depth + 3) // 4


def count_layer_evaluations(drafted: int, exit: int, depth: int) -> tuple[int, int]:
    """Return the layer evaluations of a round: (to draft, to verify).

    >>> count_layer_evaluations(6, 8, 32), sum(count_layer_evaluations(6, 8, 32)) == 32 * 7
    ((48, 176), True)
    """
    return drafted * exit, exit + (depth - exit) * (drafted + 1)


@technique(
    title="LayerSkip: self-speculative decoding from an early exit",
    summary="early layers draft, late layers verify",
    paper="Elhoushi et al. 2024, arXiv 2404.16710",
    reported="up to 2.16x, summaries (abstract)",
    family="early exit",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob(
            "exit",
            0,
            "layers that draft; 0: a quarter of the model's",
            low=0,
            high=1024,
            small=(1, 2, 0),
        ),
        Knob("gamma", 6, "tokens drafted in a round", low=1, high=1024, small=(2, 1)),
    ),
)
def layerskip(request: Request, *, exit: int, gamma: int) -> Decoder:
    """Return a decoder whose target drafts with its first layers and verifies with the others."""
    session: Any = request.target
    model = session.model
    early = session.view(Plan(last=resolve_exit_layer(exit, model.config.n_layers, model.name)))
    return request.decoder(SharedSessionDrafter(early, gamma, request.stop.eos), verify_tree)
