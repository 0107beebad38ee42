# {% include "storage/" ~ cookiecutter.storage ~ "/paths.py" %}
