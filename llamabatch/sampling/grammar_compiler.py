"""Compiles grammars for the vocabulary of one model, and keeps them. A separate process tries each grammar first."""

from __future__ import annotations

import contextlib
import json
import logging
import re
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, TypeVar

import llguidance

from llamabatch.errors import EngineClosedError, EngineError, LlamaBatchError, SamplingError, describe
from llamabatch.request import structural_tag
from llamabatch.request.lark_rules import PARAMETERS, about_line, each_call, without_call
from llamabatch.request.structured_outputs import ANY_OBJECT, TOOLS, Structure, special_name
from llamabatch.sampling import grammar_sandbox
from llamabatch.sampling.grammar_matcher import Compiled, VocabularyFacts
from llamabatch.sampling.reasoning import Tokenizer
from llamabatch.utils.checks import reason, show
from llamabatch.utils.subprogram import import_path, interpreter
from llamabatch.utils.system import NEW_GROUP

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Known = OrderedDict[Structure, tuple[Future[T], float]]

KEPT = 64  # number of compiled or refused grammars that are kept
_PLACE = re.compile(r"^(at \d+\(\d+\): )?(failed to compile JSON schema: |error: )?")
_MOST_LEFT_OUT = 8  # maximum number of functions to leave out of a request because of their schemas
_REMEMBER_BAD_S = 60.0  # seconds until a refused grammar is tried again, because the machine may be less busy then
MOST_SECONDS = 1.5  # maximum CPU seconds to try a grammar out; most grammars need 1 to 20 ms
_PATIENCE_S = 30.0  # maximum seconds to wait for an answer of the trial's process
_STACK = 16 * 2**20  # stack of the compiling thread in bytes: several times the stack in the trial
_TEXTS = 4096  # number of forced texts that are kept with their tokens: a schema often forces the same names
_YIELD_EVERY = 512  # number of tokens that are read (in about 1 ms) before other threads may run
# This program runs grammar_sandbox.py without the rest of the package, because importing the package takes longer.
_RUN = "import runpy, sys; file = sys.argv[1]; sys.path[:] = sys.argv[2:]; runpy.run_path(file, None, '__main__')"


class GrammarModel(Tokenizer, Protocol):
    """The part of a Model that this module uses."""

    n_vocab: int

    @property
    def eog_ids(self) -> tuple[int, ...]: ...


