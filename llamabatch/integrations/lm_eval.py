"""The language model evaluation harness, in process: LlamaBatchLM is an LM of lm_eval over one LLM.

lm_eval passes the requests of one kind, from all tasks, in one call. This call becomes one call of the LLM.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import ConfigError, PromptError
from llamabatch.integrations import needs
from llamabatch.integrations.shared import SharedEngine
from llamabatch.llama.kv_state import fingerprint
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.checks import boolean, integer, show
from llamabatch.utils.progress import ProgressBar
from llamabatch.utils.version import __version__

with needs("lm_eval", "lm-eval"):
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import maybe_truncate, normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from typing_extensions import Unpack

    from llamabatch.config import EngineOptions

T = TypeVar("T", bound="LlamaBatchLM")

SEED = 1234  # lm_eval's own default seed
_OF_THE_HARNESS = ("batch_size", "max_batch_size", "device")  # ignored arguments of lm_eval; the plan decides them
_TokenPair = tuple[list[int], list[int]]


@register_model("llamabatch")
class LlamaBatchLM(TemplateLM):
    """An LM of lm_eval over a GGUF model, for simple_evaluate. Importing this module also registers it as "llamabatch".

    ::

        results = lm_eval.simple_evaluate(LlamaBatchLM("model.gguf", n_slots=32), tasks=["arc_easy"])

    As with other models of the harness, the name of a special token in a text becomes the token, and spaces at the end
    of a context become part of the continuation. A text longer than n_ctx loses its beginning, with a warning.

    Args:
        model: as for LLM; or an LLM, which close() leaves open.
        pretrained: lm_eval's name for `model`; give one of the two.
        max_gen_toks: the number of tokens that a request may generate if it sets no limit itself.
        think_end_token: the text that ends the thinking, such as "</think>". The answer is the text after it.
        enable_thinking: the chat template's variable of this name; None: the variable is not set.
        **options: as for LLM, but the default seed is 1234, as for other models of lm_eval.

    Raises:
        ConfigError, ModelFileError, MemoryPlanError, SetupError, EngineError: as for LLM.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | LLM | None = None,
        *,
        pretrained: str | None = None,
        max_gen_toks: int = 256,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        super().__init__()
        if (model is None) == (pretrained is None):
            raise ConfigError("give the model once, as `model` or as lm_eval's name `pretrained`")
        self._max_gen_toks = integer(ConfigError, "max_gen_toks", max_gen_toks, 1, 2**31 - 1)
        if enable_thinking is not None:
            boolean(ConfigError, "enable_thinking", enable_thinking)
        self._template_kwargs = None if enable_thinking is None else {"enable_thinking": enable_thinking}
        self._think_end = think_end_token
        given: Any = pretrained if model is None else model
        self._shared = SharedEngine(given, {**options} if isinstance(given, LLM) else {"seed": SEED, **options})
        self._llm = self._shared.llm

    @classmethod
    def create_from_arg_obj(
        cls: type[T], arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> T:
        """Makes the LM from --model_args. Ignores batch_size, max_batch_size and device: the plan decides them."""
        given = {**arg_dict, **{name: value for name, value in (additional_config or {}).items() if value is not None}}
        return cls(**{name: value for name, value in given.items() if name not in _OF_THE_HARNESS})

    @classmethod
    def create_from_arg_string(cls: type[T], arg_string: str, additional_config: Mapping[str, Any] | None = None) -> T:
        """Makes the LM from a text such as "key=value,key=value"; see create_from_arg_obj."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    @property
    def llm(self) -> LLM:
        """The LLM that runs the requests."""
        return self._llm

    @property
    def max_length(self) -> int:
        """The maximum number of tokens of a context and its continuation together."""
        return self._llm.n_ctx

    @property
    def max_gen_toks(self) -> int:
        """The number of tokens that a request may generate if it sets no limit itself."""
        return self._max_gen_toks

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text. Raises ConfigError if the model has none."""
        found = self._llm.vocab.eos_token_id
        if found is None:
            raise ConfigError("this model has no EOS token")
        return found

    @property
    def prefix_token_id(self) -> int:
        """The token in place of an empty context: BOS, or EOS if the model has no BOS."""
        bos = self._llm.vocab.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """The name that lm_eval's cache of requests uses for the tokenizer and its chat template."""
        path = self._llm._client.model.path
        return f"{path.name}-{fingerprint(path)}"  # other models may have files of the same name

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the model's own template for chat_template=True, None for False. Raises ConfigError for a text."""
        if isinstance(chat_template, str):
            raise ConfigError(f"chat_template is {show(chat_template)}; a GGUF has one template: give True")
        return self._llm._client.model.chat_template if chat_template else None

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the prompt of a conversation. With add_generation_prompt=False, the answer continues the last
        message."""
        return self._llm.apply_chat_template(
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            chat_template_kwargs=self._template_kwargs,
        )

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Returns the tokens of a text. add_special_tokens=None: adds BOS if the model needs a BOS and the text does
        not begin with one."""
        special = add_special_tokens
        if special is None:
            bos = self._llm.vocab.bos_token_id
            special = bos is None or not string.startswith(self._llm.vocab.token(bos))
        return self._llm.tokenize(string, add_special=special, parse_special=True)

    def tok_decode(self, tokens: Sequence[int], **kwargs: Any) -> str:
        """Returns the text of tokens."""
        return self._llm.detokenize(tokens)

    def _encode_pair(self, context: str, continuation: str) -> _TokenPair:
        """Encodes a pair as the harness does. If successive pairs have the same context, tokenizes it only once."""
        n_spaces = len(context) - len(context.rstrip())
        if n_spaces:
            context, continuation = context[:-n_spaces], context[-n_spaces:] + continuation
        if self._last[0] != context:
            self._last = (context, self.tok_encode(context))
        context_ids = self._last[1]
        return context_ids, self.tok_encode(context + continuation)[len(context_ids) :]

    _last: tuple[str | None, list[int]] = (None, [])

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = self._scored([(context, continuation) for _, context, continuation in requests], disable_tqdm)
        for (key, _, _), answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", key, answer)
        return found

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Returns the logprob of each text. Splits a long text into windows of n_ctx tokens that overlap by one token.
        All windows run in one call."""
        windows: list[list[_TokenPair]] = []
        for request in requests:
            tokens = self.tok_encode(request.args[0], add_special_tokens=False)
            found = get_rolling_token_windows(
                tokens, prefix_token=self.prefix_token_id, max_seq_len=self.max_length - 1, context_len=1
            )
            windows.append([make_disjoint_window(window) for window in found])
        scores = iter(self._scored([window for each in windows for window in each], disable_tqdm))
        sums = []
        for request, each in zip(requests, windows, strict=True):
            sums.append(sum(next(scores)[0] for _ in each))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, sums[-1])
        return sums

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Returns the continuation of each context, from one call. Adds each continuation to lm_eval's cache as soon as
        it ends."""
        prepared = [self._prepared(*request.args) for request in requests]
        texts = [""] * len(requests)
        if not requests:
            return texts
        prompts, params = [prompt for prompt, _, _ in prepared], [one for _, one, _ in prepared]
        with ProgressBar(len(requests), not disable_tqdm) as bar:
            for index, output in self._llm.as_completed(prompts, params, errors="raise"):
                text = postprocess_generated_text(output.text, prepared[index][2], self._think_end)
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
                bar.advance(len(output.token_ids))
        return texts

    def get_model_info(self) -> dict[str, Any]:
        """Returns the facts about the model that lm_eval writes into its results."""
        config = self._llm.plan.config
        return {
            "model_path": self.tokenizer_name,
            "model_name": str(self._llm.metadata.get("general.name", self.tokenizer_name)),
            "llamabatch_version": __version__,
            "n_ctx": config.n_ctx,
            "n_slots": config.n_slots,
            "strategy": config.strategy,
        }

    def close(self) -> None:
        """Closes the engine, unless it belongs to an LLM passed in."""
        self._shared.close()

    def _scored(self, pairs: Sequence[_TokenPair], disable_tqdm: bool) -> list[tuple[float, bool]]:
        """Returns the logprob of each continuation, and True if greedy sampling would give the continuation."""
        groups: dict[tuple[int, ...], list[int]] = {}
        continuations: list[list[int]] = []
        found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)  # a continuation without tokens keeps this result
        for number, (context, continuation) in enumerate(pairs):
            kept, continuation = self._fitted(context, continuation)
            continuations.append(continuation)
            if continuation:
                groups.setdefault(tuple(kept), []).append(number)
        if groups:
            questions = [(list(head), [continuations[number] for number in group]) for head, group in groups.items()]
            scores = self._llm.score(questions, errors="raise", progress=not disable_tqdm)
            for group, scored in zip(groups.values(), scores, strict=True):
                for number, score in zip(group, scored, strict=True):
                    found[number] = score.logprob, score.is_greedy
        return found

    def _fitted(self, context: list[int], continuation: list[int]) -> _TokenPair:
        """Cuts the beginning of the context so that context and continuation fit in max_length. Always keeps the last
        token of the context. Raises PromptError."""
        if len(continuation) >= self.max_length:
            raise PromptError(
                f"a continuation has {len(continuation):,} tokens; at most {self.max_length - 1:,} fit in n_ctx: "
                "give a larger n_ctx"
            )
        excess = len(context) + len(continuation) - self.max_length
        if excess <= 0:
            return context, continuation
        kept, _ = maybe_truncate(context, max_gen_toks=len(continuation), max_model_len=self.max_length)
        return kept, continuation

    def _prepared(self, context: str, gen_kwargs: Mapping[str, Any]) -> tuple[list[int], SamplingParams, list[str]]:
        """Returns the tokens of a prompt, its parameters, and the stop texts of its answer."""
        given: dict[str, Any] = dict(normalize_gen_kwargs(copy.deepcopy(dict(gen_kwargs)), self._max_gen_toks))
        until = [each for each in given.pop("until") if each]
        n_tokens: int = given.pop("max_gen_toks")
        given.pop("do_sample")  # normalize_gen_kwargs has turned False into a temperature of 0
        if (beams := given.pop("num_beams", 1)) != 1:
            raise ConfigError(f"num_beams is {show(beams)}; there is no beam search here: 1 is allowed")
        given.setdefault("temperature", 0.0)
        tokens, n_tokens = maybe_truncate(
            self.tok_encode(context), n_tokens, self.max_length, shrink_gen_toks=n_tokens >= self.max_length
        )
        stop = [] if self._think_end else until  # a stop text within the thinking must not end the answer
        return tokens, SamplingParams(max_tokens=n_tokens, stop=stop, **given), until
