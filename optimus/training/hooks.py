"""What happens around the steps, each with a name for when it runs."""

import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from optimus.checkpoint.lease import BEAT, check_lease
from optimus.comm import CollectiveError
from optimus.config.sizes import size_text
from optimus.data import tokenizer
from optimus.data.shards import Shards
from optimus.errors import UserError, naming_disk_errors
from optimus.model.count import flops_per_token
from optimus.observe.machine import peak_flops
from optimus.observe.metrics import MetricsWriter
from optimus.observe.progress import Progress, time_left
from optimus.observe.signals import ending_signals
from optimus.observe.terminal import let_go_if_gone, say_at_once
from optimus.observe.traces import MERGED, merge_traces, rank_trace
from optimus.pipeline.timeline import Event, Timeline, write_timeline
from optimus.resilience.events import EventLog
from optimus.training.accounting import expert_load, imbalance, memory_by_kind, seconds_by_kind
from optimus.training.run import Run, read_together
from optimus.training.stages import simulated
from optimus.training.step import StepResult

_STEPS_TO_KNOW = 3  # how long one takes


class Hook:
    """Does nothing; subclasses override what they need."""

    def before_training(self, run: Run) -> None:
        """Before the first step of this process."""

    def before_step(self, run: Run) -> None:
        """Before a step, its data being there."""

    def after_step(self, run: Run, result: StepResult) -> None:
        """After a step; `run.step` counts it already."""

    def after_error(self, run: Run) -> None:
        """When `run.failure` ends the run, on all ranks; `run` holds the state after the last completed step."""

    def after_training(self, run: Run) -> None:
        """At the end, also when an error ended it."""


class Interrupt(Hook):
    """Ctrl-C, a termination signal or a terminal that is gone lets the step finish; the run then saves and ends there."""

    def __init__(self) -> None:
        self._signalled = 0
        self._previous: dict[int, Any] = {}

    def before_training(self, run: Run) -> None:
        self._speaks = run.groups.rank == 0
        for number in ending_signals():
            self._previous[number] = signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            let_go_if_gone()
        if self._speaks and not self._signalled:
            say_at_once(f"{signal.Signals(number).name}: finishing the step, saving")
        self._signalled = number

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.groups.world.any(self._signalled > 0) and run.step < run.last_step:
            run.stopped_by = max(run.groups.world.all_gather_object(self._signalled))
            if self._speaks and not self._signalled:
                say_at_once("another rank was told to end: saving")

    def after_training(self, run: Run) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)


class LeaseCheck(Hook):
    """Ends the run, with nothing more written, when another one has taken its folder over; on rank 0, before other hooks."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._looked = time.monotonic()

    def after_step(self, run: Run, result: StepResult) -> None:
        if time.monotonic() - self._looked > BEAT:
            self._looked = time.monotonic()
            check_lease(run.folder, self._token)


class Recovered(Hook):
    """Writes into the event log, after the first step, that the run goes on after a failure; on rank 0."""

    def before_training(self, run: Run) -> None:
        self._events = EventLog(run.folder)
        self._failures = self._events.unrecovered()

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._failures:
            first = self._failures[0]  # which was noticed so many seconds after it had happened
            seconds = time.time() - first["time"] + (first["seconds"] or 0.0)
            what = "; ".join(failure["detail"] for failure in self._failures)
            self._events.write("recovered", step=run.step, seconds=seconds, detail=what)
            run.notes.append(f"step {run.step}: recovered {seconds:.1f} s after: {what}")
        self._failures = []


class HugeGradients(Hook):
    """Says when gradients were so large that they are felt for long, or too large to be applied; on rank 0."""

    def after_step(self, run: Run, result: StepResult) -> None:
        if not result.huge:
            return
        if result.unfit:
            what = "squares that do not fit fp32: its update was left out"
        else:
            what = "been applied: second moments remember them, and updates will be small for many steps"
        cure = "optimizer.clip_during_warmup=true clips them, `optimus rollback` goes back"
        run.notes.append(f"step {run.step}: gradients with a norm of {result.clipped_norm:.3g} have {what} ({cure})")


class NonFinite(Hook):
    """Ends the run when too many steps in a row had gradients that are not finite, or too large to be applied."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def after_step(self, run: Run, result: StepResult) -> None:
        self._in_a_row = self._in_a_row + 1 if result.unfit else 0
        if self._in_a_row > run.config.resilience.max_skipped:
            what = "has no finite square in fp32" if result.huge else "is not finite"
            run.failure = UserError(
                f"step {run.step}: loss {result.loss} or gradient norm {result.grad_norm} {what}, for "
                f"{self._in_a_row} steps in a row (resilience.max_skipped is {run.config.resilience.max_skipped}). None "
                "of them was applied. Lower lr_schedule.peak or set optimizer.clip_during_warmup=true, then run with "
                "`resume=True`"
            )


