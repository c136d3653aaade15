"""Sessions, caches and passes with one defect each; early exits, calibration, and pipelines."""

from dataclasses import replace
from functools import partial

from tinyspec.early_exit.calibrate import binomial_p_value, calibrate, hoeffding_p_value
from tinyspec.early_exit.calm import ConfidenceRule
from tinyspec.early_exit.exits import ExitTarget
from tinyspec.early_exit.ppd import PipelinedTarget
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    EXIT_RULE,
    PIPELINE_CLOCK,
    PIPELINE_WORK,
    SEQUENCE,
    SUPER,
)
from tinyspec.laws.judges import node_logits_of_parts, of_sessions
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Equivalent, Mutant
from tinyspec.laws.parts import PARTS
from tinyspec.laws.session_laws import (
    BATCH_ROW,
    CACHE_FRESH,
    COMMITTED_SLOTS,
    EXIT_TRUNCATED,
    NODE_LOGITS,
    POSITIONS_COUNT,
    REWIND_TRACELESS,
    ROW_IDENTITY,
    SIBLING_ORDER,
)
from tinyspec.lm.forward import Cache
from tinyspec.lm.scheduler import Scheduler
from tinyspec.lm.session import Session, find_seen_slots
from tinyspec.lm.transformer import Transformer
from tinyspec.lm.view import View

_commit = partial(Mutant, law=CACHE_FRESH, function=Session.commit)
_rewind = partial(Mutant, law=REWIND_TRACELESS, function=Session.rewind)
_run = partial(Mutant, law=NODE_LOGITS, function=Session.run_nodes)
_pipeline = partial(Mutant, law=PIPELINE_CLOCK, function=PipelinedTarget.score)
_exit = partial(Mutant, law=EXIT_RULE, function=ExitTarget.score)
_rule = partial(Mutant, law=EXIT_RULE, function=ConfidenceRule.should_exit)
_fill = partial(Mutant, law=EXIT_RULE, function=ExitTarget.__init__)
_testing = partial(Mutant, law=CALIBRATED, function=calibrate)
_p_value = partial(Mutant, law=SUPER, function=hoeffding_p_value)

# ------------------------------------------------------------------ what a session keeps

COMMITTED = "nodes = [self.scored[i] for i in path]"
KEPT = [
    _commit("crop one too many", COMMITTED, COMMITTED.replace("path", "path[:-1]")),
    _commit(
        "crop one too few",
        COMMITTED,
        f"""{COMMITTED}
nodes += [node for node in self.scored if node.parent is [tip, *nodes][-1]][:1]""",
    ),
    _rewind(
        "rollback resets all",
        "del self.committed[length:]",
        """newest, self._ready = self.text[:length][-1:], 0
self.committed, self.scored, self._probe_nodes = [], [], []
self.append(newest)
return""",
        bug="B17",
    ),
    _rewind(
        "rollback of none takes all",
        "if length == len(self):",
        """length = len(self.text[: -(len(self) - length)])
if length == len(self):""",
        bug="B18",
    ),
    _rewind("no rollback", "if length == len(self):", "if length >= 0:"),
    Mutant(
        "fork shares the cache",
        "twin.cache = self.cache.clone()",
        "twin.cache = self.cache",
        Session.fork,
        bug="B45",
        law=REWIND_TRACELESS,
    ),
    Mutant(
        "text left from the last request",
        "self.rewind(0)",
        "pass",
        Session.end,
        bug="B45",
        law="a request leaves no trace",
    ),
    Mutant(
        "kept path not gathered",
        "if not old:",
        """self.present[first : first + len(old)] = self.present[old]
if True:""",
        Cache.move_slots,
        bug="B19",
        law=COMMITTED_SLOTS,
    ),
    Mutant(
        "slots lost when the cache grows",
        "room = max(slots, 2 * self.capacity)",
        "self.store.zero_()\nroom = max(slots, 2 * self.capacity)",
        Cache.reserve,
        bug="B30",
        law=CACHE_FRESH,
    ),
    Mutant(
        "keys above an exit are zero",
        "if todo:",
        """for node in todo:
    node.sublayers_done = self._end
    self.cache.present[node.slot] = True
if False:""",
        Session.fill_cache,
        bug="B40",
        law=EXIT_TRUNCATED,
    ),
    Mutant(
        "exit one layer later",
        "self.session, self.plan = session, plan",
        """from dataclasses import replace
n = session.model.config.n_layers
last = min((n if plan.last is None else plan.last) + 1, n)
self.session, self.plan = session, replace(plan, last=last)""",
        View.__init__,
        bug="B40",
        law=EXIT_TRUNCATED,
    ),
]

