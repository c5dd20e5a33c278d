// Checks ggml's CPU operations on recurrent states, GATED_DELTA_NET and SSM_SCAN, against a float64 computation, over
// sizes, decays, tokens, sequences, snapshots and threads. A sequence has the same bits as alone, as token by token, and
// as where its states are written behind the output; where they are written in place, those of others stay as they are.
//
//   state_check [every N]   every case, or each Nth; exit status 1 if one fails
//   state_check time SIZE HEADS TOKENS SEQS THREADS [PLACE]    microseconds of the fastest run of GATED_DELTA_NET
//
// Build against the llama.cpp folder L and its build folder B, then run with B/bin in LD_LIBRARY_PATH (the libraries of
// another build can be put there instead):
//   g++ -O2 -std=c++17 -IL/ggml/include state_check.cpp -LB/bin -lggml-cpu -lggml-base -lggml

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
#include <memory>
#include <random>
#include <string>
#include <vector>

namespace {

struct Case {
    bool scan = false; // SSM_SCAN, else GATED_DELTA_NET
    int size = 128;    // elements of a row of the state
    int rows = 128;    // of a head's state
    int heads = 4;     // of the state
    int groups = 2;    // of q and k, or of B and C
    int tokens = 1;    // of each sequence
    int seqs = 1;
    int snapshots = 1;
    bool columns = false; // a decay for each column of the state
    bool in_place = false;
    int threads = 1;

    size_t state() const { return size_t(size) * rows * heads; }
    size_t output() const { return size_t(rows) * heads * tokens; } // of a sequence
    int written() const { return std::min(tokens, snapshots); }

    std::string name() const {
        char text[256];
        snprintf(text, sizeof(text),
                 "%s, %d x %d, %d of %d heads, %d tokens x %d sequences, %d states, %s%s, %d threads",
                 scan ? "scan" : "delta net", rows, size, groups, heads, tokens, seqs, snapshots,
                 columns ? "decays of columns" : "one decay", in_place ? ", in place" : "", threads);
        return text;
    }
};

// The inputs of one sequence. A delta net has q, k, v, g and beta; a scan has C, B, x, the decays and dt in their places.
struct Inputs {
    std::vector<float> q, k, v, g, beta, state;
};

std::vector<float> numbers(std::mt19937 & rng, size_t n, float low, float high) {
    std::uniform_real_distribution<float> any(low, high);
    std::vector<float> found(n);
    for (float & x : found) {
        x = any(rng);
    }
    return found;
}

Inputs inputs_of(const Case & c, int seq) {
    std::mt19937 rng(1000 * c.size + 10 * c.heads + seq);
    const size_t tokens = c.tokens;
    const float width = 1.0f / std::sqrt(float(c.size)); // as of vectors of length one
    Inputs in;
    in.q = numbers(rng, tokens * c.groups * c.size, -width, width);
    in.k = numbers(rng, tokens * c.groups * c.size, -width, width);
    in.v = numbers(rng, tokens * c.heads * c.rows, -1, 1);
    in.beta = numbers(rng, tokens * c.heads, 0, 1);
    in.state = numbers(rng, c.state(), -1, 1);
    if (c.scan) { // the same for all sequences: a weight of the model
        std::mt19937 weights(c.size);
        in.g = numbers(weights, size_t(c.heads) * (c.columns ? c.size : 1), -2, 0);
    } else {
        in.g = numbers(rng, tokens * c.heads * (c.columns ? c.size : 1), -2, 0);
    }
    return in;
}

struct Result {
    std::vector<float> output;              // rows of heads of tokens
    std::vector<std::vector<float>> states; // the newest first
};

double softplus(double x) { return x > 20 ? x : std::log1p(std::exp(x)); }

std::pair<std::vector<double>, std::vector<std::vector<double>>> expected(const Case & c, const Inputs & in) {
    std::vector<double> state(in.state.begin(), in.state.end());
    std::vector<double> output(c.output());
    std::vector<std::vector<double>> states(c.tokens);
    for (int t = 0; t < c.tokens; t++) {
        for (int h = 0; h < c.heads; h++) {
            // a delta net repeats its groups one after the other, a scan each for its heads
            const int group = c.scan ? h / (c.heads / c.groups) : h % c.groups;
            const float * q = &in.q[(size_t(t) * c.groups + group) * c.size];
            const float * k = &in.k[(size_t(t) * c.groups + group) * c.size];
            const double step = c.scan ? softplus(in.beta[t * c.heads + h]) : in.beta[t * c.heads + h];
            for (int r = 0; r < c.rows; r++) {
                double * row = &state[(size_t(h) * c.rows + r) * c.size];
                const double v = in.v[(size_t(t) * c.heads + h) * c.rows + r];
                double known = 0;
                for (int i = 0; i < c.size; i++) {
                    const size_t at = (c.scan ? 0 : size_t(t) * c.heads * (c.columns ? c.size : 1)) +
                                      (c.columns ? size_t(h) * c.size + i : h);
                    row[i] *= std::exp(c.scan ? step * in.g[at] : double(in.g[at]));
                    known += row[i] * k[i];
                }
                const double delta = c.scan ? v * step : (v - known) * step;
                double sum = 0;
                for (int i = 0; i < c.size; i++) {
                    row[i] += delta * k[i];
                    sum += row[i] * q[i];
                }
                output[(size_t(t) * c.heads + h) * c.rows + r] = c.scan ? sum : sum / std::sqrt(double(c.size));
            }
        }
        states[c.tokens - 1 - t] = state;
    }
    return { output, states };
}

struct ContextFree {
    void operator()(ggml_context * p) const { ggml_free(p); }
};
struct BufferFree {
    void operator()(ggml_backend_buffer_t p) const { ggml_backend_buffer_free(p); }
};

// The operation over sequences whose states are those of cells, one free cell before them and one behind.
struct Run {
    const Case & c;
    ggml_backend_t backend;
    std::unique_ptr<ggml_context, ContextFree> context;
    std::unique_ptr<ggml_backend_buffer, BufferFree> buffer;
    ggml_tensor *q, *k, *v, *g, *beta, *cells, *ids = nullptr, *out;
    ggml_cgraph * graph;

