"""Flags of llama-server and `vllm serve`, and their meaning here: start scripts work with the program name changed.

Each name stands in one Row: it becomes options of ours, or is accepted with a line that says why it has no effect, or
is refused with what to do instead. docs/serve_flags.md is written from the rows.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import click

from llamabatch.utils.checks import show

Args = tuple[str, ...]

_TRUE = ("on", "enabled", "true", "1")  # common/arg.cpp, is_truthy and is_falsey
_FALSE = ("off", "disabled", "false", "0")
_ANY: Args = ("*",)
MANY = -1  # one value or more, up to the next flag
LLAMA, VLLM = "llama-server", "vLLM"


@dataclass(frozen=True)
class Row:
    """Flags of one meaning.

    Attributes:
        program: LLAMA or VLLM.
        names: its names. negatives: names that turn it off.
        env: environment variable of llama-server; "": none.
        takes: number of values; MANY: one or more.
        args: arguments of ours for a value; None: no arguments.
        on, off: those of a flag without a value.
        note: said when the flag is given; "": nothing, as it asks for what happens anyway.
        cure: said where a value is refused. fine: values that are not; _ANY: none is refused.
    """

    program: str
    names: Args
    negatives: Args = ()
    env: str = ""
    takes: int = 0
    args: Callable[[str], Args] | None = None
    on: Args = ()
    off: Args = ()
    note: str = ""
    cure: str = ""
    fine: Args = ()


@dataclass
class Translated:
    """Arguments of ours for a command line.

    Attributes:
        args: for click. notes: one line for each flag without effect. environ: variables to be set.
    """

    args: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    environ: dict[str, str] = field(default_factory=dict)


def _to(option: str, skip: Args = ()) -> Callable[[str], Args]:
    """The value as it is, for an option of ours; none for values that ask for what happens anyway."""
    return lambda value: () if value in skip else (option, value)


def _param(name: str, skip: Args = ()) -> Callable[[str], Args]:
    """The value for a field of SamplingParams."""
    return lambda value: () if value in skip else ("-P", f"{name}={value}")


def _form(form: str) -> Callable[[str], Args]:
    return lambda value: ("-P", f"structured_outputs={json.dumps({form: value})}")


def _form_of_file(form: str) -> Callable[[str], Args]:
    return lambda path: _form(form)(_text_of(path))


def _text_of(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read(2**20)
    except (OSError, ValueError) as error:
        raise click.UsageError(f"{show(path)} cannot be read: {error}") from error


def _each(option: str, separator: str = ",") -> Callable[[str], Args]:
    """An option of ours for each part of a list; a file whose name has the separator in it is one part."""

    def args(value: str) -> Args:
        parts = [value] if os.path.exists(value) else [part for part in value.split(separator) if part]
        return tuple(arg for part in parts for arg in (option, part))

    return args


def _json_list(option: str) -> Callable[[str], Args]:
    def args(value: str) -> Args:
        try:
            found = json.loads(value)
        except ValueError:
            found = value.split(",")
        return option, ",".join(str(each) for each in (found if isinstance(found, list) else [found]))

    return args


def _kwarg(name: str, values: Mapping[str, object] | None = None, skip: Args = ()) -> Callable[[str], Args]:
    """A value for the chat template."""

    def args(value: str) -> Args:
        if value in skip:
            return ()
        if values is not None and value not in values:
            raise click.UsageError(f"{show(value)} is none of {', '.join((*values, *skip))}")
        return "--chat-template-kwargs", json.dumps({name: value if values is None else values[value]})

    return args


def _switch(on: Args, off: Args = (), auto: Args = ()) -> Callable[[str], Args]:
    """Arguments for a value that means yes, no or auto."""

    def args(value: str) -> Args:
        if value.lower() in _TRUE:
            return on
        if value.lower() in _FALSE:
            return off
        if value.lower() in ("auto", "-1"):
            return auto
        raise click.UsageError(f"{show(value)} is none of on, off and auto")

    return args


def _scaled(value: str) -> Args:
    """Paths with scales behind colons, as llama-server's, as ours with equals signs."""
    found: list[str] = []
    for part in value.split(","):
        path, colon, scale = part.rpartition(":")
        try:
            number = float(scale)
        except ValueError:
            colon = ""
        found += ["--lora", f"{path}={number:g}" if colon else part]
    return tuple(found)


def _bias(value: str) -> Args:
    match = re.fullmatch(r"(\d+)([+-].+)", value)
    return "--logit-bias", f"{match[1]}={match[2].lstrip('+')}" if match else value


def _layers(value: str) -> Args:
    return "--n-gpu-layers", "-1" if value in ("auto", "all") else value


def _inverse(option: str) -> Callable[[str], Args]:
    def args(value: str) -> Args:
        try:
            return option, repr(1 / float(value))
        except (ValueError, ZeroDivisionError):
            raise click.UsageError(f"{show(value)} is no number above 0") from None

    return args


def _load_mode(value: str) -> Args:
    modes = {
        "auto": (), "mmap": ("--use-mmap",), "none": ("--no-use-mmap",), "dio": ("--no-use-mmap",),
        "mlock": ("--no-use-mmap", "--use-mlock"), "mmap+mlock": ("--use-mmap", "--use-mlock"),
    }  # fmt: skip
    if value not in modes:
        raise click.UsageError(f"{show(value)} is none of {', '.join(modes)}")
    return modes[value]


def _verbosity(value: str) -> Args:
    try:
        level = int(value)
    except ValueError:
        raise click.UsageError(f"{show(value)} is no whole number") from None
    return "--log-level", "error" if level <= 1 else "warning" if level == 2 else "info" if level == 3 else "debug"


def _spec_type(value: str) -> Args:
    kinds = {part.strip() for part in value.split(",")}
    if kinds <= {"none"}:
        return ()
    if all(kind.startswith("ngram") for kind in kinds):
        return "--speculate", "lookup"
    if kinds == {"draft-simple"}:
        return "--speculate", "draft"
    raise click.UsageError(f"{show(value)} cannot be honoured; give none, draft-simple or ngram-simple")


def _speculative(value: str) -> Args:
    """vLLM's JSON: {"method": "ngram", "num_speculative_tokens": 5}, or with "model"."""
    try:
        given = json.loads(value)
        method, n_draft = given.get("method"), given.get("num_speculative_tokens")
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None
    tail: Args = () if n_draft is None else ("--n-draft", str(n_draft))
    if method == "ngram":
        return "--speculate", "lookup", *tail
    if given.get("model") and method in (None, "draft_model"):
        return "--speculate", "draft", "--draft-model", str(given["model"]), *tail
    raise click.UsageError(f"the method {show(method)} cannot be honoured; give ngram, or draft_model with a model")


def _seconds_both(value: str) -> Args:
    return "--body-timeout-s", value, "--write-timeout-s", value


def _generation(value: str) -> Args:
    """vLLM's JSON of sampling defaults."""
    try:
        given = json.loads(value)
        return tuple(arg for name, each in given.items() for arg in ("-P", f"{name}={json.dumps(each)}"))
    except (ValueError, AttributeError):
        raise click.UsageError(f"{show(value)} is no JSON object") from None


_KV_TYPES = {"auto": None, "fp16": "f16", "float16": "f16", "bfloat16": "bf16", "bf16": "bf16"}


def _kv_dtype(value: str) -> Args:
    kind = _KV_TYPES.get(value, "")
    if kind == "":
        raise click.UsageError(f"{show(value)} is no type that llama.cpp has; give --type-k and --type-v, as q8_0")
    return () if kind is None else ("--type-k", kind, "--type-v", kind)


def _splits(value: str) -> Args:
    return "--tensor-split", value.replace("/", ",").replace(";", ",")


def _row(names: str, args: Callable[[str], Args] | None = None, **more: object) -> Row:
    return Row(LLAMA, tuple(names.split()), takes=1, args=args, **more)  # type: ignore[arg-type]


