/* Fingerprints, statistics and sketch of one tensor in host memory, in one pass.
 *
 * The definitions are record/fingerprint.py, record/statistics.py and record/sketch.py. Integers are exact.
 * Sums of floating numbers are taken in an order that depends on the elements' index alone: 16 lanes within a
 * block of 1024 elements, blocks in order. So they are the same bits for every stride and on every processor
 * (compile with -ffp-contract=off).
 *
 * C11; loops over arrays of known length, which compilers turn into vector instructions of the target.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "digest_hash.h"

enum { BLOCK = 1024, LANES = 16, BINS = 256, BUCKETS = 256, MAX_DIMS = 64, FEW_BINS = 28 };
enum { PANEL_BYTES = 1 << 20, LINE = 64 };

/* How to read an element, as backends/digest_kernel.py has it. */
enum kind { BITS_ONLY, FLOAT32, BFLOAT16, FLOAT16, FLOAT64, BY_TABLE, INT16, UINT16, INT32, UINT32, INT64, UINT64 };
enum wanted { STATISTICS = 1, SKETCH = 2 };

/* Vectors of GCC and clang, as wide as the processor's: wider ones compile badly. */
#if defined(__AVX512BW__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
typedef uint8_t bytes_t __attribute__((vector_size(WIDTH)));
typedef int32_t ints_t __attribute__((vector_size(WIDTH)));
typedef float floats_t __attribute__((vector_size(WIDTH)));
typedef double doubles_t __attribute__((vector_size(WIDTH)));
typedef float half_floats_t __attribute__((vector_size(WIDTH / 2)));
enum { DOUBLES = WIDTH / 8, FLOATS = WIDTH / 4, PARTS = LANES / DOUBLES };

static const uint64_t SIGN_SEED = 0xABC98388FB8FAC03u, TURN_SEED = 0x9E3779B97F4A7C15u;

/* What comes out; 64-bit words, read by position. The sketch is there if it is wanted. */
struct digest {
    uint64_t ordered, unordered, zeros, nans, infs;
    double low, high, total, squares;
    uint64_t exponents[BINS];
    double sketch[BUCKETS];
};

/* Which elements of which canonical tensor, as backends/digest_kernel.py makes it. */
struct tensor {
    int64_t dims;
    const int64_t *shape, *strides; /* [dims], in elements */
    int64_t width, kind;            /* bytes of an element, and how to read it */
    const float *table;             /* [256] numbers of one-byte elements */
    int64_t runs;
    const int64_t *starts, *lengths; /* [runs] of elements that are consecutive in the canonical tensor */
};

/* The element that comes next, in the canonical tensor. */
struct cursor {
    const int64_t *starts, *lengths;
    int64_t run, used;
};

struct state {
    struct digest *out;
    const float *table;
    int kind, width, wanted;
    struct cursor next;
    int64_t filled; /* bytes of `pending` in use */
    uint32_t counts[4][BINS];
    double wide[BLOCK];
    float single[BLOCK];
    uint8_t exponent[BLOCK] __attribute__((aligned(64)));
    unsigned char pending[BLOCK * 8];
};

/* Go on by up to n elements of one run; return how many, and where the first of them is. */
static int advance(struct cursor *at, int n, int64_t *start)
{
    const int64_t left = at->lengths[at->run] - at->used;
    const int taken = n < left ? n : (int)left;
    *start = at->starts[at->run] + at->used;
    at->used += taken;
    if (taken == left) at->run++, at->used = 0;
    return taken;
}

static void hash_block(struct state *s, const unsigned char *data, int n)
{
    struct cursor at = s->next;
    int64_t start;
    for (int i = 0, taken; i < n; i += taken) {
        taken = advance(&at, n - i, &start);
        hash_bytes(data + i * s->width, (int64_t)taken * s->width, start * s->width, s->width, &s->out->ordered,
                   &s->out->unordered);
    }
}

static inline float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float float_of_half(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = half & 0x7FFF;
    uint32_t normal = (magnitude << 13) + ((127 - 15) << 23);
    uint32_t special = (magnitude << 13) | 0x7F800000; /* infinities and NaN */
    uint32_t tiny = bits_of((float)(int32_t)magnitude * 0x1p-24f);
    uint32_t chosen = magnitude < 0x400 ? tiny : magnitude >= 0x7C00 ? special : normal;
    return float_of(sign | chosen);
}

