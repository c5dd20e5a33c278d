"""Prompts with sounds: a prompt alone equals the result of libmtmd's own helper, and a prompt in a batch equals it
alone."""

import base64
import contextlib
import io
import json
import subprocess
import sys
import wave
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

from llamabatch import LLM, columns
from llamabatch.gguf.resolve import resolve
from llamabatch.native_build.tools import SetupFailure
from llamabatch.server import app
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from tests.archs import models
from tests.model.test_media import GREEDY, N_TOKENS, NEAR, TEMPLATE, alone, by_the_helper
from tests.unit.server.test_application import ready
from tests.waiting import PATIENCE_S

RATE = 16_000
SHAPE = ProjectorShape("ultravox", n_merge=20)  # 75 tokens for each half of a minute
VOXTRAL = replace(SHAPE, kind="voxtral", n_merge=10)  # as many: the encoder halves the steps in time once more
QWEN = ProjectorShape("qwen2a")  # 750 tokens


def sound(seed: int, seconds: float = 1.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * RATE)).astype(np.float32)


def wav(samples: np.ndarray) -> bytes:
    data = io.BytesIO()
    with wave.open(data, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        file.writeframes((samples * 32767).astype(np.int16).tobytes())
    return data.getvalue()


def conversation(*sounds: np.ndarray, words: int = 1) -> list[dict]:
    parts = []
    for each in sounds:
        parts += [{"type": "text", "text": "What is said? " * words}, {"type": "audio", "audio": (each, RATE)}]
    return [{"role": "user", "content": parts}]


CONVERSATIONS = [
    conversation(sound(0)),
    conversation(sound(1, 0.1)),
    conversation(sound(2), sound(3, 2.5)),
    conversation(sound(0)),  # the same sound as in another conversation
    conversation(sound(4, 31), words=3),  # needs two passes
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sounds")
    found = {"tiny": "tiny"}
    with contextlib.suppress(SetupFailure):
        found |= {path.stem.rpartition("-")[0]: str(path) for path in models.write(folder, ["qwen2vl"])}
    for model, width in (("tiny", 192), ("qwen2vl", 256)):
        for shape, name in ((SHAPE, f"mmproj-{model}"), (VOXTRAL, f"voxtral-{model}"), (QWEN, f"qwen-{model}")):
            found[name] = str(folder / f"{name}.gguf")
            write_projector(folder / f"{name}.gguf", shape, width, seed=1)
    return found


@pytest.mark.parametrize(
    ("model", "projector"),
    [
        pytest.param("tiny", "mmproj-tiny", marks=pytest.mark.guard),
        ("tiny", "voxtral-tiny"),
        ("tiny", "qwen-tiny"),
        ("qwen2vl", "mmproj-qwen2vl"),  # M-RoPE
    ],
)
def test_as_the_helper_of_libmtmd_alone_and_in_company(files, model, projector):
    if model not in files:
        pytest.skip("the program that writes this model cannot be compiled")
    n_ctx = 2048 if projector == "qwen-tiny" else 256
    with LLM(files[model], mmproj=files[projector], n_slots=4, n_ctx=n_ctx, profile=False) as llm:
        wanted = alone(llm, CONVERSATIONS)
        for given, output in zip(CONVERSATIONS, wanted, strict=True):
            sounds = [part["audio"][0] for part in given[0]["content"] if part["type"] == "audio"]
            assert sum(token_id < 0 for token_id in output.prompt_token_ids) >= 75 * len(sounds)
            tokens, gaps = by_the_helper(llm, output.prompt, sounds)
            same = list(output.outputs[0].token_ids)
            at = next((at for at, pair in enumerate(zip(same, tokens, strict=True)) if pair[0] != pair[1]), None)
            assert at is None or gaps[at] < NEAR, (same, tokens, gaps)
        for turn in ("cold", "kept"):
            for got, want in zip(llm.chat(CONVERSATIONS, GREEDY, chat_template=TEMPLATE), wanted, strict=True):
                assert got.outputs[0].token_ids == want.outputs[0].token_ids, turn
        assert "<sound>" in wanted[0].prompt


def test_a_table_of_recordings_and_a_server(files, tmp_path, monkeypatch):
    folder = tmp_path / "my sounds"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(resolve("tiny").read_bytes())
    (folder / "mmproj-tiny.gguf").write_bytes(Path(files["mmproj-tiny"]).read_bytes())
    for number in range(2):
        (folder / f"{number}.wav").write_bytes(wav(sound(number)))
    (folder / "calls.csv").write_text("file\n0.wav\nmissing.wav\n1.wav\n")
    monkeypatch.chdir(tmp_path)
    options = ["-m", "my sounds/tiny.gguf", "-t", "0", "-n", str(N_TOKENS), "--audio-column", "file"]
    command = ["run", "my sounds/calls.csv", "out.jsonl", *options, "--prompt", "What is said?"]
    ended = subprocess.run(
        [sys.executable, "-m", "llamabatch", *command], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert ended.returncode == 1, ended.stderr
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert "missing.wav cannot be read: No such file" in rows[1]["error"]

    frame = {"call": [str(folder / "0.wav"), {"bytes": (folder / "1.wav").read_bytes(), "path": "1.wav"}]}
    out = columns.map(
        *(frame, "What is said?"), audio="call", model="my sounds/tiny.gguf", mmproj="auto",
        params={"temperature": 0, "max_tokens": N_TOKENS},
    )  # fmt: skip
    assert out["generated_text"] == [rows[0]["text"], rows[2]["text"]]

    encoded = base64.b64encode((folder / "0.wav").read_bytes()).decode()
    heard = {"type": "input_audio", "input_audio": {"data": encoded, "format": "wav"}}
    asked = {"max_tokens": N_TOKENS, "temperature": 0}
    with TestClient(app("my sounds/tiny.gguf", mmproj="auto")) as client:
        ready(client)
        assert client.get("/props").json()["modalities"] == {"vision": False, "audio": True, "video": False}
        content = [heard, {"type": "text", "text": "What is said?"}]
        answer = client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **asked})
        assert answer.json()["choices"][0]["message"]["content"] == rows[0]["text"]
        for part in (
            {"type": "audio", "audio": str(folder / "0.wav")},
            {"type": "audio_url", "audio_url": {"url": str(folder / "0.wav")}},
            {"type": "image_url", "image_url": "data:image/png;base64,AAAA"},
            {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        ):
            body = {"messages": [{"role": "user", "content": [part]}], **asked}
            assert client.post("/v1/chat/completions", json=body).status_code == 400, part
        sent = {"file": ("0.wav", (folder / "0.wav").read_bytes(), "audio/wav")}
        path, form = "/v1/audio/transcriptions", {"max_tokens": str(N_TOKENS), "temperature": "0"}
        whole = client.post(path, files=sent, data=form).json()
        assert whole["usage"]["input_token_details"]["audio_tokens"] == 75
        text = client.post("/audio/transcriptions", files=sent, data={**form, "response_format": "text"})
        assert (text.text, text.headers["content-type"]) == (whole["text"] + "\n", "text/plain; charset=utf-8")
        events = client.post(path, files=sent, data={**form, "stream": "true"}).text.split("\n\n")
        found = [json.loads(event.removeprefix("data: ")) for event in events if event.startswith("data: {")]
        assert "".join(event["delta"] for event in found[:-1]).strip() == whole["text"]
        assert found[-1] == {"type": "transcript.text.done", **whole}
        for wrong in ({"response_format": "srt"}, {"temperature": "warm"}, {"timestamp_granularities[]": "word"}):
            assert client.post(path, files=sent, data=form | wrong).status_code == 400, wrong
        assert client.post(path, data=form).status_code in (400, 415)
        prompt = {"prompt_string": "What is said? <__media__>\n", "multimodal_data": [encoded]}
        assert client.post("/completion", json={"prompt": prompt, "n_predict": 2}).json()["tokens_evaluated"] > 75
