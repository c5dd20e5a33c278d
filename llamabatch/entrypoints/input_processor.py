"""InputProcessor: it turns a caller's prompts, conversations and texts into the Requests of a Submission."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import Any, Protocol, TypeGuard

from llamabatch.chat.messages import Conversation, dropped_first
from llamabatch.chat.options import ChatOptions
from llamabatch.config.names import ALIASES
from llamabatch.config.options import EngineConfig
from llamabatch.engine.validation import RequestLimits, check_kind, longest_cut, validate
from llamabatch.entrypoints.answer_format import AnswerFormat
from llamabatch.entrypoints.classification import pair_tokenizer, relevance_index
from llamabatch.entrypoints.prompts import (
    FORMS,
    is_prompt_mapping,
    is_table,
    is_token_ids,
    media_of,
    plain_ids,
    read_mapping,
)
from llamabatch.entrypoints.submission import ErrorPolicy, Refused, Submission
from llamabatch.errors import AdapterError, ConfigError, InputError, PromptError, SamplingError
from llamabatch.gguf.pooling import POOLINGS
from llamabatch.llama.model import Model
from llamabatch.media.prompt import MARK, Prompt, chat_prompt, chat_text, text_prompt
from llamabatch.planning.plan import Plan
from llamabatch.request.adapters import AdapterSet, adapter_sets, check_known
from llamabatch.request.request import Request, new_group
from llamabatch.request.sampling_params import PARAMETERS, SamplingParams
from llamabatch.utils.checks import choice, counted, integer, items, show

OneParams = SamplingParams | Mapping[str, Any]
Params = OneParams | Sequence[OneParams] | None
OneAdapters = Mapping[str, float] | str | None
Adapters = OneAdapters | list[OneAdapters]


_ToIds = Callable[[Any], Prompt]


class Host(Protocol):
    """The part of an EngineClient used by an InputProcessor."""

    plan: Plan
    model: Model

    @property
    def adapters(self) -> list[str]: ...


_ADAPTER = ("adapter", "lora", "loras", "lora_request", "lora_path")  # other libraries' names for adapters


def place_of(name: str) -> str:
    """Returns advice for a wrong keyword of a method. If the name is a parameter of requests or an option of engines,
    the advice says where to give it. Otherwise the advice is "".
    """
    if name in _ADAPTER:
        return "an adapter: give adapters='name' of one that LLM(..., adapters={'name': path}) or load_adapter loaded"
    if name in PARAMETERS:
        return f"a parameter of sampling: give params=SamplingParams({name}=…), or params={{{name!r}: …}}"
    if name in EngineConfig.__dataclass_fields__ or name in ALIASES:
        return f"an option of the engine: give LLM(..., {name}=…)"
    return ""


class InputProcessor:
    """Makes Submissions for one engine: checks and tokenizes prompts, and does not wait for the engine.

    Args:
        client: the engine; its model tokenizes, and its plan contains the limits.
        cancelled: returns True once the caller is gone. CancelledError is then raised before the next prompt, or within
            a chat template.
        next_seed: returns a seed for a request that has none; -1: the request draws a random seed.
    """

    def __init__(
        self,
        client: Host,
        cancelled: Callable[[], bool] | None = None,
        next_seed: Callable[[], int] = lambda: -1,
    ) -> None:
        self._next_seed = next_seed
        self._client = client
        self._cancelled = cancelled
        self._model = client.model
        self._limits = RequestLimits.of(client.plan.config, client.model)

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template; None: the model has none."""
        return self._model.chat_template

    @property
    def bos_text(self) -> str:
        """The text of BOS in the vocabulary; "" if there is none."""
        return self._model.special_token("bos")

    @property
    def pooling(self) -> str:
        """The engine's kind of pooling."""
        return self._model.pooling

    @property
    def n_ctx(self) -> int:
        """The maximum number of tokens of a request."""
        return self._client.plan.config.n_ctx

    @property
    def special_ids(self) -> Mapping[str, int]:
        """The ids of the special tokens by name, as in Vocab."""
        return self._model.special_ids

    def prompts(
        self, prompts: object, params: Params, adapters: Adapters = None, errors: ErrorPolicy = "warn"
    ) -> Submission:
        """Returns the Submission of one prompt, or of a list of prompts."""
        given, alone = _texts_or_ids("prompts", prompts, "; conversations go to chat()")
        return self._submission(given, params, adapters, self._prompt_ids, alone, errors)

    def conversations(
        self,
        conversations: object,
        params: Params,
        options: ChatOptions,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
        before: Sequence[int] = (),
    ) -> Submission:
        """Returns the Submission of one conversation, or of a list of conversations.

        Args:
            before: token ids in front of each conversation. The BOS of the conversation itself is then left out.
        """
        alone = is_conversation(conversations)
        if isinstance(conversations, (str, Mapping)):
            kind = "a text" if isinstance(conversations, str) else "a single message"
            raise PromptError(
                f"conversations is {show(conversations)}, {kind}; give [{{'role': 'user', 'content': …}}], or "
                "generate() for a text as it is"
            )
        given = [conversations] if alone else listed("conversations", conversations)
        if is_token_ids(given) or all_are(given, _is_prompt):
            raise PromptError(
                f"conversations holds {show(first_of(given))}; give [{{'role': 'user', 'content': …}}], or a list of "
                "such lists; texts and token ids go to generate()"
            )
        to_ids = partial(self._chat_ids, options, before=before)
        return self._submission(given, params, adapters, to_ids, alone, errors, name="conversations", options=options)

    def either(
        self,
        prompts: object,
        params: Params,
        options: ChatOptions,
        adapters: Adapters = None,
        errors: ErrorPolicy = "warn",
    ) -> Submission:
        """Returns the Submission of one prompt or conversation, or of a list that may contain both."""
        alone = _is_prompt(prompts) or is_conversation(prompts)
        given = [prompts] if alone else listed("prompts", prompts)
        if options.given and all_are(given, _is_prompt):
            raise PromptError(
                f"{' and '.join(options.given)} change conversations only, and prompts has none; leave them out"
            )
        to_ids = partial(self._either_ids, options)
        return self._submission(given, params, adapters, to_ids, alone, errors, options=options)

    def texts(
        self,
        texts: object,
        adapters: Adapters = None,
        errors: ErrorPolicy = "raise",
        *,
        dimensions: int | None = None,
        pooling: str | None = None,
    ) -> Submission:
        """Returns the Submission of one text to embed, or of a list of texts. A text may also be token ids.

        Args:
            dimensions: the length to which vectors will be cut; only checked here, before anything runs.
            pooling: the pooling expected by the caller.

        Raises:
            ConfigError: the model gives no embeddings, or the engine's pooling is a different one.
            InputError: `dimensions` is out of range.
        """
        check_kind(self._model, embed=True)
        if pooling is not None and choice(InputError, "pooling", pooling, POOLINGS) != self._model.pooling:
            raise ConfigError(
                f"pooling is {pooling!r}, but this engine pools by {self._model.pooling!r}: its context is made for "
                f"one kind; load the model with pooling={pooling!r}"
            )
        if dimensions is not None:
            integer(InputError, "dimensions", dimensions, 1, self._model.n_embd_out, ", or None")
        given, alone = _texts_or_ids("texts", texts)
        return self._submission(given, None, adapters, self._prompt_ids, alone, errors, name="texts", embed=True)

    def texts_to_classify(self, texts: object, adapters: Adapters = None, errors: ErrorPolicy = "raise") -> Submission:
        """Returns the Submission of one text to classify, or of a list of texts. A text may also be token ids.

        Raises:
            ConfigError: the model has no classification head.
        """
        check_kind(self._model, embed=True, classify=True)
        given, alone = _texts_or_ids("texts", texts)
        return self._submission(
            given, None, adapters, self._prompt_ids, alone, errors, name="texts", embed=True, classify=True
        )

    def documents(
        self,
        query: str | Sequence[str],
        documents: object,
        adapters: OneAdapters = None,
        errors: ErrorPolicy = "raise",
        *,
        longest: int | None = None,
    ) -> tuple[list[Any], Submission]:
        """Returns the documents as a list, and the Submission of their pairs with a query.

        Args:
            query: one query for all documents, or a list with one for each document.
            longest: maximum number of tokens of a pair; a longer document loses its end. None: a longer pair is an
                error.

        Raises:
            ConfigError: the model has no classification head, or one with several outputs.
            PromptError: `documents` is not a list of texts.
        """
        check_kind(self._model, embed=True, classify=True)
        relevance_index(self._model)
        given = listed("documents", documents)
        if all_are(given, lambda item: not isinstance(item, str)):
            raise PromptError(f"documents holds {show(first_of(given))}; give texts")
        queries = [query] if isinstance(query, str) else query
        tokenizers = (pair_tokenizer(self._model, each, longest) for each in queries)
        each_document = itertools.repeat(next(tokenizers)) if isinstance(query, str) else tokenizers

        def to_ids(document: object) -> Prompt:
            return _pair_ids(next(each_document), document)

        return given, self._submission(
            given, None, adapters, to_ids, False, errors, name="documents", embed=True, classify=True
        )

    def tokenize(self, text: Any, add_special: bool, parse_special: bool) -> Any:
        """Turns a text into token ids, or a list of texts into one list of ids for each text, as LLM.tokenize."""
        if isinstance(text, (list, tuple)):
            return [self._tokenize(one, add_special, parse_special) for one in text]
        return self._tokenize(text, add_special, parse_special)

    def _tokenize(self, text: object, add_special: bool, parse_special: bool) -> list[int]:
        if not isinstance(text, str):
            raise PromptError(f"text is {show(text)}; give a str, or a list of them")
        return self._model.tokenize(text, add_special=add_special, parse_special=parse_special)

    def detokenize(self, token_ids: Any, skip_special_tokens: bool) -> Any:
        """Turns a list of token ids into a text, or several such lists into texts, as LLM.detokenize."""
        if is_token_ids(token_ids) or (isinstance(token_ids, (list, tuple)) and not token_ids):
            return self._model.detokenize(list(map(int, token_ids)), skip_special=skip_special_tokens)
        texts = [self.detokenize(ids, skip_special_tokens) for ids in listed("token_ids", token_ids)]
        return [text for text in texts if isinstance(text, str)]

    def _prompt_ids(self, prompt: object) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(prompt, tuple(self._model.tokenize(prompt) if prompt else ()))
        if is_token_ids(prompt):
            return Prompt(None, plain_ids(prompt))
        if isinstance(prompt, (list, tuple)) and not prompt:
            return Prompt(None, ())  # validate() refuses an empty prompt
        if is_prompt_mapping(prompt):
            given, (prompt, media, mark) = prompt, media_of(prompt)
            text, ids = read_mapping(prompt)
            if media or ("multi_modal_data" in given and MARK in (text or "")):
                return text_prompt(self._model, text or "", media, self._cancelled, mark)
            return Prompt(text, ids) if ids is not None else self._prompt_ids(text)
        raise PromptError(f"a prompt is {FORMS}, not {show(prompt)}")

    def chat_text(self, conversation: Any, options: ChatOptions) -> str:
        """Returns the prompt text of a conversation, as LLM.apply_chat_template."""
        messages = list(conversation) if is_conversation(conversation) else conversation
        return chat_text(self._model, messages, options, self._cancelled)

    def _chat_ids(self, options: ChatOptions, conversation: Any, before: Sequence[int] = ()) -> Prompt:
        # list() is needed because a conversation from a column of a Parquet file is an array.
        messages = list(conversation) if is_conversation(conversation) else conversation
        prompt = chat_prompt(self._model, messages, options, self._cancelled)
        if not before:
            return prompt
        whole = self.behind(before, prompt.token_ids)
        n_dropped = len(before) + len(prompt.token_ids) - len(whole)
        return prompt.behind(tuple(before), n_dropped)

    def behind(self, before: Sequence[int], ids: Sequence[int]) -> tuple[int, ...]:
        """Returns `before` and `ids` joined. Drops a BOS at the start of `ids` if `before` is not empty."""
        begins = bool(before) and list(ids[:1]) == [self._model.special_ids.get("bos")]
        return (*before, *ids[begins:])

    def _either_ids(self, options: ChatOptions, prompt: object) -> Prompt:
        return self._chat_ids(options, prompt) if is_conversation(prompt) else self._prompt_ids(prompt)

    def _submission(
        self,
        items: list[Any],
        params: Params,
        adapters: Adapters,
        to_ids: _ToIds,
        alone: bool,
        errors: ErrorPolicy,
        *,
        name: str = "prompts",
        embed: bool = False,
        classify: bool = False,
        options: ChatOptions | None = None,
    ) -> Submission:
        """Turns items into requests and returns their Submission.

        Args:
            alone: True for a single prompt that was not given in a list.
            name: the name of the argument with the prompts, for messages.
            options: the options of the conversations among the items.
        """
        check_kind(self._model, embed=embed, classify=classify)
        each = zip(items, _params_for(items, params), self._adapters_for(len(items), adapters), strict=True)
        group, arrival, loaded = new_group(), time.perf_counter(), self._client.adapters
        requests: list[Request | Refused] = []
        answers = AnswerFormat(self._model, self._client.plan.config, options)
        for item, item_params, item_adapters in each:
            if self._cancelled is not None and self._cancelled():
                raise CancelledError
            seed = self._next_seed() if item_params.seed is None else item_params.seed
            request = Request(new_id(), (), item_params, item if isinstance(item, str) else None, arrival, group, seed)
            try:
                prompt = to_ids(item)
                if is_conversation(item):
                    prompt = self._without_oldest(prompt, list(item), item_params, to_ids)
                text, ids, media, runs, n_truncated = prompt
                request = replace(request, prompt=text, prompt_token_ids=ids, adapters=item_adapters, embed=embed)
                request = replace(request, num_truncated=n_truncated)
                if media and classify:
                    raise PromptError("the prompt has a picture or a sound; only texts can be ranked or classified")
                if media:
                    request = replace(request, media=media, media_runs=runs)
                if options is not None and is_conversation(item):
                    request = answers.of_chat(request, _continued(item, options))
                else:
                    request = answers.of_prompt(request)
                if classify:
                    request = replace(request, classify=True)
                requests.append(validate(request, self._limits, self._model, loaded))
            except (PromptError, AdapterError, SamplingError) as refusal:
                requests.append(Refused(request, refusal))
        return Submission(requests, name.removesuffix("s"), errors, None if alone else lambda i: f"{name}[{i}]")

    def _without_oldest(self, prompt: Prompt, messages: list[Any], params: SamplingParams, to_ids: _ToIds) -> Prompt:
        """Returns the prompt of a conversation. With overflow="truncate", leaves out the oldest turns of a conversation
        that is too long. If the prompt is still too long, validate() cuts tokens off.
        """
        n_tokens, longest = len(prompt.token_ids), longest_cut(params, self.n_ctx)
        cuts_turns = params.overflow == "truncate" and params.truncate_prompt_tokens is None
        if not cuts_turns or n_tokens <= self.n_ctx:
            return prompt
        turns = dropped_first(messages)
        least, most = 1, max(turns, default=0)
        if not most:
            return prompt
        made: dict[int, Prompt] = {}
        while least not in made:
            tried = (least + most) // 2
            made[tried] = to_ids([each for each, turn in zip(messages, turns, strict=True) if not 0 < turn <= tried])
            if len(made[tried].token_ids) > longest:
                least = min(tried + 1, most)
            else:
                most = tried
        return made[least]._replace(num_truncated=n_tokens - len(made[least].token_ids))

    def _adapters_for(self, n: int, adapters: Adapters) -> list[AdapterSet]:
        """Returns the adapters of each prompt. Raises AdapterError for unknown names in a set for all prompts."""
        sets = adapter_sets(adapters, n)
        if not isinstance(adapters, list) and sets and sets[0]:
            check_known(sets[0], self._client.adapters)
        return sets


