"""The console: a read-only web page that looks into live buffers.

`watch` reads the service as any client would, `episodes` and `overview` are pure, `viewing` loads
what a page shows, `app` serves pages.
"""
