"""compat.vllm over a FakeLLM: vLLM's names and defaults, arguments that reach a request, and those that are refused."""

import dataclasses
import importlib.util
import inspect
import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from llamabatch import EngineConfig
from llamabatch.cli.flag_table import VLLM, read_rows
from llamabatch.compat import options as shared
from llamabatch.compat import vllm
from llamabatch.compat.vllm import LLM, PoolingParams, SamplingParams, options, outputs, sampling_params
from llamabatch.compat.vllm.config import PoolerConfig
from llamabatch.compat.vllm.entrypoints import llm as llm_module
from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.sampling_params import GuidedDecodingParams, RequestOutputKind, StructuredOutputsParams
from llamabatch.compat.vllm.v1.metrics.reader import Counter, Gauge, Histogram
from llamabatch.errors import AdapterError, ConfigError, InputError, MemoryPlanError, PromptError, SamplingError
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.testing import FakeLLM

THEIRS = json.loads((Path(__file__).parent / "vllm_names.json").read_text(encoding="utf-8"))
ASKED = [{"role": "user", "content": "What is the time?"}]


def over(answers="one two three four", fake=None, **changed):
    fake = FakeLLM(answers=answers, n_ctx=512) if fake is None else fake
    return LLM._over(fake, **changed), fake


def params_of(params, **changed):
    """Returns the engine's parameters for a prompt with these parameters of vLLM."""
    made, fake = over(**changed)
    made.generate("Count", params)
    return fake.requests[-1].params


# --- the list of names ---


def test_each_option_of_vllm_is_taken_warned_of_or_refused():
    known = [*options.TAKEN, *options.IGNORED, *options.REFUSED]
    assert set(THEIRS["options"]) - {"model"} <= set(known)
    assert len(known) == len(set(known)), "each name is in one table"


def test_each_flag_of_the_engine_is_an_option():
    known = {*options.TAKEN, *options.IGNORED, *options.REFUSED, *options.OWN}
    rows = [row for row in read_rows() if row.program == VLLM]
    first = next(i for i, row in enumerate(rows) if "--tokenizer" in row.names)  # the server's flags come first
    flags = {name for row in rows[first:] for name in row.names if name.startswith("--")}
    aside = {"--allow-deprecated-quantization", "--data-parallel-multi-port-external-lb"}
    supervisor = {name for name in flags if "supervisor" in name}
    assert {name[2:].replace("-", "_") for name in flags - aside - supervisor} - known == set()


def test_each_method_has_their_parameters_or_says_why_it_is_absent():
    for name, parameters in THEIRS["methods"].items():
        found = set(inspect.signature(getattr(LLM, name)).parameters) - {"self"}
        assert set(parameters) <= found, name
    assert set(THEIRS["absent"]) == set(llm_module.ABSENT)


@pytest.mark.parametrize(
    ("of", "name"),
    [
        (outputs, "RequestOutput"),
        (outputs, "CompletionOutput"),
        (outputs, "PoolingRequestOutput"),
        (vllm, "PoolingParams"),
        (sampling_params, "StructuredOutputsParams"),
        (sampling_params, "GuidedDecodingParams"),
    ],
)
def test_fields_are_theirs(of, name):
    assert set(THEIRS[name]) <= {field.name for field in dataclasses.fields(getattr(of, name))}


def test_fields_of_a_lora_request_stand_in_their_order():
    assert [field.name for field in dataclasses.fields(LoRARequest)] == THEIRS["LoRARequest"]


def test_parameters_and_their_defaults_are_theirs():
    fields = {field.name: field.default for field in dataclasses.fields(SamplingParams)}
    assert set(THEIRS["SamplingParams"]) == {*fields, *sampling_params.FORMER, "guided_decoding"}
    assert {name: fields[name] for name in THEIRS["defaults"]} == THEIRS["defaults"]


