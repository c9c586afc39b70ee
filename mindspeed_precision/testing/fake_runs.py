"""Small honest runs without a framework: a network trained in numpy, recorded like a Megatron run.

For tests of everything after the dump, and for users' own rules. A residual network of linear layers is
really
trained (forward, dgrad, wgrad at the GEMM, accumulation over microbatches, reduction over data-parallel
ranks, clipping, AdamW), so that a planted fault propagates as it would in a real run::

    write_fake_run(tmp_path / "baseline")
    write_fake_run(tmp_path / "candidate", plants=[plant(role="wgrad", fqn=LINEAR, value=scaled(2))])

Not a model of rounding: GEMM layouts are recorded as they would be, and change no bit here unless a plant
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mindspeed_precision.backends.base import HostTensor
from mindspeed_precision.dump.writer import RankWriter, create_run
from mindspeed_precision.record.statistics import digest_host
from mindspeed_precision.records import (
    INIT_STEP,
    MOMENTUM,
    Layout,
    Level,
    ParameterDeclaration,
    Phase,
    RankCoordinates,
    RecordKey,
    Role,
    TensorRecord,
)

Array = NDArray[Any]

LINEAR = "decoder.layers.1.mlp.linear_fc1"
"""Module that tests like to plant faults in."""

EMBEDDING = "embedding.word_embeddings"
HEAD = "output_layer"
_VOCABULARY, _HIDDEN, _LAYERS, _TOKENS = 11, 8, 2, 6


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault: what happens to the records, and to the numbers behind them, that it matches.

    Attributes:
        where: tells whether the fault is at a rank's record.
        value: replaces the number that flows on.
        layout: replaces the layout that is recorded; changes no number.
        drop: the record is not written; the number flows on.
        recorded: replaces the number in the record alone; what was computed flows on.
    """

    where: Callable[[int, RecordKey], bool]
    value: Callable[[Array], Array] | None = None
    layout: Callable[[Layout], Layout] | None = None
    drop: bool = False
    recorded: Callable[[Array], Array] | None = None


def plant(
    *,
    fqn: str = "*",
    role: str = "*",
    phase: str = "*",
    slot: str = "*",
    step: int | None = None,
    microbatch: int | None = None,
    rank: int | None = None,
    recomputed: bool | None = None,
    value: Callable[[Array], Array] | None = None,
    layout: Callable[[Layout], Layout] | None = None,
    drop: bool = False,
    recorded: Callable[[Array], Array] | None = None,
) -> Plant:
    """Return a fault at the records that fit all patterns (shell patterns on names, None for any number)."""

    def where(at_rank: int, key: RecordKey) -> bool:
        names = ((key.fqn, fqn), (key.role.value, role), (key.phase.value, phase), (key.slot, slot))
        numbers: tuple[tuple[int, int | None], ...] = (
            (key.step, step),
            (key.microbatch, microbatch),
            (at_rank, rank),
            (key.recomputed, recomputed),
        )
        return all(fnmatchcase(name, pattern) for name, pattern in names) and all(
            wanted is None or number == wanted for number, wanted in numbers
        )

    return Plant(where=where, value=value, layout=layout, drop=drop, recorded=recorded)


def scaled(factor: float) -> Callable[[Array], Array]:
    """Return a fault that multiplies."""
    return lambda value: (value * value.dtype.type(factor)).astype(value.dtype)


def nudged(index: int = 0) -> Callable[[Array], Array]:
    """Return a fault that moves one element of a float tensor to its neighbour: the smallest there is."""

    def value(array: Array) -> Array:
        changed = array.copy()
        changed.flat[index] = np.nextafter(changed.flat[index], changed.dtype.type(np.inf))
        return changed

    return value


def rounded(seed: int = 0, roundings: float = 4.0) -> Callable[[Array], Array]:
    """Return what another framework's kernel does: every element off by some roundings of float32."""

    def value(array: Array) -> Array:
        off = np.random.default_rng(seed).normal(0, roundings * 2.0**-24, array.shape)
        return np.asarray((array * (1 + off)).astype(array.dtype))

    return value


