"""What runs on the scheduler: tenants' accounting, policy, and the Dask plugin that installs them."""
