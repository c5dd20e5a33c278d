"""SamplingParams and EngineConfig are checked once. A refusal names field, value and range."""

import contextlib
import copy
import functools
import inspect
import itertools
import pickle
import random
import re
import time
import typing
from dataclasses import FrozenInstanceError, fields, replace
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from typing import get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llamabatch import (
    AdapterError,
    ConfigError,
    EngineConfig,
    InputError,
    LlamaBatchError,
    SamplingError,
    UnknownParameterError,
)
from llamabatch.config import EngineOptions
from llamabatch.engine.validation import check_token_ids
from llamabatch.request import sampling_params
from llamabatch.request.adapters import adapter_set, adapter_sets
from llamabatch.request.parameter_names import ALIASES
from llamabatch.request.samplers import CHAIN
from llamabatch.request.sampling_params import OPEN, SamplingParams
from llamabatch.request.structured_outputs import Structure
from llamabatch.sampling.defaults import DEFAULTS, FilledParams, defaults_of, fill, given_by
from llamabatch.sampling.token_counts import token_counts


@pytest.mark.parametrize(
    "bias",
    [
        5, "1=2", {1}, [1], [(1, 2, 3)], {-1: 1.0}, {2**20: 1.0}, {"a": 1.0}, {"1.5": 1.0}, {"-1": 1.0}, {True: 1.0},
        {1: 100.5}, {1: float("nan")}, {1: "2"}, [(1, 1.0), (1, 2.0)], dict.fromkeys(range(1025), 1.0),
    ],
)  # fmt: skip
def test_bad_biases(bias):
    with pytest.raises(SamplingError, match="logit_bias"):
        SamplingParams(logit_bias=bias)


def test_token_ids_are_kept_in_order_and_can_be_hashed():
    params = SamplingParams(logit_bias={7: 1, 3: -0.5}, allowed_token_ids=[9, 3, 9])
    assert (params.biases, params.allowed_ids) == (((3, -0.5), (7, 1.0)), (3, 9))
    assert params == replace(params)
    assert {params: 1}[SamplingParams(logit_bias=[(3, -0.5), (7, 1)], allowed_token_ids=(3, 9))] == 1
    assert SamplingParams(logit_bias=None, allowed_token_ids=None) == SamplingParams()


def test_ids_outside_the_vocabulary_are_refused_by_name():
    check_token_ids(SamplingParams(logit_bias={99: 1.0}, allowed_token_ids=[0, 99]), 100)
    with pytest.raises(SamplingError, match="logit_bias has token id 100; this model's ids are 0 to 99"):
        check_token_ids(SamplingParams(logit_bias={0: 1.0, 100: 1.0}), 100)
    with pytest.raises(SamplingError, match="allowed_token_ids has token id 100"):
        check_token_ids(SamplingParams(allowed_token_ids=[100, 1]), 100)


@given(st.lists(st.integers(0, 50)), st.lists(st.integers(0, 50)), st.integers(-1, 60).filter(bool))
def test_token_counts_are_those_of_the_text(prompt, output, window):
    counts = token_counts(prompt, window)
    for token_id in output:
        counts.add(token_id)
    seen = [*((token_id, 0) for token_id in prompt), *((token_id, 1) for token_id in output)]
    wanted = dict.fromkeys([], 0)
    for token_id, is_output in seen if window < 0 else seen[-window:]:
        wanted[token_id] = wanted.get(token_id, 0) + is_output
    assert dict(zip(counts.ids, counts.counts, strict=True)) == wanted
    assert len(counts.ids) == len(wanted)


def test_samplers_have_llama_cpps_names():
    assert SamplingParams(samplers=["temp", "typical_p", "top-k", "infill"]).chain == (
        *("temperature", "typ_p", "top_k", "infill"),
    )
    assert SamplingParams(samplers=[]).chain == ()
    assert SamplingParams(samplers="edskypmxt").chain == CHAIN
    assert SamplingParams(samplers="k").chain == ("top_k",)
    with pytest.raises(SamplingError, match=r"samplers has 'o'; known are .*letters, edskypmxti"):
        SamplingParams(samplers="top_k")
    assert SamplingParams().chain is None
    with pytest.raises(SamplingError, match="samplers has 'tfs_z'; known are penalties, dry"):
        SamplingParams(samplers=["tfs_z"])
    with pytest.raises(SamplingError, match="more than 64"):
        SamplingParams(samplers=["top_k"] * 65)


