/* What is done to the numbers of one row, in terms of one vector type; kernels.c includes this after slab.h, whose FN, V, LOAD
 * and the like it uses, with MAX, TOTAL (the sum of a vector by a fixed tree) and FUSE(a, b, c): a b + c of single floats.
 */

/* exp by Cephes' reduction and polynomial, about 2 ulp; without branches, so that a loop over it becomes vectors. */
INLINE float FN(exp)(float x) {
    union {
        float f;
        uint32_t i; /* what comes of a NaN may overflow; it is a NaN all the same */
    } z, scale;
    x = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    z.f = FUSE(x, 1.44269504f, 12582912.0f); /* the nearest integer, in the low bits */
    const float n = z.f - 12582912.0f, r = FUSE(n, 2.12194440e-4f, FUSE(n, -0.693359375f, x));
    float p = FUSE(1.9875691500e-4f, r, 1.3981999507e-3f);
    p = FUSE(p, r, 8.3334519073e-3f);
    p = FUSE(p, r, 4.1665795894e-2f);
    p = FUSE(p, r, 1.6666665459e-1f);
    p = FUSE(p, r, 5.0000001201e-1f);
    scale.i = (z.i - 0x4b400000u + 127u) << 23;
    return (FUSE(p, r * r, r) + 1.0f) * scale.f;
}

/* h = silu(h), or GPT-2's gelu (tanh form); times `up` where there is a gate. */
static TARGET void FN(activate)(float *h, const float *up, int n, int silu) {
    if (silu)
        for (int i = 0; i < n; i++) h[i] = h[i] / (1.0f + FN(exp)(-h[i]));
    else
        for (int i = 0; i < n; i++) /* x (1 + tanh u) / 2 = x / (1 + exp(-2 u)) */
            h[i] = h[i] / (1.0f + FN(exp)(-1.5957691216f * (h[i] + 0.044715f * h[i] * h[i] * h[i])));
    if (up)
        for (int i = 0; i < n; i++) h[i] *= up[i];
}

/* e[0..n-1] = exp(e - max e); returns their sum, in VEC lanes by index. */
INLINE float FN(soft)(float *e, int n) {
    V high = SET(e[0]), sum = SET(0.0f);
    int j = 0;
    for (; j + VEC <= n; j += VEC) high = MAX(LOAD(e + j), high);
    float lane[VEC], most;
    STORE(lane, high);
    most = lane[0];
    for (int l = 1; l < VEC; l++) most = lane[l] > most ? lane[l] : most;
    for (; j < n; j++) most = e[j] > most ? e[j] : most;
    for (j = 0; j < n; j++) e[j] = FN(exp)(e[j] - most);
    for (j = 0; j + VEC <= n; j += VEC) sum = ADD(LOAD(e + j), sum);
    float total = TOTAL(sum);
    for (; j < n; j++) total += e[j];
    return total;
}

/* y = norm(x): sums run in BLOCK lanes by index, which are then added up two by two. */
INLINE void FN(norm_of)(const Stack *s, const Norm *norm, const int d, const float *x, float *y) {
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

static TARGET void FN(norm)(const Stack *s, const Norm *norm, const float *x, float *y) { FN(norm_of)(s, norm, s->d, x, y); }

/* Numbers from..upto-1 of a row's queries, keys and values: norm and turn queries and keys, of which all of a head is there, to the
 * row's position, and put keys and values where the row's slot is. */
static TARGET void FN(place)(const Stack *s, const Row *row, int layer, float *qkv, int from, int upto) {
    const int width = s->width, half = width / 2;
    const size_t plane = (size_t)row->capacity * width;
    for (int h = from / width; h * width < upto; h++) {
        float *v = qkv + (size_t)h * width;
        const Norm *own = h < s->heads ? &s->layer[layer].q_norm : &s->layer[layer].k_norm;
        if (own->gain && h < s->heads + s->shared) FN(norm_of)(s, own, width, v, v);
        if (row->cos && h < s->heads + s->shared)
            for (int i = 0; i < half; i++) {
                const float a = v[i], b = v[i + half];
                v[i] = a * row->cos[i] + b * row->sin[i];
                v[i + half] = b * row->cos[i + half] + a * row->sin[i + half];
            }
        if (h < s->heads) continue;
        const int part = (h - s->heads) / s->shared, head = (h - s->heads) % s->shared;
        const int begin = h * width < from ? from - h * width : 0, end = upto - h * width < width ? upto - h * width : width;
        const size_t to = ((size_t)(2 * layer + part) * s->shared + head) * plane + (size_t)row->slot * width;
        if (s->half)
            for (int i = begin; i < end; i++) ((uint16_t *)row->cache)[to + i] = narrow(v[i]);
        else
            for (int i = begin; i < end; i++) ((float *)row->cache)[to + i] = v[i];
    }
}
