/* The compiled transformer without Python, for where no Python is: another processor (qemu), a sanitizer of threads.
 *
 *     cd tinyspec/_core/src
 *     cc -O2 -ffp-contract=off -pthread -I. ../../../tests/core/selftest.c kernels.c layers.c pool.c -lm && ./a.out
 *
 * For every kernel: a product against double precision, and each row against itself in other company; attention against
 * double precision; quantised matrices against unpacked ones; whole layers in blocks against one row at a time, on 1 to 4 threads, from two threads at once, and in a
 * forked child; exp to the bit. Says what it did and returns 1 where something failed. "quick" for an argument: fewer rows, layers of one kernel;
 * "alone": no child (qemu and the thread sanitizer cannot follow threads into one).
 */
#include "compute.h"
#include "exp.h"
#include "quantised.h"

#include <math.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int failures;
static void expect(int right, const char *what, const char *name) {
    if (right) return;
    __atomic_add_fetch(&failures, 1, __ATOMIC_RELAXED);
    printf("FAILED: %s (%s)\n", what, name);
}

static float uniform(unsigned *state) { /* in -1..1, of 16 bits */
    *state = *state * 1664525u + 1013904223u;
    return (float)(int)(*state >> 16) / 32768.0f - 1.0f;
}

static float *numbers(size_t n, unsigned seed, float scale) {
    float *all = malloc(n * sizeof(float));
    for (size_t i = 0; i < n; i++) all[i] = uniform(&seed) * scale;
    return all;
}

/* A matrix [out, in] of random weights, packed; `plain` gets them as floats [out][in]. */
static Matrix matrix(int out, int in, int half, unsigned seed, float scale, float **plain) {
    const int blocks = (out + BLOCK - 1) / BLOCK, pair = half ? 2 : 1;
    float *w = numbers((size_t)out * in, seed, scale);
    char *data = calloc((size_t)blocks * BLOCK * in, half ? 2 : 4);
    for (int o = 0; o < out; o++)
        for (int i = 0; i < in; i++) {
            const size_t at = (((size_t)(o / BLOCK) * (in / pair) + i / pair) * BLOCK + o % BLOCK) * pair + i % pair;
            if (half)
                w[o * in + i] = widen(((uint16_t *)data)[at] = narrow(w[o * in + i]));
            else
                ((float *)data)[at] = w[o * in + i];
        }
    Matrix m = {data, numbers(out, seed + 1, 0.5f), out, in, half};
    if (plain)
        *plain = w;
    else
        free(w);
    return m;
}

static void release(Matrix *m) {
    free((void *)m->data);
    free((void *)m->bias);
}

static void products(const Kernel *kernel, int half) {
    enum { ROWS = 40 };
    const int sizes[][2] = {{1, 2}, {15, 6}, {16, 8}, {17, 34}, {70, 66}, {150, 130}};
    for (int c = 0; c < 6; c++) {
        const int out = sizes[c][0], in = sizes[c][1];
        float *w, *x = numbers(ROWS * in, 7, 1.0f), *alone = malloc(ROWS * out * sizeof(float));
        float *y = malloc(ROWS * out * sizeof(float));
        Matrix m = matrix(out, in, half, 3 + c, 1.0f, &w);
        for (int r = 0; r < ROWS; r++) {
            compute_product((How){kernel, 1}, &m, x + r * in, 1, alone + r * out);
            for (int o = 0; o < out; o++) {
                double sum = m.bias[o], size = fabs(sum);
                for (int i = 0; i < in; i++) {
                    const double input = half && kernel->product_rounded ? widen(narrow(x[r * in + i])) : x[r * in + i];
                    sum += (double)w[o * in + i] * input, size += fabs((double)w[o * in + i] * input);
                }
                expect(fabs(alone[r * out + o] - sum) <= (in + 2) * 6e-8 * size, "product within n eps", kernel->name);
            }
        }
        for (int rows = 1; rows <= ROWS; rows++)
            for (int threads = 1; threads <= 4; threads++) {
                const int from = (rows * 7) % (ROWS - rows + 1);
                compute_product((How){kernel, threads}, &m, x + from * in, rows, y);
                expect(!memcmp(y, alone + from * out, (size_t)rows * out * sizeof(float)), "product row by row", kernel->name);
            }
        release(&m);
        free(w), free(x), free(y), free(alone);
    }
}

