"""Right and wrong calls of LLM."""

import itertools
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from array import array

import numpy as np
import pytest

from llamabatch import (
    LLM,
    ConfigError,
    Engine,
    EngineClosedError,
    EngineConfig,
    EngineError,
    FinishReason,
    InputError,
    ModelFileError,
    PromptError,
    PromptWarning,
    SamplingParams,
)
from llamabatch.config import KV_TYPES
from llamabatch.gguf.resolve import resolve
from llamabatch.llama.context import Context
from llamabatch.utils import lifetime
from tests.waiting import until

HI = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def llm():
    with LLM("tiny", n_slots=8) as made:
        yield made


def test_one_prompt_or_a_list_text_or_ids(llm, greedy):
    [one] = llm.generate("Once upon a time", greedy)
    ids = llm.tokenize("Once upon a time")
    assert one.prompt == "Once upon a time"
    assert list(one.prompt_token_ids) == ids
    [by_ids] = llm.generate(ids, greedy)
    assert by_ids.text == one.text
    assert by_ids.prompt is None
    both = llm.generate(["Once upon a time", ids], greedy)
    assert [o.text for o in both] == [one.text, one.text]


def test_prompts_in_mappings_are_the_prompts_in_them(llm, greedy):
    ids = llm.tokenize("Once upon a time")
    plain = llm.generate("Once upon a time", greedy)[0]
    forms = [
        *({"prompt": "Once upon a time"}, {"prompt_token_ids": ids}, {"prompt_token_ids": np.array(ids)}),
        {"prompt_token_ids": ids, "prompt": "as it was"},
    ]
    shown = ["Once upon a time", None, None, "as it was"]
    for form, prompt in zip(forms, shown, strict=True):
        [alone] = llm.generate(form, greedy)
        assert (alone.prompt, alone.prompt_token_ids, alone.text) == (prompt, tuple(ids), plain.text)
        assert "".join(piece.text for piece in llm.stream(form, greedy)) == plain.text
        assert [output.text for _, output in llm.as_completed(form, greedy)] == [plain.text]
    beside = [*forms, "Once upon a time", ids]
    assert [output.prompt_token_ids for output in llm.generate(beside, greedy)] == [tuple(ids)] * 6
    assert [output.prompt_token_ids for output in llm.generate(iter(beside), greedy)] == [tuple(ids)] * 6
    pieces = list(llm.stream([*forms, HI], greedy))
    assert {piece.prompt_index for piece in pieces if piece.finished is not None} == set(range(5))
    assert all(np.array_equal(a, b) for a, b in itertools.pairwise(llm.embed(forms)))
    assert np.array_equal(llm.embed({"prompt": "Once upon a time"})[0], llm.embed(ids)[0])
    wanted = llm.score("Once upon", [" a time"])
    assert llm.score({"prompt": "Once upon"}, [{"prompt": " a time"}]) == wanted
    head = llm.tokenize("Once upon")
    tail = {"prompt_token_ids": list(wanted[0].token_ids)}
    [[one]] = llm.score([({"prompt_token_ids": head}, [tail])])
    assert one.token_ids == wanted[0].token_ids


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"prompt": "a", "multi_modal_data": {"video": "a"}}, "multi_modal_data has 'video'"),
        ({"prompt_embeds": [[0.5]]}, "'prompt_embeds', which is not supported yet"),
        ({"prompt": "a", "promt_token_ids": [1]}, "unknown key 'promt_token_ids'; did you mean 'prompt_token_ids'"),
        ({"prompt_token_ids": "a"}, "prompt_token_ids is 'a'; give a list of token ids"),
        ({"prompt_token_ids": [1], "prompt": 5}, "prompt of a mapping is 5; give a text"),
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": [10**9]}, "token id 1000000000 is outside the vocabulary"),
    ],
)
def test_a_mapping_that_is_no_prompt_is_its_own_error(llm, prompt, says, greedy):
    good, bad = llm.generate(["good", prompt], greedy, errors="return")
    assert good.error is None
    assert says in bad.error
    with pytest.raises(PromptError, match=re.escape(says)):
        llm.generate(prompt)
    with pytest.raises(PromptError, match=re.escape(says)):
        llm.embed([prompt])
    [one, other] = llm.score("Once", [" upon", prompt], errors="return")
    assert one.error is None
    assert other.error is not None


