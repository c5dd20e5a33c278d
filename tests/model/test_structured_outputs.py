"""Structured outputs in a whole engine: every text that ends with "stop" has the form, whatever the weights are."""

import json
import queue
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Literal

import pytest
from annotated_types import MaxLen
from pydantic import BaseModel, ConfigDict, Field, SecretStr, TypeAdapter

from llamabatch import LLM, FinishReason, SamplingError, SamplingParams
from llamabatch.llama.context import Context
from llamabatch.request.request import Request
from llamabatch.sampling import grammar_compiler
from tests.model.architectures import write
from tests.waiting import PATIENCE_S, until

WILD = {"temperature": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Address(Strict):
    street: Annotated[str, MaxLen(12)]
    number: Annotated[int, Field(ge=1, le=999)]


class Login(BaseModel):
    """Fields whose formats are annotations, and a set."""

    key: Annotated[SecretStr, MaxLen(5)]
    roles: set[Literal["read", "write", "own"]]


class Person(Strict):
    name: Annotated[str, Field(pattern="^[A-Z][a-z]{1,9}$")]
    age: Annotated[int, Field(ge=0, lt=150)]
    colour: Literal["red", "grün"]
    address: Address | None
    tags: Annotated[list[Annotated[str, MaxLen(5)]], MaxLen(3)] = []


class Tree(Strict):
    value: Annotated[float, Field(gt=-10, lt=10)]
    children: Annotated[list["Tree"], MaxLen(2)]


SCHEMAS = {
    "a record": Person,
    "a tree": Tree,
    "numbers": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 1000}, "maxItems": 4},
    "a pair": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["x", None, 3]}],
        "items": False,
        "minItems": 2,
    },
    "a map": {"type": "object", "additionalProperties": {"const": 1}, "minProperties": 1},
    "a date": {"type": "string", "format": "date"},
    "a set": Login,
    "anything": {"type": "object"},
}
CHECKS = {
    "a record": Person.model_validate_json,
    "a tree": Tree.model_validate_json,
    "numbers": TypeAdapter(Annotated[list[Annotated[int, Field(ge=-5, le=1000)]], MaxLen(4)]).validate_json,
    "a pair": TypeAdapter(tuple[bool, Literal["x", None, 3]]).validate_json,
    "a map": lambda text: set(json.loads(text).values()) == {1} or pytest.fail(text),
    "a date": lambda text: re.fullmatch(r'"\d{4}-\d\d-\d\d"', text) or pytest.fail(text),
    "a set": Login.model_validate_json,
    "anything": lambda text: isinstance(json.loads(text), dict) or pytest.fail(text),
}
FORMS = {
    r"a{2,4}(b|c\d)+": {"regex": r"a{2,4}(b|c[0-9])+"},
    "yes|no|p'têt\"": {"choice": ["yes", "no", "p'têt\""]},
    r"(\(+)x[yz]?\)+": {"grammar": 'start: "(" (start | "x" ("y" | "z")?) ")"'},
    r"[^\n]{3} = -?\d{1,4}\n": {"grammar": 'root ::= [^\\n]{3} " = " num "\\n"\nnum ::= "-"? [0-9]{1,4}'},
}


@pytest.fixture(scope="module")
def noise(tmp_path_factory):
    """An LLM with random weights, whose free text is nonsense."""
    with LLM(write("llama", tmp_path_factory.mktemp("model") / "llama.gguf"), n_ctx=512, n_slots=16) as llm:
        yield llm


def test_what_ends_with_stop_is_valid_even_from_random_weights(noise):
    asked = [({"json": schema}, CHECKS[name]) for name, schema in SCHEMAS.items()]
    asked += [(form, re.compile(regex, re.DOTALL).fullmatch) for regex, form in FORMS.items()]
    asked = [each for each in asked for _ in range(6)]
    params = [
        SamplingParams(structured_outputs=form, seed=i, max_tokens=300 if i % 6 else 5, **WILD)
        for i, (form, _) in enumerate(asked)
    ]
    outputs = noise.generate([f"{i}" for i in range(len(asked))], params)
    stopped = 0
    for output, (_, valid), given in zip(outputs, asked, params, strict=True):
        assert output.error is None
        if output.finish_reason == FinishReason.STOP:
            stopped += 1
            assert valid(output.text) is not None, output.text
        else:
            assert (output.finish_reason, len(output.token_ids)) == ("length", given.max_tokens)
    assert len(outputs) // 2 < stopped < len(outputs)


def test_company_changes_nothing(noise):
    """Free and constrained requests give the same texts together as alone."""
    forms = [None, {"regex": "[a-d ]{9}"}, None, {"json": Address}]
    params = [
        SamplingParams(structured_outputs=form, seed=i, max_tokens=40, temperature=0.9) for i, form in enumerate(forms)
    ] * 4
    prompts = [f"number {i} of many" for i in range(len(params))]
    together = noise.generate(prompts, params)
    alone = [noise.generate(prompt, given)[0] for prompt, given in zip(prompts, params, strict=True)]
    differing = sum(one.token_ids != other.token_ids for one, other in zip(alone, together, strict=True))
    assert differing <= 1  # a draw may lie exactly between two tokens