# ------------------------------------------------------------------ what a pass is told

PLACES = "positions=positions,"
RAN = "scores = self.forward([feed])[0]"
SEVERAL = f"""{RAN}
if len(scores.logits) > 1:  # rounded otherwise: the last bit is another
    scores = scores._replace(logits=scores.logits * (1 + 2**-23))"""
ONE_LATE = "positions=[position + 1 for position in positions],"
PASSES = [
    _run(
        "position is the index in the tree",
        PLACES,
        "positions=[nodes[0].position + i for i in range(len(nodes))],",
        bug="B23",
    ),
    _run(
        "positions one late",
        PLACES,
        ONE_LATE,
        bug="B19",
        law=POSITIONS_COUNT,
    ),
    _run(
        "siblings seen",
        "seen=seen,",
        "seen=[(node.slot + 1, ()) for node in nodes],",
        bug="B24",
        law=SIBLING_ORDER,
    ),
    Mutant(
        "parent unseen",
        "tuple(reversed(path))",
        "tuple(reversed(path[:1] + path[2:]))",
        find_seen_slots,
        bug="B24",
        law=NODE_LOGITS,
    ),
    _run(
        "rows one late",
        RAN,
        f"{RAN}\nscores = scores._replace(logits=scores.logits.roll(1, 0))",
        bug="B16",
    ),
    _run(
        "several rows through another kernel",
        RAN,
        SEVERAL,
        bug="B38",
        law=ROW_IDENTITY,
    ),
    Mutant(
        "padding seen",
        "path = self._path",
        """longest, path = max(feed.n_slots for feed in feeds), self._path
for feed in feeds:
    every = [(longest, ()) if n == feed.n_slots else (n, more) for n, more in feed.seen]
    feed.seen, feed.n_slots = every, longest""",
        Transformer._forward,
        bug="B21",
        law=BATCH_ROW,
    ),
    Mutant(
        "batch rows swapped",
        "scores = iter(model.forward(feeds))",
        """made = list(model.forward(feeds))
if len({len(one.logits) for one in made}) == 1:  # sorted by length, and not put back
    order = sorted(range(len(made)), key=[feed.n_slots for feed in feeds].__getitem__)
    made = [one._replace(logits=made[i].logits) for one, i in zip(made, order, strict=True)]
scores = iter(made)""",
        Scheduler._run_pass,
        bug="B22",
        law=BATCH_ROW,
    ),
]

# ------------------------------------------------------------------ a pipeline

COMING = "upcoming, self.upcoming = self.upcoming, None"
BRANCHES = (
    "branches = self.guess_next(self.session.run_to_layer(NO_DRAFT, self.layer, "
    "head=True), upcoming)"
)
PIPELINES = [
    _pipeline(
        "branches overtake the newest token",
        "self.session.run_to_layer(branches, self.depth - self.layer)",
        "self.session.run_to_layer(branches, self.layer)",
    ),
    _pipeline(
        "a branch is begun when its token is known",
        BRANCHES,
        f"""scores = self.session.score(tree, hidden_layers)
self.session.run_to_layer(self.guess_next(scores, upcoming), self.depth - self.layer)
return scores
{BRANCHES}""",
    ),
    _pipeline(
        "the least likely tokens are begun",
        "rows: Any = scores.logits",
        "rows: Any = [[-x for x in scores.logits[0]]]",
        function=PipelinedTarget.guess_next,
    ),
    _pipeline(
        "a token that was begun starts anew",
        COMING,
        f"""newest = self.session.text[-1:]
self.session.rewind(len(self.session) - 1)
self.session.append(newest)
{COMING}""",
    ),
    _pipeline(
        "a token after the last one is begun",
        COMING,
        """self.cross_kv = self.upcoming or self.__dict__.get("cross_kv")
upcoming, self.upcoming = self.cross_kv, None""",
        law=PIPELINE_WORK,
    ),
    _pipeline(
        "one branch too many",
        "self.session, self.layer, self.k = session, layer, k",
        "self.session, self.layer, self.k = session, layer, k + 1",
        function=PipelinedTarget.__init__,
        law=PIPELINE_WORK,
    ),
]

# ------------------------------------------------------------------ exits

