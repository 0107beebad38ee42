# {% include "checkpoint/read_" ~ ("files" if cookiecutter.checkpoint == "torch_save" else "parts") ~ ".py" %}
