#include "fattn-block.h"
#include "fattn-few.h"
#include "fattn-many.h"
#include "fattn-tiles.h"

#include "ggml-cpu.h"
#include "ggml-cpu-impl.h"
#include "ggml-impl.h"
#include "ops.h"
#include "quants.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <utility>

#if !defined(GGML_FATTN_FEW)

bool ggml_fattn_block_supported(const ggml_tensor *) { return false; }

size_t ggml_fattn_block_work_size(const ggml_tensor *, int) { return 0; }

void ggml_compute_forward_fattn_block(const ggml_compute_params *, ggml_tensor *) { GGML_ABORT("fattn: no vectors"); }

#else

#if defined(GGML_FATTN_TILES)
template <int TERMS> using fa_tiles = fattn_tiles::kernel<TERMS>;
#else
template <int TERMS> using fa_tiles = fattn_many::kernel;
#endif

// Work is split into units of (stream, some KV heads, some query heads of each, some query rows, KV range). A unit
// gathers the keys that its mask lets through in blocks and goes through its KV heads block by block: a few queries are
// multiplied with K and V as they are (fattn-few.h), for more a block of each is converted to F32 once (fattn-many.h);
// results have the same bits. Rows of prompts are computed apart and have tiles where there are (fattn-tiles.h).
// The softmax is the usual online one, a block at a time within a range of FA_RANGE keys; the ranges of a query are merged
// in order, by their unit or, where units are few and share the ranges, after all of them. So a query's result is the same
// bits whatever the number of threads, of other queries, and of keys that others have, if its own keys lie side by side.
// Rows that are each of any stream (see fattn-block.h) make units of neighbours of the same stream.

static constexpr int64_t FA_KV_BLOCK = 64; // most keys in a block
static constexpr int64_t FA_KV_PAD = 16;   // blocks are padded to a multiple of this: the widest F32 vector
static constexpr int64_t FA_DK_PAD = 32;   // rows of K and V in scratch, too: what tiles take
static constexpr int64_t FA_DV_PAD = 16;
static constexpr int64_t FA_MOST_Q = 128; // most queries (rows x heads) in a unit
static constexpr int64_t FA_MAX_Q = std::max(FA_MOST_Q, fa_tiles<1>::most_queries(1));
static constexpr int64_t FA_FEW_Q = 64;  // the same, of a unit with several KV heads, or where units are few
static constexpr int64_t FA_RANGE = 512; // keys in a KV range: whole blocks
static constexpr int64_t FA_RANGE_BLOCKS = FA_RANGE / FA_KV_BLOCK;
static constexpr int64_t FA_MAX_PARTIALS = 32 * 1024 * 1024; // bytes of ranges that wait for being merged

static constexpr int64_t FA_MAX_BYTES = 512 * 1024; // of K and V in two blocks, the one at hand and the next

static constexpr uint16_t FA_F16_NEG_INF = 0xFC00;

struct fa_plan {
    int64_t heads;     // query heads of a KV head in a unit
    int64_t most_rows; // most query rows in a unit
    int64_t rows;      // query rows in a unit
    int64_t kv_heads;  // KV heads in a unit
    int64_t n_heads;   // units along the query heads of a KV head
    int64_t n_kv;      // units along the KV heads
    int64_t n_rows;    // units along the query rows
    int64_t n_ranges;  // KV ranges
    int64_t n_splits;  // units along the KV ranges
    int64_t n_units;
};

// Rows in a unit where each is of any stream: a run of neighbours of the same stream, or a part of one.
struct fa_run {
    int32_t first; // of the query rows
    int32_t rows;
    int32_t stream;
    int32_t kv_heads; // KV heads in a unit
    int32_t unit;     // the first of the run, without KV ranges
};

// True if queries of a KV head are so few that converting K and V beforehand costs more than it saves.
static bool fa_few(int64_t nq, const ggml_tensor * k, const ggml_tensor * v) {
    using namespace fattn_few;
    return nq <= std::min(most_queries(k->type), most_queries(v->type)) && k->ne[0] % EPR == 0 && v->ne[0] % EPR == 0;
}

// The mark of each query row: 1 or 2 for those of prompts, whose tiles have as many terms; nullptr where all rows have the
// same kernel.
static const int32_t * fa_prompts(const ggml_tensor * dst) {
#if defined(GGML_FATTN_TILES)
    return dst->src[6] && fattn_tiles::has_tiles() ? (const int32_t *) dst->src[6]->data : nullptr;
#else
    GGML_UNUSED(dst);
    return nullptr;
#endif
}

// Query heads and KV heads in a unit of `rows` rows, `rest` of which units there are for each of the latter. Tiles have one
// KV head.
static void fa_plan_heads(fa_plan & p, const ggml_tensor * dst, int64_t rows, int64_t rest, int nth, bool tiles) {
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];

    // In a KV cache the rows of a key's KV heads lie side by side in memory, which is read fastest in that order; a block
    // of them should stay in the second level cache. Few units would leave threads without work.
    const bool ordered = k->nb[2] < k->nb[1] && v->nb[2] < v->nb[1];
    const int64_t bytes = 2 * FA_KV_BLOCK * (ggml_row_size(k->type, k->ne[0]) + ggml_row_size(v->type, v->ne[0]));
    const int64_t most = ordered && !tiles && fa_few(p.heads * rows, k, dst->src[2])
                             ? std::min({ k->ne[2], FA_FEW_Q / (p.heads * rows), FA_MAX_BYTES / bytes })
                             : 1;
    p.kv_heads = std::max<int64_t>(1, std::min(most, nth > 1 ? rest * k->ne[2] / (4 * nth) : most));
    p.n_kv = (k->ne[2] + p.kv_heads - 1) / p.kv_heads;
    p.kv_heads = (k->ne[2] + p.n_kv - 1) / p.n_kv;
}

