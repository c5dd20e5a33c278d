"""Shows options by groups in `--help`: first the command's own options, then the options that commands share."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Collection
from typing import Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

# Keys: titles of groups. Values: names of parameters. The help lists all other options as the command's own.
GROUPS: dict[str, tuple[str, ...]] = {
    "Sampling": (
        *("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty"),
        *("frequency_penalty", "logit_bias", "seed", "stop", "ignore_eos", "others"),
    ),
    "Strategy and slots": (
        *("strategy", "n_slots", "start_slots", "n_ctx", "instances", "instance_strategy", "max_queue", "max_wait_ms"),
        *("preempt", "isolate", "profile"),
    ),
    "Batches and KV cache": (
        *("n_batch", "n_ubatch", "prefill_share", "prefill_budget"),
        *(
            "kv",
            "kv_cells",
            "type_k",
            "type_v",
            "swa_full",
            "cache_prefix",
            "cache_ram",
            "cache_disk",
            "cache_disk_mib",
            "flash_attn",
            "batch_invariant",
        ),
        "pooling",
    ),
    "Processors and memory": (
        *("n_threads", "n_threads_batch", "n_gpu_layers", "devices", "split_mode", "main_gpu", "tensor_split"),
        *(
            "offload_kqv",
            "op_offload",
            "device_sampling",
            "row_ladder",
            "override_tensor",
            "n_cpu_moe",
            "cpu_moe",
            "use_mmap",
            "use_mlock",
            "numa",
            "extra_bufts",
        ),
    ),
    "Speculation": ("speculate", "draft_model", "n_draft", "speculate_always"),
    "Pictures and sounds": (
        *("mmproj", "image_min_tokens", "image_max_tokens", "allowed_local_media_path", "allowed_media_domains"),
    ),
    "Thinking": ("reasoning_format", "reasoning_tags"),
    "Model file": (
        *("trial", "sha256", "kv_overrides", "rope_scaling", "rope_freq_base", "rope_freq_scale", "yarn_ext_factor"),
        *("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_orig_ctx"),
    ),
}
# Only `llamabatch serve` has these groups. The help shows them after the command's own options.
SERVER_GROUPS: dict[str, tuple[str, ...]] = {
    "Several models": (*("models_preset", "models_max", "models_autoload", "models_fifo", "sleep_idle_seconds"),),
    "Address": ("host", "port", "uds", "reuse_port", "root_path", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs"),
    "Callers": (
        *("api_keys", "api_key_file", "no_key", "metrics_without_key", "allowed_hosts", "cors_origins"),
        *("cors_methods", "cors_headers", "cors_credentials"),
    ),
    "Bounds": (
        *("max_body_bytes", "max_bodies_bytes", "max_responses_bytes", "max_logprobs", "max_header_bytes"),
        *("max_headers", "max_connections", "header_timeout_s", "body_timeout_s", "keep_alive_s", "write_timeout_s"),
        *("drain_s", "sse_ping_s", "threads"),
    ),
    "Batches": ("batches", "data_dir", "max_disk_bytes", "max_file_bytes"),
    "Log": ("log_level", "log_file", "access_log"),
}
_SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "others")
_ENGINE = ("n_ctx", "n_threads", "n_gpu_layers")
# `--help` of these commands shows only the parameters named here. `--help-all` shows all options.
SHORT: dict[str, tuple[str, ...]] = {
    "generate": (
        *("model", "chat", "system", "images", "sounds", "mmproj", "loras", *_SAMPLING, "stop", "json_schema"),
        *(*_ENGINE, "show_plan", "help"),
    ),
    "chat": ("model", "system", "chat_template", "loras", *_SAMPLING, *_ENGINE, "reasoning_format", "help"),
    "run": (
        *("model", "prompt", "chat", "system", "image_columns", "embed", "id_column", "keep", "answer"),
        *("json_schema", "parse", "limit", "retry_errors", "dry_run", "max_tokens", "temperature", "others"),
        *("n_slots", "n_ctx", "n_gpu_layers", "help"),
    ),
    "plan": (
        *("model", "slots", "prompts", "max_tokens", "memory", "load", "latency", "as_json", "kubernetes"),
        *("plot_file", "strategy", "type_k", "type_v", *_ENGINE, "help"),
    ),
    "compare": (
        *("model", "prompts", "strategies", "max_tokens", "slots", "json_file", "plot_file", "baseline", "rounds"),
        *("n_threads_batch", "type_k", "type_v", *_ENGINE, "help"),
    ),
    "eval": (
        *("model", "tasks", "num_fewshot", "limit", "gen_kwargs", "apply_chat_template", "system_instruction"),
        *("max_gen_toks", "output", "log_samples", "seed", "json_file", "n_slots", *_ENGINE, "help"),
    ),
    "serve": (
        *("model", "models_dir", "served_model_names", "loras", "host", "port", "api_keys", "no_key", "batches"),
        *("data_dir", "log_level", "max_tokens", "temperature", "others", "n_slots", "max_queue", *_ENGINE, "help"),
    ),
}
ALL = "--help-all"
_MEANT = {"--adapter": "--lora", "--adapters": "--lora"}  # options of other programs, with our name for each
# Advice for users who give a command an extra argument.
_INSTEAD = {"chat": "give the message on stdin, or to: llamabatch generate --chat -m MODEL MESSAGE"}
_MOST_NEAR = 3
_NEAR = 0.75  # minimum similarity of a suggested option; with click's 0.6, --json-schema would suggest --no-use-mmap
_UNDERSCORED = re.compile(r", --[a-z]+_\w+")  # the help leaves out names with underscores


class GroupedCommand(click.Command):
    """A command whose help shows its options by groups. For a command in SHORT, only --help-all shows all options."""

    groups = GROUPS

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if self.name in SHORT:
            option = click.Option(
                [ALL], is_flag=True, is_eager=True, expose_value=False, help="Show all options.", callback=_show,
                hidden=True,  # the last line of the help names this option
            )  # fmt: skip
            self.params.append(option)

    @property
    def takes_model(self) -> bool:
        """True if the command accepts the model as its only argument, in place of --model."""
        has_model = any(each.name == "model" for each in self.params)
        return has_model and not any(isinstance(each, click.Argument) for each in self.params)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Returns the parts of the usage line."""
        return [*super().collect_usage_pieces(ctx), *(["[MODEL]"] if self.takes_model else [])]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses the arguments. A single argument without a flag may be the model. An error in the value of an
        environment variable names the variable."""
        if self.takes_model and not ctx.resilient_parsing:
            given, rest, _ = self.make_parser(ctx).parse_args(list(args))
            if len(rest) == 1 and "model" not in given:
                args, ctx.allow_extra_args = ["--model", rest[0], *args], True
            elif rest and self.name in _INSTEAD:
                raise click.UsageError(f"Got unexpected extra argument ({rest[-1]}); {_INSTEAD[self.name]}", ctx)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            error.possibilities = self._near(error.option_name)  # type: ignore[misc]  # click's own guess is poor
            raise
        except click.BadParameter as error:
            if error.param is not None and (variable := _variable_of(ctx, error.param)):
                error.param_hint = f"'{variable}'"
            raise

    def _near(self, name: str) -> list[str]:
        """Returns suggestions for an unknown option: our option in _MEANT, else options that start or end with the
        unknown name, else the most similar options."""
        names = [opt for each in self.params for opt in (*each.opts, *each.secondary_opts) if opt.startswith("--")]
        parts = [each for each in names if each.startswith(name) or each.endswith(f"-{name.lstrip('-')}")]
        meant = [each for each in names if each == _MEANT.get(name)]
        return meant or parts[:_MOST_NEAR] or difflib.get_close_matches(name, names, cutoff=_NEAR)

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Returns completions: options, and models where the argument may be a model."""
        found = super().shell_complete(ctx, incomplete)
        is_given = ctx.args or ctx.get_parameter_source("model") is ParameterSource.COMMANDLINE
        if self.takes_model and not is_given and not incomplete.startswith("-"):
            model = next(each for each in self.params if each.name == "model")
            found += model.type.shell_complete(ctx, model, incomplete)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Writes the command's own options, then a section for each group."""
        self.write_options(ctx, formatter, SHORT.get(str(self.name), ()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Adds a line about --help-all if not all options are shown."""
        super().format_epilog(ctx, formatter)
        short = SHORT.get(str(self.name))
        if short is not None and not ctx.meta.get(ALL):
            shown = sum(not getattr(each, "hidden", True) for each in self.get_params(ctx))
            formatter.write_paragraph()
            formatter.write_text(f"{ALL} shows all {shown} options.")

    def write_options(self, ctx: click.Context, formatter: click.HelpFormatter, short: Collection[str]) -> None:
        """Writes the options named in `short`, or all if `short` is empty."""
        group_of = {name: group for group, names in self.groups.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {"Options": [], **{group: [] for group in self.groups}}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            is_short = not short or ctx.meta.get(ALL) or param.name in short
            if record is not None and is_short and not isinstance(param, click.Argument):
                names, text = record
                rows[group_of.get(str(param.name), "Options")].append((_UNDERSCORED.sub("", names), text))
        for group, found in rows.items():
            if found:
                with formatter.section(group):
                    formatter.write_dl(found, col_max=min(30, formatter.width // 3))


def _variable_of(ctx: click.Context, param: click.Parameter) -> str | None:
    """Returns the environment variable that set a parameter; None if no variable set it."""
    if ctx.get_parameter_source(str(param.name)) is not ParameterSource.ENVIRONMENT or not param.envvar:
        return None
    names = [param.envvar] if isinstance(param.envvar, str) else param.envvar
    return next((name for name in names if os.environ.get(name)), None)


def _show(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        ctx.meta[ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()
