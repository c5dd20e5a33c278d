// Checks ggml's CPU flash attention against a float64 computation, over types, shapes, masks and threads, that a row's
// result does not depend on how many are computed with it, and that what one sequence holds does not reach others. Rows
// that are each of any stream have the same bits as alone. Rows of prompts, which have tiles where there are, are marked.
//
//   flash_attention_check             every case; exit status 1 if one is off by more than its bound
//   flash_attention_check time ROWS STREAMS HEADS KV_HEADS HEAD_SIZE N_KV TYPE THREADS [MASK [MARKS]]    microseconds of the
//                                     fastest run, and the products of floats a second that its queries and keys need
//
// Build against the llama.cpp folder L and its build folder B, then run with B/bin in LD_LIBRARY_PATH (the libraries of
// another build can be put there instead):
//   g++ -O2 -std=c++17 -IL/ggml/include flash_attention_check.cpp -LB/bin -lggml-cpu -lggml-base -lggml

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace {

enum class Mask { none, causal, holes, sequences, prefix, nothing };

const char * const mask_names[] = { "none", "causal", "holes", "sequences", "prefix", "nothing" };

// Which rows are of prompts, and with how many terms for each number
enum class Marks { none, all, all_exact, some_exact };

const char * const marks_names[] = { "none", "all", "all exact", "some exact" };

int32_t mark_of(Marks marks, int row) {
    switch (marks) {
        case Marks::none: return 0;
        case Marks::all: return 1;
        case Marks::all_exact: return 2;
        case Marks::some_exact: return row * 7 % 5 < 3 ? 2 : 0;
    }
    return 0;
}

struct Case {
    ggml_type type_k = GGML_TYPE_F16;
    ggml_type type_v = GGML_TYPE_F16;
    int dk = 64;
    int dv = 64;
    int kv_heads = 2;
    int group = 7; // query heads for each KV head
    int rows = 1;  // query rows in each stream
    int streams = 1;
    int n_kv = 256;
    Mask mask = Mask::causal;
    float softcap = 0.0f;
    float max_bias = 0.0f; // ALiBi
    bool sinks = false;
    int threads = 1;
    Marks marks = Marks::none;

    int heads() const { return kv_heads * group; }

    std::string name() const {
        char text[256];
        snprintf(text, sizeof(text),
                 "K %s V %s, head %d/%d, %d x %d heads, %d rows x %d streams, %d keys, mask %s, "
                 "cap %g, ALiBi %g, sinks %d, %d threads, marks %s",
                 ggml_type_name(type_k), ggml_type_name(type_v), dk, dv, kv_heads, group, rows, streams, n_kv,
                 mask_names[int(mask)], softcap, max_bias, int(sinks), threads, marks_names[int(marks)]);
        return text;
    }
};

// True if query `row` may see key `key`. The last row of Mask::nothing sees none.
bool visible(const Case & c, int stream, int row, int key) {
    switch (c.mask) {
        case Mask::none: return true;
        case Mask::causal: return key <= (c.n_kv - c.rows) * (stream + 1) / (c.streams + 1) + row;
        case Mask::holes: return (uint32_t(key * 2654435761u) >> 24) % 5 < 2 || key == row % c.n_kv;
        case Mask::sequences: return key % c.rows == row; // one sequence a row, their cells interleaved
        case Mask::prefix: return key < c.n_kv / 2 || key % c.rows == row; // the same, with a beginning that all share
        case Mask::nothing: return row < c.rows - 1 && key < 70;
    }
    return false;
}

struct ContextFree {
    void operator()(ggml_context * p) const { ggml_free(p); }
};
struct BackendFree {
    void operator()(ggml_backend * p) const { ggml_backend_free(p); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer * p) const { ggml_backend_buffer_free(p); }
};

// One flash attention op on the CPU, its inputs laid out as in llama.cpp's KV cache, with random contents.
class Attention {
  public:
    Attention(const Case & c, uint32_t seed) : c(c), random(seed) {
        context.reset(ggml_init({ ggml_tensor_overhead() * 32 + ggml_graph_overhead(), nullptr, true }));
        backend.reset(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backend.get(), c.threads);
        q = ggml_new_tensor_4d(context.get(), GGML_TYPE_F32, c.dk, c.heads(), c.rows, c.streams);
        k = ggml_new_tensor_4d(context.get(), c.type_k, c.dk, c.kv_heads, c.n_kv, c.streams);
        v = ggml_new_tensor_4d(context.get(), c.type_v, c.dv, c.kv_heads, c.n_kv, c.streams);
        mask = c.mask == Mask::none ? nullptr
                                    : ggml_new_tensor_4d(context.get(), GGML_TYPE_F16, c.n_kv, c.rows, 1, c.streams);
        sinks = c.sinks ? ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, c.heads()) : nullptr;
        out = ggml_flash_attn_ext(context.get(), permuted(q), permuted(k), permuted(v), mask, 1.0f / sqrtf(c.dk),
                                  c.max_bias, c.softcap);
        ggml_flash_attn_ext_add_sinks(out, sinks);
        if (c.marks != Marks::none) {
            out->src[6] = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, c.rows * c.streams);
        }
        graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, out);
        buffer.reset(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
        fill();
    }

    void run() {
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "the graph failed\n");
            exit(1);
        }
    }

    // root of the summed squared differences over that of the expected values
    double error() const {
        std::vector<float> got(ggml_nelements(out));
        ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
        double difference = 0.0;
        double size = 0.0;
        for (int s = 0; s < c.streams; s++) {
            for (int r = 0; r < c.rows; r++) {
                for (int h = 0; h < c.heads(); h++) {
                    const std::vector<double> expected = attend(s, r, h);
                    const float * result = &got[(size_t(s * c.rows + r) * c.heads() + h) * c.dv];
                    for (int i = 0; i < c.dv; i++) {
                        difference += (result[i] - expected[i]) * (result[i] - expected[i]);
                        size += expected[i] * expected[i];
                    }
                }
            }
        }
        return sqrt(difference) / std::max(sqrt(size), 1e-12);
    }

    // K, V, sinks and the first row of Q become those of another with the same shapes but for the number of rows
    void take(const Attention & other) {
        if (sinks) {
            std::vector<char> bytes(ggml_nbytes(sinks));
            ggml_backend_tensor_get(other.sinks, bytes.data(), 0, bytes.size());
            ggml_backend_tensor_set(sinks, bytes.data(), 0, bytes.size());
        }
        for (const auto & [mine, its] : { std::pair(q, other.q), std::pair(k, other.k), std::pair(v, other.v) }) {
            std::vector<char> bytes(mine == q ? size_t(c.dk) * c.heads() * sizeof(float) : ggml_nbytes(mine));
            ggml_backend_tensor_get(its, bytes.data(), 0, bytes.size());
            ggml_backend_tensor_set(mine, bytes.data(), 0, bytes.size());
        }
    }

    // K or V of all keys that the first row does not see becomes infinite, as where a model overflows
    void overflow_others(bool keys) {
        std::vector<float> values = keys ? ks : vs;
        for (size_t i = 0; i < values.size(); i++) {
            if (!visible(c, 0, 0, int(i / (size_t(keys ? c.dk : c.dv) * c.kv_heads)))) {
                values[i] = INFINITY;
            }
        }
        set(keys ? k : v, values);
    }

    std::vector<float> first_row() const {
        std::vector<float> row(size_t(c.dv) * c.heads());
        ggml_backend_tensor_get(out, row.data(), 0, row.size() * sizeof(float));
        return row;
    }

  private:
    ggml_tensor * permuted(ggml_tensor * t) { return ggml_permute(context.get(), t, 0, 2, 1, 3); }

    std::vector<char> set(ggml_tensor * t, const std::vector<float> & values) {
        std::vector<char> bytes(ggml_nbytes(t));
        ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
        ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
        return bytes;
    }

    // random contents; returns them as the type has rounded them
    std::vector<float> fill(ggml_tensor * t, float size) {
        std::normal_distribution<float> normal(0.0f, size);
        std::vector<float> values(ggml_nelements(t));
        for (float & value : values) {
            value = normal(random);
        }
        const std::vector<char> bytes = set(t, values);
        if (t->type == GGML_TYPE_F32) {
            return values;
        }
        ggml_get_type_traits(t->type)->to_float(bytes.data(), values.data(), values.size());
        return values;
    }

    void fill() {
        qs = fill(q, 1.5f);
        ks = fill(k, 1.0f);
        vs = fill(v, 1.0f);
        if (sinks) {
            sink_values = fill(sinks, 3.0f);
        }
        if (out->src[6]) {
            std::vector<int32_t> values(c.rows * c.streams);
            for (size_t i = 0; i < values.size(); i++) {
                values[i] = mark_of(c.marks, int(i));
            }
            ggml_backend_tensor_set(out->src[6], values.data(), 0, ggml_nbytes(out->src[6]));
        }
        if (mask) {
            std::vector<ggml_fp16_t> values(ggml_nelements(mask));
            for (int s = 0; s < c.streams; s++) {
                for (int r = 0; r < c.rows; r++) {
                    for (int key = 0; key < c.n_kv; key++) {
                        values[size_t(s * c.rows + r) * c.n_kv + key] = ggml_fp32_to_fp16(mask_value(s, r, key));
                    }
                }
            }
            ggml_backend_tensor_set(mask, values.data(), 0, ggml_nbytes(mask));
        }
    }

    float mask_value(int s, int r, int key) const {
        if (!visible(c, s, r, key)) {
            return -INFINITY;
        }
        return c.max_bias > 0.0f ? -float((key * 7 + r) % 64) : 0.0f;
    }

    double slope(int h) const {
        if (c.max_bias <= 0.0f) {
            return 1.0;
        }
        const int n = 1 << int(floor(log2(c.heads())));
        return h < n ? pow(2.0, -c.max_bias / n * (h + 1)) : pow(2.0, -c.max_bias / 2.0 / n * (2 * (h - n) + 1));
    }

    std::vector<double> attend(int s, int r, int h) const {
        const int kv_head = h / c.group;
        const float * query = &qs[(size_t(s * c.rows + r) * c.heads() + h) * c.dk];
        std::vector<double> scores(c.n_kv);
        double top = c.sinks ? sink_values[h] : -std::numeric_limits<double>::infinity();
        for (int key = 0; key < c.n_kv; key++) {
            const float * row = &ks[(size_t(s * c.n_kv + key) * c.kv_heads + kv_head) * c.dk];
            double score = 0.0;
            for (int i = 0; i < c.dk; i++) {
                score += double(query[i]) * row[i];
            }
            score /= sqrt(double(c.dk));
            if (c.softcap > 0.0f) {
                score = c.softcap * tanh(score / c.softcap);
            }
            scores[key] = score + (mask ? slope(h) * mask_value(s, r, key) : 0.0);
            top = std::max(top, scores[key]);
        }
        std::vector<double> result(c.dv, 0.0);
        if (std::isinf(top)) {
            return result;
        }
        double sum = c.sinks ? exp(sink_values[h] - top) : 0.0;
        for (int key = 0; key < c.n_kv; key++) {
            const double weight = exp(scores[key] - top);
            const float * row = &vs[(size_t(s * c.n_kv + key) * c.kv_heads + kv_head) * c.dv];
            for (int i = 0; i < c.dv; i++) {
                result[i] += weight * row[i];
            }
            sum += weight;
        }
        for (double & value : result) {
            value /= sum;
        }
        return result;
    }

    const Case c;
    std::mt19937 random;
    std::unique_ptr<ggml_context, ContextFree> context;
    std::unique_ptr<ggml_backend, BackendFree> backend;
    std::unique_ptr<ggml_backend_buffer, BufferFree> buffer;
    ggml_tensor * q;
    ggml_tensor * k;
    ggml_tensor * v;
    ggml_tensor * mask;
    ggml_tensor * sinks;
    ggml_tensor * out;
    ggml_cgraph * graph;
    std::vector<float> qs, ks, vs, sink_values;
};

