"""Look-alikes of early exits and of the methods that rewrite: what goes by their name and lacks
what makes them.
"""

from functools import partial

from tinyspec.decoding.decode import Decoder
from tinyspec.decoding.kernels import Kernels
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.early_exit import calm, layerskip
from tinyspec.early_exit.calibrate import calibrate
from tinyspec.early_exit.exits import ExitTarget
from tinyspec.early_exit.ppd import PipelinedTarget
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.exit_laws import (
    CALIBRATED,
    EXIT_MEASURES,
    EXIT_RULE,
    EXIT_WEIGHTS,
    LAYER_DROPOUT,
    ONE_HEAD,
    PIPELINE_CLOCK,
    PIPELINE_WORK,
)
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rewriting import COPIED, GRADIENT, MOVED, STANDS
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.museum.sessions import BRANCHES, STOPS
from tinyspec.laws.museum.verification import WALKED
from tinyspec.laws.nonautoregressive_laws import (
    EXPECTED_COST,
    FERTILITY_RULE,
    LENGTH_CHOICE,
    MASK_RULE,
    MASKS_HIDDEN,
    NESTED,
    SUPERVISED,
)
from tinyspec.laws.sweeps import SOLVE_PUBLISHED, SWEEP_COST, SWEEP_FIXES, SWEEP_IS_JACOBI
from tinyspec.laws.traps import layerskip as layerskip_traps
from tinyspec.laws.traps import nat as nat_traps
from tinyspec.nonautoregressive import jacobi, mask_predict, nat
from tinyspec.nonautoregressive.jacobi import JacobiDrafter
from tinyspec.nonautoregressive.mask_predict import MaskPredictRefiner
from tinyspec.nonautoregressive.nat import NatRefiner
from tinyspec.training.exit_losses import ExitLossSchedule

_calm = partial(Toy, technique="calm")
_layerskip = partial(Toy, technique="layerskip")
_ppd = partial(Toy, technique="ppd", function=PipelinedTarget.score)
_jacobi = partial(Toy, technique="jacobi")
_masks = partial(Toy, technique="mask_predict", function=MaskPredictRefiner.rewrite)
_hidden = partial(
    Toy, technique="mask_predict", function=mask_predict.hide_tokens, law=MASKS_HIDDEN
)
_nat = partial(Toy, technique="nat")

# ------------------------------------------------------------------ early exits

