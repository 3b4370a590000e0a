"""The patches: what they refuse, what they leave alone, and what works on a CPU because of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pool import Pool


def unknown_version(version: str) -> str:
    import megatron.core
    from megatron.pipeline.patches import upstream

    known, megatron.core.__version__ = megatron.core.__version__, version
    try:
        with pytest.raises(RuntimeError) as error:
            upstream.require("megatron.core.pipeline_parallel.schedules", ())
    finally:
        megatron.core.__version__ = known
    return str(error.value)


def test_unknown_version_is_refused(pool: Pool) -> None:
    message = pool.run(1, unknown_version, "0.99.0")[0]
    assert "0.99.0" in message
    assert "pip install megatron-core==0.16.1" in message


def missing_symbol() -> str:
    from megatron.pipeline.patches import upstream

    with pytest.raises(RuntimeError) as error:
        upstream.require("megatron.core.pipeline_parallel.schedules", ("forward_step", "no_such.thing"))
    return str(error.value)


def test_missing_symbol_is_named(pool: Pool) -> None:
    assert "no_such.thing" in pool.run(1, missing_symbol)[0]


def installed_twice() -> list[bool]:
    from megatron.pipeline import patches

    patches.install()
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    views = clip_grads.torch, layers.LinearWithGradAccumulationAndAsyncCommunication, torch.Tensor.type
    patches.install()
    return [
        a is b
        for a, b in zip(
            views, (clip_grads.torch, layers.LinearWithGradAccumulationAndAsyncCommunication, torch.Tensor.type), strict=True
        )
    ]


def test_installing_twice_changes_nothing(pool: Pool) -> None:
    assert all(pool.run(1, installed_twice)[0])


def inactive_with_a_gpu() -> list[bool]:
    """In a process that has not installed the patch, with torch saying that there is a GPU."""
    import subprocess
    import sys

    code = (
        "import torch; torch.cuda.is_available = lambda: True\n"
        "original = torch.Tensor.cuda, torch.Tensor.type\n"
        "from megatron.pipeline.patches import cpu; cpu.install()\n"
        "import megatron.core.optimizer.clip_grads as c\n"
        "print(c.torch is torch, (torch.Tensor.cuda, torch.Tensor.type) == original)"
    )
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    return [word == "True" for word in ended.stdout.split()[-2:]]


def test_cpu_backend_is_inactive_where_there_is_a_gpu() -> None:
    assert inactive_with_a_gpu() == [True, True]


def torch_itself() -> list[Any]:
    """The user's torch is untouched; megatron-core's view of it is the CPU."""
    from megatron.pipeline import patches

    patches.install()
    from megatron.core.optimizer import clip_grads

    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    return [str(clip_grads.torch.zeros(1, device="cuda").device), clip_grads.torch.nn is torch.nn, torch.cuda.is_available()]


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU backend")
def test_only_megatron_sees_a_device(pool: Pool) -> None:
    assert pool.run(1, torch_itself)[0] == ["cpu", True, False]


def restored() -> bool:
    from megatron.core.pipeline_parallel import schedules as upstream
    from megatron.pipeline.patches import schedules

    schedules.restore()
    before = {name: getattr(upstream, name) for name in schedules._ORIGINAL}
    schedules.use(lambda **_: [])
    changed = upstream.forward_backward_no_pipelining is not before["forward_backward_no_pipelining"]
    schedules.restore()
    return changed and all(getattr(upstream, name) is value for name, value in before.items())


def test_schedules_are_restored(pool: Pool) -> None:
    assert pool.run(1, restored)[0]