def test_a_conversation_is_no_list_of_mappings(llm):
    with pytest.raises(PromptError, match=r"texts and token ids go to generate\(\)"):
        llm.chat([{"prompt": "a"}, {"prompt_token_ids": [1]}])


def test_params_for_each(llm):
    outputs = llm.generate(["a", "b", "c"], [SamplingParams(max_tokens=n, ignore_eos=True) for n in (1, 2, 3)])
    assert [len(o.token_ids) for o in outputs] == [1, 2, 3]
    with pytest.raises(InputError, match="2 SamplingParams for 3 prompts"):
        llm.generate(["a", "b", "c"], [SamplingParams()] * 2)
    with pytest.raises(InputError, match="a str; give SamplingParams"):
        llm.generate(["a"], ["temperature"])


def test_params_as_a_mapping(llm):
    outputs = llm.generate(["a", "b"], [{"max_tokens": 2, "ignore_eos": True}, SamplingParams(max_tokens=1)])
    assert [len(o.token_ids) for o in outputs] == [2, 1]
    with pytest.raises(InputError, match="temperature"):
        llm.generate("a", {"temprature": 1})
    for params in (5, "x", [5]):
        for call in (llm.generate, llm.stream):
            with pytest.raises(InputError):
                call("a", params)
    with pytest.raises(InputError, match="names of fields are strings"):
        llm.generate("a", {5: 1})


def test_chat_one_or_a_list(llm, greedy):
    [one] = llm.chat(HI, greedy)
    two = llm.chat([HI, HI], greedy)
    assert [o.text for o in two] == [one.text, one.text]
    assert one.prompt.endswith("<|im_start|>assistant\n")


def test_timings(llm):
    [output] = llm.generate("Once", SamplingParams(max_tokens=6, ignore_eos=True))
    timings = output.timings
    assert 0 <= timings.queued_s <= timings.ttft_s <= timings.total_s
    assert len(timings.token_times_s) == 6
    assert len(timings.inter_token_s) == 5
    assert timings.generation_tps > 0


def test_a_bad_prompt_in_a_list_is_one_failed_output(llm, greedy):
    outputs = llm.generate(["good", "", [10**9], [-1], 5, [1] * 5000, "good"], greedy, errors="return")
    assert [o.finish_reason is FinishReason.ERROR for o in outputs] == [False, True, True, True, True, True, False]
    assert "empty" in outputs[1].error
    assert "1000000000" in outputs[2].error
    assert "5000 tokens; n_ctx allows" in outputs[5].error
    assert outputs[0].text == outputs[6].text


NO_LIST_OF_PROMPTS = [
    HI, [HI], [HI, HI], tuple(HI), [None, HI], [None, *HI], [float("nan"), *HI], np.array(HI), np.array([HI]),
    HI[0], {"prompt": ["a"]}, [{"text": "a"}, {"text": "b"}], None, 5, b"ab", True, object(),
    np.array(1), np.array("a"),
]  # fmt: skip


@pytest.mark.parametrize("errors", ["warn", "raise", "return"])
def test_a_container_of_the_wrong_shape_is_raised_at_once(llm, errors):
    for prompts in NO_LIST_OF_PROMPTS:
        with pytest.raises(PromptError, match=r"prompts (holds|is) "):
            llm.generate(prompts, errors=errors)
        with pytest.raises(PromptError, match=r"texts (holds|is) "):
            llm.embed(prompts, errors=errors)
    with pytest.raises(PromptError, match="prompts holds"):
        llm.generate(iter(HI), errors=errors)
    no_conversations = ("hi", ["hi", "ho"], [None, "hi"], [5, 6], [[5, 6], [7]], np.array(["hi"]), HI[0], None, 5)
    for texts in no_conversations:
        with pytest.raises(PromptError, match=r"conversations (holds|is) "):
            llm.chat(texts, errors=errors)
    with pytest.raises(InputError, match=r"errors is 'ignore' \(known: warn, raise, return\)"):
        llm.generate("a", errors="ignore")
    with pytest.raises(PromptError, match=r"conversations go to chat\(\)"):
        llm.generate(HI, errors=errors)
    with pytest.raises(PromptError, match=r"texts and token ids go to generate\(\)"):
        llm.chat(["hi"], errors=errors)


