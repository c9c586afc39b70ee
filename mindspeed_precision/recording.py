"""Recording: one rank's observers, recorder and files, put together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from mindspeed_precision import capture
from mindspeed_precision.backends.capture_base import CaptureBackend
from mindspeed_precision.backends.detect import capture_backend
from mindspeed_precision.capture.activations import ActivationPlacer
from mindspeed_precision.capture.batch import observe_random_states, observe_step_losses
from mindspeed_precision.capture.between_steps import BetweenSteps
from mindspeed_precision.capture.buffers import observe_buffers
from mindspeed_precision.capture.configuration import (
    effective_configuration,
    environment,
    parallel_coordinates,
    plain,
    versions,
)
from mindspeed_precision.capture.containment import Containment, Failure
from mindspeed_precision.capture.context import CaptureContext, activated
from mindspeed_precision.capture.effective import effective_state
from mindspeed_precision.capture.layout_rules import load_layout_rules
from mindspeed_precision.capture.names import Names, canonical_names
from mindspeed_precision.capture.optimizer import observe_grad_norm, observe_parameters
from mindspeed_precision.capture.placement import placements
from mindspeed_precision.config import Settings
from mindspeed_precision.dump.attempts import begin_attempt
from mindspeed_precision.dump.format import SCHEMA
from mindspeed_precision.dump.writer import RankWriter, update_manifest, write_manifest
from mindspeed_precision.errors import ConfigError, PrecisionError
from mindspeed_precision.export.live import LiveExport, open_live
from mindspeed_precision.live import Shape
from mindspeed_precision.live.reporter import Reporter
from mindspeed_precision.record.elements import width_of
from mindspeed_precision.record.recorder import Recorder
from mindspeed_precision.record.watch import Onlooker, Onlookers, Watch
from mindspeed_precision.records import (
    INIT_STEP,
    Finding,
    ParameterDeclaration,
    Phase,
    Placement,
    RankCoordinates,
)
from mindspeed_precision.shortfalls import Shortfalls

PARALLEL_LINEARS = ("ColumnParallelLinear", "RowParallelLinear")
EMBEDDINGS = ("VocabParallelEmbedding",)


class Recording:
    """What one rank records. ``Recording.open`` attaches it; ``detach`` takes every hook away again."""

    def __init__(
        self,
        *,
        context: CaptureContext,
        writer: RankWriter,
        settings: Settings,
        rank: int,
        reporter: Reporter,
        export: LiveExport | None,
    ) -> None:
        self.context = context
        self.reporter = reporter
        self._export = export
        self._writer = writer
        self._settings = settings
        self.rank = rank
        self._kept: list[Any] = []
        self._activation = activated(context)
        requires_grad = context.backend.requires_grad
        self._trainable = [fqn for fqn, parameter in context.names.parameters if requires_grad(parameter)]
        self._shortfalls = Shortfalls(rank)
        self._first_step: int | None = None
        self._config: Mapping[str, Any] = {}
        self.steps_recorded = 0
        self._between_steps = BetweenSteps(rank)
        self._drawn: list[Finding] = []
        self._detached = False

    @classmethod
    def open(
        cls,
        chunks: list[Any],
        optimizer: Any,
        settings: Settings,
        *,
        label: str,
        created: str,
        audit: list[dict[str, Any]],
        reference: Mapping[str, Any] | None = None,
        containment: Containment | None = None,
    ) -> Recording | None:
        """Create the run directory (rank 0), attach this rank's observers, record the initial parameters.

        Returns None on a rank that ``settings.ranks`` leaves out. ``reference`` says which steps begin
        with the state of another run.

        Raises:
            ConfigError: ``settings.ranks`` leaves out every rank, or a layout rule does not fit its schema.
            DumpError: the run directory exists and is not empty, and this is no restart; on every rank alike.
        """
        backend = capture_backend()
        coordinates = parallel_coordinates(backend)
        if not any(rank in settings.ranks for rank in range(coordinates.world_size)):
            raise ConfigError(
                "no rank of this run records",
                where="ranks",
                found=repr(settings.ranks.text),
                expected=f"some of 0-{coordinates.world_size - 1}",
            )
        rules = load_layout_rules(settings.patches.search_path)
        manifest: dict[str, Any] = {"patches": audit, "reference": reference}

        def create() -> Path:
            manifest.update(
                _manifest(backend, chunks, optimizer, settings, coordinates, label=label, created=created)
            )
            directory = begin_attempt(settings.out, settings.restart)
            write_manifest(directory, manifest)
            return directory

        settings = replace(settings, out=_on_first_rank(backend, create))
        names = canonical_names(backend, chunks)
        if coordinates.rank not in settings.ranks:
            return None
        queue = settings.write_queue_mib << 20
        writer = RankWriter(settings.out, coordinates=coordinates, queue=queue)
        settings = replace(settings, capture=settings.capture.on_rank(coordinates.rank))
        placed = placements(backend, names, coordinates)
        writer.declare_parameters(_declarations(backend, names, placed))
        writer.write_effective(effective_state(backend, names, optimizer))
        reporter = Reporter(settings, coordinates, manifest.get("config", {}).get("megatron_args", {}))
        export = open_live(settings.export, settings.out, rank=coordinates.rank)
        looking: list[Onlooker] = [] if export is None else [export]
        if settings.capture.live_warnings:
            looking.insert(0, _watch(backend, names, coordinates, reporter))
        watch = Onlookers(looking) if looking else None
        recorder = Recorder(backend=backend, writer=writer, settings=settings, watch=watch)
        placer = ActivationPlacer(
            backend=backend, rules=rules, names=names, coordinates=coordinates, parameters=placed
        )
        context = CaptureContext(
            backend=backend,
            names=names,
            recorder=recorder,
            settings=settings.capture,
            placements=placed,
            placer=placer,
            containment=containment,
        )
        recording = cls(
            context=context,
            writer=writer,
            settings=settings,
            rank=coordinates.rank,
            reporter=reporter,
            export=export,
        )
        recording._config = manifest.get("config", {})  # only the first rank writes it
        recording._attach(chunks, optimizer, audit)
        return recording

    def _attach(self, chunks: list[Any], optimizer: Any, audit: list[dict[str, Any]]) -> None:
        self._activation.__enter__()
        try:
            self._kept = capture.attach(self.context, chunks, optimizer)
            self._record_start()
        except Exception as error:
            failure = Failure.of("the start of the capture", error)
            with suppress(Exception):  # what stands in the way is raised
                self.abandon(failure, step=INIT_STEP, findings=(), audit=audit)
            raise

    def _record_start(self) -> None:
        """Record the initial parameters, and tell from what they took what a step will take."""
        recorder, writer = self.context.recorder, self._writer
        before = writer.records, writer.index_bytes
        began = time.perf_counter()
        recorder.begin_step(INIT_STEP)
        observe_parameters(self.context, Phase.INIT)
        observe_buffers(self.context, Phase.INIT)
        recorder.end_step()
        taken = time.perf_counter() - began
        backend, names = self.context.backend, self.context.names
        held = [
            (fqn, tuple(one.shape), backend.dtype(one), backend.requires_grad(one))
            for fqn, one in names.parameters
        ]
        self.reporter.start(
            Shape.of(
                [(fqn, shape, dtype) for fqn, shape, dtype, trained in held if trained],
                [fqn for fqn, _ in names.modules],
                self._config.get("megatron_args", {}),
            ),
            records=writer.records - before[0],
            index_bytes=writer.index_bytes - before[1],
            parameter_bytes=sum(math.prod(shape) * width_of(dtype) for _, shape, dtype, _ in held),
            seconds=taken,
        )

    def begin_step(self, step: int) -> None:
        """Begin step ``step``."""
        self.context.recorder.begin_step(step)
        self.context.clock.begin_step()
        if self.context.settings.batch:
            self._drawn += self._between_steps.begin_step(step)
            observe_random_states(self.context)

    def log(self, *, loss: Any, grad_norm: Any) -> None:
        """Record what the loop itself prints of this step; None is nothing."""
        if loss is not None:
            observe_step_losses(self.context, {"lm loss": loss})
        observe_grad_norm(self.context, grad_norm)

    def end_step(self) -> list[Finding]:
        """End the step, write its records, return what was found missing in it for the first time."""
        began = time.perf_counter()
        clock, step = self.context.clock, self.context.recorder.step
        self._first_step = step if self._first_step is None else self._first_step
        observe_buffers(self.context, Phase.OPTIMIZER)
        clock.end_step()
        microbatches = clock.microbatches
        findings = self._shortfalls.lost(self.context.recorder.end_step())
        findings += self._drawn
        self._drawn = []
        self.steps_recorded += step in self._settings.steps
        if self.context.settings.batch:
            self._between_steps.end_step()
        if self.context.settings.wgrad:
            gaps = self.context.coverage.end_step(step, self._trainable, microbatches)
            findings += self._shortfalls.without_gradient(gaps)
            if step == self._first_step and not microbatches:
                findings.append(self._shortfalls.no_forward())
            findings += self._shortfalls.unseen_gemms(self.context.coverage.take_unseen_gemms())
        self.reporter.step(step, findings, began=began)
        return findings

    def excused_patches(self) -> tuple[str, ...]:
        """Return the patches that this rank's model cannot call: it has no trainable parallel linear."""
        linears = self._modules_of(PARALLEL_LINEARS)
        weights = [getattr(module, "weight", None) for module in linears]
        if None in weights:  # a tied output layer: it uses the embedding's
            weights += [module.weight for module in self._modules_of(EMBEDDINGS)]
        trainable = any(
            weight is not None and self.context.backend.requires_grad(weight) for weight in weights
        )
        return () if trainable else ("linear_forward", "linear_backward")

    def _modules_of(self, kinds: Sequence[str]) -> list[Any]:
        modules = (module for _, module in self.context.names.modules)
        return [m for m in modules if any(kind.__name__ in kinds for kind in type(m).__mro__)]

    def update(self, *, findings: Sequence[Finding], audit: list[dict[str, Any]]) -> None:
        """Bring ``run.json`` up to date (rank 0), or this rank's own findings."""
        plain_findings = [_finding(finding) for finding in findings]
        if self.rank == 0:
            changes: dict[str, Any] = {
                "findings": plain_findings,
                "patches": audit,
                "first_step": self._first_step,
            }
            if self.context.schedule:  # it is known once the loop has stepped it
                changes["config"] = {**self._config, "schedule": self.context.schedule}
            update_manifest(self._settings.out, changes)
        elif plain_findings:
            self._writer.write_findings(plain_findings)

    def close(
        self,
        *,
        complete: bool,
        findings: Sequence[Finding],
        audit: list[dict[str, Any]],
        error: str = "",
    ) -> None:
        """Close this rank's files; ``complete``: training ended well, else ``error`` names what ended it."""
        self.update(findings=findings, audit=audit)
        self.context.recorder.close(complete=complete)
        if self._export is not None:
            self._export.close()
        self.reporter.end(
            findings,
            records=self._writer.records,
            index_bytes=self._writer.index_bytes,
            payload_bytes=self._writer.payload_bytes,
            parameters=len(self._trainable),
            gaps=len(self.context.coverage.gaps),
            error=error,
        )

    def abandon(
        self,
        failure: Failure,
        *,
        step: int,
        findings: Sequence[Finding],
        audit: list[dict[str, Any]],
    ) -> None:
        """End early, without a seal: say why where a reader looks, keep the steps that were whole.

        Raises:
            DumpError: the reason cannot be written; all else was done.
        """
        self.detach()
        self.context.recorder.abandon()
        if self._export is not None:
            with suppress(Exception):  # of another library; what ended the capture is what counts
                self._export.close()
        self.update(findings=[*findings, self._shortfalls.capture_ended(failure, step)], audit=audit)

    def detach(self) -> None:
        """Remove every hook; a second call does nothing."""
        if self._detached:
            return
        self._detached = True
        self.context.clock.end_step()  # hooks on tensors that live on must see that it is over
        capture.detach(self._kept)
        self._kept = []
        self._activation.__exit__(None, None, None)


