"""The short way through a session: chains of guesses, and plain steps, which are chains of none.

A session finds out for every tree which nodes are new, what may be reused and what each row sees.
Most calls are plain steps, the chain that a draft model drew, or that model's own steps, where
there is little to find out: what is missing stands at the end, was not begun, sees all before it,
and the whole model runs. A model that takes a tenth of a millisecond has no time for more. What is
special in any way is left to `Session.grow`.
"""

from typing import TYPE_CHECKING

from tinyspec.lm.engine import NextTokenFn
from tinyspec.lm.forward import Scores
from tinyspec.lm.host import stack, to_numpy
from tinyspec.lm.node import Node
from tinyspec.lm.runner import PREFILL_CHUNK
from tinyspec.tree import ROOT, TokenTree

if TYPE_CHECKING:
    from tinyspec.lm.session import Session


def match_chain(session: "Session", tree: TokenTree) -> list[Node] | None:
    """The newest token and the nodes of a chain, each in the slot of its position. None: not for
    the short way.
    """
    session._advance_ready()
    tokens, n, committed, c = tree.tokens, len(tree.tokens), session.committed, session.model.config
    if session._extras or not committed or not session.plan.whole or (n and any(tree.probe)):
        return None
    if tuple(tree.parents) != tuple(range(ROOT, n - 1)):
        return None
    late, node, only = committed[session._ready : -1], committed[-1], True
    rows = [node]
    for token in tokens:
        only = only and len(node.children) < 2
        if (below := node.children.get(token)) is None:
            break
        rows.append(node := below)
    stop, done = 2 * c.n_layers, 0
    while (
        not late
        and done < len(rows)
        and not rows[done].needs_compute(session.plan, stop, c.n_layers, (), True)
    ):
        done += 1
    if any(node.slot != node.position for node in (*late, *rows)):
        return None
    if any(node.sublayers_done or node.states or node.filled for node in (*late, *rows[done:])):
        return None  # begun, and to be gone on with from there
    fresh, high = tokens[len(rows) - 1 :], len(committed) + n
    if fresh and (
        not only
        or rows[-1].children
        or high > c.max_positions
        or not 0 <= min(fresh) <= max(fresh) < c.vocab_size
    ):
        return None  # slots that others hold, or something to complain of
    if len(late) + n >= PREFILL_CHUNK:
        return None
    session.cache.reserve(high)
    for token in fresh:
        rows.append(Node(token, rows[-1]))
        rows[-1].slot = rows[-1].position
    return rows


def score_chain(session: "Session", rows: list[Node]) -> Scores:
    """The scores of what was seated: run the rows that were not, and read all off."""
    late = session.committed[session._ready : -1]
    todo = [*late, *(node for node in rows if not node.sublayers_done)]
    logits = session.runner.run_chain(todo, len(late)).logits if todo else None
    if logits is None or len(logits) < len(rows):
        logits = stack([node.row for node in rows if node.row is not None])
    session._advance_ready()
    return Scores(logits, session._states(rows, ()), [session.model.config.n_layers] * len(rows))


def draft_chain(session: "Session", most: int, choose: NextTokenFn) -> bool:
    """Guesses one behind the other from the newest token on, `most` rows in all: choose(logits [V])
    names the guess behind each row; None: no more. The session holds those that were run, as if it
    had scored them as trees.

    False where something is special, and nothing was chosen.
    """
    tip, c = session._newest(), session.model.config
    session._advance_ready()
    if (
        session._ready < len(session) - 1
    ):  # behind a draft that was kept whole, its last guess is missing too
        session.score(TokenTree())
    stop, begun = 2 * c.n_layers, tip.sublayers_done or tip.states or tip.filled
    if begun and tip.needs_compute(session.plan, stop, c.n_layers, (), True):
        return False
    first = len(session) - (not begun)  # slot of the first row that is run
    usual = (
        session.alone
        and session.plan.whole
        and not (session._extras or tip.children)
        and tip.slot == tip.position
    )
    if (
        not usual
        or session.model.engine is None
        or first + most > c.max_positions
        or not session.cache.present[:first].all()
    ):
        return False
    above, row = tip.parent, tip.row
    token: int | None = tip.token
    if row is not None:
        above, most, token = tip, most - 1, choose(to_numpy(row))
    if token is None or most == 0:
        return True
    session.cache.reserve(first + most)
    ran = session.model.chain(session.cache, token, first, most, choose, session.runner.forward_log)
    session.cache.present[first : first + len(ran)] = True
    session.scored = []
    for token, row, state in ran:
        node = tip if above is tip.parent else Node(token, above)
        node.exact = above is None or (above.exact and not above.filled)
        node.slot, node.plan, node.sublayers_done, node.row_at = (
            node.position,
            session.plan,
            stop,
            stop,
        )
        node.row, node.states = row, {stop: state}
        session.scored += [] if node is tip else [node]
        above = node
    return True
