"""A small model as the drafter: it samples a chain of tokens under the same warp as the target."""

from collections.abc import Sequence

from tinyspec.decoding.chance import Chance
from tinyspec.decoding.decode import Laws, NoDraft, Round, Target
from tinyspec.decoding.sampling import Warp
from tinyspec.lm.feed import Scores
from tinyspec.tree import TokenTree


class ModelDraft(NoDraft):
    """Draws `gamma` tokens one after the other from a model, declaring the law each was drawn from.

    The text so far is kept in the draft's own session, so each proposed token costs one row, and tokens that the target
    accepted are not run again. Behind a fully accepted draft the last token's row is missing: it is run with the next
    proposal.
    """

    def __init__(self, model: Target, gamma: int, ends: frozenset[int] = frozenset()):
        self.model, self.gamma, self.ends = model, gamma, ends

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        self.model.extend(tokens)

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        tree = TokenTree()
        for _ in range(min(self.gamma, room)):
            laws = Laws(self.model.score(tree), warp, context, tree)
            law = laws[len(tree.tokens) - 1]
            token = chance.draw(law)
            tree = TokenTree.chain((*tree.tokens, token), (*tree.laws, law))
            if token in self.ends:
                break  # nothing comes after the end of a text
        return tree

    def observe(self, round: Round) -> None:
        self.model.append(round.tokens)

    def rewind(self, length: int) -> None:
        self.model.rewind(length)

    def end(self) -> None:
        self.model.end()
