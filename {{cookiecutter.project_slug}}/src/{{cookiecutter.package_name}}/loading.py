# {% include "samples/" ~ ("stream" if cookiecutter.samples == "stream" else "numbered") ~ ".py" %}
