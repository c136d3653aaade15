"""The text of a session: committed tokens, the guesses that hang from them, and who stands in which
slot.

Nothing here computes. Committed tokens stand in slots 0..n-1 (slot == position); uncommitted nodes
stand behind them, a parent before its children. Committing a path moves it, and the guesses below
it, to where they belong.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

from tinyspec.errors import TinyspecError
from tinyspec.lm.forward import Cache
from tinyspec.lm.node import Node
from tinyspec.lm.transformer import Model
from tinyspec.tree import ROOT, TokenTree


class Text:
    """Committed tokens and guesses of one model."""

    def __init__(self, model: Model, cache: Cache):
        self.model, self.cache = model, cache
        self.committed: list[Node] = []
        self.scored: list[Node] = []  # nodes of the last tree, by its indices
        self.adopted = 0  # how many ids beyond the vocabulary name a probe embedding
        self._extras: list[Node] = []  # probes of the last tree

    @property
    def text(self) -> list[int]:
        """Committed token ids."""
        return [node.token for node in self.committed]

    def __len__(self) -> int:
        return len(self.committed)

    def append(self, tokens: Iterable[int]) -> None:
        """Commit forced tokens. Nodes that already spell them are kept with what they computed;
        nothing is run.
        """
        tokens = list(tokens)
        self._admit(tokens)
        fresh: list[Node] = []
        tip = self.committed[-1] if self.committed else None
        for token in tokens:
            tip = (tip.children.get(token) if tip else None) or Node(token, tip)
            fresh.append(tip)
        self._adopt_path(fresh)

    def commit(self, path: Sequence[int], next: int | None) -> None:
        """Keep a path of the last scored tree, then `next` (unrun). What hangs below survives, all
        else is dropped.
        """
        tip = self._newest()
        nodes = [self.scored[i] for i in path]
        for node in nodes:
            if node.probe:
                raise ValueError("a probe cannot be committed")
            if node.parent is not tip:
                raise ValueError(
                    f"{list(path)} is not a path from the newest token down the last scored tree"
                )
            tip = node
        if next is not None:
            self._admit((next,), len(nodes))
            nodes.append(tip.children.get(next) or Node(next, tip))
        self._adopt_path(nodes)

    def rewind(self, length: int) -> None:
        """Take back committed text to `length` tokens. The new newest token will be run again."""
        if not 0 <= length <= len(self):
            raise ValueError(f"cannot rewind to {length}: the text has {len(self)} tokens")
        if length == len(self):
            return
        for guess in list(self.committed[-1].children.values()):
            guess.release()
        del self.committed[length:]
        self.scored, self._extras = [], []
        if self.committed:
            tip = self.committed[-1]
            tip.forget()
            tip.children = {}
            self.cache.present[tip.slot] = False

    # ------------------------------------------------------------------ inside

    def _newest(self) -> Node:
        if not self.committed:
            raise TinyspecError("there is no text yet: extend the session with a prompt first")
        return self.committed[-1]

    def _admit(self, tokens: Sequence[int], more: int = 0) -> None:
        """Refuse what the model cannot read: unknown ids, and a text (`more` guesses stand before)
        that is too long.
        """
        c = self.model.config
        for token in tokens:
            if not 0 <= token < c.vocab_size:
                raise TinyspecError(f"token id {token} is outside the vocabulary of {c.vocab_size}")
        length = len(self) + more + len(tokens)
        if length > c.max_positions:
            raise TinyspecError(
                f"{length} tokens do not fit into the context of {c.max_positions} tokens of {self.model.name}: "
                "shorten the prompt"
            )

    def _adopt_path(self, nodes: list[Node]) -> None:
        """Make nodes committed: they and the subtree below the last move into contiguous slots;
        other guesses go.
        """
        self._drop_probes()
        self.scored = []
        if not nodes:
            return
        first = len(self)
        if self.committed:
            self._keep_only(self.committed[-1], nodes[0])
        for node, below in pairwise(nodes):
            self._keep_only(node, below)
        self.committed.extend(nodes)
        self._assign_slots([*nodes, *nodes[-1].descendants()], first)
        for node in self.committed[max(first - 1, 0) : -1]:
            node.drop_outputs()

    def _keep_only(self, node: Node, child: Node) -> None:
        """The text goes on with this child: the other guesses are dropped."""
        for guess in node.children.values():
            if guess is not child:
                guess.release()
        node.children = {}

    def _drop_probes(self) -> None:
        for probe in self._extras:
            probe.release()
        self._extras = []

    def _assign_slots(self, nodes: list[Node], first: int) -> None:
        """Give nodes the slots first, first + 1, ..., moving what they have computed."""
        self.cache.reserve(first + len(nodes))
        kept = [node.slot if node.slot >= 0 else first + i for i, node in enumerate(nodes)]
        self.cache.move(kept, first)
        for i, node in enumerate(nodes):
            if node.slot < 0:
                self.cache.present[first + i] = False
            node.slot = first + i

    def _attach(self, above: Sequence[Node], tree: TokenTree) -> list[Node]:
        """Find or make the node of every tree entry below `above`; probes are always made anew."""
        vocabulary = self.model.config.vocab_size
        self._drop_probes()
        free = self._first_free()
        planted: list[Node] = []
        for token, up, probe in zip(tree.tokens, tree.parents, tree.probe, strict=True):
            parent = above[-1] if up == ROOT else planted[up]
            if parent.probe and not probe:
                raise ValueError("a probe cannot be the parent of a guess")
            if not 0 <= token < vocabulary + (self.adopted if probe else 0):
                raise TinyspecError(f"token id {token} is outside the vocabulary of {vocabulary}")
            node = None if probe else parent.children.get(token)
            if node is None:
                if parent.position + 1 >= self.model.config.max_positions:
                    raise TinyspecError(
                        f"the draft reaches beyond the context of {self.model.config.max_positions}"
                    )
                node = Node(token, parent, probe=probe)
                self._extras += [node] if probe else []
            planted.append(node)
        for node in (*above, *planted):
            if node.slot < 0:
                node.slot, free = free, free + 1
                self.cache.reserve(free)
                self.cache.present[node.slot] = False
        return planted

    def _first_free(self) -> int:
        """The slot behind everything that is held."""
        held = [n.slot for n in self.committed[-1].descendants()]
        return max([len(self) - 1, *held]) + 1
