"""Llama: llama_cpp.Llama's constructor and methods over one engine that batches the calls of all threads."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from llamabatch.compat import chat as chats
from llamabatch.compat.callbacks import LogitsProcessorList, StoppingCriteriaList
from llamabatch.compat.completion import RANDOM_SEED, Arguments, Completion, TokenPieces, sampling_params
from llamabatch.compat.grammar import LlamaGrammar
from llamabatch.compat.options import LORA, check_further, engine_options, warn_once
from llamabatch.entrypoints.llm import LLM
from llamabatch.entrypoints.prompts import Prompt
from llamabatch.errors import ConfigError, PromptError, SamplingError
from llamabatch.gguf.header import read_header
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.gguf.resolve import fetch, local, resolve
from llamabatch.media.prompt import text_prompt
from llamabatch.request.media import IMAGE
from llamabatch.request.outputs import SequenceOutput
from llamabatch.request.sampling_params import SamplingParams
from llamabatch.utils.absent import absent
from llamabatch.utils.checks import integer, items, show
from llamabatch.utils.closing import Closing

Json = dict[str, Any]

# Keys: attributes of llama_cpp.Llama that do not exist here. They belong to its single sequence or show its settings.
# Values: what to use in their place.
_ONE_CONTEXT = "it belongs to the one sequence of llama_cpp.Llama; here many calls share the context"
ABSENT = {
    "eval": f"{_ONE_CONTEXT}; llm.generate and llm.score compute prompts",
    "sample": f"{_ONE_CONTEXT}; generate(tokens) yields sampled tokens",
    "save_state": f"{_ONE_CONTEXT}; llm.save_prefix(text, file) keeps a computed prefix",
    "load_state": f"{_ONE_CONTEXT}; llm.load_prefix(file) takes up a computed prefix",
    "scores": f"{_ONE_CONTEXT}; logprobs, and llm.score, give the model's probabilities of tokens",
    "eval_logits": f"{_ONE_CONTEXT}; logprobs give the model's probabilities of tokens",
    "input_ids": _ONE_CONTEXT,
    "eval_tokens": _ONE_CONTEXT,
    "n_tokens": _ONE_CONTEXT,
    "ctx": "llama.cpp's context belongs to the engine's thread",
    "model": "llama.cpp's model belongs to the engine; llm.vocab and metadata tell what it holds",
    "context_params": "llm.plan has the options in force",
    "model_params": "llm.plan has the options in force",
    "cache": "llm.plan.config.cache_prefix says whether prefixes are kept",
    "numa": "llm.plan has the options in force",
    "tensor_split": "llm.plan has the options in force",
    "lora_base": "the adapter is applied to the model as it is",
}


class Llama(Closing):
    """A GGUF model with llama_cpp.Llama's names and defaults. Calls from many threads run as one batch.

    Arguments have the same meaning as in llama_cpp.Llama; docs/from_llama_cpp_python.md lists the differences.
    `n_ctx` is the number of tokens that one call may use, rounded up to a multiple of 256 as in llama.cpp. The number
    of calls that run at once follows from memory, or from `n_slots`.

    Args:
        model_path: as LLM's `model`: a .gguf file, "tiny", or a name on the hub.
        n_threads, n_threads_batch: None means as many as the machine allows (llama_cpp: half of the cores for
            n_threads).
        flash_attn: True turns flash attention on. False turns it on only if it is fast on this machine.
        logits_all, embedding: accepted without effect; logprobs and embeddings need no option.
        verbose: has no effect. llama.cpp's messages go to the logger "llamabatch.llama_cpp".
        **kwargs: options of EngineConfig, such as n_slots=16. An unknown option is refused (llama_cpp ignores it).

    Attributes:
        llm: the LLM that does the work. It also has the functions that llama_cpp.Llama lacks.
        metadata: the values of the GGUF's header as texts, without lists.

    Raises:
        ConfigError, ModelFileError (both ValueError): an option is refused, or the file is missing or damaged.
        MemoryPlanError, SetupError, EngineError: as LLM.
    """

    def __init__(
        self,
        model_path: str,
        *,
        n_gpu_layers: int = 0,
        split_mode: int = 1,
        main_gpu: int = 0,
        tensor_split: list[float] | None = None,
        vocab_only: bool = False,
        use_mmap: bool = True,
        use_mlock: bool = False,
        kv_overrides: dict[str, bool | int | float | str] | None = None,
        seed: int = 4294967295,
        n_ctx: int = 512,
        n_batch: int = 512,
        n_ubatch: int = 512,
        n_threads: int | None = None,
        n_threads_batch: int | None = None,
        rope_scaling_type: int | None = -1,
        pooling_type: int = -1,
        attention_type: int = -1,
        rope_freq_base: float = 0.0,
        rope_freq_scale: float = 0.0,
        yarn_ext_factor: float = -1.0,
        yarn_attn_factor: float = 1.0,
        yarn_beta_fast: float = 32.0,
        yarn_beta_slow: float = 1.0,
        yarn_orig_ctx: int = 0,
        logits_all: bool = False,
        embedding: bool = False,
        offload_kqv: bool = True,
        flash_attn: bool = False,
        op_offload: bool | None = None,
        swa_full: bool | None = None,
        no_perf: bool = False,
        last_n_tokens_size: int = 64,
        lora_base: str | None = None,
        lora_scale: float = 1.0,
        lora_path: str | None = None,
        numa: bool | int = False,
        chat_format: str | None = None,
        chat_handler: Callable[..., Any] | None = None,
        draft_model: Any = None,
        tokenizer: Any = None,
        type_k: int | None = None,
        type_v: int | None = None,
        spm_infill: bool = False,
        verbose: bool = True,
        **kwargs: Any,
    ) -> None:
        given = _without_self(locals())
        del given["kwargs"]
        defaults = _defaults()
        check_further(kwargs, list(defaults))
        if not isinstance(model_path, (str, os.PathLike)):
            raise ConfigError(f"model_path is {show(model_path)}; give the path of a .gguf file, or 'tiny'")
        self._arguments = {**given, **kwargs}
        file = local(os.fspath(model_path))  # a name on the hub is looked up only once
        options = engine_options(given, defaults, read_header(resolve(file)).texts()) | kwargs
        if (mmproj := chats.mmproj_of(chat_handler)) is not None:
            options.setdefault("mmproj", mmproj)
        self._open(LLM(file, **options), given)

    def _open(self, llm: LLM, given: Mapping[str, Any]) -> None:
        """Stores an LLM, and the constructor's arguments for later calls."""
        self.llm = llm
        self._model = llm._client.model
        self.model_path = str(given["model_path"])
        self.verbose = given["verbose"]
        self.last_n_tokens_size = integer(ConfigError, "last_n_tokens_size", given["last_n_tokens_size"], -1, 2**31 - 1)
        self.n_batch = min(self.n_ctx(), integer(ConfigError, "n_batch", given["n_batch"], 1, 2**31 - 1))
        config = llm.plan.config
        self._is_in_child = config.isolate or config.strategy == "multi-instance"
        self.n_threads, self.n_threads_batch = config.n_threads, config.n_threads_batch
        self.lora_path, self.lora_scale = given["lora_path"], given["lora_scale"]
        self.kv_overrides, self.draft_model = given["kv_overrides"], given["draft_model"]
        self.spm_infill = given["spm_infill"]
        self.metadata = dict(self._model.metadata)
        self.chat_handler = given["chat_handler"]
        self.chat_format = given["chat_format"]
        has_own = self.chat_handler is None and config.mmproj is not None
        self._reads_pictures = has_own or chats.mmproj_of(self.chat_handler) is not None
        if self.chat_handler is None:
            self.chat_format = chats.format_of(self.chat_format, self.metadata)
        self._adapters = {LORA: float(self.lora_scale)} if self.lora_path else None
        self._seed = given["seed"] or RANDOM_SEED
        self._seed_lock = threading.Lock()
        self._token_pieces = TokenPieces(partial(self._model.piece, special=False), self.token_bos())

    @classmethod
    def _over(cls, llm: LLM, **changed: Any) -> Llama:
        """Makes a Llama over an existing LLM (a FakeLLM in tests). `changed` contains constructor arguments."""
        self = cls.__new__(cls)
        self._open(llm, {**_defaults(), "model_path": llm.plan.config.model, **changed})
        return self

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> Llama:
        """Loads a model from Hugging Face's hub, and fetches all its parts. LLM.from_pretrained describes the search.

        Args:
            repo_id: the repository, as "owner/repo".
            filename: a name or a pattern, such as "*q8_0.gguf".
            additional_files: names or patterns of further parts of the model. They are only checked, because all parts
                are fetched anyway.
            local_dir, local_dir_use_symlinks: not supported; the hub's cache stores the file.
            cache_dir: the folder of the cache; None: huggingface_hub's own.
            **kwargs: as for the constructor.

        Raises:
            ModelFileError (ValueError): no file or several files match. SetupError: huggingface_hub is not installed.
            ConfigError: local_dir is given.
        """
        if local_dir is not None:
            raise ConfigError(f"local_dir is {show(local_dir)}, which is not supported; give cache_dir or nothing")
        path = fetch(repo_id, filename, cache_dir=None if cache_dir is None else Path(cache_dir))
        beside = [each.name for each in path.parent.iterdir()]
        for pattern in additional_files or ():
            if not any(fnmatchcase(name, Path(pattern).name) for name in beside):
                raise ConfigError(f"additional_files has {show(pattern)}, but {path.name} has no such part")
        return cls(str(path), **kwargs)

    # --- completions ---

    def create_completion(
        self,
        prompt: str | list[int],
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama_cpp's default, never changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
    ) -> Any:
        """Continues a prompt.

        Args:
            prompt: a text or token ids. Names of special tokens in a text are read as those tokens.
            suffix: the text after a gap to fill. The vocabulary must have tokens for gaps (fim_pre, fim_suf, fim_mid).
            max_tokens: maximum of the output's tokens. None, 0 and negative numbers: only n_ctx is the limit.
            logprobs: the number of most likely tokens to return with each token, 0 to 1024; logits_all is not needed.
            seed: seed of the sampler; -1: random. None: derived from the previous call's seed, as in llama_cpp.
            stopping_criteria: called in the caller's thread with the token ids so far, and with NaN for logits.
            logits_processor: called in the engine's thread, for each token of this call.
            grammar: a LlamaGrammar of this package or of llama_cpp.
            tfs_z: changes nothing, as in llama_cpp.
            The other arguments are as in llama_cpp. Penalties use the newest last_n_tokens_size tokens of the output.

        Returns:
            A "text_completion" dictionary; with `stream` a generator of chunks. The request of a stream starts when the
            first chunk is asked for. Closing the generator ends the request.

        Raises:
            ValueError: a value is out of range, or the prompt leaves no room in n_ctx.
            EngineError: the engine failed. EngineClosedError: after close().
        """
        args = Arguments.of(locals())
        return self._chunks(args) if stream else self._completion(args)

    def __call__(
        self,
        prompt: str,
        suffix: str | None = None,
        max_tokens: int | None = 16,
        temperature: float = 0.8,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        logprobs: int | None = None,
        echo: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama_cpp's default, never changed
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        top_k: int = 40,
        stream: bool = False,
        seed: int | None = None,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
    ) -> Any:
        """Continues a prompt, as create_completion."""
        return self.create_completion(**_without_self(locals()))

    def create_chat_completion(
        self,
        messages: list[Any],
        functions: list[Any] | None = None,
        function_call: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        temperature: float = 0.2,
        top_p: float = 0.95,
        top_k: int = 40,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        stream: bool = False,
        stop: str | list[str] | None = [],  # noqa: B006  # llama_cpp's default, never changed
        seed: int | None = None,
        response_format: Any = None,
        max_tokens: int | None = None,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repeat_penalty: float = 1.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        model: str | None = None,
        logits_processor: LogitsProcessorList | None = None,
        grammar: LlamaGrammar | None = None,
        logit_bias: dict[int, float] | None = None,
        logprobs: bool | None = None,
        top_logprobs: int | None = None,
    ) -> Any:
        """Answers a conversation. Sampling arguments are as for create_completion.

        Args:
            messages: a list of {"role": …, "content": …}.
            functions, function_call: the older names of tools and tool_choice.
            tools: functions that the model may call, for the chat template.
            tool_choice: {"type": "function", "function": {"name": …}}: the answer is a call of this function. None,
                "auto" or "none": the answer is a text. If the model decides about calls, use llm.chat to read them.
            response_format: {"type": "json_object"}, optionally with "schema"; or OpenAI's {"type": "json_schema", …}.
            logprobs, top_logprobs: True and the number of most likely tokens to return with each token.

        Returns:
            A "chat.completion" dictionary; with `stream` a generator of chunks.

        Raises:
            ValueError: as create_completion; or the chat template refuses the conversation.
        """
        given = _without_self(locals())
        if self.chat_handler is not None and not self._reads_pictures:
            return self.chat_handler(llama=self, **given)
        all_tools, tool, form = chats.called_tool(functions, function_call, tools, tool_choice)
        form = form or chats.response_form(response_format)
        if self._reads_pictures:
            rendered, images = chats.pictured(self.chat_handler, self._model, self.metadata, messages, all_tools)
        else:
            rendered, images = chats.prompt_of(self._model, self.metadata, self.chat_format, messages, all_tools), []
        prompt: Any
        if images:
            prompt = {"prompt": rendered.text, "multi_modal_data": {"image": images}}
        else:
            prompt = self._model.tokenize(rendered.text, add_special=rendered.add_special, parse_special=True)
        stops = ([stop] if isinstance(stop, str) else list(stop or ())) + rendered.stop
        n_logprobs = top_logprobs if logprobs else None
        args = Arguments.of(given, prompt=prompt, stop=stops, logprobs=n_logprobs, form=form)
        return chats.chunks(self._chunks(args), tool) if stream else chats.whole(self._completion(args), tool)

    def create_chat_completion_openai_v1(self, *args: Any, **kwargs: Any) -> Any:
        """Answers a conversation. Returns ChatCompletion or ChatCompletionChunk objects of the openai package.

        Raises:
            ImportError: the openai package is not installed.
        """
        return chats.openai_v1(lambda: self.create_chat_completion(*args, **kwargs), bool(kwargs.get("stream")))

    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: LogitsProcessorList | None = None,
        stopping_criteria: StoppingCriteriaList | None = None,
        grammar: LlamaGrammar | None = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yields sampled tokens until n_ctx is full or the generator is closed. End-of-generation tokens are yielded,
        too; with a grammar, the first such token ends the output.

        Tokens are computed ahead of the caller. Each call is a sequence of its own, so reset=False and values sent to
        the generator are refused.

        Raises:
            ValueError: as create_completion.
        """
        if reset is not True:
            raise PromptError(f"reset is {show(reset)}; each call computes its whole input; leave it out")
        args = Arguments.of(locals(), prompt=[int(token) for token in tokens], temperature=temp, seed=self._seed)
        prompt, params, completion = self._request(args, ignore_eos=grammar is None)
        with self._pieces(prompt, params) as pieces:
            for token_id in completion.token_ids(pieces):
                if (yield token_id) is not None:
                    raise PromptError("tokens were sent to generate(); start another call with them behind the prompt")

    def _request(self, args: Arguments, *, ignore_eos: bool = False) -> tuple[Prompt, SamplingParams, Completion]:
        """Returns a prompt, its parameters, and a Completion for the dictionaries. Raises ValueError."""
        ids = self._prompt_ids(args)
        room = self.n_ctx() - len(ids)
        if room <= 0:
            raise PromptError(f"Requested tokens ({len(ids)}) exceed context window of {self.n_ctx()}")
        if args.stopping_criteria is not None and args.echo and args.logprobs is not None:
            raise SamplingError("stopping_criteria is given beside echo and logprobs; leave one of them out")
        if args.logprobs is not None:
            integer(SamplingError, "logprobs", args.logprobs, 0, 1024, ", or None")
        seed = self._draw_seed(args.seed)
        params = sampling_params(args, tuple(ids), room, seed, self.last_n_tokens_size, ignore_eos=ignore_eos)
        if params.processors and self._is_in_child:
            raise SamplingError(
                "a logits_processor is given, or logit_bias or a penalty is out of the native range: that runs as a "
                "Python function, which a child process cannot call; leave isolate and multi-instance out"
            )
        model = args.model if args.model is not None else self.model_path
        prompt: Prompt = {"prompt_token_ids": ids}
        if isinstance(args.prompt, Mapping):
            prompt = cast("Prompt", args.prompt)
        return prompt, params, Completion(args, tuple(ids), model, self._token_pieces, self.n_vocab())

    def _prompt_ids(self, args: Arguments) -> list[int]:
        """Returns the token ids of a prompt. With a suffix, the ids also contain the special tokens for infilling and
        the suffix."""
        model, prompt = self._model, args.prompt
        if isinstance(prompt, str):
            ids = model.tokenize(prompt, add_special=args.suffix is None, parse_special=args.suffix is None)
        elif isinstance(prompt, Mapping):
            pictures = [(IMAGE, each) for each in prompt["multi_modal_data"]["image"]]
            ids = list(text_prompt(model, prompt["prompt"], pictures).token_ids)
        else:
            found = items(prompt, 2**24)
            if found is None:
                raise PromptError(f"prompt is {show(prompt)}; give a text, or token ids")
            ids = [integer(PromptError, "a token id of prompt", token, 0, self.n_vocab() - 1) for token in found]
        if args.suffix is None:
            return ids
        if not isinstance(args.suffix, str):
            raise PromptError(f"suffix is {show(args.suffix)}; give a text, or None")
        marks = [model.special_ids.get(name) for name in ("fim_pre", "fim_suf", "fim_mid")]
        before, behind, middle = ([] if mark is None else [mark] for mark in marks)
        if None in marks:
            raise PromptError(
                f"suffix is {show(args.suffix)}, but the vocabulary has no tokens for a gap (fim_pre, fim_suf, fim_mid)"
            )
        rest = model.tokenize(args.suffix, add_special=False) if args.suffix else []
        bos = [] if model.vocabulary.bos is None else [model.vocabulary.bos]
        parts = [[*before, *ids], [*behind, *rest]]
        return [*bos, *itertools.chain(*(reversed(parts) if self.spm_infill else parts)), *middle]

    def _completion(self, args: Arguments) -> Json:
        prompt, params, completion = self._request(args)
        if args.stopping_criteria is not None:
            with self._pieces(prompt, params) as pieces:
                return completion.until_stopped(pieces)
        [output] = self.llm.generate(prompt, params, adapters=self._adapters)
        return completion.whole(output)

    def _chunks(self, args: Arguments) -> Iterator[Json]:
        prompt, params, completion = self._request(args)
        with self._pieces(prompt, params) as pieces:
            yield from completion.chunks(pieces)

    def _pieces(
        self, prompt: Prompt, params: SamplingParams
    ) -> contextlib.closing[Generator[SequenceOutput, None, None]]:
        """Returns the stream of a request. Leaving the stream early aborts the request."""
        pieces = self.llm.stream(prompt, params, adapters=self._adapters)
        return contextlib.closing(cast("Generator[SequenceOutput, None, None]", pieces))

    def _draw_seed(self, seed: int | None) -> int | None:
        """Returns the seed of a call; None: random. As in llama_cpp, a missing seed is derived from the last seed."""
        with self._seed_lock:
            if seed is None:
                seed = random.Random(self._seed).randint(0, 2**32)  # llama_cpp's own rule
            else:
                seed = integer(SamplingError, "seed", seed, -(2**63), 2**64 - 1, ", or None")
            self._seed = seed
        seed &= 0xFFFFFFFF
        return None if seed == RANDOM_SEED else seed

    # --- embeddings ---

    def create_embedding(self, input: str | list[str], model: str | None = None) -> Json:
        """Returns the embeddings of texts as a dictionary of OpenAI's API. Raises as embed."""
        texts = input if isinstance(input, list) else [input]
        vectors, count = self.embed(texts, return_count=True)
        return {
            "object": "list",
            "data": [{"object": "embedding", "embedding": each, "index": i} for i, each in enumerate(vectors)],
            "model": self.model_path if model is None else model,
            "usage": {"prompt_tokens": count, "total_tokens": count},
        }

    def embed(
        self, input: str | list[str], normalize: bool = False, truncate: bool = True, return_count: bool = False
    ) -> Any:
        """Returns a vector (a list of numbers) for each text, or for each token if the pooling is "none".

        Args:
            input: a text or a list of texts; embedding=True is not needed.
            normalize: scale each vector to length 1.
            truncate: True cuts a text to its first n_batch tokens; False refuses a longer text.
            return_count: return (vectors, number of tokens).

        Raises:
            ValueError: a text has no tokens; a text is too long and `truncate` is False; the model gives no embeddings.
        """
        texts = [input] if isinstance(input, str) else items(input, 2**31)
        if texts is None or not all(isinstance(text, str) for text in texts):
            raise PromptError(f"input is {show(input)}; give a text, or a list of texts")
        ids = [self._model.tokenize(text) for text in texts]
        longest = max(map(len, ids), default=0)
        if not truncate and longest > self.n_batch:
            raise PromptError(f"Requested tokens ({longest}) exceed batch size of {self.n_batch}")
        ids = [each[: self.n_batch] for each in ids]
        made = self.llm.embed(ids, normalize=normalize, adapters=self._adapters) if ids else []
        vectors = [each.tolist() for each in made]
        found = vectors[0] if isinstance(input, str) else vectors
        return (found, sum(map(len, ids))) if return_count else found

    # --- tokens and facts ---

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = False) -> list[int]:
        """Turns a text into token ids.

        Args:
            text: the text in UTF-8.
            add_bos: add the vocabulary's special tokens at the ends of a text.
            special: read names of special tokens as those tokens.

        Raises:
            ValueError: `text` is not bytes.
        """
        if not isinstance(text, (bytes, bytearray)):
            raise PromptError(f"text is {show(text)}; give bytes, as 'text'.encode()")
        return self._model.tokenize(text.decode("utf-8", "replace"), add_special=add_bos, parse_special=special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Turns token ids into bytes of text. A space after a leading BOS is left out.

        Args:
            prev_tokens: changes nothing, as with llama_cpp's own tokenizer.
            special: write the names of special tokens.

        Raises:
            ValueError: an id is outside the vocabulary.
        """
        ids = [integer(PromptError, "a token id", token, 0, self.n_vocab() - 1) for token in tokens]
        data = b"".join(self._model.piece(token, special=special) for token in ids)
        return data.removeprefix(b" ") if ids and ids[0] == self.token_bos() else data

    def tokenizer(self) -> LlamaTokenizer:
        """Returns the tokenizer of the model."""
        return LlamaTokenizer(self)

    @property
    def tokenizer_(self) -> LlamaTokenizer:
        """The tokenizer of the model."""
        return LlamaTokenizer(self)

    def set_seed(self, seed: int) -> None:
        """Sets the first seed. Later calls without a seed derive their seeds from it."""
        with self._seed_lock:
            self._seed = integer(SamplingError, "seed", seed, -(2**63), 2**64 - 1)

    def set_cache(self, cache: Any) -> None:
        """Changes nothing: prompts with the same beginning share KV cells without a cache object."""
        warn_once(["set_cache (prefixes are kept without it; cache_prefix=False turns that off)"])

    def reset(self) -> None:
        """Does nothing: each call is a sequence of its own."""

    def n_ctx(self) -> int:
        """Returns the number of tokens that one call may use."""
        return self.llm.n_ctx

    def n_vocab(self) -> int:
        """Returns the number of tokens of the vocabulary."""
        return self._model.n_vocab

    def n_embd(self) -> int:
        """Returns the length of an embedding."""
        declared = self.metadata.get(f"{self.metadata.get('general.architecture', '')}.embedding_length", "")
        return int(declared) if declared.isdigit() else self._model.n_embd_out

    def token_bos(self) -> int:
        """Returns the token that begins a text; -1 if the model has none."""
        return self._model.special_ids.get("bos", -1)

    def token_eos(self) -> int:
        """Returns the token that ends a text; -1 if the model has none."""
        return self._model.special_ids.get("eos", -1)

    def token_nl(self) -> int:
        """Returns the token of a line break; -1 if the model has none."""
        return self._model.special_ids.get("nl", -1)

    def pooling_type(self) -> int:
        """Returns llama.cpp's number for the pooling."""
        return POOLINGS.index(self._model.pooling)

    @staticmethod
    def logits_to_logprobs(logits: npt.NDArray[np.single] | list[Any], axis: int = -1) -> npt.NDArray[np.single]:
        """Returns the log softmax of logits along an axis, float32."""
        given = np.asarray(logits, np.single)
        highest = np.max(given, axis=axis, keepdims=True)
        shifted = given - np.where(np.isfinite(highest), highest, np.single(0))
        with np.errstate(divide="ignore"):
            found: npt.NDArray[np.single] = shifted - np.log(np.exp(shifted).sum(axis=axis, keepdims=True))
        return found

    @staticmethod
    def longest_token_prefix(a: Sequence[int], b: Sequence[int]) -> int:
        """Returns the length of the common beginning of two token lists."""
        return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))

    # --- lifetime ---

    def close(self) -> None:
        """Ends all calls and frees the model. May be called twice."""
        llm = self.__dict__.get("llm")  # None if the constructor raised
        if llm is not None:
            llm.close()

    def __getstate__(self) -> Json:
        return self._arguments

    def __setstate__(self, state: Json) -> None:
        self.__init__(**state)  # type: ignore[misc]  # a copy loads the model again, as in llama_cpp

    def __getattr__(self, name: str) -> Any:
        raise absent(self, name, ABSENT)

    def __repr__(self) -> str:
        return f"Llama({self.__dict__.get('llm')!r})"


class LlamaTokenizer:
    """The tokenizer of a Llama, with llama_cpp's names."""

    def __init__(self, llama: Llama) -> None:
        self._llama = llama

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """Turns a text into token ids, as Llama.tokenize, but reads names of special tokens by default."""
        return self._llama.tokenize(text, add_bos, special)

    def detokenize(self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False) -> bytes:
        """Turns token ids into bytes of text, as Llama.detokenize."""
        return self._llama.detokenize(tokens, prev_tokens, special)

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """Returns the token ids of a text."""
        return self.tokenize(text.encode("utf-8", "ignore"), add_bos, special)

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of token ids. Bytes that are not valid UTF-8 are left out."""
        return self.detokenize(tokens).decode("utf-8", "ignore")


def _defaults() -> dict[str, Any]:
    return dict(Llama.__init__.__kwdefaults__ or {})


def _without_self(given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a method from its locals()."""
    return {name: value for name, value in given.items() if name != "self"}
