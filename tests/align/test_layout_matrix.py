"""Every layout of up to four processes against one process and any other, healthy and with three faults each.

``make layouts`` runs it and prints what was found where; docs/layouts.md shows that table.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import pytest

pytest.importorskip("torch")

from preloaded import run_training

from mindspeed_precision.flow import compare_runs
from mindspeed_precision.records import Diagnosis, Phase, Role, Verdict
from mindspeed_precision.report.console import render

pytestmark = [pytest.mark.torch, pytest.mark.megatron, pytest.mark.long]

SCRIPT = Path(__file__).parent / "scripts" / "record_layouts.py"
STEP = 4
"""Microbatches of a step, over all data-parallel ranks."""

PLAIN = {"hidden": 64, "kv_groups": 2}
GATED = {**PLAIN, "swiglu": True, "rmsnorm": True, "untie": True}
MIXTURE = {**GATED, "experts": 4}
MODELS = {
    "plain": PLAIN,
    "plain, 4 layers": {**PLAIN, "layers": 4},
    "gated": GATED,
    "gated, 4 layers": {**GATED, "layers": 4},
    "mixture": MIXTURE,
}
OF_TENSOR = ("norm_over_tensor_group", "transposed_shard")
OF_BATCH = ("norm_over_batch_group", "transposed_contribution")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout, and the faults that are planted in it.

    Attributes:
        model: name in ``MODELS``.
        processes: how many.
        dp: data-parallel ranks.
        split: settings of the trainer.
        faults: a reduction that is left out, a transposed gradient, a scaled one; names in the script.
    """

    model: str
    faults: tuple[str, ...]
    processes: int = 2
    dp: int = 1
    split: dict[str, object] = field(default_factory=dict)


SP = {"tp": 2, "sequence_parallel": True}
DISTRIBUTED = {"distributed_optimizer": True}
LAYOUTS = {
    "TP2": Layout(
        model="plain", split={"tp": 2}, faults=("input_gradient", "transposed_shard", "scaled_shard")
    ),
    "TP2 SP": Layout(model="gated", split=SP, faults=(*OF_TENSOR, "scaled_shard")),
    "PP2": Layout(
        model="plain", split={"pp": 2}, faults=("tied_embedding", "transposed_shard", "scaled_stage")
    ),
    "PP2 VPP2": Layout(
        model="plain, 4 layers",
        split={"pp": 2, "vpp": 2},
        faults=("tied_embedding", "transposed_shard", "scaled_stage"),
    ),
    "DP2": Layout(model="plain", dp=2, faults=(*OF_BATCH, "scaled_contribution")),
    "DP2 distopt": Layout(model="plain", dp=2, split=DISTRIBUTED, faults=(*OF_BATCH, "scaled_contribution")),
    "CP2": Layout(model="plain", split={"cp": 2}, faults=(*OF_BATCH, "scaled_contribution")),
    "DP2 EP2": Layout(
        model="mixture",
        dp=2,
        split={"ep": 2},
        faults=("norm_over_batch_group", "transposed_expert", "scaled_experts"),
    ),
    "TP2 SP EP2 ETP1": Layout(
        model="mixture",
        split={**SP, "ep": 2, "etp": 1},
        faults=("norm_over_tensor_group", "transposed_expert", "scaled_experts"),
    ),
    "TP2 SP PP2": Layout(
        model="gated", processes=4, split={**SP, "pp": 2}, faults=(*OF_TENSOR, "scaled_stage")
    ),
    "TP2 SP PP2 VPP2": Layout(
        model="gated, 4 layers",
        processes=4,
        split={**SP, "pp": 2, "vpp": 2},
        faults=(*OF_TENSOR, "scaled_stage"),
    ),
    "TP2 SP DP2 distopt": Layout(
        model="gated", processes=4, dp=2, split={**SP, **DISTRIBUTED}, faults=(*OF_TENSOR, "scaled_shard")
    ),
    "PP2 DP2": Layout(
        model="plain",
        processes=4,
        dp=2,
        split={"pp": 2},
        faults=("norm_over_batch_group", "transposed_contribution", "scaled_stage"),
    ),
    "TP2 SP DP2 EP2": Layout(
        model="mixture",
        processes=4,
        dp=2,
        split={**SP, "ep": 2},
        faults=("norm_over_tensor_group", "transposed_expert", "scaled_experts"),
    ),
    "DP4 EP2 distopt": Layout(
        model="mixture",
        processes=4,
        dp=4,
        split={"ep": 2, **DISTRIBUTED},
        faults=("norm_over_batch_group", "transposed_expert", "scaled_experts"),
    ),
    "PP2 DP2 EP2": Layout(
        model="mixture",
        processes=4,
        dp=2,
        split={"pp": 2, "ep": 2},
        faults=("norm_over_batch_group", "transposed_expert", "scaled_stage"),
    ),
    "TP2 SP CP2": Layout(
        model="gated", processes=4, split={**SP, "cp": 2}, faults=(*OF_TENSOR, "scaled_contribution")
    ),
    "DP2 CP2 distopt": Layout(
        model="plain",
        processes=4,
        dp=2,
        split={"cp": 2, **DISTRIBUTED},
        faults=(*OF_BATCH, "scaled_contribution"),
    ),
}
CASES = [(name, fault) for name, layout in LAYOUTS.items() for fault in layout.faults]
PAIRS = [pair for pair in combinations(LAYOUTS, 2) if LAYOUTS[pair[0]].model == LAYOUTS[pair[1]].model]
"""Layouts of one model, each with every other."""

