"""A trained model in transformers: `export --to hf/`, and back by `--init-from hf/`."""

import json
import os
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.common import block_of, free_ports
from tests.conftest import ROOT, Project, project_fixture, run_together

project = project_fixture(
    "for_transformers", text="tokenizer", parallelism="single", checkpoint="torch_save"
)
sharded = project_fixture("sharded_gpt", text="tokenizer", parallelism="fsdp", checkpoint="dcp")
of_bytes = project_fixture("of_bytes", parallelism="single", checkpoint="torch_save")
TINY = ("--preset", "tiny", "--device", "cpu", "--data.path", "text.txt", "--train.steps", "6")
OWN = ROOT / "tests/project/own"
LETTERS = "".join(map(chr, range(1, 300))) + " to be,\n  or not\t"


@pytest.fixture(scope="module")
def averaged(project: Project) -> Project:
    """A project whose run "ema" has weights and their averages."""
    project("train", *TINY, "--name", "ema", "--optim.ema", "0.9")
    return project


def theirs(folder: Path) -> Any:
    """The model that transformers makes of a folder."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


def check_facts(folder: Path, model: Any, context: int) -> None:
    """What other programs read besides the weights: their dtype, a tied head, the tokenizer."""
    from safetensors import safe_open
    from transformers import AutoTokenizer

    settings = json.loads((folder / "config.json").read_text())
    assert (settings.get("dtype") or settings["torch_dtype"]) == "float32"
    assert settings["tie_word_embeddings"] and settings["max_position_embeddings"] == context
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    files = [*folder.glob("*.safetensors")]
    for file in files:
        with safe_open(file, "pt") as opened:
            # Some versions of transformers refuse a file without it.
            assert opened.metadata() == {"format": "pt"}
    assert files
    if (folder / "tokenizer.json").exists():
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.model_max_length == context
        assert len(tokenizer) <= settings["vocab_size"]


def compare(project: Project, run: Path, folder: Path, weights: str = "last") -> None:
    """By the folder alone: the same logits, and the same greedy text."""
    ours, spec, config = sys.modules[project.name].load_trained(run, "cpu", weights=weights)
    model = theirs(folder)
    check_facts(folder, model, config.data.context)
    tokens = torch.arange(2 * config.data.context).view(2, -1) % spec.vocabulary
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, ours(tokens), atol=1e-5, rtol=1e-5)
    infer = project.module("infer")
    prompt, options = tokens[0, 3:9].tolist(), infer.InferConfig(tokens=16, temperature=0)
    text = [*infer.generate(ours, prompt, config.data.context, options)]
    model.generation_config.eos_token_id = None  # all 16, as `infer` writes
    written = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False)
    assert written[0].tolist() == [*prompt, *text]


@pytest.mark.parametrize("weights", ["last", "ema"])
def test_a_folder_computes_and_writes_what_the_run_does(averaged: Project, weights: str) -> None:
    folder = averaged.folder / f"{weights}-hf"
    averaged("export", "--name", "ema", "--to", folder.name, "--weights", weights)
    compare(averaged, averaged.folder / "runs/ema", folder, weights)
    card = (folder / "README.md").read_text()
    records = (averaged.folder / "runs/ema/metrics.jsonl").read_text().splitlines()
    figures = json.loads(records[-1])
    for name in ("validation_loss", "validation_ema_loss"):
        assert f"- {name.replace('_', ' ')}: {figures[name]:.4f}\n" in card
    assert "license: mit\n" in card and f"step 6 of 6, {weights} weights" in card
    code = card.partition("```python\n")[2].partition("```")[0].replace(folder.name, str(folder))
    exec(code, names := {})
    assert names["tokenizer"](LETTERS)["input_ids"] == list(LETTERS.encode())
    assert names["tokenizer"].decode(list(LETTERS.encode())) == LETTERS


def test_a_folder_in_several_files_comes_back_to_the_bit(
    averaged: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(averaged.module("huggingface"), "LARGEST", 20_000)
    averaged("export", "--name", "ema", "--to", "many-hf")
    assert len([*(averaged.folder / "many-hf").glob("*.safetensors")]) > 2
    compare(averaged, averaged.folder / "runs/ema", averaged.folder / "many-hf")
    words = ("--optim.learning-rate", "1e-30", "--optim.weight-decay", "0", "--train.steps", "1")
    averaged("train", *TINY, "--name", "back", "--init-from", "many-hf", "--init-strict", *words)
    runs = (averaged.tensors(averaged.folder / "runs" / name) for name in ("ema", "back"))
    first, second = ({n: t for n, t in run.items() if n.startswith("model.")} for run in runs)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_any_folder_of_safetensors_starts_a_run(averaged: Project, tmp_path: Path) -> None:
    """As those of transformers that a model of the user's own is of, by its own names."""
    from safetensors.torch import save_file

    model = sys.modules[averaged.name].load_trained(averaged.folder / "runs/ema", "cpu")[0]
    for place, (name, tensor) in enumerate(model.state_dict().items()):
        save_file({f"model.{name}": tensor + 1}, tmp_path / f"model-{place}.safetensors")
    other = sys.modules[averaged.name].load_trained(averaged.folder / "runs/ema", "cpu")[0]
    load, group = averaged.module("checkpoint.transfer"), averaged.module("distributed").Group()
    load.load_weights(tmp_path, other, None, group, strict=True)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one + 1, two)


