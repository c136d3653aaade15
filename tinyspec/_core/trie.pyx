# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""An n-gram index over several growing texts, for prompt lookup and LLMA. Twin: reference_trie.py.

A trie of depth max_n + 1 whose child pointers live in one open-addressing hash (node, token) -> node. Every node has a
suffix link (its n-gram less the first token) and a list, in order of appending, of the slots that continue it; a slot is one
appended token. Appending and taking back cost O(max_n) a token, a lookup O(max_n) and its continuation; memory is
O(tokens * max_n). Invariants: a node lives while its n-gram occurs; where an n-gram occurs all its suffixes do, so links
never dangle; `best` is the child with the highest count, the lowest token among equals.
"""

from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, malloc, realloc

from tinyspec._core.limits import MAX_NGRAM, check_range, read_ids
from tinyspec.errors import TinyspecError

WHICH = ("first", "last", "frequent")

cdef class NgramIndex:
    """Find where the last tokens occurred before, and what came next (see the twin for examples)."""

    def __cinit__(self, int max_n):
        if max_n < 1:
            raise TinyspecError(f"an n-gram index needs max_n >= 1, got {max_n}")
        check_range("max_n", max_n, 1, MAX_NGRAM)
        self.max_n = max_n
        self.texts = {}
        self.node_room, self.slot_room, self.table_size = 64, 64, 256
        self.node_free = self.slot_free = -1
        self.nodes = <Node*> malloc(self.node_room * sizeof(Node))
        self.slots = <Slot*> malloc(self.slot_room * sizeof(Slot))
        self.links = <int*> malloc(<size_t> self.slot_room * 2 * max_n * sizeof(int))
        self.table = <int*> malloc(self.table_size * sizeof(int))
        self.spell = <int*> malloc((max_n + 2) * sizeof(int))
        if not (self.nodes and self.slots and self.links and self.table and self.spell):
            raise MemoryError()
        for i in range(self.table_size):
            self.table[i] = -1
        self.new_node(-1, -1, -1)

    def __dealloc__(self):
        free(self.nodes); free(self.slots); free(self.links); free(self.table); free(self.spell)

    # --- nodes and their hash -------------------------------------------------------------------------------------

    cdef inline int64_t home(self, int parent, int token) noexcept nogil:
        cdef uint64_t key = (<uint64_t> <unsigned int> parent << 32) | <unsigned int> token
        key = (key ^ (key >> 29)) * <uint64_t> 0xBF58476D1CE4E5B9
        key = (key ^ (key >> 32)) * <uint64_t> 0x94D049BB133111EB
        return <int64_t> ((key ^ (key >> 31)) & <uint64_t> (self.table_size - 1))

    cdef int find(self, int parent, int token) noexcept nogil:
        cdef int64_t i = self.home(parent, token)
        cdef int node = self.table[i]
        while node >= 0 and (self.nodes[node].parent != parent or self.nodes[node].token != token):
            i = (i + 1) & (self.table_size - 1)
            node = self.table[i]
        return node

    cdef void place(self, int node) noexcept nogil:
        cdef int64_t i = self.home(self.nodes[node].parent, self.nodes[node].token)
        while self.table[i] >= 0:
            i = (i + 1) & (self.table_size - 1)
        self.table[i] = node

    cdef int make_room(self) except -1:
        """Make room for all that one token may add: where there is none, nothing is half done. Amortised O(max_n)."""
        cdef int most = self.max_n + 1, i
        cdef size_t width = 2 * self.max_n
        cdef void* grown
        while self.node_room - self.live - 1 < most:  # the root is not counted as live
            grown = realloc(self.nodes, 2 * <size_t> self.node_room * sizeof(Node)) if self.node_room <= INT_MAX // 2 else NULL
            if grown == NULL:
                raise MemoryError()
            self.nodes, self.node_room = <Node*> grown, 2 * self.node_room
        if self.slot_free < 0 and self.slot_top == self.slot_room:
            grown = realloc(self.slots, 2 * <size_t> self.slot_room * sizeof(Slot)) if self.slot_room <= INT_MAX // 2 else NULL
            self.slots = <Slot*> grown if grown else self.slots
            grown = realloc(self.links, 2 * <size_t> self.slot_room * width * sizeof(int)) if grown else NULL
            if grown == NULL:
                raise MemoryError()
            self.links, self.slot_room = <int*> grown, 2 * self.slot_room
        while 2 * (<int64_t> self.live + most) > self.table_size:
            grown = realloc(self.table, 2 * self.table_size * sizeof(int))
            if grown == NULL:
                raise MemoryError()
            self.table, self.table_size = <int*> grown, 2 * self.table_size
            for j in range(self.table_size):
                self.table[j] = -1
            for i in range(1, self.node_top):
                if self.nodes[i].count > 0:
                    self.place(i)
        return 0

    cdef int new_node(self, int parent, int token, int link) noexcept nogil:
        """Make the node `parent` + `token`, hashed and first among its siblings. There is room for it. O(1)."""
        cdef int node
        if self.node_free >= 0:
            node, self.node_free = self.node_free, self.nodes[self.node_free].younger
        else:
            node, self.node_top = self.node_top, self.node_top + 1
        self.nodes[node] = Node(parent, token, link, 0, -1, -1, -1, -1, -1, -1, 0)
        if parent >= 0:
            self.nodes[node].depth = self.nodes[parent].depth + 1
            self.nodes[node].younger = self.nodes[parent].child
            if self.nodes[parent].child >= 0:
                self.nodes[self.nodes[parent].child].older = node
            self.nodes[parent].child = node
            self.place(node)
            self.live += 1
        return node

    cdef void drop_node(self, int node) noexcept nogil:
        """Unlink and unhash a node that occurs no more, closing the gap in its probe sequence."""
        cdef Node* gone = &self.nodes[node]
        cdef int64_t mask = self.table_size - 1, gap = self.home(gone.parent, gone.token), i, want
        if gone.older >= 0:
            self.nodes[gone.older].younger = gone.younger
        else:
            self.nodes[gone.parent].child = gone.younger
        if gone.younger >= 0:
            self.nodes[gone.younger].older = gone.older
        while self.table[gap] != node:
            gap = (gap + 1) & mask
        i = (gap + 1) & mask
        while self.table[i] >= 0:
            want = self.home(self.nodes[self.table[i]].parent, self.nodes[self.table[i]].token)
            if ((i - want) & mask) >= ((i - gap) & mask):
                self.table[gap] = self.table[i]
                gap = i
            i = (i + 1) & mask
        self.table[gap] = -1
        gone.younger, self.node_free = self.node_free, node
        self.live -= 1

    cdef int descend(self, int state, int token, int limit) noexcept nogil:
        """The node of the longest known n-gram, n <= limit, that ends in the state's n-gram + token; 0 is the root."""
        cdef int child
        while state >= 0:
            if self.nodes[state].depth < limit:
                child = self.find(state, token)
                if child >= 0:
                    return child
            state = self.nodes[state].link
        return 0

    cdef int end_of(self, int slot, int limit) noexcept nogil:
        """The node of the last `limit` tokens up to a slot of a text (all of them occur)."""
        cdef int n = 0, state = 0
        while slot >= 0 and n < limit:
            self.spell[n] = self.slots[slot].token
            slot = self.slots[slot].before
            n += 1
        while n > 0:
            n -= 1
            state = self.find(state, self.spell[n])
        return state

    cdef inline bint better(self, int a, int b) noexcept nogil:
        """Whether child a is more frequent than child b, ties by lowest token."""
        cdef Node x = self.nodes[a], y = self.nodes[b]
        return x.count > y.count or (x.count == y.count and x.token < y.token)

    # --- texts ----------------------------------------------------------------------------------------------------

    cdef int push(self, int last, int state, int token) except -1:
        """Append one token after slot `last`, whose longest n-gram (n <= max_n) is `state`; returns the new slot. Without memory for
        it nothing changes."""
        self.make_room()
        cdef int slot, child, depth, link, longer = -1
        cdef size_t width = 2 * self.max_n
        if self.slot_free >= 0:
            slot, self.slot_free = self.slot_free, self.slots[self.slot_free].after
        else:
            slot, self.slot_top = self.slot_top, self.slot_top + 1
        self.slots[slot] = Slot(token, last, -1)
        if last >= 0:
            self.slots[last].after = slot
        while state >= 0:  # from the longest n-gram that the token continues to the empty one
            depth, link = self.nodes[state].depth, self.nodes[state].link
            child = self.find(state, token)
            if child < 0:
                child = self.new_node(state, token, 0)
            self.nodes[child].count += 1
            if longer >= 0:
                self.nodes[longer].link = child
            longer = child
            if depth > 0:
                self.links[slot * width + 2 * depth - 2] = self.nodes[state].last
                self.links[slot * width + 2 * depth - 1] = -1
                if self.nodes[state].last >= 0:
                    self.links[self.nodes[state].last * width + 2 * depth - 1] = slot
                else:
                    self.nodes[state].first = slot
                self.nodes[state].last = slot
                if self.nodes[state].best < 0 or self.better(child, self.nodes[state].best):
                    self.nodes[state].best = child
            state = link
        return slot

    cdef void pop(self, int slot) noexcept nogil:
        """Take back the last slot of a text."""
        cdef int state = self.end_of(self.slots[slot].before, self.max_n), child, back, ahead, depth, other
        cdef size_t width = 2 * self.max_n
        while state >= 0:  # longest first, so that no link to a dropped node remains
            depth = self.nodes[state].depth
            child = self.find(state, self.slots[slot].token)
            self.nodes[child].count -= 1
            if depth > 0:
                back = self.links[slot * width + 2 * depth - 2]
                ahead = self.links[slot * width + 2 * depth - 1]
                if back >= 0:
                    self.links[back * width + 2 * depth - 1] = ahead
                else:
                    self.nodes[state].first = ahead
                if ahead >= 0:
                    self.links[ahead * width + 2 * depth - 2] = back
                else:
                    self.nodes[state].last = back
            if self.nodes[child].count == 0:
                self.drop_node(child)
            if self.nodes[state].best == child:
                self.nodes[state].best = other = self.nodes[state].child
                while other >= 0:
                    if self.better(other, self.nodes[state].best):
                        self.nodes[state].best = other
                    other = self.nodes[other].younger
            state = self.nodes[state].link
        if self.slots[slot].before >= 0:
            self.slots[self.slots[slot].before].after = -1
        self.slots[slot].after, self.slot_free = self.slot_free, slot

    def __getstate__(self):
        """All it knows, as its twin keeps it: texts, and for every n-gram the places (text, position) that continue it."""
        cdef int slot, node, state, length
        cdef dict texts = {}, where = {}, places = {}
        for text, (slot, length, _) in self.texts.items():
            texts[text] = [0] * length
            while slot >= 0:
                length -= 1
                where[slot], texts[text][length] = (text, length), self.slots[slot].token
                slot = self.slots[slot].before
        for node in range(1, self.node_top):
            slot, state, gram = self.nodes[node].first if self.nodes[node].count > 0 else -1, node, ()
            while slot >= 0 and state > 0:
                gram, state = (self.nodes[state].token, *gram), self.nodes[state].parent
            while slot >= 0:
                places.setdefault(gram, []).append(where[slot])
                slot = self.links[<size_t> slot * 2 * self.max_n + 2 * self.nodes[node].depth - 1]
        return {"max_n": self.max_n, "texts": texts, "places": places}

    def length(self, int64_t text):
        """Tokens of a text; 0 for one never seen."""
        return self.texts.get(text, (-1, 0, 0))[1]

    def append(self, int64_t text, tokens):
        """Grow a text. Amortised O(max_n) a token.

        Where one of the tokens is not an int32, nothing is appended (TypeError, OverflowError).
        """
        cdef const int[::1] ids = read_ids(tokens)
        cdef int slot, length, state
        cdef Py_ssize_t i
        slot, length, state = self.texts.get(text, (-1, 0, 0))
        try:
            for i in range(ids.shape[0]):
                slot = self.push(slot, state, ids[i])
                length += 1
                state = self.find(state, ids[i])
                if self.nodes[state].depth > self.max_n:
                    state = self.nodes[state].link
        finally:
            self.texts[text] = (slot, length, state)

    def rewind(self, int64_t text, int length):
        """Take a text back to its first `length` tokens. O(max_n^2) a token, more where the most frequent child changes."""
        cdef int slot, now, before
        slot, now, _ = self.texts.get(text, (-1, 0, 0))
        if not 0 <= length <= now:
            raise TinyspecError(f"cannot rewind text {text} of {now} tokens to {length}")
        while now > length:
            before = self.slots[slot].before
            self.pop(slot)
            slot, now = before, now - 1
        self.texts[text] = (slot, now, self.end_of(slot, self.max_n))

    def lookup(self, suffix, int k, max_n=None, int min_n=1, str which="last"):
        """Up to k tokens that followed the longest n-gram, min_n <= n <= max_n, that `suffix` ends with; [] if none.

        O(max_n + k); "frequent" also passes over the places since the most frequent token was last appended.
        """
        cdef int limit = self.max_n if max_n is None else max_n, state = 0, slot, token
        cdef list out = []
        cdef const int[::1] ids
        cdef Py_ssize_t i
        if which not in WHICH:
            raise TinyspecError(f"which is one of {', '.join(WHICH)}, got '{which}'")
        if not 1 <= min_n <= limit <= self.max_n:
            raise TinyspecError(f"an index of {self.max_n}-grams needs 1 <= min_n <= max_n, got {min_n} and {limit}")
        ids = read_ids(suffix[-limit:])  # before the search: what reads them may change the index
        for i in range(ids.shape[0]):
            state = self.descend(state, ids[i], limit)
        while state > 0 and self.nodes[state].first < 0:
            state = self.nodes[state].link
        if state <= 0 or self.nodes[state].depth < min_n:
            return out
        slot = self.nodes[state].first if which == "first" else self.nodes[state].last
        if which == "frequent":
            token = self.nodes[self.nodes[state].best].token
            while self.slots[slot].token != token:
                slot = self.links[<size_t> slot * 2 * self.max_n + 2 * self.nodes[state].depth - 2]
        while slot >= 0 and len(out) < k:
            out.append(self.slots[slot].token)
            slot = self.slots[slot].after
        return out
