# {% include "checkpoint/" ~ cookiecutter.checkpoint.removesuffix("_async") ~ ".py" %}
