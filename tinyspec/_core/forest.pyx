# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""A forest of counted tries, one tree an owner: drafts are grown after a suffix that is known. Twin: reference_forest.py.

For lookahead and suffix decoding. How windows are counted stands in windows.pyx, how texts grow and are taken back in
texts.pyx. A token costs O(length of the longest repeated suffix), a draft O(log) a node whatever the size of the tree: of its
siblings a node knows the next in order of frequency, so a candidate that is taken offers two more, its first child and its next
sibling.
"""

from libc.stdlib cimport realloc
from libc.string cimport memcpy

from tinyspec._core.texts cimport Texts
from tinyspec._core.windows cimport Candidate

from tinyspec._core.limits import MAX_DRAFT_NODES, check_range, read_ids, read_int
from tinyspec.errors import TinyspecError


cdef class Forest(Texts):
    """Count windows, find the longest suffix that is known, and grow a draft after it (see the twin for examples)."""

    # --- drafts ---------------------------------------------------------------------------------------------------

    cdef bint continued(self, int root, int n) noexcept nogil:
        """Whether the n newest tokens of `spell` are known, and what came next."""
        cdef int slot, node = self.walk(root, n, &slot)
        return node >= 0 and (self.slots[slot].after >= 0 if slot >= 0 else self.nodes[node].child >= 0)

    cdef int longest(self, int root, int most) noexcept nogil:
        """The longest suffix in `spell` that is continued: a suffix of what is known is known, so halve the interval."""
        cdef int low = 0, middle
        while low < most:
            middle = (low + most + 1) // 2
            if self.continued(root, middle):
                low = middle
            else:
                most = middle - 1
        return low

    cdef int spelled(self, suffix, int most) except -1:
        """Put at most so many of the newest tokens of a suffix into `spell`; returns how many."""
        cdef const int[::1] ids
        cdef int n
        most = min(most, self.depth - 1)
        if most < 1:
            return 0
        ids = read_ids(suffix[-most:])
        most = <int> min(<Py_ssize_t> most, ids.shape[0])
        for n in range(most):
            self.spell[n] = ids[ids.shape[0] - 1 - n]
        return most

    cdef void offer(self, double key, double share, int node, int slot, int depth, int parent) noexcept nogil:
        """Put a candidate into the heap; of equal keys the first to come is the first to go."""
        cdef int at = self.heap_top, up
        self.heap_top += 1
        self.arrivals += 1
        while at > 0:
            up = (at - 1) // 2
            if self.heap[up].key >= key:
                break
            self.heap[at] = self.heap[up]
            at = up
        self.heap[at] = Candidate(key, share, node, slot, depth, parent, self.arrivals)

    cdef Candidate take(self) noexcept nogil:
        """Take the best candidate out of the heap."""
        cdef Candidate best = self.heap[0], last = self.heap[self.heap_top - 1]
        cdef int at = 0, child = 1
        self.heap_top -= 1
        while child < self.heap_top:
            if child + 1 < self.heap_top and self.before(&self.heap[child + 1], &self.heap[child]):
                child += 1
            if not self.before(&self.heap[child], &last):
                break
            self.heap[at] = self.heap[child]
            at, child = child, 2 * child + 1
        self.heap[at] = last
        return best

    cdef inline bint before(self, Candidate* a, Candidate* b) noexcept nogil:
        return a.key > b.key or (a.key == b.key and a.order < b.order)

    cdef void child(self, int node, double share, int depth, int parent, bint by_share) noexcept nogil:
        """Offer a node among its siblings; `share` is that of its parent."""
        cdef int count = self.nodes[node].count
        cdef double own = share * count / self.nodes[self.nodes[node].parent].through
        self.offer(own if by_share else count, share, node, -1, depth, parent)

    cdef double expand(self, int root, int n, int budget, int deepest, bint by_share, double floor, double beat) noexcept nogil:
        """Add what follows the n newest tokens of `spell`, best first, until the draft has `budget` nodes. O(log) a node.

        Returns the sum of its shares; by share, it gives up (0) where that cannot reach `beat` any more.
        """
        cdef int slot, node = self.walk(root, n, &slot), at, known = self.made
        cdef double share, score = 0
        cdef Candidate candidate
        self.heap_top = self.arrivals = 0
        if node < 0:
            return 0
        if slot >= 0 and self.slots[slot].after >= 0:
            self.offer(1, 1, -1, self.slots[slot].after, 1, -1)
        elif slot < 0 and self.nodes[node].child >= 0:
            self.child(self.nodes[node].child, 1, 1, -1, by_share)
        deepest = min(deepest, self.depth - n)
        while self.heap_top > 0 and self.made < budget:
            candidate = self.take()
            if by_share and score + (budget - self.made) * candidate.key < beat:
                return 0
            node, slot, share = candidate.node, candidate.slot, candidate.share
            if node >= 0:
                share = share * self.nodes[node].count / self.nodes[self.nodes[node].parent].through
            if share < floor:
                continue
            score += share
            at = self.add(self.nodes[node].token if node >= 0 else self.slots[slot].token, candidate.parent, share, n, known)
            if node >= 0 and self.nodes[node].younger >= 0:
                self.child(self.nodes[node].younger, candidate.share, candidate.depth, candidate.parent, by_share)
            slot = self.nodes[node].tail if node >= 0 else slot
            if candidate.depth >= deepest:
                continue
            if slot >= 0:
                if self.slots[slot].after >= 0:
                    self.offer(share if by_share else 1, share, -1, self.slots[slot].after, candidate.depth + 1, at)
            elif self.nodes[node].child >= 0:
                self.child(self.nodes[node].child, share, candidate.depth + 1, at, by_share)
        return score

    cdef int add(self, int token, int parent, double share, int match, int known) noexcept nogil:
        """The place of this token below `parent` in the draft: among the first `known` nodes, or new."""
        cdef int* tokens = self.drawn
        cdef int* parents = self.drawn + self.heap_room
        cdef int at
        for at in range(parent + 1, known):
            if parents[at] == parent and tokens[at] == token:
                return at
        tokens[self.made], parents[self.made], self.shares[self.made] = token, parent, share
        self.drawn[4 * self.heap_room + self.made] = match
        self.made += 1
        return self.made - 1

    cdef int reserve(self, int budget) except -1:
        """Room for a draft of so many nodes: each candidate that is taken offers two, and may be in the draft already."""
        cdef void* grown
        cdef int room
        check_range("the number of draft tokens", budget, 0, MAX_DRAFT_NODES)
        room = 4 * budget + 4
        self.made = 0
        if room > self.heap_room:
            grown = realloc(self.heap, room * sizeof(Candidate))
            self.heap = <Candidate*> grown if grown else self.heap
            grown = realloc(self.shares, 2 * room * sizeof(double)) if grown else NULL
            self.shares = <double*> grown if grown else self.shares
            grown = realloc(self.drawn, 5 * room * sizeof(int)) if grown else NULL
            if grown == NULL:
                raise MemoryError()
            self.drawn, self.heap_room = <int*> grown, room
        return 0

    cdef tuple draft(self):
        cdef int at, n = self.made
        return ([self.drawn[at] for at in range(n)], [self.drawn[self.heap_room + at] for at in range(n)],
                [self.shares[at] for at in range(n)], [self.drawn[4 * self.heap_room + at] for at in range(n)])

    def gather(self, plan, suffix, int longest, int enough, int deepest):
        """A draft from several trees by frequency, in stages: the longest suffix first, shorter ones until it has enough.

        See the twin. O(log) a node and stage.
        """
        cdef int n, root, budget, place
        cdef list asked = [(self.trees.get(tree), read_int(most)) for tree, most in plan]
        cdef list roots = [(found[0], budget) for found, budget in asked if found is not None]
        cdef list matches
        self.reserve(max([budget for root, budget in roots], default=0))
        n = self.spelled(suffix, longest)  # from here on nothing runs that is not ours
        matches = [self.longest(root, n) for root, budget in roots]
        for n in range(max(matches, default=0), 0, -1):
            for place in range(len(roots)):
                if n <= <int> matches[place]:
                    root, budget = roots[place]
                    self.expand(root, n, budget, deepest, False, 0, 0)
            if self.made >= enough:
                break
        return self.draft()

    def best(self, trees, suffix, double factor, int most, int deepest, double floor):
        """The draft with the greatest sum of shares, of any tree and any suffix of n tokens: at most factor * n nodes.

        See the twin. A shorter suffix is not tried where it could not win if all its draft tokens were certain.
        """
        cdef int size, n, root, budget, match = 0, made = 0
        cdef double score, highest = 0
        cdef list roots = [found[0] for found in [self.trees.get(tree) for tree in trees] if found is not None]
        if not (factor >= 0 and floor == floor):
            raise TinyspecError(f"a draft needs a factor of at least 0 and a floor, got {factor} and {floor}")
        self.reserve(most)
        size = self.spelled(suffix, self.depth)  # from here on nothing runs that is not ours
        for root in roots:
            for n in range(self.longest(root, size), 0, -1):
                budget = <int> min(<double> most, factor * n)
                if budget <= highest:
                    break
                self.made = 0
                score = self.expand(root, n, budget, deepest, True, floor, highest - 1e-9)
                if score > highest:
                    highest, match, made = score, n, self.made
                    self.keep(2 * self.heap_room, 0, self.heap_room, 0)
        self.made = made
        self.keep(0, 2 * self.heap_room, 0, self.heap_room)
        return (*self.draft()[:3], [match] * made)

    cdef void keep(self, int to, int at, int share_to, int share_at) noexcept nogil:
        """Copy the draft aside, or back."""
        cdef size_t size = self.made * sizeof(int)
        memcpy(self.drawn + to, self.drawn + at, size)
        memcpy(self.drawn + to + self.heap_room, self.drawn + at + self.heap_room, size)
        memcpy(self.shares + share_to, self.shares + share_at, self.made * sizeof(double))

    def __getstate__(self):
        """All it knows: for each tree its windows in order, (token, count, what continues it), and its texts."""
        cdef int text, slot
        cdef dict texts = {}
        cdef list known = [(tree, root) for tree, (root, _) in list(self.trees.items())]
        cdef dict roots = {root: tree for tree, root in known}
        for text in range(self.text_top):
            slot, spelled = self.texts[text].last, []
            if self.texts[text].root >= 0:
                while slot >= 0:
                    spelled.append(self.slots[slot].token)
                    slot = self.slots[slot].before
                texts[text] = (roots[self.texts[text].root], spelled, self.texts[text].since)
        windows = {tree: self.below(root, self.depth) for tree, root in known}
        return {"depth": self.depth, "bound": self.bound, "windows": windows, "texts": texts}

    cdef list below(self, int node, int left):
        cdef int child = self.nodes[node].child, slot = self.nodes[node].tail
        cdef list found = []
        while child >= 0:
            found.append((self.nodes[child].token, self.nodes[child].count, self.below(child, left - 1)))
            child = self.nodes[child].younger
        while slot >= 0 and left > 0:
            slot, left = self.slots[slot].after, left - 1
            found.append(self.slots[slot].token if slot >= 0 else None)
        return found
