// Arithmetic, and passes over many logits. Included by sampler.cpp, which says what they must hold to.

#pragma once

#include <cfloat>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(LB_CLONES) // x86-64; the build tries without where compiler or C library cannot
#include <immintrin.h>
#if defined(__clang__) // which never inlines a function with clones, and refuses to be told so
#define LB_KERNEL __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define LB_KERNEL __attribute__((target_clones("avx512f", "avx2", "default"), noinline))
#endif
#define LB_ONLY(isa) __attribute__((target(isa)))
#else
#define LB_KERNEL
#define LB_ONLY(isa)
#endif
#define LB_INLINE inline __attribute__((always_inline))

namespace {

constexpr int NO_TOKEN = -1;
constexpr float NEVER = -std::numeric_limits<float>::infinity();
constexpr int WIDE = 128, NARROW = 16;     // tokens in a chunk
constexpr int64_t PARALLEL_FROM = 1 << 18; // logits in a step that more than one thread samples
constexpr float COLDEST = 1e-9f;           // below this temperature sampling is greedy
constexpr uint32_t UNIT_BITS = 33;         // the likeliest token weighs 2^33

// Arithmetic that numpy repeats bit for bit.

// exp(x) * 2^33 for x <= 0, from `lowest` on (-80 at the least); the polynomial is that of Cephes' expf (Moshier), good
// to about 2 units in the last place.
LB_INLINE float scaled_exp(float x, float lowest = -25.0f) {
    x = x > lowest ? x : lowest;
    const float shifted = x * 1.44269504f + 12582912.0f; // adding 1.5 * 2^23 rounds to a whole number
    const float n = shifted - 12582912.0f;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r) + 1.0f;
    uint32_t bits, power;
    std::memcpy(&bits, &p, 4);
    std::memcpy(&power, &shifted, 4);
    bits += (power + UNIT_BITS) << 23; // times 2^n * 2^33
    std::memcpy(&p, &bits, 4);
    return p;
}

LB_INLINE double whole_number(double weight) {
    constexpr double rounder = 6755399441055744.0; // 1.5 * 2^52
    return (weight + rounder) - rounder;
}

// Division by the temperature is a multiplication with 1 / temperature in float32.
LB_INLINE double weight_of(float x, float top, float coldness) {
    return whole_number(scaled_exp((x - top) * coldness));
}

// A number in [0, 1) from (seed, index) alone: splitmix64 (Steele, Lea, Flood 2014), its top 53 bits.
double uniform(uint64_t seed, uint64_t index) {
    uint64_t z = seed + (index + 1) * 0x9E3779B97F4A7C15u;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return static_cast<double>((z ^ (z >> 31)) >> 11) * 0x1p-53;
}

// Passes over many logits, compiled once for each instruction set.

#if defined(__clang__) // which takes a maximum of floats for one whose order matters, and does not vectorise it
using floats = float __attribute__((vector_size(64)));
using words = int32_t __attribute__((vector_size(64)));

LB_INLINE float largest_of(floats many) {
    float x[16];
    std::memcpy(x, &many, 64);
    for (int width = 8; width; width /= 2) {
        for (int j = 0; j < width; j++) {
            x[j] = x[j + width] > x[j] ? x[j + width] : x[j];
        }
    }
    return x[0];
}

template <int CHUNK> LB_INLINE bool maxima_of(const float * x, int n_chunks, float * maxima) {
    words bad = {};
    for (int c = 0; c < n_chunks; c++, x += CHUNK) {
        floats most = floats{} + NEVER;
        for (int j = 0; j < CHUNK; j += 16) {
            floats some;
            std::memcpy(&some, x + j, 64);
            most = some > most ? some : most;
            bad |= ~(some <= floats{} + FLT_MAX);
        }
        maxima[c] = largest_of(most);
    }
    int any = 0;
    for (int j = 0; j < 16; j++) {
        any |= bad[j];
    }
    return !any;
}
#else
template <int CHUNK> LB_INLINE bool maxima_of(const float * x, int n_chunks, float * maxima) {
    int bad = 0;
    for (int c = 0; c < n_chunks; c++, x += CHUNK) {
        float most = NEVER;
#pragma omp simd reduction(max : most) reduction(| : bad)
        for (int j = 0; j < CHUNK; j++) {
            most = x[j] > most ? x[j] : most;
            bad |= !(x[j] <= FLT_MAX);
        }
        maxima[c] = most;
    }
    return !bad;
}
#endif

