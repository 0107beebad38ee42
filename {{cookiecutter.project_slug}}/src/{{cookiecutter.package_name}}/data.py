# {% include "samples/mixed_data.py" if cookiecutter.samples == "mixture" else "task/" ~ cookiecutter.task ~ "/data.py" %}
