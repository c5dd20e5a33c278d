// Calls every function of native_patches/native with rows of all kinds, in several threads, so that sanitizers see all
// of it. tests/unit/sampling/test_sampler_compiled.py compares its tokens with those of numpy.
//
//   g++ -std=c++17 -fopenmp-simd -fsanitize=... sampler_check.cpp

#include "../sampler.cpp"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <random>
#include <thread>

namespace {

struct Case {
    int n_vocab, n_rows;
    std::vector<float> logits;
    std::vector<lb_params> params;
    std::vector<const lb_params *> param_pointers;
    std::vector<std::vector<int32_t>> bias_ids, past_ids, past_counts;
    std::vector<std::vector<float>> biases;
    std::vector<std::vector<uint32_t>> allowed, masks;
    std::vector<lb_history> histories;
    std::vector<const uint32_t *> mask_pointers;
    std::vector<uint64_t> seeds, indices;
    int n_mask_words;

    Case(int vocab, int rows, std::mt19937 & random) : n_vocab(vocab), n_rows(rows), n_mask_words((vocab + 31) / 32) {
        const auto pick = [&](int n) { return static_cast<int>(random() % n); };
        std::normal_distribution<float> normal(0.0f, 3.0f);
        for (int r = 0; r < rows; r++) {
            const int kind = pick(6);
            for (int i = 0; i < vocab; i++) {
                float x = normal(random);
                if (kind == 1 && pick(2)) {
                    x = -std::numeric_limits<float>::infinity();
                }
                if (kind == 2) {
                    x = std::round(x);
                }
                if (kind == 3) {
                    x *= 1e37f;
                }
                logits.push_back(x);
            }
            if (kind == 4) {
                logits[r * static_cast<size_t>(vocab) + pick(vocab)] = std::nanf("");
            }
            bias_ids.emplace_back();
            biases.emplace_back();
            past_ids.emplace_back();
            past_counts.emplace_back();
            for (int id = pick(9); id < vocab; id += 1 + pick(vocab)) {
                bias_ids.back().push_back(id);
                biases.back().push_back(pick(3) ? normal(random) : -std::numeric_limits<float>::infinity());
                past_ids.back().push_back(id);
                past_counts.back().push_back(pick(3));
            }
            const auto words = [&] {
                std::vector<uint32_t> bits(1 + pick(n_mask_words));
                for (uint32_t & word : bits) {
                    word = random() | 1;
                }
                return bits;
            };
            allowed.push_back(words());
            masks.push_back(words());
            masks.back().resize(n_mask_words);
            seeds.push_back(random());
            indices.push_back(r);
        }
        for (int r = 0; r < rows; r++) {
            lb_params p{};
            p.top_p = pick(2) ? 1.0 : 0.01 * pick(100);
            p.log_min_p = pick(2) ? -std::numeric_limits<double>::infinity() : -0.1 * pick(60);
            p.temperature = pick(4) ? 0.1f * (1 + pick(20)) : 0.0f;
            p.repetition_penalty = pick(2) ? 1.0f : 1.3f;
            p.presence_penalty = pick(2) ? 0.0f : 0.5f;
            p.frequency_penalty = pick(2) ? 0.0f : -0.5f;
            p.top_k = pick(2) ? 0 : 1 + pick(vocab + 5);
            p.n_bias = pick(2) ? 0 : static_cast<int32_t>(bias_ids[r].size());
            p.bias_ids = bias_ids[r].data();
            p.biases = biases[r].data();
            p.allowed = pick(3) ? nullptr : allowed[r].data();
            p.n_allowed_words = p.allowed ? static_cast<int64_t>(allowed[r].size()) : 0;
            params.push_back(p);
            histories.push_back(
                { past_ids[r].data(), past_counts[r].data(), static_cast<int64_t>(past_ids[r].size()) });
            mask_pointers.push_back(pick(2) ? nullptr : masks[r].data());
        }
        for (const lb_params & p : params) {
            param_pointers.push_back(&p);
        }
    }

    // Number of its answers that are neither a token nor -1.
    int run() const {
        std::vector<int32_t> tokens(n_rows, -2), ids(n_vocab);
        std::vector<double> weights(n_vocab);
        int bad =
            lb_sample_rows(logits.data(), n_vocab, n_rows, n_vocab, param_pointers.data(), seeds.data(), indices.data(),
                           histories.data(), mask_pointers.data(), n_mask_words, 2, tokens.data());
        for (int r = 0; r < n_rows; r++) {
            bad += tokens[r] < -1 || tokens[r] >= n_vocab;
            const int n = lb_candidates(logits.data() + r * static_cast<size_t>(n_vocab), n_vocab, &params[r],
                                        &histories[r], mask_pointers[r], n_mask_words, ids.data(), weights.data());
            bad += n < 0 || n > n_vocab;
            for (int i = 0; i < n; i++) {
                bad += ids[i] < 0 || ids[i] >= n_vocab || !(weights[i] >= 0);
            }
        }
        const int most = std::min(20, n_vocab);
        std::vector<int32_t> rows(n_rows), chosen(n_rows), ks(n_rows), found(n_rows * (most + 1)), ranks(n_rows),
            counts(n_rows);
        std::vector<double> logprobs(n_rows * (most + 1));
        for (int r = 0; r < n_rows; r++) {
            rows[r] = n_rows - 1 - r;
            chosen[r] = std::max(0, tokens[rows[r]]);
            ks[r] = r % (most + 2) - 1;
        }
        bad += lb_logprobs(logits.data(), n_vocab, n_vocab, n_rows, rows.data(), chosen.data(), ks.data(), most, 2,
                           found.data(), logprobs.data(), ranks.data(), counts.data());
        for (int r = 0; r < n_rows; r++) {
            bad += counts[r] < 0 || counts[r] > most + 1;
            for (int i = 0; i < counts[r]; i++) {
                bad += found[r * (most + 1) + i] < 0 || found[r * (most + 1) + i] >= n_vocab;
            }
        }
        return bad;
    }
};

} // namespace

int main() {
    std::mt19937 random(1);
    int failed = 0, cases = 0;
    for (int n_vocab : { 1, 2, 31, 33, 257, 1120, 4099, 40000 }) {
        for (int i = 0; i < (n_vocab > 5000 ? 3 : 12); i++) {
            const Case a(n_vocab, 1 + i, random), b(n_vocab, 3, random);
            int bad_a = 0, bad_b = 0;
            std::thread other([&] { bad_b = b.run(); }); // engines of one process sample at the same time
            bad_a = a.run();
            other.join();
            failed += bad_a + bad_b > 0;
            cases += 2;
        }
    }
    printf("%d of %d cases failed\n", failed, cases);
    return failed > 0;
}
