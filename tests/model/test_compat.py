"""compat.Llama has the names, defaults, dictionaries and greedy texts of llama_cpp.Llama, on the bundled model."""

import base64
import contextlib
import inspect
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from numbers import Real

import numpy as np
import pytest
from PIL import Image

from llamabatch.compat import Llama, options
from llamabatch.compat.chat import FORMATS
from llamabatch.compat.llama import ABSENT, LlamaTokenizer
from llamabatch.errors import EngineClosedError, EngineError, PromptError
from llamabatch.gguf.resolve import resolve
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from tests.model.conftest import questions
from tests.model.encoder_files import write_encoder
from tests.waiting import until

llama_cpp = pytest.importorskip("llama_cpp")

TINY = str(resolve("tiny"))
STORY = "Once upon a time, a boy named Leo"
CHAT = [{"role": "user", "content": "What is the capital of France?"}]
CLOCK = {
    "type": "function",
    "function": {
        "name": "clock",
        "parameters": {"type": "object", "properties": {"h": {"type": "integer"}}, "required": ["h"]},
    },
}
FORCED = {"tools": [CLOCK], "tool_choice": {"type": "function", "function": {"name": "clock"}}}
SCHEMA = {"type": "json_object", "schema": CLOCK["function"]["parameters"]}


def test_more_tokens_than_in_training_warn_and_run(monkeypatch):
    monkeypatch.setattr(options, "_warned", set())
    prompt = "one two " * 1200  # more than 2,048 tokens
    with pytest.warns(UserWarning, match="the model was trained for 2048 tokens: it runs"):
        opened = Llama(TINY, n_ctx=4096, verbose=False, n_slots=1)
    with opened as ours:
        assert ours.n_ctx() == 4096
        got = ours(prompt, max_tokens=4, temperature=0)
    theirs = llama_cpp.Llama(TINY, n_ctx=4096, verbose=False)
    wanted = theirs(prompt, max_tokens=4, temperature=0)
    assert theirs.n_ctx() == 4096
    theirs.close()
    assert got["usage"]["prompt_tokens"] == wanted["usage"]["prompt_tokens"] > 2048
    assert got["choices"][0]["text"] == wanted["choices"][0]["text"]


@pytest.fixture(scope="module")
def theirs():
    model = llama_cpp.Llama(TINY, n_ctx=512, logits_all=True, verbose=False)
    yield model
    model.close()


@pytest.fixture(scope="module")
def ours():
    # batch_invariant: with AMX, prompts then use the kernels of generated rows, as in llama_cpp.Llama
    with Llama(TINY, n_ctx=512, verbose=False, n_slots=16, batch_invariant=True) as model:
        yield model


METHODS = (
    *("__init__", "__call__", "create_completion", "create_chat_completion", "generate", "create_embedding", "embed"),
    *(
        "create_chat_completion_openai_v1",
        "tokenize",
        "detokenize",
        "set_cache",
        "set_seed",
        "reset",
        "n_ctx",
        "n_embd",
    ),
    *("n_vocab", "tokenizer", "token_eos", "token_bos", "token_nl", "pooling_type", "close", "logits_to_logprobs"),
    *("longest_token_prefix", "from_pretrained"),
)


@pytest.mark.parametrize("name", METHODS)
def test_names_order_and_defaults_of_arguments_are_theirs(name):
    def arguments(method):
        return [(p.name, p.kind, p.default) for p in inspect.signature(method).parameters.values()]

    assert arguments(getattr(Llama, name)) == arguments(getattr(llama_cpp.Llama, name))


def test_each_public_name_is_there_or_says_why_not(ours, theirs):
    public = {name for name in dir(theirs) if not name.startswith("_")}
    absent = {name for name in public if not hasattr(ours, name)}
    assert absent == set(ABSENT)
    assert {name for name in dir(llama_cpp.LlamaTokenizer) if not name.startswith("_")} - {"from_ggml_file"} <= set(
        dir(LlamaTokenizer)
    )