class Grammars:
    """The grammars of one model. Safe to call from any thread. The first request starts the process that tries grammars
    and the thread that compiles them.

    Args:
        model: must stay open until `close`.
    """

    def __init__(self, model: GrammarModel) -> None:
        self._model = model
        self._lock = threading.Lock()
        # structure -> (future of its grammar, time.monotonic() when the work was started)
        self._known: OrderedDict[Structure, tuple[Future[Compiled], float]] = OrderedDict()
        self._tried: OrderedDict[Structure, tuple[Future[str], float]] = OrderedDict()
        self._names: list[str] = []  # names of special tokens
        self._trial = Trial(self._names)
        self._read: _Vocabulary | None = None
        self._vocabulary: Any = None
        self._facts: VocabularyFacts | None = None
        self._specials: dict[str, str] = {}  # names of special tokens -> their names in a grammar
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False

    def compile(self, structure: Structure) -> Future[Compiled]:
        """Returns the future of a compiled grammar. The future of a bad grammar raises SamplingError. Raises
        EngineClosedError after close()."""
        return self._future(self._known, structure, self._compile)

    def check(self, structure: Structure) -> Future[str]:
        """Returns the future of the grammar in llguidance's form. The grammar is tried but not compiled, so it cannot
        crash this process. A process without an engine can call this method, too. Errors are as for `compile`."""
        return self._future(self._tried, structure, self._try_out)

    def _future(self, known: _Known[T], structure: Structure, make: Callable[[Structure], T]) -> Future[T]:
        """Returns the future of a structure's grammar. Starts the work if there is no future, or if the future is
        stale."""
        structure = structure._replace(in_reasoning=False)  # the grammar does not depend on in_reasoning
        with self._lock:
            if self._closed:
                raise EngineClosedError("the model is closed")
            future, start_s = known.get(structure, (None, 0.0))
            now = time.monotonic()
            if future is None or _is_stale(future, now - start_s):
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(1, "llamabatch-grammars")
                with _stack(_STACK):  # submit() starts the thread of the pool
                    future = self._pool.submit(make, structure)
                known[structure] = (future, now)
            known.move_to_end(structure)
            while len(known) > KEPT:
                known.popitem(last=False)
            return future

    def close(self) -> None:
        """Ends the trial process and unfinished compilations. Call it after the last engine of the model has ended."""
        with self._lock:
            self._closed = True
        self._trial.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._known.clear()
        self._tried.clear()
        self._facts = self._read = None
        self._vocabulary = None  # the garbage collector does not see that this object refers to the model

    def _compile(self, structure: Structure) -> Compiled:
        with _errors_of(structure):
            grammar, left_out = self._grammar(structure)
            tokens = self._tokens()
            compiled = Compiled(
                lambda: llguidance.LLMatcher(tokens, grammar, log_level=0, limits=grammar_sandbox.limits()),
                self._facts,
                left_out,
            )
            if compiled.error:
                raise SamplingError(_refusal(structure, compiled.error))
            return compiled

    def _try_out(self, structure: Structure) -> str:
        with _errors_of(structure):
            return self._grammar(structure)[0]

    def _grammar(self, structure: Structure) -> tuple[str, tuple[str, ...]]:
        """Tries a structure. Returns its grammar in llguidance's form, and the names of functions that were left
        out."""
        if not self._model.eog_ids:
            raise SamplingError("structured_outputs need a model that has an end-of-generation token")
        self._read_vocabulary()
        if not _is_foreign(structure):
            return grammar_sandbox.to_llguidance(*structure[:2]), ()
        tried, left_out = self._lark(structure), list[str]()
        while True:
            try:
                return self._trial.run(structure, tried), tuple(left_out)
            except _RefusedError as refused:
                is_optional = structure.kind == TOOLS and len(left_out) < _MOST_LEFT_OUT
                rest = (
                    without_call(tried.text, refused.line or self._faulty_line(structure, tried))
                    if is_optional
                    else None
                )
                if rest is None:
                    raise
                tried = tried._replace(text=rest[0])
                left_out.append(rest[1])

    def _faulty_line(self, structure: Structure, tried: Structure) -> int:
        """Returns the line of the first function that is refused when it is tried alone; 0 if there is none."""
        for line, alone in each_call(tried.text):
            try:
                self._trial.run(structure, tried._replace(text=alone))
            except _RefusedError:
                return line
        return 0

    def _lark(self, structure: Structure) -> Structure:
        """Converts a structural tag to a grammar with this vocabulary's special tokens. Returns other structures
        unchanged."""
        if structure.kind != "structural_tag":
            return structure
        return Structure("grammar", structural_tag.to_lark(structure.text, self._split))

    def _split(self, text: str) -> list[structural_tag.Part]:
        """Splits a text into names of special tokens and the text between them."""
        if not self._specials:
            return [text] if text else []
        names = sorted(self._specials, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", text)
        return [
            structural_tag.Special(self._specials[piece]) if at % 2 else piece
            for at, piece in enumerate(pieces)
            if piece
        ]

    def _tokens(self) -> Any:
        """Returns the vocabulary in llguidance's form. The first call builds it, in 0.5 s for 128k tokens."""
        if self._vocabulary is None:
            vocabulary = self._read_vocabulary()
            self._facts = VocabularyFacts(vocabulary.tokens, self._model.eog_ids, vocabulary)
            self._vocabulary = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(vocabulary),
                n_vocab=self._model.n_vocab,
                eos_token=list(self._model.eog_ids),
            )
        return self._vocabulary

    def _read_vocabulary(self) -> _Vocabulary:
        if self._read is None:
            self._read = _Vocabulary(self._model)
            names = [self._read.tokens[token_id] for token_id in self._read.special_token_ids]
            self._names[:] = [name.decode(errors="replace") for name in names]
            self._specials = self._read.specials
        return self._read


