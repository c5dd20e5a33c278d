"""Generate over a FakeLLM: the prompts and seeds of rows, and their results."""

import pickle
import threading

import numpy as np
import pytest

from llamabatch import ConfigError, EngineClosedError, EngineError, InputError, SamplingError, SamplingParams
from llamabatch.columns import Generate
from llamabatch.columns.prompts import Prompts, seed_of
from llamabatch.request.media import IMAGE
from llamabatch.testing import FakeLLM

BATCH = {"review": ["fine", "bad"], "a name": ["x", "y"], "stars": [5, None]}


def prompts_of(prompt, batch=None, **given):
    llm = FakeLLM()
    made = Generate(llm, prompt=prompt, **given)(dict(batch or BATCH))
    assert made["error"] == [None] * len(made["error"]), made["error"]
    return [request.text for request in llm.requests]


def errors_of(prompt, batch=None, **given):
    return Generate(FakeLLM(), prompt=prompt, **given)(dict(batch or BATCH))["error"]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Rate: {{ review }}", ["Rate: fine", "Rate: bad"]),
        ("{{ row['a name'] | upper }}", ["X", "Y"]),
        ("{{ review }}{% if stars %} {{ stars }}{% endif %}", ["fine 5", "bad"]),
        ("{{ stars | default('none') }}", ["5", "none"]),
        ("{% for i in range(2) %}{{ review }}{% endfor %}", ["finefine", "badbad"]),
        (lambda row: f"{row['review']} {row['stars']}", ["fine 5", "bad None"]),
    ],
)
def test_a_prompt_is_made_of_each_row(prompt, expected):
    assert prompts_of(prompt) == expected


def test_a_text_is_a_users_message_where_the_model_has_a_template():
    llm = FakeLLM()
    Generate(llm, prompt="{{ review }}", system="Be {{ stars | default('calm') }}.")(BATCH)
    assert [request.messages for request in llm.requests] == [
        ({"role": "system", "content": "Be 5."}, {"role": "user", "content": "fine"}),
        ({"role": "system", "content": "Be calm."}, {"role": "user", "content": "bad"}),
    ]


def test_pictures_stand_before_the_text_and_are_told_apart():
    pixels = np.zeros((2, 2, 3), np.uint8)
    cells = [b"a", b"b", {"bytes": b"a", "path": "a.png"}, ["a.png", pixels], np.array(["a.png"], object), pixels, None]
    prompts = Prompts("What?", "Be calm.", media_columns={IMAGE: ("photo", "other")})
    assert prompts.wanted(["other", "photo", "x"]) == ["other", "photo"]
    rows = list(prompts.of({"photo": cell, "other": ""} for cell in cells))
    assert [row.content for row in rows[:2]] == [
        [{"role": "user", "content": [{"type": "image", "image": data}, {"type": "text", "text": "What?"}]}]
        for data in (b"a", b"b")
    ]
    assert [len(row.content[0]["content"]) - 1 for row in rows[:-1]] == [1, 1, 1, 2, 1, 1]
    assert rows[-1].error == "there is no picture in 'photo', 'other'"
    assert len({row.digest() for row in rows}) == len(rows) - 1  # the same bytes are the same picture
    assert rows[0].digest() == rows[2].digest()
    [other] = Prompts(lambda row: [5], media_columns={IMAGE: ("photo",)}).of(iter([{"photo": b"a"}]))
    assert "beside a picture of 'photo' give a text" in other.error
    with pytest.raises(ConfigError, match="image is 'photo', and there is no such column"):
        prompts.wanted(["x"])


def test_a_plain_completion():
    llm = FakeLLM()
    Generate(llm, prompt="{{ review }}", chat=False)(BATCH)
    assert [(request.kind, request.prompt) for request in llm.requests] == [("generate", "fine"), ("generate", "bad")]


def test_a_model_without_a_template_completes():
    llm = FakeLLM()
    llm._client.model.chat_template = None
    Generate(llm, prompt="{{ review }}")(BATCH)
    assert [request.kind for request in llm.requests] == ["generate"] * 2
    with pytest.raises(ConfigError, match="this model has no chat template"):
        Generate(llm, prompt="{{ review }}", system="Be calm.")(BATCH)


def test_a_function_may_return_messages_or_token_ids():
    llm = FakeLLM()
    messages = [{"role": "user", "content": "Hello"}]
    rows = {"which": ["messages", "ids", "text"]}
    ids = llm.tokenize("some words")
    choices = {"messages": messages, "ids": ids, "text": "plain"}
    Generate(llm, prompt=lambda row: choices[row["which"]], chat=False)(rows)
    assert [request.kind for request in llm.requests] == ["chat", "generate", "generate"]
    assert llm.requests[1].prompt_token_ids == tuple(ids)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("{{ stars }}", "column 'stars' is null in this row"),
        ("{{ stars | upper }}", "column 'stars' is null"),
        ("{{ row['stars'] ~ '' }}", "column 'stars' is null"),
        ("{{ review }}{{ 1 // 0 if not stars }}", "division"),
        ("{{ review }}{% if not stars %}{{ 'a' * 10**10 }}{% endif %}", "takes more than"),
        (
            lambda row: "x" if row["stars"] else None,
            "the prompt is null; give a text, a list of messages, or token ids",
        ),
        (lambda row: "x" if row["stars"] else 1 // 0, "ZeroDivisionError"),
        (lambda row: "x" if row["stars"] else [object()], "no form in JSON"),
        (lambda row: "x" if row["stars"] else [], "the prompt is empty"),
        (lambda row: "x" if row["stars"] else [{"role": 5}], "a message is"),
    ],
)
def test_a_row_that_cannot_be_run_has_the_reason_and_the_other_runs(prompt, message):
    first, second = errors_of(prompt)
    assert first is None
    assert message in second


