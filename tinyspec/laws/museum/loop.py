"""The loop with one defect each: warpers and draws, streams of random numbers, stops, and what is
reported.
"""

from functools import partial

from tinyspec._core import fallback, reference
from tinyspec.decoding import rng, trace
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.kernels import HostKernels
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.decoding.rng import Replay, Seeded
from tinyspec.decoding.sampling import SamplingParams
from tinyspec.decoding.stopping import StoppingCriteria
from tinyspec.decoding.trace import Statistics
from tinyspec.laws import suites
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Mutant
from tinyspec.laws.request_laws import ALL_CALLS, INDEPENDENT

_probs = partial(Mutant, law="warp is its definition", function=HostKernels.probs)
_truncate = partial(Mutant, law="warp is its definition", function=reference.filter_tokens)
_residual = partial(Mutant, law="residual is a distribution", function=HostKernels.residual)
_streams = partial(Mutant, law=JOINT, function=Decoder.step)
_step = partial(Mutant, law="stop", function=Decoder.step)
_stop = partial(Mutant, law="stop", function=StoppingCriteria.cut)
_count = partial(Mutant, law="trace identities", function=Statistics.count)
_rate = partial(Mutant, law="trace identities", function=Statistics.tokens_per_call)
_logprobs = partial(Mutant, law="logprobs are the targets", function=trace.compute_logprobs)

# ------------------------------------------------------------------ warpers, residuals, draws

WARPED = "return _core.apply_sampling(_as_floats(logits), history, *settings.as_floats())"
RESIDUAL = "return _core.residual(_as_doubles(p), _as_doubles(q))"
WARPS = [
    Mutant(
        "temperature 0 is no temperature",
        "float(self.temperature),",
        "float(self.temperature or 1.0),",
        SamplingParams.as_floats,
        bug="B13",
        law="warp is its definition",
    ),
    _probs(
        "divided by temperature 0",
        WARPED,
        f"""if settings.temperature == 0:
    with np.errstate(all="ignore"):
        weights = np.exp((_as_floats(logits) - max(logits)) / 0.0)
        return weights / weights.sum()
{WARPED}""",
        bug="B13",
    ),
    _truncate(
        "top-k keeps ties",
        "kept = keep_top_mass(kept, [1] * len(kept), top_k)",
        "kept = [x if x >= sorted(row)[-top_k] else 0 * x for x in row]",
        bug="B39",
    ),
    _truncate(
        "top-p without the crossing token",
        "kept = keep_top_mass(kept, masses, min(need, whole))",
        """kept = keep_top_mass(kept, masses, min(need, whole))
likely = sorted((i for i, x in enumerate(kept) if x > 0), key=lambda i: (-kept[i], i))
kept = [x if i in likely[:-1] or len(likely) == 1 else 0 * x for i, x in enumerate(kept)]""",
    ),
    _truncate(
        "top-p before top-k",
        "kept = list(row)",
        """kept = list(row)
if top_k is not None and top_p is not None:
    kept, top_p = filter_tokens(kept, None, top_p, None), None""",
    ),
    _probs(
        "NaN passes",
        "_as_floats(logits)",
        "np.nan_to_num(_as_floats(logits), nan=-np.inf, posinf=np.inf, neginf=-np.inf)",
        bug="B10",
    ),
    _probs(
        "penalty once an occurrence",
        WARPED,
        f"""logits, penalty = np.array(logits, np.float64), settings.repetition_penalty
for token in history if penalty != 1 else ():
    logits[token] *= penalty if logits[token] < 0 else 1 / penalty
{WARPED.replace("history", "()")}""",
    ),
]
DRAWS = [
    _residual(
        "residual divides by nothing",
        RESIDUAL,
        """left = (_as_doubles(p) - _as_doubles(q)).clip(min=0)
with np.errstate(all="ignore"):
    return left / left.sum()""",
        bug="B9, S7",
    ),
    _residual(
        "epsilon in the residual's sum",
        RESIDUAL,
        """left = (_as_doubles(p) - _as_doubles(q)).clip(min=0)
return left / (left.sum() + 1e-6) if left.any() else p""",
        bug="S10",
    ),
    Mutant("u <= ratio", "< ratio", "<= ratio", rng._Stream.accept, bug="B12", law="support"),
    Mutant(
        "draw at the left edge",
        "return sampling.sample_inverse_cdf(row, self._next())",
        "return int(np.searchsorted(np.cumsum(np.array(row, np.float64)), self._next()))",
        rng._Stream.draw,
        bug="B12",
        law="support",
    ),
    Mutant(
        "race on uniform noise",
        "-float(np.log1p(-float(self._next())))",
        "float(self._next())",
        Replay.exponential_race,
        law=suites.RACE_LAW,
    ),
    Mutant(
        "residual in float32",
        "row.tolist()",
        "row.astype(np.float32).tolist()",
        fallback.residual,
        bug="B5",
        law="twin",
        kernel="residual",
    ),
    Mutant(
        "draw by a running sum",
        "return reference.sample_inverse_cdf(row.tolist(), u)",
        """sums = np.cumsum(row)
if not 0 < sums[-1] < np.inf:
    return reference.sample_inverse_cdf(row.tolist(), u)
return int(np.searchsorted(sums, u * sums[-1], side="right"))""",
        fallback.sample_inverse_cdf,
        bug="B12",
        law="twin",
        kernel="sample_inverse_cdf",
    ),
    Mutant(
        "race divides by zero noise",
        "return _core.exponential_race(_as_doubles(p), np.ascontiguousarray(noise, np.float64))",
        """with np.errstate(all="ignore"):
    return int(np.argmax(_as_doubles(p) / np.asarray(noise)))""",
        HostKernels.exponential_race,
        bug="B11",
        law="support",
    ),
]

