"""Equal bits: finds the reason why a row's logits may depend on the other rows of a pass, if there is one. Pure Python.

docs/equality.md promises equal bits, and benchmarks/equality.py --bits measures them.
"""

from __future__ import annotations

from collections import Counter

from llamabatch.config import ResolvedConfig
from llamabatch.gguf.reader import TensorInfo
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.weights import multiplied, repacked_by

# The kernel of native_patches/0003 reads these types. Other types have llama.cpp's own kernel. Its order of summing
# depends on the number of rows.
_KV_TYPES = ("f32", "f16", "bf16", "q8_0")
# Equal bits need heads with a multiple of 16 elements, because a vector register has at most 16 f32. Heads of other
# sizes use the kernel of native_patches/0003 only with three or more queries.
_HEAD_MULTIPLE = 16
# Without repacking, each of these types has one kernel for any number of rows: llamafile's or a dot product.
_PLAIN = frozenset({"F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", "MXFP4"})
# For these types, ggml-cpu/tiled computes eight or more rows, and a dot product computes fewer. Their orders of summing
# differ.
_TILED = frozenset({"Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"})
# Keys: repacked types with a separate kernel for a single row. Values: the CPU feature required for equal bits.
_ALONE = {"Q2_K": "nothing known", "Q4_K": "avx512", "IQ4_NL": "avx512", "MXFP4": "avx512"}

# These architectures attend over a window, or in chunks, even where their files do not say so.
_WINDOWS = ("gemma2", "gemma3", "llama4", "exaone4", "plamo3", "smallthinker")
# Keys: architectures whose attention sums in an order that depends on the rows of a pass (llama.cpp's src/models).
# Values: the kind of attention, for messages.
_BY_PASS = {
    "minimax-01": "linear attention, which sums the tokens of a pass together",
    "minimax-m3": "attention to chosen blocks, which takes other kernels where each sequence has one row",
}

Problem = tuple[str, str]  # the reason in words, and the remedy or ""


def dependence(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> str | None:
    """Returns the reason why a row's logits may depend on other rows, and a remedy if there is one; None: no reason."""
    found = _of_engine(facts, config, machine) or _of_model(facts) or _of_weights(facts, machine)
    if found is None and "prompts" in facts.features and not config.batch_invariant:  # native_patches/0020
        found = (
            "prompts have kernels of their own on this CPU, so that an answer has other bits where a later prompt "
            "repeats it",
            "batch_invariant=True computes all rows alike, and reads prompts more slowly",
        )
    return None if found is None else "; ".join(part for part in found if part)


def _of_engine(facts: ModelFacts, config: ResolvedConfig, machine: Machine) -> Problem | None:
    if machine.n_gpus and (config.n_gpu_layers or config.op_offload):
        return "a GPU chooses its kernels by the number of rows", "devices='none' computes all on the CPU"
    if not machine.equal_rows:
        what = "this llama.cpp computes a row alone by other kernels than beside others"
        return what, "on x86 with AVX2, `llamabatch build` makes one that does not"
    if config.kv == "unified":
        return "kv is 'unified', where the keys of a sequence lie among those of others", "give kv='split'"
    plain = config.flash_attn == "off" and config.type_k == config.type_v == "f16"
    if config.flash_attn != "on" and not plain:
        return f"flash_attn is {config.flash_attn!r}", "give flash_attn='on'"
    for name in ("type_k", "type_v"):
        kind = getattr(config, name)
        if kind not in _KV_TYPES:
            return f"{name} is {kind!r}", f"give one of {', '.join(_KV_TYPES)}"
    return None


def _of_model(facts: ModelFacts) -> Problem | None:
    if facts.is_encoder:
        return f"{facts.name} is an encoder, which computes several texts as one sequence of tokens", ""
    if facts.widths is None or not facts.tensors:
        return f"the tensors of {facts.name} are not known", ""
    if facts.widths.masks > 1 or facts.arch.startswith(_WINDOWS):
        return f"{facts.name} attends over a window, whose cells are used again in an order that others change", ""
    if facts.widths.latent:
        return f"{facts.name} has latent attention, which goes through other kernels where a row is alone", ""
    if facts.arch in _BY_PASS:
        return f"{facts.name} has {_BY_PASS[facts.arch]}", ""
    odd = next((n for n in facts.head_sizes if n % _HEAD_MULTIPLE), None)
    if odd is not None:
        return f"{facts.name} has attention heads of {odd} elements, which is no multiple of {_HEAD_MULTIPLE}", ""
    return None


def _of_weights(facts: ModelFacts, machine: Machine) -> Problem | None:
    placed = {name for name, _ in facts.placed}
    tied = all(tensor.name != "output.weight" for tensor in facts.tensors)
    problems: Counter[Problem] = Counter()
    for tensor in multiplied(facts.tensors):
        features = frozenset() if tensor.name in placed else facts.features
        found = _of_tensor(tensor, features, tied, machine)
        if found is not None:
            problems[found] += 1
    if not problems:
        return None
    (what, cure), count = problems.most_common(1)[0]
    named = "1 matrix" if count == 1 else f"{count:,} matrices"
    return f"{named} of {what}", cure


def _of_tensor(tensor: TensorInfo, features: frozenset[str], tied: bool, machine: Machine) -> Problem | None:
    kind = tensor.type_name
    by = repacked_by(tensor, features, tied)
    if by in ("amx", "wide", "wide8"):
        return None
    if by is not None:
        needed = _ALONE.get(kind)
        if needed is None or needed in features:
            return None
        where = " on CPUs without AVX-512" if needed == "avx512" else ""
        return f"{kind} have a kernel of their own for a single row{where}", ""
    if kind in _PLAIN:
        return None
    if kind in _TILED:
        if not machine.tiled:
            return None
        cure = "GGML_CPU_TILED_MM=0 in the environment takes the kernel for few rows always"
        return f"{kind} take another kernel from 8 rows on", cure
    return f"{kind} have not been tried", ""
