"""Stands for a script of Megatron-LM's that trains another model, such as pretrain_mamba.py."""

from megatron.core.transformer.module import MegatronModule
from megatron.training import get_args, pretrain
from megatron.training.arguments import core_transformer_config_from_args


class OtherModel(MegatronModule):
    """It decides by itself which layers a rank has."""


def model_provider(pre_process=True, post_process=True, vp_stage=None):
    return OtherModel(core_transformer_config_from_args(get_args()))


if __name__ == "__main__":
    pretrain(None, model_provider, None)
