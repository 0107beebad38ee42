# The keys of a batch of the data.py that the project was created with.
FIRST_BATCH = {"images", "labels"}
