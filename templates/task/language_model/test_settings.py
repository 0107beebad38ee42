# A smaller text than the default, which is faster to read.
if getattr(config.DataConfig(), "path", "") is None:
    SETTINGS.setdefault("data.path", Path(torch.nn.__file__).parent)
# The keys of a batch in the template's own data.
FIRST_BATCH = {"tokens"}
