"""The body of /v1/completions, read without HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from llamabatch.engine.validation import check_length
from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError, SamplingError
from llamabatch.jobs.input.lines import text_or_ids
from llamabatch.server.bodies import RULES, Body, Field, Fields, Json, Rules, reads
from llamabatch.server.openai.chat_body import with_text_biases
from llamabatch.server.openai.generation import GENERATION, Generation, read_generation
from llamabatch.utils.checks import integer, show

Prompt = str | tuple[int, ...]

MAX_PROMPTS = 16_384  # of a body

# Values of SamplingParams where neither a body nor the server has one: those of OpenAI's documentation.
USUAL: Mapping[str, Any] = {"max_tokens": 16}

PROMPT_SCHEMA: Json = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer", "minimum": 0}}, "minItems": 1},
    ]
}

COMPLETION: Fields = {
    **GENERATION,
    "prompt": Field(PROMPT_SCHEMA, "a text, token ids, or a list of them"),
    "echo": Field({"type": ["boolean", "null"]}, "the answer begins with the prompt, and has its logprobs, too"),
    "max_tokens": Field(
        {"type": ["integer", "null"], "minimum": -1},
        "tokens to generate at most; 0: none; -1: until the model stops or the request has used its context",
    ),
    "logprobs": Field(
        {"type": ["integer", "boolean", "null"], "minimum": -1, "maximum": 1024},
        "give the logprob of each token, and of so many likeliest",
    ),
    "add_special_tokens": Field({"type": ["boolean", "null"]}, "false: a text gets no token at its beginning"),
}


@dataclass(frozen=True)
class CompletionBody(Generation):
    """A completion as asked for.

    Attributes:
        prompts: texts and token ids, one or several.
        echo: the answer begins with the prompt; its logprobs are asked for where those of the output are.
        no_output: nothing is generated (max_tokens 0): what one step brings is left out of the answer.
        prompt_logprobs: the caller asks for vLLM's prompt_logprobs in each choice.
        add_special: a text gets the special tokens of its vocabulary, as BOS.
    """

    prompts: tuple[Prompt, ...] = ()
    echo: bool = False
    no_output: bool = False
    prompt_logprobs: bool = False
    add_special: bool = True

    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """The requests, one for each prompt. Raises InputError.

        Args:
            loaded: names of the adapters in the order of llama-server's ids.
        """
        longest = None if self.params.overflow == "truncate" else processor.n_ctx
        given = as_prompts(processor, self.prompts, add_special=self.add_special, longest=longest)
        return processor.prompts(given, with_text_biases(self, processor), self.adapter_scales(loaded), "raise")


def as_prompts(
    processor: InputProcessor, prompts: Sequence[Prompt], *, add_special: bool = True, longest: int | None = None
) -> Any:
    """Prompts in the form of InputProcessor.prompts: alone, or a list of several.

    <|im_end|> and its like in a text are the tokens that they name, as in vLLM and llama-server: callers of both write
    the template of a chat into a prompt. A text that begins with BOS gets no second one.

    Args:
        add_special: put BOS in front where the model wants it.
        longest: tokens that a text may have; None: any number.

    Raises:
        ContextLengthError: a text has more. A look at each of a million tokens would hold other requests up.
    """
    bos, found = processor.bos_text, []
    for place, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            wants = add_special and not (bos and prompt.startswith(bos))
            ids = processor.tokenize(prompt, wants, True)
            if longest is not None:
                check_length(len(ids), longest, f"prompts[{place}]: " if len(prompts) > 1 else "")
            found.append({"prompt": prompt, "prompt_token_ids": ids})
        else:
            found.append({"prompt_token_ids": list(prompt)})
    return found if len(found) > 1 else found[0]


@reads
def read_completion(body: Mapping[str, Any], rules: Rules = RULES) -> CompletionBody:
    """The CompletionBody of a body. Raises ApiError, whose message names the field, its value and the allowed ones."""
    given = Body(body, COMPLETION, rules)
    prompts = read_prompts("prompt", given.needed("prompt", "a text, token ids, or a list of them"))
    echo, add_special = given.boolean("echo"), given.boolean("add_special_tokens", True)
    no_output = generates_nothing(given)
    generation = read_generation(given, rules, USUAL)
    params = generation["params"]
    wanted = params.prompt_logprobs is not None
    if no_output and params.n_copies > 1:
        raise SamplingError(f"n is {params.n_copies} with max_tokens 0, which generates nothing; leave n out")
    if echo and params.logprobs is not None and not wanted:
        generation["params"] = replace(params, prompt_logprobs=params.logprobs)
    own: dict[str, Any] = {"echo": echo, "no_output": no_output, "prompt_logprobs": wanted, "add_special": add_special}
    return CompletionBody(prompts=prompts, **own, **generation)


def generates_nothing(body: Body) -> bool:
    """True for a limit of 0 tokens, which becomes 1: a request that scores its prompt takes one step."""
    for name in ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"):
        if name in body and (value := body.take(name)) is not None:
            limit = integer(SamplingError, name, value, -1, 2**31 - 1)
            body.put(name, limit or 1)
            if limit == 0:
                return True
    return False


def read_prompts(name: str, given: object) -> tuple[Prompt, ...]:
    """One prompt or several: texts and token ids. Raises PromptError.

    Args:
        name: of the field, for messages.
    """
    if isinstance(given, list) and given and not _is_ids(given):
        if len(given) > MAX_PROMPTS:
            raise PromptError(f"{name} is a list of {len(given)}; at most {MAX_PROMPTS} are allowed")
        return tuple(text_or_ids(f"{name}[{index}]", each) for index, each in enumerate(given))
    if not isinstance(given, (str, list)):
        raise PromptError(f"{name} is {show(given)}; give a text, token ids, or a list of them")
    return (text_or_ids(name, given),)


def _is_ids(given: list[Any]) -> bool:
    return all(isinstance(each, (int, float)) for each in given)
