"""FakeLLM and FakeAsyncLLM: the verbs of LLM and AsyncLLM, with answers from a test and without a model."""

import asyncio
import copy
import inspect
import math
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from llamabatch import (
    LLM,
    AdapterError,
    AsyncLLM,
    ConfigError,
    EngineClosedError,
    EngineError,
    FinishReason,
    InputError,
    PromptError,
    PromptWarning,
    QueueFull,
    RequestOutput,
    SamplingError,
    SamplingParams,
)
from llamabatch.testing import FakeAsyncLLM, FakeLLM, FakeRequest
from tests.waiting import until_soon

TWO = "What is 2 + 2?"


def one(llm, prompt="x", **params):
    return llm.generate(prompt, params)[0]


@pytest.mark.parametrize(("fake", "real"), [(FakeLLM, LLM), (FakeAsyncLLM, AsyncLLM)])
def test_a_fake_has_every_verb_with_the_same_parameters(fake, real):
    assert issubclass(fake, real)
    own = {name for name in dir(fake) if not name.startswith("_")} - set(dir(real))
    assert own == {"requests"}
    for name in (name for name in dir(real) if not name.startswith("_")):
        theirs = inspect.getattr_static(real, name)
        if not isinstance(theirs, property):
            assert inspect.signature(getattr(fake, name)) == inspect.signature(getattr(real, name)), name
    ours, theirs = (inspect.signature(cls.__init__).parameters for cls in (fake, real))
    assert set(ours) - set(theirs) == {"answers", "embeddings", "scores", "relevance", "labels", "classes"}
    assert list(ours)[:2] == list(theirs)[:2] == ["self", "model"]


def test_by_default_a_prompt_comes_back():
    with FakeLLM() as llm:
        output = one(llm, "Once upon a time")
        assert isinstance(output, RequestOutput)
        assert (output.text, output.finish_reason, output.error) == ("Once upon a time", FinishReason.STOP, None)
        assert [o.text for o in llm.generate(["a", [260, 261]])] == ["a", ""]
        assert [o.text for o in llm.chat([{"role": "user", "content": "Hi"}])] == ["Hi"]


def test_answers_of_a_function():
    llm = FakeLLM(answers=lambda request: f"{request.kind} {request.text} {request.index}")
    output = llm.generate("a", SamplingParams(n=2))[0]
    assert [c.text for c in output.outputs] == ["generate a 0", "generate a 1"]
    talk = [{"role": "system", "content": "Be short."}, {"role": "user", "content": TWO}]
    assert llm.chat(talk)[0].text == f"chat {TWO} 0"
    assert llm.requests[-1].messages == tuple(talk)
    assert [request.index for request in llm.requests] == [0, 1, 0]


def test_answers_of_a_mapping_a_list_and_a_text():
    llm = FakeLLM(answers={TWO: "4"})
    assert llm.generate(TWO)[0].text == llm.chat([{"role": "user", "content": TWO}])[0].text == "4"
    with pytest.raises(AssertionError, match="answers has nothing for 'else'; it has 'What is 2"):
        llm.generate("else", errors="return")
    llm = FakeLLM(answers=["a", "b"])
    assert [o.text for o in llm.generate(["x", "y"])] == ["a", "b"]
    with pytest.raises(AssertionError, match="answers holds 2; 'z' is request 3"):
        llm.generate("z")
    assert one(FakeLLM(answers="same")).text == "same"
    with pytest.raises(AssertionError, match="is 3; give a str or an exception"):
        FakeLLM(answers=lambda request: 3).generate("x")


