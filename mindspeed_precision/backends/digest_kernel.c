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
#include "digest_statistics.h"
#include "digest_threads.h"

enum { BUCKETS = 256, MAX_DIMS = 64, PANEL_BYTES = 1 << 20, LINE = 64, PROBES = 8 };
enum { PIECE_BLOCKS = 16, SHARED_BYTES = 1 << 18 }; /* what one thread takes at a time, and from where it is worth it */

/* How to read an element, as backends/digest_kernel.py has it. */
enum kind { BITS_ONLY, FLOAT32, BFLOAT16, FLOAT16, FLOAT64, BY_TABLE, INT16, UINT16, INT32, UINT32, INT64, UINT64 };
enum wanted { STATISTICS = 1, SKETCH = 2 };

typedef uint64_t words_t __attribute__((vector_size(WIDTH)));

static const uint64_t SIGN_SEED = 0xABC98388FB8FAC03u, TURN_SEED = 0x9E3779B97F4A7C15u;

/* What comes out; 64-bit words, read by position. The sketch is there if it is wanted. */
struct digest {
    uint64_t ordered, unordered, zeros, nans, infs;
    double low, high, total, squares;
    uint64_t probes[PROBES];
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
    double (*sums)[2]; /* where the next block's go by themselves; NULL: they are added */
    int64_t filled;    /* bytes of `pending` in use */
    struct histogram histogram;
    double wide[BLOCK];
    float single[BLOCK];
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

static void add_lanes(struct state *s, const struct lanes *sums)
{
    double total[LANES], squares[LANES];
    memcpy(total, sums->total, sizeof total);
    memcpy(squares, sums->squares, sizeof squares);
    for (int width = LANES / 2; width; width /= 2)
        for (int k = 0; k < width; k++) total[k] += total[k + width], squares[k] += squares[k + width];
    if (s->sums) (*s->sums)[0] = total[0], (*s->sums)[1] = squares[0];
    else s->out->total += total[0], s->out->squares += squares[0];
}

/* Extremes, sums and exponents of numbers that fill a block or end in one; `single` has room behind them. */
static void scan_block(struct state *s, const float *numbers, int n, struct scan *found)
{
    const int padded = (n + CHUNK - 1) / CHUNK * CHUNK;
    if (n == padded) scan(numbers, n, s->histogram.exponent, found);
    else {
        struct scan sums;
        if (numbers != s->single) memcpy(s->single, numbers, (size_t)n * sizeof *numbers);
        memset(s->single + n, 0, (size_t)(padded - n) * sizeof *numbers); /* changes no sum */
        scan(s->single, padded, s->histogram.exponent, &sums);
        for (int i = n; i < padded; i++) s->single[i] = s->single[0]; /* changes no extreme */
        scan(s->single, padded, s->histogram.exponent, found);
        found->sums = sums.sums;
        s->out->exponents[bits_of(s->single[0]) >> 23 & 0xFF] -= (uint64_t)(padded - n);
    }
    count_exponents(&s->histogram, found, padded);
}

/* Extremes and sums of `wide`, whatever it holds; leaves 0 there where an element is not finite. */
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
    add_lanes(s, &sums);
}

static void count_zeros(struct state *s, const float *numbers, int n)
{
    uint32_t zeros = 0;
    for (int i = 0; i < n; i++) zeros += (bits_of(numbers[i]) << 1) == 0;
    s->out->zeros += zeros;
}

static void count_zeros_of_doubles(struct state *s, int n)
{
    uint32_t zeros = 0;
    for (int i = 0; i < n; i++) zeros += s->wide[i] == 0;
    s->out->zeros += zeros;
}

static void statistics_of_block(struct state *s, const unsigned char *data, int n)
{
    struct scan found;
    int floats = s->kind <= BY_TABLE && s->kind != FLOAT64;
    const float *numbers = s->single;
    if (!floats) convert(s, data, n);
    else if (s->kind == FLOAT32) numbers = (const float *)(const void *)data; /* x86 and aarch64 read it anywhere */
    else widen(s->kind, s->table, data, s->single, n);
    scan_block(s, numbers, n, &found);
    int finite = found.last != BINS - 1;
    if (!floats) count_zeros_of_doubles(s, n);
    else if (found.zero) count_zeros(s, numbers, n);
    if (floats && (!finite || s->wanted & SKETCH)) {
        int i = 0;
        for (; i + DOUBLES <= n; i += DOUBLES) {
            const doubles_t wide = widened(numbers + i);
            memcpy(s->wide + i, &wide, sizeof wide);
        }
        for (; i < n; i++) s->wide[i] = numbers[i];
    }
    if (!floats || !finite) moments_of_doubles(s, n);
    else {
        if (found.low < s->out->low) s->out->low = found.low;
        if (found.high > s->out->high) s->out->high = found.high;
        add_lanes(s, &found.sums);
    }
}

