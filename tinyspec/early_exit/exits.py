"""Early exits: run a token's layers one by one until a rule stops, and fill what was skipped.

A token that leaves after layer e has no keys and values above e, but later tokens attend to them.
There are four remedies:

    copy       each layer above makes its own keys and values from the state at the exit
    recompute  the layers above are run after all, before the next token; the token keeps the row of
               its exit
    postpone   nothing is run until a token goes deeper; then all tokens that wait are run with it,
               as deep as it goes
    restart    as postpone, but the tokens that wait are run from the first layer each time

`copy` costs least and is not cache-exact; the others are. The prompt runs through every layer,
except its last token, from whose row the first new token is drawn; a rule may let the prompt's
tokens leave too. The last token of a text is never filled, because no token attends to it.

A technique says by its rule where tokens may leave; early_exit/calm.py has CALM's. Two are trained
on how right each exit is: `read_exits`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Scores
from tinyspec.tree import TokenTree


class ExitPoint(NamedTuple):
    """A token at a layer where it may leave.

    layer   layers that it ran
    step    which new token its row decides: 0 is the first after the prompt
    logits  [V] of the exit at this layer; None if the rule does not read them
    states  as many hidden states as the rule reads, each [d]: after this layer, after the one
            below, ...
    """

    layer: int
    step: int
    logits: Any
    states: Sequence[Any]


class ExitRule:
    """The rule by which a token leaves. This one never lets it leave.

    layers        where it may be asked, from the lowest up; a token that stays everywhere runs all
    reads_logits  whether it reads the logits of an exit: one product with the output matrix
    states        how many hidden states it reads
    text_layers   layers whose states it reads for text that is given, not generated. The states of
                  the last layer are those after the final norm
    prompt        whether the prompt's tokens leave too, each after the first layer of `layers_of`
    compares      whether it learns from the rows of tokens that left early and are run further
    """

    layers: Sequence[int] = ()
    reads_logits = False
    states = 0
    text_layers: Sequence[int] = ()
    prompt = False
    compares = False

    def read_text(self, states: Tensor, first: int) -> None:
        """Read forced text that has just been run: [layers, n, d], from position `first` on.

        It is called before `begin`.
        """

    def forget_text(self, length: int) -> None:
        """Forget what was read of the positions from `length` on."""

    def begin(self, session: Any) -> None:
        """Prepare for new tokens. Forced text has just been run, but for its last token."""

    def layers_of(self, token: int, position: int) -> Iterable[int]:
        """Return the layers where this token is asked. A rule that knows its layer returns one.

        The next layer is taken when the token has been asked at the one before it.
        """
        return self.layers

    def should_exit(self, at: ExitPoint) -> bool:
        """Return whether the token leaves here. Asked from the lowest layer up, until it does."""
        raise NotImplementedError

    def learn_from_pairs(self, pairs: Sequence[tuple[ExitPoint, Any]]) -> None:
        """Learn from tokens that have run all layers by now, if the rule `compares`.

        pairs  where each was asked last, and its row [V] after the last layer. They are the tokens
               that waited, in the order of the text, and the one that stayed.
        """


Fill = Callable[[Any, Sequence[int]], None]
"""(session, positions): give tokens that left early the keys and values that they lack."""


def fill_by_copy(session: Any, positions: Sequence[int]) -> None:
    """Make keys and values from the exit's state, by the matrices of each layer above."""
    session.fill_cache("copy", positions)


def fill_by_recompute(session: Any, positions: Sequence[int]) -> None:
    """Run the layers above."""
    session.fill_cache("recompute", positions)


def postpone_fill(session: Any, positions: Sequence[int]) -> None:
    """Do nothing: the session runs these positions along with the next token that goes deeper."""


def restart_tokens(session: Any, positions: Sequence[int]) -> None:
    """Forget them, so that they are run along with the next token, again from the first layer."""
    session.restart(positions)


FILLS: Mapping[str, Fill] = {
    "copy": fill_by_copy,
    "recompute": fill_by_recompute,
    "postpone": postpone_fill,
    "restart": restart_tokens,
}