class Series:
    """Like pandas' Series: it has numbered cells, and == returns an array."""

    def __init__(self, cells):
        self.array = cells

    def __iter__(self):
        return iter(self.array)

    def __len__(self):
        return len(self.array)

    def __eq__(self, other):
        raise ValueError("the truth value of a Series is ambiguous")

    __hash__ = None


class NAType:
    """Like the type of pandas.NA: its truth value raises TypeError."""

    def __bool__(self):
        raise TypeError("boolean value of NA is ambiguous")


class Table(Series):
    @property
    def columns(self):
        return self.array


def test_columns_of_tables_are_lists_of_prompts(llm):
    one = SamplingParams(max_tokens=1)
    ids = llm.tokenize("Once upon a time")
    cells = ["Once", ids, tuple(ids), np.array(ids)]
    mixed = np.empty(4, object)
    mixed[:] = cells
    named = dict(zip("abcd", cells, strict=True))
    for container in (cells, tuple(cells), mixed, Series(cells), iter(cells), (c for c in cells), named.values()):
        outputs = llm.generate(container, one)
        assert [len(output.prompt_token_ids) for output in outputs] == [1, *[len(ids)] * 3]
    for alone in (ids, tuple(ids), np.array(ids), Series(ids), iter(ids), array("i", ids)):
        [output] = llm.generate(alone, one)
        assert list(output.prompt_token_ids) == ids
    assert len(llm.generate(np.array([ids, ids]), one)) == 2
    assert len(llm.generate(np.array(["a", "b"]), one)) == 2
    messages = np.empty(1, object)
    messages[:] = HI
    for conversations in (messages, Series(HI), [messages, HI], Series([messages]), iter([HI]), {"a": HI}.values()):
        outputs = llm.chat(conversations, one)
        assert {output.prompt for output in outputs} == {llm.chat(HI, one)[0].prompt}
    for call in (llm.generate, llm.chat, llm.embed, llm.score, llm.stream, llm.as_completed):
        for table in (Table(["a", "b"]), Table([0, 1])):
            with pytest.raises(PromptError, match="is a table, a Table; give one of its columns"):
                call(table)


def test_columns_of_arrow_are_lists_of_prompts(llm):
    pyarrow = pytest.importorskip("pyarrow")
    one = SamplingParams(max_tokens=1)
    for column in (pyarrow.array(["a", None]), pyarrow.table({"x": ["a", None]})["x"]):
        assert [output.error is None for output in llm.generate(column, one, errors="return")] == [True, False]
    ids = llm.tokenize("Once upon a time")
    assert list(llm.generate(pyarrow.array(ids), one)[0].prompt_token_ids) == ids
    with pytest.raises(PromptError, match="prompts is a table"):
        llm.generate(pyarrow.table({"x": ["a"]}))


WRONG_CELLS = [None, float("nan"), np.float32("nan"), NAType(), 5, 5.5, b"a", "", [], [-1], [10**9], [[5]], [None],
               {"a": 1}, HI, object(), np.array(1), True, [1, "a"]]  # fmt: skip


