"""Run a model whose layers repeat: tokens in different repetitions share one pass.

`Config.repeat` says how often the group of layers that have weights runs. A token that has run k
groups runs group k + 1, so tokens may stand in different layers and need the same weights. Each
repetition has keys and values of its own.
"""

from collections.abc import Sequence

from torch import Tensor

from tinyspec.lm.forward import ForwardBatch, ForwardRecord
from tinyspec.lm.host import stack_rows
from tinyspec.lm.session import Session, find_seen_slots


def run_repetition(session: Session, heads: Sequence[int]) -> Tensor:
    """Run the newest token and the last tree, a chain, through one more group of layers each.

    They are the rows of one forward pass, each with the keys and values of its own repetition. A
    parent must have run more groups than its child.

    Returns the logits [len(heads), V] of some entries (0 is the newest token, i + 1 is node i), in
    rising order, after the layers that they have run by then.
    """
    model, plan = session.model, session.plan
    n_layers, group = model.config.n_layers, model.config.distinct_layers
    nodes, feeds = [session.committed[-1], *session.scored], list[ForwardBatch]()
    for entry, node in enumerate(nodes):
        at, state = node.resume_point(plan, 2 * n_layers, n_layers)
        n_slots, seen = find_seen_slots([node])
        session.check_keys([node.slot], [at], at + 2 * group, plan, seen, n_slots)
        feed = ForwardBatch(
            cache=session.cache.layer_range(at // 2, group),
            plan=plan,
            tokens=[node.token],
            positions=[node.position],
            slots=[node.slot],
            starts=[0],
            stop=2 * group,
            n_slots=n_slots,
            seen=seen,
            entry_states=None if state is None else state[None],
            has_state=None if state is None else [True],
            has_position=state is not None,
            heads=[0] if entry in heads else [],
            saved_sublayers=(2 * group,),
        )
        feeds.append(feed)
    scores = session.forward(feeds)
    record = ForwardRecord(model.name, len(nodes), float(len(nodes) * group), len(heads))
    session.forward_log.append(record)
    for entry, (node, feed, own) in enumerate(zip(nodes, feeds, scores, strict=True)):
        at = node.sublayers_done
        saved = {at + 2 * group: feed.saved_states[2 * group][0]}
        row = own.logits[0] if entry in heads else None
        node.mark_computed(plan, at + 2 * group, n_layers, saved, row, at)
        session.cache.mark_present(node.slot, slice(at // 2, at // 2 + group))
    rows = [scores[entry].logits[0] for entry in heads]
    return stack_rows(rows) if rows else scores[0].logits[:0]