def test_an_exception_ends_its_request_as_an_error():
    llm = FakeLLM(answers={"good": "yes", "bad": ValueError("no luck")})
    with pytest.warns(PromptWarning, match=r"1 of 2 prompts failed, first: prompts\[1\]: ValueError: no luck"):
        outputs = llm.generate(["good", "bad"])
    assert [o.finish_reason for o in outputs] == ["stop", "error"]
    with pytest.raises(EngineError, match="no luck") as raised:
        llm.generate(["bad", "good"], errors="raise")
    assert raised.value.outputs[0].error == "ValueError: no luck"
    assert llm.stats().errors == 2

    def answer(request):
        raise EngineError("the GPU fell off")

    with pytest.raises(EngineError, match="the GPU fell off"):
        FakeLLM(answers=answer).generate("x")


@pytest.mark.parametrize("error", [QueueFull("full"), EngineClosedError("it died")])
def test_errors_of_a_whole_call_leave_it(error):
    llm = FakeLLM(answers=["fine", error])
    with pytest.raises(type(error)):
        llm.generate(["a", "b"], errors="return")
    assert llm.stats().submitted == llm.stats().in_flight == 0


def test_max_tokens_and_stops():
    llm = FakeLLM(answers="one two, three four")
    output = one(llm, max_tokens=2)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("one two", "length", 2)
    output = one(llm, stop=["thr"])
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("one two, ", "stop", "thr")
    assert one(llm, stop="three", include_stop_str_in_output=True).text == "one two, three"
    [two] = llm.tokenize(" two", add_special=False)
    output = one(llm, stop_token_ids=[two])
    assert (output.text, output.outputs[0].stop_reason) == ("one", two)
    assert one(llm, max_tokens=12, ignore_eos=True).finish_reason == "length"
    assert one(llm, max_tokens=12, ignore_eos=True).text.startswith("one two, three fourone two")
    assert len(one(llm, min_tokens=9, max_tokens=20).token_ids) >= 9
    with FakeLLM(answers="a " * 100, n_ctx=64) as small:
        output = one(small, max_tokens=None)
        assert (output.finish_reason, len(output.token_ids)) == ("length", 63)


def test_parameters_prompts_and_options_are_checked():
    llm = FakeLLM(n_ctx=64)
    with pytest.raises(SamplingError, match="temperature"):
        llm.generate("x", {"temperature": -1})
    with pytest.raises(SamplingError, match="did you mean 'max_tokens'"):
        llm.generate("x", {"max_token": 1})
    with pytest.raises(PromptError, match="n_ctx allows 1 to 64"):
        llm.generate("a " * 200)
    with pytest.raises(PromptError, match="conversations go to chat"):
        llm.generate([[{"role": "user", "content": "x"}]])
    with pytest.raises(PromptError, match="a message is"):
        llm.chat([{"role": "user"}])
    with pytest.raises(ConfigError, match="n_slots is 0"):
        FakeLLM(n_slots=0)
    with pytest.raises(QueueFull, match="max_queue=1"):
        FakeLLM(n_slots=1, max_queue=1).generate(["a", "b", "c"])
    assert llm.requests == []
    assert (llm.plan.config.n_ctx, FakeLLM().plan.config.n_ctx) == (64, 4096)


@pytest.mark.parametrize(
    "options",
    [
        {"speculate": "draft", "draft_model": "draft.gguf"},
        {"strategy": "multi-instance"},
        {"isolate": True},
        {"kv": "unified", "type_v": "q8_0"},
    ],
)
def test_options_of_every_kind_of_engine_are_accepted(options):
    assert FakeLLM(**options).generate("x")[0].text == "x"


def test_chat_takes_tools_and_template_variables():
    llm = FakeLLM(answers=lambda request: request.messages[0]["content"])
    tool = {"type": "function", "function": {"name": "weather", "parameters": {}}}
    [output] = llm.chat([{"role": "user", "content": "Hi"}], tools=[tool], chat_template_kwargs={"thinking": True})
    assert "weather" in output.text
    with pytest.raises(PromptError, match=r"chat template does not know 'thinkin'.*did you mean 'thinking'"):
        llm.chat([{"role": "user", "content": "Hi"}], chat_template_kwargs={"thinkin": True})


