if getattr(config.DataConfig(), "path", "") is None:  # a text that is sooner read than the default
    SETTINGS.setdefault("data.path", Path(torch.nn.__file__).parent)
