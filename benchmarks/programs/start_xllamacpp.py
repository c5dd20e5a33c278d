"""Starts xllamacpp's server in this process, as its users do; the benchmark sends it HTTP requests."""

from __future__ import annotations

from typing import Any

import xllamacpp  # type: ignore[import-not-found]  # of .venv-bench
from lines import Handler, serve  # type: ignore[import-not-found]  # beside this file


def start(options: dict[str, Any]) -> tuple[dict[str, Any], Handler]:
    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.port = options["port"]
    params.n_ctx = options["n_ctx"]
    params.n_parallel = options["n_parallel"]
    params.cpuparams.n_threads = options["n_threads"]
    params.cpuparams_batch.n_threads = options["n_threads"]
    server = xllamacpp.Server(params)

    def handle(message: dict[str, Any]) -> dict[str, Any]:
        return {"address": server.listening_address}

    return {"address": server.listening_address, "system": xllamacpp.get_system_info()}, handle


if __name__ == "__main__":
    serve(start)
