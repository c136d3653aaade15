/* The driver: the sublayers of a pass over a few rows, each a handful of phases that the team's threads share.
 *
 * Rows go through all layers in tiles, so that a tile's states stay in the cache; a row never looks at a later one. In a
 * phase the threads take pieces of the work from a counter, and meet at a barrier before the next phase reads the result.
 */
#include "compute.h"

#include <stdlib.h>

typedef struct {
    const Kernel *kernel;
    const Stack *s;
    int first, last, rows, mute;
    const Row *row;
    Sight sight;
    float *x, *wide, *mixed, *scores; /* scores: [threads][queries][room] */
    size_t room, queries;
    float *normed;     /* [threads][tile][d] */
    uint16_t *rounded; /* [threads][broad], or NULL */
    size_t tile, broad;
} Pass;

enum { PIECE = 8, QUERIES = 12 }; /* blocks of outputs, queries: what a thread takes at a time */

/* A thread at work on a pass over rows: the phases it has seen, and its own room for a tile of rows. */
typedef struct {
    const Kernel *kernel;
    const Stack *s;
    Team *team;
    int thread, phases;
    float *normed;
    uint16_t *rounded;
} Hand;

/* The next phase of the job: its counter, reset two phases ahead, when nobody takes from it any more. */
static int phase(Hand *hand) {
    const int counter = ++hand->phases & 3;
    team_barrier(hand->team);
    if (hand->thread == 0) team_reset(hand->team, (counter + 2) & 3);
    return counter;
}

/* Whether this kernel takes rows as bfloat16. */
static int rounds(const Kernel *kernel, const Matrix *w) { return kernel->product_rounded && w->format != FLOATS; }
/* Numbers of bfloat16 that a thread needs room for: the rounded rows, and a block of a quantised matrix, unpacked. */
static size_t spare(const Kernel *kernel, const Matrix *w, size_t rows) {
    return ((rounds(kernel, w) ? rows : 0) + (w->format > HALVES ? BLOCK : 0)) * (size_t)w->in;
}

/* What goes into a product: rows [count][ld], normed on the way where there is a norm. */
typedef struct {
    const float *x;
    int ld, count;
    const Norm *norm;
} Rows;

/* What becomes of outputs from..upto-1 of every row: the thread that made them does it, while they are in its cache. */
typedef struct {
    void (*then)(const void *what, int from, int upto); /* NULL: nothing */
    const void *what;
    int twins;       /* 2: an output comes together with its like in the second half */
    int unit, joint; /* of the first `joint` outputs, `unit` blocks come together */
} After;
static const After nothing = {NULL, NULL, 1, 1, 0};

static int up_to_whole(int n, int unit) { return (n + unit - 1) / unit * unit; }

/* Blocks first..last-1 of y = x W' [+ y] + bias. A quantised matrix is unpacked block by block where there are many rows. */
static void multiply(Hand *hand, const Matrix *w, int first, int last, Rows in, float *y, int add) {
    const Kernel *kernel = hand->kernel;
    const int narrowed = rounds(kernel, w);
    if (w->format <= HALVES) {
        if (narrowed)
            kernel->product_rounded(w, first, last, hand->rounded, w->in, in.count, y, w->out, add);
        else
            kernel->product(w, first, last, in.x, in.ld, in.count, y, w->out, add);
        return;
    }
    if (in.count <= kernel->few) {
        const void *x = narrowed ? (const void *)hand->rounded : in.x;
        kernel->product_few(w, first, last, x, narrowed ? w->in : in.ld, in.count, y, w->out, add);
        return;
    }
    uint16_t *unpacked = hand->rounded + (narrowed ? (size_t)in.count * w->in : 0);
    for (int b = first; b < last; b++) {
        const int at = b * BLOCK, out = w->out - at < BLOCK ? w->out - at : BLOCK;
        const Matrix block = {unpacked, w->bias ? w->bias + at : NULL, out, w->in, HALVES};
        kernel->unpack(w, b, unpacked);
        if (narrowed)
            kernel->product_rounded(&block, 0, 1, hand->rounded, w->in, in.count, y + at, w->out, add);
        else
            kernel->product(&block, 0, 1, in.x, in.ld, in.count, y + at, w->out, add);
    }
}