def test_good_values():
    params = SamplingParams(stop="x", top_k=-1, max_tokens=None, seed=2**64 - 1, temperature=0)
    assert params.stop_strings == ("x",)
    assert params.greedy
    with pytest.raises(FrozenInstanceError):
        params.top_k = 3


# Values just outside the ranges of their fields. BAD_VALUES has values of wrong types.
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("n", 0), ("n", 257), ("best_of", 0), ("max_tokens", 0), ("min_tokens", -1), ("temperature", -0.1),
        ("top_k", -2), ("top_p", -0.1), ("top_p", 1.1), ("min_p", -0.1), ("typical_p", 1.1), ("top_n_sigma", -2),
        ("xtc_probability", 2), ("xtc_threshold", -1), ("dry_multiplier", -1), ("dry_base", 0.5),
        ("dry_allowed_length", 0), ("dry_penalty_last_n", -2), ("mirostat", 3), ("mirostat_tau", -1),
        ("mirostat_eta", 2), ("dynatemp_range", -1), ("dynatemp_exponent", 0), ("seed", -2), ("seed", 2**64),
        ("repetition_penalty", -2.5), ("repetition_penalty", 101), ("presence_penalty", -2.5),
        ("presence_penalty", 101), ("frequency_penalty", -2.5), ("frequency_penalty", 101), ("stop", ["x"] * 65),
        ("stop", "x" * 257), ("stop_token_ids", [2**20]), ("allowed_token_ids", []), ("allowed_token_ids", [2**20]),
        ("allowed_token_ids", b"12"), ("allowed_token_ids", {1: 2}), ("bad_words", ["x"] * 1025), ("logprobs", -2),
        ("prompt_logprobs", 1025), ("logprob_token_ids", []), ("logprob_token_ids", 5), ("logprob_token_ids", [-1]),
        ("logprob_token_ids", ["a"]), ("priority", 1.5), ("deadline_s", -1),
    ],
)  # fmt: skip
def test_bad_values_name_their_field(field, value):
    with pytest.raises(SamplingError, match=field):
        SamplingParams(**{field: value})


def test_fields_that_contradict_each_other():
    with pytest.raises(SamplingError, match="best_of is 2; it must be at least n, 3"):
        SamplingParams(n=3, best_of=2)
    with pytest.raises(SamplingError, match="min_tokens is 9; it must not exceed max_tokens, 8"):
        SamplingParams(max_tokens=8, min_tokens=9)


# Values that no field accepts, and values that fields of one kind refuse. With the names of fields they are hundreds.
WRONG_TYPES = [b"1", object(), {"a": 1}, float, 1j]
WRONG_NUMBERS = [float("nan"), float("inf"), -float("inf"), 2**64, -(2**64), 10**400, 1e308, "0.5", [], True]
ANY_NUMBER = {f.name for f in fields(SamplingParams) if "float" in str(f.type) and "Bias" not in str(f.type)}
ANY_INTEGER = {f.name for f in fields(SamplingParams) if str(f.type) in ("int", "int | None")}
SWITCHES = {f.name for f in fields(SamplingParams) if str(f.type) == "bool"}
OF_STRINGS = {"stop", "bad_words", "dry_sequence_breakers"}
OF_IDS = {"stop_token_ids", "allowed_token_ids"}
BAD_VALUES = [
    *((name, value) for name in ANY_NUMBER | ANY_INTEGER for value in [*WRONG_TYPES, *WRONG_NUMBERS]),
    *((name, value) for name in ANY_INTEGER for value in (1.0, -(2**40), "1")),
    *((name, value) for name in SWITCHES for value in [*WRONG_TYPES, 0, 1, "yes", None, float("nan")]),
    *((name, value) for name in OF_STRINGS for value in (5, [5], [""], ["x"] * 10_000, "x" * 10**6, {"a": 1}, [b"x"])),
    *((name, ["\udc80"]) for name in OF_STRINGS - {"stop"}),
    *((name, value) for name in OF_IDS for value in (5, "12", [-1], [2**64], [1.0], [None], [True], range(2**21))),
    *((name, itertools.count()) for name in OF_IDS),
    ("logit_bias", dict.fromkeys(range(1_000_000), 1.0)), ("logit_bias", {1: float("nan")}), ("logit_bias", {2**64: 1}),
    ("logit_bias", {1: float("-inf")}), ("logit_bias", [1, 2]), ("logit_bias", {"a": 1}), ("logit_bias", 7),
    ("logits_processors", [1]), ("logits_processors", print), ("logits_processors", [print] * 65),
    ("overflow", "drop"), ("overflow", 1), ("overflow", None), ("structured_outputs", 3), ("structured_outputs", {}),
]  # fmt: skip


