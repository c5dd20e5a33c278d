"""LLM: the synchronous entry point. Its methods turn a list of prompts into a list of results."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from llamabatch.chat.messages import Conversation
from llamabatch.chat.options import ChatKeywords, TemplateKeywords, chat_options
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
from llamabatch.planning.plan import Plan
from llamabatch.request.adapters import adapter_path
from llamabatch.request.outputs import RequestOutput, SequenceOutput
from llamabatch.request.vocab import Vocab
from llamabatch.utils.absent import absent
from llamabatch.utils.aliases import also_named, model_named, takes_keywords, takes_names
from llamabatch.utils.checks import boolean
from llamabatch.utils.closing import Closing
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


class LLM(Closing):
    """A GGUF model that runs many prompts at once. Its methods may be called from several threads.

    Args:
        model: path of a .gguf file (the first file of a model in several parts), "tiny" for the bundled model, or a
            name on the hub such as "hf:owner/repo:Q4_K_M".
        **options: the fields of EngineConfig. Many names of vLLM and llama_cpp.Llama work, too, such as model_path,
            max_model_len and max_num_seqs. An unknown name raises a ConfigError (also a TypeError) that suggests the
            nearest name. The property `plan` shows the values chosen for "auto".

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
        """Loads a model from Hugging Face's hub, and downloads it first unless it is in huggingface_hub's cache.

        Needs the extra `llamabatch[hub]`. LLM("hf:owner/repo:Q4_K_M") is the short form.

        Args:
            repo_id: "owner/repo".
            filename: a pattern such as "*Q4_K_M.gguf", or a quantisation such as "Q4_K_M". None: the only model of the
                repository. A model in several parts is fetched whole.
            revision: branch, tag or commit; None: main.
            cache_dir: the cache folder; None: huggingface_hub's own.
            local_files_only: use only the cache, as with HF_HUB_OFFLINE=1.
            **options: as for LLM.

        Raises:
            ModelFileError, ConfigError, MemoryPlanError, SetupError, EngineError: as LLM. ModelFileError also if no
                model or more than one matches; the message lists the models. SetupError also without huggingface_hub.
        """
        path = fetch(repo_id, filename, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only)
        return cls(path, **options)

    _vocab: Vocab | None = None
    _closed = False

    @property
    def n_ctx(self) -> int:
        """The maximum number of tokens of one request, prompt and output together."""
        return self._client.plan.config.n_ctx

    @property
    def vocab(self) -> Vocab:
        """The vocabulary: its size, its tokens by id and by name, its special tokens."""
        with self._client.awake():
            if self._vocab is None or self._vocab.source is not self._client.model:  # the model was reloaded
                self._vocab = Vocab(self._client.model)
            return self._vocab

    @property
    def metadata(self) -> Mapping[str, MetadataValue]:
        """The values of the GGUF's header by key, such as "general.architecture". A value is a number, a text, or a
        MetadataArray for an array.

        Raises:
            ModelFileError: the file has been removed since the model was loaded.
        """
        return metadata_of(self._client.model.header)

    @property
    def plan(self) -> Plan:
        """The options in force, the memory that they need, and the reason for each value chosen by llamabatch."""
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
            prompts: one prompt, or a list of prompts. A prompt is a text, a list of token ids, {"prompt": text} or
                {"prompt_token_ids": ids}.
            params: SamplingParams, or a mapping of its fields and their aliases; one for all prompts, or a list with
                one for each prompt. None: the defaults.
            adapters: {name: scale} of loaded adapters (see load_adapter and LLM(..., adapters=…)); one for all prompts,
                or a list with one for each prompt. None: the model without adapters.
            errors: the effect of a failed prompt. A prompt fails if it is refused, or if it ends with an error. Its
                output then has finish_reason "error" and the reason in `error`, and the other prompts finish. "warn":
                one PromptWarning at the end; if all prompts failed, the first error is raised instead. So a single
                prompt that fails raises its error. "raise": the first error is raised as soon as it is known, and the
                other requests are aborted. "return": no warning and no exception. An exception has the outputs so far
                in `outputs`.
            progress: True: a progress bar in a notebook, or on stderr if stderr is a terminal. False: no bar. None: a
                bar in a notebook only, for a list. A function is called as progress(done, total) on the caller's
                thread; an exception in it ends the call.

        Returns:
            One RequestOutput for each prompt, in the order of the prompts.

        Raises:
            PromptError: `prompts` contains something else (conversations, for example), or a prompt cannot be run.
            SamplingError, AdapterError: the parameters or adapters of a prompt are invalid.
            EngineError: a prompt failed while it ran.
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
        """Answers conversations through the model's own chat template. Arguments not listed here are as for generate.

        Args:
            conversations: one conversation, which is a list of {"role": …, "content": …}, or a list of conversations.
            tools: functions for the model to call, as described in OpenAI's API. The outputs have the calls in
                `tool_calls`. docs/tools.md lists the model families whose notation is known.
            tool_choice: "auto" or None: the model decides. "none": the answer is not searched for calls. "required":
                the model calls one of the tools. {"type": "function", "function": {"name": …}}: the model calls this
                tool. A grammar made of the parameters' schemas enforces a required or named call.
            parallel_tool_calls: False: at most one call.
            chat_template: a template in place of the model's: a jinja2 text, the path of a file, or one of llama.cpp's
                names.
            add_generation_prompt: end the prompt with the header of the answer; None: True, unless
                continue_final_message is True.
            continue_final_message: the answer continues the last message.
            chat_template_kwargs: variables of the template, such as {"enable_thinking": False}. A variable that the
                template does not read is refused.

        Raises:
            ConfigError: the model has no chat template, or the given template cannot be read or compiled.
            PromptError: as for generate; also if a text is given in place of a conversation.
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
        """Yields the output of one prompt or conversation, or of many at once, token by token.

        Each piece has the `prompt_index` of its prompt. The last piece of a prompt has `finished` set. Requests are
        submitted when the first piece is asked for. Leaving the loop aborts the requests that still run.

        Args:
            errors: as for generate. A refused prompt of a list yields one piece, finished with its error. The warning,
                or the error if all prompts failed, comes after the last piece. An error that is known before anything
                runs is raised by the call itself.

        Raises:
            PromptError: as for generate; also if options of chats are given and no prompt is a conversation.
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
        """Yields (index of the prompt, its whole output), in the order of completion. Arguments and errors are as for
        `stream`."""
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
        """Returns the logprob of each continuation of a prompt, from the model's own logits. Nothing is sampled.

        The prompt is computed once, and its continuations copy its KV cells. A prompt text and a continuation text are
        tokenized together; docs/scoring.md explains the border between them.

        Args:
            prompt: a text or token ids; without `continuations`, a list of pairs (prompt, continuations).
            continuations: texts or token ids.
            progress: as for generate.
            adapters: {name: scale} of loaded adapters, for all continuations.
            errors: as for generate, for each continuation. A continuation fails if it is empty, if no token comes
                before it, or if prompt and continuation together are longer than n_ctx. Its Score then has `error` set
                and a logprob of NaN. An item that is not a pair (such as a missing value) is one failed continuation.

        Returns:
            One Score for each continuation, in order; for pairs, one list of Scores for each pair.

        Raises:
            PromptError: there is nothing to score, `prompt` is not a list of pairs, or a continuation failed.
            ConfigError: the model is an encoder. AdapterError: an adapter is not loaded.
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
        """Returns a vector for each text. The pooling is set by LLM(..., pooling=…), else by the model's GGUF; without
        either, the vector is the mean over the text's tokens.

        Args:
            texts: one text, or a list of texts; each in any form of a prompt of `generate`.
            normalize: scale each vector to length 1; False: leave the vector as the model returns it.
            dimensions: the number of leading elements to keep, 1 to n_embd; the vector is normalized after the cut. The
                model should be trained for short vectors (Matryoshka).
            pooling: the pooling expected by the caller's code. A value other than the engine's is refused, because an
                engine's context is made for one kind of pooling.
            adapters: as for `generate`.
            errors: as for generate, but the default is "raise". With "warn" and "return", a LlamaBatchError takes the
                place of the vector of a failed text.
            return_errors: True is short for errors="return".
            progress: as for generate.

        Returns:
            One float32 numpy array for each text, in order, also for a single text. Its shape is (n_embd,) or
            (dimensions,). With pooling="none" it has a row for each token, including BOS and other special tokens.

        Raises:
            ConfigError: the model gives no embeddings, or pools differently. InputError: `dimensions` is out of range.
            PromptError: a text is empty, or has more tokens than one pass allows (the smaller of n_ctx and n_batch); or
                `texts` is not a list of texts.
            AdapterError: an adapter is not loaded.
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
        """Ranks documents by their relevance to a query. Needs a model that has a classification head with one output
        (pooling "rank"), such as bge-reranker, jina-reranker and Qwen3-Reranker.

        Each pair of query and document goes through the model as one text. The GGUF's own "rerank" template makes this
        text. Without a template, special tokens of the vocabulary separate query and document. A pass computes many
        pairs.

        Args:
            query: a text.
            documents: texts.
            top_n: the number of results, at least 1; None: all.
            use_activation: True: scores from 0 to 1, the logistic function of the model's raw scores. False: the raw
                scores, as in llama-server's relevance_score. The scores of Qwen3-Reranker are probabilities either way.
            adapters: {name: scale} of loaded adapters, for all pairs.
            errors: as for generate, but the default is "raise". With "warn" and "return", the result of a failed
                document has `error` set and a score of NaN, and comes after all other results.
            progress: as for generate.

        Returns:
            The results, the most relevant first. Documents with equal scores keep their order.

        Raises:
            ConfigError: the model has no classification head, or one with several outputs.
            PromptError: the query is not a text, there is no document, or a pair has more tokens than one pass allows
                (the smaller of n_ctx and n_batch).
            InputError: top_n is out of range.
            AdapterError: an adapter is not loaded.
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
        """Classifies texts. Needs a model that has a classification head (pooling "rank").

        Args:
            texts: one text, or a list of texts; each in any form of a prompt of `generate`.
            use_activation: True: probabilities, by softmax over the classes, or by the logistic function for a single
                class. False: the model's raw scores.
            adapters: as for `generate`.
            errors: as for generate, but the default is "raise". With "warn" and "return", a LlamaBatchError takes the
                place of the Classification of a failed text.
            progress: as for generate.

        Returns:
            One Classification for each text, in order, also for a single text.

        Raises:
            ConfigError: the model has no classification head.
            PromptError: a text is empty, or has more tokens than one pass allows (the smaller of n_ctx and n_batch); or
                `texts` is not a list of texts.
            AdapterError: an adapter is not loaded.
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
        """Turns a text into token ids, or a list of texts into one list of token ids for each text.

        Args:
            add_special: put BOS in front if the model requires it.
            parse_special: read the name of a special token in a text as this token.

        Raises:
            PromptError: `text` is not a text, is larger than 64 MiB, or has a word that crashes an unpatched llama.cpp.
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
        """Turns a list of token ids into a text, or several such lists into texts. Invalid UTF-8 becomes U+FFFD.

        Args:
            skip_special_tokens: leave special tokens out; False: write their names.

        Raises:
            PromptError: a value is not token ids, or an id is outside the vocabulary.
        """
        text: str | list[str] = self._prepared(lambda inputs: inputs.detokenize(token_ids, skip_special_tokens))
        return text

    @takes_keywords(TemplateKeywords, chat_options)
    def apply_chat_template(
        self,
        conversation: Conversation,
        **options: Unpack[TemplateKeywords],
    ) -> str:
        """Returns the prompt text made by `chat` from one conversation. The model computes nothing.

        It works like transformers' apply_chat_template(tokenize=False), except that add_generation_prompt is on by
        default. Special tokens are written as names; tokenize(text, add_special=False, parse_special=True) reads them.

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
        """The names of the loaded adapters."""
        return self._client.adapters

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA or a control vector (GGUF) under a name, for the argument `adapters` of requests.

        Raises:
            AdapterError: the name is taken, or the path is neither a str nor a Path.
            ModelFileError: the file is missing, damaged, or for another model.
            EngineClosedError: after close().
        """
        self._client.call("load_adapter", name, adapter_path(name, path))

    def unload_adapter(self, name: str) -> None:
        """Frees an adapter.

        Raises:
            AdapterError: the adapter is not loaded, or a request in flight uses it.
            EngineClosedError: after close().
        """
        self._client.call("unload_adapter", name)

    def save_prefix(self, prompt: Prompt, path: str | os.PathLike[str]) -> int:
        """Computes a prompt and saves its KV cells to a file, for load_prefix in another process.

        Args:
            prompt: a text or token ids, at least 32 tokens. A text should end where a word ends, because text that
                follows may change the last token.

        Returns:
            The number of tokens saved.

        Raises:
            PromptError: the prompt cannot be run. InputError: the prompt is too short, or the file cannot be written.
            ConfigError: this engine keeps no prefixes.
            EngineError: other requests needed the cells before they could be saved.
        """
        target = absolute(path)
        for _ in range(TRIES):
            [output] = self.generate(prompt, ONE_TOKEN)
            token_ids = tokens_to_save(output.prompt_token_ids)
            if self._client.call("save_prefix", token_ids, target):
                return len(token_ids)
        raise EngineError(CROWDED)

    def load_prefix(self, path: str | os.PathLike[str]) -> int:
        """Loads a saved prefix into the memory of each engine, until unload_prefix. Requests that begin with the prefix
        do not compute it again.

        Returns:
            The length of the prefix in tokens.

        Raises:
            InputError: the file is damaged, or was saved with another model, llama.cpp build or kind of KV cache.
            ConfigError: the model's state cannot be shared.
        """
        n_tokens: int = self._client.call("load_prefix", absolute(path))
        return n_tokens

    def unload_prefix(self, path: str | os.PathLike[str]) -> None:
        """Frees a loaded prefix. Raises InputError if the prefix is not loaded."""
        self._client.call("unload_prefix", absolute(path))

    def reset_prefix_cache(self) -> bool:
        """Drops the KV cells of finished requests in each engine. Later prompts are computed as if no request had come
        before. Cells of running requests and loaded prefixes (load_prefix) stay.

        Returns:
            True, as vLLM's method returns on success.

        Raises:
            EngineClosedError: after close().
        """
        done: bool = self._client.call("reset_prefix_cache")
        return done

    def stats(self) -> EngineStats:
        """Returns counts since the engine started, and its state now. Does not wait for a step.

        Raises:
            EngineClosedError: after close(), or when the engine has died.
        """
        return self._client.stats()

    @property
    def heartbeats(self) -> list[Heartbeat]:
        """The state of each child process that runs an engine; empty if all engines are in this process."""
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
            metrics_file: the path of a file for Prometheus metrics; needs `llamabatch[metrics]`.
            publish: show the engine in `llamabatch top`.

        Raises:
            ConfigError: every_s is out of range; the metrics file cannot be written.
            SetupError: a metrics file is given, but prometheus_client is not installed.
        """
        with late_import("the code of the monitor"):
            from llamabatch.monitor.monitor import monitor_client  # late: most programs do not need psutil

        return monitor_client(self._client, callback, every_s=every_s, metrics_file=metrics_file, publish=publish)

    def sleep(self) -> None:
        """Frees the model until the next use. A request, for example, loads the model again and waits for the load.

        The options in force, counts, seeds, adapters and loaded prefixes are kept. Prefixes of finished requests are
        kept only in the folder of `cache_disk`. A second call does nothing.

        Raises:
            EngineError: requests are in flight.
            EngineClosedError: after close().
        """
        self._client.sleep()

    def wake(self) -> None:
        """Loads the model again after sleep(), unless it is loaded. Each method that needs the model does the same.

        Raises:
            ModelFileError, MemoryPlanError, EngineError: as for LLM; EngineError also if the file has changed. After an
                error the LLM is still asleep, and the next use tries again.
            EngineClosedError: after close().
        """
        with self._client.awake():
            pass

    @property
    def is_asleep(self) -> bool:
        """True from sleep() until the next use."""
        return self._client.is_asleep

    def close(self) -> None:
        """Ends all requests and frees the model. May be called twice. An LLM without references closes by itself."""
        self._closed = True
        self._client.close()

    if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_LLM)

    def __reduce__(self) -> NoReturn:
        raise unpicklable(type(self).__name__)

    def __repr__(self) -> str:
        client = getattr(self, "_client", None)  # None if __init__ raised
        if client is None:
            return described(type(self).__name__, None)
        state = "closed" if self._closed else "asleep" if client.is_asleep else ""
        return described(type(self).__name__, client.plan, state=state)

    def _prepared(self, prepare: Callable[[InputProcessor], T]) -> T:
        """Wakes the model and returns the result of `prepare`."""
        with self._client.awake():
            return prepare(InputProcessor(self._client, next_seed=self._client.next_seed))

    def _events(self, submission: Submission, *, stream: bool = False) -> Generator[SequenceOutput, None, None]:
        """Submits all requests and yields their events until all have ended. Closing the generator aborts the rest."""
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
        """Waits for all outputs. An interrupt aborts the requests and leaves the engine usable."""
        shown = ProgressBar(submission.n, progress, is_list=submission.is_list)
        with shown as bar, contextlib.closing(self._events(submission)) as events:
            for event in events:
                if event.finished is not None:
                    bar.advance(len(event.finished.token_ids))
        return submission.outputs
