"""Methods that rewrite, and what is trained, with one defect each: Jacobi iteration, Mask-Predict,
NAT, translation, word alignment and the losses of exits.
"""

from functools import partial

from tinyspec.decoding import refine
from tinyspec.decoding.refine import Refinement
from tinyspec.laws.exit_laws import EXIT_WEIGHTS, LAYER_DROPOUT, ONE_HEAD
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Equivalent, Mutant
from tinyspec.laws.nonautoregressive_laws import (
    EM,
    EXPECTED_COST,
    KNOWN,
    LENGTH_CHOICE,
    MASKS_HIDDEN,
    NESTED,
    SUPERVISED,
)
from tinyspec.laws.nonautoregressive_laws import FERTILITY_RULE as FERTILE
from tinyspec.laws.nonautoregressive_laws import MASK_RULE as MASKS
from tinyspec.laws.rewriting_laws import LISTENS_TO_SOURCE, REFINE_LOOP, TEACHER_JUDGES
from tinyspec.laws.sweeps import SOLVE_PUBLISHED, SWEEP_IS_JACOBI
from tinyspec.lm.seq2seq import CrossAttentionBlocks
from tinyspec.nonautoregressive import jacobi, mask_predict, nat
from tinyspec.nonautoregressive.jacobi import JacobiDrafter
from tinyspec.nonautoregressive.mask_predict import MaskPredictRefiner
from tinyspec.nonautoregressive.nat import NatRefiner
from tinyspec.training import aligner
from tinyspec.training.exit_losses import ExitLosses, ExitLossSchedule

_observe = partial(Mutant, law=SWEEP_IS_JACOBI, function=JacobiDrafter.observe)
_propose = partial(Mutant, law=SWEEP_IS_JACOBI, function=JacobiDrafter.propose)
_iterate = partial(Mutant, law=SOLVE_PUBLISHED, function=jacobi.iterate_block)
_solve = partial(Mutant, law=SOLVE_PUBLISHED, function=jacobi.solve_blocks)
_masked = partial(Mutant, law=MASKS, function=mask_predict.count_masked)
_least = partial(Mutant, law=MASKS, function=mask_predict.select_lowest)
_rewrite = partial(Mutant, law=MASKS, function=MaskPredictRefiner.rewrite)
_lengths = partial(Mutant, law=LENGTH_CHOICE, function=MaskPredictRefiner.start)
_choose = partial(Mutant, law=LENGTH_CHOICE, function=MaskPredictRefiner.choose)
_hide = partial(Mutant, law=MASKS_HIDDEN, function=mask_predict.hide_tokens)
_proposals = partial(Mutant, law=FERTILE, function=NatRefiner.propose_fertilities)
_copied = partial(Mutant, law=FERTILE, function=NatRefiner.start)
_guarded = partial(Mutant, law=FERTILE, function=nat.make_decodable)
_fertile = partial(Mutant, law=FERTILE)
_supervised = partial(Mutant, law=SUPERVISED, function=nat._supervised)
_reinforce = partial(Mutant, law=EXPECTED_COST, function=nat.reinforce_surrogate)
_enter = partial(Mutant, law=LISTENS_TO_SOURCE, function=CrossAttentionBlocks.initial_states)
_span = partial(Mutant, law=LISTENS_TO_SOURCE, function=CrossAttentionBlocks.run_sublayers)
_refine = partial(Mutant, law=REFINE_LOOP, function=Refinement.__iter__)
_judge = partial(Mutant, law=TEACHER_JUDGES, function=refine.token_logprobs)
_count = partial(Mutant, law=EM, function=aligner._normalize_counts)
_align = partial(Mutant, law=KNOWN, function=aligner.align_words)
_counts = partial(Mutant, law=EXIT_WEIGHTS, function=ExitLosses.is_counted)
_begin = partial(Mutant, law=LAYER_DROPOUT, function=ExitLossSchedule.begin_step)
_head = partial(Mutant, law=ONE_HEAD, function=ExitLossSchedule.loss)

# ------------------------------------------------------------------ Jacobi iteration

