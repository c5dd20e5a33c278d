"""Compares logits bit by bit between requests that run alone and together: `benchmarks/equality.py --bits`.

The small random model of each type has heads of 64 elements, four query heads for each KV head, and a vocabulary that
leaves a remainder of rows in every kernel. Other shapes come from llamabatch synth. Each request runs alone in a
sequential engine, and with all others of its round in an engine with random strategy, slots, chunks, threads and
caches. Rows of logits are compared as bytes.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy.typing as npt

from llamabatch import LLM, SamplingParams
from llamabatch.llama import library
from llamabatch.tools.synth import SHAPES, Shape, write_model
from llamabatch.utils.atomic_file import replacement

SHAPE = replace(
    SHAPES["llama-3.1-8b"],
    n_layer=2,
    n_embd=512,
    n_ff=768,
    n_head=8,
    n_head_kv=2,
    head_dim=64,
    n_vocab=2056,
    n_ctx=1024,
)
TYPES = {  # name -> llama_ftype
    "F32": 0, "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_K": 14, "Q5_K": 16, "Q6_K": 18, "Q8_0": 7, "IQ4_NL": 25, "MXFP4": 38,
}  # fmt: skip
ROUND = 40  # requests: enough to fill the slots
SMALL = "small"  # the name of SHAPE


class Digests:
    """A logits processor that keeps a digest of each row and changes nothing."""

    def __init__(self) -> None:
        self.rows: list[bytes] = []

    def __call__(self, output: Sequence[int], logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
        self.rows.append(hashlib.blake2b(logits.tobytes(), digest_size=16).digest())
        return logits


def digests(llm: LLM, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[bytes]]:
    """Returns the digests of the sampled rows of each prompt.

    All prompts run in one call. Decoding is greedy, so that equal rows lead to equal next tokens.
    """
    found = [Digests() for _ in prompts]
    params = [
        SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, logits_processors=[each])
        for length, each in zip(lengths, found, strict=True)
    ]
    for output in llm.generate([list(prompt) for prompt in prompts], params):
        if output.error is not None:
            raise RuntimeError(output.error)
    return [each.rows for each in found]


def alone(llm: LLM, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[list[bytes]]:
    """Returns what `digests` returns, but runs each prompt in a call of its own."""
    return [digests(llm, [prompt], [length])[0] for prompt, length in zip(prompts, lengths, strict=True)]


def requests(seed: int, number: int, n_vocab: int) -> tuple[list[list[int]], list[int]]:
    """Returns prompts of 3 to 570 tokens, some with a common beginning, and numbers of tokens to generate."""
    rng = random.Random(seed)
    shared = [rng.randrange(300, n_vocab - 300) for _ in range(60)]
    prompts, lengths = [], []
    for _ in range(number):
        size = int(3 * 2 ** rng.uniform(0, 6 if rng.random() < 0.9 else 7.4))
        start = shared if rng.random() < 0.3 else []
        prompts.append([*start, *(rng.randrange(300, n_vocab - 300) for _ in range(size))])
        lengths.append(rng.randrange(2, 9))
    return prompts, lengths


def company(seed: int) -> dict[str, Any]:
    """Returns random options of an engine."""
    rng = random.Random(seed)
    return {
        "strategy": rng.choice(["batched", "batched", "static", "length-sorted", "interleaved"]),
        "n_slots": rng.choice([2, 3, 5, 8, 13, 16, 32]),
        "n_ubatch": rng.choice([16, 64, 512]),
        "prefill_share": rng.choice([0.1, 0.5, 1.0]),
        "n_threads": rng.choice([1, 2]),
        "n_threads_batch": rng.choice([1, 2]),
        "cache_prefix": rng.random() < 0.5,
        "preempt": rng.random() < 0.5,
        "speculate": rng.choice(["off", "off", "lookup"]),
    }


@dataclass
class Count:
    """Numbers of compared requests and rows, and in `differ` the number of requests with a row whose bits differ."""

    requests: int = 0
    rows: int = 0
    differ: int = 0

    def add(self, wanted: list[list[bytes]], got: list[list[bytes]]) -> None:
        """Adds requests. Rows after the first one that differs belong to another text and do not count."""
        for one, other in zip(wanted, got, strict=True):
            same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), len(one))
            self.requests += 1
            self.rows += min(same + 1, len(one))
            self.differ += same < len(one) or len(one) != len(other)


def quantised(source: Path, path: Path, kind: str) -> Path:
    """Writes the model of `source` to `path`, with all matrices in the type `kind`, one of TYPES; returns `path`."""
    lib = library.load()
    params = lib.llama_model_quantize_default_params()
    params.ftype, params.pure, params.quantize_output_tensor = TYPES[kind], True, True
    if lib.llama_model_quantize(bytes(source), bytes(path), params) != 0:
        raise RuntimeError(f"{source} cannot be written as {kind}")
    return path


def shape_of(name: str) -> Shape:
    """Returns SHAPE, or a shape of llamabatch synth."""
    return SHAPE if name == SMALL else SHAPES[name]


def model_of(folder: Path, shape: str, kind: str) -> Path:
    """Returns the file of a shape in a type; writes the file if it is missing.

    If the type does not allow a matrix's number of columns (such as 896 in Q4_K), llama.cpp chooses another type.
    """
    source, path = folder / f"{shape}-F16.gguf", folder / f"{shape}-{kind}.gguf"
    if not source.exists():
        write_model(shape_of(shape), source, "F16")
    return path if path.exists() else quantised(source, path, kind)


def count(
    model: Path, n_vocab: int, number: int, kept: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Continues from `kept`, round by round, until `number` requests are counted.

    Args:
        n_vocab: size of the model's vocabulary, for random prompts.
        kept: a former result, or {}.
        save: called with the result after each round.
    """
    total = Count(kept.get("requests", 0), kept.get("rows", 0), kept.get("differ", 0))
    result = dict(kept)
    # One thread: two would wait for each other on a busy machine. `company` draws the other engine's threads.
    with LLM(str(model), strategy="sequential", n_ctx=1024, cache_prefix=False, n_threads=1) as one:
        while total.requests < number:
            seed = total.requests
            prompts, lengths = requests(seed, min(ROUND, number - seed), n_vocab)
            options = company(seed)
            with LLM(str(model), n_ctx=1024, kv="split", **options) as many:
                total.add(alone(one, prompts, lengths), digests(many, prompts, lengths))
                plan = many.plan.reasons["batch_invariant"]
            result = {**vars(total), "plan": plan}
            save(result)
    return result


def load(path: Path | None) -> dict[str, Any]:
    """Returns the document of an earlier run, or {} if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.exists() else {}


def store(path: Path | None, document: dict[str, Any]) -> None:
    if path is not None:
        with replacement(path) as temporary:
            temporary.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            temporary.chmod(0o644)
