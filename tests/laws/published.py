"""Samplers as people publish them: right ones in many styles, and wrong ones.

The mistakes are published ones. `python -m tests.laws.published` says how long `check` takes to
find each of them.
"""

import bisect
import random
import time
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import torch

from tinyspec.decoding.rng import RandomSource
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.verify import Verdict, exclude_token, residual
from tinyspec.laws import check
from tinyspec.laws.evidence import Counterexample
from tinyspec.tree import ROOT

Rows = Any

# ---------------------------------------------------------------------- right, in many dialects


def textbook(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """Numbers of any kind, numpy's generator."""
    for i, x in enumerate(draft):
        if not rng.random() < min(1, p[i][x] / q[i][x]):
            rest = [max(a - b, 0) for a, b in zip(p[i], q[i], strict=True)]
            return [*draft[:i], rng.choice(len(rest), p=[x / sum(rest) for x in rest])]
    return [*draft, rng.choice(len(p[-1]), p=p[-1])]


def vectors(p: Rows, q: Rows, draft: list[int], rng: Any) -> Any:
    """Everything at once: fancy indexing, one block of uniforms, cumulative sums."""
    n, places = len(draft), np.arange(len(draft))
    passed = int((rng.random(n) < p[places, draft] / q[places, draft]).cumprod().sum())
    row = p[n] if passed == n else np.maximum(p[passed] - q[passed], 0)
    token = np.searchsorted(np.cumsum(row / row.sum()), rng.random(), side="right")
    return np.append(np.array(draft)[:passed], token)


def by_hand(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """No division before the test, and a loop for the inverse CDF."""

    def pick(row: Any) -> int:
        u, reached = rng.random() * sum(row), 0
        for token, x in enumerate(row):
            reached += x
            if u < reached:
                return token
        return max(token for token, x in enumerate(row) if x > 0)

    for i, x in enumerate(draft):
        if rng.random() * q[i][x] >= p[i][x]:
            return [*draft[:i], pick([max(a - b, 0) for a, b in zip(p[i], q[i], strict=True)])]
    return [*draft, pick(p[-1])]


def given_uniforms(p: Rows, q: Rows, draft: list[int], uniforms: Any) -> list[int]:
    """A list of uniforms instead of a generator, one a test and the last one for the draw."""
    for i, x in enumerate(draft):
        if uniforms[i] >= p[i][x] / q[i][x]:
            rest = [max(float(a - b), 0) for a, b in zip(p[i], q[i], strict=True)]
            return [*draft[:i], bisect.bisect(np.cumsum(rest) / sum(rest), uniforms[-1])]
    return [*draft, bisect.bisect(np.cumsum(p[-1]), uniforms[-1])]


def global_generators(p: Rows, q: Rows, draft: list[int]) -> list[int]:
    """numpy's and Python's global generators."""
    for i, x in enumerate(draft):
        if np.random.rand() < p[i][x] / q[i][x]:  # noqa: NPY002
            continue
        rest = [max(float(a - b), 0) for a, b in zip(p[i], q[i], strict=True)]
        return [*draft[:i], *random.choices(range(len(rest)), weights=rest)]
    return [*draft, np.random.choice(len(p[-1]), p=[float(x) for x in p[-1]])]  # noqa: NPY002


def logarithms(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """The test in logarithms, the draw as one multinomial."""
    for i, x in enumerate(draft):
        if np.log(rng.random()) < np.log(p[i][x]) - np.log(q[i][x]):
            continue
        rest = np.clip(p[i] - q[i], 0, None)
        return [*draft[:i], int(np.argmax(rng.multinomial(1, rest / rest.sum())))]
    return [*draft, int(np.argmax(rng.multinomial(1, p[-1])))]


def single_precision(p: Rows, q: Rows, draft: list[int], rng: Any) -> Any:
    """Distributions in float32: right up to 1e-7."""
    return vectors(np.asarray(p, np.float32), np.asarray(q, np.float32), draft, rng)


def with_epsilon(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """A guard against division by zero that biases by 1e-10."""
    for i, x in enumerate(draft):
        if rng.random() < p[i][x] / (q[i][x] + 1e-10):
            continue
        rest = np.maximum(p[i] - q[i], 0)
        return [*draft[:i], rng.choice(len(rest), p=rest / rest.sum())]
    return [*draft, rng.choice(len(p[-1]), p=p[-1])]


def in_torch(p: Rows, q: Rows, draft: list[int]) -> torch.Tensor:
    """torch's global generator, a batch of one."""
    out = torch.tensor(draft)
    for i, x in enumerate(draft):
        if torch.rand(1) < torch.clamp(p[i, x] / q[i, x], max=1):
            continue
        rest = torch.relu(p[i] - q[i])
        return torch.cat([out[:i], torch.multinomial(rest / rest.sum(), 1)])[None]
    return torch.cat([out, torch.distributions.Categorical(probs=p[-1]).sample().view(1)])[None]


def no_bonus(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """Slower than it need be, and exact."""
    return textbook(p, q, draft, rng)[: len(draft)]


def plain(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """Ignores the draft: exact and pointless."""
    return [rng.choice(len(p[0]), p=p[0])]


def rejections(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """Draws the residual by rejection: a loop without a last outcome."""
    for i, x in enumerate(draft):
        if rng.random() * q[i][x] < p[i][x]:
            continue
        while True:
            token = int(rng.integers(len(p[i])))
            if rng.random() < p[i][token] - q[i][token]:
                return [*draft[:i], token]
    return [*draft, rng.choice(len(p[-1]), p=p[-1])]


RIGHT = (
    textbook, vectors, by_hand, given_uniforms, global_generators, logarithms, single_precision,
    with_epsilon, in_torch,
    no_bonus, plain,
)  # fmt: skip

# ---------------------------------------------------------------------- wrong


def softmax(scores: Any) -> Any:
    weights = np.exp(np.asarray(scores, float))
    return weights / weights.sum()


def verifier(
    passes: Callable[[Any, Any], Any] = lambda u, ratio: u < ratio,
    rest: Callable[[Any, Any], Any] = lambda p, q: np.maximum(p - q, 0),
    bonus: Callable[[Any, Any], Any] = lambda p, q: p[-1],
    row: int = 0,
    one_uniform: bool = False,
    count_all: bool = False,
) -> Callable[..., list[int]]:
    """Speculative sampling, with a place for each mistake."""

    def verify(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
        p, q = np.array(p), np.array(q)
        n, u = len(draft), rng.random(len(draft))
        passed = [
            bool(passes(u[0 if one_uniform else i], p[i][x] / q[i][x])) for i, x in enumerate(draft)
        ]
        kept = sum(passed) if count_all else [*passed, False].index(False)
        law = (
            bonus(p, q)
            if kept == n
            else rest(p[np.clip(kept + row, 0, n)], q[np.clip(kept + row, 0, n - 1)])
        )
        return [*draft[:kept], rng.choices(range(len(law)), weights=list(law))[0]]

    return verify


def searchsorted_left(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
    """numpy's default side finds token 0 for u = 0, whatever its probability."""
    return [int(np.searchsorted(np.cumsum(p[0]), rng.random()))]


WRONG_VERIFIERS: dict[str, Callable[..., Any]] = {
    "softmax of the residual": verifier(rest=lambda p, q: softmax(np.maximum(p - q, 0))),
    "one uniform for all positions": verifier(one_uniform=True),
    "acceptance counted over all positions": verifier(count_all=True),
    "residual from the row before": verifier(row=-1),
    "residual from the next distribution": verifier(row=1),
    "bonus drawn from q": verifier(bonus=lambda p, q: q[-1]),
    "bonus from the row before": verifier(bonus=lambda p, q: p[-2]),
    "always accept": verifier(passes=lambda u, ratio: u < 2),
    "p and q swapped": verifier(passes=lambda u, ratio: u * ratio < 1),
    "ratio times 1.05": verifier(passes=lambda u, ratio: u < 1.05 * ratio),
    "root of the ratio": verifier(passes=lambda u, ratio: u < float(ratio) ** 0.5),
    "rejected token drawn from p": verifier(rest=lambda p, q: p),
    "absolute value for the positive part": verifier(rest=lambda p, q: abs(p - q)),
    "<= for <": verifier(passes=lambda u, ratio: u <= ratio),
    "searchsorted from the left": searchsorted_left,
}


def decoding(
    noise_once: bool = False,
    reseeded: bool = False,
    argmax: bool = False,
    short: bool = False,
    stale: bool = False,
) -> Callable[..., list[int]]:
    """A whole decoding function, with a place for each mistake."""

    def generate(p: Any, q: Any, gamma: int, n: int, rng: Any) -> list[int]:
        text: list[int] = []
        noise = rng.random(gamma)
        while len(text) < n:
            if reseeded:
                rng = np.random.default_rng(0)
            rows, draft = [], list[int]()
            for _ in range(gamma):
                rows.append(q(text + draft))
                likeliest = max(range(len(rows[-1])), key=list(rows[-1]).__getitem__)
                draft.append(likeliest if argmax else int(rng.choice(len(rows[-1]), p=rows[-1])))
            noise = noise if noise_once else rng.random(gamma)
            start = len(text)
            for i, x in enumerate(draft):
                row = p(text[:start] if stale else text)
                if noise[i] < row[x] / rows[i][x]:
                    text.append(x)
                    continue
                rest = [max(a - b, 0) for a, b in zip(row, rows[i], strict=True)]
                text.append(rng.choices(range(len(rest)), weights=rest)[0])
                break
            else:
                text.append(int(rng.choice(len(p(text)), p=p(text))))
        return text[: n - short]

    return generate


WRONG_DECODING: dict[str, Callable[..., Any]] = {
    "noise shared by all rounds": decoding(noise_once=True),
    "reseeded in the loop": decoding(reseeded=True),
    "argmax draft with soft q": decoding(argmax=True),
    "one token too few": decoding(short=True),
    "the row of the round's beginning for every position": decoding(stale=True),
}


def draft_tokens(
    choose: Callable[[Any, Any], int] = lambda row, rng: int(rng.choice(len(row), p=row)),
    keep: Callable[[Any, int], bool] = lambda row, token: True,
    declare: Callable[[Any], Any] = lambda row: row,
) -> Callable[..., Any]:
    """A drafter, with a place for each mistake."""

    def draft(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
        tokens, laws = list[int](), list[Any]()
        for _ in range(gamma):
            row = q([*context, *tokens])
            token = choose(row, rng)
            if not keep(row, token):
                break
            tokens.append(token)
            laws.append(declare(row))
        return tokens, laws

    return draft


def squared(row: Any) -> list[Any]:
    return [x * x / sum(y * y for y in row) for x in row]


def likeliest(row: Any, rng: Any) -> int:
    return max(range(len(row)), key=list(row).__getitem__)


WRONG_DRAFTERS: dict[str, Callable[..., Any]] = {
    "argmax, declared soft": draft_tokens(choose=likeliest),
    "drawn at half the temperature, declared at one": draft_tokens(
        choose=lambda row, rng: int(rng.choice(len(row), p=squared(row)))
    ),
    "proposed only if confident": draft_tokens(keep=lambda row, token: 2 * row[token] >= 1),
    "proposed only if token 0": draft_tokens(keep=lambda row, token: token == 0),
}


# ------------------------------------------------------------- wrong where small cases do not reach


def late(
    ratio: Callable[..., Any] = lambda p, q, i, x: p[i][x] / q[i][x],
    rest: Callable[[Any], Any] = lambda rest: rest,
    bonus: Callable[[Any, Any], Any] = lambda p, q: p[-1],
    begins: int = 0,
    pause: float = 0.0,
) -> Callable[..., list[int]]:
    """Speculative sampling with a place for each mistake; right for `begins` - 1 calls."""
    calls = 0

    def verify(p: Rows, q: Rows, draft: list[int], rng: Any) -> list[int]:
        nonlocal calls
        calls += 1
        wait_until = time.process_time() + pause
        while time.process_time() < wait_until:
            pass
        if calls < begins:
            return textbook(p, q, draft, rng)
        for i, x in enumerate(draft):
            if not rng.random() < ratio(p, q, i, x):
                left = rest([max(a - b, 0) for a, b in zip(p[i], q[i], strict=True)])
                return [*draft[:i], rng.choice(len(left), p=[x / sum(left) for x in left])]
        row = bonus(p, q)
        return [*draft, rng.choice(len(row), p=row)]

    return verify


def is_exact(row: Any) -> bool:
    return isinstance(row[0], Fraction)


def top_4(rest: list[Any]) -> list[Any]:
    least = sorted(rest)[-4:][0]
    return [x if x >= least else 0 * x for x in rest]


def accept_all(p: Rows, q: Rows, i: int, x: int) -> int:
    return 1


DEEP_VERIFIERS: dict[str, Callable[..., Any]] = {
    "bonus from q at gamma 4": late(bonus=lambda p, q: q[-1] if len(q) == 4 else p[-1]),
    "the fourth token and later ones always accepted": late(
        ratio=lambda p, q, i, x: p[i][x] / q[i][x] if i < 3 else 1
    ),
    "accepted where the target is sure": late(
        ratio=lambda p, q, i, x: 1 if float(max(p[i])) >= 0.85 else p[i][x] / q[i][x]
    ),
    "the denominator of the ratio is 0.15 at least": late(
        ratio=lambda p, q, i, x: (
            p[i][x] / max(q[i][x], Fraction(15, 100))
            if is_exact(p[i])
            else p[i][x] / max(q[i][x], 0.15)
        )
    ),
    "residual of the likeliest four tokens": late(rest=top_4),
    "the sixth token always accepted": late(
        ratio=lambda p, q, i, x: p[i][x] / q[i][x] if i != 5 else 1
    ),
    "wrong from the 100,000th call on": late(ratio=accept_all, begins=100_000),
    "right on Fractions, wrong on floats": late(
        ratio=lambda p, q, i, x: p[i][x] / q[i][x] if is_exact(p[i]) else 1
    ),
}
"""Mistakes of a verifier that no chain of three over four tokens shows."""

slow_and_wrong = late(ratio=accept_all, begins=30, pause=0.2)
"""Right for as long as a check has time for."""


def walk(
    accepts: Callable[..., Any] = lambda ratio, place, depth: ratio,
    restarts: bool = False,
    tests_probes: bool = False,
    point: Callable[[Any, Any, int], Any] = lambda row, fresh, x: row[x],
    bonus: Callable[[Any, int], Any] = lambda p, node: p[node],
) -> Callable[..., Verdict]:
    """The library's rule for trees, with a place for each mistake.

    accepts   (ratio, number among its siblings, depth) -> the probability of acceptance
    restarts  the residual is made of p again at the third sibling
    point     (p after the rejections, p, token) -> the probability of accepting a point mass
    """

    def verify(tree: Any, p: Any, rng: RandomSource) -> Verdict:
        accepted, rejected = list[int](), list[int]()
        here, row, untested = {ROOT}, p[ROOT], True
        while untested:
            fresh = p[accepted[-1]] if accepted else p[ROOT]
            siblings = [
                node
                for node, parent in enumerate(tree.parents)
                if parent in here and (tests_probes or not tree.probe[node])
            ]
            untested = False
            for place, node in enumerate(siblings):
                x, q = tree.tokens[node], tree.draft_probs[node]
                row = fresh if restarts and place == 2 else row
                ratio = point(row, fresh, x) if q is None else row[x] / q[x]
                if rng.accept(accepts(ratio, place, len(accepted) + 1)):
                    accepted.append(node)
                    here = {twin for twin in siblings if tree.tokens[twin] == x}
                    row, untested = p[node], True
                    break
                rejected.append(node)
                row = exclude_token(row, x) if q is None else residual(row, q)
        is_leaf = accepted and not any(parent in here for parent in tree.parents)
        row = bonus(p, accepted[-1]) if is_leaf else row
        return Verdict(tuple(accepted), rng.draw(row), tuple(rejected))

    return verify


DEEP_TREES: dict[str, tuple[Callable[..., Verdict], str]] = {
    "residual restarts at the third sibling": (walk(restarts=True), "joint distribution"),
    "third sibling accepted free": (
        walk(accepts=lambda ratio, place, depth: 1 if place == 2 else ratio),
        "joint distribution",
    ),
    "a node at depth 3 accepted free": (
        walk(accepts=lambda ratio, place, depth: 1 if depth == 3 else ratio),
        "joint distribution",
    ),
    "probes verified as drafts": (walk(tests_probes=True), "tokens of a round"),
    "a point mass after a drawn sibling judged by p": (
        walk(point=lambda row, fresh, x: fresh[x]),
        "joint distribution",
    ),
    "bonus without the sampling settings": (
        walk(bonus=lambda p, node: p.probs_under(node, SamplingParams())),
        "joint distribution",
    ),
}
"""Mistakes of a verifier of trees that two siblings do not show, and the law that sees each."""


def wrong_from_round(first: int) -> Callable[..., list[int]]:
    """Return speculative decoding whose draft tokens are all accepted from a round on."""

    def generate(p: Any, q: Any, gamma: int, n: int, rng: Any) -> list[int]:
        text, rounds = list[int](), 0
        while len(text) < n:
            rounds += 1
            draft = list[int]()
            for _ in range(gamma):
                row = q([*text, *draft])
                draft.append(int(rng.choice(len(row), p=row)))
            p_rows = [p([*text, *draft[:i]]) for i in range(gamma + 1)]
            q_rows = [q([*text, *draft[:i]]) for i in range(gamma)]
            verify = late(ratio=accept_all) if rounds >= first else textbook
            text += verify(p_rows, q_rows, draft, rng)
        return text[:n]

    return generate


def third_is_argmax(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
    """The third token is the likeliest one, declared as drawn."""
    tokens, declared = list[int](), list[Any]()
    for place in range(gamma):
        row = q([*context, *tokens])
        tokens.append(likeliest(row, rng) if place == 2 else int(rng.choice(len(row), p=row)))
        declared.append(row)
    return tokens, declared


def drops_rare(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
    """A token of less than 1/8 ends the draft, and is dropped."""
    return draft_tokens(keep=lambda row, token: 8 * row[token] >= 1)(q, context, gamma, rng)


def forgets_context(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
    """Draws as if the text began here, and declares what it should have drawn from."""
    tokens, declared = list[int](), list[Any]()
    for _ in range(gamma):
        row = q(tokens)
        tokens.append(int(rng.choice(len(row), p=row)))
        declared.append(q([*context, *tokens[:-1]]))
    return tokens, declared


def keeps_its_tail() -> Callable[..., Any]:
    """What was drafted after the first token is proposed in the next round again."""
    tail = list[tuple[int, Any]]()

    def draft(q: Any, context: list[int], gamma: int, rng: Any) -> Any:
        known = tail or list(
            zip(*draft_tokens()(q, context, gamma, rng), strict=True)  # tokens and rows
        )
        tail[:] = [] if tail else known[1:]
        return [token for token, _ in known], [row for _, row in known]

    return draft


DEEP_DRAFTERS: dict[str, tuple[Callable[..., Any], str]] = {
    "the third token is the argmax, declared as drawn": (third_is_argmax, "truthful drafter"),
    "a rare token ends the draft and is dropped": (drops_rare, "presence"),
    "another distribution after a context": (forgets_context, "truthful drafter"),
    "state kept across rounds": (keeps_its_tail(), "the same choices make the same run"),
}
"""Mistakes of a drafter that two tokens after the empty context do not show."""


def seconds(**function: Any) -> tuple[float, Counterexample | None]:
    """Return how long a check computed, and what it found."""
    began = time.process_time()
    found = check(calls=110_000, **function).counterexample
    return time.process_time() - began, found


if __name__ == "__main__":
    for form, mistakes in (
        ("verifier", WRONG_VERIFIERS),
        ("generate", WRONG_DECODING),
        ("drafter", WRONG_DRAFTERS),
        ("verifier", DEEP_VERIFIERS),
        ("verifier", {name: function for name, (function, _) in DEEP_TREES.items()}),
        ("generate", {"wrong from round 4": wrong_from_round(4)}),
        ("drafter", {name: function for name, (function, _) in DEEP_DRAFTERS.items()}),
    ):
        for name, function in mistakes.items():
            took, found = seconds(**{form: function})
            print(f"{took:5.2f} s  {name}: {found.law if found else 'NOT FOUND'}")