MOVED = "self.block = [*predicted, *self.block[len(predicted) :]][len(round.tokens) :]"
STANDS = "while len(states) == 1 or states[-1] != states[-2]:"
SWEPT = [
    _observe(
        "a block is not moved on by the sweep's own token",
        MOVED,
        MOVED.replace("[len(round.tokens) :]", "[len(round.tokens) - 1 : -1]"),
        bug="B19",
    ),
    _observe(
        "a sweep's predictions after the first wrong position are not used",
        MOVED,
        "self.block = self.block[len(round.tokens) :]",
    ),
    _observe(
        "a sweep replaces one place",
        MOVED,
        """n = len(round.tokens)
self.block = [*predicted[n : n + 1], *self.block[n + 1 :]]""",
    ),
    _propose(
        "a block reads a guess that answers for another block",
        "self.block[:-1][:max_draft_depth]",
        "self.block[:max_draft_depth]",
        bug="B30",
    ),
    _propose(
        "a hybrid's prefix counts the prompt",
        "len(context) if self.begun is None else self.begun",
        "0",
    ),
    _iterate(
        "iteration stops when the first place stands",
        STANDS,
        "while len(states) == 1 or states[-1][0] != states[-2][0]:",
    ),
    _iterate(
        "iteration stops after half as many sweeps as tokens",
        STANDS,
        "while len(states) == 1 or 2 * (len(states) - 1) < len(block):",
    ),
    _iterate(
        "a place reads its own token",
        STANDS,
        "while len(states) <= len(block) + 1:",
        bug="B16",
        also=(
            Patch(
                jacobi.iterate_block,
                "states.append(predict(text, states[-1]))",
                """first, *others = states[-1]
own = predict([*text, first], [*others, states[-1][-1]])[0]
states.append([own, *predict(text, states[-1])[1:]])""",
            ),
        ),
    ),
    _solve(
        "iteration goes on after the end of the text",
        "next((at for at, token in enumerate(fresh) if token in ends), None)",
        "None",
        bug="B26",
    ),
    _solve(
        "a block is kept whole after the end of the text",
        "made += fresh if at is None else fresh[: at + 1]",
        "made += fresh",
        bug="B26",
    ),
]

# ------------------------------------------------------------------ Mask-Predict

SCHEDULE = "count_masked(canvas.mask.sum(dim=1), iteration, self.iterations)"
NUMBER = "return (length * (iterations - iteration) // iterations).clamp(min=1)"
SCORED = "scores.masked_fill(~slots, torch.inf)"
BEST = "return int(canvas.means().argmax())"
RANDOM = (
    "return select_lowest(torch.rand(slots.shape, generator=generator, device=slots.device), "
    "slots, count)"
)
MASKED = [
    _rewrite(
        "the schedule is a pass late",
        SCHEDULE,
        SCHEDULE.replace("iteration,", "max(iteration - 1, 0),"),
    ),
    _rewrite(
        "the schedule is a pass early",
        SCHEDULE,
        SCHEDULE.replace("iteration,", "iteration and iteration + 1,"),
    ),
    _masked(
        "as many masks as the ceiling says",
        NUMBER,
        "return -(-length * (iterations - iteration) // iterations)",
    ),
    _masked("no masks where the floor is 0", NUMBER, NUMBER.replace(".clamp(min=1)", "")),
    _masked(
        "a share of the masks before, not of all words",
        NUMBER,
        f"""if iteration > 1:
    length = count_masked(length, iteration - 1, iterations)
{NUMBER}""",
    ),
    _rewrite(
        "masks counted by the longest candidate",
        "canvas.mask.sum(dim=1)",
        "canvas.mask.sum(dim=1).max().expand(len(canvas.mask))",
    ),
    _least("padding counts as least sure", SCORED, SCORED.replace("torch", "-torch")),
    _least("the surest words are masked", SCORED, f"(-scores){SCORED[6:]}"),
    _least("the first words are masked", SCORED, f"torch.zeros_like(scores){SCORED[6:]}"),
    _rewrite(
        "a word that is written again sees itself",
        "canvas.tokens.masked_fill(again, self.model.config.mask)",
        "canvas.tokens",
    ),
    _rewrite(
        "padding is looked at",
        "self.model.config.mask), canvas.mask,",
        "self.model.config.mask), torch.ones_like(canvas.mask),",
    ),
    _rewrite(
        "a word that is written again keeps its old probability",
        "torch.where(again, scores, canvas.scores)",
        "canvas.scores if iteration else scores",
    ),
    _choose(
        "lengths compared by the sum",
        BEST,
        "return int(canvas.scores.masked_fill(~canvas.mask, 0).sum(dim=1).argmax())",
    ),
    _choose(
        "lengths compared by the mean over the padding too",
        BEST,
        "return int(canvas.scores.mean(dim=1).argmax())",
    ),
    _choose("the likeliest length is kept", BEST, "return 0"),
    _lengths(
        "lengths are one shorter than the LENGTH token says",
        "[:, : longest + 1]",
        "[:, 1 : longest + 1]",
        also=(
            Patch(
                MaskPredictRefiner.start,
                "blank_canvas(likeliest,",
                "blank_canvas([max(n, 1) for n in likeliest],",
            ),
        ),
    ),
    _lengths(
        "lengths upwards from the likeliest",
        "return blank_canvas(likeliest,",
        """first = range(likeliest[0], likeliest[0] + self.width)
return blank_canvas([min(max(n, 1), longest) for n in first],""",
    ),
    _hide(
        "numbers of masks counted with the padding",
        "lengths = slots.sum(dim=1)",
        "lengths = torch.full((len(slots),), slots.shape[1])",
    ),
    _hide(
        "each word hidden by itself",
        RANDOM,
        "return (torch.rand(slots.shape, generator=generator) < share[:, None]) & slots",
    ),
    _hide(
        "a run of words hidden",
        RANDOM,
        "return slots & (torch.arange(slots.shape[1]) < count[:, None])",
    ),
]

