"""Writes tiny encoders with random weights as GGUF files: BERT and XLM-RoBERTa, for embeddings, ranks and classes.

numpy draws the weights and vocabularies from a seed, under transformers' names. tests/data/encoders/make.py gives the
same weights to transformers' own models, and records their tokens and vectors. The tests compare with these.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

N_EMBD, N_FF, N_HEAD, N_LAYER, N_CTX = 64, 128, 4, 2, 96
SEED = 20261122
_WORDS = """
the a cat dog sat on mat what is capital of france paris rome fish swim in sea red blue runs
""".split()  # noqa: SIM905  # a list would take a line for each
_ENDINGS = ("ing", "ed", "s", "er", "ly", "ness", "est")
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3  # llama.cpp's types of tokens


@dataclass(frozen=True)
class Encoder:
    """A kind of encoder.

    Attributes:
        family: "bert" or "xlm-roberta".
        n_labels: number of outputs of its classification head; 0: it has no head.
        labels: names of these outputs; empty if the file has none.
        pooling: the pooling that the file names; None: no pooling, as llama.cpp's converter writes classifiers.
    """

    family: str
    n_labels: int = 0
    labels: tuple[str, ...] = ()
    pooling: gguf.PoolingType | None = None

    @property
    def is_bert(self) -> bool:
        return self.family == "bert"

    @property
    def position_offset(self) -> int:
        """Number of rows in transformers' position embeddings before the row of position 0."""
        return 0 if self.is_bert else 2

    @property
    def n_token_types(self) -> int:
        return 2 if self.is_bert else 1


ENCODERS = {
    "bert": Encoder("bert", pooling=gguf.PoolingType.MEAN),
    "bert-cls": Encoder("bert", pooling=gguf.PoolingType.CLS),
    "xlm-roberta": Encoder("xlm-roberta", pooling=gguf.PoolingType.MEAN),
    "bert-rank": Encoder("bert", 1, pooling=gguf.PoolingType.RANK),
    "xlm-roberta-rank": Encoder("xlm-roberta", 1),
    "bert-classes": Encoder("bert", 4, ("joy", "anger", "fear", "none")),
    "xlm-roberta-classes": Encoder("xlm-roberta", 3, ("contradiction", "entailment", "neutral")),
}
TEXTS = (
    "The cat sat on the mat.",
    "a",
    "What is the capital of France?",
    "Paris is the capital of France, and Rome is not.",
    "fishing! swimming, 2026 (42) x-y",
    "the red dog runs " * 9,
    "blue",
)
QUERY = "What is the capital of France?"


def vocabulary(family: str, n_more: int = 0) -> list[tuple[str, float]]:
    """Returns tokens in the form of transformers, with scores. Only XLM-R's unigrams use the scores.

    Args:
        n_more: number of additional words, which no text contains, for a vocabulary of realistic size.
    """
    more = [f"zz{n}" for n in range(n_more)]
    letters = string.ascii_lowercase + string.digits
    marks = ".,?!()-"
    if family == "bert":
        names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *marks, *letters, *(f"##{c}" for c in letters)]
        names += [word for word in _WORDS if len(word) > 1] + [f"##{ending}" for ending in _ENDINGS if len(ending) > 1]
        return [(name, 0.0) for name in [*names, *more]]
    pieces = ["▁", *letters, *string.ascii_uppercase, *marks]
    pieces += [f"▁{word}" for word in _WORDS] + [ending for ending in _ENDINGS if len(ending) > 1]
    scored = [(piece, -3.0 - 0.01 * at - (5.0 if len(piece) == 1 else 0.0)) for at, piece in enumerate(pieces)]
    return [
        ("<s>", 0.0),
        ("<pad>", 0.0),
        ("</s>", 0.0),
        ("<unk>", 0.0),
        *scored,
        ("<mask>", 0.0),
        *((m, -99.0) for m in more),
    ]


