"""Toys of trained drafters: heads that look right in a demonstration."""

from functools import partial

from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.early_exit.kangaroo import KangarooDrafter
from tinyspec.laws.exact.law import JOINT
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.traps import bita as bita_traps
from tinyspec.laws.traps import blockwise as blockwise_traps
from tinyspec.laws.traps import cllm as cllm_traps
from tinyspec.laws.traps import distillspec as distillspec_traps
from tinyspec.laws.traps import eagle as eagle_traps
from tinyspec.laws.traps import eagle2 as eagle2_traps
from tinyspec.laws.traps import eagle3 as eagle3_traps
from tinyspec.laws.traps import hydra as hydra_traps
from tinyspec.laws.traps import kangaroo as kangaroo_traps
from tinyspec.laws.traps import medusa as medusa_traps
from tinyspec.laws.traps import medusa2 as medusa2_traps
from tinyspec.laws.traps import osd as osd_traps
from tinyspec.laws.traps import parallel_prompt as prompt_traps
from tinyspec.laws.traps import pass_sampling as pass_traps
from tinyspec.laws.traps import redrafter as redrafter_traps
from tinyspec.laws.traps import space as space_traps
from tinyspec.laws.traps import specdec as specdec_traps
from tinyspec.laws.traps import typical_acceptance as typical_traps
from tinyspec.lm import head_formats
from tinyspec.lm.forward import ForwardBatch
from tinyspec.lm.seq2seq import MaskFiller
from tinyspec.lm.stack import UnrolledLayer
from tinyspec.nonautoregressive import cllm
from tinyspec.speculative.drafting import (
    blockwise,
    eagle,
    eagle3,
    hydra,
    medusa2,
    osd,
    redrafter,
    specdec,
)
from tinyspec.speculative.drafting.eagle2 import Eagle2Drafter
from tinyspec.speculative.drafting.medusa import MedusaDrafter
from tinyspec.speculative.drafting.pass_sampling import PassDrafter
from tinyspec.speculative.integrated import parallel_prompt, space
from tinyspec.speculative.integrated.bita import BitaDrafter
from tinyspec.speculative.integrated.parallel_prompt import PromptDrafter
from tinyspec.speculative.probing import ProbeGroupDrafter
from tinyspec.speculative.treedraft import fill_static_tree
from tinyspec.speculative.verification import typical_acceptance
from tinyspec.technique import TrainingBatch
from tinyspec.training import imitation
from tinyspec.training.on_policy import DraftTexts

_eagle3 = partial(Toy, technique="eagle3")
_medusa = partial(Toy, technique="medusa")
_medusa2 = partial(Toy, technique="medusa2")
_typical = partial(Toy, technique="typical_acceptance")
_blockwise = partial(Toy, technique="blockwise")
_hydra = partial(Toy, technique="hydra")
_redrafter = partial(Toy, technique="redrafter")
_bita = partial(Toy, technique="bita")
_ppd = partial(Toy, technique="parallel_prompt")
_pass = partial(Toy, technique="pass_sampling")
_space = partial(Toy, technique="space")
_cllm = partial(Toy, technique="cllm")
_eagle = partial(Toy, technique="eagle")
_pairs = partial(_eagle, function=eagle.EagleDrafter._join_pairs, law=eagle_traps.PLACED)
_eagle2 = partial(Toy, technique="eagle2", function=Eagle2Drafter.grow_tree)
JOINED = "torch.cat((embedded, torch.stack(list(states))), dim=-1)"
_distill = partial(Toy, technique="distillspec")
_kangaroo = partial(Toy, technique="kangaroo")
_osd = partial(Toy, technique="osd")
_specdec = partial(Toy, technique="specdec")

