"""Pipeline parallelism: ranks share the layers, and hand hidden states on (GPipe, arXiv 1811.06965).

Torch's schedules say which stage takes which microbatch when: `gpipe`; `1f1b` (arXiv 2104.04473), which holds fewer
activations; `interleaved1f1b` and `loopedbfs` (2211.05953), with several stages a rank and so smaller bubbles;
`interleavedzerobubble` and `zbvzerobubble` (2401.10241) and `dualpipev` (2412.19437), which fill the bubbles with the
weights' gradients. Between two stages travel one microbatch's hidden states [B, S, H], and their gradients back.
"""

import logging
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.pipelining._backward import stage_backward
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from polarlm.config import SPLIT_BACKWARD, RunConfig, Stage, pipeline_stages
from polarlm.model import Transformer
from polarlm.parallel.kernels import PRODUCT_TYPES
from polarlm.parallel.mesh import Mesh
from polarlm.parallel.shard import lets_go_between_passes, local_part

_log = logging.getLogger("polarlm.parallel")

# A microbatch: (tokens, positions, document ids or None, targets), each [B, S].
Arrays = tuple[Tensor, Tensor, Tensor | None, Tensor]


def cut(model: Transformer, stage: Stage) -> None:
    """Leave a model only what its stage holds, in place; names stay as they are."""
    if not stage.is_first:
        model.embedding = None
    if not stage.is_last:
        model.norm = model.head = None
    for number in set(model.blocks) - {str(layer) for layer in stage.layers}:
        del model.blocks[number]


def join(stages: Sequence[Transformer]) -> Transformer:
    """All stages of a rank as one model, for whoever goes by the names of its parameters; it cannot run."""
    with torch.device("meta"):
        model = Transformer(stages[0].config)
    model.embedding = next((stage.embedding for stage in stages if stage.embedding is not None), None)
    model.blocks = nn.ModuleDict({number: block for stage in stages for number, block in stage.blocks.items()})
    model.norm, model.head, model.loss = stages[-1].norm, stages[-1].head, stages[-1].loss
    # As a sharded model does when it is asked for its state: put back what a forward pass has gathered.
    model.register_state_dict_pre_hook(lambda *_: [_let_go(stage) for stage in stages])
    return model


def _let_go(model: nn.Module) -> None:
    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


