"""The patches: what they refuse, what they leave alone, and what works on a CPU because of them."""

from __future__ import annotations

import ast
import os
import re
import shutil
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from pool import Pool, forked

SCHEDULES = "megatron.core.pipeline_parallel.schedules"


def version_as(version: str, package: str = "megatron.core") -> str:
    """What a rank logs when two of the names in upstream's schedules are checked, twice, for a version of a package."""
    import logging
    from importlib import import_module

    from megatron.pipeline.patches import compat

    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    module: Any = import_module(package)
    compat.version.cache_clear()
    compat.logger.addHandler(handler)
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(module, "__version__", version)
        for _ in range(2):
            compat.check({SCHEDULES: {name: compat.NAMES[SCHEDULES][name] for name in ("forward_step", "backward_step")}})
    compat.logger.removeHandler(handler)
    compat.version.cache_clear()
    compat._warn.cache_clear()
    return "\n".join(logged)


def test_unknown_version_is_told_with_what_was_checked(pool: Pool) -> None:
    message, other_rank = pool.run(2, version_as, "0.99.0")
    assert not other_rank
    assert message.count("not tested with megatron-core 0.99.0, but with the releases 0.16, 0.17, 0.18, 0.19") == 1
    assert message.endswith("; it goes on, because all 2 names that it relies on are there") and "\n" not in message


def test_versions_that_are_tested() -> None:
    from megatron.pipeline.patches import compat

    known = {"0.16.0": True, "0.15.3": False, "0.19.2+ac65149": True, "0.20.0": False, "0.16.0rc0": False, "0.1.4": False}
    assert {version: compat.is_tested(version) for version in known} == known


def test_versions_of_torch_that_are_tested(pool: Pool) -> None:
    for version, known in {"2.11.0": True, "2.15.1+cu130": True, "2.10.0+cpu": False, "2.16.0a0+git1234": False}.items():
        [message] = pool.run(1, version_as, version, "torch")
        said = f"WARNING: megatron.pipeline is not tested with torch {version}, but with 2.11 to 2.15"
        assert message == ("" if known else said)


def test_a_checkouts_helpers_are_compiled_for_this_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.pipeline.patches import datasets_utils

    found: list[str | None] = []
    utils = SimpleNamespace(__file__=str(tmp_path / "utils.py"), compile_helpers=lambda: found.append(shutil.which("python3")))
    monkeypatch.setattr(datasets_utils.compat, "module", lambda _: utils)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")  # of an environment that is not activated
    (tmp_path / "Makefile").touch()
    datasets_utils.install()
    utils.compile_helpers()
    assert found == [str(Path(sys.prefix) / "bin" / "python3")]
    assert os.environ["PATH"] == "/usr/bin:/bin"


@pytest.mark.parametrize("engine", [False, True])
def test_without_transformer_engine_no_linear_is_of_its_classes(monkeypatch: pytest.MonkeyPatch, engine: bool) -> None:
    """megatron-core after 0.19 then asks ``isinstance`` for what are no classes."""
    from megatron.core.transformer import multi_token_prediction as upstream
    from megatron.pipeline.patches import multi_token_prediction

    name = "is_inference_column_parallel_linear"

    def asked(linear: Any) -> bool:
        return isinstance(linear, int if engine else MagicMock())  # type: ignore[arg-type]

    monkeypatch.setattr(upstream, name, asked, raising=False)
    monkeypatch.setattr(upstream, "HAVE_TE", engine)
    multi_token_prediction.install()
    assert getattr(upstream, name)(1) is engine


def missing_symbol() -> str:
    from megatron.pipeline.patches import compat

    rows = {"forward_step": compat.Name("F"), "no_such.thing": compat.Name("the thing"), "neither": compat.Name("another")}
    with pytest.raises(RuntimeError) as error:
        compat.check({SCHEDULES: rows})
    return str(error.value)


def test_missing_symbol_is_named(pool: Pool) -> None:
    message = pool.run(1, missing_symbol)[0]
    assert f"{SCHEDULES}.no_such.thing (the thing); {SCHEDULES}.neither (another)" in message
    newest = "0.19.0" if sys.version_info >= (3, 12) else "0.16.0"
    assert f"pip install 'megatron-core~={newest}'" in message


