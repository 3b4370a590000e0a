"""``mpipe support``: what its table says is what happens."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from megatron.pipeline import cli
from megatron.pipeline.cli.support import markdown
from megatron.pipeline.flags.arguments import parse
from megatron.pipeline.flags.flags import actions, neutral
from megatron.pipeline.flags.settings import Role
from megatron.pipeline.flags.support import FEATURES, Feature, Support, check_trained, of_flag, untested
from megatron.pipeline.planner.combinations.rows import EXCLUDED
from megatron.pipeline.planner.combinations.table import Facts

PAGE = Path(__file__).parents[2] / "docs" / "support.md"


def on(feature: Feature) -> Namespace:
    """Flags with a feature switched on."""
    name, values = next(iter(feature.names.items()))
    return Namespace(**{name: next(iter(values), 2)})


class Counted:
    """A setting's value that counts with how many others it is compared."""

    def __init__(self) -> None:
        self.times = 0

    def __eq__(self, other: object) -> bool:
        self.times += 1
        return False

    __hash__ = None  # type: ignore[assignment]


def test_a_value_that_is_no_number_is_compared_with_few() -> None:
    """A range compares it with each of its numbers: every launch once took 0.1 s for a million of them."""
    value = Counted()
    for feature in FEATURES:
        feature.is_on(Namespace(**dict.fromkeys(feature.names, value)))
    assert value.times < 1000


def ids(feature: Feature) -> str:
    return feature.title


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.names], ids=ids)
def test_a_feature_is_refused_warned_of_or_silent_in_a_launch(feature: Feature) -> None:
    args = on(feature)
    assert (feature in untested(args)) == (feature.launch is Support.UNTESTED)
    assert bool(Facts(vars(args), ours=True).sentences(EXCLUDED)) == (feature.launch is Support.REFUSED)


@pytest.mark.parametrize("name", [row.name for row in EXCLUDED])
def test_every_setting_that_is_refused_has_a_row(name: str) -> None:
    of_a_feature = {known for feature in FEATURES for known in feature.names}
    without = {  # details of a schedule of upstream's, no features
        "mlp_chunks_for_training",
        "overlap_param_gather_with_optimizer_step", "overlap_dispatch_backward_with_experts_wgrad",
        "overlap_p2p_comm_warmup_flush",
        "reuse_grad_buf_for_mxfp8_param_ag",  # of FP8
        "gtp_weight_remat_size", "expert_gtp_weight_remat_size",  # upstream computes these from flags
    }  # fmt: skip
    assert (name in of_a_feature) != (name in without)


@pytest.mark.parametrize(
    ("given", "title"),
    [
        ({"te_precision_config_file": "recipe.yaml"}, "FP8"),
        ({"kitchen_recipe_number": 1}, "FP8"),
        ({"moe_token_dispatcher_type": "flex"}, "tokens to experts by DeepEP or HybridEP"),
        ({"heterogeneous_layers_config_encoded_json": "{}"}, "layers of different shapes"),
        ({"softmax_type": "learnable"}, "attention sinks"),
    ],
)
def test_every_flag_that_switches_an_untested_feature_on_is_warned_of(given: dict[str, object], title: str) -> None:
    assert [feature.title for feature in untested(Namespace(**given))] == [title]


@pytest.mark.parametrize(
    "given",
    [
        {"moe_token_dispatcher_type": "alltoall"},
        {"kitchen_recipe_number": None},
        # What Megatron-LM's parser leaves without any flag.
        {"kv_lora_rank": 32, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128, "multi_latent_attention": False},
    ],
)
def test_values_that_switch_nothing_on_are_silent(given: dict[str, object]) -> None:
    assert untested(Namespace(**given)) == []


@pytest.mark.parametrize(
    ("flag", "title"),
    [
        ("fp8-format", "FP8"),
        ("fp8_recipe", "FP8"),
        ("fp8-output-proj", "output layer in FP8"),
        ("sft", "packed sequences (--sft)"),
        ("kv-lora-rank", "multi-latent attention"),
        ("optimizer-cpu-offload", "optimizer in host memory"),
        ("optimizer-offload-fraction", "optimizer in host memory"),
        ("cpu-offloading-num-layers", "activations in host memory, by layer"),
        ("num-layers", None),
    ],
)
def test_the_feature_of_a_flag(flag: str, title: str | None) -> None:
    feature = of_flag(flag)
    assert (feature and feature.title) == title


@pytest.mark.parametrize("feature", [one for one in FEATURES if one.names], ids=ids)
def test_pretrain_gpt_has_flags_for_what_it_supports_alone(feature: Feature) -> None:
    flags = actions()
    name, values = next(iter(feature.names.items()))
    choices = flags[name].choices if name in flags else None
    has = name in flags and (choices is None or not values or any(value in choices for value in values))
    predicted = name in neutral(Role.PREDICTED) or name == "moe_token_dispatcher_type"  # whose flex check_trained refuses
    assert has == (feature.trainer is not Support.REFUSED or predicted)


@pytest.mark.parametrize("name", neutral(Role.PREDICTED))
def test_training_refuses_what_is_predicted_alone(name: str) -> None:
    args = parse([])
    check_trained(args)
    args |= {name: 65}
    flag = actions()[name].option_strings[0]
    feature = of_flag(flag[2:])
    assert feature is not None
    refused = feature.launch is Support.REFUSED
    how = "does not work with our schedules" if refused else "is not in this project's pretrain_gpt.py: mpipe launch"
    with pytest.raises(ValueError, match=f"{flag} .*{how}"):
        check_trained(args)


def test_the_page_has_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support", "--markdown"]) == 0
    assert capsys.readouterr().out.strip() == markdown()
    features, _, combinations = markdown().partition("\n\n")
    assert features in PAGE.read_text() and combinations.startswith("These do not go together")
    for table in (features, combinations):
        assert len({line.replace("\\|", "").count("|") for line in table.splitlines() if line.startswith("|")}) == 1


def test_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["support"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["feature", "pretrain_gpt.py", "mpipe", "launch"]
    assert any(line.startswith("FP8 ") and "refused" in line and "untested" in line for line in lines)


def test_the_page_has_a_column_for_every_release_that_ci_runs() -> None:
    check_core_versions = pytest.importorskip("check_core_versions", reason="it needs pybind11")
    header = f"| | {' | '.join(check_core_versions.RELEASES)} |"
    assert header in PAGE.read_text()
