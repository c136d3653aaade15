"""Drafts with one defect each: chains and trees drawn from a model, siblings, retrieval, n-gram
indices and counted tries.

What a drafter declares must be what it drew from, and what it drew must not decide what is shown.
"""

from dataclasses import replace
from functools import partial

from tinyspec._core import fallback, reference_suffixes
from tinyspec._core.reference_forest import Forest
from tinyspec._core.reference_trie import NgramIndex
from tinyspec.decoding.modeldraft import ModelDrafter
from tinyspec.laws import theorems
from tinyspec.laws.contracts import EXAMINED, PRESENCE, TRUTHFUL
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Equivalent, Mutant
from tinyspec.laws.parts import PARTS
from tinyspec.laws.row_laws import FOREST_COUNT
from tinyspec.speculative import treedraft
from tinyspec.speculative.treedraft import TreeDrafter

_chain = partial(Mutant, function=ModelDrafter.propose)
_tree = partial(Mutant, function=TreeDrafter.draw_children)
_find = partial(Mutant, function=reference_suffixes.retrieve, law="twin", kernel="retrieve")
_order = partial(Mutant, function=fallback.suffix_order, law="twin", kernel="suffix_order")
_forest = partial(Mutant, law=FOREST_COUNT, parts=replace(PARTS, forest=Forest))

# ------------------------------------------------------------------ a chain

CHAINS = [
    _chain(
        "argmax drafted, softmax declared",
        "token = rng.draw(q)",
        "token = list(q).index(max(q))",
        bug="B3, S4",
        law=TRUTHFUL,
    ),
    _chain(
        "drawn filtered, declared raw",
        "draft_probs.append(q)",
        "draft_probs.append(probs.probs_under(tip, SamplingParams()))",
        bug="B4",
        law=TRUTHFUL,
    ),
    _chain(
        "declared in a narrower dtype",
        "draft_probs.append(q)",
        """coarse = [0 * x + (round(8 * x) or 1) for x in q]  # three bits
draft_probs.append([x / sum(coarse) for x in coarse])""",
        bug="B5",
        law=TRUTHFUL,
    ),
    _chain(
        "only likely draft tokens kept",
        "return TokenTree.chain(tokens, draft_probs)",
        """sure = [3 * q[x] > 1 for x, q in zip(tokens, draft_probs, strict=True)]
n = [*sure, False].index(False)
return TokenTree.chain(tokens[:n], draft_probs[:n])""",
        law=PRESENCE,
    ),
    _chain(
        "rejected draft token proposed again",
        "if self.left_behind or most <= 0:",
        """again, self.again = getattr(self, "again", None), None
if again and max_draft_depth:
    return again
if self.left_behind or most <= 0:""",
        law=EXAMINED,
        also=(
            Patch(
                ModelDrafter.observe,
                "if self._count(round.tokens):",
                """for node in round.verdict.rejected:
    self.again = TokenTree.chain([round.tree.tokens[node]], [round.tree.draft_probs[node]])
if self._count(round.tokens):""",
            ),
        ),
    ),
]

# ------------------------------------------------------------------ siblings and trees

DRAWN = "drawn = sample_siblings(q, k, rng)"
TREES = [
    Mutant(
        "without replacement, each declared as the first",
        "if drawn:",
        "if False:",
        treedraft.sample_siblings,
        law=JOINT,
    ),
    Mutant(
        "siblings sorted after the draw",
        "return drawn",
        "return sorted(drawn, key=lambda one: -drawn[0][1][one[0]])",
        treedraft.sample_siblings,
        law=theorems.DRAW_ORDER,
    ),
    _tree(
        "child drawn after the newest token, declared after its parent",
        DRAWN,
        """drawn = sample_siblings(probs[ROOT], k, rng)
if node != ROOT:
    drawn = [(token, q if q[token] > 0 else None) for token, _ in drawn]""",
        law=JOINT,
    ),
    Mutant(
        "unlikely paths cut, distributions kept",
        "return TokenTree(tokens, parents, rows, (False,) * len(tokens))",
        """sure = [q is None or 3 * q[x] > 1 for x, q in zip(tokens, rows, strict=True)]
n = [*sure, False].index(False)
return TokenTree(tokens[:n], parents[:n], rows[:n], (False,) * n)""",
        TreeDrafter.propose,
        law=PRESENCE,
    ),
    _tree(
        "equal draft tokens of one parent merged",
        "return [(rng.draw(q), q) for _ in range(k)]",
        "return [(token, q) for token in {rng.draw(q): None for _ in range(k)}]",
        law=PRESENCE,
    ),
    _tree(
        "parent's token avoided, its distribution declared",
        DRAWN,
        f"""if node != ROOT:
    left = [0 * x if token == probs.tree.tokens[node] else x for token, x in enumerate(q)]
    return [(rng.draw(left if sum(left) > 0 else q), q) for _ in range(k)]
{DRAWN}""",
        law=TRUTHFUL,
    ),
]

