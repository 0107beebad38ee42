# {% include "task/" ~ cookiecutter.task ~ "/optim.py" %}
