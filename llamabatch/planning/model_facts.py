"""Reads the facts of a model for the memory arithmetic from the header of its file. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llamabatch.config import ResolvedConfig
from llamabatch.gguf.header import Header, read_parts
from llamabatch.gguf.pooling import declared_pooling, default_pooling, head_width, lacks_dense_layer
from llamabatch.gguf.reader import TensorInfo
from llamabatch.gguf.windows import keeps_snapshots, windows
from llamabatch.planning.compute_buffers import Widths
from llamabatch.planning.machine import Machine

# These architectures have a state, although their metadata has none of the keys read by _state.
_STATES = frozenset({"minimax-01"})
# Files of these architectures give all layers the same number of KV heads, even recurrent layers. A list or an interval
# in the file names the recurrent layers.
_DELTA_NETS = frozenset({"qwen35", "qwen35moe", "qwen3next"})
# In these architectures a layer with a feed-forward network has neither attention nor a state.
_FEED_FORWARD_APART = frozenset({"nemotron_h", "nemotron_h_moe"})
MOST_CTX = 4096  # the largest n_ctx for "auto"; also the context length if a model's file gives none


@dataclass(frozen=True)
class Layer:
    """The elements kept by a layer: K and V for each token, and a state for each sequence. `window` is the number of
    tokens that the layer attends to; 0: all."""

    k_values: int
    v_values: int
    state_values: int = 0
    window: int = 0


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model for the memory arithmetic, from the metadata of its GGUF file.

    Attributes:
        file_bytes: size of the model file, or of all its parts; counted as the size of the weights.
        k_values, v_values: elements of one token in K and in V, summed over the layers. Layers that attend over a
            sliding window count like all other layers.
        n_embd, n_head, n_vocab, n_ctx_train: as in the metadata.
        state_values: elements of the state of a sequence of any length, summed over the recurrent layers.
        draft: facts of the draft model; None: there is none. Its file_bytes is 0 if both models are one file.
        layers: k_values, v_values and state_values of each layer; empty where only the sums are known.
        tensors: the tensors of all files; empty where only the size of the file is known.
        parts: number of tensors in each file; empty: there is one file.
        widths: elements kept at once in a pass; None: not known.
        is_encoder: the model reads a text in both directions, and predicts no next token.
        pooling: the default of the model, a name of gguf/pooling.py.
        names_pooling: True if the file declares a pooling.
        has_head: the model has a classification head.
        lacks_dense_layer: the head has no dense layer, unlike BERT's own head.
        features: features for which llama.cpp repacks weights, as in weights.weights; empty: none.
        adapter_bytes: size of the adapters' files.
        projector_bytes: memory of an mmproj file: weights, buffers of an encoder pass, and kept pictures.
        lazy_cells: as in Machine: buffers of zeros take memory only when they are written.
        drops_copied_pages: as in Machine.
        chat_template: jinja2 source; None: the file has none.
        n_ctx_orig: n_ctx_train before the rotary embedding was scaled; 0 where the file does not name it.
        n_ctx_scaled: tokens allowed by the options for the rotary embedding; 0 without such options.
        has_positions: the model looks positions up in a table; llama.cpp aborts for positions beyond the table's end.
        placed: (name, GPU) of each tensor placed by override_tensor, cpu_moe or n_cpu_moe; None: main memory.
        arch: llama.cpp's name of the architecture.
        head_sizes: elements of an attention head in K and in V; empty: not known.
    """

    name: str
    file_bytes: int
    k_values: int
    v_values: int
    n_embd: int
    n_head: int
    n_vocab: int
    n_ctx_train: int
    state_values: int = 0
    draft: ModelFacts | None = None
    layers: tuple[Layer, ...] = ()
    tensors: tuple[TensorInfo, ...] = ()
    parts: tuple[int, ...] = ()
    widths: Widths | None = None
    is_encoder: bool = False
    pooling: str = "mean"
    names_pooling: bool = False
    has_head: bool = False
    lacks_dense_layer: bool = False
    features: frozenset[str] = frozenset()
    adapter_bytes: int = 0
    projector_bytes: int = 0
    lazy_cells: bool = False
    drops_copied_pages: bool = False
    chat_template: str | None = None
    n_ctx_orig: int = 0
    n_ctx_scaled: int = 0
    has_positions: bool = False
    placed: tuple[tuple[str, int | None], ...] = ()
    arch: str = ""
    head_sizes: tuple[int, ...] = ()

    @property
    def n_ctx_most(self) -> int:
        """The maximum number of tokens of a request."""
        return max(self.n_ctx_train, self.n_ctx_scaled)

    @property
    def has_state(self) -> bool:
        """True if layers are known to keep a state. A state cannot be cut at a position."""
        return self.state_values > 0 or self.arch in _STATES

    @property
    def has_window(self) -> bool:
        """True if some layers attend over a sliding window only."""
        return self.widths is not None and self.widths.masks > 1

    def n_snapshots(self, config: ResolvedConfig) -> int:
        """Returns the number of older states kept by a sequence."""
        return config.n_snapshots if self.state_values and keeps_snapshots(self.arch) else 0

    @property
    def n_layer(self) -> int:
        return len(self.layers)

    def on(self, machine: Machine, extra_bufts: str) -> ModelFacts:
        """Returns a copy of these facts and of the draft model's, to which the machine's features are added.

        Args:
            extra_bufts: the value in the config; "off" turns repacking off.
        """
        return replace(
            self,
            draft=self.draft.on(machine, extra_bufts) if self.draft is not None else None,
            features=machine.features if extra_bufts != "off" else frozenset(),
            lazy_cells=machine.lazy_cells,
            drops_copied_pages=machine.drops_copied_pages,
        )

    @classmethod
    def read(cls, path: Path) -> ModelFacts:
        """Reads the facts from the headers of a model's files, in milliseconds. Raises ModelFileError and OSError."""
        return cls.from_headers(path, read_parts(path))

    @classmethod
    def from_headers(cls, path: Path, parts: tuple[Header, ...]) -> ModelFacts:
        """Returns the facts from the headers of all files of a model."""
        tensors = tuple(tensor for part in parts for tensor in part.tensors)
        file_bytes = sum(part.file_bytes for part in parts)
        facts = cls.from_header(path, parts[0].texts(), tensors, parts[0].n_tokens, file_bytes)
        return replace(facts, parts=tuple(len(part.tensors) for part in parts))

    @classmethod
    def from_header(
        cls, path: Path, metadata: Mapping[str, str], tensors: tuple[TensorInfo, ...], n_tokens: int, file_bytes: int
    ) -> ModelFacts:
        """Returns the facts from the values and tensors of the headers. `n_tokens` is 0 without a vocabulary."""
        arch = metadata.get("general.architecture", "")
        n_vocab = n_tokens or _first(_own(metadata), "vocab_size", 1)
        facts = cls.from_metadata(metadata, file_bytes, n_vocab)
        return replace(
            facts,
            name=facts.name or path.name,
            layers=_layers(_own(metadata), arch),
            tensors=tensors,
            widths=_widths(_own(metadata), tensors, n_vocab),
            is_encoder=metadata.get(f"{arch}.attention.causal") == "false",
            pooling=default_pooling(metadata, tensors),
            names_pooling=declared_pooling(metadata) is not None,
            has_head=head_width(tensors) > 0,
            has_positions=any(tensor.name.startswith("position_embd") for tensor in tensors),
            lacks_dense_layer=lacks_dense_layer(metadata, tensors),
        )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, str], file_bytes: int, n_vocab: int) -> ModelFacts:
        """Returns the facts from llama.cpp's keys (gguf-py/gguf/constants.py), with its defaults for missing keys."""
        own = _own(metadata)
        layers = _layers(own, metadata.get("general.architecture", ""))
        return cls(
            name=metadata.get("general.name", metadata.get("general.architecture", "")),
            file_bytes=file_bytes,
            k_values=sum(layer.k_values for layer in layers),
            v_values=sum(layer.v_values for layer in layers),
            n_embd=_first(own, "embedding_length", 1),
            n_head=max(1, _first(own, "attention.head_count", 1)),
            n_vocab=n_vocab,
            n_ctx_train=_first(own, "context_length", MOST_CTX),
            n_ctx_orig=_first(own, "rope.scaling.original_context_length", 0),
            state_values=sum(layer.state_values for layer in layers),
            chat_template=metadata.get("tokenizer.chat_template") or None,
            arch=metadata.get("general.architecture", ""),
            head_sizes=_head_sizes(own),
        )