def _watch(backend: CaptureBackend, names: Names, coordinates: RankCoordinates, reporter: Reporter) -> Watch:
    scaled = any(backend.dtype(parameter) == "float16" for _, parameter in names.parameters)
    return Watch(where=coordinates, scaled=scaled, tell=reporter.warn)


def _finding(finding: Finding) -> dict[str, Any]:
    plain_finding: dict[str, Any] = plain(asdict(finding))
    return plain_finding


def _declarations(
    backend: CaptureBackend, names: Names, placed: Mapping[str, Placement | None]
) -> list[ParameterDeclaration]:
    return [
        ParameterDeclaration(
            fqn=fqn,
            shape=tuple(parameter.shape),
            dtype=backend.dtype(parameter),
            trainable=backend.requires_grad(parameter),
            placement=placed.get(fqn),
        )
        for fqn, parameter in names.parameters
    ]


def _numerics(backend: CaptureBackend, names: Names) -> dict[str, Any]:
    return backend.numerics(names.parameters[0][1]) if names.parameters else {}


def _manifest(
    backend: CaptureBackend,
    chunks: list[Any],
    optimizer: Any,
    settings: Settings,
    coordinates: RankCoordinates,
    *,
    label: str,
    created: str,
) -> dict[str, Any]:
    import mindspeed_precision

    return {
        "schema": SCHEMA,
        "created": created,
        "label": label,
        "package_version": mindspeed_precision.__version__,
        "framework": {"name": backend.framework, "version": backend.version_text(), "api": backend.api},
        "versions": versions(),
        "parallel": coordinates.sizes(),
        "settings": settings.source,
        "config": effective_configuration(chunks, optimizer),
        "numerics": _numerics(backend, canonical_names(backend, chunks)),
        "environment": environment(),
        "remedies": list(settings.remedies),
        "findings": [],
    }


def _on_first_rank(backend: CaptureBackend, create: Callable[[], Path]) -> Path:
    """Create the run on rank 0; every rank learns where, or why not, before any of them writes a line."""
    failure: Exception | None = None
    created = Path()
    if backend.rank()[0] == 0:
        try:
            created = create()
        except PrecisionError as error:
            failure = error
        except Exception as error:  # noqa: BLE001  the others wait to be told; it may not be picklable
            failure = RuntimeError(f"{type(error).__name__}: {error}")
    failure, created = backend.from_first_rank((failure, created))
    if failure is not None:
        raise failure
    return Path(created)
