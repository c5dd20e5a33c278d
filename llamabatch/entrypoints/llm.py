"""LLM: the synchronous entry point. A list of prompts in, a list of results out."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from llamabatch.chat.conversation import ChatKeywords, TemplateKeywords, chat_options
from llamabatch.chat.messages import Conversation
from llamabatch.client.base import Heartbeat
from llamabatch.client.connect import connect
from llamabatch.client.front_client import FrontClient
from llamabatch.config import EngineConfig
from llamabatch.engine.stats import EngineStats
from llamabatch.entrypoints.classification import Classification, RerankResult, check_rerank, classified, reranked
from llamabatch.entrypoints.input_processor import Adapters, InputProcessor, OneAdapters, Params, place_of
from llamabatch.entrypoints.prompts import Prompt
from llamabatch.entrypoints.saved_prefix import CROWDED, ONE_TOKEN, TRIES, tokens_to_save
from llamabatch.entrypoints.scoring import Pairs, Score, Scoring
from llamabatch.entrypoints.submission import ErrorPolicy, Submission, Vector, token_vectors, vectors
from llamabatch.entrypoints.title import described, unpicklable
from llamabatch.errors import EngineError, InputError, LlamaBatchError
from llamabatch.gguf.header import MetadataValue, metadata_of
from llamabatch.gguf.resolve import fetch
from llamabatch.planning.capacity import Plan
from llamabatch.request.adapters import adapter_path
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.vocab import Vocab
from llamabatch.utils.absent import absent
from llamabatch.utils.aliases import also_named, model_named, takes_keywords, takes_names
from llamabatch.utils.checks import boolean
from llamabatch.utils.late_import import late_import
from llamabatch.utils.lifetime import ForkGuard
from llamabatch.utils.other_names import OF_LLM
from llamabatch.utils.paths import absolute
from llamabatch.utils.progress import ProgressBar, ShowProgress

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from llamabatch.config import EngineOptions
    from llamabatch.monitor.monitor import Monitor
    from llamabatch.monitor.snapshot import Snapshot

T = TypeVar("T")


class LLM:
    """A GGUF model that runs many prompts at once. Its methods may be called from several threads.

    Args:
        model: path of a .gguf file (the first, of several parts), "tiny" for the bundled one, or a name on the hub as
            "hf:owner/repo:Q4_K_M".
        **options: see EngineConfig, which understands names of vLLM and llama_cpp.Llama, too: model_path, max_model_len
            and max_num_seqs, say. Unknown ones are refused with the nearest name, by an error that is a TypeError, too.
            `plan` has the values that "auto" became.

    Raises:
        ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError.
    """

    @takes_names(model_named)
    def __init__(self, model: str | os.PathLike[str], **options: Unpack[EngineOptions]) -> None:
        self._client: FrontClient = connect(EngineConfig.from_options(model, options))

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None = None,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """An LLM of a model on Hugging Face's hub, downloaded unless it is in huggingface_hub's cache; needs the extra
        `llamabatch[hub]`. LLM("hf:owner/repo:Q4_K_M") is its short form.

        Args:
            repo_id: "owner/repo".
            filename: a pattern as "*Q4_K_M.gguf", or a quantisation as "Q4_K_M"; None: the only model there. Of a
                model in several parts all are fetched.
            revision: branch, tag or commit; None: main.
            cache_dir: None: huggingface_hub's own.
            local_files_only: use the cache alone, as with HF_HUB_OFFLINE=1.
            **options: as for LLM.

        Raises:
            ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError: as LLM. ModelFileError also if no
                file or several match, with their names; SetupError also without huggingface_hub.
        """
        path = fetch(repo_id, filename, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        return cls(path, **options)

    _vocab: Vocab | None = None
    _closed = False

    @property
    def n_ctx(self) -> int:
        """Tokens that one request may use, prompt and output together."""
        return self._client.plan.config.n_ctx

    @property
    def vocab(self) -> Vocab:
        """The vocabulary: its size, its tokens by id and by name, its special tokens."""
        with self._client.awake():
            if self._vocab is None or self._vocab.source is not self._client.model:  # there was a sleep
                self._vocab = Vocab(self._client.model)
            return self._vocab

    @property
    def metadata(self) -> Mapping[str, MetadataValue]:
        """The values of the GGUF's header by their keys, such as "general.architecture": numbers, texts, and each array
        as a MetadataArray.

        Raises:
            ModelFileError: the file is gone since it was loaded.
        """
        return metadata_of(self._client.model.header)

    @property
    def plan(self) -> Plan:
        """The options in force, the memory they take, and why each open one got its value."""
        return self._client.plan

    @also_named(place_of, sampling_params="params", use_tqdm="progress")  # vLLM's names
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        progress: ShowProgress = None,
    ) -> list[RequestOutput]:
        """Continues prompts.

        Args:
            prompts: one prompt or a list; each a text, the token ids of one, {"prompt": text} or
                {"prompt_token_ids": ids}.
            params: SamplingParams, or a mapping of their fields and aliases: one for all, or a list with one for
                each; None: the defaults.
            adapters: {name: scale} of loaded adapters (LLM(..., adapters=…), load_adapter): one for all, or a list
                with one for each; None: the model as it is.
            errors: the effect of a prompt that fails, be it refused or ended by an error. Its output has finish_reason
                "error" and `error` set, and the others finish. "warn": one PromptWarning at the end; the first error is
                raised if all failed, as an only prompt does. "raise": the first error is raised as soon as it is known,
                and the rest is aborted. "return": neither. The exception raised has the outputs so far in `outputs`.
            progress: True: a progress bar, in a notebook, and on stderr where that is a terminal; False: none; None: a
                bar in a notebook, for a list. A function gets calls progress(done, total), on the caller's thread; an
                exception in it ends the call.

        Returns:
            One RequestOutput a prompt, in the order of the prompts.

        Raises:
            PromptError: `prompts` holds something else (conversations, say), or a prompt cannot be
                run. SamplingError, AdapterError: its parameters or adapters. EngineError: it failed while it ran.
            EngineClosedError: after close().
        """
        submission = self._prepared(lambda inputs: inputs.prompts(prompts, params, adapters, errors))
        return self._run(submission, progress)

    @also_named(place_of, sampling_params="params", messages="conversations", use_tqdm="progress")
    @takes_keywords(ChatKeywords, chat_options)
    def chat(
        self,
        conversations: Conversation | Sequence[Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        progress: ShowProgress = None,
        **options: Unpack[ChatKeywords],
    ) -> list[RequestOutput]:
        """Answers conversations through the model's own chat template. As `generate`, but for:

        Args:
            conversations: one conversation, a list of {"role": …, "content": …}, or a list of conversations.
            tools: functions that the model may call, as OpenAI's API describes them. Calls are in `tool_calls` of the
                outputs, in the notation of any family that plan.tools can name (docs/tools.md).
            tool_choice: "auto", or None: the model decides; "none": nothing is read as a call; "required": it calls one
                of the tools; {"type": "function", "function": {"name": …}}: it calls this one. A grammar of the
                parameters' schemas holds the last two.
            parallel_tool_calls: False: one call at most.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}, of those in
                llamabatch.chat.conversation.TEMPLATE_KWARGS. One that the model's template does not read is refused.

        Raises:
            ConfigError: the model has no chat template, or the given one cannot be read or compiled.
            PromptError: as for generate; texts are no conversations.
        """
        asked = chat_options(**options)
        submission = self._prepared(lambda inputs: inputs.conversations(conversations, params, asked, adapters, errors))
        return self._run(submission, progress)

    @also_named(place_of, sampling_params="params")
    @takes_keywords(ChatKeywords, chat_options)
    def stream(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        **options: Unpack[ChatKeywords],
    ) -> Iterator[SequenceOutput]:
        """One prompt or conversation, or many at once, token by token as they come.

        Each piece has the `prompt_index` that it belongs to; the last one of a prompt has `finished` set. Requests
        start when the first piece is asked for; leaving the loop aborts those that still run.

        Args:
            errors: as for generate. A prompt of a list that cannot be run is one piece, finished with its error; the
                warning, or the error if all failed, comes after the last piece. An error that is known before anything
                runs is raised by the call itself.

        Raises:
            PromptError: as for generate; or options of chats are given, and no prompt is a conversation.
        """
        asked = chat_options(**options)
        submission = self._prepared(lambda inputs: inputs.either(prompts, params, asked, adapters, errors))
        return self._events(submission, stream=True)

    @also_named(place_of, sampling_params="params")
    @takes_keywords(ChatKeywords, chat_options)
    def as_completed(
        self,
        prompts: Prompt | Conversation | Sequence[Prompt | Conversation],
        params: Params = None,
        *,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        **options: Unpack[ChatKeywords],
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Pairs of a prompt's index and its output, in the order in which prompts finish. Otherwise as `stream`."""
        asked = chat_options(**options)
        submission = self._prepared(lambda inputs: inputs.either(prompts, params, asked, adapters, errors))
        return self._completed(submission)

    @overload
    def score(
        self,
        prompt: Prompt,
        continuations: Sequence[Prompt],
        *,
        progress: ShowProgress = None,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = ...,
    ) -> list[Score]: ...

    @overload
    def score(
        self,
        prompt: Pairs,
        continuations: None = None,
        *,
        progress: ShowProgress = None,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = ...,
    ) -> list[list[Score]]: ...

    def score(
        self,
        prompt: Prompt | Pairs,
        continuations: Sequence[Prompt] | None = None,
        *,
        progress: ShowProgress = None,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "warn",
    ) -> list[Score] | list[list[Score]]:
        """The logprob of each continuation of a prompt, by the model alone; nothing is sampled.

        The prompt is computed once for all its continuations, which copy its cells. Two texts are tokenized as one: see
        docs/scoring.md for the border between them.

        Args:
            prompt: a text or token ids; without `continuations`, a list of pairs (prompt, continuations).
            continuations: texts or token ids.
            progress: as for generate.
            adapters: {name: scale} of loaded adapters, for all of them.
            errors: as for generate, for each continuation. One fails if it is empty, if no token comes before it, or if
                prompt and continuation are longer than n_ctx; its Score has `error` set and a logprob of NaN. An item
                that is no pair, an empty cell of a table, say, counts as one continuation.

        Returns:
            One Score a continuation, in their order; for pairs, a list of them for each pair.

        Raises:
            PromptError: there is nothing to score, `prompt` is no list of pairs, or a continuation failed.
            ConfigError: the model is an encoder. AdapterError: an adapter that is not loaded.
        """
        with self._client.awake():
            scoring = Scoring(self._client, prompt, continuations, adapters, errors)
        scores = scoring.scores(self._run(scoring.submission, progress))
        return scores if continuations is None else scores[0]

    @overload
    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = ...,
        dimensions: int | None = ...,
        pooling: str | None = ...,
        adapters: Adapters = ...,
        errors: Literal["raise"] = ...,
        return_errors: Literal[False] = ...,
        progress: ShowProgress = ...,
    ) -> list[Vector]: ...

    @overload
    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = ...,
        dimensions: int | None = ...,
        pooling: str | None = ...,
        adapters: Adapters = ...,
        errors: ErrorPolicy = ...,
        return_errors: bool = ...,
        progress: ShowProgress = ...,
    ) -> list[Vector | LlamaBatchError]: ...

    def embed(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        normalize: bool = True,
        dimensions: int | None = None,
        pooling: str | None = None,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
        return_errors: bool = False,
        progress: ShowProgress = None,
    ) -> list[Any]:
        """A vector for each text, pooled as LLM(..., pooling=…) or the model's GGUF says; the mean over its tokens if
        neither does.

        Args:
            texts: one text or a list; each in a form of a prompt of `generate`.
            normalize: scale each vector to length 1; False: as the model gives it.
            dimensions: cut each vector to its first 1 to n_embd elements, before it is normalized: for models that are
                trained for it (Matryoshka).
            pooling: for code that relies on one: refused unless it is the engine's, whose context is made for one kind.
            adapters: as for `generate`.
            errors: as for generate, but "raise" unless given; with "warn" and "return" a LlamaBatchError takes the
                place of a text that fails.
            return_errors: True is short for errors="return".
            progress: as for generate.

        Returns:
            One numpy array a text, in their order, also for a single text: shape (n_embd,) or (dimensions,), float32;
            with pooling="none" a row for each token, BOS and its like included.

        Raises:
            ConfigError: the model gives no embeddings, or pools otherwise. InputError: dimensions are out of range.
            PromptError: a text is empty, or has more tokens than one pass takes: the smaller of n_ctx and n_batch; or
                `texts` is no list of texts.
            AdapterError: an adapter that is not loaded.
            EngineError: a pass failed. EngineClosedError: after close().
        """
        policy: ErrorPolicy = "return" if return_errors else errors
        submission = self._prepared(
            lambda inputs: inputs.texts(texts, adapters, policy, dimensions=dimensions, pooling=pooling)
        )
        outputs = self._run(submission, progress)
        n_embd = token_vectors(self._client.model)
        return vectors(outputs, normalize=normalize, errors=policy, dimensions=dimensions, n_embd=n_embd)

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        use_activation: bool = True,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "raise",
        progress: ShowProgress = None,
    ) -> list[RerankResult]:
        """Ranks documents by their relevance to a query, with a model that has a classification head of one output
        (pooling "rank": bge-reranker, jina-reranker, Qwen3-Reranker and their like).

        Each pair of query and document goes through the model as one text: through the GGUF's own "rerank" template, or
        between the marks of its vocabulary. A pass takes many pairs.

        Args:
            query: a text.
            documents: texts.
            top_n: the number of results, at least 1; None: all.
            use_activation: True: scores from 0 to 1, the logistic function of the model's; False: the model's own,
                llama-server's relevance_score. Those of Qwen3-Reranker are probabilities either way.
            adapters: {name: scale} of loaded adapters, for all pairs.
            errors: as for generate, but "raise" unless given; with "warn" and "return" a document that fails has a
                result with `error` set and a score of NaN, behind the others.
            progress: as for generate.

        Returns:
            The results, the most relevant first; documents that score alike keep their order.

        Raises:
            ConfigError: the model has no classification head, or one with several outputs.
            PromptError: the query is no text, there is no document, or a pair has more tokens than one pass takes: the
                smaller of n_ctx and n_batch. InputError: top_n is out of range.
            AdapterError: an adapter that is not loaded.
            EngineError: a pass failed. EngineClosedError: after close().
        """
        most = check_rerank(query, top_n, use_activation)
        given, submission = self._prepared(lambda inputs: inputs.documents(query, documents, adapters, errors))
        outputs, model = self._run(submission, progress), self._client.model
        return reranked(model, given, outputs, top_n=most, use_activation=use_activation, errors=errors)

    @overload
    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = ...,
        adapters: Adapters = ...,
        errors: Literal["raise"] = ...,
        progress: ShowProgress = ...,
    ) -> list[Classification]: ...

    @overload
    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = ...,
        adapters: Adapters = ...,
        errors: ErrorPolicy = ...,
        progress: ShowProgress = ...,
    ) -> list[Classification | LlamaBatchError]: ...

    def classify(
        self,
        texts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool = True,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
        progress: ShowProgress = None,
    ) -> list[Any]:
        """The class of each text, with a model that has a classification head (pooling "rank").

        Args:
            texts: one text or a list; each in a form of a prompt of `generate`.
            use_activation: True: probabilities, by softmax over the classes, or the logistic function of a single one;
                False: the model's raw scores.
            adapters: as for `generate`.
            errors: as for generate, but "raise" unless given; with "warn" and "return" a LlamaBatchError takes the
                place of a text that fails.
            progress: as for generate.

        Returns:
            One Classification a text, in their order, also for a single text.

        Raises:
            ConfigError: the model has no classification head.
            PromptError: a text is empty, or has more tokens than one pass takes: the smaller of n_ctx and n_batch; or
                `texts` is no list of texts.
            AdapterError: an adapter that is not loaded.
            EngineError: a pass failed. EngineClosedError: after close().
        """
        boolean(InputError, "use_activation", use_activation)
        submission = self._prepared(lambda inputs: inputs.texts_to_classify(texts, adapters, errors))
        outputs = self._run(submission, progress)
        return classified(self._client.model, outputs, use_activation=use_activation, errors=errors)

    @overload
    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]: ...

    @overload
    def tokenize(
        self, text: list[str] | tuple[str, ...], *, add_special: bool = True, parse_special: bool = False
    ) -> list[list[int]]: ...

    def tokenize(
        self, text: str | list[str] | tuple[str, ...], *, add_special: bool = True, parse_special: bool = False
    ) -> list[int] | list[list[int]]:
        """Text to token ids, or a list of texts to a list for each.

        Args:
            add_special: put BOS in front if the model wants it.
            parse_special: read names of special tokens in the text as those tokens.

        Raises:
            PromptError: not a text, a text of more than 64 MiB, or one with a word that a stock build does not survive.
        """
        tokens: list[int] | list[list[int]] = self._prepared(
            lambda inputs: inputs.tokenize(text, add_special, parse_special)
        )
        return tokens

    @overload
    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @overload
    def detokenize(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True) -> list[str]: ...

    def detokenize(
        self, token_ids: Sequence[int] | Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> str | list[str]:
        """Token ids to text, or a list of lists of them to a text for each; bytes that are no UTF-8 become U+FFFD.

        Args:
            skip_special_tokens: leave special tokens out; False writes their names.

        Raises:
            PromptError: not token ids, or an id outside the vocabulary.
        """
        text: str | list[str] = self._prepared(lambda inputs: inputs.detokenize(token_ids, skip_special_tokens))
        return text

    @takes_keywords(TemplateKeywords, chat_options)
    def apply_chat_template(
        self,
        conversation: Conversation,
        **options: Unpack[TemplateKeywords],
    ) -> str:
        """The prompt that `chat` makes of one conversation, as transformers' apply_chat_template(tokenize=False) but
        for add_generation_prompt, which holds unless it is turned off. Nothing is computed.

        Its special tokens are names: tokenize(text, add_special=False, parse_special=True) reads them as tokens.

        Args:
            conversation: a list of {"role": …, "content": …}.
            tools, chat_template, add_generation_prompt, continue_final_message, chat_template_kwargs: as for chat.

        Raises:
            ConfigError, PromptError: as for chat.
        """
        asked = chat_options(**options)
        return self._prepared(lambda inputs: inputs.chat_text(conversation, asked))

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return self._client.adapters

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA or a control vector (GGUF) under a name that requests can ask for.

        Raises:
            AdapterError: the name is taken; the path is neither str nor Path.
            ModelFileError: the file is missing, damaged, or for another model.
            EngineClosedError: after close().
        """
        self._client.call("load_adapter", name, adapter_path(name, path))

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter.

        Raises:
            AdapterError: it is not loaded, or a request in flight uses it.
            EngineClosedError: after close().
        """
        self._client.call("unload_adapter", name)

    def save_prefix(self, prompt: Prompt, path: str | os.PathLike[str]) -> int:
        """Computes a prompt and saves its KV cells to a file, for load_prefix in another process.

        Args:
            prompt: a text or token ids, at least 32 tokens. A text should end where a word ends: with more text behind
                it, its last token may become another one.

        Returns:
            The number of tokens saved.

        Raises:
            PromptError: the prompt cannot be run. InputError: it is too short, or the file cannot be written.
            ConfigError: this engine keeps no prefixes.
            EngineError: other requests needed the cells before they could be saved.
        """
        target = absolute(path)
        for _ in range(TRIES):
            [output] = self.generate(prompt, ONE_TOKEN)
            token_ids = tokens_to_save(output)
            if self._client.call("save_prefix", token_ids, target):
                return len(token_ids)
        raise EngineError(CROWDED)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Holds a saved prefix in memory, in each engine, until unload_prefix: requests that begin with it do not
        compute it.

        Returns:
            Its length in tokens.

        Raises:
            InputError: the file is damaged, or was saved with another model, llama.cpp or kind of KV cache.
            ConfigError: the model's state cannot be shared.
        """
        n_tokens: int = self._client.call("load_prefix", absolute(path))
        return n_tokens

    def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """Frees a loaded prefix. Raises InputError if it is not loaded."""
        self._client.call("unload_prefix", absolute(path))

    def reset_prefix_cache(self) -> bool:
        """Gives up the cells that finished requests have left to later ones, in each engine: after it, a prompt is
        computed as if it were the first one. Cells of running requests and loaded prefixes (load_prefix) stay.

        Returns:
            True, as vLLM does where it succeeds.

        Raises:
            EngineClosedError: after close().
        """
        done: bool = self._client.call("reset_prefix_cache")
        return done

    def stats(self) -> EngineStats:
        """Counts since the engine started, and its state now. Waits for no step.

        Raises:
            EngineClosedError: after close(), or when the engine has died.
        """
        return self._client.stats()

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """The state of each child process that has an engine; empty if all engines are in this process."""
        return self._client.heartbeats

    def monitor(
        self,
        callback: Callable[[Snapshot], object] | None = None,
        *,
        every_s: float = 1.0,
        metrics_file: str | os.PathLike[str] | None = None,
        publish: bool = False,
    ) -> Monitor:
        """Samples the engine and the machine at an interval, on a thread of its own::

            with llm.monitor(lambda now: print(now.generated_tokens_per_s, now.stats.slot_use)):
                llm.generate(prompts)

        Args:
            callback: called with each Snapshot; an exception in it is logged.
            every_s: the interval in seconds, 0.01 to 3600.
            metrics_file: path of a file of metrics for Prometheus; needs `llamabatch[metrics]`.
            publish: show the engine in `llamabatch top`.

        Raises:
            ConfigError: every_s is out of range; the metrics file cannot be written.
            SetupError: a metrics file without prometheus_client.
        """
        with late_import("the code of the monitor"):
            from llamabatch.monitor.monitor import monitor_client  # psutil and more, of no use to most programs

        return monitor_client(self._client, callback, every_s=every_s, metrics_file=metrics_file, publish=publish)

    def sleep(self) -> None:
        """Frees the model until it is used again: the next request, say, loads it once more, and waits for that.

        The options in force stay as they are, and so do counts, seeds, adapters and loaded prefixes. Prefixes that
        requests have left outlive it in the folder of `cache_disk`. Sleeping again does nothing.

        Raises:
            EngineError: requests are in flight.
            EngineClosedError: after close().
        """
        self._client.sleep()

    def wake(self) -> None:
        """Loads the model again after sleep(), unless that is done. Each method that needs the model does so, too.

        Raises:
            ModelFileError, MemoryPlanError, EngineError: as LLM. EngineError also if the file has been changed. The
                LLM sleeps on, and the next use tries again.
            EngineClosedError: after close().
        """
        with self._client.awake():
            pass

    @property
    def is_asleep(self) -> bool:
        """True from sleep() to the next use."""
        return self._client.is_asleep

    def close(self) -> None:
        """Ends all requests and frees the model. May be called twice; a forgotten LLM closes by itself."""
        self._closed = True
        self._client.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    if not TYPE_CHECKING:  # a type checker shall see a wrong name

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_LLM)

    def __reduce__(self) -> NoReturn:
        raise unpicklable(type(self).__name__)

    def __repr__(self) -> str:
        client = getattr(self, "_client", None)  # None: __init__ has raised
        if client is None:
            return described(type(self).__name__, None)
        state = "closed" if self._closed else "asleep" if client.is_asleep else ""
        return described(type(self).__name__, client.plan, state=state)

    def _prepared(self, prepare: Callable[[InputProcessor], T]) -> T:
        """The result of `prepare`, with the model awake."""
        with self._client.awake():
            return prepare(InputProcessor(self._client, next_seed=self._client.next_seed))

    def _events(self, submission: Submission, *, stream: bool = False) -> Generator[SequenceOutput, None, None]:
        """Submits all requests and yields their events until all have ended; closed earlier, it aborts the rest."""
        events: queue.SimpleQueue[list[SequenceOutput]] = queue.SimpleQueue()
        process = ForkGuard()
        try:
            self._client.submit(submission.requests, events.put, stream=stream)
            if submission.refused:
                self._client.count_refused(submission.refused)
            yield from submission.record(submission.refused)
            while not submission.done:
                process.check()
                yield from submission.record(events.get())
            submission.conclude()
        finally:
            if not submission.done:
                self._client.abort(submission.unfinished)

    def _completed(self, submission: Submission) -> Iterator[tuple[int, RequestOutput]]:
        with contextlib.closing(self._events(submission)) as events:
            for event in events:
                if event.finished is not None:
                    yield event.prompt_index, event.finished

    def _run(self, submission: Submission, progress: ShowProgress) -> list[RequestOutput]:
        """Waits for all outputs. An interrupt aborts them and leaves the engine usable."""
        shown = ProgressBar(submission.n, progress, is_list=submission.is_list)
        with shown as bar, contextlib.closing(self._events(submission)) as events:
            for event in events:
                if event.finished is not None:
                    bar.advance(len(event.finished.token_ids))
        return submission.outputs
