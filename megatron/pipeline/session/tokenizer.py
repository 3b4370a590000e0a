"""Tokenizers: megatron-core's own behind Megatron-LM's names, and bytes."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from megatron.pipeline.patches import compat

from megatron.pipeline.flags.flags import TOKENIZERS
from megatron.pipeline.flags.importers import upstream

# megatron-core's name for each, which is that of its package but for huggingface's.
_NULL = "null-text"
_USUAL = 131072
_LIBRARIES = dict(zip(TOKENIZERS[1:], (_NULL, "huggingface", "sentencepiece", "tiktoken"), strict=True))


class ByteLevelTokenizer:
    """Every byte is a token, and ``eod`` is one more: lossless for files in any encoding.

    megatron-core's own byte tokenizer drops trailing white space and takes the byte 0 for the end of a document,
    so it could not give a text back. Bytes that are not UTF-8 travel as Python's surrogate escapes.
    """

    eod = 256
    eos = eod
    vocab_size = 257

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode("utf-8", "surrogateescape"))

    def detokenize(self, ids: Iterable[int]) -> str:
        """The text of the bytes; ends of documents disappear."""
        return bytes(token for token in ids if token != self.eod).decode("utf-8", "surrogateescape")

    @property
    def pad(self) -> int:
        """There is no padding token; megatron-core's datasets ask, and take the AttributeError for an answer."""
        raise AttributeError("ByteLevelTokenizer has no padding token")

    @property
    def unique_identifiers(self) -> OrderedDict[str, Any]:
        """Words that megatron-core's datasets put into the name of their caches."""
        return OrderedDict({"class": "ByteLevelTokenizer", "vocab_size": self.vocab_size})


def build_tokenizer(args: Namespace) -> Any:
    """The tokenizer of ``--tokenizer-type``, with ``tokenize``, ``detokenize``, ``eod`` and ``vocab_size``.

    Raises:
        ValueError: its model file, its vocabulary size or its Python package is missing.
    """
    if args.tokenizer_type == "ByteLevelTokenizer":
        return ByteLevelTokenizer()
    if args.tokenizer_type not in _LIBRARIES:
        raise ValueError(f"unknown --tokenizer-type {args.tokenizer_type}: choose from {', '.join(TOKENIZERS)}")
    MegatronTokenizer = compat.get("megatron.core.tokenizers", "MegatronTokenizer")

    library = _LIBRARIES[args.tokenizer_type]
    if library == _NULL:
        if args.vocab_size is None:
            raise ValueError("--tokenizer-type NullTokenizer needs --vocab-size")
        library = _NULL if compat.is_from("0.17") else "null"
        return MegatronTokenizer.from_pretrained(metadata_path={"library": library}, vocab_size=args.vocab_size)
    if args.tokenizer_model is None:
        raise ValueError(f"--tokenizer-type {args.tokenizer_type} needs --tokenizer-model PATH")
    if library != "huggingface" and not Path(args.tokenizer_model).is_file():
        raise ValueError(f"--tokenizer-model {args.tokenizer_model}: no such file")
    package = "transformers" if library == "huggingface" else library
    if importlib.util.find_spec(package) is None:
        raise ValueError(f"--tokenizer-type {args.tokenizer_type} needs a package: pip install {package}")
    try:
        return MegatronTokenizer.from_pretrained(args.tokenizer_model, metadata_path={"library": library})
    except Exception as error:  # each library has its own errors, assertions among them, for a file it cannot read
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"--tokenizer-model {args.tokenizer_model}: not readable as {args.tokenizer_type} ({reason})") from None


def vocabulary_size(args: Namespace) -> int:
    """Number of tokens, for a prediction: the tokenizer's own, where it is here, or what it is known to have.

    An unknown vocabulary is taken as ``_USUAL``, and added to ``args.not_modelled``.

    Raises:
        ValueError: no flag says anything of a vocabulary.
    """
    kind = args.tokenizer_type
    if args.vocab_size and kind != "NullTokenizer":
        return int(args.vocab_size)
    if kind is None:
        raise ValueError("missing --tokenizer-type: NullTokenizer needs --vocab-size, ByteLevelTokenizer nothing else")
    if kind in ("ByteLevelTokenizer", "NullTokenizer") or (args.tokenizer_model and Path(args.tokenizer_model).exists()):
        return int(build_tokenizer(args).vocab_size)
    named = " ".join(filter(None, (kind, args.tokenizer_model)))
    size = next((size for pattern, size in upstream.table("vocabularies").items() if fnmatch(named, pattern)), None)
    if size is None:
        note = f"not known here, and taken as {_USUAL} tokens: give --vocab-size"
        args.not_modelled.append(f"--tokenizer-type {named.replace(' ', ' --tokenizer-model ', 1)}: {note}")
    return size or _USUAL


def padded_vocab_size(vocab_size: int, args: Namespace) -> int:
    """The vocabulary rounded up: every tensor-parallel rank holds a multiple of ``--make-vocab-size-divisible-by``."""
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    return int(-(-vocab_size // multiple) * multiple)


def sizes_of_vocabulary(size: int, args: Namespace) -> dict[str, int]:
    """Values for settings of a training with that many tokens."""
    return {"vocab_size": size, "padded_vocab_size": padded_vocab_size(size, args)}
