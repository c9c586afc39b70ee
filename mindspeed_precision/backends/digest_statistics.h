/* Extremes, sums and exponents of blocks of float32 numbers; the definition is record/statistics.py.
 *
 * Sums are taken in 16 lanes whatever the width of a vector. A square of a float32 is exact in float64, so that
 * a fused multiplication and addition rounds as the two do.
 */
#include <stdint.h>
#include <string.h>

enum { BLOCK = 1024, LANES = 16, BINS = 256, WINDOW = 8 };

/* Vectors of GCC and clang, as wide as the processor's: wider ones compile badly. */
#if defined(__AVX512BW__)
#define WIDTH 64
#elif defined(__AVX2__)
#define WIDTH 32
#else
#define WIDTH 16
#endif
#define SHORT (WIDTH < 32 ? WIDTH : 32) /* comparisons of bytes: in 64 they make masks, which are slower to add */
typedef uint8_t bytes_t __attribute__((vector_size(SHORT)));
typedef int32_t ints_t __attribute__((vector_size(WIDTH)));
typedef float floats_t __attribute__((vector_size(WIDTH)));
typedef double doubles_t __attribute__((vector_size(WIDTH)));
typedef float half_floats_t __attribute__((vector_size(WIDTH / 2)));
enum { DOUBLES = WIDTH / 8, FLOATS = WIDTH / 4, PARTS = LANES / DOUBLES, CHUNK = 4 * FLOATS };

struct lanes {
    doubles_t total[PARTS], squares[PARTS];
};

/* What one pass over numbers finds; extremes and sums are right where no exponent is 255. */
struct scan {
    struct lanes sums;
    float low, high;
    uint8_t first, last, zero; /* exponents: the first but 0, the last, and whether one is 0 */
};

#if defined(__AVX2__)
#define LOOKUP 1 /* a byte is looked up in a table of 16 */
enum { FEW_BINS = 64, LOOKUPS = 8 };
#else
enum { FEW_BINS = 28 };
#endif

/* How many elements have each exponent; `counts` and `wide` are added to `bins` when all are counted. */
struct histogram {
    uint64_t *bins;
    int64_t counted;
    uint32_t counts[4][BINS];
#if defined(LOOKUP)
    int low, high; /* the bins of `wide` that are in use */
    uint64_t wide[BINS + WINDOW][VECTOR / 8] __attribute__((aligned(64)));
#endif
    uint8_t exponent[BLOCK] __attribute__((aligned(64))); /* of a block, in no order */
};

#if defined(__AVX512BW__)
#define smaller(A, B) ((floats_t)_mm512_min_ps((__m512)(A), (__m512)(B)))
#define larger(A, B) ((floats_t)_mm512_max_ps((__m512)(A), (__m512)(B)))
#define widened(P) ((doubles_t)_mm512_cvtps_pd(_mm256_loadu_ps(P)))
#define plus_square(A, B) ((doubles_t)_mm512_fmadd_pd((__m512d)(B), (__m512d)(B), (__m512d)(A)))
#elif defined(__AVX2__)
#define smaller(A, B) ((floats_t)_mm256_min_ps((__m256)(A), (__m256)(B)))
#define larger(A, B) ((floats_t)_mm256_max_ps((__m256)(A), (__m256)(B)))
#define widened(P) ((doubles_t)_mm256_cvtps_pd(_mm_loadu_ps(P)))
#if defined(__FMA__)
#define plus_square(A, B) ((doubles_t)_mm256_fmadd_pd((__m256d)(B), (__m256d)(B), (__m256d)(A)))
#endif
#else
/* A choice between vectors is C++ only. */
static inline floats_t choose(ints_t first, floats_t a, floats_t b)
{
    return (floats_t)((first & (ints_t)a) | (~first & (ints_t)b));
}
#define smaller(A, B) choose((A) < (B), A, B)
#define larger(A, B) choose((A) > (B), A, B)
static inline doubles_t widened(const float *from)
{
    half_floats_t narrow;
    memcpy(&narrow, from, sizeof narrow);
    return __builtin_convertvector(narrow, doubles_t);
}
#endif
#if !defined(plus_square)
#define plus_square(A, B) ((A) + (B) * (B))
#endif

#if defined(__SSE2__)
#define sum_of_bytes(A) sum_of_lanes(A)
#if WIDTH >= 32
#define sad(A) ((__m256i)_mm256_sad_epu8((__m256i)(A), _mm256_setzero_si256()))
#else
#define sad(A) _mm_sad_epu8((__m128i)(A), _mm_setzero_si128())
#endif
static inline uint64_t sum_of_lanes(bytes_t counts)
{
    uint64_t lanes[SHORT / 8], total = 0;
    const __typeof__(sad(counts)) sums = sad(counts);
    memcpy(lanes, &sums, sizeof lanes);
    for (int k = 0; k < SHORT / 8; k++) total += lanes[k];
    return total;
}

