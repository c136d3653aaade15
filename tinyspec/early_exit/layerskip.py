"""LayerSkip: a model whose early layers were taught to speak drafts with them, and verifies with
the rest of itself.

Elhoushi et al., ACL 2024, arXiv 2404.16710. Behind layer E of L, the model's own final norm and
head say the next token: n tokens are drafted that way, each by E layers. Then layers E + 1 to L run
once, over all n + 1 rows together, and judge the draft. There is one cache: the keys and values
that drafting left in layers 1 to E are those of the whole model, so they are kept, and the state
that each drafted row had behind layer E is kept too (the paper's exit query cache), so verification
goes on from there. A round costs n E for drafting, E for the last guess, which no draft has run,
and (L - E) (n + 1) above: L (n + 1) layer evaluations, of which only the first n E stand in a row.
That is no more than plain decoding of as many tokens; refused guesses are what is lost.

What makes it LayerSkip and not any early exit: the recipe that trains the model
(tinyspec/training/exit_losses.py: layer dropout that rises with depth, losses at all exits through
the one head, in a rotational or gradual curriculum), and that what the exit computed is reused and
not repeated. A model that was not trained so is decoded correctly all the same, but its exits say
less: `tinyspec bench layerskip` shows by how much, on three models of one shape
(models/exits-plain, exits-loss, exits-layerskip).

Guarantee: EXACT; the paper's algorithm is greedy, and sampling judges the declared draft by the
ordinary acceptance test.
Tested in tests/early_exit/test_layerskip.py: the joint law, the layer evaluations of every round
from the forward log, keys and values of every layer after each round, the draft's law against the
model cut off behind layer E, E = L (all is accepted).
Left out: nothing of decoding. The paper finds E and n by a sweep and gives no defaults; its code's
example, 8 of 32 layers and 6 tokens, is the default here, as a share of the depth: a quarter,
rounded up.
"""

from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.modeldraft import SharedSessionDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Plan
from tinyspec.technique import Guarantee, Knob, Request, technique


def resolve_exit_layer(exit: int, depth: int, name: str = "the model") -> int:
    """The knob as a number of layers; 0 is a quarter of the depth. TinyspecError where the model
    has no such exit.

    >>> resolve_exit_layer(0, 32), resolve_exit_layer(0, 10), resolve_exit_layer(4, 10)
    (8, 3, 4)
    """
    if exit > depth:
        raise TinyspecError(
            f"exit {exit} is out of range: {name} has {depth} layers; layerskip takes 1 to {depth}"
        )
    return exit or (depth + 3) // 4


def count_layer_evaluations(drafted: int, exit: int, depth: int) -> tuple[int, int]:
    """Layer evaluations of a round that drafted so many tokens: (drafting, verification).

    >>> count_layer_evaluations(6, 8, 32), sum(count_layer_evaluations(6, 8, 32)) == 32 * 7
    ((48, 176), True)
    """
    return drafted * exit, exit + (depth - exit) * (drafted + 1)


@technique(
    title="LayerSkip: self-speculative decoding from an early exit",
    summary="early layers draft, late layers verify",
    paper="Elhoushi et al. 2024, arXiv 2404.16710",
    family="early exit",
    guarantee=Guarantee.EXACT,
    knobs=(
        Knob("exit", 0, "layers that draft; 0: a quarter of the model's", low=0, small=(1, 2, 0)),
        Knob("gamma", 6, "tokens drafted in a round", low=1, small=(2, 1)),
    ),
)
def layerskip(request: Request, *, exit: int, gamma: int) -> Decoder:
    """The target's first layers draft a chain; the others judge it."""
    session: Any = request.target
    model = session.model
    early = session.view(Plan(last=resolve_exit_layer(exit, model.config.n_layers, model.name)))
    return request.decoder(SharedSessionDrafter(early, gamma, request.stop.eos), verify_tree)
