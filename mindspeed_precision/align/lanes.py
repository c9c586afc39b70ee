"""What a parallel layout is, and what two of them split alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum

from mindspeed_precision.dump.reader import RankRecords, Run
from mindspeed_precision.record.placement import of_vocabulary
from mindspeed_precision.records import RankCoordinates

_SETTINGS = (
    ("transformer_config", "sequence_parallel"),
    ("transformer_config", "virtual_pipeline_model_parallel_size"),
    ("ddp_config", "use_distributed_optimizer"),
)
"""What places tensors beside the sizes, in the configuration that a run notes."""


def layouts_differ(baseline: Run, candidate: Run) -> bool:
    """Tell whether two runs place their tensors differently over ranks."""
    one, two = layout_of(baseline), layout_of(candidate)
    if None in (one["vocabulary"], two["vocabulary"]):  # one of them does not say
        one["vocabulary"] = two["vocabulary"] = None
    return one != two


def layout_of(run: Run) -> dict[str, object]:
    """Return what places a run's tensors: parallel sizes, and the settings that are known of it."""
    sizes = {**first_rank(run).coordinates.sizes(), **_placing(run)}
    sizes["etp_size"] = _expert_tensor_size(run)
    sizes["vocabulary"] = _rows_of_vocabulary(run)
    return sizes


def _placing(run: Run) -> dict[str, object]:
    """Return the settings that place tensors; what is off is None, as what is not noted."""
    values = {name: setting(run, section, name) for section, name in _SETTINGS}
    return {n: value if value not in (False, 1) or value is True else None for n, value in values.items()}


def settings_differ(baseline: Run, candidate: Run) -> bool:
    """Tell whether the manifests of two runs, without a rank, say that they place tensors differently."""
    return _placing(baseline) != _placing(candidate)


def _rows_of_vocabulary(run: Run) -> int | None:
    """Return how many rows the embedding has over all ranks, padding included; None: it is not known."""
    embeddings = (p for rank in run.ranks.values() for p in rank.parameters if of_vocabulary(p.fqn))
    for parameter in embeddings:
        if parameter.placement is not None:
            return parameter.placement.shape[0]
        if first_rank(run).coordinates.tp_size == 1:
            return parameter.shape[0]
    return None


def _expert_tensor_size(run: Run) -> int | None:
    """Return over how many ranks a weight of an expert is split; None for a model without experts."""
    if not setting(run, "transformer_config", "num_moe_experts"):
        return None
    size = setting(run, "transformer_config", "expert_tensor_parallel_size")
    return size if isinstance(size, int) else first_rank(run).coordinates.tp_size


def setting(run: Run, section: str, name: str) -> object:
    """Return a setting of the configuration that a run notes; None where it does not."""
    config = run.manifest.get("config")
    found = config.get(section) if isinstance(config, dict) else None
    return found.get(name) if isinstance(found, dict) else None


def describe_layout(run: Run) -> str:
    """Return a layout as a person writes it: ``TP2 PP1 DP1, sequence parallel``."""
    layout = layout_of(run)
    sizes = [f"{name[:2].upper()}{layout[name]}" for name in ("tp_size", "pp_size", "dp_size")]
    sizes += [f"{name[:2].upper()}{layout[name]}" for name in ("cp_size", "ep_size") if layout[name] != 1]
    if layout["etp_size"] not in (None, layout["tp_size"]):
        sizes.append(f"ETP{layout['etp_size']}")
    words = {
        "sequence_parallel": "sequence parallel",
        "virtual_pipeline_model_parallel_size": f"{layout['virtual_pipeline_model_parallel_size']} chunks",
        "use_distributed_optimizer": "distributed optimizer",
    }
    return ", ".join([" ".join(sizes), *(text for name, text in words.items() if layout[name])])


