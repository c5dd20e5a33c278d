"""Conversations on the bundled model: continued messages, a caller's own templates, equal results of all interfaces."""

import asyncio
import json

import pytest
from click.testing import CliRunner

from llamabatch import LLM, AsyncLLM, ConfigError, PromptError, SamplingParams
from llamabatch.cli import cli

ASKED = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = SamplingParams(temperature=0, max_tokens=24)
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{{ mood }}assistant:"


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=4, instances=1) as llm:
        yield llm


def test_a_begun_answer_is_continued_as_if_the_model_had_begun_it(llm):
    [whole] = llm.chat(ASKED, GREEDY)
    cut = len(whole.token_ids) // 2
    begun = [*ASKED, {"role": "assistant", "content": llm.detokenize(whole.token_ids[:cut])}]
    [rest] = llm.chat(begun, GREEDY, continue_final_message=True)
    assert rest.prompt_token_ids == (*whole.prompt_token_ids, *whole.token_ids[:cut])
    assert whole.text == begun[-1]["content"] + rest.text
    [anew] = llm.chat(begun, GREEDY)
    assert anew.prompt_token_ids != rest.prompt_token_ids


def test_the_text_of_a_conversation_is_its_prompt(llm):
    [output] = llm.chat(ASKED, GREEDY)
    text = llm.apply_chat_template(ASKED)
    assert text == output.prompt
    assert llm.tokenize(text, add_special=False, parse_special=True) == list(output.prompt_token_ids)
    assert text.startswith(llm.apply_chat_template(ASKED, add_generation_prompt=False))
    with pytest.raises(PromptError, match="does not know 'mood'"):
        llm.apply_chat_template(ASKED, chat_template_kwargs={"mood": "!"})
    with pytest.raises(PromptError, match="a conversation is a list of messages"):
        llm.apply_chat_template("hi")


def test_every_verb_takes_a_template(llm, tmp_path):
    file = tmp_path / "own.jinja"
    file.write_text(PLAIN, encoding="utf-8")
    wanted = "user: What is the capital of France?\n!assistant:"
    given = {"chat_template": file, "chat_template_kwargs": {"mood": "!"}}
    [output] = llm.chat(ASKED, GREEDY, **given)
    assert output.prompt == llm.apply_chat_template(ASKED, **given) == wanted
    assert list(llm.stream(ASKED, GREEDY, **given))[-1].finished.prompt == wanted
    assert next(iter(llm.as_completed([ASKED], GREEDY, **given)))[1].prompt == wanted
    for wrong in ("{% if %}", tmp_path / "missing"):
        with pytest.raises(ConfigError, match=r"cannot be (compiled|read)"):
            llm.chat([ASKED, ASKED], GREEDY, chat_template=wrong, errors="return")

    async def ask():
        async with AsyncLLM("tiny", n_slots=2) as other:
            [output] = await other.chat(ASKED, GREEDY, **given)
            pieces = [piece async for piece in other.stream(ASKED, GREEDY, **given)]
            pairs = [pair async for pair in other.as_completed([ASKED], GREEDY, **given)]
            with pytest.raises(ConfigError, match="cannot be compiled"):
                await other.chat(ASKED, GREEDY, chat_template="{% if %}")
            with pytest.raises(PromptError, match="are both True"):
                _ = [p async for p in other.stream(ASKED, add_generation_prompt=True, continue_final_message=True)]
            prompt = await other.apply_chat_template(ASKED, **given)
            return {output.prompt, pieces[-1].finished.prompt, pairs[0][1].prompt, prompt}

    assert asyncio.run(ask()) == {wanted}


def test_options_of_chats_are_refused_where_no_prompt_is_one(llm):
    with pytest.raises(PromptError, match="chat_template and add_generation_prompt change conversations only"):
        llm.stream("hi", chat_template="{{ 1 }}", add_generation_prompt=False)
    with pytest.raises(PromptError, match="tools change conversations only"):
        llm.as_completed(["hi", [5]], tools=[{"type": "function", "function": {"name": "f"}}])
    mixed = llm.stream(["hi", ASKED], GREEDY, tools=[], chat_template_kwargs={}, continue_final_message=False)
    assert {piece.prompt_index for piece in mixed} == {0, 1}
    template = "{{ messages[0].content }}"
    ended = [piece.finished for piece in llm.stream(["hi", ASKED], GREEDY, chat_template=template) if piece.finished]
    assert {output.prompt for output in ended} == {"hi", ASKED[0]["content"]}


def test_jobs_take_a_template_and_lines_continue_messages(tmp_path):
    begun = [*ASKED, {"role": "assistant", "content": "The capital"}]
    lines = [
        {"messages": begun, "continue_final_message": True},
        {"messages": ASKED, "add_generation_prompt": False, "chat_template_kwargs": {"mood": "?"}},
        {"messages": ASKED, "continue_final_message": True},
        {"messages": ASKED, "chat_template": PLAIN},
        {"prompt": "a", "continue_final_message": True},
        {"custom_id": "b", "method": "POST", "url": "/v1/chat/completions",
         "body": {"messages": begun, "continue_final_message": True}},
    ]  # fmt: skip
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    file = tmp_path / "own.jinja"
    file.write_text("{% if add_generation_prompt %}Q{% endif %}" + PLAIN, encoding="utf-8")
    command = ["run", "--chat-template", str(file), "-n", "4", "-t", "0", "--shape", "flat", str(source), str(out)]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 1, done.output
    rows = {row["row"]: row for row in map(json.loads, out.read_text(encoding="utf-8").splitlines())}
    assert [rows[number]["error"] is None for number in range(6)] == [True, True, False, False, False, True]
    assert "the last one is of role 'user'" in rows[2]["error"]
    assert "there is no field 'chat_template'" in rows[3]["error"]
    assert "continue_final_message goes with messages" in rows[4]["error"]
    assert rows[0]["text"] == rows[5]["text"]
    again = CliRunner().invoke(cli, [*command[:2], "{{ messages[0].content }}", *command[3:]])
    assert again.exit_code == 2
    assert "reading.chat_template" in again.output or "chat_template" in again.output


def test_the_command_line_takes_a_template():
    shown = CliRunner().invoke(cli, ["generate", "--chat-template", "x{{ 1 }}", "hi"])
    assert shown.exit_code == 2
    assert "--chat-template needs --chat" in shown.output
    command = ["generate", "--chat", "-t", "0", "-n", "4", "hi"]
    own = CliRunner().invoke(cli, [*command, "--chat-template", "{{ messages[0].content }} is"])
    assert own.exit_code == 0, own.output
    with LLM("tiny", n_slots=1) as llm:
        [output] = llm.generate("hi is", SamplingParams(temperature=0, max_tokens=4))
    assert own.stdout == output.text + "\n"
    missing = CliRunner().invoke(cli, [*command, "--chat-template", "no-such-file"])
    assert missing.exit_code == 2
    assert "no-such-file" in missing.output