class _Vocabulary:
    """A tokenizer with the methods and attributes that llguidance uses."""

    bos_token_id = None

    def __init__(self, model: GrammarModel) -> None:
        self.eos_token_id = model.eog_ids[0]
        self.tokens: list[bytes] = []
        self.special_token_ids: list[int] = []
        self.specials: dict[str, str] = {}
        for token_id in range(model.n_vocab):
            if token_id % _YIELD_EVERY == 0:
                time.sleep(0)  # lets an engine's thread run
            text = model.token_bytes(token_id)
            if not text and (name := model.all_bytes(token_id)):
                self.special_token_ids.append(token_id)
                named = name.decode(errors="replace")
                text = special_name(named).encode()
                self.specials[named] = text.decode()
            self.tokens.append(text)

        self._line_break = set(model.tokenize("\n", add_special=False))
        self._by_text: dict[bytes, int] = {}
        for token_id in reversed(range(model.n_vocab)):
            self._by_text[self.tokens[token_id]] = token_id
        self._longest = max(map(len, self._by_text))
        self._spelled: dict[bytes, list[int]] = {}
        self._model = model

    def __call__(self, text: str | bytes) -> list[int]:
        """Returns the model's own tokens for a text forced by the grammar. The tokens spell exactly this text."""
        data = text.encode() if isinstance(text, str) else text
        if data not in self._spelled:
            if len(self._spelled) >= _TEXTS:
                self._spelled.clear()
            self._spelled[data] = self._spell(data)
        return self._spelled[data]

    def _spell(self, text: bytes) -> list[int]:
        for before in ("", "\n"):  # some vocabularies add a space, but only at the start of a text
            tokens = self._model.tokenize(before + text.decode(errors="replace"), add_special=False)
            while before and tokens and tokens[0] in self._line_break:
                del tokens[0]
            if b"".join(self.tokens[token_id] for token_id in tokens) == text:
                return tokens
        return self._greedy(text)

    def _greedy(self, text: bytes) -> list[int]:
        """Converts a text to tokens. At each place, takes the longest token that fits. Stops at the first place where
        no token fits."""
        tokens, at = [], 0
        while at < len(text):
            longest = min(self._longest, len(text) - at)
            ends = (at + n for n in range(longest, 0, -1) if text[at : at + n] in self._by_text)
            end = next(ends, None)
            if end is None:
                break
            tokens.append(self._by_text[text[at:end]])
            at = end
        return tokens


class _RefusedError(SamplingError):
    """The trial refuses the grammar. `line` is the faulty line (from 1); 0: unknown."""

    def __init__(self, message: str, line: int) -> None:
        super().__init__(message)
        self.line = line