def test_hundreds_of_bad_values_name_their_field():
    assert len(BAD_VALUES) >= 300
    for name, value in BAD_VALUES:
        if name == "logprobs" and value is True:  # OpenAI's form of the field
            continue
        start = time.thread_time()  # time of this thread alone, however busy the machine is
        with pytest.raises(SamplingError, match=name) as refusal:
            SamplingParams(**{name: value})
        assert len(str(refusal.value)) < 1000
        assert time.thread_time() - start < 1, name


def test_what_is_left_open_comes_from_the_model_else_from_llama_cpp():
    assert {name for name in OPEN if getattr(SamplingParams(), name) is None} == set(OPEN) == set(DEFAULTS)
    assert fill(SamplingParams()) == FilledParams(**DEFAULTS)
    said = {
        "general.sampling.temp": "0.600000", "general.sampling.top_k": "20", "general.sampling.top_p": "0.9",
        "general.sampling.min_p": "0", "general.sampling.xtc_probability": "0.25", "general.sampling.mirostat": "2",
        "general.sampling.xtc_threshold": "0.2", "general.sampling.mirostat_tau": "4",
        "general.sampling.mirostat_eta": "0.2", "general.sampling.penalty_repeat": "1.1", "general.name": "7",
        "general.sampling.penalty_last_n": "64",
    }  # fmt: skip
    defaults = defaults_of(said)
    assert defaults == {
        "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "xtc_probability": 0.25, "xtc_threshold": 0.2,
        "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2, "repetition_penalty": 1.1,
        "repeat_last_n": 64,
    }  # fmt: skip
    assert type(defaults["top_k"]) is int
    own = {"temperature": 1.5, "top_k": 7, "mirostat": 0, "repetition_penalty": 1.0}
    filled = fill(SamplingParams(**own), defaults)
    assert filled == FilledParams(**defaults | own)
    assert filled.penalised is False
    assert fill(SamplingParams(), defaults).penalised


def test_advice_of_a_model_that_cannot_be_is_left_out(caplog):
    bad = {"temp": "nan", "top_p": "1.5", "min_p": "many", "mirostat": "3", "penalty_repeat": "-1", "top_k": "1e400"}
    said = {f"general.sampling.{name}": value for name, value in bad.items()}
    assert defaults_of(said) == DEFAULTS
    assert given_by(said | {"general.sampling.top_p": "0.9"}) == {"top_p": 0.9}
    assert {record.args[0] for record in caplog.records} == {f"general.sampling.{name}" for name in bad}
    below = defaults_of({"general.sampling.temp": "-1", "general.sampling.top_k": "-40"})
    assert (below["temperature"], below["top_k"]) == (0, 0)


class Raises:
    """Raises for every operation on it."""

    def _raise(self, *args):
        raise RuntimeError("hostile")

    __repr__ = __eq__ = __ne__ = __len__ = __iter__ = __getitem__ = __hash__ = __bool__ = __float__ = __index__ = _raise
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __call__ = __int__ = __fspath__ = keys = items = _raise


class RaisingList(Raises, list):
    __hash__ = None


class RaisingTuple(Raises, tuple): ...


class RaisingDict(Raises, dict):
    __hash__ = None