# ------------------------------------------------------------------ NAT

DRAWN = "drawn.append([stream.draw(row) for row in probs])"
COPIED = "read, slots = copy_source(rows, chosen)"
JUDGED_BY = "score_candidates(teacher, source, canvas).sum(dim=1).argmax()"
FERTILITIES = [
    _proposals(
        "the mean of a fertility is cut off",
        "+ 0.5).long()",
        ").long()",
        function=nat.average_fertilities,
    ),
    _proposals(
        "fertilities sampled at temperature 1, whatever was asked",
        "logits.double() / self.temperature",
        "logits.double()",
    ),
    _proposals(
        "all samples of fertilities are one draw",
        DRAWN,
        DRAWN.replace("append(", "append(drawn[0] if drawn else "),
    ),
    _proposals(
        "every word's fertility from the last word's distribution",
        DRAWN,
        DRAWN.replace("draw(row)", "draw(probs[-1])"),
    ),
    _proposals(
        "the named fertilities come last",
        "return torch.cat((torch.stack(fixed)[: self.samples], samples))",
        "return torch.cat((torch.stack(fixed)[: self.samples], samples)).flip(0)",
        law=NESTED,
    ),
    _proposals(
        "samples drawn word by word, not one after the other",
        "samples = torch.tensor(drawn,",
        """if drawn:
    stream = rng.split("words first", 0)
    by_word = [[stream.draw(row) for _ in drawn] for row in probs]
    drawn = list(zip(*by_word, strict=True))
samples = torch.tensor(drawn,""",
        law=NESTED,
    ),
    _copied(
        "a word without fertility is copied once",
        COPIED,
        """more = chosen.clamp(min=1)
fits = more.sum(dim=1, keepdim=True) < self.model.config.max_positions
read, slots = copy_source(rows, torch.where(fits, more, chosen))""",
    ),
    _copied(
        "a length, and copies spread evenly",
        COPIED,
        """places, slots = copy_uniformly(
    torch.full_like(chosen[:, 0], len(source)), chosen.sum(dim=1)
)
read = rows.gather(1, places)""",
    ),
    _copied(
        "a word's copies stand apart",
        COPIED,
        f"""{COPIED}
for text, counts in zip(read, chosen, strict=True):
    apart = [int(word) for n in range(int(counts.max())) for word in row[0][counts > n]]
    text[: len(apart)] = torch.tensor(apart)""",
    ),
    _guarded("fertilities that just fit are cut", "> max_target_length", ">= max_target_length"),
    _guarded(
        "an empty translation gets the first word",
        "fertile.argmax(dim=-1, keepdim=True)",
        "fertile.argmax(dim=-1, keepdim=True) * 0",
    ),
    _fertile("a place sees its own copy", "memory, others,", "memory, None,", nat.decode_parallel),
    _fertile(
        "a place sees only what is before it",
        "~torch.eye(read.shape[1], dtype=torch.bool, device=read.device)",
        "torch.ones(read.shape[1], read.shape[1], dtype=torch.bool).tril(-1)",
        nat.decode_parallel,
    ),
    _fertile(
        "a place sees padding",
        "decode_parallel(self.model, canvas.tokens, canvas.mask, memory)",
        "decode_parallel(self.model, canvas.tokens, torch.ones_like(canvas.mask), memory)",
        NatRefiner.rewrite,
    ),
    _fertile(
        "special tokens are written",
        "forbid_special_tokens(self.model, logits).log_softmax",
        "logits.log_softmax",
        NatRefiner.rewrite,
    ),
    _fertile(
        "the teacher is not asked about the end",
        JUDGED_BY,
        "score_candidates(teacher, source, canvas)[:, :-1]"
        ".masked_fill(~canvas.mask, 0).sum(dim=1).argmax()",
        refine.best_candidate,
    ),
    _fertile(
        "the teacher's last choice is kept",
        JUDGED_BY,
        JUDGED_BY.replace("argmax", "argmin"),
        refine.best_candidate,
    ),
    _fertile(
        "the student's own favourite is kept",
        "best_candidate(self.teacher, source, canvas)",
        "int(canvas.means().argmax())",
        NatRefiner.choose,
    ),
]
TAUGHT = "model.fertility_logits(memory)[memory.mask], fertilities[memory.mask]"
GRADIENT = "(cost.detach() * chosen.masked_fill(~mask, 0).sum(dim=-1)).sum()"
LOSSES = [
    _supervised("fertilities are not learnt", "(tokens + counts)", "tokens"),
    _supervised(
        "fertilities of padding are learnt",
        TAUGHT,
        "model.fertility_logits(memory).flatten(0, 1), fertilities.flatten()",
    ),
    _supervised("fertilities learnt per sentence", "/ len(words)", "/ len(source)"),
    _reinforce("fertilities follow the cost uphill", GRADIENT, f"-{GRADIENT}"),
    _reinforce(
        "fertilities of padding are paid for",
        GRADIENT,
        GRADIENT.replace(".masked_fill(~mask, 0)", ""),
    ),
    _reinforce("the cost is learnt from too", GRADIENT, f"cost.sum() + {GRADIENT}"),
    _reinforce(
        "only the first word's fertility is paid for",
        GRADIENT,
        "(cost.detach() * chosen[:, 0]).sum()",
    ),
]

