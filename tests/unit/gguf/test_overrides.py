"""Overrides of metadata and of the places of tensors: the forms in which they are given, and what is refused."""

import numpy as np
import pytest

from llamabatch.errors import ConfigError, ModelFileError
from llamabatch.gguf.header import read_header
from llamabatch.gguf.overrides import check_kv_overrides, check_tensor_overrides, expert_overrides, overridden, places
from llamabatch.gguf.validation import check_model
from llamabatch.utils.paths import bundled_model


def test_values_are_kept_with_their_types():
    given = {"a": True, "b": 7, "c": 7.0, "d": "x", "e": np.float32(0.5), "f": np.int64(3), "g": np.bool_(False)}
    found = check_kv_overrides(given)
    assert [(key, value, type(value)) for key, value in found] == [
        ("a", True, bool), ("b", 7, int), ("c", 7.0, float), ("d", "x", str), ("e", 0.5, float), ("f", 3, int),
        ("g", False, bool),
    ]  # fmt: skip
    assert check_kv_overrides([("a", 1)]) == check_kv_overrides([["a", 1]]) == (("a", 1),)
    assert check_kv_overrides({}) == ()
    assert check_kv_overrides({"k" * 127: "v" * 127})


def test_the_text_is_that_of_llama_cpp():
    text = "a.b=int:3,c=float:0.5,d=bool:false,e=str:x=1\\,y:z,f=str:"
    assert check_kv_overrides(text) == (("a.b", 3), ("c", 0.5), ("d", False), ("e", "x=1,y:z"), ("f", ""))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (3, "kv_overrides is 3; give"), ("a", "kv_overrides has 'a'; give key=TYPE:VALUE"),
        ("a=1", "kv_overrides has 'a=1'"), ("a=long:1", "the type 'long'"), ("a=int:x", "'a=int:x'"),
        ("a=bool:1", "'a=bool:1'"), ({"": 1}, "the key ''; give a text of 1 to 127 bytes"),
        ({3: 1}, "the key 3"), ({"k" * 128: 1}, "1 to 127 bytes"), ({"ü" * 64: 1}, "1 to 127 bytes"),
        ({"a\0b": 1}, "the key 'a.x00b'"), ({"a": "v" * 128}, "at most 127 bytes"), ({"a": "x\0"}, "none NUL"),
        ({"a": -1}, r"kv_overrides\['a'\] is -1; give a whole number from 0 to 4294967295"),
        ({"a": 2**32}, "is 4294967296"),
        ({"a": float("nan")}, "nan"), ({"a": 1e39}, "1e\\+39"), ({"a": None}, "None"), ({"a": [1]}, r"is \[1\]"),
        ({"a": 10**5000}, "a number of 16610 bits"), ({"split.count": 2}, "split into files"),
        ([("a", 1), ("a", 2)], "'a' twice"), ({str(n): 1 for n in range(300)}, "more than 256"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_struct_is_refused(given, reason):
    with pytest.raises(ConfigError, match=reason):
        check_kv_overrides(given)


def test_a_header_with_other_values():
    header = read_header(bundled_model())
    given = (("llama.context_length", 512), ("new.key", "x"), ("tokenizer.ggml.add_bos_token", True))
    changed = overridden(header, given)
    assert (changed.own("context_length"), changed.metadata["new.key"]) == (512, "x")
    assert changed.texts()["tokenizer.ggml.add_bos_token"] == "true"
    assert header.own("context_length") == 2048
    assert overridden(header, ()) is header
    with pytest.raises(ConfigError, match=r"is 512.0, of type float32; tiny.gguf has 2048 there, of type uint32"):
        overridden(header, (("llama.context_length", 512.0),))
    with pytest.raises(ConfigError, match=r"'tokenizer.ggml.tokens', a list"):
        overridden(header, (("tokenizer.ggml.tokens", 1),))


def test_values_on_which_llama_cpp_would_abort_are_refused():
    for key, value in (("block_count", 0), ("attention.head_count", 0), ("expert_used_count", 5)):
        with pytest.raises(ModelFileError, match=f"llama.{key} is {value}"):
            check_model(bundled_model(), ((f"llama.{key}", value),))


def test_the_first_pattern_that_fits_is_the_place():
    rules = check_tensor_overrides({r"blk\.0\..*exps": "CUDA0", "exps": "CPU"})
    names = ["blk.0.ffn_up_exps.weight", "blk.1.ffn_up_exps.weight", "blk.1.ffn_up.weight"]
    assert places(names, rules) == {names[0]: "CUDA0", names[1]: "CPU"}
    assert check_tensor_overrides("a.*=CPU,b=CUDA0") == (("a.*", "CPU"), ("b", "CUDA0"))
    assert places(names, expert_overrides(1)) == {names[0]: "CPU"}
    assert list(places(names, expert_overrides(None))) == names[:2]


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (3, "override_tensor is 3; give"), ("exps", "give pattern=PLACE"), ({"a": ""}, "'CPU' or the name of a device"),
        ({"a": None}, "is None"), ({"": "CPU"}, "the pattern ''"), ({"a(": "CPU"}, "no regular expression: missing"),
        ({"(?P<n>a)": "CPU"}, "only groups"), ({"(?i)a": "CPU"}, "only groups"),
        ({r"\Ablk": "CPU"}, r"\\A means"), ({r"\\\Z": "CPU"}, r"\\Z means"), ({"(?<=a)b": "CPU"}, "only groups"),
        ({"[[:digit:]]": "CPU"}, r"write \[0-9\]"), ({"a" * 513: "CPU"}, "1 to 512 bytes"), ({"a\0": "CPU"}, "bytes"),
        ({str(n): "CPU" for n in range(300)}, "more than 256 patterns"), ({"[[a]": "CPU"}, "regular expression"),
    ],
)  # fmt: skip
def test_patterns_that_std_regex_reads_otherwise_are_refused(given, reason):
    with pytest.raises(ConfigError, match=reason):
        check_tensor_overrides(given)


def test_groups_that_both_know():
    assert check_tensor_overrides({r"(?:a|b)(?=c)(?!d)\(?\\A\d+\.": "CPU"})
