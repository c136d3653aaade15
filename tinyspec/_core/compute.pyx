# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True
"""The compiled transformer: packed matrices, and layers that run over a few rows in one call. Its C code is in
compute.h (what there is), slab.h and attend.h (the kernels, for each processor in kernels.c), layers.c (the driver) and
pool.c (the threads); reference_compute.py is its pure twin.

All arithmetic is float32; weights, keys and values may be stored as bfloat16, and a processor that multiplies bfloat16
(avx512bf16) rounds the rows of such a product too. A row's result depends on the row and on what it sees alone: not on
the rows beside it, the threads, the slots, or how a text was split.
"""

from libc.stdint cimport uint16_t
from libc.stdlib cimport calloc, free, malloc

import platform
import sys

cdef const Kernel *chosen = kernel_named(b"portable")


def kernels():
    """Names of the kernels this processor can run, the best first."""
    return [name for name in ("avx512bf16", "avx512", "avx2", "portable") if kernel_named(name.encode()) != NULL]


def sound(str name):
    """Whether a kernel computes what the portable one does, on a tiny product whose sums are exact in any order."""
    return bool(kernel_sound(kernel_named(name.encode())))


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


def use(str name):
    """Use another kernel from now on (tests and benchmarks do). Raises ValueError where this processor lacks it.

    Two kernels round differently: what one has put into a cache is no continuation for the other."""
    global chosen
    cdef const Kernel *found = kernel_named(name.encode())
    if found == NULL:
        raise ValueError(f"this processor has no kernel '{name}': it has {', '.join(kernels())}")
    chosen = found


use(best())