def test_the_page_is_made_of_the_tables():
    docs = Path(__file__).parents[3] / "docs"
    spec = importlib.util.spec_from_file_location("make_vllm_names", docs / "make_vllm_names.py")
    maker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(maker)
    page = maker.page()
    assert page == (docs / "vllm_names.md").read_text(encoding="utf-8"), "run: python docs/make_vllm_names.py"
    for name in (*THEIRS["options"], *THEIRS["SamplingParams"], *THEIRS["methods"], *THEIRS["absent"]):
        assert f"`{name}`" in page, name


def test_names_that_are_absent_say_why():
    made, _ = over()
    for name, why in llm_module.ABSENT.items():
        with pytest.raises(AttributeError, match=f"LLM.{name} is not there: ") as caught:
            getattr(made, name)
        assert why in str(caught.value)
    with pytest.raises(ImportError, match=r"AsyncEngineArgs is not there: give the options"):
        from llamabatch.compat.vllm import AsyncEngineArgs  # noqa: F401
    with pytest.raises(AttributeError, match=r"EngineArgs.add_cli_args is not there: the options of vLLM's"):
        vllm.EngineArgs.add_cli_args(None)
    with pytest.raises(TypeError, match=r"'max_tokens', a parameter of sampling: give SamplingParams\(max_tokens="):
        made.generate("a", max_tokens=3)
    with pytest.raises(TypeError, match=r"'adapters', an adapter: give lora_request="):
        made.chat([], adapters="red")
    with pytest.raises(ImportError, match=r"BeamSearchParams is not there"):
        from llamabatch.compat.vllm.sampling_params import BeamSearchParams  # noqa: F401


# --- options ---


def engine_options(**given):
    return options.engine_options(given)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"max_model_len": 2048, "max_num_seqs": 1024}, {"n_ctx": 2048, "n_slots": 256}),
        ({"max_model_len": "4K"}, {"n_ctx": 4096}),
        ({"max_model_len": -1, "enable_lora": True, "tokenizer": None}, {}),
        ({"max_num_batched_tokens": 8192}, {"n_batch": 8192}),
        ({"enable_prefix_caching": False, "seed": 7}, {"cache_prefix": False, "seed": 7}),
        ({"kv_cache_dtype": "auto", "quantization": "gguf", "load_format": "auto"}, {}),
        ({"kv_cache_dtype": "bfloat16"}, {"type_k": "bf16", "type_v": "bf16"}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 5}},
            {"speculate": "lookup", "n_draft": 5},
        ),
        ({"speculative_config": {"model": "d.gguf"}}, {"speculate": "draft", "draft_model": "d.gguf"}),
        ({"spec_model": "d.gguf", "spec_tokens": 3}, {"speculate": "draft", "draft_model": "d.gguf", "n_draft": 3}),
        ({"pooler_config": PoolerConfig(pooling_type="CLS")}, {"pooling": "cls"}),
        ({"override_pooler_config": {"pooling_type": "LAST"}}, {"pooling": "last"}),
        ({"hf_overrides": {}, "logits_processors": None, "task": "embed", "runner": "pooling"}, {}),
        ({"n_slots": 3, "n_gpu_layers": 0}, {"n_slots": 3, "n_gpu_layers": 0}),
    ],
)
def test_options_become_those_of_an_engine(given, wanted):
    made, _ = engine_options(**given)
    assert made == {"reasoning_format": "none", "seed": 0, **wanted}
    EngineConfig.from_options("tiny", made)
    assert made.get("pooling", "cls") in POOLINGS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "awq"}, "quantization is 'awq', which is not supported: the file has its quantisation"),
        ({"load_format": "dummy"}, "load_format is 'dummy'"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8'"),
        ({"hf_overrides": {"a": 1}}, "hf_overrides is"),
        ({"task": "transcription"}, "task is 'transcription'"),
        ({"generation_config": "/a/folder"}, "generation_config is"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode is"),
        ({"speculative_config": {"method": "eagle"}}, "speculative_config is"),
        ({"pooler_config": {"step_tag_id": 3}}, "step_tag_id"),
        ({"structured_outputs_config": {"disable_any_whitespace": True}}, "disable_any_whitespace"),
        ({"skip_tokenizer_init": True}, "skip_tokenizer_init is True"),
        ({"logits_processors": ["a.b"]}, "logits_processors is"),
    ],
)
def test_options_that_would_change_an_answer_are_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        engine_options(**given)


