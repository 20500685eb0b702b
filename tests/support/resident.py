"""Resident training: the reference that streaming must equal bit for bit.

Every parameter is in memory, gradients come from ordinary autograd over whole forward passes, the
optimizer is `torch.optim.AdamW` and global clipping is `clip_grad_norm_`. It shares the stages'
`forward` and first values with the engine, and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.model.config import ModelConfig
from trainer.model.initialise import fill_initial
from trainer.model.stages import Stage, build_head, build_stages, build_trunk
from trainer.options import EngineOptions

MOMENTS = {"exp_avg", "exp_avg_sq", "row_var", "col_var", "variance"}
ParameterGroup = dict[str, Any]
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ResidentStep:
    loss: float
    grad_norm: float
    clip_scale: float
    shard_norms: dict[str, float] = field(default_factory=dict)


class ResidentTrainer:
    """A whole model in memory."""

    def __init__(
        self, config: ModelConfig, options: EngineOptions, seed: int, device: str = "cpu"
    ) -> None:
        self.config = config
        self.options = options
        self.dtype = TORCH_DTYPES[options.dtype]
        self.trunk = build_trunk(config)
        self.head = build_head(config)
        self.device = device
        self.params = {
            stage.name: {
                name: p.detach().to(device).requires_grad_()
                for name, p in first_values(stage, seed).items()
            }
            for stage in build_stages(config)
        }
        self.optimizer = optimizer_of(
            options, [p for shard in self.params.values() for p in shard.values()]
        )

    def step(
        self,
        micro_batches: Sequence[np.ndarray],
        learning_rate: float,
        *,
        loss_scale: float = 1.0,
        is_normalised: bool = False,
    ) -> ResidentStep | None:
        """Train one step; None, and nothing is changed, when a gradient is not finite."""
        self.optimizer.zero_grad(set_to_none=True)
        valid = sum(int((rows[:, 1:] != -100).sum()) for rows in micro_batches)
        loss_sum = self._accumulate(micro_batches, valid, loss_scale)
        found = [g for shard in self.params.values() for g in gradients_of(shard)]
        torch._foreach_div_(found, loss_scale)
        if not all(bool(torch.isfinite(g).all()) for g in found):
            return None
        if is_normalised:
            self._normalise()
        norms = {
            name: float(torch.nn.utils.get_total_norm(gradients_of(shard)))
            for name, shard in self.params.items()
        }
        norm, scale = self._clip()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return ResidentStep(
            loss=loss_sum / valid, grad_norm=norm, clip_scale=scale, shard_norms=norms
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """Give parameters and moments under the names of a store's tensors."""
        found = {}
        for stage, shard in self.params.items():
            for name, parameter in shard.items():
                found[f"params/{stage}:{name}"] = parameter.detach().cpu().numpy().copy()
                state = self.optimizer.state[parameter]
                for moment in MOMENTS & state.keys():
                    found[f"optim/{stage}:{name}.{moment}"] = state[moment].cpu().numpy().copy()
        return found

    def _normalise(self) -> None:
        """Bring every shard's root mean square gradient nearer to that of the whole model."""
        settings = self.options.normaliser
        norms, counts = [], []
        for shard in self.params.values():
            norms.append(float(torch.nn.utils.get_total_norm(gradients_of(shard))))
            counts.append(sum(p.numel() for p in shard.values()))
        target = math.sqrt(math.fsum(n**2 for n in norms) / sum(counts))
        for shard, norm, count in zip(self.params.values(), norms, counts, strict=True):
            raw = target / (norm / math.sqrt(count))
            clamped = max(settings.min_scale, min(settings.max_scale, raw))
            factor = 1.0 + settings.blend * (clamped - 1.0)
            for gradient in gradients_of(shard):
                gradient.mul_(factor)

    def _accumulate(
        self, micro_batches: Sequence[np.ndarray], valid: int, loss_scale: float
    ) -> float:
        """Head first for every micro-batch, then what is below: a shared weight sums in order."""
        loss_sum = 0.0
        pending = []
        for rows in micro_batches:
            ids, labels = (
                torch.from_numpy(part.copy()).to(self.device)
                for part in (rows[:, :-1], rows[:, 1:])
            )
            hidden = self._hidden(ids.clamp_min(0))
            leaf = hidden.detach().requires_grad_()
            flat, targets = leaf.flatten(0, 1), labels.flatten()
            chunk = self.options.lm_head_chunk_tokens
            for start in range(0, len(targets), chunk):
                part = slice(start, start + chunk)
                logits = self.head.forward(self._active(self.head), flat[part]).float()
                loss = F.cross_entropy(logits, targets[part], reduction="sum", ignore_index=-100)
                torch.autograd.backward(loss / valid * loss_scale)
                loss_sum += float(loss.detach())
            pending.append((hidden, leaf.grad))
        for hidden, gradient in pending:
            torch.autograd.backward(hidden, gradient)
        return loss_sum

    def _hidden(self, ids: Tensor) -> Tensor:
        x = ids
        for stage in self.trunk:
            x = self._run(stage, x)
        return x

    def _run(self, stage: Stage, x: Tensor) -> Tensor:
        return stage.forward(self._active(stage), x).to(self.dtype)

    def _active(self, stage: Stage) -> dict[str, Tensor]:
        masters = self.params[stage.name]
        if stage.keeps_master_dtype:
            return masters
        return {name: p.to(self.dtype) for name, p in masters.items()}

    def _clip(self) -> tuple[float, float]:
        mode, limit = self.options.grad_clip_mode, self.options.max_grad_norm
        everything = [p for shard in self.params.values() for p in shard.values()]
        if mode == "global":
            norm = torch.nn.utils.clip_grad_norm_(everything, limit)
            return float(norm), float(torch.clamp(limit / (norm + 1e-6), max=1.0))
        norm = torch.nn.utils.get_total_norm([p.grad for p in everything if p.grad is not None])
        if mode == "none":
            return float(norm), 1.0
        shard_norms = [
            torch.nn.utils.clip_grad_norm_(list(shard.values()), limit)
            for shard in self.params.values()
        ]
        scales = [float(torch.clamp(limit / (each + 1e-6), max=1.0)) for each in shard_norms]
        return float(norm), min(scales)


