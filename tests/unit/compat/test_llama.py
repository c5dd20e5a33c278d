"""compat.Llama over a FakeLLM: its dictionaries, the arguments that reach a request, and those that are refused."""

import json
import pickle
import random
import sys
import types
import warnings

import numpy as np
import pytest

from llamabatch import EngineConfig, compat
from llamabatch.compat import Llama, LlamaGrammar, options
from llamabatch.compat.callbacks import Biases
from llamabatch.compat.llama import ABSENT
from llamabatch.errors import ConfigError, EngineError, PromptError, SamplingError
from llamabatch.testing import FakeLLM

ASKED = [{"role": "user", "content": "What is the time?"}]
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {"h": {}}}}}
NAMED = {"type": "function", "function": {"name": "clock"}}


def llama(answers="one two three four", **changed):
    fake = FakeLLM(answers=answers, n_ctx=512)
    return Llama._over(fake, **changed), fake


def params_of(call, **changed):
    """Returns the SamplingParams of the request that a call makes."""
    made, fake = llama(**changed)
    call(made)
    return fake.requests[-1].params


def test_a_completion_is_the_dictionary_of_llama_cpp():
    made, _ = llama()
    answer = made("Count", max_tokens=2)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == made.model_path
    assert made.model_path.endswith("fake")
    assert answer["choices"] == [{"text": "one two", "index": 0, "logprobs": None, "finish_reason": "length"}]
    assert answer["usage"] == {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    assert made("Count", max_tokens=2, echo=True)["choices"][0]["text"] == "Countone two"
    assert made("Count", max_tokens=2, model="mine")["model"] == "mine"


def test_the_end_of_generation_is_no_token_of_the_usage():
    answer = llama()[0]("Count", max_tokens=None)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == "one two three four"
    assert answer["usage"]["completion_tokens"] == 4


def test_a_text_is_cut_before_its_stop_string():
    made, _ = llama()
    assert made("Count", stop=" three")["choices"][0] == {
        "text": "one two",
        "index": 0,
        "logprobs": None,
        "finish_reason": "stop",
    }
    assert "".join(c["choices"][0]["text"] for c in made("Count", stop=[" three"], stream=True)) == "one two"


def test_chunks_hold_the_text_and_the_last_one_the_reason():
    chunks = list(llama()[0]("Count", stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one two three four"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert all(list(chunk) == ["id", "object", "created", "model", "choices"] for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1


def test_a_chat_is_the_dictionary_of_llama_cpp():
    made, _ = llama()
    answer = made.create_chat_completion(ASKED)
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage"]
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "one two three four"},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    chunks = list(made.create_chat_completion(ASKED, stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert "".join(c["choices"][0]["delta"]["content"] for c in chunks[1:-1]) == "one two three four"


@pytest.mark.parametrize(
    "given",
    [
        {"tools": [CLOCK], "tool_choice": NAMED},
        {"functions": [CLOCK["function"]], "function_call": {"name": "clock"}},
    ],
)
def test_a_forced_tool_gives_a_call_of_it(given):
    made, fake = llama('{"h": 3}')
    answer = made.create_chat_completion(ASKED, **given)
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    function = {"name": "clock", "arguments": '{"h": 3}'}
    assert choice["message"]["function_call"] == function
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == function
    assert call["id"].startswith("call__0_clock_cmpl-")
    schema = json.loads(fake.requests[-1].params.structure.text)
    assert schema["additionalProperties"] is False
    assert list(schema["properties"]) == ["h"]
    chunks = list(made.create_chat_completion(ASKED, stream=True, **given))
    calls = [chunk["choices"][0]["delta"]["tool_calls"] for chunk in chunks]
    assert calls[0] is None
    assert calls[-1] is None
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert "".join(call[0]["function"]["arguments"] for call in calls[1:-1]) == '{"h": 3}'


@pytest.mark.parametrize("choice", [None, "auto", "none"])
def test_a_tool_that_the_model_may_call_leaves_the_answer_a_text(choice):
    answer = llama()[0].create_chat_completion(ASKED, tools=[CLOCK], tool_choice=choice)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": "one two three four"}


def test_a_tool_choice_that_would_be_dropped_is_refused():
    made, _ = llama()
    with pytest.raises(ValueError, match=r"'required'.*llm\.chat"):
        made.create_chat_completion(ASKED, tools=[CLOCK], tool_choice="required")
    with pytest.raises(ValueError, match="Tool choice 'watch' not found"):
        made.create_chat_completion(
            ASKED, tools=[CLOCK], tool_choice={"type": "function", "function": {"name": "watch"}}
        )


def test_max_tokens_is_what_n_ctx_leaves_at_most():
    for given in (None, -1, 0, 10_000):
        assert params_of(lambda m, n=given: m("Count", max_tokens=n)).max_tokens == 510
    assert params_of(lambda m: m("Count")).max_tokens == 16
    assert params_of(lambda m: m.create_chat_completion(ASKED)).max_tokens > 400


def test_a_prompt_that_leaves_no_room_is_a_value_error():
    with pytest.raises(ValueError, match=r"Requested tokens \(513\) exceed context window of 512"):
        llama()[0](" x" * 512)


def test_defaults_of_sampling_reach_the_request():
    params = params_of(lambda m: m("Count"))
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.typical_p) == (
        0.8,
        40,
        0.95,
        0.05,
        1.0,
    )
    assert params.repetition_penalty == 1.0
    assert params.mirostat == 0
    assert not params.processors
    assert params_of(lambda m: m.create_chat_completion(ASKED)).temperature == 0.2


def test_a_negative_temperature_and_mirostat_sample_as_in_llama_cpp():
    params = params_of(lambda m: m("Count", temperature=-1.0))
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (1.0, 0, 1.0, 0.0)
    params = params_of(lambda m: m("Count", mirostat_mode=2, mirostat_tau=4.0, temperature=0.3))
    assert (params.temperature, params.mirostat, params.mirostat_tau) == (1.0, 2, 4.0)
    assert params_of(lambda m: m("Count", mirostat_mode=2, temperature=0)).mirostat == 0
    assert params_of(lambda m: m("Count", top_p=1.5, min_p=-1, top_k=-7)).top_p == 1.0


def test_seeds_follow_from_one_another_as_in_llama_cpp():
    made, fake = llama(seed=5)
    made("Count")
    made("Count")
    first = random.Random(5).randint(0, 2**32)
    assert [r.params.seed for r in fake.requests] == [first, random.Random(first).randint(0, 2**32) & 0xFFFFFFFF]
    made("Count", seed=7)
    made.set_seed(5)
    made("Count")
    made("Count", seed=-1)
    assert [r.params.seed for r in fake.requests[2:]] == [7, first, None]


def test_penalties_see_the_last_tokens_of_the_output_alone():
    params = params_of(lambda m: m("Count", presence_penalty=0.5, repeat_penalty=1.5))
    assert (params.presence_penalty, params.repetition_penalty, params.repeat_last_n) == (0.5, 1.5, 64)
    assert params.prompt_ignore_length >= 1
    assert not params.processors
    for last_n in (0, -1):
        assert not params_of(lambda m: m("Count", repeat_penalty=1.5), last_n_tokens_size=last_n).penalised
    params = params_of(lambda m: m("Count", presence_penalty=3, repeat_penalty=2.0, logit_bias={1: 2}))
    assert (params.presence_penalty, params.repetition_penalty, params.biases) == (0, 1, ())
    biases, penalties = params.processors  # as in llama.cpp, the bias comes first
    assert isinstance(biases, Biases)
    assert penalties([0, 0], np.array([8.0, 1.0], np.float32)).tolist() == [8.0 / 2 - 3, 1.0]
    with pytest.raises(SamplingError, match="presence_penalty is nan"):
        llama()[0]("Count", presence_penalty=float("nan"))


def test_biases_of_any_size_reach_the_logits():
    assert params_of(lambda m: m("Count", logit_bias={"7": 5})).biases == ((7, 5.0),)
    assert params_of(lambda m: m("Count", logit_bias={1: -float("inf"), 2: -1e9})).biases == ((1, -100.0), (2, -100.0))
    [processor] = params_of(lambda m: m("Count", logit_bias={1: 1000.0})).processors
    assert isinstance(processor, Biases)
    assert processor([], np.zeros(2, np.float32)).tolist() == [0.0, 1000.0]
    assert params_of(lambda m: m("Count", logit_bias={1: 2}, repeat_penalty=1.1)).biases == ((1, 2.0),)
    for bad in ({"x": 1}, {1: "y"}, {1: float("nan")}, {-1: 1}, 3):
        with pytest.raises(SamplingError, match="logit_bias"):
            llama()[0]("Count", logit_bias=bad)


def test_what_takes_python_is_refused_beside_a_child_process():
    made = Llama._over(FakeLLM(answers="one", n_ctx=512, isolate=True))
    assert made("Count", logit_bias={1: -float("inf")})["choices"][0]["text"] == "one"
    assert made("Count", repeat_penalty=1.1)["choices"][0]["text"] == "one"
    for beyond in ({"logit_bias": {1: 1000.0}}, {"frequency_penalty": 3.0}):
        with pytest.raises(SamplingError, match=r"logit_bias.*leave isolate"):
            made("Count", **beyond)


def test_processors_and_criteria_see_the_prompt_too():
    made, fake = llama()
    seen = []
    made("Count", logits_processor=compat.LogitsProcessorList([lambda ids, row: seen.append(list(ids)) or row]))
    request = fake.requests[-1]
    request.params.processors[0]([9], np.zeros(4, np.float32))
    assert seen == [[*request.prompt_token_ids, 9]]
    criteria = compat.StoppingCriteriaList([lambda ids, row: len(ids) >= len(request.prompt_token_ids) + 2])
    answer = made("Count", stopping_criteria=criteria)
    assert answer["choices"][0]["text"] == "one two"
    assert answer["choices"][0]["finish_reason"] == "stop"
    chunks = list(made("Count", stopping_criteria=criteria, stream=True))
    assert "".join(c["choices"][0]["text"] for c in chunks) == "one two"
    with pytest.raises(SamplingError, match="stopping_criteria"):
        made("Count", stopping_criteria=criteria, echo=True, logprobs=1)


class Foreign:
    """Has its text in the attribute of llama_cpp.LlamaGrammar."""

    _grammar = 'root ::= "yes"'


@pytest.mark.parametrize("grammar", [LlamaGrammar.from_string('root ::= "yes"'), Foreign()])
def test_grammars_of_both_packages_bind_the_answer(grammar):
    assert params_of(lambda m: m("Count", grammar=grammar)).structure[:2] == ("grammar", 'root ::= "yes"')


def test_a_grammar_is_read_from_a_file_and_a_schema(tmp_path):
    (tmp_path / "g.gbnf").write_text('root ::= "no"')
    assert LlamaGrammar.from_file(tmp_path / "g.gbnf").form.text == 'root ::= "no"'
    nested = {
        "properties": {"a": {"type": "object", "properties": {}, "additionalProperties": True}, "b": {"enum": [{}]}}
    }
    form = json.loads(LlamaGrammar.from_json_schema(json.dumps(nested)).form.text)
    assert form["additionalProperties"] is False
    assert form["properties"]["a"]["additionalProperties"] is True
    with pytest.raises(SamplingError, match="cannot be read"):
        LlamaGrammar.from_file(tmp_path / "none")
    with pytest.raises(SamplingError, match="grammar is 7"):
        llama()[0]("Count", grammar=7)


def test_response_formats_bind_the_answer():
    def form(given):
        return params_of(lambda m: m.create_chat_completion(ASKED, response_format=given)).structure

    assert form(None) is None
    assert form({"type": "text"}) is None
    assert form({"type": "json_object"}).text == '{"type": "object"}'
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for given in (
        {"type": "json_object", "schema": schema},
        {"type": "json_schema", "json_schema": {"schema": schema}},
    ):
        assert json.loads(form(given).text) == {**schema, "additionalProperties": False}


def test_a_chat_handler_gets_the_llama_and_the_arguments():
    seen = {}

    def handler(**given):
        seen.update(given)
        return given["llama"].create_completion("Count", max_tokens=1)

    made, _ = llama(chat_handler=handler)
    assert made.create_chat_completion(ASKED, top_k=3)["choices"][0]["text"] == "one"
    assert seen["llama"] is made
    assert seen["messages"] == ASKED
    assert seen["top_k"] == 3


def test_a_chat_format_that_is_not_there_names_those_that_are():
    with pytest.raises(ConfigError, match=r"chat_format is 'chatmll'.*chatml.*chat_handler"):
        llama(chat_format="chatmll")
    made, fake = llama(chat_format="chatml")
    made.create_chat_completion([{"role": "system", "content": "Be brief."}, *ASKED])
    turns = (("system", "Be brief."), ("user", "What is the time?"))
    wanted = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    assert made.detokenize(list(fake.requests[-1].prompt_token_ids), special=True).decode() == "<|bos|>" + wanted
    assert fake.requests[-1].params.stop == ("<|im_end|>",)


def test_a_template_of_the_file_is_rendered_as_it_is():
    made, fake = llama()
    made.metadata = {"tokenizer.chat_template": "{% for m in messages %}[{{ m.content }}]{% endfor %}"}
    made.chat_format = "chat_template.default"
    made.create_chat_completion(ASKED)
    assert made.detokenize(list(fake.requests[-1].prompt_token_ids)) == b"[What is the time?]"
    assert fake.requests[-1].params.stop == ("<|eos|>",)


def test_a_suffix_needs_the_tokens_of_a_gap():
    made, fake = llama()
    with pytest.raises(PromptError, match=r"suffix is 'b', but the vocabulary has no tokens for a gap"):
        made("a", suffix="b")
    made._model.special_ids = {**made._model.special_ids, "fim_pre": 11, "fim_suf": 12, "fim_mid": 13}
    made("a", suffix="b")
    [a, b] = [made.tokenize(text, add_bos=False)[0] for text in (b"a", b"b")]
    bos = made.token_bos()
    assert fake.requests[-1].prompt_token_ids == (bos, 11, a, 12, b, 13)
    made.spm_infill = True
    made("a", suffix="b")
    assert fake.requests[-1].prompt_token_ids == (bos, 12, b, 11, a, 13)


def test_generate_yields_tokens_and_takes_none():
    made, fake = llama()
    tokens = made.tokenize(b"Count")
    assert made.detokenize(list(made.generate(tokens, temp=0.0)))[:18] == b"one two three four"
    assert fake.requests[-1].params.ignore_eos
    generator = made.generate(tokens)
    next(generator)
    with pytest.raises(PromptError, match="sent"):
        generator.send([1])
    with pytest.raises(PromptError, match="reset is False"):
        next(made.generate(tokens, reset=False))


def test_tokens_are_bytes_and_ids():
    made, _ = llama()
    ids = made.tokenize(b"two words")
    assert ids[0] == made.token_bos()
    assert made.detokenize(ids) == b"two words"
    assert made.tokenizer().decode(made.tokenizer_.encode("two words")) == "two words"
    assert made.tokenize(b"<|im_end|>", add_bos=False, special=True) == [3]
    assert made.detokenize([3], special=True) == b"<|im_end|>"
    assert made.detokenize([3]) == b""
    with pytest.raises(ValueError, match="give bytes"):
        made.tokenize("text")
    with pytest.raises(ValueError, match="token id"):
        made.detokenize([-1])


def test_embeddings_are_lists_of_numbers():
    made, _ = llama()
    vector = made.embed("a text")
    assert isinstance(vector, list)
    assert isinstance(vector[0], float)
    answer = made.create_embedding(["a text", "another"])
    assert [each["index"] for each in answer["data"]] == [0, 1]
    assert answer["data"][0]["embedding"] == vector
    assert answer["usage"] == {"prompt_tokens": 5, "total_tokens": 5}
    assert np.isclose(np.linalg.norm(made.embed("a text", normalize=True)), 1)
    assert not np.isclose(np.linalg.norm(vector), 1), "llama_cpp's default"
    made.n_batch = 2
    assert made.embed(["a text"], return_count=True)[1] == 2
    with pytest.raises(ValueError, match=r"Requested tokens \(3\) exceed batch size of 2"):
        made.embed(["a text"], truncate=False)
    with pytest.raises(ValueError, match="input is 3"):
        made.embed(3)
    assert made.embed([]) == []


def test_logprobs_are_those_of_the_request():
    made, _ = llama()
    with pytest.raises(ValueError, match="logprobs is -1"):
        made("Count", logprobs=-1)
    assert params_of(lambda m: m("Count", logprobs=3)).logprobs == 3
    assert params_of(lambda m: m.create_chat_completion(ASKED, logprobs=True, top_logprobs=2)).logprobs == 2
    assert params_of(lambda m: m.create_chat_completion(ASKED, top_logprobs=2)).logprobs is None


def test_objects_of_openai_need_its_package(monkeypatch):
    made, _ = llama()
    monkeypatch.setitem(sys.modules, "openai.types.chat", None)
    with pytest.raises(ImportError, match="pip install openai"):
        made.create_chat_completion_openai_v1(ASKED)
    stand_in = types.ModuleType("openai.types.chat")
    stand_in.ChatCompletion = stand_in.ChatCompletionChunk = lambda **given: types.SimpleNamespace(**given)
    for name in ("openai", "openai.types"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, "openai.types.chat", stand_in)
    assert made.create_chat_completion_openai_v1(ASKED).object == "chat.completion"
    assert next(c.object for c in made.create_chat_completion_openai_v1(ASKED, stream=True)) == "chat.completion.chunk"


def test_names_of_the_package_that_are_absent_say_why():
    with pytest.raises(ImportError, match=r"LlamaRAMCache is not there: prompts that begin alike"):
        from llamabatch.compat import LlamaRAMCache  # noqa: F401
    assert not [name for name in compat.ABSENT if hasattr(compat, name)]


def test_names_that_are_absent_say_why():
    made, _ = llama()
    for name, why in ABSENT.items():
        with pytest.raises(AttributeError, match=f"Llama.{name} is not there: ") as caught:
            getattr(made, name)
        assert why in str(caught.value)
        assert not hasattr(made, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        made.nothing  # noqa: B018


def test_an_error_of_the_engine_leaves_the_call():
    with pytest.raises(EngineError, match="it broke"):
        llama([EngineError("it broke")])[0]("Count")


def test_close_may_be_called_twice():
    with llama()[0] as made:
        pass
    made.close()
    assert "Llama(" in repr(made)


# --- the options of the constructor ---


DEFAULTS = dict(Llama.__init__.__kwdefaults__)
HEADER = {"general.architecture": "llama", "llama.context_length": "2048"}


PASSED = {
    **{"n_threads": 3, "n_batch": 4096, "tensor_split": [1.0, 2.0], "swa_full": False, "offload_kqv": False},
    **{"use_mmap": False, "use_mlock": True, "kv_overrides": {"a": True}},
}


def engine_options(**changed):
    return options.engine_options({**DEFAULTS, **changed}, DEFAULTS, HEADER)


def test_default_options_are_those_of_llama_cpp():
    assert engine_options() == {"n_ctx": 512, "n_gpu_layers": 0, "pooling": "none"}
    header = {**HEADER, "llama.pooling_type": "1"}
    assert options.engine_options(DEFAULTS, DEFAULTS, header)["pooling"] == "auto"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"n_ctx": 0}, {"n_ctx": 2048}),
        ({"n_ctx": 100}, {"n_ctx": 256}),
        ({"n_gpu_layers": -1}, {"n_gpu_layers": -1}),
        ({"n_batch": 64}, {}),
        ({"type_k": 8, "type_v": 1}, {"type_k": "q8_0", "type_v": "f16"}),
        ({"flash_attn": True}, {"flash_attn": "on"}),
        ({"numa": True}, {"numa": "distribute"}),
        ({"numa": 2}, {"numa": "isolate"}),
        ({"rope_scaling_type": 2, "yarn_ext_factor": 1.0}, {"rope_scaling": "yarn", "yarn_ext_factor": 1.0}),
        ({"rope_freq_base": 1e5, "rope_freq_scale": 0.5}, {"rope_freq_base": 1e5, "rope_freq_scale": 0.5}),
        ({"pooling_type": 1}, {"pooling": "mean"}),
        ({"lora_path": "a.gguf"}, {"adapters": {"lora": "a.gguf"}}),
        ({"split_mode": 0, "main_gpu": 1}, {"split_mode": 0, "main_gpu": 1}),
        ({"split_mode": 2, "op_offload": False}, {"split_mode": 2, "op_offload": False}),
        (PASSED, PASSED),
    ],
)
def test_options_become_those_of_an_engine(given, wanted):
    made = engine_options(**given)
    assert made == {**engine_options(), **wanted}
    EngineConfig.from_options("tiny", made)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"n_ctx": -1}, "n_ctx is -1"),
        ({"type_k": 99}, r"type_k is 99; allowed are 0 \(f32\)"),
        ({"numa": 9}, "numa is 9"),
        ({"pooling_type": 9}, "pooling_type is 9"),
        ({"vocab_only": True}, "vocab_only is True"),
        ({"attention_type": 1}, "attention_type is 1"),
        ({"tokenizer": object()}, "tokenizer is"),
        ({"draft_model": object()}, "LlamaPromptLookupDecoding"),
    ],
)
def test_options_that_would_change_a_text_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        engine_options(**given)


