# {% include "task/" ~ cookiecutter.task ~ "/callbacks.py" %}
