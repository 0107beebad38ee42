# {% include "samples/" ~ ("stream" if cookiecutter.samples == "stream" else "map_style") ~ ".py" %}
