"""Speeds of a GPU: products, memory and links; one JSON file for each kind, shipped or measured.

The files in ``devices/`` have what makers publish, and one efficiency that is fitted to published trainings. Those that
``mpipe tune --gpu-from`` writes have an efficiency, and shares of F, B and W, that a short run measured (``origin.measured``).
"""

from __future__ import annotations

import difflib
import json
import math
import re
from dataclasses import MISSING, asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from megatron.pipeline.planner.schedule.core.reading import NamedErrors, parse_json, read_text
from megatron.pipeline.planner.shape.gpt import Work

MIB = 2**20
NOT_FITTED = "not fitted"
_SERVER = 8
_MOST = 1e100  # of any number in a file
_LESSER = {"D", "Laptop", "Max"}  # of names of GPUs: slower ones of another's name
_SHIPPED = Path(__file__).parent / "devices"


@dataclass(frozen=True)
class Link:
    """The way between GPUs.

    Attributes:
        latency: seconds that a message takes, however short.
        bandwidth: bytes per second that each GPU of a node gets in one direction, while all of them use the link.
    """

    latency: float
    bandwidth: float

    def seconds(self, size: float) -> float:
        """Seconds of one message of ``size`` bytes."""
        return self.latency + size / self.bandwidth if size else 0.0

    def all_gather(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the parts of all, or, in a reduce-scatter, its part of the sum of all: a ring.

        Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", section 4.1.

        Args:
            size: bytes of all parts together.
        """
        return (ranks - 1) * (self.latency + size / ranks / self.bandwidth) if size else 0.0

    def all_reduce(self, size: float, ranks: int) -> float:
        """Seconds until every rank has the sum: a reduce-scatter and an all-gather."""
        return 2 * self.all_gather(size, ranks)


@dataclass(frozen=True)
class Precision:
    """Products in fewer than 16 bits.

    Attributes:
        name: ``fp8``, ``mxfp8`` or ``nvfp4``: ``shape.precision.RECIPES``.
        peak: operations per second, without sparsity.
        efficiency: the share of ``peak`` that linears reach in a training.
        fitted_to: trainings that the efficiency is fitted to, in words, or ``NOT_FITTED``.
        lent: the GPU whose efficiency it is, where none is fitted.
    """

    name: str
    peak: float
    efficiency: float
    fitted_to: str = NOT_FITTED
    lent: str = ""


@dataclass(frozen=True)
class Device:
    """A kind of GPU, and what connects several.

    Attributes:
        name: for people.
        memory: bytes of it.
        peak: operations per second in 16 bits.
        efficiency: the share of ``peak`` that wide products reach in a training.
        bandwidth: bytes per second of its memory.
        moved: the share of ``bandwidth`` that kernels reach in a training.
        latency: seconds that a pass takes to begin and to end.
        within: between all GPUs of a node, for collectives.
        hop: between two GPUs of a node, for the messages of neighbouring stages.
        between: between nodes, each GPU's share.
        to_host, to_device: bytes per second to host memory and from there, of one direction with nothing else on the way.
        beside_communication: how many times as long kernels take while a collective or an all-to-all runs; 1: not known.
        workspaces: bytes that libraries of products keep for themselves: cuBLAS and Transformer Engine.
        grouped_workspaces: the same where experts are products of groups.
        loss_copies: copies of the logits in float32 that megatron-core's fused cross entropy makes beside what it keeps.
        transposes: whether products in FP8 whose tensors have one scale each need the weights' transposes, too (Transformer
            Engine's ``is_non_tn_fp8_gemm_supported``).
        per_node: GPUs that ``within`` connects: of a server, or of a rack.
        per_host: GPUs of a host, of which a rack has several.
        fitted_to: trainings that the efficiency is fitted to, in words, or ``NOT_FITTED``.
        lent: the GPU whose efficiency it is, where none is fitted or measured.
        attention: operations of attention, those that a mask hides too, over ``peak``.
        precisions: products in fewer than 16 bits.
        forward, backward, weight: how many times as long these passes of a layer take as by the formulas; 1: not measured.
        source: where the figures are from.

    Raises:
        ValueError: a number is out of range.
    """

    name: str
    memory: float
    peak: float
    efficiency: float
    bandwidth: float
    latency: float
    within: Link
    hop: Link
    between: Link
    to_host: float
    to_device: float
    beside_communication: float = 1.0
    workspaces: float = 110 * MIB
    grouped_workspaces: float = 230 * MIB
    loss_copies: int = 1
    transposes: bool = True
    per_node: int = 8
    per_host: int = 8
    fitted_to: str = NOT_FITTED
    lent: str = ""
    moved: float = 0.7
    attention: float = 0.7
    precisions: tuple[Precision, ...] = ()
    forward: float = 1.0
    backward: float = 1.0
    weight: float = 1.0
    source: str = ""

    def __post_init__(self) -> None:
        if not (self.name.isascii() and self.name.isprintable() and 0 < len(self.name) <= 80):
            raise ValueError(f"the name of a device must be up to 80 printable characters of ASCII, got {self.name!r}")
        for name in ("memory", "bandwidth", "to_host", "to_device"):
            _positive(f"the {name} of a device", getattr(self, name))
        products: tuple[Device | Precision, ...] = (self, *self.precisions)
        for one in products:
            whose = "a device" if one is self else f"products in {one.name}"
            _positive(f"the peak of {whose}", one.peak)
            if not 0 < one.efficiency <= 1:
                raise ValueError(f"the efficiency of {whose} is a share above 0 and of at most 1, got {one.efficiency:g}")
        for name in ("attention", "moved"):
            _positive(f"the {name} of a device", getattr(self, name))
        for name in ("per_node", "per_host"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a device must be GPUs, 1 or more, got {getattr(self, name)}")
        if not 1 <= self.beside_communication < math.inf:
            given = f"{self.beside_communication:g}"
            raise ValueError(f"the beside_communication of a device must be a number of at least 1, got {given}")
        for name in ("workspaces", "grouped_workspaces"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"the {name} of a device must be bytes, 0 or more, got {getattr(self, name):g}")
        for name in ("within", "hop", "between"):
            link = getattr(self, name)
            _positive(f"the bandwidth of {name}", link.bandwidth)
            _moment(f"the latency of {name}", link.latency)
        _moment("the latency of a device", self.latency)
        for name, times in self.times._asdict().items():
            _positive(f"the {name} of a device", times)

    @property
    def times(self) -> Work:
        """Factors by which F, B and W of a layer take longer than by the formulas."""
        return Work(self.forward, self.backward, self.weight)

    @property
    def is_measured(self) -> bool:
        """Tell whether these are of a run."""
        return self.times != (1.0, 1.0, 1.0)

    def products(self, precision: str = "") -> Device | Precision:
        """Peak and efficiency of products in a precision, by default in 16 bits.

        Raises:
            ValueError: the GPU has no such products.
        """
        if not precision:
            return self
        found = next((one for one in self.precisions if one.name == precision), None)
        if found is None:
            known = ", ".join(one.name for one in self.precisions) or "none but 16 bits"
            raise ValueError(f"{self.name} has no products in {precision}; its file has {known}: change the recipe or the GPU")
        return found

    def seconds(self, operations: float, precision: str = "") -> float:
        """Seconds of products; raises ``ValueError`` as ``products`` does."""
        products = self.products(precision)
        return operations / (products.peak * products.efficiency)

    def moving(self, size: float) -> float:
        """Seconds in which kernels read and write ``size`` bytes of its memory."""
        return size / (self.bandwidth * self.moved)

    def node(self, gpus: int) -> int:
        """GPUs of a node for a training on ``gpus``: all of a server's, or as many of a rack's as make equal parts."""
        whole = min(self.per_node, gpus)
        return whole if whole <= _SERVER else max(size for size in range(1, whole + 1) if gpus % size == 0)

    def with_links(self, bandwidth: float) -> Device:
        """The same with links of one bandwidth and no latency."""
        link = Link(0.0, bandwidth)
        return replace(self, within=link, hop=link, between=link)

    def to_json(self) -> str:
        """Text that ``from_json`` reads back."""
        return json.dumps(asdict(self), indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Device:
        """A device from its file.

        Raises:
            ValueError: not JSON, a field is missing or unknown, or a number is out of range.
        """
        content = parse_json(text, "a device")
        if isinstance(content, dict):
            content.pop("layers", None)  # of mpipe tune --measure, which is gone: the efficiency was fitted to them
        row = _row("a device", content, cls)
        for name in ("within", "hop", "between"):
            row[name] = Link(**_row(f"{name} of a device", row[name], Link))
        listed = row.get("precisions", [])
        if not isinstance(listed, list):
            raise ValueError(f"precisions of a device must be a list, got {listed!r}")
        row["precisions"] = tuple(Precision(**_row("a precision", each, Precision)) for each in listed)
        return cls(**row)


def shipped() -> list[str]:
    """The names of the devices that come with the package."""
    return sorted(path.stem for path in _SHIPPED.glob("*.json"))


@cache
def named(name: str) -> Device:
    """A device that comes with the package: case, blanks and dashes do not matter, and H100 is the one with most memory.

    Raises:
        ValueError: there is none of this name.
    """
    asked, known = _letters(name), {_letters(kind): kind for kind in shipped()}
    sizes = [kind for kind in shipped() if re.fullmatch(r"\w+-\d+GB", kind) and _letters(kind.partition("-")[0]) == asked]
    found = known.get(asked) or max(sizes, default=None)  # with most memory
    if found is None:
        near = [known[key] for key in difflib.get_close_matches(asked, known, cutoff=0.4)]
        meant = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(
            f"unknown GPU {name!r}; known are {', '.join(shipped())}{meant} For another one, mpipe tune --gpu "
            f"{(near or ['H100'])[0]} --gpu-from COSTS writes gpu.json, of what mpipe rehearse has measured on it: correct its "
            "memory and links by the data sheet, and give --gpu gpu.json"
        )
    return Device.from_json((_SHIPPED / f"{found}.json").read_text(encoding="utf-8"))


def of_maker(name: str) -> Device | None:
    """The shipped device of a GPU that CUDA calls so, such as A100-80GB of NVIDIA A100-SXM4-80GB; a GH200 is no H200, and an RTX
    4090 D or one of a laptop no RTX 4090."""
    words = set(re.split(r"[\s-]+", name))
    if words & _LESSER:
        return None
    return next((named(kind) for kind in shipped() if set(kind.split("-")) <= words), None)


def read(name: str) -> Device:
    """A device by its name, or from a file whose name ends in .json.

    Raises:
        ValueError: there is none, or the file is malformed; the message names it.
    """
    if not name.endswith(".json"):
        return named(name)
    text = read_text(name, "a device as mpipe tune --gpu-from writes it")
    with NamedErrors(f"{name}:"):
        return Device.from_json(text)


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _row(what: str, content: object, kind: type[Any]) -> dict[str, Any]:
    """The fields of a dataclass from a JSON object: numbers where it has numbers, words where it has words."""
    known = {field.name: field for field in fields(kind)}
    if not isinstance(content, dict):
        raise ValueError(f"{what}: expected an object with {', '.join(known)}, got {str(content)[:60]}")
    missing = [name for name, field in known.items() if name not in content and field.default is MISSING]
    unknown = [name for name in content if name not in known]
    if missing or unknown:
        raise ValueError(
            f"{what}: {'missing ' + missing[0] if missing else 'unknown field ' + repr(unknown[0])}; it has {', '.join(known)}"
        )
    for name, value in content.items():
        expected = {"str": str, "bool": bool, "int": int}.get(str(known[name].type))
        number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _MOST
        if (expected and type(value) is not expected) or (known[name].type == "float" and not number):
            raise ValueError(
                f"{what}: {name} must be {'a number' if expected is None else f'of type {known[name].type}'}, got {value!r}"
            )
    return dict(content)


def _positive(what: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{what} must be a number above 0, got {value:g}")


def _moment(what: str, value: float) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{what} must be seconds of at least 0 and below 1, got {value:g}")
