"""``shrink``: the smallest launch that keeps the structure of a big one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mindspeed_precision.errors import ConfigError
from mindspeed_precision.launches import Arguments, Launch, read_launch
from mindspeed_precision.preflight.planned import Planned
from mindspeed_precision.preflight.rules import ask, rules
from mindspeed_precision.records import CheckOutcome, Examination, Finding, Severity
from mindspeed_precision.shrink.batch import (
    shrink_batch,
    shrink_sequence,
    shrink_training,
    shrink_vocabulary,
)
from mindspeed_precision.shrink.change import Changes
from mindspeed_precision.shrink.model import shrink_experts, shrink_layers, shrink_width
from mindspeed_precision.shrink.parallel import Parallel, parallel_of, shrink_parallel
from mindspeed_precision.verify.registry import Answer

_CHECKED = ("config.contradiction", "config.indivisible")
_NODES = {"nnodes": "1", "node-rank": "0"}


def shrink(
    words: Sequence[str],
    *,
    devices: int = 8,
    halve: bool = False,
    vocabulary: int | None = None,
    environment: Mapping[str, str] | None = None,
) -> Examination:
    """Shrink a launch until it fits one node.

    Args:
        words: the launch (``launches.read_launch``).
        devices: of the node.
        halve: parallel sizes may be halved where they do not fit.
        vocabulary: rows of the embedding; None: as it is, since the data decide it.
        environment: with which it would be started; None: this process's.

    Returns:
        The command, each size with its reason, and what it can no longer reproduce; the rules of
        ``preflight`` about sizes and contradictions are asked of the result.

    Raises:
        ConfigError: the launch cannot be read, has no sizes, or does not fit.
    """
    for name, number in (("--devices", devices), ("--vocabulary", vocabulary)):
        if number is not None and number < 1:
            raise ConfigError("no number of anything", where=name, found=str(number), expected="at least 1")
    launch = read_launch(words, environment)
    shrunk, changes, sizes = shrunk_launch(launch, devices=devices, halve=halve, vocabulary=vocabulary)
    answer = _checked(shrunk, sizes)
    return Examination(
        command="shrink",
        subjects={"launch": launch.source},
        findings=answer.findings,
        outcomes=(
            CheckOutcome(
                name="config.indivisible",
                holds="the sizes of the shrunk launch fit each other",
                exercised=answer.exercised,
                unit="rules",
                failed=len(answer.findings),
                skipped=answer.skipped,
            ),
        ),
        headline=_headline(launch, shrunk, sizes),
        tables={
            "sizes": tuple(change.line for change in changes.made.values()),
            "lost": tuple(changes.lost),
            "command": (shlex.join(shrunk.words()),),
        },
        notes=()
        if vocabulary
        else ("the vocabulary is kept: --vocabulary shrinks it, where the data allow",),
    )


def _headline(launch: Launch, shrunk: Launch, sizes: Parallel) -> str:
    before, after = (_count(parameters(one.arguments)) for one in (launch, shrunk))
    processes = f"{sizes.world} processes (from {parallel_of(launch).world})"
    return (
        f"SHRUNK to {processes}: TP {sizes.tp}, PP {sizes.pp} x {sizes.chunks}, CP {sizes.cp}, "
        f"EP {sizes.ep}, DP {sizes.dp}; about {after} of {before} parameters."
    )


def shrunk_launch(
    launch: Launch, *, devices: int, halve: bool = False, vocabulary: int | None = None
) -> tuple[Launch, Changes, Parallel]:
    """Return the shrunk launch, what was changed, and its parallel sizes; arguments as in ``shrink``."""
    changes = Changes()
    sizes = shrink_parallel(launch, changes, devices=devices, halve=halve)
    shrink_layers(launch.arguments, sizes, changes)
    shrink_width(launch.arguments, sizes, changes)
    shrink_experts(launch.arguments, sizes, changes)
    shrink_sequence(launch.arguments, sizes, changes)
    shrink_batch(launch.arguments, parallel_of(launch), sizes, changes)
    shrink_vocabulary(launch.arguments, vocabulary, changes)
    shrink_training(launch.arguments, changes)
    return _with_processes(launch, sizes).with_arguments(_changed(launch.arguments, changes)), changes, sizes


def _changed(arguments: Arguments, changes: Changes) -> Arguments:
    left_out = [arguments.known.setting(name) for name, change in changes.made.items() if change.new is None]
    values = {name: [change.new] for name, change in changes.made.items() if change.new is not None}
    return arguments.without(left_out).having(values)


def _with_processes(launch: Launch, sizes: Parallel) -> Launch:
    """Return the launch with as many processes, on one machine."""
    world = str(sizes.world)
    wanted = {"nproc-per-node": world, "worker-num": world, "local-worker-num": world, **_NODES}
    head: list[str] = []
    words = list(launch.head)
    position = 0
    while position < len(words):
        word = words[position]
        name = word.lstrip("-").partition("=")[0].replace("_", "-")
        position += 1
        if not word.startswith("--") or name not in wanted or name not in launch.options:
            head.append(word)
        elif "=" in word:
            head.append(f"{word.partition('=')[0]}={wanted[name]}")
        else:
            head += [word, wanted[name]]
            position += 1
    options = {**launch.options, **{name: wanted[name] for name in launch.options if name in wanted}}
    if launch.launcher == "torchrun" and "nproc-per-node" not in options and sizes.world > 1:
        at = next(i for i, word in enumerate(head) if word.endswith(("torchrun", ".run", ".launch"))) + 1
        head[at:at] = ["--nproc-per-node", world]
        options["nproc-per-node"] = world
    return replace(launch, head=tuple(head), options=options)


def _checked(launch: Launch, sizes: Parallel) -> Answer:
    """Ask the rules about sizes and contradictions of the result; errors are told."""
    if launch.world_size is None:
        launch = replace(launch, environment={**launch.environment, "WORLD_SIZE": str(sizes.world)})
    planned = Planned(launch=launch, backend="cpu", chosen="", versions={})
    answer = ask([rule for rule in rules() if rule.id in _CHECKED], planned)
    errors: tuple[Finding, ...] = tuple(f for f in answer.findings if f.severity is Severity.ERROR)
    return replace(answer, findings=errors)


def parameters(arguments: Arguments) -> float:
    """Estimate the parameters of the model: matrices of attention, ffn or experts, and embeddings."""
    hidden, layers = arguments.integer("hidden_size", 0), arguments.integer("num_layers", 0)
    heads = arguments.integer("num_attention_heads", 1)
    channels = arguments.integer("kv_channels", hidden // max(heads, 1))
    groups = arguments.integer("num_query_groups", heads) if arguments.on("group_query_attention") else heads
    gated = 3 if arguments.on("swiglu") else 2
    ffn = arguments.integer("ffn_hidden_size", 4 * hidden)
    attention = hidden * channels * (2 * heads + 2 * groups)
    experts = arguments.integer("num_experts", 0)
    dense = min(arguments.integer("first_k_dense_replace", 0), layers) if experts else layers
    inner = arguments.integer("moe_ffn_hidden_size", ffn)
    vocabulary = arguments.integer("padded_vocab_size", arguments.integer("vocab_size", 0))
    embeddings = vocabulary * hidden * (2 if arguments.on("untie_embeddings_and_output_weights") else 1)
    mixed = (layers - dense) * experts * gated * hidden * inner
    return float(layers * attention + dense * gated * hidden * ffn + mixed + embeddings)


def _count(number: float) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"