/* A quantised matrix against what the portable kernels unpack of it, bit for bit. */
static void quantised(const Kernel *kernel, int format) {
    enum { ROWS = 40 };
    const int sizes[][2] = {{1, 32}, {16, 64}, {17, 96}, {70, 32}, {150, 288}};
    for (int c = 0; c < 5; c++) {
        const int out = sizes[c][0], in = sizes[c][1], blocks = (out + BLOCK - 1) / BLOCK, groups = blocks * in / GROUP;
        const size_t bytes = group_bytes(format);
        unsigned state = 11 + c;
        uint8_t *data = malloc(groups * bytes);
        for (size_t i = 0; i < groups * bytes; i++) {
            const int scale = i % bytes < group_head(format) && i % 2; /* no infinity, no NaN */
            data[i] = (uint8_t)(int)(uniform(&state) * 127.0f) & (scale ? 0xbf : 0xff);
        }
        uint16_t *halves = malloc((size_t)blocks * BLOCK * in * sizeof(uint16_t));
        float *bias = numbers(out, 5, 0.5f), *x = numbers(ROWS * in, 7, 1.0f);
        float *y = malloc((ROWS * out + BLOCK * in) * sizeof(float)), *same = malloc(ROWS * out * sizeof(float));
        const Matrix m = {data, bias, out, in, format}, whole = {halves, bias, out, in, HALVES};
        for (int b = 0; b < blocks; b++) {
            kernel_named("portable")->unpack(&m, b, halves + (size_t)b * BLOCK * in);
            kernel->unpack(&m, b, (uint16_t *)(void *)y);
            expect(!memcmp(y, halves + (size_t)b * BLOCK * in, (size_t)BLOCK * in * sizeof(uint16_t)), "unpacked", kernel->name);
        }
        for (int rows = 1; rows <= ROWS; rows++)
            for (int threads = 1; threads <= 3; threads++) {
                compute_product((How){kernel, 1}, &whole, x, rows, same);
                compute_product((How){kernel, threads}, &m, x, rows, y);
                expect(!memcmp(y, same, (size_t)rows * out * sizeof(float)), "quantised product", kernel->name);
            }
        free(data), free(halves), free(bias), free(x), free(y), free(same);
    }
}

/* Attention over a scattered path, against double precision; with a great scale one key takes nearly all. Where pairs of
 * bfloat16 are multiplied, the query is rounded for them, and so is a value's weight: by no more than 2^-9 of it. */
static void attention(const Kernel *kernel, int half, float scale) {
    enum { CAPACITY = 80, PREFIX = 37, EXTRA = 20, LEAD = 3 }; /* whole vectors of keys, and what is left over */
    const int pairs = half && kernel->product_rounded;
    for (int width = 1; width <= 70; width += width < 8 ? 1 : 9) {
        const Stack s = {.layers = 1, .heads = 4, .shared = 2, .width = width, .half = half, .scale = scale};
        const size_t all = (size_t)2 * 2 * CAPACITY * width;
        float *kept = numbers(all, 5, 1.0f), *q = numbers(2 * width, 6, 1.0f), *lead = numbers(4 * LEAD * width, 8, 1.0f);
        uint16_t *bits = malloc(all * sizeof *bits);
        for (size_t i = 0; i < all; i++) bits[i] = narrow(kept[i]), kept[i] = half ? widen(bits[i]) : kept[i];
        const Row row = {.cache = half ? (char *)bits : (char *)kept, .capacity = CAPACITY, .lead = LEAD,
                         .lead_keys = lead, .lead_values = lead + 2 * LEAD * width};
        int seen[EXTRA];
        for (int j = 0; j < EXTRA; j++) seen[j] = PREFIX + (j * 11) % (CAPACITY - PREFIX);
        enum { ROOM = LEAD + PREFIX + EXTRA + 1, MANY = 4 };
        float out[2 * 70], scores[MANY * 2 * ROOM];
        const int head = 1, n = LEAD + PREFIX + EXTRA;
        const Sees sees = {seen, PREFIX, EXTRA};
        kernel->attend(&s, &row, &sees, 1, 0, head, q, 2 * width, out, scores, ROOM);
        for (int g = 0; g < 2; g++) {
            double score[LEAD + PREFIX + EXTRA], most = -INFINITY;
            const float *value[LEAD + PREFIX + EXTRA];
            for (int j = 0; j < n; j++) {
                const int late = j - LEAD, slot = late < PREFIX ? late : seen[late - PREFIX];
                const float *key = late < 0 ? lead + (head * LEAD + j) * width : kept + (head * CAPACITY + slot) * width;
                value[j] = late < 0 ? lead + ((2 + head) * LEAD + j) * width : kept + ((2 + head) * CAPACITY + slot) * width;
                score[j] = 0;
                for (int t = 0; t < width; t++) {
                    const float own = q[g * width + t], number = pairs && late >= 0 ? widen(narrow(own)) : own;
                    score[j] += (double)number * key[t] * scale;
                }
                most = fmax(most, score[j]);
            }
            for (int i = 0; i < width; i++) {
                double top = 0, sum = 0, size = 0;
                for (int j = 0; j < n; j++) {
                    const double weight = exp(score[j] - most), part = weight * value[j][i];
                    top += part, sum += weight, size += pairs && j >= LEAD ? fabs(part) / 512 : 0;
                }
                const double off = fabs(out[g * width + i] - top / sum);
                expect(off < (scale > 1 ? 1e-3 : 1e-5) + size / sum, "attention", kernel->name);
            }
        }
        /* Rows that begin alike and go on apart, together and alone. */
        float *several = numbers(MANY * 2 * width, 9, 1.0f), together[MANY * 4 * 70], alone[MANY * 4 * 70];
        Row rows[MANY];
        Sees each[MANY];
        for (int r = 0; r < MANY; r++) {
            rows[r] = row, rows[r].lead = 0;
            each[r] = (Sees){seen + r, PREFIX - 2 + r % 3, EXTRA - 2 * r};
            kernel->attend(&s, rows + r, each + r, 1, 0, head, several + r * 2 * width, 2 * width, alone + r * 4 * width, scores,
                           ROOM);
        }
        kernel->attend(&s, rows, each, MANY, 0, head, several, 2 * width, together, scores, ROOM);
        for (int r = 0; r < MANY; r++)
            expect(!memcmp(together + r * 4 * width, alone + r * 4 * width, 2 * width * sizeof(float)), "attention row by row",
                   kernel->name);
        free(kept), free(q), free(lead), free(bits), free(several);
    }
}

