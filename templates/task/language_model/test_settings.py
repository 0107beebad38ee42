if getattr(config.DataConfig(), "path", "") is None:  # a text that is sooner read than the default
    SETTINGS.setdefault("data.path", Path(torch.nn.__file__).parent)
# What a batch has in the data that this project began with.
FIRST_BATCH = {"tokens"}