def test_a_row_that_ends_with_an_error_has_it():
    llm = FakeLLM(answers={"fine": RuntimeError("no"), "bad": "yes"})
    made = Generate(llm, prompt="{{ review }}", output={"text": "text", "finish_reason": "why"})(BATCH)
    assert made["text"] == [None, "yes"]
    assert made["why"] == [None, "stop"]
    assert "no" in made["error"][0]


def test_names_of_outputs():
    output = {"text": "a", "reasoning": "b", "n_tokens": "c", "finish_reason": "d", "error": "e"}
    made = Generate(FakeLLM(answers="one two three"), {"max_tokens": 2}, prompt="{{ review }}", output=output)(BATCH)
    assert [made[name][0] for name in "abcde"] == ["one two", None, 2, "length", None]


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({"prompt": "review"}, ConfigError, "names no column"),
        ({"prompt": "{{ 1 + 1 }}"}, ConfigError, "names no column"),
        ({"prompt": 5}, ConfigError, "prompt is 5"),
        ({"prompt": "{{ review"}, ConfigError, "the template of prompt cannot be compiled"),
        ({"system": "{{ x"}, ConfigError, "the template of system cannot be compiled"),
        ({"system": 5}, ConfigError, "system is 5"),
        ({"id": 5}, ConfigError, "id is 5"),
        ({"chat": "yes"}, ConfigError, "chat is 'yes'"),
        ({"chat": False, "system": "Be calm."}, ConfigError, "leave chat=False out"),
        ({"chat": False, "image": "stars"}, ConfigError, "leave chat=False out"),
        ({"image": ["stars", 5]}, ConfigError, "give the name of a column, or a list of them"),
        ({"chat_template_kwargs": {"tools": 1}}, InputError, "a separate argument"),
        ({"params": 5}, InputError, "params is 5"),
        ({"params": {"n": 2}}, ConfigError, "n of params is 2"),
        ({"params": {"temprature": 1}}, SamplingError, "temperature"),
        ({"output": {"txt": "a"}}, ConfigError, "output has 'txt'; did you mean 'text'"),
        ({"output": {"text": ""}}, ConfigError, "output has '' for text"),
        ({"output": {"text": "a", "n_tokens": "a"}}, ConfigError, "two new columns would have the name 'a'"),
        ({"output": "error"}, ConfigError, "two new columns would have the name 'error'"),
        ({"schema": {"type": "string"}}, ConfigError, "schema has no properties"),
        ({"schema": 5}, SamplingError, "give a schema or a pydantic model class"),
        (
            {"schema": {"properties": {"a": {}}}, "params": {"structured_outputs": {"choice": ["a"]}}},
            ConfigError,
            "are both given",
        ),
        ({"schema": {"properties": {"error": {}}}}, ConfigError, "give output={'error': 'another name'}"),
        ({"model": "tiny", "n_slot": 3}, ConfigError, "n_slots"),
        ({"n_slots": 3}, ConfigError, "the model is an LLM already"),
    ],
)
def test_wrong_arguments_are_refused_at_once(given, error, message):
    arguments = {"model": FakeLLM(), "prompt": "{{ review }}", **given}
    with pytest.raises(error, match=message):
        Generate(arguments.pop("model"), arguments.pop("params", None), **arguments)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"prompt": "{{ reviw }}"}, "prompt reads 'reviw', and there is no such column; did you mean 'review'"),
        ({"prompt": "{{ review }}", "system": "{{ x }}"}, "system reads 'x'"),
        ({"prompt": "{{ review }}", "id": "key"}, "id is 'key', and there is no such column"),
    ],
)
def test_a_column_that_is_not_there_is_refused(given, message):
    llm = FakeLLM()
    with pytest.raises(ConfigError, match=message):
        Generate(llm, **given)(BATCH)
    assert llm.requests == []


def seeds_of(params, batch, **given):
    llm = FakeLLM()
    Generate(llm, params, prompt="{{ review }}", **given)(batch)
    return {request.text: request.params.seed for request in llm.requests}