// KV ranges are shared where units are few.
static void fa_plan_splits(fa_plan & p, const ggml_tensor * dst, int nth) {
    p.n_splits = 1;
    if (nth > 1 && p.n_units < 4 * nth) {
        const int64_t bytes_of_range = ggml_nrows(dst->src[0]) * (2 + dst->src[2]->ne[0]) * sizeof(float);
        p.n_splits = p.n_ranges * bytes_of_range <= FA_MAX_PARTIALS
                         ? std::min((4 * nth + p.n_units - 1) / p.n_units, p.n_ranges)
                         : 1;
    }
    p.n_units *= p.n_splits;
}

static fa_plan fa_make_plan(const ggml_tensor * dst, int nth, bool tiles) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];

    const auto ceil_div = [](int64_t a, int64_t b) { return (a + b - 1) / b; };

    const int64_t group = q->ne[2] / k->ne[2];

    fa_plan p;
    const int64_t most = tiles ? fa_tiles<1>::most_queries(k->ne[0]) : FA_MOST_Q;
    p.n_heads = ceil_div(group, most);
    p.heads = ceil_div(group, p.n_heads);
    for (int64_t queries : { most, most / 2, FA_MOST_Q, FA_FEW_Q }) {
        p.most_rows = std::max<int64_t>(1, queries / p.heads);
        p.n_rows = ceil_div(q->ne[1], p.most_rows);
        if (nth == 1 || p.n_heads * p.n_rows * k->ne[2] * k->ne[3] >= 4 * nth) {
            break;
        }
    }
    p.rows = ceil_div(q->ne[1], p.n_rows);

    const int64_t rest = p.n_heads * p.n_rows * k->ne[3];
    fa_plan_heads(p, dst, p.rows, rest, nth, tiles);
    p.n_units = rest * p.n_kv;
    p.n_ranges = std::max<int64_t>(1, ceil_div(k->ne[1], FA_RANGE));
    fa_plan_splits(p, dst, nth);
    return p;
}

// As fa_make_plan, where each row is of the stream that its cell is in: also makes the runs. Returns their number.
static int64_t fa_plan_runs(fa_plan & p, const ggml_tensor * dst, int nth, fa_run * runs) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const int64_t * cells = (const int64_t *) dst->src[5]->data;
    const int64_t stream_size = k->nb[3] / k->nb[1];
    const int32_t * prompts = fa_prompts(dst);

    int64_t n_runs = 0;
    for (int64_t first = 0; first < q->ne[1];) {
        const int64_t stream = cells[first] / stream_size;
        int64_t end = first + 1;
        while (end < q->ne[1] && uint64_t(cells[end] - stream * stream_size) < uint64_t(stream_size) &&
               (!prompts || prompts[end] == prompts[first])) {
            ++end;
        }
        for (int64_t left = (end - first + p.most_rows - 1) / p.most_rows; left > 0;
             --left) { // parts of about equal size
            const int64_t rows = (end - first + left - 1) / left;
            runs[n_runs++] = { int32_t(first), int32_t(rows), int32_t(stream), 0, 0 };
            first += rows;
        }
    }

    p.n_units = 0;
    for (int64_t i = 0; i < n_runs; ++i) {
        fa_plan_heads(p, dst, runs[i].rows, p.n_heads * n_runs, nth, prompts && prompts[runs[i].first]);
        runs[i].kv_heads = p.kv_heads;
        runs[i].unit = p.n_units;
        p.n_units += p.n_heads * p.n_kv;
    }
    fa_plan_splits(p, dst, nth);
    return n_runs;
}

// bytes for a fa_sight of each block of keys
static int64_t fa_sights(const ggml_tensor * k) { return GGML_PAD(k->ne[1] / FA_KV_BLOCK + 1, CACHE_LINE_SIZE); }

// Most queries in a unit with heads of this size
static int64_t fa_max_queries(const ggml_tensor * dst) {
    return std::max(FA_MOST_Q, fa_tiles<1>::most_queries(dst->src[1]->ne[0]));
}

// F32 elements of scratch that each thread needs
static int64_t fa_scratch_size(const ggml_tensor * dst) {
    const int64_t DK = GGML_PAD(dst->src[1]->ne[0], FA_DK_PAD);
    const int64_t DV = GGML_PAD(dst->src[2]->ne[0], FA_DV_PAD);

    const int64_t queries = fa_max_queries(dst) * (2 * DK + 3 * DV);
    const int64_t block = FA_KV_BLOCK * (DK + fattn_many::stride(DV) + 3 * fattn_many::LANES);
    const int64_t runs = dst->src[5] ? dst->src[0]->ne[1] * sizeof(fa_run) / sizeof(float) : 0;
    const int64_t sights = fa_sights(dst->src[1]) / sizeof(float);
    return GGML_PAD(queries + block + sights + runs, (int64_t) CACHE_LINE_SIZE_F32) + CACHE_LINE_SIZE_F32;
}

size_t ggml_fattn_block_work_size(const ggml_tensor * dst, int n_threads) {
    // Runs, and rows of prompts, are not known yet: the fewest units, which share most.
    fa_plan p = fa_make_plan(dst, n_threads, dst->src[5] && dst->src[6]);

    int64_t n = n_threads * fa_scratch_size(dst);
    if (dst->src[5]) {
        p.n_units = p.n_heads * p.n_rows;
        fa_plan_splits(p, dst, n_threads);
    }
    if (p.n_splits > 1) {
        n += p.n_ranges * ggml_nrows(dst->src[0]) * (2 + dst->src[2]->ne[0]);
    }
    return n * sizeof(float) + CACHE_LINE_SIZE;
}

static bool fa_type_supported(ggml_type type) {
    return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0;
}

