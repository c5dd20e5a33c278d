#pragma once

// Weights of an encoder in the layouts in which the CPU's kernels read the weights of models.

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

// True for the matrices of layers. Graphs read them in products alone; other weights are also copied, cut or transposed.
static inline bool clip_is_layer_matrix(const ggml_tensor * t) {
    static const std::array<const char *, 8> ROLES = { "attn_q",   "attn_k", "attn_v",   "attn_qkv",
                                                       "attn_out", "ffn_up", "ffn_gate", "ffn_down" };
    char role[GGML_MAX_NAME];
    int n_read = 0;
    if (ggml_n_dims(t) != 2 || sscanf(t->name, "%*1[av].blk.%*d.%63[a-z_]%n", role, &n_read) != 1 ||
        strcmp(t->name + n_read, ".weight") != 0) {
        return false;
    }
    return std::any_of(ROLES.begin(), ROLES.end(), [&](const char * each) { return strcmp(each, role) == 0; });
}

// True if a device has a kernel for products with a weight in buffers of this type.
static inline bool clip_multiplies(ggml_backend_dev_t dev, ggml_backend_buffer_type_t buft, ggml_tensor * weight) {
    const ggml_init_params params = { ggml_tensor_overhead() * 2, nullptr, true };
    const ggml_context_ptr ctx(ggml_init(params));
    ggml_tensor * input = ggml_new_tensor_2d(ctx.get(), GGML_TYPE_F32, weight->ne[0], 512);
    ggml_tensor * op = ggml_mul_mat(ctx.get(), weight, input);
    const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(buft, 0));
    weight->buffer = empty.get();
    const bool can = ggml_backend_dev_supports_op(dev, op);
    weight->buffer = nullptr;
    return can;
}

// Allocates the matrices of the layers in the first of the CPU's buffer types that multiplies them, as llama_model does.
// Other weights stay without memory.
static inline std::vector<ggml_backend_buffer_ptr> clip_alloc_repacked(ggml_context * ctx, ggml_backend_dev_t dev) {
    std::vector<ggml_backend_buffer_ptr> made;
    const auto extra_bufts = (ggml_backend_dev_get_extra_bufts_t) ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(dev), "ggml_backend_dev_get_extra_bufts");
    for (ggml_backend_buffer_type_t * buft = extra_bufts ? extra_bufts(dev) : nullptr; buft && *buft; ++buft) {
        std::vector<ggml_tensor *> weights;
        size_t size = 0;
        for (ggml_tensor * t = ggml_get_first_tensor(ctx); t; t = ggml_get_next_tensor(ctx, t)) {
            if (!t->buffer && clip_is_layer_matrix(t) && clip_multiplies(dev, *buft, t)) {
                weights.push_back(t);
                size += GGML_PAD(ggml_backend_buft_get_alloc_size(*buft, t), ggml_backend_buft_get_alignment(*buft));
            }
        }
        if (weights.empty()) {
            continue;
        }
        made.emplace_back(ggml_backend_buft_alloc_buffer(*buft, size));
        if (!made.back()) {
            throw std::runtime_error("no memory for the weights of the encoder");
        }
        ggml_backend_buffer_set_usage(made.back().get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_tallocr allocator = ggml_tallocr_new(made.back().get());
        for (ggml_tensor * t : weights) {
            ggml_tallocr_alloc(&allocator, t);
        }
    }
    return made;
}
