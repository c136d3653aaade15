"""One token of a session: where it stands, how far it was computed and from where it can go on."""

from torch import Tensor

from tinyspec.lm.plan import Plan


class Node:
    """A committed token or an uncommitted guess.

    slot      where its keys and values are (-1: nowhere yet)
    plan      the plan it was computed under; reach: sublayers done under it
    states    sublayer -> state [d] that enters it, to continue from
    row       logits [V], computed from the state after `row_at` sublayers
    hidden    [taps, d]
    filled    keys and values above `reach` were made without running the layers
    exact     the keys and values are those a full pass would give
    """

    __slots__ = (
        "children", "exact", "filled", "hidden", "parent", "plan", "position", "probe", "reach", "row", "row_at", "slot",
        "states", "taps", "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: "Node | None", probe: bool = False):
        self.token, self.parent, self.probe = token, parent, probe
        self.position = 0 if parent is None else parent.position + 1
        self.slot = -1
        self.children: dict[int, Node] = {}
        if parent is not None and not probe:
            parent.children[token] = self
        self.forget()

    def forget(self) -> None:
        """Back to not computed at all."""
        self.plan, self.reach, self.row_at = Plan(), 0, 0
        self.states: dict[int, Tensor] = {}
        self.row: Tensor | None = None
        self.hidden: Tensor | None = None
        self.taps: tuple[int, ...] = ()
        self.filled, self.exact = False, True

    def state(self, sublayer: int) -> Tensor | None:
        return self.states.get(sublayer)

    def entry(self, plan: Plan, stop: int, n_layers: int) -> tuple[int, Tensor | None]:
        """The last sublayer it can enter at on the way to `stop` under `plan`, with the state (None: the embedding)."""
        common = self.reach if plan == self.plan else min(self.reach, self.plan.differs(plan, n_layers))
        usable = [at for at in self.states if at <= min(common, stop)]
        return (max(usable), self.states[max(usable)]) if usable else (0, None)

    def arrive(self, plan: Plan, stop: int, kept: dict[int, Tensor]) -> None:
        """Computed up to `stop` under `plan`, leaving these states behind."""
        self.plan, self.reach, self.filled, self.exact = plan, stop, False, True
        self.states = kept

    def settle(self, end: int) -> None:
        """Committed and no longer the newest: only an unfinished one keeps its state."""
        self.row, self.hidden = None, None
        if self.reach >= end:
            self.states = {}

    def detach(self) -> None:
        """Drop a probe; its parent never listed it."""
        self.parent, self.slot = None, -1

    def descendants(self) -> "list[Node]":
        """All below, parents before children."""
        below: list[Node] = []
        stack = list(self.children.values())
        while stack:
            node = stack.pop(0)
            below.append(node)
            stack.extend(node.children.values())
        return below

    def copy(self, parent: "Node | None") -> "Node":
        """The same computed token under another parent, without its children."""
        twin = Node(self.token, None)
        twin.parent = parent
        for name in self.__slots__:
            if name not in ("parent", "children"):
                setattr(twin, name, getattr(self, name))
        twin.states = dict(self.states)
        return twin
