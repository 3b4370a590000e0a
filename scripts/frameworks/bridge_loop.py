"""Megatron Bridge's ``pretrain`` and ``finetune`` under a schedule: a tiny model of transformers, on this rank's part of 4 ranks.

``bridge_loop.py ENGINE SCHEDULE,PIPELINE_RANKS,[WHAT] ..``. The configuration is that of Megatron Bridge's recipes with a small
model, in float32. Without WHAT ``pretrain`` trains on mock data, with more microbatches from step to step. Else ``finetune``
trains on lines of text, from the weights of transformers: ``lora``, ``dora`` and ``canonical`` are adapters, which are saved
alone; a second start takes what the schedule before has saved, and exports weights with adapters merged. With ``weights`` (of a
Llama), ``tied`` (its output layer is tied to the embedding) and ``experts`` (of a Qwen3-MoE) all weights train; exported before
the first step, they must be what the checkpoint has. The folder ENGINE has Transformer Engine's own Python, whose kernels are the
stand-in's of the tests. What needs a GPU is replaced by ``patches/cpu.py`` and ``patches/training_cpu.py``.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import borders
import torch
from torch.distributed.checkpoint import FileSystemReader

VOCABULARY, LENGTH, STEPS = 128, 48, 4
GROWS = "0:4 4:6 10:8"  # samples of a batch, by samples that have been
ADAPTERS = {"lora": "lora.LoRA", "dora": "dora.DoRA", "canonical": "canonical_lora.CanonicalLoRA"}
ON_A_V = ("zb-v", "v-half")
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
FUSIONS = ("masked_softmax", "bias_activation", "bias_dropout", "apply_rope", "moe_permute")  # of Transformer Engine and apex
_kept: list[tempfile.TemporaryDirectory[str]] = []  # until the process ends
_saved: list[Path] = []  # by the last schedule that has trained adapters


def _module(name: str) -> Any:
    return importlib.import_module(f"megatron.bridge.{name}")


@functools.cache
def prepared() -> Path:
    """The folder with models, texts and checkpoints, as Megatron Bridge's modules are ready for a CPU."""
    sys.meta_path.append(borders.Absent(["nvidia_resiliency_ext"]))  # megatron-core has asked for its number
    recipes: Any = types.ModuleType("megatron.bridge.recipes")  # which would import the recipes of all models
    recipes.__path__ = [str(Path(_module("training").__file__).parents[1] / "recipes")]
    sys.modules[recipes.__name__] = recipes
    for name in ("finetune", "gpt_step", "callbacks", "comm_overlap"):
        _module(f"training.{name}")
    for name in ("train", "eval"):  # of a teacher and a student
        _module(f"training.{name}").get_tensor_shapes_adjust_fn_for_distillation = lambda *_, **__: None
    _module("training.initialize").compile_helpers = lambda: None
    setup = _module("training.setup")
    apply = setup._apply_peft_transformation
    setup._apply_peft_transformation = lambda *given: borders.draw(apply(*given))
    borders.see_the_cpu("megatron.bridge")
    _module("training.train").torch.cuda.is_available = lambda: True
    _kept.append(tempfile.TemporaryDirectory())
    folder = [_kept[0].name]
    torch.distributed.broadcast_object_list(folder)
    if not torch.distributed.get_rank():
        _write(Path(folder[0]))
    torch.distributed.barrier()
    return Path(folder[0])


