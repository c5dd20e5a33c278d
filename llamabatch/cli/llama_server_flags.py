"""The flags of llama-server (common/arg.cpp) and their meaning in `llamabatch serve`."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping

import click

from llamabatch.cli.flag_rows import ANY, FALSE, LLAMA, NO_MEDIA, NO_TOOLS, TRUE, Args, Row, as_option
from llamabatch.utils.checks import show


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
        if value.lower() in TRUE:
            return on
        if value.lower() in FALSE:
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


def _seconds_both(value: str) -> Args:
    return "--body-timeout-s", value, "--write-timeout-s", value


def _splits(value: str) -> Args:
    return "--tensor-split", value.replace("/", ",").replace(";", ",")


def _row(names: str, args: Callable[[str], Args] | None = None, **more: object) -> Row:
    return Row(LLAMA, tuple(names.split()), takes=1, args=args, **more)  # type: ignore[arg-type]


def _flag(names: str, no: str = "", **more: object) -> Row:
    return Row(LLAMA, tuple(names.split()), tuple(no.split()), **more)  # type: ignore[arg-type]


_ONE_MODEL = "a server serves one model here; start one for each, on ports of their own"
_PRESET = "give the model by name: -hf owner/repo:quant"
_AFFINITY = "threads keep the affinity and the priority that the process was started with (taskset, chrt, nice)"
_CACHE = "finished requests leave their cells in their slots; no further copy is kept in memory"
_DRAFT_AS_MAIN = "the draft model runs with the threads, devices and KV types of the model"
_NGRAM = "the length of what is looked up is found from the text"
_NO_LOG = "the log has one form"
_NO_BENCH = "it is for benchmarks of llama.cpp alone"
LLAMA_ROWS: tuple[Row, ...] = (
    _flag("-h --help --usage", on=("--help",)),
    _flag("--version", cure="`llamabatch --version` shows it"),
    _flag("-cl --cache-list", cure="`llamabatch models` lists them"),
    _flag("--completion-bash", cure="`llamabatch completion bash` prints it"),
    # threads
    _row("-t --threads", as_option("--n-threads", ("-1", "0")), env="LLAMA_ARG_THREADS"),
    _row("-tb --threads-batch", as_option("--n-threads-batch", ("-1", "0"))),
    _row("-C --cpu-mask", cure="start under taskset: taskset MASK llamabatch serve"),
    _row("-Cr --cpu-range", cure="start under taskset: taskset -c LO-HI llamabatch serve"),
    _row("--cpu-strict", note=_AFFINITY, fine=ANY),
    _row("--prio", note=_AFFINITY, fine=ANY),
    _row("--poll", note="threads wait as llama.cpp's defaults say", fine=ANY),
    _row("-Cb --cpu-mask-batch", cure="start under taskset: taskset MASK llamabatch serve"),
    _row("-Crb --cpu-range-batch", cure="start under taskset: taskset -c LO-HI llamabatch serve"),
    _row("--cpu-strict-batch", note=_AFFINITY, fine=ANY),
    _row("--prio-batch", note=_AFFINITY, fine=ANY),
    _row("--poll-batch", note="threads wait as llama.cpp's defaults say", fine=ANY),
    # context and batches
    _row("-c --ctx-size", as_option("--ctx-size"), env="LLAMA_ARG_CTX_SIZE"),
    _row("-n --predict --n-predict", as_option("--n-predict"), env="LLAMA_ARG_N_PREDICT"),
    _row("-b --batch-size", as_option("--n-batch"), env="LLAMA_ARG_BATCH"),
    _row("-ub --ubatch-size", as_option("--n-ubatch"), env="LLAMA_ARG_UBATCH"),
    _row("--keep", note="a request that outgrows n_ctx with --context-shift loses its oldest tokens", fine=ANY),
    _flag("--swa-full", env="LLAMA_ARG_SWA_FULL", on=("--swa-full",)),
    _row(
        "-fa --flash-attn",
        _switch(("--flash-attn", "on"), ("--flash-attn", "off"), ("--flash-attn", "auto")),
        env="LLAMA_ARG_FLASH_ATTN",
    ),
    _flag("--perf", "--no-perf", env="LLAMA_ARG_PERF", note="/metrics has the times"),
    _flag("-e --escape", "--no-escape"),
    _row("--rope-scaling", as_option("--rope-scaling"), env="LLAMA_ARG_ROPE_SCALING_TYPE"),
    _row("--rope-scale", _inverse("--rope-freq-scale"), env="LLAMA_ARG_ROPE_SCALE"),
    _row("--rope-freq-base", as_option("--rope-freq-base", ("0",)), env="LLAMA_ARG_ROPE_FREQ_BASE"),
    _row("--rope-freq-scale", as_option("--rope-freq-scale", ("0",)), env="LLAMA_ARG_ROPE_FREQ_SCALE"),
    _row("--yarn-orig-ctx", as_option("--yarn-orig-ctx", ("0",)), env="LLAMA_ARG_YARN_ORIG_CTX"),
    _row("--yarn-ext-factor", as_option("--yarn-ext-factor", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_EXT_FACTOR"),
    _row(
        "--yarn-attn-factor", as_option("--yarn-attn-factor", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_ATTN_FACTOR"
    ),
    _row("--yarn-beta-slow", as_option("--yarn-beta-slow", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_BETA_SLOW"),
    _row("--yarn-beta-fast", as_option("--yarn-beta-fast", ("-1", "-1.0", "-1.00")), env="LLAMA_ARG_YARN_BETA_FAST"),
    _flag(
        "-kvo --kv-offload",
        "-nkvo --no-kv-offload",
        env="LLAMA_ARG_KV_OFFLOAD",
        on=("--offload-kqv",),
        off=("--no-offload-kqv",),
    ),
    _flag("--repack", "-nr --no-repack", env="LLAMA_ARG_REPACK", off=("--extra-bufts", "off")),
    _flag("--no-host", env="LLAMA_ARG_NO_HOST", note="buffers are chosen for the weights, see --extra-bufts"),
    _row("-ctk --cache-type-k", as_option("--type-k"), env="LLAMA_ARG_CACHE_TYPE_K"),
    _row("-ctv --cache-type-v", as_option("--type-v"), env="LLAMA_ARG_CACHE_TYPE_V"),
    _row("-dt --defrag-thold", env="LLAMA_ARG_DEFRAG_THOLD", note="cells are never scattered", fine=ANY),
    _row("--rpc", as_option("--rpc"), env="LLAMA_ARG_RPC"),
    _row("-lm --load-mode", _load_mode, env="LLAMA_ARG_LOAD_MODE"),
    _flag("--mmap", "--no-mmap", env="LLAMA_ARG_MMAP", on=("--use-mmap",), off=("--no-use-mmap",)),
    _flag("--mlock", env="LLAMA_ARG_MLOCK", on=("--use-mlock",)),
    _flag(
        "-dio --direct-io", "-ndio --no-direct-io", env="LLAMA_ARG_DIO", note="the file is read by the system's cache"
    ),
    _row("-lzm --lazy-mode", env="LLAMA_ARG_LAZY_MODE", note="weights are mapped, and read when used", fine=ANY),
    _row("--numa", as_option("--numa"), env="LLAMA_ARG_NUMA"),
    _row("-dev --device", as_option("--devices"), env="LLAMA_ARG_DEVICE"),
    _flag("--list-devices", cure="`llamabatch doctor` lists them"),
    _row("-ot --override-tensor", as_option("--override-tensor"), env="LLAMA_ARG_OVERRIDE_TENSOR"),
    _flag("-cmoe --cpu-moe", env="LLAMA_ARG_CPU_MOE", on=("--cpu-moe",)),
    _row("-ncmoe --n-cpu-moe", as_option("--n-cpu-moe"), env="LLAMA_ARG_N_CPU_MOE"),
    _row("-ncffn --n-cpu-ffn", env="LLAMA_ARG_N_CPU_FFN", cure="give --override-tensor 'blk\\.[0-9]\\.ffn_.*=CPU'"),
    _row("-ngl --gpu-layers --n-gpu-layers", _layers, env="LLAMA_ARG_N_GPU_LAYERS"),
    _row("-sm --split-mode", as_option("--split-mode"), env="LLAMA_ARG_SPLIT_MODE"),
    _row("-ts --tensor-split", _splits, env="LLAMA_ARG_TENSOR_SPLIT"),
    _row("-mg --main-gpu", as_option("--main-gpu"), env="LLAMA_ARG_MAIN_GPU"),
    _row("-fit --fit", _switch((), ()), env="LLAMA_ARG_FIT", note="what is auto is chosen so that it fits"),
    _row("-fitt --fit-target", env="LLAMA_ARG_FIT_TARGET", note="half of the free memory is left", fine=ANY),
    _row("-fitc --fit-ctx", env="LLAMA_ARG_FIT_CTX", note="n_ctx is chosen before the number of slots", fine=ANY),
    _flag("--check-tensors", note="the file's header and sizes are always checked, see --trial and --sha256"),
    _row("--override-kv", as_option("--kv-overrides")),
    _flag("--op-offload", "--no-op-offload", on=("--op-offload",), off=("--no-op-offload",)),
    # adapters
    _row("--lora", _each("--lora")),
    _row("--lora-scaled", _scaled),
    _row("--control-vector", _each("--lora")),
    _row("--control-vector-scaled", _scaled),
    Row(LLAMA, ("--control-vector-layer-range",), takes=2, cure="a control vector applies to all its layers"),
    _flag("--lora-init-without-apply", on=("--lora-init-without-apply",)),
    # model
    _row("-m --model", as_option("--model"), env="LLAMA_ARG_MODEL"),
    _row("-mu --model-url", as_option("--model"), env="LLAMA_ARG_MODEL_URL"),
    _row(
        "-dr --docker-repo", env="LLAMA_ARG_DOCKER_REPO", cure="give a file, an https address or -hf owner/repo:quant"
    ),
    _row("-hf -hfr --hf-repo", as_option("--hf-repo"), env="LLAMA_ARG_HF_REPO"),
    _row("-hff --hf-file", as_option("--hf-file"), env="LLAMA_ARG_HF_FILE"),
    _row("-hft --hf-token", as_option("--hf-token")),
    _flag("--offline", env="LLAMA_ARG_OFFLINE", on=("--offline",)),
    # log
    _flag("--log-disable", on=("--log-level", "error")),
    _row("--log-file", as_option("--log-file"), env="LLAMA_ARG_LOG_FILE"),
    _flag("--log-jsonl", "--no-log-jsonl", env="LLAMA_ARG_LOG_JSONL", note=_NO_LOG),
    _row("--log-colors", env="LLAMA_ARG_LOG_COLORS", note=_NO_LOG, fine=ANY),
    _flag("-v --verbose --log-verbose", on=("--log-level", "debug")),
    _row("-lv --verbosity --log-verbosity", _verbosity, env="LLAMA_ARG_LOG_VERBOSITY"),
    _flag("--log-prefix", "--no-log-prefix", env="LLAMA_ARG_LOG_PREFIX", note=_NO_LOG),
    _flag("--log-timestamps", "--no-log-timestamps", env="LLAMA_ARG_LOG_TIMESTAMPS", note=_NO_LOG),
    _row("--log-prompts-dir", cure="the server never writes prompts down; let the client do it"),
    # sampling of requests that say nothing
    _row("--samplers", as_option("--samplers")),
    _row("--sampler-seq --sampling-seq", as_option("--sampler-seq")),
    _row("-s --seed", as_option("--seed", ("-1", "4294967295"))),
    _flag("--ignore-eos", on=("--ignore-eos",)),
    _row("--temp --temperature", as_option("--temperature"), env="LLAMA_ARG_TEMPERATURE"),
    _row("--top-k", as_option("--top-k"), env="LLAMA_ARG_TOP_K"),
    _row("--top-p", as_option("--top-p"), env="LLAMA_ARG_TOP_P"),
    _row("--min-p", as_option("--min-p"), env="LLAMA_ARG_MIN_P"),
    _row("--top-nsigma --top-n-sigma", _param("top_n_sigma")),
    _row("--xtc-probability", _param("xtc_probability")),
    _row("--xtc-threshold", _param("xtc_threshold")),
    _row("--typical --typical-p", _param("typical_p")),
    _row("--repeat-last-n", note="penalties look at the whole prompt and the whole output", fine=ANY),
    _row("--repeat-penalty", as_option("--repetition-penalty"), env="LLAMA_ARG_REPEAT_PENALTY"),
    _row("--presence-penalty", as_option("--presence-penalty"), env="LLAMA_ARG_PRESENCE_PENALTY"),
    _row("--frequency-penalty", as_option("--frequency-penalty"), env="LLAMA_ARG_FREQUENCY_PENALTY"),
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
    _row("--adaptive-decay", note="there is no adaptive-p sampler", fine=ANY),
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
    _row("-r --reverse-prompt", as_option("--stop")),
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
    _row("-ctxcp --ctx-checkpoints --swa-checkpoints", env="LLAMA_ARG_CTX_CHECKPOINTS", note=_CACHE, fine=ANY),
    _row("-cms --checkpoint-min-step", env="LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT", note=_CACHE, fine=ANY),
    _row("-cram --cache-ram", env="LLAMA_ARG_CACHE_RAM", note=_CACHE, fine=ANY),
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
    _row("--pooling", as_option("--pooling"), env="LLAMA_ARG_POOLING"),
    _row("-np --parallel", as_option("--n-slots", ("-1", "0")), env="LLAMA_ARG_N_PARALLEL"),
    _flag("-cb --cont-batching", env="LLAMA_ARG_CONT_BATCHING"),
    _flag("-nocb --no-cont-batching", on=("--strategy", "static")),
    _row("-sps --slot-prompt-similarity", note="the slot with the longest equal beginning is taken", fine=ANY),
    # media
    _row("-mm --mmproj", env="LLAMA_ARG_MMPROJ", cure=NO_MEDIA),
    _row("-mmu --mmproj-url", env="LLAMA_ARG_MMPROJ_URL", cure=NO_MEDIA),
    _flag("--mmproj-auto", "--no-mmproj --no-mmproj-auto", env="LLAMA_ARG_MMPROJ_AUTO"),
    _flag("--mmproj-offload", "--no-mmproj-offload", env="LLAMA_ARG_MMPROJ_OFFLOAD", note=NO_MEDIA),
    _row("-mmdev --mmproj-device", env="MTMD_BACKEND_DEVICE", note=NO_MEDIA, fine=ANY),
    _row("--image-min-tokens", env="LLAMA_ARG_IMAGE_MIN_TOKENS", note=NO_MEDIA, fine=ANY),
    _row("--image-max-tokens", env="LLAMA_ARG_IMAGE_MAX_TOKENS", note=NO_MEDIA, fine=ANY),
    _row("--mtmd-batch-max-tokens", env="LLAMA_ARG_MTMD_BATCH_MAX_TOKENS", note=NO_MEDIA, fine=ANY),
    _row("--video-fps", env="LLAMA_ARG_VIDEO_FPS", note=NO_MEDIA, fine=ANY),
    _row("--video-timestamp-interval", env="LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL", note=NO_MEDIA, fine=ANY),
    _row("--video-ffmpeg-dir", env="LLAMA_ARG_VIDEO_FFMPEG_DIR", note=NO_MEDIA, fine=ANY),
    _row("--media-path", cure=NO_MEDIA),
    # HTTP
    _row("-a --alias", lambda value: ("--served-model-name", value, "--any-model"), env="LLAMA_ARG_ALIAS"),
    _row("--tags", env="LLAMA_ARG_TAGS", note="models have no tags", fine=ANY),
    _row("--embd-normalize", fine=("2",), cure="vectors have length 1; the body of a request may say otherwise"),
    _row("--host", as_option("--host"), env="LLAMA_ARG_HOST"),
    _row("--port", as_option("--port"), env="LLAMA_ARG_PORT"),
    _flag("--reuse-port", env="LLAMA_ARG_REUSE_PORT", on=("--reuse-port",)),
    _row("--path", env="LLAMA_ARG_STATIC_PATH", cure="files of your own are served by a proxy in front"),
    _row("--cors-origins", as_option("--cors-origins"), env="LLAMA_ARG_CORS_ORIGINS"),
    _row("--cors-methods", lambda v: ("--cors-methods", v.replace(" ", "")), env="LLAMA_ARG_CORS_METHODS"),
    _row("--cors-headers", lambda v: ("--cors-headers", v.replace(" ", "")), env="LLAMA_ARG_CORS_HEADERS"),
    _flag(
        "--cors-credentials",
        "--no-cors-credentials",
        env="LLAMA_ARG_CORS_CREDENTIALS",
        on=("--cors-credentials",),
        off=("--no-cors-credentials",),
    ),
    _row("--api-prefix", as_option("--root-path"), env="LLAMA_ARG_API_PREFIX"),
    _row(
        "--ui-config --webui-config",
        env="LLAMA_ARG_UI_CONFIG",
        note="the page keeps its settings in the browser",
        fine=ANY,
    ),
    _row(
        "--ui-config-file --webui-config-file",
        env="LLAMA_ARG_UI_CONFIG_FILE",
        note="the page keeps its settings in the browser",
        fine=ANY,
    ),
    _flag("--ui-mcp-proxy --webui-mcp-proxy", env="LLAMA_ARG_UI_MCP_PROXY", cure=NO_TOOLS),
    _flag("--no-ui-mcp-proxy --no-webui-mcp-proxy"),
    _row("--tools", env="LLAMA_ARG_TOOLS", cure=NO_TOOLS),
    _row("--tools-runtime", env="LLAMA_ARG_TOOLS_RUNTIME", cure=NO_TOOLS),
    _row("--mcp-servers-config", env="LLAMA_ARG_MCP_SERVERS_CONFIG", cure=NO_TOOLS),
    _row("--mcp-servers-json", env="LLAMA_ARG_MCP_SERVERS_JSON", cure=NO_TOOLS),
    _flag("-ag --agent", env="LLAMA_ARG_AGENT", cure=NO_TOOLS),
    _flag("-no-ag --no-agent"),
    _flag("--ui --webui", "--no-ui --no-webui", env="LLAMA_ARG_UI", on=("--page",), off=("--no-page",)),
    _flag("--embedding --embeddings", env="LLAMA_ARG_EMBEDDINGS", note="any model embeds; chats and completions stay"),
    _flag("--rerank --reranking", env="LLAMA_ARG_RERANKING", on=("--pooling", "rank")),
    _row("--api-key", as_option("--api-key"), env="LLAMA_API_KEY"),
    _row("--api-key-file", as_option("--api-key-file"), env="LLAMA_ARG_API_KEY_FILE"),
    _row("--ssl-key-file", as_option("--ssl-keyfile"), env="LLAMA_ARG_SSL_KEY_FILE"),
    _row("--ssl-cert-file", as_option("--ssl-certfile"), env="LLAMA_ARG_SSL_CERT_FILE"),
    _row("-to --timeout", _seconds_both, env="LLAMA_ARG_TIMEOUT"),
    _row(
        "--sse-ping-interval",
        lambda value: ("--sse-ping-s", "0" if value.startswith("-") else value),
        env="LLAMA_ARG_SSE_PING_INTERVAL",
    ),
    _row("--threads-http", as_option("--threads-http", ("-1", "0")), env="LLAMA_ARG_THREADS_HTTP"),
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
        fine=ANY,
    ),
    _flag("--metrics", env="LLAMA_ARG_ENDPOINT_METRICS"),
    _flag("--props", env="LLAMA_ARG_ENDPOINT_PROPS", on=("--props",)),
    _flag("--slots", "--no-slots", env="LLAMA_ARG_ENDPOINT_SLOTS", on=("--slots",), off=("--no-slots",)),
    _row("--slot-save-path", cure="slots are not written to files; equal beginnings are found by themselves"),
    _row("--models-dir", env="LLAMA_ARG_MODELS_DIR", cure=_ONE_MODEL),
    _row("--models-preset", env="LLAMA_ARG_MODELS_PRESET", cure=_ONE_MODEL),
    _row("--models-max", env="LLAMA_ARG_MODELS_MAX", note=_ONE_MODEL, fine=ANY),
    _flag("--models-autoload", "--no-models-autoload", env="LLAMA_ARG_MODELS_AUTOLOAD", note=_ONE_MODEL),
    _row("--sleep-idle-seconds", note="the model stays loaded", fine=ANY),
    # chats
    _flag("--jinja", env="LLAMA_ARG_JINJA"),
    _flag("--no-jinja", env="", note="chat templates are rendered by jinja2 in any case"),
    _row("--chat-template-kwargs", as_option("--chat-template-kwargs"), env="LLAMA_ARG_CHAT_TEMPLATE_KWARGS"),
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
        fine=ANY,
    ),
    _flag(
        "--reasoning-preserve",
        "--no-reasoning-preserve",
        env="LLAMA_ARG_REASONING_PRESERVE",
        on=("--chat-template-kwargs", '{"preserve_reasoning": true}'),
        off=("--chat-template-kwargs", '{"preserve_reasoning": false}'),
    ),
    _row("--chat-template", as_option("--chat-template"), env="LLAMA_ARG_CHAT_TEMPLATE"),
    _row("--chat-template-file", as_option("--chat-template"), env="LLAMA_ARG_CHAT_TEMPLATE_FILE"),
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
    _row("--spec-draft-n-max", as_option("--n-draft"), env="LLAMA_ARG_SPEC_DRAFT_N_MAX"),
    _row("--draft --draft-n --draft-max", as_option("--n-draft"), env="LLAMA_ARG_DRAFT_MAX"),
    _row("--spec-type", _spec_type, env="LLAMA_ARG_SPEC_TYPE"),
    _flag("--spec-default", on=("--speculate", "lookup")),
    *(
        _row(names, env=env, note=note, fine=ANY)
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
