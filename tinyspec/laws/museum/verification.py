"""Verification with one defect each: the walk down a tree, blocks, several drafts, shared noise,
rollbacks, cascades and joint targets.
"""

from functools import partial

from tinyspec._core import reference
from tinyspec.decoding.decode import Decoder, TargetProbs
from tinyspec.decoding.kernels import HostKernels, Kernels
from tinyspec.decoding.verify import match_tree, verify_tree
from tinyspec.laws import loop_laws, theorems
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.loop_laws import LEVELS
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Equivalent, Mutant
from tinyspec.laws.traps.bild import ALGORITHM
from tinyspec.laws.verification_laws import (
    BLOCK_EMITTED,
    BLOCK_TOKENS,
    COUPLING_AGREES,
    COUPLING_INVARIANT,
    FACTOR,
    GREEDY_VERDICT,
    PLAIN_TEXT,
    SELECTED,
    TREES,
)
from tinyspec.speculative.integrated.speculative_contrastive import JointTarget
from tinyspec.speculative.nested import NestedDrafter
from tinyspec.speculative.treedraft import TreeDrafter
from tinyspec.speculative.verification import spectr
from tinyspec.speculative.verification.bild import rollback_verifier
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.gumbel_coupling import (
    GumbelCouplingDrafter,
    verify_tree_by_race,
)
from tinyspec.speculative.verification.spectr import verify_tree_k_seq

TEST = "accept(acceptance_ratio(row, draft_probs[node], token))"
REJECT = "row = reject(row, draft_probs[node], token, not untested)"
RATIO = "return row[token] / q[token]"
RESIDUAL = "return normalize(unnormalized_residual(row, q, -1)) or list(row)"
WALKED = "return reference.verify_tree(*tree, p, rng.accept, rng.draw, self._reject)"
PROBS = "target_probs = TargetProbs(scores, self.sampling, history, tree)"

_walk = partial(Mutant, law=JOINT, function=reference.verify_tree)
_ratio = partial(Mutant, law=JOINT, function=reference.acceptance_ratio)
_residual = partial(Mutant, law=JOINT, function=reference.residual)
_verify = partial(Mutant, law=JOINT, function=Kernels.verify_tree)
_tree = partial(Mutant, law=TREES, function=reference.verify_tree)
_greedy = partial(Mutant, law=GREEDY_VERDICT, function=match_tree)
_position = partial(Mutant, law=JOINT, bug="S1", function=Kernels.token_sampler)
_step = partial(Mutant, law=JOINT, function=Decoder.step)
_block = partial(Mutant, law=BLOCK_EMITTED, function=verify_tree_by_block)
_drafts = partial(Mutant, law=SELECTED, function=verify_tree_k_seq)
_rollback = partial(Mutant, law=ALGORITHM, function=rollback_verifier)
_nested = partial(Mutant, law=LEVELS, function=NestedDrafter.propose)
_middle = partial(Mutant, law=LEVELS, function=NestedDrafter.__init__)
_joint = partial(Mutant, law=loop_laws.JOINT_ROWS)

# ------------------------------------------------------------------ the walk