def test_a_run_keeps_its_checkpoints_beside_exported_weights(averaged: Project) -> None:
    run = averaged.folder / "runs/ema"
    averaged("export", "--name", "ema", "--to", str(run / "model.safetensors"))
    path, manifest = averaged.module("checkpoint.transfer").find_checkpoint(run)
    assert (path.name, manifest["step"]) == ("step_00000006", 6)
    (run / "model.safetensors").rename(path / "model.safetensors")
    tensors = averaged.tensors(run)
    (path / "model.safetensors").unlink()
    assert any(name.startswith("optimizer.") for name in tensors)


def test_a_tokenizer_goes_along(project: Project, tmp_path: Path) -> None:
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number} naïve 日本 words\n" * 40)
    to = project.folder / "tokens"
    project("tokens", "--text", str(tmp_path), "--to", str(to), "--vocabulary", "300")
    project("train", *TINY, "--data.path", str(to), "--name", "tokens")
    project("export", "--name", "tokens", "--to", "tokens-hf")
    folder = project.folder / "tokens-hf"
    compare(project, project.folder / "runs/tokens", folder)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = project.module("text")
    spec = sys.modules[project.name].load_trained(project.folder / "runs/tokens", "cpu")[1]
    for words in ("7 naïve 日本 words\n", "<|endoftext|>", "  two"):
        mine = text.encode(words, spec)
        assert words == "<|endoftext|>" or tokenizer(words)["input_ids"] == mine
        assert tokenizer.decode(mine) == words
    end = json.loads((to / "tokens.json").read_text())["end_of_text"]
    assert tokenizer.eos_token_id == end
    for name in ("config.json", "generation_config.json"):
        assert json.loads((folder / name).read_text())["eos_token_id"] == end


def test_a_downloaded_model_is_trained_on_text(project: Project, tmp_path: Path) -> None:
    """The recipe of docs/guides/fine-tuning.md; at a rate of next to nothing it stays the same."""
    (tmp_path / "corpus").mkdir()
    for number in range(40):
        (tmp_path / f"corpus/{number}.txt").write_text(f"{number} words of a corpus\n" * 40)
    to = project.folder / "of_base"
    project("tokens", "--text", str(tmp_path / "corpus"), "--to", str(to), "--vocabulary", "300")
    project("train", *TINY, "--data.path", str(to), "--name", "downloaded")
    base = tmp_path / "base-hf"
    project("export", "--name", "downloaded", "--to", str(base))
    answers = {"text": "tokenizer", "parallelism": "single", "checkpoint": "torch_save"}
    with Project.imported(tmp_path / "tuning", "of_tuning", **answers) as tuning:
        package = tuning.folder / "src/of_tuning"
        guide = ROOT / "docs/guides/fine-tuning.md"
        (package / "model.py").write_text(block_of(guide, "A causal language model"))
        infer = (package / "infer.py").read_text()
        assert infer.count("context:])[0, -1]") == 1
        (package / "infer.py").write_text(infer.replace("context:])[0", "context:]).logits[0"))
        shutil.copytree(base, tuning.folder / "base-hf")
        end = json.loads((base / "tokenizer_config.json").read_text())["eos_token"]
        words = ("--tokenizer", "base-hf/tokenizer.json", "--end-of-text", end)
        tuning("tokens", "--text", str(tmp_path / "corpus"), "--to", "data/tokens", *words)
        start = ("--preset", "tiny", "--device", "cpu", "--data.path", "data/tokens")
        start = (*start, "--data.context", "32", "--init-from", "base-hf", "--train.steps", "2")
        tuning("train", *start, "--name", "same", "--optim.learning-rate", "1e-30")
        tuning("train", *start, "--name", "tuned", "--optim.learning-rate", "1e-2")
        for name in ("same", "tuned"):
            tuning("infer", "--name", name, "--step", "best", "--prompt", "7", "--tokens", "4")
            tuning("export", "--name", name, "--step", "best", "--to", f"{name}-hf")
        before, same, tuned = (
            theirs(folder).state_dict()
            for folder in (base, tuning.folder / "same-hf", tuning.folder / "tuned-hf")
        )
        assert before.keys() == same.keys() == tuned.keys()
        assert all(torch.equal(before[name], same[name]) for name in before)
        assert not all(torch.equal(before[name], tuned[name]) for name in before)