std::vector<Case> all_cases() {
    std::vector<Case> cases;
    const auto add = [&](auto change) {
        for (const auto & [threads, marks] :
             { std::pair(1, Marks::none), std::pair(2, Marks::none), std::pair(4, Marks::none),
               std::pair(1, Marks::all), std::pair(2, Marks::some_exact) }) {
            Case c;
            c.threads = threads;
            c.marks = marks;
            change(c);
            cases.push_back(c);
        }
    };
    const ggml_type types[] = { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0 };
    for (ggml_type k : types) {
        for (ggml_type v : types) {
            add([&](Case & c) {
                c.type_k = k;
                c.type_v = v;
                c.streams = 3;
                c.n_kv = 300;
            });
        }
    }
    for (ggml_type type : { GGML_TYPE_F16, GGML_TYPE_Q8_0 }) {
        for (int group = 1; group <= 8; group++) {
            add([&](Case & c) {
                c.type_k = c.type_v = type;
                c.group = group;
                c.streams = 2;
            });
        }
        for (int size : { 32, 64, 80, 96, 128, 256, 576 }) {
            if (size % ggml_blck_size(type) == 0) {
                add([&](Case & c) {
                    c.type_k = c.type_v = type;
                    c.dk = c.dv = size;
                    c.n_kv = 200;
                });
            }
        }
        add([&](Case & c) {
            c.type_k = c.type_v = type;
            c.dk = 192;
            c.dv = 128;
            c.rows = 3;
        });
        add([&](Case & c) {
            c.type_k = c.type_v = type;
            c.dk = 576;
            c.dv = 512;
            c.kv_heads = 1;
            c.group = 80;
            c.rows = 2;
        });
    }
    for (int size : { 40, 72, 112, 36 }) {
        add([&](Case & c) {
            c.type_k = c.type_v = GGML_TYPE_F32;
            c.dk = c.dv = size;
            c.rows = 2;
        });
    }
    for (Mask mask : { Mask::none, Mask::causal, Mask::holes, Mask::sequences, Mask::prefix, Mask::nothing }) {
        for (int rows : { 1, 2, 5, 16, 33, 64, 200 }) {
            add([&](Case & c) {
                c.mask = mask;
                c.rows = rows;
                c.n_kv = 511;
                c.group = 3;
                c.dk = c.dv = 32;
            });
        }
        for (int streams : { 1, 2, 8 }) {
            add([&](Case & c) {
                c.mask = mask;
                c.streams = streams;
                c.n_kv = 1100;
            });
            add([&](Case & c) {
                c.mask = mask;
                c.streams = streams;
                c.n_kv = 1100;
                c.rows = 4;
                c.sinks = true;
            });
        }
    }
    for (int n_kv : { 1, 2, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257, 511, 513, 1023, 4097 }) {
        add([&](Case & c) {
            c.n_kv = n_kv;
            c.mask = Mask::none;
        });
        add([&](Case & c) {
            c.n_kv = n_kv;
            c.streams = 2;
        });
    }
    for (int heads : { 1, 3, 4, 6 }) {
        for (int rows : { 1, 7 }) {
            add([&](Case & c) {
                c.group = heads;
                c.rows = rows;
                c.max_bias = 8.0f;
            });
            add([&](Case & c) {
                c.group = heads;
                c.rows = rows;
                c.softcap = 20.0f;
            });
            add([&](Case & c) {
                c.group = heads;
                c.rows = rows;
                c.sinks = true;
                c.n_kv = 1500;
            });
            add([&](Case & c) {
                c.group = heads;
                c.rows = rows;
                c.sinks = true;
                c.softcap = 5.0f;
                c.max_bias = 4.0f;
                c.mask = Mask::holes;
            });
        }
    }
    return cases;
}

