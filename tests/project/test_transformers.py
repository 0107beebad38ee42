"""A trained model in the form of Hugging Face's transformers, as docs/how-do-i.md says."""

import importlib
from pathlib import Path

import pytest
import torch

from tests.conftest import Project, project_fixture, recipe

project = project_fixture("for_transformers", parallelism="single", checkpoint="torch_save")


def test_transformers_computes_and_writes_what_the_project_does(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the folder alone: logits, greedy text, and each byte of a text and back."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    config = project.config(run_dir=tmp_path / "runs/default")
    project.module("train").run(config)
    monkeypatch.chdir(tmp_path)
    for word in ("ArceeConfig", "PreTrainedTokenizerFast"):
        exec(recipe("python", word).replace("my_training_run", project.name), {})
    ours, _, _ = importlib.import_module(project.name).load_trained("runs/default", "cpu")
    theirs = AutoModelForCausalLM.from_pretrained("hf")
    tokenizer = AutoTokenizer.from_pretrained("hf")
    tokens = torch.arange(2 * config.data.context).view(2, -1)
    with torch.no_grad():
        torch.testing.assert_close(theirs(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    infer = project.module("infer")
    prompt, options = list(b"def main("), infer.InferConfig(tokens=16, temperature=0)
    text = [*infer.generate(ours, prompt, config.data.context, options)]
    written = theirs.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert written[0].tolist() == [*prompt, *text]
    letters = "".join(map(chr, range(1, 300))) + " to be,\n  or not\t"
    assert tokenizer(letters)["input_ids"] == list(letters.encode())
    assert tokenizer.decode(list(letters.encode())) == letters