class Validation(Hook):
    """Measures loss and bits per byte of each set of validation text, and tasks, every so many steps and at the last one; on
    all ranks.

    Rank 0 alone reads the text and the tasks. Where it holds the whole model it measures alone; else all ranks do, each with
    its part of the model. What rank 0 fails to read ends the run on all ranks alike.
    """

    def after_step(self, run: Run, result: StepResult) -> None:
        section, last = run.config.evaluate, run.step == run.last_step
        try:
            if section.every is not None and section.text is not None and (last or run.step % section.every == 0):
                parts = self._text(run, section.text, max_bytes=section.max_bytes)
                run.measured["bits_per_byte"] = self._measure(run, parts)["bits_per_byte"]
            for each in run.config.validation:
                if last or (each.every is not None and run.step % each.every == 0):
                    of_text = self._text(run, each.text, max_tokens=each.tokens) if each.text is not None else None
                    found = self._measure(run, of_text or self._rows(run, str(each.path), each.tokens))
                    run.measured |= {f"{name}/{each.name}": found[name] for name in ("loss", "bits_per_byte")}
            if section.tasks_every is not None and (last or run.step % section.tasks_every == 0):
                run.measured |= self._tasks(run)
        except CollectiveError:
            raise
        except UserError as error:
            run.failure = error

    def _measure(self, run: Run, parts: Iterator[Any]) -> dict[str, Any]:
        from optimus.evaluation.text import measure

        world = run.groups.world
        with run.state.evaluating():
            if run.forward_is_collective:
                return measure(run.model, parts, group=world)
            return world.on_first(lambda: measure(run.model, parts))

    def _tasks(self, run: Run) -> dict[str, float]:
        """`tasks/NAME/METRIC` of each task. Where ranks have parts of the model, all score what rank 0 asks."""
        from optimus.evaluation.score import score

        model, world = run.model, run.groups.world
        with run.state.evaluating():
            if not run.forward_is_collective:
                return world.on_first(lambda: self._ask(run, partial(score, model)))
            if world.rank > 0:
                windows: Any
                while (windows := world.broadcast_object(None)) is not None:
                    score(model, windows)
                return world.on_first(dict)

            def together(windows: Any, tokens_per_batch: int) -> Any:
                return score(model, world.broadcast_object(windows), tokens_per_batch)

            def asked() -> dict[str, float]:
                try:
                    return self._ask(run, together)
                finally:
                    world.broadcast_object(None)

            return world.on_first(asked)

    def _ask(self, run: Run, score: Any) -> dict[str, float]:
        from optimus.evaluation.harness import HarnessModel
        from optimus.evaluation.tasks import load_tasks, run_tasks

        section, data = run.config.evaluate, run.data.first_folder
        encoder = tokenizer.load(data.tokenizer_path, parse_special=data.parse_special)
        context = run.phase.config.train.sequence_length
        asking = HarnessModel(run.model, encoder, eos_id=data.eos_id, context=context, score=score)
        tasks = load_tasks(section.tasks, Path(str(section.task_data)))
        found = run_tasks(tasks, asking, limit=section.tasks_limit)
        return {
            f"tasks/{name}/{metric}": value
            for name, scores in found.items()
            for metric, value in scores.items()
            if metric != "n"
        }

    def _text(self, run: Run, text: str, max_bytes: int | None = None, max_tokens: int | None = None) -> Iterator[Any]:
        from optimus.evaluation.text import read_parts

        data = run.data.first_folder
        context = run.phase.config.train.sequence_length
        encoder = tokenizer.load(data.tokenizer_path, parse_special=data.parse_special)
        yield from read_parts(
            encoder, text, eos_id=data.eos_id, context=context, max_bytes=max_bytes, max_tokens=max_tokens
        )

    def _rows(self, run: Run, path: str, tokens: int) -> Iterator[Any]:
        from optimus.evaluation.text import read_rows

        yield from read_rows(Shards(path, run.config.train.data_cache), tokens)