# ------------------------------------------------------------------ random numbers used twice

DRAFTS, VERIFIES = 'rng.split("draft", self.rounds)', 'rng.split("verify", self.rounds)'
STREAMS = [
    _streams(
        "reseeded in the loop",
        DRAFTS,
        'rng.split("draft", 0)',
        bug="B32",
        also=(Patch(Decoder.step, VERIFIES, 'rng.split("verify", 0)'),),
    ),
    _streams("draft noise kept over rounds", DRAFTS, 'rng.split("draft", 0)', bug="S1"),
    _streams(
        "draft and verifier share a stream",
        DRAFTS,
        'rng.split("noise", self.rounds)',
        bug="B32",
        also=(Patch(Decoder.step, VERIFIES, 'rng.split("noise", self.rounds)'),),
    ),
    _streams(
        "noise comes round again",
        DRAFTS,
        'rng.split("draft", self.rounds % 4)',
        bug="S1",
        law="chance ledger",
        also=(Patch(Decoder.step, VERIFIES, 'rng.split("verify", self.rounds % 4)'),),
    ),
    Mutant(
        "stream shared by requests",
        "key = blake2b(",
        """seed = Seeded.requests = getattr(Seeded, "requests", 0) + 1
key = blake2b(""",
        Seeded.__init__,
        bug="B33",
        law="same seed same output",
    ),
    _streams(
        "requests of one model draft with one noise",
        DRAFTS,
        'vars(self.target.model).setdefault("noise", rng).split("draft", self.rounds)',
        bug="B33",
        law=INDEPENDENT,
    ),
    Mutant(
        "requests share what was drafted for a text",
        "token = rng.draw(q)",
        """drawn, text = vars(self.model.model).setdefault("drawn", {}), (*context, *tokens)
token = drawn[text] if text in drawn else drawn.setdefault(text, rng.draw(q))""",
        ModelDrafter.propose,
        bug="B45",
        law=INDEPENDENT,
    ),
    Mutant(
        "global generator used",
        "claim_stream(self._asked, role, round)",
        """import random
claim_stream(self._asked, role, round)
role += str(random.getrandbits(30))""",
        Seeded.split,
        bug="B34",
        law="global randomness is untouched",
    ),
]

# ------------------------------------------------------------------ where a text ends

