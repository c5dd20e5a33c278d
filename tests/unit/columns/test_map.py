"""map: a table in one call, and the file from which a second call goes on; with a FakeLLM."""

import json

import pytest

from llamabatch import ConfigError, EngineClosedError, InputError, OutputError
from llamabatch.columns import map as map_columns
from llamabatch.testing import FakeLLM

FRAME = {"review": ["a", "b", None, "c"], "key": [1, 2, 3, 4]}
LINES = "answers.jsonl"


def ask(llm, frame=None, prompt="Rate: {{ review }}", **given):
    return map_columns(frame or FRAME, prompt, model=llm, **given)


def asked(llm):
    return [request.text for request in llm.requests]


def lines_of(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_path_holds_each_row_once_and_gives_the_same_table(tmp_path):
    path = tmp_path / LINES
    made = ask(FakeLLM(), path=path, id="key")
    assert made == ask(FakeLLM(), id="key")
    lines = lines_of(path)
    assert [(line["row"], line["id"], line["text"]) for line in lines] == [
        *((0, 1, "Rate: a"), (1, 2, "Rate: b"), (2, 3, None), (3, 4, "Rate: c"))
    ]
    assert "is null" in lines[2]["error"]


def test_a_second_call_computes_nothing_and_may_name_other_outputs(tmp_path):
    path = tmp_path / LINES
    first = ask(FakeLLM(), path=path)
    again = FakeLLM()
    assert ask(again, path=path) == first
    assert ask(again, path=path, output={"n_tokens": "n"})["n"] == [4, 4, None, 4]
    assert asked(again) == []


def test_a_call_that_was_interrupted_goes_on(tmp_path):
    path = tmp_path / LINES
    calls = []

    def interrupts(done, total):
        calls.append((done, total))
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(FakeLLM(), path=path, progress=interrupts)
    llm, calls = FakeLLM(), []
    made = ask(llm, path=path, progress=lambda done, total: calls.append((done, total)))
    assert made["generated_text"] == ["Rate: a", "Rate: b", None, "Rate: c"]
    assert 0 < len(asked(llm)) < 3
    assert calls[0] == (4 - len(asked(llm)), 4)
    assert calls[-1] == (4, 4)


def test_an_engine_that_dies_leaves_the_rows_that_had_ended(tmp_path):
    class Dying(FakeLLM):
        def stats(self):
            raise EngineClosedError("it died")

    path = tmp_path / LINES
    answers = {"Rate: a": "good", "Rate: b": RuntimeError("died"), "Rate: c": "good"}
    with pytest.raises(EngineClosedError, match="it died"):
        ask(Dying(answers=answers), path=path)
    llm = FakeLLM(answers="better")
    assert ask(llm, path=path)["generated_text"] == ["good", "better", None, "good"]
    assert asked(llm) == ["Rate: b"]


def test_errors_are_kept_and_tried_again_on_request(tmp_path):
    path = tmp_path / LINES
    ask(FakeLLM(answers={"Rate: a": "x", "Rate: b": RuntimeError("no"), "Rate: c": "z"}), path=path)
    llm = FakeLLM(answers="y")
    assert ask(llm, path=path)["generated_text"] == ["x", None, None, "z"]
    assert ask(llm, path=path, retry_errors=True)["generated_text"] == ["x", "y", None, "z"]
    assert asked(llm) == ["Rate: b"]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": "Grade: {{ review }}"},
        {"frame": {"review": ["a", "b", None, "d"], "key": [1, 2, 3, 4]}},
        {"frame": {"review": ["a", "b"], "key": [1, 2]}},
        {"params": {"temperature": 0}},
        {"params": {"seed": 1}},
        {"system": "Be calm."},
        {"chat": False},
        {"schema": {"properties": {"label": {"type": "string"}}}},
    ],
)
@pytest.mark.parametrize("ids", [{}, {"id": "key"}], ids=["", "ids"])
def test_the_path_of_other_rows_is_refused(tmp_path, change, ids):
    path = tmp_path / LINES
    ask(FakeLLM(), path=path, **ids)
    before = path.read_bytes()
    llm = FakeLLM()
    with pytest.raises(ConfigError, match=r"was begun with other settings.*force=True"):
        ask(llm, path=path, **ids, **change)
    assert path.read_bytes() == before
    assert llm.requests == []


def test_a_damaged_path_is_refused(tmp_path):
    path = tmp_path / LINES
    ask(FakeLLM(), path=path)
    path.write_bytes(path.read_bytes().replace(b"Rate: b", b"Rate: x"))
    with pytest.raises((ConfigError, OutputError)):
        ask(FakeLLM(), path=path)
    llm = FakeLLM()
    assert ask(llm, path=path, force=True)["generated_text"][1] in ("Rate: b", "Rate: x")


def test_an_empty_frame_with_a_path(tmp_path):
    assert ask(FakeLLM(), {"review": []}, path=tmp_path / LINES) == {"review": [], "generated_text": [], "error": []}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"path": "out.parquet"}, "its lines are JSON: end it with .jsonl or .ndjson"),
        ({"path": ""}, "path is ''"),
        ({"path": 5}, "path is 5"),
        ({"force": True}, "give path, too"),
        ({"retry_errors": True}, "give path, too"),
        ({"path": LINES, "force": 1}, "force is 1"),
        ({"path": LINES, "params": {"logits_processors": [lambda ids, logits: logits]}}, "logits_processors"),
        ({"path": "nowhere/out.jsonl"}, "there is no directory"),
    ],
)
def test_wrong_arguments(given, message):
    with pytest.raises(InputError, match=message):
        ask(FakeLLM(), **given)
