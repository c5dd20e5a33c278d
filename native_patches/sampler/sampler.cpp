// Samples all rows of a step from the logits where they lie. C++17, a plain C interface, no dependencies.
//
// llamabatch/sampling/numpy_sampler.py is the same in numpy, and both must choose the same tokens on every machine. So
// there is one order of steps, float32 arithmetic without contraction (-ffp-contract=off), one exponential written
// out below, and weights that are whole numbers: exp(x - top) * 2^33, rounded. Sums of whole numbers up to 2^53,
// that is of 2^20 tokens, are exact in doubles whatever their order, so that vector width, threads and numpy cannot
// change a cut or a draw, and u * total is below the total for every u below 1. Tokens less than 2^-34 times as likely
// as the likeliest have weight 0.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <functional>
#include <new>

#include "logprobs.hpp"
#include "row.hpp"

#define LB_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

float coldness(const lb_params & p) { return 1.0f / std::max(p.temperature, COLDEST); }

// The candidates that the chain leaves of a row: s.values and s.ids [0, n), in order of the ids. A token is likelier
// if its value is larger, or equal and its id lower.
class Candidates {
  public:
    Candidates(const Row & row, int n_vocab, const lb_params & p, Scratch & scratch)
        : row(row), s(scratch), floor(float_from(row.top + p.log_min_p)) {
        if (p.top_k > 0 && p.top_k < n_vocab) {
            cut_count(p.top_k);
            if (p.top_p < 1) {
                cut_mass(p.top_p * weigh_all(1.0f));
            }
        } else if (p.top_p < 1) {
            const double whole = row.sum_all(1.0f), target = p.top_p * whole;
            gather_mass(target, whole);
            cut_mass(target);
        } else {
            n = row.collect(floor);
        }
        if (floor > NEVER) {
            keep([lowest = floor](float value, int) { return value >= lowest; });
        }
        weigh_all(coldness(p));
    }

    int draw(double u) const { return s.ids[place_of(s.weights.get(), n, u * total)]; }

    int n = 0;
    double total = 0; // of the weights

  private:
    double weigh_all(float coldness) {
        weigh(s.values.get(), n, row.top, coldness, s.weights.get());
        return total = sum_of(s.weights.get(), n);
    }

    static float float_from(double limit) { // the least float that is not below the limit
        const float nearest = static_cast<float>(limit);
        return nearest < limit ? std::nextafter(nearest, FLT_MAX) : nearest;
    }

    template <typename Test> void keep(Test wanted) {
        float * values = s.values.get();
        int32_t * ids = s.ids.get();
        int kept = 0;
        for (int i = 0; i < n; i++) {
            const bool stays = wanted(values[i], i);
            values[kept] = values[i];
            ids[kept] = ids[i];
            kept += stays;
        }
        n = kept;
    }

    bool likelier(int a, int b) const { return s.values[a] != s.values[b] ? s.values[a] > s.values[b] : a < b; }

    void keep_to(int last) { // the candidates down to this one
        keep([last, border = s.values[last]](float value, int i) {
            return value > border || (value == border && i <= last);
        });
    }

    // The h-th largest of the chunks' maxima: at least h tokens reach it.
    float nth_maximum(int h) const {
        s.ordered = s.maxima;
        std::nth_element(s.ordered.begin(), s.ordered.begin() + (h - 1), s.ordered.end(), std::greater<float>());
        return s.ordered[h - 1];
    }

    void cut_count(int k) {
        n = row.collect(k <= row.n_chunks ? nth_maximum(k) : NEVER);
        if (n <= k) {
            return;
        }
        s.picked.resize(n);
        for (int i = 0; i < n; i++) {
            s.picked[i] = i;
        }
        std::nth_element(s.picked.begin(), s.picked.begin() + (k - 1), s.picked.end(),
                         [this](int a, int b) { return likelier(a, b); });
        keep_to(s.picked[k - 1]);
    }

