"""ResolvedConfig: no choice is left open, and what crosses to a child is what a caller could write."""

from dataclasses import fields, replace

import pytest

from llamabatch.config import EngineConfig, ResolvedConfig
from llamabatch.errors import ConfigError
from tests.unit.configs import resolved


@pytest.mark.parametrize(
    "options",
    [
        {name: "auto"}
        for name in ("strategy", "kv", "n_slots", "n_ctx", "n_ubatch", "n_threads", "instances", "kv_cells")
    ]
    + [{"kv": "unified"}, {"kv_cells": 4096}],
)
def test_an_open_choice_is_refused(options):
    with pytest.raises(ConfigError, match=" is "):
        resolved(**options)


@pytest.mark.parametrize("layout", [{}, {"kv": "unified", "kv_cells": 8192}])
def test_the_asked_options_are_those_of_a_caller(layout):
    config = resolved(n_slots=3, **layout)
    asked = config.asked()
    assert type(asked) is EngineConfig
    assert asked.kv_cells == layout.get("kv_cells", "auto")
    assert all(getattr(asked, f.name) == getattr(config, f.name) for f in fields(config) if f.name != "kv_cells")
    assert asked.asked() is asked


def test_both_have_the_same_options_in_the_same_order():
    assert [f.name for f in fields(ResolvedConfig)] == [f.name for f in fields(EngineConfig)]


def test_the_draft_model_shares_no_cells_and_guesses_nothing():
    config = resolved(kv="unified", kv_cells=8192, speculate="draft", draft_model="tiny")
    draft = config.for_draft_model()
    assert (draft.kv, draft.kv_cells, draft.speculate, draft.draft_model) == ("split", 0, "off", None)


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


def test_the_draft_model_has_its_file_as_it_is():
    config = resolved(rope_freq_scale=0.5, kv_overrides={"a": 1}, override_tensor={"x": "CPU"}, numa="isolate")
    draft = config.for_draft_model()
    assert (draft.rope_freq_scale, draft.kv_overrides, draft.tensor_overrides) == (None, (), ())
    assert draft.numa == "isolate"  # of the whole process
