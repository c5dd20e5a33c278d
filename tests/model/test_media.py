"""Prompts with pictures: a prompt alone equals the result of libmtmd's own helper, and a prompt in a batch equals it
alone."""

import base64
import ctypes
import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader
from PIL import Image
from starlette.testclient import TestClient

from llamabatch import LLM, SamplingParams, columns
from llamabatch.compat.vllm import LLM as VllmLLM
from llamabatch.compat.vllm import SamplingParams as VllmSamplingParams
from llamabatch.engine import prefix_file
from llamabatch.errors import EngineClosedError, InputError, ModelFileError, PromptError
from llamabatch.gguf.resolve import resolve
from llamabatch.llama import library
from llamabatch.llama import projector as projector_module
from llamabatch.llama.projector import Projector
from llamabatch.media.pictures import read_picture
from llamabatch.native_build.tools import SetupFailure
from llamabatch.server import app
from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from tests.archs import models
from tests.model.architectures import N_EMBD, write_with_words
from tests.unit.server.test_application import ready
from tests.waiting import PATIENCE_S

N_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=N_TOKENS, logprobs=2, ignore_eos=True)
TEMPLATE = "{% for message in messages %}<u>{{ message.content }}</u>{% endfor %}<a>"
# The largest gap of the two best logits where texts may part, like MAX_GAP in conftest.py. It is larger with AMX,
# because libmtmd's helper does not mark rows as those of a prompt.
NEAR = 0.25 if "prompts" in library.repack_features() else 0.15
# family -> text model, projector, number of patches that are merged in each direction
FAMILIES = {
    "gemma3": ("tiny", "gemma3", 2),  # all cells of a picture attend to one another
    "llava": ("tiny", "mlp", 1),
    "qwen2vl": ("qwen2vl", "qwen2vl_merger", 2),  # M-RoPE
    "qwen25vl": ("qwen2vl", "qwen2.5vl_merger", 2),  # and windows in the encoder
    "qwen3vl": ("qwen3vl", "qwen3vl_merger", 2),  # and further values for the first layers
    "qwen35": ("qwen35", "qwen2vl_merger", 2),  # M-RoPE, and recurrent state
    "pixtral": ("tiny", "pixtral", 1),  # a token ends each row of patches
    "lfm2": ("lfm2", "lfm2", 2),  # any size; recurrent state
    "idefics3": ("llama", "idefics3", 2),  # tiles, each behind words of its own
    "window": ("gemma3", "gemma3", 2),  # a sliding window
}
WORDS = {  # text models whose vocabulary has words of the encoder
    "llama": ("<fake_token_around_image>", "<global-img>"),
    "lfm2": ("<|img_thumbnail|>",),
}
# n_embd of the text model; 256 for the models that llama.cpp's program writes
WIDTHS = {"tiny": 192} | dict.fromkeys(WORDS, N_EMBD)