def _own(metadata: Mapping[str, str]) -> dict[str, str]:
    """Returns the values of the architecture's keys, without the architecture's name in front."""
    start = f"{metadata.get('general.architecture', '')}."
    return {key.removeprefix(start): text for key, text in metadata.items() if key.startswith(start)}


def _layers(own: Mapping[str, str], architecture: str) -> tuple[Layer, ...]:
    n_layer, n_embd = _first(own, "block_count", 1), _first(own, "embedding_length", 1)
    n_head = _first(own, "attention.head_count", 1)  # 0: there is no attention
    heads = _each_layer(own, "attention.head_count_kv", n_layer, n_head) if n_head else [0] * n_layer
    k_head, v_head = _head_sizes(own)
    if _first(own, "attention.key_length_mla", 0) > 0:  # K and V of a token are one vector, kept once
        v_head = 0
    state = _state(own, n_embd, n_head)
    states = [state if 0 not in heads or n == 0 else 0 for n in heads]
    if architecture in _DELTA_NETS:
        recurrent = _recurrent_layers(own, n_layer)
        n_main = n_layer - _first(own, "nextn_predict_layers", 0)  # a pass omits the last layers, which guess tokens
        heads = [n if i < n_main and not recurrent[i] else 0 for i, n in enumerate(heads)]
        states = [state if i < n_main and recurrent[i] else 0 for i in range(n_layer)]
    elif architecture in _FEED_FORWARD_APART:
        feeds = _each_layer(own, "feed_forward_length", n_layer, 0)
        heads = [0 if width else n for n, width in zip(heads, feeds, strict=True)]
        states = [0 if width else n for n, width in zip(states, feeds, strict=True)]
    own_cells = n_layer - _first(own, "attention.shared_kv_layers", 0)  # the last layers read cells of earlier layers
    heads = [n if i < own_cells else 0 for i, n in enumerate(heads)]
    over = windows(architecture, own, n_layer) or (0,) * n_layer
    return tuple(
        Layer(n * k_head, n * v_head, values, window) for n, values, window in zip(heads, states, over, strict=True)
    )


