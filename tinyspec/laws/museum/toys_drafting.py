"""Look-alikes of the methods that draft: what goes by their name and lacks what makes them."""

from functools import partial

from tinyspec.decoding.decode import BaseDrafter, Decoder
from tinyspec.decoding.kernels import Kernels
from tinyspec.decoding.modeldraft import ModelDrafter, SharedSessionDrafter
from tinyspec.decoding.verify import verify_tree
from tinyspec.laws.exact.joint import JOINT
from tinyspec.laws.museum.patching import Patch
from tinyspec.laws.museum.rows import Toy
from tinyspec.laws.museum.verification import MIDDLE, WALKED
from tinyspec.laws.traps import auto as auto_traps
from tinyspec.laws.traps import autoregressive as plain_traps
from tinyspec.laws.traps import cascade as cascade_traps
from tinyspec.laws.traps import llma as llma_traps
from tinyspec.laws.traps import lookahead_jacobi as window_traps
from tinyspec.laws.traps import lookahead_trie as trie_traps
from tinyspec.laws.traps import planner as planner_traps
from tinyspec.laws.traps import rest as rest_traps
from tinyspec.laws.traps import self_speculative as skip_traps
from tinyspec.laws.traps import sequoia as sequoia_traps
from tinyspec.laws.traps import speculative_contrastive as contrast_traps
from tinyspec.laws.traps import staged as staged_traps
from tinyspec.laws.traps import suffix_decoding as suffix_traps
from tinyspec.laws.traps import token_recycling as recycling_traps
from tinyspec.laws.traps import triforce as triforce_traps
from tinyspec.speculative import auto, treedraft
from tinyspec.speculative.drafting import (
    cascade,
    planner,
    self_speculative,
    sequoia,
    staged,
    suffix_decoding,
)
from tinyspec.speculative.drafting.lookahead_jacobi import LookaheadJacobiDrafter
from tinyspec.speculative.drafting.rest import RestDrafter
from tinyspec.speculative.drafting.self_speculative import SelfSpeculativeDrafter
from tinyspec.speculative.drafting.suffix_decoding import SuffixDecodingDrafter
from tinyspec.speculative.drafting.token_recycling import TokenRecyclingDrafter
from tinyspec.speculative.integrated import lookahead_trie, speculative_contrastive, triforce
from tinyspec.speculative.integrated.llma import LlmaDrafter
from tinyspec.speculative.lookup import RequestForest
from tinyspec.speculative.nested import NestedDrafter

_llma = partial(Toy, technique="llma", function=LlmaDrafter.propose)
_auto = partial(Toy, technique="auto", function=auto.auto)
_trie = partial(Toy, technique="lookahead_trie")
_suffix = partial(Toy, technique="suffix_decoding", function=SuffixDecodingDrafter.look_up)
_rest = partial(Toy, technique="rest")
_recycling = partial(Toy, technique="token_recycling")
_window = partial(Toy, technique="lookahead_jacobi", function=LookaheadJacobiDrafter.propose)
_skipping = partial(Toy, technique="self_speculative")
_cascade = partial(Toy, technique="cascade", function=cascade.cascade)
_staged = partial(Toy, technique="staged")
_sequoia = partial(Toy, technique="sequoia")
_triforce = partial(Toy, technique="triforce")
_contrast = partial(
    Toy,
    technique="speculative_contrastive",
    function=speculative_contrastive.speculative_contrastive,
)
_planner = partial(Toy, technique="planner", function=planner.recommend_drafts)

PLAIN = [
    Toy(
        "no cache",
        "passes_before = len(self.forward_log)",
        """text = list(self.context)
self.target.rewind(0)
self.target.extend(text)
passes_before = len(self.forward_log)""",
        Decoder.step,
        technique="autoregressive",
        law=plain_traps.ROWS,
    ),
]

# ------------------------------------------------------------------ copies

