"""Bodies that editors' plugins and chat pages send: names of fields and kinds of values, but not their texts."""

import re

import pytest

from llamabatch.cli.serve_flags import ROWS
from llamabatch.config.other_servers import SETTINGS
from llamabatch.server.http.errors import ApiError
from llamabatch.server.llama_server.completion_body import read_infill
from llamabatch.server.request.chat_body import read_chat
from tests.unit.server.serving_clients import ready_client

HELLO = [{"role": "system", "content": "s"}, {"role": "user", "content": "one"}]

SILLY_TAVERN = {
    **{"prompt": "one two three", "model": "m", "max_new_tokens": 9, "max_tokens": 9, "temperature": 0.7, "top_p": 0.5},
    **{"typical_p": 1, "typical": 1, "sampler_seed": -1, "min_p": 0, "repetition_penalty": 1.1, "skew": 0, "top_k": 40},
    **{"frequency_penalty": 0, "presence_penalty": 0, "min_tokens": 0, "add_bos_token": True, "smoothing_factor": 0},
    **{"smoothing_curve": 1, "dry_allowed_length": 2, "dry_multiplier": 0.8, "dry_base": 1.75, "dry_penalty_last_n": 0},
    **{"dry_sequence_breakers": '["\\n", ":"]', "max_tokens_second": 0, "stopping_strings": ["x:"], "stop": ["x:", ""]},
    **{"samplers": ["top_k", "tfs_z", "typical_p", "top_p", "min_p", "temperature"], "truncation_length": 4096},
    **{"ban_eos_token": False, "skip_special_tokens": True, "top_a": 0, "tfs": 1, "mirostat_mode": 0},
    **{"mirostat_tau": 5, "mirostat_eta": 0.1, "custom_token_bans": "", "banned_strings": [], "api_type": "llamacpp"},
    **{"api_server": "h", "legacy_api": False, "xtc_threshold": 0.1, "xtc_probability": 0, "rep_pen": 1.1, "seed": -1},
    "rep_pen_range": 64,
    **{"repetition_penalty_range": 64, "guidance_scale": 1, "negative_prompt": "", "grammar_string": "", "tfs_z": 1},
    **{"repeat_penalty": 1.1, "repeat_last_n": 64, "n_predict": 9, "num_predict": 9, "num_ctx": 4096, "mirostat": 0},
    **{"ignore_eos": False, "rep_pen_slope": 1, "logit_bias": [[5, False]], "grammar": "", "cache_prompt": True},
    "stream": True,
}
LLAMA_VIM = {
    **{"id_slot": 0, "input_prefix": "def f(", "input_suffix": "):", "input_extra": [{"text": "x", "filename": "a"}]},
    **{"prompt": "a", "n_predict": 8, "stop": [], "n_indent": 4, "top_k": 40, "top_p": 0.9, "stream": False},
    **{"samplers": ["top_k", "top_p", "infill"], "cache_prompt": True, "t_max_prompt_ms": 500, "t_max_predict_ms": 9},
    "response_fields": ["content", "timings/prompt_n", "truncated", "tokens_cached"],
}
PROGRAMS = {
    "SillyTavern": ("/completion", SILLY_TAVERN, {"samplers:tfs_z", "top_a", "rep_pen_range", "num_ctx"}),
    "llama.vim": ("/infill", LLAMA_VIM, {"id_slot", "n_indent", "t_max_prompt_ms"}),
    "llama.vim, first": (
        "/infill",
        LLAMA_VIM
        | {"n_predict": 0, "samplers": [], "t_max_predict_ms": 1, "response_fields": [""], "temperature": 0.0},
        {"id_slot", "n_indent", "t_max_prompt_ms"},
    ),
    "llama.vim, instructions": (
        "/v1/chat/completions",
        {
            **{"id_slot": 3, "messages": HELLO, "samplers": [], "n_predict": 0, "stream": False, "cache_prompt": True},
            "response_fields": [""],
        },
        {"id_slot", "response_fields"},
    ),
    "llama.vscode": (
        "/infill",
        {key: value for key, value in LLAMA_VIM.items() if key != "response_fields"}
        | {"n_cmpl": 2, "lora": [{"id": 0, "scale": 0.5}], "model": "m"},
        {"id_slot", "n_indent", "t_max_prompt_ms"},
    ),
    "llama.vscode, edit": (
        "/v1/chat/completions",
        {"messages": HELLO, "stream": False, "cache_prompt": True, "temperature": 0.8, "top_p": 0.95, "model": "m"},
        set(),
    ),
    "Open WebUI": (
        "/v1/chat/completions",
        {
            **{"stream": True, "model": "m", "messages": HELLO, "temperature": 0.8, "top_p": 0.9, "max_tokens": 9},
            **{"frequency_penalty": 0.1, "seed": 5, "stop": ["x"], "stream_options": {"include_usage": True}},
            "metadata": {"chat_id": "c"},
        },
        set(),
    ),
}


@pytest.fixture(scope="module")
def client():
    with ready_client("one two three", adapters={"poet": "p.gguf"}, n_ctx=256) as client:
        yield client


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_body_of_a_program_is_answered(client, name):
    path, body, ignored = PROGRAMS[name]
    answer = client.post(path, json=body)
    if path == "/infill" and answer.status_code == 501:  # the fake model has no special tokens
        assert ignored <= set(read_infill(body).ignored)
        return
    assert answer.status_code == 200, answer.text
    assert ignored <= set(answer.headers.get("X-Llamabatch-Ignored", "").split(", "))


def test_nothing_is_generated_where_a_program_warms_up(client):
    path, body, _ = PROGRAMS["llama.vim, instructions"]
    [choice] = client.post(path, json=body).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "length")
    streamed = client.post(path, json=body | {"stream": True}).text
    assert "one" not in streamed
    assert '"finish_reason":"length"' in streamed


@pytest.mark.parametrize("name", SETTINGS)
def test_the_flag_and_the_field_of_one_thing_have_one_policy(name):
    """Rows of flags that name a field have the field's policy. Here both are compared from outside."""
    setting = SETTINGS[name]
    rows = [row for row in ROWS if setting.advice in (row.note, row.cure)]
    assert all((row.note != "") == setting.optional for row in rows)
    body = {"messages": HELLO, name: "other"}
    if setting.optional:
        assert read_chat(body).ignored == (name,)
    else:
        with pytest.raises(ApiError, match=re.escape(setting.advice)):
            read_chat(body)


def test_an_empty_prompt_is_the_beginning_of_a_text(client):
    assert client.post("/completion", json={"prompt": "", "n_predict": 2}).status_code == 200