RATIOS = [
    _walk("everything is accepted", TEST, "accept(1)"),
    _ratio("p and q swapped", RATIO, "return q[token] / row[token] if row[token] else 1"),
    _ratio("root of the ratio", RATIO, "return (row[token] / q[token]) ** 0.5"),
    _ratio("ratio times 1.05", RATIO, "return row[token] / q[token] * 21 / 20"),
    _walk("first draft token not verified", TEST, f"{TEST[:-1]} if accepted else 1)", bug="B15"),
    _ratio(
        "a sample of the target for each sibling",
        RATIO,
        "return row[token]",
        bug="B8",
        also=(Patch(reference.verify_tree, REJECT, "row = p[accepted[-1] if accepted else ROOT]"),),
    ),
    _walk("every sibling accepted", TEST, "accept(1)", law=theorems.TRANSPORT),
    _ratio(
        "placeholder -1 accepted",
        "if not 0 <= token < len(row):",
        "if not token < len(row):",
        bug="B37, B35",
        law="vocabulary",
        also=(Patch(HostKernels.verify_tree, "rng.uniforms(len(tree.tokens) + 1)", "None"),),
    ),
]
RESIDUALS = [
    _walk("residual is p", REJECT, "row = p[accepted[-1] if accepted else ROOT]"),
    Mutant(
        "residual is |p - q|",
        "x - y if x > y else 0 * x for",
        "abs(x - y) for",
        reference.unnormalized_residual,
        law=JOINT,
    ),
    _residual(
        "residual without relu",
        RESIDUAL,
        """left = [x - y for x, y in zip(row, q, strict=True)]
first = next(i for i in range(len(row)) if sum(left[: i + 1]) > 0 or i == len(row) - 1)
return [0 * x + (i == first) for i, x in enumerate(row)]  # a search in a sum that ends at 0""",
    ),
    _residual(
        "residual is softmax(p - q)",
        RESIDUAL,
        """weights = [math.exp(x - y) for x, y in zip(row, q, strict=True)]
return [w / sum(weights) for w in weights]""",
        bug="B2",
    ),
    _walk(
        "residual of the row before",
        "reject(row, draft_probs",
        "reject(p[max(accepted[-1] - 1, ROOT) if accepted else ROOT], draft_probs",
    ),
    _walk("distribution after the rejection", REJECT, "row = p[node]", bug="B16"),
    _walk(
        "rejection of a sibling forgotten",
        "reject(row, draft_probs",
        "reject(p[accepted[-1] if accepted else ROOT], draft_probs",
    ),
    _residual(
        "residual not normalised between siblings",
        RESIDUAL,
        """left = unnormalized_residual(row, q, -1)
return left if sum(left) else list(row)""",
        law=theorems.REJECTION,
    ),
]
LAST_TOKENS = [
    _walk(
        "no bonus token",
        "draw(row)",
        "None if accepted and not siblings else draw(row)",
        law=theorems.ROUND_TOKENS,
    ),
    _walk(
        "bonus from the draft's distribution",
        "draw(row)",
        "draw(draft_probs[accepted[-1]] or row if accepted and not siblings else row)",
    ),
    _walk(
        "bonus from the row at the root",
        "draw(row)",
        "draw(p[ROOT] if accepted and not siblings else row)",
    ),
    _verify(
        "recovered token lost",
        WALKED,
        f"""{WALKED.replace("return", "accepted, token, rejected =")}
return accepted, None if accepted and rejected else token, rejected""",
        bug="B16, S7",
    ),
]
SHAPES = [
    _verify(
        "accepted anywhere in the draft",
        WALKED,
        f"""chain = list(tree.parents) == list(range(-1, len(tree.tokens) - 1))
if chain and tree.tokens and all(q is not None for q in tree.draft_probs):
    tests = zip(tree.tokens, tree.parents, tree.draft_probs, strict=True)
    n = sum(rng.accept(p[up][x] / q[x]) for x, up, q in tests)
    left = p[n - 1] if n == len(tree.tokens) else self.residual(p[n - 1], tree.draft_probs[n])
    return tuple(range(n)), rng.draw(left), ()
{WALKED}""",
        bug="B1",
    ),
    _verify(
        "one uniform for all positions",
        WALKED,
        f"""from tinyspec.laws.checking.uniforms import UniformSpan
{WALKED.replace("rng.accept", "UniformSpan(rng).below")}""",
        bug="B32, S6",
    ),
    _verify(
        "equal siblings merged",
        WALKED,
        f"""first = {{(x, up): i for i, x, up in reversed(list(zip(range(99), *tree[:2])))}}
keep = sorted(first.values())
if max(tree.depths(), default=1) == 1 and len(keep) < len(tree.tokens):
    small = TokenTree(*([column[i] for i in keep] for column in tree))
    accepted, *others = self.verify_tree(small, p, rng)
    return tuple(keep[i] for i in accepted), *others
{WALKED}""",
    ),
    Mutant(
        "sampled and matched, without a ratio",
        "return Verdict(*kernels.verify_tree(tree, p, rng))",
        "return match_tree(tree, lambda node, _: rng.draw(p[node]))",
        verify_tree,
        bug="B8",
        law=theorems.ACCEPTANCE,
    ),
    _walk(
        "only the first sibling tested",
        "untested = untested[1:]",
        "untested = []",
        law=theorems.KSEQ,
    ),
    _verify(
        "half of the draft tokens not looked at",
        WALKED,
        f"""tree = tree if rng.accept(Fraction(1, 2)) else TokenTree()
{WALKED}""",
        law=theorems.MATCHING,
    ),
]
ROWS = [
    _step(
        "draft warped, target not",
        PROBS,
        PROBS.replace("self.sampling", "SamplingParams()"),
        bug="B6",
    ),
    _step(
        "warped only at the last token",
        'verdict = self.verifier(tree, target_probs, rng.split("verify", self.rounds))',
        """stream = rng.split("verify", self.rounds)
verdict = self.verifier(tree, TargetProbs(scores, SamplingParams(), history, tree), stream)
if not verdict.rejected:
    verdict = verdict._replace(next=stream.draw(target_probs[(ROOT, *verdict.accepted)[-1]]))""",
        bug="B7",
    ),
    Mutant(
        "penalty forgets the draft tokens",
        "return [*self.context, *self.tree.tokens_on(self.tree.path(node))]",
        "return self.context",
        TargetProbs._history,
        bug="B7",
        law=JOINT,
    ),
    _step(
        "temperature 0 judged by the soft law",
        PROBS,
        PROBS.replace("self.sampling", "SamplingParams(self.sampling.temperature or 1.0)"),
        bug="B14, S5",
        law="greedy equality",
    ),
]