cdef class Packed:
    """A weight matrix [out, in] in blocks of 16 outputs, as `pack` lays it out: float32 [blocks, in, 16], or bfloat16 (given
    as its bits, uint16) [blocks, in / 2, 16, 2]; bias [out] or None. Keeps what it was made from alive."""

    cdef Matrix matrix
    cdef object _held

    def __init__(self, data, int out, int inputs, const float[::1] bias=None):
        cdef const float[::1] whole
        cdef const uint16_t[::1] bits
        flat = data.reshape(-1)
        self.matrix.half = flat.dtype.itemsize == 2
        if flat.size != (out + 15) // 16 * 16 * inputs or (self.matrix.half and inputs % 2):
            raise ValueError(f"{flat.size} numbers are no packed matrix [{out}, {inputs}]")
        if bias is not None and bias.shape[0] != out:
            raise ValueError(f"a bias of {bias.shape[0]} for {out} outputs")
        if self.matrix.half:
            bits = flat
            self.matrix.data = &bits[0]
        else:
            whole = flat
            self.matrix.data = &whole[0]
        if bias is not None:
            self.matrix.bias = &bias[0]
        self.matrix.out, self.matrix.inputs = out, inputs
        self._held = (flat, bias)

    def product(self, const float[:, ::1] x, float[:, ::1] y, int threads):
        """y [k, out] = x [k, in] W' + bias."""
        if x.shape[1] != self.matrix.inputs or y.shape[1] != self.matrix.out or x.shape[0] != y.shape[0]:
            raise ValueError(f"{x.shape[0]} rows of {x.shape[1]} do not fit a matrix [{self.matrix.out}, {self.matrix.inputs}]")
        cdef How how = How(chosen, max(threads, 1))
        cdef int failed = 0
        if x.shape[0]:
            with nogil:
                failed = compute_product(how, &self.matrix, &x[0, 0], <int>x.shape[0], &y[0, 0])
        if failed:
            raise MemoryError


    def rows(self, ids, float[:, ::1] to):
        """Rows of the matrix by number, as float32, into `to` [n, in]: an embedding is looked up in the packed head."""
        cdef int inputs = self.matrix.inputs, id, i
        cdef size_t base
        cdef const float *whole = <const float *>self.matrix.data
        cdef const uint16_t *bits = <const uint16_t *>self.matrix.data
        if to.shape[0] != len(ids) or to.shape[1] != inputs:
            raise ValueError(f"{len(ids)} rows of {inputs} do not fit")
        cdef Py_ssize_t at
        for at in range(len(ids)):
            id = ids[at]
            if not 0 <= id < self.matrix.out:
                raise ValueError(f"row {id} of {self.matrix.out}")
            base = <size_t>(id // 16) * 16 * inputs
            id = id % 16
            if self.matrix.half:
                for i in range(inputs):
                    to[at, i] = widen(bits[base + <size_t>(i // 2) * 32 + 2 * id + i % 2])
            else:
                for i in range(inputs):
                    to[at, i] = whole[base + <size_t>i * 16 + id]


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
    """

    cdef Stack stack
    cdef Layer *_layers
    cdef list _held
    cdef const float[:, ::1] cos
    cdef const float[:, ::1] sin
    cdef bint turned

    def __cinit__(self, layers, *args, **kwargs):
        self._layers = <Layer *>calloc(len(layers), sizeof(Layer))
        if self._layers == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._layers)

    def __init__(self, layers, final, Packed head, *, int heads, int shared, int width, int hidden, bint rms, bint gated,
                 bint silu, bint half, float eps, float scale, cos=None, sin=None, head_norms=None):
        cdef Stack *s = &self.stack
        cdef Packed qkv, out, up, down
        self._held = [head, layers]
        s.layers, s.d, s.heads, s.shared, s.width, s.hidden = len(layers), head.matrix.inputs, heads, shared, width, hidden
        s.rms, s.gated, s.silu, s.half, s.eps, s.scale = rms, gated, silu, half, eps, scale
        for i, (gain1, bias1, qkv, out, gain2, bias2, up, down) in enumerate(layers):
            _norm(&self._layers[i].norm1, gain1, bias1, s.d, self._held)
            _norm(&self._layers[i].norm2, gain2, bias2, s.d, self._held)
            self._layers[i].qkv, self._layers[i].out = qkv.matrix, out.matrix
            self._layers[i].up, self._layers[i].down = up.matrix, down.matrix
            shapes = [(m["out"], m["in"]) for m in (_shape(qkv), _shape(out), _shape(up), _shape(down))]
            if shapes != [((heads + 2 * shared) * width, s.d), (s.d, heads * width), ((1 + gated) * hidden, s.d), (s.d, hidden)]:
                raise ValueError(f"layer {i} has matrices {shapes}")
        for i, (q_gain, k_gain) in enumerate(head_norms or ()):
            _norm(&self._layers[i].q_norm, q_gain, None, width, self._held)
            _norm(&self._layers[i].k_norm, k_gain, None, width, self._held)
        s.layer, s.head = self._layers, head.matrix
        _norm(&s.final, final[0], final[1], s.d, self._held)
        self.turned = cos is not None
        if self.turned:
            self.cos, self.sin = cos, sin
            if self.cos.shape[1] != width or self.sin.shape[0] != self.cos.shape[0] or self.sin.shape[1] != width or width % 2:
                raise ValueError(f"turns of {self.cos.shape[1]} for heads of {width}")

    def run(self, float[:, ::1] x, int first, int last, list feeds, int threads, bint mute=False):
        """Sublayers first..last-1 over all rows x [n, d] in place (mute: leave keys and values, keep x).

        feeds   one a session: (address of its cache, capacity, slots, positions, sight, probe prefix)
                sight: (heads, [(prefix, extra slots)] a row, or a row and key/value head)
                probe prefix: None, or (which rows see it, keys, values as float32 [layers, shared, P, width])
        """
        cdef int n = <int>x.shape[0], heads = 1, at = 0, entries = 0, total = 0, entry = 0, given = 0
        cdef Stack *s = &self.stack
        cdef Row *rows
        cdef int *prefix
        cdef int *extra
        cdef const float[:, :, :, ::1] keys
        cdef const float[:, :, :, ::1] values
        cdef Sight sight
        cdef How how = How(chosen, max(threads, 1))
        cdef int failed
        if not 0 <= first <= last <= 2 * s.layers or x.shape[1] != s.d:
            raise ValueError(f"sublayers {first} to {last} over rows of {x.shape[1]}")
        if n == 0:
            return
        for feed in feeds:
            heads = max(heads, <int>feed[4][0])
            given += len(feed[2])
            entries += len(feed[4][1])
            total += sum([len(more) for _, more in feed[4][1]])
        if heads > 1:  # rows whose heads all see the same are written out once a head
            feeds = [_spread(feed, heads) for feed in feeds]
            entries = sum([len(feed[4][1]) for feed in feeds])
            total = sum([len(more) for feed in feeds for _, more in feed[4][1]])
        if given != n:
            raise ValueError(f"{given} slots for {n} rows")
        if entries != heads * n or heads not in (1, s.shared):
            raise ValueError(f"{entries} lists of visible slots for {n} rows and {s.shared} key/value heads")
        rows = <Row *>calloc(n, sizeof(Row))
        prefix = <int *>malloc((2 * entries + 1 + total + 1) * sizeof(int))
        if rows == NULL or prefix == NULL:
            free(rows)
            free(prefix)
            raise MemoryError
        try:
            extra = prefix + 2 * entries + 1
            sight = Sight(prefix, prefix + entries, extra, heads)
            prefix[entries] = total = 0
            for address, capacity, slots, positions, (_, seen), lead in feeds:
                for i in range(len(slots)):
                    rows[at].cache = <char *><size_t>address
                    rows[at].capacity, rows[at].slot = capacity, slots[i]
                    if not 0 <= rows[at].slot < rows[at].capacity:
                        raise ValueError(f"slot {slots[i]} of {capacity}")
                    if self.turned:
                        if not 0 <= positions[i] < self.cos.shape[0]:
                            raise ValueError(f"position {positions[i]} of {self.cos.shape[0]}")
                        rows[at].cos, rows[at].sin = &self.cos[<int>positions[i], 0], &self.sin[<int>positions[i], 0]
                    if lead is not None and lead[0][i]:
                        keys, values = lead[1], lead[2]
                        if not lead[1].shape == lead[2].shape == (s.layers, s.shared, keys.shape[2], s.width):
                            raise ValueError(f"a prefix of {list(lead[1].shape)} and {list(lead[2].shape)}")
                        rows[at].lead = <int>keys.shape[2]
                        if rows[at].lead:
                            rows[at].lead_keys, rows[at].lead_values = &keys[0, 0, 0, 0], &values[0, 0, 0, 0]
                    at += 1
                for length, more in seen:
                    prefix[entry] = length
                    if not 0 <= prefix[entry] <= <int>capacity:
                        raise ValueError(f"{length} visible slots of {capacity}")
                    for slot in more:
                        if not 0 <= slot < capacity:
                            raise ValueError(f"slot {slot} of {capacity}")
                        extra[total] = slot
                        total += 1
                    entry += 1
                    prefix[entries + entry] = total
            with nogil:
                failed = compute_layers(how, &self.stack, first, last, rows, n, sight, mute, &x[0, 0])
            if failed:
                raise MemoryError
        finally:
            free(rows)
            free(prefix)

    def head(self, const float[:, ::1] x, float[:, ::1] normed, float[:, ::1] logits, int threads):
        """The final norm of rows x [n, d] into `normed`, and their logits [n, vocabulary] (None: not wanted)."""
        cdef How how = How(chosen, max(threads, 1))
        cdef float *to = NULL
        cdef int failed
        if normed.shape[0] != x.shape[0] or x.shape[1] != self.stack.d or normed.shape[1] != self.stack.d:
            raise ValueError(f"rows of {x.shape[1]} for a model of {self.stack.d}")
        if x.shape[0] == 0:
            return
        if logits is not None:
            if logits.shape[0] != x.shape[0] or logits.shape[1] != self.stack.head.out:
                raise ValueError(f"logits are [{x.shape[0]}, {self.stack.head.out}]")
            to = &logits[0, 0]
        with nogil:
            failed = compute_head(how, &self.stack, &x[0, 0], <int>x.shape[0], &normed[0, 0], to)
        if failed:
            raise MemoryError


cdef _shape(Packed m):
    return {"out": m.matrix.out, "in": m.matrix.inputs}


def _spread(feed, heads):
    address, capacity, slots, positions, (own, seen), lead = feed
    return address, capacity, slots, positions, (heads, seen if own == heads else [s for s in seen for _ in range(heads)]), lead