def test_a_wrong_cell_is_its_own_failure_and_told_in_one_warning(llm):
    one = SamplingParams(max_tokens=1)
    prompts = ["a", *(each for cell in WRONG_CELLS for each in (cell, "b"))]
    with pytest.warns(PromptWarning) as warned:
        outputs = llm.generate(Series(prompts), one)
    assert [output.error is None for output in outputs] == [i % 2 == 0 for i in range(len(prompts))]
    n, first = len(WRONG_CELLS), "prompts[1]: a prompt is a text or a list of token ids, not None"
    assert [str(each.message) for each in warned] == [f"{n} of {2 * n + 1} prompts failed, first: {first}"]
    assert warned[0].filename == __file__
    assert warned[0].message.outputs == tuple(outputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert llm.generate(prompts, one, errors="return")[1].error == outputs[1].error
    before = llm.stats().submitted
    with pytest.raises(PromptError, match=r"^prompts\[1\]: a prompt is a text or a list of token ids, not None$"):
        llm.generate(prompts, one, errors="raise")
    assert llm.stats().submitted == before, "something was run first"


def test_a_wrong_cell_among_conversations_is_its_own_failure(llm):
    cells = [None, float("nan"), "hi", 5, [5], HI[0], [], [{"role": "user"}], [None], [*HI, "hi"], [[HI]]]
    one = SamplingParams(max_tokens=1)
    with pytest.warns(PromptWarning, match=r"^11 of 12 conversations failed, first: conversations\[1\]: a "):
        outputs = llm.chat([HI, *cells], one)
    assert [output.error is None for output in outputs] == [True, *[False] * 11]
    assert all(llm.chat([cell, HI], one, errors="return")[0].error for cell in cells if cell is not cells[5])


@pytest.mark.parametrize("prompts", [[None], [float("nan")], [""], [[10**9]], ["", None]])
def test_where_all_fail_the_first_error_is_raised_with_the_outputs(llm, prompts):
    everyone = r"all 2 prompts failed, first: " if len(prompts) > 1 else ""
    with pytest.raises(PromptError, match=rf"^{everyone}prompts\[0\]: "):
        llm.generate(prompts)
    with pytest.raises(PromptError, match=rf"^{everyone}prompts\[0\]: "):
        list(llm.as_completed(prompts))
    with pytest.raises(PromptError, match=rf"^{everyone}prompts\[0\]: "):
        llm.stream(prompts)  # raises at the call, not at the first piece
    assert [o.finish_reason for o in llm.generate(prompts, errors="return")] == [FinishReason.ERROR] * len(prompts)
    assert len(list(llm.as_completed(prompts, errors="return"))) == len(prompts)


def test_what_fails_while_it_runs_is_a_failure_like_any_other(steps):
    def fails(token_ids, logits):
        if len(token_ids) == 2:
            raise RuntimeError("enough")
        return logits

    good, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=900, ignore_eos=True)
    bad = SamplingParams(max_tokens=9, ignore_eos=True, logits_processors=[fails])
    with LLM("tiny", n_slots=4, instances=1) as llm:
        with pytest.warns(PromptWarning, match=r"^1 of 3 prompts failed, first: prompts\[1\]: .*: 'enough'"):
            outputs = llm.generate(["a", "b", "c"], [good, bad, good])
        assert [len(output.token_ids) for output in outputs] == [1, 2, 1]
        with pytest.raises(EngineError, match=r"^[^\[]*RuntimeError: 'enough'") as only:
            llm.generate("b", bad)
        assert [len(output.token_ids) for output in only.value.outputs] == [2], "what it had generated is lost"
        with (
            steps.each_takes(0.02),
            pytest.raises(EngineError, match=r"^prompts\[1\]: .*RuntimeError: 'enough'") as raised,
        ):
            llm.generate(["a", "b", "c"], [good, bad, long], errors="raise")
        done, failed, running = raised.value.outputs
        assert (len(done.token_ids), len(failed.token_ids), running) == (1, 2, None)
        until(lambda: not llm.stats().in_flight)
        assert llm.stats().aborted == 1


def test_streams_tell_of_failures_after_their_last_piece(llm):
    one = SamplingParams(max_tokens=1)
    for call in (llm.stream, llm.as_completed):
        pieces = call(["a", ""], one)
        told = [next(pieces), next(pieces)]  # the warning comes only at the end
        assert sorted(piece[0] if call == llm.as_completed else piece.prompt_index for piece in told) == [0, 1]
        with pytest.warns(PromptWarning, match=r"^1 of 2 prompts failed, first: prompts\[1\]: the prompt is") as warned:
            assert list(pieces) == []
        assert warned[0].filename == __file__
    for call in (llm.stream, llm.as_completed):
        assert len(list(call(["a", ""], one, errors="return"))) == 2
        with pytest.raises(PromptError, match=r"^prompts\[1\]: "):
            call(["a", ""], one, errors="raise")
        for _ in call(["a", ""], one):  # the loop ends early, so there is no warning
            break


@pytest.mark.parametrize("prompts", ["", [-1], [[10**5000]]])
def test_nothing_to_run_is_an_exception(llm, prompts):
    with pytest.raises(PromptError):
        llm.generate(prompts)


def test_an_empty_list_has_an_empty_answer(llm):
    assert llm.generate([]) == llm.generate(iter(())) == llm.chat([]) == llm.embed([]) == []
    assert list(llm.as_completed([])) == list(llm.stream(iter(()))) == []


def test_a_conversation_without_content_is_an_exception(llm):
    with pytest.raises(PromptError):
        llm.chat([{"role": "user"}])


