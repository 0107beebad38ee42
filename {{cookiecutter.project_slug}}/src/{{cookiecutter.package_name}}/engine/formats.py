# {% include "task/" ~ cookiecutter.task ~ "/formats.py" %}
