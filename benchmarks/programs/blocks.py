"""python blocks.py MODEL KIND FOLDER N STD: types of a file's tensors after llama-quantize, and blocks of these types.

The program prints a JSON object with the type of each tensor. A dry run finds the types without reading MODEL's
weights. For each type, the program writes a file with the type's name to FOLDER. The file contains N random values of
standard deviation STD, which llama.cpp has quantised with equal importance.
"""

from __future__ import annotations

import ctypes
import json
import re
import sys
from pathlib import Path

import llama_cpp
import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

_COLUMNS = 512  # a multiple of every type's block size
_LINE = re.compile(r"\] (\S+) +- \[.*?\], type = +(\w+), size = .*?(?:\((\w+)\))?$", re.MULTILINE)
_IN_LAYERS = ("MXFP4", "NVFP4")  # for all matrices of layers here; llama-quantize uses them for experts, or never


def types(model: str, kind: str) -> dict[str, str]:
    said: list[bytes] = []
    log = llama_cpp.llama_log_callback(lambda level, text, data: said.append(text))
    llama_cpp.llama_log_set(log, None)
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{'Q8_0' if kind in _IN_LAYERS else kind}")
    params.dry_run = True
    if llama_cpp.llama_model_quantize(model.encode(), b"", params) != 0:
        raise RuntimeError(b"".join(said)[-500:].decode())
    found = {name: (new or old).upper() for name, old, new in _LINE.findall(b"".join(said).decode())}
    if kind in _IN_LAYERS:
        found = {n: kind if kind_now == "Q8_0" and n.startswith("blk.") else kind_now for n, kind_now in found.items()}
    return found


def blocks(kind: str, n: int, std: float) -> bytes:
    ggml = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    ggml.ggml_quantize_chunk.restype = ctypes.c_size_t
    ggml.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    ]  # fmt: skip
    values = np.random.default_rng(0).standard_normal(n, np.float32) * np.float32(std)
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    made = ctypes.create_string_buffer(n // weights * size)
    importance = np.ones(_COLUMNS, np.float32)
    written = ggml.ggml_quantize_chunk(
        GGMLQuantizationType[kind], values.ctypes.data, made, 0, n // _COLUMNS, _COLUMNS, importance.ctypes.data
    )
    assert written == len(made), (kind, written, len(made))
    return made.raw


def main(model: str, kind: str, folder: str, n: str, std: str) -> None:
    found = types(model, kind)
    for each in {*found.values()} - {"F32"}:
        (Path(folder) / each).write_bytes(blocks(each, int(n), float(std)))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:6])