/* ---- whole layers */
enum { D = 40, HEADS = 4, SHARED = 2, WIDTH = 12, LAYERS = 2, ROWS = 110, VOCABULARY = 33 };
typedef struct {
    Stack stack;
    Layer layer[LAYERS];
    const Kernel *kernel;
    float *x, *cos, *sin, *states, *logits;
    char *kept;
    int rows;
} Model;

/* Rows of a tree (each below the row half its number), in slots that are not in order; `step` rows at a time. */
static void run(const Model *m, int rows, int step, int threads, float *x, float *logits, char *cache) {
    const size_t room = (size_t)LAYERS * 2 * SHARED * ROWS * WIDTH * 4;
    float normed[ROWS * D];
    memcpy(x, m->x, (size_t)rows * D * sizeof(float));
    memset(cache, 0, room);
    for (int first = 0; first < rows; first += step) {
        const int n = first + step < rows ? step : rows - first;
        Row row[ROWS];
        int prefix[ROWS], start[ROWS + 1] = {0}, extra[ROWS * 8], total = 0;
        for (int r = 0; r < n; r++) {
            int path[8] = {0}, depth = 0;
            for (int at = first + r; at >= 0; at = at ? (at - 1) / 2 : -1) path[depth++] = (at * 7 + 3) % ROWS;
            row[r] = (Row){.cache = cache, .cos = m->cos + depth * WIDTH, .sin = m->sin + depth * WIDTH, .capacity = ROWS, .slot = path[0]};
            prefix[r] = 0;
            while (depth) extra[total++] = path[--depth];
            start[r + 1] = total;
        }
        compute_layers((How){m->kernel, threads}, &m->stack, 0, 2 * LAYERS, row, n, (Sight){prefix, start, extra, 1}, 0,
                       x + (size_t)first * D);
    }
    compute_head((How){m->kernel, threads}, &m->stack, x, rows, normed, logits);
}

static void *compare(void *what) { /* every step and number of threads against what one row at a time left */
    const Model *m = what;
    float x[ROWS * D], logits[ROWS * VOCABULARY];
    char *cache = malloc((size_t)LAYERS * 2 * SHARED * ROWS * WIDTH * 4);
    for (int threads = 1; threads <= 4; threads++)
        for (int step = 1; step <= m->rows; step = step * 3 + 1) {
            run(m, m->rows, step, threads, x, logits, cache);
            expect(!memcmp(x, m->states, (size_t)m->rows * D * sizeof(float)), "states row by row", m->kernel->name);
            expect(!memcmp(logits, m->logits, (size_t)m->rows * VOCABULARY * sizeof(float)), "logits row by row", m->kernel->name);
            expect(!memcmp(cache, m->kept, (size_t)LAYERS * 2 * SHARED * ROWS * WIDTH * 4), "cache row by row", m->kernel->name);
        }
    free(cache);
    return NULL;
}

