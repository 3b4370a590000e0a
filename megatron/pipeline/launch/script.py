"""Running a script with Megatron-LM's own ``megatron.training``, in this process or on every rank under torchrun."""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from megatron.pipeline.distributed.processes import free_port
from megatron.pipeline.flags.packages import refuse_without_torch
from megatron.pipeline.launch import install
from megatron.pipeline.planner import STOCK, Facts, families, hybrid, reading, topics

PIP, CHECKOUT = "pip", "checkout"
_REFUSED = 2  # exit code of what has said in one line what is wrong
_FIXED_SEGMENTS = ("nccl-ub", "cuda-graph")


def prepare(options: Sequence[str], tokens: Sequence[str], core: str = CHECKOUT) -> Callable[[], object]:
    """Get ready to run a script, with ``megatron.core`` and ``megatron.training`` patched.

    Started by torchrun or a batch system, which set RANK, it runs in this process. Otherwise torchrun's options say how many
    processes to start here; without any it is one.

    Args:
        options: torchrun's.
        tokens: the script and its flags.
        core: whose ``megatron.core`` to run, the checkout's or pip's.

    Returns:
        What runs it.

    Raises:
        ValueError: there is no script, no torch to start, options do not fit the way this process was started, or every rank
            would refuse a flag.
        RuntimeError: ``megatron.training`` is missing, or lacks what a patch relies on.
        ModuleNotFoundError: there is no ``megatron.core``, or what it imports.
    """
    if not tokens:
        raise ValueError("which script? mpipe launch PATH/pretrain_gpt.py [flags]")
    script, flags = Path(tokens[0]), tokens[1:]
    if not script.is_file():
        raise ValueError(f"there is no script {script}")
    _let_segments_grow(flags)
    if options and "RANK" in os.environ:
        raise ValueError(
            f"{' '.join(options)} before the script are options of torchrun, which has started this process already (RANK is "
            f"{os.environ['RANK']}): leave them out here"
        )
    if options:
        refuse_without_torch()
        _refuse_early(flags)
        return partial(_start, [*options, "-m", "megatron.pipeline.cli", "launch", "--core", core, *tokens])
    if "RANK" not in os.environ:
        world = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}
        os.environ |= world | {"MASTER_PORT": str(free_port())}
    script = script.resolve()
    _find(script.parent, core)
    sys.argv = [str(script), *flags]
    install()
    return partial(runpy.run_path, str(script), run_name="__main__")


def _start(torchrun: Sequence[str]) -> None:
    """Start ranks as torchrun does, and pass SIGTERM and SIGINT on to them as it does.

    Args:
        torchrun: its options, and what each rank runs.

    Raises:
        SystemExit: a rank has failed: with 2 one that has said in a line what is wrong, to which nothing is added; else with 1,
            behind torchrun's report; or, as shells do, with 128 and the signal that has ended all.
    """
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException, logger
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    held: list[logging.LogRecord] = []  # which ranks are ended behind the first, until it is known how that one ended
    logger.addFilter(held.append)  # type: ignore[arg-type]  # its None means that a record goes no further
    try:
        run.main(torchrun)
    except ChildFailedError as failed:
        if failed.get_first_failure()[1].exitcode == _REFUSED:
            held.clear()
            sys.exit(_REFUSED)
        sys.exit(str(failed))  # printed, and the exit code is 1
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    finally:
        logger.removeFilter(held.append)  # type: ignore[arg-type]
        for record in held:
            logger.handle(record)


def _let_segments_grow(flags: Sequence[str]) -> None:
    """Have torch's allocator grow its segments, unless the user says how it works, or Megatron-LM refuses it with a flag, given
    here or in a ``--config`` file.

    What W keeps of odd sizes lives between what F and B allocate; fixed segments would be torn into pieces.
    """
    files = _given(flags, "--config")
    read = [Path(file).read_text(errors="ignore") for file in files if Path(file).is_file()]
    given = " ".join([*flags, *read]).replace("_", "-")
    if not any(word in given for word in _FIXED_SEGMENTS) and "PYTORCH_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # before torch is imported


def _given(flags: Sequence[str], name: str) -> list[str]:
    """The values of a flag, in order."""
    return [flag.removeprefix(f"{name}=") for before, flag in pairwise(["", *flags]) if name in (before, flag.partition("=")[0])]


def _refuse_early(flags: Sequence[str]) -> None:
    """Refuse what says in a line that nothing can train, before ranks start: each of them would, behind what it prints of flags.

    Raises:
        ValueError: says what is wrong.
    """
    values: dict[str, Any] = {}
    for file in _given(flags, "--config"):  # if it is no mapping, ranks say so
        with suppress(OSError, ValueError, yaml.YAMLError):
            content = yaml.safe_load(reading.content_of(file))
            for name, value in content.items() if isinstance(content, dict) else ():
                values[str(name).replace("_", "-")] = value
    for name in ("pipeline-schedule", "save", "save-interval", "hybrid-layer-pattern", "pipeline-model-parallel-size"):
        if given := _given(flags, f"--{name}"):
            values[name] = given[-1]
    schedule, ranks = (
        str(values.get(f"pipeline-{name}", other)) for name, other in (("schedule", STOCK), ("model-parallel-size", 1))
    )
    families.check(schedule)
    if schedule != STOCK and ranks.isdecimal() and (pattern := values.get("hybrid-layer-pattern")):
        with reading.NamedErrors("--hybrid-layer-pattern"):
            hybrid.Pattern.of(str(pattern)).chunks(schedule, int(ranks))
    Facts(save=values.get("save"), save_interval=values.get("save-interval")).refuse(topics.STARTED)


def _find(folder: Path, core: str) -> None:
    """Make the script's folder the first that Python looks into; but for pip's ``megatron.core``, if that is asked for."""
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != folder]
    if core == PIP:
        importlib.import_module("megatron.core")  # as long as no other can be found
    sys.path.insert(0, str(folder))