STOPS = [
    _step(
        "drafted end of text trusted",
        "self.drafter.observe(round)",
        """if any(token in self.stop.eos for token in tree.tokens):
    self.finished = "eos"
self.drafter.observe(round)""",
        bug="B27",
    ),
    _step(
        "cut after the commit",
        "verdict = verdict.cut(n_kept)",
        "",
        bug="B26",
        law="committed text",
    ),
    Mutant(
        "draft one too deep",
        "max(left[0] - 1, 0)",
        "max(left[0], 0)",
        Decoder.max_draft_depth,
        bug="B30",
        law="room",
    ),
    _step(
        "distributions of a round one late",
        "(ROOT, *verdict.accepted)[:n_kept]",
        "(*verdict.accepted, ROOT)[:n_kept]",
        bug="B16",
        law="round distributions are the targets",
    ),
    _stop("end of text ignored", "if token in self.eos:", "if False:", bug="S11"),
    _stop("only one end token known", "in self.eos:", "in sorted(self.eos)[:1]:", bug="B28"),
    _stop(
        "stop looked for at the last token only",
        "if token in self.eos:",
        """if kept < len(fresh) - 1:
    continue
if token in self.eos:""",
        bug="B26",
    ),
    _stop(
        "stop across rounds missed",
        "seen = list(new) room = self.tokens_left(len(seen), limit)",
        "seen = list[int]()\nroom = self.tokens_left(len(new), limit)",
        bug="B29",
    ),
    _stop(
        "budget before stops",
        "for kept, token in enumerate(fresh):",
        """if room is not None and len(fresh) >= room[0]:
    return room
for kept, token in enumerate(fresh):""",
    ),
    _stop(
        "more tokens than asked for",
        "room is not None and kept >= room[0]",
        "False",
        bug="B30",
        also=(
            Patch(StoppingCriteria.cut, "return room[0], room[1]", "return len(fresh), room[1]"),
        ),
    ),
    _stop("end token dropped", 'kept + 1, "eos"', 'kept, "eos"', bug="B26"),
]

# ------------------------------------------------------------------ what is reported

EMITTED = "self.emitted += len(round.tokens)"
RATE = "return self.emitted / self.target_calls if self.target_calls else 0.0"
ROWS = "rows = _rows(round)"
DRAFT_CALLS = "tuple(self.forward_log[passes_before:passes_drafted])"
REPORTS = [
    _step("the draft's passes not reported", DRAFT_CALLS, "()", law=ALL_CALLS),
    _step(
        "a pass after the report",
        "self.drafter.observe(round)",
        "self.drafter.observe(round)\nself.target.score(type(tree)())",
        law=ALL_CALLS,
    ),
    _count(
        "tokens per call without the bonus",
        EMITTED,
        f"{EMITTED} - (round.verdict.next is not None)",
        bug="B41",
    ),
    _rate("tokens per call plus one", RATE, RATE.replace("calls if", "calls + 1 if"), bug="B41"),
    _count("tokens after a stop counted", EMITTED, f"{EMITTED} + round.truncated", bug="B41"),
    _rate("0 / 0 for no tokens", RATE, RATE.replace("0.0", "math.nan"), bug="B31"),
    Mutant(
        "acceptance of rounds, not of draft tokens",
        "self.accepted / self.drafted if self.drafted",
        "self.kept / self.target_calls if self.target_calls",
        Statistics.acceptance,
        bug="B1",
        law="trace identities",
        also=(
            Patch(
                Statistics.count,
                "self.target_calls += not round.is_shared",
                """self.target_calls += not round.is_shared
self.kept = getattr(self, "kept", 0) + (len(round.verdict.accepted) > 0)""",
            ),
        ),
    ),
    Mutant(
        "recovered called a bonus",
        '"recovered" if rejected else "bonus"',
        '"bonus"',
        trace.token_origins,
        bug="B41",
        law="origins name what happened",
    ),
    _logprobs(
        "log-probabilities of the draft",
        ROWS,
        """tree, kept = round.tree, round.verdict.accepted
said = [math.log(tree.draft_probs[node][tree.tokens[node]]) for node in kept]
return said + [0.0] * (len(round.tokens) - len(said))""",
        bug="B42",
    ),
    _logprobs(
        "log-probabilities of the warped distribution",
        ROWS,
        """pairs = zip(round.output_probs, round.tokens, strict=True)
return [math.log(p[token]) for p, token in pairs]""",
        bug="B42",
    ),
]

MUTANTS = [*WARPS, *DRAWS, *STREAMS, *STOPS, *REPORTS]