    Run(const Case & c, ggml_backend_t backend, const std::vector<Inputs> & given) : c(c), backend(backend) {
        context.reset(ggml_init({ 1 << 20, nullptr, true }));
        ggml_context * ctx = context.get();
        const int n = int(given.size());
        const auto f32 = [&](int64_t a, int64_t b, int64_t c, int64_t d) {
            return ggml_new_tensor_4d(ctx, GGML_TYPE_F32, a, b, c, d);
        };
        q = f32(c.size, c.groups, c.tokens, n);
        k = f32(c.size, c.groups, c.tokens, n);
        v = f32(c.rows, c.heads, c.tokens, n);
        cells = f32(c.size, c.rows, c.heads, n + 2);
        if (c.scan) {
            g = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, c.columns ? c.size : 1, c.heads);
            beta = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, c.heads, c.tokens, n);
            ids = ggml_new_tensor_1d(ctx, GGML_TYPE_I32, n);
            out = ggml_ssm_scan(ctx, cells, v, beta, g, k, q, ids, c.snapshots);
        } else {
            g = f32(c.columns ? c.size : 1, c.heads, c.tokens, n);
            beta = f32(1, c.heads, c.tokens, n);
            ggml_tensor * states = ggml_view_4d(ctx, cells, c.size, c.rows, c.heads, n, cells->nb[1], cells->nb[2],
                                                cells->nb[3], cells->nb[3]);
            out = ggml_gated_delta_net(ctx, q, k, v, g, beta, states, c.snapshots);
        }
        if (c.in_place) { // as llama.cpp does it: native_patches/0017
            out->op_params[1] = 1;
            out->ne[c.scan ? 0 : 1] = c.scan ? c.output() * n : int64_t(c.tokens) * n;
            for (int i = 1; i < GGML_MAX_DIMS; i++) {
                out->nb[i] = out->nb[i - 1] * (i == 1 ? out->ne[0] : out->ne[i - 1]);
            }
        }
        graph = ggml_new_graph(ctx);
        ggml_build_forward_expand(graph, out);
        buffer.reset(ggml_backend_alloc_ctx_tensors(ctx, backend));
        std::vector<float> empty(c.state(), NAN); // of a cell that is not ours
        std::vector<int32_t> places;
        set(cells, empty, 0);
        set(cells, empty, n + 1);
        for (int seq = 0; seq < n; seq++) {
            const Inputs & in = given[seq];
            set(q, in.q, seq);
            set(k, in.k, seq);
            set(v, in.v, seq);
            set(beta, in.beta, seq);
            set(g, in.g, c.scan ? 0 : seq);
            set(cells, in.state, seq + 1);
            places.push_back(seq + 1);
        }
        if (ids) {
            ggml_backend_tensor_set(ids, places.data(), 0, places.size() * sizeof(int32_t));
        }
    }

    void set(ggml_tensor * x, const std::vector<float> & values, size_t number) {
        const size_t bytes = values.size() * sizeof(float);
        ggml_backend_tensor_set(x, values.data(), number * bytes, bytes);
    }

    void compute() { ggml_backend_graph_compute(backend, graph); }

    std::vector<float> read(const ggml_tensor * x, size_t at, size_t n) const {
        std::vector<float> found(n);
        ggml_backend_tensor_get(x, found.data(), at * sizeof(float), n * sizeof(float));
        return found;
    }

    Result of(int seq, int n) const {
        Result found;
        found.output = read(out, seq * c.output(), c.output());
        for (int number = 0; number < c.written(); number++) {
            const size_t at = n * c.output() + (size_t(number) * n + seq) * c.state();
            found.states.push_back(c.in_place ? read(cells, (seq + 1) * c.state(), c.state())
                                              : read(out, at, c.state()));
        }
        return found;
    }

    bool others_are_untouched(int n) const {
        for (const size_t cell : { size_t(0), size_t(n) + 1 }) {
            for (const float x : read(cells, cell * c.state(), c.state())) {
                if (!std::isnan(x)) {
                    return false;
                }
            }
        }
        return true;
    }
};

