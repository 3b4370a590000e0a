"""Stands for pretrain_gpt.py of 0.19, which parses flags itself and trains a model that is built from a configuration."""

from types import SimpleNamespace

from megatron.training import pretrain
from megatron.training.arguments import core_transformer_config_from_args, parse_and_validate_args

from pretrain_gpt import datasets_provider, forward_step, model_provider, same_weights_everywhere


def build_model(pg_collection, pre_process=None, post_process=None, vp_stage=None):
    assert pg_collection == "groups"
    return model_provider(pre_process, post_process, vp_stage)


if __name__ == "__main__":
    args = parse_and_validate_args()
    container = SimpleNamespace(transformer=core_transformer_config_from_args(args), build_model=build_model)
    pretrain(datasets_provider, None, forward_step, same_weights_everywhere, container)
