# {% include "task/" ~ cookiecutter.task ~ "/infer.py" %}
