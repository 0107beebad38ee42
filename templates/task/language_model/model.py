"""The model: yours to replace. A decoder-only transformer over bytes or tokens.

Other modules rely on three functions at the end (`build_model`, `compute_loss`, `blocks`) and on
`ModelConfig` and `PRESETS`. Your model can be any `nn.Module`; it needs no base class of this file.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import UserError
from .loss import LossSum

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec

# The maximum number of logits in memory at a time (1 GB in float32), if the loss is not compiled.
# The number does not depend on the free memory, since a resumed run must compute the same bits.
MAX_LOGITS = 2**28


@dataclass(frozen=True)
class ModelConfig:
    """A GPT."""

    layers: int = 3
    """Transformer blocks (attention and MLP)."""
    heads: int = 3
    """Attention heads per block; `width` must be a multiple of twice this number."""
    width: int = 96
    """Features per token."""
    dropout: float = 0.0
    """Dropout probability after attention and MLP (0: off)."""

    def __post_init__(self) -> None:
        """Check the values (UserError)."""
        if min(self.layers, self.heads, self.width) < 1 or self.width % (2 * self.heads):
            raise UserError("--model.width must be a multiple of 2 x --model.heads, all at least 1")
        if not 0 <= self.dropout < 1:
            raise UserError("--model.dropout must be in [0, 1)")


# Groups of settings by name, for --preset NAME. A group replaces defaults of the dataclasses.
PRESETS: dict[str, dict[str, Any]] = {
    # The size and the batch of GPT-2. Its vocabulary is for token files: --data.path FOLDER, where
    # the folder has train.bin and val.bin.
    "gpt2_124m": {
        "model.layers": 12,
        "model.heads": 12,
        "model.width": 768,
        "data.context": 1024,
        "data.vocabulary": 50304,
        "train.steps": 20_000,
        "train.global_batch_size": 480,
        "train.micro_batch_size": 16,
        "train.validate_every": 500,
        "train.validate_samples": 480,
        "optim.name": "adamw",
        "optim.learning_rate": 6e-4,
        "optim.warmup_steps": 700,
        "checkpoint.every": 500,
    },
    "tiny": {
        "model.layers": 2,
        "model.heads": 2,
        "model.width": 32,
        "data.context": 32,
        "train.steps": 20,
        "train.global_batch_size": 8,
        "train.micro_batch_size": 4,
        "train.log_every": 5,
        "train.validate_every": 10,
        "train.validate_samples": 24,
        "optim.warmup_steps": 5,
        "checkpoint.every": 5,
    },
}


def rotary(context: int, size: int) -> Tensor:
    """Return the cosines, then the sines, of all rotation angles: [2, context, size / 2].

    Rotary position embedding (RoPE): Su et al., 2021. `size` is the number of features of a head.
    """
    frequencies = 10_000.0 ** -(torch.arange(0, size, 2) / size)
    angles = torch.outer(torch.arange(context), frequencies)
    return torch.stack([angles.cos(), angles.sin()])


def turn(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate pairs of features: feature i of x's first half with feature i of its second half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cosines - second * sines, first * sines + second * cosines], dim=-1)


class Rotation(torch.autograd.Function):
    """`turn` with a handwritten backward, which rotates the gradient by the opposite angles.

    The backward of autograd computes the same values, but torch.compile turns it into a kernel that
    reads memory out of order. On an H200, this takes nine times as long as the bandwidth allows.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Rotate x."""
        ctx.save_for_backward(cosines, sines)
        return turn(x, cosines, sines)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Rotate the gradient by the opposite angles; the cosines and sines get no gradient."""
        cosines, sines = ctx.saved_tensors
        return turn(gradient, cosines, -sines), None, None


