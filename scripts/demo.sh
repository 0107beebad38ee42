#!/usr/bin/env bash
# What the template gives, in a minute: render the default answers, train, use what was trained.
# Typed again it continues where it was stopped. Words behind the first go to `train`.
set -euo pipefail

bin=${1:?usage: demo.sh DIRECTORY_OF_PYTHON [options of train]}
shift
cd "$(dirname "$0")/.."
project=demo/my-training-run
export PYTHONPATH=src

say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
python() { "$bin/python" -m my_training_run "$@"; }

if [ ! -d "$project" ]; then
    say "\$ cookiecutter . --no-input --output-dir demo"
    rm -rf demo/.rendering
    "$bin/cookiecutter" . --no-input --accept-hooks no --output-dir demo/.rendering
    mv demo/.rendering/my-training-run demo/ # whole or not at all
    rmdir demo/.rendering
fi
cd "$project"

say "\$ python -m my_training_run train${*:+ $*}"
python train "$@"
if ! grep -q '"status": "finished"' runs/default/status.json; then
    say "Stopped. Type make demo again: it continues from there."
    exit 1
fi

say "\$ python -m my_training_run infer --prompt 'def '"
python infer --prompt 'def ' --tokens 240

say "\$ python -m my_training_run verify"
python verify

say "What to do next"
cat <<TEXT
  The project is $project: begin with its README.md and
  src/my_training_run/train.py. To work in it:

    cd $project && . $bin/activate && export PYTHONPATH=src
    python -m my_training_run train --train.steps 2000          # train on, to better text
    python -m my_training_run train --name other --data.path ~/some/texts
    python -m my_training_run workflow                          # measured and judged, five stages
    ./launch.sh -n 2 train --name two                           # on two processes

  Your own: cookiecutter gh:org/cookiecutter-pytorch-training
TEXT