def parse_layers(text: str, depth: int, name: str, *, top: bool = False) -> tuple[int, ...]:
    """Return the layers of a text such as 4,8, from the lowest up.

    top  whether the last layer may be one of them

    Raises TinyspecError for what is no list of such layers.

    >>> parse_layers("5, 2,5", 6, "the model"), parse_layers("6", 6, "the model", top=True)
    ((2, 5), (6,))
    """
    try:
        layers = tuple(sorted({int(word) for word in text.split(",")}))
    except ValueError:
        raise TinyspecError(f"exits is {text!r}: it must be layers, such as 4,8") from None
    if not 1 <= layers[0] <= layers[-1] < depth + top:
        hint = f"choose layers from 1 to {depth - 1 + top}" if depth + top > 1 else "it has no exit"
        raise TinyspecError(f"exits is {text!r}: {name} has {depth} layers: {hint}")
    return layers


class ExitTarget:
    """A session whose tokens may leave early.

    `Scores.layers` says after how many layers each row was read. A rule that may stop decodes one
    token at a time and takes no drafts, since the exits of a draft would depend on what is drafted
    beside it. With the rule that never stops, it acts as the session.
    """

    def __init__(self, session: Any, rule: ExitRule, fill: str = "copy"):
        self.session, self.rule, self.fill = session, rule, FILLS[fill]
        self.start = 0  # where the new tokens begin
        self.unfilled: list[int] = []  # positions that left early and lack keys and values
        self.is_filled_at_once = fill in ("copy", "recompute")
        self.points: dict[int, ExitPoint] = {}  # where each was asked last, if the rule compares
        depth = session.model.config.n_layers
        for layer in rule.layers:
            if not 1 <= layer <= depth:
                raise TinyspecError(
                    f"exit layer {layer} is out of range: {session.model.name} has layers 1 to "
                    f"{depth}"
                )

    def __len__(self) -> int:
        return len(self.session)

    @property
    def model(self) -> Any:
        """Return the session's model."""
        return self.session.model

    @property
    def text(self) -> list[int]:
        """Return the committed token ids."""
        return list(self.session.text)

    @property
    def cache_exact(self) -> bool:
        """Return whether the keys and values are those of teacher-forcing the text."""
        return bool(self.session.cache_exact)

    def extend(self, tokens: Sequence[int], hidden_layers: Sequence[int] = ()) -> Scores:
        """Run forced text through every layer, or as far as the rule lets it."""
        self._fill_pending()
        if self.rule.prompt:
            self._run_prompt(tokens)
            tokens = ()
        n, is_new = len(hidden_layers), len(self.session) > self.start
        scores: Scores = self.session.extend(tokens, (*hidden_layers, *self.rule.text_layers))
        if self.rule.text_layers:
            read = scores.hidden[n:, int(is_new) :]  # the first row may be of a generated token
            self.rule.read_text(read, len(self.session) - 1 - read.shape[1])
            scores = scores._replace(hidden=scores.hidden[:n])
        self.start = len(self.session)
        self._keep_unfilled(())
        self.rule.begin(self.session)
        return scores

    def append(self, tokens: Sequence[int]) -> None:
        """Commit forced tokens and run nothing yet; what may leave early is run at once."""
        if not self.rule.prompt:
            self.session.append(tokens)
            return
        self._fill_pending()
        self._run_prompt(tokens)

    def score(self, tree: TokenTree, hidden_layers: Sequence[int] = ()) -> Scores:
        """Return the newest token's row, read from the first layer where the rule stops."""
        self._fill_pending()
        if tree.tokens and self.rule.layers:
            raise ValueError("an early exit decides token by token: it takes no drafts")
        newest, points = len(self) - 1, list[ExitPoint]()
        for layer in self.rule.layers_of(self.session.committed[newest].token, newest):
            below = tuple(range(max(layer - self.rule.states + 1, 0), layer + 1))
            seen = self.session.run_to_layer(
                tree, layer, hidden_layers=below, head=self.rule.reads_logits
            )
            states = [rows[0] for rows in seen.hidden][::-1]
            points.append(
                ExitPoint(
                    layer,
                    len(self) - self.start,
                    seen.logits[0] if self.rule.reads_logits else None,
                    states,
                )
            )
            if self.rule.should_exit(points[-1]):
                self.unfilled = [
                    *(position for position in self.unfilled if position < newest),
                    newest,
                ]
                if self.rule.compares:
                    self.points[newest] = points[-1]
                scores: Scores = self.session.run_to_layer(
                    tree, layer, hidden_layers=hidden_layers, head=True
                )
                return scores
        if not (self.rule.compares and points):
            scores = self.session.score(tree, hidden_layers)
        else:
            scores, rows = self.session.score_with_late_rows(tree, hidden_layers)
            waited = [(self.points[at], rows[at]) for at in self.unfilled if at in rows]
            self.rule.learn_from_pairs([*waited, (points[-1], scores.logits[0])])
        self._keep_unfilled(())
        return scores

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Commit the accepted path and the next token."""
        self.session.commit(path, next)

    def rewind(self, length: int) -> None:
        """Forget the text after `length` tokens; its last token is run again."""
        self.session.rewind(length)
        self.rule.forget_text(length - 1)
        self._keep_unfilled([position for position in self.unfilled if position < length - 1])
        self.start = min(self.start, length)

    def end(self) -> None:
        """End the request."""
        self.session.end()
        self.rule.forget_text(0)
        self.start, self.unfilled, self.points = 0, [], {}

    def _fill_pending(self) -> None:
        """Fill positions that left early, except the newest, which no token attends to yet."""
        due = [position for position in self.unfilled if position < len(self) - 1]
        if due:
            if self.is_filled_at_once:
                self._keep_unfilled(self.unfilled[len(due) :])
            self.fill(self.session, due)

    def _keep_unfilled(self, kept: Sequence[int]) -> None:
        """Keep these positions as unfilled. The others are filled by now, or were cut off."""
        self.unfilled = list(kept)
        self.points = {at: self.points[at] for at in self.unfilled if at in self.points}

    def _run_prompt(self, tokens: Sequence[int]) -> None:
        """Commit forced tokens, and run each but the last through as many layers as the rule says.

        Those that leave first are run and filled first, because deeper tokens attend to them.
        """
        first, depth = max(len(self) - 1, 0), self.model.config.n_layers
        self.session.append(tokens)
        leaves = {
            at: next(iter(self.rule.layers_of(self.session.committed[at].token, at)), depth)
            for at in range(first, len(self) - 1)
        }
        for layer in sorted(set(leaves.values())):
            self.session.run_committed([at for at in leaves if leaves[at] >= layer], layer)
            leaving = [at for at in leaves if leaves[at] == layer < depth]
            if leaving:
                self.fill(self.session, leaving)


# ------------------------------ what rules compute with


def as_doubles(x: Tensor) -> Any:
    """Return a tensor as an array of float64 on the host."""
    return x.detach().double().cpu().numpy()


def sigmoid(x: float) -> float:
    """Return 1 / (1 + exp(-x)), for any x.

    >>> sigmoid(0.0), sigmoid(-1e9), sigmoid(1e9)
    (0.5, 0.0, 1.0)
    """
    e = math.exp(-abs(x))
    return 1 / (1 + e) if x >= 0 else e / (1 + e)


# ------------------------------ how right each exit is, for training


class ExitReadings(NamedTuple):
    """What the exits after all layers say of n tokens that are known.

    log_probs  [n, L] log-probability of the right token
    words      [n, L] the likeliest token
    is_right   [n, L] whether they are the same
    """

    log_probs: Tensor
    words: Tensor
    is_right: Tensor


@torch.no_grad()
def read_exits(
    states: Iterable[Tensor], compute_logits: Callable[[Tensor], Tensor], targets: Tensor
) -> ExitReadings:
    """Return how right each exit is. No gradient flows.

    states          [n, d] after each layer
    compute_logits  states -> logits [n, V]: final norm and output matrix
    targets         [n] the right tokens
    """
    log_probs, words = list[Tensor](), list[Tensor]()
    for state in states:
        logits = compute_logits(state).float()
        log_probs.append(logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0])
        words.append(logits.argmax(-1))
    likeliest = torch.stack(words, dim=-1)
    is_right = likeliest == targets[:, None]
    return ExitReadings(torch.stack(log_probs, dim=-1), likeliest, is_right)
