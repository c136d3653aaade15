"""Look-alikes of the methods that verify: what goes by their name and lacks what makes them."""

from functools import partial

from tinyspec._core import reference
from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.kernels import Kernels
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.laws import theorems
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.loop_laws import OWN_CHILDREN
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.museum.verification import (
    EVERY_PLACE,
    FACTOR_OF,
    PLACE,
    RACE_OF,
    REJECT,
    REMAINDER,
    TAKES_BACK,
    WALKED,
)
from tinyspec.laws.traps import bild as bild_traps
from tinyspec.laws.traps import multi_candidate as mcsd_traps
from tinyspec.laws.traps import specinfer as specinfer_traps
from tinyspec.laws.traps import speculative_decoding as sps_traps
from tinyspec.laws.verification_laws import (
    BLOCK_EMITTED,
    BLOCK_TOKENS,
    COUPLING_AGREES,
    COUPLING_FORMULA,
    COUPLING_INVARIANT,
    FACTOR,
    SELECTED,
)
from tinyspec.speculative import treedraft
from tinyspec.speculative.drafting import speculative_decoding as sps
from tinyspec.speculative.treedraft import TreeDrafter
from tinyspec.speculative.verification import bild, gumbel_coupling, spectr
from tinyspec.speculative.verification import multi_candidate as mcsd
from tinyspec.speculative.verification import specinfer as sif
from tinyspec.speculative.verification.block_verification import verify_tree_by_block
from tinyspec.speculative.verification.gumbel_coupling import GumbelCouplingDrafter

_sps = partial(Toy, technique="speculative_decoding")
_mcsd = partial(Toy, technique="multi_candidate")
_specinfer = partial(Toy, technique="specinfer")
_spectr = partial(Toy, technique="spectr", function=spectr.verify_tree_k_seq)
_block = partial(Toy, technique="block_verification", function=verify_tree_by_block)
_gumbel = partial(Toy, technique="gumbel_coupling")
_bild = partial(Toy, technique="bild", function=bild.rollback_verifier)

# ------------------------------------------------------------------ speculative decoding

SPECULATIVE = [
    _sps(
        "correction from p",
        REJECT,
        "row = p[accepted[-1] if accepted else ROOT]",
        reference.verify_tree,
        law=JOINT,
    ),
    _sps(
        "q without the user's settings",
        "draft_probs.append(q)",
        "draft_probs.append(probs.probs_under(tip, SamplingParams()))",
        ModelDrafter.propose,
        law=JOINT,
    ),
    _sps(
        "one uniform for a round",
        WALKED,
        f"""from tinyspec.laws.checking.uniforms import UniformSpan
{WALKED.replace("rng.accept", "UniformSpan(rng).below")}""",
        Kernels.verify_tree,
        law=JOINT,
    ),
    _sps(
        "filters after the verification",
        'verdict = self.verifier(tree, target_probs, rng.split("verify", self.rounds))',
        """stream = rng.split("verify", self.rounds)
verdict = self.verifier(tree, TargetProbs(scores, SamplingParams(), history, tree), stream)
if not verdict.rejected:
    verdict = verdict._replace(next=stream.draw(target_probs[(ROOT, *verdict.accepted)[-1]]))""",
        Decoder.step,
        law=JOINT,
    ),
    _sps(
        "no bonus token",
        "draw(row)",
        "None if accepted and not siblings else draw(row)",
        reference.verify_tree,
        law=sps_traps.BONUS,
    ),
    _sps(
        "alpha as agreement of samples",
        "np.minimum(np.asarray(p, dtype=float), np.asarray(q, dtype=float))",
        "np.asarray(p, dtype=float) * np.asarray(q, dtype=float)",
        sps.acceptance_rate,
        law=sps_traps.PAIRED,
    ),
    _sps(
        "1 + alpha gamma tokens",
        "return sum(alpha**i for i in range(gamma + 1))",
        "return 1 + alpha * gamma",
        sps.expected_tokens,
        law=theorems.PREDICTION,
    ),
    _sps(
        "gamma without the cost",
        "max(range(longest + 1), key=lambda gamma: walltime_speedup(alpha, gamma, c))",
        "max(gamma for gamma in range(longest + 1) if alpha**gamma >= 0.5)",
        sps.best_gamma,
        law=theorems.PLANNER,
    ),
    _sps(
        "lenience as a second chance",
        "rng.accept(row[token] / (lenience * q[token]))",
        "rng.accept(row[token] / q[token]) or rng.accept(1 - lenience)",
        sps.lenient_verifier,
        law=theorems.LENIENCE,
        also=(Patch(sps.lenient_verifier, "[lenience * x for x in q]", "q"),),
    ),
]

# ------------------------------------------------------------------ several candidates

