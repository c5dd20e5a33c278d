#pragma once

#include "ggml.h"

#ifdef __cplusplus
extern "C" {
#endif

struct ggml_compute_params;

// Flash attention that handles all the query heads, and neighbouring rows, that share a KV head together.
//
// dst->src[5], if it is there: I64 [rows], the cell of each query row among those of all streams, which tells the stream
// whose keys it sees. K and V are then views of the first stream with the others behind it, nb[3] bytes apart each, and
// ne[3] is 1 everywhere. The mask is that of the row's own stream. No other kernel knows it.

bool ggml_fattn_block_supported(const struct ggml_tensor * dst);

// bytes of work buffer for n_threads threads
size_t ggml_fattn_block_work_size(const struct ggml_tensor * dst, int n_threads);

void ggml_compute_forward_fattn_block(const struct ggml_compute_params * params, struct ggml_tensor * dst);

#ifdef __cplusplus
}
#endif
