"""Defects of native_patches: the kernels, and the compiled sampler."""

from tests.defects import Defect

DEFECTS = (
    # attention: kernels/fattn-*
    Defect(
        what="Gemma 2: unless a unit of a prompt has a multiple of eight queries, its last keys get no soft cap.",
        file="native_patches/kernels/fattn-block.cpp",
        old="ggml_vec_tanh_f32(x.n * lanes, u.KQ, u.KQ);",
        new="ggml_vec_tanh_f32(x.n * (end - first), u.KQ, u.KQ);",
        tests=("tests/model/test_kernels.py", "tests/model/test_equal_bits.py", "tests/model/test_architectures.py"),
    ),
    Defect(
        what="gpt-oss: a head whose sink is above all of its scores gives too small a result.",
        file="native_patches/kernels/fattn-block.cpp",
        old="sum = sum * expf(max - top) + expf(sink - top);",
        new="sum = sum + expf(sink - top);",
        tests=("tests/model/test_kernels.py", "tests/model/test_archs.py"),
    ),
    Defect(
        what="A model with ALiBi and 12, 40 or 112 heads, no power of two, writes nonsense.",
        file="native_patches/kernels/fattn-block.cpp",
        old="powf(m1, 2 * (h - n_head_log2) + 1)",
        new="powf(m1, 2 * h - n_head_log2 + 1)",
        tests=("tests/model/test_kernels.py", "tests/model/test_archs.py"),
    ),
    Defect(
        what="With some numbers of threads a row does not see some hundred keys of a context beyond 1,024.",
        file="native_patches/kernels/fattn-block.cpp",
        old="u.c0 = p.n_ranges * split / p.n_splits * FA_RANGE;",
        new="u.c0 = p.n_ranges * FA_RANGE * split / p.n_splits;",
        tests=("tests/model/test_kernels.py", "tests/model/test_equal_bits.py"),
    ),
    Defect(
        what="The first token of a new prompt reads the keys and values of the request in the slot before it.",
        file="native_patches/kernels/fattn-block.cpp",
        old="uint64_t(cells[end] - stream * stream_size) < uint64_t(stream_size)",
        new="uint64_t(cells[end] - stream * stream_size) <= uint64_t(stream_size)",
        tests=("tests/model/test_ragged.py", "tests/model/test_kernels.py"),
    ),
    Defect(
        what="With a KV cache of Q8_0 decoding multiplies keys with the scales of their neighbours.",
        file="native_patches/kernels/fattn-few.h",
        old="d[l] = ((const block_q8_0 *) k[2 * l])[i / QK8_0].d;",
        new="d[l] = ((const block_q8_0 *) k[l])[i / QK8_0].d;",
        tests=("tests/model/test_kernels.py", "tests/model/test_ragged.py"),
    ),
    Defect(
        what="Heads of 80 or 40 values: the last eight of each are 0 in decoding.",
        file="native_patches/kernels/fattn-few.h",
        old="for (; i < dv; i += EPR) {",
        new="for (; i + EPR < dv; i += EPR) {",
        tests=("tests/model/test_kernels.py", "tests/model/test_archs.py"),
    ),
    # products of matrices: kernels/repack-*
    Defect(
        what="Q8_0: a layer of more than 4,096 inputs forgets the first 4,096 of them.",
        file="native_patches/kernels/repack-rows.h",
        old="std::min(nc - c, COLUMNS), b > 0);",
        new="std::min(nc - c, COLUMNS), b > most);",
        tests=("tests/model/test_kernels.py",),
    ),
    Defect(
        what="A prompt of more than 128 rows has wrong logits: later groups of rows get the results of the first.",
        file="native_patches/kernels/repack-wide.h",
        old="rows + r * row, row,",
        new="rows, row,",
        tests=("tests/model/test_kernels.py", "tests/model/test_equal_bits.py"),
    ),
    Defect(
        what="Mixtures of experts: with some numbers of threads the last columns of each expert are never computed.",
        file="native_patches/kernels/repack-wide.h",
        old="const int64_t last = strips * (params->ith + 1) / params->nth;",
        new="const int64_t last = strips / params->nth * (params->ith + 1);",
        tests=("tests/model/test_kernels.py", "tests/model/test_equal_bits.py"),
    ),
    Defect(
        what="Q4_K and Q5_K: the offsets of the later half of each super-block are wrong, and so are all texts.",
        file="native_patches/kernels/repack-wide.cpp",
        old="s < 4 ? q[s + 4] & 63 : q[s + 4] >> 4 | (q[s] >> 6) << 4;",
        new="s < 4 ? q[s + 4] & 63 : q[s + 4] >> 4 | (q[s - 4] >> 6) << 4;",
        tests=("tests/model/test_kernels.py",),
    ),
    Defect(
        what="Q6_K without VNNI: where large weights meet large inputs a sum overflows 16 bits, and the logits jump.",
        file="native_patches/kernels/repack-vector.h",
        old="fit = MOST > 63 ? 1 : MOST > 31 ? 2 : MOST > 15 ? 4 : 8;",
        new="fit = MOST > 63 ? 1 : MOST > 15 ? 4 : 8;",
        tests=("tests/model/test_kernels.py",),
        cpu="-avx512_vnni -avx_vnni",
    ),
    Defect(
        what="F16 and BF16: for exactly three rows most of a product stays what was in memory before.",
        file="native_patches/kernels/repack-floats.h",
        old="const int most = rows <= 2 ? 4 : STRIPS;",
        new="const int most = rows < 4 ? 4 : STRIPS;",
        tests=("tests/model/test_kernels.py", "tests/model/test_equal_bits.py", "tests/model/test_ragged.py"),
        cpu="-avx512f",
    ),
    # batches and words
    Defect(
        what="Prompts of unequal length that need more than one pass over the weights are refused.",
        file="native_patches/kernels/llama-ragged.cpp",
        old="n_used += idxs.size();",
        new="n_used = idxs.size();",
        tests=("tests/model/test_ragged.py", "tests/model/test_engine.py"),
    ),
    Defect(
        what="Spaces at the end of a prompt become two tokens where the model was trained with one (tekken, gpt-4o).",
        file="native_patches/kernels/unicode-regex.h",
        old="ok = in(i.set, at) != i.negative;",
        new="ok = at < n && in(i.set, at) != i.negative;",
        tests=("tests/model/test_long_words.py",),
    ),
    # the sampler
    Defect(
        what="presence_penalty punishes tokens that are in the prompt alone.",
        file="native_patches/sampler/row.hpp",
        old="        if (count > 0) {",
        new="        if (count >= 0) {",
        tests=("tests/unit/sampling/test_sampler_compiled.py", "tests/model/test_sampler_peer.py"),
    ),
    Defect(
        what="allowed_token_ids lets all tokens through that lie 32 or more beyond the highest allowed one.",
        file="native_patches/sampler/row.hpp",
        old="bits &= word < p.n_allowed_words ? p.allowed[word] : 0;",
        new="bits &= word < p.n_allowed_words ? p.allowed[word] : ~0u;",
        tests=("tests/unit/sampling/test_sampler_compiled.py", "tests/model/test_sampling.py"),
    ),
    Defect(
        what="Rows that ask for different numbers of top logprobs in a step get each other's tokens.",
        file="native_patches/sampler/sampler.cpp",
        old="const int64_t at = static_cast<int64_t>(i) * (most + 1);",
        new="const int64_t at = static_cast<int64_t>(i) * (ks[i] + 1);",
        tests=("tests/unit/sampling/test_row_logprobs.py", "tests/model/test_logprobs.py"),
    ),
    Defect(
        what="min_p=1 with top_k leaves no token, and an unlikely one comes; a token just at the limit is never drawn.",
        file="native_patches/sampler/sampler.cpp",
        old="return value >= lowest; });",
        new="return value > lowest; });",
        tests=("tests/unit/sampling/test_sampler_compiled.py", "tests/model/test_sampler_peer.py"),
    ),
    Defect(
        what="A token that is as likely as one of a lower id has the same rank as that one in logprobs.",
        file="native_patches/sampler/kernels.hpp",
        old="count += x[i] >= value;",
        new="count += x[i] > value;",
        tests=("tests/unit/sampling/test_row_logprobs.py",),
    ),
)
