"""Export to a folder that Hugging Face's transformers loads: `export --to hf`.

transformers need not be installed: `to_transformers` in model.py has the names.
"""

import json
import os
import re
import shutil
import tomllib
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

from . import load_trained
from .checkpoint import transfer
from .config import Config
from .data import Spec
from .errors import UserError
from .files import replace_file, to_json, write_json
from .run.journal import validated_at
from .text import end_of_text, tokenizer_of

LARGEST = 5_000_000_000  # bytes in one file of weights


@dataclass(frozen=True, kw_only=True)
class ExportConfig(transfer.ExportConfig):
    """What to write, and where."""

    to: Path
    """FILE.pt (torch.save, with the optimizer's state), FILE.safetensors (weights alone), FILE.pt2
    (a program of torch.export), a directory named hf or …-hf (for transformers), or any other for a
    run that resumes there"""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a run's model as a folder for transformers; a line about what was written.

    Any target but a directory named so is left to `transfer.export`.
    """
    target, source = options.to, options.source or run_dir
    if not re.fullmatch(r"(.*[-_.])?hf", target.name):
        return transfer.export(run_dir, options)
    if target.exists():
        raise UserError(f"{target} is there already: give another place, nothing is overwritten")
    path, manifest = transfer.find_checkpoint(source, options.step)
    if "step" not in manifest or not (source / "config.json").exists():
        raise UserError(f"{source} is no run directory, whose settings the folder needs")
    model, spec, config = load_trained(source, "cpu", manifest["step"], options.weights)
    if not hasattr(model, "to_transformers"):
        raise UserError(
            f"{type(model).__name__} (model.py) has no method `to_transformers`, which returns the "
            "settings (config.json) and the weights of the same model in transformers"
        )
    settings, weights = model.to_transformers()
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        write_weights(temporary, weights)
        end = end_of_document(config, spec)
        write_json(temporary / "config.json", {**settings, "eos_token_id": end})
        write_json(temporary / "generation_config.json", {"eos_token_id": end})
        tokenizer = write_tokenizer(temporary, config, spec, end)
        figures = validated_at(source, manifest["step"])
        facts = f"step {manifest['step']} of {config.train.steps}, {options.weights} weights"
        card = model_card(target.name, model, spec, config, facts, figures, tokenizer)
        replace_file(temporary / "README.md", card)
        os.rename(temporary, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    without = "" if tokenizer else "; no tokenizer, as these token files have none"
    return f"{target}: step {manifest['step']} from {path} for transformers{without}"


def end_of_document(config: Config, spec: Spec) -> int | None:
    """The token that ends a document, if it is known."""
    try:
        return end_of_text(config.data, spec)
    except UserError:
        return None


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write model.safetensors or, above `LARGEST`, several files and their index."""
    shards: list[dict[str, Tensor]] = [{}]
    for name, value in weights.items():
        if sum(each.nbytes for each in shards[-1].values()) + value.nbytes > LARGEST and shards[-1]:
            shards.append({})
        shards[-1][name] = value
    many = len(shards) > 1
    names = [
        f"model-{number:05}-of-{len(shards):05}.safetensors" if many else "model.safetensors"
        for number in range(1, len(shards) + 1)
    ]
    for file, shard in zip(names, shards, strict=True):
        replace_file(folder / file, save(shard, {"format": "pt"}))
    if many:
        places = {n: file for file, shard in zip(names, shards, strict=True) for n in shard}
        total = {"total_size": sum(value.nbytes for value in weights.values())}
        index = {"metadata": total, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, config: Config, spec: Spec, end: int | None) -> bool:
    """Write the data's tokenizer (for bytes, one whose tokens are the bytes); False if none."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": config.data.context,
        "clean_up_tokenization_spaces": False,
    }
    if spec.encoding == "bytes":
        tokenizer = bytes_tokenizer()
    elif own := tokenizer_of(spec):
        tokenizer = own
        if end is not None:
            settings["eos_token"] = tokenizer.id_to_token(end)
    else:
        return False
    replace_file(folder / "tokenizer.json", tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", settings)
    return True


def bytes_tokenizer() -> Tokenizer:
    """A byte-level BPE without merges, whose tokens are the bytes themselves."""
    # GPT-2's letters for bytes: those that print are their own, the others follow from 256 on.
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(byte): byte for byte in plain}
    rest = [byte for byte in range(256) if byte not in plain]
    letters |= {chr(256 + place): byte for place, byte in enumerate(rest)}
    tokenizer = Tokenizer(models.BPE(letters, []))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, decoders.ByteLevel()
    return tokenizer


def model_card(
    name: str,
    model: nn.Module,
    spec: Spec,
    config: Config,
    facts: str,
    figures: dict[str, float],
    tokenizer: bool,
) -> str:
    """A README.md for the folder: what was measured, and how to use it."""
    project, licence = Path(__file__).parents[2] / "pyproject.toml", None
    if project.exists():  # not where the package is installed without it
        licence = tomllib.loads(project.read_text("utf-8")).get("project", {}).get("license")
    head = ["library_name: transformers", "pipeline_tag: text-generation"]
    head += [f"license: {licence.lower()}"] if isinstance(licence, str) else []
    size = sum(parameter.numel() for parameter in model.parameters())
    kind = spec.encoding if spec.encoding == "bytes" else "tokens"
    settings = {part: to_json(getattr(config, part)) for part in ("model", "train", "optim")}
    measured = [f"- {n.replace('_', ' ')}: {value:.4f}" for n, value in figures.items()]
    separate = []
    if config.data.documents == "separate":
        separate = ["It was trained without attention across documents: give it one at a time."]
    code = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        'inputs = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
    ]
    if not tokenizer:
        code = ["from transformers import AutoModelForCausalLM", "", code[2]]
    return "\n".join(
        [
            *("---", *head, "---", "", f"# {config.name}", ""),
            f"A language model of {size:,} parameters over {spec.vocabulary:,} {kind}, with a",
            f"context of {config.data.context}: {facts}.",
            *separate,
            *("", "## Measured", "", *(measured or ["This step was not validated."])),
            *("", "## Use", "", "```python", *code, "```", "", "## Training", ""),
            f"Fingerprint of the data: `{spec.fingerprint}`. Settings:",
            *("", "```json", json.dumps(settings, indent=2), "```", ""),
        ]
    )
