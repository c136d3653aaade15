"""Thirty wrong implementations that were written before the laws' cases were read.

Each is wrong in a way that a student or a framework might be wrong, on an input with at most eight
tokens and at most six draft tokens, and by a probability of at least 1/1000. Most are right on
small inputs.

At first `tinyspec.laws.check` refuted 20 of them: 7 of 12 chain verifiers,
5 of 8 tree verifiers, 4 of 4 drafters and 5 of 6 decoding functions. The other ten had no case that
reached them; they are `MISSED_AT_FIRST`. `test_strangers.py` holds that all 30 are refuted now.
"""

from itertools import pairwise

from tinyspec.decoding.verify import Verdict, exclude_token, residual
from tinyspec.tree import ROOT


def sample(row, rng):
    return int(rng.choice(len(row), p=row))


def invert_cdf(row, u):
    total = 0
    for token, probability in enumerate(row):
        total = total + probability
        if u < total:
            return token
    return len(row) - 1


def normalize(weights):
    total = sum(weights)
    return [weight / total for weight in weights]


def subtract(p, q):
    return [max(a - b, 0) for a, b in zip(p, q, strict=True)]


def recovery(p, q):
    """Return the right distribution after a rejection."""
    weights = subtract(p, q)
    return normalize(weights) if sum(weights) > 0 else p


def verify_chain(p, q, draft, rng, ratio=None, recover=recovery):
    """Verify a chain; right with these `ratio` (of position, p row, q row, token) and `recover`."""
    for i, token in enumerate(draft):
        accept_prob = ratio(i, p[i], q[i], token) if ratio else p[i][token] / q[i][token]
        if rng.random() >= accept_prob:
            return [*draft[:i], sample(recover(p[i], q[i]), rng)]
    return [*draft, sample(p[len(draft)], rng)]


# Twelve chain verifiers.


def wrap_six_uniforms(p, q, draft, rng):
    """Draw a buffer of six uniforms, so that the bonus after six draft tokens reuses the first."""
    noise = rng.random(6)
    for i, token in enumerate(draft):
        if noise[i % 6] >= p[i][token] / q[i][token]:
            return [*draft[:i], sample(recovery(p[i], q[i]), rng)]
    return [*draft, invert_cdf(p[len(draft)], noise[len(draft) % 6])]