COPIED = "copied = self.index.lookup(suffix, k, self.longest, self.n, self.which)"
POLICY = "policy = Goodput("
ALWAYS = """from tinyspec.speculative.integrated.llma import LlmaDrafter
drafter = LlmaDrafter(request.references, 1, 8, {}, "last", own=True)
return request.decoder(drafter, verify_tree)
policy = Goodput("""
COPIES = [
    _llma(
        "prompt lookup",
        "enumerate(references,",
        "enumerate((),",
        function=LlmaDrafter.__init__,
        law=llma_traps.OUTSIDE,
    ),
    _llma("a token a call", "min(self.k, max", "min(1, max", law=llma_traps.BLOCKS),
    _llma(
        "index rebuilt each step",
        "suffix = context[-self.longest :]",
        """for text, tokens in enumerate(self.references, start=1):
    NgramIndex(self.longest).append(text, tokens)
suffix = context[-self.longest :]""",
        law=llma_traps.ONCE,
        also=(
            Patch(
                LlmaDrafter.__init__,
                "self.index = NgramIndex(longest)",
                "self.index, self.references = NgramIndex(longest), references",
            ),
        ),
    ),
    _llma(
        "the newest token alone is matched",
        COPIED,
        COPIED.replace("self.longest, self.n", "1, 1"),
        law=llma_traps.LONGEST,
    ),
    _auto("whatever it costs", POLICY, ALWAYS.format("k"), law=auto_traps.DEAR),
    Toy(
        "a head that goes on without the states that it missed",
        "self.extend(tokens, scores, is_asked=True)",
        """last = scores._replace(hidden=scores.hidden[:, -1:])
self.extend(tokens[-1:], last, is_asked=True)
self.read += len(tokens) - 1""",
        auto.LazyHead.catch_up,
        technique="auto",
        law=auto_traps.HEADED,
    ),
    Toy(
        "a head that reads the states of another source's draft in a wrong order",
        "(ROOT, *round.verdict.accepted)",
        "(*round.verdict.accepted, ROOT)",
        auto.LazyHead.observe,
        technique="auto",
        law=auto_traps.HEADED,
    ),
    _auto(
        "never",
        "self.option = self.policy.choose(offers)",
        "self.option = PLAIN",
        function=auto.AutoDrafter.propose,
        law=auto_traps.FREE,
    ),
    _auto("one token whatever it costs", POLICY, ALWAYS.format(1), law=auto_traps.FREE),
    _auto("always as much as there is", POLICY, ALWAYS.format("k"), law=auto_traps.STOPS),
]

# ------------------------------------------------------------------ what is remembered