def test_token_files_alone_have_no_tokenizer(
    project: Project, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (np.arange(5000) % 50).astype("<u2").tofile(tmp_path / "tokens.bin")
    words = ("--data.path", str(tmp_path), "--data.vocabulary", "50")
    project("train", *TINY, *words, "--name", "bare")
    project("export", "--name", "bare", "--to", "bare-hf")
    assert "no tokenizer" in capsys.readouterr().out
    folder = project.folder / "bare-hf"
    assert not [*folder.glob("tokenizer*")]
    assert "AutoTokenizer" not in (folder / "README.md").read_text()
    compare(project, project.folder / "runs/bare", folder)


def test_sharded_weights_of_two_ranks_are_written_whole(sharded: Project) -> None:
    port, other = free_ports(2)
    world = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(other), "WORLD_SIZE": "2"}
    world |= {"LOCAL_WORLD_SIZE": "2", "PYTHONPATH": str(sharded.folder / "src")}
    run, data = sharded.folder / "runs/default", sharded.folder / "text.txt"
    words = (*TINY, "--data.path", str(data), "--run-dir", str(run))
    command = [sys.executable, "-m", sharded.name, "train", *words]
    ranks = [{**world, "RANK": rank, "LOCAL_RANK": rank} for rank in "01"]
    run_together(command, 300, ranks)
    sharded("export", "--to", "hf")
    compare(sharded, run, sharded.folder / "hf")
    sharded("export", "--to", "model.pt2")
    inputs = torch.arange(12).view(2, 6)
    with torch.no_grad():
        wanted = sys.modules[sharded.name].load_trained(run, "cpu")[0](inputs)
    program = torch.export.load(sharded.folder / "model.pt2").module()
    torch.testing.assert_close(program(inputs), wanted, atol=1e-5, rtol=1e-5)
    back = sharded.folder / "runs/back"
    start = ("--init-from", str(sharded.folder / "hf"), "--init-strict", "--train.steps", "1")
    still = ("--optim.learning-rate", "1e-30", "--optim.weight-decay", "0")
    command = [*command[:4], *words, "--run-dir", str(back), *start, *still]
    run_together(command, 300, [{**rank, "MASTER_PORT": str(port)} for rank in ranks])
    first, second = (sharded.tensors(place) for place in (run, back))
    for name in filter(lambda name: name.startswith("model."), first):
        assert torch.equal(first[name], second[name]), name


def test_a_run_of_bytes_goes_on_after_the_answer_is_changed(
    project: Project, of_bytes: Project
) -> None:
    """What the recipe says: a render with text=tokenizer exports what one of bytes has trained."""
    of_bytes("train", *TINY)
    run = of_bytes.folder / "runs/default"
    project("export", "--run-dir", str(run), "--to", "bytes-hf")
    compare(project, run, project.folder / "bytes-hf")
    data = ("--data.path", str(of_bytes.folder / "text.txt"))
    project("train", *TINY, *data, "--run-dir", str(run), "--train.steps", "8")
    assert json.loads((run / "status.json").read_text())["step"] == 8
    assert "resuming from" in (run / "logs/train.log").read_text()


def test_a_model_of_transformers_is_written_by_its_own_method(tmp_path: Path) -> None:
    """With data of one's own, which know nothing of a tokenizer; and as a program."""
    answers = {"text": "tokenizer", "parallelism": "single", "checkpoint": "torch_save"}
    with Project.imported(tmp_path, "own_llama", **answers) as llama:
        package = llama.folder / "src/own_llama"
        shutil.copy(OWN / "hugging_face/data.py", package)
        shutil.copy(OWN / "llama/model.py", package)
        tiny = ("--preset", "tiny", "--device", "cpu", "--train.steps", "4", "--name", "llama")
        llama("train", *tiny)
        llama("export", "--name", "llama", "--to", "llama-hf")
        llama("export", "--name", "llama", "--to", "llama.pt2")
        ours, _, _ = sys.modules[llama.name].load_trained(llama.folder / "runs/llama", "cpu")
        model = theirs(llama.folder / "llama-hf")
        program = torch.export.load(llama.folder / "llama.pt2").module()
        inputs = {
            "input_ids": torch.randint(1, 17, (3, 9)),
            "attention_mask": torch.ones(3, 9, dtype=torch.int64),
        }
        with torch.no_grad():
            expected = ours(**inputs).logits
            torch.testing.assert_close(model(**inputs).logits, expected)
            torch.testing.assert_close(program(**inputs)["logits"], expected)
        assert not (llama.folder / "llama-hf/tokenizer.json").exists()
        card = (llama.folder / "llama-hf/README.md").read_text()
        assert "A language model of" in card and "None" not in card


