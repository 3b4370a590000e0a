"""All that megatron-core's own schedules call, ours do too, do in another way, or refuse: the list of all those calls.

A call that is new in a release fails here until somebody has read what it is for.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_gpt
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from pool import Pool

_CORE = "megatron.core"
_OURS = "Iteration calls it, too"
_PARTS = "upstream's forward_step and backward_step, which ModelStages calls"
_GROUPS = "Call.groups"
_ORDER = "the order of upstream's schedules: our passes are in the program's"
_MESSAGES = "Transport sends and receives as the program says"
_PLANS = "LayerPlanStages runs the same layer plans, in the program's order"
_REFUSED = "refused by combinations/rows.py"

# By what is called in the three functions forward_backward_*, without their own functions, and methods of lists and handles.
DUTIES = {
    "backward_step": _PARTS,
    "backward_step_multimodule": "refused by Call.check: several modules in one pipeline",
    "forward_step": _PARTS,
    "check_first_val_step": "ModelStages",
    "clear_embedding_activation_buffer": _OURS,
    "combined_1f1b_schedule_for_interleaved_pipelining": _PLANS,
    "combined_1f1b_schedule_for_no_pipelining": _PLANS,
    "config.finalize_model_grads_func": _OURS,
    "config.grad_sync_func": f"{_OURS}; ours are per chunk",
    "config.no_sync_func": "GradientSync",
    "config.param_sync_func": "Iteration asks for all chunks' parameters before the first pass",
    "config.timers": _OURS,
    "create_cudagraphs": f"{_OURS}, by slot",
    "deallocate_output_tensor": "ModelStages.release",
    "finish_embedding_wgrad_compute": _OURS,
    "get_model_config": "Call.config",
    "get_model_type": "patches/schedules.py backward, for releases that ask for it",
    "get_pp_rank_microbatches": _ORDER,
    "get_schedule_table": _ORDER,
    "get_tensor_shapes": "Call.shapes",
    "hybrid_context_parallel_forward_backward": f"{_REFUSED}: hybrid_context_parallel",
    "is_pp_first_stage": _ORDER,
    "is_pp_last_stage": _ORDER,
    "is_vp_first_stage": _ORDER,
    "is_vp_last_stage": _ORDER,
    "model_chunk.synchronize_param_gather": f"{_REFUSED}: FSDP, of which it is a duty",
    "nvtx_range_pop": "marks for a profiler: the executor sets its own",
    "nvtx_range_push": "marks for a profiler: the executor sets its own",
    "_reset_activation_offload": f"{_REFUSED}: fine_grained_activation_offloading",  # in a function of its own after 0.19
    "off_interface.reset": f"{_REFUSED}: fine_grained_activation_offloading",
    "paged_stash_reset": f"{_REFUSED}: moe_paged_stash",
    "pg_collection.cp.size": _GROUPS,
    "pg_collection.get_language_model_cp_size": "refused by Call.check: several modules in one pipeline",
    "pg_collection.has_language_model": "refused by Call.check: several modules in one pipeline",
    "grad_finalize_pgs.cp.size": _GROUPS,
    "GradFinalizeProcessGroups": _GROUPS,
    "P2PCommunicator": _MESSAGES,
    "ProcessGroupCollection": _GROUPS,
    "_build_default_pg_collection": _GROUPS,
    "parallel_state.get_context_parallel_group": _GROUPS,
    "parallel_state.get_data_parallel_group": _GROUPS,
    "parallel_state.get_embedding_group": _GROUPS,
    "parallel_state.get_pipeline_model_parallel_group": _GROUPS,
    "parallel_state.get_position_embedding_group": _GROUPS,
    "parallel_state.get_tensor_and_data_parallel_group": _GROUPS,
    "parallel_state.get_tensor_model_parallel_group": _GROUPS,
    "partial": "a function with arguments, nothing that it does itself",
    "contextlib.ExitStack": "GradientSync",
    "torch.zeros": "the number of tokens: ModelStages",
}


def calls(source: str) -> set[str]:
    """What the three schedules of a file call that is imported, defined in the file, of the configuration or of a group."""
    tree = ast.parse(source)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    known = {"config", "model_chunk", "pg_collection", "grad_finalize_pgs"} | functions
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    schedules = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("forward_backward_")]
    assert len(schedules) == 3
    return {name for schedule in schedules for name in _calls_in(schedule, functions) if name.partition(".")[0] in known}


def _calls_in(schedule: ast.FunctionDef, functions: set[str]) -> Iterator[str]:
    renamed = {"model_chunk_no_sync_func": "config.no_sync_func", "no_sync_func": "config.no_sync_func"}
    for node in ast.walk(schedule):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func).partition("[")[0].partition("(")[0]
            yield renamed.get(name, name)
        elif isinstance(node, ast.Assign):  # a function that is chosen first, and called by another name
            yield from functions & {part.id for part in ast.walk(node.value) if isinstance(part, ast.Name)}


def installed() -> Path:
    found = importlib.util.find_spec(_CORE)
    assert found is not None and found.submodule_search_locations
    [folder] = found.submodule_search_locations
    return Path(folder) / "pipeline_parallel" / "schedules.py"


def test_every_call_of_upstreams_schedules_has_an_answer() -> None:
    unknown = calls(installed().read_text()) - DUTIES.keys()
    assert not unknown, "read what upstream does there; then do it, or refuse it, and add it to DUTIES"


def test_a_new_call_is_found() -> None:
    timed = "if config.timers is not None:"
    source = installed().read_text().replace(timed, f"{timed} stash.reset()\n    {timed}")
    assert calls(f"import stash\n{source}") - DUTIES.keys() == {"stash.reset"}


def refused(duty: str) -> str:
    """What an iteration says for a setting, or for groups of several modules."""
    run = tiny_gpt.Run("zb-h1", pp=1)
    options: dict[str, Any] = {}
    if duty == "several modules":
        from megatron.pipeline.runtime import call

        class Several:
            pass

        call._SEVERAL_MODULES = Several  # as the class that 0.17 and later have
        options = {"pg_collection": Several(), "p2p_communicator": object.__new__(P2PCommunicator)}
    else:
        setattr(run.config, duty, True)
    with pytest.raises(ValueError, match="schedule") as error:
        run.step(0, **options)
    return str(error.value)


@pytest.mark.parametrize(
    ("duty", "message"),
    [
        ("moe_paged_stash", "--moe-paged-stash relies on the order of megatron-core's own schedules"),
        ("fine_grained_activation_offloading", "--offload full moves activations as the schedule says"),
        ("several modules", "several modules in one pipeline"),
    ],
)
def test_what_ours_do_not_do_is_refused_by_its_name(duty: str, message: str, pool: Pool) -> None:
    assert message in pool.run(1, refused, duty)[0]