class RaisingText(Raises, str): ...


class RaisingInt(Raises, int): ...


class RaisingFloat(Raises, float): ...


class RaisingSchema:
    @property
    def model_json_schema(self):
        raise RuntimeError("hostile")


class Digits(IntEnum):
    TWO = 2


def _loop(make):
    made = make()
    if isinstance(made, dict):
        made["items"] = made
    else:
        made.append(made)
    return made


DEEP = functools.reduce(lambda inner, _: [inner], range(5000), "x")
HOSTILE_LEAVES = [
    10**5000, -(10**5000), 2**63, 2**31, -1, 0, 1, 3, float("nan"), float("inf"), -float("inf"), 1e308, -0.0, 5e-324,
    0.5, True, False, None, "", "x", "auto", "\0", "\ud800", "\x7f", "x" * 100_000, b"x",
    bytearray(5), memoryview(b"x"),
    1j, Fraction(1, 3), Fraction(10**400), Decimal("NaN"), Decimal(2), Digits.TWO, object, object(), Ellipsis, print,
    itertools.count(), itertools.repeat("x"), itertools.repeat(("a", "b")), range(10**9), iter([1, 2]), {1, 2}, DEEP,
    Raises(), Raises, RaisingList([1]), RaisingTuple((1, 2)), RaisingDict(json={}),
    RaisingText("json"), RaisingText("x"),
    RaisingInt(3), RaisingFloat(0.5), RaisingSchema(), [Raises()], {"json": Raises()}, {Raises: Raises()}, _loop(list),
    _loop(dict), {"json": _loop(dict)}, {"json": DEEP}, {"json": {"const": 10**5000}}, {"json": RaisingDict(a=1)},
    {"json": RaisingSchema()}, {"json": {"a": RaisingText("x")}}, {"choice": itertools.repeat("x")}, {10**5000: 1},
    {"type": Raises()}, {"type": "json_schema", "json_schema": RaisingDict(schema={})}, {"regex": RaisingText("a")},
    Structure("json", {"type": "object"}), Structure(Raises(), "x"), Structure("regex", None), Structure([], []),
    np.array(1), np.array(0.5), np.array([1, 2]), np.array([0.5]), np.array(["x"]), np.array([[1, 2]]), np.array([]),
    np.array([None, Raises()], object), np.array("x"), np.array(True), np.float16("nan"), np.float32(0.5), np.int8(3),
    np.uint64(2**64 - 1), np.longdouble(2), np.bool_(True), np.str_("x"), np.datetime64("NaT", "s"), np.complex64(1),
]  # fmt: skip


