"""Writes local files in place of the models that llama.cpp's server tests fetch from a hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from PIL import Image

from llamabatch.tools.synth.projectors import ProjectorShape, write_projector
from llamabatch.utils import paths
from tests.model.adapter_files import write_lora
from tests.model.encoder_files import ENCODERS, N_EMBD, N_FF, N_HEAD, N_LAYER, tensors
from tests.model.encoder_files import vocabulary as vocabulary_of
from tests.server_peer.llama_server import MMPROJ

DOWNLOADS = ("moe_shakespeare15M.gguf", "stories15M-q4_0.gguf")
"""Files that tests download into a folder tmp/ unless they lie there: an adapter, and a draft model."""

PICTURES = ("11_truck.png", "91_cat.png")
"""Files that tests fetch from a hub."""

_COMMIT = "0" * 40
_N_CTX = 512
_N_MERGES = 253
_TINY_EMBD = 192
_SPLIT = "tinyllamas/split/stories15M-q8_0-00001-of-00003.gguf"


def write_models(folder: Path, vocabularies: Path) -> dict[str, str]:
    """Writes the files. Returns the path for each "repository" or "repository/file".

    Args:
        vocabularies: folder with llama.cpp's files ggml-vocab-*.gguf.
    """
    tiny = str(write_tiny(folder / "tiny.gguf"))
    words = vocabularies / "ggml-vocab-bert-bge.gguf"
    return {
        "": tiny,
        "ggml-org/test-model-stories260K": tiny,
        "ggml-org/test-model-stories260K-infill": str(write_tiny(folder / "infill.gguf", infill=True)),
        "ggml-org/tinygemma3-GGUF:Q8_0": tiny,
        f"ggml-org/tinygemma3-GGUF:Q8_0{MMPROJ}": str(write_encoder_of_pictures(folder / "mmproj.gguf")),
        "ggml-org/stories15M_MOE/stories15M_MOE-F16.gguf": tiny,
        f"ggml-org/models/{_SPLIT}": str(write_tiny(folder / "split.gguf", n_parts=3)),
        "ggml-org/models/bert-bge-small/ggml-model-f16.gguf": str(
            write_encoder("bert-cls", folder / "embedder.gguf", words)
        ),
        "ggml-org/models/jina-reranker-v1-tiny-en/ggml-model-f16.gguf": str(
            write_encoder("bert-rank", folder / "reranker.gguf", words)
        ),
    }


def write_presets(path: Path, models: Mapping[str, str]) -> Path:
    """Writes a router's presets with the models that the tests expect in a hub's cache. Returns the path."""
    tiny, infill = (models[f"ggml-org/test-model-stories260K{ending}"] for ending in ("", "-infill"))
    named = {"ggml-org/tinygemma3-GGUF:Q8_0": tiny}
    named |= {"ggml-org/test-model-stories260K:F32": tiny, "ggml-org/test-model-stories260K-infill:F32": infill}
    path.write_text("".join(f"[{name}]\nmodel = {file}\n" for name, file in named.items()), encoding="utf-8")
    return path


def write_hub(folder: Path, models: Mapping[str, str]) -> Path:
    """Writes a hub's cache with the repositories that the tests' presets name. Returns `folder`."""
    for name in ("ggml-org/test-model-stories260K", "ggml-org/test-model-stories260K-infill"):
        repository = folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / _COMMIT
        snapshot.mkdir(parents=True)
        (snapshot / "model-F32.gguf").symlink_to(models[name])
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(_COMMIT, encoding="ascii")
    return folder


def write_downloads(folder: Path) -> None:
    """Writes the files named in DOWNLOADS into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    adapter, draft = DOWNLOADS
    write_lora(folder / adapter)
    write_tiny(folder / draft)


def write_pictures(folder: Path) -> None:
    """Writes random pictures named PICTURES into `folder`."""
    for number, name in enumerate(PICTURES):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)


def write_tiny(path: Path, *, infill: bool = False, n_parts: int = 1) -> Path:
    """Writes the bundled model, changed to be like the tests' own model, stories260K. That has 512 tokens, and its
    texts hardly ever end.

    Texts begin with the token 1. Few merges are left, so that a text has about as many tokens as with stories260K. The
    rows of tokens that end a text are zeros. With `infill`, the vocabulary has tokens for a gap.

    Returns:
        The file, or the first of several parts.
    """
    reader = gguf.GGUFReader(paths.bundled_model())
    fields = {key: field for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    architecture = str(fields.pop("general.architecture").contents())
    per_part = -(-len(reader.tensors) // n_parts)
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=per_part if n_parts > 1 else 0)
    for name in ("bos_token_id", "add_bos_token"):
        del fields[f"tokenizer.ggml.{name}"]
    writer.add_bos_token_id(1)
    writer.add_add_bos_token(True)
    writer.add_token_merges(fields.pop("tokenizer.ggml.merges").contents()[:_N_MERGES])
    for name, token in (("fim_pre", 2045), ("fim_suf", 2046), ("fim_mid", 2047)) if infill else ():
        writer.add_uint32(f"tokenizer.ggml.{name}_token_id", token)
    _add_fields(writer, fields)
    for tensor in reader.tensors:
        data = tensor.data.copy()
        if tensor.name == "token_embd.weight":
            data[[0, 2]] = 0
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    _write(writer)
    return path if n_parts == 1 else path.with_name(f"{path.stem}-00001-of-{n_parts:05d}.gguf")


def write_encoder(name: str, path: Path, vocabulary: Path) -> Path:
    """Writes an encoder of ENCODERS with llama.cpp's vocabulary of bge, so that texts have as many tokens as with bge.

    Args:
        vocabulary: llama.cpp's ggml-vocab-bert-bge.gguf.
    """
    kind, words = ENCODERS[name], gguf.GGUFReader(vocabulary)
    n_words = len(words.fields["tokenizer.ggml.tokens"].contents())
    writer = gguf.GGUFWriter(path, "bert")
    for key, value in (
        ("block_count", N_LAYER),
        ("context_length", _N_CTX),
        ("embedding_length", N_EMBD),
        ("feed_forward_length", N_FF),
        ("attention.head_count", N_HEAD),
        ("pooling_type", int(kind.pooling)),
    ):
        writer.add_uint32(f"bert.{key}", value)
    writer.add_float32("bert.attention.layer_norm_epsilon", 1e-5)
    writer.add_bool("bert.attention.causal", False)
    _add_fields(writer, {key: field for key, field in words.fields.items() if key.startswith("tokenizer.")})
    for tensor, values in tensors(kind, n_words - len(vocabulary_of(kind.family)), _N_CTX):
        writer.add_tensor(tensor, values)
    _write(writer)
    return path


def write_encoder_of_pictures(path: Path) -> Path:
    """Writes a media encoder with random weights, of the family of Gemma 3, for the model of write_tiny."""
    write_projector(path, ProjectorShape("gemma3", n_merge=2), _TINY_EMBD, seed=1)
    return path


def _add_fields(writer: gguf.GGUFWriter, fields: Mapping[str, gguf.ReaderField]) -> None:
    for name, field in fields.items():
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, field.contents())
        else:
            writer.add_key_value(name, field.contents(), field.types[0])


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