def test_a_message_is_continued_and_a_template_given():
    llm = FakeLLM(answers={"Hi": "whole", "Well, ": "then."})
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Well, "}]
    assert llm.chat(begun[:1])[0].text == "whole"
    [output] = llm.chat(begun, continue_final_message=True)
    assert (output.text, output.prompt[-7:]) == ("then.", "\nWell, ")
    assert llm.requests[-1].messages == tuple(begun)
    assert llm.apply_chat_template(begun, continue_final_message=True) == output.prompt
    assert llm.apply_chat_template(begun[:1], chat_template="{{ messages[0].content }}!") == "Hi!"


def test_stream_and_as_completed():
    llm = FakeLLM(answers={"a": "x y z", "b": "x"})
    pieces = list(llm.stream(["a", "b"]))
    assert "".join(p.text for p in pieces if p.prompt_index == 0) == "x y z"
    assert [p.prompt_index for p in pieces][:3] == [0, 1, 0]
    assert [index for index, _ in llm.as_completed(["a", "b"])] == [1, 0]
    assert [p.finished is not None for p in pieces].count(True) == 2


def test_logprobs_and_best_of():
    output = one(FakeLLM(answers="x y"), "a b", logprobs=1, prompt_logprobs=0, best_of=3, n=2)
    assert len(output.outputs) == 2
    assert output.outputs[0].cumulative_logprob == 0
    assert [next(iter(t.values())).decoded_token for t in output.outputs[0].logprobs][:2] == ["x", " y"]
    assert len(output.prompt_logprobs) == 3
    assert output.to_openai()["choices"][0]["logprobs"]["tokens"][:2] == ["x", " y"]


def test_logprobs_of_tokens_by_id():
    llm = FakeLLM(answers="a b")
    [a, b] = llm.tokenize("a b", add_special=False)
    [output] = llm.generate("x", {"logprob_token_ids": [a, b]})
    told = output.outputs[0].logprobs
    assert [list(each) for each in told[:2]] == [[a, b], [b, a]]
    assert told[0][b].logprob < told[0][a].logprob == 0


def test_score():
    llm = FakeLLM(scores={" Paris": -0.1, " Rome": -5.0})
    scores = llm.score("The capital of France is", [" Paris", " Rome"])
    assert [round(s.logprob, 6) for s in scores] == [-0.1, -5.0]
    assert [s.is_greedy for s in scores] == [True, False]
    request = llm.requests[0]
    assert (request.kind, request.prompt, request.continuation) == ("score", "The capital of France is", " Paris")
    [[score], [other]] = FakeLLM().score([("a", [" b c"]), ("d", [" e"])])
    assert (score.logprob, score.num_tokens, other.logprob) == (-2, 2, -1)
    [failed] = FakeLLM().score("a", [""], errors="return")
    assert math.isnan(failed.logprob)


def test_embed():
    llm = FakeLLM()
    one, two, again = llm.embed(["a", "b", "a"])
    assert isinstance(one, np.ndarray)
    assert (one.shape, one.dtype, round(float(np.linalg.norm(one)), 5)) == ((16,), np.float32, 1.0)
    assert (one == again).all()
    assert not (one == two).all()
    assert list(FakeLLM(embeddings={"a": [1, 2]}).embed("a", normalize=False)[0]) == [1, 2]
    assert list(FakeLLM(embeddings=lambda request: [len(request.text)]).embed("abc", normalize=False)[0]) == [3]

    def fail(request):
        raise ValueError("no vector")

    [error] = FakeLLM(embeddings=fail).embed("a", errors="return")
    assert str(error) == "ValueError: no vector"


def test_dimensions_and_pooling():
    llm = FakeLLM(embeddings={"a": [3, 4, 12]})
    assert list(llm.embed("a", dimensions=2)[0]) == pytest.approx([0.6, 0.8])
    assert list(llm.embed("a", dimensions=2, normalize=False, pooling="mean")[0]) == [3, 4]
    with pytest.raises(ConfigError, match="pooling is 'cls', but this engine pools by 'mean'"):
        llm.embed("a", pooling="cls")
    with pytest.raises(InputError, match="dimensions is 0"):
        llm.embed("a", dimensions=0)
    with pytest.raises(InputError, match="dimensions is 4; the vector has 3"):
        llm.embed("a", dimensions=4)


