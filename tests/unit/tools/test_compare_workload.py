"""Prompts from files: what is read, and the error for each kind of bad file."""

import json

import pytest

from llamabatch.errors import ConfigError, PromptError, SetupError
from llamabatch.tools import workload
from llamabatch.tools.workload import Line, load, parse

CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant"


class FakeModel:
    """A model whose tokens are bytes. BOS is 1."""

    n_vocab = 256
    chat_template: str | None = CHATML

    def tokenize(self, text, *, add_special=True, parse_special=False):
        assert parse_special == text.startswith("<|im_start|>"), "only templates may name special tokens"
        return [1] * add_special + list(text.encode())

    def special_token(self, name):
        return {"bos": "<s>", "eos": "</s>"}[name]


def write(tmp_path, text, name="prompts.txt"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_has_one_prompt_a_line(tmp_path):
    assert parse("f", "one\n\n  \ntwo words\n") == [Line(1, "one"), Line(4, "two words")]
    path = write(tmp_path, "ab\ncd\n")
    loaded = load(path, FakeModel(), 512)
    assert loaded.prompts == ((1, 97, 98), (1, 99, 100))
    assert (loaded.source, loaded.n_prompt_tokens) == ("prompts.txt", 6)


def test_jsonl_holds_prompts_and_conversations(tmp_path):
    conversation = [{"role": "user", "content": "hi"}]
    text = json.dumps({"prompt": "ab"}) + "\n" + json.dumps({"messages": conversation, "id": 7})
    assert parse("f", text) == [Line(1, "ab"), Line(2, conversation)]
    loaded = load(write(tmp_path, text, "prompts"), FakeModel(), 512)
    assert loaded.prompts[0] == (1, 97, 98)
    assert bytes(loaded.prompts[1][1:]).decode() == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant"


def test_token_ids_stay_as_they_are(tmp_path):
    path = write(tmp_path, '{"prompt": [5, 6, 7]}\n{"prompt": "a"}\n', "prompts.jsonl")
    assert load(path, FakeModel(), 512).prompts == ((5, 6, 7), (1, 97))
    path.write_text('{"prompt": [5, 600]}\n')
    with pytest.raises(PromptError, match="line 1: token id 600 is outside the vocabulary"):
        load(path, FakeModel(), 512)


def test_a_template_that_writes_bos_gets_no_second_one():
    class Model(FakeModel):
        chat_template = "<s>{{ messages[0].content }}"

        def tokenize(self, text, *, add_special=True, parse_special=False):
            assert (text, add_special, parse_special) == ("<s>hi", False, True)
            return [1, 2]

    assert workload._token_ids([{"role": "user", "content": "hi"}], Model(), 512) == (1, 2)


def test_the_ending_txt_means_text_even_if_it_looks_like_json(tmp_path):
    assert len(load(write(tmp_path, '{"prompt": "a"}\nplain'), FakeModel(), 512).prompts) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ("\n \n", "holds no prompt"),
        ('{"prompt": "a"}\n{"prompt": ', "line 2: this is not JSON"),
        ('{"prompt": "a"}\n\n{"text": "b"}', 'line 3: write {"prompt": TEXT or TOKEN IDS} or {"messages"'),
        ('{"prompt": "a", "messages": []}', "one of the two"),
        ("[1, 2]", "line 1: write"),
        ('{"prompt": 5}', "line 1: prompt is 5; give a text or a list of token ids"),
        ('{"prompt": ""}', "line 1: the prompt is empty"),
        ('{"messages": []}', "line 1: the conversation is empty"),
        ('{"messages": "hi"}', "line 1: messages is 'hi'; give a list"),
        ('{"messages": [{"role": "user"}]}', "line 1: messages[0] has no content; a message is"),
    ],
)
def test_bad_jsonl_names_the_line(tmp_path, text, message):
    path = write(tmp_path, text, "prompts.jsonl")
    with pytest.raises(PromptError) as refused:
        load(path, FakeModel(), 512)
    assert message in str(refused.value)
    assert str(refused.value).startswith(str(path))


def test_a_prompt_that_does_not_fit_names_its_line(tmp_path):
    with pytest.raises(PromptError, match=r"line 2: the prompt has 65 tokens; n_ctx allows 1 to 64"):
        load(write(tmp_path, f"a\n{'b' * 64}"), FakeModel(), 64)


def test_conversations_need_a_chat_template(tmp_path):
    model = FakeModel()
    model.chat_template = None
    with pytest.raises(ConfigError, match=r"line 1: this model has no chat template"):
        load(write(tmp_path, '{"messages": [{"role": "user", "content": "a"}]}', "p.jsonl"), model, 64)


def test_bundled_questions_are_continued_by_a_model_without_a_template(monkeypatch):
    model = FakeModel()
    model.chat_template = None
    monkeypatch.setattr(workload, "_read", lambda path: '{"messages": [{"role": "user", "content": "ab"}]}')
    assert load(None, model, 64) == workload.Workload("bundled", ((1, 97, 98),))


def test_missing_bundled_prompts_are_an_installation_error(monkeypatch, tmp_path):
    monkeypatch.setattr(workload.resources, "files", lambda package: tmp_path)
    with pytest.raises(SetupError, match="name a file with --prompts"):
        load(None, FakeModel(), 64)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(PromptError, match="No such file or directory"):
        load(tmp_path / "missing.txt", FakeModel(), 64)
    with pytest.raises(PromptError, match="is a directory"):
        load(tmp_path, FakeModel(), 64)
    latin = tmp_path / "latin.txt"
    latin.write_bytes("first\nça".encode("latin-1"))
    with pytest.raises(PromptError, match="line 2: this is not UTF-8 text"):
        load(latin, FakeModel(), 64)


def test_a_byte_order_mark_is_not_part_of_the_prompt(tmp_path):
    path = tmp_path / "bom.txt"
    path.write_bytes(b"\xef\xbb\xbfab")
    assert load(path, FakeModel(), 64).prompts == ((1, 97, 98),)
