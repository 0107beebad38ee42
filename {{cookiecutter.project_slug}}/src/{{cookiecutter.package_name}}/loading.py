# {% include "samples/" ~ cookiecutter.samples ~ ".py" %}