READ = "self.session.run_to_layer( tree, layer, hidden_layers=hidden_layers, head=True )"
REACHED = "return bool(self.measure.of(at) >= self.threshold(at.step))"
EXITS = [
    _exit(
        "the word is read one layer above the exit",
        READ,
        READ.replace("layer, h", "min(layer + 1, self.model.config.n_layers), h"),
        bug="B40",
    ),
    _exit(
        "the word is the top layer's", READ, "self.session.score(tree, hidden_layers)", bug="B40"
    ),
    _fill("what was left out is run at once", "FILLS[fill]", 'FILLS["recompute"]'),
    _fill(
        "what was left out is run when somebody needs it",
        "FILLS[fill]",
        'FILLS["postpone"]',
    ),
    _exit(
        "the threshold falls with the prompt",
        "self.start = len(self.session)",
        "self.start = 0",
        function=ExitTarget.extend,
    ),
    _exit(
        "the threshold of the token before",
        "len(self) - self.start,",
        "max(len(self) - self.start - 1, 0),",
    ),
    _rule("at the threshold it stays", REACHED, REACHED.replace(">=", ">")),
    _rule(
        "confidence under the user's temperature",
        REACHED,
        f"""from tinyspec.decoding.sampling import SamplingParams
at = at._replace(logits=SamplingParams(0.5).probs(at.logits))
{REACHED}""",
    ),
    _rule(
        "the first new token never leaves",
        REACHED,
        REACHED.replace("bool(", "bool(at.step > 0 and "),
    ),
    _exit(
        "asked from the top down",
        "self.rule.layers_of(self.session.committed[newest].token, newest):",
        "self.rule.layers[::-1]:",
    ),
]

# ------------------------------------------------------------------ calibration

STOPS = "if not tested[-1].rejected: break choice = candidate"
MARGIN = "max(0.0, float(delta) - float(total) / n)"
CALIBRATIONS = [
    _testing(
        "the testing goes on after a failure",
        STOPS,
        "if tested[-1].rejected:\n    choice = candidate",
    ),
    _testing(
        "a second failure stops it",
        STOPS,
        """if tested[-1].rejected:
    choice = candidate
elif sum(not test.rejected for test in tested) > 1:
    break""",
    ),
    _testing(
        "tested in the order of the p-values",
        "if not tested[-1].rejected: break",
        "",
        also=(
            Patch(
                calibrate,
                "return Calibration(choice, tuple(tested))",
                """passed = [test for test in tested if test.rejected]
passed.sort(key=lambda test: test.p)
return Calibration(passed[-1].candidate if passed else None, tuple(tested))""",
            ),
        ),
    ),
    _testing(
        "the first that failed is chosen",
        STOPS,
        "choice = candidate\nif not tested[-1].rejected:\n    break",
    ),
    _testing(
        "from the boldest up",
        "for candidate in candidates:",
        "for candidate in reversed(list(candidates)):",
        law=SEQUENCE,
    ),
    _testing(
        "one example too few is counted",
        "p = p_value(total, len(sample), delta)",
        "p = p_value(total, len(sample) - 1, delta)",
        law=SEQUENCE,
    ),
    _p_value("a mean above delta is evidence too", MARGIN, MARGIN[9:-1].join("()")),
    _p_value("the examples count twice", f"n * {MARGIN} ** 2", f"(n * {MARGIN}) ** 2"),
    _p_value(
        "fewer losses, not as few",
        "range(total + 1)), Fraction(0)",
        "range(total)), Fraction(0)",
        function=binomial_p_value,
        parts=replace(PARTS, p_value=binomial_p_value),
    ),
]

MUTANTS = [*KEPT, *PASSES, *PIPELINES, *EXITS, *CALIBRATIONS]
EQUIVALENT = [
    Equivalent(
        "positions one late, on a model with rotations",
        PLACES,
        ONE_LATE,
        Session.run_nodes,
        bug="B19",
        proof="Rotations by m and n enter a score as the rotation by m - n; adding one to every "
        "position changes no difference. On a model with learned positions it is a mutant, above.",
        laws=(of_sessions(node_logits_of_parts, ("rotations",)),),
    ),
    Equivalent(
        "a pass for each branch",
        "tokens = top_k_rows(rows, [0], self.k)[0]",
        """tokens = top_k_rows(rows, [0], self.k)[0]
for token in tokens:
    one = TokenTree((token,), (ROOT,), (None,), (False,))
    self.session.run_to_layer(one, self.depth - self.layer)""",
        PipelinedTarget.guess_next,
        proof="Branches are siblings and do not see each other; whether they share a pass changes "
        "neither a row's layers nor the clock, on which each has a processor of its own.",
        laws=(PIPELINE_CLOCK, PIPELINE_WORK),
    ),
]
