# {% include "text/documents.py" if cookiecutter.task == "language_model" and cookiecutter.text == "tokenizer" else "task/" ~ cookiecutter.task ~ "/model.py" %}
