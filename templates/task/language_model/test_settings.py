# By default the text is the Python standard library. The folder of torch.nn is faster to read.
if getattr(config.DataConfig(), "path", "") is None:
    SETTINGS.setdefault("data.path", Path(torch.nn.__file__).parent)
# The keys of a batch of the data.py that the project was created with.
FIRST_BATCH = {"tokens"}
