"""Early exits: a target that runs a token's layers one after the other until a rule says stop, and
fills what it left out.

A token that leaves after layer e has no keys and values above e, which the tokens behind it will
read. What is done about that has three names, and each is one line on a session:

    copy       the state at the exit stands for those of the layers above; each layer makes its own
               keys and values from it
    recompute  the layers above are run after all, before the next token; the token that left keeps
               the row of its exit
    postpone   nothing, until a token goes deeper: then all that wait are run along with it, as far
               as it goes

`copy` costs least and is not cache-exact; the other two are. The prompt runs through every layer,
but for its last token, from whose row the first new token is drawn. The token at the end of a text
is never filled: nobody reads it.

What a rule is, and where tokens may leave, is the technique's: CALM's is in early_exit/calm.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.tree import TokenTree

NOTHING = TokenTree()


class ExitPoint(NamedTuple):
    """A token at a layer where it may leave.

    layer   layers that it ran
    step    which new token its row decides: 0 is the first behind the prompt
    logits  [V] the row of an exit here; None where the rule reads none
    states  what came out of this layer, then out of the layer below, ...: as many as the rule
            reads, each [d]
    """

    layer: int
    step: int
    logits: Any
    states: Sequence[Any]


class ExitRule:
    """When a token leaves. This one: never.

    layers  where it is asked, from the lowest up; whoever stays in all of them runs the whole model
    row     whether it reads the row of an exit: a product with the vocabulary matrix each time it
            is asked
    states  how many states it reads
    """

    layers: Sequence[int] = ()
    row = False
    states = 0

    def should_exit(self, at: ExitPoint) -> bool:
        """Whether the token leaves here. Asked from the lowest layer up, until it says yes."""
        raise NotImplementedError


Fill = Callable[[Any, Sequence[int]], None]
"""(session, positions): gives tokens before the newest, which left early, what the next one will
read of them.
"""


def fill_by_copy(session: Any, positions: Sequence[int]) -> None:
    """The exit's state, through the key and value matrices of each layer above."""
    session.fill("copy", positions)


def fill_by_recompute(session: Any, positions: Sequence[int]) -> None:
    """The layers above are run."""
    session.fill("recompute", positions)


def postpone_fill(session: Any, positions: Sequence[int]) -> None:
    """A session runs whatever is behind along with the next token, as far as that goes."""


FILLS: Mapping[str, Fill] = {
    "copy": fill_by_copy,
    "recompute": fill_by_recompute,
    "postpone": postpone_fill,
}


class ExitTarget:
    """A session whose tokens may leave early. `Scores.layers` says after how many layers each row
    was read.

    It decodes one token at a time: a rule that may stop takes no drafts, since the exits of a draft
    would depend on what is drafted beside it. The rule that never stops is the session itself.
    """

    def __init__(self, session: Any, rule: ExitRule, fill: str = "copy"):
        self.session, self.rule, self.fill = session, rule, FILLS[fill]
        self.start = 0  # where the new tokens begin
        self.unfilled: list[int] = []  # positions of tokens that left early and were not filled yet
        depth = session.model.config.n_layers
        for layer in rule.layers:
            if not 1 <= layer <= depth:
                raise TinyspecError(
                    f"exit layer {layer} is out of range: {session.model.name} has layers 1 to {depth}"
                )

    def __len__(self) -> int:
        return len(self.session)

    @property
    def model(self) -> Any:
        """The session's."""
        return self.session.model

    @property
    def text(self) -> list[int]:
        """Committed token ids."""
        return list(self.session.text)

    @property
    def cache_exact(self) -> bool:
        """Whether the keys and values are those of teacher-forcing the text."""
        return bool(self.session.cache_exact)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Forced text runs through every layer."""
        self._fill_pending()
        scores: Scores = self.session.extend(tokens, hidden_layers)
        self.start = len(self.session)
        return scores

    def append(self, tokens: Sequence[int]) -> None:
        """Commit forced tokens and run nothing yet."""
        self.session.append(tokens)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """The row of the newest token, from the first layer whose rule says stop."""
        self._fill_pending()
        if tree.tokens and self.rule.layers:
            raise ValueError("an early exit decides token by token: it takes no drafts")
        for layer in self.rule.layers:
            below = (
                tuple(range(max(layer - self.rule.states + 1, 0), layer + 1))
                if self.rule.states
                else ()
            )
            seen = self.session.advance(tree, layer, hidden_layers=below, head=self.rule.row)
            states = [rows[0] for rows in seen.hidden][::-1]
            if self.rule.should_exit(
                ExitPoint(
                    layer, len(self) - self.start, seen.logits[0] if self.rule.row else None, states
                )
            ):
                self.unfilled = [
                    *(position for position in self.unfilled if position < len(self) - 1),
                    len(self) - 1,
                ]
                scores: Scores = self.session.advance(
                    tree, layer, hidden_layers=hidden_layers, head=True
                )
                return scores
        scores = self.session.score(tree, hidden_layers)
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep what was decided."""
        self.session.commit(path, next)

    def rewind(self, length: int) -> None:
        """Take back the text to `length` tokens; the new newest one is run anew."""
        self.session.rewind(length)
        self.unfilled = [position for position in self.unfilled if position < length - 1]
        self.start = min(self.start, length)

    def end(self) -> None:
        """Close the request."""
        self.session.end()
        self.start, self.unfilled = 0, []

    def _fill_pending(self) -> None:
        """Fill what left early, but for the newest token, which nobody has read yet."""
        due = [position for position in self.unfilled if position < len(self) - 1]
        if due:
            self.unfilled = self.unfilled[len(due) :]
            self.fill(self.session, due)
