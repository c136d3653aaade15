"""The loop that every technique which extends a text shares: propose a tree, score it once, judge it, commit.

Three plug points: a `Drafter` guesses, a `Target` scores (and may run less than the whole model), a `Verifier` decides. A
`Decoder` can be rewound, so a decoder serves as another's drafter: its tokens then carry the law they were committed under.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from tinyspec.decoding.chance import Chance
from tinyspec.decoding.sampling import Warp, in_memory, on_device
from tinyspec.decoding.stop import Reason, Stop
from tinyspec.decoding.verify import Verdict
from tinyspec.errors import TinyspecError
from tinyspec.lm.feed import Call, Scores
from tinyspec.tree import ROOT, Row, TokenTree


class Target(Protocol):
    """Whose law is kept. A `Session` is one, so is a view of it, so is a table of conditionals.

    `extend` commits forced tokens and runs all but the last; `append` commits them and runs nothing yet.
    """

    @property
    def cache_exact(self) -> bool: ...
    def extend(self, tokens: Sequence[int], taps: Sequence[int] = ()) -> Scores: ...
    def append(self, tokens: Sequence[int]) -> None: ...
    def score(self, tree: TokenTree, taps: Sequence[int] = ()) -> Scores: ...
    def commit(self, path: Sequence[int], next: int | None) -> None: ...
    def rewind(self, length: int) -> None: ...
    def end(self) -> None: ...


class Laws:
    """The target's law after each node: `laws[node]`, `laws[ROOT]`. Warped when first asked for, with the node's own path
    as history (penalties need it), and remembered."""

    def __init__(self, scores: Scores, warp: Warp, context: Sequence[int], tree: TokenTree):
        self.scores, self.warp, self.context, self.tree = scores, warp, context, tree
        self._rows: dict[int, Row] = {}
        self._logits: Any = None
        self._block: tuple[Any, Any] | None = None

    def __getitem__(self, node: int) -> Row:
        if node not in self._rows:
            block = self.on_device
            self._rows[node] = self.warped(node, self.warp) if block is None else block[0][node + 1]
        return self._rows[node]

    @property
    def on_device(self) -> tuple[Any, Any] | None:
        """All rows [n + 1, V] and their highest logits where the logits live on a device: there many rows take as long as
        one, and a walk over all of them waits for the device once. None on the host."""
        if self._block is None and on_device(self.scores.logits):
            nodes = range(len(self.tree.tokens)) if self.warp.repetition_penalty != 1.0 else ()
            own = [self.tree.spelled(self.tree.path(node)) for node in nodes]
            histories = [self.context, *([*self.context, *path] for path in own)]
            self._block = self.warp.block(self.scores.logits, histories)
        return self._block

    def certain(self, node: int) -> int | None:
        """The token that has all the mass after a node, where the law is greedy and on the host: it needs no row."""
        if on_device(self.scores.logits):
            return None
        return self.warp.certain(self.unwarped(node), self._history(node, self.warp))

    def warped(self, node: int, warp: Warp) -> Row:
        """The node's row under another warp (lenience at temperature 0 looks at the unsharpened law)."""
        return warp(self.unwarped(node), self._history(node, warp))

    def _history(self, node: int, warp: Warp) -> Sequence[int]:
        if warp.repetition_penalty == 1.0:
            return self.context
        return [*self.context, *self.tree.spelled(self.tree.path(node))]

    def unwarped(self, node: int) -> Any:
        """The node's row as the model gave it, in memory."""
        if self._logits is None:
            self._logits = in_memory(self.scores.logits)
        return self._logits[node + 1]

    def ranking(self, node: int) -> Any:
        """What orders the node's tokens at temperature 0, where its law is one of them: the logits, after the penalty."""
        penalty = self.warp.repetition_penalty
        return (
            self.unwarped(node)
            if penalty == 1.0
            else self.warped(node, Warp(repetition_penalty=penalty))
        )


class Rows(Sequence[Row]):
    """The rows of some nodes, made when they are asked for: a greedy walk needs none, and few drafters read them."""

    def __init__(self, laws: Laws, nodes: Sequence[int]):
        self.laws, self.nodes = laws, nodes

    def __len__(self) -> int:
        return len(self.nodes)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return tuple(self.laws[node] for node in self.nodes[at])
        return self.laws[self.nodes[at]]


class Round(NamedTuple):
    """What one step did: the event that statistics, streaming, replay and drafters read. All of it is after the cut.

    tokens       committed in this round
    laws         the row each of them is distributed under
    calls        ledger entries of the target in this round, draft_calls those of the drafter
    truncated    tokens that the verdict allowed and a stop cut off
    """

    tree: TokenTree
    scores: Scores
    verdict: Verdict
    tokens: tuple[int, ...]
    laws: Sequence[Row]
    calls: tuple[Call, ...] = ()
    draft_calls: tuple[Call, ...] = ()
    truncated: int = 0


