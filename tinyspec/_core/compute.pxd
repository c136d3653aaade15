# cython: language_level=3
"""What src/compute.h offers."""

from libc.stdint cimport uint8_t, uint16_t

cdef extern from "compute.h" nogil:
    int BLOCK, GROUP, FLOATS, HALVES, Q8_0, Q4_0, Q4_1
    ctypedef struct Matrix:
        const void *data
        const float *bias
        int out
        int inputs "in"
        int format

    ctypedef struct Norm:
        const float *gain
        const float *bias

    ctypedef struct Layer:
        Norm norm1
        Norm norm2
        Matrix qkv
        Matrix out
        Matrix up
        Matrix down
        Norm q_norm
        Norm k_norm

    ctypedef struct Stack:
        int layers, d, heads, shared, width, hidden, rms, gated, silu, half
        float eps, scale
        const Layer *layer
        Norm final
        Matrix head

    ctypedef struct Row:
        char *cache
        const float *cos
        const float *sin
        int capacity, slot, lead
        const float *lead_keys
        const float *lead_values

    ctypedef struct Sight:
        const int *prefix
        const int *start
        const int *extra
        int heads

    ctypedef struct Kernel:
        const char *name

    ctypedef struct How:
        const Kernel *kernel
        int threads

    float widen(uint16_t h)
    const Kernel *kernel_named(const char *name)
    int kernel_sound(const Kernel *kernel)
    int compute_product(How how, const Matrix *w, const float *x, int rows, float *y)
    int compute_layers(How how, const Stack *s, int first, int last, const Row *row, int rows, Sight sight, int mute, float *x)
    int compute_head(How how, const Stack *s, const float *x, int rows, float *normed, float *logits)

cdef extern from "quantised.h" nogil:
    size_t group_bytes(int format)
    uint16_t unpack_weight(int format, const uint8_t *group, int o, int i)
