"""The theorems of Jacobi iteration (Santilli et al. 2023), by trying every start of small blocks.

After k sweeps the first k tokens are the greedy ones; so m sweeps are enough, and the greedy text
is the only fixed point. The judge asks a table for one row at a time and sweeps by hand; it knows
no drafter, no tree and no cache.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.rng import Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.evidence import Evidence, accuse, expect_equal
from tinyspec.laws.exact.models import likeliest_token
from tinyspec.laws.exact.tables import TableModel
from tinyspec.technique import Request

SWEEP_IS_JACOBI = "a sweep is a Jacobi iteration over its block"
SWEEP_FIXES = "each sweep fixes a token more"
SOLVE_PUBLISHED = "iteration ends at the greedy text"
SWEEP_COST = "what is final is not run again, and nothing else is run"

SWEEP_PROMPT = (0, 1)
Tokens = tuple[int, ...]
Build = Callable[..., Decoder]
"""(request, form=, block=, prefix=, init=) -> Decoder, whose drafter's `start(n, text, rng)`
makes the first draft of a block.
"""

SWEEP_FORMS: tuple[tuple[str, int, int], ...] = (
    ("pj", 1, 0),
    ("pgj", 1, 0),
    ("pgj", 2, 0),
    ("pgj", 3, 0),
    ("hgj", 2, 0),
    ("hgj", 2, 3),
    ("hgj", 3, 1),
)
"""form, block, prefix; of five tokens wanted or of fewer."""


def sweep_tables(count: int = 3) -> Iterator[TableModel]:
    """Yield targets over two and three tokens."""
    for seed, vocabulary in product(range(count), (2, 3)):
        yield TableModel(seed, vocabulary, zeros=False)


def sweep_block(model: TableModel, text: Sequence[int], block: Sequence[int]) -> list[int]:
    """Return the model's greedy token at every position of a block, a row at a time."""
    return [_next(model, (*text, *block[:at])) for at in range(len(block))]


@lru_cache(maxsize=8192)
def _next(model: TableModel, text: Tokens) -> int:
    return likeliest_token(model.row(text))


def greedy_by_hand(
    model: TableModel, text: Sequence[int], n: int, ends: frozenset[int] = frozenset()
) -> list[int]:
    """Return the greedy text."""
    made: list[int] = []
    while len(made) < n and not (made and made[-1] in ends):
        made += sweep_block(model, (*text, *made), (0,))
    return made


def next_token_table(rule: Callable[[Tokens], int], vocabulary: int) -> TableModel:
    """Return a model that is certain of the token that a rule gives for a text."""
    return TableModel(
        vocabulary=vocabulary, rows=lambda text: [int(x == rule(text)) for x in range(vocabulary)]
    )


def counting_table(vocabulary: int = 16) -> TableModel:
    """Return a model that counts on from its last token, so that no token is right ahead of
    time."""
    return next_token_table(lambda text: (text[-1] + 1) % vocabulary, vocabulary)


def all_ones_table(vocabulary: int = 2) -> TableModel:
    """Return a model that gives 1 while every token so far is 1, and 0 ever after.

    It is the worst case for any start but 1.
    """
    return next_token_table(lambda text: int(set(text[len(SWEEP_PROMPT) :]) <= {1}), vocabulary)


def position_table(vocabulary: int = 16) -> TableModel:
    """Return a model that gives the number of its position, so that one sweep finds all tokens."""
    return next_token_table(lambda text: len(text) % vocabulary, vocabulary)


# ---------------------------------------------------------------------- in the frame


