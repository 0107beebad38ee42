# {% include "storage/" ~ cookiecutter.storage ~ "/storage.py" %}
