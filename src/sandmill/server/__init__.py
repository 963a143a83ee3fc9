"""Over the wire: sandboxes as a service. In: HTTP requests of the resource API. Out: objects, streams, and live sandboxes behind them.

Nothing is imported here: a client that only wants `sandmill.Sandbox` must not pay for a web server.
"""