def begin_sweeps(
    build: Build,
    model: TableModel,
    start: Sequence[int],
    form: str,
    block: int,
    prefix: int,
    wanted: int,
    forward_log: list[Any] | None = None,
) -> Decoder:
    """Return a decoder after its prompt, whose blocks all begin with these tokens."""
    forward_log = [] if forward_log is None else forward_log
    request = Request(
        model.session(forward_log),
        sampling=SamplingParams(0.0),
        stop=StoppingCriteria(max_new_tokens=wanted),
        forward_log=forward_log,
    )
    decoder = build(request, form=form, block=block, prefix=prefix)
    drafter: Any = decoder.drafter
    drafter.start = lambda n, text, rng: list(start[:n])
    decoder.extend(SWEEP_PROMPT)
    return decoder


def expected_sweeps(
    model: TableModel, start: Sequence[int], form: str, block: int, prefix: int, wanted: int
) -> list[tuple[Tokens, Tokens]]:
    """Return what each sweep reads after the newest token, and the tokens that are then final."""
    text, made = greedy_by_hand(model, SWEEP_PROMPT, wanted), 0
    found: list[tuple[Tokens, Tokens]] = []
    parallel = prefix if form == "hgj" else wanted
    while made < wanted:
        n = max(min({"pj": wanted}.get(form, block), parallel - made, wanted - made), 0)
        draft, end = list(start[:n]), made + max(n, 1)
        while made < end:
            right = text[made:end]
            agreed = next((at for at in range(n) if draft[at] != right[at]), n)
            fixed = min(agreed + 1, end - made)
            found.append((tuple(draft[:-1]), tuple(right[:fixed])))
            draft = sweep_block(model, (*SWEEP_PROMPT, *text[:made]), draft)[fixed:]
            made, n = made + fixed, n - fixed
    return found


