"""Bytes of activations in frameworks whose operations are not known one by one.

The counts follow Korthikanti et al. (Reducing Activation Recomputation in Large Transformer Models, section 4).

Legend: T tokens of a rank's sequences, R rows of its residual stream, e bytes of an element.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property

from benchmarks.published.profiles import FrameworkProfile
from optimus.model.architecture import own_model
from optimus.plan.blocks import Projection, blocks_of
from optimus.plan.chunks import PartCounts
from optimus.plan.job import Job


class OtherActivations:
    """The activations of one microbatch in a stage of a framework; an `ActivationSizes` of the planner.

    `offload` names what waits on the host: 'inputs' (of recomputed blocks), 'scores' or 'experts' (their saved
    activations).
    """

    def __init__(
        self,
        job: Job,
        profile: FrameworkProfile,
        offload: frozenset[str] = frozenset(),
    ) -> None:
        model, mesh = own_model(job.model, "bench"), job.mesh
        self.model, self.job, self.profile, self.blocks = model, job, profile, blocks_of(model)
        self.offload = offload
        self.T = job.rows
        self.R = self.T / mesh.tp_out if job.parallel.splits_sequence else self.T
        self.e = job.itemsize
        self.stream = self.R * model.hidden / mesh.tp_in * self.e

    def __call__(self, counts: PartCounts) -> tuple[float, float, float]:
        """Returns the planner's three sizes. A split backward pass is assumed to keep everything to its end."""
        return float(self.stage(counts)), float(self.stage(counts)), float(self.working(counts))

    def stage(self, counts: PartCounts) -> float:
        """Returns the bytes saved from a microbatch's forward pass to its backward pass."""
        saved = 2 * self.stream * counts.last + sum(
            counts.count_at(layer) * self._block(layer) for layer in self.blocks
        )
        return self.profile.fragments * saved

    def working(self, counts: PartCounts) -> float:
        """Returns the transient bytes: recomputed activations of a block and their gradients, or the logits."""
        again = [self._again(layer) for layer in self.blocks if counts.count_at(layer)]
        tp = self.job.mesh.tp_out * (self.job.mesh.pp if self.job.parallel.vocabulary else 1)
        logits = self.T * self.model.vocab / tp * self.profile.logits if counts.last else 0.0
        return self.profile.fragments * max([*again, logits])

    def _again(self, layer: int) -> float:
        everything = 2 * self.stream + self.attention + self.feed_forward[layer]
        return everything - self._block(layer) + 2 * self.stream + 0.3 * everything

    def _block(self, layer: int) -> float:
        """Returns the saved bytes of a block, averaged over blocks if only every n-th is recomputed."""
        recompute, every, inside = self.job.recompute, self.job.config.recompute_every, self.feed_forward[layer]
        if "block" in recompute:
            return 0.0 if "inputs" in self.offload else self.stream / every
        whole = 2 * self.stream + self.attention + inside - ("scores" in self.offload) * self.scores
        if "products" in recompute:
            return whole - (whole - self._products(layer)) / every
        less = 2 * self.stream if "norm" in recompute else 0.0  # recomputed from the inputs of attention and mlp
        if "attention" in recompute:
            less += self.attention - self.stream
        elif "scores" in recompute:
            less += self.scores
        if {"mlp", "moe"} & recompute:
            less += inside - self.stream
        return whole - less / every

    def _products(self, layer: int) -> float:
        """Returns a block's input, the result of the attention's core and half the results of matrix products."""
        block, tp = self.blocks[layer], self.job.mesh.tp_out
        columns = [each.outputs / (tp if each.over == "outputs" else 1) for each in (*block.attention, *block.dense)]
        return self.stream + self.T * (0.5 * sum(columns) + self.model.heads * self.model.value_size / tp) * self.e

    @cached_property
    def attention(self) -> float:
        """Returns the bytes of the input, queries, keys and values, saved scores, output and dropout mask of attention."""
        model, low = self.model, self.model.latent
        columns = (model.heads + model.kv_heads) * (model.query_size + model.value_size) / self.job.mesh.tp_out
        columns += (low.queries or 0) + low.keys + low.rotary if low else 0
        return self.stream + columns * self.T * self.e + self._mask + self.scores

    @cached_property
    def scores(self) -> float:
        """Returns the bytes of saved scores: after the softmax, after the dropout, and the dropout mask."""
        size = self.model.heads / self.job.mesh.tp_out * self.T
        if self.profile.attention > 0:
            return size * 4
        return size * self.job.train.sequence_length * (2 * self.e + 1 if self.profile.masks else self.e)

    @cached_property
    def feed_forward(self) -> Mapping[int, float]:
        """Returns, for each kind of block, the bytes of the feed-forward layer's input, inner activations and dropout
        mask."""
        inside = {
            layer: self._moe(layer) if block.expert else self._dense(layer) for layer, block in self.blocks.items()
        }
        return {layer: self.stream + size + self._mask for layer, size in inside.items()}

    def _dense(self, layer: int) -> float:
        """Returns both sides of the activation, of a feed-forward layer or of the layer that every token meets beside
        experts."""
        return self._inside(self.blocks[layer].dense, self.T, self.job.mesh.tp_out)

    def _moe(self, layer: int) -> float:
        """Returns the tokens at their experts, the experts' saved activations, and the returned results."""
        job, mesh, hidden, chosen = self.job, self.job.mesh, self.model.hidden, self.model.experts_per_token or 0
        own = self.T / mesh.tp
        rows = own * chosen * mesh.etp * job.imbalance
        router = own * self.model.experts_of(layer) * 3 * 4
        inside = rows * hidden * self._read + self._inside(self.blocks[layer].expert, rows, mesh.etp)
        back = own * chosen * hidden * self.e
        return router + inside * ("experts" not in self.offload) + back + self._dense(layer)

    @property
    def _mask(self) -> float:
        return self.stream / self.e if self.profile.masks else 0.0

    def _inside(self, projections: Sequence[Projection], rows: float, parts: int) -> float:
        """Returns the activation's input and, unless it is recomputed, the activation's result for the next product."""
        made = 0.0 if "act" in self.job.recompute else self._read
        return (
            rows
            / parts
            * sum(each.outputs * self.e if each.over == "outputs" else each.inputs * made for each in projections)
        )

    @property
    def _read(self) -> float:
        """Returns the bytes that a product saves for an element of its input."""
        return 1.0 if self.job.precision in ("fp8", "fp4") else self.e
