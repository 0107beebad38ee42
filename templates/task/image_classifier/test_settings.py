# The keys of a batch in the template's own data.
FIRST_BATCH = {"images", "labels"}
