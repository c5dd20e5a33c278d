"""Turns the arguments of a completion into a request, and the request's output into llama_cpp's dictionaries."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from llamabatch.compat.callbacks import Biases, Penalties, with_prompt
from llamabatch.compat.grammar import form_of
from llamabatch.errors import EngineClosedError, SamplingError
from llamabatch.request.detokenizer import Detokenizer
from llamabatch.request.logprobs import TextOffsets, TokenLogprobs
from llamabatch.request.outputs import FinishReason, RequestOutput, SequenceOutput
from llamabatch.request.sampling_params import MAX_BIASES, SamplingParams
from llamabatch.request.structured_outputs import Structure
from llamabatch.utils.checks import integer, number, pairs, show

Json = dict[str, Any]

RANDOM_SEED = 0xFFFFFFFF  # LLAMA_DEFAULT_SEED
# SamplingParams has these limits.
_MOST_BIAS = 100.0
_MOST_PENALTY = 2.0
_LEAST_REPEAT, _MOST_REPEAT = 0.01, 100.0


@dataclass(frozen=True)
class Arguments:
    """The arguments of create_completion. For a chat, the structure `form` comes from response_format or tools, and
    `prompt` may be a mapping with a text and its pictures."""

    prompt: str | list[int] | Mapping[str, Any]
    temperature: float
    top_p: float
    min_p: float
    typical_p: float
    frequency_penalty: float
    presence_penalty: float
    repeat_penalty: float
    top_k: int
    seed: int | None
    mirostat_mode: int
    mirostat_tau: float
    mirostat_eta: float
    logits_processor: Iterable[Callable[[Any, Any], Any]] | None
    grammar: Any
    suffix: str | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool = False
    stop: str | list[str] | None = None
    model: str | None = None
    stopping_criteria: Callable[[Any, Any], bool] | None = None
    logit_bias: Mapping[Any, float] | None = None
    form: Structure | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any], **changed: Any) -> Arguments:
        """Makes Arguments from `given` and `changed`; `changed` has priority. Names in `given` that are not fields are
        ignored."""
        names = [field.name for field in fields(cls)]
        return cls(**{name: given[name] for name in names if name in given} | changed)

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())


def sampling_params(
    args: Arguments, prompt: tuple[int, ...], room: int, seed: int | None, last_n: int, *, ignore_eos: bool = False
) -> SamplingParams:
    """Returns the parameters of a request that samples as llama_cpp.Llama does (its _init_sampler).

    Args:
        prompt: the token ids of the prompt.
        room: the number of tokens for the output within n_ctx.
        seed: the seed; None: random.
        last_n: the option last_n_tokens_size of Llama.
        ignore_eos: continue after an end-of-generation token.

    Raises:
        SamplingError: a value is out of range.
    """
    most = room if args.max_tokens is None or args.max_tokens <= 0 else min(args.max_tokens, room)
    if not args.prompt:
        most = max(1, most - 1)  # for an empty prompt llama_cpp counts BOS as an output token
    processors: list[Any] = [with_prompt(process, prompt) for process in args.logits_processor or ()]
    biases = _biases(args.logit_bias)
    plain = {"frequency_penalty": args.frequency_penalty, "presence_penalty": args.presence_penalty}
    penalties: Json = {name: number(SamplingError, name, value, -1e6, 1e6) for name, value in plain.items()}
    repeat = number(SamplingError, "repeat_penalty", args.repeat_penalty, 1e-6, 1e6)
    beyond = last_n > 0 and (
        any(abs(value) > _MOST_PENALTY for value in penalties.values()) or not _LEAST_REPEAT <= repeat <= _MOST_REPEAT
    )
    if biases and (beyond or len(biases) > MAX_BIASES or any(bias > _MOST_BIAS for _, bias in biases)):
        processors.append(Biases(biases))
        biases = []
    # A bias of -100 multiplies a token's probability by e^-100, which is low enough.
    biases = [(token_id, max(bias, -_MOST_BIAS)) for token_id, bias in biases]
    if beyond:
        processors.append(Penalties(last_n, repeat, **{name.partition("_")[0]: v for name, v in penalties.items()}))
    if beyond or last_n <= 0:
        repeat, penalties = 1.0, {}
    form = args.form if args.form is not None else form_of(args.grammar)
    return SamplingParams(
        max_tokens=most,
        stop=args.stops,
        seed=seed,
        ignore_eos=ignore_eos,
        repetition_penalty=repeat,
        repeat_last_n=max(0, last_n),  # llama.cpp's own sampler reads a negative number as 0, not as "all"
        prompt_ignore_length=len(prompt),  # the prompt does not count, because llama_cpp's sampler never sees it
        logits_processors=processors,
        logit_bias=biases,
        structured_outputs=form,
        logprobs=args.logprobs,
        prompt_logprobs=args.logprobs if args.echo else None,
        **penalties,
        **_cuts(args),
    )


def _cuts(args: Arguments) -> Json:
    """Returns the fields for the temperature, for mirostat, and for cuts such as top_k. Replaces out-of-range values
    that mean "off" or "all" in llama.cpp."""
    temperature = number(SamplingError, "temperature", args.temperature, -1e6, 1e6)
    if temperature < 0:  # here llama_cpp draws from the unchanged logits
        return {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "mirostat": 0, "xtc_probability": 0.0}
    if args.mirostat_mode in (1, 2) and temperature > 0:  # llama_cpp applies no temperature before mirostat
        mirostat = {"mirostat_tau": args.mirostat_tau, "mirostat_eta": args.mirostat_eta}
        return {"temperature": 1.0, "mirostat": args.mirostat_mode, "xtc_probability": 0.0, **mirostat}
    shares = {"top_p": args.top_p, "min_p": args.min_p, "typical_p": args.typical_p}
    cuts = {name: min(1.0, max(0.0, number(SamplingError, name, value, -1e6, 1e6))) for name, value in shares.items()}
    top_k = max(0, integer(SamplingError, "top_k", args.top_k, -(2**31), 2**31 - 1))
    return {"temperature": temperature, "top_k": top_k, **cuts, "mirostat": 0, "xtc_probability": 0.0}


def _biases(given: object) -> list[tuple[int, float]]:
    """Returns logit_bias as pairs. Token ids may be texts, as in JSON."""
    if not given:
        return []
    read = pairs(given, 2**20)
    if read is None:
        raise SamplingError(f"logit_bias is {show(given)}; give a mapping from token id to bias")
    found = []
    for key, bias in read:
        token_id = int(key) if isinstance(key, str) and key.isdigit() else key
        token_id = integer(SamplingError, "a token id of logit_bias", token_id, 0, 2**20 - 1)
        if isinstance(bias, bool) or not isinstance(bias, (int, float, np.number)) or not bias < float("inf"):
            raise SamplingError(f"logit_bias of token {token_id} is {show(bias)}; give a finite number, or -inf")
        found.append((token_id, float(bias)))
    return found


@dataclass(frozen=True)
class TokenPieces:
    """The vocabulary of completions: the bytes of each token (b"" for special tokens), and the id of BOS."""

    token_bytes: Callable[[int], bytes]
    bos: int

    def text(self, token_ids: Iterable[int]) -> str:
        """Returns the text of tokens. Bytes that are not valid UTF-8 are left out, as in llama_cpp."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "ignore")