/* Fill `single` of types that fit into float32. */
static void widen(int kind, const float *table, const unsigned char *restrict data, float *restrict single, int n)
{
    uint16_t half;
    if (kind == FLOAT32) memcpy(single, data, (size_t)n * sizeof *single);
    else if (kind == BFLOAT16)
        for (int i = 0; i < n; i++) memcpy(&half, data + 2 * i, 2), single[i] = float_of((uint32_t)half << 16);
    else if (kind == FLOAT16)
        for (int i = 0; i < n; i++) memcpy(&half, data + 2 * i, 2), single[i] = float_of_half(half);
    else
        for (int i = 0; i < n; i++) single[i] = table[data[i]];
}

#define CONVERT(TYPE)                                                                       \
    for (int i = 0; i < n; i++) {                                                           \
        TYPE value;                                                                         \
        memcpy(&value, data + (size_t)i * sizeof value, sizeof value);                      \
        s->wide[i] = (double)value;                                                         \
        s->single[i] = (float)value;                                                        \
    }

/* Fill `wide`, and `single`, which the exponents are of, of the other types. */
static void convert(struct state *s, const unsigned char *data, int n)
{
    switch (s->kind) {
    case FLOAT64: CONVERT(double) break;
    case INT16: CONVERT(int16_t) break;
    case UINT16: CONVERT(uint16_t) break;
    case INT32: CONVERT(int32_t) break;
    case UINT32: CONVERT(uint32_t) break;
    case INT64: CONVERT(int64_t) break;
    default: CONVERT(uint64_t) break;
    }
}

/* Count the bytes of `data` that equal `wanted`. */
static inline int equal_bytes(const uint8_t *data, uint8_t wanted)
{
    int count = 0;
#if defined(__AVX512BW__)
    const __m512i all = _mm512_set1_epi8((char)wanted);
    for (int i = 0; i < BLOCK; i += 64)
        count += __builtin_popcountll(_mm512_cmpeq_epi8_mask(_mm512_load_si512(data + i), all));
#elif defined(__AVX2__)
    const __m256i all = _mm256_set1_epi8((char)wanted);
    for (int i = 0; i < BLOCK; i += 32) {
        __m256i equal = _mm256_cmpeq_epi8(_mm256_load_si256((const __m256i *)(data + i)), all);
        count += __builtin_popcount((uint32_t)_mm256_movemask_epi8(equal));
    }
#else
    bytes_t counts = {0}; /* a byte counts to BLOCK / WIDTH */
    for (int i = 0; i < BLOCK / WIDTH; i++) counts -= (bytes_t)(((const bytes_t *)data)[i] == wanted);
    for (int k = 0; k < WIDTH; k++) count += counts[k];
#endif
    return count;
}

static void count_few(struct state *s, int n, int first, int last)
{
    const int padding = BLOCK - n;
    memset(s->exponent + n, 0, (size_t)padding);
    for (int bin = first; bin <= last; bin++)
        s->out->exponents[bin] += (uint64_t)(equal_bytes(s->exponent, (uint8_t)bin) - (bin ? 0 : padding));
}

static void count_many(struct state *s, int n)
{
    int i = 0;
    for (; i + 4 <= n; i += 4)
        for (int k = 0; k < 4; k++) s->counts[k][s->exponent[i + k]]++;
    for (; i < n; i++) s->counts[0][s->exponent[i]]++;
    for (int bin = 0; bin < BINS; bin++) {
        s->out->exponents[bin] += (uint64_t)s->counts[0][bin] + s->counts[1][bin] + s->counts[2][bin] + s->counts[3][bin];
        s->counts[0][bin] = s->counts[1][bin] = s->counts[2][bin] = s->counts[3][bin] = 0;
    }
}

/* Add to the histogram; exponents of a tensor lie close together, and comparing is then faster than counting. */
static void count_exponents(struct state *s, int n)
{
    uint8_t first = 255, last = 0, zero = 0;
    for (int i = 0; i < n; i++) s->exponent[i] = (uint8_t)(bits_of(s->single[i]) >> 23);
    for (int i = 0; i < n; i++) {
        uint8_t e = s->exponent[i], low = (uint8_t)(e - 1); /* bin 0 apart: zeros are far from the rest */
        first = low < first ? low : first;
        last = e > last ? e : last;
        zero |= e == 0;
    }
    if (last - first > FEW_BINS) count_many(s, n);
    else {
        if (zero) count_few(s, n, 0, 0);
        if (last) count_few(s, n, first + 1, last);
    }
}