def _hostile(rng, depth=3):
    """Makes a value from a seed. hypothesis prints what it draws, but these values cannot be printed."""
    kind = rng.randrange(6) if depth else 0
    if kind < 3:
        return rng.choice(HOSTILE_LEAVES)
    within = [_hostile(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 5:
        return within if kind == 3 else tuple(within)
    return {rng.choice(["json", "type", "regex", "choice", "name", 1, 10**5000]): each for each in within}


def _hostile_values(rng, names):
    return {name: _hostile(rng) for name in rng.sample(names, rng.randrange(1, 4))}


PLAIN = (int, float, bool, str, tuple, Structure, type(None))
FIELDS = [f.name for f in fields(SamplingParams)]
OPTIONS = [f.name for f in fields(EngineConfig)]


def _refused_or_plain(make, values):
    start = time.thread_time()
    try:
        made = make(**values)
    except InputError as refusal:  # SamplingError, ConfigError, and AdapterError for names of adapters
        message = str(refusal)
        if len(message.encode()) > 1500:
            raise AssertionError(f"a message of {len(message)} characters") from refusal
    else:
        for name, value in vars(made).items():
            assert type(value) in PLAIN, name  # plain values can be hashed and sent to another process
            for each in value if isinstance(value, tuple) and name != "logits_processors" else ():
                assert type(each) in PLAIN, name
        assert getattr(made, "logits_processors", ()) or isinstance(hash(made), int)
    assert time.thread_time() - start < 2, values.keys()


@settings(max_examples=1500, deadline=None)
@given(st.integers(0, 2**64))
def test_hostile_values_are_refused_in_our_words(seed):
    rng = random.Random(seed)
    values = _hostile_values(rng, FIELDS)
    _refused_or_plain(SamplingParams, values)
    _refused_or_plain(SamplingParams.from_options, values)
    model, values = _hostile(rng), _hostile_values(rng, OPTIONS[1:])
    _refused_or_plain(EngineConfig, {"model": "tiny"} | values)
    _refused_or_plain(lambda **options: EngineConfig.from_options(model, options), values)


def test_each_field_takes_each_hostile_value():
    for value in HOSTILE_LEAVES:
        for name in FIELDS:
            if not (name in OF_IDS and isinstance(value, (range, itertools.count))):
                _refused_or_plain(SamplingParams, {name: value})
        for name in OPTIONS:
            _refused_or_plain(EngineConfig, {"model": "tiny", name: value})
        for make in (adapter_set, lambda given: [adapter_sets([given], 1)]):
            with contextlib.suppress(AdapterError):
                assert isinstance(make(value), (tuple, list))


def test_a_cut_from_the_left_is_no_shift():
    assert SamplingParams(truncate_prompt_tokens=-1).overflow == "truncate"
    with pytest.raises(SamplingError, match="truncate_prompt_tokens is -1, which is overflow='truncate'"):
        SamplingParams(truncate_prompt_tokens=-1, overflow="shift")


def test_values_that_python_cannot_print_are_named_with_their_range():
    with pytest.raises(SamplingError, match=r"overflow is a number of 16610 bits .*refuse, truncate, shift"):
        SamplingParams(overflow=10**5000)
    with pytest.raises(SamplingError, match=r"allowed_token_ids is array\(1\); give a list of token ids"):
        SamplingParams(allowed_token_ids=np.array(1))
    with pytest.raises(ConfigError, match=r"n_ctx is a number of 16610 bits; give .* from 32 to .* or 'fit'"):
        EngineConfig("tiny", n_ctx=10**5000)


def test_numbers_of_numpy_are_taken_as_pythons_own():
    given = SamplingParams(
        top_k=np.int64(7), temperature=np.float32(0.5), ignore_eos=np.bool_(True), stop_token_ids=np.array([3, 1]),
        logit_bias={np.int32(2): np.float64(-1)}, stop=np.array(["a", "b"]),
    )  # fmt: skip
    wanted = SamplingParams(
        top_k=7, temperature=0.5, ignore_eos=True, stop_token_ids=[3, 1], logit_bias={2: -1.0}, stop=["a", "b"]
    )
    assert given == wanted
    assert {type(given.top_k), type(given.stop_ids[0])} == {int}
    config = EngineConfig("tiny", n_slots=np.int64(3), tensor_split=np.array([3, 1]), use_mmap=np.bool_(False))
    assert config == EngineConfig("tiny", n_slots=3, tensor_split=(3.0, 1.0), use_mmap=False)
    assert type(config.n_slots) is int


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"logprobs": True, "top_logprobs": 2}, 2), ({"logprobs": True, "top_logprobs": None}, 0),
        ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 0}, 0), ({"logprobs": False}, None),
        ({"logprobs": None}, None),
        ({"logprobs": False, "top_logprobs": None}, None), ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True, "top_logprobs": -1}, -1), ({"logprobs": -1}, -1),
        ({"top_logprobs": 3}, 3), ({"logprobs": None, "top_logprobs": 3}, 3), ({"logprobs": 4}, 4),
    ],
)  # fmt: skip
def test_logprobs_as_openai_asks_for_them(given, wanted):
    assert SamplingParams.from_options(**given).logprobs == SamplingParams(**given).logprobs == wanted


def test_logprobs_that_contradict_each_other():
    with pytest.raises(SamplingError, match="top_logprobs is 2, but logprobs is False"):
        SamplingParams.from_options(logprobs=False, top_logprobs=2)
    with pytest.raises(SamplingError, match="logprobs is given twice"):
        SamplingParams.from_options(logprobs=3, top_logprobs=2)
    with pytest.raises(SamplingError, match="logprobs is 5000"):
        SamplingParams.from_options(logprobs=True, top_logprobs=5000)