def test_other_parameters_work_before_the_mask(noise):
    grammar = {"structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 3}
    ids = {letter: noise.tokenize(letter, add_special=False)[-1] for letter in "ab"}
    for letter, other in ("ab", "ba"):
        params = SamplingParams(logit_bias={ids[letter]: 100.0}, temperature=0, **grammar)
        assert noise.generate("x", params)[0].text == letter
        params = SamplingParams(bad_words=[letter], **grammar)
        assert noise.generate("x", params)[0].text == other
    refused = noise.generate(
        ["x", "y"], [SamplingParams(bad_words=["a", "b"], **grammar), SamplingParams(max_tokens=2)], errors="return"
    )
    assert "exclude all" in refused[0].error
    assert refused[1].error is None


@pytest.mark.parametrize(
    "other",
    [
        {"mirostat": 1},
        {"mirostat": 2},
        {"dry_multiplier": 0.8},
        {"xtc_probability": 1.0, "xtc_threshold": 0.05},
        {"typical_p": 0.5, "top_n_sigma": 1.0, "dynatemp_range": 0.5},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"logprobs": 2, "prompt_logprobs": 1},
        {"best_of": 4, "n": 2},
        {"logits_processors": [lambda ids, logits: logits[::-1].copy()]},
        {"skip_special_tokens": False},
    ],
    ids=lambda other: next(iter(other)),
)
def test_every_sampler_keeps_to_the_form(noise, other):
    params = SamplingParams(structured_outputs={"regex": "[a-z]{3}( [0-9]{1,3}){2}"}, seed=1, **other)
    for output in noise.generate(["one", "two", "three"], params):
        for completion in output.outputs:
            assert re.fullmatch("[a-z]{3}( [0-9]{1,3}){2}", completion.text), output.error