/* Sums of 16 lanes, whatever the width of a vector. */
struct lanes {
    doubles_t total[PARTS], squares[PARTS];
};

static void add_lanes(struct digest *out, const struct lanes *sums)
{
    double total[LANES], squares[LANES];
    memcpy(total, sums->total, sizeof total);
    memcpy(squares, sums->squares, sizeof squares);
    for (int width = LANES / 2; width; width /= 2)
        for (int k = 0; k < width; k++) total[k] += total[k + width], squares[k] += squares[k + width];
    out->total += total[0];
    out->squares += squares[0];
}

#if defined(__AVX512BW__)
#define smaller(A, B) ((floats_t)_mm512_min_ps((__m512)(A), (__m512)(B)))
#define larger(A, B) ((floats_t)_mm512_max_ps((__m512)(A), (__m512)(B)))
#elif defined(__AVX2__)
#define smaller(A, B) ((floats_t)_mm256_min_ps((__m256)(A), (__m256)(B)))
#define larger(A, B) ((floats_t)_mm256_max_ps((__m256)(A), (__m256)(B)))
#else
/* A choice between vectors is C++ only. */
static inline floats_t choose(ints_t first, floats_t a, floats_t b)
{
    return (floats_t)((first & (ints_t)a) | (~first & (ints_t)b));
}
#define smaller(A, B) choose((A) < (B), A, B)
#define larger(A, B) choose((A) > (B), A, B)
#endif

static void moments_of_finite_floats(struct state *s, int n)
{
    struct lanes sums;
    floats_t low, high;
    memset(&sums, 0, sizeof sums);
    memset(s->single + n, 0, (size_t)(BLOCK - n) * sizeof *s->single); /* zeros change no sum */
    for (int i = 0; i < n; i += LANES)
        for (int part = 0; part < PARTS; part++) {
            half_floats_t narrow;
            memcpy(&narrow, s->single + i + part * DOUBLES, sizeof narrow);
            doubles_t wide = __builtin_convertvector(narrow, doubles_t);
            sums.total[part] += wide;
            sums.squares[part] += wide * wide;
        }
    int i = 0;
    for (int k = 0; k < FLOATS; k++) low[k] = high[k] = s->single[0];
    for (; i + FLOATS <= n; i += FLOATS) {
        floats_t value;
        memcpy(&value, s->single + i, sizeof value);
        low = smaller(value, low);
        high = larger(value, high);
    }
    for (; i < n; i++) {
        low[0] = s->single[i] < low[0] ? s->single[i] : low[0];
        high[0] = s->single[i] > high[0] ? s->single[i] : high[0];
    }
    for (int k = 0; k < FLOATS; k++) {
        if (low[k] < s->out->low) s->out->low = low[k];
        if (high[k] > s->out->high) s->out->high = high[k];
    }
    add_lanes(s->out, &sums);
}

/* The same from `wide`, whatever it holds; leaves 0 there where an element is not finite. */
static void moments_of_doubles(struct state *s, int n)
{
    struct lanes sums;
    struct digest *out = s->out;
    double low = out->low, high = out->high;
    uint64_t nans = 0, infs = 0;
    memset(&sums, 0, sizeof sums);
    for (int i = 0; i < n; i++) {
        double value = s->wide[i], finite = value - value == 0;
        nans += value != value;
        infs += value == value && finite == 0;
        low = finite != 0 && value < low ? value : low;
        high = finite != 0 && value > high ? value : high;
        s->wide[i] = finite != 0 ? value : 0;
    }
    memset(s->wide + n, 0, (size_t)(BLOCK - n) * sizeof *s->wide);
    for (int i = 0; i < n; i += LANES)
        for (int part = 0; part < PARTS; part++) {
            doubles_t wide;
            memcpy(&wide, s->wide + i + part * DOUBLES, sizeof wide);
            sums.total[part] += wide;
            sums.squares[part] += wide * wide;
        }
    out->nans += nans, out->infs += infs;
    out->low = low, out->high = high;
    add_lanes(out, &sums);
}

static void count_zeros(struct state *s, int n, int doubles)
{
    uint32_t zeros = 0;
    if (doubles) for (int i = 0; i < n; i++) zeros += s->wide[i] == 0;
    else for (int i = 0; i < n; i++) zeros += (bits_of(s->single[i]) << 1) == 0;
    s->out->zeros += zeros;
}

