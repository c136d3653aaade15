# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, cdivision=True
"""Counted tries of token windows: what the forest of forest.pyx grows in, and how a token is counted.

A tree counts every window of up to `depth` tokens of its texts. A window that occurred once has a node only where it leaves
what is known: its `tail` is the slot of its last token, and the text after it stands for the nodes below, until somebody comes
that way again. So a text of new words costs few nodes a token, one that repeats itself up to `depth`. Children hang in the
order of their counts, the last to rise first among equals; siblings of equal count form a group, so rising is O(1). All
children lie in one open-addressing hash. Invariants: a window counts at least as much as all that continue it; where a window
lives, so does each of its suffixes; a node with a tail counts 1 and has no children; `through` sums the children's counts.
"""

cimport cython
from libc.limits cimport INT_MAX
from libc.stdint cimport int64_t, uint64_t
from libc.stdlib cimport free, realloc

from tinyspec._core.limits import MAX_DEPTH, check_range
from tinyspec.errors import TinyspecError


cdef void* widened(void* pool, int* room, size_t size) noexcept nogil:
    """The pool with twice the room; NULL if there is no memory (the old one stays)."""
    cdef void* grown = NULL
    if room[0] <= INT_MAX // 2:
        grown = realloc(pool, 2 * <size_t> room[0] * size)
    if grown != NULL:
        room[0] *= 2
    return grown


