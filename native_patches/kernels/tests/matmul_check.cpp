// Checks ggml's CPU matrix products against a float64 computation: every buffer type that repacks weights, types, 1 to
// 64 rows, odd sizes, threads. llama.cpp's own test-backend-ops sees the default buffer only.
//
//   matmul_check                          every case; exit status 1 if one is off by more than its bound
//   matmul_check time TYPE K N THREADS    microseconds a product, rows 1 to 32, and of prompts up to 1,024, each buffer
//                                         type; with EXPERTS behind it
//                                         two rows of three have one of so many experts, the others take turns; with
//                                         0 (no experts) MANY, so many weights take turns: more than the caches hold
//
// Built as flash_attention_check.cpp is.

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
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

namespace {

struct ContextFree {
    void operator()(ggml_context * p) const { ggml_free(p); }
};
struct BackendFree {
    void operator()(ggml_backend * p) const { ggml_backend_free(p); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer * p) const { ggml_backend_buffer_free(p); }
};

ggml_backend_dev_t cpu() { return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU); }

// The buffer types whose weights are laid out anew: AMX, repack. Null, the end, is left out.
std::vector<ggml_backend_buffer_type_t> extra_buffer_types() {
    auto * get = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_dev_get_extra_bufts"));
    std::vector<ggml_backend_buffer_type_t> types;
    for (auto * type = get ? get(cpu()) : nullptr; type && *type; type++) {
        types.push_back(*type);
    }
    return types;
}

// The quants of every block alternately all their lowest and all their highest, or what a file may have though ggml's
// quantisation never gives it, for the types whose sums are close to the limits of 16 bits.
void make_extreme(ggml_type type, std::vector<char> & bytes) {
    const size_t size = ggml_type_size(type);
    for (size_t b = 0; b < bytes.size() / size; b++) {
        const bool low = b % 2;
        char * block = bytes.data() + b * size;
        if (type == GGML_TYPE_Q8_0) { // d, 32 quants
            memset(block + 2, low ? -128 : 127, 32);
        } else if (type == GGML_TYPE_Q4_0) { // d, 32 quants of four bits
            memset(block + 2, low ? 0 : -1, 16);
        } else if (type == GGML_TYPE_Q4_K) { // d, minimum, 12 bytes of scales, 256 quants of four bits
            memset(block + 16, low ? 0 : -1, 128);
        } else if (type == GGML_TYPE_Q6_K) { // 256 quants of four bits, two more bits of each, scales, d
            memset(block, low ? 0 : -1, 128 + 64);
        } else if (type == GGML_TYPE_Q5_0 || type == GGML_TYPE_Q5_1) { // d, minimum, 32 bits, 32 quants of four bits
            memset(block + (type == GGML_TYPE_Q5_0 ? 2 : 4), low ? 0 : -1, 4 + 16);
        } else if (type == GGML_TYPE_Q5_K) { // as Q4_K, with 256 bits before the quants
            memset(block + 16, low ? 0 : -1, 32 + 128);
        } else if (type == GGML_TYPE_IQ4_NL) { // d, 32 places in a table
            memset(block + 2, low ? 0 : -1, 16);
        }
    }
}

struct Contents {
    std::vector<char> bytes;
    std::vector<float> rounded; // as the type has rounded them
};

// Random contents for weights, the same for each type and shape: to quantise takes longer than to multiply.
const Contents & contents(const ggml_tensor * weights, bool extreme) {
    static std::map<std::tuple<ggml_type, int64_t, int64_t, int64_t, bool>, Contents> made;
    const auto [at, is_new] =
        made.try_emplace({ weights->type, weights->ne[0], weights->ne[1], weights->ne[2], extreme });
    Contents & found = at->second;
    if (is_new) {
        std::mt19937 random(made.size());
        std::normal_distribution<float> normal(0.0f, 1.0f);
        std::vector<float> values(size_t(ggml_nelements(weights)));
        for (float & value : values) {
            value = normal(random);
        }
        found.bytes.resize(ggml_nbytes(weights));
        ggml_quantize_chunk(weights->type, values.data(), found.bytes.data(), 0, ggml_nrows(weights), weights->ne[0],
                            nullptr);
        if (extreme) {
            make_extreme(weights->type, found.bytes);
        }
        found.rounded = values;
        if (weights->type != GGML_TYPE_F32) {
            ggml_get_type_traits(weights->type)->to_float(found.bytes.data(), found.rounded.data(), values.size());
        }
    }
    return found;
}