# ------------------------------------------------------------------ wide, deep and mixed trees

TESTED = "len(siblings) - len(untested)"  # of the siblings, before this one
FRESH = "p[accepted[-1] if accepted else ROOT]"  # before any rejection
UNLESS = "accept({} else acceptance_ratio(row, draft_probs[node], token))"
WIDE_AND_DEEP = [
    _tree(
        "residual restarts at the third sibling",
        REJECT,
        f"{REJECT}\nif untested and {TESTED} == 2:\n    row = {FRESH}",
    ),
    _tree("third sibling accepted free", TEST, UNLESS.format(f"1 if {TESTED} == 2")),
    _tree("a node at depth 3 accepted free", TEST, UNLESS.format("1 if len(accepted) == 2")),
    _tree(
        "probes verified as drafts",
        "if parent in nodes and not probe[child]",
        "if parent in nodes",
        function=reference.children_of,
    ),
    _tree(
        "a point mass after a drawn sibling judged by p",
        TEST,
        UNLESS.format(f"{FRESH}[token] if draft_probs[node] is None"),
    ),
    _tree(
        "bonus without the sampling settings",
        WALKED,
        f"""from tinyspec.decoding.sampling import UNCHANGED
{WALKED.replace("return", "accepted, token, rejected =")}
if accepted and accepted[-1] not in tree.parents:
    token = rng.draw(p.probs_under(accepted[-1], UNCHANGED))
return accepted, token, rejected""",
        function=Kernels.verify_tree,
        bug="B7",
    ),
]

# ------------------------------------------------------------------ a block

EVERY_PLACE = """passed = [
    rng.accept(
        w
        if n == len(draft)
        else _pass_probability(_unnormalized_residual(p[nodes[n]], tree, draft[n], w).sum(), w)
    )
    for n, w in enumerate(weights)
    if n
]
i = {}
if i == len(draft):
    return Verdict(tuple(draft), rng.draw(p[nodes[i]]))
rest = _unnormalized_residual(p[nodes[i]], tree, draft[i], weights[i])
row = as_probs(rest) if rest.sum() > 0 else p[nodes[i]]
return Verdict(tuple(draft[:i]), rng.draw(row), tuple(draft[i:]))"""
PLACE = "i = len(weights) - 1"
BLOCKS = [
    _block(
        "a block ends at the first place that fails",
        PLACE,
        EVERY_PLACE.format("[*passed, False].index(False)"),
    ),
    _block("a block keeps as many places as pass", PLACE, EVERY_PLACE.format("sum(passed)")),
    _block(
        "a block's residual without its weight",
        "row = as_probs(rest)",
        "rest = _unnormalized_residual(p[nodes[i]], tree, draft[i], 1)\nrow = as_probs(rest)",
    ),
    _block("a block's ratio not clipped on the way", "min(1, weights", "max(0, weights"),
    _block(
        "a block's place passes with its weight",
        "_pass_probability(rest.sum(), weights[i])",
        "weights[i]",
    ),
    _block(
        "a block judged token by token",
        "draft = _draft_nodes(tree)",
        """from tinyspec.decoding.verify import verify_tree
return verify_tree(tree, p, rng)
draft = _draft_nodes(tree)""",
        law=BLOCK_TOKENS,
    ),
]