def test_stream_gives_the_whole_text_in_pieces(llm, greedy):
    pieces = list(llm.stream(HI, greedy))
    assert len(pieces) > 1
    assert [p.finished is None for p in pieces] == [True] * (len(pieces) - 1) + [False]
    assert "".join(p.text for p in pieces) == pieces[-1].finished.text == llm.chat(HI, greedy)[0].text


def test_stream_of_many_tells_whose_each_piece_is(llm, greedy):
    prompts = ["Once upon a time", HI, "", "The sea"]
    pieces = list(llm.stream(prompts, greedy, errors="return"))
    wanted = [llm.generate("Once upon a time", greedy)[0].text, llm.chat(HI, greedy)[0].text, "",
              llm.generate("The sea", greedy)[0].text]  # fmt: skip
    for index, text in enumerate(wanted):
        own = [p for p in pieces if p.prompt_index == index]
        assert "".join(p.text for p in own) == text == own[-1].finished.text
        assert [p.finished is not None for p in own] == [False] * (len(own) - 1) + [True]
    assert "empty" in next(p for p in pieces if p.prompt_index == 2).finished.error
    order = [p.prompt_index for p in pieces if p.token_ids]
    assert order != sorted(order), "the texts do not come side by side"


def test_as_completed_gives_the_first_to_finish_first():
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (40, 3, 20)]
    with LLM("tiny", n_slots=4, instances=1) as llm:
        done = list(llm.as_completed(["a", "b", "c"], params))
    assert [(i, len(o.token_ids)) for i, o in done] == [(1, 3), (2, 20), (0, 40)]


def test_leaving_as_completed_aborts_the_rest(llm):
    params = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (2, 900, 900)]
    for index, _ in llm.as_completed(["a", "b", "c"], params):
        assert index == 0
        break
    stats = until(lambda: not (now := llm.stats()).in_flight and now)  # aborted requests end with the current step
    assert (stats.running, stats.waiting, stats.free_slots) == (0, 0, 8)


def test_leaving_a_stream_frees_its_slot(llm):
    for _ in llm.stream("Once", SamplingParams(max_tokens=500, ignore_eos=True)):
        break
    assert llm.generate("x", SamplingParams(max_tokens=1))
    until(lambda: llm.stats().free_slots == 8)  # the abort takes effect after the current step


def test_tokens_to_text_and_back(llm):
    assert len(llm.tokenize("<|im_end|>")) > 1  # the user's text has no special tokens
    text = "Once, in Paris \u2026 \u4f60\u597d \U0001f98a\n"
    ids = llm.tokenize(text)
    assert llm.detokenize(ids) == text
    assert llm.tokenize([text, "a"]) == [ids, llm.tokenize("a")]
    assert llm.detokenize([ids, ids[:1], []]) == [text, llm.detokenize(ids[:1]), ""]
    [end] = llm.tokenize("<|im_end|>", add_special=False, parse_special=True)
    assert llm.detokenize([*ids, end]) == text
    assert llm.detokenize([*ids, end], skip_special_tokens=False) == text + "<|im_end|>"
    for bad in ([-1], [10**9], ["a"], "a", [[5], 3]):
        with pytest.raises(PromptError):
            llm.detokenize(bad)
    with pytest.raises(PromptError, match="a list of them"):
        llm.tokenize([5])


def test_after_close():
    llm = LLM("tiny", n_slots=1)
    llm.close()
    llm.close()
    conversation = [{"role": "user", "content": "x"}]
    calls = [
        lambda: llm.generate("x"),
        lambda: llm.generate([[1, 2]], SamplingParams(overflow="shift")),
        lambda: llm.chat(conversation),
        lambda: list(llm.stream("x")),
        lambda: list(llm.as_completed(["x"])),
        lambda: llm.embed("x"),
        lambda: llm.score("x", ["y"]),
        lambda: llm.tokenize("x"),
        lambda: llm.detokenize([2000]),
        lambda: llm.save_prefix("x", "x.prefix"),
        lambda: llm.load_adapter("a", "a.gguf"),
        llm.stats,
    ]
    for call in calls:  # none of these calls may use freed memory
        with pytest.raises(EngineClosedError):
            call()