bool ggml_fattn_block_supported(const ggml_tensor * dst) {
    const ggml_tensor * q = dst->src[0];
    const ggml_tensor * k = dst->src[1];
    const ggml_tensor * v = dst->src[2];
    const ggml_tensor * mask = dst->src[3];

    // Converting a block pays from three queries on (five where there is nothing to convert), or where ggml_vec_dot_f16
    // or ggml_vec_mad_f16 would work through a scalar tail.
    bool worth = fa_few(q->ne[1] * q->ne[2] / k->ne[2], k, v) ||
                 q->ne[1] * q->ne[2] >= (k->type == GGML_TYPE_F32 ? 5 : 3) * k->ne[2];
#ifdef GGML_F16_STEP
    worth = worth || (k->type == GGML_TYPE_F16 && k->ne[0] % GGML_F16_DOT_STEP != 0) ||
            (v->type == GGML_TYPE_F16 && v->ne[0] % GGML_F16_STEP != 0);
#endif
    worth = worth || dst->src[6] != nullptr; // a row of a prompt has the same bits alone

    return q->ne[1] > 0 && worth && q->type == GGML_TYPE_F32 && fa_type_supported(k->type) &&
           fa_type_supported(v->type) && k->ne[0] % 8 == 0 && v->ne[0] % 8 == 0 && k->ne[2] == v->ne[2] &&
           k->ne[3] == v->ne[3] && q->ne[3] == k->ne[3] && q->ne[2] % k->ne[2] == 0 &&
           (mask == nullptr || mask->ne[2] == 1) && (dst->src[5] == nullptr || (mask != nullptr && q->ne[3] == 1));
}

static void fa_row_to_f32(ggml_type type, const void * x, float * y, int64_t n) {
    switch (type) {
        case GGML_TYPE_F32: memcpy(y, x, n * sizeof(float)); break;
        case GGML_TYPE_F16: ggml_cpu_fp16_to_fp32((const ggml_fp16_t *) x, y, n); break;
        case GGML_TYPE_BF16: ggml_cpu_bf16_to_fp32((const ggml_bf16_t *) x, y, n); break;
        case GGML_TYPE_Q8_0: {
            const block_q8_0 * b = (const block_q8_0 *) x;
            for (int64_t i = 0; i < n / QK8_0; ++i) {
                const float d = GGML_CPU_FP16_TO_FP32(b[i].d);
                for (int j = 0; j < QK8_0; ++j) {
                    y[i * QK8_0 + j] = b[i].qs[j] * d;
                }
            }
        } break;
        default: GGML_ABORT("fattn: unsupported type");
    }
}

// What the rows of a unit see of FA_KV_BLOCK neighbouring keys: none of them, some, or each by some row; or all of them by
// all rows, and the mask adds nothing.
enum fa_sight : uint8_t { FA_NONE, FA_SOME, FA_EACH, FA_PLAIN };

// everything that the units of one op have in common
struct fa_context {
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;
    ggml_tensor * dst;

    fa_plan plan;
    const fa_run * runs; // nullptr: the streams have equally many rows, as q->ne[3] says
    int64_t n_runs;
    const int32_t * prompts; // see fa_prompts

    int64_t DK;
    int64_t DV;
    int64_t DK_padded;
    int64_t DV_padded;
    int64_t group; // query heads for each KV head

    ggml_threadpool * threadpool;

    float scale;
    float max_bias;
    float logit_softcap;

    float * partials; // [queries][n_ranges][2 + DV]: maximum, sum, weighted sum of V
};

// a block of keys
struct fa_keys {
    int32_t idx[FA_KV_BLOCK];
    // rows, of the first KV head of a unit until fa_next_head; the padding repeats the last
    const char * k[FA_KV_BLOCK];
    const char * v[FA_KV_BLOCK];
    int64_t n;
    int64_t width; // n, padded
    bool plain;    // all rows see all of them, and the mask adds nothing; false: not known
};

// where a unit lies
struct fa_place {
    int64_t i3;     // of the queries
    int64_t stream; // of the keys
    int64_t k0, nk; // KV heads
    int64_t h0, nh; // query heads, from the first of a KV head on
    int64_t r0, nr; // query rows
    int64_t c0, c1; // keys
    int64_t ranges; // end of those of the unit

    const uint8_t * sights; // of all keys, by fa_look; nullptr: not known
};

// queries of one unit that are handled together, and the scratch of the thread
struct fa_unit : fa_place {
    int64_t range; // the range at hand
    bool finite;   // no sum is infinite or not a number
    int32_t mark;  // of the rows

    float * Q;     // [nk*nr*nh][DK], scaled
    float * KQ;    // [nr*nh][width]
    float * VKQ;   // [nk*nr*nh][DV], of the range at hand
    float * total; // [nk*nr*nh][DV], of the ranges before it

    // many queries, of a single KV head, in groups of LANES: the same with the queries side by side
    bool many;
    float * turned;  // Q, as turn_queries makes it
    float * columns; // VKQ, [DV_padded][lanes]
    float * masks;   // [n][lanes], of a group; its KQ is [width][lanes]
    float * weights; // KQ for tiles
    float * K;       // the block at hand in F32, [n][DK]; or tiles of it
    float * V;       // [n][V_stride]

    uint8_t * looked; // what sights may point to

    fa_keys blocks[2];
    fa_keys * now;  // the block at hand
    fa_keys * next; // the one that is fetched meanwhile

    // The unit that this thread takes next, and its first block. They are known before the last block of this one, and
    // fetched with it: the units of many short sequences have few blocks.
    int64_t after; // -1: not known
    fa_place place_after;
    fa_keys keys_after;
    int64_t asked;  // keys of it that have been fetched
    int64_t asking; // end of those that are fetched with the block at hand
    bool fetched;   // the first block of this one has been

    float M[FA_MAX_Q];
    float S[FA_MAX_Q];
    float total_M[FA_MAX_Q];
    float total_S[FA_MAX_Q];
};

static const uint16_t * fa_mask_row(const fa_context & c, int64_t i1, int64_t i3) {
    return (const uint16_t *) ((const char *) c.mask->data + i1 * c.mask->nb[1] + (i3 % c.mask->ne[3]) * c.mask->nb[3]);
}

