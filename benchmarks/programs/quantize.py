"""python quantize.py IN OUT TYPE: writes a file in another type with the function that llama-quantize calls."""

from __future__ import annotations

import sys

import llama_cpp

# types whose names in enum llama_ftype are not MOSTLY_ and the type
_NAMES = {"F32": "ALL_F32", "MXFP4": "MOSTLY_MXFP4_MOE"}


def main(source: str, target: str, kind: str) -> int:
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_{_NAMES.get(kind, f'MOSTLY_{kind}')}")
    params.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), params))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:4]))