def test_each_option_is_used_or_said_to_change_nothing():
    names = set(inspect.signature(llama_cpp.Llama).parameters)
    assert set(options.IGNORED) | set(options.REFUSED) <= names
    seen = set()

    class Watched(dict):
        def __getitem__(self, name):
            seen.add(name)
            return super().__getitem__(name)

    defaults = dict(Llama.__init__.__kwdefaults__)
    given = Watched({**defaults, "model_path": TINY})
    options.engine_options(given, defaults, {})
    with Llama(TINY) as model:
        model._open(model.llm, given)
    # these options need no lookup, see the docstring of compat.Llama; `looked_up` has those that are converted
    open_anyway = {"logits_all", "embedding", "tokenizer", "vocab_only", "attention_type"}
    looked_up = {
        "main_gpu",
        "offload_kqv",
        "split_mode",
        "use_mmap",
        "use_mlock",
        "yarn_attn_factor",
        "yarn_beta_fast",
        "yarn_beta_slow",
    }
    assert names - seen - open_anyway - looked_up - set(options.IGNORED) - {"kwargs", "rope_scaling_type"} == set()


def same_shape(mine, wanted, path=""):
    """Checks that keys and types are equal at all depths. All types of numbers count as one."""
    if isinstance(wanted, dict):
        assert isinstance(mine, dict), path
        assert set(mine) == set(wanted), path
        for key in wanted:
            same_shape(mine[key], wanted[key], f"{path}.{key}")
    elif isinstance(wanted, list):
        assert isinstance(mine, list), path
        assert len(mine) == len(wanted), path
        for i, (a, b) in enumerate(zip(mine, wanted, strict=True)):
            same_shape(a, b, f"{path}[{i}]")
    elif isinstance(wanted, Real):
        assert isinstance(mine, Real), path
        assert np.isclose(mine, wanted, atol=0.3), path
    else:
        assert type(mine) is type(wanted), path
        if not path.endswith((".id", ".model")):
            assert mine == wanted, path


def plain(answer):
    """Returns a list of the answer, or of the chunks of a stream, without the fields that differ from call to call."""
    chunks = list(answer) if isinstance(answer, Iterator) else [answer]
    for chunk in chunks:
        chunk["created"] = 0
    return chunks


