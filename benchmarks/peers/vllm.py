"""vLLM on the CPU. It reads no GGUF file, so it gets random weights in BF16 in the shape of the workload's file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.base import SAMPLING, Setup
from benchmarks.peers.child import PROGRAMS, ChildSession
from benchmarks.process import PeerFailure
from benchmarks.workloads import N_SLOTS, Workload
from llamabatch.gguf.header import read_header
from llamabatch.native_build.tools import make_folder
from llamabatch.utils.paths import cache_dir

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
_LOAD_S = 300.0
_KV_GIB = 4


def config_of(path: Path) -> dict[str, Any]:
    """Returns the config.json of a model in the shape of a GGUF file. Raises PeerFailure for other architectures."""
    header = read_header(path)
    if header.architecture not in _CLASSES:
        raise PeerFailure(f"no class of vLLM is known here for the architecture {header.architecture!r}")
    values = {name: header.own(key) for name, key in _KEYS.items()}
    return {
        **{name: value for name, value in values.items() if value is not None},
        "architectures": [_CLASSES[header.architecture]],
        "model_type": header.architecture,
        "vocab_size": header.n_tokens,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in header.tensors),
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 0,
    }


@dataclass(frozen=True)
class VLlm:
    """vllm.LLM in the environment of `python`: BF16, the prefix cache, 32 sequences. It gets no min_p, which is 0."""

    name: str
    python: Path

    def open(self, setup: Setup, workload: Workload) -> ChildSession:
        path = setup.models[workload.model].path
        folder = make_folder(cache_dir() / "bench" / f"vllm-{path.stem}")
        (folder / "config.json").write_text(json.dumps(config_of(path)), encoding="utf-8")
        engine = {"model": str(folder), "max_model_len": workload.n_ctx, "max_num_seqs": N_SLOTS}
        sampling = {name: value for name, value in SAMPLING.items() if name != "min_p"}
        env = {
            **setup.env,
            "VLLM_CPU_KVCACHE_SPACE": str(_KV_GIB),
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{setup.threads - 1}",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "HF_HUB_OFFLINE": "1",
        }
        start = {"engine": engine, "sampling": sampling}
        return ChildSession(
            "vLLM", PROGRAMS / "start_vllm.py", start, setup, python=self.python, env=env, load_s=_LOAD_S,
        )  # fmt: skip
