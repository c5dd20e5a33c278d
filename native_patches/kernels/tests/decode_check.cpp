// Decodes sequences together and each alone, and compares the logits: split and unified KV cache, with and without flash
// attention, prompts and single tokens in one batch, holes between the sequences, cells that are freed and used again.
//
//   decode_check MODEL.gguf       exit status 1 if logits differ by more than the bound
//
// Built as flash_attention_check.cpp is, and with -lllama and -IL/include.

#include "llama.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

namespace {

struct ModelFree {
    void operator()(llama_model * p) const { llama_model_free(p); }
};
struct ContextFree {
    void operator()(llama_context * p) const { llama_free(p); }
};

using ModelPtr = std::unique_ptr<llama_model, ModelFree>;
using ContextPtr = std::unique_ptr<llama_context, ContextFree>;

constexpr int N_SEQ = 6;
constexpr int N_CTX = 256; // for each sequence
constexpr int BATCH = 512;

// Sums of 8-bit products depend on how rows are grouped; the model's logits span about 30.
constexpr float BOUND = 0.5f;

struct Span {
    int seq;
    int start;
    int n;
};

int token_at(int seq, int pos, int n_vocab) { return (seq * 31 + pos * 17 + 3) % (n_vocab - 8) + 8; }

ContextPtr make_context(llama_model * model, int n_seq, bool unified, bool flash, int threads) {
    llama_context_params params = llama_context_default_params();
    params.n_ctx = N_CTX * n_seq;
    params.n_batch = BATCH;
    params.n_ubatch = BATCH;
    params.n_seq_max = n_seq;
    params.n_outputs_max = 64;
    params.n_threads = threads;
    params.n_threads_batch = threads;
    params.kv_unified = unified;
    params.flash_attn_type = flash ? LLAMA_FLASH_ATTN_TYPE_ENABLED : LLAMA_FLASH_ATTN_TYPE_DISABLED;
    params.no_perf = true;
    return ContextPtr(llama_init_from_model(model, params));
}

// The logits after each span, in one llama_decode. `as`: the sequence id that stands for a span's own, or -1.
std::vector<std::vector<float>> decode(llama_context * context, const std::vector<Span> & spans, int n_vocab, int as) {
    llama_batch batch = llama_batch_init(BATCH, 0, 1);
    std::vector<int> rows;
    for (const Span & span : spans) {
        for (int i = 0; i < span.n; i++) {
            const int row = batch.n_tokens++;
            batch.token[row] = token_at(span.seq, span.start + i, n_vocab);
            batch.pos[row] = span.start + i;
            batch.n_seq_id[row] = 1;
            batch.seq_id[row][0] = as < 0 ? span.seq : as;
            batch.logits[row] = i == span.n - 1;
        }
        rows.push_back(batch.n_tokens - 1);
    }
    const int status = llama_decode(context, batch);
    llama_batch_free(batch);
    if (status != 0) {
        fprintf(stderr, "llama_decode returned %d\n", status);
        exit(1);
    }
    std::vector<std::vector<float>> logits;
    for (int row : rows) {
        const float * x = llama_get_logits_ith(context, row);
        logits.emplace_back(x, x + n_vocab);
    }
    return logits;
}

// The batches, in order: prompts of several lengths, then tokens, with holes, and late prompts in between.
std::vector<std::vector<Span>> script() {
    int at[N_SEQ] = {};
    std::vector<std::vector<Span>> batches;
    const auto add = [&](std::vector<Span> & batch, int seq, int n) {
        batch.push_back({ seq, at[seq], n });
        at[seq] += n;
    };
    batches.emplace_back();
    for (int seq : { 0, 1, 3 }) {
        add(batches.back(), seq, 5 + 30 * seq);
    }
    for (int step = 0; step < 6; step++) {
        batches.emplace_back();
        for (int seq = 0; seq < N_SEQ; seq++) {
            if (at[seq] > 0 && (seq + step) % 4 != 0) {
                add(batches.back(), seq, 1);
            } else if (step == 2 && at[seq] == 0) {
                add(batches.back(), seq, 40 + seq);
            }
        }
    }
    return batches;
}

float worst_difference(const std::vector<float> & a, const std::vector<float> & b) {
    float worst = 0.0f;
    for (size_t i = 0; i < a.size(); i++) {
        const float d = std::fabs(a[i] - b[i]);
        worst = d <= worst ? worst : d; // not a number is worse than anything
    }
    return worst;
}

} // namespace

int main(int argc, char ** argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: decode_check MODEL.gguf\n");
        return 2;
    }
    llama_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    llama_backend_init();
    ModelPtr model(llama_model_load_from_file(argv[1], llama_model_default_params()));
    if (!model) {
        fprintf(stderr, "%s cannot be loaded\n", argv[1]);
        return 2;
    }
    const int n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    const auto batches = script();

    int failed = 0, compared = 0;
    float worst = 0.0f;
    for (int variant = 0; variant < 8; variant++) {
        const bool unified = variant & 1, flash = variant & 2;
        const int threads = variant & 4 ? 3 : 1;
        ContextPtr together = make_context(model.get(), N_SEQ, unified, flash, threads);
        for (int round = 0; round < 2; round++) { // the second one finds used cells that have been freed
            std::vector<ContextPtr> alone;
            for (int seq = 0; seq < N_SEQ; seq++) {
                alone.push_back(make_context(model.get(), 1, false, flash, 1));
            }
            for (const auto & batch : batches) {
                const auto got = decode(together.get(), batch, n_vocab, -1);
                for (size_t i = 0; i < batch.size(); i++) {
                    const auto wanted = decode(alone[batch[i].seq].get(), { batch[i] }, n_vocab, 0)[0];
                    const float off = worst_difference(got[i], wanted);
                    worst = std::max(worst, off);
                    compared++;
                    if (!(off <= BOUND)) {
                        failed++;
                        printf("unified %d, flash attention %d, %d threads, sequence %d at %d: off by %g\n", unified,
                               flash, threads, batch[i].seq, batch[i].start + batch[i].n, off);
                    }
                }
            }
            for (int seq = N_SEQ - 1; seq >= 0; seq -= 2) {
                llama_memory_seq_rm(llama_get_memory(together.get()), seq, -1, -1);
            }
            for (int seq = 0; seq < N_SEQ; seq += 2) {
                llama_memory_seq_rm(llama_get_memory(together.get()), seq, -1, -1);
            }
        }
    }
    printf("logits are off by %.3g at most\n%d of %d cases failed\n", worst, failed, compared);
    llama_backend_free();
    return failed > 0;
}