def noisy(seed: int, rows: slice, size: float = 1e-7) -> Callable[[Array], Array]:
    """Return what is left of rows that are zero in mathematics: numbers of ``size``, of any sign."""

    def value(array: Array) -> Array:
        changed = array.copy()
        changed[rows] = np.random.default_rng(seed).normal(0, size, changed[rows].shape)
        return changed

    return value


def permuted(seed: int = 0) -> Callable[[Array], Array]:
    """Return a fault that puts the elements into another order."""
    return lambda value: np.random.default_rng(seed).permutation(value.ravel()).reshape(value.shape)


def constant(number: float) -> Callable[[Array], Array]:
    """Return a fault that sets every element."""
    return lambda value: np.full_like(value, number)


def transposed_layout(layout: Layout) -> Layout:
    """Return how ``x.t().contiguous()`` of an operand ``x`` of a GEMM looks when seen as ``x``."""
    return replace(layout, stride=(1, _TOKENS), contiguous=False)


@dataclass(frozen=True, kw_only=True)
class FakeRun:
    """What is trained, and how it is recorded.

    Attributes:
        ranks: data-parallel ranks.
        steps: training steps.
        microbatches: per step and rank.
        level: how much is kept of each record.
        payloads: shell pattern of fqns whose elements are kept whatever ``level`` says.
        lr: learning rate.
        weight_decay: of every parameter but those of ``undecayed``.
        undecayed: parameters without weight decay: a group of their own.
        ungrouped: parameters that are in no group, and never updated.
        twice: parameters that are in their group twice.
        eps: Adam's.
        beta2: Adam's.
        momentum: of gradient descent, in place of AdamW; None: AdamW.
        dampening: of gradient descent.
        nesterov: of gradient descent.
        frozen: parameters that are not trained.
        transposed: parameters ``[out, in]`` whose dW arrives as the transpose of what lies in memory.
        strides_ignored: gradients are added as they lie in memory, whatever their strides: a kernel's bug.
        unwritten: parameters that the optimizer computes and never writes.
        dot_grad: gradients are accumulated as ``.grad``: the first microbatch's dW itself, then a new sum;
            else into a buffer of zeros.
        recompute: the backward computes the outputs of the layers' linears once more.
        seed: of the initial parameters and the data.
        megatron_args: further arguments for the manifest.
        manifest: further keys of the manifest.
        plants: faults, applied in order.
    """

    ranks: int = 1
    steps: int = 2
    microbatches: int = 2
    level: Level = Level.STATISTICS
    payloads: str = ""
    lr: float = 0.01
    weight_decay: float = 0.1
    undecayed: frozenset[str] = frozenset()
    ungrouped: frozenset[str] = frozenset()
    twice: frozenset[str] = frozenset()
    eps: float = 1e-8
    beta2: float = 0.95
    momentum: float | None = None
    dampening: float = 0.0
    nesterov: bool = False
    frozen: frozenset[str] = frozenset()
    transposed: frozenset[str] = frozenset()
    strides_ignored: bool = False
    unwritten: frozenset[str] = frozenset()
    dot_grad: bool = False
    recompute: bool = False
    seed: int = 1
    megatron_args: Mapping[str, Any] = field(default_factory=dict)
    manifest: Mapping[str, Any] = field(default_factory=dict)
    plants: Sequence[Plant] = ()


def write_fake_run(directory: Path, run: FakeRun | None = None, **changes: Any) -> Path:
    """Train and write a run.

    Args:
        directory: new or empty.
        run: what to train; None for the defaults.
        changes: fields of ``FakeRun`` to replace.

    Returns:
        ``directory``.
    """
    run = replace(run or FakeRun(), **changes)
    create_run(directory, _manifest(run))
    _Trainer(run, directory).train()
    return directory


