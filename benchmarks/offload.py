"""What does offloading cost on one device, and what does it save there? One rank's program, replayed with all its passes.

    python benchmarks/offload.py [--schedule gis-h --pp 8 --microbatches 16]    # a GPU: 4096 and 8192 wide, up to 16384 long
    python benchmarks/offload.py --cpu-bandwidth 0.1                            # a CPU: small layers, copies at 0.1 GB/s

Layers are megatron-core's, with torch's fused attention; embedding and output layer are left out. Of a schedule of ``--pp`` ranks
one rank's row runs in our executor, without others: copies have only its own passes to hide behind, and are planned for that at
costs that first iterations measure, as in training (``--offload-profile``). Then every round runs one iteration of each.

Reported are medians of the rounds' times and of their ratios to the same row without offload, then of one recorded iteration: how
fast its copies were, how long passes waited for them, and the peak of memory above what lay there before (of a GPU's allocator,
messages and work space included; on a CPU of what is saved for backward). "Planned" is the peak of the row at the measured bytes.
With CUDA_DEVICE_MAX_CONNECTIONS 1, as tensor parallelism wants it, copies may keep passes waiting. No GPU has run this yet.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import socket
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from common import command_line, in_rounds, print_table, save
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import build_module
from megatron.pipeline.patches import schedules as schedules_patch
from one_device import DEVICE, device_name, one_rank, synchronize, timed

from megatron.pipeline.distributed.device import this_device
from megatron.pipeline.model.split_linear import split_weights
from megatron.pipeline.monitor.cost_profile import measured_costs
from megatron.pipeline.monitor.recorder import NullRecorder, Record, Recorder
from megatron.pipeline.monitor.report import Report
from megatron.pipeline.planner import planning
from megatron.pipeline.planner.schedule.core import cutting
from megatron.pipeline.planner.schedule.core.costs import Costs, uniform
from megatron.pipeline.planner.schedule.core.passes import Kind, Offload, Pass
from megatron.pipeline.planner.schedule.core.placement import Placement, interleaved
from megatron.pipeline.planner.schedule.core.schedule import Schedule
from megatron.pipeline.planner.schedule.lower.lower import lower
from megatron.pipeline.planner.schedule.lower.program import Message, Program, Send
from megatron.pipeline.planner.schedule.time.simulate import activation_peaks
from megatron.pipeline.planner.schedule.transforms.offload import moved, offload
from megatron.pipeline.runtime.executor import Executor
from megatron.pipeline.runtime.model_stages import ModelStages
from megatron.pipeline.runtime.offload import probe
from megatron.pipeline.runtime.offload.offloading import CopySettings, InFlight, Offloading
from megatron.pipeline.runtime.p2p import Tensors, Transport
from megatron.pipeline.runtime.stage_passes import StagePasses
from megatron.pipeline.runtime.wiring import wiring

OFF = "off"
MODES = (OFF, *map(str, Offload))
PROFILED = 3  # iterations that time passes
WARM = 2  # rounds that do not count: host memory is allocated in them

_KIND = SimpleNamespace(model_type=ModelType.encoder_or_decoder)  # of a model, which releases before 0.18 ask for


class Attention(torch.nn.Module):
    """torch's causal attention in place of megatron-core's own, which keeps the scores of all pairs of tokens."""

    def __init__(self, config: TransformerConfig, **_: Any) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """All are [tokens, batch, heads, size]; returns [tokens, batch, heads * size]."""
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return attended.permute(2, 0, 1, 3).flatten(2)


class Chunk(MegatronModule):
    """One transformer layer."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        spec = get_gpt_layer_local_spec()
        spec.submodules.self_attention.submodules.core_attention = Attention
        self.layer = build_module(spec, config=config, layer_number=1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(hidden, attention_mask=None)[0]
        return output


def build(hidden: int, dtype: torch.dtype) -> DistributedDataParallel:
    """A chunk whose weight gradients are accumulated in float32, and may wait for W."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=max(1, hidden // 128),
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=DEVICE == "cpu",
        add_bias_linear=False,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        deallocate_pipeline_outputs=True,
    )
    chunk = Chunk(config)
    split_weights(chunk)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, delay_wgrad_compute=True)
    return DistributedDataParallel(config, ddp, chunk)


class Layers(ModelStages):
    """What passes compute: chunks, between an embedding and a gradient of the output that are always the same."""

    def __init__(self, chunks: list[DistributedDataParallel], placement: Placement, rank: int, hidden: torch.Tensor) -> None:
        self._chunks, self._placement, self._rank = chunks, placement, rank
        self._embedding = hidden.detach().requires_grad_()
        self._gradient = hidden.detach()

    def forward(self, work: Pass, inputs: Tensors, keep_graph: bool) -> Tensors:
        received = self._embedding.clone() if inputs[0] is None else inputs[0]
        with nullcontext() if keep_graph else torch.no_grad():
            outputs: Tensors = [self._chunks[work.chunk](received)]
        if self._is_last(work):
            self.release(outputs)  # to an output layer
        return outputs

    def recompute(self, work: Pass, inputs: Tensors) -> Tensors:
        outputs = self.forward(work, inputs, keep_graph=True)
        if not self._is_last(work):
            self.release(outputs)
        return outputs

    def backward(self, work: Pass, inputs: Tensors, outputs: Tensors, gradients: Tensors) -> Tensors:
        if self._is_last(work):
            gradients = [self._gradient.clone()]  # W may keep it
        chunk = self._chunks[work.chunk]
        return schedules_patch.backward(inputs, outputs, gradients, chunk.config, _KIND)

    def release(self, outputs: Tensors) -> None:
        schedules.deallocate_output_tensor(outputs[0], deallocate_pipeline_outputs=True)


class NoOthers(Transport):
    """Transport to ranks that are not there: every message arrives when it is waited for, in memory of its own."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden.detach()
        self._buffers: dict[Message, torch.Tensor] = {}

    def receive(self, message: Message, peer: int) -> None:
        self._buffers[message] = torch.empty_like(self._hidden)

    def wait(self, message: Message) -> Tensors:
        return [self._buffers.pop(message).copy_(self._hidden).requires_grad_()]

    def send(self, message: Message, peer: int, tensors: Tensors, when_sent: Callable[[], None]) -> None:
        when_sent()

    def start(self) -> None:
        """Nothing is batched."""

    def sweep(self) -> None:
        """Nothing is on its way."""

    def finish(self, message: Message, peer: int) -> None:
        """Nothing is on its way."""

    def unsent(self) -> list[Send]:
        return []


class Replay:
    """One rank of a schedule.

    For plans the rank's row is a schedule of its own: one rank that never waits for another. Its copies are then put into the
    whole schedule, for a program with all messages.

    Args:
        schedule: of all ranks, without copies.
    """

    def __init__(self, schedule: Schedule, rank: int, chunks: list[DistributedDataParallel], hidden: torch.Tensor) -> None:
        self._schedule, self._rank, self._chunks, self._hidden = schedule, rank, chunks, hidden
        self._parameters = [one for chunk in chunks for one in chunk.module.parameters()]
        self._stages = Layers(chunks, schedule.placement, rank, hidden)
        self._programs: dict[str, Program] = {}
        placement = interleaved(1, schedule.placement.chunks)
        self.rows = {OFF: replace(schedule, placement=placement, passes=(schedule.passes[rank],))}
        self._equal = cutting.with_equal_copies(uniform(placement))
        self.use(OFF, self.rows[OFF], self._equal)

    def use(self, mode: str, row: Schedule, costs: Costs) -> None:
        """Run this row from now on where the mode is asked for; the costs are those of its chunks."""
        self.rows[mode] = row
        passes = list(self._schedule.passes)
        passes[self._rank] = row.passes[0]
        whole = replace(self._schedule, passes=tuple(passes))
        alike = replace(costs, stages=costs.stages[:1] * (whole.placement.last_stage + 1))
        self._programs[mode] = lower(whole, alike)[self._rank]

    def run(self, mode: str, offloading: Offloading, recorder: NullRecorder) -> None:
        """One iteration, which on a GPU has not ended yet."""
        program = self._programs[mode]
        offloaded = InFlight(offloading, program, self._parameters)
        handlers = StagePasses(self._stages, program, offloaded=offloaded).handlers
        connected = wiring(program, self._rank, self._schedule.placement)
        executor = Executor(program, connected, handlers, NoOthers(self._hidden), recorder)
        with recorder.observing():
            executor.begin()
            executor.finish()
        recorder.end(offloaded.copies())

    def seconds(self, mode: str, offloading: Offloading) -> float:
        """Of one iteration that nothing measures."""
        self._prepare()
        gc.disable()  # as timeit does
        took, _ = timed(lambda: self.run(mode, offloading, NullRecorder()))
        gc.enable()
        return took

    def record(self, mode: str, offloading: Offloading, count: bool = False) -> Record:
        self._prepare()
        recorder = Recorder(self._parameters, count)
        self.run(mode, offloading, recorder)
        return recorder.record()

    def costs(self, offloading: Offloading) -> Costs:
        """What passes and copies of this row cost, in seconds and bytes, measured as ``replan`` does."""
        self.seconds(OFF, offloading)
        plain = self.rows[OFF]
        timed = [Report((self.record(OFF, offloading),), plain) for _ in range(PROFILED)]
        self.use(Offload.FULL, offload(plain, self._equal, Offload.FULL), self._equal)  # to learn how much of it can move
        counted = Report((self.record(Offload.FULL, offloading, count=True),), self.rows[Offload.FULL])
        copies = probe.measure(offloading, socket.gethostname(), 0, 1)
        return replace(measured_costs(timed, counted), copies=copies)

    def _prepare(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        gc.collect()
        synchronize()


class Found(NamedTuple):
    """Seconds of every round of one mode, the record of one iteration more, and the most bytes of host memory in use in it."""

    seconds: list[float]
    record: Record
    host: int


def measure(replay: Replay, offloading: Offloading, costs: Costs, rounds: int) -> dict[str, Found]:
    """Iterations of all modes, in turn."""
    plain = replay.rows[OFF]
    for offloaded in Offload:
        replay.use(offloaded, offload(plain, costs, offloaded), costs)
    seconds = in_rounds({mode: partial(replay.seconds, mode, offloading) for mode in MODES}, rounds, WARM)
    found = {}
    for mode, times in seconds.items():
        offloading.pool.most_in_use = 0
        record = replay.record(mode, offloading)
        found[mode] = Found(times, record, offloading.pool.most_in_use)
    return found


def speed(record: Record, kind: Kind, costs: Costs) -> str:
    """Bytes moved over the time that copies of a kind were on the way, in GB/s."""
    copies = [copy for copy in record.copies if copy.work.kind is kind]
    took = sum(copy.end - copy.start for copy in copies)
    size = sum(costs.stages[copy.work.chunk].moved() for copy in copies)
    return f"{size / took / 1e9:.3g}" if took else "-"


def report(title: str, replay: Replay, costs: Costs, found: dict[str, Found]) -> None:
    columns = ("offload", "ms", "to off", "moved", "D2H GB/s", "H2D GB/s", "waited ms", "host MiB", "peak MiB", "planned")
    rows = []
    for mode, one in found.items():
        row = replay.rows[mode]
        ratio = statistics.median(mine / plain for mine, plain in zip(one.seconds, found[OFF].seconds, strict=True))
        waited = sum(wait.end - wait.start for wait in one.record.waits if isinstance(wait.message, Pass))
        peak, (planned,) = one.record.peak_activation_bytes, activation_peaks(row, costs)
        cells = [mode, f"{1e3 * statistics.median(one.seconds):.2f}", f"{ratio:.4f}", f"{share_moved(row, costs):.1%}"]
        cells += [speed(one.record, kind, costs) for kind in (Kind.D2H, Kind.H2D)]
        cells += [f"{1e3 * waited:.2f}", *(f"{size / 2**20:.2f}" for size in (one.host, peak, planned))]
        rows.append([*cells, f"{100 * (peak / planned - 1):+.2f}%"])
    print_table(title, [*columns, "apart"], rows, width=150)


def share_moved(row: Schedule, costs: Costs) -> float:
    """Of all that forwards of a row allocate."""
    return moved(row, costs)[0] / (row.microbatches * sum(stage.activation for stage in costs.stages))


def words(costs: Costs) -> str:
    """What was measured before; with k above 1 passes are too short to hide all copies."""
    stage, copies = costs.stages[0], costs.copies
    passes = "/".join(f"{1e3 * seconds:.2f}" for seconds in (stage.forward, stage.backward, stage.weight))
    gigabytes = " and ".join(f"{probe.MARGIN / seconds / 1e9:.3g}" for seconds in (copies.to_host, copies.to_device))
    return (
        f"k = {costs.k():.2f}: F/B/W of a chunk {passes} ms; F keeps {stage.activation / 2**20:.1f} MiB, of which "
        f"{stage.moved() / 2**20:.1f} can move, and {stage.retained / 2**20:.1f} are kept until W; copies alone {gigabytes} GB/s "
        f"to host memory and back, {copies.both:.0%} of that in both directions at once, planned as a tenth slower"
    )


def main() -> None:
    cuda = DEVICE == "cuda"
    parser = command_line(__doc__)
    parser.add_argument("--hidden", type=int, nargs="+", default=[4096, 8192] if cuda else [256])
    parser.add_argument("--seq", type=int, nargs="+", default=[4096, 8192, 16384] if cuda else [256])
    parser.add_argument("--schedule", default="interleaved")
    parser.add_argument("--pp", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rank", type=int, default=0, help="of --pp, the one whose program runs")
    parser.add_argument("--iterations", type=int, default=10, help="of each mode, that count")
    parser.add_argument("--cpu-bandwidth", type=float, default=1.0, metavar="GB/S", help="of each direction of a CPU's streams")
    parser.add_argument("--save", metavar="FILE", help="append the seconds of every round, as JSON")
    options = parser.parse_args()
    if not 0 <= options.rank < options.pp:
        parser.error(f"--rank {options.rank} is none of --pp {options.pp} ranks, which count from 0")
    schedule = planning.plan(options.schedule, options.pp, options.microbatches)
    if schedule.splits > 1:
        parser.error(f"{options.schedule} cuts microbatches into slices: take another schedule")

    if cuda:
        torch.cuda.set_device(0)
    one_rank()
    for hidden, seq in itertools.product(options.hidden, options.seq):
        # One after another: nothing of a configuration is left when the next one begins.
        configuration(schedule, hidden, seq, options)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
    torch.distributed.destroy_process_group()


def configuration(schedule: Schedule, hidden: int, seq: int, options: argparse.Namespace) -> None:
    """Measure one size of layers, and print what was found."""
    device, dtype = this_device(), torch.float32 if DEVICE == "cpu" else torch.bfloat16
    chunks = [build(hidden, dtype).to(device) for _ in range(schedule.placement.chunks)]
    message = torch.randn(seq, 1, hidden, device=device).to(dtype)
    offloading = Offloading(CopySettings(bandwidth=options.cpu_bandwidth * 1e9 if DEVICE == "cpu" else None), device)
    replay = Replay(schedule, options.rank, chunks, message)
    costs = replay.costs(offloading)
    found = measure(replay, offloading, costs, options.iterations)
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "not set")
    more = f"load {os.getloadavg()[0]:.1f}" if DEVICE == "cpu" else f"CUDA_DEVICE_MAX_CONNECTIONS {queues}"
    title = (
        f"hidden {hidden}, {seq} tokens, a layer a chunk, {str(dtype).removeprefix('torch.')}; rank "
        f"{options.rank} of {schedule.name} on {schedule.ranks} ranks with {schedule.placement.chunks} chunks, "
        f"{schedule.microbatches} microbatches;\n{device_name()}, {more}, median of {options.iterations} iterations"
    )
    save(options.save, f"Offload, {title.replace(chr(10), chr(32))}", {mode: one.seconds for mode, one in found.items()})
    report(title, replay, costs, found)
    print(words(costs))


if __name__ == "__main__":
    main()
