"""The HTTP front end: `st2i serve`, the OpenAI images API over a Dask cluster. Extra `[serve]`."""
