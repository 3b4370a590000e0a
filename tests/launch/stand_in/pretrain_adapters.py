"""Stands for a script that trains adapters beside the linears of frozen layers, or with ``LAYERS=whole`` the last ones."""

import os

import lora
from megatron.training import pretrain

import pretrain_gpt


def model_provider(*given, **options):
    model = pretrain_gpt.model_provider(*given, **options)
    if os.environ.get("LAYERS") != "whole":
        lora.adapt([model])
        return model
    model.requires_grad_(False)
    for layer in model.decoder.layers:
        layer.requires_grad_(layer.layer_number > 4)
    return model


if __name__ == "__main__":
    pretrain(pretrain_gpt.datasets_provider, model_provider, pretrain_gpt.forward_step, pretrain_gpt.same_weights_everywhere)
