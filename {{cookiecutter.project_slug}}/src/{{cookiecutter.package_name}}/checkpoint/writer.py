# {% include "checkpoint/" ~ cookiecutter.checkpoint ~ ".py" %}