// Which rows are marked as those of prompts
enum class Prompts { none, all, but_every_third, every_third };

// weights (k x n, a type) times rows of inputs (k x rows, f32, `gap` apart). With experts there are several such weights,
// and each row has one of them.
class Product {
  public:
    Product(ggml_type type, int k, int n, int rows, int threads, ggml_backend_buffer_type_t buffer_type, int gap = 0,
            int experts = 0, Prompts prompts = Prompts::none)
        : k(k), n(n), rows(rows), experts(experts), prompts(prompts) {
        weights_context.reset(ggml_init({ ggml_tensor_overhead(), nullptr, true }));
        context.reset(ggml_init({ ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true }));
        backend.reset(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backend.get(), threads);
        inputs = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k + gap, rows);
        if (experts) {
            weights = ggml_new_tensor_3d(weights_context.get(), type, k, n, experts);
            chosen = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 1, rows);
            out = ggml_mul_mat_id(context.get(), weights,
                                  ggml_view_3d(context.get(), inputs, k, 1, rows, inputs->nb[1], inputs->nb[1], 0),
                                  chosen);
        } else {
            weights = ggml_new_tensor_2d(weights_context.get(), type, k, n);
            out = ggml_mul_mat(context.get(), weights, ggml_view_2d(context.get(), inputs, k, rows, inputs->nb[1], 0));
        }
        if (prompts != Prompts::none) {
            marks = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, rows);
            out->src[experts ? 3 : 2] = marks;
        }
        graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, out);
        weights_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_context.get(), buffer_type));
        ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        buffer.reset(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
    }

    // True if the buffer type takes this type and size.
    bool supported() const { return ggml_backend_dev_supports_op(cpu(), out); }

    // extreme: quants as large as they can be, inputs too, all of one sign in a row, so that every sum is large
    void fill(uint32_t seed, bool extreme = false) {
        filled = &contents(weights, extreme);
        ggml_backend_tensor_set(weights, filled->bytes.data(), 0, filled->bytes.size());
        std::mt19937 random(seed);
        std::normal_distribution<float> normal(0.0f, 1.0f);
        given.resize(size_t(k) * rows);
        for (size_t i = 0; i < given.size(); i++) {
            given[i] = extreme ? (i / k % 3 ? 1.0f : -1.0f) : normal(random);
        }
        for (int32_t r = 0; marks && r < rows; r++) {
            const int32_t mark = prompts == Prompts::all || (r % 3 == 1) == (prompts == Prompts::every_third);
            ggml_backend_tensor_set(marks, &mark, r * sizeof(mark), sizeof(mark));
        }
        for (int r = 0; r < rows; r++) {
            ggml_backend_tensor_set(inputs, given.data() + size_t(r) * k, r * inputs->nb[1], k * sizeof(float));
            if (experts) {
                const int32_t expert = expert_of(r);
                ggml_backend_tensor_set(chosen, &expert, r * sizeof(expert), sizeof(expert));
            }
        }
    }

    void run() {
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "the graph failed\n");
            exit(1);
        }
    }

    std::vector<float> first_row() const {
        std::vector<float> got(n);
        ggml_backend_tensor_get(out, got.data(), 0, got.size() * sizeof(float));
        return got;
    }

    // the largest error of a row: root of the summed squared differences over that of the expected values
    double error() const {
        std::vector<float> got(size_t(n) * rows);
        ggml_backend_tensor_get(out, got.data(), 0, got.size() * sizeof(float));
        double worst = 0.0;
        for (int r = 0; r < rows; r++) {
            double difference = 0.0;
            double size = 0.0;
            for (int i = 0; i < n; i++) {
                double expected = 0.0;
                const float * row = filled->rounded.data() + (size_t(expert_of(r)) * n + i) * k;
                for (int j = 0; j < k; j++) {
                    expected += double(row[j]) * given[size_t(r) * k + j];
                }
                const double off = got[size_t(r) * n + i] - expected;
                difference += off * off;
                size += expected * expected;
            }
            worst = std::max(worst, std::isfinite(difference) ? sqrt(difference / size) : INFINITY);
        }
        return worst;
    }

  private:
    // the first has most
    int expert_of(int row) const { return experts && row % 3 == 0 ? row / 3 % experts : 0; }

    int k;
    int n;
    int rows;
    int experts;
    Prompts prompts;
    std::unique_ptr<ggml_context, ContextFree> weights_context;
    std::unique_ptr<ggml_context, ContextFree> context;
    std::unique_ptr<ggml_backend, BackendFree> backend;
    std::unique_ptr<ggml_backend_buffer, BufferFree> weights_buffer;
    std::unique_ptr<ggml_backend_buffer, BufferFree> buffer;
    ggml_tensor * weights;
    ggml_tensor * inputs;
    ggml_tensor * chosen = nullptr; // the expert of each row
    ggml_tensor * marks = nullptr;
    ggml_tensor * out;
    ggml_cgraph * graph;
    std::vector<float> given;
    const Contents * filled = nullptr; // what the weights are
};