# ------------------------------------------------------------------ k independent drafts

FACTOR_OF = "rho = division_factor(*p_and_q, len(drafts))"
REMAINDER = "return (1 - s) * p + s * (p - rho * q).clip(min=0)"
DRAFTS = [
    _drafts("K-SEQ divides by k", FACTOR_OF, "rho = len(drafts)", law=FACTOR),
    _drafts(
        "K-SEQ is recursive rejection",
        "path, rejected, row = list[int](), list[int](), p[ROOT]",
        """from tinyspec.decoding.verify import verify_tree
return verify_tree(tree, p, rng)""",
        law=FACTOR,
    ),
    _drafts(
        "K-SEQ's factor rounded down",
        "return rho",
        "return rho - (rho - 1) / 64",
        function=spectr.division_factor,
    ),
    _drafts(
        "K-SEQ's residual without its share",
        REMAINDER,
        "return p - q.clip(max=p / rho)",
        function=spectr.k_seq_residual,
    ),
    _drafts(
        "K-SEQ's residual that of one draft",
        REMAINDER,
        "return (p - q).clip(min=0)",
        function=spectr.k_seq_residual,
    ),
    _drafts(
        "K-SEQ's residual of the last draft alone",
        "left = k_seq_residual(*p_and_q, len(drafts), rho)",
        "left = p_and_q[0] * [int(x != tokens[-1]) for x in range(len(row))]",
    ),
    _drafts(
        "K-SEQ for all drafts where some have parted",
        FACTOR_OF,
        "rho = division_factor(*p_and_q, len(_children(tree, {ROOT})))",
        also=(
            Patch(
                verify_tree_k_seq,
                "k_seq_residual(*p_and_q, len(drafts), rho)",
                "k_seq_residual(*p_and_q, len(_children(tree, {ROOT})), rho)",
            ),
        ),
    ),
    _drafts(
        "K-SEQ lets drafts that have parted go on",
        "{node for node in siblings if tree.tokens[node] == tokens[passed]}",
        "set(siblings)",
    ),
]

# ------------------------------------------------------------------ a race on shared noise

RACE_OF = "rng.exponential_race(p[node], start + depth)"
RACES = [
    Mutant(
        "a coupled draft with noise of its own",
        "_Races(rng, len(context))",
        "rng",
        GumbelCouplingDrafter.propose,
        law=COUPLING_AGREES,
    ),
    Mutant(
        "a coupled draft one position late",
        "_Races(rng, len(context))",
        "_Races(rng, len(context) + 1)",
        GumbelCouplingDrafter.propose,
        law=COUPLING_AGREES,
    ),
    Mutant(
        "a coupled target that draws",
        RACE_OF,
        "rng.draw(p[node])",
        verify_tree_by_race,
        law=COUPLING_INVARIANT,
    ),
    Mutant(
        "noise counted in the round",
        RACE_OF,
        "rng.exponential_race(p[node], depth)",
        verify_tree_by_race,
        bug="S1",
        law=COUPLING_INVARIANT,
    ),
]

# ------------------------------------------------------------------ a rollback

DISTANCE = "p.probs_under(at, UNCHANGED)[token] < least"
WRITES = "own = rng.draw(p[at])"
TAKES_BACK = 'if rule == "paper" or own != token: return Verdict(path, own, (node,))'
ROLLBACKS = [
    _rollback("distance under the user's temperature", DISTANCE, "p[at][token] < least"),
    _rollback("distance by the next distribution", DISTANCE, DISTANCE.replace("at,", "node,")),
    _rollback(
        "distance to the likeliest token",
        DISTANCE,
        f"{DISTANCE} * max(p.probs_under(at, UNCHANGED))",
    ),
    _rollback("a certain token is bad", DISTANCE, DISTANCE.replace("<", "<=")),
    _rollback("the bad token stays", "Verdict(path, own,", "Verdict((*path, node), own,"),
    _rollback("the bad token is written again", WRITES, "own = token"),
    _rollback("the large model writes the next position", WRITES, "own = rng.draw(p[node])"),
    _rollback(
        "the block stays unread after a bad token",
        TAKES_BACK,
        """if rule == "paper" or own != token:
    return Verdict(path, own, (node,))
return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))""",
    ),
]