def test_rerank():
    llm = FakeLLM(relevance={"x": 0.25, "y": 1, "z": 0.25})
    found = llm.rerank("Which one?", ["x", "y", "z"])
    assert [(each.index, each.document) for each in found] == [(1, "y"), (0, "x"), (2, "z")]
    assert [each.relevance_score for each in found] == pytest.approx([1, 0.25, 0.25])
    assert [each.index for each in llm.rerank("Which one?", ["x", "y", "z"], 1)] == [1]
    request = llm.requests[0]
    assert (request.kind, request.prompt, request.continuation) == ("rerank", "Which one?", "x")
    assert llm.rerank("Which one?", ["x"], use_activation=False)[0].relevance_score == pytest.approx(math.log(1 / 3))
    with pytest.raises(AssertionError, match="relevance has nothing for 'w'"):
        llm.rerank("Which one?", ["w"])
    assert [each.index for each in FakeLLM().rerank("red dog", ["a cat", "red dog", "a dog"])] == [1, 2, 0]
    with pytest.raises(AssertionError, match=r"relevance has 2\.0 for 'a'; allowed are 0 to 1"):
        FakeLLM(relevance=lambda request: 2).rerank("q", ["a"])

    def fail(request):
        if request.continuation == "b":
            raise ValueError("no score")
        return 0.5

    good, bad = FakeLLM(relevance=fail).rerank("q", ["b", "a"], errors="return")
    assert (good.index, bad.index, bad.error) == (1, 0, "ValueError: no score")
    assert math.isnan(bad.relevance_score)


def test_classify():
    llm = FakeLLM(labels=["spam", "ham", "?"], classes={"Buy!": {"spam": 0.75, "ham": 0.25}})
    [found] = llm.classify("Buy!")
    assert (found.label, found.probability) == ("spam", pytest.approx(0.75))
    assert found.probs == pytest.approx({"spam": 0.75, "ham": 0.25, "?": 0})
    assert llm.requests[0].kind == "classify"
    [even] = FakeLLM().classify(["anything"])
    assert even.probs == {"LABEL_0": 0.5, "LABEL_1": 0.5}
    with pytest.raises(AssertionError, match="classes has the label 'eggs'; labels are 'spam'"):
        FakeLLM(labels=["spam"], classes=lambda request: {"eggs": 1.0}).classify("a")

    async def both():
        async with FakeAsyncLLM() as llm:
            return await llm.rerank("q", ["b", "q"]), await llm.classify("a")

    ranked, [found] = asyncio.run(both())
    assert ([each.index for each in ranked], found.label) == ([1, 0], "LABEL_0")


@pytest.mark.parametrize("text", ["Once upon a time, there was", "  two  spaces\n\tand tabs_", "Grüße, 世界! 🎉", ""])
def test_tokens_spell_the_text(text):
    llm, other = FakeLLM(), FakeLLM()
    ids = llm.tokenize(text)
    assert llm.detokenize(ids) == text
    assert llm.detokenize(ids, skip_special_tokens=False) == "<|bos|>" + text
    assert other.tokenize([text, text]) == [ids, ids]
    assert llm.detokenize([ids, ids]) == [text, text]
    assert len(llm.tokenize("<|eos|>", add_special=False, parse_special=True)) == 1
    with pytest.raises(PromptError, match="outside the vocabulary"):
        llm.detokenize([10**7])