def test_what_is_asked_elsewhere_is_refused_with_the_place():
    for value in (True, False):
        with pytest.raises(SamplingError, match=r"stream is no parameter; call stream\(\.\.\.\)"):
            SamplingParams.from_options(stream=value)
    with pytest.raises(SamplingError, match=r"give chat\(\.\.\., tools=…\)"):
        SamplingParams.from_options(tools=[])
    with pytest.raises(SamplingError, match=r"give structured_outputs=\{'regex': …\}"):
        SamplingParams.from_options(regex="a")


def test_names_of_other_libraries_as_keywords():
    params = SamplingParams(
        temp=0.5, repeat_penalty=1.1, n_predict=7, guided_json={"type": "object"}, guided_regex=None
    )
    assert params == SamplingParams(
        temperature=0.5, repetition_penalty=1.1, max_tokens=7, structured_outputs={"json": {"type": "object"}}
    )
    assert SamplingParams(2, temp=0) == SamplingParams(n=2, temperature=0)
    assert replace(params, top_k=3) == SamplingParams.from_options(**{**vars(params), "top_k": 3})
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params
    for form, value in (("regex", "a+"), ("choice", ["a", "b"]), ("grammar", 'root ::= "a"')):
        assert SamplingParams(**{f"guided_{form}": value}) == SamplingParams(structured_outputs={form: value})
    with pytest.raises(TypeError, match="multiple values"):
        SamplingParams(2, num_return_sequences=3)


def test_an_unknown_keyword_names_the_nearest():
    for make in (SamplingParams, SamplingParams.from_options):
        with pytest.raises(UnknownParameterError, match=r"'temprature'; did you mean 'temperature'\?$"):
            make(temprature=1)
    for error in (TypeError, SamplingError, ValueError, LlamaBatchError):
        assert issubclass(UnknownParameterError, error)


def test_the_signature_is_that_of_the_fields():
    names = [field.name for field in fields(SamplingParams)]
    assert list(inspect.signature(SamplingParams).parameters) == names
    assert set(typing.get_type_hints(SamplingParams.__init__)) >= {"temperature", "logit_bias"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tfs_z": 0.5}, "tfs_z is 0.5, which has no meaning here: llama.cpp has no tail free sampling"),
        ({"echo": True}, "output.prompt is the prompt"), ({"do_sample": False}, "give temperature=0"),
        ({"use_beam_search": 1}, "give best_of"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_here_is_refused_with_what_to_use(given, message):
    with pytest.raises(UnknownParameterError, match=re.escape(message)):
        SamplingParams(**given)


def test_what_asks_for_what_happens_anyway_is_understood():
    assert SamplingParams(tfs_z=1.0, echo=False, do_sample=True, use_beam_search=False) == SamplingParams()


def test_keys_of_logit_bias_may_be_texts_as_in_json():
    assert SamplingParams(logit_bias={"123": -5, 4: 1}).biases == ((4, 1.0), (123, -5.0))
    with pytest.raises(SamplingError, match="token id 7 twice"):
        SamplingParams(logit_bias={"7": 1, 7: 1})


def test_names_of_other_libraries():
    params = SamplingParams.from_options(n_predict=7, repeat_penalty=1.2, temp=0)
    assert params == SamplingParams(max_tokens=7, repetition_penalty=1.2, temperature=0)
    assert SamplingParams.from_options(max_new_tokens=9).max_tokens == 9
    assert set(ALIASES.values()) <= {field.name for field in fields(SamplingParams)}
    with pytest.raises(SamplingError, match="max_tokens is given twice"):
        SamplingParams.from_options(n_predict=7, max_tokens=8)


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


def test_defaults_are_what_their_checks_would_keep(monkeypatch):
    unchecked = SamplingParams()
    monkeypatch.setattr(sampling_params, "_DEFAULTS", {})
    checked = SamplingParams()
    assert checked == unchecked
    assert {name: type(value) for name, value in vars(checked).items()} == {
        name: type(value) for name, value in vars(unchecked).items()
    }
