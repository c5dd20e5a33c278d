"""vLLM's PoolingParams."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from llamabatch.errors import InputError
from llamabatch.utils.checks import boolean, integer, show

REFUSED = ("step_tag_id", "returned_token_ids", "late_interaction_params")


@dataclass
class PoolingParams:
    """The parameters for vectors and scores of a text. None means the default of the LLM.

    Attributes:
        truncate_prompt_tokens: how many tokens to keep from the end of a text; -1: as many as n_ctx allows.
        dimensions: how many elements to keep from the start of a vector.
        normalize: True scales vectors to length 1. The default is True unless LLM(pooler_config=…) changes it.
        use_activation: True returns classes and relevance as probabilities, False as raw scores. The default is True
            unless LLM(pooler_config=…) changes it. `softmax` and `activation` are former names of this field.
        step_tag_id, returned_token_ids, late_interaction_params: refused.
        task, extra_kwargs, requires_token_ids, skip_reading_prefix_cache, output_kind: change nothing.
    """

    truncate_prompt_tokens: int | None = None
    dimensions: int | None = None
    normalize: bool | None = None
    softmax: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None
    late_interaction_params: Any = None
    task: str | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    extra_kwargs: dict[str, Any] | None = None
    output_kind: Any = None

    def __post_init__(self) -> None:
        for name in REFUSED:
            if getattr(self, name) is not None:
                raise InputError(f"{name} is {show(getattr(self, name))}, which is not supported; leave it out")
        if self.truncate_prompt_tokens is not None:
            integer(InputError, "truncate_prompt_tokens", self.truncate_prompt_tokens, -1, 2**31 - 1, ", or None")
        for former in (self.softmax, self.activation):
            self.use_activation = former if self.use_activation is None else self.use_activation
        for name in ("normalize", "use_activation"):
            if getattr(self, name) is not None:
                boolean(InputError, name, getattr(self, name))

    def clone(self) -> PoolingParams:
        """Returns a copy."""
        return copy.deepcopy(self)