# ------------------------------------------------------------------ a cascade

WRITTEN = """return TokenTree.chain(
    *self.write(self.text, min(self.gamma, max_draft_depth), sampling, rng)
)"""
REWRITTEN = "tokens, qs = self.write(self.text, min(self.gamma, max_draft_depth), sampling, rng)\n"
MIDDLE = "self.decoder, self.gamma, self.is_view = decoder, gamma, is_view"
NESTED = [
    Mutant(
        "a cascade declares the smallest model's distribution",
        "dists += round.output_probs if self.is_exact else [None] * len(round.tokens)",
        """small = round.tree.draft_probs[0] if round.tree.tokens else None
each = zip(round.tokens, round.output_probs, strict=True)
dists += [small if small and small[x] else row for x, row in each]""",
        NestedDrafter.write,
        law=LEVELS,
    ),
    _middle(
        "the middle draws again after a rejection",
        MIDDLE,
        f"""def verify(tree, p, rng, right=decoder.verifier):
    verdict = right(tree, p, rng)
    at = verdict.accepted[-1] if verdict.accepted else -1
    return verdict._replace(next=rng.draw(p[at])) if verdict.rejected else verdict
decoder.verifier = verify
{MIDDLE}""",
        bug="S12",
    ),
    _nested(
        "a cascade declares the distribution after a token",
        WRITTEN,
        f"{REWRITTEN}return TokenTree.chain(tokens, [*qs[1:], *qs[-1:]])",
        bug="B16",
    ),
    _nested(
        "a cascade drops what its middle was unsure of",
        WRITTEN,
        f"""{REWRITTEN}sure = [2 * q[x] >= 1 for x, q in zip(tokens, qs, strict=True)]
n = [*sure, False].index(False)
return TokenTree.chain(tokens[:n], qs[:n])""",
    ),
    _middle(
        "the middle of a cascade rejects nothing",
        MIDDLE,
        f"""decoder.verifier = lambda tree, p, rng: Verdict(
    tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1])
)
{MIDDLE}""",
    ),
]

# ------------------------------------------------------------------ a joint target

NEXT = "self.text += [*self._tree.tokens_on(path), *(() if next is None else (next,))]"
JOINTS = [
    _joint(
        "one member is rewound",
        "for member in self.members:",
        "for member in self.members[:1]:",
        JointTarget.rewind,
    ),
    _joint(
        "the small member misses the recovered token",
        NEXT,
        f"""if next is not None:
    self.members[1].rewind(len(self.text) + len(path))
{NEXT}""",
        JointTarget.commit,
    ),
    _joint(
        "one member is told",
        "for member in self.members:",
        "for member in self.members[:1]:",
        JointTarget.append,
    ),
    _joint(
        "the small member's distribution is a position late",
        "[scores.logits[node + 1] for scores in (first, *others)]",
        """[
    first.logits[node + 1],
    *(scores.logits[(ROOT, *tree.parents)[node + 1] + 1] for scores in others),
]""",
        JointTarget.score,
    ),
    _joint(
        "members swapped", "self.combine(parts,", "self.combine(parts[::-1],", JointTarget.score
    ),
    _joint(
        "a mask that does not see the path",
        "tree.tokens_on(tree.path(node))",
        "()",
        JointTarget.score,
    ),
    _joint(
        "a mask that sees what was taken back", "del self.text[length:]", "", JointTarget.rewind
    ),
    _joint(
        "a mask that does not see the accepted draft tokens",
        NEXT,
        "self.text += () if next is None else (next,)",
        JointTarget.commit,
    ),
]

POSITION = "rng.draw_at(p[node], start + depth)"
MATCHED = [
    _position("a position's uniform counted in the round", POSITION, "rng.draw_at(p[node], depth)"),
    _position(
        "a matched token drawn from the round's stream",
        POSITION,
        "rng.draw(p[node])",
        law=PLAIN_TEXT,
    ),
    _position("one uniform for the positions of a round", POSITION, "rng.draw_at(p[node], start)"),
    _position(
        "a position late after an accepted node",
        POSITION,
        "rng.draw_at(p[node], start + depth + (depth > 0))",
        law=PLAIN_TEXT,
    ),
    Mutant(
        "a draft without probabilities is not matched",
        "if all(q is None for q in tree.draft_probs):",
        "if not tree.tokens:",
        verify_tree,
        law=PLAIN_TEXT,
    ),
]

