#pragma once

// The vectors of repack-wide.cpp: a strip has 16 columns with AVX-512, 8 with AVX2. The functions have the same names for
// both; only tiles have others.

#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace repack_wide {

#if defined(GGML_REPACK_WIDE_512)

using ints = __m512i;
using floats = __m512;
using half_ints = __m256i;

static inline ints load(const void * p) { return _mm512_loadu_si512(p); }
static inline void store(void * p, ints x) { _mm512_store_si512(p, x); }
static inline ints none() { return _mm512_setzero_si512(); }
static inline ints all(int8_t x) { return _mm512_set1_epi8(x); }
static inline ints repeat(int32_t x) { return _mm512_set1_epi32(x); }
static inline ints bits_and(ints x, ints y) { return _mm512_and_si512(x, y); }
static inline ints bits_or(ints x, ints y) { return _mm512_or_si512(x, y); }
static inline ints add8(ints x, ints y) { return _mm512_add_epi8(x, y); }
static inline ints subtract8(ints x, ints y) { return _mm512_sub_epi8(x, y); }
static inline ints add32(ints x, ints y) { return _mm512_add_epi32(x, y); }
static inline ints shift_left(ints x, int by) { return _mm512_sll_epi16(x, _mm_cvtsi32_si128(by)); }
static inline ints shift_right(ints x, int by) { return _mm512_srl_epi16(x, _mm_cvtsi32_si128(by)); }
static inline half_ints shift_right(half_ints x, int by) { return _mm256_srl_epi16(x, _mm_cvtsi32_si128(by)); }
static inline half_ints load_half(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
static inline ints join(half_ints x, half_ints y) { return _mm512_inserti64x4(_mm512_castsi256_si512(x), y, 1); }

// bytes, one a column
static inline ints widen(const int8_t * p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *) p)); }
static inline ints widen(const uint8_t * p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *) p)); }
// bytes, two a column, to 16 bits
static inline ints widen_pairs(const uint8_t * p) { return _mm512_cvtepu8_epi16(load_half(p)); }
// the same, where the second ones lie behind the first
static inline ints widen_alternating(const uint8_t * p) {
    const __m128i even = _mm_loadu_si128((const __m128i *) p);
    const __m128i odd = _mm_loadu_si128((const __m128i *) (p + 16));
    return _mm512_cvtepu8_epi16(
        _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi8(even, odd)), _mm_unpackhi_epi8(even, odd), 1));
}

static inline floats zeros() { return _mm512_setzero_ps(); }
static inline floats repeat(float x) { return _mm512_set1_ps(x); }
static inline floats load_floats(const float * p) { return _mm512_loadu_ps(p); }
static inline floats fact(const float * p) { return _mm512_load_ps(p); }
static inline void store(float * p, floats x) { _mm512_storeu_ps(p, x); }
static inline floats halves(const char * p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) p)); }
static inline floats to_floats(ints x) { return _mm512_cvtepi32_ps(x); }
static inline floats as_floats(ints x) { return _mm512_castsi512_ps(x); }
static inline ints round(floats x) { return _mm512_cvtps_epi32(x); }
static inline floats subtract(floats x, floats y) { return _mm512_sub_ps(x, y); }
// the first or second 16 bits of each lane
static inline ints halves_of(ints x, bool second) {
    return second ? _mm512_srai_epi32(x, 16) : _mm512_srai_epi32(_mm512_slli_epi32(x, 16), 16);
}
// of BF16
static inline floats upper_halves(const char * p) {
    return as_floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load_half(p)), 16));
}
static inline floats times(floats x, floats y) { return _mm512_mul_ps(x, y); }
static inline floats multiply_add(floats x, floats y, floats to) { return _mm512_fmadd_ps(x, y, to); }
static inline floats multiply_subtract(floats x, floats y, floats from) { return _mm512_fnmadd_ps(x, y, from); }
static inline floats larger_size(floats x, floats y) { return _mm512_max_ps(x, _mm512_abs_ps(y)); }
static inline float largest_of(floats x) { return _mm512_reduce_max_ps(x); }
static inline int sum_of(ints x) { return _mm512_reduce_add_epi32(x); }
static inline void store_quants(char * p, ints x) { _mm_storeu_si128((__m128i *) p, _mm512_cvtsepi32_epi8(x)); }

static inline ints look_up(const int8_t * table, ints x) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *) table)), x);
}

// sums of two products of 16 bits
static inline ints add_pairs(ints sum, ints x, ints y) {
#if defined(__AVX512VNNI__)
    return _mm512_dpwssd_epi32(sum, x, y);
#else
    return add32(sum, _mm512_madd_epi16(x, y));
#endif
}

// Of four bytes each, unsigned times signed, without VNNI: sums of two products of 16 bits, which must hold them
static inline ints pairs(ints x, ints y) { return _mm512_maddubs_epi16(x, y); }
static inline ints add16(ints x, ints y) { return _mm512_add_epi16(x, y); }
static inline ints absolute(ints x) { return _mm512_abs_epi8(x); }
static inline ints with_sign(ints x, ints of) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(of), none(), x); }

