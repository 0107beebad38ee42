"""Programs that try to break what the template promises; `make torture` runs all of them."""
