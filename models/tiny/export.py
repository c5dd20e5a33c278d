"""Writes the trained model as one GGUF file: Q8_0 matrices, f32 norms, the tokenizer and the chat template.

python models/tiny/export.py --cache build/tiny
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import gguf
import numpy as np
import torch
from chatml import CHAT_TEMPLATE, END_OF_TEXT, LLAMA_CPP_PRE_TOKENIZER, SPECIAL_TOKENS, TURN_END
from model import ModelConfig
from tokenizers import Tokenizer

HERE = Path(__file__).parent
DEFAULT_OUT = HERE.parents[1] / "llamabatch" / "bundled" / "tiny.gguf"
MAX_BYTES = 6_000_000
FILE_TYPES = {
    "q8_0": (gguf.GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "f16": (gguf.GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "f32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}
DESCRIPTION = (
    "A very small Llama-architecture model for tests, examples and first runs. Trained from scratch on a CPU, on "
    "generated questions only (facts, arithmetic, words, JSON records, stories); no outside text or weights. "
    "Made by models/tiny/corpus.py, models/tiny/train.py and models/tiny/export.py of llamabatch."
)


def tensor_names(config: ModelConfig) -> dict[str, str]:
    """Parameter name -> GGUF name. The output matrix is the tied embedding, which llama.cpp takes when it is absent."""
    names = {"token_embd.weight": "token_embd.weight", "output_norm.weight": "output_norm.weight"}
    parts = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
    for layer in range(config.n_layers):
        names |= {f"layers.{layer}.{part}.weight": f"blk.{layer}.{part}.weight" for part in parts}
    return names


def add_metadata(writer: gguf.GGUFWriter, config: ModelConfig, file_type: gguf.LlamaFileType) -> None:
    writer.add_name("tiny")
    writer.add_description(DESCRIPTION)
    writer.add_author("the llamabatch authors")
    writer.add_license("apache-2.0")
    writer.add_size_label("2.8M")
    writer.add_languages(["en"])
    writer.add_tags(["text-generation", "test-model"])
    writer.add_file_type(file_type)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.width)
    writer.add_block_count(config.n_layers)
    writer.add_feed_forward_length(config.ffn)
    writer.add_head_count(config.n_heads)
    writer.add_head_count_kv(config.n_kv_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    ids = tokenizer.get_vocab()
    tokens = sorted(ids, key=ids.__getitem__)
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(LLAMA_CPP_PRE_TOKENIZER)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in merges])
    writer.add_bos_token_id(ids[END_OF_TEXT])  # named, because tools ask for one; never added
    writer.add_eos_token_id(ids[TURN_END])
    writer.add_eot_token_id(ids[TURN_END])
    writer.add_pad_token_id(ids[END_OF_TEXT])
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def export(cache: Path, out: Path, kind: str) -> int:
    """Writes the file and returns its size in bytes."""
    report = json.loads((cache / "report.json").read_text())
    config = ModelConfig(**{name: report[name] for name in ModelConfig.__dataclass_fields__})
    weights: dict[str, torch.Tensor] = torch.load(cache / "model.pt", map_location="cpu", weights_only=True)
    matrix_type, file_type = FILE_TYPES[kind]
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_suffix(".part")
    writer = gguf.GGUFWriter(unfinished, "llama")
    add_metadata(writer, config, file_type)
    add_tokenizer(writer, Tokenizer.from_file(str(cache / "tokenizer.json")))
    for ours, theirs in tensor_names(config).items():
        data = weights[ours].float().numpy().astype(np.float32)
        tensor_type = matrix_type if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(theirs, gguf.quantize(data, tensor_type), raw_dtype=tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.replace(out)  # at once, so that nobody loads half a file
    return out.stat().st_size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, default=Path("build/tiny"))
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--type", choices=FILE_TYPES, default="q8_0")
    args = parser.parse_args()
    size = export(args.cache, args.out, args.type)
    print(f"{args.out.name}: {size:,} bytes")
    if args.type == "q8_0" and size > MAX_BYTES:
        raise SystemExit(f"larger than {MAX_BYTES:,} bytes")


if __name__ == "__main__":
    main()
