"""ResolvedConfig leaves no choice open, and a child gets only what a caller could write."""

import copy
import inspect
import pickle
import re
from dataclasses import fields, replace

import pytest

from llamabatch import LLM, AsyncLLM
from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.config.names import ALIASES, AS_HERE
from llamabatch.errors import ConfigError, UnknownOptionError
from llamabatch.testing import FakeAsyncLLM, FakeLLM
from tests.unit.configs import resolved


@pytest.mark.parametrize(
    "options",
    [{name: "auto"} for name in ("strategy", "kv", "pooling", "n_slots", "kv_cells")]
    + [{"n_ctx": "fit"}, {"kv": "unified"}, {"kv_cells": 4096}],
)
def test_an_open_choice_is_refused(options):
    with pytest.raises(ConfigError, match=" is "):
        resolved(**options)


@pytest.mark.parametrize("layout", [{}, {"kv": "unified", "kv_cells": 8192}])
def test_the_requested_options_are_those_of_a_caller(layout):
    config = resolved(n_slots=3, **layout)
    requested = config.requested()
    assert type(requested) is EngineConfig
    assert requested.kv_cells == layout.get("kv_cells", "auto")
    assert all(getattr(requested, f.name) == getattr(config, f.name) for f in fields(config) if f.name != "kv_cells")
    assert requested.requested() is requested


def test_both_have_the_same_options_in_the_same_order():
    assert [f.name for f in fields(ResolvedConfig)] == [f.name for f in fields(EngineConfig)]


def test_one_engine_of_several_has_its_share_of_the_slots():
    config = resolved(n_slots=5, start_slots=3, instances=2)
    one = config.for_one_engine()
    assert (one.n_slots, one.start_slots, one.instances) == (3, 2, 1)
    children = replace(config, strategy="multi-instance")
    assert children.for_one_engine() is children


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"rope_scaling": "dynamic"}, "rope_scaling is 'dynamic'.*known: none, linear, yarn, longrope"),
        ({"rope_freq_scale": 0}, "rope_freq_scale is 0; it must lie from 1e-06 to 1000, or None"),
        ({"rope_freq_base": float("nan")}, "rope_freq_base is nan"),
        ({"yarn_orig_ctx": 0}, "yarn_orig_ctx is 0; give a whole number from 1"),
        ({"rope_scaling": "none", "rope_freq_scale": 0.5}, "rope_freq_scale is 0.5, but rope_scaling is 'none'"),
        ({"rope_scaling": "linear", "yarn_beta_fast": 8}, "yarn_beta_fast is 8; it is for rope_scaling='yarn'"),
        ({"rope_scaling": "yarn", "yarn_attn_factor": 2}, "yarn_attn_factor is 2; llama.cpp works it out"),
        ({"numa": "mirror"}, "numa is 'mirror'.*distribute"),
        ({"use_mlock": 1}, "use_mlock is 1; give True or False"),
        ({"n_cpu_moe": -1}, "n_cpu_moe is -1; give a whole number from 0 to 512"),
        ({"cpu_moe": "yes"}, "cpu_moe is 'yes'"),
    ],
)
def test_options_of_placement_and_positions_name_what_is_wrong(options, reason):
    with pytest.raises(ConfigError, match=reason):
        EngineConfig("m", **options)


def test_yarn_without_extrapolation_takes_a_factor_for_attention():
    config = EngineConfig("m", rope_scaling="yarn", yarn_ext_factor=0, yarn_attn_factor=2, yarn_orig_ctx=512)
    assert (config.yarn_attn_factor, config.changes_rope) == (2.0, True)
    assert EngineConfig("m").changes_rope is False


def test_numa_may_be_a_bool_as_for_llama_cpp():
    for given, wanted in ((True, "distribute"), (False, "off"), ("numactl", "numactl")):
        assert EngineConfig.from_options("m", {"numa": given}).numa == wanted


def test_the_experts_of_layers_stand_behind_the_patterns():
    config = EngineConfig("m", override_tensor="attn=CUDA0", n_cpu_moe=2)
    experts = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
    assert config.tensor_overrides == (
        ("attn", "CUDA0"), (rf"blk\.0{experts}", "CPU"), (rf"blk\.1{experts}", "CPU"),
    )  # fmt: skip
    assert EngineConfig("m", n_cpu_moe=2, cpu_moe=True).tensor_overrides == ((experts, "CPU"),)


