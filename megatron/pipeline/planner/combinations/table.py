"""Rows of what does not go together, and how facts are compared with them. ``rows.py`` has the rows.

A feature is written as

    ``post_validation``          a setting that is on: not None, False, 0, "off" or "none"; a list of which something is so
    ``recompute_modules=moe``    one with this value, or with it in its list
    ``splits>1``                 a number above another
    ``no bf16``                  none of these
    ``sft | reset_attention_mask``   one or more of several

A setting that the asker does not know is neither on nor off.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

_FLAGS = {
    "asked_splits": "--splits",
    "decoder_first_pipeline_num_layers": "--num-layers-in-first-pipeline-stage",
    "decoder_last_pipeline_num_layers": "--num-layers-in-last-pipeline-stage",
    "expert_gtp_weight_remat_size": "--expert-tensor-parallel-num-weight-shards",
    "fp4": "--fp4-format",
    "fp8": "--fp8-format",
    "gtp_weight_remat_size": "--tensor-parallel-num-weight-shards",
    "microbatch_group_size_per_vp_stage": "--microbatch-group-size-per-virtual-pipeline-stage",
    "overlap_p2p_comm_warmup_flush": "--overlap-p2p-communication-warmup-flush",
    "override_opt_param_scheduler": "--override-opt_param-scheduler",
    "use_checkpoint_opt_param_scheduler": "--use-checkpoint-opt_param-scheduler",
}
_WORDS = {  # of what no flag says
    "add_bias_linear": "biases",
    "adjust_tensor_shapes_fn": "adjust_tensor_shapes_fn",
    "bucket_costs": "--cost RS=..",
    "chunks": "several chunks per rank",
    "collect_non_loss_data": "collect_non_loss_data",
    "copies": "a schedule with copies to host memory",
    "copy_costs": "--cost D2H=.. or --copy",
    "every_batch": "plans for every batch",
    "file_vocabulary": "a file that spreads the vocabulary",
    "gathered_logits": "parallel_output=False",
    "gpu": "a GPU",
    "launch": "mpipe launch",
    "no searches": "a schedule that is not searched",
    "norm_costs": "--cost latency=.. or norm=..",
    "no grouped": "a schedule without groups of microbatches",
    "no ours": "--pipeline-schedule stock",
    "ours": "schedules of ours",
    "reruns": "a schedule that runs forwards again (R)",
    "smoothed_loss": "vocab_parallel_cross_entropy with label_smoothing",
    "splits": "a schedule with slices",
    "splits=1": "a schedule without slices",
    "torch_csv": "torch's CSV",
    "unwritten": "passes of other kinds",
}


class Facts(dict[str, Any]):
    """Settings by name, as items and as attributes; one that is not known is None.

    ``core``, where it is known, is the release of megatron-core: without it no row for some releases is met.
    """

    def __missing__(self, name: str) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        return self[name]

    @classmethod
    def of_config(cls, config: Any, **known: Any) -> Facts:
        """Facts of a ``TransformerConfig`` under a schedule of ours.

        Args:
            known: more, such as the number of slices of the schedule.
        """
        ours = ("delay_wgrad_compute", "transformer_impl")  # we set the first; models are built without the second
        return cls({name: value for name, value in vars(config).items() if name not in ours}, **{"ours": True} | known)

    def is_from(self, release: str) -> bool:
        """Tell whether megatron-core is known to be of a release such as ``0.17``, or of a later one."""
        return self.core is not None and minor(self.core) >= minor(release)

    def found(self, rows: Iterable[Combination]) -> Iterator[Found]:
        """The rows that these facts meet, in order."""
        for row in rows:
            one = self.met(row.one)
            if not one or (row.mended and self.is_from(row.mended)) or (row.since and not self.is_from(row.since)):
                continue
            if (other := self.met(row.other)) and row.when(self):
                given, others = (" and ".join(map(self.words, features)) for features in (one, other))
                known = Facts(self, one=given, other=others, flag=" and ".join(map(_spoken, one)))
                yield Found(row, given, *(text.format_map(known) for text in (row.reason, row.instead, row.price)))

    def sentences(self, *topics: Iterable[Combination]) -> list[str]:
        """For every feature that does not go with another, why and what to do instead."""
        said: dict[str, str] = {}
        for one in (one for rows in topics for one in self.found(rows)):
            said.setdefault(one.flag, str(one))
        return list(said.values())

    def refuse(self, *topics: Iterable[Combination]) -> None:
        """Refuse what does not go together.

        Raises:
            ValueError: has the ``sentences``.
        """
        if said := self.sentences(*topics):
            raise ValueError(". ".join(said))

    def met(self, features: str) -> list[str]:
        """Those of several features that are met."""
        return [feature for feature in _several(features) if self._meets(feature)]

    def _meets(self, feature: str) -> bool:
        no, name, relation, wanted = _parts(feature)
        if name not in self:
            return False
        value = self[name]
        if relation == "=":
            met = wanted in map(_text, value) if isinstance(value, list | tuple) else _text(value) == wanted
        elif relation == ">":
            met = value is not None and value > float(wanted)
        else:
            met = _is_on(value)
        return met is not bool(no)

    def words(self, feature: str) -> str:
        """A feature as a user has given it, with its value."""
        no, name, _, wanted = _parts(feature)
        value = self[name]
        if isinstance(value, str) and value.startswith("--"):
            return value  # words already
        if feature in _WORDS or name in _WORDS or no or value is True:
            return _spoken(feature)
        if isinstance(value, list | tuple):
            return f"{flag_of(name)} {wanted or ' '.join(map(_text, value))}"
        return f"{flag_of(name)} {_text(value)}"


class Combination(NamedTuple):
    """Two features that do not go together.

    Attributes:
        one, other: the features.
        reason: completes a sentence that starts with ``one``. Here and below ``{one}`` and ``{other}`` are the features as they
            were given, ``{flag}`` is that of ``one`` without its value, and other names stand for facts.
        instead: what to do.
        when: a further condition, as where the features are numbers.
        since, mended: the first releases of megatron-core in which they do not go together, and in which they do again;
            ``mended`` is None where there is none yet.
        price: of a training without ``one``, the same but for time and memory, which is what ``--adapt`` starts; "" where it
            would be another training.
        details: settings that mean nothing without ``one``, which ``--adapt`` leaves out, too.
    """

    one: str
    other: str
    reason: str
    instead: str = "leave one of the two out"
    when: Callable[[Facts], object] = lambda _: True
    since: str = ""
    mended: str | None = ""
    price: str = ""
    details: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The setting of ``one``; of the first where there are several."""
        return _parts(_several(self.one)[0])[1]

    @property
    def titles(self) -> tuple[str, str]:
        """Its features for a page, where nothing says how they were given."""
        return _titles(self.one), _titles(self.other)