TOYS = [
    _medusa(
        "heads trained one token early",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=medusa_traps.PLANTED,
    ),
    _medusa(
        "heads that read one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        MedusaDrafter.propose,
        law=medusa_traps.PLACED,
    ),
    _medusa(
        "one candidate of each head",
        "rank_tokens(sampling, rows[depth], history, widths[depth])",
        "rank_tokens(sampling, rows[depth], history, 1)",
        fill_static_tree,
        law=medusa_traps.SPREAD,
    ),
    _medusa2(
        "the heads' losses with their full weight",
        "settings.heads_weight * schedule_weight(settings, tuning.progress) * of_heads",
        "of_heads",
        medusa2.medusa2_loss,
        law=medusa2_traps.JOINED,
    ),
    _medusa2(
        "the heads' losses alone",
        "return own + settings",
        "return settings",
        medusa2.medusa2_loss,
        law=medusa2_traps.JOINED,
    ),
    _medusa2(
        "a model that is trained from the first step on",
        "torch.is_grad_enabled() and not are_heads_first",
        "torch.is_grad_enabled()",
        medusa2.medusa2_loss,
        law=medusa2_traps.ALONE,
    ),
    _typical(
        "a threshold without the entropy",
        "min(epsilon, delta * math.exp(-entropy))",
        "epsilon",
        typical_acceptance.typical_threshold,
        law=typical_traps.LIKELIEST,
    ),
    _typical(
        "the threshold of the draft's distribution",
        "rows[parent] = row, typical_threshold(row, epsilon, delta)",
        """q = row if tree.draft_probs[node] is None else np.array(tree.draft_probs[node])
rows[parent] = row, typical_threshold(q, epsilon, delta)""",
        typical_acceptance.typical_verifier,
        law=typical_traps.THRESHOLD,
    ),
    _typical(
        "the first of the longest paths",
        "key=lambda node: score[node]",
        "key=lambda node: score[node][0]",
        typical_acceptance.typical_verifier,
        law=typical_traps.LONGEST,
    ),
    _eagle(
        "a layer trained on the state that it reads",
        "true = states[:, 1:]",
        "true = states[:, :-1]",
        eagle.eagle_loss,
        law=eagle_traps.PLANTED,
    ),
    _eagle(
        "the token beside its own state",
        "self._run_rows(self.following[first:n], states,",
        "self._run_rows(([0] + self.following)[first:n], states,",
        eagle.EagleDrafter._run_pairs,
        law=eagle_traps.PLACED,
    ),
    _pairs("tokens alone", JOINED, JOINED.replace("list(states))", "list(states)) * 0")),
    _pairs("states alone", JOINED, JOINED.replace("(embedded,", "(embedded * 0,")),
    _eagle(
        "the final norm on a guessed state",
        "self.head.compute_logits(guessed)",
        "self.head.compute_logits(torch.nn.functional.rms_norm(guessed, guessed.shape[-1:]))",
        eagle.EagleDrafter.run_nodes,
        law=eagle_traps.PLACED,
    ),
    _eagle(
        "rows of guessed states are kept",
        "self.stack.cut(len(self.states))  # the",
        "pass  # the",
        eagle.EagleDrafter.propose,
        law=eagle_traps.OF_TEXT,
    ),
    _eagle(
        "the most likely tokens, declared as samples",
        "return sample_siblings(sampling.probs(row, history), k, rng)",
        """q = sampling.probs(row, history)
return [(token, q) for token in rank_tokens(sampling, row, history, k)]""",
        eagle.StaticEagleDrafter.draw_siblings,
        law=JOINT,
    ),
    _eagle2(
        "no reranking",
        "rank_nodes(values, range(len(values)), self.nodes)",
        "range(min(self.nodes, len(values)))",
        law=eagle2_traps.BEST,
    ),
    _eagle2(
        "a static tree",
        "chance := float(q[token])",
        "chance := 0.5 ** (1 + top_k_tokens(q, self.width).index(token))",
        law=eagle2_traps.BEST,
    ),
    _eagle2(
        "the best child of each parent",
        "level = rank_nodes(values, going_on, self.width)",
        """best = {}
for node in rank_nodes(values, going_on, len(going_on)):
    best.setdefault(tree.parents[node] if level != [ROOT] else node, node)
level = rank_nodes(values, [*best.values()], self.width)""",
        law=eagle2_traps.EXPANDED,
    ),
    _eagle2(
        "the last probability for the path's",
        "values[node] * chance",
        "chance",
        law=eagle2_traps.EXPANDED,
    ),
    _pass(
        "rows that are read one look-ahead late",
        "rows[node + 1]",
        "rows[node]",
        PassDrafter.observe,
        law=pass_traps.PLACED,
    ),
    _pass(
        "look-aheads trained on the next token",
        "self.ids[:, first:]",
        "self.ids[:, first - 1 : -1]",
        TrainingBatch.known_tokens,
        law=pass_traps.AIMED,
    ),
    _pass(
        "rows that serve two drafts",
        "rows, self.logits = self.logits, ()",
        "rows = self.logits",
        PassDrafter.propose,
        law=pass_traps.CYCLE,
    ),
    _bita(
        "the group behind the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        BitaDrafter.observe,
        law=bita_traps.PLACED,
    ),
    _bita(
        "masks behind the newest token alone",
        "for node, depth in depths.items():",
        "for node, depth in [(ROOT, 0)]:",
        BitaDrafter.add_groups,
        law=bita_traps.ONE_PASS,
    ),
    _bita(
        "a prefix that all rows see",
        "mask[:, :, :lead] = self.probes[list(rows)].cpu().numpy()[:, None, None]",
        "mask[:, :, :lead] = True",
        ForwardBatch.attention_mask,
        law=bita_traps.ALONE,
    ),
    _ppd(
        "the prompts behind the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        ProbeGroupDrafter.observe,
        law=prompt_traps.PLACED,
    ),
    _ppd(
        "the first virtual token alone",
        "sum(rows[at : at + self.virtual]) / self.virtual",
        "rows[at]",
        PromptDrafter.observe,
        law=prompt_traps.PLACED,
    ),
    _ppd(
        "virtual tokens that see each other",
        "parents.append(tips[i])",
        "parents.append(tips[i - 1])",
        PromptDrafter.propose,
        law=prompt_traps.PLACED,
    ),
    _ppd(
        "prompts trained one place early",
        "at = anchors + 1 + depth",
        "at = anchors + depth",
        parallel_prompt.prompt_loss,
        law=prompt_traps.AIMED,
    ),
    _ppd(
        "the deepest tree in every state",
        "state = len(self.logits) - 1",
        "state = len(self.trees) - 1",
        PromptDrafter.propose,
        law=prompt_traps.STATE,
    ),
    _ppd(
        "as many prompts behind every candidate",
        "prompts = [len(values)] * len(ends)",
        "return [min(most // len(ends), len(values))] * len(ends)\nprompts = []",
        parallel_prompt.hang_prompts,
        law=prompt_traps.REMOVED,
    ),
    _ppd(
        "a round without a draft after each rejected one, as the authors count",
        "return 1 + float(find_steady_state(trees) @ np.array(values))",
        """shares = find_steady_state(trees)
rejected = float(shares @ np.array([1 - sum(tree.ends) for tree in trees]))
return 1 + float(shares @ np.array(values)) / (1 + rejected)""",
        parallel_prompt.tokens_per_round,
        law=prompt_traps.STEADY,
    ),
    _space(
        "the group behind the newest token of the round before",
        "before_newest = path[len(round.tokens) - 1]",
        "before_newest = ROOT",
        space.SpaceDrafter.observe,
        law=space_traps.PLACED,
    ),
    _space(
        "masks behind the newest token alone",
        "for node in range(ROOT, n)",
        "for node in (ROOT,)",
        space.SpaceDrafter.propose,
        law=bita_traps.ONE_PASS,
    ),
    _space(
        "tuning without masks",
        "if is_cut and len(cuts):",
        "if False:",
        space.sar_loss,
        law=space_traps.LABELLED,
    ),
    _space(
        "a rejected candidate drawn again from p, as in the released code",
        "return request.decoder(SpaceDrafter(ids, positions), verify_tree)",
        """from tinyspec.decoding.verify import Verdict
def redraw(tree, p, rng):
    path, node = (), ROOT
    for child in tree.chain_nodes("SPACE"):
        token, q = tree.tokens[child], tree.draft_probs[child]
        if not rng.accept(min(1, p[node][token] / (1 if q is None else q[token]))):
            break
        path, node = (*path, child), child
    return Verdict(path, rng.draw(p[node]))
return request.decoder(SpaceDrafter(ids, positions), redraw)""",
        space.space,
        law=JOINT,
    ),
    _cllm(
        "trajectories from padding",
        "[text[i] for i in drawn]",
        "[0] * n",
        cllm.trace_trajectory,
        law=cllm_traps.FIXED,
    ),
    _cllm(
        "training from the first state alone",
        "chosen = int(torch.randint(max(len(states) - 1, 1), (), generator=generator))",
        "chosen = 0",
        cllm.draw_pair,
        law=cllm_traps.EARLIER,
    ),
    _cllm(
        "consistency alone, without the autoregressive loss",
        "after_early[is_open]) + settings.ar_weight * ar_loss",
        "after_early[is_open])",
        cllm.cllm_loss,
        law=cllm_traps.LOSS,
    ),
    _cllm(
        "a gradient through the fixed point",
        "fixed.detach().float()",
        "fixed.float()",
        cllm.consistency_loss,
        law=cllm_traps.CONSTANT,
    ),
    _distill(
        "one divergence for all names",
        "DIVERGENCES[kind]",
        'DIVERGENCES["kl"]',
        imitation.imitation_loss,
        law=distillspec_traps.NAMED,
    ),
    _distill(
        "texts that the first draft wrote",
        "begun = step - step % self.every",
        "begun = 0",
        DraftTexts.refresh,
        law=distillspec_traps.CURRENT,
    ),
    _kangaroo(
        "verification that runs all layers again",
        "ran = self.target.run_to_layer(tree, self.head.exit, hidden_layers=(self.head.exit,))",
        """ran = self.target.run_to_layer(tree, self.head.exit, hidden_layers=(self.head.exit,))
for node in (self.target.committed[-1], *self.target.committed[-1].descendants()):
    node.reset()""",
        KangarooDrafter.propose,
        law=kangaroo_traps.CONTINUED,
    ),
    _kangaroo(
        "adapter rows of rejected tokens",
        "self.adapter.cut(len(self.states))  # not the rows of draft tokens that were rejected",
        "pass",
        KangarooDrafter.propose,
        law=kangaroo_traps.OF_TEXT,
    ),
    _kangaroo(
        "an adapter without the row of the newest token",
        "self._adapt(ran.hidden[0, -1:], head_rows=1)",
        "self._adapt(self.states[-1][:1], head_rows=1)",
        KangarooDrafter.propose,
        law=kangaroo_traps.PLACED,
    ),
    _blockwise(
        "one predictor at every depth",
        "slice(depth * h.shape[-1], (depth + 1) * h.shape[-1])",
        "slice(h.shape[-1])",
        blockwise.predict_by_block,
        law=blockwise_traps.PLANTED,
    ),
    _blockwise(
        "a layer that reads one position early",
        "self.states[-1][0]",
        "self.states[-2:][0][0]",
        blockwise.BlockwiseDrafter.propose,
        law=blockwise_traps.PLACED,
    ),
    _blockwise(
        "a layer without the residual",
        "self.rows(h + parts[:n])",
        "self.rows(parts[:n])",
        blockwise.BlockLayer.logits,
        law=blockwise_traps.RESIDUAL,
    ),
    _blockwise(
        "a pass to predict and another to verify",
        "if not self.states or n <= 0:",
        "if setattr(self, 'odd', not getattr(self, 'odd', False)) or self.odd or n <= 0:",
        blockwise.BlockwiseDrafter.propose,
        law=blockwise_traps.COUNTED,
    ),
    _blockwise(
        "a rejected guess that may be drawn again",
        "rng.draw(exclude_token(p[at], token))",
        "rng.draw(p[at])",
        blockwise.relaxed_verifier,
        law=blockwise_traps.RELAXED,
    ),
    _blockwise(
        "right guesses that are counted after a wrong one",
        "row.long().cumprod(dim=-1).sum(dim=-1)",
        "row.long().sum(dim=-1)",
        blockwise.split_into_blocks,
        law=blockwise_traps.TRANSLATED,
    ),
    _blockwise(
        "a predictor that is trained on the token before its own",
        "(0, i), value=config.pad)[:, i:]",
        "(0, i), value=config.pad)[:, max(i - 1, 0) :][:, : text.shape[1]]",
        blockwise.translation_labels,
        law=blockwise_traps.TAUGHT,
    ),
    _blockwise(
        "a frozen model's own predictor among those that are drawn",
        "int(frozen)",
        "0",
        blockwise.translation_loss,
        law=blockwise_traps.TAUGHT,
    ),
    _hydra(
        "heads trained on the embeddings one place early",
        "F.pad(ids[:, k:], (0, k)) for k in range(1, depth + 2)",
        "F.pad(ids[:, k:], (0, k)) for k in range(depth + 1)",
        hydra.head_logits,
        law=hydra_traps.PLANTED,
    ),
    _hydra(
        "heads that read the draft in another order",
        "torch.cat((read[tree.parents[node]], e))",
        "torch.cat((read[tree.parents[node]][: -len(e)], e, read[tree.parents[node]][-len(e) :]))",
        hydra.HydraDrafter.propose,
        law=hydra_traps.PLACED,
    ),
    _hydra(
        "a layer whose rows outlive a request",
        "self._cut_prefix(len(self.states))",
        "pass",
        hydra.HydraDrafter.rewind,
        law=hydra_traps.OF_TEXT,
        also=(Patch(hydra.HydraDrafter.end, "self._cut_prefix(0)", "pass"),),
    ),
    _hydra(
        "heads that do not see each other, as Medusa's",
        "[tree.tokens[node] for node in lower]",
        "[context[-1]] * len(lower)",
        hydra.HydraDrafter.propose,
        law=hydra_traps.DEPENDENT,
    ),
    _redrafter(
        "a head trained on the token before",
        "F.pad(ids[:, k:], (0, k)) for k in range(1, steps + 1)",
        "F.pad(ids[:, k:], (0, k)) for k in range(steps)",
        redrafter.unroll_logits,
        law=redrafter_traps.PLANTED,
    ),
    _redrafter(
        "a head that does not read its draft",
        "beam.tokens[-1] if depth else context[-1]",
        "context[-1]",
        redrafter.RedrafterDrafter.search_beams,
        law=redrafter_traps.PLACED,
    ),
    _redrafter(
        "a state that goes on from the round before",
        "torch.stack(before) if before else None",
        "torch.stack(before) if before else getattr(self, 'last', None)",
        redrafter.RedrafterDrafter.search_beams,
        law=redrafter_traps.OF_TEXT,
        also=(
            Patch(
                redrafter.RedrafterDrafter.search_beams,
                "found = ended",
                "found, self.last = ended, s[:1]",
            ),
        ),
    ),
    _redrafter(
        "beams that stand side by side",
        "tokens, parents, _ = merge_drafts(chains)",
        "tokens = [t for text in texts for t in text]; "
        "parents = [i - 1 if i % length else -1 for i in range(len(tokens))]",
        redrafter.RedrafterDrafter.propose,
        law=redrafter_traps.BEAMS,
    ),
    _redrafter(
        "a tree of all texts, without a search",
        "[: self.beams]",
        "",
        redrafter.RedrafterDrafter.search_beams,
        law=redrafter_traps.BEAMS,
    ),
    _eagle3(
        "training at the first step alone",
        "steps = batch.states.new_zeros(()), target.settings.steps",
        "steps = batch.states.new_zeros(()), 1",
        eagle3.eagle3_loss,
        law=eagle3_traps.PLANTED,
    ),
    _eagle3(
        "rows of the draft vocabulary taken for ids",
        "self.head.token_map, self.head.vocabulary",
        "None, self.head.vocabulary",
        eagle.EagleDrafter.run_nodes,
        law=eagle3_traps.PLACED,
    ),
    _eagle3(
        "offsets of another program's head taken for ids",
        "rows = torch.arange(words)",
        "rows = 0",
        head_formats.read_eagle3,
        law=eagle3_traps.FOREIGN,
    ),
    _eagle3(
        "ids written for another program where it adds its rows",
        "ids - torch.arange(len(ids))",
        "ids",
        head_formats.write_eagle3,
        law=eagle3_traps.FOREIGN,
    ),
    _eagle3(
        "later steps trained at the positions of the first",
        "cos[step:], sin[step:]), rotate(k, cos[step:], sin[step:])",
        "cos[:n], sin[:n]), rotate(k, cos[:n], sin[:n])",
        UnrolledLayer.run,
        law=eagle3_traps.PLACED,
    ),
    _eagle3(
        "the top layer alone",
        "min(2, n), n // 2, max(n - 3, 0)",
        "n, n, n",
        eagle3.feature_layers,
        law=eagle3_traps.THREE,
    ),
    _specdec(
        "a small model that writes from left to right",
        "logits = self.model.score(masks).logits",
        "return ModelDrafter.propose(self, context, max_draft_depth, sampling, rng)",
        specdec.SpecDecDrafter.propose,
        law=specdec_traps.ONE_CALL,
    ),
    _specdec(
        "the beta likeliest, however far they are",
        "token in likeliest and row[token] / row[likeliest[0]] >= least",
        "token in likeliest",
        specdec.top_beta_verifier,
        law=specdec_traps.CONDITIONS,
    ),
    _specdec(
        "the distance alone",
        "token in likeliest and row[token] / row[likeliest[0]] >= least",
        "row[token] / row[likeliest[0]] >= least",
        specdec.top_beta_verifier,
        law=specdec_traps.CONDITIONS,
    ),
    _specdec(
        "all of the beta likeliest within tau, or none",
        "row[token] / row[likeliest[0]] >= least",
        "row[likeliest[-1]] / row[likeliest[0]] >= least",
        specdec.top_beta_verifier,
        law=specdec_traps.MONOTONE,
    ),
    _specdec(
        "masks that do not see the masks after them",
        "self.model.decode(self.model.embed(ids), self.memory)",
        "self.model.decode(self.model.embed(ids), self.memory, "
        "torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril())",
        MaskFiller.score,
        law=specdec_traps.FILLED,
    ),
    _specdec(
        "logits that are read one mask early",
        "[1 : max_draft_depth + 1]",
        "[:max_draft_depth]",
        specdec.SpecDecDrafter.propose,
        law=specdec_traps.FILLED,
    ),
    _specdec(
        "masks that are trained on the next token",
        "labels = text.masked_fill(~is_mask, config.pad)",
        "labels = text.roll(-1, 1).masked_fill(~is_mask, config.pad)",
        specdec.mask_blocks,
        law=specdec_traps.PLANTED,
    ),
    _specdec(
        "trained on the first block of a sentence alone",
        "(share * lengths).long()",
        "(0 * lengths).long()",
        specdec.mask_blocks,
        law=specdec_traps.PLANTED,
    ),
    _specdec(
        "shown tokens that count in the loss",
        "labels.masked_fill(shown, model.config.pad)",
        "labels",
        specdec.glance_at_labels,
        law=specdec_traps.GLANCED,
    ),
    _specdec(
        "a share of all masks, right or wrong",
        "wrong.sum(dim=1, keepdim=True)",
        "known.sum(dim=1, keepdim=True)",
        specdec.glance_at_labels,
        law=specdec_traps.GLANCED,
    ),
    _osd(  # distill_trainer.py of the authors masks the row at the token, not the one before it
        "the row after a rejected token",
        "len(self.text) + len(verdict.accepted) - 1",
        "len(self.text) + len(verdict.accepted)",
        osd.OsdDrafter.observe,
        law=osd_traps.GRADIENT,
    ),
    _osd(  # generator.py of the authors counts the last token of every round as wrong
        "the bonus of a fully accepted draft counts as rejected",
        "verdict.rejected and verdict.next is not None",
        "verdict.next is not None",
        osd.OsdDrafter.observe,
        law=osd_traps.GRADIENT,
        also=(
            Patch(
                osd.OsdDrafter.observe,
                "round.tree.parents[verdict.rejected[0]]",
                "verdict.accepted[-1] if verdict.accepted else -1",
            ),
        ),
    ),
    _osd(
        "fine-tuning on the whole text",
        "return divergence(p, q).mean()",
        "rows = blocks.apply_head(states[:, :-1]).flatten(0, 1)\n"
        "return torch.nn.functional.cross_entropy(rows, ids[:, 1:].flatten())",
        osd.rejection_loss,
        law=osd_traps.GRADIENT,
    ),
    _osd(
        "an update that the drafter never uses",
        "self.model = self.online.model.session(self.forward_log)",
        "pass",
        osd.OsdDrafter.end,
        law=osd_traps.ONE_MODEL,
    ),
    _osd(
        "an update inside a request, with the keys of the old weights",
        "self.text += round.tokens",
        """self.text += round.tokens
if self.places:
    ids = self.text[: self.places[-1] + 1]
    self.online.finish_request(RejectedPlaces(ids, self.places, torch.stack(self.rows)))
    self.model.model, self.places, self.rows = self.online.model, [], []""",
        osd.OsdDrafter.observe,
        law=osd_traps.ONE_MODEL,
    ),
    _osd(
        "the distribution that an older draft declared for the same text",
        "draft_probs.append(q)",
        'draft_probs.append(self.online.__dict__.setdefault("old", {})'
        ".setdefault((*context, *tokens[:-1]), q))",
        ModelDrafter.propose,
        law=JOINT,
    ),
]