#if defined(__AVX512VNNI__)
#define GGML_REPACK_WIDE_DOT
static inline ints dot(ints sum, ints x, ints y) { return _mm512_dpbusd_epi32(sum, x, y); }
#endif

#if defined(__AVX512BF16__)
#define GGML_REPACK_WIDE_BF16
// sums of two products of BF16
static inline floats dot_bf16(floats sum, ints x, ints y) { return _mm512_dpbf16_ps(sum, (__m512bh) x, (__m512bh) y); }
static inline void store_bf16(char * p, floats x) {
    const __m256bh y = _mm512_cvtneps_pbh(x);
    memcpy(p, &y, sizeof(y));
}
#endif

// 2^(x - 128) of bytes, one a column, as ggml_e8m0_to_fp32_half
static inline floats powers(const char * p) {
    const ints e = widen((const uint8_t *) p);
    const ints normal = _mm512_slli_epi32(_mm512_sub_epi32(e, repeat(1)), 23);
    const __mmask16 small = _mm512_cmplt_epi32_mask(e, repeat(2));
    return _mm512_castsi512_ps(_mm512_mask_sllv_epi32(normal, small, repeat(0x00200000), e));
}

// A fifth bit of each weight of a block: those of a vector are a mask.
static inline ints fifth_bits(const char * p, int group, ints x) {
    uint64_t fifth;
    memcpy(&fifth, p + 8 * group, sizeof(fifth));
    return _mm512_mask_add_epi8(x, fifth, x, all(16));
}
static inline void put_fifth_bits(char * p, int column, const uint8_t * bits) {
    for (int g = 0; g < 8; g++) {
        char & pair = p[8 * g + column / 2]; // of columns
        const int four = bits[g / 2] >> 4 * (g % 2) & 15;
        pair = column % 2 ? char(pair | four << 4) : char(four);
    }
}

#else

using ints = __m256i;
using floats = __m256;
using half_ints = __m128i;

static inline ints load(const void * p) { return _mm256_loadu_si256((const __m256i *) p); }
static inline void store(void * p, ints x) { _mm256_store_si256((__m256i *) p, x); }
static inline ints none() { return _mm256_setzero_si256(); }
static inline ints all(int8_t x) { return _mm256_set1_epi8(x); }
static inline ints repeat(int32_t x) { return _mm256_set1_epi32(x); }
static inline ints bits_and(ints x, ints y) { return _mm256_and_si256(x, y); }
static inline ints bits_or(ints x, ints y) { return _mm256_or_si256(x, y); }
static inline ints add8(ints x, ints y) { return _mm256_add_epi8(x, y); }
static inline ints subtract8(ints x, ints y) { return _mm256_sub_epi8(x, y); }
static inline ints add32(ints x, ints y) { return _mm256_add_epi32(x, y); }
static inline ints shift_left(ints x, int by) { return _mm256_sll_epi16(x, _mm_cvtsi32_si128(by)); }
static inline ints shift_right(ints x, int by) { return _mm256_srl_epi16(x, _mm_cvtsi32_si128(by)); }
static inline half_ints shift_right(half_ints x, int by) { return _mm_srl_epi16(x, _mm_cvtsi32_si128(by)); }
static inline half_ints load_half(const void * p) { return _mm_loadu_si128((const __m128i *) p); }
static inline ints join(half_ints x, half_ints y) { return _mm256_inserti128_si256(_mm256_castsi128_si256(x), y, 1); }

static inline ints widen(const int8_t * p) { return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
static inline ints widen(const uint8_t * p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *) p)); }
static inline ints widen_pairs(const uint8_t * p) { return _mm256_cvtepu8_epi16(load_half(p)); }
static inline ints widen_alternating(const uint8_t * p) {
    const __m128i even = _mm_loadl_epi64((const __m128i *) p);
    const __m128i odd = _mm_loadl_epi64((const __m128i *) (p + 8));
    return _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(even, odd));
}

static inline floats zeros() { return _mm256_setzero_ps(); }
static inline floats repeat(float x) { return _mm256_set1_ps(x); }
static inline floats load_floats(const float * p) { return _mm256_loadu_ps(p); }
static inline floats fact(const float * p) { return _mm256_load_ps(p); }
static inline void store(float * p, floats x) { _mm256_storeu_ps(p, x); }
static inline floats halves(const char * p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) p)); }
static inline floats to_floats(ints x) { return _mm256_cvtepi32_ps(x); }
static inline floats as_floats(ints x) { return _mm256_castsi256_ps(x); }
static inline ints round(floats x) { return _mm256_cvtps_epi32(x); }
static inline ints halves_of(ints x, bool second) {
    return second ? _mm256_srai_epi32(x, 16) : _mm256_srai_epi32(_mm256_slli_epi32(x, 16), 16);
}
static inline floats upper_halves(const char * p) {
    return as_floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(load_half(p)), 16));
}
static inline floats times(floats x, floats y) { return _mm256_mul_ps(x, y); }
static inline floats multiply_add(floats x, floats y, floats to) { return _mm256_fmadd_ps(x, y, to); }
static inline floats multiply_subtract(floats x, floats y, floats from) { return _mm256_fnmadd_ps(x, y, from); }
static inline floats larger_size(floats x, floats y) {
    return _mm256_max_ps(x, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), y));
}

