"""TRL's SFTTrainer with the model, the data and the settings of the recipe: a child of sft.py.

python -m benchmarks.sft_trl SETTINGS

SETTINGS is JSON (`Settings`). After each step it prints "done", the number of the step and the CPU
seconds of the process so far.
"""

import json
import sys
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Settings:
    """What the recipe and SFTTrainer do in the same way."""

    base: str
    """Folder of the base."""
    chats: str
    """JSON lines of conversations."""
    output: str
    """Folder of the checkpoints; those that are there are resumed from."""
    steps: int
    save_every: int
    batch: int
    """Conversations in a step."""
    micro_batch: int
    """Conversations in a forward."""
    rank: int
    alpha: float
    learning_rate: float
    beta2: float
    context: int
    adapter: str = ""
    """Folder of an adapter to begin with, instead of a new one."""
    log_every: int = 10


def main() -> None:
    """Train, or resume."""
    settings = Settings(**json.loads(sys.argv[1]))
    from datasets import load_dataset
    from peft import LoraConfig, PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import SFTConfig, SFTTrainer

    class Steps(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
            print(f"done {state.global_step} {time.process_time()}", flush=True)

    arguments = SFTConfig(
        settings.output,
        max_steps=settings.steps,
        per_device_train_batch_size=settings.micro_batch,
        gradient_accumulation_steps=settings.batch // settings.micro_batch,
        assistant_only_loss=True,
        max_length=settings.context,
        packing=False,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        adam_beta2=settings.beta2,
        max_grad_norm=1.0,
        # Both are on by default. The recipe has neither.
        bf16=False,
        gradient_checkpointing=False,
        save_steps=settings.save_every,
        logging_steps=settings.log_every,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    model = AutoModelForCausalLM.from_pretrained(settings.base, dtype="float32")
    lora = None
    if settings.adapter:
        model = PeftModel.from_pretrained(model, settings.adapter, is_trainable=True)
    else:
        lora = LoraConfig(
            task_type="CAUSAL_LM",
            target_modules="all-linear",
            r=settings.rank,
            lora_alpha=settings.alpha,
            lora_dropout=0.0,
        )
    trainer = SFTTrainer(
        model,
        arguments,
        train_dataset=load_dataset("json", data_files=settings.chats, split="train"),
        processing_class=AutoTokenizer.from_pretrained(settings.base),
        peft_config=lora,
        callbacks=[Steps()],
    )
    last = get_last_checkpoint(settings.output)
    trainer.train(resume_from_checkpoint=last)
    for line in trainer.state.log_history:
        if "loss" in line:
            print(f"loss {line['step']} {line['loss']!r}", flush=True)


if __name__ == "__main__":
    main()