// how many of the keys ic .. ic + n are seen by some row of the unit, and each of them by how many
static int64_t fa_count_seen(const fa_context & c, const fa_place & u, int64_t ic, int64_t n, uint16_t * seen) {
    std::fill(seen, seen + n, c.mask ? 0 : 1);
    if (!c.mask) {
        return n;
    }
    for (int64_t r = 0; r < u.nr; ++r) {
        const uint16_t * mp = fa_mask_row(c, u.r0 + r, u.i3) + ic;
        for (int64_t j = 0; j < n; ++j) {
            seen[j] += mp[j] != FA_F16_NEG_INF;
        }
    }
    uint16_t count = 0;
    for (int64_t j = 0; j < n; ++j) {
        count += seen[j] != 0;
    }
    return count;
}

// Looks once at the masks of a unit of several rows. Returns true if their keys differ so much, as those of different
// sequences do, that each row is faster alone.
static bool fa_look(const fa_context & c, fa_unit & u) {
    u.sights = nullptr;
    if (!c.mask || u.nr == 1) {
        return false;
    }
    int64_t n_any = 0; // keys that some row sees
    int64_t n_all = 0; // keys seen, summed over the rows
    for (int64_t ic = u.c0; ic < u.c1; ic += FA_KV_BLOCK) {
        const int64_t n = std::min(FA_KV_BLOCK, u.c1 - ic);
        uint16_t seen[FA_KV_BLOCK] = { 0 };
        uint16_t bits[FA_KV_BLOCK] = { 0 };
        for (int64_t r = 0; r < u.nr; ++r) {
            const uint16_t * mp = fa_mask_row(c, u.r0 + r, u.i3) + ic;
            for (int64_t j = 0; j < n; ++j) {
                seen[j] += mp[j] != FA_F16_NEG_INF;
                bits[j] |= mp[j];
            }
        }
        int64_t n_seen = 0;
        uint16_t any = 0;
        for (int64_t j = 0; j < FA_KV_BLOCK; ++j) {
            n_seen += seen[j] > 0;
            n_all += seen[j];
            any |= bits[j];
        }
        n_any += n_seen;
        u.looked[ic / FA_KV_BLOCK] = n_seen == 0 ? FA_NONE : n_seen < n ? FA_SOME : any ? FA_EACH : FA_PLAIN;
    }
    u.sights = u.looked;
    return 2 * n_all <= u.nr * n_any;
}

// Find the next keys, from ic on, that at least one of the rows may see. Returns where to go on.
static int64_t fa_find_keys(const fa_context & c, const fa_place & u, int64_t ic, fa_keys & x) {
    x.n = 0;
    x.plain = !c.mask;
    while (ic < u.c1 && x.n < FA_KV_BLOCK) {
        const int64_t step = std::min(FA_KV_BLOCK, u.c1 - ic);

        uint16_t seen[FA_KV_BLOCK];
        int64_t n_seen = -1; // not counted
        if (u.sights && ic % FA_KV_BLOCK == 0) {
            const uint8_t sight = u.sights[ic / FA_KV_BLOCK];
            n_seen = sight == FA_NONE ? 0 : sight == FA_SOME ? -1 : step;
            x.plain = sight == FA_PLAIN && x.n == 0;
        }
        if (n_seen < 0) {
            n_seen = fa_count_seen(c, u, ic, step, seen);
        }

        if (n_seen == step) {
            const int64_t take = std::min(step, FA_KV_BLOCK - x.n);
            for (int64_t j = 0; j < take; ++j) {
                x.idx[x.n + j] = ic + j;
            }
            x.n += take;
            ic += take;
        } else {
            int64_t j = 0;
            for (; j < step && n_seen > 0 && x.n < FA_KV_BLOCK; ++j) {
                x.idx[x.n] = ic + j;
                x.n += seen[j] > 0;
            }
            ic += n_seen > 0 ? j : step;
        }
    }
    x.width = GGML_PAD(x.n, FA_KV_PAD);
    return ic;
}

static int64_t fa_next_block(const fa_context & c, const fa_place & u, int64_t ic, fa_keys & x) {
    ic = fa_find_keys(c, u, ic, x);

    const char * k = (const char *) c.k->data + u.k0 * c.k->nb[2] + u.stream * c.k->nb[3];
    const char * v = (const char *) c.v->data + u.k0 * c.v->nb[2] + u.stream * c.v->nb[3];
    for (int64_t j = 0; j < x.width; ++j) {
        const int64_t key = x.idx[std::min(j, x.n - 1)];
        x.k[j] = k + key * c.k->nb[1];
        x.v[j] = v + key * c.v->nb[1];
    }
    return ic;
}

static void fa_next_head(const fa_context & c, fa_keys & x) {
    for (int64_t j = 0; j < x.width; ++j) {
        x.k[j] += c.k->nb[2];
        x.v[j] += c.v->nb[2];
    }
}

// The rows of K or V, t, that are prefetched while the `keys` rows of each KV head of the block at hand are computed with,
// now those of the `head`-th. They come in the order of memory, all heads: the rows of one are too short for a hardware
// prefetcher.
static fattn_few::ahead fa_ahead(const fa_context & c, const fa_unit & u, const ggml_tensor * t, int64_t keys,
                                 int64_t head) {
    const auto size = [&](const fa_place & p) { return (p.nk - 1) * t->nb[2] + ggml_row_size(t->type, t->ne[0]); };
    const auto rows = [&](const fa_keys & x) { return t == c.k ? x.k : x.v; };
    return { { { rows(*u.next), u.next->n, int64_t(size(u)) },
               { rows(u.keys_after) + u.asked, u.asking - u.asked, int64_t(size(u.place_after)) } },
             head * keys,
             u.nk * keys };
}

