/* The driver: the sublayers of a pass over a few rows, each a handful of phases that the team's threads share.
 *
 * Rows go through all layers in tiles, so that a tile's states stay in the cache; a row never looks at a later one. In a
 * phase the threads take pieces of the work from a counter, and meet at a barrier before the next phase reads the result.
 */
#include "compute.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    const Kernel *kernel;
    const Stack *s;
    int first, last, rows, mute;
    const Row *row;
    Sight sight;
    float *x, *normed, *wide, *mixed, *scores; /* scores: [threads][queries][room] */
    size_t room, queries;
    uint16_t *rounded; /* [threads][broad], or NULL */
    size_t broad;
} Pass;

enum { PIECE = 8, QUERIES = 12 }; /* blocks of outputs, queries: what a thread takes at a time */

/* A phase of the job: its counter, reset two phases ahead, when nobody takes from it any more. */
static int phase(Team *team, int thread, int *number) {
    int counter = ++*number & 3;
    team_barrier(team);
    if (thread == 0) team_reset(team, (counter + 2) & 3);
    return counter;
}

/* Numbers that a thread needs room for to round rows to bfloat16; 0: this kernel takes them as they are. */
static size_t rounds(const Kernel *kernel, const Matrix *w, size_t rows) {
    return kernel->product_rounded && w->half ? rows * (size_t)w->in : 0;
}

/* What becomes of outputs from..upto-1 of every row: the thread that made them does it, while they are in its cache. */
typedef struct {
    void (*then)(const void *what, int from, int upto); /* NULL: nothing */
    const void *what;
    int twins; /* 2: an output comes together with its like in the second half */
} After;
static const After nothing = {NULL, NULL, 1};

/* y = x W' [+ y] + bias. Each thread rounds all rows for itself: that costs less than one more barrier. */
static void product(const Kernel *kernel, Team *team, int counter, const Matrix *w, const float *x, int ldx,
                    int rows, float *y, int add, uint16_t *rounded, After after) {
    const int out = w->out / after.twins, whole = after.twins == 1 || out % BLOCK == 0; /* or the halves share a block */
    const int twins = whole ? after.twins : 1, blocks = (w->out / twins + BLOCK - 1) / BLOCK, threads = team_size(team);
    int piece = twins * blocks / (4 * threads) & ~3; /* a few pieces a thread, whole groups of blocks */
    piece = (piece < 4 ? 4 : piece > PIECE ? PIECE : piece) / twins;
    const int narrowed = rounds(kernel, w, 1) != 0;
    if (narrowed)
        for (int r = 0; r < rows; r++) kernel->round(x + (size_t)r * ldx, w->in, rounded + (size_t)r * w->in);
    /* As many pieces for each thread; what is left over is cut into a part each, so that none waits for another's piece. */
    const int pieces = whole ? blocks / (piece * threads) * threads : 0;
    const int rest = pieces * piece, part = whole ? (blocks - rest + threads - 1) / threads : blocks;
    for (int item; (item = team_take(team, counter, 1)) < pieces + threads;) {
        const int at = item < pieces ? item * piece : rest + (item - pieces) * part;
        const int upto = at + (item < pieces ? piece : part), end = upto < blocks ? upto : blocks;
        if (at >= end) break;
        for (int first = 0; first < twins * blocks; first += blocks) {
            if (narrowed)
                kernel->product_rounded(w, first + at, first + end, rounded, w->in, rows, y, w->out, add);
            else
                kernel->product(w, first + at, first + end, x, ldx, rows, y, w->out, add);
        }
        if (after.then) after.then(after.what, at * BLOCK, end * BLOCK < out ? end * BLOCK : out);
    }
}

static void norm_row(const Stack *s, const Norm *norm, const float *x, float *y) {
    int d = s->d;
    float lane[BLOCK] = {0}, mean = 0.0f;
    if (!s->rms) {
        for (int i = 0; i < d; i++) lane[i % BLOCK] += x[i];
        for (int i = 0; i < BLOCK; i++) mean += lane[i];
        mean /= (float)d;
        memset(lane, 0, sizeof lane);
    }
    int whole = d / BLOCK * BLOCK;
    for (int i = 0; i < whole; i += BLOCK)
        for (int l = 0; l < BLOCK; l++) lane[l] += (x[i + l] - mean) * (x[i + l] - mean);
    for (int i = whole; i < d; i++) lane[i - whole] += (x[i] - mean) * (x[i] - mean);
    for (int n = BLOCK / 2; n; n /= 2)
        for (int l = 0; l < n; l++) lane[l] += lane[l + n];
    float scale = 1.0f / sqrtf(lane[0] / (float)d + s->eps);
    for (int i = 0; i < d; i++) y[i] = (x[i] - mean) * scale * norm->gain[i];
    if (norm->bias)
        for (int i = 0; i < d; i++) y[i] += norm->bias[i];
}