    // Candidates that weigh at least `target` together, or all from the floor on. First those that reach the median of
    // the chunks' maxima, which is enough but for flat rows; for these every 16th chunk tells about how far to go.
    void gather_mass(double target, double whole) {
        const float head = nth_maximum((row.n_chunks + 1) / 2);
        n = row.collect(std::max(head, floor));
        const double mass = weigh_all(1.0f);
        if (mass >= target || head <= floor) {
            return;
        }
        double histogram[BUCKETS] = {};
        float buffer[WIDE];
        double weights[WIDE];
        for (int c = 0; c < row.n_chunks; c += SAMPLED) {
            const float * values = row.view(c, buffer);
            weigh(values, row.chunk, row.top, 1.0f, weights);
            for (int j = 0; j < row.chunk; j++) {
                if (values[j] < head) {
                    histogram[bucket(values[j])] += weights[j] * SAMPLED;
                }
            }
        }
        double guess = mass;
        int b = bucket(head);
        while (b + 1 < BUCKETS && guess < target + (whole - target) / 3) {
            guess += histogram[b++];
        }
        for (float bound = head; bound > floor && b < BUCKETS; b += 12) { // further down while it falls short
            bound = row.top - static_cast<float>(b + 1) / PER_UNIT;
            n = row.collect(std::max(bound, floor));
            if (weigh_all(1.0f) >= target) {
                return;
            }
        }
    }

    int bucket(float value) const {
        const float below = (row.top - value) * PER_UNIT;
        return below < BUCKETS - 1 ? static_cast<int>(below) : BUCKETS - 1;
    }

    // The fewest likeliest candidates that weigh `target` together: whole buckets, then a sort within the last.
    // Their weights at temperature 1 have been computed.
    void cut_mass(double target) {
        double histogram[BUCKETS] = {};
        s.buckets.resize(n);
        for (int i = 0; i < n; i++) {
            s.buckets[i] = static_cast<int16_t>(bucket(s.values[i]));
            histogram[s.buckets[i]] += s.weights[i];
        }
        double sum = 0;
        int border = 0;
        for (; border < BUCKETS && sum + histogram[border] < target; border++) {
            sum += histogram[border];
        }
        if (border == BUCKETS) {
            return;
        }
        s.picked.clear();
        for (int i = 0; i < n; i++) {
            if (s.buckets[i] == border) {
                s.picked.push_back(i);
            }
        }
        std::sort(s.picked.begin(), s.picked.end(), [this](int a, int b) { return likelier(a, b); });
        for (int i : s.picked) {
            if ((sum += s.weights[i]) >= target) {
                keep_to(i);
                return;
            }
        }
    }

    static constexpr int SAMPLED = 16, PER_UNIT = 32, BUCKETS = 25 * PER_UNIT; // below -25 nothing has a weight
    const Row & row;
    Scratch & s;
    const float floor; // what min_p leaves
};

// A draw from all tokens: the sums of the chunks first, then within the chunk that was hit.
int draw_from_all(const Row & row, const lb_params & p, double u, const Scratch & s) {
    const double target = u * row.sum_all(coldness(p));
    double sum = 0, weights[WIDE];
    int c = 0;
    while (c + 1 < row.n_chunks && sum + s.sums[c] <= target) {
        sum += s.sums[c++];
    }
    float buffer[WIDE];
    weigh(row.view(c, buffer), row.chunk, row.top, coldness(p), weights);
    return c * row.chunk + static_cast<int>(place_of(weights, row.chunk, target - sum));
}

int chunk_for(const lb_params & p, int n_vocab) {
    const bool many = p.temperature > 0 && p.top_k > 0 && p.top_k < n_vocab && p.top_k * 4LL > n_vocab / WIDE;
    return many || n_vocab < 4096 ? NARROW : WIDE;
}

int sample_row(const Row & row, int n_vocab, const lb_params & p, uint64_t seed, uint64_t index, Scratch & s) {
    if (!row.numbers) {
        return NO_TOKEN;
    }
    if (p.temperature == 0) {
        return row.greedy();
    }
    const double u = uniform(seed, index);
    const bool is_cut = (p.top_k > 0 && p.top_k < n_vocab) || p.top_p < 1 || p.log_min_p > NEVER;
    return is_cut ? Candidates(row, n_vocab, p, s).draw(u) : draw_from_all(row, p, u, s);
}