PRUNED = "if self.insert(OUTPUTS, tokens) > self.forest.bound: self.forest.prune(OUTPUTS)"
BEST = "found: LookupDraft = self.forest.best("
TABLE = """from tinyspec.speculative.integrated.llma import LlmaDrafter
return request.decoder(LlmaDrafter([], 1, 8, 1, "last", own=True), verify_tree)
forest, numbers = shared_forest("""
FOUND = (
    "found = self._longest(context, min(self.length, max_draft_depth), self.matches, self.nodes)"
)
REMEMBERED = [
    _trie(
        "a table of the prompt's n-grams",
        "bound, remember",
        "bound, False",
        lookahead_trie.lookahead_trie,
        law=trie_traps.REMEMBERED,
    ),
    _trie(
        "one branch a call",
        "branch_length, mode, price",
        'branch_length, "single", price',
        lookahead_trie.lookahead_trie,
        law=trie_traps.BRANCHES,
    ),
    _trie(
        "prompts are kept",
        "self.insert(self.own, tokens)",
        "self.insert(OUTPUTS, tokens)",
        RequestForest.extend,
        law=trie_traps.ELIMINATED,
    ),
    _trie(
        "the longest match alone",
        "enough = min(self.branch, self.budget)",
        "enough = 1",
        lookahead_trie.LookaheadTrieDrafter.propose,
        law=trie_traps.STAGES,
    ),
    _trie(
        "a trie that only grows",
        PRUNED,
        "self.insert(OUTPUTS, tokens)",
        RequestForest.insert_outputs,
        law=trie_traps.PRUNED,
    ),
    _suffix(
        "k tokens, however short the match",
        "suffix, self.alpha, most",
        "suffix, 99.0, most",
        law=suffix_traps.ADAPTS,
    ),
    _suffix(
        "the last continuation",
        "forest, numbers = shared_forest(",
        TABLE,
        function=suffix_decoding.suffix_decoding,
        law=suffix_traps.FREQUENT,
    ),
    _suffix(
        "the longest match wins",
        BEST,
        f"""depth = self.forest.depth
found = self.forest.gather([(self.own, most)], suffix, depth, 1, max_draft_depth)
size = max(1, int(self.alpha * max(found[3], default=1)))
return tuple(column[:size] for column in found)
{BEST}""",
        law=suffix_traps.SCORED,
    ),
    _suffix(
        "one tree, of this request",
        "bound, remember",
        "bound, False",
        function=suffix_decoding.suffix_decoding,
        law=suffix_traps.BOTH,
    ),
    _rest(
        "a table of n-grams with one continuation each",
        "store.search(context, self.shortest, self.longest, *limits)",
        "store.search(context[-1:], 1, 1, *limits[:-1], 1)",
        RestDrafter._longest,
        law=rest_traps.LONGEST,
    ),
    _rest(
        "the continuations that come first",
        FOUND,
        f"""{FOUND.replace("self.nodes", "1 << 16")}
tree = TokenTree(found.tokens, found.parents)
kept = sorted(range(len(tree.tokens)), key=lambda node: tree.tokens_on(tree.path(node)))
kept = kept[: self.nodes]
at = {{-1: -1}} | {{node: n for n, node in enumerate(kept)}}
columns = zip(*((tree.tokens[n], at[tree.parents[n]], found.weights[n]) for n in kept))
tokens, parents, weights = map(list, columns)
found = found._replace(tokens=tokens, parents=parents, weights=weights)""",
        RestDrafter.propose,
        law=rest_traps.WEIGHED,
    ),
    _rest(
        "a draw a path",
        WALKED,
        """for leaf in (node for node in range(len(tree.tokens)) if node not in tree.parents):
    path = tree.path(leaf)
    drawn = (rng.draw(p[tree.parents[node]]) == tree.tokens[node] for node in path)
    n = next((at for at, same in enumerate(drawn) if not same), len(path))
    if n:
        return path[:n], rng.draw(p[path[n - 1]]), ()
return (), rng.draw(p[-1]), ()""",
        Kernels.verify_tree,
        law=JOINT,
        also=(Patch(verify_tree, "all(q is None for q in tree.draft_probs)", "False"),),
    ),
    _recycling(
        "rejected distributions are thrown away",
        "order = [*rejected, ROOT,",
        "order = [ROOT,",
        TokenRecyclingDrafter.observe,
        law=recycling_traps.RECYCLED,
    ),
    _recycling(
        "bigrams of the text",
        "n, text = len(round.tree.tokens), set(round.verdict.accepted)",
        """vocabulary = len(round.scores.logits[0])
return self.matrix.learn([self.newest], [[round.tokens[0]]], vocabulary)""",
        TokenRecyclingDrafter.observe,
        law=recycling_traps.RECYCLED,
    ),
    _recycling(
        "first candidates only",
        "build_rank_tree(nodes,",
        "build_rank_tree(1,",
        TokenRecyclingDrafter.__init__,
        law=recycling_traps.RECYCLED,
    ),
    _recycling(
        "a matrix a request",
        "return None",
        "self.matrix.rows = self.matrix.rows[:0]",
        BaseDrafter.end,
        law=recycling_traps.KEPT,
    ),
    _recycling(
        "a balanced tree",
        "-worth * chance",
        "-worth",
        treedraft.build_static_tree,
        law=recycling_traps.BEST,
    ),
]

# ------------------------------------------------------------------ a window