def test_options_without_effect_warn_once_in_a_process(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())
    changed = {"no_perf": True, "main_gpu": 1}
    with pytest.warns(UserWarning, match="without effect here") as caught:
        engine_options(**changed, lora_base="x")
    assert len(caught) == 2
    assert all(name in str(caught[0].message) for name in options.IGNORED)
    assert "main_gpu" in str(caught[1].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_options(**changed)


def test_a_draft_by_lookup_guesses():
    class LlamaPromptLookupDecoding:
        num_pred_tokens = 5

    made = engine_options(draft_model=LlamaPromptLookupDecoding())
    assert made["speculate"] == "lookup"
    assert made["n_draft"] == 5


def test_n_ctx_ends_where_the_training_did(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())
    small = {"general.architecture": "bert", "bert.context_length": "96"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert options.context(512, small, is_default=True) == 96
        assert options.context(90, small) == 96
        assert options.context(0, small) == 96
        assert options.context(4096, small, scaled=True) == 4096
        assert options.context(300, {}) == 512
    with pytest.warns(UserWarning, match=r"n_ctx=4096 \(the model was trained for 96 tokens"):
        assert options.context(4096, small) == 96
    with pytest.raises(ConfigError, match="n_ctx is 0"):
        options.context(0, {})


def test_n_ctx_beyond_the_training_warns_and_goes_on(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())
    header = {**HEADER, "llama.rope.dimension_count": "32"}
    given = {**DEFAULTS, "n_ctx": 4000}
    with pytest.warns(UserWarning, match="n_ctx is 4000, and the model was trained for 2048 tokens: it runs") as caught:
        made = options.engine_options(given, DEFAULTS, header)
    assert len(caught) == 1
    assert (made["n_ctx"], made["kv_overrides"]) == (4096, {"llama.context_length": 4096})
    EngineConfig.from_options("tiny", made)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options.engine_options(given, DEFAULTS, header)
        made = options.engine_options({**DEFAULTS, "n_ctx": 2048}, DEFAULTS, header)
    assert "kv_overrides" not in made


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match=r"there is no option 'n_slot'.*n_slots"):
        Llama("tiny", n_slot=2)
    with pytest.raises(ConfigError, match="model_path is 3"):
        Llama(3)
    with pytest.raises(ValueError, match="does not exist"):
        Llama("/nowhere/model.gguf")


def test_a_copy_is_made_of_the_same_arguments():
    made = Llama.__new__(Llama)
    made._arguments = {"model_path": "/nowhere/model.gguf", "n_ctx": 64}
    with pytest.raises(ValueError, match="does not exist"):
        pickle.loads(pickle.dumps(made))


def test_a_model_of_the_hub_is_fetched_with_its_parts(monkeypatch, tmp_path):
    made = {}
    (tmp_path / "m.gguf").touch()
    monkeypatch.setattr(
        "llamabatch.compat.llama.fetch", lambda *given, **more: made.update(more) or tmp_path / "m.gguf"
    )
    monkeypatch.setattr(Llama, "__init__", lambda self, path, **more: made.update(path=path, **more))
    Llama.from_pretrained("a/b", "*.gguf", cache_dir=tmp_path, n_ctx=64)
    assert made == {"cache_dir": tmp_path, "path": str(tmp_path / "m.gguf"), "n_ctx": 64}
    with pytest.raises(ConfigError, match="additional_files"):
        Llama.from_pretrained("a/b", "*.gguf", additional_files=["x*"])
    with pytest.raises(ConfigError, match="local_dir"):
        Llama.from_pretrained("a/b", "*.gguf", local_dir="x")
