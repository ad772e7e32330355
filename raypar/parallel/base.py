"""Base of the strategies: how the ranks of a trial share a step's work and reach the same weights.

A strategy is a module that imports neither torch nor `raypar.parallel.strategy` at its start, so that reading a study
stays quick. It holds a subclass of `Strategy`, and its `StrategyTraits` as ``STRATEGY``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from raypar.parallel.gradient_norms import GradientNorms
    from raypar.parallel.strategy import Batch, ForwardBackward, StepOptimizer, Task


class Strategy:
    """The parallel part of a step. This base class serves a single rank.

    A step consists of `forward_backward` on this rank's share, `sync_gradients`, the optimizer if `runs_optimizer` is
    set, and `sync_weights`.

    Attributes:
        module: the model as this rank runs it; may be replaced by its compiled form.
        gradient_norms: norms of the steps' gradients; None unless ``noise_scale`` asks for them.
        share: this rank's share of every global batch, and the number of shares.
        counts_samples: this rank's samples and losses count; true for one of the ranks with the same share.
        runs_optimizer: this rank runs the optimizer.
        depends_on_shape: the first batch of another size takes longer, so the warm-up has to run one.
    """

    module: nn.Module
    gradient_norms: GradientNorms | None = None
    share = (0, 1)
    counts_samples = True
    runs_optimizer = True
    depends_on_shape = False

    def __init__(self, task: Task) -> None:
        self.module = self._model = task.model
        self._num_parts: int = task.config["accumulation_steps"]

    def forward_backward(self, batch: Batch, do: ForwardBackward) -> Tensor:
        """Leave the gradients of the weighted loss where `sync_gradients` needs them; return this rank's loss."""
        return do.run_in_parts(self.module, batch, self._num_parts)

    def sync_gradients(self) -> None:
        """Bring the mean gradients to where the optimizer runs."""

    def global_weight(self, weight: Tensor) -> Tensor:
        """Return the weight of the global batch's loss from that of this rank's part, both of shape ``()``."""
        return weight

    def gradient_factor(self, batch: Batch, weight: Tensor) -> Tensor:
        """Return the factor that turns a step's gradients into those of the loss ``sum / weight``."""
        return batch.num_global / self.global_weight(weight)

    def scale_gradients(self, factor: Tensor) -> None:
        """Multiply the gradients that the optimizer uses by a factor of shape ``()``."""
        import torch
        from torch.distributed.tensor import DTensor

        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        if gradients:  # a stage may lack parameters
            torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in gradients], factor)

    def _summed_weight(self, weight: Tensor) -> Tensor:
        """Return the sum of a weight over the ranks that count."""
        import torch.distributed as dist

        total = weight.double() * self.counts_samples  # a new tensor, of one type on all ranks
        dist.all_reduce(total)
        return total

    def sync_weights(self) -> None:
        """Bring the new weights to every rank, after the optimizer."""

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the parameters that this rank's optimizer updates, as torch's optimizers take them."""
        return [{"params": list(self._model.parameters())}]

    @property
    def named_model(self) -> nn.Module:
        """Model with the workload's names of parameters, for the workload's own optimizer.

        Split parameters are this rank's parts. Parameters that other ranks train get no gradient.
        """
        return self._model

    def wrap_optimizer(self, optimizer: Optimizer) -> StepOptimizer:
        """Return the optimizer that steps in place of one of these groups."""
        return optimizer

    def clip(self, max_norm: float) -> Tensor:
        """Scale the gradients down to a norm over all ranks; return their former norm, valid after the step."""
        from torch.nn.utils import clip_grad_norm_

        return clip_grad_norm_(self._model.parameters(), max_norm)

    def reset_state(self) -> None:
        """Drop the state of earlier steps, except weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that `reset_state` drops, for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`."""

    def full_model(self) -> nn.Module:
        """Return the complete model with the current weights on every rank, possibly in host memory.

        All ranks call it. The model is not to be trained.
        """
        return self._model


def out_of_place(model: nn.Module) -> None:
    """Let activations of a model return new tensors, instead of changing their inputs."""
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False  # type: ignore[assignment]


class DataParallelism(Strategy):
    """Base of the strategies whose ranks each take a share of every batch."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self.share = task.context.rank, task.context.world_size

    def global_weight(self, weight: Tensor) -> Tensor:
        return self._summed_weight(weight)


class SplitModel(Strategy):
    """Base of the strategies that split the model; it fills a complete copy in host memory with the weights."""

    def __init__(self, task: Task) -> None:
        from raypar.parallel.strategy import HOST, copied

        super().__init__(task)
        self._device = task.context.device
        self._complete = copied(task.model, HOST)
        # Ranks that together have all layers of the model; None: each rank has all of them.
        self._layer_group: dist.ProcessGroup | None = None

    def parameter_groups(self) -> list[dict[str, Any]]:
        from raypar.parallel.strategy import by_layout

        # A stage may lack parameters, and an optimizer needs a group.
        return [{"params": group} for group in by_layout(list(self.module.parameters())) or [[]]]

    def clip(self, max_norm: float) -> Tensor:
        import torch
        import torch.distributed as dist
        from torch.distributed.tensor import DTensor
        from torch.nn.utils import clip_grads_with_norm_, get_total_norm

        from raypar.parallel.strategy import by_layout

        parameters = list(self.module.parameters())
        norms = (get_total_norm(part) for part in by_layout([p.grad for p in parameters if p.grad is not None]))
        # The norm of a split gradient is the full one's, the same on every rank.
        squares = [n.full_tensor() ** 2 if isinstance(n, DTensor) else n**2 for n in norms]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self._device)
        if self._layer_group is not None:
            dist.all_reduce(total, group=self._layer_group)
        norm = total.sqrt()
        for part in by_layout(parameters):
            clip_grads_with_norm_(part, max_norm, norm)
        return norm

    def full_model(self) -> nn.Module:
        import torch
        from torch.distributed.tensor import DTensor

        parameters, buffers = dict(self._complete.named_parameters()), dict(self._model.named_buffers())
        with torch.no_grad():
            for name, part in self._model.named_parameters():  # the device holds one complete parameter at a time
                if not part.is_meta:  # of a layer that another rank has
                    parameters[name].copy_(part.full_tensor() if isinstance(part, DTensor) else part)
            for name, buffer in self._complete.named_buffers():
                if not buffers[name].is_meta:
                    buffer.copy_(buffers[name])
        return self._complete