def test_close_ends_what_runs():
    llm = LLM("tiny", n_slots=2)
    got = []
    params = SamplingParams(max_tokens=900, ignore_eos=True)
    thread = threading.Thread(target=lambda: got.extend(llm.generate(["a", "b", "c"] * 20, params)))
    thread.start()
    until(lambda: llm.stats().decode_calls > 2)
    llm.close()
    thread.join(30)
    assert not thread.is_alive()
    assert {o.finish_reason for o in got} == {FinishReason.ABORT}
    assert any(o.text for o in got), "what was generated before the end is lost"


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"", "not a GGUF"), (b"GGUF\3\0\0\0" + b"\xff" * 16, "damaged")],
)
def test_files_that_are_no_models(tmp_path, content, message):
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelFileError, match=message):
        LLM(str(path))
    with pytest.raises(ModelFileError, match="directory"):
        LLM(str(tmp_path))


@pytest.mark.parametrize("share", [0.05, 0.99])
def test_truncated_models(tmp_path, share):
    data = resolve("tiny").read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ModelFileError, match=r"cut\.gguf is truncated: .* ends at byte \d+ of \d+"):
        LLM(str(path))


def test_n_ctx_is_what_one_request_may_use():
    with LLM("tiny", n_slots=8, n_ctx=256) as llm:
        ids = llm.tokenize("word " * 300)[:250]
        outputs = llm.generate([ids] * 8, SamplingParams(max_tokens=None, ignore_eos=True))
        assert [len(o.token_ids) for o in outputs] == [7] * 8


def test_a_forgotten_llm_gives_its_thread_back(begun):
    for _ in range(3):
        llm = LLM("tiny", n_slots=1)
        llm.generate("x", SamplingParams(max_tokens=1))
        del llm
    lifetime.reap_collected()  # garbage collection does not wait for threads to end
    assert not begun.threads()


def program(text: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(text)]


def test_a_program_that_forgets_everything_ends_well():
    code = """
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", n_slots=2)
        stream = llm.stream("Once", SamplingParams(max_tokens=900, ignore_eos=True))
        next(stream)
    """
    done = subprocess.run(program(code), capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_ctrl_c_aborts_the_call_and_leaves_the_llm_usable():
    code = """
        import os, signal, threading, time
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", n_slots=2)
        def interrupt():
            while llm.stats().decode_calls < 3:
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGINT)
        threading.Thread(target=interrupt).start()
        try:
            llm.generate(["a"] * 2000, SamplingParams(max_tokens=400, ignore_eos=True))
        except KeyboardInterrupt:
            print("interrupted")
        print(len(llm.generate("a", SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))
        stats = llm.stats()
        print(stats.running, stats.waiting, stats.free_slots)
    """
    done = subprocess.run(program(code), capture_output=True, text=True, timeout=60)
    assert done.stdout.split("\n") == ["interrupted", "3", "0 0 2", ""]


def test_ctrl_c_on_the_command_line(steps):
    command = [sys.executable, "-m", "llamabatch", "generate", "Once", "-n", "900", "--ignore-eos"]
    with steps.each_takes(0.05):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert b"Traceback" not in errors


def test_the_command_line_tells_a_refused_prompt_from_one_that_failed(tmp_path):
    refused = ["hi", "--regex", "(?=a)b"]
    failed = ["hi", "--choice", "yes", "-P", "allowed_token_ids=[300]"]
    for arguments, code, message in (
        ([""], 2, "the prompt is empty"),
        (refused, 2, "look-around"),
        (["w " * 3000], 2, "-P overflow=truncate"),
        (failed, 3, "no token"),
    ):
        command = [sys.executable, "-m", "llamabatch", "generate", *arguments]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=60, cwd=tmp_path, stdin=subprocess.DEVNULL
        )
        assert done.returncode == code
        assert done.stdout == ""
        assert done.stderr.count("\n") == 1
        assert done.stderr.startswith("Error: ")
        assert message in done.stderr


