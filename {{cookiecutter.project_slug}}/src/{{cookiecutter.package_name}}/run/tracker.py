# {% include "tracker/" ~ ("none" if cookiecutter.tracker == "none" else "tracking") ~ ".py" %}
