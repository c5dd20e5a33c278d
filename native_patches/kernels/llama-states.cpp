// Recurrent states that are computed in the cells in which they lie, instead of being copied out, computed, and copied
// back: by an operation that alone reads them, where none is to move and a CPU computes.

#include "llama-graph.h"
#include "llama-memory-recurrent.h"

bool llama_memory_recurrent_context::stays() const {
    if (is_full || mem->n_rs_seq != 0) { // a snapshot is written beside the state
        return false;
    }
    for (uint32_t i = mem->head; i < mem->head + mem->n; ++i) {
        if (mem->cells[i].src0 != (int32_t) i) {
            return false;
        }
    }
    return true;
}

bool llm_graph_context::rs_in_place(const llm_graph_input_rs * inp) const {
    return inp->stays && cparams.fused_gdn_ar && cparams.fused_gdn_ch && ggml_backend_sched_get_n_backends(sched) == 1;
}

ggml_tensor * llm_graph_context::build_rs_in_place(llm_graph_input_rs * inp, ggml_tensor * s, int32_t state_size,
                                                   int32_t n_seqs) const {
    if (!rs_in_place(inp)) {
        return build_rs(inp, s, state_size, n_seqs);
    }
    if (inp->rs_z >= 0) { // of a new sequence
        ggml_tensor * zero = ggml_view_1d(ctx0, s, state_size, inp->rs_z * s->nb[1]);
        ggml_build_forward_expand(gf, ggml_scale_inplace(ctx0, zero, 0));
    }
    return ggml_view_2d(ctx0, s, state_size, n_seqs, s->nb[1], inp->head * s->nb[1]);
}

ggml_tensor * llm_graph_context::write_in_place(ggml_tensor * op, int64_t n_output) {
    op->op_params[1] = 1; // the states are written where they are read, and not behind the output
    if (ggml_n_dims(op) == 1) {
        op->ne[0] = n_output;
    } else {
        op->ne[1] = n_output / op->ne[0];
    }
    for (int i = 1; i < GGML_MAX_DIMS; ++i) {
        op->nb[i] = op->nb[i - 1] * (i == 1 ? op->ne[0] : op->ne[i - 1]);
    }
    return op;
}