// The block kernel works in F32 throughout, tiles with 16 bits of each number, or 8 of weights and values; that for one query rounds queries to the type of K and sums an F16 V
// in F16.
double bound(const Case & c) {
    const auto exact = [](ggml_type type) {
        return type == GGML_TYPE_F32 || type == GGML_TYPE_F16 || type == GGML_TYPE_BF16 || type == GGML_TYPE_Q8_0;
    };
    const bool block_kernel =
        exact(c.type_k) && exact(c.type_v) && (c.group * c.rows >= 5 || c.marks != Marks::none) && c.dk % 8 == 0;
    return !block_kernel ? 2e-2 : c.marks == Marks::none ? 1e-5 : c.marks == Marks::all ? 4e-3 : 5e-5;
}

// True if a row's result has the same bits alone and among 40 rows, which takes another kernel, on one thread, which does
// not split the keys.
bool same_bits(const Case & alone) {
    Case among = alone;
    among.rows = 40;
    if (alone.marks == Marks::all_exact) {
        among.marks = Marks::some_exact; // the first is marked
    }
    Attention many(among, 1);
    Attention one(alone, 1);
    one.take(many);
    many.run();
    one.run();
    return one.first_row() == many.first_row();
}

// True if the first of several sequences with interleaved cells is finite where K or V of the others is not.
bool kept_apart(const Case & c, bool keys) {
    Attention attention(c, 1);
    attention.overflow_others(keys);
    attention.run();
    const std::vector<float> row = attention.first_row();
    return std::all_of(row.begin(), row.end(), [](float x) { return std::isfinite(x); });
}