class Completion:
    """The dictionaries of one completion.

    Args:
        prompt_ids: the token ids of the prompt, as given to the engine.
        model: the value of the field "model".
        n_vocab: the length of a row of logits. Stopping criteria get such a row.
    """

    def __init__(
        self, args: Arguments, prompt_ids: tuple[int, ...], model: str, pieces: TokenPieces, n_vocab: int
    ) -> None:
        self.id = f"cmpl-{uuid.uuid4()}"
        self.created = int(time.time())
        self.model = model
        self._args = args
        self._prompt_ids = prompt_ids
        self._pieces = pieces
        self._n_vocab = n_vocab

    def whole(self, output: RequestOutput) -> Json:
        """Returns the "text_completion" dictionary of a finished request."""
        [each] = output.outputs
        _check_ended(each.finish_reason)
        ids, logprobs = each.token_ids, each.logprobs
        if isinstance(each.stop_reason, int):  # llama_cpp does not count the end-of-generation token
            ids, logprobs = ids[:-1], logprobs and logprobs[:-1]
        text = _Text(self._args, self._pieces)
        shown = "".join(map(text.push, ids)) + text.flush()
        return self.document(ids, shown, each.finish_reason.value, logprobs, output.prompt_logprobs)

    def document(
        self,
        ids: tuple[int, ...],
        text: str,
        finish_reason: str,
        logprobs: Sequence[TokenLogprobs] | None,
        prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> Json:
        """Returns the "text_completion" dictionary with these contents."""
        args, prompt = self._args, self._prompt_ids
        found = None if logprobs is None else self._all_logprobs(ids, logprobs, prompt_logprobs)
        before = (args.prompt if isinstance(args.prompt, str) else self._pieces.text(prompt)) if args.echo else ""
        n_output = len(ids) + (not args.prompt)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": n_output, "total_tokens": len(prompt) + n_output}
        return self._document(before + text, found, finish_reason) | {"usage": usage}

    def _document(self, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        choice = {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": finish_reason}
        head = {"id": self.id, "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": [choice]}

    def _all_logprobs(
        self,
        ids: tuple[int, ...],
        logprobs: Sequence[TokenLogprobs],
        prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    ) -> Json:
        """Returns the logprobs of the output. With echo, the prompt's logprobs come first; the first token has None."""
        if not self._args.echo:
            return self._logprobs(ids, logprobs, TextOffsets(len(self._args.prompt), "ignore"))
        skipped = self._prompt_ids[0] == self._pieces.bos
        of_prompt = (prompt_logprobs or (None,) * len(self._prompt_ids))[skipped:]
        found = self._logprobs((*self._prompt_ids[skipped:], *ids), (*of_prompt, *logprobs), TextOffsets(0, "ignore"))
        if found["tokens"]:
            found["token_logprobs"][0] = found["top_logprobs"][0] = None
        return found

    def _logprobs(self, ids: tuple[int, ...], logprobs: Sequence[TokenLogprobs | None], places: TextOffsets) -> Json:
        tokens, offsets, chosen, likeliest = list[str](), list[int](), list[float | None](), list[Json | None]()
        for token_id, given in zip(ids, logprobs, strict=True):
            text, place = self._pieces.text([token_id]), places.add(self._pieces.token_bytes(token_id))
            if token_id != self._pieces.bos:
                tokens.append(text)
                offsets.append(place)
                chosen.append(None if given is None else given[token_id].logprob)
                likeliest.append(None if given is None else self._likeliest(token_id, text, given))
        return {"tokens": tokens, "text_offset": offsets, "token_logprobs": chosen, "top_logprobs": likeliest}

    def _likeliest(self, token_id: int, text: str, given: TokenLogprobs) -> Json:
        ranked = sorted(given.items(), key=lambda item: item[1].rank)[: self._args.logprobs or 0]
        found = {self._pieces.text([other]): each.logprob for other, each in ranked}
        return found | {text: given[token_id].logprob}

    def chunks(self, pieces: Iterator[SequenceOutput]) -> Iterator[Json]:
        """Yields the chunks of a stream. The last chunk has the finish_reason and no text."""
        text, reason = _Text(self._args, self._pieces), FinishReason.LENGTH.value
        places = TextOffsets(len(self._args.prompt), "ignore")
        for token_id, logprobs, ended in self._tokens(pieces):
            if ended is not None:
                reason = ended
                break
            new = text.push(token_id)
            if logprobs is not None:
                yield self._document(new, self._logprobs((token_id,), (logprobs,), places), None)
            elif new:
                yield self._document(new, None, None)
        rest = text.flush()
        if rest:
            yield self._document(rest, None, None)
        yield self._document("", None, reason)

    def until_stopped(self, pieces: Iterator[SequenceOutput]) -> Json:
        """Returns the "text_completion" dictionary of a request. Stopping criteria may end this request."""
        ids, kept, text, reason = list[int](), list[TokenLogprobs](), _Text(self._args, self._pieces), "length"
        shown = ""
        for token_id, logprobs, ended in self._tokens(pieces):
            if ended is not None:
                reason = ended
                break
            ids.append(token_id)
            if logprobs is not None:
                kept.append(logprobs)
            shown += text.push(token_id)
        found = None if self._args.logprobs is None else tuple(kept)
        return self.document(tuple(ids), shown + text.flush(), reason, found, None)

    def token_ids(self, pieces: Iterator[SequenceOutput]) -> Iterator[int]:
        """Yields the tokens of a stream, including its end-of-generation token, until a stopping criterion is met."""
        for token_id, _, ended in self._tokens(pieces, with_end=True):
            if ended is None:
                yield token_id

    def _tokens(
        self, pieces: Iterator[SequenceOutput], *, with_end: bool = False
    ) -> Iterator[tuple[int, TokenLogprobs | None, str | None]]:
        """Yields each token of a stream as (id, logprobs, None), and at the end (0, None, finish reason).

        Args:
            with_end: yield the end-of-generation token, too.
        """
        criteria, known = self._args.stopping_criteria, list(self._prompt_ids)
        row = np.full(self._n_vocab if criteria is not None else 0, np.nan, np.float32)
        for piece in pieces:
            done = piece.finished
            if done is not None:
                _check_ended(done.finish_reason)
            ends_in_eog = not with_end and done is not None and isinstance(done.outputs[0].stop_reason, int)
            ids = piece.token_ids[:-1] if ends_in_eog else piece.token_ids
            for i, token_id in enumerate(ids):
                if criteria is not None and criteria(np.array(known, np.intc), row):
                    yield 0, None, FinishReason.STOP.value
                    return
                known.append(token_id)
                yield token_id, None if piece.logprobs is None else piece.logprobs[i], None
            if done is not None:
                yield 0, None, done.finish_reason.value


class _Text:
    """The text of the output, cut at the stop strings."""

    def __init__(self, args: Arguments, pieces: TokenPieces) -> None:
        self._detokenizer = Detokenizer(pieces.token_bytes, tuple(args.stops), errors="ignore")
        self._leading = not args.prompt  # llama_cpp removes the space after BOS

    def push(self, token_id: int) -> str:
        return self._without_space(self._detokenizer.push(token_id))

    def flush(self) -> str:
        return self._without_space(self._detokenizer.flush())

    def _without_space(self, text: str) -> str:
        if self._leading and text:
            self._leading = False
            return text.removeprefix(" ")
        return text


def _check_ended(reason: FinishReason) -> None:
    """Raises EngineClosedError for a request that was aborted because its engine ended."""
    if reason == FinishReason.ABORT:
        raise EngineClosedError("the model was closed before this completion ended")