def _manifest(run: FakeRun) -> dict[str, Any]:
    arguments = {
        "lr": run.lr,
        "weight_decay": run.weight_decay,
        "adam_eps": run.eps,
        "micro_batch_size": 1,
        "global_batch_size": run.microbatches * run.ranks,
        "seed": run.seed,
        **run.megatron_args,
    }
    return {
        "created": "2026-01-01T00:00:00+00:00",
        "package_version": "0.1.0",
        "framework": {"name": "numpy", "version": np.__version__},
        "versions": {"numpy": np.__version__},
        "parallel": RankCoordinates(world_size=run.ranks, dp_size=run.ranks).sizes(),
        "settings": {"capture": {"level": run.level.value, "rules": []}, "remedies": []},
        "config": {
            "megatron_args": arguments,
            "transformer_config": {},
            "ddp_config": {},
            "optimizer_config": {},
        },
        "environment": {},
        "numerics": {"num_threads": 1, "mkldnn": True, "deterministic_algorithms": True, "device": "cpu"},
        "patches": [],
        "remedies": [],
        "findings": [],
        "label": "fake run",
        **run.manifest,
    }


class _Recorder:
    """One rank's records; ``see`` is where a number becomes a record, and where a plant changes it."""

    def __init__(self, run: FakeRun, directory: Path, rank: int) -> None:
        self.rank = rank
        self._run = run
        self._writer = RankWriter(
            directory,
            coordinates=RankCoordinates(rank=rank, world_size=run.ranks, dp_rank=rank, dp_size=run.ranks),
        )
        self._seq = 0
        self._records: list[TensorRecord] = []
        self._payloads: dict[int, HostTensor] = {}

    def declare(self, parameters: Mapping[str, Array]) -> None:
        """Declare the parameters of this rank."""
        self._writer.declare_parameters(
            [
                ParameterDeclaration(
                    fqn=name,
                    shape=value.shape,
                    dtype=str(value.dtype),
                    trainable=name not in self._run.frozen,
                )
                for name, value in parameters.items()
            ]
        )
        self._writer.write_effective(_effective(self._run, parameters))

    def see(self, key: RecordKey, value: Array, layout: Layout | None = None) -> Array:
        """Apply the plants, record, and return the number that flows on."""
        keep, changed = True, None
        layout = layout or _layout(value)
        for fault in self._run.plants:
            if fault.where(self.rank, key):
                value = fault.value(value) if fault.value else value
                layout = fault.layout(layout) if fault.layout else layout
                keep = keep and not fault.drop
                changed = fault.recorded(value) if fault.recorded else changed
        if keep:
            self._write(key, value if changed is None else changed, layout)
        return value

    def _write(self, key: RecordKey, value: Array, layout: Layout) -> None:
        host = HostTensor(bits=_bits(value), dtype=str(value.dtype))
        whole = self._run.level is Level.TENSOR or fnmatchcase(key.fqn, self._run.payloads)
        self._records.append(
            TensorRecord(
                seq=self._seq,
                key=key,
                shape=value.shape,
                dtype=str(value.dtype),
                layout=layout,
                digest=digest_host(
                    host,
                    statistics=self._run.level.includes(Level.STATISTICS),
                    sketch=self._run.level.includes(Level.SKETCH),
                ),
            )
        )
        if whole:
            self._payloads[self._seq] = host
        self._seq += 1

    def end_step(self, step: int) -> None:
        """Write what was seen since the last step."""
        self._writer.write_step(step, self._records, self._payloads, microbatches=self._run.microbatches)
        self._records, self._payloads = [], {}

    def close(self) -> None:
        """Say that the run ended as planned."""
        self._writer.close(complete=True)