/* Add numbers to buckets, those negated whose bits are set. */
static void add_signed(double *buckets, const double *numbers, uint64_t signs, int count)
{
    words_t lane, bits;
    doubles_t number, sum;
    int k = 0;
    for (int i = 0; i < DOUBLES; i++) lane[i] = (uint64_t)i;
    for (; k + DOUBLES <= count; k += DOUBLES, signs >>= DOUBLES) {
        memcpy(&bits, numbers + k, sizeof bits);
        bits ^= (((words_t){0} + signs) >> lane) << 63;
        memcpy(&number, &bits, sizeof number);
        memcpy(&sum, buckets + k, sizeof sum);
        sum += number;
        memcpy(buckets + k, &sum, sizeof sum);
    }
    for (; k < count; k++, signs >>= 1) buckets[k] += signs & 1 ? -numbers[k] : numbers[k];
}

/* Add numbers of which the first is element `place`: blocks of 256 elements with random signs, each turned. */
static void sketch_run(double *buckets, const double *numbers, int64_t place, int n)
{
    for (int count; n; numbers += count, place += count, n -= count) {
        const int shift = (int)(place % 64);
        const uint64_t signs = mix64((uint64_t)(place / 64) + SIGN_SEED) >> shift;
        int turn = (int)((mix64((uint64_t)(place / BUCKETS) + TURN_SEED) + (uint64_t)place) % BUCKETS);
        count = 64 - shift < n ? 64 - shift : n;
        if (count > BUCKETS - turn) count = BUCKETS - turn; /* the rest begins with the first bucket */
        add_signed(buckets + turn, numbers, signs, count);
    }
}

