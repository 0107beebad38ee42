"""Export a model to a folder for Hugging Face's transformers: `export --to hf`.

The model of this project is exported without the package transformers: its own `to_transformers`
(model.py) returns config.json and the renamed weights. A model that comes from transformers or peft
is exported by its own `save_pretrained`.
"""

import contextlib
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

# Maximum size of a file of weights in bytes.
LARGEST = 5_000_000_000
# The settings that a model card lists.
SECTIONS = ("model", "train", "optim")


@dataclass(frozen=True, kw_only=True)
class ExportConfig(transfer.ExportConfig):
    """The checkpoint to export, and its target."""

    to: Path
    """FILE.pt (torch.save, with optimizer state), FILE.safetensors (weights only), FILE.pt2
    (a torch.export program), a directory named hf or …-hf (for transformers), or another directory
    for a run that resumes there"""
    merge: bool = False
    """Merge a peft adapter into the weights, so that a directory (hf, …-hf) works without peft."""


def export(run_dir: Path, options: ExportConfig) -> str:
    """Write a run's model to a folder for transformers; return a summary line.

    If the target is not named hf or …-hf, call `transfer.export` instead.
    """
    target = options.to
    source = options.source or run_dir
    # Names such as model_hf and model.hf count, too.
    if not re.fullmatch(r"(.*[-_.])?hf", target.name):
        if options.merge:
            raise UserError(f"--merge needs a directory named hf or …-hf as --to, not {target}")
        return transfer.export(run_dir, options)
    if target.exists():
        raise UserError(f"{target} exists and is not overwritten: give another --to, or remove it")
    path, manifest = transfer.find_checkpoint(source, options.step, base=options.base)
    # For a file of weights, the manifest is {}. A checkpoint outside its run has no config.json.
    if "step" not in manifest or not (source / "config.json").exists():
        raise UserError(
            f"{source} is not a run directory, but the export needs the settings of a run: give "
            "one with --source or --name"
        )
    model, spec, config = load_trained(
        source, "cpu", manifest["step"], options.weights, options.base
    )
    if options.merge:
        if not hasattr(model, "merge_and_unload"):
            raise UserError(
                f"--merge: the model ({type(model).__name__}) is not a PeftModel: leave --merge out"
            )
        model = model.merge_and_unload()
    # A model that still has `merge_and_unload` is a peft adapter with its base model. Its
    # `save_pretrained` writes only the adapter.
    is_adapter = hasattr(model, "merge_and_unload")
    uses_to_transformers = hasattr(model, "to_transformers") and not is_adapter
    if not uses_to_transformers and not hasattr(model, "save_pretrained"):
        raise UserError(
            f"{type(model).__name__} (model.py) has neither `to_transformers` nor "
            "`save_pretrained`: add a method `to_transformers` that returns the config.json and "
            "the weights for transformers"
        )
    text = text_of(config, spec)
    temporary = target.with_name(f".{target.name}-{uuid.uuid4().hex[:8]}")
    try:
        temporary.mkdir(parents=True)
        if uses_to_transformers:
            settings, weights = model.to_transformers()
            write_weights(temporary, weights)
            write_json(temporary / "config.json", {**settings, "eos_token_id": text.end})
            write_json(temporary / "generation_config.json", {"eos_token_id": text.end})
        else:
            model.save_pretrained(temporary)
        # If you replace the data, your spec may have a method `save_tokenizer`, for a tokenizer of
        # transformers.
        if hasattr(spec, "save_tokenizer"):
            spec.save_tokenizer(temporary)
            has_tokenizer = True
        else:
            has_tokenizer = write_tokenizer(temporary, text)
        card = model_card(
            name=target.name,
            model=model,
            text=text,
            config=config,
            origin=f"step {manifest['step']} of {config.train.steps}, {options.weights} weights",
            metrics=validated_at(source, manifest["step"]),
            has_tokenizer=has_tokenizer,
            library="peft" if is_adapter else "transformers",
        )
        replace_file(temporary / "README.md", card)
        os.rename(temporary, target)
    except (OSError, RuntimeError, SafetensorError) as error:
        raise UserError(f"{target} cannot be written: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    remark = "" if has_tokenizer else "; no tokenizer, since the data has none"
    return f"{target}: step {manifest['step']} from {path} for transformers{remark}"


@dataclass(frozen=True)
class Text:
    """Facts about the training text that go into the folder."""

    fingerprint: str
    tokenizer: Tokenizer | None = None
    is_bytes: bool = False
    # The token that ends a document.
    end: int | None = None
    # The context length in tokens.
    context: int | None = None
    vocabulary: int | None = None
    separate_documents: bool = False


def text_of(config: Config, spec: Spec) -> Text:
    """Collect facts about the text. If you replaced the data, only the fingerprint may be known."""
    # A data.py of your own may have neither `encoding` nor `context`.
    encoding = getattr(spec, "encoding", None)
    context = getattr(config.data, "context", None)
    if encoding is None or context is None:
        return Text(spec.fingerprint, context=context)
    # The token that ends a document is unknown for .bin files without a tokens.json, unless
    # --data.end-of-text gives it.
    end = None
    with contextlib.suppress(UserError):
        end = end_of_text(config.data, spec)
    is_bytes = encoding == "bytes"
    return Text(
        spec.fingerprint,
        tokenizer=bytes_tokenizer() if is_bytes else tokenizer_of(spec),
        is_bytes=is_bytes,
        end=end,
        context=context,
        vocabulary=spec.vocabulary,
        separate_documents=config.data.documents == "separate",
    )


def write_weights(folder: Path, weights: dict[str, Tensor]) -> None:
    """Write model.safetensors or, above `LARGEST` bytes, several files and their index."""
    # transformers refuses a file without this metadata.
    file_metadata = {"format": "pt"}
    shards: list[dict[str, Tensor]] = [{}]
    shard_size = 0
    for name, value in weights.items():
        # Start a new shard, unless this one is empty: one tensor may be larger than LARGEST.
        if shards[-1] and shard_size + value.nbytes > LARGEST:
            shards.append({})
            shard_size = 0
        shards[-1][name] = value
        shard_size += value.nbytes
    if len(shards) == 1:
        replace_file(folder / "model.safetensors", save(weights, file_metadata))
        return
    file_of: dict[str, str] = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        replace_file(folder / file, save(shard, file_metadata))
        for name in shard:
            file_of[name] = file
    total_size = sum(value.nbytes for value in weights.values())
    index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
    write_json(folder / "model.safetensors.index.json", index)


def write_tokenizer(folder: Path, text: Text) -> bool:
    """Write the data's tokenizer; return False if there is none."""
    if text.tokenizer is None:
        return False
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": text.context,
        "clean_up_tokenization_spaces": False,
    }
    # For bytes, the token that ends a document is the zero byte, which is not a special token.
    if text.end is not None and not text.is_bytes:
        settings["eos_token"] = text.tokenizer.id_to_token(text.end)
    replace_file(folder / "tokenizer.json", text.tokenizer.to_str(pretty=True))
    write_json(folder / "tokenizer_config.json", settings)
    return True