// A block: calls take with a function that returns the elements i .. i + EPR of key j, those behind the last one 0.
template <typename F>
static void fa_load_block(const ggml_tensor * t, const char * const * rows, const fattn_few::ahead & ask, F take) {
    using namespace fattn_few;
    with_type(t->type, [&](auto type) {
        take([&, d = t->ne[0]](int64_t j, int64_t i) {
            if (i == 0 && j % ASK == 0) {
                ask.ask_for(j, ASK);
            }
            if (i + EPR <= d) {
                return load<decltype(type)::value>(rows[j], i);
            }
            float left[EPR] = { 0.0f };
            fa_row_to_f32(t->type, rows[j] + i * ggml_type_size(t->type), left, d - i); // no type with blocks
            return GGML_F32_VEC_LOAD(left);
        });
    });
}

static void fa_load_mask(const fa_context & c, const fa_unit & u, int64_t row, float * m) {
    const fa_keys & x = *u.now;
    if (c.mask) {
        const uint16_t * mp = fa_mask_row(c, row, u.i3);
        if (x.idx[x.n - 1] - x.idx[0] == x.n - 1) {
            ggml_cpu_fp16_to_fp32(mp + x.idx[0], m, x.n);
        } else {
            for (int64_t j = 0; j < x.n; ++j) {
                m[j] = GGML_CPU_FP16_TO_FP32(mp[x.idx[j]]);
            }
        }
    } else {
        std::fill(m, m + x.n, 0.0f);
    }
    std::fill(m + x.n, m + x.width, -INFINITY);
}

static float fa_slope(const fa_context & c, int64_t h) {
    if (c.max_bias <= 0.0f) {
        return 1.0f;
    }
    const int64_t n_head_log2 = 1ll << (int) floor(log2((double) c.q->ne[2]));
    const float m0 = powf(2.0f, -(c.max_bias) / n_head_log2);
    const float m1 = powf(2.0f, -(c.max_bias / 2.0f) / n_head_log2);
    return h < n_head_log2 ? powf(m0, h + 1) : powf(m1, 2 * (h - n_head_log2) + 1);
}

// one step of the online softmax: turns the scores of query m into weights
static void fa_softmax(const fa_context & c, fa_unit & u, float * s, int64_t m, const float * mask, float slope) {
    const int64_t width = u.now->width;
    if (c.logit_softcap != 0.0f) {
        ggml_vec_tanh_f32(width, s, s);
        ggml_vec_scale_f32(width, s, c.logit_softcap);
    }
    const float max = fattn_few::add_mask_max(s, mask, slope, width);
    if (max == -INFINITY) {
        memset(s, 0, width * sizeof(float));
        return;
    }
    if (max > u.M[m]) {
        const float ms = fattn_few::exp_of(u.M[m] - max);
        ggml_vec_scale_f32(c.DV, u.VKQ + m * c.DV, ms);
        u.S[m] *= ms;
        u.M[m] = max;
    }
    u.S[m] += ggml_vec_soft_max_f32(width, s, s, u.M[m]);
}

// write the result of one query, given the maximum and the sum of its weights
static void fa_store(const fa_context & c, int64_t i1, int64_t i2, int64_t i3, float max, float sum, float * vkq) {
    if (c.sinks) {
        const float sink = ((const float *) c.sinks->data)[i2];
        const float top = std::max(max, sink);
        ggml_vec_scale_f32(c.DV, vkq, expf(max - top));
        sum = sum * expf(max - top) + expf(sink - top);
    }
    ggml_vec_scale_f32(c.DV, vkq, sum == 0.0f ? 0.0f : 1.0f / sum);
    memcpy((char *) c.dst->data + i2 * c.dst->nb[1] + i1 * c.dst->nb[2] + i3 * c.dst->nb[3], vkq, c.DV * sizeof(float));
}

static float * fa_partial(const fa_context & c, int64_t i1, int64_t i2, int64_t i3, int64_t range) {
    const int64_t query = (i3 * c.q->ne[1] + i1) * c.q->ne[2] + i2;
    return c.partials + (query * c.plan.n_ranges + range) * (2 + c.DV);
}

// adds a range to those before it: maximum, sum of weights, weighted sum of V
static void fa_add_range(int64_t DV, float & M, float & S, float * V, float m, float s, const float * v) {
    if (s == 0.0f) { // no keys; a sum that is not a number goes on
        return;
    }
    if (S == 0.0f) {
        M = m;
        S = s;
        memcpy(V, v, DV * sizeof(float));
    } else if (m > M) {
        const float w = expf(M - m);
        ggml_vec_scale_f32(DV, V, w);
        ggml_vec_add_f32(DV, V, V, v);
        S = S * w + s;
        M = m;
    } else {
        const float w = expf(m - M);
        ggml_vec_mad_f32(DV, V, v, w);
        S += s * w;
    }
}

// A block of keys with few queries of a KV head, the `head`-th of the unit.
static void fa_few_block(const fa_context & c, fa_unit & u, int64_t nq, int64_t head, const float * slope) {
    const int64_t m0 = head * nq;
    fattn_few::all_scores(c.k->type, u.now->k, u.now->width, nq, u.Q + m0 * c.DK, c.DK, u.KQ,
                          fa_ahead(c, u, c.k, u.now->width, head));
    for (int64_t r = 0; r < u.nr; ++r) {
        float mask[FA_KV_BLOCK];
        fa_load_mask(c, u, u.r0 + r, mask);
        for (int64_t m = r * u.nh; m < (r + 1) * u.nh; ++m) {
            fa_softmax(c, u, u.KQ + m * u.now->width, m0 + m, mask, slope[m0 + m]);
        }
    }
    fattn_few::all_weighted(c.v->type, u.now->v, u.now->n, nq, u.KQ, u.now->width, u.VKQ + m0 * c.DV, c.DV,
                            fa_ahead(c, u, c.v, u.now->n, head));
}

// True if the rows `first` .. `last` see each key of the block, and the mask adds nothing.
static bool fa_all_seen(const fa_context & c, const fa_unit & u, int64_t first, int64_t last) {
    const fa_keys & x = *u.now;
    if (x.plain || x.idx[x.n - 1] - x.idx[0] != x.n - 1) {
        return x.plain;
    }
    uint16_t any = 0;
    for (int64_t r = first; r <= last; ++r) {
        const uint16_t * mp = fa_mask_row(c, r, u.i3) + x.idx[0];
        for (int64_t j = 0; j < x.n; ++j) {
            any |= mp[j];
        }
    }
    return any == 0;
}

