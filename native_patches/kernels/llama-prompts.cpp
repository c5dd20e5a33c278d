// Which rows of a pass are of prompts: kernels that pay off for many rows take these, whatever their number, so that a row
// has the same bits alone and in company.

#include "llama-batch.h"
#include "llama-context.h"
#include "llama-graph.h"

#include "ggml-backend.h"

// The marks of all rows of a pass, and of those that are outputs: 0, or for a prompt's rows `mark`
class llm_graph_input_prompts : public llm_graph_input_i {
  public:
    llm_graph_input_prompts(uint32_t n_tokens, uint32_t n_outputs, int32_t mark)
        : n_tokens(n_tokens), n_outputs(n_outputs), mark(mark) {}

    void set_input(const llama_ubatch * ubatch) override {
        const std::vector<int8_t> * given = ubatch->data ? &ubatch->data->prompt : nullptr;
        const auto mark_of = [&](uint32_t i) { return given && i < given->size() && (*given)[i] ? mark : 0; };
        if (rows && rows->buffer) {
            for (uint32_t i = 0; i < n_tokens; ++i) {
                ((int32_t *) rows->data)[i] = mark_of(i);
            }
        }
        if (outputs && outputs->buffer) {
            uint32_t at = 0;
            for (uint32_t i = 0; i < n_tokens && at < n_outputs; ++i) {
                if (ubatch->output[i]) {
                    ((int32_t *) outputs->data)[at++] = mark_of(i);
                }
            }
        }
    }

    bool can_reuse(const llm_graph_params & params) override {
        return params.ubatch.n_tokens == n_tokens && params.n_outputs == n_outputs;
    }

    ggml_tensor * rows = nullptr;    // I32 [n_tokens]
    ggml_tensor * outputs = nullptr; // I32 [n_outputs]

    const uint32_t n_tokens;
    const uint32_t n_outputs;
    const int32_t mark;
};

// An operation with all rows of a pass, or with the outputs alone, gets their marks. Only CPUs read them. A mark is 2 where
// the weights, those of the first product, have more bits than BF16, which its inputs are rounded to elsewhere.
void llm_graph_context::mark_prompts(ggml_tensor * op, int64_t n_rows) const {
    if (ggml_backend_sched_get_n_backends(sched) != 1 || (n_rows != n_tokens && n_rows != n_outputs)) {
        return;
    }
    if (!inp_prompts) {
        const ggml_type type = op->src[0]->type;
        const int32_t mark = type == GGML_TYPE_F32 || type == GGML_TYPE_F16 ? 2 : 1;
        auto made = std::make_unique<llm_graph_input_prompts>(n_tokens, n_outputs, mark);
        inp_prompts = made.get();
        res->add_input(std::move(made));
    }
    ggml_tensor *& marks = n_rows == n_tokens ? inp_prompts->rows : inp_prompts->outputs;
    if (!marks) {
        marks = ggml_new_tensor_1d(ctx0, GGML_TYPE_I32, n_rows);
        ggml_set_input(marks);
    }
    op->src[op->op == GGML_OP_MUL_MAT ? 2 : op->op == GGML_OP_MUL_MAT_ID ? 3 : 6] = marks;
}

bool llama_takes_prompts(const llama_context * ctx) {
    if (ggml_backend_sched_get_n_backends(ctx->get_sched()) != 1) {
        return false;
    }
    auto * cpu = ggml_backend_dev_backend_reg(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU));
    auto * has = (bool (*)()) ggml_backend_reg_get_proc_address(cpu, "ggml_backend_cpu_has_prompts");
    return has && has();
}