/* hidden: where it is gated and no multiple of BLOCK, gate and up share a block */
static void layers(const Kernel *kernel, int half, int gated, int hidden, int rows) {
    const size_t room = (size_t)LAYERS * 2 * SHARED * ROWS * WIDTH * 4;
    Model m = {.kernel = kernel, .rows = rows, .x = numbers(ROWS * D, 1, 1.0f), .cos = numbers(9 * WIDTH, 2, 1.0f),
               .sin = numbers(9 * WIDTH, 3, 1.0f), .states = malloc(ROWS * D * sizeof(float)),
               .logits = malloc(ROWS * VOCABULARY * sizeof(float)), .kept = malloc(room)};
    float *gain = numbers(D, 4, 1.0f);
    const Norm norm = {gain, gated ? NULL : gain};
    for (int l = 0; l < LAYERS; l++)
        m.layer[l] = (Layer){norm, norm, matrix((HEADS + 2 * SHARED) * WIDTH, D, half, 10 + l, 0.3f, NULL),
                             matrix(D, HEADS * WIDTH, half, 20 + l, 0.3f, NULL),
                             matrix(hidden * (1 + gated), D, half, 30 + l, 0.3f, NULL), matrix(D, hidden, half, 40 + l, 0.3f, NULL)};
    m.stack = (Stack){LAYERS, D, HEADS, SHARED, WIDTH, hidden, gated, gated, gated, half, 1e-5f, 0.3f, m.layer, norm,
                      matrix(VOCABULARY, D, half, 50, 0.3f, NULL)};
    run(&m, rows, 1, 1, m.states, m.logits, m.kept);
    for (int i = 0; i < rows * VOCABULARY; i++) expect(isfinite(m.logits[i]), "finite", kernel->name);
    pthread_t other; /* both at once: one of them finds the pool busy and works alone */
    pthread_create(&other, NULL, compare, &m);
    compare(&m);
    pthread_join(other, NULL);
    for (int l = 0; l < LAYERS; l++)
        release(&m.layer[l].qkv), release(&m.layer[l].out), release(&m.layer[l].up), release(&m.layer[l].down);
    release(&m.stack.head);
    free(m.x), free(m.cos), free(m.sin), free(m.states), free(m.logits), free(m.kept), free(gain);
}

static void exponentials(void) { /* the same bits on every processor: the sum was had with the pure twin */
    double x[1001], top = 0;
    uint64_t all = 0, bits;
    for (int i = 0; i <= 1000; i++) x[i] = i * -0.751;
    weigh_all(x, 1001, top, 0.5);
    for (int i = 0; i <= 1000; i++) memcpy(&bits, x + i, sizeof bits), all = all * 31 + bits;
    expect(x[0] == 1 && x[1000] == 0, "exp at its ends", "exp");
    expect(all == 0xd79083d70b8a68eau, "exp bit for bit", "exp");
}

int main(int count, char **arguments) {
    int quick = 0, alone = 0;
    for (int i = 1; i < count; i++) quick |= !strcmp(arguments[i], "quick"), alone |= !strcmp(arguments[i], "alone");
    const char *const names[] = {"portable", "avx2", "avx512", "avx512bf16"};
    for (int h = 0; h < 0x10000; h++)
        expect((h & 0x7fff) > 0x7f80 || narrow(widen((uint16_t)h)) == h, "bfloat16 there and back", "narrow");
    expect(isnan(widen(narrow(NAN))) && narrow(1.00390625f) == 0x3f80 && narrow(1.01171875f) == 0x3f82, "ties", "narrow");
    exponentials();
    for (int k = 0; k < 4; k++) {
        const Kernel *kernel = kernel_named(names[k]);
        if (!kernel) continue;
        expect(kernel_sound(kernel), "sound", kernel->name);
        for (int format = Q8_0; format < FORMATS; format++) quantised(kernel, format);
        for (int half = 0; half < 2; half++) {
            products(kernel, half);
            attention(kernel, half, 0.3f);
            attention(kernel, half, 100.0f);
            layers(kernel, half, 0, 34, quick ? 30 : ROWS);
            layers(kernel, half, 1, 34, quick ? 30 : ROWS);
            layers(kernel, half, 1, 112, quick ? 30 : ROWS);
        }
        printf("%s: %d failures\n", kernel->name, failures);
    }
    fflush(stdout);
    const pid_t child = alone ? 0 : fork(); /* which has none of its parent's threads, and starts its own */
    if (!alone && !child) {
        failures = 0;
        layers(kernel_named("portable"), 0, 1, 34, 30);
        _exit(failures != 0);
    }
    int status = 0;
    if (child) waitpid(child, &status, 0);
    expect(status == 0, "a forked child", "pool");
    return failures != 0;
}
