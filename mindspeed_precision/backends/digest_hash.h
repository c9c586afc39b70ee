/* Fingerprints of pieces of a stream of bytes; the definition is record/fingerprint.py.
 *
 * Vectors of x86 by their intrinsics, since compilers do not find the multiplication of 32 by 32 bits that
 * takes every other word; elsewhere loops, of which compilers make the like.
 */
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

enum { WORDS = 1024, BLOCK_BYTES = 4 * WORDS, AHEAD = 2048, GROUP = 16, SHIFT16 = 5 };
enum { NO_ELEMENTS = 0 }; /* a width: the unordered sum is not wanted */

static const uint64_t WORD_SEED = 0x9E3779B97F4A7C15u, BLOCK_SEED = 0x8CB92BA72F3D8DD7u, SECOND = 0xD1B54A32D192ED03u;
static const uint64_t FIRST16 = 0xBF58476D1CE4E5B9u, SECOND16 = 0x94D049BB133111EBu;
static const uint32_t OFFSET = 0x8021524Bu, SPREAD = 0x9E3779B1u;
static const uint16_t SPREAD16 = 0x6A4D;

/* Sums over words of a block, and of its elements. */
struct hash {
    uint64_t first, second, unordered;
};

static inline uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

#if defined(__AVX512BW__)
#define VECTOR 64
typedef __m512i vector_t;
#define OP(NAME) _mm512_##NAME
#define load(P) _mm512_loadu_si512(P)
#define both(A, B) _mm512_and_si512(A, B)
#define either(A, B) _mm512_or_si512(A, B)
#define nothing() _mm512_setzero_si512()
#define store(P, A) _mm512_storeu_si512(P, A)
#define turned(A) _mm512_rol_epi32(A, 16)
#define swapped(A) _mm512_shuffle_epi32(A, _MM_PERM_CDAB)
#elif defined(__AVX2__)
#define VECTOR 32
typedef __m256i vector_t;
#define OP(NAME) _mm256_##NAME
#define load(P) _mm256_loadu_si256((const __m256i *)(P))
#define both(A, B) _mm256_and_si256(A, B)
#define either(A, B) _mm256_or_si256(A, B)
#define nothing() _mm256_setzero_si256()
#define store(P, A) _mm256_storeu_si256((__m256i *)(P), A)
#define turned(A) _mm256_shuffle_epi8(A, _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13, \
                                                          2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13))
#define swapped(A) _mm256_shuffle_epi32(A, 0xB1)
#elif defined(__SSE2__)
#define VECTOR 16
typedef __m128i vector_t;
#define OP(NAME) _mm_##NAME
#define load(P) _mm_loadu_si128((const __m128i *)(P))
#define both(A, B) _mm_and_si128(A, B)
#define either(A, B) _mm_or_si128(A, B)
#define nothing() _mm_setzero_si128()
#define store(P, A) _mm_storeu_si128((__m128i *)(P), A)
#define turned(A) _mm_shufflehi_epi16(_mm_shufflelo_epi16(A, 0xB1), 0xB1)
#define swapped(A) _mm_shuffle_epi32(A, 0xB1)
#else
#define VECTOR 16
#endif

#if VECTOR > 16
#define product32(A, B) OP(mullo_epi32)(A, B)
#elif defined(__SSE2__)
static inline vector_t product32(vector_t a, vector_t b)
{
    vector_t even = _mm_mul_epu32(a, b), odd = _mm_mul_epu32(_mm_srli_epi64(a, 32), _mm_srli_epi64(b, 32));
    return _mm_or_si128(_mm_and_si128(even, _mm_set1_epi64x(0xFFFFFFFF)), _mm_slli_epi64(odd, 32));
}
#endif

#if defined(__SSE2__)
/* Keys as vectors take them, one after the other: of words 2k, of words 2k + 1, and of both with their halves swapped. */
static uint64_t keys[2 * WORDS] __attribute__((aligned(64)));

static void draw_keys(void)
{
    for (int word = 0; word < WORDS; word++) {
        const int lanes = VECTOR / 8, vector = word / (2 * lanes), lane = word / 2 % lanes;
        uint64_t drawn = mix64(WORD_SEED + (uint64_t)word), *own = keys + 4 * vector * lanes + lane + word % 2 * lanes;
        own[0] = (uint32_t)drawn | 1;
        own[2 * lanes] = drawn >> 32 | 1;
    }
}

