"""Selects the library's hooks for a run."""

from collections.abc import Sequence

from optimus.training.hooks.checkpoints import Checkpoints
from optimus.training.hooks.copies import CopyCheckpoints
from optimus.training.hooks.expert_load import ExpertLoad
from optimus.training.hooks.hangs import Hangs
from optimus.training.hooks.huge_gradients import HugeGradients
from optimus.training.hooks.interrupt import Interrupt
from optimus.training.hooks.lease import LeaseCheck
from optimus.training.hooks.metrics import Metrics
from optimus.training.hooks.non_finite import NonFinite
from optimus.training.hooks.nothing_predicted import NothingPredicted
from optimus.training.hooks.oversubscription import Oversubscription
from optimus.training.hooks.pipeline_timeline import PipelineTimeline
from optimus.training.hooks.pruning import Pruning
from optimus.training.hooks.recovered import Recovered
from optimus.training.hooks.slow_ranks import SlowRanks
from optimus.training.hooks.soft_failures import SoftFailures
from optimus.training.hooks.spikes import Spikes
from optimus.training.hooks.time_left import TimeLeft
from optimus.training.hooks.trace import Trace
from optimus.training.hooks.tuning import TuneMatmuls
from optimus.training.hooks.validation import Validation
from optimus.training.run import Run
from optimus.training.trainer import Hook


def hooks_of(run: Run, node: str | None = None, holder: str | None = None) -> list[Hook]:
    """Returns the library's hooks that `run` needs on this rank. With `node`, enables the watch for non-finite
    tensors.

    `node` is the name of the node under `optimus launch`. `holder` is the token of the lease on the run folder, if any.
    """
    config = run.config
    run.groups.watch.enabled = node is not None  # only SoftFailures needs the watch
    chosen: Sequence[tuple[bool, type[Hook], tuple[object, ...]]] = [
        (holder is not None, LeaseCheck, (holder,)),
        (run.groups.world.size > 2, SlowRanks, (node,)),
        (node is not None, Hangs, (node,)),
        (node is not None, SoftFailures, (node,)),
        (True, Interrupt, ()),
        (config.pruning is not None, Pruning, ()),
        (config.tuning.matmul, TuneMatmuls, ()),
        (True, Validation, ()),
        (config.model.experts is not None, ExpertLoad, ()),
        (run.device.type == "cpu", Oversubscription, ()),
        (config.observe.timeline is not None, PipelineTimeline, ()),
        (config.resilience.on_spike != "nothing", Spikes, (node,)),
        (config.checkpoint.copy_to is not None, CopyCheckpoints, ()),
        *[
            (True, each, ())
            for each in (HugeGradients, NothingPredicted, Recovered, TimeLeft, Metrics, Checkpoints, NonFinite, Trace)
        ],
    ]
    first = run.groups.rank == 0
    return [kind(*given) for wanted, kind, given in chosen if wanted and (first or kind.ranks == "all")]
