"""Schedulers, policies and padded batches with one defect each."""

from functools import partial

from tinyspec.laws.museum.rows import Mutant
from tinyspec.laws.padded_batch import PADDED_ALONE, PaddedBatch, run_padded
from tinyspec.laws.schedule_laws import (
    ADMITTED,
    CANCELLED,
    DECODING,
    HELD,
    NO_STANDSTILL,
    NO_STARVATION,
    SCHEDULED_ALONE,
    STREAMED,
)
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.policies import AlignedPolicy, fill_budget
from tinyspec.lm.scheduler import Scheduler
from tinyspec.lm.session import Session
from tinyspec.speculative.integrated.sarathi import SarathiPolicy

_cut = partial(Mutant, law=SCHEDULED_ALONE, function=ForwardBatch.first_rows)
_pass = partial(Mutant, law=SCHEDULED_ALONE, function=Scheduler._run_pass)
_work = partial(Mutant, law=NO_STANDSTILL, function=Scheduler._work)
_admit = partial(Mutant, law=ADMITTED, function=Scheduler._admit)
_serve = partial(Mutant, law=NO_STARVATION, function=fill_budget)
_padded = partial(Mutant, law=PADDED_ALONE, bug="B47")

# ------------------------------------------------------------------ prompts in chunks

RUN = "scores = iter(model.forward(feeds))"
CHUNKS = [
    _cut("a chunk begins at position 0", "positions=self.positions[:n],", "positions=[*range(n)],"),
    _pass(
        "logits of a prompt that nobody reads",
        RUN,
        f"""unread = [not feed.heads for feed in feeds]
for feed in feeds:
    feed.heads = feed.heads or [len(feed.tokens) - 1]
{RUN}
scores = (one._replace(logits=one.logits[is_unread:]) for one, is_unread in zip(scores, unread))""",
    ),
    Mutant(
        "the last token of a chunk is run again",
        "nodes = nodes[len(scores.layers) :]",
        "nodes = nodes[max(len(scores.layers) - 1, 1) :]",
        Session._run_prompt,
        law=SCHEDULED_ALONE,
    ),
]

# ------------------------------------------------------------------ requests that share a pass

FEEDS = "feeds = [feed for wait in waits for feed in wait.feeds]"
SHARED = [
    _pass(
        "all requests of a pass have the positions of the first",
        FEEDS,
        f"""{FEEDS}
for feed in feeds:
    shift = feeds[0].positions[0] - feed.positions[0]
    feed.positions = [position + shift for position in feed.positions]""",
        bug="B47",
    ),
    _pass(
        "scores go to another request",
        "iter(model.forward(feeds))",
        "reversed(model.forward(feeds))",
        bug="B22",
    ),
    _pass(
        "a pass that fails ends all of its requests",
        "if len(waits) == 1: return [error]",
        "if waits:\n    return [error] * len(waits)",
    ),
    _work("a barrier that waits for those who left", "self._run_if_all_wait()", "pass"),
    _work("nobody takes the place of one who left", "self._admit()", "pass"),
    Mutant(
        "a cancelled request leaves its pass to the others",
        "self._waiting.pop(ticket.number, None)",
        "pass",
        Scheduler.cancel,
        law=CANCELLED,
    ),
    _work(
        "tokens are shown when their request has ended",
        "in ticket.job(self):",
        "in list(ticket.job(self)):",
        law=STREAMED,
    ),
    _admit("one request too many", "len(self._live) >= self", "len(self._live) > self"),
    _admit("positions of the cache are not counted", "slots > self.max_slots", "False"),
    _admit("the youngest request is next", "self._queue.popleft()", "self._queue.pop()"),
]

# ------------------------------------------------------------------ policies

STARVING = [
    _serve(
        "the shortest pass first",
        "for pending in waiting:",
        "for pending in sorted(waiting, key=lambda one: one.rows):",
    ),
    _serve("the youngest first", "in waiting:", "in sorted(waiting, reverse=True):"),
    Mutant(
        "a target is held while any draft waits",
        "or pending.held >= self.patience",
        "",
        AlignedPolicy.pick,
        law=NO_STARVATION,
    ),
    Mutant(
        "the shortest prompt first",
        "prompts = [pending for pending in own if pending.is_prefill]",
        """prompts = [pending for pending in own if pending.is_prefill]
prompts.sort(key=lambda one: one.rows)""",
        SarathiPolicy.pick,
        law=NO_STARVATION,
    ),
    Mutant(
        "requests that read a prompt count as a batch",
        "sum(ticket.is_decoding for ticket in self._live.values())",
        "len(self._live)",
        Scheduler._answer,
        bug="B46",
        law=DECODING,
    ),
    Mutant("how long a pass is held is lost", "held += 1", "held += 0", Scheduler._pick, law=HELD),
]

# ------------------------------------------------------------------ padded batches

ACCEPTED = "accepted = count_equal(draft, best)"
PADDED = [
    _padded(
        "a position is a slot of the padded batch",
        "[len(past) + at for at in range(len(own))]",
        "own",
        PaddedBatch.run,
    ),
    _padded(
        "every row attends to the slots of the longest",
        "[*past, *own[: at + 1]]",
        "[*range(end), *own[: at + 1]]",
        PaddedBatch.run,
        bug="B21, B47",
    ),
    _padded(
        "rejected tokens stay in a padded cache",
        "del self.slots[row][len(self.texts[row]) + accepted :]",
        "pass",
        PaddedBatch.step,
    ),
    _padded(
        "the fewest accepted tokens of a batch are kept of all",
        ACCEPTED,
        """accepted = min(
    count_equal(draft, own.argmax(dim=-1).tolist())
    for draft, own in zip(drafts.values(), logits, strict=True)
)""",
        PaddedBatch.step,
        bug="slip",
    ),
    _padded(
        "a request that has ended stays in the batch",
        "if len(batch.texts[row]) < len(prompt)",
        """if len(batch.texts[0]) < len(prompts[0]) + NEW_TOKENS
or len(batch.texts[row]) < len(prompt)""",
        run_padded,
        bug="slip",
    ),
]

MUTANTS = [*CHUNKS, *SHARED, *STARVING, *PADDED]
