"""In place of the package: the tokenizer that ``--sft`` asks it for, a token for each letter."""

from typing import Any

import numpy as np


class AutoTokenizer:
    chat_template, pad_token_id, bos_token_id, eos_token_id = "", 126, None, 125

    @classmethod
    def from_pretrained(cls, **_: Any) -> "AutoTokenizer":
        return cls()

    def __len__(self) -> int:
        return 127

    def convert_tokens_to_ids(self, _: str) -> int:
        return self.pad_token_id

    def apply_chat_template(self, turns: list[dict[str, str]], **_: Any) -> Any:
        return np.array([ord(letter) % 125 for turn in turns for letter in turn["content"]])
