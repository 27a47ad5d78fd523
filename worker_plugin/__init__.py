"""What runs on a worker: the model cache, the executor, and the Dask plugin that installs them."""