class ResidentLion(torch.optim.Optimizer):
    """Lion over whole tensors, written from the paper's algorithm 2."""

    def __init__(
        self, params: Sequence[ParameterGroup], betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": 0.0, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                update = m.mul(beta1).add(p.grad, alpha=1.0 - beta1).sign()
                p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])
                m.mul_(beta2).add_(p.grad, alpha=1.0 - beta2)


def gradients_of(shard: dict[str, Tensor]) -> list[Tensor]:
    """Give the gradients of a shard's parameters, each of which has one."""
    return [p.grad for p in shard.values() if p.grad is not None]


def optimizer_of(options: EngineOptions, params: list[Tensor]) -> torch.optim.Optimizer:
    """Give the resident optimizer of the options."""
    betas = (options.beta1, options.beta2)
    groups = groups_of(options, params)
    if options.optimizer == "lion":
        return ResidentLion(groups, betas, options.weight_decay)
    if options.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, weight_decay=options.weight_decay)
    return torch.optim.AdamW(
        groups,
        betas=betas,
        eps=options.adam_eps,
        weight_decay=options.weight_decay,
        fused=True,
    )


def groups_of(options: EngineOptions, params: list[Tensor]) -> list[ParameterGroup]:
    """Give the parameters, those that are spared the decay as a group of their own."""
    if options.weight_decay_scope == "all":
        return [{"params": params}]
    return [
        {"params": [p for p in params if p.dim() > 1]},
        {"params": [p for p in params if p.dim() <= 1], "weight_decay": 0.0},
    ]


def first_values(stage: Stage, seed: int) -> dict[str, Tensor]:
    """Give a stage's initial parameters as leaves."""
    tensors = {name: torch.empty(each.shape) for name, each in stage.parameters.items()}
    fill_initial(stage, seed, tensors)
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}
