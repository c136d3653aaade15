/* Quantised matrices as they are stored: groups of 32 inputs of 16 outputs.
 *
 *     scales [16] float16;  Q4_1: then shifts [16] float16
 *     Q8_0   [8][16][4]: four inputs of an output, a byte each
 *     Q4     [4][16][4]: eight inputs of an output, four bits each, the first one lowest
 *
 * So the numbers of 16 outputs at one place are a vector of 16 words.
 */
#ifndef TINYSPEC_QUANTISED_H
#define TINYSPEC_QUANTISED_H

#include "compute.h"

/* Bytes of the scales and shifts of a group, and of all of it. */
static inline size_t group_head(int format) { return format == Q4_1 ? 64 : 32; }
static inline size_t group_bytes(int format) { return group_head(format) + (format == Q8_0 ? 512 : 256); }

/* The weight of input i of output o of a group, as bfloat16. */
static inline uint16_t unpack_weight(int format, const uint8_t *group, int o, int i) {
    const uint16_t *scale = (const uint16_t *)group;
    const uint8_t *q = group + group_head(format);
    const float d = from_float16(scale[o]);
    if (format == Q8_0) return narrow(d * (float)(int8_t)q[i / 4 * 64 + o * 4 + i % 4]);
    const int four = q[i / 8 * 64 + o * 4 + i % 8 / 2] >> i % 2 * 4 & 15;
    return narrow(format == Q4_0 ? d * (float)(four - 8) : d * (float)four + from_float16(scale[BLOCK + o]));
}

#endif