def _pair_ids(to_tokens: Callable[[str], tuple[int, ...]], document: object) -> Prompt:
    if not isinstance(document, str):
        raise PromptError(f"a document is a text, not {show(document)}")
    return Prompt(document, to_tokens(document))


def _continued(conversation: Conversation, options: ChatOptions) -> str:
    """Returns the text of the last message if the answer continues it, else ""."""
    content = conversation[-1].get("content") if options.continue_final_message else None
    return content if isinstance(content, str) else ""


_request_numbers = itertools.count()


def new_id() -> str:
    """Returns a new request id, unique in this process."""
    return f"request-{next(_request_numbers)}"


def is_conversation(value: object) -> TypeGuard[Conversation]:
    """Returns True for a list, tuple or array that begins with a message and contains no list."""
    if isinstance(value, Iterator):
        return False
    messages = items(value, sys.maxsize) or []
    first = first_of(messages)
    if not isinstance(first, Mapping) or is_prompt_mapping(first):
        return False
    return all(items(message, 0) is None for message in messages)


def listed(name: str, values: object) -> list[Any]:
    """Returns the items of a list, array, Series, generator or similar. Raises PromptError for anything else."""
    if is_table(values):
        raise PromptError(f"{name} is a table, a {type(values).__name__}; give one of its columns")
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        raise PromptError(f"{name} is {show(values)}; give one, or a list of them")
    if getattr(values, "ndim", 1) == 0:
        raise PromptError(f"{name} is {show(values)}, an array without dimensions; give one, or a list of them")
    to_pylist = getattr(values, "to_pylist", None)  # iterating a pyarrow array would give pyarrow's own scalars
    return list(to_pylist() if callable(to_pylist) else values)