bool has_prompts() {
    auto * get = reinterpret_cast<bool (*)()>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(cpu()), "ggml_backend_cpu_has_prompts"));
    return get && get();
}

// Two products with the same inputs (k x rows), the SwiGLU of both (hidden x rows), and its product with `type_down`.
class FeedForward {
  public:
    FeedForward(ggml_type type, ggml_type type_down, int k, int hidden, int n, int rows,
                ggml_backend_buffer_type_t buffer_type, Prompts prompts) {
        weights_context.reset(ggml_init({ 3 * ggml_tensor_overhead(), nullptr, true }));
        context.reset(ggml_init({ ggml_tensor_overhead() * 8 + ggml_graph_overhead(), nullptr, true }));
        backend.reset(ggml_backend_cpu_init());
        ggml_backend_cpu_set_n_threads(backend.get(), 2);
        ggml_tensor * inputs = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, k, rows);
        ggml_tensor * marks = ggml_new_tensor_1d(context.get(), GGML_TYPE_I32, rows);
        const auto product = [&](ggml_type of, int from, int to, ggml_tensor * in) {
            weights.push_back(ggml_new_tensor_2d(weights_context.get(), of, from, to));
            ggml_tensor * made = ggml_mul_mat(context.get(), weights.back(), in);
            made->src[2] = marks;
            return made;
        };
        gate = product(type, k, hidden, inputs);
        ggml_tensor * up = product(type, k, hidden, inputs);
        between = { gate, up, ggml_swiglu_split(context.get(), gate, up) };
        out = product(type_down, hidden, n, between.back());
        graph = ggml_new_graph(context.get());
        ggml_build_forward_expand(graph, gate);
        ggml_build_forward_expand(graph, out);
        weights_buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(weights_context.get(), buffer_type));
        ggml_backend_buffer_set_usage(weights_buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        buffer.reset(ggml_backend_alloc_ctx_tensors(context.get(), backend.get()));
        if (!supported()) {
            return;
        }
        for (ggml_tensor * each : weights) {
            const Contents & filled = contents(each, false);
            ggml_backend_tensor_set(each, filled.bytes.data(), 0, filled.bytes.size());
        }
        std::mt19937 random(rows);
        std::normal_distribution<float> normal(0.0f, 0.1f);
        for (int i = 0; i < k * rows; i++) {
            const float value = normal(random);
            ggml_backend_tensor_set(inputs, &value, i * sizeof(value), sizeof(value));
        }
        for (int32_t r = 0; r < rows; r++) {
            const int32_t mark = prompts == Prompts::all || r % 3 != 1;
            ggml_backend_tensor_set(marks, &mark, r * sizeof(mark), sizeof(mark));
        }
    }

    // True if the buffer type takes these types and sizes.
    bool supported() const {
        return ggml_backend_dev_supports_op(cpu(), gate) && ggml_backend_dev_supports_op(cpu(), out);
    }

    // apart: each operation has results of its own
    std::vector<float> run(bool apart) {
        for (ggml_tensor * each : between) {
            each->flags = apart ? each->flags | GGML_TENSOR_FLAG_OUTPUT : each->flags & ~GGML_TENSOR_FLAG_OUTPUT;
            ggml_backend_tensor_memset(each, 0, 0, ggml_nbytes(each));
        }
        if (ggml_backend_graph_compute(backend.get(), graph) != GGML_STATUS_SUCCESS) {
            fprintf(stderr, "the graph failed\n");
            exit(1);
        }
        std::vector<float> got(ggml_nelements(out));
        ggml_backend_tensor_get(out, got.data(), 0, ggml_nbytes(out));
        return got;
    }

    // True if the last run had no results of single products
    bool at_once() const {
        float first = 0.0f;
        ggml_backend_tensor_get(gate, &first, 0, sizeof(first));
        return first == 0.0f;
    }

  private:
    std::unique_ptr<ggml_context, ContextFree> weights_context;
    std::unique_ptr<ggml_context, ContextFree> context;
    std::unique_ptr<ggml_backend, BackendFree> backend;
    std::unique_ptr<ggml_backend_buffer, BufferFree> weights_buffer;
    std::unique_ptr<ggml_backend_buffer, BufferFree> buffer;
    std::vector<ggml_tensor *> weights;
    std::vector<ggml_tensor *> between;
    ggml_tensor * gate;
    ggml_tensor * out;
    ggml_cgraph * graph;
};