def test_a_project_of_bytes_refuses_the_name(of_bytes: Project) -> None:
    """It would write a run of that name, which transformers cannot load."""
    for name in ("hf", "my-hf"):
        refused = of_bytes.refuses("export", "--to", name)
        assert "text=tokenizer" in refused and not (of_bytes.folder / name).exists()


def test_what_cannot_be_written_is_refused(
    averaged: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line, and nothing is left behind."""
    before = {*os.listdir(averaged.folder)}
    (averaged.folder / "there-hf").mkdir()
    assert "exists and is not overwritten" in averaged.refuses(
        "export", "--name", "ema", "--to", "there-hf"
    )
    (averaged.folder / "there-hf").rmdir()
    checkpoint = "runs/ema/checkpoints/step_00000006"
    refused = averaged.refuses("export", "--source", checkpoint, "--to", "new-hf")
    assert refused.startswith(f"{checkpoint} is not a run directory")
    gpt, model = averaged.module("gpt"), averaged.module("model")
    with monkeypatch.context() as patch:
        patch.setattr(model, "NamedGPT", gpt.GPT)
        refused = averaged.refuses("export", "--name", "ema", "--to", "new-hf")
    assert "GPT (model.py) has neither `to_transformers`" in refused
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (
            100,
            10_000,
        ):  # of a file, as on a full disk: of the tokenizer, of the weights
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            refused = averaged.refuses("export", "--name", "ema", "--to", "new-hf")
            assert refused.startswith("new-hf cannot be written: ")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert {*os.listdir(averaged.folder)} == before


def test_what_others_have_beside_it_stays(averaged: Project) -> None:
    """Hidden folders of the same name, and the rights that new files have."""
    (averaged.folder / ".beside-hf").mkdir()
    (averaged.folder / ".beside-hf/token").write_text("mine")
    averaged("export", "--name", "ema", "--to", "beside-hf")
    assert (averaged.folder / ".beside-hf/token").read_text() == "mine"
    (averaged.folder / "plain").touch()
    wanted = (averaged.folder / "plain").stat().st_mode
    files = [*(averaged.folder / "beside-hf").iterdir()]
    assert {file.stat().st_mode for file in files} == {wanted}


def test_other_names_are_other_targets(averaged: Project, of_bytes: Project) -> None:
    """Only hf, or what ends in it as a word; a project without it does not make a run of it."""
    averaged("export", "--name", "ema", "--to", "runs/rlhf")
    assert (averaged.folder / "runs/rlhf/checkpoints").is_dir()
    assert "text=tokenizer" in of_bytes.refuses("export", "--to", "hf")


def test_names_that_are_not_theirs_are_left_alone(project: Project) -> None:
    """Those of another model, and a head of its own."""
    rename = project.module("model").NamedGPT.from_transformers
    others = {name: torch.zeros(2, 2) for name in ("layers.0.self_attn.q_proj.weight", "mlp.up")}
    assert rename(others) == others
    mine = {"model.embed_tokens.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(2, 2)}
    assert rename(mine).keys() == {"embedding.weight"}
    mine["lm_head.weight"] = torch.ones(2, 2)
    assert rename(mine).keys() == {"embedding.weight", "lm_head.weight"}


def test_a_folder_that_is_not_whole_is_refused(averaged: Project, tmp_path: Path) -> None:
    """A shard that is missing, two models in one folder, and a run whose checkpoints are gone."""
    from safetensors.torch import load_file, save_file

    averaged("export", "--name", "ema", "--to", str(tmp_path / "hf"))
    tensors = load_file(tmp_path / "hf/model.safetensors")
    words = (*TINY, "--name", "never", "--init-from", str(tmp_path / "hf"))
    # Without the name that transformers gives to its file, or an index, either could be meant.
    (tmp_path / "hf/model.safetensors").rename(tmp_path / "hf/one.safetensors")
    save_file(tensors, tmp_path / "hf/other.safetensors")
    assert "several files in" in averaged.refuses("train", *words)
    (tmp_path / "hf/one.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(tensors, "model-00001-of-00002.safetensors")}
    (tmp_path / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    missing = averaged.refuses("train", *words)
    assert "model-00001-of-00002.safetensors" in missing and "\n" not in missing
    (tmp_path / "hf/model.safetensors.index.json").unlink()
    (tmp_path / "hf/other.safetensors").unlink()
    lacking = {name: value for name, value in tensors.items() if "k_proj" not in name}
    save_file(lacking, tmp_path / "hf/model.safetensors")
    assert "k_proj.weight" in averaged.refuses("train", *words)
    run = tmp_path / "run"
    averaged("train", *TINY, "--run-dir", str(run))
    averaged("export", "--run-dir", str(run), "--to", str(run / "best.safetensors"))
    shutil.rmtree(run / "checkpoints")
    assert "train first" in averaged.refuses("infer", "--run-dir", str(run))