// The largest of each chunk; false if there is a NaN or +inf.
LB_KERNEL bool chunk_maxima(const float * x, int n_chunks, int chunk, float * maxima) {
    return chunk == WIDE ? maxima_of<WIDE>(x, n_chunks, maxima) : maxima_of<NARROW>(x, n_chunks, maxima);
}

LB_KERNEL void weigh(const float * x, int64_t n, float top, float coldness, double * weights) {
    for (int64_t i = 0; i < n; i++) {
        weights[i] = weight_of(x[i], top, coldness);
    }
}

template <int CHUNK> LB_INLINE void sums_of(const float * x, int n_chunks, float top, float coldness, double * sums) {
    for (int c = 0; c < n_chunks; c++, x += CHUNK) {
        double sum = 0;
#pragma omp simd reduction(+ : sum) // any order: the sums are exact
        for (int i = 0; i < CHUNK; i++) {
            sum += weight_of(x[i], top, coldness);
        }
        sums[c] = sum;
    }
}

// The sum of the weights of each chunk.
LB_KERNEL void chunk_sums(const float * x, int n_chunks, int chunk, float top, float coldness, double * sums) {
    if (chunk == WIDE) {
        sums_of<WIDE>(x, n_chunks, top, coldness, sums);
    } else {
        sums_of<NARROW>(x, n_chunks, top, coldness, sums);
    }
}

// Appends the logits of a chunk from `bound` on to values and ids, its first id being `first`; returns their number.
// Both have room for a whole chunk: a smaller logit is overwritten by the next one, which saves a branch.
LB_ONLY("default")
int select_from(const float * x, int chunk, float bound, int first, float * values, int32_t * ids) {
    int found = 0;
    for (int j = 0; j < chunk; j++) {
        values[found] = x[j];
        ids[found] = first + j;
        found += x[j] >= bound;
    }
    return found;
}

#if defined(LB_CLONES)
LB_ONLY("avx512f")
int select_from(const float * x, int chunk, float bound, int first, float * values, int32_t * ids) {
    const __m512i step = _mm512_set1_epi32(16);
    __m512i places = _mm512_add_epi32(_mm512_set1_epi32(first),
                                      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    int found = 0;
    for (int j = 0; j < chunk; j += 16, places = _mm512_add_epi32(places, step)) {
        const __m512 some = _mm512_loadu_ps(x + j);
        const __mmask16 wanted = _mm512_cmp_ps_mask(some, _mm512_set1_ps(bound), _CMP_GE_OQ);
        _mm512_storeu_ps(values + found, _mm512_maskz_compress_ps(wanted, some));
        _mm512_storeu_si512(ids + found, _mm512_maskz_compress_epi32(wanted, places));
        found += __builtin_popcount(wanted);
    }
    return found;
}
#endif

// The place of the first weight at which the sum of all up to it exceeds `target`.
LB_KERNEL int64_t place_of(const double * weights, int64_t n, double target) {
    constexpr int BLOCK = 64; // added up at once
    double sum = 0;
    int64_t i = 0;
    for (double more; i + BLOCK < n; i += BLOCK, sum += more) {
        more = 0;
#pragma omp simd reduction(+ : more)
        for (int j = 0; j < BLOCK; j++) {
            more += weights[i + j];
        }
        if (sum + more > target) {
            break;
        }
    }
    while (i + 1 < n && (sum += weights[i]) <= target) {
        i++;
    }
    return i;
}

LB_KERNEL double sum_of(const double * weights, int64_t n) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += weights[i];
    }
    return sum;
}

// The sum of exp(x - top), to about 3e-7 of it. Its last bits depend on the vector width: no token may hang on it.
LB_KERNEL double sum_exp(const float * x, int64_t n, float top) {
    double sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; i++) {
        sum += scaled_exp(x[i] - top, -80.0f);
    }
    return sum * 0x1p-33;
}

// Number of tokens that are likelier than token `id`: larger ones, and equal ones of lower id.
LB_KERNEL int64_t count_likelier(const float * x, int64_t n, int64_t id) {
    const float value = x[id];
    int64_t count = 0;
#pragma omp simd reduction(+ : count)
    for (int64_t i = 0; i < id; i++) {
        count += x[i] >= value;
    }
#pragma omp simd reduction(+ : count)
    for (int64_t i = id + 1; i < n; i++) {
        count += x[i] > value;
    }
    return count;
}

} // namespace