def sweeps_by_hand(build: Build, wanted: int = 5, most: int = 60) -> Evidence:
    """Check what is drafted and committed, sweep by sweep, from every start in every form."""
    seen = 0
    for model, (form, block, prefix) in product(sweep_tables(2), SWEEP_FORMS):
        size = {"pj": wanted}.get(form, min(block, prefix) if form == "hgj" else block)
        starts = list(product(range(model.vocabulary), repeat=max(size, 1)))
        for start in starts[:: -(-len(starts) // most)]:
            decoder = begin_sweeps(build, model, start, form, block, prefix, wanted)
            got: list[tuple[Tokens, Tokens]] = []
            while not decoder.finished:
                round = decoder.step(Seeded(decoder.rounds))
                got.append((tuple(round.tree.tokens), round.tokens))
            expected, seen = expected_sweeps(model, start, form, block, prefix, wanted), seen + 1
            case = {"model": model, "form": form, "block": block, "prefix": prefix, "start": start}
            expect_equal(SWEEP_IS_JACOBI, expected, got, **case, prompt=SWEEP_PROMPT)
    return Evidence(SWEEP_IS_JACOBI, seen)


def fixes_one_at_least(build: Build, wanted: int = 4) -> Evidence:
    """Check that each sweep fixes a token at least, from every start.

    On the worst targets it fixes just one, on the best all in two sweeps.
    """
    every = [
        (model, start)
        for model in sweep_tables()
        for start in product(range(model.vocabulary), repeat=wanted)
    ]
    worst = [
        (counting_table(), (1,) * 8),
        (all_ones_table(), (0,) * 8),
        (all_ones_table(), (0, 1, 1, 1, 0, 1, 1, 1)),
    ]
    best = [(position_table(), (0,) * 8)]
    for model, start in (*every, *worst, *best):
        m, sweep = len(start), 0
        decoder = begin_sweeps(build, model, start, "pj", 1, 0, m)
        text = greedy_by_hand(model, SWEEP_PROMPT, m)
        case: dict[str, Any] = {"model": model, "start": start}
        while not decoder.finished:
            sweep, due = sweep + 1, len(decoder.new) + 1
            decoder.step(Seeded(decoder.rounds))
            fixed = max(len(decoder.new), due)
            expect_equal(SWEEP_FIXES, text[:fixed], decoder.new, **case, sweep=sweep)
        low, high = {8: (8, 8)}.get(m, (1, m)) if (model, start) not in best else (2, 2)
        if not low <= sweep <= high:
            accuse(SWEEP_FIXES, f"{low} to {high} sweeps", f"{sweep} sweeps", **case)
    return Evidence(SWEEP_FIXES, len(every) + len(worst) + len(best))


def costs_what_is_left(build: Build, wanted: int = 6) -> Evidence:
    """Check that a sweep is one pass over the newest token and the tokens that are not final."""
    seen = 0
    for model, (form, block, prefix) in product(sweep_tables(2), (*SWEEP_FORMS, ("pgj", 4, 0))):
        forward_log: list[Any] = []
        start = (1, 0, 1, 0, 1, 0)
        decoder = begin_sweeps(
            build, model, start, form, block, prefix, wanted, forward_log=forward_log
        )
        while not decoder.finished:
            decoder.step(Seeded(decoder.rounds))
        got = [call.rows for call in forward_log if not call.prefill]
        sweeps = expected_sweeps(model, start, form, block, prefix, wanted)
        expected, seen = [1 + len(draft) for draft, _ in sweeps], seen + 1
        case = {"model": model, "form": form, "block": block, "prefix": prefix, "start": start}
        expect_equal(SWEEP_COST, expected, got, **case)
    return Evidence(SWEEP_COST, seen)


# ---------------------------------------------------------------------- as published


def only_fixed_point(model: TableModel, n: int) -> list[Tokens]:
    """Return every text of n tokens that a sweep leaves as it is."""
    return [
        y
        for y in product(range(model.vocabulary), repeat=n)
        if tuple(sweep_block(model, SWEEP_PROMPT, y)) == y
    ]


def solve_ends_at_greedy(solve: Callable[..., Any], n: int = 4) -> Evidence:
    """Check from every start that only the greedy text is fixed, and is reached in time.

    k sweeps make k tokens right, n + 1 are enough, and the end is seen.
    """
    seen, splits = 0, ((1, None), (2, None), (n, None), (2, 2), (3, 1), (2, 0))
    for model, ends in product(sweep_tables(), (frozenset[int](), frozenset({1}))):
        sweep_once = partial(sweep_block, model)
        text = greedy_by_hand(model, SWEEP_PROMPT, n, ends)
        whole = greedy_by_hand(model, SWEEP_PROMPT, n)
        expect_equal(SOLVE_PUBLISHED, [tuple(whole)], only_fixed_point(model, n), model=model)
        for (block, prefix), start in product(splits, product(range(model.vocabulary), repeat=n)):
            begin = lambda size, text, start=start: list(start[:size])  # noqa: E731
            found = solve(sweep_once, SWEEP_PROMPT, n, block, begin, ends, prefix)
            case = {"model": model, "block": block, "prefix": prefix, "start": start}
            case["ends"] = sorted(ends)
            expect_equal(SOLVE_PUBLISHED, text, found.tokens, **case)
            first = 0
            for states in found.blocks:
                size = len(states[0])
                right = greedy_by_hand(model, (*SWEEP_PROMPT, *whole[:first]), size)
                for sweep, state in enumerate(states):
                    if state[:sweep] != right[:sweep]:
                        got = f"{state} after {sweep} sweeps"
                        accuse(SOLVE_PUBLISHED, f"{right[:sweep]} first", got, **case)
                if len(states) > size + 2:
                    most, got = f"at most {size + 1} sweeps", f"{len(states) - 1}"
                    accuse(SOLVE_PUBLISHED, most, got, **case)
                first += size
            seen += 1
    return Evidence(SOLVE_PUBLISHED, seen)


def build_jacobi(drafter: Callable[..., Any]) -> Build:
    """Return a builder that runs this drafter class."""

    def build(request: Request, *, form: str, block: int, prefix: int) -> Decoder:
        sized = None if form == "pj" else block
        return request.decoder(drafter(sized, prefix if form == "hgj" else None), verify_tree)

    return build