def _effective(run: FakeRun, parameters: Mapping[str, Array]) -> dict[str, Any]:
    """Return the optimizer's groups, as Megatron makes them: with weight decay and without."""

    def group(multiplier: float, names: Sequence[str]) -> dict[str, Any]:
        numbers = {"lr": run.lr, "weight_decay": multiplier * run.weight_decay}
        kind, own = "AdamW", {"beta1": 0.9, "beta2": run.beta2, "eps": run.eps}
        if run.momentum is not None:
            kind = "torch.optim.sgd.SGD"
            own = {"momentum": run.momentum, "dampening": run.dampening, "nesterov": run.nesterov}
        listed = [name for name in names for _ in range(2 if name in run.twice else 1)]
        return {
            "optimizer": kind,
            "settings": {"wd_mult": multiplier, "lr_mult": 1.0, **own, **numbers},
            "parameters": [{"fqn": n, "dtype": "float32", "copy": False, "range": None} for n in listed],
        }

    trained = [name for name in parameters if name not in run.frozen | run.ungrouped]
    decayed = [name for name in trained if name not in run.undecayed]
    others = [name for name in trained if name in run.undecayed]
    groups = [group(multiplier, names) for multiplier, names in ((1.0, decayed), (0.0, others)) if names]
    return {"groups": groups, "tied": {}, "modules": []}


def _bits(value: Array) -> Array:
    return np.ascontiguousarray(value).view(f"uint{8 * value.dtype.itemsize}").reshape(value.shape)


