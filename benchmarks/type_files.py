"""Makes models with random weights in each type that llama-quantize writes, in seconds, and removes them after use.

The tensors have the types that llama-quantize gives them. llama.cpp quantises 262,144 values to each type, and every
tensor repeats these blocks from a random one on. So the file has real blocks, but most of it need not be quantised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, LlamaFileType

from benchmarks.places import Say, synth_model
from llamabatch.native_build.tools import SetupFailure
from llamabatch.tools import synth

_PROGRAM = Path(__file__).parent / "programs" / "blocks.py"
_VALUES = 1 << 18


@contextlib.contextmanager
def model(shape_name: str, kind: str, say: Say) -> Iterator[Path]:
    """Yields a file of this shape and kind, which exists at least until the end of the `with` block.

    Args:
        kind: name in llama-quantize. With MXFP4 or NVFP4 all matrices of layers have that type, all others Q8_0.

    Raises:
        SetupFailure: llama.cpp does not know the kind.
    """
    if kind in synth.QUANTS:
        yield synth_model(say, kind, shape_name)
        return
    source, shape = synth_model(say, "F16", shape_name), synth.find_shape(shape_name)
    with tempfile.TemporaryDirectory(dir=source.parent, prefix="types-") as folder:
        command = [sys.executable, str(_PROGRAM), str(source), kind, folder, str(_VALUES), str(shape.n_embd**-0.5)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise SetupFailure(f"llama.cpp makes no {kind} of {source.name}: {done.stderr.strip()[-300:]}")
        types = json.loads(done.stdout)
        kinds = {name: _block_type(name, Path(folder)) for name in {*types.values()} - {"F32"}}
        tensors = [
            dataclasses.replace(tensor, kind=kinds[types[tensor.name]]) if types[tensor.name] in kinds else tensor
            for tensor in synth.tensors_of(shape, "F16")
        ]
        path = Path(folder) / f"{shape_name}-{kind}.gguf"
        synth.write_file(shape, path, _file_type(kind), tensors)
        yield path


def _file_type(kind: str) -> int:
    return next((int(each) for each in LlamaFileType if each.name in (f"MOSTLY_{kind}", f"MOSTLY_{kind}_MOE")), 0)


def _block_type(name: str, folder: Path) -> synth.BlockType:
    weights, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    pool = np.fromfile(folder / name, np.uint8).reshape(-1, size)

    def fill(bits: synth.RandomBits, rows: int, _std: float) -> synth.Bytes:
        first = int(bits.bytes(1, 8).view(np.uint64)[0, 0]) % len(pool)
        blocks: synth.Bytes = np.take(pool, np.arange(first, first + rows), axis=0, mode="wrap")
        return blocks

    return synth.BlockType(name, weights, size, fill)
