// Ubatches of any tokens of any sequences on a split KV cache, and where a context can have them.

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"
#include "llama-kv-cache.h"

#include <algorithm>
#include <set>
#include <vector>

llama_ubatch llama_batch_allocr::split_ragged(uint32_t n_ubatch) {
    std::vector<int32_t> idxs;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        if (!used[i]) {
            idxs.push_back(i);
        }
    }
    if (idxs.empty()) {
        return {};
    }

    std::stable_sort(idxs.begin(), idxs.end(),
                     [&](int32_t a, int32_t b) { return batch.seq_id[a][0] < batch.seq_id[b][0]; });
    idxs.resize(std::min<size_t>(idxs.size(), n_ubatch));
    for (const int32_t idx : idxs) {
        used[idx] = true;
    }
    n_used += idxs.size();
    return ubatch_add(idxs, idxs.size(), false);
}

bool llama_batch_allocr::is_ragged() const {
    if (has_cpl) {
        return false;
    }
    std::vector<int32_t> counts;
    for (int32_t i = 0; i < batch.n_tokens; ++i) {
        const int32_t next = batch.seq_id[i][0] - batch.seq_id[0][0];
        if (next < 0 || next > (int32_t) counts.size()) {
            return true;
        }
        counts.resize(std::max<size_t>(counts.size(), next + 1));
        counts[next]++;
    }
    return std::any_of(counts.begin(), counts.end(), [&](int32_t n) { return n != counts[0]; });
}

// Flash attention in all layers, over K and V as they lie in the cache, by kernels that look up the stream of each row:
// those of the CPU that say so. Any other backend could take the op, which it does not know in this form. A cache of one
// stream answers as one of several: contexts are replaced by larger ones.
void llama_kv_cache::set_ragged(const llm_graph_result & reserved, const std::vector<ggml_backend_t> & backends) {
    ragged = false;
    if (other) {
        return;
    }
    for (ggml_backend_t backend : backends) {
        if (ggml_backend_dev_type(ggml_backend_get_device(backend)) != GGML_BACKEND_DEVICE_TYPE_CPU) {
            return;
        }
    }

    std::set<int> found;
    for (const auto & node : reserved.get_fused_nodes()) {
        if (node.op != LLM_FUSED_OP_FLASH_ATTN) {
            continue;
        }
        ggml_tensor op = *node.tensor;
        ggml_tensor q = *op.src[0];
        ggml_tensor k = *op.src[1];
        ggml_tensor v = *op.src[2];
        if (k.view_src != get_k_storage(node.il) || v.view_src == nullptr || v.view_src == k.view_src) {
            return; // a copy in another type, or V as a part of K
        }
        q.ne[1] = 1; // the kernel that takes one row takes any number
        q.ne[3] = k.ne[3] = v.ne[3] = 1;
        op.src[0] = &q;
        op.src[1] = &k;
        op.src[2] = &v;
        op.src[5] = op.src[3]; // anything but nullptr
        if (!ggml_backend_supports_op(backends.back(), &op)) {
            return;
        }
        found.insert(node.il);
    }
    ragged = found.size() == layers.size();
}

bool llama_takes_ragged(const llama_context * ctx) {
    const auto * kv = dynamic_cast<llama_kv_cache *>(llama_get_memory(ctx));
    return kv && kv->get_ragged();
}
