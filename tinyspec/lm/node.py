"""One token of a session: where it stands, how far it was computed and from where it can go on."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from tinyspec.lm.forward import Plan

FULL = Plan()


class Node:
    """A committed token or an uncommitted guess.

    slot      where its keys and values are (-1: nowhere yet)
    plan      the plan it was computed under; reach: sublayers done under it
    states    sublayer -> state [d] that enters it, to continue from
    row       logits [V], computed from the state after `row_at` sublayers
    shown     layer -> state [d] that a drafter asked to see
    filled    keys and values above `reach` were made without running the layers
    exact     nothing it looked at was filled
    """

    __slots__ = (
        "children",
        "exact",
        "filled",
        "parent",
        "plan",
        "position",
        "probe",
        "row",
        "row_at",
        "shown",
        "slot",
        "states",
        "sublayers_done",
        "token",
    )  # fmt: skip

    def __init__(self, token: int, parent: "Node | None", probe: bool = False):
        self.token, self.parent, self.probe = token, parent, probe
        self.position: int = 0 if parent is None else parent.position + 1
        self.slot = -1
        self.children: dict[int, Node] = {}
        if parent is not None and not probe:
            parent.children[token] = self
        self.forget()

    def forget(self) -> None:
        """Back to not computed at all."""
        self.plan, self.sublayers_done, self.row_at = FULL, 0, 0
        self.states: dict[int, Tensor] = {}
        self.row: Tensor | None = None
        self.shown: dict[int, Tensor] = {}
        self.filled, self.exact = False, True

    def sublayers_valid(self, plan: Plan, n_layers: int) -> int:
        """How many of the sublayers it has done hold under this plan."""
        return (
            self.sublayers_done
            if plan == self.plan
            else min(self.sublayers_done, self.plan.differs(plan, n_layers))
        )

    def needs_compute(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int], head: bool
    ) -> bool:
        """Whether it must be run to show these hidden layers, and the head's row, at `stop` under
        `plan`.
        """
        if (
            self.plan != plan
            or self.sublayers_done < stop
            or (head and (self.row is None or self.row_at != stop))
        ):
            return True
        return any(
            tap not in self.shown or (tap == n_layers and self.row_at != stop)
            for tap in hidden_layers
        )

    def resume_point(
        self, plan: Plan, stop: int, n_layers: int, hidden_layers: Iterable[int] = ()
    ) -> tuple[int, Tensor | None]:
        """The last sublayer it can enter at on the way to `stop` under `plan`, with the state
        (None: the embedding).

        A tap that was not asked for before lies on the way, so it is entered below it.
        """
        agreed = min(self.sublayers_valid(plan, n_layers), stop)
        for tap in hidden_layers:
            if tap < n_layers and (tap not in self.shown or 2 * tap > agreed):
                agreed = min(agreed, 2 * tap)
        at = max((at for at in self.states if at <= agreed), default=0)
        return at, self.states.get(at)

    def mark_computed(
        self, plan: Plan, start: int, stop: int, states: Mapping[int, Tensor]
    ) -> None:
        """Was run from `start` to `stop` under `plan`, leaving these states; what lies beyond stays
        if it agrees.
        """
        if plan != self.plan or self.filled or stop > self.sublayers_done:
            self.plan, self.sublayers_done, self.row, self.filled = plan, stop, None, False
            self.states = {at: state for at, state in self.states.items() if 0 < at <= start}
        for at, state in states.items():
            if at > start:  # before `start` the row had not entered
                self.states[at] = state

    def invalidate_beyond(self, plan: Plan, n_layers: int) -> bool:
        """Keep only what also holds under this plan; whether anything had to go."""
        agreed = self.sublayers_valid(plan, n_layers)
        if agreed == self.sublayers_done:
            return False
        self.plan, self.sublayers_done, self.row, self.row_at = plan, agreed, None, 0
        self.states = {at: state for at, state in self.states.items() if at <= agreed}
        self.shown = {tap: state for tap, state in self.shown.items() if 2 * tap <= agreed}
        return True

    def drop_outputs(self) -> None:
        """Committed and no longer the newest: nobody asks for its row or states again."""
        self.row, self.shown = None, {}

    def release(self) -> None:
        """Dropped with all below it. Parents and children hold each other, so the large tensors are
        let go here.
        """
        for node in (self, *self.descendants()):
            node.forget()
            node.parent, node.slot, node.children = None, -1, {}

    def descendants(self) -> "list[Node]":
        """All below, parents before children."""
        below = list(self.children.values())
        for node in below:  # grows while it is walked
            below.extend(node.children.values())
        return below

    def copy(self, parent: "Node | None") -> "Node":
        """The same computed token under another parent, without its children."""
        twin = Node(self.token, None)
        for name in self.__slots__:
            if name not in ("parent", "children"):
                setattr(twin, name, getattr(self, name))
        twin.parent, twin.states, twin.shown = parent, dict(self.states), dict(self.shown)
        return twin
