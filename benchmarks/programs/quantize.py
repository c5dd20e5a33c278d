"""python quantize.py IN OUT TYPE: llama.cpp's own quantisation of a file, which llama-quantize calls, too."""

from __future__ import annotations

import sys

import llama_cpp

# enum llama_ftype has K-quants by the size of the mix, and MXFP4 by the models that have it
_NAMES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}


def main(source: str, target: str, kind: str) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{_NAMES.get(kind, f'MOSTLY_{kind}')}")
    params.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