def test_a_hostile_grammar_stalls_and_breaks_no_other_request(noise, monkeypatch):
    """While the grammar is tried out, another request goes on. Then only the request with the grammar fails."""
    pieces, ask = [], grammar_compiler.Trial._ask

    def ask_meanwhile(trial, question, seconds):
        n_before = len(pieces)
        answer = ask(trial, question, seconds if "1234577" in str(question) else PATIENCE_S)
        until(lambda: len(pieces) > n_before + 20)
        return answer

    monkeypatch.setattr(grammar_compiler.Trial, "_ask", ask_meanwhile)
    bad = {"json": {"type": "integer", "multipleOf": 1_234_577}}
    chain = {"json": {"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(5000)}, "$ref": "#/$defs/d0"}}
    outputs = []
    refused = [SamplingParams(structured_outputs=form) for form in (bad, chain)]
    asked = threading.Thread(target=lambda: outputs.extend(noise.generate(["x", "y"], refused, errors="return")))
    long = SamplingParams(max_tokens=400, ignore_eos=True, seed=0)
    asked.start()
    while asked.is_alive():
        for piece in noise.stream("z", long):
            if not asked.is_alive():
                break
            pieces.append(piece)
    asked.join()
    assert "1.5 s" in outputs[0].error
    assert "nested too deeply" in outputs[1].error


def test_the_grammar_of_a_request_that_waits_can_be_aborted(monkeypatch):
    go_on, run = threading.Event(), grammar_compiler.Trial.run
    monkeypatch.setattr(grammar_compiler.Trial, "run", lambda *asked: go_on.wait() and run(*asked))
    params, events = SamplingParams(structured_outputs={"regex": "a"}), queue.SimpleQueue()
    with LLM("tiny", n_slots=2) as llm:  # an LLM of its own, because the trial goes on after the request
        try:
            llm._client.submit([Request("waits", (1,), params)], events.put)
            assert llm.stats().waiting == 1
            llm._client.abort(["waits"])
            [event] = events.get(timeout=PATIENCE_S)
            assert event.finished.finish_reason == FinishReason.ABORT
            assert llm.stats().waiting == 0
        finally:
            go_on.set()


def test_preempted_sequences_go_on_where_they_were(tmp_path, monkeypatch, steps):
    """The context grows while a request runs, and the request loses its cells. It is computed again."""
    monkeypatch.setattr(Context, "carry_over", lambda *_: frozenset())
    form = "([a-f]{3} ){40}"
    path = write("llama", tmp_path / "llama.gguf")
    params = SamplingParams(structured_outputs={"regex": form}, seed=1, max_tokens=200, **WILD)
    with LLM(path, n_ctx=256, n_slots=8) as llm:
        alone = llm.generate("first", params)[0].text
    with LLM(path, n_ctx=256, n_slots=8, start_slots=1) as llm, ThreadPoolExecutor(1) as pool:
        llm.generate("x", SamplingParams(structured_outputs={"regex": form}, max_tokens=1))  # compiles the form
        with steps.held(20):
            stream = llm.stream("first", params)
            pieces = [next(stream), next(stream)]
            asked = pool.submit(llm.generate, [f"n {i}" for i in range(8)], params)
            until(lambda: llm.stats().in_flight == 9)
        others = asked.result()
        pieces += stream
        assert llm.stats().preemptions > 0
        assert all(re.fullmatch(form, output.text) for output in others)
        assert re.fullmatch(form, alone)
        assert "".join(piece.text for piece in pieces) == alone


def test_a_stop_string_cuts_a_form_and_says_so(noise):
    params = {"structured_outputs": {"regex": "[a-f]{8},[a-f]{8}"}, "max_tokens": 40, "seed": 3}
    [whole] = noise.generate("x", SamplingParams(**params))
    assert re.fullmatch("[a-f]{8},[a-f]{8}", whole.text)
    assert whole.outputs[0].stop_reason in noise._client.model.eog_ids
    [cut] = noise.generate("x", SamplingParams(stop=[",", "z"], **params))
    assert (cut.text, cut.finish_reason, cut.outputs[0].stop_reason) == (whole.text[:8], FinishReason.STOP, ",")
    [other] = noise.generate("x", SamplingParams(stop="z", **params))
    assert other.token_ids == whole.token_ids
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    [left] = noise.generate("x", SamplingParams(structured_outputs={"json": schema}, stop=":", max_tokens=60, seed=1))
    assert left.outputs[0].stop_reason == ":"
    assert left.text.startswith("{")


def test_a_child_process_compiles_for_itself():
    with LLM("tiny", isolate=True, n_slots=2) as llm:
        params = [
            SamplingParams(structured_outputs=form, **WILD)
            for form in ({"json": Address}, {"choice": ["left", "right"]}, {"regex": "(?=a)"})
        ]
        outputs = llm.generate(["a", "b", "c"], params, errors="return")
        Address.model_validate_json(outputs[0].text)
        assert outputs[1].text in ("left", "right")
        assert "look-around" in outputs[2].error
        assert isinstance(outputs[2].exception(), SamplingError)
        assert [each.exception() for each in outputs[:2]] == [None, None]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_form_that_cannot_be_compiled_is_a_value_error(isolate):
    with LLM("tiny", isolate=isolate, n_slots=4) as llm:
        for more in ({}, {"n": 2}, {}):  # the engine remembers that the form is bad at the third request
            params = SamplingParams(structured_outputs={"regex": "(["}, **more)
            with pytest.raises(SamplingError, match="regex of structured_outputs is refused"):
                llm.generate("a", params)


def test_constrained_and_guessing_rows_share_a_call():
    """Constrained sequences have no guesses, but other sequences in the same call have."""
    prompt = "one two three one two three one two three one two"
    free, held = (
        SamplingParams(temperature=0, max_tokens=40),
        SamplingParams(structured_outputs={"regex": "(one ){3}x{9}"}, temperature=0, max_tokens=40),
    )
    with LLM("tiny", speculate="lookup", speculate_always=True, n_slots=4) as llm:
        outputs = llm.generate([prompt, prompt, prompt], [free, held, free])
        assert llm.stats().drafted_tokens > 0
        assert outputs[1].text == "one one one xxxxxxxxx"
        assert outputs[0].text == outputs[2].text


def test_closing_waits_for_a_vocabulary_that_is_being_read(monkeypatch):
    """The first grammar reads the vocabulary of a model that is being closed. The model is freed only afterwards."""
    reading, read = threading.Event(), grammar_compiler._Vocabulary.__init__

    def slowly(self, model):
        reading.set()
        until(lambda: not model._owners)
        read(self, model)

    monkeypatch.setattr(grammar_compiler._Vocabulary, "__init__", slowly)
    llm, events = LLM("tiny", n_slots=2), queue.SimpleQueue()
    request = Request("waits", (1,), SamplingParams(structured_outputs={"regex": "a"}))
    llm._client.submit([request], events.put)
    assert reading.wait(PATIENCE_S)
    closer = threading.Thread(target=llm.close, daemon=True)
    closer.start()
    closer.join(PATIENCE_S)
    assert not closer.is_alive()
    [event] = events.get(timeout=PATIENCE_S)
    assert event.finished.finish_reason == FinishReason.ABORT


def test_closing_leaves_no_process_behind(begun):
    with LLM("tiny", n_slots=2) as llm:
        llm.generate("x", SamplingParams(structured_outputs={"regex": "a"}))
        assert begun.children()
    assert not begun.children()


def test_nothing_is_started_for_those_who_do_not_ask():
    code = (
        "import psutil; from llamabatch import LLM\n"
        "with LLM('tiny', strategy='batched', n_slots=2) as llm:\n"
        "    llm.generate('x', {'max_tokens': 2})\n"
        "    assert not psutil.Process().children()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