CALM = [
    _calm(
        "the likeliest word's probability",
        "return row[ids[0]] - row[ids[1]] if len(ids) > 1 else row[ids[0]]",
        "return row[ids[0]]",
        calm.probability_gap,
        law=EXIT_RULE,
    ),
    _calm(
        "the exit's keys and values in every layer above",
        "due = [position for",
        """for node in self.session.committed[:-1]:
    done = node.sublayers_done // 2
    if 0 < done < len(node.keys) and not node.filled:
        node.keys[done:] = [node.keys[done - 1]] * (len(node.keys) - done)
        node.filled = True
return
due = [position for""",
        ExitTarget._fill_pending,
        law=EXIT_RULE,
    ),
    _calm(
        "the layers left out run in silence",
        "FILLS[fill]",
        'FILLS["recompute"]',
        ExitTarget.__init__,
        law=EXIT_RULE,
    ),
    _calm(
        "one measure",
        'if name == "classifier":',
        'name = "softmax"\nif name == "classifier":',
        calm.find_measure,
        law=EXIT_MEASURES,
    ),
    _calm(
        "the threshold that looked best on the examples",
        STOPS,
        "choice = candidate if total <= delta * len(sample) else choice",
        calibrate,
        law=CALIBRATED,
    ),
]
EARLY = "session.view("
TWIN = "type(session)(model, forward_log=request.forward_log, plan="
OWN_CACHE = Patch(
    layerskip.layerskip, "SharedSessionDrafter(early", "SharedSessionDrafter.__base__(early"
)
LAYERSKIP = [
    _layerskip(
        "early exit without verification",
        WALKED,
        "return tuple(range(len(tree.tokens))), rng.draw(p[len(tree.tokens) - 1]), ()",
        Kernels.verify_tree,
        law=JOINT,
    ),
    _layerskip(
        "verification by a whole pass",
        EARLY,
        TWIN,
        layerskip.layerskip,
        law=layerskip_traps.ONCE,
        also=(OWN_CACHE,),
    ),
    _layerskip(
        "the early layers' cache is not cropped",
        EARLY,
        TWIN,
        layerskip.layerskip,
        law=layerskip_traps.OWN,
        also=(
            OWN_CACHE,
            Patch(
                ModelDrafter.observe,
                "if self._count(round.tokens):",
                """self.model.append([*round.tree.tokens, *round.tokens[-1:]])
if False:""",
            ),
        ),
    ),
    _layerskip(
        "an exit with a head of its own",
        "q = probs[tip]",
        "q = [*probs[tip][1:], probs[tip][0]]",
        ModelDrafter.propose,
        law=layerskip_traps.OWN,
    ),
    _layerskip(
        "uniform dropout",
        "self.dropout_rates = self.exits.dropout_rates(self.n_layers, done)",
        "self.dropout_rates = [self.exits.p_max / 2] * self.n_layers",
        ExitLossSchedule.begin_step,
        law=LAYER_DROPOUT,
    ),
    _layerskip(
        "a head for every exit",
        "total = torch.zeros((), device=inputs.device)",
        """total, random = torch.zeros(()), torch.Generator().manual_seed(0)
heads = lambda x: torch.randn(blocks.vocabulary.shape, generator=random, dtype=x.dtype)""",
        ExitLossSchedule.loss,
        law=ONE_HEAD,
        also=(
            Patch(
                ExitLossSchedule.loss,
                "blocks.compute_logits(x)",
                "(blocks.apply_final_norm(x) @ heads(x).T)",
            ),
        ),
    ),
    _layerskip(
        "the plain mean of all exits",
        "self.loss_weights = self.exits.normalized_weights(self.n_layers, step, progress)",
        "self.loss_weights = [1 / self.n_layers] * self.n_layers",
        ExitLossSchedule.begin_step,
        law=EXIT_WEIGHTS,
    ),
]
BEGUN = "self.session.run_to_layer(branches, self.depth - self.layer)"
PPD = [
    _ppd(
        "exit early and hope",
        "scores: Scores = self.session.score(tree, hidden_layers)",
        "scores: Scores = self.session.run_to_layer(NO_DRAFT, self.layer, head=True)",
        law=JOINT,
        also=(Patch(PipelinedTarget.score, "if upcoming is not None and", "if False and"),),
    ),
    _ppd(
        "begun when the token is known",
        BRANCHES,
        f"""self.session.run_to_layer(NO_DRAFT, self.layer, head=True)
scores = self.session.score(tree, hidden_layers)
self.session.run_to_layer(self.guess_next(scores, upcoming), self.depth - self.layer)
return scores
{BRANCHES}""",
        law=PIPELINE_CLOCK,
    ),
    _ppd(
        "branches with caches of their own",
        BEGUN,
        BEGUN.replace("session.run_to_layer", "session.fork().run_to_layer"),
        law=PIPELINE_CLOCK,
    ),
    _ppd(
        "branches run through the whole model",
        BEGUN,
        "self.session.run_to_layer(branches, self.depth)",
        law=PIPELINE_WORK,
    ),
]

# ------------------------------------------------------------------ Jacobi iteration

CHAIN = "return TokenTree.chain(self.block[:-1][:max_draft_depth])"
DECODES = "return request.decoder(drafter, verify_tree)"
JACOBI = [
    _jacobi(
        "autoregression under another name",
        CHAIN,
        "return TokenTree()",
        JacobiDrafter.propose,
        law=SWEEP_IS_JACOBI,
    ),
    _jacobi(
        "guesses anew in every sweep",
        MOVED,
        "self.block = [self.pad] * (len(self.block) - len(round.tokens))",
        JacobiDrafter.observe,
        law=SWEEP_IS_JACOBI,
    ),
    _jacobi(
        "a window that slides, without blocks",
        MOVED,
        f"{MOVED}\nself.block += [predicted[-1]] * len(round.tokens)",
        JacobiDrafter.observe,
        law=SWEEP_IS_JACOBI,
        also=(
            Patch(
                JacobiDrafter.observe,
                "self.block = [] return",
                "self.block = self.predicted_tokens(round)[-1:] * len(round.tokens)\nreturn",
            ),
        ),
    ),
    _jacobi(
        "two sweeps have to be enough",
        DECODES,
        """from tinyspec.decoding.verify import Verdict
sweeps = []

def verify(tree, p, rng):
    sweeps.append(tree)
    if len(sweeps) < 3:
        return verify_tree(tree, p, rng)
    return Verdict(tuple(range(len(tree.tokens))), rng.draw(p[-1]))

return request.decoder(drafter, verify)""",
        jacobi.jacobi,
        law=SWEEP_FIXES,
    ),
    _jacobi(
        "convergence tested against the known text",
        CHAIN,
        f"""twin = self.target.fork()
for _ in self.block[:-1][:max_draft_depth]:
    twin.commit((), top_k_rows(twin.score(TokenTree()).logits, [0], 1)[0][0])
{CHAIN}""",
        JacobiDrafter.propose,
        law=SWEEP_COST,
        also=(Patch(jacobi.jacobi, DECODES, f"drafter.target = request.target\n{DECODES}"),),
    ),
    _jacobi(
        "no cache",
        "passes_before = len(self.forward_log)",
        """text = list(self.context)
self.target.rewind(0)
self.target.append(text)
passes_before = len(self.forward_log)""",
        Decoder.step,
        law=SWEEP_COST,
    ),
    _jacobi(
        "a fixed number of iterations",
        STANDS,
        "while len(states) < 3:",
        jacobi.iterate_block,
        law=SOLVE_PUBLISHED,
    ),
]