# ------------------------------------------------------------------ translation

MARK = "mark = len(self.forward_log)"
TRANSLATIONS = [
    _enter("a decoder's embeddings are not scaled", "* self.config.d_model**0.5", ""),
    _enter(
        "positions count a pass's rows",
        "torch.tensor(feed.positions, device=self.device)",
        "torch.arange(len(feed.positions))",
    ),
    _enter(
        "a half-run row is placed again",
        "[s == 0 for s in feed.starts]",
        "[True for s in feed.starts]",
    ),
    _span(
        "only the first layer hears the source",
        "if sublayer % 2 == 0:",
        "if sublayer == 0:",
    ),
    _span(
        "a layer hears as the next one",
        "self.cross_kv[layer]",
        "self.cross_kv[(layer + 1) % len(self.cross_kv)]",
    ),
    _refine(
        "one rewriting too many",
        "while not refiner.finished(canvas, iteration):",
        "while iteration == 0 or not refiner.finished(canvas, iteration - 1):",
    ),
    _refine(
        "the first candidate is kept",
        "self.chosen = refiner.choose(canvas, self.source, memory)",
        "self.chosen = 0",
    ),
    _refine(
        "every pass rewrites the first canvas",
        "iteration = 0",
        "iteration, first = 0, canvas",
        also=(Patch(Refinement.__iter__, "refiner.rewrite(canvas,", "refiner.rewrite(first,"),),
    ),
    _refine(
        "the source is encoded in every pass",
        MARK,
        f"""{MARK}
with torch.inference_mode():
    memory = self.model.encode(torch.tensor([self.source]))""",
    ),
    _refine(
        "every rewriting draws the same",
        'rng.split("rewrite", iteration)',
        "type(rng)(0)",
        bug="S1",
    ),
    _judge(
        "a teacher does not judge the end",
        "return scores.masked_fill(places > ends[:, None], 0)",
        "return scores.masked_fill(places >= ends[:, None], 0)",
    ),
    _judge(
        "a teacher judges padding",
        "ends = mask.sum(dim=1)",
        "mask = torch.ones_like(mask)\nends = mask.sum(dim=1)",
    ),
    _judge("a teacher sees what it judges", "memory, causal)", "memory)"),
    _judge(
        "a teacher judges a token by its own row",
        "teacher.embed(read)",
        "teacher.embed(torch.cat((read[:, 1:], read[:, :1]), dim=1))",
    ),
]

