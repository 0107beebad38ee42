# What a batch has in the data that this project began with.
FIRST_BATCH = {"images", "labels"}
