"""Extend the model of gpt.py: with a mask between documents, and with conversion to transformers.

`--data.documents separate` (text.py) turns the mask on. Except for the names of its weights, the
model is transformers' `ArceeForCausalLM`. If you replace the model, replace the conversion, too.
"""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt import GPT, Attention

# `import X as X` marks X as exported: other modules import these names from this one.
from .gpt import PRESETS as PRESETS
from .gpt import ModelConfig as ModelConfig
from .gpt import blocks as blocks
from .gpt import compute_loss as compute_loss
from .text import end_of_text

if TYPE_CHECKING:
    from .config import Config
    from .data import Spec


# The names of modules here, and their names in transformers. The matrix `qkv` is not listed: in
# transformers it is three matrices, `q_proj`, `k_proj` and `v_proj`.
NAMES = {
    "embedding": "embed_tokens",
    "blocks": "layers",
    "attention": "self_attn",
    "out": "o_proj",
    "norm1": "input_layernorm",
    "norm2": "post_attention_layernorm",
    "up": "mlp.up_proj",
    "down": "mlp.down_proj",
}


class NamedGPT(GPT):
    """The GPT, with conversion to and from transformers' names."""

    def to_transformers(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return the config.json and the weights for transformers."""
        vocabulary, width = self.embedding.weight.shape
        # The rotary table is [2, context, features of a head / 2].
        context = self.get_buffer("table").shape[1]
        first_block: Any = next(iter(blocks(self)))
        settings = {
            "architectures": ["ArceeForCausalLM"],
            "model_type": "arcee",
            "dtype": "float32",
            "vocab_size": vocabulary,
            "hidden_size": width,
            "intermediate_size": first_block.up.out_features,
            "hidden_act": "relu2",
            "num_hidden_layers": len(self.blocks),
            "num_attention_heads": first_block.attention.heads,
            "num_key_value_heads": first_block.attention.heads,
            "max_position_embeddings": context,
            # transformers 4 reads this setting, transformers 5 the next one.
            "rope_theta": 10_000.0,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
            # The default `eps` of nn.RMSNorm for float32.
            "rms_norm_eps": torch.finfo(torch.float32).eps,
            "tie_word_embeddings": True,
            "bos_token_id": None,
        }
        weights: dict[str, Tensor] = {}
        for name, value in self.state_dict().items():
            words = [NAMES.get(word, word) for word in name.split(".")]
            new_name = ".".join(["model", *words])
            if "qkv" in new_name:
                for letter, matrix in zip("qkv", value.chunk(3), strict=True):
                    weights[new_name.replace("qkv", f"{letter}_proj")] = matrix
            else:
                weights[new_name] = value
        return settings, weights

    @staticmethod
    def from_transformers(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rename transformers' weights for this model; other tensors keep their names."""
        embedding = tensors.get("model.embed_tokens.weight")
        # Without a tensor of this name, the tensors are not from transformers.
        if embedding is None:
            return tensors
        # Names are translated one dotted part at a time. So the key for "mlp.up_proj" is "up_proj";
        # the part "mlp" is dropped below.
        translations: dict[str, str] = {}
        for own_name, their_name in NAMES.items():
            translations[their_name.rpartition(".")[2]] = own_name
        renamed: dict[str, Tensor] = {}
        for name, value in tensors.items():
            # This model's output layer uses the weights of the embedding. A file may store them a
            # second time, under this name.
            if name == "lm_head.weight" and torch.equal(value, embedding):
                continue
            words = [translations.get(word, word) for word in name.split(".")]
            # transformers nests modules in others named "model" and "mlp"; this model does not.
            words = [word for word in words if word not in ("model", "mlp")]
            if "q_proj" in words:
                k = tensors[name.replace("q_proj", "k_proj")]
                v = tensors[name.replace("q_proj", "v_proj")]
                # The last two words are "q_proj" and "weight".
                words[-2] = "qkv"
                renamed[".".join(words)] = torch.cat([value, k, v])
            # `k_proj` and `v_proj` were handled together with `q_proj`.
            elif "k_proj" not in words and "v_proj" not in words:
                renamed[".".join(words)] = value
        return renamed


def own_documents(tokens: Tensor, end_of_text: int, create_block_mask: Any = None) -> Any:
    """Build a mask that lets tokens [batch, time] attend only within their own documents.

    The mask is also causal. It is [batch, 1, time, time], True where a query token attends to a key
    token. On CUDA, with a `create_block_mask`, it is a BlockMask instead, which lets kernels skip
    masked blocks. A document need not begin at position 0: rotary embedding depends on the distance
    of positions.
    """
    ends = (tokens == end_of_text).long()
    # The number of each token's document. The end token belongs to the document that it ends.
    documents = ends.cumsum(1) - ends
    if not tokens.is_cuda or create_block_mask is None:
        same_document = documents[:, None, :, None] == documents[:, None, None, :]
        return same_document.tril()

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents[row, query] == documents[row, key])

    rows, time = tokens.shape
    # `None` in place of a number of heads: all heads share the mask.
    return create_block_mask(visible, rows, None, time, time, tokens.device)


class MaskedAttention(Attention):
    """Attention within documents, by FlexAttention if the mask is a BlockMask."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        # Imported only here: this import also imports torch's compiler, which is slow.
        from torch.nn.attention.flex_attention import flex_attention

        # Without compilation, FlexAttention would store the scores of all pairs of tokens.
        self.flex_attention = torch.compile(flex_attention)

    def forward(self, x: Tensor, table: Any) -> Tensor:
        """Attend within documents; `table` is (rotary table, mask from `own_documents`)."""
        rotary_table, mask = table
        q, k, v = self.heads_of(x, rotary_table)
        if isinstance(mask, Tensor):
            dropout = self.dropout if self.training else 0.0
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            # FlexAttention has no dropout, so `self.dropout` has no effect here.
            y = self.flex_attention(q, k, v, block_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


class DocumentGPT(NamedGPT):
    """A GPT whose tokens do not attend to earlier documents, which end with `end_of_text`."""

    attention = MaskedAttention

    def __init__(self, config: ModelConfig, vocabulary: int, context: int, end: int) -> None:
        super().__init__(config, vocabulary, context)
        from torch.nn.attention.flex_attention import create_block_mask

        self.end_of_text = end
        # Without compilation, this function would first build a dense mask of all pairs of tokens.
        self.create_block_mask = torch.compile(create_block_mask)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Compute logits [batch, time, vocabulary] of tokens [batch, time], or the summed loss."""
        x = self.embedding(tokens)
        # Without targets, as in generation, use a dense mask: for a BlockMask, kernels would be
        # compiled again for each length of the text.
        create_block_mask = None
        if targets is not None:
            create_block_mask = self.create_block_mask
        mask = own_documents(tokens, self.end_of_text, create_block_mask)
        for block in self.blocks:
            x = block(x, (self.table, mask))
        return self.output(self.norm(x), self.embedding.weight, targets)


def build_model(config: "Config", spec: "Spec") -> nn.Module:
    """Build the model on the CPU, initialized with torch's global random generator."""
    context = config.data.context
    if config.data.documents == "separate":
        end = end_of_text(config.data, spec)
        return DocumentGPT(config.model, spec.vocabulary, context, end)
    return NamedGPT(config.model, spec.vocabulary, context)