def _texts_or_ids(name: str, values: object, elsewhere: str = "") -> tuple[list[Any], bool]:
    """Returns the prompts of a call that accepts texts or token ids, and True for a single prompt outside a list.

    Raises:
        PromptError: the caller gave conversations, or rows of a table.
    """
    if _is_prompt(values):
        return [values], True
    given = listed(name, values)
    if is_token_ids(given):  # token ids from a generator
        return [given], True
    if all_are(given, _is_no_prompt):
        raise PromptError(f"{name} holds {show(first_of(given))}; give texts or token ids{elsewhere}")
    return given, False


def _is_prompt(value: object) -> bool:
    return isinstance(value, str) or is_token_ids(value) or is_prompt_mapping(value)


def _is_no_prompt(value: object) -> bool:
    return is_conversation(value) or (isinstance(value, Mapping) and not is_prompt_mapping(value))


def all_are(given: list[Any], are: Callable[[Any], bool]) -> bool:
    """Returns True if there are items other than missing values, and `are` is true for all of these."""
    return first_of(given) is not None and all(are(item) for item in given if not _is_missing(item))


def first_of(given: list[Any]) -> Any:
    """Returns the first item that is not a missing value, such as NaN; None if all are missing."""
    return next((item for item in given if not _is_missing(item)), None)


def _is_missing(cell: object) -> bool:
    """Returns True for None, NaN, and pandas' NA and NaT."""
    if isinstance(cell, Real):
        return bool(cell != cell)
    return cell is None or type(cell).__name__ in ("NAType", "NaTType")


def _params_for(items: list[Any], params: Params) -> list[SamplingParams]:
    if params is None or isinstance(params, (SamplingParams, Mapping)):
        return [_one_params(params or SamplingParams())] * len(items)
    if not isinstance(params, (list, tuple)):
        raise InputError(f"params is {show(params)}; give SamplingParams, or a list with one for each prompt")
    if len(params) != len(items):
        raise InputError(
            f"there are {len(params)} SamplingParams for {counted(len(items), 'prompt')}; give one, or one for each"
        )
    return [_one_params(given) for given in params]


def _one_params(given: object) -> SamplingParams:
    if isinstance(given, SamplingParams):
        return given
    if not isinstance(given, Mapping):
        raise InputError(f"params holds a {type(given).__name__}; give SamplingParams, or a mapping of their fields")
    for name in given:
        if not isinstance(name, str):
            raise InputError(f"params has the name {show(name)}; names of fields are strings")
    return SamplingParams.from_options(**given)
