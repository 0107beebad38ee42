# {% include "checkpoint/reader_" ~ ("torch_save" if cookiecutter.checkpoint == "torch_save" else "dcp") ~ ".py" %}
