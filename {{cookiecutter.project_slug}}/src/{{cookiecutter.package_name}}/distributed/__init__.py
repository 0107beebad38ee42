# {% include "parallelism/" ~ ("single" if cookiecutter.parallelism == "single" else "ranks" if cookiecutter.cluster == "none" else "cluster") ~ "/__init__.py" %}