class Found(NamedTuple):
    """A row that is met: ``flag`` is the one feature as it was given, and further attributes are the row's in words."""

    row: Combination
    flag: str
    reason: str
    instead: str
    price: str

    def __str__(self) -> str:
        said = f"{self.flag}{'' if self.reason.startswith(':') else ' '}{self.reason}"
        return f"{said}: {self.instead}" if self.instead else said


def flag_of(name: str) -> str:
    """The flag that sets a name, such as ``--num-layers`` for ``num_layers``."""
    return _FLAGS.get(name) or f"--{name.replace('_', '-')}"


def _spoken(feature: str) -> str:
    """A feature without its value."""
    name = _parts(feature)[1]
    return _WORDS.get(feature) or _WORDS.get(name) or flag_of(name)


def _titles(features: str) -> str:
    titles = []
    for feature in _several(features):
        no, name, relation, wanted = _parts(feature)
        flag = f"`{flag_of(name)}{f' {wanted}' if relation == '=' else ''}`"
        more = f" above {wanted}" if relation == ">" else ""
        words = _WORDS.get(feature) or (f"{no}{_WORDS[name]}" if name in _WORDS else f"{no}{flag}{more}")
        titles.append(f"`{words}`" if words.startswith("--") else words)
    return ", ".join(titles)


@cache
def _several(features: str) -> list[str]:
    return features.split(" | ")


@cache
def _parts(feature: str) -> tuple[str, str, str, str]:
    match = re.fullmatch(r"(no )?(\w+)(?:([=>])(.+))?", feature)
    assert match is not None, feature
    return match[1] or "", match[2], match[3] or "", match[4] or ""


def _is_on(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(value)
    return value not in (None, False, "off", "none", "")


def _text(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    is_memory = isinstance(value, int) and value >= 2**20
    return f"{value / 2**20:g}MiB" if is_memory else str(value)


def minor(release: str) -> tuple[int, int]:
    """The first two numbers of a release such as ``0.17`` or ``0.17.1``, which compare as releases do."""
    first, second = release.split(".")[:2]
    return int(first), int(second)