def _recurrent_layers(own: Mapping[str, str], n_layer: int) -> list[bool]:
    flags = own.get("attention.recurrent_layers", "").strip("[] ").replace(",", " ").lower().split()
    if len(flags) == n_layer:
        return [flag in ("true", "1") for flag in flags]
    interval = _first(own, "full_attention_interval", 4)
    return [interval == 0 or (layer + 1) % interval != 0 for layer in range(n_layer)]


def _head_sizes(own: Mapping[str, str]) -> tuple[int, int]:
    """Returns the number of elements of a head in K and in V."""
    whole = _first(own, "embedding_length", 1) // max(1, _first(own, "attention.head_count", 1))
    return _first(own, "attention.key_length", whole), _first(own, "attention.value_length", whole)


def _widths(own: Mapping[str, str], tensors: tuple[TensorInfo, ...], n_vocab: int) -> Widths:
    n_embd, n_head = _first(own, "embedding_length", 1), _first(own, "attention.head_count", 1)
    k_head, v_head = _head_sizes(own)
    kv_heads = _first(own, "attention.head_count_kv", n_head)
    inner = _first(own, "ssm.inner_size", 0) + 2 * _first(own, "ssm.group_count", 0) * _first(own, "ssm.state_size", 0)
    recurrent = 6 * inner + n_embd if inner else 0
    if _first(own, "wkv.head_size", 0) or _first(own, "kda.head_dim", 0):
        recurrent = 18 * n_embd
    return Widths(
        n_embd=n_embd,
        n_vocab=n_vocab,
        n_head=n_head,
        queries=n_head * max(k_head, v_head),
        keys=kv_heads * (k_head + v_head),
        feed_forward=_feed_forward(own, tensors, n_embd),
        recurrent=recurrent,
        latent=_first(own, "attention.key_length_mla", 0) > 0,
        values=kv_heads * v_head,
        masks=2 if _first(own, "attention.sliding_window", 0) else 1,
        streams=_first(own, "altup.num_inputs", 1),
        per_layer=_first(own, "embedding_length_per_layer_input", 0) * _first(own, "block_count", 0),
    )


