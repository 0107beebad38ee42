# {% include "workflow/" ~ cookiecutter.workflow ~ "/__init__.py" %}