OF_MODELS = [[name for name, layout in LAYOUTS.items() if layout.model == model] for model in MODELS]
STARTS = [(names[at - 1], name) for names in OF_MODELS for at, name in enumerate(names)]
"""Each layout once as what gives the parameters to begin with, and once as what takes them."""

Compare = Callable[..., Diagnosis]


@pytest.fixture(scope="module")
def recorded(megatron, tmp_path_factory) -> Callable[..., Path]:
    """Return a function that records a layout, healthy and with its faults, and what it starts from, once.

    With ``start`` it records the layout once more, begun as another one began.
    """
    out = tmp_path_factory.mktemp("matrix")

    def record(several: list[dict[str, object]], processes: int) -> None:
        run_training(
            SCRIPT,
            [str(out), json.dumps(several)],
            processes=processes,
            megatron=megatron("0.17.1"),
            log=out / f"{several[0]['name']}.txt",
        )

    def ready(name: str, start: str = "") -> Path:
        layout = LAYOUTS[name]
        settings = {**MODELS[layout.model], **layout.split, "microbatches": STEP // layout.dp}
        if not (out / layout.model).exists():
            record([asked(model, settings={**MODELS[model], "microbatches": STEP}) for model in MODELS], 1)
        if not start and not (out / place(name, "")).exists():
            # few in one process: torch.distributed keeps the groups of each, with their threads
            several = [
                asked(place(name, fault), start=layout.model, plant=fault, settings=settings)
                for fault in ("", *layout.faults)
            ]
            record(several, layout.processes)
        if start:
            ready(start)
            begun = asked(begun_as(name, start), start=place(start, ""), settings={**settings, "seed": 99})
            record([begun], layout.processes)
        return out

    return ready


def asked(name, *, settings, start="", plant=""):
    return {"name": name, "start": start, "plant": plant, "settings": settings}


def place(name, fault):
    return f"{name}, {fault or 'healthy'}"


def begun_as(name, start):
    return f"{name}, begun as {start}"


@pytest.fixture(scope="module")
def table(request) -> Iterator[dict[str, dict[str, str]]]:
    """Collect what was found, by baseline (empty: one process), layout and fault; print it at the end."""
    rows: dict[tuple[str, str, str], str] = {}
    yield rows
    plugin = request.config.pluginmanager.getplugin
    lines = ["\n| baseline | layout | fault | found first |", "|---|---|---|---|"]
    lines += [
        f"| {baseline or 'one process'} | {name} | {fault or 'healthy'} | {found} |"
        for (baseline, name, fault), found in rows.items()
    ]
    with plugin("capturemanager").global_and_fixture_disabled():
        plugin("terminalreporter").write("\n".join(lines) + "\n")


@pytest.fixture
def compare(recorded) -> Compare:
    """Return a function that compares a run of a layout with that of another one, or of one process."""

    def compared(name: str, fault: str, baseline: str = "") -> Diagnosis:
        folder = recorded(name)
        other = place(baseline, "") if baseline else LAYOUTS[name].model
        if baseline:
            recorded(baseline)
        return compare_runs(folder / other, folder / place(name, fault))

    return compared


KINDS = (
    (Phase.INIT, Role.PARAM),
    (Phase.REDUCE, Role.REDUCED_GRAD),
    (Phase.CLIP, Role.MAIN_GRAD),
    (Phase.OPTIMIZER, Role.EXP_AVG),
    (Phase.OPTIMIZER, Role.EXP_AVG_SQ),
    (Phase.OPTIMIZER, Role.PARAM),
)


def require_agreement(diagnosis: Diagnosis) -> str:
    """Require that every parameter is compared by its name and agrees; return what was compared."""
    assert diagnosis.status in (Verdict.WITHIN_TOLERANCE, Verdict.IDENTICAL), render(diagnosis)
    assert diagnosis.findings == ()
    assert not diagnosis.unmatched
    for kind in KINDS:
        named = {c.key.fqn for c in diagnosis.comparisons if (c.key.phase, c.key.role) == kind}
        assert len(named) == diagnosis.coverage.parameters, kind
    early = sum(c.key.phase in (Phase.WGRAD, Phase.ACCUMULATE) for c in diagnosis.comparisons)
    return f"{len(diagnosis.comparisons)} records agree, {early} of them before the reduction"


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_healthy_layout_agrees_by_the_name_of_every_parameter(name, compare, table):
    table["", name, ""] = require_agreement(compare(name, ""))


def last_layer(name):
    return f"decoder.layers.{MODELS[LAYOUTS[name].model].get('layers', 2) - 1}"


def target(name, fault):
    """Return the parameters that a fault spoils."""
    last = last_layer(name)
    if fault.startswith("norm"):
        return {f"{last}.input_layernorm.weight"}
    if fault == "input_gradient":  # what lies before the linear: its norm first
        return {f"{last}.pre_mlp_layernorm.weight", f"{last}.pre_mlp_layernorm.bias"}
    if fault == "tied_embedding":
        return {"embedding.word_embeddings.weight"}
    if fault == "transposed_expert":
        return {f"{last}.mlp.experts.local_experts.3.linear_fc2.weight"}
    if fault.startswith("transposed"):
        return {f"{last}.self_attention.linear_proj.weight"}
    return {f"{last}.mlp.linear_fc1.weight"}


def spoiled(name, fault, fqn):
    """Tell whether a fault spoils a parameter."""
    if fault == "scaled_stage":
        layers = MODELS[LAYOUTS[name].model].get("layers", 2)
        # interleaved: each stage has every second layer
        interleaved = "vpp" in LAYOUTS[name].split
        mine = range(1, layers, 2) if interleaved else range(layers // 2, layers)
        return any(fqn.startswith(f"decoder.layers.{number}.") for number in mine)
    if fault == "input_gradient":
        return not fqn.startswith((f"{last_layer(name)}.mlp.", "decoder.final_layernorm."))
    if fault == "scaled_experts":
        return any(f".local_experts.{number}." in fqn for number in (2, 3))
    return fqn in target(name, fault)


def require_found(diagnosis: Diagnosis, name: str, fault: str) -> str:
    """Require that a fault comes first, at what it spoils and nowhere else; return where it was found."""
    first = diagnosis.first_divergence
    assert first is not None, render(diagnosis)
    assert first.key.step == 0
    assert first.key.phase in (Phase.WGRAD, Phase.REDUCE), render(diagnosis)
    assert spoiled(name, fault, first.key.fqn), render(diagnosis)
    if fault == "input_gradient":
        assert first.key.fqn in target(name, fault), render(diagnosis)
    reduced = [o for o in diagnosis.origins if o.key.role is Role.REDUCED_GRAD and o.key.step == 0]
    assert all(spoiled(name, fault, origin.key.fqn) for origin in reduced), render(diagnosis)
    ranks = [f for f in diagnosis.findings if f.id == "parallel.replicas_differ"]
    assert all(spoiled(name, fault, finding.where.fqn) for finding in ranks), render(diagnosis)
    more = ", parallel.replicas_differ" if ranks else ""
    shown = first.key.fqn.removeprefix("decoder.")
    return f"{first.key.role.value} of `{shown}`, ranks {held(first)}{more}"


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_a_fault_is_found_at_the_tensor_that_it_spoils(name, fault, compare, table):
    table["", name, fault] = require_found(compare(name, fault), name, fault)


@pytest.mark.parametrize(("baseline", "name"), PAIRS)
def test_two_layouts_agree_and_a_fault_in_one_is_found(baseline, name, compare, table):
    """Nothing is trained for it; the faults take turns."""
    table[baseline, name, ""] = require_agreement(compare(name, "", baseline))
    faults = LAYOUTS[name].faults
    fault = faults[PAIRS.index((baseline, name)) % len(faults)]
    table[baseline, name, fault] = require_found(compare(name, fault, baseline), name, fault)


def held(origin):
    return ", ".join(map(str, origin.held_by))


@pytest.mark.parametrize(("start", "name"), STARTS)
def test_the_parameters_of_any_layout_go_into_another(start, name, recorded):
    """By the run's own seed it would have others."""
    folder = recorded(name, start)
    diagnosis = compare_runs(folder / place(start, ""), folder / begun_as(name, start))
    initial = {c.key.fqn: c.verdict for c in diagnosis.comparisons if c.key.phase is Phase.INIT}
    assert set(initial.values()) == {Verdict.IDENTICAL}, render(diagnosis)
    assert len(initial) == diagnosis.coverage.parameters
    # the seed is another one, and nothing draws from it
    wrong = {c.key.role for c in diagnosis.comparisons if c.verdict is Verdict.DIVERGED}
    assert wrong <= {Role.RNG}, render(diagnosis)