static void statistics_of_block(struct state *s, const unsigned char *data, int n)
{
    int floats = s->kind <= BY_TABLE && s->kind != FLOAT64;
    uint64_t tiny = s->out->exponents[0], top = s->out->exponents[BINS - 1];
    if (floats) widen(s->kind, s->table, data, s->single, n);
    else convert(s, data, n);
    count_exponents(s, n);
    int finite = s->out->exponents[BINS - 1] == top;
    if (!floats || s->out->exponents[0] != tiny) count_zeros(s, n, !floats);
    if (floats && (!finite || s->wanted & SKETCH))
        for (int i = 0; i < n; i++) s->wide[i] = s->single[i];
    if (floats && finite) moments_of_finite_floats(s, n);
    else moments_of_doubles(s, n);
}

/* Flip the sign bits of `count` numbers, of which the first is element `start`. */
static void flip_signs(double *wide, int count, int64_t start)
{
    for (int i = 0, part; i < count; i += part) {
        const int shift = (int)((start + i) % 64);
        const uint64_t signs = mix64((uint64_t)((start + i) / 64) + SIGN_SEED) >> shift;
        part = 64 - shift < count - i ? 64 - shift : count - i;
        for (int k = 0; k < part; k++) {
            uint64_t bits;
            memcpy(&bits, wide + i + k, sizeof bits);
            bits ^= (signs >> k) << 63;
            memcpy(wide + i + k, &bits, sizeof bits);
        }
    }
}

/* Add `wide`: blocks of 256 elements with random signs, each turned. */
static void sketch_block(struct state *s, int n)
{
    struct cursor at = s->next;
    int64_t start;
    for (int i = 0, taken; i < n; i += taken) {
        taken = advance(&at, n - i, &start);
        flip_signs(s->wide + i, taken, start);
        for (int done = 0, count; done < taken; done += count) {
            const int64_t place = start + done;
            const double *numbers = s->wide + i + done;
            const int left = BUCKETS - (int)(place % BUCKETS);
            count = taken - done < left ? taken - done : left;
            int turn = (int)((mix64((uint64_t)(place / BUCKETS) + TURN_SEED) + (uint64_t)place) % BUCKETS);
            int before = count < BUCKETS - turn ? count : BUCKETS - turn;
            for (int k = 0; k < before; k++) s->out->sketch[turn + k] += numbers[k];
            for (int k = before; k < count; k++) s->out->sketch[turn + k - BUCKETS] += numbers[k];
        }
    }
}

/* Take a block whose bits are all zero, as gradients are before the first accumulation; return 0 if it is none. */
static int take_zeros(struct state *s, const unsigned char *data, int n)
{
    uint64_t any = 0, word;
    const int bytes = n * s->width;
    if ((s->wanted & STATISTICS && s->kind == BY_TABLE) || bytes % (int)sizeof word) return 0;
    for (int start = 0; start < bytes && !any; start += 512) {
        const int stop = start + 512 < bytes ? start + 512 : bytes;
        for (int i = start; i < stop; i += (int)sizeof word) memcpy(&word, data + i, sizeof word), any |= word;
    }
    if (any) return 0;
    if (s->wanted & STATISTICS) {
        s->out->zeros += (uint64_t)n;
        s->out->exponents[0] += (uint64_t)n;
        if (s->out->low > 0) s->out->low = 0;
        if (s->out->high < 0) s->out->high = 0;
    }
    return 1;
}

static void take_block(struct state *s, const unsigned char *data, int n)
{
    int64_t start;
    if (!take_zeros(s, data, n)) {
        hash_block(s, data, n);
        if (s->wanted & STATISTICS) statistics_of_block(s, data, n);
        if (s->wanted & SKETCH) sketch_block(s, n);
    }
    for (int i = 0; i < n;) i += advance(&s->next, n - i, &start);
}

/* Take the next elements in C order; blocks begin at multiples of BLOCK however they come. */
static void feed(struct state *s, const unsigned char *data, int64_t bytes)
{
    const int64_t block = (int64_t)BLOCK * s->width;
    while (bytes) {
        if (!s->filled && bytes >= block) {
            take_block(s, data, BLOCK);
            data += block, bytes -= block;
            continue;
        }
        int64_t part = block - s->filled < bytes ? block - s->filled : bytes;
        memcpy(s->pending + s->filled, data, (size_t)part);
        data += part, bytes -= part, s->filled += part;
        if (s->filled == block) take_block(s, s->pending, BLOCK), s->filled = 0;
    }
}

