"""Profiles: when they hold, which options they fill in, and that a bad file counts as none."""

import json
import logging
import struct
from dataclasses import fields, replace

import pytest

from llamabatch.config import EngineConfig
from llamabatch.errors import ConfigError, SetupError
from llamabatch.gguf.shape import ModelShape, read_shape
from llamabatch.llama.environment import OnLoad, undecided
from llamabatch.planning import profile_store
from llamabatch.planning.capacity import resolve
from llamabatch.planning.machine import Machine
from llamabatch.planning.model_facts import ModelFacts
from llamabatch.planning.profile import Profile, ProfileKey, Stair

SHAPE = ModelShape("qwen2", "24", "896", "4864", "14", "2", 5, "7", 290, 530_000_000)
KEY = ProfileKey(SHAPE, "A CPU", "abc", 8, "1.0", "f16", "f16")
STAIRS = (Stair(1, 20.0), Stair(8, 40.0), Stair(16, 50.0), Stair(32, 80.0), Stair(64, 130.0))
PROFILE = Profile(KEY, "2026-01-02", "small", (), "on", "off", 3, 5, 1024, 5000, STAIRS)
FACTS = ModelFacts("small", 530_000_000, 24 * 2 * 64, 24 * 2 * 64, 896, 14, 151_936, 32_768)
MACHINE = Machine(cores=8, available_bytes=64 * 2**30)


# --- the shape of a file ------------------------------------------------------------------------------------------


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def pair(key, kind, body):
    return text(key) + struct.pack("<I", kind) + body


def gguf(*pairs):
    """Returns a file with two tensors of 8 numbers each."""
    tensors = b"".join(text(name) + struct.pack("<IQIQ", 1, 8, 0, at) for name, at in (("a", 0), ("b", 32)))
    header = struct.pack("<4sIQQ", b"GGUF", 3, 2, len(pairs)) + b"".join(pairs) + tensors
    return header + bytes(-len(header) % 32 + 64)


TEMPLATE = pair("tokenizer.chat_template", 8, text("x" * 100_000))
TAGS = pair("general.tags", 9, struct.pack("<IQ", 8, 2) + text("a") + text("b"))
LAYERS = [
    pair("general.architecture", 8, text("qwen2")),
    TAGS,
    pair("qwen2.block_count", 4, struct.pack("<I", 3)),
    pair("qwen2.embedding_length", 4, struct.pack("<I", 64)),
    pair("qwen2.attention.head_count", 4, struct.pack("<I", 8)),
    pair("qwen2.attention.head_count_kv", 9, struct.pack("<IQ", 5, 3) + struct.pack("<3i", 2, 2, 4)),
    TEMPLATE,
    pair("general.file_type", 4, struct.pack("<I", 7)),
]
TOKENS = pair("tokenizer.ggml.tokens", 9, struct.pack("<IQ", 8, 300) + text("a") * 300)
WHOLE = gguf(*LAYERS, TOKENS)


@pytest.mark.parametrize("pairs", [(*LAYERS, TOKENS), (TOKENS, *LAYERS)], ids=["behind", "in front"])
def test_the_shape_is_read_wherever_the_vocabulary_stands(pairs, tmp_path):
    """llama.cpp's converter for llama2.c writes the vocabulary first."""
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(*pairs))
    assert read_shape(path) == ModelShape("qwen2", "3", "64", "", "8", "2,2,4", 300, "7", 2, len(WHOLE))


# --- keys and files -----------------------------------------------------------------------------------------------


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "m.gguf"
    path.write_bytes(WHOLE)
    return path


def kept(model, **changes):
    profile = replace(PROFILE, key=profile_store.key_of(model, EngineConfig("m")), **changes)
    return profile, profile_store.keep(profile)


def test_every_part_of_a_key_and_of_its_shape_counts():
    def others(one):
        values = {field.name: getattr(one, field.name) for field in fields(one) if field.name != "shape"}
        return [replace(one, **{name: 9 if isinstance(value, int) else "other"}) for name, value in values.items()]

    keys = [KEY, *others(KEY), *(replace(KEY, shape=shape) for shape in others(SHAPE))]
    assert len({key.digest for key in keys}) == len(keys)