static void norms(const Stack *s, Team *team, int counter, const Norm *norm, const float *x, int rows, float *y) {
    for (int r; (r = team_take(team, counter, 1)) < rows;) norm_row(s, norm, x + (size_t)r * s->d, y + (size_t)r * s->d);
}

/* Turn queries and keys to the row's position, and put keys and values where the row's slot is. */
static void place(const Stack *s, const Row *row, int layer, float *qkv) {
    const int width = s->width, half = width / 2;
    if (row->cos)
        for (int h = 0; h < s->heads + s->shared; h++) {
            float *v = qkv + (size_t)h * width;
            for (int i = 0; i < half; i++) {
                float a = v[i], b = v[i + half];
                v[i] = a * row->cos[i] + b * row->sin[i];
                v[i + half] = b * row->cos[i + half] + a * row->sin[i + half];
            }
        }
    const size_t plane = (size_t)row->capacity * width;
    for (int part = 0; part < 2; part++)
        for (int h = 0; h < s->shared; h++) {
            const float *from = qkv + (size_t)(s->heads + part * s->shared + h) * width;
            const size_t to = ((size_t)(2 * layer + part) * s->shared + h) * plane + (size_t)row->slot * width;
            if (s->half)
                for (int i = 0; i < width; i++) ((uint16_t *)row->cache)[to + i] = narrow(from[i]);
            else
                memcpy((float *)row->cache + to, from, (size_t)width * sizeof(float));
        }
}

/* Rows of one text attend together, a few at a time: as many as leave every thread some. Which go together changes no bit. */
static void attention(const Pass *p, Team *team, int thread, int counter, int layer, int base, int rows) {
    const Stack *s = p->s;
    const Row *row = p->row + base;
    const int group = s->heads / s->shared, columns = (s->heads + 2 * s->shared) * s->width;
    const int share = rows * s->shared / (3 * team_size(team)), fit = QUERIES / group;
    const int most = share < 1 || fit < 1 ? 1 : share < fit ? share : fit;
    int start[TILE + 1], groups = 0;
    for (int r = 0; r < rows; r++) {
        const int begun = groups ? start[groups - 1] : 0;
        if (!r || r - begun >= most || row[r].cache != row[begun].cache || row[r].lead || row[begun].lead)
            start[groups++] = r;
    }
    start[groups] = rows;
    for (int item; (item = team_take(team, counter, 1)) < groups * s->shared;) {
        const int first = start[item / s->shared], count = start[item / s->shared + 1] - first, head = item % s->shared;
        Sees sees[QUERIES];
        for (int r = 0; r < count; r++) {
            const int entry = (base + first + r) * p->sight.heads + (p->sight.heads > 1 ? head : 0);
            const int *from = p->sight.start + entry;
            sees[r] = (Sees){p->sight.extra + from[0], p->sight.prefix[entry], from[1] - from[0]};
        }
        const size_t at = (size_t)head * group * s->width;
        p->kernel->attend(s, row + first, sees, count, layer, head, p->wide + (size_t)first * columns + at, columns,
                          p->mixed + (size_t)first * s->heads * s->width + at,
                          p->scores + (size_t)thread * p->room * p->queries, p->room);
    }
}

/* Rows of hidden outputs, [rows][out], and how they are activated. */
typedef struct {
    const Pass *p;
    int rows, out;
} Hidden;
static void activate(const void *what, int from, int upto) {
    const Hidden *hidden = what;
    const Stack *s = hidden->p->s;
    for (int r = 0; r < hidden->rows; r++) {
        float *h = hidden->p->wide + (size_t)r * hidden->out + from;
        hidden->p->kernel->activate(h, s->gated ? h + s->hidden : NULL, upto - from, s->silu);
    }
}

static void run(void *what, Team *team, int thread) {
    const Pass *p = what;
    const Stack *s = p->s;
    uint16_t *rounded = p->rounded ? p->rounded + (size_t)thread * p->broad : NULL;
    int number = 0;
    for (int base = 0; base < p->rows; base += TILE) {
        const int rows = p->rows - base < TILE ? p->rows - base : TILE;
        float *x = p->x + (size_t)base * s->d;
        for (int sub = p->first; sub < p->last; sub++) {
            const Layer *layer = s->layer + sub / 2;
            if (sub % 2 && p->mute) continue;
            norms(s, team, phase(team, thread, &number), sub % 2 ? &layer->norm2 : &layer->norm1, x, rows, p->normed);
            const Matrix *enter = sub % 2 ? &layer->up : &layer->qkv;
            const Hidden hidden = {p, rows, enter->out};
            const After after = sub % 2 ? (After){activate, &hidden, s->gated ? 2 : 1} : nothing;
            product(p->kernel, team, phase(team, thread, &number), enter, p->normed, s->d, rows, p->wide, 0, rounded, after);
            if (sub % 2 == 0) {
                int counter = phase(team, thread, &number);
                for (int r; (r = team_take(team, counter, 1)) < rows;)
                    place(s, p->row + base + r, sub / 2, p->wide + (size_t)r * enter->out);
                if (p->mute) continue;
                attention(p, team, thread, phase(team, thread, &number), sub / 2, base, rows);
            }
            const Matrix *leave = sub % 2 ? &layer->down : &layer->out;
            product(p->kernel, team, phase(team, thread, &number), leave, sub % 2 ? p->wide : p->mixed,
                    sub % 2 ? enter->out : leave->in, rows, x, 1, rounded, nothing);
        }
    }
}