CALL = "scores = self.target.score(tree, self.drafter.hidden_layers)"
WINDOWS = [
    _window(
        "Jacobi iteration alone",
        "if self.window is None:",
        """prompt = [context[at % len(context)] for at in range(self.width)]
return TokenTree.chain((getattr(self, "row", None) or prompt)[:max_draft_depth])
if self.window is None:""",
        law=window_traps.DIAGONALS,
        also=(
            Patch(
                LookaheadJacobiDrafter.observe,
                "assert self.window is not None",
                """said = [max(range(len(row)), key=row.__getitem__) for row in round.scores.logits]
self.row = said[len(round.tokens) :] + said[-1:] * len(round.tokens)
return""",
            ),
        ),
    ),
    _window(
        "n-grams of the text alone",
        "tokens, parents = list[int](), list[int]()",
        """for at in range(len(context) - self.n + 1):
    self.pool.add(context[at : at + self.n])
tokens, parents = list[int](), list[int]()""",
        law=window_traps.AHEAD,
        also=(
            Patch(
                LookaheadJacobiDrafter.propose,
                "self._add_window(self.window, max_draft_depth, tokens, parents)",
                "",
            ),
        ),
    ),
    _window(
        "a call for each branch",
        CALL,
        f"self.target.score(tree)\n{CALL}",
        function=Decoder.step,
        law=window_traps.ONE,
    ),
]

# ------------------------------------------------------------------ the target without layers

VIEW = "session.view(Plan(skip=skip))"
SKIPS = [
    _skipping(
        "greedy drafts judged by the softmax",
        "token = rng.draw(q)",
        "token = list(q).index(max(q))",
        ModelDrafter.propose,
        law=JOINT,
    ),
    _skipping(
        "one bit a layer",
        VIEW,
        "session.view(Plan(skip=frozenset(bit // 2 * 2 + part for bit in skip "
        "for part in (0, 1))))",
        SelfSpeculativeDrafter.__init__,
        law=skip_traps.BITS,
    ),
    _skipping(
        "the same weights as a draft model",
        VIEW,
        "type(session)(session.model, plan=Plan(skip=skip), forward_log=session.forward_log)",
        SelfSpeculativeDrafter.__init__,
        law=skip_traps.CACHE,
        also=(
            Patch(
                SharedSessionDrafter.extend,
                "return None",
                "return ModelDrafter.extend(self, tokens, scores)",
            ),
            Patch(
                SelfSpeculativeDrafter.observe,
                "self.exit = self.exit.update(",
                "SharedSessionDrafter.__base__.observe(self, round)\nself.exit = self.exit.update(",
            ),
        ),
    ),
    _skipping(
        "drafts of one length",
        "bool(unsure) or super()",
        "super()",
        SelfSpeculativeDrafter.should_stop,
        law=skip_traps.ENDS,
    ),
    _skipping(
        "a fixed threshold",
        "if not drafted:",
        "if True:",
        self_speculative.DraftExit.update,
        law=skip_traps.ADAPTS,
    ),
    _skipping(
        "the cap is forgotten",
        "0.0 if drafted == gamma else -EPSILON",
        "-EPSILON",
        self_speculative.update_threshold,
        law=skip_traps.ADAPTS,
    ),
    _skipping(
        "random sets",
        "if len(self.told) >= 2**self.n - 1:",
        """random = np.random.default_rng((self.seed, len(self.told)))
return frozenset(bit for bit in range(self.n) if random.random() > 0.5)
if len(self.told) >= 2**self.n - 1:""",
        self_speculative.SkipSetSearch.suggest,
        law=skip_traps.LEARNS,
    ),
]

# ------------------------------------------------------------------ several levels, and trees