class Trial:
    """A process that tries grammars out. If the process does not run, `run` starts it.

    Args:
        names: names of the model's special tokens. The list must be complete before the first run().
    """

    def __init__(self, names: list[str]) -> None:
        self._names = names
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._is_late = False  # True: the last grammar took too long
        self._closed = False

    def run(self, structure: Structure, tried: Structure) -> str:
        """Returns `tried` in llguidance's form. Raises SamplingError if the grammar is bad, or if it needs more time or
        memory than the process allows. The error names the kind of `structure`, from which `tried` was made."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            patience_s = _PATIENCE_S if grammar_sandbox.HAS_ALARM else MOST_SECONDS
            answer = self._ask([*tried[:2], MOST_SECONDS], patience_s)
            if answer is None:
                raise SamplingError(_refusal(structure, self._how_it_ended()))
        if "error" in answer:
            why, line = answer["error"], answer["line"]
            if structure.kind == TOOLS:  # the caller does not know this grammar, so the error names the function
                about = about_line(tried.text, line)
                if answer["property"]:
                    about = about.replace(PARAMETERS, f"argument {show(answer['property'])}", 1)
                why = f"{about}{about and ': '}{_PLACE.sub('', why)}"
            raise _RefusedError(_refusal(structure, why), line)
        grammar: str = answer["grammar"]
        return grammar

    def close(self) -> None:
        """Ends the process, which then cannot start again. If a grammar is being tried, it gets no answer."""
        self._closed = True
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        self._end()
        if self._closed:
            raise EngineClosedError("the engine is closed")
        program = Path(grammar_sandbox.__file__).resolve()
        try:
            self._process = subprocess.Popen(
                [interpreter(), "-c", _RUN, str(program), *import_path()],
                start_new_session=True,  # Ctrl-C reaches only the parent
                creationflags=NEW_GROUP,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise EngineError(
                f"structured_outputs: grammars are tried out in a child process, which cannot start: {reason(error)}"
            ) from error
        # this thread reaps the process after a kill; otherwise it would be a zombie until the next one starts
        threading.Thread(target=self._process.wait, name="llamabatch-grammar-end", daemon=True).start()
        if self._ask(self._names, _PATIENCE_S) is None:
            raise EngineError("structured_outputs: the process that tries grammars out cannot be started")

    def _ask(self, question: Sequence[str | float], seconds: float) -> dict[str, Any] | None:
        """Returns the answer of the process; None if the process ended without an answer."""
        process = self._process
        assert process is not None
        assert process.stdin is not None
        assert process.stdout is not None
        self._is_late = False

        def end() -> None:
            self._is_late = True
            process.kill()

        clock = threading.Timer(seconds, end)
        clock.daemon = True
        clock.start()
        try:
            process.stdin.write(json.dumps(question).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except OSError:
            line = b""
        finally:
            clock.cancel()
        if not line.endswith(b"\n"):
            process.kill()
            self._is_late |= grammar_sandbox.ended_by_alarm(process.wait())
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _how_it_ended(self) -> str:
        if self._is_late:
            return f"it takes more than {MOST_SECONDS:g} s to compile"
        return "it is nested too deeply, or needs too much memory to compile"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()
        process.kill()
        process.wait()


def _is_stale(future: Future[Any], age_s: float) -> bool:
    if not future.done():
        return False
    if future.cancelled() or not isinstance(future.exception(), (SamplingError, NoneType)):
        return True  # a new try may succeed: descriptors and memory may be free now
    return age_s > _REMEMBER_BAD_S if future.exception() is not None else getattr(future.result(), "spent", False)


def _is_foreign(structure: Structure) -> bool:
    """Returns True if the grammar may be hostile. Lists of words and the schema for any object are harmless."""
    return structure.kind != "choice" and structure != Structure("json", ANY_OBJECT)


def _refusal(structure: Structure, why: str) -> str:
    what = "tools" if structure.kind == TOOLS else f"{structure.kind} of structured_outputs"
    return f"{what} {'are' if structure.kind == TOOLS else 'is'} refused: {why.removeprefix('error: ')}"


@contextlib.contextmanager
def _errors_of(structure: Structure) -> Iterator[None]:
    """Raises SamplingError for faults of a grammar, EngineError for all other errors."""
    try:
        yield
    except LlamaBatchError:
        raise
    except ValueError as error:
        raise SamplingError(_refusal(structure, str(error))) from error
    except Exception as error:  # this is not the grammar's fault: descriptors or memory may be used up
        logger.exception("a grammar could not be compiled")
        raise EngineError(f"{structure.kind} of structured_outputs cannot be compiled: {describe(error)}") from error


@contextlib.contextmanager
def _stack(size: int) -> Iterator[None]:
    """Gives threads that start within the `with` block a stack of `size` bytes."""
    before = threading.stack_size(size)
    try:
        yield
    finally:
        threading.stack_size(before)
