# {% include "checkpoint/writer_" ~ cookiecutter.checkpoint ~ ".py" %}