def _layout(value: Array) -> Layout:
    """Return how an array lies: its strides, or those of C order where it is contiguous."""
    if not value.flags.c_contiguous:
        stride = tuple(step // value.dtype.itemsize for step in value.strides)
        return Layout(stride=stride, contiguous=False)
    steps = [1]
    for size in reversed(value.shape[1:]):
        steps.insert(0, steps[0] * size)
    return Layout(stride=tuple(steps[: value.ndim]))


class _Trainer:
    """The network, its gradient and its optimizer."""

    def __init__(self, run: FakeRun, directory: Path) -> None:
        self.run = run
        self.recorders = [_Recorder(run, directory, rank) for rank in range(run.ranks)]
        self.data = np.random.default_rng(run.seed + 1000)
        draw = np.random.default_rng(run.seed)
        shapes: dict[str, tuple[int, ...]] = {f"{EMBEDDING}.weight": (_VOCABULARY, _HIDDEN)}
        for layer in range(_LAYERS):
            shapes[f"{_linear(layer)}.weight"] = (_HIDDEN, _HIDDEN)
            shapes[f"{_linear(layer)}.bias"] = (_HIDDEN,)
        shapes[f"{HEAD}.weight"] = (_VOCABULARY, _HIDDEN)
        initial = {name: draw.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}
        moments = {name: (np.zeros_like(value), np.zeros_like(value)) for name, value in initial.items()}
        self.parameters = [dict(initial) for _ in self.recorders]
        self.moments = [dict(moments) for _ in self.recorders]

    def train(self) -> None:
        """Run every step on every rank, and close the records."""
        for recorder, parameters in zip(self.recorders, self.parameters, strict=True):
            recorder.declare(parameters)
            for name, value in parameters.items():
                key = RecordKey(step=INIT_STEP, phase=Phase.INIT, fqn=name, role=Role.PARAM)
                parameters[name] = recorder.see(key, value)
            recorder.end_step(INIT_STEP)
        for step in range(self.run.steps):
            self._step(step)
        for recorder in self.recorders:
            recorder.close()

    def _step(self, step: int) -> None:
        gradients, losses = [], []
        for recorder in self.recorders:
            state = np.frombuffer(f"seed {self.run.seed} step {step}".encode(), np.uint8)
            recorder.see(
                RecordKey(step=step, phase=Phase.BATCH, fqn="rng", role=Role.RNG, slot="numpy"), state
            )
            passes = [_Microbatch(self, recorder, step, number) for number in range(self.run.microbatches)]
            buffers = {name: np.zeros_like(self.parameters[0][name]) for name in self.trained()}
            main_grad = {} if self.run.dot_grad else buffers
            for one in passes:
                main_grad = one.run(main_grad)
            gradients.append({name: main_grad[name] for name in buffers})
            losses.append(np.mean([one.loss for one in passes], dtype=np.float32))
        average = np.asarray(np.mean(losses, dtype=np.float32))
        reduced = {
            name: (sum(g[name] for g in gradients) / np.float32(len(gradients) * self.run.microbatches))
            for name in self.trained()
        }
        for recorder in self.recorders:
            self._update(recorder, step, dict(reduced), average)
            recorder.end_step(step)

    def trained(self) -> list[str]:
        """Return the names of the parameters that are trained."""
        return [name for name in self.parameters[0] if name not in self.run.frozen]

    def _update(self, recorder: _Recorder, step: int, gradients: dict[str, Array], loss: Array) -> None:
        def key(phase: Phase, role: Role, fqn: str, slot: str = "") -> RecordKey:
            return RecordKey(step=step, phase=phase, role=role, fqn=fqn, slot=slot)

        for name in gradients:
            gradients[name] = recorder.see(key(Phase.REDUCE, Role.REDUCED_GRAD, name), gradients[name])
        norm = np.asarray(np.sqrt(sum(np.square(g, dtype=np.float64).sum() for g in gradients.values())))
        norm = recorder.see(key(Phase.CLIP, Role.GRAD_NORM, "grad_norm"), norm.astype(np.float32))
        factor = np.float32(min(1.0, 1.0 / (float(norm) + 1e-6)))
        for name in gradients:
            clipped = key(Phase.CLIP, Role.MAIN_GRAD, name, "clipped")
            gradients[name] = recorder.see(clipped, gradients[name] * factor)
        for name in [name for name in gradients if name not in self.run.ungrouped]:
            update = self._adam if self.run.momentum is None else self._descend
            update(recorder, step, name, gradients[name])
        recorder.see(key(Phase.LOSS, Role.LOSS, "loss", "lm loss"), loss)

    def _adam(self, recorder: _Recorder, step: int, name: str, gradient: Array) -> None:
        """Apply AdamW (Loshchilov and Hutter 2019, algorithm 2) to one parameter."""

        def see(role: Role, value: Array, slot: str = "") -> Array:
            key = RecordKey(step=step, phase=Phase.OPTIMIZER, role=role, fqn=name, slot=slot)
            return recorder.see(key, value)

        run = self.run
        numbers = {
            "lr": run.lr,
            "weight_decay": 0.0 if name in run.undecayed else run.weight_decay,
            "eps": run.eps,
            "beta1": 0.9,
            "beta2": run.beta2,
        }
        given = {slot: float(see(Role.HYPERPARAMETER, np.asarray(v), slot)) for slot, v in numbers.items()}
        see(Role.HYPERPARAMETER, np.asarray(float(step)), "step")  # updates before this one
        parameters, moments = self.parameters[recorder.rank], self.moments[recorder.rank]
        first, second = moments[name]
        f32 = np.float32
        first = see(Role.EXP_AVG, f32(given["beta1"]) * first + f32(1 - given["beta1"]) * gradient)
        second = see(Role.EXP_AVG_SQ, f32(given["beta2"]) * second + f32(1 - given["beta2"]) * gradient**2)
        mean = first / f32(1 - given["beta1"] ** (step + 1))
        size = np.sqrt(second / f32(1 - given["beta2"] ** (step + 1))) + f32(given["eps"])
        kept = parameters[name] * f32(1 - given["lr"] * given["weight_decay"])
        updated = kept - f32(given["lr"]) * mean / size
        parameters[name] = see(Role.PARAM, parameters[name] if name in run.unwritten else updated)
        moments[name] = (first, second)

    def _descend(self, recorder: _Recorder, step: int, name: str, gradient: Array) -> None:
        """Apply gradient descent with momentum (``torch.optim.SGD``) to one parameter."""

        def see(role: Role, value: Array, slot: str = "") -> Array:
            key = RecordKey(step=step, phase=Phase.OPTIMIZER, role=role, fqn=name, slot=slot)
            return recorder.see(key, value)

        run, f32 = self.run, np.float32
        assert run.momentum is not None
        decay = 0.0 if name in run.undecayed else run.weight_decay
        numbers = {"lr": run.lr, "weight_decay": decay, "momentum": run.momentum}
        given = {slot: float(see(Role.HYPERPARAMETER, np.asarray(v), slot)) for slot, v in numbers.items()}
        see(
            Role.HYPERPARAMETER, np.asarray(0.0), "step"
        )  # torch's SGD counts nothing, which is recorded as 0
        parameters, moments = self.parameters[recorder.rank], self.moments[recorder.rank]
        entering = gradient + f32(given["weight_decay"]) * parameters[name]
        along, momentum = entering, f32(given["momentum"])
        if run.momentum:
            kept = momentum * moments[name][0] + f32(1 - run.dampening) * entering
            kept = see(Role.EXP_AVG, kept if step else entering, MOMENTUM)
            moments[name] = (kept, kept)
            along = entering + momentum * kept if run.nesterov else kept
        updated = parameters[name] - f32(given["lr"]) * along
        parameters[name] = see(Role.PARAM, parameters[name] if name in run.unwritten else updated)


class _Microbatch:
    """One forward and backward pass of one rank."""

    def __init__(self, trainer: _Trainer, recorder: _Recorder, step: int, number: int) -> None:
        self._weights = trainer.parameters[recorder.rank]
        self._trained = set(trainer.trained())
        self._run = trainer.run
        self._recorder, self._step, self._number = recorder, step, number
        self.loss = np.float32(0)
        tokens = trainer.data.integers(0, _VOCABULARY, _TOKENS + 1)
        self._tokens, self._labels = tokens[:-1], tokens[1:]

    def _see(
        self, phase: Phase, role: Role, fqn: str, value: Array, slot: str = "", *, recomputed: bool = False
    ) -> Array:
        key = RecordKey(
            step=self._step,
            microbatch=self._number,
            phase=phase,
            role=role,
            fqn=fqn,
            slot=slot,
            recomputed=recomputed,
        )
        return self._recorder.see(key, value)

    def run(self, main_grad: dict[str, Array]) -> dict[str, Array]:
        """Return ``main_grad`` (of what has one yet) with the gradient of this microbatch added."""
        tokens = self._see(Phase.BATCH, Role.BATCH, "batch", self._tokens, "tokens")
        labels = self._see(Phase.BATCH, Role.BATCH, "batch", self._labels, "labels")
        activations, logits = self._forward(tokens)
        probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
        probabilities /= probabilities.sum(axis=1, keepdims=True)
        picked = probabilities[np.arange(_TOKENS), labels]
        loss = np.asarray(-np.log(picked).mean(), np.float32)
        self.loss = np.float32(self._see(Phase.LOSS, Role.LOSS, "loss", loss))
        gradient = probabilities.copy()
        gradient[np.arange(_TOKENS), labels] -= 1
        gradients = self._backward(tokens, activations, (gradient / _TOKENS).astype(np.float32))
        return self._accumulate(main_grad, gradients)

    def _forward(self, tokens: Array) -> tuple[list[Array], Array]:
        self._see(Phase.FPROP, Role.INPUT, "", tokens, "0")
        read = self._see(Phase.FPROP, Role.INPUT, EMBEDDING, tokens, "0")
        embedded = self._weights[f"{EMBEDDING}.weight"][read]
        hidden = self._see(Phase.FPROP, Role.OUTPUT, EMBEDDING, embedded, "0")
        inputs = []
        for layer in range(_LAYERS):
            name, outer = _linear(layer), f"decoder.layers.{layer}"
            hidden = self._see(Phase.FPROP, Role.INPUT, outer, hidden, "0")
            inner = self._see(Phase.FPROP, Role.INPUT, name, hidden, "0")
            inputs.append(inner)
            linear = inner @ self._weights[f"{name}.weight"].T + self._weights[f"{name}.bias"]
            linear = self._see(Phase.FPROP, Role.OUTPUT, name, linear, "0")
            inputs.append(linear)
            hidden = self._see(Phase.FPROP, Role.OUTPUT, outer, hidden + np.tanh(linear), "0")
        hidden = self._see(Phase.FPROP, Role.INPUT, HEAD, hidden, "0")
        logits = self._see(Phase.FPROP, Role.OUTPUT, HEAD, hidden @ self._weights[f"{HEAD}.weight"].T, "0")
        self._see(Phase.FPROP, Role.OUTPUT, "", logits, "0")
        return [*inputs, hidden], logits

    def _backward(self, tokens: Array, activations: list[Array], gradient: Array) -> dict[str, Array]:
        gradients: dict[str, Array] = {}
        gradient = self._see(Phase.DGRAD, Role.GRAD_OUTPUT, "", gradient, "0")
        *inner, hidden = activations
        flow = self._linear_backward(HEAD, gradient, hidden, gradients, bias=False)
        for layer in reversed(range(_LAYERS)):
            outer = f"decoder.layers.{layer}"
            flow = self._see(Phase.DGRAD, Role.GRAD_OUTPUT, outer, flow, "0")
            received, linear = inner[2 * layer], inner[2 * layer + 1]
            if self._run.recompute:
                linear = self._see(Phase.FPROP, Role.OUTPUT, _linear(layer), linear, "0", recomputed=True)
            through = (flow * (1 - np.tanh(linear) ** 2)).astype(np.float32)
            flow = flow + self._linear_backward(_linear(layer), through, received, gradients, bias=True)
            flow = self._see(Phase.DGRAD, Role.GRAD_INPUT, outer, flow, "0")
        flow = self._see(Phase.DGRAD, Role.GRAD_OUTPUT, EMBEDDING, flow, "0")
        name = f"{EMBEDDING}.weight"
        if name in self._trained:
            dense = np.zeros_like(self._weights[name])
            np.add.at(dense, tokens, flow)
            gradients[name] = self._see(Phase.WGRAD, Role.WGRAD, name, dense)
        return gradients

    def _linear_backward(
        self, module: str, gradient: Array, received: Array, gradients: dict[str, Array], *, bias: bool
    ) -> Array:
        gradient = self._see(Phase.DGRAD, Role.GRAD_OUTPUT, module, gradient, "0")
        flow = gradient @ self._weights[f"{module}.weight"]
        flow = self._see(Phase.DGRAD, Role.GRAD_INPUT, module, flow, "0")
        name = f"{module}.weight"
        if name in self._trained:
            left = self._see(Phase.WGRAD, Role.GRAD_OUTPUT, module, gradient)
            right = self._see(Phase.WGRAD, Role.INPUT, module, received)
            weight = self._see(Phase.WGRAD, Role.WGRAD, module, left.T @ right)
            lying = np.asfortranarray(weight) if name in self._run.transposed else weight
            gradients[name] = self._see(Phase.WGRAD, Role.WGRAD, name, lying)
        if bias and f"{module}.bias" in self._trained:
            summed = gradient.sum(axis=0)
            gradients[f"{module}.bias"] = self._see(Phase.WGRAD, Role.BGRAD, f"{module}.bias", summed)
        return flow

    def _accumulate(self, main_grad: dict[str, Array], gradients: dict[str, Array]) -> dict[str, Array]:
        total = {}
        for name, gradient in gradients.items():
            after = gradient
            if name in main_grad:
                before = self._see(Phase.ACCUMULATE, Role.MAIN_GRAD, name, main_grad[name], "before")
                after = self._add(before, gradient)
            total[name] = self._see(Phase.ACCUMULATE, Role.MAIN_GRAD, name, after, "after")
        return total

    def _add(self, before: Array, gradient: Array) -> Array:
        """Return the sum in C order; with the planted bug of what lies in memory, element by element."""
        if not self._run.strides_ignored:
            return np.ascontiguousarray(before + gradient)
        lying = before.ravel(order="K") + gradient.ravel(order="K")
        return np.asarray(lying.reshape(before.shape))


def _linear(layer: int) -> str:
    return f"decoder.layers.{layer}.mlp.linear_fc1"