class Attention(nn.Module):
    """Causal self-attention with PyTorch's fused kernels."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width, bias=False)
        self.out = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """Let each position of x [batch, time, width] attend to itself and all earlier positions.

        `table` is the result of `rotary`.
        """
        q, k, v = self.heads_of(x, table)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))

    def heads_of(self, x: Tensor, table: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return rotated queries, rotated keys and values of x, each [batch, heads, time, size]."""
        # Split the last axis into three axes: q, k and v; the heads; the features of a head.
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)
        # Slice the cosines and the sines separately: each slice is contiguous at any length. A
        # slice of both, `table[:, :time]`, would be contiguous only at full length, and an exported
        # program would accept only that length. `None` adds an axis for the heads.
        time = x.shape[1]
        cosines = table[0, :time, None].to(q.dtype)
        sines = table[1, :time, None].to(q.dtype)
        # Rotate before the transposition: until then, the features of all heads of a token are next
        # to each other in memory.
        q = Rotation.apply(q, cosines, sines)
        k = Rotation.apply(k, cosines, sines)
        return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


class SquaredReLU(torch.autograd.Function):
    """The square of a ReLU. It matches the quality of GELU (So et al., 2021) at a lower cost.

    The backward of autograd multiplies twice, adds, and masks values that are zero already: 12
    passes over memory. This handwritten backward computes the same values in 5 passes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the square of relu(x)."""
        ctx.save_for_backward(x)
        hidden = F.relu(x)
        # Multiply instead of calling `square`, which autocast would compute in float32.
        return hidden * hidden

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Multiply the gradient by the derivative, 2 * relu(x)."""
        (x,) = ctx.saved_tensors
        # Two kernels: one computes relu(x), the other computes 0 + 2 * relu(x) * gradient.
        return torch.addcmul(gradient.new_zeros(()), F.relu(x), gradient, value=2)


class Block(nn.Module):
    """Attention, then an MLP: each reads the normalised residual stream and adds to the stream."""

    def __init__(self, config: ModelConfig, attention: type[Attention]) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width)
        self.norm2 = nn.RMSNorm(config.width)
        self.attention = attention(config)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """Apply the block to x [batch, time, width]; `table` is passed on to the attention."""
        x = x + self.dropout(self.attention(self.norm1(x), table))
        hidden = SquaredReLU.apply(self.up(self.norm2(x)))
        return x + self.dropout(self.down(hidden))


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Sum the cross-entropy of the rows of x [rows, width]; weight is [vocabulary, width]."""
    return F.cross_entropy(F.linear(x, weight).float(), targets, reduction="sum")


def loss_and_gradients(x: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `summed_loss` and its gradients with respect to x and weight."""
    logits = F.linear(x, weight)
    log_probabilities = F.log_softmax(logits.float(), dim=-1)
    loss = F.nll_loss(log_probabilities, targets, reduction="sum")
    # A target of -100 means that the row has no loss (`ignore_index` of F.nll_loss). `gather` and
    # `scatter_` need a valid index, so such a row gets 0.
    index = targets.clamp(min=0)[:, None]
    # The gradient with respect to the logits is the probabilities, minus 1 at the target (`expm1`).
    # It overwrites the logits. Autograd would pass over tensors of this size twice as often.
    at_target = log_probabilities.gather(1, index).expm1()
    gradient = torch.exp(log_probabilities, out=logits)
    gradient.scatter_(1, index, at_target.to(gradient.dtype))
    # Rows without a loss must add nothing to the gradients. Set these rows of `x_gradient` and `x`
    # to zero, not those of `gradient`, which are usually longer.
    has_loss = (targets >= 0)[:, None]
    x_gradient = (gradient @ weight) * has_loss
    weight_gradient = gradient.T @ (x * has_loss)
    return loss, x_gradient, weight_gradient


class LossInParts(torch.autograd.Function):
    """`summed_loss` in chunks of rows: only the logits of one chunk are in memory at a time.

    Plain autograd would keep the logits of all chunks until backward. Here, forward computes the
    loss of a chunk and its gradients together, and backward only scales the gradients.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
        """Return the summed loss; a chunk has at most `rows` rows of x, and their targets."""
        losses = []
        x_gradients = []
        # Add up the gradients of the chunks in float32: in bfloat16, rounding would lose the
        # gradients of the last chunks.
        weight_gradient = torch.zeros_like(weight, dtype=torch.float)
        for chunk, chunk_targets in zip(x.split(rows), targets.split(rows), strict=True):
            loss, of_x, of_weight = loss_and_gradients(chunk, weight, chunk_targets)
            losses.append(loss)
            x_gradients.append(of_x)
            weight_gradient += of_weight
        ctx.save_for_backward(torch.cat(x_gradients), weight_gradient.to(weight.dtype))
        return torch.stack(losses).sum()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, loss_gradient: Tensor) -> Any:
        """Scale the gradients from `forward` by `loss_gradient`, a scalar."""
        x_gradient, weight_gradient = ctx.saved_tensors
        return x_gradient * loss_gradient, weight_gradient * loss_gradient, None, None