# ------------------------------------------------------------------ Mask-Predict and NAT

AGAIN = "again = select_lowest("
WRITTEN = "return Canvas(tokens, canvas.mask, torch.where(again, scores, canvas.scores), again)"
MASKS = [
    _masks(
        "all probabilities refreshed",
        WRITTEN,
        """states = self.model.decode(self.model.embed(tokens), memory, None, slots=canvas.mask)
log_probs = self.model.logits(states)[..., 4:].log_softmax(-1)
now = log_probs.gather(-1, (tokens - 4).clamp(min=0)[..., None])[..., 0]
return Canvas(tokens, canvas.mask, torch.where(again, scores, now), again)""",
        law=MASK_RULE,
    ),
    _masks(
        "all words written anew in every pass",
        AGAIN,
        f"""words, scores = predict_masked(self.model, canvas.tokens, canvas.mask, memory)
return Canvas(words, canvas.mask, scores)
{AGAIN}""",
        law=MASK_RULE,
    ),
    _masks(
        "random words masked",
        "select_lowest( canvas.scores,",
        """select_lowest(
    torch.rand(canvas.scores.shape, generator=torch.Generator().manual_seed(iteration)),""",
        law=MASK_RULE,
    ),
    _masks(
        "a single length",
        "self.width = model, iterations, lengths",
        "self.width = model, iterations, 1",
        function=MaskPredictRefiner.__init__,
        law=LENGTH_CHOICE,
    ),
    _masks(
        "one decoding a length",
        AGAIN,
        f"""if len(canvas.tokens) > 1:
    each = [Canvas(*(part[n : n + 1] for part in canvas[:3])) for n in range(len(canvas.tokens))]
    rows = [self.rewrite(one, memory, iteration, rng) for one in each]
    return Canvas(*(torch.cat([row[part] for row in rows]) for part in range(3)))
{AGAIN}""",
        law=LENGTH_CHOICE,
    ),
    _hidden(
        "15 % of the words hidden",
        "(share * lengths).long() + 1",
        "(0.15 * lengths).round().long().clamp(min=1)",
    ),
    _hidden(
        "masks drawn once",
        "lengths = slots.sum(dim=1)",
        "lengths, generator = slots.sum(dim=1), torch.Generator().manual_seed(0)",
    ),
    _hidden("never all words hidden", "(share * lengths)", "(share * (lengths - 1))"),
]
NAT = [
    _nat(
        "samples without the likeliest",
        "return torch.cat((torch.stack(fixed)[: self.samples], samples))",
        "return samples",
        NatRefiner.propose_fertilities,
        law=FERTILITY_RULE,
        also=(
            Patch(NatRefiner.propose_fertilities, "range(self.samples - 2)", "range(self.samples)"),
        ),
    ),
    _nat(
        "other samples where there are more",
        'rng.split("fertilities", number)',
        'rng.split(f"fertilities of {self.samples}", number)',
        NatRefiner.propose_fertilities,
        law=NESTED,
    ),
    _nat(
        "a length and even copies",
        COPIED,
        """places, slots = copy_uniformly(
    torch.full_like(chosen[:, 0], len(source)), chosen.sum(dim=1)
)
read = rows.gather(1, places)""",
        NatRefiner.start,
        law=nat_traps.FERTILE,
    ),
    _nat(
        "no positional attention",
        "self.model, self.teacher = model, teacher",
        """from dataclasses import replace
plain = Seq2Seq(replace(model.config, positional=False), model.weights)
self.model, self.teacher = plain, teacher""",
        NatRefiner.__init__,
        law=nat_traps.PASS,
    ),
    _nat(
        "a place sees its own copy",
        "memory, others,",
        "memory, None,",
        nat.decode_parallel,
        law=nat_traps.PASS,
    ),
    _nat(
        "the student judges itself",
        "best_candidate(self.teacher, source, canvas)",
        "int(canvas.means().argmax())",
        NatRefiner.choose,
        law=nat_traps.TEACHER,
    ),
    _nat(
        "fertilities without supervision",
        "(tokens + counts)",
        "tokens",
        nat._supervised,
        law=SUPERVISED,
    ),
    _nat(
        "the probability times the cost",
        GRADIENT,
        "(cost * chosen.exp().prod(dim=-1)).sum()",
        nat.reinforce_surrogate,
        law=EXPECTED_COST,
    ),
]

TOYS = [*CALM, *LAYERSKIP, *PPD, *JACOBI, *MASKS, *NAT]