def private_names(path: Path) -> set[tuple[str, str]]:
    """The private names of megatron.core that a file imports, or reads from a module that it imports."""
    tree = ast.parse(path.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imports = [node for node in nodes if (node.module or "").startswith("megatron.core")]
    names = {(str(node.module), alias.name) for node in imports for alias in node.names if alias.name.startswith("_")}
    modules = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    return names | {
        (modules[node.value.id], node.attr)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in modules
        and re.match("_[a-z]", node.attr)
    }


def test_private_names_of_upstream_come_from_the_table() -> None:
    root = Path(__file__).parents[2] / "megatron" / "pipeline"
    found = {str(path): names for path in root.rglob("*.py") if (names := private_names(path))}
    assert not found, "take them by patches/compat.py get()"


def refused_release(version: str) -> str:
    import megatron.core
    from megatron.pipeline.patches import compat

    from megatron.pipeline import patches

    compat.version.cache_clear()
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(megatron.core, "__version__", version)
        with pytest.raises(RuntimeError) as error:
            patches.install()
    compat.version.cache_clear()
    return str(error.value)


def test_older_releases_are_refused_in_one_line(pool: Pool) -> None:
    newest = "0.19.0" if sys.version_info >= (3, 12) else "0.16.0"
    for version in ("0.15.3", "0.9.0+abc"):
        message = pool.run(1, refused_release, version)[0]
        assert re.match(
            rf"megatron-core {re.escape(version)} is .* 0\.16 to 0\.19: pip install 'megatron-core~={newest}'$", message
        )


def installed_twice() -> list[bool]:
    from megatron.pipeline import patches

    patches.install()
    from megatron.core.optimizer import clip_grads
    from megatron.core.tensor_parallel import layers

    def replaced() -> tuple[Any, ...]:
        return clip_grads.torch, layers.LinearWithGradAccumulationAndAsyncCommunication, torch.Tensor.type

    before = replaced()
    patches.install()
    return [one is other for one, other in zip(before, replaced(), strict=True)]


def test_installing_twice_changes_nothing(pool: Pool) -> None:
    assert all(pool.run(1, installed_twice)[0])


def test_a_function_is_wrapped_once_wherever_it_has_been_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that must not be imported is passed over."""
    from megatron.pipeline.patches import compat

    def half(number: float) -> float:
        return number / 2

    def doubled(original: Any, number: float) -> float:
        return 2 * float(original(number))

    half.__module__ = "megatron.core.owner"
    owner, importer, other = (SimpleNamespace(half=half) for _ in range(3))
    for path, module in (("megatron.core.importer", importer), ("megatron.core.forbidden", None), ("another.package", other)):
        monkeypatch.setitem(sys.modules, path, module)  # type: ignore[arg-type]
    compat.wrap(owner, "half", doubled)
    compat.wrap(owner, "half", doubled)
    assert owner.half is importer.half is other.half and owner.half(3) == 3


def inactive_with_a_gpu(found: Connection) -> None:
    """In a process that has not installed the patch, with torch saying that there is a GPU."""
    torch.cuda.is_available = lambda: True
    original = torch.Tensor.cuda, torch.Tensor.type
    from megatron.pipeline.patches import cpu

    cpu.install()
    from megatron.core.optimizer import clip_grads

    found.send([clip_grads.torch is torch, (torch.Tensor.cuda, torch.Tensor.type) == original])


def test_cpu_backend_is_inactive_where_there_is_a_gpu() -> None:
    ours, theirs = Pipe()
    process = forked(inactive_with_a_gpu, theirs)
    assert ours.poll(60) and ours.recv() == [True, True]
    process.join(timeout=60)


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


def auxiliary_losses() -> list[float]:
    """What every pipeline rank logs, of 3 layers and one of multi-token prediction; the first rank has no experts."""
    import torch.distributed
    from megatron.core import parallel_state

    from megatron.pipeline import patches

    patches.install()
    from megatron.core.transformer.moe import moe_utils
    from megatron.pipeline.patches.moe_utils import exchange_auxiliary_losses

    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    exchange_auxiliary_losses()
    if torch.distributed.get_rank() == 1:
        for layer in (3, 4):
            moe_utils.save_to_aux_losses_tracker("load_balancing_loss", torch.ones(()), layer, num_layers=4)
    logged: dict[str, torch.Tensor] = {}
    names = ["load_balancing_loss"]
    sizes: dict[str, Any] = {"num_layers": 3, "moe_layer_freq": [0, 0, 1], "mtp_num_layers": 1}
    moe_utils.track_moe_metrics(1.0, 1, total_loss_dict=logged, force_initialize=True, track_names=names, **sizes)
    exchange_auxiliary_losses()
    return [logged[name].item() for name in names]


def test_ranks_without_experts_add_up_auxiliary_losses_of_further_tokens(pool: Pool) -> None:
    assert pool.run(2, auxiliary_losses) == [[1.0]] * 2
