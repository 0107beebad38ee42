"""The model: gpt.py's transformer, with a mask across documents and a map to transformers.

The setting `--data.documents` is in text.py. The model is transformers' `ArceeForCausalLM` under
other names: with a model of your own, replace the map, too.
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


# Our names of modules, and transformers'. `qkv` is three matrices there, one for each letter.
NAMES = {"embedding": "embed_tokens", "blocks": "layers", "attention": "self_attn", "out": "o_proj"}
NAMES |= {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
NAMES |= {"up": "mlp.up_proj", "down": "mlp.down_proj"}


class NamedGPT(GPT):
    """The GPT, with a map to and from transformers' names."""

    def to_transformers(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return config.json and the weights of the same model in transformers."""
        vocabulary, width = self.embedding.weight.shape
        first: Any = next(iter(blocks(self)))
        settings = {
            "architectures": ["ArceeForCausalLM"],
            "model_type": "arcee",
            "dtype": "float32",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": first.up.out_features,
            "hidden_act": "relu2",
            "num_hidden_layers": len(self.blocks),
            "num_attention_heads": first.attention.heads,
            "num_key_value_heads": first.attention.heads,
            "max_position_embeddings": self.get_buffer("table").shape[1],
            "rope_theta": 10_000.0,  # of transformers 4
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "tie_word_embeddings": True,
            "bos_token_id": None,
        }
        weights: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            path = ".".join(["model", *(NAMES.get(part, part) for part in name.split("."))])
            if "qkv" in path:
                parts = zip("qkv", value.chunk(3), strict=True)
                weights |= {path.replace("qkv", f"{x}_proj"): part for x, part in parts}
            else:
                weights[path] = value
        return settings, weights

    @staticmethod
    def from_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename transformers' weights for this model; any other tensors keep their names."""
        embedding = tensors.get("model.embed_tokens.weight")
        if embedding is None:
            return tensors
        back = {theirs.rpartition(".")[2]: ours for ours, theirs in NAMES.items()}
        renamed: dict[str, Tensor] = {}
        for name, value in tensors.items():
            if name == "lm_head.weight" and torch.equal(value, embedding):  # tied
                continue
            parts = [back.get(p, p) for p in name.split(".") if p not in ("model", "mlp")]
            if "q_proj" in parts:
                others = [tensors[name.replace("q_proj", f"{x}_proj")] for x in "kv"]
                value, parts[-2] = torch.cat([value, *others]), "qkv"
            if not {"k_proj", "v_proj"} & {*parts}:
                renamed[".".join(parts)] = value
        return renamed


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


class DocumentGPT(NamedGPT):
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
    return NamedGPT(*size)