const ggml_type types[] = { GGML_TYPE_Q4_0,   GGML_TYPE_Q4_1,   GGML_TYPE_Q5_0,  GGML_TYPE_Q5_1, GGML_TYPE_Q8_0,
                            GGML_TYPE_Q2_K,   GGML_TYPE_Q3_K,   GGML_TYPE_Q4_K,  GGML_TYPE_Q5_K, GGML_TYPE_Q6_K,
                            GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_MXFP4, GGML_TYPE_F16,  GGML_TYPE_BF16 };

// True for the kernels of 0006 and 0012, in which a row's result has the same bits for any number of rows.
bool takes_any_rows(ggml_type type, int n, ggml_backend_buffer_type_t buffer_type) {
#if defined(__x86_64__)
    const bool wide = n % (ggml_cpu_has_avx512() ? 16 : 8) == 0;
    const bool by_eight = type == GGML_TYPE_Q4_0 || type == GGML_TYPE_Q8_0 ||
                          (ggml_cpu_has_avx512() && (type == GGML_TYPE_Q4_K || type == GGML_TYPE_Q6_K));
    return (wide || by_eight) && ggml_cpu_has_avx2() && !strcmp(ggml_backend_buft_name(buffer_type), "CPU_REPACK");
#else
    return false;
#endif
}

struct Count {
    int failed = 0;
    int cases = 0;
    int every = 1; // of so many products one is checked
    int seen = 0;
};

