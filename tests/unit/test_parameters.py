"""SamplingParams and EngineConfig: checked once, refused by name with value and range."""

from dataclasses import FrozenInstanceError, fields
from typing import get_type_hints

import pytest

from llamabatch import ConfigError, EngineConfig, LlamaBatchError, SamplingError, SamplingParams
from llamabatch.config import EngineOptions

BAD_NUMBERS = [float("nan"), float("inf"), -float("inf"), -0.1, 1e300, "1", None, True, [], 2**64]


@pytest.mark.parametrize("field", ["temperature", "top_p", "min_p"])
@pytest.mark.parametrize("value", BAD_NUMBERS)
def test_bad_numbers(field, value):
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("field", ["top_k", "max_tokens", "seed"])
@pytest.mark.parametrize("value", [float("nan"), 1.5, "1", True, [], -2, 2**64])
def test_bad_whole_numbers(field, value):
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("stop", [5, [5], [""], ["x"] * 65, "x" * 257, {"a": 1}, [None]])
def test_bad_stops(stop):
    with pytest.raises(SamplingError, match="stop"):
        SamplingParams(stop=stop)


def test_good_values():
    params = SamplingParams(stop="x", top_k=-1, max_tokens=None, seed=2**64 - 1, temperature=0)
    assert params.stop_strings == ("x",)
    assert params.greedy
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3


def test_unknown_names_are_refused_with_the_nearest():
    with pytest.raises(SamplingError, match="did you mean 'temperature'"):
        SamplingParams.from_options(temprature=1)
    with pytest.raises(ConfigError, match="did you mean 'n_slots'"):
        EngineConfig.from_options("tiny", {"n_slot": 3})


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("strategy", "fast"), ("strategy", 3), ("n_slots", 0), ("n_slots", 257), ("n_slots", "many"), ("n_slots", 2.0),
        ("n_ctx", 1), ("n_ctx", 2**40), ("n_batch", 0), ("n_ubatch", 4096), ("n_threads", 0), ("instances", 0),
        ("n_gpu_layers", -2), ("main_gpu", -1), ("tensor_split", "3,1"), ("tensor_split", (float("nan"),)),
        ("flash_attn", "maybe"), ("type_k", "q3_k"), ("type_v", 16), ("use_mmap", 1), ("extra_bufts", True),
        ("isolate", "yes"), ("instance_strategy", "multi-instance"),
    ],
)  # fmt: skip
def test_bad_options_name_themselves(option, value):
    with pytest.raises(ConfigError, match=option):
        EngineConfig.from_options("tiny", {option: value})


def test_options_that_contradict_each_other():
    with pytest.raises(ConfigError, match="flash"):
        EngineConfig("tiny", type_v="q8_0", flash_attn="off")
    with pytest.raises(ConfigError, match="n_batch"):
        EngineConfig("tiny", n_slots=64, n_batch=32, n_ubatch=32)
    with pytest.raises(ConfigError, match="model"):
        EngineConfig("")


def test_keywords_for_type_checkers_are_the_fields():
    assert set(get_type_hints(EngineOptions)) == {f.name for f in fields(EngineConfig)} - {"model"}


def test_errors_are_value_errors_of_our_tree():
    assert issubclass(SamplingError, ValueError)
    assert issubclass(SamplingError, LlamaBatchError)
