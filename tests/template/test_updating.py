"""Life after the render: newer versions and other answers, by cruft and docs/guides/updates.md."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, bake, copy_template
from tests.project.test_life import TINY, finish, start
from tests.template.test_render import EVERYWHERE, PACKAGE, own, tree

VERSION = json.loads((ROOT / "cookiecutter.json").read_text("utf-8"))["_template_version"]
URL = "https://github.com/org/cookiecutter-pytorch-training"
# Git without the settings of whoever runs the tests; the commands of the environment's Python.
ENVIRONMENT = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
    "PYTHONDONTWRITEBYTECODE": "",  # it would hide what becomes of bytecode
    **{f"GIT_{who}_NAME": "Ada" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "ada@example.org" for who in ("AUTHOR", "COMMITTER")},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
}
COMMIT = "git add --all && git commit --quiet --message step"
CRUFT_STATE, STAMP = ".cruft.json", ".cookiecutter.json"


def bash(folder: Path, script: str, code: int = 0) -> str:
    """Its output, errors included; whatever it asks is answered by the default."""
    outcome = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        input="\n" * 20,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        timeout=300,
    )
    assert outcome.returncode == code, outcome.stdout
    return outcome.stdout


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path} has {old!r} {text.count(old)} times"
    path.write_text(text.replace(old, new), "utf-8")


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A repository: on `main` the template as it is, tagged, on `next` a version to come."""
    repository = copy_template(tmp_path / "template")
    bash(repository, f"git init --quiet --initial-branch main && {COMMIT} && git tag v{VERSION}")
    project = next(repository.glob("*cookiecutter.project_slug*"))
    edit(repository / "cookiecutter.json", f'"{VERSION}"', '"99.0.0"')
    # A filter that the older version lacks, in a file of the same size: both versions are at work
    # in one process, and neither Python's memory nor its bytecode may mix them up.
    edit(repository / "local_extensions.py", " py=py", " up=py")
    with (project / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\nSee {{ cookiecutter.project_name | up }}.\n")
    for path in (next(project.glob("src/*/run/directory.py")), *repository.rglob("infer.py")):
        path.write_text(path.read_text("utf-8") + "# A newer version.\n", "utf-8")
    bash(repository, f"git checkout --quiet -b next && {COMMIT} && git checkout --quiet main")
    return repository


def create(template: Path, folder: Path, **answers: str) -> Path:
    """Render by `cruft`, into a git repository."""
    command = f"cruft create {template} --no-input --extra-context '{json.dumps(answers)}'"
    folder.mkdir()
    assert "What to do next" in bash(folder, command)
    (project,) = folder.iterdir()
    bash(project, f"git init --quiet && {COMMIT}")
    return project


def changed(project: Path) -> set[str]:
    """Every file that differs from the last commit, or is new."""
    lines = bash(project, "git status --porcelain --untracked-files=all").splitlines()
    return {line[3:] for line in lines}


def rendered(project: Path) -> dict[str, bytes]:
    """What the template made, in its present state."""
    ours = bash(project, "git ls-files").splitlines()
    return {name: (project / name).read_bytes() for name in ours if name != CRUFT_STATE}


def train(project: Path, steps: int) -> str:
    command = [sys.executable, "-m", "my_training_run", "train", *TINY, "--name", "run"]
    with start(project, *command, "--train.steps", str(steps)) as process:
        return finish(process)


def test_a_newer_version_comes_and_edits_stay(template: Path, tmp_path: Path) -> None:
    project = create(template, tmp_path / "out")
    bash(project, "cruft check")
    model, infer = (project / PACKAGE / name for name in ("model.py", "infer.py"))
    edit(model, "hidden = F.relu(x)", "hidden = F.silu(x)")
    with (project / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(f'\n[tool.cruft]\nskip = ["{PACKAGE}/infer.py"]\n')
    bash(project, COMMIT)
    edited, skipped = model.read_bytes(), infer.read_bytes()

    bash(template, "git merge --quiet next")
    bash(project, "cruft check", code=1)
    output = bash(project, "cruft update --skip-apply-ask")
    assert "What to do next" not in output, "said of a temporary folder"
    assert changed(project) == {STAMP, CRUFT_STATE, "README.md", f"{PACKAGE}/run/directory.py"}
    bash(project, f"{COMMIT} && cruft check")
    assert (model.read_bytes(), infer.read_bytes()) == (edited, skipped)
    bash(tmp_path, f"cookiecutter {template.name} --no-input --output-dir newer")
    newer, found = tree(tmp_path / "newer/my-training-run"), rendered(project)
    differing = {name for name in newer | found if newer.get(name) != found.get(name)}
    assert differing == {"pyproject.toml", f"{PACKAGE}/model.py", f"{PACKAGE}/infer.py"}
    assert json.loads(found[STAMP])["_version"] == "99.0.0"


def test_a_project_in_a_larger_repository_is_updated(template: Path, tmp_path: Path) -> None:
    """Git skips without a word what a patch would change outside its folder."""
    whole = tmp_path / "whole"
    (whole / "team").mkdir(parents=True)
    (whole / "team/notes").write_text("of the team")
    bash(whole, f"git init --quiet && {COMMIT}")
    command = f"cruft create {template} --no-input --output-dir team"
    bash(whole, f"{command} && {COMMIT}")
    project = whole / "team/my-training-run"
    edit(project / PACKAGE / "model.py", "hidden = F.relu(x)\n", "hidden = F.relu(x)  # ours\n")
    bash(project, COMMIT)

    bash(template, "git merge --quiet next")
    bash(project, "cruft update --skip-apply-ask")
    expected = {STAMP, CRUFT_STATE, "README.md", f"{PACKAGE}/run/directory.py"}
    expected |= {f"{PACKAGE}/infer.py"}
    assert changed(project) == {f"team/my-training-run/{name}" for name in expected}
    bash(project, COMMIT)
    variables = json.dumps({"parallelism": "fsdp"})
    bash(project, f"cruft update --skip-apply-ask --variables-to-update '{variables}'")
    parallel = (project / PACKAGE / "distributed/parallel.py").read_text("utf-8")
    assert "fully_shard" in parallel
    assert "# ours" in (project / PACKAGE / "model.py").read_text("utf-8")
    bash(project, COMMIT)
    assert "finished at step 2" in train(project, 2)
    assert not changed(project), "runs are ignored"


def test_a_conflict_is_marked_and_the_rest_applied(template: Path, tmp_path: Path) -> None:
    project = create(template, tmp_path / "out")
    with (project / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("\nSee my paper.\n")
    bash(project, COMMIT)
    bash(template, "git merge --quiet next")
    bash(project, "cruft update --skip-apply-ask")
    text = (project / "README.md").read_text("utf-8")
    assert re.search('<{7} .*\nSee my paper\\.\n={7}\nSee "My Training Run"\\.\n>{7} ', text)
    expected = {STAMP, CRUFT_STATE, "README.md", f"{PACKAGE}/run/directory.py"}
    assert changed(project) == expected | {f"{PACKAGE}/infer.py"}


def test_another_answer_changes_its_files_and_the_run_goes_on(
    template: Path, tmp_path: Path
) -> None:
    answers = {"parallelism": "ddp", "checkpoint": "dcp", "tracker": "none"}
    project = create(template, tmp_path / "out", **answers)
    assert "finished at step 2" in train(project, 2)
    steps = 2
    updates = {"parallelism": "fsdp"}, {"checkpoint": "dcp_async", "tracker": "tensorboard"}
    for update in updates:
        answers |= update
        variables = json.dumps(update)
        bash(project, f"cruft update --skip-apply-ask --variables-to-update '{variables}'")
        files = changed(project)
        sources = {name for name in files if name.startswith("src/")}
        assert all(own(question) & sources for question in update)
        assert files <= EVERYWHERE.union({CRUFT_STATE}, *(own(question) for question in update))
        bash(project, COMMIT)
        assert rendered(project) == tree(bake(tmp_path / str(steps), **answers))
        steps += 2
        output = train(project, steps)
        assert "resuming from" in output and f"finished at step {steps}" in output
    assert (project / "runs/run/tensorboard").exists()

    for variables, problem in (
        ('{"package_name": "class"}', "package_name 'class' is a word of the Python language"),
        ('{"checkpoint": "tape"}', "tape provided for choice variable checkpoint"),
    ):
        command = f"cruft update --skip-apply-ask --variables-to-update '{variables}'"
        assert problem in bash(project, command, code=1)
        assert not changed(project)


def test_the_commands_of_the_page_work(template: Path, tmp_path: Path) -> None:
    """As they stand in docs/guides/updates.md, from a template that moves on in between."""
    page = (ROOT / "docs/guides/updates.md").read_text("utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 5 and "".join(blocks).count(URL) == 2
    project = tmp_path / "my-training-run"
    linked = bake(tmp_path / "linked", package_name="tree_sizes", author_name='O\'Neil "王"')
    bash(linked, f"git init --quiet && {COMMIT}")
    for block in blocks:
        script = block.replace("pip install cruft\n", "").replace(URL, str(template))
        script = re.sub(r"v\d+\.\d+\.\d+", f"v{VERSION}", script)
        folder = project if project.exists() else tmp_path
        if "cruft link" in script:
            folder = linked
        elif "cruft check" in script:
            bash(template, "git merge --quiet next")
        bash(folder, script)
        assert folder == tmp_path or "cruft check" in script or not changed(folder)
    stamp = json.loads((project / STAMP).read_text("utf-8"))
    assert (stamp["_version"], stamp["parallelism"]) == ("99.0.0", "fsdp")

    before = json.loads((linked / STAMP).read_text("utf-8"))
    bash(linked, "cruft update --skip-apply-ask")
    assert json.loads((linked / STAMP).read_text("utf-8")) == before | {"_version": "99.0.0"}
    assert changed(linked) >= {"README.md", "src/tree_sizes/run/directory.py"}