# ------------------------------------------------------------------ alignment and exits, trained

COUNTED = "np.bincount(entry, share, len(group)).astype(np.float64)"
STREAM = "zip(self.loss_weights, states, strict=True)"
TRAINED = [
    _count("every count is one too many", COUNTED, f"{COUNTED} + 1.0"),
    _count(
        "only the likeliest source of a word is counted",
        COUNTED,
        COUNTED.replace("share,", "np.round(share),") + " + 1e-9",
    ),
    _count(
        "counts are normalised over all words together",
        "np.bincount(group, counts)[group]",
        "np.full(len(counts), counts.sum())",
    ),
    _align(
        "no model 2",
        "table = _LinkTable(source, target)",
        "table, model2_rounds = _LinkTable(source, target), 0",
    ),
    _align(
        "links from the end of the target",
        "Alignment(links,",
        "Alignment([link[::-1] for link in links],",
    ),
    _align("places counted from NULL", "table.starts[targets] - 1", "table.starts[targets]"),
    _counts(
        "normalised over exits that do not count",
        "e / sum(counted) for",
        "e / sum(self.loss_weights(n_layers)) for",
        function=ExitLosses.normalized_weights,
    ),
    _counts(
        "the last exit takes its turn",
        "layer == n_layers - 1 or",
        'layer == n_layers - 1 and self.curriculum != "rotational" or',
    ),
    _counts("the rotation stands still", "== step % self.rotation", "== 0"),
    _counts("gradual from the bottom", "(n_layers - 1 - layer)", "layer"),
    _begin(
        "the curriculum takes twice the time",
        "step, progress)",
        "step, progress / 2)",
        law=EXIT_WEIGHTS,
    ),
    _begin(
        "every layer dropped alike",
        "self.dropout_rates = self.exits.dropout_rates(self.n_layers, done)",
        """each = self.exits.dropout_rates(self.n_layers, done)
self.dropout_rates = [sum(each) / len(each)] * len(each)""",
    ),
    _begin(
        "dropout stops one step short",
        "progress * self.steps / max(self.steps - 1, 1)",
        "progress",
    ),
    _head(
        "early exits without the norm",
        f"for weight, x in {STREAM}:",
        f"for layer, (weight, x) in enumerate({STREAM}):",
        also=(
            Patch(
                ExitLossSchedule.loss,
                "blocks.compute_logits(x)",
                "(blocks.compute_logits(x) if layer == self.n_layers - 1 else "
                "x @ blocks.vocabulary.T)",
            ),
        ),
    ),
    _head(
        "an exit reads what enters its layer",
        STREAM,
        "zip(self.loss_weights, [F.embedding(inputs, blocks.embed), *states])",
    ),
]

MUTANTS = [*SWEPT, *MASKED, *FERTILITIES, *LOSSES, *TRANSLATIONS, *TRAINED]
EQUIVALENT = [
    Equivalent(
        "the last place of a block need not stand",
        "states[-1] != states[-2]",
        "states[-1][:-1] != states[-2][:-1]",
        jacobi.iterate_block,
        proof="No place of the block reads its last token. Where all others are as they were, the "
        "sweep read what the next sweep would read, so its answers are the fixed point already; a "
        "confirming pass is saved.",
        laws=(SOLVE_PUBLISHED,),
    ),
    Equivalent(
        "iteration stops after as many sweeps as tokens",
        STANDS,
        "while len(states) == 1 or (states[-1] != states[-2] and len(states) <= len(block)):",
        jacobi.iterate_block,
        proof="After k sweeps the first k tokens are final: the induction of the theorem. With m "
        "sweeps all m are, equal or not.",
        laws=(SOLVE_PUBLISHED,),
    ),
    Equivalent(
        "exits that do not count are computed",
        "if weight:",
        "if True:",
        ExitLossSchedule.loss,
        proof="They are counted with weight 0, and 0 times a finite loss is 0; so are their "
        "gradients.",
        laws=(EXIT_WEIGHTS, LAYER_DROPOUT, ONE_HEAD),
    ),
]