def drop_tail_of_blocks(p, q, draft, rng):
    """Compute the residual in blocks of four, and forget what is left over after the last block.

    Wrong for five to seven tokens.
    """

    def recover(p, q):
        weights = subtract(p, q)
        n = len(weights)
        if n > 4:
            weights = [w if x < n // 4 * 4 else 0 for x, w in enumerate(weights)]
        return normalize(weights) if sum(weights) > 0 else p

    return verify_chain(p, q, draft, rng, recover=recover)


def recover_from_top_six(p, q, draft, rng):
    """Keep the six highest entries of the residual. Wrong if seven are above 0."""

    def recover(p, q):
        row = recovery(p, q)
        kept = sorted(range(len(row)), key=lambda x: -row[x])[:6]
        return normalize([row[x] if x in kept else 0 for x in range(len(row))])

    return verify_chain(p, q, draft, rng, recover=recover)


def clamp_small_draft_probs(p, q, draft, rng):
    """Divide by at least 0.01, against divisions by zero. Wrong for draft tokens below that."""

    def ratio(i, p, q, token):
        return p[token] / q[token] if q[token] >= 0.01 else float(p[token]) / 0.01

    return verify_chain(p, q, draft, rng, ratio=ratio)


def skip_small_residuals(p, q, draft, rng):
    """Sample from p if the residual's mass is below 0.02, as if it were rounding."""

    def recover(p, q):
        return p if sum(subtract(p, q)) < 0.02 else recovery(p, q)

    return verify_chain(p, q, draft, rng, recover=recover)


def accept_close_ratios(p, q, draft, rng):
    """Accept if p and q agree to 2 %, as if the difference were rounding."""

    def ratio(i, p, q, token):
        return 1 if abs(p[token] - q[token]) <= 0.02 * q[token] else p[token] / q[token]

    return verify_chain(p, q, draft, rng, ratio=ratio)


def take_confident_rows_as_greedy(p, q, draft, rng):
    """Take the most probable token if it has more than 0.98, which saves a random number."""
    for i, token in enumerate(draft):
        best = max(range(len(p[i])), key=lambda x: p[i][x])
        if p[i][best] > 0.98:
            if token != best:
                return [*draft[:i], best]
        elif rng.random() >= p[i][token] / q[i][token]:
            return [*draft[:i], sample(recovery(p[i], q[i]), rng)]
    return [*draft, sample(p[len(draft)], rng)]


def index_within_window(p, q, draft, rng):
    """Verify in windows of five, and take the residual's row by its index in the window."""
    for start in range(0, len(draft), 5):
        for i, token in enumerate(draft[start : start + 5]):
            if rng.random() >= p[start + i][token] / q[start + i][token]:
                return [*draft[: start + i], sample(recovery(p[i], q[i]), rng)]
    return [*draft, sample(p[len(draft)], rng)]


def trust_long_runs(p, q, draft, rng):
    """Raise the acceptance probability by a fifth once five tokens have been accepted."""

    def ratio(i, p, q, token):
        return p[token] / q[token] * 6 / 5 if i >= 5 else p[token] / q[token]

    return verify_chain(p, q, draft, rng, ratio=ratio)


def share_rounded_residuals(p, q, draft, rng):
    """Compute each residual once for all positions whose rows agree to one decimal."""
    residuals = {}
    keys = []
    for p_row, q_row in zip(p, q, strict=False):
        keys.append(tuple(round(float(x), 1) for x in [*p_row, *q_row]))
        residuals.setdefault(keys[-1], recovery(p_row, q_row))
    for i, token in enumerate(draft):
        if rng.random() >= p[i][token] / q[i][token]:
            return [*draft[:i], sample(residuals[keys[i]], rng)]
    return [*draft, sample(p[len(draft)], rng)]


def cut_before_repeated_trigram(p, q, draft, rng):
    """Drop the draft from the token that completes a trigram for the second time.

    Whether a token is judged then depends on the token: it must be judged, or a point mass.
    """
    draft = list(draft)
    for i, token in enumerate(draft):
        if i >= 3 and draft[i - 2 : i + 1] in [draft[j : j + 3] for j in range(i - 2)]:
            return [*draft[:i], sample(p[i], rng)]
        if rng.random() >= p[i][token] / q[i][token]:
            return [*draft[:i], sample(recovery(p[i], q[i]), rng)]
    return [*draft, sample(p[len(draft)], rng)]


def take_best_without_draft(p, q, draft, rng):
    """Take the most probable token if the draft is empty, as an adaptive draft length can be."""
    if len(draft) == 0:
        return [max(range(len(p[0])), key=lambda x: p[0][x])]
    return verify_chain(p, q, draft, rng)


# Eight tree verifiers.


def children_of(tree, node):
    return [c for c, parent in enumerate(tree.parents) if parent == node and not tree.probe[c]]


def subtract_child(tree, row, child):
    q = tree.draft_probs[child]
    return exclude_token(row, tree.tokens[child]) if q is None else residual(row, q)


def draw_last(p, node, row, accepted, rng):
    return rng.draw(row)


def walk_tree(
    tree,
    p,
    rng,
    children=children_of,
    subtract=lambda tree, row, child, tested: subtract_child(tree, row, child),
    row_at=lambda tree, p, node: p[node],
    last=draw_last,
):
    """Verify a tree; right with these parts."""
    accepted, rejected, node = [], [], ROOT
    while True:
        row, found = row_at(tree, p, node), None
        is_intact = True
        for tested, child in enumerate(children(tree, node)):
            token, q = tree.tokens[child], tree.draft_probs[child]
            if rng.accept(row[token] if q is None else row[token] / q[token]):
                found = child
                break
            rejected.append(child)
            row, is_intact = subtract(tree, row, child, tested), False
        if found is None:
            token = last(p, node if is_intact else None, row, accepted, rng)
            return Verdict(tuple(accepted), token, tuple(rejected))
        accepted.append(found)
        node = found


def forget_fourth_sibling(tree, p, rng):
    """Subtract at most three rejected siblings: from the fourth on, the row stays as it is."""

    def subtract(tree, row, child, tested):
        return row if tested >= 3 else subtract_child(tree, row, child)

    return walk_tree(tree, p, rng, subtract=subtract)


def merge_equal_siblings_below_root(tree, p, rng):
    """Judge equal siblings below the root once. Wrong if they were drawn with replacement."""

    def children(tree, node):
        found = children_of(tree, node)
        if node == ROOT:
            return found
        return list({tree.tokens[c]: c for c in reversed(found)}.values())[::-1]

    return walk_tree(tree, p, rng, children=children)


def judge_point_masses_first(tree, p, rng):
    """Judge the siblings without a distribution first.

    Wrong if such a sibling depends on what was drawn before it.
    """

    def children(tree, node):
        return sorted(children_of(tree, node), key=lambda c: tree.draft_probs[c] is not None)

    return walk_tree(tree, p, rng, children=children)


def slice_siblings(tree, p, rng):
    """Take siblings as a slice of the nodes. Wrong if other nodes stand between them."""

    def children(tree, node):
        found = children_of(tree, node)
        if not found:
            return []
        nodes = range(found[0], min(found[0] + len(found), len(tree.tokens)))
        return [c for c in nodes if not tree.probe[c]]

    return walk_tree(tree, p, rng, children=children)


def forget_path_in_penalty(tree, p, rng):
    """Apply the repetition penalty of the bonus token to the committed text only."""

    def last(p, node, row, accepted, rng):
        sampling = getattr(p, "sampling", None)
        if node is not None and sampling is not None:
            row = sampling.probs(p.logits_at(node), p.context)
        return rng.draw(row)

    return walk_tree(tree, p, rng, last=last)


def count_positions_from_round(tree, p, rng):
    """Draw the last token with the uniform of its position in the round, not in the text.

    The first round is right; later rounds reuse its uniforms.
    """

    def last(p, node, row, accepted, rng):
        return rng.draw_at(row, len(accepted))

    return walk_tree(tree, p, rng, last=last)


def postpone_recovered_token(tree, p, rng):
    """End the round without a token if a token below the root was rejected.

    The next round then samples from p, and not from the residual.
    """

    def last(p, node, row, accepted, rng):
        return None if accepted and node is None else rng.draw(row)

    return walk_tree(tree, p, rng, last=last)


def share_rows_of_cousins(tree, p, rng):
    """Compute equal tokens of equal depth once, although their parents differ."""

    def row_at(tree, p, node):
        if node == ROOT:
            return p[ROOT]
        depths = tree.depths()
        keys = [(depths[c], tree.tokens[c], tree.probe[c]) for c in range(len(depths))]
        return p[keys.index(keys[node])]

    return walk_tree(tree, p, rng, row_at=row_at)


# Four drafters.


def draft_in_window(q, context, gamma, rng):
    """Draw from the model on the last four tokens, and declare its row on the whole text."""
    text, tokens, rows = list(context), [], []
    for _ in range(gamma):
        rows.append(q(tuple(text)))
        tokens.append(sample(q(tuple(text[-4:])), rng))
        text.append(tokens[-1])
    return tokens, rows


def declare_cached_trigram(q, context, gamma, rng):
    """Declare the row that came first after the same three tokens, and draw from the new one."""
    text, tokens, rows, seen = list(context), [], [], {}
    for _ in range(gamma):
        row = q(tuple(text))
        rows.append(seen.setdefault(tuple(text[-3:]), row))
        tokens.append(sample(row, rng))
        text.append(tokens[-1])
    return tokens, rows


def drop_unlikely_token(q, context, gamma, rng):
    """Stop before a drawn token of probability below 0.05: whether it is drafted depends on it."""
    text, tokens, rows = list(context), [], []
    for _ in range(gamma):
        row = q(tuple(text))
        token = sample(row, rng)
        if row[token] < 0.05:
            break
        tokens.append(token)
        rows.append(row)
        text.append(token)
    return tokens, rows


def declare_set_of_followers(q, context, gamma, rng):
    """Draw what followed the last token earlier, and declare a uniform row over these tokens.

    A token that followed twice is drawn twice as often as declared.
    """
    text, tokens, rows = list(context), [], []
    for _ in range(gamma):
        row = drawn_from = q(tuple(text))
        one, vocabulary = sum(row), range(len(row))  # 1, in the numbers of the rows
        followers = [b for a, b in pairwise(text) if a == text[-1]]
        if followers:
            drawn_from = [followers.count(x) * one / len(followers) for x in vocabulary]
            distinct = set(followers)
            row = [one / len(distinct) if x in distinct else 0 * one for x in vocabulary]
        tokens.append(sample(drawn_from, rng))
        rows.append(row)
        text.append(tokens[-1])
    return tokens, rows


# Six decoding functions.


def draft_chain(q, text, gamma, rng):
    tokens, rows = [], []
    for _ in range(gamma):
        rows.append(q((*text, *tokens)))
        tokens.append(sample(rows[-1], rng))
    return tokens, rows


def score_chain(p, text, draft):
    return [p((*text, *draft[:i])) for i in range(len(draft) + 1)]


def generate_in_window(p, q, gamma, n, rng):
    """Show the target the last four tokens only. Wrong from the sixth token on."""
    text = []
    while len(text) < n:
        draft, q_rows = draft_chain(q, text, gamma, rng)
        p_rows = [p((*text, *draft[:i])[-4:]) for i in range(gamma + 1)]
        text += verify_chain(p_rows, q_rows, draft, rng)
    return text[:n]


def generate_with_twelve_uniforms(p, q, gamma, n, rng):
    """Draw twelve uniforms, and begin with the first again when they are used up."""
    noise, used, text = rng.random(12), 0, []

    def uniform():
        nonlocal used
        used += 1
        return noise[(used - 1) % 12]

    while len(text) < n:
        draft, is_accepted = [], True
        for _ in range(gamma):
            draft.append(invert_cdf(q((*text, *draft)), uniform()))
        start = tuple(text)
        for i, token in enumerate(draft):
            p_row, q_row = p((*start, *draft[:i])), q((*start, *draft[:i]))
            is_accepted = uniform() < p_row[token] / q_row[token]
            text.append(token if is_accepted else invert_cdf(recovery(p_row, q_row), uniform()))
            if not is_accepted:
                break
        if is_accepted:
            text.append(invert_cdf(p(tuple(text)), uniform()))
    return text[:n]


def generate_from_stale_rows(p, q, gamma, n, rng):
    """Keep the target's rows by length and last two tokens, also those after rejected tokens."""
    rows, text = {}, []

    def target(context):
        key = len(context), context[-2:]
        if key not in rows:
            rows[key] = p(context)
        return rows[key]

    while len(text) < n:
        draft, q_rows = draft_chain(q, text, gamma, rng)
        text += verify_chain(score_chain(target, text, draft), q_rows, draft, rng)
    return text[:n]


def generate_with_leftover_draft(p, q, gamma, n, rng):
    """Draft the tokens after a rejected one again, as if they had been drawn from the new rows."""
    text, left = [], []
    while len(text) < n:
        draft = list(left)
        while len(draft) < gamma:
            draft.append(sample(q((*text, *draft)), rng))
        q_rows = [q((*text, *draft[:i])) for i in range(gamma)]
        p_rows = score_chain(p, text, draft)
        output = verify_chain(p_rows, q_rows, draft, rng)
        left = draft[len(output) :]
        text += output
    return text[:n]


def generate_with_trust(p, q, gamma, n, rng):
    """Leave out the verification in the round after three rounds that were accepted entirely."""
    text, streak = [], 0
    while len(text) < n:
        draft, q_rows = draft_chain(q, text, gamma, rng)
        if streak == 3:
            text, streak = [*text, *draft], 0
            continue
        output = verify_chain(score_chain(p, text, draft), q_rows, draft, rng)
        streak = streak + 1 if len(output) > gamma else 0
        text += output
    return text[:n]


def generate_with_greedy_draft(p, q, gamma, n, rng):
    """Draft the most probable token if it has over 0.98, and verify it against the full row."""
    text = []
    while len(text) < n:
        draft, q_rows = [], []
        for _ in range(gamma):
            row = q((*text, *draft))
            best = max(range(len(row)), key=lambda x: row[x])
            q_rows.append(row)
            draft.append(best if row[best] > 0.98 else sample(row, rng))
        text += verify_chain(score_chain(p, text, draft), q_rows, draft, rng)
    return text[:n]


CHAIN_VERIFIERS = [
    wrap_six_uniforms,
    drop_tail_of_blocks,
    recover_from_top_six,
    clamp_small_draft_probs,
    skip_small_residuals,
    accept_close_ratios,
    take_confident_rows_as_greedy,
    index_within_window,
    trust_long_runs,
    share_rounded_residuals,
    cut_before_repeated_trigram,
    take_best_without_draft,
]
TREE_VERIFIERS = [
    forget_fourth_sibling,
    merge_equal_siblings_below_root,
    judge_point_masses_first,
    slice_siblings,
    forget_path_in_penalty,
    count_positions_from_round,
    postpone_recovered_token,
    share_rows_of_cousins,
]
DRAFTERS = [
    draft_in_window,
    declare_cached_trigram,
    drop_unlikely_token,
    declare_set_of_followers,
]
DECODERS = [
    generate_in_window,
    generate_with_twelve_uniforms,
    generate_from_stale_rows,
    generate_with_leftover_draft,
    generate_with_trust,
    generate_with_greedy_draft,
]
MISSED_AT_FIRST = [
    recover_from_top_six,
    clamp_small_draft_probs,
    skip_small_residuals,
    accept_close_ratios,
    share_rounded_residuals,
    take_best_without_draft,
    judge_point_masses_first,
    forget_path_in_penalty,
    count_positions_from_round,
    generate_from_stale_rows,
]