def picture(seed: int, width: int = 96, height: int = 64) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def conversation(*pictures: np.ndarray, words: int = 1) -> list[dict]:
    parts = []
    for each in pictures:
        parts += [{"type": "text", "text": "What is this? " * words}, {"type": "image", "image": each}]
    return [{"role": "user", "content": parts}]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of text models and projectors, by name."""
    folder = tmp_path_factory.mktemp("media")
    found = {"tiny": "tiny"}
    try:
        wanted = sorted({model for model, _, _ in FAMILIES.values()} - {"tiny", *WORDS})
        found |= {path.stem.rpartition("-")[0]: str(path) for path in models.write(folder, wanted)}
        number = GGUFReader(found["qwen3vl"], "r+").fields["qwen3vl.n_deepstack_layers"]
        number.parts[number.data[0]][0] = 1
    except SetupFailure:
        pass
    for kind, words in WORDS.items():
        found[kind] = str(write_with_words(kind, folder / f"{kind}.gguf", words))
    for model, kind, merge in FAMILIES.values():
        path = folder / f"{kind}-{model}.gguf"
        write_projector(path, ProjectorShape(kind, n_merge=merge), WIDTHS.get(model, 256), seed=1)
        found[path.stem] = str(path)
    return found


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, files):
    model, kind, _ = FAMILIES[request.param]
    if model not in files:
        pytest.skip("the program that writes this model cannot be compiled")
    n_ctx = 512 if model in WIDTHS else 256  # the other models were made for 256
    with LLM(files[model], mmproj=files[f"{kind}-{model}"], n_slots=4, n_ctx=n_ctx, profile=False) as llm:
        yield llm


CONVERSATIONS = [
    conversation(picture(0)),
    conversation(picture(1, 64, 128)),
    conversation(picture(2), picture(3, 40, 200)),
    conversation(picture(0)),  # the same picture as in another conversation
    conversation(picture(4), words=4),
    conversation(picture(4), picture(5, 160, 64), words=3),  # begins like another conversation
    conversation(words=1),
    conversation(picture(6, 500, 20), picture(6, 500, 20)),
]


def alone(llm: LLM, conversations: list) -> list:
    outputs = []
    for each in conversations:
        llm.reset_prefix_cache()
        outputs += llm.chat(each, GREEDY, chat_template=TEMPLATE)
    llm.reset_prefix_cache()
    return outputs


def test_alone_as_the_helper_of_libmtmd_computes_them(family):
    for given, output in zip(CONVERSATIONS, alone(family, CONVERSATIONS), strict=True):
        pictures = [part["image"] for part in given[0]["content"] if part["type"] == "image"]
        tokens, gaps = by_the_helper(family, output.prompt, pictures)
        same = list(output.outputs[0].token_ids)
        at = next((at for at, pair in enumerate(zip(same, tokens, strict=True)) if pair[0] != pair[1]), None)
        assert at is None or gaps[at] < NEAR, (same, tokens, gaps)


def test_in_company_as_alone(family):
    wanted = [output.outputs[0] for output in alone(family, CONVERSATIONS)]
    for turn in ("cold", "kept"):
        outputs = family.chat(CONVERSATIONS, GREEDY, chat_template=TEMPLATE)
        assert [output.error for output in outputs] == [None] * len(outputs)
        for got, want in zip(outputs, wanted, strict=True):
            assert got.outputs[0].token_ids == want.token_ids, turn
    model = family._client.model
    if not (model.is_recurrent or model.has_window):  # such models keep states only of longer prompts
        kept = family.stats()
        assert kept.shared_tokens + kept.prefix_tokens > 0


def by_the_helper(llm: LLM, prompt: str, media: list) -> tuple[list[int], list[float]]:
    """Returns greedy tokens after mtmd_helper_eval_chunks, and the gap of the two best logits at each token.

    Args:
        media: arrays. Pictures have three dimensions, sounds have one.
    """
    lib, model = library.load(), llm._client.model
    mtmd, own = model.projector._mtmd, mtmd_parameters(model.projector._mtmd)
    projector = mtmd.mtmd_init_from_file(os.fsencode(model.projector.path), model.handle, own)
    params = lib.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 2048, 1024, 1024
    params.n_threads = params.n_threads_batch = 2
    context = lib.llama_init_from_model(model.handle, params)
    marker = mtmd.mtmd_default_marker().decode()
    text = prompt.replace("<picture>", marker).replace("<sound>", marker).encode()
    bitmaps = [
        mtmd.mtmd_bitmap_init(each.shape[1], each.shape[0], each.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)))
        if each.ndim == 3
        else mtmd.mtmd_bitmap_init_from_audio(len(each), each.ctypes.data_as(ctypes.POINTER(ctypes.c_float)))
        for each in media
    ]
    chunks = mtmd.mtmd_input_chunks_init()
    given = mtmd.mtmd_input_text(text=text, text_len=len(text), add_special=True, parse_special=True)
    array = (mtmd.mtmd_bitmap_p_ctypes * max(1, len(bitmaps)))(*bitmaps)
    assert mtmd.mtmd_tokenize(projector, chunks, ctypes.byref(given), array, len(bitmaps)) == 0
    past = lib.llama_pos(0)
    assert mtmd.mtmd_helper_eval_chunks(projector, context, chunks, 0, 0, 1024, True, ctypes.byref(past)) == 0
    position, tokens, gaps = past.value, [], []
    while True:
        row = np.ctypeslib.as_array(lib.llama_get_logits_ith(context, -1), shape=(model.n_vocab,))
        second, best = np.sort(row)[-2:]
        gaps.append(float(best - second))
        tokens.append(int(row.argmax()))
        if len(tokens) == N_TOKENS:
            break
        token = (ctypes.c_int32 * 1)(tokens[-1])
        batch = lib.llama_batch_get_one(token, 1)
        where = (ctypes.c_int32 * 1)(position)
        batch.pos = ctypes.cast(where, ctypes.POINTER(ctypes.c_int32))
        assert lib.llama_decode(context, batch) == 0
        position += 1
    mtmd.mtmd_input_chunks_free(chunks)
    for each in bitmaps:
        mtmd.mtmd_bitmap_free(each)
    lib.llama_free(context)
    mtmd.mtmd_free(projector)
    return tokens, gaps


def mtmd_parameters(mtmd):
    params = mtmd.mtmd_context_params_default()
    params.use_gpu, params.print_timings, params.warmup, params.n_threads = False, False, False, 2
    return params


def test_in_a_child_that_dies_between_encoding_and_the_end(files):
    options = {"mmproj": files["gemma3-tiny"], "n_slots": 4, "n_ctx": 256, "profile": False}
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True)
    with LLM("tiny", **options) as llm:
        wanted = [output.outputs[0].token_ids for output in llm.chat(CONVERSATIONS, params)]
    with LLM("tiny", isolate=True, **options) as llm:
        finished = {}
        for number, output in enumerate(llm.stream(CONVERSATIONS, params)):
            if number == 40:
                os.kill(llm._client.pids[0], signal.SIGKILL)
            if output.finished is not None:
                finished[output.request_id] = output.finished.outputs[0].token_ids
        assert sorted(finished.values()) == sorted(wanted)
        again = [output.outputs[0].token_ids for output in llm.chat(CONVERSATIONS, params)]
    assert again == wanted


@pytest.mark.parametrize(("weights", "most_apart"), [("F16", 0.002), ("BF16", 0.01), ("Q8_0", 0.03)])
def test_repacked_weights_of_an_encoder_give_the_same_embeddings(tmp_path, weights, most_apart):
    path, found = tmp_path / "mmproj.gguf", []
    write_projector(path, ProjectorShape("mlp", n_merge=1), 192, weights=weights)
    with LLM("tiny") as llm:
        for repacks in (False, True):
            options = {"n_embd": 192, "n_threads": 2, "use_gpu": False, "repacks": repacks}
            projector = Projector(path, library.load(), llm._client.model.handle, **options)
            found.append(projector.embeddings(read_picture(picture(0)), 0).rows)
            projector.close()
    plain, repacked = found
    assert np.linalg.norm(repacked - plain) <= most_apart * np.linalg.norm(plain)
    if library.repack_features() & {"wide", "wide8"}:  # other kernels add up in another order
        assert (repacked != plain).any()


def test_a_picture_is_encoded_once_for_all_that_show_it(files):
    with LLM("tiny", mmproj=files["mlp-tiny"], n_slots=8) as llm:
        projector, encoded = llm._client.model.projector, []
        encode = projector._encode
        projector._encode = lambda media, chunk: (encoded.append((media.digest, chunk)), encode(media, chunk))
        outputs = llm.chat([conversation(picture(1), words=n) for n in range(1, 9)], GREEDY)
        assert not [output.error for output in outputs if output.error]
        assert len(encoded) == 1


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2vl"])
def test_embeddings_of_prompts_with_pictures(files, name):
    model, kind, _ = FAMILIES[name]
    if model not in files:
        pytest.skip("the program that writes this model cannot be compiled")
    texts = [f"What {'is this ' * n}<__media__> and why?" for n in (1, 2)]
    shown = [{"prompt": text, "multi_modal_data": {"image": picture(3)}} for text in (*texts, texts[0])]
    found = {}
    for pooling in ("none", "mean", "cls", "last"):
        options = {"mmproj": files[f"{kind}-{model}"], "pooling": pooling, "n_ctx": 256, "profile": False}
        with LLM(files[model], **options) as llm, ThreadPoolExecutor() as pool:
            together = llm.embed([*shown, "What is this"], normalize=False)
            talking = pool.submit(llm.generate, "Hello", SamplingParams(max_tokens=40, ignore_eos=True))
            [found[pooling]] = llm.embed(shown[0], normalize=False)
            assert len(talking.result()[0].outputs[0].token_ids) == 40
        assert (together[0] == found[pooling]).all()
        assert (together[2] == found[pooling]).all()
        if pooling == "none":
            before = together[-1]
    rows = found["none"]
    assert np.allclose(
        rows[: len(before) - 1], before[:-1], atol=1e-4
    )  # " " behind the text is a token before a picture
    assert np.allclose(found["mean"], rows.mean(axis=0), atol=1e-4)
    assert np.allclose(found["cls"], rows[0], atol=1e-5)
    assert np.allclose(found["last"], rows[-1], atol=1e-5)


def test_embeddings_of_pictures_by_a_server_and_by_a_model_that_reads_in_both_directions(files):
    shown = {"prompt": "x <__media__> y", "multi_modal_data": {"image": picture(3)}}
    buffer = io.BytesIO()
    Image.fromarray(picture(3)).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    given = {"prompt_string": shown["prompt"], "multimodal_data": [data]}
    parts = [
        {"type": "text", "text": "x "},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}},
    ]
    options = {"mmproj": files["mlp-tiny"], "n_ctx": 256, "profile": False}
    with LLM("tiny", **options) as llm:
        [wanted] = llm.embed(shown)
    with TestClient(app("tiny", **options)) as client:
        ready(client)
        for more in ({}, {"truncate_prompt_tokens": 10}):  # pictures are not cut
            answer = client.post("/embedding", json={"content": [given, "text"], **more}).json()
            assert np.allclose(answer[0]["embedding"][0], wanted, atol=1e-5)
            body = {"input": {"content": [*parts, {"type": "text", "text": " y"}]}, **more}
            [answer] = client.post("/v1/embeddings", json=body).json()["data"]
            assert np.allclose(answer["embedding"], wanted, atol=1e-5)
        about_marks = {"type": "text", "text": f" is <__media__>, <image> or <media-{'0' * 32}>"}
        assert client.post("/v1/embeddings", json={"input": {"content": [*parts, about_marks]}}).status_code == 200
        asked = {**given, "prompt_string": "x <__media__> and <image>"}
        assert client.post("/embedding", json={"content": asked}).status_code == 200
    with LLM("tiny", kv_overrides={"llama.attention.causal": False}, **options) as llm:
        before, refused, after = (llm.embed(each, errors="return")[0] for each in ("a text", shown, "a text"))
        assert (before == after).all()
        assert "in both directions" in str(refused)


@pytest.mark.parametrize("name", ["gemma3", "llava", "qwen2vl", "qwen35"])
def test_prefixes_with_pictures_outlive_the_process(files, tmp_path, name):
    model, kind, _ = FAMILIES[name]
    if model not in files:
        pytest.skip("the program that writes this model cannot be compiled")
    text = "What is this? " * (100 if name.startswith("qwen") else 80)
    first = {"prompt": f"{text}<__media__> and why? ", "multi_modal_data": {"image": picture(3)}}
    second = {**first, "prompt": first["prompt"] + " Because it is so. And then?"}
    options: dict[str, Any] = {"n_ctx": 1024, "profile": False}
    if model != "tiny":  # it was made for 256 tokens
        options["kv_overrides"] = {f"{model}.context_length": 1024}
    shows = {"mmproj": files[f"{kind}-{model}"], **options}
    with LLM(files[model], n_slots=2, **shows) as llm:
        [wanted] = llm.generate(second, GREEDY)
        assert llm.save_prefix(first, tmp_path / "shown") > 300
    with LLM(files[model], cache_disk=tmp_path / "disk", **shows) as llm:
        llm.generate(first, GREEDY)
    with LLM(files[model], cache_disk=tmp_path / "disk", **shows) as llm:
        [found] = llm.generate(second, GREEDY)
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert llm.stats().read_tokens > 300
    with LLM(files[model], **shows) as llm:
        llm.load_prefix(tmp_path / "shown")
        [found] = llm.generate(second, GREEDY)
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.num_cached_tokens > 300
        llm.unload_prefix(tmp_path / "shown")
        facts = prefix_file.read_head(tmp_path / "shown")[0]
        saved = prefix_file.read(tmp_path / "shown", facts)
        assert bool(saved.media_runs) == name.startswith("qwen")  # their pictures have fewer positions than cells
        prefix_file.write(tmp_path / "bad", replace(saved, media_runs=()), facts)
        if saved.media_runs:
            with pytest.raises(InputError, match="cells do not have the positions of its tokens"):
                llm.load_prefix(tmp_path / "bad")
    with LLM(files[model], **options) as llm, pytest.raises(InputError, match="model with mmproj"):
        llm.load_prefix(tmp_path / "shown")


def test_requests_that_cannot_be_answered_fail_alone(files):
    with LLM("tiny", mmproj=files["mlp-tiny"], n_slots=4, n_ctx=256) as llm:
        good, bad = conversation(picture(1)), [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]
        long = conversation(*[picture(n) for n in range(4)])
        outputs = llm.chat([good, bad, long, good], GREEDY, errors="return")
        assert [output.error is None for output in outputs] == [True, False, False, True]
        assert "a picture is in no known format" in outputs[1].error
        assert "n_ctx allows 1 to 256, and a prompt with a picture is not cut" in outputs[2].error
        with_penalties = SamplingParams(max_tokens=8, repetition_penalty=1.3, dry_multiplier=1.0, presence_penalty=0.5)
        assert llm.chat(good, with_penalties)[0].error is None
        assert llm.chat(good, SamplingParams(max_tokens=8, overflow="truncate"))[0].error is None
        assert "<picture>" in llm.apply_chat_template(good)
        [refused] = llm.chat(good, SamplingParams(prompt_logprobs=1), errors="return")
        assert "prompt_logprobs is 1, but the prompt has a picture" in refused.error
    with (
        LLM("tiny") as llm,
        pytest.raises(PromptError, match="this engine reads text only; load the model with mmproj"),
    ):
        llm.chat(good, GREEDY, errors="raise")


def test_files_that_do_not_fit_are_refused_by_name(files, tmp_path):
    write_projector(tmp_path / "wide.gguf", ProjectorShape("mlp"), 320)
    with pytest.raises(ModelFileError, match="mismatch between text model"):
        LLM("tiny", mmproj=tmp_path / "wide.gguf")
    with pytest.raises(ModelFileError, match="is no mmproj file: its architecture is"):
        LLM("tiny", mmproj=resolve("tiny"))
    with pytest.raises(ModelFileError, match="does not exist"):
        LLM("tiny", mmproj=tmp_path / "missing.gguf")
    write_projector(tmp_path / "tiles.gguf", ProjectorShape("idefics3"), 192)
    with pytest.raises(ModelFileError, match="the vocabulary lacks a token that this model puts around pictures"):
        LLM("tiny", mmproj=tmp_path / "tiles.gguf")
    data = (tmp_path / "wide.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelFileError):
        LLM("tiny", mmproj=tmp_path / "cut.gguf")


def test_embeddings_that_are_not_finite_are_an_error_of_their_request(tmp_path):
    path = tmp_path / "damaged.gguf"
    write_projector(path, ProjectorShape("mlp", n_merge=1), 192)
    [bias] = [tensor for tensor in GGUFReader(path, "r+").tensors if tensor.name == "mm.2.bias"]
    bias.data[7] = np.nan
    with LLM("tiny", mmproj=path, n_slots=4, n_ctx=256, profile=False) as llm:
        shown, text = llm.chat([conversation(picture(0)), conversation()], GREEDY, errors="return")
    assert "could not be encoded: llama.cpp gave values that are not finite" in shown.error
    assert (text.error, len(text.outputs[0].token_ids)) == (None, N_TOKENS)


@pytest.mark.parametrize("name", ["gemma3", "qwen2vl", "qwen35"])
def test_states_of_pictures_in_main_memory_and_a_context_that_grows(files, name):
    """Six chats take turns in two slots, so that their states move to main memory and back."""
    model, kind, _ = FAMILIES[name]
    if model not in files:
        pytest.skip("the program that writes this model cannot be compiled")
    firsts = [conversation(picture(n, 100, 60), words=3) for n in range(6)]
    seconds = [[*each, *({"role": role, "content": "And?"} for role in ("assistant", "user"))] for each in firsts]
    options = {"mmproj": files[f"{kind}-{model}"], "n_ctx": 256, "profile": False}
    with LLM(files[model], n_slots=1, **options) as llm:
        wanted = [output.outputs[0].token_ids for output in alone(llm, [*firsts, *seconds])]
    with LLM(files[model], n_slots=2, start_slots=1, cache_ram=64, **options) as llm:
        outputs = [
            *llm.chat(firsts, GREEDY, chat_template=TEMPLATE),
            *llm.chat(seconds, GREEDY, chat_template=TEMPLATE),
        ]
        assert [output.outputs[0].token_ids for output in outputs] == wanted
        assert llm.stats().restored_tokens > 0 or name == "qwen35"  # qwen35 saves states of longer prompts


def test_a_pass_that_nobody_waits_for_ends_early(files, monkeypatch):
    monkeypatch.setattr(projector_module, "_ABANDONED_S", 0.0)
    with LLM("tiny", mmproj=files["mlp-tiny"], n_slots=2) as llm:
        projector, first, second = llm._client.model.projector, *(read_picture(picture(n)) for n in (11, 12))
        assert projector.embeddings(first, 0, 0.0) is None
        assert projector.embeddings(second, 0) is not None
        assert (first.digest, 0) not in projector._kept
        assert projector.embeddings(first, 0) is not None


def test_pictures_in_use_are_kept_whatever_they_take(files, monkeypatch):
    monkeypatch.setattr(projector_module, "KEPT_BYTES", 1)
    with LLM("tiny", mmproj=files["mlp-tiny"], n_slots=2) as llm:
        projector, media = llm._client.model.projector, [read_picture(picture(n)) for n in range(20, 23)]
        first, second = (projector.embeddings(each, 0) for each in media[:2])
        assert projector.embeddings(media[0], 0) is first
        assert projector.embeddings(media[1], 0) is second
        monkeypatch.setattr(projector_module, "_HELD_S", 0.0)
        projector.embeddings(media[2], 0)
        assert list(projector._kept) == [(media[2].digest, 0)]
    with pytest.raises(EngineClosedError):
        projector.tokens(media[0])
    with pytest.raises(EngineClosedError):
        projector.embeddings(media[0], 0)


def test_a_table_of_pictures_from_the_shell_and_from_python(files, tmp_path, monkeypatch):
    folder = tmp_path / "my photos"
    folder.mkdir()
    (folder / "tiny.gguf").write_bytes(resolve("tiny").read_bytes())
    (folder / "mmproj-tiny.gguf").write_bytes(Path(files["gemma3-tiny"]).read_bytes())
    names = ["cat.png", "missing.png", "dog.png"]
    for number, name in enumerate(names):
        if number != 1:
            Image.fromarray(picture(number)).save(folder / name)
    (folder / "photos.csv").write_text("file\n" + "\n".join(names) + "\n")
    monkeypatch.chdir(tmp_path)
    sampling = ["-t", "0", "-n", str(N_TOKENS), "--seed", "0"]
    options = ["-m", "my photos/tiny.gguf", "--image-column", "file", "--prompt", "What is this?", *sampling]

    def run(out, *more):
        command = [sys.executable, "-m", "llamabatch", "run", "my photos/photos.csv", out, *options, *more]
        return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert run("out.jsonl", "--keep", "file").returncode == 1
    rows = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
    assert [row["file"] for row in rows] == names
    assert "the picture" in rows[1]["error"]
    assert "missing.png cannot be read: No such file" in rows[1]["error"]
    assert "2 chat; 1 bad" in run("-", "--dry-run").stdout
    changed = run("out.jsonl", "--keep", "file", "--mmproj", files["mlp-tiny"])
    assert changed.returncode == 2
    assert "mmproj" in changed.stderr

    engine = {"model": "my photos/tiny.gguf", "mmproj": "auto"}
    frame = {"photo": [str(folder / "cat.png"), None, Image.open(folder / "dog.png")]}
    params = {"temperature": 0, "max_tokens": N_TOKENS}
    for _ in range(2):  # the second call reads the results of the first
        out = columns.map(frame, "What is this?", params=params, image="photo", path="out2.jsonl", **engine)
    assert [out["generated_text"][0], out["generated_text"][2]] == [rows[0]["text"], rows[2]["text"]]
    assert "there is no picture in 'photo'" in out["error"][1]


def test_texts_with_marks_for_pictures(files):
    """The picture marks of vLLM, llama-server and chats all give the same prompt."""
    shown = picture(30)
    data = io.BytesIO()
    Image.fromarray(shown).save(data, "PNG")
    text = "<u>What is this? {}</u><a>"
    with LLM("tiny", mmproj=files["mlp-tiny"], n_slots=2, n_ctx=256) as llm:
        [chat] = llm.chat(conversation(shown), GREEDY, chat_template=TEMPLATE)
        marks = ["<__media__>", "<image>", "<|vision_start|><|image_pad|><|vision_end|>", "<start_of_image>", "[IMG]"]
        prompts = [{"prompt": text.format(mark), "multi_modal_data": {"image": shown}} for mark in marks]
        for output in llm.generate([*prompts, prompts[0] | {"multi_modal_data": {"image": [data.getvalue()]}}], GREEDY):
            assert output.prompt_token_ids == chat.prompt_token_ids
            assert output.outputs[0].token_ids == chat.outputs[0].token_ids
        for given, message in [
            (
                {"prompt": "no mark", "multi_modal_data": {"image": shown}},
                "has 0 marks for media, but 1 pictures or sounds",
            ),
            ({"prompt": "<image>", "multi_modal_data": {"video": shown}}, "multi_modal_data has 'video'"),
            ({"prompt_token_ids": [5], "multi_modal_data": {"image": shown}}, "media need a prompt of text"),
            ({"prompt": "<image> a", "multi_modal_data": {"image": "missing.png"}}, "missing.png cannot be read"),
        ]:
            with pytest.raises(PromptError, match=message):
                llm.generate(given)
    with VllmLLM("tiny", mmproj=files["mlp-tiny"], limit_mm_per_prompt={"image": 1}, max_model_len=256) as theirs:
        params = VllmSamplingParams(temperature=0, max_tokens=N_TOKENS, ignore_eos=True)
        [output] = theirs.generate(prompts[1] | {"multi_modal_data": {"image": Image.fromarray(shown)}}, params)
    assert tuple(output.outputs[0].token_ids) == tuple(chat.outputs[0].token_ids)


def test_the_completion_of_llama_server_with_a_picture(files):
    data = io.BytesIO()
    Image.fromarray(picture(31)).save(data, "PNG")
    encoded = base64.b64encode(data.getvalue()).decode()
    prompt = {"prompt_string": "What is this: <__media__>\n", "multimodal_data": [encoded]}
    with TestClient(app("tiny", mmproj=files["mlp-tiny"], n_ctx=256)) as client:
        ready(client)
        assert client.get("/props").json()["media_marker"] in prompt["prompt_string"]
        assert "multimodal" in client.get("/models").json()["models"][0]["capabilities"]
        answer = client.post("/completion", json={"prompt": prompt, "n_predict": 4, "temperature": 0}).json()
        assert answer["tokens_evaluated"] > 64
        assert "What is this" in answer["prompt"]
        for wrong in ({"multimodal_data": ["malformed"]}, {"prompt_string": "no mark"}, {"multimodal_data": [""]}):
            refused = client.post("/completion", json={"prompt": prompt | wrong})
            assert refused.status_code == 400, refused.text


def test_a_server_reads_the_files_that_its_options_allow_and_no_others(files, tmp_path):
    (tmp_path / "shown").mkdir()
    for path in ("shown/a b.png", "secret.png"):
        Image.fromarray(picture(32)).save(tmp_path / path)
    shown = {"mmproj": files["mlp-tiny"], "n_ctx": 256, "allowed_local_media_path": tmp_path / "shown"}

    def ask(client, path):
        part = {"type": "image_url", "image_url": {"url": (tmp_path / path).as_uri()}}
        message = {"role": "user", "content": [part, {"type": "text", "text": "What?"}]}
        return client.post("/v1/chat/completions", json={"messages": [message], "max_tokens": 1})

    with TestClient(app("tiny", **shown)) as client:
        ready(client)
        assert ask(client, "shown/a b.png").status_code == 200
        refused = ask(client, "secret.png")
        assert refused.status_code == 400
        assert "is not below allowed_local_media_path" in refused.text
        fetched = client.post(
            "/v1/chat/completions",
            json={"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "https://a.b/c.png"}]}]},
        )
        assert fetched.status_code == 400
        assert "allowed_media_domains: a.b is none of them" in fetched.text