/* Return the exponents of CHUNK numbers, in any order. */
static inline vector_t exponents_of(const float *from)
{
    const vector_t mask = OP(set1_epi16)(0xFF);
    vector_t some[4];
    for (int k = 0; k < 4; k++) some[k] = OP(srli_epi32)(load(from + k * FLOATS), 23);
    return OP(packus_epi16)(both(OP(packs_epi32)(some[0], some[1]), mask), both(OP(packs_epi32)(some[2], some[3]), mask));
}

struct exponents {
    vector_t first, smallest, last;
};

static inline void begin_exponents(struct exponents *e)
{
    e->first = e->smallest = OP(set1_epi8)(-1), e->last = nothing();
}

static inline void add_exponents(struct exponents *e, const float *from, uint8_t *to)
{
    const vector_t found = exponents_of(from);
    store((void *)to, found);
    e->first = OP(min_epu8)(e->first, OP(add_epi8)(found, OP(set1_epi8)(-1))); /* 0 apart: zeros are far away */
    e->smallest = OP(min_epu8)(e->smallest, found);
    e->last = OP(max_epu8)(e->last, found);
}

static inline void end_exponents(const struct exponents *e, struct scan *out)
{
    uint8_t first[VECTOR], smallest[VECTOR], last[VECTOR];
    memcpy(first, &e->first, VECTOR), memcpy(smallest, &e->smallest, VECTOR), memcpy(last, &e->last, VECTOR);
    out->first = 255, out->last = out->zero = 0;
    for (int k = 0; k < VECTOR; k++) {
        out->first = first[k] < out->first ? first[k] : out->first;
        out->last = last[k] > out->last ? last[k] : out->last;
        out->zero |= smallest[k] == 0;
    }
    out->first = (uint8_t)(out->first + 1);
}
#else
static inline uint64_t sum_of_bytes(bytes_t counts)
{
    uint64_t total = 0;
    for (int k = 0; k < SHORT; k++) total += counts[k];
    return total;
}

struct exponents {
    uint8_t first, smallest, last;
};

static inline void begin_exponents(struct exponents *e)
{
    e->first = e->smallest = 255, e->last = 0;
}

static inline void add_exponents(struct exponents *e, const float *from, uint8_t *to)
{
    uint32_t bits[CHUNK];
    memcpy(bits, from, sizeof bits);
    for (int k = 0; k < CHUNK; k++) {
        const uint8_t found = (uint8_t)(bits[k] >> 23), low = (uint8_t)(found - 1);
        to[k] = found;
        e->first = low < e->first ? low : e->first; /* 0 apart: zeros are far away */
        e->smallest = found < e->smallest ? found : e->smallest;
        e->last = found > e->last ? found : e->last;
    }
}

static inline void end_exponents(const struct exponents *e, struct scan *out)
{
    out->first = (uint8_t)(e->first + 1), out->last = e->last, out->zero = e->smallest == 0;
}
#endif

/* A scan while its sums are vectors. */
struct scanning {
    struct exponents exponents;
    struct lanes sums;
    floats_t low, high;
};

static inline void begin_scan(struct scanning *s, const float *numbers)
{
    for (int part = 0; part < PARTS; part++) s->sums.total[part] = s->sums.squares[part] = (doubles_t){0};
    memcpy(&s->low, numbers, sizeof s->low), s->high = s->low;
    begin_exponents(&s->exponents);
}

static inline __attribute__((always_inline)) void add_chunk(struct scanning *s, const float *numbers, uint8_t *exponent)
{
    add_exponents(&s->exponents, numbers, exponent);
    for (int k = 0; k < CHUNK; k += FLOATS) {
        floats_t value;
        memcpy(&value, numbers + k, sizeof value);
        s->low = smaller(value, s->low), s->high = larger(value, s->high);
    }
    for (int k = 0; k < CHUNK; k += LANES)
        for (int part = 0; part < PARTS; part++) {
            const doubles_t wide = widened(numbers + k + part * DOUBLES);
            s->sums.total[part] += wide;
            s->sums.squares[part] = plus_square(s->sums.squares[part], wide);
        }
}

static inline void end_scan(const struct scanning *s, struct scan *out)
{
    out->sums = s->sums;
    end_exponents(&s->exponents, out);
    out->low = s->low[0], out->high = s->high[0];
    for (int k = 1; k < FLOATS; k++) {
        out->low = s->low[k] < out->low ? s->low[k] : out->low;
        out->high = s->high[k] > out->high ? s->high[k] : out->high;
    }
}

/* Look at `n` numbers, a multiple of CHUNK. */
static void scan(const float *numbers, int n, uint8_t *exponent, struct scan *out)
{
    struct scanning s;
    begin_scan(&s, numbers);
    for (int i = 0; i < n; i += CHUNK) add_chunk(&s, numbers + i, exponent + i);
    end_scan(&s, out);
}

