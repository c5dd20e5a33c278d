"""/completion, /infill and /embedding of llama-server, with a fake engine."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.errors import PromptError
from llamabatch.request.media import IMAGE
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.completion_body import InfillBody, read_infill, read_llama_completion
from llamabatch.server.llama_server.completion_response import Context, TimeLimit, only_fields, timings
from llamabatch.server.llama_server.embedding import normalized
from llamabatch.server.request.body import Body, Rules
from llamabatch.server.request.infill import Gap, infill_ids
from llamabatch.server.request.prompts import MediaPrompt, mixed_ids, read_mixed, read_with_media
from llamabatch.testing.fake_model import FakeModel
from tests.unit.server.serving_clients import fake_client, ready_client


@pytest.fixture(scope="module")
def client():
    with ready_client("one two three", adapters={"poet": "p.gguf"}, n_ctx=256) as client:
        yield client


def complete(client, **body):
    answer = client.post("/completion", json={"prompt": "Say it", **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client, path="/completion", **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["code"] == 400  # the shape of llama-server's errors
    return error["message"]


def events(client, **body):
    answer = client.post("/completion", json={"prompt": "Say it", "stream": True, **body})
    assert answer.status_code == 200, answer.text
    assert "[DONE]" not in answer.text
    return [json.loads(part.removeprefix("data: ")) for part in answer.text.split("\n\n") if part]


def test_an_answer_has_llama_servers_fields(client):
    found = complete(client, n_predict=8, temperature=0.5, top_k=7, seed=11, stop=["!"], repeat_penalty=1.1)
    assert found["content"] == "one two three"
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "eos", "")
    assert (found["index"], found["model"], found["truncated"], found["has_new_line"]) == (0, "fake", False, False)
    assert found["tokens"] == []
    assert found["tokens_evaluated"] == 3
    assert found["tokens_predicted"] == 4
    assert found["prompt"] == "<|bos|>Say it"
    settings = found["generation_settings"]
    expected = {"n_predict": 8, "max_tokens": 8, "temperature": 0.5, "top_k": 7, "seed": 11, "stop": ["!"]}
    assert expected.items() <= settings.items()
    assert (settings["repeat_penalty"], settings["repeat_last_n"], settings["stream"]) == (1.1, -1, False)
    assert {"adaptive_target", "adaptive_decay", "dry_sequence_breakers", "samplers", "mirostat"} <= settings.keys()
    assert settings["lora"] == [{"id": 0, "scale": 0.0}]
    assert found["timings"]["prompt_n"] == 3
    assert found["timings"]["predicted_n"] == 4
    assert all(value is not None and value >= 0 for value in found["timings"].values())


def test_the_reason_of_an_end(client):
    assert complete(client, n_predict=2)["stop_type"] == "limit"
    found = complete(client, stop=["two"])
    assert (found["stop_type"], found["stopping_word"], found["content"]) == ("word", "two", "one ")
    assert complete(client)["generation_settings"]["n_predict"] == -1
    assert complete(client, n_predict=-1)["stop_type"] == "eos"


def test_nothing_is_generated_where_n_predict_is_0(client):
    found = complete(client, return_tokens=True)
    assert len(found["tokens"]) == found["tokens_predicted"] == 4
    found = complete(client, n_predict=0, return_tokens=True)
    assert (found["content"], found["tokens"], found["tokens_predicted"]) == ("", [], 0)
    assert (found["stop_type"], found["generation_settings"]["n_predict"]) == ("limit", 0)
    assert [event["stop"] for event in events(client, n_predict=0)] == [True]


def test_probabilities(client):
    found = complete(client, n_probs=2, n_predict=2)["completion_probabilities"]
    assert len(found) == 2
    assert found[0]["token"] == "one"
    assert found[0]["bytes"] == list(b"one")
    assert found[0]["logprob"] <= 0
    assert "completion_probabilities" not in complete(client)
    streamed = [each for each in events(client, n_probs=2, n_predict=2) if not each["stop"]]
    assert [len(each["completion_probabilities"]) for each in streamed] == [1, 1]
    assert [each["completion_probabilities"][0]["token"] for each in streamed] == ["one", " two"]


def test_only_the_fields_that_were_asked_for(client):
    found = complete(client, n_predict=3, response_fields=["content", "generation_settings/n_predict", "prompt", "no"])
    assert found == {"content": "one two three", "generation_settings/n_predict": 3, "prompt": "<|bos|>Say it"}
    assert only_fields({"a": {"b": {"c": None}}}, ["a/b/c", "a/x", "a/b/c/d"]) == {"a/b/c": None}


def test_a_stream_brings_pieces_and_all_figures_at_the_end(client):
    *pieces, last = events(client)
    assert "".join(piece["content"] for piece in pieces) == "one two three"
    assert all(piece["stop"] is False and piece["tokens"] and "generation_settings" not in piece for piece in pieces)
    assert all(piece["tokens_evaluated"] == 3 for piece in pieces)
    assert (last["content"], last["tokens"], last["stop"], last["stop_type"]) == ("", [], True, "eos")
    assert last["timings"]["predicted_n"] == 4
    assert last["generation_settings"]["stream"] is True
    assert all("timings" in piece for piece in events(client, timings_per_token=True))


def test_progress_of_the_prompt_comes_first(client):
    found = events(client, return_progress=True, timings_per_token=True)
    told = [each["prompt_progress"] for each in found if "prompt_progress" in each]
    assert told[0] == {"total": 3, "cache": 0, "processed": 0, "time_ms": 0}
    assert told[-1]["processed"] == 3
    assert "prompt_progress" in found[0]
    assert found[0]["timings"]["prompt_ms"] == 0.0
    assert "".join(each["content"] for each in found) == "one two three"


def test_several_prompts_are_a_list_in_their_order(client):
    found = complete(client, prompt=["a", "b c"])
    assert [each["index"] for each in found] == [0, 1]
    assert [each["prompt"] for each in found] == ["<|bos|>a", "<|bos|>b c"]
    assert isinstance(complete(client, prompt=["alone"]), list)
    assert [each["index"] for each in complete(client, n_cmpl=3)] == [0, 1, 2]
    assert [each["index"] for each in complete(client, prompt=["a", "b"], n=2)] == [0, 1, 2, 3]
    last = [each["index"] for each in events(client, prompt=["a", "b"], n=2) if each["stop"]]
    assert sorted(last) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("given", "parts", "is_list"),
    [
        ("text", ("text",), False),
        ([5, 6], ((5, 6),), False),
        ([5, "x", 6], ((5, "x", 6),), False),
        (["x", 5], (("x", 5),), False),
        (["a", "b"], ("a", "b"), True),
        (["a", [5, "b"], {"prompt_string": "c"}], ("a", (5, "b"), "c"), True),
        ({"prompt_string": "c"}, ("c",), False),
        ({"prompt_string": "c", "multimodal_data": []}, ("c",), False),
    ],
)
def test_forms_of_a_prompt(given, parts, is_list):
    assert read_mixed(given) == (parts, is_list)


def test_prompts_with_pictures_beside_others():
    pictured = {"prompt_string": "c<__media__>", "multimodal_data": ["aGk="]}
    body, read = Body({}, {}, Rules(media=frozenset({IMAGE}))), MediaPrompt("c<__media__>", (b"hi",))
    assert read_with_media(pictured, body) == ((read,), False)
    assert read_with_media(["a", pictured, [5]], body) == (("a", read, (5,)), True)
    assert read_with_media(["a", [5]], body) == read_mixed(["a", [5]])
    with pytest.raises(PromptError, match="give a list of pictures and sounds in base64"):
        read_with_media({**pictured, "multimodal_data": [5]}, body)
    with pytest.raises(PromptError, match=r"prompt\[1\] is 7"):
        read_with_media([pictured, 7], body)
    with pytest.raises(ApiError, match="only texts can be read here"):
        read_with_media(pictured, Body({}, {}, Rules()))


def test_prompts_whose_content_parts_have_pictures():
    body = Body({}, {}, Rules(media=frozenset({IMAGE})))
    address = "data:image/png;base64,aGk="
    text, shown = {"type": "text", "text": "c"}, {"type": "image_url", "image_url": {"url": address}}
    wanted = ({"type": "image_url", "image_url": address},)
    [found], is_list = read_with_media({"content": [shown, text]}, body)
    assert re.fullmatch(r"<media-\w{32}>", found.mark)
    assert found.text == f"{found.mark}c"
    assert (found.media, is_list) == (wanted, False)
    [before, found], is_list = read_with_media([{"content": [text]}, {"content": [shown, text]}], body)
    assert (before, found.media, is_list) == ("c", wanted, True)
    for part, error in (
        ({"type": "image_url", "image_url": {"url": "https://x.org/a.png"}}, ApiError),
        ({"type": "input_audio", "input_audio": {}}, ApiError),
        ({"type": "other"}, PromptError),
    ):
        with pytest.raises(error):
            read_with_media({"content": [shown, part]}, body)


def test_a_text_gets_the_tokens_at_its_beginning_and_later_texts_do_not(client):
    inputs = InputProcessor(client.app.state.serving.client)
    bos = inputs.tokenize("", True, False)
    assert mixed_ids("a", inputs) == [*bos, *inputs.tokenize("a", False, False)]
    assert mixed_ids(("a", 9, "b"), inputs) == [*mixed_ids("a", inputs), 9, *inputs.tokenize("b", False, False)]
    assert mixed_ids((9, "a"), inputs) == [9, *inputs.tokenize("a", False, False)]
    assert mixed_ids("<|im_end|>", inputs) == [*bos, 3]  # special tokens in a text are parsed
    assert mixed_ids("", inputs) == bos


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt_string"),
        ({"prompt": {"prompt_string": "x", "multimodal_data": ["aGk="]}}, "multimodal_data"),
        ({"prompt": [[]]}, "prompt[0]"),
        ({"prompt": ["a", None]}, "prompt[1]"),
        ({"prompt": [5, True]}, "prompt"),
        ({"prompt": [5, -1]}, "prompt"),
        ({"prompt": [5, 2**40]}, "prompt"),
        ({"prompt": "x", "n_predict": 1.5}, "n_predict"),
        ({"prompt": "x", "n_predict": -2}, "n_predict"),
        ({"prompt": "x", "temperature": "hot"}, "temperature"),
        ({"prompt": "x", "response_fields": "content"}, "response_fields"),
        ({"prompt": "x", "t_max_predict_ms": "1"}, "t_max_predict_ms"),
        ({"prompt": "x", "lora": [{"id": 7, "scale": 1}]}, "lora"),
        ({"prompt": "x", "post_sampling_probs": 2}, "post_sampling_probs"),
        ({"prompt": {"content": "x"}}, "content"),
        ({"prompt": {"content": [{"type": "image_url"}]}}, "image_url"),
        ({"prompt": "x", "n_predict": 0, "n": 2}, "n_predict"),
        ({"prompt": "x " * 1000}, "n_ctx"),
    ],
)
def test_other_bodies_are_refused_by_name(client, body, word):
    assert word in refused(client, **body)


def test_ends_that_never_come_are_among_the_biases(client):
    assert complete(client)["generation_settings"]["logit_bias"] == []
    biases = complete(client, ignore_eos=True, logit_bias=[[7, 1]])["generation_settings"]["logit_bias"]
    ends = client.app.state.serving.model.eog_ids
    assert biases == [{"token": 7, "bias": 1.0}, *({"token": end, "bias": None} for end in ends)]
    assert ends


def test_lora_of_a_request(client):
    found = complete(client, lora=[{"id": 0, "scale": 0.5}])
    assert fake_client(client).requests[-1].adapters == (("poet", 0.5),)
    assert found["generation_settings"]["lora"] == [{"id": 0, "scale": 0.5}]


def test_a_model_without_marks_cannot_fill(client):
    answer = client.post("/infill", json={"input_prefix": "a", "input_suffix": "b"})
    assert answer.status_code == 501
    error = answer.json()["error"]
    assert error["type"] == "not_supported_error"
    assert "fim_pre, fim_suf, fim_mid" in error["message"]


def test_a_gap_is_filled_by_a_model_with_marks():
    with ready_client("filled", n_ctx=128) as client:
        model = client.app.state.serving.model
        model.special_ids = {**model.special_ids, "fim_pre": 4, "fim_suf": 5, "fim_mid": 6}  # bytes of the fake model
        body = {"input_prefix": "def f():", "input_suffix": "return 1", "prompt": "x", "n_predict": 4}
        found = client.post("/infill", json=body).json()
        assert found["content"] == "filled"
        assert found["prompt"] == "<|bos|>\0def f():x\x01return 1\x02"
        assert "input_suffix" in refused(client, "/infill", input_prefix="a")


class Marked:
    """An InputProcessor for a vocabulary of bytes that has the special tokens of infilling."""

    n_ctx = 64

    def __init__(self, **marks):
        self.special_ids = {"fim_pre": 1001, "fim_suf": 1002, "fim_mid": 1003, **marks}

    def tokenize(self, text, add_special, parse_special):
        return ([1000] if add_special else []) + list(text.encode())


def infill(inputs, n_predict=16, **body):
    found = read_infill({"input_prefix": "", "input_suffix": "", "n_predict": n_predict, **body})
    assert isinstance(found, InfillBody)
    [ids] = found.token_prompts(inputs)
    return [chr(each) if each < 1000 else each for each in ids]


def test_other_files_stand_before_it():
    files = [{"filename": "f", "text": "T"}, {"text": "U"}]
    found = infill(Marked(fim_rep=1004, fim_sep=1005), input_extra=files, input_prefix="a", input_suffix="z")
    text = "".join(each if isinstance(each, str) else f"<{each}>" for each in found)
    assert text == "<1004>myproject\n<1005>f\nT<1005>tmp\nU<1005>filename\n<1000><1001>a<1002>z<1003>"
    found = infill(Marked(), input_extra=[{"text": "U"}], input_prefix="a", input_suffix="z")
    assert "".join(each for each in found if isinstance(each, str)).endswith("---\n\nUaz")


def test_what_does_not_fit_is_left_out_at_the_far_ends():
    inputs = Marked()
    found = infill(inputs, input_prefix="p" * 100 + "P", input_suffix="S" + "s" * 100, input_extra=[{"text": "e" * 99}])
    assert len(found) == inputs.n_ctx - 16
    assert found[found.index(1002) - 1] == "P"
    assert found[found.index(1002) + 1] == "S"
    assert "e" not in found
    found = infill(inputs, input_prefix="p", input_suffix="s", input_extra=[{"text": "e" * 99 + "E"}])
    assert len(found) == inputs.n_ctx - 16
    assert found[found.index(1000) - 1] == "E"


def test_what_stands_before_a_gap_is_counted_and_has_the_only_bos():
    inputs, gap, before = Marked(fim_rep=1004, fim_sep=1005), Gap("p" * 100, "s" * 100), [1000, 1, 2]
    found = infill_ids(gap, inputs, 16, before)
    assert (len(found), found[:3], found.count(1000)) == (inputs.n_ctx - 16, before, 1)
    with pytest.raises(PromptError, match="prompt has 60 tokens"):
        infill_ids(gap, inputs, 16, [1000] * 60)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({"input_prefix": "a"}, "input_suffix"),
        ({"input_suffix": "a"}, "input_prefix"),
        ({"input_prefix": 5, "input_suffix": "b"}, "input_prefix"),
        ({"input_prefix": "a", "input_suffix": "b", "prompt": [5]}, "prompt"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": {}}, "input_extra"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": "ok"}]}, "input_extra[0]"),
        ({"input_prefix": "a", "input_suffix": "b", "input_extra": [{"filename": 1, "text": "x"}]}, "input_extra[0]"),
    ],
)
def test_other_gaps_are_refused(body, word):
    with pytest.raises(ApiError) as error:
        read_infill(body)
    assert error.value.status == 400
    assert word in error.value.message


def piece(text, place=0, finished=None):
    return SequenceOutput("r", (1,), text, finished, prompt_index=place)


def test_the_time_of_an_output_is_over_once_it_has_a_line():
    now = [0.0]
    limit = TimeLimit(100, clock=lambda: now[0])
    assert limit.look([piece("a"), piece("b\n", 1)]) == []
    now[0] = 0.2
    assert limit.look([piece("c")]) == []  # no whole line yet
    assert limit.look([piece("c", 1)]) == [1]
    assert limit.look([piece("d", 1)]) == []  # each output is reported only once
    assert limit.look([piece("\n")]) == [0]
    assert limit.over == {0, 1}
    assert TimeLimit(0).look([piece("\n")]) == []


def test_timings_count_steps():
    def of(times, n_cached, n_output):
        return timings(RequestOutput("r", None, (0,) * 10, (), timings=times, num_cached_tokens=n_cached), n_output)

    found = of(Timings(0.5, 1.0, 3.0, (1.0, 2.0, 3.0)), 4, 3)
    assert (found["cache_n"], found["prompt_n"], found["prompt_ms"]) == (4, 6, 500.0)
    assert (found["predicted_ms"], found["predicted_per_token_ms"]) == (2000.0, 1000.0)
    assert found["predicted_per_second"] == 1.0
    one = of(Timings(0.0, 1.0, 1.0, (1.0,)), 0, 1)
    assert (one["predicted_per_second"], one["predicted_per_token_ms"]) == (0.0, 0.0)
    assert of(Timings(), 0, 0)["prompt_per_second"] == 0.0


def test_a_context_that_is_used_up_is_told():
    context = Context(read_llama_completion({"prompt": "x"}), FakeModel(Path("m")), "m", 2048)
    each = CompletionOutput(0, "t", (5,), FinishReason.LENGTH)
    output = RequestOutput("r", None, (0, 9), (each,))
    assert context.whole(output, each, 0, stream=False, cut=False)["truncated"] is True
    assert context.body.params == SamplingParams(max_tokens=None)


def test_a_context_that_has_shifted_is_told():
    body = read_llama_completion({"prompt": "x", "overflow": "shift", "n_predict": 40})
    context = Context(body, FakeModel(Path("m")), "m", 8)

    def truncated(n_output):
        each = CompletionOutput(0, "t", (5,) * n_output, FinishReason.LENGTH)
        output = RequestOutput("r", None, (0, 9), (each,))
        return context.whole(output, each, 0, stream=False, cut=False)["truncated"]

    assert [truncated(n) for n in (1, 7, 8, 40)] == [False, False, True, True]


def embedded(client, path="/embedding", **body):
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_in_llama_servers_shape(client):
    [one] = embedded(client, content="one two")
    assert one["index"] == 0
    [vector] = one["embedding"]
    assert np.linalg.norm(vector) == pytest.approx(1.0, abs=1e-6)
    assert [each["index"] for each in embedded(client, "/embeddings", input=["a", [5, "b"]])] == [0, 1]
    [raw] = embedded(client, content="one two", embd_normalize=-1)[0]["embedding"]
    [largest] = embedded(client, content="one two", embd_normalize=0)[0]["embedding"]
    assert max(map(abs, largest)) == pytest.approx(32760)
    assert np.array(raw) / np.linalg.norm(raw) == pytest.approx(np.array(vector), abs=1e-6)


def test_norms():
    vector = np.array([3.0, -4.0], np.float32)
    assert normalized(vector, -1) is vector
    assert normalized(vector, 1) == pytest.approx([3 / 7, -4 / 7])
    assert normalized(vector, 2) == pytest.approx([0.6, -0.8])
    assert np.sum(np.abs(normalized(vector, 3)) ** 3) == pytest.approx(1.0)
    assert normalized(np.zeros(2, np.float32), 2).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    "body", [{}, {"content": []}, {"content": "a", "input": "b"}, {"content": "a", "embd_normalize": 99}]
)
def test_other_texts_are_refused(client, body):
    refused(client, "/embedding", **body)