def _flag(names: str, no: str = "", **more: object) -> Row:
    return Row(LLAMA, tuple(names.split()), tuple(no.split()), **more)  # type: ignore[arg-type]


_NO_MEDIA = "models take text alone here"
_ONE_MODEL = "a server serves one model here; start one for each, on ports of their own"
_NO_TOOLS = "tools of the server's own are not run here; clients run theirs"
_PRESET = "give the model by name: -hf owner/repo:quant"
_AFFINITY = "threads keep the affinity and the priority that the process was started with (taskset, chrt, nice)"
_CACHE = "finished requests leave their cells in their slots; no further copy is kept in memory"
_DRAFT_AS_MAIN = "the draft model runs with the threads, devices and KV types of the model"
_NGRAM = "the length of what is looked up is found from the text"
_NO_LOG = "the log has one form"
_NO_BENCH = "it is for benchmarks of llama.cpp alone"

_LLAMA: tuple[Row, ...] = (
    _flag("-h --help --usage", on=("--help",)),
    _flag("--version", cure="`llamabatch --version` shows it"),
    _flag("-cl --cache-list", cure="`llamabatch models` lists them"),
    _flag("--completion-bash", cure="`llamabatch completion bash` prints it"),
    # threads
    _row("-t --threads", _to("--n-threads", ("-1", "0")), env="LLAMA_ARG_THREADS"),
    _row("-tb --threads-batch", _to("--n-threads-batch", ("-1", "0"))),
    _row("-C --cpu-mask", cure="start under taskset: taskset MASK llamabatch serve"),
    _row("-Cr --cpu-range", cure="start under taskset: taskset -c LO-HI llamabatch serve"),
    _row("--cpu-strict", note=_AFFINITY, fine=_ANY),
    _row("--prio", note=_AFFINITY, fine=_ANY),
    _row("--poll", note="threads wait as llama.cpp's defaults say", fine=_ANY),
    _row("-Cb --cpu-mask-batch", cure="start under taskset: taskset MASK llamabatch serve"),
    _row("-Crb --cpu-range-batch", cure="start under taskset: taskset -c LO-HI llamabatch serve"),
    _row("--cpu-strict-batch", note=_AFFINITY, fine=_ANY),
    _row("--prio-batch", note=_AFFINITY, fine=_ANY),
    _row("--poll-batch", note="threads wait as llama.cpp's defaults say", fine=_ANY),
    # context and batches
    _row("-c --ctx-size", _to("--ctx-size"), env="LLAMA_ARG_CTX_SIZE"),
    _row("-n --predict --n-predict", _to("--n-predict"), env="LLAMA_ARG_N_PREDICT"),
    _row("-b --batch-size", _to("--n-batch"), env="LLAMA_ARG_BATCH"),
    _row("-ub --ubatch-size", _to("--n-ubatch"), env="LLAMA_ARG_UBATCH"),
    _row("--keep", note="a request that outgrows n_ctx with --context-shift loses its oldest tokens", fine=_ANY),
    _flag("--swa-full", env="LLAMA_ARG_SWA_FULL", on=("--swa-full",)),
    _row(
        "-fa --flash-attn",
        _switch(("--flash-attn", "on"), ("--flash-attn", "off"), ("--flash-attn", "auto")),
        env="LLAMA_ARG_FLASH_ATTN",
    ),
    _flag("--perf", "--no-perf", env="LLAMA_ARG_PERF", note="/metrics has the times"),
    _flag("-e --escape", "--no-escape"),
    _row("--rope-scaling", _to("--rope-scaling"), env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _row("--rope-scale", _inverse("--rope-freq-scale"), env="LLAMA_ARG_ROPE_SCALE"),
    _row("--rope-freq-base", _to("--rope-freq-base", ("0",)), env="LLAMA_ARG_ROPE_FREQ_BASE"),
    _row("--rope-freq-scale", _to("--rope-freq-scale", ("0",)), env="LLAMA_ARG_ROPE_FREQ_SCALE"),
    _row("--yarn-orig-ctx", _to("--yarn-orig-ctx", ("0",)), env="LLAMA_ARG_YARN_ORIG_CTX"),
    _row("--yarn-ext-factor", _to("--yarn-ext-factor", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_EXT_FACTOR"),
    _row("--yarn-attn-factor", _to("--yarn-attn-factor", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_ATTN_FACTOR"),
    _row("--yarn-beta-slow", _to("--yarn-beta-slow", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_BETA_SLOW"),
    _row("--yarn-beta-fast", _to("--yarn-beta-fast", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_BETA_FAST"),
    _flag(
        "-kvo --kv-offload",
        "-nkvo --no-kv-offload",
        env="LLAMA_ARG_KV_OFFLOAD",
        on=("--offload-kqv",),
        off=("--no-offload-kqv",),
    ),
    _flag("--repack", "-nr --no-repack", env="LLAMA_ARG_REPACK", off=("--extra-bufts", "off")),
    _flag("--no-host", env="LLAMA_ARG_NO_HOST", note="buffers are chosen for the weights, see --extra-bufts"),
    _row("-ctk --cache-type-k", _to("--type-k"), env="LLAMA_ARG_CACHE_TYPE_K"),
    _row("-ctv --cache-type-v", _to("--type-v"), env="LLAMA_ARG_CACHE_TYPE_V"),
    _row("-dt --defrag-thold", env="LLAMA_ARG_DEFRAG_THOLD", note="cells are never scattered", fine=_ANY),
    _row("--rpc", _to("--rpc"), env="LLAMA_ARG_RPC"),
    _row("-lm --load-mode", _load_mode, env="LLAMA_ARG_LOAD_MODE"),
    _flag("--mmap", "--no-mmap", env="LLAMA_ARG_MMAP", on=("--use-mmap",), off=("--no-use-mmap",)),
    _flag("--mlock", env="LLAMA_ARG_MLOCK", on=("--use-mlock",)),
    _flag(
        "-dio --direct-io", "-ndio --no-direct-io", env="LLAMA_ARG_DIO", note="the file is read by the system's cache"
    ),
    _row("-lzm --lazy-mode", env="LLAMA_ARG_LAZY_MODE", note="weights are mapped, and read when used", fine=_ANY),
    _row("--numa", _to("--numa"), env="LLAMA_ARG_NUMA"),
    _row("-dev --device", _to("--devices"), env="LLAMA_ARG_DEVICE"),
    _flag("--list-devices", cure="`llamabatch doctor` lists them"),
    _row("-ot --override-tensor", _to("--override-tensor"), env="LLAMA_ARG_OVERRIDE_TENSOR"),
    _flag("-cmoe --cpu-moe", env="LLAMA_ARG_CPU_MOE", on=("--cpu-moe",)),
    _row("-ncmoe --n-cpu-moe", _to("--n-cpu-moe"), env="LLAMA_ARG_N_CPU_MOE"),
    _row("-ncffn --n-cpu-ffn", env="LLAMA_ARG_N_CPU_FFN", cure="give --override-tensor 'blk\\.[0-9]\\.ffn_.*=CPU'"),
    _row("-ngl --gpu-layers --n-gpu-layers", _layers, env="LLAMA_ARG_N_GPU_LAYERS"),
    _row("-sm --split-mode", _to("--split-mode"), env="LLAMA_ARG_SPLIT_MODE"),
    _row("-ts --tensor-split", _splits, env="LLAMA_ARG_TENSOR_SPLIT"),
    _row("-mg --main-gpu", _to("--main-gpu"), env="LLAMA_ARG_MAIN_GPU"),
    _row("-fit --fit", _switch((), ()), env="LLAMA_ARG_FIT", note="what is auto is chosen so that it fits"),
    _row("-fitt --fit-target", env="LLAMA_ARG_FIT_TARGET", note="half of the free memory is left", fine=_ANY),
    _row("-fitc --fit-ctx", env="LLAMA_ARG_FIT_CTX", note="n_ctx is chosen before the number of slots", fine=_ANY),
    _flag("--check-tensors", note="the file's header and sizes are always checked, see --trial and --sha256"),
    _row("--override-kv", _to("--kv-overrides")),
    _flag("--op-offload", "--no-op-offload", on=("--op-offload",), off=("--no-op-offload",)),
    # adapters
    _row("--lora", _each("--lora")),
    _row("--lora-scaled", _scaled),
    _row("--control-vector", _each("--lora")),
    _row("--control-vector-scaled", _scaled),
    Row(LLAMA, ("--control-vector-layer-range",), takes=2, cure="a control vector applies to all its layers"),
    _flag("--lora-init-without-apply", on=("--lora-init-without-apply",)),
    # model
    _row("-m --model", _to("--model"), env="LLAMA_ARG_MODEL"),
    _row("-mu --model-url", _to("--model"), env="LLAMA_ARG_MODEL_URL"),
    _row(
        "-dr --docker-repo", env="LLAMA_ARG_DOCKER_REPO", cure="give a file, an https address or -hf owner/repo:quant"
    ),
    _row("-hf -hfr --hf-repo", _to("--hf-repo"), env="LLAMA_ARG_HF_REPO"),
    _row("-hff --hf-file", _to("--hf-file"), env="LLAMA_ARG_HF_FILE"),
    _row("-hft --hf-token", _to("--hf-token")),
    _flag("--offline", env="LLAMA_ARG_OFFLINE", on=("--offline",)),
    # log
    _flag("--log-disable", on=("--log-level", "error")),
    _row("--log-file", _to("--log-file"), env="LLAMA_ARG_LOG_FILE"),
    _flag("--log-jsonl", "--no-log-jsonl", env="LLAMA_ARG_LOG_JSONL", note=_NO_LOG),
    _row("--log-colors", env="LLAMA_ARG_LOG_COLORS", note=_NO_LOG, fine=_ANY),
    _flag("-v --verbose --log-verbose", on=("--log-level", "debug")),
    _row("-lv --verbosity --log-verbosity", _verbosity, env="LLAMA_ARG_LOG_VERBOSITY"),
    _flag("--log-prefix", "--no-log-prefix", env="LLAMA_ARG_LOG_PREFIX", note=_NO_LOG),
    _flag("--log-timestamps", "--no-log-timestamps", env="LLAMA_ARG_LOG_TIMESTAMPS", note=_NO_LOG),
    _row("--log-prompts-dir", cure="the server never writes prompts down; let the client do it"),
    # sampling of requests that say nothing
    _row("--samplers", _to("--samplers")),
    _row("--sampler-seq --sampling-seq", _to("--sampler-seq")),
    _row("-s --seed", _to("--seed", ("-1", "4294967295"))),
    _flag("--ignore-eos", on=("--ignore-eos",)),
    _row("--temp --temperature", _to("--temperature"), env="LLAMA_ARG_TEMPERATURE"),
    _row("--top-k", _to("--top-k"), env="LLAMA_ARG_TOP_K"),
    _row("--top-p", _to("--top-p"), env="LLAMA_ARG_TOP_P"),
    _row("--min-p", _to("--min-p"), env="LLAMA_ARG_MIN_P"),
    _row("--top-nsigma --top-n-sigma", _param("top_n_sigma")),
    _row("--xtc-probability", _param("xtc_probability")),
    _row("--xtc-threshold", _param("xtc_threshold")),
    _row("--typical --typical-p", _param("typical_p")),
    _row("--repeat-last-n", note="penalties look at the whole prompt and the whole output", fine=_ANY),
    _row("--repeat-penalty", _to("--repetition-penalty"), env="LLAMA_ARG_REPEAT_PENALTY"),
    _row("--presence-penalty", _to("--presence-penalty"), env="LLAMA_ARG_PRESENCE_PENALTY"),
    _row("--frequency-penalty", _to("--frequency-penalty"), env="LLAMA_ARG_FREQUENCY_PENALTY"),
    _row("--dry-multiplier", _param("dry_multiplier")),
    _row("--dry-base", _param("dry_base")),
    _row("--dry-allowed-length", _param("dry_allowed_length")),
    _row("--dry-penalty-last-n", _param("dry_penalty_last_n")),
    _row(
        "--dry-sequence-breaker",
        lambda value: ("-P", f"dry_sequence_breakers={json.dumps([] if value == 'none' else [value])}"),
    ),
    _row(
        "--adaptive-target",
        fine=("-1", "-1.0", "-1.00"),
        cure="there is no adaptive-p sampler; give --top-p, --min-p or -P mirostat=2",
    ),
    _row("--adaptive-decay", note="there is no adaptive-p sampler", fine=_ANY),
    _row("--dynatemp-range", _param("dynatemp_range")),
    _row("--dynatemp-exp", _param("dynatemp_exponent")),
    _row("--mirostat", _param("mirostat")),
    _row("--mirostat-lr", _param("mirostat_eta")),
    _row("--mirostat-ent", _param("mirostat_tau")),
    _row("-l --logit-bias", _bias),
    _row("--grammar", _form("grammar")),
    _row("--grammar-file", _form_of_file("grammar")),
    _row("-j --json-schema", _form("json")),
    _row("-jf --json-schema-file", _form_of_file("json")),
    _flag(
        "-bs --backend-sampling", env="LLAMA_ARG_BACKEND_SAMPLING", note="sampling runs on the CPU, all rows at once"
    ),
    _flag(
        "--context-shift",
        "--no-context-shift",
        env="LLAMA_ARG_CONTEXT_SHIFT",
        on=("-P", "overflow=shift"),
        off=("-P", "overflow=refuse"),
    ),
    _row("-r --reverse-prompt", _to("--stop")),
    _flag("-sp --special", on=("-P", "skip_special_tokens=false")),
    # slots and their cells
    _row(
        "-lcs --lookup-cache-static", cure="there is no file of n-grams; --speculate lookup looks into the text so far"
    ),
    _row(
        "-lcd --lookup-cache-dynamic", cure="there is no file of n-grams; --speculate lookup looks into the text so far"
    ),
    _row(
        "--kv-unified-per-slot",
        lambda value: ("--n-ctx", value, "--kv", "unified"),
        env="LLAMA_ARG_KV_UNIFIED_PER_SLOT",
    ),
    _row("-ctxcp --ctx-checkpoints --swa-checkpoints", env="LLAMA_ARG_CTX_CHECKPOINTS", note=_CACHE, fine=_ANY),
    _row("-cms --checkpoint-min-step", env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", note=_CACHE, fine=_ANY),
    _row("-cram --cache-ram", env="LLAMA_ARG_CACHE_RAM", note=_CACHE, fine=_ANY),
    _flag(
        "-kvu --kv-unified",
        "-no-kvu --no-kv-unified",
        env="LLAMA_ARG_KV_UNIFIED",
        on=("--kv", "unified"),
        off=("--kv", "split"),
    ),
    _flag("--cache-idle-slots", "--no-cache-idle-slots", env="LLAMA_ARG_CACHE_IDLE_SLOTS", note=_CACHE),
    _flag("--warmup", "--no-warmup"),
    _flag("--spm-infill", note="the order of an infill prompt is that of the model's family"),
    _row("--pooling", _to("--pooling"), env="LLAMA_ARG_POOLING"),
    _row("-np --parallel", _to("--n-slots", ("-1", "0")), env="LLAMA_ARG_N_PARALLEL"),
    _flag("-cb --cont-batching", env="LLAMA_ARG_CONT_BATCHING"),
    _flag("-nocb --no-cont-batching", on=("--strategy", "static")),
    _row("-sps --slot-prompt-similarity", note="the slot with the longest equal beginning is taken", fine=_ANY),
    # media
    _row("-mm --mmproj", env="LLAMA_ARG_MMPROJ", cure=_NO_MEDIA),
    _row("-mmu --mmproj-url", env="LLAMA_ARG_MMPROJ_URL", cure=_NO_MEDIA),
    _flag("--mmproj-auto", "--no-mmproj --no-mmproj-auto", env="LLAMA_ARG_MMPROJ_AUTO"),
    _flag("--mmproj-offload", "--no-mmproj-offload", env="LLAMA_ARG_MMPROJ_OFFLOAD", note=_NO_MEDIA),
    _row("-mmdev --mmproj-device", env="MTMD_BACKEND_DEVICE", note=_NO_MEDIA, fine=_ANY),
    _row("--image-min-tokens", env="LLAMA_ARG_IMAGE_MIN_TOKENS", note=_NO_MEDIA, fine=_ANY),
    _row("--image-max-tokens", env="LLAMA_ARG_IMAGE_MAX_TOKENS", note=_NO_MEDIA, fine=_ANY),
    _row("--mtmd-batch-max-tokens", env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", note=_NO_MEDIA, fine=_ANY),
    _row("--video-fps", env="LLAMA_ARG_VIDEO_FPS", note=_NO_MEDIA, fine=_ANY),
    _row("--video-timestamp-interval", env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", note=_NO_MEDIA, fine=_ANY),
    _row("--video-ffmpeg-dir", env="LLAMA_ARG_VIDEO_FFMPEG_DIR", note=_NO_MEDIA, fine=_ANY),
    _row("--media-path", cure=_NO_MEDIA),
    # HTTP
    _row("-a --alias", lambda value: ("--served-model-name", value, "--any-model"), env="LLAMA_ARG_ALIAS"),
    _row("--tags", env="LLAMA_ARG_TAGS", note="models have no tags", fine=_ANY),
    _row("--embd-normalize", fine=("2",), cure="vectors have length 1; the body of a request may say otherwise"),
    _row("--host", _to("--host"), env="LLAMA_ARG_HOST"),
    _row("--port", _to("--port"), env="LLAMA_ARG_PORT"),
    _flag("--reuse-port", env="LLAMA_ARG_REUSE_PORT", on=("--reuse-port",)),
    _row("--path", env="LLAMA_ARG_STATIC_PATH", cure="files of your own are served by a proxy in front"),
    _row("--cors-origins", _to("--cors-origins"), env="LLAMA_ARG_CORS_ORIGINS"),
    _row("--cors-methods", lambda v: ("--cors-methods", v.replace(" ", "")), env="LLAMA_ARG_CORS_METHODS"),
    _row("--cors-headers", lambda v: ("--cors-headers", v.replace(" ", "")), env="LLAMA_ARG_CORS_HEADERS"),
    _flag(
        "--cors-credentials",
        "--no-cors-credentials",
        env="LLAMA_ARG_CORS_CREDENTIALS",
        on=("--cors-credentials",),
        off=("--no-cors-credentials",),
    ),
    _row("--api-prefix", _to("--root-path"), env="LLAMA_ARG_API_PREFIX"),
    _row(
        "--ui-config --webui-config",
        env="LLAMA_ARG_UI_CONFIG",
        note="the page keeps its settings in the browser",
        fine=_ANY,
    ),
    _row(
        "--ui-config-file --webui-config-file",
        env="LLAMA_ARG_UI_CONFIG_FILE",
        note="the page keeps its settings in the browser",
        fine=_ANY,
    ),
    _flag("--ui-mcp-proxy --webui-mcp-proxy", env="LLAMA_ARG_UI_MCP_PROXY", cure=_NO_TOOLS),
    _flag("--no-ui-mcp-proxy --no-webui-mcp-proxy"),
    _row("--tools", env="LLAMA_ARG_TOOLS", cure=_NO_TOOLS),
    _row("--tools-runtime", env="LLAMA_ARG_TOOLS_RUNTIME", cure=_NO_TOOLS),
    _row("--mcp-servers-config", env="LLAMA_ARG_MCP_SERVERS_CONFIG", cure=_NO_TOOLS),
    _row("--mcp-servers-json", env="LLAMA_ARG_MCP_SERVERS_JSON", cure=_NO_TOOLS),
    _flag("-ag --agent", env="LLAMA_ARG_AGENT", cure=_NO_TOOLS),
    _flag("-no-ag --no-agent"),
    _flag("--ui --webui", "--no-ui --no-webui", env="LLAMA_ARG_UI", on=("--page",), off=("--no-page",)),
    _flag("--embedding --embeddings", env="LLAMA_ARG_EMBEDDINGS", note="any model embeds; chats and completions stay"),
    _flag("--rerank --reranking", env="LLAMA_ARG_RERANKING", on=("--pooling", "rank")),
    _row("--api-key", _to("--api-key"), env="LLAMA_API_KEY"),
    _row("--api-key-file", _to("--api-key-file"), env="LLAMA_ARG_API_KEY_FILE"),
    _row("--ssl-key-file", _to("--ssl-keyfile"), env="LLAMA_ARG_SSL_KEY_FILE"),
    _row("--ssl-cert-file", _to("--ssl-certfile"), env="LLAMA_ARG_SSL_CERT_FILE"),
    _row("-to --timeout", _seconds_both, env="LLAMA_ARG_TIMEOUT"),
    _row(
        "--sse-ping-interval",
        lambda value: ("--sse-ping-s", "0" if value.startswith("-") else value),
        env="LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    _row("--threads-http", _to("--threads-http", ("-1", "0")), env="LLAMA_ARG_THREADS_HTTP"),
    _flag(
        "--cache-prompt",
        "--no-cache-prompt",
        env="LLAMA_ARG_CACHE_PROMPT",
        on=("--cache-prefix",),
        off=("--no-cache-prefix",),
    ),
    _row(
        "--cache-reuse",
        env="LLAMA_ARG_CACHE_REUSE",
        note="equal beginnings are used, parts behind them are not",
        fine=_ANY,
    ),
    _flag("--metrics", env="LLAMA_ARG_ENDPOINT_METRICS"),
    _flag("--props", env="LLAMA_ARG_ENDPOINT_PROPS", on=("--props",)),
    _flag("--slots", "--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS", on=("--slots",), off=("--no-slots",)),
    _row("--slot-save-path", cure="slots are not written to files; equal beginnings are found by themselves"),
    _row("--models-dir", env="LLAMA_ARG_MODELS_DIR", cure=_ONE_MODEL),
    _row("--models-preset", env="LLAMA_ARG_MODELS_PRESET", cure=_ONE_MODEL),
    _row("--models-max", env="LLAMA_ARG_MODELS_MAX", note=_ONE_MODEL, fine=_ANY),
    _flag("--models-autoload", "--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD", note=_ONE_MODEL),
    _row("--sleep-idle-seconds", note="the model stays loaded", fine=_ANY),
    # chats
    _flag("--jinja", env="LLAMA_ARG_JINJA"),
    _flag("--no-jinja", env="", note="chat templates are rendered by jinja2 in any case"),
    _row("--chat-template-kwargs", _to("--chat-template-kwargs"), env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
    _row(
        "--reasoning-format",
        lambda value: ("--reasoning-format", "none" if value == "none" else "auto"),
        env="LLAMA_ARG_THINK",
        fine=("none", "auto", "deepseek"),
        cure="thinking stands in reasoning_content alone (auto, deepseek), or in content (none)",
    ),
    _row(
        "-rea --reasoning",
        _switch(("--enable-thinking",), ("--no-enable-thinking",), ("--enable-thinking",)),
        env="LLAMA_ARG_REASONING",
    ),
    _row("--reasoning-effort", _kwarg("reasoning_effort", None, ("default",)), env="LLAMA_ARG_REASONING_EFFORT"),
    _row("--reasoning-budget", _param("thinking_token_budget", ("-1",)), env="LLAMA_ARG_THINK_BUDGET"),
    _row(
        "--reasoning-budget-message",
        env="LLAMA_ARG_THINK_BUDGET_MESSAGE",
        note="thinking is closed with the text that the model's family writes there",
        fine=_ANY,
    ),
    _flag(
        "--reasoning-preserve",
        "--no-reasoning-preserve",
        env="LLAMA_ARG_REASONING_PRESERVE",
        on=("--chat-template-kwargs", '{"preserve_reasoning": true}'),
        off=("--chat-template-kwargs", '{"preserve_reasoning": false}'),
    ),
    _row("--chat-template", _to("--chat-template"), env="LLAMA_ARG_CHAT_TEMPLATE"),
    _row("--chat-template-file", _to("--chat-template"), env="LLAMA_ARG_CHAT_TEMPLATE_FILE"),
    _flag(
        "--skip-chat-parsing",
        env="LLAMA_ARG_SKIP_CHAT_PARSING",
        cure="calls of tools are always told from the text; --reasoning-format none leaves the thinking in it",
    ),
    _flag("--no-skip-chat-parsing"),
    _flag(
        "--prefill-assistant",
        "--no-prefill-assistant",
        env="LLAMA_ARG_PREFILL_ASSISTANT",
        note="continue_final_message in the body of a request decides",
    ),
    # drafts
    _row(
        "--spec-draft-hf -hfd -hfrd --hf-repo-draft",
        lambda value: ("--speculate", "draft", "--draft-model", f"hf:{value}"),
        env="LLAMA_ARG_SPEC_DRAFT_HF_REPO",
    ),
    _row(
        "--spec-draft-model -md --model-draft",
        lambda value: ("--speculate", "draft", "--draft-model", value),
        env="LLAMA_ARG_SPEC_DRAFT_MODEL",
    ),
    _row("--spec-draft-n-max", _to("--n-draft"), env="LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    _row("--draft --draft-n --draft-max", _to("--n-draft"), env="LLAMA_ARG_DRAFT_MAX"),
    _row("--spec-type", _spec_type, env="LLAMA_ARG_SPEC_TYPE"),
    _flag("--spec-default", on=("--speculate", "lookup")),
    *(
        _row(names, env=env, note=note, fine=_ANY)
        for names, env, note in (
            ("--spec-draft-type-k -ctkd --cache-type-k-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K", _DRAFT_AS_MAIN),
            ("--spec-draft-type-v -ctvd --cache-type-v-draft", "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V", _DRAFT_AS_MAIN),
            ("--spec-draft-threads -td --threads-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-threads-batch -tbd --threads-batch-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-cpu-mask -Cd --cpu-mask-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-cpu-range -Crd --cpu-range-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-cpu-strict --cpu-strict-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-prio --prio-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-poll --poll-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-cpu-strict-batch --cpu-strict-batch-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-prio-batch --prio-batch-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-poll-batch --poll-batch-draft", "", _DRAFT_AS_MAIN),
            ("--spec-draft-override-tensor -otd --override-tensor-draft", "", _DRAFT_AS_MAIN),
            (
                "--spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft",
                "LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE",
                _DRAFT_AS_MAIN,
            ),
            ("--spec-draft-device -devd --device-draft", "", _DRAFT_AS_MAIN),
            (
                "--spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft",
                "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
                _DRAFT_AS_MAIN,
            ),
            ("--spec-draft-n-min", "LLAMA_ARG_SPEC_DRAFT_N_MIN", "any number of guesses is checked where it pays"),
            ("--draft-min --draft-n-min", "LLAMA_ARG_DRAFT_MIN", "any number of guesses is checked where it pays"),
            ("--spec-draft-p-split --draft-p-split", "LLAMA_ARG_SPEC_DRAFT_P_SPLIT", "drafts have no branches"),
            (
                "--spec-draft-p-min --draft-p-min",
                "LLAMA_ARG_SPEC_DRAFT_P_MIN",
                "guessing ends by itself where it does not pay",
            ),
            ("--spec-ngram-mod-n-min", "", _NGRAM),
            ("--spec-ngram-mod-n-max", "", _NGRAM),
            ("--spec-ngram-mod-n-match", "", _NGRAM),
            ("--spec-ngram-simple-size-n", "", _NGRAM),
            ("--spec-ngram-simple-size-m", "", _NGRAM),
            ("--spec-ngram-simple-min-hits", "", _NGRAM),
            ("--spec-ngram-map-k-size-n", "", _NGRAM),
            ("--spec-ngram-map-k-size-m", "", _NGRAM),
            ("--spec-ngram-map-k-min-hits", "", _NGRAM),
            ("--spec-ngram-map-k4v-size-n", "", _NGRAM),
            ("--spec-ngram-map-k4v-size-m", "", _NGRAM),
            ("--spec-ngram-map-k4v-min-hits", "", _NGRAM),
            ("--spec-ngram-size-n", "", _NGRAM),
            ("--spec-ngram-size-m", "", _NGRAM),
            ("--spec-ngram-min-hits", "", _NGRAM),
        )
    ),
    _flag("--spec-draft-cpu-moe -cmoed --cpu-moe-draft", env="LLAMA_ARG_SPEC_DRAFT_CPU_MOE", note=_DRAFT_AS_MAIN),
    _flag(
        "--spec-draft-backend-sampling",
        "--no-spec-draft-backend-sampling",
        env="LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING",
        note=_DRAFT_AS_MAIN,
    ),
    _row("--spec-synth-len", env="LLAMA_ARG_SPEC_SYNTH_LEN", cure=_NO_BENCH),
    _row("--spec-synth-rates", env="LLAMA_ARG_SPEC_SYNTH_RATES", cure=_NO_BENCH),
    # models by a name of their own
    *(
        _flag(name, cure=_PRESET)
        for name in (
            *("--embd-gemma-default", "--fim-qwen-1.5b-default", "--fim-qwen-3b-default", "--fim-qwen-7b-default"),
            *("--fim-qwen-7b-spec", "--fim-qwen-14b-spec", "--fim-qwen-30b-default", "--gpt-oss-20b-default"),
            *("--gpt-oss-120b-default", "--vision-gemma-4b-default", "--vision-gemma-12b-default"),
        )
    ),
)


def _v(names: str, args: Callable[[str], Args] | None = None, **more: object) -> Row:
    return Row(VLLM, tuple(names.split()), **{"takes": 1, "args": args, **more})  # type: ignore[arg-type]


def _vs(names: str, **more: object) -> tuple[Row, ...]:
    """A row for each name, all with the same words."""
    return tuple(_v(name, **more) for name in names.split())  # type: ignore[arg-type]


def _vf(names: str, no: str = "", **more: object) -> Row:
    return Row(VLLM, tuple(names.split()), tuple(no.split()), **more)  # type: ignore[arg-type]


def _vfs(names: str, **more: object) -> tuple[Row, ...]:
    """A row for each switch, with its --no- form."""
    return tuple(_vf(name, f"--no-{name[2:]}", **more) for name in names.split())


_GGUF = "the GGUF file says it"
_HUB = "give the model as hf:owner/repo@revision:quant"
_KERNELS = "llama.cpp has kernels of its own"
_NO_GRAPHS = "there are no graphs to capture"
_ONE_HOST = "one machine computes; --strategy multi-instance runs several engines on it"
_OFFLOAD = "give --n-gpu-layers, or --override-tensor"
_TENSORS = "the file is mapped"
_NO_PLUGINS = "the server runs no code of others"
_NO_TRACES = "/metrics has the figures"
_ALWAYS = "it needs no flag"
_FAMILY = "the family is found from the chat template"
_LORA_ANY = "adapters of any rank and number need no flag"

_VLLM: tuple[Row, ...] = (
    # server
    _v("--uds", _to("--uds")),
    _v("--uvicorn-log-level", lambda value: ("--log-level", {"critical": "error", "trace": "debug"}.get(value, value))),
    _vf(
        "--disable-uvicorn-access-log",
        "--no-disable-uvicorn-access-log",
    ),
    _v("--disable-access-log-for-endpoints", note="there is no access log unless --access-log is given", fine=_ANY),
    _vf("--allow-credentials", "--no-allow-credentials", on=("--cors-credentials",), off=("--no-cors-credentials",)),
    _v("--allowed-origins", _json_list("--cors-origins")),
    _v("--allowed-methods", lambda v: _methods(_json_list("--cors-methods")(v))),
    _v("--allowed-headers", _json_list("--cors-headers")),
    _v("--api-key", _to("--api-key"), takes=MANY),
    _v("--ssl-keyfile", _to("--ssl-keyfile")),
    _v("--ssl-certfile", _to("--ssl-certfile")),
    _v("--ssl-ca-certs", _to("--ssl-ca-certs")),
    _v(
        "--ssl-cert-reqs",
        fine=("0", "2"),
        cure="--ssl-ca-certs asks clients for certificates; without it none is asked",
    ),
    _vf(
        "--enable-ssl-refresh",
        "--no-enable-ssl-refresh",
        cure="a new certificate is read at a restart; or let a proxy do TLS",
    ),
    _v("--ssl-ciphers", cure="the ciphers are those of Python's ssl; let a proxy do TLS where others are needed"),
    _v("--root-path", _to("--root-path")),
    _v("--middleware", cure="mount llamabatch.server.app(...) in a program of your own"),
    _v("--served-model-name", _to("--served-model-name"), takes=MANY),
    _v("--lora-modules", lambda value: _modules(value), takes=MANY),
    _v("--chat-template", _to("--chat-template")),
    _vf("--trust-request-chat-template", on=("--trust-request-chat-template",)),
    _v("--default-chat-template-kwargs", _to("--chat-template-kwargs")),
    _v("--chat-template-content-format", note="templates get what they can read: text or parts", fine=_ANY),
    _v("--response-role", fine=("assistant",), cure="the role of an answer is assistant"),
    _v("--h11-max-incomplete-event-size", _to("--max-header-bytes")),
    _v("--h11-max-header-count", _to("--max-headers")),
    _v("--shutdown-timeout", _to("--drain-s")),
    _v("--max-log-len", note="the log has no prompts", fine=_ANY),
    _v("--log-config-file", cure="give --log-level, --log-file and --access-log"),
    _v("--tool-call-parser", note=_FAMILY, fine=_ANY),
    _v("--reasoning-parser", note=_FAMILY, fine=_ANY),
    _v("--tool-server", fine=("None",), cure=_NO_TOOLS),
    _v("--config", cure="give the flags, or write them into the file that `llamabatch config --path` names"),
    _v("--api-server-count -asc", fine=("1",), cure="one process serves; several share a port with --reuse-port"),
    _v("--fingerprint-mode", fine=("full", "hash"), cure="system_fingerprint always stands for what a text depends on"),
    _v("--fingerprint-value", cure="system_fingerprint always stands for what a text depends on"),
    _vf("--enable-log-requests", "--no-enable-log-requests", on=("--access-log",)),
    _vf("--disable-log-requests", "--no-disable-log-requests"),
    _vf("--enable-log-outputs", "--no-enable-log-outputs", cure="the server never writes answers down"),
    _vf("--grpc", cure="the server speaks HTTP"),
    _vf("--headless", cure=_ONE_HOST),
    *_vfs(
        "--enable-auto-tool-choice --enable-prompt-tokens-details --enable-server-load-tracking "
        "--enable-tokenizer-info-endpoint --enable-request-id-headers --enable-offline-docs --enable-log-deltas "
        "--disable-fastapi-docs --log-error-stack --enable-flash-late-interaction --cohere-is-reasoning-model",
    ),
    *_vfs("--enable-per-request-metrics", note="timings stand in the answers of /completion"),
    *_vfs("--enable-force-include-usage", cure="clients ask with stream_options"),
    *_vfs("--return-tokens-as-token-ids", cure="clients ask with return_token_ids"),
    *_vfs("--exclude-tools-when-tool-choice-none", note="tool_choice none leaves the tools in the prompt"),
    *_vfs("--tokens-only", cure="all endpoints are served"),
    *_vs("--tool-parser-plugin --reasoning-parser-plugin --io-processor-plugin", cure=_NO_PLUGINS),
    *_vs("--logits-processors --logits-processor-pattern --worker-cls --worker-extension-cls", cure=_NO_PLUGINS),
    *_vs("--scheduler-cls --middleware-plugin", cure=_NO_PLUGINS),
    *_vs("--cohere-format", note=_FAMILY, fine=_ANY),
    # model
    _v(
        "--tokenizer --hf-config-path --tokenizer-revision",
        fine=("None",),
        cure="the file has its tokenizer and its config",
    ),
    _v("--tokenizer-mode", fine=("auto", "hf", "slow"), cure="the file has its tokenizer"),
    _v("--revision --code-revision", fine=("None", "main"), cure=_HUB),
    _v(
        "--dtype",
        note="the file has its types",
        fine=("auto", "half", "float16", "bfloat16"),
        cure="choose another file, as hf:owner/repo:F32",
    ),
    _v("--quantization -q", fine=("None", "gguf"), cure="choose another file, as hf:owner/repo:Q4_K_M"),
    _v("--load-format", fine=("auto", "gguf"), cure="models are GGUF files"),
    _v("--download-dir", cure="set HF_HOME, or LLAMABATCH_CACHE"),
    _v("--max-model-len", lambda value: () if value in ("auto", "-1") else ("--n-ctx", _counted(value))),
    _v("--max-logprobs", note="any request may ask for 1024", fine=_ANY),
    _v("--logprobs-mode", fine=("raw_logprobs",), cure="logprobs are those before temperature and cuts"),
    _v("--hf-overrides", cure="give --kv-overrides, or the rope options"),
    _v("--pooler-config", cure="give --pooling"),
    _v("--generation-config", note="defaults are those of the file, general.sampling", fine=_ANY),
    _v("--override-generation-config", _generation),
    _v("--runner", fine=("auto", "generate", "pooling"), cure="any engine generates, and embeds"),
    _v("--convert", fine=("auto", "none", "embed"), cure="give --pooling"),
    _v("--task", fine=("auto", "generate", "embed"), cure="any engine generates, and embeds"),
    _v("--hf-token", lambda value: () if value in ("None", "True") else ("--hf-token", value)),
    _v("--rope-theta", _to("--rope-freq-base")),
    _vf("--trust-remote-code", "--no-trust-remote-code", note="a GGUF file holds no code"),
    _vf("--enforce-eager", "--no-enforce-eager", note=_NO_GRAPHS),
    *_vs("--config-format --model-impl --override-attention-dtype --model-loader-extra-config", note=_GGUF, fine=_ANY),
    *_vs("--ignore-patterns --pt-load-map-location --safetensors-load-strategy", note=_TENSORS, fine=_ANY),
    *_vs("--safetensors-prefetch-num-threads --safetensors-prefetch-block-size", note=_TENSORS, fine=_ANY),
    *_vs("--quantization-config --model-weights", cure=_GGUF),
    *_vs("--renderer-num-workers", args=_to("--threads-http")),
    *_vfs("--skip-tokenizer-init", cure="the file has its tokenizer"),
    *_vfs("--enable-prompt-embeds", cure="a prompt is text or token ids"),
    *_vfs("--enable-sleep-mode --enable-cumem-allocator", note="the model stays loaded"),
    *_vfs("--use-tqdm-on-load --allow-deprecated-quantization --use-fp64-gumbel", note=_GGUF),
    *_vfs("--disable-sliding-window --disable-cascade-attn", note=_KERNELS),
    *_vfs("--enable-return-routed-experts", cure="answers do not name experts"),
    # scheduler and cache
    _v("--max-num-seqs", _to("--n-slots")),
    _v("--max-num-batched-tokens", lambda value: ("--n-batch", _counted(value))),
    _v("--long-prefill-token-threshold", _to("--prefill-budget", ("0",))),
    _v("--kv-cache-dtype", _kv_dtype),
    _v(
        "--gpu-memory-utilization",
        note="half of the free memory is used; --n-slots and --n-ctx say how much",
        fine=_ANY,
    ),
    _v("--kv-cache-memory-bytes", cure="give --n-slots and --n-ctx, or --kv unified and --kv-cells"),
    _v(
        "--swap-space --block-size --num-gpu-blocks-override",
        note="the KV cache has no blocks and is never swapped",
        fine=_ANY,
    ),
    _v(
        "--scheduling-policy",
        note="priorities of requests need no flag",
        fine=("fcfs", "priority"),
        cure="give fcfs or priority",
    ),
    _v("--stream-interval", note="pieces go out as they come, several at once to a slow reader", fine=_ANY),
    _v("--prefix-caching-hash-algo", note="equal beginnings are compared, not hashed", fine=_ANY),
    _vf("--enable-prefix-caching", "--no-enable-prefix-caching", on=("--cache-prefix",), off=("--no-cache-prefix",)),
    _vf("--enable-chunked-prefill", "--no-enable-chunked-prefill"),
    *_vs("--max-num-partial-prefills --max-long-partial-prefills --max-seq-len-to-capture", note=_ALWAYS, fine=_ANY),
    *_vs("--cudagraph-capture-sizes --max-cudagraph-capture-size --compilation-config", note=_NO_GRAPHS, fine=_ANY),
    *_vs("-cc -O --optimization-level --performance-mode", note=_NO_GRAPHS, fine=_ANY),
    *_vs(
        "--kv-cache-dtype-skip-layers --mamba-cache-dtype --mamba-ssm-cache-dtype --mamba-block-size",
        note=_KERNELS,
        fine=_ANY,
    ),
    *_vs(
        "--mamba-cache-mode --mamba-backend --mamba-cache-philox-rounds --attention-backend", note=_KERNELS, fine=_ANY
    ),
    *_vs(
        "--moe-backend --linear-backend --all2all-backend --gdn-prefill-backend --kda-prefill-backend",
        note=_KERNELS,
        fine=_ANY,
    ),
    *_vs(
        "--attention-config --mamba-config --kernel-config --ir-op-priority --additional-config",
        note=_KERNELS,
        fine=_ANY,
    ),
    *_vfs("--calculate-kv-scales --kv-sharing-fast-prefill --async-scheduling", note=_KERNELS),
    *_vfs("--enable-flashinfer-autotune --enable-mamba-cache-stochastic-rounding", note=_KERNELS),
    *_vfs("--disable-hybrid-kv-cache-manager --disable-chunked-mm-input --scheduler-reserve-full-isl", note=_ALWAYS),
    *_vs(
        "--kv-offloading-size --kv-offloading-backend --kv-transfer-config --kv-events-config",
        cure="cells stay in their slots",
    ),
    *_vs("--ec-transfer-config --weight-transfer-config", cure=_ONE_HOST),
    *_vs("--cpu-offload-gb", fine=("0",), cure=_OFFLOAD),
    *_vs("--offload-backend --cpu-offload-params --offload-group-size --offload-num-in-group", cure=_OFFLOAD),
    *_vs("--offload-prefetch-step --offload-params", cure=_OFFLOAD),
    # parallelism
    _v(
        "--tensor-parallel-size -tp",
        fine=("1",),
        cure="give --tensor-split 1,1 for layers over GPUs, or --strategy multi-instance",
    ),
    _v(
        "--pipeline-parallel-size -pp",
        fine=("1",),
        cure="give --tensor-split 1,1, which gives each GPU a part of the layers",
    ),
    _v("--data-parallel-size -dp", lambda n: () if n == "1" else ("--strategy", "multi-instance", "--instances", n)),
    _v("--distributed-executor-backend", fine=("None", "mp", "uni"), cure="see docs/ray.md for Ray"),
    *_vs(
        "--prefill-context-parallel-size -pcp --decode-context-parallel-size -dcp --nnodes", fine=("1",), cure=_ONE_HOST
    ),
    *_vs("--node-rank --data-parallel-rank -dpn --data-parallel-start-rank -dpr", fine=("0",), cure=_ONE_HOST),
    *_vs("--master-addr --master-port --data-parallel-size-local -dpl --data-parallel-address -dpa", cure=_ONE_HOST),
    *_vs("--data-parallel-rpc-port -dpp --data-parallel-backend -dpb", cure=_ONE_HOST),
    *_vs("--data-parallel-supervisor-port --dp-supervisor-probe-interval-s", cure=_ONE_HOST),
    *_vs("--dp-supervisor-probe-timeout-s --dp-supervisor-probe-failure-threshold", cure=_ONE_HOST),
    *(_vf(n, cure=_ONE_HOST) for n in ("--data-parallel-hybrid-lb", "-dph", "--data-parallel-external-lb", "-dpe")),
    *(_vf(n, cure=_ONE_HOST) for n in ("--data-parallel-multi-port-external-lb", "-dpm", "--enable-elastic-ep")),
    *_vs("--dcp-comm-backend --dcp-kv-cache-interleave-size --cp-kv-cache-interleave-size", note=_ONE_HOST, fine=_ANY),
    *_vs("--distributed-timeout-seconds --cpu-distributed-timeout-seconds", note=_ONE_HOST, fine=_ANY),
    *_vs("--max-parallel-loading-workers --eplb-config --expert-placement-strategy", note=_ONE_HOST, fine=_ANY),
    *_vs("--dbo-decode-token-threshold --dbo-prefill-token-threshold", note=_ONE_HOST, fine=_ANY),
    *_vfs("--enable-expert-parallel --enable-ep-weight-filter --enable-dbo --enable-eplb", note=_ONE_HOST),
    *_vfs("--disable-nccl-for-dp-synchronization --disable-custom-all-reduce --ray-workers-use-nsight", note=_ONE_HOST),
    _vf("--numa-bind", on=("--numa", "distribute")),
    *_vs("--numa-bind-nodes --numa-bind-cpus", cure="start under numactl, with --numa numactl"),
    # adapters, structured outputs, drafts
    _vf("--enable-lora", "--no-enable-lora"),
    *_vs("--max-loras --max-lora-rank --max-cpu-loras --lora-dtype --lora-extra-vocab-size", note=_LORA_ANY, fine=_ANY),
    *_vs("--lora-target-modules --default-mm-loras", cure="the adapter's file says what it changes"),
    *_vfs("--fully-sharded-loras --enable-lora-bias --enable-tower-connector-lora", note=_LORA_ANY),
    *_vfs("--specialize-active-lora --enable-mixed-moe-lora-format", note=_LORA_ANY),
    _v("--structured-outputs-config --guided-decoding-backend", note="llguidance is the only backend", fine=_ANY),
    _v("--speculative-config -sc", _speculative),
    _v("--spec-method", lambda value: _speculative(json.dumps({"method": value}))),
    _v("--spec-model", lambda value: ("--speculate", "draft", "--draft-model", value)),
    _v("--spec-tokens", _to("--n-draft")),
    _v("--reasoning-config", cure="a request gives thinking_token_budget"),
    # media
    *_vs("--allowed-local-media-path --allowed-media-domains --media-io-kwargs --mm-processor-kwargs", cure=_NO_MEDIA),
    *_vs("--limit-mm-per-prompt --mm-processor-cache-gb --mm-processor-cache-type", note=_NO_MEDIA, fine=_ANY),
    *_vs("--mm-shm-cache-max-object-size-mb --mm-encoder-tp-mode --mm-encoder-attn-backend", note=_NO_MEDIA, fine=_ANY),
    *_vs(
        "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-path",
        note=_NO_MEDIA,
        fine=_ANY,
    ),
    *_vs("--mm-encoder-fp8-scale-save-margin --video-pruning-rate --mm-tensor-ipc", note=_NO_MEDIA, fine=_ANY),
    *_vfs("--language-model-only --interleave-mm-strings --skip-mm-profiling", note=_NO_MEDIA),
    *_vfs("--enable-mm-embeds --mm-encoder-only", cure=_NO_MEDIA),
    # figures
    _vf("--disable-log-stats", "--no-disable-log-stats"),
    *_vs("--otlp-traces-endpoint --collect-detailed-traces --profiler-config", cure=_NO_TRACES),
    *_vs("--show-hidden-metrics-for-version --kv-cache-metrics-sample", note=_NO_TRACES, fine=_ANY),
    *_vfs("--aggregate-engine-logging --kv-cache-metrics --cudagraph-metrics --enable-mfu-metrics", note=_NO_TRACES),
    *_vfs("--enable-layerwise-nvtx-tracing --enable-logging-iteration-details", note=_NO_TRACES),
    *_vfs("--enable-mm-processor-stats --fail-on-environ-validation", note=_NO_TRACES),
)


def _counted(value: str) -> str:
    """vLLM's short forms of numbers: 8k is 8000, 8K is 8192."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", value)
    if not match:
        return value
    base = 1000 if match[2].islower() else 1024
    return str(int(float(match[1]) * base ** ("kmg".index(match[2].lower()) + 1)))


def _methods(args: Args) -> Args:
    """CORS methods, with "*" as all that there are."""
    return args if args[1] != "*" else (args[0], "GET,POST,DELETE,OPTIONS")


def _modules(value: str) -> Args:
    """An adapter that requests name: name=path, or vLLM's JSON."""
    if not value.lstrip().startswith("{"):
        return "--lora-module", value
    try:
        given = json.loads(value)
        return "--lora-module", f"{given['name']}={given['path']}"
    except (ValueError, KeyError, TypeError):
        raise click.UsageError(f"{show(value)} is no JSON object with name and path") from None


ROWS: tuple[Row, ...] = _LLAMA + _VLLM


def _by_name(rows: Iterable[Row]) -> dict[str, tuple[Row, bool]]:
    """Row of each name, and whether the name turns it off. llama-server's meaning goes first."""
    found: dict[str, tuple[Row, bool]] = {}
    for row in rows:
        for name in row.names:
            found.setdefault(name, (row, False))
        for name in row.negatives:
            found.setdefault(name, (row, True))
    return found


BY_NAME = _by_name(ROWS)
# one flag for both programs, of which vLLM's may have several values
_MANY = {name: row for row in _VLLM if row.takes == MANY for name in row.names}
_VARIABLES = {"--hf-token": "HF_TOKEN", "--rpc": "LLAMABATCH_RPC"}


def translate(argv: Sequence[str], own: Mapping[str, int]) -> Translated:
    """The arguments of a command line, in options of ours. What is in no row stays as it is.

    Args:
        own: flags of ours, and the number of values of each.

    Raises:
        click.UsageError: a flag is refused, or a value is missing.
    """
    found = Translated()
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--":
            found.args += [word, *rest]
            break
        if not word.startswith("-") or word == "-":
            found.args.append(word)
            continue
        name, equals, value = word.partition("=")
        name = f"--{name[2:].replace('_', '-')}" if name.startswith("--") else name
        if name in own and name not in BY_NAME:
            _copy(name, equals + value, own[name], rest, found.args)
            continue
        if name not in BY_NAME:
            found.args.append(word)  # click names it, with the nearest known one
            continue
        row, is_off = (_MANY[name], False) if name in _MANY else BY_NAME[name]
        values = [value] if equals and row.takes else _values(name, row, rest)
        apply(row, name, values, is_off, found)
    found.args = _last_params(found.args)
    return found


def _copy(name: str, value: str, takes: int, rest: list[str], args: list[str]) -> None:
    args.append(name + value)
    if not value:
        args += [rest.pop(0) for _ in range(min(takes, len(rest)))]


def _values(name: str, row: Row, rest: list[str]) -> list[str]:
    if row.takes == MANY:
        taken: list[str] = []
        while rest and (not taken or not rest[0].startswith("-")):
            taken.append(rest.pop(0))
    elif name in ("-fa", "--flash-attn") and (not rest or rest[0] not in (*_TRUE, *_FALSE, "auto")):
        return ["on"]  # as before it had values
    else:
        taken = [rest.pop(0) for _ in range(min(row.takes, len(rest)))]
    if len(taken) < max(row.takes, 1 if row.takes == MANY else 0):
        raise click.UsageError(f"{name} needs a value")
    return taken


def apply(row: Row, name: str, values: Sequence[str], is_off: bool, found: Translated) -> None:
    """Adds what a flag with its values means. Raises UsageError with its name."""
    try:
        if row.takes and row.args is not None and (not row.fine or row.fine == _ANY or set(values) <= set(row.fine)):
            args = [arg for value in values for arg in row.args(value)]
        elif row.cure and not (row.takes and values and set(values) <= set(row.fine)) and not is_off:
            raise click.UsageError(row.cure)
        else:
            args = list(row.off if is_off else row.on)
    except click.UsageError as error:
        given = " ".join([name, *values])
        raise click.UsageError(f"{given}: {error.message}") from error
    if row.note:
        found.notes.append(f"{name} has no effect: {row.note}")
    if args and args[0] in _VARIABLES:
        found.environ[_VARIABLES[args[0]]] = args[1]
    elif args == ["--offline"]:
        found.environ["HF_HUB_OFFLINE"] = "1"
    else:
        found.args += args


def from_environment(environ: Mapping[str, str]) -> Translated:
    """The options that llama-server's variables ask for. Raises UsageError with the name of the variable."""
    found = Translated()
    for row in ROWS:
        if not row.env:
            continue
        value = environ.get(row.env)
        name = row.env
        if row.negatives and (no := row.env.replace("LLAMA_ARG_", "LLAMA_ARG_NO_")) in environ:
            name, value = no, "0"  # any value of it means off, as there
        if value is None or (not value and row.takes):
            continue
        if row.takes:
            apply(row, name, [value], False, found)
        elif value.lower() in _TRUE:
            apply(row, name, (), False, found)
        elif value.lower() in _FALSE and row.negatives:
            apply(row, name, (), True, found)
    found.args = _last_params(found.args)
    return found


def _last_params(args: list[str]) -> list[str]:
    """The arguments with the last of each `-P name=…` alone, as of other options."""
    last: dict[str, int] = {}
    for i, arg in enumerate(args[:-1]):
        if arg == "-P":
            last[args[i + 1].partition("=")[0]] = i
    kept: list[str] = []
    i = 0
    while i < len(args):
        if args[i] == "-P" and i + 1 < len(args) and last[args[i + 1].partition("=")[0]] != i:
            i += 2
            continue
        kept.append(args[i])
        i += 1
    return kept


def meaning(row: Row) -> str:
    """The row in a table for people."""
    if row.note:
        return f"no effect: {row.note}"
    if row.cure and not row.args:
        return f"{f'only {_listed(row.fine)}; ' if row.fine else ''}refused: {row.cure}"
    if row.takes and row.args is not None:
        return _shown(row)
    if row.on or row.off:
        return " / ".join(f"`{' '.join(args)}`" for args in (row.on, row.off) if args)
    return "always so"


def _listed(values: Args) -> str:
    return ", ".join(f"`{value}`" for value in values)


_SAMPLES = ("8", "0.5", "auto", "on", "mmap", "ngram-simple", "ngram", "fp16", "VALUE", '{"method": "ngram"}')


def _shown(row: Row) -> str:
    """The options that the flag becomes, for a value that it takes."""
    assert row.args is not None
    for sample in (*row.fine, *_SAMPLES):
        try:
            args = row.args(sample)
        except click.UsageError:
            continue
        names = [arg.partition("=")[0] if i and args[i - 1] == "-P" else arg for i, arg in enumerate(args)]
        options = [
            f"-P {names[i + 1]}" if name == "-P" else name for i, name in enumerate(names) if name.startswith("-")
        ]
        options = [option for option in options if not re.fullmatch(r"-?\d+", option)]
        if options:
            return ", ".join(f"`{option}`" for option in dict.fromkeys(options))
    return "`-P structured_outputs`"  # of files