def _write(folder: Path) -> None:
    """Write models of transformers with random weights, each with a tokenizer of words, and lines of words."""
    import transformers  # type: ignore[import-not-found]
    from tokenizers import Tokenizer, models, pre_tokenizers  # type: ignore[import-not-found]

    torch.manual_seed(11)
    words = [f"w{number}" for number in range(VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(VOCABULARY), strict=True)), unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("unk_token", "bos_token", "eos_token", "pad_token"), words, strict=False))
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    tied: dict[str, Any] = {"tie_word_embeddings": True}
    for name, family, own in (("weights", "Llama", {}), ("tied", "Llama", tied), ("experts", "Qwen3Moe", experts)):
        kind = f"{family}ForCausalLM"
        config = getattr(transformers, f"{family}Config")(**SIZES, vocab_size=VOCABULARY, architectures=[kind], **own)
        getattr(transformers, kind)(config).save_pretrained(folder / name)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / name)
    for name in ("training", "validation"):
        lines = [torch.randint(4, VOCABULARY, (2, 4 + 6 * (line // 8) + line % 3)).tolist() for line in range(8 * STEPS)]
        texts = [[" ".join(words[token] for token in half) for half in line] for line in lines]
        written = [json.dumps({"input": asked, "output": said}) for asked, said in texts]
        (folder / f"{name}.jsonl").write_text("\n".join(written) + "\n")


def configured(row: borders.Row, folder: Path) -> Any:
    """The configuration of the recipes, for this model and row."""
    recipe = "peft" if row.trains in ADAPTERS else "sft" if row.trains else "pretrain"
    config = getattr(_module("recipes.common"), f"_{recipe}_common")()
    theirs = str(folder / (row.trains if recipe == "sft" else "weights"))
    model = config.model = _module("models").AutoBridge.from_hf_pretrained(theirs).to_megatron_provider(load_weights=False)
    model.pipeline_model_parallel_size, model.seq_length = row.ranks, LENGTH
    model.virtual_pipeline_model_parallel_size = 2 if row.schedule in ON_A_V else None
    model.pipeline_dtype = model.params_dtype = torch.float32
    model.use_cpu_initialization = True
    for name in ("gradient_accumulation", *FUSIONS):
        setattr(model, f"{name}_fusion", False)
    for each in (model, config.optimizer):
        each.bf16 = each.fp16 = model.moe_grouped_gemm = False
    config.mixed_precision = config.logger.tensorboard_dir = config.checkpoint.load = config.checkpoint.save = None
    config.optimizer.lr, config.optimizer.clip_grad = 1e-2, 0.0
    config.scheduler.lr_warmup_iters, config.scheduler.lr_decay_iters = 0, STEPS
    config.train.train_iters, config.train.global_batch_size, config.train.micro_batch_size = STEPS, 8, 1
    config.validation.eval_interval, config.validation.eval_iters = 3, 1
    config.tokenizer.tokenizer_model = theirs
    config.ddp.average_in_collective = False  # gloo cannot
    config.ddp.use_distributed_optimizer = True
    config.comm_overlap = _module("training.comm_overlap").CommOverlapConfig(tp_comm_overlap=False)
    if row.trains:
        config.dataset.dataset_root, config.dataset.hf_dataset, config.dataset.hf_validation_proportion = folder, None, None
        config.dataset.enable_offline_packing, config.dataset.offline_packing_specs = False, None
        config.dataset.dataset_kwargs, config.checkpoint.pretrained_checkpoint = None, theirs
    else:
        model.register_pre_wrap_hook(borders.draw)
    config.dataset.seq_length, config.dataset.num_workers = LENGTH, 0
    if row.trains in ADAPTERS:
        file, name = ADAPTERS[row.trains].split(".")
        config.peft = getattr(_module(f"peft.{file}"), name)(dim=4, alpha=4)
        config.checkpoint.dist_ckpt_optim_fully_reshardable = True
    return config


class Notes:
    """What one start of Megatron Bridge shows to its callbacks.

    Attributes:
        numbers: of every step and evaluation the loss, where it is known, and the norm.
        microbatches: of every step.
    """

    def __init__(self, loop: Any, row: borders.Row, bridge: Any) -> None:
        self.numbers: list[Any] = []
        self.microbatches: list[int] = []
        self._loop, self._row, self._bridge = loop, row, bridge

    def callbacks(self) -> Any:
        """A manager that calls this object's functions, by their names."""
        manager = _module("training.callbacks").CallbackManager()
        for name in ("on_train_start", "on_train_step_end", "on_eval_end", "on_train_end"):
            manager.register(name, getattr(self, name))
        return manager

    def on_train_start(self, context: Any) -> None:
        """Compare exported weights with the checkpoint's, if those are what trains."""
        from safetensors.torch import load_file  # type: ignore[import-not-found]

        if self._row.trains in ("", *ADAPTERS):
            return
        theirs, exported = load_file(prepared() / self._row.trains / "model.safetensors"), self._exported(context)
        differ = [name for name, weight in theirs.items() if name not in exported or not torch.equal(exported[name], weight)]
        if differ or exported.keys() != theirs.keys():
            raise ValueError(f"Error: {len(differ)} of {len(theirs)} weights have not come back, {differ[:3]} among them")

    def on_train_step_end(self, context: Any) -> None:
        from megatron.core.num_microbatches_calculator import get_num_microbatches

        self.microbatches.append(get_num_microbatches())
        self.numbers.append(([float(loss) for loss in context.loss_dict.values()], float(context.grad_norm)))

    def on_eval_end(self, context: Any) -> None:
        self.numbers.append(([float(loss) for loss in context.total_loss_dict.values()], 0.0))

    def on_train_end(self, context: Any) -> None:
        """Note the sum of all weights as they are exported, adapters merged, and report."""
        total = hashlib.sha256()
        for _, weight in sorted(self._exported(context).items()):
            total.update(weight.numpy().tobytes())
        self.numbers.append((total.hexdigest(), 0.0))
        steps = f"{', '.join(map(str, self.microbatches))} x {'16 to ' * bool(self._row.trains)}{LENGTH}"
        if context.state.train_state.step == STEPS:
            borders.report(self._loop, self.microbatches[-1], steps, self.numbers)

    def _exported(self, context: Any) -> dict[str, torch.Tensor]:
        return dict(self._bridge.export_hf_weights(context.model, cpu=True, show_progress=False))


def main(row: borders.Row) -> None:
    """Start Megatron Bridge, twice with adapters."""
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator

    from megatron.pipeline import install

    folder = prepared()
    loop = install(row.schedule)
    config = configured(row, folder)
    notes = Notes(loop, row, _module("models").AutoBridge.from_hf_pretrained(config.tokenizer.tokenizer_model))
    start = _module("training.finetune").finetune if row.trains else _module("training.pretrain").pretrain
    _module("training.initialize").init_num_microbatches_calculator = functools.partial(
        init_num_microbatches_calculator, step_batch_size_schedule=None if row.trains else GROWS
    )
    if row.trains in ADAPTERS:
        config.train.train_iters, saved = STEPS // 2, folder / "-".join(map(str, row))
        config.checkpoint.save = saved
        start(config, _module("training.gpt_step").forward_step, notes.callbacks())
        names = FileSystemReader(saved / f"iter_{STEPS // 2:07}").read_metadata().state_dict_metadata
        if base := [name for name in names if name.endswith("weight") and "adapter" not in name]:
            raise ValueError(f"Error: {len(base)} weights are saved beside adapters, {base[:3]} among them")
        config = configured(row, folder)
        config.checkpoint.load = saved if row.schedule == "stock" else _saved[0]
        _saved[:] = [saved]
        _module("training.utils.checkpoint_utils").read_train_state.cache_clear()  # what is kept there has trained on
    start(config, _module("training.gpt_step").forward_step, notes.callbacks())


if __name__ == "__main__":
    borders.train(borders.start(__doc__, "modelopt", "datasets", "megatron.energon", "diffusers"), main)
