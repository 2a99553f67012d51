"""What every layout is compared with: the plain model in a plain loop, on one process.

Of PolarLM it takes the model's own mathematics (which tests compare with `transformers`) and nothing else: no engine,
no fused loss, no optimizer or clipping of ours.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from polarlm.config import RunConfig
from polarlm.model import IGNORED, Transformer, initialise
from polarlm.parallel import PRODUCT_TYPES
from polarlm.train import as_tensors
from polarlm.verify.batches import global_batch

STEPS = 3


@dataclass(frozen=True)
class Reference:
    """Losses and gradient norms of each step, gradients of the first before clipping, weights after the last."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]


def loss_scale_of(config: RunConfig) -> float:
    """What the loss is multiplied by for backward: a number for fp16, so that small gradients do not vanish."""
    return config.train.loss_scale.initial if config.train.precision == "fp16" else 1.0


def train_plainly(config: RunConfig) -> Reference:
    """`STEPS` steps on the CPU over whole global batches."""
    model = Transformer(config.model)
    initialise(model, config.model, config.seed)
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim == 1]
    chosen = config.train.optimizer
    groups = [{"params": matrices, "weight_decay": chosen.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=chosen.lr, betas=chosen.betas, eps=chosen.eps)
    products, loss_scale = PRODUCT_TYPES[config.train.precision], loss_scale_of(config)
    reference = Reference([], [], {}, {})
    for step in range(STEPS):
        tokens, positions, document_ids, targets = as_tensors(global_batch(config, step))
        with torch.autocast("cpu", products, enabled=products != torch.float32):
            logits = model(tokens, positions, document_ids)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
        (loss * loss_scale).backward()
        for parameter in model.parameters():
            parameter.grad /= loss_scale
        if step == 0:
            reference.gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})
        # In float64, for torch's own clipping adds squares up in fp32, which for a large model is 0.3 % off.
        norm = torch.stack([p.grad.double().norm() for p in model.parameters()]).norm()
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), chosen.clip, norm.float())
        optimizer.step()
        optimizer.zero_grad()
        reference.losses.append(loss.item())
        reference.norms.append(norm.item())
    reference.weights.update({name: parameter.detach() for name, parameter in model.named_parameters()})
    return reference
