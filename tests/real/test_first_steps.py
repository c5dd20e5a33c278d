"""The first steps of a newcomer, each once, with trained models."""

import json

import pytest
from click.testing import CliRunner
from starlette.testclient import TestClient

from llamabatch import LLM, ConfigError, PromptError, SamplingParams
from llamabatch.cli import cli
from llamabatch.server.application import app
from tests.unit.server.test_application import ready

QUESTIONS = (
    *("Name three colours.", "What is 2 plus 2?", "Who wrote Romeo and Juliet?", "What is the largest planet?"),
    *("Translate 'good morning' to French.", "What do bees make?", "Write one sentence about the sea."),
)
CONVERSATIONS = [[{"role": "user", "content": question}] for question in QUESTIONS]
GREEDY = SamplingParams(temperature=0, max_tokens=32, logprobs=2)
BOTTLES = " ".join(f"{n} bottles of beer on the wall, {n} bottles of beer." for n in range(99, 40, -1))
FOX = "The quick brown fox jumps over the lazy dog. " * 3
MAX_GAP = 0.15  # bound of docs/design/sampling-and-equality.md


def invoke(*arguments, **more):
    result = CliRunner().invoke(cli, [str(each) for each in arguments], **more)
    assert result.exit_code == 0, result.output
    return result


def bottles(llm, n):
    return llm.tokenize(BOTTLES)[:n]


def check_equal_or_undecided(one, other):
    """Checks that tokens are equal, or that the two likeliest tokens are close where the texts part."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if at is not None:
        first, second = sorted((value.logprob for value in one.outputs[0].logprobs[at].values()), reverse=True)[:2]
        assert first - second < MAX_GAP, (one.text, other.text)


def test_a_chat_ends_by_itself(chatting):
    [output] = chatting.chat([CONVERSATIONS[1]], GREEDY)
    assert output.prompt.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert ("4" in output.text, output.finish_reason, "<|im_end|>" in output.text) == (True, "stop", False)


def test_texts_alone_are_those_in_company(chatting):
    together = chatting.chat(CONVERSATIONS, GREEDY)
    for conversation, output in zip(CONVERSATIONS, together, strict=True):
        [alone] = chatting.chat([conversation], GREEDY)
        check_equal_or_undecided(alone, output)
        if chatting.plan.reasons["batch_invariant"].startswith("equal bits: yes"):
            assert alone.outputs[0].logprobs == output.outputs[0].logprobs


def test_json_fits_its_schema(chatting):
    schema = {
        "type": "object", "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
        "required": ["city", "people"], "additionalProperties": False,
    }  # fmt: skip
    asked = [{"role": "user", "content": "The capital of France, and how many people live there?"}]
    [output] = chatting.chat(asked, SamplingParams(temperature=0, max_tokens=64, structured_outputs={"json": schema}))
    found = json.loads(output.text)
    assert (set(found), type(found["city"]), type(found["people"])) == ({"city", "people"}, str, int)


def test_a_tool_is_called(chatting):
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tool = {"name": "weather", "description": "The weather in a city", "parameters": parameters}
    asked = [{"role": "user", "content": "What is the weather in Paris?"}]
    tools = [{"type": "function", "function": tool}]
    [output] = chatting.chat(asked, SamplingParams(temperature=0, max_tokens=64), tools=tools, tool_choice="required")
    [call] = output.outputs[0].tool_calls
    assert (call.name, list(json.loads(call.arguments))) == ("weather", ["city"])


def test_guesses_hold(smollm2):
    asked = [{"role": "user", "content": f"Repeat this text exactly: {FOX}"}]
    options = {"n_slots": 2, "n_ctx": 1024}
    with LLM(smollm2, **options) as llm:
        [plain] = llm.chat([asked], GREEDY)
    with LLM(smollm2, **options, speculate="lookup", speculate_always=True) as llm:
        [guessed] = llm.chat([asked], GREEDY)
        stats = llm.stats()
    check_equal_or_undecided(plain, guessed)
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.acceptance > 0.3
    assert stats.decode_passes < len(guessed.token_ids)


def test_a_draft_model_guesses_for_another_type_of_itself(smollm2):
    with LLM(
        smollm2, n_slots=2, n_ctx=1024, speculate="draft", draft_model=smollm2, speculate_always=True
    ) as llm:  # fmt: skip
        llm.chat(CONVERSATIONS[:2], GREEDY)
        assert llm.stats().acceptance > 0.9


def test_prompts_beyond_the_window(windowed):
    prompts = [bottles(windowed, n) for n in (900, 760, 520)]
    for prompt, output in zip(prompts, windowed.generate(prompts, GREEDY), strict=True):
        windowed.reset_prefix_cache()
        [alone] = windowed.generate([prompt], GREEDY)
        assert "bottles of beer" in alone.text
        check_equal_or_undecided(alone, output)
    with pytest.raises(PromptError, match="n_ctx"):
        windowed.generate([bottles(windowed, 900) * 3], GREEDY)


@pytest.mark.parametrize("name", ["chatting", "windowed"])
def test_a_prefix_is_kept(name, request):
    llm = request.getfixturevalue(name)
    llm.reset_prefix_cache()
    prompt = bottles(llm, 600)
    [cold] = llm.generate([prompt], GREEDY)
    [warm] = llm.generate([prompt], GREEDY)
    assert (cold.num_cached_tokens, warm.num_cached_tokens) == (0, len(prompt) - 1)
    check_equal_or_undecided(cold, warm)


def test_a_base_model_names_its_template(windowed):
    with pytest.raises(ConfigError, match='give chat_template="chatml"'):
        windowed.chat([CONVERSATIONS[0]], GREEDY)


def test_run(smollm2, tmp_path):
    given, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given.write_text("".join(json.dumps({"messages": each}) + "\n" for each in CONVERSATIONS))
    invoke("run", given, out, "-m", smollm2, "-n", 24, "-t", 0, "--n-slots", 8, "--n-ctx", 512)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["row"] for row in rows] == list(range(len(CONVERSATIONS)))
    assert "4" in rows[1]["text"]


def test_serve(smollm2, gemma3):
    for model, n_ctx in ((smollm2, 512), (gemma3, 512)):  # gemma3 has no template, so ChatML is used
        with TestClient(app(model, isolate=False, n_slots=2, n_ctx=n_ctx)) as client:
            ready(client)
            body = {"messages": CONVERSATIONS[1], "max_tokens": 16, "temperature": 0}
            answer = client.post("/v1/chat/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] > 0
            assert answer["choices"][0]["finish_reason"] in ("stop", "length")


def test_compare(smollm2, tmp_path):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(QUESTIONS))
    result = invoke(
        *("compare", "-m", smollm2, "--prompts", prompts, "-n", 8, "--slots", 4, "--n-ctx", 512),
        *("--strategies", "sequential,batched", "--json", tmp_path / "compare.json"),
    )
    assert "batched" in result.output
    assert json.loads((tmp_path / "compare.json").read_text())