class ExpertLoad(Hook):
    """Tokens of each expert of each layer in a step, over all ranks, to the mean of the layer; on all ranks."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._choices: Mapping[Any, Tensor] = {}

    def before_step(self, run: Run) -> None:
        if (run.step + 1) % run.config.observe.log_every == 0:
            self._choices = self._stack.enter_context(run.groups.step.counting())

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step % run.config.observe.log_every:
            return
        self._stack.close()
        run.expert_load = expert_load(run, self._choices)

    def after_training(self, run: Run) -> None:
        self._stack.close()


class TimeLeft(Hook):
    """Says after a few steps when the run will end; on rank 0."""

    def __init__(self) -> None:
        self._seconds: list[float] = []

    def after_step(self, run: Run, result: StepResult) -> None:
        self._seconds.append(run.step_seconds)
        left = run.last_step - run.step
        if len(self._seconds) == _STEPS_TO_KNOW and left > 0:
            each = min(self._seconds)  # the first ones prepare much
            run.notes.append(f"training: {time_left(each * left, time.time())}, at {each:.3g} s a step")


class Metrics(Hook):
    """Writes a record per step and shows progress; on rank 0."""

    def before_training(self, run: Run) -> None:
        self._writer = MetricsWriter(run.folder, run.config, run.step)
        self._progress = Progress(every=run.config.observe.log_every)
        self._print_notes(run)
        self._peak = peak_flops(run.device)
        self._memory: int | None = None  # of this rank, when it was last looked at

    def after_step(self, run: Run, result: StepResult) -> None:
        phase = run.phase
        rate = phase.step_tokens / run.step_seconds
        flops = flops_per_token(run.config.model, phase.config.train.sequence_length)
        details: dict[str, float] = {}
        if run.step % run.config.observe.log_every == 0:
            memory = memory_by_kind(run)
            details = seconds_by_kind(run) | memory
            self._memory = sum(memory.values())
        self._writer.write(
            {
                "step": run.step,
                "tokens": run.tokens,
                "time": round(time.time(), 3),
                "loss": result.loss,
                "balance_loss": result.balance_loss,
                "z_loss": result.z_loss,
                **({} if run.config.train.teacher is None else {"teacher_divergence": result.divergence}),
                "lr": result.lr,
                "grad_norm": result.grad_norm,
                "tokens_per_second": rate,
                "step_seconds": run.step_seconds,
                "data_seconds": run.data_seconds,
                "checkpoint_seconds": run.checkpoint_seconds,
                "model_flops_utilization": rate * flops / (self._peak * run.groups.world.size) if self._peak else None,
                "skipped_steps": run.skipped,
                **_by_source(run, result),
                **run.measured,
                **(imbalance(run.expert_load) if run.expert_load else {}),
                **details,
            },
            run.expert_load,
        )
        self._print_notes(run)
        for name, value in run.measured.items():
            self._progress.print(f"step {run.step}: validation {name} {value:.4f}")
        run.measured.clear()
        run.expert_load, run.checkpoint_seconds = None, 0.0
        if result.skipped:
            self._progress.print(f"step {run.step} was skipped: no update was applied")
        taken = "" if self._memory is None else f"  {size_text(self._memory)}"
        said = f"loss {result.loss:.3f}  {rate:,.0f} tokens/s{taken}"
        self._progress.update("training", run.step, run.last_step, said)

    def _print_notes(self, run: Run) -> None:
        for note in run.notes:
            self._progress.print(note)
        run.notes.clear()

    def after_training(self, run: Run) -> None:
        self._progress.close()
        self._writer.close()


def _by_source(run: Run, result: StepResult) -> dict[str, float]:
    """Tokens read from each source and its loss in this step, where there are several; of a run in phases, its phase."""
    tokens = run.data.tokens_by_source(run.step)
    phase = {"phase": run.phase.number} if run.phase.name else {}
    read = {f"tokens/{name}": count for name, count in tokens.items() if len(tokens) > 1}
    losses = zip(run.data.phases[run.phase.number].names, result.source_losses)
    return phase | read | {f"train_loss/{name}": loss for name, loss in losses if loss is not None}


class Trace(Hook):
    """Profiles one step: what is computed and sent when, on every rank and together; on all ranks."""

    def __init__(self) -> None:
        self._profile: torch.profiler.profile | None = None

    def before_training(self, run: Run) -> None:
        self._begin(run)

    def after_step(self, run: Run, result: StepResult) -> None:
        if self._profile is not None:
            run.state.finish()  # what is under way would report its end to a profiler that is no more
            self._profile.stop()
            profile, self._profile = self._profile, None
            read_together(lambda: self._write(run, profile), run.groups.world)  # so all traces are there
            if run.groups.rank == 0:
                missing = merge_traces(run.folder, run.groups.world.size)
                without = f", without ranks {', '.join(map(str, missing))}, whose nodes have it" if missing else ""
                run.notes.append(
                    f"step {run.step}: what the ranks did when is in {run.folder / MERGED}{without}: open it in Perfetto"
                )
        self._begin(run)

    def _write(self, run: Run, profile: torch.profiler.profile) -> None:
        path = rank_trace(run.folder, run.groups.rank)
        with naming_disk_errors(path, "Make room or leave observe.trace away"):
            profile.export_chrome_trace(str(path))

    def _begin(self, run: Run) -> None:
        if run.step + 1 == run.config.observe.trace and run.step < run.last_step:
            self._profile = torch.profiler.profile()
            self._profile.start()

    def after_training(self, run: Run) -> None:
        if self._profile is not None:  # the step failed
            self._profile.stop()


class PipelineTimeline(Hook):
    """Writes what the ranks of the first pipeline computed when in one step."""

    def after_step(self, run: Run, result: StepResult) -> None:
        if run.step != run.config.observe.timeline:
            return
        offset = time.time() - time.perf_counter()  # nodes have one time of day, but each its own counter
        trace = [each._replace(start=each.start + offset, end=each.end + offset) for each in run.model.trace]
        pipeline = run.groups.along("pp")
        events = [
            Event(rank, *each) for rank, theirs in enumerate(pipeline.all_gather_object(trace)) for each in theirs
        ]
        if run.groups.rank == 0:
            path = run.folder / "timeline.json"
            with naming_disk_errors(path, "Make room or leave observe.timeline away"):
                timeline = Timeline.of(events, pipeline.size)
                write_timeline(path, timeline, simulated(timeline, run.config))
            run.notes.append(f"step {run.step}: what the pipeline computed when is in {path}")