def test_a_seed_follows_from_the_prompt_and_not_from_the_batch():
    whole = seeds_of({"seed": 3}, {"review": ["a", "b", "c", "a"]})
    assert len(set(whole.values())) == 3
    assert seeds_of({"seed": 3}, {"review": ["c", "a"]}) == {"c": whole["c"], "a": whole["a"]}
    assert seeds_of({"seed": 4}, {"review": ["a"]}) != {"a": whole["a"]}
    assert seeds_of(None, {"review": ["a"]}) == seeds_of({"seed": 0}, {"review": ["a"]})


def test_a_seed_follows_from_the_id_where_there_is_one():
    batch = {"review": ["a", "b"], "key": [7, "seven"]}
    found = seeds_of(None, batch, id="key")
    assert found == {"a": seed_of(0, 7), "b": seed_of(0, "seven")}
    other = seeds_of(None, {"review": ["z"], "key": [7.0]}, id="key")
    assert other == {"z": seed_of(0, 7)}


def test_seeds_stay_from_version_to_version():
    assert seed_of(0, 7) == 13725030092251964339
    assert seed_of(3, "seven") == 198419040874459091


@pytest.mark.parametrize("value", [None, 1.5, True, ["a"]])
def test_a_row_without_an_id_cannot_be_run(value):
    found = errors_of("{{ review }}", {"review": ["a", "b"], "key": ["x", value]}, id="key")
    assert found[0] is None
    assert "give a text or a whole number" in found[1]


def test_a_schema_binds_the_text_and_its_properties_are_columns():
    llm = FakeLLM(answers={"fine": '{"label": "x"}', "bad": '{"label": '})
    schema = {"type": "object", "properties": {"label": {"type": "string"}}}
    made = Generate(llm, prompt="{{ review }}", schema=schema, output="raw")(BATCH)
    assert made["label"] == ["x", None]
    assert made["raw"] == ['{"label": "x"}', '{"label": ']
    assert made["error"][0] is None
    assert "the answer is no JSON" in made["error"][1]
    assert llm.requests[0].params.structure.kind == "json"


def test_an_answer_that_was_cut_says_so():
    schema = {"properties": {"label": {"type": "string"}}}
    made = Generate(FakeLLM(answers='{"label": "x"}'), {"max_tokens": 2}, prompt="{{ review }}", schema=schema)(BATCH)
    assert "it was cut after 2 tokens: raise max_tokens" in made["error"][0]


def test_a_copy_of_a_pickle_makes_the_same_prompts():
    made = Generate(
        "tiny",
        SamplingParams(max_tokens=3, seed=5),
        prompt="{{ review }}",
        schema={"properties": {"label": {"type": "string"}}},
        system="Be calm.",
        id="key",
        n_slots=2,
    )
    copy = pickle.loads(pickle.dumps(made))
    assert repr(copy) == repr(made)
    assert copy._params == made._params
    assert copy._options == made._options == {"isolate": True, "n_slots": 2}
    batch = made._opened({"review": ["a"], "key": [1]})
    assert list(copy._rows(batch)) == list(made._rows(batch))


def test_an_llm_cannot_be_pickled():
    with pytest.raises(TypeError, match="give the model's path"):
        pickle.dumps(Generate(FakeLLM(), prompt="{{ review }}"))


def test_an_llm_that_was_given_stays_open_and_the_generate_is_closed():
    llm = FakeLLM()
    with Generate(llm, prompt="{{ review }}") as generate:
        generate(BATCH)
    generate.close()
    with pytest.raises(EngineClosedError, match="this Generate is closed"):
        generate(BATCH)
    assert llm.generate("x")[0].text == "x"


def test_a_dead_engine_is_an_error_of_the_call_and_the_next_call_makes_another():
    """Otherwise a framework would keep a batch of errors instead of trying it again."""

    class Dying(FakeLLM):
        def stats(self):
            raise EngineClosedError("it died")

    generate = Generate("tiny", prompt="{{ review }}")
    dead = Dying(answers=RuntimeError("no"))
    generate._engine._llm = dead
    with pytest.raises(EngineClosedError, match="it died"):
        generate(BATCH)
    assert generate._engine._llm is None


def test_an_engine_that_was_given_up_is_an_error_of_the_call_even_if_another_one_is_there_by_now():
    def died(request):
        raise EngineError("the engine process ended 9 times in a row without a result, at last with SIGKILL")

    llm = FakeLLM(answers=died)
    with pytest.raises(EngineClosedError, match="9 times in a row"):
        Generate(llm, prompt="{{ review }}")(BATCH)


def test_threads_share_one_engine_and_each_gets_its_rows():
    both = threading.Barrier(2, timeout=30)
    llm = FakeLLM(answers=lambda request: (both.wait(), request.text)[1])
    generate, made = Generate(llm, prompt="{{ review }}"), {}
    threads = [
        threading.Thread(target=lambda name=name: made.__setitem__(name, generate({"review": [name] * 3})))
        for name in ("a", "b")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {name: batch["generated_text"] for name, batch in made.items()} == {"a": ["a"] * 3, "b": ["b"] * 3}


def test_progress_counts_the_rows():
    calls = []
    generate = Generate(FakeLLM(), prompt="{{ stars }}")
    generate(BATCH, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(0, 2), (1, 2), (2, 2)]
