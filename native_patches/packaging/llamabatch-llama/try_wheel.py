"""Loads the installed llamabatch_llama and generates eight tokens with a model: `python try_wheel.py MODEL`."""

import sys
from pathlib import Path

import llamabatch_llama
from llamabatch_llama import _binding as llama

folder = Path(llamabatch_llama.__file__).parent / "lib"
llama.ggml_backend_load_all_from_path = llama.llama_cpp._lib.ggml_backend_load_all_from_path
llama.ggml_backend_load_all_from_path(str(folder).encode())
print(llama.Llama(sys.argv[1], n_ctx=256, verbose=False)("Once upon a time", max_tokens=8)["choices"][0]["text"])