/* y = norm(x) W' [+ y] + bias. Each thread norms and rounds all rows for itself: that costs less than one more barrier. */
static void product(Hand *hand, const Matrix *w, Rows in, float *y, int add, After after) {
    const Kernel *kernel = hand->kernel;
    const int out = w->out / after.twins, whole = after.twins == 1 || out % BLOCK == 0; /* or the halves share a block */
    const int twins = whole ? after.twins : 1, blocks = (w->out / twins + BLOCK - 1) / BLOCK, threads = team_size(hand->team);
    int piece = twins * blocks / (4 * threads) & ~3; /* a few pieces a thread, whole groups of blocks */
    piece = up_to_whole((piece < 4 ? 4 : piece > PIECE ? PIECE : piece) / twins, after.unit);
    const int counter = phase(hand), narrowed = rounds(kernel, w);
    if (in.norm) {
        for (int r = 0; r < in.count; r++)
            kernel->norm(hand->s, in.norm, in.x + (size_t)r * in.ld, hand->normed + (size_t)r * w->in);
        in = (Rows){hand->normed, w->in, in.count, NULL};
    }
    if (narrowed)
        for (int r = 0; r < in.count; r++) kernel->round(in.x + (size_t)r * in.ld, w->in, hand->rounded + (size_t)r * w->in);
    /* As many pieces for each thread; what is left over is cut into a part each, so that none waits for another's piece. */
    const int pieces = whole ? blocks / (piece * threads) * threads : 0, rest = pieces * piece;
    const int unit = rest * BLOCK < after.joint ? after.unit : 1;
    const int part = whole ? up_to_whole((blocks - rest + threads - 1) / threads, unit) : blocks;
    for (int item; (item = team_take(hand->team, counter, 1)) < pieces + threads;) {
        const int at = item < pieces ? item * piece : rest + (item - pieces) * part;
        const int upto = at + (item < pieces ? piece : part), end = upto < blocks ? upto : blocks;
        if (at >= end) break;
        for (int first = 0; first < twins * blocks; first += blocks) multiply(hand, w, first + at, first + end, in, y, add);
        if (after.then) after.then(after.what, at * BLOCK, end * BLOCK < out ? end * BLOCK : out);
    }
}

/* Rows of one text attend together, a few at a time: as many as leave every thread some. Which go together changes no bit. */
static void attention(const Pass *p, Hand *hand, int layer, int base, int rows) {
    const Stack *s = p->s;
    const Row *row = p->row + base;
    const int group = s->heads / s->shared, columns = (s->heads + 2 * s->shared) * s->width;
    const int share = rows * s->shared / (3 * team_size(hand->team)), fit = QUERIES / group;
    const int most = share < 1 || fit < 1 ? 1 : share < fit ? share : fit;
    int start[TILE + 1], groups = 0;
    for (int r = 0; r < rows; r++) {
        const int begun = groups ? start[groups - 1] : 0;
        if (!r || r - begun >= most || row[r].cache != row[begun].cache || row[r].lead || row[begun].lead)
            start[groups++] = r;
    }
    start[groups] = rows;
    for (int item, counter = phase(hand); (item = team_take(hand->team, counter, 1)) < groups * s->shared;) {
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
                          p->scores + (size_t)hand->thread * p->room * p->queries, p->room);
    }
}

/* Rows of outputs, [rows][out], of a layer's first matrices, and what is done to them. */
typedef struct {
    const Pass *p;
    int base, rows, out, layer;
} Outputs;
static void activate(const void *what, int from, int upto) {
    const Outputs *o = what;
    const Stack *s = o->p->s;
    for (int r = 0; r < o->rows; r++) {
        float *h = o->p->wide + (size_t)r * o->out + from;
        o->p->kernel->activate(h, s->gated ? h + s->hidden : NULL, upto - from, s->silu);
    }
}
static void place(const void *what, int from, int upto) {
    const Outputs *o = what;
    for (int r = 0; r < o->rows; r++)
        o->p->kernel->place(o->p->s, o->p->row + o->base + r, o->layer, o->p->wide + (size_t)r * o->out, from, upto);
}