thread_local Scratch scratch;

// Calls work(i) for each i below n; threads take the next one in turn. Returns 0, or 1 when memory ran out.
template <typename Work> int for_each(int n, int n_threads, Work work) {
    std::atomic<int> next{ 0 }, failed{ 0 };
    // a region without a loop construct: the runtime of native_patches/portable has no more of OpenMP
#pragma omp parallel num_threads(n_threads) if (n_threads > 1)
    for (int i; (i = next.fetch_add(1, std::memory_order_relaxed)) < n;) {
        try {
            work(i);
        } catch (const std::bad_alloc &) {
            failed = 1;
        }
    }
    return failed;
}

} // namespace

// Raised when the layout above or the meaning of an argument changes.
LB_EXPORT int lb_abi_version() { return 2; }

// Writes a token for each row, -1 where the logits are no numbers; returns 0, or 1 when memory ran out. Rows are
// n_vocab floats, `stride` floats apart. `histories` and `masks` may be null, as may each mask; masks are in the
// format of lb_params::allowed. n_threads counts only where OpenMP was compiled in and the rows are worth it.
LB_EXPORT int lb_sample_rows(const float * logits, int64_t stride, int n_rows, int n_vocab,
                             const lb_params * const * params, const uint64_t * seeds, const uint64_t * indices,
                             const lb_history * histories, const uint32_t * const * masks, int64_t n_mask_words,
                             int n_threads, int32_t * tokens) {
    // With fewer threads than llama.cpp's the team would be torn down and built up again in each step: all or one.
    const bool worth_it = n_threads > 1 && n_rows > 1 && static_cast<int64_t>(n_rows) * n_vocab >= PARALLEL_FROM;
    return for_each(n_rows, worth_it ? n_threads : 1, [&](int r) {
        const lb_params & p = *params[r];
        const Row row(logits + r * stride, n_vocab, chunk_for(p, n_vocab), p, histories ? histories + r : nullptr,
                      masks ? masks[r] : nullptr, n_mask_words, scratch);
        tokens[r] = sample_row(row, n_vocab, p, seeds[r], indices[r], scratch);
    });
}

// The candidates of one row: ids rising, and their weights; room for n_vocab of each. Returns their number, 0 where the
// logits are no numbers, -1 when memory ran out.
LB_EXPORT int lb_candidates(const float * logits, int n_vocab, const lb_params * params, const lb_history * history,
                            const uint32_t * mask, int64_t n_mask_words, int32_t * ids, double * weights) {
    try {
        Scratch & s = scratch;
        const Row row(logits, n_vocab, chunk_for(*params, n_vocab), *params, history, mask, n_mask_words, s);
        if (!row.numbers) {
            return 0;
        }
        const Candidates left(row, n_vocab, *params, s);
        std::copy_n(s.ids.get(), left.n, ids);
        std::copy_n(s.weights.get(), left.n, weights);
        return left.n;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

// Log probabilities of `n` rows of a step, any of them, in any order. Row i is `rows[i]`; written are its token
// `chosen[i]` and then its `ks[i]` likeliest (at most `most`), from place i * (most + 1) of `ids` and `logprobs` on, the
// rank of the chosen one, and in `counts` how many there are, 0 where the logits are no numbers. With ks[i] = -1 it is
// the chosen one's logprob alone, without a rank. Returns 0, or 1 when memory ran out.
LB_EXPORT int lb_logprobs(const float * logits, int64_t stride, int n_vocab, int n, const int32_t * rows,
                          const int32_t * chosen, const int32_t * ks, int most, int n_threads, int32_t * ids,
                          double * logprobs, int32_t * ranks, int32_t * counts) {
    const bool worth_it = n_threads > 1 && n > 1 && static_cast<int64_t>(n) * n_vocab >= PARALLEL_FROM;
    return for_each(n, worth_it ? n_threads : 1, [&](int i) {
        const int64_t at = static_cast<int64_t>(i) * (most + 1);
        counts[i] = row_logprobs(logits + rows[i] * stride, n_vocab, chosen[i], ks[i], ids + at, logprobs + at,
                                 ranks + i, scratch);
    });
}