static void sketch_block(struct state *s, int n)
{
    struct cursor at = s->next;
    int64_t start;
    for (int i = 0, taken; i < n; i += taken) {
        taken = advance(&at, n - i, &start);
        sketch_run(s->out->sketch, s->wide + i, start, taken);
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
    if (s->sums) s->sums++;
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

/* Look at a few words of `bytes` bytes that are one in memory. */
static void probe(const unsigned char *data, int64_t bytes, uint64_t *probes)
{
    const int64_t size = (int64_t)sizeof *probes;
    for (int k = 0; k < PROBES && bytes >= size; k++) memcpy(probes + k, data + (bytes - size) / (PROBES - 1) * k, size);
}

/* A digest by pieces. What has an order is kept by piece (where it begins, extremes) and by block (sums). */
struct digest_job {
    struct job job;
    const unsigned char *data;
    const struct tensor *tensor;
    int wanted;
    int64_t elements;
    struct cursor *begins;
    double (*extremes)[2], (*sums)[2];
    struct digest *out;
};

static void take_piece(struct digest_job *of, struct state *s, int64_t piece)
{
    const int64_t start = piece * PIECE_BLOCKS * BLOCK, left = of->elements - start;
    const int64_t count = left < PIECE_BLOCKS * BLOCK ? left : PIECE_BLOCKS * BLOCK;
    s->out->low = __builtin_inf(), s->out->high = -__builtin_inf();
    s->next = of->begins[piece], s->filled = 0, s->sums = of->sums + piece * PIECE_BLOCKS;
    feed(s, of->data + start * s->width, count * s->width);
    if (s->filled) take_block(s, s->pending, (int)(s->filled / s->width));
    of->extremes[piece][0] = s->out->low, of->extremes[piece][1] = s->out->high;
}

static void take_pieces(struct job *job)
{
    struct digest_job *of = (struct digest_job *)job;
    struct digest found;
    struct state s;
    memset(&found, 0, sizeof found - sizeof found.sketch);
    s.out = &found, s.table = of->tensor->table, s.kind = (int)of->tensor->kind, s.width = (int)of->tensor->width;
    s.wanted = of->wanted;
    begin_counting(&s.histogram, found.exponents);
    for (int64_t piece; (piece = claim(job)) < job->pieces;) take_piece(of, &s, piece);
    end_counting(&s.histogram);
    pthread_mutex_lock(&job->merging); /* whole numbers: who is first does not matter */
    struct digest *out = of->out;
    out->ordered += found.ordered, out->unordered += found.unordered;
    out->zeros += found.zeros, out->nans += found.nans, out->infs += found.infs;
    for (int bin = 0; bin < BINS; bin++) out->exponents[bin] += found.exponents[bin];
    pthread_mutex_unlock(&job->merging);
}

/* Digest elements that are one in memory with helpers; return 0 where that is not worth it, or memory is short. */
static int digest_shared(const void *data, const struct tensor *tensor, int64_t elements, int wanted, struct digest *out)
{
    const int64_t blocks = (elements + BLOCK - 1) / BLOCK, pieces = (blocks + PIECE_BLOCKS - 1) / PIECE_BLOCKS;
    struct digest_job of = {.job = {.work = take_pieces, .pieces = pieces, .merging = PTHREAD_MUTEX_INITIALIZER}};
    int64_t start;
    if (!pool.wanted || wanted & SKETCH || elements * tensor->width < SHARED_BYTES) return 0;
    const size_t sums = (size_t)blocks * sizeof *of.sums, each = sizeof *of.begins + sizeof *of.extremes;
    unsigned char *room = calloc(1, sums + (size_t)pieces * each);
    if (!room) return 0;
    of.sums = (void *)room, of.extremes = (void *)(room + sums), of.begins = (void *)(of.extremes + pieces);
    of.data = data, of.tensor = tensor, of.wanted = wanted, of.elements = elements, of.out = out;
    struct cursor at = {tensor->starts, tensor->lengths, 0, 0};
    for (int64_t piece = 0; piece < pieces; piece++) {
        const int64_t left = elements - piece * PIECE_BLOCKS * BLOCK;
        of.begins[piece] = at;
        for (int n = left < PIECE_BLOCKS * BLOCK ? (int)left : PIECE_BLOCKS * BLOCK; n;) n -= advance(&at, n, &start);
    }
    share(&of.job);
    for (int64_t piece = 0; piece < pieces; piece++) {
        if (of.extremes[piece][0] < out->low) out->low = of.extremes[piece][0];
        if (of.extremes[piece][1] > out->high) out->high = of.extremes[piece][1];
    }
    for (int64_t block = 0; block < blocks; block++) out->total += of.sums[block][0], out->squares += of.sums[block][1];
    free(room);
    return 1;
}

/* Bytes that follow each other in the canonical stream, for the ordered fingerprint alone. */
struct hash_job {
    struct job job;
    const unsigned char *data;
    int64_t bytes, place;
    uint64_t ordered;
};

static void hash_pieces(struct job *job)
{
    struct hash_job *of = (struct hash_job *)job;
    const int64_t size = PIECE_BLOCKS * BLOCK_BYTES;
    uint64_t ordered = 0, unordered = 0;
    for (int64_t piece; (piece = claim(job)) < job->pieces;) {
        const int64_t start = piece * size, left = of->bytes - start;
        hash_bytes(of->data + start, left < size ? left : size, of->place + start, NO_ELEMENTS, &ordered, &unordered);
    }
    pthread_mutex_lock(&job->merging);
    of->ordered += ordered;
    pthread_mutex_unlock(&job->merging);
}

/* Return the ordered fingerprint of bytes that are `place` and following ones of the canonical stream. */
static uint64_t ordered_of(const unsigned char *data, int64_t bytes, int64_t place)
{
    uint64_t ordered = 0, unordered = 0;
    if (pool.wanted && bytes >= SHARED_BYTES) {
        struct hash_job of = {.job = {.work = hash_pieces, .merging = PTHREAD_MUTEX_INITIALIZER}};
        of.job.pieces = (bytes + PIECE_BLOCKS * BLOCK_BYTES - 1) / (PIECE_BLOCKS * BLOCK_BYTES);
        of.data = data, of.bytes = bytes, of.place = place;
        share(&of.job);
        return of.ordered;
    }
    hash_bytes(data, bytes, place, NO_ELEMENTS, &ordered, &unordered);
    return ordered;
}

/* Tell whether memory holds what it did when `prior` was taken of the same elements, one in memory. All is read:
 * the fingerprint says it; a few words before tell most differences at once. */
int msp_repeats(const void *data, const struct tensor *tensor, const struct digest *prior)
{
    const unsigned char *at = data;
    const int64_t width = tensor->width;
    int64_t elements = 0;
    uint64_t probes[PROBES] = {0}, ordered = 0;
    for (int64_t run = 0; run < tensor->runs; run++) elements += tensor->lengths[run];
    probe(at, elements * width, probes);
    if (memcmp(probes, prior->probes, sizeof probes)) return 0;
    for (int64_t run = 0; run < tensor->runs; at += tensor->lengths[run++] * width)
        ordered += ordered_of(at, tensor->lengths[run] * width, tensor->starts[run] * width);
    return ordered == prior->ordered;
}

/* Once, before any tensor. */
void msp_prepare(void)
{
    draw_keys();
}

/* Take `threads` for large tensors from now on, the calling one included; return how many it will be. */
int msp_threads(int threads)
{
    want_helpers(threads - 1);
    return pool.wanted + 1;
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
    s.next = (struct cursor){tensor->starts, tensor->lengths, 0, 0}, s.sums = NULL, s.filled = 0;
    begin_counting(&s.histogram, out->exponents);
    for (int d = 0; d < dims; d++)
        if (!tensor->shape[d]) return 0;
    const int kept = merge(dims, tensor->shape, tensor->strides, width, sizes, steps);
    if (kept == 1 && steps[0] == width) {
        probe(data, sizes[0] * width, out->probes);
        if (digest_shared(data, tensor, sizes[0], wanted, out)) return 0;
    }
    walk(&s, data, kept, sizes, steps);
    if (s.filled) take_block(&s, s.pending, (int)(s.filled / width));
    end_counting(&s.histogram);
    return 0;
}