def test_options_without_a_meaning_are_taken_with_one_warning(monkeypatch):
    monkeypatch.setattr(shared, "_warned", set())
    given = {
        **{"tensor_parallel_size": 1, "dtype": "float16", "enforce_eager": True, "trust_remote_code": True},
        **{"gpu_memory_utilization": 0.9, "swap_space": 4, "disable_log_stats": False},
    }
    with pytest.warns(UserWarning, match="without effect here") as caught:
        assert engine_options(**given) == engine_options()
    assert len(caught) == 1
    assert all(name in str(caught[0].message) for name in given)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine_options(**given)


def test_an_unknown_option_is_a_type_error_with_the_nearest_name():
    with pytest.raises(TypeError, match=r"there is no option 'tensor_paralel_size'; did you mean 'tensor_parallel"):
        LLM("tiny", tensor_paralel_size=1)


def test_as_many_sequences_run_as_fit(monkeypatch):
    tried = []

    def load(model, **given):
        tried.append(given)
        if "n_slots" in given:
            raise MemoryPlanError("too many")
        return FakeLLM()

    monkeypatch.setattr(llm_module.native, "LLM", load)
    with pytest.warns(UserWarning, match="max_num_seqs is 256, which does not fit in memory"):
        LLM("tiny", max_num_seqs=256)
    assert len(tried) == 2
    monkeypatch.setattr(llm_module.native, "LLM", lambda *given, **more: load("", n_slots=1))
    with pytest.raises(MemoryPlanError):
        LLM("tiny")


def test_a_revision_is_that_of_the_hub(monkeypatch):
    asked = []
    monkeypatch.setattr(llm_module, "fetch_reference", lambda *given: asked.append(given) or "/m.gguf")
    monkeypatch.setattr(llm_module.native, "LLM", lambda model, **given: asked.append(model) or FakeLLM())
    LLM("owner/repo:Q4_K_M", revision="v1", download_dir="/d")
    LLM("tiny", revision="main")
    assert asked == [("hf:owner/repo:Q4_K_M", "v1", "/d"), "/m.gguf", "tiny"]


# --- parameters ---


