"""Sessions, caches and passes with one defect each.

Two kinds: a session that keeps its text or its slots wrongly, and something between session and
model (`forward`) that hands on the wrong positions, masks or rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from tinyspec.laws.cache_laws import BATCH, CACHE, EXIT, POSITIONS, REWIND
from tinyspec.laws.judges import nodes, of_sessions
from tinyspec.laws.mutants import Equivalent, Mutant
from tinyspec.laws.mutants import witnesses as see
from tinyspec.laws.parts import PARTS, Forward
from tinyspec.laws.passes import NODES, ROWS, SIBLINGS, SLOTS
from tinyspec.lm.cache import Cache
from tinyspec.lm.feed import ForwardBatch, Scores
from tinyspec.lm.plan import Plan
from tinyspec.lm.session import Session
from tinyspec.lm.transformer import Model
from tinyspec.lm.view import View

Pass = Callable[[Forward, Sequence[ForwardBatch]], list[Scores]]

# ------------------------------------------------------------------ sessions


class CropsOneMore(Session):
    def commit(self, path: Sequence[int], next: int | None) -> None:
        super().commit(path[:-1], next)  # right: path


class CropsOneLess(Session):
    def commit(self, path: Sequence[int], next: int | None) -> None:
        tip = self.scored[path[-1]] if path else self.committed[-1]
        more = [i for i, node in enumerate(self.scored) if node.parent is tip]
        super().commit([*path, *more[:1]], next)  # right: path; the child behind it was refused


class CropsAll(Session):
    """A rollback resets the cache; the last token is put back."""

    def rewind(self, length: int) -> None:
        last = self.text[:length][-1:]
        super().rewind(0)  # right: super().rewind(length)
        self.append(last)


class MinusZero(Session):
    """A rollback of n tokens is text[:-n]; of none, it is text[:-0]: nothing."""

    def rewind(self, length: int) -> None:
        n = len(self) - length
        super().rewind(len(self.text[:-n]))  # right: len(self.text) - n


class KeepsAll(Session):
    def rewind(self, length: int) -> None:
        return None  # right: super().rewind(length)


class NeverEnds(Session):
    def end(self) -> None:
        return None  # right: self.rewind(0)


class SharesWithItsFork(Session):
    def fork(self) -> Session:
        twin = super().fork()
        twin.cache = twin.runner.cache = self.cache  # right: self.cache.clone()
        return twin


class MarksAsFilled(Session):
    """Slots of tokens that left early are declared full; what is in them above their exit is
    zero.
    """

    def fill(self, how: Any, slots: Sequence[int] | None = None) -> None:
        for node in self.committed[:-1]:
            node.sublayers_done = self._end  # right: run the layers that are missing
            self.cache.present[node.slot] = True


class StaysPut(Cache):
    """After a commit the kept path stays where it was, and its slots are given to others."""

    def move(self, old: Sequence[int], first: int) -> None:
        self.present[first : first + len(old)] = self.present[
            list(old)
        ]  # right: and keys and values with it


class ForgetsOnGrowth(Cache):
    def reserve(self, slots: int) -> None:
        if slots > self.capacity:
            self.store.zero_()  # right: the old slots are copied into the larger store
        super().reserve(slots)


def holding(kind: type[Cache]) -> Callable[[Model], Session]:
    """A session with this cache."""

    def begin(model: Model) -> Session:
        made = Session(model)
        made.cache = made.runner.cache = kind(model.config, model.dtype, model.device)
        return made

    return begin


def one_layer_later(session: Any, plan: Plan) -> View:
    last = session.model.config.n_layers if plan.last is None else plan.last
    return View(
        session, replace(plan, last=min(last + 1, session.model.config.n_layers))
    )  # right: plan


# ------------------------------------------------------------------ passes


def flat_positions(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    for feed in feeds:
        feed.positions = [
            feed.positions[0] + i for i in range(len(feed.positions))
        ]  # right: a node's depth
    return forward(feeds)


def one_position_late(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    for feed in feeds:
        feed.positions = [position + 1 for position in feed.positions]  # right: from 0
    return forward(feeds)


def siblings_seen(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    for feed in feeds:
        feed.seen = [
            (slot + 1, ()) for slot in feed.slots
        ]  # right: the text, the row's ancestors, itself
    return forward(feeds)


def parent_unseen(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    for feed in feeds:
        feed.seen = [(text, (*path[:-2], *path[-1:])) for text, path in feed.seen]  # right: path
    return forward(feeds)


def rows_one_late(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    return [one._replace(logits=one.logits.roll(1, 0)) for one in forward(feeds)]  # right: one


def several_rows_elsewhere(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    """One row is multiplied by the vocabulary matrix in our order of summation, several rows in
    torch's.
    """
    model: Model = forward.__self__  # type: ignore[attr-defined]
    for feed in feeds:
        feed.hidden_layers = (*feed.hidden_layers, model.config.n_layers)
    made = []
    for one, feed in zip(forward(feeds), feeds, strict=True):
        rows, one = one.hidden[-1], one._replace(hidden=one.hidden[:-1])
        if len(feed.heads) > 1:
            head = model.weights["embed"].to(rows.dtype)
            one = one._replace(
                logits=rows[feed.heads] @ head.T
            )  # right: one order for any number of rows
        made.append(one)
    return made


def padding_seen(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    """The rows of a batch are padded to one length, and the padding is looked at."""
    longest = max(feed.high for feed in feeds)
    for feed in feeds:
        feed.seen = [
            (longest, ()) if text == feed.high else (text, path) for text, path in feed.seen
        ]
        feed.high = longest  # right: each feed its own
    return forward(feeds)


def rows_swapped(forward: Forward, feeds: Sequence[ForwardBatch]) -> list[Scores]:
    """The requests of a batch are sorted by length and not put back."""
    scores = forward(feeds)
    order = sorted(range(len(feeds)), key=lambda i: feeds[i].high)
    if len({len(feed.heads) for feed in feeds}) > 1:
        return scores
    return [
        one._replace(logits=scores[i].logits) for one, i in zip(scores, order, strict=True)
    ]  # right: scores


def _session(name: str, bug: str, begin: Callable[[Model], Session], law: str) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, session=begin), see.states)


def _pass(name: str, bug: str, forward: Pass, law: str, witness: Any = see.states) -> Mutant:
    return Mutant(name, bug, law, replace(PARTS, forward=forward), witness)


MUTANTS = [
    _session("crop one too many", "slip", CropsOneMore, CACHE),
    _session("crop one too few", "slip", CropsOneLess, CACHE),
    _session("rollback resets all", "B17", CropsAll, REWIND),
    _session("rollback of none takes all", "B18", MinusZero, REWIND),
    _session("no rollback", "slip", KeepsAll, REWIND),
    _session("fork shares the cache", "B45", SharesWithItsFork, REWIND),
    _session("text left from the last request", "B45", NeverEnds, "a request leaves no trace"),
    _session("kept path not gathered", "B19", holding(StaysPut), SLOTS),
    _session("slots lost when the cache grows", "B30", holding(ForgetsOnGrowth), CACHE),
    _session("keys above an exit are zero", "B40", MarksAsFilled, EXIT),
    Mutant("exit one layer later", "B40", EXIT, replace(PARTS, view=one_layer_later), see.states),
    _pass("position is the index in the tree", "B23", flat_positions, NODES),
    _pass("positions one late", "B19", one_position_late, POSITIONS),
    _pass("siblings seen", "B24", siblings_seen, SIBLINGS),
    _pass("parent unseen", "B24", parent_unseen, NODES),
    _pass("rows one late", "B16", rows_one_late, NODES),
    _pass("several rows through another kernel", "B38", several_rows_elsewhere, ROWS, see.bits),
    _pass("padding seen", "B21", padding_seen, BATCH, see.batches),
    _pass("batch rows swapped", "B22", rows_swapped, BATCH, see.batches),
]
EQUIVALENT = [
    Equivalent(
        "positions one late, on a model with rotations",
        "B19",
        "Rotations by m and n enter a score as the rotation by m - n; adding one to every position changes no difference. "
        "On a model with learned positions it is a mutant, above.",
        (of_sessions(nodes, ("rotations",)),),
        replace(PARTS, forward=one_position_late),
    ),
]