/* Take `count` elements that lie `step` bytes apart. */
static void feed_apart(struct state *s, const unsigned char *data, int64_t count, int64_t step)
{
    unsigned char row[BLOCK * 8];
    const int width = s->width;
    for (int64_t start = 0; start < count; start += BLOCK) {
        int64_t n = count - start < BLOCK ? count - start : BLOCK;
        const unsigned char *from = data + start * step;
        for (int64_t i = 0; i < n; i++) memcpy(row + i * width, from + i * step, (size_t)width);
        feed(s, row, n * width);
    }
}

/* Take a matrix whose columns are contiguous, a few rows at a time so that each line of memory is read once. */
static int feed_turned(struct state *s, const unsigned char *data, int64_t rows, int64_t columns, int64_t step)
{
    const int width = s->width;
    int64_t panel = LINE / width;
    if (panel * columns * width > PANEL_BYTES || rows < 2) return 0;
    unsigned char *buffer = malloc((size_t)(panel * columns * width));
    if (!buffer) return 0;
    for (int64_t row = 0; row < rows; row += panel) {
        int64_t high = rows - row < panel ? rows - row : panel;
        const unsigned char *from = data + row * width;
        if (width == 4)
            for (int64_t j = 0; j < columns; j++)
                for (int64_t r = 0; r < high; r++) memcpy(buffer + (r * columns + j) * 4, from + j * step + r * 4, 4);
        else if (width == 2)
            for (int64_t j = 0; j < columns; j++)
                for (int64_t r = 0; r < high; r++) memcpy(buffer + (r * columns + j) * 2, from + j * step + r * 2, 2);
        else
            for (int64_t j = 0; j < columns; j++)
                for (int64_t r = 0; r < high; r++)
                    memcpy(buffer + (r * columns + j) * width, from + j * step + r * width, (size_t)width);
        feed(s, buffer, high * columns * width);
    }
    free(buffer);
    return 1;
}

/* Merge dimensions that are one in memory; return how many are left. Strides become bytes. */
static int merge(int dims, const int64_t *shape, const int64_t *strides, int width, int64_t *sizes, int64_t *steps)
{
    int kept = 0;
    for (int d = 0; d < dims; d++) {
        if (shape[d] == 1) continue;
        int64_t step = strides[d] * width;
        if (kept && steps[kept - 1] == step * shape[d]) {
            sizes[kept - 1] *= shape[d];
            steps[kept - 1] = step;
        } else {
            sizes[kept] = shape[d];
            steps[kept++] = step;
        }
    }
    return kept;
}

static void walk(struct state *s, const unsigned char *data, int dims, const int64_t *sizes, const int64_t *steps)
{
    const int width = s->width;
    if (!dims) feed(s, data, width);
    else if (dims == 1 && steps[0] == width) feed(s, data, sizes[0] * width);
    else if (dims == 1) feed_apart(s, data, sizes[0], steps[0]);
    else if (dims == 2 && steps[0] == width && feed_turned(s, data, sizes[0], sizes[1], steps[1])) return;
    else
        for (int64_t i = 0; i < sizes[0]; i++) walk(s, data + i * steps[0], dims - 1, sizes + 1, steps + 1);
}

/* Once, before any tensor. */
void msp_prepare(void)
{
    draw_keys();
}

/* Digest a tensor. Returns 0, or 1 where it cannot. */
int msp_digest(const void *data, const struct tensor *tensor, int wanted, struct digest *out)
{
    int64_t sizes[MAX_DIMS], steps[MAX_DIMS];
    struct state s;
    const int dims = (int)tensor->dims, width = (int)tensor->width;
    if (dims > MAX_DIMS) return 1;
    memset(out, 0, wanted & SKETCH ? sizeof *out : sizeof *out - sizeof out->sketch);
    out->low = __builtin_inf(), out->high = -__builtin_inf();
    s.out = out, s.table = tensor->table, s.kind = (int)tensor->kind, s.width = width, s.wanted = wanted;
    s.next = (struct cursor){tensor->starts, tensor->lengths, 0, 0}, s.filled = 0;
    memset(s.counts, 0, sizeof s.counts);
    for (int d = 0; d < dims; d++)
        if (!tensor->shape[d]) return 0;
    walk(&s, data, merge(dims, tensor->shape, tensor->strides, width, sizes, steps), sizes, steps);
    if (s.filled) take_block(&s, s.pending, (int)(s.filled / width));
    return 0;
}