int compute_layers(How how, const Stack *s, int first, int last, const Row *row, int rows, Sight sight, int mute, float *x) {
    const size_t tile = rows < TILE ? rows : TILE, columns = (size_t)(s->heads + 2 * s->shared) * s->width;
    const size_t up = (size_t)s->hidden * (s->gated ? 2 : 1), wide = columns > up ? columns : up;
    const size_t mixed = (size_t)s->heads * s->width;
    size_t most = 1;
    for (int i = 0; i < rows * sight.heads; i++) {
        size_t n = (size_t)row[i / sight.heads].lead + (size_t)sight.prefix[i] + (size_t)(sight.start[i + 1] - sight.start[i]);
        most = n > most ? n : most;
    }
    const size_t room = most + BLOCK, queries = QUERIES > s->heads / s->shared ? QUERIES : s->heads / s->shared;
    size_t broad = 0;
    for (int i = 0; i < s->layers; i++) {
        const Matrix *const each[] = {&s->layer[i].qkv, &s->layer[i].out, &s->layer[i].up, &s->layer[i].down};
        for (int m = 0; m < 4; m++) broad = rounds(how.kernel, each[m], tile) > broad ? rounds(how.kernel, each[m], tile) : broad;
    }
    float *all = malloc((tile * ((size_t)s->d + wide + mixed) + (size_t)how.threads * room * queries) * sizeof(float));
    uint16_t *rounded = broad ? malloc((size_t)how.threads * broad * sizeof(uint16_t)) : NULL;
    if (!all || (broad && !rounded)) {
        free(all);
        free(rounded);
        return -1;
    }
    float *w = all + tile * (size_t)s->d, *m = w + tile * wide;
    Pass pass = {how.kernel, s, first, last, rows, mute, row, sight, x, all, w, m, m + tile * mixed, room, queries, rounded, broad};
    team_run(how.threads, run, &pass);
    free(all);
    free(rounded);
    return 0;
}

typedef struct {
    const Kernel *kernel;
    const Stack *s; /* NULL: no norm */
    const Matrix *w;
    const float *x;
    int rows;
    float *normed, *y; /* y NULL: the norm alone */
    uint16_t *rounded;
} Single;

static void run_single(void *what, Team *team, int thread) {
    const Single *p = what;
    const size_t broad = rounds(p->kernel, p->w, TILE);
    uint16_t *rounded = broad ? p->rounded + (size_t)thread * broad : NULL;
    int number = 0;
    for (int base = 0; base < p->rows; base += TILE) {
        const int rows = p->rows - base < TILE ? p->rows - base : TILE;
        const float *x = p->x + (size_t)base * p->w->in;
        float *normed = p->s ? p->normed + (size_t)base * p->w->in : NULL;
        if (p->s) norms(p->s, team, phase(team, thread, &number), &p->s->final, x, rows, normed);
        if (p->y)
            product(p->kernel, team, phase(team, thread, &number), p->w, p->s ? normed : x, p->w->in, rows,
                    p->y + (size_t)base * p->w->out, 0, rounded, nothing);
    }
}

static int run_alone(How how, const Stack *s, const Matrix *w, const float *x, int rows, float *normed, float *y) {
    const size_t broad = rounds(how.kernel, w, TILE);
    uint16_t *rounded = broad ? malloc((size_t)how.threads * broad * sizeof(uint16_t)) : NULL;
    if (broad && !rounded) return -1;
    Single job = {how.kernel, s, w, x, rows, normed, y, rounded};
    team_run(how.threads, run_single, &job);
    free(rounded);
    return 0;
}

int compute_product(How how, const Matrix *w, const float *x, int rows, float *y) {
    return run_alone(how, NULL, w, x, rows, NULL, y);
}

int compute_head(How how, const Stack *s, const float *x, int rows, float *normed, float *logits) {
    return run_alone(how, s, &s->head, x, rows, normed, logits);
}
