"""Generation: the values of a body for generating text. Some values are sampling parameters, named as in vLLM,
llama-server or OpenAI. The other values describe the answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import weakref
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llamabatch.entrypoints.input_processor import InputProcessor
from llamabatch.entrypoints.submission import Submission
from llamabatch.errors import PromptError, SamplingError
from llamabatch.llama.model import Model
from llamabatch.request.parameter_names import ALIASES, AS_HERE
from llamabatch.request.samplers import KNOWN, known_samplers
from llamabatch.request.sampling_params import (
    MAX_BIASES,
    MAX_SAMPLERS,
    PARAMETERS,
    SamplingParams,
    named,
)
from llamabatch.request.structured_outputs import Structure, structure
from llamabatch.sampling.defaults import Defaults, FilledParams, defaults_of, fill
from llamabatch.server.request.adapters import read_adapters, scales_of
from llamabatch.server.request.body import Body, Json, Rules
from llamabatch.server.request.generation_fields import TIERS
from llamabatch.utils.checks import boolean, integer, number, pairs, show

PRIORITY_TIER = -1  # the priority of service_tier "priority"; the default is 0, and lower values are served first

_defaults: weakref.WeakKeyDictionary[Model, Defaults] = weakref.WeakKeyDictionary()
_SAFE_ID = re.compile(r"[A-Za-z0-9_.\-]{1,128}")
_LONGEST_LIST = 4096  # limit of characters in dry_sequence_breakers; a longer text is not parsed, and refused later
_OF_FORM = re.compile(r"(?:(?:json|regex|choice|grammar|structural_tag) of )?structured_outputs")
_BAN = -100.0  # the bias for llama-server's `false`, which bans a token


@dataclass(frozen=True)
class Generation(ABC):
    """The fields of a body except its prompt.

    Attributes:
        params: sampling parameters, with the deadline. The service tier sets `background` or `priority`.
        model: the requested name; None: any.
        adapters: names and scales of adapters; None: the body names none.
        lora: llama-server's ids (positions among the server's adapters) and scales; None: the body names none.
        text_biases: pairs of text and bias from logit_bias. The bias applies to each token of the text.
        stream: the answer is streamed.
        include_usage: a last event has the token counts.
        continuous_usage: each event has the token counts.
        service_tier: as requested; None: not given.
        request_id: id of the answer; None: a new id is made.
        return_token_ids: the answer contains token ids.
        tokens_as_ids: logprobs have names like token_id:17 for tokens.
        timings_per_token, return_progress, verbose: as in llama-server.
        no_output: max_tokens is 0. The engine still generates one token, but the answer does not contain it.
        form: name of the field for structured output, such as response_format; None: the body asks for none.
        id_slot: a number. POST /slots/N later finds the tokens of this request by this number. None or -1: no number.
        ping_s: a stream sends a comment after this many seconds of silence; 0: never; None: the server's setting.
        ignored: names of unknown fields, and of known fields and parts without effect.
    """

    params: SamplingParams
    model: str | None = None
    adapters: Mapping[str, float] | None = None
    lora: tuple[tuple[int, float], ...] | None = None
    text_biases: tuple[tuple[str, float], ...] = ()
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    service_tier: str | None = None
    request_id: str | None = None
    return_token_ids: bool = False
    tokens_as_ids: bool = False
    timings_per_token: bool = False
    return_progress: bool = False
    verbose: bool = False
    no_output: bool = False
    form: str | None = None
    id_slot: int | None = None
    ping_s: float | None = None
    ignored: tuple[str, ...] = ()

    @abstractmethod
    def submission(self, processor: InputProcessor, loaded: Sequence[str] = ()) -> Submission:
        """Returns the requests, one for each prompt. Raises InputError.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.
        """

    @property
    def n_prompts(self) -> int:
        """The number of prompts."""
        return 1

    @property
    def has_media(self) -> bool:
        """True if a prompt has images or audio. Decoding them takes time and memory."""
        return False

    @property
    def cuts(self) -> bool:
        """True if prompts above the limit are cut."""
        return self.params.overflow == "truncate" or self.params.truncate_prompt_tokens is not None

    @property
    def answered_tier(self) -> str | None:
        """The service_tier of the answer, with "default" for "auto"; None: the body names no tier."""
        return "default" if self.service_tier == "auto" else self.service_tier

    def params_for(self, processor: InputProcessor) -> SamplingParams:
        """Returns the parameters, with text_biases as biases of token ids in logit_bias. Raises InputError."""
        if not self.text_biases:
            return self.params
        biases = dict(self.params.biases)
        for text, bias in self.text_biases:
            for token_id in processor.tokenize(text, False, False):
                biases[token_id] = bias
        return dataclasses.replace(self.params, logit_bias=biases)

    def adapter_scales(self, loaded: Sequence[str]) -> Mapping[str, float] | None:
        """Returns names and scales of the requested adapters; None: the body names no adapters.

        Args:
            loaded: names of the loaded adapters. The index of a name is the adapter's id in llama-server's API.

        Raises:
            AdapterError: `lora` has an id that belongs to no loaded adapter.
        """
        return scales_of(self.adapters, self.lora, loaded)


def read_generation(body: Body, rules: Rules, *, max_tokens: int | None = None, chat: bool = False) -> dict[str, Any]:
    """Reads the values of a Generation by name. The reader of the endpoint must remove its own fields first.

    Args:
        max_tokens: the default limit, used if neither the body nor the server's options set a limit; None: no limit.
        chat: True: logprobs is a boolean, and top_logprobs is the number of logprobs, as in a chat.

    Raises:
        InputError, ApiError: a value is refused.
    """
    text_biases = _take_text_biases(body)
    _take_stops(body)
    _take_limits(body)
    no_output = _generates_nothing(body)
    _take_breakers(body)
    _take_samplers(body)
    found: dict[str, Any] = {
        "model": body.label("model"),
        "text_biases": text_biases,
        "stream": body.boolean("stream"),
        "service_tier": body.choice("service_tier", TIERS),
        "request_id": _request_id(body.take("request_id")),
        "return_token_ids": body.boolean("return_token_ids") | body.boolean("return_tokens"),
        "tokens_as_ids": body.boolean("return_tokens_as_token_ids"),
        "timings_per_token": body.boolean("timings_per_token"),
        "return_progress": body.boolean("return_progress"),
        "verbose": body.boolean("verbose", rules.verbose),
        "no_output": no_output,
    }
    if rules.slot_files:
        found["id_slot"] = body.integer("id_slot", -1, 2**31 - 1)
    elif (number := body.take("id_slot")) not in (None, -1):
        body.ignore("id_slot", number, "slots are leased, and a known prefix is found in whichever has it")
    found["adapters"], found["lora"] = read_adapters(body)
    ping = body.integer("sse_ping_interval", -1, 2**31 - 1)
    found["ping_s"] = None if ping is None else float(max(0, ping))
    found |= _stream_options(body, found["stream"])
    found["form"] = _form(body)
    given = _params(body, found["service_tier"], chat)
    params = SamplingParams.from_options(**{"max_tokens": max_tokens, **rules.sampling, **given})
    if rules.timeout_s is not None:
        deadline = rules.timeout_s if params.deadline_s is None else min(params.deadline_s, rules.timeout_s)
        params = dataclasses.replace(params, deadline_s=deadline)
    if found["stream"] and params.n_copies > params.n:
        raise SamplingError(
            f"best_of is {params.best_of}, above n, with stream: the best answers are known only at the end; leave out "
            "best_of or stream"
        )
    found["params"] = params
    found["ignored"] = tuple(body.ignored)
    return found


def _stream_options(body: Body, stream: bool) -> Json:
    if "stream_options" in body and not stream:
        raise SamplingError("stream_options is given, and stream is not true; leave stream_options out")
    options = body.nested("stream_options", ("include_usage", "continuous_usage_stats"))
    names = {"include_usage": "include_usage", "continuous_usage": "continuous_usage_stats"}
    return {
        own: boolean(SamplingError, f"stream_options.{given}", options.get(given, False))
        for own, given in names.items()
    }


def _params(body: Body, tier: str | None, chat: bool) -> Json:
    """Reads the values of SamplingParams from a body, by the names of SamplingParams."""
    values = {name: value for name, value in body.rest().items() if name in PARAMETERS or name in AS_HERE}
    if "n_cmpl" in body:
        values = {"n": body.take("n_cmpl")} | values
    for name in ("reasoning_budget_tokens", "thinking_budget_tokens"):
        budget = body.integer(name, -1, 2**31 - 1)
        if budget is not None and budget >= 0:
            values["thinking_token_budget"] = budget
    if not body.boolean("cache_prompt", True):
        values.setdefault("skip_reading_prefix_cache", True)
    if chat and not isinstance(values.get("logprobs", False), bool):
        boolean(SamplingError, "logprobs of a chat", values["logprobs"])
    if chat and "top_logprobs" in values and values.get("logprobs") is not True:
        raise SamplingError(f"top_logprobs is {show(values['top_logprobs'])}; it needs logprobs to be true")
    if chat and values.get("logprobs") is False:
        del values["logprobs"]
    params = named(_each_once(values))
    if params.get("max_tokens") == -1 and not isinstance(params["max_tokens"], (bool, float)):
        params["max_tokens"] = None
    seed = params.get("seed")
    if isinstance(seed, int) and not isinstance(seed, bool) and -(2**63) <= seed < 0:
        params["seed"] = None if seed == -1 else seed % 2**64  # OpenAI's seeds are signed
    if tier == "flex":
        params.setdefault("background", True)
    elif tier == "priority":
        params.setdefault("priority", PRIORITY_TIER)
    return params


def _each_once(values: Json) -> Json:
    """Returns `values` without repeats, because clients send the same limit both as max_tokens and as
    max_completion_tokens."""
    seen: Json = {}
    for given, value in values.items():
        name = ALIASES.get(given, given)
        others = [kept for other, kept in seen.items() if ALIASES.get(other, other) == name]
        # True == 1 in Python, but `logprobs: true` does not repeat `top_logprobs: 1`.
        if not any(kept == value and isinstance(kept, bool) == isinstance(value, bool) for kept in others):
            seen[given] = value
    return seen


def _form(body: Body) -> str | None:
    """Stores the requested structure as structured_outputs. Returns the name of its field; None: the body has no such
    field."""
    forms: dict[str, Any] = {}
    keys = {
        **{name: name.removeprefix("guided_") for name in ("guided_json", "guided_regex", "guided_choice")},
        **{
            "guided_grammar": "grammar",
            "grammar": "grammar",
            "json_schema": "json",
            "structural_tag": "structural_tag",
        },
    }
    for name, key in keys.items():
        value = body.take(name)
        if value is None or (name == "grammar" and value == ""):  # with llama-server, "" means no grammar
            continue
        forms[name] = _structure(name, {key: value})
    for name in ("response_format", "structured_outputs"):
        value = body.take(name)
        if value is None:
            continue
        if not isinstance(value, (Mapping, Structure)):
            raise SamplingError(f"{name} is {show(value)}; give an object")
        if (form := _structure(name, value)) is not None:
            forms[name] = form
    if len(forms) > 1:
        raise SamplingError(f"{' and '.join(forms)} both ask for a structured output; give one of them")
    given, form = next(iter(forms.items()), (None, None))
    if given is not None and form is not None:
        body.ignore_not_held(given, form.not_held)
    body.put("structured_outputs", form)
    return given


def _structure(name: str, value: Any) -> Structure | None:
    try:
        return structure(value)
    except SamplingError as error:
        raise SamplingError(of_form(name, str(error))) from error


def of_form(name: str, message: str) -> str:
    """Replaces structured_outputs in a message by the name of the field in the body."""
    if name == "structured_outputs":
        return message
    said = _OF_FORM.sub(name, message)
    return said if name in said else f"{name}: {said}"


def _take_stops(body: Body) -> None:
    """Removes empty stop strings, because web pages send "" for no stop string."""
    for name in ("stop", "stop_strings", "stop_sequences"):
        given = body.take(name)
        if isinstance(given, list):
            given = [each for each in given if each != ""]
        body.put(name, given or None)


def _take_breakers(body: Body) -> None:
    """Parses dry_sequence_breakers if its value is a text with a JSON list. SillyTavern sends such texts."""
    for name in ("dry_sequence_breakers", "dry_sequence_breaker"):
        given = body.take(name)
        if isinstance(given, str) and given.startswith("[") and len(given) <= _LONGEST_LIST:
            with contextlib.suppress(ValueError, RecursionError):
                given = json.loads(given)
        body.put(name, given)


def _take_limits(body: Body) -> None:
    """Ignores max_tokens if max_completion_tokens has another value, as OpenAI and vLLM do."""
    newer, older = body.take("max_completion_tokens"), body.take("max_tokens")
    if newer is not None and older is not None and older != newer:
        body.ignore("max_tokens", older, f"max_completion_tokens is {show(newer)}")
        older = None
    body.put("max_completion_tokens", newer)
    body.put("max_tokens", older)


def _take_samplers(body: Body) -> None:
    """Reads samplers, a list of names or a text of letters. Unknown samplers are ignored and named in a header."""
    given = body.take("samplers")
    if given is None:
        return
    names = list(given) if isinstance(given, (str, list)) else None
    if names is None or not all(isinstance(name, str) for name in names):
        raise SamplingError(f"samplers is {show(given)}; give a list of names, as ['top_k', 'temperature']")
    if len(names) > MAX_SAMPLERS:
        raise SamplingError(f"samplers names {len(names)}; at most {MAX_SAMPLERS} are allowed")
    found, unknown = known_samplers(names)
    for name in unknown:
        body.ignore(f"samplers:{name}", given, f"known are {', '.join(KNOWN)}")
    body.put("samplers", tuple(found))


def _take_text_biases(body: Body) -> tuple[tuple[str, float], ...]:
    """Removes the entries whose key is a text from logit_bias, and returns them.

    Replaces the bias `false`, which bans a token, by a number.

    llama-server accepts both texts and bans in bodies.
    """
    given = body.take("logit_bias")
    if given is None:
        return ()
    entries = pairs(given, MAX_BIASES + 1)
    if entries is None:
        raise SamplingError(
            f"logit_bias is {show(given)}; give an object from token id to bias, or a list of such pairs"
        )
    ids: list[tuple[Any, Any]] = []
    texts: list[tuple[str, float]] = []
    seen: set[tuple[Any, Any]] = set()
    for key, bias in entries:
        if isinstance(key, (int, str)) and isinstance(bias, (int, float)):
            if (key, bias) in seen:
                continue
            seen.add((key, bias))
        bias = _BAN if bias is False else bias
        if isinstance(key, str) and not re.fullmatch(r"-?[0-9]{1,20}", key, re.ASCII):
            texts.append((key, float(number(SamplingError, f"logit_bias of {show(key)}", bias, -100.0, 100.0))))
        else:
            ids.append((key, bias))
    if len(entries) > MAX_BIASES:
        raise SamplingError(f"logit_bias holds more than {MAX_BIASES} entries; at most {MAX_BIASES} are allowed")
    body.put("logit_bias", tuple(ids))
    return tuple(texts)


def _request_id(given: object) -> str | None:
    if given is None:
        return None
    if not isinstance(given, str) or not _SAFE_ID.fullmatch(given):
        raise PromptError(f"request_id is {show(given)}; give 1 to 128 letters, digits, points, dashes and underscores")
    return given


def _generates_nothing(body: Body) -> bool:
    """Returns True if the token limit is 0. Replaces the limit 0 by 1, because even a scored prompt needs one step."""
    for name in ("max_tokens", "max_completion_tokens", "n_predict", "max_new_tokens"):
        if name in body and (value := body.take(name)) is not None:
            limit = integer(SamplingError, name, value, -1, 2**31 - 1)
            body.put(name, limit or 1)
            if limit == 0:
                return True
    return False


def filled(params: SamplingParams, model: Model) -> FilledParams:
    """Returns the parameters. Fields without a value get the defaults of the model."""
    defaults = _defaults.get(model)
    if defaults is None:
        defaults = _defaults[model] = defaults_of(model.metadata)
    return fill(params, defaults)