def test_defaults_are_vllms():
    params = params_of(None)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (16, 1.0, 1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0


def test_parameters_reach_the_request():
    given = {
        **{"n": 2, "temperature": 0.3, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": 5, "max_tokens": 3},
        **{"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1, "logprobs": 2},
        **{"prompt_logprobs": 1, "min_tokens": 1, "ignore_eos": True, "skip_special_tokens": False},
        **{"include_stop_str_in_output": True, "skip_reading_prefix_cache": True},
    }
    params = SamplingParams(**given, stop=["x"], stop_token_ids=[9], bad_words=["no"], logit_bias={4: 1.0}).to_engine()
    assert {name: getattr(params, name) for name in given} == given
    assert (params.stop, params.stop_token_ids, params.bad_words) == (("x",), (9,), ("no",))
    assert params.logit_bias == ((4, 1.0),)


def test_the_salt_of_a_prompt_is_that_of_its_request():
    made, fake = over()
    prompts = [{"prompt": "a", "cache_salt": "red"}, {"prompt_token_ids": [1, 2], "cache_salt": "blue"}, "b"]
    made.generate(prompts, SamplingParams(max_tokens=2))
    assert [request.params.cache_salt for request in fake.requests] == ["red", "blue", None]


def test_parameters_can_be_set_afterwards():
    params = over()[0].get_default_sampling_params()
    params.max_tokens, params.temperature = 2, 0.0
    found = params_of(params)
    assert (found.max_tokens, found.temperature) == (2, 0.0)
    assert params.clone() == params
    assert params.clone() is not params
    params.max_tokens = -3
    with pytest.raises(ValueError, match="max_tokens is -3"):
        params_of(params)


def test_defaults_of_the_file_hold_unless_they_are_turned_off(monkeypatch):
    fake = FakeLLM()
    monkeypatch.setattr(
        fake._client.model, "metadata", {"general.sampling.temp": "0.6", "general.sampling.top_k": "20"}
    )
    made = over(fake=fake)[0].get_default_sampling_params()
    assert (made.temperature, made.top_k, made.top_p, made.max_tokens) == (0.6, 20, 1.0, 16)
    made = over(fake=fake, generation_config="vllm")[0].get_default_sampling_params()
    assert made == SamplingParams()
    changed = {"temperature": 0.1, "max_new_tokens": 7}
    made = over(fake=fake, override_generation_config=changed)[0].get_default_sampling_params()
    assert (made.temperature, made.top_k, made.max_tokens) == (0.1, 20, 7)


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"temperature": -1}, ValueError, "temperature is -1"),
        ({"flat_logprobs": True}, ValueError, "flat_logprobs is True, which is not supported"),
        ({"extra_args": {"a": 1}}, ValueError, "extra_args is"),
        ({"use_beam_search": True}, TypeError, "there is no beam search"),
        ({"temprature": 1}, TypeError, "did you mean 'temperature'"),
        ({"mirostat": 2}, TypeError, "llamabatch.SamplingParams has"),
        ({"structured_outputs": "x"}, ValueError, "give StructuredOutputsParams"),
        ({"logits_processors": [lambda a, b, c: c]}, ValueError, "takes more than"),
        (
            {"guided_decoding": GuidedDecodingParams(regex="a"), "structured_outputs": {"regex": "a"}},
            ValueError,
            "twice",
        ),
    ],
)
def test_parameters_that_are_refused_are_named(given, error, message):
    with pytest.raises(error, match=message):
        SamplingParams(**given)


def test_values_that_mean_nothing_are_taken():
    given = {"use_beam_search": False, "output_kind": RequestOutputKind.FINAL_ONLY, "seed": -1, "extra_args": None}
    assert params_of(SamplingParams(**given, length_penalty=1.0, guided_decoding=None)).seed is None
    assert SamplingParams.from_optional(temperature=None, max_tokens=None) == SamplingParams(max_tokens=None)


@pytest.mark.parametrize("kind", [StructuredOutputsParams, GuidedDecodingParams])
def test_a_form_binds_from_the_first_token_on(kind):
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}
    form = params_of(SamplingParams(structured_outputs=kind(json=schema))).structure
    assert (form.kind, json.loads(form.text), form.in_reasoning) == ("json", schema, True)
    del schema["additionalProperties"]
    same = kind(json=json.dumps(schema), disable_additional_properties=True)
    assert params_of(SamplingParams(structured_outputs=same)).structure == form
    with pytest.raises(ValueError, match="not of a JSON schema"):
        kind(json={"not": {}})
    assert params_of(SamplingParams(structured_outputs=kind(json={"not": {}}, lenient=True))).structure.not_held
    form = params_of(SamplingParams(structured_outputs=kind(choice=["a", "b"])), reasoning_parser="qwen3").structure
    assert (form.kind, form.in_reasoning) == ("choice", False)
    with pytest.raises(ValueError, match="has regex, grammar; give one"):
        kind(regex="a", grammar="b")
    with pytest.raises(ValueError, match="whitespace_pattern is"):
        kind(json=schema, whitespace_pattern=" ")


def test_a_form_without_a_kind():
    with pytest.raises(SamplingError, match="StructuredOutputsParams has none"):
        StructuredOutputsParams()
    assert params_of(SamplingParams(guided_decoding=GuidedDecodingParams(backend="outlines"))).structure is None
    assert GuidedDecodingParams.from_optional(json=None, backend="auto") is None
    assert GuidedDecodingParams.from_optional(regex="a").regex == "a"