#define upper(A) OP(srli_epi64)(A, 32)
#define product64(A, B) OP(mul_epu32)(A, B) /* of words 2k, to 64 bits */
#define plus64(A, B) OP(add_epi64)(A, B)
#define plus32(A, B) OP(add_epi32)(A, B)

static inline uint64_t sum64(vector_t a)
{
    uint64_t lanes[VECTOR / 8], total = 0;
    store(lanes, a);
    for (int k = 0; k < VECTOR / 8; k++) total += lanes[k];
    return total;
}

/* Add signed words of 32 bits to sums of 64, in whichever lanes. */
static inline vector_t plus_wide(vector_t sums, vector_t a)
{
    const vector_t sign = OP(srai_epi32)(a, 31);
    return plus64(sums, plus64(OP(unpacklo_epi32)(a, sign), OP(unpackhi_epi32)(a, sign)));
}

/* Add to the two sums over elements of 16 bits. */
static inline void add_short(vector_t x, vector_t *first, vector_t *second)
{
    vector_t y = OP(mullo_epi16)(x, OP(set1_epi16)((short)SPREAD16));
    vector_t a = either(OP(srli_epi16)(y, SHIFT16), OP(set1_epi16)(1));
    *first = plus32(*first, OP(madd_epi16)(x, a));
    *second = plus32(*second, OP(madd_epi16)(y, a));
}

/* The sums of a block while they are vectors. */
struct sums {
    vector_t even, odd, even_turned, odd_turned, elements, others, short_first, short_second;
};

/* Add one vector, whose words have the keys that follow. */
static inline __attribute__((always_inline)) void add_vector(const unsigned char *at, const uint64_t *key,
                                                             const int width, struct sums *s)
{
    const vector_t spread = OP(set1_epi32)((int)SPREAD), low_bytes = OP(set1_epi16)(0xFF);
    const vector_t offset = OP(set1_epi32)((int)OFFSET), w = load(at), r = turned(w);
    s->even = plus64(s->even, product64(w, load(key)));
    s->odd = plus64(s->odd, product64(upper(w), load(key + VECTOR / 8)));
    s->even_turned = plus64(s->even_turned, product64(r, load(key + VECTOR / 4)));
    s->odd_turned = plus64(s->odd_turned, product64(upper(r), load(key + 3 * VECTOR / 8)));
    if (width == NO_ELEMENTS) return;
    if (width == 8) {
        vector_t pairs = plus32(w, swapped(product32(r, spread)));
        s->elements = plus64(s->elements, product64(pairs, upper(plus32(pairs, offset))));
    } else if (width == 4) {
        vector_t x = plus32(w, offset), y = product32(r, spread);
        s->elements = plus64(s->elements, product64(x, y));
        s->others = plus64(s->others, product64(upper(x), upper(y)));
    } else if (width == 2) {
        add_short(w, &s->short_first, &s->short_second);
    } else {
        add_short(both(w, low_bytes), &s->short_first, &s->short_second);
        add_short(OP(srli_epi16)(w, 8), &s->short_first, &s->short_second);
    }
}

/* Add `vectors` of them, the first of which begins with word `word` of its block. */
static inline __attribute__((always_inline)) void hash_vectors(const unsigned char *data, int word, int vectors,
                                                               const int width, struct hash *out)
{
    const int group = width == 1 ? GROUP / 2 : GROUP; /* what sums of 32 bits can take */
    const vector_t zero = nothing();
    struct sums s = {zero, zero, zero, zero, zero, zero, zero, zero};
    vector_t first = zero, second = zero;
    const uint64_t *key = keys + 2 * word;
    while (vectors) {
        int left = vectors < group ? vectors : group;
        vectors -= left;
        for (; left >= 2; left -= 2, data += 2 * VECTOR, key += VECTOR) {
            __builtin_prefetch(data + AHEAD);
            if (VECTOR == 64) __builtin_prefetch(data + AHEAD + 64);
            add_vector(data, key, width, &s);
            add_vector(data + VECTOR, key + VECTOR / 2, width, &s);
        }
        if (left) add_vector(data, key, width, &s), data += VECTOR, key += VECTOR / 2;
        if (width <= 2 && width != NO_ELEMENTS) {
            first = plus_wide(first, s.short_first), second = plus_wide(second, s.short_second);
            s.short_first = s.short_second = zero;
        }
    }
    out->first += sum64(plus64(s.even, s.odd));
    out->second += sum64(plus64(s.even_turned, s.odd_turned));
    if (width == NO_ELEMENTS) return;
    if (width <= 2) out->unordered += sum64(first) * FIRST16 + sum64(second) * SECOND16;
    else out->unordered += sum64(plus64(s.elements, s.others));
}
#else
static uint32_t keys[WORDS], keys_turned[WORDS];