@cython.auto_pickle(False)  # what a forest is, forest.pyx says
cdef class Windows:
    """The pools: nodes, texts, and room for a draft."""

    def __cinit__(self, int depth, int bound):
        if depth < 2 or bound < 1:
            raise TinyspecError(f"a forest needs depth >= 2 and bound >= 1, got {depth} and {bound}")
        check_range("the depth of a forest", depth, 2, MAX_DEPTH)
        self.depth, self.bound = depth, bound
        self.trees = {}
        self.node_room = self.slot_room = self.group_room = self.heap_room = 64
        self.text_room, self.table_size = 4, 256
        self.node_free = self.slot_free = self.group_free = self.text_free = -1
        self.nodes = <Node*> realloc(NULL, self.node_room * sizeof(Node))
        self.slots = <Slot*> realloc(NULL, self.slot_room * sizeof(Slot))
        self.groups = <Group*> realloc(NULL, self.group_room * sizeof(Group))
        self.texts = <Text*> realloc(NULL, self.text_room * sizeof(Text))
        self.active = <int*> realloc(NULL, <size_t> self.text_room * depth * sizeof(int))
        self.heap = <Candidate*> realloc(NULL, self.heap_room * sizeof(Candidate))
        self.table = <int*> realloc(NULL, self.table_size * sizeof(int))
        self.spell = <int*> realloc(NULL, (depth + 1) * sizeof(int))
        self.drawn = <int*> realloc(NULL, 5 * self.heap_room * sizeof(int))
        self.shares = <double*> realloc(NULL, 2 * self.heap_room * sizeof(double))
        if not (self.nodes and self.slots and self.groups and self.texts and self.active and self.heap and self.table
                and self.spell and self.drawn and self.shares):
            raise MemoryError()
        for i in range(self.table_size):
            self.table[i] = -1

    def __dealloc__(self):
        free(self.nodes); free(self.slots); free(self.groups); free(self.texts); free(self.active)
        free(self.heap); free(self.table); free(self.spell); free(self.drawn); free(self.shares)

    # --- nodes, their hash, and their order -----------------------------------------------------------------------

    cdef inline int64_t home(self, int parent, int token) noexcept nogil:
        cdef uint64_t key = (<uint64_t> <unsigned int> parent << 32) | <unsigned int> token
        key = (key ^ (key >> 29)) * <uint64_t> 0xBF58476D1CE4E5B9
        return <int64_t> ((key ^ (key >> 32)) & <uint64_t> (self.table_size - 1))

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
        """Make room for all that one token may add or take back: where there is none, nothing is half done. Amortised O(1)."""
        cdef int most = 2 * self.depth + 1, node
        cdef void* grown
        while self.node_room - self.used < most:
            grown = widened(self.nodes, &self.node_room, sizeof(Node))
            if grown == NULL:
                raise MemoryError()
            self.nodes = <Node*> grown
        while self.group_room - self.groups_used < most:
            grown = widened(self.groups, &self.group_room, sizeof(Group))
            if grown == NULL:
                raise MemoryError()
            self.groups = <Group*> grown
        if self.slot_free < 0 and self.slot_top == self.slot_room:
            grown = widened(self.slots, &self.slot_room, sizeof(Slot))
            if grown == NULL:
                raise MemoryError()
            self.slots = <Slot*> grown
        while 2 * (<int64_t> self.live + most) > self.table_size:
            grown = realloc(self.table, 2 * self.table_size * sizeof(int))
            if grown == NULL:
                raise MemoryError()
            self.table, self.table_size = <int*> grown, 2 * self.table_size
            for j in range(self.table_size):
                self.table[j] = -1
            for node in range(self.node_top):
                if self.nodes[node].parent >= 0:
                    self.place(node)
        return 0

    cdef int new_node(self, int root, int parent, int token, int tail) noexcept nogil:
        """A node that was met once; parent -1 makes a root. There is room for it. O(1)."""
        cdef int node, last
        if self.node_free >= 0:
            node, self.node_free = self.node_free, self.nodes[self.node_free].younger
        else:
            node, self.node_top = self.node_top, self.node_top + 1
        self.nodes[node] = Node(parent, token, 0, 0, -1, -1, -1, -1, -1, tail)
        self.used += 1
        if parent < 0:
            return node
        self.place(node)
        self.live += 1
        self.nodes[root].count += 1
        self.nodes[node].count = 1
        last = self.nodes[parent].last
        if last >= 0 and self.nodes[last].count == 1:
            last = self.nodes[last].group
            self.join(node, last, self.groups[last].head)
        else:
            self.join(node, -1, -1)
        return node

    cdef void free_root(self, int root) noexcept nogil:
        """Give back the root of a tree without nodes."""
        self.nodes[root].parent = -2
        self.nodes[root].younger, self.node_free = self.node_free, root
        self.used -= 1

    cdef int drop_node(self, int root, int node) noexcept nogil:
        """Take out a node without children, closing the gap in its probe sequence."""
        cdef int64_t mask = self.table_size - 1, i, want
        cdef int64_t gap = self.home(self.nodes[node].parent, self.nodes[node].token)
        self.leave(node)
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
        self.nodes[node].parent = -2
        self.nodes[node].younger, self.node_free = self.node_free, node
        self.used -= 1
        self.live -= 1
        self.nodes[root].count -= 1
        return 0

    cdef void join(self, int node, int group, int at) noexcept nogil:
        """Hang the node in front of its sibling `at` (-1: last), as the head of this group (-1: of a new one)."""
        cdef int parent = self.nodes[node].parent, before
        if group < 0:
            if self.group_free >= 0:
                group, self.group_free = self.group_free, self.groups[self.group_free].head
            else:
                group, self.group_top = self.group_top, self.group_top + 1
            self.groups[group].tail = node
            self.groups_used += 1
        self.groups[group].head = node
        self.nodes[node].group = group
        before = self.nodes[at].older if at >= 0 else self.nodes[parent].last
        self.nodes[node].older, self.nodes[node].younger = before, at
        if before >= 0:
            self.nodes[before].younger = node
        else:
            self.nodes[parent].child = node
        if at >= 0:
            self.nodes[at].older = node
        else:
            self.nodes[parent].last = node

    cdef void leave(self, int node) noexcept nogil:
        """Take the node out of its group and from between its siblings."""
        cdef int group = self.nodes[node].group, parent = self.nodes[node].parent
        cdef int older = self.nodes[node].older, younger = self.nodes[node].younger
        if self.groups[group].head == self.groups[group].tail:
            self.groups[group].head, self.group_free = self.group_free, group
            self.groups_used -= 1
        elif self.groups[group].head == node:
            self.groups[group].head = younger
        elif self.groups[group].tail == node:
            self.groups[group].tail = older
        if older >= 0:
            self.nodes[older].younger = younger
        else:
            self.nodes[parent].child = younger
        if younger >= 0:
            self.nodes[younger].older = older
        else:
            self.nodes[parent].last = older

    cdef void recount(self, int node, int count) noexcept nogil:
        """Set a count that is one more or one less, and hang the node in front of those that count as much."""
        cdef int group = self.nodes[node].group, join = -1, at, near
        if count > self.nodes[node].count:
            at = self.groups[group].head
            near = self.nodes[at].older
            if near >= 0 and self.nodes[near].count == count:
                join = self.nodes[near].group
                at = self.groups[join].head
            elif at == node:
                at = self.nodes[node].younger
        else:
            at = self.nodes[self.groups[group].tail].younger
            if at >= 0 and self.nodes[at].count == count:
                join = self.nodes[at].group
        self.leave(node)
        self.nodes[node].count = count
        self.join(node, join, at)

    # --- counting -------------------------------------------------------------------------------------------------

    cdef int push(self, int text, int token) except -1:
        """Append one token: every window that ends in it counts one more. Without memory for it nothing changes."""
        self.make_room()
        cdef Text* t = &self.texts[text]
        cdef int* active = self.active + <size_t> text * self.depth
        cdef int slot, node, child, ahead, length, last = t.last
        if self.slot_free >= 0:
            slot, self.slot_free = self.slot_free, self.slots[self.slot_free].after
        else:
            slot, self.slot_top = self.slot_top, self.slot_top + 1
        self.slots[slot] = Slot(token, last, -2 - text)
        if last >= 0:
            self.slots[last].after = slot
        t.last, t.length = slot, t.length + 1
        for length in range(self.depth, 0, -1):  # of the window: from the longest, whose node the next shorter one overwrites
            node, child = active[length - 1], -1
            if node >= 0:
                child = self.find(node, token)
                self.nodes[node].through += 1
                if child < 0:
                    self.new_node(t.root, node, token, slot if length < self.depth else -1)
                else:
                    if self.nodes[child].tail >= 0:  # met again: what followed the first time gets a node of its own
                        ahead, self.nodes[child].tail = self.slots[self.nodes[child].tail].after, -1
                        if ahead >= 0:
                            self.new_node(t.root, child, self.slots[ahead].token, ahead if length + 1 < self.depth else -1)
                            self.nodes[child].through = 1
                        elif ahead <= -2:  # the end of a text that is still growing: it goes on from here
                            self.active[<size_t> (-2 - ahead) * self.depth + length] = child
                    self.recount(child, self.nodes[child].count + 1)
            if length < self.depth:
                active[length] = child
        return 0

    cdef void thin(self, int root, int halvings) noexcept nogil:
        """Halve every count of a tree so often, drop what falls to 0, and put the siblings into their groups again."""
        cdef int node = root, parent, younger, child, head
        while True:
            while self.nodes[node].child >= 0:
                node = self.nodes[node].child
            while True:  # its children are done
                parent, younger = self.nodes[node].parent, self.nodes[node].younger
                if node != root:
                    self.nodes[node].count >>= halvings
                if node != root and self.nodes[node].count == 0:
                    self.drop_node(root, node)
                else:
                    self.nodes[node].through = 0
                    child = self.nodes[node].child
                    while child >= 0:  # free first: then there is room for the new groups
                        self.nodes[node].through += self.nodes[child].count
                        if self.groups[self.nodes[child].group].tail == child:
                            head = self.nodes[child].group
                            self.groups[head].head, self.groups[head].tail, self.group_free = self.group_free, -1, head
                            self.groups_used -= 1
                        child = self.nodes[child].younger
                    child, head = self.nodes[node].child, -1
                    while child >= 0:
                        if head < 0 or self.nodes[head].count != self.nodes[child].count:
                            head = child
                            self.nodes[child].group, self.group_free = self.group_free, self.groups[self.group_free].head
                            self.groups[self.nodes[child].group].head = child
                            self.groups_used += 1
                        self.nodes[child].group = self.nodes[head].group
                        self.groups[self.nodes[head].group].tail = child
                        child = self.nodes[child].younger
                if node == root:
                    return
                node = younger if younger >= 0 else parent
                if younger >= 0:
                    break
