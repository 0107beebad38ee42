"""GPT-2's shape on one GPU by the Trainer of transformers and by Lightning, as gpt2.py measures us.

python -m benchmarks.peers transformers|lightning full|none TOKENS STEPS BATCH [--smoke]

Prints "step N" after every tenth step, with the device synchronised, and at last the peak of the
device's memory. Both train transformers' GPT-2, with its own loss, without dropout, by a fused
AdamW, in bfloat16 autocast.
"""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import gpt2

SMOKE_SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 32}


class Tokens(torch.utils.data.Dataset):
    """Stretches of a file of tokens."""

    def __init__(self, file: Path, context: int) -> None:
        self.tokens = np.memmap(file, dtype=np.uint16, mode="r")
        self.context = context

    def __len__(self) -> int:
        return len(self.tokens) // self.context

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        stretch = self.tokens[i * self.context : (i + 1) * self.context]
        tokens = torch.from_numpy(stretch.astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


def say(step: int) -> None:
    """Print every tenth step, once the device has done it."""
    if step % gpt2.EVERY == 0:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"step {step}", flush=True)


def build(smoke: bool) -> Any:
    """Build GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape: dict[str, Any] = dict(SMOKE_SHAPE if smoke else {})
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    vocabulary = 256 if smoke else gpt2.VOCABULARY
    return GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, use_cache=False, **shape, **dropout))


def by_transformers(mode: str, data: Tokens, steps: int, batch: int, smoke: bool) -> None:
    """Train by the Trainer of transformers."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            say(state.global_step)

    arguments = TrainingArguments(
        "trainer",
        max_steps=steps,
        per_device_train_batch_size=batch,
        bf16=not smoke,
        tf32=None if smoke else True,
        use_cpu=smoke,
        optim="adamw_torch" if smoke else "adamw_torch_fused",
        torch_compile=mode == "full",
        learning_rate=6e-4,
        weight_decay=0.1,
        max_grad_norm=1.0,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0 if smoke else 2,
    )
    Trainer(build(smoke), arguments, train_dataset=data, callbacks=[Steps()]).train()


def by_lightning(mode: str, data: Tokens, steps: int, batch: int, smoke: bool) -> None:
    """Train by Lightning's Trainer."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = build(smoke)
            self.call = torch.compile(self.model) if mode == "full" else self.model

        def training_step(self, batch: Any, i: int) -> torch.Tensor:
            return self.call(**batch).loss

        def configure_optimizers(self) -> Any:
            # Lightning refuses to clip with a fused AdamW under mixed precision.
            return torch.optim.AdamW(self.parameters(), 6e-4, weight_decay=0.1)

        def on_train_batch_end(self, *rest: Any) -> None:
            say(self.global_step)

    torch.set_float32_matmul_precision("high")
    trainer = lightning.Trainer(
        max_steps=steps,
        precision="32-true" if smoke else "bf16-mixed",
        accelerator="cpu" if smoke else "gpu",
        devices=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    workers = 0 if smoke else 2
    loader = torch.utils.data.DataLoader(
        data, batch, shuffle=True, num_workers=workers, pin_memory=not smoke
    )
    trainer.fit(Module(), loader)


PEERS = {"transformers": by_transformers, "lightning": by_lightning}


def main() -> None:
    """Train by the peer that the command names."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    name, mode, tokens, steps, batch, *rest = sys.argv[1:]
    smoke = "--smoke" in rest
    context = SMOKE_SHAPE["n_positions"] if smoke else gpt2.CONTEXT
    data = Tokens(Path(tokens, "train.bin"), context)
    PEERS[name](mode, data, int(steps), int(batch), smoke)
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    print(f"peak {peak} bytes", flush=True)


if __name__ == "__main__":
    main()