static void run(void *what, Team *team, int thread) {
    const Pass *p = what;
    const Stack *s = p->s;
    Hand hand = {p->kernel, s, team, thread, 0, p->normed + (size_t)thread * p->tile * s->d,
                 p->rounded ? p->rounded + (size_t)thread * p->broad : NULL};
    int head = s->width; /* in blocks: whole heads stand in whole blocks */
    for (int n = BLOCK; n > 1 && head % 2 == 0; n /= 2) head /= 2;
    for (int base = 0; base < p->rows; base += TILE) {
        const int rows = p->rows - base < TILE ? p->rows - base : TILE;
        float *x = p->x + (size_t)base * s->d;
        for (int sub = p->first; sub < p->last; sub++) {
            const Layer *layer = s->layer + sub / 2;
            const int mlp = sub % 2;
            if (mlp && p->mute) continue;
            const Matrix *enter = mlp ? &layer->up : &layer->qkv, *leave = mlp ? &layer->down : &layer->out;
            const Outputs made = {p, base, rows, enter->out, sub / 2};
            const After after = mlp ? (After){activate, &made, s->gated ? 2 : 1, 1, 0}
                                    : (After){place, &made, 1, head, (s->heads + s->shared) * s->width};
            product(&hand, enter, (Rows){x, s->d, rows, mlp ? &layer->norm2 : &layer->norm1}, p->wide, 0, after);
            if (!mlp && p->mute) continue;
            if (!mlp) attention(p, &hand, sub / 2, base, rows);
            product(&hand, leave, (Rows){mlp ? p->wide : p->mixed, mlp ? enter->out : leave->in, rows, NULL}, x, 1, nothing);
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
        for (int m = 0; m < 4; m++) broad = spare(how.kernel, each[m], tile) > broad ? spare(how.kernel, each[m], tile) : broad;
    }
    const size_t own = tile * (size_t)s->d + room * queries; /* of a thread */
    float *all = malloc((tile * (wide + mixed) + (size_t)how.threads * own) * sizeof(float));
    uint16_t *rounded = broad ? malloc((size_t)how.threads * broad * sizeof(uint16_t)) : NULL;
    if (!all || (broad && !rounded)) {
        free(all);
        free(rounded);
        return -1;
    }
    float *m = all + tile * wide, *scores = m + tile * mixed, *normed = scores + (size_t)how.threads * room * queries;
    Pass pass = {how.kernel, s,    first, last,    rows,   mute,    row,  sight, x,
                 all,        m, scores, room, queries, normed, rounded, tile, broad};
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
    const size_t broad = spare(p->kernel, p->w, TILE);
    const int d = p->w->in;
    Hand hand = {p->kernel, p->s, team, thread, 0, NULL, broad ? p->rounded + (size_t)thread * broad : NULL};
    for (int base = 0; base < p->rows; base += TILE) {
        const int rows = p->rows - base < TILE ? p->rows - base : TILE;
        const float *x = p->x + (size_t)base * d;
        if (p->s) {
            float *normed = p->normed + (size_t)base * d;
            for (int r, counter = phase(&hand); (r = team_take(team, counter, 1)) < rows;)
                p->kernel->norm(p->s, &p->s->final, x + (size_t)r * d, normed + (size_t)r * d);
            x = normed;
        }
        if (p->y) product(&hand, p->w, (Rows){x, d, rows, NULL}, p->y + (size_t)base * p->w->out, 0, nothing);
    }
}

static int run_alone(How how, const Stack *s, const Matrix *w, const float *x, int rows, float *normed, float *y) {
    const size_t broad = spare(how.kernel, w, TILE);
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