def test_a_profile_comes_back_for_any_file_of_that_shape(model, tmp_path):
    assert profile_store.find(model, EngineConfig("m")) is None
    profile, file = kept(model)
    assert profile_store.find(model, EngineConfig("m")) == profile
    elsewhere = tmp_path / "renamed.gguf"
    elsewhere.write_bytes(WHOLE)
    assert profile_store.find(elsewhere, EngineConfig("m")) == profile
    assert profile_store.find(model, EngineConfig("m", type_k="q8_0")) is None
    assert profile_store.here() == [profile]
    assert [path.name for path in file.parent.iterdir()] == [file.name]  # no half-written file is left beside it
    elsewhere.write_bytes(WHOLE + b"\0")
    assert profile_store.find(elsewhere, EngineConfig("m")) is None


def test_options_that_change_a_step_have_a_profile_of_their_own(model):
    profile, _ = kept(model)
    changed = EngineConfig("m", kv_overrides={"qwen2.expert_used_count": 1})
    assert profile_store.find(model, changed) is None
    profile_store.keep(replace(profile, key=profile_store.key_of(model, changed), created="2026-01-02"))
    assert profile_store.find(model, changed).created == "2026-01-02"
    assert profile_store.find(model, EngineConfig("m")) == profile


def test_another_machine_or_build_has_no_profile(model, monkeypatch):
    kept(model)
    for name, value in (("cpu_name", "B"), ("cpu_flags", frozenset({"z"})), ("library_id", "2")):
        with monkeypatch.context() as patch:
            patch.setattr(profile_store, name, lambda value=value: value)
            assert profile_store.find(model, EngineConfig("m")) is None
            assert profile_store.here() == []


def damaged(document, **changes):
    return json.dumps({**document, **changes})


@pytest.mark.parametrize(
    "damage",
    [
        lambda good: "",
        lambda good: "[]",
        lambda good: "[" * 100_000,
        lambda good: json.dumps(good)[:-20],
        lambda good: damaged(good, version=2),
        lambda good: damaged(good, n_threads=0),
        lambda good: damaged(good, n_threads="two"),
        lambda good: damaged(good, flash_attn="maybe"),
        lambda good: damaged(good, spins=-1),
        lambda good: damaged(good, stairs=[{"rows": 1, "step_ms": 0}]),
        lambda good: damaged(good, stairs=[{"rows": 1}]),
        lambda good: damaged(good, stairs=7),
        lambda good: damaged(good, gpus=None),
        lambda good: damaged(good, key=None),
        lambda good: damaged(good, surprise=1),
        lambda good: damaged(good, key={**good["key"], "cores": 77}),  # of another machine, under this one's name
    ],
)
def test_a_damaged_or_foreign_file_is_ignored_with_a_log_line(damage, model, caplog):
    profile, file = kept(model)
    file.write_text(damage(json.loads(json.dumps(profile.to_json()))))
    with caplog.at_level(logging.WARNING):
        assert profile_store.find(model, EngineConfig("m")) is None
    assert "is ignored" in caplog.text