LEVELS = [
    _cascade(
        "two levels with a constant gamma",
        "return request.decoder(CascadeDrafter(below, k[0], ends, notifies=True), verify_tree)",
        """from tinyspec.decoding.modeldraft import ModelDrafter
return request.decoder(ModelDrafter(request.drafts[0], sum(k[0])), verify_tree)""",
        law=cascade_traps.CALLS,
    ),
    _cascade(
        "quotas without recursion",
        "CascadeDrafter(list(below), row, ends) if vertical else BaseDrafter()",
        "BaseDrafter()",
        law=cascade_traps.CALLS,
    ),
    _cascade("recursion without quotas", "if not horizontal:", "if True:", law=cascade_traps.CALLS),
    _cascade(
        "the distribution of the smallest model",
        "dists += round.output_probs if self.is_exact else [None] * len(round.tokens)",
        """small = round.tree.draft_probs[0] if round.tree.tokens else None
each = zip(round.tokens, round.output_probs, strict=True)
dists += [small if small and small[x] else row for x, row in each]""",
        function=NestedDrafter.write,
        law=JOINT,
    ),
    _cascade(
        "the newest token alone is matched",
        "self.longest, self.table",
        "longest = 1\nself.longest, self.table",
        function=cascade.MaxGramDrafter.__init__,
        law=cascade_traps.LONGEST,
    ),
    _staged(
        "a tree and no second stage",
        "range(min(self.guesses, most - 1, deepest - 1 - len(path)))",
        "range(0)",
        staged.StagedDrafter.run_ahead,
        law=staged_traps.AHEAD,
    ),
    _staged(
        "the n-gram model's distribution is declared",
        "return [(first, q),",
        "return [(first, guess[1]),",
        staged.draw_siblings,
        law=staged_traps.LIKELY,
    ),
    _staged(
        "a guessed end of text is not judged",
        "computed.guesses[path] = token, g",
        "computed.guesses |= {} if token in self.ends else {path: (token, g)}",
        staged.StagedDrafter.guess_token,
        law=staged_traps.LIKELY,
    ),
    _staged(
        "n-grams straight to the target",
        "deepest = max_draft_depth",
        """text = list(context)
while self.table and len(text) < len(context) + min(3, max_draft_depth):
    guess = self.table.most_likely(text)
    if guess is None:
        break
    text.append(guess)
return TokenTree.chain(text[len(context) :])
deepest = max_draft_depth""",
        staged.StagedDrafter.propose,
        law=staged_traps.DRAFTS,
    ),
    _staged(
        "a fixed tree",
        "drafter = StagedDrafter(",
        """from tinyspec.speculative.treedraft import TreeDrafter, branching_parents
return request.decoder(TreeDrafter(draft, branching_parents((2, 2))), verify_tree)
drafter = StagedDrafter(""",
        staged.staged,
        law=staged_traps.GUIDED,
    ),
    _triforce(
        "a window and no retrieval",
        "session = self.view.session",
        """session = self.view.session
c = session.model.config
window = VisibleSet.for_all_layers((0,), newest + 1 - self.budget, c.n_layers, c.n_kv_heads)
return Plan(visible=window)""",
        triforce.TriforceDrafter.retrieve_chunks,
        law=triforce_traps.NEEDLE,
    ),
    _triforce(
        "two levels",
        "TriforceDrafter(middle, gamma2, budget, chunk, rebuild)",
        "StreamingDrafter(small, gamma2, ends, sink, window)",
        triforce.triforce,
        law=triforce_traps.NEEDLE,
    ),
    _triforce(
        "a draft that ends with its context",
        "StreamingDrafter(small, gamma1, ends, sink, window)",
        "ModelDrafter(small, gamma1, ends, limit)",
        triforce.triforce,
        law=triforce_traps.STREAMING,
    ),
    _triforce(
        "a window without the first tokens",
        "held = self.text[: self.sink] + self.text[self.sink + self.gap :]",
        "held = self.text[self.gap :]",
        triforce.StreamingDrafter.read_anew,
        law=triforce_traps.STREAMING,
    ),
    _triforce(
        "the middle draws again",
        MIDDLE,
        f"""def verify(tree, p, rng, right=decoder.verifier):
    verdict = right(tree, p, rng)
    at = verdict.accepted[-1] if verdict.accepted else -1
    return verdict._replace(next=rng.draw(p[at])) if verdict.rejected else verdict
decoder.verifier = verify
{MIDDLE}""",
        NestedDrafter.__init__,
        law=JOINT,
    ),
    _sequoia(
        "noise kept over rounds",
        "began = self.clock()",
        """rng = self.stream = getattr(self, "stream", rng)
rng._index = 0
began = self.clock()""",
        sequoia.SequoiaDrafter.propose,
        law=JOINT,
    ),
    _sequoia(
        "a tree made by hand",
        "best, sizes = solve_tree_dp(",
        """from tinyspec.speculative.treedraft import branching_parents
return branching_parents((2,) * depth)[:nodes]
best, sizes = solve_tree_dp(""",
        sequoia.best_tree,
        law=sequoia_traps.BEST,
    ),
    _sequoia(
        "as wide as may be",
        "best, sizes = solve_tree_dp(",
        """return tuple(0 if depth > 1 and n >= len(accepts) else ROOT for n in range(nodes))
best, sizes = solve_tree_dp(""",
        sequoia.best_tree,
        law=sequoia_traps.BEST,
    ),
    _sequoia(
        "a share for each child alone",
        "chances.append(reached * accept_prob)",
        "chances.append(accept_prob)\ncontinue",
        sequoia.acceptance_by_rank,
        law=sequoia_traps.VECTOR,
    ),
    _sequoia(
        "a sum of shares without the path",
        "reach[parent] * (accepts",
        "(accepts",
        sequoia.expected_tree_tokens,
        law=sequoia_traps.TOKENS,
    ),
]

