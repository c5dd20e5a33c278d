"""LLMEngine: vLLM's loop of add_request and step, over one LLM of this package."""

from __future__ import annotations

import queue
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from llamabatch.compat.vllm.engine.arg_utils import EngineArgs
from llamabatch.compat.vllm.entrypoints.llm import LLM
from llamabatch.compat.vllm.lora.request import LoRARequest
from llamabatch.compat.vllm.outputs import CompletionOutput, RequestOutput, request_output
from llamabatch.compat.vllm.sampling_params import RequestOutputKind, SamplingParams
from llamabatch.compat.vllm.tokenizer import Tokenizer
from llamabatch.errors import PromptError
from llamabatch.request.outputs import SequenceOutput
from llamabatch.utils.absent import absent
from llamabatch.utils.checks import show
from llamabatch.utils.closing import Closing
from llamabatch.utils.lifetime import ForkGuard

_OPTIONS = "give the options to LLMEngine.from_engine_args(EngineArgs(model, ...))"
ABSENT = {
    "from_vllm_config": _OPTIONS,
    "model_config": "engine.llm.llm.plan has the options in force",
    "vllm_config": "engine.llm.llm.plan has the options in force",
    "collective_rpc": "there is one engine, and there are no workers to call",
}


@dataclass
class _Running:
    """A request that runs.

    Attributes:
        output: an output with the caller's request_id, but without continuations. step() returns copies of it.
        parts: the continuations so far, by their index.
    """

    params: SamplingParams
    output: RequestOutput
    parts: dict[int, CompletionOutput] = field(default_factory=dict)

    def after(self, event: SequenceOutput) -> RequestOutput:
        """Adds an event, and returns the request's output for step()."""
        kind = self.params.output_kind
        part = self.parts.setdefault(event.index, CompletionOutput(event.index, "", [], None, None))
        part.text += event.text if self.params.detokenize else ""
        part.token_ids += event.token_ids
        if event.logprobs is not None:
            part.logprobs = [*(part.logprobs or ()), *event.logprobs]
        if event.ended is not None:
            part.finish_reason = event.ended.value
        if event.finished is None:
            if kind is RequestOutputKind.FINAL_ONLY:
                return self.output
            return replace(
                self.output,
                outputs=[replace(self.parts[i], token_ids=[*self.parts[i].token_ids]) for i in sorted(self.parts)],
            )
        whole = request_output(self.output.request_id, event.finished, self.params, self.output.lora_request)
        if kind is not RequestOutputKind.DELTA:
            return whole
        ends = {each.index: each for each in whole.outputs if each.index in self.parts}
        for i, end in ends.items():
            end.text, end.token_ids, end.logprobs = self.parts[i].text, self.parts[i].token_ids, self.parts[i].logprobs
        return replace(whole, outputs=list(ends.values()))


class LLMEngine(Closing):
    """vLLM's synchronous engine: requests may be added between steps, and each step returns new outputs.

    The engine computes in a thread of its own, also between the calls of step().

    Attributes:
        llm: the LLM for all requests.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        self._running: dict[str, _Running] = {}  # the key is the engine's id of the request
        self._errors: list[Exception] = []  # errors of failed requests; the next calls of step() raise them
        self._process = ForkGuard()

    @classmethod
    def from_engine_args(
        cls, engine_args: EngineArgs, usage_context: Any = None, stat_loggers: Any = None, disable_log_stats: Any = None
    ) -> LLMEngine:
        """Makes an LLMEngine. Arguments after the first change nothing. Raises the errors of LLM."""
        return cls(LLM(**asdict(engine_args)))  # type: ignore[call-overload]  # __new__ makes a dataclass

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        lora_request: LoRARequest | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
    ) -> str:
        """Adds a request and returns its id.

        Args:
            prompt, params, lora_request, tokenization_kwargs: one prompt and its arguments, as for LLM.generate.
            arrival_time, trace_headers: change nothing.
            priority: requests with a lower number run first.

        Raises:
            PromptError, SamplingError, AdapterError (ValueError): an argument is refused, or the id is in use.
        """
        if not isinstance(params, SamplingParams):
            raise PromptError(f"params is {show(params)}; give SamplingParams; LLM.encode and LLM.embed pool texts")
        if any(each.output.request_id == request_id for each in self._running.values()):
            raise PromptError(f"request_id is {show(request_id)}, which is the id of a running request")
        request = self.llm._request(prompt, params, lora_request, priority, tokenization_kwargs)
        output = RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=None,
            outputs=[],
            finished=False,
            lora_request=lora_request,
        )
        self._running[request.request_id] = _Running(params, output)
        try:
            self.llm.llm._client.submit([request], self._events.put, stream=True)
        except BaseException:
            del self._running[request.request_id]
            raise
        return request_id

    def step(self) -> list[RequestOutput]:
        """Waits for new tokens, and returns the outputs that have changed; [] if no request runs.

        An output contains the whole text so far; with RequestOutputKind.DELTA, only the new part. With FINAL_ONLY, a
        request has one output, when it ends.

        Raises:
            EngineError: a request failed; other requests continue. Outputs of the same step are returned first.
            EngineClosedError (EngineError): this process is a fork of the engine's process.
        """
        if self._errors:
            raise self._errors.pop(0)
        if not self._running:
            return []
        self._process.check()
        events = self._events.get()
        while not self._events.empty():
            events = [*events, *self._events.get()]
        changed: dict[str, RequestOutput] = {}
        for event in events:
            running = self._running.get(event.request_id)
            if running is None:  # the request was aborted
                continue
            if event.finished is not None:
                del self._running[event.request_id]
                if (error := event.finished.exception()) is not None:
                    self._errors.append(error)
                    continue
            if event.request_id not in changed and running.params.output_kind is RequestOutputKind.DELTA:
                running.parts.clear()
            changed[event.request_id] = running.after(event)
        outputs = [each for each in changed.values() if each.outputs]
        if self._errors and not outputs:
            raise self._errors.pop(0)
        return outputs

    def abort_request(self, request_ids: Iterable[str]) -> None:
        """Ends requests, which then get no more outputs. Unknown ids are ignored."""
        wanted = {request_ids} if isinstance(request_ids, str) else set(request_ids)
        found = [key for key, each in self._running.items() if each.output.request_id in wanted]
        for key in found:
            del self._running[key]
        self.llm.llm._client.abort(found)

    def has_unfinished_requests(self) -> bool:
        """Returns True while a request has not ended, or step() has an error to raise."""
        return bool(self._running or self._errors)

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of requests that have not ended."""
        return len(self._running)

    def get_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer of the model."""
        return self.llm.get_tokenizer()

    def close(self) -> None:
        """Ends all requests and frees the model."""
        self._running.clear()
        self.llm.close()

    def __getattr__(self, name: str) -> Any:
        raise absent(self, name, ABSENT)
