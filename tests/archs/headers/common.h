// What llama.cpp's test-llama-archs.cpp takes from its common library, in place of that library. To write models it
// calls none of it.

#pragma once

#include "llama.h"

#include <cstdlib>

inline void common_init() {}

struct common_batch {
    explicit common_batch(llama_context *) {}
    void add(llama_token, llama_pos, llama_seq_id, bool) { abort(); }
    void clear() { abort(); }
    llama_batch_ext * get() { abort(); }
};