class Pipeline:
    """This rank's stages, and how microbatches pass through them and the other ranks'."""

    def __init__(self, config: RunConfig, mesh: Mesh, stages: dict[int, Transformer]) -> None:
        parallel = config.parallel
        if parallel.zero_stage == 3 and not lets_go_between_passes(parallel):
            _log.warning(
                "parallel.zero_stage: under %s parameters stay gathered through a step", parallel.pipeline_schedule
            )
        self._mesh, self._stages, self._parallel = mesh, stages, parallel
        self._group = mesh.tokens.get_group("pipeline")
        self._rank_of = [stage.rank for stage in pipeline_stages(config)]
        self._last = len(self._rank_of) - 1
        self._width = config.model.hidden
        # What stages hand on has the type of the embedding that it began as.
        self._type = PRODUCT_TYPES[config.train.parameter_precision]
        self._built: tuple[tuple[int, ...], Any] | None = None  # the last step's schedule, and what it was built for
        self._divisor = 1.0
        self._loss_sum = torch.zeros((), device=mesh.world.device.torch)
        self._sending: list[tuple[dist.Work, Tensor]] = []

    @property
    def has_loss(self) -> bool:
        """True on the ranks whose last stage gives the loss."""
        return self._last in self._stages

    def forward_backward(self, microbatches: Sequence[Arrays], divisor: float) -> Tensor:
        """Add up the gradients of a step's microbatches, each loss divided by `divisor`; give this rank's loss sum.

        What `sum_tied_gradients` sums is not yet.
        """
        self._finish_sending()
        self._divisor = divisor
        self._loss_sum = torch.zeros_like(self._loss_sum)
        tokens, positions, document_ids, targets = (_together(arrays) for arrays in zip(*microbatches, strict=True))
        inputs = (tokens,) if 0 in self._stages else ()
        self._schedule(len(microbatches), *microbatches[0][0].shape).step(
            *inputs,
            target=targets,
            return_outputs=False,
            positions=positions,
            document_ids=document_ids,
            targets=targets,
        )
        return self._loss_sum

    @torch.no_grad()
    def evaluate(self, batch: Arrays) -> Tensor:
        """The summed loss of a batch of any size, 0 where the last stage is not; each rank goes on to the next batch
        when it has handed this one on, so that a row of batches fills the pipeline."""
        tokens, positions, document_ids, targets = batch
        self._finish_sending(keep=len(self._stages))
        hidden = tokens
        for number, stage in sorted(self._stages.items()):
            if number > 0 and not self._is_here(number - 1):
                hidden = hidden.new_empty(self._hidden_shape(*tokens.shape), dtype=self._type)
                dist.recv(hidden, self._global_rank(number - 1), self._group)
            hidden = stage(hidden, positions, document_ids, targets)
            if number < self._last and not self._is_here(number + 1):
                handed_on = hidden.contiguous()
                self._sending.append((dist.isend(handed_on, self._global_rank(number + 1), self._group), handed_on))
        return hidden if self.has_loss else torch.zeros_like(self._loss_sum)

    def _schedule(self, *shape: int):
        """Torch's schedule for steps of (microbatches, B, S/n); its buffers have one shape, so it is built anew."""
        if self._built is None or self._built[0] != shape:
            microbatches, rows, length = shape
            schedule = get_schedule_class(self._parallel.pipeline_schedule)
            if microbatches < self._parallel.pipeline and issubclass(schedule, PipelineScheduleSingle):
                schedule = ScheduleGPipe  # what 1F1B comes to when there are fewer microbatches than stages
            stages = [self._torch_stage(number, rows, length) for number in sorted(self._stages)]
            schedule = schedule(
                stages[0] if issubclass(schedule, PipelineScheduleSingle) else stages,
                n_microbatches=microbatches,
                loss_fn=self._take_loss,
                scale_grads=False,
            )
            self._built = shape, schedule
        return self._built[1]

    def _hidden_shape(self, rows: int, length: int) -> tuple[int, int, int]:
        return rows, length // self._parallel.tensor, self._width

    def _torch_stage(self, number: int, rows: int, length: int) -> "_Stage":
        device = self._mesh.world.device.torch
        hidden = torch.empty(self._hidden_shape(rows, length), dtype=self._type, device="meta", requires_grad=True)
        tokens = torch.empty((rows, length), dtype=torch.int64, device="meta")
        loss = torch.empty((), device="meta", requires_grad=True)
        return _Stage(
            self._stages[number],
            number,
            self._last + 1,
            device,
            input_args=hidden if number else tokens,
            output_args=loss if number == self._last else hidden,
            group=self._group,
            reduces_each=self._parallel.zero_stage >= 2 and self._parallel.pipeline_schedule not in SPLIT_BACKWARD,
            lets_go=lets_go_between_passes(self._parallel),
        )

    def _take_loss(self, loss: Tensor, targets: Tensor) -> Tensor:
        # The last stage has met the targets already.
        self._loss_sum += loss.detach()
        return loss / self._divisor

    def sum_tied_gradients(self) -> None:
        """Give the embedding and the tied head of the last stage, which begin equal, the sum of their gradients."""
        ends = [self._stages[number] for number in (0, self._last) if number in self._stages]
        if not ends or not ends[0].config.tied_embeddings:
            return
        weights = [end.head.weight if end.embedding is None else end.embedding.tokens.weight for end in ends]
        gradients = [local_part(weight.grad) for weight in weights]
        if len(gradients) == 2:
            total = gradients[0] + gradients[1]
        else:
            other = self._global_rank(self._last if 0 in self._stages else 0)
            mine = gradients[0].to(self._mesh.world.device.torch)
            total = mine + self._trade(mine, other).to(gradients[0].device)
        for gradient in gradients:
            gradient.copy_(total)

    def _trade(self, mine: Tensor, other: int) -> Tensor:
        theirs = torch.empty_like(mine)
        operations = [
            dist.P2POp(dist.isend, mine, other, self._group),
            dist.P2POp(dist.irecv, theirs, other, self._group),
        ]
        for request in dist.batch_isend_irecv(operations):
            request.wait()
        return theirs

    def _finish_sending(self, keep: int = 0) -> None:
        while len(self._sending) > keep:
            self._sending.pop(0)[0].wait()

    def _is_here(self, number: int) -> bool:
        return number in self._stages

    def _global_rank(self, number: int) -> int:
        return dist.get_global_rank(self._group, self._rank_of[number])


class _Stage(PipelineStage):
    """Torch's stage, with our ZeRO stages: by itself it would reduce gradients once a step, whatever the stage."""

    def __init__(self, *args, reduces_each: bool, lets_go: bool, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._reduces_each, self._lets_go = reduces_each, lets_go

    def backward_maybe_with_nosync(self, backward_type: str, bwd_kwargs: dict, last_backward: bool = False):
        """See torch; this one lets each full backward pass reduce its gradients, where the ZeRO stage says so."""
        if not self._reduces_each or not isinstance(self.submod, FSDPModule):
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        assert backward_type == "full"
        self.submod.set_is_last_backward(True)
        self.submod.set_requires_gradient_sync(True)
        self.submod.set_requires_all_reduce(last_backward)
        self.submod.set_reshard_after_backward(self._lets_go)
        return stage_backward(bwd_kwargs["stage_output"], bwd_kwargs["output_grads"], bwd_kwargs["input_values"]), None


def _together(arrays: Sequence[Tensor | None]) -> Tensor | None:
    """The microbatches' arrays as the rows of one, which a schedule takes apart again."""
    return None if arrays[0] is None else torch.cat(list(arrays))