// The masks of the queries `first` .. `end`, [n][lanes]; nullptr where all are 0.
static const float * fa_load_masks(const fa_context & c, fa_unit & u, int64_t first, int64_t end, int64_t lanes) {
    const int64_t r0 = u.r0 + first / u.nh;
    const int64_t r1 = u.r0 + (end - 1) / u.nh;
    if (fa_all_seen(c, u, r0, r1)) {
        return nullptr;
    }
    for (int64_t r = r0; r <= r1; ++r) {
        float mask[FA_KV_BLOCK];
        fa_load_mask(c, u, r, mask);
        const int64_t from = std::max(first, (r - u.r0) * u.nh) - first;
        const int64_t to = std::min(end, (r - u.r0 + 1) * u.nh) - first;
        for (int64_t j = 0; j < u.now->n; ++j) {
            std::fill(u.masks + j * lanes + from, u.masks + j * lanes + to, mask[j]);
        }
    }
    for (int64_t j = 0; j < u.now->n; ++j) {
        std::fill(u.masks + j * lanes + (end - first), u.masks + (j + 1) * lanes, 0.0f);
    }
    return u.masks;
}

// Calls f(first query of a group, end, lanes).
template <typename F> static void fa_each_group(const fa_unit & u, int64_t nq, F f) {
    const int64_t most = u.mark ? fa_tiles<1>::LANES : fattn_many::kernel::LANES;
    for (int64_t first = 0; first < nq; first += most) {
        const int64_t end = std::min(first + most, nq);
        f(first, end, GGML_PAD(end - first, fattn_few::EPR));
    }
}

// A block of keys with many queries of a KV head.
template <typename KERNEL>
static void fa_many_block(const fa_context & c, fa_unit & u, int64_t nq, const float * slope) {
    const fa_keys & x = *u.now;
    fa_load_block(c.k, x.k, fa_ahead(c, u, c.k, x.n, 0), [&](auto f) { KERNEL::load_keys(x.n, c.DK, u.K, f); });
    fa_load_block(c.v, x.v, fa_ahead(c, u, c.v, x.n, 0), [&](auto f) { KERNEL::load_values(x.n, c.DV, u.V, f); });
    fa_each_group(u, nq, [&](int64_t first, int64_t end, int64_t lanes) {
        const float * masks = fa_load_masks(c, u, first, end, lanes);
        KERNEL::scores(u.K, x.n, c.DK, u.turned + first * c.DK_padded, lanes, u.KQ);
        if (c.logit_softcap != 0.0f) {
            ggml_vec_tanh_f32(x.n * lanes, u.KQ, u.KQ);
            ggml_vec_scale_f32(x.n * lanes, u.KQ, c.logit_softcap);
        }
        KERNEL::add(u.KQ, x.n, x.width, lanes, masks, slope + first, u.M + first, u.S + first, u.V, c.DV, u.weights,
                    u.columns + first * c.DV_padded);
    });
}

// The queries of a unit, KV head by KV head, row by row. Calls f(query of the unit, row, query head).
template <typename F> static void fa_each_query(const fa_context & c, const fa_unit & u, F f) {
    int64_t m = 0;
    for (int64_t ik = u.k0; ik < u.k0 + u.nk; ++ik) {
        for (int64_t r = u.r0; r < u.r0 + u.nr; ++r) {
            for (int64_t h = 0; h < u.nh; ++h) {
                f(m++, r, ik * c.group + u.h0 + h);
            }
        }
    }
}

static bool fa_all_finite(const float * x, int64_t n) {
    uint32_t bad = 0; // without an early end, which would keep the compiler from vectors
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        memcpy(&bits, x + i, sizeof(bits));
        bad |= (bits & 0x7F800000) == 0x7F800000;
    }
    return bad == 0;
}

// The sums of nq queries over the range at hand begin with none, and go to those of the ranges before it.
static void fa_begin_range(const fa_context & c, fa_unit & u, int64_t nq) {
    std::fill(u.M, u.M + nq, -INFINITY);
    std::fill(u.S, u.S + nq, 0.0f);
    if (u.many) {
        const int64_t lanes = GGML_PAD(nq, fattn_few::EPR);
        std::fill(u.M + nq, u.M + lanes, 0.0f);
        std::fill(u.S + nq, u.S + lanes, 0.0f);
        memset(u.columns, 0, lanes * c.DV_padded * sizeof(float));
    } else {
        memset(u.VKQ, 0, nq * c.DV * sizeof(float));
    }
}

static void fa_end_range(const fa_context & c, fa_unit & u, int64_t nq) {
    if (u.many) {
        fa_each_group(u, nq, [&](int64_t first, int64_t, int64_t lanes) {
            fattn_many::turn_sums(u.columns + first * c.DV_padded, c.DV, lanes, u.VKQ + first * c.DV);
        });
    }
    if (c.plan.n_splits > 1) {
        u.finite = u.finite && (u.nr == 1 || (fa_all_finite(u.S, nq) && fa_all_finite(u.VKQ, nq * c.DV)));
        fa_each_query(c, u, [&](int64_t m, int64_t i1, int64_t i2) {
            float * p = fa_partial(c, i1, i2, u.i3, u.range);
            p[0] = u.M[m];
            p[1] = u.S[m];
            memcpy(p + 2, u.VKQ + m * c.DV, c.DV * sizeof(float));
        });
    } else if (u.range == 0) { // as fa_add_range would copy it
        std::copy(u.M, u.M + nq, u.total_M);
        std::copy(u.S, u.S + nq, u.total_S);
        std::swap(u.VKQ, u.total);
    } else {
        for (int64_t m = 0; m < nq; ++m) {
            const float * vkq = u.VKQ + m * c.DV;
            fa_add_range(c.DV, u.total_M[m], u.total_S[m], u.total + m * c.DV, u.M[m], u.S[m], vkq);
        }
    }
    ++u.range;
}

