"""``mpipe flags``: the Megatron-LM flags that a model, a script or a recipe of others stands for."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from megatron.pipeline.cli.arguments import Commands, add_command, report_flags
from megatron.pipeline.cli.summary import check_output, write
from megatron.pipeline.flags.importers import bridge, huggingface


def add(commands: Commands) -> None:
    parser = add_command(
        commands,
        "flags",
        "print the Megatron-LM flags that a model or a training of others stands for",
        run,
        "mpipe flags Qwen/Qwen3-30B-A3B",
        "mpipe flags train.sh --set 14=2 TP=4",
        epilog="--set answers what a script's text leaves open. Flags that follow are added, and win.",
        parents=[report_flags("a list of words in JSON", "write there instead of to the terminal: .json or .txt")],
    )
    parser.flag("path", "a config.json of Hugging Face, its folder, or its name (--model of other commands); or a file of flags, "
        "a script, nested YAML, or bridge:NAME (--config of other commands)", str, metavar="PATH")  # fmt: skip
    parser.set_defaults(takes_flags=True)


def run(options: argparse.Namespace) -> None:
    check_output(options)
    from megatron.pipeline.flags.arguments import tokens_of

    path = Path(os.path.expanduser(options.path))
    is_model = path.suffix == ".json" or path.is_dir() or not (path.is_file() or options.path.startswith(bridge.SCHEME))
    tokens, remarks = tokens_of(["--model" if is_model else "--config", options.path, *options.flags])
    for remark in [*remarks, *(huggingface.lacking(options.path) if is_model else [])]:
        print(f"mpipe: {remark}", file=sys.stderr)
    lines = "\n".join(tokens).replace("\n", " ").replace(" --", "\n--")
    write({"flags": tokens}, lambda: lines, options)