CHAINS = """leaves = sum(node not in self.below for node in range(len(self.shape)))
tokens, parents, rows = [], [], []
for _ in range(leaves):
    chain = ModelDrafter.propose(self, context, max_draft_depth, sampling, rng)
    parents += [up if up == ROOT else up + len(tokens) for up in chain.parents]
    tokens += chain.tokens
    rows += chain.draft_probs
return TokenTree(tokens, parents, rows, (False,) * len(tokens))"""
COLUMNS = "tokens, parents, rows = list[int](), list[int](), list[Probs | None]()"
CANDIDATES = [
    _mcsd(
        "the best k, judged by q",
        "q = probs[node]",
        """q = probs[node]
return [(token, q) for token in top_k_tokens(q, k) if q[token] > 0]""",
        TreeDrafter.draw_children,
        law=JOINT,
    ),
    _mcsd(
        "draws sorted by probability",
        "return drawn",
        """best = sorted((token for token, _ in drawn), key=lambda token: -drawn[0][1][token])
pairs = zip(best, drawn, strict=True)
return [(token, q) for token, (_, q) in pairs if q[token] > 0]""",
        treedraft.sample_siblings,
        law=JOINT,
    ),
    _mcsd(
        "q not renormalised without replacement",
        "if drawn:",
        "if False:",
        treedraft.sample_siblings,
        law=JOINT,
    ),
    _mcsd(
        "p forgets the rejections",
        "reject(row, draft_probs",
        "reject(p[accepted[-1] if accepted else ROOT], draft_probs",
        reference.verify_tree,
        law=JOINT,
    ),
    _mcsd(
        "candidates may collide",
        "if self.replace:",
        "if True:",
        TreeDrafter.draw_children,
        law=mcsd_traps.SURE,
    ),
    _mcsd("a batch of chains", COLUMNS, CHAINS, TreeDrafter.propose, law=OWN_CHILDREN),
    _mcsd(
        "k independent tests",
        "p = residual(p, q)",
        "pass",
        mcsd.sequential_acceptance,
        law=mcsd_traps.CHANCE,
    ),
]
MERGED = "return TokenTree(tokens, tuple(parents), draft_probs, probe)"
PROPOSALS = [
    _specinfer(
        "equal proposals merged into one test",
        MERGED,
        """tree, first = TokenTree(tokens, tuple(parents), draft_probs, probe), {}
spelled = [tree.tokens_on(tree.path(node)) for node in range(len(tokens))]
kept = [n for n, text in enumerate(spelled) if first.setdefault(text, n) == n]
at = {text: kept.index(n) for text, n in first.items()}
above = [at.get(spelled[n][:-1], ROOT) for n in kept]
return TokenTree(
    tree.tokens_on(kept), above, [draft_probs[n] for n in kept], (False,) * len(kept)
)""",
        sif.merge_trees,
        law=JOINT,
    ),
    _specinfer(
        "one model's distribution for all proposals",
        MERGED,
        f"""first = dict(zip(parents[::-1], draft_probs[::-1], strict=True))
each = zip(tokens, parents, draft_probs, strict=True)
draft_probs = [first[up] if first[up][token] > 0 else q for token, up, q in each]
{MERGED}""",
        sif.merge_trees,
        law=JOINT,
    ),
    _specinfer("a batch of chains", COLUMNS, CHAINS, TreeDrafter.propose, law=OWN_CHILDREN),
    _specinfer(
        "nothing shared between models",
        "return request.decoder(SpecInferDrafter(drafts), verify_tree_multi_step)",
        """target, forward_log = request.target, request.forward_log

class Apart:  # every node is a row of its own
    def __getattr__(self, name):
        return getattr(target, name)

    def score(self, tree, hidden_layers=()):
        scores = target.score(tree, hidden_layers)
        forward_log[-1] = forward_log[-1]._replace(rows=len(tree.tokens) + 1)
        return scores

request.target = Apart()
return request.decoder(SpecInferDrafter(drafts), verify_tree_multi_step)""",
        sif.specinfer,
        law=specinfer_traps.MERGED,
    ),
    _specinfer(
        "naive sampling",
        "path, rejected = list[int](), list[int]()",
        """from tinyspec.decoding.verify import match_tree
return match_tree(tree, lambda node, _: rng.draw(p[node]))""",
        sif.verify_tree_multi_step,
        law=specinfer_traps.TESTS,
    ),
    _specinfer(
        "one proposal tested",
        "row = exclude_token(row, token) if q is None else residual(row, q)",
        "row = exclude_token(row, token) if q is None else residual(row, q)\nbreak",
        sif.verify_tree_multi_step,
        law=specinfer_traps.TESTS,
    ),
    _specinfer(
        "every draft tuned on everything",
        "left = [prompt for prompt in left if not covers(tuned[-1], prompt)]",
        "left = list(prompts)",
        sif.tune_collectively,
        law=specinfer_traps.LEFT,
    ),
]

# ------------------------------------------------------------------ transport, blocks, races