# --- calls ---


def test_outputs_have_their_shape():
    made, _ = over(["one two three", "four"])
    first, second = made.generate(["Count", "Go on"], SamplingParams(max_tokens=2, logprobs=1), use_tqdm=False)
    assert (first.request_id, second.request_id, first.prompt, first.finished) == ("0", "1", "Count", True)
    assert isinstance(first.prompt_token_ids, list)
    [completion] = first.outputs
    assert (completion.index, completion.text, completion.finish_reason) == (0, "one two", "length")
    assert (completion.stop_reason, completion.lora_request, completion.finished()) == (None, None, True)
    assert type(completion.finish_reason) is str
    assert len(completion.token_ids) == len(completion.logprobs) == 2
    assert completion.cumulative_logprob is not None
    assert (second.outputs[0].finish_reason, second.outputs[0].stop_reason) == ("stop", None)
    assert first.metrics is first.encoder_prompt is first.prompt_logprobs is None


def test_without_detokenize_the_text_is_empty():
    [output] = over()[0].generate("Count", SamplingParams(detokenize=False))
    assert output.outputs[0].text == ""
    assert output.outputs[0].token_ids


def test_a_stop_string_is_the_reason():
    [output] = over()[0].generate("Count", SamplingParams(stop="three"))
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("one two ", "three")


@pytest.mark.parametrize("prompt", ["a b", {"prompt": "a b"}, [7, 8], {"prompt_token_ids": [7, 8]}])
def test_a_single_prompt_is_a_list_of_one(prompt):
    made, _ = over()
    [output] = made.generate(prompt)
    assert output.prompt == (None if isinstance(prompt, list) or "prompt_token_ids" in prompt else "a b")
    [again] = made.generate(prompt_token_ids=output.prompt_token_ids)
    assert again.prompt_token_ids == output.prompt_token_ids


def test_names_of_special_tokens_in_a_prompt_are_tokens():
    made, _ = over()
    text = made.get_tokenizer().apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert made.generate(text)[0].prompt_token_ids[-20:] == made.chat(ASKED)[0].prompt_token_ids[-20:]


def test_a_prompt_is_cut_at_its_left():
    made, _ = over()
    whole = made.generate("a b c d")[0].prompt_token_ids
    assert made.generate("a b c d", SamplingParams(truncate_prompt_tokens=2))[0].prompt_token_ids == whole[-2:]
    assert made.generate("a b c d", tokenization_kwargs={"truncate_prompt_tokens": 3})[0].prompt_token_ids == whole[-3:]
    assert made.generate(whole, SamplingParams(truncate_prompt_tokens=1))[0].prompt_token_ids == whole[-1:]
    assert len(made.generate("a " * 900, SamplingParams(truncate_prompt_tokens=-1))[0].prompt_token_ids) == 511
    with pytest.raises(InputError, match="tokenization_kwargs has padding"):
        made.generate("a", tokenization_kwargs={"padding": 3})


def test_each_prompt_has_its_parameters_and_priority():
    made, fake = over()
    made.generate(["a", "b"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=2)], priority=[1, 0])
    assert sorted((each.params.max_tokens, each.params.priority) for each in fake.requests) == [(1, 1), (2, 0)]
    with pytest.raises(InputError, match="there are 1 SamplingParams for 2 prompts"):
        made.generate(["a", "b"], [SamplingParams()])
    with pytest.raises(InputError, match=r"give SamplingParams of llamabatch.compat.vllm"):
        made.generate("a", [{"max_tokens": 1}])
    with pytest.raises(InputError, match="priority has 1 numbers for 2 prompts"):
        made.generate(["a", "b"], priority=[1])


def test_one_bad_prompt_ends_the_call():
    made, _ = over()
    with pytest.raises(ValueError, match="n_ctx allows"):
        made.generate(["a", "b " * 900])


