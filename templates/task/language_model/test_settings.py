SETTINGS: dict[str, Any] = {"data.path": Path(torch.nn.__file__).parent}  # text that is soon read