def weights(kind: Encoder, n_more: int = 0, n_ctx: int = N_CTX) -> dict[str, Any]:
    """Returns the weights by transformers' names, without the prefix of the base model.

    Two kinds of one family have the same base. `n_more` is that of vocabulary(), `n_ctx` the number of positions.
    """
    rng = np.random.default_rng([SEED, int(kind.is_bert)])
    n_vocab = len(vocabulary(kind.family, n_more))
    found: dict[str, Any] = {}

    def matrix(name: str, rows: int, columns: int, std: float, bias: bool = True) -> None:
        found[f"{name}.weight"] = rng.normal(0.0, std, (rows, columns)).astype(np.float32)
        if bias:
            found[f"{name}.bias"] = rng.normal(0.0, 0.1, rows).astype(np.float32)

    def norm(name: str) -> None:
        found[f"{name}.weight"] = rng.normal(0.7, 0.1, N_EMBD).astype(np.float32)
        found[f"{name}.bias"] = rng.normal(0.0, 0.1, N_EMBD).astype(np.float32)

    matrix("embeddings.word_embeddings", n_vocab, N_EMBD, 1.0, bias=False)
    matrix("embeddings.position_embeddings", n_ctx + kind.position_offset, N_EMBD, 0.3, bias=False)
    matrix("embeddings.token_type_embeddings", kind.n_token_types, N_EMBD, 0.3, bias=False)
    norm("embeddings.LayerNorm")
    for layer in range(N_LAYER):
        at = f"encoder.layer.{layer}"
        for part in ("query", "key", "value"):
            matrix(f"{at}.attention.self.{part}", N_EMBD, N_EMBD, N_EMBD**-0.5)
        matrix(f"{at}.attention.output.dense", N_EMBD, N_EMBD, N_EMBD**-0.5)
        norm(f"{at}.attention.output.LayerNorm")
        matrix(f"{at}.intermediate.dense", N_FF, N_EMBD, 0.7 * N_EMBD**-0.5)
        matrix(f"{at}.output.dense", N_EMBD, N_FF, 0.7 * N_FF**-0.5)
        norm(f"{at}.output.LayerNorm")
    head = "pooler.dense" if kind.is_bert else "classifier.dense"
    matrix(head, N_EMBD, N_EMBD, N_EMBD**-0.5)
    if kind.n_labels:
        rng = np.random.default_rng([SEED, kind.n_labels])
        matrix("classifier" if kind.is_bert else "classifier.out_proj", kind.n_labels, N_EMBD, N_EMBD**-0.5)
    return found


# transformers' name -> llama.cpp's name
_LAYER_NAMES = {
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "pooler.dense": "cls",
    "classifier.dense": "cls",
    "classifier": "cls.output",
    "classifier.out_proj": "cls.output",
} | {
    f"encoder.layer.{layer}.{theirs}": f"blk.{layer}.{ours}"
    for layer in range(N_LAYER)
    for theirs, ours in _LAYER_NAMES.items()
}


def tensors(kind: Encoder, n_more: int = 0, n_ctx: int = N_CTX) -> Iterator[tuple[str, Any]]:
    """Yields the weights by llama.cpp's names, as its converter writes them. Arguments are those of weights()."""
    for theirs, values in weights(kind, n_more, n_ctx).items():
        stem, _, end = theirs.rpartition(".")
        if _NAMES[stem] == "cls" and not kind.n_labels:
            continue
        if stem == "embeddings.position_embeddings":
            values = values[kind.position_offset :]
        yield f"{_NAMES[stem]}.{end}", np.ascontiguousarray(values)


def write_encoder(
    name: str, path: Path, *, without: tuple[str, ...] = (), n_more: int = 0, marks: bool = True, **changes: Any
) -> Path:
    """Writes a kind of ENCODERS, and returns the path.

    Args:
        without: names of tensors to leave out.
        n_more: see vocabulary().
        marks: False leaves out the ids of the tokens at the beginning and end of a text.
        changes: metadata of the architecture to add or change. "__" in a key means "."; None leaves the key out.
    """
    kind = ENCODERS[name]
    writer = gguf.GGUFWriter(path, "bert")
    metadata = {
        "block_count": N_LAYER,
        "context_length": N_CTX,
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "attention.head_count": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.causal": False,
        "pooling_type": kind.pooling,
        "classifier.output_labels": list(kind.labels) or None,
    } | {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(f"bert.{key}", value)
        elif isinstance(value, list):
            writer.add_array(f"bert.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"bert.{key}", value)
        elif value is not None:
            writer.add_uint32(f"bert.{key}", int(value))
    _add_vocabulary(writer, kind, n_more, marks)
    for ours, values in tensors(kind, n_more):
        if ours not in without:
            writer.add_tensor(ours, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_vocabulary(writer: gguf.GGUFWriter, kind: Encoder, n_more: int, marks: bool) -> None:
    tokens = vocabulary(kind.family, n_more)
    names = [name for name, _ in tokens]
    writer.add_token_type_count(kind.n_token_types)
    if kind.is_bert:
        special = names[:5]
        writer.add_tokenizer_model("bert")
        writer.add_tokenizer_pre("default")
        # llama.cpp's "phantom spaces": a word begins with ▁, and a piece within a word loses its ##
        writer.add_token_list([n if n in special else n[2:] if n.startswith("##") else f"▁{n}" for n in names])
        writer.add_token_types([_CONTROL if name in special else _NORMAL for name in names])
        for add, name in (
            (writer.add_unk_token_id, "[UNK]"),
            (writer.add_sep_token_id, "[SEP]"),
            (writer.add_pad_token_id, "[PAD]"),
            (writer.add_bos_token_id, "[CLS]"),
            (writer.add_mask_token_id, "[MASK]"),
        ):
            add(names.index(name))
        return
    types = {"<s>": _CONTROL, "<pad>": _CONTROL, "</s>": _CONTROL, "<unk>": _UNKNOWN, "<mask>": _CONTROL}
    writer.add_tokenizer_model("t5")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(names)
    writer.add_token_scores([score for _, score in tokens])
    writer.add_token_types([types.get(name, _NORMAL) for name in names])
    writer.add_add_space_prefix(True)
    writer.add_remove_extra_whitespaces(True)
    if marks:
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(2)
        writer.add_sep_token_id(2)
    writer.add_pad_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(True)
    writer.add_add_sep_token(True)