def test_the_command_line_streams_text():
    command = [sys.executable, "-m", "llamabatch", "generate", "--chat", HI[0]["content"], "-t", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "Paris" in done.stdout
    piped = subprocess.run(
        [*command[:4], "--chat", "-t", "0"], input=HI[0]["content"], capture_output=True, text=True, timeout=60
    )
    assert piped.stdout == done.stdout


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_fork_of_the_host_program_ends():
    code = """
        import os
        from llamabatch import LLM, SamplingParams
        llm = LLM("tiny", n_slots=1)
        llm.generate("a", SamplingParams(max_tokens=2))
        pid = os.fork()
        if pid == 0:
            os._exit(0)
        print(os.waitpid(pid, 0)[1])
    """
    done = subprocess.run(program(code), capture_output=True, text=True, timeout=60)
    assert done.stdout == "0\n"


@pytest.mark.parametrize("content", [None, 5, ["x"]])
def test_content_that_the_template_cannot_use_is_that_prompts_error(llm, content, greedy):
    good, bad = llm.chat([HI, [{"role": "user", "content": content}]], greedy, errors="return")
    assert good.error is None
    assert "refuses" in bad.error or "content" in bad.error


@pytest.mark.parametrize(
    ("model", "error"), [("x" * 5000, ModelFileError), ("~no such user/x", ModelFileError), ("a\0b", ConfigError)]
)
def test_names_that_no_file_can_have(model, error):
    with pytest.raises(error):
        LLM(model)


@pytest.mark.parametrize("kind", KV_TYPES)
def test_every_type_of_cache_that_is_offered(kind):
    with LLM("tiny", n_slots=2, type_k=kind, type_v=kind) as llm:
        outputs = llm.generate(["Once", "Twice"], SamplingParams(max_tokens=3, ignore_eos=True))
    assert [o.error for o in outputs] == [None, None]


@pytest.mark.parametrize("start", [{}, {"start_slots": 1}])
def test_a_context_that_cannot_grow_goes_on_with_what_there_is(start, greedy, monkeypatch, caplog):
    made = Context.__init__

    def small_memory(self, model, config, n_slots):
        if n_slots > 2:
            raise EngineError("no memory")
        made(self, model, config, n_slots)

    monkeypatch.setattr(Context, "__init__", small_memory)
    with LLM("tiny", n_slots=8, instances=1, **start) as llm:
        outputs = llm.chat([HI] * 6, greedy)
        assert llm.stats().free_slots <= 2
    assert f"no memory; continuing with {1 if start else 2} slot" in caplog.text
    assert {o.text for o in outputs} == {outputs[0].text}
    assert outputs[0].error is None


def test_ctrl_c_while_a_model_loads_leaves_no_thread():
    code = """
        import _thread, threading, time
        from llamabatch import LLM; from llamabatch.engine import engine
        load = engine.Model.__init__
        def slow(self, *args):
            _thread.interrupt_main()
            time.sleep(0.1)
            load(self, *args)
        engine.Model.__init__ = slow
        try:
            LLM("tiny")
        except KeyboardInterrupt:
            pass
        deadline = time.monotonic() + 50
        while threading.active_count() > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        print(threading.active_count())
    """
    done = subprocess.run(program(code), capture_output=True, text=True, timeout=60)
    assert done.stdout == "1\n", done.stderr


def test_nothing_native_is_reached_after_close():
    engine = Engine(EngineConfig("tiny"))
    engine.close()
    for call in (
        lambda: engine.model.token_bytes(5),
        lambda: engine.model.is_eog(5),
        lambda: engine.model.tokenize("x"),
    ):
        with pytest.raises(EngineClosedError):
            call()
    assert engine.model.is_recurrent is False


def test_best_of_keeps_the_likeliest(llm):
    params = {"n": 5, "seed": 3, "max_tokens": 10, "temperature": 1.5, "logprobs": 0}
    [all_five] = llm.generate(["Once upon a time"], params)
    ranked = sorted(all_five.outputs, key=lambda c: -c.cumulative_logprob / len(c.token_ids))
    [best] = llm.generate(["Once upon a time"], {**params, "n": 2, "best_of": 5, "logprobs": None})
    assert [c.token_ids for c in best.outputs] == [c.token_ids for c in ranked[:2]]
    assert all(c.logprobs is None for c in best.outputs)


def test_the_engines_seed_gives_each_request_its_own():
    prompts, params = ["Once upon a time"] * 4, SamplingParams(max_tokens=12, temperature=1.5)

    def texts(seed):
        with LLM("tiny", n_slots=4, n_ctx=256, seed=seed) as llm:
            first = [out.text for out in llm.generate(prompts, params)]
            return first + [out.text for out in llm.generate(prompts, params)]

    found = texts(7)
    assert found == texts(7) != texts(8)
    assert len(set(found)) > 4  # each continuation has its own seed