# ------------------------------------------------------------------ contrast, and a forecast

TARGET = "target = JointTarget([request.target, amateur], make_contrast(beta, plausibility))"
JUDGED = """from tinyspec.decoding.verify import Verdict, residual
make = make_contrast(beta, plausibility)
def find_probs(p, which, node):
    row = p.scores.logits[node + 1]  # the expert's, then the contrast's
    half = len(row) // 2
    return p.sampling.probs(row[:half] if which == "expert" else row[half:])
def verify(tree, p, rng):
    n = len(tree.tokens)
    for node, (x, q) in enumerate(zip(tree.tokens, tree.draft_probs, strict=True)):
        if not rng.accept(find_probs(p, "{}", node - 1)[x] / q[x]):
            left = residual(find_probs(p, "{}", node - 1), q)
            return Verdict(tuple(range(node)), rng.draw(left), (node,))
    return Verdict(tuple(range(n)), rng.draw(find_probs(p, "{}", n - 1)))
both = lambda rows, text, path: [*rows[0], *make(rows, text, path)]
joint = replace(request, target=JointTarget([request.target, amateur], both))
return joint.decoder(SharedSessionDrafter(amateur, gamma), verify)"""
ADVICE = "tokens_per_second(draft.tar(n), n, draft.step, verify[n])"
CONTRASTS = [
    _contrast(
        "the contrast replaces rejected tokens alone",
        TARGET,
        JUDGED.format("expert", "contrast", "expert"),
        law=contrast_traps.CONTRAST,
    ),
    _contrast(
        "acceptance against the expert",
        TARGET,
        JUDGED.format("expert", "contrast", "contrast"),
        law=contrast_traps.CONTRAST,
    ),
    _contrast(
        "the expert's residual",
        TARGET,
        JUDGED.format("contrast", "expert", "contrast"),
        law=contrast_traps.CONTRAST,
    ),
    _contrast(
        "the expert's bonus",
        TARGET,
        JUDGED.format("contrast", "contrast", "expert"),
        law=contrast_traps.CONTRAST,
    ),
    _contrast(
        "no plausibility",
        TARGET,
        TARGET.replace("plausibility", "0.0"),
        law=contrast_traps.CONTRAST,
    ),
    _contrast(
        "an amateur for each purpose",
        TARGET,
        TARGET.replace("amateur]", "amateur.model.session(request.forward_log)]"),
        law=contrast_traps.ONCE,
        also=(
            Patch(
                speculative_contrastive.speculative_contrastive,
                "SharedSessionDrafter(amateur",
                "SharedSessionDrafter.__base__(amateur",
            ),
        ),
    ),
    _planner("ranks by acceptance", ADVICE, "draft.tar(n)", law=planner_traps.FASTEST),
    _planner(
        "costs typed in",
        ADVICE,
        "tokens_per_second(draft.tar(n), n, 0.1, 1.0)",
        law=planner_traps.FASTEST,
    ),
    _planner(
        "TAR with the target's token",
        "(tar + 1)",
        "tar",
        function=planner.tokens_per_second,
        law=planner_traps.FORECAST,
    ),
    _planner(
        "cost by the number of weights",
        "return DraftProfile(name, seconds / tokens,",
        """models = request.drafts[0].model, request.target.model
small, large = (model.config.parameters() for model in models)
return DraftProfile(name, small / large,""",
        function=planner.profile_draft,
        law=planner_traps.MEASURED,
    ),
]

TOYS = [*PLAIN, *COPIES, *REMEMBERED, *WINDOWS, *SKIPS, *LEVELS, *CONTRASTS]