/* Count the bytes of `data` that equal four values, or those until `last`: a byte counts to BLOCK / SHORT. */
static void equal_bytes(const uint8_t *data, int n, int first, int last, uint64_t *bins)
{
    bytes_t counts[4], wanted[4];
    for (int k = 0; k < 4; k++) counts[k] = (bytes_t){0}, wanted[k] = (bytes_t){0} + (uint8_t)(first + k);
    for (int i = 0; i < n / SHORT; i++) {
        const bytes_t some = ((const bytes_t *)data)[i];
        for (int k = 0; k < 4; k++) counts[k] -= (bytes_t)(some == wanted[k]);
    }
    for (int k = 0; k < 4 && first + k <= last; k++) bins[first + k] += sum_of_bytes(counts[k]);
}

#if defined(LOOKUP)
/* Let the bins of a window be in use. */
static inline void use_window(struct histogram *h, int first, int last)
{
    if (h->low > h->high) h->low = first, h->high = first - 1;
    if (first < h->low) memset(h->wide[first], 0, (size_t)(h->low - first) * sizeof *h->wide), h->low = first;
    if (last > h->high) memset(h->wide[h->high + 1], 0, (size_t)(last - h->high) * sizeof *h->wide), h->high = last;
}

/* Count `n` exponents in bins `first` to `last`. Eight bins at a time: a byte that is one of them is looked up as 1 or
 * 16 in one of four tables, so that its halves count two bins; eight of these fit a half, and 32 a byte. */
static void count_near(struct histogram *h, int n, int first, int last)
{
    static const uint8_t of_pair[4][16] = {{1, 16}, {0, 0, 1, 16}, {0, 0, 0, 0, 1, 16}, {0, 0, 0, 0, 0, 0, 1, 16}};
    const vector_t half = OP(set1_epi8)(0x0F), beyond = OP(set1_epi8)(0x70); /* from 16 on the sign bit is set: 0 */
    uint8_t repeated[4][VECTOR];
    vector_t table[4];
    for (int p = 0; p < 4; p++) {
        for (int k = 0; k < VECTOR; k += 16) memcpy(repeated[p] + k, of_pair[p], 16);
        table[p] = load((const void *)repeated[p]);
    }
    for (int base = first; base <= last; base += WINDOW) {
        const vector_t start = OP(set1_epi8)((char)base);
        vector_t even[4], odd[4];
        for (int p = 0; p < 4; p++) even[p] = odd[p] = nothing();
        for (int i = 0; i < n;) {
            vector_t some[4];
            for (int p = 0; p < 4; p++) some[p] = nothing();
            for (const int stop = n - i < LOOKUPS * VECTOR ? n : i + LOOKUPS * VECTOR; i < stop; i += VECTOR) {
                const vector_t at = OP(adds_epu8)(OP(sub_epi8)(load((const void *)(h->exponent + i)), start), beyond);
                for (int p = 0; p < 4; p++) some[p] = OP(add_epi8)(some[p], OP(shuffle_epi8)(table[p], at));
            }
            for (int p = 0; p < 4; p++) {
                even[p] = OP(add_epi8)(even[p], both(some[p], half));
                odd[p] = OP(add_epi8)(odd[p], both(OP(srli_epi16)(some[p], 4), half));
            }
        }
        use_window(h, base, base + WINDOW - 1);
        for (int p = 0; p < 4; p++) {
            uint64_t *to = h->wide[base + 2 * p];
            store((void *)to, plus64(load((const void *)to), OP(sad_epu8)(even[p], nothing())));
            to += VECTOR / 8;
            store((void *)to, plus64(load((const void *)to), OP(sad_epu8)(odd[p], nothing())));
        }
    }
}
#else
static void count_near(struct histogram *h, int n, int first, int last)
{
    for (int bin = first; bin <= last; bin += 4) equal_bytes(h->exponent, n, bin, last, h->bins);
}
#endif

static void begin_counting(struct histogram *h, uint64_t *bins)
{
    h->bins = bins, h->counted = 0;
    memset(h->counts, 0, sizeof h->counts);
#if defined(LOOKUP)
    h->low = BINS, h->high = 0;
#endif
}

static void add_counts(struct histogram *h)
{
    if (!h->counted) return;
    for (int bin = 0; bin < BINS; bin++)
        for (int k = 0; k < 4; k++) h->bins[bin] += h->counts[k][bin], h->counts[k][bin] = 0;
    h->counted = 0;
}

static void end_counting(struct histogram *h)
{
    add_counts(h);
#if defined(LOOKUP)
    for (int bin = h->low; bin <= h->high && bin < BINS; bin++) /* beyond, windows are empty or count small exponents */
        for (int k = 0; k < VECTOR / 8; k++) h->bins[bin] += h->wide[bin][k];
#endif
}

/* Count `n` exponents, a multiple of CHUNK; those of a block lie close together, and comparing is then faster. */
static void count_exponents(struct histogram *h, const struct scan *found, int n)
{
    if (found->last && found->last - found->first > FEW_BINS) {
        if (h->counted > INT32_MAX) add_counts(h);
        h->counted += n;
        for (int i = 0; i < n; i += 4)
            for (int k = 0; k < 4; k++) h->counts[k][h->exponent[i + k]]++;
        return;
    }
    if (found->zero) equal_bytes(h->exponent, n, 0, 0, h->bins);
    if (found->last) count_near(h, n, found->first, found->last);
}