def test_adapters_and_prefixes(tmp_path):
    llm = FakeLLM(adapters={"polite": "polite.gguf"})
    llm.load_adapter("terse", "terse.gguf")
    assert llm.adapters == ["polite", "terse"]
    llm.generate("x", adapters={"terse": 0.5})
    assert llm.requests[-1].adapters == (("terse", 0.5),)
    with pytest.raises(AdapterError, match="loaded already"):
        llm.load_adapter("terse", "terse.gguf")
    llm.unload_adapter("terse")
    with pytest.raises(AdapterError, match="there is no adapter 'terse'"):
        llm.generate("x", adapters="terse")
    n_tokens = llm.save_prefix("word " * 40, tmp_path / "prefix")
    assert llm.load_prefix(tmp_path / "prefix") == n_tokens
    llm.unload_prefix(tmp_path / "prefix")
    assert llm.reset_prefix_cache() is True
    with pytest.raises(InputError, match="not loaded"):
        llm.unload_prefix(tmp_path / "prefix")
    with pytest.raises(InputError, match="at least 32"):
        llm.save_prefix("short", tmp_path / "prefix")
    with pytest.raises(InputError, match="no prefix that a FakeLLM has saved"):
        llm.load_prefix(tmp_path / "missing")


def test_vocab_metadata_and_n_ctx():
    llm = FakeLLM("some", n_ctx=256)
    assert llm.n_ctx == 256
    assert (llm.metadata["general.name"], len(llm.metadata["tokenizer.ggml.tokens"])) == ("some", llm.vocab.size)
    vocab = llm.vocab
    assert vocab is llm.vocab
    assert vocab.token(vocab.bos_token_id) == "<|bos|>"
    [hello] = llm.tokenize("hello", add_special=False)
    assert (vocab.token(hello), vocab.bytes(hello), vocab.id("hello")) == ("hello", b"hello", hello)
    assert vocab.eog_token_ids == (vocab.eos_token_id, vocab.eot_token_id)
    assert "no such token" not in vocab
    for wrong, message in ((-1, "token_id is -1"), (2**17, "from 0 to 131071"), (True, "token_id is True")):
        with pytest.raises(PromptError, match=message):
            vocab.token(wrong)
        with pytest.raises(PromptError, match=message):
            vocab.bytes(wrong)
    for wrong in ("no such token", 5, None):
        with pytest.raises(PromptError, match="the vocabulary has no token"):
            vocab.id(wrong)


def test_stats_close_and_monitor():
    llm = FakeLLM(answers="a b c")
    seen = []
    with llm.monitor(seen.append, every_s=0.01):
        llm.generate(["x", "y"])
    assert seen[-1].stats.ok == 2
    stats = llm.stats()
    assert (stats.submitted, stats.finished_stop, stats.generated_tokens, stats.running) == (2, 2, 8, 0)
    assert llm.heartbeats == []
    llm.close()
    llm.close()
    for call in (lambda: llm.generate("x"), llm.stats, lambda: llm.load_adapter("a", "b")):
        with pytest.raises(EngineClosedError):
            call()


def test_a_deadline_passes_while_an_answer_takes_long():
    llm = FakeLLM(answers=lambda request: time.sleep(0.02) or "late")
    [output] = llm.generate("x", {"deadline_s": 0.01}, errors="return")
    assert output.error.startswith("DeadlineExceeded: deadline_s is 0.01")


def test_from_pretrained_downloads_nothing():
    llm = FakeLLM.from_pretrained("owner/repo", "*Q4*", n_ctx=64)
    assert (type(llm), llm.plan.config.n_ctx) == (FakeLLM, 64)

    async def run():
        async with FakeAsyncLLM.from_pretrained("owner/repo", "*Q4*") as llm:
            return (await llm.generate("x"))[0].text

    assert asyncio.run(run()) == "x"