// True if rows of any streams in one op, in runs of any length, have the bits that each has in an op of its own.
bool same_bits_ragged(const Case & c, uint32_t seed) {
    std::mt19937 random(seed);
    const auto below = [&](int n) { return int(random() % n); };
    std::vector<int64_t> cells; // of each row, among those of all streams: the row sees those up to it in its stream
    for (int run = 0; run < 6; run++) {
        const int stream = below(c.streams);
        const int rows = std::min(below(3) ? 1 + below(3) : 1 + below(40), c.n_kv);
        const int first = below(c.n_kv - rows + 1);
        for (int row = 0; row < rows; row++) {
            cells.push_back(int64_t(stream) * c.n_kv + first + row);
        }
    }
    const int rows = int(cells.size());

    std::unique_ptr<ggml_context, ContextFree> context(
        ggml_init({ ggml_tensor_overhead() * (16 + 9 * rows) + ggml_graph_overhead() * 2, nullptr, true }));
    std::unique_ptr<ggml_backend, BackendFree> backend(ggml_backend_cpu_init());
    ggml_context * ctx = context.get();
    ggml_tensor * q = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.dk, c.heads(), rows);
    ggml_tensor * k = ggml_new_tensor_4d(ctx, c.type_k, c.dk, c.kv_heads, c.n_kv, c.streams);
    ggml_tensor * v = ggml_new_tensor_4d(ctx, c.type_v, c.dv, c.kv_heads, c.n_kv, c.streams);
    ggml_tensor * mask = ggml_new_tensor_2d(ctx, GGML_TYPE_F16, c.n_kv, rows);
    ggml_tensor * idxs = ggml_new_tensor_1d(ctx, GGML_TYPE_I64, rows);
    ggml_tensor * marks = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, rows);

    // the rows from `first` on, all in one stream's keys, which begin `stream` streams behind the first
    const auto attend = [&](int first, int count, int stream) {
        const auto keys = [&](ggml_tensor * t) {
            return ggml_permute(
                ctx,
                ggml_view_4d(ctx, t, t->ne[0], t->ne[1], t->ne[2], 1, t->nb[1], t->nb[2], t->nb[3], stream * t->nb[3]),
                0, 2, 1, 3);
        };
        ggml_tensor * rows_of_q = ggml_view_3d(ctx, q, c.dk, c.heads(), count, q->nb[1], q->nb[2], first * q->nb[2]);
        ggml_tensor * rows_of_mask = ggml_view_2d(ctx, mask, c.n_kv, count, mask->nb[1], first * mask->nb[1]);
        ggml_tensor * out = ggml_flash_attn_ext(ctx, ggml_permute(ctx, rows_of_q, 0, 2, 1, 3), keys(k), keys(v),
                                                rows_of_mask, 1.0f / sqrtf(c.dk), 0.0f, 0.0f);
        if (c.marks != Marks::none) {
            out->src[6] = ggml_view_1d(ctx, marks, count, first * marks->nb[0]);
        }
        return out;
    };
    ggml_cgraph * together = ggml_new_graph(ctx);
    ggml_tensor * ragged = attend(0, rows, 0);
    ragged->src[5] = idxs;
    if (!ggml_backend_supports_op(backend.get(), ragged)) {
        printf("%s: rows of any streams are refused\n", c.name().c_str());
        return false;
    }
    ggml_build_forward_expand(together, ragged);
    ggml_cgraph * apart = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> alone;
    for (int row = 0; row < rows; row++) {
        alone.push_back(attend(row, 1, int(cells[row] / c.n_kv)));
        ggml_build_forward_expand(apart, alone.back());
    }
    std::unique_ptr<ggml_backend_buffer, BufferFree> buffer(ggml_backend_alloc_ctx_tensors(ctx, backend.get()));

    std::normal_distribution<float> normal(0.0f, 1.0f);
    for (ggml_tensor * t : { q, k, v }) {
        std::vector<float> values(ggml_nelements(t));
        std::generate(values.begin(), values.end(), [&] { return normal(random); });
        std::vector<char> bytes(ggml_nbytes(t));
        ggml_quantize_chunk(t->type, values.data(), bytes.data(), 0, ggml_nrows(t), t->ne[0], nullptr);
        ggml_backend_tensor_set(t, bytes.data(), 0, bytes.size());
    }
    std::vector<ggml_fp16_t> seen(ggml_nelements(mask));
    for (size_t i = 0; i < seen.size(); i++) {
        seen[i] = ggml_fp32_to_fp16(int64_t(i % c.n_kv) <= cells[i / c.n_kv] % c.n_kv ? 0.0f : -INFINITY);
    }
    ggml_backend_tensor_set(mask, seen.data(), 0, ggml_nbytes(mask));
    ggml_backend_tensor_set(idxs, cells.data(), 0, ggml_nbytes(idxs));
    for (int32_t row = 0; row < rows; row++) {
        const int32_t mark = mark_of(c.marks, row / 3);
        ggml_backend_tensor_set(marks, &mark, row * sizeof(mark), sizeof(mark));
    }

    ggml_backend_cpu_set_n_threads(backend.get(), c.threads);
    const bool ran = ggml_backend_graph_compute(backend.get(), together) == GGML_STATUS_SUCCESS;
    ggml_backend_cpu_set_n_threads(backend.get(), 1);
    if (!ran || ggml_backend_graph_compute(backend.get(), apart) != GGML_STATUS_SUCCESS) {
        return false;
    }
    std::vector<char> got(ggml_nbytes(ragged));
    ggml_backend_tensor_get(ragged, got.data(), 0, got.size());
    const size_t size = got.size() / rows;
    for (int row = 0; row < rows; row++) {
        std::vector<char> expected(size);
        ggml_backend_tensor_get(alone[row], expected.data(), 0, size);
        if (memcmp(expected.data(), &got[row * size], size) != 0) {
            printf("%s: row %d of %d has other bits beside rows of other streams\n", c.name().c_str(), row, rows);
            return false;
        }
    }
    return true;
}