def test_chats_are_answered_with_their_options():
    made, fake = over()
    [output] = made.chat(ASKED, SamplingParams(max_tokens=1), False, chat_template_kwargs={"enable_thinking": False})
    assert output.outputs[0].text == "one"
    assert len(made.chat([ASKED, ASKED])) == 2
    tool = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
    made.chat(ASKED, tools=[tool])
    assert "clock" in fake.requests[-1].prompt
    [output] = made.chat(ASKED, chat_template="{{ messages[0].content }}!")
    assert output.prompt == "What is the time?!"
    [output] = over(chat_template="{{ messages[0].content }}?")[0].chat(ASKED)
    assert output.prompt == "What is the time??"
    with pytest.raises(PromptError, match="mm_processor_kwargs is"):
        made.chat(ASKED, mm_processor_kwargs={"a": 1})
    with pytest.raises(ValueError, match="both True"):
        made.chat([*ASKED, {"role": "assistant", "content": "It"}], continue_final_message=True)


def test_the_tokenizer_has_the_names_of_transformers():
    tokenizer = over()[0].get_tokenizer()
    ids = tokenizer.encode("one two", add_special_tokens=False)
    assert tokenizer.decode(ids) == "one two"
    assert tokenizer.batch_decode([ids, ids]) == ["one two"] * 2
    assert tokenizer("one two", add_special_tokens=False).input_ids == ids
    assert tokenizer(["one", "two"])["attention_mask"]
    assert tokenizer.encode("one two", False, truncation=True, max_length=1) == ids[:1]
    assert tokenizer.convert_ids_to_tokens(ids) == tokenizer.tokenize("one two")
    assert tokenizer.eos_token == "<|eos|>"
    assert tokenizer.decode(tokenizer.eos_token_id) == "<|eos|>"
    assert tokenizer.decode([tokenizer.eos_token_id], skip_special_tokens=True) == ""
    assert (tokenizer.vocab_size, tokenizer.pad_token_id) == (len(tokenizer), None)
    chat = tokenizer.apply_chat_template(ASKED, tokenize=False)
    assert chat.endswith("<|im_end|>\n")
    assert tokenizer.decode(tokenizer.apply_chat_template(ASKED)) == chat
    assert tokenizer.apply_chat_template([ASKED, ASKED], tokenize=False) == [chat, chat]
    assert tokenizer.apply_chat_template(ASKED, return_dict=True).attention_mask
    with pytest.raises(PromptError, match="return_tensors is not there"):
        tokenizer.apply_chat_template(ASKED, return_tensors="pt")
    with pytest.raises(PromptError, match="and no padding"):
        tokenizer.encode("a", padding=True)
    with pytest.raises(AttributeError, match=r"Tokenizer.pad is not there"):
        tokenizer.pad([ids])


def test_vectors_have_length_one_unless_told_otherwise():
    made, _ = over(fake=FakeLLM(embeddings=lambda request: [3.0, 4.0, 0.0]))
    [output] = made.embed("text")
    assert output.outputs.embedding == pytest.approx([0.6, 0.8, 0.0])
    assert (output.outputs.hidden_size, output.finished, repr(output.outputs)) == (
        3,
        True,
        "EmbeddingOutput(hidden_size=3)",
    )
    raw, short = made.embed(["a", "b"], pooling_params=[PoolingParams(normalize=False), PoolingParams(dimensions=1)])
    assert (raw.outputs.embedding, short.outputs.embedding) == ([3.0, 4.0, 0.0], [1.0])
    [plain] = over(fake=made.llm, pooler_config=PoolerConfig(normalize=False))[0].embed("a")
    assert plain.outputs.embedding == [3.0, 4.0, 0.0]
    [array] = made.encode("a", PoolingParams(normalize=False), pooling_task="embed")
    assert np.array_equal(array.outputs.data, np.array([3, 4, 0], np.float32))
    with pytest.raises(InputError, match="pooling_task is 'plugin'"):
        made.encode("a", pooling_task="plugin")
    with pytest.raises(InputError, match=r"load it with LLM\(..., pooling='none'\)"):
        made.encode("a", pooling_task="token_embed")