TRANSPORTS = [
    _spectr(
        "recursive rejection",
        "path, rejected, row = list[int](), list[int](), p[ROOT]",
        """from tinyspec.decoding.verify import verify_tree
return verify_tree(tree, p, rng)""",
        law=FACTOR,
    ),
    _spectr("a factor of k", FACTOR_OF, "rho = len(drafts)", law=FACTOR),
    _spectr("no factor", FACTOR_OF, "rho = 1", law=SELECTED),
    _spectr(
        "the residual of a single draft",
        FACTOR_OF,
        "rho = len(drafts)",
        law=SELECTED,
        also=(Patch(spectr.k_seq_residual, REMAINDER, "return (p - q).clip(min=0)"),),
    ),
    _spectr(
        "one text after the other",
        "path, rejected, row = list[int](), list[int](), p[ROOT]",
        """from tinyspec.decoding.verify import verify_tree
verdict = Verdict((), None)
for root in _children(tree, {ROOT}):
    nodes = [node for node in range(len(tree.tokens)) if root in tree.path(node)]
    chain = TokenTree.chain(tree.tokens_on(nodes), [tree.draft_probs[node] for node in nodes])
    rows = {-1: p[ROOT], **{at: p[node] for at, node in enumerate(nodes)}}
    found = verify_tree(chain, rows, rng)
    verdict = Verdict(tuple(nodes[at] for at in found.accepted), found.next)
    if len(found.accepted) == len(nodes):
        break
return verdict""",
        law=SELECTED,
    ),
]
BLOCKS = [
    _block(
        "token by token",
        "draft = _draft_nodes(tree)",
        """from tinyspec.decoding.verify import verify_tree
return verify_tree(tree, p, rng)
draft = _draft_nodes(tree)""",
        law=BLOCK_TOKENS,
    ),
    _block(
        "up to the first failure",
        PLACE,
        EVERY_PLACE.format("[*passed, False].index(False)"),
        law=BLOCK_EMITTED,
    ),
    _block(
        "the residual of token verification",
        "row = as_probs(rest)",
        "rest = _unnormalized_residual(p[nodes[i]], tree, draft[i], 1)\nrow = as_probs(rest)",
        law=BLOCK_EMITTED,
    ),
    _block(
        "all or nothing",
        "while i > 0:",
        """i, rest = 0, _unnormalized_residual(p[ROOT], tree, draft[0], 1)
while False:""",
        law=BLOCK_EMITTED,
    ),
]
RACES = "_Races(rng, len(context))"
COUPLED = "return request.decoder(drafter, verify_tree_by_race)"
COUPLINGS = [
    _gumbel(
        "a ratio test",
        COUPLED,
        """from tinyspec.decoding.verify import verify_tree
if request.drafts:
    drafter = ModelDrafter(request.drafts[0], gamma)
return request.decoder(drafter, verify_tree)""",
        gumbel_coupling.gumbel_coupling,
        law=COUPLING_INVARIANT,
    ),
    _gumbel(
        "noise numbered by the round",
        RACE_OF,
        "rng.exponential_race(p[node], depth)",
        gumbel_coupling.verify_tree_by_race,
        law=COUPLING_INVARIANT,
        also=(Patch(GumbelCouplingDrafter.propose, RACES, "_Races(rng, 0)"),),
    ),
    _gumbel(
        "a noise of the draft's own",
        RACES,
        "rng",
        GumbelCouplingDrafter.propose,
        law=COUPLING_AGREES,
    ),
    _gumbel(
        "P(same) as agreement of samples",
        "a, b = as_vectors(p, q, 0)",
        "return sum(x * y for x, y in zip(p, q, strict=True))",
        gumbel_coupling.match_probability,
        law=COUPLING_FORMULA,
    ),
    _gumbel(
        "P(same) as 1 - TV",
        "a, b = as_vectors(p, q, 0)",
        "return sum(min(x, y) for x, y in zip(p, q, strict=True))",
        gumbel_coupling.match_probability,
        law=COUPLING_FORMULA,
    ),
]
ROLLBACKS = [
    _bild(
        "speculative decoding with a confidence stop",
        "least = math.exp(-rollback)",
        """from tinyspec.decoding.verify import verify_tree
return verify_tree
least = math.exp(-rollback)""",
        law=bild_traps.ALGORITHM,
    ),
    _bild(
        "the unsure token is proposed",
        "return bool(highest_probability(probs, tip) > self.fallback)",
        "return True",
        function=bild.BildDrafter.should_draft,
        law=bild_traps.ALGORITHM,
        also=(
            Patch(
                ModelDrafter.should_stop,
                "return token in self.ends",
                "return not highest_probability(probs, tip) > self.fallback",
            ),
        ),
    ),
    _bild(
        "back to the worst token",
        "at = ROOT",
        """trust = [p.probs_under(n - 1, UNCHANGED)[x] for n, x in enumerate(tree.tokens)]
if not trust or min(trust) >= least:
    return Verdict(tuple(range(len(trust))), rng.draw(p[len(trust) - 1]))
worst = trust.index(min(trust))
return Verdict(tuple(range(worst)), rng.draw(p[worst - 1]), (worst,))""",
        law=bild_traps.ALGORITHM,
    ),
    _bild(
        "what comes after the first bad token stays unread",
        TAKES_BACK,
        """if own != token:
    return Verdict(path, own, (node,))
return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]))""",
        law=JOINT,
    ),
]

TOYS = [
    *SPECULATIVE,
    *CANDIDATES,
    *PROPOSALS,
    *TRANSPORTS,
    *BLOCKS,
    *COUPLINGS,
    *ROLLBACKS,
]
