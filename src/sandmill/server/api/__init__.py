"""HTTP in, HTTP out: routes, content negotiation, watches, streams. What the objects mean is decided a floor below."""