def test_the_draft_model_shares_no_cells_guesses_nothing_and_has_its_file_as_it_is():
    own = {"rope_freq_scale": 0.5, "kv_overrides": {"a": 1}, "override_tensor": {"x": "CPU"}, "numa": "isolate"}
    config = resolved(kv="unified", kv_cells=8192, speculate="draft", draft_model="tiny", **own)
    draft = config.for_draft_model()
    assert (draft.kv, draft.kv_cells, draft.speculate, draft.draft_model) == ("split", 0, "off", None)
    assert (draft.rope_freq_scale, draft.kv_overrides, draft.tensor_overrides) == (None, (), ())
    assert draft.numa == "isolate"  # numa is an option of the whole process


def test_names_of_other_libraries_are_understood_as_keywords():
    ours = EngineConfig("m.gguf", n_ctx=2048, n_slots=16, type_k="q8_0", flash_attn="on", pooling="mean")
    theirs = EngineConfig(
        model_path="m.gguf", max_model_len=2048, max_num_seqs=16, type_k=8, flash_attn=True, pooling_type=1,
        rope_scaling_type=-1, max_num_batched_tokens=None,
    )  # fmt: skip
    assert theirs == ours == EngineConfig.from_options("m.gguf", {"max_model_len": 2048, "max_num_seqs": 16,
        "cache_type_k": "q8_0", "flash_attn": True, "pooling": "mean"})  # fmt: skip
    assert pickle.loads(pickle.dumps(ours)) == copy.deepcopy(ours) == replace(theirs)
    assert set(ALIASES.values()) <= {f.name for f in fields(EngineConfig)}
    assert not {*ALIASES, *AS_HERE} & {f.name for f in fields(EngineConfig)}


@pytest.mark.parametrize("kind", [LLM, AsyncLLM, FakeLLM, FakeAsyncLLM, EngineConfig])
def test_an_unknown_option_names_the_nearest(kind):
    with pytest.raises(UnknownOptionError, match=r"'n_slot'.*'n_slots'"):
        kind(model="tiny", n_slot=4)
    for error in (TypeError, ConfigError, ValueError):
        assert issubclass(UnknownOptionError, error)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": -1}, "seed is -1; give a whole number from 0"),
        ({"verbose": True}, 'logging.getLogger("llamabatch.llama_cpp")'),
        ({"lora_path": "a.gguf"}, "give adapters={'name': path}"),
        ({"gpu_memory_utilization": 0.9}, "n_slots and n_ctx say how much"),
        ({"temperature": 0.9}, "it belongs to a request; give generate(..., SamplingParams(temperature=…))"),
        ({"tensor_parallel_size": 2}, "tensor_split=(1, 1)"),
        ({"quantization": "awq"}, "hf:owner/repo:Q4_K_M"),
        ({"max_num_seqs": 2, "n_slots": 2}, "n_slots is given twice, once as 'max_num_seqs'"),
        ({"n_slots": 2, "max_num_seqs": 2}, "n_slots is given twice, once as 'max_num_seqs'"),
        ({"max_model_le": 2}, "did you mean 'max_model_len'"),
        ({"max_model_len": 1}, "max_model_len (here n_ctx) is 1; give a whole number from 32"),
    ],
)
def test_what_means_another_thing_is_refused_with_what_to_use(options, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        FakeLLM("tiny", **options)


def test_an_option_that_asks_for_what_happens_anyway_is_understood():
    given = {"verbose": False, "tensor_parallel_size": 1, "dtype": "auto", "trust_remote_code": True}
    assert EngineConfig("m", **given) == EngineConfig("m")
    with pytest.raises(UnknownOptionError, match="tensor_parallel_size is True"):
        EngineConfig("m", tensor_parallel_size=True)


@pytest.mark.parametrize("kind", [FakeLLM, FakeAsyncLLM])
def test_an_entry_point_takes_other_names_and_keeps_its_signature(kind):
    llm = kind(model_path="some.gguf", max_num_seqs=3)
    assert llm._fake.plan.config.n_slots == 3
    assert next(iter(inspect.signature(kind).parameters)) == "model"
    assert list(inspect.signature(EngineConfig).parameters) == [f.name for f in fields(EngineConfig)]
    with pytest.raises(TypeError, match="multiple values for argument 'model'"):
        kind("some.gguf", model_path="other.gguf")


@pytest.mark.parametrize("kind", [LLM, AsyncLLM])
def test_no_model_is_a_type_error_as_ever(kind):
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'model'"):
        kind(n_slots=2)