static void draw_keys(void)
{
    for (int j = 0; j < WORDS; j++) {
        uint64_t drawn = mix64(WORD_SEED + (uint64_t)j);
        keys[j] = (uint32_t)drawn | 1, keys_turned[j] = (uint32_t)(drawn >> 32) | 1;
    }
}

static inline uint32_t turned(uint32_t word)
{
    return word << 16 | word >> 16;
}

static inline uint64_t sum_of_shorts(const uint16_t *x, int n)
{
    int64_t first = 0, second = 0;
    for (int start = 0; start < n; start += GROUP) {
        int32_t some = 0, others = 0;
        for (int i = start; i < start + GROUP && i < n; i++) {
            uint16_t y = (uint16_t)(x[i] * (uint32_t)SPREAD16);
            int16_t a = (int16_t)(y >> SHIFT16 | 1);
            some += (int16_t)x[i] * a, others += (int16_t)y * a;
        }
        first += some, second += others;
    }
    return (uint64_t)first * FIRST16 + (uint64_t)second * SECOND16;
}

static inline void hash_vectors(const unsigned char *data, int word, int vectors, const int width, struct hash *out)
{
    const int n = vectors * (VECTOR / 4);
    uint64_t first = 0, second = 0, unordered = 0;
    uint32_t w[WORDS];
    memcpy(w, data, (size_t)n * 4);
    for (int j = 0; j < n; j++) first += (uint64_t)w[j] * keys[word + j];
    for (int j = 0; j < n; j++) second += (uint64_t)turned(w[j]) * keys_turned[word + j];
    if (width == NO_ELEMENTS) unordered = 0;
    else if (width == 8)
        for (int j = 0; j < n; j += 2) {
            uint32_t high = w[j + 1] + turned(w[j]) * SPREAD + OFFSET, low = w[j] + turned(w[j + 1]) * SPREAD;
            unordered += (uint64_t)high * low;
        }
    else if (width == 4)
        for (int j = 0; j < n; j++) unordered += (uint64_t)(w[j] + OFFSET) * (turned(w[j]) * SPREAD);
    else if (width == 2) {
        uint16_t x[2 * WORDS];
        memcpy(x, data, (size_t)n * 4);
        unordered = sum_of_shorts(x, 2 * n);
    } else {
        uint16_t x[4 * WORDS];
        for (int i = 0; i < 4 * n; i++) x[i] = data[i];
        unordered = sum_of_shorts(x, 4 * n);
    }
    out->first += first, out->second += second, out->unordered += unordered;
}
#endif

static void hash_words(const unsigned char *data, int word, int vectors, int width, struct hash *out)
{
    if (width == NO_ELEMENTS) hash_vectors(data, word, vectors, NO_ELEMENTS, out);
    else if (width == 1) hash_vectors(data, word, vectors, 1, out);
    else if (width == 2) hash_vectors(data, word, vectors, 2, out);
    else if (width == 4) hash_vectors(data, word, vectors, 4, out);
    else hash_vectors(data, word, vectors, 8, out);
}

/* Add elements of `width` bytes, or NO_ELEMENTS, that are bytes [place, place + bytes) of the canonical stream. */
static void hash_bytes(const unsigned char *data, int64_t bytes, int64_t place, int width, uint64_t *ordered,
                       uint64_t *unordered)
{
    unsigned char padded[BLOCK_BYTES];
    while (bytes) {
        const int from = (int)(place % BLOCK_BYTES);
        const int to = bytes < BLOCK_BYTES - from ? from + (int)bytes : BLOCK_BYTES;
        const int begin = from / VECTOR * VECTOR, end = (to + VECTOR - 1) / VECTOR * VECTOR;
        const unsigned char *source = data;
        struct hash sums = {0, 0, 0};
        if (begin != from || end != to) { /* zeros add nothing */
            memset(padded + begin, 0, (size_t)(from - begin));
            memcpy(padded + from, data, (size_t)(to - from));
            memset(padded + to, 0, (size_t)(end - to));
            source = padded + begin;
        }
        hash_words(source, begin / 4, (end - begin) / VECTOR, width, &sums);
        *ordered += (mix64(BLOCK_SEED + (uint64_t)(place / BLOCK_BYTES)) | 1) * (sums.first + SECOND * sums.second);
        *unordered += sums.unordered;
        data += to - from, place += to - from, bytes -= to - from;
    }
}
