"""Make Megatron's ``.bin`` and ``.idx`` files from text: ``preprocess_data.py --input PATH --output-prefix data/mine``.

Reads JSON lines (``.json``, ``.jsonl``), plain text files, directories of either, or (``--stdlib``) the source of
Python's standard library. Writes ``PREFIX_text_document.bin`` and ``.idx``, whose common path goes to ``--data-path``.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Sequence


def main(argv: Sequence[str]) -> int:
    """Prepare the data; returns the exit code: 0, or 2 when an input is wrong."""
    warnings.filterwarnings("ignore", module="megatron.core")  # about optional packages; first of all, since flags import it
    args = _parse(argv)
    import corpus

    from megatron.pipeline.cli.progress import Progress

    try:
        files = corpus.standard_library(args.max_bytes) if args.stdlib else corpus.find_files(args.input)
        errors = "surrogateescape" if args.tokenizer_type == "ByteLevelTokenizer" else "replace"
        documents = corpus.read_documents(files, args.json_keys, errors)
        total, done = sum(path.stat().st_size for path in files), 0

        def note(size: int) -> None:
            nonlocal done
            done += size
            progress(done, total)

        with Progress("tokenizing bytes") as progress:
            written = corpus.write_dataset(
                documents,
                args.output_prefix,
                args.json_keys,
                args,
                args.append_eod,
                args.workers,
                note,
            )
    except ValueError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 2
    for prefix, (count, tokens) in written.items():
        print(f"{prefix}: {count} documents, {tokens} tokens")
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    from megatron.pipeline.flags.flags import TOKENIZERS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--input", nargs="+", metavar="PATH", help="files or directories")
    source.add_argument("--stdlib", action="store_true", help="the source code of Python's standard library")
    parser.add_argument("--max-bytes", type=int, default=8_000_000, help="size limit of --stdlib (default 8 MB)")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="fields that hold text")
    parser.add_argument("--output-prefix", required=True, help="path of the output, without _text_document.bin")
    parser.add_argument("--tokenizer-type", choices=TOKENIZERS, default="ByteLevelTokenizer", help="tokenizer")
    parser.add_argument("--tokenizer-model", help="file or directory of the tokenizer")
    parser.add_argument("--vocab-size", type=int, help="vocabulary of NullTokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=1, help="processes that tokenize")
    return parser.parse_args(argv)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.exit(main(sys.argv[1:]))