class Drafter(Protocol):
    """Where the guesses come from. `taps` names the target's layers it wants to see."""

    taps: Sequence[int]

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        """The text was given these tokens; `scores.hidden` shows the rows that were run for it."""

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        """A tree at most `room` deep. The empty tree is plain decoding."""
        ...

    def observe(self, round: Round) -> None:
        """A round is over."""

    def rewind(self, length: int) -> None:
        """The text was taken back to `length` tokens."""

    def end(self) -> None:
        """The request is over."""


class Verifier(Protocol):
    def __call__(self, tree: TokenTree, p: Laws, chance: Chance, /) -> Verdict: ...


class NoDraft:
    """The drafter that proposes nothing, and what others inherit to say only what they do differently."""

    taps: Sequence[int] = ()

    def extend(self, tokens: Sequence[int], scores: Scores) -> None:
        return None

    def propose(self, context: Sequence[int], room: int, warp: Warp, chance: Chance) -> TokenTree:
        return TokenTree()

    def observe(self, round: Round) -> None:
        return None

    def rewind(self, length: int) -> None:
        return None

    def end(self) -> None:
        return None


class Decoder:
    """One request: a target, a drafter, a verifier, and the text they extend.

    positions  the most tokens the target's context holds (None: no limit)
    ledger     the list the target's and drafter's models write their calls to
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        *,
        warp: Warp | None = None,
        stop: Stop | None = None,
        positions: int | None = None,
        ledger: list[Call] | None = None,
    ):
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.warp, self.stop, self.positions = warp or Warp(), stop or Stop(), positions
        self.ledger: list[Call] = [] if ledger is None else ledger
        self.context: list[int] = []
        self.start = 0  # where the new tokens begin
        self.rounds = 0  # counts steps and is never rewound: it keys the chance
        self.finished: Reason | None = None

    @property
    def new(self) -> list[int]:
        """Tokens made here, after the prompt."""
        return self.context[self.start :]

    def extend(self, tokens: Sequence[int]) -> None:
        """Forced text: the prompt, or a correction from outside. Stops and max_new_tokens count from here on."""
        scores = self.target.extend(tokens, self.drafter.taps)
        self.drafter.extend(tokens, scores)
        self.context.extend(tokens)
        self.start = len(self.context)
        if not self.context:
            raise TinyspecError("the prompt is empty: give at least one token")
        room = self.stop.left(0, self._limit)
        self.finished = room[1] if room is not None and room[0] <= 0 else None

    @property
    def _limit(self) -> int | None:
        """How many new tokens the context has room for."""
        return None if self.positions is None else self.positions - self.start

    @property
    def room(self) -> int:
        """How deep a draft may be: one less than the tokens still wanted, since each round adds one of its own."""
        left = self.stop.left(len(self.context) - self.start, self._limit)
        return 1 << 30 if left is None else max(left[0] - 1, 0)

    def step(self, chance: Chance) -> Round:
        """One round. Raises ValueError once the text is finished."""
        if self.finished:
            raise ValueError(f"the text is finished ({self.finished})")
        mark = len(self.ledger)
        tree = self.drafter.propose(
            self.context, self.room, self.warp, chance.split("draft", self.rounds)
        )
        drafted = len(self.ledger)
        scores = self.target.score(tree, self.drafter.taps)
        scored = len(self.ledger)
        # rows are made when they are asked for, with the text as it is now
        past = self.context if self.warp.repetition_penalty == 1.0 else tuple(self.context)
        laws = Laws(scores, self.warp, past, tree)
        verdict = self.verifier(tree, laws, chance.split("verify", self.rounds))
        said = (*tree.spelled(verdict.path), *(() if verdict.next is None else (verdict.next,)))
        if not said:
            raise RuntimeError("the verifier committed nothing: a round must add a token")
        kept, self.finished = self.stop.cut(self.new, said, self._limit)
        path = verdict.path[:kept]
        next = verdict.next if kept > len(verdict.path) else None
        rows = Rows(laws, (ROOT, *path)[:kept])
        self.target.commit(path, next)
        self.context.extend(said[:kept])
        self.rounds += 1
        round = Round(
            tree,
            scores,
            Verdict(path, next, verdict.refused),
            said[:kept],
            rows,
            tuple(self.ledger[drafted:scored]),
            tuple(self.ledger[mark:drafted]),
            len(said) - kept,
        )
        self.drafter.observe(round)
        return round

    def rewind(self, length: int) -> None:
        """Take the text back to `length` tokens (a cascade's outer level disagreed)."""
        self.target.rewind(length)
        self.drafter.rewind(length)
        del self.context[length:]
        self.start = min(self.start, length)
        self.finished = None

    def end(self) -> None:
        """The request is over: target and drafter forget it."""
        self.target.end()
        self.drafter.end()
