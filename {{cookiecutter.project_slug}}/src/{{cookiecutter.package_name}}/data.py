# {% include "task/" ~ cookiecutter.task ~ "/data.py" %}