def test_classes_are_probabilities():
    made, _ = over(fake=FakeLLM(labels=("no", "yes"), classes=lambda request: {"no": 0.25, "yes": 0.75}))
    [output] = made.classify("text")
    assert output.outputs.probs == pytest.approx([0.25, 0.75])
    assert output.outputs.num_classes == 2
    [array] = made.encode("text", pooling_task="classify")
    assert array.outputs.data == pytest.approx([0.25, 0.75])


def test_scores_are_relevance_or_cosines():
    made, _ = over(fake=FakeLLM(embeddings={"a": [1.0, 0.0], "b": [0.0, 2.0], "c": [1.0, 1.0]}))
    assert [each.outputs.score for each in made.score("a", ["a", "b", "c"])] == pytest.approx([1, 0, 0.5**0.5])
    assert made.score(["a", "b"], ["b", "b"])[1].outputs.score == pytest.approx(1)
    with pytest.raises(PromptError, match="there are 2 and 3 texts"):
        made.score(["a", "b"], ["a", "b", "c"])
    ranks = FakeLLM(pooling="rank", relevance={"x": 0.75, "y": 0.25})
    made, _ = over(fake=ranks)
    assert [each.outputs.score for each in made.score("q", ["y", "x", "y"])] == pytest.approx([0.25, 0.75, 0.25])
    assert [each.outputs.score for each in made.score(["q", "p"], ["x", "y"])] == pytest.approx([0.75, 0.25])
    with pytest.raises(PromptError, match="chat_template is not supported here"):
        made.score("q", "x", chat_template="x")


def test_an_adapter_is_loaded_by_the_first_request_with_it(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "lora.gguf").touch()
    made, fake = over()
    loaded = []
    monkeypatch.setattr(fake, "load_adapter", lambda name, path: loaded.append((name, path)))
    monkeypatch.setattr(
        type(fake._client), "adapters", property(lambda self: [name for name, _ in loaded]), raising=False
    )
    red = LoRARequest("red", 1, str(tmp_path / "a"))
    [with_it, without] = made.generate(["a", "b"], lora_request=[red, None])
    assert (with_it.lora_request, with_it.outputs[0].lora_request, without.lora_request) == (red, red, None)
    assert loaded == [("red", str(tmp_path / "a" / "lora.gguf"))]
    made.chat(ASKED, lora_request=red)
    assert len(loaded) == 1
    with pytest.raises(AdapterError, match="'red' is loaded from"):
        made.generate("a", lora_request=LoRARequest("red", 2, "other.gguf"))
    with pytest.raises(AdapterError, match=r"a folder with no .gguf file; give one GGUF file"):
        made.generate("a", lora_request=LoRARequest("blue", 2, str(tmp_path)))
    with pytest.raises(AdapterError, match="lora_request has 1 items for 2 prompts"):
        made.generate(["a", "b"], lora_request=[red])
    with pytest.raises(AdapterError, match="give LoRARequest"):
        made.generate("a", lora_request=["red"])
    with pytest.raises(AdapterError, match="lora_int_id is 0"):
        LoRARequest("red", 0, "a")


def test_figures_have_vllms_names():
    made, _ = over()
    made.generate(["a", "b"])
    found = {each.name: each for each in made.get_metrics()}
    assert isinstance(found["vllm:num_requests_running"], Gauge)
    assert isinstance(found["vllm:generation_tokens"], Counter)
    assert found["vllm:generation_tokens"].value > 0
    histogram = found["vllm:e2e_request_latency_seconds"]
    assert isinstance(histogram, Histogram)
    assert histogram.buckets["+Inf"] == histogram.count


def test_the_rest():
    made, _ = over()
    assert made.reset_prefix_cache(reset_running_requests=False) is True
    with made:
        assert repr(made).startswith("LLM(FakeLLM(")
    made.close()
    assert set(vllm.__all__) <= set(dir(vllm))