static inline float largest_of(floats x) {
    __m128 y = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    y = _mm_max_ps(y, _mm_movehl_ps(y, y));
    return _mm_cvtss_f32(_mm_max_ss(y, _mm_movehdup_ps(y)));
}
static inline int sum_of(ints x) {
    __m128i y = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    y = _mm_add_epi32(y, _mm_unpackhi_epi64(y, y));
    return _mm_cvtsi128_si32(_mm_add_epi32(y, _mm_shuffle_epi32(y, 1)));
}
static inline void store_quants(char * p, ints x) {
    const __m128i y = _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
    _mm_storel_epi64((__m128i *) p, _mm_packs_epi16(y, y));
}

static inline ints look_up(const int8_t * table, ints x) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *) table)), x);
}

static inline ints add_pairs(ints sum, ints x, ints y) { return add32(sum, _mm256_madd_epi16(x, y)); }

static inline ints pairs(ints x, ints y) { return _mm256_maddubs_epi16(x, y); }
static inline ints add16(ints x, ints y) { return _mm256_add_epi16(x, y); }
static inline ints absolute(ints x) { return _mm256_abs_epi8(x); }
static inline ints with_sign(ints x, ints of) { return _mm256_sign_epi8(x, of); }

#if defined(__AVXVNNI__)
#define GGML_REPACK_WIDE_DOT
static inline ints dot(ints sum, ints x, ints y) { return _mm256_dpbusd_avx_epi32(sum, x, y); }
#endif

static inline floats powers(const char * p) {
    const ints e = widen((const uint8_t *) p);
    const ints normal = _mm256_slli_epi32(_mm256_sub_epi32(e, repeat(1)), 23);
    const ints small = _mm256_sllv_epi32(repeat(0x00200000), e);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(normal, small, _mm256_cmpgt_epi32(repeat(2), e)));
}

// There are no masks: a byte has the fifth bits of a weight of each of eight vectors.
static inline ints fifth_bits(const char * p, int group, ints x) {
    const ints y = load(p);
    return bits_or(x, bits_and(group < 4 ? shift_left(y, 4 - group) : shift_right(y, group - 4), all(16)));
}
static inline void put_fifth_bits(char * p, int column, const uint8_t * bits) {
    for (int i = 0; i < 4; i++) {
        int byte = 0;
        for (int g = 0; g < 8; g++) {
            byte |= (bits[g / 2] >> (4 * (g % 2) + i) & 1) << g;
        }
        p[4 * column + i] = char(byte);
    }
}

#endif

constexpr int VECTOR = sizeof(ints);
constexpr int COLUMNS = VECTOR / 4; // of a strip

static inline ints low_nibbles(ints x) { return bits_and(x, all(15)); }
static inline ints high_nibbles(ints x) { return low_nibbles(shift_right(x, 4)); }

// Results come to lines that other cores have, or none: the store at the end would wait for them.
static inline void prefetch_to_write(const void * p) {
#if defined(__GNUC__)
    __builtin_prefetch(p, 1);
#else
    _mm_prefetch((const char *) p, _MM_HINT_T0);
#endif
}

static inline ints repeat4(const void * p) {
    int32_t x;
    memcpy(&x, p, sizeof(x));
    return repeat(x);
}

// sums of four products of eight bits, unsigned times signed, in one instruction
#if defined(GGML_REPACK_WIDE_DOT)
constexpr bool has_dot = true;
#else
constexpr bool has_dot = false;
#endif

// of weights from -128 to 127, which are signed without VNNI: 16 bits hold no two products of 255 and 127
constexpr int SIGN_BIAS = has_dot ? 128 : 0;

// A sum of GROUPS products of vectors of weights, MOST at most or signed, with four inputs from -127 to 127 each.
template <int MOST, int GROUPS> struct total {
    ints sum = none();

#if defined(GGML_REPACK_WIDE_DOT)
    void add(ints weights, ints inputs, int) { sum = dot(sum, weights, inputs); }
#else
    // products of which 16 bits hold the sum
    static constexpr int fit = MOST > 63 ? 1 : MOST > 31 ? 2 : MOST > 15 ? 4 : 8;
    static constexpr int together = fit < GROUPS ? fit : GROUPS;
    ints words = none();

    void add(ints weights, ints inputs, int group) {
        if constexpr (MOST > 63) { // the signs go to the inputs
            words = pairs(absolute(weights), with_sign(inputs, weights));
        } else {
            words = group % together ? add16(words, pairs(weights, inputs)) : pairs(weights, inputs);
        }
        if (group % together == together - 1) {
            sum = add_pairs(sum, words, repeat(0x00010001));
        }
    }
#endif
};

} // namespace repack_wide
