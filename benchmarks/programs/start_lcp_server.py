"""Starts llama-cpp-python's examples/server/server.py: `start_lcp_server.py SERVER_PY -C CONFIG`.

The server imports the multimodal library. Our wheel does not contain that library, and text requests do not call it, so
an empty module replaces it.
"""

from __future__ import annotations

import runpy
import sys
import types

import llama_cpp


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> type:
        """Returns an empty class, since the server uses such names only in annotations and as base classes."""
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


absent = _Absent("llama_cpp.mtmd_cpp")
sys.modules["llama_cpp.mtmd_cpp"] = absent
llama_cpp.mtmd_cpp = absent  # type: ignore[attr-defined]
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