GREEDY = [
    _greedy("a probe is accepted at temperature 0", "and not tree.probe[child]", ""),
    _greedy(
        "siblings after the accepted one count as rejected",
        "not here or child < min(here)",
        "not here or child != min(here)",
    ),
]

MUTANTS = [
    *MATCHED,
    *GREEDY,
    *RATIOS,
    *RESIDUALS,
    *LAST_TOKENS,
    *SHAPES,
    *ROWS,
    *WIDE_AND_DEEP,
    *BLOCKS,
    *DRAFTS,
    *RACES,
    *ROLLBACKS,
    *NESTED,
    *JOINTS,
]
EQUIVALENT = [
    Equivalent(
        "ratio capped at 1",
        TEST,
        f"accept(min(1, {TEST[7:]})",
        reference.verify_tree,
        proof="accept(r) asks if u < r for a uniform u < 1; for r >= 1 it is true, capped or not.",
        laws=(JOINT, theorems.ACCEPTANCE, theorems.ROUND_TOKENS, theorems.REJECTION),
    ),
    Equivalent(
        "a rejected point mass tested again",
        "return TokenTree(tokens, parents, rows, (False,) * len(tokens))",
        """twice = [token for token in tokens for _ in range(2)]
return TokenTree(twice, *([one] * len(twice) for one in (ROOT, None, False)))""",
        TreeDrafter.propose,
        proof="After x was rejected as a point mass the law in force gives x nothing: an equal "
        "sibling passes with probability 0, and taking x out of a law that has none of it changes "
        "nothing.",
        laws=(JOINT,),
    ),
    Equivalent(
        "residual scaled before the last draw",
        "draw(row)",
        "draw([2 * x for x in row])",
        reference.verify_tree,
        bug="S10",
        proof="A draw divides by the sum of the row it is given, so a constant factor (one over "
        "the sum, or over the sum plus epsilon) cancels. In the ratio of a sibling that follows it "
        "does "
        "not: that is a mutant, above.",
        laws=(JOINT, theorems.ROUND_TOKENS),
    ),
    Equivalent(
        "a block's places tested from the first",
        PLACE,
        EVERY_PLACE.format("max(n for n, passes in enumerate([True, *passed]) if passes)"),
        verify_tree_by_block,
        proof="Each place has a uniform of its own, so which one of them is the largest that "
        "passes does not depend on the order in which they are tested; from the end, the first "
        "that passes is known to be it.",
        laws=(BLOCK_TOKENS, BLOCK_EMITTED),
    ),
    Equivalent(
        "K-SEQ's factor by halving alone",
        "while k > 1:",
        """low, high = rho, 0 * rho + k
for _ in range(HALVINGS_EXACT if is_rational(p) else HALVINGS):
    middle = (low + high) / 2
    mass = _scalar(p.clip(max=middle * q).sum())
    low, high = (low, middle) if _slack(mass, middle, k) >= 0 else (middle, high)
return high
while k > 1:""",
        spectr.division_factor,
        proof="Any factor between the least lawful one and k keeps the law, and both ways come to "
        "the least one from above, in floats to within rounding: what is accepted is the same.",
        laws=(FACTOR, SELECTED),
    ),
    Equivalent(
        "the middle's text does not follow the target's",
        "if self.positions is not None and len(text) > self.positions:",
        """mine = self.decoder.context
text = [*mine, *text[len(mine) :]][: len(text)]
if self.positions is not None and len(text) > self.positions:""",
        NestedDrafter.follow,
        bug="B19",
        proof="The middle is exact for its own distribution after whatever text it holds, and "
        "declares that distribution; the target's walk is exact for every declared distribution. "
        "Only the acceptance falls.",
        laws=(LEVELS,),
    ),
    Equivalent(
        "the middle reads its text anew every round",
        "self.text.extend(round.tokens)",
        """text = [*self.text, *round.tokens]
self.rewind(0)
self.text.extend(text)""",
        NestedDrafter.observe,
        bug="B17",
        proof="What a model says of a text does not depend on how often it has read it; only the "
        "cost does.",
        laws=(LEVELS,),
    ),
]