// A kernel may be as far off as the one for plain rows, which rounds its inputs to 8 bits too, and a little further.
void check(Count & count, ggml_type type, int k, int n, int rows, int threads, ggml_backend_buffer_type_t buffer_type,
           int gap = 0, bool extreme = false, int experts = 0, Prompts prompts = Prompts::none) {
    if (count.seen++ % count.every != 0) {
        return;
    }
    if (experts && !strcmp(ggml_backend_buft_name(buffer_type), "AMX")) { // reckons the size of one expert alone
        return;
    }
    Product packed(type, k, n, rows, threads, buffer_type, gap, experts, prompts);
    if (!packed.supported()) {
        return;
    }
    Product plain(type, k, n, rows, threads, ggml_backend_cpu_buffer_type(), 0, experts);
    packed.fill(rows, extreme);
    plain.fill(rows, extreme);
    packed.run();
    plain.run();
    const double bound = 1.1 * plain.error() + 1e-4;
    count.cases++;
    if (packed.error() > bound) {
        count.failed++;
        printf("%s, %s, %d x %d, %d rows, %d threads, prompts %d: error %g, bound %g\n",
               ggml_backend_buft_name(buffer_type), ggml_type_name(type), k, n, rows, threads, int(prompts),
               packed.error(), bound);
    }
    if (takes_any_rows(type, n, buffer_type)) {
        Product alone(type, k, n, 1, threads, buffer_type, 0, experts, prompts);
        alone.fill(rows, extreme);
        alone.run();
        count.cases++;
        if (alone.first_row() != packed.first_row()) {
            count.failed++;
            printf("%s, %d x %d, prompts %d: a row depends on the %d others\n", ggml_type_name(type), k, n,
                   int(prompts), rows - 1);
        }
    }
}

// Products and their SwiGLU at once (0024) have the bits that they have one after another.
void check_swiglu(Count & count, ggml_type type, ggml_type type_down, int rows, Prompts prompts) {
    for (ggml_backend_buffer_type_t buffer_type : extra_buffer_types()) {
        if (strcmp(ggml_backend_buft_name(buffer_type), "CPU_REPACK") != 0) {
            continue;
        }
        FeedForward both(type, type_down, 512, 768, 48, rows, buffer_type, prompts);
        if (!both.supported()) {
            continue;
        }
        const std::vector<float> apart = both.run(true);
        const bool same = both.run(false) == apart;
        const bool expected = has_prompts() && rows > 32 && (prompts == Prompts::all || type == GGML_TYPE_BF16);
        count.cases++;
        if (!same || both.at_once() != expected) {
            count.failed++;
            printf("SwiGLU of %s, then %s, %d rows, prompts %d: %s, %s\n", ggml_type_name(type),
                   ggml_type_name(type_down), rows, int(prompts), same ? "same bits" : "other bits",
                   both.at_once() ? "at once" : "one after another");
        }
    }
}

