"""The tokenizer of a model, with the common names of transformers' tokenizers."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from llamabatch.entrypoints.llm import LLM
from llamabatch.errors import PromptError
from llamabatch.utils.absent import absent
from llamabatch.utils.checks import show

ABSENT = {
    "add_tokens": "the GGUF file has the vocabulary",
    "add_special_tokens": "the GGUF file has the vocabulary",
    "pad": "requests of one batch need no padding",
    "save_pretrained": "the GGUF file has the vocabulary",
    "from_pretrained": "the GGUF file has the vocabulary",
    "backend_tokenizer": "llama.cpp tokenizes",
}


class Tokenizer:
    """The tokenizer that LLM.get_tokenizer returns.

    Attributes:
        name_or_path: the model's name.
        model_max_length: n_ctx of the engine.
    """

    is_fast = True

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.name_or_path = llm.plan.config.model
        self.model_max_length = llm.n_ctx

    def encode(self, text: str, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Returns the token ids of a text. Names of special tokens in the text are read as those tokens.

        Args:
            add_special_tokens: add the vocabulary's special tokens at the ends of a text.
            **options: truncation and max_length; other options are refused.

        Raises:
            PromptError (ValueError): `text` is not a text, or an option is not supported.
        """
        cut, longest = options.pop("truncation", False), options.pop("max_length", None)
        if options:
            raise PromptError(f"encode takes truncation and max_length, and no {', '.join(options)}")
        ids = self._llm.tokenize(text, add_special=add_special_tokens, parse_special=True)
        return ids[: longest or self.model_max_length] if cut else ids

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False, **options: Any) -> str:
        """Returns the text of token ids. `options` such as clean_up_tokenization_spaces change nothing.

        Raises:
            PromptError (ValueError): an id is outside the vocabulary.
        """
        ids = [token_ids] if isinstance(token_ids, int) else [int(each) for each in token_ids]
        return self._llm.detokenize(ids, skip_special_tokens=skip_special_tokens) if ids else ""

    def batch_decode(
        self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """Returns the text of each list of token ids."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True, **options: Any) -> Encoding:
        """Returns the Encoding of a text. For a list of texts, returns one Encoding, in which each field has a list for
        each text."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens, **options)
            return Encoding(input_ids=ids, attention_mask=[1] * len(ids))
        each = [self.encode(one, add_special_tokens, **options) for one in text]
        return Encoding(input_ids=each, attention_mask=[[1] * len(ids) for ids in each])

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[str]:
        """Splits a text into tokens. Returns the vocabulary's text for each token."""
        return [self._llm.vocab.token(each) for each in self.encode(text, add_special_tokens)]

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """Returns the vocabulary's text for an id, or a list of texts for a list of ids."""
        vocab = self._llm.vocab
        return vocab.token(ids) if isinstance(ids, int) else [vocab.token(int(each)) for each in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """Returns the id of a token, or a list of ids for a list of tokens; None for an unknown token."""
        vocab = self._llm.vocab
        if isinstance(tokens, str):
            return vocab.id(tokens) if tokens in vocab else None
        return [vocab.id(each) if each in vocab else None for each in tokens]

    def apply_chat_template(
        self,
        conversation: Any,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | os.PathLike[str] | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """Returns the prompt of a conversation, or a list of prompts: token ids, or texts if tokenize=False.

        Args:
            return_dict: return an Encoding in place of the token ids.
            **variables: variables of the template, such as enable_thinking.

        Raises:
            PromptError, ConfigError (ValueError): as LLM.apply_chat_template of llamabatch.
        """
        if len(conversation) and not isinstance(conversation[0], Mapping):
            each = [
                self.apply_chat_template(
                    one, tools, chat_template, add_generation_prompt, continue_final_message, tokenize, **variables
                )
                for one in conversation
            ]
            return _encoded(each) if return_dict and tokenize else each
        for name in ("return_tensors", "padding", "truncation", "max_length", "documents"):
            if variables.pop(name, None):
                raise PromptError(f"{name} is not there; apply_chat_template returns lists of token ids, or a text")
        text = self._llm.apply_chat_template(
            conversation,
            tools=tools,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            chat_template_kwargs=variables or None,
        )
        if not tokenize:
            return text
        ids = self._llm.tokenize(text, add_special=False, parse_special=True)
        return Encoding(input_ids=ids, attention_mask=[1] * len(ids)) if return_dict else ids

    @property
    def chat_template(self) -> str | None:
        """The model's own chat template; None: the model has none."""
        return self._llm._client.model.chat_template

    @property
    def vocab_size(self) -> int:
        """The number of tokens of the vocabulary."""
        return self._llm.vocab.size

    def __len__(self) -> int:
        return self._llm.vocab.size

    def get_vocab(self) -> dict[str, int]:
        """Returns the vocabulary as a dictionary from token texts to ids."""
        vocab = self._llm.vocab
        return {token: number for number, token in reversed(list(enumerate(vocab)))}

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of the model's special tokens (BOS, EOS and others with a role), in ascending order."""
        return sorted(set(self._llm.vocab.special_ids.values()))

    @property
    def all_special_tokens(self) -> list[str]:
        """The tokens of all_special_ids."""
        return [self._llm.vocab.token(each) for each in self.all_special_ids]

    @property
    def bos_token_id(self) -> int | None:
        """The id of the token that begins a text, or None."""
        return self._llm.vocab.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The id of the token that ends a text, or else of the token that ends a turn. None: the model has neither."""
        vocab = self._llm.vocab
        return vocab.eot_token_id if vocab.eos_token_id is None else vocab.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The id of the padding token, or None."""
        return self._llm.vocab.pad_token_id

    @property
    def bos_token(self) -> str | None:
        """The vocabulary's text for bos_token_id, or None."""
        return self._token(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        """The vocabulary's text for eos_token_id, or None."""
        return self._token(self.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        """The vocabulary's text for pad_token_id, or None."""
        return self._token(self.pad_token_id)

    def _token(self, number: int | None) -> str | None:
        return None if number is None else self._llm.vocab.token(number)

    def __getattr__(self, name: str) -> Any:
        raise absent(self, name, ABSENT)

    def __repr__(self) -> str:
        return f"Tokenizer({show(self.name_or_path)}, vocab_size={self.vocab_size})"


class Encoding(dict[str, Any]):
    """A dictionary of token ids and their mask (input_ids, attention_mask), also readable as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        return self[name]


def _encoded(each: list[list[int]]) -> Encoding:
    return Encoding(input_ids=each, attention_mask=[[1] * len(ids) for ids in each])
