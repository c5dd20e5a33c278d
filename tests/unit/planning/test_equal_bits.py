"""The plan's line about equal bits, from made-up facts."""

import re
from dataclasses import replace

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError
from llamabatch.gguf.reader import TENSOR_TYPES, TensorInfo
from llamabatch.planning.capacity import resolve
from llamabatch.planning.compute_buffers import Widths
from llamabatch.planning.equal_bits import dependence
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import Layer, ModelFacts
from llamabatch.planning.weights import multiplied
from tests.unit.configs import resolved

GIB = 2**30
NUMBERS = {name: number for number, (name, *_) in TENSOR_TYPES.items()}
AVX512 = frozenset({"avx2", "avx512", "rows", "vnni512"})
MACHINE = Machine(4, 8 * GIB, fast_attention=True, features=AVX512, equal_rows=True)
CONFIG = resolved(flash_attn="on")


def model(kind="Q8_0", *, expert="", **changes):
    names = {"token_embd.weight": kind, "blk.0.attn_q.weight": kind, "blk.0.attn_norm.weight": "F32"}
    tensors = [
        TensorInfo(name, (512, 512) if "norm" not in name else (512,), NUMBERS[t], 0, 1000) for name, t in names.items()
    ]
    if expert:
        tensors.append(TensorInfo("blk.0.ffn_up_exps.weight", (512, 512, 4), NUMBERS[expert], 0, 1000))
    return ModelFacts(
        "m", 1000, 64, 64, 512, 8, 1000, 4096, layers=(Layer(64, 64),), tensors=tuple(tensors), features=AVX512,
        widths=Widths(512, 1000, 8, 512, 128, 512), arch="llama", head_sizes=(64, 64),
        **changes,
    )  # fmt: skip


def test_the_usual_engine_has_equal_bits():
    assert dependence(model(), replace(CONFIG, flash_attn="off"), MACHINE) is None
    for kind in ("F32", "F16", "BF16", "Q4_0", "Q4_K", "Q6_K", "Q8_0", "IQ4_NL", "MXFP4"):
        assert dependence(model(kind), CONFIG, MACHINE) is None, kind


def test_kernels_for_prompts_need_the_promise():
    features = AVX512 | {"amx", "wide", "prompts"}
    why_not = dependence(replace(model(), features=features), CONFIG, MACHINE)
    assert why_not is not None
    assert "prompts have kernels of their own" in why_not
    assert "batch_invariant=True" in why_not
    promised = replace(CONFIG, batch_invariant=True)
    assert dependence(replace(model(), features=features), promised, MACHINE) is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv": "unified", "kv_cells": 4096}, "kv is 'unified'"),
        ({"flash_attn": "off", "type_k": "f32"}, "flash_attn is 'off'; give flash_attn='on'"),
        ({"flash_attn": "auto"}, "flash_attn is 'auto'; give flash_attn='on'"),
        ({"type_v": "q4_0"}, "type_v is 'q4_0'; give one of"),
    ],
)
def test_options_that_forbid_it(changes, words):
    assert words in dependence(model(), replace(CONFIG, **changes), MACHINE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"equal_rows": False}, "computes a row alone by other kernels"),
        ({"n_gpus": 1}, "a GPU chooses its kernels.*devices='none'"),
    ],
)
def test_machines_that_forbid_it(changes, words):
    with pytest.raises(ConfigError, match=f"batch_invariant is True, but .*{words}"):
        resolve(EngineConfig("m", n_slots=2, batch_invariant=True), model(), replace(MACHINE, **changes))
    plan = resolve(EngineConfig("m", n_slots=2), model(), replace(MACHINE, **changes))
    assert plan.reasons["batch_invariant"].startswith("equal bits: no, because ")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (model(is_encoder=True), "m is an encoder"),
        (replace(model(), arch="gemma3"), "attends over a window"),
        (replace(model(), widths=replace(model().widths, masks=2)), "attends over a window"),
        (replace(model(), widths=replace(model().widths, latent=True)), "latent attention"),
        (replace(model(), arch="minimax-01"), "linear attention, which sums the tokens of a pass together"),
        (replace(model(), arch="minimax-m3"), "attention to chosen blocks"),
        (replace(model(), head_sizes=(40, 40)), "heads of 40 elements.*multiple of 16"),
        (replace(model(), tensors=()), "tensors of m are not known"),
        (model("TQ1_0"), "2 matrices of TQ1_0 have not been tried"),
        (model("Q2_K"), "2 matrices of Q2_K have a kernel of their own"),
        (model("Q5_K"), "2 matrices of Q5_K take another kernel from 8 rows on; GGML_CPU_TILED_MM=0"),
        (model(expert="Q6_K"), "1 matrix of Q6_K take another kernel"),
        (replace(model("Q4_K"), features=frozenset({"avx2", "rows"})), "CPUs without AVX-512"),
        (replace(model("Q6_K"), placed=(("blk.0.attn_q.weight", None),)), "1 matrix of Q6_K"),
    ],
)
def test_models_that_forbid_it(facts, words):
    assert re.search(words, dependence(facts, CONFIG, MACHINE) or "equal")


def test_without_the_tiled_kernel_k_quants_have_equal_bits():
    assert dependence(model("Q5_K", expert="Q6_K"), CONFIG, replace(MACHINE, tiled=False)) is None
    assert dependence(model("Q5_K"), CONFIG, replace(MACHINE)) is not None
    amx = replace(model("Q5_K"), features=AVX512 | {"amx"})
    assert dependence(amx, CONFIG, MACHINE) is None


def test_columns_by_sixteen_have_equal_bits():
    wide = AVX512 | {"wide"}
    assert dependence(replace(model("Q5_K", expert="Q6_K"), features=wide), CONFIG, MACHINE) is None
    assert dependence(replace(model("Q4_K"), features=frozenset({"avx2", "wide"})), CONFIG, MACHINE) is None


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"])
def test_columns_by_eight_have_equal_bits(kind):
    features = frozenset({"avx2", "rows", "wide8"})
    assert dependence(replace(model(kind), features=features), CONFIG, MACHINE) is None


def test_the_option_chooses_the_split_cache_and_our_attention():
    few = replace(MACHINE, available_bytes=90 * 2**20)
    facts = replace(model(), k_values=10_000, v_values=10_000, layers=(Layer(500, 500),))
    assert resolve(EngineConfig("m", "batched", n_ctx=4096), facts, few).config.kv == "unified"
    found = resolve(EngineConfig("m", "batched", n_ctx=4096, batch_invariant=True), facts, few)
    assert (found.config.kv, found.config.flash_attn) == ("split", "on")
    assert found.reasons["kv"].startswith("batch_invariant")
    with pytest.raises(ConfigError, match="kv is 'unified'"):
        resolve(EngineConfig("m", n_ctx=64, kv_cells=256, batch_invariant=True), facts, MACHINE)


def test_norms_and_untied_embeddings_are_no_matrices():
    tensors = model().tensors
    assert [tensor.name for tensor in multiplied(tensors)] == ["token_embd.weight", "blk.0.attn_q.weight"]
    untied = (*tensors, TensorInfo("output.weight", (512, 512), NUMBERS["F16"], 0, 1))
    assert [tensor.name for tensor in multiplied(untied)] == ["blk.0.attn_q.weight", "output.weight"]
