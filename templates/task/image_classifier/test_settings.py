SETTINGS: dict[str, Any] = {}
