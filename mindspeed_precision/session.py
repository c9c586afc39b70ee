"""Session: everything that one debugged run owns, from the first patch to the last line of its dump.

``pretrain`` drives one through Megatron's loop. Around any other loop::

    with Session(model=model, optimizer=optimizer, out="runs/candidate") as session:
        for batch in batches:
            ...  # forward, backward, optimizer.step()
            session.step()
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from mindspeed_precision.backends.detect import TORCH, capture_backend, loaded_framework, observing
from mindspeed_precision.backends.npu import npu_module
from mindspeed_precision.capture.containment import Containment, Failure
from mindspeed_precision.config import Settings, load_settings
from mindspeed_precision.counting import count
from mindspeed_precision.dump.attempts import end_attempt
from mindspeed_precision.errors import ConfigError, PatchError, PrecisionError
from mindspeed_precision.patching.declare import Effect, load_declarations, select, shipped_groups
from mindspeed_precision.patching.session import PatchAudit, PatchSession
from mindspeed_precision.records import Finding, Severity

CORE_PATCHES = ("wgrad", "fused_wgrad", "collectives", "reduce", "optimizer", "data")
LOOP_PATCHES = ("loop", "loop_mindspeed_llm", "loop_mindspeed_mm")


class Session:
    """One debugged run.

    Args:
        model: the model, or the list of model chunks as Megatron holds them; None when the loop's patches
            will attach it (``pretrain``).
        optimizer: the optimizer that the loop steps: Megatron's or ``torch.optim``'s; or None.
        settings: frozen settings; or give ``config``, ``overrides`` and ``out`` as on the command line.
        label: free text that names the run in reports.
        first_step: of a loop of one's own that goes on from a checkpoint: the step that it begins with.

    What fails in here while the training runs ends the capture, which is said once; the training goes on.

    Raises:
        ConfigError: the settings are wrong, or ``model`` or ``optimizer`` is none of the framework's.
        DeterminismError: a switch was set too late (``determinism.strict``).
        PatchError: a patch cannot be installed.
        DumpError: the run directory exists and is not empty.
    """

    def __init__(
        self,
        *,
        model: Any = None,
        optimizer: Any = None,
        settings: Settings | None = None,
        config: str | Path | None = None,
        overrides: Sequence[str] = (),
        out: str | Path | None = None,
        label: str = "",
        first_step: int = 0,
    ) -> None:
        self.settings = settings or load_settings(config, overrides, out)
        self.label = label
        self.findings: list[Finding] = []
        self._model, self._optimizer = model, optimizer
        self._driven = model is None
        self._recording: Any = None
        self._switches: dict[str, Any] = {}
        self._patches: PatchSession | None = None
        self._stack = ExitStack()
        self._steps = 0
        self._forcing: Any = None
        self._step = first_step - 1
        self.containment = Containment(self._say)

    @property
    def context(self) -> Any:
        """The observers of this rank (a ``CaptureContext``), or None when it does not record."""
        return None if self._recording is None else self._recording.context

    @property
    def finished(self) -> bool:
        """Whether the steps until ``stop_after`` were made: a loop of one's own may end then."""
        last = self.settings.stop_after
        return last is not None and self._step > last

    def __enter__(self) -> Session:
        self._stack.enter_context(observing(self._model))
        try:
            self._pin()
            self._install_patches()
            if not self._driven:
                self.attach(self._model, self._optimizer)
                self.begin_training()
                self.begin_step(None)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_well = error is None or (isinstance(error, SystemExit) and not error.code)
        if ended_well:
            end_attempt(self.settings.out)
        if ended_well and self._steps and self._recording is not None and not self._recording.steps_recorded:
            self._say_that_nothing_was_recorded()
        try:
            if self._settled() is not None:
                ended_by = "" if ended_well or error is None else type(error).__name__
                self.containment.run("the end of the run", self._close, ended_well, ended_by)
            self._settled()
        finally:
            self._stack.close()
        if ended_well and self._recording is not None and not self._steps:
            raise PatchError("no training step was seen", remedy="call session.step() after each step")

    def _say_that_nothing_was_recorded(self) -> None:
        """Report that no step of ``steps`` was made: a training that ended well has not failed by that."""
        last = self._step - (not self._driven)  # a loop of one's own has begun the next one
        first = last - self._steps + 1
        finding = Finding(
            id="coverage.no_step_recorded",
            severity=Severity.WARNING,
            confidence=1.0,
            title=f"none of the {count(self._steps, 'step')} was recorded: the training made steps {first} "
            f"to {last}, and steps={self.settings.steps.text} was to be recorded",
            remedy=f"name steps from {first} to {last} in `steps`: they count from 0, and from where a "
            "checkpoint left off",
        )
        self.findings.append(finding)
        if capture_backend().rank()[0] == 0:
            sys.stderr.write(f"mindspeed-precision: {finding.title}; {finding.remedy}\n")

    def _close(self, ended_well: bool, ended_by: str) -> None:
        self._recording.close(
            complete=ended_well, findings=self.findings, audit=self._audit(), error=ended_by
        )

    def before_setup(self) -> None:
        """The model is about to be built: settings that it reads from Megatron's arguments are made now."""
        if self.settings.determinism.enabled and self.settings.determinism.zero_dropout:
            from megatron.training import get_args  # the loop that calls us has imported it

            from mindspeed_precision.determinism import zero_dropout_arguments

            with self._meant():
                zero_dropout_arguments(get_args())

    def attach(self, model: Any, optimizer: Any) -> None:
        """Put the observers around ``model`` (or a list of chunks) and ``optimizer``; record parameters."""
        chunks = list(model) if isinstance(model, (list, tuple)) else [model]
        with self._meant():
            self._prepare(chunks, optimizer)
        with self._contained("the start of the capture"):
            self._record(chunks, optimizer)
        self._settled()

    def _prepare(self, chunks: list[Any], optimizer: Any) -> None:
        """Change the model as the settings say: nothing of that may fail by halves."""
        from mindspeed_precision.determinism import zero_dropout

        if self._recording is not None:
            raise PatchError("a second model was built in one run", remedy="use one Session per model")
        if self.settings.determinism.enabled and self.settings.determinism.zero_dropout:
            zero_dropout(chunks)
        if self.settings.init_from:
            from mindspeed_precision.equal_start import start_from

            start_from(self.settings.init_from, chunks, optimizer)
        if self.settings.reference:
            self._force(chunks, optimizer)
        elif self.settings.perturb.enabled:
            from mindspeed_precision.perturbation import perturb

            perturb(self.settings.perturb, chunks, optimizer)

    def _record(self, chunks: list[Any], optimizer: Any) -> None:
        from mindspeed_precision.recording import Recording  # imports the framework

        recording = Recording.open(
            chunks,
            optimizer,
            self.settings,
            label=self.label,
            created=_now(),
            audit=self._audit(),
            reference=None if self._forcing is None else self._forcing.manifest,
            containment=self.containment,
        )
        if recording is not None:
            self._stack.callback(recording.detach)
            self._recording = recording
            recording.reporter.found(self.findings, when="before the first step")

    def _force(self, chunks: Sequence[Any], optimizer: Any) -> None:
        """Take the state of the reference, before the first step and each one after it."""
        from mindspeed_precision.capture.loop import loaded_step
        from mindspeed_precision.equal_start import TeacherForcing

        first = loaded_step() if self._driven else self._step + 1
        self._forcing = TeacherForcing(
            self.settings.reference,
            chunks,
            optimizer,
            steps=self.settings.steps,
            first_step=first,
            noise=self.settings.perturb,
        )
        self._forcing.before(first)

    def begin_training(self) -> None:
        """Check that every patch is in place; the loop is about to make its first step."""
        if self._patches is not None and self.containment.failure is None:
            with self._contained("the check of the patches"):
                self._patches.require_healthy(at="start")

    def begin_step(self, step: int | None) -> None:
        """Begin step ``step``, 0-based; None: the one after the last.

        Raises:
            SystemExit: Megatron's loop has made the steps until ``stop_after``; with status 0.
            ConfigError: it begins after that step.
        """
        self._step = self._step + 1 if step is None else step
        with self._meant():
            if self._driven and self.finished:
                self._stop()
            if self._forcing is not None:
                self._forcing.before(self._step)
        with self._contained("the switches of determinism"):
            self._reassert()
        if self._settled() is not None:
            self.containment.run("the beginning of a step", self._recording.begin_step, self._step)

    def _stop(self) -> None:
        last = self.settings.stop_after
        if not self._steps:
            raise ConfigError(
                "training begins after the step at which it is to stop",
                where="stop_after",
                found=str(last),
                expected=f"at least {self._step}",
                remedy="start from the checkpoint from which the first run started",
            )
        backend = capture_backend()
        backend.wait_for_all()  # a rank that leaves must not be missed by one that still works
        if backend.rank()[0] == 0:
            sys.stderr.write(
                f"mindspeed-precision: training stops here, after step {last}: stop_after={last}; "
                f"recorded in {self.settings.out}\n"
            )
        raise SystemExit(0)

    def end_step(self) -> None:
        """End the step: write its records, name the parameters without dW."""
        if self._settled() is not None:
            found = self.containment.run("the end of a step", self._recording.end_step)
            self.findings += found or []
        self._steps += 1
        if self._steps == 1 and self._settled() is not None:
            with self._contained("the check of the patches"):
                self._check_first_step()
            self.containment.run("run.json", self._update)
        self._settled()

    def _check_first_step(self) -> None:
        if self._patches is not None:
            excused = self._recording.excused_patches()
            self._patches.require_healthy(at="first step", excused=excused)

    def _update(self) -> None:
        self._recording.update(findings=self.findings, audit=self._audit())

    def step(self, *, loss: Any = None, grad_norm: Any = None) -> None:
        """End a training step of a loop of one's own, and begin the next.

        Args:
            loss: what the log prints for this step: a number or a one-element tensor; optional.
            grad_norm: likewise; Megatron's optimizers tell it by themselves.
        """
        if self._recording is not None:
            self.containment.run(
                "the loss of a step", partial(self._recording.log, loss=loss, grad_norm=grad_norm)
            )
        self.end_step()
        self.begin_step(None)

    def forward_step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return Megatron's ``forward_step(data_iterator, model)`` with its batches and losses recorded.

        Only for loops that call Megatron's schedules themselves; ``pretrain`` does it on its own.
        """
        if self.context is None or not self.settings.capture.batch:
            return function
        from mindspeed_precision.capture.batch import observed_forward_step

        return observed_forward_step(self.context, function)

    @contextmanager
    def _meant(self) -> Iterator[None]:
        """Let every error through: what is done changes the training, so that it cannot go on without."""
        try:
            yield
        except Exception as error:
            self.containment.refusal(error)
            raise

    @contextmanager
    def _contained(self, where: str) -> Iterator[None]:
        """Let errors through that refuse a setting, a patch or a directory; any other ends the capture."""
        try:
            yield
        except PrecisionError as error:
            self.containment.refusal(error)
            raise
        except Exception as error:  # noqa: BLE001  the training goes on
            self.containment.failed(where, error)

    def _say(self, failure: Failure) -> None:
        """Tell, where it happens, that this rank records no more; its observers are idle from now on."""
        rank = 0
        if self._recording is not None:
            self._recording.context.clock.end_step()
            rank = self._recording.rank
        sys.stderr.write(
            f"mindspeed-precision: rank {rank}, step {self._step}: capture ends here, training goes on: "
            f"{failure.error} (in {failure.where}); what was written stays readable in {self.settings.out}\n"
        )

    def _settled(self) -> Any:
        """Return the recording; take it away first where capture has ended."""
        if self._recording is not None and self.containment.failure is not None:
            recording, self._recording = self._recording, None
            if self._patches is not None:
                self._patches.silence(but=LOOP_PATCHES)
            with suppress(Exception):  # it was said; a disk that is full refuses this, too
                recording.abandon(
                    self.containment.failure, step=self._step, findings=self.findings, audit=self._audit()
                )
        return self._recording

    def _pin(self) -> None:
        if not self.settings.determinism.enabled:
            return
        from mindspeed_precision.determinism import pin

        report = pin(self.settings.determinism, device=_device())
        self._switches = dict(report.switches)
        self.findings += report.findings

    def _reassert(self) -> None:
        if not self.settings.determinism.enabled:
            return
        from mindspeed_precision.determinism import change_findings, reassert

        self.findings += change_findings(reassert(self._switches), strict=self.settings.determinism.strict)

    def _install_patches(self) -> None:
        groups = [*CORE_PATCHES, *LOOP_PATCHES] if self._driven else self._groups_for_model()
        declarations = load_declarations(self.settings.patches.search_path)
        own = sorted({d.group for d in declarations if d.effect is Effect.OBSERVE} - shipped_groups())
        groups += [*_framework_groups(), *own]
        chosen = select(declarations, groups=groups, names=self.settings.remedies)
        self._patches = PatchSession(
            chosen,
            allow_external=self.settings.patches.allow_external,
            contain=self.containment.call,
        )
        self._patches.install()
        self._stack.callback(self._patches.undo)
        if self._driven:
            from mindspeed_precision.capture.loop import driving

            self._stack.enter_context(driving(self))

    def _groups_for_model(self) -> list[str]:
        """Return the groups that a model given by hand can call: a patch that nobody calls is an error."""
        chunks = self._model if isinstance(self._model, (list, tuple)) else [self._model]
        _require_modules(chunks)
        _require_optimizer(self._optimizer)
        kinds = {kind for chunk in chunks for module in _modules(chunk) for kind in type(module).__mro__}
        groups = []
        if any(kind.__module__.startswith("megatron.core") for kind in kinds):
            groups += ["wgrad", "fused_wgrad", "collectives", "reduce", "data"]
        if _is_megatron(self._optimizer):
            groups.append("optimizer")
        return groups

    def _audit(self) -> list[dict[str, Any]]:
        return [] if self._patches is None else [_audit_line(line) for line in self._patches.audit()]


def _require_modules(chunks: Sequence[Any]) -> None:
    backend = capture_backend()
    for chunk in chunks:
        if not backend.is_module(chunk):
            raise ConfigError(
                "what a Session is to observe is no model",
                where="model",
                found=type(chunk).__name__,
                expected=f"a module of {loaded_framework()}, or a list of the chunks of one",
            )


def _require_optimizer(optimizer: Any) -> None:
    from mindspeed_precision.capture.optimizer_members import members

    backend = capture_backend()
    if optimizer is None or _is_megatron(optimizer) or any(map(backend.is_optimizer, members(optimizer))):
        return
    raise ConfigError(
        "the steps of this optimizer cannot be seen",
        where="optimizer",
        found=type(optimizer).__name__,
        expected=f"an optimizer of {backend.api} or of Megatron, or None",
        remedy="give the optimizer itself, not what wraps it; with None its steps are left out",
    )


def _is_megatron(optimizer: Any) -> bool:
    return type(optimizer).__module__.startswith("megatron.core")


def _modules(module: Any) -> Iterator[Any]:
    """Yield ``module`` and every module inside it, as the framework of this process has them."""
    yield module
    for _, child in capture_backend().children(module):
        yield from _modules(child)


def _framework_groups() -> list[str]:
    """Return the groups of patches without which this framework cannot be observed."""
    framework = loaded_framework()
    if framework is None:  # a launcher that imports it later; `attach` will need it
        return ["determinism"]
    determinism = "determinism" if framework == TORCH else "determinism_mindspore"
    return [determinism, *capture_backend().patch_groups]


def _audit_line(line: PatchAudit) -> dict[str, Any]:
    return {name: getattr(value, "value", value) for name, value in asdict(line).items()}


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def _device() -> str:
    """Return the kind of device that the framework computes on: ``npu``, ``cuda`` or ``cpu``."""
    if loaded_framework() not in (TORCH, None):
        from mindspeed_precision.backends.mindspore_capture import device

        return device()
    torch = sys.modules.get("torch")
    if npu_module() is not None:
        return "npu"
    return "cuda" if torch is not None and torch.version.cuda and torch.cuda.is_available() else "cpu"
