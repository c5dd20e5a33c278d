"""The body of /v1/completions and its reader, without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import SamplingError
from llamabatch.server.request.body import BOOLEAN, RULES, Body, Field, Fields, Rules, reads
from llamabatch.server.request.generation import Generation, read_generation
from llamabatch.server.request.generation_fields import GENERATION
from llamabatch.server.request.prompts import PROMPT_SCHEMA, Prompt, as_prompts, read_prompts

_USUAL_TOKENS = 16  # OpenAI's documented limit; it applies if neither the body nor the server sets a limit

COMPLETION: Fields = {
    **GENERATION,
    "prompt": Field(PROMPT_SCHEMA, "a text, token ids, or a list of them"),
    "echo": Field(BOOLEAN, "the answer begins with the prompt, and has the prompt's logprobs"),
    "max_tokens": Field(
        {"type": ["integer", "null"], "minimum": -1},
        "tokens to generate at most; 0: none; -1: until the model stops or the request has used its context",
    ),
    "logprobs": Field(
        {"type": ["integer", "boolean", "null"], "minimum": -1, "maximum": 1024},
        "return the logprob of each token, and of this many likeliest tokens",
    ),
    "add_special_tokens": Field(BOOLEAN, "false: no BOS token before a text"),
}


@dataclass(frozen=True)
class CompletionBody(Generation):
    """A request for completions.

    Attributes:
        prompts: one or several prompts, each a text or token ids.
        echo: the response begins with the prompt. If the output has logprobs, the prompt has logprobs as well.
        prompt_logprobs: each choice has vLLM's prompt_logprobs.
        add_special: a text gets the special tokens of the vocabulary, such as BOS.
    """

    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    prompt_logprobs: bool = False
    add_special: bool = True

    @property
    def n_prompts(self) -> int:
        return len(self.prompts)

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns one request for each prompt. Raises InputError.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.
        """
        longest = None if self.cuts else processor.n_ctx
        given = as_prompts(processor, self.prompts, add_special=self.add_special, longest=longest)
        return processor.prompts(given, self.params_for(processor), self.adapter_scales(loaded), "raise")


@reads
def read_completion(body: Mapping[str, Any], rules: Rules = RULES) -> CompletionBody:
    """Reads a CompletionBody from a request body. Raises ApiError with the field, its value and the allowed values."""
    given = Body(body, COMPLETION, rules)
    prompts = read_prompts("prompt", given.needed("prompt", "a text, token ids, or a list of them"))
    echo, add_special = given.boolean("echo"), given.boolean("add_special_tokens", True)
    generation = read_generation(given, rules, max_tokens=_USUAL_TOKENS)
    params = generation["params"]
    wanted = params.prompt_logprobs is not None
    if generation["no_output"] and params.n_copies > 1:
        raise SamplingError(f"n is {params.n_copies} with max_tokens 0, which generates nothing; leave n out")
    if echo and params.logprobs is not None and not wanted:
        generation["params"] = replace(params, prompt_logprobs=params.logprobs)
    own: dict[str, Any] = {"echo": echo, "prompt_logprobs": wanted, "add_special": add_special}
    return CompletionBody(prompts=prompts, **own, **generation)