def test_a_fake_on_an_event_loop():
    async def run():
        async with FakeAsyncLLM(answers={"a": "x y", "b": "z"}) as llm:
            assert [o.text for o in await llm.generate(["a", "b"])] == ["x y", "z"]
            assert "".join([p.text async for p in llm.stream("a")]) == "x y"
            assert [i async for i, _ in llm.as_completed(["a", "b"])] == [1, 0]
            assert await llm.detokenize(await llm.tokenize("Hi there")) == "Hi there"
            assert (await llm.score("a", [" b"]))[0].logprob == -1
            assert (await llm.embed("a"))[0].shape == (16,)
            assert (await llm.stats()).ok == 7
            assert [r.text for r in llm.requests][:2] == ["a", "b"]
            return llm

    llm = asyncio.run(run())
    with pytest.raises(EngineClosedError):
        asyncio.run(llm.generate("a"))


def test_cancelling_a_task_aborts_its_requests():
    answering, go_on = threading.Event(), threading.Event()

    def answer(request):
        answering.set()
        assert go_on.wait(20)
        return "late"

    async def run():
        async with FakeAsyncLLM(answers=answer) as llm:
            task = asyncio.ensure_future(llm.generate("x"))
            assert await asyncio.to_thread(answering.wait, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            go_on.set()
            stats = (await llm._client()).stats
            await until_soon(lambda: not stats().in_flight)
            assert stats().aborted == 1

    asyncio.run(run())


def test_many_threads_share_a_fake():
    llm = FakeLLM(answers=lambda request: request.text * 2)
    results = {}
    threads = [threading.Thread(target=lambda i=i: results.update({i: one(llm, f"t{i}").text})) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {i: f"t{i}t{i}" for i in range(16)}
    assert len(llm.requests) == 16
    assert isinstance(llm.requests[0], FakeRequest)


def test_a_fake_needs_no_llama_cpp_and_starts_no_thread():
    code = (
        "import sys, threading\n"
        "sys.modules['llama_cpp'] = None\n"
        "from llamabatch.testing import FakeLLM\n"
        "assert FakeLLM(answers='4').generate('x')[0].text == '4'\n"
        "assert threading.active_count() == 1\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_verbs_take_the_keywords_of_vllm():
    params, talk = SamplingParams(max_tokens=1), [{"role": "user", "content": "a b"}]
    llm, later = FakeLLM(answers="a b c"), FakeAsyncLLM(answers="a b c")
    found = [
        llm.generate(["x"], sampling_params=params, use_tqdm=False), llm.chat(messages=talk, sampling_params=params),
        asyncio.run(later.generate("x", sampling_params=params)), asyncio.run(later.chat(messages=talk, params=params)),
        [output for _, output in llm.as_completed(["x"], sampling_params=params)],
    ]  # fmt: skip
    assert [len(output.outputs[0].token_ids) for [output] in found] == [1] * 5
    assert [piece.text for piece in llm.stream("x", sampling_params=params)] == ["a"]
    with pytest.raises(TypeError, match="params is given twice, once as 'sampling_params'"):
        llm.generate("x", params=params, sampling_params=params)
    with pytest.raises(TypeError):
        llm.generate("x", sampling_parms=params)
    assert inspect.iscoroutinefunction(FakeAsyncLLM.generate)
    assert list(inspect.signature(LLM.generate).parameters)[:3] == ["self", "prompts", "params"]


def test_the_list_of_outputs_says_where_the_text_of_one_is():
    outputs = FakeLLM(answers="7").generate("What is 3 + 4?")
    for name in ("text", "outputs", "finish_reason", "to_openai"):
        with pytest.raises(AttributeError, match=rf"a list of 1 RequestOutput, .* use outputs\[0\]\.{name}$"):
            getattr(outputs, name)
    with pytest.raises(AttributeError, match="object has no attribute 'shape'"):
        outputs.shape  # noqa: B018
    assert isinstance(outputs, list)
    assert not hasattr(outputs, "text")
    assert outputs == [outputs[0]] == list(outputs) == pickle.loads(pickle.dumps(outputs)) == copy.deepcopy(outputs)
    with pytest.raises(AttributeError, match=r"use outputs\[0\]\.text"):
        asyncio.run(FakeAsyncLLM().chat([{"role": "user", "content": "x"}])).text  # noqa: B018
