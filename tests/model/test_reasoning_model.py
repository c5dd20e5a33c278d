"""Thinking in whole engines: budgets, structured answers after the thinking, children, speculation, preemption.

The bundled model does not think, so a logits processor plays a thinking model. It prefers the next token of a given
text; masks and forced tokens still override it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from llamabatch import LLM, EngineConfig, SamplingError, SamplingParams
from llamabatch.chat.options import ChatOptions
from llamabatch.engine.engine import Engine
from llamabatch.jobs import ReadOptions, Settings, run
from llamabatch.request.request import Request, ResumedOutput
from llamabatch.request.structured_outputs import Structure

TAGS = ("<think>", "</think>")
HI = [{"role": "user", "content": "What is 2 + 2?"}]
OPENS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if enable_thinking is defined and not "
    r"enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}{# '\n</think>\n\n' #}"
)
LEAVES = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
DIGIT = {"type": "integer", "maximum": 9, "minimum": 0}
SCHEMA = {"type": "object", "properties": {"n": DIGIT}, "required": ["n"], "additionalProperties": False}


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=4, n_ctx=512, instances=1, reasoning_tags=TAGS) as model:
        yield model


def script(llm, text, then_end=True):
    """Returns a logits processor that prefers the tokens of a text, and then the end token. It goes on in the text
    after forced tokens."""
    ids = llm.tokenize(text, add_special=False)
    end = llm._client.model.eog_ids[0]

    def processor(output, logits):
        logits = np.zeros_like(logits)
        at = len(output)
        if at < len(ids):
            logits[ids[at]] = 100
        elif then_end:
            logits[end] = 100
        return logits

    return processor


def ask(llm, text, template=OPENS, kwargs=None, stream=False, **params):
    params = {"max_tokens": 120, "temperature": 0, "logits_processors": [script(llm, text)], **params}
    if stream:
        return list(llm.stream(HI, params, chat_template=template, chat_template_kwargs=kwargs))
    [output] = llm.chat(HI, params, chat_template=template, chat_template_kwargs=kwargs)
    return output


def test_a_thought_in_the_prompt_or_in_the_answer(llm):
    output = ask(llm, "Two and two.\n</think>\n\nFour.")
    assert (output.reasoning, output.text) == ("Two and two.", "Four.")
    output = ask(llm, "<think>Two and two.</think>Four.", LEAVES)
    assert (output.reasoning, output.text) == ("Two and two.", "Four.")
    output = ask(llm, "Four.", kwargs={"enable_thinking": False})
    assert (output.reasoning, output.text) == (None, "Four.")


@pytest.mark.parametrize("budget", [0, 1, 4, 10])
def test_a_budget_closes_the_thinking(llm, budget):
    text = "one two three four five six seven eight nine ten eleven twelve"
    output = ask(llm, text, thinking_token_budget=budget, max_tokens=40, logprobs=1)
    closing = llm.tokenize("\n</think>\n\n", add_special=False)
    thought = llm.tokenize(text, add_special=False)[:budget]
    raw = llm.detokenize(list(output.token_ids))
    assert raw.startswith(llm.detokenize(thought) + "\n</think>\n\n") or raw.strip().startswith("</think>")
    assert output.reasoning == llm.detokenize(thought).strip()
    assert "</think>" not in output.text
    assert len(output.outputs[0].logprobs) == len(output.token_ids)
    forced = output.outputs[0].logprobs[budget][output.token_ids[budget]]
    assert forced.logprob < 0  # the logprob is that of the model, which would not choose this token
    assert len(closing) < 40


@pytest.mark.parametrize(
    "other",
    [
        {"allowed_token_ids": [300, 301, 302]},
        {"bad_words": ["</think>", "\n"]},
        {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
        {"mirostat": 2, "temperature": 0.8},
        {"dry_multiplier": 1.0},
        {"min_tokens": 20},
        {"logit_bias": dict.fromkeys(range(20, 40), -100)},
    ],
)
def test_what_would_forbid_the_closing_text_does_not(llm, other):
    params = {"temperature": 0, "max_tokens": 24, "ignore_eos": True, "thinking_token_budget": 4, **other}
    [output] = llm.chat(HI, params, chat_template=OPENS)
    closing = llm.tokenize("x\n</think>\n\n", add_special=False)[1:]
    assert list(output.token_ids[4 : 4 + len(closing)]) == closing, output.error


def test_a_budget_leaves_the_draws_of_a_seed_as_they_are(llm):
    """Draw i depends only on (seed, i), so the text after the thinking is the same in each run and in a batch."""
    params = {"seed": 5, "temperature": 1.0, "max_tokens": 60, "thinking_token_budget": 7}
    first, second = (llm.chat(HI, params, chat_template=OPENS)[0] for _ in range(2))
    assert first.token_ids == second.token_ids
    rest = [{"role": "user", "content": f"again {i}"} for i in range(3)]
    together = llm.chat([HI, *[[m] for m in rest]], params, chat_template=OPENS)
    assert together[0].token_ids == first.token_ids


def test_a_form_binds_behind_the_thinking(llm):
    output = ask(llm, 'Any text, "even" {this}.\n</think>\n\n{"n": 4}', structured_outputs={"json": SCHEMA})
    assert (output.reasoning, json.loads(output.text)) == ('Any text, "even" {this}.', {"n": 4})
    output = ask(llm, "<think>Hm.</think>no json at all", LEAVES, structured_outputs={"json": SCHEMA})
    assert output.reasoning == "Hm."
    assert output.finish_reason == "stop"
    assert 0 <= json.loads(output.text)["n"] <= 9


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ({"choice": ["yes", "no"]}, "Hm.\n</think>\n\nyes"),
        ({"regex": "\\n\\n[a-z]{3}"}, "Hm.\n</think>\n\n\n\nabc"),
        ({"regex": "\\n?[a-z]{3}"}, "Hm.</think>\nabc"),
        ({"regex": " [a-z]{3}"}, "Hm.</think> abc"),
        ({"regex": "<[a-z]{3}>"}, "Hm.</think>\n<abc>"),
    ],
)
def test_the_text_has_the_form_whatever_stands_between(llm, form, text):
    output = ask(llm, text, structured_outputs=form)
    assert (output.reasoning, output.finish_reason) == ("Hm.", "stop")
    [(kind, given)] = form.items()
    assert output.text in given if kind == "choice" else re.fullmatch(given, output.text), output


@pytest.mark.parametrize("breaks", ["", "\n", "\n\n"])
def test_the_line_breaks_that_a_model_is_used_to_may_stand_before_the_form(llm, breaks):
    output = ask(llm, f"Hm.\n</think>{breaks}yes", structured_outputs={"choice": ["yes", "no"]})
    assert (output.reasoning, output.text) == ("Hm.", "yes")
    assert llm.detokenize(list(output.token_ids)).endswith(f"</think>{breaks}yes")


def test_without_thinking_the_form_binds_at_once(llm):
    output = ask(llm, "not json", OPENS, {"enable_thinking": False}, structured_outputs={"json": SCHEMA})
    assert output.reasoning is None
    assert 0 <= json.loads(output.text)["n"] <= 9
    output = ask(llm, '{"n":5}', LEAVES, structured_outputs={"json": SCHEMA})
    assert (output.reasoning, output.text) == (None, '{"n":5}')


def test_a_form_that_looks_like_the_tag_and_a_thinking_both_find_their_way(llm):
    form = {"regex": "<th[a-z]{2}>"}
    output = ask(llm, "<thus>", LEAVES, structured_outputs=form)
    assert (output.reasoning, output.text) == (None, "<thus>")
    output = ask(llm, "<think>so</think><thus>", LEAVES, structured_outputs=form)
    assert (output.reasoning, output.text) == ("so", "<thus>")


def test_a_thinking_that_never_closes_cannot_end_the_text(llm):
    output = ask(llm, "", structured_outputs={"json": SCHEMA}, max_tokens=20)
    assert (output.finish_reason, output.text, len(output.token_ids)) == ("length", "", 20)
    output = ask(llm, "", structured_outputs={"json": SCHEMA}, thinking_token_budget=5, max_tokens=60)
    assert 0 <= json.loads(output.text)["n"] <= 9


def test_enable_in_reasoning_binds_from_the_first_token(llm):
    form = {"regex": "[a-z]{3}</think>[0-9]{2}", "enable_in_reasoning": True}
    output = ask(llm, "whatever", structured_outputs=form)
    assert (len(output.reasoning), len(output.text)) == (3, 2)
    assert SamplingParams(structured_outputs=form).structure == Structure("regex", form["regex"], True)
    with pytest.raises(SamplingError, match="thinking_token_budget is 3 beside enable_in_reasoning"):
        SamplingParams(structured_outputs=form, thinking_token_budget=3)
    with pytest.raises(SamplingError, match="enable_in_reasoning is 'x'"):
        SamplingParams(structured_outputs={"regex": "a", "enable_in_reasoning": "x"})


def test_generate_stays_raw_and_binds_at_once_unless_the_prompt_thinks(llm):
    params = {"structured_outputs": {"json": SCHEMA}, "max_tokens": 60, "temperature": 0}
    [output] = llm.generate("Question: 2 + 2?", params)
    assert 0 <= json.loads(output.text)["n"] <= 9
    thinks = {**params, "logits_processors": [script(llm, "so</think>\n\n")]}
    [output] = llm.generate("Question: 2 + 2? <think>", thinks)
    before, _, behind = output.text.partition("</think>")
    assert before == "so"
    assert 0 <= json.loads(behind)["n"] <= 9
    [output] = llm.generate("x <think>", {"thinking_token_budget": 3, "max_tokens": 30, "temperature": 0})
    assert output.text.index("</think>") < 30


@pytest.mark.parametrize("options", [{"isolate": True}, {"speculate": "lookup", "speculate_always": True}])
def test_the_same_in_a_child_and_with_guesses(llm, options):
    params = {"temperature": 0, "max_tokens": 60, "thinking_token_budget": 6}
    forms = [{}, {"structured_outputs": {"json": SCHEMA}}, {"structured_outputs": {"choice": ["yes", "no"]}}]
    asked = [{**params, **form} for form in forms]
    expected = llm.chat([HI] * len(asked), asked, chat_template=OPENS)
    with LLM("tiny", n_slots=4, n_ctx=512, instances=1, reasoning_tags=TAGS, **options) as other:
        found = other.chat([HI] * len(asked), asked, chat_template=OPENS)
        if "speculate" in options:
            long = {**params, "max_tokens": 200}
            [output] = other.chat(HI, long, chat_template=OPENS)
            [plain] = llm.chat(HI, long, chat_template=OPENS)
            assert (output.reasoning, output.text) == (plain.reasoning, plain.text)
            assert other.stats().verify_calls > 0
        assert other.plan.reasoning == "custom"
    assert [(o.reasoning, o.text) for o in found] == [(o.reasoning, o.text) for o in expected]
    assert json.loads(found[1].text)["n"] in range(10)
    assert found[2].text in ("yes", "no")


def test_preemption_neither_loses_nor_repeats_a_forced_token(llm):
    params = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "thinking_token_budget": 12, "priority": 5}
    [expected] = llm.chat(HI, params, chat_template=OPENS)
    with LLM("tiny", n_slots=1, n_ctx=512, instances=1, reasoning_tags=TAGS, preempt=True) as one:

        def interrupt(output, logits):
            if len(output) in (5, 13):
                quick = Request(f"quick-{len(output)}", (1, 2, 3), SamplingParams(max_tokens=2, priority=0))
                one._client.submit([quick], lambda outputs: None)
            return logits

        [output] = one.chat(HI, {**params, "logits_processors": [interrupt]}, chat_template=OPENS)
        assert one.stats().preemptions == 2
    assert output.token_ids == expected.token_ids
    assert output.reasoning == expected.reasoning


def test_an_engine_that_takes_over_goes_on_in_the_middle(llm):
    """After a crash, another engine gets the tokens so far. It continues with the same text, wherever these end."""
    params = {"temperature": 0, "max_tokens": 60, "thinking_token_budget": 6, "structured_outputs": {"json": SCHEMA}}
    [whole] = llm.chat(HI, params, chat_template=OPENS)
    [request] = llm._prepared(lambda inputs: inputs.conversations(HI, params, ChatOptions(template=OPENS))).requests
    engine = Engine(EngineConfig("tiny", n_slots=2, n_ctx=512, instances=1))
    for n in range(1, len(whole.token_ids)):
        known = ResumedOutput(whole.token_ids[:n], (0.0,) * n)
        engine.add(replace(request, request_id=f"again-{n}", resumed=known))
        ended = []
        while engine.has_work:
            ended += [output.finished for output in engine.step() if output.finished is not None]
        assert ended[0].token_ids == whole.token_ids, n
    engine.close()


def test_whatever_is_drawn_a_text_that_stops_has_its_form(llm):
    wild = {"temperature": 1.8, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_tokens": 90}
    conversations = [[{"role": "user", "content": f"Tell me {i}"}] for i in range(12)]
    budgets = [{"thinking_token_budget": i % 7} if i % 3 else {"thinking_token_budget": 30} for i in range(12)]
    asked = [{**wild, "seed": i, "structured_outputs": {"json": SCHEMA}, **budgets[i]} for i in range(12)]
    for template in (OPENS, LEAVES):
        outputs = llm.chat(conversations, asked, chat_template=template)
        stopped = [output for output in outputs if output.finish_reason == "stop"]
        assert len(stopped) >= 6
        for output in stopped:
            assert json.loads(output.text)["n"] in range(10)
    assert any(output.reasoning for output in outputs)


def test_a_job_writes_thinking_and_answers_apart(tmp_path):
    rows = [{"messages": [{"role": "user", "content": f"What is {i} + {i}?"}]} for i in range(3)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    params = SamplingParams(temperature=0, max_tokens=60, thinking_token_budget=5, structured_outputs={"json": SCHEMA})
    run(
        Settings(
            (str(tmp_path / "in.jsonl"),),
            str(tmp_path / "out.jsonl"),
            reading=ReadOptions(params=params, chat_template=OPENS),
            engine={"reasoning_tags": TAGS, "n_ctx": 512},
        )
    )
    made = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(made) == 3
    for row in made:
        assert "</think>" not in row["reasoning"] + row["text"]
        assert json.loads(row["text"])["n"] in range(10)


def test_several_continuations_and_speculation_stay_within_their_budgets(llm):
    params = {"n": 3, "seed": 3, "temperature": 1.2, "max_tokens": 40, "thinking_token_budget": 5}
    parts = {}
    for piece in llm.stream(HI, params, chat_template=OPENS):
        reasoning, text = parts.get(piece.index, ("", ""))
        parts[piece.index] = reasoning + piece.reasoning, text + piece.text
        whole = piece.finished
    assert [parts[i] for i in range(3)] == [(each.reasoning, each.text) for each in whole.outputs]
    for each in whole.outputs:
        assert len(llm.tokenize(each.reasoning, add_special=False)) <= 7


CHANNELS = '{# "<|channel|>analysis<|message|>" #}{% for m in messages %}{{ m.content }}{% endfor %}<|start|>assistant'
FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"


def test_channels_have_forms_and_budgets_too():
    with LLM("tiny", n_slots=1, n_ctx=512, instances=1) as llm:
        begun = "<|channel|>analysis<|message|>Let me see"
        form = {"structured_outputs": {"json": SCHEMA}}
        output = ask(llm, f'{begun}.{FINAL}{{"n": 4}}', CHANNELS, **form)
        assert (output.reasoning, json.loads(output.text)) == ("Let me see.", {"n": 4})
        output = ask(llm, begun + " and see" * 30, CHANNELS, thinking_token_budget=8, **form)
        assert output.reasoning
        assert len(llm.tokenize(output.reasoning, add_special=False)) <= 8
        assert json.loads(output.text)["n"] in range(10)
        raw = llm.detokenize(list(output.token_ids), skip_special_tokens=False)
        assert raw.count(FINAL) == 1
        pieces = ask(llm, f"{begun}.{FINAL}Four.", CHANNELS, stream=True)
        assert "".join(piece.reasoning for piece in pieces) == "Let me see."
        assert "".join(piece.text for piece in pieces) == "Four."


def test_noise_in_channels_has_the_form_too():
    """A model that knows no channels must still open them. Otherwise its text would be an answer without the form."""
    wild = {"temperature": 1.5, "max_tokens": 120, "thinking_token_budget": 9, "structured_outputs": {"json": SCHEMA}}
    with LLM("tiny", n_slots=4, n_ctx=512, instances=1) as plain:
        [output] = plain.chat(HI, {**wild, "n": 8, "seed": 4}, chat_template=CHANNELS)
        for each in output.outputs:
            assert each.finish_reason == "stop"
            assert json.loads(each.text)["n"] in range(10)
        assert any(each.reasoning for each in output.outputs)
        output = ask(plain, '<|channel|>final<|message|>{"n": 4}', CHANNELS, structured_outputs={"json": SCHEMA})
        assert (output.reasoning, json.loads(output.text)) == (None, {"n": 4})