int check_all(int every) {
    Count count;
    count.every = every;
    for (ggml_backend_buffer_type_t buffer_type : extra_buffer_types()) {
        for (ggml_type type : types) {
            const int block = std::max<int>(32, ggml_blck_size(type));
            // multiples of eight, which repacking wants, some of sixteen; 264: more than 256
            for (int n : { 8, 16, 40, 48, 264, 272 }) {
                for (int rows = 1; rows <= 64; rows += rows < 20 || rows > 61 ? 1 : 6) {
                    for (int threads : { 1, 3 }) {
                        check(count, type, 3 * block, n, rows, threads, buffer_type);
                    }
                }
            }
            for (int rows : { 1, 5, 8, 11 }) { // longer than what a kernel keeps of the rows at once: 128 blocks of 32
                check(count, type, 4352, 136, rows, 1, buffer_type);
                if (block == 32) { // units of eight blocks, and a rest
                    check(count, type, 608, 48, 4 * rows, 2, buffer_type);
                }
                check(count, type, 256, 16, rows, 2, buffer_type, 32);
                check(count, type, 256, 40, rows, 1, buffer_type, 0, true);
                check(count, type, 256, 40, 3 * rows, 2, buffer_type, 0, false, 3);
                check(count, type, 512, 48, rows, 1, buffer_type, 0, true);
                check(count, type, 256, 48, 3 * rows, 2, buffer_type, 0, false, 3);
                check(count, type, 256, 16, 40 * rows, 3, buffer_type, 0, false, 2);
            }
        }
    }
    for (ggml_type type : types) { // tiles are in repacked weights alone
        const int block = std::max<int>(32, ggml_blck_size(type));
        for (Prompts prompts : { Prompts::all, Prompts::but_every_third, Prompts::every_third }) {
            for (ggml_backend_buffer_type_t buffer_type : extra_buffer_types()) {
                for (int rows : { 1, 5, 16, 17, 32, 33, 47, 64, 100 }) {
                    check(count, type, 3 * block, 48, rows, 2, buffer_type, 0, false, 0, prompts);
                    check(count, type, 1280, 16 * 5, rows, 1, buffer_type, 32, false, 0, prompts);
                    check(count, type, 512, 48, 3 * rows, 2, buffer_type, 0, false, 3, prompts);
                }
                check(count, type, 768, 544, 1030, 2, buffer_type, 0, false, 0, prompts);
                check(count, type, 256, 16, 600, 2, buffer_type, 0, false, 2, prompts);
            }
        }
    }
    for (ggml_type type : types) {
        for (Prompts prompts : { Prompts::all, Prompts::but_every_third }) {
            for (int rows : { 32, 33, 64, 520 }) { // the last 8 of 520 are multiplied as few rows
                check_swiglu(count, type, type, rows, prompts);
            }
            check_swiglu(count, type, GGML_TYPE_Q8_0, 50, prompts);
        }
    }
    printf("%d of %d cases failed\n", count.failed, count.cases);
    return count.failed ? 1 : 0;
}

int time_all(ggml_type type, int k, int n, int threads, int experts, int many) {
    std::vector<ggml_backend_buffer_type_t> buffer_types = extra_buffer_types();
    buffer_types.push_back(ggml_backend_cpu_buffer_type());
    for (ggml_backend_buffer_type_t buffer_type : buffer_types) {
        for (int rows : { 1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 24, 32, -1, -16, -32, -64, -128, -256, -512, -1024 }) {
            const Prompts prompts = rows < 0 ? Prompts::all : Prompts::none;
            rows = std::abs(rows);
            if (prompts == Prompts::all && buffer_type == ggml_backend_cpu_buffer_type()) {
                continue; // as any rows
            }
            std::vector<std::unique_ptr<Product>> products;
            do {
                products.push_back(
                    std::make_unique<Product>(type, k, n, rows, threads, buffer_type, 0, experts, prompts));
            } while (products[0]->supported() && int(products.size()) < many);
            if (!products[0]->supported()) {
                continue;
            }
            for (auto & product : products) {
                product->fill(1);
            }
            double best = INFINITY;
            double spent = 0;
            for (int i = 0; i < 12 || (i < 300 && spent < 1e5); i++) {
                const auto start = std::chrono::steady_clock::now();
                for (auto & product : products) {
                    product->run();
                }
                const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - start;
                best = std::min(best, took.count() / products.size());
                spent += took.count();
            }
            printf("%s, %d rows%s: %.1f us, %.2f a row\n", ggml_backend_buft_name(buffer_type), rows,
                   prompts == Prompts::all ? " of prompts" : "", best, best / rows);
        }
    }
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr); // repacking tells of every tensor
    if (argc >= 6 && argc <= 8 && !strcmp(argv[1], "time")) {
        for (int t = 0; t < GGML_TYPE_COUNT; t++) {
            const char * name = ggml_type_name(ggml_type(t));
            if (name && !strcmp(name, argv[2])) {
                return time_all(ggml_type(t), atoi(argv[3]), atoi(argv[4]), atoi(argv[5]), argc > 6 ? atoi(argv[6]) : 0,
                                argc > 7 ? atoi(argv[7]) : 1);
            }
        }
        fprintf(stderr, "no type %s\n", argv[2]);
        return 2;
    }
    return check_all(argc == 3 && !strcmp(argv[1], "every") ? std::max(1, atoi(argv[2])) : 1);
}
