"""LoRARequest: vLLM's class for the adapter of a request, with the adapter's name and file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llamabatch.errors import AdapterError
from llamabatch.utils.checks import integer, show


@dataclass(eq=False)
class LoRARequest:
    """A LoRA adapter. The first request with this adapter loads the file.

    Attributes:
        lora_name: the adapter's name; a second adapter with the same name is refused.
        lora_int_id: the adapter's number, at least 1; changes nothing here.
        lora_path: a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it, or a folder with one such file.
        long_lora_max_len, base_model_name, tensorizer_config_dict, load_inplace: change nothing.

    Raises:
        AdapterError (ValueError): the path is empty, or the number is below 1.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    long_lora_max_len: int | None = None
    base_model_name: str | None = None
    tensorizer_config_dict: dict[str, Any] | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        integer(AdapterError, "lora_int_id", self.lora_int_id, 1, 2**63 - 1)
        if not self.lora_path:
            raise AdapterError(f"lora_path of {show(self.lora_name)} is {show(self.lora_path)}; give a GGUF file")

    @property
    def name(self) -> str:
        """The same as lora_name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The same as lora_path."""
        return self.lora_path

    @property
    def adapter_id(self) -> int:
        """The same as lora_int_id."""
        return self.lora_int_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest) and self.lora_name == other.lora_name

    def __hash__(self) -> int:
        return hash(self.lora_name)

    def file(self) -> str:
        """Returns the path of the GGUF file. Raises AdapterError for a folder with no GGUF file or with several."""
        path = Path(self.lora_path)
        if not path.is_dir():
            return str(path)
        found = sorted(each.name for each in path.glob("*.gguf"))
        if len(found) != 1:
            have = ", ".join(found) or "no .gguf file"
            raise AdapterError(
                f"lora_path is {show(self.lora_path)}, a folder with {have}; give one GGUF file, as llama.cpp's "
                "convert_lora_to_gguf.py makes of a PEFT folder"
            )
        return str(path / found[0])