def _feed_forward(own: Mapping[str, str], tensors: tuple[TensorInfo, ...], n_embd: int) -> int:
    """Returns the number of elements needed at once for a token in the widest feed-forward network."""
    widest = 0
    outputs: dict[str, int] = {}  # by tensor name without the layer: width of the tensor's output
    for tensor in tensors:
        name = tensor.name.split(".", 2)[-1].removesuffix(".weight")
        if name.startswith(("ffn_up", "ffn_gate", "ffn_down")) and len(tensor.dims) >= 2:
            outputs[name] = max(outputs.get(name, 0), tensor.dims[1])
    used = max(1, _first(own, "expert_used_count", 1))
    for kind, count in (("", 1), ("_exps", used), ("_shexp", 1)):
        up = outputs.get(f"ffn_up{kind}", 0) or outputs.get(f"ffn_gate_up{kind}", 0)
        gated = f"ffn_gate{kind}" in outputs
        live = count * (3 * up if gated else 2 * up)
        if kind == "_exps" and up:
            live = max(live, count * (up + 2 * n_embd)) + count * n_embd
        widest = max(widest, live)
    return widest


def _state(own: Mapping[str, str], n_embd: int, n_head: int) -> int:
    """Returns the number of elements of a recurrent layer's state (llama-hparams.cpp, n_embd_r and n_embd_s); 0 without
    a state.
    """
    wkv = _first(own, "wkv.head_size", 0)
    if wkv:
        return n_embd * (_first(own, "token_shift_count", 2) + wkv)
    conv = _first(own, "shortconv.l_cache", 0)
    if conv:
        return n_embd * (conv - 1)
    conv = max(0, _first(own, "ssm.conv_kernel", 0) - 1)
    kda = _first(own, "kda.head_dim", 0)
    if kda:
        return n_head * kda * (3 * (conv or 3) + kda)
    inner, state = _first(own, "ssm.inner_size", 0), _first(own, "ssm.state_size", 0)
    return conv * (inner + 2 * _first(own, "ssm.group_count", 0) * state) + state * inner


def _each_layer(own: Mapping[str, str], key: str, n_layer: int, default: int) -> list[int]:
    values = _ints(own.get(key, "")) or [default]
    return values if len(values) == n_layer else [values[0]] * n_layer


def _first(own: Mapping[str, str], key: str, default: int) -> int:
    """Returns a number, or the largest item of a list with one number per layer."""
    return max(_ints(own.get(key, "")), default=default)


def _ints(text: str) -> list[int]:
    """Returns the whole numbers of a metadata value such as "8" or "[8, 8, 4]"."""
    return [int(part) for part in text.strip("[] ").replace(",", " ").split() if part.isdigit()]