SENTENCE = llama_cpp.LlamaGrammar.from_string('root ::= [a-zA-Z ,]+ "."')
COMPLETIONS = [
    {},
    {"max_tokens": None},
    {"max_tokens": -1, "stop": "."},
    {"max_tokens": 40, "stop": [" was", "and"]},
    {"max_tokens": 40, "repeat_penalty": 1.3},
    {"max_tokens": 40, "presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"max_tokens": 100, "frequency_penalty": 3.0},
    {"max_tokens": 20, "logit_bias": {"17": 4.0, "719": -float("inf")}},
    {"max_tokens": 8, "logprobs": 3},
    {"max_tokens": 8, "model": "named"},
    pytest.param({"max_tokens": 20, "grammar": SENTENCE}, id="grammar"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("given", COMPLETIONS, ids=str)
def test_a_greedy_completion_is_theirs(ours, theirs, given, stream):
    mine, wanted = (plain(each(STORY, temperature=0, stream=stream, **given)) for each in (ours, theirs))
    if stream and "logprobs" not in given:  # a text may be cut into other chunks
        assert "".join(c["choices"][0]["text"] for c in mine) == "".join(c["choices"][0]["text"] for c in wanted)
        mine, wanted = [mine[0], mine[-1]], [wanted[0], wanted[-1]]
        for chunks in (mine, wanted):
            chunks[0]["choices"][0]["text"] = ""
    same_shape(mine, wanted)


def test_token_ids_and_echo_are_theirs(ours, theirs):
    ids = theirs.tokenize(STORY.encode())
    same_shape(plain(ours(ids, temperature=0)), plain(theirs(ids, temperature=0)))
    assert ours(STORY, temperature=0, echo=True)["choices"] == theirs(STORY, temperature=0, echo=True)["choices"]


CHATS = [
    {},
    {"max_tokens": 3},
    {"max_tokens": 30, "logprobs": True, "top_logprobs": 2},
    {"max_tokens": 20, "tools": [CLOCK], "tool_choice": "auto"},
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("given", CHATS, ids=str)
def test_a_greedy_chat_is_theirs(ours, theirs, given, stream):
    calls = (each.create_chat_completion(CHAT, temperature=0, stream=stream, **given) for each in (ours, theirs))
    same_shape(*map(plain, calls))


JSON_CHATS = [
    FORCED,
    {"functions": [CLOCK["function"]], "function_call": {"name": "clock"}},
    {"response_format": SCHEMA},
]


@pytest.mark.parametrize("given", JSON_CHATS, ids=str)
def test_json_of_a_schema_says_what_theirs_says(ours, theirs, given):
    """White space may differ, because our engine adds forced text at once, and llama.cpp chooses each token of it."""

    def content_of(holder):
        calls = holder.get("tool_calls") or []
        for call in calls:
            assert call.pop("id").startswith("call__0_clock_cmpl-")
        text = "".join(call["function"].pop("arguments") for call in calls) or holder.get("content") or ""
        if holder.get("function_call"):
            assert holder["function_call"].pop("arguments") == text
        if holder.get("content"):
            holder["content"] = ""
        return text

    said = []
    shapes = []
    for each in (ours, theirs):
        [answer] = plain(each.create_chat_completion(CHAT, temperature=0, max_tokens=60, **given))
        said.append(json.loads(content_of(answer["choices"][0]["message"])))
        del answer["usage"]["completion_tokens"], answer["usage"]["total_tokens"]
        chunks = plain(each.create_chat_completion(CHAT, temperature=0, max_tokens=60, stream=True, **given))
        said.append(json.loads("".join(content_of(chunk["choices"][0]["delta"]) for chunk in chunks)))
        shapes.append([answer, chunks[0], chunks[1], chunks[-1]])
    assert all(each == said[0] for each in said)
    same_shape(*shapes)


@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
def test_named_formats_write_the_prompts_of_theirs(theirs, monkeypatch, name, system):
    turns = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": "Who?"},
    ]
    messages = [{"role": "system", "content": "Be brief."}, *turns] if system else turns
    seen = {}
    handler = llama_cpp.llama_chat_format.get_chat_completion_handler(name)

    class Recorder:
        verbose = False

        def tokenize(self, text, add_bos, special):
            seen.update(text=text.decode(), add_bos=add_bos)
            return [1]

        def create_completion(self, **given):
            seen.update(stop=given["stop"])
            return {**dict.fromkeys(("id", "created", "model", "usage"), ""), "choices": [dict.fromkeys(CHOICE)]}

    CHOICE = ("text", "logprobs", "finish_reason")
    handler(llama=Recorder(), messages=messages)
    made = FORMATS[name].render(messages)
    assert (made.text, made.stop, made.add_special) == (seen["text"], seen["stop"], seen["add_bos"])


@pytest.mark.parametrize("name", ["vicuna", "chatml-function-calling"])
def test_a_chat_handler_of_theirs_drives_ours(theirs, name):
    handler = llama_cpp.llama_chat_format.get_chat_completion_handler(name)
    asked = {"messages": [{"role": "system", "content": "Be brief."}, *CHAT], "temperature": 0, "max_tokens": 20}
    asked |= {"tools": [CLOCK], "tool_choice": FORCED["tool_choice"]} if name != "vicuna" else {}
    with Llama(TINY, chat_handler=handler) as mine:
        got = plain(mine.create_chat_completion(**asked))
    wanted = plain(handler(llama=theirs, **asked))
    for answer in (*got, *wanted):
        for call in answer["choices"][0]["message"].pop("tool_calls", None) or []:
            assert json.loads(call["function"]["arguments"]).keys() == {"h"}
        answer["choices"][0]["message"].pop("function_call", None)
        answer.pop("usage")
    same_shape(got, wanted)


@pytest.mark.parametrize("name", ["Llava15ChatHandler", "Qwen25VLChatHandler"])
def test_a_handler_that_reads_pictures_names_the_mmproj_and_writes_the_prompt(name, tmp_path, capfd):
    path, shown = tmp_path / "mm proj.gguf", tmp_path / "a b.png"
    write_projector(path, ProjectorShape("mlp"), 192, seed=1)
    Image.effect_noise((96, 64), 90).convert("RGB").save(shown)
    handler = getattr(llama_cpp.llama_chat_format, name)
    address = "data:image/png;base64," + base64.b64encode(shown.read_bytes()).decode()
    said = {"type": "text", "text": "What is this?"}
    parts = [said, {"type": "image_url", "image_url": {"url": address}}]
    asked = {"messages": [{"role": "user", "content": parts}], "temperature": 0, "max_tokens": 8}
    with Llama(TINY, chat_handler=handler(str(path)), n_ctx=512) as mine:
        got = mine.create_chat_completion(**asked)
        parts[1] = {"type": "image_url", "image_url": shown.as_uri()}
        again = plain(mine.create_chat_completion(**asked, stream=True))
        with pytest.raises(PromptError, match="fetched only from hosts in allowed_media_domains"):
            mine.create_chat_completion(
                [{"role": "user", "content": [{"type": "image_url", "image_url": "http://a/b"}]}]
            )
        with pytest.raises(PromptError, match="give an address"):
            mine.create_chat_completion([{"role": "user", "content": [{"type": "image_url", "image_url": str(shown)}]}])
    with Llama(TINY, mmproj=path, n_ctx=512) as plainly:
        assert plainly.create_chat_completion(**asked)["usage"]["prompt_tokens"] > 64
    assert "".join(each["choices"][0]["delta"].get("content", "") for each in again) == _text(got)
    parts[1] = {"type": "image_url", "image_url": {"url": address}}
    their_llama = llama_cpp.Llama(TINY, chat_handler=handler(str(path), verbose=False), n_ctx=512, verbose=False)
    wanted = their_llama.create_chat_completion(**asked)
    their_llama.close()
    assert (_text(got), got["usage"]) == (_text(wanted), wanted["usage"])


def _text(answer: dict) -> str:
    return answer["choices"][0]["message"]["content"]


def test_facts_tokens_and_generate_are_theirs(ours, theirs):
    for name in ("n_ctx", "n_vocab", "n_embd", "token_bos", "token_eos", "token_nl", "pooling_type"):
        assert getattr(ours, name)() == getattr(theirs, name)(), name
    assert ours.metadata == theirs.metadata
    assert ours.chat_format == theirs.chat_format
    for text in (b"Hello there", "Zoë ☺".encode(), b"<|im_start|>user"):
        for add_bos in (False, True):
            for special in (False, True):
                ids = theirs.tokenize(text, add_bos, special)
                assert ours.tokenize(text, add_bos, special) == ids
                assert ours.detokenize(ids, special=special) == theirs.detokenize(ids, special=special)
    ids = ours.tokenize(b"Hi there")
    firsts = []
    for each in (ours, theirs):
        with contextlib.closing(each.generate(ids, temp=0.0)) as tokens:
            firsts.append([token for token, _ in zip(tokens, range(30), strict=False)])
    assert firsts[0] == firsts[1]
    row = np.random.default_rng(1).normal(size=(2, 50)).astype(np.float32)
    assert np.allclose(ours.logits_to_logprobs(row), theirs.logits_to_logprobs(row), atol=1e-5)
    assert ours.longest_token_prefix([1, 2, 3], [1, 2, 4]) == 2


def test_callbacks_get_what_theirs_get(ours, theirs):
    ids = len(ours.tokenize(STORY.encode()))
    criteria = llama_cpp.StoppingCriteriaList([lambda tokens, row: len(tokens) >= ids + 4])
    same_shape(
        plain(ours(STORY, temperature=0, stopping_criteria=criteria)),
        plain(theirs(STORY, temperature=0, stopping_criteria=criteria)),
    )
    seen = []

    def forbid(tokens, row):
        seen.append(tokens.tolist())
        row[17] = -1e9
        return row

    processors = llama_cpp.LogitsProcessorList([forbid])
    mine = plain(ours(STORY, temperature=0, logits_processor=processors))
    called, seen = seen, []
    same_shape(mine, plain(theirs(STORY, temperature=0, logits_processor=processors)))
    assert called == seen


@pytest.mark.parametrize("pooling", [-1, 0, 1, 2, 3])
def test_embeddings_are_theirs(pooling):
    texts = ["Hello there", "A much longer text about a horse and a road."]
    model = llama_cpp.Llama(TINY, embedding=True, pooling_type=pooling, verbose=False)
    with contextlib.closing(model), Llama(TINY, embedding=True, pooling_type=pooling) as mine:
        assert mine.pooling_type() == model.pooling_type()
        wanted, got = model.create_embedding(texts), mine.create_embedding(texts)
        if mine.pooling_type() == 0:  # llama_cpp reads the vectors of the second text from a wrong place
            wanted["data"][1]["embedding"] = model.create_embedding(texts[1])["data"][0]["embedding"]
        assert got.keys() == wanted.keys()
        assert got["usage"] == wanted["usage"]
        assert got["object"] == wanted["object"]
        for one, other in zip(got["data"], wanted["data"], strict=True):
            assert one.keys() == other.keys()
            assert one["index"] == other["index"]
            first, second = np.array(one["embedding"]), np.array(other["embedding"])
            assert first.shape == second.shape
            # the vectors differ a little, because flash attention rounds differently
            assert np.sum(first * second) / np.linalg.norm(first) / np.linalg.norm(second) > 0.999


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_embeddings_of_encoders_are_theirs(kind, tmp_path):
    file = str(write_encoder(kind, tmp_path / "encoder.gguf"))
    theirs = llama_cpp.Llama(file, n_ctx=96, embedding=True, verbose=False)
    with contextlib.closing(theirs), Llama(file, n_ctx=96, embedding=True) as mine:
        assert mine.pooling_type() == theirs.pooling_type()
        for text in ("the cat sat on the mat", "fish"):
            first, second = (np.array(each.embed(text, normalize=True)) for each in (mine, theirs))
            assert np.allclose(first, second, atol=2e-3)


def test_calls_from_many_threads_run_as_one_batch(ours, steps):
    asked = [[{"role": "user", "content": text}] for text in questions()[:48]]

    def answer(messages):
        return ours.create_chat_completion(messages, temperature=0, max_tokens=24)["choices"][0]["message"]["content"]

    alone = [answer(messages) for messages in asked]
    before = ours.llm.stats()
    with ThreadPoolExecutor(len(asked)) as pool:
        with steps.held():
            together = pool.map(answer, asked)
            until(lambda: ours.llm.stats().in_flight == len(asked))
        together = list(together)
    after = ours.llm.stats()
    assert sum(a == b for a, b in zip(alone, together, strict=True)) >= 46  # the rule of equality, for 48 texts
    assert after.decode_rows - before.decode_rows > 1.5 * (after.decode_calls - before.decode_calls)


def test_a_refused_call_leaves_the_others_alone(ours):
    def call(i):
        try:
            return ours("x " * 2000 if i % 4 == 0 else STORY, temperature=0, max_tokens=24)["choices"][0]["text"]
        except ValueError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(call, range(16)))
    assert all(isinstance(each, ValueError) == (i % 4 == 0) for i, each in enumerate(made))
    assert len({each for each in made if isinstance(each, str)}) == 1


def test_close_ends_the_calls_that_run(steps):
    model = Llama(TINY, n_ctx=512)
    model("warm", max_tokens=1)
    made = []

    def read():
        for token in model.generate(model.tokenize(STORY.encode())):
            made.append(token)

    def call():
        with pytest.raises(EngineError):
            read()

    threads = [threading.Thread(target=call) for _ in range(4)]
    with steps.each_takes(0.05):
        for thread in threads:
            thread.start()
        until(lambda: made)
        model.close()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(EngineClosedError):
        model("again")


def test_a_stream_that_is_left_frees_its_slot(ours):
    chunks = ours(STORY, max_tokens=400, stream=True)
    next(chunks)
    chunks.close()
    until(lambda: not ours.llm.stats().running)


def test_a_draft_by_lookup_changes_no_text(ours):
    draft = __import__("llama_cpp.llama_speculative", fromlist=["x"]).LlamaPromptLookupDecoding(num_pred_tokens=4)
    with Llama(TINY, draft_model=draft) as model:
        assert model.llm.plan.config.speculate == "lookup"
        assert model(STORY, temperature=0)["choices"] == ours(STORY, temperature=0)["choices"]