// `ih`: which of the groups of query heads; `k0`, `kv_heads`: the KV heads
static void fa_set_heads(const fa_context & c, fa_place & u, int64_t ih, int64_t k0, int64_t kv_heads) {
    u.k0 = k0;
    u.nk = std::min(kv_heads, c.k->ne[2] - k0);
    u.h0 = ih * c.plan.heads;
    u.nh = std::min(c.plan.heads, c.group - u.h0);
}

static void fa_locate(const fa_context & c, int64_t unit, fa_place & u) {
    const fa_plan & p = c.plan;

    u.sights = nullptr;
    unit = p.n_units - 1 - unit; // rows with more keys first, so that threads end together
    const int64_t split = unit % p.n_splits;
    unit /= p.n_splits;
    if (c.runs) {
        const fa_run & run = *std::prev(std::upper_bound(
            c.runs, c.runs + c.n_runs, unit, [](int64_t wanted, const fa_run & each) { return wanted < each.unit; }));
        unit -= run.unit;
        fa_set_heads(c, u, unit % p.n_heads, unit / p.n_heads * run.kv_heads, run.kv_heads);
        u.i3 = 0;
        u.stream = run.stream;
        u.r0 = run.first;
        u.nr = run.rows;
    } else {
        const int64_t ir = unit % p.n_rows;
        unit /= p.n_rows;
        const int64_t ih = unit % p.n_heads;
        unit /= p.n_heads;
        fa_set_heads(c, u, ih, unit % p.n_kv * p.kv_heads, p.kv_heads);
        u.i3 = u.stream = unit / p.n_kv;
        u.r0 = ir * p.rows;
        u.nr = std::min(p.rows, c.q->ne[1] - u.r0);
    }
    u.c0 = p.n_ranges * split / p.n_splits * FA_RANGE;
    u.ranges = p.n_ranges * (split + 1) / p.n_splits;
    u.c1 = std::min(u.ranges * FA_RANGE, c.k->ne[1]);
}

// Takes the next unit for this thread and finds its first block.
static void fa_take(const fa_context & c, fa_unit & u) {
    u.after = ggml_threadpool_chunk_add(c.threadpool, 1);
    u.keys_after.n = u.asked = u.asking = 0;
    if (u.after < c.plan.n_units) {
        fa_locate(c, u.after, u.place_after);
        fa_next_block(c, u.place_after, u.place_after.c0, u.keys_after);
    }
}

// Returns false, without a result, where several rows are handled together and a sum is not finite.
static bool fa_run_rows(const fa_context & c, fa_unit & u) {
    const int64_t nq = u.nr * u.nh; // of a KV head

    u.many = u.mark || !fa_few(nq, c.k, c.v);
    float slope[FA_MAX_Q] = { 0.0f };
    const float scale = c.scale;
    fa_each_query(c, u, [&](int64_t m, int64_t i1, int64_t i2) {
        const float * q =
            (const float *) ((const char *) c.q->data + i1 * c.q->nb[1] + i2 * c.q->nb[2] + u.i3 * c.q->nb[3]);
        for (int64_t i = 0; i < c.DK; ++i) {
            u.Q[m * c.DK + i] = q[i] * scale;
        }
        slope[m] = fa_slope(c, i2);
    });
    if (u.many) {
        fa_each_group(u, nq, [&](int64_t first, int64_t end, int64_t lanes) {
            memset(u.Q + end * c.DK, 0, (first + lanes - end) * c.DK * sizeof(float));
            const auto turn = u.mark ? fa_tiles<1>::turn_queries : fattn_many::kernel::turn_queries;
            turn(u.Q + first * c.DK, c.DK, lanes, u.turned + first * c.DK_padded);
        });
    }
    fa_begin_range(c, u, u.nk * nq);
    u.range = u.c0 / FA_RANGE;
    u.finite = true;

    u.now = &u.blocks[0];
    u.next = &u.blocks[1];
    int64_t ic = fa_next_block(c, u, u.c0, *u.next);
    u.asked = u.asking; // none of those after it
    if (!u.fetched && u.next->n > 0) {
        fa_ahead(c, u, c.k, u.next->n, 0).ask_for(0, u.nk * u.next->n);
        fa_ahead(c, u, c.v, u.next->n, 0).ask_for(0, u.nk * u.next->n);
    }
    u.fetched = false;
    for (int64_t n_blocks = 0; u.next->n > 0; ++n_blocks) {
        if (n_blocks > 0 && n_blocks % FA_RANGE_BLOCKS == 0) {
            fa_end_range(c, u, u.nk * nq);
            fa_begin_range(c, u, u.nk * nq);
        }
        std::swap(u.now, u.next);
        ic = fa_next_block(c, u, ic, *u.next);
        if (u.next->n < FA_KV_BLOCK && u.after < 0) {
            fa_take(c, u);
        }
        u.asked = u.asking;
        u.asking = std::min(u.asked + FA_KV_BLOCK - u.next->n, u.keys_after.n);
        for (int64_t k = 0; k < u.nk; ++k) {
            if (k > 0) {
                fa_next_head(c, *u.now);
            }
            if (u.mark == 1) {
                fa_many_block<fa_tiles<1>>(c, u, nq, slope);
            } else if (u.mark) {
                fa_many_block<fa_tiles<2>>(c, u, nq, slope);
            } else if (u.many) {
                fa_many_block<fattn_many::kernel>(c, u, nq, slope);
            } else {
                fa_few_block(c, u, nq, k, slope);
            }
        }
    }

    fa_end_range(c, u, u.nk * nq);
    while (c.plan.n_splits > 1 && u.range < u.ranges) { // those without keys
        fa_begin_range(c, u, u.nk * nq);
        fa_end_range(c, u, u.nk * nq);
    }

    if (c.plan.n_splits == 1 && u.nr > 1) {
        u.finite = fa_all_finite(u.total_S, u.nk * nq) && fa_all_finite(u.total, u.nk * nq * c.DV);
    }
    if (!u.finite) {
        return false;
    }
    if (c.plan.n_splits == 1) {
        fa_each_query(c, u, [&](int64_t m, int64_t i1, int64_t i2) {
            fa_store(c, i1, i2, u.i3, u.total_M[m], u.total_S[m], u.total + m * c.DV);
        });
    }
    return true;
}

