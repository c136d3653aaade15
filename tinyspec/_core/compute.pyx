# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled transformer: packed matrices, and layers that run over a few rows in one call. Its C code is in
compute.h (what there is), slab.h and attend.h (the kernels, for each processor in kernels.c), layers.c (the driver) and
pool.c (the threads); reference_compute.py is its pure twin.

All arithmetic is float32; weights, keys and values may be stored as bfloat16, and a processor that multiplies bfloat16
(avx512bf16) rounds the rows of such a product too. A row's result depends on the row and on what it sees alone: not on
the rows beside it, the threads, the slots, or how a text was split.
"""

cimport cython
from libc.stdint cimport int64_t, uint8_t, uint16_t
from libc.stdlib cimport calloc, free, malloc

import platform
import sys

import numpy as np

from tinyspec._core.limits import read_ids

# The C counts in `int` and keeps queries on the stack: what is larger is refused here.
cdef enum:
    MOST_NUMBERS = 1 << 24  # of outputs, inputs, rows: each dimension of a matrix
    MOST_SLOTS = 1 << 22  # of a cache: each thread has room for the scores of one row
    MOST_WIDTH = 1 << 12  # of a head
    MOST_GROUP = 1 << 18  # numbers of the queries that share a key/value head
    MOST_THREADS = 64  # of pool.c

cdef const Kernel *chosen = kernel_named(b"portable")


def kernels():
    """Names of the kernels this processor can run, the best first."""
    return [name for name in ("avx512bf16", "avx512", "avx2", "portable") if kernel_named(name.encode()) != NULL]


cdef const Kernel *find_kernel(str name) except NULL:
    cdef const Kernel *found = kernel_named(name.encode())
    if found == NULL:
        raise ValueError(f"this processor has no kernel '{name}': it has {', '.join(kernels())}")
    return found


cdef float[:, ::1] writable(array) except *:
    """Return an array of rows [n, numbers] that a result can be written to."""
    try:
        return array
    except BufferError as error:
        raise ValueError(f"a result needs an array that can be written: {error}") from None


cdef How on_threads(int threads) noexcept:
    return How(chosen, min(max(threads, 1), <int> MOST_THREADS))


def sound(str name not None):
    """Whether a kernel computes what the portable one does, on a tiny product whose sums are exact in any order.

    Raises ValueError where this processor lacks it."""
    return bool(kernel_sound(find_kernel(name)))


def best(sound=sound, str machine=platform.machine()):
    """The first kernel that is sound. Says on stderr what is slower than it could be."""
    for name in kernels():
        if sound(name):
            break
        print(f"tinyspec: the {name} kernels compute nonsense on this machine, others are used", file=sys.stderr)
    if name == "portable" and machine in ("x86_64", "AMD64"):
        print("tinyspec: no AVX2 that can be used: the portable kernels are several times slower", file=sys.stderr)
    return name


def kernel():
    """The kernel in use."""
    return chosen.name.decode()


def use(str name not None):
    """Use another kernel from now on (tests and benchmarks do). Raises ValueError where this processor lacks it.

    Two kernels round differently: what one has put into a cache is no continuation for the other."""
    global chosen
    chosen = find_kernel(name)


use(best())


cdef int _format_of(str kind, int itemsize) except -1:
    if kind is None:
        return HALVES if itemsize == 2 else FLOATS
    formats = {"Q8_0": Q8_0, "Q4_0": Q4_0, "Q4_1": Q4_1}
    if kind not in formats:
        raise ValueError(f"no kernel multiplies {kind}: they multiply {', '.join(formats)}")
    return formats[kind]


cdef int64_t _numbers_of(int format, int out, int inputs):
    """Numbers of a packed matrix, or bytes of a quantised one; -1 where the inputs cannot be packed."""
    cdef int64_t blocks = (out + 15) // 16
    if inputs % (1 if format == FLOATS else 2 if format == HALVES else 32):
        return -1
    return blocks * (inputs // 32) * <int64_t>group_bytes(format) if format > HALVES else blocks * 16 * inputs


cdef class Packed:
    """A weight matrix [out, in] in blocks of 16 outputs, as `pack` lays it out: float32 [blocks, in, 16]; bfloat16 (given as
    its bits, uint16) [blocks, in / 2, 16, 2]; or the bytes of a quantised one, whose `kind` is Q8_0, Q4_0 or Q4_1
    (src/quantised.h); bias [out] or None. Keeps what it was made from alive."""

    cdef Matrix matrix
    cdef object _held

    def __cinit__(self, data, int out, int inputs, const float[::1] bias=None, str kind=None):
        cdef const float[::1] whole
        cdef const uint16_t[::1] bits
        cdef const uint8_t[::1] bytes_
        flat = np.asarray(data).reshape(-1)
        self.matrix.format = _format_of(kind, flat.dtype.itemsize)
        if not (1 <= out <= MOST_NUMBERS and 1 <= inputs <= MOST_NUMBERS):
            raise ValueError(f"a matrix is from [1, 1] to [{MOST_NUMBERS}, {MOST_NUMBERS}], got [{out}, {inputs}]")
        if flat.size != _numbers_of(self.matrix.format, out, inputs):
            raise ValueError(f"{flat.size} numbers are no packed matrix [{out}, {inputs}]")
        if bias is not None and bias.shape[0] != out:
            raise ValueError(f"a bias of {bias.shape[0]} for {out} outputs")
        if kind is not None:
            bytes_ = flat
            self.matrix.data = &bytes_[0]
        elif self.matrix.format == HALVES:
            bits = flat
            self.matrix.data = &bits[0]
        else:
            whole = flat
            self.matrix.data = &whole[0]
        if bias is not None:
            self.matrix.bias = &bias[0]
        self.matrix.out, self.matrix.inputs = out, inputs
        self._held = (flat, bias)

    def product(self, const float[:, ::1] x, y, int threads):
        """y [k, out] = x [k, in] W' + bias."""
        cdef float[:, ::1] result = writable(y)
        if x.shape[1] != self.matrix.inputs or result.shape[1] != self.matrix.out or x.shape[0] != result.shape[0]:
            raise ValueError(f"{x.shape[0]} rows of {x.shape[1]} do not fit a matrix [{self.matrix.out}, {self.matrix.inputs}]")
        cdef How how = on_threads(threads)
        cdef int failed = 0
        if x.shape[0] > MOST_NUMBERS:
            raise ValueError(f"at most {MOST_NUMBERS} rows, got {x.shape[0]}")
        if x.shape[0]:
            with nogil:
                failed = compute_product(how, &self.matrix, &x[0, 0], <int>x.shape[0], &result[0, 0])
        if failed:
            raise MemoryError

    def rows(self, ids, to):
        """Rows of the matrix by number, as float32, into `to` [n, in]: an embedding is looked up in the packed head."""
        cdef float[:, ::1] result = writable(to)
        cdef int inputs = self.matrix.inputs, id, i
        cdef size_t base
        cdef const float *whole = <const float *>self.matrix.data
        cdef const uint16_t *bits = <const uint16_t *>self.matrix.data
        cdef const uint8_t *packed = <const uint8_t *>self.matrix.data
        cdef const int[::1] numbers = read_ids(ids)
        if result.shape[0] != numbers.shape[0] or result.shape[1] != inputs:
            raise ValueError(f"{numbers.shape[0]} rows of {inputs} do not fit")
        cdef Py_ssize_t at
        for at in range(numbers.shape[0]):
            id = numbers[at]
            if not 0 <= id < self.matrix.out:
                raise ValueError(f"row {id} of {self.matrix.out}")
            base = <size_t>(id // 16) * 16 * inputs
            id = id % 16
            if self.matrix.format > HALVES:
                base = base // (16 * 32) * group_bytes(self.matrix.format)
                for i in range(inputs):
                    result[at, i] = widen(unpack_weight(
                        self.matrix.format, packed + base + <size_t>(i // 32) * group_bytes(self.matrix.format), id, i % 32))
            elif self.matrix.format == HALVES:
                for i in range(inputs):
                    result[at, i] = widen(bits[base + <size_t>(i // 2) * 32 + 2 * id + i % 2])
            else:
                for i in range(inputs):
                    result[at, i] = whole[base + <size_t>i * 16 + id]


cdef int _norm(Norm *norm, const float[::1] gain, const float[::1] bias, int d, list held) except -1:
    if gain.shape[0] != d or (bias is not None and bias.shape[0] != d):
        raise ValueError(f"a norm of {gain.shape[0]} for rows of {d}")
    held.append((gain, bias))
    norm.gain = &gain[0]
    norm.bias = NULL
    if bias is not None:
        norm.bias = &bias[0]
    return 0


cdef class Engine:
    """All layers of a model, the final norm and the head.

    layers  for each: (norm1 gain, norm1 bias, qkv, out, norm2 gain, norm2 bias, up, down); biases may be None
    cos, sin [positions, width], the sign of the turn folded into sin; None: positions are not turned
    head_norms  for each layer the gains [width] of the norms of each head of queries and of keys; None: there are none

    Raises ValueError where a part does not fit the others. Keeps all parts alive.
    """

    cdef Stack stack
    cdef Layer *_layers
    cdef list _held
    cdef const float[:, ::1] cos
    cdef const float[:, ::1] sin
    cdef bint turned

    def __dealloc__(self):
        free(self._layers)

    def __cinit__(self, layers, final, Packed head not None, *, int heads, int shared, int width, int hidden, bint rms, bint gated,
                 bint silu, bint half, float eps, float scale, cos=None, sin=None, head_norms=None):
        cdef Stack *s = &self.stack
        cdef Packed qkv, out, up, down
        if not (1 <= shared <= heads <= MOST_NUMBERS and heads % shared == 0 and 1 <= width <= MOST_WIDTH
                and <int64_t> (heads // shared) * width <= MOST_GROUP and 1 <= hidden <= MOST_NUMBERS):
            raise ValueError(f"no model has {heads} heads, {shared} key/value heads, {width} numbers a head, {hidden} hidden ones: "
                             "all are at least 1, and the key/value heads divide the heads")
        layers = [layer for layer in layers]  # another's list could grow, or forget a layer
        self._layers = <Layer *>calloc(max(len(layers), 1), sizeof(Layer))
        if self._layers == NULL:
            raise MemoryError
        self._held = [head]
        s.layers, s.d, s.heads, s.shared, s.width, s.hidden = len(layers), head.matrix.inputs, heads, shared, width, hidden
        s.rms, s.gated, s.silu, s.half, s.eps, s.scale = rms, gated, silu, half, eps, scale
        for i, (gain1, bias1, qkv, out, gain2, bias2, up, down) in enumerate(layers):
            if qkv is None or out is None or up is None or down is None:
                raise ValueError(f"layer {i} lacks a matrix")
            self._held.append((qkv, out, up, down))
            _norm(&self._layers[i].norm1, gain1, bias1, s.d, self._held)
            _norm(&self._layers[i].norm2, gain2, bias2, s.d, self._held)
            self._layers[i].qkv, self._layers[i].out = qkv.matrix, out.matrix
            self._layers[i].up, self._layers[i].down = up.matrix, down.matrix
            shapes = [(m["out"], m["in"]) for m in (_shape(qkv), _shape(out), _shape(up), _shape(down))]
            if shapes != [((<int64_t> heads + 2 * shared) * width, s.d), (s.d, <int64_t> heads * width),
                          ((1 + gated) * hidden, s.d), (s.d, hidden)]:
                raise ValueError(f"layer {i} has matrices {shapes}")
        gains = () if head_norms is None else [pair for pair in head_norms]
        if gains and len(gains) != s.layers:
            raise ValueError(f"{len(gains)} norms of heads for {s.layers} layers")
        for i, (q_gain, k_gain) in enumerate(gains):
            _norm(&self._layers[i].q_norm, q_gain, None, width, self._held)
            _norm(&self._layers[i].k_norm, k_gain, None, width, self._held)
        s.layer, s.head = self._layers, head.matrix
        gain1, bias1 = final
        _norm(&s.final, gain1, bias1, s.d, self._held)
        self.turned = cos is not None
        if self.turned:
            self.cos, self.sin = cos, sin
            if self.cos.shape[1] != width or self.sin.shape[0] != self.cos.shape[0] or self.sin.shape[1] != width or width % 2:
                raise ValueError(f"turns of {self.cos.shape[1]} for heads of {width}")

    @cython.boundscheck(True)  # what a feed is made of may run any code when it is read
    def run(self, x, int first, int last, list feeds not None, int threads, bint mute=False):
        """Sublayers first..last-1 over all rows x [n, d] in place (mute: leave keys and values, keep x).

        feeds   one a session: (address of its cache, capacity, slots, positions, sight, probe prefix)
                sight: (heads, [(prefix, extra slots)] a row, or a row and key/value head)
                probe prefix: None, or (which rows see it, keys, values as float32 [layers, shared, P, width])

        An address cannot be checked: it must be that of memory [layers, 2, shared, capacity, width] of float32, or of
        bfloat16 where the engine is `half`, which stays where it is. All else that does not fit raises ValueError.
        """
        cdef float[:, ::1] state = writable(x)
        cdef int n, heads = 1, at = 0, entry = 0, position, capacity
        cdef Py_ssize_t entries = 0, total = 0, given = 0, used = 0
        cdef Stack *s = &self.stack
        cdef Row *rows
        cdef int *prefix
        cdef int *extra
        cdef const float[:, :, :, ::1] keys
        cdef const float[:, :, :, ::1] values
        cdef Sight sight
        cdef How how = on_threads(threads)
        cdef int failed
        cdef list held = []
        if state.shape[0] > MOST_NUMBERS:
            raise ValueError(f"at most {MOST_NUMBERS} rows, got {state.shape[0]}")
        n = <int>state.shape[0]
        if not 0 <= first <= last <= 2 * s.layers or state.shape[1] != s.d:
            raise ValueError(f"sublayers {first} to {last} over rows of {state.shape[1]}")
        if n == 0:
            return
        for _, _, slots, _, (own, seen), _ in feeds:
            heads = max(heads, <int>own)
            given += len(slots)
            entries += len(seen)
        if given != n:
            raise ValueError(f"{given} slots for {n} rows")
        if heads > 1 and heads == s.shared:  # rows whose heads all see the same are written out once a head
            feeds = [_spread(feed, heads) for feed in feeds]
            entries = sum([len(seen) for _, _, _, _, (_, seen), _ in feeds])
        if entries != <Py_ssize_t> heads * n or heads not in (1, s.shared):
            raise ValueError(f"{entries} lists of visible slots for {n} rows and {s.shared} key/value heads")
        total = sum([len(more) for _, _, _, _, (_, seen), _ in feeds for _, more in seen])
        if entries + total > 4 * MOST_NUMBERS:
            raise ValueError(f"{entries} lists of {total} visible slots are more than fit into memory")
        rows = <Row *>calloc(n, sizeof(Row))
        prefix = <int *>malloc((2 * entries + 1 + total + 1) * sizeof(int))
        if rows == NULL or prefix == NULL:
            free(rows)
            free(prefix)
            raise MemoryError
        try:
            extra = prefix + 2 * entries + 1
            sight = Sight(prefix, prefix + entries, extra, heads)
            prefix[entries] = 0
            for address, room, slots, positions, (_, seen), lead in feeds:
                capacity = room
                if <size_t>address == 0 or not 1 <= capacity <= MOST_SLOTS:
                    raise ValueError(f"a cache of {capacity} slots at {address}: it has from 1 to {MOST_SLOTS}")
                if self.turned and len(positions) != len(slots):
                    raise ValueError(f"{len(positions)} positions for {len(slots)} slots")
                if lead is not None:
                    shown, held_keys, held_values = lead
                    keys, values = held_keys, held_values
                    held.append((held_keys, held_values))
                    _check_lead(s, keys, values)
                    if len(shown) != len(slots):
                        raise ValueError(f"{len(shown)} rows see the prefix or not, of {len(slots)}")
                for i in range(len(slots)):
                    if at == n:
                        raise ValueError(CHANGED)
                    rows[at].cache = <char *><size_t>address
                    rows[at].capacity, rows[at].slot = capacity, slots[i]
                    if not 0 <= rows[at].slot < capacity:
                        raise ValueError(f"slot {rows[at].slot} of {capacity}")
                    if self.turned:
                        position = positions[i]
                        if not 0 <= position < self.cos.shape[0]:
                            raise ValueError(f"position {position} of {self.cos.shape[0]}")
                        rows[at].cos, rows[at].sin = &self.cos[position, 0], &self.sin[position, 0]
                    if lead is not None and shown[i]:
                        rows[at].lead = <int>keys.shape[2]
                        if rows[at].lead:
                            rows[at].lead_keys, rows[at].lead_values = &keys[0, 0, 0, 0], &values[0, 0, 0, 0]
                    at += 1
                for length, more in seen:
                    if entry == entries:
                        raise ValueError(CHANGED)
                    prefix[entry] = length
                    if not 0 <= prefix[entry] <= capacity:
                        raise ValueError(f"{prefix[entry]} visible slots of {capacity}")
                    for slot in more:
                        if used == total:
                            raise ValueError(CHANGED)
                        extra[used] = slot
                        if not 0 <= extra[used] < capacity:
                            raise ValueError(f"slot {extra[used]} of {capacity}")
                        used += 1
                    entry += 1
                    prefix[entries + entry] = <int> used
            if at != n or entry != entries:
                raise ValueError(CHANGED)
            with nogil:
                failed = compute_layers(how, &self.stack, first, last, rows, n, sight, mute, &state[0, 0])
            if failed:
                raise MemoryError
        finally:
            free(rows)
            free(prefix)

    def head(self, const float[:, ::1] x, normed, logits, int threads):
        """The final norm of rows x [n, d] into `normed`, and their logits [n, vocabulary] (None: not wanted)."""
        cdef How how = on_threads(threads)
        cdef float[:, ::1] states = writable(normed), scores = writable(logits)
        cdef float *to = NULL
        cdef int failed
        if states.shape[0] != x.shape[0] or x.shape[1] != self.stack.d or states.shape[1] != self.stack.d:
            raise ValueError(f"rows of {x.shape[1]} for a model of {self.stack.d}")
        if x.shape[0] > MOST_NUMBERS:
            raise ValueError(f"at most {MOST_NUMBERS} rows, got {x.shape[0]}")
        if x.shape[0] == 0:
            return
        if scores is not None:
            if scores.shape[0] != x.shape[0] or scores.shape[1] != self.stack.head.out:
                raise ValueError(f"logits are [{x.shape[0]}, {self.stack.head.out}]")
            to = &scores[0, 0]
        with nogil:
            failed = compute_head(how, &self.stack, &x[0, 0], <int>x.shape[0], &states[0, 0], to)
        if failed:
            raise MemoryError


cdef _shape(Packed m):
    return {"out": m.matrix.out, "in": m.matrix.inputs}


CHANGED = "the feeds changed while they were read"


cdef int _check_lead(const Stack *s, const float[:, :, :, ::1] keys, const float[:, :, :, ::1] values) except -1:
    cdef list first = [keys.shape[0], keys.shape[1], keys.shape[2], keys.shape[3]]
    cdef list second = [values.shape[0], values.shape[1], values.shape[2], values.shape[3]]
    if not first == second == [s.layers, s.shared, keys.shape[2], s.width] or keys.shape[2] > MOST_SLOTS:
        raise ValueError(f"a prefix of {first} and {second}")
    return 0


def _spread(feed, heads):
    address, capacity, slots, positions, (own, seen), lead = feed
    return address, capacity, slots, positions, (heads, seen if own == heads else [s for s in seen for _ in range(heads)]), lead