bool same(const std::vector<float> & a, const std::vector<float> & b) {
    return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

double distance(const std::vector<float> & found, const std::vector<double> & wanted) {
    double most = 0;
    for (size_t i = 0; i < found.size(); i++) {
        const double off = std::fabs(found[i] - wanted[i]);
        most = std::isnan(off) ? INFINITY : std::max(most, off);
    }
    return most;
}

// The result of a sequence alone, a token at a time, with the states behind the output.
Result token_by_token(const Case & whole, ggml_backend_t backend, const Inputs & in) {
    Case c = whole;
    c.tokens = c.snapshots = 1;
    c.in_place = false;
    Inputs now = in;
    Result found;
    const auto part = [&](const std::vector<float> & of, int token) {
        const size_t n = of.size() / whole.tokens;
        return std::vector<float>(of.begin() + n * token, of.begin() + n * (token + 1));
    };
    for (int token = 0; token < whole.tokens; token++) {
        now.q = part(in.q, token);
        now.k = part(in.k, token);
        now.v = part(in.v, token);
        now.beta = part(in.beta, token);
        now.g = whole.scan ? in.g : part(in.g, token);
        Run run(c, backend, { now });
        run.compute();
        const Result one = run.of(0, 1);
        found.output.insert(found.output.end(), one.output.begin(), one.output.end());
        found.states.insert(found.states.begin(), one.states[0]);
        now.state = one.states[0];
    }
    return found;
}

const char * fault(const Case & c, ggml_backend_t backend) {
    std::vector<Inputs> given;
    for (int seq = 0; seq < c.seqs; seq++) {
        given.push_back(inputs_of(c, seq));
    }
    Run run(c, backend, given);
    run.compute();
    if (!run.others_are_untouched(c.seqs)) {
        return "the state of another cell has changed";
    }
    for (int seq = 0; seq < c.seqs; seq++) {
        const Result found = run.of(seq, c.seqs);
        const auto wanted = expected(c, given[seq]);
        if (!(distance(found.output, wanted.first) < 2e-5)) {
            return "the output is wrong";
        }
        for (int number = 0; number < c.written(); number++) {
            if (!(distance(found.states[number], wanted.second[number]) < 2e-5)) {
                return "a state is wrong";
            }
        }
        if (seq && seq + 1 < c.seqs) {
            continue; // the first and the last are enough
        }
        const Result alone = token_by_token(c, backend, given[seq]);
        if (!same(found.output, alone.output)) {
            return "the output has other bits than token by token and alone";
        }
        for (int number = 0; number < c.written(); number++) {
            if (!same(found.states[number], alone.states[number])) {
                return "a state has other bits than token by token and alone";
            }
        }
    }
    return nullptr;
}

std::vector<Case> cases() {
    std::vector<Case> found;
    for (const bool scan : { false, true }) {
        for (const int size : { 16, 32, 64, 128, 80, 256 }) {
            for (const int tokens : { 1, 3, 17, 40 }) {
                for (const int seqs : { 1, 3 }) {
                    for (const int snapshots : { 1, 4 }) {
                        for (const bool columns : { false, true }) {
                            for (const bool in_place : { false, true }) {
                                for (const int threads : { 1, 3 }) {
                                    Case c;
                                    c.scan = scan;
                                    c.size = size;
                                    c.rows = scan ? 24 : size;
                                    c.tokens = tokens;
                                    c.seqs = seqs;
                                    c.snapshots = snapshots;
                                    c.columns = columns;
                                    c.in_place = in_place;
                                    c.threads = threads;
                                    const bool known = scan || size == 16 || size == 32 || size == 64 || size == 128;
                                    if ((in_place && (snapshots > 1 || !known)) || (scan && columns && snapshots > 1) ||
                                        (size > 128 && tokens > 3)) {
                                        continue;
                                    }
                                    found.push_back(c);
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    return found;
}

int time_of(int argc, char ** argv, ggml_backend_t backend) {
    if (argc < 7) {
        fprintf(stderr, "time SIZE HEADS TOKENS SEQS THREADS [PLACE]\n");
        return 2;
    }
    Case c;
    c.size = c.rows = atoi(argv[2]);
    c.heads = c.groups = atoi(argv[3]);
    c.tokens = atoi(argv[4]);
    c.seqs = atoi(argv[5]);
    c.threads = atoi(argv[6]);
    c.in_place = argc > 7;
    ggml_backend_cpu_set_n_threads(backend, c.threads);
    std::vector<Inputs> given;
    for (int seq = 0; seq < c.seqs; seq++) {
        given.push_back(inputs_of(c, seq));
    }
    Run run(c, backend, given);
    double best = INFINITY;
    for (int i = 0; i < 30; i++) {
        const auto began = std::chrono::steady_clock::now();
        run.compute();
        best = std::min(best, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count());
    }
    printf("%.0f us, %.1f GB/s of one read and one write\n", best * 1e6,
           2 * c.state() * c.seqs * sizeof(float) / best / 1e9);
    return 0;
}

} // namespace

int main(int argc, char ** argv) {
    ggml_backend_t backend = ggml_backend_cpu_init();
    if (argc > 1 && !strcmp(argv[1], "time")) {
        return time_of(argc, argv, backend);
    }
    const size_t every = argc > 2 && !strcmp(argv[1], "every") ? atoi(argv[2]) : 1;
    int failed = 0;
    const std::vector<Case> all = cases();
    for (size_t i = 0; i < all.size(); i += every) {
        const Case & c = all[i];
        ggml_backend_cpu_set_n_threads(backend, c.threads);
        if (const char * what = fault(c, backend)) {
            printf("FAILED %s: %s\n", c.name().c_str(), what);
            failed++;
        }
    }
    printf("%d of %zu cases failed\n", failed, (all.size() + every - 1) / every);
    ggml_backend_free(backend);
    return failed != 0;
}