class Output(nn.Module):
    """The output layer: logits of the next token, or their loss, with the embedding's weight."""

    # Exclude this module from activation checkpointing, which would compute the loss a second time.
    recompute = False

    def forward(self, x: Tensor, weight: Tensor, targets: Tensor | None) -> Tensor:
        """Return logits [..., vocabulary] of x [..., width]; with targets, the summed loss."""
        if targets is None:
            return F.linear(x, weight)
        x = x.flatten(0, -2)
        targets = targets.flatten()
        weight = weight.to(x.dtype)
        # The compiler fuses the logits with the loss, so chunks are not needed to save memory.
        if torch.compiler.is_compiling():
            return summed_loss(x, weight, targets)
        # Without the compiler, the logits of all rows would be the largest tensor of a step, so
        # divide the rows into chunks with at most MAX_LOGITS logits.
        vocabulary = len(weight)
        rows = max(1, MAX_LOGITS // vocabulary)
        if len(x) <= rows:
            return summed_loss(x, weight, targets)
        # Autocast would cast the weight again for each chunk. Cast once instead, to the dtype that
        # autocast chooses. A product of one row of x and one row of the weight shows this dtype.
        dtype = F.linear(x[:1], weight[:1]).dtype
        x = x.to(dtype)
        weight = weight.to(dtype)
        if torch.is_grad_enabled():
            return LossInParts.apply(x, weight, targets, rows)
        losses = []
        for chunk, chunk_targets in zip(x.split(rows), targets.split(rows), strict=True):
            losses.append(summed_loss(chunk, weight, chunk_targets))
        return torch.stack(losses).sum()


class GPT(nn.Module):
    """Tokens in, logits or their loss out. The embedding and the output layer share one weight."""

    # The class of the attention, which a subclass may replace.
    attention = Attention

    def __init__(self, config: ModelConfig, vocabulary: int, context: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config, self.attention) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.output = Output()
        # The table is computed and not learned, so checkpoints leave it out (persistent=False).
        table = rotary(context, config.width // config.heads)
        self.register_buffer("table", table, persistent=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                std = 0.02
                # Two matrices of each block write to the residual stream: `out` and `down`. They
                # start with smaller values, as in GPT-2, so that the values of the stream do not
                # grow with the number of blocks.
                if name.endswith(("out.weight", "down.weight")):
                    std /= math.sqrt(2 * config.layers)
                nn.init.normal_(parameter, std=std)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return logits [batch, time, vocabulary]; with targets [batch, time], the summed loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.table)
        return self.output(self.norm(x), self.embedding.weight, targets)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """Build the model on the CPU; torch's global random generator initialises it."""
    return GPT(config.model, spec.vocabulary, config.data.context)


def compute_loss(model: nn.Module, batch: dict[str, Tensor]) -> LossSum:
    """Sum the next-token losses of {"tokens": [batch, context + 1]}; tokens in uint8 are bytes."""
    tokens = batch["tokens"].long()
    inputs = tokens[:, :-1]
    targets = tokens[:, 1:]
    total = model(inputs, targets)
    unit = "byte" if batch["tokens"].dtype == torch.uint8 else "token"
    bits = total.detach() / math.log(2)
    return LossSum(total, targets.numel(), {f"bits_per_{unit}": bits})


def blocks(model: Any) -> Iterable[nn.Module]:
    """List the modules to compile, shard and recompute one by one: the blocks and the output."""
    return [*model.blocks, model.output]