# ------------------------------------------------------------------ what copies

FOLLOWED = "kept = sorted(weight, key=lambda path: (-weight[path], len(path), path))[:most]"
SORTED = "reference_suffixes.suffix_order(np.asarray(tokens).tolist(), tell)"
COPIES = [
    Mutant(
        "index stores 16 bits",
        "for token in tokens:",
        "for token in (token & 0xFFFF for token in tokens):",
        NgramIndex.append,
        bug="B35",
        law="lookup is a search",
        parts=replace(PARTS, index=NgramIndex),
    ),
    _find(
        "a datastore's ids in 16 bits",
        "suffix = list(suffix)",
        """tokens, suffix = [int(x) & 0xFFFF for x in tokens], [x & 0xFFFF for x in suffix]
order = suffix_order(tokens)""",
        bug="B35",
    ),
    _find(
        "the shortest match is continued",
        "range(min(longest, len(suffix)), shortest - 1, -1)",
        "range(shortest, min(longest, len(suffix)) + 1)",
    ),
    _find(
        "a continuation runs into the next document",
        "end = next((at for at, token in enumerate(rest) if token < 0), len(rest))",
        "end = len(rest)",
    ),
    _find(
        "a tree of what comes first, not of what is heaviest",
        FOLLOWED,
        "kept = sorted(weight)[:most]",
    ),
    _find(
        "a beginning weighs as its own end",
        FOLLOWED,
        f"""{FOLLOWED}
ends = {{path: sum(weight[other] for other in kept if other[:-1] == path) for path in kept}}
weight = {{path: max(weight[path] - ends[path], 1) for path in kept}}""",
    ),
    _find(
        "the first matches instead of evenly spaced ones",
        "order[low + j * (high - low) // taken]",
        "order[low + j]",
    ),
    _order(
        "places sorted by their first token",
        SORTED,
        "sorted(range(len(tokens)), key=lambda place: tokens[place])",
    ),
    _order(
        "equal places in reverse",
        SORTED,
        "sorted(reversed(range(len(tokens))), "
        "key=lambda place: tokens[place : place + 32].tolist())",
    ),
]

# ------------------------------------------------------------------ what counts

FORESTS = [
    _forest(
        "a rewind leaves what was counted",
        "while len(t.tokens) > max(length, t.since):",
        "while False:",
        Forest.rewind,
    ),
    _forest(
        "owners share a tree",
        "self._trees.setdefault(tree,",
        "tree = 0\nself._trees.setdefault(tree,",
        Forest.open,
    ),
    _forest(
        "a halving rounds up",
        "window.count //= 2",
        "window.count = (window.count + 1) // 2",
        Forest.halve,
    ),
    _forest(
        "windows cross a halving",
        "for t in (t for t in self._texts.values() if t.tree == tree):",
        "for t in ():",
        Forest.halve,
        also=(
            Patch(
                Forest._recount,
                "siblings = tree[before].after",
                "siblings = tree.setdefault(before, Window(1)).after",
            ),
        ),
    ),
    _forest(
        "siblings in the order they came",
        "if token in siblings: siblings.remove(token)",
        """place = siblings.index(token) if token in siblings else len(siblings)
siblings[place : place + 1] = []""",
        Forest._recount,
        also=(Patch(Forest._recount, "next(as_much, len(siblings))", "place"),),
    ),
    _forest(
        "a closed text goes on in the next",
        "self._texts[text] = Text(tree)",
        """self._texts[text] = Text(tree, list(getattr(self, "last", {}).get(tree, ())))""",
        Forest.open,
        also=(
            Patch(
                Forest.close,
                "del self._texts[text]",
                "t = self._texts.pop(text)\nself.last = {t.tree: t.tokens}",
            ),
        ),
    ),
    _forest(
        "a forest stores 16 bits",
        "for token in tokens:",
        "for token in (token & 0xFFFF for token in tokens):",
        Forest.append,
        bug="B35",
    ),
]

MUTANTS = [*CHAINS, *TREES, *COPIES, *FORESTS]
EQUIVALENT = [
    Equivalent(
        "the draft does without the user's warp",
        "q = probs[tip]",
        "q = probs.probs_under(tip, SamplingParams())",
        ModelDrafter.propose,
        bug="B6",
        proof="The walk is exact for every declared distribution that is positive where it proposes: the "
        "ratio and the residual are made of the law the guess was drawn from, whichever it is. "
        "Only "
        "the acceptance falls.",
        laws=(JOINT,),
    ),
    Equivalent(
        "the draft's text lacks the newest token",
        "self.model.append(round.tokens)",
        "self.model.append(round.tokens[:-1] or round.tokens)",
        ModelDrafter.observe,
        bug="B19",
        proof="The guesses come from a law that is conditioned on the wrong text, and that law is "
        "the one declared; the walk is exact for every declared distribution.",
        laws=(JOINT,),
    ),
]
