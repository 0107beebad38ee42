# {% include "parallelism/" ~ ("single" if cookiecutter.parallelism == "single" else "ranks") ~ "/__init__.py" %}