def bytes_tokenizer() -> Tokenizer:
    """Build a byte-level BPE tokenizer without merges, so that each byte is a token."""
    # The package represents bytes as characters, as GPT-2 does: a printable byte is the character
    # with its number; the other bytes are the characters from number 256 on.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    vocabulary = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    for offset, byte in enumerate(others):
        vocabulary[chr(256 + offset)] = byte
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def model_card(
    name: str,
    model: nn.Module,
    text: Text,
    config: Config,
    origin: str,
    metrics: dict[str, float],
    has_tokenizer: bool,
    library: str,
) -> str:
    """Return the text of the folder's README.md: validation metrics, usage and settings."""
    lines = ["---", f"library_name: {library}", "pipeline_tag: text-generation"]
    license_name = project_license()
    if license_name is not None:
        lines.append(f"license: {license_name.lower()}")
    parameter_count = sum(parameter.numel() for parameter in model.parameters())
    about_text = ""
    if text.vocabulary:
        unit = "bytes" if text.is_bytes else "tokens"
        about_text = f" over {text.vocabulary:,} {unit}, with a context of {text.context}"
    lines += [
        "---",
        "",
        f"# {config.name}",
        "",
        f"A language model of {parameter_count:,} parameters{about_text}:",
        f"{origin}.",
    ]
    if text.separate_documents:
        lines.append(
            "It was trained without attention across documents: give it one document at a time."
        )
    lines += ["", "## Measured", ""]
    for metric, value in metrics.items():
        lines.append(f"- {metric.replace('_', ' ')}: {value:.4f}")
    if not metrics:
        lines.append("This step was not validated.")
    lines += ["", "## Use", "", "```python", *usage(name, has_tokenizer), "```", ""]
    settings = {section: to_json(getattr(config, section)) for section in SECTIONS}
    lines += [
        "## Training",
        "",
        f"Fingerprint of the data: `{text.fingerprint}`. Settings:",
        "",
        "```json",
        json.dumps(settings, indent=2),
        "```",
        "",
    ]
    return "\n".join(lines)


def project_license() -> str | None:
    """Read the licence from pyproject.toml; None in an installed package, which lacks the file."""
    # This file is src/PACKAGE/huggingface.py in the project.
    path = Path(__file__).parents[2] / "pyproject.toml"
    if not path.exists():
        return None
    project = tomllib.loads(path.read_text("utf-8")).get("project", {})
    # In an older pyproject.toml, the license may be a table instead of a name.
    license_name = project.get("license")
    return license_name if isinstance(license_name, str) else None


def usage(name: str, has_tokenizer: bool) -> list[str]:
    """Return Python lines that load the model and, with a tokenizer, generate text."""
    load_model = f'model = AutoModelForCausalLM.from_pretrained("{name}")'
    if not has_tokenizer:
        return ["from transformers import AutoModelForCausalLM", "", load_model]
    return [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        load_model,
        f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        'inputs = tokenizer("def ", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=100)[0]))",
    ]