// one of every so many cases
int check(int every) {
    const bool verbose = getenv("VERBOSE") != nullptr;
    int failed = 0;
    int n = 0;
    int seen = 0;
    const auto left_out = [&] { return seen++ % every != 0; };
    double worst[GGML_TYPE_COUNT] = { 0.0 };
    double worst_marked = 0.0;
    for (const Case & c : all_cases()) {
        if (left_out()) {
            continue;
        }
        Attention attention(c, 1 + n);
        for (int run = 0; run < 2; run++) { // the second finds a used work buffer
            attention.run();
        }
        const double error = attention.error();
        if (verbose || !(error < bound(c))) {
            printf("%s: relative error %.2e\n", c.name().c_str(), error);
        }
        failed += !(error < bound(c));
        double & to = c.marks == Marks::none ? worst[c.type_k] : worst_marked;
        if (c.marks == Marks::none || bound(c) < 1e-2) {
            to = std::max(to, error);
        }
        n++;
    }
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0 }) {
        for (const auto & [size, group, n_kv, softcap] :
             { std::tuple(64, 7, 200, 0.0f), std::tuple(128, 4, 200, 0.0f), std::tuple(96, 8, 200, 0.0f),
               std::tuple(64, 1, 1300, 0.0f), std::tuple(32, 5, 77, 0.0f), std::tuple(256, 3, 1025, 0.0f),
               std::tuple(64, 6, 600, 20.0f) }) {
            if (left_out()) {
                continue;
            }
            Case c;
            c.type_k = c.type_v = type;
            c.dk = c.dv = size;
            c.group = group;
            c.n_kv = n_kv;
            c.softcap = softcap;
            c.mask = Mask::none;
            c.sinks = group == 5;
            for (Marks marks : { Marks::none, Marks::all, Marks::all_exact }) {
                c.marks = marks;
                const bool same = same_bits(c);
                if (!same) {
                    printf("%s: other bits among other rows\n", c.name().c_str());
                }
                failed += !same;
                n++;
            }
        }
    }
    for (const ggml_type type : { GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0 }) {
        for (const auto & [size, kv_heads, group] :
             { std::tuple(64, 2, 7), std::tuple(128, 4, 4), std::tuple(64, 8, 1), std::tuple(32, 2, 80) }) {
            for (int n_kv : { 256, 512, 768, 1280 }) {
                for (int threads : { 1, 2, 4 }) {
                    if (left_out()) {
                        continue;
                    }
                    Case c;
                    c.type_k = c.type_v = type;
                    c.dk = c.dv = size;
                    c.kv_heads = kv_heads;
                    c.group = group;
                    c.n_kv = n_kv;
                    c.streams = 5;
                    c.threads = threads;
                    for (Marks marks : { Marks::none, Marks::some_exact }) {
                        c.marks = marks;
                        failed += !same_bits_ragged(c, n);
                        n++;
                    }
                }
            }
        }
    }
    for (const ggml_type type : { GGML_TYPE_F32, GGML_TYPE_F16 }) {
        for (int rows : { 2, 3, 16 }) {
            for (Mask mask : { Mask::sequences, Mask::prefix }) {
                for (bool keys : { true, false }) {
                    if (left_out()) {
                        continue;
                    }
                    Case c;
                    c.type_k = c.type_v = type;
                    c.rows = rows;
                    c.mask = mask;
                    for (Marks marks : { Marks::none, Marks::all }) {
                        c.marks = marks;
                        const bool apart = kept_apart(c, keys);
                        if (!apart) {
                            printf("%s: not a number because of another sequence\n", c.name().c_str());
                        }
                        failed += !apart;
                        n++;
                    }
                }
            }
        }
    }
    printf("marked rows: relative error at most %.2e\n", worst_marked);
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        if (worst[type] > 0.0) {
            printf("K in %s: relative error at most %.2e\n", ggml_type_name(ggml_type(type)), worst[type]);
        }
    }
    printf("%d of %d cases failed\n", failed, n);
    return failed > 0;
}

