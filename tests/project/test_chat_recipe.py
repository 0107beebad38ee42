"""The recipe of a chat model: its files as they are, its commands as a user types them."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common import block_of
from tests.conftest import ROOT, Project, recipe, signal_session

PAGE = ROOT / "docs/guides/fine-tuning-a-chat-model.md"
FEW = ("--preset", "tiny", "--device", "cpu", "--train.micro-batch-size", "4")
ANSWERS = {"text": "tokenizer", "parallelism": "fsdp"}


def block(word: str) -> str:
    """The first block of the page that has a word in it."""
    return block_of(PAGE, word)


def words_of(start: str) -> list[str]:
    """The words of the page's command that begins so, without what starts Python or the ranks."""
    for bash in re.findall(r"```bash\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL):
        for line in bash.splitlines():
            command = line.removeprefix("python3 -m my_training_run ")
            command = command.removeprefix("./launch.sh -n 2 ")
            if command.startswith(start):
                return shlex.split(command)
    raise AssertionError(f"the page has no command {start}")


def replace_files(project: Project) -> None:
    """Give a project the files of the page."""
    package = project.folder / "src" / project.name
    (package / "data.py").write_text(block("class Chats"))
    (package / "model.py").write_text(block("get_peft_model"))
    (package / "infer.py").write_text(block("TextStreamer"))
    stopping = recipe("python", "class EarlyStopping")
    (package / "callbacks.py").write_text(f"{block('def callbacks')}\n\n{stopping}")
    with open(package / "optim.py", "a") as optim:
        optim.write(f"\n\n{block('lora_B')}")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a base that one project has pretrained, with the chat template."""
    folder = tmp_path_factory.mktemp("base_of_chats")
    answers = {**ANSWERS, "parallelism": "single", "checkpoint": "torch_save"}
    with Project.imported(folder, "base_of_chats", **answers) as project:
        project(*words_of("tokens"))
        few = ("--preset", "tiny", "--device", "cpu", "--train.steps", "2")
        project(*words_of("train --name base"), *few)
        project(*words_of("export --name base"))
        to = project.folder / "base-hf"
        (to / "chat_template.jinja").write_text(block("add_generation_prompt %}"))
        yield to


@pytest.fixture(scope="module")
def chat(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """The project with the files of the page, the base and conversations."""
    with Project.imported(tmp_path_factory.mktemp("chats"), "chats", **ANSWERS) as project:
        replace_files(project)
        shutil.copytree(base, project.folder / "base-hf")
        script = block("random.Random").replace("range(2000)", "range(100)")
        subprocess.run([sys.executable, "-c", script], cwd=project.folder, check=True)
        yield project


def tokenizer_of(base: Path, template: str = "") -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(base)
    if template:
        tokenizer.chat_template = template
    return tokenizer


def said(*texts: str) -> list[dict[str, str]]:
    """A conversation, begun by the user."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]


MARKED = (
    "{% for message in messages %}{{ message.role + '\\n' }}{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content + eos_token }}{% endgeneration %}"
    "{% else %}{{ message.content + eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant\\n' }}{% endif %}"
)


def test_the_assistants_tokens_are_learned_and_nothing_else(chat: Project, base: Path) -> None:
    """Token by token, the stop tokens included; by a template's marks they are the same."""
    data = chat.module("data")
    conversation = said("What is it?\n", "It is äöü.\nNo", "assistant\n", "So")
    tokenizer = tokenizer_of(base)
    tokens, learned = data.tokenize(tokenizer, conversation)
    assert tokenizer.decode(tokens) == tokenizer.apply_chat_template(conversation, tokenize=False)
    runs: list[list[int]] = [[]]
    for token, is_learned in zip(tokens, learned, strict=True):
        if is_learned:
            runs[-1].append(token)
        elif runs[-1]:
            runs.append([])
    end = tokenizer.eos_token
    assert [tokenizer.decode(run) for run in runs] == [f"It is äöü.\nNo{end}", f"So{end}"]
    marked = data.tokenize(tokenizer_of(base, MARKED), conversation)
    assert marked == (tokens, learned)
    # The targets are the tokens that follow.
    sample = data.make_sample(tokens, learned)
    assert sample["tokens"].tolist() == tokens[:-1]
    assert sample["targets"][sample["targets"] != -100].tolist() == runs[0] + runs[1]


def test_what_cannot_be_learned_is_refused(chat: Project, base: Path) -> None:
    """A template that rewrites history, as Qwen3's, or that does not end an answer."""
    data = chat.module("data")
    template = tokenizer_of(base).chat_template
    conversation = said("a", "<think>b</think>c", "d", "e")
    forgetful = template.replace(
        "message.content +",
        "(message.content if loop.last else message.content.split('</think>')[-1]) +",
    )
    with pytest.raises(chat.module("errors").UserError, match="rewrites earlier messages"):
        data.tokenize(tokenizer_of(base, forgetful), conversation)
    for endless in (template, MARKED):
        endless = endless.replace(" + eos_token", " + '.'")
        with pytest.raises(chat.module("errors").UserError, match="learn to stop"):
            data.tokenize(tokenizer_of(base, endless), conversation)
    for line in ("{", '{"text": "a"}', "[1]"):
        file = chat.folder / "bad.jsonl"
        file.write_text(f'{{"messages": []}}\n\n{line}\n')
        refused = chat.refuses("train", *FEW, "--name", "bad", "--data.path", "bad.jsonl")
        assert refused == 'bad.jsonl, line 3: wanted {"messages": [...]}'


def test_conversations_that_are_too_long_are_counted(
    chat: Project, caplog: pytest.LogCaptureFixture
) -> None:
    """One is cut, one has nothing to learn; batches are padded with what is not learned."""
    lines = [said("a", "b"), said("a b c d", "e " * 50), said("a " * 50, "b"), said("c", "d e f")]
    text = "".join(json.dumps({"messages": each}) + "\n" for each in lines)
    (chat.folder / "long.jsonl").write_text(text)
    settings = {"data.path": chat.folder / "long.jsonl", "data.base": chat.folder / "base-hf"}
    config = chat.module("config")
    changed = config.override(config.preset("tiny"), settings | {"data.context": 32})
    training, validation, _ = chat.module("data").build_datasets(changed)
    text = "1 of 4 conversations are left out: no answer begins within --data.context 32"
    assert text in caplog.text
    assert (len(training), len(validation)) == (2, 1)
    batch = training.collate([training[0], training[1]])
    assert batch["tokens"].shape == batch["targets"].shape == (2, 31)
    size = len(training[1]["tokens"])
    assert batch["targets"][1, :size].tolist() == training[1]["targets"].tolist()
    assert set(batch["targets"][1, size:].tolist()) == {-100}


def compare_exports(chat: Project, run: str) -> None:
    """The adapter and the merged folder have the logits of the run, in transformers and peft."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours, _, _ = sys.modules[chat.name].load_trained(chat.folder / "runs" / run, "cpu", "best")
    adapter, merged = chat.folder / "adapter-hf", chat.folder / "merged-hf"
    base = AutoModelForCausalLM.from_pretrained(chat.folder / "base-hf")
    inputs = torch.arange(80).view(2, 40)
    with torch.no_grad():
        expected = ours(input_ids=inputs).logits
        assert (expected - base(inputs).logits).abs().max() > 0.01
        loaded = AutoModelForCausalLM.from_pretrained(adapter)
        assert torch.equal(loaded(inputs).logits, expected)
        adapted = PeftModel.from_pretrained(base, adapter).eval()
        assert torch.equal(adapted(input_ids=inputs).logits, expected)
        whole = AutoModelForCausalLM.from_pretrained(merged)
        torch.testing.assert_close(whole(inputs).logits, expected, atol=1e-5, rtol=1e-5)
    assert not [name for name in whole.state_dict() if "lora" in name]
    for folder in (adapter, merged):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        assert tokenizer.chat_template == tokenizer_of(chat.folder / "base-hf").chat_template
    assert "library_name: peft" in (adapter / "README.md").read_text()
    assert "library_name: transformers" in (merged / "README.md").read_text()


def compare_program(chat: Project) -> None:
    """The program of the adapted model has the logits of the run, at other sizes than its own."""
    ours, _, _ = sys.modules[chat.name].load_trained(chat.folder / "runs/chat", "cpu", "best")
    program = torch.export.load(chat.folder / "chat.pt2").module()
    for shape in ((1, 9), (3, 20)):
        inputs = torch.randint(80, shape)
        with torch.no_grad():
            expected = ours(input_ids=inputs).logits
            found = program(input_ids=inputs)["logits"]
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def most_likely_answer(chat: Project, question: str, tokens: int) -> str:
    """What the best checkpoint answers, by transformers alone."""
    model, spec, _ = sys.modules[chat.name].load_trained(chat.folder / "runs/chat", "cpu", "best")
    tokenizer = tokenizer_of(spec.base)
    prompt = tokenizer.apply_chat_template(
        said(question), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    end = tokenizer.eos_token_id
    with torch.no_grad():
        result = model.generate(
            **prompt, max_new_tokens=tokens, eos_token_id=end, pad_token_id=end, do_sample=False
        )
    answer = result[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(answer, skip_special_tokens=True)


def test_it_trains_stops_and_is_exported(
    chat: Project, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """On one process; two rates; recomputed blocks; an adapter alone in checkpoints."""
    optimizer = chat.module("optim").build_optimizer
    model = chat.module("model")
    config = chat.module("config")
    settings = config.override(config.preset("tiny"), {"data.base": chat.folder / "base-hf"})
    spec = chat.module("data").Spec(chat.folder / "base-hf", "")
    groups = optimizer(settings.optim, model.build_model(settings, spec)).param_groups
    assert [group.get("rate_factor") for group in groups] == [None, 4.0]
    assert len(groups[0]["params"]) == len(groups[1]["params"]) > 0

    caplog.set_level("INFO")
    words = words_of("train --name chat")
    few = (*FEW, "--train.steps", "6", "--train.validate-every", "2", "--checkpoint.every", "2")
    chat(*words, *few)
    assert "the model is initialized before" not in caplog.text and "ignored" not in caplog.text
    assert "Python attributes" not in caplog.text
    tensors = chat.tensors(chat.folder / "runs/chat")
    lora = {name: value for name, value in tensors.items() if "lora_" in name}
    names = {name for name in tensors if name not in lora and not name.startswith("model.")}
    assert not names and all(value.isfinite().all() for value in lora.values())
    chat(*words_of("export --name chat --step best --to adapter-hf"))
    chat(*words_of("export --name chat --step best --to merged-hf"))
    compare_exports(chat, "chat")
    chat("export", "--name", "chat", "--step", "best", "--to", "chat.pt2")
    compare_program(chat)
    refused = chat.refuses("export", "--name", "chat", "--to", "a.safetensors", "--merge")
    assert refused.startswith("--merge needs a directory named hf")

    capfd.readouterr()
    words_for_infer = words_of("infer")
    chat(*words_for_infer, "--tokens", "20")
    question = words_for_infer[words_for_infer.index("--prompt") + 1]
    assert capfd.readouterr().out == f"{most_likely_answer(chat, question, 20)}\n"

    # The same numbers with recomputed blocks, and an early end where nothing improves.
    recomputed = ("--name", "recomputed", "--train.activation-checkpointing")
    chat(*words, *few, *recomputed)
    for name, value in chat.tensors(chat.folder / "runs/recomputed").items():
        torch.testing.assert_close(value, tensors[name], atol=1e-6, rtol=1e-5)
    still = ("--name", "still", "--optim.learning-rate", "1e-30", "--train.steps", "20")
    chat(*words, *few, *still)
    status = json.loads((chat.folder / "runs/still/status.json").read_text())
    assert (status["step"], status["status"]) == (8, "finished")
    assert "no validation was better" in status["reason"]


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_blocks_of_transformers_have_no_graph_breaks(
    chat: Project, kind: str, tmp_path: Path
) -> None:
    """Alone and recomputed, in the whole model, with adapters."""
    import transformers

    size: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    size |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 50, "head_dim": 16}
    getattr(transformers, f"{kind}Config")(**size).save_pretrained(tmp_path)
    model, compiling = chat.module("model"), chat.module("compile")
    spec = chat.module("data").Spec(tmp_path, "")
    settings = chat.module("config").preset("tiny")
    tokens = torch.arange(24).view(2, 12)
    batch = {"tokens": tokens, "targets": tokens}
    for recomputed in (False, True):
        network = model.build_model(settings, spec)
        if recomputed:
            compiling.checkpoint_activations(model.blocks(network))

        def loss(network: Any = network) -> Any:
            return model.compute_loss(network, batch).total

        torch._dynamo.reset()
        assert torch._dynamo.explain(loss)().graph_break_count == 0


def type_in(project: Project, line: str, **variables: str) -> subprocess.Popen[str]:
    """Start a line of the page, and what is added to it, in a shell."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": "src", **variables}
    return subprocess.Popen(
        ["bash", "-c", line],
        cwd=project.folder,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def test_whole_recipe_on_two_ranks(chat: Project) -> None:
    """Killed with its launcher and resumed to the bit; then exported, and asked."""
    steps = ("--train.steps", "24", "--train.validate-every", "8", "--checkpoint.every", "4")
    words = shlex.join(["./launch.sh", "-n", "2", *words_of("train --name chat"), *FEW, *steps])
    undisturbed = type_in(chat, f"{words} --name whole")
    output, _ = undisturbed.communicate(timeout=600)
    assert undisturbed.returncode == 0, output
    killed = type_in(chat, f"{words} --name killed")
    checkpoints = chat.folder / "runs/killed/checkpoints"
    try:
        while not (checkpoints / "step_00000004").exists():
            assert killed.poll() is None, killed.communicate()[0]
            time.sleep(0.05)
    finally:
        signal_session(killed, signal.SIGKILL)
        killed.communicate()
    assert not (checkpoints / "step_00000024").exists()
    resumed = type_in(chat, f"{words} --name killed")
    output, _ = resumed.communicate(timeout=600)
    assert resumed.returncode == 0 and "resumed at step" in output, output
    one, two = (chat.tensors(chat.folder / "runs" / name) for name in ("whole", "killed"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]), name
    for folder in ("adapter-hf", "merged-hf"):
        shutil.rmtree(chat.folder / folder, ignore_errors=True)
        chat(*words_of(f"export --name chat --step best --to {folder}"), "--name", "whole")
    compare_exports(chat, "whole")
    asked = type_in(chat, f"python3 -m {chat.name} infer --name whole --tokens 4")
    answers, _ = asked.communicate("a b\nc d e\n", timeout=300)
    assert asked.returncode == 0 and len(answers.strip().splitlines()) >= 2, answers


def test_whole_tests_of_the_project_pass(chat: Project) -> None:
    """They take conversations, which a `collate` pads, for no fault."""
    files = "tests/test_validation.py tests/test_data.py tests/test_training.py"
    chosen = "validation or test_data or stopped or average or mean_over"
    command = f"python3 -m pytest -q -p no:cacheprovider {files} -k '{chosen}'"
    tests = type_in(chat, command)
    output, _ = tests.communicate(timeout=600)
    assert tests.returncode == 0 and " passed" in output, output
