"""Settings of llama-server and vLLM that exist as a flag and as a field of a request body. Flag and field are treated
alike. A setting that only permits a server to do something is ignored, and its name is reported. A setting that would
change an answer is refused."""

from __future__ import annotations

from typing import Any, NamedTuple


class Setting(NamedTuple):
    """A setting of llama-server or vLLM that has no meaning in llamabatch.

    Attributes:
        advice: why the setting has no meaning, or what to give instead.
        usual: accepted values, which ask for the usual behaviour.
        optional: True: other values are ignored, and the name is reported; False: they are refused.
    """

    advice: str
    usual: tuple[Any, ...] = ()
    optional: bool = False


SETTINGS = {
    "n_cache_reuse": Setting("equal beginnings of prompts are reused, later parts are not", (0,), True),
    "backend_sampling": Setting(
        "sampling runs on the CPU, all rows at once, and draws the same tokens", (False,), True
    ),
    "mm_processor_kwargs": Setting("messages are text alone", ({},), True),
    "media_io_kwargs": Setting("messages are text alone", ({},), True),
    "adaptive_target": Setting("there is no adaptive-p sampler; give min_p or mirostat=2", (-1, -1.0)),
    "reasoning_budget_message": Setting("thinking is closed with the text that the model's family writes there", ("",)),
    "parse_tool_calls": Setting('calls are told from the text; give tool_choice="none" for text that is not', (True,)),
    "kv_transfer_params": Setting("there is no transfer of KV cells between servers", ({},)),
}