int time_one(char ** argv) {
    Case c;
    c.rows = atoi(argv[0]);
    c.streams = atoi(argv[1]);
    c.kv_heads = atoi(argv[3]);
    c.group = atoi(argv[2]) / c.kv_heads;
    c.dk = c.dv = atoi(argv[4]);
    c.n_kv = atoi(argv[5]);
    for (int type = 0; type < GGML_TYPE_COUNT; type++) {
        const char * name = ggml_type_name(ggml_type(type));
        if (name && !strcmp(name, argv[6])) {
            c.type_k = c.type_v = ggml_type(type);
        }
    }
    c.threads = atoi(argv[7]);
    if (argv[8]) {
        for (int i = 0; i < 6; i++) {
            if (!strcmp(argv[8], mask_names[i])) {
                c.mask = Mask(i);
            }
        }
        for (int i = 0; argv[9] && i < 4; i++) {
            if (!strcmp(argv[9], marks_names[i])) {
                c.marks = Marks(i);
            }
        }
    }
    double pairs = 0.0; // of a query and a key that it sees
    for (int stream = 0; stream < c.streams; stream++) {
        for (int row = 0; row < c.rows; row++) {
            for (int key = 0; key < c.n_kv; key++) {
                pairs += visible(c, stream, row, key) ? c.heads() : 0;
            }
        }
    }
    Attention attention(c, 1);
    double best = 1e9;
    double total = 0.0;
    for (int i = 0; i < 5 || total < 0.3; i++) {
        const auto start = std::chrono::steady_clock::now();
        attention.run();
        const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
        best = std::min(best, seconds);
        total += seconds;
    }
    printf("%.1f us, %.1f G/s\n", best * 1e6, pairs * (c.dk + c.dv) / best / 1e9);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc >= 10 && !strcmp(argv[1], "time")) {
        return time_one(argv + 2);
    }
    return check(argc == 3 && !strcmp(argv[1], "every") ? std::max(1, atoi(argv[2])) : 1);
}
