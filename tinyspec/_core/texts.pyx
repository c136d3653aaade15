# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""The texts of a forest: they grow, are taken back and closed; trees are halved and dropped. Below: windows.pyx, above: forest.pyx."""

cimport cython
from libc.stdlib cimport realloc

from tinyspec._core.windows cimport Candidate, Node, Slot, Text, Windows, widened

from tinyspec._core.limits import read_ids
from tinyspec.errors import TinyspecError


@cython.auto_pickle(False)  # what a forest is, forest.pyx says
cdef class Texts(Windows):
    """Trees of windows by their owner, and the texts that grow in them (see the twin for examples)."""

    cdef void spelling(self, int text, int most) noexcept nogil:
        """Write the newest tokens of a text into `spell`, the newest first."""
        cdef int slot = self.texts[text].last, n = 0
        while slot >= 0 and n < most:
            self.spell[n] = self.slots[slot].token
            slot, n = self.slots[slot].before, n + 1

    cdef int walk(self, int root, int n, int* slot) noexcept nogil:
        """The node of the n newest tokens of `spell`, or of the tail that stands for them, with the slot reached; -1: unknown."""
        cdef int node = root
        slot[0] = -1
        while n > 0:
            n -= 1
            if slot[0] < 0:
                node = self.find(node, self.spell[n])
                if node < 0:
                    return -1
                slot[0] = self.nodes[node].tail
            else:
                slot[0] = self.slots[slot[0]].after
                if slot[0] < 0 or self.slots[slot[0]].token != self.spell[n]:
                    return -1
        return node

    cdef void resume(self, int text) noexcept nogil:
        """Find the nodes of a text's suffixes again. No window crosses a halving: it would count more than what it continues."""
        cdef Text* t = &self.texts[text]
        cdef int* active = self.active + <size_t> text * self.depth
        cdef int n, slot = -1, node
        self.spelling(text, self.depth)
        for n in range(self.depth):
            node = self.walk(t.root, n, &slot) if n <= t.length - t.since else -1
            active[n] = node if slot < 0 else -1  # inside a tail: the text itself says how it goes on

    cdef int pop(self, int text) except -1:
        """Take back the newest token: every window that ends in it counts one less, unless a halving has blurred it."""
        self.make_room()
        cdef Text* t = &self.texts[text]
        cdef int slot = t.last, n, node, end
        if t.length > t.since:
            self.spelling(text, self.depth)
            for n in range(min(self.depth, t.length - t.since), 0, -1):
                node = self.walk(t.root, n, &end)
                if node < 0 or (end >= 0 and self.nodes[node].tail != end):
                    continue  # inside a tail: it ends with the text
                self.nodes[self.nodes[node].parent].through -= 1
                if self.nodes[node].count == 1:
                    self.drop_node(t.root, node)
                else:
                    self.recount(node, self.nodes[node].count - 1)
        t.last, t.length = self.slots[slot].before, t.length - 1
        if t.last >= 0:
            self.slots[t.last].after = -2 - text
        self.slots[slot].after, self.slot_free = self.slot_free, slot
        return 0

    cdef void free_slots(self, int last) noexcept nogil:
        cdef int before
        while last >= 0:
            before = self.slots[last].before
            self.slots[last].after, self.slot_free = self.slot_free, last
            last = before

    cdef tuple open_tree(self, tree):
        """The root of a tree, made if it is not known, and the ends of its closed texts.

        To hash and compare a tree may run any code. So a tree is looked up once, and before anything is changed.
        """
        cdef tuple made, found = self.trees.get(tree)
        if found is None:
            self.make_room()
            made = (self.new_node(-1, -1, -1, -1), [])
            try:
                found = self.trees.setdefault(tree, made)
            finally:
                if found is not made:
                    self.free_root(made[0])
        return found

    cdef int known(self, int text) except -1:
        if not 0 <= text < self.text_top or self.texts[text].root < 0:
            raise TinyspecError(f"text {text} is not open in this forest: open(tree) gives a number")
        return text

    def open(self, tree):
        """Begin a text in a tree; returns its number."""
        cdef int root = self.open_tree(tree)[0], text, n
        cdef void* grown
        if self.text_free < 0 and self.text_top == self.text_room:
            grown = realloc(self.active, 2 * <size_t> self.text_room * self.depth * sizeof(int))
            self.active = <int*> grown if grown else self.active
            grown = widened(self.texts, &self.text_room, sizeof(Text)) if grown else NULL
            if grown == NULL:
                raise MemoryError()
            self.texts = <Text*> grown
        if self.text_free >= 0:
            text, self.text_free = self.text_free, self.texts[self.text_free].last
        else:
            text, self.text_top = self.text_top, self.text_top + 1
        self.texts[text] = Text(root, -1, 0, 0)
        for n in range(self.depth):
            self.active[<size_t> text * self.depth + n] = root if n == 0 else -1
        return text

    def close(self, int text):
        """The text is over; what it counted stays."""
        cdef Text* t = &self.texts[self.known(text)]
        cdef list ends
        if t.last >= 0:
            ends = next(ends for root, ends in self.trees.values() if root == t.root)
            ends.append(t.last)
            self.slots[t.last].after = -1
        t.root, t.last, self.text_free = -1, self.text_free, text

    def length(self, int text):
        """Tokens of a text."""
        return self.texts[self.known(text)].length

    def append(self, int text, tokens):
        """Grow a text; returns the nodes of its tree. O(length of its longest repeated suffix) a token.

        Where one of the tokens is not an int32, nothing is appended (TypeError, OverflowError).
        """
        cdef const int[::1] ids = read_ids(tokens)
        cdef Py_ssize_t i
        self.known(text)
        for i in range(ids.shape[0]):
            self.push(text, ids[i])
        return self.nodes[self.texts[text].root].count

    def rewind(self, int text, int length):
        """Take a text back to its first `length` tokens. O(depth^2) a token. What a halving has blurred stays counted."""
        cdef Text* t = &self.texts[self.known(text)]
        if not 0 <= length <= t.length:
            raise TinyspecError(f"cannot rewind a text of {t.length} tokens to {length}")
        if length == t.length:
            return
        try:
            while t.length > length:
                self.pop(text)
        finally:  # also of a text that is taken back by half, for want of memory
            t.since = min(t.since, t.length)
            self.resume(text)

    def drop(self, tree):
        """Forget a tree, its texts included. O(its size)."""
        cdef tuple found = self.trees.pop(tree, None)
        cdef int text, root
        if found is None:
            return
        root = found[0]
        for text in range(self.text_top):
            if self.texts[text].root == root:
                self.free_slots(self.texts[text].last)
                self.texts[text].root, self.texts[text].last, self.text_free = -1, self.text_free, text
        self.halve_tree(root, found[1], 31)
        self.free_root(root)

    def halve(self, tree):
        """Halve every count of a tree, rounding down; what falls to 0 goes. O(its size)."""
        cdef tuple found = self.trees.get(tree)
        if found is not None:
            self.halve_tree(found[0], found[1], 1)

    cdef void halve_tree(self, int root, list ends, int halvings):
        """Halve every count of a tree so often; none of its closed texts is known any more."""
        cdef int text, last
        self.thin(root, halvings)
        for last in ends:
            self.free_slots(last)
        ends.clear()
        for text in range(self.text_top):
            if self.texts[text].root == root:
                self.texts[text].since = self.texts[text].length
                self.resume(text)

    def prune(self, tree):
        """Halve until the tree has at most `bound` nodes; returns how often."""
        cdef tuple found = self.trees.get(tree)
        cdef int times = 0
        while found is not None and self.nodes[<int> found[0]].count > self.bound:
            self.halve_tree(found[0], found[1], 1)
            times += 1
        return times

    def size(self, tree):
        """Nodes of a tree."""
        cdef tuple found = self.trees.get(tree)
        return 0 if found is None else self.nodes[<int> found[0]].count

    @property
    def bytes(self):
        """Memory of all trees and texts."""
        return (self.node_room * sizeof(Node) + self.slot_room * sizeof(Slot) + self.table_size * sizeof(int)
                + self.group_room * 2 * sizeof(int) + self.text_room * (sizeof(Text) + self.depth * sizeof(int))
                + self.heap_room * (sizeof(Candidate) + 5 * sizeof(int) + 2 * sizeof(double)))