def describe_layouts(baseline: Run, candidate: Run) -> tuple[str, str]:
    """Return two layouts as a person writes them, with the rows of the vocabulary where those differ."""
    one, two = describe_layout(baseline), describe_layout(candidate)
    rows = [layout_of(run)["vocabulary"] for run in (baseline, candidate)]
    if None in rows or rows[0] == rows[1]:
        return one, two
    return f"{one}, {rows[0]} rows of vocabulary", f"{two}, {rows[1]} rows of vocabulary"


def first_rank(run: Run) -> RankRecords:
    """Return the first rank that recorded."""
    return next(iter(run.ranks.values()))


class Lanes(Enum):
    """What is kept apart in a canonical run; each includes the ones before it."""

    NONE = "none"
    BATCHES = "batches"
    """A lane per data-parallel rank."""
    TOKENS = "tokens"
    """Of each one per context-parallel rank."""
    ACTIVATIONS = "activations"
    """Of each one per tensor-parallel rank."""

    def of(self, where: RankCoordinates) -> int:
        """Return the lane of what a rank alone has."""
        if self is Lanes.NONE:
            return 0
        if self is Lanes.BATCHES:
            return where.dp_rank
        sequence = where.dp_rank * where.cp_size + where.cp_rank
        return sequence * where.tp_size + where.tp_rank if self is Lanes.ACTIVATIONS else sequence

    def shared(self, where: RankCoordinates) -> int:
        """Return the lane of what the ranks of a tensor-parallel group have together."""
        return self.of(replace(where, tp_rank=0))


def common_lanes(one: Mapping[str, object], two: Mapping[str, object]) -> Lanes:
    """Tell what two layouts split alike: parts of the batch, of the sequence, and activations."""
    if one["dp_size"] != two["dp_size"]:
        return Lanes.NONE
    if one["cp_size"] != two["cp_size"]:
        return Lanes.BATCHES
    alike = all(one[name] == two[name] for name in ("tp_size", "sequence_parallel"))
    return Lanes.ACTIVATIONS if alike else Lanes.TOKENS


class Experts(Enum):
    """What of an expert is the same in two runs; each includes the ones before it."""

    REDUCED = "reduced"
    """What is reduced alone."""
    STEPS = "steps"
    """Its gradients before, summed over a step and over all ranks."""
    SUMS = "sums"
    """Its gradients before: it has the same tokens in each lane."""
    MODULES = "modules"
    """What its modules receive and return."""


def common_experts(one: Mapping[str, object], two: Mapping[str, object]) -> Experts:
    """Tell what two layouts have alike of an expert.

    The ranks that experts are distributed over, and that an expert is split over, follow each other, first
    within a tensor-parallel group. Where they are one such group an expert has the tokens of one lane, and of
    equal sizes it has them in the same order.
    """
    if one["etp_size"] is None or two["etp_size"] is None:
        return Experts.MODULES  # there are none
    spread = [_size(layout, "ep_size") * _size(layout, "etp_size") for layout in (one, two)]
    tensor = [_size(layout, "tp_size") for layout in (one, two)]
    alike = all(one[name] == two[name] for name in ("ep_size", "etp_size"))
    same_rank = all(one[name] == two[name] for name in ("tp_size", "sequence_parallel", "cp_size"))
    if alike and common_lanes(one, two) is Lanes.ACTIVATIONS and spread[0] >= tensor[0]:
        return Experts.MODULES
    if alike and same_rank and spread == tensor:
        return Experts.MODULES  # it takes from its own rank alone
    return Experts.SUMS if spread == tensor else Experts.REDUCED


def each_token_once(layout: Mapping[str, object]) -> bool:
    """Tell whether no two ranks of a tensor-parallel group compute dW of one expert from one token."""
    whole = layout["etp_size"] in (None, layout["tp_size"])
    return whole or bool(layout["sequence_parallel"])


def _size(layout: Mapping[str, object], name: str) -> int:
    size = layout[name]
    return size if isinstance(size, int) else 1