def test_a_cache_that_cannot_be_written_is_said_before_measuring(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LLAMABATCH_CACHE", str(tmp_path / "file"))
    with pytest.raises(SetupError, match="LLAMABATCH_CACHE"):
        profile_store.check_writable()
    with pytest.raises(SetupError, match="LLAMABATCH_CACHE"):
        profile_store.keep(PROFILE)


def test_a_quantised_cache_without_flash_attention_is_no_profile():
    with pytest.raises(ConfigError, match="flash_attn"):
        replace(PROFILE, key=replace(KEY, type_v="q8_0"), flash_attn="off")


# --- explicit before profile before rule --------------------------------------------------------------------------

RULES = {"flash_attn": "off", "extra_bufts": "auto", "n_threads": 8, "n_threads_batch": 8, "n_ubatch": 512}
FOUND = {"flash_attn": "on", "extra_bufts": "off", "n_threads": 3, "n_threads_batch": 5, "n_ubatch": 1024}
GIVEN = {"flash_attn": "off", "extra_bufts": "on", "n_threads": 2, "n_threads_batch": 7, "n_ubatch": 64}


@pytest.mark.parametrize("name", RULES)
def test_precedence(name):
    assert getattr(resolve(EngineConfig("m"), FACTS, MACHINE).config, name) == RULES[name]
    plan = resolve(EngineConfig("m"), FACTS, MACHINE, PROFILE)
    assert getattr(plan.config, name) == FOUND[name]
    assert plan.reasons[name] == "profile of 2026-01-02"
    plan = resolve(EngineConfig("m", **{name: GIVEN[name]}), FACTS, MACHINE, PROFILE)
    assert getattr(plan.config, name) == GIVEN[name]
    assert "profile" not in plan.reasons.get(name, "")


def test_a_profile_without_a_choice_leaves_the_rule():
    nothing = Profile(KEY, "2026-01-02", "small")
    assert resolve(EngineConfig("m"), FACTS, MACHINE, nothing) == resolve(EngineConfig("m"), FACTS, MACHINE)


def test_threads_that_the_caller_gives_count_for_larger_steps_too():
    plan = resolve(EngineConfig("m", n_threads=2), FACTS, MACHINE, PROFILE)
    assert (plan.config.n_threads, plan.config.n_threads_batch) == (2, 2)


def test_several_instances_share_the_cores_as_the_rule_says():
    plan = resolve(EngineConfig("m", strategy="multi-instance"), FACTS, MACHINE, PROFILE)
    assert (plan.config.instances, plan.config.n_threads, plan.config.flash_attn) == (2, 4, "on")
    assert "profile" not in plan.reasons["n_slots"]


def test_a_small_n_batch_limits_the_ubatch_of_a_profile():
    assert resolve(EngineConfig("m", n_batch=128), FACTS, MACHINE, PROFILE).config.n_ubatch == 128
    assert resolve(EngineConfig("m", n_batch=128), FACTS, MACHINE).config.n_ubatch == 128


def test_slots_are_the_rows_that_pay_of_those_that_fit():
    assert resolve(EngineConfig("m"), FACTS, MACHINE).config.n_slots == 32
    plan = resolve(EngineConfig("m"), FACTS, MACHINE, PROFILE)
    assert plan.config.n_slots == 64
    assert "profile of 2026-01-02" in plan.reasons["n_slots"]
    tight = replace(MACHINE, available_bytes=7 * 2**29)  # 48 MiB a slot, half of the free memory less the weights
    assert resolve(EngineConfig("m"), FACTS, tight, PROFILE).config.n_slots == 16
    assert resolve(EngineConfig("m", n_slots=7), FACTS, MACHINE, PROFILE).config.n_slots == 7
    flat = replace(PROFILE, stairs=(Stair(1, 20), Stair(8, 40), Stair(16, 80), Stair(32, 158)))
    assert resolve(EngineConfig("m"), FACTS, MACHINE, flat).config.n_slots == 8  # 32 rows bring only 1.3 % more


def test_spins_of_a_profile_and_the_wish_of_the_user():
    measured = OnLoad(spins=5000)
    assert undecided(600 << 20, {}, measured)["GOMP_SPINCOUNT"] == "5000"
    assert undecided(600 << 20, {}, OnLoad(spins=0))["GOMP_SPINCOUNT"] == "0"
    assert undecided(600 << 20, {})["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in undecided(600 << 20, {"GOMP_SPINCOUNT": "7"}, measured)
    assert "GOMP_SPINCOUNT" not in undecided(600 << 20, {"OMP_WAIT_POLICY": "passive"}, measured)


def test_amx_of_a_profile_and_the_wish_of_the_user():
    measured = OnLoad(amx="off")
    assert undecided(600 << 20, {}, measured)["GGML_CPU_AMX"] == "0"
    assert "GGML_CPU_AMX" not in undecided(600 << 20, {"GGML_CPU_AMX": "1"}, measured)
    assert "GGML_CPU_AMX" not in undecided(600 << 20, {}, OnLoad(amx="on"))


def test_cache_types_never_come_from_a_profile():
    quantised = replace(PROFILE, key=replace(KEY, type_k="q8_0", type_v="q8_0"))
    config, _ = quantised.fill(EngineConfig("m"))
    assert (config.type_k, config.type_v) == ("f16", "f16")
