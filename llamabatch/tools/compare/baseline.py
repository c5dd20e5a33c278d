"""The baseline as a child program, `python -m llamabatch.tools.compare.baseline FD`: a loop over `llama_cpp.Llama`.

Programs without llamabatch usually have this loop: the high-level API of llama-cpp-python, one prompt after another.
The child uses the wire protocol of llamabatch.client.worker, so that it is measured like every strategy. For a fair
comparison, the loop has the same library, threads, context, cache types, flash attention, devices and memory mapping as
the engines. (llama_cpp.Llama has another default for the threads of prompts.) The calls do not stream, since streaming
would decode each text twice. llama_cpp.Llama may reuse the prefix of the previous prompt. n_batch stays at its default,
since a larger value would only cost memory.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

from llamabatch.client.parent_link import ParentLink
from llamabatch.client.wire import pack_output, unpack_config, unpack_request
from llamabatch.config import ROPE_OPTIONS, SPLIT_MODES, EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.errors import ModelFileError
from llamabatch.gguf.resolve import file_bytes, resolve
from llamabatch.llama import devices, library
from llamabatch.llama.overrides import tensor_array
from llamabatch.request.outputs import CompletionOutput, FinishReason, RequestOutput, SequenceOutput, Timings
from llamabatch.request.request import Request


class Loop:
    """A loop over `llama_cpp.Llama` that records the time of each token."""

    def __init__(self, config: EngineConfig) -> None:
        path = resolve(config.model)
        self._module = library.load(file_bytes(path))
        self._change_defaults(config)
        library.use_numa(config.numa)
        rope = {name: getattr(config, name) for name in ROPE_OPTIONS if getattr(config, name) is not None}
        if "rope_scaling" in rope:
            name = f"LLAMA_ROPE_SCALING_TYPE_{rope.pop('rope_scaling').upper()}"
            rope["rope_scaling_type"] = int(getattr(self._module, name))
        try:
            self._llama = self._module.Llama(
                str(path),
                n_ctx=config.n_ctx,
                n_threads=config.n_threads_batch,  # all cores, which make even a step with one row faster
                n_threads_batch=config.n_threads_batch,
                n_gpu_layers=config.n_gpu_layers,
                main_gpu=config.main_gpu if config.devices is None else 0,
                split_mode=SPLIT_MODES.index(config.split_mode),
                offload_kqv=config.offload_kqv,
                op_offload=config.op_offload,
                tensor_split=list(config.tensor_split) if config.tensor_split else None,
                use_mmap=config.use_mmap,
                use_mlock=config.use_mlock,
                kv_overrides=dict(config.kv_overrides) or None,
                flash_attn=config.flash_attn != "off",
                type_k=self._ggml_type(config.type_k),
                type_v=self._ggml_type(config.type_v),
                verbose=False,
                **rope,
            )
        except ValueError as error:  # llama_cpp.Llama cannot load the file or make a context
            raise ModelFileError(f"llama_cpp.Llama refuses {path}: {error}") from error
        self._generate = self._llama.generate
        self._llama.generate = self._timed
        self._tokens: list[int] = []
        self._times: list[float] = []
        self.stats = EngineStats()

    def run(self, request: Request) -> RequestOutput:
        """Completes one prompt."""
        admitted = time.perf_counter()
        self._tokens, self._times = [], []
        error, text, reason = None, "", FinishReason.ERROR
        try:
            text, reason = self._complete(request)
        except (ValueError, RuntimeError) as refusal:  # the prompt does not fit, or llama_decode failed
            error = str(refusal)
        stop = self._tokens[-1] if reason is FinishReason.STOP else None
        output = CompletionOutput(0, text, tuple(self._tokens), reason, stop)
        start = request.arrival_s
        times = tuple(t - start for t in self._times)
        timings = Timings(admitted - start, times[0] if times else None, time.perf_counter() - start, times)
        # After the prompt, each call of Llama.eval computes one row and reads the weights once.
        rows = max(0, len(self._tokens) - 1)
        self.stats += EngineStats(
            decode_calls=rows,
            decode_rows=rows,
            decode_passes=rows,
            prefill_calls=1,
            prefill_tokens=len(request.prompt_token_ids),
        )
        return RequestOutput(request.request_id, None, request.prompt_token_ids, (output,), error, timings)

    def _complete(self, request: Request) -> tuple[str, FinishReason]:
        ids, params = list(request.prompt_token_ids), request.params
        if params.ignore_eos:  # create_completion cannot ignore EOS, but its inner loop can
            for _ in itertools.islice(self._timed(ids, temp=0.0), params.max_tokens):
                pass
            return "", FinishReason.LENGTH
        completion = self._llama.create_completion(ids, max_tokens=params.max_tokens, temperature=0.0)
        choice = completion["choices"][0]
        return choice["text"], FinishReason(choice["finish_reason"])

    def _timed(self, *args: Any, **kwargs: Any) -> Iterator[int]:
        """Takes the place of Llama.generate: yields the tokens of the original, and records them and their times."""
        for token in self._generate(*args, **kwargs):
            self._times.append(time.perf_counter())
            self._tokens.append(int(token))
            yield token

    def _change_defaults(self, config: EngineConfig) -> None:
        """Changes llama.cpp's defaults for extra buffers, devices and places of tensors. llama_cpp.Llama has no options
        for these. With flash_attn="auto", llama.cpp decides about flash attention, as in the engines."""
        repacks = config.extra_bufts == "on" or (config.extra_bufts == "auto" and library.extra_bufts_safe())
        self._rules = tensor_array(config.tensor_overrides)
        chosen = None if config.devices is None else devices.used(config, self._module)
        self._devices = None if chosen is None else devices.pointers(chosen)
        binding = self._module.llama_cpp
        if config.flash_attn == "auto":
            binding.LLAMA_FLASH_ATTN_TYPE_ENABLED = binding.LLAMA_FLASH_ATTN_TYPE_AUTO
        defaults = binding.llama_model_default_params

        def changed() -> Any:
            params = defaults()
            params.use_extra_bufts = repacks
            if self._devices is not None:
                params.devices = ctypes.addressof(self._devices)
            if config.tensor_overrides:
                params.tensor_buft_overrides = ctypes.addressof(self._rules)
            return params

        binding.llama_model_default_params = changed

    def _ggml_type(self, name: str) -> int:
        return int(getattr(self._module, f"GGML_TYPE_{name.upper()}"))


def main(number: int) -> None:
    """Answers messages as llamabatch.client.worker does, until the parent sends "close" or ends.

    Args:
        number: the program's argument FD, for ParentLink.
    """
    parent = ParentLink(number)
    try:
        loop = Loop(unpack_config(parent.receive()[1]))
    except Exception as error:
        parent.send("failed", type(error).__name__, str(error))
        return
    parent.send("ready")
    while (message := parent.receive())[0] != "close":
        if message[0] == "submit":
            for packed in message[1]:
                output = loop.run(unpack_request(packed))
                parent.send("outputs", [pack_output(SequenceOutput(output.request_id, (), "", output))])
        elif message[0] == "stats":
            parent.send("stats", loop.stats.to_wire())
            parent.send("answer", message[1], None)


if __name__ == "__main__":
    main(int(sys.argv[1]))
