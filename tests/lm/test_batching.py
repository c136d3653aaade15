"""Batching is a barrier: every text in a batch equals the text alone.

This holds whichever request comes first, and no request waits for ever.
"""

import random
import threading
import time

import pytest
import torch

from tests.lm.small import GPT2, LLAMA, model
from tinyspec.lm.batching import BatchAborted, BatchBarrier, run_together
from tinyspec.lm.forward import ForwardRecord
from tinyspec.tree import TokenTree

TARGET, DRAFT = model(LLAMA, 0), model(GPT2, 1)


def greedy(
    barrier: BatchBarrier | None,
    prompt: list[int],
    new: int,
    forward_log: list[ForwardRecord] | None = None,
    jitter: float = 0.0,
):
    """A small speculative loop: two models in turn, a rewind now and then. Returns text and
    target's logits.
    """
    target, draft = TARGET.session(forward_log, barrier), DRAFT.session(forward_log, barrier)
    target.extend(prompt)
    draft.extend(prompt)
    rows = []
    while len(target) < len(prompt) + new:
        drafted = int(draft.score(TokenTree()).logits[0].argmax())
        time.sleep(jitter * random.random())
        scores = target.score(TokenTree.chain([drafted, 3]))
        best = scores.logits.argmax(dim=-1).tolist()
        path = [0] if best[0] == drafted else []
        target.commit(path, best[len(path)])
        rows.append(scores.logits)
        draft.append(target.text[len(draft) :])
        if len(target) % 3 == 0:
            target.rewind(len(target) - 1)
            target.append([7])
            draft.rewind(len(target) - 1)
            draft.append([7])
    return target.text, torch.cat(rows)


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 1, 2], [3, 3], [12, 0, 1]]


@pytest.mark.parametrize("jitter", [0.0, 0.002])
def test_a_prompt_in_a_batch_equals_the_prompt_alone(jitter: float) -> None:
    alone = [greedy(None, p, 4 + 3 * i) for i, p in enumerate(PROMPTS)]
    together = run_together(
        [
            lambda barrier, p=p, i=i: greedy(barrier, p, 4 + 3 * i, jitter=jitter)
            for i, p in enumerate(PROMPTS)
        ]
    )
    for (text, rows), (text_alone, rows_alone) in zip(together, alone, strict=True):
        assert text == text_alone
        torch.testing.assert_close(rows, rows_alone, rtol=0, atol=1e-12)


def test_the_order_of_the_requests_does_not_matter() -> None:
    """Lengths, prompts and drafts differ; nothing leaks between the texts."""
    one = run_together([lambda barrier, p=p: greedy(barrier, p, 6) for p in PROMPTS])
    other = run_together([lambda barrier, p=p: greedy(barrier, p, 6) for p in reversed(PROMPTS)])
    for (text, rows), (text_other, rows_other) in zip(one, reversed(other), strict=True):
        assert text == text_other
        torch.testing.assert_close(rows, rows_other, rtol=0, atol=1e-12)


def test_the_ledger_stays_with_the_request() -> None:
    alone: list[ForwardRecord] = []
    greedy(None, PROMPTS[0], 6, alone)
    forward_logs: list[list[ForwardRecord]] = [[] for _ in PROMPTS]
    run_together(
        [
            lambda barrier, p=p, n=n: greedy(barrier, p, 6, n)
            for p, n in zip(PROMPTS, forward_logs, strict=True)
        ]
    )
    assert forward_logs[0] == alone


def test_what_waits_together_is_one_forward_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    widths: list[int] = []
    forward = TARGET.forward

    def counted(feeds):  # type: ignore[no-untyped-def]
        widths.append(len(feeds))
        return forward(feeds)

    monkeypatch.setattr(TARGET, "forward", counted)

    def job(barrier: BatchBarrier, steps: int) -> None:
        session = TARGET.session(barrier=barrier)
        session.extend([1])
        for _ in range(steps):
            session.score(TokenTree())
            session.commit((), 2)

    run_together([lambda barrier, n=n: job(barrier, n) for n in (5, 2, 3)])
    assert widths == [3, 3, 2, 1, 1]  # and whoever has finished is not waited for


def test_a_worker_that_fails_ends_all_and_says_why() -> None:
    def bad(barrier: BatchBarrier) -> None:
        session = TARGET.session(barrier=barrier)
        session.extend([1, 2, 3])
        raise RuntimeError("my own mistake")

    def good(barrier: BatchBarrier) -> None:
        session = TARGET.session(barrier=barrier)
        session.extend([1, 2])
        for _ in range(50):
            session.score(TokenTree())
            session.commit((), 1)

    with pytest.raises(RuntimeError, match="my own mistake"):
        run_together([good, bad, good])


def test_a_forward_that_fails_ends_all_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(feeds):  # type: ignore[no-untyped-def]
        raise MemoryError("no room")

    monkeypatch.setattr(TARGET, "forward", broken)
    with pytest.raises(MemoryError, match="no room"):
        run_together([lambda barrier: greedy(barrier, [1, 2], 3)] * 3)


def test_ctrl_c_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread is interrupted while it waits; workers get `Closed` at their next pass."""
    ended: list[bool] = []

    def endless(barrier: BatchBarrier) -> None:
        session = TARGET.session(barrier=barrier)
        session.extend([1])
        try:
            while True:
                session.score(TokenTree())
                session.rewind(0)
                session.extend([1])
        except BatchAborted:
            ended.append(True)
            raise

    join, calls = threading.Thread.join, []

    def interrupted(self, timeout=None):  # type: ignore[no-untyped-def]
        calls.append(timeout)
        if len(calls) == 3:
            raise KeyboardInterrupt
        join(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_together([endless, endless])
    assert ended == [True, True]


def test_no_jobs_and_one_job() -> None:
    assert run_together([]) == []
    assert run_together([lambda barrier: greedy(barrier, [1, 2], 3)[0]]) == [
        greedy(None, [1, 2], 3)[0]
    ]


def test_threads_that_come_together_pack_a_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forward packs the weights; a thread that comes meanwhile must not find a model
    without any.
    """
    from tinyspec.lm import transformer

    plain, asked = transformer.can_pack, list[bool]()

    def slow(*args):  # type: ignore[no-untyped-def]
        asked.append(plain(*args))
        time.sleep(0.02)
        return asked[-1]

    m = model().to(dtype=torch.float32)
    monkeypatch.setattr(transformer, "can_pack", slow)
    run_together([lambda barrier: m.session(barrier=barrier).extend([1, 2, 3])] * 6)
    assert len(asked) == 1 or not asked[0]  # without compiled kernels every pass asks again
