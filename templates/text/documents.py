"""The model: gpt.py's transformer, which can mask attention across documents.

The model itself is in gpt.py, and the setting `--data.documents` in text.py.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import GPT, Attention, rotate
from .gpt import PRESETS as PRESETS
from .gpt import ModelConfig as ModelConfig
from .gpt import blocks as blocks
from .gpt import compute_loss as compute_loss
from .text import end_of_text

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


def own_documents(tokens: Tensor, end_of_text: int, create_block_mask: Any = None) -> Any:
    """The mask of tokens [batch, time]: each sees itself and those before it in its document.

    True where it sees, [batch, 1, time, time]; on CUDA a BlockMask, if there is what creates one,
    whose kernels skip what is masked. Rotary positions are relative, so a document need not begin
    at position 0.
    """
    ends = (tokens == end_of_text).long()
    documents = ends.cumsum(1) - ends  # an end belongs to the document that it ends
    if not tokens.is_cuda or create_block_mask is None:
        return (documents[:, None, :, None] == documents[:, None, None, :]).tril()

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    rows, time = tokens.shape
    return create_block_mask(visible, rows, None, time, time, tokens.device)


class MaskedAttention(Attention):
    """Attention within documents: a mask on a CPU, FlexAttention on a GPU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        from torch.nn.attention.flex_attention import flex_attention  # imports torch's compiler

        self.flex_attention = torch.compile(flex_attention)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """Attend as `own_documents` says; `table`: the rotary one and its mask."""
        table, mask = table
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        q, k = rotate(q, table), rotate(k, table)
        if isinstance(mask, Tensor):
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout)
        else:  # FlexAttention has no dropout
            y = self.flex_attention(q, k, v, block_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class DocumentGPT(GPT):
    """A GPT in which no token sees what is before the last `end_of_text`."""

    attention = MaskedAttention

    def __init__(self, config: ModelConfig, vocabulary: int, context: int, end: int) -> None:
        super().__init__(config, vocabulary, context)
        from torch.nn.attention.flex_attention import create_block_mask

        self.end_of_text = end
        # Not compiled, it would first make the mask of every pair of tokens.
        self.create_block_mask = torch.compile(create_block_mask)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, time, vocabulary] for tokens [batch, time]; with targets, their loss."""
        x = self.embedding(tokens)
        # Not for a text that is generated: kernels would be compiled for each of its lengths.
        create = None if targets is None else self.create_block_mask
        table = self.table, own_documents(tokens, self.end_of_text, create)
        for block in self.blocks:
            x = block(x, table)
        return self.output(self.norm(x), self.embedding.weight, targets)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """The model, on the CPU, initialised from torch's global random numbers."""
    size = config.model, spec.vocabulary, config.data.context
    if config.data.documents == "separate":
        return DocumentGPT(*size, end_of_text(config.data, spec))
    return GPT(*size)