// Rows that have the same kernel
static void fa_run_neighbours(const fa_context & c, fa_unit & u) {
    if (!fa_look(c, u) && fa_run_rows(c, u)) {
        return;
    }
    u.sights = nullptr;
    // Each row alone, with its own keys: where a sequence overflows, a weight of 0 would not keep it out of other rows.
    const int64_t end = u.r0 + u.nr;
    for (u.nr = 1; u.r0 < end; ++u.r0) {
        fa_run_rows(c, u);
    }
}

static void fa_run_unit(const fa_context & c, fa_unit & u) {
    const int64_t end = u.r0 + u.nr;
    for (int64_t first = u.r0, next; first < end; first = next) {
        next = end;
        if (c.prompts) {
            const int32_t * marks = c.prompts + u.i3 * c.q->ne[1];
            u.mark = marks[first];
            next = std::find_if(marks + first, marks + end, [&](int32_t mark) { return mark != u.mark; }) - marks;
        }
        u.r0 = first;
        u.nr = next - first;
        fa_run_neighbours(c, u);
    }
}

// merge the KV ranges of one query
static void fa_merge(const fa_context & c, int64_t i1, int64_t i2, int64_t i3, float * vkq) {
    float max = -INFINITY;
    float sum = 0.0f;
    memset(vkq, 0, c.DV * sizeof(float));
    for (int64_t i = 0; i < c.plan.n_ranges; ++i) {
        const float * p = fa_partial(c, i1, i2, i3, i);
        fa_add_range(c.DV, max, sum, vkq, p[0], p[1], p + 2);
    }
    fa_store(c, i1, i2, i3, max, sum, vkq);
}

void ggml_compute_forward_fattn_block(const ggml_compute_params * params, ggml_tensor * dst) {
    const int ith = params->ith;
    const int nth = params->nth;

    fa_context c;
    c.q = dst->src[0];
    c.k = dst->src[1];
    c.v = dst->src[2];
    c.mask = dst->src[3];
    c.sinks = dst->src[4];
    c.dst = dst;
    c.prompts = fa_prompts(dst);
    c.plan = fa_make_plan(dst, nth,
                          c.prompts && std::any_of(c.prompts, c.prompts + c.q->ne[1] * c.q->ne[3],
                                                   [](int32_t mark) { return mark != 0; }));
    c.DK = c.k->ne[0];
    c.DV = c.v->ne[0];
    c.DK_padded = GGML_PAD(c.DK, FA_DK_PAD);
    c.DV_padded = GGML_PAD(c.DV, FA_DV_PAD);
    c.group = c.q->ne[2] / c.k->ne[2];
    memcpy(&c.scale, (const float *) dst->op_params + 0, sizeof(float));
    memcpy(&c.max_bias, (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&c.logit_softcap, (const float *) dst->op_params + 2, sizeof(float));
    if (c.logit_softcap != 0.0f) {
        c.scale /= c.logit_softcap;
    }

    float * work = (float *) GGML_PAD((uintptr_t) params->wdata, CACHE_LINE_SIZE); // vectors must not cross lines
    float * scratch = work + ith * fa_scratch_size(dst);
    c.partials = work + nth * fa_scratch_size(dst);
    c.runs = nullptr;
    c.threadpool = params->threadpool;

    const int64_t most = fa_max_queries(dst);
    fa_unit u;
    u.mark = 0;
    u.Q = scratch;
    u.KQ = u.Q + most * c.DK;
    u.VKQ = u.KQ + FA_KV_BLOCK * fattn_many::LANES;
    u.total = u.VKQ + most * c.DV;
    u.turned = u.total + most * c.DV;
    u.columns = u.turned + most * c.DK_padded;
    u.masks = u.columns + most * c.DV_padded;
    u.weights = u.masks + FA_KV_BLOCK * fattn_many::LANES;
    u.K = u.weights + FA_KV_BLOCK * fattn_many::LANES;
    u.V = u.K + FA_KV_BLOCK * c.DK_padded;
    u.looked = (uint8_t *) (u.V + FA_KV_BLOCK * fattn_many::stride(c.DV_padded));

    if (dst->src[5]) { // each thread for itself
        fa_run * runs = (fa_run *) (u.looked + fa_sights(c.k));
        c.n_runs = fa_plan_runs(c.plan, dst, nth, runs);
        c.runs = runs;
    }

    if (c.prompts) {
        fa_tiles<1>::begin();
    }
    if (ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, nth);
    }
    ggml_barrier(params->threadpool);
    u.place_after = {};
    u.keys_after.n = u.asked = u.asking = 0;
    u.fetched = false;
    if (ith < c.plan.n_units) {
        fa_locate(c, ith, u);
    }
    for (int64_t unit = ith; unit < c.plan.n_units; unit = u.after) {
        u.after = -1;
        fa_run_unit(c, u);
        if (u.after < 0) { // no keys
            fa_take(c, u);
        }
        u.fetched = u.asking > 0;
        static_cast<fa_place &>(u) = u.place_after;
    }
    if (c.prompts) {
        fa_tiles<1>::end();
    }

    if (c.plan.n_splits > 1) {
        ggml_barrier(params->threadpool);
        const int64_t nq = ggml_nrows(c.q);
        for (int64_t iq = ith; iq < nq; iq += nth) {
            const int64_t i2 = iq % c.q->ne[2];
            const int64_t i1 = iq / c.q->ne[2] % c.q->ne[1];
            fa_merge(c, i1, i2, iq / (c.q->ne[2] * c.q->ne[1]), u.VKQ);
        }
    }
}

#endif
